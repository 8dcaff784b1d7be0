// buffers.h: copying and clearing whole vectors, and the sum of squares for a gradient's
// norm.
//
//   buffer_move             out = in; in = 0    in one pass, to hand gradients over
//   buffer_sum_of_squares   sum of in[i]^2, in double
//
// Arrays are (count), fp32. A task takes BUFFER_BLOCK elements. The partial sum of each
// block is added in the order of blocks, so the result does not depend on the number of
// threads. Limited by memory.
#ifndef ACCO_KERNELS_CPU_BUFFERS_H
#define ACCO_KERNELS_CPU_BUFFERS_H

#include <stddef.h>
#include <string.h>

#include "runtime/device.h"
#include "runtime/numbers.h"

enum { BUFFER_BLOCK = 32768 };

typedef struct BufferJob {
    float *out;       // (count) or NULL
    float *in;        // (count)
    double *partials; // (buffer_blocks(count))
    size_t count;
    bool clear;
} BufferJob;

static inline size_t buffer_blocks(size_t count) { return (count + BUFFER_BLOCK - 1) / BUFFER_BLOCK; }

static inline void buffer_move_task(void *context, int task, int thread) {
    (void)thread;
    const BufferJob *job = (const BufferJob *)context;
    size_t begin = (size_t)task * BUFFER_BLOCK, count = size_min(job->count - begin, BUFFER_BLOCK);
    if (job->out != NULL) { memcpy(job->out + begin, job->in + begin, count * sizeof(float)); }
    if (job->clear) { memset(job->in + begin, 0, count * sizeof(float)); }
}

// out = in unless out is NULL; then in = 0 if `clear`.
static inline void cpu_buffer_move(Stream *stream, float *out, float *in, size_t count, bool clear) {
    BufferJob job = {out, in, NULL, count, clear};
    thread_pool_run(stream->pool, (int)buffer_blocks(count), buffer_move_task, &job);
}

static inline void buffer_square_task(void *context, int task, int thread) {
    (void)thread;
    const BufferJob *job = (const BufferJob *)context;
    size_t begin = (size_t)task * BUFFER_BLOCK, count = size_min(job->count - begin, BUFFER_BLOCK);
    const float *in = job->in + begin;
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < count; i++) { sum += (double)in[i] * (double)in[i]; }
    job->partials[task] = sum;
}

// The sum of squares of in (count); partials (buffer_blocks(count)) is scratch.
static inline double cpu_buffer_sum_of_squares(Stream *stream, const float *in, size_t count,
                                               double *partials) {
    BufferJob job = {NULL, (float *)in, partials, count, false};
    thread_pool_run(stream->pool, (int)buffer_blocks(count), buffer_square_task, &job);
    double sum = 0;
    for (size_t i = 0; i < buffer_blocks(count); i++) { sum += partials[i]; }
    return sum;
}

#endif
