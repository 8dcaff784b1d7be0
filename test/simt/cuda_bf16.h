// cuda_bf16.h: stands in for the toolkit's header where kernels are emulated (simt.h). It
// has the type and the conversions that this project uses, and the products of
// tensor cores.
#ifndef ACCO_SIMT_CUDA_BF16_H
#define ACCO_SIMT_CUDA_BF16_H

#include <stdint.h>
#include <string.h>

#include "cuda_runtime.h"

struct __nv_bfloat16 {
    uint16_t bits;
};

// Rounds to the nearest bf16, of two equally near to the even one. A NaN stays a NaN.
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    __nv_bfloat16 result;
    result.bits = (bits & 0x7fffffffu) > 0x7f800000u ? (uint16_t)0x7fff : (uint16_t)rounded;
    return result;
}

inline float __bfloat162float(__nv_bfloat16 value) {
    uint32_t bits = (uint32_t)value.bits << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }

inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
    __nv_bfloat16 result;
    result.bits = bits;
    return result;
}

// d += a b for fragments of m16n8k16 (kernels/cuda/language.cuh).
inline void simt_mma_m16n8k16(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    simt_counts.product_operations += 2 * 16 * 8 * 16 / SIMT_WARP; // this lane's share
    uint32_t mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    const char(*slots)[SIMT_SLOT] = simt_warp_exchange(0xffffffffu, mine, sizeof mine);
    int lane = (int)threadIdx.x % SIMT_WARP, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) {
        int row = g + (i / 2) * 8, column = 2 * t + i % 2;
        for (int k = 0; k < 16; k++) {
            uint16_t left, right;
            int a_lane = (row % 8) * 4 + (k % 8) / 2, a_register = row / 8 + (k / 8) * 2,
                b_lane = column * 4 + (k % 8) / 2;
            memcpy(&left, slots[a_lane] + a_register * 4 + k % 2 * 2, sizeof left);
            memcpy(&right, slots[b_lane] + 16 + k / 8 * 4 + k % 2 * 2, sizeof right);
            d[i] +=
                __bfloat162float(__ushort_as_bfloat16(left)) * __bfloat162float(__ushort_as_bfloat16(right));
        }
    }
}

// Four 8 x 8 matrices of bf16 from shared memory; `row` is this lane's.
inline void simt_matrix_load_x4(uint32_t r[4], const void *row, bool transposed) {
    if ((uintptr_t)row % 16 != 0) { simt_fail("a row of a matrix load is not aligned"); }
    if (!simt_is_shared(row, 16)) { simt_fail("a row of a matrix load is not in shared memory"); }
    char mine[16];
    memcpy(mine, row, sizeof mine);
    const char(*slots)[SIMT_SLOT] = simt_warp_exchange(0xffffffffu, mine, sizeof mine);
    int lane = (int)threadIdx.x % SIMT_WARP, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) {
        for (int half = 0; half < 2; half++) {
            int line = transposed ? 2 * t + half : g, column = transposed ? g : 2 * t + half;
            memcpy((char *)&r[i] + half * 2, slots[i * 8 + line] + column * 2, 2);
        }
    }
}

#endif
