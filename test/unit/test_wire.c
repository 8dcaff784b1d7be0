// test_wire.c: the number formats of the wire against a plain search over all values that
// a code can have.

#include "test/harness.h"

#include <float.h>

#include "comm/collectives_nccl.h"
#include "runtime/random.h"

enum { MOST = 4 * WIRE_BLOCK + 8, GUARD = 64 };

static const size_t COUNTS[] = {0,   1,   2,   3,   4,   5,   7,   8,   31,  33,  127,  128, 129,
                                254, 255, 256, 257, 258, 259, 511, 512, 513, 769, 1024, MOST};

enum { COUNT_COUNT = sizeof COUNTS / sizeof COUNTS[0] };

static const WireFormat COARSE[] = {WIRE_INT8, WIRE_INT4, WIRE_E3M0};

enum { COARSE_COUNT = sizeof COARSE / sizeof COARSE[0] };

// ---- Inputs: awkward in different ways ------------------------------------------------

typedef enum Family {
    FAMILY_NORMAL,   // as gradients are
    FAMILY_WIDE,     // 40 octaves in one block
    FAMILY_WHOLE,    // halves of whole numbers: many ties
    FAMILY_DENORMAL, // up to where the smallest normal numbers are
    FAMILY_SMALLEST, // a few of the smallest steps
    FAMILY_HUGE,     // up to the largest number
    FAMILY_BITS,     // any finite number
    FAMILY_ZERO,     // both zeros
    FAMILY_COUNT
} Family;

static float draw(Family family, Random *random) {
    double sign = random_bits(random) & 1 ? 1 : -1, uniform = random_uniform(random);
    switch (family) {
    case FAMILY_NORMAL: return (float)(1e-3 * random_normal(random));
    case FAMILY_WIDE: return (float)(sign * exp2(-40 * uniform));
    case FAMILY_WHOLE: return (float)(sign * floor(255 * uniform) / 2);
    case FAMILY_DENORMAL: return (float)(sign * exp2(-149 + 32 * uniform));
    case FAMILY_SMALLEST: return (float)(sign * ldexp(floor(300 * uniform), -149));
    case FAMILY_HUGE: return uniform < 0.01 ? (float)(sign * FLT_MAX) : (float)(sign * FLT_MAX * uniform);
    case FAMILY_ZERO: return sign < 0 ? -0.0f : 0.0f;
    default: break;
    }
    float value;
    do { value = wire_float_from_bits((uint32_t)random_bits(random)); } while (!isfinite(value));
    return value;
}

static void fill(float *values, size_t count, Family family, uint64_t seed) {
    Random random = {random_hash(seed, (uint64_t)family)};
    for (size_t i = 0; i < count; i++) { values[i] = draw(family, &random); }
}

static bool same_bits(const void *a, const void *b, size_t bytes) { return memcmp(a, b, bytes) == 0; }

// ---------------------------------------------------------------------------------------
// The oracle: one block, in double. Where a distance decides, the number and the level
// are of about the same size, so their difference is exact.

// Whether elements a and b of `count` share a scale: those of a block, in int4 those of 16
// bytes.
static bool share_a_scale(WireFormat format, size_t a, size_t b, size_t count) {
    size_t begin = a / WIRE_BLOCK * WIRE_BLOCK,
           n = count - begin < (size_t)WIRE_BLOCK ? count - begin : (size_t)WIRE_BLOCK, bytes = (n + 1) / 2;
    if (b / WIRE_BLOCK != a / WIRE_BLOCK) { return false; }
    return format != WIRE_INT4 || (a - begin) % bytes / 16 == (b - begin) % bytes / 16;
}

// Of those that share a scale with element `at`.
static double largest_magnitude(WireFormat format, const float *values, size_t count, size_t at) {
    double largest = 0;
    for (size_t i = at / WIRE_BLOCK * WIRE_BLOCK; i < count && i / WIRE_BLOCK == at / WIRE_BLOCK; i++) {
        if (share_a_scale(format, at, i, count)) { largest = fmax(largest, fabs((double)values[i])); }
    }
    return largest;
}

