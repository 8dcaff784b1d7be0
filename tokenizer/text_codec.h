// text_codec.h: between text and token ids, whichever way a model reads: bytes, a
// tokenizer, or nothing that we know of.
//
//   text_codec_open     a tokenizer.json (or a directory with one), or none: then bytes, where the vocabulary is that of bytes
//   text_codec_encode   a prompt to ids; without a prompt, what a text begins behind
//   text_codec_print    ids to text, as soon as whole characters are there
#ifndef ACCO_TOKENIZER_TEXT_CODEC_H
#define ACCO_TOKENIZER_TEXT_CODEC_H

#include "tokenizer/tokenizer.h"

typedef enum TextCodecKind { TEXT_CODEC_BYTES, TEXT_CODEC_TOKENIZER, TEXT_CODEC_IDS } TextCodecKind;

typedef struct TextCodec {
    TextCodecKind kind;
    Tokenizer tokenizer;
    int vocabulary; // of the model
    TokenDecoder decoder;
} TextCodec;

static inline void text_codec_close(TextCodec *spelling) {
    if (spelling->kind == TEXT_CODEC_TOKENIZER) { tokenizer_close(&spelling->tokenizer); }
}

// path: of tokenizer.json or its directory; empty: none. bytes: what is to be spelled
// without one are bytes.
static inline bool text_codec_open(TextCodec *spelling, const char *path, bool bytes, int vocabulary,
                                   Error *error) {
    memset(spelling, 0, sizeof *spelling);
    spelling->kind = bytes ? TEXT_CODEC_BYTES : TEXT_CODEC_IDS;
    spelling->vocabulary = vocabulary;
    if (path[0] == '\0') { return true; }
    char file[2048];
    struct stat status;
    bool directory = stat(path, &status) == 0 && S_ISDIR(status.st_mode);
    snprintf(file, sizeof file, "%.1900s%s", path, directory ? "/tokenizer.json" : "");
    if (!tokenizer_open(&spelling->tokenizer, file, error)) { return false; }
    spelling->kind = TEXT_CODEC_TOKENIZER;
    if (spelling->tokenizer.vocabulary <= vocabulary) { return true; }
    int tokens = spelling->tokenizer.vocabulary;
    text_codec_close(spelling);
    return error_set(error, "%.400s has %d tokens, the model only %d", file, tokens, vocabulary);
}

// The token that ends a text; -1: none is known.
static inline int32_t text_codec_end(const TextCodec *spelling) {
    return spelling->kind == TEXT_CODEC_TOKENIZER
               ? tokenizer_find_added(&spelling->tokenizer, "<|endoftext|>")
               : -1;
}

// Without a prompt a text begins behind a line end where bytes are read, as every window
// of the built-in corpus does; token ids begin behind the end of a text, which is
// <|endoftext|>, or else the last id, as in GPT-2's vocabulary.
static inline bool text_codec_encode(const TextCodec *spelling, const char *prompt, TokenList *out,
                                     Error *error) {
    if (spelling->kind == TEXT_CODEC_TOKENIZER && prompt[0] != '\0') {
        return tokenizer_encode(&spelling->tokenizer, prompt, strlen(prompt), true, out, error);
    }
    if (spelling->kind == TEXT_CODEC_BYTES) {
        const char *text = prompt[0] != '\0' ? prompt : "\n";
        bool good = true;
        for (const char *c = text; good && *c != '\0'; c++) { good = token_list_add(out, (unsigned char)*c); }
        return good || error_set(error, "no memory for the prompt");
    }
    if (prompt[0] != '\0') {
        return error_set(
            error,
            "--prompt needs a vocabulary that turns it into token ids: give --tokenizer, or a --from with a "
            "tokenizer.json");
    }
    int32_t end = text_codec_end(spelling);
    return token_list_add(out, end >= 0 ? end : spelling->vocabulary - 1) ||
           error_set(error, "no memory for the prompt");
}

// Writes what can be read so far; `last` after the last token, and then `id` is not
// looked at.
static inline void text_codec_print(TextCodec *spelling, int32_t id, bool last, FILE *file) {
    Error error;
    if (spelling->kind == TEXT_CODEC_TOKENIZER) {
        TextList text = {NULL, 0, 0};
        bool good =
            last ? tokenizer_decode_end(&spelling->decoder, &text, &error)
                 : tokenizer_decode(&spelling->tokenizer, &spelling->decoder, &id, 1, false, &text, &error);
        if (good) { fwrite(text.bytes, 1, text.count, file); }
        text_list_free(&text);
    } else if (spelling->kind == TEXT_CODEC_BYTES && !last) {
        putc(id == '\n' || id >= ' ' ? id : '?', file);
    } else if (!last) {
        fprintf(file, "%d ", id);
    }
    fflush(file);
}

#endif
