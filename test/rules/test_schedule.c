// test_schedule.c: how the scheduler carries the update rules out.
//
//   - overlap, delays, buckets and messages of any size change no bit
//   - reports hold the right losses, counts and rates
//   - each rule sends as many bytes as its formula says
//   - each rule hides as much communication as it promises
//   - with --accumulate auto, workers of different speed still agree in everything
//   - a value that is not finite stops all ranks before anything is stepped with it
//
// What the rules compute is tested in test_rules.c.
#include "test/rule_cases.h"
#include "test/rules/rules_bench.h"

// ---- The same bits --------------------------------------------------------------------

// Compares a run that waits after every operation with one that overlaps, and with one
// that overlaps, has small buckets and messages, and random delays everywhere. Returns
// false where run_world cannot run.
static bool expect_any_order(const char *rule, WireFormat wire, int ranks) {
    static const size_t counts[] = {103, 12007, 5003, 1003};
    RunSpec off = noisy_spec(rule, counts[ranks - 1]);
    off.commits = 3;
    off.settings.overlap = false;
    set_wire(&off, wire);
    RunResult results[MAX_RANKS];
    if (!run_world(&off, ranks, results)) { return false; }
    expect_replicas_agree(ranks, results, describe(&off, ranks));
    RunSpec on = off, small = restless(&off, 0), wild = restless(&off, 5e-4);
    on.settings.overlap = true;
    expect_same_run(&on, ranks, results);
    if (ranks == 2) { expect_same_run(&small, ranks, results); }
    expect_same_run(&wild, ranks, results);
    free_results(results, ranks);
    return true;
}

static void overlap_and_delays_change_no_bit(void **state) {
    (void)state;
    bool fits = false;
    for (int rule = 0; rule < RULE_COUNT; rule++) {
        for (int ranks = 1; ranks <= 4; ranks++) {
            for (int wire = 0; wire < WIRE_FORMAT_COUNT; wire++) {
                fits = expect_any_order(RULES[rule].rule->name, (WireFormat)wire, ranks) || fits;
            }
        }
    }
    if (!fits) { skip(); }
}

// Buckets of one cell, of a few cells, of all but one, of more than there are; and
// messages of several sizes.
static bool expect_any_bucket(const char *rule, WireFormat wire, int ranks) {
    RunSpec whole = noisy_spec(rule, 3001);
    whole.commits = 3;
    set_wire(&whole, wire);
    Layout layout = layout_make(3001, ranks);
    size_t cell = layout.piece * (size_t)ranks * sizeof(float);
    const size_t buckets[] = {1, 2 * cell + cell / 2, 5 * cell, (layout.cells - 1) * cell, (size_t)1 << 40},
                 messages[] = {256, 512, 0};
    RunResult results[MAX_RANKS];
    if (!run_world(&whole, ranks, results)) { return false; }
    for (int i = 0; i < 5; i++) {
        RunSpec cut = whole;
        cut.settings.bucket_bytes = buckets[i];
        cut.message = messages[i % 3];
        cut.parts = 1 + i;
        expect_same_run(&cut, ranks, results);
    }
    free_results(results, ranks);
    return true;
}

static void buckets_and_messages_change_no_bit(void **state) {
    (void)state;
    static const char *const rules[] = {"ddp", "zero1"};
    bool fits = false;
    for (int i = 0; i < 2 * WIRE_FORMAT_COUNT; i++) {
        for (int ranks = 1; ranks <= 4; ranks++) {
            fits = expect_any_bucket(rules[i % 2], (WireFormat)(i / 2), ranks) || fits;
        }
    }
    if (!fits) { skip(); }
}

// Pieces of 512 elements in messages of 256, and several messages in a bucket: one rule
// of each kind, each on a wire of its own. Then pieces of 768 in messages of at most 512:
// two equal parts of them would cut a block of the coarse wires.
static void long_pieces_travel_in_several_messages(void **state) {
    (void)state;
    static const char *const rules[] = {"zero1", "acco", "diloco"};
    for (int i = 0; i < 6; i++) {
        RunSpec whole = noisy_spec(rules[i % 3], i < 3 ? 70001 : 190003);
        whole.commits = 2;
        set_wire(&whole, (WireFormat)(WIRE_BF16 + i % 3));
        RunSpec cut = restless(&whole, 0);
        assert_true(layout_make(whole.parameter_count, 2).piece == (i < 3 ? 512 : 768));
        if (i >= 3) { cut.message = 512; }
        if (!compare_runs(&whole, &cut, 2)) { skip(); }
    }
}

