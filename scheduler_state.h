// scheduler_state.h: what one worker holds: settings, buffers, streams, and the state of
// the round. communication_job.h and scheduler.h say what happens to it.
//
//   buffer       elements   written by                                    read by                            which rules
//   parameters   padded     boundary; the job where compute waits for it  compute; the job (coarse wires)    all
//   gradients    padded     compute (+=), boundary (clears);              boundary; the job where it         all
//                           the job where compute waits for it            follows the backward pass
//   exchange     padded     job, boundary                                 job, boundary                      overlapped and local rules
//   outer        count      boundary                                      boundary, validation               local rules
//   momentum     count      boundary                                      boundary                           local rules
//   optimizer    its own    the job; in local rules compute               the same                           all
//
// Three kinds of rules:
//   synchronous (ddp, zero1)            compute waits for the step; gradients and parameters travel beside the passes that make and use
//                                       them
//   overlapped (dpu, acco-wp, acco)     compute goes on beside the whole job, on parameters that an earlier job made
//   local (co2, diloco, ...)            every worker steps an optimizer of its own, and what is exchanged is how far it has come
#ifndef ACCO_SCHEDULER_STATE_H
#define ACCO_SCHEDULER_STATE_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/collectives.h"
#include "comm/trace.h"
#include "optimizer.h"
#include "runtime/pace.h"
#include "runtime/watermark.h"
#include "spike.h"

// ---------------------------------------------------------------------------------------
// What is trained: anything that yields gradients

typedef struct MicroBatchResult {
    double loss;         // mean over the micro-batch
    double perfect_loss; // what a perfect model would reach on it; NaN where unknown
} MicroBatchResult;

typedef struct Problem {
    void *self;
    size_t parameter_count;
    // gradients (parameter_count) += the gradient of the mean loss of this worker's
    // micro-batch number `index` (0, 1, ...) at `parameters`. Called by the compute
    // stream; the pointers change from call to call. It calls pace->need before it reads
    // parameters, and may call pace->finish.
    MicroBatchResult (*micro_batch)(void *self, Stream *stream, uint64_t index, const float *parameters,
                                    float *gradients, const Pace *pace);
    // Where each layer begins, and where the last one ends: (layer_count + 1). What lies
    // outside belongs to no layer. For fragments.
    const size_t *layer_begins;
    int layer_count;
} Problem;

// ---------------------------------------------------------------------------------------
// Settings

typedef enum RuleKind { RULE_SYNCHRONOUS, RULE_OVERLAPPED, RULE_LOCAL } RuleKind;

typedef struct SchedulerSettings {
    RuleKind kind;
    bool replicated;       // every rank holds and steps the whole optimizer state (ddp)
    bool overlap;          // false: the same schedule with a full wait after everything
    bool adaptive;         // accumulate() goes on while the job runs
    int round_size;        // micro-batches of one accumulate(): exactly, or at least when adaptive
    int first_round_size;  // of the first round of acco; 0: as the others
    int rounds_per_commit; // accumulate() calls per commit
    int64_t sequential;    // overlapped rules: the first commits, which wait for their jobs
    size_t bucket;         // bytes of gradients that travel together in synchronous rules; 0: all of them
    WireFormat wire, estimate_wire;
    double gradient_clip; // 0: none
    SpikePolicy on_spike;
    double spike_limit; // SpikeDetector::limit
    double
        target; // micro-batch gradients of all workers at which training ends; what remains bounds the last round of local rules
    bool rate_by_commits;
    LearningRate rate;
    OptimizerSettings optimizer;
    // Local rules.
    int steps;     // inner steps of a period: H of diloco, tau of co2
    int fragments; // P
    int delay;     // inner steps between sending a fragment and applying it: tau of streaming-diloco
    bool strided;  // layer l belongs to fragment l mod P; otherwise each fragment is a stretch of layers
    NesterovStep outer_nesterov; // inverse_ranks is filled in
    MomentumStep outer_momentum;
    // Where all of it lies and runs.
    const Gpu *gpu;      // NULL: on the CPU
    Precision precision; // of what a problem on a GPU computes in
    Nccl *nccl;          // NULL: without
} SchedulerSettings;

