// options.h: what a user asked for, and what is known of every option of the program.
//
// Parser, help, documentation, config.json, log and checkpoints all follow options_table.h.
#pragma once

#include "rules.h"

#define ACCO_VERSION "0.2.0"
// Facts about the build, from the Makefile; empty: not given.
#ifndef ACCO_REVISION
#define ACCO_REVISION ""
#endif
#ifndef ACCO_PROCESSOR
#define ACCO_PROCESSOR ""
#endif

// Those from COMMAND_HELP on take no options; help takes a topic.
typedef enum OptionsCommand {
    COMMAND_TRAIN,
    COMMAND_SAMPLE,
    COMMAND_EVAL,
    COMMAND_PLAN,
    COMMAND_TOKENIZE,
    COMMAND_AVERAGE,
    COMMAND_EXPORT,
    COMMAND_HELP,
    COMMAND_HELP_MARKDOWN,
    COMMAND_VERSION
} OptionsCommand;

// A choice is the index of a word in the table. The enums whose values they are have the
// same order: those below, and WireFormat, SpikePolicy, ScheduleKind.
typedef int OptionChoice;

enum { OPTIONS_AT_MOST = 128 }; // in the table

enum DeviceChoice { DEVICE_AUTO, DEVICE_CPU, DEVICE_CUDA };
enum PrecisionChoice { PRECISION_AUTO, PRECISION_ASK_FP32, PRECISION_ASK_BF16, PRECISION_FASTEST };
enum ProductsChoice { PRODUCTS_PLAIN, PRODUCTS_FP8 };
enum RateCounter { RATE_BY_GRADIENTS, RATE_BY_COMMITS };
enum DecayChoice { DECAY_MATRICES, DECAY_ALL };
enum InnerChoice { INNER_AUTO, INNER_ADAMW, INNER_MUON };
enum AttendChoice { ATTEND_ALL, ATTEND_DOCUMENT };
enum ExchangeChoice { EXCHANGE_AUTO, EXCHANGE_FLAT, EXCHANGE_TWO_LEVEL, EXCHANGE_LIBRARY };
enum GpuExchange { GPU_EXCHANGE_AUTO, GPU_EXCHANGE_NCCL, GPU_EXCHANGE_HOST };

typedef enum OptionType {
    OPTION_INTEGER, // int64_t
    OPTION_COUNT,   // int64_t, may be written as 1500k, 1.5M, 2G
    OPTION_REAL,    // double
    OPTION_CHOICE,  // OptionChoice: index of choices[]
    OPTION_SWITCH,  // bool, on or off
    OPTION_TEXT     // OptionText; minimum: its least length
} OptionType;

// Every group once: what `train_gpt help` calls it, and its title.
#define OPTION_GROUPS(GROUP) \
    GROUP(RULE, "rules", "Update rule and exchange") \
    GROUP(SHARED, "together", "Rules in which all ranks make one step together") \
    GROUP(LOCAL, "local", "Rules in which each rank takes steps of its own") \
    GROUP(DATA, "inputs", "Model and data") \
    GROUP(RATE, "rates", "Learning rate and AdamW") \
    GROUP(MACHINE, "machine", "This machine") \
    GROUP(REPORT, "reports", "Reports and files") \
    GROUP(EVALUATION, "scoring", "Evaluation") \
    GROUP(SAMPLE, "samples", "Samples, during and after training or by themselves") \
    GROUP(EMULATION, "trouble", "Emulated trouble") \
    GROUP(PLAN, "planning", "Plans")
#define OPTION_GROUP_NUMBER(group, name, title) GROUP_##group,
#define OPTION_GROUP_ROW(group, name, title) {name, title},

typedef enum OptionGroup { OPTION_GROUPS(OPTION_GROUP_NUMBER) GROUP_COUNT } OptionGroup;

static const struct { const char *name, *title; } option_groups[] = {OPTION_GROUPS(OPTION_GROUP_ROW)};

// Whether a run that is resumed with another value of the option trains the same bits.
typedef enum OptionEffect {
    SAME_BITS,
    OTHER_BITS,
    HELD_OUT,       // other bits only if switched between off and on, which changes the held-out data
    BY_CONTENT,     // a path: what counts is what the files hold (data_loader_identify)
    KEPT_FILES,     // the same bits, but other checkpoints stay on disk
    COMPARED_APART, // the model and the rule, which several options may name
    PLACEMENT       // how ranks lie on machines, which is compared by itself and may change
} OptionEffect;