// The link is so slow that an exchange takes as long as a pass. So parameters really
// arrive during the forward pass, and gradients leave during the backward pass.
static void keeping_pace_changes_no_bit(void **state) {
    (void)state;
    static const char *const rules[] = {"ddp", "zero1"};
    for (int i = 0; i < 2 * WIRE_FORMAT_COUNT; i++) {
        RunSpec at_once = noisy_spec(rules[i % 2], 5003);
        at_once.commits = 4;
        set_wire(&at_once, (WireFormat)(i / 2));
        RunSpec paced = restless(&at_once, 0);
        paced.pause_seconds = 1e-3;
        paced.link_bytes_per_second =
            5003 / 2 * (double)wire_bytes(at_once.settings.wire, WIRE_BLOCK) / WIRE_BLOCK / 5e-3;
        if (!compare_runs(&at_once, &paced, 2)) { skip(); }
    }
}

// ---- What a commit reports ------------------------------------------------------------

// Micro-batches [begin, end) of a rank.
typedef struct Stretch {
    uint64_t begin, end;
} Stretch;

static Stretch stretch_of(int begin, int end) {
    Stretch stretch = {(uint64_t)begin, (uint64_t)end};
    return stretch;
}

// Which micro-batches of a rank the report of a look is about. Rules whose workers step
// together report what they have just committed. co2 reports what it sent a round ago.
// Streaming DiLoCo and SparseLoCo report what they had trained when they sent: all up to
// `delay` steps before the look.
static Stretch reported(const RunSpec *spec, int rank, int look) {
    const SchedulerSettings *settings = &spec->settings;
    int size = spec->micro_batches[rank], period = settings->local.steps * size;
    if (!is_local(spec->rule)) { return stretch_of((look - 1) * size, look * size); }
    if (strcmp(spec->rule, "co2") == 0) {
        return look < 2 ? stretch_of(0, 0) : stretch_of((look - 2) * period, (look - 1) * period);
    }
    if (!is_streaming(spec->rule) && !is_sparse(spec->rule)) {
        return stretch_of((look - 1) * period, look * period);
    }
    int interval = period / settings->local.fragments, late = settings->local.delay * size;
    return stretch_of((look - 1) * interval - (look > 1 ? late : 0), look * interval - late);
}

// The report of a look at a run of two ranks: losses are means over predicted tokens, and
// the commit that it names is the last one whose losses are in it.
static CommitReport graded_report(const RunSpec *spec, int look) {
    CommitReport sum;
    memset(&sum, 0, sizeof sum);
    for (int rank = 0; rank < 2; rank++) {
        Stretch stretch = reported(spec, rank, look);
        for (uint64_t index = stretch.begin; index < stretch.end; index++) {
            MicroBatchResult one = graded_result(rank, index);
            sum.micro_batches += 1;
            sum.predicted += one.predicted;
            sum.loss += one.loss * one.predicted;
            sum.perfect_loss += one.perfect_loss * one.predicted;
        }
        sum.gradients_done += (double)stretch.end;
        sum.commit = (int64_t)stretch.end / spec->micro_batches[rank];
    }
    sum.loss /= sum.predicted;
    sum.perfect_loss /= sum.predicted;
    return sum;
}

static void expect_report(const CommitReport *report, const CommitReport *expected, int look) {
    expect_number(report->loss, expected->loss, 1e-12, "loss", look);
    expect_number(report->perfect_loss, expected->perfect_loss, 1e-12, "loss of a perfect model", look);
    expect_number(report->micro_batches, expected->micro_batches, 0, "micro-batches", look);
    expect_number(report->predicted, expected->predicted, 0, "predicted tokens", look);
    expect_number(report->gradients_done, expected->gradients_done, 0, "gradients committed", look);
    expect_number((double)report->commit, (double)expected->commit, 0, "commit", look);
}

// Ranks contribute 2 and 3 micro-batches to a commit, under local rules 2 each. Some of
// them predict nothing, and must not count as a loss of 0.
static void reports_hold_the_means_of_what_the_problem_returned(void **state) {
    (void)state;
    for (int rule = 0; rule < RULE_COUNT; rule++) {
        RunSpec spec = noisy_spec(RULES[rule].rule->name, 103);
        spec.micro_batch = graded_micro_batch;
        spec.micro_batches[0] = 2;
        spec.micro_batches[1] = is_local(spec.rule) ? 2 : 3;
        spec.finish = strcmp(spec.rule, "co2") == 0;
        RunResult results[2];
        if (!run_world(&spec, 2, results)) { skip(); }
        for (int look = 1; look <= results[first_rank()].last; look++) {
            CommitReport expected = graded_report(&spec, look);
            for (int rank = 0; rank < 2 && expected.micro_batches > 0; rank++) {
                if (have_rank(rank)) { expect_report(&results[rank].looks[look].report, &expected, look); }
            }
        }
        free_results(results, 2);
    }
}

