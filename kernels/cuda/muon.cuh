// muon.cuh: the elementwise parts of a step of Muon on one matrix, on a GPU.
//
// Computes what kernels/cpu/muon.h defines, in the same order of blocks for the norm. Bits may
// differ from the CPU's, as AdamW's.
//
// Layout: as adamw.cuh; for the sum of squares a block takes one BUFFER_BLOCK (buffers.cuh), and
// one more block adds up what these find.
#pragma once

#include "kernels/cuda/buffers.cuh"

#include "kernels/cpu/muon.h"

// directions: X of the elements of this thread, before it is divided by its norm. moved: m'.
template <typename M>
DEVICE void muon_elements(float directions[4], float moved[4], const StepRange &range, const Quad &quad) {
    float gradient[4];
    quad_load(gradient, range.gradient, quad);
    quad_load(moved, reals<M>(range.first_moment), quad);
    for (int i = 0; i < 4; i++) {
        float g = gradient[i] / range.step.divisor * range.step.scale;
        moved[i] = range.step.beta1 * moved[i] + range.step.one_minus_beta1 * g;
        directions[i] = range.step.one_minus_beta1 * g + range.step.beta1 * moved[i];
    }
}

template <typename M> static __global__ void muon_norm_kernel(StepRange range, bool wide) {
    size_t begin = (size_t)blockIdx.x * BUFFER_BLOCK,
           end = range.count - begin < (size_t)BUFFER_BLOCK ? range.count : begin + BUFFER_BLOCK;
    double sum = 0;
    for (size_t at = begin; at < end; at += 4u * blockDim.x) {
        float directions[4], moved[4];
        muon_elements<M>(directions, moved, range, quad_of_thread(at, end, wide));
        for (int i = 0; i < 4; i++) { sum += (double)directions[i] * (double)directions[i]; }
    }
    sum = block_sum(sum, (double *)cuda_shared());
    if (threadIdx.x == 0) { range.partials[blockIdx.x] = sum; }
}

// partials[0] = the sum of partials (count), in their order. One block, so that each is read once
// and not by every thread of muon_direction.
static __global__ void muon_total_kernel(double *partials, size_t count) {
    double *some = (double *)cuda_shared(), sum = 0;
    for (size_t begin = 0; begin < count; begin += blockDim.x) {
        size_t left = count - begin < blockDim.x ? count - begin : blockDim.x;
        if (threadIdx.x < left) { some[threadIdx.x] = partials[begin + threadIdx.x]; }
        __syncthreads();
        for (size_t i = 0; i < left; i++) { sum += some[i]; }
        __syncthreads();
    }
    if (threadIdx.x == 0) { partials[0] = sum; }
}

template <typename R, typename M> static __global__ void muon_direction_kernel(StepRange range, bool wide) {
    float directions[4], moved[4], factor = (float)(1 / fmax(sqrt(range.partials[0]), MUON_LEAST));
    Quad quad = quad_of_kernel(range.count, wide);
    muon_elements<M>(directions, moved, range, quad);
    for (int i = 0; i < 4; i++) { directions[i] *= factor; }
    quad_store(reals<R>(range.direction), directions, quad);
    if (!range.keeps) { return; }
    for (int i = 0; i < 4 && sizeof(M) < sizeof(float); i++) {
        moved[i] = moment_round(moved[i], moment_noise(range.key, range.flat + quad.first + i * quad.step));
    }
    quad_store(reals<M>(range.first_moment), moved, quad);
}

template <typename R>
static __global__ void muon_polynomial_kernel(R *polynomial, const R *square, int side, size_t count,
                                              bool wide) {
    float values[4], squares[4];
    Quad quad = quad_of_kernel(count, wide);
    quad_load(values, polynomial, quad);
    quad_load(squares, square, quad);
    for (int i = 0; i < 4; i++) {
        size_t element = quad.first + i * quad.step;
        values[i] = MUON_B * squares[i] + MUON_C * values[i];
        if (element / (size_t)side % (size_t)side == element % (size_t)side) { values[i] += MUON_A; }
    }
    quad_store(polynomial, values, quad);
}

template <typename R> static __global__ void muon_apply_kernel(StepRange range, bool wide) {
    float master[4], directions[4];
    Quad quad = quad_of_kernel(range.count, wide);
    quad_load(master, range.master, quad);
    quad_load(directions, reals<R>(range.direction), quad);
    for (int i = 0; i < 4; i++) {
        master[i] = master[i] * range.step.decay_factor - range.step.learning_rate * directions[i];
    }
    if (range.keeps && range.out != range.master) { quad_store(range.master, master, quad); }
    quad_store(range.out, master, quad);
    if (range.casts != NULL) { quad_store(reals<__nv_bfloat16>(range.casts), master, quad); }
}

template <typename M> static inline void cuda_muon_norm(Stream *stream, const StepRange *range) {
    bool wide = quad_fits(range->gradient) && quad_fits(reals<M>(range->first_moment));
    size_t blocks = buffer_blocks(range->count);
    cuda_launch(stream, muon_norm_kernel<M>, dim3((unsigned)blocks), dim3(BUFFER_SQUARES_THREADS),
                BUFFER_SQUARES_THREADS / WARP * sizeof(double), *range, wide);
    cuda_launch(stream, muon_total_kernel, dim3(1), dim3(BUFFER_SQUARES_THREADS),
                BUFFER_SQUARES_THREADS * sizeof(double), range->partials, blocks);
}

template <typename R, typename M>
static inline void muon_direction_launch(Stream *stream, const StepRange *range) {
    bool wide = quad_fits(range->gradient) && quad_fits(reals<M>(range->first_moment)) &&
                quad_fits(reals<R>(range->direction));
    quad_launch(stream, muon_direction_kernel<R, M>, range->count, *range, wide);
}

template <typename R> static inline void cuda_muon_direction(Stream *stream, const StepRange *range) {
    bool half = range->moments == PRECISION_BF16;
    (half ? muon_direction_launch<R, __nv_bfloat16> : muon_direction_launch<R, float>)(stream, range);
}

template <typename R>
static inline void cuda_muon_polynomial(Stream *stream, Real *polynomial, const Real *square, int side,
                                        int count) {
    size_t elements = (size_t)count * side * side;
    quad_launch(stream, muon_polynomial_kernel<R>, elements, reals<R>(polynomial), reals<R>(square), side,
                elements, quad_fits(reals<R>(polynomial), reals<R>(square)));
}

template <typename R> static inline void cuda_muon_apply(Stream *stream, const StepRange *range) {
    bool wide = quad_fits(range->master, range->out) && quad_fits(reals<R>(range->direction)) &&
                quad_fits(reals<__nv_bfloat16>(range->casts));
    quad_launch(stream, muon_apply_kernel<R>, range->count, *range, wide);
}