// The largest level; the least is its negative.
static int last_level(WireFormat format) { return format == WIRE_INT8 ? 127 : 7; }

static double oracle_scale(WireFormat format, double largest) {
    if (format == WIRE_E3M0) { return fmax(largest, exp2(-119)); }
    int exponent;
    double fraction = frexp((double)(float)(largest / last_level(format)), &exponent);
    int bits = format == WIRE_INT4 ? 8 : 16;
    return fmax(ldexp(floor(ldexp(fraction, bits)), exponent - bits), exp2(-126));
}

// What code `level` stands for; levels are ordered by value, 0 in the middle.
static double oracle_level(WireFormat format, int level, double scale) {
    if (format != WIRE_E3M0) { return level * scale; }
    return level == 0 ? 0 : copysign(scale * exp2(abs(level) - 7), level);
}

// The nearest level, by trying all of them. If two are at the same distance, the even one
// (int8, int4) or the one farther from 0 (e3m0).
static double oracle_value(WireFormat format, float value, double scale) {
    int last = last_level(format), best = 0;
    for (int level = -last; level <= last; level++) {
        double distance = fabs(value - oracle_level(format, level, scale)),
               least = fabs(value - oracle_level(format, best, scale));
        bool wins_tie = format != WIRE_E3M0 ? level % 2 == 0 : abs(level) > abs(best);
        if (distance < least || (distance == least && wins_tie)) { best = level; }
    }
    return oracle_level(format, best, scale);
}

static void check_against_oracle(WireFormat format, const float *in, size_t count) {
    uint32_t wire[MOST];
    float out[MOST];
    wire_encode(format, wire, in, count);
    wire_decode(format, out, wire, count);
    for (size_t i = 0; i < count; i++) {
        double scale = oracle_scale(format, largest_magnitude(format, in, count, i)),
               expected = oracle_value(format, in[i], scale);
        if (!((double)out[i] == expected)) {
            fail_msg("%s, %zu of %zu: %a became %a, expected %a", wire_name(format), i, count, in[i], out[i],
                     expected);
        }
    }
}

static void coarse_formats_equal_a_search_over_all_codes(void **state) {
    (void)state;
    float in[MOST];
    for (int i = 0; i < COUNT_COUNT; i++) {
        for (int family = 0; family < FAMILY_COUNT; family++) {
            fill(in, COUNTS[i], (Family)family, (uint64_t)i);
            for (int f = 0; f < COARSE_COUNT; f++) { check_against_oracle(COARSE[f], in, COUNTS[i]); }
        }
    }
}

// Fills blocks with the middles between two values of the format, and with the numbers
// next to these middles. Whatever shares a scale has one element of the largest magnitude.
static void coarse_formats_are_exact_next_to_ties(void **state) {
    (void)state;
    Random random = {11};
    for (int trial = 0; trial < 400; trial++) {
        float largest = (float)exp2(-140 + 267 * random_uniform(&random));
        for (int f = 0; f < COARSE_COUNT; f++) {
            float in[MOST];
            size_t count = 0;
            double scale = oracle_scale(COARSE[f], largest);
            in[count++] = largest;
            for (int level = -last_level(COARSE[f]); level < last_level(COARSE[f]); level++) {
                float middle = (float)((oracle_level(COARSE[f], level, scale) +
                                        oracle_level(COARSE[f], level + 1, scale)) /
                                       2);
                float near[] = {middle, nextafterf(middle, INFINITY), nextafterf(middle, -INFINITY)};
                for (int i = 0; i < 3; i++) {
                    if (count % 16 == 0) { in[count++] = largest; }
                    if (fabsf(near[i]) <= largest) { in[count++] = near[i]; }
                }
            }
            check_against_oracle(COARSE[f], in, count);
        }
    }
}

