// test_tokenize.c: lines of JSON become the token files of a plain definition: every
// document's tokens, its mask, its side and its padding, with any number of threads. What is
// no document is refused with its line.
#include "test/program/fleet.h"

#include "tokenizer/tokenize.h"

enum { DOCUMENTS = 300, MOST = 4000, VOCABULARY = 406, END = 0 };

// ---- A stream, and what it should become ----------------------------------------------

// Tokens with their mask.
typedef struct Expected {
    int32_t ids[MOST * 10];
    bool counts[MOST * 10];
    size_t count;
} Expected;

typedef struct Sample {
    char prompt[128], text[512];
    bool held_out;
} Sample;

// front: the token in front of a text, as if the file had it; -1: none, as it is. No token stands
// for '#', as if the file had none.
static Tokenizer open_tokenizer_with(int32_t front) {
    Tokenizer tokenizer;
    Error error;
    if (!tokenizer_open(&tokenizer, "test/reference/tokenizer.json", &error)) { fail_msg("%s", error.text); }
    assert_int_equal(tokenizer.begin, -1);
    tokenizer.begin = front;
    tokenizer.byte_ids['#'] = -1;
    tokenizer.lacks_bytes = true;
    return tokenizer;
}

static Tokenizer open_tokenizer(void) { return open_tokenizer_with(-1); }

// Without one, with one of its own, and with the one that ends texts, too.
static const int32_t fronts[] = {-1, 400, END};

// Document `number` of the stream: most have a prompt, every seventh is empty.
static Sample make_sample(int number) {
    Sample sample = {"", "", number % 5 == 0};
    if (number % 7 == 3) { return sample; }
    if (number % 4 != 0) { snprintf(sample.prompt, sizeof sample.prompt, "what is %d, the cat?\n", number); }
    for (int i = 0; i < number % 13; i++) {
        size_t length = strlen(sample.text);
        snprintf(sample.text + length, sizeof sample.text - length, "%sn%d <|endoftext|>", i > 0 ? " " : "",
                 i * number);
    }
    return sample;
}

static void write_stream(const Stage *stage, const char *name, int documents) {
    char path[STAGE_PATH_SIZE];
    FILE *file = fopen(stage_path(stage, name, path), "w");
    for (int i = 0; i < documents; i++) {
        Sample sample = make_sample(i);
        json_t *line = json_pack("{s:s, s:b}", "text", sample.text, "val", (int)sample.held_out);
        if (sample.prompt[0] != '\0') { json_object_set_new(line, "prompt", json_string(sample.prompt)); }
        assert_int_equal(json_dumpf(line, file, 0), 0);
        fprintf(file, i % 9 == 0 ? "\r\n\n" : "\n"); // empty lines are skipped
        json_decref(line);
    }
    assert_int_equal(fclose(file), 0);
}

static void expect_token(Expected *expected, int32_t id, bool counts) {
    expected->ids[expected->count] = id;
    expected->counts[expected->count++] = counts;
}

// One document without filling. alone: it is a sequence of its own.
static Expected *expect_document(const Tokenizer *tokenizer, const Sample *sample, bool alone) {
    Expected *expected = (Expected *)calloc(1, sizeof *expected);
    const char *parts[2] = {sample->prompt, sample->text};
    bool is_empty = sample->prompt[0] == '\0' && sample->text[0] == '\0';
    if (!is_empty && tokenizer->begin >= 0 && (alone || tokenizer->begin != END)) {
        expect_token(expected, tokenizer->begin, sample->prompt[0] == '\0');
    }
    for (int part = 0; part < 2; part++) {
        TokenList ids = {NULL, 0, 0};
        Error error;
        size_t length = strlen(parts[part]), end = sizeof "<|endoftext|>" - 1;
        if (length > 0 && part == 1 && parts[part][length - 1] == '>') {
            length -= end;
        } // what is written as the end
        assert_true(tokenizer_encode(tokenizer, parts[part], length, false, &ids, &error));
        for (size_t i = 0; i < ids.count; i++) { expect_token(expected, ids.ids[i], part == 1); }
        token_list_free(&ids);
    }
    expect_token(expected, END, true);
    return expected;
}

// separator: 1 + the token that divides documents; 0: not compared.
static void expect_divided_file(const Stage *stage, const char *name, const Expected *expected, int pad,
                                uint32_t separator) {
    char path[STAGE_PATH_SIZE];
    size_t size = 0;
    Error error = {""};
    TokenFile file;
    stage_path(stage, name, path);
    if (expected->count == 0) {
        assert_int_not_equal(access(path, F_OK), 0);
        return;
    }
    void *bytes = file_map(path, "a token file", &size, &error);
    if (bytes == NULL || !token_file_open(&file, path, bytes, size, TOKEN_FILE_CHECK_ALL, &error)) {
        fail_msg("%s", error.text);
    }
    assert_int_equal(file.token_count, expected->count);
    assert_int_equal(file.vocabulary, VOCABULARY);
    assert_int_equal(file.padded, pad);
    if (separator > 0) { assert_int_equal(file.separator, separator); }
    for (size_t i = 0; i < expected->count; i++) {
        assert_int_equal(token_file_token(&file, i), expected->ids[i]);
        assert_int_equal(token_mask_counts(file.mask, i), expected->counts[i]);
    }
    munmap(bytes, size);
}