// ---------------------------------------------------------------------------------------
// State

// FREE: no stream uses it. READY: its content waits for its reader. Others: a stream is
// at it.
typedef enum BufferState { BUFFER_FREE, BUFFER_WRITING, BUFFER_READY, BUFFER_READING } BufferState;

typedef struct Buffer {
    float *data; // elements past parameter_count are zero
    BufferState state;
} Buffer;

static inline void buffer_change(Buffer *buffer, BufferState from, BufferState to) {
    assert(buffer->state == from);
    buffer->state = to;
}

// What travels with a gradient sum. Exchanged between all ranks as one record and added
// in the order of ranks.
typedef struct Tally {
    double micro_batches;
    double loss, perfect_loss; // sums over the micro-batches
    double not_finite;         // how many of them had a loss that is not a finite number
    double left_out;           // local rules: inner steps that were not made
    double square;     // sum of squares of the gradient sum in what this rank owns; filled in by the job
    double stops;      // ranks that were asked to stop: all learn of it with the same job, which fills it in
    double ended;      // ranks whose work beside training has ended; filled in by the job
    double own_square; // of the gradients of this rank alone; filled in by the job, no sum
    SpikeSite site;    // of this rank alone; no sum
} Tally;

// The members of a tally that are sums. They are added, written to a checkpoint and read
// from it by this table (checkpoint/checkpoint.h).
typedef struct TallySum {
    const char *name; // in a checkpoint; NULL: filled in by the job, and not saved
    size_t offset;
    bool is_amount; // never negative, always finite: a checkpoint with another value is refused
} TallySum;

static const TallySum TALLY_SUMS[] = {
    {"micro_batches", offsetof(Tally, micro_batches), true},
    {"loss", offsetof(Tally, loss), false},
    {"perfect_loss", offsetof(Tally, perfect_loss), false},
    {"not_finite", offsetof(Tally, not_finite), true},
    {"left_out", offsetof(Tally, left_out), true},
    {NULL, offsetof(Tally, square), true},
    {NULL, offsetof(Tally, stops), true},
    {NULL, offsetof(Tally, ended), true},
};

enum { TALLY_SUM_COUNT = sizeof TALLY_SUMS / sizeof TALLY_SUMS[0] };

static inline double *tally_sum(Tally *tally, const TallySum *sum) {
    return (double *)(void *)((char *)tally + sum->offset);
}

static inline void tally_add(Tally *sum, const Tally *tally) {
    for (int i = 0; i < TALLY_SUM_COUNT; i++) {
        *tally_sum(sum, &TALLY_SUMS[i]) += *tally_sum((Tally *)tally, &TALLY_SUMS[i]);
    }
}

// COMMIT_THEN_PREDICT commits, then spreads an estimate of the next commit. AVERAGE adds
// up what local rules exchange.
typedef enum JobKind { COMMIT, ESTIMATE, COMMIT_THEN_PREDICT, AVERAGE } JobKind;
typedef enum HandOver { CLEAR, KEEP } HandOver;

// Written by the host before the launch, filled by the communication stream, read by the
// host after H2.
typedef struct Job {
    JobKind kind;
    int64_t commit; // commits before it, for messages and traces
    int fragment;   // in: what travels in a local rule
    bool follows; // the gradients are sent as the last backward pass of the coming accumulate() finishes them
    Tally tally;  // in: of this worker
    double learning_rate;
    Tally total;          // out: of all workers
    double gradient_norm; // out (in local rules in: of this worker): of the mean gradient, before clipping
    double bad_element;   // of what this worker sends: SpikeSite::element
    double own_square;    // the same: its sum of squares
    SpikeKind spike;      // out: why the step was not made, the same on all ranks
    int first_bad_rank; // out: the lowest rank with something that was not finite, or the one with the largest; -1: nobody's alone
    SpikeSite site;                    // out: of that rank
    double largest_norm, largest_loss; // out: of those that are no spike
} Job;

