// test_data.c: what is trained on is what the user means. A text is tokenized by the
// tokenizer of the model, in training as by tokenizer/prepare.py; what is no text, or belongs
// to another tokenizer, is refused.
//
// test/reference/documents_shard.bin was made by an earlier tokenizer/prepare.py, with the
// library `tokenizers`. Both must make it byte for byte:
//
//     python -m tokenizer.prepare --tokenizer test/reference --val-fraction 0
//         --out documents test/reference/documents.txt
#include "test/program/fleet.h"

#include "dataloader.h"
#include "tokenizer/text.h"
#include "tokenizer/tokenize.h"

enum { T = 16, VOCABULARY = 406 };

// ---- Text or not ----------------------------------------------------------------------

static void expect_text(const void *bytes, size_t size, const char *refusal) {
    Error error = {""};
    bool good = text_format_check("file.txt", bytes, size, &error);
    if (refusal == NULL) {
        if (!good) { fail_msg("refused: %s", error.text); }
        return;
    }
    assert_false(good);
    if (strstr(error.text, refusal) == NULL) { fail_msg("'%s' does not say '%s'", error.text, refusal); }
    assert_non_null(strstr(error.text, "file.txt"));
}

static void other_formats_are_named(void **state) {
    (void)state;
    static const struct {
        const char *bytes, *format;
    } files[] = {{"\x1F\x8B\x08", "gzip"}, {"PK\x03\x04", "zip"},   {"\x28\xB5\x2F\xFD", "Zstandard"},
                 {"\xFD\x37zXZ", "xz"},    {"BZh9", "bzip2"},       {"PAR1", "Parquet"},
                 {"ARROW1", "Arrow"},      {"\x93NUMPY", "NumPy"},  {"\x7F\x45LF", "program (ELF)"},
                 {"%PDF-1.4", "PDF"},      {"\xFF\xFEt", "UTF-16"}, {"\xFE\xFF", "UTF-16"}};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        char bytes[64] = "";
        snprintf(bytes, sizeof bytes, "%s and so on", files[i].bytes);
        expect_text(bytes, strlen(bytes), files[i].format);
        expect_text(bytes, strlen(files[i].bytes), files[i].format); // the file ends with it
        expect_text(bytes, 1, NULL);
    }
}

// By their bytes, as prepare knows them; a list of texts or numbers is no list of records.
static void records_are_no_text(void **state) {
    (void)state;
    static const char *const records[] = {"{\"a\": 1}", "\n {\"a\": {\"b\": []}}\nand more", "[ {\"a\":1},",
                                          "\xEF\xBB\xBF\r\n[\t{\"a\":\"\\u0000\"}"};
    static const char *const texts[] = {
        "{}\nno record",  "{not one}",      "[\"a\"]", "<|endoftext|>\n{\"a\": 1}\n",
        "[3]: see below", "[ [{\"a\": 1}]", "[",       "{\"a\": 1"};
    for (size_t i = 0; i < sizeof records / sizeof records[0]; i++) {
        expect_text(records[i], strlen(records[i]), "is JSON");
    }
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        expect_text(texts[i], strlen(texts[i]), NULL);
    }
}

static void binary_bytes_are_counted(void **state) {
    (void)state;
    enum { SIZE = 3 << 20 };
    uint8_t *bytes = (uint8_t *)malloc(SIZE);
    memset(bytes, 'a', SIZE);
    expect_text(bytes, SIZE, NULL);
    for (int i = 0; i < SIZE; i += 250) { bytes[i] = 0xE9; } // a trace of Latin-1
    expect_text(bytes, SIZE, NULL);
    for (int i = 0; i < SIZE; i += 100) { bytes[i] = 0xE9; }
    expect_text(bytes, SIZE, "is not text in UTF-8: 12583 of its first 1048576 bytes are not, or are zero");
    memset(bytes, 0, 5);
    expect_text(bytes, SIZE, "is not text in UTF-8: 12587 of its first 1048576 bytes are not, or are zero");
    memset(bytes, 'a', SIZE);
    for (int i = 0; i + 1 < SIZE; i += 100) { memcpy(bytes + i, "\xC3\xA9", 2); }
    expect_text(bytes, SIZE, NULL);
    for (int i = 2; i < SIZE; i += 2000) { bytes[i] = 0; }
    expect_text(bytes, SIZE, NULL);
    for (int i = 2; i < SIZE; i += 300) { bytes[i] = 0; }
    expect_text(bytes, SIZE, "is not text");
    expect_text("\xE9\xE8", 2, NULL); // too short to say
    expect_text("\xE9\xE8\xE9\xE8", 4, NULL);
    expect_text("\xE9\xE8\xE9\xE8\xE9", 5, "5 of its first 5 bytes");
    expect_text("\0\0\0\0", 4, NULL);
    expect_text("\0\0\0\0\0", 5, "5 of its first 5 bytes");
    expect_text("\0\0\0\0\0\0\0\0\0\0\0\0", 12, ".bin");
    free(bytes);
}

// ---- Token files of texts -------------------------------------------------------------

static Tokenizer open_tokenizer(void) {
    Tokenizer tokenizer;
    Error error;
    if (!tokenizer_open(&tokenizer, "test/reference/tokenizer.json", &error)) { fail_msg("%s", error.text); }
    return tokenizer;
}

static Text map_text(const char *path) {
    Text text = {NULL, 0};
    Error error;
    text.bytes = (const uint8_t *)file_map(path, "a text", &text.size, &error);
    if (text.bytes == NULL) { fail_msg("%s", error.text); }
    return text;
}

// The texts' token file, made with `threads` threads; the caller frees it.
static uint8_t *make_shard(const Stage *stage, const Text *texts, int count, int threads, size_t *size,
                           TokenShards *counts) {
    char path[STAGE_PATH_SIZE];
    Error error = {""};
    Tokenizer tokenizer = open_tokenizer();
    ThreadPool *pool = thread_pool_create(threads, false);
    stage_path(stage, "made.bin", path);
    memset(counts, 0, sizeof *counts);
    counts->name = path;
    if (!tokenize_texts(counts, texts, count, &tokenizer, pool, &error)) { fail_msg("%s", error.text); }
    Text made = map_text(path);
    uint8_t *copy = (uint8_t *)malloc(made.size);
    memcpy(copy, made.bytes, *size = made.size);
    munmap((void *)made.bytes, made.size);
    thread_pool_destroy(pool);
    tokenizer_close(&tokenizer);
    return copy;
}

static void a_token_file_is_that_of_prepare(void **state) {
    Text text = map_text("test/reference/documents.txt"),
         expected = map_text("test/reference/documents_shard.bin");
    TokenShards counts;
    for (int threads = 1; threads <= 3; threads++) {
        size_t size;
        uint8_t *made = make_shard(stage_of(state), &text, 1, threads, &size, &counts);
        assert_int_equal(counts.documents, 16);
        assert_int_equal(counts.empty, 2);
        assert_int_equal(counts.tokens[SHARDS_TRAIN], 1765);
        assert_int_equal(size, expected.size);
        assert_memory_equal(made, expected.bytes, size);
        free(made);
    }
    munmap((void *)text.bytes, text.size);
    munmap((void *)expected.bytes, expected.size);
}

// The bytes of a case. '@' stands for lists in lists.
static void write_case(const char *path, const char *text) {
    FILE *file = fopen(path, "w");
    for (const uint8_t *at = (const uint8_t *)text; *at != '\0'; at++) {
        int byte = *at < 0x80 ? *at : (at[0] & 3) << 6 | (at[1] & 0x3F);
        at += *at >= 0x80;
        if (byte != '@') { fputc(byte, file); }
        for (int i = 0; byte == '@' && i < 6000; i++) { fputc(i < 3000 ? '[' : ']', file); }
    }
    assert_int_equal(fclose(file), 0);
}

// What train_gpt makes of a file at `path`, as a text or as lines of JSON.
static bool run_case(const char *path, bool records, TokenShards *made, Error *error) {
    Tokenizer tokenizer = open_tokenizer();
    ThreadPool *pool = thread_pool_create(2, false);
    DataLoader loader;
    DataRequest request = {.path = path, .sequence_length = 8, .vocabulary = VOCABULARY, .encodes = true};
    bool good = records || data_loader_open(&loader, &request, error);
    if (records) {
        FILE *file = fopen(path, "r");
        good = tokenize_lines(file, made, &tokenizer, pool, error);
        fclose(file);
    } else if (good) {
        Text *texts = data_files_texts(loader.files, loader.file_count);
        good = tokenize_texts(made, texts, loader.file_count, &tokenizer, pool, error);
        free(texts);
        data_loader_close(&loader);
    }
    thread_pool_destroy(pool);
    tokenizer_close(&tokenizer);
    return good;
}

// Odd bytes, marks, lines and numbers: test_documents.py asks prepare for the same.
static void odd_inputs_are_read_as_prepare_reads_them(void **state) {
    char path[STAGE_PATH_SIZE], made_path[STAGE_PATH_SIZE];
    json_t *cases = json_load_file("test/reference/text_cases.json", 0, NULL), *one;
    size_t index, size, k;
    stage_path(stage_of(state), "case.txt", path);
    stage_path(stage_of(state), "case.bin", made_path);
    assert_true(json_array_size(cases) > 20);
    json_array_foreach(cases, index, one) {
        const char *name = json_string_value(json_object_get(one, "name")),
                   *refused = json_string_value(json_object_get(one, "refused"));
        const json_t *ids = json_object_get(one, "ids");
        Error error = {""};
        TokenFile file;
        TokenShards made = {.name = made_path};
        write_case(path, json_string_value(json_object_get(one, "bytes")));
        bool good = run_case(path, json_is_true(json_object_get(one, "records")), &made, &error);
        if (good != (refused == NULL)) { fail_msg("%s: %s", name, error.text); }
        if (refused != NULL && strstr(error.text, refused) == NULL) { fail_msg("%s: %s", name, error.text); }
        if (refused != NULL) { continue; }
        void *bytes = file_map(made_path, "a token file", &size, &error);
        assert_true(token_file_open(&file, made_path, bytes, size, TOKEN_FILE_CHECK_ALL, &error));
        bool same = file.token_count == json_array_size(ids);
        for (k = 0; same && k < file.token_count; k++) {
            same = token_file_token(&file, k) == (uint32_t)json_integer_value(json_array_get(ids, k));
        }
        same = same && made.odd == (uint64_t)json_integer_value(json_object_get(one, "odd")) &&
               made.spelling == (uint64_t)json_integer_value(json_object_get(one, "spelling")) &&
               made.empty == (uint64_t)json_integer_value(json_object_get(one, "empty"));
        if (!same) { fail_msg("%s: other tokens or counts", name); }
        munmap(bytes, size);
    }
    json_decref(cases);
}

