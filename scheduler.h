// scheduler.h: two streams, three buffers, three verbs. Every update rule is a few lines of it.
//
// The compute stream accumulates micro-batch gradients; the communication stream runs jobs: add up the gradients of all workers, step the
// optimizer on the shard that this worker owns, gather the new parameters. A rule decides what runs beside what.
//
//   buffer       elements            written by                       read by
//   parameters   (size, shard)       boundary (and, in synchronous    compute
//                                    rules, the job)
//   gradients    (size, shard)       compute (+=), boundary (clears)  boundary (in synchronous rules, the job)
//   exchange     (size, shard)       job, boundary                    job, boundary       overlapped rules only
//   optimizer    its shard           job                              job
//
//   launch(COMMIT | ESTIMATE)   starts one job on the communication stream; an estimate leaves the optimizer bitwise as it was
//   accumulate()                micro-batches on the compute stream: a fixed number, or as long as the job still runs
//   hand_over(CLEAR | KEEP)     the boundary, the only place where both streams' buffers meet: takes the parameters of the job that ran,
//                               gives the gradient sum to the next one, and clears the accumulator or lets it grow
//   wait_for()                  the first half of the boundary alone: takes the parameters
//
// Timeline of an overlapped round:
//
//   compute         | micro-batches                  |idle| hand_over | micro-batches ...
//   communication   | exchange . scatter . step . gather  |           | ...
//                   ^ launch                    exposed ^
//
// Happens-before, every line implemented where its number is named:
//   H1  the gradient sum is complete before the boundary reads it     event `computed`, waited for by the host in accumulate()
//   H2  the job has ended before the boundary touches its buffers      event `communicated`, waited for by the host in wait_for()
//   H3  the boundary has ended before the next job starts             the boundary's work is waited for by the host; launch comes after it
//   H4  the boundary has ended before the next micro-batch starts     same
//   H5  what the job reports is complete before the host reads it     H2
// The host thread is the only one that calls these functions. Between two of its calls at most one job and one round of micro-batches run.
//
// Synchronous rules (ddp, zero1) have no exchange buffer: the job reduces in `gradients` and gathers into `parameters`, for compute is
// idle. Overlapped rules exchange two pointers instead of copying the parameters, and copy and clear the gradients in one pass.
#ifndef ACCO_SCHEDULER_H
#define ACCO_SCHEDULER_H

#include <math.h>
#include <stdint.h>

#include "learning_rate.h"
#include "optimizer.h"
#include "runtime/transport.h"

// ---------------------------------------------------------------------------------------------------------------------------------------
// What a rule trains: anything that yields gradients.

typedef struct MicroBatchResult {
    double loss;         // mean over the micro-batch
    double perfect_loss; // what a perfect model would reach on it; NaN where unknown
} MicroBatchResult;

typedef struct Problem {
    void *self;
    size_t parameter_count;
    // gradients (parameter_count) += the gradient of the mean loss of this worker's micro-batch number `index` (0, 1, ...) at `parameters`.
    // Called by the compute stream; the pointers change from call to call.
    MicroBatchResult (*micro_batch)(void *self, Stream *stream, uint64_t index, const float *parameters, float *gradients);
} Problem;

// ---------------------------------------------------------------------------------------------------------------------------------------
// State

// FREE: no stream uses it. READY: its content waits for its reader. Others: a stream is at it.
typedef enum BufferState { BUFFER_FREE, BUFFER_WRITING, BUFFER_READY, BUFFER_READING } BufferState;

typedef struct Buffer {
    float *data; // (size, shard); elements past parameter_count are zero
    BufferState state;
} Buffer;

static inline void buffer_change(Buffer *buffer, BufferState from, BufferState to) {
    assert(buffer->state == from);
    buffer->state = to;
}

// What travels with a gradient sum. Exchanged between all ranks as one record and added in the order of ranks.
typedef struct Tally {
    double micro_batches;
    double loss, perfect_loss; // sums over the micro-batches
    double not_finite;         // how many of them had a loss that is not a finite number
} Tally;

typedef enum JobKind { COMMIT, ESTIMATE } JobKind;
typedef enum HandOver { CLEAR, KEEP } HandOver;

