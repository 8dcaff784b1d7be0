// options_check.h: options that are valid one by one and contradict each other.
//
// Every refusal says which option to change, and to what. Values that are automatic (0,
// or -1 for some rates) are not compared here; a caller that has filled them in may check
// again. What depends on the model or on the number of ranks is checked when it is known:
// Rule::check with the number of layers, options_check_ranks.
#ifndef ACCO_OPTIONS_OPTIONS_CHECK_H
#define ACCO_OPTIONS_OPTIONS_CHECK_H

#include "options/options_parse.h"

// ---------------------------------------------------------------------------------------
// The rule and its options

// An option of other rules than this run's would have no effect.
static inline bool options_check_owners(const Options *options, Error *error) {
    const char *rule = options_rule(options)->name;
    Options defaults;
    options_defaults(&defaults);
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
        const OptionSpec *option = &option_table[i];
        bool is_ours = option->rules == NULL || option_list_names(option->rules, rule);
        if (is_ours || option_is_same(option, options, &defaults)) { continue; }
        return error_set(error, "--%s belongs to --optimizer %s, this run uses %s: leave it %s%s",
                         option->name, option->rules, rule, option->default_text[0] == '\0' ? "empty" : "at ",
                         option->default_text);
    }
    return true;
}

// Every round of a commit has a micro-batch at least.
static inline bool options_check_rounds(const Rule *rule, const char *where, int64_t count, Error *error) {
    int rounds = rule->rounds_per_commit;
    return count >= rounds ||
           error_set(error,
                     "%s%lld: %s computes a commit in %d rounds, of one micro-batch each at least; "
                     "use %d or more",
                     where, (long long)count, rule->name, rounds, rounds);
}

static inline bool options_check_accumulate(const Options *options, Error *error) {
    const Rule *rule = options_rule(options);
    bool is_auto = options->accumulate == 0, is_list = options->rank_accumulate[0] != '\0';
    if (!is_auto) {
        return is_list || options_check_rounds(rule, "--accumulate ", options->accumulate, error);
    }
    if (rule->kind != RULE_OVERLAPPED) {
        char overlapped[RULE_TEXT];
        return error_set(error, "--accumulate auto needs --optimizer %s: %s takes a fixed number, because %s",
                         rule_list(rule_overlaps, overlapped), rule->name,
                         rule->kind == RULE_LOCAL
                             ? "its average gives every rank the same weight, so all must train on as much"
                             : "it computes no further micro-batches while it communicates");
    }
    if (options->learning_rate_by == RATE_BY_COMMITS) {
        return error_set(error, "--accumulate auto with --lr-by commits: nobody knows how many commits there "
                                "will be; use --lr-by grads");
    }
    return options->overlap ||
           error_set(error,
                     "--accumulate auto needs --overlap on: it fills the time that communication takes");
}

// Every number of the list is a count. Whether there are as many as ranks is checked
// later.
static inline bool options_check_rank_list(const Options *options, Error *error) {
    enum { MOST = 1000000, DIGITS = 7 };
    const Rule *rule = options_rule(options);
    const char *number = options->rank_accumulate;
    for (int rank = 0; options->rank_accumulate[0] != '\0'; rank++) {
        size_t length = strcspn(number, ","), digits = strspn(number, "0123456789");
        int64_t count = digits == length && length <= DIGITS ? strtoll(number, NULL, 10) : 0;
        if (count < 1 || count > MOST) {
            char excerpt[64];
            return error_set(error,
                             "--rank-accumulate %s: rank %d has no valid number; allowed: a whole number 1 "
                             ".. %d for each rank, with commas between, as 4,4,1,1",
                             text_excerpt(options->rank_accumulate, excerpt), rank, MOST);
        }
        char where[64];
        snprintf(where, sizeof where, "--rank-accumulate: rank %d's ", rank);
        if (!options_check_rounds(rule, where, count, error)) { return false; }
        if (number[length] == '\0') { break; }
        number += length + 1;
    }
    return true;
}

// ---------------------------------------------------------------------------------------
// What follows from the options

// Whether a rank computes for as long as the communication beside it lasts.
static inline bool options_are_adaptive(const Options *options) {
    return options->accumulate == 0 && options->rank_accumulate[0] == '\0';
}

