// cross_entropy.h: loss of a chunk of logits, and its gradient in place.
//
//   p = softmax(logits[row])
//   losses[row] = -log p[target]
//   logits[row] = gradient_scale * (p - one_hot(target))
//
// logits (rows, V), targets (rows), losses (rows). The plain loop, for each row: the
// maximum; exponentials of the differences to it, and their sum; scaling. A row (200 KB
// at a vocabulary of 50257) stays in the second-level cache for its three passes, so
// memory sees one read and one write of the logits; the limit is memory, and next to it
// the exponential. Probabilities have no array of their own: the gradient overwrites the
// logits. A task takes CROSS_ENTROPY_ROWS rows.
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
    const int32_t *targets; // (rows); negative: the row does not count
    int rows, vocabulary;
    float gradient_scale; // 0: only the loss
} CrossEntropy;

static inline void cross_entropy_row(const CrossEntropy *work, int row) {
    int V = work->vocabulary, target = work->targets[row];
    float *logits = work->logits + (size_t)row * (size_t)V;
    if (target < 0) {
        work->losses[row] = 0.0f;
        if (work->gradient_scale != 0.0f) { memset(logits, 0, (size_t)V * sizeof *logits); }
        return;
    }
    assert(target < V);
    float maximum = -INFINITY, chosen = logits[target], sum = 0.0f;
    // A NaN is skipped here; it comes back through the sum of exponentials.
#pragma omp simd reduction(max : maximum)
    for (int v = 0; v < V; v++) { maximum = logits[v] > maximum ? logits[v] : maximum; }
#pragma omp simd reduction(+ : sum)
    for (int v = 0; v < V; v++) {
        float e = vector_exp(logits[v] - maximum);
        logits[v] = e;
        sum += e;
    }
    // The difference first: it is exact where it is small.
    work->losses[row] = logf(sum) + (maximum - chosen);
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
    CrossEntropy work = {logits, losses, targets, rows, vocabulary, gradient_scale};
    thread_pool_run(stream->pool, (rows + CROSS_ENTROPY_ROWS - 1) / CROSS_ENTROPY_ROWS, cross_entropy_task,
                    &work);
}

#endif
