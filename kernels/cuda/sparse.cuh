// sparse.cuh: error feedback and the outer step of SparseLoCo, on a GPU.
//
// Computes what kernels/cpu/sparse.h defines, with the same bits: elements are compared as
// integers, and one thread adds up the magnitudes in the order of indexes.
//
// Layout: a block of threads does one block of the format, with its elements in shared memory.
// Every thread has SPARSE_OWN neighbours of them in registers. As on the CPU, the smallest
// magnitude that is taken is found bit by bit: a count over all threads for each bit.
// Then the number of elements taken by the threads before says where a thread's own go.
#pragma once

#include "kernels/cuda/language.cuh"

#include "kernels/cpu/sparse.h"

enum {
    SPARSE_THREADS = 256,
    SPARSE_WARPS = SPARSE_THREADS / WARP,
    SPARSE_OWN = SPARSE_BLOCK / SPARSE_THREADS, // elements of a thread
    SPARSE_WORDS = sizeof(SparseBlock) / sizeof(uint32_t)
};

// What the threads of a block share.
struct SparseShared {
    float values[SPARSE_BLOCK + SPARSE_THREADS]; // element i at sparse_place(i)
    int counts[2][SPARSE_WARPS];                 // of the warps, in turns
    SparseTaken taken;
    SparseBlock block;
    float mean;
};

// One float in SPARSE_OWN stays free, so that threads which each read their first element, or
// their second, meet in no bank.
DEVICE int sparse_place(int element) { return element + element / SPARSE_OWN; }

// The sum of the counts of all threads, for each of them. turn: changes from call to call.
DEVICE int sparse_count(SparseShared *shared, int count, int turn) {
    int *counts = shared->counts[turn % 2], sum = 0;
    count = warp_sum(count);
    if (lane_index() == 0) { counts[warp_index()] = count; }
    __syncthreads();
    for (int warp = 0; warp < SPARSE_WARPS; warp++) { sum += counts[warp]; }
    return sum;
}

// The sum of the counts of the threads before this one.
DEVICE int sparse_count_before(SparseShared *shared, int count, int turn) {
    int sum = count;
    for (int lanes = 1; lanes < WARP; lanes *= 2) {
        int source = lane_index() - lanes, other = __shfl_sync(0xffffffffu, sum, source < 0 ? 0 : source);
        sum += source < 0 ? 0 : other;
    }
    int *counts = shared->counts[turn % 2], before = sum - count;
    if (lane_index() == WARP - 1) { counts[warp_index()] = sum; }
    __syncthreads();
    for (int warp = 0; warp < warp_index(); warp++) { before += counts[warp]; }
    return before;
}

// shared->taken <- the largest of shared->values (elements). Elements that are not there have
// no magnitude: -1.
DEVICE void sparse_take(SparseShared *shared, int elements) {
    int first = (int)threadIdx.x * SPARSE_OWN, entries = sparse_entries(elements), smallest = 0;
    int own[SPARSE_OWN], above = 0, equal = 0;
    UNROLL
    for (int i = 0; i < SPARSE_OWN; i++) {
        float value = shared->values[sparse_place(first + i)];
        own[i] = first + i < elements ? (int)sparse_magnitude_bits(value) : -1;
    }
    for (int bit = 30; bit >= 0; bit--) {
        int candidate = smallest | 1 << bit, count = 0;
        UNROLL
        for (int i = 0; i < SPARSE_OWN; i++) { count += own[i] >= candidate ? 1 : 0; }
        if (sparse_count(shared, count, bit) >= entries) { smallest = candidate; }
    }
    UNROLL
    for (int i = 0; i < SPARSE_OWN; i++) {
        above += own[i] > smallest ? 1 : 0;
        equal += own[i] == smallest ? 1 : 0;
    }
    int wanted = entries - sparse_count(shared, above, 1); // of the equal ones
    int before = sparse_count_before(shared, above, 0), equals = sparse_count_before(shared, equal, 1);
    UNROLL
    for (int i = 0; i < SPARSE_OWN; i++) {
        int slot = before + (equals < wanted ? equals : wanted);
        bool larger = own[i] > smallest, same = own[i] == smallest;
        if (larger || (same && equals < wanted)) {
            shared->taken.indexes[slot] = (uint16_t)(first + i);
            shared->taken.values[slot] = shared->values[sparse_place(first + i)];
        }
        before += larger ? 1 : 0;
        equals += same ? 1 : 0;
    }
}

