// gelu.h: bias and GELU (tanh form, "gelu_new") of the MLP in one pass.
//
//   forward    x = saved + bias;  output = x s(x);  saved = GELU'(x)
//   backward   gradient *= saved;  d_bias += sum over rows of gradient
//
// All arrays (rows, columns) with rows = B T and columns = F; bias, d_bias (F).
//
// 0.5 x (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3) equals x s with s =
// logistic(2u), which loses no digits for negative u. The derivative is s + x s (1 - s)
// 2u'. Forward, which has s at hand, stores the derivative over its own input; so
// backward is one multiplication and no exponential. Tasks and the sums over rows: row_blocks.h.
#pragma once

#include "kernels/cpu/row_blocks.h"
#include "kernels/cpu/vector_math.h"

typedef struct Gelu {
    Real *output;     // forward (rows, columns)
    Real *saved;      // (rows, columns): in forward the product without bias; then the derivative
    Real *gradient;   // backward, rows gradient_stride apart: in, d_output; out, the gradient of the product
    const Real *bias; // (columns)
    float *d_bias;    // backward (columns)
    float *partials;  // backward (row_partials_floats(columns))
    int rows, columns, gradient_stride;
    Precision precision;
} Gelu;

REAL_LOOP void gelu_forward_rows(const Gelu *work, int block, Precision precision) {
    const float twice_root = 1.59576912f; // 2 sqrt(2/pi)
    size_t columns = (size_t)work->columns;
    for (int row = row_block_begin(block, work->rows); row < row_block_begin(block + 1, work->rows); row++) {
        Real *output = real_at(work->output, (size_t)row * columns, precision),
             *saved = real_at(work->saved, (size_t)row * columns, precision);
        const Real *bias = work->bias;
#pragma omp simd
        for (size_t c = 0; c < columns; c++) {
            float x = real_load(saved, c, precision) + real_load(bias, c, precision), complement;
            float square = x * x, steepness = twice_root * multiply_add(0.134145f, square, 1.0f);
            float s = vector_logistic(twice_root * x * multiply_add(0.044715f, square, 1.0f), &complement);
            real_store(output, c, x * s, precision);
            real_store(saved, c, multiply_add(x * s * complement, steepness, s), precision);
        }
    }
}

REAL_KERNEL(cpu_gelu_forward, Gelu, precision, gelu_forward_rows, row_block_count(work->rows))

REAL_LOOP void gelu_backward_rows(const Gelu *work, int block, Precision precision) {
    size_t columns = (size_t)work->columns, stride = (size_t)work->gradient_stride;
    float *sums = work->partials + (size_t)block * columns;
    memset(sums, 0, columns * sizeof *sums);
    for (int row = row_block_begin(block, work->rows); row < row_block_begin(block + 1, work->rows); row++) {
        Real *gradient = real_at(work->gradient, (size_t)row * stride, precision);
        const Real *derivative = real_at_const(work->saved, (size_t)row * columns, precision);
#pragma omp simd
        for (size_t c = 0; c < columns; c++) {
            float g = real_load(gradient, c, precision) * real_load(derivative, c, precision);
            real_store(gradient, c, g, precision);
            sums[c] += g;
        }
    }
}

REAL_KERNEL(gelu_backward_blocks, Gelu, precision, gelu_backward_rows, row_block_count(work->rows))

static inline void cpu_gelu_backward(Stream *stream, const Gelu *work) {
    gelu_backward_blocks(stream, work);
    column_sums_add(stream, work->d_bias, work->partials, row_block_count(work->rows), work->columns,
                    work->columns);
}
