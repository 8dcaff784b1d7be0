// test_optimizer.c: one step of AdamW, its decay ranges and the schedule of the learning
// rate, against the formulas written out in double.
//
// The oracle knows nothing of runs or blocks: for every element it asks whether a range
// covers it.

#include "test/harness.h"

#include "runtime/random.h"
#include "scheduler/optimizer.h"
#include "test/layout_flat.h"

enum { MAX_ELEMENTS = 40100, STEPS = 3 };

// ---- AdamW ----------------------------------------------------------------------------

typedef struct Bench {
    Optimizer optimizer;
    Arena arena;
    Stream stream;                    // only its pool is used
    size_t count, padded;             // own elements, and those of the flat vector
    float *gradient, *out, *estimate; // (padded)
    double *theta, *m, *v;            // (count): the oracle's
} Bench;

static size_t bench_flat(const Bench *bench, size_t own) {
    return layout_flat(&bench->optimizer.layout, bench->optimizer.rank, own);
}

static bool is_covered(const OptimizerSettings *settings, size_t element) {
    for (int i = 0; i < settings->tensor_count; i++) {
        if (settings->tensors[i].begin <= element && element < settings->tensors[i].end) { return true; }
    }
    return false;
}

// Signs vary; no value is near zero, so that relative errors mean something.
static float start_value(size_t element) {
    Random random = {random_hash(3, element)};
    double size = 0.5 + random_uniform(&random);
    return (float)(random_bits(&random) % 2 == 0 ? size : -size);
}

static void bench_open(Bench *bench, const OptimizerSettings *settings, const Layout *layout, int rank) {
    memset(bench, 0, sizeof *bench);
    optimizer_reserve(&bench->optimizer, &bench->arena, settings, layout, rank, false);
    Error error = {""};
    assert_true(arena_commit(&bench->arena, &error));
    bench->stream.pool = thread_pool_create(2, false);
    bench->count = layout_shard(layout);
    bench->padded = layout_padded(layout);
    assert_true(bench->count <= (size_t)MAX_ELEMENTS);
    bench->gradient = (float *)calloc(3 * bench->padded, sizeof(float));
    bench->out = bench->gradient + bench->padded;
    bench->estimate = bench->out + bench->padded;
    bench->theta = (double *)calloc(3 * bench->count, sizeof(double));
    bench->m = bench->theta + bench->count;
    bench->v = bench->m + bench->count;
    // For a moment the gradient holds the parameters.
    for (size_t i = 0; i < bench->padded; i++) { bench->gradient[i] = start_value(i); }
    optimizer_take_master(&bench->optimizer, &bench->stream, bench->gradient);
    for (size_t i = 0; i < bench->count; i++) { bench->theta[i] = start_value(bench_flat(bench, i)); }
}

static void bench_close(Bench *bench) {
    thread_pool_destroy(bench->stream.pool);
    arena_release(&bench->arena);
    free(bench->gradient);
    free(bench->theta);
}

// One step of the oracle, number `t` from 1. Epsilon stands outside the root, decay is
// decoupled and uses the parameters before the step.
static void oracle_step(Bench *bench, double t, const OptimizerStep *step) {
    const OptimizerSettings *settings = &bench->optimizer.settings;
    for (size_t i = 0; i < bench->count; i++) {
        size_t flat = bench_flat(bench, i);
        double g = (double)bench->gradient[flat] / step->divisor * step->scale, *m = &bench->m[i],
               *v = &bench->v[i];
        double decay = is_covered(settings, flat) ? settings->weight_decay : 0.0;
        *m = settings->beta1 * *m + (1.0 - settings->beta1) * g;
        *v = settings->beta2 * *v + (1.0 - settings->beta2) * g * g;
        double moved = *m / (1.0 - pow(settings->beta1, t)) /
                       (sqrt(*v / (1.0 - pow(settings->beta2, t))) + settings->epsilon);
        bench->theta[i] =
            bench->theta[i] - step->learning_rate * decay * bench->theta[i] - step->learning_rate * moved;
    }
}

