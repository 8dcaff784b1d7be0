// vector_math.h: the exponential and the logistic function, written so that the compiler
// turns loops over them into vector instructions. (The C library's vector versions need
// finite-math flags, under which a NaN may vanish.) They have no branches: comparisons become
// masks.
//
// Contract: relative error below 1e-6 where the result is a normal number; NaN in gives
// NaN out; exp underflows to 0 and overflows to infinity. There is no tanh on purpose:
// gelu.h uses the logistic function in its place.
#pragma once

#include <stdint.h>
#include <string.h>

// exp(x) = 2^n exp(r) with n the integer nearest to x/log(2), so |r| <= log(2)/2; exp(r)
// is its Taylor polynomial of degree 7 (error 2e-9). 2^n is applied as two factors, each
// of about n/2, which are normal numbers over the whole range, even where the result is
// denormal.
static inline float vector_exp(float x) {
    // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits.
    const float shifter = 12582912.0f;
    // Both comparisons are false for NaN, which passes through.
    float bounded = x < -104.0f ? -104.0f : x;
    bounded = bounded > 89.0f ? 89.0f : bounded;
    float shifted = bounded * 1.44269504f + shifter;
    float n = shifted - shifter;
    float r = bounded - n * 0.693145752f; // log(2) in two parts: n times the first one is exact
    r = r - n * 1.42860677e-6f;
    float p = 1.98412698e-4f;
    p = p * r + 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
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
static inline float vector_logistic(float x, float *complement) {
    float bounded = x < -87.0f ? -87.0f : x;
    float e = vector_exp(-bounded);
    float s = 1.0f / (1.0f + e);
    *complement = e * s;
    return s;
}
