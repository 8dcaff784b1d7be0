// gpt.h: GPT-Neo and GPT-2, forward and backward.
//
//   x = wte[token] + wpe[position]
//   in each layer:
//     q, k, v = W_qkv LayerNorm_1(x)              in GPT-2 + b_qkv, and q / sqrt(D)
//     x = x + W_out attention(q, k, v) + b_out    causal; in some layers within a window
//     x = x + W_proj gelu(W_fc LayerNorm_2(x) + b_fc) + b_proj
//   loss = mean of cross_entropy(wte LayerNorm_f(x)) over the targets >= 0
//
// The last section is what others see of it (ModelFamily in model.h).
//
// The model owns no parameters: it keeps the place of every tensor in a flat array (the
// table is in gpt_config.h; trained.h has what is frozen), because the buffer that the
// scheduler passes may change with every call. If it computes in bf16 and is given
// floats, it keeps a copy in that format: its weights. It reserves activations and
// workspace in an arena and never allocates. Tokens and targets come from the host, and
// losses go there.
//
// With ModelSettings::fp8 it also keeps the layers' matrices in FP8, as they are and
// turned, cast when the parameters have changed. What they multiply is cast before each
// product. Gradients of weights and the head stay in bf16.
//
// What the backward pass needs is either kept or computed again (Recompute). Logits are
// computed in chunks; each chunk becomes its own gradient in place, and that is used at
// once for the gradients of the last hidden state and of wte.
#pragma once

#include "gpt_config.h"
#include "kernels/kernels.h"
#include "trained.h"

enum {
    GPT_LOGITS_BYTES = 256 << 20, // of a chunk of logits on the CPU, at most
    GPT_GPU_CHUNK = 8192,         // rows of a chunk on a GPU, at most: bench_cuda variants times others
    GPT_GPU_CHUNK_ROWS = 256,     // a chunk on a GPU has a multiple of them
    GPT_LOGITS_UNIT = 64,         // a row of logits on a GPU has a multiple of them
    GPT_SPANS = 4 * MODEL_MAX_LAYERS + 2
};

// Of a chunk on a GPU, at most, for large vocabularies.
static const size_t GPT_GPU_LOGITS_BYTES = (size_t)2 << 30;

// Gradients that lie side by side.
typedef struct GptSpan {
    size_t begin, count;
} GptSpan;

// ---- State ----------------------------------------------------------------------------

enum { GPT_MAX_TENSORS = GPT_FIRST_LAYER + TENSORS_PER_LAYER * MODEL_MAX_LAYERS + 2 };

typedef struct Gpt {
    ModelConfig config;
    ModelSettings settings;
    int B, T;                            // of the latest pass
    int position;                        // of the first token; above 0 only in decode()
    size_t parameter_count;              // of what is trained
    TensorPlace places[GPT_MAX_TENSORS]; // of each tensor of the table
    float *discarded; // (TENSORS_PER_LAYER, widest): the gradients of frozen vectors, which nobody reads
    int widest;       // max(3C, F)
    Real *inner;      // (B, T, r): what is between the two products of an adapter

    // The parameters in the model's precision: the caller's own, or the copy, of which the
    // first `prepared` elements are up to date.
    const Real *weights;
    WeightCopy copy;
    size_t prepared;

    // With settings.fp8
    uint8_t *fp8_weights; // of all layers, each matrix followed by itself turned
    uint8_t *fp8_operand; // (B, T, max(3C, F)): what a matrix multiplies
    float *fp8_scales;    // (1 + L TENSORS_PER_LAYER): of fp8_operand, then of the matrices
    uint64_t fp8_version; // of the parameters whose casts these are, as WeightCopy's
    bool fp8_changed;     // this pass casts the weights

    // This pass begins a sum of gradients: the products of the backward pass set those of
    // matrices, and the rest, those of vectors and of wpe, are cleared first.
    bool begins;
    GptSpan rest[GPT_SPANS];
    int rest_count;

    // Activations. Those that are computed again have room for one layer, which all
    // layers share: there L is 1 and 2L + 1 is 2.
    Real *residuals;    // (L + 1, B, T, C), always: the input of each layer, and the output of the last
    Real *residual_mid; // (L, B, T, C): the residual between attention and MLP
    Real *normals;      // (2L + 1, B, T, C): the output of each LayerNorm
    float *statistics;  // (2L + 1, B, T, 2): its mean and 1/stddev
    Real *qkv;          // (L, B, T, 3C)
    Real *attention;    // (L, B, T, C): its output, which W_out multiplies
    float *logsumexp;   // (L, B, H, T): of the scores of each query
    Real *gelu_saved;   // (L, B, T, F): W_fc's product, then what gelu_backward needs
    Real *mlp_hidden;   // (L, B, T, F): the output of GELU, which W_proj multiplies

    // Workspace (B, T, C). Forward: W_out's or W_proj's product, before it is added to
    // the residual. Backward: the gradient of the output of a LayerNorm or of attention.
    Real *branch;
    Real *d_residual; // (B, T, C)
    Real *d_wide;     // (B, T, max(3C, F)), rows d_wide_stride apart: gradient of qkv or of mlp_hidden
    float *partials;  // (row_partials_floats(max(3C, F))): of sums over rows
    float *scores;    // (attention_scratch_floats)
    Real *logits;     // (chunk, logits_columns), rows logits_stride apart
    float *losses;    // (B, T); the host can read it
    int chunk;        // rows of logits at a time
    int d_wide_stride, logits_stride;
    int logits_columns; // that the head's products compute: V, or more of them (gpt_logits_columns)

    // On a GPU: the batch, and the order in which embedding_backward adds its rows
    int32_t *tokens, *targets, *order; // (B, T)
    int32_t *host_order, *host_counts; // (B, T), (V + 1)
    float *embedding_partials;         // (embedding_partials_floats)
    Real *host_logits;                 // (chunk, logits_stride), if settings.ranks_tokens

    // If settings.separator is set
    int32_t *host_starts; // (B, T): where the document of each position begins in its sequence
    int32_t *starts;      // the same on a GPU

    // For decode()
    float *keys, *values; // (L, positions, C): of all positions so far
    float *key_scores;    // (H, positions)
} Gpt;

