// test_tokenizer.c: ids and texts are those of the `tokenizers` library
// (dev/reference/make_tokenizer.py), also when decoded token by token; bytes that are not
// UTF-8 come back as they were; whatever is wrong with a tokenizer.json is said in one
// line; no bytes crash it.
#include "runtime/random.h"
#include "test/harness.h"
#include "tokenizer/text.h"

#define REFERENCE "test/reference/tokenizer.json"

static json_t *load_json(const char *path) {
    json_error_t error;
    json_t *root = json_load_file(path, JSON_ALLOW_NUL, &error);
    if (root == NULL) { fail_msg("%s: %s", path, error.text); }
    return root;
}

static Tokenizer open_reference(void) {
    Tokenizer tokenizer;
    Error error;
    if (!tokenizer_open(&tokenizer, REFERENCE, &error)) { fail_msg("%s", error.text); }
    return tokenizer;
}

static bool open_json(Tokenizer *tokenizer, const json_t *root, Error *error) {
    char *text = json_dumps(root, JSON_COMPACT | JSON_ENCODE_ANY);
    error->text[0] = '\0';
    bool good = tokenizer_open_memory(tokenizer, "file.json", text, strlen(text), error);
    free(text);
    return good;
}

// The member of an object, or of a list where the name is a number.
static json_t *child(json_t *parent, const char *name) {
    return json_is_array(parent) ? json_array_get(parent, (size_t)atoi(name)) : json_object_get(parent, name);
}

// Replaces what is at `path`, names with '/' between them.
static void put(json_t *root, const char *path, const char *value) {
    char name[64];
    json_t *parent = root, *new_value = value != NULL ? json_loads(value, JSON_DECODE_ANY, NULL) : NULL;
    for (size_t length; path[length = strcspn(path, "/")] == '/'; path += length + 1) {
        snprintf(name, sizeof name, "%.*s", (int)length, path);
        parent = child(parent, name);
        assert_non_null(parent);
    }
    assert_int_equal(value != NULL, new_value != NULL);
    if (json_is_array(parent)) {
        assert_int_equal(json_array_set_new(parent, (size_t)atoi(path), new_value), 0);
    } else if (new_value != NULL) {
        assert_int_equal(json_object_set_new(parent, path, new_value), 0);
    } else {
        assert_int_equal(json_object_del(parent, path), 0);
    }
}

static TokenList encode(const Tokenizer *tokenizer, const char *text, size_t count, bool special) {
    TokenList list = {NULL, 0, 0};
    Error error;
    if (!tokenizer_encode(tokenizer, text, count, special, &list, &error)) { fail_msg("%s", error.text); }
    return list;
}

// The caller frees the bytes.
typedef struct TextList {
    char *bytes;
    size_t count;
} TextList;

// The text of ids, decoded `step` at a time.
static TextList decode(const Tokenizer *tokenizer, const int32_t *ids, size_t count, size_t step,
                       bool special) {
    TextList text = {NULL, 0};
    FILE *file = open_memstream(&text.bytes, &text.count);
    TokenDecoder decoder;
    memset(&decoder, 0, sizeof decoder);
    for (size_t i = 0; i < count; i += step) {
        size_t taken = count - i < step ? count - i : step;
        tokenizer_decode(tokenizer, &decoder, ids + i, taken, special, file);
    }
    token_decoder_release(&decoder, true, file);
    fclose(file);
    return text;
}

static void expect_ids(const TokenList *list, const json_t *expected, const char *text) {
    if (list->count != json_array_size(expected)) {
        fail_msg("'%s': %zu ids, not %zu", text, list->count, json_array_size(expected));
    }
    for (size_t i = 0; i < list->count; i++) {
        int id = (int)json_integer_value(json_array_get(expected, i));
        if (list->ids[i] != id) { fail_msg("'%s': id %zu is %d, not %d", text, i, list->ids[i], id); }
    }
}

static void expect_text(const TextList *text, const char *expected, size_t count) {
    if (text->count != count || (count > 0 && memcmp(text->bytes, expected, count) != 0)) {
        fail_msg("'%.*s' is not '%.*s'", (int)text->count, text->bytes, (int)count, expected);
    }
}

// comes_back: the tokens have the text as it was.
static void check_encoding(const Tokenizer *tokenizer, const json_t *cases, bool comes_back) {
    for (size_t i = 0; i < json_array_size(cases); i++) {
        const json_t *one = json_array_get(cases, i), *text = json_object_get(one, "text");
        const char *bytes = json_string_value(text);
        size_t count = json_string_length(text);
        for (int special = 0; special < 2; special++) {
            TokenList list = encode(tokenizer, bytes, count, special != 0);
            expect_ids(&list, json_object_get(one, special != 0 ? "ids" : "ids_special_as_text"), bytes);
            TextList back = decode(tokenizer, list.ids, list.count, 1, true);
            if (comes_back) { expect_text(&back, bytes, count); }
            token_list_free(&list);
            free(back.bytes);
        }
    }
}

static void hard_strings_have_the_ids_of_the_library(void **state) {
    (void)state;
    Tokenizer tokenizer = open_reference();
    json_t *cases = load_json("test/reference/tokenizer_cases.json");
    assert_true(json_array_size(json_object_get(cases, "encode")) >= 30);
    check_encoding(&tokenizer, json_object_get(cases, "encode"), true);
    json_decref(cases);
    tokenizer_close(&tokenizer);
}

