// token_file.h: reads and writes this program's own format for tokens.
//
// It says what llm.c's and nanoGPT's formats cannot: which tokenizer made the tokens, which are to
// be predicted, and whether the file is what was written. A file is a TokenFileHeader, then tokens,
// then the mask: (count + 7) / 8 bytes; token i is bit i % 8 of byte i / 8; unused bits are 0. 0:
// the token is only read, as the prompt is in fine-tuning.
#pragma once

#include "runtime/numbers.h"
#include "tokenizer/tokenizer.h"

static const uint8_t TOKEN_FILE_MAGIC[8] = {0x89, 'A', 'C', 'C', 'O', '\r', '\n', 0x1a};

enum { TOKEN_FILE_VERSION = 2, TOKEN_FILE_HAS_MASK = 1, TOKEN_FILE_MAX_PADDED = 65536 };

// In the order of the file. Numbers are little-endian, and so must be the machine.
typedef struct TokenFileHeader {
    uint8_t magic[sizeof TOKEN_FILE_MAGIC]; // what converts line ends destroys it
    uint32_t version;                       // TOKEN_FILE_VERSION
    uint32_t token_bytes;                   // 2 or 4
    uint32_t vocabulary;  // every token is below it; at most 65536 where tokens have 2 bytes
    uint32_t flags;       // TOKEN_FILE_HAS_MASK: a mask follows the tokens
    uint64_t token_count; // at least 1
    uint32_t tokenizer;   // CRC-32 (as in zlib) of the tokenizer (Tokenizer.sum); 0: unknown
    uint32_t checksum;    // CRC-32 of all behind the header, and then of it with 0 here
    uint32_t padded;      // length of each document, at most TOKEN_FILE_MAX_PADDED; 0: not padded
    uint32_t separator;   // 1 + the token between documents that begins one; nowhere within one; 0: unknown
    uint8_t zeros[208];
} TokenFileHeader;

static_assert(sizeof(TokenFileHeader) == 256, "the header is read as it lies in the file");

enum { TOKEN_FILE_HEADER_BYTES = sizeof(TokenFileHeader) };

// CHECK_ALL reads the whole file, for its checksum and for tokens beyond the vocabulary.
typedef enum TokenFileCheck { TOKEN_FILE_CHECK_HEADER, TOKEN_FILE_CHECK_ALL } TokenFileCheck;

// A view of bytes that belong to the caller.
typedef struct TokenFile {
    const uint8_t *tokens; // (token_count, token_bytes)
    const uint8_t *mask;   // (token_count) bits; NULL: every token is to be predicted
    size_t token_count;
    uint32_t vocabulary;
    int token_bytes;    // 2 or 4; 1: a text (dataloader.h)
    int padded;         // length of a sequence, each one document; 0: not padded
    uint32_t separator; // 1 + the token between documents, the first of the one behind it; 0: unknown
    uint32_t tokenizer; // Tokenizer.sum of the one that made the file; 0: unknown
} TokenFile;

// Five of the eight bytes of the magic suffice, so that a damaged token file is not taken
// for another format. A nanoGPT file matches by chance once in 10^10.
static inline bool token_file_recognise(const void *bytes, size_t size) {
    const uint8_t *byte = (const uint8_t *)bytes;
    int equal = 0;
    for (size_t i = 0; i < sizeof TOKEN_FILE_MAGIC && i < size; i++) {
        equal += byte[i] == TOKEN_FILE_MAGIC[i];
    }
    return equal >= 5;
}

// Whether two sums may be of one tokenizer: they are equal, or one is unknown.
static inline bool token_sums_agree(uint32_t a, uint32_t b) { return a == 0 || b == 0 || a == b; }

static inline uint32_t token_file_token(const TokenFile *file, uint64_t position) {
    uint16_t narrow;
    uint32_t wide;
    if (file->token_bytes == 1) { return file->tokens[position]; }
    if (file->token_bytes == 2) {
        memcpy(&narrow, file->tokens + 2 * position, sizeof narrow);
        return narrow;
    }
    memcpy(&wide, file->tokens + 4 * position, sizeof wide);
    return wide;
}