// The micro-batches per commit of `rank`: its number of the list, or --accumulate where
// there is no list. 0: auto. The options have passed options_check; where
// options_check_ranks will refuse the list as too short, the ranks that it lacks have 1.
static inline int options_rank_accumulate(const Options *options, int rank, int size) {
    assert(rank >= 0 && rank < size);
    (void)size;
    if (options->rank_accumulate[0] == '\0') { return (int)options->accumulate; }
    const char *number = options->rank_accumulate;
    for (; rank > 0 && number != NULL; rank--) {
        number = strchr(number, ',');
        number = number == NULL ? NULL : number + 1;
    }
    return number == NULL ? 1 : (int)strtol(number, NULL, 10);
}

// The micro-batches per commit of all ranks. With --accumulate auto nobody knows: then
// the least possible, one per rank and round.
static inline int64_t options_total_accumulate(const Options *options, int size) {
    int64_t total = 0, least = options_rule(options)->rounds_per_commit;
    for (int rank = 0; rank < size; rank++) {
        int count = options_rank_accumulate(options, rank, size);
        total += count > 0 ? count : least;
    }
    return total;
}

// Tokens of one commit over all ranks, the least possible one where --accumulate is auto.
static inline int64_t options_tokens_per_commit(const Options *options, int ranks, int64_t sequence_length) {
    return options_total_accumulate(options, ranks) * options->micro_batch * sequence_length;
}

// The inner steps that a rank makes before it hears of the others; 1 where all ranks make
// every step together.
static inline int64_t options_steps_between_exchanges(const Options *options) {
    const Rule *rule = options_rule(options);
    SchedulerSettings settings;
    memset(&settings, 0, sizeof settings);
    settings.fragments = 1;
    if (rule->kind != RULE_LOCAL) { return 1; }
    rule->configure(options_of_rule(options), &settings);
    return settings.steps / settings.fragments;
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
    static const double unit_seconds[] = {1, 60, 3600};
    const char *text = options->save_every, *end = text;
    double amount;
    memset(times, 0, sizeof *times);
    if (strcmp(text, "end") == 0) { return true; }
    times->never = strcmp(text, "never") == 0;
    if (times->never) { return true; }
    bool whole = option_read_integer(text, false, &times->commits);
    if (whole && times->commits >= 1 && (double)times->commits <= OPTION_NO_LIMIT) { return true; }
    bool is_time = !whole && option_read_real(text, &amount, &end) && *end != '\0' && end[1] == '\0' &&
                   strchr(units, *end) != NULL;
    if (is_time) { times->seconds = amount * unit_seconds[strchr(units, *end) - units]; }
    times->commits = 0;
    if (is_time && times->seconds >= 1 && times->seconds <= 1e9) { return true; }
    bool means_never = strcmp(text, "none") == 0 || strcmp(text, "off") == 0;
    const char *near = means_never ? "never" : nearest_name(text, words, 2);
    char excerpt[64];
    return error_set(
        error,
        "--save-every: %s %s%s%s; allowed: a number of commits, a time of 1s or more as 30s, 10m or "
        "2h, end, or never",
        text_excerpt(text, excerpt), whole || is_time ? "is out of range" : "is unknown",
        near != NULL ? ": did you mean " : "", near != NULL ? near : "");
}

// ---------------------------------------------------------------------------------------
// Other options

static inline bool options_check_rate(const Options *options, Error *error) {
    double rate = options->learning_rate, minimum = options->minimum_learning_rate;
    if (!(options->beta1 < 1 && options->beta2 < 1)) {
        return error_set(error, "--beta1 and --beta2 must be below 1");
    }
    if (rate > 0 && minimum > rate) {
        return error_set(error, "--min-lr %g is above --lr %g: the schedule goes down from --lr to --min-lr",
                         minimum, rate);
    }
    if (options->schedule == SCHEDULE_CONSTANT && minimum >= 0) {
        return error_set(
            error,
            "--schedule constant never reaches --min-lr: leave --min-lr away, or choose cosine or linear");
    }
    if (rate > 0 && rate * options->weight_decay >= 1) {
        return error_set(
            error, "--lr %g times --weight-decay %g is 1 or more: each commit would erase the parameters",
            rate, options->weight_decay);
    }
    return true;
}

// Whether messages go over an emulated link.
static inline bool options_emulate_link(const Options *options) {
    return options->link_mbit > 0 || options->link_us > 0;
}

