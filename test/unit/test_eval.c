// test_eval.c: perplexity, LAMBADA and HellaSwag are what plain code computes from the
// logits of one sequence at a time; texts are prepared as the harness prepares them; any
// number of ranks gives the same bits; whatever is wrong with a line is said with the
// line's number.
#include "test/harness.h"

#include "evaluation/eval.h"
#include "test/model_loss.h"
#include "test/threads_link.h"

enum { POSITIONS = 40, BYTES = 256, MOST_SEQUENCES = 512 };

static char scratch[] = "/tmp/test_evaluate.XXXXXX"; // a file

static const char *write_file(const void *bytes, size_t count) {
    FILE *file = fopen(scratch, "wb");
    if (file == NULL || fwrite(bytes, 1, count, file) != count || fclose(file) != 0) {
        fail_msg("cannot write %s", scratch);
    }
    return scratch;
}

static const char *write_text(const char *text) { return write_file(text, strlen(text)); }

// ---- A model, and plain code that scores with it --------------------------------------

typedef struct Fixture {
    ModelConfig config;
    ParameterTable table;
    float *parameters;
    Arena arena;
    Model plain; // one sequence of POSITIONS
    Stream stream;
} Fixture;

static void fixture_open(Fixture *fixture, int vocabulary) {
    Error error;
    memset(fixture, 0, sizeof *fixture);
    assert_true(model_find("tiny", &fixture->config, &error));
    fixture->config.layers = 2, fixture->config.channels = 32, fixture->config.mlp_channels = 128;
    fixture->config.positions = POSITIONS;
    fixture->config.window = 5;
    fixture->config.vocabulary = vocabulary;
    parameter_table_make(&fixture->config, &fixture->table);
    arena_reserve(&fixture->arena, MEMORY_PARAMETERS, "parameters",
                  fixture->table.parameter_count * sizeof(float), &fixture->parameters);
    ModelSettings settings = model_on_cpu(1, POSITIONS, 1);
    model_reserve(&fixture->plain, &fixture->arena, &fixture->config, &settings);
    assert_true(arena_commit(&fixture->arena, &error));
    fixture->stream.pool = thread_pool_create(1, true);
    parameters_initialize(&fixture->table, 3, fixture->stream.pool, fixture->parameters);
    // Larger matrices than at the start of training, so that the context matters.
    for (int t = 0; t < fixture->table.count; t++) {
        const ParameterInfo *entry = &fixture->table.entries[t];
        for (size_t i = entry->offset; i < entry->offset + entry->count && entry->is_matrix; i++) {
            fixture->parameters[i] *= 8.0f;
        }
    }
}

static void fixture_close(Fixture *fixture) {
    thread_pool_destroy(fixture->stream.pool);
    arena_release(&fixture->arena);
    parameter_table_free(&fixture->table);
}

// Log-likelihood of tokens [first, count), each given those before it, from the logits of
// the whole sequence. *greedy: whether each is the most probable. *next: the most
// probable token after the last.
static double plain_score(Fixture *fixture, const int32_t *tokens, int count, int first, bool *greedy,
                          int32_t *next) {
    int32_t inputs[POSITIONS] = {0};
    int V = fixture->config.vocabulary;
    float *logits = (float *)malloc((size_t)POSITIONS * (size_t)V * sizeof(float));
    double sum = 0;
    memcpy(inputs, tokens, (size_t)(count < POSITIONS ? count : POSITIONS) * sizeof *tokens);
    model_forward(&fixture->plain, &fixture->stream, fixture->parameters, inputs, NULL);
    matmul_forward(&fixture->stream, as_reals(logits), V, head_input(&fixture->plain),
                   as_reals(fixture->parameters), POSITIONS, fixture->config.channels, V);
    *greedy = true;
    for (int t = first; t < count; t++) {
        const float *row = logits + (t - 1) * V;
        double total = 0;
        for (int v = 0; v < V; v++) {
            total += exp((double)row[v]);
            if (row[v] > row[tokens[t]]) { *greedy = false; }
        }
        sum += (double)row[tokens[t]] - log(total);
    }
    *next =
        count <= POSITIONS ? logits_largest(as_reals_const(logits + (count - 1) * V), V, PRECISION_FP32) : -1;
    free(logits);
    return sum;
}

// The same for a context and its continuation, as bytes.
static double plain_bytes(Fixture *fixture, const char *context, const char *continuation, bool *greedy) {
    int32_t tokens[256], next;
    int given = (int)strlen(context), count = 0;
    for (int i = 0; i < given; i++) { tokens[count++] = (uint8_t)context[i]; }
    for (int i = 0; continuation[i] != '\0'; i++) { tokens[count++] = (uint8_t)continuation[i]; }
    int cut = count > POSITIONS + 1 ? count - POSITIONS - 1 : 0;
    return plain_score(fixture, tokens + cut, count - cut, given - cut, greedy, &next);
}

// ---- The module under test ------------------------------------------------------------

static EvaluateRequest make_request(const Fixture *fixture, EvaluateTask task, const char *path,
                                    const Tokenizer *tokenizer) {
    EvaluateRequest request = {task, path, tokenizer, fixture->config.vocabulary, 3, POSITIONS, 0, 0, false};
    return request;
}

typedef struct Evaluated {
    EvaluateSet set;
    EvaluateScore scores[MOST_SEQUENCES];
    EvaluateSummary summary;
} Evaluated;

// What each rank does.
static bool evaluate_as(Fixture *fixture, const EvaluateSet *set, Transport *transport,
                        EvaluateScore *scores) {
    Evaluator evaluator;
    Arena arena;
    Stream stream;
    Error error;
    memset(&arena, 0, sizeof arena);
    memset(&stream, 0, sizeof stream);
    ModelSettings settings = model_on_cpu(1, 1, 1);
    evaluator_reserve(&evaluator, &arena, &fixture->config, &settings, &set->request);
    if (!arena_commit(&arena, &error) || set->count > MOST_SEQUENCES) { return false; }
    stream.pool = thread_pool_create(1, true);
    EvaluateScore *all = evaluate_run(&evaluator, &stream, fixture->parameters, set, transport, NULL);
    memcpy(scores, all, set->count * sizeof *all);
    free(all);
    thread_pool_destroy(stream.pool);
    arena_release(&arena);
    return true;
}