static void bench_fill_gradient(Bench *bench, int step) {
    for (size_t i = 0; i < bench->padded; i++) {
        Random random = {random_hash(random_hash(11, (uint64_t)step), i)};
        bench->gradient[i] = (float)(0.02 * random_normal(&random));
    }
}

// The casts must have the bits of casts that are made after the step; those of elements that other
// ranks own keep theirs.
static void bench_step(Bench *bench, OptimizerStep step, float *out, bool commit) {
    size_t bytes = bench->padded * sizeof(uint16_t);
    uint16_t *casts = (uint16_t *)malloc(2 * bytes), *after = casts + bench->padded;
    memset(casts, 0xff, 2 * bytes);
    step.gradient = bench->gradient;
    step.out = out;
    step.casts = (Real *)(void *)casts;
    step.keeps = commit;
    optimizer_step(&bench->optimizer, &bench->stream, &step);
    for (size_t i = 0; i < bench->count; i++) {
        size_t flat = bench_flat(bench, i);
        after[flat] = bf16_from_float(out != NULL ? out[flat] : bench->optimizer.master[i]);
    }
    assert_memory_equal(casts, after, bytes);
    free(casts);
}

static void expect_state(const Bench *bench, double tolerance) {
    const Optimizer *optimizer = &bench->optimizer;
    for (size_t i = 0; i < bench->count; i++) {
        float out = bench->out[bench_flat(bench, i)];
        assert_close(out, bench->theta[i], tolerance * fabs(bench->theta[i]), "parameter");
        assert_true(out == optimizer->master[i]);
        assert_close(real_floats(optimizer->first_moment)[i], bench->m[i],
                     tolerance * (fabs(bench->m[i]) + 1e-3), "first moment");
        assert_close(real_floats(optimizer->second_moment)[i], bench->v[i], tolerance * (bench->v[i] + 1e-9),
                     "second moment");
    }
}

// Marks all elements; those that other ranks own must keep their marks.
static void bench_mark(const Bench *bench, float *values) {
    for (size_t i = 0; i < bench->padded; i++) { values[i] = -777.0f - (float)(i % 1000); }
}

static void expect_marks(const Bench *bench, const float *values) {
    const Layout *layout = &bench->optimizer.layout;
    for (size_t i = 0; i < bench->padded; i++) {
        bool mine = i / layout->piece % (size_t)layout->size == (size_t)bench->optimizer.rank;
        assert_true(mine || values[i] == -777.0f - (float)(i % 1000));
    }
}

// Copies the state, which an estimate must not change.
static void copy_state(const Bench *bench, float *copy) { // (3, count)
    size_t bytes = bench->count * sizeof(float);
    memcpy(copy, bench->optimizer.master, bytes);
    memcpy(copy + bench->count, bench->optimizer.first_moment, bytes);
    memcpy(copy + 2 * bench->count, bench->optimizer.second_moment, bytes);
}

static const OptimizerStep STEPS_ASKED_FOR[STEPS] = {
    // gradient, out, casts, divisor, scale, learning rate, commit
    {NULL, NULL, NULL, 7, 1, 0.01, true},
    {NULL, NULL, NULL, 12, 0.37, 0.02, true},
    {NULL, NULL, NULL, 5, 0.81, 0.005, true},
};

static void expect_steps(const OptimizerSettings *settings, const Layout *layout, int rank) {
    static float before[3 * MAX_ELEMENTS], after[3 * MAX_ELEMENTS];
    Bench bench;
    bench_open(&bench, settings, layout, rank);
    bench_mark(&bench, bench.out);
    bench_mark(&bench, bench.estimate);
    for (int step = 0; step < STEPS; step++) {
        bench_fill_gradient(&bench, step);
        copy_state(&bench, before);
        bench_step(&bench, STEPS_ASKED_FOR[step], bench.estimate, false);
        copy_state(&bench, after);
        assert_memory_equal(before, after, 3 * bench.count * sizeof(float));
        assert_true(bench.optimizer.steps == step);
        oracle_step(&bench, step + 1, &STEPS_ASKED_FOR[step]);
        bench_step(&bench, STEPS_ASKED_FOR[step], bench.out, true);
        assert_memory_equal(bench.estimate, bench.out, bench.padded * sizeof(float));
        assert_true(bench.optimizer.steps == step + 1);
        expect_state(&bench, 1e-6);
    }
    expect_marks(&bench, bench.out);
    bench_close(&bench);
}

