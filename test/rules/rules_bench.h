// rules_bench.h: runs one update rule on a few ranks, and compares runs.
//
// A test fills in a RunSpec, and run_world returns a RunResult for each rank. Scheduler,
// streams and collectives are the program's own. Between two commits the bench takes a
// look (Look): it copies what the rank holds then.
//
// A test program that is started plainly makes its ranks out of threads, in worlds of 1
// to 5. Started by mpirun, each process is one rank; run_world then runs only worlds of
// exactly that size, and a process has only the results of its own rank (have_rank).
//
// What is trained is small: the scalar problem of the worked examples; a quadratic
// without noise; and a vector of noisy quadratics of an awkward length, for comparing
// orders of execution bit for bit. The last one keeps pace as a model does: it waits for
// parameters and announces gradients part by part.
#pragma once

#include "test/harness.h"

#include "checkpoint/committed.h"
#include "comm/transport_mpi.h"
#include "rules.h"
#include "test/sgd.h"
#include "test/threads_link.h"

enum {
    MAX_RANKS = 5,
    MAX_COMMITS = 130,
    MAX_LOOKS = MAX_COMMITS + 2,
    MAX_SEEN = 64,
    MAX_SNAPSHOTS = 24,
    LAYERS = 5,
    NOISY_TOKENS = 8 // of a masked micro-batch
};

// ---- One run: what to do, and what came out -------------------------------------------

typedef MicroBatchResult (*MicroBatch)(void *self, Stream *stream, uint64_t index, const void *weights,
                                       float *gradients, const Pace *pace);

// A value that is not finite, in one micro-batch, and `more` that follow it, of every rank but 0.
typedef struct Poison {
    uint64_t index; // of the micro-batch; 0: no poison
    bool in_loss, in_gradient;
    float value;
    uint64_t more;
} Poison;

typedef struct RunSpec {
    const char *rule;
    SchedulerSettings settings; // bench_open fills in what the rule decides, and the numbers of micro-batches
    int micro_batches[MAX_RANKS], first_round_size[MAX_RANKS];
    double split; // share of ACCO's round A
    int commits;  // at most; settings.target may end the run earlier
    bool finish;  // call Rule::finish after the last commit, as at the end of a run
    bool blind;   // look only at the end, so that nothing waits for parameters that are still arriving
    size_t parameter_count;
    size_t layer_begins[LAYERS + 1];
    int layer_count;
    float start, start_step; // element i starts at start + i * start_step
    MicroBatch micro_batch;
    int parts;            // in which the noisy problem waits for parameters and announces gradients
    double pause_seconds; // before each part, at random up to this
    double work_seconds;  // that a micro-batch takes
    double slow_seconds;  // that it takes longer on rank 1
    bool snapshots;       // keep the parameters at which every micro-batch was computed
    bool counts_spans;    // fill in RunResult::kept
    Poison poison;
    bool masked; // the noisy problem predicts between none and all of NOISY_TOKENS in a micro-batch
    double chaos_seconds, link_bytes_per_second;
    size_t message;     // elements of a message, a multiple of LAYOUT_BLOCK; 0: what the transport takes
    int ranks_per_host; // 0: every rank by itself
} RunSpec;

// What a rank holds between two commits. Arrays are NULL where the bench did not look,
// and where the rule has no such array.
typedef struct Look {
    float *committed;                             // (parameter_count): what all ranks share
    float *local;                                 // (parameter_count): what compute uses next
    float *master, *first_moment, *second_moment; // (shard): own elements
    float *momentum;                              // (parameter_count): of the outer steps
    uint64_t hashes[MAX_RANKS];                   // by rank: a hash of what must be the same on all ranks
    CommitReport report;
    int64_t reports; // number of reports so far
} Look;

typedef struct Seconds {
    double communication, exposed, compute;
} Seconds;

typedef struct RunResult {
    Look looks[MAX_LOOKS];           // at the start, after each commit, and after RunSpec::finish
    int last;                        // the last look
    Layout owned;                    // of master and moments
    float seen[MAX_SEEN][2];         // where each micro-batch was evaluated: the first two elements
    float *snapshots[MAX_SNAPSHOTS]; // (parameter_count): all of them
    uint64_t micro_batches;          // begun by this rank
    uint64_t bytes_sent;
    double gradients_done;
    TraceSums kept;       // added up span by span
    TraceSums unreported; // what the trace's own sums hold at the end, after the last report
    Seconds seconds;      // that rank 0 has reported; the same number on all ranks
    bool failed;
    SpikeReport spike;  // the latest
    double sent_square; // of the latest job: Tally::sent_square
    double spikes;
    SpikeDetector norms, losses;
} RunResult;

