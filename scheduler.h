// scheduler.h: the verbs. Every update rule is a few lines of them.
//
//   accumulate(n)              runs n micro-batches on the compute stream, and with an
//                              adaptive schedule as many more as fit beside the job
//   launch(COMMIT | ...)       starts a job on the communication stream, on the gradient
//                              sum that the last hand_over gave it
//   launch_following(COMMIT)   starts a job on the gradient sum of the coming
//                              accumulate(): it sends gradients while the last backward
//                              pass still makes others
//   hand_over(CLEAR | KEEP)    the boundary, the only place where the buffers of both
//                              streams meet: takes the parameters from the job that ran,
//                              gives the gradient sum to the next one, and clears the
//                              accumulator or lets it keep growing
//   wait_for()                 the first half of the boundary alone: takes the parameters
//
// local_steps.h adds the verbs of local rules. The verbs have short names, because the
// pages of the rules are written in them; all other functions are called
// scheduler_something.
//
// The timeline of an overlapped round, and of a synchronous one, whose job follows the
// last backward pass:
//
//   compute         | micro-batches                  |idle| hand_over | micro-batches ...
//   communication   | reduce . summary . step . gather    |           | ...
//                   ^ launch                    exposed ^
//
//   compute         | micro-batches | forward . backward |idle | forward . backward ...
//   communication                              | reduce . step | gather |
//                                                exposed ^       ^ runs ahead of the forward pass
//
// What must happen before what. Each number also stands in the code, at the place that
// makes sure of it:
//   H1  The gradient sum is complete before the boundary reads it. Event `computed`, for
//       which the host waits in accumulate().
//   H2  The job has ended before the boundary touches its buffers. Event `communicated`,
//       or `stepped` where the job follows the backward pass: wait_for().
//   H3  The boundary has ended before the next job starts. The host waits for the
//       boundary's work, and launches after it.
//   H4  The boundary has ended before the next micro-batch starts. The host waits for the
//       boundary's work, and calls accumulate() after it.
//   H5  What the job reports is complete before the host reads it. The same event as H2.
//   H6  A gradient is final before a job that follows sends it. Watermark `finished`:
//       scheduler_finish() to job_reduce().
//   H7  A parameter has arrived before a forward pass reads it. Watermark `arrived`:
//       job_gather() to scheduler_need().
// Only the host thread calls these functions. Between two of its calls at most one job
// and one round of micro-batches run, and in synchronous rules the gather of the job
// before.
//
// Overlapped rules swap two pointers instead of copying the parameters, and copy and
// clear the gradients in one pass.
#ifndef ACCO_SCHEDULER_H
#define ACCO_SCHEDULER_H

#include "communication_job.h"

// ---------------------------------------------------------------------------------------
// Waiting

// Grows whenever one of the streams makes progress.
static inline uint64_t scheduler_progress(Scheduler *s) {
    return __atomic_load_n(&s->micro_batches_begun, __ATOMIC_RELAXED) +
           __atomic_load_n(&s->transport->bytes_sent, __ATOMIC_RELAXED);
}

// Waits for an event of the named stream. The transport's own deadline comes first and
// says more; this one catches a program in which nothing moves at all.
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

// Waits until the whole of s->parameters has arrived.
static inline void scheduler_settle(Scheduler *s) {
    scheduler_wait_event(s, s->communicated, "communication");
}

// Runs a task on one of the streams, behind what is queued there, and waits for it (H3,
// H4).
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

static inline void scheduler_prepare_job(Scheduler *s, JobKind kind, bool follows) {
    assert(!s->job_in_flight);
    s->job.kind = kind;
    s->job.follows = follows;
    s->job.bad_element = s->job.own_square = 0;
    s->job.commit = s->optimizer.commits;
    s->job.gradients_done = s->gradients_done;
    s->job.learning_rate = kind == AVERAGE ? s->local_rate : scheduler_learning_rate(s);
    s->job_in_flight = true;
}

static inline void scheduler_enqueue_job(Scheduler *s) {
    stream_run(s->communication, job_task, s); // H3
    event_record(s->stepped, s->communication);
    stream_run(s->communication, job_gather_task, s);
    event_record(s->communicated, s->communication);
    if (!s->settings.overlap) { scheduler_wait_event(s, s->communicated, "communication"); }
}

// Starts a job on what the last hand_over gave. Communication stream.
static inline void launch(Scheduler *s, JobKind kind) {
    buffer_change(scheduler_reduce_buffer(s), BUFFER_READY, BUFFER_WRITING);
    scheduler_prepare_job(s, kind, false);
    scheduler_enqueue_job(s);
}

