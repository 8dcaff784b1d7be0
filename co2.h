// co2.h: CO2 (Sun et al., ICLR 2024, arXiv 2401.16265): local steps, and an outer
// momentum step that is one round late.
//
//   compute         | tau inner steps from b(t)      | tau inner steps from b(t+1) ...
//   communication   | sum of b(t-1) - x(t-1)         | sum of b(t) - x(t) ...
//                                                    ^ boundary: takes D(t-1), sends b(t) - x, x <- b(t+1)
//
//   m = beta m + D(t-1) / Lambda        D: mean over the workers of how far they came in a round
//   b(t+1) = b(t) - alpha clip(m, phi)  b(1) = b(0): nothing has been received yet
//
// A round has as long as its tau steps take to exchange the one before, so even a very
// slow network is hidden; the price is information that is a round old. Lambda, the
// penalty for that, is constant here, as in the released code; co2_gap is the place for
// another. The paper's own formula was not at hand. At the end the last sum is waited for
// and applied.
#ifndef ACCO_CO2_H
#define ACCO_CO2_H

#include "local_steps.h"

// The staleness gap penalty of this round, at least 1. It may depend on s->outer and
// s->momentum, but must be the same on all ranks.
static inline float co2_gap(const Scheduler *s) { return s->settings.outer_momentum.gap; }

static inline void co2_operation(Scheduler *s, const void *settings, size_t flat, size_t packed,
                                 size_t count) {
    outer_momentum(s->compute, s->outer + flat, s->momentum + flat, s->parameters.data + flat,
                   s->comm_buffer.data + packed, count, (const MomentumStep *)settings);
}

// Takes what has arrived and leaves what is to be sent in the exchange buffer.
static inline void co2_boundary(Scheduler *s) {
    MomentumStep step = s->settings.outer_momentum;
    step.received = s->job_in_flight;
    step.gap = co2_gap(s);
    if (step.received) { receive(s); }
    buffer_change(&s->comm_buffer, BUFFER_FREE, BUFFER_WRITING);
    if (!scheduler_is_halted(s)) { fragment_run(s, 0, co2_operation, &step); }
}

static inline void co2_commit(Scheduler *s) {
    inner_steps(s, steps_left(s, s->settings.steps));
    co2_boundary(s);
    if (!scheduler_is_halted(s)) { launch_average(s, 0); }
}

static inline void co2_finish(Scheduler *s) { co2_boundary(s); }

#endif
