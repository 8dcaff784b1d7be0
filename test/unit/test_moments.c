// test_moments.c: AdamW's moments in bf16. Rounding at random is right on average, its random
// bits are good enough and depend on seed, commit and element alone, and the steps are those
// of exact moments.

#include "test/harness.h"

#include <float.h>

#include "scheduler/optimizer.h"
#include "test/layout_flat.h"

enum { ELEMENTS = 40007 };

// ---- Rounding -------------------------------------------------------------------------

// Over all 65536 draws the mean of what a value becomes is the value, exactly.
static void the_mean_of_all_roundings_is_the_value(void **state) {
    (void)state;
    static const float values[] = {1,         -1,     1.001f,      -1.00390625f, 3.14159274f, 0x1.fffffep-1f,
                                   -1e-20f,   1e-30f, 0x1.2p-130f, 3e-45f,       -2.5e37f,    0x1.fe8p7f,
                                   0x1.fep7f, 0,      1e-8f};
    for (size_t v = 0; v < sizeof values / sizeof values[0]; v++) {
        uint32_t below = wire_float_bits(values[v]) & 0xffff0000u;
        bool exact = wire_float_bits(values[v]) == below;
        double sum = 0;
        for (uint32_t noise = 0; noise < 65536; noise++) {
            float rounded = moment_round(values[v], noise | 0xabcd0000u);
            uint32_t bits = wire_float_bits(rounded);
            assert_true(bits == below || (bits == below + 0x10000u && !exact));
            sum += (double)rounded;
        }
        assert_true(sum / 65536 == (double)values[v]);
    }
    assert_true(isnan(moment_round(NAN, 0xffff)) && moment_round(INFINITY, 0xffff) == INFINITY &&
                moment_round(-INFINITY, 0) == -INFINITY && isinf(moment_round(FLT_MAX, 0xffff)));
}

// ---- The random bits ------------------------------------------------------------------

enum { SWEEP = 1 << 18, BINS = 256 };

// What changes from one draw to the next.
typedef struct Sweep {
    const char *what;
    uint64_t seed, seed_step;
    int64_t commit, commit_step;
    size_t index, index_step;
} Sweep;

static const Sweep sweeps[] = {
    {"elements", 1, 0, 0, 0, 0, 1},
    {"elements far behind", 1, 0, 1000, 0, ((size_t)1 << 32) - SWEEP / 2, 1},
    {"every 256th element", 2, 0, 77, 0, 5, 256},
    {"every 2^14th element", 3, 0, 12, 0, 3, 1 << 14},
    {"every 2^32th element", 3, 0, 12, 0, 3, (size_t)1 << 32},
    {"commits", 1, 0, 0, 1, 0, 0},
    {"commits of a late element", 4, 0, 0, 1, 123456789, 0},
    {"seeds", 0, 1, 5, 0, 17, 0},
};

static uint32_t sweep_draw(const Sweep *sweep, uint32_t i) {
    MomentKey key = moment_key(sweep->seed + i * sweep->seed_step, sweep->commit + i * sweep->commit_step);
    return moment_noise(key, sweep->index + i * sweep->index_step);
}

// chi^2 of 256 bins has the mean 255 and the deviation 22.6: within six of them.
static void check_uniform(const char *what, const uint32_t *draws, int shift) {
    static int counts[BINS];
    double chi = 0, sum = 0, expected = (double)SWEEP / BINS;
    memset(counts, 0, sizeof counts);
    for (int i = 0; i < SWEEP; i++) {
        counts[draws[i] >> shift & 255u]++;
        sum += (double)(draws[i] >> shift & 255u);
    }
    for (int i = 0; i < BINS; i++) { chi += (counts[i] - expected) * (counts[i] - expected) / expected; }
    if (!(chi > 120 && chi < 390)) { fail_msg("%s, bits from %d: chi^2 is %g", what, shift, chi); }
    double off = (sum / SWEEP - 127.5) / (73.9 / sqrt(SWEEP));
    if (!(fabs(off) < 5)) { fail_msg("%s, bits from %d: mean off by %g deviations", what, shift, off); }
}

