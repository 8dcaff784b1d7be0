// model.h: what a model is, to everything that trains, measures or stores one.
//
// A model belongs to a family, which is a page (gpt2.h): rows for its tensors and for the keys of
// its config.json, and what it refuses. families.h lists the pages. The passes are the same for
// all of them (decoder.h). All other code knows no family by its name.
//
// Which model is meant is a ModelConfig, from a preset or a Hugging Face config.json. From it and
// the rows of the family follows the parameter table, the only list of tensors: initialisation,
// weight decay, checkpoints, export, the memory plan, operations and the passes all read it.
#pragma once

#include <jansson.h>

#include "kernels/cpu/reals.h"
#include "runtime/memory.h"
#include "runtime/pace.h"
#include "runtime/random.h"

enum { MODEL_MAX_LAYERS = 96 };

// ---- The configuration ----------------------------------------------------------------

// How rotary positions are scaled beyond those that a model was trained for (positions.h).
typedef enum RotaryKind {
    ROTARY_DEFAULT,
    ROTARY_LINEAR,
    ROTARY_DYNAMIC,
    ROTARY_LLAMA3,
    ROTARY_YARN
} RotaryKind;

typedef struct RotaryPositions {
    int kind; // RotaryKind
    double theta, factor;
    double original;                          // positions that it was trained for
    double low, high;                         // of frequencies
    double attention, mscale, mscale_all_dim; // of scores; 0: not given
    bool fractional;                          // the borders of yarn are not whole numbers
} RotaryPositions;

typedef struct ModelConfig {
    const struct ModelFamily *family;
    char name[64];
    int layers;                   // L
    int channels;                 // C: hidden_size
    int heads;                    // H
    int kv_heads;                 // KV, of keys and values; 0: as many as heads
    int head_channels;            // D, of a head; 0: C / H
    int mlp_channels;             // F: intermediate_size
    int window;                   // keys that a query of a local layer sees
    int positions;                // the longest sequence
    int vocabulary;               // V
    bool local[MODEL_MAX_LAYERS]; // the layer sees a window of keys, else all earlier ones
    bool scaled_scores; // attention's scores are divided by sqrt(D); needs biases or positions of the queries
    double epsilon;     // of norms
    double dropout;     // the largest of its config.json, which training ignores
    // Where models of a family differ: which tensors there are (TensorRow::where), how matrices
    // begin (0: INITIAL_DEVIATION), and how positions turn queries and keys.
    bool tied, qkv_biases, out_biases, mlp_biases, head_norms;
    double deviation;
    RotaryPositions rotary;
} ModelConfig;

// The mean number of keys that a query sees in `layer` for sequences of T: (T+1)/2, or
// w - w(w-1)/(2T) with a window w < T.
static inline double model_mean_keys(const ModelConfig *config, int layer, int T) {
    double w = config->local[layer] && config->window < T ? config->window : T;
    return w - w * (w - 1.0) / (2.0 * T);
}

static inline int model_head_size(const ModelConfig *config) {
    return config->head_channels > 0 ? config->head_channels : config->channels / config->heads;
}

static inline int model_kv_heads(const ModelConfig *config) {
    return config->kv_heads > 0 ? config->kv_heads : config->heads;
}

// What rows and columns of a tensor can be. The columns of a vector are DIM_NONE.
typedef enum Dimension {
    DIM_NONE,
    DIM_C,
    DIM_F,
    DIM_D,
    DIM_HEADS,
    DIM_KV,
    DIM_QKV,
    DIM_POSITIONS,
    DIM_V
} Dimension;

static inline int model_dimension(const ModelConfig *config, int dimension) {
    int D = model_head_size(config), heads = config->heads * D, keys = model_kv_heads(config) * D;
    const int sizes[] = {0,
                         config->channels,
                         config->mlp_channels,
                         D,
                         heads,
                         keys,
                         heads + 2 * keys,
                         config->positions,
                         config->vocabulary};
    return sizes[dimension];
}

// ---- Families -------------------------------------------------------------------------

// What a tensor is to the passes (layer.h). With its layer it is one tensor of a model: those
// outside of layers have layer L, where the last norm is NORM_1. Tensors that are one to the passes
// stand one behind the other.
typedef enum TensorRole {
    TENSOR_NORM_1,
    TENSOR_NORM_1_BIAS,
    TENSOR_Q, // or of queries, keys and values in one
    TENSOR_K,
    TENSOR_V,
    TENSOR_QKV_BIAS, // or of queries
    TENSOR_K_BIAS,
    TENSOR_V_BIAS,
    TENSOR_Q_NORM, // of each head
    TENSOR_K_NORM,
    TENSOR_OUT,
    TENSOR_OUT_BIAS,
    TENSOR_NORM_2,
    TENSOR_NORM_2_BIAS,
    TENSOR_UP, // or the gate's
    TENSOR_GATED_UP,
    TENSOR_UP_BIAS,
    TENSOR_GATED_UP_BIAS,
    TENSOR_DOWN,
    TENSOR_DOWN_BIAS,
    LAYER_TENSORS,
    TENSOR_EMBEDDING = LAYER_TENSORS, // of tokens
    TENSOR_POSITIONS,
    TENSOR_HEAD, // unless it is the embedding
    TENSOR_ROLES
} TensorRole;

