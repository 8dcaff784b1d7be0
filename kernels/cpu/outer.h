// outer.h: the outer steps of rules whose workers take steps of their own: elementwise,
// over one contiguous range.
//
// A worker walks from the copy that all share (outer, base) to parameters of its own
// (local). What is exchanged is the way back, outer - local, taken in fp32 before any
// narrower format sees it; `sum` is the sum of it over all workers. outer_nesterov is
// PyTorch's SGD with Nesterov momentum and no dampening (DiLoCo), outer_momentum is CO2's step
// with a momentum that is clipped.
//
// Each runs in the thread that calls it. They are kept out of line: inlined, the compiler
// may fuse other multiplications and additions at every place of call, and the result of
// a run would depend on how the vector was cut.
#ifndef ACCO_KERNELS_CPU_OUTER_H
#define ACCO_KERNELS_CPU_OUTER_H

#include <stdbool.h>
#include <stddef.h>

#define OUTER_FUNCTION __attribute__((noinline, unused)) static

typedef struct NesterovStep {
    float inverse_ranks; // 1 / number of workers
    float learning_rate, momentum;
    float alpha; // weight of the local parameters in the merge; 0: they become the outer ones
} NesterovStep;

typedef struct MomentumStep {
    float inverse_ranks;
    float beta, alpha; // memory and rate of the outer momentum
    float phi;         // bound on every element of the momentum that is applied; 0: none
    float gap;         // staleness gap penalty: divides what is one round old
    bool received;     // there is a sum: false at the end of the first round only
} MomentumStep;

// delta = outer - local
OUTER_FUNCTION void cpu_outer_delta(float *delta, const float *outer, const float *local, size_t count) {
#pragma omp simd
    for (size_t i = 0; i < count; i++) { delta[i] = outer[i] - local[i]; }
}

// momentum = mu * momentum + D; outer -= learning_rate * (D + mu * momentum); local =
// alpha * local + (1 - alpha) * outer, for the mean D of what all workers sent.
OUTER_FUNCTION void cpu_outer_nesterov(float *outer, float *momentum, float *local, const float *sum,
                                       size_t count, const NesterovStep *step) {
    const float inverse = step->inverse_ranks, rate = step->learning_rate, mu = step->momentum;
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

static inline float outer_clip(float value, float phi) {
    float below = value > phi ? phi : value; // a NaN stays
    return phi > 0.0f ? (below < -phi ? -phi : below) : value;
}

// exchange: in, where `received`, the sum of what was sent a round ago; out, base -
// local, to be sent now. Then base and local become base - alpha * clip(momentum), with
// momentum = beta * momentum + D / gap; without a sum the base stays.
OUTER_FUNCTION void cpu_outer_momentum(float *base, float *momentum, float *local, float *exchange,
                                       size_t count, const MomentumStep *step) {
    const MomentumStep s = *step;
#pragma omp simd
    for (size_t i = 0; i < count; i++) {
        float delta = base[i] - local[i], moved = base[i];
        if (s.received) {
            float velocity = s.beta * momentum[i] + exchange[i] * s.inverse_ranks / s.gap;
            momentum[i] = velocity;
            moved = base[i] - s.alpha * outer_clip(velocity, s.phi);
        }
        base[i] = moved;
        local[i] = moved;
        exchange[i] = delta;
    }
}

#endif
