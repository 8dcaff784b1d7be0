// options_parse.h: the command line: argv to Options.
//
// --name value or --name=value; a value that begins with -- needs the second form. A
// leading word is the command. The command line wins over the file of --config, wherever
// --config stands. An unknown name, a bad value or an option given twice is refused.
//
// So is an option that would be ignored: one that its command does not use, and two of
// which one makes the other pointless. In a file the former is allowed, because a saved
// configuration holds every option; and an option on the command line takes the place of
// its rival in the file.
#ifndef ACCO_OPTIONS_OPTIONS_PARSE_H
#define ACCO_OPTIONS_OPTIONS_PARSE_H

#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include "options/options_file.h"

// The word behind a list, such as a second file, is most often the work of the shell.
static inline bool options_refuse_word(const char *word, const char *before, Error *error) {
    char excerpt[64], name[64];
    struct stat status;
    text_excerpt(word, excerpt);
    if (strncmp(before, "--", 2) != 0 || stat(word, &status) != 0 || !S_ISREG(status.st_mode)) {
        return error_set(error, "unexpected word %s: options are written --name value (--help)", excerpt);
    }
    return error_set(error,
                     "unexpected word %s, which is a file: if the shell made it from a pattern, quote that, "
                     "as in %s 'tokens_*.bin'",
                     excerpt, text_excerpt(before, name));
}