// The reported learning rate is that of the schedule, and it is the one that was used:
// with SGD on f = theta^2 / 2 a commit multiplies theta by 1 - rate. Local rules take one
// inner step a period here, and their outer step takes over the mean of the workers'
// steps.
static void the_rate_follows_gradients_or_commits(void **state) {
    (void)state;
    static const double by_gradients[] = {0, 0.1, 0.2, 0.3, 0.3, 0.3},
                        by_commits[] = {0, 0.06, 0.12, 0.18, 0.24, 0.3};
    for (int i = 0; i < 2 * RULE_COUNT; i++) {
        const Rule *rule = RULES[i / 2].rule;
        RunSpec spec = noisy_spec(rule->name, 1); // four gradients per commit
        spec.settings.optimizer.elementwise_step = sgd_step;
        spec.micro_batch = quadratic_micro_batch;
        spec.settings.gradient_clip = 0;
        spec.settings.rate.peak = 0.3;
        spec.settings.rate_by_commits = i % 2 == 1;
        spec.settings.rate.step = spec.settings.rate_by_commits ? 1 : 4;
        spec.settings.rate.warmup = spec.settings.rate_by_commits ? 5 : 12;
        spec.settings.local.steps = spec.settings.local.fragments = 1;
        spec.settings.local.delay = 0;
        NesterovStep outer = {.learning_rate = 1};
        spec.settings.local.outer_nesterov = outer;
        spec.finish = false;
        RunResult results[2];
        if (!run_world(&spec, 2, results)) { skip(); }
        for (int commit = 1; commit <= spec.commits; commit++) {
            double rate = spec.settings.rate_by_commits ? by_commits[commit] : by_gradients[commit];
            const Look *look = &results[first_rank()].looks[commit];
            double before = (double)look[-1].committed[0], after = (double)look->committed[0];
            if (rule->kind != RULE_LOCAL) { assert_close(look->report.learning_rate, rate, 1e-12, "rate"); }
            bool at_once =
                rule->kind == RULE_SYNCHRONOUS ||
                (rule->kind == RULE_LOCAL && strcmp(rule->name, "co2") != 0 && !is_sparse(rule->name));
            if (at_once) { assert_close(after, before * (1 - rate), 1e-6 * before, "theta"); }
        }
        free_results(results, 2);
    }
}

// ---- Traffic --------------------------------------------------------------------------

// A gradient of ones: nothing but the exchange takes time.
static MicroBatchResult light_micro_batch(void *self, Stream *stream, uint64_t index, const void *weights,
                                          float *gradients, const Pace *pace) {
    const float *parameters = (const float *)weights;
    (void)stream, (void)index;
    const TestProblem *problem = (const TestProblem *)self;
    pace_need(pace, problem->spec->parameter_count);
    for (size_t i = 0; i < problem->spec->parameter_count; i++) { gradients[i] += 1; }
    MicroBatchResult result = {parameters[0], 0.0, 1};
    return result;
}

// Bytes of an element on a wire: in coarse formats 256 have a scale of 4 bytes, in int4 32 have
// one of 2.
static const double WIRE_ELEMENT_BYTES[WIRE_FORMAT_COUNT] = {4, 2, 1 + 4.0 / 256, 0.5 + 2.0 / 32,
                                                             0.5 + 4.0 / 256};

// Returns false where run_world cannot run.
static bool expect_traffic(const RuleCase *row, WireFormat wire, WireFormat estimate_wire, int ranks) {
    // The vector and its halves are whole cells for 2, 3 and 4 ranks, and in coarse
    // formats whole blocks, so nothing is padded.
    size_t count = wire_is_coarse(wire) || wire_is_coarse(estimate_wire) ? 393216 : 49152;
    RunSpec spec = noisy_spec(row->name, count);
    spec.settings.optimizer.elementwise_step = sgd_step;
    spec.micro_batch = light_micro_batch;
    for (int i = 0; i < ranks; i++) { spec.micro_batches[i] = is_acco(spec.rule) ? 2 : 1; }
    spec.settings.local.steps = is_streaming(row->name) ? 4 : 2;
    spec.layer_count = 2;
    for (size_t l = 0; l <= 2; l++) { spec.layer_begins[l] = l * count / 2; }
    spec.settings.wire = wire;
    spec.settings.estimate_wire = estimate_wire;
    spec.commits = 2;
    spec.finish = false;
    spec.blind = true;
    RunResult results[MAX_RANKS];
    if (!run_world(&spec, ranks, results)) { return false; }
    double others = ranks - 1, f = others / ranks;
    double element =
        row->exchanges * WIRE_ELEMENT_BYTES[wire] + row->estimates * WIRE_ELEMENT_BYTES[estimate_wire];
    double expected = 2 * f * element * (double)count +
                      row->blocks * others * (double)(sparse_blocks(count) * sizeof(SparseBlock));
    for (int rank = 0; rank < ranks; rank++) {
        if (!have_rank(rank)) { continue; }
        double bytes = (double)results[rank].bytes_sent - row->jobs * others * (double)sizeof(Tally);
        if (!(fabs(bytes - expected) <= 0.01 * expected)) {
            fail_msg("%s: %.0f bytes, expected %.0f", describe(&spec, ranks), bytes, expected);
        }
    }
    free_results(results, ranks);
    return true;
}

