// test_sample.c: one token at a time gives the logits of a full forward pass; tokens are
// drawn with the right probabilities; what a chat's answers are asked for with has transformers'
// tokens, in the first turn and in later ones.
#include "test/harness.h"

#include "evaluation/sample.h"

typedef struct Fixture {
    ModelConfig config;
    ParameterTable table;
    Arena training, sampling; // two arenas, as in the program
    Model model;
    Sampler sampler;
    Stream stream;
    float *parameters;
    int32_t tokens[64];
} Fixture;

enum { POSITIONS = 37 };

static void fixture_open_family(Fixture *fixture, int threads, const ModelFamily *family) {
    Error error;
    Random random;
    memset(fixture, 0, sizeof *fixture);
    assert_true(model_find("tiny", &fixture->config, &error));
    fixture->config.positions = POSITIONS;
    fixture->config.window = 5;
    fixture->config.vocabulary = 211;
    fixture->config.family = family;
    if (family == &gpt2_family) {
        fixture->config.scaled_scores = true;
        memset(fixture->config.local, 0, sizeof fixture->config.local);
    }
    parameter_table_make(&fixture->config, &fixture->table);
    arena_reserve(&fixture->training, MEMORY_PARAMETERS, "parameters",
                  fixture->table.parameter_count * sizeof(float), &fixture->parameters);
    ModelSettings settings = model_on_cpu(1, POSITIONS, threads);
    model_reserve(&fixture->model, &fixture->training, &fixture->config, &settings);
    sampler_reserve(&fixture->sampler, &fixture->sampling, &fixture->config, threads);
    assert_true(arena_commit(&fixture->training, &error) && arena_commit(&fixture->sampling, &error));
    fixture->stream.pool = thread_pool_create(threads, true);
    parameters_initialize(&fixture->table, 3, fixture->stream.pool, fixture->parameters);
    random.state = 11;
    // Larger matrices than at the start of training, so that attention is not nearly
    // uniform.
    for (int t = 0; t < fixture->table.count; t++) {
        ParameterInfo *entry = &fixture->table.entries[t];
        for (size_t i = entry->offset; i < entry->offset + entry->count && entry->is_matrix; i++) {
            fixture->parameters[i] *= 4.0f;
        }
        for (size_t i = 0; i < entry->count && strstr(entry->name, "c_attn.bias") != NULL; i++) {
            fixture->parameters[entry->offset + i] = (float)(i % 7) - 3.0f;
        }
    }
    for (int i = 0; i < POSITIONS; i++) {
        fixture->tokens[i] = (int32_t)(random_uniform(&random) * fixture->config.vocabulary);
    }
}

static void fixture_open(Fixture *fixture, int threads) {
    fixture_open_family(fixture, threads, &gpt_neo_family);
}

static void fixture_close(Fixture *fixture) {
    thread_pool_destroy(fixture->stream.pool);
    arena_release(&fixture->training);
    arena_release(&fixture->sampling);
    parameter_table_free(&fixture->table);
}

static void check_steps_equal_forward(const ModelFamily *family) {
    Fixture fixture;
    fixture_open_family(&fixture, 2, family);
    int C = fixture.config.channels, V = fixture.config.vocabulary;
    float *expected = (float *)malloc(sizeof(float) * (size_t)(POSITIONS * V));
    model_forward(&fixture.model, &fixture.stream, fixture.parameters, fixture.tokens, NULL);
    matmul_forward(&fixture.stream, as_reals(expected), V, head_input(&fixture.model),
                   as_reals(fixture.parameters), POSITIONS, C, V);
    for (int round = 0; round < 2; round++) { // the second round finds the cache of the first one
        fixture.sampler.length = 0;
        for (int t = 0; t < POSITIONS; t++) {
            const float *logits =
                sampler_step(&fixture.sampler, &fixture.stream, fixture.parameters, fixture.tokens[t]);
            for (int v = 0; v < V; v++) {
                double reference = (double)expected[t * V + v];
                if (!(fabs((double)logits[v] - reference) <= 1e-5 * fmax(1.0, fabs(reference)))) {
                    fail_msg("position %d, token %d: %.9g, expected %.9g", t, v, (double)logits[v],
                             reference);
                }
            }
        }
        assert_null(sampler_step(&fixture.sampler, &fixture.stream, fixture.parameters, 0));
    }
    free(expected);
    fixture_close(&fixture);
}