// ---- Examples by hand -----------------------------------------------------------------

static void e3m0_gives_the_worked_example(void **state) {
    (void)state;
    const float in[6] = {1, -0.5f, 0.3f, 0.02f, 0, -0.007f}, expected[6] = {1, -0.5f, 0.25f, 0.015625f, 0, 0};
    const uint8_t codes[6] = {7, 8 | 6, 5, 1, 0, 0};
    uint8_t bytes[8];
    uint32_t wire[2];
    float scale, out[6];
    assert_int_equal(wire_bytes(WIRE_E3M0, 6), 8);
    wire_encode(WIRE_E3M0, wire, in, 6);
    memcpy(bytes, wire, sizeof bytes);
    memcpy(&scale, bytes, sizeof scale);
    assert_true(scale == 1);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(bytes[4 + i] & 15, codes[i]);
        assert_int_equal(bytes[4 + i] >> 4, codes[3 + i]);
    }
    wire_decode(WIRE_E3M0, out, wire, 6);
    assert_true(same_bits(out, expected, sizeof out));
}

static void check_values(WireFormat format, const float *in, const float *expected, size_t count) {
    uint32_t wire[MOST];
    float out[MOST];
    wire_encode(format, wire, in, count);
    wire_decode(format, out, wire, count);
    for (size_t i = 0; i < count; i++) {
        if (!(out[i] == expected[i])) {
            fail_msg("%s: %a became %a, expected %a", wire_name(format), in[i], out[i], expected[i]);
        }
    }
}

static void e3m0_rounds_ties_away_from_zero(void **state) {
    (void)state;
    const float below = 0x1.fffffep-1f; // the last number before 1
    const float in[] = {8,
                        6,
                        -6,
                        6 * below,
                        3,
                        -3 * below,
                        0.1875f,
                        0.1875f * below,
                        0.0625f,
                        -0.0625f,
                        0.0625f * below,
                        -0.0625f * below};
    const float expected[] = {8, 8, -8, 4, 4, -2, 0.25f, 0.125f, 0.125f, -0.125f, 0, 0};
    check_values(WIRE_E3M0, in, expected, sizeof in / sizeof in[0]);
}

static void int8_rounds_ties_to_even(void **state) {
    (void)state;
    const float in[] = {127,   -127,   0.5f,    -0.5f,  0.50001f, 1.5f,    -1.5f, 2.5f,
                        -2.5f, 126.5f, -126.5f, 125.5f, 63.49f,   -63.51f, 0};
    const float expected[] = {127, -127, 0, 0, 1, 2, -2, 2, -2, 126, -126, 126, 63, -64, 0};
    check_values(WIRE_INT8, in, expected, sizeof in / sizeof in[0]);
    uint8_t bytes[20];
    uint32_t wire[5];
    wire_encode(WIRE_INT8, wire, in, sizeof in / sizeof in[0]);
    memcpy(bytes, wire, sizeof bytes);
    assert_int_equal(bytes[4], 127);
    assert_int_equal(bytes[5], 256 - 127);
}

// Multiples of the scale, here 1, stay; the lower half of the first byte of codes is element 0.
static void int4_keeps_what_it_can_hold(void **state) {
    (void)state;
    const float in[] = {7, -7, 0, -0.0f, 1, -1, 2, -2, 3, -3, 4, 5, -6};
    check_values(WIRE_INT4, in, in, sizeof in / sizeof in[0]);
    uint8_t bytes[24];
    uint32_t wire[6];
    wire_encode(WIRE_INT4, wire, in, sizeof in / sizeof in[0]);
    memcpy(bytes, wire, sizeof bytes);
    assert_int_equal(bytes[0] | bytes[1] << 8, 0x3f80); // 1 as bf16
    assert_int_equal(bytes[16], 7 | (16 - 2) << 4);     // elements 0 and 7
    assert_int_equal(bytes[17], (16 - 7) | 3 << 4);
}

