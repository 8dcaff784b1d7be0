// test_split.c: how ACCO divides a batch into its two rounds (acco_split.h), what is chosen
// where the user leaves that to the program (plan/choose.h), and how it is measured
// (plan/measure.h).

#include "plan/choose.h"
#include "test/rules/rules_bench.h"

// ---- From a share to micro-batches ----------------------------------------------------

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

// ---- What hides best ------------------------------------------------------------------

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

// ---- What auto chooses ----------------------------------------------------------------

// What was measured on up to three ranks. Only micro-batches and exchanges take time.
typedef struct Case {
    RankSpeed ranks[3];
    Transport transport;
    SchedulerSettings settings;
    Problem problem;
    Machine machine;
    Measurements measured;
} Case;

static Case *case_new(int size, const RankSpeed *ranks) {
    Case *one = (Case *)calloc(1, sizeof *one);
    int rule = 0;
    while (strcmp(RULES[rule].rule->name, "acco") != 0) { rule++; }
    assert(size >= 1 && size <= 3);
    for (int i = 0; i < size; i++) { one->ranks[i] = ranks[i]; }
    transport_open_supposed(&one->transport, size, 1);
    one->settings.kind = RULE_OVERLAPPED;
    one->settings.overlap = true;
    one->settings.local.fragments = 1;
    one->settings.wire = one->settings.estimate_wire = WIRE_FP32;
    one->problem.parameter_count = 3000;
    one->machine.host.bytes_per_second = one->machine.inside.bytes_per_second = INFINITY;
    one->machine.memory_bytes_per_second = one->machine.exchange_bytes_per_second = INFINITY;
    one->machine.micro_batch = 1; // choose.h puts what was measured in its place
    Measurements measured = {.rule = rule,
                             .settings = &one->settings,
                             .problem = &one->problem,
                             .transport = &one->transport,
                             .machine = &one->machine,
                             .ranks = one->ranks};
    one->measured = measured;
    return one;
}

static void case_free(Case *one) {
    transport_close(&one->transport);
    free(one);
}

static RuleOptions options_of(const char *split, int estimate_wire) {
    RuleOptions options;
    memset(&options, 0, sizeof options);
    snprintf(options.acco.split, sizeof options.acco.split, "%s", split);
    options.acco.estimate_wire = estimate_wire;
    return options;
}

// Simulated seconds of a commit whose exchanges take `commit` and `estimate` seconds.
static double case_seconds(Case *one, double share, double commit, double estimate, double longer) {
    char split[32];
    snprintf(split, sizeof split, "%.17g", share);
    RuleOptions options = options_of(split, ESTIMATE_WIRE_FORMATS + WIRE_INT8);
    one->measured.exchange[WIRE_FP32] = commit;
    one->measured.exchange[WIRE_INT8] = estimate;
    return simulated_seconds(&one->measured, &options, longer);
}

// The share that is chosen.
static double case_choice(Case *one, double commit, double estimate) {
    double share;
    RuleOptions options = options_of("auto", ESTIMATE_WIRE_FORMATS + WIRE_INT8);
    one->measured.exchange[WIRE_FP32] = commit;
    one->measured.exchange[WIRE_INT8] = estimate;
    Choice choice = choose_split(&one->measured, &options, 0);
    assert_true(acco_read_share(choice.options.acco.split, &share));
    return share;
}

