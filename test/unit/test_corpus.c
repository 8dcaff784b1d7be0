// test_corpus.c: the built-in corpus is a pure function, its nats are true, and their
// mean is the entropy that is printed.
//
// The oracle shares no code with corpus.h: it lists every story of a small grammar by
// replacing marks in strings, and gets conditional probabilities by counting the stories
// that begin with a prefix. For the real grammar it parses what was written, by search.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "runtime/errors.h"
#include "tokenizer/corpus.h"

enum { CORPUS_MAX_STORY = 512 }; // bytes, separator included

static void assert_close(double value, double expected, double tolerance) {
    if (!(fabs(value - expected) <= tolerance)) {
        fail_msg("%.12g is not within %g of %.12g", value, tolerance, expected);
    }
}

// ---- Checking a grammar ---------------------------------------------------------------

// Whether two alternatives first differ at a plain byte, before either of them ends.
static bool first_differ_plainly(const char *a, const char *b) {
    for (; *a != '\0' && *b != '\0'; a++, b++) {
        if (*a != *b) { return strchr("{<", *a) == NULL && strchr("{<", *b) == NULL; }
        if (*a != '{' && *a != '<') { continue; }
        size_t length = strcspn(a, "}>");
        if (strncmp(a, b, length + 1) != 0) { return false; }
        a += length - (a[length] == '\0');
        b += length - (b[length] == '\0');
    }
    return false;
}

static int source_of(const CorpusRule *rules, int count, int rule) {
    const char *follows = rules[rule].follows;
    return follows == NULL ? rule : corpus_find(rules, count, follows, strlen(follows));
}

static bool check_rule(const CorpusRule *rules, int count, int rule, Error *error) {
    const CorpusRule *checked = &rules[rule];
    int source = source_of(rules, count, rule);
    if (source < 0 || corpus_alternatives(&rules[source]) != corpus_alternatives(checked)) {
        return error_set(error,
                         "rule %s follows a rule that does not exist or has another number of alternatives",
                         checked->name);
    }
    for (int a = 0; checked->alternatives[a] != NULL; a++) {
        if (rule > 0 && strpbrk(checked->alternatives[a], "{}<>\n") != NULL) {
            return error_set(error, "rule %s: only plots refer to rules", checked->name);
        }
        for (int b = 0; b < a && source == rule; b++) {
            if (!first_differ_plainly(checked->alternatives[a], checked->alternatives[b])) {
                return error_set(error, "rule %s: alternatives %d and %d do not first differ at a plain byte",
                                 checked->name, b, a);
            }
        }
    }
    return true;
}

static bool check_plot(const CorpusRule *rules, int count, const char *plot, Error *error) {
    bool chosen[CORPUS_MAX_RULES] = {false};
    size_t bytes = 1;
    for (const char *at = plot; *at != '\0'; at++) {
        size_t longest = 1;
        if (*at == '{' || *at == '<') {
            bool chooses = *at == '{';
            size_t length = strcspn(++at, "}>");
            int rule = corpus_find(rules, count, at, length);
            int source = rule > 0 ? source_of(rules, count, rule) : -1;
            bool allowed = source > 0 && at[length] == (chooses ? '}' : '>') &&
                           (chooses ? source == rule && !chosen[rule] : chosen[source]);
            if (!allowed) {
                return error_set(error,
                                 "the plot's reference at character %d is unknown, too early or chosen twice",
                                 (int)(at - plot));
            }
            chosen[rule] = chosen[rule] || chooses;
            for (int k = 0; rules[rule].alternatives[k] != NULL; k++) {
                size_t letters = strlen(rules[rule].alternatives[k]);
                longest = letters > longest ? letters : longest;
            }
            at += length;
        }
        bytes += longest;
    }
    if (bytes >= CORPUS_MAX_STORY) {
        return error_set(error, "a plot may reach %zu bytes, %d is the limit", bytes, CORPUS_MAX_STORY - 1);
    }
    return true;
}

