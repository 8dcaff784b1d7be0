// tokenizer.h: text to tokens and back: byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM have it,
// and BPE of characters, as Llama 2, TinyLlama and Mistral took it over from SentencePiece.
//
// Reads the tokenizer.json of Hugging Face's `tokenizers` and gives the same ids as that
// library. Encoding has four stages:
//
//   added tokens    Texts of added tokens, such as <|endoftext|>, are cut out first: the
//                   leftmost, and among those that begin at one place the longest. Those that are
//                   `normalized` are cut out of what the normalizer has made.
//   normalizer      Qwen's composes characters: an e and an accent become one (NFC, utf8proc).
//   pre-tokenizer   Patterns cut the rest into pieces, one after the other: GPT-2's own, those that
//                   the file has, digits (PCRE2).
//   merges          Each piece begins as bytes. As long as two neighbours can be merged,
//                   the pair whose merge was learned first becomes one token. Llama 3 first
//                   looks whether the whole piece is a token (ignore_merges).
//
// BPE of characters has no patterns: a text is one piece, with a blank put in front. It begins as
// characters; one that is no token becomes its bytes (byte_fallback). The file writes a blank as
// U+2581 and a byte as <0x41>; here tokens have the blank and the byte.
//
// Bytes that are no UTF-8, which the library refuses, become one token each. A byte without a
// token, of which vocabularies such as SmolLM2's have some, is left out as by the library, and what
// stands around it is merged. A tokenizer.json that asks for more (another normalizer, dropout, a
// token for what is unknown) is refused. Of its post-processor only the token in front of a text is
// read: prompts and tasks (tokenizer_begin_text) and documents (tokenize.h) get it.
#pragma once

#include <jansson.h>
#ifndef PCRE2_CODE_UNIT_WIDTH
#define PCRE2_CODE_UNIT_WIDTH 8
#endif
#include <pcre2.h>
#include <utf8proc.h>
#include <zlib.h>

#include "runtime/errors.h"
#include "runtime/files.h"
#include "runtime/json_files.h"
#include "runtime/numbers.h"
#include "runtime/random.h"
#include "runtime/utf8.h"

enum {
    TOKENIZER_MOST_PATTERNS = 8,         // the most that is known are DeepSeek's six
    TOKENIZER_MOST_TOKENS = 1 << 20,     // the largest vocabularies have a quarter of this
    TOKENIZER_MOST_FILE_BYTES = 1 << 28, // GPT-2's tokenizer.json has 2 MB
    TOKENIZER_MOST_TEXT_BYTES = 1 << 30  // positions are int32
};

// (left, right) become `id`. rank: its place in the order in which merges were learned.
typedef struct TokenMerge {
    uint64_t pair; // left << 32 | right; UINT64_MAX: an empty slot
    uint32_t rank;
    int32_t id;
} TokenMerge;

typedef struct AddedToken {
    char *text, *sought; // as in the file; as it stands in a text from which it is cut out
    size_t length, sought_length;
    int32_t id;
    bool special;    // cut out only if the caller allows it
    bool normalized; // cut out after those that are not, of what the normalizer has made
} AddedToken;

// Where BPE of characters puts a blank: in front of each text between added tokens, unless that
// begins with a blank, or only in front of the first.
typedef enum TokenizerBlank { BLANK_NOWHERE, BLANK_ALWAYS, BLANK_IF_NONE, BLANK_IF_FIRST } TokenizerBlank;

typedef struct Tokenizer {
    int vocabulary;        // the largest id plus one, of those that the model has
    int learned;           // the same without tokens that were only added
    uint8_t *bytes;        // of all tokens, without gaps
    uint32_t *offsets;     // (vocabulary + 1) token i is bytes[offsets[i]] up to bytes[offsets[i + 1]]
    bool *is_special;      // (vocabulary)
    int32_t byte_ids[256]; // -1: no token stands for the byte
    bool lacks_bytes;      // there are such bytes
    TokenMerge *merges;    // (merge_slots), a hash table with open addressing
    size_t merge_slots;    // a power of two
    AddedToken *added;
    int added_count;
    bool begins_added[256]; // whether the text of one, or what is sought, begins with this byte
    int32_t begin;          // the token in front of a text, such as <|begin_of_text|>; -1: none
    int32_t end; // the token behind a text: <|endoftext|>, or what tokenizer_find_end finds; -1: unknown
    pcre2_code *patterns[TOKENIZER_MOST_PATTERNS]; // each cuts what the ones before it have left whole
    int pattern_count;
    char *pattern_texts; // as in the file, each with a line's end behind it
    // (whole_slots) ids, hashed by the bytes of tokens; -1: empty. NULL: bytes, no ignore_merges.
    int32_t *whole;
    size_t whole_slots; // a power of two
    bool composes;      // the normalizer is NFC
    bool characters;    // pieces begin as characters, found in `whole`, not as bytes
    TokenizerBlank blank;
    uint32_t sum; // CRC-32 of all tokens and merges: sum_of in tokenizer/vocabulary.py
} Tokenizer;

#define TOKENIZER_NO_END \
    "has no token <|endoftext|>, and neither tokenizer_config.json nor config.json beside it names another " \
    "of its added tokens as eos_token: one is put behind each document"

typedef struct TokenList {
    int32_t *ids;
    size_t count, capacity;
} TokenList;

// All zeros before the first token.
typedef struct TokenDecoder {
    uint8_t held[4]; // of a token: the beginning of a character whose other bytes have not come yet
    int held_count;
    bool drops_blank; // the next token begins a text: the blank in front of it is not written
} TokenDecoder;

// Makes room for `more` elements of `size` bytes behind `count`.
static inline void list_reserve(void **list, size_t count, size_t *capacity, size_t more, size_t size) {
    if (*capacity - count >= more) { return; }
    while (*capacity - count < more) { *capacity = *capacity < 16 ? 16 : 2 * *capacity; }
    *list = memory_grow(*list, *capacity * size);
}

static inline void token_list_add(TokenList *list, int32_t id) {
    list_reserve((void **)&list->ids, list->count, &list->capacity, 1, sizeof *list->ids);
    list->ids[list->count++] = id;
}

static inline void token_list_free(TokenList *list) {
    free(list->ids);
    memset(list, 0, sizeof *list);
}

// ---- Tokens as they are written in tokenizer.json -------------------------------------

enum { BYTE_LETTERS = 256 + 68 };

// GPT-2 writes bytes that print as themselves, the other 68 as the characters from U+0100
// on. letters[c]: the byte that the character c stands for, or -1.
static inline void tokenizer_byte_letters(int letters[BYTE_LETTERS]) {
    int next = 256;
    for (int i = 0; i < BYTE_LETTERS; i++) { letters[i] = -1; }
    for (int byte = 0; byte < 256; byte++) {
        bool prints = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
        letters[prints ? byte : next++] = byte;
    }
}

