// layer.h: a layer of the decoder, forward and backward.
//
//   q, k, v = W_qkv norm_1(x)          heads: + b_qkv, norms, rotary positions, q / sqrt(D)
//   x = x + W_out attention(q, k, v) + b_out
//   x = x + W_down activation(W_up norm_2(x) + b_up) + b_down
//
// What there is follows from the model's tensors (Model::has): a norm without bias is an RMSNorm,
// positions without a table are rotary, and with two matrices W_up the activation is SwiGLU, else
// GELU.
//
// Each operation has the same arrays in both passes, so one function gives them to both. What the
// backward pass needs is either kept or computed again (Recompute). A branch and its bias are
// added to the residual by the norm that follows.
#pragma once

#include "models/weights.h"

// The activations of one layer, but for those of its norms.
typedef struct LayerArrays {
    Real *qkv, *heads, *attention, *mlp_saved, *mlp_hidden;
    float *logsumexp;
} LayerArrays;

// Channels of the keys of a position, and of its values.
static inline int layer_keys_width(const Model *model) {
    return (model->matrices[TENSOR_Q].outputs - model->matrices[TENSOR_OUT].inputs) / 2;
}

// Channels of its queries and keys.
static inline int layer_turned_width(const Model *model) {
    return model->matrices[TENSOR_OUT].inputs + layer_keys_width(model);
}

// Channels of them that a layer keeps as they are before norms of heads; 0: it has no such norms.
static inline size_t layer_kept_heads(const Model *model) {
    return model->has[model_tensor(0, TENSOR_Q_NORM)] ? (size_t)layer_turned_width(model) : 0;
}

// Numbers of a table of rotary positions; 0: the model has a tensor of positions.
static inline size_t layer_turns(const Model *model) {
    bool has_tensor = model->has[model_tensor(model->config.layers, TENSOR_POSITIONS)];
    return has_tensor ? 0 : (size_t)model->settings.T * model_head_size(&model->config);
}

static inline LayerArrays layer_arrays(const Model *model, int l) {
    const LayerMatrix *matrices = model->matrices;
    Recompute recompute = model->settings.recompute;
    int slot = recompute >= RECOMPUTE_BLOCK ? 0 : l;
    LayerArrays arrays = {
        .qkv = model_slice(model, model->qkv, slot, matrices[TENSOR_Q].outputs),
        .heads =
            model->heads != NULL ? model_slice(model, model->heads, slot, layer_turned_width(model)) : NULL,
        .attention = model_slice(model, model->attention, slot, matrices[TENSOR_OUT].inputs),
        .mlp_saved = model_slice(model, model->mlp_saved, slot, matrices[TENSOR_UP].outputs),
        .mlp_hidden = model_slice(model, model->mlp_hidden, recompute >= RECOMPUTE_GELU ? 0 : l,
                                  matrices[TENSOR_DOWN].inputs),
        .logsumexp = model->logsumexp + (size_t)slot * model_rows(model) * (size_t)model->config.heads};
    return arrays;
}

// ---- Norms ----------------------------------------------------------------------------

// The tensor that is added to the residual right before norm `norm` > 0.
static inline int layer_branch_bias(int norm) {
    return model_tensor((norm - 1) / 2, norm % 2 == 0 ? TENSOR_DOWN_BIAS : TENSOR_OUT_BIAS);
}

// What norm `norm` reads and writes: 2l and 2l + 1 are those of layer l, 2L is the last one.
// Backward, with gradients, model->branch is the gradient of its output. The gradient of its input
// is added to model->d_residual (the last norm overwrites it); the sum of it over rows is the
// gradient of the bias that was added to the residual right before.
static inline Layernorm layer_norm(const Model *model, int norm, float *gradients) {
    Recompute recompute = model->settings.recompute;
    int C = model->config.channels, l = norm / 2, slot = recompute >= RECOMPUTE_BLOCK ? norm % 2 : norm;
    bool first = norm % 2 == 0; // of its layer
    int weight = model_tensor(l, first ? TENSOR_NORM_1 : TENSOR_NORM_2),
        bias = model_tensor(l, first ? TENSOR_NORM_1_BIAS : TENSOR_NORM_2_BIAS);
    Layernorm work = {
        .statistics = model->statistics + (size_t)slot * model_rows(model) * 2,
        .residual = first ? model_slice(model, model->residuals, l, C)
                          : model_slice(model, model->residual_mid, slot / 2, C),
        .weight = weights_of(model, weight),
        .bias = weights_of(model, bias),
        .epsilon = (float)model->config.epsilon,
        .rows = (int)model_rows(model),
        .channels = C,
        .output = model_slice(model, model->normals, recompute >= RECOMPUTE_LAYERNORM ? norm % 2 : norm, C),
        .d_residual = model->d_residual,
        .accumulate = norm < 2 * model->config.layers,
        .partials = model->partials,
        .d_output = model->branch};
    if (gradients != NULL) {
        work.d_weight = weights_gradient(model, gradients, weight);
        work.d_bias = weights_gradient(model, gradients, bias);
        work.d_branch_bias = norm > 0 ? weights_gradient(model, gradients, layer_branch_bias(norm)) : NULL;
    }
    return work;
}

