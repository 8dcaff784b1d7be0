// fuzz_tokenizer.h: a tokenizer.json, and text to encode with it. The tokens of every text that is
// not normalized have its bytes, if each has a token; and decoding any tokens gives valid UTF-8.
//
// The 256 bytes of a vocabulary would be most of every input. So a file is tried as it is, and once
// more with the missing bytes added.
#pragma once

#include "test/fuzz/fuzz.h"
#include "tokenizer/tokenizer.h"

enum { FUZZ_BYTE_TOKENS = 1000 }; // ids of added bytes begin here

// Those of a file of characters.
static inline void fuzz_add_bytes(json_t *vocabulary) {
    for (int byte = 0; byte < 256; byte++) {
        char text[8];
        snprintf(text, sizeof text, "<0x%02X>", (unsigned)byte);
        if (json_object_get(vocabulary, text) != NULL) { continue; }
        json_object_set_new(vocabulary, text, json_integer(FUZZ_BYTE_TOKENS + byte));
    }
}

static inline void fuzz_add_letters(json_t *vocabulary) {
    int letters[BYTE_LETTERS];
    tokenizer_byte_letters(letters);
    for (int i = 0; i < BYTE_LETTERS; i++) {
        char letter[3] = {(char)(0xC0 | i >> 6), (char)(0x80 | (i & 0x3F)), '\0'};
        if (letters[i] < 0) { continue; }
        if (i < 0x80) {
            letter[0] = (char)i;
            letter[1] = '\0';
        }
        if (json_object_get(vocabulary, letter) != NULL) { continue; }
        json_object_set_new(vocabulary, letter, json_integer(FUZZ_BYTE_TOKENS + letters[i]));
    }
}

// Opens the file with all bytes in its vocabulary.
static inline bool fuzz_tokenizer_complete(Tokenizer *tokenizer, FuzzPart part, Error *error) {
    json_t *root = json_loadb((const char *)part.bytes, part.size, 0, NULL);
    json_t *model = json_object_get(root, "model"), *vocabulary = json_object_get(model, "vocab");
    bool characters = json_is_true(json_object_get(model, "byte_fallback"));
    if (json_is_object(vocabulary)) { (characters ? fuzz_add_bytes : fuzz_add_letters)(vocabulary); }
    char *text = json_dumps(root, JSON_COMPACT);
    bool good = text != NULL ? tokenizer_open_memory(tokenizer, "input.json", text, strlen(text), error)
                             : error_set(error, "an input that is not JSON");
    free(text);
    json_decref(root);
    return good;
}

// ---- Laws -----------------------------------------------------------------------------

// The caller frees the bytes.
typedef struct FuzzText {
    char *bytes;
    size_t count;
} FuzzText;

static inline void fuzz_require_utf8(const FuzzText *text) {
    size_t length = 0;
    for (size_t i = 0; i < text->count; i += length) {
        Utf8 what = utf8_scan((const uint8_t *)text->bytes + i, text->count - i, &length);
        fuzz_require(what == UTF8_VALID, "what is decoded is UTF-8");
    }
}

// Decodes at once and one token at a time, which must give the same text. The caller
// frees it.
static inline FuzzText fuzz_decode(const Tokenizer *tokenizer, const int32_t *ids, size_t count) {
    TokenDecoder decoder, slow_decoder;
    FuzzText text = {NULL, 0}, slow = {NULL, 0};
    FILE *file = open_memstream(&text.bytes, &text.count),
         *slow_file = open_memstream(&slow.bytes, &slow.count);
    memset(&decoder, 0, sizeof decoder);
    memset(&slow_decoder, 0, sizeof slow_decoder);
    tokenizer_decode(tokenizer, &decoder, ids, count, true, file);
    token_decoder_release(&decoder, true, file);
    for (size_t i = 0; i < count; i++) {
        tokenizer_decode(tokenizer, &slow_decoder, ids + i, 1, true, slow_file);
    }
    token_decoder_release(&slow_decoder, true, slow_file);
    fclose(file);
    fclose(slow_file);
    fuzz_require(decoder.held_count == 0, "all tokens can be decoded");
    fuzz_require(text.count == slow.count &&
                     (text.count == 0 || memcmp(text.bytes, slow.bytes, text.count) == 0),
                 "decoding in parts is decoding");
    fuzz_require_utf8(&text);
    free(slow.bytes);
    return text;
}

// Whether each added token has the bytes of its text. One whose text consists of byte
// letters stands for those bytes, as in the library, and then the tokens of a text need
// not have its bytes.
static inline bool fuzz_added_are_literal(const Tokenizer *tokenizer) {
    bool literal = true;
    for (int i = 0; i < tokenizer->added_count; i++) {
        size_t length;
        const uint8_t *bytes = tokenizer_bytes(tokenizer, tokenizer->added[i].id, &length);
        literal = literal && length == tokenizer->added[i].length &&
                  memcmp(bytes, tokenizer->added[i].text, length) == 0;
    }
    return literal;
}

