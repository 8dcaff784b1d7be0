// gpt_neo.h: the model: activations, forward, backward.
//
//   x = wte[token] + wpe[position]
//   each layer:  x = x + out(attention(q, k, v of LayerNorm_1(x)))      attention global or in a window, scores not scaled
//                x = x + proj(gelu(fc(LayerNorm_2(x))))
//   loss = mean cross entropy of LayerNorm_f(x) wte^T over the targets that count
//
// The model owns no parameters: it keeps offsets into a flat array (gpt_neo_config.h has the table), because the scheduler hands it other
// buffers from call to call. It reserves its activations and its workspace in an arena and never allocates.
// Logits of the whole batch never exist. They are made in chunks of at most GPT_NEO_LOGITS_BYTES; each chunk becomes its own gradient in
// place and at once goes into the gradients of the last hidden state and of wte.
#ifndef ACCO_GPT_NEO_H
#define ACCO_GPT_NEO_H

#include "gpt_neo_config.h"
#include "kernels/kernels.h"
#include "runtime/gate.h"
#include "runtime/memory.h"

enum { GPT_NEO_LOGITS_BYTES = 256 << 20 };

// What the time of a step is divided into, for benchmarks.
typedef enum GptNeoOperation {
    OPERATION_EMBEDDING,
    OPERATION_LAYERNORM,
    OPERATION_LINEAR_FORWARD,
    OPERATION_LINEAR_BACKWARD_INPUT,
    OPERATION_LINEAR_BACKWARD_WEIGHT,
    OPERATION_ATTENTION_FORWARD,
    OPERATION_ATTENTION_BACKWARD,
    OPERATION_GELU,
    OPERATION_HEAD_PRODUCTS,
    OPERATION_CROSS_ENTROPY,
    OPERATION_COUNT
} GptNeoOperation;

static inline const char *gpt_neo_operation_name(GptNeoOperation operation) {
    static const char *const names[OPERATION_COUNT] = {
        "embedding",         "layernorm",          "linear forward", "linear backward input", "linear backward weight",
        "attention forward", "attention backward", "gelu",           "head products",         "cross entropy"};
    return names[operation];
}

typedef struct GptNeo {
    GptNeoConfig config;
    int B, T;
    size_t parameter_count;
    size_t offsets[GPT_NEO_FIRST_LAYER + TENSORS_PER_LAYER * GPT_NEO_MAX_LAYERS + 2]; // of each tensor of the table
    // Activations; index 2l is the input side of layer l, 2l+1 its middle, 2L the end.
    float *residuals;   // (2L+1, B, T, C)
    float *normals;     // (2L+1, B, T, C): output of each LayerNorm
    float *statistics;  // (2L+1, B, T, 2)
    float *qkv;         // (L, B, T, 3C)
    float *attention;   // (L, B, T, C)
    float *log_sums;    // (L, B, H, T)
    float *inner;       // (L, B, T, F): after GELU
    float *derivatives; // (L, B, T, F): of GELU
    // Workspace.
    float *branch;     // (B, T, C): what is about to be added to the residual; in backward the gradient of a LayerNorm's or attention's out
    float *d_residual; // (B, T, C)
    float *d_wide;     // (B, T, max(3C, F)), rows d_wide_stride apart
    float *partials;   // (ROW_BLOCKS, max(3C, F))
    float *scores;     // of attention
    float *logits;     // (chunk, V)
    float *losses;     // (B, T)
    int chunk;         // rows of logits at a time
    int d_wide_stride;
    // Benchmarks point this to OPERATION_COUNT sums of seconds; NULL costs nothing.
    double *operation_seconds;
    double lap_started;
} GptNeo;

// Adds the time since the last lap to `operation`.
static inline void gpt_neo_lap(GptNeo *model, GptNeoOperation operation) {
    if (model->operation_seconds == NULL) { return; }
    double now = clock_seconds();
    model->operation_seconds[operation] += now - model->lap_started;
    model->lap_started = now;
}

// Equal chunks, as few as the bound allows.
static inline int gpt_neo_chunk_rows(int rows, int vocabulary) {
    int most = (int)(GPT_NEO_LOGITS_BYTES / ((size_t)vocabulary * sizeof(float)));
    if (most < 1) { most = 1; }
    int chunks = (rows + most - 1) / most;
    return (rows + chunks - 1) / chunks;
}