// Qwen 2, Llama 3 and SmolLM: other patterns, composed characters, whole pieces first. Some lack
// bytes. Llama 2 and Mistral: characters, and a blank in front.
static void other_kinds_have_the_ids_of_the_library(void **state) {
    (void)state;
    json_t *kinds = load_json("test/reference/tokenizer_kinds.json"), *kind;
    const char *name;
    assert_int_equal(json_object_size(kinds), 15);
    json_object_foreach(kinds, name, kind) {
        json_t *root = load_json(REFERENCE), *model = json_object_get(root, "model");
        Tokenizer tokenizer;
        Error error;
        json_object_update(root, json_object_get(kind, "file"));
        json_object_update(model, json_object_get(kind, "model"));
        if (!open_json(&tokenizer, root, &error)) { fail_msg("%s: %s", name, error.text); }
        check_encoding(&tokenizer, json_object_get(kind, "encode"),
                       !tokenizer.composes && !tokenizer.characters && !tokenizer.lacks_bytes);
        tokenizer_close(&tokenizer);
        json_decref(root);
    }
    json_decref(kinds);
}

// Chats are masked by where a token begins in the text that was given, also if that is composed.
static void places_are_those_of_the_text_that_was_given(void **state) {
    (void)state;
    json_t *root = load_json(REFERENCE);
    Tokenizer tokenizer;
    Error error;
    json_object_set_new(root, "normalizer", json_pack("{s:s}", "type", "NFC"));
    if (!open_json(&tokenizer, root, &error)) { fail_msg("%s", error.text); }
    const char *text = "<|endoftext|>ae\xCC\x81 e\xCC\x81\xCC\xB1 \xCC b<|end|>q";
    TokenList list = {NULL, 0, 0}, begins = {NULL, 0, 0};
    assert_true(tokenizer_encode_places(&tokenizer, text, strlen(text), true, &list, &begins, &error));
    assert_int_equal(begins.count, list.count);
    for (size_t i = 0; i < list.count; i++) {
        // A token begins at an ASCII character or at a byte that is no UTF-8, or goes on.
        size_t place = (size_t)begins.ids[i], length = 0;
        const uint8_t *bytes = tokenizer_bytes(&tokenizer, list.ids[i], &length);
        assert_true(place < strlen(text) && (i == 0 || begins.ids[i - 1] < begins.ids[i]));
        if (bytes[0] < 0x80) { assert_int_equal(bytes[0], text[place]); }
        bool continues = (bytes[0] & 0xC0) == 0x80 || bytes[0] == 0xCC;
        assert_true((uint8_t)text[place] < 0x80 || continues); // what is composed begins at its e
    }
    assert_int_equal(begins.ids[list.count - 1], (int)strlen(text) - 1);
    token_list_free(&list);
    token_list_free(&begins);
    tokenizer_close(&tokenizer);
    json_decref(root);
}

// Of Llama 2: the blank in front is nowhere in the text, and is not written.
static void the_blank_in_front_of_a_text_is_not_of_the_text(void **state) {
    (void)state;
    json_t *kinds = load_json("test/reference/tokenizer_kinds.json"), *root = load_json(REFERENCE),
           *kind = json_object_get(kinds, "prepend");
    Tokenizer tokenizer;
    Error error;
    json_object_update(root, json_object_get(kind, "file"));
    json_object_set(root, "model", json_object_get(kind, "model"));
    if (!open_json(&tokenizer, root, &error)) { fail_msg("%s", error.text); }
    static const char *const texts[] = {"the fox", " the fox", "\xE7\x8B\x90 caf\xC3\xA9\n", "  a  "};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        TokenList list = {NULL, 0, 0}, begins = {NULL, 0, 0};
        TokenDecoder decoder = {.drops_blank = true};
        char *back = NULL;
        size_t count = strlen(texts[i]), length = 0, at = 0;
        FILE *file = open_memstream(&back, &length);
        assert_true(tokenizer_encode_places(&tokenizer, texts[i], count, true, &list, &begins, &error));
        tokenizer_decode(&tokenizer, &decoder, list.ids, list.count, true, file);
        fclose(file);
        assert_string_equal(back, texts[i]);
        for (size_t k = 0; k < list.count;
             k++) { // behind the blank, a token begins where the one before ends
            assert_int_equal(begins.ids[k], at);
            tokenizer_bytes(&tokenizer, list.ids[k], &length);
            at += length - (k == 0);
        }
        free(back);
        token_list_free(&list);
        token_list_free(&begins);
    }
    tokenizer_close(&tokenizer);
    json_decref(root);
    json_decref(kinds);
}