// Starts a job that sends the gradients of the next accumulate() as its last backward
// pass finishes them. Communication stream. Without overlap accumulate() starts the job
// when it has ended.
static inline void launch_following(Scheduler *s, JobKind kind) {
    assert(s->settings.kind == RULE_SYNCHRONOUS && !s->settings.adaptive);
    watermark_reset(&s->finished, 0);
    scheduler_prepare_job(s, kind, true);
    if (s->settings.overlap) { scheduler_enqueue_job(s); }
}

// ---------------------------------------------------------------------------------------
// Micro-batches

static inline void scheduler_compute_ended(Scheduler *s) {
    trace_end(&s->trace, TRACE_COMPUTE, s->job.commit);
}

// Pace::need (H7): waits until parameters [0, end) have arrived. The time spent here is
// not compute time.
static inline void scheduler_need(void *self, size_t end) {
    Scheduler *s = (Scheduler *)self;
    if (watermark_has_reached(&s->arrived, end)) { return; }
    scheduler_compute_ended(s);
    watermark_wait(&s->arrived, end);
    trace_begin(&s->trace, TRACE_COMPUTE, TRACE_MICRO_BATCH);
}

// Pace::finish (H6): gradients from `begin` on are final. The last step of the watermark
// is not taken here but in micro_batch_task, when the tally is complete too.
static inline void scheduler_finish(void *self, size_t begin) {
    Scheduler *s = (Scheduler *)self;
    if (!s->announcing || begin == 0) { return; }
    size_t position = layout_padded(&s->layout) - begin;
    if (s->compute->queue != NULL) { // a GPU: the job waits for a mark, and only where a bucket is complete
        size_t bucket = layout_cell_begin(&s->layout, job_bucket_cells(s, &s->layout));
        size_t before = s->announcements > 0 ? s->announced[s->announcements - 1] : 0;
        if (s->transport->size == 1 || position / bucket == before / bucket) { return; }
        assert(s->announcements <= LAYOUT_CELLS);
        gpu_mark(s->announced_marks[s->announcements], s->compute->queue);
        s->announced[s->announcements] = position;
        __atomic_fetch_add(&s->announcements, 1, __ATOMIC_RELEASE); // the job reads it meanwhile
    }
    watermark_raise(&s->finished, position);
}

static inline void micro_batch_task(void *context, Stream *stream) {
    Scheduler *s = (Scheduler *)context;
    Pace pace = {s, s->parameters_version, scheduler_need, scheduler_finish};
    trace_begin(&s->trace, TRACE_COMPUTE, TRACE_MICRO_BATCH);
    uint64_t index = __atomic_fetch_add(&s->micro_batches_begun, 1, __ATOMIC_RELAXED);
    MicroBatchResult result = s->problem.micro_batch(s->problem.self, stream, index, scheduler_weights(s),
                                                     s->gradients.data, &pace);
    s->tally.micro_batches += 1;
    s->tally.predicted += result.predicted;
    s->tally.loss += result.loss * result.predicted;
    s->tally.perfect_loss += result.perfect_loss * result.predicted;
    s->tally.not_finite += isfinite(result.loss) ? 0 : 1;
    if (!isfinite(result.loss) && s->tally.site.micro_batch == 0) {
        s->tally.site.micro_batch = (double)index + 1;
    }
    scheduler_compute_ended(s);
}

// The last micro-batch of a round that a job follows.
static inline void last_micro_batch_task(void *context, Stream *stream) {
    Scheduler *s = (Scheduler *)context;
    s->announcing = true;
    s->announcements = 0;
    micro_batch_task(context, stream);
    s->announcing = false;
    stream_settle(stream);
    watermark_raise(&s->finished, layout_padded(&s->layout));
}

// Runs `count` micro-batches, and with an adaptive schedule as many more as fit beside
// the job. Their gradients are added to s->gradients. Compute stream; the host waits.
static inline void accumulate(Scheduler *s, int count) {
    bool followed = s->job_in_flight && s->job.follows;
    buffer_change(&s->parameters, BUFFER_FREE, BUFFER_READING);
    buffer_change(&s->gradients, BUFFER_FREE, BUFFER_WRITING);
    do {
        for (int i = 0; i < count; i++) { // H4
            bool last = followed && i == count - 1;
            stream_run(s->compute, last ? last_micro_batch_task : micro_batch_task, s);
        }
        event_record(s->computed, s->compute);
        scheduler_wait_event(s, s->computed,
                             "compute"); // H1; the host must not run ahead of a late job either
        count = 1;
    } while (s->settings.adaptive && !event_query(s->communicated));
    buffer_change(&s->parameters, BUFFER_READING, BUFFER_FREE);
    buffer_change(&s->gradients, BUFFER_WRITING, followed ? BUFFER_WRITING : BUFFER_READY);
    if (followed && !s->settings.overlap) { scheduler_enqueue_job(s); }
}

