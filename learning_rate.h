// learning_rate.h: the learning rate as a function of progress.
//
// Progress is counted in micro-batch gradients committed by all workers together (--lr-by grads), so that rules and runs with different or
// varying batch sizes see the same rate at the same number of tokens, or in commits (--lr-by commits). Warm-up is linear and its first
// commit has a rate above zero. An estimate uses the rate of the commit that it anticipates: progress moves at commits only.
#ifndef ACCO_LEARNING_RATE_H
#define ACCO_LEARNING_RATE_H

#include <math.h>

typedef enum ScheduleKind { SCHEDULE_CONSTANT, SCHEDULE_LINEAR, SCHEDULE_COSINE } ScheduleKind;

typedef struct LearningRate {
    ScheduleKind kind;
    double peak, minimum;
    double step;   // progress that a commit of nominal size makes
    double warmup; // progress at which the peak is reached
    double total;  // progress at which the minimum is reached
} LearningRate;

// The rate of the commit that starts when `progress` has been made.
static inline double learning_rate_at(const LearningRate *schedule, double progress) {
    if (progress + schedule->step < schedule->warmup) { return schedule->peak * (progress + schedule->step) / schedule->warmup; }
    if (schedule->kind == SCHEDULE_CONSTANT) { return schedule->peak; }
    double span = schedule->total - schedule->warmup;
    double fraction = span > 0 ? (progress - schedule->warmup) / span : 1.0;
    fraction = fraction < 0 ? 0 : fraction > 1 ? 1 : fraction;
    double factor = schedule->kind == SCHEDULE_LINEAR ? 1.0 - fraction : 0.5 * (1.0 + cos(3.14159265358979323846 * fraction));
    return schedule->minimum + (schedule->peak - schedule->minimum) * factor;
}

#endif
