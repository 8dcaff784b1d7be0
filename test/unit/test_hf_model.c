// test_hf_model.c: models in Hugging Face directories. A directory that transformers
// wrote is read bit by bit, gives transformers' logits, and is written again as it was; a
// directory that does not hold the model of its configuration is refused with a line that
// names what is wrong.
//
// test/reference/pretrained is such a directory; dev/reference/make_pretrained.py makes
// it. With arguments this program is the C half of dev/reference/check_pretrained.py:
//
//     test_hf_model FROM TO
//
// loads FROM, computes the logits of the tokens in FROM/logits.safetensors, and saves
// both as TO.
#include "test/harness.h"

#include <signal.h>
#include <sys/resource.h>

#include "checkpoint/hf_model.h"
#include "models/decoder.h"

#define REFERENCE "test/reference/pretrained"

static char scratch_directory[] = "/tmp/test_hf_model.XXXXXX";

// A path in the scratch directory; stays valid during the next call, but not during the
// one after.
static const char *scratch(const char *name) {
    static char paths[2][PATH_MAX];
    static int turn = 0;
    turn = !turn;
    snprintf(paths[turn], PATH_MAX, "%s/%s", scratch_directory, name);
    return paths[turn];
}

// ---- Loading a model and computing its logits -----------------------------------------

typedef struct Loaded {
    ModelConfig config;
    ParameterTable table;
    float *parameters;
} Loaded;

static bool try_load(const char *directory, Loaded *loaded, Error *error) {
    HfModel model;
    error->text[0] = '\0';
    if (!hf_model_open(&model, directory, error)) { return false; }
    loaded->config = model.config;
    parameter_table_make(&model.config, &loaded->table);
    loaded->parameters = (float *)malloc(loaded->table.parameter_count * sizeof(float));
    hf_model_read(&model, loaded->parameters);
    hf_model_close(&model);
    return true;
}

static void load_or_fail(const char *directory, Loaded *loaded) {
    Error error;
    if (!try_load(directory, loaded, &error)) { fail_msg("%s", error.text); }
}

static void loaded_free(Loaded *loaded) {
    parameter_table_free(&loaded->table);
    free(loaded->parameters);
}

// logits (B, T, V); the caller frees them.
static float *compute_logits(const Loaded *loaded, const int32_t *tokens, int B, int T) {
    const ModelConfig *config = &loaded->config;
    Arena arena;
    Stream stream;
    Model model;
    Error error;
    memset(&arena, 0, sizeof arena);
    memset(&stream, 0, sizeof stream);
    ModelSettings settings = model_on_cpu(B, T, 1);
    model_reserve(&model, &arena, config, &settings);
    if (!arena_commit(&arena, &error)) { abort(); }
    stream.pool = thread_pool_create(1, true);
    float *logits = (float *)malloc((size_t)(B * T) * (size_t)config->vocabulary * sizeof(float));
    model_forward(&model, &stream, loaded->parameters, tokens, NULL);
    matmul_forward(&stream, as_reals(logits), config->vocabulary, head_input(&model),
                   weights_of(&model, model.head), B * T, config->channels, config->vocabulary);
    thread_pool_destroy(stream.pool);
    arena_release(&arena);
    return logits;
}

// The tokens (B, T) beside a model.
static int32_t *read_tokens(const SafetensorsFile *file, int *B, int *T) {
    const SafetensorsEntry *entry = safetensors_find(file, "tokens");
    if (entry == NULL || entry->type != SAFETENSORS_I32 || entry->dimensions != 2) { abort(); }
    int32_t *tokens = (int32_t *)malloc(entry->bytes);
    memcpy(tokens, entry->data, entry->bytes);
    *B = (int)entry->shape[0];
    *T = (int)entry->shape[1];
    return tokens;
}

static void a_model_of_transformers_computes_its_logits(void **state) {
    (void)state;
    Loaded loaded;
    SafetensorsFile file;
    Error error;
    int B, T;
    load_or_fail(REFERENCE, &loaded);
    assert_int_equal(loaded.config.layers, 3);
    assert_true(!loaded.config.local[0] && loaded.config.local[1] && loaded.config.local[2]);
    assert_true(safetensors_open(&file, REFERENCE "/logits.safetensors", &error));
    const SafetensorsEntry *expected = safetensors_find(&file, "logits");
    int32_t *tokens = read_tokens(&file, &B, &T);
    float *logits = compute_logits(&loaded, tokens, B, T), value;
    assert_int_equal(expected->count, B * T * loaded.config.vocabulary);
    for (size_t i = 0; i < expected->count; i++) {
        safetensors_read_floats(expected, i, 1, &value);
        assert_close((double)logits[i], (double)value, 1e-4 * fmax(1.0, fabs((double)value)), "logit");
    }
    free(logits);
    free(tokens);
    safetensors_close(&file);
    loaded_free(&loaded);
}

// ---- Saving ---------------------------------------------------------------------------

// An item of the metadata; NULL: there is none of this key.
static const char *metadata(const SafetensorsFile *file, const char *key) {
    return json_string_value(json_object_get(json_object_get(file->header, "__metadata__"), key));
}

static void save_or_fail(const char *directory, const Loaded *loaded, const char *tokenizer) {
    Error error;
    if (!hf_model_save(directory, &loaded->config, &loaded->table, loaded->parameters, tokenizer, NULL, NULL,
                       &error)) {
        fail_msg("%s", error.text);
    }
}

static int entries_in(const char *path) {
    DIR *directory = opendir(path);
    int count = 0;
    assert_non_null(directory);
    while (readdir(directory) != NULL) { count++; }
    closedir(directory);
    return count - 2;
}

static void assert_same_config(const ModelConfig *config, const ModelConfig *expected) {
    ModelConfig copy = *config;
    memcpy(copy.name, expected->name, sizeof copy.name);
    assert_memory_equal(&copy, expected, sizeof copy);
}

static void what_is_saved_has_the_bits_of_what_was_loaded(void **state) {
    (void)state;
    Loaded loaded, again;
    SafetensorsFile before, after;
    Error error;
    load_or_fail(REFERENCE, &loaded);
    save_or_fail(scratch("saved"), &loaded, NULL);
    load_or_fail(scratch("saved"), &again);
    assert_same_config(&again.config, &loaded.config);
    assert_memory_equal(again.parameters, loaded.parameters, loaded.table.parameter_count * sizeof(float));
    assert_true(safetensors_open(&before, REFERENCE "/model.safetensors", &error));
    assert_true(safetensors_open(&after, scratch("saved/model.safetensors"), &error));
    assert_int_equal(before.count, after.count);
    for (size_t i = 0; i < before.count; i++) {
        assert_string_equal(before.entries[i].name, after.entries[i].name);
        assert_true(
            safetensors_has_shape(&after.entries[i], before.entries[i].dimensions, before.entries[i].shape));
        assert_memory_equal(before.entries[i].data, after.entries[i].data, before.entries[i].bytes);
    }
    assert_string_equal(metadata(&after, "format"), "pt");
    assert_int_equal(entries_in(scratch("saved")), 3); // with checksums.json
    safetensors_close(&before);
    safetensors_close(&after);
    loaded_free(&loaded);
    loaded_free(&again);
}

static ModelConfig make_config(const char *layers, double epsilon) {
    ModelConfig config;
    memset(&config, 0, sizeof config);
    config.family = &gpt_neo_family;
    config.layers = (int)strlen(layers);
    for (int l = 0; l < config.layers; l++) { config.local[l] = layers[l] == 'l'; }
    config.channels = 12;
    config.heads = 3;
    config.mlp_channels = 7;
    config.window = 3;
    config.positions = 5;
    config.vocabulary = 11;
    config.epsilon = epsilon;
    return config;
}