static void expect_same_file(const Stage *stage, const char *name, const Expected *expected, int pad) {
    expect_divided_file(stage, name, expected, pad, 0);
}

static bool run_lines_with(int32_t front, const Stage *stage, const char *name, int threads,
                           TokenShards *made, Error *error) {
    char path[STAGE_PATH_SIZE];
    Tokenizer tokenizer = open_tokenizer_with(front);
    ThreadPool *pool = thread_pool_create(threads, false);
    FILE *input = fopen(stage_path(stage, name, path), "r");
    assert_non_null(input);
    error->text[0] = '\0';
    bool good = tokenize_lines(input, made, &tokenizer, pool, error);
    fclose(input);
    thread_pool_destroy(pool);
    tokenizer_close(&tokenizer);
    return good;
}

static bool run_lines(const Stage *stage, const char *name, int threads, TokenShards *made, Error *error) {
    return run_lines_with(-1, stage, name, threads, made, error);
}

// ---- Token files ----------------------------------------------------------------------

// A shard ends with the document that fills it, and both sides go on with the next number.
static void expect_shards(const Stage *stage, int32_t front) {
    Tokenizer tokenizer = open_tokenizer_with(front);
    char prefix[STAGE_PATH_SIZE], name[64];
    Error error;
    write_stream(stage, "lines.jsonl", DOCUMENTS);
    for (int threads = 1; threads <= 2; threads++) {
        Expected *expected = (Expected *)calloc(2, sizeof *expected);
        uint64_t total = 0, empty = 0;
        int number = 0;
        TokenShards made = {.name = stage_path(stage, "plain", prefix), .most_tokens = MOST};
        if (!run_lines_with(front, stage, "lines.jsonl", threads, &made, &error)) {
            fail_msg("%s", error.text);
        }
        for (int i = 0; i <= DOCUMENTS; i++) {
            Sample sample = make_sample(i);
            Expected *document = expect_document(&tokenizer, &sample, false);
            if (i < DOCUMENTS && document->count == 1) {
                empty++;
            } else if (i < DOCUMENTS) {
                for (size_t k = 0; k < document->count; k++) {
                    expect_token(&expected[sample.held_out], document->ids[k], document->counts[k]);
                }
            }
            free(document);
            if (i < DOCUMENTS && expected[sample.held_out].count < MOST) { continue; }
            for (int side = 0; side < 2; side++) {
                snprintf(name, sizeof name, "plain_%s_%05d.bin", side == 0 ? "train" : "val", number);
                expect_divided_file(stage, name, &expected[side], 0, front > 0 ? 401 : END + 1);
                total += expected[side].count;
                expected[side].count = 0;
            }
            number++;
        }
        assert_true(number > 3);
        assert_int_equal(made.number, number);
        assert_int_equal(made.tokens[0] + made.tokens[1], total);
        assert_int_equal(made.empty, empty);
        assert_int_equal(made.documents, DOCUMENTS - empty);
        free(expected);
    }
    tokenizer_close(&tokenizer);
}

static void documents_become_shards(void **state) {
    for (size_t i = 0; i < sizeof fronts / sizeof fronts[0]; i++) {
        expect_shards(stage_of(state), fronts[i]);
    }
}

// Each document is one sequence. Its first token and the filling are not predicted, and
// neither is the token after the last sequence.
static void expect_sequences(const Stage *stage, int32_t front) {
    Tokenizer tokenizer = open_tokenizer_with(front);
    char prefix[STAGE_PATH_SIZE];
    Error error;
    write_stream(stage, "lines.jsonl", DOCUMENTS);
    static const int pads[] = {2, 20, 100};
    for (size_t p = 0; p < 3; p++) {
        size_t pad = (size_t)pads[p];
        Expected *expected = (Expected *)calloc(2, sizeof *expected);
        uint64_t cut = 0, left_out = 0, sequences = 0;
        TokenShards made = {
            .name = stage_path(stage, "padded", prefix), .pad = (int)pad, .most_tokens = 1 << 30};
        if (!run_lines_with(front, stage, "lines.jsonl", 2, &made, &error)) { fail_msg("%s", error.text); }
        for (int i = 0; i < DOCUMENTS; i++) {
            Sample sample = make_sample(i);
            Expected *document = expect_document(&tokenizer, &sample, true);
            bool counts = false;
            for (size_t k = 1; k < document->count && k < pad; k++) {
                counts = counts || document->counts[k];
            }
            cut += document->count > pad;
            left_out += document->count > 1 && !counts;
            sequences += counts;
            for (size_t k = 0; counts && k < pad; k++) {
                bool kept = k < document->count;
                expect_token(&expected[sample.held_out], kept ? document->ids[k] : END,
                             kept && k > 0 && document->counts[k]);
            }
            free(document);
        }
        for (int side = 0; side < 2; side++) {
            if (expected[side].count > 0) { expect_token(&expected[side], END, false); }
        }
        uint32_t separator = front > 0 ? 401 : END + 1;
        expect_divided_file(stage, "padded_train_00000.bin", &expected[0], (int)pad, separator);
        expect_divided_file(stage, "padded_val_00000.bin", &expected[1], (int)pad, separator);
        assert_int_equal(made.cut, cut);
        assert_int_equal(made.left_out, left_out);
        assert_int_equal(made.sequences[0] + made.sequences[1], sequences);
        assert_true(left_out > 0 || pad > 2);
        free(expected);
    }
    tokenizer_close(&tokenizer);
}