// As Llama 3 has it: prompts begin with the token that the post-processor puts there, once.
static void the_token_in_front_of_a_text_is_found(void **state) {
    (void)state;
    json_t *root = load_json(REFERENCE);
    put(root, "post_processor",
        "{\"type\": \"Sequence\", \"processors\": [{\"type\": \"ByteLevel\"}, {\"type\": "
        "\"TemplateProcessing\","
        "\"single\": [{\"SpecialToken\": {\"id\": \"<|end|>\"}}, {\"Sequence\": {\"id\": \"A\"}}]}]}");
    TextCodec codec = {.kind = TEXT_CODEC_TOKENIZER, .vocabulary = 500};
    Error error;
    if (!open_json(&codec.tokenizer, root, &error)) { fail_msg("%s", error.text); }
    assert_int_equal(codec.tokenizer.begin, 400);
    static const struct {
        const char *prompt;
        bool begins;
        size_t count;
        int first;
    } cases[] = {{"a", true, 2, 400},
                 {"<|end|>a", true, 2, 400},
                 {"", true, 1, 400},
                 {"", false, 1, 0},
                 {"a", false, 1, -1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        TokenList list = {NULL, 0, 0};
        assert_true(text_codec_encode(&codec, cases[i].prompt, cases[i].begins, &list, &error));
        assert_int_equal(list.count, cases[i].count);
        if (cases[i].first >= 0) { assert_int_equal(list.ids[0], cases[i].first); }
        token_list_free(&list);
    }
    tokenizer_close(&codec.tokenizer);
    put(root, "post_processor/processors/1/single/0", "{\"Sequence\": {\"id\": \"A\"}}");
    assert_true(open_json(&codec.tokenizer, root, &error));
    assert_int_equal(codec.tokenizer.begin, -1); // none
    tokenizer_close(&codec.tokenizer);
    json_decref(root);
}

// Bytes, numbers, and a tokenizer's tokens: what stands for no prompt, what a prompt becomes, and
// what is printed. Controls do nothing to a terminal.
static void each_codec_reads_and_prints_its_tokens(void **state) {
    (void)state;
    static const struct {
        const char *path;
        bool bytes;
        const char *prompt;
        int32_t ids[5], printed[5]; // up to a -1
        const char *text;
    } cases[] = {
        {"", true, "", {'\n', -1}, {'\n', '\t', 0x1B, 0xC3, -1}, "\n\t?\xC3"},
        {"", true, "a\xC3\xA9", {'a', 0xC3, 0xA9, -1}, {' ', 'a', 31, '~', -1}, " a?~"},
        {"", false, "", {405, -1}, {0, 17, 405, -1}, "0 17 405 "},
        {"", false, "a", {-1}, {-1}, ""}, // no text can be encoded
        {REFERENCE, false, "", {0, -1}, {0, 400, 401, -1}, "<|end|>!"},
        {REFERENCE, true, "<|end|>", {400, -1}, {402, -1}, "[note]"},
    };
    Error error = {""};
    TextCodec codec;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        TokenList list = {NULL, 0, 0};
        TextList text = {NULL, 0};
        assert_true(text_codec_open(&codec, cases[i].path, cases[i].bytes, 406, &error));
        bool good = text_codec_encode(&codec, cases[i].prompt, true, &list, &error);
        assert_int_equal(good, cases[i].ids[0] >= 0);
        if (!good) { assert_non_null(strstr(error.text, "--prompt needs a tokenizer")); }
        for (size_t k = 0; k < list.count; k++) { assert_int_equal(list.ids[k], cases[i].ids[k]); }
        assert_int_equal(cases[i].ids[list.count], -1);
        FILE *file = open_memstream(&text.bytes, &text.count);
        for (const int32_t *id = cases[i].printed; *id >= 0; id++) {
            text_codec_print(&codec, *id, false, file);
        }
        text_codec_print(&codec, 'x', true, file);
        fclose(file);
        expect_text(&text, cases[i].text, strlen(cases[i].text));
        free(text.bytes);
        token_list_free(&list);
        text_codec_close(&codec);
    }
    assert_false(text_codec_open(&codec, REFERENCE, false, 405, &error));
    assert_non_null(strstr(error.text, "has 406 tokens, but the model has a vocabulary of only 405"));
}

static void merges_as_one_string_are_the_same_as_pairs(void **state) {
    (void)state;
    json_t *root = load_json(REFERENCE), *cases = load_json("test/reference/tokenizer_cases.json");
    json_t *merges = json_object_get(json_object_get(root, "model"), "merges");
    for (size_t i = 0; i < json_array_size(merges); i++) {
        const json_t *pair = json_array_get(merges, i);
        json_t *text = json_sprintf("%s %s", json_string_value(json_array_get(pair, 0)),
                                    json_string_value(json_array_get(pair, 1)));
        json_array_set_new(merges, i, text);
    }
    Tokenizer tokenizer, reference = open_reference();
    Error error;
    if (!open_json(&tokenizer, root, &error)) { fail_msg("%s", error.text); }
    check_encoding(&tokenizer, json_object_get(cases, "encode"), true);
    assert_true(tokenizer.sum == reference.sum);
    tokenizer_close(&tokenizer);
    tokenizer_close(&reference);
    json_decref(root);
    json_decref(cases);
}

// Where a chat.json is looked for, and what else lies beside a tokenizer.
static void a_tokenizer_lies_in_a_directory(void **state) {
    (void)state;
    static const struct {
        const char *path;
        int length;
    } cases[] = {{"test/reference", 14},
                 {REFERENCE, 14},
                 {"test/reference/", 15},
                 {"nowhere/x.json", 7},
                 {"/x.json", 1},
                 {"x.json", 0},
                 {"test", 4}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_int_equal(tokenizer_directory_length(cases[i].path), cases[i].length);
    }
}

#define FRONTED \
    "s/\"post_processor\": *null/\"post_processor\": {\"single\": [{\"SpecialToken\": {\"id\": " \
    "\"<|end|>\"}}]}/"

// Added tokens behind the last row of the model beside the tokenizer are left out. A model that has
// no row for one that was learned, or for the one in front of a text or behind it, belongs to
// another tokenizer, which others say.
static void tokens_without_a_row_are_left_out(void **state) {
    (void)state;
    enum { LEARNED = 400, ALL = 406 };
    static const struct {
        const char *change; // of tokenizer.json, by sed; <|end|> is the first that was only added
        int rows, vocabulary;
    } cases[] = {{"", ALL + 1, ALL},
                 {"", ALL, ALL},
                 {"", ALL - 1, ALL - 1},
                 {"", LEARNED, LEARNED},
                 {"", LEARNED - 1, ALL},
                 {FRONTED, LEARNED + 1, LEARNED + 1},
                 {FRONTED, LEARNED, ALL},
                 {"s/<|endoftext|>/<|nowhere|>/g; s/<|end|>/<|endoftext|>/", LEARNED + 1, LEARNED + 1},
                 {"s/<|endoftext|>/<|nowhere|>/g; s/<|end|>/<|endoftext|>/", LEARNED, ALL}};
    char directory[] = "/tmp/test_tokenizer.XXXXXX", path[128], command[512];
    assert_non_null(mkdtemp(directory));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Tokenizer tokenizer;
        Error error;
        snprintf(command, sizeof command, "sed '%s' " REFERENCE " > %s/tokenizer.json", cases[i].change,
                 directory);
        assert_int_equal(system(command), 0);
        snprintf(path, sizeof path, "%s/config.json", directory);
        FILE *file = fopen(path, "w");
        fprintf(file, "{\"vocab_size\": %d}", cases[i].rows);
        fclose(file);
        if (!tokenizer_open(&tokenizer, directory, &error)) { fail_msg("%s", error.text); }
        assert_int_equal(tokenizer.learned, LEARNED);
        for (int k = 0; k < tokenizer.added_count; k++) { // a text cannot become what was left out
            const AddedToken *added = &tokenizer.added[k];
            TokenList list = {NULL, 0, 0};
            error.text[0] = '\0';
            bool good = tokenizer_encode(&tokenizer, added->text, added->length, true, &list, &error);
            assert_int_equal(good, added->id < tokenizer.vocabulary);
            if (good) { assert_true(list.count == 1 && list.ids[0] == added->id); }
            if (!good) { assert_non_null(strstr(error.text, "no row for the added token")); }
            if (!good) { assert_non_null(strstr(error.text, added->text)); }
            token_list_free(&list);
        }
        assert_int_equal(tokenizer.vocabulary, cases[i].vocabulary);
        tokenizer_close(&tokenizer);
    }
    snprintf(command, sizeof command, "rm -r %s", directory);
    assert_int_equal(system(command), 0);
}

