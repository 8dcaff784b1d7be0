// token_file.h: a file of tokens in this program's own format, opened for reading.
// tokenizer/shard.py writes it.
//
// What llm.c's and nanoGPT's files cannot tell, this one does: which tokenizer made it,
// how large its vocabulary is, which tokens are to be predicted, and whether all of it is
// as it was written. All numbers are little-endian:
//
//     offset  bytes
//          0      8   magic: 89 41 43 43 4F 0D 0A 1A ("\x89ACCO\r\n\x1a": a program that rewrites line ends breaks it)
//          8      4   version: 1
//         12      4   bytes of a token: 2 or 4
//         16      4   vocabulary: every token is below it; at most 65536 where tokens have 2 bytes
//         20      4   flags: bit 0, a mask follows the tokens; all others 0
//         24      8   count of tokens, at least 1
//         32     32   SHA-256 of the tokenizer (tokenizer.h says of what); zeros where nobody knows
//         64      8   checksum: CRC-32 (as in zlib) of everything behind the header, then of the header with zeros in this field
//         72      4   length of the sequences that documents are padded to, at most 65536; 0: they follow each other
//         76    180   zeros
//        256          tokens, then the mask: (count + 7) / 8 bytes, token i is bit i % 8 of byte i / 8, unused bits are 0.
//                     1: the token is to be predicted; 0: it is only read, such as a prompt in fine-tuning
//
// Nothing else is in the file, so its size is known from the header. Every check is made
// at open, and nothing here trusts a byte of it: token_file_open_memory is what the
// fuzzer calls.
#ifndef ACCO_TOKENIZER_TOKEN_FILE_H
#define ACCO_TOKENIZER_TOKEN_FILE_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include <zlib.h>

#include "runtime/errors.h"
#include "runtime/files.h"

enum {
    SHARD_HEADER_BYTES = 256,
    SHARD_MAGIC_BYTES = 8,
    SHARD_VERSION = 1,
    SHARD_HAS_MASK = 1,
    SHARD_HASH_AT = 32,
    SHARD_HASH_BYTES = 32,
    SHARD_CHECKSUM_AT = 64,
    SHARD_CHECKSUM_BYTES = 8,
    SHARD_PADDED_AT = 72,
    SHARD_MOST_PADDED = 65536,
    SHARD_ZEROS_AT = 76
};

// Whether open reads the whole file, for its checksum and for tokens beyond the
// vocabulary; otherwise only the header is checked.
typedef enum TokenFileCheck { TOKEN_FILE_CHECK_HEADER, TOKEN_FILE_CHECK_ALL } TokenFileCheck;

typedef struct TokenFile {
    const uint8_t *tokens; // (token_count, token_bytes)
    const uint8_t *mask;   // (token_count) bits; NULL: every token is to be predicted
    uint64_t token_count;
    uint32_t vocabulary;
    int token_bytes; // 2 or 4
    int padded;      // length of sequences of one document each; 0: documents follow each other
    uint8_t tokenizer_hash[SHARD_HASH_BYTES];
    void *mapping; // NULL where the bytes belong to the caller
    size_t bytes;
} TokenFile;

static inline const uint8_t *token_file_magic(void) {
    return (const uint8_t *)"\x89"
                            "ACCO\r\n\x1a";
}

// Whether the bytes are meant as a shard: five of the eight bytes of the magic are
// enough, so that a damaged one is not taken for a file of another format. Chance makes
// that of nanoGPT's files, which have no mark, once in 10^10.
static inline bool token_file_recognise(const void *bytes, size_t size) {
    const uint8_t *byte = (const uint8_t *)bytes, *magic = token_file_magic();
    int equal = 0;
    for (size_t i = 0; i < SHARD_MAGIC_BYTES && i < size; i++) { equal += byte[i] == magic[i]; }
    return equal >= 5;
}