static void padded_documents_are_sequences(void **state) {
    for (size_t i = 0; i < sizeof fronts / sizeof fronts[0]; i++) {
        expect_sequences(stage_of(state), fronts[i]);
    }
}

// The lines of a document in parts are one document, with one end, on the side of its first line.
static void parts_are_one_document(void **state) {
    const Stage *stage = stage_of(state);
    char prefix[STAGE_PATH_SIZE];
    Error error;
    Tokenizer tokenizer = open_tokenizer_with(400);
    Sample samples[3] = {{"", "one long story", false}, {"", "another", false}, {"", "one held out", true}};
    Expected *expected = expect_document(&tokenizer, &samples[0], false),
             *more = expect_document(&tokenizer, &samples[1], false),
             *held = expect_document(&tokenizer, &samples[2], false);
    for (size_t i = 0; i < more->count; i++) { expect_token(expected, more->ids[i], true); }
    stage_write(
        stage, "parts.jsonl",
        "{\"text\": \"one\", \"more\": true}\n{\"text\": \" long\", \"more\": true}\n"
        "{\"text\": \" story\"}\n{\"text\": \"another\", \"else\": [1]}\n"
        "{\"text\": \"one\", \"more\": true, \"val\": true}\n{\"text\": \" held out\"}"); // no line end
    TokenShards made = {.name = stage_path(stage, "parts", prefix), .most_tokens = 1};
    if (!run_lines_with(400, stage, "parts.jsonl", 1, &made, &error)) { fail_msg("%s", error.text); }
    assert_int_equal(made.number, 4); // a shard ends only with a document; the last one is empty
    assert_int_equal(made.documents, 3);
    assert_int_equal(made.tokens[0], expected->count);
    assert_int_equal(made.tokens[1], held->count);
    expected->count -= more->count;
    expect_same_file(stage, "parts_train_00000.bin", expected, 0);
    expect_same_file(stage, "parts_train_00001.bin", more, 0);
    expect_same_file(stage, "parts_val_00002.bin", held, 0);
    free(expected);
    free(more);
    free(held);
    tokenizer_close(&tokenizer);
}

// With padding, only the beginning of a document in parts fits.
static void only_the_first_part_is_padded(void **state) {
    const Stage *stage = stage_of(state);
    char prefix[STAGE_PATH_SIZE];
    Error error;
    Tokenizer tokenizer = open_tokenizer_with(400);
    Sample samples[2] = {{"", "one long", false}, {"", "a", false}};
    Expected *expected = (Expected *)calloc(1, sizeof *expected);
    for (int i = 0; i < 2; i++) {
        Expected *document = expect_document(&tokenizer, &samples[i], true);
        for (size_t k = 0; k < 3; k++) {
            bool kept = k < document->count;
            expect_token(expected, kept ? document->ids[k] : END, kept && k > 0);
        }
        free(document);
    }
    expect_token(expected, END, false);
    stage_write(stage, "parts.jsonl",
                "{\"text\": \"one long\", \"more\": true}\n{\"text\": \" story\"}\n{\"text\": \"a\"}\n");
    TokenShards made = {.name = stage_path(stage, "first", prefix), .pad = 3, .most_tokens = MOST};
    if (!run_lines_with(400, stage, "parts.jsonl", 1, &made, &error)) { fail_msg("%s", error.text); }
    expect_same_file(stage, "first_train_00000.bin", expected, 3);
    assert_int_equal(made.documents, 2);
    assert_int_equal(made.cut, 1);
    free(expected);
    tokenizer_close(&tokenizer);
}