enum {
    ROW_HEAD = 1,     // the matrix is the LM head's, unless a later row is
    ROW_JOINS = 2,    // it is one matrix with the row before it, to the passes
    ROW_STACKED = 4,  // queries, keys and values one below the other; Muon steps each by itself
    ROW_TURNED = 8,   // files hold it as (in, out)
    ROW_SMALLER = 16, // it begins smaller by the root of the number of branches
    ROW_BARE = 32,    // its name has no prefix
    ROW_UNLESS = 64,  // it is there where the member is false
    MODEL_ROWS = 24,  // of a list on a page, at most, with the 0 at its end
    MODEL_NAME = 64
};

typedef struct TensorRow {
    const char *name;  // Hugging Face's without the prefix; N is the layer's number
    int role;          // TensorRole
    int rows, columns; // Dimension: a matrix as PyTorch stores it, (out, in), or a vector of `rows`
    int is;            // ROW_...
    size_t where;      // MEMBER() of ModelConfig: it is there where that is true; 0: always
} TensorRow;

// A page. Lists end with an element that is 0.
typedef struct ModelFamily {
    const char *name;             // "model_type" in a config.json
    const char *architecture;     // the class of transformers that loads such a model
    const char *prefix;           // of the names of tensors; files may leave it out
    const char *constants[3];     // tensors of old files that are no parameters
    const char *gguf;             // what llama.cpp calls it; NULL: it has no such model
    bool gguf_pairs;              // it turns neighbours there, not halves, by frequencies with factors
    const TensorRow *tensors;     // in the order in which the forward pass uses them; layers are alike
    const struct ConfigKey *keys; // of config.json (config_json.h)
    // Read or refuse, and write, what the keys cannot say.
    bool (*accept)(const json_t *root, const char *path, ModelConfig *config, Error *error);
    void (*write)(json_t *root, const ModelConfig *config);
} ModelFamily;

// A row's name in layer `l`.
static inline const char *model_tensor_name(const char *row, int l, char name[MODEL_NAME]) {
    const char *number = strstr(row, ".N.");
    if (number == NULL) { return row; }
    snprintf(name, MODEL_NAME, "%.*s.%d%s", (int)(number - row), row, l, number + 2);
    return name;
}

// Whether a tensor of a file, named without the prefix, is a constant.
static inline bool model_is_constant(const char *name, const ModelConfig *config) {
    char other[MODEL_NAME];
    for (const char *const *constant = config->family->constants; *constant != NULL; constant++) {
        for (int l = 0; l < config->layers; l++) {
            if (strcmp(name, model_tensor_name(*constant, l, other)) == 0) { return true; }
        }
    }
    return false;
}

// ---- The parameter table --------------------------------------------------------------

typedef struct ParameterInfo {
    char name[96];        // Hugging Face's
    size_t prefix;        // characters of it that files may leave out
    size_t offset, count; // elements, in the flat array of parameters
    int rows, columns;    // of a matrix; columns 0: a vector
    int layer, role;
    bool is_matrix;     // Linear and Embedding weights: what weight decay means by "matrices"
    bool is_projection; // a matrix of a layer, which maps activations to others: what Muon steps
    bool is_head;       // the LM head multiplies by it
    int stacked;        // matrices that it consists of, one below the other; Muon steps each by itself
    bool joins_before;  // it is one matrix with the tensor before it
    bool is_transposed; // files hold it as (in, out)
    float fill;         // what a vector is initialised to; the deviation of a matrix, which is normal
    float uniform;      // of a matrix that begins uniform within +- this; 0: it does not
} ParameterInfo;

// Tensors lie back to back in the order in which the forward pass uses them.
typedef struct ParameterTable {
    ParameterInfo *entries;
    int count;
    size_t parameter_count;
    int head; // the entry that is the LM head's matrix
    int layers;
    size_t layer_begins[MODEL_MAX_LAYERS + 1]; // first element of each layer, and the end of the last one
} ParameterTable;