// ---- Memory ---------------------------------------------------------------------------

static inline size_t gpt_rows(const Gpt *model) { return (size_t)model->B * (size_t)model->T; }

// How far apart rows of logits are.
static inline int gpt_logits_stride(int vocabulary, bool on_gpu) {
    return on_gpu ? (vocabulary + GPT_LOGITS_UNIT - 1) / GPT_LOGITS_UNIT * GPT_LOGITS_UNIT : vocabulary;
}

// Rows of logits at a time: equal chunks, as few as the bytes allow, and on a GPU `most` rows.
// With more rows a product has whole waves of tiles, and fewer chunks pass over the fp32 gradient
// of wte (at 125M 154 MB, read and written, for each); with all rows the logits would be the
// largest array of all. Chunks on a GPU are a multiple of GPT_GPU_CHUNK_ROWS, because the library
// computes tiles of up to 256 rows. Bits of that gradient depend on the chunks, and those on
// nothing but the shape.
static inline int gpt_chunk_rows(int rows, int most, int logits_stride, Precision precision, bool on_gpu) {
    size_t bytes = on_gpu ? GPT_GPU_LOGITS_BYTES : (size_t)GPT_LOGITS_BYTES,
           fit = bytes / ((size_t)logits_stride * precision_bytes(precision));
    int limit = (int)size_min(fit, (size_t)(on_gpu ? most : rows));
    int unit = on_gpu && limit >= GPT_GPU_CHUNK_ROWS ? GPT_GPU_CHUNK_ROWS : 1;
    limit = limit < 1 ? 1 : limit / unit * unit;
    int chunks = (rows + limit - 1) / limit, chunk = ((rows + chunks - 1) / chunks + unit - 1) / unit * unit;
    return chunk < rows ? chunk : rows;
}

// How many columns of logits the head's products compute. On a GPU they compute as many
// as a row has room for, because V is odd in most models, and the library's fast products
// want the dimensions of their operands in multiples of 16 bytes. The weights of the
// columns from V on are the rows behind wte (wpe, perhaps the first layer); if there are
// too few, V columns are computed. cross_entropy does not read these columns and makes
// their gradients 0, so exact zeros are added to the gradients of those rows and of the
// hidden state. (NaN where they are not finite, but then wte's gradient is NaN anyway.)
static inline int gpt_logits_columns(const Gpt *model) {
    const TensorPlace *place = &model->places[GPT_WTE];
    size_t needed = (size_t)model->logits_stride * (size_t)model->config.channels,
           there = place->kind == TRAINED_WHOLE ? model->parameter_count - place->trained
                                                : model->settings.part->frozen_count - place->frozen;
    return needed <= there ? model->logits_stride : model->config.vocabulary;
}

// Whether the caller's parameters can be used as they are.
static inline bool gpt_has_weights(const Gpt *model) {
    return model->settings.given_weights || model->settings.precision == PRECISION_FP32;
}

// Weights, activations and workspace: what takes no bytes is not needed.
static inline void gpt_reserve_arrays(Gpt *model, Arena *arena) {
    const ModelConfig *config = &model->config;
    const ModelSettings *settings = &model->settings;
    Recompute recompute = settings->recompute;
    bool on_gpu = settings->on_gpu, shared = recompute >= RECOMPUTE_BLOCK; // by all layers
    size_t rows = gpt_rows(model), L = (size_t)config->layers, C = (size_t)config->channels,
           F = (size_t)config->mlp_channels, H = (size_t)config->heads, wide = (size_t)model->widest;
    size_t element = precision_bytes(settings->precision), row = rows * element, floats = sizeof(float);
    size_t layers = shared ? 1 : L, norms = shared ? 2 : 2 * L + 1;
    size_t logits = (size_t)model->chunk * (size_t)model->logits_stride * element;
    size_t id = on_gpu ? sizeof(int32_t) : 0, // of a token on a GPU
        starts = settings->separator != NULL ? rows * sizeof(int32_t) : 0;
    size_t fp8 = settings->fp8 ? 1 : 0, adapted = settings->part != NULL ? (size_t)settings->part->rank : 0;
    size_t scores = attention_scratch_floats(on_gpu, model->B, model->T, config->channels, config->heads,
                                             settings->threads, settings->precision);
    size_t sums = on_gpu ? embedding_partials_floats((int)rows, config->channels) : 0;
    size_t positions = settings->decodes ? (size_t)config->positions : 0;
    const MemoryClass P = MEMORY_PARAMETERS, A = MEMORY_ACTIVATIONS, W = MEMORY_WORKSPACE;
    const ArenaRow arrays[] = {
        {W, "gradients that are not used", settings->part != NULL ? TENSORS_PER_LAYER * wide * floats : 0,
         &model->discarded},
        {W, "between the products of adapters", row * adapted, &model->inner},
        {P, "weights", gpt_has_weights(model) ? 0 : model->parameter_count * element, &model->copy.data},
        {P, "weights in FP8", fp8 * 2 * L * (4 * C * C + 2 * C * F), &model->fp8_weights},
        {P, "scales of FP8", fp8 * (1 + L * TENSORS_PER_LAYER) * floats, &model->fp8_scales},
        {W, "operand in FP8", fp8 * rows * wide, &model->fp8_operand},
        {A, "residuals", (L + 1) * row * C, &model->residuals},
        {A, "residuals within layers", layers * row * C, &model->residual_mid},
        {A, "layernorm outputs", (recompute >= RECOMPUTE_LAYERNORM ? 2 : norms) * row * C, &model->normals},
        {A, "layernorm statistics", norms * rows * 2 * floats, &model->statistics},
        {A, "queries keys values", layers * row * 3 * C, &model->qkv},
        {A, "attention outputs", layers * row * C, &model->attention},
        {A, "attention logsumexp", layers * rows * H * floats, &model->logsumexp},
        {A, "gelu outputs", (recompute >= RECOMPUTE_GELU ? 1 : L) * row * F, &model->mlp_hidden},
        {A, "gelu inputs or derivatives", layers * row * F, &model->gelu_saved},
        {W, "branch", row * C, &model->branch},
        {W, "residual gradient", row * C, &model->d_residual},
        {W, "wide gradient", row * (size_t)model->d_wide_stride, &model->d_wide},
        {W, "partial sums", row_partials_floats(on_gpu, wide) * floats, &model->partials},
        {W, "attention scores", scores * floats, &model->scores},
        {W, "logits chunk", logits, &model->logits},
        {W, "starts of documents on the device", on_gpu ? starts : 0, &model->starts},
        {W, "tokens on the device", rows * id, &model->tokens},
        {W, "targets on the device", rows * id, &model->targets},
        {W, "order of tokens on the device", rows * id, &model->order},
        {W, "partial sums of the embedding", sums * floats, &model->embedding_partials},
        {A, "cached keys", L * positions * C * floats, &model->keys},
        {A, "cached values", L * positions * C * floats, &model->values},
        {W, "decoding scores", H * positions * floats, &model->key_scores},
    };
    const ArenaRow on_host[] = {
        {W, "losses", rows * floats, &model->losses},
        {W, "starts of documents", starts, &model->host_starts},
        {W, "order of tokens", rows * id, &model->host_order},
        {W, "counts of tokens", ((size_t)config->vocabulary + 1) * id, &model->host_counts},
        {W, "logits on the host", on_gpu && settings->ranks_tokens ? logits : 0, &model->host_logits},
    };
    arena_reserve_rows(arena, arrays, sizeof arrays / sizeof arrays[0], false);
    arena_reserve_rows(arena, on_host, sizeof on_host / sizeof on_host[0], true);
}

