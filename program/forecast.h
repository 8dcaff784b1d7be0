// forecast.h: how fast a run would be, under its rule and under all others, and which to
// take. The second half of train_gpt plan.
//
//   machine_of_run      what the machines cost, from options, a run's log or a measurement
//   forecast_make       a simulation of every rule at the same batch (simulation/)
//   forecast_choose     the rule to recommend
//   forecast_print, forecast_as_json
//
// The rule that is recommended is the fastest. Of rules that are as fast, within
// FORECAST_TOLERANCE, it is the one that departs least from training with one step per
// batch (Rule::departs): what a rule does to the loss is not simulated.
#ifndef ACCO_PROGRAM_FORECAST_H
#define ACCO_PROGRAM_FORECAST_H

#include "kernels/cpu/product_rates.h"
#include "program/fit.h"
#include "simulation/simulation.h"

#define FORECAST_TOLERANCE 0.01

// ---------------------------------------------------------------------------------------
// What a micro-batch takes

typedef struct MicroBatchTime {
    double seconds;   // NAN: not known
    double variation; // Machine::variation
    char reason[RULE_TEXT];
} MicroBatchTime;

// From the reports of a run: the mean over its micro-batches, without the first report, in
// which everything is new to the processor's caches. How much they vary follows from how
// much the means of reports do.
static inline bool micro_batch_of_log(const char *run, MicroBatchTime *time, Error *error) {
    char path[PATH_MAX + 16], *line = NULL;
    size_t room = 0;
    double count = 0, sum = 0, squares = 0, reports = 0, first = NAN;
    snprintf(path, sizeof path, "%s/log.jsonl", run);
    FILE *file = fopen(path, "r");
    if (file == NULL) { return error_set(error, "--like %.300s: there is no log.jsonl of a run", run); }
    while (getline(&line, &room, file) > 0) {
        json_t *event = json_loads(line, 0, NULL);
        const char *kind = json_string_value(json_object_get(event, "event"));
        double ms = json_number_value(json_object_get(event, "micro_batch_ms"));
        double weight = json_number_value(json_object_get(event, "steps"));
        if (kind != NULL && strcmp(kind, "report") == 0 && ms > 0 && weight > 0) {
            bool is_first = isnan(first);
            if (is_first) { first = ms; }
            count += is_first ? 0 : weight;
            sum += is_first ? 0 : weight * ms;
            squares += is_first ? 0 : weight * ms * ms;
            reports += is_first ? 0 : 1;
        }
        json_decref(event);
    }
    free(line);
    fclose(file);
    if (isnan(first)) {
        return error_set(error, "--like %.300s: no report of its log says what a micro-batch took", run);
    }
    time->seconds = (reports > 0 ? sum / count : first) / 1e3;
    snprintf(time->reason, sizeof time->reason, "as in %.200s", run);
    return true;
}

enum { MICRO_BATCH_TRIES = 5 };

// On the CPU: computes some with random parameters. NAN where there is no memory.
static inline double micro_batch_measure(Run *run) {
    GptNeoSettings settings = run->model.settings;
    GptNeo *model = (GptNeo *)malloc(sizeof *model);
    Arena *arena = (Arena *)calloc(1, sizeof *arena);
    ThreadPool *pool = thread_pool_create(run->threads.threads, false);
    size_t parameters = run->table.parameter_count, rows = (size_t)tokens_per_micro_batch(run);
    float *weights = (float *)malloc(parameters * sizeof(float)), *gradients = (float *)calloc(parameters, 4);
    int32_t *tokens = (int32_t *)malloc(rows * sizeof(int32_t));
    double tries[MICRO_BATCH_TRIES], seconds = NAN;
    Error unused;
    Stream stream;
    memset(&stream, 0, sizeof stream);
    stream.pool = pool;
    stream.precision = settings.precision;
    bool ready = model != NULL && arena != NULL && pool != NULL && weights != NULL && gradients != NULL && tokens != NULL;
    if (ready) {
        gpt_neo_reserve(model, arena, &run->config, &settings);
        ready = arena_commit(arena, &unused);
    }
    if (ready) {
        gpt_neo_initialize(&run->table, 1, pool, weights);
        for (size_t i = 0; i < rows; i++) {
            tokens[i] = (int32_t)(random_hash(i, 0) % (uint64_t)run->config.vocabulary);
        }
        for (int i = -1; i < MICRO_BATCH_TRIES; i++) {
            double began = clock_seconds();
            gpt_neo_gradients(model, &stream, weights, gradients, tokens, tokens, NULL);
            if (i >= 0) { tries[i] = clock_seconds() - began; }
        }
        seconds = median_of(tries, MICRO_BATCH_TRIES);
    }
    if (arena != NULL) { arena_release(arena); }
    thread_pool_destroy(pool);
    free(model);
    free(arena);
    free(weights);
    free(gradients);
    free(tokens);
    return seconds;
}