static ModelConfig make_gpt2_config(void) {
    ModelConfig config = make_config("gg", 1e-5);
    config.family = &gpt2_family;
    config.window = 0;
    config.scaled_scores = true;
    config.mlp_channels = HF_MODEL_PART + 7; // a row that is read in two parts
    return config;
}

// Matrices in GPT-2's layers are (in, out) in files and (out, in) here.
static void matrices_of_gpt2_are_turned(void **state) {
    (void)state;
    Loaded loaded = {make_gpt2_config(), {0}, NULL}, again;
    SafetensorsFile file;
    Error error;
    int turned = 0;
    parameter_table_make(&loaded.config, &loaded.table);
    loaded.parameters = (float *)malloc(loaded.table.parameter_count * sizeof(float));
    for (size_t i = 0; i < loaded.table.parameter_count; i++) { loaded.parameters[i] = (float)i; }
    save_or_fail(scratch("gpt2"), &loaded, NULL);
    load_or_fail(scratch("gpt2"), &again);
    assert_same_config(&again.config, &loaded.config);
    assert_memory_equal(again.parameters, loaded.parameters, loaded.table.parameter_count * sizeof(float));
    assert_true(safetensors_open(&file, scratch("gpt2/model.safetensors"), &error));
    for (int i = 0; i < loaded.table.count; i++) {
        const ParameterInfo *info = &loaded.table.entries[i];
        const SafetensorsEntry *entry = safetensors_find(&file, info->name);
        if (strstr(info->name, ".h.") == NULL || info->columns == 0) { continue; }
        size_t rows = (size_t)info->rows, columns = (size_t)info->columns, shape[2] = {columns, rows};
        assert_true(safetensors_has_shape(entry, 2, shape));
        for (size_t j = 0; j < info->count; j++) {
            float value;
            safetensors_read_floats(entry, j, 1, &value);
            assert_true(value == loaded.parameters[info->offset + j % rows * columns + j / rows]);
        }
        turned++;
    }
    assert_int_equal(turned, 2 * 4);
    safetensors_close(&file);
    loaded_free(&loaded);
    loaded_free(&again);
    ModelConfig gpt2 = make_gpt2_config(), neo = make_config("gg", 1e-5);
    assert_true(model_is_constant("h.1.attn.bias", &gpt2) &&
                model_is_constant("h.0.attn.masked_bias", &gpt2));
    assert_true(!model_is_constant("h.2.attn.bias", &gpt2) && !model_is_constant("h.1.attn.bias", &neo) &&
                !model_is_constant("h.1.attn.c_proj.bias", &gpt2));
}

static void every_configuration_is_read_back(void **state) {
    (void)state;
    static const char *const layers[] = {"g",   "l",      "gl",       "glgl",    "glglg",
                                         "ggl", "gglggl", "llllllll", "lggggggg"};
    static const double epsilons[] = {1e-5, 1e-6, 1.234567e-5, 0.1, 3.3333333e-7, 1e-12, 0.00195312488};
    mkdir(scratch("config"), 0777);
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++) {
        for (size_t j = 0; j < sizeof epsilons / sizeof *epsilons; j++) {
            ModelConfig config = make_config(layers[i], epsilons[j]), again;
            Error error;
            bool good = json_write(hf_model_describe(&config, NULL), scratch("config"), "config.json",
                                   JSON_INDENT(2) | JSON_REAL_PRECISION(9), &error) &&
                        model_find(scratch("config"), &again, &error);
            if (!good) { fail_msg("%s", error.text); }
            assert_same_config(&again, &config);
        }
    }
    // Another program's number may have more digits than are written. Checkpoints compare it.
    ModelConfig config = make_config("gl", 9.999999747378752e-06), again;
    json_t *first, *second;
    for (int i = 0; i < 2; i++) {
        Error error;
        assert_true(json_write(hf_model_describe(&config, NULL), scratch("config"), "config.json",
                               JSON_INDENT(2) | JSON_REAL_PRECISION(i == 0 ? 17 : 9), &error));
        assert_true(model_find(scratch("config"), i == 0 ? &config : &again, &error));
        assert_true((float)config.epsilon == 1e-5f);
    }
    first = hf_model_describe(&config, NULL);
    second = hf_model_describe(&again, NULL);
    assert_true(json_equal(first, second));
    json_decref(first);
    json_decref(second);
}

// Text of a small file.
static void read_text(const char *path, char text[4096]) {
    FILE *file = fopen(path, "r");
    if (file == NULL) { fail_msg("cannot open %s", path); }
    text[fread(text, 1, 4095, file)] = '\0';
    fclose(file);
}

static void write_text(const char *path, const char *text) {
    FILE *file = fopen(path, "w");
    if (file == NULL) { fail_msg("cannot open %s", path); }
    fputs(text, file);
    fclose(file);
}

static void the_configuration_is_short_and_plain(void **state) {
    (void)state;
    static const char *const lines[] = {
        "\"layer_norm_epsilon\": 1e-",  "\"GPTNeoForCausalLM\"",
        "\"model_type\": \"gpt_neo\"",  "\"activation_function\": \"gelu_new\"",
        "\"torch_dtype\": \"float32\"", "\"dtype\": \"float32\"",
        "\"eos_token_id\": null",       "\"tie_word_embeddings\": true",
        "\"resid_dropout\": 0.0"};
    ModelConfig config = make_config("glglgl", 1e-5);
    Error error;
    char text[4096];
    mkdir(scratch("plain"), 0777);
    assert_true(json_write(hf_model_describe(&config, NULL), scratch("plain"), "config.json",
                           JSON_INDENT(2) | JSON_REAL_PRECISION(9), &error));
    read_text(scratch("plain/config.json"), text);
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        if (strstr(text, lines[i]) == NULL) { fail_msg("%s lacks %s", text, lines[i]); }
    }
    json_t *written = config_json_write(&config), *types = json_object_get(written, "attention_types");
    char *dumped = json_dumps(types, JSON_COMPACT);
    assert_string_equal(dumped, "[[[\"global\",\"local\"],3]]");
    free(dumped);
    json_decref(written);
}