static void long_rounds_and_fine_formats_are_preferred(void **state) {
    (void)state;
    static const char *const splits[] = {"0.75", "0.5", "0.25"};
    SchedulerSettings settings;
    memset(&settings, 0, sizeof settings);
    settings.micro_batches = 4;
    settings.wire = WIRE_BF16;
    for (int format = 0; format < 3; format++) {
        for (int split = 0; split < 3; split++) {
            RuleOptions options = options_of("auto", ESTIMATE_WIRE_AUTO);
            assert_true(acco_choose(&options.acco, &settings, format, split));
            assert_string_equal(options.acco.split, splits[split]);
            assert_int_equal(options.acco.estimate_wire, ESTIMATE_WIRE_FORMATS + WIRE_BF16 + format);
        }
    }
    RuleOptions open = options_of("auto", ESTIMATE_WIRE_AUTO), named = options_of("half", ESTIMATE_WIRE_SAME);
    assert_false(acco_choose(&open.acco, &settings, 0, 3)); // both rounds have a micro-batch
    assert_false(acco_choose(&open.acco, &settings, 3, 0)); // int4 is the coarsest
    assert_true(acco_choose(&named.acco, &settings, 0, 0)); // what the user said stays
    assert_string_equal(named.acco.split, "half");
    assert_int_equal(named.acco.estimate_wire, ESTIMATE_WIRE_SAME);
    assert_false(acco_choose(&named.acco, &settings, 1, 0) || acco_choose(&named.acco, &settings, 0, 1));
}

// Rounds of 120 and 40 ms on the first rank, of 60 and 20 ms on the second, of 1 and 1 ms on
// the third. The estimate waits for the round of 120 ms and the commit for that of 40 ms; so
// 120 + 50, 40 + 130 and 130 + 50 ms must pass, and the last is the longest.
// Then: 1 of 2 slow micro-batches is in each round, whatever the fast rank with its 60 does.
// With 59 of those in round A, the estimate waits for 767 ms and the commit after it 290 ms.
static void unequal_ranks_wait_for_each_other(void **state) {
    (void)state;
    static const RankSpeed ranks[3] = {{4, 40e-3}, {16, 5e-3}, {2, 1e-3}};
    static const RankSpeed uneven[2] = {{2, 430e-3}, {60, 13e-3}};
    Case *three = case_new(3, ranks), *two = case_new(2, uneven);
    assert_close(case_seconds(three, 0.75, 130e-3, 50e-3, 1), 180e-3, 1e-9, "three ranks");
    assert_close(case_seconds(two, 59.0 / 60, 290e-3, 290e-3, 1), 1057e-3, 1e-9, "59 of 60");
    assert_true(case_choice(two, 290e-3, 290e-3) < 0.8);
    case_free(three);
    case_free(two);
}

// Measured on two hosts at 115 Mbit/s. If both exchanges take a tenth longer, 393 ms are
// needed with 30 : 2 as with 28 : 4. As measured it is 383 and 362.
static void a_margin_does_not_expose_what_was_measured_to_fit(void **state) {
    (void)state;
    static const RankSpeed ranks[2] = {{32, 10.4e-3}, {32, 10.4e-3}};
    Case *one = case_new(2, ranks);
    assert_true(case_choice(one, 286e-3, 71.3e-3) == 28.0 / 32);
    case_free(one);
}

// 8 micro-batches of 10 ms. 12 ms do not fit beside one of them; 9 do, and a tenth more. 10 ms
// would be exposed for 1 ms with the margin, which is in the mean less than a hundredth of
// the computation, and no reason for a shorter round A.
static const RankSpeed RANKS[2] = {{8, 10e-3}, {8, 10e-3}};

static void the_longest_round_that_is_as_fast_is_chosen(void **state) {
    (void)state;
    Case *one = case_new(2, RANKS);
    assert_true(case_choice(one, 50e-3, 12e-3) == 6.0 / 8);
    assert_true(case_choice(one, 50e-3, 9e-3) == 7.0 / 8);
    assert_true(case_choice(one, 50e-3, 10e-3) == 7.0 / 8);
    case_free(one);
}

