// masked.h: token files for tests of masks, with the tokens that are predicted as a test asks
// for.
#pragma once

#include <zlib.h>

#include "runtime/random.h"
#include "test/program/program.h"
#include "tokenizer/token_file.h"

static inline void put_number(uint8_t *bytes, uint64_t value, int count) {
    for (int i = 0; i < count; i++) { bytes[i] = (uint8_t)(value >> 8 * i); }
}

// A token file of `windows` windows of `length` random bytes, which share their first and last
// tokens. Of window w the first predicted_in(w) tokens are predicted.
static inline void stage_write_masked(const Stage *stage, const char *name, int windows, int length,
                                      int (*predicted_in)(int window)) {
    enum { HEADER = TOKEN_FILE_HEADER_BYTES };
    size_t count = (size_t)(windows * length + 1), bytes = HEADER + 2 * count + (count + 7) / 8;
    uint8_t *file = (uint8_t *)calloc(1, bytes), *tokens = file + HEADER, *mask = tokens + 2 * count;
    char path[STAGE_PATH_SIZE];
    Random random = {1};
    for (size_t i = 0; i < count; i++) { put_number(tokens + 2 * i, random_bits(&random) % 256, 2); }
    for (int window = 0; window < windows; window++) {
        for (int t = 0; t < predicted_in(window); t++) {
            int place = window * length + 1 + t;
            mask[place / 8] |= (uint8_t)(1 << place % 8);
        }
    }
    memcpy(file, TOKEN_FILE_MAGIC, sizeof TOKEN_FILE_MAGIC);
    put_number(file + 8, TOKEN_FILE_VERSION, 4);
    put_number(file + 12, 2, 4);
    put_number(file + 16, 256, 4);
    put_number(file + 20, TOKEN_FILE_HAS_MASK, 4);
    put_number(file + 24, count, 8);
    uLong sum = crc32(0, file + HEADER, (uInt)(bytes - HEADER));
    put_number(file + offsetof(TokenFileHeader, checksum), crc32(sum, file, HEADER), 4);
    file_write(stage_path(stage, name, path), file, bytes);
    free(file);
}
