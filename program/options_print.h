// options_print.h: all options as text: --help, the tables of docs/options.md, and JSON
// for the log.
#ifndef ACCO_PROGRAM_OPTIONS_PRINT_H
#define ACCO_PROGRAM_OPTIONS_PRINT_H

#include "program/options_value.h"
#include "runtime/log.h" // log_text, log_real

// Every option by its name, as one object: numbers as numbers, switches as booleans, the
// rest (words such as "auto" too) as strings. "model" is null where the model is that of
// --from or --finetune.
static inline json_t *options_as_json(const Options *options) {
    json_t *object = json_object();
    char text[OPTION_VALUE_SIZE];
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
        const OptionSpec *option = &option_table[i];
        const void *field = option_field_const(option, options);
        json_t *value;
        if (field == options->model && options_start(options)[0] != '\0') {
            value = json_null();
        } else if (option->type == OPTION_TEXT) {
            value = log_text((const char *)field);
        } else if (option->type == OPTION_SWITCH) {
            value = json_boolean(*(const bool *)field);
        } else if (option->type == OPTION_CHOICE || option_has_word_value(option, options)) {
            value = json_string(option_print_value(option, options, text));
        } else if (option->type == OPTION_REAL) {
            value = log_real(*(const double *)field);
        } else {
            value = json_integer((json_int_t) * (const int64_t *)field);
        }
        json_object_set_new(object, option->name, value);
    }
    return object;
}

// "N|auto", "fp32|bf16", "on|off".
static inline const char *option_metavariable(const OptionSpec *option, char text[OPTION_VALUE_SIZE]) {
    int length = 0;
    if (option->type == OPTION_SWITCH) {
        snprintf(text, OPTION_VALUE_SIZE, "on|off");
    } else if (option->type == OPTION_CHOICE) {
        for (int i = 0; option->choices[i] != NULL; i++) {
            length += snprintf(text + length, (size_t)(OPTION_VALUE_SIZE - length), "%s%s", i == 0 ? "" : "|",
                               option->choices[i]);
        }
    } else {
        snprintf(text, OPTION_VALUE_SIZE, "%s%s%s", option->metavariable, option->word == NULL ? "" : "|",
                 option->word == NULL ? "" : option->word);
    }
    return text;
}

// Prints words between the columns 30 and 100; the cursor is at `column`, and the line is
// ended.
static inline void options_print_wrapped(FILE *file, int column, const char *text) {
    enum { LEFT = 30, RIGHT = 100 };
    if (column > LEFT - 2) { column = RIGHT; } // no room on this line
    while (*text != '\0') {
        // The bracket that ends an option stays in one piece.
        int length = (int)(*text == '[' ? strlen(text) : strcspn(text, " "));
        if (column + 1 + length > RIGHT) {
            fputc('\n', file);
            column = 0;
        }
        int blanks = column < LEFT ? LEFT - column : 1;
        fprintf(file, "%*s%.*s", blanks, "", length, text);
        column += blanks + length;
        text += length + (text[length] == ' ');
    }
    fputc('\n', file);
}

// The text of --help, at most 100 columns wide.
static inline void options_print_help(FILE *file) {
    char name[OPTION_VALUE_SIZE], text[2048], allowed[OPTION_VALUE_SIZE];
    fputs("Usage: train_gpt [train] [--name value ...]    train a GPT-Neo model, alone or under mpirun\n"
          "       train_gpt sample --from DIR             print a text by a model\n"
          "       train_gpt eval --from DIR --data FILE   measure a model: perplexity, LAMBADA, HellaSwag\n"
          "       train_gpt plan [--name value ...]       print the memory that a rank would need, and stop\n"
          "       train_gpt help | --help | -h            print this\n"
          "       train_gpt --version\n\n",
          file);
    fprintf(file, "  mpirun --bind-to none -np 2 ./train_gpt --optimizer %s --tokens 2M\n",
            option_find("optimizer")->default_text);
    for (int group = 0; group < GROUP_COUNT; group++) {
        fprintf(file, "\n%s\n", option_group_title((OptionGroup)group));
        for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
            const OptionSpec *option = &option_table[i];
            if ((int)option->group != group) { continue; }
            option_allowed(option, allowed);
            bool range =
                option->type == OPTION_INTEGER || option->type == OPTION_COUNT || option->type == OPTION_REAL;
            bool notes = option->default_text[0] != '\0';
            bool owned = option->rules != NULL;
            snprintf(text, sizeof text, "%s%s%s%s%s%s%s%s%s", owned ? "Only for " : "",
                     owned ? option->rules : "", owned ? ". " : "", option->help, notes ? " [default " : "",
                     option->default_text, notes && range ? "; " : "", notes && range ? allowed : "",
                     notes ? "]" : "");
            options_print_wrapped(
                file, fprintf(file, "  --%s %s", option->name, option_metavariable(option, name)), text);
        }
    }
}

static inline void options_print_cell(FILE *file, const char *text) {
    for (; *text != '\0'; text++) {
        if (*text == '|') { fputc('\\', file); }
        fputc(*text, file);
    }
}

// The same as tables of GitHub's Markdown, one per group, for docs/options.md.
static inline void options_print_markdown(FILE *file) {
    char text[OPTION_VALUE_SIZE];
    for (int group = 0; group < GROUP_COUNT; group++) {
        fprintf(file, "%s### %s\n\n| option | default | allowed | effect |\n|---|---|---|---|\n",
                group == 0 ? "" : "\n", option_group_title((OptionGroup)group));
        for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
            const OptionSpec *option = &option_table[i];
            if ((int)option->group != group) { continue; }
            bool is_choice = option->type == OPTION_CHOICE || option->type == OPTION_SWITCH;
            fprintf(file, "| `--%s", option->name);
            if (!is_choice) { fputc(' ', file); }
            options_print_cell(file, is_choice ? "" : option_metavariable(option, text));
            fprintf(file, "` | %s | ", option->default_text);
            options_print_cell(file, option->type == OPTION_TEXT ? "text" : option_allowed(option, text));
            fputs(" | ", file);
            if (option->rules != NULL) { fprintf(file, "Only for %s. ", option->rules); }
            options_print_cell(file, option->help);
            fputs(" |\n", file);
        }
    }
}

#endif
