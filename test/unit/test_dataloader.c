// test_dataloader.c: every source gives the tokens that are in it, in an order that
// depends only on (seed, index); every bad input gives one clear sentence; no bytes crash
// the loader. All files are made here, in a temporary directory.
#include "test/harness.h"

#include "dataloader.h"
#include "program/training_problem.h"

typedef struct Scratch {
    char directory[64];
    char path[160]; // of the last file asked for
} Scratch;

static const char *scratch_path(Scratch *scratch, const char *name) {
    snprintf(scratch->path, sizeof scratch->path, "%s/%s", scratch->directory, name);
    return scratch->path;
}

static const char *write_file(Scratch *scratch, const char *name, const void *bytes, size_t size) {
    FILE *file = fopen(scratch_path(scratch, name), "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    fclose(file);
    return scratch->path;
}

// A file of `count` uint16 ids start, start+1, ... modulo `vocabulary`, so that a token
// tells its position.
static const char *write_ids(Scratch *scratch, const char *name, int count, int start, int vocabulary) {
    uint16_t *ids = (uint16_t *)malloc((size_t)count * sizeof *ids + 1);
    for (int i = 0; i < count; i++) { ids[i] = (uint16_t)((start + i) % vocabulary); }
    write_file(scratch, name, ids, (size_t)count * sizeof *ids);
    free(ids);
    return scratch->path;
}

// A file as llm.c writes it: the header says `said` tokens, and `count` of `width` bytes
// follow it.
static const char *write_llmc(Scratch *scratch, const char *name, int32_t magic, int32_t version,
                              int32_t said, int count, int width) {
    size_t size = 1024 + (size_t)count * (size_t)width;
    uint8_t *bytes = (uint8_t *)calloc(1, size);
    int32_t header[3] = {magic, version, said};
    memcpy(bytes, header, sizeof header);
    for (int i = 0; i < count; i++) {
        uint32_t id = (uint32_t)i;
        memcpy(bytes + 1024 + (size_t)i * (size_t)width, &id, (size_t)width);
    }
    write_file(scratch, name, bytes, size);
    free(bytes);
    return scratch->path;
}

static bool try_open(DataLoader *loader, const char *path, int T, int vocabulary, bool hold_out,
                     Error *error) {
    DataRequest request = {path, T, vocabulary, 42, hold_out, NULL, false, false};
    error->text[0] = '\0';
    return data_loader_open(loader, &request, error);
}

static void open_or_fail(DataLoader *loader, const char *path, int T, int vocabulary, bool hold_out) {
    Error error;
    if (!try_open(loader, path, T, vocabulary, hold_out, &error)) { fail_msg("%s", error.text); }
}

// Expects an error of one line that has `words` and names the file, where there is one.
static void expect_refusal(const char *path, int T, int vocabulary, const char *words) {
    DataLoader loader;
    Error error;
    assert_false(try_open(&loader, path, T, vocabulary, true, &error));
    if (strstr(error.text, words) == NULL) { fail_msg("'%s' does not say '%s'", error.text, words); }
    assert_null(strchr(error.text, '\n'));
    if (strcmp(path, "builtin") != 0 && strpbrk(path, "*[") == NULL) {
        assert_non_null(strstr(error.text, path));
    }
    assert_int_equal(loader.file_count, 0); // nothing to close
}

static void fill(const DataLoader *loader, bool validation, uint64_t first, int B, int32_t *tokens,
                 int32_t *targets, double *perfect) {
    Error error = {""};
    bool good = data_loader_fill(loader, validation ? DATA_VALIDATION : DATA_TRAINING, first, B, tokens,
                                 targets, perfect, &error);
    if (!good) { fail_msg("%s", error.text); }
}

// ---- Order ----------------------------------------------------------------------------

// Where data_permute found `image`: the rounds of its network in the opposite order.
static uint64_t permuted_from(uint64_t key, uint64_t n, uint64_t image) {
    uint64_t half_bits = 1, index = image;
    while ((UINT64_C(1) << (2 * half_bits)) < n) { half_bits++; }
    uint64_t mask = (UINT64_C(1) << half_bits) - 1;
    do {
        uint64_t left = index >> half_bits, right = index & mask;
        for (uint64_t round = 6; round-- > 0;) {
            uint64_t before = right ^ (random_hash(key + round, left) & mask);
            right = left;
            left = before;
        }
        index = left << half_bits | right;
    } while (index >= n);
    return index;
}

static void test_permutation_is_a_bijection(void **state) {
    (void)state;
    static const uint64_t sizes[] = {1,  2,  3,   4,   5,   7,   8,    13,   16,   17,
                                     64, 97, 100, 255, 256, 257, 1000, 1024, 4099, 65537};
    static uint8_t seen[65537];
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        uint64_t n = sizes[s], moved = 0;
        memset(seen, 0, sizeof seen);
        for (uint64_t i = 0; i < n; i++) {
            uint64_t image = data_permute(random_hash(1, n), n, i);
            assert_true(image < n && seen[image] == 0);
            seen[image] = 1;
            moved += image != i;
        }
        if (n >= 97) { assert_true(moved > n * 9 / 10); }
    }
    // Domains too large to visit: every image leads back to the one index that it comes
    // from.
    static const uint64_t large[] = {(UINT64_C(1) << 32) - 1, UINT64_C(1) << 33, (UINT64_C(1) << 40) + 12345,
                                     UINT64_C(1) << 62};
    for (size_t s = 0; s < sizeof large / sizeof large[0]; s++) {
        uint64_t n = large[s], beyond = 0;
        for (uint64_t i = 0; i < 5000; i++) {
            uint64_t index = i < 1000   ? i
                             : i < 2000 ? n - 1 - (i - 1000)
                                        : random_hash(3, i) % n,
                     image = data_permute(9, n, index);
            assert_true(image < n && permuted_from(9, n, image) == index);
            beyond += image > n / 2;
        }
        assert_in_range(beyond, 2200, 2800);
    }
}

// Over many keys, every window comes first equally often, and neighbours stay neighbours
// no more often than by chance.
static void test_permutation_is_fair(void **state) {
    (void)state;
    enum { N = 10, KEYS = 20000 };
    int first[N] = {0}, neighbours = 0;
    for (uint64_t key = 0; key < KEYS; key++) {
        uint64_t a = data_permute(random_hash(7, key), N, 0), b = data_permute(random_hash(7, key), N, 1);
        first[a]++;
        neighbours += b == a + 1;
    }
    // About 6 standard deviations; nine of the ninety ordered pairs are neighbours.
    for (int i = 0; i < N; i++) { assert_in_range(first[i], KEYS / N - 250, KEYS / N + 250); }
    assert_in_range(neighbours, KEYS / 10 - 300, KEYS / 10 + 300);
}

