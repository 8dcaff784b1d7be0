// decoder.h: the passes of every family.
//
//   x = embedding[token] + positions[position], where the family has these
//   x = layer(x) for each layer (layer.h)
//   loss = head(norm(x)) (head.h)
//
// A model reserves activations and workspace in an arena and never allocates. Tokens and targets
// come from the host, and losses go there.
#pragma once

#include "models/head.h"
#include "models/positions.h"

// ---- Memory ---------------------------------------------------------------------------

// Weights, activations and workspace: what takes no bytes is not needed.
static inline void model_reserve_arrays(Model *model, Arena *arena) {
    const ModelConfig *config = &model->config;
    const ModelSettings *settings = &model->settings;
    Recompute recompute = settings->recompute;
    bool on_gpu = settings->on_gpu, shared = recompute >= RECOMPUTE_BLOCK; // by all layers
    size_t rows = model_rows(model), L = (size_t)config->layers, C = (size_t)config->channels,
           H = (size_t)config->heads, wide = (size_t)model->widest;
    size_t QKV = (size_t)model->matrices[TENSOR_Q].outputs, HD = (size_t)model->matrices[TENSOR_OUT].inputs,
           U = (size_t)model->matrices[TENSOR_UP].outputs, F = (size_t)model->matrices[TENSOR_DOWN].inputs;
    size_t element = precision_bytes(settings->precision), row = rows * element, floats = sizeof(float);
    size_t layers = shared ? 1 : L, norms = shared ? 2 : 2 * L + 1;
    size_t logits = (size_t)model->chunk * model->logits_stride * element;
    size_t id = on_gpu ? sizeof(int32_t) : 0, starts = settings->separator ? rows * sizeof(int32_t) : 0;
    size_t fp8 = settings->fp8 ? 1 : 0, adapted = settings->part != NULL ? (size_t)settings->part->rank : 0;
    size_t scores = attention_scratch_floats(on_gpu, model->B, model->T, (int)HD, config->heads,
                                             settings->threads, settings->precision);
    size_t sums = on_gpu ? embedding_partials_floats((int)rows, config->channels) : 0;
    const MemoryClass P = MEMORY_PARAMETERS, A = MEMORY_ACTIVATIONS, W = MEMORY_WORKSPACE;
    const ArenaRow arrays[] = {
        {W, "gradients that are not used", settings->part != NULL ? LAYER_TENSORS * wide * floats : 0,
         &model->discarded},
        {W, "between the products of adapters", row * adapted, &model->inner},
        {P, "weights", weights_are_given(model) ? 0 : model->parameter_count * element, &model->copy.data},
        {P, "weights in FP8", fp8 * 2 * L * model->layer_elements, &model->fp8_weights},
        {P, "scales of FP8", fp8 * (1 + L * LAYER_TENSORS) * FP8_SCALE_STRIDE * floats, &model->fp8_scales},
        {W, "operand in FP8", fp8 * rows * wide, &model->fp8_operand},
        {A, "residuals", (L + 1) * row * C, &model->residuals},
        {A, "residuals within layers", layers * row * C, &model->residual_mid},
        {A, "layernorm outputs", (recompute >= RECOMPUTE_LAYERNORM ? 2 : norms) * row * C, &model->normals},
        {A, "layernorm statistics", norms * rows * 2 * floats, &model->statistics},
        {A, "queries keys values", layers * row * QKV, &model->qkv},
        {A, "heads before their norms", layers * row * layer_kept_heads(model), &model->heads},
        {A, "attention outputs", layers * row * HD, &model->attention},
        {A, "attention logsumexp", layers * rows * H * floats, &model->logsumexp},
        {A, "gelu outputs", (recompute >= RECOMPUTE_GELU ? 1 : L) * row * F, &model->mlp_hidden},
        {A, "gelu inputs or derivatives", layers * row * U, &model->mlp_saved},
        {W, "branch", row * size_max(C, HD), &model->branch},
        {W, "residual gradient", row * C, &model->d_residual},
        {W, "wide gradient", row * (size_t)model->d_wide_stride, &model->d_wide},
        {W, "partial sums", row_partials_floats(on_gpu, size_max(wide, 3 * C)) * floats, &model->partials},
        {W, "rotary positions", layer_turns(model) * floats, &model->turns},
        {W, "attention scores", scores * floats, &model->scores},
        {W, "logits chunk", logits, &model->logits},
        {W, "starts of documents on the device", on_gpu ? starts : 0, &model->starts},
        {W, "tokens on the device", rows * id, &model->tokens},
        {W, "targets on the device", rows * id, &model->targets},
        {W, "order of tokens on the device", rows * id, &model->order},
        {W, "partial sums of the embedding", sums * floats, &model->embedding_partials},
    };
    const ArenaRow on_host[] = {
        {W, "losses", rows * floats, &model->losses},
        {W, "starts of documents", starts, &model->host_starts},
        {W, "order of tokens", rows * id, &model->host_order},
        {W, "counts of tokens", ((size_t)config->vocabulary + 1) * id, &model->host_counts},
        {W, "logits on the host", on_gpu && settings->ranks_tokens ? logits : 0, &model->host_logits},
        {W, "rotary positions on the host", on_gpu ? layer_turns(model) * floats : 0, &model->host_turns},
    };
    arena_reserve_rows(arena, arrays, sizeof arrays / sizeof arrays[0], false);
    arena_reserve_rows(arena, on_host, sizeof on_host / sizeof on_host[0], true);
}