// The tokens of many tasks and of several texts come in the order of the texts.
static void many_documents_stay_in_order(void **state) {
    enum { DOCUMENTS = 60000, TEXTS = 3 };
    Tokenizer tokenizer = open_tokenizer();
    char *joined[TEXTS];
    size_t sizes[TEXTS];
    FILE *files[TEXTS];
    for (int i = 0; i < TEXTS; i++) { files[i] = open_memstream(&joined[i], &sizes[i]); }
    TokenList expected = {NULL, 0, 0};
    Text texts[TEXTS];
    Error error;
    int64_t bytes = 0;
    for (int i = 0; i < DOCUMENTS; i++) {
        char document[128], line[160];
        snprintf(document, sizeof document, "the cat number %d sat on %d mats", i, i * 7919 % 1000);
        snprintf(line, sizeof line, "%s\n<|endoftext|>\n", document);
        fputs(line, files[i * TEXTS / DOCUMENTS]);
        assert_true(tokenizer_encode(&tokenizer, document, strlen(document), false, &expected, &error));
        token_list_add(&expected, 0);
        bytes += (int64_t)strlen(document);
    }
    for (int i = 0; i < TEXTS; i++) {
        fclose(files[i]);
        texts[i].bytes = (const uint8_t *)joined[i];
        texts[i].size = sizes[i];
    }
    assert_true(sizes[0] > ENCODE_TASK_BYTES);
    for (int threads = 1; threads <= 2; threads++) {
        TokenShards counts;
        TokenFile file;
        size_t size;
        uint8_t *made = make_shard(stage_of(state), texts, TEXTS, threads, &size, &counts);
        assert_int_equal(counts.documents, DOCUMENTS);
        assert_int_equal(counts.bytes, bytes);
        assert_true(token_file_open(&file, "made.bin", made, size, TOKEN_FILE_CHECK_ALL, &error));
        assert_true(file.tokenizer == tokenizer.sum);
        assert_int_equal(file.vocabulary, VOCABULARY);
        assert_int_equal(file.token_count, expected.count);
        for (size_t i = 0; i < expected.count; i++) {
            if (token_file_token(&file, i) != (uint32_t)expected.ids[i]) { fail_msg("token %zu differs", i); }
        }
        free(made);
    }
    for (int i = 0; i < TEXTS; i++) { free(joined[i]); }
    token_list_free(&expected);
    tokenizer_close(&tokenizer);
}

// A document that is too long is cut before `before`, loses nothing, and ends once.
static void check_long_document(const char *unit, char before) {
    enum { SIZE = 2 * TEXT_DOCUMENT_BYTES + 1000 };
    static const char end[] = "end\n<|endoftext|>\nnext";
    char *bytes = (char *)malloc(SIZE + sizeof end);
    size_t length = strlen(unit), seen = 0;
    for (size_t i = 0; i < SIZE; i++) { bytes[i] = unit[i % length]; }
    memcpy(bytes + SIZE, end, sizeof end);
    Text text = {(const uint8_t *)bytes, SIZE + sizeof end - 1};
    TextCursor cursor = {.texts = &text, .count = 1};
    DocumentPart part;
    int pieces = 0;
    memset(&part, 0, sizeof part);
    for (; text_next_part(&cursor, &part) && part.bytes == text.bytes + seen; pieces++) {
        if (pieces > 0 && before != '\0') { assert_int_equal(part.bytes[0], before); }
        assert_true((part.bytes[0] & 0xC0) != 0x80);
        assert_true(part.count <= TEXT_DOCUMENT_BYTES);
        seen += part.count;
        assert_int_equal(part.ends, seen == SIZE + 3);
    }
    assert_int_equal(seen, SIZE + 3);
    assert_int_equal(pieces, 3);
    assert_int_equal(part.count, 4);
    assert_memory_equal(part.bytes, "next", 4);
    assert_true(part.ends);
    assert_false(text_next_part(&cursor, &part));
    free(bytes);
}

static void long_documents_are_cut(void **state) {
    (void)state;
    check_long_document("a line of words\n", '\n');
    check_long_document("one line of words ", ' ');
    check_long_document("\xE6\x97\xA5\xC3\xA9", '\0');
}

// No line end stands behind the mark, and a byte more would be too long: one document, as
// tokenizer.prepare makes of it.
static void the_end_of_a_longest_document_is_found(void **state) {
    (void)state;
    static const char end[] = "<|endoftext|>";
    char *bytes = (char *)malloc(TEXT_DOCUMENT_BYTES);
    memset(bytes, 'a', TEXT_DOCUMENT_BYTES);
    memcpy(bytes + TEXT_DOCUMENT_BYTES - strlen(end), end, strlen(end));
    Text text = {(const uint8_t *)bytes, TEXT_DOCUMENT_BYTES};
    TextCursor cursor = {.texts = &text, .count = 1};
    DocumentPart part;
    assert_true(text_next_part(&cursor, &part));
    assert_int_equal(part.count, TEXT_DOCUMENT_BYTES - strlen(end));
    assert_true(part.ends);
    assert_false(text_next_part(&cursor, &part));
    free(bytes);
}

// A file of the same name is used again, so the name must differ with every byte, and with the
// tokens that end a text and stand in front of it.
static void the_name_follows_from_every_byte(void **state) {
    (void)state;
    enum { SIZE = 100000, NAMES = 9 };
    char names[NAMES][TEXTS_NAME_SIZE], again[TEXTS_NAME_SIZE];
    Tokenizer tokenizer = open_tokenizer();
    uint8_t *bytes = (uint8_t *)calloc(1, SIZE);
    Text whole = {bytes, SIZE}, shorter = {bytes, SIZE - 1}, parts[2] = {{bytes, 50}, {bytes, SIZE - 50}};
    texts_name(&whole, 1, &tokenizer, names[0]);
    texts_name(&shorter, 1, &tokenizer, names[1]);
    texts_name(parts, 2, &tokenizer, names[2]);
    tokenizer.sum ^= 1;
    texts_name(&whole, 1, &tokenizer, names[3]);
    tokenizer.sum ^= 1;
    tokenizer.end += 2;
    texts_name(&whole, 1, &tokenizer, names[7]);
    tokenizer.end -= 2;
    tokenizer.begin += 2;
    texts_name(&whole, 1, &tokenizer, names[8]);
    tokenizer.begin -= 2;
    for (int i = 0; i < 3; i++) {
        size_t at = i == 0 ? 0 : i == 1 ? SIZE / 2 : SIZE - 1;
        bytes[at] ^= 1;
        texts_name(&whole, 1, &tokenizer, names[4 + i]);
        bytes[at] ^= 1;
    }
    for (int i = 0; i < NAMES; i++) {
        for (int k = 0; k < i; k++) { assert_string_not_equal(names[i], names[k]); }
    }
    texts_name(&whole, 1, &tokenizer, again);
    assert_string_equal(again, names[0]);
    tokenizer_close(&tokenizer);
    free(bytes);
}

// ---- tokenizer/prepare.py, where its environment is built (make tokenizer) ------------

// Runs a command of the shell in the root of the project. True: it exits with 0. Variables:
// stage, the directory of the stage, and python.
static bool runs_in_root(const Stage *stage, const char *command) {
    char all[8 * STAGE_PATH_SIZE];
    snprintf(all, sizeof all, "cd '%s' && stage='%s' && python=build/venv/bin/python && %s", stage->root,
             stage->directory, command);
    return system(all) == 0;
}

#define PREPARE "$python -m tokenizer.prepare --tokenizer test/reference --threads 1 "

static void prepare_reads_packed_texts_and_refuses_the_rest(void **state) {
    static const char *const commands[] = {
        "gzip -c test/reference/documents.txt > $stage/d.txt.gz && cp $stage/d.txt.gz $stage/gz.txt",
        "$python -c 'import pyarrow, sys; out = pyarrow.CompressedOutputStream(sys.argv[2], \"zstd\"); "
        "out.write(open(sys.argv[1], \"rb\").read()); out.close()' test/reference/documents.txt "
        "$stage/d.txt.zst",
        PREPARE "--val-fraction 0 --out $stage/gz $stage/d.txt.gz > $stage/out.txt",
        "cmp $stage/gz_train_00000.bin test/reference/documents_shard.bin",
        "! grep -q 'one document' $stage/out.txt",
        PREPARE "--val-fraction 0 --out $stage/zst $stage/d.txt.zst > $stage/out.txt",
        "cmp $stage/zst_train_00000.bin test/reference/documents_shard.bin",
        ": > $stage/empty.txt && ! " PREPARE "--out $stage/e $stage/empty.txt 2> $stage/out.txt",
        "grep -q 'empty.txt is empty' $stage/out.txt && ! test -e $stage/e.prepared.json",
        PREPARE "--val-fraction 0 --out $stage/f $stage/gz.txt > $stage/out.txt",
        "cmp $stage/f_train_00000.bin test/reference/documents_shard.bin",
        "printf '\\n<|endoftext|>\\n' > $stage/ends.txt && ! " PREPARE
        "--out $stage/n $stage/ends.txt 2> $stage/out.txt",
        "grep -q 'there is no document in' $stage/out.txt && ! test -e $stage/n.prepared.json",
        "echo one > $stage/one.txt && " PREPARE "--out $stage/o $stage/one.txt > $stage/out.txt",
        "grep -q 'one.txt: one document' $stage/out.txt && grep -q 'nothing is held out' $stage/out.txt",
    };
    Stage *stage = stage_of(state);
    if (!runs_in_root(stage, "test -x $python && test -x train_gpt")) {
        leave_out("what prepares tokens (make tokenizer)");
    }
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        if (!runs_in_root(stage, commands[i])) { fail_msg("it fails: %s", commands[i]); }
    }
}

