// documents.h: where documents come from: texts, or lines of JSON.
//
// In a text, <|endoftext|> at the end of a line ends a document, whether something stands before
// it or not. Line ends around a document are dropped, and so is an empty document. A document
// longer than TEXT_DOCUMENT_BYTES comes in parts, cut before a line end or a blank.
// tokenizer/sources.py cuts texts in the same way.
//
// A line of JSON is one document:
//
//     {"text": "...", "prompt": "...", "learn": [[5, 9]], "val": true, "more": true}
//
//     text     what the model learns to write
//     prompt   what stands before it; it is encoded by itself, and only read, not predicted
//     learn    the text is a chat, and only these parts of it are predicted: the first byte of
//              each and the byte after its last one, in UTF-8, in order. A token that holds a
//              byte of a part is predicted. What looks like a special token is one
//     val      the document is for validation; where it has several lines, the first one says so
//     more     the document continues in the next line
//     bytes    the characters of `text`, U+0000 to U+00FF, are the bytes of a text that is not UTF-8
//
// Only `text` is required. Other members are ignored.
#pragma once

#include "runtime/numbers.h"
#include "tokenizer/tokenizer.h"

enum {
    TEXT_DOCUMENT_BYTES = 1 << 22, // DOCUMENT_BYTES in tokenizer/sources.py
    JSON_LINE_MOST_BYTES = 1 << 28 // a longer line means a damaged stream
};

// A document, or a part of one that is long.
typedef struct DocumentPart {
    const uint8_t *bytes; // (count)
    char *owned;          // the same, to be freed with the part; NULL: they belong to another
    size_t count;
    size_t line;   // of JSON, from 1 on; 0: the bytes are text
    bool begins;   // the document begins here, for certain
    bool ends;     // the document ends here. Of JSON it is known once the line is encoded, and so are these:
    bool held_out; // for validation
    bool is_chat;
    bool has_prompt;     // a text of which the beginning is only read
    int32_t divider;     // the token that divides documents of its kind
    bool holds_divider;  // a chat: that stands within it, too
    bool is_odd;         // some of its bytes are not UTF-8
    bool is_lossy;       // some have no token
    const char *spelled; // a special token that it has in letters; NULL: none
    size_t tokens;
} DocumentPart;

// Gives the next part. False: there is none.
typedef bool (*NextPart)(void *source, DocumentPart *part);

typedef struct Text {
    const uint8_t *bytes; // (size)
    size_t size;
} Text;

// How far the texts have been read. At the beginning all is zero but `texts` and `count`.
typedef struct TextCursor {
    const Text *texts; // (count)
    int count, index;
    size_t at;      // in texts[index]
    bool continued; // within a document
    bool given;     // of which there was a part already
    size_t empty;   // documents before here that were left out, because they have no text
} TextCursor;

// The bytes from the mark on that a line ends with, including blanks and the line end behind it; 0:
// it ends with none. ends: nothing follows the `count` bytes, so a line end may be missing.
static inline size_t text_separator(const uint8_t *line, size_t count, bool ends) {
    static const char mark[] = "<|endoftext|>";
    size_t at = count, length = sizeof mark - 1;
    if (line[at - 1] != '\n' && !ends) { return 0; }
    at -= line[at - 1] == '\n';
    at -= at > 0 && line[at - 1] == '\r';
    while (at > 0 && (line[at - 1] == ' ' || line[at - 1] == '\t')) { at--; }
    return at >= length && memcmp(line + at - length, mark, length) == 0 ? count - at + length : 0;
}

// Where to cut a document that is too long, as cut_before_space in sources.py: before the
// last line end or else blank of its second half, or else between two characters.
static inline size_t text_cut(const uint8_t *bytes, size_t count) {
    for (int i = 0; i < 2; i++) {
        size_t cut = count - 1;
        while (cut > count / 2 && bytes[cut] != (i == 0 ? '\n' : ' ')) { cut--; }
        if (cut > count / 2) { return cut; }
    }
    size_t cut = count;
    while (cut > count - 4 && (bytes[cut - 1] & 0xC0) == 0x80) { cut--; }
    return cut - 1;
}