// What decoding keeps of all positions.
static inline void model_reserve_cache(Model *model, Arena *arena) {
    size_t positions = (size_t)model->config.positions * sizeof(float),
           bytes = (size_t)model->config.layers * positions * layer_keys_width(model);
    const ArenaRow rows[] = {
        {MEMORY_ACTIVATIONS, "cached keys", bytes, &model->keys},
        {MEMORY_ACTIVATIONS, "cached values", bytes, &model->values},
        {MEMORY_WORKSPACE, "decoding scores", (size_t)model->config.heads * positions, &model->key_scores},
    };
    arena_reserve_rows(arena, rows, 3, false);
}

// The places and shapes that follow from the table of all tensors.
static inline void model_find_tensors(Model *model, const ParameterTable *table) {
    const TrainedPart *part = model->settings.part;
    LayerMatrix *matrix = NULL;
    for (int i = 0; i < table->count; i++) {
        const ParameterInfo *entry = &table->entries[i];
        int tensor = model_tensor(entry->layer, entry->role);
        TensorPlace all = {.trained = entry->offset};
        model->places[tensor] = part != NULL ? part->places[i] : all;
        model->has[tensor] = true;
        if (entry->is_head) { model->head = tensor; }
        if (!entry->is_projection || entry->layer > 0) { continue; }
        if (!entry->joins_before) {
            matrix = &model->matrices[entry->role];
            matrix->inputs = entry->columns;
            matrix->before = model->layer_elements;
        }
        matrix->parts[matrix->tensors++] = entry->rows;
        matrix->outputs += entry->rows;
        model->layer_elements += entry->count;
        model->widest =
            (int)size_max((size_t)model->widest, size_max((size_t)matrix->inputs, (size_t)matrix->outputs));
    }
}

// Finds the gradients that no product sets where a sum begins.
static inline void model_find_rest(Model *model, const ParameterTable *trained) {
    size_t end = SIZE_MAX; // of the latest span
    for (int i = 0; i < trained->count; i++) {
        const ParameterInfo *entry = &trained->entries[i];
        if (entry->is_projection || entry->is_head) { continue; }
        if (entry->offset != end) {
            assert(model->rest_count < MODEL_SPANS);
            model->rest[model->rest_count++].begin = entry->offset;
        }
        model->rest[model->rest_count - 1].count += entry->count;
        end = entry->offset + entry->count;
    }
}

// Plans activations, workspace and what is frozen. `model` must stay where it is until the arena
// is released.
static inline void model_reserve(Model *model, Arena *arena, const ModelConfig *config,
                                 const ModelSettings *settings) {
    TrainedPart *part = settings->part;
    assert(settings->B >= 1 && settings->T >= 1 && settings->T <= config->positions &&
           (double)settings->B * settings->T <= MOST_TOKENS_OF_A_MICRO_BATCH);
    memset(model, 0, sizeof *model);
    model->config = *config;
    model->settings = *settings;
    model->B = settings->B;
    model->T = settings->T;
    assert(!settings->decodes ||
           (!settings->on_gpu && settings->precision == PRECISION_FP32 && model_rows(model) == 1));
    ParameterTable table;
    parameter_table_make(config, &table);
    model->parameter_count = part != NULL ? part->table.parameter_count : table.parameter_count;
    model_find_tensors(model, &table);
    model_find_rest(model, part != NULL ? &part->table : &table);
    parameter_table_free(&table);
    model->d_wide_stride =
        settings->on_gpu ? model->widest : matmul_padded_stride(model->widest, settings->precision);
    model->logits_stride = head_logits_stride(config->vocabulary, settings->on_gpu);
    model->logits_columns = head_logits_columns(model);
    model->chunk = head_chunk_rows((int)model_rows(model), HEAD_GPU_CHUNK, model->logits_stride,
                                   settings->precision, settings->on_gpu);
    model_reserve_arrays(model, arena);
    if (settings->decodes) { model_reserve_cache(model, arena); }
    if (part != NULL) {
        arena_reserve(arena, MEMORY_PARAMETERS, "frozen parameters",
                      part->frozen_count * precision_bytes(settings->precision), &part->frozen);
    }
    size_t products = gemm_workspace_bytes(settings->on_gpu, settings->precision, settings->threads);
    if (products > 0) {
        arena_reserve(arena, MEMORY_WORKSPACE, "matrix products", products, &model->gemm_workspace);
    }
}