// Where the tokenizer has no <|endoftext|>: the first of three files that names an added token.
static void the_token_behind_a_text_is_found_beside_it(void **state) {
    (void)state;
    static const char *const names[] = {"tokenizer_config.json", "generation_config.json", "config.json"};
    static const struct {
        const char *texts[3]; // of these files; NULL: it is not there
        int end;
    } cases[] = {
        {{NULL, NULL, NULL}, -1},
        {{"{\"eos_token\": \"<|end|>\"}", NULL, NULL}, 400},
        {{"{\"eos_token\": {\"content\": \"<|end|>\"}}", NULL, NULL}, 400},
        {{NULL, "{\"eos_token_id\": 401}", NULL}, 401},
        {{NULL, "{\"eos_token_id\": [402, 400]}", NULL}, 402},
        {{NULL, NULL, "{\"eos_token_id\": 401}"}, 401},
        {{"{\"eos_token\": \"<|end|>\"}", "{\"eos_token_id\": 401}", "{\"eos_token_id\": 402}"}, 400},
        {{"{\"eos_token\": \"the\"}", "{\"eos_token_id\": 401}", "{\"eos_token_id\": 402}"}, 401},
        {{"{\"eos_token\": null}", "{\"eos_token_id\": 5}", "{\"eos_token_id\": 402}"}, 402},
        {{NULL, "{\"eos_token_id\": -400}", "{\"eos_token_id\": 1e300}"}, -1},
        {{"[", "{\"eos_token_id\": []}", "{\"eos_token_id\": 401}"}, 401}};
    char directory[] = "/tmp/test_tokenizer.XXXXXX", path[128], command[256];
    assert_non_null(mkdtemp(directory));
    snprintf(command, sizeof command, "sed 's/<|endoftext|>/<|nowhere|>/g' " REFERENCE " > %s/tokenizer.json",
             directory);
    assert_int_equal(system(command), 0);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Tokenizer tokenizer;
        Error error;
        for (int k = 0; k < 3; k++) {
            snprintf(path, sizeof path, "%s/%s", directory, names[k]);
            unlink(path);
            if (cases[i].texts[k] == NULL) { continue; }
            FILE *file = fopen(path, "w");
            fputs(cases[i].texts[k], file);
            fclose(file);
        }
        if (!tokenizer_open(&tokenizer, directory, &error)) { fail_msg("%s", error.text); }
        if (tokenizer.end != cases[i].end) { fail_msg("case %zu: %d", i, tokenizer.end); }
        tokenizer_close(&tokenizer);
    }
    snprintf(command, sizeof command, "rm -r %s", directory);
    assert_int_equal(system(command), 0);
}

static void the_sum_is_that_of_the_token_files(void **state) {
    (void)state;
    Tokenizer tokenizer = open_reference();
    json_t *cases = load_json("test/reference/tokenizer_cases.json");
    assert_true(tokenizer.sum == json_integer_value(json_object_get(cases, "sum")));
    json_decref(cases);
    tokenizer_close(&tokenizer);
}

static void decoding_is_that_of_the_library_in_steps_of_any_length(void **state) {
    (void)state;
    Tokenizer tokenizer = open_reference();
    json_t *root = load_json("test/reference/tokenizer_cases.json"), *cases = json_object_get(root, "decode");
    for (size_t i = 0; i < json_array_size(cases); i++) {
        const json_t *one = json_array_get(cases, i), *list = json_object_get(one, "ids");
        int32_t ids[64];
        size_t count = json_array_size(list);
        for (size_t k = 0; k < count; k++) { ids[k] = (int32_t)json_integer_value(json_array_get(list, k)); }
        for (size_t step = 1; step < 8; step += 3) {
            for (int special = 0; special < 2; special++) {
                const json_t *expected = json_object_get(one, special != 0 ? "text" : "text_without_special");
                TextList text = decode(&tokenizer, ids, count, step, special != 0);
                expect_text(&text, json_string_value(expected), json_string_length(expected));
                free(text.bytes);
            }
        }
    }
    json_decref(root);
    tokenizer_close(&tokenizer);
}

static void a_character_appears_when_its_last_byte_does(void **state) {
    (void)state;
    Tokenizer tokenizer = open_reference();
    TokenDecoder decoder;
    TextList text = {NULL, 0};
    FILE *file = open_memstream(&text.bytes, &text.count);
    memset(&decoder, 0, sizeof decoder);
    static const uint8_t smile[4] = {0xF0, 0x9F, 0x98, 0x80};
    for (int i = 0; i < 4; i++) {
        assert_int_equal(text.count, 0);
        tokenizer_decode(&tokenizer, &decoder, &tokenizer.byte_ids[smile[i]], 1, true, file);
        fflush(file);
    }
    fclose(file);
    expect_text(&text, "\xF0\x9F\x98\x80", 4);
    assert_int_equal(decoder.held_count, 0);
    free(text.bytes);
    tokenizer_close(&tokenizer);
}