// The correlation of half `a` of draw i and half `b` of draw i + distance: within five
// deviations of none.
static void check_correlation(const char *what, const uint32_t *draws, int a, int b, int distance) {
    double sum = 0, count = SWEEP - distance;
    for (int i = 0; i < SWEEP - distance; i++) {
        double one = (double)(draws[i] >> a & 0xffffu) - 32767.5,
               other = (double)(draws[i + distance] >> b & 0xffffu) - 32767.5;
        sum += one * other;
    }
    double off = sum / count / (65536.0 * 65536 / 12) * sqrt(count);
    if (!(fabs(off) < 5)) {
        fail_msg("%s: halves %d and %d, %d apart, correlate: %g deviations", what, a, b, distance, off);
    }
}

static void the_random_bits_are_uniform_and_independent(void **state) {
    (void)state;
    static const int distances[] = {1, 2, 16, 64, 256, 1024};
    uint32_t *draws = (uint32_t *)malloc(SWEEP * sizeof *draws);
    for (size_t s = 0; s < sizeof sweeps / sizeof sweeps[0]; s++) {
        for (uint32_t i = 0; i < SWEEP; i++) { draws[i] = sweep_draw(&sweeps[s], i); }
        for (int shift = 0; shift <= 24; shift += 8) { check_uniform(sweeps[s].what, draws, shift); }
        check_correlation(sweeps[s].what, draws, 0, 16, 0);
        for (size_t d = 0; d < sizeof distances / sizeof distances[0]; d++) {
            check_correlation(sweeps[s].what, draws, 0, 0, distances[d]);
            check_correlation(sweeps[s].what, draws, 16, 16, distances[d]);
        }
    }
    free(draws);
}

// ---- Steps ----------------------------------------------------------------------------

typedef struct Bench {
    Optimizer optimizer;
    Arena arena;
    Stream stream;         // only its pool is used
    float *gradient, *out; // (layout_padded)
} Bench;

static void bench_open(Bench *bench, Precision moments, double beta2, const Layout *layout, int rank,
                       int threads) {
    static const OptimizerTensor decays[] = {{100, 20001, true, 0, 0}};
    OptimizerSettings settings = {.beta1 = 0.9,
                                  .beta2 = beta2,
                                  .epsilon = 1e-8,
                                  .weight_decay = 0.1,
                                  .tensors = decays,
                                  .tensor_count = 1,
                                  .moments = moments,
                                  .seed = 7};
    Error error = {""};
    memset(bench, 0, sizeof *bench);
    optimizer_reserve(&bench->optimizer, &bench->arena, &settings, layout, rank, false);
    assert_true(arena_commit(&bench->arena, &error));
    bench->stream.pool = thread_pool_create(threads, false);
    bench->gradient = (float *)calloc(2 * layout_padded(layout), sizeof(float));
    bench->out = bench->gradient + layout_padded(layout);
}

static void bench_close(Bench *bench) {
    thread_pool_destroy(bench->stream.pool);
    arena_release(&bench->arena);
    free(bench->gradient);
}

// A step with the gradients that the bench has, or an estimate of it.
static OptimizerStep bench_step(const Bench *bench, bool commit) {
    OptimizerStep step = {.gradient = bench->gradient,
                          .out = bench->out,
                          .divisor = 1,
                          .scale = 1,
                          .learning_rate = 0.01,
                          .keeps = commit};
    return step;
}

// Steps `steps` times with gradients that depend on the step and the place, times `size`.
static void bench_run(Bench *bench, int steps, double size, bool commit) {
    size_t padded = layout_padded(&bench->optimizer.layout);
    OptimizerStep step = bench_step(bench, commit);
    for (int n = 0; n < steps; n++) {
        for (size_t i = 0; i < padded; i++) {
            Random random = {random_hash((uint64_t)bench->optimizer.steps, i)};
            bench->gradient[i] = (float)(size * random_normal(&random));
        }
        optimizer_step(&bench->optimizer, &bench->stream, &step);
    }
}

static double second_moment(const Bench *bench, size_t own) {
    const Optimizer *optimizer = &bench->optimizer;
    return (double)real_load(optimizer->second_moment, own, optimizer->settings.moments);
}

