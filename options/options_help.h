// options_help.h: help by topic, and the tables of docs/options.md.
#pragma once

#include "options/options_parse.h"

// "N|auto", "fp32|bf16", "on|off".
static inline const char *option_metavariable(const OptionSpec *option, char text[OPTION_VALUE_SIZE]) {
    const char *word = option->word == NULL ? "" : option->word;
    if (option->type == OPTION_SWITCH) { return "on|off"; }
    if (option->type == OPTION_CHOICE) { return option_join_choices(option, "|", "|", text); }
    snprintf(text, OPTION_VALUE_SIZE, "%s%s%s", option->metavariable, word[0] == '\0' ? "" : "|", word);
    return text;
}

// Prints words between the columns 12 and 80, from `column` on, and ends the line.
static inline void options_print_wrapped(FILE *file, int column, const char *text) {
    enum { LEFT = 12, RIGHT = 80 };
    if (column > LEFT - 2) { column = RIGHT; } // no room on this line
    while (*text != '\0') {
        // The bracket that ends an option stays in one piece.
        int length = (int)(*text == '[' ? strlen(text) : strcspn(text, " "));
        bool fits = column + 1 + length <= RIGHT;
        int begin = fits && column >= LEFT ? column + 1 : LEFT;
        fprintf(file, "%s%*s%.*s", fits ? "" : "\n", fits ? begin - column : begin, "", length, text);
        column = begin + length;
        text += length + (text[length] == ' ');
    }
    fputc('\n', file);
}

// An option with its help, at most 80 columns wide.
static inline void option_print_help(FILE *file, const OptionSpec *option) {
    char name[OPTION_VALUE_SIZE], text[2048] = "", allowed[OPTION_VALUE_SIZE];
    bool range = option->type <= OPTION_REAL; // a number
    if (option->rules != NULL) { snprintf(text, sizeof text, "Only for %s. ", option->rules); }
    text_join(text, sizeof text, "", "%s", option->help);
    if (option->default_text[0] != '\0') {
        text_join(text, sizeof text, "", " [default %s%s%s]", option->default_text, range ? "; " : "",
                  range ? option_allowed(option, allowed) : "");
    }
    options_print_wrapped(file, fprintf(file, "  --%s %s", option->name, option_metavariable(option, name)),
                          text);
}

static inline void option_group_print_help(FILE *file, int group) {
    fprintf(file, "\n%s\n", option_groups[group].title);
    for (EACH_OPTION(option)) {
        if ((int)option->group == group) { option_print_help(file, option); }
    }
}

static const char *const command_uses[COMMANDS_BY_NAME][2] = {
    {"[train] [--name value ...]", "trains, alone or under mpirun"},
    {"sample --from DIR", "prints a text by a model"},
    {"eval --from DIR --data FILE", "perplexity, LAMBADA, HellaSwag"},
    {"plan [--name value ...]", "how much memory and time it would take"},
    {"tokenize --out PREFIX", "makes token files of JSON lines"},
    {"average --from RUN --out DIR", "the mean of its last checkpoints"},
    {"export --from RUN --to FILE", "a GGUF for llama.cpp and Ollama"},
    {"help TOPIC", "explains a topic; help all: everything"}};

static inline void command_print_use(FILE *file, int command) {
    fprintf(file, "  train_gpt %-29s %s\n", command_uses[command][0], command_uses[command][1]);
}

static inline void options_print_usage(FILE *file) {
    for (int i = 0; i < COMMANDS_BY_NAME; i++) { command_print_use(file, i); }
    fputs("  train_gpt --version                     how the program was built\n", file);
}

// What fits a screen: 24 lines of 80 columns.
static inline void options_print_overview(FILE *file) {
    fputs("train_gpt trains GPT-2, GPT-Neo, Llama and Qwen models on CPUs and GPUs.\n", file);
    options_print_usage(file);
    fputs("\n  mpirun --bind-to none -np 2 ./train_gpt --tokens 2M\n\n"
          "A topic is a command, an option, a rule of --optimizer, or a group of options:\n",
          file);
    for (int group = 0; group < GROUP_COUNT; group++) {
        fprintf(file, "  %-12s %s\n", option_groups[group].name, option_groups[group].title);
    }
}

