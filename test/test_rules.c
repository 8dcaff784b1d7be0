// test_rules.c: update rules through the real scheduler, the real streams and a real transport.
//
// Started plainly, every test makes its ranks as threads of this process (worlds of 1 to 4). Started by mpirun, each process is one rank
// and runs the tests that fit the number of ranks. The problems are small enough to be checked by hand: S1, the scalar problem of the
// worked examples; a quadratic; and a noisy vector problem with awkward sizes for comparing execution orders bit for bit.

#include "harness.h"

#include "../rules.h"
#include "../runtime/transport_mpi.h"
#include "threads_link.h"

enum { MAX_RANKS = 4, MAX_COMMITS = 24 };

// ---------------------------------------------------------------------------------------------------------------------------------------
// One run: what to do, and what came out

typedef struct RunSpec {
    const char *rule;
    OptimizerKind optimizer;
    double learning_rate, weight_decay, clip;
    int round_size[MAX_RANKS], first_round_size[MAX_RANKS];
    int commits;
    bool overlap_off, adaptive;
    double chaos_seconds;
    WireFormat wire;
    size_t parameter_count;
    double slow_seconds; // of rank 1, per micro-batch
    MicroBatchResult (*micro_batch)(void *self, Stream *stream, uint64_t index, const float *parameters, float *gradients);
    float start, start_step; // element i starts at start + i * start_step
    double epsilon;          // 0: the usual 1e-8
    const DecayRange *decay_ranges; // NULL: everything decays
    int decay_range_count;
    double rate_step, rate_warmup; // of the schedule; 0 and 0: a constant rate
    bool rate_by_commits;
} RunSpec;

typedef struct RunResult {
    float *parameters[MAX_COMMITS + 1]; // after each commit
    float *masters[MAX_COMMITS + 1];    // the part of this rank: [begin, end)
    size_t begin, end;
    float master[MAX_COMMITS + 1], first_moment[MAX_COMMITS + 1], second_moment[MAX_COMMITS + 1]; // element 0, on rank 0
    float evaluated_at[256];                                                                      // element 0 at each micro-batch
    uint64_t micro_batches;
    CommitReport reports[MAX_COMMITS + 1];
    bool stopped;
    int first_bad_rank;
} RunResult;

typedef struct TestProblem {
    const RunSpec *spec;
    RunResult *result;
    int rank;
} TestProblem;

static MicroBatchResult micro_batch_recorded(void *self, Stream *stream, uint64_t index, const float *parameters, float *gradients) {
    TestProblem *problem = (TestProblem *)self;
    if (index < 256) { problem->result->evaluated_at[index] = parameters[0]; }
    return problem->spec->micro_batch(self, stream, index, parameters, gradients);
}

static SchedulerSettings settings_from(const RunSpec *spec, const Rule *rule, int rank, const DecayRange *everything) {
    SchedulerSettings settings;
    memset(&settings, 0, sizeof settings);
    settings.overlapped = rule->overlapped;
    settings.replicated = rule->replicated;
    settings.wait_after_launch = spec->overlap_off;
    settings.adaptive = spec->adaptive;
    settings.round_size = spec->round_size[rank];
    settings.first_round_size = spec->first_round_size[rank];
    settings.gradient_clip = spec->clip;
    settings.rate.peak = spec->learning_rate;
    settings.rate.step = spec->rate_step > 0 ? spec->rate_step : 1;
    settings.rate.warmup = spec->rate_warmup;
    settings.rate_by_commits = spec->rate_by_commits;
    settings.optimizer.kind = spec->optimizer;
    settings.optimizer.beta1 = 0.9;
    settings.optimizer.beta2 = 0.95;
    settings.optimizer.epsilon = spec->epsilon > 0 ? spec->epsilon : 1e-8;
    settings.optimizer.weight_decay = spec->weight_decay;
    settings.optimizer.decay_ranges = spec->decay_ranges != NULL ? spec->decay_ranges : everything;
    settings.optimizer.decay_range_count = spec->decay_ranges != NULL ? spec->decay_range_count : 1;
    return settings;
}

static void record_commit(const Scheduler *s, const RunSpec *spec, RunResult *result, int commit) {
    result->parameters[commit] = (float *)malloc(spec->parameter_count * sizeof(float));
    memcpy(result->parameters[commit], s->parameters.data, spec->parameter_count * sizeof(float));
    size_t begin = s->optimizer.begin, end = s->optimizer.end;
    result->begin = begin;
    result->end = end < spec->parameter_count ? end : spec->parameter_count;
    result->masters[commit] = (float *)malloc((end - begin) * sizeof(float));
    memcpy(result->masters[commit], s->optimizer.master, (end - begin) * sizeof(float));
    result->master[commit] = s->optimizer.master[0];
    if (spec->optimizer == OPTIMIZER_ADAMW) {
        result->first_moment[commit] = s->optimizer.first_moment[0];
        result->second_moment[commit] = s->optimizer.second_moment[0];
    }
    result->reports[commit] = s->report;
}

