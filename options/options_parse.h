// options_parse.h: from text and JSON to Options, and back.
//
// The command line is --name value or --name=value; a value that begins with -- needs the second
// form. A leading word is the command. The line wins over the file of --config, and both win over
// what a resumed run was started with.
//
// A configuration is a JSON object of option names and values; null: not given. Each run saves its
// own as OUT/config.json, for all commands; the log and checkpoints hold the same object.
//
// Nothing is changed or ignored silently: what cannot be taken is refused in one sentence, which
// says what is allowed and the nearest valid name.
#pragma once

#include "options/options.h"
#include "runtime/files.h"
#include "runtime/json_files.h"

// ---- A value from text ----------------------------------------------------------------

// For readers, too: only option_set writes to it.
static inline void *option_field(const OptionSpec *option, const Options *options) {
    return (char *)(size_t)options + option->offset;
}

// The choices, such as "fp32, bf16 or int8", in `text`.
static inline const char *option_join_choices(const OptionSpec *option, const char *comma, const char *last,
                                              char text[OPTION_VALUE_SIZE]) {
    text[0] = '\0';
    for (int i = 0; option->choices[i] != NULL; i++) {
        const char *separator = option->choices[i + 1] == NULL ? last : comma;
        text_join(text, OPTION_VALUE_SIZE, separator, "%s", option->choices[i]);
    }
    return text;
}

// "auto or 1 .. 4096", "end, or 1 or more", "fp32, bf16 or int8", "on or off", "text".
static inline const char *option_allowed(const OptionSpec *option, char text[OPTION_VALUE_SIZE]) {
    bool no_limit = option->maximum == OPTION_NO_LIMIT;
    if (option->type == OPTION_SWITCH) { return "on or off"; }
    if (option->type == OPTION_TEXT) { return "text"; }
    if (option->type == OPTION_CHOICE) { return option_join_choices(option, ", ", " or ", text); }
    snprintf(text, OPTION_VALUE_SIZE, "%s", option->word == NULL ? "" : option->word);
    text_join(text, OPTION_VALUE_SIZE, no_limit ? ", or " : " or ",
              no_limit ? "%.15g or more" : "%.15g .. %.15g", option->minimum, option->maximum);
    return text;
}

// The sentence for a value that cannot be taken: what was written, why not, what may be.
static inline bool option_refuse(const OptionSpec *option, const char *written, const char *why,
                                 Error *error) {
    char allowed[OPTION_VALUE_SIZE], excerpt[64];
    return error_set(error, "--%s: %s %s; allowed: %s%s", option->name, text_excerpt(written, excerpt), why,
                     option_allowed(option, allowed),
                     option->type == OPTION_COUNT ? "; k, M or G may follow, as in 80G" : "");
}

// A decimal number and nothing else, no nan or inf. `end` receives what follows it.
static inline bool option_read_real(const char *text, double *value, const char **end) {
    size_t length = strspn(text, "0123456789+-.eE");
    char *stop;
    errno = 0;
    *value = strtod(text, &stop);
    *end = stop;
    return length > 0 && stop != text && stop <= text + length && errno == 0;
}

// A number of the given type; integers are whole, counts also 1500k, 1.5M, 2G and 1e6, as long
// as the result is whole. errno tells ERANGE from bad syntax.
static inline bool option_read_number(OptionType type, const char *text, double *value) {
    static const char suffixes[] = "kKMG";
    static const double factors[] = {1e3, 1e3, 1e6, 1e9};
    const char *end;
    if (type == OPTION_INTEGER) {
        char *stop;
        errno = 0;
        *value = (double)strtoll(text, &stop, 10);
        return !isspace((unsigned char)*text) && stop != text && *stop == '\0' && errno == 0;
    }
    if (!option_read_real(text, value, &end)) { return false; }
    const char *suffix = type == OPTION_COUNT && *end != '\0' ? strchr(suffixes, *end) : NULL;
    if (suffix != NULL) {
        *value *= factors[suffix - suffixes];
        end++;
    }
    if (*end != '\0' || type == OPTION_REAL) { return *end == '\0'; }
    double real = *value; // 1.001M is not exact in binary, hence the tolerance
    *value = nearbyint(real);
    if (!(fabs(*value) <= OPTION_NO_LIMIT)) { errno = ERANGE; }
    return fabs(real - *value) <= 1e-9 * fabs(real) && errno == 0;
}