typedef struct TestProblem {
    const RunSpec *spec;
    RunResult *result;  // NULL: nothing is recorded
    float *differences; // (parameter_count): what the forward pass leaves for the backward pass
    int rank;
} TestProblem;

static inline TestProblem problem_open(const RunSpec *spec, RunResult *result, int rank) {
    TestProblem problem = {spec, result, (float *)calloc(spec->parameter_count + 1, sizeof(float)), rank};
    return problem;
}

// A scheduler with all that it needs.
typedef struct Bench {
    const Rule *rule;
    TestProblem problem;
    Arena arena;
    Scheduler scheduler;
    ThreadPool *pool;
} Bench;

// The micro-batches of a spec add to what is there. Where a sum begins it holds anything.
static inline MicroBatchResult bench_micro_batch(void *self, Stream *stream, uint64_t index,
                                                 const void *weights, float *gradients, const Pace *pace) {
    const RunSpec *spec = ((TestProblem *)self)->spec;
    if (pace->begins) { memset(gradients, 0, spec->parameter_count * sizeof *gradients); }
    return spec->micro_batch(self, stream, index, weights, gradients, pace);
}

// This function and all others that run on a rank must not use cmocka's assertions: they
// work only on the thread that runs the test.
static inline void bench_open(Bench *bench, const RunSpec *spec, Transport *transport, RunResult *result) {
    const Rule *rule = rule_find(spec->rule);
    memset(bench, 0, sizeof *bench);
    bench->rule = rule;
    bench->problem = problem_open(spec, result, transport->rank);
    SchedulerSettings settings = spec->settings;
    settings.kind = rule->kind;
    settings.replicated = rule->replicated;
    settings.micro_batches = spec->micro_batches[transport->rank];
    settings.round_a = acco_round_a(spec->split, settings.micro_batches);
    int first = spec->first_round_size[transport->rank];
    settings.first_round = first > 0 ? first : settings.round_a;
    Problem problem = {.self = &bench->problem,
                       .parameter_count = spec->parameter_count,
                       .tokens = spec->masked ? NOISY_TOKENS : 1,
                       .micro_batch = bench_micro_batch,
                       .layer_begins = spec->layer_begins,
                       .layer_count = spec->layer_count};
    Scheduler *s = &bench->scheduler;
    Error error = {""};
    transport->messages.limit = spec->message;
    join_hosts(transport, spec->ranks_per_host);
    scheduler_reserve(s, &bench->arena, &settings, &problem, transport);
    if (spec->message > 0) { s->local.sparse.slice = 1; } // blocks that travel together
    if (!arena_commit(&bench->arena, &error)) { abort(); }
    for (size_t i = 0; i < spec->parameter_count; i++) {
        s->parameters.data[i] = spec->start + (float)i * spec->start_step;
    }
    bench->pool = thread_pool_create(1, false);
    scheduler_start(s, bench->pool, true);
}

static inline void bench_close(Bench *bench) {
    scheduler_stop(&bench->scheduler);
    thread_pool_destroy(bench->pool);
    arena_release(&bench->arena);
    free(bench->problem.differences);
}

static inline uint64_t hash_floats(const float *values, size_t count) {
    uint64_t hash = 1;
    for (size_t i = 0; i < count; i++) { hash = random_mix(hash + wire_float_bits(values[i])) * 3; }
    return hash;
}

// As floats, whatever their format.
static inline float *copy_reals(const Real *from, size_t count, Precision format) {
    float *copy = (float *)malloc((count + 1) * sizeof(float));
    for (size_t i = 0; i < count; i++) { copy[i] = real_load(from, i, format); }
    return copy;
}

static inline float *copy_floats(const float *from, size_t count) {
    if (from == NULL) { return NULL; }
    float *copy = (float *)malloc(count * sizeof(float) + 1);
    memcpy(copy, from, count * sizeof(float));
    return copy;
}