// ---- Passes ---------------------------------------------------------------------------

// Where the document of each of the tokens (B, T) begins.
static inline void model_find_documents(Model *model, Stream *stream, const int32_t *tokens) {
    if (model->settings.separator == NULL) { return; }
    int32_t separator = (int32_t)*model->settings.separator - 1, *starts = model->host_starts;
    size_t rows = model_rows(model), T = (size_t)model->T;
    for (size_t i = 0; i < rows; i++) {
        starts[i] = i % T == 0 || tokens[i] == separator ? (int32_t)(i % T) : starts[i - 1];
    }
    model_upload(model, stream, model->starts, starts, rows);
}

// The table of rotary positions, if there is one.
static inline void model_turn_positions(Model *model, Stream *stream) {
    const ModelSettings *settings = &model->settings;
    float *turns = settings->on_gpu ? model->host_turns : model->turns;
    if (model->turns == NULL || (model->has_turns && !settings->decodes)) { return; }
    positions_turn(&model->config, model->position, settings->T, turns);
    if (settings->on_gpu) { stream_copy(stream, model->turns, turns, layer_turns(model) * sizeof *turns); }
    model->has_turns = true;
}

// x = embedding[token] + positions[position], of tokens where the kernels want them.
static inline Embedding model_embedding(const Model *model, const int32_t *tokens) {
    int L = model->config.layers, C = model->config.channels;
    const Real *table = weights_of(model, model_tensor(L, TENSOR_POSITIONS));
    size_t first = (size_t)model->position * C;
    Embedding work = {.output = model->residuals,
                      .wte = weights_of(model, model_tensor(L, TENSOR_EMBEDDING)),
                      .wpe = table != NULL ? real_at_const(table, first, model->settings.precision) : NULL,
                      .partials = model->embedding_partials,
                      .d_output = model->d_residual,
                      .tokens = tokens,
                      .B = model->B,
                      .T = model->T,
                      .channels = C};
    return work;
}

// Runs all layers on tokens (B, T), with parameters (parameter_count) that are floats
// unless the model is given its weights; the result is head_input(model). Before each
// layer it waits with `pace` for the parameters of that layer.
static inline void model_forward(Model *model, Stream *stream, const void *parameters, const int32_t *tokens,
                                 const Pace *pace) {
    int L = model->config.layers;
    weights_begin(model, parameters, pace);
    const int32_t *batch = model_upload(model, stream, model->tokens, tokens, model_rows(model));
    model_find_documents(model, stream, tokens);
    weights_need(model, stream, parameters, pace, weights_at(model, 0, TENSOR_NORM_1));
    Embedding embedding = model_embedding(model, batch);
    embedding_forward(stream, &embedding);
    model_turn_positions(model, stream);
    for (int l = 0; l < L; l++) {
        weights_need(model, stream, parameters, pace, weights_at(model, l + 1, TENSOR_NORM_1));
        layer_forward(model, stream, l, l > 0);
        // The next norm adds this product and its bias to the residual.
        layer_linear(model, stream, l, TENSOR_DOWN, NULL);
    }
    model->fp8_changed = false;
    weights_need(model, stream, parameters, pace, model->parameter_count);
    layer_norm_forward(model, stream, 2 * L, true);
}