// Returns how many bytes the token of this text has, at most as many as the text. One
// with a character that stands for no byte is taken literally, as added tokens are.
static inline size_t tokenizer_token_bytes(const int letters[BYTE_LETTERS], const char *text,
                                           uint8_t *bytes) {
    const uint8_t *in = (const uint8_t *)text;
    size_t total = strlen(text), count = 0, length = 0;
    for (size_t i = 0; i < total; i += length) {
        // Letters, which lie below U+0144, have at most two bytes; 0 stands for no byte.
        bool valid = utf8_scan(in + i, total - i, &length) == UTF8_VALID && length <= 2;
        int character = !valid ? 0 : length == 1 ? in[i] : (in[i] & 0x1F) << 6 | (in[i + 1] & 0x3F);
        if (character >= BYTE_LETTERS || letters[character] < 0) {
            memcpy(bytes, text, total);
            return total;
        }
        bytes[count++] = (uint8_t)letters[character];
    }
    return count;
}

#define TOKENIZER_BLANK "\xE2\x96\x81"

// The same of BPE of characters. *is_byte: the token is a byte, and no character.
static inline size_t tokenizer_character_bytes(const char *text, uint8_t *bytes, bool *is_byte) {
    size_t count = 0;
    unsigned byte;
    int end = 0;
    *is_byte = strlen(text) == 6 && sscanf(text, "<0x%2X>%n", &byte, &end) == 1 && end == 6;
    if (*is_byte) { bytes[count++] = (uint8_t)byte; }
    for (const char *at = text; !*is_byte && *at != '\0'; at++) {
        bool blank = strncmp(at, TOKENIZER_BLANK, 3) == 0;
        bytes[count++] = blank ? ' ' : (uint8_t)*at;
        at += blank ? 2 : 0;
    }
    return count;
}

// ---- Loading --------------------------------------------------------------------------

typedef struct TokenizerFile {
    const char *name;
    const json_t *vocabulary, *merges, *added;
    bool has_normalizer, has_unknown; // unknown: a token stands for characters that have none
    const char **texts;               // (TOKENIZER_MOST_TOKENS) as in the file; NULL: no token has this id
} TokenizerFile;

// The value of a key; NULL where it is missing or null.
static inline const json_t *tokenizer_get(const json_t *object, const char *key) {
    const json_t *value = json_object_get(object, key);
    return json_is_null(value) ? NULL : value;
}

// Whether the file has all parts, and asks only for what this module can do. Finds the parts.
static inline bool tokenizer_find_parts(Tokenizer *tokenizer, TokenizerFile *file, const json_t *root,
                                        Error *error) {
    const json_t *model = json_object_get(root, "model");
    static const char *const switches[] = {"dropout", "continuing_subword_prefix", "end_of_word_suffix"};
    tokenizer->characters = json_flag(model, "byte_fallback");
    file->vocabulary = json_object_get(model, "vocab");
    file->merges = json_object_get(model, "merges");
    file->has_unknown = tokenizer_get(model, "unk_token") != NULL;
    file->has_normalizer = tokenizer_get(root, "normalizer") != NULL;
    file->added = tokenizer_get(root, "added_tokens");
    if (json_object_get(model, "type") != NULL && !json_says(model, "type", "BPE")) {
        const char *type = json_text(model, "type");
        return error_set(error, "%s has a model of type '%.40s', but only BPE can be read", file->name,
                         type != NULL ? type : "(no text)");
    }
    if (!json_is_object(file->vocabulary) || !json_is_array(file->merges) ||
        (file->added != NULL && !json_is_array(file->added))) {
        return error_set(error,
                         "%s is not a tokenizer.json, which has an object 'model' with an object 'vocab' and "
                         "a list 'merges', and a list 'added_tokens'",
                         file->name);
    }
    for (size_t i = 0; i < sizeof switches / sizeof switches[0]; i++) {
        const json_t *value = tokenizer_get(model, switches[i]);
        if (value == NULL || json_is_false(value) || json_says(model, switches[i], "")) { continue; }
        return error_set(error, "%s sets '%s', which is not supported", file->name, switches[i]);
    }
    return true;
}

// ---- Patterns -------------------------------------------------------------------------

// PCRE2's \s has U+180E, no space in Unicode and for the library.
#define TOKENIZER_SPACE \
    "\\x09-\\x0D\\x20\\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}\\x{" \
    "3000}"
#define TOKENIZER_GPT2 "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

// Compiles a pattern as the library reads it, behind those that are there.
static inline bool tokenizer_add_pattern(Tokenizer *tokenizer, const TokenizerFile *file, const char *pattern,
                                         Error *error) {
    if (tokenizer->pattern_count == TOKENIZER_MOST_PATTERNS) {
        return error_set(error, "%s cuts text by more than %d patterns", file->name, TOKENIZER_MOST_PATTERNS);
    }
    for (const char *at = pattern; (at = strchr(at, '\\')) != NULL && at[1] != '\0'; at += 2) {
        if (strchr("bBdDhHRwWX", at[1]) == NULL) { continue; }
        return error_set(error, "%s has \\%c in a pattern, which PCRE2 reads otherwise than the library",
                         file->name, at[1]);
    }
    char *text = NULL;
    size_t size = 0, offset = 0, before = strlen(tokenizer->pattern_texts), more = strlen(pattern) + 2;
    tokenizer->pattern_texts = (char *)memory_grow(tokenizer->pattern_texts, before + more);
    snprintf(tokenizer->pattern_texts + before, more, "%s\n", pattern);
    FILE *out = open_memstream(&text, &size);
    for (bool in_class = false; *pattern != '\0'; pattern++) {
        bool escapes = pattern[0] == '\\' && pattern[1] != '\0', space = escapes && pattern[1] == 's';
        if (space && in_class) {
            fputs(TOKENIZER_SPACE, out);
        } else if (space || (escapes && pattern[1] == 'S' && !in_class)) {
            fprintf(out, "[%s" TOKENIZER_SPACE "]", space ? "" : "^");
        } else if (!in_class && (*pattern == '^' || *pattern == '$')) { // there, of each line
            fputs(*pattern == '^' ? "(?<![^\\n])" : "(?![^\\n])", out);
        } else {
            fwrite(pattern, 1, escapes ? 2 : 1, out);
        }
        in_class = escapes ? in_class : in_class ? *pattern != ']' : *pattern == '[';
        pattern += escapes;
    }
    fclose(out);
    int code = 0;
    pcre2_code *compiled = pcre2_compile((PCRE2_SPTR)text, size, PCRE2_UTF, &code, &offset, NULL);
    if (compiled == NULL) {
        error_set(error, "%s: PCRE2 refuses the pattern '%.300s' (error %d): it must be built with Unicode",
                  file->name, text, code);
    } else {
        pcre2_jit_compile(compiled, PCRE2_JIT_COMPLETE); // failing means slower matching
        tokenizer->patterns[tokenizer->pattern_count++] = compiled;
    }
    free(text);
    return compiled != NULL;
}