static inline uint64_t token_file_number(const uint8_t *bytes, int count) {
    uint64_t number = 0;
    for (int i = count - 1; i >= 0; i--) { number = number << 8 | bytes[i]; }
    return number;
}

static inline uint32_t token_file_token(const TokenFile *shard, uint64_t position) {
    const uint8_t *token = shard->tokens + position * (uint64_t)shard->token_bytes;
    return (uint32_t)token_file_number(token, shard->token_bytes == 2 ? 2 : 4);
}

// Whether the token at `position` is to be predicted.
static inline bool token_file_counts(const TokenFile *shard, uint64_t position) {
    return shard->mask == NULL || (shard->mask[position / 8] >> (position % 8) & 1) != 0;
}

// --------------------------------------------------------------------------------------------------------------------------- checks

static inline bool token_file_check_magic(const char *name, const uint8_t *header, size_t size,
                                          Error *error) {
    if (!token_file_recognise(header, size)) {
        return error_set(error, "%s is not a shard of tokens: it does not begin with the magic", name);
    }
    if (size < SHARD_HEADER_BYTES) {
        return error_set(error,
                         "%s is truncated: a shard has a header of %d bytes, this file ends after %llu", name,
                         (int)SHARD_HEADER_BYTES, (unsigned long long)size);
    }
    if (memcmp(header, token_file_magic(), SHARD_MAGIC_BYTES) != 0) {
        return error_set(error,
                         "%s is damaged: the first %d bytes are nearly those of a shard, but not all of them",
                         name, (int)SHARD_MAGIC_BYTES);
    }
    uint64_t version = token_file_number(header + 8, 4);
    if (version == SHARD_VERSION) { return true; }
    return error_set(error,
                     "%s is a shard in version %llu, but only version %d can be read: prepare the data again",
                     name, (unsigned long long)version, (int)SHARD_VERSION);
}

// The fields of a header whose magic and version are good.
static inline bool token_file_read_header(TokenFile *shard, const char *name, const uint8_t *header,
                                          Error *error) {
    uint64_t width = token_file_number(header + 12, 4), vocabulary = token_file_number(header + 16, 4),
             flags = token_file_number(header + 20, 4);
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
    if (flags > SHARD_HAS_MASK) {
        return error_set(
            error, "%s has flags 0x%llx, of which only 0x%x is known: it is damaged, or of a later version",
            name, (unsigned long long)flags, (unsigned)SHARD_HAS_MASK);
    }
    uint64_t padded = token_file_number(header + SHARD_PADDED_AT, 4);
    if (padded > SHARD_MOST_PADDED) {
        return error_set(error, "%s is damaged: it is padded to sequences of %llu; allowed: at most %d", name,
                         (unsigned long long)padded, (int)SHARD_MOST_PADDED);
    }
    for (int i = SHARD_ZEROS_AT; i < SHARD_HEADER_BYTES; i++) {
        if (header[i] != 0) {
            return error_set(error, "%s is damaged: byte %d of its header must be 0, but is %d", name, i,
                             header[i]);
        }
    }
    shard->token_bytes = (int)width;
    shard->vocabulary = (uint32_t)vocabulary;
    shard->padded = (int)padded;
    shard->token_count = token_file_number(header + 24, 8);
    shard->tokens = header + SHARD_HEADER_BYTES;
    shard->mask = flags == SHARD_HAS_MASK
                      ? shard->tokens
                      : NULL; // its place follows from the count, once that is known to be true
    memcpy(shard->tokenizer_hash, header + SHARD_HASH_AT, SHARD_HASH_BYTES);
    return true;
}