// Whether the formulas of corpus.h hold for a grammar, so that whoever changes the
// stories learns which of its rules they broke.
static bool check_grammar(const CorpusRule *rules, int count, Error *error) {
    for (int r = 0; r < count; r++) {
        if (!check_rule(rules, count, r, error)) { return false; }
    }
    for (int p = 0; rules[0].alternatives[p] != NULL; p++) {
        if (!check_plot(rules, count, rules[0].alternatives[p], error)) { return false; }
    }
    return true;
}

// ---- Windows --------------------------------------------------------------------------

static void test_random_is_splitmix64(void **state) {
    (void)state;
    Random random = {0};
    // The first outputs of splitmix64 from state 0, as published with the generator.
    assert_true(random_bits(&random) == UINT64_C(0xE220A8397B1DCDAF));
    assert_true(random_bits(&random) == UINT64_C(0x6E789E6AA1B965F4));
    assert_true(random_bits(&random) == UINT64_C(0x06C45D188009454F));
    double sum = 0.0, squares = 0.0, least = 1.0, most = 0.0;
    for (int i = 0; i < 200000; i++) {
        double u = random_uniform(&random), z = random_normal(&random);
        least = u < least ? u : least;
        most = u > most ? u : most;
        sum += z;
        squares += z * z;
    }
    assert_true(least >= 0.0 && least < 1e-4 && most < 1.0 && most > 1.0 - 1e-4);
    assert_close(sum / 200000, 0.0, 0.01);
    assert_close(squares / 200000, 1.0, 0.02);
    assert_true(random_hash(0, 0) != 0 && random_hash(1, 2) != random_hash(2, 1));
}

static void test_grammar_is_valid(void **state) {
    (void)state;
    Error error = {""};
    if (!check_grammar(corpus_rules, CORPUS_RULES, &error)) { fail_msg("%s", error.text); }
    for (int r = 0; r < CORPUS_RULES; r++) {
        for (int k = 0; corpus_rules[r].alternatives[k] != NULL; k++) {
            for (const char *c = corpus_rules[r].alternatives[k]; *c != '\0'; c++) {
                assert_true(*c >= ' ' && *c <= '~');
            }
        }
    }
}

// NULL: there is one alternative less.
static bool is_valid(const char *plot, const char *other, const char *word, const char *second,
                     const char *tail, const char *follower) {
    const CorpusRule rules[] = {
        {"plot", NULL, {plot, other}}, {"word", NULL, {word, second}}, {"tail", "word", {tail, follower}}};
    Error error = {""};
    bool valid = check_grammar(rules, 3, &error);
    assert_true(error_is_set(&error) == !valid);
    return valid;
}

static void test_check_finds_what_breaks_the_formulas(void **state) {
    (void)state;
    assert_true(is_valid("a {word}<tail>", "b {word}", "cat", "car", "x", "y"));
    assert_false(is_valid("a {word}", NULL, "ball", "balloon", "x", "y"));    // a word that begins another
    assert_false(is_valid("a {word}", NULL, "cat", "cat", "x", "y"));         // twice the same
    assert_false(is_valid("a {word}", "a {word} b", "cat", "car", "x", "y")); // a plot that begins another
    assert_false(is_valid("a {word}", "a x", "cat", "car", "x", "y"));        // plots that part at a choice
    assert_false(is_valid("a {word}<word>", "a {word}", "cat", "car", "x", "y")); // and at a repetition
    assert_false(is_valid("a <word>", NULL, "cat", "car", "x", "y")); // repeated before it is chosen
    assert_false(is_valid("a <tail> {word}", NULL, "cat", "car", "x", "y"));
    assert_false(is_valid("a {word} {word}", NULL, "cat", "car", "x", "y")); // chosen twice
    assert_false(is_valid("a {wort}", NULL, "cat", "car", "x", "y"));
    assert_false(is_valid("a {word", NULL, "cat", "car", "x", "y"));
    assert_false(is_valid("a {tail}", NULL, "cat", "car", "x", "y"));   // a follower has no choice
    assert_false(is_valid("a {word}", NULL, "cat", "car", "x", NULL));  // a follower of another length
    assert_false(is_valid("a {word}", NULL, "c<tail>", "d", "x", "y")); // words do not refer
}

