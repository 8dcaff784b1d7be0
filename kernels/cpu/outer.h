// outer.h: the outer steps of local rules, whose workers train for a while on their own.
//
// All workers share outer parameters (`outer`); each has trained local ones from there. Their
// difference, outer - local, is the pseudo-gradient. Each counts with its worker's weight. Their
// sum over all workers is what an outer step descends along:
//
//   outer_nesterov    SGD with Nesterov momentum, no dampening, as PyTorch's
//                     (Douillard et al., 2023)
//   outer_momentum    heavy-ball momentum, clipped, on a sum that is one round old
//                     (Sun et al., 2024)
//
// The pseudo-gradient is taken in fp32 before any narrower wire format rounds it. Each function is
// one plain loop in the calling thread.
#pragma once

#include "kernels/wire.h"

// The elements that an outer step works on: (count) each, fp32. Not all steps use all arrays.
typedef struct OuterRange {
    float *outer, *momentum; // what all workers share
    float *local;            // this worker's parameters
    float *exchange;         // the sum that was received, then what to send; sparse: the unsent, or NULL
    const float *start;      // where the local parameters began; may be `outer`; sparse: or NULL
    size_t count;
} OuterRange;

typedef struct NesterovStep {
    float inverse_weight; // 1 / sum of the weights of all workers
    float learning_rate, momentum;
    float alpha; // weight of the local parameters in the merge; 0: they become the outer ones
} NesterovStep;

typedef struct MomentumStep {
    float inverse_weight; // of the sum that was received
    float weight;         // of this worker in the next one
    float own_share;      // local starts with this part of the outer step to come, its own; 0: without
    float beta, alpha;    // decay and learning rate of the outer momentum
    float phi;            // the momentum that is applied is clipped to [-phi, phi]; 0: not clipped
    float gap;            // staleness gap penalty: divides the sum, which is one round old
    bool received;        // there is a sum; false only at the end of the first round
} MomentumStep;

// exchange = weight * (outer - local)
static inline void cpu_outer_pseudo_gradient(const OuterRange *range, float weight) {
    const OuterRange r = *range;
#pragma omp simd
    for (size_t i = 0; i < r.count; i++) { r.exchange[i] = weight * (r.outer[i] - r.local[i]); }
}

// With the mean pseudo-gradient D = exchange * inverse_weight:
//   momentum = mu * momentum + D
//   outer = outer - learning_rate * (D + mu * momentum)
//   local = alpha * local + (1 - alpha) * outer
static inline void cpu_outer_nesterov(const OuterRange *range, const NesterovStep *step) {
    const OuterRange r = *range;
    const float inverse = step->inverse_weight, rate = step->learning_rate, mu = step->momentum;
    const float alpha = step->alpha, rest = 1.0f - step->alpha;
#pragma omp simd
    for (size_t i = 0; i < r.count; i++) {
        float mean = r.exchange[i] * inverse;
        float velocity = mu * r.momentum[i] + mean;
        float moved = r.outer[i] - rate * (mean + mu * velocity);
        r.momentum[i] = velocity;
        r.outer[i] = moved;
        r.local[i] = alpha > 0.0f ? alpha * r.local[i] + rest * moved : moved;
    }
}

WIRE_FUNCTION float outer_clip(float value, float phi) {
    float below = value > phi ? phi : value; // comparisons with NaN are false: it stays
    return phi > 0.0f ? (below < -phi ? -phi : below) : value;
}

// `exchange` holds, if `received`, the sum of the pseudo-gradients of the round before, with mean
// D; it becomes the pseudo-gradient of this round, weight * (start - local). Then
//   momentum = beta * momentum + D / gap
//   outer = local = outer - alpha * clip(momentum)
//   local = local - alpha * own_share * (start - local)    if it has one
// Without a sum, momentum and outer stay, and only local moves.
static inline void cpu_outer_momentum(const OuterRange *range, const MomentumStep *step) {
    const OuterRange r = *range;
    const MomentumStep s = *step;
    const float own = s.alpha * s.own_share;
#pragma omp simd
    for (size_t i = 0; i < r.count; i++) {
        float delta = r.start[i] - r.local[i], moved = r.outer[i];
        if (s.received) {
            float velocity = s.beta * r.momentum[i] + r.exchange[i] * s.inverse_weight / s.gap;
            r.momentum[i] = velocity;
            moved = r.outer[i] - s.alpha * outer_clip(velocity, s.phi);
        }
        r.outer[i] = moved;
        r.local[i] = own > 0.0f ? moved - own * delta : moved;
        r.exchange[i] = s.weight * delta;
    }
}
