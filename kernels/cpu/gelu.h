// gelu.h: the bias of the first half of the MLP and GELU (tanh form, "gelu_new") in one
// pass.
//
// 0.5 x (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3) is x s, s the logistic
// function of 2u. Forward has s at hand and stores the derivative s + x s (1 - s) 2u'
// over its own input, so that backward is one multiplication and no exponential. Backward
// sums the gradient of the bias in the same pass.
#ifndef ACCO_KERNELS_CPU_GELU_H
#define ACCO_KERNELS_CPU_GELU_H

#include <stddef.h>
#include <string.h>

#include "kernels/cpu/row_blocks.h"
#include "kernels/cpu/vector_math.h"

typedef struct Gelu {
    float *output;     // forward (rows, columns)
    float *derivative; // forward: in the product without bias, out the derivative; backward: read
    float *
        gradient; // backward: in d_output, out the gradient of the product (rows, columns), rows gradient_stride apart
    const float *bias; // (columns)
    float *partials;   // backward (ROW_BLOCKS, columns)
    int rows, columns, gradient_stride;
} Gelu;

static inline void gelu_forward_row(float *__restrict__ output, float *__restrict__ derivative,
                                    const float *__restrict__ bias, int columns) {
    const float twice_root = 1.59576912f; // 2 sqrt(2/pi)
    for (int c = 0; c < columns; c++) {
        float x = derivative[c] + bias[c];
        float complement, s = vector_logistic(twice_root * x * (1.0f + 0.044715f * x * x), &complement);
        output[c] = x * s;
        derivative[c] = s + x * s * complement * twice_root * (1.0f + 0.134145f * x * x);
    }
}

static inline void gelu_forward_task(void *context, int task, int thread) {
    (void)thread;
    const Gelu *work = (const Gelu *)context;
    for (int row = row_block_begin(task, work->rows); row < row_block_begin(task + 1, work->rows); row++) {
        size_t offset = (size_t)row * (size_t)work->columns;
        gelu_forward_row(work->output + offset, work->derivative + offset, work->bias, work->columns);
    }
}

static inline void cpu_gelu_forward(Stream *stream, float *output, float *derivative, const float *bias,
                                    int rows, int columns) {
    Gelu work;
    memset(&work, 0, sizeof work);
    work.output = output;
    work.derivative = derivative;
    work.bias = bias;
    work.rows = rows;
    work.columns = columns;
    thread_pool_run(stream->pool, row_block_count(rows), gelu_forward_task, &work);
}

static inline void gelu_backward_row(float *__restrict__ gradient, float *__restrict__ sums,
                                     const float *__restrict__ derivative, int columns) {
    for (int c = 0; c < columns; c++) {
        float g = gradient[c] * derivative[c];
        gradient[c] = g;
        sums[c] += g;
    }
}

static inline void gelu_backward_task(void *context, int task, int thread) {
    (void)thread;
    const Gelu *work = (const Gelu *)context;
    float *sums = work->partials + (size_t)task * (size_t)work->columns;
    memset(sums, 0, (size_t)work->columns * sizeof *sums);
    for (int row = row_block_begin(task, work->rows); row < row_block_begin(task + 1, work->rows); row++) {
        size_t offset = (size_t)row * (size_t)work->columns;
        gelu_backward_row(work->gradient + (size_t)row * (size_t)work->gradient_stride, sums,
                          work->derivative + offset, work->columns);
    }
}

static inline void cpu_gelu_backward(Stream *stream, float *gradient, int gradient_stride, float *d_bias,
                                     float *partials, const float *derivative, int rows, int columns) {
    Gelu work;
    memset(&work, 0, sizeof work);
    work.gradient = gradient;
    work.gradient_stride = gradient_stride;
    work.derivative = (float *)derivative;
    work.partials = partials;
    work.rows = rows;
    work.columns = columns;
    thread_pool_run(stream->pool, row_block_count(rows), gelu_backward_task, &work);
    column_sums_add(stream, d_bias, partials, row_block_count(rows), columns, columns);
}

#endif
