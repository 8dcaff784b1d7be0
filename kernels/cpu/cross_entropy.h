// cross_entropy.h: loss of a chunk of logits, and its gradient in place.
//
//   p = softmax(logits[row])
//   losses[row] = -log p[target]
//   logits[row] = gradient_scale * (p - one_hot(target))
//
// logits (rows, V), targets (rows), losses (rows). For each row: the maximum; exponentials of the
// differences to it, and their sum; scaling. A row (200 KB at a vocabulary of 50257) stays in the
// second-level cache for its three passes. In fp32 the exponentials overwrite the logits first;
// in bf16 they would be rounded twice, so they are computed again. A task takes
// CROSS_ENTROPY_ROWS rows.
#pragma once

#include "kernels/cpu/row_blocks.h"
#include "kernels/cpu/vector_math.h"

enum { CROSS_ENTROPY_ROWS = 8 }; // rows of one task

typedef struct CrossEntropy {
    Real *logits;                 // (rows, V)
    float *losses;                // (rows)
    const int32_t *targets;       // (rows); negative: the row does not count
    int rows, vocabulary, stride; // on the CPU the stride is the vocabulary
    float gradient_scale;         // 0: only the loss
    Precision precision;
} CrossEntropy;

REAL_LOOP void cross_entropy_row(const CrossEntropy *work, int row, Precision precision) {
    const bool kept = precision == PRECISION_FP32; // the exponentials
    size_t V = (size_t)work->vocabulary;
    int target = work->targets[row];
    Real *logits = real_at(work->logits, (size_t)row * V, precision);
    if (target < 0) {
        work->losses[row] = 0.0f;
        if (work->gradient_scale != 0.0f) { memset((void *)logits, 0, V * precision_bytes(precision)); }
        return;
    }
    size_t place = (size_t)target;
    assert(place < V);
    // A NaN is skipped by the maximum; it comes back through the sum of exponentials.
    float chosen = real_load(logits, place, precision), maximum = row_maximum(logits, V, precision);
    float sums[SUM_LANES] = {0};
    LANE_LOOP(v, lane, V, {
        float e = vector_exp(real_load(logits, v, precision) - maximum);
        if (kept) { real_store(logits, v, e, precision); }
        sums[lane] += e;
    });
    float sum = lanes_sum(sums);
    // The difference first: it is exact where it is small.
    work->losses[row] = logf(sum) + (maximum - chosen);
    if (work->gradient_scale == 0.0f) { return; }
    float scale = work->gradient_scale / sum;
    for (size_t v = 0; v < V; v++) {
        float loaded = real_load(logits, v, precision);
        real_store(logits, v, (kept ? loaded : vector_exp(loaded - maximum)) * scale, precision);
    }
    float p = kept ? real_load(logits, place, precision) : vector_exp(chosen - maximum) * scale;
    real_store(logits, place, p - work->gradient_scale, precision);
}

REAL_LOOP void cross_entropy_rows(const CrossEntropy *work, int task, Precision precision) {
    int begin = task * CROSS_ENTROPY_ROWS, end = int_min(begin + CROSS_ENTROPY_ROWS, work->rows);
    assert(work->stride == work->vocabulary);
    for (int row = begin; row < end; row++) { cross_entropy_row(work, row, precision); }
}

REAL_KERNEL(cpu_cross_entropy, CrossEntropy, precision, cross_entropy_rows,
            (work->rows + CROSS_ENTROPY_ROWS - 1) / CROSS_ENTROPY_ROWS)