static void every_rule_sends_as_much_as_its_formula_says(void **state) {
    (void)state;
    bool fits = false;
    assert_int_equal(RULES_TESTED, RULE_COUNT);
    for (int i = 0; i < RULES_TESTED; i++) {
        for (int ranks = 2; ranks <= 4; ranks++) {
            for (int wire = 0; wire < WIRE_FORMAT_COUNT; wire++) {
                fits = expect_traffic(&rule_cases[i], (WireFormat)wire, (WireFormat)wire, ranks) || fits;
            }
            if (rule_cases[i].estimates > 0) {
                fits = expect_traffic(&rule_cases[i], WIRE_BF16, WIRE_E3M0, ranks) || fits;
            }
        }
    }
    if (!fits) { skip(); }
}

// An evaluation between commits needs the committed parameters on every rank. Only where
// compute uses predictions must they be sent: an all-gather of the masters in fp32. The
// first evaluation is free, because nothing has been predicted yet.
static void only_acco_wp_sends_bytes_for_an_evaluation(void **state) {
    (void)state;
    for (int rule = 0; rule < RULE_COUNT; rule++) {
        RunSpec looking = noisy_spec(RULES[rule].rule->name, 4096), blind = looking;
        blind.blind = true;
        RunResult a[2], b[2];
        if (!run_world(&looking, 2, a) || !run_world(&blind, 2, b)) { skip(); }
        uint64_t looks = strcmp(RULES[rule].rule->name, "acco-wp") == 0 ? (uint64_t)looking.commits : 0;
        assert_int_equal(a[first_rank()].bytes_sent - b[first_rank()].bytes_sent,
                         looks * 4096 / 2 * sizeof(float));
        free_results(a, 2);
        free_results(b, 2);
    }
}

// ---------------------------------------------------------------------------------------
// What is hidden. Other programs may disturb a measurement of time, so margins are wide,
// and one good measurement of three is enough.

enum { TRIES = 3 };

static void expect_reported_seconds(const RunSpec *spec, const RunResult *result) {
    for (int look = 1; look <= result->last; look++) {
        const CommitReport *report = &result->looks[look].report;
        if (result->looks[look].reports == 0) { continue; } // no job has reported yet
        assert_true(report->seconds.communication > 0);
        assert_true(report->seconds.exposed >= 0 && report->seconds.exposed <= report->seconds.communication);
    }
    // The last round may be in no report; under streaming DiLoCo much more may be
    // missing.
    double worked = spec->work_seconds * (double)result->micro_batches;
    assert_true(sum_seconds(result).compute >= 0.6 * worked || is_streaming(spec->rule));
}

// Runs `spec` on two ranks, a few times if need be, until the exposed part of the
// communication lies in [least, most]. All ranks decide by rank 0's report, alike.
static void expect_exposed(const RunSpec *spec, double least, double most) {
    Seconds seconds = {0, 0, 0};
    for (int i = 0; i < TRIES; i++) {
        RunResult results[2];
        if (!run_world(spec, 2, results)) { skip(); }
        expect_reported_seconds(spec, &results[first_rank()]);
        seconds = results[first_rank()].seconds;
        free_results(results, 2);
        if (seconds.exposed <= most * seconds.communication &&
            seconds.exposed >= least * seconds.communication) {
            return;
        }
    }
    fail_msg("%s: %.4f s exposed of %.4f s", describe(spec, 2), seconds.exposed, seconds.communication);
}

// Both micro-batches and the operations of a job take milliseconds; with --overlap off
// nothing is hidden.
static void without_overlap_all_communication_is_exposed(void **state) {
    (void)state;
    for (int rule = 0; rule < RULE_COUNT; rule++) {
        RunSpec spec = noisy_spec(RULES[rule].rule->name, 103);
        spec.work_seconds = 4e-3;
        spec.chaos_seconds = 4e-3;
        spec.settings.overlap = false;
        spec.settings.local.steps = spec.settings.local.fragments * 2;
        expect_exposed(&spec, 1 - 1e-6, 1);
    }
}

// Makes the link so slow that `passes` of an exchange of the whole vector in fp32 between
// two ranks take `seconds`. A reduce-scatter is one pass, and so is an all-gather.
static void set_link(RunSpec *spec, double passes, double seconds) {
    spec->link_bytes_per_second = passes * (double)spec->parameter_count / 2 * sizeof(float) / seconds;
}

