// test_export.c: `train_gpt export`. A reader of the format takes every byte of a GGUF apart; what
// it holds is the model, its tokenizer and its chat. test/llama_cpp asks llama.cpp itself.
#include "test/program/program.h"

#include "checkpoint/gguf_model.h"

// ---- A reader -------------------------------------------------------------------------

typedef struct ReadTensor {
    char name[GGUF_NAME];
    size_t rows, columns, count; // rows 1: a vector
    uint32_t type;
    const uint8_t *data;
} ReadTensor;

typedef struct ReadGguf {
    uint8_t *bytes; // (size)
    size_t size, at;
    json_t *keys;
    ReadTensor tensors[128];
    size_t tensor_count;
} ReadGguf;

static const uint8_t *take(ReadGguf *gguf, size_t count) {
    assert_true(count <= gguf->size - gguf->at);
    gguf->at += count;
    return gguf->bytes + gguf->at - count;
}

static uint64_t take_number(ReadGguf *gguf, size_t bytes) {
    uint64_t number = 0;
    memcpy(&number, take(gguf, bytes), bytes);
    return number;
}

static json_t *take_text(ReadGguf *gguf) {
    size_t length = (size_t)take_number(gguf, 8);
    json_t *text = json_stringn((const char *)take(gguf, length), length);
    assert_non_null(text); // UTF-8
    return text;
}

static json_t *take_value(ReadGguf *gguf, uint32_t type) {
    float real;
    if (type == 4) { return json_integer((json_int_t)take_number(gguf, 4)); }
    if (type == 5) { return json_integer((int32_t)take_number(gguf, 4)); }
    if (type == 7) { return json_boolean(take_number(gguf, 1)); }
    if (type == 8) { return take_text(gguf); }
    if (type == 6) {
        memcpy(&real, take(gguf, 4), 4);
        return json_real((double)real);
    }
    assert_int_equal(type, 9);
    uint32_t inner = (uint32_t)take_number(gguf, 4);
    json_t *list = json_array();
    for (uint64_t left = take_number(gguf, 8); left > 0; left--) {
        json_array_append_new(list, take_value(gguf, inner));
    }
    return list;
}

static size_t bytes_of(uint32_t type, size_t count) {
    return type == 0 ? 4 * count : type == 8 ? count / 32 * 34 : 2 * count;
}

// Every byte is a key's, a tensor's, or a zero up to the next multiple of 32.
static void read_gguf(const Stage *stage, const char *name, ReadGguf *gguf) {
    char path[STAGE_PATH_SIZE];
    struct stat status;
    memset(gguf, 0, sizeof *gguf);
    assert_int_equal(stat(stage_path(stage, name, path), &status), 0);
    gguf->bytes = (uint8_t *)file_read(path);
    gguf->size = (size_t)status.st_size;
    assert_memory_equal(take(gguf, 4), "GGUF", 4);
    assert_int_equal(take_number(gguf, 4), 3);
    gguf->tensor_count = (size_t)take_number(gguf, 8);
    assert_in_range(gguf->tensor_count, 1, 128);
    uint64_t keys = take_number(gguf, 8), places[128];
    gguf->keys = json_object();
    for (; keys > 0; keys--) {
        json_t *key = take_text(gguf);
        assert_null(json_object_get(gguf->keys, json_string_value(key)));
        json_object_set_new(gguf->keys, json_string_value(key),
                            take_value(gguf, (uint32_t)take_number(gguf, 4)));
        json_decref(key);
    }
    for (size_t i = 0; i < gguf->tensor_count; i++) {
        ReadTensor *tensor = &gguf->tensors[i];
        json_t *text = take_text(gguf);
        snprintf(tensor->name, sizeof tensor->name, "%s", json_string_value(text));
        json_decref(text);
        uint64_t dimensions = take_number(gguf, 4);
        assert_in_range(dimensions, 1, 2);
        tensor->columns = (size_t)take_number(gguf, 8);
        tensor->rows = dimensions == 2 ? (size_t)take_number(gguf, 8) : 1;
        tensor->count = tensor->rows * tensor->columns;
        tensor->type = (uint32_t)take_number(gguf, 4);
        places[i] = take_number(gguf, 8);
    }
    while (gguf->at % 32 != 0) { assert_int_equal(take_number(gguf, 1), 0); }
    size_t data = gguf->at;
    for (size_t i = 0; i < gguf->tensor_count; i++) {
        ReadTensor *tensor = &gguf->tensors[i];
        assert_int_equal(gguf->at - data, places[i]);
        tensor->data = take(gguf, bytes_of(tensor->type, tensor->count));
        while (gguf->at % 32 != 0) { assert_int_equal(take_number(gguf, 1), 0); }
    }
    assert_int_equal(gguf->at, gguf->size);
}

static void close_gguf(ReadGguf *gguf) {
    json_decref(gguf->keys);
    free(gguf->bytes);
}

static const ReadTensor *find(const ReadGguf *gguf, const char *name) {
    for (size_t i = 0; i < gguf->tensor_count; i++) {
        if (strcmp(gguf->tensors[i].name, name) == 0) { return &gguf->tensors[i]; }
    }
    fail_msg("there is no tensor %s", name);
    return NULL;
}

static float half_value(uint16_t half) {
    int exponent = half >> 10 & 31, fraction = half & 1023;
    float size =
        exponent > 0 ? ldexpf((float)(1024 + fraction), exponent - 25) : ldexpf((float)fraction, -24);
    return half & 0x8000 ? -size : size;
}

// Element i, and in *tolerance how far it may be from what was rounded.
static float element(const ReadTensor *tensor, size_t i, float *tolerance) {
    float value;
    uint16_t half;
    const uint8_t *block = tensor->data + i / 32 * 34;
    *tolerance = 0;
    if (tensor->type == 0) {
        memcpy(&value, tensor->data + 4 * i, 4);
        return value;
    }
    memcpy(&half, tensor->type == 8 ? block : tensor->data + 2 * i, 2);
    if (tensor->type == 8) {
        value = half_value(half) * (float)(int8_t)block[2 + i % 32];
        *tolerance = half_value(half) * (0.5f + 127.0f / 2048) + 0x1p-25f;
    } else if (tensor->type == 1) {
        value = half_value(half);
        *tolerance = fmaxf(fabsf(value) / 2048, 0x1p-25f);
    } else {
        value = wire_float_from_bits((uint32_t)half << 16);
        *tolerance = fabsf(value) / 256;
    }
    return value;
}

