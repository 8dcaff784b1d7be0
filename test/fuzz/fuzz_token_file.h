// fuzz_token_file.h: token files in this program's own format. One that is accepted has
// the size that its header says, and every token is below the vocabulary.
#pragma once

#include "test/fuzz/fuzz.h"
#include "tokenizer/token_file.h"

// Makes the checksum right, which no fuzzer would guess, so that the checks after it are
// reached.
static inline void fuzz_token_file_seal(uint8_t *bytes, size_t size) {
    if (size < TOKEN_FILE_HEADER_BYTES || !token_file_recognise(bytes, size)) { return; }
    memset(bytes + offsetof(TokenFileHeader, checksum), 0, 4);
    uLong sum = crc32_z(0, bytes + TOKEN_FILE_HEADER_BYTES, size - TOKEN_FILE_HEADER_BYTES);
    sum = crc32_z(sum, bytes, TOKEN_FILE_HEADER_BYTES);
    for (int i = 0; i < 4; i++) {
        bytes[offsetof(TokenFileHeader, checksum) + (size_t)i] = (uint8_t)(sum >> (8 * i));
    }
}

static inline void fuzz_token_file_read(const TokenFile *file, size_t size, bool checked) {
    uint64_t count = file->token_count,
             wanted = TOKEN_FILE_HEADER_BYTES + count * (uint64_t)file->token_bytes, masked = 0;
    if (file->mask != NULL) { wanted += (count + 7) / 8; }
    fuzz_require(count >= 1 && count <= size && wanted == size, "a token file is as long as its header says");
    for (uint64_t i = 0; i < count; i++) {
        uint32_t token = token_file_token(file, i);
        fuzz_require(!checked || token < file->vocabulary, "every token is below the vocabulary");
        masked += !token_mask_counts(file->mask, i);
    }
    fuzz_require(masked == 0 || file->mask != NULL, "without a mask every token counts");
}

static inline bool fuzz_token_file_open(const uint8_t *bytes, size_t size, TokenFileCheck check) {
    TokenFile file;
    Error error = {""};
    bool good = fuzz_accepted(token_file_open(&file, "input.bin", bytes, size, check, &error), &error);
    if (good) { fuzz_token_file_read(&file, size, check == TOKEN_FILE_CHECK_ALL); }
    return good;
}

static inline bool fuzz_token_file(const uint8_t *data, size_t size) {
    FuzzPart part = {data, size};
    uint8_t *sealed = fuzz_copy(part);
    bool plain = fuzz_token_file_open(data, size, TOKEN_FILE_CHECK_ALL),
         header = fuzz_token_file_open(data, size, TOKEN_FILE_CHECK_HEADER);
    fuzz_require(header || !plain, "what passes all checks passes those of the header");
    fuzz_token_file_seal(sealed, size);
    bool good = fuzz_token_file_open(sealed, size, TOKEN_FILE_CHECK_ALL);
    free(sealed);
    return good;
}