// Reads one part of the pre-tokenizer. Returns whether it can be followed; *letters: it has
// ByteLevel.
static inline bool tokenizer_read_cutter(Tokenizer *tokenizer, const TokenizerFile *file, const json_t *part,
                                         bool *letters, Error *error) {
    const char *pattern = json_text(json_object_get(part, "pattern"), "Regex");
    if (json_says(part, "type", "Sequence")) {
        const json_t *parts = json_object_get(part, "pretokenizers");
        bool good = json_is_array(parts);
        for (size_t i = 0; good && i < json_array_size(parts); i++) {
            const json_t *one = json_array_get(parts, i);
            good = !json_says(one, "type", "Sequence") &&
                   tokenizer_read_cutter(tokenizer, file, one, letters, error);
        }
        return good;
    }
    if (json_says(part, "type", "ByteLevel") && !json_flag(part, "add_prefix_space")) {
        *letters = true;
        return json_is_false(json_object_get(part, "use_regex")) ||
               tokenizer_add_pattern(tokenizer, file, TOKENIZER_GPT2, error);
    }
    if (json_says(part, "type", "Digits")) {
        bool single = json_flag(part, "individual_digits");
        return tokenizer_add_pattern(tokenizer, file, single ? "\\p{N}" : "\\p{N}+", error);
    }
    return json_says(part, "type", "Split") && json_says(part, "behavior", "Isolated") &&
           !json_flag(part, "invert") && pattern != NULL &&
           tokenizer_add_pattern(tokenizer, file, pattern, error);
}

// The text of the token that a post-processor puts in front of a text; NULL: it puts none.
static inline const char *tokenizer_find_begin(const json_t *processor) {
    const json_t *parts = json_object_get(processor, "processors"),
                 *first = json_array_get(json_object_get(processor, "single"), 0);
    const char *found = json_text(json_object_get(first, "SpecialToken"), "id");
    for (size_t i = 0; found == NULL && i < json_array_size(parts); i++) {
        const json_t *one = json_array_get(parts, i);
        if (json_object_get(one, "processors") == NULL) { found = tokenizer_find_begin(one); }
    }
    return found;
}

// How BPE of characters prepares a text: Prepend and Replace in older files, Metaspace in newer.
static inline bool tokenizer_read_blanks(Tokenizer *tokenizer, const TokenizerFile *file, const json_t *root,
                                         Error *error) {
    const json_t *normalizer = tokenizer_get(root, "normalizer"),
                 *space = tokenizer_get(root, "pre_tokenizer"),
                 *steps = json_object_get(normalizer, "normalizers");
    bool sequence = json_says(normalizer, "type", "Sequence"), replaces = false, good = true;
    for (size_t i = 0; normalizer != NULL && good && i < (sequence ? json_array_size(steps) : 1); i++) {
        const json_t *step = sequence ? json_array_get(steps, i) : normalizer;
        bool prepends = json_says(step, "type", "Prepend") && json_says(step, "prepend", TOKENIZER_BLANK);
        if (prepends) { tokenizer->blank = BLANK_ALWAYS; }
        good = (prepends && !replaces) || (json_says(step, "type", "Replace") &&
                                           json_says(json_object_get(step, "pattern"), "String", " ") &&
                                           json_says(step, "content", TOKENIZER_BLANK));
        replaces = !prepends;
    }
    if (space != NULL) {
        good = good && normalizer == NULL && json_says(space, "type", "Metaspace") &&
               json_text(space, "prepend_scheme") != NULL &&
               json_says(space, "replacement", TOKENIZER_BLANK) &&
               json_is_false(json_object_get(space, "split"));
        replaces = true;
        tokenizer->blank = json_says(space, "prepend_scheme", "always")  ? BLANK_IF_NONE
                           : json_says(space, "prepend_scheme", "first") ? BLANK_IF_FIRST
                                                                         : BLANK_NOWHERE;
    }
    return (good && replaces) ||
           error_set(
               error,
               "%s has byte_fallback, and prepares texts as is not supported: allowed are the normalizers "
               "Prepend and Replace, or the pre-tokenizer Metaspace without split, each with U+2581",
               file->name);
}

static inline bool tokenizer_read_preparation(Tokenizer *tokenizer, const TokenizerFile *file,
                                              const json_t *root, Error *error) {
    const json_t *normalizer = tokenizer_get(root, "normalizer"),
                 *steps = json_object_get(normalizer, "normalizers");
    bool letters = false;
    error->text[0] = '\0';
    if (tokenizer->characters) { return tokenizer_read_blanks(tokenizer, file, root, error); }
    bool listed = json_is_array(steps) && json_array_size(steps) <= 1; // DeepSeek's is empty
    if (listed) { normalizer = json_array_get(steps, 0); }
    tokenizer->composes = json_says(normalizer, "type", "NFC");
    if (normalizer != NULL && !tokenizer->composes) {
        return error_set(error, "%s has a normalizer that is not supported: allowed is NFC, or none",
                         file->name);
    }
    const json_t *cutter = json_object_get(root, "pre_tokenizer");
    bool good = tokenizer_read_cutter(tokenizer, file, cutter, &letters, error) && letters;
    if (!good && !error_is_set(error)) {
        error_set(error,
                  "%s has a pre-tokenizer that is not supported: allowed are ByteLevel without a prefix, "
                  "Digits, Split by an isolated Regex, and a Sequence of these with ByteLevel in it",
                  file->name);
    }
    return good;
}

// Enters a token with its id. Errors: that is no id, or it has another text already.
static inline bool tokenizer_place(Tokenizer *tokenizer, TokenizerFile *file, const char *text,
                                   const json_t *value, bool special, Error *error) {
    json_int_t id = json_is_integer(value) ? json_integer_value(value) : -1;
    if (id < 0 || id >= TOKENIZER_MOST_TOKENS) {
        return error_set(error, "%s: the id of the token '%.40s' is not a number from 0 to %d", file->name,
                         text, TOKENIZER_MOST_TOKENS - 1);
    }
    if (file->texts[id] != NULL && strcmp(file->texts[id], text) != 0) {
        return error_set(error, "%s: the tokens '%.40s' and '%.40s' have the same id %d", file->name,
                         file->texts[id], text, (int)id);
    }
    if (id >= tokenizer->vocabulary) { tokenizer->vocabulary = (int)id + 1; }
    file->texts[id] = text;
    tokenizer->is_special[id] = special;
    return true;
}

// What an added token is sought as: its text, to which the normalizer of BPE of characters does
// what it does to texts, so that the blank in front belongs to the token.
static inline char *tokenizer_sought(const Tokenizer *tokenizer, const AddedToken *added) {
    char *sought = MEMORY_OF(char, added->length + 2);
    size_t count = added->normalized && tokenizer->blank == BLANK_ALWAYS;
    sought[0] = ' ';
    for (const char *at = added->text; *at != '\0'; at++) {
        bool blank = added->normalized && tokenizer->characters && strncmp(at, TOKENIZER_BLANK, 3) == 0;
        sought[count++] = blank ? ' ' : *at;
        at += blank ? 2 : 0;
    }
    return sought;
}

