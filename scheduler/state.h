// state.h: what one worker, a rank, holds: settings, buffers, streams and the round's state.
// start.h begins and ends it; micro_batch.h, job.h and scheduler.h say what happens to it.
//
//   buffer       elements   who writes it                             who reads it            for which rules
//   parameters   padded     hand_over; in synchronous rules the job;  compute; the job, on    all
//                           in local rules compute                    coarse wires
//   casts        padded     as parameters, in whose place they are    compute                 synchronous, overlapped;
//                                                                                             GPUs in bf16
//   gradients    padded     compute; the job where compute waits      hand_over; in           all
//                           for it                                    synchronous rules the job
//   comm_buffer  padded     the job, hand_over; local rules: compute  the job, hand_over      overlapped, local;
//                           before it sends                                                   sparse: the error
//   outer        count      the outer step                            the outer step,         local
//                                                                     validation
//   momentum     count      the outer step                            the outer step          local, not sparse
//   start        count      compute, before a period or at a sending  the outer step          local, eager or
//                                                                                             sparse with a delay
//   blocks       all ranks' the job; this rank's compute              the job; the outer step local, sparse
//   optimizer    owned      the job; in local rules compute           the same                all
//
// There are three kinds of rules:
//   synchronous   compute waits for the optimizer step; gradients and parameters travel
//                 during the passes that make and use them
//   overlapped    compute continues during the whole job, at parameters of an earlier one
//   local         every worker steps an optimizer of its own; workers exchange
//                 pseudo-gradients, the distance from the common parameters to their own
#pragma once

#include "comm/exchange.h"
#include "comm/trace.h"
#include "runtime/pace.h"
#include "scheduler/optimizer.h"
#include "scheduler/spike.h"

// ---- What is trained: anything that yields gradients ----------------------------------

typedef struct MicroBatchResult {
    double loss;         // mean over the predicted tokens; 0 where none is predicted
    double perfect_loss; // what a perfect model would reach on them; NaN where unknown
    double predicted;    // tokens that count: the weight of both losses
} MicroBatchResult;

typedef struct Problem {
    void *self;
    size_t parameter_count;
    double tokens; // predicted in a micro-batch, where nothing is masked
    // gradients (parameter_count) += the gradient of the summed losses of this worker's micro-batch
    // `index` (0, 1, ...), divided by `tokens`, at `parameters`; with pace->begins = it: nobody
    // clears them. The compute stream calls it. It must call pace->need before it reads parameters.
    MicroBatchResult (*micro_batch)(void *self, Stream *stream, uint64_t index, const void *parameters,
                                    float *gradients, const Pace *pace);
    // What a micro-batch keeps of the parameters, or NULL. A step of parameters that are the
    // master copy themselves writes it, while compute waits.
    WeightCopy *copy;
    // Where each layer begins, and where the last one ends: (layer_count + 1). For
    // fragments; what lies outside belongs to no layer.
    const size_t *layer_begins;
    int layer_count;
} Problem;

// ---- Settings -------------------------------------------------------------------------

typedef enum RuleKind { RULE_SYNCHRONOUS, RULE_OVERLAPPED, RULE_LOCAL } RuleKind;

typedef struct LocalSettings {   // of local rules
    int steps;                   // inner steps between two exchanges of the same element
    int fragments;               // of the model, exchanged in turn
    int delay;                   // inner steps between sending a fragment and applying it
    NesterovStep outer_nesterov; // without weights, as the next
    MomentumStep outer_momentum;
    bool outer_eager; // a worker applies its own part of the coming outer step at once
    // Only the largest elements of a pseudo-gradient travel (kernels/sparse.h), and the
    // communication buffer holds this rank's error between exchanges. One fragment.
    bool sparse;
    bool sparse_eager;  // a worker's own parameters have what it has not sent yet
    float sparse_beta;  // what is left of an error after a period
    float sparse_alpha; // SparseStep::alpha
} LocalSettings;