static inline bool option_set_number(const OptionSpec *option, Options *options, const char *text,
                                     Error *error) {
    bool is_real = option->type == OPTION_REAL;
    double value = option->word_value;
    if (option->word == NULL || strcmp(text, option->word) != 0) {
        bool valid = option_read_number(option->type, text, &value);
        // 0 says the same as off, none, end and other such words. A user who writes
        // --threads 0 may well mean something else than auto.
        bool zero = value == 0 && option->word != NULL && option->word_value == 0 &&
                    !option_list_names("auto, all, half, round, unknown, unset", option->word);
        bool in_range = (value >= option->minimum && value <= option->maximum) || zero;
        if (!valid && errno != ERANGE) {
            return option_refuse(option, text, is_real ? "is not a number" : "is not a whole number", error);
        }
        bool too_large = option->maximum == OPTION_NO_LIMIT && (!valid || value > option->maximum);
        if (too_large && text[0] != '-') {
            return option_refuse(option, text, "is out of range, the largest is 9007199254740992", error);
        }
        if (!valid || !in_range) { return option_refuse(option, text, "is out of range", error); }
    }
    if (is_real) {
        *(double *)option_field(option, options) = value == 0 ? 0 : value; // no negative zero
    } else {
        *(int64_t *)option_field(option, options) = (int64_t)value;
    }
    return true;
}

static inline bool option_set_text(const OptionSpec *option, Options *options, const char *text,
                                   Error *error) {
    size_t length = strlen(text);
    if (length >= sizeof(OptionText)) {
        const OptionSpec *file = option_table; // that is given in its place
        while (file < option_end && !(option_relates(file, OPTION_INSTEAD_OF, option) &&
                                      file->type == OPTION_TEXT && strcmp(file->metavariable, "FILE") == 0)) {
            file++;
        }
        return error_set(error, "--%s: the text is longer than %zu bytes%s%s%s", option->name,
                         sizeof(OptionText) - 1, file < option_end ? "; a file of --" : "",
                         file < option_end ? file->name : "", file < option_end ? " may have more" : "");
    }
    if ((double)length < option->minimum) {
        return error_set(error, "--%s needs a value: %s", option->name, option->metavariable);
    }
    json_t *as_json = json_string(text);
    if (as_json == NULL) { return error_set(error, "--%s: the text is not valid UTF-8", option->name); }
    json_decref(as_json);
    memset(option_field(option, options), 0, sizeof(OptionText)); // so that equal options are equal bytes
    memcpy(option_field(option, options), text, length);
    return true;
}

// Sets one field from text. The error names the option but not where the text came from.
static inline bool option_set(const OptionSpec *option, Options *options, const char *text, Error *error) {
    if (option->type == OPTION_TEXT) { return option_set_text(option, options, text, error); }
    if (option->type == OPTION_SWITCH) {
        bool on = strcmp(text, "on") == 0, off = strcmp(text, "off") == 0;
        *(bool *)option_field(option, options) = on;
        return on || off || option_refuse(option, text, "is neither on nor off", error);
    }
    if (option->type != OPTION_CHOICE) { return option_set_number(option, options, text, error); }
    int count = 0;
    for (; option->choices[count] != NULL; count++) {
        if (strcmp(option->choices[count], text) != 0) { continue; }
        *(OptionChoice *)option_field(option, options) = count;
        return true;
    }
    char why[NAME_HINT + 16], hint[NAME_HINT];
    const char *const *meant = option->meant;
    while (*meant != NULL && strcmp(*meant, text) != 0) { meant += 2; }
    name_hint(*meant != NULL ? meant[1] : text, option->choices, count, hint);
    snprintf(why, sizeof why, "is unknown%s", hint);
    return option_refuse(option, text, why, error);
}