// add_branch: the residual before it is first computed, from the one before that,
// model->branch and the branch's bias.
static inline void layer_norm_forward(Model *model, Stream *stream, int norm, bool add_branch) {
    Layernorm work = layer_norm(model, norm, NULL);
    if (add_branch) {
        work.residual_before = layer_norm(model, norm - 1, NULL).residual;
        work.branch = model->branch;
        work.branch_bias = weights_of(model, layer_branch_bias(norm));
    }
    layernorm_forward(stream, &work);
}

static inline void layer_norm_backward(Model *model, Stream *stream, int norm, float *gradients) {
    Layernorm work = layer_norm(model, norm, gradients);
    layernorm_backward(stream, &work);
}

// ---- The other operations -------------------------------------------------------------

// The product with the matrix of this role. The gradient of the end of a branch is
// model->d_residual, of what is wider model->d_wide. With gradients (NULL: none) back through it.
static inline void layer_linear(Model *model, Stream *stream, int l, int role, float *gradients) {
    LayerArrays arrays = layer_arrays(model, l);
    bool down = role == TENSOR_DOWN, out = role == TENSOR_OUT, ends = down || out;
    const LayerMatrix *matrix = &model->matrices[role];
    int norm = role == TENSOR_Q ? 2 * l : 2 * l + 1;
    Product product = {.tensor = model_tensor(l, role),
                       .matrix = matrix,
                       .input = down  ? arrays.mlp_hidden
                                : out ? arrays.attention
                                      : layer_norm(model, norm, NULL).output,
                       .output = ends               ? model->branch
                                 : role == TENSOR_Q ? arrays.qkv
                                                    : arrays.mlp_saved,
                       .d_output = ends ? model->d_residual : model->d_wide,
                       .d_input = down ? model->d_wide : model->branch,
                       .d_output_stride = ends ? matrix->outputs : model->d_wide_stride,
                       .d_input_stride = down ? model->d_wide_stride : matrix->inputs};
    weights_multiply(model, stream, &product, gradients);
}

// Adds the bias of this role, if there is one, to a product (B, T, columns); scale is that of
// queries. With gradients (NULL: none) back through it.
static inline void layer_bias(Model *model, Stream *stream, int l, int role, Real *product, int columns,
                              float scale, float *gradients) {
    int bias = model_tensor(l, role);
    bool backward = gradients != NULL;
    if (!model->has[bias]) { return; }
    Bias work = {.values = backward ? model->d_wide : product,
                 .bias = weights_of(model, bias),
                 .d_bias = backward ? weights_gradient(model, gradients, bias) : NULL,
                 .partials = model->partials,
                 .rows = (int)model_rows(model),
                 .columns = columns,
                 .stride = backward ? model->d_wide_stride : columns,
                 .scaled = model->matrices[TENSOR_OUT].inputs,
                 .scale = scale};
    bias_add(stream, &work);
}