static void text_that_is_not_utf8_comes_back_byte_by_byte(void **state) {
    (void)state;
    Tokenizer tokenizer = open_reference();
    Random random = {random_hash(3, 0)};
    for (int round = 0; round < 2000; round++) {
        char text[64];
        size_t count = random_bits(&random) % sizeof text, at = 0;
        for (size_t i = 0; i < count; i++) {
            bool odd = random_bits(&random) % 3 == 0;
            text[i] = odd ? (char)random_bits(&random) : "the fox "[i % 8];
        }
        TokenList list = encode(&tokenizer, text, count, false);
        for (size_t i = 0; i < list.count; i++) {
            size_t length = 0;
            const uint8_t *bytes = tokenizer_bytes(&tokenizer, list.ids[i], &length);
            assert_true(at + length <= count);
            assert_memory_equal(bytes, text + at, length);
            at += length;
        }
        assert_int_equal(at, count);
        token_list_free(&list);
    }
    tokenizer_close(&tokenizer);
}

// With a quadratic merge this would take minutes.
static void a_word_of_a_million_letters_takes_no_time(void **state) {
    (void)state;
    Tokenizer tokenizer = open_reference();
    size_t count = 1000000;
    char *text = (char *)malloc(count);
    for (size_t i = 0; i < count; i++) { text[i] = "thereinthemill"[i % 14]; }
    TokenList list = encode(&tokenizer, text, count, false);
    TextList back = decode(&tokenizer, list.ids, list.count, 100, false);
    expect_text(&back, text, count);
    memset(text, ' ', count); // one piece, for which the pattern looks ahead
    list.count = 0;
    Error error;
    assert_true(tokenizer_encode(&tokenizer, text, count, false, &list, &error));
    free(text);
    free(back.bytes);
    token_list_free(&list);
    tokenizer_close(&tokenizer);
}

// Looking for a line end behind them, as Llama 3 and Qwen do, takes more steps than PCRE2 allows by
// itself.
static void millions_of_blanks_are_cut(void **state) {
    (void)state;
    json_t *root = load_json(REFERENCE), *kinds = load_json("test/reference/tokenizer_kinds.json");
    Tokenizer tokenizer;
    Error error;
    size_t count = 11000000;
    char *text = (char *)malloc(count);
    memset(text, ' ', count);
    text[count - 1] = 'x';
    json_object_update(root, json_object_get(json_object_get(kinds, "llama3"), "file"));
    put(root, "model/merges", "[]"); // they would take longer than the cut
    if (!open_json(&tokenizer, root, &error)) { fail_msg("%s", error.text); }
    TokenList list = encode(&tokenizer, text, count, false);
    assert_int_equal(list.count, count);
    token_list_free(&list);
    tokenizer_close(&tokenizer);
    free(text);
    json_decref(root);
    json_decref(kinds);
}

static void ids_without_a_token_have_no_text(void **state) {
    (void)state;
    Tokenizer tokenizer = open_reference();
    const int32_t ids[4] = {-1, tokenizer.vocabulary, INT32_MAX, INT32_MIN};
    TextList text = decode(&tokenizer, ids, 4, 1, true);
    assert_int_equal(text.count, 0);
    free(text.bytes);
    assert_int_equal(tokenizer_find_added(&tokenizer, "<|endoftext|>"), 0);
    assert_int_equal(tokenizer_find_added(&tokenizer, "<|nowhere|>"), -1);
    assert_true(tokenizer.is_special[0]);
    assert_false(tokenizer.is_special[1]);
    tokenizer_close(&tokenizer);
}

// A blank that stands in the vocabulary as a blank is no letter, as for the library.
static void a_byte_is_the_token_of_its_letter(void **state) {
    (void)state;
    Tokenizer tokenizer, reference = open_reference();
    json_t *root = load_json(REFERENCE);
    json_t *vocabulary = json_object_get(json_object_get(root, "model"), "vocab");
    json_object_set_new(vocabulary, " ", json_integer(reference.vocabulary));
    Error error;
    if (!open_json(&tokenizer, root, &error)) { fail_msg("%s", error.text); }
    assert_int_equal(tokenizer.vocabulary, reference.vocabulary + 1);
    assert_memory_equal(tokenizer.byte_ids, reference.byte_ids, sizeof reference.byte_ids);
    tokenizer_close(&tokenizer);
    tokenizer_close(&reference);
    json_decref(root);
}

// value: the JSON that is put at a path of a good file; NULL: the path is removed. words:
// those that the error must have.
typedef struct Damage {
    const char *path, *value, *words;
} Damage;

static void expect_one_line(const Error *error, const char *words) {
    if (strstr(error->text, words) == NULL) { fail_msg("'%s' does not say '%s'", error->text, words); }
    assert_non_null(strstr(error->text, "file.json"));
    assert_null(strchr(error->text, '\n'));
}

#define FOUR_DIGITS \
    "{\"type\": \"Digits\"}, {\"type\": \"Digits\"}, {\"type\": \"Digits\"}, {\"type\": \"Digits\"}, "

