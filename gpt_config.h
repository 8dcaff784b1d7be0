// gpt_config.h: GPT-Neo and GPT-2 on disk: their config.json, and the one table of their
// tensors.
//
// The query, key and value matrices (C, C) follow each other, so that one product with a
// (3C, C) matrix computes all three. Files of GPT-Neo have three tensors. Those of GPT-2
// have one, transposed as all its matrices in layers are; Muon steps its three parts.
#pragma once

#include "model.h"

// ---- config.json ----------------------------------------------------------------------

// Reads an integer in [1, maximum]. keys: its name, and another that transformers takes, or NULL. A
// `fallback` > 0 replaces a value that is absent or null.
static inline bool gpt_config_integer(const json_t *root, const char *path, const char *const keys[2],
                                      int fallback, int maximum, int *value, Error *error) {
    const char *key =
        keys[1] != NULL && json_object_get(root, keys[0]) == NULL && json_object_get(root, keys[1]) != NULL
            ? keys[1]
            : keys[0];
    const json_t *item = json_object_get(root, key);
    if ((item == NULL || json_is_null(item)) && fallback > 0) {
        *value = fallback;
        return true;
    }
    if (item == NULL) { return error_set(error, "%s: \"%s\" is not given", path, key); }
    if (!json_is_integer(item) || json_integer_value(item) < 1 || json_integer_value(item) > maximum) {
        return error_set(error, "%s: \"%s\" must be a whole number from 1 to %d", path, key, maximum);
    }
    *value = (int)json_integer_value(item);
    return true;
}

// Reads which layers are local: "attention_types" is [[[kind, ...], times], ...], each list of
// kinds `times` times; "attention_layers" has a kind for each layer. A file may have both if
// they agree.
static inline bool gpt_neo_config_attention(const json_t *root, const char *path, ModelConfig *config,
                                            Error *error) {
    const json_t *types = json_object_get(root, "attention_types"),
                 *list = json_object_get(root, "attention_layers");
    json_t *kinds = types == NULL ? json_copy((json_t *)list) : json_array();
    int layers = config->layers;
    for (size_t i = 0; i < json_array_size(types); i++) {
        const json_t *type = json_array_get(types, i);
        json_int_t times = json_integer_value(json_array_get(type, 1));
        for (json_int_t t = 0; t < times && t <= layers; t++) { // more are too many in any case
            json_array_extend(kinds, json_array_get(type, 0));
        }
    }
    bool good = json_array_size(kinds) == (size_t)layers;
    for (int l = 0; good && l < layers; l++) {
        const char *kind = json_string_value(json_array_get(kinds, (size_t)l));
        config->local[l] = kind != NULL && strcmp(kind, "local") == 0;
        good = config->local[l] || (kind != NULL && strcmp(kind, "global") == 0);
    }
    if (!good) {
        error_set(error,
                  "%s: \"attention_types\" must look like [[[\"global\", \"local\"], %d]], with a kind for "
                  "each of num_layers = %d layers",
                  path, layers / 2, layers);
    } else if (list != NULL && !json_equal(kinds, list)) {
        good =
            error_set(error, "%s: \"attention_layers\" and \"attention_types\" contradict each other", path);
    }
    json_decref(kinds);
    return good;
}

// The members of config.json that each family names in its own way, and the names by which
// transformers knows them in every family.
typedef struct GptKeys {
    const char *layers[2], *channels[2], *heads[2], *mlp_channels[2], *positions[2], *dropouts[3];
} GptKeys;

static const GptKeys gpt_neo_keys = {
    {"num_layers", "num_hidden_layers"},  {"hidden_size", NULL},
    {"num_heads", "num_attention_heads"}, {"intermediate_size", NULL},
    {"max_position_embeddings", NULL},    {"attention_dropout", "embed_dropout", "resid_dropout"}};