// ---- Models ---------------------------------------------------------------------------

#define SIZES \
    "\"num_hidden_layers\": 2, \"hidden_size\": 64, \"num_attention_heads\": 4, \"intermediate_size\": 96, " \
    "\"max_position_embeddings\": 64, \"rms_norm_eps\": 1e-5, \"vocab_size\": 408"
#define SCALED(kind, rest) "\"rope_scaling\": {\"rope_type\": \"" kind "\", \"factor\": 4.0" rest "}"
#define TRAINED_FOR(original) ", \"original_max_position_embeddings\": " original

// name: of the files, too. keys: that the GGUF has, beside those of all.
static const struct {
    const char *name, *config, *keys;
    bool turns; // queries and keys change from halves to pairs
} models[] = {
    {"gpt2",
     "{\"model_type\": \"gpt2\", \"n_layer\": 2, \"n_embd\": 64, \"n_head\": 4, \"n_inner\": 100, "
     "\"n_positions\": 64, \"vocab_size\": 408, \"layer_norm_epsilon\": 1e-6}",
     "{\"general.architecture\": \"gpt2\", \"gpt2.context_length\": 64, \"gpt2.embedding_length\": 64, "
     "\"gpt2.block_count\": 2, \"gpt2.feed_forward_length\": 100, \"gpt2.attention.head_count\": 4, "
     "\"gpt2.attention.layer_norm_epsilon\": 1e-6}",
     false},
    {"llama",
     "{\"model_type\": \"llama\", " SIZES ", \"num_key_value_heads\": 2, \"head_dim\": 24, "
     "\"attention_bias\": true, \"mlp_bias\": true, \"rope_theta\": 5e5, " SCALED(
         "llama3", ", \"low_freq_factor\": 1.0, \"high_freq_factor\": 4.0" TRAINED_FOR("32")) "}",
     "{\"general.architecture\": \"llama\", \"llama.context_length\": 64, \"llama.attention.head_count\": 4, "
     "\"llama.attention.head_count_kv\": 2, \"llama.attention.key_length\": 24, "
     "\"llama.attention.value_length\": 24, \"llama.rope.dimension_count\": 24, \"llama.rope.freq_base\": "
     "5e5, "
     "\"llama.feed_forward_length\": 96, \"llama.vocab_size\": 408, \"llama.block_count\": 2, "
     "\"llama.embedding_length\": 64, \"llama.attention.layer_norm_rms_epsilon\": 1e-5}",
     true},
    {"mistral",
     "{\"model_type\": \"mistral\", " SIZES ", \"sliding_window\": 48, \"num_key_value_heads\": 1, "
     "\"tie_word_embeddings\": true, " SCALED("yarn", TRAINED_FOR("16")) "}",
     "{\"general.architecture\": \"llama\", \"llama.context_length\": 48, "
     "\"llama.rope.scaling.attn_factor\": 1.1386294}",
     true},
    {"qwen2",
     "{\"model_type\": \"qwen2\", " SIZES
     ", \"num_key_value_heads\": 2, " SCALED("yarn", TRAINED_FOR("16")) "}",
     "{\"general.architecture\": \"qwen2\", \"qwen2.rope.scaling.type\": \"yarn\", "
     "\"qwen2.rope.scaling.factor\": 4.0, \"qwen2.rope.scaling.original_context_length\": 16, "
     "\"qwen2.rope.scaling.yarn_beta_fast\": 32.0, \"qwen2.rope.scaling.yarn_beta_slow\": 1.0, "
     "\"qwen2.rope.scaling.attn_factor\": 1.0}",
     false},
    {"qwen3",
     "{\"model_type\": \"qwen3\", " SIZES ", \"num_key_value_heads\": 4, \"head_dim\": 32, "
     "\"tie_word_embeddings\": true, " SCALED("linear", "") "}",
     "{\"general.architecture\": \"qwen3\", \"qwen3.rope.scaling.type\": \"linear\", "
     "\"qwen3.rope.scaling.factor\": 4.0, \"qwen3.attention.key_length\": 32}",
     false},
};
enum { MODELS = sizeof models / sizeof models[0] };

static void take_model(const Stage *stage, const char *name, HfModel *model, float **parameters) {
    char path[STAGE_PATH_SIZE];
    Error error;
    if (!hf_model_open(model, stage_path(stage, name, path), &error)) { fail_msg("%s", error.text); }
    *parameters = (float *)memory_take(model->table.parameter_count, sizeof(float));
    hf_model_read(model, *parameters);
}

// A directory `name` with the reference tokenizer. random: weights of very different sizes; NULL:
// zeros, but for one, which is `value`.
static void save_model(const Stage *stage, const char *name, const char *text, Random *random, float value) {
    char path[STAGE_PATH_SIZE], tokenizer[STAGE_PATH_SIZE];
    Error error;
    ModelConfig config;
    ParameterTable table;
    stage_write(stage, "config.json", text);
    if (!model_config_load(stage_path(stage, "config.json", path), &config, &error)) {
        fail_msg("%s", error.text);
    }
    parameter_table_make(&config, &table);
    float *values = (float *)memory_take(table.parameter_count, sizeof *values);
    for (size_t i = 0; random != NULL && i < table.parameter_count; i++) {
        values[i] = ldexpf((float)random_normal(random), -(int)(i % 23));
    }
    if (random == NULL) { values[7] = value; }
    if (!hf_model_save(stage_path(stage, name, path), &config, &table, values,
                       stage_path(stage, "bpe", tokenizer), NULL, NULL, &error)) {
        fail_msg("%s", error.text);
    }
    free(values);
    parameter_table_free(&table);
}