static RunSpec slow_spec(const char *rule, double work_seconds) {
    RunSpec spec = noisy_spec(rule, 20000);
    spec.blind = true;
    spec.finish = false;
    spec.commits = 4;
    spec.work_seconds = work_seconds;
    for (int rank = 0; rank < 2; rank++) { spec.micro_batches[rank] = is_acco(rule) ? 2 : 1; }
    spec.settings.local.steps = spec.settings.local.fragments * 2;
    return spec;
}

// A round computes for three times as long as its job takes, so the job is hidden, up to
// the margin. Streaming DiLoCo sends half of the vector at a time.
static void overlapped_rules_hide_a_job_that_is_shorter_than_a_round(void **state) {
    (void)state;
    static const char *const rules[] = {"dpu", "acco-wp", "acco", "co2", "streaming-diloco", "sparse-loco"};
    for (int i = 0; i < 6; i++) {
        RunSpec spec = slow_spec(rules[i], 60e-3);
        set_link(&spec, is_streaming(rules[i]) ? 1 : 2, 20e-3);
        if (is_sparse(rules[i])) {
            spec.link_bytes_per_second = (double)(sparse_blocks(20000) * sizeof(SparseBlock)) / 20e-3;
        }
        expect_exposed(&spec, 0, 0.4);
    }
}

// With a single bucket nothing leaves before the backward pass has ended, and the next
// forward pass waits for all parameters. With several buckets, and passes that keep pace,
// most of both is hidden: compute takes three times as long as the exchange.
static void buckets_hide_what_a_single_one_cannot(void **state) {
    (void)state;
    static const char *const rules[] = {"ddp", "zero1"};
    for (int i = 0; i < 2; i++) {
        RunSpec spec = slow_spec(rules[i], 90e-3);
        set_link(&spec, 2, 30e-3);
        expect_exposed(&spec, 0.9, 1);
        spec.parts = 6;
        spec.settings.bucket_bytes = 20000 * sizeof(float) / 12;
        expect_exposed(&spec, 0, 0.7);
    }
}

// DiLoCo waits for its exchange, however long its steps take.
static void diloco_hides_nothing(void **state) {
    (void)state;
    RunSpec spec = slow_spec("diloco", 5e-3);
    set_link(&spec, 2, 20e-3);
    expect_exposed(&spec, 0.99, 1);
}

// The seconds of all reports, and those not yet reported, add up to the seconds of all
// spans.
static void reports_count_every_span_once(void **state) {
    (void)state;
    for (int rule = 0; rule < RULE_COUNT; rule++) {
        RunSpec spec = noisy_spec(RULES[rule].rule->name, 3001);
        spec.counts_spans = true;
        spec.pause_seconds = 1e-3;
        RunSpec wild = restless(&spec, 1e-3);
        RunResult results[2];
        if (!run_world(&wild, 2, results)) { skip(); }
        for (int rank = 0; rank < 2; rank++) {
            if (!have_rank(rank)) { continue; }
            const RunResult *result = &results[rank];
            const TraceSums *kept = &result->kept, *rest = &result->unreported;
            Seconds sum = sum_seconds(result);
            assert_true(kept->exposed > 0 && kept->compute > 0);
            assert_close(sum.compute + rest->compute, kept->compute, 1e-9, spec.rule);
            assert_close(sum.communication + rest->communication, kept->communication, 1e-9, spec.rule);
            assert_close(sum.exposed + rest->exposed, kept->exposed, 1e-9, spec.rule);
        }
        free_results(results, 2);
    }
}

// ---- Workers of different speed -------------------------------------------------------

static const char *const ADAPTIVE_RULES[] = {"acco", "dpu", "acco-wp"};

static RunSpec adaptive_spec(const char *rule) {
    RunSpec spec = noisy_spec(rule, 2003);
    spec.settings.adaptive = true;
    for (int rank = 0; rank < 2; rank++) { spec.micro_batches[rank] = is_acco(rule) ? 2 : 1; }
    return spec;
}

// With an adaptive schedule rank 0 computes many more micro-batches than the slow rank 1.
static void adaptive_workers_differ_in_count_and_agree_in_everything_else(void **state) {
    (void)state;
    for (int i = 0; i < 3; i++) {
        RunSpec spec = adaptive_spec(ADAPTIVE_RULES[i]);
        spec.slow_seconds = 20e-3;
        spec.settings.gradient_clip = 0;
        RunResult results[2];
        if (!run_world(&spec, 2, results)) { skip(); }
        expect_replicas_agree(2, results, describe(&spec, 2)); // also in the number of gradients
        uint64_t least = (uint64_t)(1 + (1 + rule_find(ADAPTIVE_RULES[i])->further_rounds) * spec.commits);
        for (int rank = 0; rank < 2; rank++) {
            if (!have_rank(rank)) { continue; }
            assert_int_equal(results[rank].looks[spec.commits].report.commit, spec.commits);
            assert_true(results[rank].micro_batches >= least);
            if (rank == 0) { assert_true(results[0].micro_batches > least + 6); }
        }
        free_results(results, 2);
    }
}

