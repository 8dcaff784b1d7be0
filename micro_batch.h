// micro_batch.h: what the compute stream does in a round: micro-batches, and how each keeps
// pace with the job beside it. communication_job.h is the other stream's half.
//
//   forward    waits for parameters that are still arriving          scheduler_need (H7)
//   backward   announces gradients that will not change any more     scheduler_finish (H6)
//
// Only the last micro-batch of a round that a job follows announces gradients. Each adds
// what it found to the tally, which travels with the gradient sum.
#ifndef ACCO_MICRO_BATCH_H
#define ACCO_MICRO_BATCH_H

#include "communication_job.h"

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
// is taken in last_micro_batch_task, when the tally is complete too. On a GPU the job waits
// for a mark in compute's queue, and only where a bucket is complete.
static inline void scheduler_finish(void *self, size_t begin) {
    Scheduler *s = (Scheduler *)self;
    Announcements *announced = &s->announced;
    if (!announced->active || begin == 0) { return; }
    size_t position = layout_padded(&s->layout) - begin;
    if (s->compute->queue != NULL) {
        size_t bucket = layout_cell_begin(&s->layout, s->job.bucket);
        size_t before = announced->count > 0 ? announced->positions[announced->count - 1] : 0;
        if (s->transport->size == 1 || position / bucket == before / bucket) { return; }
        assert(announced->count <= LAYOUT_CELLS);
        gpu_mark(announced->marks[announced->count], s->compute->queue);
        announced->positions[announced->count] = position;
        __atomic_fetch_add(&announced->count, 1, __ATOMIC_RELEASE); // the job reads it meanwhile
    }
    watermark_raise(&s->finished, position);
}

static inline Pace scheduler_pace(Scheduler *s) {
    Pace pace = {
        .self = s, .version = s->parameters_version, .need = scheduler_need, .finish = scheduler_finish};
    return pace;
}

static inline void micro_batch_task(void *context, Stream *stream) {
    Scheduler *s = (Scheduler *)context;
    Pace pace = scheduler_pace(s);
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
    s->announced.active = true;
    s->announced.count = 0;
    micro_batch_task(context, stream);
    s->announced.active = false;
    stream_settle(stream);
    scheduler_give_tally(s, CLEAR);
    watermark_raise(&s->finished, layout_padded(&s->layout)); // H6
}

#endif
