// advice.h: what a run that has waited for its network is told at its end: what would have
// taken less time, and how much less, by the simulation that plans use.
//
// Ranks measure what their micro-batches take. What the network can do is not measured but
// fitted: the rate at which a simulation of this very run takes as long as it took. The same
// machines then run the alternatives.
#ifndef ACCO_PROGRAM_ADVICE_H
#define ACCO_PROGRAM_ADVICE_H

#include "program/agreement.h"
#include "program/forecast.h"
#include "program/progress.h"

#define ADVICE_SHARE 0.1   // of the time waited: more is worth advice
#define ADVICE_SPEEDUP 1.1 // less is not worth a line

enum { ADVICE_LINES = 4, ADVICE_TEXT = 512 };

// What a rank has measured in this part of the run.
typedef struct RankTimes {
    double micro_batch; // seconds of one
    double exposed;     // seconds in which only communication ran
    double tokens;      // of all ranks
} RankTimes;

typedef struct Advice {
    char options[ADVICE_TEXT];
    double speedup; // in tokens a second
    double updates; // for the same tokens, of those of this run
    bool local;     // its ranks step by themselves
} Advice;

// All ranks call it at the end of training. (ranks), for the caller to free.
static inline RankTimes *collect_rank_times(Run *run) {
    double begun = (double)(run->scheduler.micro_batches_begun - run->micro_batches_before);
    double done = run->scheduler.gradients_done - run->gradients_before;
    RankTimes mine = {begun > 0 ? run->micro_batch_seconds / begun : 0, run->exposed_seconds,
                      done * (double)tokens_per_micro_batch(run)};
    return (RankTimes *)transport_collect_records(&run->transport, "times", &mine, sizeof mine);
}

// Simulates the run with other options. NAN: it cannot be run so.
static inline double advice_tokens_per_second(const Run *run, const Machine *machine, const Options *options,
                                              SimulatedCommit *commit) {
    ForecastRow *row = (ForecastRow *)calloc(1, sizeof *row);
    double rate = NAN;
    if (row == NULL) { return NAN; }
    row->rule = options_rule(options);
    row->options = *options;
    Error unused = {""};
    bool valid = options_check(&row->options, &unused);
    if (valid && forecast_row(run, machine, row) && row->refused[0] == '\0' && row->fits) {
        rate = row->tokens_per_second;
        *commit = row->commit;
    }
    free(row);
    return rate;
}

// Sets the rate of the link between hosts, or of what ranks do for an exchange where there is
// one host, so that the simulation is as fast as the run. False: no rate does that.
static inline bool advice_fit(const Run *run, Machine *machine, double tokens_per_second) {
    bool outside = run->transport.hosts.hosts > 1;
    double *rate = outside ? &machine->host.bytes_per_second : &machine->exchange_bytes_per_second;
    double low = log(1e3), high = log(1e12);
    SimulatedCommit unused;
    for (int i = 0; i < 40; i++) {
        double middle = (low + high) / 2;
        *rate = exp(middle);
        double simulated = advice_tokens_per_second(run, machine, &run->options, &unused);
        if (isnan(simulated)) { return false; }
        *(simulated < tokens_per_second ? &low : &high) = middle;
    }
    return low > log(1e3) && high < log(1e12);
}

// Keeps `advice` if it is among the best, in the order of speed.
static inline void advice_keep(Advice *list, int *count, const Advice *advice) {
    int place = *count;
    if (!(advice->speedup > ADVICE_SPEEDUP)) { return; }
    while (place > 0 && list[place - 1].speedup < advice->speedup) { place--; }
    if (place == ADVICE_LINES) { return; }
    *count += *count < ADVICE_LINES ? 1 : 0;
    memmove(&list[place + 1], &list[place], (size_t)(*count - 1 - place) * sizeof *list);
    list[place] = *advice;
}

typedef struct AdviceSearch {
    const Run *run;
    const Machine *machine;
    double tokens_per_second; // of the run, simulated
    SimulatedCommit own;
    Advice list[ADVICE_LINES];
    int count;
    Advice local; // the best of those with local steps: one is enough
} AdviceSearch;

// text <- the options that are not as in this run, as a user would give them.
static inline void advice_describe(const Options *own, const Options *options, char text[ADVICE_TEXT]) {
    char words[OPTION_SHELL_TEXT];
    int length = 0;
    text[0] = '\0';
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
        const OptionSpec *option = &option_table[i];
        if (option_is_same(option, options, own) || length >= ADVICE_TEXT) { continue; }
        length += snprintf(text + length, (size_t)(ADVICE_TEXT - length), "%s%s", length > 0 ? " " : "",
                           option_for_shell(option, options, words));
    }
}