// An exchange of about a second hides thousands of these micro-batches, the run wants 40: no round
// may have more than are left.
static void a_slow_exchange_does_not_prolong_an_adaptive_run(void **state) {
    (void)state;
    for (int i = 0; i < 3; i++) {
        RunSpec spec = adaptive_spec(ADAPTIVE_RULES[i]);
        spec.settings.target = 40;
        spec.link_bytes_per_second = 20e3;
        RunResult results[2];
        if (!run_world(&spec, 2, results)) { skip(); }
        for (int rank = 0; rank < 2; rank++) {
            if (!have_rank(rank)) { continue; }
            if (!(results[rank].gradients_done >= 40 && results[rank].micro_batches <= 2 * 40)) {
                fail_msg("%s: %g gradients, %llu micro-batches of rank %d", ADAPTIVE_RULES[i],
                         results[rank].gradients_done, (unsigned long long)results[rank].micro_batches, rank);
            }
        }
        free_results(results, 2);
    }
}

// ---- Values that are not finite -------------------------------------------------------

// In which commit a bad micro-batch is found. A round, or an inner step, has two
// micro-batches; acco's rounds have one each. Rules whose workers step together find it
// in the job of its sum, local rules in the next exchange, whose result co2 takes a round
// later. What is still to be committed at the end of a run is found there.
typedef struct BadRow {
    const char *rule;
    uint64_t index; // of the bad micro-batch
    int look;       // after the commit that finds it
} BadRow;

static const BadRow BAD[] = {
    {"ddp", 5, 3},
    {"zero1", 5, 3},
    {"dpu", 5, 3},
    {"dpu", 7, 4},
    {"acco-wp", 5, 3},
    {"acco", 4, 3},
    {"acco", 5, 3},
    {"co2", 5, 2},
    {"co2", 7, 3},
    {"diloco", 5, 1},
    {"diloco", 6, 2},
    {"streaming-diloco", 1, 1},
    {"streaming-diloco", 3, 2},
    {"streaming-diloco", 5, 2},
    {"streaming-diloco", 7, 3},
    {"dpu", 11, 6},
    {"acco-wp", 11, 6},
    {"co2", 25, 6},
    {"streaming-diloco", 19, 6},
    {"sparse-loco", 1, 1},
    {"sparse-loco", 3, 1}, // the last before the sending, two of three steps
    {"sparse-loco", 5, 2},
    {"sparse-loco", 29, 6},
};

// No step was made with the bad value: what all ranks share is as before, and all numbers
// of this rank are finite.
static void expect_nothing_stepped(const RunSpec *spec, const RunResult *result, const char *what) {
    const Look *last = &result->looks[result->last], *before = last - 1;
    size_t owned = is_local(spec->rule) ? 0 : layout_shard(&result->owned);
    // On a coarse wire, parameters may still come closer to the master. On any narrow
    // wire acco-wp ends with rounded parameters, and the look before showed the masters.
    bool same = is_local(spec->rule) || spec->settings.wire == WIRE_FP32 ||
                (!wire_is_coarse(spec->settings.wire) && strcmp(spec->rule, "acco-wp") != 0);
    if (same) {
        expect_same_floats(last->committed, before->committed, spec->parameter_count, what, result->last);
    }
    expect_same_floats(last->momentum, before->momentum, spec->parameter_count, what, result->last);
    expect_same_floats(last->master, before->master, owned, what, result->last);
    expect_same_floats(last->first_moment, before->first_moment, owned, what, result->last);
    expect_same_floats(last->second_moment, before->second_moment, owned, what, result->last);
    for (size_t i = 0; i < spec->parameter_count; i++) {
        assert_true(isfinite(last->committed[i]) && isfinite(last->local[i]));
        if (is_local(spec->rule)) {
            assert_true(isfinite(last->first_moment[i]) && isfinite(last->second_moment[i]));
        }
    }
}

// The report names the kind of spike, the rank, and the micro-batch or the element.
static void expect_site(const Poison *poison, const RunSpec *spec, const SpikeReport *spike,
                        const char *what) {
    expect_number(spike->kind, poison->in_loss ? SPIKE_LOSS : SPIKE_GRADIENT, 0, what, 0);
    expect_number(spike->rank, 1, 0, what, 1);
    expect_number(spike->site.micro_batch, poison->in_loss ? (double)poison->index + 1 : 0, 0, what, 2);
    double element = (double)(spec->parameter_count / 2 + 1);
    if (poison->in_gradient) { expect_number(spike->site.element, element, 0, what, 3); }
}