static void the_tokenizer_goes_with_the_model(void **state) {
    (void)state;
    Loaded loaded;
    char text[4096];
    load_or_fail(REFERENCE, &loaded);
    mkdir(scratch("tokenizer"), 0777);
    write_text(scratch("tokenizer/tokenizer.json"), "{\"added_tokens\":[{\"id\":9},{\"id\":50,\"content\":\"<"
                                                    "end>\"},{\"id\":51,\"content\":\"<end>\"}]}\n");
    write_text(scratch("tokenizer/tokenizer_config.json"),
               "{\"eos_token\":{\"content\":\"<end>\"},\"bos_token\":\"<begin>\", "
               "\"model_max_length\": 1000000000000000019884624838656}");
    write_text(scratch("tokenizer/vocab.json"), "{\"<begin>\":52,\"<end>\":1}");
    write_text(scratch("tokenizer/merges.txt"), "#version: 0.2\na b\n");
    write_text(scratch("tokenizer/unrelated.txt"), "x");
    write_text(scratch("tokenizer/chat_template.jinja"), "x");
    write_text(scratch("tokenizer/chat.json"), "{}");
    write_text(scratch("tokenizer/added_tokens.json"), "{}");
    write_text(scratch("tokenizer/special_tokens_map.json"), "{}");
    save_or_fail(scratch("with_tokenizer"), &loaded, scratch("tokenizer"));
    assert_int_equal(entries_in(scratch("with_tokenizer")), 11);
    read_text(scratch("with_tokenizer/merges.txt"), text);
    assert_string_equal(text, "#version: 0.2\na b\n");
    read_text(scratch("with_tokenizer/config.json"), text);
    assert_non_null(strstr(text, "\"eos_token_id\": 50"));
    assert_non_null(strstr(text, "\"bos_token_id\": 52"));
    assert_int_equal(hf_model_special_id(scratch("tokenizer"), "eos_token", 50), -1); // beyond the vocabulary
    assert_int_equal(hf_model_special_id(scratch("tokenizer"), "pad_token", 53), -1);
    mkdir(scratch("pieces"), 0777); // as SentencePiece leaves it: its file of tokens is not read
    write_text(scratch("pieces/tokenizer.model"), "x");
    write_text(scratch("pieces/tokenizer_config.json"), "{\"eos_token\":\"<end>\"}");
    write_text(scratch("pieces/config.json"), "{\"eos_token_id\":2}");
    save_or_fail(scratch("with_pieces"), &loaded, scratch("pieces"));
    assert_int_equal(entries_in(scratch("with_pieces")), 5);
    read_text(scratch("with_pieces/config.json"), text);
    assert_non_null(strstr(text, "\"eos_token_id\": 2"));
    char here[PATH_MAX], beside[PATH_MAX];
    assert_true(getcwd(here, sizeof here) != NULL && chdir(scratch("tokenizer")) == 0);
    bool found = hf_model_find_tokenizer("tokenizer.json", "merges.txt", beside);
    assert_true(chdir(here) == 0 && found);
    Error error;
    mkdir(scratch("pieces/vocab.json"), 0777);
    assert_false(hf_model_copy_tokenizer(scratch("pieces"), scratch("with_pieces"), &error));
    assert_non_null(strstr(error.text, "cannot read "));
    assert_non_null(strstr(error.text, "/pieces/vocab.json: Is a directory"));
    write_text(scratch("tokenizer/tokenizer_config.json"), "{\"eos_token\":[7],");
    assert_int_equal(hf_model_special_id(scratch("tokenizer"), "eos_token", 53), -1);
    loaded_free(&loaded);
}

// A model without tokenizer_config.json keeps the ids of its config.json.
static void ids_of_the_configuration_are_kept(void **state) {
    (void)state;
    Loaded loaded;
    char text[4096];
    load_or_fail(REFERENCE, &loaded);
    mkdir(scratch("named"), 0777);
    write_text(scratch("named/config.json"), "{\"bos_token_id\": 3, \"eos_token_id\": 4}");
    write_text(scratch("named/generation_config.json"), "{\"eos_token_id\": 4}");
    save_or_fail(scratch("keeps_ids"), &loaded, scratch("named"));
    read_text(scratch("keeps_ids/config.json"), text);
    assert_non_null(strstr(text, "\"bos_token_id\": 3"));
    assert_non_null(strstr(text, "\"eos_token_id\": 4"));
    read_text(scratch("keeps_ids/generation_config.json"), text);
    assert_string_equal(text, "{\"eos_token_id\": 4}");
    save_or_fail(scratch("keeps_on"), &loaded, scratch("keeps_ids"));
    read_text(scratch("keeps_on/config.json"), text);
    assert_non_null(strstr(text, "\"eos_token_id\": 4"));
    write_text(scratch("named/config.json"), "{\"bos_token_id\": [\"3\"], \"eos_token_id\": 1000000}");
    assert_int_equal(hf_model_special_id(scratch("named"), "bos_token", 50), -1);
    assert_int_equal(hf_model_special_id(scratch("named"), "eos_token", 50), -1);
    write_text(scratch("named/config.json"), "{\"bos_token_id\": -1, \"eos_token_id\": [-1, 6]}");
    assert_int_equal(hf_model_special_id(scratch("named"), "eos_token", 50), 6);
    json_t *none = hf_model_special_ids(scratch("named"), "bos_token", 50);
    assert_true(json_is_null(none));
    json_decref(none);
    write_text(scratch("named/config.json"), "{\"bos_token_id\": [], \"eos_token_id\": [5, 1000000, 7]}");
    save_or_fail(scratch("keeps_list"), &loaded, scratch("named"));
    read_text(scratch("keeps_list/config.json"), text);
    assert_non_null(strstr(text, "\"bos_token_id\": null"));
    char *list = strstr(text, "\"eos_token_id\": ["), *rest;
    assert_non_null(list);
    assert_int_equal(strtol(list + strlen("\"eos_token_id\": ["), &rest, 10), 5);
    assert_int_equal(strtol(rest + 1, NULL, 10), 7);
    assert_int_equal(hf_model_special_id(scratch("named"), "eos_token", 50), 5);
    loaded_free(&loaded);
}

// ---- Damage ---------------------------------------------------------------------------

static void expect_words(const Error *error, const char *words) {
    if (strstr(error->text, words) == NULL) { fail_msg("'%s' does not say '%s'", error->text, words); }
    for (const char *c = error->text; *c != '\0'; c++) { assert_true((unsigned char)*c >= 32 && *c != 127); }
}

static void flip_bit(const char *path, long at, int bit) {
    FILE *file = fopen(path, "r+b");
    assert_non_null(file);
    assert_int_equal(fseek(file, at, SEEK_SET), 0);
    int byte = fgetc(file);
    assert_true(byte != EOF && fseek(file, at, SEEK_SET) == 0);
    fputc(byte ^ 1 << bit, file);
    fclose(file);
}

static long size_of(const char *path) {
    struct stat status;
    assert_int_equal(stat(path, &status), 0);
    return (long)status.st_size;
}

static void expect_damage(const char *directory, const char *words) {
    Loaded loaded;
    Error error;
    assert_false(try_load(directory, &loaded, &error));
    expect_words(&error, words);
}

static void a_flipped_bit_is_noticed_in_every_file(void **state) {
    (void)state;
    static const char *const names[] = {"config.json", "model.safetensors", "tokenizer.json"};
    Loaded loaded;
    load_or_fail(REFERENCE, &loaded);
    mkdir(scratch("sound"), 0777);
    write_text(scratch("sound/tokenizer.json"), "{\"added_tokens\": []}");
    write_text(scratch("sound/merges.txt"), ""); // an empty file has no sum
    save_or_fail(scratch("damaged"), &loaded, scratch("sound"));
    loaded_free(&loaded);
    for (int i = 0; i < 3; i++) {
        char path[PATH_MAX], words[PATH_MAX];
        snprintf(path, sizeof path, "%s/damaged/%s", scratch_directory, names[i]);
        snprintf(words, sizeof words, "%s is damaged, or was changed", names[i]);
        for (long at = 0, size = size_of(path); at < size; at += size / 16 + 1) {
            flip_bit(path, at, (int)(at % 8));
            expect_damage(scratch("damaged"), words);
            flip_bit(path, at, (int)(at % 8));
        }
        load_or_fail(scratch("damaged"), &loaded);
        loaded_free(&loaded);
    }
    // What is changed on purpose is read once the sums are gone.
    flip_bit(scratch("damaged/model.safetensors"), size_of(scratch("damaged/model.safetensors")) - 1, 0);
    expect_damage(scratch("damaged"), "remove checksums.json");
    assert_int_equal(unlink(scratch("damaged/checksums.json")), 0);
    load_or_fail(scratch("damaged"), &loaded);
    loaded_free(&loaded);
}

