// sparse.h: error feedback and the outer step of SparseLoCo, in the format of kernels/sparse.h,
// in loops over whole blocks in the calling thread. A vector may be cut between blocks and gives
// the same bits.
//
// The 64th largest magnitude is found bit by bit: a bit belongs to it if at least 64
// magnitudes are no smaller than what has been found so far together with this bit. That
// is 31 passes over a block, each a plain count of comparisons, without a branch on the data.
#pragma once

#include "kernels/cpu/outer.h"
#include "kernels/sparse.h"

// Encodes the largest of `values` (elements), one block at most.
static inline void cpu_sparse_encode_block(SparseBlock *block, const float *values, int elements) {
    uint32_t magnitudes[SPARSE_BLOCK], smallest = 0;
    int entries = sparse_entries(elements), above = 0, found = 0;
    SparseTaken taken = {{0}, {0}};
    for (int i = 0; i < elements; i++) { magnitudes[i] = sparse_magnitude_bits(values[i]); }
    for (int bit = 30; bit >= 0; bit--) {
        uint32_t candidate = smallest | 1u << bit;
        int count = 0;
        for (int i = 0; i < elements; i++) { count += magnitudes[i] >= candidate ? 1 : 0; }
        if (count >= entries) { smallest = candidate; }
    }
    for (int i = 0; i < elements; i++) { above += magnitudes[i] > smallest ? 1 : 0; }
    for (int i = 0, equal = entries - above; i < elements && found < entries; i++) {
        if (magnitudes[i] < smallest || (magnitudes[i] == smallest && equal-- <= 0)) { continue; }
        taken.indexes[found] = (uint16_t)i;
        taken.values[found++] = values[i];
    }
    float mean = sparse_set_magnitudes(block, taken.values, entries);
    for (int group = 0; group < SPARSE_ENTRIES / 4; group++) {
        sparse_set_entries(block, group, &taken, mean);
    }
}

// The error, range->exchange, = beta * error + (outer - local); the blocks are what is sent of it,
// which leaves the error. A block with a NaN or an infinity keeps all of it, so that who looks for
// the element finds it there.
static inline void cpu_sparse_encode(const OuterRange *range, SparseBlock *blocks, float beta) {
    float *error = range->exchange;
    for (size_t i = 0; i < range->count; i++) {
        error[i] = sparse_feed_back(error[i], range->outer[i], range->local[i], beta);
    }
    for (size_t begin = 0; begin < range->count; begin += SPARSE_BLOCK) {
        SparseBlock *block = blocks + begin / SPARSE_BLOCK;
        int elements = sparse_elements(range->count, begin);
        cpu_sparse_encode_block(block, error + begin, elements);
        for (int i = 0; i < sparse_entries(elements) && sparse_is_sound(block); i++) {
            error[begin + (size_t)sparse_index(block, i)] -= sparse_value(block, i);
        }
    }
}

// With the weighted mean over ranks of what all of them have sent:
//   outer = outer - alpha * mean
//   local = outer - error + (local - sent)
// `sent`, the parameters at the sending, is range->start: NULL where no steps were made since;
// `error` is range->exchange: NULL where a worker's own parameters do not keep what it has not
// sent. Rank r's blocks begin r * stride behind `blocks`. Sums start from 0 and are taken in the
// order of ranks.
static inline void cpu_sparse_apply(const OuterRange *range, const SparseBlock *blocks, size_t stride,
                                    const SparseStep *step) {
    const OuterRange r = *range;
    const SparseStep s = *step;
    for (size_t begin = 0; begin < r.count; begin += SPARSE_BLOCK) {
        float sum[SPARSE_BLOCK] = {0};
        int elements = sparse_elements(r.count, begin);
        for (int rank = 0; rank < s.ranks; rank++) {
            const SparseBlock *block = blocks + (size_t)rank * stride + begin / SPARSE_BLOCK;
            for (int i = 0; i < sparse_entries(elements); i++) {
                int at = sparse_index(block, i);
                sum[at] = fmaf(s.weights[rank], sparse_value(block, i), sum[at]);
            }
        }
        for (int i = 0; i < elements; i++) {
            size_t at = begin + (size_t)i;
            float moved = sparse_move(r.outer[at], sum[i], &s);
            float start = r.exchange != NULL ? moved - r.exchange[at] : moved;
            r.local[at] = r.start != NULL ? start + (r.local[at] - r.start[at]) : start;
            r.outer[at] = moved;
        }
    }
}