static __global__ void __launch_bounds__(SPARSE_THREADS)
    sparse_encode_kernel(OuterRange range, SparseBlock *blocks, float beta) {
    SparseShared *shared = (SparseShared *)cuda_shared();
    size_t begin = (size_t)blockIdx.x * SPARSE_BLOCK;
    int elements = sparse_elements(range.count, begin);
    int entries = sparse_entries(elements), thread = (int)threadIdx.x;
    for (int i = thread; i < elements; i += SPARSE_THREADS) {
        size_t at = begin + (size_t)i;
        shared->values[sparse_place(i)] =
            sparse_feed_back(range.exchange[at], range.outer[at], range.local[at], beta);
    }
    if (thread < SPARSE_ENTRIES) {
        shared->taken.indexes[thread] = 0;
        shared->taken.values[thread] = 0;
    }
    __syncthreads();
    sparse_take(shared, elements);
    __syncthreads();
    if (thread == 0) { shared->mean = sparse_set_magnitudes(&shared->block, shared->taken.values, entries); }
    __syncthreads();
    if (thread < SPARSE_ENTRIES / 4) {
        sparse_set_entries(&shared->block, thread, &shared->taken, shared->mean);
    }
    __syncthreads();
    if (thread < SPARSE_WORDS) {
        const uint32_t *from = (const uint32_t *)&shared->block;
        ((uint32_t *)(blocks + blockIdx.x))[thread] = from[thread];
    }
    if (thread < entries && sparse_is_sound(&shared->block)) {
        shared->values[sparse_place(sparse_index(&shared->block, thread))] -=
            sparse_value(&shared->block, thread);
    }
    __syncthreads();
    for (int i = thread; i < elements; i += SPARSE_THREADS) {
        range.exchange[begin + (size_t)i] = shared->values[sparse_place(i)];
    }
}

static inline void cuda_sparse_encode(Stream *stream, const OuterRange *range, SparseBlock *blocks,
                                      float beta) {
    if (range->count == 0) { return; }
    cuda_launch(stream, sparse_encode_kernel, dim3((unsigned)sparse_blocks(range->count)),
                dim3(SPARSE_THREADS), sizeof(SparseShared), *range, blocks, beta);
}

// The blocks of one rank are added at a time: no two of its entries have the same index.
static __global__ void __launch_bounds__(SPARSE_THREADS)
    sparse_apply_kernel(OuterRange range, const SparseBlock *blocks, size_t stride, SparseStep step) {
    float *sum = (float *)cuda_shared();
    size_t begin = (size_t)blockIdx.x * SPARSE_BLOCK;
    int elements = sparse_elements(range.count, begin);
    int entries = sparse_entries(elements), thread = (int)threadIdx.x;
    for (int i = thread; i < elements; i += SPARSE_THREADS) { sum[i] = 0; }
    __syncthreads();
    for (int rank = 0; rank < step.ranks; rank++) {
        const SparseBlock *block = blocks + (size_t)rank * stride + blockIdx.x;
        if (thread < entries) {
            int at = sparse_index(block, thread);
            sum[at] = fmaf(step.weights[rank], sparse_value(block, thread), sum[at]);
        }
        __syncthreads();
    }
    for (int i = thread; i < elements; i += SPARSE_THREADS) {
        size_t at = begin + (size_t)i;
        float moved = sparse_move(range.outer[at], sum[i], &step);
        float start = range.exchange != NULL ? moved - range.exchange[at] : moved;
        range.local[at] = range.start != NULL ? start + (range.local[at] - range.start[at]) : start;
        range.outer[at] = moved;
    }
}

static inline void cuda_sparse_apply(Stream *stream, const OuterRange *range, const SparseBlock *blocks,
                                     size_t stride, const SparseStep *step) {
    if (range->count == 0) { return; }
    cuda_launch(stream, sparse_apply_kernel, dim3((unsigned)sparse_blocks(range->count)),
                dim3(SPARSE_THREADS), SPARSE_BLOCK * sizeof(float), *range, blocks, stride, *step);
}