// Every byte counts, also of a file that is longer than what is read at a time.
static void a_long_file_is_summed_to_its_end(void **state) {
    (void)state;
    static const size_t places[] = {0, (16 << 20) - 1, 16 << 20, 33 << 20};
    const size_t size = ((size_t)33 << 20) + 1;
    uint8_t *bytes = (uint8_t *)malloc(size);
    Error error = {""};
    for (size_t i = 0; i < size; i++) { bytes[i] = (uint8_t)(i * 2654435761u >> 13); }
    assert_int_equal(mkdir(scratch("long"), 0777), 0);
    FILE *file = fopen(scratch("long/weights"), "wb");
    assert_true(file != NULL && fwrite(bytes, 1, size, file) == size && fclose(file) == 0);
    free(bytes);
    assert_true(file_sums_write(scratch("long"), "", 0, &error));
    assert_true(file_sums_check(scratch("long"), &error));
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        flip_bit(scratch("long/weights"), (long)places[i], 3);
        if (file_sums_check(scratch("long"), &error)) { fail_msg("byte %zu is not summed", places[i]); }
        flip_bit(scratch("long/weights"), (long)places[i], 3);
    }
    assert_true(file_sums_check(scratch("long"), &error));
}

static void damaged_sums_are_refused(void **state) {
    (void)state;
    static const char *const texts[] = {"",
                                        "{",
                                        "[]",
                                        "{\"../model/config.json\": 5}",
                                        "{\"\": 5}",
                                        "{\"config.json\": \"5\"}",
                                        "{\"a\\u0007\": 5}",
                                        "{\"none.json\": 5}",
                                        "{\"config.json\": 5, \"config.json\": 5}"};
    Loaded loaded;
    load_or_fail(REFERENCE, &loaded);
    save_or_fail(scratch("sums"), &loaded, NULL);
    loaded_free(&loaded);
    long size = size_of(scratch("sums/checksums.json"));
    for (long at = 0; at + 1 < size; at++) {  // the last byte is a brace and no line end
        if (at == 1 || at == 2) { continue; } // blanks may stand for each other
        Error error;
        flip_bit(scratch("sums/checksums.json"), at, 0);
        if (try_load(scratch("sums"), &loaded, &error)) { fail_msg("byte %ld", at); }
        expect_words(&error, "sums/");
        flip_bit(scratch("sums/checksums.json"), at, 0);
    }
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        write_text(scratch("sums/checksums.json"), texts[i]);
        expect_damage(scratch("sums"), "sums/");
    }
}

// ---- Saving where it must fail --------------------------------------------------------

static void nothing_is_overwritten(void **state) {
    (void)state;
    Loaded loaded;
    Error error = {""};
    load_or_fail(REFERENCE, &loaded);
    mkdir(scratch("place"), 0777);
    assert_false(hf_model_save(scratch("place"), &loaded.config, &loaded.table, loaded.parameters, NULL, NULL,
                               NULL, &error));
    expect_words(&error, "/place: File exists");
    assert_int_equal(entries_in(scratch("place")), 0);
    loaded_free(&loaded);
}

static void a_full_disk_is_named(void **state) {
    (void)state;
    static const rlim_t room[2] = {10000, 100}; // for config.json, but not for the weights; not even for that
    static const char *const words[2] = {"model.safetensors: File too large", "config.json: File too large"};
    Loaded loaded;
    load_or_fail(REFERENCE, &loaded);
    struct rlimit old, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    small = old;
    for (int i = 0; i < 2; i++) {
        Error error = {""};
        small.rlim_cur = room[i];
        setrlimit(RLIMIT_FSIZE, &small);
        bool saved = hf_model_save(scratch("limited"), &loaded.config, &loaded.table, loaded.parameters, NULL,
                                   NULL, NULL, &error);
        setrlimit(RLIMIT_FSIZE, &old);
        assert_false(saved);
        expect_words(&error, words[i]);
        tree_remove(scratch("limited"));
    }
    signal(SIGXFSZ, handler);
    loaded_free(&loaded);
}

// ---- Directories that others wrote ----------------------------------------------------

// How the weights of a test differ from those of the reference.
typedef struct Change {
    const char *skip;   // a tensor that is left out
    const char *rename; // a tensor that is called `name` instead
    const char *name;
    const char *transpose;   // a tensor that gets shape (columns, rows)
    const char *retype;      // a tensor that becomes I32
    const char *extra;       // a tensor that is added, (1, 1, 3, 3) of U8
    bool bare;               // names without "transformer."
    bool head, another_head; // lm_head.weight is added: equal to wte, or with one bit changed
    int part, parts;         // of the tensors only those whose number is part modulo parts; 0 parts: all
} Change;

static bool is_name(const char *name, const char *other) { return other != NULL && strcmp(name, other) == 0; }

static void add_changed(SafetensorsPlan *plan, const SafetensorsEntry *entry, const Change *change) {
    const char *name = is_name(entry->name, change->rename) ? change->name : entry->name;
    size_t shape[2] = {entry->shape[0], entry->shape[1]};
    if (is_name(entry->name, change->transpose)) {
        shape[0] = entry->shape[1];
        shape[1] = entry->shape[0];
    }
    if (change->bare) { name += strlen("transformer."); }
    safetensors_plan_add(plan, name, is_name(entry->name, change->retype) ? SAFETENSORS_I32 : entry->type,
                         entry->dimensions, shape);
}

static bool is_in_part(const Change *change, const SafetensorsEntry *entry, size_t index) {
    return !is_name(entry->name, change->skip) &&
           (change->parts == 0 || index % (size_t)change->parts == (size_t)change->part);
}

static void write_changed(const char *path, const Change *change) {
    static const size_t mask[4] = {1, 1, 3, 3};
    SafetensorsFile file;
    SafetensorsPlan plan;
    Error error;
    assert_true(safetensors_open(&file, REFERENCE "/model.safetensors", &error));
    const SafetensorsEntry *wte = safetensors_find(&file, "transformer.wte.weight");
    plan = (SafetensorsPlan){.tensors = json_object()};
    for (size_t i = 0; i < file.count; i++) {
        if (is_in_part(change, &file.entries[i], i)) { add_changed(&plan, &file.entries[i], change); }
    }
    bool head = change->head || change->another_head;
    if (head) { safetensors_plan_add(&plan, "lm_head.weight", SAFETENSORS_F32, 2, wte->shape); }
    if (change->extra != NULL) { safetensors_plan_add(&plan, change->extra, SAFETENSORS_U8, 4, mask); }
    safetensors_plan_finish(&plan);
    assert_true(safetensors_create(path, &plan, &error));
    int descriptor = safetensors_join(path, &plan, &error);
    size_t place = plan.header_bytes;
    for (size_t i = 0; i < file.count; i++) {
        const SafetensorsEntry *entry = &file.entries[i];
        if (!is_in_part(change, entry, i)) { continue; }
        assert_true(file_write_all(descriptor, entry->data, entry->bytes, (off_t)place));
        place += entry->bytes;
    }
    if (head) {
        uint8_t last = wte->data[wte->bytes - 1] ^ (change->another_head ? 1 : 0);
        assert_true(file_write_all(descriptor, wte->data, wte->bytes, (off_t)place));
        assert_true(file_write_all(descriptor, &last, 1, (off_t)(place + wte->bytes - 1)));
    }
    assert_true(file_finish(descriptor, path, true, &error));
    safetensors_plan_free(&plan);
    safetensors_close(&file);
}

