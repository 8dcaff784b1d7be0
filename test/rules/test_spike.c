// test_spike.c: which losses and gradients are spikes, and what each rule does about one.
//
// Here spikes are finite, but far too large. Values that are not finite, and whom the
// message names, are in test_schedule.c. That a run which leaves spikes out ends in the
// same bits as a plain loop which leaves them out is in test_rules.c.
#include "test/rules/rules_bench.h"

// A usual gradient norm: its logarithm is uniform in [-0.2, 0.2).
static double even_norm(uint64_t i) { return exp(0.2 * (double)noise(7, i)); }

static SpikeDetector learned_detector(double limit, int count) {
    SpikeDetector detector = {limit, 0, 0, 0};
    for (int i = 0; i < count; i++) { assert_false(spike_judge(&detector, even_norm((uint64_t)i))); }
    return detector;
}

// ---- What is not finite ---------------------------------------------------------------

// In vectors that are searched in one part and in several, with a part that is not full.
static void the_last_element_that_is_not_finite_is_found(void **state) {
    (void)state;
    static const struct {
        size_t begin, end, bad[2]; // counted from 1; 0: none
        double found;
    } cases[] = {
        {0, 10, {0, 0}, 0},
        {0, 10, {1, 0}, 1},
        {0, 10, {10, 3}, 10},
        {0, 2 * JOB_SEARCH + 5, {1, 0}, 1},
        {0, 2 * JOB_SEARCH + 5, {5, 6}, 6},
        {0, 2 * JOB_SEARCH + 5, {JOB_SEARCH, JOB_SEARCH + 1}, JOB_SEARCH + 1},
        {0, 2 * JOB_SEARCH + 5, {2 * JOB_SEARCH + 5, 7}, 2 * JOB_SEARCH + 5},
        {7, JOB_SEARCH + 9, {7, JOB_SEARCH + 10}, 0},
        {7, JOB_SEARCH + 9, {8, 7}, 8},
    };
    float *values = (float *)calloc(2 * JOB_SEARCH + 5, sizeof *values);
    Stream stream = {.name = "a test"};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (int k = 0; k < 2; k++) {
            if (cases[i].bad[k] > 0) { values[cases[i].bad[k] - 1] = k == 0 ? INFINITY : NAN; }
        }
        double found = job_last_bad_element(values, cases[i].begin, cases[i].end, &stream);
        if (found != cases[i].found) { fail_msg("case %zu: %g", i, found); }
        for (int k = 0; k < 2; k++) {
            if (cases[i].bad[k] > 0) { values[cases[i].bad[k] - 1] = 0; }
        }
    }
    free(values);
}

// A job looks at its buckets from the last to the first: what it found first stays, and all are
// summed.
static void the_last_of_all_buckets_is_named(void **state) {
    (void)state;
    float values[30] = {0};
    Stream stream = {.name = "a test"};
    Job job = {.bad_element = 0};
    values[3] = values[15] = values[17] = NAN;
    job_note_own(&job, 2.5, values, 20, 30, &stream);
    assert_true(job.bad_element == 0 && job.sent_square == 2.5);
    job_note_own(&job, NAN, values, 10, 20, &stream);
    assert_true(job.bad_element == 18);
    job_note_own(&job, NAN, values, 0, 10, &stream);
    assert_true(job.bad_element == 18 && isnan(job.sent_square));
}

// ---- The detector ---------------------------------------------------------------------

static void a_detector_finds_what_is_far_above_the_usual(void **state) {
    (void)state;
    SpikeDetector detector = learned_detector(6, 200);
    // of the logarithm: mean 0, deviation 0.2 / sqrt(3)
    assert_close(detector.mean, 0, 0.05, "mean");
    assert_close(sqrt(detector.variance), 0.1155, 0.03, "deviation");
    assert_true(spike_largest(&detector) > 1.5 && spike_largest(&detector) < 2.8);
    assert_true(spike_judge(&detector, 5));
    assert_false(spike_judge(&detector, 1));
    assert_false(spike_judge(&detector, 1e-9)); // small is no spike
}

static void a_detector_lets_all_pass_without_a_limit_or_while_it_warms_up(void **state) {
    (void)state;
    SpikeDetector off = {0, 0, 0, 0}, young = learned_detector(6, SPIKE_WARMUP - 1);
    for (int i = 0; i < 100; i++) { assert_false(spike_judge(&off, i < 50 ? 1 : 1e30)); }
    assert_true(off.learned == 0);
    assert_false(spike_judge(&young, 1e30));
}