// A large element takes the small ones of its group with it, and no others.
static void int4_has_a_scale_for_each_group(void **state) {
    (void)state;
    float in[WIRE_BLOCK], expected[WIRE_BLOCK];
    for (int i = 0; i < WIRE_BLOCK; i++) {
        bool beside = i % 128 / 16 == 3;
        in[i] = i % 16 == 15 ? (i == 63 ? 7000 : 7) : (float)(i % 8) - 3.5f;
        expected[i] = i == 63 ? 7000 : beside ? 0 : i % 16 == 15 ? 7 : (float)nearbyint(in[i]);
    }
    check_values(WIRE_INT4, in, expected, WIRE_BLOCK);
}

// ---- bf16 -----------------------------------------------------------------------------

static void bf16_gives_known_roundings(void **state) {
    (void)state;
    const struct {
        uint32_t bits;
        uint16_t half;
    } known[] = {
        {0x3f800000u, 0x3f80}, {0x3f808000u, 0x3f80}, {0x3f818000u, 0x3f82},
        {0x3f808001u, 0x3f81}, {0x3f807fffu, 0x3f80}, // around 1
        {0xbf808000u, 0xbf80}, {0xbf818000u, 0xbf82}, {0x3fff8000u, 0x4000},
        {0x80000000u, 0x8000}, {0x00000000u, 0x0000}, {0x00008000u, 0x0000},
        {0x00008001u, 0x0001}, {0x00018000u, 0x0002}, // denormal
        {0x7f7f7fffu, 0x7f7f}, {0x7f7f8000u, 0x7f80}, {0xff7fffffu, 0xff80},
        {0x7f800000u, 0x7f80}, {0xff800000u, 0xff80}, // infinity
        {0x7f800001u, 0x7fc0}, {0xff800001u, 0xffc0}, {0x7fc00000u, 0x7fc0},
        {0x7fffffffu, 0x7fff}, {0xffffffffu, 0xffff}, // NaN
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        assert_int_equal(bf16_from_float(wire_float_from_bits(known[i].bits)), known[i].half);
        assert_int_equal(wire_float_bits(bf16_to_float(known[i].half)), (uint32_t)known[i].half << 16);
    }
}

// The nearest bf16, by trying both neighbours, ties to even. Above the largest one is
// 2^128, where infinity begins.
static uint16_t bf16_by_search(float value) {
    uint16_t below = (uint16_t)(wire_float_bits(value) >> 16), above = (uint16_t)(below + 1);
    double higher = (above & 0x7fff) == 0x7f80 ? exp2(128) : fabs((double)bf16_to_float(above));
    double down = fabs((double)value) - fabs((double)bf16_to_float(below)), up = higher - fabs((double)value);
    return down < up ? below : up < down ? above : (below & 1) == 0 ? below : above;
}

static void bf16_equals_a_search_over_both_neighbours(void **state) {
    (void)state;
    Random random = {5};
    for (int i = 0; i < 200000; i++) {
        float value = draw(FAMILY_BITS, &random);
        if (i % 4 == 0) {
            value = wire_float_from_bits((wire_float_bits(value) & 0xffff0000u) | 0x8000u);
        } // exactly half way
        assert_int_equal(bf16_from_float(value), bf16_by_search(value));
    }
}

// ---- What holds for every format ------------------------------------------------------