// Reads the option at argv[*position] and moves behind it. `value` points into argv.
static inline bool options_next(int argc, char **argv, int *position, const OptionSpec **option,
                                const char **value, Error *error) {
    const char *word = argv[(*position)++];
    char name[64];
    if (word[0] != '-') { return options_refuse_word(word, *position > 2 ? argv[*position - 3] : "", error); }
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

enum { COMMANDS_BY_NAME = COMMAND_HELP + 1 };

static inline const char *const *command_names(void) {
    static const char *const names[COMMANDS_BY_NAME] = {"train", "sample",   "eval",
                                                        "plan",  "tokenize", "help"};
    return names;
}

// A leading command word, and behind help its topic; sets *position behind them.
static inline bool options_parse_word(int argc, char **argv, Options *options, int *position, Error *error) {
    const char *const *names = command_names();
    char excerpt[64];
    int found = 0;
    while (found < COMMANDS_BY_NAME && strcmp(argv[1], names[found]) != 0) { found++; }
    if (found == COMMANDS_BY_NAME) {
        const char *nearest = nearest_name(argv[1], names, COMMANDS_BY_NAME);
        return error_set(error,
                         "unknown command %s%s%s%s commands: train, sample, eval, plan, tokenize, help",
                         text_excerpt(argv[1], excerpt), nearest == NULL ? "" : ": did you mean ",
                         nearest == NULL ? "" : nearest, nearest == NULL ? ";" : "?");
    }
    options->command = (OptionsCommand)found;
    *position = 2;
    if (options->command != COMMAND_HELP || argc == 2) { return true; }
    *position = argc;
    if (argc > 3) {
        return error_set(error, "help takes one topic: train_gpt help %s", text_excerpt(argv[2], excerpt));
    }
    if (strcmp(argv[2], "markdown") == 0) { options->command = COMMAND_HELP_MARKDOWN; }
    snprintf(options->topic, sizeof options->topic, "%s", argv[2]);
    return true;
}

// Reads a leading command word and the options without a value; sets *position to the
// first option. -h asks for the overview, --help for everything, and behind a command for
// its own use.
static inline bool options_parse_command(int argc, char **argv, Options *options, int *position,
                                         Error *error) {
    *position = 1;
    if (argc > 1 && argv[1][0] != '-' && !options_parse_word(argc, argv, options, position, error)) {
        return false;
    }
    OptionsCommand command = options->command;
    for (int i = *position; i < argc; i++) {
        bool overview = i == *position && strcmp(argv[i], "-h") == 0, help = strcmp(argv[i], "--help") == 0;
        if (overview || help) {
            options->command = COMMAND_HELP;
            snprintf(options->topic, sizeof options->topic, "%s",
                     command != COMMAND_TRAIN ? command_names()[command]
                     : overview               ? ""
                                              : "all");
        }
        if (strcmp(argv[i], "--version") == 0 && options->command != COMMAND_HELP) {
            options->command = COMMAND_VERSION;
        }
    }
    return true;
}

// ---------------------------------------------------------------------------------------
// Options that would be ignored

// The options of a command, with commas between; NULL: those that training takes.
static inline const char *options_of_command(OptionsCommand command) {
    static const char sample[] = "from, tokenizer, prompt, sample-tokens, temperature, top-k, seed, threads, "
                                 "config",
                      eval[] = "from, data, task, tokenizer, seq-len, micro-batch, stride, limit, device, "
                               "precision, threads, timeout-s, config",
                      tokenize[] = "tokenizer, out, seq-len, threads";
    return command == COMMAND_SAMPLE     ? sample
           : command == COMMAND_EVAL     ? eval
           : command == COMMAND_TOKENIZE ? tokenize
                                         : NULL;
}

// Refuses an option of the command line that `command` does not use. A plan takes what
// training takes, so that its command line need not be changed.
static inline bool options_check_use(OptionsCommand command, const OptionSpec *option, Error *error) {
    static const char *const names[] = {"training", "train_gpt sample", "train_gpt eval", "train_gpt plan",
                                        "train_gpt tokenize"};
    const char *used = options_of_command(command);
    if (option->group == GROUP_PLAN && command != COMMAND_PLAN) {
        return error_set(error, "--%s has no effect on %s: it is for train_gpt plan", option->name,
                         names[command]);
    }
    if (used == NULL) {
        return option->group != GROUP_EVALUATION ||
               error_set(error, "--%s has no effect on %s: it is for train_gpt eval", option->name,
                         names[command]);
    }
    return option_list_names(used, option->name) ||
           error_set(error, "--%s has no effect on %s, whose options are %s", option->name, names[command],
                     used);
}

// Of the two options a run follows the first.
typedef struct OptionRivals {
    const char *name, *rival, *reason;
} OptionRivals;

static const OptionRivals option_rivals[] = {
    {"from", "model", "the model is that of --from"},
    {"finetune", "model", "the model is that of --finetune"},
    {"from", "finetune", "both name a model to begin with"},
    {"epochs", "tokens", "each is the length of the training"},
    {"rank-accumulate", "accumulate", "the list has a number for each rank"},
};

// Whether the option says anything: an empty text is as good as none, and so is "unset".
static inline bool option_says_something(const OptionSpec *option, const Options *options) {
    if (option->type != OPTION_TEXT) { return !option_is_unset(option, options); }
    return *(const char *)option_field_const(option, options) != '\0';
}

static inline void option_set_default(const OptionSpec *option, Options *options) {
    Error never;
    option_set(option, options, option->default_text, &never);
}

// line, file: the options that the command line and the file of --config have. Of rivals
// the nearer one wins; two in the same place are refused, unless one of a file is at its
// default.
static inline bool options_settle_rivals(Options *options, const bool line[OPTION_COUNT_OF_TABLE],
                                         const bool file[OPTION_COUNT_OF_TABLE], Error *error) {
    Options defaults;
    options_defaults(&defaults);
    for (size_t i = 0; i < sizeof option_rivals / sizeof option_rivals[0]; i++) {
        const OptionSpec *one = option_find(option_rivals[i].name),
                         *other = option_find(option_rivals[i].rival);
        bool near = line[one - option_table], other_near = line[other - option_table];
        if (!option_says_something(one, options) || !option_says_something(other, options)) { continue; }
        if (near && !other_near) { option_set_default(other, options); }
        if (other_near && !near) { option_set_default(one, options); }
        bool in_file = file[one - option_table] && file[other - option_table] &&
                       !option_is_same(one, options, &defaults) && !option_is_same(other, options, &defaults);
        if ((near && other_near) || (!near && !other_near && in_file)) {
            return error_set(error, "--%s and --%s: %s; choose one", one->name, other->name,
                             option_rivals[i].reason);
        }
    }
    return true;
}

// ---------------------------------------------------------------------------------------
// A run that is resumed

// The directory of the run that --resume names by itself, by its folder of checkpoints or by
// one of these; empty: there is none.
static inline void options_resumed_run(const Options *options, char run[PATH_MAX]) {
    bool is_auto = strcmp(options->resume, "auto") == 0, plans = options->command == COMMAND_PLAN;
    if (realpath(plans ? options->like : is_auto ? options->out : options->resume, run) == NULL) {
        run[0] = '\0';
        return;
    }
    for (char *at = run; !is_auto && (at = strstr(at, "/checkpoints")) != NULL;) {
        char *rest = at + strlen("/checkpoints");
        bool is_folder = *rest == '\0', is_in_folder = *rest == '/' && strchr(rest + 1, '/') == NULL;
        if (is_folder || is_in_folder) { *at = '\0'; }
        at = is_folder || is_in_folder ? at : rest;
    }
}

// What determines the result is as in the run that is resumed, unless the command line
// (given) or a file of --config says otherwise: who leaves --data out does not want to train
// on other data. Options of another rule than the one that the run had are left out. With
// --precision fastest the choice that the run has made is taken in any case. kept: the options
// that were taken.
static inline bool options_keep(Options *options, const bool given[OPTION_COUNT_OF_TABLE],
                                bool kept[OPTION_COUNT_OF_TABLE], Error *error) {
    Options before;
    char text[OPTION_VALUE_SIZE], run[PATH_MAX];
    bool plans = options->command == COMMAND_PLAN && options->like[0] != '\0';
    bool resumes = plans || (options->command == COMMAND_TRAIN && strcmp(options->resume, "off") != 0);
    bool saved[OPTION_COUNT_OF_TABLE] = {false};
    bool has_config = options->config[0] != '\0', left_open = options->precision == PRECISION_FASTEST;
    if (!resumes || (has_config && !left_open)) { return true; }
    options_resumed_run(options, run);
    int length = snprintf(options->kept, sizeof options->kept, "%s/config.txt", run);
    if (length >= (int)sizeof options->kept || access(options->kept, R_OK) != 0) { options->kept[0] = '\0'; }
    options_defaults(&before);
    if (options->kept[0] == '\0') { return true; }
    if (!options_read_file(options->kept, &before, saved, error)) { return false; }
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) { // the rule is the first
        const OptionSpec *option = &option_table[i];
        bool ours = option->rules == NULL || option_list_names(option->rules, options_rule(options)->name);
        bool open = left_open && option->offset == offsetof(Options, precision) &&
                    (before.precision == PRECISION_ASK_FP32 || before.precision == PRECISION_ASK_BF16);
        bool elsewhere = !plans && (option->effect == SAME_BITS || option->effect == PLACEMENT);
        if (!saved[i] || !ours || (!open && (given[i] || has_config)) || elsewhere) { continue; }
        kept[i] = true;
        options->precision_kept = options->precision_kept || open;
        const char *value = option_print_value(option, &before, text);
        if (!option_set(option, options, value, error)) { return false; }
    }
    if (has_config) { options->kept[0] = '\0'; } // the file says the rest
    return true;
}

