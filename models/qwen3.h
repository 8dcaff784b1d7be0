// qwen3.h: Qwen3: a Qwen2 (qwen2.h) with norms of its heads in place of biases.
//
//   q, k = RMSNorm_q(q), RMSNorm_k(k)      of each head, before it is turned
//
// A head has 128 channels unless head_dim says otherwise: all of them together need not have C.
#pragma once

#include "models/qwen2.h"

static const ConfigKey qwen3_keys[MODEL_ROWS] = {
    LLAMA_KEYS(32, 128),
    {"attention_bias", NULL, CONFIG_FLAG, MEMBER(qkv_biases), 0, false},
    {"attention_bias", NULL, CONFIG_FLAG, MEMBER(out_biases), 0, false},
    {"q_norm", NULL, CONFIG_FIXED, MEMBER(head_norms), 0, true},
};

static const ModelFamily qwen3_family =
    LLAMA_FAMILY("qwen3", "Qwen3ForCausalLM", qwen3_keys, qwen2_accept, qwen2_write, "qwen3", false);
