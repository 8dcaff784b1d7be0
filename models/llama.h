// llama.h: Llama (2, 3, and SmolLM2, TinyLlama), and Mistral, which differs in its window.
//
//   x = embed_tokens[token]
//   in each layer, with H heads of queries and KV of keys and values, of D channels:
//     q, k, v = W_qkv RMSNorm_1(x)                                      + b_qkv, if attention_bias
//     x = x + W_o attention(rotate(q) / sqrt(D), rotate(k), v)          causal; + b_o, if attention_bias
//     x = x + W_down (silu(g) u) with g, u = W_gate, W_up RMSNorm_2(x)  + biases, if mlp_bias
//   logits = W_head RMSNorm(x); W_head is the embedding, if tie_word_embeddings
// Qwen's pages (qwen2.h, qwen3.h) have the same rows: which of them there are differs.
#pragma once

#include "models/positions.h"

static const TensorRow llama_tensors[MODEL_ROWS] = {
    {"embed_tokens.weight", TENSOR_EMBEDDING, DIM_V, DIM_C, ROW_HEAD, 0},
    {"layers.N.input_layernorm.weight", TENSOR_NORM_1, DIM_C, 0, 0, 0},
    {"layers.N.self_attn.q_proj.weight", TENSOR_Q, DIM_HEADS, DIM_C, 0, 0},
    {"layers.N.self_attn.k_proj.weight", TENSOR_K, DIM_KV, DIM_C, ROW_JOINS, 0},
    {"layers.N.self_attn.v_proj.weight", TENSOR_V, DIM_KV, DIM_C, ROW_JOINS, 0},
    {"layers.N.self_attn.q_proj.bias", TENSOR_QKV_BIAS, DIM_HEADS, 0, 0, MEMBER(qkv_biases)},
    {"layers.N.self_attn.k_proj.bias", TENSOR_K_BIAS, DIM_KV, 0, ROW_JOINS, MEMBER(qkv_biases)},
    {"layers.N.self_attn.v_proj.bias", TENSOR_V_BIAS, DIM_KV, 0, ROW_JOINS, MEMBER(qkv_biases)},
    {"layers.N.self_attn.q_norm.weight", TENSOR_Q_NORM, DIM_D, 0, 0, MEMBER(head_norms)},
    {"layers.N.self_attn.k_norm.weight", TENSOR_K_NORM, DIM_D, 0, 0, MEMBER(head_norms)},
    {"layers.N.self_attn.o_proj.weight", TENSOR_OUT, DIM_C, DIM_HEADS, 0, 0},
    {"layers.N.self_attn.o_proj.bias", TENSOR_OUT_BIAS, DIM_C, 0, 0, MEMBER(out_biases)},
    {"layers.N.post_attention_layernorm.weight", TENSOR_NORM_2, DIM_C, 0, 0, 0},
    {"layers.N.mlp.gate_proj.weight", TENSOR_UP, DIM_F, DIM_C, 0, 0},
    {"layers.N.mlp.up_proj.weight", TENSOR_GATED_UP, DIM_F, DIM_C, ROW_JOINS, 0},
    {"layers.N.mlp.gate_proj.bias", TENSOR_UP_BIAS, DIM_F, 0, 0, MEMBER(mlp_biases)},
    {"layers.N.mlp.up_proj.bias", TENSOR_GATED_UP_BIAS, DIM_F, 0, ROW_JOINS, MEMBER(mlp_biases)},
    {"layers.N.mlp.down_proj.weight", TENSOR_DOWN, DIM_C, DIM_F, 0, 0},
    {"layers.N.mlp.down_proj.bias", TENSOR_DOWN_BIAS, DIM_C, 0, 0, MEMBER(mlp_biases)},
    {"norm.weight", TENSOR_NORM_1, DIM_C, 0, 0, 0},
    {"lm_head.weight", TENSOR_HEAD, DIM_V, DIM_C, ROW_HEAD | ROW_BARE | ROW_UNLESS, MEMBER(tied)},
};