static void evaluate_alone(Fixture *fixture, const EvaluateRequest *request, Evaluated *result) {
    Error error = {""};
    Transport transport;
    if (!evaluate_set_open(&result->set, request, &error)) { fail_msg("%s", error.text); }
    transport_open_alone(&transport, "a test");
    assert_true(evaluate_as(fixture, &result->set, &transport, result->scores));
    transport_close(&transport);
    if (!evaluate_summarise(&result->set, result->scores, &result->summary, &error)) {
        fail_msg("%s", error.text);
    }
}

// ---- Perplexity -----------------------------------------------------------------------

// Scores each window with model_loss on one sequence, and marks every token that has
// been counted.
static double plain_perplexity(Fixture *fixture, const int32_t *tokens, const bool *masked, int count, int T,
                               int stride, int *counted) {
    bool *seen = (bool *)calloc((size_t)count, sizeof *seen);
    double nats = 0;
    *counted = 0;
    for (int begin = 0; begin < count; begin += stride) {
        int32_t inputs[POSITIONS] = {0}, targets[POSITIONS];
        int here = 0;
        for (int t = 0; t < POSITIONS; t++) {
            int next = begin + t + 1;
            bool inside = next < count && t + 1 < T;
            inputs[t] = begin + t < count && t < T ? tokens[begin + t] : 0;
            targets[t] = inside && !seen[next] && (masked == NULL || !masked[next]) ? tokens[next] : -1;
            here += targets[t] >= 0;
        }
        for (int t = 0; t < T && begin + t < count; t++) { seen[begin + t] = true; }
        nats += here *
                (double)model_loss(&fixture->plain, &fixture->stream, fixture->parameters, inputs, targets);
        *counted += here;
    }
    free(seen);
    return nats;
}

static void perplexity_is_that_of_a_plain_loop_over_windows(void **state) {
    (void)state;
    Fixture fixture;
    uint8_t text[211];
    int32_t tokens[211];
    static const int cases[][2] = {{17, 0},  {17, 1},         {17, 5},
                                   {17, 16}, {17, 17},        {2, 1},
                                   {2, 2},   {POSITIONS, 21}, {POSITIONS, POSITIONS}};
    fixture_open(&fixture, BYTES);
    Random random = {5};
    for (int i = 0; i < 211; i++) { tokens[i] = text[i] = (uint8_t)(1 + random_uniform(&random) * 127); }
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        for (int count = 211; count > 207; count--) {
            EvaluateRequest request =
                make_request(&fixture, EVALUATE_PERPLEXITY, write_file(text, (size_t)count), NULL);
            Evaluated result;
            int counted, T = cases[k][0], stride = cases[k][1] > 0 ? cases[k][1] : T / 2;
            request.T = T;
            request.stride = cases[k][1];
            evaluate_alone(&fixture, &request, &result);
            double nats = plain_perplexity(&fixture, tokens, NULL, count, T, stride, &counted);
            assert_int_equal(result.summary.counted, counted);
            if (stride < T) { assert_int_equal(counted, count - 1); }
            assert_close(result.summary.nats, nats / counted, 1e-6 * nats / counted, "nats");
            assert_close(result.summary.perplexity, exp(nats / counted), 1e-5 * exp(nats / counted),
                         "perplexity");
            assert_close(result.summary.bits_per_byte, nats / counted / log(2.0), 1e-5, "bits per byte");
            evaluate_set_close(&result.set);
        }
    }
    fixture_close(&fixture);
}

static void perplexity_leaves_out_masked_tokens(void **state) {
    (void)state;
    Fixture fixture;
    Tokenizer tokenizer;
    TokenFile file;
    Error error;
    Evaluated result;
    uint8_t data[1024];
    if (!tokenizer_open(&tokenizer, "test/reference/tokenizer.json", &error)) { fail_msg("%s", error.text); }
    FILE *source = fopen("test/reference/masked_shard.bin", "rb");
    assert_non_null(source);
    size_t size = fread(data, 1, sizeof data, source);
    fclose(source);
    if (!token_file_open(&file, "masked_shard.bin", data, size, TOKEN_FILE_CHECK_ALL, &error)) {
        fail_msg("%s", error.text);
    }
    fixture_open(&fixture, (int)file.vocabulary);
    int count = (int)file.token_count, counted;
    int32_t *tokens = (int32_t *)calloc((size_t)count, sizeof *tokens);
    bool *masked = (bool *)calloc((size_t)count, sizeof *masked);
    size_t bytes = 0, length = 0;
    for (int i = 0; i < count; i++) {
        tokens[i] = (int32_t)token_file_token(&file, (uint64_t)i);
        masked[i] = !token_mask_counts(file.mask, (uint64_t)i);
        tokenizer_bytes(&tokenizer, tokens[i], &length);
        bool has_text = !tokenizer.is_special[tokens[i]];
        bytes += i > 0 && !masked[i] && has_text ? length : 0;
    }
    EvaluateRequest request =
        make_request(&fixture, EVALUATE_PERPLEXITY, "test/reference/masked_shard.bin", &tokenizer);
    request.T = 12;
    evaluate_alone(&fixture, &request, &result);
    double nats = plain_perplexity(&fixture, tokens, masked, count, 12, 6, &counted);
    assert_true(counted > 0 && counted < count - 1);
    assert_int_equal(result.summary.counted, counted);
    assert_close(result.summary.nats, nats / counted, 1e-6 * nats / counted, "nats");
    assert_close(result.summary.bits_per_byte, nats / log(2.0) / (double)bytes, 1e-5, "bits per byte");
    evaluate_set_close(&result.set);
    request.tokenizer = NULL;
    evaluate_alone(&fixture, &request, &result);
    assert_true(isnan(result.summary.bits_per_byte));
    evaluate_set_close(&result.set);
    request.tokenizer = &tokenizer;
    tokenizer.sum ^= 1;
    assert_false(evaluate_set_open(&result.set, &request, &error));
    assert_non_null(strstr(error.text, "another tokenizer"));
    free(tokens);
    free(masked);
    tokenizer_close(&tokenizer);
    fixture_close(&fixture);
}

