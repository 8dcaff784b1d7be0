// adamw.h: one optimizer step over a range of elements, fused into one pass, and plain SGD for worked examples.
//
// A step either commits (master and moments move) or estimates (they stay as they are and only the result is written, straight from
// registers: no copy of the optimizer state is ever made). Both compute the same value with the same instructions, so an estimate equals the
// commit that would follow on the same gradient, bit for bit.
//
//   g = gradient / divisor * scale              divisor: how many micro-batch gradients the sum holds; scale: gradient clipping
//   theta = master * (1 - lr * weight_decay)    decoupled weight decay (Loshchilov and Hutter, 2019), in PyTorch's order
//   m = beta1 * m + (1 - beta1) * g             v = beta2 * v + (1 - beta2) * g * g
//   out = theta - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)
//
// `out` may be `master` itself (then an estimate is not allowed) but must not overlap anything else.
#ifndef ACCO_KERNELS_CPU_ADAMW_H
#define ACCO_KERNELS_CPU_ADAMW_H

#include <math.h>
#include <stddef.h>

#include "../../runtime/device.h"

// Elements of one task: 5 arrays of 64 KB stay in the second-level cache.
enum { ADAMW_BLOCK = 16384 };

typedef struct AdamWStep {
    float learning_rate, beta1, beta2, epsilon;
    float correction1, correction2; // 1 - beta^t with t the number of this step, from 1
    float weight_decay;
    float divisor, scale; // of the gradient
} AdamWStep;

typedef struct AdamWRange {
    float *out, *master, *first_moment, *second_moment; // (count)
    const float *gradient;                               // (count)
    size_t count;
    AdamWStep step;
} AdamWRange;

static inline void adamw_block(const AdamWRange *range, size_t begin, size_t end, bool commit) {
    const AdamWStep step = range->step;
    float *out = range->out, *master = range->master, *first = range->first_moment, *second = range->second_moment;
    const float *gradient = range->gradient;
    const float keep = 1.0f - step.learning_rate * step.weight_decay;
    const float gain1 = 1.0f - step.beta1, gain2 = 1.0f - step.beta2;
#pragma omp simd
    for (size_t i = begin; i < end; i++) {
        float g = gradient[i] / step.divisor * step.scale;
        float m = step.beta1 * first[i] + gain1 * g;
        float v = step.beta2 * second[i] + gain2 * g * g;
        float theta = master[i] * keep - step.learning_rate * (m / step.correction1) / (sqrtf(v / step.correction2) + step.epsilon);
        if (commit) {
            first[i] = m;
            second[i] = v;
            master[i] = theta;
        }
        out[i] = theta;
    }
}

static inline size_t adamw_block_end(const AdamWRange *range, size_t begin) {
    return range->count - begin < (size_t)ADAMW_BLOCK ? range->count : begin + (size_t)ADAMW_BLOCK;
}

static inline void adamw_commit_task(void *context, int task, int thread) {
    (void)thread;
    const AdamWRange *range = (const AdamWRange *)context;
    size_t begin = (size_t)task * ADAMW_BLOCK;
    adamw_block(range, begin, adamw_block_end(range, begin), true);
}

static inline void adamw_estimate_task(void *context, int task, int thread) {
    (void)thread;
    const AdamWRange *range = (const AdamWRange *)context;
    size_t begin = (size_t)task * ADAMW_BLOCK;
    adamw_block(range, begin, adamw_block_end(range, begin), false);
}

// Moves master and moments and writes the new parameters to out.
static inline void adamw_commit(Stream *stream, AdamWRange *range) {
    team_run(stream->team, (int)((range->count + ADAMW_BLOCK - 1) / ADAMW_BLOCK), adamw_commit_task, range);
}

// Writes to out what adamw_commit would write, and nothing else.
static inline void adamw_estimate(Stream *stream, AdamWRange *range) {
    assert(range->out != range->master);
    team_run(stream->team, (int)((range->count + ADAMW_BLOCK - 1) / ADAMW_BLOCK), adamw_estimate_task, range);
}

// out = master - lr * g, and master with it when committing. For the worked examples of the update rules, which are exact with it.
static inline void sgd_step(AdamWRange *range, bool commit) {
    const AdamWStep step = range->step;
    for (size_t i = 0; i < range->count; i++) {
        float theta = range->master[i] - step.learning_rate * (range->gradient[i] / step.divisor * step.scale);
        if (commit) { range->master[i] = theta; }
        range->out[i] = theta;
    }
}

#endif