// The bounds that the head of wire.h states.
static void errors_stay_within_the_stated_bounds(void **state) {
    (void)state;
    float in[WIRE_BLOCK], out[WIRE_BLOCK];
    uint32_t wire[WIRE_BLOCK + 1];
    for (int trial = 0; trial < 400; trial++) {
        fill(in, WIRE_BLOCK, trial % 2 == 0 ? FAMILY_NORMAL : FAMILY_WIDE, (uint64_t)trial);
        for (int format = 0; format < WIRE_FORMAT_COUNT; format++) {
            wire_encode((WireFormat)format, wire, in, WIRE_BLOCK);
            wire_decode((WireFormat)format, out, wire, WIRE_BLOCK);
            for (int i = 0; i < WIRE_BLOCK; i++) {
                double magnitude = fabs((double)in[i]),
                       largest = largest_magnitude((WireFormat)format, in, WIRE_BLOCK, (size_t)i);
                double bounds[WIRE_FORMAT_COUNT] = {0, magnitude / 256, oracle_scale(WIRE_INT8, largest) / 2,
                                                    oracle_scale(WIRE_INT4, largest) / 2,
                                                    fmax(magnitude / 3, largest / 128)};
                assert_close(out[i], in[i], bounds[format], wire_name((WireFormat)format));
            }
        }
    }
}

// Writes nothing but wire_bytes bytes, every one of them, and decodes nothing but `count`
// values.
static void a_run_fills_its_bytes_and_no_others(void **state) {
    (void)state;
    float in[MOST], out[MOST + GUARD];
    uint32_t wire[MOST * 2], again[MOST * 2];
    for (int format = 0; format < WIRE_FORMAT_COUNT; format++) {
        for (int i = 0; i < COUNT_COUNT * 2; i++) {
            size_t count = COUNTS[i / 2], bytes = wire_bytes((WireFormat)format, count);
            assert_int_equal(bytes % 4, 0);
            fill(in, count, FAMILY_NORMAL, 3);
            if (i % 2 == 1 && count > 0) { in[count - 1] = INFINITY; }
            memset(wire, 0xab, sizeof wire);
            memset(again, 0x54, sizeof again);
            memset(out, 0xab, sizeof out);
            wire_encode((WireFormat)format, wire, in, count);
            wire_encode((WireFormat)format, again, in, count);
            assert_true(same_bits(wire, again, bytes));
            wire_decode((WireFormat)format, out, wire, count);
            for (size_t j = 0; j < GUARD; j++) {
                assert_int_equal(((unsigned char *)wire)[bytes + j], 0xab);
                assert_int_equal(((unsigned char *)again)[bytes + j], 0x54);
                assert_int_equal(((unsigned char *)(out + count))[j], 0xab);
            }
        }
    }
}

// With an odd number of 4-bit codes the upper half of the last byte is zero.
static void half_a_byte_is_filled_with_zeros(void **state) {
    (void)state;
    static const WireFormat formats[] = {WIRE_INT4, WIRE_E3M0};
    for (int i = 0; i < 2; i++) {
        const float in[1] = {-3};
        uint8_t bytes[20];
        uint32_t wire[5];
        wire_encode(formats[i], wire, in, 1);
        memcpy(bytes, wire, sizeof bytes);
        const uint8_t *codes = bytes + (formats[i] == WIRE_INT4 ? 16 : 4);
        assert_true(codes[0] > 0 && codes[0] < 16 && codes[1] == 0 && codes[2] == 0 && codes[3] == 0);
    }
}

static void runs_have_the_bytes_of_the_table(void **state) {
    (void)state;
    const struct {
        size_t count, bytes[WIRE_FORMAT_COUNT];
    } known[] = {
        {0, {0, 0, 0, 0, 0}},
        {1, {4, 4, 8, 20, 8}},
        {3, {12, 8, 8, 20, 8}},
        {5, {20, 12, 12, 20, 8}},
        {9, {36, 20, 16, 24, 12}},
        {256, {1024, 512, 260, 144, 132}},
        {257, {1028, 516, 268, 164, 140}},
        {1024, {4096, 2048, 1040, 576, 528}},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        for (int format = 0; format < WIRE_FORMAT_COUNT; format++) {
            assert_int_equal(wire_bytes((WireFormat)format, known[i].count), known[i].bytes[format]);
        }
    }
}

