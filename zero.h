// zero.h: ZeRO stage 1 (Rajbhandari et al., 2020). The mathematics is the same as ddp's, but
// each rank steps the optimizer only on the shard that it owns.
//
//   compute         | micro-batches | forward . backward |idle| forward . backward ...
//   communication                        | reduce-scatter . step | all-gather |
//
// The traffic equals an all-reduce's, and both halves overlap with computation:
// gradients are sent as the last backward pass finishes them, and the next forward pass
// starts while the parameters of later layers are still arriving.
#pragma once

#include "scheduler.h"
#include "scheduler/rule.h"

static inline void zero1_commit(Scheduler *s) {
    launch_following(s, COMMIT);
    accumulate(s, s->settings.micro_batches);
    wait_for(s);
    take_parameters(s);
}

static const Rule zero1_rule = {
    .name = "zero1",
    .summary = "reduce-scatter behind the last backward pass, each rank steps its shard, all-gather before "
               "the next forward pass",
    .kind = RULE_SYNCHRONOUS,
    .advance = zero1_commit,
};
