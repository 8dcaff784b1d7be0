// scheduler.h: the verbs. Every update rule is a few lines of them.
//
//   launch(COMMIT | ESTIMATE | ...)   starts one job on the communication stream, on what the last hand_over gave
//   launch_following(COMMIT)          the same, on what the coming accumulate() will yield: it starts while that still runs
//   accumulate()                      micro-batches on the compute stream: a fixed number, or as long as the job still runs
//   hand_over(CLEAR | KEEP)           the boundary, the only place where both streams' buffers meet: takes the parameters of the job that
//                                     ran, gives the gradient sum to the next one, and clears the accumulator or lets it grow
//   wait_for()                        the first half of the boundary alone: takes the parameters
//
// local_steps.h adds the verbs of rules whose workers step by themselves.
//
// Timeline of an overlapped round, and of a synchronous one whose job follows the last
// backward pass:
//
//   compute         | micro-batches                  |idle| hand_over | micro-batches ...
//   communication   | reduce . summary . step . gather    |           | ...
//                   ^ launch                    exposed ^
//
//   compute         | micro-batches | forward . backward |idle | forward . backward ...
//   communication                              | reduce . step | gather |
//                                                exposed ^       ^ runs ahead of the forward pass
//
// Happens-before, every line implemented where its number is named:
//   H1  the gradient sum is complete before the boundary reads it     event `computed`, waited for by the host in accumulate()
//   H2  the job has ended before the boundary touches its buffers      event `communicated`, or where it follows `stepped`: wait_for()
//   H3  the boundary has ended before the next job starts             the boundary's work is waited for by the host; launch comes after it
//   H4  the boundary has ended before the next micro-batch starts     same
//   H5  what the job reports is complete before the host reads it     H2
//   H6  a gradient is final before a job that follows sends it        gate `finished`: scheduler_finish() to job_reduce()
//   H7  a parameter has arrived before a forward pass reads it        gate `arrived`: job_gather() to scheduler_need()
// The host thread is the only one that calls these functions. Between two of its calls at
// most one job and one round of micro-batches run, and in synchronous rules the gather of
// the job before.
//
// Overlapped rules exchange two pointers instead of copying the parameters, and copy and
// clear the gradients in one pass.
#ifndef ACCO_SCHEDULER_H
#define ACCO_SCHEDULER_H

#include "communication_job.h"

// ---------------------------------------------------------------------------------------
// Waiting

// Grows while either stream gets anywhere.
static inline uint64_t scheduler_progress(Scheduler *s) {
    return __atomic_load_n(&s->micro_batches_begun, __ATOMIC_RELAXED) +
           __atomic_load_n(&s->transport->bytes_sent, __ATOMIC_RELAXED);
}

// The transport's own deadline comes first and says more; this one catches a program of
// which nothing moves at all.
static inline void scheduler_wait_event(Scheduler *s, Event *event, const char *stream) {
    double patience = 10 * s->transport->timeout_seconds + 3600;
    uint64_t seen;
    do {
        seen = scheduler_progress(s);
        if (event_wait(event, patience)) { return; }
    } while (scheduler_progress(s) != seen);
    transport_fail(s->transport, "nothing has moved for %.0f s while waiting for the %s stream", patience,
                   stream);
}

// Until the whole of s->parameters has arrived.
static inline void scheduler_settle(Scheduler *s) {
    scheduler_wait_event(s, s->communicated, "communication");
}

// Runs a task on one of the streams, behind what is in it, and waits for it (H3, H4).
static inline void scheduler_call(Scheduler *s, Stream *stream, StreamTask task, void *context) {
    Event *event = stream == s->compute ? s->computed : s->communicated;
    stream_run(stream, task, context);
    event_record(event, stream);
    scheduler_wait_event(s, event, stream->name);
}

// ---------------------------------------------------------------------------------------
// Jobs

static inline double scheduler_learning_rate(const Scheduler *s) {
    return learning_rate_at(&s->settings.rate,
                            s->settings.rate_by_commits ? (double)s->optimizer.commits : s->gradients_done);
}

static inline void scheduler_enqueue_job(Scheduler *s) {
    stream_run(s->communication, job_task, s); // H3
    event_record(s->stepped, s->communication);
    stream_run(s->communication, job_gather_task, s);
    event_record(s->communicated, s->communication);
    if (!s->settings.overlap) { scheduler_wait_event(s, s->communicated, "communication"); }
}