// Whether the token at `position` is to be predicted. mask: or NULL, and then all are.
static inline bool token_mask_counts(const uint8_t *mask, uint64_t position) {
    return mask == NULL || (mask[position / 8] >> (position % 8) & 1) != 0;
}

// *header <- what a file of `size` bytes begins with; false: a field of it cannot be.
static inline bool token_file_read_header(TokenFileHeader *header, const char *name, const void *bytes,
                                          size_t size, Error *error) {
    if (size < sizeof *header) {
        return error_set(error,
                         "%s is truncated: a token file has a header of %d bytes, this file ends after %zu",
                         name, (int)TOKEN_FILE_HEADER_BYTES, size);
    }
    memcpy(header, bytes, sizeof *header);
    if (memcmp(header->magic, TOKEN_FILE_MAGIC, sizeof header->magic) != 0) {
        return error_set(error, "%s is damaged, or no token file: it does not begin with the magic", name);
    }
    if (header->version != TOKEN_FILE_VERSION) {
        return error_set(
            error,
            "%s is a token file of version %u, but only version %d can be read: prepare the data again", name,
            header->version, (int)TOKEN_FILE_VERSION);
    }
    static const uint8_t zeros[sizeof header->zeros] = {0};
    uint32_t width = header->token_bytes, largest = width == 2 ? 65536 : INT32_MAX;
    const Condition checks[] = {
        {width == 2 || width == 4, "width of a token"},
        {header->vocabulary >= 1 && header->vocabulary <= largest, "vocabulary"},
        {header->flags <= TOKEN_FILE_HAS_MASK, "flags"},
        {header->padded <= TOKEN_FILE_MAX_PADDED, "padded length"},
        {header->separator <= header->vocabulary, "token between documents"},
        {memcmp(header->zeros, zeros, sizeof zeros) == 0, "unused bytes"},
        {header->token_count > 0, "number of tokens"},
    };
    for (size_t i = 0; i < sizeof checks / sizeof checks[0]; i++) {
        if (checks[i].holds) { continue; }
        return error_set(error, "%s is damaged, or of a later version: the %s in its header cannot be", name,
                         checks[i].text);
    }
    return true;
}

// A view of the `size` bytes of a token file, which must stay where they are. name: of
// the file, for messages. On failure *file is all zeros.
static inline bool token_file_open(TokenFile *file, const char *name, const void *bytes, size_t size,
                                   TokenFileCheck check, Error *error) {
    TokenFileHeader header;
    memset(file, 0, sizeof *file);
    if (!token_file_read_header(&header, name, bytes, size, error)) { return false; }
    const uint8_t *tokens = (const uint8_t *)bytes + sizeof header, *mask = NULL;
    size_t body = size - sizeof header, width = header.token_bytes, count = header.token_count;
    bool masked = header.flags == TOKEN_FILE_HAS_MASK;
    bool fits = count <= body / width; // before the product, which a hostile count would overflow
    if (!fits || count * width + (masked ? (count + 7) / 8 : 0) != body) {
        return error_set(error,
                         "%s: the header promises %zu tokens of %zu bytes%s, but %zu bytes follow it: the "
                         "file is truncated or damaged",
                         name, count, width, masked ? " and a mask" : "", body);
    }
    if (masked) { mask = tokens + count * width; }
    if (masked && count % 8 != 0 && mask[count / 8] >> (count % 8) != 0) {
        return error_set(error, "%s is damaged: its mask has bits behind the last token", name);
    }
    TokenFile opened = {.tokens = tokens,
                        .mask = mask,
                        .token_count = count,
                        .vocabulary = header.vocabulary,
                        .token_bytes = (int)width,
                        .padded = (int)header.padded,
                        .separator = header.separator,
                        .tokenizer = header.tokenizer};
    if (check == TOKEN_FILE_CHECK_ALL) {
        uint32_t expected = header.checksum;
        header.checksum = 0;
        uint32_t found = (uint32_t)crc32_z(crc32_z(0, tokens, body), (const Bytef *)&header, sizeof header);
        if (found != expected) {
            return error_set(
                error,
                "%s is damaged: its checksum is %08x, but the header says %08x: copy or prepare it again",
                name, found, expected);
        }
        // A checksum that fits does not make tokens valid: the writer of the file computed it.
        for (size_t i = 0; i < count; i++) {
            uint32_t token = token_file_token(&opened, i);
            if (token < header.vocabulary) { continue; }
            return error_set(error,
                             "%s: token %u at position %zu is beyond the vocabulary of %u in its own header",
                             name, token, i, header.vocabulary);
        }
    }
    *file = opened;
    return true;
}

