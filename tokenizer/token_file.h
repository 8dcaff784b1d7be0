// token_file.h: reads this program's own format for tokens, which token_writer.h writes.
//
// It says what llm.c's and nanoGPT's formats cannot: which tokenizer made the tokens, how
// large its vocabulary is, which tokens are to be predicted, and whether the file is
// still what was written. All numbers are little-endian:
//
//     offset  bytes
//          0      8   magic: 89 41 43 43 4F 0D 0A 1A ("\x89ACCO\r\n\x1a"; a program that
//                     converts line ends destroys it, so the damage is noticed)
//          8      4   version: 1
//         12      4   bytes of a token: 2 or 4
//         16      4   vocabulary: every token is below it; at most 65536 where tokens have
//                     2 bytes
//         20      4   flags: bit 0, a mask follows the tokens; all others are 0
//         24      8   number of tokens, at least 1
//         32     32   SHA-256 of the tokenizer (Tokenizer.hash); zeros: unknown
//         64      8   checksum: CRC-32 (as in zlib) of everything after the header,
//                     continued over the header with zeros in this field
//         72      4   length to which each document was padded, at most 65536; 0: documents
//                     follow each other without padding
//         76    180   zeros
//        256          tokens, then the mask: (count + 7) / 8 bytes; token i is bit i % 8
//                     of byte i / 8; unused bits are 0. 1: the token is to be predicted;
//                     0: it is only read, as the prompt is in fine-tuning
//
// The header determines the size of the file. Every field is checked at open, because the
// bytes may come from anywhere; test/fuzz/fuzz_token_file.h feeds random ones to
// token_file_open.
#ifndef ACCO_TOKENIZER_TOKEN_FILE_H
#define ACCO_TOKENIZER_TOKEN_FILE_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include <zlib.h>

#include "runtime/errors.h"
#include "runtime/files.h"

enum {
    TOKEN_FILE_MAGIC_BYTES = 8,
    TOKEN_FILE_VERSION = 1,
    TOKEN_FILE_HAS_MASK = 1,
    TOKEN_FILE_HASH_AT = 32,
    TOKEN_FILE_HASH_BYTES = 32,
    TOKEN_FILE_CHECKSUM_AT = 64,
    TOKEN_FILE_CHECKSUM_BYTES = 8,
    TOKEN_FILE_PADDED_AT = 72,
    TOKEN_FILE_MAX_PADDED = 65536,
    TOKEN_FILE_ZEROS_AT = 76,
    TOKEN_FILE_HEADER_BYTES = 256
};

// CHECK_ALL reads the whole file, for its checksum and for tokens beyond the vocabulary.
typedef enum TokenFileCheck { TOKEN_FILE_CHECK_HEADER, TOKEN_FILE_CHECK_ALL } TokenFileCheck;

// A view of bytes that belong to the caller.
typedef struct TokenFile {
    const uint8_t *tokens; // (token_count, token_bytes)
    const uint8_t *mask;   // (token_count) bits; NULL: every token is to be predicted
    uint64_t token_count;
    uint32_t vocabulary;
    int token_bytes;               // 2 or 4
    int padded;                    // length of a sequence, each one document; 0: not padded
    const uint8_t *tokenizer_hash; // (TOKEN_FILE_HASH_BYTES)
} TokenFile;

static inline const uint8_t *token_file_magic(void) {
    return (const uint8_t *)"\x89"
                            "ACCO\r\n\x1a";
}

// Whether the bytes are meant as a token file: five of the eight bytes of the magic
// suffice, so that a damaged token file is not taken for a file of another format. A
// nanoGPT file, which has no magic, matches by chance once in 10^10.
static inline bool token_file_recognise(const void *bytes, size_t size) {
    const uint8_t *byte = (const uint8_t *)bytes, *magic = token_file_magic();
    int equal = 0;
    for (size_t i = 0; i < TOKEN_FILE_MAGIC_BYTES && i < size; i++) { equal += byte[i] == magic[i]; }
    return equal >= 5;
}