// The twenty-first commit is the first that is judged.
static void a_detector_judges_after_twenty_commits(void **state) {
    (void)state;
    SpikeDetector young = learned_detector(6, 19), ready = learned_detector(6, 20);
    assert_false(spike_judge(&young, 1e30));
    assert_true(spike_judge(&ready, 1e30));
}

// However large a spike is, it is learned as if it were at the limit. Otherwise one spike
// would raise the limit so far that the next ones pass.
static void the_size_of_a_spike_is_not_learned(void **state) {
    (void)state;
    SpikeDetector small = learned_detector(6, 200), huge = small, at_the_limit = small;
    double largest = spike_largest(&small);
    assert_true(spike_judge(&small, 1.01 * largest));
    assert_true(spike_judge(&huge, 1e30));
    assert_false(spike_judge(&at_the_limit, largest));
    assert_memory_equal(&small, &at_the_limit, sizeof small);
    assert_memory_equal(&huge, &at_the_limit, sizeof huge);
    assert_true(spike_judge(&huge, 10 * largest));
}

// If a NaN or an infinity got into the mean and the variance, the detector would never
// find a spike again.
static void a_detector_stays_finite_whatever_it_is_given(void **state) {
    (void)state;
    SpikeDetector detector = learned_detector(6, 100), before = detector;
    assert_false(spike_judge(&detector, NAN));
    assert_false(spike_judge(&detector, 0));
    assert_memory_equal(&detector, &before, sizeof detector);
    assert_true(spike_judge(&detector, INFINITY));
    assert_true(isfinite(detector.mean) && isfinite(detector.variance));
    assert_true(spike_judge(&detector, 100));
}

// A level that is four times as high is refused at first and accepted later.
static void a_detector_accepts_a_new_level_after_a_while(void **state) {
    (void)state;
    SpikeDetector detector = learned_detector(6, 200);
    int refused = 0;
    while (spike_judge(&detector, 4 * even_norm((uint64_t)refused))) { assert_true(++refused < 100); }
    assert_true(refused > 1);
    for (int i = 0; i < 300; i++) { spike_judge(&detector, 4 * even_norm((uint64_t)i)); }
    assert_close(detector.mean, log(4), 0.1, "mean");
}

// ---- Rules ----------------------------------------------------------------------------

// The micro-batch that is a spike on rank 1: late enough for the detectors of commits and
// of inner steps to have warmed up.
enum { LATE = 70 };

static double scale_of_late; // what its gradient, or its loss, is multiplied by; 1: no spike
static bool late_in_loss;

static MicroBatchResult late_micro_batch(void *self, Stream *stream, uint64_t index, const void *weights,
                                         float *gradients, const Pace *pace) {
    const float *parameters = (const float *)weights;
    const TestProblem *problem = (const TestProblem *)self;
    size_t count = problem->spec->parameter_count;
    bool late = index == LATE && problem->rank == 1;
    pace_need(pace, count); // without announcing any: gradients change after the backward pass
    float *before = late && !late_in_loss ? copy_floats(gradients, count) : NULL;
    MicroBatchResult result = noisy_micro_batch(self, stream, index, parameters, gradients, NULL);
    for (size_t i = 0; before != NULL && i < count; i++) {
        gradients[i] = before[i] + (gradients[i] - before[i]) * (float)scale_of_late;
    }
    if (late && late_in_loss) { result.loss *= scale_of_late; }
    free(before);
    return result;
}

static RunSpec late_spec(const char *rule, SpikePolicy policy) {
    RunSpec spec = noisy_spec(rule, 301);
    spec.micro_batch = late_micro_batch;
    spec.settings.on_spike = policy;
    spec.settings.spike_limit = 8;
    spec.settings.gradient_clip = 0;
    spec.blind = true;
    spec.commits = 60;
    spec.settings.target = is_local(rule) ? 180 : 200;
    return spec;
}

