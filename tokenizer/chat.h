// chat.h: how a model is spoken to: the constant texts of its tokenizer's chat template.
//
// `python -m tokenizer.chat MODEL` takes them out of the template, and checks that they give
// what it gives, so nothing here needs Jinja. They are in chat.json, next to tokenizer.json:
//
//     {"first": [a, b], "system": [a, b, c], "next": [a, b], "end": "<|im_end|>"}
//
//     first    what stands before the user's first message, and between it and the answer
//     system   what stands before a system text, between it and the first message, and between
//              that and the answer; null: the template takes no system text
//     next     as first, for a later message; begins with the end of the answer before it
//     end      the token that ends an answer
//     thought  stands behind that, before the answer to the newest message only: an empty thought,
//              which says that none is asked for; may be missing
//     trim     true: blanks around what is said are left out, those that Python's strip() leaves out
#pragma once

#include "tokenizer/tokenizer.h"

typedef struct Chat {
    json_t *root;                               // of chat.json; NULL: there is none
    const char *first[2], *system[3], *next[2]; // system[0] NULL: none
    const char *thought;                        // NULL: none
    int32_t end;
    bool trims;
} Chat;

// tokenizer: from `path`, a tokenizer.json or its directory. On failure there is nothing to close.
static inline bool chat_open(Chat *chat, const char *path, const Tokenizer *tokenizer, Error *error) {
    struct stat status;
    char file[PATH_MAX];
    json_error_t trouble;
    int length = tokenizer_directory_length(path);
    memset(chat, 0, sizeof *chat);
    snprintf(file, sizeof file, "%.*s%schat.json", length, path, length > 0 ? "/" : "");
    if (stat(file, &status) != 0) { return true; }
    chat->root = json_file_load(file, JSON_REJECT_DUPLICATES, &trouble);
    const json_t *thought = tokenizer_get(chat->root, "thought"),
                 *system = tokenizer_get(chat->root, "system");
    const char *end;
    bool good = json_unpack(chat->root, "{s:[s, s!], s:[s, s!], s:s}", "first", &chat->first[0],
                            &chat->first[1], "next", &chat->next[0], &chat->next[1], "end", &end) == 0 &&
                (system == NULL || json_unpack((json_t *)system, "[s, s, s!]", &chat->system[0],
                                               &chat->system[1], &chat->system[2]) == 0);
    chat->thought = json_string_value(thought);
    chat->trims = json_flag(chat->root, "trim");
    chat->end = good ? tokenizer_find_added(tokenizer, end) : -1;
    good = chat->end >= 0 && (thought == NULL || chat->thought != NULL);
    bool has_end = chat->end < tokenizer->vocabulary;
    if (good && has_end) { return true; }
    json_decref(chat->root);
    memset(chat, 0, sizeof *chat);
    if (!has_end) {
        return error_set(error, "%.300s: the model has no row for the token that ends an answer", file);
    }
    return error_set(error,
                     "%.300s does not say how to speak with this model: make it again with python -m "
                     "tokenizer.chat, or remove it",
                     file);
}

// The bytes of the blank that a text begins with; 0: it begins with none.
static inline size_t chat_blank(const char *text) {
    static const char *const wide[] = {"\xC2\x85",     "\xC2\xA0",     "\xE1\x9A\x80", "\xE2\x80\xA8",
                                       "\xE2\x80\xA9", "\xE2\x80\xAF", "\xE2\x81\x9F", "\xE3\x80\x80"};
    if ((*text >= '\t' && *text <= '\r') || (*text >= '\x1C' && *text <= ' ')) { return 1; }
    if (strncmp(text, "\xE2\x80", 2) == 0 && (uint8_t)text[2] >= 0x80 && (uint8_t)text[2] <= 0x8A) {
        return 3;
    }
    for (size_t i = 0; i < sizeof wide / sizeof wide[0]; i++) {
        if (strncmp(text, wide[i], strlen(wide[i])) == 0) { return strlen(wide[i]); }
    }
    return 0;
}

static inline void chat_write(const Chat *chat, const char *said, FILE *file) {
    size_t count = strlen(said), length;
    while (chat->trims && (length = chat_blank(said)) > 0) {
        said += length;
        count -= length;
    }
    for (size_t back = 1; chat->trims && back <= size_min(count, 3); back++) {
        if (chat_blank(said + count - back) != back) { continue; }
        count -= back;
        back = 0;
    }
    fwrite(said, 1, count, file);
}

// What stands from where the text is up to the answer and its thought, for the caller to free.
// follows: an answer stands before it.
static inline char *chat_text(const Chat *chat, const char *system, bool follows, const char *said) {
    char *text = NULL;
    size_t size = 0;
    FILE *file = open_memstream(&text, &size);
    bool instructs = !follows && system[0] != '\0';
    const char *const *around = follows ? chat->next : instructs ? chat->system + 1 : chat->first;
    if (instructs) {
        fputs(chat->system[0], file);
        chat_write(chat, system, file);
    }
    fputs(around[0], file);
    chat_write(chat, said, file);
    fputs(around[1], file);
    fclose(file);
    return text;
}
