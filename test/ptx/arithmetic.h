// arithmetic.h: the instructions that each lane executes by itself, as the PTX ISA
// defines them, and the table of their names.
//
// An operation is a function of one lane's values. Its types say how wide the registers
// are; bool is a predicate.
#pragma once

#include <bit>
#include <cmath>

#include "test/ptx/machine.h"

typedef std::map<std::string, Operation> Operations;

template <typename T> static inline T *lanes_of(Warp &warp, uint32_t place) {
    return (T *)(warp.file + place);
}

template <typename T> static inline T lane_value(Warp &warp, uint32_t place, int lane) {
    return lanes_of<T>(warp, place)[lane];
}
template <> inline bool lane_value<bool>(Warp &warp, uint32_t place, int lane) {
    return *lanes_of<uint32_t>(warp, place) >> lane & 1;
}

template <typename T>
static inline void put(Warp &warp, uint32_t place, const T values[LANES], uint32_t mask) {
    T *target = lanes_of<T>(warp, place);
    for (int lane = 0; lane < LANES; lane++) {
        target[lane] = mask >> lane & 1 ? values[lane] : target[lane];
    }
}
template <> inline void put<bool>(Warp &warp, uint32_t place, const bool values[LANES], uint32_t mask) {
    uint32_t bits = 0, *target = lanes_of<uint32_t>(warp, place);
    for (int lane = 0; lane < LANES; lane++) { bits |= (uint32_t)values[lane] << lane; }
    *target = (*target & ~mask) | (bits & mask);
}

template <typename T> static std::string size_of() {
    return std::is_same_v<T, bool> ? "p" : std::to_string(sizeof(T));
}

// The operation that computes a function, which captures nothing, in every lane.
template <typename Function, typename Result, typename... Operands>
static Operation plain_of(Result (*)(Operands...)) {
    Handler *run = [](Warp &warp, const Instruction &instruction, uint32_t mask) {
        Result results[LANES];
        auto each = [&]<size_t... I>(std::index_sequence<I...>) {
            for (int lane = 0; lane < LANES; lane++) {
                results[lane] = Function()(lane_value<Operands>(warp, instruction.in[I], lane)...);
            }
        };
        each(std::index_sequence_for<Operands...>());
        put<Result>(warp, instruction.out[0], results, mask);
    };
    return {run, size_of<Result>() + ":" + (size_of<Operands>() + ...), PLAIN};
}
template <typename Function> static Operation plain(Function function) {
    return plain_of<Function>(+function);
}

typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;

static inline float float_of(u32 bits) { return std::bit_cast<float>(bits); }
static inline u32 bits_of(float value) { return std::bit_cast<u32>(value); }

// Every NaN that arithmetic makes has these bits.
static inline float number(float value) { return value != value ? float_of(0x7fffffffu) : value; }

// One operand is a NaN: the other one. -0 is less than +0.
static inline float larger(float x, float y) {
    if (x != x || y != y) { return x != x ? number(y) : x; }
    return x == y ? float_of(bits_of(x) & bits_of(y)) : x > y ? x : y;
}

