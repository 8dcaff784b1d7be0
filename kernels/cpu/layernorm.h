// layernorm.h: LayerNorm or, without a bias, RMSNorm, fused with the residual addition before it.
//
//   forward    x = residual_before + branch + branch_bias      (if there is a branch)
//              n = (x - mean(x)) / stddev(x), stddev = sqrt(variance + epsilon)
//              output = n * weight + bias
//              RMSNorm: n = x / sqrt(mean(x²) + epsilon), output = n * weight
//   backward   g = d_output * weight
//              d_residual = [d_residual] + (g - mean(g) - n * mean(g * n)) / stddev
//              RMSNorm: without mean(g), and its root in place of stddev
//              d_weight += sum of d_output * n
//              d_bias += sum of d_output
//              d_branch_bias += sum of d_residual
//
// x, output, branch and their gradients (rows, C) with rows = B T; weight and biases (C).
// Means are over columns, sums over rows.
//
// Limited by memory: unfused, the residual addition would write its result and LayerNorm would
// read it again at once. The finished d_residual is also the gradient of the branch, so its sum
// over rows, the gradient of branch_bias, is taken in the same pass. Forward keeps mean and
// 1/stddev. Tasks and the sums over rows: row_blocks.h.
#pragma once

#include "kernels/cpu/row_blocks.h"
#include "kernels/cpu/vector_math.h"

typedef struct Layernorm {
    float *statistics;         // (rows, 2): mean or 0, 1/stddev; written by forward, read by backward
    Real *residual;            // (rows, C): x; forward writes it if there is a branch
    const Real *weight, *bias; // (C); bias NULL: RMSNorm
    float epsilon;
    int rows, channels;
    Precision precision;
    // Forward
    Real *output;                // (rows, C)
    const Real *residual_before; // (rows, C)
    const Real *branch;          // (rows, C) or NULL
    const Real *branch_bias;     // (C) or NULL
    // Backward
    Real *d_residual; // (rows, C); the result
    bool accumulate;  // d_residual += instead of =
    // d_bias NULL: an RMSNorm; a frozen bias has an array, too. d_branch_bias may be NULL.
    float *d_weight, *d_bias, *d_branch_bias; // (C), +=
    float *partials;                          // workspace (row_partials_floats(3C))
    const Real *d_output;                     // (rows, C)
} Layernorm;

// centres: it is a LayerNorm. A constant, so that the loops of one kind know nothing of the other.
REAL_LOOP void layernorm_forward_kind(const Layernorm *work, int block, Precision precision, bool centres) {
    size_t C = (size_t)work->channels;
    for (int row = row_block_begin(block, work->rows); row < row_block_begin(block + 1, work->rows); row++) {
        size_t place = (size_t)row * C;
        Real *x = real_at(work->residual, place, precision),
             *output = real_at(work->output, place, precision);
        const Real *weight = work->weight, *bias = work->bias;
        if (work->branch != NULL) {
            const Real *before = real_at_const(work->residual_before, place, precision),
                       *branch = real_at_const(work->branch, place, precision),
                       *branch_bias = work->branch_bias;
            for (size_t c = 0; c < C; c++) {
                float added = real_load(branch, c, precision);
                added = branch_bias != NULL ? added + real_load(branch_bias, c, precision) : added;
                real_store(x, c, real_load(before, c, precision) + added, precision);
            }
        }
        float sums[SUM_LANES] = {0}, squares[SUM_LANES] = {0};
        if (centres) {
            LANE_LOOP(c, lane, C, { sums[lane] += real_load(x, c, precision); });
        }
        float mean = lanes_sum(sums) / (float)C;
        LANE_LOOP(c, lane, C, {
            float distance = real_load(x, c, precision) - mean;
            squares[lane] = multiply_add(distance, distance, squares[lane]);
        });
        float scale = 1.0f / sqrtf(lanes_sum(squares) / (float)C + work->epsilon);
        for (size_t c = 0; c < C; c++) {
            float n = (real_load(x, c, precision) - mean) * scale;
            float w = real_load(weight, c, precision);
            real_store(output, c, centres ? multiply_add(n, w, real_load(bias, c, precision)) : n * w,
                       precision);
        }
        work->statistics[2 * (size_t)row] = mean;
        work->statistics[2 * (size_t)row + 1] = scale;
    }
}

REAL_LOOP void layernorm_forward_rows(const Layernorm *work, int block, Precision precision) {
    if (work->bias != NULL) {
        layernorm_forward_kind(work, block, precision, true);
    } else {
        layernorm_forward_kind(work, block, precision, false);
    }
}

REAL_KERNEL(cpu_layernorm_forward, Layernorm, precision, layernorm_forward_rows, row_block_count(work->rows))

REAL_LOOP void layernorm_backward_rows(const Layernorm *work, int block, Precision precision) {
    size_t C = (size_t)work->channels;
    float *d_weight = work->partials + (size_t)block * 3 * C, *d_bias = d_weight + C, *d_branch = d_bias + C;
    memset(d_weight, 0, 3 * C * sizeof *d_weight);
    for (int row = row_block_begin(block, work->rows); row < row_block_begin(block + 1, work->rows); row++) {
        size_t place = (size_t)row * C;
        const Real *x = real_at_const(work->residual, place, precision),
                   *d_output = real_at_const(work->d_output, place, precision), *weight = work->weight;
        Real *d_residual = real_at(work->d_residual, place, precision);
        float mean = work->statistics[2 * (size_t)row], scale = work->statistics[2 * (size_t)row + 1];
        float sums[SUM_LANES] = {0}, products[SUM_LANES] = {0};
        LANE_LOOP(c, lane, C, {
            float d = real_load(d_output, c, precision), n = (real_load(x, c, precision) - mean) * scale,
                  g = d * real_load(weight, c, precision);
            sums[lane] += g;
            products[lane] = multiply_add(g, n, products[lane]);
            d_weight[c] = multiply_add(d, n, d_weight[c]);
            d_bias[c] += d;
        });
        float mean_g = work->d_bias != NULL ? lanes_sum(sums) / (float)C : 0.0f,
              mean_product = lanes_sum(products) / (float)C;
        if (!work->accumulate) { memset((void *)d_residual, 0, C * precision_bytes(precision)); }
#pragma omp simd
        for (size_t c = 0; c < C; c++) {
            float n = (real_load(x, c, precision) - mean) * scale,
                  g = real_load(d_output, c, precision) * real_load(weight, c, precision);
            float total = real_load(d_residual, c, precision) + scale * (g - mean_g - n * mean_product);
            real_store(d_residual, c, total, precision);
            d_branch[c] += total;
        }
    }
}

REAL_KERNEL(layernorm_backward_blocks, Layernorm, precision, layernorm_backward_rows,
            row_block_count(work->rows))

static inline void cpu_layernorm_backward(Stream *stream, const Layernorm *work) {
    int blocks = row_block_count(work->rows), C = work->channels;
    layernorm_backward_blocks(stream, work);
    column_sums_add(stream, work->d_weight, work->partials, blocks, 3 * C, C);
    if (work->d_bias != NULL) { column_sums_add(stream, work->d_bias, work->partials + C, blocks, 3 * C, C); }
    if (work->d_branch_bias != NULL) {
        column_sums_add(stream, work->d_branch_bias, work->partials + 2 * (size_t)C, blocks, 3 * C, C);
    }
}
