// sparse_loco.h: SparseLoCo (Sarfi et al., 2025, arXiv 2508.15706): local steps; only the
// largest elements of their pseudo-gradient are sent, in two bits each.
//
//   tau = 0
//   compute         | H inner steps | encode | idle                   | outer step | H inner steps ...
//   communication                            | everybody's blocks     |
//
//   tau > 0
//   compute         | H - tau inner steps | encode | tau inner steps  | outer step | H - tau ...
//   communication                                  | everybody's blocks |
//
//   e = beta e - what the inner steps since the last sending have moved local
//   q = the 64 largest of every 4096 elements of e, as the format rounds them (kernels/sparse.h)
//   e = e - q                           e: this worker's error, 0 at the start
//   outer = outer - alpha mean(q)       weighted mean over the workers
//   local = outer - e + what the tau inner steps since the sending have moved local
//
// In the paper local is set to outer (--sparse-eager off): a worker loses every unsent step
// until error feedback sends it, about 64 rounds later. Here it keeps them: at all times the
// error is the difference between the common parameters and its own. This closes half of the
// gap to DDP at H = 4 and three quarters at H = 1 (dev/results/local-rules-2026-11-25.md).
// With beta < 1 old errors fade.
//
// Workers gather each other's blocks, 0.23 bits for an element and worker, and each adds them up,
// in the order of ranks. So outer stays the same bits on all workers; --wire has nothing to round.
//
// The tau steps during an exchange count once: local keeps them, so the next pseudo-gradient has
// them. For this a worker keeps a copy of its parameters at the sending.
//
// The paper waits (tau = 0) and has alpha = 1 and beta = 0.95. At the end of a run the
// steps since the last sending are exchanged, too. What is in the errors then is lost:
// sending it did not lower the loss.
#pragma once

#include "local_steps.h"
#include "scheduler/rule.h"

typedef struct SparseLocoOptions {
    int64_t inner_steps, delay; // H, tau
    double beta, alpha;
    bool eager;
} SparseLocoOptions;

static inline bool sparse_loco_check(const void *own, int layers, Error *error) {
    const SparseLocoOptions *options = (const SparseLocoOptions *)own;
    long long H = (long long)options->inner_steps, tau = (long long)options->delay;
    (void)layers;
    return tau < H ||
           error_set(
               error,
               "--sparse-tau %lld is not below --sparse-H %lld: an exchange must end before the next one "
               "begins; use %s%lld",
               tau, H, H == 1 ? "" : "0 .. ", H - 1);
}

static inline void sparse_loco_configure(const void *own, SchedulerSettings *settings) {
    const SparseLocoOptions *options = (const SparseLocoOptions *)own;
    LocalSettings *local = &settings->local;
    local->steps = (int)options->inner_steps;
    local->delay = (int)options->delay;
    local->sparse = true;
    local->sparse_eager = options->eager;
    local->sparse_beta = (float)options->beta;
    local->sparse_alpha = (float)options->alpha;
}

static inline void sparse_loco_period(Scheduler *s) {
    int steps = s->settings.local.steps, delay = s->settings.local.delay, left = steps_left(s, steps);
    if (left < steps) {
        inner_steps(s, left);
        return;
    }
    inner_steps(s, steps - delay);
    send_sparse(s);
    inner_steps(s, delay);
    wait_for(s);
    apply_sparse(s, delay > 0);
}

static inline bool sparse_loco_finish(Scheduler *s) {
    int64_t sent_at = s->local.fragments[0].applied_at; // an inner step
    bool changes = sent_at < s->optimizer.steps && !scheduler_is_halted(s);
    if (changes) {
        send_sparse(s);
        wait_for(s);
        apply_sparse(s, false);
    }
    return changes;
}

static const Rule sparse_loco_rule = {
    .name = "sparse-loco",
    .summary = "local steps, then an outer step with the largest elements of all",
    .kind = RULE_LOCAL,
    .advance = sparse_loco_period,
    .finish = sparse_loco_finish,
    .check = sparse_loco_check,
    .configure = sparse_loco_configure,
};