static inline void gpt_find_rest(Gpt *model, const ParameterTable *trained) {
    size_t end = SIZE_MAX; // of the latest span
    for (int i = 0; i < trained->count; i++) {
        const ParameterInfo *entry = &trained->entries[i];
        if (entry->is_projection || (entry->is_matrix && entry->role == GPT_WTE)) { continue; }
        if (entry->offset != end) {
            assert(model->rest_count < GPT_SPANS);
            model->rest[model->rest_count++].begin = entry->offset;
        }
        model->rest[model->rest_count - 1].count += entry->count;
        end = entry->offset + entry->count;
    }
}

static inline void gpt_reserve(void *self, Arena *arena, const ModelConfig *config,
                               const ModelSettings *settings) {
    Gpt *model = (Gpt *)self;
    const TrainedPart *part = settings->part;
    memset(model, 0, sizeof *model);
    model->config = *config;
    model->settings = *settings;
    model->B = settings->B;
    model->T = settings->T;
    assert(!settings->decodes ||
           (!settings->on_gpu && settings->precision == PRECISION_FP32 && gpt_rows(model) == 1));
    ParameterTable table;
    gpt_parameter_table(config, &table);
    model->parameter_count = part != NULL ? part->table.parameter_count : table.parameter_count;
    for (int i = 0; i < table.count; i++) {
        TensorPlace all = {.trained = table.entries[i].offset};
        model->places[table.entries[i].role] = part != NULL ? part->places[i] : all;
    }
    gpt_find_rest(model, part != NULL ? &part->table : &table);
    parameter_table_free(&table);
    model->widest = (int)size_max(3 * (size_t)config->channels, (size_t)config->mlp_channels);
    model->d_wide_stride = settings->on_gpu ? model->widest : matmul_padded_stride(model->widest);
    model->logits_stride = gpt_logits_stride(config->vocabulary, settings->on_gpu);
    model->logits_columns = gpt_logits_columns(model);
    model->chunk = gpt_chunk_rows((int)gpt_rows(model), GPT_GPU_CHUNK, model->logits_stride,
                                  settings->precision, settings->on_gpu);
    gpt_reserve_arrays(model, arena);
}

// ---- Where tensors are ----------------------------------------------------------------

// The offset of a layer's tensor in the flat array of what is trained, or where it would
// be there. Layer L's TENSOR_LN_1_WEIGHT is that of the last LayerNorm.
static inline size_t gpt_at(const Gpt *model, int layer, GptTensor tensor) {
    return model->places[gpt_tensor(layer, tensor)].trained;
}

// tensor: a role (gpt_tensor).
static inline bool gpt_trains(const Gpt *model, int tensor) {
    return model->places[tensor].kind == TRAINED_WHOLE;
}

static inline const Real *gpt_weight(const Gpt *model, int tensor) {
    const TensorPlace *place = &model->places[tensor];
    bool trained = gpt_trains(model, tensor);
    return real_at_const(trained ? model->weights : model->settings.part->frozen,
                         trained ? place->trained : place->frozen, model->settings.precision);
}

// Where the gradient of a vector is added, or of a matrix that is trained.
static inline float *gpt_gradient(const Gpt *model, float *gradients, int tensor) {
    assert(gpt_trains(model, tensor) || tensor >= GPT_FIRST_LAYER); // an embedding is too large to discard
    return gpt_trains(model, tensor) ? gradients + model->places[tensor].trained
                                     : model->discarded + tensor % TENSORS_PER_LAYER * model->widest;
}

// Part `index` of an activation array of (..., B, T, width).
static inline Real *gpt_slice(const Gpt *model, Real *base, int index, int width) {
    return real_at(base, (size_t)index * gpt_rows(model) * (size_t)width, model->settings.precision);
}

// The activations of one layer, but for those of its LayerNorms.
typedef struct GptLayer {
    Real *qkv;        // (B, T, 3C)
    Real *attention;  // (B, T, C)
    float *logsumexp; // (B, H, T)
    Real *gelu_saved; // (B, T, F)
    Real *mlp_hidden; // (B, T, F)
} GptLayer;