// A fresh directory with the reference's configuration.
static const char *fresh_directory(void) {
    Error error;
    tree_remove(scratch("model"));
    mkdir(scratch("model"), 0777);
    assert_true(hf_model_copy_file(REFERENCE "/config.json", scratch("model/config.json"), &error));
    return scratch("model");
}

static Change no_change(void) {
    Change change;
    memset(&change, 0, sizeof change);
    return change;
}

static void write_model(const Change *change) {
    fresh_directory();
    write_changed(scratch("model/model.safetensors"), change);
}

static void expect_reference(void) {
    Loaded loaded, expected;
    load_or_fail(scratch("model"), &loaded);
    load_or_fail(REFERENCE, &expected);
    assert_memory_equal(loaded.parameters, expected.parameters,
                        expected.table.parameter_count * sizeof(float));
    loaded_free(&loaded);
    loaded_free(&expected);
}

static void expect_refusal(const char *words) {
    Loaded loaded;
    Error error;
    if (try_load(scratch("model"), &loaded, &error)) { fail_msg("accepted: should say %s", words); }
    expect_words(&error, words);
    assert_non_null(strstr(error.text, scratch("model")));
}

static void names_without_transformer_are_read(void **state) {
    (void)state;
    Change change = no_change();
    change.bare = true;
    write_model(&change);
    expect_reference();
}

static void buffers_of_old_versions_are_ignored(void **state) {
    (void)state;
    static const char *const good[] = {"transformer.h.0.attn.attention.bias",
                                       "h.2.attn.attention.masked_bias"};
    static const char *const bad[] = {"transformer.h.3.attn.attention.bias",
                                      "transformer.h.0.attn.attention.q_proj.bias",
                                      "h.-1.attn.attention.bias", "transformer.h.0.attn.attention.bias2",
                                      "h.99999999999999999999.attn.attention.bias"};
    for (size_t i = 0; i < 2; i++) {
        Change change = no_change();
        change.extra = good[i];
        write_model(&change);
        expect_reference();
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        Change change = no_change();
        char words[128];
        change.extra = bad[i];
        write_model(&change);
        snprintf(words, sizeof words, "%s is unknown", bad[i]);
        expect_refusal(words);
    }
}

static void the_head_must_be_the_embedding(void **state) {
    (void)state;
    Change change = no_change();
    change.head = true;
    write_model(&change);
    expect_reference();
    change.skip = "transformer.wte.weight"; // then the head stands for both
    write_model(&change);
    expect_reference();
    change = no_change();
    change.another_head = true;
    write_model(&change);
    expect_refusal("lm_head.weight differs from transformer.wte.weight");
    change = no_change();
    change.rename = "transformer.wpe.weight";
    change.name = "lm_head.weight";
    write_model(&change);
    expect_refusal("lm_head.weight has shape (17, 20), expected (53, 20)");
}

static void what_is_wrong_with_the_tensors_is_named(void **state) {
    (void)state;
    Change change = no_change();
    change.skip = "transformer.h.1.ln_2.bias";
    write_model(&change);
    expect_refusal("transformer.h.1.ln_2.bias is missing");
    change.rename = "transformer.wpe.weight";
    change.name = "transformer.wpe.weigth\xc3\xbc";
    change.transpose = "transformer.h.0.mlp.c_fc.weight";
    change.retype = "transformer.ln_f.weight";
    write_model(&change);
    expect_refusal("transformer.h.0.mlp.c_fc.weight has shape (20, 27), expected (27, 20)");
    change.transpose = NULL;
    write_model(&change);
    expect_refusal("transformer.ln_f.weight is I32, allowed are F32, BF16, F16 and F64");
    change.retype = NULL;
    write_model(&change);
    expect_refusal("transformer.wpe.weigth\xc3\xbc is unknown");
    change = no_change();
    change.rename = "transformer.wpe.weight";
    change.name = "wte.weight";
    write_model(&change);
    expect_refusal("wte.weight occurs twice");
    change = no_change();
    change.parts = 100;
    change.part = 99;
    write_model(&change);
    expect_refusal("transformer.wte.weight is missing");
}

// A file with a header and no data.
static void write_header(const char *header) {
    uint64_t length = strlen(header);
    FILE *file = fopen(scratch("model/model.safetensors"), "wb");
    assert_non_null(file);
    fwrite(&length, sizeof length, 1, file);
    fputs(header, file);
    fclose(file);
}

static void a_long_shape_fits_into_the_line(void **state) {
    (void)state;
    char header[512] = "{\"wte.weight\":{\"dtype\":\"F32\",\"data_offsets\":[0,0],\"shape\":[0";
    for (int i = 0; i < 7; i++) { strcat(header, ",9223372036854775807"); }
    strcat(header, "]}}");
    fresh_directory();
    write_header(header);
    expect_refusal("wte.weight has shape (0, 9223372036854775807, ");
}

// ---- Adapters, and models of which a part was trained ---------------------------------

static TrainedPart make_part(const ModelConfig *config, const char *freeze, int rank) {
    TrainedChoice choice = {.freeze = freeze, .adapted = "*proj,c_*", .rank = rank, .alpha = 5};
    TrainedPart part;
    Error error = {""};
    if (!trained_part_make(&part, config, &choice, &error)) { fail_msg("%s", error.text); }
    return part;
}

// What is trained, beside the model in scratch("base"), is saved as scratch("model"). It must
// be read as what hf_model_complete makes of both.
static void check_part(const char *freeze, int rank) {
    HfModel base;
    Error error = {""};
    Loaded whole, before;
    load_or_fail(scratch("base"), &before);
    TrainedPart part = make_part(&before.config, freeze, rank);
    size_t count = part.table.parameter_count;
    float *trained = (float *)malloc(count * sizeof(float));
    for (size_t i = 0; i < count; i++) { trained[i] = 0.01f * (float)((int)(i * i % 13) - 6); }
    assert_true(hf_model_open(&base, scratch("base"), &error));
    tree_remove(scratch("model"));
    if (!hf_model_save_trained(scratch("model"), &before.config, &part, trained, &base, scratch("base"), NULL,
                               &error)) {
        fail_msg("%s", error.text);
    }
    float *complete = hf_model_complete(&base, &part, trained);
    hf_model_close(&base);
    load_or_fail(scratch("model"), &whole);
    assert_memory_equal(whole.parameters, complete, part.model.parameter_count * sizeof(float));
    for (int i = 0; i < part.model.count; i++) {
        const ParameterInfo *info = &part.model.entries[i];
        const TensorPlace *place = &part.places[i];
        const float *a = trained + place->trained, *b = a + (size_t)(rank * info->columns);
        for (size_t j = 0; j < info->count; j++) {
            double expected =
                (double)(place->kind == TRAINED_WHOLE ? a[j] : before.parameters[info->offset + j]);
            for (int k = 0; k < rank && place->kind == TRAINED_ADAPTED; k++) {
                int row = (int)j / info->columns, column = (int)j % info->columns;
                expected += 5.0 / rank * (double)b[row * rank + k] * (double)a[k * info->columns + column];
            }
            assert_close((double)complete[info->offset + j], expected, 1e-6, info->name);
        }
    }
    free(trained);
    free(complete);
    trained_part_free(&part);
    loaded_free(&whole);
    loaded_free(&before);
}

