// outer.cuh: the outer steps of local rules, on a GPU.
//
// Computes what kernels/cpu/outer.h defines, in the same order; bits may differ from the
// CPU's where a multiplication and an addition are fused. A result does not depend on how
// a vector is cut. Layout: as adamw.cuh.
#pragma once

#include "kernels/cuda/buffers.cuh"

#include "kernels/cpu/outer.h"

static __global__ void outer_pseudo_gradient_kernel(float *pseudo_gradient, const float *outer,
                                                    const float *local, size_t count, float weight,
                                                    bool wide) {
    float from[4], to[4];
    Quad quad = quad_of_kernel(count, wide);
    quad_load(from, outer, quad);
    quad_load(to, local, quad);
    for (int i = 0; i < 4; i++) { from[i] = weight * (from[i] - to[i]); }
    quad_store(pseudo_gradient, from, quad);
}

static inline void cuda_outer_pseudo_gradient(Stream *stream, float *pseudo_gradient, const float *outer,
                                              const float *local, size_t count, float weight) {
    bool wide = quad_fits(pseudo_gradient, outer, local);
    quad_launch(stream, outer_pseudo_gradient_kernel, count, pseudo_gradient, outer, local, count, weight,
                wide);
}

static __global__ void outer_nesterov_kernel(float *outer, float *momentum, float *local, const float *sum,
                                             size_t count, NesterovStep step, bool wide) {
    float place[4], velocity[4], worker[4], sent[4];
    Quad quad = quad_of_kernel(count, wide);
    quad_load(place, outer, quad);
    quad_load(velocity, momentum, quad);
    quad_load(worker, local, quad);
    quad_load(sent, sum, quad);
    for (int i = 0; i < 4; i++) {
        float mean = sent[i] * step.inverse_weight;
        velocity[i] = step.momentum * velocity[i] + mean;
        place[i] = place[i] - step.learning_rate * (mean + step.momentum * velocity[i]);
        worker[i] = step.alpha > 0.0f ? step.alpha * worker[i] + (1.0f - step.alpha) * place[i] : place[i];
    }
    quad_store(momentum, velocity, quad);
    quad_store(outer, place, quad);
    quad_store(local, worker, quad);
}

static inline void cuda_outer_nesterov(Stream *stream, float *outer, float *momentum, float *local,
                                       const float *sum, size_t count, const NesterovStep *step) {
    bool wide = quad_fits(outer, momentum, local, sum);
    quad_launch(stream, outer_nesterov_kernel, count, outer, momentum, local, sum, count, *step, wide);
}

// Without a sum, `exchange` and the momentum are not read, and the momentum is not
// written.
static __global__ void outer_momentum_kernel(float *base, float *momentum, float *local, float *exchange,
                                             const float *start, size_t count, MomentumStep step, bool wide) {
    float place[4], worker[4], delta[4];
    Quad quad = quad_of_kernel(count, wide);
    quad_load(place, base, quad);
    quad_load(worker, local, quad);
    if (start == base) {
        for (int i = 0; i < 4; i++) { delta[i] = place[i] - worker[i]; }
    } else {
        quad_load(delta, start, quad);
        for (int i = 0; i < 4; i++) { delta[i] -= worker[i]; }
    }
    if (step.received) {
        float velocity[4], sum[4];
        quad_load(velocity, momentum, quad);
        quad_load(sum, exchange, quad);
        for (int i = 0; i < 4; i++) {
            velocity[i] = step.beta * velocity[i] + sum[i] * step.inverse_weight / step.gap;
            place[i] = place[i] - step.alpha * outer_clip(velocity[i], step.phi);
        }
        quad_store(momentum, velocity, quad);
        quad_store(base, place, quad);
    }
    if (step.own_share > 0) {
        for (int i = 0; i < 4; i++) { place[i] -= step.alpha * step.own_share * delta[i]; }
    }
    quad_store(local, place, quad);
    for (int i = 0; i < 4; i++) { delta[i] *= step.weight; }
    quad_store(exchange, delta, quad);
}

static inline void cuda_outer_momentum(Stream *stream, float *base, float *momentum, float *local,
                                       float *exchange, const float *start, size_t count,
                                       const MomentumStep *step) {
    bool wide = quad_fits(base, momentum, local, exchange, start);
    quad_launch(stream, outer_momentum_kernel, count, base, momentum, local, exchange, start, count, *step,
                wide);
}