static void test_window_is_a_pure_function(void **state) {
    (void)state;
    uint8_t first[258], again[258];
    double nats[258];
    for (uint64_t index = 0; index < 50; index++) {
        memset(first, 0xEE, sizeof first);
        memset(again, 0xEE, sizeof again);
        double total = corpus_fill(5, index, 256, first, NULL), sum = 0.0;
        assert_true(corpus_fill(5, index, 256, again, nats) == total);
        assert_memory_equal(first, again, sizeof first);
        assert_int_equal(first[0], '\n');
        assert_int_equal(first[257], 0xEE); // nothing behind T+1
        for (int t = 0; t <= 256; t++) { sum += nats[t]; }
        assert_true(nats[0] == 0.0);
        assert_close(sum, total, 1e-12);
        corpus_fill(5, index, 100, again, NULL); // a shorter window is a prefix
        assert_memory_equal(first, again, 101);
        corpus_fill(6, index, 256, again, NULL);
        assert_memory_not_equal(first, again, 257);
        corpus_fill(5, index + 1, 256, first, NULL);
        assert_memory_not_equal(first, again, 257); // nor is a seed a shift of another
    }
}

static void test_pronouns_and_sounds_belong_together(void **state) {
    (void)state;
    static const char *const pairs[6][2] = {
        {"named Lily. She ", "named Lily. He "},   {"named Ben. He ", "named Ben. She "},
        {"named Mia. She ", "named Mia. He "},     {"named Tom. He ", "named Tom. She "},
        {"named Rosie. She ", "named Rosie. He "}, {"named Sam. He ", "named Sam. She "}};
    enum { T = 100000 };
    char *bytes = (char *)malloc(T + 2);
    corpus_fill(1, 0, T, (uint8_t *)bytes, NULL);
    bytes[T + 1] = '\0';
    for (int i = 0; i < 6; i++) {
        assert_non_null(strstr(bytes, pairs[i][0]));
        assert_null(strstr(bytes, pairs[i][1]));
    }
    assert_non_null(strstr(bytes, "Then a duck came by. \"Quack!"));
    assert_non_null(strstr(bytes, "Then a bee came by. \"Buzz!"));
    free(bytes);
}

// ---- An oracle that lists all the stories ---------------------------------------------

// Nested choices with common beginnings, a follower, and lengths that differ: small
// enough to be listed.
static const CorpusRule small_rules[] = {
    {"plot", NULL, {"A {who} met {what}; <it> said <what>.", "A {who} hid <it>", "B {what} {who}, <what>!"}},
    {"who", NULL, {"cat", "cow", "bird", "bee", "elephant"}},
    {"it", "who", {"purr", "moo", "tweet", "z", "toot"}},
    {"what", NULL, {"Ann", "Anton", "Bo"}},
};
enum { SMALL_RULES = 4, SMALL_STORIES = 5 * 3 + 5 + 5 * 3, SMALL_MAX = 64 };

typedef struct SmallStory {
    char text[SMALL_MAX];
    double probability;
} SmallStory;

static void replace_all(char *text, const char *mark, const char *word) {
    char copy[SMALL_MAX];
    for (char *at; (at = strstr(text, mark)) != NULL;) {
        snprintf(copy, sizeof copy, "%s", at + strlen(mark));
        snprintf(at, (size_t)(text + SMALL_MAX - at), "%s%s", word, copy);
    }
}