static inline void scheduler_prepare_job(Scheduler *s, JobKind kind, bool follows) {
    assert(!s->job_in_flight);
    s->job.kind = kind;
    s->job.follows = follows;
    s->job.bad_element = s->job.own_square = 0;
    s->job.commit = s->optimizer.commits;
    s->job.learning_rate = kind == AVERAGE ? s->local_rate : scheduler_learning_rate(s);
    s->job_in_flight = true;
}

// Starts a job on what the last hand_over gave. Communication stream.
static inline void launch(Scheduler *s, JobKind kind) {
    buffer_change(scheduler_reduce_buffer(s), BUFFER_READY, BUFFER_WRITING);
    scheduler_prepare_job(s, kind, false);
    scheduler_enqueue_job(s);
}

// Starts a job that sends the gradients of the next accumulate() as its last backward
// pass finishes them. Without overlap accumulate() starts it at its end.
static inline void launch_following(Scheduler *s, JobKind kind) {
    assert(s->settings.kind == RULE_SYNCHRONOUS && !s->settings.adaptive);
    watermark_reset(&s->finished, 0);
    scheduler_prepare_job(s, kind, true);
    if (s->settings.overlap) { scheduler_enqueue_job(s); }
}

// ---------------------------------------------------------------------------------------
// Micro-batches

static inline void scheduler_compute_span(Scheduler *s, const char *name, double began, double ended) {
    trace_add(&s->trace, TRACE_COMPUTE, name, s->job.commit, began, ended);
}

// Pace::need (H7). Time spent waiting is no compute.
static inline void scheduler_need(void *self, size_t end) {
    Scheduler *s = (Scheduler *)self;
    if (watermark_has_reached(&s->arrived, end)) { return; }
    scheduler_compute_span(s, "micro-batch", s->span_began, clock_seconds());
    watermark_wait(&s->arrived, end);
    s->span_began = clock_seconds();
}

// Pace::finish (H6). The last word is micro_batch_task's, when the tally is complete too.
static inline void scheduler_finish(void *self, size_t begin) {
    Scheduler *s = (Scheduler *)self;
    if (!s->announcing || begin == 0) { return; }
    size_t position = layout_padded(&s->layout) - begin,
           bucket = layout_cell_begin(&s->layout, job_bucket_cells(s, &s->layout));
    if (s->compute->queue != NULL) { // a GPU is waited for only where a bucket is complete
        if (s->transport->size == 1 || position / bucket == s->announced / bucket) { return; }
        stream_settle(s->compute);
    }
    s->announced = position;
    watermark_raise(&s->finished, position);
}

static inline void micro_batch_task(void *context, Stream *stream) {
    Scheduler *s = (Scheduler *)context;
    Pace pace = {s, s->parameters_version, scheduler_need, scheduler_finish};
    s->span_began = clock_seconds();
    uint64_t index = __atomic_fetch_add(&s->micro_batches_begun, 1, __ATOMIC_RELAXED);
    MicroBatchResult result =
        s->problem.micro_batch(s->problem.self, stream, index, s->parameters.data, s->gradients.data, &pace);
    s->tally.micro_batches += 1;
    s->tally.loss += result.loss;
    s->tally.perfect_loss += result.perfect_loss;
    s->tally.not_finite += isfinite(result.loss) ? 0 : 1;
    if (!isfinite(result.loss) && s->tally.site.micro_batch == 0) {
        s->tally.site.micro_batch = (double)index + 1;
    }
    scheduler_compute_span(s, "micro-batch", s->span_began, clock_seconds());
}

static inline void last_micro_batch_task(void *context, Stream *stream) {
    Scheduler *s = (Scheduler *)context;
    s->announcing = true;
    s->announced = 0;
    micro_batch_task(context, stream);
    s->announcing = false;
    watermark_raise(&s->finished, layout_padded(&s->layout));
}

// `count` micro-batches, and with an adaptive schedule as many more as fit beside the
// job. Compute stream.
static inline void accumulate_count(Scheduler *s, int count) {
    bool followed = s->job_in_flight && s->job.follows;
    buffer_change(&s->parameters, BUFFER_FREE, BUFFER_READING);
    buffer_change(&s->gradients, BUFFER_FREE, BUFFER_WRITING);
    do {
        for (int i = 0; i < count; i++) { // H4
            stream_run(s->compute, followed && i == count - 1 ? last_micro_batch_task : micro_batch_task, s);
        }
        event_record(s->computed, s->compute);
        scheduler_wait_event(s, s->computed,
                             "compute"); // H1; also keeps the host from running ahead of a job that is late
        count = 1;
    } while (s->settings.adaptive && !event_query(s->communicated));
    buffer_change(&s->parameters, BUFFER_READING, BUFFER_FREE);
    buffer_change(&s->gradients, BUFFER_WRITING, followed ? BUFFER_WRITING : BUFFER_READY);
    if (followed && !s->settings.overlap) { scheduler_enqueue_job(s); }
}