// What the adapters in scratch("model") say of themselves to peft.
static void expect_adapters(int rank, bool transposed, size_t modules, const char *first) {
    json_t *root = json_load_file(scratch("model/" ADAPTERS_CONFIG), 0, NULL),
           *names = json_object_get(root, "target_modules");
    assert_int_equal(json_integer_value(json_object_get(root, "r")), rank);
    assert_true(json_number_value(json_object_get(root, "lora_alpha")) == 5);
    assert_int_equal(json_is_true(json_object_get(root, "fan_in_fan_out")), transposed);
    assert_int_equal(json_array_size(names), modules);
    assert_string_equal(json_string_value(json_array_get(names, 0)), first);
    assert_string_equal(json_string_value(json_object_get(root, "peft_type")), "LORA");
    assert_string_equal(json_string_value(json_object_get(root, "task_type")), "CAUSAL_LM");
    json_decref(root);
}

static void a_trained_part_is_saved_and_read_as_the_whole_model(void **state) {
    (void)state;
    Loaded neo, gpt2;
    load_or_fail(REFERENCE, &neo);
    save_or_fail(scratch("base"), &neo, NULL);
    check_part("wte,h.1.*", 0);
    check_part("", 0);
    check_part("", 3);
    expect_adapters(3, false, 3 * 6, "h.0.attn.attention.q_proj");
    tree_remove(scratch("base"));
    loaded_free(&neo);
    ModelConfig config = {.family = &gpt2_family, .layers = 2, .channels = 6, .heads = 2, .mlp_channels = 9};
    config.positions = 8;
    config.vocabulary = 11;
    config.epsilon = 1e-5;
    config.scaled_scores = true;
    gpt2.config = config;
    parameter_table_make(&config, &gpt2.table);
    gpt2.parameters = (float *)malloc(gpt2.table.parameter_count * sizeof(float));
    for (size_t i = 0; i < gpt2.table.parameter_count; i++) { gpt2.parameters[i] = (float)(i % 17) / 16; }
    save_or_fail(scratch("base"), &gpt2, NULL);
    check_part("c_attn,*.bias", 0);
    check_part("", 2);
    expect_adapters(2, true, 2 * 4, "h.0.attn.c_attn");
    loaded_free(&gpt2);
}

// The model that adapters are for, in base/.
static void write_base(void) {
    Loaded neo;
    load_or_fail(REFERENCE, &neo);
    tree_remove(scratch("base"));
    save_or_fail(scratch("base"), &neo, NULL);
    loaded_free(&neo);
}

static void adapters_that_cannot_be_read_are_refused(void **state) {
    (void)state;
    static const char *const changes[][3] = {
        {"r", "0", ": r must be a whole number from 1 to 65536"},
        {"r", "4294967300", ": r must be a whole number from 1 to 65536"},
        {"lora_alpha", "\"a\"", ": lora_alpha must be a number"},
        {"peft_type", "\"IA3\"", ": peft_type must be \"LORA\""},
        {"peft_type", "null", ": peft_type must be \"LORA\""},
        {"bias", "\"all\"", ": bias must be \"none\""},
        {"bias", "true", ": bias must be \"none\""},
        {"modules_to_save", "[\"wte\"]", ": modules_to_save is not supported: merge them with peft"},
        {"rank_pattern", "{\"c_fc\": 1}", ": rank_pattern is not supported"},
        {"alpha_pattern", "{\"c_fc\": 1}", ": alpha_pattern is not supported"},
        {"use_dora", "true", "\"use_dora\" is not supported: merge them with peft"},
        {"use_bdlora", "{\"nblocks\": 2}", "\"use_bdlora\" is not supported"},
        {"use_what_comes_next", "true", "\"use_what_comes_next\" is not supported"},
        {"target_parameters", "[\"x\"]", "\"target_parameters\" is not supported"},
        {"layer_replication", "[[0, 2], [1, 2]]", "\"layer_replication\" is not supported"},
        {"trainable_token_indices", "[3]", "\"trainable_token_indices\" is not supported"},
        {"alora_invocation_tokens", "[3]", "\"alora_invocation_tokens\" is not supported"},
        {"lora_bias", "true", "\"lora_bias\" is not supported"},
        {"init_lora_weights", "\"pissa\"", "adapters that began as \"pissa\" change the model, too"},
        {"base_model_name_or_path", "null", ": base_model_name_or_path must be the directory of the model"},
        {"base_model_name_or_path", "\"openai-community/gpt2\"",
         "holds adapters of openai-community/gpt2, which is no directory of a model here: download it"},
        {"r", "2", "must be of numbers, and of shape (2, "},
    };
    Error error = {""};
    write_base();
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        check_part("", 3); // writes a sound one
        assert_int_equal(unlink(scratch("model/" FILE_SUMS_NAME)), 0);
        const char *path = scratch("model/" ADAPTERS_CONFIG);
        json_t *root = json_load_file(path, 0, NULL);
        json_object_set_new(root, changes[i][0], json_loads(changes[i][1], JSON_DECODE_ANY, NULL));
        assert_int_equal(json_dump_file(root, path, 0), 0);
        json_decref(root);
        expect_refusal(changes[i][2]);
    }
    check_part("", 3);
    assert_int_equal(unlink(scratch("model/" FILE_SUMS_NAME)), 0);
    assert_int_equal(rename(scratch("model/" ADAPTERS_WEIGHTS), scratch("model/adapter_model.bin")), 0);
    expect_refusal("AutoPeftModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT)");
    assert_int_equal(rename(scratch("base/model.safetensors"), scratch("base/away")), 0);
    expect_refusal("/model holds adapters of /"); // whose own mistake is said behind that
    expect_refusal("model.safetensors: No such file or directory");
    assert_int_equal(unlink(scratch("base/" FILE_SUMS_NAME)), 0);
    expect_refusal("/base has no model.safetensors, nor shards with an index");
    assert_int_equal(rename(scratch("base/away"), scratch("base/model.safetensors")), 0);
    check_part("", 3);
    assert_true(hf_model_copy_file(scratch("base/config.json"), scratch("model/" ADAPTERS_CONFIG), &error));
    expect_refusal("it is not what checksums.json beside it says");
}

// Writes the adapters in scratch("model") again, without their last tensor, or with that under
// another name.
static void write_all_but_the_last(const char *renamed) {
    SafetensorsFile file;
    SafetensorsPlan plan = {.tensors = json_object()};
    Error error = {""};
    assert_true(safetensors_open(&file, scratch("model/" ADAPTERS_WEIGHTS), &error));
    size_t count = file.count - (renamed == NULL), place;
    for (size_t i = 0; i < count; i++) {
        const SafetensorsEntry *entry = &file.entries[i];
        safetensors_plan_add(&plan, i + 1 < file.count ? entry->name : renamed, entry->type,
                             entry->dimensions, entry->shape);
    }
    safetensors_plan_finish(&plan);
    place = plan.header_bytes;
    assert_true(safetensors_create(scratch("model/new"), &plan, &error));
    int descriptor = safetensors_join(scratch("model/new"), &plan, &error);
    for (size_t i = 0; i < count; place += file.entries[i++].bytes) {
        assert_true(file_write_all(descriptor, file.entries[i].data, file.entries[i].bytes, (off_t)place));
    }
    assert_true(file_finish(descriptor, scratch("model/new"), true, &error));
    safetensors_close(&file);
    safetensors_plan_free(&plan);
    assert_int_equal(rename(scratch("model/new"), scratch("model/" ADAPTERS_WEIGHTS)), 0);
}