static const GptKeys gpt2_keys = {
    {"n_layer", "num_hidden_layers"},           {"n_embd", "hidden_size"},
    {"n_head", "num_attention_heads"},          {"n_inner", NULL},
    {"n_positions", "max_position_embeddings"}, {"attn_pdrop", "embd_pdrop", "resid_pdrop"}};
static const char *const gpt_vocabulary_keys[2] = {"vocab_size", NULL};

// Reads what both families have, and refuses what is not supported. What belongs to a
// head other than a language model's is ignored (classifier_dropout, summary_...), and so is
// dropout, which the published files ask for and nobody who fine-tunes them uses.
static inline bool gpt_config_read(const json_t *root, const char *path, const GptKeys *keys,
                                   ModelConfig *config, Error *error) {
    const char *activation = json_string_value(json_object_get(root, "activation_function"));
    for (int i = 0; i < 3; i++) {
        config->dropout = fmax(config->dropout, json_number_value(json_object_get(root, keys->dropouts[i])));
    }
    bool is_gelu = activation != NULL && (strcmp(activation, "gelu_new") == 0 ||
                                          strcmp(activation, "gelu_pytorch_tanh") == 0); // the same function
    if (json_object_get(root, "activation_function") != NULL && !is_gelu) {
        return error_set(error, "%s: \"activation_function\" must be \"gelu_new\" or \"gelu_pytorch_tanh\"",
                         path);
    }
    if (json_is_false(json_object_get(root, "tie_word_embeddings"))) {
        return error_set(error, "%s: \"tie_word_embeddings\" must be true: the LM head is the embedding",
                         path);
    }
    const json_t *epsilon = json_object_get(root, "layer_norm_epsilon");
    char digits[32]; // as many as config.json gets
    snprintf(digits, sizeof digits, "%.9g", epsilon == NULL ? 1e-5 : json_number_value(epsilon));
    config->epsilon = strtod(digits, NULL);
    if (!((float)config->epsilon > 0.0f && config->epsilon <= 0.1)) {
        return error_set(error, "%s: \"layer_norm_epsilon\" must be a number above 0, at most 0.1", path);
    }
    if (!gpt_config_integer(root, path, keys->layers, 0, MODEL_MAX_LAYERS, &config->layers, error) ||
        !gpt_config_integer(root, path, keys->channels, 0, 65536, &config->channels, error) ||
        !gpt_config_integer(root, path, keys->heads, 0, 65536, &config->heads, error) ||
        !gpt_config_integer(root, path, keys->mlp_channels, 4 * config->channels, 1 << 20,
                            &config->mlp_channels, error) ||
        !gpt_config_integer(root, path, keys->positions, 0, 1 << 20, &config->positions, error) ||
        !gpt_config_integer(root, path, gpt_vocabulary_keys, 0, 1 << 24, &config->vocabulary, error)) {
        return false;
    }
    return config->channels % config->heads == 0 ||
           error_set(error, "%s: %s %d must be a multiple of %s %d", path, keys->channels[0],
                     config->channels, keys->heads[0], config->heads);
}

static inline bool gpt_neo_config_read(const json_t *root, const char *path, ModelConfig *config,
                                       Error *error) {
    static const char *const window[2] = {"window_size", NULL};
    return gpt_config_read(root, path, &gpt_neo_keys, config, error) &&
           gpt_config_integer(root, path, window, 256, 1 << 20, &config->window, error) &&
           gpt_neo_config_attention(root, path, config, error);
}

// reorder_and_upcast_attn is ignored, because scores are fp32 in any case.
static inline bool gpt2_config_read(const json_t *root, const char *path, ModelConfig *config, Error *error) {
    config->qkv_biases = true;
    config->scaled_scores = !json_is_false(json_object_get(root, "scale_attn_weights"));
    return gpt_config_read(root, path, &gpt2_keys, config, error) &&
           (!json_is_true(json_object_get(root, "scale_attn_by_inverse_layer_idx")) ||
            error_set(error, "%s: \"scale_attn_by_inverse_layer_idx\" must be false", path));
}