static void test_every_epoch_visits_every_window_once(void **state) {
    Scratch *scratch = (Scratch *)*state;
    enum { T = 8, WINDOWS = 100 };
    int32_t tokens[T], targets[T];
    double perfect;
    int order[2][WINDOWS], same = 0;
    DataLoader loader, other;
    open_or_fail(&loader, write_ids(scratch, "order.bin", WINDOWS * T + 1, 0, 1000), T, 1000, false);
    assert_true(loader.training_windows == WINDOWS);
    for (int epoch = 0; epoch < 2; epoch++) {
        bool seen[WINDOWS] = {false};
        for (int i = 0; i < WINDOWS; i++) {
            fill(&loader, false, (uint64_t)(epoch * WINDOWS + i), 1, tokens, targets, &perfect);
            assert_true(isnan(perfect));
            assert_int_equal(tokens[0] % T, 0);
            for (int t = 0; t < T; t++) {
                assert_int_equal(tokens[t], tokens[0] + t);
                assert_int_equal(targets[t], tokens[0] + t + 1);
            }
            assert_false(seen[tokens[0] / T]);
            seen[tokens[0] / T] = true;
            order[epoch][i] = tokens[0] / T;
        }
    }
    DataRequest request = {scratch->path, T, 1000, 43, false, NULL, false, false};
    Error error = {""};
    assert_true(data_loader_open(&other, &request, &error));
    int same_seed = 0;
    for (int i = 0; i < WINDOWS; i++) {
        same += order[0][i] == order[1][i];
        fill(&other, false, (uint64_t)i, 1, tokens, targets, &perfect);
        same_seed += order[0][i] == tokens[0] / T;
    }
    assert_true(same < 10 && same_seed < 10); // one is expected by chance
    data_loader_close(&loader);
    data_loader_close(&other);
}

static void check_batches_and_ranks(const DataLoader *loader, bool validation) {
    enum { T = 16, B = 24, RANKS = 4, FIRST = 25 };
    int32_t batch[2][B * T], single[2][T];
    double perfect, sum = 0.0, one = 0.0;
    fill(loader, validation, FIRST, B, batch[0], batch[1], &perfect);
    for (int b = 0; b < B; b++) {
        fill(loader, validation, (uint64_t)(FIRST + b), 1, single[0], single[1], &one);
        assert_memory_equal(single[0], batch[0] + b * T, sizeof single[0]);
        assert_memory_equal(single[1], batch[1] + b * T, sizeof single[1]);
        sum += one;
    }
    if (loader->builtin) {
        if (!(fabs(sum / B - perfect) <= 1e-12)) { fail_msg("%g is not %g", sum / B, perfect); }
    } else {
        assert_true(isnan(perfect) && isnan(sum));
    }
    // Rank r takes samples j*RANKS + r: together the same samples, whatever RANKS is.
    for (int rank = 0; rank < RANKS; rank++) {
        for (int j = 0; j < B / RANKS; j++) {
            fill(loader, validation, (uint64_t)(FIRST + j * RANKS + rank), 1, single[0], single[1], &one);
            assert_memory_equal(single[0], batch[0] + (j * RANKS + rank) * T, sizeof single[0]);
        }
    }
}

static void test_a_batch_is_its_samples(void **state) {
    Scratch *scratch = (Scratch *)*state;
    DataLoader loader;
    // 38 windows to train on, so that the batch crosses from one epoch into the next.
    open_or_fail(&loader, write_ids(scratch, "batch.bin", 40 * 16 + 1, 0, 1000), 16, 1000, true);
    check_batches_and_ranks(&loader, false);
    check_batches_and_ranks(&loader, true);
    data_loader_close(&loader);
    open_or_fail(&loader, "builtin", 16, 256, true);
    check_batches_and_ranks(&loader, false);
    check_batches_and_ranks(&loader, true);
    data_loader_close(&loader);
}

typedef struct Reader {
    const DataLoader *loader;
    pthread_t handle;
    int32_t tokens[30 * 16], targets[30 * 16];
    bool good;
} Reader;

static void *read_batch(void *argument) {
    Reader *reader = (Reader *)argument;
    double perfect;
    Error error = {""};
    reader->good = data_loader_fill(reader->loader, DATA_TRAINING, 3, 30, reader->tokens, reader->targets,
                                    &perfect, &error);
    return NULL;
}

// Above all for ThreadSanitizer to watch.
static void test_threads_share_a_loader(void **state) {
    Scratch *scratch = (Scratch *)*state;
    for (int source = 0; source < 2; source++) {
        DataLoader loader;
        static Reader readers[4];
        open_or_fail(&loader, source == 0 ? "builtin" : write_ids(scratch, "shared.bin", 640, 0, 1000), 16,
                     1000, true);
        for (int i = 0; i < 4; i++) {
            readers[i].loader = &loader;
            assert_int_equal(pthread_create(&readers[i].handle, NULL, read_batch, &readers[i]), 0);
        }
        for (int i = 0; i < 4; i++) { pthread_join(readers[i].handle, NULL); }
        for (int i = 0; i < 4; i++) {
            assert_true(readers[i].good);
            assert_memory_equal(readers[i].tokens, readers[0].tokens, sizeof readers[0].tokens);
            assert_memory_equal(readers[i].targets, readers[0].targets, sizeof readers[0].targets);
        }
        data_loader_close(&loader);
    }
}

// ---- Sources --------------------------------------------------------------------------

static void test_builtin(void **state) {
    (void)state;
    enum { T = 256, B = 400 };
    int32_t *tokens = (int32_t *)malloc(B * T * sizeof *tokens),
            *targets = (int32_t *)malloc(B * T * sizeof *targets);
    int32_t validation[T], unused[T];
    double perfect, one;
    DataLoader loader;
    open_or_fail(&loader, "builtin", T, 256, true);
    assert_true(loader.training_windows == 0 && data_loader_validation_samples(&loader) == 0);
    fill(&loader, false, 1000, B, tokens, targets, &perfect);
    for (int b = 0; b < B; b++) {
        assert_int_equal(tokens[b * T], '\n');
        assert_memory_equal(tokens + b * T + 1, targets + b * T, (T - 1) * sizeof *tokens);
    }
    if (!(fabs(perfect - corpus_entropy(T)) <= 0.002)) {
        fail_msg("%g is far from the entropy %g", perfect, corpus_entropy(T));
    }
    fill(&loader, true, 1000, 1, validation, unused, &one);
    assert_memory_not_equal(validation, tokens, sizeof validation);
    Error error;
    assert_true(data_loader_require(&loader, 100000, 100000, &error));
    char text[400];
    data_loader_describe(&loader, text, sizeof text);
    assert_non_null(strstr(text, "entropy 0.0"));
    data_loader_close(&loader);
    expect_refusal("builtin", T, 255, "vocabulary of at least 256");
    free(tokens);
    free(targets);
}

static void test_text_is_bytes(void **state) {
    Scratch *scratch = (Scratch *)*state;
    static const char text[] = "\xC3\xA9t\xC3\xA9"; // five bytes, two of them above 127 twice
    int32_t tokens[4], targets[4];
    static const int32_t expected[5] = {0xC3, 0xA9, 't', 0xC3, 0xA9};
    double perfect;
    DataLoader loader;
    open_or_fail(&loader, write_file(scratch, "text.txt", text, 5), 4, 256, false);
    fill(&loader, false, 0, 1, tokens, targets, &perfect);
    assert_memory_equal(tokens, expected, sizeof tokens);
    assert_memory_equal(targets, expected + 1, sizeof targets);
    data_loader_close(&loader);
    expect_refusal(scratch->path, 4, 255, "a vocabulary of 255");
}

