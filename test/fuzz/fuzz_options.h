// fuzz_options.h: a command line, one word on each line, and after a line of dashes the
// file of its --config. What is accepted lies in the ranges of the option table, and
// saved options read back the same.
//
// Inputs with a --config of their own are ignored: it could name any file of the machine.
#pragma once

#include "options/options_check.h"
#include "options/options_help.h"
#include "test/fuzz/fuzz.h"

enum { FUZZ_OPTIONS_WORDS = 64 };

// Every number is in its range, every text has an end.
static inline void fuzz_options_range(const Options *options) {
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
        const OptionSpec *option = &option_table[i];
        const void *field = option_field(option, options);
        bool number =
            option->type == OPTION_INTEGER || option->type == OPTION_COUNT || option->type == OPTION_REAL;
        if (option->type == OPTION_TEXT) {
            fuzz_require(memchr(field, 0, sizeof(OptionText)) != NULL, "a text has an end");
        }
        if (!number || option_has_word_value(option, options)) { continue; }
        double value = option->type == OPTION_REAL ? *(const double *)field : (double)*(const int64_t *)field;
        fuzz_require(value >= option->minimum && value <= option->maximum, "a number is in its range");
    }
}

// Saves the options and reads them again: those that count for something are the same.
static inline void fuzz_options_again(const Options *options) {
    Options again;
    FuzzFolder folder;
    Error error = {""};
    char path[600];
    bool has[OPTION_COUNT_OF_TABLE] = {false};
    fuzz_folder_open(&folder);
    snprintf(path, sizeof path, "%s/config.json", folder.path);
    fuzz_require(options_save_file(options, path, &error), "options can be saved");
    options_defaults(&again);
    fuzz_require(options_read_file(path, &again, has, &error), "saved options are accepted");
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
        fuzz_require(!has[i] || option_is_same(&option_table[i], options, &again),
                     "a saved option is the same");
    }
    fuzz_folder_close(&folder);
}

static inline void fuzz_options_use(const Options *options) {
    Error error = {""};
    fuzz_options_range(options);
    fuzz_options_again(options);
    json_t *object = options_as_json(options);
    char *text = json_dumps(object, 0);
    fuzz_require(text != NULL && json_object_size(object) == (size_t)OPTION_COUNT_OF_TABLE + 1,
                 "every option can be logged");
    free(text);
    json_decref(object);
    if (!fuzz_accepted(options_check(options, &error), &error)) { return; }
    for (int ranks = 1; ranks <= 3; ranks++) {
        fuzz_accepted(options_check_ranks(options, ranks, options->seq_len, &error), &error);
    }
}

// Cuts `text` into the words of a command line, after the name of the program. Returns
// how many there are; 0: it has a --config of its own.
static inline int fuzz_options_cut(char *text, char *words[FUZZ_OPTIONS_WORDS]) {
    static char program[] = "train_gpt";
    int count = 0;
    words[count++] = program;
    while (*text != '\0' && count < FUZZ_OPTIONS_WORDS - 2) {
        size_t length = strcspn(text, "\n");
        bool last = text[length] == '\0';
        text[length] = '\0';
        if (strncmp(text, "--config", 8) == 0) { return 0; }
        words[count++] = text;
        text += last ? length : length + 1;
    }
    return count;
}

static inline bool fuzz_options(const uint8_t *data, size_t size) {
    FuzzPart parts[2];
    FuzzFile file;
    Options options;
    Error error = {""};
    char *words[FUZZ_OPTIONS_WORDS], option[] = "--config";
    fuzz_split(data, size, parts, 2);
    char *text = fuzz_copy_text(parts[0]);
    int count = fuzz_options_cut(text, words);
    fuzz_file_open(&file, parts[1]);
    if (count > 0 && parts[1].size > 0) {
        words[count++] = option;
        words[count++] = file.path;
    }
    bool good = count > 0 && fuzz_accepted(options_parse(count, words, &options, &error), &error);
    if (good) { fuzz_options_use(&options); }
    fuzz_file_close(&file);
    free(text);
    return good;
}