// The bytes of the tokens, joined, are the text.
static inline void fuzz_require_bytes(const Tokenizer *tokenizer, const TokenList *list, FuzzPart text) {
    size_t position = 0;
    for (size_t i = 0; i < list->count; i++) {
        size_t length;
        const uint8_t *bytes = tokenizer_bytes(tokenizer, list->ids[i], &length);
        fuzz_require(length <= text.size - position && memcmp(bytes, text.bytes + position, length) == 0,
                     "tokens have the bytes of the text");
        position += length;
    }
    fuzz_require(position == text.size, "tokens have all bytes of the text");
}

// The text as it must come back: with U+FFFD for what is not UTF-8. The caller frees it.
static inline FuzzText fuzz_readable(FuzzPart text) {
    FuzzText readable = {NULL, 0};
    FILE *file = open_memstream(&readable.bytes, &readable.count);
    size_t length = 0;
    for (size_t i = 0; i < text.size; i += length) {
        bool good = utf8_scan(text.bytes + i, text.size - i, &length) == UTF8_VALID;
        fwrite(good ? (const char *)text.bytes + i : "\xEF\xBF\xBD", 1, good ? length : 3, file);
    }
    fclose(file);
    return readable;
}

static inline void fuzz_require_same_text(const FuzzText *decoded, FuzzPart text) {
    FuzzText readable = fuzz_readable(text);
    bool same = decoded->count == readable.count &&
                (readable.count == 0 || memcmp(decoded->bytes, readable.bytes, readable.count) == 0);
    fuzz_require(same, "decoding gives the text back");
    free(readable.bytes);
}

static inline void fuzz_encode(const Tokenizer *tokenizer, FuzzPart text, bool special) {
    TokenList list = {NULL, 0, 0};
    Error error = {""};
    bool good = tokenizer_encode(tokenizer, (const char *)text.bytes, text.size, special, &list, &error);
    fuzz_require(good, "every text can be encoded");
    for (size_t i = 0; i < list.count; i++) {
        fuzz_require(list.ids[i] >= 0 && list.ids[i] < tokenizer->vocabulary,
                     "every id is below the vocabulary");
        size_t length = 0;
        tokenizer_bytes(tokenizer, list.ids[i], &length);
        fuzz_require(length > 0, "every id has a token");
        fuzz_require(special || !tokenizer->is_special[list.ids[i]],
                     "special tokens only where they are allowed");
    }
    FuzzText decoded = fuzz_decode(tokenizer, list.ids, list.count);
    // No blank is put in front, and no byte is left out.
    bool same = !tokenizer->composes && !tokenizer->characters && !tokenizer->lacks_bytes;
    if (same && fuzz_added_are_literal(tokenizer)) {
        fuzz_require_bytes(tokenizer, &list, text);
        fuzz_require_same_text(&decoded, text);
    }
    free(decoded.bytes);
    token_list_free(&list);
}

// Decodes the input's bytes as ids, most of which have no token.
static inline void fuzz_decode_anything(const Tokenizer *tokenizer, FuzzPart text) {
    size_t count = text.size / sizeof(int16_t);
    int32_t *ids = (int32_t *)malloc((count + 1) * sizeof *ids);
    fuzz_require(ids != NULL, "there is memory for the input");
    for (size_t i = 0; i < count; i++) {
        int16_t id;
        memcpy(&id, text.bytes + i * sizeof id, sizeof id);
        ids[i] = id;
    }
    FuzzText decoded = fuzz_decode(tokenizer, ids, count);
    free(decoded.bytes);
    free(ids);
}

static inline void fuzz_tokenizer_use(const Tokenizer *tokenizer, FuzzPart text) {
    for (int byte = 0; byte < 256; byte++) {
        size_t length;
        const uint8_t *bytes = tokenizer_bytes(tokenizer, tokenizer->byte_ids[byte], &length);
        fuzz_require(tokenizer->byte_ids[byte] < 0 ? tokenizer->lacks_bytes : length == 1 && bytes[0] == byte,
                     "the token of a byte is that byte");
    }
    uint8_t *copy = fuzz_copy(text);
    FuzzPart exact = {copy, text.size};
    fuzz_encode(tokenizer, exact, true);
    fuzz_encode(tokenizer, exact, false);
    fuzz_decode_anything(tokenizer, exact);
    free(copy);
}

static inline bool fuzz_tokenizer(const uint8_t *data, size_t size) {
    FuzzPart parts[2];
    Tokenizer tokenizer;
    Error error = {""};
    fuzz_split(data, size, parts, 2);
    uint8_t *copy = fuzz_copy(parts[0]);
    if (fuzz_accepted(tokenizer_open_memory(&tokenizer, "input.json", copy, parts[0].size, &error), &error)) {
        fuzz_tokenizer_use(&tokenizer, parts[1]);
        tokenizer_close(&tokenizer);
    }
    free(copy);
    bool good = fuzz_accepted(fuzz_tokenizer_complete(&tokenizer, parts[0], &error), &error);
    if (good) {
        fuzz_tokenizer_use(&tokenizer, parts[1]);
        tokenizer_close(&tokenizer);
    }
    return good;
}