// The tokenizer is one of a chat.
static void write_models(const Stage *stage) {
    Random random = {.state = 5};
    shell(stage,
          "mkdir bpe && cp '%s/test/reference/tokenizer.json' bpe && printf '{{ messages }}' > "
          "bpe/chat_template.jinja && "
          "printf '{\"chat_template\": \"old\"}' > bpe/tokenizer_config.json && printf '%%s' '{\"first\": "
          "[\"Q \", \"\\nA\"], \"next\": "
          "[\"<|end|>Q \", \"\\nA\"], \"system\": [\"S \\\"\", \"<|end|>Q \", \" A\"], "
          "\"thought\": \"T\", \"end\": \"<|end|>\"}' > bpe/chat.json",
          stage->root);
    for (int m = 0; m < MODELS; m++) { save_model(stage, models[m].name, models[m].config, &random, 0); }
}

static Outcome run_well(Stage *stage, const char *format, const char *name) {
    char arguments[512];
    snprintf(arguments, sizeof arguments, format, name, name);
    Outcome outcome = program_run(stage, 0, arguments);
    outcome_check(&outcome, 0, arguments);
    return outcome;
}

// ---- Tests ----------------------------------------------------------------------------

// The names by hand, for the rows of the pages: Hugging Face's in layer 1, and the GGUF's.
static const char *const names[][2] = {
    {"wte.weight", "token_embd.weight"},
    {"wpe.weight", "position_embd.weight"},
    {"h.1.ln_1.weight", "blk.1.attn_norm.weight"},
    {"h.1.ln_1.bias", "blk.1.attn_norm.bias"},
    {"h.1.attn.c_attn.weight", "blk.1.attn_qkv.weight"},
    {"h.1.attn.c_attn.bias", "blk.1.attn_qkv.bias"},
    {"h.1.attn.c_proj.weight", "blk.1.attn_output.weight"},
    {"h.1.attn.c_proj.bias", "blk.1.attn_output.bias"},
    {"h.1.ln_2.weight", "blk.1.ffn_norm.weight"},
    {"h.1.ln_2.bias", "blk.1.ffn_norm.bias"},
    {"h.1.mlp.c_fc.weight", "blk.1.ffn_up.weight"},
    {"h.1.mlp.c_fc.bias", "blk.1.ffn_up.bias"},
    {"h.1.mlp.c_proj.weight", "blk.1.ffn_down.weight"},
    {"h.1.mlp.c_proj.bias", "blk.1.ffn_down.bias"},
    {"ln_f.weight", "output_norm.weight"},
    {"ln_f.bias", "output_norm.bias"},
    {"embed_tokens.weight", "token_embd.weight"},
    {"layers.1.input_layernorm.weight", "blk.1.attn_norm.weight"},
    {"layers.1.self_attn.q_proj.weight", "blk.1.attn_q.weight"},
    {"layers.1.self_attn.k_proj.weight", "blk.1.attn_k.weight"},
    {"layers.1.self_attn.v_proj.weight", "blk.1.attn_v.weight"},
    {"layers.1.self_attn.q_proj.bias", "blk.1.attn_q.bias"},
    {"layers.1.self_attn.k_proj.bias", "blk.1.attn_k.bias"},
    {"layers.1.self_attn.v_proj.bias", "blk.1.attn_v.bias"},
    {"layers.1.self_attn.q_norm.weight", "blk.1.attn_q_norm.weight"},
    {"layers.1.self_attn.k_norm.weight", "blk.1.attn_k_norm.weight"},
    {"layers.1.self_attn.o_proj.weight", "blk.1.attn_output.weight"},
    {"layers.1.self_attn.o_proj.bias", "blk.1.attn_output.bias"},
    {"layers.1.post_attention_layernorm.weight", "blk.1.ffn_norm.weight"},
    {"layers.1.mlp.gate_proj.weight", "blk.1.ffn_gate.weight"},
    {"layers.1.mlp.up_proj.weight", "blk.1.ffn_up.weight"},
    {"layers.1.mlp.gate_proj.bias", "blk.1.ffn_gate.bias"},
    {"layers.1.mlp.up_proj.bias", "blk.1.ffn_up.bias"},
    {"layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight"},
    {"layers.1.mlp.down_proj.bias", "blk.1.ffn_down.bias"},
    {"norm.weight", "output_norm.weight"},
    {"lm_head.weight", "output.weight"},
};

// The row of a head of D that is row i of the GGUF's: pair i / 2 of the halves.
static size_t row_of(const ParameterInfo *info, size_t row, size_t D, bool turns) {
    bool turned = turns && (strstr(info->name, "q_proj") != NULL || strstr(info->name, "k_proj") != NULL);
    size_t i = row % D;
    return turned ? row - i + (i % 2) * (D / 2) + i / 2 : row;
}

static void check_tensor(const ReadGguf *gguf, const HfModel *model, int i, const float *values, bool turns,
                         uint32_t type) {
    const ParameterInfo *info = &model->table.entries[i];
    const char *bare = info->name + info->prefix, *wanted = NULL;
    char name[MODEL_NAME];
    for (size_t n = 0; n < sizeof names / sizeof names[0]; n++) {
        if (strcmp(names[n][0], bare) == 0) { wanted = names[n][1]; }
    }
    if (wanted == NULL) { // of layer 0: as in layer 1
        snprintf(name, sizeof name, "%s", bare);
        *strchr(name, '0') = '1';
        for (size_t n = 0; n < sizeof names / sizeof names[0]; n++) {
            if (strcmp(names[n][0], name) == 0) { wanted = names[n][1]; }
        }
        assert_non_null(wanted);
        snprintf(name, sizeof name, "%s", wanted);
        *strchr(name, '1') = '0';
        wanted = name;
    }
    const ReadTensor *tensor = find(gguf, wanted);
    size_t rows = info->is_matrix ? (size_t)info->rows : 1, columns = info->count / rows,
           D = (size_t)model_head_size(&model->config), width = info->is_matrix ? columns : 1;
    assert_int_equal(tensor->rows, rows);
    assert_int_equal(tensor->columns, columns);
    bool narrow = info->is_matrix && info->role != TENSOR_POSITIONS;
    assert_int_equal(tensor->type, !narrow ? 0 : type == 8 && columns % 32 != 0 ? 1 : type);
    for (size_t k = 0; k < info->count; k++) {
        float tolerance, value = element(tensor, k, &tolerance);
        size_t row = row_of(info, k / width, D, turns);
        assert_close((double)value, (double)values[info->offset + row * width + k % width], (double)tolerance,
                     wanted);
    }
}

