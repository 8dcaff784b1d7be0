// text_codec.h: converts between text and the token ids of a model.
//
// A model reads bytes, or the tokens of a tokenizer.json. If the meaning of its ids is not
// known, they are printed as numbers, and no text can be encoded.
#pragma once

#include "tokenizer/tokenizer.h"

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

// Appends the ids of the prompt to out. Without one: the token before a text, which is a
// line end where tokens are bytes, otherwise the one that ends a text, or the last id where
// that is not known, as in GPT-2's vocabulary.
static inline bool text_codec_encode(const TextCodec *codec, const char *prompt, TokenList *out,
                                     Error *error) {
    if (codec->kind == TEXT_CODEC_TOKENIZER && prompt[0] != '\0') {
        return tokenizer_encode(&codec->tokenizer, prompt, strlen(prompt), true, out, error);
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
    token_list_add(out, end >= 0 ? end : codec->vocabulary - 1);
    return true;
}

// Writes the text of token `id`, as far as its characters are complete. last: `id` is
// ignored, and what is still held back is written.
static inline void text_codec_print(TextCodec *codec, int32_t id, bool last, FILE *file) {
    if (codec->kind == TEXT_CODEC_TOKENIZER) {
        if (last) { token_decoder_release(&codec->decoder, true, file); }
        tokenizer_decode(&codec->tokenizer, &codec->decoder, &id, !last, false, file);
    } else if (codec->kind == TEXT_CODEC_BYTES && !last) {
        putc(id == '\n' || id >= ' ' ? id : '?', file);
    } else if (!last) {
        fprintf(file, "%d ", id);
    }
    fflush(file);
}
