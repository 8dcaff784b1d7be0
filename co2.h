// co2.h: CO2 (Sun et al., ICLR 2024, arXiv 2401.16265): local steps, and an outer
// momentum step that is applied one period late.
//
//   compute         | tau inner steps from start(t)  | tau inner steps from start(t+1) ...
//   communication   | sum of start(t-1) - x(t-1)     | sum of start(t) - x(t) ...
//                                                    ^ boundary: receives D(t-1), makes b(t+1),
//                                                      sends start(t) - x(t), then x = start(t+1)
//
//   x: the parameters of a worker after its tau inner steps; b: what all workers have in common
//   D: weighted mean over the workers of the pseudo-gradient start - x, the distance that a
//      period has covered (local_steps.h: worker_weight)
//   m = beta m + D(t-1) / Lambda
//   b(t+1) = b(t) - alpha clip(m, phi)        b(1) = b(0): nothing has been received yet
//   start(t+1) = b(t+1) - alpha (start(t) - x(t)) / workers    eager, the default
//   start(t+1) = b(t+1)                                    --co2-eager off, as in the paper
//
// An exchange may take as long as the tau inner steps of the next period. The price is
// that the pseudo-gradient is one period old. Lambda makes the outer step smaller to
// allow for that; it is a constant (--co2-gap), as in the released code. At the end of a
// run the workers wait for the last sum and apply it.
//
// Eager (Kale et al., 2025, arXiv 2502.12996): a worker need not wait for its own part of the
// sum, so only the others' parts are a period late. It does not know the others' weights yet,
// so it takes all weights as equal. b is the same on all workers either way.
//
// How to choose Lambda: let b be the distance to a minimum, and let each period cover the fraction
// g of it. With alpha = 1 and beta = 0, b(t+1) = b(t) - (g / Lambda) b(t-1). If g > Lambda / 4,
// this oscillates with an amplitude that changes by sqrt(g / Lambda) a period. At g = 1 Lambda = 1
// keeps the amplitude, 2 halves it in two periods, and 4, the smallest that does not overshoot,
// halves it in about one. Far from a minimum a larger Lambda only makes the steps shorter.
#pragma once

#include "local_steps.h"
#include "scheduler/rule.h"

typedef struct Co2Options {
    int64_t inner_steps; // tau
    double beta, alpha;
    double phi; // 0: no clipping
    double gap; // Lambda
    bool eager;
} Co2Options;

static inline void co2_configure(const void *own, SchedulerSettings *settings) {
    const Co2Options *options = (const Co2Options *)own;
    MomentumStep *outer = &settings->local.outer_momentum;
    settings->local.steps = (int)options->inner_steps;
    outer->beta = (float)options->beta;
    outer->alpha = (float)options->alpha;
    outer->phi = (float)options->phi;
    outer->gap = (float)options->gap;
    settings->local.outer_eager = options->eager;
}

// Waits for the sum of the previous period and makes an outer step with it. Puts this period's
// pseudo-gradient into the communication buffer. Returns whether a sum was in flight.
static inline bool co2_boundary(Scheduler *s, bool eager) {
    bool received = s->job_in_flight;
    if (received) { wait_for(s); }
    buffer_change(&s->comm_buffer, BUFFER_FREE, BUFFER_WRITING);
    FragmentWork work = {
        .scheduler = s, .operation = FRAGMENT_MOMENTUM, .momentum = s->settings.local.outer_momentum};
    work.momentum.received = received;
    work.momentum.inverse_weight = inverse_weight(s);
    work.momentum.weight = worker_weight(s, &s->gradients.tally);
    work.momentum.own_share = eager ? 1.0f / (float)s->transport->size : 0;
    if (!scheduler_is_halted(s)) { scheduler_call(s, s->compute, fragment_task, &work); }
    return received;
}

static inline void co2_period(Scheduler *s) {
    bool eager = s->settings.local.outer_eager;
    if (eager) { local_keep_start(s); }
    inner_steps(s, steps_left(s, s->settings.local.steps));
    co2_boundary(s, eager);
    if (!scheduler_is_halted(s)) { launch_average(s, 0); }
}

static inline bool co2_finish(Scheduler *s) { return co2_boundary(s, false); }

static const Rule co2_rule = {
    .name = "co2",
    .summary = "local steps; their mean is exchanged during the next period",
    .kind = RULE_LOCAL,
    .job_in_flight_between_commits = true,
    .advance = co2_period,
    .finish = co2_finish,
    .configure = co2_configure,
};