// A text is its documents, each between the tokens that stand in front of a text and behind it, as
// in training. One token that does both stands between them once.
static void perplexity_has_the_documents_of_training(void **state) {
    (void)state;
    static const char text[] = "the mill\n<|endoftext|>\nit's a fox\n<|endoftext|>\n<|endoftext|>\n<|end|>\n"
                               "<|endoftext|>\nthe fox";
    static const char *const documents[] = {"the mill", "it's a fox", "<|end|>", "the fox"};
    static const int32_t fronts[] = {-1, 400, 0};
    Fixture fixture;
    Tokenizer tokenizer;
    Error error;
    Evaluated result;
    if (!tokenizer_open(&tokenizer, "test/reference/tokenizer.json", &error)) { fail_msg("%s", error.text); }
    assert_int_equal(tokenizer.end, 0);
    fixture_open(&fixture, tokenizer.vocabulary);
    for (size_t k = 0; k < sizeof fronts / sizeof fronts[0]; k++) {
        TokenList expected = {NULL, 0, 0};
        tokenizer.begin = fronts[k];
        for (size_t i = 0; i < sizeof documents / sizeof documents[0]; i++) {
            if (fronts[k] == 400 && i == 2) { continue; } // the token in front, and nothing behind it
            if (fronts[k] == 400) { token_list_add(&expected, 400); }
            assert_true(
                tokenizer_encode(&tokenizer, documents[i], strlen(documents[i]), false, &expected, &error));
            token_list_add(&expected, 0);
        }
        EvaluateRequest request = make_request(&fixture, EVALUATE_PERPLEXITY,
                                               write_file((const uint8_t *)text, strlen(text)), &tokenizer);
        int counted, count = (int)expected.count;
        request.T = 12;
        evaluate_alone(&fixture, &request, &result);
        double nats = plain_perplexity(&fixture, expected.ids, NULL, count, 12, 6, &counted);
        assert_int_equal(result.summary.counted, counted);
        assert_close(result.summary.nats, nats / counted, 1e-6 * nats / counted, "nats");
        evaluate_set_close(&result.set);
        token_list_free(&expected);
    }
    // A document that is read in parts begins once.
    size_t long_size = TEXT_DOCUMENT_BYTES + 1000, begins = 0;
    char *long_text = (char *)malloc(long_size);
    for (size_t i = 0; i < long_size; i++) { long_text[i] = "the mill "[i % 9]; }
    tokenizer.begin = 400;
    EvaluateRequest request = make_request(&fixture, EVALUATE_PERPLEXITY,
                                           write_file((const uint8_t *)long_text, long_size), &tokenizer);
    EvaluateSet set;
    assert_true(evaluate_set_open(&set, &request, &error));
    for (size_t i = 0; i < set.text.count; i++) { begins += set.text.ids[i] == 400; }
    assert_int_equal(begins, 1);
    evaluate_set_close(&set);
    free(long_text);
    tokenizer_close(&tokenizer);
    fixture_close(&fixture);
}

// ---- LAMBADA --------------------------------------------------------------------------

// Makes small letters and spaces likely, and all other bytes unlikely.
static void speak_in_letters(Fixture *fixture) {
    size_t C = (size_t)fixture->config.channels;
    for (int v = 0; v < BYTES; v++) {
        float scale = v == ' ' ? 2.0f : v >= 'a' && v <= 'z' ? 1.0f : 0.01f;
        for (size_t c = 0; c < C; c++) { fixture->parameters[(size_t)v * C + c] *= scale; }
    }
}

// A text whose last word, one letter, is what the model itself would write.
static bool find_greedy(Fixture *fixture, Random *random, char *text) {
    int32_t tokens[16], next;
    bool greedy;
    for (int i = 0; i < 12; i++) { tokens[i] = 'a' + (int32_t)(random_uniform(random) * 26); }
    for (int i = 12; i < 14; i++) {
        plain_score(fixture, tokens, i, i, &greedy, &next);
        tokens[i] = next;
    }
    for (int i = 0; i < 14; i++) { text[i] = (char)tokens[i]; }
    text[14] = '\0';
    return tokens[12] == ' ' && tokens[13] >= 'a' && tokens[13] <= 'z';
}

// escaped: the text of a line, as in JSON. It must be divided into context and
// continuation.
typedef struct Pair {
    const char *escaped, *context, *continuation;
} Pair;

static const Pair pairs[] = {
    {"the fox", "the", " fox"},
    {"the red fox.", "the red", " fox."},
    {"a\\n\\n b", "a", "\n\n b"},
    {"a  b", "a", "  b"},
    {"a ", "a", " "},
    {"x\\u00a0\\u3000 y\\ty", "x", "\xC2\xA0\xE3\x80\x80 y\ty"},
    {"alone", "\n", " alone"},
    {" second", "\n", " second"},
    {"na\\u00efve Fl\\u00fc\\u00dfe", "na\xC3\xAFve",
     " Fl\xC3\xBC\xC3\x9F"
     "e"},
    {"this is much more than the model can see at once, so that it begins late enough", // cut on the left
     "this is much more than the model can see at once, so that it begins late", " enough"},
    {"fits in the fourty-one tokens it can hold", "fits in the fourty-one tokens it can", " hold"},
};