// Where documents must be divided, llm.c's ids of GPT-2 say by which token; Llama's do not, nor
// do bare ids.
static void test_files_that_divide_documents(void **state) {
    static const int32_t magic[2] = {20240520, 20240801}, version[2] = {1, 7};
    static const uint16_t ids[40];
    Scratch *scratch = (Scratch *)*state;
    for (int i = 0; i < 3; i++) {
        if (i == 2) { write_file(scratch, "bare.bin", ids, sizeof ids); }
        const char *path =
            i < 2 ? write_llmc(scratch, "llmc.bin", magic[i], version[i], 25, 25, 2 + 2 * i) : scratch->path;
        DataRequest request = {path, 12, 50257, 42, false, NULL, true, false};
        DataLoader loader;
        Error error = {""};
        assert_true(data_loader_open(&loader, &request, &error) == (i == 0));
        if (i > 0) { assert_non_null(strstr(error.text, "does not say which token divides its documents")); }
        if (i == 0) { assert_int_equal(loader.separator, 50257); }
        if (i == 0) { data_loader_close(&loader); }
    }
}

static void test_llmc_files(void **state) {
    Scratch *scratch = (Scratch *)*state;
    static const int32_t magic[2] = {20240520, 20240801}, version[2] = {1, 7};
    int32_t tokens[12], targets[12];
    double perfect;
    for (int i = 0; i < 2; i++) {
        DataLoader loader;
        const char *path = write_llmc(scratch, "llmc.bin", magic[i], version[i], 25, 25, 2 + 2 * i);
        open_or_fail(&loader, path, 12, 25, false);
        assert_true(loader.training_windows == 2);
        for (uint64_t s = 0; s < 2; s++) {
            fill(&loader, true, s, 1, tokens, targets, &perfect);
            assert_int_equal(tokens[0], 12 * s);
            assert_int_equal(targets[11], 12 * s + 12);
        }
        char text[400];
        data_loader_describe(&loader, text, sizeof text);
        assert_non_null(strstr(text, i == 0
                                         ? ": 1 file, uint16 ids, 25 tokens, 2 windows of 13 to train on"
                                         : ": 1 file, uint32 ids, 25 tokens, 2 windows of 13 to train on"));
        data_loader_close(&loader);
        expect_refusal(path, 12, 24, "token 24 at position 24 is beyond the model's vocabulary of 24");
        char words[64];
        snprintf(words, sizeof words, "promises 26 tokens of %d bytes, and %d bytes follow", 2 + 2 * i,
                 25 * (2 + 2 * i));
        expect_refusal(write_llmc(scratch, "cut.bin", magic[i], version[i], 26, 25, 2 + 2 * i), 12, 25,
                       words);
        expect_refusal(write_llmc(scratch, "cut.bin", magic[i], version[i], -1, 25, 2 + 2 * i), 12, 25,
                       "promises -1 tokens");
        snprintf(words, sizeof words, "in version 3, but only version %d can be read", version[i]);
        expect_refusal(write_llmc(scratch, "old.bin", magic[i], 3, 25, 25, 2 + 2 * i), 12, 25, words);
        int32_t part[10] = {magic[i], version[i]};
        expect_refusal(write_file(scratch, "short.bin", part, sizeof part), 12, 25, "promises 0 tokens of");
    }
    expect_refusal(write_llmc(scratch, "model.bin", 20240326, 3, 25, 25, 2), 12, 25,
                   "beyond the model's vocabulary");
}

static void test_many_files_in_order_of_name(void **state) {
    Scratch *scratch = (Scratch *)*state;
    static const char *const patterns[3] = {"parts", "parts/", "parts/train_*.bin"};
    char directory[160];
    int32_t tokens[4], targets[4];
    double perfect;
    snprintf(directory, sizeof directory, "%s/parts", scratch->directory);
    assert_int_equal(mkdir(directory, 0700), 0);
    write_ids(scratch, "parts/train_c.bin", 9, 200, 1000); // windows at 200, 204
    write_ids(scratch, "parts/train_a.bin", 8, 0, 1000);   // at 0; the rest is too short
    write_ids(scratch, "parts/train_b.bin", 3, 100, 1000); // none
    write_ids(scratch, "parts/train_d.bin", 6, 300, 1000); // at 300
    static const int32_t starts[4] = {0, 200, 204, 300};
    for (int i = 0; i < 3; i++) {
        DataLoader loader;
        if (i == 2) { write_file(scratch, "parts/readme.txt", "not a token file", 16); }
        open_or_fail(&loader, scratch_path(scratch, patterns[i]), 4, 1000, false);
        assert_int_equal(loader.file_count, 4);
        assert_true(loader.training_windows == 4);
        for (uint64_t s = 0; s < 8; s++) { // and again from the start
            fill(&loader, true, s, 1, tokens, targets, &perfect);
            assert_int_equal(tokens[0], starts[s % 4]);
            assert_int_equal(targets[3], starts[s % 4] + 4);
        }
        char text[400];
        data_loader_describe(&loader, text, sizeof text);
        assert_non_null(
            strstr(text, "4 files, uint16 ids, 26 tokens, 4 windows of 5 to train on, 0 held out"));
        data_loader_close(&loader);
    }
    expect_refusal(scratch_path(scratch, "parts/*"), 4, 1000, "cannot be mixed");
    DataLoader loader;
    // The name of a file, not a pattern.
    open_or_fail(&loader, write_ids(scratch, "parts/odd[1]*.bin", 9, 0, 1000), 4, 1000, false);
    data_loader_close(&loader);
    // The name of a directory, not a pattern.
    assert_int_equal(rename(directory, scratch_path(scratch, "odd[1]*\\")), 0);
    open_or_fail(&loader, scratch_path(scratch, "odd[1]*\\"), 4, 1000, false);
    assert_int_equal(loader.file_count, 5);
    data_loader_close(&loader);
}

static void test_hold_out(void **state) {
    Scratch *scratch = (Scratch *)*state;
    static const int windows[6] = {2, 20, 39, 40, 100, 90000}, expected[6] = {1, 1, 1, 2, 5, 4096};
    int32_t token, target;
    double perfect;
    for (int i = 0; i < 6; i++) {
        DataLoader loader;
        open_or_fail(&loader, write_ids(scratch, "hold.bin", windows[i] + 1, 0, 65536), 1, 65536, true);
        uint64_t training = loader.training_windows, held = data_loader_validation_samples(&loader);
        assert_int_equal(held, expected[i]);
        assert_int_equal(training + held, windows[i]);
        for (uint64_t s = 0; s < training && s < 500; s++) {
            fill(&loader, false, s, 1, &token, &target, &perfect);
            assert_true(windows[i] > 65535 || (uint64_t)token < training);
        }
        for (uint64_t s = 0; s < training; s++) {
            assert_true(data_loader_window(&loader, DATA_TRAINING, s) < training);
        }
        fill(&loader, true, held - 1, 1, &token, &target, &perfect);
        assert_int_equal(token, (windows[i] - 1) % 65536);
        data_loader_close(&loader);
    }
}

// ---- Bad inputs -----------------------------------------------------------------------