// ---- Training on texts ----------------------------------------------------------------

// Runs the program with base.json; the run must end with `exit_code`.
static Outcome run_base(Stage *stage, int ranks, int exit_code, const char *arguments) {
    char all[1024];
    snprintf(all, sizeof all, "--config base.json %s", arguments);
    Outcome outcome = program_run(stage, ranks, all);
    outcome_check(&outcome, exit_code, arguments);
    return outcome;
}

// A text gives the bits of the token file that prepare.py makes of it, wherever the model
// has its tokenizer from.
static void a_text_trains_as_its_tokens_do(void **state) {
    char epochs[64];
    Stage *stage = stage_of(state);
    Fleet *fleet = fleet_new(stage);
    run_base(stage, 0, 0, "--tokenizer bpe --data documents.bin --out start");
    const char *from = "--from start/checkpoints/commit-40";
    fleet_start(fleet, 0, "--tokenizer bpe --data documents.bin");
    fleet_start(fleet, 0, "--tokenizer bpe --data documents.txt --threads 2");
    fleet_start(fleet, 0, "%s --data documents.bin", from);
    fleet_start(fleet, 0, "%s --data documents.txt", from);
    fleet_start(fleet, 0, "--finetune start/checkpoints/commit-40/model --data documents.bin");
    fleet_start(fleet, 0, "--finetune start/checkpoints/commit-40/model --data documents.txt");
    fleet_start(fleet, 0, "--resume start/checkpoints/commit-40 --tokens 2560 --data documents.bin");
    fleet_start(fleet, 0, "--resume start/checkpoints/commit-40 --tokens 2560 --data documents.txt");
    fleet_start(fleet, 0, "--tokenizer bpe --data documents.bin --val-data held.bin");
    fleet_start(fleet, 0, "--tokenizer bpe --data documents.txt --val-data held.txt");
    fleet_start(fleet, 0, "--tokenizer bpe --data documents.bin --val-data held.txt");
    fleet_start(fleet, 0, "--tokenizer bpe --data documents.bin --epochs 2.5");
    fleet_start(fleet, 0, "--tokenizer bpe --data documents.txt --epochs 2.5");
    fleet_finish(fleet);
    for (int i = 0; i < 8; i += 2) { check_same(fleet, i, i + 1); }
    check_same(fleet, 11, 12); // the text's tokens were counted when they were made
    json_t *start = log_event_of(fleet->events[12], "start", 0);
    snprintf(epochs, sizeof epochs, " commits (%.4g epochs)",
             2.5 * log_number(log_event_of(fleet->events[12], "end", -1), "tokens") /
                 log_number(json_object_get(start, "options"), "tokens"));
    text_check(fleet_output(fleet, 12), epochs, "--epochs of a text");
    for (int i = 9; i < 11; i++) {
        check_same(fleet, i, 8);
        assert_true(fleet_number(fleet, i, "validation", -1, "loss") ==
                    fleet_number(fleet, 8, "validation", -1, "loss"));
    }
}

// A run that is resumed without naming its tokenizer again keeps it, also when the
// checkpoint that it came from is removed.
static void the_tokenizer_goes_from_checkpoint_to_checkpoint(void **state) {
    Stage *stage = stage_of(state);
    char path[STAGE_PATH_SIZE];
    struct stat status;
    const char *options = "--data documents.txt --keep 1 --out goes-on";
    char start[256], on[256];
    snprintf(start, sizeof start, "%s --tokenizer bpe", options);
    snprintf(on, sizeof on, "%s --resume auto --save-every 10 --tokens %d", options, 80 * T);
    run_base(stage, 0, 0, start);
    run_base(stage, 0, 0, on);
    assert_int_equal(
        stat(stage_path(stage, "goes-on/checkpoints/commit-80/model/tokenizer.json", path), &status), 0);
    assert_int_not_equal(stat(stage_path(stage, "goes-on/checkpoints/commit-40", path), &status), 0);
}

// What a run samples is the whole model, also where it trains a part of one that others have
// trained.
static void a_part_samples_as_the_whole_model(void **state) {
    Stage *stage = stage_of(state);
    static const char *const parts[] = {"--lora-rank 2", "--freeze wte,h.0.*"};
    static const char sample[] = "--prompt 'the cat' --temperature 1 --top-k off --seed 7 --sample-tokens 30";
    char arguments[512];
    run_base(stage, 0, 0, "--tokenizer bpe --data documents.txt --out all-of-it");
    snprintf(arguments, sizeof arguments, "sample --from all-of-it %s", sample);
    Outcome before = program_run(stage, 0, arguments);
    outcome_check(&before, 0, arguments);
    for (int i = 0; i < 2; i++) {
        snprintf(arguments, sizeof arguments,
                 "--finetune all-of-it %s --lr 1 --data documents.txt --out part-%d %s", parts[i], i, sample);
        run_base(stage, 0, 0, arguments);
        snprintf(arguments, sizeof arguments, "part-%d", i);
        json_t *events = log_read(stage, arguments);
        const char *said = json_string_value(json_object_get(log_event_of(events, "sample", -1), "text"));
        assert_non_null(said);
        snprintf(arguments, sizeof arguments, "sample --from part-%d %s", i, sample);
        Outcome outcome = program_run(stage, 0, arguments);
        outcome_check(&outcome, 0, arguments);
        text_check(outcome.output, said, arguments);
        if (strstr(before.output, said) != NULL) {
            fail_msg("%s: <%s>, before: %s", arguments, said, before.output);
        }
        json_decref(events);
    }
}

// Adapters that have no tokenizer, as peft writes them, have that of their model.
static void adapters_have_the_tokenizer_of_their_model(void **state) {
    Stage *stage = stage_of(state);
    run_base(stage, 0, 0, "--tokenizer bpe --data documents.txt --out whole");
    run_base(stage, 0, 0,
             "--finetune whole/checkpoints/commit-40 --lora-rank 2 --data documents.txt --out adapted");
    shell(stage,
          "cp -r adapted/checkpoints/commit-40/model bare && cd bare && rm checksums.json tokenizer.json");
    static const char *const commands[] = {"sample --from %s --prompt 'the cat' --sample-tokens 9",
                                           "eval --from %s --data documents.txt"};
    for (int i = 0; i < 2; i++) {
        char arguments[2][256];
        Outcome outcomes[2];
        for (int k = 0; k < 2; k++) {
            snprintf(arguments[k], sizeof arguments[k], commands[i],
                     k == 0 ? "adapted/checkpoints/commit-40" : "bare");
            outcomes[k] = program_run(stage, 0, arguments[k]);
            outcome_check(&outcomes[k], 0, arguments[k]);
        }
        text_check(outcomes[1].output, i == 0 ? "the cat" : "bits per byte", arguments[1]);
        const char *part = i == 0 ? "the cat" : "nats per token";
        assert_string_equal(strstr(outcomes[1].output, part), strstr(outcomes[0].output, part));
    }
    run_base(stage, 0, 0, "--from bare --data documents.txt --out from-bare");
    shell(stage, "cmp bpe/tokenizer.json from-bare/checkpoints/commit-40/model/tokenizer.json");
}

// Attention inside documents: the same bits of a text and of its tokens, with any threads and
// overlap, and after a resume; other bits than attention over all. Its validation is what
// eval measures so.
static void attention_stays_in_documents(void **state) {
    Stage *stage = stage_of(state);
    Fleet *fleet = fleet_new(stage);
    const char *all =
                   "--tokenizer bpe --data documents.bin --val-data held.bin --val-batches 1000 --seq-len 15",
               *inside =
                   "--tokenizer bpe --val-data held.bin --val-batches 1000 --seq-len 15 --attend document";
    run_base(stage, 0, 0,
             "--tokenizer bpe --data documents.bin --val-data held.bin --val-batches 1000 --seq-len 15 "
             "--attend document --lr 0.03 --tokens 4800 --save-every 20 --keep 99 --out inside");
    fleet_start(fleet, 0, "%s --lr 0.03 --tokens 4800", all);
    fleet_start(fleet, 0, "%s --lr 0.03 --tokens 4800 --data documents.bin --threads 1", inside);
    fleet_start(fleet, 0, "%s --lr 0.03 --tokens 4800 --data documents.txt --threads 3", inside);
    fleet_start(fleet, 0, "%s --lr 0.03 --tokens 4800 --data documents.bin --overlap off", inside);
    fleet_start(fleet, 0,
                "%s --lr 0.03 --tokens 4800 --data documents.bin --resume inside/checkpoints/commit-20",
                inside);
    fleet_start(fleet, 0, "%s --lr 0.03 --tokens 4800 --resume inside/checkpoints/commit-20", all);
    fleet_finish(fleet);
    for (int i = 2; i < 5; i++) { check_same(fleet, 1, i); }
    double loss = fleet_number(fleet, 1, "validation", -1, "loss");
    assert_string_not_equal(fleet->prints[0].text, fleet->prints[1].text);
    assert_string_not_equal(fleet->prints[5].text, fleet->prints[0].text);
    text_check(fleet_output(fleet, 5), "--attend", "a resume with attention over all");
    for (int i = 0; i < 3; i++) {
        char arguments[256];
        snprintf(arguments, sizeof arguments,
                 "eval --from inside --seq-len 16 --stride 15 --limit 117 --attend %s --data held.%s",
                 i < 2 ? "document" : "all", i == 0 ? "bin" : "txt");
        Outcome outcome = program_run(stage, 0, arguments);
        outcome_check(&outcome, 0, arguments);
        double nats = text_number(outcome.output, "nats per token", arguments);
        assert_true((fabs(nats - loss) < 1e-5) == (i < 2));
    }
}