// Who takes the option. A plan takes what training takes, so that one command line serves
// both; other commands take only their own.
enum {
    FOR_PLANS = 1 << COMMAND_PLAN,
    FOR_TRAINING = 1 << COMMAND_TRAIN | FOR_PLANS,
    FOR_SAMPLES = 1 << COMMAND_SAMPLE,
    FOR_EVALUATION = 1 << COMMAND_EVAL,
    FOR_TOKENS = 1 << COMMAND_TOKENIZE,
    FOR_AVERAGES = 1 << COMMAND_AVERAGE,
    FOR_EXPORTS = 1 << COMMAND_EXPORT
};

enum { OPTION_CHOICES_MAX = 12, OPTION_RELATIONS_MAX = 12, OPTION_VALUE_SIZE = 512 };

// How an option stands to another one.
typedef enum OptionRelationKind {
    OPTION_NEEDS = 1,  // without the other one, at its default, it makes no sense
    OPTION_EXCLUDES,   // with this value of the other one it makes no sense, or no difference
    OPTION_INSTEAD_OF, // where it is set it takes the place of the other one
    OPTION_FOLLOWS     // what the program chooses for it is worked out from the other one
} OptionRelationKind;

typedef struct OptionRelation {
    OptionRelationKind kind;
    size_t other;            // the other option, by its offset in Options
    const char *value, *own; // of the other; of this option, if it holds for that value only
} OptionRelation;

