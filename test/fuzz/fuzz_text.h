// fuzz_text.h: any text, encoded by one tokenizer that has a little of everything: merges
// on top of merges, over spaces and over bytes that are not letters; added tokens that
// overlap, one of them special, one normalized. It must keep the laws of
// fuzz_tokenizer.h, and its tokens must be those of plain byte-pair encoding, which
// searches for the best merge again and again.
#pragma once

#include "test/fuzz/fuzz_tokenizer.h"

static inline void fuzz_text_open(Tokenizer *tokenizer) {
    static const char json[] = "{\"added_tokens\":[{\"id\":0,\"content\":\"<|endoftext|>\",\"special\":true},"
                               "{\"id\":1,\"content\":\"<|end|>\"},"
                               "{\"id\":2,\"content\":\"<|e\"},{\"id\":3,\"content\":\"nd|>!\","
                               "\"normalized\":true}],\"pre_tokenizer\":{\"type\":\"ByteLevel\"},"
                               "\"model\":{\"type\":\"BPE\",\"vocab\":{\"th\":4,\"he\":5,\"the\":6,"
                               "\"\\u0120the\":7,\"\\u0120t\":8,\"aa\":9,\"aaaa\":10,"
                               "\"\\u00c3\\u00a9\":11,\"\\u0120\\u0120\":12,\"12\":13,\"123\":14,\"er\":15,"
                               "\"her\":16},\"merges\":[\"h e\",\"t he\",\"t h\","
                               "\"\\u0120 the\",\"\\u0120 t\",\"a a\",\"aa aa\",\"\\u00c3 "
                               "\\u00a9\",\"\\u0120 \\u0120\",\"1 2\",\"12 3\",\"e r\",\"h er\"]}}";
    FuzzPart part = {(const uint8_t *)json, sizeof json - 1};
    Error error = {""};
    fuzz_require(fuzz_tokenizer_complete(tokenizer, part, &error), "the tokenizer of this file is accepted");
}

// Made once: making it takes three times as long as the work on one input.
static inline const Tokenizer *fuzz_text_tokenizer(void) {
    static Tokenizer tokenizer;
    if (tokenizer.vocabulary == 0) { fuzz_text_open(&tokenizer); }
    return &tokenizer;
}

// Merges one piece as the definition says: again and again the merge that was learned
// first, and of its pairs the leftmost.
static inline size_t fuzz_merge_plainly(const Tokenizer *tokenizer, int32_t *ids, size_t count) {
    for (;;) {
        const TokenMerge *best = NULL;
        size_t at = 0;
        for (size_t i = 0; i + 1 < count; i++) {
            const TokenMerge *merge = tokenizer_slot(tokenizer, tokenizer_pair(ids[i], ids[i + 1]));
            if (merge->pair == UINT64_MAX || (best != NULL && merge->rank >= best->rank)) { continue; }
            best = merge;
            at = i;
        }
        if (best == NULL) { return count; }
        ids[at] = best->id;
        memmove(ids + at + 1, ids + at + 2, (count - at - 2) * sizeof *ids);
        count--;
    }
}

// Encodes the letters of the input alone, which are one piece of the pattern.
static inline void fuzz_text_piece(const Tokenizer *tokenizer, FuzzPart text) {
    enum { MOST = 128 };
    char piece[MOST];
    int32_t ids[MOST];
    size_t count = 0;
    for (size_t i = 0; i < text.size && count < MOST; i++) {
        if (text.bytes[i] < 'a' || text.bytes[i] > 'z') { continue; }
        ids[count] = tokenizer->byte_ids[text.bytes[i]];
        piece[count++] = (char)text.bytes[i];
    }
    TokenList list = {NULL, 0, 0};
    Error error = {""};
    fuzz_require(tokenizer_encode(tokenizer, piece, count, true, &list, &error), "every text can be encoded");
    count = fuzz_merge_plainly(tokenizer, ids, count);
    bool same = list.count == count && (count == 0 || memcmp(list.ids, ids, count * sizeof *ids) == 0);
    fuzz_require(same, "tokens are those of plain merging");
    token_list_free(&list);
}

static inline bool fuzz_text(const uint8_t *data, size_t size) {
    FuzzPart text = {data, size};
    fuzz_tokenizer_use(fuzz_text_tokenizer(), text);
    fuzz_text_piece(fuzz_text_tokenizer(), text);
    return true;
}