// Plans activations and workspace for batches (B, T) and a team of `threads`. T must not exceed the positions. `model` must stay where it
// is.
static inline void gpt_neo_reserve(GptNeo *model, Arena *arena, const GptNeoConfig *config, int B, int T, int threads) {
    assert(B >= 1 && T >= 1 && T <= config->positions && (long long)B * T < INT_MAX / 2);
    memset(model, 0, sizeof *model);
    model->config = *config;
    model->B = B;
    model->T = T;
    ParameterTable table;
    gpt_neo_parameter_table(config, &table);
    model->parameter_count = table.parameter_count;
    for (int i = 0; i < table.count; i++) { model->offsets[i] = table.entries[i].offset; }
    parameter_table_free(&table);
    size_t row = (size_t)B * (size_t)T * sizeof(float), L = (size_t)config->layers, C = (size_t)config->channels, F = (size_t)config->inner;
    size_t wide = 3 * C > F ? 3 * C : F, points = 2 * L + 1;
    model->chunk = gpt_neo_chunk_rows(B * T, config->vocabulary);
    model->d_wide_stride = matmul_padded_stride((int)wide);
    arena_reserve(arena, MEMORY_ACTIVATIONS, "residuals", points * row * C, &model->residuals);
    arena_reserve(arena, MEMORY_ACTIVATIONS, "layernorm outputs", points * row * C, &model->normals);
    arena_reserve(arena, MEMORY_ACTIVATIONS, "layernorm statistics", points * row * 2, &model->statistics);
    arena_reserve(arena, MEMORY_ACTIVATIONS, "queries keys values", L * row * 3 * C, &model->qkv);
    arena_reserve(arena, MEMORY_ACTIVATIONS, "attention outputs", L * row * C, &model->attention);
    arena_reserve(arena, MEMORY_ACTIVATIONS, "attention log sums", L * row * (size_t)config->heads, &model->log_sums);
    arena_reserve(arena, MEMORY_ACTIVATIONS, "gelu outputs", L * row * F, &model->inner);
    arena_reserve(arena, MEMORY_ACTIVATIONS, "gelu derivatives", L * row * F, &model->derivatives);
    arena_reserve(arena, MEMORY_WORKSPACE, "branch", row * C, &model->branch);
    arena_reserve(arena, MEMORY_WORKSPACE, "residual gradient", row * C, &model->d_residual);
    arena_reserve(arena, MEMORY_WORKSPACE, "wide gradient", row * (size_t)model->d_wide_stride, &model->d_wide);
    arena_reserve(arena, MEMORY_WORKSPACE, "partial sums", ROW_BLOCKS * wide * sizeof(float), &model->partials);
    arena_reserve(arena, MEMORY_WORKSPACE, "attention scores", attention_workspace_floats(T, threads) * sizeof(float), &model->scores);
    arena_reserve(arena, MEMORY_WORKSPACE, "logits chunk", (size_t)model->chunk * (size_t)config->vocabulary * sizeof(float),
                  &model->logits);
    arena_reserve(arena, MEMORY_WORKSPACE, "losses", row, &model->losses);
}

// Tensor `tensor` of layer `layer` in a flat array of parameters or gradients.
static inline size_t gpt_neo_at(const GptNeo *model, int layer, GptNeoTensor tensor) {
    return model->offsets[gpt_neo_tensor(layer, tensor)];
}

static inline size_t gpt_neo_rows(const GptNeo *model) { return (size_t)model->B * (size_t)model->T; }

// Activation array `base` with `width` floats per position, at index `index`.
static inline float *gpt_neo_slice(const GptNeo *model, float *base, int index, int width) {
    return base + (size_t)index * gpt_neo_rows(model) * (size_t)width;
}

// Keys that a query of layer l sees at most; 0: no bound.
static inline int gpt_neo_window(const GptNeoConfig *config, int l) { return config->local[l] ? config->window : 0; }

// LayerNorm number `point` (as in GptNeo); branch_bias: what stands in model->branch is added to the residual first, with this bias.
static inline void gpt_neo_layernorm(GptNeo *model, Stream *stream, const float *parameters, int point, int weight,
                                     const float *branch_bias) {
    int C = model->config.channels;
    LayernormForward work;
    work.output = gpt_neo_slice(model, model->normals, point, C);
    work.statistics = gpt_neo_slice(model, model->statistics, point, 2);
    work.residual = gpt_neo_slice(model, model->residuals, point, C);
    work.residual_before = branch_bias != NULL ? gpt_neo_slice(model, model->residuals, point - 1, C) : NULL;
    work.branch = branch_bias != NULL ? model->branch : NULL;
    work.branch_bias = branch_bias;
    work.weight = parameters + model->offsets[weight];
    work.bias = parameters + model->offsets[weight + 1];
    work.epsilon = model->config.epsilon;
    work.rows = (int)gpt_neo_rows(model);
    work.channels = C;
    layernorm_forward(stream, &work);
    gpt_neo_lap(model, OPERATION_LAYERNORM);
}