static inline GptLayer gpt_layer(const Gpt *model, int l) {
    const ModelConfig *config = &model->config;
    Recompute recompute = model->settings.recompute;
    int C = config->channels, F = config->mlp_channels, slot = recompute >= RECOMPUTE_BLOCK ? 0 : l;
    GptLayer layer;
    layer.qkv = gpt_slice(model, model->qkv, slot, 3 * C);
    layer.attention = gpt_slice(model, model->attention, slot, C);
    layer.logsumexp = model->logsumexp + (size_t)slot * gpt_rows(model) * (size_t)config->heads;
    layer.gelu_saved = gpt_slice(model, model->gelu_saved, slot, F);
    layer.mlp_hidden = gpt_slice(model, model->mlp_hidden, recompute >= RECOMPUTE_GELU ? 0 : l, F);
    return layer;
}

// How many keys a query of layer l sees at most; 0: no limit.
static inline int gpt_window(const ModelConfig *config, int l) {
    return config->local[l] ? config->window : 0;
}

// What both passes of LayerNorm `norm` read and write. LayerNorms have numbers:
// 2l and 2l + 1 in layer l, 2L after the last layer.
typedef struct GptNorm {
    Layernorm work;
    int weight, bias; // tensors
    int branch_bias;  // where norm > 0: the bias that is added to the residual right before
} GptNorm;

static inline GptNorm gpt_norm(const Gpt *model, int norm) {
    Recompute recompute = model->settings.recompute;
    int C = model->config.channels, l = norm / 2, slot = recompute >= RECOMPUTE_BLOCK ? norm % 2 : norm;
    bool first = norm % 2 == 0; // of its layer
    GptNorm parts;
    memset(&parts, 0, sizeof parts);
    parts.weight = gpt_tensor(l, first ? TENSOR_LN_1_WEIGHT : TENSOR_LN_2_WEIGHT);
    parts.bias = gpt_tensor(l, first ? TENSOR_LN_1_BIAS : TENSOR_LN_2_BIAS);
    parts.branch_bias = gpt_tensor((norm - 1) / 2, first ? TENSOR_PROJ_BIAS : TENSOR_OUT_BIAS);
    Layernorm *work = &parts.work;
    work->residual =
        first ? gpt_slice(model, model->residuals, l, C) : gpt_slice(model, model->residual_mid, slot / 2, C);
    work->output = gpt_slice(model, model->normals, recompute >= RECOMPUTE_LAYERNORM ? norm % 2 : norm, C);
    work->statistics = model->statistics + (size_t)slot * gpt_rows(model) * 2;
    work->weight = gpt_weight(model, parts.weight);
    work->bias = gpt_weight(model, parts.bias);
    work->epsilon = (float)model->config.epsilon;
    work->rows = (int)gpt_rows(model);
    work->channels = C;
    return parts;
}

// The last hidden state, LayerNorm_f(x) (B, T, C), of the latest forward pass. Times
// wte^T it gives the logits.
static inline Real *gpt_hidden(const Gpt *model) {
    return gpt_norm(model, 2 * model->config.layers).work.output;
}

// The device's copy of (count) tokens or targets; on the CPU the host's own.
static inline const int32_t *gpt_upload(const Gpt *model, Stream *stream, int32_t *device,
                                        const int32_t *host, size_t count) {
    if (!model->settings.on_gpu) { return host; }
    stream_copy(stream, device, host, count * sizeof(int32_t));
    return device;
}

// ---- Weights --------------------------------------------------------------------------

// Waits until parameters [0, end) have arrived; then the weights [0, end) are up to date.
static inline void gpt_need(Gpt *model, Stream *stream, const void *parameters, const Pace *pace,
                            size_t end) {
    pace_need(pace, end);
    if (model->prepared >= end) { return; }
    reals_from_floats(stream, real_at(model->copy.data, model->prepared, model->settings.precision),
                      (const float *)parameters + model->prepared, end - model->prepared);
    model->prepared = end;
}

// ---- Forward --------------------------------------------------------------------------

// LayerNorm `norm`. add_branch: the residual before it is first computed, from the one
// before that, model->branch and the branch's bias.
static inline void gpt_layernorm(Gpt *model, Stream *stream, int norm, bool add_branch) {
    GptNorm parts = gpt_norm(model, norm);
    if (add_branch) {
        parts.work.residual_before = gpt_norm(model, norm - 1).work.residual;
        parts.work.branch = model->branch;
        parts.work.branch_bias = gpt_weight(model, parts.branch_bias);
    }
    layernorm_forward(stream, &parts.work);
}

// The adapter beside the weight `tensor` (outputs, inputs), with gradients (NULL: none).
static inline LowRank gpt_adapter(const Gpt *model, float *gradients, int tensor, int inputs, int outputs) {
    const TrainedPart *part = model->settings.part;
    size_t a = model->places[tensor].trained, b = a + (size_t)part->rank * (size_t)inputs;
    LowRank work = {.a = real_at_const(model->weights, a, model->settings.precision),
                    .b = real_at_const(model->weights, b, model->settings.precision),
                    .d_a = gradients != NULL ? gradients + a : NULL,
                    .d_b = gradients != NULL ? gradients + b : NULL,
                    .begins = model->begins,
                    .inner = model->inner,
                    .rank = part->rank,
                    .rows = (int)gpt_rows(model),
                    .inputs = inputs,
                    .outputs = outputs,
                    .scale = part->scale};
    return work;
}

// output (B, T, outputs) = input (B, T, inputs) weight^T for one of a layer's weights.
typedef struct GptProduct {
    const Real *input;
    Real *output;
    int inputs, outputs;
    int tensors;   // of the table: queries, keys and values of GPT-Neo are three; all are trained, or none
    size_t before; // elements of the layers' weights that precede this one
} GptProduct;