static OptimizerSettings adamw_settings(const OptimizerTensor *ranges, int count) {
    // Gradients are about as large as epsilon, so that its place in the formula and every
    // factor of the gradient matter.
    OptimizerSettings settings = {.beta1 = 0.9,
                                  .beta2 = 0.95,
                                  .epsilon = 1e-3,
                                  .weight_decay = 0.3,
                                  .tensors = ranges,
                                  .tensor_count = count};
    return settings;
}

static Layout layout_of(size_t count, int size, size_t piece, size_t cells) {
    Layout layout = {.count = count, .size = size, .piece = piece, .cells = cells};
    return layout;
}

static void a_step_equals_adamw_in_double(void **state) {
    (void)state;
    // Ranges that begin before, at, inside and beyond the ends of the pieces below; the
    // last one reaches past everything.
    static const OptimizerTensor ranges[] = {{0, 10, true, 0, 0},    {50, 70, true, 0, 0},
                                             {100, 101, true, 0, 0}, {120, 128, true, 0, 0},
                                             {130, 200, true, 0, 0}, {225, 20000, true, 0, 0}};
    // One piece; four of 64; pieces of 10, of 5 and of single elements, so that ranges
    // begin and end everywhere in them; real layouts.
    const Layout layouts[] = {layout_of(230, 1, 230, 1), layout_of(256, 4, 64, 1),
                              layout_of(230, 3, 10, 8),  layout_of(233, 2, 5, 24),
                              layout_of(234, 2, 1, 117), layout_of(40007, 1, 40007, 1),
                              layout_make(230, 3),       layout_make(100003, 3)};
    for (size_t i = 0; i < sizeof layouts / sizeof layouts[0]; i++) {
        for (int rank = 0; rank < layouts[i].size; rank++) {
            OptimizerSettings settings = adamw_settings(ranges, 6);
            expect_steps(&settings, &layouts[i], rank);
            settings.tensor_count = 0;
            expect_steps(&settings, &layouts[i], rank);
        }
    }
}

static void a_state_that_is_not_shared_out_is_one_piece(void **state) {
    (void)state;
    Layout whole = optimizer_whole(1003);
    assert_true(whole.count == 1003 && whole.size == 1 && layout_shard(&whole) == 1003 &&
                layout_padded(&whole) == 1003);
    LayoutRange range = {0};
    assert_true(layout_next(&whole, 0, SIZE_MAX, &range) && range.count == 1003);
    assert_true(layout_flat(&whole, 0, 1002) == 1002);
}

// An estimate may overwrite the gradient that it is computed from, with the same result.
static void an_estimate_may_replace_its_gradient(void **state) {
    (void)state;
    static const OptimizerTensor ranges[] = {{20, 90, true, 0, 0}};
    OptimizerSettings settings = adamw_settings(ranges, 1);
    Layout layout = layout_make(230, 3);
    Bench bench;
    bench_open(&bench, &settings, &layout, 1);
    bench_fill_gradient(&bench, 0);
    bench_step(&bench, STEPS_ASKED_FOR[1], bench.estimate, false);
    bench_step(&bench, STEPS_ASKED_FOR[1], bench.gradient, false);
    for (size_t i = 0; i < bench.count; i++) {
        size_t flat = bench_flat(&bench, i);
        assert_true(bench.gradient[flat] == bench.estimate[flat] &&
                    bench.gradient[flat] != bench.optimizer.master[i]);
    }
    bench_close(&bench);
}