static void expect_stop(const BadRow *row, const Poison *poison, WireFormat wire, int ranks) {
    RunSpec spec = noisy_spec(row->rule, 1003);
    char what[300];
    set_wire(&spec, wire);
    spec.poison = *poison;
    spec.poison.index = row->index;
    if (is_streaming(row->rule)) { spec.settings.local.steps = 4; } // intervals of two steps, sent after one
    RunResult results[MAX_RANKS];
    if (!run_world(&spec, ranks, results)) { return; }
    snprintf(what, sizeof what, "micro-batch %d: %.250s", (int)row->index, describe(&spec, ranks));
    for (int rank = 0; rank < ranks; rank++) {
        if (!have_rank(rank)) { continue; }
        if (!results[rank].failed || results[rank].last != row->look) {
            fail_msg("%s: %s at look %d", what, results[rank].failed ? "stopped" : "did not stop",
                     results[rank].last);
        }
        expect_site(&spec.poison, &spec, &results[rank].spike, what);
        expect_nothing_stepped(&spec, &results[rank], what);
    }
    free_results(results, ranks);
}

static void a_value_that_is_not_finite_stops_every_rank_and_is_named(void **state) {
    (void)state;
    static const Poison poisons[] = {{0, true, false, NAN, 1}, // the first of two is named
                                     {0, true, true, NAN, 0},
                                     {0, false, true, NAN, 0},
                                     {0, false, true, INFINITY, 0},
                                     {0, true, false, -INFINITY, 0}};
    if (process_transport->size == 4) { skip(); }
    for (size_t i = 0; i < sizeof BAD / sizeof BAD[0]; i++) {
        for (int p = 0; p < 5; p++) {
            WireFormat wire = (WireFormat)((i + (size_t)p) % WIRE_FORMAT_COUNT);
            expect_stop(&BAD[i], &poisons[p], wire, 2);
            if (p < 3) { expect_stop(&BAD[i], &poisons[p], (WireFormat)((wire + 1) % WIRE_FORMAT_COUNT), 3); }
        }
    }
}

// A gradient that is finite on every rank; the sum over two ranks is not.
static MicroBatchResult huge_micro_batch(void *self, Stream *stream, uint64_t index, const void *weights,
                                         float *gradients, const Pace *pace) {
    const float *parameters = (const float *)weights;
    MicroBatchResult result = noisy_micro_batch(self, stream, index, parameters, gradients, pace);
    if (index == 2) { gradients[1] = 3e38f; }
    return result;
}

static void a_sum_that_overflows_stops_every_rank(void **state) {
    (void)state;
    static const char *const rules[] = {"ddp", "zero1", "dpu", "acco"};
    for (int i = 0; i < 4; i++) {
        RunSpec spec = noisy_spec(rules[i], 103);
        spec.micro_batch = huge_micro_batch;
        RunResult results[2];
        if (!run_world(&spec, 2, results)) { skip(); }
        for (int rank = 0; rank < 2; rank++) {
            if (!have_rank(rank)) { continue; }
            assert_true(results[rank].failed && results[rank].last == 2 && results[rank].spike.rank == -1);
            expect_nothing_stepped(&spec, &results[rank], rules[i]);
        }
        free_results(results, 2);
    }
}

// As many cells as fit, but one at least and all at most.
static void a_bucket_has_the_bytes_that_were_asked_for(void **state) {
    (void)state;
    Scheduler *s = (Scheduler *)calloc(1, sizeof *s);
    Layout layout = layout_make(1000000, 4);
    size_t bytes = layout_padded(&layout) / layout.cells * sizeof(float), all = layout.cells;
    const size_t cases[][2] = {
        {0, all},           {1, 1},         {bytes, 1}, {10 * bytes + 1, 10}, {11 * bytes - 1, 10},
        {all * bytes, all}, {SIZE_MAX, all}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        s->settings.bucket_bytes = cases[i][0];
        assert_int_equal(job_bucket_cells(s, &layout), cases[i][1]);
    }
    free(s);
}

// Which micro-batches leave a job its processors of a GPU: those that overlap it, as was measured;
// of a job that follows the backward pass the last one, and the first where it still gathers.
static void micro_batches_beside_a_job_are_known(void **state) {
    (void)state;
    static const struct {
        bool in_flight, follows, replicated;
        JobKind kind;
        int begun, measured[2];
        bool beside; // of three micro-batches
    } cases[] = {
        {false, false, false, COMMIT, 1, {0, 0}, false}, {true, false, false, COMMIT, 3, {0, 0}, true},
        {true, false, false, COMMIT, 2, {2, 1}, true},   {true, false, false, COMMIT, 3, {2, 1}, false},
        {true, false, false, ESTIMATE, 1, {2, 1}, true}, {true, false, false, ESTIMATE, 2, {2, 1}, false},
        {false, true, false, COMMIT, 3, {0, 0}, false},  {true, true, false, COMMIT, 3, {2, 1}, true},
        {true, true, false, COMMIT, 2, {2, 1}, false},   {true, true, false, COMMIT, 1, {0, 0}, true},
        {true, true, true, COMMIT, 1, {0, 0}, false},    {true, true, true, COMMIT, 3, {0, 0}, true},
    };
    Scheduler *s = (Scheduler *)calloc(1, sizeof *s);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        s->settings.replicated = cases[i].replicated;
        s->settings.device.beside[0] = cases[i].measured[0];
        s->settings.device.beside[1] = cases[i].measured[1];
        s->job_in_flight = cases[i].in_flight;
        s->job.follows = cases[i].follows;
        s->job.kind = cases[i].kind;
        s->round_begun = cases[i].begun;
        s->round_count = 3;
        if (scheduler_is_beside(s) != cases[i].beside) { fail_msg("case %zu", i); }
    }
    free(s);
}

