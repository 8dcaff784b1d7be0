// adamw.cuh: one step of AdamW over a range of elements, on a GPU.
//
// Computes what kernels/cpu/adamw.h defines, in the same order. Bits may differ from the CPU's,
// because multiplications and additions may be fused differently.
//
// Layout: a thread has a Quad of four elements, a block BUFFER_QUADS (buffers.cuh). A thread
// issues all its loads before it needs the first.
#pragma once

#include "kernels/cuda/buffers.cuh"

#include "kernels/cpu/adamw.h"

// M: the format of the moments.
template <typename M> static __global__ void adamw_kernel(StepRange range, bool wide) {
    const AdamWStep &step = range.step;
    float gradient[4], master[4], first[4], second[4];
    Quad quad = quad_of_kernel(range.count, wide);
    quad_load(gradient, range.gradient, quad);
    quad_load(master, range.master, quad);
    quad_load(first, reals<M>(range.first_moment), quad);
    quad_load(second, reals<M>(range.second_moment), quad);
    for (int i = 0; i < 4; i++) {
        float g = gradient[i] / step.divisor * step.scale;
        first[i] = step.beta1 * first[i] + step.one_minus_beta1 * g;
        second[i] = step.beta2 * second[i] + step.one_minus_beta2 * g * g;
        master[i] = master[i] * step.decay_factor - step.learning_rate * (first[i] / step.correction1) /
                                                        (sqrtf(second[i] / step.correction2) + step.epsilon);
    }
    if (range.keeps) {
        for (int i = 0; i < 4 && sizeof(M) < sizeof(float); i++) {
            uint32_t noise = moment_noise(range.key, range.flat + quad.first + i * quad.step);
            first[i] = moment_round(first[i], noise);
            second[i] = moment_round(second[i], noise >> 16);
        }
        quad_store(reals<M>(range.first_moment), first, quad);
        quad_store(reals<M>(range.second_moment), second, quad);
        if (range.out != range.master) { quad_store(range.master, master, quad); }
    }
    quad_store(range.out, master, quad);
    if (range.casts != NULL) { quad_store(reals<__nv_bfloat16>(range.casts), master, quad); }
}

template <typename M> static inline void cuda_adamw(Stream *stream, const StepRange *range) {
    bool wide = quad_fits(range->out, range->master, range->gradient) &&
                quad_fits(reals<M>(range->first_moment), reals<M>(range->second_moment)) &&
                quad_fits(reals<__nv_bfloat16>(range->casts));
    quad_launch(stream, adamw_kernel<M>, range->count, *range, wide);
}