// Moments are rounded after they were used. They start at 0, so the first step is that of
// exact ones, and what is kept of them is off by less than the spacing of bf16.
static void a_step_uses_what_it_does_not_keep(void **state) {
    (void)state;
    Layout whole = optimizer_whole(ELEMENTS);
    Bench exact, rounded;
    bench_open(&exact, PRECISION_FP32, 0.95, &whole, 0, 2);
    bench_open(&rounded, PRECISION_BF16, 0.95, &whole, 0, 2);
    bench_run(&exact, 1, 0.1, true);
    bench_run(&rounded, 1, 0.1, true);
    assert_memory_equal(exact.out, rounded.out, ELEMENTS * sizeof(float));
    int differ = 0;
    for (size_t i = 0; i < ELEMENTS; i++) {
        double is = second_moment(&rounded, i), was = second_moment(&exact, i);
        assert_true(fabs(is - was) <= was / 128);
        differ += is != was;
    }
    assert_true(differ > ELEMENTS / 2);
    bench_run(&exact, 1, 0.1, true);
    bench_run(&rounded, 1, 0.1, true);
    assert_true(memcmp(exact.out, rounded.out, ELEMENTS * sizeof(float)) != 0);
    bench_close(&exact);
    bench_close(&rounded);
}

// Where all gradients are the same, each moment is rounded up in a share of the elements.
// Both are in the product of the shares: the two moments of an element draw bits of their
// own.
static void the_two_moments_of_an_element_are_rounded_apart(void **state) {
    (void)state;
    const float gradient = 0.123f; // neither moment is near a number of bf16
    Layout whole = optimizer_whole(ELEMENTS);
    Bench bench;
    double up[2] = {0}, both = 0;
    bench_open(&bench, PRECISION_BF16, 0.95, &whole, 0, 2);
    for (size_t i = 0; i < layout_padded(&whole); i++) { bench.gradient[i] = gradient; }
    OptimizerStep step = bench_step(&bench, true);
    optimizer_step(&bench.optimizer, &bench.stream, &step);
    for (size_t i = 0; i < ELEMENTS; i++) {
        bool first = real_load(bench.optimizer.first_moment, i, PRECISION_BF16) > 0.1f * gradient,
             second = second_moment(&bench, i) > 0.05 * gradient * gradient;
        up[0] += first;
        up[1] += second;
        both += first && second;
    }
    double expected = up[0] / ELEMENTS * (up[1] / ELEMENTS),
           deviation = sqrt(expected * (1 - expected) / ELEMENTS);
    for (int i = 0; i < 2; i++) { assert_true(up[i] > 0.2 * ELEMENTS && up[i] < 0.8 * ELEMENTS); }
    if (!(fabs(both / ELEMENTS - expected) < 5 * deviation)) {
        fail_msg("%g of the elements, expected %g", both / ELEMENTS, expected);
    }
    bench_close(&bench);
}

// An estimate gives the bits of the commit that would follow, and keeps nothing.
static void an_estimate_keeps_no_moment(void **state) {
    (void)state;
    Layout whole = optimizer_whole(ELEMENTS);
    Bench bench;
    bench_open(&bench, PRECISION_BF16, 0.95, &whole, 0, 2);
    bench_run(&bench, 2, 0.1, true);
    float *estimate = (float *)malloc(ELEMENTS * sizeof(float));
    uint16_t *before = (uint16_t *)malloc(2 * ELEMENTS * sizeof *before);
    memcpy(before, bench.optimizer.first_moment, ELEMENTS * sizeof *before);
    memcpy(before + ELEMENTS, bench.optimizer.second_moment, ELEMENTS * sizeof *before);
    bench_run(&bench, 1, 0.1, false);
    memcpy(estimate, bench.out, ELEMENTS * sizeof(float));
    assert_memory_equal(before, bench.optimizer.first_moment, ELEMENTS * sizeof *before);
    assert_memory_equal(before + ELEMENTS, bench.optimizer.second_moment, ELEMENTS * sizeof *before);
    bench_run(&bench, 1, 0.1, true);
    assert_memory_equal(estimate, bench.out, ELEMENTS * sizeof(float));
    assert_true(memcmp(before, bench.optimizer.first_moment, ELEMENTS * sizeof *before) != 0);
    free(before);
    free(estimate);
    bench_close(&bench);
}