static void test_steps_equal_forward(void **state) {
    (void)state;
    check_steps_equal_forward(&gpt_neo_family);
    check_steps_equal_forward(&gpt2_family);
}

static const Sampling usual = {0.8, 40, 1, 1}, greedy = {0, 0, 1, 1};

// output (20) <- what follows the first 7 tokens of the fixture.
static void generate(Fixture *fixture, Random *random, int32_t output[20]) {
    fixture->sampler.length = 0;
    for (int i = 0; i < 7; i++) {
        sampler_step(&fixture->sampler, &fixture->stream, fixture->parameters, fixture->tokens[i]);
    }
    for (int i = 0; i < 20; i++) {
        output[i] = sampler_choose(&fixture->sampler, &usual, random);
        sampler_step(&fixture->sampler, &fixture->stream, fixture->parameters, output[i]);
    }
}

static void test_generate(void **state) {
    (void)state;
    Fixture one, two;
    fixture_open(&one, 1);
    fixture_open(&two, 2);
    int32_t first[20], second[20];
    Random random_one, random_two;
    random_one.state = random_two.state = 5;
    generate(&one, &random_one, first);
    generate(&two, &random_two, second);
    // Only the seed matters, not the number of threads.
    assert_memory_equal(first, second, sizeof first);
    generate(&one, &random_one, second);
    assert_true(memcmp(first, second, sizeof first) != 0);
    // The positions end: 37 fit.
    for (int i = 0; i < 10; i++) {
        assert_non_null(sampler_step(&one.sampler, &one.stream, one.parameters, first[i]));
    }
    assert_null(sampler_step(&one.sampler, &one.stream, one.parameters, first[0]));
    one.parameters[one.table.entries[one.table.count - 2].offset] = NAN;
    one.sampler.length = 0;
    sampler_step(&one.sampler, &one.stream, one.parameters, first[0]);
    assert_int_equal(sampler_choose(&one.sampler, &usual, &random_one), -1);
    fixture_close(&one);
    fixture_close(&two);
}

static void test_choose(void **state) {
    (void)state;
    float logits[6] = {0.0f, 1.0f, 3.0f, 2.0f, 3.0f, -INFINITY}, sorted[6];
    Sampler sampler;
    Random random;
    memset(&sampler, 0, sizeof sampler);
    sampler.logits = logits;
    sampler.model.config.vocabulary = 6;
    sampler.sorted = sorted;
    random.state = 1;
    assert_int_equal(sampler_choose(&sampler, &greedy, &random), 2);
    // The shares are 0.39, 0.39, 0.14, 0.05, 0.02 at temperature 1; of three tokens 0.42, 0.42,
    // 0.16.
    static const struct {
        Sampling how;
        float least;
    } cases[8] = {{{2, 0, 0.8, 1}, 2},  {{1, 0, 1, 1}, -INFINITY}, {{0.5, 0, 1, 1}, -INFINITY},
                  {{2, 3, 1, 1}, 2},    {{1, 1, 1, 1}, 3},         {{1, 0, 0.8, 1}, 2},
                  {{1, 0, 0.95, 1}, 1}, {{1, 3, 0.8, 1}, 3}};
    for (int k = 0; k < 8; k++) {
        double weights[6], sum = 0.0;
        int counts[6] = {0}, draws = 20000;
        const Sampling *how = &cases[k].how;
        for (int v = 0; v < 6; v++) {
            sum += weights[v] = logits[v] >= cases[k].least ? exp((double)logits[v] / how->temperature) : 0.0;
        }
        for (int i = 0; i < draws; i++) { counts[sampler_choose(&sampler, how, &random)]++; }
        for (int v = 0; v < 6; v++) {
            double p = weights[v] / sum, deviation = sqrt(p * (1 - p) / draws);
            if (!(fabs((double)counts[v] / draws - p) <= 5.0 * deviation)) {
                fail_msg("case %d token %d: %d draws, p %.4f", k, v, counts[v], p);
            }
        }
    }
    // A penalty of 2 takes the tokens of the text from 3 to 1.5; a negative logit moves away from
    // 0.
    int32_t text[3] = {2, 4, 2};
    float adjusted[6];
    Sampling penalty = {0, 0, 1, 2};
    sampler.text = text;
    sampler.length = 3;
    sampler.adjusted = adjusted;
    assert_int_equal(sampler_choose(&sampler, &penalty, &random), 3);
    assert_true(adjusted[2] == 1.5f && adjusted[4] == 1.5f && adjusted[3] == 2.0f);
    // Of tokens with a penalty the best two may be drawn, not those that are the best two without.
    Sampling best_two = {9, 2, 1, 4};
    int drawn[6] = {0};
    for (int i = 0; i < 1000; i++) { drawn[sampler_choose(&sampler, &best_two, &random)]++; }
    int kinds = 0;
    for (int v = 0; v < 6; v++) { kinds += drawn[v] > 0; }
    assert_true(kinds == 2 && drawn[3] > 300 && drawn[2] + drawn[4] == 0);
    logits[2] = -1.0f;
    sampler_choose(&sampler, &penalty, &random);
    assert_true(adjusted[2] == -2.0f);
    logits[3] = NAN;
    assert_int_equal(sampler_choose(&sampler, &greedy, &random), -1);
}