// First part of a layer: LayerNorm and the fused projection to queries, keys and values.
static inline void gpt_neo_layer_enter(GptNeo *model, Stream *stream, const float *parameters, int l) {
    int C = model->config.channels;
    const float *branch_bias = l > 0 ? parameters + gpt_neo_at(model, l - 1, TENSOR_PROJ_BIAS) : NULL;
    gpt_neo_layernorm(model, stream, parameters, 2 * l, gpt_neo_tensor(l, TENSOR_LN_1_WEIGHT), branch_bias);
    matmul_forward(stream, gpt_neo_slice(model, model->qkv, l, 3 * C), gpt_neo_slice(model, model->normals, 2 * l, C),
                   parameters + gpt_neo_at(model, l, TENSOR_Q), (int)gpt_neo_rows(model), C, 3 * C);
    gpt_neo_lap(model, OPERATION_LINEAR_FORWARD);
}

// The rest, once attention's output stands in its place; leaves the product of c_proj, without its bias, in model->branch.
static inline void gpt_neo_layer_leave(GptNeo *model, Stream *stream, const float *parameters, int l) {
    int rows = (int)gpt_neo_rows(model), C = model->config.channels, F = model->config.inner;
    float *inner = gpt_neo_slice(model, model->inner, l, F), *derivative = gpt_neo_slice(model, model->derivatives, l, F);
    matmul_forward(stream, model->branch, gpt_neo_slice(model, model->attention, l, C),
                   parameters + gpt_neo_at(model, l, TENSOR_OUT_WEIGHT), rows, C, C);
    gpt_neo_lap(model, OPERATION_LINEAR_FORWARD);
    gpt_neo_layernorm(model, stream, parameters, 2 * l + 1, gpt_neo_tensor(l, TENSOR_LN_2_WEIGHT),
                      parameters + gpt_neo_at(model, l, TENSOR_OUT_BIAS));
    matmul_forward(stream, derivative, gpt_neo_slice(model, model->normals, 2 * l + 1, C),
                   parameters + gpt_neo_at(model, l, TENSOR_FC_WEIGHT), rows, C, F);
    gpt_neo_lap(model, OPERATION_LINEAR_FORWARD);
    gelu_forward(stream, inner, derivative, parameters + gpt_neo_at(model, l, TENSOR_FC_BIAS), rows, F);
    gpt_neo_lap(model, OPERATION_GELU);
    matmul_forward(stream, model->branch, inner, parameters + gpt_neo_at(model, l, TENSOR_PROJ_WEIGHT), rows, F, C);
    gpt_neo_lap(model, OPERATION_LINEAR_FORWARD);
}

static inline void gpt_neo_layer_forward(GptNeo *model, Stream *stream, const float *parameters, int l) {
    const GptNeoConfig *config = &model->config;
    int C = config->channels;
    gpt_neo_layer_enter(model, stream, parameters, l);
    attention_forward(stream, gpt_neo_slice(model, model->attention, l, C), gpt_neo_slice(model, model->log_sums, l, config->heads),
                      model->scores, gpt_neo_slice(model, model->qkv, l, 3 * C), model->B, model->T, C, config->heads,
                      gpt_neo_window(config, l));
    gpt_neo_lap(model, OPERATION_ATTENTION_FORWARD);
    gpt_neo_layer_leave(model, stream, parameters, l);
}

// The last hidden state, LayerNorm_f(x) (B, T, C), of the latest forward pass; times wte^T it is the logits.
static inline float *gpt_neo_hidden(const GptNeo *model) {
    return gpt_neo_slice(model, model->normals, 2 * model->config.layers, model->config.channels);
}

// Runs all layers on tokens (B, T); the result is gpt_neo_hidden(model). Asks `pace` for the parameters of each part before it.
static inline void gpt_neo_forward(GptNeo *model, Stream *stream, const float *parameters, const int32_t *tokens, const Pace *pace) {
    int L = model->config.layers, C = model->config.channels;
    if (model->operation_seconds != NULL) { model->lap_started = clock_seconds(); }
    pace_need(pace, gpt_neo_at(model, 0, TENSOR_LN_1_WEIGHT));
    embedding_forward(stream, model->residuals, parameters + model->offsets[GPT_NEO_WTE], parameters + model->offsets[GPT_NEO_WPE], tokens,
                      model->B, model->T, C);
    gpt_neo_lap(model, OPERATION_EMBEDDING);
    for (int l = 0; l < L; l++) {
        pace_need(pace, gpt_neo_at(model, l + 1, TENSOR_LN_1_WEIGHT));
        gpt_neo_layer_forward(model, stream, parameters, l);
    }
    pace_need(pace, model->parameter_count);
    gpt_neo_layernorm(model, stream, parameters, 2 * L, gpt_neo_ln_f(&model->config),
                      parameters + gpt_neo_at(model, L - 1, TENSOR_PROJ_BIAS));
}