// Whether a hash says which tokenizer made a file: NULL and zeros do not.
static inline bool token_hash_is_known(const uint8_t *hash) {
    static const uint8_t unknown[TOKEN_FILE_HASH_BYTES] = {0};
    return hash != NULL && memcmp(hash, unknown, TOKEN_FILE_HASH_BYTES) != 0;
}

// Whether two files, or a file and a tokenizer, may belong together: their hashes are equal,
// or one of them is unknown.
static inline bool token_hashes_agree(const uint8_t *a, const uint8_t *b) {
    return !token_hash_is_known(a) || !token_hash_is_known(b) || memcmp(a, b, TOKEN_FILE_HASH_BYTES) == 0;
}

static inline uint64_t token_file_number(const uint8_t *bytes, int count) {
    uint64_t number = 0;
    for (int i = count - 1; i >= 0; i--) { number = number << 8 | bytes[i]; }
    return number;
}

static inline uint32_t token_file_token(const TokenFile *file, uint64_t position) {
    const uint8_t *token = file->tokens + position * (uint64_t)file->token_bytes;
    return (uint32_t)token_file_number(token, file->token_bytes);
}

// Whether the token at `position` is to be predicted. mask: or NULL, and then all are.
static inline bool token_mask_counts(const uint8_t *mask, uint64_t position) {
    return mask == NULL || (mask[position / 8] >> (position % 8) & 1) != 0;
}

// ---------------------------------------------------------------------------------------
// Checks

static inline bool token_file_check_magic(const char *name, const uint8_t *header, size_t size,
                                          Error *error) {
    if (!token_file_recognise(header, size)) {
        return error_set(error, "%s is not a token file: it does not begin with the magic", name);
    }
    if (size < TOKEN_FILE_HEADER_BYTES) {
        return error_set(error,
                         "%s is truncated: a token file has a header of %d bytes, this file ends after %llu",
                         name, (int)TOKEN_FILE_HEADER_BYTES, (unsigned long long)size);
    }
    if (memcmp(header, token_file_magic(), TOKEN_FILE_MAGIC_BYTES) != 0) {
        return error_set(
            error, "%s is damaged: the first %d bytes are nearly those of a token file, but not all of them",
            name, (int)TOKEN_FILE_MAGIC_BYTES);
    }
    uint64_t version = token_file_number(header + 8, 4);
    if (version == TOKEN_FILE_VERSION) { return true; }
    return error_set(
        error, "%s is a token file of version %llu, but only version %d can be read: prepare the data again",
        name, (unsigned long long)version, (int)TOKEN_FILE_VERSION);
}

// Fills *file from a header whose magic and version are right. file->mask is not its
// place yet, only NULL or not: its place depends on the count, which
// token_file_check_size checks.
static inline bool token_file_read_header(TokenFile *file, const char *name, const uint8_t *header,
                                          Error *error) {
    uint64_t width = token_file_number(header + 12, 4), vocabulary = token_file_number(header + 16, 4),
             flags = token_file_number(header + 20, 4),
             padded = token_file_number(header + TOKEN_FILE_PADDED_AT, 4);
    if (width != 2 && width != 4) {
        return error_set(error, "%s is damaged: its tokens have %llu bytes; allowed: 2 or 4", name,
                         (unsigned long long)width);
    }
    uint64_t largest = width == 2 ? 65536 : (uint64_t)INT32_MAX;
    if (vocabulary < 1 || vocabulary > largest) {
        return error_set(
            error, "%s is damaged: it has a vocabulary of %llu; allowed with tokens of %d bytes: 1 to %llu",
            name, (unsigned long long)vocabulary, (int)width, (unsigned long long)largest);
    }
    if (flags > TOKEN_FILE_HAS_MASK) {
        return error_set(
            error, "%s has flags 0x%llx, of which only 0x%x is known: it is damaged, or of a later version",
            name, (unsigned long long)flags, (unsigned)TOKEN_FILE_HAS_MASK);
    }
    if (padded > TOKEN_FILE_MAX_PADDED) {
        return error_set(error, "%s is damaged: it is padded to sequences of %llu; allowed: at most %d", name,
                         (unsigned long long)padded, (int)TOKEN_FILE_MAX_PADDED);
    }
    for (int i = TOKEN_FILE_ZEROS_AT; i < TOKEN_FILE_HEADER_BYTES; i++) {
        if (header[i] != 0) {
            return error_set(error, "%s is damaged: byte %d of its header must be 0, but is %d", name, i,
                             header[i]);
        }
    }
    file->token_bytes = (int)width;
    file->vocabulary = (uint32_t)vocabulary;
    file->padded = (int)padded;
    file->token_count = token_file_number(header + 24, 8);
    file->tokens = header + TOKEN_FILE_HEADER_BYTES;
    file->mask = flags == TOKEN_FILE_HAS_MASK ? file->tokens : NULL;
    file->tokenizer_hash = header + TOKEN_FILE_HASH_AT;
    return true;
}