static void every_byte_is_read_back(void **state) {
    static const struct {
        const char *word;
        uint32_t type, file_type;
    } types[] = {{"f32", 0, 0}, {"f16", 1, 1}, {"bf16", 30, 32}, {"q8_0", 8, 7}};
    Stage *stage = stage_of(state);
    for (int m = 0; m < MODELS; m++) {
        HfModel model;
        float *parameters;
        take_model(stage, models[m].name, &model, &parameters);
        for (int t = 0; t < 4; t++) {
            char format[128];
            ReadGguf gguf;
            json_t *keys = json_loads(models[m].keys, 0, NULL), *key;
            const char *name;
            snprintf(format, sizeof format, "export --from %%s --to %%s.gguf --type %s", types[t].word);
            run_well(stage, format, models[m].name);
            shell(stage, "mv %s.gguf model.gguf && ! test -e %s.gguf.new", models[m].name, models[m].name);
            read_gguf(stage, "model.gguf", &gguf);
            json_object_foreach(keys, name, key) {
                const json_t *got = json_object_get(gguf.keys, name);
                if (json_is_number(key)) {
                    assert_close(json_number_value(got), json_number_value(key),
                                 2e-7 * json_number_value(key), name);
                } else if (!json_equal(got, key)) {
                    fail_msg("%s: %s", models[m].name, name);
                }
            }
            assert_int_equal(json_integer_value(json_object_get(gguf.keys, "general.file_type")),
                             types[t].file_type);
            size_t factors = models[m].turns; // scaled, so that there are factors
            assert_int_equal(gguf.tensor_count, (size_t)model.table.count + factors);
            for (int i = 0; i < model.table.count; i++) {
                check_tensor(&gguf, &model, i, parameters, models[m].turns, types[t].type);
            }
            json_decref(keys);
            close_gguf(&gguf);
        }
        free(parameters);
        hf_model_close(&model);
    }
}

// What a pair of neighbours is turned by, t f / factor with f = theta^(-2i/D), is what the model
// itself turns the two halves by.
static void factors_are_those_of_the_positions(void **state) {
    Stage *stage = stage_of(state);
    for (int m = 1; m < 3; m++) {
        HfModel model;
        float *parameters, ignored;
        ReadGguf gguf;
        take_model(stage, models[m].name, &model, &parameters);
        run_well(stage, "export --from %s --to model.gguf", models[m].name);
        read_gguf(stage, "model.gguf", &gguf);
        const ReadTensor *factors = find(&gguf, "rope_freqs.weight");
        int D = model_head_size(&model.config);
        assert_int_equal(factors->count, D / 2);
        assert_int_equal(factors->type, 0);
        for (int i = 0; i < D / 2; i++) {
            double plain = pow(model.config.rotary.theta, -2.0 * i / D),
                   wanted = (double)positions_frequency(&model.config.rotary, D, i);
            assert_close(plain / (double)element(factors, (size_t)i, &ignored), wanted, 1e-6 * wanted,
                         "frequency");
        }
        close_gguf(&gguf);
        free(parameters);
        hf_model_close(&model);
    }
}

static json_t *reference_tokenizer(const Stage *stage, const char *kind) {
    char path[STAGE_PATH_SIZE + 64];
    snprintf(path, sizeof path, "%s/test/reference/tokenizer.json", stage->root);
    json_t *root = json_load_file(path, 0, NULL);
    snprintf(path, sizeof path, "%s/test/reference/tokenizer_kinds.json", stage->root);
    json_t *kinds = json_load_file(path, JSON_ALLOW_NUL, NULL), *of = json_object_get(kinds, kind);
    json_object_update(root, json_object_get(of, "file"));
    json_object_update(json_object_get(root, "model"), json_object_get(of, "model"));
    assert_non_null(kinds);
    json_decref(kinds);
    return root;
}

static void write_tokenizer(const Stage *stage, const char *directory, json_t *root) {
    char path[STAGE_PATH_SIZE], name[64];
    shell(stage, "mkdir -p %s", directory);
    snprintf(name, sizeof name, "%s/tokenizer.json", directory);
    assert_int_equal(json_dump_file(root, stage_path(stage, name, path), 0), 0);
}

// Rows without a token have names of their own, as the format wants.
static size_t count_unused(const json_t *tokens, const json_t *kinds) {
    size_t count = 0;
    for (size_t i = 0; i < 408; i++) {
        char unused[32];
        if (json_integer_value(json_array_get(kinds, i)) != 5) { continue; }
        snprintf(unused, sizeof unused, "[UNUSED_ROW_%zu]", i);
        assert_string_equal(json_string_value(json_array_get(tokens, i)), unused);
        count++;
    }
    return count;
}