static inline bool tokenizer_read_added(Tokenizer *tokenizer, TokenizerFile *file, size_t index,
                                        Error *error) {
    static const char *const flags[] = {"single_word", "lstrip", "rstrip"};
    const json_t *value = json_array_get(file->added, index), *id = json_object_get(value, "id");
    const char *text = json_text(value, "content");
    if (text == NULL || text[0] == '\0') {
        return error_set(error, "%s: added token %zu has no 'content'", file->name, index);
    }
    const json_t *in_vocabulary = json_object_get(file->vocabulary, text);
    AddedToken added = {.length = strlen(text),
                        .id = (int32_t)json_integer_value(id),
                        .special = json_flag(value, "special"),
                        .normalized = json_flag(value, "normalized") &&
                                      (file->has_normalizer || !tokenizer->characters)};
    for (int i = 0; i < 3; i++) {
        if (!json_flag(value, flags[i])) { continue; }
        return error_set(error, "%s: the added token '%.40s' sets '%s', which is not supported", file->name,
                         text, flags[i]);
    }
    if (in_vocabulary != NULL && json_is_integer(id) && !json_equal(in_vocabulary, id)) {
        return error_set(error, "%s: the added token '%.40s' has the id %d, but %d in the vocabulary",
                         file->name, text, (int)added.id, (int)json_integer_value(in_vocabulary));
    }
    if (!tokenizer_place(tokenizer, file, text, id, added.special, error)) { return false; }
    added.text = strdup(text);
    added.sought = tokenizer_sought(tokenizer, &added);
    added.sought_length = strlen(added.sought);
    tokenizer->added[tokenizer->added_count++] = added;
    tokenizer->begins_added[(uint8_t)text[0]] = tokenizer->begins_added[(uint8_t)added.sought[0]] = true;
    return true;
}

// Fills in the bytes of every token and the token of every byte.
static inline bool tokenizer_make_bytes(Tokenizer *tokenizer, const TokenizerFile *file, Error *error) {
    int letters[BYTE_LETTERS];
    size_t total = 0;
    tokenizer_byte_letters(letters);
    for (int i = 0; i < tokenizer->vocabulary; i++) {
        total += file->texts[i] != NULL ? strlen(file->texts[i]) : 0;
    }
    tokenizer->bytes = MEMORY_OF(uint8_t, total + 1);
    tokenizer->offsets = MEMORY_OF(uint32_t, tokenizer->vocabulary + 1);
    memset(tokenizer->byte_ids, 0xFF, sizeof tokenizer->byte_ids);
    for (int i = 0; i < tokenizer->vocabulary; i++) {
        const char *text = file->texts[i];
        uint8_t *bytes = tokenizer->bytes + tokenizer->offsets[i];
        bool is_byte = false;
        size_t count = text == NULL            ? 0
                       : tokenizer->characters ? tokenizer_character_bytes(text, bytes, &is_byte)
                                               : tokenizer_token_bytes(letters, text, bytes);
        tokenizer->offsets[i + 1] = tokenizer->offsets[i] + (uint32_t)count;
        // One letter, as the model has it; a byte that stands literally is no letter.
        if (!tokenizer->characters) {
            is_byte = count == 1 && (text[1] != '\0' || letters[bytes[0]] == bytes[0]);
        }
        if (is_byte && json_object_get(file->vocabulary, text) != NULL) { tokenizer->byte_ids[bytes[0]] = i; }
    }
    for (int byte = 0; byte < 256; byte++) {
        bool is_utf8 = byte != 0xC0 && byte != 0xC1 && byte < 0xF5;
        if (tokenizer->byte_ids[byte] >= 0) { continue; }
        tokenizer->lacks_bytes = true;
        if (!tokenizer->characters && !(file->has_unknown && is_utf8)) { continue; }
        return error_set(error,
                         "%s: no token stands for the byte 0x%02X; allowed are vocabularies with all 256 "
                         "bytes, and byte-level ones without 'unk_token', which leave such a byte out",
                         file->name, (unsigned)byte);
    }
    return true;
}

// The slot of a pair in the hash table: its merge, or the empty slot where it would be.
static inline TokenMerge *tokenizer_slot(const Tokenizer *tokenizer, uint64_t pair) {
    size_t slot = (size_t)random_hash(0, pair) & (tokenizer->merge_slots - 1);
    while (tokenizer->merges[slot].pair != pair && tokenizer->merges[slot].pair != UINT64_MAX) {
        slot = (slot + 1) & (tokenizer->merge_slots - 1);
    }
    return &tokenizer->merges[slot];
}

static inline uint64_t tokenizer_pair(int32_t left, int32_t right) {
    return (uint64_t)left << 32 | (uint32_t)right;
}

// The slot of these bytes in the hash table of whole tokens: their id, or the empty slot where it
// would be.
static inline int32_t *tokenizer_whole(const Tokenizer *tokenizer, const uint8_t *bytes, size_t count) {
    size_t slot = crc32_z(0, bytes, count);
    for (;; slot++) {
        int32_t *id = &tokenizer->whole[slot & (tokenizer->whole_slots - 1)];
        const uint32_t *begin = tokenizer->offsets + (*id < 0 ? 0 : *id);
        if (*id < 0 ||
            (begin[1] - begin[0] == count && memcmp(tokenizer->bytes + begin[0], bytes, count) == 0)) {
            return id;
        }
    }
}

// Of a file with ignore_merges, or of characters: finds the tokens of the model by their bytes. A
// token that is a byte is none of these: bytes are in byte_ids.
static inline void tokenizer_read_whole(Tokenizer *tokenizer, const TokenizerFile *file) {
    const char *text;
    json_t *id;
    tokenizer->whole_slots = 16;
    while (tokenizer->whole_slots < 2 * json_object_size(file->vocabulary)) { tokenizer->whole_slots *= 2; }
    tokenizer->whole = MEMORY_OF(int32_t, tokenizer->whole_slots);
    memset(tokenizer->whole, 0xFF, tokenizer->whole_slots * sizeof *tokenizer->whole);
    json_object_foreach((json_t *)file->vocabulary, text, id) {
        uint32_t *begin = tokenizer->offsets + json_integer_value(id);
        bool is_byte = tokenizer->byte_ids[tokenizer->bytes[begin[0]]] == json_integer_value(id);
        if (is_byte || (tokenizer->characters && strchr(text, ' ') != NULL)) { continue; }
        int32_t *slot = tokenizer_whole(tokenizer, tokenizer->bytes + begin[0], begin[1] - begin[0]);
        *slot = (int32_t)json_integer_value(id);
    }
}

// A merge is "left right" in older files and ["left", "right"] in newer ones. *length: of the
// left one, behind which more may stand. False: it is no merge.
static inline bool tokenizer_split_merge(const json_t *merge, const char **left, size_t *length,
                                         const char **right) {
    const char *text = json_string_value(merge);
    if (text == NULL) {
        if (json_unpack((json_t *)merge, "[s, s!]", left, right) != 0) { return false; }
        *length = strlen(*left);
    } else {
        *left = text;
        *length = strcspn(text, " ");
        *right = text + *length + (text[*length] == ' ');
        if (strchr(*right, ' ') != NULL) { return false; }
    }
    return *length > 0 && (*right)[0] != '\0';
}

