// options_file.h: the configuration file. --config reads one, and every run saves the one
// that repeats it.
//
// Lines are `name = value`, with # before comments. A value that would not be read back
// as it stands (blanks at its ends, a #, a quote at its start, control characters) is
// written as a JSON string.
#ifndef ACCO_OPTIONS_OPTIONS_FILE_H
#define ACCO_OPTIONS_OPTIONS_FILE_H

#include <stdio.h>

#include "options/options_value.h"
#include "runtime/files.h"

// ---------------------------------------------------------------------------------------
// Reading

// Reads a line without its end. 1: a line, 0: end of file, -1: the line is too long or
// holds a zero byte, -2: the system cannot read.
static inline int options_read_line(FILE *file, char line[OPTION_LINE_SIZE]) {
    int length = 0, c;
    while ((c = fgetc(file)) != EOF && c != '\n') {
        if (c == 0 || length == OPTION_LINE_SIZE - 1) { return -1; }
        line[length++] = (char)c;
    }
    line[length] = '\0';
    return ferror(file) ? -2 : c == EOF && length == 0 ? 0 : 1;
}

// Cuts blanks off both ends, in place; returns the new start.
static inline char *options_trim(char *text) {
    text += strspn(text, " \t\r");
    size_t length = strlen(text);
    while (length > 0 && strchr(" \t\r", text[length - 1]) != NULL) { length--; }
    text[length] = '\0';
    return text;
}

// Decodes the JSON string at the start of `text` in place: decoded it is never longer.
// Only a comment may follow. Returns NULL where it is no such thing.
static inline char *options_unquote(char *text) {
    json_error_t problem;
    json_t *value = json_loads(text, JSON_DECODE_ANY | JSON_DISABLE_EOF_CHECK, &problem);
    const char *decoded = json_string_value(value), *rest = decoded == NULL ? "?" : text + problem.position;
    rest += strspn(rest, " \t\r");
    bool good = *rest == '\0' || *rest == '#';
    if (good) { memmove(text, decoded, strlen(decoded) + 1); }
    json_decref(value);
    return good ? text : NULL;
}

// Splits `name = value # comment` in place. Returns false with a message where the line
// is no such thing; *name NULL: nothing on the line. A # begins a comment at the start of
// a word, so file#1.txt is a value.
static inline bool options_split_line(char *line, char **name, char **value, Error *error) {
    *name = NULL;
    line = options_trim(line);
    if (*line == '\0' || *line == '#') { return true; }
    char excerpt[64], *equals = strchr(line, '=');
    if (equals == NULL) {
        return error_set(error, "expected name = value, as in the config.txt of a run, found %s",
                         text_excerpt(line, excerpt));
    }
    *equals = '\0';
    *name = options_trim(line);
    char *text = options_trim(equals + 1);
    if (*text == '"') {
        *value = options_unquote(text);
        if (*value == NULL) {
            return error_set(error, "%s: the quoted value is not well formed", text_excerpt(*name, excerpt));
        }
        return true;
    }
    for (char *position = text; *position != '\0'; position++) {
        if (*position == '#' && (position == text || strchr(" \t", position[-1]) != NULL)) {
            *position = '\0';
            break;
        }
    }
    *value = options_trim(text);
    return true;
}

// One line of the file into its option. `given` remembers the names of this file only:
// the command line may repeat them.
static inline bool options_apply_line(char *line, Options *options, bool given[OPTION_COUNT_OF_TABLE],
                                      Error *error) {
    char *name, *value;
    if (!options_split_line(line, &name, &value, error)) { return false; }
    if (name == NULL) { return true; }
    const OptionSpec *option = option_find(name);
    if (option == NULL) { return option_unknown(name, "", error); }
    if (option->offset == offsetof(Options, config)) {
        return error_set(error, "a configuration file cannot name another one");
    }
    if (given[option - option_table]) { return error_set(error, "%s is given twice", option->name); }
    given[option - option_table] = true;
    return option_set(option, options, value, error);
}

// Sets what the file says and leaves the rest; given: the options that it has. Errors name
// file:line. Some editors begin a file with a byte order mark, which is skipped.
static inline bool options_read_file(const char *path, Options *options, bool given[OPTION_COUNT_OF_TABLE],
                                     Error *error) {
    char line[OPTION_LINE_SIZE];
    FILE *file = fopen(path, "r");
    if (file == NULL) { return error_set(error, "--config: cannot read %.300s: %s", path, strerror(errno)); }
    bool valid = true;
    for (int number = 1; valid; number++) {
        Error inner;
        int status = options_read_line(file, line);
        if (status == 0) { break; }
        if (status == -2) {
            valid = error_set(error, "--config: cannot read %.300s: %s", path, strerror(errno));
        } else if (status == -1) {
            valid = error_set(error, "%.300s:%d: the line holds a zero byte or is longer than %d bytes", path,
                              number, OPTION_LINE_SIZE - 1);
        } else if (!options_apply_line(line + (number == 1 && strncmp(line, "\xEF\xBB\xBF", 3) == 0 ? 3 : 0),
                                       options, given, &inner)) {
            valid = error_set(error, "%.300s:%d: %.700s", path, number, inner.text);
        }
    }
    fclose(file);
    return valid;
}

// ---------------------------------------------------------------------------------------
// Writing

static inline void options_save_text(const char *text, FILE *file) {
    json_t *value = option_text_is_plain(text) ? NULL : json_string(text);
    char *quoted = value == NULL ? NULL : json_dumps(value, JSON_ENCODE_ANY);
    fputs(quoted == NULL ? text : quoted, file);
    free(quoted);
    json_decref(value);
}

// Writes every option as `name = value`, grouped. --config reads the file back to equal
// options.
static inline void options_write(const Options *options, FILE *file) {
    char text[OPTION_VALUE_SIZE];
    fprintf(
        file,
        "# acco.c %s: the effective configuration of a run. To run it again: train_gpt --config THIS_FILE\n",
        ACCO_VERSION);
    for (int group = 0; group < GROUP_COUNT; group++) {
        fprintf(file, "\n# %s\n", option_group_title((OptionGroup)group));
        for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
            const OptionSpec *option = &option_table[i];
            if ((int)option->group != group || option->offset == offsetof(Options, config)) { continue; }
            fprintf(file, "%s = ", option->name);
            if (option->type == OPTION_TEXT) {
                options_save_text((const char *)option_field_const(option, options), file);
            } else {
                fputs(option_print_value(option, options, text), file);
            }
            fputc('\n', file);
        }
    }
}

// A file that is there is replaced at once, or stays as it was: it tells a run that goes on
// what it is.
static inline bool options_save_file(const Options *options, const char *path, Error *error) {
    FILE *file = file_replace_begin(path, error);
    if (file == NULL) { return false; }
    options_write(options, file);
    return file_replace_end(file, path, true, error);
}

#endif
