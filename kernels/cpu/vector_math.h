// vector_math.h: exponential and logistic function, written so that the compiler turns a
// loop over them into vector instructions.
//
// The C library's expf is a call per element here: its vector versions need finite-math
// flags, under which a NaN may vanish. These are branch-free (comparisons become masks),
// so `for (...) { y[i] = vector_exp(x[i]); }` runs 8 or 16 elements at a time.
//
// Contract: relative error below 1e-6 where the result is a normal number, NaN in gives
// NaN out, exp underflows to 0 and overflows to infinity. tanh is not here on purpose:
// GELU's 0.5 (1 + tanh u) equals the logistic function of 2u, which loses no digits for
// negative u.
#ifndef ACCO_KERNELS_CPU_VECTOR_MATH_H
#define ACCO_KERNELS_CPU_VECTOR_MATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

// exp(x) = 2^n exp(r), n the nearest integer to x/log(2), |r| <= log(2)/2, exp(r) by its
// Taylor polynomial of degree 7 (error 2e-9). The two steps of 2^n (n halved) keep the
// scale a normal number over the whole range, denormal results included.
static inline float vector_exp(float x) {
    const float shifter =
        12582912.0f; // 1.5 * 2^23: adding it rounds to an integer, which then sits in the low bits
    float bounded = x < -104.0f ? -104.0f : x;
    bounded = bounded > 89.0f ? 89.0f : bounded; // both comparisons are false for NaN, which passes through
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

// 1 / (1 + exp(-x)); `complement` receives 1 - that, without cancellation. The bound
// keeps exp finite, so that the product is never 0 * inf.
static inline float vector_logistic(float x, float *complement) {
    float bounded = x < -87.0f ? -87.0f : x;
    float e = vector_exp(-bounded);
    float s = 1.0f / (1.0f + e);
    *complement = e * s;
    return s;
}

#endif