static inline bool tokenizer_read_merges(Tokenizer *tokenizer, const TokenizerFile *file, Error *error) {
    size_t count = json_array_size(file->merges);
    if (count > TOKENIZER_MOST_TOKENS) {
        return error_set(error, "%s has %zu merges; allowed: at most %d", file->name, count,
                         (int)TOKENIZER_MOST_TOKENS);
    }
    uLong sum = 0;
    for (int i = 0; i < tokenizer->vocabulary; i++) {
        if (file->texts[i] == NULL) { continue; }
        const int32_t numbers[2] = {i, (int32_t)strlen(file->texts[i])};
        sum = crc32_z(sum, (const Bytef *)numbers, sizeof numbers);
        sum = crc32_z(sum, (const Bytef *)file->texts[i], (size_t)numbers[1]);
    }
    char *text = NULL; // of a token of the merge
    tokenizer->merge_slots = 16;
    while (tokenizer->merge_slots < 2 * count) { tokenizer->merge_slots *= 2; }
    tokenizer->merges = MEMORY_OF(TokenMerge, tokenizer->merge_slots);
    bool good = true;
    for (size_t i = 0; i < tokenizer->merge_slots; i++) { tokenizer->merges[i].pair = UINT64_MAX; }
    for (size_t rank = 0; good && rank < count; rank++) {
        const char *left, *right;
        size_t length;
        if (!tokenizer_split_merge(json_array_get(file->merges, rank), &left, &length, &right)) {
            good = error_set(error, "%s: merge %zu is not a pair of tokens", file->name, rank);
            break;
        }
        size_t size = length + strlen(right) + 1;
        text = (char *)memory_grow(text, size);
        snprintf(text, size, "%.*s", (int)length, left);
        const json_t *first = json_object_get(file->vocabulary, text),
                     *second = json_object_get(file->vocabulary, right);
        strcat(text, right);
        const json_t *whole = json_object_get(file->vocabulary, text);
        if (whole == NULL || first == NULL || second == NULL) {
            good = error_set(error,
                             "%s: merge %zu makes '%.80s': this, or a side of it, is not in the vocabulary",
                             file->name, rank, text);
            break;
        }
        const int32_t ids[2] = {(int32_t)json_integer_value(first), (int32_t)json_integer_value(second)};
        TokenMerge merge = {tokenizer_pair(ids[0], ids[1]), (uint32_t)rank,
                            (int32_t)json_integer_value(whole)},
                   *slot = tokenizer_slot(tokenizer, merge.pair);
        if (slot->pair != UINT64_MAX) {
            good = error_set(error, "%s: merges %u and %zu are the same", file->name, slot->rank, rank);
        }
        *slot = merge;
        sum = crc32_z(sum, (const Bytef *)ids, sizeof ids);
    }
    free(text);
    tokenizer->sum = (uint32_t)sum;
    return good;
}

static inline void tokenizer_close(Tokenizer *tokenizer) {
    for (int i = 0; i < tokenizer->added_count; i++) {
        free(tokenizer->added[i].text);
        free(tokenizer->added[i].sought);
    }
    free(tokenizer->added);
    free(tokenizer->bytes);
    free(tokenizer->offsets);
    free(tokenizer->is_special);
    free(tokenizer->merges);
    free(tokenizer->whole);
    free(tokenizer->pattern_texts);
    for (int i = 0; i < tokenizer->pattern_count; i++) { pcre2_code_free(tokenizer->patterns[i]); }
    memset(tokenizer, 0, sizeof *tokenizer);
}

// The added token that has this text or, where that is NULL, this id; NULL: there is none.
static inline const AddedToken *tokenizer_added(const Tokenizer *tokenizer, const char *text, json_int_t id) {
    for (const AddedToken *one = tokenizer->added; one < tokenizer->added + tokenizer->added_count; one++) {
        if (text != NULL ? strcmp(one->text, text) == 0 : one->id == id) { return one; }
    }
    return NULL;
}

// The id of an added token such as "<|endoftext|>"; -1: there is none.
static inline int32_t tokenizer_find_added(const Tokenizer *tokenizer, const char *text) {
    const AddedToken *found = tokenizer_added(tokenizer, text, -1);
    return found != NULL ? found->id : -1;
}

// A file beside the tokenizer.json at `path`; NULL: there is none, or it is no JSON.
static inline json_t *tokenizer_load_beside(const char *path, const char *name) {
    char beside[PATH_MAX];
    const char *slash = strrchr(path, '/');
    snprintf(beside, sizeof beside, "%.*s%s", slash != NULL ? (int)(slash - path) + 1 : 0, path, name);
    return json_file_load(beside, JSON_ANY_INTEGERS, NULL);
}

// tokenizer->end <- the added token that the files beside the tokenizer.json at `path` call the
// end of a text. end_of in vocabulary.py is the same.
static inline void tokenizer_find_end(Tokenizer *tokenizer, const char *path) {
    static const char *const names[] = {"tokenizer_config.json", "generation_config.json", "config.json"};
    for (int i = 0; i < 3 && tokenizer->end < 0; i++) {
        json_t *root = tokenizer_load_beside(path, names[i]);
        const json_t *token = json_object_get(root, "eos_token"), *id = json_object_get(root, "eos_token_id");
        const json_t *content = json_is_object(token) ? json_object_get(token, "content") : token;
        const json_t *first = json_is_array(id) ? json_array_get(id, 0) : id;
        double number = json_is_number(first) ? json_number_value(first) : -1;
        const AddedToken *found =
            tokenizer_added(tokenizer, json_string_value(content),
                            number >= 0 && number < TOKENIZER_MOST_TOKENS ? (json_int_t)number : -1);
        if (found != NULL) { tokenizer->end = found->id; }
        json_decref(root);
    }
}

// Leaves out of the vocabulary added tokens for which the model of the config.json beside the
// tokenizer.json at `path` has no row, such as a <pad> that somebody added to Llama 2's. A text
// that would become one of them cannot be encoded.
static inline void tokenizer_leave_out(Tokenizer *tokenizer, const char *path) {
    json_t *root = tokenizer_load_beside(path, "config.json");
    double rows = json_number_value(json_object_get(root, "vocab_size"));
    json_decref(root);
    bool fits = tokenizer->learned <= rows && tokenizer->begin < rows && tokenizer->end < rows;
    if (fits && rows < tokenizer->vocabulary) { tokenizer->vocabulary = (int)rows; }
}

