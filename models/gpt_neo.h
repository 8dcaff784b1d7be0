// gpt_neo.h: GPT-Neo.
//
//   x = wte[token] + wpe[position]
//   in each layer:
//     q, k, v = W_qkv LayerNorm_1(x)
//     x = x + W_out attention(q, k, v) + b_out      causal; in local layers within a window
//     x = x + W_proj gelu(W_fc LayerNorm_2(x) + b_fc) + b_proj
//   logits = wte LayerNorm_f(x)
//
// W_qkv is three tensors, one behind the other.
#pragma once

#include "models/config_json.h"

static const TensorRow gpt_neo_tensors[MODEL_ROWS] = {
    {"wte.weight", TENSOR_EMBEDDING, DIM_V, DIM_C, ROW_HEAD, 0},
    {"wpe.weight", TENSOR_POSITIONS, DIM_POSITIONS, DIM_C, 0, 0},
    {"h.N.ln_1.weight", TENSOR_NORM_1, DIM_C, 0, 0, 0},
    {"h.N.ln_1.bias", TENSOR_NORM_1_BIAS, DIM_C, 0, 0, 0},
    {"h.N.attn.attention.q_proj.weight", TENSOR_Q, DIM_HEADS, DIM_C, 0, 0},
    {"h.N.attn.attention.k_proj.weight", TENSOR_K, DIM_HEADS, DIM_C, ROW_JOINS, 0},
    {"h.N.attn.attention.v_proj.weight", TENSOR_V, DIM_HEADS, DIM_C, ROW_JOINS, 0},
    {"h.N.attn.attention.out_proj.weight", TENSOR_OUT, DIM_C, DIM_HEADS, 0, 0},
    {"h.N.attn.attention.out_proj.bias", TENSOR_OUT_BIAS, DIM_C, 0, 0, 0},
    {"h.N.ln_2.weight", TENSOR_NORM_2, DIM_C, 0, 0, 0},
    {"h.N.ln_2.bias", TENSOR_NORM_2_BIAS, DIM_C, 0, 0, 0},
    {"h.N.mlp.c_fc.weight", TENSOR_UP, DIM_F, DIM_C, 0, 0},
    {"h.N.mlp.c_fc.bias", TENSOR_UP_BIAS, DIM_F, 0, 0, 0},
    {"h.N.mlp.c_proj.weight", TENSOR_DOWN, DIM_C, DIM_F, 0, 0},
    {"h.N.mlp.c_proj.bias", TENSOR_DOWN_BIAS, DIM_C, 0, 0, 0},
    {"ln_f.weight", TENSOR_NORM_1, DIM_C, 0, 0, 0},
    {"ln_f.bias", TENSOR_NORM_1_BIAS, DIM_C, 0, 0, 0},
};

static const ConfigKey gpt_neo_keys[MODEL_ROWS] = {
    {"num_layers", "num_hidden_layers", CONFIG_COUNT, MEMBER(layers), MODEL_MAX_LAYERS, CONFIG_NEEDED},
    {"hidden_size", NULL, CONFIG_COUNT, MEMBER(channels), 65536, CONFIG_NEEDED},
    {"num_heads", "num_attention_heads", CONFIG_COUNT, MEMBER(heads), 65536, CONFIG_NEEDED},
    {"intermediate_size", NULL, CONFIG_COUNT, MEMBER(mlp_channels), 1 << 20, CONFIG_OPEN},
    {"max_position_embeddings", NULL, CONFIG_COUNT, MEMBER(positions), 1 << 20, CONFIG_NEEDED},
    {"vocab_size", NULL, CONFIG_COUNT, MEMBER(vocabulary), 1 << 24, CONFIG_NEEDED},
    {"window_size", NULL, CONFIG_COUNT, MEMBER(window), 1 << 20, 256},
    {"activation_function", NULL, CONFIG_GELU, 0, 0, 0},
    {"attention_dropout", NULL, CONFIG_DROPOUT, MEMBER(dropout), 0, 0},
    {"embed_dropout", NULL, CONFIG_DROPOUT, MEMBER(dropout), 0, 0},
    {"resid_dropout", NULL, CONFIG_DROPOUT, MEMBER(dropout), 0, 0},
    {"layer_norm_epsilon", NULL, CONFIG_NUMBER, MEMBER(epsilon), 0, 1e-5},
    {"tie_word_embeddings", "the LM head is the embedding", CONFIG_TRUE, 0, 0, 0},
};

// Reads which layers are local: "attention_types" is [[[kind, ...], times], ...], each list of
// kinds `times` times; "attention_layers" has a kind for each layer. A file may have both if
// they agree.
static inline bool gpt_neo_read_attention(const json_t *root, const char *path, ModelConfig *config,
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
        bool even = layers % 2 == 0; // the example must fit, too
        error_set(error,
                  "%s: \"attention_types\" must look like [[[\"global\"%s], %d]], with a kind for each of "
                  "num_layers = %d layers",
                  path, even ? ", \"local\"" : "", even ? layers / 2 : layers, layers);
    } else if (list != NULL && !json_equal(kinds, list)) {
        good =
            error_set(error, "%s: \"attention_layers\" and \"attention_types\" contradict each other", path);
    }
    json_decref(kinds);
    return good;
}

static inline bool gpt_neo_accept(const json_t *root, const char *path, ModelConfig *config, Error *error) {
    return config_json_accept_heads(path, "hidden_size", "num_heads", config, error) &&
           gpt_neo_read_attention(root, path, config, error);
}

// attention_types: with the shortest list of kinds that repeats.
static inline void gpt_neo_write(json_t *root, const ModelConfig *config) {
    int period = 0, l;
    do {
        period++;
        for (l = period; l < config->layers && config->local[l] == config->local[l - period]; l++) {}
    } while (l < config->layers || config->layers % period != 0);
    json_t *kinds = json_array();
    for (l = 0; l < period; l++) {
        json_array_append_new(kinds, json_string(config->local[l] ? "local" : "global"));
    }
    json_object_set_new(root, "attention_types", json_pack("[[o,i]]", kinds, config->layers / period));
}

static const ModelFamily gpt_neo_family = {
    .name = "gpt_neo",
    .architecture = "GPTNeoForCausalLM",
    .prefix = "transformer.",
    .constants = {"h.N.attn.attention.bias", "h.N.attn.attention.masked_bias"},
    .tensors = gpt_neo_tensors,
    .keys = gpt_neo_keys,
    .accept = gpt_neo_accept,
    .write = gpt_neo_write,
};
