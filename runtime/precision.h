// precision.h: the number format of parameters and activations while a model computes.
//
// fp32, or bf16, the upper half of fp32. Sums and everything that lasts (master and outer
// parameters, gradients) are fp32, AdamW's moments as --moments says.
//
// Code for both formats holds such arrays as pointers to Real, a type without a
// definition, so that nothing is read or added without saying how wide an element is.
#pragma once

#include <stddef.h>
#include <stdint.h>

// The last two are for operands of matrix products on a GPU: Fp8.
typedef enum Precision { PRECISION_FP32, PRECISION_BF16, PRECISION_E4M3, PRECISION_E5M2 } Precision;

typedef struct Real Real;

// A matrix (rows, columns), dense: the numbers of `codes` times *scale. The scale takes its largest
// magnitude to the format's largest number: 448 of E4M3, with 3 bits of mantissa; 57344 of E5M2,
// for gradients, which are spread wider. A product sums over columns, a multiple of FP8_UNIT.
typedef struct Fp8 {
    uint8_t *codes;
    float *scale;
    Precision format;
} Fp8;

enum {
    FP8_UNIT = 16,
    FP8_SCALE_STRIDE = 4 // floats from one scale to the next: cuBLASLt wants 16 bytes
};

static inline size_t precision_bytes(Precision precision) {
    return precision == PRECISION_FP32 ? 4 : precision == PRECISION_BF16 ? 2 : 1;
}

static inline const char *precision_name(Precision precision) {
    static const char *const names[] = {"fp32", "bf16", "e4m3", "e5m2"};
    return names[precision];
}

// base + elements. A NULL base stays NULL only with 0 elements.
static inline Real *real_at(Real *base, size_t elements, Precision precision) {
    return (Real *)((char *)base + elements * precision_bytes(precision));
}

static inline const Real *real_at_const(const Real *base, size_t elements, Precision precision) {
    return (const Real *)((const char *)base + elements * precision_bytes(precision));
}

// For callers that know that the format is fp32.
static inline float *real_floats(Real *base) { return (float *)base; }
static inline const float *real_floats_const(const Real *base) { return (const float *)base; }
static inline Real *as_reals(float *base) { return (Real *)base; }
static inline const Real *as_reals_const(const float *base) { return (const Real *)base; }