// weight: its first tensor in the table.
static inline GptProduct gpt_product(const Gpt *model, int l, GptTensor weight) {
    int C = model->config.channels, F = model->config.mlp_channels, parts = model->config.qkv_biases ? 1 : 3;
    size_t square = (size_t)C * (size_t)C, wide = (size_t)C * (size_t)F,
           begin = (size_t)l * (4 * square + 2 * wide);
    GptLayer layer = gpt_layer(model, l);
    const Real *norm_1 = gpt_norm(model, 2 * l).work.output, *norm_2 = gpt_norm(model, 2 * l + 1).work.output;
    const GptProduct qkv = {norm_1, layer.qkv, C, 3 * C, parts, begin},
                     out = {layer.attention, model->branch, C, C, 1, begin + 3 * square},
                     fc = {norm_2, layer.gelu_saved, C, F, 1, begin + 4 * square},
                     proj = {layer.mlp_hidden, model->branch, F, C, 1, begin + 4 * square + wide};
    return weight == TENSOR_Q            ? qkv
           : weight == TENSOR_OUT_WEIGHT ? out
           : weight == TENSOR_FC_WEIGHT  ? fc
                                         : proj;
}

// In FP8: result (B, T, outputs) = factor (B, T, inputs) W^T or, backward, result (B, T,
// inputs) = factor (B, T, outputs) W. Rows are their strides apart.
static inline void gpt_fp8_product(Gpt *model, Stream *stream, bool backward, Real *result, int result_stride,
                                   const Real *factor, int factor_stride, int l, GptTensor weight) {
    GptProduct product = gpt_product(model, l, weight);
    int rows = (int)gpt_rows(model), sums = backward ? product.outputs : product.inputs,
        results = backward ? product.inputs : product.outputs;
    Fp8 operand = {model->fp8_operand, model->fp8_scales, backward ? PRECISION_E5M2 : PRECISION_E4M3};
    Fp8 matrix = {model->fp8_weights + 2 * product.before,
                  model->fp8_scales + 1 + l * TENSORS_PER_LAYER + (int)weight, PRECISION_E4M3};
    if (model->fp8_changed) {
        fp8_cast(stream, &matrix, true, model->partials, gpt_weight(model, gpt_tensor(l, weight)),
                 product.outputs, product.inputs, product.inputs);
    }
    if (backward) { matrix.codes += (size_t)product.inputs * (size_t)product.outputs; }
    fp8_cast(stream, &operand, false, model->partials, factor, rows, sums, factor_stride);
    matmul_fp8(stream, result, result_stride, &operand, &matrix, rows, sums, results);
}

static inline void gpt_linear(Gpt *model, Stream *stream, int l, GptTensor weight) {
    GptProduct product = gpt_product(model, l, weight);
    int first = gpt_tensor(l, weight), each = product.outputs / product.tensors;
    if (model->settings.fp8) {
        gpt_fp8_product(model, stream, false, product.output, product.outputs, product.input, product.inputs,
                        l, weight);
    } else {
        matmul_forward(stream, product.output, product.outputs, product.input, gpt_weight(model, first),
                       (int)gpt_rows(model), product.inputs, product.outputs);
    }
    for (int i = 0; i < product.tensors; i++) {
        if (model->places[first + i].kind != TRAINED_ADAPTED) { continue; }
        LowRank adapter = gpt_adapter(model, NULL, first + i, product.inputs, each);
        low_rank_forward(stream, &adapter,
                         real_at(product.output, (size_t)(i * each), model->settings.precision),
                         product.outputs, product.input);
    }
}

// What both passes of attention in layer l read and write.
static inline Attention gpt_attention(const Gpt *model, int l) {
    GptLayer layer = gpt_layer(model, l);
    int window = gpt_window(&model->config, l);
    Attention work = {.output = layer.attention,
                      .logsumexp = layer.logsumexp,
                      .scratch = model->scores,
                      .qkv = layer.qkv,
                      .B = model->B,
                      .T = model->T,
                      .channels = model->config.channels,
                      .heads = model->config.heads,
                      .window = window < model->T ? window : 0,
                      .starts = model->settings.on_gpu ? model->starts : model->host_starts};
    return work;
}

// Attention of the one position that decode() is at: only its key and value are new,
// those of all before it are in the cache.
static inline void gpt_attention_decode(Gpt *model, Stream *stream, int l) {
    const ModelConfig *config = &model->config;
    GptLayer layer = gpt_layer(model, l);
    const float *qkv = real_floats(layer.qkv);
    size_t C = (size_t)config->channels, cache = (size_t)l * (size_t)config->positions * C,
           place = cache + (size_t)model->position * C;
    memcpy(model->keys + place, qkv + C, C * sizeof(float));
    memcpy(model->values + place, qkv + 2 * C, C * sizeof(float));
    cpu_attention_decode(stream, real_floats(layer.attention), model->key_scores, qkv, model->keys + cache,
                         model->values + cache, model->position, config->positions, config->channels,
                         config->heads, gpt_window(config, l));
}

// Adds the biases of queries, keys and values in layer l and divides queries by sqrt(D), so that
// attention need not scale its scores. With gradients (NULL: none) back through it.
static inline void gpt_qkv_bias(Gpt *model, Stream *stream, int l, float *gradients) {
    const ModelConfig *config = &model->config;
    if (!config->qkv_biases) { return; }
    int C = config->channels, D = C / config->heads;
    int bias = gpt_tensor(l, TENSOR_QKV_BIAS);
    bool backward = gradients != NULL;
    Bias work = {.values = backward ? model->d_wide : gpt_layer(model, l).qkv,
                 .bias = gpt_weight(model, bias),
                 .d_bias = backward ? gpt_gradient(model, gradients, bias) : NULL,
                 .partials = model->partials,
                 .rows = (int)gpt_rows(model),
                 .columns = 3 * C,
                 .stride = backward ? model->d_wide_stride : 3 * C,
                 .scaled = C,
                 .scale = config->scaled_scores ? 1.0f / sqrtf((float)D) : 1.0f};
    bias_add(stream, &work);
}