static const Damage damages[] = {
    {"model", NULL, "is not a tokenizer.json"},
    {"model", "[1, 2]", "is not a tokenizer.json"},
    {"model/type", "\"Unigram\"", "type 'Unigram'"},
    {"model/type", "7", "type '(no text)'"},
    {"model/dropout", "0.1", "'dropout'"},
    {"model/dropout", "{}", "'dropout'"},
    {"model/continuing_subword_prefix", "\"##\"", "'continuing_subword_prefix'"},
    {"model/end_of_word_suffix", "\"</w>\"", "'end_of_word_suffix'"},
    {"model/byte_fallback", "true", "has byte_fallback"},
    {"model/vocab", NULL, "an object 'vocab'"},
    {"model/vocab", "[]", "an object 'vocab'"},
    {"model/vocab", "{}", "is not in the vocabulary"},
    {"model/vocab/a", NULL, "is not in the vocabulary"},
    {"model/vocab/\xC4\xA0", NULL, "is not in the vocabulary"},
    {"model/vocab/a", "-1", "id of the token 'a'"},
    {"model/vocab/a", "1048576", "id of the token 'a'"},
    {"model/vocab/a", "9223372036854775807", "id of the token 'a'"},
    {"model/vocab/a", "66.0", "id of the token 'a'"},
    {"model/vocab/a", "\"66\"", "id of the token 'a'"},
    {"model/vocab/a", "null", "id of the token 'a'"},
    {"model/vocab/a", "5", "have the same id 5"},
    {"model/merges", NULL, "a list 'merges'"},
    {"model/merges", "{\"a\": 1}", "a list 'merges'"},
    {"model/merges/0", "7", "merge 0 is not a pair"},
    {"model/merges/3", "null", "merge 3 is not a pair"},
    {"model/merges/0", "\"\"", "merge 0 is not a pair"},
    {"model/merges/0", "\"ab\"", "merge 0 is not a pair"},
    {"model/merges/0", "\" b\"", "merge 0 is not a pair"},
    {"model/merges/0", "\"a \"", "merge 0 is not a pair"},
    {"model/merges/0", "\"a b c\"", "merge 0 is not a pair"},
    {"model/merges/0", "[]", "merge 0 is not a pair"},
    {"model/merges/0", "[\"a\"]", "merge 0 is not a pair"},
    {"model/merges/0", "[\"a\", \"b\", \"c\"]", "merge 0 is not a pair"},
    {"model/merges/0", "[\"a\", 7]", "merge 0 is not a pair"},
    {"model/merges/0", "[\"\", \"a\"]", "merge 0 is not a pair"},
    {"model/merges/0", "[\"q\", \"q\"]", "merge 0 makes 'qq'"},
    {"model/merges/0", "[\"th\", \"e\"]", "this, or a side of it"},
    {"model/merges/1", "[\"\xC4\xA0\", \"t\"]", "are the same"},
    {"normalizer", "{\"type\": \"NFKC\"}", "normalizer"},
    {"normalizer", "{}", "normalizer"},
    {"normalizer", "{\"type\": \"Sequence\", \"normalizers\": [{\"type\": \"NFC\"}, {\"type\": \"NFC\"}]}",
     "normalizer"},
    {"pre_tokenizer", NULL, "pre-tokenizer"},
    {"pre_tokenizer", "[]", "pre-tokenizer"},
    {"pre_tokenizer/type", "\"Whitespace\"", "pre-tokenizer"},
    {"pre_tokenizer", "{\"type\": \"Digits\"}", "pre-tokenizer"},
    {"pre_tokenizer", "{\"type\": \"Sequence\", \"pretokenizers\": []}", "pre-tokenizer"},
    {"pre_tokenizer", "{\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": \"Sequence\"}]}",
     "pre-tokenizer"},
    {"pre_tokenizer", "{\"type\": \"Split\", \"behavior\": \"Isolated\", \"pattern\": {\"String\": \" \"}}",
     "pre-tokenizer"},
    {"pre_tokenizer", "{\"type\": \"Split\", \"behavior\": \"Removed\", \"pattern\": {\"Regex\": \" \"}}",
     "pre-tokenizer"},
    {"pre_tokenizer",
     "{\"type\": \"Split\", \"behavior\": \"Isolated\", \"pattern\": {\"Regex\": \"a|\\\\w+\"}}",
     "has \\w in a pattern"},
    {"pre_tokenizer",
     "{\"type\": \"Split\", \"behavior\": \"Isolated\", \"invert\": true, \"pattern\": {\"Regex\": \" \"}}",
     "pre-tokenizer"},
    {"pre_tokenizer", "{\"type\": \"Split\", \"behavior\": \"Isolated\", \"pattern\": {\"Regex\": \"(a\"}}",
     "PCRE2 refuses"},
    {"pre_tokenizer",
     "{\"type\": \"Sequence\", \"pretokenizers\": [" FOUR_DIGITS FOUR_DIGITS "{\"type\": \"ByteLevel\"}]}",
     "more than 8 patterns"},
    {"pre_tokenizer/add_prefix_space", "true", "pre-tokenizer"},
    {"added_tokens", "{}", "a list 'added_tokens'"},
    {"added_tokens/0", "7", "added token 0 has no 'content'"},
    {"added_tokens/1/content", NULL, "added token 1 has no 'content'"},
    {"added_tokens/1/content", "\"\"", "added token 1 has no 'content'"},
    {"added_tokens/1/content", "7", "added token 1 has no 'content'"},
    {"added_tokens/1/id", NULL, "id of the token '<|end|>'"},
    {"added_tokens/1/id", "-5", "id of the token '<|end|>'"},
    {"added_tokens/1/id", "1e9", "id of the token '<|end|>'"},
    {"added_tokens/1/id", "402", "have the same id 402"},
    {"added_tokens/0/id", "3", "has the id 3, but 0 in the vocabulary"},
    {"added_tokens/1/lstrip", "true", "'lstrip'"},
    {"added_tokens/1/rstrip", "true", "'rstrip'"},
    {"added_tokens/1/single_word", "true", "'single_word'"},
};

#define METASPACE \
    "{\"type\": \"Metaspace\", \"replacement\": \"\xE2\x96\x81\", \"prepend_scheme\": \"first\", " \
    "\"split\": " \
    "false}"