static void half_an_adapter_or_a_foreign_one_is_refused(void **state) {
    (void)state;
    write_base();
    for (int i = 0; i < 2; i++) {
        check_part("", 3);
        assert_int_equal(unlink(scratch("model/" FILE_SUMS_NAME)), 0);
        write_all_but_the_last(i == 0 ? NULL : ADAPTERS_PREFIX "transformer.h.9.mlp.c_fc.lora_B.weight");
        expect_refusal(i == 0 ? "has only one of lora_A and lora_B for transformer.h.2.mlp.c_proj.weight"
                              : "h.9.mlp.c_fc.lora_B.weight belongs to no matrix of a layer of the model");
    }
}

// Their names may lack peft's prefix, and they may have begun in any way that leaves the model.
static void adapters_are_read_as_peft_may_write_them(void **state) {
    (void)state;
    static const char *const begins[] = {"true",         "false",   "null",
                                         "\"gaussian\"", "\"eva\"", "\"orthogonal\""};
    Loaded whole, again;
    write_base();
    check_part("", 3);
    load_or_fail(scratch("model"), &whole);
    assert_int_equal(unlink(scratch("model/" FILE_SUMS_NAME)), 0);
    write_all_but_the_last("transformer.h.2.mlp.c_proj.lora_B.weight");
    for (size_t i = 0; i < sizeof begins / sizeof begins[0]; i++) {
        const char *path = scratch("model/" ADAPTERS_CONFIG);
        json_t *root = json_load_file(path, 0, NULL);
        json_object_set_new(root, "init_lora_weights", json_loads(begins[i], JSON_DECODE_ANY, NULL));
        json_object_set_new(root, "lora_bias", json_false());
        assert_int_equal(json_dump_file(root, path, 0), 0);
        json_decref(root);
        load_or_fail(scratch("model"), &again);
        assert_memory_equal(again.parameters, whole.parameters, whole.table.parameter_count * sizeof(float));
        loaded_free(&again);
    }
    loaded_free(&whole);
}

// peft's use_rslora: alpha / sqrt(r). One of its first versions wrote files without a tensor.
static void adapters_are_scaled_as_they_say_and_must_be_there(void **state) {
    (void)state;
    Loaded plain, other;
    write_base();
    check_part("", 3);
    load_or_fail(scratch("model"), &plain);
    assert_int_equal(unlink(scratch("model/" FILE_SUMS_NAME)), 0);
    const char *path = scratch("model/" ADAPTERS_CONFIG);
    json_t *root = json_load_file(path, 0, NULL);
    json_object_set_new(root, "use_rslora", json_true());
    json_object_set_new(root, "use_qalora", json_false());
    json_object_set_new(root, "target_parameters", json_array());
    json_object_set_new(root, "lora_alpha", json_real(5 / sqrt(3)));
    assert_int_equal(json_dump_file(root, path, 0), 0);
    json_decref(root);
    load_or_fail(scratch("model"), &other);
    for (size_t i = 0; i < plain.table.parameter_count; i++) {
        assert_close((double)other.parameters[i], (double)plain.parameters[i], 1e-6, "a parameter");
    }
    SafetensorsPlan nothing = {.tensors = json_object()};
    Error error = {""};
    safetensors_plan_finish(&nothing);
    assert_true(safetensors_create(scratch("model/" ADAPTERS_WEIGHTS), &nothing, &error));
    safetensors_plan_free(&nothing);
    expect_refusal("holds no adapter");
    loaded_free(&plain);
    loaded_free(&other);
}

// Whoever reads such a weight gets no text from it, and a loss that is no number.
static void a_weight_that_is_no_number_is_named(void **state) {
    (void)state;
    static const float odd[] = {NAN, INFINITY, -INFINITY};
    Loaded neo;
    load_or_fail(REFERENCE, &neo);
    for (int i = 0; i < neo.table.count; i++) {
        const ParameterInfo *info = &neo.table.entries[i];
        float *last = neo.parameters + info->offset + info->count - 1, kept = *last;
        char message[200];
        *last = odd[i % 3];
        snprintf(message, sizeof message, "%s has a number that is not finite", info->name);
        tree_remove(scratch("model"));
        save_or_fail(scratch("model"), &neo, NULL);
        expect_refusal(message);
        *last = kept;
    }
    loaded_free(&neo);
}

// What --from and --finetune may name, before a model in it is opened.
static void directories_that_may_hold_a_model_are_known(void **state) {
    (void)state;
    static const struct {
        const char *files, *words; // that are there; NULL: it may hold one
    } cases[] = {{"", "is no directory with a config.json, and no checkpoint either"},
                 {"model.safetensors", "is no directory with a config.json"},
                 {"config.json", NULL},
                 {"adapter_config.json", NULL},
                 {"config.json run.tsv", "is a run without a checkpoint: give"}, // a run's is another one
                 {"config.json run.tsv model.safetensors", NULL}};
    static const char *const others[][2] = {
        {"", "give --from DIR, a directory with"},
        {"125M", "to train the preset 125M from random parameters, give --model 125M"},
        {"openai/gpt2", "openai/gpt2 is neither a directory (No such file or directory) nor the name of a"}};
    Error error;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char files[64], *rest = files, path[64];
        tree_remove(scratch("maybe"));
        assert_int_equal(mkdir(scratch("maybe"), 0777), 0);
        snprintf(files, sizeof files, "%s", cases[i].files);
        for (char *name; (name = strsep(&rest, " ")) != NULL && name[0] != '\0';) {
            snprintf(path, sizeof path, "maybe/%s", name);
            write_text(scratch(path), "{}");
        }
        bool good = hf_model_check_directory(scratch("maybe"), &error);
        assert_int_equal(good, cases[i].words == NULL);
        if (!good) { expect_words(&error, cases[i].words); }
    }
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        assert_false(hf_model_check_directory(others[i][0], &error));
        expect_words(&error, others[i][1]);
    }
    tree_remove(scratch("maybe"));
}

// A checkpoint stands for the model in it, a model for itself.
static void a_checkpoint_stands_for_its_model(void **state) {
    (void)state;
    char path[PATH_MAX], whole[PATH_MAX];
    tree_remove(scratch("point"));
    mkdir(scratch("point"), 0777);
    mkdir(scratch("point/model"), 0777);
    snprintf(whole, sizeof whole, "%s/model", scratch("point"));
    for (int i = 0; i < 4; i++) { // nothing; the model; no room for its name; a model of its own
        if (i == 1) { write_text(scratch("point/model/config.json"), "{}"); }
        if (i == 3) { write_text(scratch("point/config.json"), "{}"); }
        strcpy(path, scratch("point"));
        hf_model_find(path, i == 2 ? strlen(path) + strlen("/model") : sizeof path);
        assert_string_equal(path, i == 1 ? whole : scratch("point"));
    }
    path[0] = '\0';
    hf_model_find(path, sizeof path);
    assert_string_equal(path, "");
    tree_remove(scratch("point"));
}

static void without_weights_it_says_what_to_do(void **state) {
    (void)state;
    fresh_directory();
    expect_refusal("has no model.safetensors");
    write_text(scratch("model/pytorch_model.bin"), "PK");
    expect_refusal("AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT)");
    write_text(scratch("model/model.safetensors"), "version https://git-lfs.github.com/spec/v1\n");
    expect_refusal("git lfs pull");
    write_text(scratch("model/config.json"), "{\"model_type\":\"gptj\"}");
    expect_refusal("\"gpt_neo\" or \"gpt2\"");
    remove(scratch("model/config.json"));
    expect_refusal("config.json");
    tree_remove(scratch("model"));
    expect_refusal("is neither a directory");
}

// ---- Shards ---------------------------------------------------------------------------

