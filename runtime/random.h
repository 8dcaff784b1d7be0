// random.h: the one source of randomness in this program.
//
// A Random is a splitmix64 stream: one word of state that moves by a fixed odd step and
// is mixed on the way out. So a sample, a weight or a story is a pure function of a few
// integers, on any number of ranks and in any order, and a checkpoint saves nothing else.
//
// Derive independent streams by hashing, never by adding: two seeds whose distance is a
// multiple of the step share a stream.
//     Random random = {random_hash(random_hash(seed, tensor), element)};
//
// Constants: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA
// 2014; the mixing rounds are Stafford's variant 13. Not for secrets.
#pragma once

#include <math.h>
#include <stdint.h>

typedef struct Random {
    uint64_t state;
} Random;

// A bijection in which every input bit moves about half of the output bits. 0 gives 0.
static inline uint64_t random_mix(uint64_t word) {
    word = (word ^ (word >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    word = (word ^ (word >> 27)) * UINT64_C(0x94D049BB133111EB);
    return word ^ (word >> 31);
}

// The next 64 uniform bits of the stream.
static inline uint64_t random_bits(Random *random) {
    random->state += UINT64_C(0x9E3779B97F4A7C15);
    return random_mix(random->state);
}

// Uniform in [0, 1), a multiple of 2^-53: every value is exact in a double.
static inline double random_uniform(Random *random) {
    return (double)(random_bits(random) >> 11) * 0x1.0p-53;
}

// Standard normal by Box and Muller. The sine branch is not used: a second value kept for later
// would be hidden state. 1 - u is in (0, 1], so the logarithm is finite. At most about 8.6.
static inline double random_normal(Random *random) {
    double radius = sqrt(-2.0 * log(1.0 - random_uniform(random)));
    double angle = 6.283185307179586476925 * random_uniform(random);
    return radius * cos(angle);
}

// Their order matters. (0, 0) does not give 0, so seed 0 is as good as any other.
static inline uint64_t random_hash(uint64_t a, uint64_t b) {
    return random_mix(random_mix(a + UINT64_C(0x9E3779B97F4A7C15)) ^ (b + UINT64_C(0xD1B54A32D192ED03)));
}