// The same with 50, 26, 14 and 8 ms for fp32, bf16, int8 and int4, and a tenth longer. fp32
// needs 110 ms, bf16 84, and int8 hides all: 55 ms beside 6 micro-batches, 15.4 beside 2.
static void the_finest_format_that_is_as_fast_is_chosen(void **state) {
    (void)state;
    static const double exchange[] = {50e-3, 26e-3, 14e-3, 8e-3};
    Case *one = case_new(2, RANKS);
    Measurements *measured = &one->measured;
    RuleOptions options = options_of("auto", ESTIMATE_WIRE_AUTO);
    Choice list[4];
    for (int format = 0; format < 4; format++) {
        measured->exchange[format] = exchange[format];
        list[format] = choose_split(measured, &options, format);
        assert_int_equal(list[format].options.acco.estimate_wire, ESTIMATE_WIRE_FORMATS + format);
        assert_true(choice_hides_everything(measured, &list[format]) == (format >= WIRE_INT8));
    }
    assert_close(list[0].late, 110e-3, 1e-9, "fp32");
    assert_ptr_equal(choose_first(measured, list, 4, true), &list[WIRE_INT8]);
    assert_ptr_equal(choose_first(measured, list, 2, true), &list[WIRE_BF16]);
    assert_ptr_equal(choose_first(measured, list, 1, true), &list[WIRE_FP32]);
    list[1].late = 80.7e-3; // within the tolerance
    assert_ptr_equal(choose_first(measured, list, 4, true), &list[WIRE_BF16]);
    for (int i = 0; i < 4; i++) { list[i].late = 1 - 0.1 * i; } // nothing hides: the fastest
    assert_ptr_equal(choose_first(measured, list, 4, true), &list[WIRE_INT4]);
    case_free(one);
}

// Against the closed form for one rank, with every split tried by hand: none is shorter by
// more than the tolerance, and none with a longer round A is as short.
static void the_choice_is_that_of_the_closed_form(void **state) {
    (void)state;
    Random random = {11};
    for (int i = 0; i < 200; i++) {
        RankSpeed rank = {2 + (int)(random_bits(&random) % 63), 1e-3};
        int k = rank.micro_batches, expected = 0;
        double commit = 1e-3 * 2 * k * random_uniform(&random), estimate = commit * random_uniform(&random),
               seconds[65], least = INFINITY;
        for (int a = 1; a < k; a++) {
            seconds[a] = (commit_seconds(k, a, 1e-3, commit, estimate) +
                          commit_seconds(k, a, 1e-3, 1.1 * commit, 1.1 * estimate)) /
                         2;
            least = fmin(least, seconds[a]);
        }
        for (int a = 1; a < k; a++) { expected = seconds[a] <= least + 0.01 * k * 1e-3 ? a : expected; }
        Case *one = case_new(1, &rank);
        assert_int_equal(acco_round_a(case_choice(one, commit, estimate), k), expected);
        case_free(one);
    }
}

// ---- Measuring ------------------------------------------------------------------------

typedef struct Measured {
    bool measures;
    double slow_seconds, link; // RunSpec
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
    if (measured->measures) {
        uint64_t before = hash_state(s);
        measured->rounds[rank] = measure_round(s, WIRE_FP32);
        if (measured->slow_seconds == 0) { measure_round(s, WIRE_INT4); }
        if (hash_state(s) != before) { measured->has_changed_the_state = true; }
    }
    transport->link_bytes_per_second = 0;
    for (int commit = 0; commit < 3 && measured->slow_seconds == 0; commit++) { bench->rule->advance(s); }
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
        assert_true(with.hashes[rank] == without.hashes[rank]);
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
        cmocka_unit_test(long_rounds_and_fine_formats_are_preferred),
        cmocka_unit_test(the_choice_is_that_of_the_closed_form),
        cmocka_unit_test(a_margin_does_not_expose_what_was_measured_to_fit),
        cmocka_unit_test(unequal_ranks_wait_for_each_other),
        cmocka_unit_test(the_longest_round_that_is_as_fast_is_chosen),
        cmocka_unit_test(the_finest_format_that_is_as_fast_is_chosen),
        cmocka_unit_test(measuring_leaves_training_as_it_was),
        cmocka_unit_test(a_slow_rank_does_not_lengthen_the_exchange),
        cmocka_unit_test(a_long_exchange_is_measured_in_part),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
