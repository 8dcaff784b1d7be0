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
    settings.micro_batches = 8;
    acco_configure(&options, &settings);
    return settings;
}

static void options_become_settings(void **state) {
    (void)state;
    assert_true(configured("half", ESTIMATE_WIRE_SAME, WIRE_BF16).round_a == 4);
    assert_true(configured("0.875", ESTIMATE_WIRE_SAME, WIRE_BF16).round_a == 7);
    assert_true(configured("0.875", ESTIMATE_WIRE_SAME, WIRE_BF16).first_round == 7);
    assert_true(configured("wire", ESTIMATE_WIRE_SAME, WIRE_BF16).round_a == 4);
    assert_int_equal(configured("wire", ESTIMATE_WIRE_SAME, WIRE_BF16).estimate_wire, WIRE_BF16);
    SchedulerSettings coarse = configured("wire", ESTIMATE_WIRE_FORMATS + WIRE_BF16, WIRE_FP32);
    assert_int_equal(coarse.estimate_wire, WIRE_BF16);
    assert_int_equal(coarse.round_a, 5); // 2 : 1
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

// The end of every round, step by step: a round begins when the one before it has ended
// on that rank and the parameters of the exchange beside that one have arrived; an
// exchange begins when all ranks have ended the round before it.
static double simulated_commit(const AccoRank *ranks, int size, double share, double commit,
                               double estimate) {
    enum { COMMITS = 400 };
    double free_at[8] = {0}, sent = 0, half_way = 0, end = 0;
    for (int i = 0; i < 2 * COMMITS; i++) { // rounds B and A in turn, with an estimate and a commit
        bool is_a = i % 2 == 1;
        double computed = 0, took = is_a ? commit : estimate;
        for (int rank = 0; rank < size; rank++) {
            int k = ranks[rank].micro_batches, a = acco_round_a(share, k);
            free_at[rank] = fmax(free_at[rank], sent) + (is_a ? a : k - a) * ranks[rank].seconds;
            computed = fmax(computed, free_at[rank]);
        }
        sent = fmax(sent, end) + took;
        end = computed;
        if (i == COMMITS - 1) { half_way = computed; }
    }
    return 2 * (end - half_way) / COMMITS;
}

static AccoRank draw_rank(Random *random) {
    AccoRank rank = {2 + (int)(random_bits(random) % 31), 1e-3 * (1 + 9 * random_uniform(random))};
    return rank;
}

static void commits_take_as_long_as_a_simulation_of_them(void **state) {
    (void)state;
    Random random = {13};
    for (int i = 0; i < 2000; i++) {
        int size = 1 + i % 3;
        AccoRank ranks[3] = {draw_rank(&random), draw_rank(&random), draw_rank(&random)};
        double share = random_uniform(&random), commit = 0.2 * random_uniform(&random),
               estimate = commit * random_uniform(&random);
        double expected = simulated_commit(ranks, size, share, commit, estimate);
        assert_close(acco_times(ranks, size, share, commit, estimate).commit, expected, 1e-9, "a commit");
    }
}

// The mean of exchanges as measured and of some that take a tenth longer.
static double expected_seconds(int k, int a, double c, double commit, double estimate) {
    double measured = commit_seconds(k, a, c, commit, estimate);
    return (measured + commit_seconds(k, a, c, 1.1 * commit, 1.1 * estimate)) / 2;
}

// Against trying every split by hand: no commit is shorter, and none with a longer round
// A is as short.
static void the_best_share_makes_the_shortest_commits_and_is_the_largest_such(void **state) {
    (void)state;
    Random random = {11};
    for (int i = 0; i < 2000; i++) {
        AccoRank rank = {2 + (int)(random_bits(&random) % 63), 1e-3};
        int k = rank.micro_batches;
        double commit = 1e-3 * 2 * k * random_uniform(&random), estimate = commit * random_uniform(&random);
        int a = acco_round_a(acco_best_share(&rank, 1, commit, estimate, 1e-9), k);
        double chosen = expected_seconds(k, a, 1e-3, commit, estimate);
        for (int other = 1; other < k; other++) {
            double seconds = expected_seconds(k, other, 1e-3, commit, estimate);
            assert_true(seconds >= chosen - 2e-9);
            assert_true(other <= a || seconds > chosen + 1e-10);
        }
    }
}

// Measured on two hosts at 115 Mbit/s. If both exchanges take a tenth longer, 393 ms are
// needed with 30 : 2 as with 28 : 4. As measured it is 383 and 362.
static void a_margin_does_not_expose_what_was_measured_to_fit(void **state) {
    (void)state;
    AccoRank rank = {32, 10.4e-3};
    assert_int_equal(acco_round_a(acco_best_share(&rank, 1, 286e-3, 71.3e-3, 3.3e-3), 32), 28);
}

static void unequal_ranks_wait_for_each_other(void **state) {
    (void)state;
    // Rounds of 120 and 40 ms on one rank, of 60 and 20 ms on the other.
    AccoRank ranks[3] = {{4, 40e-3}, {16, 5e-3}, {2, 1e-3}};
    AccoTimes times = acco_times(ranks, 3, 0.75, 130e-3, 50e-3);
    assert_close(times.a, 120e-3, 1e-12, "round A");
    assert_close(times.b, 40e-3, 1e-12, "round B");
    assert_close(times.commit, 180e-3, 1e-12, "a commit");
    // 1 of 2 slow micro-batches is in each round, whatever the fast rank with its 60 does.
    AccoRank uneven[2] = {{2, 430e-3}, {60, 13e-3}};
    assert_close(acco_times(uneven, 2, 59.0 / 60, 290e-3, 290e-3).commit, 1057e-3, 1e-12, "59 of 60");
    assert_true(acco_best_share(uneven, 2, 290e-3, 290e-3, 1e-9) < 0.8);
}

// A run of two ranks with 8 micro-batches of 10 ms each, and a commit of 50 ms.
static const AccoRank RANKS[2] = {{8, 10e-3}, {8, 10e-3}};
static const AccoMeasured MEASURED = {RANKS, 2, WIRE_FP32, 50e-3, 80e-3};

static AccoCandidate candidate(const char *split, WireFormat wire, double estimate) {
    AccoOptions options;
    memset(&options, 0, sizeof options);
    snprintf(options.split, sizeof options.split, "%s", split);
    return acco_candidate(&options, &MEASURED, wire, estimate);
}

static void a_candidate_has_the_split_that_was_asked_for(void **state) {
    (void)state;
    assert_true(candidate("half", WIRE_INT8, 10e-3).share == 0.5);
    assert_true(candidate("0.25", WIRE_INT8, 10e-3).share == 0.25);
    assert_true(candidate("wire", WIRE_BF16, 10e-3).share == acco_share_of_wires(WIRE_FP32, WIRE_BF16));
    // 12 ms do not fit beside one micro-batch; 9 do, and a tenth more.
    assert_true(candidate("auto", WIRE_INT8, 12e-3).share == 6.0 / 8);
    assert_true(candidate("auto", WIRE_INT8, 9e-3).share == 7.0 / 8);
    // An hundredth of the computation is no reason for a shorter round A.
    assert_true(candidate("auto", WIRE_INT8, 10e-3).share == 7.0 / 8);
    assert_close(candidate("half", WIRE_FP32, 50e-3).times.commit, 110e-3, 1e-12, "a commit");
}

static void the_finest_format_that_is_as_fast_is_chosen(void **state) {
    (void)state;
    AccoCandidate list[4] = {candidate("auto", WIRE_FP32, 50e-3), candidate("auto", WIRE_BF16, 26e-3),
                             candidate("auto", WIRE_INT8, 14e-3), candidate("auto", WIRE_INT4, 8e-3)};
    assert_int_equal(acco_choose(list, 4, 80e-3)->wire, WIRE_INT8); // bf16 needs 84 of 80 ms
    assert_int_equal(acco_choose(list, 2, 80e-3)->wire, WIRE_BF16);
    assert_int_equal(acco_choose(list, 1, 80e-3)->wire, WIRE_FP32);
    list[1].times.commit = 80.7e-3; // within the tolerance
    assert_int_equal(acco_choose(list, 4, 80e-3)->wire, WIRE_BF16);
    for (int i = 0; i < 4; i++) { list[i].times.commit = 1 - 0.1 * i; } // nothing hides: the fastest
    assert_int_equal(acco_choose(list, 4, 80e-3)->wire, WIRE_INT4);
}

// ---------------------------------------------------------------------------------------
// Measuring

typedef struct Measured {
    bool measures;
    double slow_seconds, link; // RunSpec
    AccoOptions options[2];
    char reasons[2][RULE_TEXT];
    MeasuredRound rounds[2];
    uint64_t hashes[2];
    bool has_changed_the_state;
} Measured;

static uint64_t hash_state(const Scheduler *s) {
    size_t owned = layout_shard(&s->optimizer.layout), count = s->problem.parameter_count;
    uint64_t hash =
        random_hash(hash_floats(s->parameters.data, count), hash_floats(s->optimizer.master, owned));
    hash = random_hash(hash, hash_floats(real_floats(s->optimizer.first_moment), owned));
    return random_hash(hash, s->micro_batches_begun);
}

// Measures, and then makes three commits.
static void measure_rank(Transport *transport, void *context) {
    Measured *measured = (Measured *)context;
    int rank = transport->rank;
    RunSpec spec = noisy_spec("acco", 40000);
    spec.split = 0.75;
    spec.work_seconds = 2e-3;
    spec.slow_seconds = measured->slow_seconds;
    for (int i = 0; i < MAX_RANKS; i++) { spec.micro_batches[i] = 8; }
    Bench *bench = (Bench *)malloc(sizeof *bench);
    bench_open(bench, &spec, transport, NULL);
    Scheduler *s = &bench->scheduler;
    transport->link_bytes_per_second = measured->link;
    AccoOptions *options = &measured->options[rank];
    snprintf(options->split, sizeof options->split, "auto");
    options->estimate_wire = ESTIMATE_WIRE_AUTO;
    if (measured->measures) {
        uint64_t before = hash_state(s);
        measured->rounds[rank] = measure_round(s, WIRE_FP32);
        if (measured->slow_seconds == 0) { acco_measure(options, s, measured->reasons[rank]); }
        if (hash_state(s) != before) { measured->has_changed_the_state = true; }
    }
    transport->link_bytes_per_second = 0;
    for (int commit = 0; commit < 3 && measured->slow_seconds == 0; commit++) { bench->rule->commit(s); }
    scheduler_settle(s);
    measured->hashes[rank] = hash_state(s);
    bench_close(bench);
    free(bench);
}

// At 4 MB/s the exchange of 40000 elements in fp32 takes 40 ms.
static void measuring_leaves_training_as_it_was(void **state) {
    (void)state;
    Measured with = {.measures = true, .link = 4e6}, without = {.measures = false, .link = 4e6};
    threads_run(2, measure_rank, &with);
    threads_run(2, measure_rank, &without);
    assert_false(with.has_changed_the_state);
    for (int rank = 0; rank < 2; rank++) {
        double share;
        assert_true(with.hashes[rank] == without.hashes[rank]);
        assert_memory_equal(with.reasons[rank], "measured: ", 10);
        assert_true(acco_read_share(with.options[rank].split, &share) && share > 0 && share < 1);
        assert_true(with.options[rank].estimate_wire >= ESTIMATE_WIRE_FORMATS);
        // The link cannot be faster than it is, nor the work shorter; both ranks hear the
        // same of the link.
        assert_true(with.rounds[rank].exchange >= 30e-3 && with.rounds[rank].micro_batch >= 2e-3);
        assert_true(with.rounds[rank].exchange == with.rounds[0].exchange);
    }
}

// What one rank computes longer than the other is no part of the exchange between them.
static void a_slow_rank_does_not_lengthen_the_exchange(void **state) {
    (void)state;
    Measured measured = {.measures = true, .slow_seconds = 0.4, .link = 4e6};
    threads_run(2, measure_rank, &measured);
    assert_true(measured.rounds[0].exchange >= 30e-3 && measured.rounds[0].exchange < 0.3);
    assert_true(measured.rounds[1].micro_batch >= 0.4 && measured.rounds[0].micro_batch < 0.3);
}

// Of an exchange of 1.6 s only a part is sent. Many micro-batches are computed beside it.
static void a_long_exchange_is_measured_in_part(void **state) {
    (void)state;
    Measured measured = {.measures = true, .slow_seconds = 1e-9, .link = 1e5};
    threads_run(2, measure_rank, &measured);
    assert_true(measured.rounds[0].exchange >= 1.2 && measured.rounds[0].exchange < 5);
    assert_true(measured.rounds[0].micro_batch >= 2e-3 && measured.rounds[0].micro_batch < 0.2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_share_becomes_the_nearest_count_and_each_round_has_one),
        cmocka_unit_test(the_wires_divide_a_batch_as_their_bytes),
        cmocka_unit_test(options_become_settings),
        cmocka_unit_test(rounds_as_long_as_their_exchanges_hide_best),
        cmocka_unit_test(commits_take_as_long_as_a_simulation_of_them),
        cmocka_unit_test(the_best_share_makes_the_shortest_commits_and_is_the_largest_such),
        cmocka_unit_test(a_margin_does_not_expose_what_was_measured_to_fit),
        cmocka_unit_test(unequal_ranks_wait_for_each_other),
        cmocka_unit_test(a_candidate_has_the_split_that_was_asked_for),
        cmocka_unit_test(the_finest_format_that_is_as_fast_is_chosen),
        cmocka_unit_test(measuring_leaves_training_as_it_was),
        cmocka_unit_test(a_slow_rank_does_not_lengthen_the_exchange),
        cmocka_unit_test(a_long_exchange_is_measured_in_part),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