// Opens the `size` bytes of a tokenizer.json. name: of the file, for messages. Keeps
// nothing of the bytes. On failure there is nothing to close.
static inline bool tokenizer_open_memory(Tokenizer *tokenizer, const char *name, const void *bytes,
                                         size_t size, Error *error) {
    TokenizerFile file = {.name = name};
    json_error_t trouble;
    memset(tokenizer, 0, sizeof *tokenizer);
    size_t mark = utf8_mark(bytes, size);
    json_t *root = json_loadb((const char *)bytes + mark, size - mark, JSON_REJECT_DUPLICATES, &trouble);
    if (root == NULL) {
        return error_set(error, "%s is no tokenizer, which is JSON: line %d: %s", name, trouble.line,
                         trouble.text);
    }
    tokenizer->pattern_texts = MEMORY_OF(char, 1);
    bool good = tokenizer_find_parts(tokenizer, &file, root, error) &&
                tokenizer_read_preparation(tokenizer, &file, root, error);
    size_t added = json_array_size(file.added);
    const char *text;
    json_t *id;
    file.texts = MEMORY_OF(const char *, TOKENIZER_MOST_TOKENS);
    tokenizer->is_special = MEMORY_OF(bool, TOKENIZER_MOST_TOKENS);
    tokenizer->added = MEMORY_OF(AddedToken, added + 1);
    json_object_foreach((json_t *)file.vocabulary, text, id) {
        good = good && tokenizer_place(tokenizer, &file, text, id, false, error);
    }
    tokenizer->learned = tokenizer->vocabulary;
    for (size_t i = 0; good && i < added; i++) { good = tokenizer_read_added(tokenizer, &file, i, error); }
    good = good && tokenizer_make_bytes(tokenizer, &file, error) &&
           tokenizer_read_merges(tokenizer, &file, error);
    bool ignores_merges = json_flag(json_object_get(root, "model"), "ignore_merges");
    if (good && (ignores_merges || tokenizer->characters)) { tokenizer_read_whole(tokenizer, &file); }
    const char *begin = tokenizer_find_begin(json_object_get(root, "post_processor"));
    tokenizer->begin = begin == NULL ? -1 : tokenizer_find_added(tokenizer, begin);
    tokenizer->end = tokenizer_find_added(tokenizer, "<|endoftext|>");
    json_decref(root);
    free(file.texts);
    if (!good) { tokenizer_close(tokenizer); }
    return good;
}

// How many characters of a path as tokenizer_open takes it name the directory; 0: none do.
static inline int tokenizer_directory_length(const char *path) {
    struct stat status;
    const char *slash = strrchr(path, '/');
    if (stat(path, &status) == 0 && S_ISDIR(status.st_mode)) { return (int)strlen(path); }
    return slash == NULL ? 0 : slash == path ? 1 : (int)(slash - path);
}

// path: a tokenizer.json, or a directory with one. On failure there is nothing to close.
static inline bool tokenizer_open(Tokenizer *tokenizer, const char *path, Error *error) {
    struct stat status;
    char inside[PATH_MAX];
    size_t size = 0;
    memset(tokenizer, 0, sizeof *tokenizer);
    if (stat(path, &status) == 0 && S_ISDIR(status.st_mode)) {
        bool is_of_old = path_within(inside, path, "vocab.json", error) && stat(inside, &status) == 0;
        if (!path_within(inside, path, "tokenizer.json", error)) { return false; }
        if (is_of_old && stat(inside, &status) != 0) {
            return error_set(error,
                             "%.300s has a vocab.json, but no tokenizer.json: transformers makes it of them "
                             "in Python, by AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
                             path);
        }
        path = inside;
    }
    void *bytes = file_map(path, "expected a tokenizer.json", &size, error);
    if (bytes == NULL) { return false; }
    bool good = size <= TOKENIZER_MOST_FILE_BYTES
                    ? tokenizer_open_memory(tokenizer, path, bytes, size, error)
                    : error_set(error, "%s is not a tokenizer.json: allowed is a file of at most %d MiB",
                                path, TOKENIZER_MOST_FILE_BYTES >> 20);
    if (good) {
        tokenizer_find_end(tokenizer, path);
        tokenizer_leave_out(tokenizer, path);
    }
    munmap(bytes, size);
    return good;
}

// ---- Encoding -------------------------------------------------------------------------

// A token of the piece that is being merged: a linked list from left to right.
typedef struct PieceToken {
    int32_t id;             // -1: it was merged into the token before it
    int32_t previous, next; // -1: none
} PieceToken;

// A merge as it was pushed. On top is the lowest rank, and among equals the leftmost.
typedef struct PieceMerge {
    uint32_t rank;
    int32_t position; // of the left token
    int32_t id;       // of the token that they become
} PieceMerge;

// The state of one call of tokenizer_encode; its buffers are used for all pieces.
typedef struct TokenizerWork {
    const Tokenizer *tokenizer;
    bool special; // cut special tokens out
    const uint8_t *text;
    const int32_t *origins;  // of each byte of a composed text: its place in the one that was given; or NULL
    TokenList *out, *begins; // the ids, and where in the text each of them begins; begins: or NULL
    PieceToken *tokens;
    PieceMerge *heap;
    size_t token_capacity, heap_count, heap_capacity;
    pcre2_match_data *match;
    pcre2_match_context *limits;
    Error *error;
} TokenizerWork;

static inline void tokenizer_give(TokenizerWork *work, int32_t id, const uint8_t *begin) {
    token_list_add(work->out, id);
    ptrdiff_t place = begin - work->text;
    if (work->begins != NULL) {
        token_list_add(work->begins, work->origins != NULL ? work->origins[place] : (int32_t)place);
    }
}

static inline bool piece_before(const PieceMerge *a, const PieceMerge *b) {
    return a->rank != b->rank ? a->rank < b->rank : a->position < b->position;
}

static inline void piece_push(TokenizerWork *work, int32_t left, int32_t right) {
    if (left < 0 || right < 0) { return; }
    const TokenMerge *merge =
        tokenizer_slot(work->tokenizer, tokenizer_pair(work->tokens[left].id, work->tokens[right].id));
    if (merge->pair == UINT64_MAX) { return; }
    list_reserve((void **)&work->heap, work->heap_count, &work->heap_capacity, 1, sizeof *work->heap);
    PieceMerge entry = {merge->rank, left, merge->id};
    size_t at = work->heap_count++;
    for (; at > 0 && piece_before(&entry, &work->heap[(at - 1) / 2]); at = (at - 1) / 2) {
        work->heap[at] = work->heap[(at - 1) / 2];
    }
    work->heap[at] = entry;
}

static inline PieceMerge piece_pop(TokenizerWork *work) {
    PieceMerge *heap = work->heap, top = heap[0], last = heap[--work->heap_count];
    size_t at = 0, count = work->heap_count;
    for (size_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && piece_before(&heap[child + 1], &heap[child])) { child++; }
        if (!piece_before(&heap[child], &last)) { break; }
        heap[at] = heap[child];
    }
    heap[at] = last;
    return top;
}