static void check_tokens(const ReadGguf *gguf, const json_t *root, bool characters) {
    const json_t *tokens = json_object_get(gguf->keys, "tokenizer.ggml.tokens"),
                 *kinds = json_object_get(gguf->keys, "tokenizer.ggml.token_type"),
                 *merges = json_object_get(gguf->keys, "tokenizer.ggml.merges"),
                 *scores = json_object_get(gguf->keys, "tokenizer.ggml.scores"),
                 *model = json_object_get(root, "model"), *vocabulary = json_object_get(model, "vocab"),
                 *added = json_object_get(root, "added_tokens"), *given = json_object_get(model, "merges"),
                 *id;
    const char *text, *unknown = json_string_value(json_object_get(model, "unk_token"));
    bool made[408] = {false};
    size_t i, named = 0;
    assert_int_equal(json_array_size(tokens), 408);
    assert_int_equal(json_array_size(kinds), 408);
    json_object_foreach((json_t *)vocabulary, text, id) {
        size_t place = (size_t)json_integer_value(id);
        unsigned byte;
        bool is_byte = characters && strlen(text) == 6 && sscanf(text, "<0x%2X>", &byte) == 1;
        assert_string_equal(json_string_value(json_array_get(tokens, place)), text);
        json_int_t kind = json_integer_value(json_array_get(kinds, place));
        if (unknown != NULL && strcmp(text, unknown) == 0) { assert_int_equal(kind, 2); }
        if (kind != 2 && kind != 3) { assert_int_equal(kind, is_byte ? 6 : 1); }
        named++;
    }
    json_array_foreach(added, i, id) {
        size_t place = (size_t)json_integer_value(json_object_get(id, "id"));
        json_int_t kind = json_integer_value(json_array_get(kinds, place));
        assert_true(json_equal(json_array_get(tokens, place), json_object_get(id, "content")));
        if (kind != 2) { assert_int_equal(kind, json_is_true(json_object_get(id, "special")) ? 3 : 4); }
        named += json_object_get(vocabulary, json_string_value(json_object_get(id, "content"))) == NULL;
    }
    named += count_unused(tokens, kinds);
    assert_int_equal(named, 408); // the rest are rows without a token
    assert_true(characters ? merges == NULL : json_array_size(merges) == json_array_size(given));
    assert_true((scores != NULL) == characters);
    for (i = 0; i < json_array_size(given); i++) {
        const char *left, *right;
        char whole[256];
        const json_t *merge = json_array_get(given, i);
        if (json_unpack((json_t *)merge, "[s, s]", &left, &right) == 0) {
            snprintf(whole, sizeof whole, "%s %s", left, right);
        } else {
            snprintf(whole, sizeof whole, "%s", json_string_value(merge));
        }
        if (!characters) {
            assert_string_equal(json_string_value(json_array_get(merges, i)), whole);
            continue;
        }
        char *blank = strchr(whole, ' ');
        memmove(blank, blank + 1, strlen(blank));
        size_t place = (size_t)json_integer_value(json_object_get(vocabulary, whole));
        bool first = !made[place]; // of the merges that make a token
        double score = json_number_value(json_array_get(scores, place));
        made[place] = true;
        assert_true(first ? score == -(double)i : score > -(double)i);
    }
}

static void tokenizers_of_each_kind_are_written(void **state) {
    static const struct {
        const char *kind, *model, *pre;
    } cases[] = {{"gpt2", "gpt2", "gpt-2"},
                 {"smollm", "gpt2", "smollm"},
                 {"llama3", "gpt2", "llama-bpe"},
                 {"qwen2", "gpt2", "qwen2"},
                 {"prepend", "llama", "default"},
                 {"never", "llama", "default"},
                 {"digits", NULL, "in a way whose name in llama.cpp is not known here"},
                 {"llama3", NULL, "in a way whose name in llama.cpp is not known here"}}; // it merges
    Stage *stage = stage_of(state);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        json_t *root = reference_tokenizer(stage, cases[i].kind);
        bool characters = cases[i].model != NULL && strcmp(cases[i].model, "llama") == 0;
        if (cases[i].model == NULL) { json_object_del(json_object_get(root, "model"), "ignore_merges"); }
        if (characters) { // in the vocabulary, and added
            json_object_set_new(json_object_get(root, "model"), "unk_token", json_string("<|endoftext|>"));
        }
        write_tokenizer(stage, "kind", root);
        stage_write(stage, "kind/tokenizer_config.json", "{\"bos_token\": \"<|end|>\"}");
        if (cases[i].model == NULL) {
            Outcome outcome = program_run(stage, 0, "export --from qwen3 --tokenizer kind --to model.gguf");
            outcome_check(&outcome, 2, cases[i].kind);
            text_check(outcome.errors, cases[i].pre, cases[i].kind);
            json_decref(root);
            continue;
        }
        ReadGguf gguf;
        run_well(stage, "export --from %s --tokenizer kind --to model.gguf", "qwen3");
        read_gguf(stage, "model.gguf", &gguf);
        const json_t *prefix = json_object_get(gguf.keys, "tokenizer.ggml.add_space_prefix");
        assert_string_equal(json_string_value(json_object_get(gguf.keys, "tokenizer.ggml.model")),
                            cases[i].model);
        assert_string_equal(json_string_value(json_object_get(gguf.keys, "tokenizer.ggml.pre")),
                            cases[i].pre);
        assert_true(characters ? json_is_boolean(prefix) : prefix == NULL);
        if (characters) { assert_int_equal(json_is_true(prefix), strcmp(cases[i].kind, "prepend") == 0); }
        check_tokens(&gguf, root, characters);
        assert_int_equal(json_integer_value(json_object_get(gguf.keys, "tokenizer.ggml.bos_token_id")), 400);
        assert_non_null(json_object_get(gguf.keys, "tokenizer.ggml.eos_token_id"));
        assert_int_equal(json_integer_value(json_object_get(gguf.keys, "tokenizer.ggml.eos_token_id")), 0);
        close_gguf(&gguf);
        json_decref(root);
    }
}

static const char chat_modelfile[] =
    "FROM ./chat.gguf\nTEMPLATE \"\"\"{{- $system := \"\" }}{{- $begun := false }}{{- range .Messages }}"
    "{{- if eq .Role \"system\" }}{{- $system = .Content }}{{- else if eq .Role \"assistant\" }}"
    "{{ .Content }}{{- else }}{{- if $begun }}{{ \"<|end|>Q \" }}{{ .Content }}{{ \"\\nA\" }}"
    "{{- else if $system }}{{ \"S \\\"\" }}{{ $system }}{{ \"<|end|>Q \" }}{{ .Content }}{{ \" A\" }}"
    "{{- else }}{{ \"Q \" }}{{ .Content }}{{ \"\\nA\" }}{{- end }}{{- $begun = true }}{{- end }}{{- end "
    "}}"
    "{{ \"T\" }}\"\"\"\nPARAMETER stop \"<|end|>\"\nSYSTEM \"\"\"Be kind.\"\"\"\n";

