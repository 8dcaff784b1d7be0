// gpt2.h: GPT-2.
//
//   x = wte[token] + wpe[position]
//   in each layer, with heads of D channels:
//     q, k, v = W_qkv LayerNorm_1(x) + b_qkv
//     x = x + W_out attention(q / sqrt(D), k, v) + b_out      causal
//     x = x + W_proj gelu(W_fc LayerNorm_2(x) + b_fc) + b_proj
//   logits = wte LayerNorm_f(x)
//
// Files hold the matrices of layers as (in, out), and queries, keys and values in one.
#pragma once

#include "models/config_json.h"

static const TensorRow gpt2_tensors[MODEL_ROWS] = {
    {"wte.weight", TENSOR_EMBEDDING, DIM_V, DIM_C, ROW_HEAD, 0},
    {"wpe.weight", TENSOR_POSITIONS, DIM_POSITIONS, DIM_C, 0, 0},
    {"h.N.ln_1.weight", TENSOR_NORM_1, DIM_C, 0, 0, 0},
    {"h.N.ln_1.bias", TENSOR_NORM_1_BIAS, DIM_C, 0, 0, 0},
    {"h.N.attn.c_attn.weight", TENSOR_Q, DIM_QKV, DIM_C, ROW_TURNED | ROW_STACKED, 0},
    {"h.N.attn.c_attn.bias", TENSOR_QKV_BIAS, DIM_QKV, 0, 0, 0},
    {"h.N.attn.c_proj.weight", TENSOR_OUT, DIM_C, DIM_HEADS, ROW_TURNED | ROW_SMALLER, 0},
    {"h.N.attn.c_proj.bias", TENSOR_OUT_BIAS, DIM_C, 0, 0, 0},
    {"h.N.ln_2.weight", TENSOR_NORM_2, DIM_C, 0, 0, 0},
    {"h.N.ln_2.bias", TENSOR_NORM_2_BIAS, DIM_C, 0, 0, 0},
    {"h.N.mlp.c_fc.weight", TENSOR_UP, DIM_F, DIM_C, ROW_TURNED, 0},
    {"h.N.mlp.c_fc.bias", TENSOR_UP_BIAS, DIM_F, 0, 0, 0},
    {"h.N.mlp.c_proj.weight", TENSOR_DOWN, DIM_C, DIM_F, ROW_TURNED | ROW_SMALLER, 0},
    {"h.N.mlp.c_proj.bias", TENSOR_DOWN_BIAS, DIM_C, 0, 0, 0},
    {"ln_f.weight", TENSOR_NORM_1, DIM_C, 0, 0, 0},
    {"ln_f.bias", TENSOR_NORM_1_BIAS, DIM_C, 0, 0, 0},
};

static const ConfigKey gpt2_keys[MODEL_ROWS] = {
    {"n_layer", "num_hidden_layers", CONFIG_COUNT, MEMBER(layers), MODEL_MAX_LAYERS, CONFIG_NEEDED},
    {"n_embd", "hidden_size", CONFIG_COUNT, MEMBER(channels), 65536, CONFIG_NEEDED},
    {"n_head", "num_attention_heads", CONFIG_COUNT, MEMBER(heads), 65536, CONFIG_NEEDED},
    {"n_inner", NULL, CONFIG_COUNT, MEMBER(mlp_channels), 1 << 20, CONFIG_OPEN},
    {"n_positions", "max_position_embeddings", CONFIG_COUNT, MEMBER(positions), 1 << 20, CONFIG_NEEDED},
    {"vocab_size", NULL, CONFIG_COUNT, MEMBER(vocabulary), 1 << 24, CONFIG_NEEDED},
    {"activation_function", NULL, CONFIG_GELU, 0, 0, 0},
    {"attn_pdrop", NULL, CONFIG_DROPOUT, MEMBER(dropout), 0, 0},
    {"embd_pdrop", NULL, CONFIG_DROPOUT, MEMBER(dropout), 0, 0},
    {"resid_pdrop", NULL, CONFIG_DROPOUT, MEMBER(dropout), 0, 0},
    {"layer_norm_epsilon", NULL, CONFIG_NUMBER, MEMBER(epsilon), 0, 1e-5},
    {"scale_attn_weights", NULL, CONFIG_FLAG, MEMBER(scaled_scores), 0, true},
    {"tie_word_embeddings", "the LM head is the embedding", CONFIG_TRUE, 0, 0, 0},
};

static inline bool gpt2_accept(const json_t *root, const char *path, ModelConfig *config, Error *error) {
    return config_json_accept_heads(path, "n_embd", "n_head", config, error) &&
           (!json_is_true(json_object_get(root, "scale_attn_by_inverse_layer_idx")) ||
            error_set(error, "%s: \"scale_attn_by_inverse_layer_idx\" must be false", path));
}

// n_ctx: llama.cpp's converter asks for it.
static inline void gpt2_write(json_t *root, const ModelConfig *config) {
    json_object_set_new(root, "n_ctx", json_integer(config->positions));
}

static const ModelFamily gpt2_family = {
    .name = "gpt2",
    .architecture = "GPT2LMHeadModel",
    .prefix = "transformer.",
    .constants = {"h.N.attn.bias", "h.N.attn.masked_bias"},
    .gguf = "gpt2",
    .tensors = gpt2_tensors,
    .keys = gpt2_keys,
    .accept = gpt2_accept,
    .write = gpt2_write,
};
