// text.h: whether a file that is to be read as text is text (a compressed one would silently give a
// model of noise), and text as the token ids of a model: bytes, or the tokens of a tokenizer.json.
// If the meaning of ids is not known, they are printed as numbers, and no text can be encoded.
#pragma once

#include "runtime/numbers.h"
#include "tokenizer/tokenizer.h"

enum {
    TEXT_CHECK_BYTES = 1 << 20, // of a file are looked at
    TEXT_MOST_ZEROS = 1000,     // at most one byte in 1000 may be zero
    TEXT_MOST_INVALID = 200,    // and at most one in 200 may not be UTF-8
    TEXT_FEW_BYTES = 4          // and in a short file this many of each
};

static inline bool text_format_has_ending(const char *name, const char *ending) {
    size_t length = strlen(name), end = strlen(ending);
    return length >= end && strcmp(name + length - end, ending) == 0;
}

// Whether JSON records are in a text: it begins with an object that has members, by itself or in a
// list. holds_record in sources.py is the same.
static inline bool text_format_is_json(const char *text, size_t size) {
    size_t at = utf8_mark(text, size);
    for (bool in_list = false; at < size && text[at] != '{'; at++) {
        bool begins = text[at] == '[' && !in_list;
        if (!begins && memchr(" \t\r\n", text[at], 4) == NULL) { return false; }
        in_list = in_list || begins;
    }
    if (at == size) { return false; }
    json_t *record = json_loadb(text + at, size - at, JSON_DISABLE_EOF_CHECK | JSON_ANY_INTEGERS, NULL);
    bool found = json_object_size(record) > 0;
    json_decref(record);
    return found;
}

// Whether the beginning of a file is text: no other format, hardly any bytes that are
// zero or not UTF-8. JSON is, too, but its braces are not what a model should learn.
static inline bool text_format_check(const char *name, const void *text, size_t size, Error *error) {
    static const char unpack[] = "unpack it first",
                      prepare[] = "make token files of it with python -m tokenizer.prepare",
                      convert[] = "convert it to UTF-8 with iconv";
    static const struct {
        const char *begin; // how files of the format begin
        size_t count;      // bytes of it
        const char *format, *remedy;
    } known[] = {
        {"\x1F\x8B", 2, "a gzip archive", unpack},
        {"PK\x03\x04", 4, "a zip archive", unpack},
        {"\x28\xB5\x2F\xFD", 4, "a Zstandard archive", unpack},
        {"\xFD\x37zXZ", 5, "an xz archive", unpack},
        {"BZh", 3, "a bzip2 archive", unpack},
        {"PAR1", 4, "a Parquet file", prepare},
        {"ARROW1", 6, "an Arrow file", prepare},
        {"\x93NUMPY", 6, "a NumPy array", "save token ids as .bin files of uint16"},
        {"\x7F\x45LF", 4, "a program (ELF)", "name a text"},
        {"%PDF-", 5, "a PDF document", "extract its text first"},
        {"\xFF\xFE", 2, "a text in UTF-16", convert},
        {"\xFE\xFF", 2, "a text in UTF-16", convert},
    };
    const uint8_t *bytes = (const uint8_t *)text;
    size_t looked = size_min(size, TEXT_CHECK_BYTES), zeros = 0, invalid = 0, length = 0;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (size < known[i].count || memcmp(bytes, known[i].begin, known[i].count) != 0) { continue; }
        return error_set(error, "%.400s looks like %s, not like text: %s", name, known[i].format,
                         known[i].remedy);
    }
    if (text_format_has_ending(name, ".json") || text_format_has_ending(name, ".jsonl") ||
        text_format_is_json((const char *)text, looked)) {
        return error_set(error,
                         "%.400s is JSON, and its braces and quotes would be learned, too: make token files "
                         "of its texts with python -m tokenizer.prepare; where it is a text that only begins "
                         "so, let a line <|endoftext|> be the first, and its name not end with .json",
                         name);
    }
    for (size_t i = 0; i < looked; i += length) {
        zeros += bytes[i] == 0;
        invalid += utf8_scan(bytes + i, size - i, &length) == UTF8_VALID ? 0 : length;
    }
    return (zeros <= TEXT_FEW_BYTES + looked / TEXT_MOST_ZEROS &&
            invalid <= TEXT_FEW_BYTES + looked / TEXT_MOST_INVALID) ||
           error_set(error,
                     "%.400s is not text in UTF-8: %zu of its first %zu bytes are not, or are zero; convert "
                     "a text with iconv, and give a file of token ids a name that ends with .bin",
                     name, zeros + invalid, looked);
}