// The members that gpt_config_read reads, and what transformers asks for beside them.
static inline json_t *gpt_config_write(const ModelConfig *config, const GptKeys *keys) {
    return json_pack("{s:i, s:i, s:i, s:i, s:i, s:i, s:s, s:f, s:f, s:f, s:f, s:f, s:b, s:b}", "vocab_size",
                     config->vocabulary, keys->positions[0], config->positions, keys->channels[0],
                     config->channels, keys->layers[0], config->layers, keys->heads[0], config->heads,
                     keys->mlp_channels[0], config->mlp_channels, "activation_function", "gelu_new",
                     keys->dropouts[0], config->dropout, keys->dropouts[1], config->dropout,
                     keys->dropouts[2], config->dropout, "layer_norm_epsilon", config->epsilon,
                     "initializer_range", 0.02, "tie_word_embeddings", 1, "use_cache", 1);
}

static inline json_t *gpt_neo_config_write(const ModelConfig *config) {
    // attention_types is [[[kind, ...], times]], with the shortest list of kinds that repeats.
    int period = 0, l;
    do {
        period++;
        for (l = period; l < config->layers && config->local[l] == config->local[l - period]; l++) {}
    } while (l < config->layers || config->layers % period != 0);
    json_t *root = gpt_config_write(config, &gpt_neo_keys), *kinds = json_array();
    for (l = 0; l < period; l++) {
        json_array_append_new(kinds, json_string(config->local[l] ? "local" : "global"));
    }
    json_object_set_new(root, "window_size", json_integer(config->window));
    json_object_set_new(root, "attention_types", json_pack("[[o,i]]", kinds, config->layers / period));
    return root;
}

// n_ctx: llama.cpp's converter asks for it.
static inline json_t *gpt2_config_write(const ModelConfig *config) {
    json_t *root = gpt_config_write(config, &gpt2_keys);
    json_object_set_new(root, "n_ctx", json_integer(config->positions));
    json_object_set_new(root, "scale_attn_weights", json_boolean(config->scaled_scores));
    return root;
}

// Masks that old versions of transformers stored: "h.3.attn.attention.bias" and
// "...masked_bias", in GPT-2 "h.3.attn.bias".
static inline bool gpt_is_constant(const char *name, const ModelConfig *config) {
    char *end;
    if (strncmp(name, "h.", 2) != 0 || name[2] < '0' || name[2] > '9') { return false; }
    long layer = strtol(name + 2, &end, 10);
    const char *inner = config->qkv_biases ? ".attn." : ".attn.attention.";
    size_t length = strlen(inner);
    return layer < config->layers && strncmp(end, inner, length) == 0 &&
           (strcmp(end + length, "bias") == 0 || strcmp(end + length, "masked_bias") == 0);
}

// ---- The parameter table --------------------------------------------------------------

// The table holds wte, wpe, then for each layer those of these tensors that the family
// has, then ln_f's weight and bias.
typedef enum GptTensor {
    TENSOR_LN_1_WEIGHT,
    TENSOR_LN_1_BIAS,
    TENSOR_Q, // in GPT-2 all three
    TENSOR_K,
    TENSOR_V,
    TENSOR_QKV_BIAS, // in GPT-2
    TENSOR_OUT_WEIGHT,
    TENSOR_OUT_BIAS,
    TENSOR_LN_2_WEIGHT,
    TENSOR_LN_2_BIAS,
    TENSOR_FC_WEIGHT,
    TENSOR_FC_BIAS,
    TENSOR_PROJ_WEIGHT,
    TENSOR_PROJ_BIAS,
    TENSORS_PER_LAYER
} GptTensor;

enum { GPT_WTE = PARAMETER_TOKEN_EMBEDDING, GPT_WPE = 1, GPT_FIRST_LAYER = 2 };

// The role (ParameterInfo) of a layer's tensor. ln_f's weight and bias stand where a layer L
// would begin.
static inline int gpt_tensor(int layer, GptTensor tensor) {
    return GPT_FIRST_LAYER + layer * TENSORS_PER_LAYER + (int)tensor;
}

