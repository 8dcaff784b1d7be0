// options_print.h: options as text: help by topic, the tables of docs/options.md, and JSON
// for the log.
#ifndef ACCO_OPTIONS_OPTIONS_PRINT_H
#define ACCO_OPTIONS_OPTIONS_PRINT_H

#include "options/options_parse.h"
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

// Prints words between the columns 12 and 80; the cursor is at `column`, and the line is
// ended.
static inline void options_print_wrapped(FILE *file, int column, const char *text) {
    enum { LEFT = 12, RIGHT = 80 };
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

// An option with its help, at most 80 columns wide.
static inline void option_print_help(FILE *file, const OptionSpec *option) {
    char name[OPTION_VALUE_SIZE], text[2048], allowed[OPTION_VALUE_SIZE];
    option_allowed(option, allowed);
    bool range =
        option->type == OPTION_INTEGER || option->type == OPTION_COUNT || option->type == OPTION_REAL;
    bool notes = option->default_text[0] != '\0';
    bool owned = option->rules != NULL;
    snprintf(text, sizeof text, "%s%s%s%s%s%s%s%s%s", owned ? "Only for " : "", owned ? option->rules : "",
             owned ? ". " : "", option->help, notes ? " [default " : "", option->default_text,
             notes && range ? "; " : "", notes && range ? allowed : "", notes ? "]" : "");
    options_print_wrapped(file, fprintf(file, "  --%s %s", option->name, option_metavariable(option, name)),
                          text);
}

static inline void option_group_print_help(FILE *file, OptionGroup group) {
    fprintf(file, "\n%s\n", option_group_title(group));
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
        if (option_table[i].group == group) { option_print_help(file, &option_table[i]); }
    }
}

// How commands are called.
static inline void options_print_usage(FILE *file) {
    fputs("  train_gpt [train] [--name value ...]    trains, alone or under mpirun\n"
          "  train_gpt sample --from DIR             prints a text by a model\n"
          "  train_gpt eval --from DIR --data FILE   perplexity, LAMBADA, HellaSwag\n"
          "  train_gpt plan [--name value ...]       how much memory and time it would take\n"
          "  train_gpt tokenize --out PREFIX         makes token files of JSON lines\n"
          "  train_gpt help TOPIC                    explains a topic; help all: everything\n"
          "  train_gpt --version                     how the program was built\n",
          file);
}

// Everything.
static inline void options_print_help(FILE *file) {
    options_print_usage(file);
    for (int group = 0; group < GROUP_COUNT; group++) { option_group_print_help(file, (OptionGroup)group); }
}

// What fits a screen: 24 lines of 80 columns.
static inline void options_print_overview(FILE *file) {
    fputs("train_gpt trains GPT-Neo models on CPUs and GPUs.\n\n", file);
    options_print_usage(file);
    fprintf(file, "\n  mpirun --bind-to none -np 2 ./train_gpt --optimizer %s --tokens 2M\n\n",
            option_find("optimizer")->default_text);
    fputs("A topic is a command, an option, a rule of --optimizer, or a group of options:\n", file);
    for (int group = 0; group < GROUP_COUNT; group++) {
        fprintf(file, "  %-12s %s\n", option_group_name((OptionGroup)group),
                option_group_title((OptionGroup)group));
    }
}

// The use of a command, and its options.
static inline void command_print_help(FILE *file, OptionsCommand command) {
    const char *used = options_of_command(command);
    if (command == COMMAND_TRAIN || command == COMMAND_HELP) {
        options_print_overview(file);
    } else if (command == COMMAND_PLAN) {
        fputs("train_gpt plan [--name value ...]\n\nTakes the options of training, prints what memory each "
              "rank would need and whether there is so\nmuch, how long commits would take under every rule, "
              "and "
              "which rule to take. Its own:\n\n",
              file);
        option_print_help(file, option_find("ranks"));
        option_print_help(file, option_find("ranks-per-host"));
        option_print_help(file, option_find("gpu-memory"));
        for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
            if (option_table[i].group == GROUP_PLAN) { option_print_help(file, &option_table[i]); }
        }
    } else {
        fprintf(file, "train_gpt %s%s\n\n", command_names()[command],
                command == COMMAND_EVAL ? " --from DIR --data FILE"
                : command == COMMAND_SAMPLE
                    ? " --from DIR"
                    : " --tokenizer DIR --out PREFIX < FILE.jsonl\n\n"
                      "Writes PREFIX_train_00000.bin, PREFIX_val_00000.bin and so on. A "
                      "line has one\ndocument: {\"text\": \"...\", \"prompt\": "
                      "\"...\", \"val\": true}. Only the text must be\nthere. The "
                      "prompt is not predicted; val: for validation. With --seq-len each\n"
                      "document is one sequence, cut or filled up; otherwise documents "
                      "follow each\nother.");
        for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
            if (option_list_names(used, option_table[i].name)) { option_print_help(file, &option_table[i]); }
        }
    }
}

// The options that only some rules have, this one among them.
static inline void rule_print_help(FILE *file, const char *rule) {
    int own = 0;
    option_print_help(file, option_find("optimizer"));
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
        const OptionSpec *option = &option_table[i];
        if (option->rules == NULL || !option_list_names(option->rules, rule)) { continue; }
        if (own++ == 0) { fprintf(file, "\nOptions of %s that not every rule has\n", rule); }
        option_print_help(file, option);
    }
}

enum { HELP_TOPICS = OPTION_COUNT_OF_TABLE + GROUP_COUNT + COMMANDS_BY_NAME + RULE_COUNT + 1 };

// Prints what `topic` is; empty: the overview. False: there is no such topic.
static inline bool options_print_topic(FILE *file, const char *topic, Error *error) {
    const char *names[HELP_TOPICS], *name = topic + strspn(topic, "-");
    int count = 0, found = 0;
    for (int i = 0; i < COMMANDS_BY_NAME; i++) { names[count++] = command_names()[i]; }
    for (int i = 0; i < GROUP_COUNT; i++) { names[count++] = option_group_name((OptionGroup)i); }
    for (int i = 0; i < RULE_COUNT; i++) { names[count++] = RULES[i].rule->name; }
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) { names[count++] = option_table[i].name; }
    names[count++] = "all";
    while (found < count && strcmp(names[found], name) != 0) { found++; }
    int group = found - COMMANDS_BY_NAME, rule = group - GROUP_COUNT, option = rule - RULE_COUNT;
    if (topic[0] == '\0') {
        options_print_overview(file);
    } else if (found == count) {
        const char *nearest = nearest_name(name, names, count);
        char excerpt[64];
        return error_set(error, "no help on %s%s%s%s train_gpt help lists the topics",
                         text_excerpt(topic, excerpt), nearest == NULL ? "" : ": did you mean ",
                         nearest == NULL ? "" : nearest, nearest == NULL ? ":" : "?");
    } else if (option == OPTION_COUNT_OF_TABLE) {
        options_print_help(file);
    } else if (option >= 0) {
        option_print_help(file, &option_table[option]);
    } else if (rule >= 0) {
        rule_print_help(file, name);
    } else if (group >= 0) {
        option_group_print_help(file, (OptionGroup)group);
    } else {
        command_print_help(file, (OptionsCommand)found);
    }
    return true;
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