static void lambada_is_that_of_plain_code(void **state) {
    (void)state;
    enum { PAIRS = sizeof pairs / sizeof pairs[0], GREEDY = 4 };
    Fixture fixture;
    Evaluated result;
    char text[8192] = "", words[GREEDY][16];
    Random random = {7};
    fixture_open(&fixture, BYTES);
    speak_in_letters(&fixture);
    for (int i = 0; i < PAIRS; i++) {
        sprintf(text + strlen(text), "{\"text\": \"%s\", \"more\": [1]}\n%s", pairs[i].escaped,
                i % 2 ? "\r\n" : "");
    }
    for (int i = 0; i < GREEDY; i++) {
        int tries = 0;
        while (!find_greedy(&fixture, &random, words[i])) { assert_true(tries++ < 1000); }
        sprintf(text + strlen(text), "{\"text\": \"%s\"}%s", words[i], i + 1 < GREEDY ? "\n" : "");
    }
    EvaluateRequest request = make_request(&fixture, EVALUATE_LAMBADA, write_text(text), NULL);
    evaluate_alone(&fixture, &request, &result);
    assert_int_equal(result.set.count, PAIRS + GREEDY);
    double sum = 0;
    int right = 0;
    for (int i = 0; i < PAIRS + GREEDY; i++) {
        char context[16] = "";
        bool greedy;
        if (i >= PAIRS) { memcpy(context, words[i - PAIRS], 12); }
        double expected = i < PAIRS ? plain_bytes(&fixture, pairs[i].context, pairs[i].continuation, &greedy)
                                    : plain_bytes(&fixture, context, words[i - PAIRS] + 12, &greedy);
        assert_close(result.scores[i].log_likelihood, expected, 1e-5 * fabs(expected),
                     i < PAIRS ? pairs[i].escaped : words[i - PAIRS]);
        assert_int_equal(result.scores[i].greedy, greedy);
        sum += expected;
        right += greedy;
    }
    assert_true(right >= GREEDY && right < PAIRS);
    assert_close(result.summary.perplexity, exp(-sum / (PAIRS + GREEDY)), 1e-4 * exp(-sum / (PAIRS + GREEDY)),
                 "perplexity");
    assert_close(result.summary.accuracy, (double)right / (PAIRS + GREEDY), 1e-12, "acc");
    evaluate_set_close(&result.set);
    request.limit = 3;
    evaluate_alone(&fixture, &request, &result);
    assert_int_equal(result.summary.items, 3);
    evaluate_set_close(&result.set);
    fixture_close(&fixture);
}

// Where a merge crosses the border between context and continuation, the harness predicts
// the tokens beyond as many as the context has by itself.
static void pairs_have_the_tokens_of_the_whole(void **state) {
    (void)state;
    Fixture fixture;
    Tokenizer tokenizer;
    Error error;
    EvaluateSet set;
    if (!tokenizer_open(&tokenizer, "test/reference/tokenizer.json", &error)) { fail_msg("%s", error.text); }
    fixture_open(&fixture, tokenizer.vocabulary);
    const char *path = write_text("{\"text\": \"the river was quiet and the mill\"}\n"
                                  "{\"text\": \"the mill \\n stood\"}\n{\"text\": \"fox\"}\n"
                                  "{\"text\": \"<|endoftext|>the fox\"}\n");
    static const char *const wholes[4] = {"the river was quiet and the mill", "the mill \n stood", " fox",
                                          "<|endoftext|>the fox"};
    static const char *const contexts[4] = {"the river was quiet and the", "the mill", "",
                                            "<|endoftext|>the"};
    EvaluateRequest request = make_request(&fixture, EVALUATE_LAMBADA, path, &tokenizer);
    if (!evaluate_set_open(&set, &request, &error)) { fail_msg("%s", error.text); }
    assert_int_equal(set.count, 4);
    for (int i = 0; i < 4; i++) {
        TokenList whole = {NULL, 0, 0}, context = {NULL, 0, 0};
        const EvaluateSequence *sequence = &set.sequences[i];
        if (i == 2) { token_list_add(&whole, tokenizer_find_added(&tokenizer, "<|endoftext|>")); }
        assert_true(tokenizer_encode(&tokenizer, wholes[i], strlen(wholes[i]), true, &whole, &error));
        assert_true(tokenizer_encode(&tokenizer, contexts[i], strlen(contexts[i]), true, &context, &error));
        assert_int_equal(sequence->length, whole.count);
        assert_int_equal(sequence->scored, whole.count - (i == 2 ? 1 : context.count));
        assert_memory_equal(set.text.ids + sequence->begin, whole.ids, whole.count * sizeof *whole.ids);
        token_list_free(&whole);
        token_list_free(&context);
    }
    EvaluateSequence plain[4];
    memcpy(plain, set.sequences, sizeof plain);
    evaluate_set_close(&set);
    // A token in front of a text is given, not predicted; it stands for a context that is missing.
    tokenizer.begin = tokenizer_find_added(&tokenizer, "<|end|>");
    if (!evaluate_set_open(&set, &request, &error)) { fail_msg("%s", error.text); }
    for (int i = 0; i < 4; i++) {
        assert_int_equal(set.text.ids[set.sequences[i].begin], tokenizer.begin);
        assert_int_equal(set.sequences[i].length, plain[i].length + (i == 2 ? 0 : 1));
        assert_int_equal(set.sequences[i].scored, plain[i].scored);
    }
    evaluate_set_close(&set);
    tokenizer_close(&tokenizer);
    fixture_close(&fixture);
}

// ---- HellaSwag ------------------------------------------------------------------------

