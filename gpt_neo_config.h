// gpt_neo_config.h: which GPT-Neo, and the one table of its tensors.
//
// A configuration is a preset or a Hugging Face config.json. From it follows the
// parameter table: every tensor with its Hugging Face name, its place in the flat array
// of parameters, its shape, its initialisation, and whether it is a matrix (weight decay
// may apply to matrices only). Initialisation, weight decay, checkpoints, export, the
// memory plan and the model itself all read this table; there is no second list of
// tensors.
//
// Tensors lie back to back in the order in which the forward pass uses them. The query,
// key and value matrices (C, C) follow each other, so that one product with all of them,
// a (3C, C) matrix, computes all three; files keep the three names. There is no
// lm_head.weight: it is tied to wte.
#ifndef ACCO_GPT_NEO_CONFIG_H
#define ACCO_GPT_NEO_CONFIG_H

#include <assert.h>
#include <jansson.h>
#include <limits.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/errors.h"
#include "runtime/names.h"
#include "runtime/random.h"
#include "runtime/thread_pool.h"

enum { GPT_NEO_MAX_LAYERS = 96 };

// ---------------------------------------------------------------------------------------
// The configuration

typedef struct GptNeoConfig {
    char name[64];
    int layers;                     // L
    int channels;                   // C: hidden_size
    int heads;                      // H, of C / H channels each
    int mlp_channels;               // F: intermediate_size
    int window;                     // keys that a query of a local layer sees
    int positions;                  // the longest sequence
    int vocabulary;                 // V
    bool local[GPT_NEO_MAX_LAYERS]; // the layer sees a window of keys, else all earlier ones
    float epsilon;                  // of LayerNorm
} GptNeoConfig;

typedef struct GptNeoPreset {
    const char *name;
    int layers, channels, heads, window, positions, vocabulary;
} GptNeoPreset;

enum { GPT_NEO_PRESET_COUNT = 5 };

// 125M as in the ACCO paper; 1.3B and 2.7B as EleutherAI publishes them. The paper gives
// no sizes for its 36M model with a vocabulary of 10000: this is the published
// TinyStories-33M with that vocabulary, 36.8M parameters. tiny reads bytes and has 0.86M
// parameters.
static inline const GptNeoPreset *gpt_neo_presets(void) {
    static const GptNeoPreset presets[GPT_NEO_PRESET_COUNT] = {{"tiny", 4, 128, 4, 64, 256, 256},
                                                               {"36M", 4, 768, 16, 256, 1024, 10000},
                                                               {"125M", 12, 768, 12, 256, 1024, 50257},
                                                               {"1.3B", 24, 2048, 16, 256, 2048, 50257},
                                                               {"2.7B", 32, 2560, 20, 256, 2048, 50257}};
    return presets;
}

static inline void gpt_neo_config_from_preset(const GptNeoPreset *preset, GptNeoConfig *config) {
    memset(config, 0, sizeof *config);
    snprintf(config->name, sizeof config->name, "%s", preset->name);
    config->layers = preset->layers;
    config->channels = preset->channels;
    config->heads = preset->heads;
    config->mlp_channels = 4 * preset->channels;
    config->window = preset->window;
    config->positions = preset->positions;
    config->vocabulary = preset->vocabulary;
    config->epsilon = 1e-5f;
    for (int l = 0; l < preset->layers; l++) { config->local[l] = l % 2 == 1; }
}

// Reads an integer in [1, maximum]. A `fallback` > 0 replaces a value that is absent or
// null.
static inline bool gpt_neo_config_integer(const json_t *root, const char *path, const char *key, int fallback,
                                          int maximum, int *value, Error *error) {
    const json_t *item = json_object_get(root, key);
    if ((item == NULL || json_is_null(item)) && fallback > 0) {
        *value = fallback;
        return true;
    }
    if (!json_is_integer(item) || json_integer_value(item) < 1 || json_integer_value(item) > maximum) {
        return error_set(error, "%s: \"%s\" must be a whole number from 1 to %d", path, key, maximum);
    }
    *value = (int)json_integer_value(item);
    return true;
}

