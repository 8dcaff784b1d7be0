// swiglu.h: the gated activation of an MLP.
//
//   forward    output = silu(g) u with silu(g) = g s, s = logistic(g)
//   backward   d_g = gradient u silu'(g) with silu'(g) = s + g s (1 - s);  d_u = gradient silu(g)
//
// saved (rows, 2 columns) is g and u side by side, output (rows, columns), with rows = B T and
// columns = F. Forward stores the factors of backward over g and u, so that backward has no
// exponential. Tasks: row_blocks.h.
#pragma once

#include "kernels/cpu/row_blocks.h"
#include "kernels/cpu/vector_math.h"

typedef struct Swiglu {
    Real *output; // forward (rows, columns)
    Real *saved;  // (rows, 2 columns): in forward g, u; then u silu'(g), silu(g)
    Real
        *gradient; // backward, rows gradient_stride apart: in (rows, columns), out (rows, 2 columns); or NULL
    int rows, columns, gradient_stride;
    Precision precision;
} Swiglu;

REAL_LOOP void swiglu_rows(const Swiglu *work, int block, Precision precision) {
    size_t columns = (size_t)work->columns, stride = (size_t)work->gradient_stride;
    for (int row = row_block_begin(block, work->rows); row < row_block_begin(block + 1, work->rows); row++) {
        Real *gate = real_at(work->saved, (size_t)row * 2 * columns, precision),
             *up = real_at(gate, columns, precision);
        if (work->gradient != NULL) {
            Real *d_gate = real_at(work->gradient, (size_t)row * stride, precision),
                 *d_up = real_at(d_gate, columns, precision);
#pragma omp simd
            for (size_t c = 0; c < columns; c++) {
                float d = real_load(d_gate, c, precision);
                real_store(d_gate, c, d * real_load(gate, c, precision), precision);
                real_store(d_up, c, d * real_load(up, c, precision), precision);
            }
            continue;
        }
        Real *output = real_at(work->output, (size_t)row * columns, precision);
#pragma omp simd
        for (size_t c = 0; c < columns; c++) {
            float g = real_load(gate, c, precision), u = real_load(up, c, precision), complement;
            float s = vector_logistic(g, &complement), silu = g * s;
            real_store(output, c, silu * u, precision);
            real_store(gate, c, u * multiply_add(silu, complement, s), precision);
            real_store(up, c, silu, precision);
        }
    }
}

REAL_KERNEL(cpu_swiglu, Swiglu, precision, swiglu_rows, row_block_count(work->rows))