// Runs one rank to the end.
static void run_rank(const RunSpec *spec, Transport *transport, RunResult *result) {
    const Rule *rule = rule_find(spec->rule);
    DecayRange everything = {0, spec->parameter_count};
    SchedulerSettings settings = settings_from(spec, rule, transport->rank, &everything);
    TestProblem test_problem = {spec, result, transport->rank};
    Problem problem = {&test_problem, spec->parameter_count, micro_batch_recorded};
    transport->wire = spec->wire;
    transport->chaos_seconds = spec->chaos_seconds;
    transport->timeout_seconds = 60;
    Arena arena;
    memset(&arena, 0, sizeof arena);
    Scheduler s;
    scheduler_reserve(&s, &arena, &settings, &problem, transport);
    Error error = {""};
    assert_true(arena_commit(&arena, &error));
    for (size_t i = 0; i < spec->parameter_count; i++) { s.parameters.data[i] = spec->start + (float)i * spec->start_step; }
    Team *team = team_create(1, false);
    scheduler_start(&s, team);
    if (rule->begin != NULL) { rule->begin(&s); }
    record_commit(&s, spec, result, 0);
    for (int commit = 1; commit <= spec->commits && !s.stopped; commit++) {
        rule->commit(&s);
        record_commit(&s, spec, result, commit);
    }
    result->micro_batches = s.micro_batches_begun;
    result->stopped = s.stopped;
    result->first_bad_rank = s.job.first_bad_rank;
    scheduler_stop(&s);
    team_destroy(team);
    arena_release(&arena);
}

typedef struct World {
    const RunSpec *spec;
    RunResult *results; // (ranks)
} World;

static void run_world_rank(Transport *transport, void *context) {
    World *world = (World *)context;
    run_rank(world->spec, transport, &world->results[transport->rank]);
}

static void free_results(RunResult *results, int ranks) {
    for (int i = 0; i < ranks; i++) {
        for (int commit = 0; commit <= MAX_COMMITS; commit++) {
            free(results[i].parameters[commit]);
            free(results[i].masters[commit]);
        }
    }
}

// Under mpirun this process is one rank of `process_transport`; otherwise all ranks are threads. Returns false where the world does not
// fit.
static Transport *process_transport; // set once in main

static bool run_world(const RunSpec *spec, int ranks, RunResult *results) {
    World world = {spec, results};
    memset(results, 0, sizeof(RunResult) * (size_t)ranks);
    if (process_transport->size > 1) {
        if (process_transport->size == ranks) { run_world_rank(process_transport, &world); }
        return process_transport->size == ranks;
    }
    threads_run(ranks, run_world_rank, &world);
    return true;
}

// Which of the results are ours to look at.
static bool have_rank(int rank) { return process_transport->size == 1 || process_transport->rank == rank; }

// ---------------------------------------------------------------------------------------------------------------------------------------
// The problems

// S1: gradient of micro-batch j on worker i is theta - X[i][j], X[0][j] = j, X[1][j] = 4 + 2j; data used in order.
static MicroBatchResult scalar_micro_batch(void *self, Stream *stream, uint64_t index, const float *parameters, float *gradients) {
    (void)stream;
    const TestProblem *problem = (const TestProblem *)self;
    float x = problem->rank == 0 ? (float)index : 4.0f + 2.0f * (float)index;
    gradients[0] += parameters[0] - x;
    MicroBatchResult result = {0.5 * (parameters[0] - x) * (parameters[0] - x), 0.0};
    return result;
}

// f = theta^2 / 2 without noise.
static MicroBatchResult quadratic_micro_batch(void *self, Stream *stream, uint64_t index, const float *parameters, float *gradients) {
    (void)self, (void)stream, (void)index;
    gradients[0] += parameters[0];
    MicroBatchResult result = {0.5 * parameters[0] * parameters[0], 0.0};
    return result;
}

// A vector of independent quadratics whose targets are noise: nothing about its bits is simple.
static MicroBatchResult noisy_micro_batch(void *self, Stream *stream, uint64_t index, const float *parameters, float *gradients) {
    (void)stream;
    const TestProblem *problem = (const TestProblem *)self;
    const RunSpec *spec = problem->spec;
    double loss = 0;
    for (size_t i = 0; i < spec->parameter_count; i++) {
        Random random = {random_hash(random_hash((uint64_t)problem->rank + 1, index), i)};
        float difference = parameters[i] - (float)random_normal(&random);
        gradients[i] += difference;
        loss += 0.5 * difference * difference;
    }
    if (spec->slow_seconds > 0 && problem->rank == 1) { sleep_seconds(spec->slow_seconds); }
    MicroBatchResult result = {loss / (double)spec->parameter_count, 0.0};
    return result;
}

