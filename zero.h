// zero.h: ZeRO stage 1 (Rajbhandari et al., 2020). The same mathematics as ddp; each rank
// steps the optimizer on what it owns only.
//
//   compute         | micro-batches | forward . backward |idle| forward . backward ...
//   communication                        | reduce-scatter . step | all-gather |
//
// Traffic is that of an all-reduce; the optimizer state is divided by the number of
// ranks. Both halves overlap: gradients are sent as the last backward pass finishes them,
// and the next forward pass starts while the parameters of its later layers are still
// arriving.
#ifndef ACCO_ZERO_H
#define ACCO_ZERO_H

#include "scheduler.h"

static inline void zero1_commit(Scheduler *s) {
    launch_following(s, COMMIT);
    accumulate(s);
    wait_for(s);
}

#endif