static inline void option_set_default(const OptionSpec *option, Options *options) {
    Error error;
    bool is_config = option->offset == offsetof(Options, config); // which cannot be empty, but absent
    bool valid = is_config || option_set(option, options, option->default_text, &error);
    assert(valid && "a default is outside its own range");
    (void)valid;
}

static inline void options_defaults(Options *options) {
    memset(options, 0, sizeof *options);
    options->command = COMMAND_TRAIN;
    for (EACH_OPTION(option)) { option_set_default(option, options); }
}

// ---- A value as text ------------------------------------------------------------------

// The shortest decimal that reads back as the same double; 300 and not 3e+02.
static inline const char *option_print_real(double value, char text[OPTION_VALUE_SIZE]) {
    bool exact = value == nearbyint(value) && fabs(value) < 1e15;
    snprintf(text, OPTION_VALUE_SIZE, "%.0f", value);
    for (int digits = 1; !exact && digits <= 17; digits++) {
        snprintf(text, OPTION_VALUE_SIZE, "%.*g", digits, value);
        exact = strtod(text, NULL) == value;
    }
    return text;
}

// Whether the value is the one that the word stands for; only numbers have words.
static inline bool option_has_word_value(const OptionSpec *option, const Options *options) {
    if (option->word == NULL || option->type == OPTION_CHOICE) { return false; }
    const void *field = option_field(option, options);
    return (option->type == OPTION_REAL ? *(const double *)field : (double)*(const int64_t *)field) ==
           option->word_value;
}

// The value as option_set reads it: of a number in `text`, of a text the field itself.
static inline const char *option_print_value(const OptionSpec *option, const Options *options,
                                             char text[OPTION_VALUE_SIZE]) {
    const void *field = option_field(option, options);
    if (option->type == OPTION_TEXT) { return (const char *)field; }
    if (option->type == OPTION_SWITCH) { return *(const bool *)field ? "on" : "off"; }
    if (option->type == OPTION_CHOICE) { return option->choices[*(const OptionChoice *)field]; }
    if (option_has_word_value(option, options)) { return option->word; }
    if (option->type == OPTION_REAL) { return option_print_real(*(const double *)field, text); }
    snprintf(text, OPTION_VALUE_SIZE, "%lld", (long long)*(const int64_t *)field);
    return text;
}

static inline bool option_has_value(const OptionSpec *option, const Options *options, const char *value) {
    char text[OPTION_VALUE_SIZE];
    return strcmp(option_print_value(option, options, text), value) == 0;
}

static inline bool option_is_same(const OptionSpec *option, const Options *a, const Options *b) {
    char text[OPTION_VALUE_SIZE];
    return option_has_value(option, a, option_print_value(option, b, text));
}
static inline bool options_are_same(const Options *a, const Options *b) {
    const OptionSpec *option = option_table;
    while (option < option_end && option_is_same(option, a, b)) { option++; }
    return option == option_end;
}

// The first need or exclusion of the option that is violated now; NULL: none is.
static inline const OptionRelation *option_clash(const OptionSpec *option, OptionRelationKind kind,
                                                 const Options *options) {
    for (const OptionRelation *relation = option->relations; relation->kind != 0; relation++) {
        const OptionSpec *other = option_of(relation->other);
        bool holds = relation->own == NULL || option_has_value(option, options, relation->own);
        const char *value = kind == OPTION_NEEDS ? other->default_text : relation->value;
        if (relation->kind == kind && holds && option_has_value(other, options, value)) { return relation; }
    }
    return NULL;
}

