// test_token_file.c: a token file gives the tokens and the mask that were written; whatever
// is wrong with one is said in one line; no bytes crash the reader.
//
// test/reference/masked_shard.bin was made by an earlier writer, in Python, so it shows that
// the format has not changed.
#include "runtime/random.h"
#include "test/harness.h"
#include "tokenizer/token_file.h"

enum { COUNT = 21, REFERENCE_COUNT = 52 };

typedef struct Bytes {
    uint8_t data[4096];
    size_t size;
} Bytes;

static void put(uint8_t *bytes, uint64_t number, int count) {
    for (int i = 0; i < count; i++) { bytes[i] = (uint8_t)(number >> (8 * i)); }
}

// Makes the checksum right again after a change, so that another check must find it.
static void seal(Bytes *bytes) {
    put(bytes->data + 36, 0, 4);
    uLong sum = crc32(0, bytes->data + 256, (uInt)(bytes->size - 256));
    put(bytes->data + 36, crc32(sum, bytes->data, 256), 4);
}

// A file of COUNT tokens i * 7, of `width` bytes, of a vocabulary of 300; masked: every
// third does not count.
static Bytes make_file(int width, bool masked) {
    Bytes bytes;
    memset(&bytes, 0, sizeof bytes);
    memcpy(bytes.data,
           "\x89"
           "ACCO\r\n\x1a",
           8);
    put(bytes.data + 8, 2, 4);
    put(bytes.data + 12, (uint64_t)width, 4);
    put(bytes.data + 16, 300, 4);
    put(bytes.data + 20, masked, 4);
    put(bytes.data + 24, COUNT, 8);
    memset(bytes.data + 32, 0xAB, 4);
    uint8_t *at = bytes.data + 256;
    for (int i = 0; i < COUNT; i++, at += width) { put(at, (uint64_t)i * 7, width); }
    for (int i = 0; masked && i < COUNT; i++) { at[i / 8] |= (uint8_t)((i % 3 != 2) << (i % 8)); }
    bytes.size = (size_t)(at - bytes.data) + (masked ? (COUNT + 7) / 8 : 0);
    seal(&bytes);
    return bytes;
}

static bool try_open(TokenFile *file, const Bytes *bytes, TokenFileCheck check, Error *error) {
    void *copy = malloc(bytes->size + (bytes->size == 0)); // exact, so that a sanitizer sees a byte too far
    memcpy(copy, bytes->data, bytes->size);
    error->text[0] = '\0';
    bool good = token_file_open(file, "data.bin", copy, bytes->size, check, error);
    if (good) { // what a user of it may do
        uint64_t sum = 0;
        for (uint64_t i = 0; i < file->token_count; i++) {
            sum += token_file_token(file, i) + token_mask_counts(file->mask, i);
        }
        assert_true(sum + 1 > 0);
    }
    free(copy);
    return good;
}

static void expect_refusal(const Bytes *bytes, TokenFileCheck check, const char *words) {
    TokenFile file;
    Error error;
    if (try_open(&file, bytes, check, &error)) { fail_msg("opened, but should say '%s'", words); }
    if (strstr(error.text, words) == NULL) { fail_msg("'%s' does not say '%s'", error.text, words); }
    assert_non_null(strstr(error.text, "data.bin"));
    assert_null(strchr(error.text, '\n'));
    assert_int_equal(file.token_count, 0);
}

static void tokens_and_mask_are_those_written(void **state) {
    (void)state;
    for (int masked = 0; masked < 2; masked++) {
        for (int width = 2; width <= 4; width += 2) {
            Bytes bytes = make_file(width, masked);
            TokenFile file;
            Error error;
            if (!token_file_open(&file, "data.bin", bytes.data, bytes.size, TOKEN_FILE_CHECK_ALL, &error)) {
                fail_msg("%s", error.text);
            }
            assert_int_equal(file.token_count, COUNT);
            assert_int_equal(file.vocabulary, 300);
            assert_int_equal(file.token_bytes, width);
            assert_true(file.tokenizer == 0xABABABABu);
            for (uint64_t i = 0; i < COUNT; i++) {
                assert_int_equal(token_file_token(&file, i), i * 7);
                assert_int_equal(token_mask_counts(file.mask, i), !masked || i % 3 != 2);
            }
        }
    }
}