static void test_bad_paths_and_files(void **state) {
    Scratch *scratch = (Scratch *)*state;
    expect_refusal(scratch_path(scratch, "missing.bin"), 8, 256, "there is no file");
    expect_refusal(scratch_path(scratch, "missing_*.bin"), 8, 256, "no file matches the pattern");
    char directory[160];
    snprintf(directory, sizeof directory, "%s/empty", scratch->directory);
    assert_int_equal(mkdir(directory, 0700), 0);
    expect_refusal(directory, 8, 256, "holds no .bin file");
    expect_refusal(scratch_path(scratch, "empt[y]"), 8, 256, "is not a regular file");
    snprintf(directory, sizeof directory, "%s/pipe", scratch->directory);
    assert_int_equal(mkfifo(directory, 0600), 0);
    expect_refusal(directory, 8, 256, "is not a regular file");
    assert_int_equal(symlink("loop", scratch_path(scratch, "loop")), 0); // cannot be opened
    expect_refusal(scratch_path(scratch, "loop/*.bin"), 8, 256, "cannot look for data in");
    expect_refusal(write_file(scratch, "none.txt", "", 0), 8, 256, "is empty");
    expect_refusal(write_file(scratch, "none.bin", "", 0), 8, 256, "is empty");
    expect_refusal(write_file(scratch, "odd.bin", "abcde", 5), 8, 65536, "has 5 bytes, an odd number");
    static const uint16_t few[8] = {7, 0, 8, 0, 9, 0, 7, 0}; // too few to say that they are wider
    DataLoader loader;
    open_or_fail(&loader, write_file(scratch, "few.bin", few, sizeof few), 3, 100, false);
    data_loader_close(&loader);
}

static void test_too_little_data(void **state) {
    Scratch *scratch = (Scratch *)*state;
    DataLoader loader;
    Error error;
    expect_refusal(write_ids(scratch, "little.bin", 8, 0, 100), 8, 100,
                   "of its 8 tokens training with a validation takes 17 at least");
    open_or_fail(&loader, scratch->path, 3, 100, true); // two windows, one for validation
    data_loader_close(&loader);
    assert_false(try_open(&loader, scratch->path, 8, 100, false, &error));
    assert_non_null(strstr(error.text, "of its 8 tokens a window takes 9 at least, in one file"));
    expect_refusal(scratch->path, 4, 100, "takes 9 at least, in one file: lower --seq-len");
    expect_refusal(write_ids(scratch, "one.bin", 1, 0, 100), 1, 100, "takes 3 at least");

    // 19 windows to train on and 1 for validation.
    open_or_fail(&loader, write_ids(scratch, "some.bin", 20 * 64 + 1, 0, 100), 64, 100, true);
    assert_true(data_loader_require(&loader, 4, 4, &error));
    assert_false(data_loader_require(&loader, 4, 5, &error));
    assert_non_null(strstr(error.text, "holds 19 windows of 65 tokens to train on, but 4 ranks x "
                                       "--micro-batch 5 need 20: lower --micro-batch or --seq-len, "));
    assert_false(data_loader_require(&loader, 2, 10, &error));
    assert_non_null(strstr(error.text, "--seq-len, start fewer ranks, or give more data"));
    assert_false(data_loader_require(&loader, 1, 20, &error));
    assert_non_null(strstr(error.text, "1 rank x --micro-batch 20 need 20: "));
    assert_non_null(strstr(error.text, "--seq-len, or give more data"));
    char text[400];
    data_loader_describe(&loader, text, sizeof text);
    assert_non_null(strstr(text, ", 19 windows of 65 to train on, 1 held out"));
    assert_false(data_loader_require(&loader, 2000000000, 2000000000, &error));
    assert_non_null(strstr(error.text, "need 4000000000000000000: "));
    data_loader_close(&loader);
}

// Three windows of 4 tokens, of which few tokens are predicted: the first token of a window is only
// its input. With a validation the last window is held out.
static void test_masks_leave_something(void **state) {
    Scratch *scratch = (Scratch *)*state;
    enum { T = 4, COUNT = 3 * T + 1 };
    static const struct {
        size_t predicted[2];
        bool hold_out;
        const char *words; // NULL: it is opened
    } cases[] = {{{0, 0}, false, "masks leave out all that could be predicted in its 3 windows of 5 tokens"},
                 {{4, 4}, false, NULL},
                 {{12, 12}, false, NULL},
                 {{4, 4}, true, "in its 1 window of 5 tokens for validation, the last ones: give --val-data"},
                 {{0, 8}, true, "in its 1 window of 5 tokens for validation"},
                 {{0, 12}, true, "in its 2 windows of 5 tokens"},
                 {{8, 9}, true, NULL},
                 {{4, 12}, true, NULL}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        DataLoader loader;
        TokenWriter writer;
        Tokenizer tokenizer = {.vocabulary = 100, .end = 0};
        Error error = {""};
        const char *path = scratch_path(scratch, "masked.bin");
        assert_true(token_writer_begin(&writer, path, &tokenizer, 0, &error));
        for (size_t place = 0; place < COUNT; place++) {
            bool counts = place == cases[i].predicted[0] || place == cases[i].predicted[1];
            int32_t id = counts ? 7 : ~7;
            assert_true(token_writer_add(&writer, &id, 1, &error));
        }
        assert_true(token_writer_end(&writer, &error));
        bool good = try_open(&loader, path, T, 100, cases[i].hold_out, &error);
        if (good != (cases[i].words == NULL)) { fail_msg("case %zu: '%s'", i, error.text); }
        if (good) { data_loader_close(&loader); }
        if (good) { continue; }
        assert_non_null(strstr(error.text, cases[i].words));
        assert_int_equal(strstr(error.text, "validation") != NULL, strstr(cases[i].words, "valid") != NULL);
    }
}

// Tokens that were not checked at open are checked when a batch uses them. To get there,
// the test lowers the vocabulary after opening.
static void test_bad_token_at_fill(void **state) {
    Scratch *scratch = (Scratch *)*state;
    int32_t tokens[16], targets[16];
    double perfect;
    Error error = {""};
    DataLoader loader;
    open_or_fail(&loader, write_ids(scratch, "late.bin", 17, 0, 100), 8, 17, false);
    loader.vocabulary = 16;
    assert_true(data_loader_fill(&loader, DATA_VALIDATION, 0, 1, tokens, targets, &perfect, &error));
    assert_false(data_loader_fill(&loader, DATA_VALIDATION, 0, 2, tokens, targets, &perfect, &error));
    assert_non_null(
        strstr(error.text, "late.bin: token 16 at position 16 is beyond the model's vocabulary of 16"));
    assert_false(data_loader_fill(&loader, DATA_TRAINING, 0, 2, tokens, targets, &perfect, &error));
    loader.vocabulary = 8; // the very first id of a window
    assert_false(data_loader_fill(&loader, DATA_VALIDATION, 1, 1, tokens, targets, &perfect, &error));
    assert_non_null(strstr(error.text, "token 8 at position 8"));
    data_loader_close(&loader);
}

