// gguf_model.h: what llama.cpp calls the parts of a model: names of tensors, keys of its sizes,
// and its tokenizer.
//
// llama.cpp turns queries and keys of a Llama or Mistral in pairs of neighbours, Hugging Face's
// files in halves: their rows change places (gguf_pairs). Scaled positions are then factors
// of the frequencies (rope_freqs.weight), which say all kinds; otherwise keys, for two kinds.
// Layers with windows see all keys in llama.cpp, so its context ends where the window does.
#pragma once

#include "checkpoint/gguf.h"
#include "checkpoint/hf_model.h"
#include "tokenizer/chat.h"

static inline bool gguf_has(const ModelConfig *config, TensorRole role) {
    const TensorRow *row = config->family->tensors;
    while (row->name != NULL && row->role != (int)role) { row++; }
    return row->name != NULL;
}

// name <- of a tensor; suffix: of what belongs to it, such as ".lora_a".
static inline void gguf_name(const ModelConfig *config, const ParameterInfo *info, const char *suffix,
                             char name[GGUF_NAME]) {
    static const char *const modules[TENSOR_ROLES] = {
        "attn_norm", "attn_norm", "attn_q",      "attn_k",        "attn_v",      "attn_q",
        "attn_k",    "attn_v",    "attn_q_norm", "attn_k_norm",   "attn_output", "attn_output",
        "ffn_norm",  "ffn_norm",  "ffn_gate",    "ffn_up",        "ffn_gate",    "ffn_up",
        "ffn_down",  "ffn_down",  "token_embd",  "position_embd", "output"};
    bool inside = info->layer < config->layers;
    bool is_up = info->role == TENSOR_UP || info->role == TENSOR_UP_BIAS;
    bool is_q = info->role == TENSOR_Q || info->role == TENSOR_QKV_BIAS;
    const char *module = is_up && !gguf_has(config, TENSOR_GATED_UP)   ? "ffn_up"
                         : is_q && !gguf_has(config, TENSOR_K)         ? "attn_qkv"
                         : !inside && info->role <= TENSOR_NORM_1_BIAS ? "output_norm"
                                                                       : modules[info->role];
    char layer[32] = "";
    if (inside) { snprintf(layer, sizeof layer, "blk.%d.", info->layer); }
    snprintf(name, GGUF_NAME, "%s%s%s%s", layer, module, strrchr(info->name, '.'), suffix);
}

// values (rows, columns), of a tensor of the table or of its adapter: queries and keys of a Llama
// change from halves to pairs, head by head.
static inline void gguf_order_rows(const ModelConfig *config, const ParameterInfo *info, float *values,
                                   size_t columns) {
    bool turns = info->role == TENSOR_Q || info->role == TENSOR_K || info->role == TENSOR_QKV_BIAS ||
                 info->role == TENSOR_K_BIAS;
    if (!turns || !config->family->gguf_pairs) { return; }
    size_t D = (size_t)model_head_size(config), bytes = D * columns * sizeof *values;
    float *head = (float *)memory_take(1, bytes);
    for (size_t first = 0; first < (size_t)info->rows; first += D) {
        memcpy(head, values + first * columns, bytes);
        for (size_t i = 0; i < D; i++) {
            memcpy(values + (first + i) * columns, head + (i % 2 * (D / 2) + i / 2) * columns,
                   columns * sizeof *values);
        }
    }
    free(head);
}

// Whether llama.cpp computes what the model does.
static inline bool gguf_accept(const ModelConfig *config, Error *error) {
    const RotaryPositions *rotary = &config->rotary;
    bool pairs = config->family->gguf_pairs;
    const Condition refused[] = {
        {config->family->gguf == NULL, ""},
        {gguf_has(config, TENSOR_POSITIONS) && !config->scaled_scores, " whose scale_attn_weights is false"},
        {config->out_biases && !pairs && config->head_norms, " with attention_bias"},
        {gguf_has(config, TENSOR_GATED_UP) && !config->head_norms && !pairs &&
             config->channels != model_dimension(config, DIM_HEADS),
         " whose heads together are not as wide as hidden_size"},
        {rotary->kind == ROTARY_LLAMA3 && !pairs, " with positions of the kind llama3"},
        {rotary->fractional && !pairs, " with positions whose truncate is false"},
    };
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        if (!refused[i].holds) { continue; }
        return error_set(error, "llama.cpp knows no %s%s: --to DIRECTORY writes it for transformers",
                         config->family->name, refused[i].text);
    }
    return true;
}