static void two_ranks_share_the_tokens_of_a_text(void **state) {
    Fleet *fleet = fleet_new(stage_with_ranks(state));
    fleet_start(fleet, 2, "--tokenizer bpe --data documents.bin");
    fleet_start(fleet, 2, "--tokenizer bpe --data documents.txt");
    fleet_finish(fleet);
    check_same(fleet, 0, 1);
    assert_int_equal(text_count(fleet_output(fleet, 1), "tokenizing "), 1);
}

#define IN_EPOCHS \
    "--tokenizer bpe --data documents.txt --epochs 2.5 --optimizer acco --accumulate 4 --acco-split auto "

// A run that is resumed as it was keeps what it has measured, although its epochs, and with
// them the commits of its warm-up, are counted only when the text has been tokenized.
static void what_was_measured_is_kept_before_epochs_are_counted(void **state) {
    static const char *const choices[][2] = {
        {IN_EPOCHS "--sequential warmup --resume counted/checkpoints/commit-2",
         "options    where the program chooses, as in counted/"},
        {IN_EPOCHS "--sequential warmup --wire bf16 --resume counted/checkpoints/commit-2",
         "\n           measured: "},
    };
    Stage *stage = stage_with_ranks(state);
    run_base(stage, 2, 0, IN_EPOCHS "--sequential warmup --save-every 1 --keep 100 --out counted");
    for (int i = 0; i < 2; i++) {
        Outcome outcome = run_base(stage, 2, 0, choices[i][0]);
        text_check(outcome.output, choices[i][1], choices[i][0]);
    }
}

// Only the right file is used again: a text of the same size and time is not the same
// text, and a damaged token file is made again.
static void tokens_are_made_again_where_they_must(void **state) {
    Stage *stage = stage_of(state);
    char command[4 * STAGE_PATH_SIZE];
    const char *options = "--tokenizer bpe --data again.txt --out again --resume auto";
    char *text = file_read("test/reference/documents.txt");
    stage_write(stage, "again.txt", text);
    text_check(run_base(stage, 0, 0, options).output, "tokenizing again.txt", "the first start");
    Outcome second = run_base(stage, 0, 0, options);
    text_check(second.output, "made before", "the second start");
    assert_null(strstr(second.output, "tokenizing"));
    snprintf(
        command, sizeof command,
        "cd '%s' && for file in again/tokens-*.bin; do printf x | dd of=$file bs=1 seek=300 conv=notrunc "
        "2> dd.txt; done && cp -p again.txt kept.txt",
        stage->directory);
    assert_int_equal(system(command), 0);
    text_check(run_base(stage, 0, 0, options).output, "tokenizing again.txt", "a damaged token file");
    text[100] = text[100] == 'x' ? 'y' : 'x';
    stage_write(stage, "again.txt", text);
    free(text);
    snprintf(command, sizeof command, "cd '%s' && touch -r kept.txt again.txt", stage->directory);
    assert_int_equal(system(command), 0);
    text_check(run_base(stage, 0, 0, options).output, "tokenizing again.txt",
               "another text of the same size and time");
}

// A disk that fills ends the run in one line, with nothing that the next start could take
// for the tokens.
static void a_full_disk_leaves_no_tokens(void **state) {
    Stage *stage = stage_of(state);
    char text[20000], command[4 * STAGE_PATH_SIZE];
    Setting setting = {.file_bytes = 16384, .ignore_xfsz = true};
    for (size_t i = 0; i < sizeof text - 1; i++) { text[i] = (char)('a' + i * i % 23); }
    text[sizeof text - 1] = '\0';
    stage_write(stage, "long.txt", text);
    const char *arguments = "--config base.json --tokenizer bpe --data long.txt --out full";
    Outcome outcome = program_run_with(stage, 0, &setting, arguments);
    outcome_check(&outcome, 3, arguments);
    text_check(outcome.errors, "cannot write full/tokens-", arguments);
    snprintf(command, sizeof command, "test \"$(ls -A '%s/full' | tr '\\n' ' ')\" = 'config.json lock '",
             stage->directory);
    assert_int_equal(system(command), 0);
    outcome = program_run(stage, 0, arguments);
    outcome_check(&outcome, 0, arguments);
}

// ---- Refusals -------------------------------------------------------------------------

static const struct {
    const char *arguments, *part;
} refusals[] = {
    {"--data documents.txt", "--tokenizer DIR"},
    {"--data documents.txt", "python -m tokenizer.prepare"},
    {"--tokenizer bpe", "the built-in corpus is made of bytes: name a text or token files with --data"},
    {"--from plain/checkpoints/commit-40", "--data"},
    {"--from plain/checkpoints/commit-40 --data documents.txt", "--tokenizer DIR"},
    {"--data documents.bin --val-data documents.txt", "--tokenizer DIR"},
    {"--model bytes.json --data ids.bin --val-data documents.txt", "holds token ids"},
    {"--model bytes.json --data documents.txt --val-data ids.bin", "is read as bytes"},
    {"--model bytes.json --val-data ids.bin", "is read as bytes"},
    {"--data documents.bin --val-data foreign.bin", "made by different tokenizers"},
    {"--tokenizer bpe --data documents.txt --val-data foreign.bin",
     "is not the tokenizer that made foreign.bin"},
    {"--tokenizer bpe --data documents.bin --val-data foreign.bin", "made by different tokenizers"},
    {"--tokenizer bpe --data foreign.bin", "is not the tokenizer that made foreign.bin"},
    {"--data '*n*.bin'", "made by different tokenizers"},
    {"--tokenizer endless --data documents.txt", "no token <|endoftext|>"},
    {"--tokenizer old --data documents.txt",
     "old has a vocab.json, but no tokenizer.json: transformers makes it"},
    {"--tokenizer bpe --data packed.txt", "packed.txt looks like a gzip archive"},
    {"--model bytes.json --data packed.txt", "packed.txt looks like a gzip archive"},
    {"--model bytes.json --data ids32.bin", "ids32.bin looks like ids of 32 bits"},
    {"--data ids64.bin", "ids64.bin looks like ids of 64 bits"},
    {"--data pointer.bin", "pointer.bin is only the pointer that Git LFS leaves in place of a file: run git"},
    {"--tokenizer bpe --data pointer.txt", "pointer.txt is only the pointer that Git LFS leaves"},
    {"--tokenizer pointer.txt --data documents.txt", "pointer.txt is only the pointer that Git LFS leaves"},
    {"--model bytes.json --data model.json", "model.json is JSON, and its braces"},
    {"--model bytes.json --data documents.txt --val-data packed.txt", "packed.txt looks like a gzip archive"},
    {"--tokenizer bpe --data short.txt", "is too short"},
    {"--tokenizer bpe --data documents.txt --epochs 0.001", "--tokens 2 is less than one commit"},
    {"--tokenizer bpe --data documents.txt:1,held.txt:2 --epochs 1", "has epochs of its own"},
    {"--tokenizer bpe --data documents.txt:1,documents.txt:2", "documents.txt is in two sources"},
    {"--tokenizer bpe --data documents.txt:1,documents.bin:2", "one is text, the other holds token ids"},
    {"--tokenizer bpe --data documents.bin:1,foreign.bin:2", "different tokenizers"},
    {"--data ids.bin:1,documents.bin:1,foreign.bin:1", // the first one names none
     "foreign.bin and the files before it were made by different tokenizers"},
    {"--tokenizer bpe --data documents.txt --val-data held.txt:1,documents.txt:2", "among --data, too"},
    {"--tokenizer bpe --data documents.txt:1,held.txt", "'held.txt' has no weight"},
    {"--attend document --data ids.bin", "ids.bin does not say which token divides its documents. --attend"},
    {"--attend document --model bytes.json", "builtin is read as bytes, and no token divides"},
    {"--attend document --model bytes.json --data documents.txt", "documents.txt is read as bytes"},
    {"--attend document --tokenizer bpe --data documents.txt --val-data ids.bin",
     "ids.bin does not say which"},
    {"--tokenizer bpe --data documents.bin --epochs 1 --slow-rank 7 --slow-ms 1", "train_gpt: --slow-rank 7"},
};

static void what_does_not_fit_is_refused(void **state) {
    Stage *stage = stage_of(state);
    run_base(stage, 0, 0, "--data documents.bin --out plain"); // a model without a tokenizer
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
        char arguments[512];
        snprintf(arguments, sizeof arguments, "%s --out refused", refusals[i].arguments);
        Outcome outcome = run_base(stage, 0, 2, arguments);
        text_check(outcome.errors, refusals[i].part, arguments);
        assert_int_equal(text_lines(outcome.errors), 1);
    }
    // Nothing is in the way of the next try, also where a text was too short.
    run_base(stage, 0, 0, "--tokenizer bpe --data documents.txt --out refused");
}

// What ends before it trains, here because its text is too short, goes on with its options.
static void a_run_that_ends_early_goes_on_with_its_options(void **state) {
    Stage *stage = stage_of(state);
    shell(stage, "cp short.txt early.txt");
    run_base(stage, 0, 2, "--tokenizer bpe --data early.txt --lr 0.0123 --out early");
    shell(stage, "cp documents.txt early.txt");
    Outcome outcome = program_run(stage, 0, "--out early --resume auto");
    outcome_check(&outcome, 0, "--resume auto");
    text_check(outcome.output, "rate       peak 0.0123", "--resume auto");
    // A mistake in what is not given now is said to be there.
    shell(stage, "rm early.txt");
    outcome = program_run(stage, 0, "--out early --resume auto");
    outcome_check(&outcome, 2, "--resume auto");
    text_check(outcome.errors, "there is no file 'early.txt'", "--resume auto");
    text_check(outcome.errors, "; what is not given is as in early/config.json\n", "--resume auto");
}