static MicroBatchResult poisoned_micro_batch(void *self, Stream *stream, uint64_t index, const float *parameters, float *gradients) {
    MicroBatchResult result = noisy_micro_batch(self, stream, index, parameters, gradients);
    if (((const TestProblem *)self)->rank == 1 && index == 5) {
        result.loss = NAN;
        gradients[3] = NAN;
    }
    return result;
}

// Every rank takes its time.
static MicroBatchResult sleepy_micro_batch(void *self, Stream *stream, uint64_t index, const float *parameters, float *gradients) {
    sleep_seconds(8e-3);
    return noisy_micro_batch(self, stream, index, parameters, gradients);
}

// What micro-batch `index` of a rank reports: binary fractions, so that sums are exact in any order.
static MicroBatchResult graded_result(int rank, uint64_t index) {
    MicroBatchResult result = {1.0 + 0.5 * rank + 0.25 * (double)index, 100.0 * rank + 0.125 * (double)index};
    return result;
}

static MicroBatchResult graded_micro_batch(void *self, Stream *stream, uint64_t index, const float *parameters, float *gradients) {
    noisy_micro_batch(self, stream, index, parameters, gradients);
    return graded_result(((const TestProblem *)self)->rank, index);
}

static RunSpec scalar_spec(const char *rule, OptimizerKind optimizer, int round_size) {
    RunSpec spec;
    memset(&spec, 0, sizeof spec);
    spec.rule = rule;
    spec.optimizer = optimizer;
    spec.learning_rate = optimizer == OPTIMIZER_SGD ? 0.5 : 0.1;
    spec.weight_decay = 0.1;
    for (int i = 0; i < MAX_RANKS; i++) { spec.round_size[i] = round_size; }
    spec.commits = 3;
    spec.parameter_count = 1;
    spec.micro_batch = scalar_micro_batch;
    spec.start = 8;
    return spec;
}

