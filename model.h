// model.h: what a model is, to everything that trains, measures or stores one.
//
// A model belongs to a family (gpt.h), whose functions its `ModelFamily` lists; models.h
// lists the families. All other code works through them and knows no family by its name.
//
// Which model is meant is a ModelConfig, from a preset or from a Hugging Face
// config.json. From it follows the parameter table, the only list of tensors:
// initialisation, weight decay, checkpoints, export, the memory plan and the model itself
// all read it.
#pragma once

#include <jansson.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/reals.h"
#include "runtime/device.h"
#include "runtime/errors.h"
#include "runtime/memory.h"
#include "runtime/pace.h"
#include "runtime/precision.h"
#include "runtime/random.h"
#include "runtime/thread_pool.h"

enum { MODEL_MAX_LAYERS = 96 };

// ---- The configuration ----------------------------------------------------------------

typedef struct ModelConfig {
    const struct ModelFamily *family;
    char name[64];
    int layers;                   // L
    int channels;                 // C: hidden_size
    int heads;                    // H, of C / H channels each
    int mlp_channels;             // F: intermediate_size
    int window;                   // keys that a query of a local layer sees
    int positions;                // the longest sequence
    int vocabulary;               // V
    bool local[MODEL_MAX_LAYERS]; // the layer sees a window of keys, else all earlier ones
    bool qkv_biases;              // queries, keys and values have biases
    bool scaled_scores;           // attention's scores are divided by sqrt(C / H); needs qkv_biases
    double epsilon;               // of LayerNorm
    double dropout;               // the largest of its config.json, which training ignores
} ModelConfig;

// The mean number of keys that a query sees in `layer` for sequences of T: (T+1)/2, or
// w - w(w-1)/(2T) with a window w < T.
static inline double model_mean_keys(const ModelConfig *config, int layer, int T) {
    double w = config->local[layer] && config->window < T ? config->window : T;
    return w - w * (w - 1.0) / (2.0 * T);
}

// FLOPs of forward and backward for one token of a sequence of T: 6 for each element of a
// matrix that multiplies activations (the embedding as the LM head counts, looking up
// embeddings does not), and 6 * 2C for each key that a query sees.
static inline double model_flops_per_token(const ModelConfig *config, int T) {
    double C = config->channels, keys = 0.0;
    double matrices =
        C * config->vocabulary + config->layers * (4.0 * C * C + 2.0 * C * config->mlp_channels);
    for (int l = 0; l < config->layers; l++) { keys += model_mean_keys(config, l, T); }
    return 6.0 * matrices + 6.0 * keys * 2.0 * C;
}

// ---- The parameter table --------------------------------------------------------------

typedef struct ParameterInfo {
    char name[96];        // Hugging Face's
    size_t offset, count; // elements, in the flat array of parameters
    int rows, columns;    // a matrix (rows, columns) as PyTorch stores it: (out, in); columns 0: a vector
    bool is_matrix;       // Linear and Embedding weights: what weight decay means by "matrices"
    bool is_projection;   // a matrix of a layer, which maps activations to others: what Muon steps
    int stacked;          // matrices that it consists of, one below the other; Muon steps each by itself
    bool joins_before;    // it is one matrix with the tensor before it, to the passes of its family
    bool is_transposed;   // files hold it as (in, out)
    int role;             // what it is to the passes of its family
    float fill;           // what a vector is initialised to; the deviation of a matrix, which is normal
    float uniform;        // of a matrix that begins uniform within +- this; 0: it does not
} ParameterInfo;

// Tensors lie back to back in the order in which the forward pass uses them. The first is
// the embedding of tokens, to which the LM head is tied: there is no lm_head.weight.
enum { PARAMETER_TOKEN_EMBEDDING = 0 };

typedef struct ParameterTable {
    ParameterInfo *entries;
    int count;
    size_t parameter_count;
    int layers;
    size_t layer_begins[MODEL_MAX_LAYERS + 1]; // first element of each layer, and the end of the last one
} ParameterTable;