// LM head and loss of the latest forward pass; with gradients also their share of wte, and the gradient of the hidden state in
// model->branch.
static inline float gpt_neo_head(GptNeo *model, Stream *stream, const float *parameters, float *gradients, const int32_t *targets) {
    int rows = (int)gpt_neo_rows(model), C = model->config.channels, V = model->config.vocabulary, counting = 0;
    const float *wte = parameters + model->offsets[GPT_NEO_WTE], *hidden = gpt_neo_hidden(model);
    for (int i = 0; i < rows; i++) { counting += targets[i] >= 0; }
    if (counting == 0) {
        if (gradients != NULL) { memset(model->branch, 0, (size_t)rows * (size_t)C * sizeof(float)); }
        return 0.0f;
    }
    float scale = gradients != NULL ? 1.0f / (float)counting : 0.0f;
    for (int first = 0; first < rows; first += model->chunk) {
        int count = rows - first < model->chunk ? rows - first : model->chunk;
        size_t offset = (size_t)first * (size_t)C;
        matmul_forward(stream, model->logits, hidden + offset, wte, count, C, V);
        gpt_neo_lap(model, OPERATION_HEAD_PRODUCTS);
        cross_entropy(stream, model->logits, model->losses + first, targets + first, count, V, scale);
        gpt_neo_lap(model, OPERATION_CROSS_ENTROPY);
        if (gradients != NULL) {
            matmul_backward_input(stream, model->branch + offset, C, model->logits, V, wte, count, C, V);
            matmul_backward_weight(stream, gradients + model->offsets[GPT_NEO_WTE], model->logits, V, hidden + offset, count, C, V);
            gpt_neo_lap(model, OPERATION_HEAD_PRODUCTS);
        }
    }
    double loss = 0.0;
    for (int i = 0; i < rows; i++) { loss += (double)model->losses[i]; }
    return (float)(loss / counting);
}

// Backward of LayerNorm `point`: model->branch is the gradient of its output. branch_bias: place of the gradient of the bias of the branch
// that was added before it, or NULL. The result is added to model->d_residual, which the last LayerNorm starts.
static inline void gpt_neo_layernorm_backward(GptNeo *model, Stream *stream, const float *parameters, float *gradients, int point,
                                              int weight, float *branch_bias) {
    int C = model->config.channels;
    LayernormBackward work;
    work.d_residual = model->d_residual;
    work.accumulate = point < 2 * model->config.layers;
    work.d_weight = gradients + model->offsets[weight];
    work.d_bias = gradients + model->offsets[weight + 1];
    work.d_branch_bias = branch_bias;
    work.partials = model->partials;
    work.d_output = model->branch;
    work.residual = gpt_neo_slice(model, model->residuals, point, C);
    work.statistics = gpt_neo_slice(model, model->statistics, point, 2);
    work.weight = parameters + model->offsets[weight];
    work.rows = (int)gpt_neo_rows(model);
    work.channels = C;
    layernorm_backward(stream, &work);
    gpt_neo_lap(model, OPERATION_LAYERNORM);
}

// Both gradients of the linear layer whose weight (outputs, inputs) is `weight` in parameters and gradients.
static inline void gpt_neo_linear_backward(GptNeo *model, Stream *stream, const float *parameters, float *gradients, size_t weight,
                                           float *d_input, int d_input_stride, const float *d_output, int d_output_stride,
                                           const float *input, int inputs, int outputs) {
    int rows = (int)gpt_neo_rows(model);
    matmul_backward_weight(stream, gradients + weight, d_output, d_output_stride, input, rows, inputs, outputs);
    gpt_neo_lap(model, OPERATION_LINEAR_BACKWARD_WEIGHT);
    matmul_backward_input(stream, d_input, d_input_stride, d_output, d_output_stride, parameters + weight, rows, inputs, outputs);
    gpt_neo_lap(model, OPERATION_LINEAR_BACKWARD_INPUT);
}