// A micro-batch of more operations is not computed for a plan. Of the measured rate of
// products the rest of the model leaves so much (dev/results/bf16-2026-11-22.md).
#define MICRO_BATCH_MOST 3e10
#define PRODUCTS_SHARE_FP32 0.95
#define PRODUCTS_SHARE_BF16 0.78

static inline void micro_batch_by_products(Run *run, MicroBatchTime *time) {
    double operations = gpt_neo_flops_per_token(&run->config, run->T) * (double)tokens_per_micro_batch(run);
    Precision precision = run->placement.precision;
    ThreadPool *pool = thread_pool_create(run->threads.threads, false);
    if (pool == NULL) { return; }
    const bool wanted[2] = {precision == PRECISION_FP32, precision == PRECISION_BF16};
    ProductRates rates = product_rates_measure(pool, wanted, (int)int64_min(tokens_per_micro_batch(run), 1024),
                                               run->config.channels, run->config.mlp_channels, 0.3);
    thread_pool_destroy(pool);
    double share = precision == PRECISION_BF16 ? PRODUCTS_SHARE_BF16 : PRODUCTS_SHARE_FP32;
    if (!(rates.gflops[precision] > 0)) { return; }
    time->seconds = operations / (share * rates.gflops[precision] * 1e9);
    snprintf(time->reason, sizeof time->reason,
             "worked out: %.3g GFLOP at %.0f %% of the %.0f GFLOP/s that products reach here", operations / 1e9,
             100 * share, rates.gflops[precision]);
}

static inline bool find_micro_batch_time(Run *run, MicroBatchTime *time, Error *error) {
    const Options *options = &run->options;
    double operations = gpt_neo_flops_per_token(&run->config, run->T) * (double)tokens_per_micro_batch(run);
    memset(time, 0, sizeof *time);
    time->seconds = NAN;
    snprintf(time->reason, sizeof time->reason, "as --compute-ms says");
    if (options->compute_ms > 0) {
        time->seconds = options->compute_ms / 1e3;
    } else if (options->like[0] != '\0') {
        return micro_batch_of_log(options->like, time, error);
    } else if (!run->placement.on_gpu && operations <= MICRO_BATCH_MOST) {
        time->seconds = micro_batch_measure(run);
        snprintf(time->reason, sizeof time->reason, "measured here, with %d thread%s", run->threads.threads,
                 run->threads.threads == 1 ? "" : "s");
    } else if (!run->placement.on_gpu) {
        micro_batch_by_products(run, time);
    }
    return true;
}

// ---------------------------------------------------------------------------------------
// The machine

#define TCP_PAYLOAD 0.95 // of what an Ethernet carries; the rest are headers
#define HOST_MBIT 10000.0
#define HOST_US 50.0

// Of one CPU rank and of a GPU: bytes a second of passes over vectors, and of what an
// exchange needs.
#define CPU_MEMORY 12e9
#define CPU_EXCHANGE 8e9
#define GPU_MEMORY 2e12

// What an exchange by NCCL may take from the computation beside it.
#define GPU_TAKEN 0.06