// Whether the tokens and the mask that the header promises are exactly what follows it.
static inline bool token_file_check_size(TokenFile *file, const char *name, size_t size, Error *error) {
    uint64_t body = size - TOKEN_FILE_HEADER_BYTES, width = (uint64_t)file->token_bytes,
             count = file->token_count;
    if (count == 0) { return error_set(error, "%s holds no tokens: a token file has at least one", name); }
    bool fits = count <= body / width; // before the product, which a hostile count would overflow
    uint64_t promised = fits ? count * width + (file->mask != NULL ? (count + 7) / 8 : 0) : 0;
    if (!fits || promised != body) {
        return error_set(error,
                         "%s: the header promises %llu tokens of %d bytes%s, but %llu bytes follow it: the "
                         "file is truncated or damaged",
                         name, (unsigned long long)count, file->token_bytes,
                         file->mask != NULL ? " and a mask" : "", (unsigned long long)body);
    }
    if (file->mask == NULL) { return true; }
    file->mask = file->tokens + count * width;
    if (count % 8 == 0 || file->mask[count / 8] >> (count % 8) == 0) { return true; }
    return error_set(error, "%s is damaged: its mask has bits behind the last token", name);
}

// ---------------------------------------------------------------------------------------
// Opening

// Fills *file with a view of the `size` bytes of a token file, which must stay where they
// are as long as it is used. name: of the file, for messages. On failure *file is all
// zeros.
static inline bool token_file_open(TokenFile *file, const char *name, const void *bytes, size_t size,
                                   TokenFileCheck check, Error *error) {
    const uint8_t *header = (const uint8_t *)bytes;
    memset(file, 0, sizeof *file);
    bool good = token_file_check_magic(name, header, size, error) &&
                token_file_read_header(file, name, header, error) &&
                token_file_check_size(file, name, size, error);
    if (good && check == TOKEN_FILE_CHECK_ALL) {
        uint8_t blank[TOKEN_FILE_HEADER_BYTES];
        memcpy(blank, header, sizeof blank);
        memset(blank + TOKEN_FILE_CHECKSUM_AT, 0, TOKEN_FILE_CHECKSUM_BYTES);
        uint64_t found = crc32_z(crc32_z(0, header + sizeof blank, size - sizeof blank), blank, sizeof blank),
                 expected = token_file_number(header + TOKEN_FILE_CHECKSUM_AT, TOKEN_FILE_CHECKSUM_BYTES);
        good = found == expected || error_set(error,
                                              "%s is damaged: its checksum is %08llx, but the header says "
                                              "%08llx: copy or prepare it again",
                                              name, (unsigned long long)found, (unsigned long long)expected);
        // A checksum that fits does not make tokens valid: the writer of the file computed it.
        for (uint64_t i = 0; good && i < file->token_count; i++) {
            uint32_t token = token_file_token(file, i);
            good = token < file->vocabulary ||
                   error_set(error,
                             "%s: token %u at position %llu is beyond the vocabulary of %u in its own header",
                             name, token, (unsigned long long)i, file->vocabulary);
        }
    }
    if (!good) { memset(file, 0, sizeof *file); }
    return good;
}

#endif