// A document that begins with the text of the token in front of a text has the token, once.
// Elsewhere, in chats, and where no such token is, the text is letters. An empty first part does
// not take the token.
static void the_token_in_front_may_be_written(void **state) {
    static const struct {
        int32_t front;
        const char *lines;
        const char *tokens[8]; // "<": the token in front; ">": the end; ~: only read; others: a text's
    } cases[] = {
        {400, "{\"text\": \"<|end|>the mill\"}", {"<", "the mill", ">"}},
        {400, "{\"text\": \"<|end|><|end|>the\"}", {"<", "<|end|>the", ">"}},
        {-1, "{\"text\": \"<|end|>the mill\"}", {"<|end|>the mill", ">"}},
        {400, "{\"text\": \"the\"}\n{\"text\": \"<|end|>fox\"}", {"<", "the", ">", "<", "fox", ">"}},
        {400,
         "{\"text\": \"the\", \"more\": true}\n{\"text\": \"<|end|>fox\"}",
         {"<", "the", "<|end|>fox", ">"}},
        {400,
         "{\"text\": \"the\", \"more\" : false}\n{\"more\": false, \"text\": \"<|end|>fox\"}",
         {"<", "the", ">", "<", "fox", ">"}},
        {400, "{\"text\": \"<|end|>fox\", \"prompt\": \"\"}", {"<", "fox", ">"}},
        {400, "{\"text\": \"fox\", \"prompt\": \"<|end|>\"}", {"~<", "fox", ">"}},
        {400, "{\"text\": \"\", \"more\": true}\n{\"text\": \"mill\"}", {"<", "mill", ">"}},
        {400, "{\"text\": \"<|end|>fox\", \"prompt\": \"<|end|>the\"}", {"~<", "~the", "<|end|>fox", ">"}},
        {400,
         "{\"text\": \"fox\", \"learn\": [[0, 3]], \"prompt\": \"<|end|>the\"}",
         {"~<|end|>the", "fox", "~>"}},
    };
    const Stage *stage = stage_of(state);
    char prefix[STAGE_PATH_SIZE];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Tokenizer tokenizer = open_tokenizer();
        Expected *expected = (Expected *)calloc(1, sizeof *expected);
        Error error;
        for (const char *const *token = cases[i].tokens; *token != NULL; token++) {
            bool counts = (*token)[0] != '~';
            const char *text = *token + !counts;
            TokenList ids = {NULL, 0, 0};
            if (strcmp(text, "<") == 0) {
                token_list_add(&ids, 400);
            } else if (strcmp(text, ">") == 0) {
                token_list_add(&ids, END);
            } else {
                assert_true(tokenizer_encode(&tokenizer, text, strlen(text), false, &ids, &error));
            }
            for (size_t k = 0; k < ids.count; k++) { expect_token(expected, ids.ids[k], counts); }
            token_list_free(&ids);
        }
        stage_write(stage, "written.jsonl", cases[i].lines);
        TokenShards made = {.name = stage_path(stage, "written", prefix), .most_tokens = MOST};
        if (!run_lines_with(cases[i].front, stage, "written.jsonl", 2, &made, &error)) {
            fail_msg("%s", error.text);
        }
        expect_same_file(stage, "written_train_00000.bin", expected, 0);
        free(expected);
        tokenizer_close(&tokenizer);
    }
}

// In a text, too, a document that is the token in front alone is empty, as one without text is.
static void the_token_in_front_alone_is_no_document(void **state) {
    // Line ends behind the last document are none.
    static const char bytes[] = "<|end|>\n<|endoftext|>\n\n<|endoftext|>\nthe\n<|endoftext|>\n\r\n\n";
    const Text text = {(const uint8_t *)bytes, sizeof bytes - 1};
    char path[STAGE_PATH_SIZE];
    Error error;
    Tokenizer tokenizer = open_tokenizer_with(400);
    ThreadPool *pool = thread_pool_create(1, false);
    TokenShards made = {.name = stage_path(stage_of(state), "alone.bin", path)};
    if (!tokenize_texts(&made, &text, 1, &tokenizer, pool, &error)) { fail_msg("%s", error.text); }
    assert_int_equal(made.documents, 1);
    assert_int_equal(made.empty, 2);
    thread_pool_destroy(pool);
    tokenizer_close(&tokenizer);
}

// What is counted of a document in parts is of all its parts, once: here bytes that are no UTF-8,
// bytes without a token, and the text of a special token, in one of them.
static void parts_are_counted_as_one_document(void **state) {
    static const struct {
        const char *lines;
        size_t odd, lossy, spelling;
    } cases[] = {
        {"{\"text\": \"caf\\u00ff\", \"bytes\": true, \"more\": true}\n{\"text\": \" and\"}\n", 1, 0, 0},
        {"{\"text\": \"and \", \"more\": true}\n{\"text\": \"caf\\u00ff\", \"bytes\": true}\n", 1, 0, 0},
        {"{\"text\": \"<|end|> and\", \"more\": true}\n{\"text\": \" so\"}\n{\"text\": \"on\"}\n", 0, 0, 1},
        {"{\"text\": \"<|endoftext|> <|end|>\"}\n{\"text\": \"a <|end|>\"}\n", 0, 0, 2},
        {"{\"text\": \"[note] te]!\"}\n", 0, 0, 0}, // tokens, but not special ones
        {"{\"text\": \"no. #\", \"more\": true}\n{\"text\": \"1\"}\n{\"text\": \"a\"}\n", 0, 1, 0},
        {"{\"text\": \"no. \", \"more\": true}\n{\"text\": \"#1\"}\n{\"text\": \"#2\"}\n", 0, 2, 0},
        {"{\"text\": \"a\", \"prompt\": \"# 1\"}\n", 0, 1, 0},
        {"{\"text\": \"# 1\", \"learn\": [[1, 3]]}\n{\"text\": \"1\", \"learn\": [[0, 1]]}\n", 0, 1, 0}};
    const Stage *stage = stage_of(state);
    char prefix[STAGE_PATH_SIZE];
    Error error;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        stage_write(stage, "counted.jsonl", cases[i].lines);
        TokenShards made = {.name = stage_path(stage, "counted", prefix), .most_tokens = MOST};
        if (!run_lines(stage, "counted.jsonl", 1, &made, &error)) { fail_msg("%s", error.text); }
        bool same =
            made.odd == cases[i].odd && made.lossy == cases[i].lossy && made.spelling == cases[i].spelling;
        if (!same) { fail_msg("%zu, %zu, %zu: %s", made.odd, made.lossy, made.spelling, cases[i].lines); }
        assert_int_equal(made.spelled != NULL, made.spelling > 0); // one of them is shown
    }
}