typedef struct DeviceSettings {
    const Gpu *gpu;         // NULL: on the CPU
    Precision precision;    // in which a problem on a GPU computes
    Nccl *nccl;             // NULL: data of GPUs travel through the host
    int product_processors; // of the GPU, that products during an exchange may count on; 0: all
    int beside[2];          // micro-batches that overlap a measured exchange: a COMMIT's, an ESTIMATE's.
                            // 0: not measured, so all during a job
} DeviceSettings;

// Micro-batches that a rank has in a turn, turn (ranks); NULL: one.
static inline int micro_batches_in_turn(const int *turn, int rank) { return turn != NULL ? turn[rank] : 1; }

// The number, over all ranks, of a micro-batch of a rank: what it is trained on follows from that.
// In a turn every rank has its number of micro-batches. As long as they have any left, ranks take
// one each. So unequal ranks leave nothing out.
static inline uint64_t micro_batch_number(const int *turn, int ranks, int rank, uint64_t index) {
    uint64_t own = (uint64_t)micro_batches_in_turn(turn, rank), number = 0;
    for (int i = 0; i < ranks; i++) {
        uint64_t count = (uint64_t)micro_batches_in_turn(turn, i), before = index % own + (i < rank ? 1 : 0);
        number += index / own * count + (before < count ? before : count);
    }
    return number;
}

// Behind all that a rank has begun.
static inline uint64_t micro_batches_passed(const int *turn, int ranks, int rank, uint64_t begun) {
    return begun > 0 ? micro_batch_number(turn, ranks, rank, begun - 1) + 1 : 0;
}

typedef struct SchedulerSettings {
    RuleKind kind;
    bool replicated; // every rank holds and steps the whole optimizer state
    bool overlap;    // false: the same schedule, with a full wait after every operation
    bool adaptive;   // accumulate() computes for as long as the job runs
    // This worker's per commit, in local rules per inner step; adaptive: the least.
    int micro_batches;
    const int *turn; // (ranks): of every worker (micro_batch_number); NULL: not given. Borrowed
    // Rules with two rounds per commit: how many of these micro-batches overlap the COMMIT job;
    // and the micro-batches of the first round of a run.
    int round_a, first_round;
    int64_t sequential;  // overlapped rules: this many commits at the start wait for their jobs
    size_t bucket_bytes; // synchronous rules: bytes of gradients that travel together; 0: all of them
    WireFormat wire, estimate_wire;
    // All ranks compute with bf16 casts, so these are gathered where the wire is fp32: the same
    // weights with half of the bytes. keeps_casts: as bf16 in s->casts, and not as floats in
    // s->parameters, which a coarse wire needs for differences to them.
    bool gathers_casts, keeps_casts;
    double gradient_clip; // 0: none
    SpikePolicy on_spike;
    double spike_limit; // SpikeDetector::limit
    // Training ends after this many micro-batch gradients of all workers. What remains
    // bounds the last period of local rules.
    double target;
    bool rate_by_commits; // the learning rate follows commits, not micro-batch gradients
    LearningRate rate;
    OptimizerSettings optimizer;
    LocalSettings local;
    DeviceSettings device;
} SchedulerSettings;

// Whether each rank steps a shard, which it then sends to the others.
static inline bool scheduler_shards(const SchedulerSettings *settings) {
    return !settings->replicated && settings->kind != RULE_LOCAL;
}

// Whether ranks keep what rounding loses of the sums of a commit: in formats of 4 bits. With 8
// there is nothing to be gained; an estimate is not kept, so neither is what it lost.
static inline bool scheduler_feeds_back(const SchedulerSettings *settings, int ranks) {
    return settings->kind != RULE_LOCAL && ranks > 1 && WIRE_CODECS[settings->wire].bits < 8;
}

// ---- State ----------------------------------------------------------------------------

