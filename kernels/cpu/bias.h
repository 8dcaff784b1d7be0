// bias.h: the biases of queries, keys and values, and the scale of attention's scores, by which
// the queries are multiplied.
//
//   forward    values = (values + bias) scale
//   backward   values *= scale;  d_bias += sum over rows of values
//
// scale stands for 1 from column `scaled` on. The limit is memory. Tasks and the sums over rows:
// row_blocks.h.
#pragma once

#include "kernels/cpu/reals.h"
#include "kernels/cpu/row_blocks.h"

typedef struct Bias {
    Real *values;     // (rows, columns), rows `stride` apart: the product; backward: the gradient
    const Real *bias; // (columns)
    float *d_bias;    // backward (columns); NULL: forward
    float *partials;  // backward (row_partials_floats(columns))
    int rows, columns, stride, scaled;
    float scale;
    Precision precision;
} Bias;

REAL_LOOP void bias_rows(const Bias *work, int block, Precision precision) {
    size_t columns = (size_t)work->columns, scaled = (size_t)work->scaled;
    float *sums = work->partials + (size_t)block * columns;
    const Real *bias = work->bias;
    const bool backward = work->d_bias != NULL;
    for (size_t c = 0; c < columns && backward; c++) { sums[c] = 0.0f; }
    for (int row = row_block_begin(block, work->rows); row < row_block_begin(block + 1, work->rows); row++) {
        Real *values = real_at(work->values, (size_t)row * work->stride, precision);
#pragma omp simd
        for (size_t c = 0; c < columns; c++) {
            float x = real_load(values, c, precision);
            x = backward ? x : x + real_load(bias, c, precision);
            x = c < scaled ? x * work->scale : x;
            real_store(values, c, x, precision);
            if (backward) { sums[c] += x; }
        }
    }
}

REAL_KERNEL(bias_blocks, Bias, precision, bias_rows, row_block_count(work->rows))

static inline void cpu_bias_add(Stream *stream, const Bias *work) {
    int blocks = row_block_count(work->rows), columns = work->columns;
    bias_blocks(stream, work);
    if (work->d_bias != NULL) {
        column_sums_add(stream, work->d_bias, work->partials, blocks, columns, columns);
    }
}