// bf16: to the nearest, of two equally near to the even one.
static inline u16 bf16_of(float value) {
    u32 bits = bits_of(value);
    return value != value ? (u16)0x7fff : (u16)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// The sum is rounded downwards; it is exact in double but for the last bit of that.
static inline float fma_down(float x, float y, float z) {
    double exact = fma((double)x, (double)y, (double)z);
    float nearest = (float)exact;
    return number((double)nearest > exact ? nextafterf(nearest, -INFINITY) : nearest);
}

// A result of an approximate function, off by up to `most` units in the last place.
static inline float approximately(float result, u32 input, int most) {
    if (!(fabsf(result) >= 1e-37f && fabsf(result) < INFINITY)) { return result; }
    u32 hash = (input ^ input >> 15) * 0x2c1b3c6du;
    hash = (hash ^ hash >> 12) * 0x297a2d39u;
    hash ^= hash >> 15;
    return float_of(bits_of(result) + hash % (u32)(2 * most + 1) - (u32)most);
}

static inline float exp2_of(float x) {
    float result = (float)exp2((double)x);
    return x != x || x == 0.0f ? number(result) : approximately(result, bits_of(x), 1);
}

// Denormal inputs and results are 0.
static inline float exp2_flushed(float x) {
    float result = exp2_of(fabsf(x) < 0x1p-126f ? 0.0f : x);
    return result < 0x1p-126f ? 0.0f : result;
}

static inline float log2_of(float x) { return approximately(number((float)log2((double)x)), bits_of(x), 1); }

// Divided by more than 2^126 the result is 0, or a NaN for infinity.
static inline float divide_approximately(float x, float y) {
    if (fabsf(y) > 0x1p126f && fabsf(y) < INFINITY) { return number(x * 0.0f); }
    return approximately(number(x / y), bits_of(x) * 31u + bits_of(y), 2);
}

static inline u32 insert_bits(u32 x, u32 y, u32 position, u32 length) {
    u64 field = (length & 255) >= 32 ? 0xffffffffu : (UINT64_C(1) << (length & 255)) - 1;
    u64 shifted = (position & 255) >= 32 ? 0 : field << (position & 255);
    return (u32)((y & ~shifted) | (((u64)x & field) << (position & 63) & shifted));
}

// Behind the end of x, and of a signed field, comes its sign.
template <bool SIGNED> static u32 extract_bits(u32 x, u32 position, u32 length) {
    position &= 255, length &= 255;
    u32 last = position + length - 1 > 31 ? 31 : position + length - 1, result = 0;
    u32 sign = !SIGNED || length == 0 ? 0 : x >> last & 1;
    for (u32 i = 0; i < 32; i++) {
        result |= (i < length && position + i <= 31 ? x >> (position + i) & 1 : sign) << i;
    }
    return result;
}

// Any four of the eight bytes of y and x, or their signs.
static inline u32 permute_bytes(u32 x, u32 y, u32 selectors) {
    u32 result = 0;
    for (int i = 0; i < 4; i++) {
        u32 selector = selectors >> (4 * i) & 15,
            byte = (u32)(((u64)y << 32 | x) >> (8 * (selector & 7))) & 255;
        if (selector & 8) { byte = byte & 128 ? 255 : 0; }
        result |= byte << (8 * i);
    }
    return result;
}

// T: unsigned, S: signed, of the same size; both names of a type mean the same here.
template <typename T, typename S> static void add_integers(Operations &all, const std::string &bits) {
    for (std::string type : {".s" + bits, ".u" + bits}) {
        all["add" + type] = plain([](T x, T y) { return (T)(x + y); });
        all["sub" + type] = plain([](T x, T y) { return (T)(x - y); });
        all["mul.lo" + type] = plain([](T x, T y) { return (T)((u64)x * y); });
        all["mad.lo" + type] = plain([](T x, T y, T z) { return (T)((u64)x * y + z); });
    }
    all["mul.hi.u" + bits] = plain([](T x, T y) { return (T)((unsigned __int128)x * y >> 8 * sizeof(T)); });
    all["mul.hi.s" + bits] = plain([](S x, S y) { return (S)((__int128)x * y >> 8 * sizeof(S)); });
    all["neg.s" + bits] = plain([](T x) { return (T)(0 - x); });
    all["min.u" + bits] = plain([](T x, T y) { return x < y ? x : y; });
    all["max.u" + bits] = plain([](T x, T y) { return x > y ? x : y; });
    all["min.s" + bits] = plain([](S x, S y) { return x < y ? x : y; });
    all["max.s" + bits] = plain([](S x, S y) { return x > y ? x : y; });
    all["div.u" + bits] = plain([](T x, T y) { return y == 0 ? (T) ~(T)0 : (T)(x / y); });
    all["rem.u" + bits] = plain([](T x, T y) { return y == 0 ? x : (T)(x % y); });
    all["div.s" + bits] = plain([](S x, S y) {
        return y == 0 ? (S)-1 : y == -1 ? (S)(0 - (T)x) : (S)(x / y);
    });
    all["rem.s" + bits] = plain([](S x, S y) { return y == 0 ? x : y == -1 ? (S)0 : (S)(x % y); });
    all["and.b" + bits] = plain([](T x, T y) { return (T)(x & y); });
    all["or.b" + bits] = plain([](T x, T y) { return (T)(x | y); });
    all["xor.b" + bits] = plain([](T x, T y) { return (T)(x ^ y); });
    all["not.b" + bits] = plain([](T x) { return (T)~x; });
    all["shl.b" + bits] = plain([](T x, u32 y) { return y >= 8 * sizeof(T) ? (T)0 : (T)((u64)x << y); });
    all["shr.u" + bits] = plain([](T x, u32 y) { return y >= 8 * sizeof(T) ? (T)0 : (T)(x >> y); });
    all["shr.s" + bits] =
        plain([](S x, u32 y) { return (S)(x >> (y >= 8 * sizeof(S) ? 8 * sizeof(S) - 1 : y)); });
    for (std::string type : {".b" + bits, ".u" + bits, ".s" + bits, ".f" + bits}) {
        all["mov" + type] = plain([](T x) { return x; });
        all["selp" + type] = plain([](T x, T y, bool first) { return first ? x : y; });
    }
}

template <typename T> static void add_comparisons(Operations &all, const std::string &type) {
    all["setp.eq." + type] = plain([](T x, T y) { return x == y; });
    all["setp.ne." + type] = plain([](T x, T y) { return x < y || x > y; }); // false for a NaN
    all["setp.lt." + type] = plain([](T x, T y) { return x < y; });
    all["setp.le." + type] = plain([](T x, T y) { return x <= y; });
    all["setp.gt." + type] = plain([](T x, T y) { return x > y; });
    all["setp.ge." + type] = plain([](T x, T y) { return x >= y; });
}

// The comparisons that are true where one operand is a NaN.
static inline void add_unordered(Operations &all) {
    all["setp.neu.f32"] = plain([](float x, float y) { return !(x == y); });
    all["setp.equ.f32"] = plain([](float x, float y) { return !(x < y) && !(x > y); });
    all["setp.ltu.f32"] = plain([](float x, float y) { return !(x >= y); });
    all["setp.leu.f32"] = plain([](float x, float y) { return !(x > y); });
    all["setp.gtu.f32"] = plain([](float x, float y) { return !(x <= y); });
    all["setp.geu.f32"] = plain([](float x, float y) { return !(x < y); });
    all["setp.num.f32"] = plain([](float x, float y) { return x == x && y == y; });
    all["setp.nan.f32"] = plain([](float x, float y) { return x != x || y != y; });
}

static inline void add_floats(Operations &all) {
    for (std::string rounding : {"", ".rn"}) {
        all["add" + rounding + ".f32"] = plain([](float x, float y) { return number(x + y); });
        all["sub" + rounding + ".f32"] = plain([](float x, float y) { return number(x - y); });
        all["mul" + rounding + ".f32"] = plain([](float x, float y) { return number(x * y); });
        all["add" + rounding + ".f64"] = plain([](double x, double y) { return x + y; });
        all["mul" + rounding + ".f64"] = plain([](double x, double y) { return x * y; });
    }
    all["fma.rn.f32"] = plain([](float x, float y, float z) { return number(__builtin_fmaf(x, y, z)); });
    all["fma.rm.f32"] = plain([](float x, float y, float z) { return fma_down(x, y, z); });
    all["fma.rn.f64"] = plain([](double x, double y, double z) { return __builtin_fma(x, y, z); });
    all["div.rn.f32"] = plain([](float x, float y) { return number(x / y); });
    all["rcp.rn.f32"] = plain([](float x) { return number(1.0f / x); });
    all["rcp.rn.f64"] = plain([](double x) { return 1.0 / x; });
    all["sqrt.rn.f32"] = plain([](float x) { return number(sqrtf(x)); });
    all["sqrt.rn.f64"] = plain([](double x) { return sqrt(x); });
    all["neg.f32"] = plain([](float x) { return float_of(bits_of(x) ^ 0x80000000u); });
    all["abs.f32"] = plain([](float x) { return float_of(bits_of(x) & 0x7fffffffu); });
    all["max.f32"] = plain([](float x, float y) { return larger(x, y); });
    all["min.f32"] = plain([](float x, float y) { return number(-larger(-x, -y)); });
    all["max.f64"] = plain([](double x, double y) { return fmax(x, y); });
    all["ex2.approx.f32"] = plain([](float x) { return exp2_of(x); });
    all["ex2.approx.ftz.f32"] = plain([](float x) { return exp2_flushed(x); });
    all["lg2.approx.f32"] = plain([](float x) { return log2_of(x); });
    all["div.approx.f32"] = plain([](float x, float y) { return divide_approximately(x, y); });
}

static inline void add_conversions(Operations &all) {
    all["cvt.rn.bf16.f32"] = plain([](float x) { return bf16_of(x); });
    all["cvt.rn.bf16x2.f32"] = plain([](float x, float y) { return (u32)bf16_of(x) << 16 | bf16_of(y); });
    all["cvt.f32.bf16"] = plain([](u16 x) { return number(float_of((u32)x << 16)); });
    all["cvt.f64.f32"] = plain([](float x) { return (double)x; });
    all["cvt.rn.f32.f64"] = plain([](double x) { return number((float)x); });
    all["cvt.rn.f32.s16"] = plain([](s16 x) { return (float)x; });
    all["cvt.rn.f32.u16"] = plain([](u16 x) { return (float)x; });
    all["cvt.rn.f32.s32"] = plain([](s32 x) { return (float)x; });
    all["cvt.rn.f32.u32"] = plain([](u32 x) { return (float)x; });
    all["cvt.sat.f32.f32"] = plain([](float x) { return x > 1.0f ? 1.0f : x > 0.0f ? x : 0.0f; });
    all["cvt.s16.s8"] = plain([](u16 x) { return (s16)(int8_t)x; });
    all["cvt.s8.s32"] = plain([](u32 x) { return (s16)(int8_t)x; });
    all["cvt.s32.s8"] = plain([](u32 x) { return (s32)(int8_t)x; });
    all["cvt.u16.u32"] = plain([](u32 x) { return (u16)x; });
    all["cvt.u32.u16"] = plain([](u16 x) { return (u32)x; });
    all["cvt.s32.s16"] = plain([](s16 x) { return (s32)x; });
    all["cvt.u32.u64"] = plain([](u64 x) { return (u32)x; });
    all["cvt.u64.u32"] = plain([](u32 x) { return (u64)x; });
    all["cvt.s64.s32"] = plain([](s32 x) { return (s64)x; });
    all["cvt.u64.u16"] = plain([](u16 x) { return (u64)x; });
    all["cvt.s64.s16"] = plain([](s16 x) { return (s64)x; });
}

static inline void add_bits(Operations &all) {
    all["and.pred"] = plain([](bool x, bool y) { return (bool)(x & y); });
    all["or.pred"] = plain([](bool x, bool y) { return (bool)(x | y); });
    all["xor.pred"] = plain([](bool x, bool y) { return (bool)(x ^ y); });
    all["not.pred"] = plain([](bool x) { return !x; });
    all["mov.pred"] = plain([](bool x) { return x; });
    all["popc.b32"] = plain([](u32 x) { return (u32)__builtin_popcount(x); });
    all["bfi.b32"] = plain([](u32 x, u32 y, u32 at, u32 length) { return insert_bits(x, y, at, length); });
    all["bfe.u32"] = plain([](u32 x, u32 at, u32 length) { return extract_bits<false>(x, at, length); });
    all["bfe.s32"] = plain([](u32 x, u32 at, u32 length) { return extract_bits<true>(x, at, length); });
    all["prmt.b32"] = plain([](u32 x, u32 y, u32 selectors) { return permute_bytes(x, y, selectors); });
    all["mul.wide.u16"] = plain([](u16 x, u16 y) { return (u32)x * y; });
    all["mul.wide.s32"] = plain([](s32 x, s32 y) { return (s64)x * y; });
    all["mul.wide.u32"] = plain([](u32 x, u32 y) { return (u64)x * y; });
    all["mad.wide.s32"] = plain([](s32 x, s32 y, u64 z) { return (u64)((s64)x * y) + z; });
    all["mad.wide.u32"] = plain([](u32 x, u32 y, u64 z) { return (u64)x * y + z; });
    all["mov.b32.pack"] = plain([](u16 low, u16 high) { return (u32)high << 16 | low; });
    all["mov.b64.pack"] = plain([](u32 low, u32 high) { return (u64)high << 32 | low; });
    all["cvta.to.global.u64"] = plain([](u64 x) { return x; });
    all["cvta.to.shared.u64"] = plain([](u64 x) { return x; });
}

// The two halves of a register.
template <typename Whole, typename Half>
static void unpack(Warp &warp, const Instruction &instruction, uint32_t mask) {
    Half halves[2][LANES];
    for (int lane = 0; lane < LANES; lane++) {
        Whole whole = lane_value<Whole>(warp, instruction.in[0], lane);
        halves[0][lane] = (Half)whole;
        halves[1][lane] = (Half)(whole >> 8 * sizeof(Half));
    }
    put<Half>(warp, instruction.out[0], halves[0], mask);
    put<Half>(warp, instruction.out[1], halves[1], mask);
}

static inline void add_arithmetic(Operations &all) {
    add_integers<u16, s16>(all, "16");
    add_integers<u32, s32>(all, "32");
    add_integers<u64, s64>(all, "64");
    add_comparisons<u16>(all, "u16"), add_comparisons<s16>(all, "s16"), add_comparisons<u16>(all, "b16");
    add_comparisons<u32>(all, "u32"), add_comparisons<s32>(all, "s32"), add_comparisons<u32>(all, "b32");
    add_comparisons<u64>(all, "u64"), add_comparisons<s64>(all, "s64"), add_comparisons<u64>(all, "b64");
    add_comparisons<float>(all, "f32"), add_comparisons<double>(all, "f64");
    add_unordered(all);
    add_floats(all);
    add_conversions(all);
    add_bits(all);
    all["mov.b32.unpack"] = {unpack<u32, u16>, "22:4", PLAIN};
    all["mov.b64.unpack"] = {unpack<u64, u32>, "44:8", PLAIN};
}