// The parts follow each other in the wire, and each is also encoded, decoded and added at
// an address of its own.
static void cutting_an_array_between_blocks_changes_no_bit(void **state) {
    (void)state;
    float in[MOST], whole[MOST], sum[MOST], cut_out[MOST], cut_sum[MOST];
    uint32_t wire[MOST], cut_wire[MOST];
    for (int format = 0; format < WIRE_FORMAT_COUNT; format++) {
        for (int cuts = 0; cuts < 16; cuts++) { // bit k: a cut after block k
            size_t bytes = 0, begin = 0;
            fill(in, MOST, FAMILY_WIDE, (uint64_t)cuts);
            fill(sum, MOST, FAMILY_NORMAL, (uint64_t)cuts);
            memcpy(cut_sum, sum, sizeof sum);
            wire_encode((WireFormat)format, wire, in, MOST);
            wire_decode((WireFormat)format, whole, wire, MOST);
            wire_add((WireFormat)format, sum, wire, MOST);
            for (int block = 0; block < 5; block++) {
                if (block < 4 && (cuts >> block & 1) == 0) { continue; }
                size_t end = block < 4 ? (size_t)(block + 1) * WIRE_BLOCK : (size_t)MOST, n = end - begin;
                char *part = (char *)cut_wire + bytes;
                wire_encode((WireFormat)format, part, in + begin, n);
                wire_decode((WireFormat)format, cut_out + begin, part, n);
                wire_add((WireFormat)format, cut_sum + begin, part, n);
                bytes += wire_bytes((WireFormat)format, n);
                begin = end;
            }
            assert_int_equal(bytes, wire_bytes((WireFormat)format, MOST));
            assert_true(same_bits(wire, cut_wire, bytes));
            assert_true(same_bits(whole, cut_out, sizeof whole));
            assert_true(same_bits(sum, cut_sum, sizeof sum));
        }
    }
}

static void adding_equals_decoding_and_then_adding(void **state) {
    (void)state;
    float in[MOST], sum[MOST], decoded[MOST];
    volatile float expected[MOST]; // so that nothing is fused here
    uint32_t wire[MOST * 2];
    for (int format = 0; format < WIRE_FORMAT_COUNT; format++) {
        for (int i = 0; i < COUNT_COUNT * FAMILY_COUNT; i++) {
            size_t count = COUNTS[i / FAMILY_COUNT];
            fill(in, count, (Family)(i % FAMILY_COUNT), 21);
            fill(sum, count, (Family)(i % FAMILY_COUNT), 22);
            wire_encode((WireFormat)format, wire, in, count);
            wire_decode((WireFormat)format, decoded, wire, count);
            for (size_t j = 0; j < count; j++) { expected[j] = sum[j] + decoded[j]; }
            wire_add((WireFormat)format, sum, wire, count);
            for (size_t j = 0; j < count; j++) {
                assert_int_equal(wire_float_bits(sum[j]), wire_float_bits(expected[j]));
            }
        }
    }
}

// A product that is exact before it is rounded is the same whether the compiler fuses it
// with an addition or not.
static void fusing_a_coarse_value_into_a_sum_changes_no_bit(void **state) {
    (void)state;
    float in[MOST], sum[MOST], fused[MOST];
    uint32_t wire[MOST];
    for (int family = 0; family < FAMILY_COUNT; family++) {
        for (int seed = 0; seed < 50; seed++) {
            fill(in, WIRE_BLOCK, (Family)family, (uint64_t)seed);
            fill(sum, WIRE_BLOCK, (Family)family, (uint64_t)seed + 1000);
            float scale;
            wire_encode(WIRE_INT8, wire, in, WIRE_BLOCK);
            memcpy(&scale, wire, sizeof scale);
            const int8_t *codes = (const int8_t *)(wire + 1);
            for (int i = 0; i < WIRE_BLOCK; i++) { fused[i] = fmaf((float)codes[i], scale, sum[i]); }
            wire_add(WIRE_INT8, sum, wire, WIRE_BLOCK);
            for (int i = 0; i < WIRE_BLOCK; i++) { assert_true(fused[i] == sum[i]); }
        }
    }
}