// Written by the host before the launch, filled by the communication stream, read by the host after H2.
typedef struct Job {
    JobKind kind;
    Tally tally;          // in: of this worker
    double learning_rate; // in
    Tally total;          // out: of all workers
    double gradient_norm; // out: of the mean gradient, before clipping
    int first_bad_rank;   // out: the lowest rank whose loss was not finite, or -1
    double began, ended;  // out: clock_seconds()
} Job;

typedef struct SchedulerSettings {
    bool overlapped;       // the rule computes while it communicates: it needs an exchange buffer and a communication stream of one thread
    bool replicated;       // every rank owns the whole optimizer state (ddp)
    bool wait_after_launch; // --overlap off: the same schedule with a full wait after every job
    bool adaptive;         // accumulate() goes on while the job runs
    int round_size;        // micro-batches of one accumulate(): exactly, or at least when adaptive
    int first_round_size;  // the same for the very first one; 0: as the others
    double gradient_clip;  // 0: none
    bool rate_by_commits;
    LearningRate rate;
    OptimizerSettings optimizer;
} SchedulerSettings;

// What happened between two commits.
typedef struct CommitReport {
    int64_t commit;        // number of commits so far
    double micro_batches;  // in this commit, of all workers
    double gradients_done; // micro-batch gradients committed so far, of all workers
    double loss, perfect_loss;
    double learning_rate, gradient_norm;
    double compute_seconds, communication_seconds, exposed_seconds; // of this worker; exposed: compute was idle while a job ran
} CommitReport;

typedef struct Scheduler {
    SchedulerSettings settings;
    Problem problem;
    Transport *transport;
    Stream *compute, *communication;
    Team *communication_team; // of one thread; only in overlapped rules
    Event *computed, *communicated;
    size_t shard;
    Buffer parameters, gradients, exchange;
    double *norm_partials; // scratch of the job
    Tally *tallies;        // (size) records of all ranks
    Optimizer optimizer;
    Tally tally;           // what `gradients` holds
    uint64_t micro_batches_begun; // by this worker, ever
    Job job;
    bool job_in_flight;
    double gradients_done;
    double round_began, round_ended; // of the latest accumulate(), clock_seconds()
    double compute_seconds;          // summed by the compute stream since the last commit
    double communication_seconds, exposed_seconds;
    CommitReport report; // of the latest commit
    bool stopped;        // a loss or gradient was not finite: nothing was updated; see job.first_bad_rank
} Scheduler;

static inline Buffer *scheduler_reduce_buffer(Scheduler *s) { return s->settings.overlapped ? &s->exchange : &s->gradients; }
static inline Buffer *scheduler_gather_buffer(Scheduler *s) { return s->settings.overlapped ? &s->exchange : &s->parameters; }

// ---------------------------------------------------------------------------------------------------------------------------------------
// Setting up

// Shards are whole cache lines, so that no vector of one crosses into another.
static inline size_t scheduler_shard(size_t parameter_count, int size) {
    size_t shard = (parameter_count + (size_t)size - 1) / (size_t)size;
    return (shard + 31) / 32 * 32;
}

// Plans every buffer of the scheduler and of the transport. The scheduler must stay where it is.
static inline void scheduler_reserve(Scheduler *s, Arena *arena, const SchedulerSettings *settings, const Problem *problem,
                                     Transport *transport) {
    memset(s, 0, sizeof *s);
    s->settings = *settings;
    s->problem = *problem;
    s->transport = transport;
    s->shard = scheduler_shard(problem->parameter_count, transport->size);
    size_t padded = s->shard * (size_t)transport->size;
    arena_reserve(arena, MEMORY_PARAMETERS, "parameters", padded * sizeof(float), &s->parameters.data);
    arena_reserve(arena, MEMORY_GRADIENTS, "gradient accumulator", padded * sizeof(float), &s->gradients.data);
    if (settings->overlapped) {
        arena_reserve(arena, MEMORY_EXCHANGE, "exchange buffer", padded * sizeof(float), &s->exchange.data);
    }
    size_t begin = settings->replicated ? 0 : s->shard * (size_t)transport->rank;
    size_t end = settings->replicated ? padded : begin + s->shard;
    optimizer_reserve(&s->optimizer, arena, &settings->optimizer, begin, end, settings->replicated);
    arena_reserve(arena, MEMORY_WORKSPACE, "partial sums of the norm", buffer_blocks(s->shard) * sizeof(double), &s->norm_partials);
    arena_reserve(arena, MEMORY_WORKSPACE, "tallies of all ranks", (size_t)transport->size * sizeof(Tally), &s->tallies);
    transport_reserve(transport, arena, s->shard);
}

