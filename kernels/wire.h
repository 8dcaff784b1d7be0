// wire.h: the number formats in which ranks send each other arrays of fp32.
//
//   format   bits   an element becomes                           and is off by at most
//   fp32     32     itself                                       nothing
//   bf16     16     its upper half, to nearest even              2^-8 of itself
//   int8      8     a multiple of its block's scale,             half of the scale
//                   -127 to 127, to nearest even
//   int4      4     the same, -7 to 7, of its group's scale      half of the scale
//   e3m0      4     0, or its block's scale times 1, 1/2, ...    a third of itself; near
//                   1/64, to nearest, ties outwards              0, scale / 128
//
// All but the first two are coarse: the error of an element depends on the largest one in
// its block or group. Sums of gradients and differences of parameters tolerate that; parameters
// themselves do not. In 4 bits gradients tolerate it if what is lost is sent with the next commit
// (Collective::unsent; which jobs do so, scheduler_feeds_back() says).
//
// e3m0 suits elements of many sizes, int4 elements of about one size, such as AdamW's steps. A
// group of 32 has a scale of 16 bits, which makes 4.5 bits an element. With one of 32 bits a block
// (4.125 bits) gradients lose 2.7 times as much power, and runs from scratch show it
// (dev/results/four-bits-2026-11-27.md).
//
// A range of elements, 0 or more, is encoded by itself. It is cut into blocks of WIRE_BLOCK
// elements, the last one shorter. A block depends on nothing but its elements, so an array may be
// cut into ranges at any multiple of WIRE_BLOCK and gives the same bytes in the same order. A block
// begins with its scales: of int8 and e3m0 one in fp32, of int4 eight in bf16. Then come the codes.
// Zeros fill the last word of a range: every byte of it is defined. Encoded data is aligned to 4
// bytes, is in the byte order of the machine, and overlaps neither input nor output.
//
// Scales are chosen so that every value of a coarse format is exact in fp32. Therefore
// encoding what was decoded gives the same bytes again, and the owner of a shard can keep the
// rounded values that it sent. And code times scale is exact, so an addition gives the same
// bits whether the compiler fuses it with the product or not.
//
// A block or group that holds a NaN or an infinity decodes to NaNs in the coarse formats. fp32
// and bf16 keep it as it is.
//
// The conversion of one element is written once for CPU and GPU (WIRE_FUNCTION);
// kernels/cuda/wire.cuh does blocks and ranges on a GPU.
#pragma once

#include <stdbool.h>

#include "runtime/numbers.h"

typedef enum WireFormat {
    WIRE_FP32,
    WIRE_BF16,
    WIRE_INT8,
    WIRE_INT4,
    WIRE_E3M0,
    WIRE_FORMAT_COUNT
} WireFormat;

enum {
    WIRE_BLOCK = 256,
    // Elements of int4 that share a scale: those of 16 bytes of codes, which are 16 neighbours and,
    // half a block behind them, 16 others.
    WIRE_GROUP = 32,
    WIRE_GROUPS = WIRE_BLOCK / WIRE_GROUP
};

// A function of one element, for the CPU and for kernels.
#ifdef __CUDACC__
#define WIRE_FUNCTION static __host__ __device__ __forceinline__
#else
#define WIRE_FUNCTION static inline
#endif

WIRE_FUNCTION uint32_t wire_float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

WIRE_FUNCTION float wire_float_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// ---- fp32 and bf16. wire_encode_FORMAT and wire_decode_FORMAT do one block: count <= WIRE_BLOCK

static inline void wire_encode_fp32(void *out, const float *in, size_t count) {
    memcpy(out, in, count * sizeof(float));
}

static inline void wire_decode_fp32(float *out, const void *in, size_t count) {
    memcpy(out, in, count * sizeof(float));
}

