// forecast.h: how fast a run would be, under its rule and under all others, and which to
// take.
//
//   machine_of_run      what the machines cost, as far as options say
//   forecast_row        one run, simulated (simulation/)
//   forecast_make       every rule at the same batch
//   forecast_choose     the rule to recommend
//
// plan_time.h prints it as the second half of train_gpt plan; advice.h asks it what would
// have been faster.
//
// The rule that is recommended is the fastest. Of rules that are as fast, within
// FORECAST_TOLERANCE, it is the one that departs least from training with one step per
// batch (Rule::departs): what a rule does to the loss is not simulated.
#ifndef ACCO_PLAN_FORECAST_H
#define ACCO_PLAN_FORECAST_H

#include "plan/simulation.h"
#include "program/fit.h"

#define FORECAST_MOST 3e7 // micro-batches to be simulated for one rule: half a second
#define FORECAST_TOLERANCE 0.02

// ---------------------------------------------------------------------------------------
// The machine

#define TCP_PAYLOAD 0.957 // of what an Ethernet carries; the rest are headers
#define HOST_MBIT 10000.0
#define HOST_US 50.0

// Bytes a second of passes over vectors: of a CPU rank whose state fits into its caches, of one
// whose state does not, and of a GPU; and of what a rank does for an exchange, most of which
// is in a cache (collectives_host.h).
#define CPU_CACHED 6e10
#define CPU_MEMORY 1.2e10
#define CPU_CACHE 3.2e7 // bytes
#define CPU_EXCHANGE 2.5e10
#define GPU_MEMORY 2e12

// What a second of a CPU rank's work for an exchange takes from the computation beside it: the
// second itself, and what it costs to change between the two and to fill caches again.
#define CPU_TAKEN 2.0

#define NCCL_CHUNK 8e6 // elements: NCCL is given what fits into its message buffers

// What an exchange by NCCL may take from the computation beside it.
#define GPU_TAKEN 0.06

// micro_batch: seconds of one on a rank.
static inline Machine machine_of_run(const Run *run, double micro_batch) {
    const Options *options = &run->options;
    bool on_gpu = run->placement.on_gpu, emulated = options->host_mbit == 0 && options->link_mbit > 0;
    double mbit = options->host_mbit > 0 ? options->host_mbit : emulated ? options->link_mbit : HOST_MBIT;
    double us = options->host_us > 0   ? options->host_us
                : options->link_us > 0 ? options->link_us
                : emulated             ? 0
                                       : HOST_US;
    Machine machine;
    memset(&machine, 0, sizeof machine);
    machine.host.bytes_per_second = mbit * 1e6 / 8 * (emulated ? 1 : TCP_PAYLOAD);
    machine.host.latency = us / 1e6;
    machine.inside.bytes_per_second = options->inside_mbit > 0 ? options->inside_mbit * 1e6 / 8 : INFINITY;
    machine.inside.latency = options->inside_us / 1e6;
    machine.micro_batch = micro_batch;
    machine.slow_rank = (int)options->slow_rank;
    machine.slow_seconds = options->slow_ms / 1e3;
    bool cached = (double)run->table.parameter_count * 4 * sizeof(float) < CPU_CACHE;
    machine.memory_bytes_per_second = on_gpu ? GPU_MEMORY : cached ? CPU_CACHED : CPU_MEMORY;
    machine.exchange_bytes_per_second = on_gpu ? GPU_MEMORY : CPU_EXCHANGE;
    machine.taken_of_work = on_gpu ? 0 : CPU_TAKEN;
    machine.taken_of_time = on_gpu && run->placement.uses_nccl ? GPU_TAKEN : 0;
    machine.chunk = run->placement.uses_nccl ? NCCL_CHUNK : 0;
    machine.message_seconds = on_gpu ? 1e-6 : 5e-6;
    machine.wake_seconds = on_gpu ? 10e-6 : 100e-6;
    machine.sleeps = !run->placement.uses_nccl && !emulated; // an emulated link says when to look
    return machine;
}

// What link_measure would find on these machines.
static inline LinkMeasure machine_link(const Machine *machine, const Transport *transport) {
    const Groups *hosts = &transport->hosts;
    double each = ceil((double)transport->size / hosts->hosts);
    bool outside = hosts->hosts > 1;
    LinkMeasure link = {machine_records(machine, transport, sizeof(double)),
                        outside ? machine->host.bytes_per_second / each : machine->exchange_bytes_per_second};
    return link;
}

// ---------------------------------------------------------------------------------------
// The rules

typedef struct ForecastRow {
    const Rule *rule;
    Options options;             // of a run under this rule
    char refused[sizeof(Error)]; // why it cannot be run so; empty: it can
    SimulatedCommit commit;
    double tokens_per_second;
    size_t bytes; // of one rank
    bool fits;    // or it is not known
} ForecastRow;

typedef struct Forecast {
    Machine machine;
    ForecastRow rows[RULE_COUNT];
    int recommended, committing; // rows: of all rules, and of those that are not local; -1: none
} Forecast;

enum { OPTION_SHELL_TEXT = 4 * sizeof(OptionText) + 64 }; // a name and a quoted value

// "--name value", as in a shell.
static inline const char *option_for_shell(const OptionSpec *option, const Options *options,
                                           char words[OPTION_SHELL_TEXT]) {
    char value[OPTION_VALUE_SIZE], quoted[4 * sizeof(OptionText) + 3];
    snprintf(words, OPTION_SHELL_TEXT, "--%s %s", option->name,
             text_for_shell(option_print_value(option, options, value), quoted, sizeof quoted));
    return words;
}