static inline void gpt_neo_mlp_backward(GptNeo *model, Stream *stream, const float *parameters, float *gradients, int l) {
    int C = model->config.channels, F = model->config.inner, wide = model->d_wide_stride;
    gpt_neo_linear_backward(model, stream, parameters, gradients, gpt_neo_at(model, l, TENSOR_PROJ_WEIGHT), model->d_wide, wide,
                            model->d_residual, C, gpt_neo_slice(model, model->inner, l, F), F, C);
    gelu_backward(stream, model->d_wide, wide, gradients + gpt_neo_at(model, l, TENSOR_FC_BIAS), model->partials,
                  gpt_neo_slice(model, model->derivatives, l, F), (int)gpt_neo_rows(model), F);
    gpt_neo_lap(model, OPERATION_GELU);
    gpt_neo_linear_backward(model, stream, parameters, gradients, gpt_neo_at(model, l, TENSOR_FC_WEIGHT), model->branch, C, model->d_wide,
                            wide, gpt_neo_slice(model, model->normals, 2 * l + 1, C), C, F);
    gpt_neo_layernorm_backward(model, stream, parameters, gradients, 2 * l + 1, gpt_neo_tensor(l, TENSOR_LN_2_WEIGHT),
                               gradients + gpt_neo_at(model, l, TENSOR_OUT_BIAS));
}

static inline void gpt_neo_attention_backward(GptNeo *model, Stream *stream, const float *parameters, float *gradients, int l) {
    const GptNeoConfig *config = &model->config;
    int C = config->channels, wide = model->d_wide_stride;
    gpt_neo_linear_backward(model, stream, parameters, gradients, gpt_neo_at(model, l, TENSOR_OUT_WEIGHT), model->branch, C,
                            model->d_residual, C, gpt_neo_slice(model, model->attention, l, C), C, C);
    attention_backward(stream, model->d_wide, wide, model->scores, model->branch, gpt_neo_slice(model, model->qkv, l, 3 * C),
                       gpt_neo_slice(model, model->log_sums, l, config->heads), model->B, model->T, C, config->heads,
                       gpt_neo_window(config, l));
    gpt_neo_lap(model, OPERATION_ATTENTION_BACKWARD);
    gpt_neo_linear_backward(model, stream, parameters, gradients, gpt_neo_at(model, l, TENSOR_Q), model->branch, C, model->d_wide, wide,
                            gpt_neo_slice(model, model->normals, 2 * l, C), C, 3 * C);
    gpt_neo_layernorm_backward(model, stream, parameters, gradients, 2 * l, gpt_neo_tensor(l, TENSOR_LN_1_WEIGHT),
                               l > 0 ? gradients + gpt_neo_at(model, l - 1, TENSOR_PROJ_BIAS) : NULL);
}

// gradients (same layout as parameters) += d(mean loss)/d(parameters) of tokens and targets (B, T each). Returns the mean loss over the
// targets >= 0; where none counts, the loss and what is added are 0. Tokens and targets must lie in the vocabulary. Tells `pace` what is
// finished: the tied embedding, which the head begins, only at the very end.
static inline float gpt_neo_loss_and_gradients(GptNeo *model, Stream *stream, const float *parameters, float *gradients,
                                               const int32_t *tokens, const int32_t *targets, const Pace *pace) {
    int L = model->config.layers, C = model->config.channels;
    gpt_neo_forward(model, stream, parameters, tokens, pace);
    float loss = gpt_neo_head(model, stream, parameters, gradients, targets);
    gpt_neo_layernorm_backward(model, stream, parameters, gradients, 2 * L, gpt_neo_ln_f(&model->config),
                               gradients + gpt_neo_at(model, L - 1, TENSOR_PROJ_BIAS));
    for (int l = L - 1; l >= 0; l--) {
        gpt_neo_mlp_backward(model, stream, parameters, gradients, l);
        pace_finish(pace, gpt_neo_at(model, l, TENSOR_LN_2_WEIGHT));
        gpt_neo_attention_backward(model, stream, parameters, gradients, l);
        pace_finish(pace, gpt_neo_at(model, l, TENSOR_LN_1_WEIGHT));
    }
    embedding_backward(stream, gradients + model->offsets[GPT_NEO_WTE], gradients + model->offsets[GPT_NEO_WPE], model->d_residual, tokens,
                       model->B, model->T, C);
    gpt_neo_lap(model, OPERATION_EMBEDDING);
    return loss;
}

// The same loss without gradients.
static inline float gpt_neo_loss(GptNeo *model, Stream *stream, const float *parameters, const int32_t *tokens, const int32_t *targets) {
    gpt_neo_forward(model, stream, parameters, tokens, NULL);
    return gpt_neo_head(model, stream, parameters, NULL, targets);
}

#endif