static inline ParameterInfo *parameter_table_add(ParameterTable *table, const char *prefix, const char *name,
                                                 int rows, int columns, float fill) {
    ParameterInfo *entry = &table->entries[table->count++];
    memset(entry, 0, sizeof *entry);
    snprintf(entry->name, sizeof entry->name, "%s%s", prefix, name);
    entry->offset = table->parameter_count;
    entry->count = (size_t)rows * (columns > 0 ? columns : 1);
    entry->rows = rows;
    entry->columns = columns;
    entry->is_matrix = columns > 0;
    entry->stacked = 1;
    entry->fill = fill;
    table->parameter_count += entry->count;
    return entry;
}

static inline void parameter_table_free(ParameterTable *table) {
    free(table->entries);
    memset(table, 0, sizeof *table);
}

#define INITIAL_DEVIATION 0.02f // of most matrices

static inline void parameter_table_add_row(ParameterTable *table, const ModelConfig *config, int layer,
                                           const TensorRow *row) {
    char name[MODEL_NAME];
    const char *prefix = row->is & ROW_BARE ? "" : config->family->prefix;
    int rows = model_dimension(config, row->rows), columns = model_dimension(config, row->columns);
    bool norm = row->role == TENSOR_NORM_1 || row->role == TENSOR_NORM_2 || row->role == TENSOR_Q_NORM ||
                row->role == TENSOR_K_NORM;
    float smaller = row->is & ROW_SMALLER ? sqrtf(2.0f * (float)config->layers) : 1.0f,
          deviation = config->deviation > 0 ? (float)config->deviation : INITIAL_DEVIATION;
    if (row->where != 0 && ((const bool *)config)[row->where] != !(row->is & ROW_UNLESS)) { return; }
    ParameterInfo *entry =
        parameter_table_add(table, prefix, model_tensor_name(row->name, layer, name), rows, columns,
                            columns > 0 ? deviation / smaller
                            : norm      ? 1.0f
                                        : 0.0f);
    entry->prefix = strlen(prefix);
    entry->layer = layer;
    entry->role = row->role;
    entry->is_projection = columns > 0 && layer < config->layers;
    entry->is_head = row->is & ROW_HEAD;
    if (entry->is_head) {
        table->entries[table->head].is_head = false;
        entry->is_head = true;
        table->head = table->count - 1;
    }
    entry->joins_before = row->is & ROW_JOINS;
    entry->stacked = row->is & ROW_STACKED ? 3 : 1;
    entry->is_transposed = row->is & ROW_TURNED;
}

// The caller frees `table`.
static inline void parameter_table_make(const ModelConfig *config, ParameterTable *table) {
    int L = config->layers;
    memset(table, 0, sizeof *table);
    table->entries = MEMORY_OF(ParameterInfo, L * LAYER_TENSORS + MODEL_ROWS);
    const TensorRow *row = config->family->tensors, *first;
    for (; strstr(row->name, ".N.") == NULL; row++) { parameter_table_add_row(table, config, L, row); }
    first = row;
    for (int l = 0; l < L; l++) {
        table->layer_begins[l] = table->parameter_count;
        for (row = first; strstr(row->name, ".N.") != NULL; row++) {
            parameter_table_add_row(table, config, l, row);
        }
    }
    table->layers = L;
    table->layer_begins[L] = table->parameter_count;
    for (; row->name != NULL; row++) { parameter_table_add_row(table, config, L, row); }
}

// FLOPs of forward and backward for one token of a sequence of T: 6 for each element of a
// matrix that multiplies activations (looking up embeddings does not count), and 6 * 2 H D
// for each key that a query sees.
static inline double model_flops_per_token(const ModelConfig *config, const ParameterTable *table, int T) {
    double matrices = 0.0, keys = 0.0;
    for (int i = 0; i < table->count; i++) {
        const ParameterInfo *entry = &table->entries[i];
        if (entry->is_projection || entry->is_head) { matrices += (double)entry->count; }
    }
    for (int l = 0; l < config->layers; l++) { keys += model_mean_keys(config, l, T); }
    return 6.0 * matrices + 6.0 * keys * 2.0 * model_dimension(config, DIM_HEADS);
}

// ---- Initialisation -------------------------------------------------------------------

enum { INITIAL_BLOCK = 4096 }; // elements drawn from one stream of random numbers

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

// ---- What a model is built for, and what it is asked ----------------------------------

// What the backward pass computes again instead of keeping it. Each level includes the one before.
typedef enum Recompute {
    RECOMPUTE_NONE,
    RECOMPUTE_GELU,      // the output of the activation function, from its input
    RECOMPUTE_LAYERNORM, // the outputs of the norms, from the residuals
    RECOMPUTE_BLOCK,     // everything in a layer, from the layer's input
    RECOMPUTE_LEVELS
} Recompute;

// B T at most: tokens of a micro-batch are counted in int.
#define MOST_TOKENS_OF_A_MICRO_BATCH 1e9

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

// ---- Losses and logits ----------------------------------------------------------------

// The first of the largest of the logits (count); -1 where one of them is NaN or all are -infinity.
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
