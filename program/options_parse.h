// options_parse.h: the command line: argv to Options.
//
// --name value or --name=value; a value that begins with -- needs the second form. A
// leading word is the command. The command line wins over the file of --config, wherever
// --config stands. An unknown name, a bad value or an option given twice is refused.
#ifndef ACCO_PROGRAM_OPTIONS_PARSE_H
#define ACCO_PROGRAM_OPTIONS_PARSE_H

#include "program/options_file.h"

// Reads the option at argv[*position] and moves behind it. `value` points into argv.
static inline bool options_next(int argc, char **argv, int *position, const OptionSpec **option,
                                const char **value, Error *error) {
    const char *word = argv[(*position)++];
    char name[64], excerpt[64];
    if (word[0] != '-') {
        return error_set(error, "unexpected word %s: options are written --name value (--help)",
                         text_excerpt(word, excerpt));
    }
    const char *equals = strchr(word, '=');
    size_t length = equals == NULL ? strlen(word) : (size_t)(equals - word);
    snprintf(name, sizeof name, "%.*s", length < sizeof name ? (int)length : (int)sizeof name - 1, word);
    *option = strncmp(name, "--", 2) == 0 && length < sizeof name ? option_find(name + 2) : NULL;
    if (*option == NULL) { return option_unknown(name, "--", error); }
    if (equals != NULL) {
        *value = equals + 1;
    } else if (*position < argc && strncmp(argv[*position], "--", 2) != 0) {
        *value = argv[(*position)++];
    } else {
        const char *hint = (*option)->type == OPTION_TEXT ? (*option)->metavariable : "VALUE";
        char allowed[OPTION_VALUE_SIZE];
        option_allowed(*option, allowed);
        return error_set(error, "%s needs a value: %s %s%s%s", name, name, hint,
                         allowed[0] != '\0' ? "; allowed: " : "", allowed);
    }
    return true;
}

// Reads a leading command word and the two options without a value; sets *position to the
// first option.
static inline bool options_parse_command(int argc, char **argv, Options *options, int *position,
                                         Error *error) {
    enum { COMMANDS = COMMAND_HELP + 1 };
    static const char *const names[COMMANDS] = {"train", "sample", "eval", "plan", "help"};
    *position = 1;
    if (argc > 1 && argv[1][0] != '-') {
        char excerpt[64];
        int found = 0;
        while (found < COMMANDS && strcmp(argv[1], names[found]) != 0) { found++; }
        if (found == COMMANDS) {
            const char *nearest = nearest_name(argv[1], names, COMMANDS);
            return error_set(error, "unknown command %s%s%s%s commands: train, sample, eval, plan, help",
                             text_excerpt(argv[1], excerpt), nearest == NULL ? "" : ": did you mean ",
                             nearest == NULL ? "" : nearest, nearest == NULL ? ";" : "?");
        }
        options->command = (OptionsCommand)found;
        *position = 2;
        if (options->command == COMMAND_HELP && argc == 3 && strcmp(argv[2], "markdown") == 0) {
            options->command = COMMAND_HELP_MARKDOWN;
        }
    }
    for (int i = *position; i < argc; i++) {
        bool help = strcmp(argv[i], "--help") == 0 || (i == *position && strcmp(argv[i], "-h") == 0);
        if (help) { options->command = COMMAND_HELP; }
        if (strcmp(argv[i], "--version") == 0 && options->command != COMMAND_HELP) {
            options->command = COMMAND_VERSION;
        }
    }
    return true;
}

// Defaults, then the file of --config, then the command line. Who asks for help or the
// version gets it whatever else is on the line. Errors: see the head of this file.
// options_check is the caller's next step.
static inline bool options_parse(int argc, char **argv, Options *options, Error *error) {
    bool given[OPTION_COUNT_OF_TABLE] = {false};
    const OptionSpec *option = NULL;
    const char *value = NULL;
    int start;
    options_defaults(options);
    if (!options_parse_command(argc, argv, options, &start, error)) { return false; }
    if (options->command >= COMMAND_HELP) { return true; }
    for (int position = start; position < argc;) { // names first: before a file is read
        if (!options_next(argc, argv, &position, &option, &value, error)) { return false; }
        if (given[option - option_table]) { return error_set(error, "--%s is given twice", option->name); }
        given[option - option_table] = true;
        if (option->offset == offsetof(Options, config) && !option_set(option, options, value, error)) {
            return false;
        }
    }
    if (options->config[0] != '\0' && !options_read_file(options->config, options, error)) { return false; }
    for (int position = start; position < argc;) {
        if (!options_next(argc, argv, &position, &option, &value, error) ||
            !option_set(option, options, value, error)) {
            return false;
        }
    }
    return true;
}

#endif
