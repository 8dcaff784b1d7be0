// names.h: for error messages: the nearest name, and quoting what the user wrote.
#pragma once

#include <assert.h>
#include <ctype.h>
#include <stdbool.h>

#include "runtime/numbers.h"

// Edit distance with transpositions of neighbours (optimal string alignment), letters
// compared without case; words are cut at 63 letters.
static inline int name_distance(const char *a, const char *b) {
    enum { LETTERS = 64 };
    int64_t rows[3][LETTERS + 1];
    int n = (int)size_min(strlen(a), LETTERS - 1), m = (int)size_min(strlen(b), LETTERS - 1);
    for (int j = 0; j <= m; j++) { rows[0][j] = j; }
    for (int i = 1; i <= n; i++) {
        int64_t *now = rows[i % 3], *before = rows[(i + 2) % 3], *earlier = rows[(i + 1) % 3];
        now[0] = i;
        for (int j = 1; j <= m; j++) {
            int x = tolower((unsigned char)a[i - 1]), y = tolower((unsigned char)b[j - 1]);
            now[j] = int64_min(before[j - 1] + (x != y), int64_min(before[j], now[j - 1]) + 1);
            if (i > 1 && j > 1 && x == tolower((unsigned char)b[j - 2]) &&
                y == tolower((unsigned char)a[i - 2])) {
                now[j] = int64_min(now[j], earlier[j - 2] + 1);
            }
        }
    }
    return (int)rows[n % 3][m];
}

// The name that `word` was probably meant to be; NULL: none. At most a third of the
// letters and one more differ, or the word is its beginning. The first of equals wins.
static inline const char *nearest_name(const char *word, const char *const *names, int count) {
    size_t length = strlen(word);
    const char *nearest = NULL;
    int best = 2 * (2 + (int)(length < 63 ? length : 63) / 3);
    for (int i = 0; i < count; i++) {
        // Doubled, so that the beginning of a name, as 3, is between one mistake and two.
        int distance = 2 * name_distance(word, names[i]);
        bool beginning = length >= 2 && strncmp(word, names[i], length) == 0;
        if (beginning && distance > 3) { distance = 3; }
        if (distance < best) {
            best = distance;
            nearest = names[i];
        }
    }
    return nearest;
}

enum { NAME_HINT = 96 };

// hint <- " (did you mean NAME?)"; empty where no name is near. Returns hint.
static inline const char *name_hint(const char *word, const char *const *names, int count,
                                    char hint[NAME_HINT]) {
    const char *nearest = nearest_name(word, names, count);
    hint[0] = '\0';
    if (nearest != NULL) { snprintf(hint, NAME_HINT, " (did you mean %.63s?)", nearest); }
    return hint;
}

// excerpt <- what the user wrote, cut after 60 bytes, for an Error. Returns excerpt.
static inline const char *text_excerpt(const char *text, char excerpt[64]) {
    snprintf(excerpt, 64, "%.60s%s", text, strlen(text) > 60 ? "..." : "");
    return excerpt;
}

// quoted <- text as one word of a shell's command line, if need be between single quotes.
// size: at least 4 bytes for each byte of text and 3 more. Returns quoted.
static inline const char *text_for_shell(const char *text, char *quoted, size_t size) {
    size_t length = strlen(text), used = 0;
    bool plain = length > 0;
    assert(size >= 4 * length + 3);
    for (size_t i = 0; i < length; i++) {
        plain = plain && (isalnum((unsigned char)text[i]) || strchr("/._-+,:=@%", text[i]) != NULL);
    }
    if (plain) { return strcpy(quoted, text); }
    quoted[used++] = '\'';
    for (size_t i = 0; i < length; i++) {
        used += (size_t)snprintf(quoted + used, size - used, text[i] == '\'' ? "'\\''" : "%c", text[i]);
    }
    strcpy(quoted + used, "'");
    return quoted;
}