static inline uint64_t hash_number(uint64_t hash, double number) {
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    return random_hash(hash, bits);
}

static inline uint64_t hash_look(const Look *look, size_t count) {
    uint64_t hash = random_hash(hash_floats(look->committed, count),
                                look->momentum != NULL ? hash_floats(look->momentum, count) : 0);
    hash = hash_number(hash, look->report.loss);
    hash = hash_number(hash, look->report.micro_batches);
    return hash_number(hash_number(hash, look->report.gradients_done), (double)look->report.commit);
}

static inline void look_at(Bench *bench, Look *look) {
    Scheduler *s = &bench->scheduler;
    size_t count = s->problem.parameter_count, owned = layout_shard(&s->optimizer.layout);
    const float *committed = (const float *)borrow_committed(s, bench->rule, true);
    look->committed = copy_floats(committed, count);
    return_committed(s, committed);
    look->local = copy_floats(s->parameters.data, count);
    look->master = copy_floats(s->optimizer.master, owned);
    look->first_moment = copy_reals(s->optimizer.first_moment, owned, s->optimizer.settings.moments);
    look->second_moment =
        copy_reals(s->optimizer.second_moment, s->optimizer.second_count, s->optimizer.settings.moments);
    look->momentum = copy_floats(s->local.momentum, count);
    look->report = s->report;
    look->reports = s->reports;
    look->hashes[s->transport->rank] = hash_look(look, count);
}

// After a spike with SPIKE_ROLLBACK a run goes on from where it is: no checkpoint takes
// its place.
static inline void run_commits(Bench *bench, const RunSpec *spec, RunResult *result) {
    Scheduler *s = &bench->scheduler;
    look_at(bench, &result->looks[0]);
    s->transport->bytes_sent = 0; // counts the commits alone
    while (result->last < spec->commits && s->gradients_done < spec->settings.target && !s->spikes.failed) {
        bench->rule->advance(s);
        Look *look = &result->looks[++result->last];
        look->report = s->report;
        look->reports = s->reports;
        uint64_t version = s->parameters_version;
        if (s->spikes.rollback_due) {
            scheduler_drop(s);
            assert_true(s->parameters_version > version); // whatever is loaded now has no copy yet
        }
        if (!spec->blind) { look_at(bench, look); }
    }
    if (spec->finish && !s->spikes.failed) {
        if (bench->rule->finish != NULL) { bench->rule->finish(s); }
        result->last++;
    }
    scheduler_settle(s);
    result->bytes_sent = s->transport->bytes_sent;
    if (result->looks[result->last].committed == NULL) { look_at(bench, &result->looks[result->last]); }
}

// The sums that a trace keeps, computed the slow way: every span of communication against
// every span of compute.
static inline TraceSums count_spans(const Trace *trace) {
    TraceSums sums = {0, 0, 0, 0, 0};
    for (size_t i = 0; i < trace->span_count; i++) {
        const Span *span = &trace->spans[i];
        double seconds = span->ended - span->began;
        if (span->lane == TRACE_COMPUTE) {
            sums.compute += seconds;
            continue;
        }
        sums.communication += seconds;
        sums.exposed += seconds;
        for (size_t j = 0; j < trace->span_count; j++) {
            const Span *other = &trace->spans[j];
            double shared = fmin(span->ended, other->ended) - fmax(span->began, other->began);
            if (other->lane == TRACE_COMPUTE && shared > 0) { sums.exposed -= shared; }
        }
    }
    return sums;
}

// Adds up the reports, each once: where no new one has come, a look holds the report of
// the look before.
static inline Seconds sum_seconds(const RunResult *result) {
    Seconds sum = {0, 0, 0};
    for (int look = 1; look <= result->last; look++) {
        const CommitReport *report = &result->looks[look].report;
        if (result->looks[look].reports == result->looks[look - 1].reports) { continue; }
        sum.communication += report->seconds.communication;
        sum.exposed += report->seconds.exposed;
        sum.compute += report->seconds.compute;
    }
    return sum;
}

// What each rank tells the others after a run.
typedef struct Summary {
    uint64_t hashes[MAX_LOOKS];
    Seconds seconds;
} Summary;