#define RELATION(kind, field, value, own) \
    { OPTION_##kind, offsetof(Options, field), value, own }
#define NEEDS(field) RELATION(NEEDS, field, NULL, NULL)
#define NEEDS_IF(own, field) RELATION(NEEDS, field, NULL, own)
#define EXCLUDES(field, value) RELATION(EXCLUDES, field, value, NULL)
#define EXCLUDES_IF(own, field, value) RELATION(EXCLUDES, field, value, own)
#define INSTEAD_OF(field) RELATION(INSTEAD_OF, field, NULL, NULL)
#define FOLLOWS(field) RELATION(FOLLOWS, field, NULL, NULL)

// Integers stay below 2^53, so that ranges can be doubles. Printed as "or more".
#define OPTION_NO_LIMIT 9007199254740992.0

// Lists of names are written as "one, two or three". An option is "set" if it is not at its
// default. Columns from `word` on may be left out.
typedef struct OptionSpec {
    const char *name;
    OptionGroup group;
    OptionEffect effect;
    OptionType type;
    size_t offset; // in Options
    const char *default_text;
    double minimum, maximum;
    const char *metavariable;                // what help calls the value; NULL: made from the choices
    const char *choices[OPTION_CHOICES_MAX]; // NULL-terminated
    const char *word;                        // stands for word_value, which may lie outside the range
    double word_value;
    int commands;                                   // sum of FOR_...; 0: FOR_TRAINING
    const char *rules;                              // the only rules that it is for
    OptionRelation relations[OPTION_RELATIONS_MAX]; // up to one without a kind
    const char *measured; // the value that stands for what a run measures at its start, and keeps
    bool of_one_run;      // it names files of one run, or its ranks: a run or plan after it lacks it
    const char *also;     // other names that users try; errors answer with this one
    const char *meant[5]; // the same for choices, in pairs: another name, and the choice that it means
    const char *help;     // the effect, and what it costs
} OptionSpec;

// A row of the table as a field of Options. Fields are called as their options, with
// underscores; lr, lr-by and min-lr are spelled out, and --optimizer is called rule.
typedef int64_t OPTION_INTEGER_FIELD, OPTION_COUNT_FIELD;
typedef double OPTION_REAL_FIELD;
typedef OptionChoice OPTION_CHOICE_FIELD;
typedef bool OPTION_SWITCH_FIELD;
typedef OptionText OPTION_TEXT_FIELD;
#define OPTION(name, group, effect, type, field, ...) OPTION_##type##_FIELD field;
#define RULE_OPTION(...)

typedef struct Options {
    OptionsCommand command;
    OptionText topic;  // of help; empty: the overview
    OptionText kept;   // the file from which a resumed run took what was not given; empty: none
    bool branch_again; // --resume auto where a branch, --resume PATH, has not saved itself: resume is PATH
    RuleOptions rules; // options that only some rules have
#include "options/options_table.h"
    // Of each option, by its place in the table: whether the program has chosen its value.
    bool chosen[OPTIONS_AT_MOST];
    int64_t measuring_ranks; // how many ranks have measured what was chosen by that; 0: nothing was
} Options;

#undef OPTION
#undef RULE_OPTION

// A row as an OptionSpec. The offset does not compile where the field is not of that type.
#define OPTION(name_, group_, effect_, type_, field, ...) \
    {.name = name_, \
     .group = GROUP_##group_, \
     .effect = effect_, \
     .type = OPTION_##type_, \
     .offset = \
         offsetof(Options, field) + 0 * sizeof(1 ? (OPTION_##type_##_FIELD *)0 : &((Options *)0)->field), \
     OPTION_##type_##_COLUMNS(__VA_ARGS__)},
#define RULE_OPTION(...) OPTION(__VA_ARGS__)
// default_: as users write it. least, most: of a text a length.
#define OPTION_INTEGER_COLUMNS(default_, least, most, value, ...) \
    .default_text = default_, .minimum = least, .maximum = most, .metavariable = value, __VA_ARGS__
#define OPTION_COUNT_COLUMNS(...) OPTION_INTEGER_COLUMNS(__VA_ARGS__)
#define OPTION_REAL_COLUMNS(...) OPTION_INTEGER_COLUMNS(__VA_ARGS__)
#define OPTION_CHOICE_COLUMNS(default_, ...) .default_text = default_, __VA_ARGS__
#define OPTION_SWITCH_COLUMNS(...) OPTION_CHOICE_COLUMNS(__VA_ARGS__)
#define OPTION_TEXT_COLUMNS(default_, least, value, ...) \
    .default_text = default_, .minimum = least, .metavariable = value, __VA_ARGS__

static const OptionSpec option_table[] = {
#include "options/options_table.h"
};

enum { OPTION_COUNT_OF_TABLE = sizeof option_table / sizeof option_table[0] };
static const OptionSpec *const option_end = option_table + OPTION_COUNT_OF_TABLE;
#define EACH_OPTION(option) \
    const OptionSpec *option = option_table; \
    option < option_end; \
    option++
static_assert((int)OPTION_COUNT_OF_TABLE <= (int)OPTIONS_AT_MOST, "Options::chosen is too short");

// The row of an option's field: option_of(offsetof(Options, model)).
static inline const OptionSpec *option_of(size_t offset) {
    const OptionSpec *option = option_table;
    while (option->offset != offset) { option++; }
    return option;
}

static inline const OptionSpec *option_find(const char *name) {
    for (EACH_OPTION(option)) {
        if (strcmp(option->name, name) == 0) { return option; }
    }
    return NULL;
}

// other: NULL: any.
static inline bool option_relates(const OptionSpec *option, OptionRelationKind kind,
                                  const OptionSpec *other) {
    const OptionRelation *relation = option->relations;
    while (relation->kind != 0 &&
           (relation->kind != kind || (other != NULL && relation->other != other->offset))) {
        relation++;
    }
    return relation->kind != 0;
}

// Whether `name` is a word of a list such as "one, two or three"; never of NULL.
static inline bool option_list_names(const char *list, const char *name) {
    size_t length = strlen(name);
    for (const char *word = list; word != NULL && *word != '\0'; word += strspn(word, ", ")) {
        size_t letters = strcspn(word, ", ");
        if (letters == length && strncmp(word, name, length) == 0) { return true; }
        word += letters;
    }
    return false;
}

static inline bool option_is_of_rule(const OptionSpec *option, const Rule *rule) {
    return option->rules == NULL || option_list_names(option->rules, rule->name);
}

static inline bool option_is_of_command(const OptionSpec *option, OptionsCommand command) {
    return ((option->commands == 0 ? FOR_TRAINING : option->commands) >> command & 1) != 0;
}

static inline const Rule *options_rule(const Options *options) { return RULES[options->rule].rule; }

// The options of the run's rule: what its functions (scheduler/rule.h) are given.
static inline void *options_of_rule(const Options *options) {
    return rule_own_options(options->rule, &options->rules);
}

// The directory of the model that training begins with; empty: random parameters.
static inline const char *options_start(const Options *options) {
    return options->finetune[0] != '\0' ? options->finetune : options->from;
}

static inline const char *options_model(const Options *options) {
    const char *start = options_start(options);
    return start[0] != '\0' ? start : options->model;
}
