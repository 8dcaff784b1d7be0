// scheduler.h: the verbs. Every update rule is a few lines of them.
//
//   launch(COMMIT | ...)       starts a job on the communication stream, on the gradient
//                              sum that the last hand_over gave it
//   launch_following(COMMIT)   starts a job on the gradient sum of the coming
//                              accumulate(): it sends gradients while the last backward
//                              pass still makes others
//   accumulate(n)              runs n micro-batches on the compute stream; an adaptive
//                              schedule adds more until the job has ended
//   wait_for()                 waits for the job, and accounts for it
//   take_parameters()          the next micro-batch computes with what the job has made
//   hand_over(CLEAR | KEEP)    the boundary, where the buffers of both streams meet: waits
//                              for the job that ran and takes its parameters, gives the
//                              gradient sum to the next one, and begins another or lets it
//                              keep growing
//   is_handed_over()           does a gradient sum wait for the next launch? false at the start
//   sequential_commit()        --sequential: makes one of a run's first commits without
//                              overlap; false: those are over
//
// local_steps.h adds the verbs of local rules. A round of an overlapped rule, and of a
// synchronous one, whose job follows backward:
//
//   compute         | micro-batches                  |idle| hand_over | micro-batches ...
//   communication   | reduce . summary . step . gather    |           | ...
//                   ^ launch                    exposed ^
//
//   compute         | micro-batches | forward . backward |idle | forward . backward ...
//   communication                              | reduce . step | gather |
//                                                exposed ^       ^ runs ahead of the forward pass
//
// What must happen before what. The code names each number where it makes sure of it:
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
//       job_gather_task() to scheduler_need().
// Only the host thread calls the verbs. Between two of them at most one job and one round
// of micro-batches run; in synchronous rules perhaps also the gather of the previous job.
#pragma once

#include "scheduler/account.h"
#include "scheduler/job.h"
#include "scheduler/micro_batch.h"
#include "scheduler/start.h"
#include "scheduler/wait.h"

static inline void scheduler_enqueue_job(Scheduler *s) {
    stream_run(s->communication, job_task, s); // H3
    event_record(&s->stepped, s->communication);
    stream_run(s->communication, job_gather_task, s);
    event_record(&s->communicated, s->communication);
    if (!s->settings.overlap) { scheduler_settle(s); }
}

static inline void launch(Scheduler *s, JobKind kind) {
    buffer_change(&s->comm_buffer, BUFFER_READY, BUFFER_WRITING);
    job_prepare(s, kind, false);
    scheduler_enqueue_job(s);
}

// Without overlap accumulate() starts the job when it has ended.
static inline void launch_following(Scheduler *s, JobKind kind) {
    assert(s->settings.kind == RULE_SYNCHRONOUS && !s->settings.adaptive);
    watermark_reset(&s->finished, 0);
    job_prepare(s, kind, true);
    if (s->settings.overlap) { scheduler_enqueue_job(s); }
}

// The gradients are added to s->gradients. Compute stream; the host waits, since it must
// not run ahead of a late job either. However long a job takes, an adaptive rank adds no more
// than its part of what is left of the training.
static inline void accumulate(Scheduler *s, int count) {
    double left = (s->settings.target - s->gradients_done) / s->transport->size - count;
    bool followed = s->job_in_flight && s->job.follows;
    buffer_change(&s->parameters, BUFFER_FREE, BUFFER_READING);
    buffer_change(&s->gradients, BUFFER_FREE, BUFFER_WRITING);
    s->round_begun = 0;
    s->round_count = count;
    do {
        for (int i = 0; i < count; i++) { stream_run(s->compute, micro_batch_task, s); } // H4
        event_record(&s->computed, s->compute);
        scheduler_wait_event(s, &s->computed); // H1
        count = 1;
    } while (s->settings.adaptive && left-- > 0 && !event_query(&s->communicated));
    buffer_change(&s->parameters, BUFFER_READING, BUFFER_FREE);
    buffer_change(&s->gradients, BUFFER_WRITING, followed ? BUFFER_WRITING : BUFFER_READY);
    if (followed && !s->settings.overlap) { scheduler_enqueue_job(s); }
}

static inline void boundary_task(void *context, Stream *stream) {
    Scheduler *s = (Scheduler *)context;
    trace_begin(&s->trace, TRACE_COMPUTE, "boundary");
    buffer_copy(stream, s->comm_buffer.data, s->gradients.data, layout_padded(&s->layout));
    stream_settle(stream);
    scheduler_compute_ended(s);
}

// A job that followed the backward pass has stepped by then; its parameters keep arriving.
static inline void wait_for(Scheduler *s) {
    Buffer *sum = job_buffer(s, &s->job);
    scheduler_wait_event(s, s->job.follows ? &s->stepped : &s->communicated); // H2, H5
    s->job_in_flight = false;
    memset(&sum->tally, 0, sizeof sum->tally);
    buffer_change(sum, BUFFER_WRITING, BUFFER_FREE);
    scheduler_account_job(s);
}

// The job of an overlapped rule gathers into a second buffer; the two are swapped here.
static inline void take_parameters(Scheduler *s) {
    scheduler_change_parameters(s, s->job.is_cast);
    if (s->job.follows) { return; }
    if (s->settings.keeps_casts) {
        Real *taken = s->arriving_casts;
        s->arriving_casts = s->casts;
        s->casts = taken;
    } else {
        buffers_exchange(&s->parameters, &s->comm_buffer);
    }
}

// First takes the parameters of the job in flight, then gives the gradient sum to the
// next one: the communication buffer must be emptied before it is filled. A sum that keeps
// growing is copied (compute stream; the host waits: H3, H4). Otherwise the buffers are
// swapped: the first micro-batch of the next sum overwrites what it finds.
static inline void hand_over(Scheduler *s, HandOver mode) {
    assert(s->settings.kind == RULE_OVERLAPPED);
    if (s->job_in_flight) {
        wait_for(s);
        take_parameters(s);
    }
    buffer_change(&s->comm_buffer, BUFFER_FREE, BUFFER_WRITING);
    if (mode == KEEP) {
        scheduler_call(s, s->compute, boundary_task, s);
    } else {
        buffers_exchange(&s->gradients, &s->comm_buffer);
    }
    scheduler_give_sum(s, mode);
    buffer_change(&s->gradients, BUFFER_READY, BUFFER_FREE);
}

// Forgets what has been computed since the latest commit, and the job in flight.
static inline void scheduler_drop(Scheduler *s) {
    scheduler_settle(s);
    memset(&s->gradients.tally, 0, sizeof s->gradients.tally);
    memset(&s->job, 0, sizeof s->job);
    scheduler_change_parameters(s, false); // others may be loaded now
    s->parameters.state = s->gradients.state = s->comm_buffer.state = BUFFER_FREE;
    s->job_in_flight = s->spikes.rollback_due = false;
}

// Whether a gradient sum waits for the next launch: not before the first round.
static inline bool is_handed_over(const Scheduler *s) { return s->comm_buffer.state == BUFFER_READY; }

// --sequential: each of the first commits of a run computes a whole batch and then waits
// for its job, without overlap. Returns true when this commit was one of them.
static inline bool sequential_commit(Scheduler *s) {
    if (s->optimizer.steps >= s->settings.sequential || is_handed_over(s)) { return false; }
    accumulate(s, s->settings.micro_batches);
    hand_over(s, CLEAR);
    launch(s, COMMIT);
    wait_for(s);
    take_parameters(s);
    return true;
}