static inline bool gpt_neo_config_add_layer(const json_t *kind, const char *path, GptNeoConfig *config,
                                            int *count, Error *error) {
    const char *text = json_string_value(kind);
    if (text == NULL || (strcmp(text, "global") != 0 && strcmp(text, "local") != 0)) {
        return error_set(error, "%s: attention of a layer must be \"global\" or \"local\"", path);
    }
    if (*count >= config->layers) {
        return error_set(error, "%s: attention is given for more than num_layers = %d layers", path,
                         config->layers);
    }
    config->local[(*count)++] = strcmp(text, "local") == 0;
    return true;
}

// Reads "attention_types", [[[kind, ...], times], ...]: each list of kinds is repeated
// `times` times.
static inline bool gpt_neo_config_expand(const json_t *types, const char *path, GptNeoConfig *config,
                                         Error *error) {
    int count = 0;
    for (size_t i = 0; i < json_array_size(types); i++) {
        const json_t *kinds = json_array_get(json_array_get(types, i), 0),
                     *times = json_array_get(json_array_get(types, i), 1);
        if (json_array_size(kinds) == 0 || !json_is_integer(times) || json_integer_value(times) < 1) {
            return error_set(error, "%s: \"attention_types\" must look like [[[\"global\", \"local\"], %d]]",
                             path, config->layers / 2);
        }
        for (json_int_t t = 0; t < json_integer_value(times); t++) {
            for (size_t k = 0; k < json_array_size(kinds); k++) {
                if (!gpt_neo_config_add_layer(json_array_get(kinds, k), path, config, &count, error)) {
                    return false;
                }
            }
        }
    }
    if (count != config->layers) {
        return error_set(error, "%s: \"attention_types\" covers %d layers, but num_layers is %d", path, count,
                         config->layers);
    }
    return true;
}

// Reads which layers are local, from "attention_types" or "attention_layers", a flat list
// of kinds. A file may have both if they agree.
static inline bool gpt_neo_config_attention(const json_t *root, const char *path, GptNeoConfig *config,
                                            Error *error) {
    const json_t *types = json_object_get(root, "attention_types"),
                 *list = json_object_get(root, "attention_layers");
    if (types == NULL && list == NULL) {
        return error_set(error, "%s: \"attention_types\" is missing", path);
    }
    if (types != NULL && !gpt_neo_config_expand(types, path, config, error)) { return false; }
    if (list == NULL) { return true; }
    GptNeoConfig listed = *config;
    int count = 0;
    for (size_t i = 0; i < json_array_size(list); i++) {
        if (!gpt_neo_config_add_layer(json_array_get(list, i), path, &listed, &count, error)) {
            return false;
        }
    }
    if (count != config->layers) {
        return error_set(error, "%s: \"attention_layers\" has %d entries, but num_layers is %d", path, count,
                         config->layers);
    }
    if (types != NULL && memcmp(listed.local, config->local, sizeof listed.local) != 0) {
        return error_set(error, "%s: \"attention_layers\" and \"attention_types\" contradict each other",
                         path);
    }
    *config = listed;
    return true;
}

// Refuses what is not supported. classifier_dropout is ignored: it belongs to a
// classification head, which a language model does not have.
static inline bool gpt_neo_config_check_choices(const json_t *root, const char *path, Error *error) {
    static const char *const dropouts[3] = {"attention_dropout", "embed_dropout", "resid_dropout"};
    for (int i = 0; i < 3; i++) {
        const json_t *item = json_object_get(root, dropouts[i]);
        if (item != NULL && !(json_is_number(item) && json_number_value(item) == 0.0)) {
            return error_set(error, "%s: \"%s\" must be 0: dropout is not supported", path, dropouts[i]);
        }
    }
    const json_t *activation = json_object_get(root, "activation_function");
    if (activation != NULL &&
        (!json_is_string(activation) || strcmp(json_string_value(activation), "gelu_new") != 0)) {
        return error_set(error, "%s: \"activation_function\" must be \"gelu_new\"", path);
    }
    const json_t *tied = json_object_get(root, "tie_word_embeddings");
    if (json_is_false(tied)) {
        return error_set(error, "%s: \"tie_word_embeddings\" must be true: the LM head is the embedding",
                         path);
    }
    return true;
}

