// fp8.cuh: operands of matrix products in FP8, on a GPU.
//
// Contract: kernels/kernels.h (fp8_cast). One kernel finds the largest magnitude of each
// block's elements; the next one looks at those of all blocks, so no order of threads
// matters. Magnitudes are compared as bits: a NaN or an infinity is the largest one, becomes
// the scale, and so reaches every element of the product.
//
// Casts are computed with integers, because GPUs before 8.9, for which the same program is
// built, lack the instruction.
//
// Limit: memory. The matrix is read twice, since its scale is known only behind its end.
#ifndef ACCO_KERNELS_CUDA_FP8_CUH
#define ACCO_KERNELS_CUDA_FP8_CUH

#include "kernels/cuda/language.cuh"
#include "kernels/fp8.h"

enum { FP8_THREADS = 512 };

// A matrix whose largest magnitude is below this one is scaled as if it had it: what is left
// of its elements cannot matter, and one divided by the scale stays finite.
#define FP8_LEAST 0x1p-100f

// The code of the number of the format that is nearest to value, of two equally near to the
// even one; of a larger one than the largest, that one.
template <Precision FORMAT> DEVICE uint32_t fp8_code(float value) {
    constexpr int MANTISSA = FORMAT == PRECISION_E4M3 ? 3 : 2, BIAS = FORMAT == PRECISION_E4M3 ? 7 : 15,
                  SHIFT = 23 - MANTISSA;
    constexpr uint32_t LARGEST = FORMAT == PRECISION_E4M3 ? 0x7e : 0x7b, NAN_CODE = 0x7f;
    uint32_t bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
    uint32_t code = (magnitude + (1u << (SHIFT - 1)) - 1 + (magnitude >> SHIFT & 1u)) >> SHIFT;
    code -= (uint32_t)(127 - BIAS) << MANTISSA;
    if (magnitude < (uint32_t)(128 - BIAS) << 23) {
        // Below the normal numbers: a multiple of the smallest one. The sum rounds it.
        float multiple = __uint_as_float(magnitude) * (float)(1 << (BIAS - 1 + MANTISSA));
        code = __float_as_uint(multiple + 0x1p23f) & 0xffu;
    }
    code = code > LARGEST ? LARGEST : code;
    return (bits >> 24 & 0x80u) | (magnitude > 0x7f800000u ? NAN_CODE : code);
}

// The largest of all threads' values, for all of them. scratch: a word for each warp.
DEVICE uint32_t fp8_block_largest(uint32_t most, uint32_t *scratch) {
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) {
        uint32_t other = __shfl_xor_sync(0xffffffffu, most, lanes);
        most = other > most ? other : most;
    }
    if (lane_index() == 0) { scratch[warp_index()] = most; }
    __syncthreads();
    for (int i = 0; i < FP8_THREADS / WARP; i++) { most = scratch[i] > most ? scratch[i] : most; }
    return most;
}

// largest (gridDim.x) = the bits of the largest magnitude of each block's part of in (rows,
// columns), rows `stride` apart. packs: of 8 elements; row_packs: of a row.
static __global__ void __launch_bounds__(FP8_THREADS)
    fp8_largest_kernel(uint32_t *largest, const __nv_bfloat16 *in, unsigned packs, unsigned row_packs,
                       int stride) {
    uint32_t most = 0;
    for (unsigned i = blockIdx.x * FP8_THREADS + threadIdx.x; i < packs; i += gridDim.x * FP8_THREADS) {
        float values[8];
        piece_unpack(values, piece_load<8>(in + (size_t)(i / row_packs) * stride + i % row_packs * 8));
        UNROLL
        for (int k = 0; k < 8; k++) {
            uint32_t magnitude = __float_as_uint(values[k]) & 0x7fffffffu;
            most = magnitude > most ? magnitude : most;
        }
    }
    most = fp8_block_largest(most, (uint32_t *)(void *)cuda_shared());
    if (threadIdx.x == 0) { largest[blockIdx.x] = most; }
}