// The same of a file of characters.
static const Damage damages_of_characters[] = {
    {"model/vocab/<0x7F>", NULL, "no token stands for the byte 0x7F"},
    {"normalizer", NULL, "prepares texts"},
    {"normalizer/normalizers/1/content", "\"_\"", "prepares texts"},
    {"normalizer/normalizers/0/prepend", "\"_\"", "prepares texts"},
    {"normalizer", "{\"type\": \"NFC\"}", "prepares texts"},
    {"normalizer", "{\"type\": \"Sequence\", \"normalizers\": []}", "prepares texts"},
    {"normalizer/normalizers/1", "{\"type\": \"Prepend\", \"prepend\": \"\xE2\x96\x81\"}", "prepares texts"},
    {"normalizer/normalizers/0",
     "{\"type\": \"Replace\", \"pattern\": {\"String\": \"_\"}, \"content\": \"\xE2\x96\x81\"}",
     "prepares texts"},
    {"pre_tokenizer", METASPACE, "prepares texts"},
};

// The same where the pre-tokenizer, not the normalizer, puts blanks.
static const Damage damages_of_blanks[] = {
    {"normalizer", "{\"type\": \"Prepend\", \"prepend\": \"\xE2\x96\x81\"}", "prepares texts"},
    {"pre_tokenizer/type", "\"Whitespace\"", "prepares texts"},
    {"pre_tokenizer/replacement", "\"_\"", "prepares texts"},
    {"pre_tokenizer/prepend_scheme", NULL, "prepares texts"},
    {"pre_tokenizer/split", "true", "prepares texts"},
    {"pre_tokenizer/split", NULL, "prepares texts"},
};

static void expect_refused(const json_t *good, const Damage *damage) {
    json_t *root = json_deep_copy(good);
    Tokenizer tokenizer;
    Error error;
    put(root, damage->path, damage->value);
    if (open_json(&tokenizer, root, &error)) {
        fail_msg("%s as %s is accepted", damage->path, damage->value);
    }
    expect_one_line(&error, damage->words);
    assert_null(tokenizer.bytes);
    json_decref(root);
}

static void damaged_files_are_refused_in_one_line(void **state) {
    (void)state;
    json_t *root = load_json(REFERENCE), *kinds = load_json("test/reference/tokenizer_kinds.json"),
           *kind = json_object_get(kinds, "prepend");
    for (size_t i = 0; i < sizeof damages / sizeof damages[0]; i++) { expect_refused(root, &damages[i]); }
    const Damage unknown = {"model/unk_token", "\"<|end|>\"", "no token stands for the byte 0x0D"};
    json_t *gaps = json_deep_copy(root);
    json_object_update(json_object_get(gaps, "model"),
                       json_object_get(json_object_get(kinds, "gaps"), "model"));
    expect_refused(gaps, &unknown); // what the library puts in the place of a byte is not known here
    Tokenizer tokenizer;
    Error error;
    json_t *odd = json_deep_copy(root); // but nothing stands there for 0xC0, which UTF-8 does not have
    put(odd, unknown.path, unknown.value);
    put(odd, "model/vocab/\xC3\x80", NULL);
    if (!open_json(&tokenizer, odd, &error)) { fail_msg("%s", error.text); }
    assert_true(tokenizer.lacks_bytes && tokenizer.byte_ids[0xC0] == -1);
    tokenizer_close(&tokenizer);
    json_decref(odd);
    json_object_update(root, json_object_get(kind, "file"));
    json_object_set(root, "model", json_object_get(kind, "model"));
    for (size_t i = 0; i < sizeof damages_of_characters / sizeof damages_of_characters[0]; i++) {
        expect_refused(root, &damages_of_characters[i]);
    }
    json_object_update(root, json_object_get(json_object_get(kinds, "first"), "file"));
    for (size_t i = 0; i < sizeof damages_of_blanks / sizeof damages_of_blanks[0]; i++) {
        expect_refused(root, &damages_of_blanks[i]);
    }
    json_decref(gaps);
    json_decref(kinds);
    json_decref(root);
}

// What a file says without asking for it.
static void what_changes_nothing_is_accepted(void **state) {
    (void)state;
    static const char *const changes[][2] = {{"model/continuing_subword_prefix", "\"\""},
                                             {"model/end_of_word_suffix", "\"\""},
                                             {"model/dropout", "null"},
                                             {"model/dropout", "false"},
                                             {"model/type", NULL},
                                             {"normalizer", "{\"type\": \"Sequence\", \"normalizers\": []}"},
                                             {"added_tokens/1/lstrip", "false"},
                                             {"pre_tokenizer/trim_offsets", "true"}};
    Tokenizer reference = open_reference();
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        json_t *root = load_json(REFERENCE);
        Tokenizer tokenizer;
        Error error;
        put(root, changes[i][0], changes[i][1]);
        if (!open_json(&tokenizer, root, &error)) { fail_msg("%s: %s", changes[i][0], error.text); }
        assert_true(tokenizer.sum == reference.sum);
        tokenizer_close(&tokenizer);
        json_decref(root);
    }
    tokenizer_close(&reference);
}

static void text_that_is_not_json_is_refused_in_one_line(void **state) {
    (void)state;
    static const char *const texts[] = {"",
                                        "{",
                                        "nonsense",
                                        "[]]",
                                        "{\"a\": 1, \"a\": 2}",
                                        "{\"a\": \"\\u0000\"}",
                                        "{\"a\": \"\xFF\"}",
                                        "{\"a\": \"\\ud800\"}",
                                        "7",
                                        "{\"a\":99999999999999999999}"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        Tokenizer tokenizer;
        Error error;
        assert_false(tokenizer_open_memory(&tokenizer, "file.json", texts[i], strlen(texts[i]), &error));
        expect_one_line(&error, "JSON");
    }
    char deep[5000];
    Tokenizer tokenizer;
    Error error;
    memset(deep, '[', sizeof deep);
    assert_false(tokenizer_open_memory(&tokenizer, "file.json", deep, sizeof deep, &error));
    expect_one_line(&error, "JSON");
    assert_false(tokenizer_open(&tokenizer, "/nowhere/at/all", &error));
    assert_non_null(strstr(error.text, "cannot read /nowhere/at/all"));
    assert_false(tokenizer_open(&tokenizer, "test", &error)); // a directory without one
    assert_non_null(strstr(error.text, "test/tokenizer.json"));
}