static inline void gguf_add_positions(Gguf *gguf, const ModelConfig *config) {
    const RotaryPositions *rotary = &config->rotary;
    char key[64];
#define GGUF_KEY(name) (snprintf(key, sizeof key, "%s.%s", config->family->gguf, name), key)
    bool yarn = rotary->kind == ROTARY_YARN, scaled = yarn || rotary->kind == ROTARY_LINEAR;
    double growth = positions_growth(rotary);
    gguf_add_number(gguf, GGUF_KEY("rope.dimension_count"), model_head_size(config));
    gguf_add_real(gguf, GGUF_KEY("rope.freq_base"), rotary->theta);
    if (!config->family->gguf_pairs && scaled) {
        gguf_add_text(gguf, GGUF_KEY("rope.scaling.type"), yarn ? "yarn" : "linear");
        gguf_add_real(gguf, GGUF_KEY("rope.scaling.factor"), rotary->factor);
        if (yarn) {
            growth /= 1 + 0.1 * log(rotary->factor); // by which llama.cpp multiplies itself
            gguf_add_number(gguf, GGUF_KEY("rope.scaling.original_context_length"), (int)rotary->original);
            gguf_add_real(gguf, GGUF_KEY("rope.scaling.yarn_beta_fast"), rotary->high);
            gguf_add_real(gguf, GGUF_KEY("rope.scaling.yarn_beta_slow"), rotary->low);
        }
    }
    if (yarn) { gguf_add_real(gguf, GGUF_KEY("rope.scaling.attn_factor"), growth); }
}

