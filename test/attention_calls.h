// attention_calls.h: attention, forward and backward, called with single arrays: for tests and benchmarks.
#ifndef ACCO_TEST_ATTENTION_CALLS_H
#define ACCO_TEST_ATTENTION_CALLS_H

#include "kernels/kernels.h"

// output (B, T, C) = softmax(q k^T over the visible keys) v for qkv (B, T, 3C); logsumexp
// (B, H, T) of the scores, for backward. A query sees the `window` latest keys, its own
// included; 0: all. scratch (attention_scratch_floats).
static inline void attention_forward(Stream *stream, Real *output, float *logsumexp, float *scratch,
                                     const Real *qkv, int B, int T, int C, int heads, int window) {
    Attention work = {.output = output,
                      .logsumexp = logsumexp,
                      .scratch = scratch,
                      .qkv = qkv,
                      .B = B,
                      .T = T,
                      .channels = C,
                      .heads = heads,
                      .window = window};
    attention(stream, &work);
}

// d_qkv (B, T, 3C), rows d_qkv_stride apart, from d_output (B, T, C) and forward's qkv,
// logsumexp and output.
static inline void attention_backward(Stream *stream, Real *d_qkv, int d_qkv_stride, float *scratch,
                                      const Real *d_output, const Real *output, const Real *qkv,
                                      const float *logsumexp, int B, int T, int C, int heads, int window) {
    Attention work = {.output = (Real *)output,
                      .logsumexp = (float *)logsumexp,
                      .scratch = scratch,
                      .qkv = qkv,
                      .d_qkv = d_qkv,
                      .d_output = d_output,
                      .B = B,
                      .T = T,
                      .channels = C,
                      .heads = heads,
                      .d_qkv_stride = d_qkv_stride,
                      .window = window};
    attention(stream, &work);
}

#endif