static RunSpec noisy_spec(const char *rule, size_t parameter_count) {
    RunSpec spec = scalar_spec(rule, OPTIMIZER_ADAMW, strcmp(rule, "acco") == 0 ? 1 : 2);
    spec.commits = 6;
    spec.clip = 0.05;
    spec.parameter_count = parameter_count;
    spec.micro_batch = noisy_micro_batch;
    spec.start = 0.25f;
    return spec;
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// Worked examples

typedef struct Trajectory {
    double theta[4]; // after 0..3 commits
    double estimate[4]; // the parameters after each estimate, where the rule has any; [0] is unused
} Trajectory;

static void expect_trajectory(const RunSpec *spec, const Trajectory *expected, double tolerance) {
    RunResult results[2];
    if (!run_world(spec, 2, results)) { skip(); }
    for (int rank = 0; rank < 2; rank++) {
        if (!have_rank(rank)) { continue; }
        for (int commit = 0; commit <= 3; commit++) {
            assert_close(results[rank].parameters[commit][0], expected->theta[commit], tolerance, "theta");
        }
    }
    free_results(results, 2);
}

static void ddp_and_zero1_follow_the_worked_example(void **state) {
    (void)state;
    Trajectory sgd = {{8, 5.375, 5.5625, 7.15625}, {0}};
    Trajectory adamw = {{8, 7.820000000190476, 7.651326351663929, 7.517874316291992}, {0}};
    static const char *const rules[] = {"ddp", "zero1"};
    for (int i = 0; i < 2; i++) {
        RunSpec spec = scalar_spec(rules[i], OPTIMIZER_SGD, 2);
        expect_trajectory(&spec, &sgd, 0);
        spec = scalar_spec(rules[i], OPTIMIZER_ADAMW, 2);
        expect_trajectory(&spec, &adamw, 2e-6);
    }
}

// Where each half batch was evaluated: micro-batches of rank 0 in order are the first half A, then B, A, B, A ... of `half` each.
static void expect_estimates(const RunResult *result, const Trajectory *expected, int first, int half, double tolerance) {
    for (int commit = 1; commit <= 3; commit++) {
        int half_b = first + 2 * (commit - 1) * half;
        assert_close(result->evaluated_at[half_b], expected->theta[commit - 1], tolerance, "half B is evaluated at theta");
        assert_close(result->evaluated_at[half_b + half], expected->estimate[commit], tolerance, "half A is evaluated at the estimate");
    }
}

static void expect_acco(const RunSpec *spec, const Trajectory *expected, double tolerance, double gradients_done) {
    expect_trajectory(spec, expected, tolerance);
    RunResult results[2];
    if (!run_world(spec, 2, results)) { skip(); }
    for (int rank = 0; rank < 2; rank++) {
        if (!have_rank(rank)) { continue; }
        int first = spec->first_round_size[rank] > 0 ? spec->first_round_size[rank] : spec->round_size[rank];
        expect_estimates(&results[rank], expected, first, spec->round_size[rank], tolerance);
        assert_close(results[rank].reports[3].gradients_done, gradients_done, 0, "gradients committed");
        assert_int_equal(results[rank].micro_batches, first + 6 * spec->round_size[rank]);
    }
    free_results(results, 2);
}

static void acco_follows_the_worked_example(void **state) {
    (void)state;
    Trajectory sgd = {{8, 5.375, 5.65625, 7.2734375}, {0, 5, 5.375, 6.96875}};
    RunSpec spec = scalar_spec("acco", OPTIMIZER_SGD, 1);
    expect_acco(&spec, &sgd, 0, 12);
    Trajectory adamw = {{8, 7.820000000190476, 7.651326351664015, 7.517904095233705},
                        {0, 7.820000000166667, 7.6468900592858775, 7.5082060760890466}};
    spec = scalar_spec("acco", OPTIMIZER_ADAMW, 1);
    expect_acco(&spec, &adamw, 2e-6, 12);
}

static void acco_with_unequal_workers_follows_the_worked_example(void **state) {
    (void)state;
    Trajectory unequal = {{8, 7.4375, 12.203125, 19.26171875}, {0, 6.25, 11.3125, 18.296875}};
    RunSpec spec = scalar_spec("acco", OPTIMIZER_SGD, 1);
    spec.round_size[1] = 3;
    expect_acco(&spec, &unequal, 0, 24);
    Trajectory init1 = {{8, 6.416666666666667, 10.25, 16.770833333333332}, {0, 5, 9.416666666666668, 15.791666666666666}};
    spec.first_round_size[0] = spec.first_round_size[1] = 1;
    expect_acco(&spec, &init1, 2e-6, 22);
}

static void acco_moments_follow_the_worked_example(void **state) {
    (void)state;
    RunSpec spec = scalar_spec("acco", OPTIMIZER_ADAMW, 1);
    RunResult results[2];
    if (!run_world(&spec, 2, results)) { skip(); }
    static const double first[] = {0, 0.525, 0.6795000000178571, 0.5014608205635661};
    static const double second[] = {0, 1.378125, 1.5234637500369657, 1.507888699697747};
    for (int commit = 0; commit <= 3 && have_rank(0); commit++) {
        assert_close(results[0].first_moment[commit], first[commit], 1e-6, "m");
        assert_close(results[0].second_moment[commit], second[commit], 1e-6, "v");
        assert_int_equal(results[0].reports[commit].commit, commit);
    }
    free_results(results, 2);
}

static void acco_is_stable_where_delayed_updates_are_not(void **state) {
    (void)state;
    RunSpec spec = scalar_spec("acco", OPTIMIZER_SGD, 1);
    spec.micro_batch = quadratic_micro_batch;
    spec.learning_rate = 1.5;
    spec.commits = 20;
    RunResult results[2];
    if (!run_world(&spec, 2, results)) { skip(); }
    for (int rank = 0; rank < 2; rank++) {
        if (have_rank(rank)) { assert_true(fabsf(results[rank].parameters[20][0]) < 0.08f); }
    }
    free_results(results, 2);
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// The estimate leaves no trace

static uint64_t hash_floats(const float *values, size_t count) {
    uint64_t hash = 1;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        hash = random_hash(hash, bits);
    }
    return hash;
}

static uint64_t hash_optimizer(const Scheduler *s) {
    size_t count = s->optimizer.end - s->optimizer.begin;
    uint64_t hash = hash_floats(s->optimizer.master, count);
    hash = random_hash(hash, hash_floats(s->optimizer.first_moment, count));
    hash = random_hash(hash, hash_floats(s->optimizer.second_moment, count));
    return random_hash(hash, (uint64_t)s->optimizer.commits);
}

static void an_estimate_leaves_the_optimizer_bitwise_unchanged(void **state) {
    (void)state;
    RunSpec spec = noisy_spec("acco", 1003);
    RunResult result;
    memset(&result, 0, sizeof result);
    Transport transport;
    transport_open_alone(&transport, "a test");
    DecayRange some = {100, 700};
    SchedulerSettings settings = settings_from(&spec, rule_find("acco"), 0, &some);
    TestProblem test_problem = {&spec, &result, 0};
    Problem problem = {&test_problem, spec.parameter_count, noisy_micro_batch};
    Arena arena;
    memset(&arena, 0, sizeof arena);
    Scheduler s;
    scheduler_reserve(&s, &arena, &settings, &problem, &transport);
    Error error = {""};
    assert_true(arena_commit(&arena, &error));
    Team *team = team_create(1, false);
    scheduler_start(&s, team);
    acco_begin(&s);
    for (int round = 0; round < 4; round++) {
        uint64_t before = hash_optimizer(&s);
        uint64_t parameters_before = hash_floats(s.parameters.data, s.shard);
        double rate_before = scheduler_learning_rate(&s), done_before = s.gradients_done;
        launch(&s, ESTIMATE);
        accumulate(&s);
        hand_over(&s, CLEAR);
        assert_true(hash_optimizer(&s) == before);
        assert_true(hash_floats(s.parameters.data, s.shard) != parameters_before); // it did estimate
        assert_true(scheduler_learning_rate(&s) == rate_before && s.gradients_done == done_before);
        launch(&s, COMMIT);
        accumulate(&s);
        hand_over(&s, KEEP);
        assert_true(hash_optimizer(&s) != before);
        assert_memory_equal(s.parameters.data, s.optimizer.master, s.shard * sizeof(float));
    }
    scheduler_stop(&s);
    team_destroy(team);
    arena_release(&arena);
    transport_close(&transport);
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// The same bits

// Runs both and compares parameters after every commit on every rank that is ours. Returns false where the world does not fit.
static bool compare_runs(const RunSpec *one, const RunSpec *other, int ranks) {
    RunResult a[MAX_RANKS], b[MAX_RANKS];
    if (!run_world(one, ranks, a) || !run_world(other, ranks, b)) { return false; }
    for (int rank = 0; rank < ranks; rank++) {
        for (int commit = 0; commit <= one->commits && have_rank(rank); commit++) {
            assert_memory_equal(a[rank].parameters[commit], b[rank].parameters[commit], one->parameter_count * sizeof(float));
            assert_true(a[rank].reports[commit].loss == b[rank].reports[commit].loss);
            assert_true(a[rank].reports[commit].gradient_norm == b[rank].reports[commit].gradient_norm);
        }
    }
    for (int rank = 1; rank < ranks && process_transport->size == 1; rank++) {
        assert_memory_equal(a[0].parameters[one->commits], a[rank].parameters[one->commits], one->parameter_count * sizeof(float));
    }
    assert_true(memcmp(a[process_transport->rank].parameters[0], a[process_transport->rank].parameters[one->commits],
                       one->parameter_count * sizeof(float)) != 0);
    free_results(a, ranks);
    free_results(b, ranks);
    return true;
}

static const size_t AWKWARD_COUNTS[] = {1, 31, 1003, 40007};

static void overlap_and_delays_change_no_bit(void **state) {
    (void)state;
    bool fits = false;
    for (int rule = 0; rule < RULE_COUNT; rule++) {
        for (int ranks = 1; ranks <= 4; ranks++) {
            for (int wire = 0; wire < 2; wire++) {
                RunSpec on = noisy_spec(RULES[rule].name, AWKWARD_COUNTS[ranks - 1]);
                on.wire = wire == 1 ? WIRE_BF16 : WIRE_FP32;
                RunSpec off = on, chaos = on;
                off.overlap_off = true;
                chaos.chaos_seconds = 2e-3;
                fits = compare_runs(&on, &off, ranks) || fits;
                fits = compare_runs(&on, &chaos, ranks) || fits;
            }
        }
    }
    if (!fits) { skip(); }
}

static void zero1_equals_ddp(void **state) {
    (void)state;
    bool fits = false;
    for (int ranks = 1; ranks <= 4; ranks++) {
        for (int i = 0; i < 4; i++) {
            RunSpec zero1 = noisy_spec("zero1", AWKWARD_COUNTS[i]), ddp = noisy_spec("ddp", AWKWARD_COUNTS[i]);
            fits = compare_runs(&zero1, &ddp, ranks) || fits;
        }
    }
    if (!fits) { skip(); }
}

// The first commit of ACCO is exact: both halves are evaluated at the start.
static void the_first_commit_of_acco_equals_zero1(void **state) {
    (void)state;
    RunSpec acco = noisy_spec("acco", 1003), zero1 = noisy_spec("zero1", 1003);
    acco.commits = zero1.commits = 1;
    if (!compare_runs(&acco, &zero1, 2)) { skip(); }
}

// A plain loop over the workers, no scheduler or transport: the sum in the order of ranks, its mean, clipping by the norm of the mean, then
// AdamW in double. Shards are [0, 32), [32, 64), [64, 77): both decayed ranges are cut by one. Epsilon is of the size of the gradients, or
// AdamW would hide every constant factor.
enum { LOOP_COUNT = 77, LOOP_RANKS = 3 };

static const DecayRange LOOP_DECAY[] = {{20, 40}, {50, 70}};

static bool loop_decays(size_t i) { return (i >= 20 && i < 40) || (i >= 50 && i < 70); }

typedef struct PlainLoop {
    float theta[LOOP_COUNT];
    double m[LOOP_COUNT], v[LOOP_COUNT];
    double gradient_norm; // of the latest commit
} PlainLoop;

static void plain_loop_commit(PlainLoop *loop, const RunSpec *spec, int commit) {
    float sum[LOOP_COUNT] = {0};
    for (int rank = 0; rank < LOOP_RANKS; rank++) {
        float own[LOOP_COUNT] = {0};
        TestProblem problem = {spec, NULL, rank};
        for (int j = 0; j < 2; j++) { noisy_micro_batch(&problem, NULL, (uint64_t)(2 * (commit - 1) + j), loop->theta, own); }
        for (int i = 0; i < LOOP_COUNT; i++) { sum[i] += own[i]; }
    }
    double square = 0;
    for (int i = 0; i < LOOP_COUNT; i++) { square += (double)sum[i] * (double)sum[i] / (4.0 * LOOP_RANKS * LOOP_RANKS); }
    loop->gradient_norm = sqrt(square);
    double scale = spec->clip > 0 && loop->gradient_norm > spec->clip ? spec->clip / loop->gradient_norm : 1.0;
    for (int i = 0; i < LOOP_COUNT; i++) {
        double g = (double)sum[i] / (2.0 * LOOP_RANKS) * scale, *m = &loop->m[i], *v = &loop->v[i];
        *m = 0.9 * *m + 0.1 * g;
        *v = 0.95 * *v + 0.05 * g * g;
        double step = *m / (1 - pow(0.9, commit)) / (sqrt(*v / (1 - pow(0.95, commit))) + spec->epsilon);
        double kept = (double)loop->theta[i] * (loop_decays((size_t)i) ? 1 - spec->learning_rate * spec->weight_decay : 1.0);
        loop->theta[i] = (float)(kept - spec->learning_rate * step);
    }
}

static void expect_plain_loop(const RunSpec *spec) {
    RunResult results[LOOP_RANKS];
    if (!run_world(spec, LOOP_RANKS, results)) { skip(); }
    PlainLoop loop;
    memset(&loop, 0, sizeof loop);
    for (int i = 0; i < LOOP_COUNT; i++) { loop.theta[i] = spec->start + (float)i * spec->start_step; }
    for (int commit = 1; commit <= spec->commits; commit++) {
        plain_loop_commit(&loop, spec, commit);
        for (int rank = 0; rank < LOOP_RANKS; rank++) {
            if (!have_rank(rank)) { continue; }
            double norm = results[rank].reports[commit].gradient_norm;
            assert_close(norm, loop.gradient_norm, 3e-6 * loop.gradient_norm, "norm of the mean gradient");
            for (int i = 0; i < LOOP_COUNT; i++) { assert_close(results[rank].parameters[commit][i], loop.theta[i], 3e-6, "theta"); }
        }
    }
    free_results(results, LOOP_RANKS);
}

static void zero1_and_ddp_equal_a_plain_loop(void **state) {
    (void)state;
    static const double clips[] = {0, 0.05, 5.1, 1e6}; // none; always, sometimes and never exceeded
    static const char *const rules[] = {"zero1", "ddp"};
    for (int i = 0; i < 8; i++) {
        RunSpec spec = noisy_spec(rules[i % 2], LOOP_COUNT);
        spec.clip = clips[i / 2];
        spec.epsilon = 0.01;
        spec.weight_decay = 0.3;
        spec.start_step = 0.01f;
        spec.decay_ranges = LOOP_DECAY;
        spec.decay_range_count = 2;
        expect_plain_loop(&spec);
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// What a commit reports

// The mean over the micro-batches of one commit, of all ranks; `begin` and `end` by rank.
static MicroBatchResult graded_mean(const uint64_t *begin, const uint64_t *end, int ranks) {
    MicroBatchResult sum = {0, 0};
    double count = 0;
    for (int rank = 0; rank < ranks; rank++) {
        for (uint64_t index = begin[rank]; index < end[rank]; index++, count++) {
            MicroBatchResult one = graded_result(rank, index);
            sum.loss += one.loss;
            sum.perfect_loss += one.perfect_loss;
        }
    }
    sum.loss /= count;
    sum.perfect_loss /= count;
    return sum;
}

// Ranks contribute 2 and 3 micro-batches to a round; acco's first commit has the first half as well, so every commit of it has two rounds.
static void reports_hold_the_means_of_what_the_problem_returned(void **state) {
    (void)state;
    for (int rule = 0; rule < RULE_COUNT; rule++) {
        RunSpec spec = noisy_spec(RULES[rule].name, 103);
        spec.micro_batch = graded_micro_batch;
        spec.round_size[0] = 2;
        spec.round_size[1] = 3;
        RunResult results[2];
        if (!run_world(&spec, 2, results)) { skip(); }
        int rounds = RULES[rule].rounds_per_commit;
        for (int commit = 1; commit <= spec.commits; commit++) {
            uint64_t begin[2], end[2];
            for (int rank = 0; rank < 2; rank++) {
                begin[rank] = (uint64_t)((commit - 1) * rounds * spec.round_size[rank]);
                end[rank] = begin[rank] + (uint64_t)(rounds * spec.round_size[rank]);
            }
            MicroBatchResult mean = graded_mean(begin, end, 2);
            for (int rank = 0; rank < 2; rank++) {
                if (!have_rank(rank)) { continue; }
                const CommitReport *report = &results[rank].reports[commit];
                assert_close(report->loss, mean.loss, 1e-12, "loss");
                assert_close(report->perfect_loss, mean.perfect_loss, 1e-12, "loss of a perfect model");
                assert_close(report->micro_batches, 5 * rounds, 0, "micro-batches");
                assert_close(report->gradients_done, 5 * rounds * commit, 0, "gradients committed");
            }
        }
        free_results(results, 2);
    }
}

typedef struct Seconds {
    double communication, exposed, compute;
} Seconds;

// Of rank `rank`, over all commits; where nothing overlaps the two must agree at every commit.
static Seconds sum_seconds(const RunResult *result, int commits, bool all_exposed) {
    Seconds sum = {0, 0, 0};
    for (int commit = 1; commit <= commits; commit++) {
        const CommitReport *report = &result->reports[commit];
        assert_true(report->communication_seconds > 0);
        assert_true(report->exposed_seconds >= 0);
        if (all_exposed) {
            assert_close(report->exposed_seconds, report->communication_seconds, 1e-6 * report->communication_seconds, "exposed seconds");
        }
        sum.communication += report->communication_seconds;
        sum.exposed += report->exposed_seconds;
        sum.compute += report->compute_seconds;
    }
    return sum;
}

// Delays of up to 4 ms before each of the four operations of a job, beside micro-batches of 8 ms.
static void exposed_time_is_communication_that_nothing_hides(void **state) {
    (void)state;
    for (int i = 0; i <= RULE_COUNT; i++) {
        bool overlaps = i == RULE_COUNT;
        RunSpec spec = noisy_spec(overlaps ? "acco" : RULES[i].name, 103);
        spec.micro_batch = sleepy_micro_batch;
        spec.chaos_seconds = 4e-3;
        spec.overlap_off = !overlaps;
        RunResult results[2];
        if (!run_world(&spec, 2, results)) { skip(); }
        for (int rank = 0; rank < 2; rank++) {
            if (!have_rank(rank)) { continue; }
            Seconds sum = sum_seconds(&results[rank], spec.commits, !overlaps);
            if (overlaps) { assert_true(sum.exposed < sum.communication); }
            assert_true(sum.compute >= 2 * spec.commits * 8e-3);
        }
        free_results(results, 2);
    }
}

// With SGD on f = theta^2 / 2 a commit multiplies theta by 1 - rate: the reported rate is the one that was used.
static void the_rate_follows_gradients_or_commits(void **state) {
    (void)state;
    static const double by_gradients[] = {0, 0.1, 0.2, 0.3, 0.3, 0.3}, by_commits[] = {0, 0.06, 0.12, 0.18, 0.24, 0.3};
    for (int i = 0; i < 2 * RULE_COUNT; i++) {
        const Rule *rule = &RULES[i / 2];
        RunSpec spec = noisy_spec(rule->name, 1); // four gradients per commit
        spec.optimizer = OPTIMIZER_SGD;
        spec.micro_batch = quadratic_micro_batch;
        spec.clip = 0;
        spec.learning_rate = 0.3;
        spec.rate_by_commits = i % 2 == 1;
        spec.rate_step = spec.rate_by_commits ? 1 : 4;
        spec.rate_warmup = spec.rate_by_commits ? 5 : 12;
        spec.commits = 5;
        RunResult results[2];
        if (!run_world(&spec, 2, results)) { skip(); }
        for (int commit = 1; commit <= spec.commits; commit++) {
            double rate = spec.rate_by_commits ? by_commits[commit] : by_gradients[commit];
            for (int rank = 0; rank < 2; rank++) {
                if (!have_rank(rank)) { continue; }
                assert_close(results[rank].reports[commit].learning_rate, rate, 1e-12, "rate");
                double before = results[rank].parameters[commit - 1][0], after = results[rank].parameters[commit][0];
                if (!rule->overlapped) { assert_close(after, before * (1 - rate), 1e-6 * before, "theta"); }
            }
        }
        free_results(results, 2);
    }
}

// Compute sees what the wire carries, from the very start; the masters keep everything.
static void with_a_narrow_wire_parameters_are_rounded_masters(void **state) {
    (void)state;
    static const char *const rules[] = {"zero1", "acco"};
    bool fits = false;
    for (int i = 0; i < 8; i++) {
        int ranks = i / 2 + 1;
        RunSpec spec = noisy_spec(rules[i % 2], 1003);
        spec.wire = WIRE_BF16;
        spec.start = 0.3f;
        spec.start_step = 1e-4f;
        RunResult results[MAX_RANKS];
        if (!run_world(&spec, ranks, results)) { continue; }
        fits = true;
        for (int rank = 0; rank < ranks; rank++) {
            const RunResult *result = &results[rank];
            for (size_t j = 0; j < spec.parameter_count && have_rank(rank); j++) {
                float start = spec.start + (float)j * spec.start_step;
                assert_true(result->parameters[0][j] == bf16_to_float(bf16_from_float(start)));
                bool mine = j >= result->begin && j < result->end;
                if (mine) { assert_true(result->masters[0][j - result->begin] == start); }
                for (int commit = 0; commit <= spec.commits && mine; commit++) {
                    float rounded = bf16_to_float(bf16_from_float(result->masters[commit][j - result->begin]));
                    assert_true(result->parameters[commit][j] == rounded);
                }
            }
        }
        free_results(results, ranks);
    }
    if (!fits) { skip(); }
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// Workers of different speed; a gradient that is not a number

static void adaptive_workers_differ_in_count_and_agree_in_everything_else(void **state) {
    (void)state;
    RunSpec spec = noisy_spec("acco", 2003);
    spec.adaptive = true;
    spec.slow_seconds = 20e-3; // rank 1
    spec.clip = 0;
    RunResult results[2];
    if (!run_world(&spec, 2, results)) { skip(); }
    for (int rank = 0; rank < 2; rank++) {
        if (have_rank(rank)) { assert_true(results[rank].reports[spec.commits].commit == spec.commits); }
    }
    if (process_transport->size == 1) {
        assert_memory_equal(results[0].parameters[spec.commits], results[1].parameters[spec.commits], spec.parameter_count * sizeof(float));
        assert_true(results[0].reports[spec.commits].gradients_done == results[1].reports[spec.commits].gradients_done);
        assert_true(results[0].micro_batches > results[1].micro_batches + 6);
    } else if (have_rank(0)) {
        assert_true(results[0].micro_batches > 2 * (uint64_t)spec.commits + 1 + 6);
    }
    free_results(results, 2);
}

static void a_gradient_that_is_not_a_number_stops_every_rank_and_names_its_source(void **state) {
    (void)state;
    for (int rule = 0; rule < RULE_COUNT; rule++) {
        RunSpec spec = noisy_spec(RULES[rule].name, 1003);
        spec.micro_batch = poisoned_micro_batch;
        RunResult results[2];
        if (!run_world(&spec, 2, results)) { skip(); }
        for (int rank = 0; rank < 2; rank++) {
            if (!have_rank(rank)) { continue; }
            assert_true(results[rank].stopped);
            assert_int_equal(results[rank].first_bad_rank, 1);
            for (int commit = 0; results[rank].parameters[commit] != NULL; commit++) {
                for (size_t i = 0; i < spec.parameter_count; i++) { assert_true(isfinite(results[rank].parameters[commit][i])); }
            }
        }
        free_results(results, 2);
    }
}

int main(void) {
    Transport transport;
    Error error = {""};
    if (!transport_open(&transport, &error)) { return 1; }
    process_transport = &transport;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ddp_and_zero1_follow_the_worked_example),
        cmocka_unit_test(acco_follows_the_worked_example),
        cmocka_unit_test(acco_with_unequal_workers_follows_the_worked_example),
        cmocka_unit_test(acco_moments_follow_the_worked_example),
        cmocka_unit_test(acco_is_stable_where_delayed_updates_are_not),
        cmocka_unit_test(an_estimate_leaves_the_optimizer_bitwise_unchanged),
        cmocka_unit_test(overlap_and_delays_change_no_bit),
        cmocka_unit_test(zero1_equals_ddp),
        cmocka_unit_test(the_first_commit_of_acco_equals_zero1),
        cmocka_unit_test(zero1_and_ddp_equal_a_plain_loop),
        cmocka_unit_test(reports_hold_the_means_of_what_the_problem_returned),
        cmocka_unit_test(exposed_time_is_communication_that_nothing_hides),
        cmocka_unit_test(the_rate_follows_gradients_or_commits),
        cmocka_unit_test(with_a_narrow_wire_parameters_are_rounded_masters),
        cmocka_unit_test(adaptive_workers_differ_in_count_and_agree_in_everything_else),
        cmocka_unit_test(a_gradient_that_is_not_a_number_stops_every_rank_and_names_its_source),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    transport_close(&transport);
    return failed == 0 ? 0 : 1;
}
