// test_optimizer.c: one step of AdamW, its decay ranges and the schedule of the learning rate, against the formulas written out in double.
//
// The oracle knows nothing of shards, runs or blocks: it asks for every element whether a range covers it.

#include "harness.h"

#include "../learning_rate.h"
#include "../optimizer.h"
#include "../runtime/random.h"

enum { MAX_ELEMENTS = 40100, STEPS = 3 };

// ---------------------------------------------------------------------------------------------------------------------------------------
// AdamW

typedef struct Bench {
    Optimizer optimizer;
    Arena arena;
    Stream stream; // only its team is used
    size_t count;
    float *gradient, *out, *estimate; // (count)
    double *theta, *m, *v;            // (count): the oracle's
} Bench;

static bool is_covered(const OptimizerSettings *settings, size_t element) {
    for (int i = 0; i < settings->decay_range_count; i++) {
        if (settings->decay_ranges[i].begin <= element && element < settings->decay_ranges[i].end) { return true; }
    }
    return false;
}

// Signs vary; no value is near zero, so that relative errors mean something.
static float start_value(size_t element) {
    Random random = {random_hash(3, element)};
    double size = 0.5 + random_uniform(&random);
    return (float)(random_bits(&random) % 2 == 0 ? size : -size);
}

static void bench_open(Bench *bench, const OptimizerSettings *settings, size_t begin, size_t end) {
    memset(bench, 0, sizeof *bench);
    optimizer_reserve(&bench->optimizer, &bench->arena, settings, begin, end, false);
    Error error = {""};
    assert_true(arena_commit(&bench->arena, &error));
    bench->stream.team = team_create(2, false);
    bench->count = end - begin;
    bench->gradient = (float *)calloc(3 * bench->count, sizeof(float));
    bench->out = bench->gradient + bench->count;
    bench->estimate = bench->out + bench->count;
    bench->theta = (double *)calloc(3 * bench->count, sizeof(double));
    bench->m = bench->theta + bench->count;
    bench->v = bench->m + bench->count;
    for (size_t i = 0; i < bench->count; i++) { bench->theta[i] = bench->optimizer.master[i] = start_value(begin + i); }
}

static void bench_close(Bench *bench) {
    team_destroy(bench->stream.team);
    arena_release(&bench->arena);
    free(bench->gradient);
    free(bench->theta);
}

// One step of the oracle, number `t` from 1. Epsilon stands outside the root, decay is decoupled and uses the parameters before the step.
static void oracle_step(Bench *bench, double t, double divisor, double scale, double learning_rate) {
    const OptimizerSettings *settings = &bench->optimizer.settings;
    for (size_t i = 0; i < bench->count; i++) {
        double g = (double)bench->gradient[i] / divisor * scale, *m = &bench->m[i], *v = &bench->v[i];
        double decay = is_covered(settings, bench->optimizer.begin + i) ? settings->weight_decay : 0.0;
        *m = settings->beta1 * *m + (1.0 - settings->beta1) * g;
        *v = settings->beta2 * *v + (1.0 - settings->beta2) * g * g;
        double step = *m / (1.0 - pow(settings->beta1, t)) / (sqrt(*v / (1.0 - pow(settings->beta2, t))) + settings->epsilon);
        bench->theta[i] = bench->theta[i] - learning_rate * decay * bench->theta[i] - learning_rate * step;
    }
}

static void bench_fill_gradient(Bench *bench, int step) {
    for (size_t i = 0; i < bench->count; i++) {
        Random random = {random_hash(random_hash(11, (uint64_t)step), bench->optimizer.begin + i)};
        bench->gradient[i] = (float)(0.02 * random_normal(&random));
    }
}

static void expect_state(const Bench *bench, double tolerance) {
    const Optimizer *optimizer = &bench->optimizer;
    for (size_t i = 0; i < bench->count; i++) {
        assert_close(bench->out[i], bench->theta[i], tolerance * fabs(bench->theta[i]), "parameter");
        assert_true(bench->out[i] == optimizer->master[i]);
        assert_close(optimizer->first_moment[i], bench->m[i], tolerance * (fabs(bench->m[i]) + 1e-3), "first moment");
        assert_close(optimizer->second_moment[i], bench->v[i], tolerance * (bench->v[i] + 1e-9), "second moment");
    }
}

// What an estimate must leave as it is.
static void copy_state(const Bench *bench, float *copy) { // (3, count)
    size_t bytes = bench->count * sizeof(float);
    memcpy(copy, bench->optimizer.master, bytes);
    memcpy(copy + bench->count, bench->optimizer.first_moment, bytes);
    memcpy(copy + 2 * bench->count, bench->optimizer.second_moment, bytes);
}

