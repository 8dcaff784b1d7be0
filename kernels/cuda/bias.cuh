// bias.cuh: the biases of queries, keys and values, and the scale of queries, on a GPU.
//
// Computes what kernels/cpu/bias.h defines. Layout: a thread owns a Piece of columns
// (column_sums.cuh), keeps its bias, and goes down the rows of its block; in backward it leaves
// its sums for cuda_column_sums_add.
#pragma once

#include "kernels/cpu/bias.h"
#include "kernels/cuda/column_sums.cuh"

template <typename R, int WIDTH, bool BACKWARD>
static __global__ void __launch_bounds__(COLUMN_STRIP) bias_kernel(Bias work) {
    int c = strip_column(WIDTH), block = (int)blockIdx.x, blocks = (int)gridDim.x;
    if (c >= work.columns) { return; }
    float shifts[WIDTH], factors[WIDTH], sums[WIDTH] = {};
    piece_unpack(shifts, piece_load<WIDTH>(reals<R>(work.bias) + c));
    UNROLL
    for (int k = 0; k < WIDTH; k++) { factors[k] = c + k < work.scaled ? work.scale : 1.0f; }
    int end = cuda_row_begin(block + 1, blocks, work.rows);
    for (int row = cuda_row_begin(block, blocks, work.rows); row < end; row++) {
        R *place = reals<R>(work.values) + (size_t)row * work.stride + c;
        Piece<R, WIDTH> piece = piece_load<WIDTH>((const R *)place);
        float x[WIDTH];
        piece_unpack(x, piece);
        UNROLL
        for (int k = 0; k < WIDTH; k++) {
            x[k] = (BACKWARD ? x[k] : x[k] + shifts[k]) * factors[k];
            sums[k] += x[k];
        }
        piece_pack(piece, x);
        piece_store<WIDTH>(place, piece);
    }
    if (BACKWARD) { floats_write<WIDTH, false>(work.partials + (size_t)block * work.columns + c, sums); }
}

template <typename R, bool BACKWARD> static inline void cuda_bias_launch(Stream *stream, const Bias &work) {
    bool packed = pack_fits((size_t)work.stride, reals<R>(work.values)) &&
                  pack_fits((size_t)work.columns, reals<R>(work.bias), work.partials);
    strips_launch(stream, packed ? bias_kernel<R, PACK<R>, BACKWARD> : bias_kernel<R, 1, BACKWARD>,
                  (unsigned)cuda_row_blocks(work.rows), work.columns, packed ? PACK<R> : 1, 0, work);
}

// The sums of d_bias are taken before the result is rounded.
template <typename R> static inline void cuda_bias_add(Stream *stream, const Bias *work) {
    if (work->d_bias == NULL) {
        cuda_bias_launch<R, false>(stream, *work);
        return;
    }
    cuda_bias_launch<R, true>(stream, *work);
    cuda_column_sums_add(stream, {.first = work->d_bias}, 1, work->partials, cuda_row_blocks(work->rows),
                         work->columns, work->columns);
}