static void list_small_stories(SmallStory *stories) {
    static const char *const plots[3] = {"\nA WHO met WHAT; IT said WHAT.", "\nA WHO hid IT",
                                         "\nB WHAT WHO, WHAT!"};
    static const char *const who[5] = {"cat", "cow", "bird", "bee", "elephant"}, *const it[5] = {
                                                                                     "purr", "moo", "tweet",
                                                                                     "z", "toot"};
    static const char *const what[3] = {"Ann", "Anton", "Bo"};
    int count = 0;
    for (int p = 0; p < 3; p++) {
        for (int i = 0; i < 5; i++) {
            for (int j = 0; j < (p == 1 ? 1 : 3); j++) {
                snprintf(stories[count].text, SMALL_MAX, "%s", plots[p]);
                replace_all(stories[count].text, "WHO", who[i]);
                replace_all(stories[count].text, "WHAT", what[j]);
                replace_all(stories[count].text, "IT", it[i]);
                stories[count++].probability = p == 1 ? 1.0 / 15 : 1.0 / 45;
            }
        }
    }
    assert_int_equal(count, SMALL_STORIES);
}

// Probability that the endless stream begins with these bytes. A story that ends inside
// them is followed by an independent one.
static double prefix_probability(const SmallStory *stories, const char *bytes, int length) {
    double probability = 0.0;
    if (length == 0) { return 1.0; }
    for (int s = 0; s < SMALL_STORIES; s++) {
        int size = (int)strlen(stories[s].text), common = size < length ? size : length;
        if (memcmp(stories[s].text, bytes, (size_t)common) != 0) { continue; }
        probability += stories[s].probability * prefix_probability(stories, bytes + common, length - common);
    }
    return probability;
}

// "Ann" and "Anton", "bee" and "bird": prefix-free is what the grammar needs, and the
// listing shows that it is enough.
static void test_nats_agree_with_listing_all_stories(void **state) {
    (void)state;
    enum { T = 90 };
    SmallStory stories[SMALL_STORIES];
    uint8_t bytes[T + 1];
    double nats[T + 1];
    Error error = {""};
    assert_true(check_grammar(small_rules, SMALL_RULES, &error));
    list_small_stories(stories);
    for (uint64_t index = 0; index < 300; index++) {
        corpus_fill_from(small_rules, SMALL_RULES, 11, index, T, bytes, nats);
        for (int t = 0; t <= T; t++) {
            double before = prefix_probability(stories, (const char *)bytes, t);
            double after = prefix_probability(stories, (const char *)bytes, t + 1);
            assert_true(after > 0.0);
            assert_close(nats[t], -log(after / before), 1e-9);
        }
    }
}

// ---- The real grammar -----------------------------------------------------------------

static int rule_of(const char *name, size_t length) {
    for (int r = 0; r < CORPUS_RULES; r++) {
        if (strlen(corpus_rules[r].name) == length && strncmp(corpus_rules[r].name, name, length) == 0) {
            return r;
        }
    }
    return -1;
}

// Sum of the probabilities of all ways to read `story` (to its end) as what is left of a
// plot; chosen[r] is -1 before rule r is chosen.
static double parse_plot(const char *plot, const char *story, int *chosen) {
    while (*plot != '\0' && *plot != '{' && *plot != '<') {
        if (*plot++ != *story++) { return 0.0; }
    }
    if (*plot == '\0') { return *story == '\0' ? 1.0 : 0.0; }
    size_t length = strcspn(plot + 1, "}>");
    int r = rule_of(plot + 1, length), source = r;
    const char *rest = plot + length + 2;
    if (corpus_rules[r].follows != NULL) {
        source = rule_of(corpus_rules[r].follows, strlen(corpus_rules[r].follows));
    }
    if (*plot == '<') {
        assert_true(chosen[source] >= 0);
        const char *word = corpus_rules[r].alternatives[chosen[source]];
        return strncmp(story, word, strlen(word)) == 0 ? parse_plot(rest, story + strlen(word), chosen) : 0.0;
    }
    double probability = 0.0;
    int count = 0;
    for (const char *word; (word = corpus_rules[r].alternatives[count]) != NULL; count++) {
        if (strncmp(story, word, strlen(word)) != 0) { continue; }
        chosen[r] = count;
        probability += parse_plot(rest, story + strlen(word), chosen);
        chosen[r] = -1;
    }
    return probability / count;
}