static inline bool gpt_neo_config_read(const json_t *root, const char *path, GptNeoConfig *config,
                                       Error *error) {
    const char *model_type = json_string_value(json_object_get(root, "model_type"));
    if (model_type == NULL || strcmp(model_type, "gpt_neo") != 0) {
        return error_set(error,
                         "%s: \"model_type\" is %s%.60s%s and must be \"gpt_neo\": other models are "
                         "not supported",
                         path, model_type == NULL ? "" : "\"", model_type == NULL ? "not given" : model_type,
                         model_type == NULL ? "" : "\"");
    }
    const json_t *epsilon = json_object_get(root, "layer_norm_epsilon");
    config->epsilon = epsilon == NULL ? 1e-5f : (float)json_number_value(epsilon);
    if (!(config->epsilon > 0.0f && config->epsilon <= 0.1f)) {
        return error_set(error, "%s: \"layer_norm_epsilon\" must be a number above 0, at most 0.1", path);
    }
    if (!gpt_neo_config_check_choices(root, path, error) ||
        !gpt_neo_config_integer(root, path, "num_layers", 0, GPT_NEO_MAX_LAYERS, &config->layers, error) ||
        !gpt_neo_config_integer(root, path, "hidden_size", 0, 65536, &config->channels, error) ||
        !gpt_neo_config_integer(root, path, "num_heads", 0, 65536, &config->heads, error) ||
        !gpt_neo_config_integer(root, path, "intermediate_size", 4 * config->channels, 1 << 20,
                                &config->mlp_channels, error) ||
        !gpt_neo_config_integer(root, path, "window_size", 256, 1 << 20, &config->window, error) ||
        !gpt_neo_config_integer(root, path, "max_position_embeddings", 0, 1 << 20, &config->positions,
                                error) ||
        !gpt_neo_config_integer(root, path, "vocab_size", 0, 1 << 24, &config->vocabulary, error)) {
        return false;
    }
    if (config->channels % config->heads != 0) {
        return error_set(error, "%s: hidden_size %d must be a multiple of num_heads %d", path,
                         config->channels, config->heads);
    }
    return gpt_neo_config_attention(root, path, config, error);
}

static inline bool gpt_neo_config_load(const char *path, GptNeoConfig *config, Error *error) {
    json_error_t problem;
    json_t *root = json_load_file(path, 0, &problem);
    if (root == NULL && access(path, R_OK) != 0) { return error_set(error, "%s: %s", path, problem.text); }
    if (root == NULL) { return error_set(error, "%s is no config.json of a model: %s", path, problem.text); }
    memset(config, 0, sizeof *config);
    size_t length = strlen(path), skip = length < sizeof config->name ? 0 : length - sizeof config->name + 1;
    snprintf(config->name, sizeof config->name, "%s", path + skip);
    bool good = json_is_object(root)
                    ? gpt_neo_config_read(root, path, config, error)
                    : error_set(error, "%s: a model configuration must be a JSON object", path);
    json_decref(root);
    return good;
}

// `name_or_path`: a preset, a config.json, or a directory that holds one. `error` says
// what is wrong and what is allowed.
static inline bool gpt_neo_config_find(const char *name_or_path, GptNeoConfig *config, Error *error) {
    const char *names[GPT_NEO_PRESET_COUNT];
    for (int i = 0; i < GPT_NEO_PRESET_COUNT; i++) {
        names[i] = gpt_neo_presets()[i].name;
        if (strcmp(name_or_path, names[i]) == 0) {
            gpt_neo_config_from_preset(&gpt_neo_presets()[i], config);
            return true;
        }
    }
    struct stat status;
    bool exists = stat(name_or_path, &status) == 0;
    if (exists && S_ISDIR(status.st_mode)) {
        char path[PATH_MAX];
        if (snprintf(path, sizeof path, "%s/config.json", name_or_path) >= (int)sizeof path) {
            return error_set(error, "the path of the model configuration is too long");
        }
        return gpt_neo_config_load(path, config, error);
    }
    if (exists || strchr(name_or_path, '/') != NULL) {
        return gpt_neo_config_load(name_or_path, config, error);
    }
    char excerpt[64];
    const char *nearest = nearest_name(name_or_path, names, GPT_NEO_PRESET_COUNT);
    return error_set(
        error,
        "unknown model %s%s%s%s: choose tiny, 36M, 125M, 1.3B or 2.7B, or give a Hugging Face config.json",
        text_excerpt(name_or_path, excerpt), nearest != NULL ? " (did you mean " : "",
        nearest != NULL ? nearest : "", nearest != NULL ? "?)" : "");
}