static void encoding_what_was_decoded_gives_the_same_bytes(void **state) {
    (void)state;
    float in[MOST], out[MOST];
    uint32_t wire[MOST * 2], again[MOST * 2];
    for (int format = 0; format < WIRE_FORMAT_COUNT; format++) {
        for (int i = 0; i < 200 * FAMILY_COUNT; i++) {
            size_t count = COUNTS[i / FAMILY_COUNT % COUNT_COUNT];
            fill(in, count, (Family)(i % FAMILY_COUNT), (uint64_t)i);
            if (i % 7 == 0 && count > 0) {
                in[count / 2] = wire_float_from_bits(0x7f800000u + (uint32_t)(i % 3));
            } // infinity, NaNs
            wire_encode((WireFormat)format, wire, in, count);
            wire_decode((WireFormat)format, out, wire, count);
            wire_encode((WireFormat)format, again, out, count);
            assert_true(same_bits(wire, again, wire_bytes((WireFormat)format, count)));
        }
    }
}

// ---- NaN, infinity and overflow -------------------------------------------------------

static void check_not_finite(WireFormat format, const float *in, size_t count, size_t at) {
    uint32_t wire[MOST * 2];
    float out[MOST], sum[MOST];
    memset(sum, 0, sizeof sum);
    wire_encode(format, wire, in, count);
    wire_decode(format, out, wire, count);
    wire_add(format, sum, wire, count);
    for (size_t i = 0; i < count; i++) {
        bool hit = wire_is_coarse(format) ? share_a_scale(format, at, i, count) : i == at;
        assert_true(isfinite(out[i]) ? !hit : hit);
        assert_true(isfinite(sum[i]) ? !hit : hit);
        if (hit && (wire_is_coarse(format) || isnan(in[at]))) { assert_true(isnan(out[i]) && isnan(sum[i])); }
    }
}

// A NaN or an infinity survives anywhere in a run. In the coarse formats nothing that shares its
// scale is finite, and everything else is.
static void a_nan_or_an_infinity_is_seen(void **state) {
    (void)state;
    const uint32_t bad[] = {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xff800001u,
                            0x7fffffffu, 0xffffffffu, 0x7f800000u, 0xff800000u};
    float in[MOST];
    for (int format = 0; format < WIRE_FORMAT_COUNT; format++) {
        for (int i = 0; i < COUNT_COUNT; i++) {
            for (size_t at = 0; at < COUNTS[i]; at += at < 4 || at % 64 > 60 ? 1 : 7) {
                fill(in, COUNTS[i], at % 2 == 0 ? FAMILY_NORMAL : FAMILY_ZERO, at);
                in[at] = wire_float_from_bits(bad[at % (sizeof bad / sizeof bad[0])]);
                check_not_finite((WireFormat)format, in, COUNTS[i], at);
            }
        }
    }
}

static void zeros_stay_zeros(void **state) {
    (void)state;
    float in[MOST], out[MOST];
    uint32_t wire[MOST * 2];
    for (int format = 0; format < WIRE_FORMAT_COUNT; format++) {
        for (int i = 0; i < COUNT_COUNT; i++) {
            fill(in, COUNTS[i], FAMILY_ZERO, 1);
            wire_encode((WireFormat)format, wire, in, COUNTS[i]);
            wire_decode((WireFormat)format, out, wire, COUNTS[i]);
            for (size_t j = 0; j < COUNTS[i]; j++) { assert_true(out[j] == 0); }
        }
    }
}

