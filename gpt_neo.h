// gpt_neo.h: the model: activations, forward, backward.
//
//   x = wte[token] + wpe[position]
//   each layer:  x = x + out(attention(q, k, v of LayerNorm_1(x)))      attention global or in a window, scores not scaled
//                x = x + proj(gelu(fc(LayerNorm_2(x))))
//   loss = mean cross entropy of LayerNorm_f(x) wte^T over the targets that count
//
// The model owns no parameters: it keeps offsets into a flat array (gpt_neo_config.h has
// the table), because the scheduler hands it other buffers from call to call. Where it
// computes in bf16 it keeps a copy of them in that format, its weights. It reserves its
// activations and its workspace in an arena and never allocates. Tokens and targets come
// from the host, the loss goes there.
//
// What the backward pass needs is kept, or made again (Recompute), each level on top of
// the one before:
//   gelu        the wide output of GELU, from the product before it
//   layernorm   the outputs of the LayerNorms, from the residual
//   block       everything of a layer but its input
// Logits of the whole batch never exist. They are made in chunks of at most
// GPT_NEO_LOGITS_BYTES; each chunk becomes its own gradient in place and at once goes
// into the gradients of the last hidden state and of wte.
#ifndef ACCO_GPT_NEO_H
#define ACCO_GPT_NEO_H

#include "gpt_neo_config.h"
#include "kernels/kernels.h"
#include "runtime/memory.h"
#include "runtime/pace.h"

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
    static const char *const names[OPERATION_COUNT] = {"embedding",
                                                       "layernorm",
                                                       "linear forward",
                                                       "linear backward input",
                                                       "linear backward weight",
                                                       "attention forward",
                                                       "attention backward",
                                                       "gelu",
                                                       "head products",
                                                       "cross entropy"};
    return names[operation];
}

typedef enum Recompute {
    RECOMPUTE_NONE,
    RECOMPUTE_GELU,
    RECOMPUTE_LAYERNORM,
    RECOMPUTE_BLOCK,
    RECOMPUTE_LEVELS
} Recompute;

// What a model is built for: the machine and what fits on it.
typedef struct GptNeoSettings {
    int B, T;
    int threads;         // of the pool, on the CPU
    bool on_gpu;         // kernels run there
    Precision precision; // of weights and activations
    Recompute recompute; // on the CPU RECOMPUTE_NONE or RECOMPUTE_BLOCK
} GptNeoSettings;