// What is printed of these counts, of one document and of several.
static void what_was_left_out_is_told(void **state) {
    static const char *const told[] = {
        "", // nothing was
        "- 1 document was left out, because nothing of it would have been predicted\n"
        "- 1 document was left out, because it is empty\n"
        "- 1 document had bytes that are not UTF-8: each of these is a token\n"
        "- 1 document had bytes for which the tokenizer has no token: these are left out\n"
        "- 1 document holds special tokens as text, such as <|end|>: they are learned in letters\n",
        "- 2 documents were left out, because nothing of them would have been predicted\n"
        "- 3 documents were left out, because they are empty\n"
        "- 4 documents had bytes that are not UTF-8: each of these is a token\n"
        "- 5 documents had bytes for which the tokenizer has no token: these are left out\n"
        "- 6 documents hold special tokens as text, such as <|end|>: they are learned in letters\n"};
    const TokenShards shards[] = {
        {.documents = 7},
        {.left_out = 1, .empty = 1, .odd = 1, .lossy = 1, .spelling = 1, .spelled = "<|end|>"},
        {.left_out = 2, .empty = 3, .odd = 4, .lossy = 5, .spelling = 6, .spelled = "<|end|>"}};
    (void)state;
    for (int i = 0; i < 3; i++) {
        char text[1024];
        Capture capture = capture_begin(stdout);
        token_shards_tell(&shards[i], "- ");
        capture_end(&capture, text, sizeof text);
        assert_string_equal(text, told[i]);
    }
}

// The first token of a sequence cannot be predicted: a chat that learns it alone is left out.
static void a_chat_that_learns_its_first_token_alone_is_left_out(void **state) {
    const Stage *stage = stage_of(state);
    char prefix[STAGE_PATH_SIZE];
    Error error;
    stage_write(
        stage, "first.jsonl",
        "{\"text\": \"the mill\", \"learn\": [[0, 1]]}\n{\"text\": \"the mill\", \"learn\": [[0, 8]]}\n");
    TokenShards made = {.name = stage_path(stage, "learned", prefix), .pad = 16, .most_tokens = MOST};
    if (!run_lines(stage, "first.jsonl", 1, &made, &error)) { fail_msg("%s", error.text); }
    assert_int_equal(made.left_out, 1);
    assert_int_equal(made.sequences[0], 1);
}

// ---- Chats ----------------------------------------------------------------------------

// What becomes of a chat of which two parts are predicted, by the bytes that its tokens have.
static Expected *expect_chat(const Tokenizer *tokenizer, const char *text, const size_t parts[2][2]) {
    Expected *expected = (Expected *)calloc(1, sizeof *expected);
    TokenList ids = {NULL, 0, 0};
    Error error;
    size_t at = 0;
    assert_true(tokenizer_encode(tokenizer, text, strlen(text), true, &ids, &error));
    for (size_t i = 0; i < ids.count; i++) {
        size_t length = 0;
        bool counts = false;
        tokenizer_bytes(tokenizer, ids.ids[i], &length);
        for (size_t end = at + length; at < end; at++) {
            for (int k = 0; k < 2; k++) { counts = counts || (at >= parts[k][0] && at < parts[k][1]); }
        }
        expect_token(expected, ids.ids[i], counts);
    }
    if (ids.ids[ids.count - 1] != END) { expect_token(expected, END, false); }
    token_list_free(&ids);
    return expected;
}