static inline Machine machine_of_run(const Run *run, const MicroBatchTime *time) {
    const Options *options = &run->options;
    bool on_gpu = run->placement.on_gpu, emulated = options->host_mbit == 0 && options->link_mbit > 0;
    double mbit = options->host_mbit > 0 ? options->host_mbit : emulated ? options->link_mbit : HOST_MBIT;
    double us = options->host_us > 0 ? options->host_us : options->link_us > 0 ? options->link_us : HOST_US;
    Machine machine;
    memset(&machine, 0, sizeof machine);
    machine.host.bytes_per_second = mbit * 1e6 / 8 * (emulated ? 1 : TCP_PAYLOAD);
    machine.host.latency = us / 1e6;
    machine.inside.bytes_per_second = options->inside_mbit > 0 ? options->inside_mbit * 1e6 / 8 : INFINITY;
    machine.inside.latency = options->inside_us / 1e6;
    machine.micro_batch = time->seconds;
    machine.variation = time->variation;
    machine.slow_rank = (int)options->slow_rank;
    machine.slow_seconds = options->slow_ms / 1e3;
    machine.memory_bytes_per_second = on_gpu ? GPU_MEMORY : CPU_MEMORY;
    machine.exchange_bytes_per_second = on_gpu ? GPU_MEMORY : CPU_EXCHANGE;
    machine.taken_of_work = on_gpu ? 0 : 1;
    machine.taken_of_time = on_gpu && run->placement.uses_nccl ? GPU_TAKEN : 0;
    machine.message_seconds = on_gpu ? 1e-6 : 5e-6;
    machine.wake_seconds = on_gpu ? 10e-6 : 100e-6;
    machine.sleeps = !run->placement.uses_nccl;
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
    Options options;       // of a run under this rule
    char refused[sizeof(Error)]; // why it cannot be run so; empty: it can
    SimulatedCommit commit;
    double tokens_per_second;
    size_t bytes; // of one rank
    bool fits;    // or it is not known
} ForecastRow;

typedef struct Forecast {
    Machine machine;
    MicroBatchTime micro_batch;
    ForecastRow rows[RULE_COUNT];
    int recommended, committing; // rows: of all rules, and of those that are not local; -1: none
} Forecast;

// The run's options under another rule, with what only other rules have at its default.
static inline Options options_under_rule(const Options *options, int rule, int64_t micro_batches) {
    Options other = *options;
    other.rule = rule;
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
        const OptionSpec *option = &option_table[i];
        bool ours = option->rules == NULL || option_list_names(option->rules, RULES[rule].rule->name);
        if (!ours) { option_set_default(option, &other); }
    }
    bool adaptive = options_are_adaptive(options);
    if (adaptive && RULES[rule].rule->kind != RULE_OVERLAPPED) { other.accumulate = micro_batches; }
    if (options->rank_accumulate[0] != '\0' && other.rank_accumulate[0] == '\0') {
        other.accumulate = micro_batches;
    }
    return other;
}

// Simulates the rule of row->options. run: what it is a variant of. False: no memory.
static inline bool forecast_row(const Run *run, const Machine *machine, ForecastRow *row) {
    Run *trial = (Run *)malloc(sizeof *trial);
    Error error = {""};
    RuleFacts facts = {run->config.layers, options_are_adaptive(&row->options)};
    if (trial == NULL) { return false; }
    *trial = *run;
    trial->options = row->options;
    trial->rule = row->rule;
    memset(&trial->arena, 0, sizeof trial->arena);
    bool possible = options_check_accumulate(&trial->options, &error) &&
                    (row->rule->check == NULL ||
                     row->rule->check(options_of_rule(&trial->options), &facts, &error)) &&
                    reserve_memory(trial, training_problem(trial), &error);
    if (!possible) {
        snprintf(row->refused, sizeof row->refused, "%s", error.text);
        free(trial);
        return true;
    }
    MemoryRoom room = memory_room(trial);
    Simulation simulation;
    bucket_for_link(trial, machine_link(machine, &trial->transport));
    bool opened = simulation_open(&simulation, &trial->scheduler, machine);
    if (opened) {
        row->commit = simulation_of_rule(&simulation, row->rule);
        row->tokens_per_second =
            row->commit.micro_batches * (double)tokens_per_micro_batch(run) / row->commit.seconds;
        row->bytes = trial->arena.bytes;
        row->fits = arena_fits(&trial->arena, &room);
    }
    simulation_close(&simulation);
    free(trial->decay_ranges);
    free(trial);
    return opened;
}