typedef struct GptNeo {
    GptNeoConfig config;
    GptNeoSettings settings;
    int B, T;
    size_t parameter_count;
    size_t offsets[GPT_NEO_FIRST_LAYER + TENSORS_PER_LAYER * GPT_NEO_MAX_LAYERS +
                   2]; // of each tensor of the table
    // The parameters in the model's precision. In fp32 they are the caller's; otherwise a
    // copy, of which the first `prepared` elements are those of the latest call, or all
    // of them with the version that the caller gave.
    const Real *weights;
    Real *weight_copy;
    size_t prepared;
    uint64_t weights_version;
    // Activations of layer l, or of the layer at hand where they are made again.
    Real *residuals;   // (L+1, B, T, C): input of each layer, and what comes out of the last
    Real *middles;     // (L, B, T, C): the residual between attention and MLP
    Real *normals;     // (2L+1, B, T, C): output of each LayerNorm
    float *statistics; // (2L+1, B, T, 2)
    Real *qkv;         // (L, B, T, 3C)
    Real *attention;   // (L, B, T, C)
    float *log_sums;   // (L, B, H, T)
    Real *inner;       // (L, B, T, F): after GELU
    Real *saved;       // (L, B, T, F): what GELU keeps for its backward pass
    // Workspace.
    Real *
        branch; // (B, T, C): what is about to be added to the residual; in backward the gradient of a LayerNorm's or attention's out
    Real *d_residual; // (B, T, C)
    Real *d_wide;     // (B, T, max(3C, F)), rows d_wide_stride apart
    float *partials;  // of sums over rows
    float *scores;    // of attention
    Real *logits;     // (chunk, V), rows logits_stride apart
    float *losses;    // (B, T); the host can read it
    int chunk;        // rows of logits at a time
    int d_wide_stride, logits_stride;
    // On a GPU: the batch, and the order in which the gradient of the token embedding is
    // added up.
    int32_t *tokens, *targets, *order; // (B, T)
    int32_t *host_order, *host_counts; // (B, T), (V + 1)
    float *embedding_partials;
    void *product_workspace;
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
static inline int gpt_neo_chunk_rows(int rows, int logits_stride, Precision precision) {
    int most = (int)(GPT_NEO_LOGITS_BYTES / ((size_t)logits_stride * precision_bytes(precision)));
    if (most < 1) { most = 1; }
    int chunks = (rows + most - 1) / most;
    return (rows + chunks - 1) / chunks;
}

static inline void gpt_neo_reserve_activations(GptNeo *model, Arena *arena) {
    const GptNeoConfig *config = &model->config;
    size_t rows = (size_t)model->B * (size_t)model->T, L = (size_t)config->layers,
           C = (size_t)config->channels, F = (size_t)config->inner;
    size_t row = rows * precision_bytes(model->settings.precision), float_row = rows * sizeof(float);
    Recompute recompute = model->settings.recompute;
    size_t layers = recompute >= RECOMPUTE_BLOCK ? 1 : L,
           points = recompute >= RECOMPUTE_BLOCK ? 2 : 2 * L + 1;
    arena_reserve(arena, MEMORY_ACTIVATIONS, "residuals", (L + 1) * row * C, &model->residuals);
    arena_reserve(arena, MEMORY_ACTIVATIONS, "residuals within layers", layers * row * C, &model->middles);
    arena_reserve(arena, MEMORY_ACTIVATIONS, "layernorm outputs",
                  (recompute >= RECOMPUTE_LAYERNORM ? 2 : points) * row * C, &model->normals);
    arena_reserve(arena, MEMORY_ACTIVATIONS, "layernorm statistics", points * float_row * 2,
                  &model->statistics);
    arena_reserve(arena, MEMORY_ACTIVATIONS, "queries keys values", layers * row * 3 * C, &model->qkv);
    arena_reserve(arena, MEMORY_ACTIVATIONS, "attention outputs", layers * row * C, &model->attention);
    arena_reserve(arena, MEMORY_ACTIVATIONS, "attention log sums", layers * float_row * (size_t)config->heads,
                  &model->log_sums);
    arena_reserve(arena, MEMORY_ACTIVATIONS, "gelu outputs", (recompute >= RECOMPUTE_GELU ? 1 : L) * row * F,
                  &model->inner);
    arena_reserve(arena, MEMORY_ACTIVATIONS, "gelu inputs or derivatives", layers * row * F, &model->saved);
}

static inline void gpt_neo_reserve_workspace(GptNeo *model, Arena *arena) {
    const GptNeoConfig *config = &model->config;
    const GptNeoSettings *settings = &model->settings;
    size_t rows = (size_t)model->B * (size_t)model->T, C = (size_t)config->channels,
           F = (size_t)config->inner;
    size_t wide = 3 * C > F ? 3 * C : F, element = precision_bytes(settings->precision);
    model->d_wide_stride = settings->on_gpu ? (int)wide : matmul_padded_stride((int)wide);
    model->logits_stride = settings->on_gpu ? (config->vocabulary + 63) / 64 * 64 : config->vocabulary;
    model->chunk = gpt_neo_chunk_rows((int)rows, model->logits_stride, settings->precision);
    arena_reserve(arena, MEMORY_WORKSPACE, "branch", rows * C * element, &model->branch);
    arena_reserve(arena, MEMORY_WORKSPACE, "residual gradient", rows * C * element, &model->d_residual);
    arena_reserve(arena, MEMORY_WORKSPACE, "wide gradient", rows * (size_t)model->d_wide_stride * element,
                  &model->d_wide);
    arena_reserve(arena, MEMORY_WORKSPACE, "partial sums",
                  row_partials_floats(settings->on_gpu, wide) * sizeof(float), &model->partials);
    arena_reserve(
        arena, MEMORY_WORKSPACE, "attention scores",
        attention_scratch_floats(settings->on_gpu, model->B, model->T, config->heads, settings->threads) *
            sizeof(float),
        &model->scores);
    arena_reserve(arena, MEMORY_WORKSPACE, "logits chunk",
                  (size_t)model->chunk * (size_t)model->logits_stride * element, &model->logits);
    arena_reserve_host(arena, MEMORY_WORKSPACE, "losses", rows * sizeof(float), &model->losses);
}

static inline void gpt_neo_reserve_batch(GptNeo *model, Arena *arena) {
    size_t rows = (size_t)model->B * (size_t)model->T, bytes = rows * sizeof(int32_t);
    arena_reserve(arena, MEMORY_WORKSPACE, "tokens on the device", bytes, &model->tokens);
    arena_reserve(arena, MEMORY_WORKSPACE, "targets on the device", bytes, &model->targets);
    arena_reserve(arena, MEMORY_WORKSPACE, "order of tokens on the device", bytes, &model->order);
    arena_reserve_host(arena, MEMORY_WORKSPACE, "order of tokens", bytes, &model->host_order);
    arena_reserve_host(arena, MEMORY_WORKSPACE, "counts of tokens",
                       ((size_t)model->config.vocabulary + 1) * sizeof(int32_t), &model->host_counts);
    arena_reserve(arena, MEMORY_WORKSPACE, "partial sums of the embedding",
                  embedding_partials_floats((int)rows, model->config.channels) * sizeof(float),
                  &model->embedding_partials);
    arena_reserve(arena, MEMORY_WORKSPACE, "matrix products", products_workspace_bytes(),
                  &model->product_workspace);
}

// On the CPU, for a pool of `threads`.
static inline GptNeoSettings gpt_neo_on_cpu(int B, int T, int threads) {
    GptNeoSettings settings = {B, T, threads, false, PRECISION_FP32, RECOMPUTE_NONE};
    return settings;
}

// Plans weights, activations and workspace. T must not exceed the positions. `model` must
// stay where it is.
static inline void gpt_neo_reserve(GptNeo *model, Arena *arena, const GptNeoConfig *config,
                                   const GptNeoSettings *settings) {
    assert(settings->B >= 1 && settings->T >= 1 && settings->T <= config->positions &&
           (long long)settings->B * settings->T < INT_MAX / 2);
    memset(model, 0, sizeof *model);
    model->config = *config;
    model->settings = *settings;
    model->B = settings->B;
    model->T = settings->T;
    ParameterTable table;
    gpt_neo_parameter_table(config, &table);
    model->parameter_count = table.parameter_count;
    for (int i = 0; i < table.count; i++) { model->offsets[i] = table.entries[i].offset; }
    parameter_table_free(&table);
    if (settings->precision != PRECISION_FP32) {
        arena_reserve(arena, MEMORY_PARAMETERS, "weights",
                      model->parameter_count * precision_bytes(settings->precision), &model->weight_copy);
    }
    gpt_neo_reserve_activations(model, arena);
    gpt_neo_reserve_workspace(model, arena);
    if (settings->on_gpu) { gpt_neo_reserve_batch(model, arena); }
}

// Tensor `tensor` of layer `layer` in a flat array of parameters or gradients.
static inline size_t gpt_neo_at(const GptNeo *model, int layer, GptNeoTensor tensor) {
    return model->offsets[gpt_neo_tensor(layer, tensor)];
}

static inline size_t gpt_neo_rows(const GptNeo *model) { return (size_t)model->B * (size_t)model->T; }

// Activation array `base` with `width` elements per position, at index `index`.
static inline Real *gpt_neo_slice(const GptNeo *model, Real *base, int index, int width) {
    return real_at(base, (size_t)index * gpt_neo_rows(model) * (size_t)width, model->settings.precision);
}

static inline float *gpt_neo_float_slice(const GptNeo *model, float *base, int index, int width) {
    return base + (size_t)index * gpt_neo_rows(model) * (size_t)width;
}

static inline const Real *gpt_neo_weight(const GptNeo *model, size_t offset) {
    return real_at_const(model->weights, offset, model->settings.precision);
}

// Where the activations of layer l lie: 0 where they are made again.
static inline int gpt_neo_slot(const GptNeo *model, int l) {
    return model->settings.recompute >= RECOMPUTE_BLOCK ? 0 : l;
}
static inline int gpt_neo_inner_slot(const GptNeo *model, int l) {
    return model->settings.recompute >= RECOMPUTE_GELU ? 0 : l;
}

// LayerNorms are counted as points: 2l and 2l + 1 in layer l, 2L at the end.
static inline int gpt_neo_statistics_slot(const GptNeo *model, int point) {
    return model->settings.recompute >= RECOMPUTE_BLOCK ? point % 2 : point;
}

static inline Real *gpt_neo_normal(const GptNeo *model, int point) {
    int slot = model->settings.recompute >= RECOMPUTE_LAYERNORM ? point % 2 : point;
    return gpt_neo_slice(model, model->normals, slot, model->config.channels);
}

static inline Real *gpt_neo_residual(const GptNeo *model, int point) {
    int l = point / 2, C = model->config.channels;
    return point % 2 == 0 ? gpt_neo_slice(model, model->residuals, l, C)
                          : gpt_neo_slice(model, model->middles, gpt_neo_slot(model, l), C);
}

static inline Real *gpt_neo_qkv(const GptNeo *model, int l) {
    return gpt_neo_slice(model, model->qkv, gpt_neo_slot(model, l), 3 * model->config.channels);
}

static inline Real *gpt_neo_attended(const GptNeo *model, int l) {
    return gpt_neo_slice(model, model->attention, gpt_neo_slot(model, l), model->config.channels);
}

static inline float *gpt_neo_log_sums(const GptNeo *model, int l) {
    return gpt_neo_float_slice(model, model->log_sums, gpt_neo_slot(model, l), model->config.heads);
}

static inline Real *gpt_neo_inner(const GptNeo *model, int l) {
    return gpt_neo_slice(model, model->inner, gpt_neo_inner_slot(model, l), model->config.inner);
}

static inline Real *gpt_neo_saved(const GptNeo *model, int l) {
    return gpt_neo_slice(model, model->saved, gpt_neo_slot(model, l), model->config.inner);
}

// Keys that a query of layer l sees at most; 0: no bound.
static inline int gpt_neo_window(const GptNeoConfig *config, int l) {
    return config->local[l] ? config->window : 0;
}

// The first tensor of LayerNorm number `point`; its bias is the next one.
static inline int gpt_neo_layernorm_tensor(const GptNeoConfig *config, int point) {
    if (point == 2 * config->layers) { return gpt_neo_ln_f(config); }
    return gpt_neo_tensor(point / 2, point % 2 == 0 ? TENSOR_LN_1_WEIGHT : TENSOR_LN_2_WEIGHT);
}

// The bias of the branch that is added right before LayerNorm number `point` > 0.
static inline size_t gpt_neo_branch_bias(const GptNeo *model, int point) {
    return point % 2 == 0 ? gpt_neo_at(model, point / 2 - 1, TENSOR_PROJ_BIAS)
                          : gpt_neo_at(model, point / 2, TENSOR_OUT_BIAS);
}

// LayerNorm number `point`; add_branch: what stands in model->branch is added to the
// residual first, with its bias.
static inline void gpt_neo_layernorm(GptNeo *model, Stream *stream, int point, bool add_branch) {
    int tensor = gpt_neo_layernorm_tensor(&model->config, point);
    LayernormForward work;
    work.output = gpt_neo_normal(model, point);
    work.statistics = gpt_neo_float_slice(model, model->statistics, gpt_neo_statistics_slot(model, point), 2);
    work.residual = gpt_neo_residual(model, point);
    work.residual_before = add_branch ? gpt_neo_residual(model, point - 1) : NULL;
    work.branch = add_branch ? model->branch : NULL;
    work.branch_bias = add_branch ? gpt_neo_weight(model, gpt_neo_branch_bias(model, point)) : NULL;
    work.weight = gpt_neo_weight(model, model->offsets[tensor]);
    work.bias = gpt_neo_weight(model, model->offsets[tensor + 1]);
    work.epsilon = model->config.epsilon;
    work.rows = (int)gpt_neo_rows(model);
    work.channels = model->config.channels;
    layernorm_forward(stream, &work);
    gpt_neo_lap(model, OPERATION_LAYERNORM);
}

// output (B, T, outputs) = input (B, T, inputs) times the weight at `offset`, transposed.
static inline void gpt_neo_linear(GptNeo *model, Stream *stream, Real *output, const Real *input,
                                  size_t offset, int inputs, int outputs) {
    matmul_forward(stream, output, outputs, input, gpt_neo_weight(model, offset), (int)gpt_neo_rows(model),
                   inputs, outputs);
    gpt_neo_lap(model, OPERATION_LINEAR_FORWARD);
}

// First part of a layer: LayerNorm and the fused projection to queries, keys and values.
static inline void gpt_neo_layer_enter(GptNeo *model, Stream *stream, int l, bool add_branch) {
    int C = model->config.channels;
    gpt_neo_layernorm(model, stream, 2 * l, add_branch);
    gpt_neo_linear(model, stream, gpt_neo_qkv(model, l), gpt_neo_normal(model, 2 * l),
                   gpt_neo_at(model, l, TENSOR_Q), C, 3 * C);
}

static inline void gpt_neo_attend(GptNeo *model, Stream *stream, int l) {
    const GptNeoConfig *config = &model->config;
    attention_forward(stream, gpt_neo_attended(model, l), gpt_neo_log_sums(model, l), model->scores,
                      gpt_neo_qkv(model, l), model->B, model->T, config->channels, config->heads,
                      gpt_neo_window(config, l));
    gpt_neo_lap(model, OPERATION_ATTENTION_FORWARD);
}

static inline void gpt_neo_gelu(GptNeo *model, Stream *stream, int l) {
    gelu_forward(stream, gpt_neo_inner(model, l), gpt_neo_saved(model, l),
                 gpt_neo_weight(model, gpt_neo_at(model, l, TENSOR_FC_BIAS)), (int)gpt_neo_rows(model),
                 model->config.inner);
    gpt_neo_lap(model, OPERATION_GELU);
}

// What follows attention, up to what c_proj multiplies.
static inline void gpt_neo_layer_middle(GptNeo *model, Stream *stream, int l) {
    int C = model->config.channels, F = model->config.inner;
    gpt_neo_linear(model, stream, model->branch, gpt_neo_attended(model, l),
                   gpt_neo_at(model, l, TENSOR_OUT_WEIGHT), C, C);
    gpt_neo_layernorm(model, stream, 2 * l + 1, true);
    gpt_neo_linear(model, stream, gpt_neo_saved(model, l), gpt_neo_normal(model, 2 * l + 1),
                   gpt_neo_at(model, l, TENSOR_FC_WEIGHT), C, F);
    gpt_neo_gelu(model, stream, l);
}

// The rest, once attention's output stands in its place; leaves the product of c_proj,
// without its bias, in model->branch.
static inline void gpt_neo_layer_leave(GptNeo *model, Stream *stream, int l) {
    gpt_neo_layer_middle(model, stream, l);
    gpt_neo_linear(model, stream, model->branch, gpt_neo_inner(model, l),
                   gpt_neo_at(model, l, TENSOR_PROJ_WEIGHT), model->config.inner, model->config.channels);
}

static inline void gpt_neo_layer_forward(GptNeo *model, Stream *stream, int l) {
    gpt_neo_layer_enter(model, stream, l, l > 0);
    gpt_neo_attend(model, stream, l);
    gpt_neo_layer_leave(model, stream, l);
}

// The last hidden state, LayerNorm_f(x) (B, T, C), of the latest forward pass; times
// wte^T it is the logits.
static inline Real *gpt_neo_hidden(const GptNeo *model) {
    return gpt_neo_normal(model, 2 * model->config.layers);
}

// Before a pass over `parameters`: weights of a version that is known are still good.
static inline void gpt_neo_take_parameters(GptNeo *model, const float *parameters, const Pace *pace) {
    uint64_t version = pace != NULL ? pace->version : 0;
    bool copied = model->settings.precision != PRECISION_FP32;
    model->weights = copied ? model->weight_copy : (const Real *)(const void *)parameters;
    model->prepared =
        copied && (version == 0 || version != model->weights_version) ? 0 : model->parameter_count;
    model->weights_version = version;
}

// Waits until parameters [0, end) have arrived, and sees to it that the weights are the
// same.
static inline void gpt_neo_need(GptNeo *model, Stream *stream, const float *parameters, const Pace *pace,
                                size_t end) {
    pace_need(pace, end);
    if (model->prepared >= end) { return; }
    reals_from_floats(stream, real_at(model->weight_copy, model->prepared, model->settings.precision),
                      parameters + model->prepared, end - model->prepared);
    model->prepared = end;
}

// Where the kernels find a batch of the host's.
static inline const int32_t *gpt_neo_upload(const GptNeo *model, Stream *stream, int32_t *device,
                                            const int32_t *host) {
    if (!model->settings.on_gpu) { return host; }
    stream_copy(stream, device, host, gpt_neo_rows(model) * sizeof(int32_t));
    return device;
}

// Runs all layers on tokens (B, T); the result is gpt_neo_hidden(model). Asks `pace` for
// the parameters of each part before it.
static inline void gpt_neo_forward(GptNeo *model, Stream *stream, const float *parameters,
                                   const int32_t *tokens, const Pace *pace) {
    int L = model->config.layers;
    if (model->operation_seconds != NULL) { model->lap_started = clock_seconds(); }
    gpt_neo_take_parameters(model, parameters, pace);
    const int32_t *batch = gpt_neo_upload(model, stream, model->tokens, tokens);
    gpt_neo_need(model, stream, parameters, pace, gpt_neo_at(model, 0, TENSOR_LN_1_WEIGHT));
    embedding_forward(stream, model->residuals, gpt_neo_weight(model, model->offsets[GPT_NEO_WTE]),
                      gpt_neo_weight(model, model->offsets[GPT_NEO_WPE]), batch, model->B, model->T,
                      model->config.channels);
    gpt_neo_lap(model, OPERATION_EMBEDDING);
    for (int l = 0; l < L; l++) {
        gpt_neo_need(model, stream, parameters, pace, gpt_neo_at(model, l + 1, TENSOR_LN_1_WEIGHT));
        gpt_neo_layer_forward(model, stream, l);
    }
    gpt_neo_need(model, stream, parameters, pace, model->parameter_count);
    gpt_neo_layernorm(model, stream, 2 * L, true);
}

// Rows [first, first + count) of the head: logits, losses, and with gradients what they
// give to wte and to the hidden state.
static inline void gpt_neo_head_chunk(GptNeo *model, Stream *stream, float *gradients, const int32_t *targets,
                                      int first, int count, float scale) {
    int C = model->config.channels, V = model->config.vocabulary, stride = model->logits_stride;
    size_t offset = (size_t)first * (size_t)C, wte = model->offsets[GPT_NEO_WTE];
    const Real *hidden = real_at_const(gpt_neo_hidden(model), offset, model->settings.precision);
    matmul_forward(stream, model->logits, stride, hidden, gpt_neo_weight(model, wte), count, C, V);
    gpt_neo_lap(model, OPERATION_HEAD_PRODUCTS);
    cross_entropy(stream, model->logits, stride, model->losses + first, targets + first, count, V, scale);
    gpt_neo_lap(model, OPERATION_CROSS_ENTROPY);
    if (gradients == NULL) { return; }
    matmul_backward_input(stream, real_at(model->branch, offset, model->settings.precision), C, model->logits,
                          stride, gpt_neo_weight(model, wte), count, C, V);
    matmul_backward_weight(stream, gradients + wte, model->logits, stride, hidden, count, C, V);
    gpt_neo_lap(model, OPERATION_HEAD_PRODUCTS);
}

// LM head of the latest forward pass; with gradients also their share of wte, and the
// gradient of the hidden state in model->branch. Returns how many targets count; where
// none does nothing is computed but a gradient of zero.
static inline int gpt_neo_head(GptNeo *model, Stream *stream, float *gradients, const int32_t *targets) {
    int rows = (int)gpt_neo_rows(model), counting = 0;
    for (int i = 0; i < rows; i++) { counting += targets[i] >= 0; }
    if (counting == 0) {
        stream_clear(stream, model->branch,
                     (size_t)rows * (size_t)model->config.channels *
                         precision_bytes(model->settings.precision));
        return 0;
    }
    const int32_t *batch = gpt_neo_upload(model, stream, model->targets, targets);
    float scale = gradients != NULL ? 1.0f / (float)counting : 0.0f;
    for (int first = 0; first < rows; first += model->chunk) {
        int count = rows - first < model->chunk ? rows - first : model->chunk;
        gpt_neo_head_chunk(model, stream, gradients, batch, first, count, scale);
    }
    return counting;
}

// The mean of the losses that the head has left; waits for the stream.
static inline float gpt_neo_mean_loss(const GptNeo *model, Stream *stream, int counting) {
    stream_settle(stream);
    if (counting == 0) { return 0.0f; }
    double loss = 0.0;
    for (size_t i = 0; i < gpt_neo_rows(model); i++) { loss += (double)model->losses[i]; }
    return (float)(loss / counting);
}

// Backward of LayerNorm `point`: model->branch is the gradient of its output. The result
// is added to model->d_residual, which the last LayerNorm starts; its sum over rows is
// the gradient of the bias of the branch that was added before, if there was one.
static inline void gpt_neo_layernorm_backward(GptNeo *model, Stream *stream, float *gradients, int point) {
    int tensor = gpt_neo_layernorm_tensor(&model->config, point);
    LayernormBackward work;
    work.d_residual = model->d_residual;
    work.accumulate = point < 2 * model->config.layers;
    work.d_weight = gradients + model->offsets[tensor];
    work.d_bias = gradients + model->offsets[tensor + 1];
    work.d_branch_bias = point > 0 ? gradients + gpt_neo_branch_bias(model, point) : NULL;
    work.partials = model->partials;
    work.d_output = model->branch;
    work.residual = gpt_neo_residual(model, point);
    work.statistics = gpt_neo_float_slice(model, model->statistics, gpt_neo_statistics_slot(model, point), 2);
    work.weight = gpt_neo_weight(model, model->offsets[tensor]);
    work.rows = (int)gpt_neo_rows(model);
    work.channels = model->config.channels;
    layernorm_backward(stream, &work);
    gpt_neo_lap(model, OPERATION_LAYERNORM);
}

// Both gradients of the linear layer whose weight (outputs, inputs) is at `weight` in
// parameters and gradients.
static inline void gpt_neo_linear_backward(GptNeo *model, Stream *stream, float *gradients, size_t weight,
                                           Real *d_input, int d_input_stride, const Real *d_output,
                                           int d_output_stride, const Real *input, int inputs, int outputs) {
    int rows = (int)gpt_neo_rows(model);
    matmul_backward_weight(stream, gradients + weight, d_output, d_output_stride, input, rows, inputs,
                           outputs);
    gpt_neo_lap(model, OPERATION_LINEAR_BACKWARD_WEIGHT);
    matmul_backward_input(stream, d_input, d_input_stride, d_output, d_output_stride,
                          gpt_neo_weight(model, weight), rows, inputs, outputs);
    gpt_neo_lap(model, OPERATION_LINEAR_BACKWARD_INPUT);
}

// Makes again what the backward pass of layer l needs and the forward pass has not kept,
// but for the LayerNorm outputs.
static inline void gpt_neo_recompute(GptNeo *model, Stream *stream, int l) {
    if (model->settings.recompute >= RECOMPUTE_BLOCK) {
        gpt_neo_layer_enter(model, stream, l, false);
        gpt_neo_attend(model, stream, l);
        gpt_neo_layer_middle(model, stream, l);
    } else if (model->settings.recompute >= RECOMPUTE_GELU) {
        gpt_neo_gelu(model, stream, l);
    }
}

static inline void gpt_neo_recompute_layernorm(GptNeo *model, Stream *stream, int point) {
    if (model->settings.recompute == RECOMPUTE_LAYERNORM) { gpt_neo_layernorm(model, stream, point, false); }
}

static inline void gpt_neo_mlp_backward(GptNeo *model, Stream *stream, float *gradients, int l) {
    int C = model->config.channels, F = model->config.inner, wide = model->d_wide_stride;
    gpt_neo_linear_backward(model, stream, gradients, gpt_neo_at(model, l, TENSOR_PROJ_WEIGHT), model->d_wide,
                            wide, model->d_residual, C, gpt_neo_inner(model, l), F, C);
    gelu_backward(stream, model->d_wide, wide, gradients + gpt_neo_at(model, l, TENSOR_FC_BIAS),
                  model->partials, gpt_neo_saved(model, l),
                  gpt_neo_weight(model, gpt_neo_at(model, l, TENSOR_FC_BIAS)), (int)gpt_neo_rows(model), F);
    gpt_neo_lap(model, OPERATION_GELU);
    gpt_neo_recompute_layernorm(model, stream, 2 * l + 1);
    gpt_neo_linear_backward(model, stream, gradients, gpt_neo_at(model, l, TENSOR_FC_WEIGHT), model->branch,
                            C, model->d_wide, wide, gpt_neo_normal(model, 2 * l + 1), C, F);
    gpt_neo_layernorm_backward(model, stream, gradients, 2 * l + 1);
}

static inline void gpt_neo_attention_backward(GptNeo *model, Stream *stream, float *gradients, int l) {
    const GptNeoConfig *config = &model->config;
    int C = model->config.channels, wide = model->d_wide_stride;
    gpt_neo_linear_backward(model, stream, gradients, gpt_neo_at(model, l, TENSOR_OUT_WEIGHT), model->branch,
                            C, model->d_residual, C, gpt_neo_attended(model, l), C, C);
    attention_backward(stream, model->d_wide, wide, model->scores, model->branch, gpt_neo_attended(model, l),
                       gpt_neo_qkv(model, l), gpt_neo_log_sums(model, l), model->B, model->T, C,
                       config->heads, gpt_neo_window(config, l));
    gpt_neo_lap(model, OPERATION_ATTENTION_BACKWARD);
    gpt_neo_recompute_layernorm(model, stream, 2 * l);
    gpt_neo_linear_backward(model, stream, gradients, gpt_neo_at(model, l, TENSOR_Q), model->branch, C,
                            model->d_wide, wide, gpt_neo_normal(model, 2 * l), C, 3 * C);
    gpt_neo_layernorm_backward(model, stream, gradients, 2 * l);
}

static inline void gpt_neo_embedding_backward(GptNeo *model, Stream *stream, float *gradients,
                                              const int32_t *tokens) {
    if (model->settings.on_gpu) {
        embedding_order(model->host_order, model->host_counts, tokens, (int)gpt_neo_rows(model),
                        model->config.vocabulary);
    }
    embedding_backward(stream, gradients + model->offsets[GPT_NEO_WTE],
                       gradients + model->offsets[GPT_NEO_WPE], model->embedding_partials, model->d_residual,
                       model->settings.on_gpu ? model->tokens : tokens,
                       gpt_neo_upload(model, stream, model->order, model->host_order), model->B, model->T,
                       model->config.channels);
    gpt_neo_lap(model, OPERATION_EMBEDDING);
}

// gradients (same layout as parameters) += d(mean loss)/d(parameters) of tokens and
// targets (B, T each). Returns the mean loss over the targets >= 0; where none counts,
// the loss and what is added are 0. Tokens and targets must lie in the vocabulary. Tells
// `pace` what is finished: the tied embedding, which the head begins, only at the very
// end.
static inline float gpt_neo_loss_and_gradients(GptNeo *model, Stream *stream, const float *parameters,
                                               float *gradients, const int32_t *tokens,
                                               const int32_t *targets, const Pace *pace) {
    gpt_neo_forward(model, stream, parameters, tokens, pace);
    int counting = gpt_neo_head(model, stream, gradients, targets);
    gpt_neo_layernorm_backward(model, stream, gradients, 2 * model->config.layers);
    for (int l = model->config.layers - 1; l >= 0; l--) {
        gpt_neo_recompute(model, stream, l);
        gpt_neo_mlp_backward(model, stream, gradients, l);
        pace_finish(pace, gpt_neo_at(model, l, TENSOR_LN_2_WEIGHT));
        gpt_neo_attention_backward(model, stream, gradients, l);
        pace_finish(pace, gpt_neo_at(model, l, TENSOR_LN_1_WEIGHT));
    }
    gpt_neo_embedding_backward(model, stream, gradients, tokens);
    return gpt_neo_mean_loss(model, stream, counting);
}

// Before the first pass, on the stream that will compute, with gradients that do not
// matter: on a GPU, where a pass over made-up tokens loads what there is to load and, if
// asked to, times matrix products. processors: of the GPU that products may count on; 0:
// all.
static inline void gpt_neo_start(GptNeo *model, Stream *stream, const float *parameters, float *gradients,
                                 int processors, bool tune) {
    if (!model->settings.on_gpu) { return; }
    size_t rows = gpt_neo_rows(model);
    int32_t *tokens = (int32_t *)malloc(rows * sizeof(int32_t));
    for (size_t i = 0; i < rows; i++) {
        tokens[i] = (int32_t)(random_hash(i, 0) % (uint64_t)model->config.vocabulary);
    }
    products_open(stream, model->product_workspace, processors);
    products_tune(stream, tune);
    gpt_neo_loss_and_gradients(model, stream, parameters, gradients, tokens, tokens, NULL);
    products_tune(stream, false);
    stream_clear(stream, gradients, model->parameter_count * sizeof(float));
    stream_settle(stream);
    free(tokens);
}

static inline void gpt_neo_stop(GptNeo *model, Stream *stream) {
    if (model->settings.on_gpu) { products_close(stream); }
}

// The same loss without gradients.
static inline float gpt_neo_loss(GptNeo *model, Stream *stream, const float *parameters,
                                 const int32_t *tokens, const int32_t *targets) {
    gpt_neo_forward(model, stream, parameters, tokens, NULL);
    return gpt_neo_mean_loss(model, stream, gpt_neo_head(model, stream, NULL, targets));
}

#endif
