// fuzz_documents.h: texts, cut into documents. They must be those of the definition:
// the mark at the end of a line ends one, line ends around them are dropped, and so are
// empty ones. The end of a text ends a document. Inputs are far below
// TEXT_DOCUMENT_BYTES, so that no document comes in parts.
#pragma once

#include "test/fuzz/fuzz.h"
#include "tokenizer/documents.h"

enum { FUZZ_DOCUMENTS_TEXTS = 3 };

// Where the mark begins with which the line of `count` bytes, without its line end, ends; or -1.
static inline ptrdiff_t fuzz_documents_separates(const uint8_t *line, size_t count) {
    static const char mark[] = "<|endoftext|>";
    size_t length = sizeof mark - 1;
    if (count > 0 && line[count - 1] == '\r') { count--; }
    while (count > length && (line[count - 1] == ' ' || line[count - 1] == '\t')) { count--; }
    return count >= length && memcmp(line + count - length, mark, length) == 0 ? (ptrdiff_t)(count - length)
                                                                               : -1;
}

// The document must be the next piece, unless nothing is left of it.
static inline void fuzz_documents_expect(TextCursor *cursor, const uint8_t *bytes, size_t count) {
    DocumentPart part;
    while (count > 0 && text_is_line_end(bytes[0])) {
        bytes++;
        count--;
    }
    while (count > 0 && text_is_line_end(bytes[count - 1])) { count--; }
    if (count == 0) { return; }
    fuzz_require(text_next_part(cursor, &part), "there are as many documents");
    fuzz_require(part.bytes == bytes && part.count == count && part.ends, "a document is the same");
}

// All documents of one text.
static inline void fuzz_documents_text(TextCursor *cursor, const Text *text) {
    size_t begin = 0;
    for (size_t at = 0; at < text->size;) {
        size_t end = at;
        while (end < text->size && text->bytes[end] != '\n') { end++; }
        size_t next = end < text->size ? end + 1 : end;
        ptrdiff_t mark = fuzz_documents_separates(text->bytes + at, end - at);
        if (mark >= 0) {
            fuzz_documents_expect(cursor, text->bytes + begin, at + (size_t)mark - begin);
            begin = next;
        }
        at = next;
    }
    fuzz_documents_expect(cursor, text->bytes + begin, text->size - begin);
}

static inline bool fuzz_documents(const uint8_t *data, size_t size) {
    FuzzPart parts[FUZZ_DOCUMENTS_TEXTS];
    Text texts[FUZZ_DOCUMENTS_TEXTS];
    DocumentPart part;
    TextCursor cursor = {.texts = texts, .count = FUZZ_DOCUMENTS_TEXTS};
    fuzz_split(data, size, parts, FUZZ_DOCUMENTS_TEXTS);
    for (int i = 0; i < FUZZ_DOCUMENTS_TEXTS; i++) {
        texts[i].bytes = fuzz_copy(parts[i]);
        texts[i].size = parts[i].size;
    }
    for (int i = 0; i < FUZZ_DOCUMENTS_TEXTS; i++) { fuzz_documents_text(&cursor, &texts[i]); }
    fuzz_require(!text_next_part(&cursor, &part), "there are no more documents");
    for (int i = 0; i < FUZZ_DOCUMENTS_TEXTS; i++) { free((void *)texts[i].bytes); }
    return true;
}