// Two bytes number 65,536 tokens.
static void two_bytes_hold_the_largest_token(void **state) {
    (void)state;
    TokenFile file;
    Error error;
    Bytes bytes = make_file(2, false);
    put(bytes.data + 16, 65536, 4);
    put(bytes.data + 256, 65535, 2);
    seal(&bytes);
    if (!try_open(&file, &bytes, TOKEN_FILE_CHECK_ALL, &error)) { fail_msg("%s", error.text); }
    assert_int_equal(file.vocabulary, 65536);
}

// A writer takes two where they suffice.
static void ids_have_the_bytes_that_they_need(void **state) {
    (void)state;
    static const int vocabularies[] = {300, 65536, 65537, 151936};
    for (size_t i = 0; i < sizeof vocabularies / sizeof vocabularies[0]; i++) {
        Tokenizer tokenizer = {.vocabulary = vocabularies[i], .sum = 5, .end = -1};
        TokenWriter writer;
        TokenFile file;
        Error error = {""};
        size_t size = 0;
        char path[] = "/tmp/acco-test-XXXXXX";
        const int32_t ids[3] = {1, vocabularies[i] - 1, 0};
        assert_true(close(mkstemp(path)) == 0);
        assert_true(token_writer_begin(&writer, path, &tokenizer, 17, &error));
        assert_true(token_writer_add(&writer, ids, 3, &error) && token_writer_end(&writer, &error));
        void *bytes = file_map(path, "a token file", &size, &error);
        if (!token_file_open(&file, path, bytes, size, TOKEN_FILE_CHECK_ALL, &error)) {
            fail_msg("%s", error.text);
        }
        assert_int_equal(file.token_bytes, vocabularies[i] <= 65536 ? 2 : 4);
        assert_int_equal(file.vocabulary, vocabularies[i]);
        assert_true(file.tokenizer == 5 && file.padded == 17 && file.separator == 0 && file.mask == NULL);
        for (uint64_t k = 0; k < 3; k++) { assert_int_equal(token_file_token(&file, k), ids[k]); }
        munmap(bytes, size);
        unlink(path);
    }
}

static void the_reference_is_read_and_written_again(void **state) {
    (void)state;
    TokenFile file;
    Error error;
    Bytes bytes, again;
    Tokenizer tokenizer;
    TokenWriter writer;
    char path[] = "/tmp/acco-test-XXXXXX";
    FILE *source = fopen("test/reference/masked_shard.bin", "rb");
    assert_non_null(source);
    bytes.size = fread(bytes.data, 1, sizeof bytes.data, source);
    fclose(source);
    if (!token_file_open(&file, "data.bin", bytes.data, bytes.size, TOKEN_FILE_CHECK_ALL, &error)) {
        fail_msg("%s", error.text);
    }
    assert_int_equal(file.token_count, REFERENCE_COUNT);
    assert_int_equal(file.vocabulary, 406);
    assert_int_equal(file.token_bytes, 2);
    assert_true(close(mkstemp(path)) == 0);
    assert_true(tokenizer_open(&tokenizer, "test/reference", &error));
    assert_true(token_writer_begin(&writer, path, &tokenizer, 0, &error));
    for (uint64_t i = 0; i < REFERENCE_COUNT; i++) {
        int32_t token = (int32_t)token_file_token(&file, i), id = i % 3 != 2 ? token : ~token;
        assert_int_equal(token_mask_counts(file.mask, i), i % 3 != 2);
        assert_true(token_writer_add(&writer, &id, 1, &error));
    }
    assert_true(token_writer_end(&writer, &error));
    source = fopen(path, "rb");
    again.size = fread(again.data, 1, sizeof again.data, source);
    fclose(source);
    unlink(path);
    assert_int_equal(again.size, bytes.size);
    assert_memory_equal(again.data, bytes.data, bytes.size);
    tokenizer_close(&tokenizer);
}

static void every_flipped_bit_is_found(void **state) {
    (void)state;
    Bytes bytes = make_file(2, true);
    TokenFile file;
    Error error;
    for (size_t bit = 0; bit < 8 * bytes.size; bit++) {
        bytes.data[bit / 8] ^= (uint8_t)(1u << (bit % 8));
        if (try_open(&file, &bytes, TOKEN_FILE_CHECK_ALL, &error)) {
            fail_msg("bit %zu is flipped, and this is not noticed", bit);
        }
        assert_true(error_is_set(&error));
        bytes.data[bit / 8] ^= (uint8_t)(1u << (bit % 8));
    }
}