// gradients (parameter_count) += the gradient of the losses of the targets (B, T) >= 0, summed and
// divided by B T. With pace->begins: = that gradient. Calls pace->need before it reads parameters,
// and pace->finish. Returns the losses (B, T), which mean nothing if no target counts. They can be
// read, and tokens and targets changed, when the stream has settled. parameters and gradients:
// where the kernels want them. Tokens must lie in the vocabulary.
//
// Gradients of a tied head are finished last, with those of the embedding.
static inline const float *model_gradients(Model *model, Stream *stream, const void *parameters,
                                           float *gradients, const int32_t *tokens, const int32_t *targets,
                                           const Pace *pace) {
    const TrainedPart *part = model->settings.part;
    int L = model->config.layers;
    model->B = model->settings.B;
    model->T = model->settings.T;
    model->begins = pace != NULL && pace->begins;
    model_forward(model, stream, parameters, tokens, pace);
    for (int i = 0; i < model->rest_count && model->begins; i++) {
        stream_clear(stream, gradients + model->rest[i].begin, model->rest[i].count * sizeof(float));
    }
    head_loss(model, stream, head_input(model), targets, (int)model_rows(model), NULL, gradients);
    layer_norm_backward(model, stream, 2 * L, gradients);
    // Down to the first layer in or below which something is trained.
    for (int l = L - 1; l >= 0 && (part == NULL || part->table.layer_begins[l + 1] > 0); l--) {
        layer_backward(model, stream, l, gradients, pace);
    }

    // x = embedding[token] + positions[position]
    int words = model_tensor(L, TENSOR_EMBEDDING), positions = model_tensor(L, TENSOR_POSITIONS);
    bool trains_words = weights_train(model, words), trains_positions = weights_train(model, positions);
    if (!trains_words && !trains_positions) { return model->losses; }
    size_t rows = model_rows(model);
    bool on_gpu = model->settings.on_gpu;
    if (on_gpu) {
        embedding_order(model->host_order, model->host_counts, tokens, (int)rows, model->config.vocabulary);
    }
    Embedding embedding = model_embedding(model, on_gpu ? model->tokens : tokens);
    embedding.d_wte = trains_words ? weights_gradient(model, gradients, words) : NULL;
    embedding.d_wpe = trains_positions ? weights_gradient(model, gradients, positions) : NULL;
    embedding.order = model_upload(model, stream, model->order, model->host_order, rows);
    embedding_backward(stream, &embedding);
    return model->losses;
}

// The same losses, (query->count), without gradients.
//
// The head, the most expensive part of a small model, is computed only for the positions
// that are asked for: their hidden states are gathered first, in model->branch.
static inline const float *model_losses(Model *model, Stream *stream, const void *parameters,
                                        const ModelQuery *query, const Pace *pace) {
    Precision precision = model->settings.precision;
    size_t C = (size_t)model->config.channels;
    model->B = query->B;
    model->T = query->T;
    assert(model_rows(model) <= (size_t)model->settings.B * model->settings.T);
    model_forward(model, stream, parameters, query->tokens, pace);
    Real *hidden = head_input(model);
    for (int first = 0, end; query->positions != NULL && first < query->count; first = end) {
        int begin = query->positions[first];
        for (end = first + 1; end < query->count && query->positions[end] == begin + end - first; end++) {}
        stream_copy(stream, real_at(model->branch, (size_t)first * C, precision),
                    real_at(hidden, (size_t)begin * C, precision),
                    (size_t)(end - first) * C * precision_bytes(precision));
    }
    head_loss(model, stream, query->positions != NULL ? model->branch : hidden, query->targets, query->count,
              query->largest, NULL);
    return model->losses;
}

// The logits (V) of the token after `token`, which is at `position`; all positions before it
// have been decoded.
//
// One position runs through the layers as a batch of one. Positions are part of the cached keys and
// values, so a text that has used all of them cannot slide on.
static inline const float *model_decode(Model *model, Stream *stream, const float *parameters, int position,
                                        int32_t token) {
    assert(token >= 0 && token < model->config.vocabulary && position < model->config.positions);
    model->position = position;
    model_forward(model, stream, parameters, &token, NULL);
    return head_logits(model, stream, head_input(model));
}

// ---- The life of a model --------------------------------------------------------------

// tokens (count) <- random tokens, for a pass whose result is not used.
static inline void model_random_tokens(const ModelConfig *config, size_t count, int32_t *tokens) {
    for (size_t i = 0; i < count; i++) {
        tokens[i] = (int32_t)(random_hash(i, 0) % (uint64_t)config->vocabulary);
    }
}

// Before the first pass, on the stream that will compute; gemm_close ends it. On a GPU one pass
// over random tokens loads all kernels and plans all matrix products, and `gradients` is
// overwritten.
static inline void model_start(Model *model, Stream *stream, const void *parameters, float *gradients) {
    gemm_open(stream, model->gemm_workspace);
    if (!model->settings.on_gpu) { return; }
    size_t rows = (size_t)model->settings.B * model->settings.T;
    int32_t *tokens = (int32_t *)memory_take(1, rows * sizeof(int32_t));
    const Pace pace = {.begins = true};
    model_random_tokens(&model->config, rows, tokens);
    model_gradients(model, stream, parameters, gradients, tokens, tokens, &pace);
    stream_settle(stream);
    free(tokens);
}
