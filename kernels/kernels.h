// kernels.h: every operation there is, and the one place that picks where it runs.
//
// Contracts common to all: fp32, row-major arrays, shapes as written beside each declaration. A kernel is called from a task of `stream`,
// runs on that stream's team, and has finished when it returns. It allocates nothing. Results are bit-reproducible and do not depend on the
// number of threads. Gradients of parameters are added to (+=), all other outputs are overwritten unless stated. NaN and infinities in the
// input reach the output. A CUDA version must match these at three or more odd shapes.
#ifndef ACCO_KERNELS_H
#define ACCO_KERNELS_H

#include "cpu/adamw.h"
#include "cpu/attention.h"
#include "cpu/buffers.h"
#include "cpu/cross_entropy.h"
#include "cpu/embedding.h"
#include "cpu/gelu.h"
#include "cpu/layernorm.h"
#include "cpu/matmul.h"
#include "cpu/outer.h"
#include "cpu/row_blocks.h"
#include "cpu/vector_math.h"

// output (rows, outputs) = input (rows, inputs) weight^T; weight (outputs, inputs) as PyTorch stores it.
static inline void matmul_forward(Stream *stream, float *output, const float *input, const float *weight, int rows, int inputs,
                                  int outputs);
// d_input (rows, inputs) = d_output (rows, outputs) weight. Rows of both are their strides apart.
static inline void matmul_backward_input(Stream *stream, float *d_input, int d_input_stride, const float *d_output, int d_output_stride,
                                         const float *weight, int rows, int inputs, int outputs);
// d_weight (outputs, inputs) += d_output^T input. matmul_padded_stride gives the stride at which d_output is read fastest.
static inline void matmul_backward_weight(Stream *stream, float *d_weight, const float *d_output, int d_output_stride, const float *input,
                                          int rows, int inputs, int outputs);

// output (B, T, C) = wte[tokens] + wpe[position]; tokens must lie in the vocabulary.
static inline void embedding_forward(Stream *stream, float *output, const float *wte, const float *wpe, const int32_t *tokens, int B, int T,
                                     int C);
// d_wte (V, C) and d_wpe (positions, C) += the rows of d_output (B, T, C) that they produced.
static inline void embedding_backward(Stream *stream, float *d_wte, float *d_wpe, const float *d_output, const int32_t *tokens, int B,
                                      int T, int C);

// residual = residual_before + branch + branch_bias (if branch), then output = LayerNorm(residual). The struct has the shapes.
static inline void layernorm_forward(Stream *stream, const LayernormForward *work);
// d_residual = or += gradient through the LayerNorm; d_weight, d_bias +=; d_branch_bias += the sum over rows of the finished d_residual.
static inline void layernorm_backward(Stream *stream, const LayernormBackward *work);

// output (B, T, C) = softmax(q k^T over the visible keys) v for qkv (B, T, 3C); log_sums (B, H, T); window 0: all keys up to the query.
// workspace: attention_workspace_floats(T, threads of the stream's team).
static inline void attention_forward(Stream *stream, float *output, float *log_sums, float *workspace, const float *qkv, int B, int T,
                                     int C, int heads, int window);
// d_qkv (B, T, 3C), rows d_qkv_stride apart, from d_output (B, T, C) and what forward read and stored in log_sums.
static inline void attention_backward(Stream *stream, float *d_qkv, int d_qkv_stride, float *workspace, const float *d_output,
                                      const float *qkv, const float *log_sums, int B, int T, int C, int heads, int window);
// One query (C) at `position` over cached keys and values (positions, C); scores: workspace (H, positions).
static inline void attention_decode(Stream *stream, float *output, float *scores, const float *query, const float *keys,
                                    const float *values, int position, int positions, int C, int heads, int window);

// output (rows, columns) = gelu_new(derivative + bias); derivative, the bias-free product on entry, becomes gelu_new' of the same.
static inline void gelu_forward(Stream *stream, float *output, float *derivative, const float *bias, int rows, int columns);
// gradient (rows, columns), rows gradient_stride apart, *= derivative; d_bias (columns) += its sum over rows; partials: workspace
// (ROW_BLOCKS, columns).
static inline void gelu_backward(Stream *stream, float *gradient, int gradient_stride, float *d_bias, float *partials,
                                 const float *derivative, int rows, int columns);

// losses (rows) = -log softmax(logits)[target], 0 where target < 0. logits (rows, V) are overwritten: by gradient_scale (softmax -
// one-hot), or 0 where target < 0; with gradient_scale 0 by anything.
static inline void cross_entropy(Stream *stream, float *logits, float *losses, const int32_t *targets, int rows, int vocabulary,
                                 float gradient_scale);

#endif