// The record that travels with a gradient sum. The ranks exchange their records with every job and
// add them up in the order of ranks, so that all take the same decisions.
typedef struct Tally {
    // Sums over ranks, all of them double, down to `ended`: tally_add.
    double micro_batches;
    double predicted;          // tokens
    double loss, perfect_loss; // sums over the predicted tokens
    double not_finite; // micro-batches whose loss is not finite; averages: 1 more if what is sent is not
    double left_out;   // local rules: inner steps that were not made
    // Also sums; the job fills them in.
    double shard_square; // sum of squares of the gradient sum in this rank's shard
    double stops;        // ranks that were asked to stop: all ranks learn of it with the same job
    double saves;        // ranks whose clock says that it is time for a checkpoint
    double ended;        // ranks whose checkpoint writer has ended
    // This rank's own, which is not added up.
    double sent_square; // sum of squares of what it sent, before the sum; the job fills it in
    SpikeSite site;
} Tally;

static inline void tally_add(Tally *sum, const Tally *tally) {
    double *sums = (double *)sum;
    const double *added = (const double *)tally;
    for (size_t i = 0; i < offsetof(Tally, sent_square) / sizeof(double); i++) { sums[i] += added[i]; }
}

// Nats per predicted token; NaN where none is predicted.
static inline double tally_mean_loss(const Tally *tally) { return tally->loss / tally->predicted; }

// What a sum of gradients is divided by, to be a mean over its predicted tokens, however a batch is
// cut into micro-batches and ranks: their number in whole micro-batches, which is exactly the
// number of micro-batches where nothing is masked. Without a predicted token the sum remains zero.
static inline double tally_divisor(const Tally *tally, const Problem *problem) {
    return tally->predicted > 0 ? tally->predicted / problem->tokens : 1;
}

// FREE: no stream uses it. READY: it waits for its reader. Others: a stream uses it.
typedef enum BufferState { BUFFER_FREE, BUFFER_WRITING, BUFFER_READY, BUFFER_READING } BufferState;

typedef struct Buffer {
    float *data; // elements past parameter_count are zero
    Tally tally; // of the gradient sum that it holds; in local rules since the latest exchange
    BufferState state;
} Buffer;

static inline void buffer_change(Buffer *buffer, BufferState from, BufferState to) {
    assert(buffer->state == from);
    buffer->state = to;
}

static inline void buffers_exchange(Buffer *one, Buffer *other) {
    float *data = one->data;
    one->data = other->data;
    other->data = data;
}

// COMMIT steps the optimizer. ESTIMATE makes the parameters that such a step would give.
// COMMIT_THEN_PREDICT commits, and then spreads an estimate of the next commit. AVERAGE adds up
// pseudo-gradients, or brings their largest elements to all ranks (settings.local.sparse).
typedef enum JobKind { COMMIT, ESTIMATE, COMMIT_THEN_PREDICT, AVERAGE } JobKind;

// What becomes of the gradient sum after hand_over: it begins anew, or keeps growing.
typedef enum HandOver { CLEAR, KEEP } HandOver;

// One job of the communication stream. The host writes it before the launch, the
// communication stream fills it in, and the host reads it after H2 (scheduler.h).
typedef struct Job {
    JobKind kind;
    bool follows; // it sends gradients while the last backward pass of accumulate() makes them
    int fragment; // local rules: the fragment that travels
    // job_prepare derives these from the kind of the job and of the rule.
    bool commits;          // the optimizer's state moves
    bool predicts;         // the result is an estimate of the next parameters; an AVERAGE does neither
    Layout layout;         // of the vector that travels
    WireFormat wire;       // in which sums travel
    size_t bucket_cells;   // that travel together
    bool inspects;         // this rank's own gradients are checked before they are added up
    bool all_reduces;      // sums travel to all ranks at once, so nothing is gathered after the step
    int64_t commit;        // commits before it, for messages and traces
    double gradients_done; // micro-batch gradients committed before it, of all workers
    double learning_rate;
    // What the job finds.
    Tally total;          // of all workers
    double gradient_norm; // of the mean gradient, before clipping; of an AVERAGE: in, of this worker
    double bad_element;   // of what this worker sends: SpikeSite::element
    double sent_square;   // of what this worker sends: the sum of squares
    SpikeKind spike;      // why no step was made; the same on all ranks
    int first_bad_rank;   // the lowest rank with a bad value, or the one with the largest; -1: unknown
    SpikeSite site;       // of that rank
    double largest_norm, largest_loss; // the largest values that are no spike
    const float *result;               // (shard): what is gathered; NULL: it stands over the reduced gradient
    bool is_cast;                      // the step has also written it in bf16
} Job;