// Whether the tokens and the mask that the header promises are what follows it.
static inline bool token_file_check_size(TokenFile *shard, const char *name, size_t size, Error *error) {
    uint64_t body = size - SHARD_HEADER_BYTES, width = (uint64_t)shard->token_bytes,
             count = shard->token_count;
    if (count == 0) { return error_set(error, "%s holds no tokens: a shard has at least one", name); }
    bool possible = count <= body / width; // before the product: a hostile count must not overflow it
    uint64_t promised = possible ? count * width + (shard->mask != NULL ? (count + 7) / 8 : 0) : 0;
    if (!possible || promised != body) {
        return error_set(error,
                         "%s: the header promises %llu tokens of %d bytes%s, but %llu bytes follow it: the "
                         "file is truncated or "
                         "damaged",
                         name, (unsigned long long)count, shard->token_bytes,
                         shard->mask != NULL ? " and a mask" : "", (unsigned long long)body);
    }
    if (shard->mask == NULL) { return true; }
    shard->mask = shard->tokens + count * width;
    if (count % 8 == 0 || shard->mask[count / 8] >> (count % 8) == 0) { return true; }
    return error_set(error, "%s is damaged: its mask has bits behind the last token", name);
}

static inline bool token_file_check_sum(const char *name, const uint8_t *bytes, size_t size, Error *error) {
    uint8_t header[SHARD_HEADER_BYTES];
    memcpy(header, bytes, sizeof header);
    memset(header + SHARD_CHECKSUM_AT, 0, SHARD_CHECKSUM_BYTES);
    uint64_t found =
        crc32_z(crc32_z(0, bytes + SHARD_HEADER_BYTES, size - SHARD_HEADER_BYTES), header, sizeof header);
    uint64_t expected = token_file_number(bytes + SHARD_CHECKSUM_AT, SHARD_CHECKSUM_BYTES);
    if (found == expected) { return true; }
    return error_set(
        error, "%s is damaged: its checksum is %08llx, but the header says %08llx: copy or prepare it again",
        name, (unsigned long long)found, (unsigned long long)expected);
}

// Whether all tokens are below the vocabulary. The checksum is made by whoever writes the
// file: it says nothing about that.
static inline bool token_file_check_tokens(const TokenFile *shard, const char *name, Error *error) {
    for (uint64_t i = 0; i < shard->token_count; i++) {
        if (token_file_token(shard, i) < shard->vocabulary) { continue; }
        return error_set(error,
                         "%s: token %u at position %llu is beyond the vocabulary of %u in its own header",
                         name, token_file_token(shard, i), (unsigned long long)i, shard->vocabulary);
    }
    return true;
}

// --------------------------------------------------------------------------------------------------------------------------- opening

// A shard over bytes that belong to the caller and stay where they are; `name` is for
// messages. On failure *shard is all zeros.
static inline bool token_file_open_memory(TokenFile *shard, const char *name, const void *bytes, size_t size,
                                          TokenFileCheck check, Error *error) {
    const uint8_t *header = (const uint8_t *)bytes;
    memset(shard, 0, sizeof *shard);
    bool good = token_file_check_magic(name, header, size, error) &&
                token_file_read_header(shard, name, header, error) &&
                token_file_check_size(shard, name, size, error);
    if (good && check == TOKEN_FILE_CHECK_ALL) {
        good = token_file_check_sum(name, header, size, error) && token_file_check_tokens(shard, name, error);
    }
    if (!good) { memset(shard, 0, sizeof *shard); }
    shard->bytes = good ? size : 0;
    return good;
}

static inline void token_file_close(TokenFile *shard) {
    if (shard->mapping != NULL) { munmap(shard->mapping, shard->bytes); }
    memset(shard, 0, sizeof *shard);
}

// Maps the file read-only. On failure there is nothing to close. A file that shrinks
// while it is mapped ends the program with SIGBUS.
static inline bool token_file_open(TokenFile *shard, const char *path, TokenFileCheck check, Error *error) {
    size_t size = 0;
    memset(shard, 0, sizeof *shard);
    void *mapping = file_map(path, "a shard is a file of tokens", &size, error);
    if (mapping == NULL) { return false; }
    if (!token_file_open_memory(shard, path, mapping, size, check, error)) {
        munmap(mapping, size);
        return false;
    }
    shard->mapping = mapping;
    return true;
}

#endif