static void every_truncation_is_found_without_reading_it_all(void **state) {
    (void)state;
    TokenFile file;
    Error error;
    for (int masked = 0; masked < 2; masked++) {
        Bytes bytes = make_file(4, masked), shorter = bytes;
        for (shorter.size = 0; shorter.size < bytes.size; shorter.size++) {
            if (try_open(&file, &shorter, TOKEN_FILE_CHECK_HEADER, &error)) {
                fail_msg("%zu bytes are enough", shorter.size);
            }
            assert_true(error_is_set(&error));
        }
        bytes.size++; // a zero behind it
        expect_refusal(&bytes, TOKEN_FILE_CHECK_HEADER, "truncated or damaged");
    }
}

// A number that is written into a good file, and the words that the error must have.
// sealed: with a checksum that fits.
typedef struct Damage {
    int at, bytes;
    uint64_t number;
    TokenFileCheck check;
    bool sealed;
    const char *words;
} Damage;

static void damaged_headers_are_refused_in_one_line(void **state) {
    (void)state;
    static const Damage damages[] = {
        {0, 8, 0, TOKEN_FILE_CHECK_HEADER, true, "damaged, or no token file"},
        {0, 4, 0, TOKEN_FILE_CHECK_HEADER, true, "damaged, or no token file"},
        {4, 1, 'o', TOKEN_FILE_CHECK_HEADER, true, "damaged, or no token file"},
        {5, 3, 0x0A0A0A, TOKEN_FILE_CHECK_HEADER, true, "damaged, or no token file"},
        {8, 4, 0, TOKEN_FILE_CHECK_HEADER, true, "version 0"},
        {8, 4, 1, TOKEN_FILE_CHECK_HEADER, true, "only version 2"},
        {8, 4, 0xFFFFFFFF, TOKEN_FILE_CHECK_HEADER, true, "version 4294967295"},
        {12, 4, 0, TOKEN_FILE_CHECK_HEADER, true, "the width of a token"},
        {12, 4, 1, TOKEN_FILE_CHECK_HEADER, true, "the width of a token"},
        {12, 4, 3, TOKEN_FILE_CHECK_HEADER, true, "the width of a token"},
        {12, 4, 8, TOKEN_FILE_CHECK_HEADER, true, "the width of a token"},
        {12, 4, 0x80000002, TOKEN_FILE_CHECK_HEADER, true, "the width of a token"},
        {12, 4, 4, TOKEN_FILE_CHECK_HEADER, true, "truncated or damaged"},
        {16, 4, 0, TOKEN_FILE_CHECK_HEADER, true, "the vocabulary"},
        {16, 4, 65537, TOKEN_FILE_CHECK_HEADER, true, "the vocabulary"},
        {16, 4, 0xFFFFFFFF, TOKEN_FILE_CHECK_HEADER, true, "the vocabulary"},
        {16, 4, 140, TOKEN_FILE_CHECK_ALL, true, "token 140 at position 20"},
        {16, 4, 1, TOKEN_FILE_CHECK_ALL, true, "token 7 at position 1"},
        {20, 4, 2, TOKEN_FILE_CHECK_HEADER, true, "the flags"},
        {20, 4, 0x80000001, TOKEN_FILE_CHECK_HEADER, true, "the flags"},
        {20, 4, 0, TOKEN_FILE_CHECK_HEADER, true, "truncated or damaged"},
        {24, 8, 0, TOKEN_FILE_CHECK_HEADER, true, "the number of tokens"},
        {24, 8, COUNT - 1, TOKEN_FILE_CHECK_HEADER, true,
         "promises 20 tokens of 2 bytes and a mask, but 45 bytes follow it"},
        {24, 8, COUNT + 1, TOKEN_FILE_CHECK_HEADER, true, "promises 22 tokens"},
        {24, 8, UINT64_MAX, TOKEN_FILE_CHECK_HEADER, true, "truncated or damaged"},
        {24, 8, (uint64_t)COUNT << 32, TOKEN_FILE_CHECK_HEADER, true, "truncated or damaged"},
        {32, 1, 0xAC, TOKEN_FILE_CHECK_ALL, false, "its checksum is"},
        {36, 4, 0, TOKEN_FILE_CHECK_ALL, false, "but the header says 00000000: copy"},
        {40, 4, 65537, TOKEN_FILE_CHECK_HEADER, true, "the padded length"},
        {44, 4, 70000, TOKEN_FILE_CHECK_HEADER, true, "the token between documents"},
        {48, 1, 1, TOKEN_FILE_CHECK_HEADER, true, "the unused bytes"},
        {255, 1, 9, TOKEN_FILE_CHECK_HEADER, true, "the unused bytes"},
        {256, 2, 1, TOKEN_FILE_CHECK_ALL, false, "its checksum is"},
        {256, 2, 300, TOKEN_FILE_CHECK_ALL, true, "token 300 at position 0"},
        {256 + 2 * COUNT - 2, 2, 0xFFFF, TOKEN_FILE_CHECK_ALL, true, "token 65535 at position 20"},
        {256 + 2 * COUNT, 1, 0, TOKEN_FILE_CHECK_ALL, false, "its checksum is"},
        {256 + 2 * COUNT + 2, 1, 0xFF, TOKEN_FILE_CHECK_HEADER, true, "bits behind the last token"},
    };
    for (size_t i = 0; i < sizeof damages / sizeof damages[0]; i++) {
        const Damage *damage = &damages[i];
        Bytes bytes = make_file(2, true);
        put(bytes.data + damage->at, damage->number, damage->bytes);
        if (damage->sealed) { seal(&bytes); }
        expect_refusal(&bytes, damage->check, damage->words);
    }
}

