// gelu.cuh: bias and GELU (tanh form, "gelu_new") of the MLP in one pass, on a GPU.
//
//   forward    output = x s(x) with x = saved + bias
//   backward   gradient *= GELU'(saved + bias);  d_bias += sum over rows of gradient
//
// The formulas of s and GELU' are in kernels/cpu/gelu.h. On the CPU, where an exponential
// is expensive, `saved` becomes the derivative. Here it stays the product without bias:
// forward need not write it, and backward computes s again while it waits for memory.
//
// Layout: a thread owns a Piece of columns (column_sums.cuh) and keeps its bias. It loads
// GELU_ROWS rows before it computes, to have enough loads in flight. In backward it goes
// down the rows of its block and leaves its sums for cuda_column_sums_add.
// Limit: memory. Forward reads one array and writes one; backward reads two and writes
// one.
#ifndef ACCO_KERNELS_CUDA_GELU_CUH
#define ACCO_KERNELS_CUDA_GELU_CUH

#include "kernels/cpu/gelu.h"
#include "kernels/cuda/column_sums.cuh"

enum { GELU_ROWS = 4 };

#define GELU_LINEAR 1.59576912f  // 2 sqrt(2/pi)
#define GELU_CUBIC 0.0713548163f // 0.044715 GELU_LINEAR

// x^2, bounded. At the bound the logistic function has long reached its limits; without
// it the square of a large x would be infinite, and its product with a complement of 0
// would be NaN.
DEVICE float gelu_square(float x) { return fminf(x * x, 1e4f); }

// Returns 1 / (1 + exp(-2u)); *complement becomes 1 minus that, without cancellation.
// The bound keeps exp finite; the comparison is false for NaN, which passes through. At
// the bound the quotient is 0: __fdividef makes that of divisors from 2^126 on.
DEVICE float gelu_logistic(float x, float *complement) {
    float twice_u = x * (GELU_LINEAR + GELU_CUBIC * gelu_square(x));
    float e = __expf(twice_u < -88.0f ? 88.0f : -twice_u);
    float s = __fdividef(1.0f, 1.0f + e);
    *complement = e * s;
    return s;
}

template <typename R, int WIDTH>
static __global__ void __launch_bounds__(COLUMN_STRIP)
    gelu_forward_kernel(R *output, const R *saved, const R *bias, int rows, int columns) {
    int c = strip_column(WIDTH), first = (int)blockIdx.x * GELU_ROWS;
    if (c >= columns) { return; }
    Piece<R, WIDTH> shift = piece_load<WIDTH>(bias + c), pieces[GELU_ROWS];
    UNROLL
    for (int i = 0; i < GELU_ROWS; i++) {
        if (first + i < rows) {
            pieces[i] = piece_load<WIDTH>(saved + (size_t)(first + i) * (size_t)columns + c);
        }
    }
    UNROLL
    for (int i = 0; i < GELU_ROWS; i++) {
        if (first + i >= rows) { break; }
        float x[WIDTH], shifts[WIDTH];
        piece_unpack(x, pieces[i]);
        piece_unpack(shifts, shift);
        UNROLL
        for (int k = 0; k < WIDTH; k++) {
            float complement, sum = x[k] + shifts[k];
            x[k] = sum * gelu_logistic(sum, &complement);
        }
        piece_pack(pieces[i], x);
        piece_store<WIDTH>(output + (size_t)(first + i) * (size_t)columns + c, pieces[i]);
    }
}

template <typename R> static inline void cuda_gelu_forward(Stream *stream, const Gelu *work) {
    R *results = reals<R>(work->output);
    const R *products = reals<R>(work->saved), *shifts = reals<R>(work->bias);
    bool packed = pack_fits((size_t)work->columns, results, products, shifts);
    strips_launch(stream, packed ? gelu_forward_kernel<R, Pack<R>::COUNT> : gelu_forward_kernel<R, 1>,
                  cuda_blocks((size_t)work->rows, GELU_ROWS), work->columns, packed ? (int)Pack<R>::COUNT : 1,
                  0, results, products, shifts, work->rows, work->columns);
}

template <typename R, int WIDTH>
static __global__ void __launch_bounds__(COLUMN_STRIP, 2)
    gelu_backward_kernel(R *gradient, int gradient_stride, float *partials, const R *saved, const R *bias,
                         int rows, int columns) {
    int c = strip_column(WIDTH), block = (int)blockIdx.x, blocks = (int)gridDim.x;
    if (c >= columns) { return; }
    Piece<R, WIDTH> shift = piece_load<WIDTH>(bias + c);
    float sums[WIDTH] = {};
    int end = cuda_row_begin(block + 1, blocks, rows);
    for (int row = cuda_row_begin(block, blocks, rows); row < end; row += GELU_ROWS) {
        R *place = gradient + (size_t)row * (size_t)gradient_stride + c;
        const R *product = saved + (size_t)row * (size_t)columns + c;
        Piece<R, WIDTH> gradients[GELU_ROWS], products[GELU_ROWS];
        UNROLL
        for (int i = 0; i < GELU_ROWS; i++) {
            if (row + i >= end) { break; }
            gradients[i] = piece_load<WIDTH>((const R *)place + (size_t)i * (size_t)gradient_stride);
            products[i] = piece_load<WIDTH>(product + (size_t)i * (size_t)columns);
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
            piece_store<WIDTH>(place + (size_t)i * (size_t)gradient_stride, gradients[i]);
        }
    }
    floats_write<WIDTH, false>(partials + (size_t)block * (size_t)columns + c, sums);
}

// The sums of d_bias are taken before the result is rounded.
template <typename R> static inline void cuda_gelu_backward(Stream *stream, const Gelu *work) {
    R *gradients = reals<R>(work->gradient);
    const R *products = reals<R>(work->saved), *shifts = reals<R>(work->bias);
    int blocks = cuda_row_blocks(work->rows), columns = work->columns;
    bool packed = pack_fits((size_t)work->gradient_stride, gradients) &&
                  pack_fits((size_t)columns, products, shifts, work->partials);
    strips_launch(stream, packed ? gelu_backward_kernel<R, Pack<R>::COUNT> : gelu_backward_kernel<R, 1>,
                  (unsigned)blocks, columns, packed ? (int)Pack<R>::COUNT : 1, 0, gradients,
                  work->gradient_stride, work->partials, products, shifts, work->rows, columns);
    cuda_column_sums_add(stream, {.first = work->d_bias}, 1, work->partials, blocks, columns, columns);
}

#endif
