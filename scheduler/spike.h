// spike.h: how bad steps are recognised, and where they come from.
//
// A spike is a loss or a gradient that is not finite; or a loss, or the norm of a gradient, far
// above what earlier commits make likely: bad data may show in either alone.
//
// A detector keeps the mean and the variance of the logarithm over about the latest SPIKE_MEMORY
// commits, because norms and losses vary by factors. A value above the limit is learnt as if it
// were at the limit, so that a level which has really changed is accepted after a while.
#pragma once

#include <math.h>
#include <stdbool.h>

// --on-spike, in the order of its choices.
typedef enum SpikePolicy {
    SPIKE_STOP,    // the run ends
    SPIKE_SKIP,    // the step is left out, and its data with it
    SPIKE_ROLLBACK // back to the latest checkpoint, then on with other data
} SpikePolicy;

typedef enum SpikeKind {
    SPIKE_NONE,
    SPIKE_LOSS,      // the loss of a micro-batch is not finite
    SPIKE_GRADIENT,  // a gradient is not finite
    SPIKE_NORM,      // the norm of a gradient is too large
    SPIKE_HIGH_LOSS, // the mean loss of a commit is too large
    SPIKE_PARAMETERS // local rules: a worker's parameters are useless; skipping steps cannot help
} SpikeKind;

enum {
    SPIKE_MEMORY = 100, // commits
    SPIKE_WARMUP = 20,  // commits before a detector judges
    SPIKE_PATIENCE = 10 // skipped steps in a row after which the run ends: then it is not the data
};

// The least standard deviation of the logarithm: 10 % above even values is no spike.
#define SPIKE_LEAST_DEVIATION 0.05

// A worker's first bad value since its last report. Numbers count from 1; 0: none.
typedef struct SpikeSite {
    double micro_batch; // of this worker: the micro-batch whose loss is not finite
    double element; // of the gradient sum: the last that is not finite, which the backward pass makes first
    bool high_loss; // local rules: the loss of the step was too large
} SpikeSite;

static inline SpikeKind spike_kind_of(const SpikeSite *site) {
    return site->micro_batch > 0 ? SPIKE_LOSS
           : site->element > 0   ? SPIKE_GRADIENT
           : site->high_loss     ? SPIKE_HIGH_LOSS
                                 : SPIKE_NORM;
}

typedef struct SpikeDetector {
    double limit; // standard deviations above the mean; 0: nothing that is finite is a spike
    double learned, mean, variance;
} SpikeDetector;

// The largest value that is no spike; infinite as long as nothing is known.
static inline double spike_largest(const SpikeDetector *detector) {
    if (!(detector->limit > 0) || detector->learned < SPIKE_WARMUP) { return INFINITY; }
    double deviation = fmax(sqrt(detector->variance), SPIKE_LEAST_DEVIATION);
    return exp(detector->mean + detector->limit * deviation);
}

// Says whether a finite value is too large, and learns it in any case.
static inline bool spike_judge(SpikeDetector *detector, double value) {
    double largest = spike_largest(detector);
    bool spike = value > largest;
    if (!(detector->limit > 0) || !(value > 0)) { return spike; }
    double weight = 1 / fmin(detector->learned + 1, SPIKE_MEMORY),
           difference = log(spike ? largest : value) - detector->mean;
    detector->learned += 1;
    detector->mean += weight * difference;
    detector->variance = (1 - weight) * (detector->variance + weight * difference * difference);
    return spike;
}

// Asks both detectors, so that both learn, whatever the first one says.
static inline SpikeKind spike_judge_both(SpikeDetector *norms, SpikeDetector *losses, double norm,
                                         double loss) {
    bool large = spike_judge(norms, norm), high = spike_judge(losses, loss);
    return large ? SPIKE_NORM : high ? SPIKE_HIGH_LOSS : SPIKE_NONE;
}