// Appends the tensor `prefix``name`. columns 0: a vector.
static inline ParameterInfo *parameter_table_add(ParameterTable *table, const char *prefix, const char *name,
                                                 int rows, int columns, float fill) {
    ParameterInfo *entry = &table->entries[table->count++];
    memset(entry, 0, sizeof *entry);
    snprintf(entry->name, sizeof entry->name, "%s%s", prefix, name);
    entry->offset = table->parameter_count;
    entry->count = (size_t)rows * (size_t)(columns > 0 ? columns : 1);
    entry->rows = rows;
    entry->columns = columns;
    entry->is_matrix = columns > 0;
    entry->stacked = 1;
    entry->fill = fill;
    table->parameter_count += entry->count;
    return entry;
}

// Call after the last tensor of the last layer; layer_begins of all layers are set.
static inline void parameter_table_end_layers(ParameterTable *table, int layers) {
    table->layers = layers;
    table->layer_begins[layers] = table->parameter_count;
    for (int i = 0; i < table->count; i++) {
        ParameterInfo *entry = &table->entries[i];
        entry->is_projection = entry->is_matrix && entry->offset >= table->layer_begins[0];
    }
}

static inline void parameter_table_free(ParameterTable *table) {
    free(table->entries);
    memset(table, 0, sizeof *table);
}

enum { INITIAL_BLOCK = 4096 };  // elements drawn from one stream of random numbers
#define INITIAL_DEVIATION 0.02f // of most matrices

typedef struct ParameterInitialization {
    const ParameterTable *table;
    uint64_t seed;
    float *parameters; // (parameter_count)
} ParameterInitialization;

// Initialises one tensor, block after block.
static inline void parameters_initialize_task(void *context, int task, int thread) {
    (void)thread;
    const ParameterInitialization *work = (const ParameterInitialization *)context;
    const ParameterInfo *entry = &work->table->entries[task];
    Random random;
    random.state = 0;
    for (size_t j = 0; j < entry->count; j++) {
        if (j % INITIAL_BLOCK == 0) {
            random.state = random_hash(random_hash(work->seed, (uint64_t)task), j / INITIAL_BLOCK);
        }
        work->parameters[entry->offset + j] = entry->uniform > 0
                                                  ? entry->uniform * (float)(2 * random_uniform(&random) - 1)
                                              : entry->is_matrix ? entry->fill * (float)random_normal(&random)
                                                                 : entry->fill;
    }
}

// Fills `parameters` (parameter_count). Each element is a function of the seed, its
// tensor's index, its block of INITIAL_BLOCK elements and its place there.
static inline void parameters_initialize(const ParameterTable *table, uint64_t seed, ThreadPool *pool,
                                         float *parameters) {
    ParameterInitialization work = {table, seed, parameters};
    thread_pool_run(pool, table->count, parameters_initialize_task, &work);
}

// ---- What a family provides -----------------------------------------------------------

// What the backward pass computes again instead of keeping it. Each level includes the
// one before.
typedef enum Recompute {
    RECOMPUTE_NONE,
    RECOMPUTE_GELU,      // the output of the activation function, from its input
    RECOMPUTE_LAYERNORM, // the outputs of the LayerNorms, from the residuals
    RECOMPUTE_BLOCK,     // everything in a layer, from the layer's input
    RECOMPUTE_LEVELS
} Recompute;

// What a model is built for: the machine, and what fits on it.
typedef struct ModelSettings {
    int B, T;
    int threads;         // of the pool, on the CPU
    bool on_gpu;         // kernels run there
    Precision precision; // of weights and activations
    Recompute recompute; // on the CPU RECOMPUTE_NONE or RECOMPUTE_BLOCK
    bool given_weights;  // the caller's parameters are in `precision`; otherwise they are floats
    bool ranks_tokens;   // ModelQuery::largest may be asked for
    bool decodes;        // decode() is called; on the CPU in fp32, with B = T = 1
    // What of it is trained (trained.h); NULL: all of it. Then `parameters` and `gradients` are
    // vectors of that, with its parameter_count.
    struct TrainedPart *part;
    // 1 + the token that begins a document: no position sees those of an earlier document (not in
    // decode). It may become known after the reservation. NULL: each sees all that precede it.
    const uint32_t *separator;
    bool fp8; // products of the layers' matrices, but for their gradients, are in FP8
} ModelSettings;