// One piece of `count` bytes (at least one) in O(count log count).
static inline void tokenizer_encode_piece(TokenizerWork *work, const uint8_t *bytes, size_t count) {
    const Tokenizer *tokenizer = work->tokenizer;
    bool ignores_merges = tokenizer->whole != NULL && !tokenizer->characters;
    int32_t whole = ignores_merges ? *tokenizer_whole(tokenizer, bytes, count) : -1;
    if (whole >= 0) {
        tokenizer_give(work, whole, bytes);
        return;
    }
    list_reserve((void **)&work->tokens, 0, &work->token_capacity, count, sizeof *work->tokens);
    int32_t first = -1, previous = -1;
    for (size_t i = 0, length = 1; i < count; i += length) {
        int32_t id = -1;
        if (tokenizer->characters) {
            utf8_scan(bytes + i, count - i, &length);
            id = *tokenizer_whole(tokenizer, bytes + i, length);
        }
        if (id < 0) {
            id = tokenizer->byte_ids[bytes[i]];
            length = 1;
        }
        if (id < 0) { continue; }
        PieceToken token = {id, previous, -1};
        work->tokens[i] = token;
        *(previous < 0 ? &first : &work->tokens[previous].next) = (int32_t)i;
        previous = (int32_t)i;
    }
    work->heap_count = 0;
    for (int32_t i = first; i >= 0; i = work->tokens[i].next) { piece_push(work, i, work->tokens[i].next); }
    while (work->heap_count > 0) {
        PieceMerge merge = piece_pop(work);
        PieceToken *left = &work->tokens[merge.position];
        if (left->id < 0 || left->next < 0) { continue; }
        PieceToken *right = &work->tokens[left->next];
        // Other merges may have changed the two tokens since this one was pushed.
        const TokenMerge *now = tokenizer_slot(tokenizer, tokenizer_pair(left->id, right->id));
        if (now->pair == UINT64_MAX || now->id != merge.id) { continue; }
        left->id = merge.id;
        left->next = right->next;
        right->id = -1;
        if (left->next >= 0) { work->tokens[left->next].previous = merge.position; }
        piece_push(work, left->previous, merge.position);
        piece_push(work, merge.position, left->next);
    }
    for (int32_t i = first; i >= 0; i = work->tokens[i].next) {
        tokenizer_give(work, work->tokens[i].id, bytes + i);
    }
}

// Cuts valid UTF-8 by the patterns from `index` on, and encodes the pieces: what a pattern
// matches, and what lies between. A later pattern sees one piece at a time, as a text of its own.
static inline bool tokenizer_encode_valid(TokenizerWork *work, int index, const uint8_t *text, size_t count) {
    if (index == TOKENIZER_MOST_PATTERNS || index == work->tokenizer->pattern_count) {
        tokenizer_encode_piece(work, text, count);
        return true;
    }
    const PCRE2_SIZE *place = pcre2_get_ovector_pointer(work->match);
    for (size_t at = 0; at < count;) {
        int found = pcre2_match(work->tokenizer->patterns[index], text, count, at,
                                PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY, work->match, work->limits);
        if (found < 0 && found != PCRE2_ERROR_NOMATCH) {
            return error_set(work->error, "PCRE2 cannot cut the text at byte %zu (error %d)", at, found);
        }
        size_t begin = found < 0 ? count : place[0], end = found < 0 ? count : place[1];
        if ((begin > at && !tokenizer_encode_valid(work, index + 1, text + at, begin - at)) ||
            (end > begin && !tokenizer_encode_valid(work, index + 1, text + begin, end - begin))) {
            return false;
        }
        at = end;
    }
    return true;
}

// Encodes text without added tokens: ranges of valid UTF-8 piece by piece, and ranges of
// other bytes one by one.
static inline bool tokenizer_encode_plain(TokenizerWork *work, const uint8_t *text, size_t count) {
    for (size_t begin = 0, length = 0, end; begin < count; begin = end) {
        bool valid = utf8_scan(text + begin, count - begin, &length) == UTF8_VALID;
        end = begin + length;
        while (end < count && (utf8_scan(text + end, count - end, &length) == UTF8_VALID) == valid) {
            end += length;
        }
        if (valid && !tokenizer_encode_valid(work, 0, text + begin, end - begin)) { return false; }
        for (size_t at = begin; !valid && at < end; at++) { tokenizer_encode_piece(work, text + at, 1); }
    }
    return true;
}

// The text of a special token that stands in a text; NULL: none does.
static inline const char *tokenizer_find_spelled(const Tokenizer *tokenizer, const char *text, size_t count) {
    for (size_t at = 0; at < count; at++) {
        for (int i = 0; tokenizer->begins_added[(uint8_t)text[at]] && i < tokenizer->added_count; i++) {
            const AddedToken *one = &tokenizer->added[i];
            bool fits =
                one->special && one->length <= count - at && memcmp(one->text, text + at, one->length) == 0;
            if (fits) { return one->text; }
        }
    }
    return NULL;
}

// Whether a byte of the text has no token. Those that a longer added token has count, too.
static inline bool tokenizer_loses(const Tokenizer *tokenizer, const char *text, size_t count) {
    bool loses = false;
    for (size_t i = 0; i < count && tokenizer->lacks_bytes && !loses; i++) {
        loses = tokenizer->byte_ids[(uint8_t)text[i]] < 0;
    }
    return loses;
}

static inline bool tokenizer_encode_added(TokenizerWork *work, const uint8_t *text, size_t count,
                                          bool normalized);

// A text as the normalizer makes it, and where in the text that was given each byte was: nearly,
// for between two characters of ASCII bytes are counted. Tokens must begin at different places
// (encode_chat in tokenize.h).
typedef struct ComposedText {
    uint8_t *bytes;
    int32_t *origins;
    size_t count, byte_room, origin_room;
} ComposedText;

static inline void composed_reserve(ComposedText *whole, size_t more) {
    list_reserve((void **)&whole->bytes, whole->count, &whole->byte_room, more, 1);
    list_reserve((void **)&whole->origins, whole->count, &whole->origin_room, more, sizeof(int32_t));
}

static inline void composed_add(ComposedText *whole, uint8_t byte, int32_t origin) {
    whole->bytes[whole->count] = byte;
    whole->origins[whole->count++] = origin;
}

// Puts a blank in front, where one belongs there, and writes U+2581 as the blank it stands for.
static inline void tokenizer_put_blanks(const Tokenizer *tokenizer, const uint8_t *text, size_t count,
                                        int32_t origin, ComposedText *whole) {
    TokenizerBlank blank = tokenizer->blank;
    bool has_one = text[0] == ' ' || (count >= 3 && memcmp(text, TOKENIZER_BLANK, 3) == 0);
    bool needs = blank == BLANK_IF_NONE || (blank == BLANK_IF_FIRST && origin == 0);
    composed_reserve(whole, count + 1);
    if (blank == BLANK_ALWAYS || (needs && !has_one)) { composed_add(whole, ' ', origin); }
    for (size_t i = 0; i < count; i++) {
        bool is_blank = count - i >= 3 && memcmp(text + i, TOKENIZER_BLANK, 3) == 0;
        composed_add(whole, is_blank ? ' ' : text[i], origin + (int32_t)i);
        i += is_blank ? 2 : 0;
    }
}

