// dpu.h: delayed parameter updates (Pipe-SGD, Li et al., 2018; ZeRO-Offload, Ren et al.,
// 2021), and ACCO-WP, the same with a prediction of the weights.
//
//   dpu
//   compute         | micro-batches at theta(t-1)      | micro-batches at theta(t) ...
//   communication   | COMMIT theta(t) from the last sum | COMMIT theta(t+1) ...
//                   ^ launch                            ^ hand_over CLEAR
//
//   theta(t+1) = Opt(theta(t), mean gradient at theta(t-1))
//
// The traffic equals zero1's and is hidden completely. The price: a gradient is applied to
// parameters one commit newer than the parameters it was computed at. On a quadratic of
// curvature L this is stable for learning rates below 1/L, where the other rules are stable
// below 2/L. Some sequential commits at the start of a run help (--sequential).
//
//   acco-wp (weight prediction; the second option of SAPipe, Chen et al., 2022)
//   communication   | COMMIT theta(t), then predict theta~(t+1) = Est(theta(t), the same gradient) |
//
// Compute continues at the prediction; theta itself exists only in the master copies of
// the shards (checkpoint/committed.h gathers it). The prediction uses the learning rate of the
// commit just made.
#pragma once

#include "scheduler.h"
#include "scheduler/rule.h"

static inline void delayed_commit(Scheduler *s, JobKind kind) {
    if (sequential_commit(s)) { return; }
    if (!is_handed_over(s)) {
        accumulate(s, s->settings.micro_batches);
        hand_over(s, CLEAR);
    }
    launch(s, kind);
    accumulate(s, s->settings.micro_batches);
    hand_over(s, CLEAR);
}

static inline void dpu_commit(Scheduler *s) { delayed_commit(s, COMMIT); }
static inline void acco_wp_commit(Scheduler *s) { delayed_commit(s, COMMIT_THEN_PREDICT); }

// At the end one gradient sum is still waiting: a last commit makes it count.
static inline bool delayed_finish(Scheduler *s) {
    if (!is_handed_over(s)) { return false; }
    launch(s, COMMIT);
    wait_for(s);
    take_parameters(s);
    return true;
}

static const Rule dpu_rule = {
    .name = "dpu",
    .summary = "communicates a gradient while it computes the next: updates are one commit late",
    .kind = RULE_OVERLAPPED,
    .advance = dpu_commit,
    .finish = delayed_finish,
};

static const Rule acco_wp_rule = {
    .name = "acco-wp",
    .summary = "as dpu, but computes at a prediction of the next parameters",
    .kind = RULE_OVERLAPPED,
    .advance = acco_wp_commit,
    .finish = delayed_finish,
    .predicts = true, // while no sum is handed over, the last job made nothing but the commit
};
