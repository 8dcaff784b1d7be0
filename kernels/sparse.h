// sparse.h: the format in which SparseLoCo sends a vector: the largest elements, each in two bits.
//
// A block covers SPARSE_BLOCK consecutive elements of the vector, the last one what is left. It
// holds the SPARSE_ENTRIES largest elements, or all of them where there are no more:
//
//   bytes  0 ..  95   indexes within the block, ascending, 12 bits each, the lower ones first
//   bytes 96 .. 111   codes, 2 bits each: 1 for a negative element, 2 for the high magnitude
//   bytes 112 .. 115  the low and the high magnitude, bf16
//
// So 116 bytes stand for 4096 elements: 0.23 bits each. Entries that a short block lacks
// are zero bits.
//
// Elements are compared by magnitude, that is by the bits of their absolute values; of
// equal ones the first are taken. So the choice depends on no order of execution. The mean
// magnitude divides the taken elements: the low magnitude is the mean of the elements not
// above it, the high magnitude the mean of the elements above it, and 0 is the mean of none.
// Sums are fp32, from 0 and in the order of indexes. So CPU and GPU make the same bits.
//
// NaNs and infinities count as the largest. A block that holds one has a magnitude that is
// not finite; sparse_is_sound() says so.
//
// What one thread does is written once for CPU and GPU (WIRE_FUNCTION).
// kernels/cpu/sparse.h and kernels/cuda/sparse.cuh select the elements.
#pragma once

#include "kernels/wire.h"

enum {
    SPARSE_BLOCK = 4096,
    SPARSE_ENTRIES = 64,
    SPARSE_NEGATIVE = 1, // bits of a code
    SPARSE_HIGH = 2
};

typedef struct SparseBlock {
    uint8_t indexes[SPARSE_ENTRIES * 12 / 8];
    uint8_t codes[SPARSE_ENTRIES * 2 / 8];
    uint16_t low, high; // magnitudes, bf16
} SparseBlock;

static_assert(sizeof(SparseBlock) == 116, "blocks travel as they lie in memory");

// What the ranks do with each other's blocks.
typedef struct SparseStep {
    int ranks;
    float alpha;          // length of the outer step along the mean
    float total;          // sum of the weights
    const float *weights; // (ranks), where the blocks are
} SparseStep;

// The elements that are taken of one block, in the order of their indexes; zeros behind the last.
typedef struct SparseTaken {
    uint16_t indexes[SPARSE_ENTRIES];
    float values[SPARSE_ENTRIES];
} SparseTaken;

// Blocks of a vector of `count` elements.
WIRE_FUNCTION size_t sparse_blocks(size_t count) { return (count + SPARSE_BLOCK - 1) / SPARSE_BLOCK; }

// How many elements the block has that begins at element `begin` of `count`.
WIRE_FUNCTION int sparse_elements(size_t count, size_t begin) {
    size_t left = count - begin, most = SPARSE_BLOCK;
    return (int)(left < most ? left : most);
}

WIRE_FUNCTION int sparse_entries(int elements) {
    return elements < SPARSE_ENTRIES ? elements : SPARSE_ENTRIES;
}

WIRE_FUNCTION uint32_t sparse_magnitude_bits(float value) { return wire_float_bits(value) & 0x7fffffffu; }

WIRE_FUNCTION float sparse_mean(float sum, int count) { return count > 0 ? sum / (float)count : 0.0f; }

// Fills in the two magnitudes. Returns what divides them.
WIRE_FUNCTION float sparse_set_magnitudes(SparseBlock *block, const float *values /* (entries) */,
                                          int entries) {
    float sum = 0, low = 0, high = 0;
    int highs = 0;
    for (int i = 0; i < entries; i++) { sum += fabsf(values[i]); }
    float mean = sparse_mean(sum, entries);
    for (int i = 0; i < entries; i++) {
        float magnitude = fabsf(values[i]);
        bool above = magnitude > mean;
        highs += above ? 1 : 0;
        high += above ? magnitude : 0.0f;
        low += above ? 0.0f : magnitude;
    }
    block->low = bf16_from_float(sparse_mean(low, entries - highs));
    block->high = bf16_from_float(sparse_mean(high, highs));
    return mean;
}

// Fills in entries 4 group .. 4 group + 3, which share bytes. mean: what
// sparse_set_magnitudes has returned.
WIRE_FUNCTION void sparse_set_entries(SparseBlock *block, int group, const SparseTaken *taken, float mean) {
    const uint16_t *indexes = taken->indexes + 4 * group;
    const float *values = taken->values + 4 * group;
    uint32_t codes = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t negative = wire_float_bits(values[i]) >> 31 != 0 ? SPARSE_NEGATIVE : 0;
        uint32_t high = fabsf(values[i]) > mean ? SPARSE_HIGH : 0;
        codes |= (negative | high) << 2 * i;
    }
    block->codes[group] = (uint8_t)codes;
    for (int pair = 0; pair < 2; pair++) {
        uint32_t both = (uint32_t)indexes[2 * pair] | (uint32_t)indexes[2 * pair + 1] << 12;
        uint8_t *bytes = block->indexes + 6 * group + 3 * pair;
        bytes[0] = (uint8_t)both;
        bytes[1] = (uint8_t)(both >> 8);
        bytes[2] = (uint8_t)(both >> 16);
    }
}

WIRE_FUNCTION int sparse_index(const SparseBlock *block, int entry) {
    const uint8_t *bytes = block->indexes + entry / 2 * 3;
    return entry % 2 == 0 ? bytes[0] | (bytes[1] & 15) << 8 : bytes[1] >> 4 | bytes[2] << 4;
}

WIRE_FUNCTION float sparse_value(const SparseBlock *block, int entry) {
    int code = block->codes[entry / 4] >> entry % 4 * 2 & 3;
    float magnitude = bf16_to_float((code & SPARSE_HIGH) != 0 ? block->high : block->low);
    return (code & SPARSE_NEGATIVE) != 0 ? -magnitude : magnitude;
}

// False: the block holds a NaN or an infinity, or numbers that are nearly as large.
WIRE_FUNCTION bool sparse_is_sound(const SparseBlock *block) {
    const uint16_t exponent = 0x7f80;
    return (block->low & exponent) != exponent && (block->high & exponent) != exponent;
}

// The two steps of one element. Each rounds a product and a sum at once, so that no compiler
// decides.
WIRE_FUNCTION float sparse_feed_back(float error, float outer, float local, float beta) {
    return fmaf(beta, error, outer - local);
}

WIRE_FUNCTION float sparse_move(float outer, float sum, const SparseStep *step) {
    return fmaf(-step->alpha, sum / step->total, outer);
}