// The upper half of an fp32, rounded to nearest even. A value that is too large becomes
// infinity; a NaN stays a NaN.
WIRE_FUNCTION uint16_t bf16_from_float(float value) {
    uint32_t bits = wire_float_bits(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uint32_t quiet = (bits >> 16) | 0x40u;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

WIRE_FUNCTION float bf16_to_float(uint16_t half) { return wire_float_from_bits((uint32_t)half << 16); }

static inline void wire_encode_bf16(void *out, const float *in, size_t count) {
    uint16_t *halves = (uint16_t *)out;
#pragma omp simd
    for (size_t i = 0; i < count; i++) { halves[i] = bf16_from_float(in[i]); }
}

static inline void wire_decode_bf16(float *out, const void *in, size_t count) {
    const uint16_t *halves = (const uint16_t *)in;
#pragma omp simd
    for (size_t i = 0; i < count; i++) { out[i] = bf16_to_float(halves[i]); }
}

// ---- Coarse formats: largest magnitudes -----------------------------------------------

// The bits of the magnitude of a value. Magnitudes are ordered as their bits are, with
// NaN above infinity, so a block's largest one shows whether it holds either.
WIRE_FUNCTION uint32_t wire_magnitude(float value) { return wire_float_bits(value) & 0x7fffffffu; }

static inline uint32_t wire_largest(const float *in, size_t count) {
    uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (size_t i = 0; i < count; i++) {
        uint32_t magnitude = wire_magnitude(in[i]);
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

WIRE_FUNCTION bool wire_is_finite(uint32_t bits) { return bits < 0x7f800000u; }

// The scale of a block that decodes to NaNs.
enum { WIRE_NAN_BITS = 0x7fc00000 };

// ---- int8 and int4 --------------------------------------------------------------------

enum { WIRE_INT8_STEPS = 127, WIRE_INT4_STEPS = 7 };

// The largest magnitude divided by the number of steps, cut to 16 significant bits, for int4 to
// the 8 of a bf16. These and the 8 of a code, or of a code and a half, are at most the 24 of an
// fp32: so every multiple of the scale and every tie is exact, and the division below cannot round
// a number onto a tie. It is cut and not rounded, so that the largest multiple never overflows. It
// is at least the smallest normal number: nothing is divided by 0 or by a scale that has lost bits.
WIRE_FUNCTION float wire_int_scale(uint32_t largest, int steps) {
    uint32_t bits = wire_float_bits(wire_float_from_bits(largest) / (float)steps);
    return fmaxf(wire_float_from_bits(bits & (steps == WIRE_INT4_STEPS ? ~0xffffu : ~0xffu)), 0x1p-126f);
}

// Near 1.5 * 2^23 the spacing of fp32 is 1. So the sum is rounded to a whole number, to nearest
// even, and its last bits are the code, a signed number: 8 bits of int8, 4 of int4. The scale of
// int4 was cut by less than one in 128, so the largest element is below 7.1 of it.
WIRE_FUNCTION uint8_t wire_int_code(float value, float scale) {
    return (uint8_t)wire_float_bits(value / scale + 0x1.8p23f);
}

// ---- e3m0 -----------------------------------------------------------------------------

// A code has a sign in bit 3 and c in bits 0 to 2. c = 0 means 0, without a sign; c = 1
// to 7 means scale * 2^(c-7). Codes lie in a block as int4's do.

// The code of a value. Magnitudes are compared as their bits, in which one octave is 2^23. The
// middles between levels are an octave apart, and the highest is 3/4 of the scale. If that has too
// many bits for fp32, the least number that rounds up is the next one above.
WIRE_FUNCTION uint8_t wire_e3m0_code(float value, float scale) {
    double highest = 0.75 * (double)scale;
    float middle = (float)highest;
    uint32_t seven = wire_float_bits(middle) + ((double)middle < highest ? 1u : 0u); // the least for c = 7
    uint32_t bits = wire_float_bits(value), magnitude = wire_magnitude(value);
    // As if the middles continued downwards. But c is 1 from half of the smallest level on.
    uint32_t below_two = seven - (7u << 23), one = wire_float_bits(scale) - (7u << 23);
    uint32_t octaves = (magnitude > below_two ? magnitude - below_two : 0u) >> 23;
    uint32_t least = magnitude >= one ? 1u : 0u;
    uint32_t c = octaves > least ? octaves : least;
    return (uint8_t)(c > 0 ? c | (bits >> 28 & 8u) : 0u);
}

// A code's value as a multiple of the scale: 0, or a power of two with the biased exponent
// 127 - 7 + c. Upper bits of `code` are ignored.
WIRE_FUNCTION float wire_e3m0_level(uint32_t code) {
    uint32_t c = code & 7u;
    return wire_float_from_bits(c > 0 ? (code & 8u) << 28 | (c + 120u) << 23 : 0u);
}

// ---- Blocks of the coarse formats -----------------------------------------------------

// The scale of a block with this largest magnitude. For e3m0 it is the magnitude, at least
// 2^-119: then all levels and middles are normal numbers, and exact.
WIRE_FUNCTION float wire_scale(WireFormat format, uint32_t largest) {
    return format == WIRE_E3M0
               ? fmaxf(wire_float_from_bits(largest), 0x1p-119f)
               : wire_int_scale(largest, format == WIRE_INT8 ? WIRE_INT8_STEPS : WIRE_INT4_STEPS);
}

// The code of an element beside such a scale: 8 bits of int8, 4 of the others.
WIRE_FUNCTION uint8_t wire_code(WireFormat format, float scale, float value) {
    return format == WIRE_E3M0   ? wire_e3m0_code(value, scale)
           : format == WIRE_INT8 ? wire_int_code(value, scale)
                                 : wire_int_code(value, scale) & 15u;
}

// The value of the lower bits of a code, as a multiple of the scale. For int8 and int4 they are
// a signed number.
WIRE_FUNCTION float wire_level(WireFormat format, uint32_t code) {
    return format == WIRE_INT8   ? (float)(int8_t)code
           : format == WIRE_INT4 ? (float)((int32_t)(code << 28) >> 28)
                                 : wire_e3m0_level(code);
}

// Bytes of codes that share a scale, how many scales a block has, and the bytes of these.
WIRE_FUNCTION uint32_t wire_group_bytes(WireFormat format) {
    return format == WIRE_INT4 ? WIRE_GROUP / 2 : WIRE_BLOCK;
}
WIRE_FUNCTION uint32_t wire_groups(WireFormat format) { return format == WIRE_INT4 ? WIRE_GROUPS : 1; }
WIRE_FUNCTION uint32_t wire_scale_bytes(WireFormat format) {
    return format == WIRE_INT4 ? WIRE_GROUPS * sizeof(uint16_t) : sizeof(float);
}

// The scale of a group, behind the others. int4's has no more bits than a bf16.
WIRE_FUNCTION void wire_store_scale(WireFormat format, void *block, uint32_t group, float scale) {
    if (format == WIRE_INT4) {
        ((uint16_t *)block)[group] = (uint16_t)(wire_float_bits(scale) >> 16);
    } else {
        memcpy(block, &scale, sizeof scale);
    }
}

WIRE_FUNCTION float wire_load_scale(WireFormat format, const void *block, uint32_t group) {
    float scale;
    if (format == WIRE_INT4) { return bf16_to_float(((const uint16_t *)block)[group]); }
    memcpy(&scale, block, sizeof scale);
    return scale;
}

// `count` codes <- `lower`, and in their upper halves the first `pairs` of `upper`. Inlined with
// constants, these two are a few instructions on whole vectors.
static inline __attribute__((always_inline)) void wire_encode_group(WireFormat format, uint8_t *codes,
                                                                    const float *lower, const float *upper,
                                                                    size_t count, size_t pairs, float scale) {
#pragma omp simd
    for (size_t i = 0; i < pairs; i++) {
        codes[i] = (uint8_t)(wire_code(format, scale, lower[i]) | wire_code(format, scale, upper[i]) << 4);
    }
#pragma omp simd
    for (size_t i = pairs; i < count; i++) { codes[i] = wire_code(format, scale, lower[i]); }
}

static inline __attribute__((always_inline)) void wire_decode_group(WireFormat format, float *lower,
                                                                    float *upper, const uint8_t *codes,
                                                                    size_t count, size_t pairs, float scale) {
#pragma omp simd
    for (size_t i = 0; i < count; i++) { lower[i] = wire_level(format, codes[i]) * scale; }
#pragma omp simd
    for (size_t i = 0; i < pairs; i++) { upper[i] = wire_level(format, (uint32_t)codes[i] >> 4) * scale; }
}

// In a block of n elements of 4 bits, byte j holds element j in its lower half and element
// j + (n + 1) / 2 in its upper half: so both halves of the block are read as whole vectors.
typedef struct WireGroup {
    size_t lower, upper; // the elements of its first byte; upper is at most n
    size_t count, pairs; // its bytes, and how many of them have an element in the upper half
} WireGroup;

static inline __attribute__((always_inline)) WireGroup wire_group(WireFormat format, uint32_t group,
                                                                  size_t n) {
    size_t paired = format == WIRE_INT8 ? 0 : n / 2, bytes = n - paired, whole = wire_group_bytes(format),
           begin = size_min(group * whole, bytes), count = size_min(bytes - begin, whole);
    WireGroup place = {begin, size_min(bytes + begin, n), count,
                       size_min(paired - size_min(begin, paired), count)};
    return place;
}

// The format is a constant where these two are called.
static inline __attribute__((always_inline)) void wire_encode_coarse(WireFormat format, void *out,
                                                                     const float *in, size_t count) {
    for (uint32_t group = 0; group < wire_groups(format); group++) {
        WireGroup place = wire_group(format, group, count);
        const float *lower = in + place.lower, *upper = in + place.upper;
        uint8_t *codes = (uint8_t *)out + wire_scale_bytes(format) + place.lower;
        uint32_t low = wire_largest(lower, place.count), high = wire_largest(upper, place.pairs),
                 largest = low > high ? low : high;
        bool finite = wire_is_finite(largest);
        float scale = finite ? wire_scale(format, largest) : wire_float_from_bits(WIRE_NAN_BITS);
        wire_store_scale(format, out, group, scale);
        if (!finite) {
            memset(codes, 0, place.count);
        } else if (place.pairs == WIRE_GROUP / 2 && place.count == place.pairs) {
            wire_encode_group(format, codes, lower, upper, WIRE_GROUP / 2, WIRE_GROUP / 2, scale);
        } else {
            wire_encode_group(format, codes, lower, upper, place.count, place.pairs, scale);
        }
    }
}

static inline __attribute__((always_inline)) void wire_decode_coarse(WireFormat format, float *out,
                                                                     const void *in, size_t count) {
    for (uint32_t group = 0; group < wire_groups(format); group++) {
        WireGroup place = wire_group(format, group, count);
        float *lower = out + place.lower, *upper = out + place.upper,
              scale = wire_load_scale(format, in, group);
        const uint8_t *codes = (const uint8_t *)in + wire_scale_bytes(format) + place.lower;
        if (place.pairs == WIRE_GROUP / 2 && place.count == place.pairs) {
            wire_decode_group(format, lower, upper, codes, WIRE_GROUP / 2, WIRE_GROUP / 2, scale);
        } else {
            wire_decode_group(format, lower, upper, codes, place.count, place.pairs, scale);
        }
    }
}

#define WIRE_COARSE(name, format) \
    static inline void wire_encode_##name(void *out, const float *in, size_t count) { \
        wire_encode_coarse(format, out, in, count); \
    } \
    static inline void wire_decode_##name(float *out, const void *in, size_t count) { \
        wire_decode_coarse(format, out, in, count); \
    }
WIRE_COARSE(int8, WIRE_INT8)
WIRE_COARSE(int4, WIRE_INT4)
WIRE_COARSE(e3m0, WIRE_E3M0)

// ---- The table of formats, and ranges -------------------------------------------------

typedef struct WireCodec {
    const char *name;
    size_t bits; // of an element
    bool coarse; // blocks have a scale: too coarse for parameters themselves
    void (*encode)(void *out, const float *in, size_t count);
    void (*decode)(float *out, const void *in, size_t count);
} WireCodec;

// In the order of WireFormat.
static const WireCodec WIRE_CODECS[WIRE_FORMAT_COUNT] = {
    {.name = "fp32", .bits = 32, .encode = wire_encode_fp32, .decode = wire_decode_fp32},
    {.name = "bf16", .bits = 16, .encode = wire_encode_bf16, .decode = wire_decode_bf16},
    {.name = "int8", .bits = 8, .coarse = true, .encode = wire_encode_int8, .decode = wire_decode_int8},
    {.name = "int4", .bits = 4, .coarse = true, .encode = wire_encode_int4, .decode = wire_decode_int4},
    {.name = "e3m0", .bits = 4, .coarse = true, .encode = wire_encode_e3m0, .decode = wire_decode_e3m0},
};

static inline const char *wire_name(WireFormat format) { return WIRE_CODECS[format].name; }

static inline bool wire_is_coarse(WireFormat format) { return WIRE_CODECS[format].coarse; }

// Bytes of an encoded range of `count` elements: a multiple of 4.
static inline size_t wire_bytes(WireFormat format, size_t count) {
    size_t blocks = (count + WIRE_BLOCK - 1) / WIRE_BLOCK,
           words = (count * WIRE_CODECS[format].bits + 31) / 32;
    return (WIRE_CODECS[format].coarse ? blocks * wire_scale_bytes(format) : 0) + words * 4;
}

// Which pieces of a vector a message holds, for kernels on a GPU. They are equally long, each
// is a range, and they lie in the message owner after owner, and for each owner cell after
// cell. comm/layout.h defines owners and cells; here they are only distances.
typedef struct WirePieces {
    size_t count;        // elements of a piece
    size_t bytes;        // in the message, from a piece to the owner's next one
    size_t owner_bytes;  // in the message, from an owner to the next one
    size_t cells;        // of each owner
    size_t owner_count;  // in the message
    const int *owners;   // (owner_count) in GPU memory; NULL: 0, 1, ...
    size_t owner_stride; // elements of the vector from an owner's piece to the next owner's
    size_t cell_stride;  // and from a piece to the owner's piece in the next cell
    size_t base_stride;  // the same in the base
    float *unsent;       // like the vector; encoding adds it, and leaves there what rounding loses; or NULL
} WirePieces;

// A message of one range.
static inline WirePieces wire_range(WireFormat format, size_t count) {
    WirePieces pieces = {.count = count, .bytes = wire_bytes(format, count), .cells = 1, .owner_count = 1};
    return pieces;
}

// Encodes in (count) into out (wire_bytes(format, count)).
static inline void wire_encode(WireFormat format, void *out, const float *in, size_t count) {
    const WireCodec *codec = &WIRE_CODECS[format];
    size_t stride = wire_bytes(format, WIRE_BLOCK);
    char *block = (char *)out;
    if (count > 0) { memset(block + wire_bytes(format, count) - 4, 0, 4); }
    for (size_t begin = 0; begin < count; begin += WIRE_BLOCK, block += stride) {
        codec->encode(block, in + begin, size_min(count - begin, WIRE_BLOCK));
    }
}

// Decodes the range at `in`, which was encoded with the same format and count, into out (count).
static inline void wire_decode(WireFormat format, float *out, const void *in, size_t count) {
    const WireCodec *codec = &WIRE_CODECS[format];
    size_t stride = wire_bytes(format, WIRE_BLOCK);
    const char *block = (const char *)in;
    for (size_t begin = 0; begin < count; begin += WIRE_BLOCK, block += stride) {
        codec->decode(out + begin, block, size_min(count - begin, WIRE_BLOCK));
    }
}

// sum (count) += what wire_decode gives, bit for bit. Blocks are decoded one at a time
// and stay in the first-level cache.
static inline void wire_add(WireFormat format, float *sum, const void *in, size_t count) {
    const WireCodec *codec = &WIRE_CODECS[format];
    size_t stride = wire_bytes(format, WIRE_BLOCK);
    const char *block = (const char *)in;
    float values[WIRE_BLOCK];
    for (size_t begin = 0; begin < count; begin += WIRE_BLOCK, block += stride) {
        size_t n = size_min(count - begin, WIRE_BLOCK);
        codec->decode(values, block, n);
#pragma omp simd
        for (size_t i = 0; i < n; i++) { sum[begin + i] += values[i]; }
    }
}
