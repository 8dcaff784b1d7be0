// buffers.cuh: converting whole vectors on a GPU, their sum of squares, and how every
// elementwise kernel over flat fp32 vectors cuts its work.
//
// Computes what kernels/cpu/buffers.h defines, except that the partial sums of squares
// stay on the device; the caller downloads and adds them in order.
//
// Layout: a thread has a Quad, four elements, which it loads and stores in one access of
// 16 bytes if the pointers are aligned. Shards begin anywhere, so all kernels also work on
// pointers aligned to 4 bytes. A block takes BUFFER_QUADS elements; for the sum of squares it
// takes one BUFFER_BLOCK, so that every GPU has as many partial sums as the CPU.
#pragma once

#include "kernels/cuda/language.cuh"

#include "kernels/cpu/buffers.h"

enum { BUFFER_THREADS = 256, BUFFER_QUADS = 4 * BUFFER_THREADS, BUFFER_SQUARES_THREADS = 512 };

// The elements first, first + step, first + 2 step, first + 3 step, as far as they are below end.
// If four may be accessed at once, they are neighbours. Otherwise they are a block's width apart:
// each access is narrow, but a warp's accesses together are whole cache lines.
struct Quad {
    size_t first, step, end;
    bool whole; // one access
};

// This thread's part of the 4 * blockDim.x elements from `begin` on.
DEVICE Quad quad_of_thread(size_t begin, size_t end, bool wide) {
    Quad quad;
    quad.first = begin + (wide ? 4u * threadIdx.x : threadIdx.x);
    quad.step = wide ? 1 : blockDim.x;
    quad.end = end;
    quad.whole = wide && quad.first + 4 <= end;
    return quad;
}

// This thread's part in an elementwise kernel that quad_launch launches.
DEVICE Quad quad_of_kernel(size_t count, bool wide) {
    return quad_of_thread((size_t)blockIdx.x * BUFFER_QUADS, count, wide);
}

// Whether four neighbours of each array are aligned for one access. NULL, for an array that
// is not used, fits.
template <typename... R> static inline bool quad_fits(const R *...places) {
    return (((uintptr_t)places % (4 * sizeof(R)) == 0) && ...);
}

// Elements from `end` on become 0.
template <typename R> DEVICE void quad_load(float values[4], const R *place, const Quad &quad) {
    if (quad.whole) {
        piece_unpack(values, piece_load<4>(place + quad.first));
        return;
    }
    for (int i = 0; i < 4; i++) {
        size_t element = quad.first + i * quad.step;
        values[i] = element < quad.end ? to_float(place[element]) : 0.0f;
    }
}

template <typename R> DEVICE void quad_store(R *place, const float values[4], const Quad &quad) {
    if (quad.whole) {
        Piece<R, 4> piece;
        piece_pack(piece, values);
        piece_store<4>(place + quad.first, piece);
        return;
    }
    for (int i = 0; i < 4; i++) {
        size_t element = quad.first + i * quad.step;
        if (element < quad.end) { place[element] = from_float<R>(values[i]); }
    }
}

// Launches an elementwise kernel over `count` elements, which may be 0.
template <typename... Parameters, typename... Arguments>
static inline void quad_launch(Stream *stream, void (*kernel)(Parameters...), size_t count,
                               Arguments... arguments) {
    if (count == 0) { return; }
    cuda_launch(stream, kernel, dim3(cuda_blocks(count, BUFFER_QUADS)), dim3(BUFFER_THREADS), 0,
                arguments...);
}

template <typename R>
static __global__ void reals_from_floats_kernel(R *out, const float *in, size_t count, bool wide) {
    float values[4];
    Quad quad = quad_of_kernel(count, wide);
    quad_load(values, in, quad);
    quad_store(out, values, quad);
}

// out (count), of R, = in (count).
template <typename R>
static inline void cuda_reals_from_floats(Stream *stream, Real *out, const float *in, size_t count) {
    R *values = reals<R>(out);
    quad_launch(stream, reals_from_floats_kernel<R>, count, values, in, count, quad_fits(values, in));
}

static __global__ void buffer_round_kernel(float *values, size_t count, bool wide) {
    float mine[4];
    Quad quad = quad_of_kernel(count, wide);
    quad_load(mine, values, quad);
    for (int i = 0; i < 4; i++) { mine[i] = to_float(from_float<__nv_bfloat16>(mine[i])); }
    quad_store(values, mine, quad);
}

static inline void cuda_buffer_round(Stream *stream, float *values, size_t count) {
    quad_launch(stream, buffer_round_kernel, count, values, count, quad_fits(values));
}

// Grid: (blocks of a piece, pieces).
static __global__ void buffer_squares_kernel(double *partials, const float *pieces, size_t count,
                                             size_t stride, bool wide) {
    const float *values = pieces + blockIdx.y * stride;
    size_t begin = (size_t)blockIdx.x * BUFFER_BLOCK,
           end = count - begin < (size_t)BUFFER_BLOCK ? count : begin + BUFFER_BLOCK;
    double sum = 0;
    for (size_t at = begin; at < end; at += 4u * blockDim.x) {
        float mine[4];
        quad_load(mine, values, quad_of_thread(at, end, wide));
        for (int i = 0; i < 4; i++) { sum += (double)mine[i] * (double)mine[i]; }
    }
    sum = block_sum(sum, (double *)cuda_shared());
    if (threadIdx.x == 0) { partials[(size_t)blockIdx.y * gridDim.x + blockIdx.x] = sum; }
}

// partials (pieces, buffer_blocks(count)) = the sum of squares of each BUFFER_BLOCK of
// each piece of `count` values; pieces begin `stride` values apart. `partials` is memory
// that the host can read, or copies.
static inline void cuda_buffer_sums_of_squares(Stream *stream, double *partials, const float *values,
                                               size_t count, size_t stride, size_t pieces) {
    bool wide = quad_fits(values) && (stride % 4 == 0 || pieces == 1);
    assert(pieces <= 65535); // a grid's limit of rows
    cuda_launch(stream, buffer_squares_kernel, dim3((unsigned)buffer_blocks(count), (unsigned)pieces),
                dim3(BUFFER_SQUARES_THREADS), BUFFER_SQUARES_THREADS / WARP * sizeof(double), partials,
                values, count, stride, wide);
}
