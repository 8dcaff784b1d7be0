// swiglu.cuh: the gated activation of an MLP, on a GPU.
//
// Computes what kernels/cpu/swiglu.h defines. As in gelu.cuh, `saved` stays g and u: forward need
// not write it, and backward computes s again while it waits for memory.
//
// Layout: as gelu.cuh, but nothing is summed over rows, so both passes have a block for each
// SWIGLU_ROWS rows of a strip.
#pragma once

#include "kernels/cpu/swiglu.h"
#include "kernels/cuda/column_sums.cuh"

enum { SWIGLU_ROWS = 2 };

template <typename R, int WIDTH, bool BACKWARD>
static __global__ void __launch_bounds__(COLUMN_STRIP) swiglu_kernel(Swiglu work) {
    int c = strip_column(WIDTH), first = (int)blockIdx.x * SWIGLU_ROWS;
    size_t columns = (size_t)work.columns,
           stride = BACKWARD ? (size_t)work.gradient_stride : (size_t)work.columns;
    const R *gate = reals<R>((const Real *)work.saved) + (size_t)first * 2 * columns + c;
    R *results = reals<R>(BACKWARD ? work.gradient : work.output) + (size_t)first * stride + c;
    Piece<R, WIDTH> gates[SWIGLU_ROWS], ups[SWIGLU_ROWS], gradients[SWIGLU_ROWS];
    if (c >= work.columns) { return; }
    UNROLL
    for (int i = 0; i < SWIGLU_ROWS; i++) {
        if (first + i >= work.rows) { break; }
        gates[i] = piece_load<WIDTH>(gate + (size_t)i * 2 * columns);
        ups[i] = piece_load<WIDTH>(gate + (size_t)i * 2 * columns + columns);
        if (BACKWARD) { gradients[i] = piece_load<WIDTH>((const R *)results + (size_t)i * stride); }
    }
    UNROLL
    for (int i = 0; i < SWIGLU_ROWS; i++) {
        if (first + i >= work.rows) { break; }
        float g[WIDTH], u[WIDTH], d[WIDTH];
        piece_unpack(g, gates[i]);
        piece_unpack(u, ups[i]);
        if (BACKWARD) { piece_unpack(d, gradients[i]); }
        UNROLL
        for (int k = 0; k < WIDTH; k++) {
            float complement, s = logistic(g[k], &complement), silu = g[k] * s;
            g[k] = BACKWARD ? d[k] * (u[k] * (s + silu * complement)) : silu * u[k];
            u[k] = BACKWARD ? d[k] * silu : 0.0f;
        }
        piece_pack(gates[i], g);
        piece_store<WIDTH>(results + (size_t)i * stride, gates[i]);
        if (BACKWARD) {
            piece_pack(ups[i], u);
            piece_store<WIDTH>(results + (size_t)i * stride + columns, ups[i]);
        }
    }
}

template <typename R, bool BACKWARD> static inline void swiglu_start(Stream *stream, const Swiglu &work) {
    bool packed = pack_fits((size_t)work.columns, reals<R>(work.saved), reals<R>(work.output)) &&
                  (!BACKWARD || pack_fits((size_t)work.gradient_stride, reals<R>(work.gradient)));
    strips_launch(stream, packed ? swiglu_kernel<R, PACK<R>, BACKWARD> : swiglu_kernel<R, 1, BACKWARD>,
                  cuda_blocks((size_t)work.rows, SWIGLU_ROWS), work.columns, packed ? PACK<R> : 1, 0, work);
}

template <typename R> static inline void cuda_swiglu(Stream *stream, const Swiglu *work) {
    (work->gradient == NULL ? swiglu_start<R, false> : swiglu_start<R, true>)(stream, *work);
}
