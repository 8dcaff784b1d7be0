// utf8.h: reads text as UTF-8, one character at a time. Valid means well formed by the Unicode
// standard (table 3-7): no overlong forms, no surrogates, nothing above U+10FFFF.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { UTF8_MARK_BYTES = 3 };

// The bytes of a byte order mark that a text begins with, and that are no part of it: 3 or 0.
static inline size_t utf8_mark(const void *bytes, size_t count) {
    return count >= UTF8_MARK_BYTES && memcmp(bytes, "\xEF\xBB\xBF", UTF8_MARK_BYTES) == 0 ? UTF8_MARK_BYTES
                                                                                           : 0;
}

typedef enum Utf8 { UTF8_VALID, UTF8_INVALID, UTF8_INCOMPLETE } Utf8;

// What the `count` bytes (at least one) begin with: a character; a sequence that no byte
// can complete; or the beginning of a character. *length: its bytes. Of an invalid
// sequence these are Unicode's "maximal subpart", which decoders replace by one U+FFFD.
static inline Utf8 utf8_scan(const uint8_t *bytes, size_t count, size_t *length) {
    uint8_t first = bytes[0], low = 0x80, high = 0xBF; // the range of the second byte
    *length = 1;
    if (first < 0x80) { return UTF8_VALID; }
    if (first < 0xC2 || first > 0xF4) { return UTF8_INVALID; }
    size_t needed = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    if (first == 0xE0) { low = 0xA0; }  // below: overlong, it fits two bytes
    if (first == 0xED) { high = 0x9F; } // above: a surrogate
    if (first == 0xF0) { low = 0x90; }  // below: overlong, it fits three bytes
    if (first == 0xF4) { high = 0x8F; } // above: beyond U+10FFFF
    for (; *length < needed; ++*length) {
        if (*length == count) { return UTF8_INCOMPLETE; }
        uint8_t next = bytes[*length];
        if (next < low || next > high) { return UTF8_INVALID; }
        low = 0x80;
        high = 0xBF;
    }
    return UTF8_VALID;
}