static void two_ranks_refuse_once(void **state) {
    Stage *stage = stage_with_ranks(state);
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i += 17) {
        Outcome outcome = run_base(stage, 2, 2, refusals[i].arguments);
        text_check(outcome.errors, refusals[i].part, refusals[i].arguments);
        assert_int_equal(text_count(outcome.errors, "train_gpt: "), 1);
    }
}

static void an_evaluation_refuses_what_is_no_text(void **state) {
    Stage *stage = stage_of(state);
    run_base(stage, 0, 0, "--model bytes.json --data documents.txt --out bytes");
    Outcome outcome = program_run(stage, 0, "eval --from bytes/checkpoints/commit-40 --data packed.txt");
    outcome_check(&outcome, 2, "eval");
    text_check(outcome.errors, "packed.txt looks like a gzip archive", "eval");
}

// A byte order mark is no part of a text, a prompt, a record, a model or a tokenizer.
static void byte_order_marks_are_skipped(void **state) {
    Stage *stage = stage_of(state);
    run_base(stage, 0, 0, "--tokenizer bpe --data documents.bin --out unmarked");
    shell(stage,
          "cp -r unmarked/checkpoints/commit-40/model model-0 && rm -f model-0/checksums.json && "
          "echo '{\"eos_token_id\": 0}' > model-0/generation_config.json && cp documents.txt text-0 && "
          "printf 'the cat\\na hat\\n' > prompts-0 && printf '{\"text\": \"the cat has a hat\"}\\n' > "
          "words-0 && "
          "cp -r model-0 model-1 && for name in text prompts words model/config.json model/tokenizer.json "
          "model/generation_config.json; do from=$(echo $name | sed 's/^[a-z]*/&-0/'); "
          "to=$(echo $name | sed 's/^[a-z]*/&-1/'); { printf '\\357\\273\\277'; cat $from; } > $to; done");
    static const char *const commands[] = {
        "sample --from model-%d --prompts prompts-%d --temperature 0 --sample-tokens 10",
        "eval --from model-%d --task lambada --data words-%d",
        "eval --from model-%d --data text-%d --stride 5"};
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        char arguments[2][256];
        Outcome outcomes[2];
        const char *results[2];
        for (int k = 0; k < 2; k++) {
            snprintf(arguments[k], sizeof arguments[k], commands[i], k, k);
            outcomes[k] = program_run(stage, 0, arguments[k]);
            outcome_check(&outcomes[k], 0, arguments[k]);
            results[k] = strstr(outcomes[k].output, i == 0 ? "the cat" : i == 1 ? "perplexity" : "windows");
            assert_non_null(results[k]);
        }
        assert_string_equal(results[0], results[1]);
    }
}

// Where the tokenizer has no <|endoftext|>, the end is what tokenizer_config.json says, also in
// the checkpoints of a run.
static void another_token_ends_a_text(void **state) {
    Stage *stage = stage_of(state);
    shell(stage, "cp -r endless paged && echo '{\"eos_token\": \"<|endofpage|>\", "
                 "\"model_max_length\": 1000000000000000019884624838656}' > paged/tokenizer_config.json");
    run_base(stage, 0, 0, "--tokenizer paged --data documents.txt --out pages");
    run_base(stage, 0, 0, "--tokenizer bpe --data documents.txt --out texts");
    shell(stage, "for run in pages texts; do tail -c +257 $run/tokens-*.bin > $run.ids; done && cmp "
                 "pages.ids texts.ids");
    Outcome outcome = program_run(stage, 0, "eval --from pages/checkpoints/commit-40 --data documents.txt");
    outcome_check(&outcome, 0, "eval");
}

// What an evaluation prints behind the name of its data.
static const char *evaluated(Stage *stage, const char *options) {
    char arguments[256];
    snprintf(arguments, sizeof arguments, "eval %s --stride 5", options);
    Outcome outcome = program_run(stage, 0, arguments);
    outcome_check(&outcome, 0, arguments);
    const char *after = strstr(outcome.output, "\nwindows");
    assert_non_null(after);
    text_check(after, "bits per byte", arguments);
    return after;
}

// documents.bin is what prepare makes of documents.txt. But for the name of the data the two
// evaluations print the same, to the last digit.
static void a_text_is_evaluated_as_its_tokens_are(void **state) {
    Stage *stage = stage_of(state);
    const char *after[2];
    run_base(stage, 0, 0, "--tokenizer bpe --data documents.bin --out evaluated");
    after[0] = evaluated(stage, "--from evaluated --data documents.bin");
    after[1] = evaluated(stage, "--from evaluated --data documents.txt");
    assert_string_equal(after[0], after[1]);
    // Bits per byte are over the bytes of the documents, but for the first token, which is not
    // predicted.
    Text text = map_text("test/reference/documents.txt"),
         shard = map_text("test/reference/documents_shard.bin");
    TextCursor cursor = {.texts = &text, .count = 1};
    Tokenizer tokenizer;
    TokenFile file;
    Error error;
    double bytes = 0;
    size_t first = 0;
    for (DocumentPart part; text_next_part(&cursor, &part);) { bytes += (double)part.count; }
    assert_true(tokenizer_open(&tokenizer, "test/reference/tokenizer.json", &error));
    assert_true(token_file_open(&file, "shard", shard.bytes, shard.size, TOKEN_FILE_CHECK_ALL, &error));
    tokenizer_bytes(&tokenizer, (int32_t)token_file_token(&file, 0), &first);
    double nats = text_number(after[1], "nats per token", "eval") * text_number(after[1], "tokens", "eval");
    assert_close(nats / log(2.0) / text_number(after[1], "bits per byte", "eval"), bytes - (double)first,
                 1e-5 * bytes, "bytes");
    tokenizer_close(&tokenizer);
    munmap((void *)text.bytes, text.size);
    munmap((void *)shard.bytes, shard.size);
}

// The token that tokenizer.json puts in front of a text begins each document, in the tokens of a
// run as in an evaluation of the text.
static void a_token_in_front_begins_each_document(void **state) {
    Stage *stage = stage_of(state);
    const char *after[2];
    shell(stage, "cp -r bpe fronted && sed -i 's/\"post_processor\":null/\"post_processor\":{\"type\": "
                 "\"TemplateProcessing\", \"single\": [{\"SpecialToken\": {\"id\": \"<|end|>\"}}, "
                 "{\"Sequence\": {\"id\": \"A\"}}]}/' fronted/tokenizer.json && ! cmp -s "
                 "bpe/tokenizer.json fronted/tokenizer.json");
    run_base(stage, 0, 0, "--tokenizer fronted --data documents.txt --attend document --out fronts");
    shell(stage, "cp fronts/tokens-*.bin fronts.bin");
    after[0] = evaluated(stage, "--from fronts --attend document --data fronts.bin");
    after[1] = evaluated(stage, "--from fronts --attend document --data documents.txt");
    assert_string_equal(after[0], after[1]);
    Text shard = map_text("test/reference/documents_shard.bin");
    char path[STAGE_PATH_SIZE];
    size_t size = 0, at = 0;
    TokenFile plain, fronted;
    Error error;
    void *bytes = file_map(stage_path(stage, "fronts.bin", path), "a file", &size, &error);
    assert_true(bytes != NULL && token_file_open(&fronted, path, bytes, size, TOKEN_FILE_CHECK_ALL, &error) &&
                token_file_open(&plain, "shard", shard.bytes, shard.size, TOKEN_FILE_CHECK_ALL, &error));
    assert_int_equal(fronted.separator, 401);
    for (size_t i = 0; i < plain.token_count; i++) {
        if (i == 0 || token_file_token(&plain, i - 1) == 0) {
            assert_int_equal(token_file_token(&fronted, at++), 400);
        }
        assert_int_equal(token_file_token(&fronted, at++), token_file_token(&plain, i));
    }
    assert_int_equal(fronted.token_count, at);
    munmap(bytes, size);
    munmap((void *)shard.bytes, shard.size);
}

// Each rank has the parameters, and a share of the windows.
static void an_evaluation_is_that_of_any_number_of_ranks(void **state) {
    static const char *const numbers[] = {"\nwindows ", "\ntokens ", "\nnats per token", "\nbits per byte"};
    Stage *stage = stage_with_ranks(state);
    Outcome outcomes[3];
    run_base(stage, 0, 0, "--tokenizer bpe --data documents.bin --out shared");
    for (int i = 0; i < 3; i++) {
        outcomes[i] =
            program_run(stage, i == 0 ? 0 : i + 1, "eval --from shared --data documents.bin --stride 5");
        outcome_check(&outcomes[i], 0, "eval");
        for (int k = 0; k < 4; k++) {
            double one = text_number(outcomes[0].output, numbers[k], "eval");
            assert_close(text_number(outcomes[i].output, numbers[k], "eval"), one, 1e-5 * one, numbers[k]);
        }
    }
}

// A tokenizer that was given as a file, whatever its name, goes along with the model.
static void the_tokenizer_may_be_a_file(void **state) {
    static const char *const names[] = {"bpe/tokenizer.json", "my-tokens.json"};
    Stage *stage = stage_of(state);
    char command[2 * STAGE_PATH_SIZE], options[256];
    snprintf(command, sizeof command, "cd '%s' && cp bpe/tokenizer.json my-tokens.json", stage->directory);
    assert_int_equal(system(command), 0);
    for (int i = 0; i < 2; i++) {
        snprintf(options, sizeof options, "--tokenizer %s --data documents.txt --out named-%d", names[i], i);
        run_base(stage, 0, 0, options);
        snprintf(options, sizeof options, "eval --from named-%d --data documents.txt", i);
        Outcome outcome = program_run(stage, 0, options);
        outcome_check(&outcome, 0, options);
        snprintf(command, sizeof command,
                 "cd '%s' && cmp bpe/tokenizer.json named-%d/checkpoints/commit-40/model/tokenizer.json",
                 stage->directory, i);
        assert_int_equal(system(command), 0);
    }
}