typedef enum TextCodecKind { TEXT_CODEC_BYTES, TEXT_CODEC_TOKENIZER, TEXT_CODEC_IDS } TextCodecKind;

typedef struct TextCodec {
    TextCodecKind kind;
    Tokenizer tokenizer;
    int vocabulary; // of the model
    TokenDecoder decoder;
} TextCodec;

static inline void text_codec_close(TextCodec *codec) {
    if (codec->kind == TEXT_CODEC_TOKENIZER) { tokenizer_close(&codec->tokenizer); }
}

// path: a tokenizer.json or a directory with one; empty: none. bytes: tokens are bytes
// without one. vocabulary: of the model. On failure there is nothing to close.
static inline bool text_codec_open(TextCodec *codec, const char *path, bool bytes, int vocabulary,
                                   Error *error) {
    memset(codec, 0, sizeof *codec);
    codec->kind = bytes ? TEXT_CODEC_BYTES : TEXT_CODEC_IDS;
    codec->vocabulary = vocabulary;
    if (path[0] == '\0') { return true; }
    if (!tokenizer_open(&codec->tokenizer, path, error)) { return false; }
    codec->kind = TEXT_CODEC_TOKENIZER;
    int tokens = codec->tokenizer.vocabulary;
    if (tokens <= vocabulary) { return true; }
    text_codec_close(codec);
    return error_set(error,
                     "the tokenizer of %.400s has %d tokens, but the model has a vocabulary of only %d", path,
                     tokens, vocabulary);
}

// The token that ends a text; -1: none is known.
static inline int32_t text_codec_end(const TextCodec *codec) {
    return codec->kind == TEXT_CODEC_TOKENIZER ? codec->tokenizer.end : -1;
}

// Appends the ids of the prompt to out, with `begins` behind the token in front of a text, if there
// is one. Without a prompt: that token alone; a line end where tokens are bytes; otherwise the
// token that ends a text, or the last id where that is not known, as in GPT-2's vocabulary.
static inline bool text_codec_encode(const TextCodec *codec, const char *prompt, bool begins, TokenList *out,
                                     Error *error) {
    size_t before = out->count;
    if (codec->kind == TEXT_CODEC_TOKENIZER && begins) {
        tokenizer_begin_text(&codec->tokenizer, prompt, out);
    }
    if (codec->kind == TEXT_CODEC_TOKENIZER && prompt[0] != '\0') {
        return tokenizer_encode(&codec->tokenizer, prompt, strlen(prompt), true, out, error) &&
               (out->count > before ||
                error_set(error, "the tokenizer has no token for any byte of the prompt"));
    }
    if (codec->kind == TEXT_CODEC_BYTES) {
        const char *text = prompt[0] != '\0' ? prompt : "\n";
        for (const char *c = text; *c != '\0'; c++) { token_list_add(out, (unsigned char)*c); }
        return true;
    }
    if (prompt[0] != '\0') {
        return error_set(error, "--prompt needs a tokenizer that turns it into token ids: give --tokenizer, "
                                "or a --from with a tokenizer.json");
    }
    int32_t end = text_codec_end(codec);
    if (out->count == before) { token_list_add(out, end >= 0 ? end : codec->vocabulary - 1); }
    return true;
}

// Writes the text of token `id`, as far as its characters are complete. last: `id` is
// ignored, and what is still held back is written.
static inline void text_codec_print(TextCodec *codec, int32_t id, bool last, FILE *file) {
    if (codec->kind == TEXT_CODEC_TOKENIZER) {
        if (last) { token_decoder_release(&codec->decoder, true, file); }
        tokenizer_decode(&codec->tokenizer, &codec->decoder, &id, !last, false, file);
    } else if (codec->kind == TEXT_CODEC_BYTES && !last) { // other controls would do things to a terminal
        putc(id == '\n' || id == '\t' || id >= ' ' ? id : '?', file);
    } else if (!last) {
        fprintf(file, "%d ", id);
    }
    fflush(file);
}