static void texts_are_cleaned_as_the_harness_does(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"plain", "plain"},
        {"", ""},
        {" \n\t\xC2\xA0 both ends\xE3\x80\x80\x1C ", "both ends"},
        {"How to [title] do it [title]", "How to.  do it. "}, // stripped first, cleaned then
        {"a [header] b", "a b"},
        {"[a][b]c[[d]]e", "c]e"},
        {"a [open b", "a [open b"},
        {"a [two\nlines] b [one]", "a [two\nlines] b "},
        {"a [two\n[in] b", "a [two\n b"},
        {"a    b   c  d", "a  b  c d"},
        {"[gone]", ""},
        {"x [title][title]", "x. "},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char *text = strdup(cases[i][0]);
        evaluate_clean(&text);
        const char *expected = i == 3 ? "How to. do it. " : cases[i][1]; // two spaces became one
        if (strcmp(text, expected) != 0) {
            fail_msg("'%s' gives '%s', expected '%s'", cases[i][0], text, expected);
        }
        free(text);
    }
    static const char *const capitals[][2] = {
        {"", ""},
        {"he Runs FAST", "He runs fast"},
        {"\xC3\x89"
         "COLE \xC3\x89"
         "cole",
         "\xC3\x89"
         "cole \xC3\xA9"
         "cole"},
        {"\xC3\xA9T\n\xC3\x89", "\xC3\x89t\n\xC3\xA9"},
        {"1A", "1a"},
        {" Ab", " ab"},
        {"\xE7\x8B\x90 A", "\xE7\x8B\x90 a"},
    };
    for (size_t i = 0; i < sizeof capitals / sizeof capitals[0]; i++) {
        char *text = strdup(capitals[i][0]);
        evaluate_capitalise(&text);
        if (strcmp(text, capitals[i][1]) != 0) { fail_msg("'%s' gives '%s'", capitals[i][0], text); }
        free(text);
    }
}

typedef struct Question {
    const char *line;    // JSON, without the label
    const char *context; // expected
    const char *endings[3];
    int characters[3];
} Question;

static const Question questions[] = {
    {"\"activity_label\": \"Milling\", \"ctx_a\": \"[header] How to mill [title] Go.\", \"ctx_b\": \"THE "
     "miller\", \"ctx\": \"unused\", "
     "\"endings\": [\"sleeps.\", \"goes [substeps] home to his red fox.\", \"\\u00fcbt  \\u72d0 \"]",
     "Milling: How to mill. Go. The miller",
     {" sleeps.", " goes home to his red fox.",
      " \xC3\xBC"
      "bt \xE7\x8B\x90"},
     {7, 25, 5}},
    {"\"activity_label\": \"A\", \"ctx_a\": \"b\", \"ctx_b\": \"[c]\", \"endings\": [\"it is a long one\", "
     "\"c\", \"dd\"]",
     "A: b",
     {"  it is a long one", "  c", "  dd"}, // the context's space belongs to them
     {16, 1, 2}},
    {"\"activity_label\": \"As\", \"ctx_a\": \"it\", \"ctx_b\": \"is here\", "
     "\"endings\": [\" one\", \"two  [x]\", \"3\"]",
     "As: it Is here",
     {" one", " two ", " 3"},
     {3, 4, 1}},
    {"\"ctx\": \"As it [is]  here\", \"endings\": [\" one\", \"two  [x]\", \"3\"]",
     "As it [is]  here",
     {"  one", " two  [x]", " 3"},
     {4, 8, 1}},
};

enum { QUESTIONS = sizeof questions / sizeof questions[0] };

static int best_of(const double *values) {
    int best = values[1] > values[0] ? 1 : 0;
    return values[2] > values[best] ? 2 : best;
}

static void the_first_of_equal_endings_is_the_best(void **state) {
    (void)state;
    const EvaluateSequence lines[3] = {{.characters = 3, .choices = 3}, {.characters = 6}, {.characters = 6}};
    const EvaluateScore scores[3] = {{.log_likelihood = -4}, {.log_likelihood = -3}, {.log_likelihood = -3}};
    assert_int_equal(evaluate_best(lines, scores, false), 1);
    assert_int_equal(evaluate_best(lines, scores, true), 1);
}

static void hellaswag_is_that_of_plain_code(void **state) {
    (void)state;
    Fixture fixture;
    Evaluated result;
    double values[QUESTIONS][3], norms[QUESTIONS][3];
    char text[8192] = "";
    int right = 0, right_norm = 0, lines = 0, differing = 0;
    fixture_open(&fixture, BYTES);
    speak_in_letters(&fixture);
    for (int q = 0; q < QUESTIONS; q++) {
        bool greedy;
        for (int e = 0; e < 3; e++) {
            values[q][e] = plain_bytes(&fixture, questions[q].context, questions[q].endings[e], &greedy);
            norms[q][e] = values[q][e] / questions[q].characters[e];
        }
        int best = best_of(values[q]), best_norm = best_of(norms[q]);
        differing += best != best_norm;
        // Each question with each label, as a number or as a string.
        for (int label = 0; label < 3; label++, lines++) {
            const char *quote = label == 1 ? "\"" : "";
            sprintf(text + strlen(text), "{%s, \"label\": %s%d%s}\n", questions[q].line, quote, label, quote);
            right += label == best && (q > 0 || label != 1);
            right_norm += label == best_norm && (q > 0 || label != 1);
        }
    }
    assert_true(differing > 0);
    // One line is removed: with all labels of every question, the accuracy would be a
    // third for any model.
    char *second = strchr(text, '\n') + 1, *third = strchr(second, '\n') + 1;
    memmove(second, third, strlen(third) + 1);
    EvaluateRequest request = make_request(&fixture, EVALUATE_HELLASWAG, write_text(text), NULL);
    evaluate_alone(&fixture, &request, &result);
    assert_int_equal(result.summary.items, lines - 1);
    for (size_t i = 0; i < result.set.count; i++) {
        size_t q = i < 6 ? 0 : (i + 3) / 9, e = i % 3;
        assert_int_equal(result.set.sequences[i].characters, questions[q].characters[e]);
        assert_close(result.scores[i].log_likelihood, values[q][e], 1e-5 * fabs(values[q][e]),
                     questions[q].endings[e]);
    }
    assert_close(result.summary.accuracy, (double)right / (lines - 1), 1e-12, "acc");
    assert_close(result.summary.accuracy_norm, (double)right_norm / (lines - 1), 1e-12, "acc_norm");
    evaluate_set_close(&result.set);
    fixture_close(&fixture);
}