// The keys that all four families have, with what stands for the key that is absent.
#define LLAMA_KEYS(kv, head) \
    {"num_hidden_layers", NULL, CONFIG_COUNT, MEMBER(layers), MODEL_MAX_LAYERS, CONFIG_NEEDED}, \
        {"hidden_size", NULL, CONFIG_COUNT, MEMBER(channels), 65536, CONFIG_NEEDED}, \
        {"num_attention_heads", NULL, CONFIG_COUNT, MEMBER(heads), 65536, CONFIG_NEEDED}, \
        {"num_key_value_heads", NULL, CONFIG_COUNT, MEMBER(kv_heads), 65536, kv}, \
        {"head_dim", NULL, CONFIG_COUNT, MEMBER(head_channels), 1024, head}, \
        {"intermediate_size", NULL, CONFIG_COUNT, MEMBER(mlp_channels), 1 << 20, CONFIG_NEEDED}, \
        {"max_position_embeddings", NULL, CONFIG_COUNT, MEMBER(positions), 1 << 24, CONFIG_NEEDED}, \
        {"vocab_size", NULL, CONFIG_COUNT, MEMBER(vocabulary), 1 << 24, CONFIG_NEEDED}, \
        {"hidden_act", NULL, CONFIG_SILU, 0, 0, 0}, \
        {"attention_dropout", NULL, CONFIG_DROPOUT, MEMBER(dropout), 0, 0}, \
        {"rms_norm_eps", NULL, CONFIG_NUMBER, MEMBER(epsilon), 0, 1e-6}, \
        {"initializer_range", NULL, CONFIG_NUMBER, MEMBER(deviation), 0, 0.02}, \
        {"tie_word_embeddings", NULL, CONFIG_FLAG, MEMBER(tied), 0, false}, \
        {"quantization_config", "its weights have 8 bits or less", CONFIG_ABSENT, 0, 0, 0}, \
        {"text_config", "it is a model of more than text", CONFIG_ABSENT, 0, 0, 0}, \
        {"attn_logit_softcapping", "scores are not bounded here", CONFIG_ABSENT, 0, 0, 0}, { \
        "final_logit_softcapping", "logits are not bounded here", CONFIG_ABSENT, 0, 0, 0 \
    }

static const ConfigKey llama_keys[MODEL_ROWS] = {
    LLAMA_KEYS(CONFIG_OPEN, CONFIG_OPEN),
    {"attention_bias", NULL, CONFIG_FLAG, MEMBER(qkv_biases), 0, false},
    {"attention_bias", NULL, CONFIG_FLAG, MEMBER(out_biases), 0, false},
    {"mlp_bias", NULL, CONFIG_FLAG, MEMBER(mlp_biases), 0, false},
};

static const ConfigKey mistral_keys[MODEL_ROWS] = {LLAMA_KEYS(8, CONFIG_OPEN)};

// What all four families check; fills in what a config.json may leave open. Heads of a Llama divide
// the channels also where head_dim is given, on which transformers insists.
static inline bool llama_accept(const json_t *root, const char *path, ModelConfig *config, Error *error) {
    int C = config->channels, H = config->heads;
    const json_t *kv_heads = json_object_get(root, "num_key_value_heads");
    if (config->kv_heads == 0 || json_is_null(kv_heads)) { config->kv_heads = H; }
    if (C % H != 0 && (config->head_channels == 0 || config->family->keys == llama_keys)) {
        return error_set(error, "%s: hidden_size %d must be a multiple of num_attention_heads %d", path, C,
                         H);
    }
    int D = config->head_channels = model_head_size(config);
    return (H % config->kv_heads == 0 ||
            error_set(error, "%s: num_attention_heads %d must be a multiple of num_key_value_heads %d", path,
                      H, config->kv_heads)) &&
           ((D % 2 == 0 && D <= 1024) ||
            error_set(error, "%s: \"head_dim\" %d must be even, at most 1024", path, D)) &&
           positions_read(root, path, config, error);
}

// window: "sliding_window"; 0: it is null.
static inline bool llama_read_window(const json_t *root, const char *path, ModelConfig *config,
                                     Error *error) {
    static const ConfigKey key = {"sliding_window", NULL, CONFIG_COUNT, MEMBER(window), 1 << 24, 4096};
    return json_is_null(json_object_get(root, key.name)) ||
           config_json_read_key(root, path, &key, config, error);
}

static inline void llama_write_window(json_t *root, const ModelConfig *config) {
    positions_write(root, config);
    json_object_set_new(root, "sliding_window",
                        config->window > 0 ? json_integer(config->window) : json_null());
}

// All layers have the window.
static inline bool mistral_accept(const json_t *root, const char *path, ModelConfig *config, Error *error) {
    if (!llama_read_window(root, path, config, error)) { return false; }
    for (int l = 0; l < config->layers; l++) { config->local[l] = config->window > 0; }
    return llama_accept(root, path, config, error);
}

#define LLAMA_FAMILY(type, class_name, its_keys, accepts, writes, gguf_name, turns_pairs) \
    { \
        .name = type, .architecture = class_name, .prefix = "model.", \
        .constants = {"layers.N.self_attn.rotary_emb.inv_freq"}, .gguf = gguf_name, \
        .gguf_pairs = turns_pairs, .tensors = llama_tensors, .keys = its_keys, .accept = accepts, \
        .write = writes \
    }

static const ModelFamily llama_family =
    LLAMA_FAMILY("llama", "LlamaForCausalLM", llama_keys, llama_accept, positions_write, "llama", true);
static const ModelFamily mistral_family = LLAMA_FAMILY("mistral", "MistralForCausalLM", mistral_keys,
                                                       mistral_accept, llama_write_window, "llama", true);