static inline void accumulate(Scheduler *s) { accumulate_count(s, s->settings.round_size); }

// ---------------------------------------------------------------------------------------
// The boundary

typedef struct BoundaryWork {
    Scheduler *scheduler;
    float *out; // NULL: clear only
    bool clear;
} BoundaryWork;

static inline void boundary_task(void *context, Stream *stream) {
    const BoundaryWork *work = (const BoundaryWork *)context;
    Scheduler *s = work->scheduler;
    double began = clock_seconds();
    buffer_move(stream, work->out, s->gradients.data, layout_padded(&s->layout), work->clear);
    stream_settle(stream);
    scheduler_compute_span(s, "boundary", began, clock_seconds());
}

// Copies the accumulator to `out` (or nowhere) and clears it; the host waits (H3, H4).
// Compute stream.
static inline void boundary_move_gradients(Scheduler *s, float *out, bool clear) {
    BoundaryWork work = {s, out, clear};
    scheduler_call(s, s->compute, boundary_task, &work);
}

// Whether a spike ended this stretch of training: what local rules have received must not
// be applied.
static inline bool scheduler_is_halted(const Scheduler *s) { return s->failed || s->rollback_due; }

// Writes down what was not done, and why.
static inline void scheduler_note_spike(Scheduler *s, SpikeKind kind, double steps) {
    const Job *job = &s->job;
    bool local = s->settings.kind == RULE_LOCAL, high = kind == SPIKE_HIGH_LOSS;
    double measured = local ? NAN : high ? job->total.loss / job->total.micro_batches : job->gradient_norm;
    SpikeReport report = {kind,      job->commit, job->first_bad_rank,
                          job->site, measured,    high ? job->largest_loss : job->largest_norm,
                          steps};
    s->spike = report;
    s->spikes += steps;
}

// What follows from a spike. An estimate that was not made costs nothing: the half batch
// that it came from spoils the commit too, which knows more of it.
static inline void scheduler_account_spike(Scheduler *s) {
    const Job *job = &s->job;
    SpikePolicy policy = s->settings.on_spike;
    if (job->kind == ESTIMATE) { return; }
    scheduler_note_spike(s, job->spike, 1);
    s->spikes_in_a_row += s->settings.kind == RULE_LOCAL ? 0 : 1;
    bool patient = s->spikes_in_a_row < SPIKE_PATIENCE && job->spike != SPIKE_PARAMETERS;
    s->failed = s->failed || policy == SPIKE_STOP || (policy == SPIKE_SKIP && !patient);
    s->rollback_due = policy == SPIKE_ROLLBACK;
}

// Adds what a job brought to the report, which is complete after a commit.
static inline void scheduler_account_job(Scheduler *s) {
    const Job *job = &s->job;
    CommitReport *report = &s->report;
    s->stop_agreed = s->stop_agreed || job->total.stops > 0;
    s->all_writers_done = job->total.ended == s->transport->size;
    if (job->spike != SPIKE_NONE) {
        scheduler_account_spike(s);
        return;
    }
    if (job->total.left_out > 0) { scheduler_note_spike(s, spike_kind_of(&job->site), job->total.left_out); }
    if (job->kind == ESTIMATE || job->total.micro_batches == 0) { return; }
    TraceSums sums = trace_take(&s->trace, clock_seconds());
    if (job->kind != AVERAGE) {
        s->gradients_done += job->total.micro_batches;
        s->spikes_in_a_row = 0;
    }
    s->reports++;
    report->commit = s->optimizer.commits;
    report->micro_batches = job->total.micro_batches;
    report->gradients_done = s->gradients_done;
    report->loss = job->total.loss / job->total.micro_batches;
    report->perfect_loss = job->total.perfect_loss / job->total.micro_batches;
    report->learning_rate = job->learning_rate;
    report->gradient_norm = job->gradient_norm;
    report->compute_seconds = sums.compute_seconds;
    report->communication_seconds = sums.communication_seconds;
    report->exposed_seconds = sums.exposed_seconds;
}

static inline void scheduler_swap_parameters(Scheduler *s) {
    float *taken = s->comm_buffer.data;
    s->comm_buffer.data = s->parameters.data;
    s->parameters.data = taken;
}