// The scan by blocks finds the first bad id wherever it is.
static void test_scan_finds_the_position(void **state) {
    Scratch *scratch = (Scratch *)*state;
    enum { COUNT = 200000 };
    static const int positions[5] = {0, 65535, 65536, 131077, COUNT - 1};
    static uint16_t ids[COUNT];
    for (int i = 0; i < 5; i++) {
        char words[100];
        memset(ids, 0, sizeof ids);
        ids[positions[i]] = 50257;
        ids[COUNT - 1] = 50257;
        snprintf(words, sizeof words, "token 50257 at position %d is beyond the model's vocabulary of 50257",
                 positions[i]);
        expect_refusal(write_file(scratch, "scan.bin", ids, sizeof ids), 1024, 50257, words);
    }
}

// Any bytes give either an error or batches of valid ids.
static void test_random_bytes_never_crash(void **state) {
    Scratch *scratch = (Scratch *)*state;
    static uint8_t bytes[4096];
    int32_t tokens[3 * 5], targets[3 * 5];
    double perfect;
    int opened = 0;
    Random random = {1};
    for (int round = 0; round < 3000; round++) {
        static const int32_t magic[4] = {20240520, 20240801, 20240326, 0};
        size_t size = random_bits(&random) % (round % 2 == 0 ? sizeof bytes : 1100);
        int width = round % 4 == 1 ? 4 : 2;
        for (size_t i = 0; i < sizeof bytes; i++) { bytes[i] = (uint8_t)(random_bits(&random) >> 60); }
        int32_t header[3] = {magic[round % 4], round % 4 == 1 ? 7 : 1, ((int32_t)size - 1024) / width};
        if (round % 16 == 15) { header[round % 3] ^= (int32_t)(1u << (random_bits(&random) % 32)); }
        if (round % 4 != 3) { memcpy(bytes, header, sizeof header); }
        const char *path = write_file(scratch, round % 5 == 4 ? "fuzz.txt" : "fuzz.bin", bytes, size);
        DataLoader loader;
        Error error;
        int vocabulary = round % 3 == 0 ? 256 : round % 3 == 1 ? 65536 : 0x10000000;
        if (!try_open(&loader, path, 5, vocabulary, round % 2 == 0, &error)) {
            assert_true(error_is_set(&error));
            continue;
        }
        opened++;
        assert_true(loader.training_windows > 0);
        for (int i = 0; i < 4; i++) {
            bool good = i % 2 == 0 ? data_loader_fill(&loader, DATA_TRAINING, random_bits(&random) >> 8, 3,
                                                      tokens, targets, &perfect, &error)
                                   : data_loader_fill(&loader, DATA_VALIDATION, random_bits(&random) >> 8, 3,
                                                      tokens, targets, &perfect, &error);
            assert_true(good);
            for (int t = 0; t < 15; t++) {
                assert_in_range(tokens[t], 0, vocabulary - 1);
                assert_in_range(targets[t], 0, vocabulary - 1);
            }
        }
        data_loader_close(&loader);
    }
    assert_true(opened > 300); // the valid ones among them were read
}

// Weights of sources, in millionths, up to a zero.
static const uint64_t MIXTURES[][DATA_SOURCES_MOST + 1] = {
    {1}, {700000, 300000}, {1, 999999, 1000000}, {999999, 1, 3}, {333333, 142857, 7, 523810, 1000000000000}};

static DataLoader mixture(const uint64_t *weights) {
    DataLoader loader;
    memset(&loader, 0, sizeof loader);
    while (weights[loader.source_count] > 0) {
        loader.sources[loader.source_count].weight = weights[loader.source_count];
        loader.source_count++;
    }
    return loader;
}

// The code of docs/data.md, run by Python where there is one, names the window of every
// sample.
static void test_the_page_names_the_windows(void **state) {
    Scratch *scratch = (Scratch *)*state;
    static const uint64_t counts[] = {1, 2, 3, 4, 5, 17, 64, 100};
    char command[1400], script[256];
    if (system("command -v python3 > /dev/null 2>&1") != 0) { leave_out("python3"); }
    snprintf(script, sizeof script, "%s", scratch_path(scratch, "page.py"));
    snprintf(
        command, sizeof command,
        "sed -n '/^```python$/,/^```$/p' docs/data.md | sed '/^```/d' > '%s' && printf '%%s\\n' "
        "'for n in (1, 2, 3, 4, 5, 17, 64, 100):' '    for seed in (0, 42, 2**63 + 5):' "
        "'        for sample in range(3 * n): print(window(sample, n, seed))' "
        "'for weights in ((1,), (700000, 300000), (1, 999999, 1000000), (999999, 1, 3), "
        "(333333, 142857, 7, 523810, 1000000000000)):' "
        "'    for k in range(100): print(*source(k + (k >= 50) * 2**40, weights))' >> '%s' && python3 '%s'",
        script, script, script);
    FILE *page = popen(command, "r");
    assert_non_null(page);
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        static const uint64_t seeds[] = {0, 42, (UINT64_C(1) << 63) + 5};
        for (int k = 0; k < 3; k++) {
            DataLoader loader;
            memset(&loader, 0, sizeof loader);
            loader.seed = seeds[k];
            loader.source_count = 1;
            loader.sources[0].training_windows = counts[i];
            for (uint64_t sample = 0; sample < 3 * counts[i]; sample++) {
                unsigned long long window;
                assert_int_equal(fscanf(page, "%llu", &window), 1);
                assert_int_equal(window, data_loader_window(&loader, DATA_TRAINING, sample));
            }
        }
    }
    for (size_t i = 0; i < sizeof MIXTURES / sizeof MIXTURES[0]; i++) {
        DataLoader loader = mixture(MIXTURES[i]);
        for (int k = 0; k < 100; k++) {
            uint64_t sample = (uint64_t)k + (k < 50 ? 0 : UINT64_C(1) << 40);
            int source, expected;
            unsigned long long number;
            assert_int_equal(fscanf(page, "%d %llu", &expected, &number), 2);
            source = data_loader_source(&loader, -1, &sample);
            assert_true(source == expected && sample == number);
        }
    }
    assert_int_equal(pclose(page), 0);
}

// ---- Several sources ------------------------------------------------------------------

// In a row of `count` samples: that every source has its share to less than `off` samples, and
// that each source numbers its samples one by one. In integers: no rounding hides an error.
static void check_row(const DataLoader *loader, uint64_t first, uint64_t count, uint64_t off) {
    uint64_t got[DATA_SOURCES_MOST] = {0}, all = data_loader_weights(loader, 0, loader->source_count);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t number = first + i, before = first;
        int source = data_loader_source(loader, -1, &number);
        data_loader_source(loader, source, &before);
        assert_true(number == before + got[source]++);
    }
    for (int i = 0; i < loader->source_count; i++) {
        unsigned __int128 have = (unsigned __int128)got[i] * all,
                          share = (unsigned __int128)count * loader->sources[i].weight;
        if (!((have > share ? have - share : share - have) < (unsigned __int128)off * all)) {
            fail_msg("source %d of %d has %llu of %llu samples from %llu on", i, loader->source_count,
                     (unsigned long long)got[i], (unsigned long long)count, (unsigned long long)first);
        }
    }
}