static inline void exchange_summaries(Transport *transport, RunResult *result) {
    Summary mine, all[MAX_RANKS];
    for (int i = 0; i < MAX_LOOKS; i++) { mine.hashes[i] = result->looks[i].hashes[transport->rank]; }
    mine.seconds = sum_seconds(result);
    transport_all_gather_records(transport, "summaries", &mine, all, sizeof mine);
    for (int rank = 0; rank < transport->size; rank++) {
        for (int i = 0; i < MAX_LOOKS; i++) { result->looks[i].hashes[rank] = all[rank].hashes[i]; }
    }
    result->seconds = all[0].seconds;
}

// Runs one rank to the end.
static inline void run_rank(const RunSpec *spec, Transport *transport, RunResult *result) {
    Bench *bench = (Bench *)malloc(sizeof *bench);
    transport->timeout_seconds = 120;
    bench_open(bench, spec, transport, result);
    transport->chaos_seconds = spec->chaos_seconds;
    transport->link_bytes_per_second = spec->link_bytes_per_second;
    bool sharded = scheduler_shards(&bench->scheduler.settings);
    result->owned = sharded ? scheduler_layout(&bench->scheduler) : bench->scheduler.optimizer.layout;
    run_commits(bench, spec, result);
    result->micro_batches = bench->scheduler.micro_batches_begun;
    if (spec->counts_spans) { result->kept = count_spans(&bench->scheduler.trace); }
    result->unreported = trace_take(&bench->scheduler.trace);
    result->gradients_done = bench->scheduler.gradients_done;
    result->failed = bench->scheduler.spikes.failed;
    result->spike = bench->scheduler.spikes.latest;
    result->spikes = bench->scheduler.spikes.count;
    result->sent_square = bench->scheduler.job.sent_square;
    result->norms = bench->scheduler.spikes.norms;
    result->losses = bench->scheduler.spikes.losses;
    bench_close(bench);
    transport->chaos_seconds = transport->link_bytes_per_second = 0;
    exchange_summaries(transport, result);
    free(bench);
}

typedef struct World {
    const RunSpec *spec;
    RunResult *results; // (ranks)
} World;

static inline void run_world_rank(Transport *transport, void *context) {
    World *world = (World *)context;
    run_rank(world->spec, transport, &world->results[transport->rank]);
}

static inline void free_results(RunResult *results, int ranks) {
    for (int i = 0; i < ranks; i++) {
        for (int l = 0; l < MAX_LOOKS; l++) {
            Look *look = &results[i].looks[l];
            float *arrays[] = {look->committed,    look->local,         look->master,
                               look->first_moment, look->second_moment, look->momentum};
            for (size_t a = 0; a < sizeof arrays / sizeof arrays[0]; a++) { free(arrays[a]); }
        }
        for (int index = 0; index < MAX_SNAPSHOTS; index++) { free(results[i].snapshots[index]); }
        layout_free(&results[i].owned);
    }
}

// The ranks of this test program: more than one under mpirun. main sets it once.
static Transport *process_transport;

// Runs `spec` on `ranks` ranks: on threads, or under mpirun on the processes. Returns
// false where mpirun has started another number of them.
static inline bool run_world(const RunSpec *spec, int ranks, RunResult *results) {
    World world = {spec, results};
    memset(results, 0, sizeof(RunResult) * (size_t)ranks);
    if (process_transport->size > 1) {
        if (process_transport->size == ranks) { run_world_rank(process_transport, &world); }
        return process_transport->size == ranks;
    }
    threads_run(ranks, run_world_rank, &world);
    return true;
}

// Whether this process has the results of the rank.
static inline bool have_rank(int rank) {
    return process_transport->size == 1 || process_transport->rank == rank;
}

// The lowest rank of which this process has the results.
static inline int first_rank(void) { return process_transport->rank; }

// The run in words, for messages of failed tests.
static const char *describe(const RunSpec *spec, int ranks) {
    static char text[256];
    snprintf(text, sizeof text,
             "%s, %d ranks, %zu elements, wire %s, estimates %s, overlap %s, buckets of %zu bytes, messages "
             "of %zu",
             spec->rule, ranks, spec->parameter_count, wire_name(spec->settings.wire),
             wire_name(spec->settings.estimate_wire), spec->settings.overlap ? "on" : "off",
             spec->settings.bucket_bytes, spec->message);
    return text;
}