static void expect_late(const char *rule, double scale, bool in_loss, SpikePolicy policy) {
    RunSpec spec = late_spec(rule, policy);
    RunResult results[2];
    scale_of_late = scale;
    late_in_loss = in_loss;
    if (!run_world(&spec, 2, results)) { return; }
    for (int rank = 0; rank < 2; rank++) {
        if (!have_rank(rank)) { continue; }
        const RunResult *result = &results[rank];
        if (!(result->spikes == (scale > 1 ? 1 : 0))) {
            fail_msg("%s: %g spikes at scale %g", rule, result->spikes, scale);
        }
        assert_true(result->failed == (scale > 1 && policy == SPIKE_STOP));
        if (scale > 1) { assert_int_equal(result->spike.kind, in_loss ? SPIKE_HIGH_LOSS : SPIKE_NORM); }
        if (scale > 1) { assert_int_equal(result->spike.rank, 1); }
        if (scale > 1 && !is_local(rule)) { // usual losses are far below 1, usual norms about 2
            double about = in_loss ? 0.25 : 8;
            assert_true(result->spike.largest > about / 2 && result->spike.largest < 2 * about);
            assert_true(result->spike.measured > (in_loss ? 20 : 1000));
        }
        if (!result->failed) { assert_true(result->gradients_done >= spec.settings.target); }
        double sent = sqrt(result->sent_square); // of the latest commit alone, about 15
        assert_true(scale > 1 || is_local(rule) || (sent > 5 && sent < 40));
    }
    expect_replicas_agree(2, results, rule);
    free_results(results, 2);
}

static void a_step_far_too_large_is_left_out_or_ends_the_run(void **state) {
    (void)state;
    if (process_transport->size > 2) { skip(); }
    for (int i = 0; i < RULE_COUNT; i++) {
        expect_late(RULES[i].rule->name, 1, false, SPIKE_SKIP);
        expect_late(RULES[i].rule->name, 1e3, false, SPIKE_SKIP);
        expect_late(RULES[i].rule->name, 1e3, true, SPIKE_SKIP);
        expect_late(RULES[i].rule->name, 1e3, i % 2 == 1, SPIKE_STOP);
    }
}

static MicroBatchResult hopeless_micro_batch(void *self, Stream *stream, uint64_t index, const void *weights,
                                             float *gradients, const Pace *pace) {
    const float *parameters = (const float *)weights;
    MicroBatchResult result = noisy_micro_batch(self, stream, index, parameters, gradients, pace);
    if (index >= 6) { result.loss = NAN; }
    return result;
}

// The good steps are over after the third: a commit, or an exchange after three inner
// steps. What is committed at the end is what they have made, bit for bit, and no state
// of an optimizer has changed since. Outer parameters still move by their momentum, as
// long as exchanges bring nothing; but the last exchange, which ends the run, is not
// applied.
static void expect_last_good(const RunSpec *spec, const RunResult *result) {
    bool local = is_local(spec->rule);
    const Look *last = &result->looks[result->last], *good = &result->looks[local ? 1 : 3];
    const Look *committed = local ? last - 1 : good;
    size_t owned = layout_shard(&result->owned);
    expect_same_floats(last->committed, committed->committed, spec->parameter_count, spec->rule,
                       result->last);
    expect_same_floats(last->momentum, committed->momentum, spec->parameter_count, spec->rule, result->last);
    expect_same_floats(last->first_moment, good->first_moment, owned, spec->rule, result->last);
    expect_same_floats(last->second_moment, good->second_moment, owned, spec->rule, result->last);
    for (size_t i = 0; i < spec->parameter_count; i++) { assert_true(isfinite(last->local[i])); }
    if (local) { return; }
    expect_same_floats(last->master, good->master, owned, spec->rule, result->last);
    assert_int_equal(result->last, 3 + 10);
    assert_int_equal(last->report.commit, 3);
    assert_true(result->spikes == 10 && result->gradients_done == 12);
}

// When every step is bad it is not the data. After ten in a row the run ends with what
// the good steps before them have made.
static void ten_bad_steps_in_a_row_end_the_run(void **state) {
    (void)state;
    if (process_transport->size > 2) { skip(); }
    for (int i = 0; i < RULE_COUNT; i++) {
        RunSpec spec = noisy_spec(RULES[i].rule->name, 301);
        spec.micro_batch = hopeless_micro_batch;
        spec.settings.on_spike = SPIKE_SKIP;
        spec.commits = 40;
        RunResult results[2];
        if (!run_world(&spec, 2, results)) { skip(); }
        for (int rank = 0; rank < 2; rank++) {
            if (!have_rank(rank)) { continue; }
            assert_true(results[rank].failed);
            expect_last_good(&spec, &results[rank]);
        }
        expect_replicas_agree(2, results, spec.rule);
        free_results(results, 2);
    }
}

