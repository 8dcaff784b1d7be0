// ddp.h: data parallel training as everybody knows it. The baseline for time, and the
// definition of what a commit computes.
//
//   compute         | micro-batches | forward . backward |  idle  | step | micro-batches ...
//   communication                              | all-reduce bucket by bucket |
//
//   theta(t+1) = Opt(theta(t), sum of all gradients / their number)
//
// Gradients of the last micro-batch are sent as the backward pass finishes them, so most
// of the exchange is hidden where the network is fast enough. The verbs are those of
// zero1; the difference is `replicated` in rules.h: every rank gets all the sums, holds
// the whole optimizer state and steps all of it. The sums, and with an fp32 wire the
// parameters, are the same bits as under zero1.
#ifndef ACCO_DDP_H
#define ACCO_DDP_H

#include "scheduler.h"

static inline void ddp_commit(Scheduler *s) {
    launch_following(s, COMMIT);
    accumulate(s);
    wait_for(s);
}

#endif