// Micro-batches, commits and longer rows have the shares, also where a double is not exact.
static void test_shares_follow_the_weights(void **state) {
    (void)state;
    static const uint64_t firsts[] = {0, 1, 17, 12345, (UINT64_C(1) << 40) + 7, (UINT64_C(1) << 61) + 3},
                          counts[] = {1, 2, 3, 8, 13, 64, 1000};
    static const uint64_t more[][DATA_SOURCES_MOST + 1] = {
        {1, 2},          {1, 1000000},    {618034, 381966},         {1, 1, 1},
        {1, 1, 1, 1, 1}, {5, 4, 3, 2, 1}, {1, 1, 1, 1, 1, 1, 1, 1}, {8, 1, 700, 33, 2, 900, 1, 5}};
    size_t known = sizeof MIXTURES / sizeof MIXTURES[0], all = known + sizeof more / sizeof more[0];
    for (size_t m = 0; m < all; m++) {
        DataLoader loader = mixture(m < known ? MIXTURES[m] : more[m - known]);
        uint64_t off = loader.source_count > 4 ? 3 : loader.source_count > 2 ? 2 : 1;
        for (size_t f = 0; f < sizeof firsts / sizeof firsts[0]; f++) {
            for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
                for (uint64_t i = 0; i < 20; i++) {
                    check_row(&loader, firsts[f] + i * counts[c], counts[c], off);
                }
            }
        }
    }
}

// The definition for two: a sample is of the first source where floor(s w) grows.
static void test_two_sources_take_turns_as_defined(void **state) {
    (void)state;
    DataLoader loader = mixture((const uint64_t[]){700000, 300000, 0});
    static const char order[] = "BAABAABAAABAABAABAAA"; // by hand: floor(0.7 s) is 0 0 1 2 2 3 4 4 5 6 7
    for (uint64_t s = 0; s < sizeof order - 1; s++) {
        uint64_t number = s;
        assert_int_equal(data_loader_source(&loader, -1, &number), order[s] - 'A');
    }
}

// Sources of several files, in the order of the list: names of another source may come first.
static void test_sources_may_have_several_files(void **state) {
    Scratch *scratch = (Scratch *)*state;
    enum { T = 4, VOCABULARY = 4000 };
    static const char *const files[] = {"z-many/1.bin", "z-many/2.bin", "z-many/3.bin", "a-few/1.bin",
                                        "a-few/2.bin"};
    static const int windows[] = {3, 5, 2, 4, 6};
    DataLoader loader;
    char list[400];
    int32_t tokens[T], targets[T];
    double perfect;
    assert_int_equal(mkdir(scratch_path(scratch, "z-many"), 0700), 0);
    assert_int_equal(mkdir(scratch_path(scratch, "a-few"), 0700), 0);
    for (int i = 0; i < 5; i++) { write_ids(scratch, files[i], windows[i] * T + 1, 100 * i, VOCABULARY); }
    snprintf(list, sizeof list, "%s/z-many/*.bin:1,%s/a-few:1", scratch->directory, scratch->directory);
    open_or_fail(&loader, list, T, VOCABULARY, false);
    assert_int_equal(loader.source_count, 2);
    for (int source = 0; source < 2; source++) {
        assert_int_equal(loader.sources[source].training_windows, 10);
        assert_int_equal(loader.sources[source].file_count, source == 0 ? 3 : 2);
    }
    uint64_t sample = 0;
    for (int i = 0; i < 5; i++) {
        for (int window = 0; window < windows[i]; window++) {
            fill(&loader, true, sample++, 1, tokens, targets, &perfect);
            assert_int_equal(tokens[0], 100 * i + window * T);
        }
    }
    data_loader_close(&loader);
}

// Each source is read as it would be alone, with a seed of its own, and its last windows are
// held out; validation visits them source by source.
static void test_a_source_is_read_as_if_alone(void **state) {
    Scratch *scratch = (Scratch *)*state;
    enum { T = 4, FIRST = 150 };
    static const int windows[3] = {40, 7, 100}, weights[3] = {3, 2, 7};
    DataLoader loader, alone[3];
    Error error = {""};
    char path[3][160], list[600];
    int32_t tokens[T], expected[T], targets[T];
    double perfect;
    uint64_t held = 0, seen[3] = {0};
    for (int i = 0; i < 3; i++) {
        char name[32];
        snprintf(name, sizeof name, "%d,%d.bin", i, i);
        strcpy(path[i], write_ids(scratch, name, windows[i] * T + 1, 1000 * i, 4000));
        DataRequest request = {path[i], T, 4000, 42 + (uint64_t)i, true, NULL, false, false};
        assert_true(data_loader_open(&alone[i], &request, &error)); // a comma in a name
        char renamed[160];
        snprintf(renamed, sizeof renamed, "%s", scratch_path(scratch, name + 2));
        assert_int_equal(rename(path[i], renamed), 0);
        strcpy(path[i], renamed);
    }
    snprintf(list, sizeof list, "%s:%d,%s:%d,%s:%d", path[0], weights[0], path[1], weights[1], path[2],
             weights[2]);
    open_or_fail(&loader, list, T, 4000, true);
    assert_int_equal(loader.source_count, 3);
    for (uint64_t s = 0; s < 12 * FIRST; s++) {
        uint64_t number = s;
        int source = data_loader_source(&loader, -1, &number);
        fill(&loader, false, s, 1, tokens, targets, &perfect);
        fill(&alone[source], false, seen[source]++, 1, expected, targets, &perfect);
        assert_memory_equal(tokens, expected, sizeof tokens);
    }
    for (int i = 0; i < 3; i++) { assert_int_equal(seen[i], weights[i] * FIRST); }
    for (int i = 0; i < 3; i++) {
        for (uint64_t s = 0; s < alone[i].validation_windows; s++) {
            fill(&loader, true, held++, 1, tokens, targets, &perfect);
            fill(&alone[i], true, s, 1, expected, targets, &perfect);
            assert_memory_equal(tokens, expected, sizeof tokens);
        }
        data_loader_close(&alone[i]);
    }
    assert_int_equal(held, data_loader_validation_samples(&loader));
    data_loader_close(&loader);
}

// Two ranks, then three: each sample is visited once, and is the one that a single rank visits.
static void test_three_ranks_go_on_where_two_were(void **state) {
    Scratch *scratch = (Scratch *)*state;
    enum { T = 4, B = 5, SAMPLES = 2 * 6 * B + 3 * 4 * B };
    char list[512], first[160];
    strcpy(first, write_ids(scratch, "three-a.bin", 50 * T + 1, 0, 4000));
    snprintf(list, sizeof list, "%s:0.61,%s:0.39", first,
             write_ids(scratch, "three-b.bin", 9 * T + 1, 1000, 4000));
    DataLoader loader;
    open_or_fail(&loader, list, T, 4000, false);
    int32_t tokens[B * T], targets[B * T], one[T];
    double perfect;
    int visits[SAMPLES] = {0};
    int64_t base = 0;
    for (int ranks = 2; ranks <= 3; ranks++) {
        uint64_t each = ranks == 2 ? 6 : 4; // micro-batches
        for (int rank = 0; rank < ranks; rank++) {
            Transport transport;
            transport.size = ranks;
            transport.rank = rank;
            TrainingProblem training = {.transport = &transport, .B = B, .data_base = &base};
            for (uint64_t i = 0; i < each; i++) {
                uint64_t sample = training_first_sample(&training, i);
                fill(&loader, false, sample, B, tokens, targets, &perfect);
                for (int b = 0; b < B; b++) {
                    fill(&loader, false, sample + (uint64_t)b, 1, one, targets, &perfect);
                    assert_memory_equal(tokens + b * T, one, sizeof one);
                    assert_true(sample + (uint64_t)b < SAMPLES);
                    visits[sample + (uint64_t)b]++;
                }
            }
        }
        base += (int64_t)each * ranks; // as checkpoint/load.h counts on
    }
    for (int i = 0; i < SAMPLES; i++) { assert_int_equal(visits[i], 1); }
    data_loader_close(&loader);
}

