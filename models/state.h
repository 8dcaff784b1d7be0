// state.h: what a model keeps while it computes. decoder.h plans the memory.
//
// A model owns no parameters: it keeps the place of every tensor in a flat array (trained.h has
// what is frozen), because the buffer that the scheduler passes may change with every call. If
// it computes in bf16 and is given floats, it keeps a copy in that format: its weights.
#pragma once

#include "kernels/kernels.h"
#include "models/trained.h"

enum {
    MODEL_TENSORS = MODEL_MAX_LAYERS * LAYER_TENSORS + TENSOR_ROLES,
    MODEL_SPANS = 4 * MODEL_MAX_LAYERS + 2
};

// Gradients that lie side by side.
typedef struct GradientSpan {
    size_t begin, count;
} GradientSpan;

// A matrix of each layer (outputs, inputs), as a product uses it.
typedef struct LayerMatrix {
    int inputs, outputs;
    int tensors;   // of the table, one behind the other; all of them are trained, or none
    int parts[3];  // the outputs of each
    size_t before; // elements of the layer's matrices that precede it
} LayerMatrix;

typedef struct Model {
    ModelConfig config;
    ModelSettings settings;
    int B, T;                            // of the latest pass
    int position;                        // of the first token; above 0 only in model_decode()
    size_t parameter_count;              // of what is trained
    TensorPlace places[MODEL_TENSORS];   // by model_tensor()
    bool has[MODEL_TENSORS];             // likewise: whether there is such a tensor
    int head;                            // the tensor that is the LM head's matrix
    LayerMatrix matrices[LAYER_TENSORS]; // by the role of their first tensor
    size_t layer_elements;               // of a layer's matrices
    int widest;                          // rows or columns of a layer's matrices, at most
    float *discarded; // (LAYER_TENSORS, widest): the gradients of frozen vectors, which nobody reads
    Real *inner;      // (B, T, r): what is between the two products of an adapter

    // The parameters in the model's precision: the caller's own, or the copy, of which the
    // first `prepared` elements are up to date.
    const Real *weights;
    WeightCopy copy;
    size_t prepared;

    // With settings.fp8
    uint8_t *fp8_weights; // of all layers, each matrix followed by itself turned
    uint8_t *fp8_operand; // (B, T, widest): what a matrix multiplies
    float *fp8_scales;    // (1 + L LAYER_TENSORS, FP8_SCALE_STRIDE): of fp8_operand, then of the matrices
    uint64_t fp8_version; // of the parameters whose casts these are, as WeightCopy's
    bool fp8_changed;     // this pass casts the weights

    // This pass begins a sum of gradients: the products of the backward pass set those of
    // matrices, and the rest, those of vectors and of positions, are cleared first.
    bool begins;
    GradientSpan rest[MODEL_SPANS];
    int rest_count;

    // Activations. Those that are computed again have room for one layer, which all
    // layers share: there L is 1 and 2L + 1 is 2. Widths follow from the table: QKV are the
    // outputs of W_qkv, HD the inputs of W_out, U the outputs of W_up, F the inputs of W_down.
    Real *residuals;    // (L + 1, B, T, C), always: the input of each layer, and the output of the last
    Real *residual_mid; // (L, B, T, C): the residual between attention and MLP
    Real *normals;      // (2L + 1, B, T, C): the output of each norm
    float *statistics;  // (2L + 1, B, T, 2): its mean and 1/stddev
    Real *qkv;          // (L, B, T, QKV)
    Real *heads;        // (L, B, T, HD + KV), where heads have norms: queries and keys before these
    Real *attention;    // (L, B, T, HD): its output, which W_out multiplies
    float *logsumexp;   // (L, B, H, T): of the scores of each query
    Real *mlp_saved;    // (L, B, T, U): W_up's product, then what the activation's backward pass needs
    Real *mlp_hidden;   // (L, B, T, F): the output of the activation, which W_down multiplies

    // Workspace. Forward: W_out's or W_down's product, before it is added to the residual.
    // Backward: the gradient of the output of a norm or of attention.
    Real *branch;     // (B, T, max(C, HD))
    Real *d_residual; // (B, T, C)
    Real *d_wide;     // (B, T, widest), rows d_wide_stride apart: gradient of qkv or of mlp_hidden
    float *partials;  // (row_partials_floats(max(widest, 3C))): of sums over rows
    // (T, D), where positions are rotary: of each, the cosines of its angles and their sines.
    // Made by the first pass, and anew by each of model_decode()
    float *turns;
    bool has_turns;
    float *scores; // (attention_scratch_floats)
    Real *logits;  // (chunk, logits_columns), rows logits_stride apart
    float *losses; // (B, T); the host can read it
    int chunk;     // rows of logits at a time
    int d_wide_stride, logits_stride;
    int logits_columns; // that the head's products compute: V, or more of them (head_logits_columns)

    // On a GPU: the batch, and the order in which embedding_backward adds its rows
    int32_t *tokens, *targets, *order; // (B, T)
    int32_t *host_order, *host_counts; // (B, T), (V + 1)
    float *embedding_partials;         // (embedding_partials_floats)
    Real *host_logits;                 // (chunk, logits_stride), if settings.ranks_tokens
    float *host_turns;                 // (T, D)
    void *gemm_workspace;              // (gemm_workspace_bytes)

    // If settings.separator is set
    int32_t *host_starts; // (B, T): where the document of each position begins in its sequence
    int32_t *starts;      // the same on a GPU

    // For model_decode(), of all positions so far: KV is the part of QKV that is keys
    float *keys, *values; // (L, positions, KV)
    float *key_scores;    // (H, positions)
} Model;

static inline size_t model_rows(const Model *model) { return (size_t)model->B * model->T; }

// The index of a tensor. layer L: one outside of the layers.
static inline int model_tensor(int layer, int role) { return layer * LAYER_TENSORS + role; }

// Part `index` of an activation array of (..., B, T, width).
static inline Real *model_slice(const Model *model, Real *base, int index, int width) {
    return real_at(base, (size_t)index * model_rows(model) * (size_t)width, model->settings.precision);
}

// The device's copy of (count) tokens or targets; on the CPU the host's own.
static inline const int32_t *model_upload(const Model *model, Stream *stream, int32_t *device,
                                          const int32_t *host, size_t count) {
    if (!model->settings.on_gpu) { return host; }
    stream_copy(stream, device, host, count * sizeof(int32_t));
    return device;
}
