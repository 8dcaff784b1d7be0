// diloco.h: DiLoCo (Douillard et al., 2023, arXiv 2311.08105) and Streaming DiLoCo
// (Douillard et al., 2025, arXiv 2501.18512).
//
//   diloco
//   compute         | H inner steps | idle                        | outer step | H inner steps ...
//   communication                   | sum of outer - local        |
//
//   buf = mu buf + D;  outer -= lr_outer (D + mu buf);  local = outer       D: mean over the workers of outer - local
//
//   streaming-diloco, fragments p = 0, 1, .. P-1 in turn, one every H/P steps
//   compute         | H/P - tau inner steps | send p | tau inner steps | apply p | ...
//   communication                                    | sum of fragment p |
//
//   local = alpha local + (1 - alpha) outer, of the fragment
//
// Every element is exchanged once in H inner steps. Streaming sends a fragment at a time,
// so bursts are P times smaller, and hides each behind tau steps; D is taken when it is
// sent, and the steps that follow it are kept with weight alpha. All ranks count the same
// steps, so they agree on which fragment is due without a word. Evaluated and saved is
// the outer copy.
//
// At the end DiLoCo does a shorter period. Streaming sends nothing that it could not
// apply in time; then every fragment that has moved since its last exchange is exchanged
// once more.
#ifndef ACCO_DILOCO_H
#define ACCO_DILOCO_H

#include "local_steps.h"

static inline void diloco_commit(Scheduler *s) {
    inner_steps(s, steps_left(s, s->settings.steps));
    send(s, 0);
    receive(s);
    apply(s, 0, 0);
}

static inline void streaming_diloco_commit(Scheduler *s) {
    int interval = s->settings.steps / s->settings.fragments, left = steps_left(s, interval);
    if (left < interval) {
        inner_steps(s, left);
        return;
    }
    inner_steps(s, interval - s->settings.delay);
    send(s, s->fragment);
    inner_steps(s, s->settings.delay);
    receive(s);
    apply(s, s->fragment, s->settings.outer_nesterov.alpha);
    s->fragment = (s->fragment + 1) % s->settings.fragments;
}

static inline void streaming_diloco_finish(Scheduler *s) {
    for (int fragment = 0; fragment < s->settings.fragments && !scheduler_is_halted(s); fragment++) {
        if (s->fragments[fragment].applied_at == s->optimizer.commits) { continue; }
        send(s, fragment);
        receive(s);
        apply(s, fragment, 0);
    }
    local_settle(s);
}

#endif