static void a_chat_becomes_a_modelfile(void **state) {
    Stage *stage = stage_of(state);
    char path[STAGE_PATH_SIZE];
    ReadGguf gguf;
    shell(stage, "mkdir -p out");
    Outcome outcome = program_run(stage, 0, "export --from qwen3 --to out/chat.gguf --system 'Be kind.'");
    outcome_check(&outcome, 0, "a chat");
    text_check(outcome.output, "ollama create NAME -f out/chat.Modelfile", "what to do next");
    char *text = file_read(stage_path(stage, "out/chat.Modelfile", path));
    assert_string_equal(text, chat_modelfile);
    free(text);
    read_gguf(stage, "out/chat.gguf", &gguf);
    // As in transformers, the file wins over the key of tokenizer_config.json.
    assert_string_equal(json_string_value(json_object_get(gguf.keys, "tokenizer.chat_template")),
                        "{{ messages }}");
    assert_string_equal(json_string_value(json_object_get(gguf.keys, "general.name")), "chat");
    assert_int_equal(json_integer_value(json_object_get(gguf.keys, "tokenizer.ggml.eot_token_id")), 400);
    assert_int_equal(json_integer_value(json_object_get(gguf.keys, "tokenizer.ggml.eos_token_id")), 0);
    assert_false(json_is_true(json_object_get(gguf.keys, "tokenizer.ggml.add_bos_token")));
    close_gguf(&gguf);
    // A template may have the token in front of a text; Ollama puts it there itself.
    json_t *root = reference_tokenizer(stage, "gpt2");
    json_object_set_new(root, "post_processor",
                        json_pack("{s:s, s:[{s:{s:s, s:i}}]}", "type", "TemplateProcessing", "single",
                                  "SpecialToken", "id", "<|end|>", "type_id", 0));
    shell(
        stage,
        "cp -r qwen3 begins && rm begins/checksums.json begins/chat_template.jinja && sed -i 's/Q /<|end|>Q "
        "/; s/S /<|end|>S /' begins/chat.json && printf '{\"chat_template\": \"old\", \"model_max_length\": "
        "1000000000000000019884624838656}' > begins/tokenizer_config.json");
    write_tokenizer(stage, "begins", root);
    run_well(stage, "export --from %s --to %s.gguf", "begins");
    text = file_read(stage_path(stage, "begins.Modelfile", path));
    text_check(text, "{{- else if $system }}{{ \"S \\\"\" }}{{ $system }}", "with a system text");
    text_check(text, "{{- else }}{{ \"Q \" }}{{ .Content }}", "without");
    free(text);
    read_gguf(stage, "begins.gguf", &gguf);
    assert_string_equal(json_string_value(json_object_get(gguf.keys, "tokenizer.chat_template")), "old");
    assert_int_equal(json_integer_value(json_object_get(gguf.keys, "tokenizer.ggml.bos_token_id")), 400);
    assert_true(json_is_true(json_object_get(gguf.keys, "tokenizer.ggml.add_bos_token")));
    close_gguf(&gguf);
    json_decref(root);
    shell(stage, "printf '{\"chat_template\": [{\"name\": \"tools\", \"template\": \"x\"}, {\"name\": "
                 "\"default\", \"template\": \"y\"}, {\"name\": \"rag\", \"template\": \"z\"}]}' > "
                 "begins/tokenizer_config.json");
    run_well(stage, "export --from %s --to named.gguf", "begins");
    read_gguf(stage, "named.gguf", &gguf);
    assert_string_equal(json_string_value(json_object_get(gguf.keys, "tokenizer.chat_template")), "y");
    close_gguf(&gguf);
    // Without a chat the text goes on.
    shell(stage, "cp -r qwen3 plain && rm plain/chat* plain/checksums.json");
    run_well(stage, "export --from %s --to %s.gguf", "plain");
    text = file_read(stage_path(stage, "plain.Modelfile", path));
    assert_string_equal(text, "FROM ./plain.gguf\nTEMPLATE \"\"\"{{ .Prompt }}\"\"\"\n");
    free(text);
}

// Where nothing else is said to end a text, what ends an answer does, and begins one.
static void an_end_of_answers_may_end_texts(void **state) {
    static const char *const keys[] = {"tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id",
                                       "tokenizer.ggml.eot_token_id"};
    Stage *stage = stage_of(state);
    ReadGguf gguf;
    shell(stage, "cp -r qwen3 ended && rm ended/checksums.json && sed -i 's/endoftext/endless/g' "
                 "ended/tokenizer.json && sed -i 's/\"eos_token_id\": *[0-9][0-9]*/\"eos_token_id\": null/' "
                 "ended/config.json");
    run_well(stage, "export --from %s --to %s.gguf", "ended");
    read_gguf(stage, "ended.gguf", &gguf);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(json_integer_value(json_object_get(gguf.keys, keys[i])), 400);
    }
    close_gguf(&gguf);
}