// ---------------------------------------------------------------------------------------
// The parameter table

typedef struct ParameterInfo {
    char name[96];        // Hugging Face's
    size_t offset, count; // elements, in the flat array of parameters
    int rows, columns;    // a matrix (rows, columns) as PyTorch stores it: (out, in); columns 0: a vector
    float stddev;         // initialised from N(0, stddev^2)
    float fill;           // else, where stddev is 0, to this constant
    bool is_matrix;       // Linear and Embedding weights: what weight decay means by "matrices"
} ParameterInfo;

typedef struct ParameterTable {
    ParameterInfo *entries;
    int count;
    size_t parameter_count;
} ParameterTable;

// The table holds wte, wpe, then these tensors for each layer, then ln_f's weight and
// bias.
typedef enum GptNeoTensor {
    TENSOR_LN_1_WEIGHT,
    TENSOR_LN_1_BIAS,
    TENSOR_Q,
    TENSOR_K,
    TENSOR_V,
    TENSOR_OUT_WEIGHT,
    TENSOR_OUT_BIAS,
    TENSOR_LN_2_WEIGHT,
    TENSOR_LN_2_BIAS,
    TENSOR_FC_WEIGHT,
    TENSOR_FC_BIAS,
    TENSOR_PROJ_WEIGHT,
    TENSOR_PROJ_BIAS,
    TENSORS_PER_LAYER
} GptNeoTensor;

enum { GPT_NEO_WTE = 0, GPT_NEO_WPE = 1, GPT_NEO_FIRST_LAYER = 2 };

// The index of a layer's tensor in the table.
static inline int gpt_neo_tensor(int layer, GptNeoTensor tensor) {
    return GPT_NEO_FIRST_LAYER + layer * TENSORS_PER_LAYER + (int)tensor;
}

// The index of ln_f's weight: where a layer L would begin. Its bias is the next one.
static inline int gpt_neo_ln_f(const GptNeoConfig *config) {
    return gpt_neo_tensor(config->layers, TENSOR_LN_1_WEIGHT);
}

static inline int gpt_neo_tensor_count(const GptNeoConfig *config) { return gpt_neo_ln_f(config) + 2; }

// Appends a tensor; layer -1: outside the layers. columns 0: a vector, initialised to
// `fill`.
static inline void parameter_table_add(ParameterTable *table, int layer, const char *name, int rows,
                                       int columns, float fill) {
    ParameterInfo *entry = &table->entries[table->count++];
    memset(entry, 0, sizeof *entry);
    if (layer < 0) {
        snprintf(entry->name, sizeof entry->name, "transformer.%s", name);
    } else {
        snprintf(entry->name, sizeof entry->name, "transformer.h.%d.%s", layer, name);
    }
    entry->offset = table->parameter_count;
    entry->count = (size_t)rows * (size_t)(columns > 0 ? columns : 1);
    entry->rows = rows;
    entry->columns = columns;
    entry->is_matrix = columns > 0;
    entry->stddev = columns > 0 ? 0.02f : 0.0f;
    entry->fill = fill;
    table->parameter_count += entry->count;
}

