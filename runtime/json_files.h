// json_files.h: files of JSON that other programs have written.
#pragma once

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

#include "runtime/utf8.h"

// Of what may hold integers beyond 2^63, which jansson does not take: ids in records, or 10^30, the
// model_max_length in a tokenizer_config.json without a limit. All numbers are reals then.
enum { JSON_ANY_INTEGERS = JSON_ALLOW_NUL | JSON_DECODE_INT_AS_REAL };

// As json_load_file, but the file may begin with a byte order mark.
static inline json_t *json_file_load(const char *path, size_t flags, json_error_t *problem) {
    uint8_t mark[UTF8_MARK_BYTES];
    FILE *file = fopen(path, "r");
    if (file == NULL) { return json_load_file(path, flags, problem); } // it says why
    if (utf8_mark(mark, fread(mark, 1, sizeof mark, file)) == 0) { rewind(file); }
    json_t *root = json_loadf(file, flags, problem);
    fclose(file);
    return root;
}

// The text of a key; NULL: there is none.
static inline const char *json_text(const json_t *object, const char *key) {
    return json_string_value(json_object_get(object, key));
}

static inline bool json_says(const json_t *object, const char *key, const char *text) {
    const char *value = json_text(object, key);
    return value != NULL && strcmp(value, text) == 0;
}

static inline bool json_flag(const json_t *object, const char *key) {
    return json_is_true(json_object_get(object, key));
}