// mlp_hidden = gelu(gelu_saved + b_fc). With gradients (NULL: none) back through it.
static inline void gpt_gelu(Gpt *model, Stream *stream, int l, float *gradients) {
    GptLayer layer = gpt_layer(model, l);
    int bias = gpt_tensor(l, TENSOR_FC_BIAS);
    bool backward = gradients != NULL;
    Gelu work = {.output = layer.mlp_hidden,
                 .saved = layer.gelu_saved,
                 .gradient = model->d_wide,
                 .bias = gpt_weight(model, bias),
                 .d_bias = backward ? gpt_gradient(model, gradients, bias) : NULL,
                 .partials = model->partials,
                 .rows = (int)gpt_rows(model),
                 .columns = model->config.mlp_channels,
                 .gradient_stride = model->d_wide_stride};
    (backward ? gelu_backward : gelu_forward)(stream, &work);
}

// Layer l up to mlp_hidden, which its last product reads. add_branch: as in
// gpt_layernorm.
static inline void gpt_layer_forward(Gpt *model, Stream *stream, int l, bool add_branch) {
    // q, k, v = W_qkv LayerNorm_1(x); attention = softmax(q k^T) v
    gpt_layernorm(model, stream, 2 * l, add_branch);
    gpt_linear(model, stream, l, TENSOR_Q);
    gpt_qkv_bias(model, stream, l, NULL);
    if (model->settings.decodes) {
        gpt_attention_decode(model, stream, l);
    } else {
        Attention work = gpt_attention(model, l);
        attention(stream, &work);
    }

    // x = x + W_out attention + b_out, then mlp_hidden = gelu(W_fc LayerNorm_2(x) + b_fc)
    gpt_linear(model, stream, l, TENSOR_OUT_WEIGHT);
    gpt_layernorm(model, stream, 2 * l + 1, true);
    gpt_linear(model, stream, l, TENSOR_FC_WEIGHT);
    gpt_gelu(model, stream, l, NULL);
}

// Where the document of each of the tokens (B, T) begins.
static inline void gpt_find_documents(Gpt *model, Stream *stream, const int32_t *tokens) {
    if (model->settings.separator == NULL) { return; }
    int32_t separator = (int32_t)*model->settings.separator - 1, *starts = model->host_starts;
    size_t rows = gpt_rows(model), T = (size_t)model->T;
    for (size_t i = 0; i < rows; i++) {
        starts[i] = i % T == 0 || tokens[i] == separator ? (int32_t)(i % T) : starts[i - 1];
    }
    gpt_upload(model, stream, model->starts, starts, rows);
}

// Runs all layers on tokens (B, T), with parameters (parameter_count) that are floats
// unless the model is given its weights; the result is gpt_hidden(model). Before each
// layer it waits with `pace` for the parameters of that layer.
static inline void gpt_forward(Gpt *model, Stream *stream, const void *parameters, const int32_t *tokens,
                               const Pace *pace) {
    int L = model->config.layers, C = model->config.channels;
    // Copies of weights of the same version stay valid.
    uint64_t version = pace != NULL ? pace->version : 0;
    bool copied = !gpt_has_weights(model), valid = version != 0 && version == model->copy.version;
    model->weights = copied ? model->copy.data : (const Real *)parameters;
    model->prepared = copied && !valid ? 0 : model->parameter_count;
    model->copy.version = version;
    model->fp8_changed = version == 0 || version != model->fp8_version;
    model->fp8_version = version;
    const int32_t *batch = gpt_upload(model, stream, model->tokens, tokens, gpt_rows(model));
    gpt_find_documents(model, stream, tokens);
    gpt_need(model, stream, parameters, pace, gpt_at(model, 0, TENSOR_LN_1_WEIGHT));
    Embedding embedding = {.output = model->residuals,
                           .wte = gpt_weight(model, GPT_WTE),
                           .wpe =
                               real_at_const(gpt_weight(model, GPT_WPE), (size_t)model->position * (size_t)C,
                                             model->settings.precision),
                           .tokens = batch,
                           .B = model->B,
                           .T = model->T,
                           .channels = C};
    embedding_forward(stream, &embedding);
    for (int l = 0; l < L; l++) {
        gpt_need(model, stream, parameters, pace, gpt_at(model, l + 1, TENSOR_LN_1_WEIGHT));
        gpt_layer_forward(model, stream, l, l > 0);
        // The next LayerNorm adds this product and b_proj to the residual.
        gpt_linear(model, stream, l, TENSOR_PROJ_WEIGHT);
    }
    model->fp8_changed = false;
    gpt_need(model, stream, parameters, pace, model->parameter_count);
    gpt_layernorm(model, stream, 2 * L, true);
}

// ---- LM head and loss -----------------------------------------------------------------

// largest (count): the most probable token by each row of model->logits; -1 where a row
// has none, because its logits are not numbers.
static inline void gpt_largest(Gpt *model, Stream *stream, int count, int32_t *largest) {
    Precision precision = model->settings.precision;
    const Real *logits = model->logits;
    size_t stride = (size_t)model->logits_stride;
    if (stream->queue != NULL) {
        stream_copy(stream, model->host_logits, logits, (size_t)count * stride * precision_bytes(precision));
        stream_settle(stream);
        logits = model->host_logits;
    }
    for (int i = 0; i < count; i++) {
        const Real *row = real_at_const(logits, (size_t)i * stride, precision);
        largest[i] = logits_largest(row, model->config.vocabulary, precision);
    }
}

