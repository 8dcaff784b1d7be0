// options_check.h: options that are valid one by one and contradict each other.
//
// Automatic values are not compared here; a caller that has filled them in may check again.
// options_check_rule and options_check_ranks wait for the model and the ranks.
#pragma once

#include "options/options_parse.h"

// What the table says of options that are not at their defaults. At its default an option
// is accepted with every rule, because a saved configuration holds them all.
static inline bool options_check_columns(const Options *options, Error *error) {
    const Rule *rule = options_rule(options);
    Options defaults;
    options_defaults(&defaults);
    for (EACH_OPTION(option)) {
        if (option_is_same(option, options, &defaults)) { continue; }
        const OptionRelation *lacks = option_clash(option, OPTION_NEEDS, options),
                             *clash = option_clash(option, OPTION_EXCLUDES, options);
        if (!option_is_of_rule(option, rule)) {
            bool empty = option->default_text[0] == '\0';
            return error_set(error, "--%s belongs to --optimizer %s, this run uses %s: leave it %s%s",
                             option->name, option->rules, rule->name, empty ? "empty" : "at ",
                             option->default_text);
        }
        if (lacks != NULL) {
            const OptionSpec *needed = option_of(lacks->other);
            return error_set(error, "--%s needs --%s, whose default, %s, does not fit: see train_gpt help %s",
                             option->name, needed->name, needed->default_text, option->name);
        }
        if (clash != NULL) {
            char value[OPTION_VALUE_SIZE], excerpt[64];
            text_excerpt(option_print_value(option, options, value), excerpt);
            return error_set(error, "--%s %s does not go together with --%s %s: leave one of them away",
                             option->name, excerpt, option_of(clash->other)->name, clash->value);
        }
    }
    return true;
}

enum { RANK_ACCUMULATE_MOST = 1000000 };

// Number `rank` of --rank-accumulate. 0: it is not valid; -1: the list is shorter.
static inline int options_rank_number(const Options *options, int rank) {
    const char *number = options->rank_accumulate;
    char *end;
    for (; rank > 0 && number != NULL; rank--) {
        if ((number = strchr(number, ',')) != NULL) { number++; }
    }
    if (number == NULL || options->rank_accumulate[0] == '\0') { return -1; }
    long long count = isdigit((unsigned char)*number) ? strtoll(number, &end, 10) : 0;
    return count > 0 && count <= RANK_ACCUMULATE_MOST && (*end == ',' || *end == '\0') ? (int)count : 0;
}

// Whether a rank computes for as long as the communication lasts.
static inline bool options_are_adaptive(const Options *options) {
    return options->accumulate == 0 && options->rank_accumulate[0] == '\0';
}

// Every number of micro-batches is valid, and gives each round of a commit one at least.
static inline bool options_check_accumulate(const Options *options, Error *error) {
    const Rule *rule = options_rule(options);
    bool is_list = options->rank_accumulate[0] != '\0';
    int rounds = 1 + rule->further_rounds, count = 1;
    char text[64], overlapped[RULE_TEXT];
    if (options_are_adaptive(options)) {
        return rule->kind == RULE_OVERLAPPED ||
               error_set(error, "--accumulate auto needs --optimizer %s: %s takes a fixed number",
                         rule_list(rule_overlaps, overlapped), rule->name);
    }
    for (int rank = 0; count > 0 && (is_list || rank == 0); rank++) {
        count = is_list ? options_rank_number(options, rank) : (int)options->accumulate;
        if (is_list && count == 0) {
            return error_set(error,
                             "--rank-accumulate %s: rank %d has no valid number; allowed: a whole number 1 "
                             ".. %d for each rank, with commas between, as 4,4,1,1",
                             text_excerpt(options->rank_accumulate, text), rank, RANK_ACCUMULATE_MOST);
        }
        snprintf(text, sizeof text, is_list ? "--rank-accumulate: rank %d's" : "--accumulate", rank);
        if (count > 0 && count < rounds) {
            return error_set(error,
                             "%s %d: %s computes a commit in %d rounds, of one micro-batch each at least; "
                             "use %d or more",
                             text, count, rule->name, rounds, rounds);
        }
    }
    return true;
}

// Micro-batches of `rank` per commit: its number of the list, or --accumulate where there is none.
// 0: auto. 1 where a list is too short, until options_check_rank_numbers refuses it.
static inline int options_rank_accumulate(const Options *options, int rank) {
    if (options->rank_accumulate[0] == '\0') { return (int)options->accumulate; }
    int number = options_rank_number(options, rank);
    return number < 0 ? 1 : number;
}

// The micro-batches per commit of all ranks. With --accumulate auto, where they vary, the
// least possible: one per rank and round.
static inline int64_t options_total_accumulate(const Options *options, int size) {
    int64_t total = 0, least = 1 + options_rule(options)->further_rounds;
    for (int rank = 0; rank < size; rank++) {
        int count = options_rank_accumulate(options, rank);
        total += count > 0 ? count : least;
    }
    return total;
}

