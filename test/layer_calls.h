// layer_calls.h: layers called with single arrays and numbers, for tests and benchmarks.
#pragma once

#include "kernels/kernels.h"

// output (B, T, C) = softmax(q k^T over the visible keys) v for qkv (B, T, 3C); logsumexp
// (B, H, T) of the scores, for backward. A query sees the `window` latest keys, its own
// included; 0: all. scratch (attention_scratch_floats).
static inline void call_attention_forward(Stream *stream, Real *output, float *logsumexp, float *scratch,
                                          const Real *qkv, int B, int T, int C, int heads, int window) {
    Attention work = {.output = output,
                      .logsumexp = logsumexp,
                      .scratch = scratch,
                      .qkv = qkv,
                      .B = B,
                      .T = T,
                      .channels = C,
                      .heads = heads,
                      .window = window < T ? window : 0};
    attention(stream, &work);
}

// d_qkv (B, T, 3C), rows d_qkv_stride apart, from d_output (B, T, C) and forward's qkv,
// logsumexp and output.
static inline void call_attention_backward(Stream *stream, Real *d_qkv, int d_qkv_stride, float *scratch,
                                           const Real *d_output, const Real *output, const Real *qkv,
                                           const float *logsumexp, int B, int T, int C, int heads,
                                           int window) {
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
                      .window = window < T ? window : 0};
    attention(stream, &work);
}

// output (B, T, C) = wte[tokens] + wpe[position]; tokens must lie in the vocabulary.
static inline void call_embedding_forward(Stream *stream, Real *output, const Real *wte, const Real *wpe,
                                          const int32_t *tokens, int B, int T, int C) {
    Embedding work = {
        .output = output, .wte = wte, .wpe = wpe, .tokens = tokens, .B = B, .T = T, .channels = C};
    embedding_forward(stream, &work);
}

// d_wte (V, C) and d_wpe (positions, C) += the rows of d_output (B, T, C) that they
// produced. Only on a GPU: order (B, T), the rows sorted by token (embedding_order), and
// partials (embedding_partials_floats).
static inline void call_embedding_backward(Stream *stream, float *d_wte, float *d_wpe, float *partials,
                                           const Real *d_output, const int32_t *tokens, const int32_t *order,
                                           int B, int T, int C) {
    Embedding work = {.d_wte = d_wte,
                      .d_wpe = d_wpe,
                      .partials = partials,
                      .d_output = d_output,
                      .tokens = tokens,
                      .order = order,
                      .B = B,
                      .T = T,
                      .channels = C};
    embedding_backward(stream, &work);
}

// output (rows, columns) = gelu_new(saved + bias), where `saved` holds the product
// without bias. It then holds what gelu_backward needs. On the CPU that is the
// derivative, which costs more to compute again than to keep; on a GPU `saved` does not
// change, and the same call computes the output again.
static inline void call_gelu_forward(Stream *stream, Real *output, Real *saved, const Real *bias, int rows,
                                     int columns) {
    Gelu work = {.output = output, .saved = saved, .bias = bias, .rows = rows, .columns = columns};
    gelu_forward(stream, &work);
}

// gradient (rows, columns), rows gradient_stride apart, *= the derivative; d_bias
// (columns) += its sum over rows; partials (row_partials_floats(columns)).
static inline void call_gelu_backward(Stream *stream, Real *gradient, int gradient_stride, float *d_bias,
                                      float *partials, const Real *saved, const Real *bias, int rows,
                                      int columns) {
    Gelu work = {.saved = (Real *)saved,
                 .gradient = gradient,
                 .bias = bias,
                 .d_bias = d_bias,
                 .partials = partials,
                 .rows = rows,
                 .columns = columns,
                 .gradient_stride = gradient_stride};
    gelu_backward(stream, &work);
}