// In each of five turns all micro-batches come once, as equal ranks would number them.
static void test_unequal_ranks_number_everything_once(void **state) {
    static const int turns[][3] = {{4, 1, 2}, {1, 5, 1}, {2, 2, 3}};
    const int even[] = {3, 3};
    (void)state;
    for (int i = 0; i < 3; i++) {
        bool taken[5 * 7] = {false};
        for (int rank = 0; rank < 3; rank++) {
            int count = 5 * turns[i][rank];
            for (int index = 0; index < count; index++) {
                uint64_t number = micro_batch_number(turns[i], 3, rank, (uint64_t)index);
                assert_true(number / 7 == (uint64_t)(index / turns[i][rank]) && !taken[number]);
                taken[number] = true;
            }
            assert_true(micro_batches_passed(turns[i], 3, rank, (uint64_t)count) <= 5 * 7);
        }
    }
    for (int index = 0; index < 10; index++) {
        for (int rank = 0; rank < 2; rank++) {
            assert_int_equal(micro_batch_number(NULL, 2, rank, (uint64_t)index), 2 * index + rank);
            assert_int_equal(micro_batch_number(even, 2, rank, (uint64_t)index), 2 * index + rank);
        }
    }
}

static void test_bad_lists_of_sources(void **state) {
    Scratch *scratch = (Scratch *)*state;
    static const struct {
        const char *list, *words;
    } cases[] = {{"%a:0.5,%b", "b.bin' has no weight"},
                 {"%a,%b:1", "a.bin' has no weight"},
                 {"%a,%b", "a.bin' has no weight"},
                 {"%a:0,%b:1", "a.bin:0' has no weight"},
                 {"%a:-1,%b:1", "a.bin:-1' has no weight"},
                 {"%a:nan,%b:1", "has no weight"},
                 {"%a:1e9,%b:1", "has no weight"},
                 {"%a:1x,%b:1", "has no weight"},
                 {"%a:1,", "'' has no weight"},
                 {"%a:1,:1", "':1' has no weight"},
                 {"%a:1,%b*x:1", "no file matches the pattern"},
                 {"%a:1,%bx:1", "there is no file"},
                 {"%a:1,%a:2", "a.bin is in two sources"},
                 {"%a:1,%c:2", "is in two sources"},
                 {"%a:1,builtin:1", "cannot be mixed"},
                 {"%a:1,%a:1,%a:1,%a:1,%a:1,%a:1,%a:1,%a:1,%a:1", "are more than 8 sources"},
                 {"%a:1,%d:1", "d.bin is too short"}};
    for (const char *name = "a.bin"; name != NULL; name = name[0] == 'a' ? "b.bin" : NULL) {
        write_ids(scratch, name, 100, 0, 200);
    }
    write_ids(scratch, "d.bin", 5, 0, 200);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char list[2048] = "";
        for (const char *c = cases[i].list; *c != '\0'; c++) {
            size_t used = strlen(list);
            if (*c == '%' && c[1] == 'c') {
                snprintf(list + used, sizeof list - used, "%s/./a.bin", scratch->directory), c++;
            } else if (*c == '%') {
                snprintf(list + used, sizeof list - used, "%s/%c.bin", scratch->directory, *++c);
            } else {
                snprintf(list + used, sizeof list - used, "%c", *c);
            }
        }
        DataLoader loader;
        Error error;
        assert_false(try_open(&loader, list, 8, 256, true, &error));
        if (strstr(error.text, cases[i].words) == NULL) { fail_msg("%s: %s", list, error.text); }
        assert_int_equal(loader.file_count, 0);
    }
}

// ---- Whether data are still the same --------------------------------------------------

enum { CHANGED_SIZE = 300 * 1000 };

static const char *write_letters(Scratch *scratch, const char *name, size_t size, size_t changed) {
    char *text = (char *)malloc(size);
    for (size_t i = 0; i < size; i++) { text[i] = (char)('a' + i % 23); }
    if (changed < size) { text[changed] = '!'; }
    write_file(scratch, name, text, size);
    free(text);
    return scratch->path;
}

// What happens to change.txt, or to the second of two files, while it is read.
static void touch(Scratch *s) {
    assert_int_equal(utimensat(AT_FDCWD, scratch_path(s, "change.txt"), NULL, 0), 0);
}
static void rewrite(Scratch *s) { write_letters(s, "change.txt", CHANGED_SIZE, SIZE_MAX); }
static void change_begin(Scratch *s) { write_letters(s, "change.txt", CHANGED_SIZE, 0); }
// The samples are spread evenly: no sixteenth of a file is without one.
static void change_middle(Scratch *s) {
    FILE *file = fopen(scratch_path(s, "change.txt"), "r+");
    assert_non_null(file);
    assert_int_equal(fseek(file, CHANGED_SIZE / 2, SEEK_SET), 0);
    for (int i = 0; i < CHANGED_SIZE / 16; i++) { fputc('!', file); }
    assert_int_equal(fclose(file), 0);
}
static void change_end(Scratch *s) { write_letters(s, "change.txt", CHANGED_SIZE, CHANGED_SIZE - 1); }
static void append(Scratch *s) { write_letters(s, "change.txt", CHANGED_SIZE + 1, SIZE_MAX); }
static void cut(Scratch *s) { assert_int_equal(truncate(scratch_path(s, "change.txt"), 5000), 0); }
static void empty(Scratch *s) { assert_int_equal(truncate(scratch_path(s, "change.txt"), 0), 0); }
static void take_away(Scratch *s) { assert_int_equal(unlink(scratch_path(s, "change.txt")), 0); }
static void replace(Scratch *s) {
    char other[512];
    snprintf(other, sizeof other, "%s", write_letters(s, "other.txt", CHANGED_SIZE, 9));
    assert_int_equal(rename(other, scratch_path(s, "change.txt")), 0);
}

