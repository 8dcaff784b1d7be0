// sgd.h: plain SGD in the place of AdamW. With it the worked examples of the update rules
// are exact in fp32, and can be checked by hand.
#pragma once

#include "kernels/cpu/adamw.h"

// out = master - lr * g, and master too for a commit; an ElementwiseStep (scheduler/optimizer.h).
// It uses neither moments nor weight decay, and is for CPUs: optimizer_step refuses it on a
// GPU.
static inline void sgd_step(Stream *stream, const StepRange *range) {
    (void)stream;
    const AdamWStep step = range->step;
    for (size_t i = 0; i < range->count; i++) {
        float theta =
            range->master[i] - step.learning_rate * (range->gradient[i] / step.divisor * step.scale);
        if (range->keeps) { range->master[i] = theta; }
        range->out[i] = theta;
    }
}

// The same with a momentum that is a mean: m = beta1 m + (1 - beta1) g, out = master - lr m.
static inline void momentum_step(Stream *stream, const StepRange *range) {
    (void)stream;
    const AdamWStep step = range->step;
    float *mean = real_floats(range->first_moment);
    for (size_t i = 0; i < range->count; i++) {
        float gradient = range->gradient[i] / step.divisor * step.scale;
        float moved = step.beta1 * mean[i] + (1 - step.beta1) * gradient;
        float theta = range->master[i] - step.learning_rate * moved;
        if (range->keeps) {
            range->master[i] = theta;
            mean[i] = moved;
        }
        range->out[i] = theta;
    }
}