// ---------------------------------------------------------------------------------------

// Defaults, then the file of --config, then the command line. Who asks for help or the
// version gets it whatever else is on the line. Errors: see the head of this file.
// options_check is the caller's next step.
static inline bool options_parse(int argc, char **argv, Options *options, Error *error) {
    bool given[OPTION_COUNT_OF_TABLE] = {false}, in_file[OPTION_COUNT_OF_TABLE] = {false};
    const OptionSpec *option = NULL;
    const char *value = NULL;
    int start;
    options_defaults(options);
    if (!options_parse_command(argc, argv, options, &start, error)) { return false; }
    if (options->command >= COMMAND_HELP) { return true; }
    for (int position = start; position < argc;) { // names first: before a file is read
        if (!options_next(argc, argv, &position, &option, &value, error)) { return false; }
        if (given[option - option_table]) { return error_set(error, "--%s is given twice", option->name); }
        if (!options_check_use(options->command, option, error)) { return false; }
        given[option - option_table] = true;
        if (option->offset == offsetof(Options, config) && !option_set(option, options, value, error)) {
            return false;
        }
    }
    if (options->config[0] != '\0' && !options_read_file(options->config, options, in_file, error)) {
        return false;
    }
    for (int position = start; position < argc;) {
        if (!options_next(argc, argv, &position, &option, &value, error) ||
            !option_set(option, options, value, error)) {
            return false;
        }
    }
    return options_keep(options, given, in_file, error) &&
           options_settle_rivals(options, given, in_file, error);
}

#endif