// ---- What is trained ------------------------------------------------------------------

static inline void note_seen(const TestProblem *problem, uint64_t index, const float *parameters) {
    if (problem->result == NULL || index >= MAX_SEEN) { return; }
    for (size_t i = 0; i < 2 && i < problem->spec->parameter_count; i++) {
        problem->result->seen[index][i] = parameters[i];
    }
}

// The scalar problem of the worked examples. The gradient of micro-batch j on rank i is
// theta - X[i][j], where X[0][j] = j and X[1][j] = 4 + 2j. A second element has half the
// target.
static inline MicroBatchResult scalar_micro_batch(void *self, Stream *stream, uint64_t index,
                                                  const void *weights, float *gradients, const Pace *pace) {
    const float *parameters = (const float *)weights;
    (void)stream;
    const TestProblem *problem = (const TestProblem *)self;
    size_t count = problem->spec->parameter_count;
    float x = problem->rank == 0 ? (float)index : 4.0f + 2.0f * (float)index;
    pace_need(pace, count);
    note_seen(problem, index, parameters);
    for (size_t i = 0; i < count; i++) { gradients[i] += parameters[i] - x / (float)(i + 1); }
    MicroBatchResult result = {0.5 * (parameters[0] - x) * (parameters[0] - x), 0.0, 1};
    return result;
}

static inline MicroBatchResult constant_micro_batch(void *self, Stream *stream, uint64_t index,
                                                    const void *weights, float *gradients, const Pace *pace) {
    const float *parameters = (const float *)weights;
    (void)stream;
    const TestProblem *problem = (const TestProblem *)self;
    pace_need(pace, problem->spec->parameter_count);
    note_seen(problem, index, parameters);
    for (size_t i = 0; i < problem->spec->parameter_count; i++) { gradients[i] += 2; }
    MicroBatchResult result = {parameters[0], 0.0, 1};
    return result;
}

// f = theta^2 / 2 without noise.
static inline MicroBatchResult quadratic_micro_batch(void *self, Stream *stream, uint64_t index,
                                                     const void *weights, float *gradients,
                                                     const Pace *pace) {
    const float *parameters = (const float *)weights;
    (void)self, (void)stream, (void)index;
    pace_need(pace, 1);
    gradients[0] += parameters[0];
    MicroBatchResult result = {0.5 * parameters[0] * parameters[0], 0.0, 1};
    return result;
}

// Uniform in [-1, 1).
static inline float noise(uint64_t seed, size_t i) {
    return (float)(int32_t)(random_mix(seed + i * UINT64_C(0x9E3779B97F4A7C15)) >> 32) * 0x1p-31f;
}

static inline size_t part_begin(const RunSpec *spec, int part) {
    return spec->parts > 1 ? spec->parameter_count * (size_t)part / (size_t)spec->parts
                           : (size_t)part * spec->parameter_count;
}

static inline void take_time(const TestProblem *problem, Random *pauses) {
    const RunSpec *spec = problem->spec;
    int parts = spec->parts > 1 ? spec->parts : 1;
    double seconds = (spec->work_seconds + (problem->rank == 1 ? spec->slow_seconds : 0)) / (2 * parts);
    seconds += spec->pause_seconds * random_uniform(pauses);
    if (seconds > 0) { sleep_seconds(seconds); }
}

// Forward: waits for the parameters, part by part, and stores how far each is from its
// target, which is noise around 0.2. Returns the loss.
static inline double noisy_forward(TestProblem *problem, uint64_t seed, const float *parameters,
                                   const Pace *pace, Random *pauses) {
    double loss = 0;
    for (int part = 0; part < (problem->spec->parts > 1 ? problem->spec->parts : 1); part++) {
        size_t begin = part_begin(problem->spec, part), end = part_begin(problem->spec, part + 1);
        pace_need(pace, end);
        take_time(problem, pauses);
        for (size_t i = begin; i < end; i++) {
            float difference = parameters[i] - 0.2f - noise(seed, i);
            problem->differences[i] = difference;
            loss += 0.5 * difference * difference;
        }
    }
    return loss / (double)problem->spec->parameter_count;
}