// The tensors of layer l. GPT-2's matrices that end a branch begin smaller by the root of the
// number of branches, as its authors begin them.
static inline void gpt_parameter_table_layer(const ModelConfig *config, ParameterTable *table, int l) {
    int C = config->channels, F = config->mlp_channels, gpt2 = config->qkv_biases;
    float deviation = INITIAL_DEVIATION,
          last = gpt2 ? INITIAL_DEVIATION / sqrtf(2.0f * (float)config->layers) : INITIAL_DEVIATION;
    const struct {
        const char *names[2]; // in GPT-Neo, in GPT-2; NULL: it has none
        int rows, columns;
        float fill;
    } tensors[TENSORS_PER_LAYER] = {
        {{"ln_1.weight", "ln_1.weight"}, C, 0, 1.0f},
        {{"ln_1.bias", "ln_1.bias"}, C, 0, 0.0f},
        {{"attn.attention.q_proj.weight", "attn.c_attn.weight"}, gpt2 ? 3 * C : C, C, deviation},
        {{"attn.attention.k_proj.weight", NULL}, C, C, deviation},
        {{"attn.attention.v_proj.weight", NULL}, C, C, deviation},
        {{NULL, "attn.c_attn.bias"}, 3 * C, 0, 0.0f},
        {{"attn.attention.out_proj.weight", "attn.c_proj.weight"}, C, C, last},
        {{"attn.attention.out_proj.bias", "attn.c_proj.bias"}, C, 0, 0.0f},
        {{"ln_2.weight", "ln_2.weight"}, C, 0, 1.0f},
        {{"ln_2.bias", "ln_2.bias"}, C, 0, 0.0f},
        {{"mlp.c_fc.weight", "mlp.c_fc.weight"}, F, C, deviation},
        {{"mlp.c_fc.bias", "mlp.c_fc.bias"}, F, 0, 0.0f},
        {{"mlp.c_proj.weight", "mlp.c_proj.weight"}, C, F, last},
        {{"mlp.c_proj.bias", "mlp.c_proj.bias"}, C, 0, 0.0f},
    };
    char layer[32];
    snprintf(layer, sizeof layer, "transformer.h.%d.", l);
    table->layer_begins[l] = table->parameter_count;
    for (int t = 0; t < TENSORS_PER_LAYER; t++) {
        const char *name = tensors[t].names[gpt2];
        if (name == NULL) { continue; }
        ParameterInfo *entry =
            parameter_table_add(table, layer, name, tensors[t].rows, tensors[t].columns, tensors[t].fill);
        entry->role = gpt_tensor(l, (GptTensor)t);
        entry->is_transposed = gpt2 && entry->is_matrix;
        entry->stacked = gpt2 && t == TENSOR_Q ? 3 : 1;
        entry->joins_before = t == TENSOR_K || t == TENSOR_V;
    }
}

static inline void gpt_parameter_table(const ModelConfig *config, ParameterTable *table) {
    static const char outside[] = "transformer.";
    int C = config->channels, L = config->layers;
    memset(table, 0, sizeof *table);
    table->entries =
        (ParameterInfo *)memory_take((size_t)gpt_tensor(L, TENSORS_PER_LAYER), sizeof *table->entries);
    parameter_table_add(table, outside, "wte.weight", config->vocabulary, C, INITIAL_DEVIATION);
    parameter_table_add(table, outside, "wpe.weight", config->positions, C, INITIAL_DEVIATION)->role =
        GPT_WPE;
    for (int l = 0; l < L; l++) { gpt_parameter_table_layer(config, table, l); }
    parameter_table_end_layers(table, L);
    parameter_table_add(table, outside, "ln_f.weight", C, 0, 1.0f)->role = gpt_tensor(L, TENSOR_LN_1_WEIGHT);
    parameter_table_add(table, outside, "ln_f.bias", C, 0, 0.0f)->role = gpt_tensor(L, TENSOR_LN_1_BIAS);
}