static int descending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

static void test_largest(void **state) {
    (void)state;
    Random random;
    random.state = 9;
    for (int round = 0; round < 300; round++) {
        float values[50], expected[50], largest[50];
        int count = 1 + (int)(random_uniform(&random) * 50);
        for (int i = 0; i < count; i++) {
            values[i] = expected[i] = (float)(int)(random_uniform(&random) * (1 + round % 60));
        }
        qsort(expected, (size_t)count, sizeof *expected, descending);
        for (int k = 1; k <= count; k++) {
            sampler_largest(values, count, k, largest);
            assert_memory_equal(largest, expected, (size_t)k * sizeof *largest);
        }
    }
}

// said: a system text (may be empty), what the user says, an answer, and so on. asked: the tokens
// that transformers puts before each answer.
static void check_conversation(const TextCodec *codec, const char *directory, const json_t *said,
                               const json_t *asked) {
    Error error;
    Options options = {.system = ""};
    Sample sample = {.options = &options, .codec = *codec, .last = -1};
    int32_t text[8192];
    snprintf(options.system, sizeof options.system, "%s", json_string_value(json_array_get(said, 0)));
    sample.sampler.text = text;
    assert_true(chat_open(&sample.chat, directory, &sample.codec.tokenizer, &error));
    assert_non_null(sample.chat.root);
    for (size_t turn = 0; turn < json_array_size(asked); turn++) {
        const char *user = json_string_value(json_array_get(said, 2 * turn + 1)),
                   *answer = json_string_value(json_array_get(said, 2 * turn + 2));
        const json_t *ids = json_array_get(asked, turn);
        TokenList tokens = {NULL, 0, 0};
        int from = 0;
        assert_true(sample_encode(&sample, user, &from, sample.thought, &tokens, &error));
        bool same = json_array_size(ids) == (size_t)from + tokens.count;
        memcpy(text + from, tokens.ids, tokens.count * sizeof *text);
        for (size_t i = 0; same && i < json_array_size(ids); i++) {
            same = text[i] == (int32_t)json_integer_value(json_array_get(ids, i));
        }
        if (!same) {
            fail_msg("%s, turn %zu: other tokens ask for the answer to: %s", directory, turn, user);
        }
        if (answer != NULL) { // all but its last token have been read
            assert_true(
                tokenizer_encode(&sample.codec.tokenizer, answer, strlen(answer), true, &tokens, &error));
            memcpy(text + from, tokens.ids, tokens.count * sizeof *text);
            sample.last = tokens.ids[tokens.count - 1];
            sample.sampler.length = from + (int)tokens.count - 1;
        }
        token_list_free(&tokens);
    }
    json_decref(sample.chat.root);
}