// losses (rows) = cross_entropy(wte hidden, targets) of hidden states and targets (rows),
// chunk by chunk. With gradients (NULL: none) also gradients of wte += (model->begins: =) and
// model->branch = the gradient of the hidden state, both of the sum of the losses of targets >= 0,
// divided by all rows: so that every predicted token of a commit weighs the same (Tally). If none
// is predicted, they are 0. largest (rows): see ModelQuery; NULL: not asked for.
static inline void gpt_head(Gpt *model, Stream *stream, float *gradients, const Real *hidden,
                            const int32_t *targets, int rows, int32_t *largest) {
    Precision precision = model->settings.precision;
    int C = model->config.channels, V = model->config.vocabulary, stride = model->logits_stride,
        columns = model->logits_columns;
    bool trains = gradients != NULL && gpt_trains(model, GPT_WTE);
    if (gradients != NULL && targets_predicted(targets, (size_t)rows) == 0) {
        if (trains && model->begins) {
            stream_clear(stream, gpt_gradient(model, gradients, GPT_WTE),
                         (size_t)V * (size_t)C * sizeof(float));
        }
        stream_clear(stream, model->branch, (size_t)rows * (size_t)C * precision_bytes(precision));
        return;
    }
    const int32_t *batch = gpt_upload(model, stream, model->targets, targets, (size_t)rows);
    const Real *wte = gpt_weight(model, GPT_WTE);
    float scale = gradients != NULL ? 1.0f / (float)rows : 0.0f;
    for (int first = 0; first < rows; first += model->chunk) {
        int count = rows - first < model->chunk ? rows - first : model->chunk;
        size_t offset = (size_t)first * (size_t)C;
        const Real *input = real_at_const(hidden, offset, precision);
        matmul_forward(stream, model->logits, stride, input, wte, count, C, columns);
        if (largest != NULL) { gpt_largest(model, stream, count, largest + first); }
        cross_entropy(stream, model->logits, stride, model->losses + first, batch + first, count, V, scale);
        if (gradients == NULL) { continue; }
        matmul_backward_input(stream, real_at(model->branch, offset, precision), C, model->logits, stride,
                              wte, count, C, columns);
        if (trains) {
            matmul_backward_weight(stream, gpt_gradient(model, gradients, GPT_WTE), model->logits, stride,
                                   input, count, C, columns, model->begins && first == 0);
        }
    }
}

// ---------------------------------------------------------------------------------------
// Backward. `gradients` has the layout of the parameters and is added to; with model->begins the
// products set it.

// Back through LayerNorm `norm`: model->branch is the gradient of its output. That of its
// input is added to model->d_residual (the last LayerNorm overwrites it); the sum of it
// over rows is the gradient of the bias that was added to the residual right before.
static inline void gpt_layernorm_backward(Gpt *model, Stream *stream, float *gradients, int norm) {
    GptNorm parts = gpt_norm(model, norm);
    Layernorm *work = &parts.work;
    work->d_residual = model->d_residual;
    work->accumulate = norm < 2 * model->config.layers;
    work->d_weight = gpt_gradient(model, gradients, parts.weight);
    work->d_bias = gpt_gradient(model, gradients, parts.bias);
    work->d_branch_bias = norm > 0 ? gpt_gradient(model, gradients, parts.branch_bias) : NULL;
    work->partials = model->partials;
    work->d_output = model->branch;
    layernorm_backward(stream, work);
}

// Back through the layer's product with this weight. The gradient of a branch's end is
// model->d_residual, that of what is wider model->d_wide. That of the input becomes
// model->d_wide where this is W_proj, else model->branch.
static inline void gpt_linear_backward(Gpt *model, Stream *stream, float *gradients, int l,
                                       GptTensor weight) {
    GptProduct product = gpt_product(model, l, weight);
    bool last = weight == TENSOR_PROJ_WEIGHT, ends = last || weight == TENSOR_OUT_WEIGHT;
    int C = model->config.channels, wide = model->d_wide_stride, d_output_stride = ends ? C : wide,
        d_input_stride = last ? wide : C;
    const Real *d_output = ends ? model->d_residual : model->d_wide;
    Real *d_input = last ? model->d_wide : model->branch;
    int rows = (int)gpt_rows(model), first = gpt_tensor(l, weight), each = product.outputs / product.tensors;
    if (gpt_trains(model, first)) {
        matmul_backward_weight(stream, gpt_gradient(model, gradients, first), d_output, d_output_stride,
                               product.input, rows, product.inputs, product.outputs, model->begins);
    }
    if (model->settings.fp8) {
        gpt_fp8_product(model, stream, true, d_input, d_input_stride, d_output, d_output_stride, l, weight);
    } else {
        matmul_backward_input(stream, d_input, d_input_stride, d_output, d_output_stride,
                              gpt_weight(model, first), rows, product.inputs, product.outputs);
    }
    for (int i = 0; i < product.tensors; i++) {
        if (model->places[first + i].kind != TRAINED_ADAPTED) { continue; }
        LowRank adapter = gpt_adapter(model, gradients, first + i, product.inputs, each);
        low_rank_backward(stream, &adapter, d_input, d_input_stride,
                          real_at_const(d_output, (size_t)(i * each), model->settings.precision),
                          d_output_stride, product.input);
    }
}

// Back through layer l: model->d_residual is the gradient of its output and becomes that
// of its input. What the forward pass has not kept is computed again. Tells `pace` twice
// that gradients are finished, from the end of the layer towards its beginning.
static inline void gpt_layer_backward(Gpt *model, Stream *stream, float *gradients, int l, const Pace *pace) {
    Recompute recompute = model->settings.recompute;
    bool again = recompute == RECOMPUTE_LAYERNORM; // each LayerNorm is computed again before its use
    if (recompute >= RECOMPUTE_BLOCK) {
        gpt_layer_forward(model, stream, l, false);
    } else if (recompute >= RECOMPUTE_GELU) {
        gpt_gelu(model, stream, l, NULL);
    }

    // x = x + W_proj gelu(W_fc LayerNorm_2(x) + b_fc) + b_proj
    gpt_linear_backward(model, stream, gradients, l, TENSOR_PROJ_WEIGHT);
    gpt_gelu(model, stream, l, gradients);
    if (again) { gpt_layernorm(model, stream, 2 * l + 1, false); }
    gpt_linear_backward(model, stream, gradients, l, TENSOR_FC_WEIGHT);
    gpt_layernorm_backward(model, stream, gradients, 2 * l + 1);
    pace_finish(pace, gpt_at(model, l, TENSOR_LN_2_WEIGHT));

    // x = x + W_out attention(q, k, v) + b_out
    gpt_linear_backward(model, stream, gradients, l, TENSOR_OUT_WEIGHT);
    Attention heads = gpt_attention(model, l);
    heads.d_qkv = model->d_wide;
    heads.d_qkv_stride = model->d_wide_stride;
    heads.d_output = model->branch;
    attention(stream, &heads);
    gpt_qkv_bias(model, stream, l, gradients);

    // q, k, v = W_qkv LayerNorm_1(x)
    if (again) { gpt_layernorm(model, stream, 2 * l, false); }
    gpt_linear_backward(model, stream, gradients, l, TENSOR_Q);
    gpt_layernorm_backward(model, stream, gradients, 2 * l);
    pace_finish(pace, gpt_at(model, l, TENSOR_LN_1_WEIGHT));
}

