// cross_entropy.h: softmax, loss and gradient of a chunk of logits in one visit of each
// row, in place.
//
// A row of logits (200 KB at a vocabulary of 50257) stays in the second-level cache for
// its three passes: maximum; exponentials and their sum; scaling into the gradient.
// Probabilities are never stored beside the logits: the gradient overwrites them.
#ifndef ACCO_KERNELS_CPU_CROSS_ENTROPY_H
#define ACCO_KERNELS_CPU_CROSS_ENTROPY_H

#include <assert.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu/row_blocks.h"
#include "kernels/cpu/vector_math.h"

enum { CROSS_ENTROPY_ROWS = 8 }; // rows of one task

typedef struct CrossEntropy {
    float *logits;          // (rows, V)
    float *losses;          // (rows)
    const int32_t *targets; // (rows); negative: does not count
    int rows, vocabulary;
    float gradient_scale; // 0: the loss only
} CrossEntropy;

static inline float cross_entropy_maximum(const float *logits, int V) {
    float maximum = -INFINITY;
#pragma omp simd reduction(max : maximum)
    for (int v = 0; v < V; v++) { maximum = logits[v] > maximum ? logits[v] : maximum; }
    return maximum; // a NaN is passed over here and comes back through the sum of exponentials
}

static inline void cross_entropy_row(const CrossEntropy *work, int row) {
    int V = work->vocabulary, target = work->targets[row];
    float *logits = work->logits + (size_t)row * (size_t)V;
    if (target < 0) {
        work->losses[row] = 0.0f;
        if (work->gradient_scale != 0.0f) { memset(logits, 0, (size_t)V * sizeof *logits); }
        return;
    }
    assert(target < V);
    float maximum = cross_entropy_maximum(logits, V), chosen = logits[target], sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int v = 0; v < V; v++) {
        float e = vector_exp(logits[v] - maximum);
        logits[v] = e;
        sum += e;
    }
    work->losses[row] = logf(sum) + (maximum - chosen); // the difference first: it is exact where it is small
    if (work->gradient_scale == 0.0f) { return; }
    float scale = work->gradient_scale / sum;
    for (int v = 0; v < V; v++) { logits[v] *= scale; }
    logits[target] -= work->gradient_scale;
}

static inline void cross_entropy_task(void *context, int task, int thread) {
    (void)thread;
    const CrossEntropy *work = (const CrossEntropy *)context;
    int begin = task * CROSS_ENTROPY_ROWS,
        end = begin + CROSS_ENTROPY_ROWS < work->rows ? begin + CROSS_ENTROPY_ROWS : work->rows;
    for (int row = begin; row < end; row++) { cross_entropy_row(work, row); }
}

static inline void cpu_cross_entropy(Stream *stream, float *logits, float *losses, const int32_t *targets,
                                     int rows, int vocabulary, float gradient_scale) {
    CrossEntropy work;
    work.logits = logits;
    work.losses = losses;
    work.targets = targets;
    work.rows = rows;
    work.vocabulary = vocabulary;
    work.gradient_scale = gradient_scale;
    thread_pool_run(stream->pool, (rows + CROSS_ENTROPY_ROWS - 1) / CROSS_ENTROPY_ROWS, cross_entropy_task,
                    &work);
}

#endif