// A commit may also write only the master: of a whole state, and of a rank's share.
static void a_commit_in_place_gives_the_same_bits(void **state) {
    (void)state;
    static const OptimizerTensor ranges[] = {{20, 90, true, 0, 0}};
    OptimizerSettings settings = adamw_settings(ranges, 1);
    const Layout layouts[] = {optimizer_whole(230), layout_make(230, 2)};
    for (int i = 0; i < 2; i++) {
        Bench apart, in_place;
        bench_open(&apart, &settings, &layouts[i], i);
        bench_open(&in_place, &settings, &layouts[i], i);
        for (int step = 0; step < STEPS; step++) {
            bench_fill_gradient(&apart, step);
            bench_fill_gradient(&in_place, step);
            bench_step(&apart, STEPS_ASKED_FOR[step], apart.out, true);
            bench_step(&in_place, STEPS_ASKED_FOR[step], NULL, true);
            assert_memory_equal(apart.optimizer.master, in_place.optimizer.master,
                                apart.count * sizeof(float));
            for (size_t own = 0; own < apart.count; own++) {
                assert_true(apart.out[bench_flat(&apart, own)] == in_place.optimizer.master[own]);
            }
        }
        bench_close(&apart);
        bench_close(&in_place);
    }
}

// Where the caller keeps the master anyway, no memory is reserved for it. Moments in bf16 take
// 4 bytes an element instead of 8.
static void memory_is_reserved_for_what_is_kept_here(void **state) {
    (void)state;
    OptimizerSettings settings = adamw_settings(NULL, 0);
    Layout layout = optimizer_whole(1003);
    for (int i = 0; i < 4; i++) {
        Optimizer optimizer;
        Arena arena;
        bool elsewhere = i % 2 == 1;
        memset(&optimizer, 0, sizeof optimizer);
        memset(&arena, 0, sizeof arena);
        settings.moments = i < 2 ? PRECISION_FP32 : PRECISION_BF16;
        optimizer_reserve(&optimizer, &arena, &settings, &layout, 0, elsewhere);
        assert_int_equal(arena_class_bytes(&arena, MEMORY_OPTIMIZER),
                         ((elsewhere ? 0u : 4u) + (i < 2 ? 8u : 4u)) * 1003u);
    }
}

// Four ranks, of which two own a matrix each, by Muon: a small one, which a wide one follows. All
// reserve what the rank with most of it needs, so that a plan for rank 0 holds for all.
static void ranks_with_unequal_pieces_reserve_the_same(void **state) {
    (void)state;
    enum { FIRST = 1024, SMALL = 16 * 16, WIDE = 16 * 64, RANKS = 4 };
    static const LayoutMatrix matrices[] = {{FIRST, FIRST + SMALL}, {FIRST + SMALL, FIRST + SMALL + WIDE}};
    static const OptimizerTensor tensors[] = {
        {.begin = 0, .end = FIRST},
        {.begin = FIRST, .end = FIRST + SMALL, .rows = 16, .columns = 16},
        {.begin = FIRST + SMALL, .end = FIRST + SMALL + WIDE, .rows = 16, .columns = 64}};
    Layout layout = layout_make_whole(FIRST + SMALL + WIDE, RANKS, matrices, 2);
    OptimizerSettings settings = adamw_settings(tensors, 3);
    settings.muon_iterations = 5;
    size_t bytes = 0, second = 0;
    for (int rank = 0; rank < RANKS; rank++) {
        Optimizer optimizer;
        Arena arena;
        memset(&optimizer, 0, sizeof optimizer);
        memset(&arena, 0, sizeof arena);
        optimizer_reserve(&optimizer, &arena, &settings, &layout, rank, false);
        assert_int_equal(optimizer.muon.count, WIDE);
        assert_int_equal(optimizer.muon.side, 16);
        assert_true(optimizer.flops == muon_flops(16, 64, 5));
        size_t own = 0;
        for (OptimizerRange range = {0}; optimizer_next(&optimizer, &range);) {
            own += optimizer_range_is_muons(&range) ? 0 : range.count;
        }
        second = size_max(second, own);
        assert_true(rank == 0 || (arena.bytes == bytes && optimizer.second_count >= own));
        bytes = arena.bytes;
        if (rank == RANKS - 1) { assert_int_equal(optimizer.second_count, second); }
    }
    layout_free(&layout);
}