// Three shards with their index; or with an index that says that `name` is in `shard`.
static void write_shards(const char *name, const char *shard) {
    SafetensorsFile file;
    Error error;
    Change change = no_change();
    json_t *root = json_object(), *map = json_object();
    fresh_directory();
    assert_true(safetensors_open(&file, REFERENCE "/model.safetensors", &error));
    change.parts = 3;
    for (size_t i = 0; i < file.count; i++) {
        char file_name[32];
        snprintf(file_name, sizeof file_name, "model-0000%d.safetensors", (int)(i % 3));
        json_object_set_new(map, file.entries[i].name,
                            json_string(is_name(file.entries[i].name, name) ? shard : file_name));
    }
    json_object_set_new(root, "weight_map", map);
    assert_int_equal(json_dump_file(root, scratch("model/model.safetensors.index.json"), 0), 0);
    json_decref(root);
    safetensors_close(&file);
    for (change.part = 0; change.part < 3; change.part++) {
        char path[64];
        snprintf(path, sizeof path, "model/model-0000%d.safetensors", change.part);
        write_changed(scratch(path), &change);
    }
}

static void shards_are_read(void **state) {
    (void)state;
    write_shards(NULL, NULL);
    expect_reference();
    Error error;
    json_t *root = json_load_file(scratch("model/model.safetensors.index.json"), 0, NULL),
           *map = json_object_get(root, "weight_map");
    json_object_set_new(map, "lm_head.weight",
                        json_string("model-00000.safetensors")); // converters leave them
    json_object_set_new(map, "transformer.h.0.attn.attention.bias", json_string("model-00001.safetensors"));
    assert_true(json_write(root, scratch("model"), "model.safetensors.index.json", 0, &error));
    expect_reference();
    remove(scratch("model/model-00001.safetensors"));
    expect_refusal("model-00001.safetensors: No such file");
    write_shards(NULL, NULL);
    assert_int_equal(truncate(scratch("model/model-00002.safetensors"), 2000), 0);
    expect_refusal("model-00002.safetensors");
}

static void a_damaged_index_is_refused(void **state) {
    (void)state;
    static const char *const shards[] = {
        "../model/model-00000.safetensors", "/etc/passwd", "", ".", "..", ".hidden"};
    static const char *const texts[][2] = {
        {"", "index.json"},
        {"[]", "\"weight_map\""},
        {"{}", "\"weight_map\""},
        {"{\"weight_map\":{}}", "\"weight_map\""},
        {"{\"weight_map\":[\"a\"]}", "\"weight_map\""},
        {"{\"weight_map\":{\"a\":\"b\",\"a\":\"b\"}}", "duplicate"},
        {"{\"weight_map\":{\"a\":7}}", "must be in a file beside it"},
        {"{\"weight_map\":{\"a\":\"config.json\"}}", "config.json"},
        {"{\"weight_map\":{\"a\":\"model-00000.safetensors\"}}", "but it is not"}};
    for (size_t i = 0; i < sizeof shards / sizeof *shards; i++) {
        write_shards("transformer.wpe.weight", shards[i]);
        expect_refusal("must be in a file beside it");
    }
    write_shards("transformer.wpe.weight", "model-00009.safetensors");
    expect_refusal("model-00009.safetensors: No such file");
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        write_shards(NULL, NULL);
        write_text(scratch("model/model.safetensors.index.json"), texts[i][0]);
        expect_refusal(texts[i][1]);
    }
}

// ---- The C half of check_pretrained.py ------------------------------------------------

static bool write_logits(const char *directory, const float *logits, int B, int T, int V, Error *error) {
    size_t shape[3] = {(size_t)B, (size_t)T, (size_t)V};
    char path[PATH_MAX];
    SafetensorsPlan plan;
    if (!path_within(path, directory, "logits.safetensors", error)) { return false; }
    plan = (SafetensorsPlan){.tensors = json_object()};
    safetensors_plan_add(&plan, "logits", SAFETENSORS_F32, 3, shape);
    safetensors_plan_finish(&plan);
    int descriptor = safetensors_create(path, &plan, error) ? safetensors_join(path, &plan, error) : -1;
    bool good = descriptor >= 0 && file_write_all(descriptor, logits, plan.file_bytes - plan.header_bytes,
                                                  (off_t)plan.header_bytes);
    good = descriptor >= 0 && file_finish(descriptor, path, good, error);
    safetensors_plan_free(&plan);
    return good;
}

static bool exchange(const char *from, const char *to, Error *error) {
    Loaded loaded;
    SafetensorsFile file;
    char path[PATH_MAX];
    int B, T;
    if (!try_load(from, &loaded, error) || !path_within(path, from, "logits.safetensors", error) ||
        !safetensors_open(&file, path, error)) {
        return false;
    }
    int32_t *tokens = read_tokens(&file, &B, &T);
    float *logits = compute_logits(&loaded, tokens, B, T);
    bool good =
        hf_model_save(to, &loaded.config, &loaded.table, loaded.parameters, NULL, NULL, NULL, error) &&
        write_logits(to, logits, B, T, loaded.config.vocabulary, error);
    free(logits);
    free(tokens);
    safetensors_close(&file);
    loaded_free(&loaded);
    return good;
}

int main(int argc, char **argv) {
    if (argc == 3) {
        Error error;
        bool good = exchange(argv[1], argv[2], &error);
        if (!good) { fprintf(stderr, "%s\n", error.text); }
        return good ? 0 : EXIT_USER_MISTAKE;
    }
    if (mkdtemp(scratch_directory) == NULL) { return 1; }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_model_of_transformers_computes_its_logits),
        cmocka_unit_test(what_is_saved_has_the_bits_of_what_was_loaded),
        cmocka_unit_test(matrices_of_gpt2_are_turned),
        cmocka_unit_test(every_configuration_is_read_back),
        cmocka_unit_test(the_configuration_is_short_and_plain),
        cmocka_unit_test(the_tokenizer_goes_with_the_model),
        cmocka_unit_test(ids_of_the_configuration_are_kept),
        cmocka_unit_test(a_flipped_bit_is_noticed_in_every_file),
        cmocka_unit_test(a_long_file_is_summed_to_its_end),
        cmocka_unit_test(damaged_sums_are_refused),
        cmocka_unit_test(nothing_is_overwritten),
        cmocka_unit_test(a_full_disk_is_named),
        cmocka_unit_test(names_without_transformer_are_read),
        cmocka_unit_test(buffers_of_old_versions_are_ignored),
        cmocka_unit_test(the_head_must_be_the_embedding),
        cmocka_unit_test(what_is_wrong_with_the_tensors_is_named),
        cmocka_unit_test(a_long_shape_fits_into_the_line),
        cmocka_unit_test(a_weight_that_is_no_number_is_named),
        cmocka_unit_test(without_weights_it_says_what_to_do),
        cmocka_unit_test(directories_that_may_hold_a_model_are_known),
        cmocka_unit_test(a_checkpoint_stands_for_its_model),
        cmocka_unit_test(a_trained_part_is_saved_and_read_as_the_whole_model),
        cmocka_unit_test(adapters_are_scaled_as_they_say_and_must_be_there),
        cmocka_unit_test(adapters_that_cannot_be_read_are_refused),
        cmocka_unit_test(half_an_adapter_or_a_foreign_one_is_refused),
        cmocka_unit_test(adapters_are_read_as_peft_may_write_them),
        cmocka_unit_test(shards_are_read),
        cmocka_unit_test(a_damaged_index_is_refused),
    };
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    tree_remove(scratch_directory);
    return failures;
}