// A file has a temporary name until it is whole and on disk (file_replace_begin). It gets
// a mask, in memory until the end, if one of its tokens is not to be predicted.
typedef struct TokenWriter {
    FILE *file; // NULL: no file has been begun
    char path[PATH_MAX - 8];
    TokenFileHeader header; // so far; checksum: of what follows it. The separator is the tokenizer's end,
                            // unless the caller writes another
    uint8_t *mask;          // (mask_capacity), bits as in the file
    size_t mask_capacity;
} TokenWriter;

static inline int32_t token_id(int32_t id_or_read_only) {
    return id_or_read_only < 0 ? ~id_or_read_only : id_or_read_only;
}

// padded: the length of a sequence, each one document; 0: documents follow each other.
static inline bool token_writer_begin(TokenWriter *writer, const char *path, const Tokenizer *tokenizer,
                                      int padded, Error *error) {
    TokenFileHeader header = {.version = TOKEN_FILE_VERSION,
                              .token_bytes = tokenizer->vocabulary <= 65536 ? 2u : 4u,
                              .vocabulary = (uint32_t)tokenizer->vocabulary,
                              .tokenizer = tokenizer->sum,
                              .padded = (uint32_t)padded,
                              .separator = (uint32_t)(tokenizer->end + 1)};
    memset(writer, 0, sizeof *writer);
    memcpy(header.magic, TOKEN_FILE_MAGIC, sizeof header.magic);
    writer->header = header;
    snprintf(writer->path, sizeof writer->path, "%s", path);
    writer->file = file_replace_begin(path, error);
    return writer->file != NULL && // room for the header, which is written at the end
           (fwrite(&header, sizeof header, 1, writer->file) == 1 || error_set_file(error, "write", path));
}

// Writes what follows the header.
static inline bool token_writer_write(TokenWriter *writer, const uint8_t *bytes, size_t size, Error *error) {
    writer->header.checksum = (uint32_t)crc32_z(writer->header.checksum, bytes, size);
    return fwrite(bytes, 1, size, writer->file) == size || error_set_file(error, "write", writer->path);
}

// ids (count): a token that the model only reads, and does not predict, stands there as ~id.
static inline bool token_writer_add(TokenWriter *writer, const int32_t *ids, size_t count, Error *error) {
    enum { BLOCK = 4096 };
    uint8_t bytes[4 * BLOCK];
    uint64_t *place = &writer->header.token_count;
    size_t width = writer->header.token_bytes;
    list_reserve((void **)&writer->mask, *place / 8, &writer->mask_capacity, count / 8 + 2, 1);
    for (size_t done = 0; done < count; done += BLOCK) {
        size_t block = size_min(count - done, BLOCK);
        for (size_t i = 0; i < block; i++, ++*place) {
            uint8_t *byte = &writer->mask[*place / 8], bit = (uint8_t)(1u << (*place % 8));
            int32_t entry = ids[done + i], id = token_id(entry);
            *byte = (uint8_t)((bit == 1 ? 0 : *byte) | (entry >= 0 ? bit : 0));
            if (entry < 0) { writer->header.flags = TOKEN_FILE_HAS_MASK; }
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
    TokenFileHeader *header = &writer->header;
    bool written = header->flags != TOKEN_FILE_HAS_MASK ||
                   token_writer_write(writer, writer->mask, (header->token_count + 7) / 8, error);
    uint32_t body = header->checksum;
    header->checksum = 0;
    header->checksum = (uint32_t)crc32_z(body, (const Bytef *)header, sizeof *header);
    written = written && fseek(writer->file, 0, SEEK_SET) == 0 &&
              fwrite(header, sizeof *header, 1, writer->file) == 1;
    bool good = file_replace_end(writer->file, writer->path, written, error);
    writer->file = NULL;
    token_writer_abandon(writer);
    return good;
}