// ---------------------------------------------------------------------------------------
// What a job brings: the report, spikes

// Whether a spike ended this stretch of training. Local rules must not apply what they
// have received then.
static inline bool scheduler_is_halted(const Scheduler *s) { return s->failed || s->rollback_due; }

// Records skipped steps for the report.
static inline void scheduler_note_spike(Scheduler *s, SpikeKind kind, double steps) {
    const Job *job = &s->job;
    bool local = s->settings.kind == RULE_LOCAL, high = kind == SPIKE_HIGH_LOSS;
    double measured = local ? NAN : high ? tally_mean_loss(&job->total) : job->gradient_norm;
    SpikeReport report = {kind,      job->commit, job->first_bad_rank,
                          job->site, measured,    high ? job->largest_loss : job->largest_norm,
                          steps};
    s->spike = report;
    s->spikes += steps;
}

// Decides what a spike leads to. An estimate that was not made costs nothing: the
// gradients that it came from spoil the commit too, and the commit's job knows more about
// them.
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
    s->save_agreed = s->save_agreed || job->total.saves > 0;
    s->all_writers_done = job->total.ended == s->transport->size;
    if (job->spike != SPIKE_NONE) {
        scheduler_account_spike(s);
        return;
    }
    if (job->total.left_out > 0) { scheduler_note_spike(s, spike_kind_of(&job->site), job->total.left_out); }
    if (job->kind == ESTIMATE || job->total.micro_batches == 0) { return; }
    TraceSums sums = trace_take(&s->trace);
    bool local = job->kind == AVERAGE;
    if (!local) {
        s->gradients_done += job->total.micro_batches;
        s->spikes_in_a_row = 0;
    }
    s->reports++;
    report->commit = local ? job->commit : s->optimizer.commits;
    report->gradients_done = local ? job->gradients_done : s->gradients_done;
    report->micro_batches = job->total.micro_batches;
    report->predicted = job->total.predicted;
    report->loss = tally_mean_loss(&job->total);
    report->perfect_loss = job->total.perfect_loss / job->total.predicted;
    report->learning_rate = job->learning_rate;
    report->gradient_norm = job->gradient_norm;
    report->compute_seconds = sums.compute_seconds;
    report->communication_seconds = sums.communication_seconds;
    report->exposed_seconds = sums.exposed_seconds;
    report->micro_batch_seconds = sums.micro_batch_seconds;
    report->micro_batch_cpu_seconds = sums.micro_batch_cpu_seconds;
}

// ---------------------------------------------------------------------------------------
// The boundary

typedef struct BoundaryWork {
    Scheduler *scheduler;
    float *out; // (padded); NULL: clear only
    bool clear;
} BoundaryWork;

static inline void boundary_task(void *context, Stream *stream) {
    const BoundaryWork *work = (const BoundaryWork *)context;
    Scheduler *s = work->scheduler;
    trace_begin(&s->trace, TRACE_COMPUTE, "boundary");
    buffer_move(stream, work->out, s->gradients.data, layout_padded(&s->layout), work->clear);
    stream_settle(stream);
    scheduler_compute_ended(s);
}

// Copies the gradient accumulator to `out` (padded; NULL: nowhere) and clears it where
// asked. Compute stream; the host waits (H3, H4).
static inline void scheduler_move_gradients(Scheduler *s, float *out, bool clear) {
    BoundaryWork work = {s, out, clear};
    scheduler_call(s, s->compute, boundary_task, &work);
}

