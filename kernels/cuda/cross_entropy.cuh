// cross_entropy.cuh: loss of a chunk of logits and its gradient in place, on a GPU.
//
// Computes what kernels/cpu/cross_entropy.h defines. Rows may be further apart than V, so
// that they can be read in packs and be operands of tensor cores. The columns from V to
// `stride` are padding: they are never read, and become 0 wherever gradients are written.
//
// Layout: one block does one row. It first reads the row for the maximum and the sum of
// exponentials: each thread keeps both for what it has seen, and rescales its sum when
// its maximum grows. Then it reads the row again, backwards, to begin with what the caches
// still hold, and writes each pack once in its place. Block sizes are such that exactly two
// blocks share a multiprocessor: one reads while the other waits for its sums, and more would
// evict each other's rows.
#pragma once

#include <float.h>

#include "kernels/cpu/cross_entropy.h"
#include "kernels/cuda/language.cuh"

enum { CROSS_ENTROPY_THREADS = 768, CROSS_ENTROPY_SHARED = CROSS_ENTROPY_THREADS / WARP * 2 * sizeof(float) };

// One row of logits. Below, `first` is the first column of a pack.
template <typename R> struct CrossEntropyRow {
    R *logits;
    int V, stride;
    bool wide; // packs are aligned, and a row is a whole number of them
};

// Columns from V on are not read; they become -infinity, whose exponential is 0.
template <typename R> DEVICE Piece<R, PACK<R>> cross_entropy_load(const CrossEntropyRow<R> &row, int first) {
    if (row.wide && first + PACK<R> <= row.V) { return piece_load<PACK<R>>(row.logits + first); }
    Piece<R, PACK<R>> pack;
    float values[PACK<R>];
    for (int i = 0; i < PACK<R>; i++) {
        values[i] = first + i < row.V ? to_float(row.logits[first + i]) : -INFINITY;
    }
    piece_pack(pack, values);
    return pack;
}

// Columns from V on become 0, whatever `values` says.
template <typename R>
DEVICE void cross_entropy_store(const CrossEntropyRow<R> &row, float values[PACK<R>], int first) {
    for (int i = 0; i < PACK<R>; i++) { values[i] = first + i < row.V ? values[i] : 0.0f; }
    if (row.wide) {
        Piece<R, PACK<R>> pack;
        piece_pack(pack, values);
        store_16_bytes(row.logits + first, &pack);
        return;
    }
    for (int i = 0; i < PACK<R> && first + i < row.stride; i++) {
        row.logits[first + i] = from_float<R>(values[i]);
    }
}

DEVICE float cross_entropy_exp(float difference) { return exp2_approximate(difference * 1.44269504f); }

// Every thread gets *maximum, the maximum over the row, and returns the sum of
// exp(logit - *maximum). scratch: two floats for each warp.
//
// Maxima begin at the lowest finite number, so that a thread that has seen nothing, or nothing but
// -infinity, has a sum of 0 and not NaN. The maximum skips a NaN; the sum keeps it.
template <typename R>
DEVICE float cross_entropy_sum(const CrossEntropyRow<R> &row, float *maximum, float *scratch) {
    const int step = (int)blockDim.x * PACK<R>;
    int first = (int)threadIdx.x * PACK<R>;
    float largest = -FLT_MAX, sum = 0.0f;
    for (auto next = cross_entropy_load(row, first); first < row.V; first += step) {
        float before = largest, values[PACK<R>];
        piece_unpack(values, next);
        next = cross_entropy_load(row, first + step); // in flight while the values are added
        for (int i = 0; i < PACK<R>; i++) { largest = fmaxf(largest, values[i]); }
        sum *= cross_entropy_exp(before - largest);
        for (int i = 0; i < PACK<R>; i++) { sum += cross_entropy_exp(values[i] - largest); }
    }
    *maximum = block_max(largest, scratch);
    return block_sum(sum * cross_entropy_exp(largest - *maximum), scratch + blockDim.x / WARP);
}

// The row becomes gradient_scale * (softmax - one-hot), from its end to its beginning.
template <typename R>
DEVICE void cross_entropy_gradient(const CrossEntropyRow<R> &row, float maximum, float sum, int target,
                                   float gradient_scale) {
    const int step = (int)blockDim.x * PACK<R>, mine = (int)threadIdx.x * PACK<R>;
    float scale = gradient_scale / sum;
    for (int begin = (row.stride - 1) / step * step; begin >= 0; begin -= step) {
        int first = begin + mine;
        if (first >= row.stride) { continue; }
        float values[PACK<R>];
        piece_unpack(values, cross_entropy_load(row, first));
        for (int i = 0; i < PACK<R>; i++) { values[i] = cross_entropy_exp(values[i] - maximum) * scale; }
        if (target >= first && target < first + PACK<R>) {
            for (int i = 0; i < PACK<R>; i++) { values[i] -= target == first + i ? gradient_scale : 0.0f; }
        }
        cross_entropy_store(row, values, first);
    }
}

template <typename R>
static __global__ void __launch_bounds__(CROSS_ENTROPY_THREADS, 2)
    cross_entropy_kernel(R *logits, int stride, float *losses, const int32_t *targets, int V,
                         float gradient_scale, bool wide) {
    int target = targets[blockIdx.x];
    CrossEntropyRow<R> row = {
        .logits = logits + (size_t)blockIdx.x * stride, .V = V, .stride = stride, .wide = wide};
    if (target < 0) { // in all threads of the block
        float zeros[PACK<R>] = {};
        const int step = (int)blockDim.x * PACK<R>;
        if (threadIdx.x == 0) { losses[blockIdx.x] = 0.0f; }
        if (gradient_scale == 0.0f) { return; }
        for (int first = (int)threadIdx.x * PACK<R>; first < row.stride; first += step) {
            cross_entropy_store(row, zeros, first);
        }
        return;
    }
    // All threads read the chosen logit before the barriers in cross_entropy_sum; after them it
    // is overwritten.
    float maximum, chosen = to_float(row.logits[target]);
    float sum = cross_entropy_sum(row, &maximum, (float *)cuda_shared());
    // The difference first: it is exact where it is small.
    if (threadIdx.x == 0) { losses[blockIdx.x] = logf(sum) + (maximum - chosen); }
    if (gradient_scale != 0.0f) { cross_entropy_gradient(row, maximum, sum, target, gradient_scale); }
}

template <typename R> static inline void cuda_cross_entropy(Stream *stream, const CrossEntropy *work) {
    size_t stride = (size_t)work->stride;
    unsigned packs = cuda_blocks(stride, PACK<R>), threads = cuda_blocks(packs, WARP) * WARP;
    if (work->rows == 0) { return; }
    if (threads > (unsigned)CROSS_ENTROPY_THREADS) { threads = CROSS_ENTROPY_THREADS; }
    R *logits = reals<R>(work->logits);
    cuda_launch(stream, cross_entropy_kernel<R>, dim3((unsigned)work->rows), dim3(threads),
                CROSS_ENTROPY_SHARED, logits, work->stride, work->losses, work->targets, work->vocabulary,
                work->gradient_scale, pack_fits(stride, logits));
}