static void a_damaged_model_is_refused_by_every_command(void **state) {
    static const char *const commands[] = {
        "eval --data documents.bin --from", "sample --from",
        "--config base.json --data documents.bin --out refused --from",
        "--config base.json --data documents.bin --out refused --finetune"};
    Stage *stage = stage_of(state);
    char path[STAGE_PATH_SIZE], arguments[512];
    run_base(stage, 0, 0, "--tokenizer bpe --data documents.bin --out flipped");
    FILE *file =
        fopen(stage_path(stage, "flipped/checkpoints/commit-40/model/model.safetensors", path), "r+b");
    assert_true(file != NULL && fseek(file, -1000, SEEK_END) == 0);
    int byte = fgetc(file);
    assert_true(fseek(file, -1000, SEEK_END) == 0 && fputc(byte ^ 1, file) == (byte ^ 1) &&
                fclose(file) == 0);
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        snprintf(arguments, sizeof arguments, "%s flipped", commands[i]);
        Outcome outcome = program_run(stage, 0, arguments);
        outcome_check(&outcome, 2, arguments);
        text_check(outcome.errors, "model.safetensors is damaged", arguments);
        assert_int_equal(text_lines(outcome.errors), 1);
    }
}

// ---- Validation -----------------------------------------------------------------------

// held.txt has 3 windows of 17 bytes. However many micro-batches are asked for, and
// however large they are, each window counts once.
static void a_validation_visits_every_window_once(void **state) {
    Fleet *fleet = fleet_new(stage_of(state));
    const char *still = "--model bytes.json --data documents.txt --val-data three.txt --lr 1e-12";
    fleet_start(fleet, 0, "%s --val-batches 3 --micro-batch 1", still);
    fleet_start(fleet, 0, "%s --val-batches 1000000 --micro-batch 1", still);
    fleet_start(fleet, 0, "%s --val-batches 1000000 --micro-batch 4", still);
    if (stage_of(state)->has_mpi) { fleet_start(fleet, 2, "%s --val-batches 50 --micro-batch 1", still); }
    fleet_finish(fleet);
    double loss = fleet_number(fleet, 0, "validation", -1, "loss");
    assert_true(loss > 1);
    for (int i = 1; i < fleet->count; i++) {
        assert_close(fleet_number(fleet, i, "validation", -1, "loss"), loss, 1e-5, fleet->trainings[i].what);
    }
    assert_null(strstr(fleet_output(fleet, 0), "more than there is"));
    text_check(fleet_output(fleet, 1), "--val-batches 1000000 is more than there is", "a million");
    text_check(fleet_output(fleet, 1), "in 3 micro-batches", "a million");
    text_check(fleet_output(fleet, 2), "in 1 micro-batch\n", "a million of four");
}

// ---- Data that change -----------------------------------------------------------------

// Gives a file `bytes` letters. It is never shorter than before or after: a reader may be at any
// place.
static void write_changing(Stage *stage, const char *name, int seed, int bytes) {
    char text[8192], path[STAGE_PATH_SIZE];
    for (int i = 0; i < bytes; i++) { text[i] = (char)('a' + (i * i + seed * i) % 23); }
    int file = open(stage_path(stage, name, path), O_WRONLY | O_CREAT, 0666);
    assert_true(file >= 0 && pwrite(file, text, (size_t)bytes, 0) == bytes);
    assert_true(ftruncate(file, bytes) == 0 && close(file) == 0);
}

static void wait_until_log_has(const Stage *stage, const Training *training, const char *words) {
    char name[128], path[STAGE_PATH_SIZE];
    snprintf(name, sizeof name, "%s/log.jsonl", training->out);
    wait_for_text(stage_path(stage, name, path), words);
}

#define REPORTING "--model bytes.json --micro-batch 1 --accumulate 2 --report-every 1 --seq-len 16 "
#define CHANGING REPORTING "--val-batches none "

// A file that changes under a run is named; the run is saved and ends with exit code 3.
static void data_that_change_end_a_run_which_is_saved(void **state) {
    static const struct {
        int ranks, bytes;
        const char *words;
    } cases[] = {{1, 20, "changing.txt"}, {2, 20, "changing.txt"}, {2, 8000, "changing.txt was changed"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Stage *stage = cases[i].ranks > 1 ? stage_with_ranks(state) : stage_of(state);
        write_changing(stage, "changing.txt", 1, 8000);

        Training training = training_start(stage, cases[i].ranks, CHANGING "--data changing.txt --tokens 1G");
        wait_until_log_has(stage, &training, "\"event\":\"report\"");
        write_changing(stage, "changing.txt", 2, cases[i].bytes);
        Outcome outcome = program_finish(stage, &training.program);
        outcome_check(&outcome, 3, training.what);
        text_check(outcome.errors, cases[i].words, training.what);
        text_check(outcome.output, "stopped    because data have changed", training.what);
        json_t *events = log_read(stage, training.out);
        assert_string_equal(json_string_value(json_object_get(log_event_of(events, "end", 0), "reason")),
                            "data changed");
        assert_true(json_is_true(json_object_get(log_event_of(events, "checkpoint", 0), "saved")));
        json_decref(events);
    }
}

// What was removed is still read, and said once.
static void data_that_are_removed_are_named(void **state) {
    Stage *stage = stage_of(state);
    char path[STAGE_PATH_SIZE];
    write_changing(stage, "changing.txt", 1, 8000);

    Training training = training_start(stage, 1, CHANGING "--data changing.txt --tokens 1G");
    wait_until_log_has(stage, &training, "\"event\":\"report\"");
    assert_int_equal(unlink(stage_path(stage, "changing.txt", path)), 0);
    wait_until_log_has(stage, &training, "\"event\":\"data_gone\"");
    kill(training.program.pid, SIGUSR1);
    Outcome outcome = program_finish(stage, &training.program);
    outcome_check(&outcome, 75, training.what);
    assert_int_equal(text_count(outcome.output, "changing.txt was removed or replaced"), 1);
}

// A stop looks, too: also where no report is due, and where another file was only
// replaced. The file that changed and has its old time again is found. All that is gone
// is named.
static void a_stop_finds_data_that_changed(void **state) {
    static const struct {
        const char *change, *words;
    } cases[] = {
        {"dd if=two.txt of=three.txt conv=notrunc status=none",
         "three.txt was changed while the run trained on it"},
        {"cp one.txt new && mv new one.txt && dd if=two.txt of=three.txt conv=notrunc status=none",
         "three.txt was changed"},
        {"cp -p three.txt kept && dd if=two.txt of=three.txt conv=notrunc status=none && touch -r kept "
         "three.txt",
         "three.txt was changed"},
        {"mv three.txt moved && dd if=two.txt of=moved conv=notrunc status=none", "three.txt was changed"},
    };
    Stage *stage = stage_of(state);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        shell(stage, "rm -rf many && mkdir many");
        for (int file = 0; file < 3; file++) {
            static const char *const names[] = {"many/one.txt", "many/two.txt", "many/three.txt"};
            write_changing(stage, names[file], file, 8000);
        }
        Training training = training_start(
            stage, 1,
            "--model bytes.json --micro-batch 1 --accumulate 2 --val-batches none --seq-len 16 "
            "--report-every 1000000 --sample-tokens none --data 'many/*.txt' --tokens 1G");
        wait_until_log_has(stage, &training, "\"event\":\"start\"");
        usleep(300000);
        shell(stage, "cd many && %s", cases[i].change);
        kill(training.program.pid, SIGUSR1);
        Outcome outcome = program_finish(stage, &training.program);
        outcome_check(&outcome, 3, cases[i].change);
        text_check(outcome.errors, cases[i].words, cases[i].change);
    }
}

// Data that were put back do not make exact what was trained on others.
static void a_resumed_run_knows_that_its_data_had_changed(void **state) {
    static const struct {
        int ranks;
        const char *data, *told, *remark; // told where it changes, and where the run goes on
    } cases[] = {{1, CHANGING "--data changing.txt", "trained on it: commits",
                  "data changed while the run trained on them; "},
                 {2, CHANGING "--data changing.txt", "trained on it: commits",
                  "data changed while the run trained on them; "},
                 {1, REPORTING "--data kept.txt --val-batches 2 --val-every 1 --val-data changing.txt",
                  "validated on it: validations", ""}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Stage *stage = cases[i].ranks > 1 ? stage_with_ranks(state) : stage_of(state);
        char options[512], told[256];
        write_changing(stage, "changing.txt", 1, 8000);
        write_changing(stage, "kept.txt", 3, 8000);
        snprintf(options, sizeof options, "%s --tokens 1G", cases[i].data);
        Training training = training_start(stage, cases[i].ranks, options);
        wait_until_log_has(stage, &training, "\"event\":\"report\"");
        write_changing(stage, "changing.txt", 2, 8000);
        Outcome outcome = program_finish(stage, &training.program);
        outcome_check(&outcome, 3, training.what);
        snprintf(told, sizeof told, "changing.txt was changed while the run %s since the last ",
                 cases[i].told);
        text_check(outcome.errors, told, training.what);
        write_changing(stage, "changing.txt", 1, 8000);
        snprintf(options, sizeof options, "--resume auto --out %s --tokens 1k", training.out);
        outcome = program_run(stage, cases[i].ranks, options);
        snprintf(told, sizeof told, "not exact: %sanother --tokens\n", cases[i].remark);
        text_check(outcome.output, told, options);
    }
}