// ---- Ranks ----------------------------------------------------------------------------

typedef struct RanksRun {
    Fixture *fixture;
    const EvaluateSet *set;
    EvaluateScore scores[3][MOST_SEQUENCES];
    bool good[3];
} RanksRun;

static void rank_main(Transport *transport, void *context) {
    RanksRun *run = (RanksRun *)context;
    run->good[transport->rank] = evaluate_as(run->fixture, run->set, transport, run->scores[transport->rank]);
}

static void any_number_of_ranks_gives_the_same_bits(void **state) {
    (void)state;
    Fixture fixture;
    Evaluated alone;
    static RanksRun run;
    char text[16384] = "";
    fixture_open(&fixture, BYTES);
    for (int i = 0; i < 44; i++) {
        sprintf(text + strlen(text), "{\"text\": \"%.*s word%d\"}\n", 1 + i * 5 % 31,
                "the fox who lived near a river and a mill", i);
    }
    for (int task = 0; task < 2; task++) {
        EvaluateRequest request = make_request(&fixture, task == 0 ? EVALUATE_PERPLEXITY : EVALUATE_LAMBADA,
                                               write_text(task == 0 ? text + 1 : text), NULL);
        request.B = 2;
        evaluate_alone(&fixture, &request, &alone);
        // In the last round of 2 or of 3 ranks, some rank is idle.
        assert_true(alone.set.batch_count > 6 && alone.set.batch_count % 6 != 0);
        for (int ranks = 1; ranks <= 3; ranks++) {
            memset(&run, 0, sizeof run);
            run.fixture = &fixture;
            run.set = &alone.set;
            threads_run(ranks, rank_main, &run);
            for (int rank = 0; rank < ranks; rank++) {
                assert_true(run.good[rank]);
                assert_memory_equal(run.scores[rank], alone.scores, alone.set.count * sizeof(EvaluateScore));
            }
        }
        evaluate_set_close(&alone.set);
    }
    fixture_close(&fixture);
}

// Rank 1 has the same number of windows of the same lengths, and one of them elsewhere.
static void other_data_main(Transport *transport, void *context) {
    RanksRun *run = (RanksRun *)context;
    EvaluateSet set = *run->set;
    EvaluateSequence *own = (EvaluateSequence *)calloc(set.count, sizeof *own);
    memcpy(own, set.sequences, set.count * sizeof *own);
    own[set.count - 1].begin += (uint64_t)transport->rank;
    set.sequences = own;
    evaluate_as(run->fixture, &set, transport, run->scores[transport->rank]);
}

static void run_with_other_data(const void *context) { threads_run(2, other_data_main, (void *)context); }

static void ranks_that_have_other_data_do_not_score(void **state) {
    (void)state;
    Fixture fixture;
    static RanksRun run;
    static EvaluateSet set;
    Error error = {""};
    char message[1024];
    fixture_open(&fixture, BYTES);
    EvaluateRequest request = make_request(
        &fixture, EVALUATE_LAMBADA,
        write_text("{\"text\": \"the fox\"}\n{\"text\": \"the mill\"}\n{\"text\": \"a river\"}"), NULL);
    if (!evaluate_set_open(&set, &request, &error)) { fail_msg("%s", error.text); }
    run.fixture = &fixture;
    run.set = &set;
    int status = run_in_child(run_with_other_data, &run, message, sizeof message);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SYSTEM_FAILURE);
    if (strstr(message, "holds other data than on rank 0") == NULL) { fail_msg("%s", message); }
    evaluate_set_close(&set);
    fixture_close(&fixture);
}

// ---- Errors ---------------------------------------------------------------------------

static void a_model_of_nan_has_no_numbers(void **state) {
    (void)state;
    Fixture fixture;
    Evaluated result;
    Error error = {""};
    fixture_open(&fixture, BYTES);
    EvaluateRequest request =
        make_request(&fixture, EVALUATE_LAMBADA, write_text("{\"text\": \"the fox\"}"), NULL);
    evaluate_alone(&fixture, &request, &result);
    result.scores[0].log_likelihood = (double)NAN;
    assert_false(evaluate_summarise(&result.set, result.scores, &result.summary, &error));
    assert_non_null(strstr(error.text, "nan"));
    result.scores[0].log_likelihood = -(double)INFINITY;
    assert_false(evaluate_summarise(&result.set, result.scores, &result.summary, &error));
    assert_non_null(strstr(error.text, "gives -inf as a log-likelihood (sequence 0 of "));
    fixture.parameters[fixture.table.entries[fixture.table.count - 2].offset] = NAN;
    Transport transport;
    transport_open_alone(&transport, "a test");
    assert_true(evaluate_as(&fixture, &result.set, &transport, result.scores));
    transport_close(&transport);
    assert_true(isnan(result.scores[0].log_likelihood) && result.scores[0].greedy == 0);
    evaluate_set_close(&result.set);
    fixture_close(&fixture);
}

// A file whose third line is wrong.
typedef struct Damage {
    EvaluateTask task;
    const char *line, *complaint;
} Damage;

#define GOOD_PAIR "{\"text\": \"a good line\"}"
#define CONTEXT "{\"activity_label\": \"x\", \"ctx_a\": \"a\", \"ctx_b\": \"b\", "
#define GOOD_QUESTION CONTEXT "\"endings\": [\"b\", \"c\"], \"label\": 1}"