static inline bool text_is_line_end(uint8_t byte) { return byte == '\r' || byte == '\n'; }

// NextPart of a TextCursor.
static inline bool text_next_part(void *source, DocumentPart *part) {
    TextCursor *cursor = (TextCursor *)source;
    while (cursor->index < cursor->count) {
        const Text *text = &cursor->texts[cursor->index];
        const uint8_t *bytes = text->bytes + cursor->at;
        size_t left = text->size - cursor->at, count = 0, separator = 0;
        if (left == 0) {
            cursor->index++;
            cursor->at = 0;
            continue;
        }
        bool fits = left < TEXT_DOCUMENT_BYTES, continued = cursor->continued;
        size_t window = size_min(left, TEXT_DOCUMENT_BYTES);
        while (count < window && separator == 0) {
            const uint8_t *line_end = (const uint8_t *)memchr(bytes + count, '\n', window - count);
            size_t next = line_end != NULL ? (size_t)(line_end - bytes) + 1 : window;
            separator = text_separator(bytes + count, next - count, window == left);
            count = next - separator;
        }
        bool ends = separator > 0 || fits;
        if (!ends) { count = text_cut(bytes, window); }
        cursor->at += count + separator;
        cursor->continued = !ends;
        for (; !continued && count > 0 && text_is_line_end(bytes[0]); bytes++) { count--; }
        while (ends && count > 0 && text_is_line_end(bytes[count - 1])) { count--; }
        if (count == 0 && !continued) {
            cursor->empty += separator > 0;
            continue;
        }
        const DocumentPart found = {.bytes = bytes, .count = count, .begins = !cursor->given, .ends = ends};
        cursor->given = !ends;
        *part = found;
        return true;
    }
    return false;
}

// At the beginning all is zero but `file`.
typedef struct JsonLines {
    FILE *file;
    size_t line;
    bool continued; // the next line may belong to the document of the line before it
    int problem;    // why no more could be read, as in errno; 0: the file has ended
} JsonLines;

// Whether a line of JSON may say that its document continues: a member "more" is there, and true.
static inline bool json_line_may_continue(const char *text, size_t count) {
    static const char name[] = "\"more\"", blanks[] = " \t:";
    const char *end = text + count;
    for (const char *at = text; (at = (const char *)memchr(at, '"', (size_t)(end - at))) != NULL; at++) {
        if ((size_t)(end - at) < sizeof name - 1 || memcmp(at, name, sizeof name - 1) != 0) { continue; }
        const char *value = at + sizeof name - 1;
        while (value < end && memchr(blanks, *value, sizeof blanks - 1) != NULL) { value++; }
        if (value < end && *value == 't') { return true; }
    }
    return false;
}

// NextPart of JsonLines; each part owns its line. Lines of blanks are skipped.
static inline bool json_lines_next(void *source, DocumentPart *part) {
    JsonLines *lines = (JsonLines *)source;
    char *text = NULL;
    size_t room = 0;
    for (int byte = 0; byte != EOF;) {
        size_t count = 0, blank;
        while ((byte = getc_unlocked(lines->file)) != EOF && byte != '\n' && count <= JSON_LINE_MOST_BYTES) {
            list_reserve((void **)&text, count, &room, 1, 1);
            text[count++] = (char)byte;
        }
        if (ferror(lines->file)) { break; }
        lines->line += count > 0 || byte != EOF;
        if (count > JSON_LINE_MOST_BYTES) {
            lines->problem = EFBIG;
            free(text);
            return false;
        }
        size_t mark = lines->line == 1 ? utf8_mark(text, count) : 0;
        for (blank = mark; blank < count && memchr(" \t\r", text[blank], 3) != NULL; blank++) {}
        if (blank == count) { continue; }
        const DocumentPart found = {.bytes = (const uint8_t *)text + mark,
                                    .owned = text,
                                    .count = count - mark,
                                    .line = lines->line,
                                    .begins = !lines->continued};
        lines->continued = json_line_may_continue(text, count);
        *part = found;
        return true;
    }
    lines->problem = ferror(lines->file) ? errno : 0;
    free(text);
    return false;
}
