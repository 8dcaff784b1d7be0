// gpt_config.h: GPT-Neo on disk: its config.json, and the one table of its tensors.
//
// The query, key and value matrices (C, C) follow each other, so that one product with
// all of them, a (3C, C) matrix, computes all three; files keep the three names.
#ifndef ACCO_GPT_CONFIG_H
#define ACCO_GPT_CONFIG_H

#include "model.h"

// ---------------------------------------------------------------------------------------
// config.json

// Reads an integer in [1, maximum]. A `fallback` > 0 replaces a value that is absent or
// null.
static inline bool gpt_config_integer(const json_t *root, const char *path, const char *key, int fallback,
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

// Reads which layers are local from a list of kinds, one for each layer. key: where they
// come from.
static inline bool gpt_neo_config_kinds(const json_t *kinds, const char *path, const char *key,
                                        ModelConfig *config, Error *error) {
    int count = (int)json_array_size(kinds);
    for (int l = 0; l < count; l++) {
        const char *kind = json_string_value(json_array_get(kinds, (size_t)l));
        if (kind == NULL || (strcmp(kind, "global") != 0 && strcmp(kind, "local") != 0)) {
            return error_set(error, "%s: attention of a layer must be \"global\" or \"local\"", path);
        }
        if (l >= config->layers) {
            return error_set(error, "%s: attention is given for more than num_layers = %d layers", path,
                             config->layers);
        }
        config->local[l] = strcmp(kind, "local") == 0;
    }
    return count == config->layers || error_set(error, "%s: \"%s\" covers %d layers, but num_layers is %d",
                                                path, key, count, config->layers);
}

// Appends the kinds of "attention_types", [[[kind, ...], times], ...], to `kinds`: each
// list of them `times` times, but not many more than there are layers.
static inline bool gpt_neo_config_expand(const json_t *types, const char *path, int layers, json_t *kinds,
                                         Error *error) {
    for (size_t i = 0; i < json_array_size(types); i++) {
        const json_t *type = json_array_get(types, i), *times = json_array_get(type, 1);
        json_t *repeated = json_array_get(type, 0);
        if (json_array_size(repeated) == 0 || !json_is_integer(times) || json_integer_value(times) < 1) {
            return error_set(error, "%s: \"attention_types\" must look like [[[\"global\", \"local\"], %d]]",
                             path, layers / 2);
        }
        for (json_int_t t = 0; t < json_integer_value(times); t++) {
            if (json_array_size(kinds) > (size_t)layers) { break; }
            json_array_extend(kinds, repeated);
        }
    }
    return true;
}

// Reads which layers are local, from "attention_types" or "attention_layers", a flat list
// of kinds. A file may have both if they agree.
static inline bool gpt_neo_config_attention(const json_t *root, const char *path, ModelConfig *config,
                                            Error *error) {
    const json_t *types = json_object_get(root, "attention_types"),
                 *list = json_object_get(root, "attention_layers");
    if (types == NULL && list == NULL) {
        return error_set(error, "%s: \"attention_types\" is missing", path);
    }
    if (types == NULL) { return gpt_neo_config_kinds(list, path, "attention_layers", config, error); }
    json_t *kinds = json_array();
    bool good = gpt_neo_config_expand(types, path, config->layers, kinds, error) &&
                gpt_neo_config_kinds(kinds, path, "attention_types", config, error);
    if (good && list != NULL && !json_equal(kinds, list)) {
        good =
            error_set(error, "%s: \"attention_layers\" and \"attention_types\" contradict each other", path);
    }
    json_decref(kinds);
    return good;
}

// Refuses what is not supported. classifier_dropout is ignored: it belongs to a
// classification head, which a language model does not have.
static inline bool gpt_neo_config_read(const json_t *root, const char *path, ModelConfig *config,
                                       Error *error) {
    static const char *const dropouts[3] = {"attention_dropout", "embed_dropout", "resid_dropout"};
    const json_t *activation = json_object_get(root, "activation_function");
    for (int i = 0; i < 3; i++) {
        const json_t *item = json_object_get(root, dropouts[i]);
        if (item != NULL && !(json_is_number(item) && json_number_value(item) == 0.0)) {
            return error_set(error, "%s: \"%s\" must be 0: dropout is not supported", path, dropouts[i]);
        }
    }
    if (activation != NULL &&
        (!json_is_string(activation) || strcmp(json_string_value(activation), "gelu_new") != 0)) {
        return error_set(error, "%s: \"activation_function\" must be \"gelu_new\"", path);
    }
    if (json_is_false(json_object_get(root, "tie_word_embeddings"))) {
        return error_set(error, "%s: \"tie_word_embeddings\" must be true: the LM head is the embedding",
                         path);
    }
    const json_t *epsilon = json_object_get(root, "layer_norm_epsilon");
    config->epsilon = epsilon == NULL ? 1e-5f : (float)json_number_value(epsilon);
    if (!(config->epsilon > 0.0f && config->epsilon <= 0.1f)) {
        return error_set(error, "%s: \"layer_norm_epsilon\" must be a number above 0, at most 0.1", path);
    }
    if (!gpt_config_integer(root, path, "num_layers", 0, MODEL_MAX_LAYERS, &config->layers, error) ||
        !gpt_config_integer(root, path, "hidden_size", 0, 65536, &config->channels, error) ||
        !gpt_config_integer(root, path, "num_heads", 0, 65536, &config->heads, error) ||
        !gpt_config_integer(root, path, "intermediate_size", 4 * config->channels, 1 << 20,
                            &config->mlp_channels, error) ||
        !gpt_config_integer(root, path, "window_size", 256, 1 << 20, &config->window, error) ||
        !gpt_config_integer(root, path, "max_position_embeddings", 0, 1 << 20, &config->positions, error) ||
        !gpt_config_integer(root, path, "vocab_size", 0, 1 << 24, &config->vocabulary, error)) {
        return false;
    }
    if (config->channels % config->heads != 0) {
        return error_set(error, "%s: hidden_size %d must be a multiple of num_heads %d", path,
                         config->channels, config->heads);
    }
    return gpt_neo_config_attention(root, path, config, error);
}

static inline json_t *gpt_neo_config_write(const ModelConfig *config) {
    // The shortest decimal that is the same float: 1e-05, not 9.99999974737875e-06.
    char epsilon[32];
    for (int digits = 1; digits <= 9; digits++) {
        snprintf(epsilon, sizeof epsilon, "%.*g", digits, (double)config->epsilon);
        if (strtof(epsilon, NULL) == config->epsilon) { break; }
    }
    // attention_types is [[[kind, ...], times]], with the shortest list of kinds that
    // repeats.
    int period = 0, l;
    do {
        period++;
        for (l = period; l < config->layers && config->local[l] == config->local[l - period]; l++) {}
    } while (l < config->layers || config->layers % period != 0);
    json_t *kinds = json_array();
    for (l = 0; l < period; l++) {
        json_array_append_new(kinds, json_string(config->local[l] ? "local" : "global"));
    }
    json_t *types = json_pack("[[o,i]]", kinds, config->layers / period);
    return json_pack("{s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:o, s:s, s:f, s:f, s:f, s:f, s:f, s:b, s:b}",
                     "vocab_size", config->vocabulary, "max_position_embeddings", config->positions,
                     "hidden_size", config->channels, "num_layers", config->layers, "num_heads",
                     config->heads, "intermediate_size", config->mlp_channels, "window_size", config->window,
                     "attention_types", types, "activation_function", "gelu_new", "attention_dropout", 0.0,
                     "embed_dropout", 0.0, "resid_dropout", 0.0, "layer_norm_epsilon", strtod(epsilon, NULL),
                     "initializer_range", 0.02, "tie_word_embeddings", 1, "use_cache", 1);
}

// "h.3.attn.attention.bias" and "...masked_bias" are masks that old versions of
// transformers stored.
static inline bool gpt_is_constant(const char *name, const ModelConfig *config) {
    char *end;
    if (strncmp(name, "h.", 2) != 0 || name[2] < '0' || name[2] > '9') { return false; }
    long layer = strtol(name + 2, &end, 10);
    return layer < config->layers &&
           (strcmp(end, ".attn.attention.bias") == 0 || strcmp(end, ".attn.attention.masked_bias") == 0);
}

// ---------------------------------------------------------------------------------------
// The parameter table

// The table holds wte, wpe, then these tensors for each layer, then ln_f's weight and
// bias.
typedef enum GptTensor {
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
} GptTensor;

enum { GPT_WTE = PARAMETER_TOKEN_EMBEDDING, GPT_WPE = 1, GPT_FIRST_LAYER = 2 };

// The index of a layer's tensor in the table.
static inline int gpt_tensor(int layer, GptTensor tensor) {
    return GPT_FIRST_LAYER + layer * TENSORS_PER_LAYER + (int)tensor;
}

// ln_f's weight stands where a layer L would begin; its bias is the last tensor.
static inline int gpt_tensor_count(const ModelConfig *config) {
    return gpt_tensor(config->layers, TENSOR_LN_1_WEIGHT) + 2;
}

static inline void gpt_parameter_table(const ModelConfig *config, ParameterTable *table) {
    static const char outside[] = "transformer.";
    int C = config->channels, F = config->mlp_channels;
    memset(table, 0, sizeof *table);
    table->entries = (ParameterInfo *)calloc((size_t)gpt_tensor_count(config), sizeof *table->entries);
    assert(table->entries != NULL);
    parameter_table_add(table, outside, "wte.weight", config->vocabulary, C, 0.0f);
    parameter_table_add(table, outside, "wpe.weight", config->positions, C, 0.0f);
    for (int l = 0; l < config->layers; l++) {
        char layer[32];
        snprintf(layer, sizeof layer, "%sh.%d.", outside, l);
        table->layer_begins[l] = table->parameter_count;
        parameter_table_add(table, layer, "ln_1.weight", C, 0, 1.0f);
        parameter_table_add(table, layer, "ln_1.bias", C, 0, 0.0f);
        parameter_table_add(table, layer, "attn.attention.q_proj.weight", C, C, 0.0f);
        parameter_table_add(table, layer, "attn.attention.k_proj.weight", C, C, 0.0f);
        parameter_table_add(table, layer, "attn.attention.v_proj.weight", C, C, 0.0f);
        parameter_table_add(table, layer, "attn.attention.out_proj.weight", C, C, 0.0f);
        parameter_table_add(table, layer, "attn.attention.out_proj.bias", C, 0, 0.0f);
        parameter_table_add(table, layer, "ln_2.weight", C, 0, 1.0f);
        parameter_table_add(table, layer, "ln_2.bias", C, 0, 0.0f);
        parameter_table_add(table, layer, "mlp.c_fc.weight", F, C, 0.0f);
        parameter_table_add(table, layer, "mlp.c_fc.bias", F, 0, 0.0f);
        parameter_table_add(table, layer, "mlp.c_proj.weight", C, F, 0.0f);
        parameter_table_add(table, layer, "mlp.c_proj.bias", C, 0, 0.0f);
    }
    parameter_table_end_layers(table, config->layers);
    parameter_table_add(table, outside, "ln_f.weight", C, 0, 1.0f);
    parameter_table_add(table, outside, "ln_f.bias", C, 0, 0.0f);
    assert(table->count == gpt_tensor_count(config));
}

#endif
