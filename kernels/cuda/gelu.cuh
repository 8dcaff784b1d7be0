// gelu.cuh: bias and GELU (tanh form, "gelu_new") of the MLP in one pass, on a GPU.
//
//   forward    output = x s(x) with x = saved + bias
//   backward   gradient *= GELU'(saved + bias);  d_bias += sum over rows of gradient
//
// The formulas of s and GELU' are in kernels/cpu/gelu.h. On the CPU, where an exponential
// is expensive, `saved` becomes the derivative. Here it stays the product without bias:
// forward need not write it, and backward computes s again while it waits for memory.
//
// Layout: as bias.cuh, but a thread loads GELU_ROWS rows before it computes, to have enough
// loads in flight.
#pragma once

#include "kernels/cpu/gelu.h"
#include "kernels/cuda/column_sums.cuh"

enum { GELU_ROWS = 4 };

#define GELU_LINEAR 1.59576912f  // 2 sqrt(2/pi)
#define GELU_CUBIC 0.0713548163f // 0.044715 GELU_LINEAR

// x^2, bounded. At the bound the logistic function has long reached its limits; without it the
// square of a large x would be infinite, and its product with a complement of 0 would be NaN.
DEVICE float gelu_square(float x) { return fminf(x * x, 1e4f); }

// Returns 1 / (1 + exp(-2u)); *complement becomes 1 minus that.
DEVICE float gelu_logistic(float x, float *complement) {
    return logistic(x * (GELU_LINEAR + GELU_CUBIC * gelu_square(x)), complement);
}

template <typename R, int WIDTH>
static __global__ void __launch_bounds__(COLUMN_STRIP) gelu_forward_kernel(Gelu work) {
    int c = strip_column(WIDTH), first = (int)blockIdx.x * GELU_ROWS;
    size_t columns = (size_t)work.columns, place = (size_t)first * columns + c;
    if (c >= work.columns) { return; }
    Piece<R, WIDTH> shift = piece_load<WIDTH>(reals<R>(work.bias) + c), pieces[GELU_ROWS];
    UNROLL
    for (int i = 0; i < GELU_ROWS; i++) {
        if (first + i >= work.rows) { break; }
        pieces[i] = piece_load<WIDTH>(reals<R>((const Real *)work.saved) + place + i * columns);
    }
    UNROLL
    for (int i = 0; i < GELU_ROWS; i++) {
        if (first + i >= work.rows) { break; }
        float x[WIDTH], shifts[WIDTH];
        piece_unpack(x, pieces[i]);
        piece_unpack(shifts, shift);
        UNROLL
        for (int k = 0; k < WIDTH; k++) {
            float complement, sum = x[k] + shifts[k];
            x[k] = sum * gelu_logistic(sum, &complement);
        }
        piece_pack(pieces[i], x);
        piece_store<WIDTH>(reals<R>(work.output) + place + i * columns, pieces[i]);
    }
}

template <typename R> static inline void cuda_gelu_forward(Stream *stream, const Gelu *work) {
    bool packed =
        pack_fits((size_t)work->columns, reals<R>(work->output), reals<R>(work->saved), reals<R>(work->bias));
    strips_launch(stream, packed ? gelu_forward_kernel<R, PACK<R>> : gelu_forward_kernel<R, 1>,
                  cuda_blocks((size_t)work->rows, GELU_ROWS), work->columns, packed ? PACK<R> : 1, 0, *work);
}

template <typename R, int WIDTH>
static __global__ void __launch_bounds__(COLUMN_STRIP, 2) gelu_backward_kernel(Gelu work) {
    int c = strip_column(WIDTH), block = (int)blockIdx.x, blocks = (int)gridDim.x;
    size_t stride = (size_t)work.gradient_stride, columns = (size_t)work.columns;
    if (c >= work.columns) { return; }
    Piece<R, WIDTH> shift = piece_load<WIDTH>(reals<R>(work.bias) + c);
    float sums[WIDTH] = {};
    int end = cuda_row_begin(block + 1, blocks, work.rows);
    for (int row = cuda_row_begin(block, blocks, work.rows); row < end; row += GELU_ROWS) {
        R *gradient = reals<R>(work.gradient) + (size_t)row * stride + c;
        const R *product = reals<R>((const Real *)work.saved) + (size_t)row * columns + c;
        Piece<R, WIDTH> gradients[GELU_ROWS], products[GELU_ROWS];
        UNROLL
        for (int i = 0; i < GELU_ROWS; i++) {
            if (row + i >= end) { break; }
            gradients[i] = piece_load<WIDTH>((const R *)gradient + i * stride);
            products[i] = piece_load<WIDTH>(product + i * columns);
        }
        UNROLL
        for (int i = 0; i < GELU_ROWS; i++) {
            if (row + i >= end) { break; }
            float x[WIDTH], shifts[WIDTH], results[WIDTH];
            piece_unpack(x, products[i]);
            piece_unpack(shifts, shift);
            piece_unpack(results, gradients[i]);
            UNROLL
            for (int k = 0; k < WIDTH; k++) {
                float complement, sum = x[k] + shifts[k], s = gelu_logistic(sum, &complement);
                results[k] *= s + sum * s * complement * (GELU_LINEAR + 3.0f * GELU_CUBIC * gelu_square(sum));
                sums[k] += results[k];
            }
            piece_pack(gradients[i], results);
            piece_store<WIDTH>(gradient + i * stride, gradients[i]);
        }
    }
    floats_write<WIDTH, false>(work.partials + (size_t)block * columns + c, sums);
}

// The sums of d_bias are taken before the result is rounded.
template <typename R> static inline void cuda_gelu_backward(Stream *stream, const Gelu *work) {
    int blocks = cuda_row_blocks(work->rows), columns = work->columns;
    bool packed = pack_fits((size_t)work->gradient_stride, reals<R>(work->gradient)) &&
                  pack_fits((size_t)columns, reals<R>(work->saved), reals<R>(work->bias), work->partials);
    strips_launch(stream, packed ? gelu_backward_kernel<R, PACK<R>> : gelu_backward_kernel<R, 1>,
                  (unsigned)blocks, columns, packed ? PACK<R> : 1, 0, *work);
    cuda_column_sums_add(stream, {.first = work->d_bias}, 1, work->partials, blocks, columns, columns);
}
