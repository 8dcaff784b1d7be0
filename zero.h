// zero.h: ZeRO stage 1 (Rajbhandari et al., 2020). The same mathematics as ddp; each rank steps the optimizer on its own shard only.
//
//   compute         | k micro-batches |               idle                      | k micro-batches ...
//   communication   |      idle       | reduce-scatter . shard step . all-gather|
//
// Traffic is that of an all-reduce; the optimizer state is divided by the number of ranks. Nothing overlaps, so the job reduces where the
// gradients are and gathers where the parameters are.
#ifndef ACCO_ZERO_H
#define ACCO_ZERO_H

#include "scheduler.h"

static inline void zero1_commit(Scheduler *s) {
    accumulate(s);
    hand_over(s, CLEAR);
    launch(s, COMMIT);
    wait_for(s);
}

#endif
