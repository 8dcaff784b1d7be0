// test_split.c: how ACCO divides a batch into its two rounds (acco.h), and what it
// measures where the user leaves that to it (measure.h).

#include "test/rules_bench.h"

// ---------------------------------------------------------------------------------------
// From a share to micro-batches

static void a_share_becomes_the_nearest_count_and_each_round_has_one(void **state) {
    (void)state;
    static const struct {
        double share;
        int count, a;
    } cases[] = {{0.5, 2, 1},   {0.5, 3, 2},     {0.5, 32, 16},  {0.75, 4, 3},        {0.25, 4, 1},
                 {0.875, 8, 7}, {0.999, 32, 31}, {0.001, 32, 1}, {0.999999, 2, 1},    {0.75, 2, 1},
                 {0.75, 3, 2},  {0.375, 4, 2},   {0.124, 4, 1},  {2.0 / 3, 1000, 667}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_int_equal(acco_round_a(cases[i].share, cases[i].count), cases[i].a);
    }
    for (int count = 2; count < 300; count++) { // a share that was written as a / count comes back
        for (int a = 1; a < count; a++) { assert_int_equal(acco_round_a((double)a / count, count), a); }
    }
}

static int round_a_of(WireFormat commit, WireFormat estimate, int count) {
    return acco_round_a(acco_share_of_wires(commit, estimate), count);
}

static void the_wires_divide_a_batch_as_their_bytes(void **state) {
    (void)state;
    for (int wire = 0; wire < WIRE_FORMAT_COUNT; wire++) {
        assert_int_equal(round_a_of((WireFormat)wire, (WireFormat)wire, 8), 4);
    }
    assert_int_equal(round_a_of(WIRE_FP32, WIRE_BF16, 3), 2);
    assert_int_equal(round_a_of(WIRE_FP32, WIRE_INT8, 5), 4);
    assert_int_equal(round_a_of(WIRE_FP32, WIRE_INT8, 10), 8);
    assert_int_equal(round_a_of(WIRE_FP32, WIRE_INT4, 9), 8);
    assert_int_equal(round_a_of(WIRE_FP32, WIRE_E3M0, 32), 28);
    assert_int_equal(round_a_of(WIRE_BF16, WIRE_INT8, 3), 2);
    assert_int_equal(round_a_of(WIRE_INT8, WIRE_FP32, 5), 1);
}

// Settings of a run with these options, on this wire.
static SchedulerSettings configured(const char *split, int estimate_wire, WireFormat wire) {
    AccoOptions options;
    SchedulerSettings settings;
    memset(&options, 0, sizeof options);
    memset(&settings, 0, sizeof settings);
    snprintf(options.split, sizeof options.split, "%s", split);
    options.estimate_wire = estimate_wire;
    settings.wire = settings.estimate_wire = wire;
    acco_configure(&options, &settings);
    return settings;
}

static void options_become_settings(void **state) {
    (void)state;
    assert_true(configured("half", ESTIMATE_WIRE_SAME, WIRE_BF16).split == 0.5);
    assert_true(configured("0.875", ESTIMATE_WIRE_SAME, WIRE_BF16).split == 0.875);
    assert_true(configured("wire", ESTIMATE_WIRE_SAME, WIRE_BF16).split == 0.5);
    assert_int_equal(configured("wire", ESTIMATE_WIRE_SAME, WIRE_BF16).estimate_wire, WIRE_BF16);
    SchedulerSettings coarse = configured("wire", ESTIMATE_WIRE_FORMATS + WIRE_BF16, WIRE_FP32);
    assert_int_equal(coarse.estimate_wire, WIRE_BF16);
    assert_close(coarse.split, 2.0 / 3, 1e-15, "2 : 1");
    // Until it is measured, memory is planned for a coarse format.
    assert_true(wire_is_coarse(configured("auto", ESTIMATE_WIRE_AUTO, WIRE_FP32).estimate_wire));
}

// ---------------------------------------------------------------------------------------
// What hides best

// Seconds of a commit of one rank.
static double commit_seconds(int k, int a, double c, double commit, double estimate) {
    return fmax(a * c, commit) + fmax((k - a) * c, estimate);
}

// The closed form max(k c, S + E) is met, up to one micro-batch, by a split in proportion
// to the exchanges; no split can be faster.
static void rounds_as_long_as_their_exchanges_hide_best(void **state) {
    (void)state;
    Random random = {7};
    for (int i = 0; i < 10000; i++) {
        int k = 2 + (int)(random_bits(&random) % 127);
        double c = 1e-3 * (1 + random_uniform(&random)), commit = k * c * 4 * random_uniform(&random),
               estimate = commit * random_uniform(&random), bound = fmax(k * c, commit + estimate);
        int a = acco_round_a(commit / (commit + estimate), k);
        assert_true(commit_seconds(k, a, c, commit, estimate) <= bound + c);
        for (int other = 1; other < k; other++) {
            assert_true(commit_seconds(k, other, c, commit, estimate) >= bound * (1 - 1e-12));
        }
    }
}

// Against trying every split by hand: none has less exposed, and none with a longer round
// A has as little.
static void the_best_share_exposes_least_and_is_the_largest_such(void **state) {
    (void)state;
    Random random = {11};
    for (int i = 0; i < 2000; i++) {
        int k = 2 + (int)(random_bits(&random) % 63);
        AccoRank rank = {k, 1e-3};
        double commit = 1e-3 * 2 * k * random_uniform(&random), estimate = commit * random_uniform(&random);
        int a = acco_round_a(acco_best_share(&rank, 1, commit, estimate, 1e-9), k);
        double chosen = acco_exposed(&rank, 1, (double)a / k, commit, estimate).exposed;
        for (int other = 1; other < k; other++) {
            double exposed = fmax(commit - other * 1e-3, 0) + fmax(estimate - (k - other) * 1e-3, 0);
            assert_true(exposed >= chosen - 2e-9);
            assert_true(other <= a || exposed > chosen + 1e-10);
        }
    }
}

