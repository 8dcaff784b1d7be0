// adamw.h: one step of AdamW (Loshchilov and Hutter, 2019) over a range of elements.
//
//   g = gradient / divisor * scale            the mean over micro-batches, clipped
//   theta = master * (1 - lr * weight_decay)  decoupled weight decay, in PyTorch's order
//   m = beta1 * m + (1 - beta1) * g
//   v = beta2 * v + (1 - beta2) * g * g
//   out = theta - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)
//
// All arrays are (count), fp32; m and v may be bf16, then they are rounded at random
// (kernels/moments.h) as they are stored, after `out` has been computed from the exact ones.
// One loop, one pass: every array is read once and written once, because the step is limited
// by memory. A task takes ADAMW_BLOCK elements.
//
// A step either commits (master and moments move) or estimates (they stay, and only `out`
// is written, straight from registers: the optimizer state is never copied). Both run the
// same instructions, so an estimate equals, bit for bit, the commit that would follow on
// the same gradient.
//
// `out` may be `gradient`, or for a commit `master`; otherwise arrays must not overlap. casts, if
// they are wanted, become `out` rounded to bf16, while it is at hand.
#pragma once

#include "kernels/cpu/reals.h"
#include "kernels/moments.h"

// Elements of a task: five arrays of 64 KB, which fit the second-level cache.
enum { ADAMW_BLOCK = 16384 };

// The numbers of one step, each rounded once from double. Computed in fp32, 1 - beta2
// would be off by 1 % for a beta2 of 0.999999. Muon's mu is beta1.
typedef struct AdamWStep {
    float beta1, one_minus_beta1, beta2, one_minus_beta2;
    float correction1, correction2; // 1 - beta^t
    float epsilon, learning_rate;
    float decay_factor;   // 1 - lr * weight_decay
    float divisor, scale; // of the gradient
} AdamWStep;

// t: the number of this step, from 1. The caller may change divisor and scale, which are 1.
static inline AdamWStep adamw_step(double beta1, double beta2, double t, double epsilon, double learning_rate,
                                   double weight_decay) {
    AdamWStep step;
    step.beta1 = (float)beta1;
    step.one_minus_beta1 = (float)(1.0 - beta1);
    step.beta2 = (float)beta2;
    step.one_minus_beta2 = (float)(1.0 - beta2);
    step.correction1 = (float)(1.0 - pow(beta1, t));
    step.correction2 = (float)(1.0 - pow(beta2, t));
    step.epsilon = (float)epsilon;
    step.learning_rate = (float)learning_rate;
    step.decay_factor = (float)(1.0 - learning_rate * weight_decay);
    step.divisor = step.scale = 1.0f;
    return step;
}

// The elements that one step of AdamW, or of Muon (to which they are a matrix), changes.
typedef struct StepRange {
    float *out, *master;                // (count)
    Real *first_moment, *second_moment; // (count), in the format `moments`; Muon has only the first
    const float *gradient;              // (count)
    Real *casts;                        // (count): `out` in bf16; NULL: not wanted
    size_t count;
    size_t flat; // place of the first element in the flat parameter vector
    Precision moments;
    MomentKey key; // of this step, where moments are bf16
    AdamWStep step;
    bool keeps; // the master copy and the moments: a commit, else an estimate
    // Only for Muon:
    Real *direction;     // (count): X
    double *partials;    // (buffer_blocks(count)), where the kernels run
    Precision precision; // of X: the stream's
    float factor;        // 1 / norm; cpu_muon_direction sets it
} StepRange;

// casts [begin, end) of the range, after `out`.
static inline void step_cast(const StepRange *range, size_t begin, size_t end) {
    if (range->casts == NULL) { return; }
    for (size_t i = begin; i < end; i++) { real_store(range->casts, i, range->out[i], PRECISION_BF16); }
}

REAL_LOOP void adamw_block(const StepRange *range, int block, Precision moments) {
    size_t begin = (size_t)block * ADAMW_BLOCK, end = size_min(begin + ADAMW_BLOCK, range->count);
    const AdamWStep step = range->step;
    const MomentKey key = range->key;
    float *out = range->out, *master = range->master;
    Real *first = range->first_moment, *second = range->second_moment;
    const float *gradient = range->gradient;
    size_t flat = range->flat;
    bool keeps = range->keeps;
#pragma omp simd
    for (size_t i = begin; i < end; i++) {
        float g = gradient[i] / step.divisor * step.scale;
        float m = step.beta1 * real_load(first, i, moments) + step.one_minus_beta1 * g;
        float v = step.beta2 * real_load(second, i, moments) + step.one_minus_beta2 * g * g;
        float theta = master[i] * step.decay_factor - step.learning_rate * (m / step.correction1) /
                                                          (sqrtf(v / step.correction2) + step.epsilon);
        if (keeps) {
            uint32_t noise = moments == PRECISION_BF16 ? moment_noise(key, flat + i) : 0;
            real_store(first, i, moments == PRECISION_BF16 ? moment_round(m, noise) : m, moments);
            real_store(second, i, moments == PRECISION_BF16 ? moment_round(v, noise >> 16) : v, moments);
            master[i] = theta;
        }
        out[i] = theta;
    }
    step_cast(range, begin, end);
}

REAL_KERNEL(cpu_adamw, StepRange, moments, adamw_block, (int)((work->count + ADAMW_BLOCK - 1) / ADAMW_BLOCK))