// What happened between two commits. A local rule reports once per exchange, and what it
// reports are the steps up to the sending: the result may come some steps later.
typedef struct CommitReport {
    int64_t commit;            // number of commits until then; in local rules of inner steps
    double gradients_done;     // micro-batch gradients committed until then, of all workers
    double micro_batches;      // in this report, of all workers
    double predicted;          // tokens in them
    double loss, perfect_loss; // means over these tokens; NaN where there are none
    double learning_rate, gradient_norm;
    TraceSums seconds; // of this worker
} CommitReport;

// A step that was not made.
typedef struct SpikeReport {
    SpikeKind kind;
    int64_t commit; // commits before it
    int rank;       // which rank caused it; -1: unknown
    SpikeSite site;
    // The norm or the loss that was too large, and the largest that is no spike.
    double measured, largest;
    double steps; // how many steps; above 1 where a local rule reports a period
} SpikeReport;

// Local rules: segments (fragment_has) that travel together, one behind the other.
typedef struct Fragment {
    Layout layout;      // of the packed vector
    int64_t applied_at; // the inner step at which it was last applied; sparse: sent
} Fragment;

// Sparse: encoded vectors of sparse_blocks(parameter_count) blocks.
typedef struct SparseState {
    SparseBlock *sent;     // this rank's
    SparseBlock *received; // (size, blocks): of all ranks
    float *weights;        // (size): of all ranks, in the latest mean
    SparseBlock *slices;   // (1 + size, slice), on the host: the part of these under way
    size_t slice;          // blocks that travel together
} SparseState;

// Bytes of all ranks together that travel at a time: enough to hide a link's latency, and few
// enough that a deadline for them says something.
enum { SPARSE_SLICE_BYTES = 2 << 20 };

typedef struct LocalState {
    float *outer, *momentum; // (parameter_count); sparse: momentum is NULL
    float *start;            // (parameter_count): where this worker's period began; NULL: at `outer`.
                             // sparse: its parameters at the latest sending; NULL: not kept
    Fragment *fragments;     // (settings.local.fragments)
    int fragment;            // the next one to be sent
    SparseState sparse;
    Tally tally_before; // since the latest exchange, without the inner step under way
    double norm, rate;  // of the latest inner step
} LocalState;

// How far the backward pass of a round's last micro-batch has come: the positions to
// which `finished` was raised, on a GPU with a mark in compute's queue.
typedef struct Announcements {
    int count;
    size_t positions[LAYOUT_CELLS + 1];
    void *marks[LAYOUT_CELLS + 1];
} Announcements;

typedef struct SpikeState {
    SpikeDetector norms, losses; // of commits; in local rules of this worker's inner steps
    double in_a_row;             // commits; in local rules inner steps of this worker
    double count, rollbacks;     // of the whole run
    SpikeReport latest;
    bool rollback_due;
    bool failed; // a spike ended the run; nothing was updated with it
} SpikeState;

// What ranks tell each other with every job, besides Transport::asked_to_stop. Any thread may
// write the first two, atomically; the others are what all ranks have learned.
typedef struct Wishes {
    bool save_requested;   // by this rank's clock it is time for a checkpoint
    bool writer_done;      // this rank's checkpoint writer has ended
    bool stop_agreed;      // a rank was asked to stop
    bool save_agreed;      // by a rank's clock it is time for a checkpoint
    bool all_writers_done; // the checkpoint writers of all ranks have ended
} Wishes;

