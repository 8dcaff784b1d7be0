// fp8.cuh: operands of matrix products in FP8, on a GPU.
//
// Contract: kernels/kernels.h (fp8_cast). One kernel finds the largest magnitude of each
// block's elements, the next one reads all blocks' largest. So the matrix is read twice: its
// scale is known only at its end. Casts are computed with integers, since the program is also
// built for GPUs that lack the instruction.
#pragma once

#include "kernels/cpu/row_blocks.h"
#include "kernels/cuda/language.cuh"
#include "runtime/numbers.h"

enum { FP8_THREADS = 512 };

// The code of the format's number nearest to value, of two equally near numbers the even one.
// A value beyond the largest number gets the largest one's code.
template <Precision FORMAT> DEVICE uint32_t fp8_code(float value) {
    constexpr int MANTISSA = FORMAT == PRECISION_E4M3 ? 3 : 2, BIAS = FORMAT == PRECISION_E4M3 ? 7 : 15,
                  SHIFT = 23 - MANTISSA;
    constexpr uint32_t LARGEST = FORMAT == PRECISION_E4M3 ? 0x7e : 0x7b, NAN_CODE = 0x7f;
    uint32_t bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
    uint32_t code = (magnitude + (1u << (SHIFT - 1)) - 1 + (magnitude >> SHIFT & 1u)) >> SHIFT;
    code -= (uint32_t)(127 - BIAS) << MANTISSA;
    // Below the normal numbers: a multiple of the smallest one, rounded by the sum.
    float multiple = __uint_as_float(magnitude) * (float)(1 << (BIAS - 1 + MANTISSA));
    if (magnitude < (uint32_t)(128 - BIAS) << 23) { code = __float_as_uint(multiple + 0x1p23f) & 0xffu; }
    code = magnitude > 0x7f800000u ? NAN_CODE : code > LARGEST ? LARGEST : code;
    return (bits >> 24 & 0x80u) | code;
}

// largest (gridDim.x) = the largest magnitude in each block's part of `in`. packs: of 8
// elements; row_packs: of a row.
static __global__ void __launch_bounds__(FP8_THREADS)
    fp8_largest_kernel(float *largest, const __nv_bfloat16 *in, unsigned packs, unsigned row_packs,
                       int stride) {
    float most = 0.0f;
    for (unsigned i = blockIdx.x * FP8_THREADS + threadIdx.x; i < packs; i += gridDim.x * FP8_THREADS) {
        float values[8];
        piece_unpack(values, piece_load<8>(in + (size_t)(i / row_packs) * stride + i % row_packs * 8));
        UNROLL
        for (int k = 0; k < 8; k++) { most = fmaxf(most, fabsf(values[k])); }
    }
    most = block_max(most, (float *)cuda_shared());
    if (threadIdx.x == 0) { largest[blockIdx.x] = most; }
}

// codes (rows, columns), or (columns, rows) if TURNED, and *scale, from the magnitudes that
// as many blocks of the kernel above have found. A thread stores FP8_UNIT codes at once; if
// TURNED, they are one column's. (1e-30: a matrix of zeros has a scale, too.)
template <Precision FORMAT, bool TURNED>
static __global__ void __launch_bounds__(FP8_THREADS)
    fp8_cast_kernel(uint8_t *codes, float *scale, const float *largest, const __nv_bfloat16 *in, int rows,
                    int columns, int stride) {
    const float limit = FORMAT == PRECISION_E4M3 ? 448.0f : 57344.0f;
    float most = threadIdx.x < gridDim.x ? largest[threadIdx.x] : 0.0f;
    most = fmaxf(block_max(most, (float *)cuda_shared()), 1e-30f);
    if (blockIdx.x == 0 && threadIdx.x == 0) { *scale = most / limit; }
    float inverse = limit / most, values[FP8_UNIT];
    unsigned pieces = (unsigned)((size_t)rows * columns / FP8_UNIT),
             across = (unsigned)(TURNED ? columns : columns / FP8_UNIT);
    for (unsigned i = blockIdx.x * FP8_THREADS + threadIdx.x; i < pieces; i += gridDim.x * FP8_THREADS) {
        unsigned line = i / across, place = i % across;
        uint32_t words[FP8_UNIT / 4] = {0, 0, 0, 0};
        const __nv_bfloat16 *from =
            in + (size_t)line * (TURNED ? FP8_UNIT : 1) * stride + place * (TURNED ? 1 : FP8_UNIT);
        UNROLL
        for (int k = 0; TURNED && k < FP8_UNIT; k++) { values[k] = to_float(from[(size_t)k * stride]); }
        UNROLL
        for (int k = 0; !TURNED && k < FP8_UNIT; k += 8) {
            piece_unpack(values + k, piece_load<8>(from + k));
        }
        UNROLL
        for (int k = 0; k < FP8_UNIT; k++) {
            words[k / 4] |= fp8_code<FORMAT>(values[k] * inverse) << (k % 4 * 8);
        }
        store_16_bytes(codes + (TURNED ? (size_t)place * rows + line * FP8_UNIT : (size_t)i * FP8_UNIT),
                       words);
    }
}

static inline void cuda_fp8_cast(Stream *stream, const Fp8 *out, bool turns, float *largest, const Real *in,
                                 int rows, int columns, int stride) {
    bool gradients = out->format == PRECISION_E5M2;
    const __nv_bfloat16 *values = reals<__nv_bfloat16>(in);
    size_t count = (size_t)rows * columns, shared = FP8_THREADS / WARP * sizeof(float);
    dim3 grid((unsigned)size_min(cuda_blocks(count / 8, FP8_THREADS), CUDA_ROW_BLOCKS)), block(FP8_THREADS);
    assert(columns % FP8_UNIT == 0 && stride % 8 == 0 && (uintptr_t)in % 16 == 0);
    assert(!turns || (rows % FP8_UNIT == 0 && !gradients));
    cuda_launch(stream, fp8_largest_kernel, grid, block, shared, largest, values, count / 8, columns / 8,
                stride);
    cuda_launch(stream,
                gradients ? fp8_cast_kernel<PRECISION_E5M2, false> : fp8_cast_kernel<PRECISION_E4M3, false>,
                grid, block, shared, out->codes, out->scale, largest, values, rows, columns, stride);
    if (turns) {
        cuda_launch(stream, fp8_cast_kernel<PRECISION_E4M3, true>, grid, block, shared, out->codes + count,
                    out->scale, largest, values, rows, columns, stride);
    }
}