static const Damage damages[] = {
    {EVALUATE_LAMBADA, "{\"text\": \"a good li", "not JSON"},
    {EVALUATE_LAMBADA, "{\"text\": \"a b\"} {}", "not JSON"},
    {EVALUATE_LAMBADA, "{\"text\": \"\xFF b\"}", "not JSON"},
    {EVALUATE_LAMBADA, "{\"text\": \"\\ud800 b\"}", "not JSON"},
    {EVALUATE_LAMBADA, "{\"text\": \"a b\", \"text\": \"a c\"}", "not JSON"},
    {EVALUATE_LAMBADA, "[\"a b\"]", "object"},
    {EVALUATE_LAMBADA, "{\"txt\": \"a b\"}", "\"text\" must"},
    {EVALUATE_LAMBADA, "{\"text\": 3}", "\"text\" must"},
    {EVALUATE_LAMBADA, "{\"text\": \"\"}", "\"text\" must"},
    {EVALUATE_LAMBADA, "{\"text\": \"\\n\\n b\"}", "only spaces"},
    {EVALUATE_LAMBADA, "{\"text\": \"a 0123456789012345678901234567890123456789\"}", "41 tokens"},
    {EVALUATE_HELLASWAG, CONTEXT "\"endings\": [\"b\"], \"label\": 0}", "\"endings\" must"},
    {EVALUATE_HELLASWAG, CONTEXT "\"endings\": \"bc\", \"label\": 0}", "\"endings\" must"},
    {EVALUATE_HELLASWAG, CONTEXT "\"endings\": [\"b\", 2], \"label\": 0}", "ending 1"},
    {EVALUATE_HELLASWAG, CONTEXT "\"endings\": [\"b\", \"c\"], \"label\": 2}", "0 to 1"},
    {EVALUATE_HELLASWAG, CONTEXT "\"endings\": [\"b\", \"c\"], \"label\": -1}", "0 to 1"},
    {EVALUATE_HELLASWAG, CONTEXT "\"endings\": [\"b\", \"c\"], \"label\": \"\"}", "0 to 1"},
    {EVALUATE_HELLASWAG, CONTEXT "\"endings\": [\"b\", \"c\"], \"label\": \"1x\"}", "0 to 1"},
    {EVALUATE_HELLASWAG, CONTEXT "\"endings\": [\"b\", \"c\"], \"label\": 18446744073709551617}", "not JSON"},
    {EVALUATE_HELLASWAG, CONTEXT "\"endings\": [\"b\", \"c\"]}", "0 to 1"},
    {EVALUATE_HELLASWAG, "{\"ctx_a\": \"a\", \"ctx_b\": \"b\", \"endings\": [\"b\", \"c\"], \"label\": 0}",
     "activity_label"},
    {EVALUATE_HELLASWAG,
     "{\"ctx_a\": \"a\", \"activity_label\": \"b\", \"endings\": [\"b\", \"c\"], \"label\": 0}", "ctx_b"},
    {EVALUATE_HELLASWAG,
     "{\"activity_label\": \"b\", \"ctx_a\": 5, \"endings\": [\"b\", \"c\"], \"label\": 0}", "\"ctx_a\""},
    {EVALUATE_HELLASWAG, "{\"endings\": [\"b\", \"c\"], \"label\": 0}", "activity_label"},
};

static void damaged_lines_are_refused_with_their_number(void **state) {
    (void)state;
    Fixture fixture;
    EvaluateSet set;
    char text[1024];
    fixture_open(&fixture, BYTES);
    for (size_t i = 0; i < sizeof damages / sizeof damages[0]; i++) {
        const Damage *damage = &damages[i];
        Error error = {""};
        snprintf(text, sizeof text, "%s\n\n%s\n",
                 damage->task == EVALUATE_LAMBADA ? GOOD_PAIR : GOOD_QUESTION, damage->line);
        EvaluateRequest request = make_request(&fixture, damage->task, write_text(text), NULL);
        if (evaluate_set_open(&set, &request, &error)) { fail_msg("'%s' is taken", damage->line); }
        if (strstr(error.text, "line 3: ") == NULL || strstr(error.text, damage->complaint) == NULL) {
            fail_msg("'%s': '%s'", damage->line, error.text);
        }
        request.limit = 1; // the damaged line is not read
        if (!evaluate_set_open(&set, &request, &error)) { fail_msg("%s", error.text); }
        evaluate_set_close(&set);
    }
    fixture_close(&fixture);
}

// The blank before the word and its eight letters are predicted: nine tokens, which is all of T.
// The mark that Windows puts in front of a text is no part of its first line.
static void a_word_may_fill_the_whole_length(void **state) {
    (void)state;
    Fixture fixture;
    EvaluateSet set;
    fixture_open(&fixture, BYTES);
    for (int T = 8; T <= 9; T++) {
        Error error = {""};
        EvaluateRequest request = make_request(&fixture, EVALUATE_LAMBADA,
                                               write_text("\xEF\xBB\xBF{\"text\": \"abcdefgh\"}\n"), NULL);
        request.T = T;
        assert_int_equal(evaluate_set_open(&set, &request, &error), T == 9);
        if (T == 8) { assert_non_null(strstr(error.text, "9 tokens are to be predicted")); }
    }
    assert_int_equal(set.sequences[0].scored, 9);
    evaluate_set_close(&set);
    fixture_close(&fixture);
}

static void expect_refusal(const EvaluateRequest *request, const char *complaint) {
    EvaluateSet set;
    Error error = {""};
    if (evaluate_set_open(&set, request, &error)) { fail_msg("taken, though: %s", complaint); }
    if (strstr(error.text, complaint) == NULL) { fail_msg("'%s' is not about '%s'", error.text, complaint); }
}