static void expect_steps(const OptimizerSettings *settings, size_t begin, size_t end) {
    static float before[3 * MAX_ELEMENTS], after[3 * MAX_ELEMENTS];
    static const double divisors[STEPS] = {7, 12, 5}, scales[STEPS] = {1, 0.37, 0.81}, rates[STEPS] = {0.01, 0.02, 0.005};
    Bench bench;
    assert_true(end - begin <= (size_t)MAX_ELEMENTS);
    bench_open(&bench, settings, begin, end);
    for (int step = 0; step < STEPS; step++) {
        bench_fill_gradient(&bench, step);
        copy_state(&bench, before);
        optimizer_step(&bench.optimizer, &bench.stream, bench.gradient, bench.estimate, divisors[step], scales[step], rates[step], false);
        copy_state(&bench, after);
        assert_memory_equal(before, after, 3 * bench.count * sizeof(float));
        assert_true(bench.optimizer.commits == step);
        oracle_step(&bench, step + 1, divisors[step], scales[step], rates[step]);
        optimizer_step(&bench.optimizer, &bench.stream, bench.gradient, bench.out, divisors[step], scales[step], rates[step], true);
        assert_memory_equal(bench.estimate, bench.out, bench.count * sizeof(float));
        assert_true(bench.optimizer.commits == step + 1);
        expect_state(&bench, 1e-6);
    }
    bench_close(&bench);
}

static OptimizerSettings adamw_settings(const DecayRange *ranges, int count) {
    // Gradients are about as large as epsilon, so that its place in the formula and every factor of the gradient matter.
    OptimizerSettings settings = {OPTIMIZER_ADAMW, 0.9, 0.95, 1e-3, 0.3, ranges, count};
    return settings;
}

static void a_step_equals_adamw_in_double(void **state) {
    (void)state;
    // Ranges that begin before, at, inside and beyond the ends of the shards below; the last one reaches past everything.
    static const DecayRange ranges[] = {{0, 10}, {50, 70}, {100, 101}, {120, 128}, {130, 200}, {225, 20000}};
    static const size_t shards[][2] = {{0, 230}, {0, 64},   {64, 128},  {128, 192}, {192, 256}, {33, 97},
                                       {10, 50}, {60, 65}, {101, 120}, {130, 200}, {128, 130}, {5, 40012}};
    for (size_t i = 0; i < sizeof shards / sizeof shards[0]; i++) {
        OptimizerSettings settings = adamw_settings(ranges, 6);
        expect_steps(&settings, shards[i][0], shards[i][1]);
        settings.decay_range_count = 0;
        expect_steps(&settings, shards[i][0], shards[i][1]);
    }
}

// ddp steps in place: `out` is the master.
static void a_commit_in_place_gives_the_same_bits(void **state) {
    (void)state;
    static const DecayRange ranges[] = {{20, 90}};
    OptimizerSettings settings = adamw_settings(ranges, 1);
    Bench apart, in_place;
    bench_open(&apart, &settings, 0, 230);
    bench_open(&in_place, &settings, 0, 230);
    for (int step = 0; step < STEPS; step++) {
        bench_fill_gradient(&apart, step);
        optimizer_step(&apart.optimizer, &apart.stream, apart.gradient, apart.out, 3, 0.5, 0.01, true);
        optimizer_step(&in_place.optimizer, &in_place.stream, apart.gradient, in_place.optimizer.master, 3, 0.5, 0.01, true);
        assert_memory_equal(apart.out, in_place.optimizer.master, 230 * sizeof(float));
    }
    bench_close(&apart);
    bench_close(&in_place);
}

// 1 - 0.99999 taken in fp32 would be off by more than a thousandth.
static void a_slow_second_moment_keeps_its_precision(void **state) {
    (void)state;
    OptimizerSettings settings = adamw_settings(NULL, 0);
    settings.beta2 = 0.99999;
    settings.epsilon = 1e-8;
    Bench bench;
    bench_open(&bench, &settings, 0, 230);
    for (size_t i = 0; i < bench.count; i++) { bench.theta[i] = bench.optimizer.master[i] = 0; } // the steps alone remain
    for (int step = 0; step < STEPS; step++) {
        bench_fill_gradient(&bench, step);
        oracle_step(&bench, step + 1, 1, 1, 0.01);
        optimizer_step(&bench.optimizer, &bench.stream, bench.gradient, bench.out, 1, 1, 0.01, true);
        for (size_t i = 0; i < bench.count; i++) {
            assert_close(bench.optimizer.second_moment[i], bench.v[i], 1e-4 * bench.v[i], "second moment");
            assert_close(bench.out[i], bench.theta[i], 1e-4 * fmax(fabs(bench.theta[i]), 1e-3), "sum of the steps");
        }
    }
    bench_close(&bench);
}