// An emulated delay longer than the deadline would end the job with a message that blames
// the network.
static inline bool options_check_emulation(const Options *options, Error *error) {
    if (options->slow_ms > 0 && options->slow_rank < 0) {
        return error_set(error, "--slow-ms needs --slow-rank: which rank is to be slow?");
    }
    if (options->slow_rank >= 0 && options->slow_ms == 0) {
        return error_set(error, "--slow-rank needs --slow-ms: how slow is it to be?");
    }
    int slow_rank = options->slow_rank < 0 ? 0 : (int)options->slow_rank;
    int batches = options_rank_accumulate(options, slow_rank, slow_rank + 1);
    double waiting = options->slow_ms * (double)(batches > 0 ? batches : 1) *
                     (double)options_steps_between_exchanges(options);
    if (waiting / 1000 >= options->timeout_s) {
        return error_set(error,
                         "--slow-ms %g makes the others wait %g s for an exchange, longer than --timeout-s "
                         "%g: the job would end itself",
                         options->slow_ms, waiting / 1000, options->timeout_s);
    }
    double chunk_megabits = 2 * 8.4; // two chunks of 1 MB may be under way
    if (options->link_mbit > 0 && chunk_megabits / options->link_mbit >= options->timeout_s) {
        return error_set(error,
                         "--link-mbit %g needs %g s for two chunks of data, longer than --timeout-s %g: the "
                         "job would end itself",
                         options->link_mbit, chunk_megabits / options->link_mbit, options->timeout_s);
    }
    if (options->chaos_ms / 1000 + options->link_us / 1e6 >= options->timeout_s) {
        return error_set(error,
                         "--chaos-ms %g and --link-us %g together are longer than --timeout-s %g: the job "
                         "would end itself",
                         options->chaos_ms, options->link_us, options->timeout_s);
    }
    return true;
}

// Options that need another one, or ask for something which another one takes away.
static inline bool options_check_pairs(const Options *options, Error *error) {
    bool finetunes = options->finetune[0] != '\0';
    SaveTimes saves;
    if (!options_save_times(options, &saves, error)) { return false; }
    if (finetunes && (options->command == COMMAND_SAMPLE || options->command == COMMAND_EVAL)) {
        return error_set(error, "--finetune is for training: give the model with --from");
    }
    if (options->on_spike == SPIKE_ROLLBACK && saves.commits == 0 && saves.seconds == 0) {
        return error_set(error,
                         "--on-spike rollback needs --save-every with a number of commits or a time: there "
                         "must be checkpoints to go back to");
    }
    if (options->epochs > 0 && strcmp(options->data, "builtin") == 0) {
        return error_set(error, "--epochs needs --data with a text or token files: the built-in corpus is "
                                "endless, so give --tokens");
    }
    if (strcmp(options->resume, "auto") == 0 && strcmp(options->out, "auto") == 0) {
        return error_set(error, "--resume auto needs --out: it goes on with what is in that directory, and "
                                "--out auto is a new one");
    }
    if (options->val_data[0] != '\0' && options->val_batches == 0) {
        return error_set(error, "--val-data with --val-batches none: there would be no validation");
    }
    if (options->val_data[0] != '\0' && strcmp(options->val_data, options->data) == 0 &&
        strcmp(options->data, "builtin") != 0) {
        return error_set(
            error, "--val-data is the same as --data: leave it away, and the tail of --data is held out");
    }
    if (options->stride != 0 && options->task != 0) {
        return error_set(error, "--stride is for --task perplexity: the other tasks have lines, not windows");
    }
    if (options->prompt[0] != '\0' && options->sample_tokens == 0) {
        return error_set(error, "--prompt with --sample-tokens none: there would be no sample");
    }
    if (options->sample_every > 0 && options->sample_tokens == 0) {
        return error_set(error, "--sample-every with --sample-tokens none: there would be no sample");
    }
    return true;
}