// Each element is rounded in the same way, whoever owns it and however many threads step it;
// also where pieces are so short that no vector of the processor is full.
static void owners_and_threads_change_no_bit(void **state) {
    (void)state;
    const Layout whole = optimizer_whole(ELEMENTS);
    const Layout layouts[] = {layout_make(ELEMENTS, 1),
                              layout_make(ELEMENTS, 2),
                              layout_make(ELEMENTS, 3),
                              {.count = ELEMENTS, .size = 3, .piece = 5, .cells = (ELEMENTS + 14) / 15}};
    Bench one, other;
    bench_open(&one, PRECISION_BF16, 0.95, &whole, 0, 1);
    bench_run(&one, 3, 0.1, true);
    for (size_t l = 0; l < sizeof layouts / sizeof layouts[0]; l++) {
        const Layout layout = layouts[l];
        for (int rank = 0; rank < layout.size; rank++) {
            bench_open(&other, PRECISION_BF16, 0.95, &layout, rank, layout.size == 1 ? 3 : 2);
            bench_run(&other, 3, 0.1, true);
            for (size_t own = 0; own < layout_shard(&layout); own++) {
                size_t flat = layout_flat(&layout, rank, own);
                if (flat >= ELEMENTS) { continue; }
                assert_memory_equal(real_at(other.optimizer.first_moment, own, PRECISION_BF16),
                                    real_at(one.optimizer.first_moment, flat, PRECISION_BF16), 2);
                assert_memory_equal(real_at(other.optimizer.second_moment, own, PRECISION_BF16),
                                    real_at(one.optimizer.second_moment, flat, PRECISION_BF16), 2);
                assert_true(other.out[flat] == one.out[flat]);
            }
            bench_close(&other);
        }
    }
    bench_close(&one);
}

// Without gradients 1000 steps leave 0.999^1000 of a second moment. Rounded to nearest it
// would not fall at all. One element is off by some 7 %, the mean of all by 5 deviations at
// most.
static void second_moments_fall_as_they_should(void **state) {
    (void)state;
    enum { COUNT = 4096, STEPS = 1000 };
    Layout whole = optimizer_whole(COUNT);
    Bench bench;
    double sum = 0, squares = 0, expected = 0;
    bench_open(&bench, PRECISION_BF16, 0.999, &whole, 0, 2);
    for (size_t i = 0; i < COUNT; i++) {
        double start = 1 + (double)(i % 128) / 128;
        real_store(bench.optimizer.second_moment, i, (float)start, PRECISION_BF16);
        expected += start * pow((double)(float)0.999, STEPS);
    }
    OptimizerStep step = bench_step(&bench, true);
    for (int n = 0; n < STEPS; n++) { optimizer_step(&bench.optimizer, &bench.stream, &step); }
    for (size_t i = 0; i < COUNT; i++) {
        double start = 1 + (double)(i % 128) / 128,
               off = second_moment(&bench, i) - start * pow(0.999, STEPS);
        sum += off;
        squares += off * off;
    }
    double deviation = sqrt(squares / COUNT), most = 5 * deviation / sqrt(COUNT);
    assert_true(deviation < 0.12 * expected / COUNT);
    if (!(fabs(sum / COUNT) <= most)) {
        fail_msg("second moments are off by %g on average, allowed are %g", sum / COUNT, most);
    }
    bench_close(&bench);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_mean_of_all_roundings_is_the_value),
        cmocka_unit_test(the_random_bits_are_uniform_and_independent),
        cmocka_unit_test(a_step_uses_what_it_does_not_keep),
        cmocka_unit_test(the_two_moments_of_an_element_are_rounded_apart),
        cmocka_unit_test(an_estimate_keeps_no_moment),
        cmocka_unit_test(owners_and_threads_change_no_bit),
        cmocka_unit_test(second_moments_fall_as_they_should),
    };
    return cmocka_run_group_tests(tests, NULL, NULL) == 0 ? 0 : 1;
}
