// fp8.h: a matrix in FP8, the operand of a product on a GPU of compute capability 8.9 or more.
//
//   E4M3   4 bits of exponent, 3 of mantissa, up to 448: activations and weights
//   E5M2   5 and 2, up to 57344: gradients, which are spread wider
//
// So few exponents need a scale: a matrix has one, by which its largest magnitude becomes the
// largest number of the format.
#ifndef ACCO_KERNELS_FP8_H
#define ACCO_KERNELS_FP8_H

#include <stdint.h>

#include "runtime/precision.h"

// (rows, columns), dense: the numbers of `codes` times *scale. Both are device memory, and
// columns, which a product sums over, a multiple of FP8_UNIT.
typedef struct Fp8 {
    uint8_t *codes;
    float *scale;
    Precision format;
} Fp8;

enum { FP8_UNIT = 16 };

#endif