// Settings for a model on the CPU with a pool of `threads`.
static inline ModelSettings model_on_cpu(int B, int T, int threads) {
    ModelSettings settings = {.B = B, .T = T, .threads = threads, .given_weights = true};
    return settings;
}

// A batch without a backward pass. All arrays are on the host.
typedef struct ModelQuery {
    int B, T;                 // no more positions than the model was reserved for
    const int32_t *tokens;    // (B, T)
    const int32_t *positions; // (count) of B * T, ascending: those that predict a target; NULL: all of them
    const int32_t *targets;   // (count): the token that follows each of them; -1: it does not count
    int count;
    int32_t *largest; // (count): becomes the most probable token at each, -1 where there is none; or NULL
} ModelQuery;

// The functions take the model's state (models.h) as `self`. parameters:
// (parameter_count), where the kernels want them. Tokens must lie in the vocabulary.
typedef struct ModelFamily {
    const char *name;         // "model_type" in a config.json
    const char *architecture; // the class of transformers that loads such a model

    // The members of a config.json. read_config fills all of `config` but family and
    // name. write_config returns what is special to the family; hf_model.h adds the rest.
    bool (*read_config)(const json_t *root, const char *path, ModelConfig *config, Error *error);
    json_t *(*write_config)(const ModelConfig *config);
    const char *prefix; // of the names in the parameter table; files may leave it out
    // Whether a tensor of a file, named without the prefix, is a constant that is no
    // parameter.
    bool (*is_constant)(const char *name, const ModelConfig *config);
    // Fills `table`, which the caller frees with parameter_table_free.
    void (*table)(const ModelConfig *config, ParameterTable *table);

    // Plans activations and workspace. `self` must stay where it is until the arena is
    // released.
    void (*reserve)(void *self, Arena *arena, const ModelConfig *config, const ModelSettings *settings);
    // Where the model keeps its copy of the parameters.
    WeightCopy *(*copy)(void *self);
    // gradients (parameter_count) += the gradient of the mean loss over the targets (B,
    // T) >= 0; 0 if there is none. With pace->begins: = that gradient. Calls pace->need before
    // it reads parameters, and pace->finish. Returns the losses (B, T), which mean nothing if
    // no target counts. They can be read, and tokens and targets changed, when the stream has
    // settled.
    const float *(*gradients)(void *self, Stream *stream, const void *parameters, float *gradients,
                              const int32_t *tokens, const int32_t *targets, const Pace *pace);
    // The same losses, (query->count), without gradients.
    const float *(*losses)(void *self, Stream *stream, const void *parameters, const ModelQuery *query,
                           const Pace *pace);
    // The logits (V) of the token after `token`, which is at `position`; all positions
    // before it have been decoded.
    const float *(*decode)(void *self, Stream *stream, const float *parameters, int position, int32_t token);
} ModelFamily;

// ---- Losses and logits ----------------------------------------------------------------

// The first of the largest of the logits (count); -1 where one of them is NaN or all are
// -infinity.
static inline int32_t logits_largest(const Real *logits, int count, Precision precision) {
    int32_t best = -1;
    float maximum = -INFINITY;
    for (int v = 0; v < count; v++) {
        float logit = real_load(logits, (size_t)v, precision);
        if (isnan(logit)) { return -1; }
        if (logit > maximum) {
            maximum = logit;
            best = v;
        }
    }
    return best;
}

// How many of the targets (count) are predicted: those that a mask leaves out are -1.
static inline int targets_predicted(const int32_t *targets, size_t count) {
    int predicted = 0;
    for (size_t i = 0; i < count; i++) { predicted += targets[i] >= 0; }
    return predicted;
}

// Waits for the stream. The mean of losses (count) over the targets (count) >= 0; 0 if
// there is none.
static inline float losses_mean(Stream *stream, const float *losses, const int32_t *targets, size_t count) {
    int predicted = targets_predicted(targets, count);
    double sum = 0.0;
    stream_settle(stream);
    for (size_t i = 0; i < count && predicted > 0; i++) { sum += (double)losses[i]; }
    return predicted > 0 ? (float)(sum / predicted) : 0.0f;
}
