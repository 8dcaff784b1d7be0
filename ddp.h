// ddp.h: data parallel training as everybody knows it. The baseline for time, and the definition of what a commit computes.
//
//   compute         | k micro-batches |      idle               | k micro-batches ...
//   communication   |      idle       | all-reduce . full step  |
//
//   theta(t+1) = Opt(theta(t), sum of all gradients / their number)
//
// The verbs are those of zero1; the difference is `replicated` in rules.h: every rank holds the whole optimizer state and steps all of it.
// The all-reduce is a reduce-scatter and an all-gather of gradients, so the sums, and with an fp32 wire the parameters, are the same bits
// as under zero1.
#ifndef ACCO_DDP_H
#define ACCO_DDP_H

#include "scheduler.h"

static inline void ddp_commit(Scheduler *s) {
    accumulate(s);
    hand_over(s, CLEAR);
    launch(s, COMMIT);
    wait_for(s);
}

#endif