// Waits for the job and takes what it produced. Where the job followed the backward pass,
// its parameters keep arriving afterwards.
static inline void wait_for(Scheduler *s) {
    scheduler_wait_event(s, s->job.follows ? s->stepped : s->communicated, "communication"); // H2, H5
    s->job_in_flight = false;
    s->parameters_version++;
    buffer_change(scheduler_reduce_buffer(s), BUFFER_WRITING, BUFFER_FREE);
    scheduler_account_job(s);
    if (s->settings.kind == RULE_OVERLAPPED) { // the job gathered beside what compute uses
        if (s->settings.keeps_casts) {
            Real *taken = s->arriving_casts;
            s->arriving_casts = s->casts;
            s->casts = taken;
        } else {
            float *taken = s->comm_buffer.data;
            s->comm_buffer.data = s->parameters.data;
            s->parameters.data = taken;
        }
    }
    if (s->settings.kind == RULE_SYNCHRONOUS) {
        scheduler_move_gradients(s, NULL, true);
        memset(&s->tally, 0, sizeof s->tally);
    }
}

// The boundary: first takes the parameters of the job in flight, then gives the gradient
// sum to the next job. The order matters: the communication buffer must be emptied before
// it is filled. CLEAR: the accumulator starts again from zero. KEEP: it keeps what was
// given, and the next gradients add to it.
static inline void hand_over(Scheduler *s, HandOver mode) {
    assert(s->settings.kind == RULE_OVERLAPPED);
    if (s->job_in_flight) { wait_for(s); }
    s->job.tally = s->tally;
    buffer_change(&s->comm_buffer, BUFFER_FREE, BUFFER_WRITING);
    scheduler_move_gradients(s, s->comm_buffer.data, mode == CLEAR);
    buffer_change(&s->comm_buffer, BUFFER_WRITING, BUFFER_READY);
    buffer_change(&s->gradients, BUFFER_READY, BUFFER_FREE);
    if (mode == CLEAR) { memset(&s->tally, 0, sizeof s->tally); }
}

// Whether a gradient sum waits for the next launch: false before the first round of an
// overlapped rule.
static inline bool is_handed_over(const Scheduler *s) { return s->comm_buffer.state == BUFFER_READY; }

// Forgets what has been computed since the latest commit, and the job in flight: the
// caller is going to put another state in its place.
static inline void scheduler_drop(Scheduler *s) {
    scheduler_settle(s);
    scheduler_move_gradients(s, NULL, true);
    memset(&s->tally, 0, sizeof s->tally);
    memset(&s->job, 0, sizeof s->job);
    s->parameters.state = s->gradients.state = s->comm_buffer.state = BUFFER_FREE;
    s->job_in_flight = s->rollback_due = false;
}

// ---------------------------------------------------------------------------------------
// Exact parameters

static inline void gather_masters_task(void *context, Stream *stream) {
    Scheduler *s = (Scheduler *)context;
    Collective collective = {&s->layout, WIRE_FP32, s->gradients.data, s->optimizer.master, NULL};
    comm_all_gather(&s->comm, stream, &collective, 0, layout_shard(&s->layout));
}

// The gradient accumulator (padded) <- the master copies of all ranks, which call it
// together, between two commits, while no job is under way. Returns it; it is to be given
// back with restore_gradients.
static inline const float *borrow_masters(Scheduler *s) {
    scheduler_call(s, s->communication, gather_masters_task, s);
    return s->gradients.data;
}

// Between two commits the accumulator is empty, or holds what was handed over and is to be
// added to (hand_over).
static inline void restore_gradients(Scheduler *s) {
    if (s->tally.micro_batches == 0) {
        scheduler_move_gradients(s, NULL, true);
    } else {
        assert(is_handed_over(s));
        stream_copy(s->compute, s->gradients.data, s->comm_buffer.data,
                    layout_padded(&s->layout) * sizeof(float));
        stream_settle(s->compute);
    }
}

static inline void cast_masters_task(void *context, Stream *stream) {
    Scheduler *s = (Scheduler *)context;
    gather_casts(s, stream, s->optimizer.master, s->arriving_casts, 0, s->layout.cells);
}

// Casts of the master copies of all ranks (padded), where casts are kept and while no job
// is under way; valid until the next one. All ranks call it together.
static inline const Real *cast_masters(Scheduler *s) {
    scheduler_call(s, s->communication, cast_masters_task, s);
    return s->arriving_casts;
}

// ---------------------------------------------------------------------------------------
// What overlapped rules share

// --sequential: each of the first commits of a run computes a whole batch and then waits
// for its job, with nothing beside it. Returns true when this commit was one of them.
static inline bool sequential_commit(Scheduler *s) {
    if (s->optimizer.commits >= s->settings.sequential || is_handed_over(s)) { return false; }
    accumulate(s, s->settings.micro_batches);
    hand_over(s, CLEAR);
    launch(s, COMMIT);
    wait_for(s);
    return true;
}

#endif
