// reals.h: the elements of arrays in the stream's precision, and of AdamW's moments in theirs,
// for kernels on CPUs.
//
// A loop is written once, with real_load and real_store, in a function marked REAL_LOOP that
// takes the precision. Its caller calls it once for each format, with a constant:
//
//   REAL_LOOP void double_row(Real *row, int count, Precision precision) {
//       for (int i = 0; i < count; i++) { real_store(row, i, 2 * real_load(row, i, precision), precision); }
//   }
//   ...
//   REAL_CALL(stream->precision, double_row, row, count);
//
// So the compiler makes a loop for each format and vectorises it, and in fp32 it is a loop
// over floats. Arithmetic is fp32; what is stored as bf16 is rounded to nearest even.
//
// REAL_TASK makes such a loop a task of a thread pool.
#ifndef ACCO_KERNELS_CPU_REALS_H
#define ACCO_KERNELS_CPU_REALS_H

#include "kernels/wire.h"
#include "runtime/precision.h"

#define REAL_LOOP static inline __attribute__((always_inline))
#define REAL_CALL(precision, function, ...) \
    ((precision) == PRECISION_FP32 ? function(__VA_ARGS__, PRECISION_FP32) \
                                   : function(__VA_ARGS__, PRECISION_BF16))

// Defines LOOP_task(context, task, thread), which calls LOOP(work, task, precision):
// context is a Work, whose member `format` is the precision.
#define REAL_TASK(Work, format, loop) \
    static inline void loop##_task(void *context, int task, int thread) { \
        const Work *work = (const Work *)context; \
        (void)thread; \
        REAL_CALL(work->format, loop, work, task); \
    }

REAL_LOOP float real_load(const Real *base, size_t i, Precision precision) {
    return precision == PRECISION_FP32 ? ((const float *)(const void *)base)[i]
                                       : bf16_to_float(((const uint16_t *)(const void *)base)[i]);
}

REAL_LOOP void real_store(Real *base, size_t i, float value, Precision precision) {
    if (precision == PRECISION_FP32) {
        ((float *)(void *)base)[i] = value;
    } else {
        ((uint16_t *)(void *)base)[i] = bf16_from_float(value);
    }
}

#endif