static inline void gguf_add_config(Gguf *gguf, const ModelConfig *config) {
    char key[64];
    bool centres = gguf_has(config, TENSOR_NORM_1_BIAS);
    int context = config->positions;
    for (int l = 0; l < config->layers; l++) {
        context = config->local[l] && config->window < context ? config->window : context;
    }
    const struct {
        const char *name;
        int value;
    } numbers[] = {
        {"context_length", context},
        {"embedding_length", config->channels},
        {"block_count", config->layers},
        {"feed_forward_length", config->mlp_channels},
        {"vocab_size", config->vocabulary},
        {"attention.head_count", config->heads},
        {"attention.head_count_kv", model_kv_heads(config)},
        {"attention.key_length", model_head_size(config)},
        {"attention.value_length", model_head_size(config)},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        gguf_add_number(gguf, GGUF_KEY(numbers[i].name), numbers[i].value);
    }
    gguf_add_real(gguf,
                  GGUF_KEY(centres ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon"),
                  config->epsilon);
    if (!gguf_has(config, TENSOR_POSITIONS)) { gguf_add_positions(gguf, config); }
}

// Whether the model has rope_freqs.weight: factors (D / 2), by which llama.cpp divides frequencies.
static inline bool gguf_factors(const ModelConfig *config, float *factors) {
    int D = model_head_size(config);
    RotaryPositions plain = {.kind = ROTARY_DEFAULT, .theta = config->rotary.theta};
    bool scaled = config->rotary.kind != ROTARY_DEFAULT && config->rotary.kind != ROTARY_DYNAMIC;
    if (!config->family->gguf_pairs || !scaled) { return false; }
    for (int i = 0; i < D / 2; i++) {
        factors[i] = positions_frequency(&plain, D, i) / positions_frequency(&config->rotary, D, i);
    }
    return true;
}

// How llama.cpp cuts texts: it knows ways by name.
#define GGUF_WORDS(digits) \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" digits \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

static const struct {
    const char *name, *patterns; // one behind the other, each with a line's end
    bool ignores_merges;
} gguf_cutters[] = {
    {"gpt-2", TOKENIZER_GPT2 "\n", false},
    {"smollm", "\\p{N}\n" TOKENIZER_GPT2 "\n", false},
    {"llama-bpe", GGUF_WORDS("\\p{N}{1,3}") "\n", true},
    {"qwen2", GGUF_WORDS("\\p{N}") "\n", false},
};

// What the tokens are; the format's own numbers.
enum {
    TOKEN_NORMAL = 1,
    TOKEN_UNKNOWN = 2,
    TOKEN_CONTROL = 3,
    TOKEN_OF_USER = 4,
    TOKEN_UNUSED = 5,
    TOKEN_BYTE = 6
};

typedef struct GgufToken {
    const char *text; // as in tokenizer.json; NULL: no token has this id
    uint32_t kind;
    float score; // BPE of characters merges the highest first
} GgufToken;

// tokens (vocabulary)
static inline void gguf_read_tokens(const json_t *root, const Tokenizer *tokenizer, GgufToken *tokens) {
    const json_t *model = json_object_get(root, "model"), *vocabulary = json_object_get(model, "vocab"),
                 *merges = json_object_get(model, "merges"), *added = json_object_get(root, "added_tokens");
    const char *text, *left, *right, *unknown = json_text(model, "unk_token");
    json_t *id;
    size_t length, i;
    uint8_t byte[1024];
    json_object_foreach((json_t *)vocabulary, text, id) {
        bool is_byte = false;
        if (tokenizer->characters && strlen(text) < sizeof byte) {
            tokenizer_character_bytes(text, byte, &is_byte);
        }
        GgufToken *token = &tokens[json_integer_value(id)];
        token->text = text;
        token->kind = is_byte                                         ? TOKEN_BYTE
                      : unknown != NULL && strcmp(text, unknown) == 0 ? TOKEN_UNKNOWN
                                                                      : TOKEN_NORMAL;
    }
    json_array_foreach(added, i, id) {
        json_int_t number = json_integer_value(json_object_get(id, "id"));
        if (number >= tokenizer->vocabulary) { continue; } // the model has no row for it
        GgufToken *token = &tokens[number];
        token->text = json_text(id, "content");
        if (token->kind == TOKEN_UNKNOWN) { continue; }
        token->kind = json_flag(id, "special") ? TOKEN_CONTROL : TOKEN_OF_USER;
    }
    for (i = json_array_size(merges); tokenizer->characters && i-- > 0;) { // the first that makes it counts
        if (!tokenizer_split_merge(json_array_get(merges, i), &left, &length, &right)) { continue; }
        char *whole = MEMORY_OF(char, length + strlen(right) + 1);
        memcpy(whole, left, length);
        strcpy(whole + length, right);
        tokens[json_integer_value(json_object_get(vocabulary, whole))].score = -(float)i;
        free(whole);
    }
}

static inline void gguf_add_tokens(Gguf *gguf, const json_t *root, const ModelConfig *config,
                                   const Tokenizer *tokenizer) {
    size_t V = (size_t)config->vocabulary;
    GgufToken *tokens = MEMORY_OF(GgufToken, V);
    const json_t *merges = json_object_get(json_object_get(root, "model"), "merges");
    for (size_t i = 0; i < V; i++) {
        tokens[i].kind = TOKEN_UNUSED;
        tokens[i].score = -1e9f;
    }
    gguf_read_tokens(root, tokenizer, tokens);
    gguf_begin_list(gguf, "tokenizer.ggml.tokens", GGUF_TEXT, V);
    for (size_t i = 0; i < V; i++) {
        char unused[48]; // rows without a token, as in a vocabulary that was rounded up
        snprintf(unused, sizeof unused, "[UNUSED_ROW_%zu]", i);
        gguf_write_text(gguf->keys, tokens[i].text != NULL ? tokens[i].text : unused);
    }
    gguf_begin_list(gguf, "tokenizer.ggml.token_type", GGUF_I32, V);
    for (size_t i = 0; i < V; i++) { gguf_write_u32(gguf->keys, tokens[i].kind); }
    if (tokenizer->characters) {
        gguf_begin_list(gguf, "tokenizer.ggml.scores", GGUF_REAL, V);
        for (size_t i = 0; i < V; i++) { fwrite(&tokens[i].score, sizeof(float), 1, gguf->keys); }
    } else {
        const char *left, *right;
        size_t length, i;
        const json_t *merge;
        gguf_begin_list(gguf, "tokenizer.ggml.merges", GGUF_TEXT, json_array_size(merges));
        json_array_foreach(merges, i, merge) {
            if (!tokenizer_split_merge(merge, &left, &length, &right)) { continue; }
            gguf_write_u64(gguf->keys, length + 1 + strlen(right));
            fprintf(gguf->keys, "%.*s %s", (int)length, left, right);
        }
    }
    free(tokens);
}

// The chat template of transformers, in Jinja, which llama.cpp runs. directory: the tokenizer's.
static inline void gguf_add_template(Gguf *gguf, const char *directory) {
    char path[PATH_MAX];
    size_t size = 0;
    Error ignored;
    if (hf_model_find_tokenizer(directory, "chat_template.jinja", path)) {
        char *text = (char *)file_map(path, "expected a chat template", &size, &ignored);
        if (text == NULL) { return; }
        gguf_begin_key(gguf, "tokenizer.chat_template", GGUF_TEXT);
        gguf_write_u64(gguf->keys, size);
        fwrite(text, 1, size, gguf->keys);
        munmap(text, size);
    } else if (hf_model_find_tokenizer(directory, "tokenizer_config.json", path)) {
        json_t *root = json_file_load(path, JSON_ANY_INTEGERS, NULL);
        json_t *text = json_object_get(root, "chat_template"), *one;
        size_t i;
        const json_t *list = text;
        json_array_foreach(list, i, one) { // several, with names
            if (json_says(one, "name", "default")) { text = json_object_get(one, "template"); }
        }
        if (json_is_string(text)) { gguf_add_text(gguf, "tokenizer.chat_template", json_string_value(text)); }
        json_decref(root);
    }
}

// All about the tokenizer. `tokenizer`, and its chat, were opened from `directory`, which may also
// be a tokenizer.json.
static inline bool gguf_add_tokenizer(Gguf *gguf, const char *directory, const ModelConfig *config,
                                      const Tokenizer *tokenizer, const Chat *chat, Error *error) {
    char path[PATH_MAX];
    const char *cutter = tokenizer->characters ? "default" : NULL;
    int begin = tokenizer->begin, end = hf_model_special_id(directory, "eos_token", config->vocabulary);
    if (begin < 0) { begin = hf_model_special_id(directory, "bos_token", config->vocabulary); }
    if (end < 0) { end = tokenizer->end < 0 && chat->root != NULL ? chat->end : tokenizer->end; }
    if (end < 0) { return error_set(error, "%.300s " TOKENIZER_NO_END, directory); }
    if (begin < 0) { begin = end; } // what is not said is token 11 in llama.cpp
    if (tokenizer->vocabulary > config->vocabulary) {
        return error_set(error, "%.300s has %d tokens, and the model only %d rows: it is another model's",
                         directory, tokenizer->vocabulary, config->vocabulary);
    }
    for (size_t i = 0; cutter == NULL && i < sizeof gguf_cutters / sizeof gguf_cutters[0]; i++) {
        bool same = strcmp(tokenizer->pattern_texts, gguf_cutters[i].patterns) == 0 &&
                    gguf_cutters[i].ignores_merges == (tokenizer->whole != NULL);
        if (same) { cutter = gguf_cutters[i].name; }
    }
    if (cutter == NULL) {
        return error_set(
            error,
            "%.300s cuts texts in a way whose name in llama.cpp is not known here; known are those of GPT-2 "
            "(which train_bpe makes), SmolLM2, Llama 3 and Qwen2: --to DIRECTORY writes the model for "
            "transformers",
            directory);
    }
    json_t *root = hf_model_find_tokenizer(directory, "tokenizer.json", path)
                       ? json_file_load(path, JSON_REJECT_DUPLICATES, NULL)
                       : NULL;
    if (root == NULL) {
        return error_set(error, "%.300s: its tokenizer.json has changed meanwhile", directory);
    }
    gguf_add_text(gguf, "tokenizer.ggml.model", tokenizer->characters ? "llama" : "gpt2");
    gguf_add_text(gguf, "tokenizer.ggml.pre", cutter);
    gguf_add_tokens(gguf, root, config, tokenizer);
    gguf_add_number(gguf, "tokenizer.ggml.bos_token_id", begin);
    gguf_add_number(gguf, "tokenizer.ggml.eos_token_id", end);
    if (chat->root != NULL) { gguf_add_number(gguf, "tokenizer.ggml.eot_token_id", chat->end); }
    gguf_add_flag(gguf, "tokenizer.ggml.add_bos_token", tokenizer->begin >= 0);
    if (tokenizer->characters) {
        gguf_add_flag(gguf, "tokenizer.ggml.add_space_prefix", tokenizer->blank != BLANK_NOWHERE);
    }
    gguf_add_template(gguf, directory);
    json_decref(root);
    return true;
}