// Every part of a text that begins and ends somewhere, and a second one behind it. A chat has no
// token in front but its template's.
static void parts_of_a_chat_are_predicted(void **state) {
    static const char *const texts[2] = {"na\xC3\xAFve fox<|end|> the mill \xF0\x9F\x98\x80.",
                                         "it's<|end|>!the<|endoftext|>"};
    const Stage *stage = stage_of(state);
    Tokenizer tokenizer = open_tokenizer();
    char path[STAGE_PATH_SIZE], prefix[STAGE_PATH_SIZE];
    Error error;
    for (int t = 0; t < 2; t++) {
        Expected *expected = (Expected *)calloc(1, sizeof *expected);
        FILE *file = fopen(stage_path(stage, "chats.jsonl", path), "w");
        uint64_t left_out = 0;
        size_t length = strlen(texts[t]);
        for (size_t begin = 0; begin <= length; begin++) {
            for (size_t end = begin; end <= length; end++) {
                const size_t parts[2][2] = {{begin, end},
                                            {(end + length) / 2, end + 5 < length ? length : 0}};
                bool two = parts[1][1] > 0;
                fprintf(file, "{\"text\": \"%s\", \"learn\": [[%zu, %zu]", texts[t], begin, end);
                if (two) { fprintf(file, ", [%zu, %zu]", parts[1][0], parts[1][1]); }
                fprintf(file, "]}\n");
                Expected *chat = expect_chat(&tokenizer, texts[t], parts);
                left_out += begin == end && !two;
                for (size_t i = 0; i < chat->count && (begin < end || two); i++) {
                    expect_token(expected, chat->ids[i], chat->counts[i]);
                }
                free(chat);
            }
        }
        assert_int_equal(fclose(file), 0);
        TokenShards made = {.name = stage_path(stage, "chats", prefix), .most_tokens = MOST * 10};
        if (!run_lines_with(400, stage, "chats.jsonl", 2, &made, &error)) { fail_msg("%s", error.text); }
        expect_same_file(stage, "chats_train_00000.bin", expected, 0);
        assert_int_equal(made.left_out, left_out);
        free(expected);
    }
    tokenizer_close(&tokenizer);
}

// A file says which token divides its documents, unless one of its chats has the token within.
static void a_file_says_what_divides_its_documents(void **state) {
    static const struct {
        const char *stream;
        uint32_t separator, fronted; // without a token in front of a text, and with one
    } cases[] = {
        {"{\"text\": \"a<|endoftext|>b\"}\n", END + 1, 401}, // not a chat: letters
        {"{\"text\": \"ab<|endoftext|>\", \"learn\": [[1, 15]]}\n{\"text\": \"c\"}\n", END + 1, 0},
        {"{\"text\": \"ab\", \"learn\": [[1, 2]]}\n", END + 1, END + 1},
        {"{\"text\": \"<|end|>ab\", \"learn\": [[8, 9]]}\n{\"text\": \"c\"}\n", END + 1, 401},
        {"{\"text\": \"<|end|>a<|end|>b\", \"learn\": [[7, 8]]}\n{\"text\": \"c\"}\n", END + 1, 0},
        {"{\"text\": \"<|end|>a<|endoftext|>b\", \"learn\": [[7, 8]]}\n{\"text\": \"c\"}\n", 0, 401},
        {"{\"text\": \"c\"}\n{\"text\": \"a<|endoftext|>b\", \"learn\": [[0, 2]]}\n{\"text\": \"c\"}\n", 0,
         0},
        {"{\"text\": \"a<|endoftext|>\", \"learn\": [[0, 2]], \"more\": true}\n{\"text\": \"c\"}\n", 0, 0},
    };
    const Stage *stage = stage_of(state);
    char prefix[STAGE_PATH_SIZE], path[STAGE_PATH_SIZE];
    Error error;
    for (size_t k = 0; k < 2 * sizeof cases / sizeof cases[0]; k++) {
        size_t i = k / 2;
        uint32_t separator = k % 2 == 0 ? cases[i].separator : cases[i].fronted;
        TokenShards made = {.name = stage_path(stage, "divided", prefix), .most_tokens = MOST};
        TokenFile file;
        size_t size = 0;
        stage_write(stage, "divided.jsonl", cases[i].stream);
        assert_true(run_lines_with(k % 2 == 0 ? -1 : 400, stage, "divided.jsonl", 2, &made, &error));
        void *bytes = file_map(stage_path(stage, "divided_train_00000.bin", path), "a file", &size, &error);
        assert_true(bytes != NULL && token_file_open(&file, path, bytes, size, TOKEN_FILE_CHECK_ALL, &error));
        if (file.separator != separator) { fail_msg("%u: %s", file.separator, cases[i].stream); }
        munmap(bytes, size);
    }
}

// A line is one part, however long it is, and empty ones are counted but give none.
static void lines_are_whole(void **state) {
    enum { LINES = 3000, LONG = 1000000 };
    const Stage *stage = stage_of(state);
    char path[STAGE_PATH_SIZE], text[64];
    FILE *file = fopen(stage_path(stage, "long.txt", path), "w+");
    for (int i = 0; i < LINES; i++) {
        fprintf(file, "line %d", i);
        for (int k = 0; i == 1234 && k < LONG; k++) { fputc('.', file); }
        fputs(i == LINES - 1 ? "" : "\n\r\n\n", file);
    }
    rewind(file);
    JsonLines lines = {.file = file};
    DocumentPart part;
    int seen = 0;
    for (; json_lines_next(&lines, &part); seen++) {
        int length = snprintf(text, sizeof text, "line %d", seen);
        assert_int_equal(part.line, 3 * seen + 1);
        assert_int_equal(part.count, length + (seen == 1234 ? LONG : 0));
        assert_memory_equal(part.bytes, text, (size_t)length);
        free(part.owned);
    }
    assert_int_equal(seen, LINES);
    assert_int_equal(lines.problem, 0);
    fclose(file);
    JsonLines none = {.file = fopen(stage->directory, "r")}; // a directory can be opened, but not read
    assert_false(json_lines_next(&none, &part));
    assert_int_equal(none.problem, EISDIR);
    fclose(none.file);
}