// options: what is tried.
static inline void advice_try(AdviceSearch *search, const Options *options) {
    SimulatedCommit commit;
    Advice advice;
    double rate = advice_tokens_per_second(search->run, search->machine, options, &commit);
    if (isnan(rate)) { return; }
    advice_describe(&search->run->options, options, advice.options);
    advice.speedup = rate / search->tokens_per_second;
    advice.updates = search->own.micro_batches / commit.micro_batches;
    advice.local = options_rule(options)->kind == RULE_LOCAL;
    bool turns_local = advice.local && search->run->rule->kind != RULE_LOCAL;
    if (!turns_local) {
        advice_keep(search->list, &search->count, &advice);
    } else if (advice.speedup > search->local.speedup) {
        search->local = advice;
    }
}

// The same rule with a coarser wire, larger batches, or overlap.
static inline void advice_try_same_rule(AdviceSearch *search) {
    const Options *own = &search->run->options;
    const OptionSpec *estimate = option_find("estimate-wire");
    Error never;
    for (int wire = WIRE_BF16; wire <= WIRE_INT8; wire++) {
        Options options = *own;
        if (wire <= (int)search->run->scheduler.settings.wire) { continue; }
        options.wire = wire;
        advice_try(search, &options);
    }
    if (option_list_names(estimate->rules, search->run->rule->name)) {
        Options options = *own;
        option_set(estimate, &options, "int4", &never);
        advice_try(search, &options);
    }
    for (int factor = 2; factor <= 4 && own->rank_accumulate[0] == '\0' && own->accumulate > 0; factor *= 2) {
        Options options = *own;
        options.accumulate *= factor;
        advice_try(search, &options);
    }
    if (!own->overlap) {
        Options options = *own;
        options.overlap = true;
        advice_try(search, &options);
    }
}

static inline void advice_try_rules(AdviceSearch *search) {
    const Run *run = search->run;
    int64_t each = (int64_t)(search->own.micro_batches / run->transport.size + 0.5);
    for (int i = 0; i < RULE_COUNT; i++) {
        Options options = options_under_rule(&run->options, i, each);
        if (RULES[i].rule == run->rule) { continue; }
        advice_try(search, &options);
    }
}

// How many updates the same tokens give.
static inline const char *advice_updates(const Advice *advice, char text[ADVICE_TEXT]) {
    const char *kind = advice->local ? ", which each rank makes by itself" : "";
    if (fabs(advice->updates - 1) < 0.01) {
        snprintf(text, ADVICE_TEXT, "as many updates%s", kind);
    } else {
        snprintf(text, ADVICE_TEXT, "%.2g times as many updates%s", advice->updates, kind);
    }
    return text;
}

// Rank 0, at the end of training. times (ranks): of all ranks. Prints advice, and returns it
// for the log; NULL: there is none to give.
static inline json_t *print_advice(const Run *run, const RankTimes *times, double tokens_per_second,
                                   double exposed_share) {
    int ranks = run->transport.size;
    double *slowness = (double *)calloc((size_t)ranks, sizeof(double));
    AdviceSearch search;
    memset(&search, 0, sizeof search);
    bool undisturbed = run->scheduler.spikes == 0 && run->scheduler.rollbacks == 0; // no work was lost
    if (slowness == NULL || !undisturbed || !(exposed_share > ADVICE_SHARE)) {
        free(slowness);
        return NULL;
    }
    printf("network    %.0f %% of the time ranks only waited for communication", 100 * exposed_share);
    for (int rank = 0; rank < ranks; rank++) {
        slowness[rank] = times[rank].micro_batch / times[0].micro_batch;
    }
    Machine machine = machine_of_run(run, times[0].micro_batch);
    machine.slow_rank = -1; // its micro-batches were measured as they are
    machine.slowness = slowness;
    search.run = run;
    search.machine = &machine;
    json_t *lines = json_array();
    if (advice_fit(run, &machine, tokens_per_second)) {
        search.tokens_per_second = advice_tokens_per_second(run, &machine, &run->options, &search.own);
        advice_try_same_rule(&search);
        advice_try_rules(&search);
        advice_keep(search.list, &search.count, &search.local);
    }
    printf("%s\n",
           search.count > 0 ? "; by a simulation that fits this run, the same tokens would take:" : "");
    for (int i = 0; i < search.count; i++) {
        const Advice *advice = &search.list[i];
        char updates[ADVICE_TEXT];
        printf("           %3.0f %% of the time with %s, %s\n", 100 / advice->speedup, advice->options,
               advice_updates(advice, updates));
        json_array_append_new(lines,
                              json_pack("{s:s, s:o, s:o}", "options", advice->options, "speedup",
                                        log_real(advice->speedup), "updates", log_real(advice->updates)));
    }
    free(slowness);
    return lines;
}

#endif