// A step has two micro-batches. Nine bad steps, a good one, and so on.
static MicroBatchResult patient_micro_batch(void *self, Stream *stream, uint64_t index, const void *weights,
                                            float *gradients, const Pace *pace) {
    MicroBatchResult result = noisy_micro_batch(self, stream, index, weights, gradients, pace);
    if (index / 2 % SPIKE_PATIENCE != SPIKE_PATIENCE - 1) { result.loss = NAN; }
    return result;
}

// Only bad steps in a row end a run, however many there are: 36 of 40 here, on both
// ranks.
static void a_good_step_renews_the_patience(void **state) {
    (void)state;
    if (process_transport->size > 2) { skip(); }
    for (int i = 0; i < RULE_COUNT; i++) {
        RunSpec spec = noisy_spec(RULES[i].rule->name, 301);
        bool local = is_local(spec.rule);
        spec.micro_batch = patient_micro_batch;
        spec.settings.on_spike = SPIKE_SKIP;
        spec.settings.local.steps = is_streaming(spec.rule) ? 4 : 2;
        spec.commits = local ? 20 : 40;
        spec.finish = local; // so that all steps are exchanged
        spec.blind = true;
        RunResult results[2];
        if (!run_world(&spec, 2, results)) { skip(); }
        for (int rank = 0; rank < 2; rank++) {
            if (!have_rank(rank)) { continue; }
            if (results[rank].failed) { fail_msg("%s: failed", spec.rule); }
            expect_number(results[rank].spikes, local ? 72 : 36, 0, spec.rule, rank);
            expect_number(results[rank].gradients_done, local ? 160 : 16, 0, spec.rule, rank);
        }
        free_results(results, 2);
    }
}

// Steps that a worker has left out count among its tokens, and none of these is predicted.
static void a_worker_counts_for_the_steps_that_it_made(void **state) {
    (void)state;
    enum { MICRO_BATCHES = 3, TOKENS = 8 };
    const Scheduler s = {.settings = {.micro_batches = MICRO_BATCHES}, .problem = {.tokens = TOKENS}};
    for (int made = 0; made <= 4; made++) { // of four steps
        Tally tally = {.micro_batches = made * MICRO_BATCHES,
                       .predicted = made * MICRO_BATCHES * TOKENS,
                       .left_out = 4 - made};
        assert_true(worker_weight(&s, &tally) == (float)made / 4);
    }
}

// What detectors have learned are the norms and the losses of all commits, each once, in
// their order; no estimates. In local rules those of all inner steps.
static void detectors_learn_every_commit_once(void **state) {
    (void)state;
    if (process_transport->size > 2) { skip(); }
    for (int i = 0; i < RULE_COUNT; i++) {
        RunSpec spec = noisy_spec(RULES[i].rule->name, 301);
        spec.settings.spike_limit = 100;
        spec.commits = 8;
        spec.finish = false;
        RunResult results[2];
        if (!run_world(&spec, 2, results)) { skip(); }
        for (int rank = 0; rank < 2; rank++) {
            if (!have_rank(rank)) { continue; }
            const RunResult *result = &results[rank];
            if (is_local(spec.rule)) {
                assert_true(result->norms.learned == 24 && result->losses.learned == 24);
                continue;
            }
            SpikeDetector norms = {100, 0, 0, 0}, losses = norms;
            for (int look = 1; look <= result->last; look++) {
                spike_judge(&norms, result->looks[look].report.gradient_norm);
                spike_judge(&losses, result->looks[look].report.loss);
            }
            if (result->norms.learned != 8) { fail_msg("%s: %g norms", spec.rule, result->norms.learned); }
            assert_memory_equal(&result->norms, &norms, sizeof norms);
            assert_memory_equal(&result->losses, &losses, sizeof losses);
        }
        free_results(results, 2);
    }
}