// After arena_commit and after the caller has filled s->parameters.data (the same on every rank): starts the streams. `team` serves the
// compute stream and, where compute is idle during communication, the jobs too; an overlapped job uses one thread of its own.
static inline void scheduler_start(Scheduler *s, Team *team) {
    const float *parameters = s->parameters.data;
    if (s->settings.replicated) {
        s->optimizer.master = s->parameters.data;
    } else {
        memcpy(s->optimizer.master, parameters + s->optimizer.begin, s->shard * sizeof(float));
    }
    if (s->transport->wire == WIRE_BF16) {
        for (size_t i = 0; i < s->problem.parameter_count && !s->settings.replicated; i++) {
            s->parameters.data[i] = bf16_to_float(bf16_from_float(parameters[i]));
        }
    }
    if (s->settings.overlapped) { s->communication_team = team_create(1, false); } // itself, no further thread
    s->compute = stream_create("compute", team);
    s->communication = stream_create("communication", s->settings.overlapped ? s->communication_team : team);
    s->computed = event_create();
    s->communicated = event_create();
    if (s->compute == NULL || s->communication == NULL) { transport_fail(s->transport, "the system gives no more threads"); }
}

static inline void scheduler_stop(Scheduler *s) {
    stream_destroy(s->compute);
    stream_destroy(s->communication);
    event_destroy(s->computed);
    event_destroy(s->communicated);
    team_destroy(s->communication_team);
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// The job: runs on the communication stream

static inline void job_exchange_tallies(Scheduler *s, Job *job) {
    transport_exchange(s->transport, "count exchange", &job->tally, s->tallies, sizeof(Tally));
    memset(&job->total, 0, sizeof job->total);
    job->first_bad_rank = -1;
    for (int rank = 0; rank < s->transport->size; rank++) {
        const Tally *tally = &s->tallies[rank];
        job->total.micro_batches += tally->micro_batches;
        job->total.loss += tally->loss;
        job->total.perfect_loss += tally->perfect_loss;
        job->total.not_finite += tally->not_finite;
        if (tally->not_finite > 0 && job->first_bad_rank < 0) { job->first_bad_rank = rank; }
    }
}

// The norm of the mean gradient over all shards: one small exchange. The same bits on every rank and for every owner of the state.
static inline double job_gradient_norm(Scheduler *s, Job *job, float *mine) {
    double square = buffer_sum_of_squares(s->communication, mine, s->shard, s->norm_partials);
    double *squares = (double *)(void *)s->tallies; // free by now, and large enough
    transport_exchange(s->transport, "norm exchange", &square, squares, sizeof square);
    double sum = 0;
    for (int rank = 0; rank < s->transport->size; rank++) { sum += squares[rank]; }
    return sqrt(sum) / job->total.micro_batches;
}

static inline double job_clip_scale(const Scheduler *s, const Job *job) {
    double clip = s->settings.gradient_clip;
    return clip > 0 && job->gradient_norm > clip ? clip / job->gradient_norm : 1.0;
}

// Steps the optimizer and spreads the result; where the gradient is not finite nothing is stepped and everybody keeps what the masters
// hold.
static inline void job_step(Scheduler *s, Job *job, float *reduced, float *gathered) {
    Optimizer *optimizer = &s->optimizer;
    bool finite = isfinite(job->gradient_norm) && job->total.not_finite == 0;
    double scale = job_clip_scale(s, job);
    if (s->settings.replicated) { transport_all_gather(s->transport, reduced, s->shard); }
    if (finite) {
        optimizer_step(optimizer, s->communication, reduced + optimizer->begin, gathered + optimizer->begin, job->total.micro_batches,
                       scale, job->learning_rate, job->kind == COMMIT);
    } else if (!s->settings.replicated) {
        memcpy(gathered + optimizer->begin, optimizer->master, s->shard * sizeof(float));
    }
    if (!s->settings.replicated) { transport_all_gather(s->transport, gathered, s->shard); }
}

static inline void job_task(void *context, Stream *stream) {
    (void)stream;
    Scheduler *s = (Scheduler *)context;
    Job *job = &s->job;
    float *reduced = scheduler_reduce_buffer(s)->data;
    float *gathered = scheduler_gather_buffer(s)->data;
    job->began = clock_seconds();
    job_exchange_tallies(s, job);
    transport_reduce_scatter(s->transport, reduced, s->shard);
    job->gradient_norm = job_gradient_norm(s, job, reduced + s->shard * (size_t)s->transport->rank);
    job_step(s, job, reduced, gathered);
    job->ended = clock_seconds();
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// The verbs: called by the host

static inline double scheduler_learning_rate(const Scheduler *s) {
    return learning_rate_at(&s->settings.rate, s->settings.rate_by_commits ? (double)s->optimizer.commits : s->gradients_done);
}

// Grows while either stream gets anywhere.
static inline uint64_t scheduler_progress(Scheduler *s) {
    return __atomic_load_n(&s->micro_batches_begun, __ATOMIC_RELAXED) + __atomic_load_n(&s->transport->bytes_sent, __ATOMIC_RELAXED);
}

// The transport's own deadline comes first and says more; this one catches a program of which nothing moves at all.
static inline void scheduler_wait_event(Scheduler *s, Event *event, const char *stream) {
    double patience = 10 * s->transport->timeout_seconds + 3600;
    uint64_t seen;
    do {
        seen = scheduler_progress(s);
        if (event_wait(event, patience)) { return; }
    } while (scheduler_progress(s) != seen);
    transport_fail(s->transport, "nothing has moved for %.0f s while waiting for the %s stream", patience, stream);
}

// Starts a job on what the last hand_over gave. Communication stream.
static inline void launch(Scheduler *s, JobKind kind) {
    assert(!s->job_in_flight);
    buffer_change(scheduler_reduce_buffer(s), BUFFER_READY, BUFFER_WRITING);
    if (!s->settings.overlapped) { buffer_change(&s->parameters, BUFFER_FREE, BUFFER_WRITING); }
    s->transport->commit = s->optimizer.commits;
    s->job.kind = kind;
    s->job.learning_rate = scheduler_learning_rate(s);
    s->job_in_flight = true;
    stream_run(s->communication, job_task, s); // H3
    event_record(s->communicated, s->communication);
    if (s->settings.wait_after_launch) { scheduler_wait_event(s, s->communicated, "communication"); }
}

static inline void micro_batch_task(void *context, Stream *stream) {
    Scheduler *s = (Scheduler *)context;
    double began = clock_seconds();
    uint64_t index = __atomic_fetch_add(&s->micro_batches_begun, 1, __ATOMIC_RELAXED);
    MicroBatchResult result = s->problem.micro_batch(s->problem.self, stream, index, s->parameters.data, s->gradients.data);
    s->tally.micro_batches += 1;
    s->tally.loss += result.loss;
    s->tally.perfect_loss += result.perfect_loss;
    s->tally.not_finite += isfinite(result.loss) ? 0 : 1;
    s->compute_seconds += clock_seconds() - began;
}

// Adds micro-batch gradients until the round is full: a fixed number, or as many as fit beside the job, at least round_size. Compute
// stream.
static inline void accumulate(Scheduler *s) {
    buffer_change(&s->parameters, BUFFER_FREE, BUFFER_READING);
    buffer_change(&s->gradients, BUFFER_FREE, BUFFER_WRITING);
    bool first = s->micro_batches_begun == 0 && s->settings.first_round_size > 0;
    int group = first ? s->settings.first_round_size : s->settings.round_size;
    s->round_began = clock_seconds();
    do {
        for (int i = 0; i < group; i++) { stream_run(s->compute, micro_batch_task, s); } // H4
        event_record(s->computed, s->compute);
        scheduler_wait_event(s, s->computed, "compute"); // H1; also keeps the host from running ahead of a job that is late
        group = 1;
    } while (s->settings.adaptive && !event_query(s->communicated));
    s->round_ended = event_seconds(s->computed);
    buffer_change(&s->parameters, BUFFER_READING, BUFFER_FREE);
    buffer_change(&s->gradients, BUFFER_WRITING, BUFFER_READY);
}

typedef struct BoundaryWork {
    Scheduler *scheduler;
    float *out; // NULL: clear only
    bool clear;
} BoundaryWork;

static inline void boundary_task(void *context, Stream *stream) {
    const BoundaryWork *work = (const BoundaryWork *)context;
    Scheduler *s = work->scheduler;
    buffer_move(stream, work->out, s->gradients.data, s->shard * (size_t)s->transport->size, work->clear);
}

// Runs a task on one of the two streams between rounds and waits for it.
static inline void scheduler_call(Scheduler *s, Stream *stream, StreamTask task, void *context) {
    Event *event = stream == s->compute ? s->computed : s->communicated;
    assert(!s->job_in_flight || stream == s->compute);
    stream_run(stream, task, context);
    event_record(event, stream);
    scheduler_wait_event(s, event, stream->name);
}

// Copies the accumulator to `out` (or nowhere) and clears it; the host waits (H3, H4). Compute stream.
static inline void boundary_move_gradients(Scheduler *s, float *out, bool clear) {
    BoundaryWork work = {s, out, clear};
    scheduler_call(s, s->compute, boundary_task, &work);
}

static inline void scheduler_account_job(Scheduler *s) {
    const Job *job = &s->job;
    double hidden = fmin(job->ended, s->round_ended) - fmax(job->began, s->round_began);
    s->communication_seconds += job->ended - job->began;
    s->exposed_seconds += job->ended - job->began - fmax(hidden, 0);
    s->stopped = s->stopped || !isfinite(job->gradient_norm) || job->total.not_finite > 0;
    if (job->kind != COMMIT) { return; }
    if (!s->stopped) { s->gradients_done += job->total.micro_batches; }
    CommitReport *report = &s->report;
    report->commit = s->optimizer.commits;
    report->micro_batches = job->total.micro_batches;
    report->gradients_done = s->gradients_done;
    report->loss = job->total.loss / job->total.micro_batches;
    report->perfect_loss = job->total.perfect_loss / job->total.micro_batches;
    report->learning_rate = job->learning_rate;
    report->gradient_norm = job->gradient_norm;
    report->compute_seconds = s->compute_seconds;
    report->communication_seconds = s->communication_seconds;
    report->exposed_seconds = s->exposed_seconds;
    s->compute_seconds = s->communication_seconds = s->exposed_seconds = 0;
}

// Waits for the job and takes the parameters that it produced.
static inline void wait_for(Scheduler *s) {
    scheduler_wait_event(s, s->communicated, "communication"); // H2, H5
    s->job_in_flight = false;
    buffer_change(scheduler_reduce_buffer(s), BUFFER_WRITING, BUFFER_FREE);
    if (s->settings.overlapped) {
        float *taken = s->exchange.data;
        s->exchange.data = s->parameters.data;
        s->parameters.data = taken;
    } else {
        buffer_change(&s->parameters, BUFFER_WRITING, BUFFER_FREE);
    }
    scheduler_account_job(s);
    if (!s->settings.overlapped) { boundary_move_gradients(s, NULL, true); }
}

// The boundary: first takes the parameters of the job in flight, then gives the gradient sum to the next one. The order matters: the
// exchange buffer is emptied before it is filled. CLEAR: the accumulator starts anew; KEEP: it goes on growing on top of what was given.
static inline void hand_over(Scheduler *s, HandOver mode) {
    if (s->job_in_flight) { wait_for(s); }
    s->job.tally = s->tally;
    if (s->settings.overlapped) {
        buffer_change(&s->exchange, BUFFER_FREE, BUFFER_WRITING);
        boundary_move_gradients(s, s->exchange.data, mode == CLEAR);
        buffer_change(&s->exchange, BUFFER_WRITING, BUFFER_READY);
        buffer_change(&s->gradients, BUFFER_READY, BUFFER_FREE);
    } else {
        assert(mode == CLEAR && s->gradients.state == BUFFER_READY); // lent to the job, cleared when it has ended
    }
    if (mode == CLEAR) { memset(&s->tally, 0, sizeof s->tally); }
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// A rule: a name and two functions over the verbs.

typedef struct Rule {
    const char *name;
    const char *summary;         // one line for --help and the start-up block
    bool overlapped, replicated; // as in SchedulerSettings
    int rounds_per_commit;       // accumulate() calls per commit
    void (*begin)(Scheduler *s); // before the first round; NULL: nothing to do
    void (*commit)(Scheduler *s); // exactly one commit; afterwards s->parameters holds the committed parameters on every rank
} Rule;

#endif