// What would take too long is refused by its size alone.
static void what_is_too_long_is_refused(void **state) {
    (void)state;
    Tokenizer tokenizer = open_reference();
    TokenList list = {NULL, 0, 0};
    Error error = {""};
    size_t most = TOKENIZER_MOST_TEXT_BYTES;
    assert_false(tokenizer_encode(&tokenizer, "", most + 1, false, &list, &error));
    assert_non_null(strstr(error.text, "a text of 1073741825 bytes is too long to encode at once"));
    assert_int_equal(list.count, 0);
    tokenizer_close(&tokenizer);
    char path[] = "/tmp/test_tokenizer.XXXXXX";
    int file = mkstemp(path); // without any block on disk
    assert_true(file >= 0 && ftruncate(file, (off_t)TOKENIZER_MOST_FILE_BYTES + 1) == 0);
    assert_false(tokenizer_open(&tokenizer, path, &error));
    assert_non_null(strstr(error.text, "is not a tokenizer.json: allowed is a file of at most 256 MiB"));
    close(file);
    unlink(path);
}

// The bytes of the reference file, to be damaged.
static char *read_reference(size_t *size) {
    Error error;
    void *mapping = file_map(REFERENCE, "expected a tokenizer.json", size, &error);
    assert_non_null(mapping);
    char *bytes = (char *)malloc(*size);
    memcpy(bytes, mapping, *size);
    munmap(mapping, *size);
    return bytes;
}

static void truncated_files_are_refused(void **state) {
    (void)state;
    size_t size = 0;
    char *bytes = read_reference(&size);
    // The last two bytes are a brace and a line end, so without the last one the file is
    // still whole.
    for (size_t shorter = 0; shorter < size - 2; shorter += 1 + shorter / 64) {
        Tokenizer tokenizer;
        Error error;
        char *copy = (char *)malloc(shorter + 1);
        memcpy(copy, bytes, shorter);
        assert_false(tokenizer_open_memory(&tokenizer, "file.json", copy, shorter, &error));
        expect_one_line(&error, "JSON");
        free(copy);
    }
    free(bytes);
}

static void random_damage_never_crashes(void **state) {
    (void)state;
    size_t size = 0;
    char *bytes = read_reference(&size), *copy = (char *)malloc(size);
    Random random = {random_hash(11, 0)};
    for (int round = 0; round < 1500; round++) {
        Tokenizer tokenizer;
        Error error;
        memcpy(copy, bytes, size);
        int changes = 1 + (int)(random_bits(&random) % 4);
        for (int i = 0; i < changes; i++) {
            char *byte = &copy[random_bits(&random) % size];
            bool flip = random_bits(&random) % 2 == 0;
            *byte = flip ? (char)(*byte ^ (1 << random_bits(&random) % 8))
                         : "0123456789,:[]{}\"a"[random_bits(&random) % 18];
        }
        error.text[0] = '\0';
        if (!tokenizer_open_memory(&tokenizer, "file.json", copy, size, &error)) {
            assert_true(error_is_set(&error));
            continue;
        }
        TokenList list = encode(&tokenizer, "The fox's mill <|end|>", 22, true);
        TextList back = decode(&tokenizer, list.ids, list.count, 1, true);
        assert_true(back.count > 0);
        token_list_free(&list);
        free(back.bytes);
        tokenizer_close(&tokenizer);
    }
    free(bytes);
    free(copy);
}

// Also where there are more tokens than 16 bits can number, as in Llama's and Qwen's.
static void every_pair_has_a_key_of_its_own(void **state) {
    (void)state;
    static const int32_t ids[] = {0, 1, 2, 255, 256, 65535, 65536, 65537, 131072, 151935};
    enum { IDS = sizeof ids / sizeof ids[0] };
    for (int a = 0; a < IDS * IDS; a++) {
        for (int b = 0; b < a; b++) {
            assert_true(tokenizer_pair(ids[a / IDS], ids[a % IDS]) !=
                        tokenizer_pair(ids[b / IDS], ids[b % IDS]));
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_pair_has_a_key_of_its_own),
        cmocka_unit_test(hard_strings_have_the_ids_of_the_library),
        cmocka_unit_test(other_kinds_have_the_ids_of_the_library),
        cmocka_unit_test(places_are_those_of_the_text_that_was_given),
        cmocka_unit_test(the_blank_in_front_of_a_text_is_not_of_the_text),
        cmocka_unit_test(the_token_in_front_of_a_text_is_found),
        cmocka_unit_test(each_codec_reads_and_prints_its_tokens),
        cmocka_unit_test(merges_as_one_string_are_the_same_as_pairs),
        cmocka_unit_test(a_tokenizer_lies_in_a_directory),
        cmocka_unit_test(tokens_without_a_row_are_left_out),
        cmocka_unit_test(the_token_behind_a_text_is_found_beside_it),
        cmocka_unit_test(the_sum_is_that_of_the_token_files),
        cmocka_unit_test(a_byte_is_the_token_of_its_letter),
        cmocka_unit_test(decoding_is_that_of_the_library_in_steps_of_any_length),
        cmocka_unit_test(a_character_appears_when_its_last_byte_does),
        cmocka_unit_test(text_that_is_not_utf8_comes_back_byte_by_byte),
        cmocka_unit_test(a_word_of_a_million_letters_takes_no_time),
        cmocka_unit_test(millions_of_blanks_are_cut),
        cmocka_unit_test(ids_without_a_token_have_no_text),
        cmocka_unit_test(damaged_files_are_refused_in_one_line),
        cmocka_unit_test(what_changes_nothing_is_accepted),
        cmocka_unit_test(text_that_is_not_json_is_refused_in_one_line),
        cmocka_unit_test(what_is_too_long_is_refused),
        cmocka_unit_test(truncated_files_are_refused),
        cmocka_unit_test(random_damage_never_crashes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