// codes (rows, columns) and *scale from in, or, TURNED, codes (columns, rows). largest: what
// the kernel above has found in as many blocks. A thread makes FP8_UNIT codes that lie side
// by side, and stores them at once; turned they come from a column, and neighbours read
// neighbouring columns.
template <Precision FORMAT, bool TURNED>
static __global__ void __launch_bounds__(FP8_THREADS)
    fp8_cast_kernel(uint8_t *codes, float *scale, const uint32_t *largest, const __nv_bfloat16 *in, int rows,
                    int columns, int stride) {
    const float limit = FORMAT == PRECISION_E4M3 ? 448.0f : 57344.0f;
    uint32_t most = threadIdx.x < gridDim.x ? largest[threadIdx.x] : 0;
    most = fp8_block_largest(most, (uint32_t *)(void *)cuda_shared());
    most = most < __float_as_uint(FP8_LEAST) ? __float_as_uint(FP8_LEAST) : most;
    if (blockIdx.x == 0 && threadIdx.x == 0) { *scale = __uint_as_float(most) / limit; }
    float inverse = limit / __uint_as_float(most);
    unsigned pieces = (unsigned)((size_t)rows * columns / FP8_UNIT);
    unsigned across = (unsigned)(TURNED ? columns : columns / FP8_UNIT);
    for (unsigned i = blockIdx.x * FP8_THREADS + threadIdx.x; i < pieces; i += gridDim.x * FP8_THREADS) {
        unsigned line = i / across, place = i % across;
        float values[FP8_UNIT];
        uint32_t words[FP8_UNIT / 4] = {0, 0, 0, 0};
        if (TURNED) {
            const __nv_bfloat16 *from = in + (size_t)line * FP8_UNIT * stride + place;
            UNROLL
            for (int k = 0; k < FP8_UNIT; k++) { values[k] = to_float(from[(size_t)k * stride]); }
        } else {
            const __nv_bfloat16 *from = in + (size_t)line * stride + place * FP8_UNIT;
            piece_unpack(values, piece_load<8>(from));
            piece_unpack(values + 8, piece_load<8>(from + 8));
        }
        UNROLL
        for (int k = 0; k < FP8_UNIT; k++) {
            words[k / 4] |= fp8_code<FORMAT>(values[k] * inverse) << (k % 4 * 8);
        }
        size_t to = TURNED ? (size_t)place * rows + line * FP8_UNIT : (size_t)i * FP8_UNIT;
        store_16_bytes(codes + to, words);
    }
}

static inline void cuda_fp8_cast(Stream *stream, const Fp8 *out, uint8_t *turned, uint32_t *largest,
                                 const Real *in, int rows, int columns, int stride) {
    const __nv_bfloat16 *values = reals<__nv_bfloat16>(in);
    unsigned packs = (unsigned)((size_t)rows * (size_t)columns / 8);
    dim3 grid((unsigned)size_min(cuda_blocks(packs, FP8_THREADS), CUDA_ROW_BLOCKS)), block(FP8_THREADS);
    size_t shared = FP8_THREADS / WARP * sizeof(uint32_t);
    assert(columns % FP8_UNIT == 0 && stride % 8 == 0 && (uintptr_t)in % 16 == 0);
    cuda_launch(stream, fp8_largest_kernel, grid, block, shared, largest, values, packs,
                (unsigned)(columns / 8), stride);
    auto *cast = out->format == PRECISION_E4M3 ? fp8_cast_kernel<PRECISION_E4M3, false>
                                               : fp8_cast_kernel<PRECISION_E5M2, false>;
    cuda_launch(stream, cast, grid, block, shared, out->codes, out->scale, largest, values, rows, columns,
                stride);
    if (turned == NULL) { return; }
    assert(out->format == PRECISION_E4M3 && rows % FP8_UNIT == 0);
    cuda_launch(stream, fp8_cast_kernel<PRECISION_E4M3, true>, grid, block, shared, turned, out->scale,
                largest, values, rows, columns, stride);
}

#endif
