// buffers.h: copying whole vectors, and the sum of squares for a gradient's norm.
//
//   buffer_copy             out = in
//   buffer_sum_of_squares   sum of in[i]^2, in double
//   reals_from_floats       reals = in, rounded to the stream's precision
//
// Arrays are (count), fp32 except for reals. A task takes BUFFER_BLOCK elements. The partial
// sums of the blocks are added in order, so the result does not depend on the number of threads.
#pragma once

#include "kernels/cpu/vector_math.h"

enum { BUFFER_BLOCK = 32768 };

typedef struct BufferWork {
    Real *out;        // (count), in `precision`
    const float *in;  // (count)
    double *partials; // (buffer_blocks(count))
    size_t count;
    Precision precision;
} BufferWork;

static inline size_t buffer_blocks(size_t count) { return (count + BUFFER_BLOCK - 1) / BUFFER_BLOCK; }

REAL_LOOP void buffer_copy_block(const BufferWork *work, int block, Precision precision) {
    size_t begin = (size_t)block * BUFFER_BLOCK, count = size_min(work->count - begin, BUFFER_BLOCK);
    const float *in = work->in + begin;
    if (precision == PRECISION_FP32) {
        memcpy((void *)real_at(work->out, begin, precision), in, count * sizeof *in);
    } else {
        for (size_t i = 0; i < count; i++) { real_store(work->out, begin + i, in[i], precision); }
    }
}

REAL_KERNEL(buffer_copy_blocks, BufferWork, precision, buffer_copy_block, (int)buffer_blocks(work->count))

static inline void cpu_buffer_copy(Stream *stream, float *out, const float *in, size_t count) {
    BufferWork work = {.out = as_reals(out), .in = in, .count = count};
    buffer_copy_blocks(stream, &work);
}

static inline void cpu_reals_from_floats(Stream *stream, Real *out, const float *in, size_t count) {
    BufferWork work = {.out = out, .in = in, .count = count, .precision = stream->precision};
    buffer_copy_blocks(stream, &work);
}

static inline void buffer_square_task(void *context, int task, int thread) {
    (void)thread;
    const BufferWork *work = (const BufferWork *)context;
    size_t begin = (size_t)task * BUFFER_BLOCK, count = size_min(work->count - begin, BUFFER_BLOCK);
    const float *in = work->in + begin;
    double sums[SUM_LANES] = {0};
    LANE_LOOP(i, lane, count, { sums[lane] += (double)in[i] * (double)in[i]; });
    work->partials[task] = lanes_sum_doubles(sums);
}

// The sum of squares of in (count); partials (buffer_blocks(count)) is scratch.
static inline double cpu_buffer_sum_of_squares(Stream *stream, const float *in, size_t count,
                                               double *partials) {
    BufferWork work = {.in = in, .partials = partials, .count = count};
    thread_pool_run(stream->pool, (int)buffer_blocks(count), buffer_square_task, &work);
    double sum = 0;
    for (size_t i = 0; i < buffer_blocks(count); i++) { sum += partials[i]; }
    return sum;
}