// What happened between two commits. In local rules it comes once per exchange, and
// micro_batches and losses are those of the steps before the exchange was sent.
typedef struct CommitReport {
    int64_t commit;        // number of commits so far; in local rules inner steps
    double micro_batches;  // in this report, of all workers
    double gradients_done; // micro-batch gradients committed so far, of all workers
    double loss, perfect_loss;
    double learning_rate, gradient_norm;
    double compute_seconds, communication_seconds,
        exposed_seconds; // of this worker; exposed: compute was idle while data travelled
} CommitReport;

// A step that was not made.
typedef struct SpikeReport {
    SpikeKind kind;
    int64_t commit; // commits before it
    int rank;       // whose; -1: nobody's alone
    SpikeSite site;
    double measured, largest; // where that is why: the norm or the loss, and the largest that is no spike
    double steps;             // how many; more than one where local rules report a period
} SpikeReport;

typedef struct FragmentRange {
    size_t begin, end;
} FragmentRange;

// Ranges of the flat vector that travel together in local rules, packed one behind the
// other.
typedef struct Fragment {
    FragmentRange *ranges;
    int range_count;
    Layout layout;      // of the packed vector
    int64_t applied_at; // the inner step at which it was last applied
} Fragment;

typedef struct Scheduler {
    SchedulerSettings settings;
    Problem problem;
    Transport *transport;
    Trace trace;
    CommBackend comm;
    Stream *compute, *communication;
    ThreadPool *communication_pool; // of one thread
    Event *computed, *stepped, *communicated;
    Watermark
        finished; // how much of the gradients, counted from the end, will not change any more in this round
    Watermark arrived; // how much of the parameters, from the start, may be read
    Layout layout;     // of parameters and gradients over the ranks
    Buffer parameters, gradients, comm_buffer;
    float *outer, *momentum;  // (parameter_count)
    Fragment *fragments;      // (settings.fragments)
    int fragment;             // the next one to be sent
    double *norm_partials;    // scratch of whoever steps: the job, in local rules compute
    double *inspect_partials; // scratch of the job's look at what it sends
    Tally *tallies;           // (size) records of all ranks
    Optimizer optimizer;
    Tally tally;                  // what `gradients` holds; in local rules since the latest exchange
    uint64_t micro_batches_begun; // by this worker, ever
    uint64_t parameters_version;  // changes whenever what compute reads does; Pace::version
    bool announcing;              // the micro-batch that runs is the last one of a round that a job follows
    size_t announced;             // in that one, the position of `finished` so far
    double span_began;            // of the compute span under way
    Job job;
    Job gathering; // the job whose result is being spread; the communication stream's
    bool job_in_flight;
    double gradients_done;
    double local_norm, local_rate; // of the latest inner step
    Tally
        tally_before; // in local rules: since the latest exchange, without the inner step under way, whose `tally` is then
    SpikeDetector norms, losses; // of commits; in local rules of this worker's inner steps
    double spikes_in_a_row;      // commits, in local rules inner steps of this worker
    double spikes, rollbacks;    // of the whole run
    SpikeReport spike;           // the latest
    bool rollback_due;
    CommitReport report;   // of the latest commit
    int64_t reports;       // how many there have been
    bool failed;           // by a spike: nothing was updated with it
    bool stop_requested;   // atomic: somebody wants this rank to stop
    bool stop_agreed;      // all ranks know, since the same job, that one of them was asked to
    bool writer_done;      // atomic: what this rank does beside training (checkpoint/save.h) has ended
    bool all_writers_done; // all ranks know, since the same job, that it has on all of them
} Scheduler;

static inline Buffer *scheduler_reduce_buffer(Scheduler *s) {
    return s->settings.kind == RULE_SYNCHRONOUS ? &s->gradients : &s->comm_buffer;
}

// ---------------------------------------------------------------------------------------
// Fragments