static void dump(const json_t *value, const char *directory, const char *name) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    assert_int_equal(json_dump_file(value, path, 0), 0);
}

// CHATS, from dev/reference/check_chats.py: a directory with a tokenizer, a chat.json and
// conversations.
static void test_conversations(void **state) {
    (void)state;
    char directory[] = "/tmp/conversations.XXXXXX", path[PATH_MAX];
    const char *given = getenv("CHATS");
    snprintf(path, sizeof path, "%s/conversations.json", given);
    json_t *root = json_load_file(given != NULL ? path : "test/reference/chats.json", 0, NULL);
    json_t *tokenizer = json_load_file("test/reference/tokenizer.json", 0, NULL), *one;
    const char *name, *from = given != NULL ? given : directory;
    TextCodec codec;
    Error error;
    assert_true(root != NULL && tokenizer != NULL && (given != NULL || mkdtemp(directory) != NULL));
    json_array_extend(json_object_get(tokenizer, "added_tokens"), json_object_get(root, "added"));
    if (given == NULL) { dump(tokenizer, directory, "tokenizer.json"); }
    assert_true(text_codec_open(&codec, from, false, 1 << 20, &error));
    json_object_foreach(json_object_get(root, "templates"), name, one) {
        if (given == NULL) { dump(json_object_get(one, "pieces"), directory, "chat.json"); }
        check_conversation(&codec, from, json_object_get(one, "said"), json_object_get(one, "asked"));
    }
    text_codec_close(&codec);
    json_decref(tokenizer);
    json_decref(root);
    for (int i = 0; given == NULL && i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s.json", directory, i == 0 ? "chat" : "tokenizer");
        assert_int_equal(remove(path), 0);
    }
    assert_true(given != NULL || rmdir(directory) == 0);
}

// What a chat.json may leave out, or say without asking for it.
static void test_chat_without_extras(void **state) {
    (void)state;
    static const char *const extras[] = {
        "", ", \"trim\": false, \"thought\": null, \"system\": null",
        ", \"trim\": true, \"thought\": \"T\", \"system\": [\"x\", \"y\", \"z\"]"};
    char directory[] = "/tmp/chat.XXXXXX", path[64];
    Tokenizer tokenizer;
    Error error;
    assert_non_null(mkdtemp(directory));
    assert_true(tokenizer_open(&tokenizer, "test/reference", &error));
    for (int i = -1; i < 3; i++) { // -1: there is no chat.json
        Chat chat;
        snprintf(path, sizeof path, "%s/chat.json", directory);
        FILE *file = i < 0 ? NULL : fopen(path, "w");
        if (file != NULL) {
            fprintf(file, "{\"first\": [\"a\", \"b\"], \"next\": [\"c\", \"d\"], \"end\": \"<|end|>\"%s}",
                    extras[i]);
            fclose(file);
        }
        if (!chat_open(&chat, directory, &tokenizer, &error)) { fail_msg("%s", error.text); }
        assert_int_equal(chat.root != NULL, i >= 0);
        assert_int_equal(chat.end, i < 0 ? 0 : 400);
        assert_true(chat.trims == (i == 2) && (chat.thought != NULL) == (i == 2));
        assert_int_equal(chat.system[0] != NULL, i == 2);
        json_decref(chat.root);
    }
    unlink(path);
    rmdir(directory);
    tokenizer_close(&tokenizer);
}

