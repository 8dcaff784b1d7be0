// text_format.h: whether a file that is to be read as text is text.
//
// Any bytes can be trained on, so a compressed file would silently give a model of noise.
#pragma once

#include <jansson.h>

#include "runtime/errors.h"
#include "runtime/numbers.h"
#include "runtime/utf8.h"

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
    json_t *record = json_loadb(text + at, size - at, JSON_DISABLE_EOF_CHECK | JSON_ALLOW_NUL, NULL);
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
        return error_set(
            error,
            "%.400s is JSON, and its braces and quotes would be learned, too: make token files of "
            "its texts with python -m tokenizer.prepare; where it is a text that only begins so, let a line "
            "<|endoftext|> be the first, and its name not end with .json",
            name);
    }
    for (size_t i = 0; i < looked; i += length) {
        zeros += bytes[i] == 0;
        invalid += utf8_scan(bytes + i, size - i, &length) == UTF8_VALID ? 0 : length;
    }
    return (zeros <= TEXT_FEW_BYTES + looked / TEXT_MOST_ZEROS &&
            invalid <= TEXT_FEW_BYTES + looked / TEXT_MOST_INVALID) ||
           error_set(
               error,
               "%.400s is not text in UTF-8: %zu of its first %zu bytes are not, or are zero; convert a "
               "text with iconv, and give a file of token ids a name that ends with .bin",
               name, zeros + invalid, looked);
}