// The value that leaves the option to the program; NULL: there is none.
static inline const char *option_open(const OptionSpec *option) {
    return option->measured != NULL ? option->measured : option->word;
}
static inline bool option_is_open(const OptionSpec *option, const Options *options) {
    return option_open(option) != NULL && option_has_value(option, options, option_open(option));
}

// The option whose value is `field` of `options`.
static inline const OptionSpec *option_at(const Options *options, const void *field) {
    return option_of((size_t)((const char *)field - (const char *)options));
}

// Whether the option at `field` is left to the program, which then chooses: it is noted.
static inline bool options_leave(Options *options, const void *field) {
    const OptionSpec *option = option_at(options, field);
    bool left = option_is_open(option, options);
    options->chosen[option - option_table] |= left;
    return left;
}

// Whether the program has chosen the option at `field`.
static inline bool options_chose(const Options *options, const void *field) {
    return options->chosen[option_at(options, field) - option_table];
}

// The word of a choice: options_choice_name(options, &options->wire).
static inline const char *options_choice_name(const Options *options, const OptionChoice *field) {
    return option_at(options, field)->choices[*field];
}

// ---- A configuration as JSON ----------------------------------------------------------

// Every option by its name, as one object; words such as "auto" are strings. null: the
// option counts for nothing, because another takes its place, or because it is --config.
// The values that the program has chosen stand once more under "chosen".
static inline json_t *options_as_json(const Options *options) {
    json_t *object = json_object(), *chosen = json_object();
    char text[OPTION_VALUE_SIZE];
    Options defaults;
    options_defaults(&defaults);
    for (EACH_OPTION(option)) {
        const void *field = option_field(option, options);
        bool is_text = option->type == OPTION_TEXT || option->type == OPTION_CHOICE ||
                       option_has_word_value(option, options);
        json_t *value = option->type == OPTION_SWITCH ? json_boolean(*(const bool *)field)
                        : is_text                     ? json_string(option_print_value(option, options, text))
                        : option->type == OPTION_REAL ? json_real(*(const double *)field)
                                                      : json_integer((json_int_t) * (const int64_t *)field);
        json_object_set_new(object, option->name, value);
    }
    json_object_set_new(object, option_of(offsetof(Options, config))->name, json_null());
    for (EACH_OPTION(option)) {
        for (const OptionRelation *relation = option->relations; relation->kind != 0; relation++) {
            bool replaces =
                relation->kind == OPTION_INSTEAD_OF && !option_is_same(option, options, &defaults);
            if (replaces) { json_object_set_new(object, option_of(relation->other)->name, json_null()); }
        }
    }
    for (EACH_OPTION(option)) {
        json_t *value = json_object_get(object, option->name);
        bool is_chosen = options->chosen[option - option_table] && !json_is_null(value);
        if (is_chosen) { json_object_set(chosen, option->name, value); }
    }
    if (options->measuring_ranks > 0) {
        json_object_set_new(chosen, "measuring_ranks", json_integer(options->measuring_ranks));
    }
    json_object_set_new(object, "chosen", chosen);
    return object;
}

// Sets one field from a JSON value: a string is read as on the command line.
static inline bool option_set_json(const OptionSpec *option, Options *options, const json_t *value,
                                   Error *error) {
    char number[OPTION_VALUE_SIZE];
    const char *text = json_is_number(value) ? number : json_string_value(value);
    if (json_is_boolean(value) && option->type == OPTION_SWITCH) {
        text = json_is_true(value) ? "on" : "off";
    }
    if (json_is_real(value)) { option_print_real(json_real_value(value), number); }
    if (json_is_integer(value)) {
        snprintf(number, sizeof number, "%lld", (long long)json_integer_value(value));
    }
    if (text != NULL) { return option_set(option, options, text, error); }
    char *written = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
    option_refuse(option, written == NULL ? "it" : written, "is no value of an option", error);
    free(written);
    return false;
}

// Where the value of an option is from: of two the later one wins.
typedef enum OptionSource { FROM_DEFAULT, FROM_RUN, FROM_FILE, FROM_LINE } OptionSource;
typedef OptionSource OptionSources[OPTION_COUNT_OF_TABLE];

