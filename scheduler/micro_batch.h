// micro_batch.h: what the compute stream does in accumulate(), micro-batch by micro-batch.
//
// It keeps pace with the job: the forward pass waits for parameters that are still arriving, the
// backward pass announces gradients that will not change any more. On a GPU marks in the queue say
// when these are there (job_wait_for_gradients), and products leave multiprocessors to NCCL.
#pragma once

#include "scheduler/state.h"

static inline void scheduler_compute_ended(Scheduler *s) {
    trace_end(&s->trace, TRACE_COMPUTE, s->job.commit);
}

// Pace::need (H7). The time spent waiting here is not compute time.
static inline void scheduler_need(void *self, size_t end) {
    Scheduler *s = (Scheduler *)self;
    if (watermark_has_reached(&s->arrived, end)) { return; }
    scheduler_compute_ended(s);
    watermark_wait(&s->arrived, end);
    trace_begin(&s->trace, TRACE_COMPUTE, TRACE_MICRO_BATCH);
}

// Whether the running micro-batch is the last of a round that a job follows.
static inline bool scheduler_is_followed(const Scheduler *s) {
    return s->job_in_flight && s->job.follows && s->round_begun == s->round_count;
}

// Pace::finish (H6). The last step of the watermark is taken in micro_batch_task, when the
// tally is complete too. On a GPU marks are set where a bucket is complete.
static inline void scheduler_finish(void *self, size_t begin) {
    Scheduler *s = (Scheduler *)self;
    Announcements *announced = &s->announced;
    if (!scheduler_is_followed(s) || begin == 0) { return; }
    size_t position = layout_padded(&s->layout) - begin;
    if (stream_is_on_gpu(s->compute)) {
        size_t bucket = layout_padded(&s->layout) / s->layout.cells * s->job.bucket_cells; // elements
        size_t before = announced->count > 0 ? announced->positions[announced->count - 1] : 0;
        bool full = announced->count > LAYOUT_CELLS; // the last announcement stands for what follows
        if (s->transport->size == 1 || position / bucket == before / bucket || full) { return; }
        gpu_mark(announced->marks[announced->count], s->compute->queue);
        announced->positions[announced->count] = position;
        __atomic_fetch_add(&announced->count, 1, __ATOMIC_RELEASE); // the job reads it meanwhile
    }
    watermark_raise(&s->finished, position);
}

// Whether a job may be communicating during the running micro-batch. The schedule decides it, or a
// measurement that the checkpoint keeps, so bits repeat. A job that follows overlaps the round's
// last micro-batch, and its gather overlaps the next round's first.
static inline bool scheduler_is_beside(const Scheduler *s) {
    int measured = s->settings.device.beside[s->job.kind == ESTIMATE];
    if (!s->job_in_flight) { return false; }
    if (!s->job.follows) { return measured == 0 || s->round_begun <= measured; }
    return scheduler_is_followed(s) || (s->round_begun == 1 && scheduler_shards(&s->settings));
}

// beside: its products leave NCCL its processors. The first micro-batch of a sum sets the
// gradients.
static inline MicroBatchResult scheduler_micro_batch(Scheduler *s, Stream *stream, uint64_t index,
                                                     bool beside) {
    int processors = beside ? s->settings.device.product_processors : 0;
    Pace pace = {.self = s,
                 .version = s->parameters_version,
                 .begins = s->gradients.tally.micro_batches == 0,
                 .need = scheduler_need,
                 .finish = scheduler_finish};
    if (processors > 0) { gemm_limit(stream, processors); }
    MicroBatchResult result = s->problem.micro_batch(s->problem.self, stream, index, scheduler_weights(s),
                                                     s->gradients.data, &pace);
    if (processors > 0) { gemm_limit(stream, 0); }
    return result;
}

static inline void micro_batch_task(void *context, Stream *stream) {
    Scheduler *s = (Scheduler *)context;
    Tally *tally = &s->gradients.tally;
    trace_begin(&s->trace, TRACE_COMPUTE, TRACE_MICRO_BATCH);
    uint64_t index = __atomic_fetch_add(&s->micro_batches_begun, 1, __ATOMIC_RELAXED);
    s->round_begun++;
    s->announced.count = 0;
    MicroBatchResult result = scheduler_micro_batch(s, stream, index, scheduler_is_beside(s));
    bool finite = isfinite(result.loss);
    tally->micro_batches += 1;
    tally->predicted += result.predicted;
    tally->loss += result.loss * result.predicted;
    tally->perfect_loss += result.perfect_loss * result.predicted;
    tally->not_finite += !finite;
    if (!finite && tally->site.micro_batch == 0) { tally->site.micro_batch = (double)index + 1; }
    scheduler_compute_ended(s);
    if (!scheduler_is_followed(s)) { return; }
    stream_settle(stream);
    watermark_raise(&s->finished, layout_padded(&s->layout)); // H6
}