// ---- What the model is to others (model.h) --------------------------------------------

// Gradients of wte, which the head begins, are finished last.
static inline const float *gpt_gradients(void *self, Stream *stream, const void *parameters, float *gradients,
                                         const int32_t *tokens, const int32_t *targets, const Pace *pace) {
    Gpt *model = (Gpt *)self;
    const TrainedPart *part = model->settings.part;
    int L = model->config.layers;
    model->B = model->settings.B;
    model->T = model->settings.T;
    model->begins = pace != NULL && pace->begins;
    gpt_forward(model, stream, parameters, tokens, pace);
    for (int i = 0; i < model->rest_count && model->begins; i++) {
        stream_clear(stream, gradients + model->rest[i].begin, model->rest[i].count * sizeof(float));
    }
    gpt_head(model, stream, gradients, gpt_hidden(model), targets, (int)gpt_rows(model), NULL);
    gpt_layernorm_backward(model, stream, gradients, 2 * L);
    // Down to the first layer in or below which something is trained.
    for (int l = L - 1; l >= 0 && (part == NULL || part->table.layer_begins[l + 1] > 0); l--) {
        gpt_layer_backward(model, stream, gradients, l, pace);
    }

    // x = wte[token] + wpe[position]
    bool words = gpt_trains(model, GPT_WTE), positions = gpt_trains(model, GPT_WPE);
    if (!words && !positions) { return model->losses; }
    size_t rows = gpt_rows(model);
    bool on_gpu = model->settings.on_gpu;
    if (on_gpu) {
        embedding_order(model->host_order, model->host_counts, tokens, (int)rows, model->config.vocabulary);
    }
    Embedding embedding = {.d_wte = words ? gpt_gradient(model, gradients, GPT_WTE) : NULL,
                           .d_wpe = positions ? gpt_gradient(model, gradients, GPT_WPE) : NULL,
                           .partials = model->embedding_partials,
                           .d_output = model->d_residual,
                           .tokens = on_gpu ? model->tokens : tokens,
                           .order = gpt_upload(model, stream, model->order, model->host_order, rows),
                           .B = model->B,
                           .T = model->T,
                           .channels = model->config.channels};
    embedding_backward(stream, &embedding);
    return model->losses;
}

// The head, the most expensive part of a small model, is computed only for the positions
// that are asked for: their hidden states are gathered first, in model->branch.
static inline const float *gpt_losses(void *self, Stream *stream, const void *parameters,
                                      const ModelQuery *query, const Pace *pace) {
    Gpt *model = (Gpt *)self;
    Precision precision = model->settings.precision;
    size_t C = (size_t)model->config.channels;
    model->B = query->B;
    model->T = query->T;
    assert(gpt_rows(model) <= (size_t)model->settings.B * (size_t)model->settings.T);
    gpt_forward(model, stream, parameters, query->tokens, pace);
    Real *hidden = gpt_hidden(model);
    for (int first = 0, end; query->positions != NULL && first < query->count; first = end) {
        int begin = query->positions[first];
        for (end = first + 1; end < query->count && query->positions[end] == begin + end - first; end++) {}
        stream_copy(stream, real_at(model->branch, (size_t)first * C, precision),
                    real_at(hidden, (size_t)begin * C, precision),
                    (size_t)(end - first) * C * precision_bytes(precision));
    }
    gpt_head(model, stream, NULL, query->positions != NULL ? model->branch : hidden, query->targets,
             query->count, query->largest);
    return model->losses;
}

// One position runs through the layers as a batch of one. Positions are learned and are
// part of the cached keys and values, so a text that has used all of them cannot slide
// on.
static inline const float *gpt_decode(void *self, Stream *stream, const float *parameters, int position,
                                      int32_t token) {
    Gpt *model = (Gpt *)self;
    int C = model->config.channels, V = model->config.vocabulary;
    assert(token >= 0 && token < V && position < model->config.positions);
    model->position = position;
    gpt_forward(model, stream, parameters, &token, NULL);
    const Real *wte = gpt_weight(model, GPT_WTE);
    matmul_forward(stream, model->logits, V, gpt_hidden(model), wte, 1, C, V);
    return real_floats(model->logits);
}

static inline WeightCopy *gpt_copy(void *self) { return &((Gpt *)self)->copy; }

#define GPT_PASSES \
    .prefix = "transformer.", .is_constant = gpt_is_constant, .table = gpt_parameter_table, \
    .reserve = gpt_reserve, .copy = gpt_copy, .gradients = gpt_gradients, .losses = gpt_losses, \
    .decode = gpt_decode

static const ModelFamily gpt_neo_family = {
    .name = "gpt_neo",
    .architecture = "GPTNeoForCausalLM",
    .read_config = gpt_neo_config_read,
    .write_config = gpt_neo_config_write,
    GPT_PASSES,
};

static const ModelFamily gpt2_family = {
    .name = "gpt2",
    .architecture = "GPT2LMHeadModel",
    .read_config = gpt2_config_read,
    .write_config = gpt2_config_write,
    GPT_PASSES,
};
