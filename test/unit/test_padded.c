// test_padded.c: with --pad, a window of the data loader is one document, and neither the
// filling nor what follows it is predicted.
//
// test/reference/padded_shard.bin was made by tokenizer/prepare.py from five documents,
// each of one letter, repeated:
//
//     for text in aaaa bbbbbbbbbbbbbbb cccccccccccccccc dddddddddddddddddddddddd f; do
//         echo "{\"text\": \"$text\"}"; done > letters.jsonl
//     python -m tokenizer.prepare --tokenizer test/reference --val-fraction 0 --pad 16
//         --out letters letters.jsonl
#include "dataloader.h"
#include "test/harness.h"

enum { LENGTH = 16, DOCUMENTS = 5, VOCABULARY = 406, END_OF_TEXT = 0 };

// Document w has letters[w] tokens of its letter, then an end of text if there is room
// for it.
static const int letters[DOCUMENTS] = {4, 15, 16, 24, 1};
static const int tokens_of_letters[DOCUMENTS] = {65, 66, 67, 68, 70};

static int expected_token(int w, int t) { return t < letters[w] ? tokens_of_letters[w] : END_OF_TEXT; }

static int expected_target(int w, int t) {
    int next = t + 1;
    return next < LENGTH && next <= letters[w] ? expected_token(w, next) : -1;
}

static void a_window_is_a_document(void **state) {
    (void)state;
    DataRequest request = {
        "test/reference/padded_shard.bin", LENGTH, VOCABULARY, 1, false, NULL, false, false};
    DataLoader loader;
    Error error;
    int32_t tokens[DOCUMENTS * LENGTH], targets[DOCUMENTS * LENGTH];
    double perfect;
    if (!data_loader_open(&loader, &request, &error)) { fail_msg("%s", error.text); }
    assert_int_equal(loader.training_windows, DOCUMENTS);
    assert_true(data_file_check_length(&loader.files[0], LENGTH, &error));
    // Windows of another length would see several documents.
    assert_false(data_file_check_length(&loader.files[0], LENGTH + 1, &error));
    if (strstr(error.text, "give --seq-len 16") == NULL) { fail_msg("%s", error.text); }
    // Validation reads in the order of the file.
    assert_true(data_loader_fill(&loader, DATA_VALIDATION, 0, DOCUMENTS, tokens, targets, &perfect, &error));
    for (int i = 0; i < DOCUMENTS * LENGTH; i++) {
        int w = i / LENGTH, t = i % LENGTH, target = expected_target(w, t);
        if (tokens[i] != expected_token(w, t)) { fail_msg("window %d: token %d is %d", w, t, tokens[i]); }
        if (targets[i] != target) {
            fail_msg("window %d: target %d is %d, not %d", w, t, targets[i], target);
        }
    }
    data_loader_close(&loader);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_window_is_a_document)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