static double parse_story(const char *story) {
    int chosen[CORPUS_RULES], count = 0;
    double probability = 0.0;
    for (const char *plot; (plot = corpus_rules[0].alternatives[count]) != NULL; count++) {
        for (int r = 0; r < CORPUS_RULES; r++) { chosen[r] = -1; }
        probability += parse_plot(plot, story, chosen);
    }
    return probability / count;
}

static void test_stories_parse_and_their_nats_add_up(void **state) {
    (void)state;
    enum { T = 1023 };
    uint8_t bytes[T + 1];
    double nats[T + 1];
    int stories = 0;
    for (uint64_t index = 0; index < 500; index++) {
        corpus_fill(3, index, T, bytes, nats);
        for (uint8_t *start = bytes, *end;
             (end = (uint8_t *)memchr(start + 1, '\n', (size_t)(bytes + T - start))) != NULL; start = end) {
            char story[CORPUS_MAX_STORY];
            double sum = 0.0;
            snprintf(story, sizeof story, "%.*s", (int)(end - start - 1), (const char *)start + 1);
            for (const uint8_t *c = start; c < end; c++) { sum += nats[c - bytes]; }
            double probability = parse_story(story);
            assert_true(probability > 0.0);
            assert_close(sum, -log(probability), 1e-9);
            assert_in_range(end - start - 1, 150, 250); // bytes: two never fit into 256, one always does
            stories++;
        }
    }
    assert_true(stories > 1500);
}

static void test_entropy_is_the_mean_of_the_nats(void **state) {
    (void)state;
    static const int lengths[4] = {1, 64, 256, 700};
    enum { WINDOWS = 20000 };
    for (int i = 0; i < 4; i++) {
        int T = lengths[i];
        uint8_t *bytes = (uint8_t *)malloc((size_t)T + 1);
        double sum = 0.0, squares = 0.0;
        for (uint64_t index = 0; index < WINDOWS; index++) {
            double nats = corpus_fill(9, index, T, bytes, NULL) / T;
            sum += nats;
            squares += nats * nats;
        }
        double mean = sum / WINDOWS, deviation = sqrt(fmax(0.0, squares / WINDOWS - mean * mean) / WINDOWS);
        assert_close(mean, corpus_entropy(T), 12 * deviation + 1e-9); // which are windows of another seed
        free(bytes);
    }
}

static void test_speed(void **state) {
    (void)state;
    uint8_t bytes[257];
    clock_t start = clock();
    for (uint64_t index = 0; index < 4000; index++) { corpus_fill(1, index, 256, bytes, NULL); }
    double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    print_message("corpus: %.1f MB/s, %.4f nats per byte at T=256\n", 4000 * 257 / seconds / 1e6,
                  corpus_entropy(256));
    assert_true(seconds < 30.0); // only against something absurd: sanitizers and busy machines run this too
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_is_splitmix64),
        cmocka_unit_test(test_grammar_is_valid),
        cmocka_unit_test(test_check_finds_what_breaks_the_formulas),
        cmocka_unit_test(test_window_is_a_pure_function),
        cmocka_unit_test(test_pronouns_and_sounds_belong_together),
        cmocka_unit_test(test_nats_agree_with_listing_all_stories),
        cmocka_unit_test(test_stories_parse_and_their_nats_add_up),
        cmocka_unit_test(test_entropy_is_the_mean_of_the_nats),
        cmocka_unit_test(test_speed),
    };
    return cmocka_run_group_tests_name("corpus", tests, NULL, NULL);
}