typedef struct Scheduler {
    SchedulerSettings settings;
    Problem problem;
    Transport *transport;
    Trace trace;
    CommBackend comm;
    Stream *compute, *communication;
    ThreadPool *communication_pool; // one thread
    Event computed, stepped, communicated;

    // Vectors.
    Layout layout;                             // of parameters and gradients over the ranks
    Buffer parameters, gradients, comm_buffer; // where casts are kept, parameters.data is NULL
    // (padded) each, where casts are kept. Overlapped rules: a job gathers the latter.
    Real *casts, *arriving_casts;
    Optimizer optimizer;
    float *unsent;            // (padded): Collective::unsent of commits; NULL: nothing is fed back
    Watermark finished;       // gradients, counted from the end, that will not change any more in this round
    Watermark arrived;        // parameters, counted from the start, that may be read
    double *norm_partials;    // scratch of the norm: the job's; in local rules compute's
    double *inspect_partials; // scratch of the job's inspection of what it sends
    Tally *tallies;           // (size) records of all ranks

    // Compute writes: the round under way.
    uint64_t micro_batches_begun; // by this worker, since the start of the run
    uint64_t parameters_version;  // changes whenever what compute reads changes; Pace::version
    int round_begun, round_count; // micro-batches of accumulate()
    Announcements announced;
    LocalState local;

    // The host and the communication stream take turns: the job under way.
    Job job;
    Job gathering; // copy of the job whose result is being spread; the communication stream's own
    bool job_in_flight;
    Wishes wishes;

    // The host writes: the run so far.
    double gradients_done; // micro-batch gradients committed, of all workers
    CommitReport report;   // of the latest commit
    int64_t reports;       // how many there have been
    SpikeState spikes;
} Scheduler;

static inline bool scheduler_is_asked_to_stop(const Scheduler *s) {
    return __atomic_load_n(&s->transport->asked_to_stop, __ATOMIC_RELAXED);
}

// The copy that micro-batches compute with; NULL: there is none.
static inline Real *scheduler_copy(const Scheduler *s) {
    return s->problem.copy != NULL ? s->problem.copy->data : NULL;
}

// What compute reads has changed. copied: and so has the copy of it.
static inline void scheduler_change_parameters(Scheduler *s, bool copied) {
    s->parameters_version++;
    if (copied && s->problem.copy != NULL) { s->problem.copy->version = s->parameters_version; }
}

static inline const void *scheduler_weights(const Scheduler *s) {
    return s->settings.keeps_casts ? (const void *)s->casts : s->parameters.data;
}

// What a job adds up: the gradients themselves where compute waits for it.
static inline Buffer *job_buffer(Scheduler *s, const Job *job) {
    return job->follows ? &s->gradients : &s->comm_buffer;
}

// What the communication buffer has been filled with waits for its launch, with its record.
static inline void scheduler_give_sum(Scheduler *s, HandOver mode) {
    Tally *given = &s->gradients.tally;
    s->comm_buffer.tally = *given;
    if (mode == CLEAR) { memset(given, 0, sizeof *given); }
    buffer_change(&s->comm_buffer, BUFFER_WRITING, BUFFER_READY);
}

// ---- Fragments ------------------------------------------------------------------------

// The flat vector is a row of segments 0 .. layer_count + 1: what lies before the first layer, the
// layers, and what lies behind the last. Where one begins.
static inline size_t segment_begin(const Problem *problem, int segment) {
    if (segment == 0) { return 0; }
    return problem->layer_count > 0 && segment <= problem->layer_count + 1
               ? problem->layer_begins[segment - 1]
               : problem->parameter_count;
}

// Layers go to the fragments in turn. What is in no layer, above all the tied embedding,
// belongs to the first one.
static inline bool fragment_has(const Scheduler *s, int fragment, int segment) {
    int l = segment - 1;
    return fragment == (l < 0 || l >= s->problem.layer_count ? 0 : l % s->settings.local.fragments);
}