// Waits for the job and takes what it produced. Where it followed the backward pass, its
// parameters go on arriving.
static inline void wait_for(Scheduler *s) {
    scheduler_wait_event(s, s->job.follows ? s->stepped : s->communicated, "communication"); // H2, H5
    s->job_in_flight = false;
    s->parameters_version++;
    buffer_change(scheduler_reduce_buffer(s), BUFFER_WRITING, BUFFER_FREE);
    scheduler_account_job(s);
    if (s->settings.kind == RULE_OVERLAPPED) { scheduler_swap_parameters(s); }
    if (s->settings.kind == RULE_SYNCHRONOUS) {
        boundary_move_gradients(s, NULL, true);
        memset(&s->tally, 0, sizeof s->tally);
    }
}

// The boundary: first takes the parameters of the job in flight, then gives the gradient
// sum to the next one. The order matters: the exchange buffer is emptied before it is
// filled. CLEAR: the accumulator starts anew; KEEP: it goes on growing on top of what was
// given.
static inline void hand_over(Scheduler *s, HandOver mode) {
    assert(s->settings.kind == RULE_OVERLAPPED);
    if (s->job_in_flight) { wait_for(s); }
    s->job.tally = s->tally;
    buffer_change(&s->comm_buffer, BUFFER_FREE, BUFFER_WRITING);
    boundary_move_gradients(s, s->comm_buffer.data, mode == CLEAR);
    buffer_change(&s->comm_buffer, BUFFER_WRITING, BUFFER_READY);
    buffer_change(&s->gradients, BUFFER_READY, BUFFER_FREE);
    if (mode == CLEAR) { memset(&s->tally, 0, sizeof s->tally); }
}

// Whether a gradient sum waits for the next launch: false before the first round of an
// overlapped rule.
static inline bool is_handed_over(const Scheduler *s) { return s->comm_buffer.state == BUFFER_READY; }

// Forgets what has been computed since the latest commit, and what is under way: another
// state is to be put in its place.
static inline void scheduler_drop(Scheduler *s) {
    scheduler_settle(s);
    boundary_move_gradients(s, NULL, true);
    memset(&s->tally, 0, sizeof s->tally);
    memset(&s->job, 0, sizeof s->job);
    s->parameters.state = s->gradients.state = s->comm_buffer.state = BUFFER_FREE;
    s->job_in_flight = s->rollback_due = false;
}

// ---------------------------------------------------------------------------------------
// What overlapped rules share

// The first commits of a run may be sequential: a whole batch, then its job, nothing
// beside it. True when this commit was one of them.
static inline bool sequential_commit(Scheduler *s) {
    if (s->optimizer.commits >= s->settings.sequential || is_handed_over(s)) { return false; }
    accumulate_count(s, s->settings.round_size * s->settings.rounds_per_commit);
    hand_over(s, CLEAR);
    launch(s, COMMIT);
    wait_for(s);
    return true;
}

// At the end a gradient sum is still waiting: one more commit makes it count.
static inline void drain(Scheduler *s) {
    if (!is_handed_over(s)) { return; }
    launch(s, COMMIT);
    wait_for(s);
}

// ---------------------------------------------------------------------------------------
// A rule: a name, what it needs, and functions over the verbs

typedef struct Rule {
    const char *name;
    const char *summary; // one line for --help and the start-up block
    RuleKind kind;
    bool replicated;              // as in SchedulerSettings
    int rounds_per_commit;        // accumulate() calls per commit
    void (*commit)(Scheduler *s); // one commit, or one period of a local rule
    void (*finish)(
        Scheduler *
            s); // after the last commit, unless stopped: s->parameters becomes the result on every rank; NULL: it is
    // The committed parameters between two commits, the same on every rank, where they
    // are not what compute uses; NULL: s->parameters.
    const float *(*committed)(Scheduler *s);
    // A job may still be in flight after a commit has returned: a checkpoint then holds
    // the sum that the job exchanges.
    bool job_in_flight_between_commits;
} Rule;

// Lends the committed parameters (parameter_count), the same bits on every rank, between
// two commits; all ranks call it.
static inline const float *borrow_committed(Scheduler *s, const Rule *rule) {
    scheduler_settle(s);
    return rule->committed != NULL ? rule->committed(s) : s->parameters.data;
}

static inline void return_committed(Scheduler *s, const float *committed) {
    if (committed == s->gradients.data) { boundary_move_gradients(s, NULL, true); }
}

#endif
