// spike.h: steps that must not be made, how they are recognised, and where they come
// from.
//
// A spike is a loss or a gradient that is not finite, or a loss or the norm of a gradient
// that is far above what those before it lead one to expect: bad data may show in either
// alone. Every rank looks at its own gradients before it sends them, so it is known whose
// they are and which tensor the backward pass met first; that nothing is stepped with
// them all ranks decide alike, from the same few numbers (communication_job.h).
//
// A detector keeps mean and variance of the logarithm, over about the latest SPIKE_MEMORY
// commits: norms and losses are spread over factors, not over differences. What it judges
// too large it learns as if it had been at the limit, so that a level which has really
// changed is believed after a while. A NaN leaves it as it was.
#ifndef ACCO_SPIKE_H
#define ACCO_SPIKE_H

#include <math.h>
#include <stdbool.h>

typedef enum SpikePolicy {
    SPIKE_STOP,    // the run ends
    SPIKE_SKIP,    // the step is left out, and its data with it
    SPIKE_ROLLBACK // back to the latest checkpoint, and on with the data that come now
} SpikePolicy;

typedef enum SpikeKind {
    SPIKE_NONE,
    SPIKE_LOSS,      // of a micro-batch, is not finite
    SPIKE_GRADIENT,  // is not finite
    SPIKE_NORM,      // of the gradient, is too large
    SPIKE_HIGH_LOSS, // mean of a commit, is too large
    SPIKE_PARAMETERS // of a worker that walks by itself: they, or all gradients at them, are useless; leaving out steps mends nothing
} SpikeKind;

enum {
    SPIKE_MEMORY = 100,    // commits
    SPIKE_APPRENTICE = 20, // commits before a detector judges
    SPIKE_PATIENCE = 10    // steps in a row that are left out; then the run ends: it is not the data
};

#define SPIKE_LEAST_DEVIATION \
    0.05 // of the logarithm: very even values are no reason to call 10 % more a spike

// Where a worker met the first of them since it was last asked. Numbers from 1; 0: none.
typedef struct SpikeSite {
    double micro_batch; // of this worker, whose loss is not finite
    double
        element; // of the gradient sum that is not finite: the last one, which the backward pass comes to first
    bool high_loss; // local rules
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

static inline double spike_deviation(const SpikeDetector *detector) {
    return fmax(sqrt(detector->variance), SPIKE_LEAST_DEVIATION);
}

// The largest value that is no spike; infinite as long as nothing is known.
static inline double spike_largest(const SpikeDetector *detector) {
    if (!(detector->limit > 0) || detector->learned < SPIKE_APPRENTICE) { return INFINITY; }
    return exp(detector->mean + detector->limit * spike_deviation(detector));
}

// Whether a finite value is too large. Learns it in any case.
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

// Both are asked, and learn, whatever the other says.
static inline SpikeKind spike_judge_both(SpikeDetector *norms, SpikeDetector *losses, double norm,
                                         double loss) {
    bool large = spike_judge(norms, norm), high = spike_judge(losses, loss);
    return large ? SPIKE_NORM : high ? SPIKE_HIGH_LOSS : SPIKE_NONE;
}

#endif