// The run's options under another rule, with what only other rules have at its default.
static inline Options options_under_rule(const Options *options, int rule, int64_t micro_batches) {
    Options other = *options;
    other.rule = rule;
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
        const OptionSpec *option = &option_table[i];
        if (!option_is_of_rule(option, RULES[rule].rule)) { option_set_default(option, &other); }
    }
    if (options_are_adaptive(options)) { other.accumulate = micro_batches; }
    if (options->rank_accumulate[0] != '\0' && other.rank_accumulate[0] == '\0') {
        other.accumulate = micro_batches;
    }
    return other;
}

// (ranks): micro-batches of every rank relative to those of this one, for the caller to free;
// NULL: all have as many.
static inline double *forecast_counts(const Run *run, const Options *options) {
    int size = run->transport.size, own = options_rank_accumulate(options, run->transport.rank, size);
    if (options->rank_accumulate[0] == '\0') { return NULL; }
    double *counts = (double *)malloc((size_t)size * sizeof(double));
    for (int rank = 0; counts != NULL && rank < size; rank++) {
        counts[rank] = (double)options_rank_accumulate(options, rank, size) / own;
    }
    return counts;
}

// Simulates the rule of row->options. run: what it is a variant of. False: no memory.
static inline bool forecast_row(const Run *run, const Machine *machine, ForecastRow *row) {
    Run *trial = (Run *)malloc(sizeof *trial);
    Error error = {""};
    if (trial == NULL) { return false; }
    *trial = *run;
    trial->options = row->options;
    trial->rule = row->rule;
    memset(&trial->arena, 0, sizeof trial->arena);
    bool valid = options_check(&trial->options, &error) &&
                 options_check_rule(&trial->options, run->config.layers, &error);
    bool possible = valid && reserve_memory(trial, training_problem(trial), &error);
    if (!possible) {
        snprintf(row->refused, sizeof row->refused, "%s", error.text);
        if (valid) {
            fragments_free(&trial->scheduler);
            free(trial->decay_ranges);
        }
        free(trial);
        return true;
    }
    MemoryRoom room = memory_room(trial);
    Simulation simulation;
    Machine counted = *machine;
    double *counts = forecast_counts(run, &row->options);
    counted.counts = counts;
    bucket_for_link(trial, machine_link(machine, &trial->transport));
    bool opened = simulation_open(&simulation, &trial->scheduler, &counted);
    if (opened && simulation_length(&simulation) > FORECAST_MOST) {
        snprintf(row->refused, sizeof row->refused,
                 "%.2g micro-batches would have to be simulated, which takes too long",
                 simulation_length(&simulation));
    } else if (opened) {
        row->commit = simulation_of_rule(&simulation, row->rule);
        row->tokens_per_second =
            row->commit.micro_batches * (double)tokens_per_micro_batch(run) / row->commit.seconds;
        row->bytes = trial->arena.bytes;
        row->fits = arena_fits(&trial->arena, &room);
    }
    simulation_close(&simulation);
    free(counts);
    free(trial->decay_ranges);
    free(trial);
    return opened;
}

// Whether a row may be recommended.
static inline bool forecast_may_recommend(const ForecastRow *row, bool local_too) {
    return row->refused[0] == '\0' && row->fits && (local_too || row->rule->kind != RULE_LOCAL);
}

// The fastest row, or one that is as fast and departs less; of those that depart as far, the
// fastest.
static inline int forecast_choose(const Forecast *forecast, bool local_too) {
    double fastest = 0;
    int chosen = -1;
    for (int i = 0; i < RULE_COUNT; i++) {
        const ForecastRow *row = &forecast->rows[i];
        if (forecast_may_recommend(row, local_too)) { fastest = fmax(fastest, row->tokens_per_second); }
    }
    for (int i = 0; i < RULE_COUNT; i++) {
        const ForecastRow *row = &forecast->rows[i];
        if (!forecast_may_recommend(row, local_too) ||
            !(row->tokens_per_second >= (1 - FORECAST_TOLERANCE) * fastest)) {
            continue;
        }
        const ForecastRow *before = &forecast->rows[chosen < 0 ? i : chosen];
        int further = row->rule->departs - before->rule->departs;
        bool faster = row->tokens_per_second > before->tokens_per_second;
        if (chosen < 0 || further < 0 || (further == 0 && faster)) { chosen = i; }
    }
    return chosen;
}

// All rules. The rule of the run comes first: with --accumulate auto it says how large the
// batch of the others is.
static inline bool forecast_make(const Run *run, const Machine *machine, Forecast *forecast, Error *error) {
    memset(forecast, 0, sizeof *forecast);
    forecast->machine = *machine;
    int own = 0, size = run->transport.size;
    while (RULES[own].rule != run->rule) { own++; }
    bool made = true;
    double mean = (double)options_total_accumulate(&run->options, size) / size;
    for (int i = -1; i < RULE_COUNT && made; i++) {
        int rule = i < 0 ? own : i;
        ForecastRow *row = &forecast->rows[rule];
        if (i == own) { continue; }
        row->rule = RULES[rule].rule;
        row->options = i < 0 ? run->options : options_under_rule(&run->options, rule, (int64_t)(mean + 0.5));
        made = forecast_row(run, &forecast->machine, row);
        if (i < 0 && row->refused[0] == '\0') { mean = row->commit.micro_batches / size; }
    }
    forecast->recommended = forecast_choose(forecast, true);
    forecast->committing = forecast_choose(forecast, false);
    return made || error_set(error, "no memory to simulate %d ranks", size);
}

#endif