// Ranks may contribute different numbers of micro-batches: the one whose mean is the
// largest is named, not the one whose sum is. A rank that has predicted nothing has no
// mean loss.
static void the_rank_with_the_largest_mean_is_named(void **state) {
    (void)state;
    Transport transport;
    Tally tallies[3];
    memset(&transport, 0, sizeof transport);
    memset(tallies, 0, sizeof tallies);
    static const double micro_batches[] = {6, 2, 3}, predicted[] = {60, 20, 0}, losses[] = {180, 80, 0},
                        norms[] = {6, 4, 0}; // of means: 1, 2, and none
    for (int rank = 0; rank < 3; rank++) {
        tallies[rank].micro_batches = micro_batches[rank];
        tallies[rank].predicted = predicted[rank];
        tallies[rank].loss = losses[rank];
        tallies[rank].sent_square = norms[rank] * norms[rank];
    }
    Scheduler *s = (Scheduler *)calloc(1, sizeof *s);
    transport.size = 3;
    s->transport = &transport;
    s->tallies = tallies;
    s->problem.tokens = 10;
    assert_int_equal(job_largest_rank(s, SPIKE_NORM), 1);
    assert_int_equal(job_largest_rank(s, SPIKE_HIGH_LOSS), 1);
    // A loss that is not finite is worse than such a gradient, and this than steps left out.
    tallies[0].left_out = tallies[1].site.element = tallies[2].not_finite = 1;
    for (int worst = 2; worst >= -1; worst--) {
        job_add_tallies(s, &s->job);
        assert_int_equal(s->job.first_bad_rank, worst);
        assert_true(s->job.site.element == (worst == 1 ? 1 : 0));
        *(worst == 2 ? &tallies[2].not_finite : &tallies[1].site.element) = 0;
        if (worst == 0) { tallies[0].left_out = 0; }
    }
    tallies[1].not_finite = tallies[2].not_finite = 1; // of ranks that are as bad the lowest one
    job_add_tallies(s, &s->job);
    assert_int_equal(s->job.first_bad_rank, 1);
    free(s);
}

// What was computed but not committed before a rollback is in no later report: the first
// one is about as many micro-batches as the first one of the run.
static void a_rollback_forgets_what_was_under_way(void **state) {
    (void)state;
    if (process_transport->size > 2) { skip(); }
    for (int i = 0; i < RULE_COUNT; i++) {
        RunSpec spec = noisy_spec(RULES[i].rule->name, 301);
        Poison poison = {9, true, false, NAN, 0};
        spec.poison = poison;
        spec.settings.on_spike = SPIKE_ROLLBACK;
        spec.commits = 12;
        spec.finish = false;
        RunResult results[2];
        if (!run_world(&spec, 2, results)) { skip(); }
        for (int rank = 0; rank < 2; rank++) {
            if (!have_rank(rank)) { continue; }
            const Look *looks = results[rank].looks;
            int first = 1, spike = 1, after;
            while (looks[first].reports == 0) { first++; }
            for (spike = first + 1; looks[spike].reports > looks[spike - 1].reports;) { spike++; }
            for (after = spike + 1; looks[after].reports == looks[spike].reports;) { after++; }
            assert_true(after <= results[rank].last && results[rank].spikes == 1);
            double expected = looks[first].report.micro_batches;
            expect_number(looks[after].report.micro_batches, expected, 0, spec.rule, rank);
            expect_number(looks[after].report.predicted, expected, 0, spec.rule, rank);
        }
        free_results(results, 2);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_last_element_that_is_not_finite_is_found),
        cmocka_unit_test(the_last_of_all_buckets_is_named),
        cmocka_unit_test(a_detector_finds_what_is_far_above_the_usual),
        cmocka_unit_test(a_detector_lets_all_pass_without_a_limit_or_while_it_warms_up),
        cmocka_unit_test(a_detector_judges_after_twenty_commits),
        cmocka_unit_test(the_size_of_a_spike_is_not_learned),
        cmocka_unit_test(a_detector_stays_finite_whatever_it_is_given),
        cmocka_unit_test(a_detector_accepts_a_new_level_after_a_while),
        cmocka_unit_test(a_step_far_too_large_is_left_out_or_ends_the_run),
        cmocka_unit_test(ten_bad_steps_in_a_row_end_the_run),
        cmocka_unit_test(a_good_step_renews_the_patience),
        cmocka_unit_test(a_worker_counts_for_the_steps_that_it_made),
        cmocka_unit_test(detectors_learn_every_commit_once),
        cmocka_unit_test(the_rank_with_the_largest_mean_is_named),
        cmocka_unit_test(a_rollback_forgets_what_was_under_way),
    };
    return run_rules_tests(tests, sizeof tests / sizeof tests[0]);
}
