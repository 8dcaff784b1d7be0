// layernorm.h: LayerNorm, fused with the residual addition before it.
//
//   forward    x = residual_before + branch + branch_bias      (if there is a branch)
//              n = (x - mean(x)) / stddev(x), stddev = sqrt(variance + epsilon)
//              output = n * weight + bias
//   backward   g = d_output * weight
//              d_residual = [d_residual] + (g - mean(g) - n * mean(g * n)) / stddev
//              d_weight += sum of d_output * n
//              d_bias += sum of d_output
//              d_branch_bias += sum of d_residual
//
// x, output, branch and their gradients (rows, C) with rows = B T; weight and biases (C).
// Means are over columns, sums over rows.
//
// The plain loop goes row by row; it is limited by memory. Unfused, the residual addition
// would write its result and LayerNorm would read it again at once; here the row is
// normalised while it is in the first-level cache. In backward the finished d_residual is
// also the gradient of the branch, so its sum over rows, the gradient of branch_bias, is
// taken in the same pass. Forward keeps mean and 1/stddev. Tasks and the sums over rows:
// row_blocks.h.
#ifndef ACCO_KERNELS_CPU_LAYERNORM_H
#define ACCO_KERNELS_CPU_LAYERNORM_H

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "kernels/cpu/row_blocks.h"

typedef struct LayernormForward {
    Real *output;                // (rows, C)
    float *statistics;           // (rows, 2): mean, 1/stddev
    Real *residual;              // (rows, C): x; written if there is a branch, else only read
    const Real *residual_before; // (rows, C)
    const Real *branch;          // (rows, C) or NULL
    const Real *branch_bias;     // (C)
    const Real *weight, *bias;   // (C)
    float epsilon;
    int rows, channels;
} LayernormForward;

static inline void layernorm_forward_row(const LayernormForward *work, int row) {
    int C = work->channels;
    float *x = real_floats(work->residual) + (size_t)row * (size_t)C;
    float *output = real_floats(work->output) + (size_t)row * (size_t)C;
    const float *weight = real_floats_const(work->weight), *bias = real_floats_const(work->bias);
    if (work->branch != NULL) {
        const float *before = real_floats_const(work->residual_before) + (size_t)row * (size_t)C;
        const float *branch = real_floats_const(work->branch) + (size_t)row * (size_t)C;
        const float *branch_bias = real_floats_const(work->branch_bias);
        for (int c = 0; c < C; c++) { x[c] = before[c] + (branch[c] + branch_bias[c]); }
    }
    float sum = 0.0f, squares = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int c = 0; c < C; c++) { sum += x[c]; }
    float mean = sum / (float)C;
#pragma omp simd reduction(+ : squares)
    for (int c = 0; c < C; c++) { squares += (x[c] - mean) * (x[c] - mean); }
    float scale = 1.0f / sqrtf(squares / (float)C + work->epsilon);
    for (int c = 0; c < C; c++) { output[c] = (x[c] - mean) * scale * weight[c] + bias[c]; }
    work->statistics[2 * (size_t)row] = mean;
    work->statistics[2 * (size_t)row + 1] = scale;
}

static inline void layernorm_forward_task(void *context, int task, int thread) {
    (void)thread;
    const LayernormForward *work = (const LayernormForward *)context;
    for (int row = row_block_begin(task, work->rows); row < row_block_begin(task + 1, work->rows); row++) {
        layernorm_forward_row(work, row);
    }
}

static inline void cpu_layernorm_forward(Stream *stream, const LayernormForward *work) {
    thread_pool_run(stream->pool, row_block_count(work->rows), layernorm_forward_task, (void *)work);
}

typedef struct LayernormBackward {
    Real *d_residual;                         // (rows, C); the result
    bool accumulate;                          // d_residual += instead of =
    float *d_weight, *d_bias, *d_branch_bias; // (C), +=; d_branch_bias may be NULL
    float *partials;                          // workspace (row_partials_floats(3C))
    const Real *d_output;                     // (rows, C)
    const Real *residual;                     // (rows, C), as forward left it
    const float *statistics;                  // (rows, 2)
    const Real *weight;                       // (C)
    int rows, channels;
} LayernormBackward;

// Adds the row to the partial sums (3, C): d_weight, d_bias, d_branch_bias.
static inline void layernorm_backward_row(const LayernormBackward *work, int row, float *partials) {
    int C = work->channels;
    const float *x = real_floats_const(work->residual) + (size_t)row * (size_t)C;
    const float *d_output = real_floats_const(work->d_output) + (size_t)row * (size_t)C;
    const float *weight = real_floats_const(work->weight);
    float *d_residual = real_floats(work->d_residual) + (size_t)row * (size_t)C;
    float *d_weight = partials, *d_bias = partials + C, *d_branch = partials + 2 * (size_t)C;
    float mean = work->statistics[2 * (size_t)row], scale = work->statistics[2 * (size_t)row + 1];
    float sum = 0.0f, product = 0.0f;
#pragma omp simd reduction(+ : sum, product)
    for (int c = 0; c < C; c++) {
        float n = (x[c] - mean) * scale, g = d_output[c] * weight[c];
        sum += g;
        product += g * n;
        d_weight[c] += d_output[c] * n;
        d_bias[c] += d_output[c];
    }
    sum /= (float)C;
    product /= (float)C;
    if (!work->accumulate) { memset(d_residual, 0, (size_t)C * sizeof *d_residual); }
#pragma omp simd
    for (int c = 0; c < C; c++) {
        float n = (x[c] - mean) * scale, g = d_output[c] * weight[c];
        float total = d_residual[c] + scale * (g - sum - n * product);
        d_residual[c] = total;
        d_branch[c] += total;
    }
}

static inline void layernorm_backward_task(void *context, int task, int thread) {
    (void)thread;
    const LayernormBackward *work = (const LayernormBackward *)context;
    size_t width = 3 * (size_t)work->channels;
    float *partials = work->partials + (size_t)task * width;
    memset(partials, 0, width * sizeof *partials);
    for (int row = row_block_begin(task, work->rows); row < row_block_begin(task + 1, work->rows); row++) {
        layernorm_backward_row(work, row, partials);
    }
}

static inline void cpu_layernorm_backward(Stream *stream, const LayernormBackward *work) {
    int blocks = row_block_count(work->rows), C = work->channels;
    thread_pool_run(stream->pool, blocks, layernorm_backward_task, (void *)work);
    column_sums_add(stream, work->d_weight, work->partials, blocks, 3 * C, C);
    column_sums_add(stream, work->d_bias, work->partials + C, blocks, 3 * C, C);
    if (work->d_branch_bias != NULL) {
        column_sums_add(stream, work->d_branch_bias, work->partials + 2 * (size_t)C, blocks, 3 * C, C);
    }
}

#endif
