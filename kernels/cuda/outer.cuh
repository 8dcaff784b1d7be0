// outer.cuh: the outer steps of local rules, on a GPU.
//
// Computes what kernels/cpu/outer.h defines, in the same order; bits may differ from the
// CPU's where a multiplication and an addition are fused. A result does not depend on how
// a vector is cut. Layout: as adamw.cuh.
#pragma once

#include "kernels/cuda/buffers.cuh"

#include "kernels/cpu/outer.h"

static __global__ void outer_pseudo_gradient_kernel(OuterRange range, float weight, bool wide) {
    float from[4], to[4];
    Quad quad = quad_of_kernel(range.count, wide);
    quad_load(from, range.outer, quad);
    quad_load(to, range.local, quad);
    for (int i = 0; i < 4; i++) { from[i] = weight * (from[i] - to[i]); }
    quad_store(range.exchange, from, quad);
}

static inline void cuda_outer_pseudo_gradient(Stream *stream, const OuterRange *range, float weight) {
    bool wide = quad_fits(range->exchange, range->outer, range->local);
    quad_launch(stream, outer_pseudo_gradient_kernel, range->count, *range, weight, wide);
}

static __global__ void outer_nesterov_kernel(OuterRange range, NesterovStep step, bool wide) {
    float place[4], velocity[4], worker[4], sent[4];
    Quad quad = quad_of_kernel(range.count, wide);
    quad_load(place, range.outer, quad);
    quad_load(velocity, range.momentum, quad);
    quad_load(worker, range.local, quad);
    quad_load(sent, range.exchange, quad);
    for (int i = 0; i < 4; i++) {
        float mean = sent[i] * step.inverse_weight;
        velocity[i] = step.momentum * velocity[i] + mean;
        place[i] = place[i] - step.learning_rate * (mean + step.momentum * velocity[i]);
        worker[i] = step.alpha > 0.0f ? step.alpha * worker[i] + (1.0f - step.alpha) * place[i] : place[i];
    }
    quad_store(range.momentum, velocity, quad);
    quad_store(range.outer, place, quad);
    quad_store(range.local, worker, quad);
}

static inline void cuda_outer_nesterov(Stream *stream, const OuterRange *range, const NesterovStep *step) {
    bool wide = quad_fits(range->outer, range->momentum, range->local, range->exchange);
    quad_launch(stream, outer_nesterov_kernel, range->count, *range, *step, wide);
}

// Without a sum, `exchange` and the momentum are not read, and the momentum is not written.
static __global__ void outer_momentum_kernel(OuterRange range, MomentumStep step, bool wide) {
    float place[4], worker[4], delta[4];
    Quad quad = quad_of_kernel(range.count, wide);
    quad_load(place, range.outer, quad);
    quad_load(worker, range.local, quad);
    if (range.start == range.outer) {
        for (int i = 0; i < 4; i++) { delta[i] = place[i] - worker[i]; }
    } else {
        quad_load(delta, range.start, quad);
        for (int i = 0; i < 4; i++) { delta[i] -= worker[i]; }
    }
    if (step.received) {
        float velocity[4], sum[4];
        quad_load(velocity, range.momentum, quad);
        quad_load(sum, range.exchange, quad);
        for (int i = 0; i < 4; i++) {
            velocity[i] = step.beta * velocity[i] + sum[i] * step.inverse_weight / step.gap;
            place[i] = place[i] - step.alpha * outer_clip(velocity[i], step.phi);
        }
        quad_store(range.momentum, velocity, quad);
        quad_store(range.outer, place, quad);
    }
    if (step.own_share > 0) {
        for (int i = 0; i < 4; i++) { place[i] -= step.alpha * step.own_share * delta[i]; }
    }
    quad_store(range.local, place, quad);
    for (int i = 0; i < 4; i++) { delta[i] *= step.weight; }
    quad_store(range.exchange, delta, quad);
}

static inline void cuda_outer_momentum(Stream *stream, const OuterRange *range, const MomentumStep *step) {
    bool wide =
        quad_fits(range->outer, range->momentum, range->local, range->exchange) && quad_fits(range->start);
    quad_launch(stream, outer_momentum_kernel, range->count, *range, *step, wide);
}