// Backward: adds the gradients, from the end of the vector to its start, and announces
// them.
static inline void noisy_backward(TestProblem *problem, float *gradients, const Pace *pace, Random *pauses) {
    for (int part = (problem->spec->parts > 1 ? problem->spec->parts : 1) - 1; part >= 0; part--) {
        size_t begin = part_begin(problem->spec, part), end = part_begin(problem->spec, part + 1);
        take_time(problem, pauses);
        for (size_t i = begin; i < end; i++) { gradients[i] += problem->differences[i]; }
        pace_finish(pace, begin);
    }
}

// A vector of independent quadratics whose targets are noise, so that every bit of the
// result depends on the order of the additions. It keeps pace, as a model does.
static inline MicroBatchResult noisy_micro_batch(void *self, Stream *stream, uint64_t index,
                                                 const void *weights, float *gradients, const Pace *pace) {
    const float *parameters = (const float *)weights;
    (void)stream;
    TestProblem *problem = (TestProblem *)self;
    const Poison *poison = &problem->spec->poison;
    uint64_t seed = random_hash((uint64_t)problem->rank + 1, index);
    Random pauses = {seed};
    MicroBatchResult result = {noisy_forward(problem, seed, parameters, pace, &pauses), 0.0, 1};
    if (problem->spec->masked) {
        result.predicted = (double)(random_mix(seed) % (NOISY_TOKENS + 1));
        if (result.predicted == 0) { result.loss = 0; }
        for (size_t i = 0; i < problem->spec->parameter_count; i++) {
            problem->differences[i] *= (float)result.predicted / NOISY_TOKENS;
        }
    }
    if (problem->result != NULL && problem->spec->snapshots && index < MAX_SNAPSHOTS) {
        problem->result->snapshots[index] = copy_floats(parameters, problem->spec->parameter_count);
    }
    bool is_bad = poison->index > 0 && index >= poison->index && index <= poison->index + poison->more;
    if (is_bad && problem->rank > 0) {
        if (poison->in_loss) { result.loss = (double)poison->value; }
        if (poison->in_gradient) { problem->differences[problem->spec->parameter_count / 2] = poison->value; }
    }
    noisy_backward(problem, gradients, pace, &pauses);
    return result;
}

// What micro-batch `index` of a rank returns: binary fractions, so that sums are exact in
// any order. Every third predicts nothing.
static inline MicroBatchResult graded_result(int rank, uint64_t index) {
    MicroBatchResult result = {1.0 + 0.5 * rank + 0.25 * (double)index, 100.0 * rank + 0.125 * (double)index,
                               (double)(((uint64_t)rank + index) % 3)};
    return result;
}

static inline MicroBatchResult graded_micro_batch(void *self, Stream *stream, uint64_t index,
                                                  const void *weights, float *gradients, const Pace *pace) {
    const float *parameters = (const float *)weights;
    noisy_micro_batch(self, stream, index, parameters, gradients, pace);
    return graded_result(((const TestProblem *)self)->rank, index);
}

// ---- Specs ----------------------------------------------------------------------------

static const OptimizerTensor EVERYTHING = {0, SIZE_MAX, true, 0, 0};

static inline void set_wire(RunSpec *spec, WireFormat wire) {
    spec->settings.wire = spec->settings.estimate_wire = wire;
}

// Cuts the vector into layers. Some elements lie before the first and behind the last.
static inline void set_layers(RunSpec *spec) {
    spec->layer_count = LAYERS;
    for (int l = 0; l <= LAYERS; l++) {
        spec->layer_begins[l] = spec->parameter_count * (size_t)(l + 1) / (LAYERS + 3);
    }
}

static inline bool is_sparse(const char *rule) { return strcmp(rule, "sparse-loco") == 0; }