// Fills `table`, which the caller frees with parameter_table_free.
static inline void gpt_neo_parameter_table(const GptNeoConfig *config, ParameterTable *table) {
    int C = config->channels, F = config->mlp_channels;
    table->entries = (ParameterInfo *)calloc((size_t)gpt_neo_tensor_count(config), sizeof *table->entries);
    assert(table->entries != NULL);
    table->count = 0;
    table->parameter_count = 0;
    parameter_table_add(table, -1, "wte.weight", config->vocabulary, C, 0.0f);
    parameter_table_add(table, -1, "wpe.weight", config->positions, C, 0.0f);
    for (int l = 0; l < config->layers; l++) {
        parameter_table_add(table, l, "ln_1.weight", C, 0, 1.0f);
        parameter_table_add(table, l, "ln_1.bias", C, 0, 0.0f);
        parameter_table_add(table, l, "attn.attention.q_proj.weight", C, C, 0.0f);
        parameter_table_add(table, l, "attn.attention.k_proj.weight", C, C, 0.0f);
        parameter_table_add(table, l, "attn.attention.v_proj.weight", C, C, 0.0f);
        parameter_table_add(table, l, "attn.attention.out_proj.weight", C, C, 0.0f);
        parameter_table_add(table, l, "attn.attention.out_proj.bias", C, 0, 0.0f);
        parameter_table_add(table, l, "ln_2.weight", C, 0, 1.0f);
        parameter_table_add(table, l, "ln_2.bias", C, 0, 0.0f);
        parameter_table_add(table, l, "mlp.c_fc.weight", F, C, 0.0f);
        parameter_table_add(table, l, "mlp.c_fc.bias", F, 0, 0.0f);
        parameter_table_add(table, l, "mlp.c_proj.weight", C, F, 0.0f);
        parameter_table_add(table, l, "mlp.c_proj.bias", C, 0, 0.0f);
    }
    parameter_table_add(table, -1, "ln_f.weight", C, 0, 1.0f);
    parameter_table_add(table, -1, "ln_f.bias", C, 0, 0.0f);
    assert(table->count == gpt_neo_tensor_count(config));
}

static inline void parameter_table_free(ParameterTable *table) {
    free(table->entries);
    memset(table, 0, sizeof *table);
}

// ---------------------------------------------------------------------------------------
// Initialisation

enum { GPT_NEO_INITIAL_BLOCK = 4096 }; // elements drawn from one stream of random numbers

typedef struct GptNeoInitialization {
    const ParameterTable *table;
    uint64_t seed;
    float *parameters; // (parameter_count)
} GptNeoInitialization;

// One tensor, block after block.
static inline void gpt_neo_initialize_task(void *context, int task, int thread) {
    (void)thread;
    const GptNeoInitialization *work = (const GptNeoInitialization *)context;
    const ParameterInfo *entry = &work->table->entries[task];
    Random random;
    random.state = 0;
    for (size_t j = 0; j < entry->count; j++) {
        if (j % GPT_NEO_INITIAL_BLOCK == 0) {
            random.state = random_hash(random_hash(work->seed, (uint64_t)task), j / GPT_NEO_INITIAL_BLOCK);
        }
        float normal = entry->stddev > 0.0f ? (float)random_normal(&random) : 0.0f;
        work->parameters[entry->offset + j] = entry->stddev > 0.0f ? entry->stddev * normal : entry->fill;
    }
}

// Fills `parameters` (parameter_count). Each element is a function of the seed, the index
// of its tensor, its block of GPT_NEO_INITIAL_BLOCK elements and its place there, and of
// nothing else.
static inline void gpt_neo_initialize(const ParameterTable *table, uint64_t seed, ThreadPool *pool,
                                      float *parameters) {
    GptNeoInitialization work = {table, seed, parameters};
    thread_pool_run(pool, table->count, gpt_neo_initialize_task, &work);
}

// ---------------------------------------------------------------------------------------
// Operations

// The mean number of keys that a query sees in `layer` for sequences of T: (T+1)/2, or
// w - w(w-1)/(2T) with a window w < T.
static inline double gpt_neo_mean_keys(const GptNeoConfig *config, int layer, int T) {
    double w = config->local[layer] && config->window < T ? config->window : T;
    return w - w * (w - 1.0) / (2.0 * T);
}

// FLOPs of forward and backward for one token of a sequence of T: 6 for each element of a
// matrix that multiplies activations (wte as the LM head counts, looking up embeddings
// does not), and 6 * 2C for each key that a query sees.
static inline double gpt_neo_flops_per_token(const GptNeoConfig *config, int T) {
    double C = config->channels, keys = 0.0;
    double matrices =
        C * config->vocabulary + config->layers * (4.0 * C * C + 2.0 * C * config->mlp_channels);
    for (int l = 0; l < config->layers; l++) { keys += gpt_neo_mean_keys(config, l, T); }
    return 6.0 * matrices + 6.0 * keys * 2.0 * C;
}

#endif