// 1 - 0.99999, computed in fp32, would be off by more than a thousandth.
static void a_slow_second_moment_keeps_its_precision(void **state) {
    (void)state;
    OptimizerSettings settings = adamw_settings(NULL, 0);
    settings.beta2 = 0.99999;
    settings.epsilon = 1e-8;
    Layout layout = optimizer_whole(230);
    OptimizerStep asked = {.divisor = 1, .scale = 1, .learning_rate = 0.01, .keeps = true};
    Bench bench;
    bench_open(&bench, &settings, &layout, 0);
    // Parameters start at 0, so that they become the sum of the steps.
    for (size_t i = 0; i < bench.count; i++) { bench.theta[i] = bench.optimizer.master[i] = 0; }
    for (int step = 0; step < STEPS; step++) {
        bench_fill_gradient(&bench, step);
        oracle_step(&bench, step + 1, &asked);
        bench_step(&bench, asked, bench.out, true);
        for (size_t i = 0; i < bench.count; i++) {
            assert_close(real_floats(bench.optimizer.second_moment)[i], bench.v[i], 1e-4 * bench.v[i],
                         "second moment");
            assert_close(bench.out[i], bench.theta[i], 1e-4 * fmax(fabs(bench.theta[i]), 1e-3),
                         "sum of the steps");
        }
    }
    bench_close(&bench);
}

// AdamW steps neighbours in one range, if weight decay applies to both; Muon steps each matrix by
// itself.
static void tensors_of_adamw_join_where_they_touch(void **state) {
    (void)state;
    static const OptimizerTensor added[] = {{0, 5, true, 0, 0},   {5, 9, true, 0, 0},   {9, 10, false, 0, 0},
                                            {10, 12, true, 0, 0}, {13, 15, true, 0, 0}, {20, 30, true, 5, 2},
                                            {30, 31, true, 0, 0}, {31, 33, true, 0, 0}, {33, 35, true, 1, 2}};
    static const OptimizerTensor expected[] = {
        {0, 9, true, 0, 0},   {9, 10, false, 0, 0}, {10, 12, true, 0, 0}, {13, 15, true, 0, 0},
        {20, 30, true, 5, 2}, {30, 33, true, 0, 0}, {33, 35, true, 1, 2}};
    OptimizerTensor tensors[9];
    int count = 0;
    for (int i = 0; i < 9; i++) { optimizer_tensors_add(tensors, &count, added[i]); }
    assert_int_equal(count, 7);
    for (int i = 0; i < 7; i++) {
        assert_true(tensors[i].begin == expected[i].begin && tensors[i].end == expected[i].end &&
                    tensors[i].decays == expected[i].decays && tensors[i].rows == expected[i].rows);
    }
}

// ---- The learning rate ----------------------------------------------------------------

static LearningRate schedule_of(ScheduleKind kind) {
    LearningRate schedule = {.kind = kind,
                             .peak = 2.0,
                             .minimum = 0.2,
                             .step = 4.0,
                             .warmup = 20.0,
                             .total = 100.0,
                             .decay = 100.0};
    return schedule;
}

typedef struct RateAt {
    double progress, rate;
} RateAt;

static void expect_rates(const LearningRate *schedule, const RateAt *expected, int count) {
    for (int i = 0; i < count; i++) {
        assert_close(learning_rate_at(schedule, expected[i].progress), expected[i].rate, 1e-12, "rate");
    }
}

// The first commit has a rate above zero, and the commit that completes the warm-up has
// the peak.
static void the_rate_warms_up_linearly(void **state) {
    (void)state;
    static const RateAt warmup[] = {{0, 0.4}, {4, 0.8}, {8, 1.2}, {12, 1.6}, {16, 2.0}, {20, 2.0}};
    for (int kind = 0; kind <= SCHEDULE_CONSTANT; kind++) {
        LearningRate schedule = schedule_of((ScheduleKind)kind);
        expect_rates(&schedule, warmup, 6);
    }
}

