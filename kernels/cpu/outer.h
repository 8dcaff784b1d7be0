// outer.h: the outer steps of local rules, whose workers train for a while on their own.
//
// All workers share outer parameters (`outer`, `base`); each has trained local ones from
// there. Their difference, outer - local, is the pseudo-gradient. Each counts with its worker's
// weight. Their sum over all workers, `sum`, is what an outer step descends along:
//
//   outer_nesterov    SGD with Nesterov momentum, no dampening, as PyTorch's
//                     (Douillard et al., 2023)
//   outer_momentum    heavy-ball momentum, clipped, on a sum that is one round old
//                     (Sun et al., 2024)
//
// All arrays are (count), fp32; the pseudo-gradient is taken in fp32 before any narrower
// wire format rounds it. Each function is one plain loop in the calling thread.
#pragma once

#include "kernels/wire.h"

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

static inline void cpu_outer_pseudo_gradient(float *pseudo_gradient, const float *outer, const float *local,
                                             size_t count, float weight) {
#pragma omp simd
    for (size_t i = 0; i < count; i++) { pseudo_gradient[i] = weight * (outer[i] - local[i]); }
}

// With the mean pseudo-gradient D = sum * inverse_weight:
//   momentum = mu * momentum + D
//   outer = outer - learning_rate * (D + mu * momentum)
//   local = alpha * local + (1 - alpha) * outer
static inline void cpu_outer_nesterov(float *outer, float *momentum, float *local, const float *sum,
                                      size_t count, const NesterovStep *step) {
    const float inverse = step->inverse_weight, rate = step->learning_rate, mu = step->momentum;
    const float alpha = step->alpha, rest = 1.0f - step->alpha;
#pragma omp simd
    for (size_t i = 0; i < count; i++) {
        float mean = sum[i] * inverse;
        float velocity = mu * momentum[i] + mean;
        float moved = outer[i] - rate * (mean + mu * velocity);
        momentum[i] = velocity;
        outer[i] = moved;
        local[i] = alpha > 0.0f ? alpha * local[i] + rest * moved : moved;
    }
}

WIRE_FUNCTION float outer_clip(float value, float phi) {
    float below = value > phi ? phi : value; // comparisons with NaN are false: it stays
    return phi > 0.0f ? (below < -phi ? -phi : below) : value;
}

// `start` is where the round began; it may be `base`. `exchange` holds, if `received`, the
// sum of the pseudo-gradients of the round before, with mean D; it becomes the
// pseudo-gradient of this round, weight * (start - local). Then
//   momentum = beta * momentum + D / gap
//   base = local = base - alpha * clip(momentum)
//   local = local - alpha * own_share * (start - local)    if it has one
// Without a sum, momentum and base stay, and only local moves.
static inline void cpu_outer_momentum(float *base, float *momentum, float *local, float *exchange,
                                      const float *start, size_t count, const MomentumStep *step) {
    const MomentumStep s = *step;
    const float own = s.alpha * s.own_share;
#pragma omp simd
    for (size_t i = 0; i < count; i++) {
        float delta = start[i] - local[i], moved = base[i];
        if (s.received) {
            float velocity = s.beta * momentum[i] + exchange[i] * s.inverse_weight / s.gap;
            momentum[i] = velocity;
            moved = base[i] - s.alpha * outer_clip(velocity, s.phi);
        }
        base[i] = moved;
        local[i] = own > 0.0f ? moved - own * delta : moved;
        exchange[i] = s.weight * delta;
    }
}