// What is typed goes on with the text. Where the model has ended that, another text begins, with
// the token in front of texts: here 400, and 0 ends them. One that does both stands there already.
static void test_goes_on(void **state) {
    (void)state;
    static const struct {
        int32_t begin, last; // of the text before: -1, there is none
        const char *typed;
        size_t count;
        int32_t tokens[2]; // the first; those of `typed` follow
    } cases[] = {
        {400, -1, "a", 1, {400}}, {400, 7, "a", 1, {7}},        {400, 0, "a", 2, {0, 400}},
        {400, 0, "", 1, {0}},     {0, 0, "a", 1, {0}},          {-1, 0, "a", 1, {0}},
        {-1, -1, "a", 0, {0}},    {400, 0, "<|end|>a", 1, {0}},
    };
    int32_t text[8] = {0};
    Options options = {.system = ""};
    Sample sample = {.options = &options};
    Error error;
    assert_true(text_codec_open(&sample.codec, "test/reference/tokenizer.json", false, 1 << 20, &error));
    token_list_add(&sample.ends, 0);
    sample.sampler.text = text;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        TokenList tokens = {NULL, 0, 0}, typed = {NULL, 0, 0};
        int from, thought[2] = {0, 0};
        sample.codec.tokenizer.begin = cases[i].begin;
        sample.last = cases[i].last;
        sample.sampler.length = cases[i].last < 0 ? 0 : 3;
        assert_true(sample_encode(&sample, cases[i].typed, &from, thought, &tokens, &error));
        assert_true(tokenizer_encode(&sample.codec.tokenizer, cases[i].typed, strlen(cases[i].typed), true,
                                     &typed, &error));
        assert_int_equal(from, sample.sampler.length);
        assert_int_equal(tokens.count, cases[i].count + typed.count);
        for (size_t k = 0; k < tokens.count; k++) {
            assert_int_equal(tokens.ids[k],
                             k < cases[i].count ? cases[i].tokens[k] : typed.ids[k - cases[i].count]);
        }
        token_list_free(&tokens);
        token_list_free(&typed);
    }
    token_list_free(&sample.ends);
    text_codec_close(&sample.codec);
}

// What ends a text is a number or a list of them, in either file; what is no number ends none.
static void test_ends(void **state) {
    (void)state;
    static const int32_t wanted[] = {7, 9, 5};
    char directory[] = "/tmp/ends.XXXXXX", path[PATH_MAX];
    TokenList ends = {NULL, 0, 0};
    assert_non_null(mkdtemp(directory));
    json_t *list = json_pack("{s:[i, s, i, n]}", "eos_token_id", 7, "8", 9),
           *one = json_pack("{s:i}", "eos_token_id", 5);
    dump(list, directory, "generation_config.json");
    dump(one, directory, "config.json");
    sample_find_ends(directory, &ends);
    assert_int_equal(ends.count, 3);
    assert_memory_equal(ends.ids, wanted, sizeof wanted);
    token_list_free(&ends);
    json_decref(list);
    json_decref(one);
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s.json", directory, i == 0 ? "config" : "generation_config");
        assert_int_equal(remove(path), 0);
    }
    assert_int_equal(rmdir(directory), 0);
}

// The blanks are those of Python, whose strip() is a template's trim: also U+3000, as in Japanese.
static void test_trim(void **state) {
    (void)state;
    static const char *const said[][2] = {
        {" \t a b\r\n", "a b"},
        {"\xE3\x80\x80\xC2\x85 a\xC2\xA0"
         "b\x1F\xE3\x80\x80",
         "a\xC2\xA0"
         "b"},
        {"\xE2\x80\x8A\xC3\xA0\xE2\x80\x8B", "\xC3\xA0\xE2\x80\x8B"}, // U+200B is none
        {"\xE1\x9A\x80 \xE2\x80\xA8", ""},
        {"\xA0 x \xA0", "\xA0 x \xA0"},
        {"", ""},
    };
    Chat chat = {.first = {"<", ">"}, .trims = true};
    for (size_t i = 0; i < sizeof said / sizeof said[0]; i++) {
        char wanted[64], *text = chat_text(&chat, "", false, said[i][0]);
        snprintf(wanted, sizeof wanted, "<%s>", said[i][1]);
        assert_string_equal(text, wanted);
        free(text);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_steps_equal_forward),
        cmocka_unit_test(test_generate),
        cmocka_unit_test(test_choose),
        cmocka_unit_test(test_largest),
        cmocka_unit_test(test_conversations),
        cmocka_unit_test(test_chat_without_extras),
        cmocka_unit_test(test_goes_on),
        cmocka_unit_test(test_ends),
        cmocka_unit_test(test_trim),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
