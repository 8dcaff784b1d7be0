// moments.h: AdamW's moments in bf16, rounded at random.
//
// In one step a second moment falls by at most 1 - beta2 of itself. Half of the spacing of bf16 is
// 2^-9 to 2^-8 of a number. So with a beta2 above 0.998 a moment that is rounded to nearest would
// never fall again. Here a number between two neighbours in bf16 becomes the upper one with a
// probability equal to its place between them, so the mean of many roundings is the number itself.
//
// The random bits are a function of the run's seed, the number of the commit and the place of
// the element in the flat parameter vector, and of nothing else: they repeat on any number of
// threads and owners, and after a resume. Written once for CPU and GPU, in whole numbers.
#pragma once

#include "kernels/wire.h"
#include "runtime/random.h"

// The part of the random bits that all elements of one step share.
typedef struct MomentKey {
    uint32_t before, after; // the first round of mixing, and the second
} MomentKey;

// commit: the number of commits before this step.
static inline MomentKey moment_key(uint64_t seed, int64_t commit) {
    uint64_t word = random_hash(random_hash(seed, UINT64_C(0x6d6f6d656e74)), (uint64_t)commit);
    MomentKey key = {(uint32_t)word, (uint32_t)(word >> 32)};
    return key;
}

// A bijection of 32-bit words. Every input bit moves about half of the upper output bits; the
// lower ones are less well mixed.
WIRE_FUNCTION uint32_t moment_mix(uint32_t word) {
    word = (word ^ word >> 16) * 0x7feb352du;
    return (word ^ word >> 15) * 0x846ca68bu;
}

// 32 random bits for an element: the lower 16 are for its first moment, the upper ones for
// its second.
WIRE_FUNCTION uint32_t moment_noise(MomentKey key, size_t index) {
    uint32_t high = (uint32_t)((uint64_t)index >> 32);
    uint32_t word = moment_mix(moment_mix((uint32_t)index ^ key.before) ^ high ^ key.after);
    return word ^ word >> 16;
}

// The bf16 number below or above `value`, as a float; the lower 16 bits of `noise` choose which
// one. A number that bf16 can represent stays as it is. Above the largest number is infinity. A
// second moment that becomes infinite stays so, and its element does not move any more; that
// takes a gradient of 10^19, which no run survives anyway. A NaN stays a NaN.
WIRE_FUNCTION float moment_round(float value, uint32_t noise) {
    uint32_t bits = wire_float_bits(value);
    uint32_t rounded = (bits + (noise & 0xffffu)) & 0xffff0000u;
    return wire_is_finite(bits & 0x7fffffffu) ? wire_float_from_bits(rounded) : value;
}
