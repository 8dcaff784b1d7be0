// cuda_bf16.h: stands in for the toolkit's header where kernels are emulated (simt.h). It
// has the type and the conversions that this project uses.
#ifndef ACCO_SIMT_CUDA_BF16_H
#define ACCO_SIMT_CUDA_BF16_H

#include <stdint.h>
#include <string.h>

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

#endif