// The fastest row, or one that is as fast and departs less.
static inline int forecast_choose(const Forecast *forecast, bool local_too) {
    double fastest = 0;
    int chosen = -1;
    for (int i = 0; i < RULE_COUNT; i++) {
        const ForecastRow *row = &forecast->rows[i];
        bool counts = row->refused[0] == '\0' && row->fits && (local_too || row->rule->kind != RULE_LOCAL);
        if (counts) { fastest = fmax(fastest, row->tokens_per_second); }
    }
    for (int i = 0; i < RULE_COUNT; i++) {
        const ForecastRow *row = &forecast->rows[i];
        bool counts = row->refused[0] == '\0' && row->fits && (local_too || row->rule->kind != RULE_LOCAL);
        if (!counts || !(row->tokens_per_second >= (1 - FORECAST_TOLERANCE) * fastest)) { continue; }
        bool better = chosen < 0 || row->rule->departs < forecast->rows[chosen].rule->departs;
        chosen = better ? i : chosen;
    }
    return chosen;
}

// All rules. The rule of the run comes first: with --accumulate auto it says how large the
// batch of the others is.
static inline bool forecast_make(Run *run, Forecast *forecast, Error *error) {
    memset(forecast, 0, sizeof *forecast);
    if (!find_micro_batch_time(run, &forecast->micro_batch, error)) { return false; }
    forecast->machine = machine_of_run(run, &forecast->micro_batch);
    if (isnan(forecast->micro_batch.seconds)) { return true; }
    int own = 0, size = run->transport.size;
    while (RULES[own].rule != run->rule) { own++; }
    double *shares = NULL;
    int first = options_rank_accumulate(&run->options, 0, size);
    if (run->options.rank_accumulate[0] != '\0') { shares = (double *)malloc((size_t)size * sizeof(double)); }
    for (int rank = 0; shares != NULL && rank < size; rank++) {
        shares[rank] = (double)options_rank_accumulate(&run->options, rank, size) / first;
    }
    forecast->machine.shares = shares;
    bool made = true;
    double mean = (double)options_total_accumulate(&run->options, size) / size;
    for (int i = -1; i < RULE_COUNT && made; i++) {
        int rule = i < 0 ? own : i;
        ForecastRow *row = &forecast->rows[rule];
        if (i == own) { continue; }
        row->rule = RULES[rule].rule;
        row->options = i < 0 ? run->options : options_under_rule(&run->options, rule, (int64_t)(mean + 0.5));
        forecast->machine.shares = row->options.rank_accumulate[0] != '\0' ? shares : NULL;
        made = forecast_row(run, &forecast->machine, row);
        if (i < 0 && row->refused[0] == '\0') { mean = row->commit.micro_batches / size; }
    }
    forecast->machine.shares = NULL;
    free(shares);
    forecast->recommended = forecast_choose(forecast, true);
    forecast->committing = forecast_choose(forecast, false);
    return made || error_set(error, "no memory to simulate %d ranks", size);
}

// ---------------------------------------------------------------------------------------
// Saying it

// The options of a run under this rule that are not at their defaults, as on a command line.
static inline void print_command_line(FILE *file, const Run *run, const ForecastRow *row) {
    Options defaults;
    char text[OPTION_VALUE_SIZE], word[4 * sizeof(OptionText) + 3];
    options_defaults(&defaults);
    fprintf(file, "mpirun --bind-to none -np %d ./train_gpt --optimizer %s", run->transport.size,
            row->rule->name);
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
        const OptionSpec *option = &option_table[i];
        bool of_plan = option->group == GROUP_PLAN || strcmp(option->name, "ranks") == 0 ||
                       strcmp(option->name, "gpu-memory") == 0;
        bool chosen_later = strcmp(option->name, "lr") == 0 || strcmp(option->name, "min-lr") == 0 ||
                            strcmp(option->name, "warmup") == 0 || strcmp(option->name, "weight-decay") == 0;
        if (of_plan || chosen_later || option->offset == offsetof(Options, rule) ||
            option_is_same(option, &row->options, &defaults)) {
            continue;
        }
        const char *value = option->type == OPTION_TEXT
                                ? (const char *)option_field_const(option, &row->options)
                                : option_print_value(option, &row->options, text);
        fprintf(file, " --%s %s", option->name, text_for_shell(value, word, sizeof word));
    }
    fprintf(file, "\n");
}