// step: sgd_step, or NULL for AdamW.
static inline RunSpec scalar_spec(const char *rule, ElementwiseStep *step, int micro_batches) {
    RunSpec spec;
    memset(&spec, 0, sizeof spec);
    spec.rule = rule;
    for (int i = 0; i < MAX_RANKS; i++) { spec.micro_batches[i] = micro_batches; }
    spec.commits = 3;
    spec.parameter_count = 1;
    spec.micro_batch = scalar_micro_batch;
    spec.start = 8;
    SchedulerSettings *settings = &spec.settings;
    settings->overlap = true;
    spec.split = 0.5;
    settings->target = 1e9;
    settings->rate.kind = SCHEDULE_CONSTANT;
    settings->rate.peak = step == sgd_step ? 0.5 : 0.1;
    settings->rate.step = 1;
    OptimizerSettings optimizer_settings = {.elementwise_step = step,
                                            .beta1 = 0.9,
                                            .beta2 = 0.95,
                                            .epsilon = 1e-8,
                                            .weight_decay = 0.1,
                                            .tensors = &EVERYTHING,
                                            .tensor_count = 1};
    settings->optimizer = optimizer_settings;
    settings->local.steps = 2;
    settings->local.fragments = 1;
    NesterovStep outer = {.learning_rate = 0.5f, .momentum = 0.5f, .alpha = 0.5f};
    MomentumStep co2 = {.beta = 0.5f, .alpha = 1, .gap = 1};
    settings->local.outer_nesterov = outer;
    settings->local.outer_momentum = co2;
    settings->local.sparse = is_sparse(rule);
    settings->local.sparse_beta = 0.5f;
    settings->local.sparse_alpha = 1;
    return spec;
}

static inline bool is_local(const char *rule) { return rule_find(rule)->kind == RULE_LOCAL; }
static inline bool is_streaming(const char *rule) { return strcmp(rule, "streaming-diloco") == 0; }
static inline bool is_acco(const char *rule) { return strcmp(rule, "acco") == 0; }

// The noisy problem under a rule. All rules whose workers step together take as many
// micro-batches per commit. Epsilon is as large as the gradients: with a small one AdamW
// divides gradients by their own size, and a wrong constant factor would not show.
static inline RunSpec noisy_spec(const char *rule, size_t parameter_count) {
    RunSpec spec = scalar_spec(rule, NULL, 2);
    spec.commits = 5;
    spec.finish = true;
    spec.settings.gradient_clip = 0.05;
    spec.settings.optimizer.epsilon = 1e-3;
    spec.parameter_count = parameter_count;
    set_layers(&spec);
    spec.micro_batch = noisy_micro_batch;
    spec.start = 0.25f;
    SchedulerSettings *settings = &spec.settings;
    settings->local.steps = is_streaming(rule) ? 6 : 3;
    settings->local.fragments = is_streaming(rule) ? 2 : 1;
    settings->local.delay = 1;
    NesterovStep outer = {.learning_rate = 0.7f, .momentum = 0.6f, .alpha = 0.4f};
    MomentumStep co2 = {.beta = 0.3f, .alpha = 0.9f, .phi = 0.02f, .gap = 1.25f};
    settings->local.outer_nesterov = outer;
    settings->local.outer_momentum = co2;
    settings->local.sparse_beta = 0.9f;
    settings->local.sparse_eager = true;
    settings->local.sparse_alpha = 0.8f;
    return spec;
}

// The same run, changed so that a wrong order of events is most likely to show: many
// small buckets and messages, pauses in both passes, delayed messages, and no looks,
// because they wait.
static inline RunSpec restless(const RunSpec *spec, double chaos_seconds) {
    RunSpec other = *spec;
    other.settings.overlap = true;
    other.settings.bucket_bytes = spec->parameter_count * sizeof(float) / 7 + 1;
    other.message = 256;
    other.blind = true;
    other.parts = 5;
    other.pause_seconds = chaos_seconds / 8;
    other.chaos_seconds = chaos_seconds;
    return other;
}

// ---- Comparing ------------------------------------------------------------------------

static inline void expect_number(double value, double expected, double tolerance, const char *what,
                                 int index) {
    char text[400];
    snprintf(text, sizeof text, "%.300s [%d]", what, index);
    assert_close(value, expected, tolerance, text);
}

static inline void expect_committed(const RunResult *result, int element, const double *expected, int count,
                                    double tolerance) {
    assert_int_equal(result->last + 1, count);
    for (int i = 0; i < count; i++) {
        expect_number(result->looks[i].committed[element], expected[i], tolerance, "committed at look", i);
    }
}

static inline void expect_seen(const RunResult *result, int element, const double *expected, int count,
                               double tolerance) {
    assert_true(result->micro_batches == (uint64_t)count);
    for (int i = 0; i < count; i++) {
        expect_number(result->seen[i][element], expected[i], tolerance, "evaluated by micro-batch", i);
    }
}