static void the_slowest_rank_of_each_round_hides(void **state) {
    (void)state;
    // 4 micro-batches of 30 ms beside 16 of 10 ms: at 3/4 the rounds last 120 and 40 ms.
    AccoRank ranks[2] = {{4, 30e-3}, {16, 10e-3}};
    AccoExposed times = acco_exposed(ranks, 2, 0.75, 130e-3, 50e-3);
    assert_close(times.a, 120e-3, 1e-12, "round A");
    assert_close(times.b, 40e-3, 1e-12, "round B");
    assert_close(times.exposed, 20e-3, 1e-12, "exposed");
    assert_int_equal(acco_round_a(acco_best_share(ranks, 2, 0, 0, 1e-9), 16), 15);
}

static void a_whole_batch_beside_a_link_without_delay_is_round_a(void **state) {
    (void)state;
    AccoRank rank = {8, 1e-3};
    assert_true(acco_best_share(&rank, 1, 0, 0, 0) == 7.0 / 8);
}

// ---------------------------------------------------------------------------------------
// Measuring

typedef struct Measured {
    bool measures;
    AccoOptions options[2];
    char reasons[2][RULE_TEXT];
    MeasuredRound rounds[2];
    uint64_t hashes[2];
} Measured;

static uint64_t hash_state(const Scheduler *s) {
    size_t owned = layout_shard(&s->optimizer.layout), count = s->problem.parameter_count;
    uint64_t hash =
        random_hash(hash_floats(s->parameters.data, count), hash_floats(s->optimizer.master, owned));
    hash = random_hash(hash, hash_floats(s->optimizer.first_moment, owned));
    return random_hash(hash, s->micro_batches_begun);
}

static RunSpec measured_spec(void) {
    RunSpec spec = noisy_spec("acco", 40000);
    spec.settings.split = 0.75;
    spec.work_seconds = 2e-3;
    for (int rank = 0; rank < MAX_RANKS; rank++) { spec.micro_batches[rank] = 8; }
    return spec;
}

// Measures on a link of 4 MB/s, where 40000 elements in fp32 take 40 ms, and then makes
// three commits.
static void measure_rank(Transport *transport, void *context) {
    Measured *measured = (Measured *)context;
    int rank = transport->rank;
    RunSpec spec = measured_spec();
    Bench *bench = (Bench *)malloc(sizeof *bench);
    bench_open(bench, &spec, transport, NULL);
    Scheduler *s = &bench->scheduler;
    transport->link_bytes_per_second = 4e6;
    AccoOptions *options = &measured->options[rank];
    snprintf(options->split, sizeof options->split, "auto");
    options->estimate_wire = ESTIMATE_WIRE_AUTO;
    if (measured->measures) {
        uint64_t before = hash_state(s);
        measured->rounds[rank] = measure_round(s, WIRE_FP32);
        acco_measure(options, s, measured->reasons[rank]);
        if (hash_state(s) != before) {
            snprintf(measured->reasons[rank], RULE_TEXT, "the state has changed");
        }
    }
    transport->link_bytes_per_second = 0;
    for (int commit = 0; commit < 3; commit++) { bench->rule->commit(s); }
    scheduler_settle(s);
    measured->hashes[rank] = hash_state(s);
    bench_close(bench);
    free(bench);
}

static void measuring_leaves_training_as_it_was(void **state) {
    (void)state;
    Measured with = {.measures = true}, without = {.measures = false};
    threads_run(2, measure_rank, &with);
    threads_run(2, measure_rank, &without);
    for (int rank = 0; rank < 2; rank++) {
        double share;
        assert_true(with.hashes[rank] == without.hashes[rank]);
        assert_string_equal(without.reasons[rank], "");
        assert_memory_equal(with.reasons[rank], "measured: ", 10);
        assert_true(acco_read_share(with.options[rank].split, &share) && share > 0 && share < 1);
        assert_true(with.options[rank].estimate_wire >= ESTIMATE_WIRE_FORMATS);
        // The link cannot be faster than it is, nor the work shorter; both ranks hear the same of the link.
        assert_true(with.rounds[rank].exchange >= 30e-3 && with.rounds[rank].micro_batch >= 2e-3);
        assert_true(with.rounds[rank].exchange == with.rounds[0].exchange);
    }
}

// What is named is not measured: no message is sent, nothing changes.
static void what_the_user_has_chosen_is_not_measured(void **state) {
    (void)state;
    AccoOptions options;
    memset(&options, 0, sizeof options);
    snprintf(options.split, sizeof options.split, "0.75");
    options.estimate_wire = ESTIMATE_WIRE_FORMATS + WIRE_INT8;
    char reason[RULE_TEXT] = "";
    acco_measure(&options, NULL, reason);
    assert_string_equal(options.split, "0.75");
    assert_string_equal(reason, "");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_share_becomes_the_nearest_count_and_each_round_has_one),
        cmocka_unit_test(the_wires_divide_a_batch_as_their_bytes),
        cmocka_unit_test(options_become_settings),
        cmocka_unit_test(rounds_as_long_as_their_exchanges_hide_best),
        cmocka_unit_test(the_best_share_exposes_least_and_is_the_largest_such),
        cmocka_unit_test(the_slowest_rank_of_each_round_hides),
        cmocka_unit_test(a_whole_batch_beside_a_link_without_delay_is_round_a),
        cmocka_unit_test(measuring_leaves_training_as_it_was),
        cmocka_unit_test(what_the_user_has_chosen_is_not_measured),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
