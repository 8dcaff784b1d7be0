// cuda_bf16.h: stands in for the toolkit's header where kernels are emulated (simt.h). It
// has the type and the conversions that this project uses, and what the language of its kernels
// writes as assembly.
#pragma once

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

// ---- What kernels/cuda/language.cuh writes as assembly, with its contracts ------------

#define UNROLL

inline char *cuda_shared() { return simt_block()->shared; }

inline uint32_t bf16_pair(float low, float high) {
    return (uint32_t)__float2bfloat16_rn(low).bits | (uint32_t)__float2bfloat16_rn(high).bits << 16;
}

inline float exp2_approximate(float x) { return exp2f(x); }

inline void copy_async(void *shared, const void *global, bool valid) {
    simt_copy_start(shared, global, 16, valid ? 16 : 0);
}

inline void copy_async_commit() { simt_copy_commit(); }

template <int GROUPS> inline void copy_async_wait() { simt_copy_wait(GROUPS); }

inline void mma_m16n8k16(float d[4], const uint32_t a[4], const uint32_t b[2]) {
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

template <bool TRANSPOSED> inline void matrix_load_x4(uint32_t r[4], const void *row) {
    if ((uintptr_t)row % 16 != 0) { simt_fail("a row of a matrix load is not aligned"); }
    if (!simt_is_shared(row, 16)) { simt_fail("a row of a matrix load is not in shared memory"); }
    char mine[16];
    memcpy(mine, row, sizeof mine);
    const char(*slots)[SIMT_SLOT] = simt_warp_exchange(0xffffffffu, mine, sizeof mine);
    int lane = (int)threadIdx.x % SIMT_WARP, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) {
        for (int half = 0; half < 2; half++) {
            int line = TRANSPOSED ? 2 * t + half : g, column = TRANSPOSED ? g : 2 * t + half;
            memcpy((char *)&r[i] + half * 2, slots[i * 8 + line] + column * 2, 2);
        }
    }
}