// ---- Refusals -------------------------------------------------------------------------

static void what_is_no_document_is_refused(void **state) {
    static const struct {
        const char *stream, *part;
    } cases[] = {
        {"{\"text\": \"a\"}\n\nx\n", "line 3 is not JSON"},
        {"{\"text\": \"a\"}\n{\"text\": \"b\"", "line 2 is not JSON"},
        {"{\"text\": 3}\n", "line 1 must be an object whose 'text'"},
        {"{\"prompt\": \"a\"}\n", "line 1 must be an object whose 'text'"},
        {"{\"text\": \"a\", \"val\": \"yes\"}\n", "line 1 must be an object whose 'text'"},
        {"{\"text\": \"a\"}\n{\"text\": \"a\", \"more\": 1}\n", "line 2 must be an object whose 'text'"},
        {"{\"text\": \"a\", \"prompt\": 3}\n", "line 1 must be an object whose 'text'"},
        {"[\"text\"]\n", "line 1 must be an object whose 'text'"},
        {"{\"text\": \"\xFF\"}\n", "line 1 is not JSON"},
        {"{\"text\": \"a\"}\n{\"text\": \"a\", \"more\": true}\n", "ends within a document"},
        {"{\"text\": \"ab\", \"learn\": 3}\n", "line 1: 'learn' must be a list of [begin, end]"},
        {"{\"text\": \"ab\", \"learn\": [[0, 1], 3]}\n", "line 1: part 2 of 'learn' is not [begin, end]"},
        {"{\"text\": \"ab\", \"learn\": [[0]]}\n", "line 1: part 1 of 'learn'"},
        {"{\"text\": \"ab\", \"learn\": [[0, 3]]}\n", "within the 2 bytes of 'text'"},
        {"{\"text\": \"ab\", \"learn\": [[2, 1]]}\n", "line 1: part 1 of 'learn'"},
        {"{\"text\": \"ab\", \"learn\": [[0, 2], [1, 2]]}\n", "line 1: part 2 of 'learn'"},
        {"{\"text\": \"ab\", \"learn\": [[-1, 1]]}\n", "line 1: part 1 of 'learn'"},
        {"{\"text\": \"ab\", \"learn\": [[0, 9223372036854775807]]}\n", "line 1: part 1 of 'learn'"},
        {"{\"text\": \"ab\", \"learn\": [[0, 1.5]]}\n", "line 1: part 1 of 'learn'"},
    };
    const Stage *stage = stage_of(state);
    char prefix[STAGE_PATH_SIZE], command[2 * STAGE_PATH_SIZE];
    Error error;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        TokenShards made = {.name = stage_path(stage, "bad", prefix), .most_tokens = MOST};
        stage_write(stage, "bad.jsonl", cases[i].stream);
        assert_false(run_lines(stage, "bad.jsonl", 2, &made, &error));
        if (strstr(error.text, cases[i].part) == NULL) { fail_msg("%s: %s", cases[i].stream, error.text); }
        snprintf(command, sizeof command, "! ls '%s' | grep -q bad_", stage->directory);
        assert_int_equal(system(command), 0);
    }
}

static void a_full_disk_leaves_no_shards(void **state) {
    Stage *stage = stage_of(state);
    char command[2 * STAGE_PATH_SIZE], path[STAGE_PATH_SIZE];
    write_stream(stage, "lines.jsonl", DOCUMENTS);
    snprintf(command, sizeof command,
             "cd '%s' && (ulimit -f 8; \"$TRAIN_GPT\" tokenize --tokenizer '%s/test/reference' --out full "
             "< lines.jsonl 2> errors.txt; test $? = 3) && ! ls | grep -q full_",
             stage->directory, stage->root);
    assert_int_equal(system(command), 0);
    char *errors = file_read(stage_path(stage, "errors.txt", path));
    text_check(errors, "cannot write full_train_00000.bin", "errors");
    assert_int_equal(text_lines(errors), 1);
    free(errors);
}

static void options_are_checked(void **state) {
    static const struct {
        const char *arguments, *part;
    } cases[] = {
        {"tokenize --out web", "tokenize needs --tokenizer DIR and --out PREFIX"},
        {"tokenize --tokenizer bpe", "tokenize needs --tokenizer DIR and --out PREFIX"},
        {"tokenize --tokenizer none --out web", "cannot read none"},
        {"tokenize --tokenizer bpe --out web --seq-len 1", "padded to 2 to 65536 tokens"},
        {"tokenize --tokenizer bpe --out web --lr 1", "--lr has no effect on train_gpt tokenize"},
        {"tokenize --tokenizer bpe --out web", "nothing was written"}, // of /dev/null
    };
    Stage *stage = stage_of(state);
    char command[4 * STAGE_PATH_SIZE];
    snprintf(command, sizeof command, "mkdir -p '%s/bpe' && cp '%s/test/reference/tokenizer.json' '%s/bpe'",
             stage->directory, stage->root, stage->directory);
    assert_int_equal(system(command), 0);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Outcome outcome = program_run(stage, 0, cases[i].arguments);
        outcome_check(&outcome, 2, cases[i].arguments);
        text_check(outcome.errors, cases[i].part, cases[i].arguments);
        assert_int_equal(text_lines(outcome.errors), 1);
    }
}