// A count with which the size fits only because a product of 64 bits overflows.
static void a_count_that_overflows_is_refused(void **state) {
    (void)state;
    for (int width = 2; width <= 4; width += 2) {
        Bytes bytes = make_file(width, false);
        put(bytes.data + 24, UINT64_MAX / (uint64_t)width + 1 + COUNT, 8);
        seal(&bytes);
        expect_refusal(&bytes, TOKEN_FILE_CHECK_HEADER, "truncated or damaged");
    }
}

static void the_checksum_is_not_read_where_only_the_header_is_checked(void **state) {
    (void)state;
    Bytes bytes = make_file(2, true);
    bytes.data[300] ^= 1;
    TokenFile file;
    Error error;
    assert_true(try_open(&file, &bytes, TOKEN_FILE_CHECK_HEADER, &error));
    expect_refusal(&bytes, TOKEN_FILE_CHECK_ALL, "its checksum is");
}

static void other_formats_are_not_taken_for_token_files(void **state) {
    (void)state;
    const uint32_t llmc[2] = {20240520, 1};
    Bytes bytes = make_file(2, false);
    assert_true(token_file_recognise(bytes.data, bytes.size));
    assert_true(token_file_recognise(bytes.data, 5));
    assert_false(token_file_recognise(bytes.data, 4));
    assert_false(token_file_recognise("", 0));
    assert_false(token_file_recognise(llmc, sizeof llmc));
    assert_false(token_file_recognise("Once upon a time", 16));
    bytes.data[0] = 0; // three wrong bytes are damage, four another format
    bytes.data[3] = 0;
    bytes.data[6] = 0;
    assert_true(token_file_recognise(bytes.data, bytes.size));
    bytes.data[7] = 0;
    assert_false(token_file_recognise(bytes.data, bytes.size));
}

static void random_damage_never_crashes(void **state) {
    (void)state;
    Random random = {random_hash(42, 0)};
    TokenFile file;
    Error error;
    for (int round = 0; round < 20000; round++) {
        Bytes bytes = make_file(round % 2 == 0 ? 2 : 4, round % 3 == 0);
        int changes = 1 + (int)(random_bits(&random) % 6);
        for (int i = 0; i < changes; i++) {
            bytes.data[8 + random_bits(&random) % (bytes.size - 8)] = (uint8_t)random_bits(&random);
        }
        if (random_bits(&random) % 4 == 0) { bytes.size = random_bits(&random) % (bytes.size + 64); }
        try_open(&file, &bytes, round % 5 == 0 ? TOKEN_FILE_CHECK_HEADER : TOKEN_FILE_CHECK_ALL, &error);
        if (bytes.size < 256) { continue; }
        seal(&bytes); // a hostile writer computes the checksum too
        try_open(&file, &bytes, TOKEN_FILE_CHECK_ALL, &error);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tokens_and_mask_are_those_written),
        cmocka_unit_test(two_bytes_hold_the_largest_token),
        cmocka_unit_test(ids_have_the_bytes_that_they_need),
        cmocka_unit_test(the_reference_is_read_and_written_again),
        cmocka_unit_test(every_flipped_bit_is_found),
        cmocka_unit_test(every_truncation_is_found_without_reading_it_all),
        cmocka_unit_test(damaged_headers_are_refused_in_one_line),
        cmocka_unit_test(a_count_that_overflows_is_refused),
        cmocka_unit_test(the_checksum_is_not_read_where_only_the_header_is_checked),
        cmocka_unit_test(other_formats_are_not_taken_for_token_files),
        cmocka_unit_test(random_damage_never_crashes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