// The library adds fp32 and bf16 numbers, and nothing else.
static inline bool options_check_exchange(const Options *options, Error *error) {
    const Rule *rule = options_rule(options);
    SchedulerSettings settings;
    memset(&settings, 0, sizeof settings);
    settings.wire = settings.estimate_wire = (WireFormat)options->wire;
    if (rule->configure != NULL) { rule->configure(options_of_rule(options), &settings); }
    bool coarse = wire_is_coarse(settings.wire) || wire_is_coarse(settings.estimate_wire);
    if (options->exchange == EXCHANGE_LIBRARY && coarse) {
        return error_set(error,
                         "--exchange library carries fp32 and bf16 only: choose one of them for --wire "
                         "and --estimate-wire, or another --exchange");
    }
    return true;
}

// Refuses options that are valid one by one and not together.
static inline bool options_check(const Options *options, Error *error) {
    const Rule *rule = options_rule(options);
    RuleFacts facts = {0, options_are_adaptive(options)};
    if (options->precision == PRECISION_ASK_FP16) {
        return error_set(error, "--precision fp16 is refused: it needs loss scaling and gave NaN where that "
                                "was left out; use fp32");
    }
    if (options->precision == PRECISION_FASTEST && options->command != COMMAND_TRAIN) {
        return error_set(error,
                         "--precision fastest is measured where training begins; here say fp32 or bf16");
    }
    if (options->ranks != 1 && options->command != COMMAND_PLAN) {
        return error_set(
            error, "--ranks is for train_gpt plan: start %lld ranks with mpirun -np %lld ./train_gpt ...",
            (long long)options->ranks, (long long)options->ranks);
    }
    if (options->gpu_memory != 0 && options->command != COMMAND_PLAN) {
        return error_set(error, "--gpu-memory is for train_gpt plan: training takes the GPU that it finds");
    }
    if (options->like[0] != '\0' && options->compute_ms > 0) {
        return error_set(error, "--like and --compute-ms both say what a micro-batch takes: leave one away");
    }
    if (options->gpu_memory != 0 && options->device == DEVICE_CPU) {
        return error_set(error,
                         "--gpu-memory plans for a GPU, and --device cpu for none: leave one of them away");
    }
    return options_check_owners(options, error) && options_check_accumulate(options, error) &&
           options_check_rank_list(options, error) &&
           (rule->check == NULL || rule->check(options_of_rule(options), &facts, error)) &&
           options_check_rate(options, error) && options_check_emulation(options, error) &&
           options_check_exchange(options, error) && options_check_pairs(options, error);
}

// A list with a number for each of the ranks, no more and no less.
static inline bool options_check_rank_list_length(const Options *options, int ranks, Error *error) {
    int length = 1;
    for (const char *c = options->rank_accumulate; *c != '\0'; c++) { length += *c == ','; }
    if (options->rank_accumulate[0] == '\0' || length == ranks) { return true; }
    char excerpt[64];
    return error_set(error, "--rank-accumulate %s has %d number%s for %d rank%s: give one for each rank",
                     text_excerpt(options->rank_accumulate, excerpt), length, length == 1 ? "" : "s", ranks,
                     ranks == 1 ? "" : "s");
}

static inline bool options_check_slow_rank(const Options *options, int ranks, Error *error) {
    if (options->slow_rank >= ranks) {
        return error_set(error, "--slow-rank %lld: there %s; allowed: none or 0 .. %d",
                         (long long)options->slow_rank, ranks == 1 ? "is one rank" : "are fewer ranks",
                         ranks - 1);
    }
    return true;
}

// The contradictions that show only when the number of ranks and the sequence length
// (tokens) are known, and, unless --epochs are still to be counted, --tokens.
static inline bool options_check_ranks(const Options *options, int ranks, int64_t sequence_length,
                                       Error *error) {
    if (!options_check_rank_list_length(options, ranks, error) ||
        !options_check_slow_rank(options, ranks, error)) {
        return false;
    }
    int64_t commit = options_tokens_per_commit(options, ranks, sequence_length);
    if (options->epochs == 0 && options->tokens < commit) {
        return error_set(
            error,
            "--tokens %lld is less than one commit: %lld micro-batches on %d rank%s x %lld sequences x %lld "
            "tokens = %lld; raise --tokens or lower --micro-batch, --seq-len or --%s",
            (long long)options->tokens, (long long)options_total_accumulate(options, ranks), ranks,
            ranks == 1 ? "" : "s", (long long)options->micro_batch, (long long)sequence_length,
            (long long)commit, options->rank_accumulate[0] == '\0' ? "accumulate" : "rank-accumulate");
    }
    return true;
}

#endif