// When a run saves itself, besides at its end.
typedef struct SaveTimes {
    int64_t commits; // between two checkpoints; 0: commits do not decide
    double seconds;  // between two checkpoints, by rank 0's clock; 0: time does not decide
    bool never;      // not even at the end
} SaveTimes;

// --save-every: COMMITS, a time as 30s, 10m or 2h, end or never.
static inline bool options_save_times(const Options *options, SaveTimes *times, Error *error) {
    static const char *const words[] = {"end", "never"};
    static const char units[] = "smh";
    const char *text = options->save_every, *end = text;
    double amount;
    memset(times, 0, sizeof *times);
    times->never = strcmp(text, "never") == 0;
    if (times->never || strcmp(text, "end") == 0) { return true; }
    bool whole = option_read_number(OPTION_INTEGER, text, &amount);
    if (whole && amount >= 1 && amount <= OPTION_NO_LIMIT) {
        times->commits = (int64_t)amount;
        return true;
    }
    bool is_time = !whole && option_read_real(text, &amount, &end) && *end != '\0' && end[1] == '\0' &&
                   strchr(units, *end) != NULL;
    if (is_time) { times->seconds = amount * pow(60, (double)(strchr(units, *end) - units)); }
    if (is_time && times->seconds >= 1 && times->seconds <= 1e9) { return true; }
    char excerpt[64], hint[NAME_HINT];
    return error_set(error,
                     "--save-every: %s is not valid%s; allowed: a number of commits, a time of 1s or more as "
                     "30s, 10m or 2h, end, or never",
                     text_excerpt(text, excerpt), name_hint(text, words, 2, hint));
}

static inline bool options_emulate_link(const Options *options) {
    return options->link_mbit > 0 || options->link_us > 0;
}

// What the rule says of its own options. layers: of the model; 0: not known yet.
static inline bool options_check_rule(const Options *options, int layers, Error *error) {
    const Rule *rule = options_rule(options);
    return rule->check == NULL || rule->check(options_of_rule(options), layers, error);
}

// Where one option takes away what another asks for, depending on both values.
static inline bool options_check_pairs(const Options *options, Error *error) {
    SaveTimes saves;
    double rate = options->learning_rate;
    if (rate > 0 && options->minimum_learning_rate > rate) {
        return error_set(error, "--min-lr %g is above --lr %g: the schedule goes down from --lr to --min-lr",
                         options->minimum_learning_rate, rate);
    }
    if (rate > 0 && rate * options->weight_decay >= 1) {
        return error_set(
            error, "--lr %g times --weight-decay %g is 1 or more: each commit would erase the parameters",
            rate, options->weight_decay);
    }
    if (!options_save_times(options, &saves, error)) { return false; }
    if (options->on_spike == SPIKE_ROLLBACK && saves.commits == 0 && saves.seconds == 0) {
        return error_set(error, "--on-spike rollback needs --save-every with a number of commits or a time: "
                                "there must be checkpoints to go back to");
    }
    return options->precision != PRECISION_FASTEST || options->command == COMMAND_TRAIN ||
           error_set(error, "--precision fastest is measured where training begins; here say fp32 or bf16");
}

static inline bool options_check(const Options *options, Error *error) {
    return options_check_columns(options, error) && options_check_accumulate(options, error) &&
           options_check_rule(options, 0, error) && options_check_pairs(options, error);
}

// The contradictions that show when the number of ranks is known.
static inline bool options_check_rank_numbers(const Options *options, int ranks, Error *error) {
    int length = 0;
    char excerpt[64];
    while (options_rank_number(options, length) >= 0) { length++; }
    if (length > 0 && length != ranks) {
        return error_set(error, "--rank-accumulate %s has %d number%s for %d rank%s: give one for each rank",
                         text_excerpt(options->rank_accumulate, excerpt), length, plural(length), ranks,
                         plural(ranks));
    }
    if (options->slow_rank >= ranks) {
        return error_set(error, "--slow-rank %lld: there %s; allowed: none or 0 .. %d",
                         (long long)options->slow_rank, ranks == 1 ? "is one rank" : "are fewer ranks",
                         ranks - 1);
    }
    return true;
}

// The same, and those that show when the sequence length (tokens) and, unless --epochs are
// still to be counted, --tokens are known.
static inline bool options_check_ranks(const Options *options, int ranks, int64_t sequence_length,
                                       Error *error) {
    if (!options_check_rank_numbers(options, ranks, error)) { return false; }
    long long batches = (long long)options_total_accumulate(options, ranks);
    long long commit = batches * (long long)(options->micro_batch * sequence_length);
    return options->epochs > 0 || options->tokens >= commit ||
           error_set(error,
                     "--tokens %lld is less than one commit: %lld micro-batch%s on %d rank%s x %lld "
                     "sequence%s x %lld token%s = %lld; raise --tokens or --epochs, or lower --micro-batch, "
                     "--seq-len or --%saccumulate",
                     (long long)options->tokens, batches, batches == 1 ? "" : "es", ranks, plural(ranks),
                     (long long)options->micro_batch, plural(options->micro_batch),
                     (long long)sequence_length, plural(sequence_length), commit,
                     options->rank_accumulate[0] != '\0' ? "rank-" : "");
}