// Of validation data that changed nothing was trained on: put back, they make the run
// exact. A last validation that a stop left out is made when the run is resumed, once.
static void a_last_validation_is_made_up_for(void **state) {
    Stage *stage = stage_of(state);
    write_changing(stage, "changing.txt", 1, 8000);
    shell(stage, "for i in $(seq 400); do cat changing.txt; done > long.txt && cp long.txt kept.txt");
    for (int change = 0; change < 2; change++) {
        Training training = training_start(
            stage, 1,
            "--model bytes.json --micro-batch 1 --accumulate 2 --seq-len 16 --data changing.txt "
            "--val-data long.txt --val-batches 1000000 --val-every end --report-every 1 "
            "--sample-tokens none --tokens 320");
        wait_until_log_has(stage, &training, "\"commit\":10");
        if (change) {
            shell(stage,
                  "head -c 2000 changing.txt | dd of=long.txt seek=100 bs=16 conv=notrunc status=none");
        }
        kill(training.program.pid, SIGUSR1);
        Outcome outcome = program_finish(stage, &training.program);
        outcome_check(&outcome, change ? 3 : 75, training.what);
        shell(stage, "dd if=kept.txt of=long.txt conv=notrunc bs=1M status=none");
        for (int again = 0; again < 2; again++) {
            char options[512];
            snprintf(options, sizeof options, "--resume auto --out %s --val-batches 10", training.out);
            outcome = program_run(stage, 1, options);
            outcome_check(&outcome, 0, options);
            text_check(outcome.output, "at commit 10; exact\n", options);
            text_check(outcome.output, again ? "nothing is left to do" : "    10 validation loss ", options);
        }
    }
}

// Without --data a run goes on with its own, whatever its options call them.
static void a_resumed_run_keeps_its_data(void **state) {
    Stage *stage = stage_of(state);
    write_changing(stage, "changing.txt", 1, 8000);
    Training first = training_start(stage, 0, CHANGING "--data changing.txt");
    json_decref(training_finish(stage, &first));
    char options[512];
    snprintf(options, sizeof options, "--resume auto --out %s --tokens 4k", first.out);
    Outcome outcome = program_run(stage, 1, options);
    outcome_check(&outcome, 0, options);
    text_check(outcome.output, "data       changing.txt: ", options);
    text_check(outcome.output, "not exact: another --tokens\n", options);
}

// Ranks on two hosts, each with a file of that name: only if it is the same file they
// train.
static void ranks_with_other_data_are_refused(void **state) {
    Stage *stage = stage_with_ranks(state);
    shell(stage, "mkdir -p rank-0 rank-1 && cp bytes.json rank-0 && cp bytes.json rank-1");
    static const char *const refusals[] = {"rank 1 reads other data in t.txt than rank 0: 1 file, 8000 bytes",
                                           "rank 1 reads other data in v.txt than rank 0: 1 file, 7000 bytes",
                                           NULL};
    for (int i = 0; i < 3; i++) {
        const char *refusal = refusals[i];
        write_changing(stage, "rank-0/t.txt", 1, 8000);
        write_changing(stage, "rank-0/v.txt", 3, 7000);
        write_changing(stage, "rank-1/t.txt", i == 0 ? 2 : 1, 8000);
        write_changing(stage, "rank-1/v.txt", i == 1 ? 2 : 3, 7000);
        char command[2048];
        snprintf(command, sizeof command,
                 "cd %s && $MPIRUN -np 2 " IN_DIRECTORY_OF_RANK "\"$TRAIN_GPT\" " REPORTING
                 "--tokens 640 --data t.txt --val-data v.txt --val-batches 1 --out %s/two-%d > two.out 2>&1",
                 stage->directory, stage->directory, i);
        int code = system(command);
        char path[STAGE_PATH_SIZE];
        char *output = stage_read_text(stage, stage_path(stage, "two.out", path));
        if ((WEXITSTATUS(code) == 0) != (refusal == NULL)) {
            fail_msg("exit code %d: %s", WEXITSTATUS(code), output);
        }
        if (refusal != NULL) { text_check(output, refusal, command); }
    }
}

// Every byte of many small files counts.
static void one_of_many_small_files_is_told(void **state) {
    Stage *stage = stage_of(state);
    shell(stage, "rm -rf many && mkdir many");
    for (int file = 0; file < 40; file++) {
        char name[64];
        snprintf(name, sizeof name, "many/%d.txt", file);
        write_changing(stage, name, file, 8000);
        shell(stage, "cat %s %s %s > both && mv both %s", name, name, name, name);
    }
    Training first = training_start(stage, 1, CHANGING "--data 'many/*.txt'");
    json_decref(training_finish(stage, &first));
    shell(stage, "printf x | dd of=many/20.txt bs=1 seek=9000 conv=notrunc status=none");
    char options[512];
    snprintf(options, sizeof options, "--resume auto --out %s --tokens 4k", first.out);
    Outcome outcome = program_run(stage, 1, options);
    outcome_check(&outcome, 0, options);
    text_check(outcome.output, "not exact: other data; another --tokens\n", options);
}

// "exact" is said of the same data only, wherever they are.
static void a_resumed_run_knows_whether_its_data_are_the_same(void **state) {
    static const struct {
        const char *name;
        int seed, bytes;
        const char *words;
    } cases[] = {{"changing.txt", 1, 8000, "exact\n"},
                 {"moved.txt", 1, 8000, "exact\n"},
                 {"changing.txt", 2, 8000, "not exact: other data\n"},
                 {"changing.txt", 1, 7000, "not exact: other data\n"},
                 {"moved.txt", 3, 8000, "not exact: other data\n"}};
    Stage *stage = stage_of(state);
    char options[512];
    write_changing(stage, "changing.txt", 1, 8000);
    Training first = training_start(stage, 1, CHANGING "--data changing.txt --save-every 5");
    json_decref(training_finish(stage, &first));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_changing(stage, cases[i].name, cases[i].seed, cases[i].bytes);
        snprintf(options, sizeof options, CHANGING "--data %s --resume %s/checkpoints/commit-15",
                 cases[i].name, first.out);
        Training again = training_start(stage, 1, options);
        Outcome outcome = program_finish(stage, &again.program);
        outcome_check(&outcome, 0, again.what);
        text_check(outcome.output, cases[i].words, again.what);
    }
}

// ---- Several sources ------------------------------------------------------------------

#define MIXED "--model bytes.json --data documents.txt:0.61,cats.txt:0.39 --micro-batch 2 --seq-len 16 "

static double logged_of_source(const Fleet *fleet, int i, const char *kind, const char *field,
                               size_t source) {
    json_t *event = log_event_of(fleet->events[i], kind, -1);
    json_t *value = json_array_get(json_object_get(event, field), source);
    if (!json_is_number(value)) { fail_msg("%s of source %zu is not in the log", field, source); }
    return json_number_value(value);
}

// Three ranks that continue what two began see the samples of a run that was not interrupted:
// with as many micro-batches in a commit, its losses are the same but for the order in which
// they are summed.
static void a_mixture_goes_on_at_three_ranks(void **state) {
    Stage *stage = stage_with_ranks(state);
    Fleet *fleet = fleet_new(stage);
    const char *same =
        MIXED "--report-every 1 --val-every 5 --lr 1e-3 --warmup 0 --schedule constant --tokens 3840";
    fleet_start(fleet, 2, "%s --accumulate 3 --save-every 10", same);
    fleet_finish(fleet);
    fleet_start(fleet, 3, "%s --accumulate 2 --resume %s/checkpoints/commit-10", same,
                fleet->trainings[0].out);
    fleet_start(fleet, 1, "%s --accumulate 6", same);
    fleet->events[1] = training_finish(stage, &fleet->trainings[1]);
    fleet->events[2] = training_finish(stage, &fleet->trainings[2]);
    text_check(fleet_output(fleet, 1), "data continue where the furthest rank was", "three ranks");
    for (int i = 1; i < 3; i++) {
        for (int report = -1; report >= -10; report--) {
            double loss = fleet_number(fleet, i, "report", report, "loss");
            assert_close(loss, fleet_number(fleet, 0, "report", report, "loss"), 1e-4, "loss");
        }
        for (size_t source = 0; source < 2; source++) {
            double tokens = source == 0 ? 2336 : 1504; // floor(240 x 0.61) = 146 samples, and the other 94
            assert_true(logged_of_source(fleet, i, "report", "source_tokens", source) == tokens);
            double loss = logged_of_source(fleet, 0, "validation", "source_losses", source);
            assert_close(logged_of_source(fleet, i, "validation", "source_losses", source), loss, 1e-4,
                         "loss");
        }
    }
}

// The loss of each source is that of a run which validates it alone; the mean is by the weights.
static void the_loss_of_each_source_is_reported(void **state) {
    Fleet *fleet = fleet_new(stage_of(state));
    const char *still = MIXED "--lr 1e-12 --tokens 640 --val-batches 5";
    fleet_start(fleet, 0, "%s --val-data three.txt:1,held.txt:3", still);
    fleet_start(fleet, 0, "%s --val-data three.txt", still);
    fleet_start(fleet, 0, "%s --val-data held.txt", still);
    if (stage_of(state)->has_mpi) { fleet_start(fleet, 2, "%s --val-data three.txt:1,held.txt:3", still); }
    fleet_finish(fleet);
    double three = fleet_number(fleet, 1, "validation", -1, "loss"),
           held = fleet_number(fleet, 2, "validation", -1, "loss");
    assert_true(fabs(three - held) > 1e-4);
    for (int i = 0; i < fleet->count; i += 3) {
        assert_close(logged_of_source(fleet, i, "validation", "source_losses", 0), three, 1e-6, "three.txt");
        assert_close(logged_of_source(fleet, i, "validation", "source_losses", 1), held, 1e-6, "held.txt");
        assert_close(fleet_number(fleet, i, "validation", -1, "loss"), (three + 3 * held) / 4, 1e-6, "mean");
    }
    text_check(fleet_output(fleet, 0), "more than there is of three.txt", "start");
    text_check(fleet_output(fleet, 0), "documents.txt: 61 % of the samples; its ", "start");
    text_check(fleet_output(fleet, 0), "three.txt ", "validation");
}