// A rank's writer may have ended before those of others.
static void wishes_are_agreed_on_by_one_rank_or_by_all(void **state) {
    (void)state;
    Transport transport = {.size = 3};
    Scheduler *s = (Scheduler *)calloc(1, sizeof *s);
    s->transport = &transport;
    s->job.kind = ESTIMATE;
    for (int ranks = 0; ranks <= 3; ranks++) {
        memset(&s->wishes, 0, sizeof s->wishes);
        memset(&s->job.total, 0, sizeof s->job.total);
        s->job.total.stops = ranks;
        scheduler_account_job(s);
        assert_true(s->wishes.stop_agreed == (ranks > 0) && !s->wishes.save_agreed);
        s->job.total.saves = s->job.total.ended = ranks;
        s->job.total.stops = 0;
        scheduler_account_job(s);
        assert_true(s->wishes.stop_agreed == (ranks > 0)); // a wish stays
        assert_true(s->wishes.save_agreed == (ranks > 0) && s->wishes.all_writers_done == (ranks == 3));
    }
    free(s);
}

// ---- Waiting --------------------------------------------------------------------------

static void *move_for_a_while(void *scheduler) {
    for (int i = 0; i < 80; i++) {
        sleep_seconds(0.01);
        __atomic_fetch_add(&((Scheduler *)scheduler)->micro_batches_begun, 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

static void wait_for_what_never_happens(const void *nothing) {
    Transport alone;
    Scheduler *s = (Scheduler *)calloc(1, sizeof *s);
    Stream stream = {.name = "compute"};
    Event event = {.stream = &stream, .position = 1};
    pthread_t mover;
    transport_open_alone(&alone, "a test");
    alone.timeout_seconds = -359.95; // so it waits for half a second, which is rounded up
    watermark_create(&stream.ended, 0);
    s->transport = &alone;
    pthread_create(&mover, NULL, move_for_a_while, s);
    scheduler_wait_event(s, &event);
    (void)nothing;
}

// It waits once more, because something has moved.
static void a_program_in_which_nothing_moves_ends(void **state) {
    (void)state;
    char message[2048];
    if (process_transport->size > 1) { skip(); }
    double began = clock_seconds();
    int status = run_in_child(wait_for_what_never_happens, NULL, message, sizeof message);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SYSTEM_FAILURE);
    assert_non_null(strstr(message, "while waiting for the compute stream"));
    assert_true(clock_seconds() - began > 1.9);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(overlap_and_delays_change_no_bit),
        cmocka_unit_test(buckets_and_messages_change_no_bit),
        cmocka_unit_test(long_pieces_travel_in_several_messages),
        cmocka_unit_test(keeping_pace_changes_no_bit),
        cmocka_unit_test(reports_hold_the_means_of_what_the_problem_returned),
        cmocka_unit_test(the_rate_follows_gradients_or_commits),
        cmocka_unit_test(every_rule_sends_as_much_as_its_formula_says),
        cmocka_unit_test(only_acco_wp_sends_bytes_for_an_evaluation),
        cmocka_unit_test(without_overlap_all_communication_is_exposed),
        cmocka_unit_test(overlapped_rules_hide_a_job_that_is_shorter_than_a_round),
        cmocka_unit_test(buckets_hide_what_a_single_one_cannot),
        cmocka_unit_test(diloco_hides_nothing),
        cmocka_unit_test(reports_count_every_span_once),
        cmocka_unit_test(adaptive_workers_differ_in_count_and_agree_in_everything_else),
        cmocka_unit_test(a_slow_exchange_does_not_prolong_an_adaptive_run),
        cmocka_unit_test(a_value_that_is_not_finite_stops_every_rank_and_is_named),
        cmocka_unit_test(a_sum_that_overflows_stops_every_rank),
        cmocka_unit_test(a_bucket_has_the_bytes_that_were_asked_for),
        cmocka_unit_test(micro_batches_beside_a_job_are_known),
        cmocka_unit_test(wishes_are_agreed_on_by_one_rank_or_by_all),
        cmocka_unit_test(a_program_in_which_nothing_moves_ends),
    };
    return run_rules_tests(tests, sizeof tests / sizeof tests[0]);
}