static inline void expect_moments(const RunResult *result, const double *first, const double *second,
                                  int count) {
    for (int i = 0; i < count; i++) {
        expect_number(result->looks[i].first_moment[0], first[i], 1e-6, "m at look", i);
        expect_number(result->looks[i].second_moment[0], second[i], 1e-6, "v at look", i);
    }
}

static inline void expect_same_floats(const float *a, const float *b, size_t count, const char *what,
                                      int look) {
    for (size_t i = 0; a != NULL && b != NULL && i < count; i++) {
        if (wire_float_bits(a[i]) != wire_float_bits(b[i])) {
            fail_msg("%s: look %d, element %zu: %.9g and %.9g", what, look, i, (double)a[i], (double)b[i]);
        }
    }
}

static inline void expect_same_report(const CommitReport *a, const CommitReport *b, const char *what,
                                      int look) {
    expect_number(b->loss, a->loss, 0, what, look);
    expect_number(b->gradient_norm, a->gradient_norm, 0, what, look);
    expect_number(b->learning_rate, a->learning_rate, 0, what, look);
    expect_number(b->micro_batches, a->micro_batches, 0, what, look);
    expect_number(b->gradients_done, a->gradients_done, 0, what, look);
    expect_number((double)b->commit, (double)a->commit, 0, what, look);
}

// On every rank of this process, everything that both runs have looked at is the same,
// bit for bit; and parameters have moved.
static inline void expect_same_results(const RunSpec *spec, int ranks, const RunResult *a, const RunResult *b,
                                       const char *what) {
    for (int rank = 0; rank < ranks; rank++) {
        if (!have_rank(rank)) { continue; }
        assert_int_equal(a[rank].last, b[rank].last);
        for (int i = 0; i <= a[rank].last; i++) {
            const Look *one = &a[rank].looks[i], *other = &b[rank].looks[i];
            expect_same_floats(one->committed, other->committed, spec->parameter_count, what, i);
            expect_same_floats(one->local, other->local, spec->parameter_count, what, i);
            expect_same_report(&one->report, &other->report, what, i);
        }
        const float *first = a[rank].looks[0].committed, *last = a[rank].looks[a[rank].last].committed;
        if (is_sparse(spec->rule)) { // which may never have sent the first element
            assert_memory_not_equal(first, last, spec->parameter_count * sizeof(float));
        } else {
            assert_true(first[0] != last[0]);
        }
        assert_non_null(b[rank].looks[b[rank].last].committed);
    }
}

static inline void expect_replicas_agree(int ranks, const RunResult *results, const char *what) {
    for (int rank = 0; rank < ranks; rank++) {
        for (int i = 0; have_rank(rank) && i <= results[rank].last; i++) {
            for (int other = 1; other < ranks; other++) {
                if (results[rank].looks[i].hashes[other] != results[rank].looks[i].hashes[0]) {
                    fail_msg("%s: ranks 0 and %d disagree at look %d", what, other, i);
                }
            }
        }
    }
}

// Runs `other` and compares it with the results of an earlier run.
static inline void expect_same_run(const RunSpec *other, int ranks, const RunResult *before) {
    RunResult results[MAX_RANKS];
    run_world(other, ranks, results);
    const char *what = describe(other, ranks);
    expect_same_results(other, ranks, before, results, what);
    expect_replicas_agree(ranks, results, what);
    free_results(results, ranks);
}

// Runs both and compares them. Returns false where run_world does.
static inline bool compare_runs(const RunSpec *one, const RunSpec *other, int ranks) {
    RunResult results[MAX_RANKS];
    if (!run_world(one, ranks, results)) { return false; }
    expect_replicas_agree(ranks, results, describe(one, ranks));
    expect_same_run(other, ranks, results);
    free_results(results, ranks);
    return true;
}

// The main function of a test program. Returns its exit code.
static inline int run_rules_tests(const struct CMUnitTest *tests, size_t count) {
    Transport transport;
    Error error = {""};
    if (!transport_open(&transport, &error)) { return 1; }
    process_transport = &transport;
    int failed = _cmocka_run_group_tests("tests", tests, count, NULL, NULL);
    transport_close(&transport);
    return failed == 0 ? 0 : 1;
}