// Adapters with more elements than any matrix of their model, as a GGUF of their own and merged.
static void adapters_stay_apart_or_are_merged(void **state) {
    Stage *stage = stage_of(state);
    char path[STAGE_PATH_SIZE];
    float ignored;
    HfModel model;
    ReadGguf gguf;
    float *parameters;
    stage_write(stage, "text.txt",
                "Once upon a time there was a fox, and it was quick. Twice upon a time, too.\n");
    shell(stage, "for i in 1 2 3 4 5 6 7; do cat text.txt text.txt > more && mv more text.txt; done");
    run_well(stage,
             "--finetune %s --data text.txt --lora-rank 1000 --tokens 2k --seq-len 32 --micro-batch 2 "
             "--optimizer ddp "
             "--val-batches none --sample-tokens none --lr 0.01 --threads 1 --device cpu --out tuned",
             "llama");
    run_well(stage, "export --from %s --to %s.gguf --type f32 --merge off", "tuned");
    shell(stage, "! test -e tuned.Modelfile && cp -r tuned/checkpoints/commit-*/model adapters");
    read_gguf(stage, "tuned.gguf", &gguf);
    take_model(stage, "adapters", &model, &parameters);
    assert_string_equal(json_string_value(json_object_get(gguf.keys, "general.type")), "adapter");
    assert_string_equal(json_string_value(json_object_get(gguf.keys, "adapter.type")), "lora");
    assert_close(json_number_value(json_object_get(gguf.keys, "adapter.lora.alpha")),
                 1000 * (double)model.adapters.scale, 1e-3, "alpha");
    size_t sides = 0, D = (size_t)model_head_size(&model.config);
    for (int i = 0; i < model.table.count; i++) {
        for (int side = 0; side < 2; side++) {
            const SafetensorsEntry *entry = model.adapters.entries[2 * i + side];
            if (entry == NULL) { continue; }
            const ParameterInfo *info = &model.table.entries[i];
            float *values = (float *)memory_take(entry->count, sizeof *values);
            safetensors_read_floats(entry, 0, entry->count, values);
            const ReadTensor *tensor = &gguf.tensors[sides++];
            assert_non_null(strstr(tensor->name, side == 0 ? ".weight.lora_a" : ".weight.lora_b"));
            assert_true(safetensors_has_shape(entry, 2, (const size_t[]){tensor->rows, tensor->columns}));
            for (size_t k = 0; k < entry->count; k++) {
                size_t row = side == 0 ? k / tensor->columns : row_of(info, k / tensor->columns, D, true);
                assert_true(element(tensor, k, &ignored) ==
                            values[row * tensor->columns + k % tensor->columns]);
            }
            free(values);
        }
    }
    assert_int_equal(sides, gguf.tensor_count);
    close_gguf(&gguf);
    run_well(stage, "export --from %s --to merged.gguf --type f32", "tuned");
    read_gguf(stage, "merged.gguf", &gguf);
    for (int i = 0; i < model.table.count; i++) { check_tensor(&gguf, &model, i, parameters, true, 0); }
    close_gguf(&gguf);
    free(parameters);
    hf_model_close(&model);
    // As a directory it is what average makes of one checkpoint.
    run_well(stage, "export --from %s --to directory", "tuned");
    run_well(stage, "average --from %s --last 1 --out averaged", "tuned");
    shell(stage, "cmp directory/model.safetensors averaged/model.safetensors && cmp directory/config.json "
                 "averaged/config.json && cmp directory/tokenizer.json bpe/tokenizer.json");
    assert_int_equal(access(stage_path(stage, "directory/chat.json", path), F_OK), 0);
}

static const struct {
    const char *arguments, *part;
} refusals[] = {
    {"export --from qwen3", "export needs --to FILE.gguf, or --to DIRECTORY"},
    {"export --to a.gguf", "give --from DIR"},
    {"export --from nowhere --to a.gguf", "nowhere is neither a directory"},
    {"export --from bare --to a.gguf", "bare has no tokenizer.json, which a GGUF needs"},
    {"export --from qwen3 --tokenizer nowhere --to a.gguf", "cannot read nowhere"},
    {"export --from qwen3 --to nowhere/a.gguf", "cannot create nowhere/a.gguf: No such file"},
    {"export --from qwen3 --to bpe", "cannot create the directory bpe: File exists"},
    {"export --from qwen3 --to a.gguf --type q4_0", "--type"},
    {"export --from qwen3 --to a.gguf --merge off", "--from must have some"},
    {"export --from few --to a.gguf", "has 406 tokens, and the model only 399 rows"},
    {"export --from rowless --to a.gguf",
     "chat.json: the model has no row for the token that ends an answer"},
    {"export --from neo --tokenizer bpe --to a.gguf", "llama.cpp knows no gpt_neo: --to DIRECTORY"},
    {"export --from unscaled --to a.gguf", "knows no gpt2 whose scale_attn_weights is false"},
    {"export --from biased --to a.gguf", "knows no qwen3 with attention_bias"},
    {"export --from scaled --to a.gguf", "knows no qwen2 with positions of the kind llama3"},
    {"export --from huge --to a.gguf", "has a number that this --type cannot hold: choose f32"},
    {"export --from huge --to a.gguf --type q8_0", "has a number that this --type cannot hold"},
    {"export --from bare --tokenizer kindless --to a.gguf --system x",
     "--system needs a model, not adapters alone"},
    {"export --from qwen3 --to a.gguf --system 'x \"\"\" y'", "and no \"\"\" in the text"},
    {"export --from qwen3 --to folder.gguf", "cannot write folder.gguf: Is a directory"},
    {"export --from qwen3 --to behind.gguf", "cannot write behind.Modelfile: Is a directory"},
    {"export --from qwen3 --to 'a\nb.gguf'", "--to has a control character in it"},
    {"export --from qwen3 --to there --type q8_0", "--type and --system are for a GGUF"},
    {"export --from qwen3 --to there --system x", "--type and --system are for a GGUF"},
    {"export --from qwen3 --to there --tokenizer nowhere", "cannot read nowhere"},
    {"export --from silent --to a.gguf --system x", "whose chat takes a system text"},
    {"export --from untruncated --to a.gguf", "knows no qwen2 with positions whose truncate is false"},
    {"export --from wide --to a.gguf", "whose heads together are not as wide as hidden_size"},
    {"export --from endless --to a.gguf", "endless/tokenizer.json has no token <|endoftext|>"},
    {"export --from qwen3 --to a.gguf --lr 1", "--lr has no effect on train_gpt export"},
    {"export --from damaged --to a.gguf", "damaged"},
};

