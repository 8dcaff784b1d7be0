// ddp.h: data-parallel training as PyTorch's DistributedDataParallel does it. It is the
// baseline for time, and it defines what a commit computes.
//
//   compute         | micro-batches | forward . backward |  idle  | step | micro-batches ...
//   communication                              | all-reduce bucket by bucket |
//
//   theta(t+1) = Opt(theta(t), sum of all gradients / their number)
//
// Gradients are sent bucket by bucket while the last backward pass still computes others.
// The verbs are the same as zero1's; the difference is `replicated`: every rank receives all
// the sums, holds the whole optimizer state and steps all of it. The sums have the same
// bits as under zero1, and with an fp32 wire so have the parameters.
#pragma once

#include "zero.h"

static const Rule ddp_rule = {
    .name = "ddp",
    .summary = "all-reduce behind the last backward pass, then every rank steps everything",
    .kind = RULE_SYNCHRONOUS,
    .replicated = true,
    .advance = zero1_commit,
};
