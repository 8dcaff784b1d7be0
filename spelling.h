// spelling.h: between text and token ids, whichever way a model reads: bytes, a tokenizer, or nothing that we know of.
//
//   spelling_open     a tokenizer.json (or a directory with one), or none: then bytes, where the vocabulary is that of bytes
//   spelling_encode   a prompt to ids; without a prompt, what a text begins behind
//   spelling_print    ids to text, as soon as whole characters are there
#ifndef ACCO_SPELLING_H
#define ACCO_SPELLING_H

#include "tokenizer.h"

typedef enum SpellingKind { SPELLING_BYTES, SPELLING_TOKENIZER, SPELLING_IDS } SpellingKind;

typedef struct Spelling {
    SpellingKind kind;
    Tokenizer tokenizer;
    int vocabulary; // of the model
    TokenDecoder decoder;
} Spelling;

static inline void spelling_close(Spelling *spelling) {
    if (spelling->kind == SPELLING_TOKENIZER) { tokenizer_close(&spelling->tokenizer); }
}

// path: of tokenizer.json or its directory; empty: none. bytes: what is to be spelled without one are bytes.
static inline bool spelling_open(Spelling *spelling, const char *path, bool bytes, int vocabulary, Error *error) {
    memset(spelling, 0, sizeof *spelling);
    spelling->kind = bytes ? SPELLING_BYTES : SPELLING_IDS;
    spelling->vocabulary = vocabulary;
    if (path[0] == '\0') { return true; }
    char file[2048];
    struct stat status;
    bool directory = stat(path, &status) == 0 && S_ISDIR(status.st_mode);
    snprintf(file, sizeof file, "%.1900s%s", path, directory ? "/tokenizer.json" : "");
    if (!tokenizer_open(&spelling->tokenizer, file, error)) { return false; }
    spelling->kind = SPELLING_TOKENIZER;
    if (spelling->tokenizer.vocabulary <= vocabulary) { return true; }
    int tokens = spelling->tokenizer.vocabulary;
    spelling_close(spelling);
    return error_set(error, "%.400s has %d tokens, the model only %d", file, tokens, vocabulary);
}

// The token that ends a text; -1: none is known.
static inline int32_t spelling_end(const Spelling *spelling) {
    return spelling->kind == SPELLING_TOKENIZER ? tokenizer_find_added(&spelling->tokenizer, "<|endoftext|>") : -1;
}

// Without a prompt a text begins behind a line end where bytes are read, as every window of the built-in corpus does; token ids begin
// behind the end of a text, which is <|endoftext|>, or else the last id, as in GPT-2's vocabulary.
static inline bool spelling_encode(const Spelling *spelling, const char *prompt, TokenList *out, Error *error) {
    if (spelling->kind == SPELLING_TOKENIZER && prompt[0] != '\0') {
        return tokenizer_encode(&spelling->tokenizer, prompt, strlen(prompt), true, out, error);
    }
    if (spelling->kind == SPELLING_BYTES) {
        const char *text = prompt[0] != '\0' ? prompt : "\n";
        bool good = true;
        for (const char *c = text; good && *c != '\0'; c++) { good = token_list_add(out, (unsigned char)*c); }
        return good || error_set(error, "no memory for the prompt");
    }
    if (prompt[0] != '\0') {
        return error_set(error, "--prompt needs a vocabulary that turns it into token ids: give --tokenizer, or a --from with a "
                                "tokenizer.json");
    }
    int32_t end = spelling_end(spelling);
    return token_list_add(out, end >= 0 ? end : spelling->vocabulary - 1) || error_set(error, "no memory for the prompt");
}

// Writes what can be read so far; `last` after the last token, and then `id` is not looked at.
static inline void spelling_print(Spelling *spelling, int32_t id, bool last, FILE *file) {
    Error error;
    if (spelling->kind == SPELLING_TOKENIZER) {
        TextList text = {NULL, 0, 0};
        bool good = last ? tokenizer_decode_end(&spelling->decoder, &text, &error)
                         : tokenizer_decode(&spelling->tokenizer, &spelling->decoder, &id, 1, false, &text, &error);
        if (good) { fwrite(text.bytes, 1, text.count, file); }
        text_list_free(&text);
    } else if (spelling->kind == SPELLING_BYTES && !last) {
        putc(id == '\n' || id >= ' ' ? id : '?', file);
    } else if (!last) {
        fprintf(file, "%d ", id);
    }
    fflush(file);
}

#endif