static inline void print_forecast_row(const ForecastRow *row, bool is_own) {
    char rate[NUMBER_TEXT_SIZE], time[NUMBER_TEXT_SIZE], waiting[NUMBER_TEXT_SIZE], size[SIZE_TEXT],
        sent[SIZE_TEXT];
    const SimulatedCommit *commit = &row->commit;
    if (row->refused[0] != '\0') {
        printf("%c %-17s not so: %s\n", is_own ? '*' : ' ', row->rule->name, row->refused);
        return;
    }
    printf("%c %-17s %8s %8s %9.0f %% %9s %10s %10s%s\n", is_own ? '*' : ' ', row->rule->name,
           human_milliseconds(1e3 * commit->seconds, time), human_count(row->tokens_per_second, rate),
           100 * commit->computing / commit->seconds, human_milliseconds(1e3 * commit->waiting, waiting),
           size_text((size_t)commit->bytes_outside, sent), size_text(row->bytes, size),
           row->fits ? "" : "  does not fit");
}

static inline void forecast_print(const Run *run, const Forecast *forecast) {
    const Machine *machine = &forecast->machine;
    char text[NUMBER_TEXT_SIZE];
    if (isnan(machine->micro_batch)) {
        printf("time             not known: a plan for a GPU needs --compute-ms, or --like and a run\n");
        return;
    }
    printf("\ntime             a micro-batch takes a rank %s (%s)\n",
           human_milliseconds(1e3 * machine->micro_batch, text), forecast->micro_batch.reason);
    printf("                 a host sends %.4g Mbit/s to others, a message takes %.3g us\n\n",
           machine->host.bytes_per_second * 8 / 1e6, 1e6 * machine->host.latency);
    printf("  %-17s %8s %8s %11s %9s %10s %10s\n", "rule", "commit", "tokens/s", "computing", "waiting",
           "host sends", "memory");
    for (int i = 0; i < RULE_COUNT; i++) {
        print_forecast_row(&forecast->rows[i], forecast->rows[i].rule == run->rule);
    }
    printf("\nA commit of the last three is an inner step. * is the rule asked for.\n");
    if (forecast->recommended < 0) {
        printf("recommended      none: nothing fits into the memory\n");
        return;
    }
    const ForecastRow *best = &forecast->rows[forecast->recommended];
    printf("recommended      %s: %s tokens/s, %.0f %% of the time computing\n", best->rule->name,
           human_count(best->tokens_per_second, text), 100 * best->commit.computing / best->commit.seconds);
    printf("                 ");
    print_command_line(stdout, run, best);
    if (forecast->committing >= 0 && forecast->committing != forecast->recommended) {
        const ForecastRow *other = &forecast->rows[forecast->committing];
        printf("or               %s, the fastest in which all ranks make every step together: %s tokens/s\n",
               other->rule->name, human_count(other->tokens_per_second, text));
        printf("                 ");
        print_command_line(stdout, run, other);
    }
}

static inline json_t *forecast_as_json(const Run *run, const Forecast *forecast) {
    const Machine *machine = &forecast->machine;
    json_t *rows = json_array();
    for (int i = 0; i < RULE_COUNT; i++) {
        const ForecastRow *row = &forecast->rows[i];
        if (row->rule == NULL || row->refused[0] != '\0') { continue; }
        const SimulatedCommit *commit = &row->commit;
        json_array_append_new(
            rows, json_pack("{s:s, s:o, s:o, s:o, s:o, s:o, s:o, s:I, s:b}", "rule", row->rule->name, "commit_ms",
                            log_real(1e3 * commit->seconds), "tokens_per_second",
                            log_real(row->tokens_per_second), "computing", log_real(commit->computing / commit->seconds),
                            "waiting_ms", log_real(1e3 * commit->waiting),
                            "micro_batches", log_real(commit->micro_batches), "host_bytes",
                            log_real(commit->bytes_outside), "memory_bytes", (json_int_t)row->bytes, "fits",
                            (int)row->fits));
    }
    int best = forecast->recommended;
    return json_pack("{s:s, s:i, s:i, s:o, s:o, s:o, s:o, s:o}", "rule", run->rule->name, "ranks",
                     run->transport.size, "hosts", run->transport.hosts.hosts, "micro_batch_ms",
                     log_real(1e3 * machine->micro_batch), "host_bytes_per_second",
                     log_real(machine->host.bytes_per_second), "host_latency", log_real(machine->host.latency),
                     "recommended", best >= 0 ? json_string(forecast->rows[best].rule->name) : json_null(),
                     "rules", rows);
}

#endif
