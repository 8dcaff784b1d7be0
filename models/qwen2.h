// qwen2.h: Qwen2 and Qwen2.5: a Llama (llama.h) with biases of queries, keys and values, and with a
// window in some layers.
//
//   q, k, v = W_qkv RMSNorm_1(x) + b_qkv
//
// With use_sliding_window the layers from max_window_layers on see a window of keys, or those that
// layer_types names.
#pragma once

#include "models/llama.h"

static const ConfigKey qwen2_keys[MODEL_ROWS] = {
    LLAMA_KEYS(32, CONFIG_OPEN),
    {"attention_bias", NULL, CONFIG_FIXED, MEMBER(qkv_biases), 0, true},
};

static inline bool qwen2_accept(const json_t *root, const char *path, ModelConfig *config, Error *error) {
    const json_t *types = json_object_get(root, "layer_types"),
                 *from = json_object_get(root, "max_window_layers");
    bool listed = types != NULL && !json_is_null(types),
         good = !listed || json_array_size(types) == (size_t)config->layers;
    json_int_t first = json_is_integer(from) ? json_integer_value(from) : 28;
    if (!llama_read_window(root, path, config, error)) { return false; }
    if (!json_is_true(json_object_get(root, "use_sliding_window"))) { config->window = 0; }
    for (int l = 0; l < config->layers && good; l++) {
        const char *type = json_string_value(json_array_get(types, (size_t)l));
        bool sliding = listed ? type != NULL && strcmp(type, "sliding_attention") == 0 : l >= first;
        good = !listed || sliding || (type != NULL && strcmp(type, "full_attention") == 0);
        config->local[l] = sliding && config->window > 0;
    }
    return (good || error_set(error,
                              "%s: \"layer_types\" must have \"full_attention\" or \"sliding_attention\" for "
                              "each of %d layers",
                              path, config->layers)) &&
           llama_accept(root, path, config, error);
}

static inline void qwen2_write(json_t *root, const ModelConfig *config) {
    json_t *types = json_array();
    int first = config->layers;
    for (int l = config->layers - 1; l >= 0; l--) {
        first = config->local[l] ? l : first;
        json_array_insert_new(types, 0,
                              json_string(config->local[l] ? "sliding_attention" : "full_attention"));
    }
    llama_write_window(root, config);
    json_object_set_new(root, "use_sliding_window", json_boolean(config->window > 0));
    json_object_set_new(root, "max_window_layers", json_integer(first));
    json_object_set_new(root, "layer_types", types);
}

static const ModelFamily qwen2_family =
    LLAMA_FAMILY("qwen2", "Qwen2ForCausalLM", qwen2_keys, qwen2_accept, qwen2_write, "qwen2", false);