// Documents of which 2 or 30 tokens are predicted, in batches of four: the loss and the norm of the
// gradient are those of the same tokens, however they are cut into micro-batches and ranks.
static void a_masked_batch_is_the_same_however_it_is_cut(void **state) {
    static const struct {
        int ranks;
        const char *options;
    } cuts[] = {{0, "--optimizer ddp --micro-batch 4 --accumulate 1"},
                {0, "--optimizer ddp --micro-batch 1 --accumulate 4"},
                {0, "--optimizer zero1 --micro-batch 2 --accumulate 2"},
                {2, "--optimizer zero1 --micro-batch 1 --accumulate 2"},
                {2, "--optimizer ddp --micro-batch 2 --accumulate 1"},
                {2, "--optimizer acco --micro-batch 1 --accumulate 2"}};
    enum { CUTS = sizeof cuts / sizeof cuts[0], COMMITS = 3 };
    Stage *stage = stage_of(state);
    char config[400], options[400];
    double losses[COMMITS], norms[COMMITS];
    shell(stage,
          "mkdir -p cut && cp '%s/test/reference/tokenizer.json' cut && "
          "awk 'BEGIN { for (i = 0; i < 32; i++) { few = i %% 4 < 2 ? 1 : 29; "
          "printf \"{\\\"prompt\\\": \\\"\"; for (k = few; k < 30; k++) printf \"%%c\", 97 + (i + 5 * k) %% "
          "26; "
          "printf \"\\\", \\\"text\\\": \\\"\"; for (k = 0; k < few; k++) printf \"%%c\", 97 + (3 * i + 7 * "
          "k) %% 26; "
          "print \"\\\"}\" } }' > cut.jsonl && "
          "'%s' tokenize --tokenizer cut --out cut/tokens --seq-len 33 < cut.jsonl > /dev/null",
          stage->root, stage->binary);
    snprintf(config, sizeof config,
             "{\"model_type\": \"gpt_neo\", \"num_layers\": 2, \"hidden_size\": 32, \"num_heads\": 2, "
             "\"max_position_embeddings\": 33, \"vocab_size\": %d, "
             "\"attention_types\": [[[\"global\"], 2]]}",
             VOCABULARY);
    stage_write(stage, "cut/config.json", config);
    stage_write(stage, "base.json", "{}");
    for (int cut = 0; cut < CUTS; cut++) {
        snprintf(
            options, sizeof options,
            "--model cut/config.json --data cut/tokens_train_00000.bin --seq-len 33 --tokens 528 --lr 0.01 "
            "--report-every 1 --val-batches none --sample-tokens none --threads 1 --grad-clip off %s",
            cuts[cut].options);
        json_t *events = train(stage, cuts[cut].ranks, options);
        // ACCO computes a part of later batches at an estimate, so only its first is the same.
        for (int i = 0; i < (cut < CUTS - 1 ? COMMITS : 1); i++) {
            json_t *report = log_event_of(events, "report", i);
            double loss = log_number(report, "loss"), norm = log_number(report, "grad_norm");
            if (cut == 0) { losses[i] = loss, norms[i] = norm; }
            assert_close(loss, losses[i], 1e-5 * losses[i], options);
            assert_close(norm, norms[i], 1e-4 * norms[i], options);
        }
        json_decref(events);
    }
}

#define TOKENIZE_TEST(function) \
    cmocka_unit_test_prestate_setup_teardown(function, NULL, stage_end_test, &stage)

int main(void) {
    static Stage stage;
    const struct CMUnitTest tests[] = {
        TOKENIZE_TEST(documents_become_shards),
        TOKENIZE_TEST(padded_documents_are_sequences),
        TOKENIZE_TEST(only_the_first_part_is_padded),
        TOKENIZE_TEST(the_token_in_front_may_be_written),
        TOKENIZE_TEST(the_token_in_front_alone_is_no_document),
        TOKENIZE_TEST(parts_are_counted_as_one_document),
        TOKENIZE_TEST(what_was_left_out_is_told),
        TOKENIZE_TEST(a_chat_that_learns_its_first_token_alone_is_left_out),
        TOKENIZE_TEST(lines_are_whole),
        TOKENIZE_TEST(parts_of_a_chat_are_predicted),
        TOKENIZE_TEST(a_file_says_what_divides_its_documents),
        TOKENIZE_TEST(parts_are_one_document),
        TOKENIZE_TEST(what_is_no_document_is_refused),
        TOKENIZE_TEST(a_full_disk_leaves_no_shards),
        TOKENIZE_TEST(options_are_checked),
        TOKENIZE_TEST(a_masked_batch_is_the_same_however_it_is_cut),
    };
    stage_open(&stage);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    stage_close(&stage);
    return failed;
}
