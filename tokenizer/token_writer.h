// token_writer.h: writes token files, whose layout is in token_file.h.
//
// A file has a temporary name until it is whole and on disk (file_replace_begin). It gets
// a mask, in memory until the end, if one of its tokens is not to be predicted.
#pragma once

#include "runtime/numbers.h"
#include "tokenizer/token_file.h"
#include "tokenizer/tokenizer.h"

typedef struct TokenWriter {
    FILE *file; // NULL: no file has been begun
    char path[PATH_MAX - 8];
    const Tokenizer *tokenizer;
    int padded;         // TokenFile.padded
    uint32_t separator; // TokenFile.separator: tokenizer->end; a caller that writes it elsewhere makes it 0
    uint64_t count;
    uint32_t checksum; // of what follows the header
    uint8_t *mask;     // (mask_capacity), bits as in the file
    size_t mask_capacity;
    bool is_masked;
} TokenWriter;

static inline int32_t token_id(int32_t id_or_read_only) {
    return id_or_read_only < 0 ? ~id_or_read_only : id_or_read_only;
}

// padded: the length of a sequence, each one document; 0: documents follow each other.
static inline bool token_writer_begin(TokenWriter *writer, const char *path, const Tokenizer *tokenizer,
                                      int padded, Error *error) {
    static const uint8_t room[TOKEN_FILE_HEADER_BYTES] = {0};
    memset(writer, 0, sizeof *writer);
    snprintf(writer->path, sizeof writer->path, "%s", path);
    writer->tokenizer = tokenizer;
    writer->padded = padded;
    writer->separator = (uint32_t)(tokenizer->end + 1);
    writer->file = file_replace_begin(path, error);
    return writer->file != NULL && (fwrite(room, sizeof room, 1, writer->file) == 1 ||
                                    error_set(error, "cannot write %.400s: %s", path, strerror(errno)));
}

// Bytes of a token: 2 where that is enough for every id.
static inline size_t token_writer_width(const TokenWriter *writer) {
    return writer->tokenizer->vocabulary <= 65536 ? 2 : 4;
}

// Writes what follows the header.
static inline bool token_writer_write(TokenWriter *writer, const uint8_t *bytes, size_t size, Error *error) {
    writer->checksum = (uint32_t)crc32_z(writer->checksum, bytes, size);
    return fwrite(bytes, 1, size, writer->file) == size ||
           error_set(error, "cannot write %.400s: %s", writer->path, strerror(errno));
}

// ids (count): a token that the model only reads, and does not predict, stands there as ~id.
static inline bool token_writer_add(TokenWriter *writer, const int32_t *ids, size_t count, Error *error) {
    enum { BLOCK = 4096 };
    uint8_t bytes[4 * BLOCK];
    size_t width = token_writer_width(writer);
    list_reserve((void **)&writer->mask, (size_t)(writer->count / 8), &writer->mask_capacity, count / 8 + 2,
                 1);
    for (size_t done = 0; done < count; done += BLOCK) {
        size_t block = size_min(count - done, BLOCK);
        for (size_t i = 0; i < block; i++, writer->count++) {
            uint8_t *byte = &writer->mask[writer->count / 8], bit = (uint8_t)(1u << (writer->count % 8));
            int32_t entry = ids[done + i], id = token_id(entry);
            *byte = (uint8_t)((bit == 1 ? 0 : *byte) | (entry >= 0 ? bit : 0));
            writer->is_masked = writer->is_masked || entry < 0;
            memcpy(bytes + i * width, &id, width);
        }
        if (!token_writer_write(writer, bytes, block * width, error)) { return false; }
    }
    return true;
}

// Removes the file that has been begun, if there is one.
static inline void token_writer_abandon(TokenWriter *writer) {
    Error ignored;
    if (writer->file != NULL) { file_replace_end(writer->file, writer->path, false, &ignored); }
    free(writer->mask);
    memset(writer, 0, sizeof *writer);
}

// Completes the file and gives it its name. On failure nothing of it is left.
static inline bool token_writer_end(TokenWriter *writer, Error *error) {
    bool masked = writer->is_masked;
    if (masked && !token_writer_write(writer, writer->mask, (size_t)((writer->count + 7) / 8), error)) {
        token_writer_abandon(writer);
        return false;
    }
    TokenFileHeader header = {.version = TOKEN_FILE_VERSION,
                              .token_bytes = (uint32_t)token_writer_width(writer),
                              .vocabulary = (uint32_t)writer->tokenizer->vocabulary,
                              .flags = masked ? (uint32_t)TOKEN_FILE_HAS_MASK : 0,
                              .token_count = writer->count,
                              .tokenizer = writer->tokenizer->sum,
                              .padded = (uint32_t)writer->padded,
                              .separator = writer->separator};
    memcpy(header.magic, TOKEN_FILE_MAGIC, sizeof header.magic);
    header.checksum = (uint32_t)crc32_z(writer->checksum, (const Bytef *)&header, sizeof header);
    bool written =
        fseek(writer->file, 0, SEEK_SET) == 0 && fwrite(&header, sizeof header, 1, writer->file) == 1;
    bool good = file_replace_end(writer->file, writer->path, written, error);
    free(writer->mask);
    memset(writer, 0, sizeof *writer);
    return good;
}