// No option has this name. `dashes`: "--" on the command line, "" in a file.
static inline bool option_unknown(const char *written, const char *dashes, Error *error) {
    const char *names[OPTION_COUNT_OF_TABLE + 2], *nearest = NULL;
    char excerpt[64], name[64], hint[128] = "";
    snprintf(name, sizeof name, "%s", written + strspn(written, "-"));
    for (char *c = name; *c != '\0'; c++) { *c = *c == '_' ? '-' : *c; } // as Python's programs take them
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
        names[i] = option_table[i].name;
        if (option_list_names(option_table[i].also, name)) { nearest = names[i]; }
    }
    names[OPTION_COUNT_OF_TABLE] = "help";
    names[OPTION_COUNT_OF_TABLE + 1] = "version";
    int count = OPTION_COUNT_OF_TABLE + (*dashes != '\0' ? 2 : 0);
    if (nearest == NULL) { nearest = nearest_name(name, names, count); }
    if (nearest != NULL) { snprintf(hint, sizeof hint, ": did you mean %s%s?", dashes, nearest); }
    return error_set(error, "unknown option %s%s (--help lists all)", text_excerpt(written, excerpt), hint);
}

// Sets what the file has, and notes that in `has`. The file is a configuration, or the manifest
// of a checkpoint, which has one as "options". What its run chose is noted as chosen, unless
// somebody has changed the value since.
static inline bool options_read_file(const char *path, Options *options, bool has[OPTION_COUNT_OF_TABLE],
                                     Error *error) {
    json_error_t problem;
    json_t *value;
    const char *name;
    Error inner = {""};
    errno = 0;
    json_t *root = json_file_load(path, JSON_REJECT_DUPLICATES, &problem);
    if (root == NULL && errno != 0) {
        error_set(error, "--config: cannot read %.300s: %s", path, strerror(errno));
    } else if (!json_is_object(root)) {
        error_set(error, "%.300s:%d: %.160s; a configuration is a JSON object, as the config.json of a run",
                  path, root == NULL ? problem.line : 1, root == NULL ? problem.text : "no object");
    }
    bool valid = json_is_object(root);
    json_t *manifest = json_object_get(root, "options"), *object = json_is_object(manifest) ? manifest : root,
           *chosen = json_object_get(object, "chosen");
    options->measuring_ranks = json_integer_value(json_object_get(chosen, "measuring_ranks"));
    json_object_foreach(object, name, value) {
        const OptionSpec *option = option_find(name);
        if (!valid || value == chosen || (json_is_null(value) && option != NULL)) { continue; }
        if (option == NULL) {
            valid = option_unknown(name, "", &inner);
        } else if (option->offset == offsetof(Options, config)) {
            valid = error_set(&inner, "a configuration file cannot name another one");
        } else {
            valid = option_set_json(option, options, value, &inner);
            has[option - option_table] = true;
            options->chosen[option - option_table] = json_equal(json_object_get(chosen, name), value);
        }
    }
    if (error_is_set(&inner)) { error_set(error, "%.300s: %.700s", path, inner.text); }
    json_decref(root);
    return valid;
}

// Writes every option, and which of them the program chose: so the file repeats the run, is a
// template for another model, and a resumed run keeps what was chosen.
static inline bool options_save_file(const Options *options, const char *path, Error *error) {
    FILE *file = file_replace_begin(path, error);
    if (file == NULL) { return false; }
    json_t *object = options_as_json(options);
    char *text = NULL;
    bool exact = false;
    for (size_t digits = 15; !exact && digits <= 17; digits++) { // 0.7, and not 0.69999999999999996
        free(text);
        text = json_dumps(object, JSON_INDENT(1) | JSON_REAL_PRECISION(digits));
        json_t *again = text == NULL ? NULL : json_loads(text, 0, NULL);
        exact = json_equal(object, again);
        json_decref(again);
    }
    bool written = exact && fprintf(file, "%s\n", text) > 0;
    free(text);
    json_decref(object);
    return file_replace_end(file, path, written, error);
}