static void ranges_join_where_they_touch(void **state) {
    (void)state;
    DecayRange ranges[4];
    int count = 0;
    decay_ranges_add(ranges, &count, 0, 5);
    decay_ranges_add(ranges, &count, 5, 9);
    assert_int_equal(count, 1);
    decay_ranges_add(ranges, &count, 10, 12);
    decay_ranges_add(ranges, &count, 20, 30);
    decay_ranges_add(ranges, &count, 30, 31);
    static const DecayRange expected[] = {{0, 9}, {10, 12}, {20, 31}};
    assert_int_equal(count, 3);
    assert_memory_equal(ranges, expected, sizeof expected);
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// The learning rate

static LearningRate schedule_of(ScheduleKind kind) {
    LearningRate schedule = {kind, 2.0, 0.2, 4.0, 20.0, 100.0};
    return schedule;
}

typedef struct RateAt {
    double progress, rate;
} RateAt;

static void expect_rates(const LearningRate *schedule, const RateAt *expected, int count) {
    for (int i = 0; i < count; i++) { assert_close(learning_rate_at(schedule, expected[i].progress), expected[i].rate, 1e-12, "rate"); }
}

// The first commit has a rate above zero, and the peak comes with the commit that completes the warm-up.
static void the_rate_warms_up_linearly(void **state) {
    (void)state;
    static const RateAt warmup[] = {{0, 0.4}, {4, 0.8}, {8, 1.2}, {12, 1.6}, {16, 2.0}, {20, 2.0}};
    for (int kind = 0; kind < 3; kind++) {
        LearningRate schedule = schedule_of((ScheduleKind)kind);
        expect_rates(&schedule, warmup, 6);
    }
}

static void the_rate_decays_as_it_says(void **state) {
    (void)state;
    static const RateAt constant[] = {{40, 2}, {60, 2}, {100, 2}, {1e6, 2}};
    static const RateAt linear[] = {{40, 1.55}, {60, 1.1}, {80, 0.65}, {100, 0.2}, {101, 0.2}, {1e6, 0.2}};
    // 0.2 + 1.8 * (1 + cos(pi / 4)) / 2 and its mirror image.
    static const RateAt cosine[] = {{40, 1.7363961030678928}, {60, 1.1}, {80, 0.46360389693210715}, {100, 0.2}, {101, 0.2}, {1e6, 0.2}};
    LearningRate schedule = schedule_of(SCHEDULE_CONSTANT);
    expect_rates(&schedule, constant, 4);
    schedule = schedule_of(SCHEDULE_LINEAR);
    expect_rates(&schedule, linear, 6);
    schedule = schedule_of(SCHEDULE_COSINE);
    expect_rates(&schedule, cosine, 6);
}

static void the_rate_starts_at_the_peak_without_warmup(void **state) {
    (void)state;
    static const RateAt expected[3][3] = {{{0, 2}, {50, 2}, {100, 2}}, {{0, 2}, {50, 1.1}, {100, 0.2}}, {{0, 2}, {50, 1.1}, {100, 0.2}}};
    for (int kind = 0; kind < 3; kind++) {
        LearningRate schedule = schedule_of((ScheduleKind)kind);
        schedule.warmup = 0;
        expect_rates(&schedule, expected[kind], 3);
    }
}

// A run that ends before or with its warm-up: only the ramp, never a division by nothing.
static void a_run_shorter_than_its_warmup_has_rates(void **state) {
    (void)state;
    static const RateAt ramp[] = {{0, 0.4}, {8, 1.2}, {12, 1.6}};
    for (int kind = 0; kind < 3; kind++) {
        for (int total = 0; total <= 20; total += 10) {
            LearningRate schedule = schedule_of((ScheduleKind)kind);
            schedule.total = total;
            expect_rates(&schedule, ramp, 3);
            double late = learning_rate_at(&schedule, 200);
            assert_close(late, schedule.kind == SCHEDULE_CONSTANT ? 2.0 : 0.2, 1e-12, "rate after the end");
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_equals_adamw_in_double),
        cmocka_unit_test(a_commit_in_place_gives_the_same_bits),
        cmocka_unit_test(a_slow_second_moment_keeps_its_precision),
        cmocka_unit_test(ranges_join_where_they_touch),
        cmocka_unit_test(the_rate_warms_up_linearly),
        cmocka_unit_test(the_rate_decays_as_it_says),
        cmocka_unit_test(the_rate_starts_at_the_peak_without_warmup),
        cmocka_unit_test(a_run_shorter_than_its_warmup_has_rates),
    };
    return cmocka_run_group_tests(tests, NULL, NULL) == 0 ? 0 : 1;
}