static void test_changes_of_files_are_seen(void **state) {
    static const struct {
        void (*change)(Scratch *scratch);
        const char *what;
        DataChange expected;
        bool is_shorter, same_when_opened_again;
    } changes[] = {
        {touch, "touched", DATA_SAME, false, true},
        {rewrite, "written again", DATA_SAME, false, true},
        {change_begin, "another first byte", DATA_CHANGED, false, false},
        {change_end, "another last byte", DATA_CHANGED, false, false},
        {change_middle, "another middle", DATA_CHANGED, false, false},
        {append, "one byte more", DATA_CHANGED, false, false},
        {cut, "cut", DATA_CHANGED, true, false},
        {empty, "emptied", DATA_CHANGED, true, false},
        {take_away, "removed", DATA_GONE, false, false},
        {replace, "replaced", DATA_GONE, false, false},
    };
    Scratch *scratch = (Scratch *)*state;
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        DataLoader loader, again;
        const DataFile *file;
        char before[DATA_IDENTITY_SIZE], after[DATA_IDENTITY_SIZE];
        int32_t tokens[64], targets[64];
        double perfect;
        Error error = {""};
        open_or_fail(&loader, write_letters(scratch, "change.txt", CHANGED_SIZE, SIZE_MAX), 64, 256, false);
        data_loader_identify(&loader, before);
        assert_int_equal(data_loader_look(&loader, &file), DATA_SAME);
        changes[i].change(scratch);
        bool good = true;
        for (uint64_t sample = 0; sample < 200; sample++) {
            good = good &&
                   data_loader_fill(&loader, DATA_TRAINING, sample, 1, tokens, targets, &perfect, &error);
        }
        DataChange found = data_loader_look(&loader, &file);
        if (found != changes[i].expected || good == changes[i].is_shorter) {
            fail_msg("%s: found %d, %s '%s'", changes[i].what, (int)found, good ? "filled" : "failed",
                     error.text);
        }
        if (!good) { assert_non_null(strstr(error.text, "change.txt has become shorter")); }
        if (found != DATA_SAME) { assert_non_null(strstr(file->path, "change.txt")); }
        // What is gone is said once, what has changed stays changed.
        found = changes[i].expected == DATA_GONE ? DATA_SAME : found;
        assert_int_equal(data_loader_look(&loader, &file), found);
        data_loader_close(&loader);
        if (!try_open(&again, scratch_path(scratch, "change.txt"), 64, 256, false, &error)) { continue; }
        data_loader_identify(&again, after);
        if ((strcmp(before, after) == 0) != changes[i].same_when_opened_again) {
            fail_msg("%s: %s, then %s", changes[i].what, before, after);
        }
        data_loader_close(&again);
    }
}

// Names and directories are not part of what data are, the order of the files is.
static void test_the_identity_is_that_of_the_content(void **state) {
    Scratch *scratch = (Scratch *)*state;
    static const struct {
        const char *names[2];
        size_t changed[2];
        bool same;
    } cases[] = {{{"m-1.txt", "m-2.txt"}, {7, 9}, true},
                 {{"m-3.txt", "m-4.txt"}, {7, 9}, true},
                 {{"m-1.txt", "m-2.txt"}, {9, 7}, false},
                 {{"m-1.txt", "m-2.txt"}, {7, 8}, false}};
    char first[DATA_IDENTITY_SIZE], text[DATA_IDENTITY_SIZE];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        DataLoader loader;
        for (int f = 0; f < 2; f++) { write_letters(scratch, cases[i].names[f], 20000, cases[i].changed[f]); }
        open_or_fail(&loader, scratch_path(scratch, "m-*.txt"), 64, 256, false);
        data_loader_identify(&loader, i == 0 ? first : text);
        if (i > 0 && (strcmp(first, text) == 0) != cases[i].same) { fail_msg("%s, then %s", first, text); }
        data_loader_close(&loader);
        for (int f = 0; f < 2; f++) { unlink(scratch_path(scratch, cases[i].names[f])); }
    }
}

// Of several sources their weights count, but not the scale of these, and where one ends.
static void test_weights_are_part_of_the_identity(void **state) {
    Scratch *scratch = (Scratch *)*state;
    static const char *const lists[][2] = {{"0.7", "0.3"}, {"7", "3"}, {"0.3", "0.7"}, {"0.70001", "0.3"}};
    char one[160], other[160], list[400], first[DATA_IDENTITY_SIZE], text[DATA_IDENTITY_SIZE];
    strcpy(one, write_letters(scratch, "i-1.txt", 20000, 7));
    strcpy(other, write_letters(scratch, "i-2.txt", 20000, 9));
    for (size_t i = 0; i < 5; i++) {
        DataLoader loader;
        bool mixed = i < 4;
        if (mixed) { snprintf(list, sizeof list, "%s:%s,%s:%s", one, lists[i][0], other, lists[i][1]); }
        open_or_fail(&loader, mixed ? list : scratch_path(scratch, "i-*.txt"), 64, 256, false);
        data_loader_identify(&loader, i == 0 ? first : text);
        data_loader_close(&loader);
        if (i == 0) { continue; }
        size_t same = strcspn(first, ";");
        assert_int_equal(strncmp(first, text, same + 1) == 0, mixed); // as checkpoint/load.h compares
        assert_int_equal(strcmp(first, text) == 0, i == 1);
    }
}

// ---- Setup and the list of tests ------------------------------------------------------

static int make_scratch(void **state) {
    Scratch *scratch = (Scratch *)calloc(1, sizeof *scratch);
    snprintf(scratch->directory, sizeof scratch->directory, "/tmp/test_dataloader_XXXXXX");
    *state = scratch;
    return mkdtemp(scratch->directory) == NULL;
}

static void remove_directory(const char *path) {
    DIR *directory = opendir(path);
    for (struct dirent *entry; directory != NULL && (entry = readdir(directory)) != NULL;) {
        char name[600];
        snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
        if (entry->d_name[0] != '.' && unlink(name) != 0) { remove_directory(name); }
    }
    if (directory != NULL) { closedir(directory); }
    rmdir(path);
}

static int remove_scratch(void **state) {
    remove_directory(((Scratch *)*state)->directory);
    free(*state);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_permutation_is_a_bijection),
        cmocka_unit_test(test_permutation_is_fair),
        cmocka_unit_test(test_every_epoch_visits_every_window_once),
        cmocka_unit_test(test_a_batch_is_its_samples),
        cmocka_unit_test(test_the_page_names_the_windows),
        cmocka_unit_test(test_threads_share_a_loader),
        cmocka_unit_test(test_builtin),
        cmocka_unit_test(test_text_is_bytes),
        cmocka_unit_test(test_files_that_divide_documents),
        cmocka_unit_test(test_llmc_files),
        cmocka_unit_test(test_many_files_in_order_of_name),
        cmocka_unit_test(test_hold_out),
        cmocka_unit_test(test_bad_paths_and_files),
        cmocka_unit_test(test_too_little_data),
        cmocka_unit_test(test_masks_leave_something),
        cmocka_unit_test(test_bad_token_at_fill),
        cmocka_unit_test(test_scan_finds_the_position),
        cmocka_unit_test(test_random_bytes_never_crash),
        cmocka_unit_test(test_changes_of_files_are_seen),
        cmocka_unit_test(test_the_identity_is_that_of_the_content),
        cmocka_unit_test(test_weights_are_part_of_the_identity),
        cmocka_unit_test(test_shares_follow_the_weights),
        cmocka_unit_test(test_two_sources_take_turns_as_defined),
        cmocka_unit_test(test_sources_may_have_several_files),
        cmocka_unit_test(test_a_source_is_read_as_if_alone),
        cmocka_unit_test(test_three_ranks_go_on_where_two_were),
        cmocka_unit_test(test_unequal_ranks_number_everything_once),
        cmocka_unit_test(test_bad_lists_of_sources),
    };
    return cmocka_run_group_tests_name("dataloader", tests, make_scratch, remove_scratch);
}