static inline void fragment_add(Fragment *fragment, size_t begin, size_t end) {
    if (begin == end) { return; }
    fragment->ranges[fragment->range_count].begin = begin;
    fragment->ranges[fragment->range_count++].end = end;
    fragment->layout.count += end - begin;
}

static inline int fragment_of_layer(const SchedulerSettings *settings, int layer, int layers) {
    return settings->strided ? layer % settings->fragments
                             : (int)((int64_t)layer * settings->fragments / layers);
}

// Every layer belongs to one fragment; what is in no layer, the tied embedding above all,
// to the first.
static inline void fragments_make(Scheduler *s) {
    const Problem *problem = &s->problem;
    int layers = problem->layer_count;
    size_t before = layers > 0 ? problem->layer_begins[0] : problem->parameter_count;
    size_t after = layers > 0 ? problem->layer_begins[layers] : problem->parameter_count;
    s->fragments = (Fragment *)calloc((size_t)s->settings.fragments, sizeof *s->fragments);
    for (int f = 0; f < s->settings.fragments; f++) {
        Fragment *fragment = &s->fragments[f];
        fragment->ranges = (FragmentRange *)calloc((size_t)layers + 2, sizeof *fragment->ranges);
        if (f == 0) { fragment_add(fragment, 0, before); }
        for (int l = 0; l < layers; l++) {
            if (fragment_of_layer(&s->settings, l, layers) == f) {
                fragment_add(fragment, problem->layer_begins[l], problem->layer_begins[l + 1]);
            }
        }
        if (f == 0) { fragment_add(fragment, after, problem->parameter_count); }
        fragment->layout = layout_make(fragment->layout.count, s->transport->size);
    }
}

static inline void fragments_free(Scheduler *s) {
    for (int f = 0; s->fragments != NULL && f < s->settings.fragments; f++) { free(s->fragments[f].ranges); }
    free(s->fragments);
    s->fragments = NULL;
}

static inline size_t fragments_longest(const Scheduler *s) {
    size_t longest = 0;
    for (int f = 0; f < s->settings.fragments; f++) {
        if (s->fragments[f].layout.count > longest) { longest = s->fragments[f].layout.count; }
    }
    return longest;
}

// ---------------------------------------------------------------------------------------
// Setting up

static inline void scheduler_reserve_local(Scheduler *s, Arena *arena) {
    size_t bytes = s->problem.parameter_count * sizeof(float);
    fragments_make(s);
    Layout longest = layout_make(fragments_longest(s), s->transport->size);
    comm_reserve(&s->comm, arena, &longest, wire_is_coarse(s->settings.wire));
    arena_reserve(arena, MEMORY_COMMUNICATION, "exchange buffer", layout_padded(&longest) * sizeof(float),
                  &s->comm_buffer.data);
    arena_reserve(arena, MEMORY_OPTIMIZER, "outer parameters", bytes, &s->outer);
    arena_reserve(arena, MEMORY_OPTIMIZER, "outer momentum", bytes, &s->momentum);
}

// Room for the norm of the gradient, which is taken of whole pieces or of all of it.
static inline size_t scheduler_norm_partials(const Scheduler *s) {
    size_t pieces = s->layout.cells * buffer_blocks(s->layout.piece),
           whole = buffer_blocks(layout_padded(&s->layout));
    return pieces > whole ? pieces : whole;
}