// Texts are tokenized source by source; weights are compared at a resume; one weight is none.
static void a_mixture_of_texts_is_that_of_their_tokens(void **state) {
    Stage *stage = stage_of(state);
    Fleet *fleet = fleet_new(stage);
    shell(stage, "head -c 1500 documents.txt > head.txt");
    fleet_start(fleet, 0, "--tokenizer bpe --data documents.txt:2,head.txt:1 --val-every 20 --save-every 20");
    fleet_finish(fleet);
    shell(stage,
          "for file in %s/tokens-*.bin; do printf '%%s %%s\\n' $(stat -c %%s $file) $file; done | sort -n | "
          "sed 's/.* //' | { read small; read large; cp $small small.bin; cp $large large.bin; }",
          fleet->trainings[0].out);
    fleet_start(fleet, 0, "--tokenizer bpe --data large.bin:0.2,small.bin:0.1 --val-every 20");
    fleet_start(fleet, 0, "--tokenizer bpe --data large.bin:4");
    fleet_start(fleet, 0, "--tokenizer bpe --data large.bin");
    for (int i = 1; i < 4; i++) {
        fleet->events[i] = training_finish(stage, &fleet->trainings[i]);
        fleet->prints[i] = log_fingerprint(fleet->events[i]);
    }
    check_same(fleet, 0, 1);
    check_same(fleet, 2, 3);
    static const char *const resumed[][2] = {
        {"2,small.bin:1", "; exact\n"},
        {"2,small.bin:2", "not exact: other sources or weights in --data\n"},
        {"2,three.bin:1", "not exact: other data\n"}};
    shell(stage, "cp large.bin three.bin");
    for (size_t i = 0; i < sizeof resumed / sizeof resumed[0]; i++) {
        char arguments[512];
        snprintf(
            arguments, sizeof arguments,
            "--tokenizer bpe --data large.bin:%s --val-every 20 --resume %.60s/checkpoints/commit-20 --out "
            "again-%zu",
            resumed[i][0], fleet->trainings[0].out, i);
        Outcome outcome = run_base(stage, 0, 0, arguments);
        text_check(outcome.output, resumed[i][1], arguments);
    }
}

// ---- The list of tests ----------------------------------------------------------------

static void write_model(const Stage *stage, const char *name, int vocabulary) {
    char text[512];
    snprintf(text, sizeof text,
             "{\"model_type\": \"gpt_neo\", \"num_layers\": 2, \"hidden_size\": 16, \"num_heads\": 2,\n"
             " \"window_size\": 8, \"max_position_embeddings\": %d, \"vocab_size\": %d,\n"
             " \"attention_types\": [[[\"global\", \"local\"], 1]]}\n",
             T, vocabulary);
    stage_write(stage, name, text);
}

// documents_shard.bin as the file of another tokenizer.
static void write_foreign(const Stage *stage) {
    char path[STAGE_PATH_SIZE];
    Text shard = map_text("test/reference/documents_shard.bin");
    uint8_t *bytes = (uint8_t *)malloc(shard.size);
    memcpy(bytes, shard.bytes, shard.size);
    bytes[offsetof(TokenFileHeader, tokenizer)] ^= 1;
    memset(bytes + offsetof(TokenFileHeader, checksum), 0, 4);
    uLong sum = crc32(crc32(0, bytes + TOKEN_FILE_HEADER_BYTES, (uInt)(shard.size - TOKEN_FILE_HEADER_BYTES)),
                      bytes, TOKEN_FILE_HEADER_BYTES);
    for (int i = 0; i < 4; i++) {
        bytes[offsetof(TokenFileHeader, checksum) + (size_t)i] = (uint8_t)(sum >> (8 * i));
    }
    file_write(stage_path(stage, "foreign.bin", path), bytes, shard.size);
    munmap((void *)shard.bytes, shard.size);
    free(bytes);
}

static void write_stage(const Stage *stage) {
    char path[STAGE_PATH_SIZE], command[8 * STAGE_PATH_SIZE];
    write_model(stage, "model.json", VOCABULARY);
    write_model(stage, "bytes.json", 256);
    snprintf(command, sizeof command,
             "{\"model\": \"%s\", \"micro-batch\": 1, \"tokens\": %d, \"val-batches\": 4, "
             "\"sample-tokens\": \"none\", \"threads\": 1, \"timeout-s\": 100, \"device\": \"cpu\", "
             "\"optimizer\": \"zero1\", \"accumulate\": 1}\n",
             stage_path(stage, "model.json", path), 40 * T);
    stage_write(stage, "base.json", command);
    snprintf(command, sizeof command,
             "cd '%s' && root='%s' && mkdir bpe endless old && echo '{}' > old/vocab.json && cp "
             "\"$root/test/reference/tokenizer.json\" "
             "bpe && "
             "cp \"$root/test/reference/documents.txt\" . && "
             "cp \"$root/test/reference/documents_shard.bin\" documents.bin && "
             "cp documents.bin held.bin && cp documents.txt held.txt && "
             "sed 's/<|endoftext|>/<|endofpage|>/g' bpe/tokenizer.json > endless/tokenizer.json",
             stage->directory, stage->root);
    assert_int_equal(system(command), 0);
    write_foreign(stage);
    static const uint8_t packed[200] = {0x1F, 0x8B, 8, 1};
    file_write(stage_path(stage, "packed.txt", path), packed, sizeof packed);
    static uint16_t ids[200];
    file_write(stage_path(stage, "ids.bin", path), ids, sizeof ids);
    uint64_t wide[200];
    uint32_t words[200];
    for (uint32_t i = 0; i < 200; i++) { wide[i] = words[i] = i; }
    file_write(stage_path(stage, "ids32.bin", path), words, sizeof words);
    file_write(stage_path(stage, "ids64.bin", path), wide, sizeof wide);
    static const char pointer[] = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1234567\n";
    stage_write(stage, "pointer.bin", pointer);
    stage_write(stage, "pointer.txt", pointer);
    stage_write(stage, "short.txt", "the cat the cat the");
    shell(stage, "for i in 1 2 3 4 5 6 7 8 9; do echo the cat has a hat and that is that; done > cats.txt");
    stage_write(stage, "three.txt", "the wind was kind to the small ship and to the sea");
}

#define DATA_TEST(function) cmocka_unit_test_prestate_setup_teardown(function, NULL, stage_end_test, &stage)

// test_data PATTERN runs only the tests whose names match PATTERN.
int main(int argc, char **argv) {
    static Stage stage;
    const struct CMUnitTest tests[] = {
        DATA_TEST(other_formats_are_named),
        DATA_TEST(records_are_no_text),
        DATA_TEST(binary_bytes_are_counted),
        DATA_TEST(a_token_file_is_that_of_prepare),
        DATA_TEST(odd_inputs_are_read_as_prepare_reads_them),
        DATA_TEST(many_documents_stay_in_order),
        DATA_TEST(long_documents_are_cut),
        DATA_TEST(the_end_of_a_longest_document_is_found),
        DATA_TEST(the_name_follows_from_every_byte),
        DATA_TEST(prepare_reads_packed_texts_and_refuses_the_rest),
        DATA_TEST(a_text_trains_as_its_tokens_do),
        DATA_TEST(the_tokenizer_goes_from_checkpoint_to_checkpoint),
        DATA_TEST(adapters_have_the_tokenizer_of_their_model),
        DATA_TEST(a_part_samples_as_the_whole_model),
        DATA_TEST(attention_stays_in_documents),
        DATA_TEST(two_ranks_share_the_tokens_of_a_text),
        DATA_TEST(what_was_measured_is_kept_before_epochs_are_counted),
        DATA_TEST(tokens_are_made_again_where_they_must),
        DATA_TEST(a_full_disk_leaves_no_tokens),
        DATA_TEST(what_does_not_fit_is_refused),
        DATA_TEST(a_run_that_ends_early_goes_on_with_its_options),
        DATA_TEST(two_ranks_refuse_once),
        DATA_TEST(an_evaluation_refuses_what_is_no_text),
        DATA_TEST(byte_order_marks_are_skipped),
        DATA_TEST(another_token_ends_a_text),
        DATA_TEST(a_text_is_evaluated_as_its_tokens_are),
        DATA_TEST(a_token_in_front_begins_each_document),
        DATA_TEST(an_evaluation_is_that_of_any_number_of_ranks),
        DATA_TEST(the_tokenizer_may_be_a_file),
        DATA_TEST(a_damaged_model_is_refused_by_every_command),
        DATA_TEST(a_validation_visits_every_window_once),
        DATA_TEST(data_that_change_end_a_run_which_is_saved),
        DATA_TEST(data_that_are_removed_are_named),
        DATA_TEST(a_resumed_run_knows_whether_its_data_are_the_same),
        DATA_TEST(a_stop_finds_data_that_changed),
        DATA_TEST(a_resumed_run_knows_that_its_data_had_changed),
        DATA_TEST(a_last_validation_is_made_up_for),
        DATA_TEST(a_resumed_run_keeps_its_data),
        DATA_TEST(ranks_with_other_data_are_refused),
        DATA_TEST(one_of_many_small_files_is_told),
        DATA_TEST(a_mixture_goes_on_at_three_ranks),
        DATA_TEST(the_loss_of_each_source_is_reported),
        DATA_TEST(a_mixture_of_texts_is_that_of_their_tokens),
    };
    if (argc > 1) { cmocka_set_test_filter(argv[1]); }
    stage_open(&stage);
    write_stage(&stage);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    stage_close(&stage);
    return failed;
}