// Turns queries and keys by their positions, after the norms of their heads.
static inline void layer_rotary(Model *model, Stream *stream, int l, float *gradients) {
    const ModelConfig *config = &model->config;
    LayerArrays arrays = layer_arrays(model, l);
    bool backward = gradients != NULL;
    Rotary work = {.values = backward ? model->d_wide : arrays.qkv,
                   .saved = arrays.heads,
                   .turns = model->turns,
                   .partials = model->partials,
                   .rows = (int)model_rows(model),
                   .T = model->T,
                   .heads = config->heads,
                   .kv_heads = model_kv_heads(config),
                   .head_size = model_head_size(config),
                   .stride = backward ? model->d_wide_stride : model->matrices[TENSOR_Q].outputs,
                   .scale = 1.0f / sqrtf((float)model_head_size(config)),
                   .epsilon = (float)config->epsilon,
                   .backward = backward};
    for (int key = 0; key < 2; key++) {
        int norm = model_tensor(l, key ? TENSOR_K_NORM : TENSOR_Q_NORM);
        work.weights[key] = weights_of(model, norm);
        if (backward) { work.d_weights[key] = weights_gradient(model, gradients, norm); }
    }
    rotary(stream, &work);
}

// From the product with W_qkv to what attention reads; queries are divided by sqrt(D) here, so that
// attention need not scale its scores. With gradients (NULL: none) back through it.
static inline void layer_heads(Model *model, Stream *stream, int l, float *gradients) {
    const ModelConfig *config = &model->config;
    float scale = config->scaled_scores ? 1.0f / sqrtf((float)model_head_size(config)) : 1.0f;
    Real *qkv = layer_arrays(model, l).qkv;
    bool turns = model->turns != NULL;
    if (turns && gradients != NULL) { layer_rotary(model, stream, l, gradients); }
    layer_bias(model, stream, l, TENSOR_QKV_BIAS, qkv, model->matrices[TENSOR_Q].outputs, scale, gradients);
    if (turns && gradients == NULL) { layer_rotary(model, stream, l, NULL); }
}

// Keys that a query of layer l sees at most; 0: no limit.
static inline int layer_window(const ModelConfig *config, int l) {
    return config->local[l] ? config->window : 0;
}

static inline void layer_attention(Model *model, Stream *stream, int l, bool backward) {
    LayerArrays arrays = layer_arrays(model, l);
    int window = layer_window(&model->config, l);
    Attention work = {.output = arrays.attention,
                      .logsumexp = arrays.logsumexp,
                      .scratch = model->scores,
                      .qkv = arrays.qkv,
                      .d_qkv = backward ? model->d_wide : NULL,
                      .d_output = model->branch,
                      .B = model->B,
                      .T = model->T,
                      .channels = model->matrices[TENSOR_OUT].inputs,
                      .heads = model->config.heads,
                      .kv_heads = model_kv_heads(&model->config),
                      .d_qkv_stride = backward ? model->d_wide_stride : 0,
                      .window = window < model->T ? window : 0,
                      .starts = model->settings.on_gpu ? model->starts : model->host_starts};
    attention(stream, &work);
}

// Attention of the one position that model_decode() is at: only its key and value are new,
// those of all before it are in the cache.
static inline void layer_attention_decode(Model *model, Stream *stream, int l) {
    const ModelConfig *config = &model->config;
    LayerArrays arrays = layer_arrays(model, l);
    const float *qkv = real_floats(arrays.qkv);
    size_t queries = (size_t)model->matrices[TENSOR_OUT].inputs, keys = (size_t)layer_keys_width(model),
           cache = (size_t)l * config->positions * keys, place = cache + (size_t)model->position * keys;
    AttentionDecode work = {.output = real_floats(arrays.attention),
                            .scores = model->key_scores,
                            .query = qkv,
                            .keys = model->keys + cache,
                            .values = model->values + cache,
                            .position = model->position,
                            .positions = config->positions,
                            .channels = (int)queries,
                            .heads = config->heads,
                            .kv_heads = model_kv_heads(config),
                            .window = layer_window(config, l)};
    memcpy(model->keys + place, qkv + queries, keys * sizeof(float));
    memcpy(model->values + place, qkv + queries + keys, keys * sizeof(float));
    cpu_attention_decode(stream, &work);
}

// Adds b_up to mlp_saved before SwiGLU; GELU adds it by itself. With gradients (NULL: none) back
// through it.
static inline void layer_gated_bias(Model *model, Stream *stream, int l, float *gradients) {
    if (!model->has[model_tensor(l, TENSOR_GATED_UP)]) { return; }
    layer_bias(model, stream, l, TENSOR_UP_BIAS, layer_arrays(model, l).mlp_saved,
               model->matrices[TENSOR_UP].outputs, 1.0f, gradients);
}

