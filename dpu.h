// dpu.h: delayed parameter update (Pipe-SGD, Li et al., 2018; ZeRO-Offload, Ren et al.,
// 2021), and ACCO-WP, which predicts.
//
//   dpu
//   compute         | micro-batches at theta(t-1)      | micro-batches at theta(t) ...
//   communication   | COMMIT theta(t) from the last sum | COMMIT theta(t+1) ...
//                   ^ launch                            ^ hand_over CLEAR
//
//   theta(t+1) = Opt(theta(t), mean gradient at theta(t-1))
//
// Everything is hidden at the traffic of zero1, but a gradient is applied to parameters
// that are one commit newer than those it was taken at: on a quadratic of curvature L it
// is stable for learning rates below 1/L, where the others bear 2/L. Sequential commits
// at the start help.
//
//   acco-wp (weight prediction; SAPipe's second option, Chen et al., 2022)
//   communication   | COMMIT theta(t), then predict theta~(t+1) = Opt?(theta(t), the same gradient) |
//
// Compute goes on at the prediction; theta itself exists only in the masters of the
// shards, so what is evaluated and saved is gathered for the occasion, into the
// accumulator, which is empty then. The prediction uses the learning rate of the commit
// just made.
#ifndef ACCO_DPU_H
#define ACCO_DPU_H

#include "scheduler.h"

static inline void delayed_commit(Scheduler *s, JobKind kind) {
    if (sequential_commit(s)) { return; }
    if (!is_handed_over(s)) {
        accumulate(s);
        hand_over(s, CLEAR);
    }
    launch(s, kind);
    accumulate(s);
    hand_over(s, CLEAR);
}

static inline void dpu_commit(Scheduler *s) { delayed_commit(s, COMMIT); }
static inline void acco_wp_commit(Scheduler *s) { delayed_commit(s, COMMIT_THEN_PREDICT); }

static inline void acco_wp_gather_task(void *context, Stream *stream) {
    Scheduler *s = (Scheduler *)context;
    Collective collective = {&s->layout, WIRE_FP32, s->gradients.data, s->optimizer.master, NULL};
    comm_all_gather(&s->comm, stream, &collective, 0, layout_shard(&s->layout));
}

static inline const float *acco_wp_committed(Scheduler *s) {
    if (!is_handed_over(s)) { return s->parameters.data; } // the last job predicted nothing
    scheduler_call(s, s->communication, acco_wp_gather_task, s);
    return s->gradients.data;
}

#endif
