// test_spike.c: which losses and gradients are spikes, and what each rule does about one.
//
// Here spikes are finite, but far too large. Values that are not finite, and whom the
// message names, are in test_schedule.c. That a run which leaves spikes out ends in the
// same bits as a plain loop which leaves them out is in test_rules.c.
#include "test/rules_bench.h"

// A usual gradient norm: its logarithm is uniform in [-0.2, 0.2).
static double even_norm(uint64_t i) { return exp(0.2 * (double)noise(7, i)); }

static SpikeDetector learned_detector(double limit, int count) {
    SpikeDetector detector = {limit, 0, 0, 0};
    for (int i = 0; i < count; i++) { assert_false(spike_judge(&detector, even_norm((uint64_t)i))); }
    return detector;
}

// ---------------------------------------------------------------------------------------
// The detector

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

// ---------------------------------------------------------------------------------------
// Rules

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
        if (!result->failed) { assert_true(result->gradients_done >= spec.settings.target); }
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

// When every step is bad it is not the data. After ten in a row the run ends, and what is
// committed is finite.
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
            const RunResult *result = &results[rank];
            assert_true(result->failed);
            assert_true(result->spikes >= (is_local(spec.rule) ? 1 : SPIKE_PATIENCE));
            for (size_t j = 0; j < spec.parameter_count; j++) {
                assert_true(isfinite(result->looks[result->last].committed[j]));
            }
        }
        expect_replicas_agree(2, results, spec.rule);
        free_results(results, 2);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_detector_finds_what_is_far_above_the_usual),
        cmocka_unit_test(a_detector_lets_all_pass_without_a_limit_or_while_it_warms_up),
        cmocka_unit_test(a_detector_stays_finite_whatever_it_is_given),
        cmocka_unit_test(a_detector_accepts_a_new_level_after_a_while),
        cmocka_unit_test(a_step_far_too_large_is_left_out_or_ends_the_run),
        cmocka_unit_test(ten_bad_steps_in_a_row_end_the_run),
    };
    return run_rules_tests(tests, sizeof tests / sizeof tests[0]);
}