// ---- The command line -----------------------------------------------------------------

// Reads the option at argv[*position] and moves behind it. `value` points into argv.
static inline bool options_next(int argc, char **argv, int *position, const OptionSpec **option,
                                const char **value, Error *error) {
    const char *word = argv[(*position)++];
    char name[64], excerpt[64];
    if (word[0] != '-') { // a second file is most often the work of the shell
        return error_set(error,
                         "unexpected word %s: options are written --name value, patterns of files in quotes",
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
        bool text = (*option)->type == OPTION_TEXT;
        char allowed[OPTION_VALUE_SIZE];
        return error_set(error, "%s needs a value: %s", name,
                         text ? (*option)->metavariable : option_allowed(*option, allowed));
    }
    return true;
}

enum { COMMANDS_BY_NAME = COMMAND_HELP + 1 };
static const char *const command_names[COMMANDS_BY_NAME] = {"train",    "sample",  "eval",   "plan",
                                                            "tokenize", "average", "export", "help"};

// Reads the command, behind help its topic, and options without a value; sets *position
// to the first option. -h asks for the overview, --help for all or a command's use.
static inline bool options_parse_command(int argc, char **argv, Options *options, int *position,
                                         Error *error) {
    char excerpt[64], hint[NAME_HINT], all[96] = "";
    int found = COMMAND_TRAIN;
    *position = 1;
    if (argc > 1 && argv[1][0] != '-') {
        for (found = 0; found < COMMANDS_BY_NAME && strcmp(argv[1], command_names[found]) != 0; found++) {
            text_join(all, sizeof all, ", ", "%s", command_names[found]);
        }
        if (found == COMMANDS_BY_NAME) {
            return error_set(error, "unknown command %s%s; commands: %s", text_excerpt(argv[1], excerpt),
                             name_hint(argv[1], command_names, COMMANDS_BY_NAME, hint), all);
        }
        *position = 2;
    }
    options->command = (OptionsCommand)found;
    if (found == COMMAND_HELP && argc > 2) {
        if (argc > 3) { return error_set(error, "help takes one topic, as in train_gpt help lr"); }
        if (strcmp(argv[2], "markdown") == 0) { options->command = COMMAND_HELP_MARKDOWN; }
        snprintf(options->topic, sizeof options->topic, "%s", argv[2]);
        *position = argc;
    }
    for (int i = *position; i < argc; i++) {
        bool overview = i == *position && strcmp(argv[i], "-h") == 0, help = strcmp(argv[i], "--help") == 0;
        const char *topic = found != COMMAND_TRAIN ? command_names[found] : overview ? "" : "all";
        if (overview || help) {
            options->command = COMMAND_HELP;
            snprintf(options->topic, sizeof options->topic, "%s", topic);
        }
        if (strcmp(argv[i], "--version") == 0 && options->command != COMMAND_HELP) {
            options->command = COMMAND_VERSION;
        }
    }
    return true;
}

// Where one option takes the place of another, the one from the later source counts, and the
// other goes back to its default. Two from the same source are refused.
static inline bool options_settle_rivals(Options *options, OptionSources sources, Error *error) {
    Options defaults;
    options_defaults(&defaults);
    for (EACH_OPTION(one)) {
        for (const OptionRelation *relation = one->relations; relation->kind != 0; relation++) {
            const OptionSpec *other = option_of(relation->other);
            OptionSource *mine = &sources[one - option_table], *its = &sources[other - option_table];
            bool rivals = relation->kind == OPTION_INSTEAD_OF && *its != FROM_DEFAULT &&
                          !option_is_same(one, options, &defaults) && !option_has_value(other, options, "") &&
                          !option_has_value(other, options, "unset");
            if (!rivals) { continue; }
            if (*mine == *its) {
                return error_set(error, "--%s and --%s: one takes the place of the other; choose one",
                                 one->name, other->name);
            }
            option_set_default(*mine > *its ? other : one, options);
            *(*mine > *its ? its : mine) = FROM_DEFAULT;
        }
    }
    return true;
}

// ---- A run that is resumed ------------------------------------------------------------

// The file with the options of the run that --resume or --like names; empty: there is none.
// --resume may name the run, its folder of checkpoints, or one of these, which has a copy.
static inline void options_find_kept(const Options *options, OptionText path) {
    static const char *const files[] = {"checkpoint.json", "config.json", "../config.json"};
    bool is_auto = strcmp(options->resume, "auto") == 0, plans = options->command == COMMAND_PLAN;
    const char *named = plans ? options->like : is_auto ? options->out : options->resume;
    char file[PATH_MAX];
    path[0] = '\0';
    for (int i = 0; i < 3 && path[0] == '\0'; i++) {
        bool is_meant = i == 1 || (!is_auto && !plans && (i == 0 || directory_has(named, "commit-")));
        // The config.json of a model, or of adapters, is no configuration.
        is_meant = is_meant && !directory_has(named, "model.safetensors") &&
                   !directory_has(named, "adapter_config.json");
        snprintf(file, sizeof file, "%s/%s", named, files[i]);
        if (is_meant && strlen(file) < sizeof(OptionText) && access(file, R_OK) == 0) { strcpy(path, file); }
    }
}

// Takes from a configuration what is not given. FROM_FILE: from a template of --config, which
// leaves to the program what its run chose, but for measurements. FROM_RUN: from the resumed run,
// or that of --like, but no options of one run or of other rules; with --config only what it chose
// and what is left to the program now. A plan names commands of other runs, which choose anew.
static inline bool options_take(const char *path, OptionSource source, Options *options,
                                OptionSources sources, Error *error) {
    Options saved;
    bool has[OPTION_COUNT_OF_TABLE] = {false}, again = source == FROM_RUN;
    char text[OPTION_VALUE_SIZE];
    options_defaults(&saved);
    if (!options_read_file(path, &saved, has, error)) { return false; }
    options->measuring_ranks = again ? saved.measuring_ranks : 0;
    for (int i = 0; i < 2 * OPTION_COUNT_OF_TABLE; i++) { // what depends on other options comes later
        int index = i % OPTION_COUNT_OF_TABLE;
        const OptionSpec *option = &option_table[index];
        bool depends = option->rules != NULL || option_relates(option, OPTION_FOLLOWS, NULL);
        bool anew = (!again || options->command == COMMAND_PLAN) && option->measured == NULL;
        bool is_free = !again || (!option->of_one_run && options->config[0] == '\0');
        bool fits = !again || option_is_of_rule(option, options_rule(options));
        for (const OptionRelation *relation = option->relations; relation->kind != 0; relation++) {
            anew = anew || (again && relation->kind == OPTION_FOLLOWS &&
                            !option_is_same(option_of(relation->other), options, &saved));
        }
        bool is_kept = again && saved.chosen[index] && option_is_open(option, options);
        bool is_taken = (is_free && sources[index] == FROM_DEFAULT) || is_kept;
        if (!has[index] || depends != (i >= OPTION_COUNT_OF_TABLE) || !fits || !is_taken) { continue; }
        sources[index] = source;
        anew = anew && saved.chosen[index];
        options->chosen[index] = again && saved.chosen[index] && !anew;
        const char *value = anew ? option_open(option) : option_print_value(option, &saved, text);
        if (!option_set(option, options, value, error)) { return false; }
    }
    return true;
}

// Leaves to a measurement anew what follows from batches and links, where other ranks measured it.
static inline void options_measure_anew(Options *options, int ranks) {
    Error none;
    for (EACH_OPTION(option)) {
        bool *chosen = &options->chosen[option - option_table];
        if (*chosen && option_relates(option, OPTION_FOLLOWS, NULL) && option->measured != NULL &&
            options->measuring_ranks != ranks) {
            *chosen = !option_set(option, options, option->measured, &none);
        }
    }
}

// Goes on as the run that is resumed, or plans as the run of --like.
static inline bool options_resume(Options *options, OptionSources sources, Error *error) {
    bool plans = options->command == COMMAND_PLAN && options->like[0] != '\0';
    bool resumes = plans || (options->command == COMMAND_TRAIN && strcmp(options->resume, "off") != 0);
    if (!resumes) { return true; }
    options_find_kept(options, options->kept);
    if (options->kept[0] == '\0') {
        // A run with checkpoints whose options nobody has would go on at the defaults.
        char checkpoints[PATH_MAX];
        snprintf(checkpoints, sizeof checkpoints, "%.3000s/checkpoints", options->out);
        return options->config[0] != '\0' || strcmp(options->resume, "auto") != 0 ||
               !directory_has(checkpoints, "commit-") ||
               error_set(error,
                         "--resume auto: %.300s has checkpoints, but no config.json with the options of its "
                         "run: give one with --config, or resume a checkpoint, which has a copy: --resume "
                         "%.300s/checkpoints/commit-N",
                         options->out, options->out);
    }
    bool has_taken = false;
    if (!options_take(options->kept, FROM_RUN, options, sources, error)) { return false; }
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) { // what the command line has made senseless
        const OptionSpec *option = &option_table[i];
        bool fits = option_clash(option, OPTION_NEEDS, options) == NULL &&
                    option_clash(option, OPTION_EXCLUDES, options) == NULL;
        has_taken |= sources[i] == FROM_RUN;
        if (sources[i] != FROM_RUN || fits) { continue; }
        option_set_default(option, options);
        sources[i] = FROM_DEFAULT;
    }
    if (!has_taken) { options->kept[0] = '\0'; }
    return true;
}

