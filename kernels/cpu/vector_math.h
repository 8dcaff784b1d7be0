// vector_math.h: arithmetic that the compiler turns into vector instructions, and that gives the
// same bits in a vector, in the last elements of a loop, and in every program.
//
//   multiply_add      a b + c, fused where the processor can
//   LANE_LOOP         a loop over a row with sums in a fixed order
//   vector_exp, vector_logistic
//
// The C library's vector versions of functions need finite-math flags, under which a NaN may
// vanish. Here they have no branches: comparisons become masks. Contract: relative error below 1e-6
// where the result is a normal number; NaN in gives NaN out; exp underflows to 0 and overflows to
// infinity. There is no tanh on purpose: gelu.h uses the logistic function in its place.
#pragma once

#include "kernels/cpu/reals.h"

// Compilers fuse nothing by themselves (-ffp-contract=off in the Makefile). They would fuse one
// thing in the vectors of a loop and another in its last elements, so the bits of an element would
// depend on where the array was cut. A processor without such an instruction rounds twice, because
// the C library's fmaf is slow there.
REAL_LOOP float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// Sums over a row are taken in one order on every processor: element i is added to lane i %
// SUM_LANES, in the order of i; then lanes_sum adds up the lanes.
enum { SUM_LANES = 16 };

// The statements behind `count` for i = 0 ... count - 1, lane = i % SUM_LANES. They must not depend
// on each other but through what belongs to a lane.
#define LANE_LOOP(i, lane, count, ...) \
    do { \
        const size_t elements = (count), whole = elements / SUM_LANES * SUM_LANES; \
        for (size_t group = 0; group < whole; group += SUM_LANES) { \
            _Pragma("omp simd") for (size_t lane = 0; lane < SUM_LANES; lane++) { \
                const size_t i = group + lane; \
                __VA_ARGS__ \
            } \
        } \
        _Pragma("omp simd") for (size_t lane = 0; lane < elements - whole; lane++) { \
            const size_t i = whole + lane; \
            __VA_ARGS__ \
        } \
    } while (0)

REAL_LOOP float lanes_sum(const float *lanes /* (SUM_LANES) */) {
    float quarters[4];
    for (int i = 0; i < 4; i++) { quarters[i] = (lanes[i] + lanes[i + 8]) + (lanes[i + 4] + lanes[i + 12]); }
    return (quarters[0] + quarters[2]) + (quarters[1] + quarters[3]);
}

REAL_LOOP double lanes_sum_doubles(const double *lanes /* (SUM_LANES) */) {
    double sum = 0;
    for (int lane = 0; lane < SUM_LANES; lane++) { sum += lanes[lane]; }
    return sum;
}

// The largest of row (count), -infinity if there is none. A NaN is skipped.
REAL_LOOP float row_maximum(const Real *row, size_t count, Precision precision) {
    float lanes[SUM_LANES], maximum = -INFINITY;
    for (int lane = 0; lane < SUM_LANES; lane++) { lanes[lane] = -INFINITY; }
    LANE_LOOP(i, lane, count, {
        float value = real_load(row, i, precision);
        lanes[lane] = value > lanes[lane] ? value : lanes[lane];
    });
    for (int lane = 0; lane < SUM_LANES; lane++) { maximum = lanes[lane] > maximum ? lanes[lane] : maximum; }
    return maximum;
}

// exp(x) = 2^n exp(r) with n the integer nearest to x/log(2), so |r| <= log(2)/2; exp(r) is its
// Taylor polynomial of degree 7 (error 2e-9). 2^n is applied as two factors, each of about n/2,
// which are normal numbers over the whole range, even where the result is denormal.
REAL_LOOP float vector_exp(float x) {
    // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits.
    const float shifter = 12582912.0f;
    // Both comparisons are false for NaN, which passes through.
    float bounded = x < -104.0f ? -104.0f : x;
    bounded = bounded > 89.0f ? 89.0f : bounded;
    float shifted = multiply_add(bounded, 1.44269504f, shifter);
    float n = shifted - shifter;
    float r = multiply_add(n, -0.693145752f, bounded); // log(2) in two parts
    r = multiply_add(n, -1.42860677e-6f, r);
    float p = 1.98412698e-4f;
    p = multiply_add(p, r, 1.38888889e-3f);
    p = multiply_add(p, r, 8.33333333e-3f);
    p = multiply_add(p, r, 4.16666667e-2f);
    p = multiply_add(p, r, 1.66666667e-1f);
    p = multiply_add(p, r, 0.5f);
    p = multiply_add(p, r, 1.0f);
    p = multiply_add(p, r, 1.0f);
    int32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    int32_t exponent = bits - 0x4B400000; // n as an integer
    int32_t half = exponent >> 1;
    uint32_t first_bits = (uint32_t)(half + 127) << 23, second_bits = (uint32_t)(exponent - half + 127) << 23;
    float first, second;
    memcpy(&first, &first_bits, sizeof first);
    memcpy(&second, &second_bits, sizeof second);
    return p * first * second;
}

// Returns 1 / (1 + exp(-x)); *complement becomes 1 minus that, without cancellation. The
// bound keeps exp finite, so that the product below is never 0 * infinity.
REAL_LOOP float vector_logistic(float x, float *complement) {
    float bounded = x < -87.0f ? -87.0f : x;
    float e = vector_exp(-bounded);
    float s = 1.0f / (1.0f + e);
    *complement = e * s;
    return s;
}