// Plans every buffer of the scheduler and of the transport. The scheduler must stay where
// it is.
static inline void scheduler_reserve(Scheduler *s, Arena *arena, const SchedulerSettings *settings,
                                     const Problem *problem, Transport *transport) {
    memset(s, 0, sizeof *s);
    s->settings = *settings;
    s->problem = *problem;
    s->transport = transport;
    s->norms.limit = s->losses.limit = settings->spike_limit;
    s->comm.transport = transport;
    s->comm.on_gpu = gpu_is_used(settings->gpu);
    s->comm.nccl = settings->nccl;
    s->layout = layout_make(problem->parameter_count, transport->size);
    s->settings.outer_nesterov.inverse_ranks = s->settings.outer_momentum.inverse_ranks =
        1.0f / (float)transport->size;
    bool whole = settings->replicated || settings->kind == RULE_LOCAL;
    Layout owned = whole ? optimizer_whole(problem->parameter_count) : s->layout;
    size_t padded = layout_padded(&s->layout) * sizeof(float);
    arena_reserve(arena, MEMORY_PARAMETERS, "parameters", padded, &s->parameters.data);
    arena_reserve(arena, MEMORY_GRADIENTS, "gradient accumulator", padded, &s->gradients.data);
    if (settings->kind == RULE_OVERLAPPED) {
        arena_reserve(arena, MEMORY_COMMUNICATION, "exchange buffer", padded, &s->comm_buffer.data);
    }
    if (settings->kind == RULE_LOCAL) { scheduler_reserve_local(s, arena); }
    optimizer_reserve(&s->optimizer, arena, &settings->optimizer, &owned, whole ? 0 : transport->rank, whole);
    arena_reserve_host(arena, MEMORY_WORKSPACE, "partial sums of the norm",
                       scheduler_norm_partials(s) * sizeof(double), &s->norm_partials);
    arena_reserve_host(arena, MEMORY_WORKSPACE, "partial sums of what is sent",
                       scheduler_norm_partials(s) * sizeof(double), &s->inspect_partials);
    arena_reserve_host(arena, MEMORY_WORKSPACE, "tallies of all ranks",
                       (size_t)transport->size * sizeof(Tally), &s->tallies);
    bool coarse = wire_is_coarse(settings->wire) || wire_is_coarse(settings->estimate_wire);
    if (settings->kind != RULE_LOCAL) { comm_reserve(&s->comm, arena, &s->layout, coarse); }
}

// What follows from the first parameters. A rank that starts with what others were sent
// starts with what the wire lets through.
static inline void scheduler_spread_parameters(Scheduler *s) {
    bool sharded = !s->settings.replicated && s->settings.kind != RULE_LOCAL;
    size_t count = s->problem.parameter_count;
    if (sharded) {
        optimizer_take_master(&s->optimizer, s->compute, s->parameters.data);
    } else {
        s->optimizer.master = s->parameters.data;
    }
    if (sharded && s->settings.wire == WIRE_BF16) { buffer_round(s->compute, s->parameters.data, count); }
    if (s->settings.kind == RULE_LOCAL) {
        stream_copy(s->compute, s->outer, s->parameters.data, count * sizeof(float));
    }
    stream_settle(s->compute);
}

// After arena_commit and after the caller has filled s->parameters.data (the same on
// every rank): starts the streams. `pool` serves the compute stream, and whatever part of
// a job runs while compute must wait for it. keep_trace: spans are kept for a file.
static inline void scheduler_start(Scheduler *s, ThreadPool *pool, bool keep_trace) {
    StreamPlace computing = {s->settings.gpu, s->settings.precision, false},
                communicating = {s->settings.gpu, s->settings.precision, true};
    trace_open(&s->trace, keep_trace);
    watermark_create(&s->finished, 0);
    watermark_create(&s->arrived, WATERMARK_ALL);
    s->communication_pool = thread_pool_create(1, false); // itself, no further thread
    s->compute = stream_create("compute", pool, &computing);
    s->communication = stream_create("communication", s->communication_pool, &communicating);
    s->computed = event_create();
    s->stepped = event_create();
    s->communicated = event_create();
    if (s->compute == NULL || s->communication == NULL) {
        transport_fail(s->transport, "the system gives no more threads");
    }
    s->parameters_version = 1;
    scheduler_spread_parameters(s);
}

static inline void scheduler_stop(Scheduler *s) {
    stream_destroy(s->compute);
    stream_destroy(s->communication);
    event_destroy(s->computed);
    event_destroy(s->stepped);
    event_destroy(s->communicated);
    watermark_destroy(&s->finished);
    watermark_destroy(&s->arrived);
    thread_pool_destroy(s->communication_pool);
    trace_close(&s->trace);
    fragments_free(s);
}

#endif