// The command line, then the file of --config, then what a resumed run keeps, then defaults.
// --help and --version count whatever else is there. options_check is to follow.
static inline bool options_parse(int argc, char **argv, Options *options, Error *error) {
    OptionSources sources = {FROM_DEFAULT};
    const char *given[OPTION_COUNT_OF_TABLE] = {NULL}, *value = NULL; // given: on the command line
    const OptionSpec *option = NULL;
    char users[96] = "";
    int position;
    options_defaults(options);
    if (!options_parse_command(argc, argv, options, &position, error)) { return false; }
    if (options->command >= COMMAND_HELP) { return true; }
    while (position < argc) { // names first: before a file is read
        if (!options_next(argc, argv, &position, &option, &value, error)) { return false; }
        if (given[option - option_table] != NULL) {
            return error_set(error, "--%s is given twice", option->name);
        }
        if (!option_is_of_command(option, options->command)) {
            for (int user = COMMAND_TRAIN; user < COMMAND_HELP; user++) {
                bool uses = option_is_of_command(option, (OptionsCommand)user);
                if (uses) { text_join(users, sizeof users, " and ", "%s", command_names[user]); }
            }
            return error_set(error, "--%s has no effect on train_gpt %s: it is for %s", option->name,
                             command_names[options->command], users);
        }
        given[option - option_table] = value;
    }
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
        if (given[i] == NULL) { continue; }
        sources[i] = FROM_LINE;
        if (!option_set(&option_table[i], options, given[i], error)) { return false; }
    }
    if (options->config[0] != '\0' && !options_take(options->config, FROM_FILE, options, sources, error)) {
        return false;
    }
    if (!options_resume(options, sources, error)) { return false; }
    // A constant rate would not fall; and one that falls may have a --min-lr.
    if (options->decay_now > 0 && options->schedule == SCHEDULE_CONSTANT) {
        options->schedule = SCHEDULE_WSD;
    }
    return options_settle_rivals(options, sources, error);
}