// The models that they name.
static void write_refused(const Stage *stage) {
    static const struct {
        const char *name, *config;
        float value;
    } made[] = {
        {"few", "{\"model_type\": \"qwen3\", " SIZES ", \"vocab_size\": 399, \"num_key_value_heads\": 4}", 0},
        {"rowless", "{\"model_type\": \"qwen3\", " SIZES ", \"vocab_size\": 400, \"num_key_value_heads\": 4}",
         0},
        {"neo",
         "{\"model_type\": \"gpt_neo\", \"num_layers\": 1, \"hidden_size\": 32, \"num_heads\": 2, "
         "\"vocab_size\": 408, \"max_position_embeddings\": 32, \"attention_types\": [[[\"global\"], 1]]}",
         0},
        {"unscaled",
         "{\"model_type\": \"gpt2\", \"n_layer\": 1, \"n_embd\": 32, \"n_head\": 2, "
         "\"n_positions\": 32, \"vocab_size\": 408, \"scale_attn_weights\": false}",
         0},
        {"biased",
         "{\"model_type\": \"qwen3\", " SIZES ", \"num_key_value_heads\": 4, \"attention_bias\": true}", 0},
        {"scaled",
         "{\"model_type\": \"qwen2\", " SIZES ", \"num_key_value_heads\": 4, " SCALED(
             "llama3", ", \"low_freq_factor\": 1.0, \"high_freq_factor\": 4.0" TRAINED_FOR("32")) "}",
         0},
        {"untruncated",
         "{\"model_type\": \"qwen2\", " SIZES
         ", \"num_key_value_heads\": 4, " SCALED("yarn", TRAINED_FOR("16") ", \"truncate\": false") "}",
         0},
        {"wide", "{\"model_type\": \"qwen2\", " SIZES ", \"num_key_value_heads\": 4, \"head_dim\": 32}", 0},
        {"huge", "{\"model_type\": \"qwen3\", " SIZES ", \"num_key_value_heads\": 4}", 1e9f},
    };
    shell(stage,
          "cp -r qwen3 bare && rm bare/tokenizer.json bare/chat* bare/checksums.json && mkdir kindless && "
          "cp bpe/tokenizer.json kindless && cp -r qwen3 damaged && truncate -s -4 damaged/model.safetensors "
          "&& mkdir "
          "folder.gguf behind.Modelfile && cp -r qwen3 silent && rm silent/checksums.json && sed -i "
          "'s/\"system\": [^]]*],/\"system\": null,/' silent/chat.json && cp -r bare endless && sed "
          "'s/endoftext/endless/g' bpe/tokenizer.json > endless/tokenizer.json && sed -i "
          "'s/\"eos_token_id\": *[0-9][0-9]*/\"eos_token_id\": null/' endless/config.json");
    for (size_t i = 0; i < sizeof made / sizeof made[0]; i++) {
        save_model(stage, made[i].name, made[i].config, NULL, made[i].value);
    }
}

static void what_cannot_be_exported_is_refused(void **state) {
    Stage *stage = stage_of(state);
    write_refused(stage);
    stage_write(stage, "a.gguf", "before");
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
        Outcome outcome = program_run(stage, 0, refusals[i].arguments);
        outcome_check(&outcome, 2, refusals[i].arguments);
        text_check(outcome.errors, refusals[i].part, refusals[i].arguments);
        assert_int_equal(text_lines(outcome.errors), 1);
        shell(stage,
              "test \"$(cat a.gguf)\" = before && ! test -e a.gguf.new && test -e bpe/tokenizer.json && "
              "! test -e there && ! test -e behind.gguf");
    }
}

// Also told by a process that Slurm started, alone in its world, as its second one.
static void a_full_disk_loses_nothing(void **state) {
    static const char *const targets[] = {"full.gguf", "whole", "whole"};
    Stage *stage = stage_of(state);
    for (int i = 0; i < 3; i++) {
        stage_write(stage, "full.gguf", "before");
        shell(stage,
              "(ulimit -f 40; %s \"$TRAIN_GPT\" export --from llama --to %s 2> errors.txt; test $? = 3) && "
              "grep -q 'cannot write .*File too large' errors.txt && test $(wc -l < errors.txt) = 1 && "
              "test \"$(cat full.gguf)\" = before && ! ls | grep -q 'full.gguf.new\\|full.Modelfile\\|whole'",
              i == 2 ? "SLURM_PROCID=1" : "", targets[i]);
    }
}

// Each fp16, and what lies halfway between two: the even one of both.
static void fp16_rounds_to_nearest_even(void **state) {
    (void)state;
    for (unsigned half = 0; half < 0x7c00; half++) {
        float value = half_value((uint16_t)half), next = half_value((uint16_t)(half + 1)),
              middle = value + (next - value) / 2;
        uint16_t even = (uint16_t)(half + half % 2);
        assert_int_equal(fp16_from_float(value), half);
        assert_int_equal(fp16_from_float(-value), half | 0x8000u);
        assert_int_equal(fp16_from_float(middle), half == 0x7bff ? 0x7c00 : even);
        assert_int_equal(fp16_from_float(nextafterf(middle, 0)), half);
        assert_int_equal(fp16_from_float(nextafterf(middle, INFINITY)), half + 1);
    }
    assert_int_equal(fp16_from_float(INFINITY), 0x7c00);
    assert_int_equal(fp16_from_float(-1e30f), 0xfc00);
    assert_true((fp16_from_float(NAN) & 0x7fff) > 0x7c00);
}

#define EXPORT_TEST(function) cmocka_unit_test_prestate_setup_teardown(function, NULL, stage_end_test, &stage)

int main(void) {
    static Stage stage;
    const struct CMUnitTest tests[] = {
        EXPORT_TEST(every_byte_is_read_back),
        EXPORT_TEST(factors_are_those_of_the_positions),
        EXPORT_TEST(tokenizers_of_each_kind_are_written),
        EXPORT_TEST(a_chat_becomes_a_modelfile),
        EXPORT_TEST(an_end_of_answers_may_end_texts),
        EXPORT_TEST(adapters_stay_apart_or_are_merged),
        EXPORT_TEST(what_cannot_be_exported_is_refused),
        EXPORT_TEST(a_full_disk_loses_nothing),
        EXPORT_TEST(fp16_rounds_to_nearest_even),
    };
    stage_open(&stage);
    write_models(&stage);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    stage_close(&stage);
    return failed;
}