// Returns whether that differs from the text. Characters are composed from one of ASCII, which
// never joins what stands before it, up to the next; bytes that are no UTF-8 stay.
static inline bool tokenizer_compose(const uint8_t *text, size_t count, int32_t origin, ComposedText *whole) {
    bool changes = false;
    for (size_t begin = 0, end; begin < count; begin = end) {
        for (end = begin + 1; end < count && text[end] >= 0x80;) { end++; }
        utf8proc_uint8_t *composed = NULL;
        utf8proc_ssize_t length = -1;
        if (end > begin + 1) {
            length = utf8proc_map(text + begin, (utf8proc_ssize_t)(end - begin), &composed,
                                  (utf8proc_option_t)(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
        }
        size_t more = length < 0 ? end - begin : (size_t)length;
        const uint8_t *bytes = length < 0 ? text + begin : composed;
        bool same = more == end - begin && memcmp(bytes, text + begin, more) == 0;
        composed_reserve(whole, more);
        for (size_t i = 0; i < more; i++) {
            composed_add(whole, bytes[i], origin + (int32_t)(begin + size_min(i, end - begin - 1)));
        }
        changes = changes || !same;
        free(composed);
    }
    return changes;
}

// What lies between the added tokens that are not normalized.
static inline bool tokenizer_encode_between(TokenizerWork *work, const uint8_t *text, size_t count) {
    ComposedText whole = {NULL, NULL, 0, 0, 0};
    const uint8_t *given = work->text;
    const Tokenizer *tokenizer = work->tokenizer;
    size_t ascii = 0;
    int32_t origin = (int32_t)(text - given);
    bool changes = tokenizer->characters && count > 0;
    while (tokenizer->composes && ascii < count && text[ascii] < 0x80) { ascii++; }
    if (changes) { tokenizer_put_blanks(tokenizer, text, count, origin, &whole); }
    if (tokenizer->composes && ascii < count) { changes = tokenizer_compose(text, count, origin, &whole); }
    if (changes) {
        work->text = text = whole.bytes;
        work->origins = whole.origins;
        count = whole.count;
    }
    bool good = tokenizer_encode_added(work, text, count, true);
    work->text = given;
    work->origins = NULL;
    free(whole.bytes);
    free(whole.origins);
    return good;
}

// Encodes any text: cuts out the added tokens that are not normalized, then, from each range
// between them, the normalized ones, and encodes what is left.
static inline bool tokenizer_encode_added(TokenizerWork *work, const uint8_t *text, size_t count,
                                          bool normalized) {
    const Tokenizer *tokenizer = work->tokenizer;
    for (size_t begin = 0, at = 0; begin < count;) {
        const AddedToken *added = NULL;
        for (; at < count; at += added != NULL ? added->sought_length : 1) {
            added = NULL; // the longest that the text begins with here
            for (int i = 0; tokenizer->begins_added[text[at]] && i < tokenizer->added_count; i++) {
                const AddedToken *one = &tokenizer->added[i];
                bool fits = one->normalized == normalized && one->sought_length <= count - at &&
                            memcmp(one->sought, text + at, one->sought_length) == 0;
                if (fits && (added == NULL || one->sought_length > added->sought_length)) { added = one; }
            }
            if (added != NULL && (work->special || !added->special)) { break; }
        }
        bool good = normalized ? tokenizer_encode_plain(work, text + begin, at - begin)
                               : tokenizer_encode_between(work, text + begin, at - begin);
        if (!good) { return false; }
        if (at >= count) { break; }
        if (added->id >= tokenizer->vocabulary) {
            return error_set(work->error,
                             "the model has no row for the added token %.40s, which is in the text",
                             added->text);
        }
        tokenizer_give(work, added->id, text + at);
        begin = at = at + added->sought_length;
    }
    return true;
}

// Appends the tokens of `count` bytes of text to `out`. special: the text of a special
// token becomes that token, as in a prompt; otherwise it is text, as in data of unknown
// origin. begins: gets where in the text each token begins, or NULL. Any thread may call it. On
// failure `out` has some of the tokens.
static inline bool tokenizer_encode_places(const Tokenizer *tokenizer, const char *text, size_t count,
                                           bool special, TokenList *out, TokenList *begins, Error *error) {
    if (count > TOKENIZER_MOST_TEXT_BYTES) {
        return error_set(error, "a text of %zu bytes is too long to encode at once: at most %d", count,
                         TOKENIZER_MOST_TEXT_BYTES);
    }
    TokenizerWork work = {
        .tokenizer = tokenizer, .special = special, .out = out, .begins = begins, .error = error};
    work.text = (const uint8_t *)text;
    work.match = pcre2_match_data_create(1, NULL); // the place of a whole match
    work.limits = pcre2_match_context_create(NULL);
    pcre2_set_match_limit(work.limits, UINT32_MAX); // the default is less than a long row of blanks takes
    bool good = tokenizer_encode_added(&work, work.text, count, false);
    pcre2_match_data_free(work.match);
    pcre2_match_context_free(work.limits);
    free(work.tokens);
    free(work.heap);
    return good;
}

static inline bool tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t count, bool special,
                                    TokenList *out, Error *error) {
    return tokenizer_encode_places(tokenizer, text, count, special, out, NULL, error);
}

// Appends the token in front of a text, if the file has one and the text does not begin with it.
static inline void tokenizer_begin_text(const Tokenizer *tokenizer, const char *text, TokenList *out) {
    const AddedToken *begin =
        tokenizer->begin < 0 ? NULL : tokenizer_added(tokenizer, NULL, tokenizer->begin);
    if (begin != NULL && strncmp(text, begin->text, begin->length) != 0) { token_list_add(out, begin->id); }
}

// ---- Decoding -------------------------------------------------------------------------

// *count bytes of a token: 0 for an id without one, as in a rounded vocabulary.
static inline const uint8_t *tokenizer_bytes(const Tokenizer *tokenizer, int32_t id, size_t *count) {
    bool known = id >= 0 && id < tokenizer->vocabulary;
    *count = known ? tokenizer->offsets[id + 1] - tokenizer->offsets[id] : 0;
    return tokenizer->bytes + (known ? tokenizer->offsets[id] : 0);
}

// Writes complete characters to `out`, and U+FFFD for bytes that cannot become one. end:
// nothing follows, so an incomplete character cannot either.
static inline void token_decoder_release(TokenDecoder *decoder, bool end, FILE *out) {
    size_t length = 0;
    while (decoder->held_count > 0) {
        Utf8 what = utf8_scan(decoder->held, (size_t)decoder->held_count, &length);
        if (what == UTF8_INCOMPLETE && !end) { break; }
        bool valid = what == UTF8_VALID;
        fwrite(valid ? (const char *)decoder->held : "\xEF\xBF\xBD", 1, valid ? length : 3, out);
        decoder->held_count -= (int)length;
        memmove(decoder->held, decoder->held + length, (size_t)decoder->held_count);
    }
}

// Writes the text of `count` tokens to `out`: valid UTF-8, whatever the tokens are.
// special: whether special tokens are written.
static inline void tokenizer_decode(const Tokenizer *tokenizer, TokenDecoder *decoder, const int32_t *ids,
                                    size_t count, bool special, FILE *out) {
    for (size_t i = 0; i < count; i++) {
        size_t length = 0;
        const uint8_t *bytes = tokenizer_bytes(tokenizer, ids[i], &length);
        if (!special && length > 0 && tokenizer->is_special[ids[i]]) { continue; }
        if (decoder->drops_blank && length > 0 && bytes[0] == ' ') { bytes++, length--; }
        decoder->drops_blank = false;
        for (size_t k = 0; k < length; k++) {
            decoder->held[decoder->held_count++] = bytes[k];
            token_decoder_release(decoder, false, out);
        }
    }
}