static void requests_that_cannot_be_met_are_refused(void **state) {
    (void)state;
    Fixture fixture, wide;
    Tokenizer tokenizer;
    Error error;
    fixture_open(&fixture, BYTES);
    fixture_open(&wide, BYTES + 1);
    if (!tokenizer_open(&tokenizer, "test/reference/tokenizer.json", &error)) { fail_msg("%s", error.text); }
    for (int task = 0; task < 3; task++) {
        EvaluateRequest request = make_request(&wide, (EvaluateTask)task, write_text("a b c"), NULL);
        expect_refusal(&request, "vocabulary of 257"); // and no tokenizer
        request = make_request(&fixture, (EvaluateTask)task, "/nowhere/at/all", NULL);
        expect_refusal(&request, "/nowhere/at/all");
        request = make_request(&fixture, (EvaluateTask)task, "/tmp", NULL);
        expect_refusal(&request, "/tmp");
        request = make_request(&fixture, (EvaluateTask)task, write_text(""), NULL);
        expect_refusal(&request, "empty");
    }
    EvaluateRequest request = make_request(&fixture, EVALUATE_LAMBADA, write_text("\n \r\n"), NULL);
    expect_refusal(&request, "no line");
    request = make_request(&wide, EVALUATE_LAMBADA, write_text("{\"text\": \"the river the mill<|end|>\"}"),
                           &tokenizer);
    expect_refusal(&request, "beyond the model's vocabulary");
    request = make_request(&fixture, EVALUATE_PERPLEXITY, write_text("abc"), NULL);
    request.T = 1;
    expect_refusal(&request, "at least 2");
    request.T = 10;
    request.stride = 11;
    expect_refusal(&request, "1 to 10");
    request.stride = -1;
    expect_refusal(&request, "1 to 10");
    Fixture large;
    fixture_open(&large, 406);
    request = make_request(&large, EVALUATE_PERPLEXITY, "test/reference/padded_shard.bin", &tokenizer);
    static const int windows[][2] = {{16, 0}, {16, 8}, {8, 8}, {16, 16}};
    for (int i = 0; i < 4; i++) { // every window is a document, also where no stride is given
        EvaluateSet set;
        Error why = {""};
        request.T = windows[i][0];
        request.stride = windows[i][1];
        assert_true(evaluate_set_open(&set, &request, &why) == (i == 3));
        if (i < 3) { assert_non_null(strstr(why.text, "was padded to sequences of ")); }
        if (i == 3) { evaluate_set_close(&set); }
    }
    fixture_close(&large);
    request = make_request(&wide, EVALUATE_PERPLEXITY, write_text("\n"), &tokenizer);
    expect_refusal(&request, "holds nothing to predict: it needs two tokens");
    Tokenizer endless = tokenizer;
    endless.end = -1;
    request = make_request(&wide, EVALUATE_PERPLEXITY, write_text("the river"), &endless);
    expect_refusal(&request, "the tokenizer " TOKENIZER_NO_END);
    request = make_request(&wide, EVALUATE_LAMBADA, write_text("{\"text\": \"river\"}"), &endless);
    expect_refusal(&request, "nothing precedes the text to predict, and no token ends a text");
    tokenizer_close(&tokenizer);
    fixture_close(&fixture);
    fixture_close(&wide);
}

// Good lines with some bytes changed are accepted or refused, and never crash.
static void damaged_bytes_do_not_crash(void **state) {
    (void)state;
    Fixture fixture;
    char good[4096] = "", text[4096];
    Random random = {11};
    fixture_open(&fixture, BYTES);
    for (int q = 0; q < QUESTIONS; q++) {
        sprintf(good + strlen(good), "{%s, \"label\": 1, \"text\": \"a b\"}\n", questions[q].line);
    }
    int taken = 0, refused = 0, count = (int)strlen(good);
    for (int round = 0; round < 3000; round++) {
        EvaluateSet set;
        Error error = {""};
        memcpy(text, good, sizeof text);
        for (int k = 0; k < 1 + round % 4; k++) {
            int at = (int)(random_uniform(&random) * count);
            text[at] = round % 2 ? (char)(random_uniform(&random) * 256)
                                 : good[(int)(random_uniform(&random) * count)];
        }
        int size = round % 3 == 0 ? (int)(random_uniform(&random) * count) + 1 : count;
        EvaluateTask task = round % 5 ? EVALUATE_HELLASWAG : EVALUATE_LAMBADA;
        EvaluateRequest request = make_request(&fixture, task, write_file(text, (size_t)size), NULL);
        if (evaluate_set_open(&set, &request, &error)) {
            taken++;
            evaluate_set_close(&set);
        } else {
            refused++;
            assert_true(error_is_set(&error));
        }
    }
    assert_true(taken > 100 && refused > 100);
    fixture_close(&fixture);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(perplexity_is_that_of_a_plain_loop_over_windows),
        cmocka_unit_test(perplexity_leaves_out_masked_tokens),
        cmocka_unit_test(perplexity_has_the_documents_of_training),
        cmocka_unit_test(lambada_is_that_of_plain_code),
        cmocka_unit_test(pairs_have_the_tokens_of_the_whole),
        cmocka_unit_test(texts_are_cleaned_as_the_harness_does),
        cmocka_unit_test(the_first_of_equal_endings_is_the_best),
        cmocka_unit_test(hellaswag_is_that_of_plain_code),
        cmocka_unit_test(any_number_of_ranks_gives_the_same_bits),
        cmocka_unit_test(ranks_that_have_other_data_do_not_score),
        cmocka_unit_test(a_model_of_nan_has_no_numbers),
        cmocka_unit_test(damaged_lines_are_refused_with_their_number),
        cmocka_unit_test(a_word_may_fill_the_whole_length),
        cmocka_unit_test(requests_that_cannot_be_met_are_refused),
        cmocka_unit_test(damaged_bytes_do_not_crash),
    };
    int descriptor = mkstemp(scratch);
    if (descriptor < 0) { return 1; }
    close(descriptor);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(scratch);
    return failed;
}
