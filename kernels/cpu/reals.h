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
// REAL_KERNEL makes such a loop an operation that threads share.
#pragma once

#include "kernels/wire.h"
#include "runtime/device.h"

#define REAL_LOOP static inline __attribute__((always_inline))
#define REAL_CALL(precision, function, ...) \
    ((precision) == PRECISION_FP32 ? function(__VA_ARGS__, PRECISION_FP32) \
                                   : function(__VA_ARGS__, PRECISION_BF16))

// Defines OPERATION(stream, work), which calls LOOP(work, task, precision) for every task on
// the stream's threads. work is a Work, whose member `format` is the precision; `tasks`, how
// many there are, may use it.
#define REAL_KERNEL(operation, Work, format, loop, tasks) \
    static inline void loop##_task(void *context, int task, int thread) { \
        const Work *work = (const Work *)context; \
        (void)thread; \
        REAL_CALL(work->format, loop, work, task); \
    } \
    static inline void operation(Stream *stream, const Work *work) { \
        thread_pool_run(stream->pool, tasks, loop##_task, (void *)work); \
    }

REAL_LOOP float real_load(const Real *base, size_t i, Precision precision) {
    return precision == PRECISION_FP32 ? ((const float *)base)[i]
                                       : bf16_to_float(((const uint16_t *)base)[i]);
}

REAL_LOOP void real_store(Real *base, size_t i, float value, Precision precision) {
    if (precision == PRECISION_FP32) {
        ((float *)base)[i] = value;
    } else {
        ((uint16_t *)base)[i] = bf16_from_float(value);
    }
}