// A 127th that is rounded up, times 127, could be more than fp32 holds.
static void the_largest_numbers_do_not_overflow(void **state) {
    (void)state;
    for (uint32_t bits = 0x7f7fffffu; bits > 0x7f7fffffu - 100000u; bits--) {
        float in[2] = {wire_float_from_bits(bits), -1}, out[2];
        uint32_t wire[5];
        for (int f = 0; f < COARSE_COUNT; f++) {
            wire_encode(COARSE[f], wire, in, 2);
            wire_decode(COARSE[f], out, wire, 2);
            assert_close(out[0], in[0], ldexp(FLT_MAX, COARSE[f] == WIRE_INT4 ? -7 : -14),
                         wire_name(COARSE[f]));
            assert_true(out[1] == 0);
        }
    }
}

static void formats_have_their_names(void **state) {
    (void)state;
    const char *names[WIRE_FORMAT_COUNT] = {"fp32", "bf16", "int8", "int4", "e3m0"};
    const bool coarse[WIRE_FORMAT_COUNT] = {false, false, true, true, true};
    for (int i = 0; i < WIRE_FORMAT_COUNT; i++) {
        assert_string_equal(wire_name((WireFormat)i), names[i]);
        assert_int_equal(wire_is_coarse((WireFormat)i), coarse[i]);
    }
}

// Messages between GPUs begin at multiples of 128 bytes and the pieces in them at
// multiples of 16, because copies are slow elsewhere. That costs less than these bytes
// each.
static void messages_between_gpus_begin_at_whole_lines(void **state) {
    static const size_t pieces[] = {32, 64, 96, 224, 256, 512, 61 * 256, 237 * 256, 4099 * 256};
    (void)state;
    for (int format = 0; format < WIRE_FORMAT_COUNT; format++) {
        for (size_t i = 0; i < sizeof pieces / sizeof pieces[0]; i++) {
            WireFormat wire = (WireFormat)format;
            size_t bytes = wire_bytes(wire, pieces[i]), piece = nccl_piece_bytes(wire, pieces[i]);
            assert_true(piece % 16 == 0 && piece >= bytes && piece < bytes + 16);
            for (size_t cells = 1; cells <= 9; cells++) {
                size_t owner = nccl_owner_bytes(wire, pieces[i], cells);
                assert_true(owner % 128 == 0 && owner >= cells * piece && owner < cells * piece + 128);
            }
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(coarse_formats_equal_a_search_over_all_codes),
        cmocka_unit_test(coarse_formats_are_exact_next_to_ties),
        cmocka_unit_test(e3m0_gives_the_worked_example),
        cmocka_unit_test(e3m0_rounds_ties_away_from_zero),
        cmocka_unit_test(int8_rounds_ties_to_even),
        cmocka_unit_test(int4_keeps_what_it_can_hold),
        cmocka_unit_test(int4_has_a_scale_for_each_group),
        cmocka_unit_test(bf16_gives_known_roundings),
        cmocka_unit_test(bf16_equals_a_search_over_both_neighbours),
        cmocka_unit_test(errors_stay_within_the_stated_bounds),
        cmocka_unit_test(a_run_fills_its_bytes_and_no_others),
        cmocka_unit_test(half_a_byte_is_filled_with_zeros),
        cmocka_unit_test(runs_have_the_bytes_of_the_table),
        cmocka_unit_test(cutting_an_array_between_blocks_changes_no_bit),
        cmocka_unit_test(adding_equals_decoding_and_then_adding),
        cmocka_unit_test(fusing_a_coarse_value_into_a_sum_changes_no_bit),
        cmocka_unit_test(encoding_what_was_decoded_gives_the_same_bytes),
        cmocka_unit_test(a_nan_or_an_infinity_is_seen),
        cmocka_unit_test(zeros_stay_zeros),
        cmocka_unit_test(the_largest_numbers_do_not_overflow),
        cmocka_unit_test(formats_have_their_names),
        cmocka_unit_test(messages_between_gpus_begin_at_whole_lines),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