// The use of a command, and its options: of a plan those that training lacks.
static inline void command_print_help(FILE *file, OptionsCommand command) {
    if (command == COMMAND_TRAIN || command == COMMAND_HELP) {
        options_print_overview(file);
        return;
    }
    command_print_use(file, command);
    if (command == COMMAND_TOKENIZE) {
        fputs("\nReads lines of JSON from its standard input, a document in each:\n"
              "{\"text\": \"...\", \"prompt\": \"...\", \"val\": true}; only the text must be there.\n"
              "The prompt is not predicted; val: for validation. Writes PREFIX_train_00000.bin,\n"
              "PREFIX_val_00000.bin and so on. With --seq-len each document is one sequence, cut\n"
              "or filled up; otherwise documents follow each other.\n",
              file);
    }
    fputs(command == COMMAND_PLAN
              ? "\nUnder mpirun its ranks measure the hosts and the links between them first.\n"
                "It takes the options of training and\n"
              : "\n",
          file);
    for (EACH_OPTION(option)) {
        bool trains = command == COMMAND_PLAN && option_is_of_command(option, COMMAND_TRAIN);
        if (option_is_of_command(option, command) && !trains) { option_print_help(file, option); }
    }
}

// Prints what `topic` is; empty: the overview. False: there is no such topic.
static inline bool options_print_topic(FILE *file, const char *topic, Error *error) {
    enum { TOPICS = OPTION_COUNT_OF_TABLE + GROUP_COUNT + COMMANDS_BY_NAME + RULE_COUNT + 1 };
    const char *names[TOPICS], *name = topic + strspn(topic, "-");
    int count = 0, found = 0;
    for (int i = 0; i < COMMANDS_BY_NAME; i++) { names[count++] = command_names[i]; }
    for (int i = 0; i < GROUP_COUNT; i++) { names[count++] = option_groups[i].name; }
    for (int i = 0; i < RULE_COUNT; i++) { names[count++] = RULES[i].rule->name; }
    for (EACH_OPTION(each)) { names[count++] = each->name; }
    names[count++] = "all";
    while (found < count && strcmp(names[found], name) != 0) { found++; }
    int group = found - COMMANDS_BY_NAME, rule = group - GROUP_COUNT, option = rule - RULE_COUNT;
    if (topic[0] == '\0') {
        options_print_overview(file);
    } else if (found == count) {
        char excerpt[64], hint[NAME_HINT];
        return error_set(error, "no help on %s%s; train_gpt help lists the topics",
                         text_excerpt(topic, excerpt), name_hint(name, names, count, hint));
    } else if (option == OPTION_COUNT_OF_TABLE) {
        options_print_usage(file);
        for (int i = 0; i < GROUP_COUNT; i++) { option_group_print_help(file, i); }
    } else if (option >= 0) {
        option_print_help(file, &option_table[option]);
    } else if (rule >= 0) {
        option_print_help(file, option_of(offsetof(Options, rule)));
        const char *heading = "\nOptions of %s that not every rule has\n";
        for (EACH_OPTION(each)) {
            if (!option_list_names(each->rules, name)) { continue; }
            fprintf(file, heading, name);
            heading = "";
            option_print_help(file, each);
        }
    } else if (group >= 0) {
        option_group_print_help(file, group);
    } else {
        command_print_help(file, (OptionsCommand)found);
    }
    return true;
}

static inline void options_print_cell(FILE *file, const char *text) {
    for (; *text != '\0'; text++) { fprintf(file, *text == '|' ? "\\%c" : "%c", *text); }
}

// The same as tables of GitHub's Markdown, one per group, for docs/options.md.
static inline void options_print_markdown(FILE *file) {
    char text[OPTION_VALUE_SIZE];
    for (int group = 0; group < GROUP_COUNT; group++) {
        fprintf(file, "%s### %s\n\n| option | default | allowed | effect |\n|---|---|---|---|\n",
                group == 0 ? "" : "\n", option_groups[group].title);
        for (EACH_OPTION(option)) {
            if ((int)option->group != group) { continue; }
            bool is_choice = option->type == OPTION_CHOICE || option->type == OPTION_SWITCH;
            fprintf(file, "| `--%s%s", option->name, is_choice ? "" : " ");
            options_print_cell(file, is_choice ? "" : option_metavariable(option, text));
            fprintf(file, "` | %s | ", option->default_text);
            options_print_cell(file, option_allowed(option, text));
            fputs(" | ", file);
            if (option->rules != NULL) { fprintf(file, "Only for %s. ", option->rules); }
            options_print_cell(file, option->help);
            fputs(" |\n", file);
        }
    }
}