// mlp_hidden = activation(mlp_saved + b_up). With gradients (NULL: none) back through it.
static inline void layer_activation(Model *model, Stream *stream, int l, float *gradients) {
    LayerArrays arrays = layer_arrays(model, l);
    int bias = model_tensor(l, TENSOR_UP_BIAS), rows = (int)model_rows(model),
        columns = model->matrices[TENSOR_DOWN].inputs;
    bool backward = gradients != NULL;
    if (model->has[model_tensor(l, TENSOR_GATED_UP)]) {
        Swiglu gated = {.output = arrays.mlp_hidden,
                        .saved = arrays.mlp_saved,
                        .gradient = backward ? model->d_wide : NULL,
                        .rows = rows,
                        .columns = columns,
                        .gradient_stride = model->d_wide_stride};
        swiglu(stream, &gated);
        return;
    }
    Gelu work = {.output = arrays.mlp_hidden,
                 .saved = arrays.mlp_saved,
                 .gradient = model->d_wide,
                 .bias = weights_of(model, bias),
                 .d_bias = backward ? weights_gradient(model, gradients, bias) : NULL,
                 .partials = model->partials,
                 .rows = rows,
                 .columns = columns,
                 .gradient_stride = model->d_wide_stride};
    (backward ? gelu_backward : gelu_forward)(stream, &work);
}

// ---- The passes -----------------------------------------------------------------------

// Layer l up to mlp_hidden, which its last product reads. add_branch: as in layer_norm_forward.
static inline void layer_forward(Model *model, Stream *stream, int l, bool add_branch) {
    // attention of q, k, v = W_qkv norm_1(x)
    layer_norm_forward(model, stream, 2 * l, add_branch);
    layer_linear(model, stream, l, TENSOR_Q, NULL);
    layer_heads(model, stream, l, NULL);
    if (model->settings.decodes) {
        layer_attention_decode(model, stream, l);
    } else {
        layer_attention(model, stream, l, false);
    }

    // x = x + W_out attention + b_out, then mlp_hidden = activation(W_up norm_2(x) + b_up)
    layer_linear(model, stream, l, TENSOR_OUT, NULL);
    layer_norm_forward(model, stream, 2 * l + 1, true);
    layer_linear(model, stream, l, TENSOR_UP, NULL);
    layer_gated_bias(model, stream, l, NULL);
    layer_activation(model, stream, l, NULL);
}

// Back through layer l: model->d_residual is the gradient of its output and becomes that
// of its input. What the forward pass has not kept is computed again. Tells `pace` twice
// that gradients are finished, from the end of the layer towards its beginning.
static inline void layer_backward(Model *model, Stream *stream, int l, float *gradients, const Pace *pace) {
    Recompute recompute = model->settings.recompute;
    bool again = recompute == RECOMPUTE_LAYERNORM; // each norm is computed again before its use
    if (recompute >= RECOMPUTE_BLOCK) {
        layer_forward(model, stream, l, false);
    } else if (recompute >= RECOMPUTE_GELU) {
        layer_activation(model, stream, l, NULL);
    }

    // x = x + W_down activation(W_up norm_2(x) + b_up) + b_down
    layer_linear(model, stream, l, TENSOR_DOWN, gradients);
    layer_activation(model, stream, l, gradients);
    layer_gated_bias(model, stream, l, gradients);
    if (again) { layer_norm_forward(model, stream, 2 * l + 1, false); }
    layer_linear(model, stream, l, TENSOR_UP, gradients);
    layer_norm_backward(model, stream, 2 * l + 1, gradients);
    pace_finish(pace, weights_at(model, l, TENSOR_NORM_2));

    // x = x + W_out attention(q, k, v) + b_out
    layer_linear(model, stream, l, TENSOR_OUT, gradients);
    layer_attention(model, stream, l, true);
    layer_heads(model, stream, l, gradients);

    // q, k, v = W_qkv norm_1(x)
    if (again) { layer_norm_forward(model, stream, 2 * l, false); }
    layer_linear(model, stream, l, TENSOR_Q, gradients);
    layer_norm_backward(model, stream, 2 * l, gradients);
    pace_finish(pace, weights_at(model, l, TENSOR_NORM_1));
}