static void the_rate_decays_as_it_says(void **state) {
    (void)state;
    static const RateAt constant[] = {{40, 2}, {60, 2}, {100, 2}, {1e6, 2}};
    static const RateAt linear[] = {{40, 1.55}, {60, 1.1}, {80, 0.65}, {100, 0.2}, {101, 0.2}, {1e6, 0.2}};
    // 0.2 + 1.8 * (1 + cos(pi / 4)) / 2 and its mirror image.
    static const RateAt cosine[] = {
        {40, 1.7363961030678928}, {60, 1.1}, {80, 0.46360389693210715}, {100, 0.2}, {101, 0.2}, {1e6, 0.2}};
    LearningRate schedule = schedule_of(SCHEDULE_CONSTANT);
    expect_rates(&schedule, constant, 4);
    schedule = schedule_of(SCHEDULE_LINEAR);
    expect_rates(&schedule, linear, 6);
    schedule = schedule_of(SCHEDULE_COSINE);
    expect_rates(&schedule, cosine, 6);
    // The last 40 alone: 0.2 + 1.8 * (1 - sqrt(1 / 4)), and of the others the halves of theirs.
    static const RateAt wsd[] = {{40, 2}, {60, 2}, {70, 1.1}, {82.5, 0.65}, {100, 0.2}, {1e6, 0.2}};
    static const RateAt late[] = {{40, 2}, {60, 2}, {80, 1.1}, {100, 0.2}};
    schedule = schedule_of(SCHEDULE_WSD);
    schedule.decay = 40;
    expect_rates(&schedule, wsd, 6);
    schedule.kind = SCHEDULE_COSINE;
    expect_rates(&schedule, late, 4);
    schedule.kind = SCHEDULE_LINEAR;
    expect_rates(&schedule, late, 4);
}

static void the_rate_starts_at_the_peak_without_warmup(void **state) {
    (void)state;
    static const struct {
        ScheduleKind kind;
        RateAt expected[3];
    } cases[] = {{SCHEDULE_CONSTANT, {{0, 2}, {50, 2}, {100, 2}}},
                 {SCHEDULE_LINEAR, {{0, 2}, {50, 1.1}, {100, 0.2}}},
                 {SCHEDULE_COSINE, {{0, 2}, {50, 1.1}, {100, 0.2}}}};
    for (int i = 0; i < 3; i++) {
        LearningRate schedule = schedule_of(cases[i].kind);
        schedule.warmup = 0;
        expect_rates(&schedule, cases[i].expected, 3);
    }
}

// A run that ends before or with its warm-up has only the ramp, to the peak at the warm-up's end,
// and nothing is divided by 0.
static void a_run_shorter_than_its_warmup_has_rates(void **state) {
    (void)state;
    static const RateAt ramp[] = {{0, 0.4}, {8, 1.2}, {12, 1.6}, {16, 2}};
    for (int kind = 0; kind <= SCHEDULE_CONSTANT; kind++) {
        for (int total = 0; total <= 20; total += 10) {
            LearningRate schedule = schedule_of((ScheduleKind)kind);
            schedule.total = total;
            expect_rates(&schedule, ramp, 4);
            double late = learning_rate_at(&schedule, 200);
            assert_close(late, schedule.kind == SCHEDULE_CONSTANT ? 2.0 : 0.2, 1e-12, "rate after the end");
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_equals_adamw_in_double),
        cmocka_unit_test(a_state_that_is_not_shared_out_is_one_piece),
        cmocka_unit_test(an_estimate_may_replace_its_gradient),
        cmocka_unit_test(a_commit_in_place_gives_the_same_bits),
        cmocka_unit_test(memory_is_reserved_for_what_is_kept_here),
        cmocka_unit_test(ranks_with_unequal_pieces_reserve_the_same),
        cmocka_unit_test(a_slow_second_moment_keeps_its_precision),
        cmocka_unit_test(tensors_of_adamw_join_where_they_touch),
        cmocka_unit_test(the_rate_warms_up_linearly),
        cmocka_unit_test(the_rate_decays_as_it_says),
        cmocka_unit_test(the_rate_starts_at_the_peak_without_warmup),
        cmocka_unit_test(a_run_shorter_than_its_warmup_has_rates),
    };
    return cmocka_run_group_tests(tests, NULL, NULL) == 0 ? 0 : 1;
}
