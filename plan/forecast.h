// forecast.h: how fast a run would be under its rule and under all others, and which to take.
//
// What is recommended reaches a loss first: its speed is divided by the tokens that it needs
// relative to plain training with AdamW, as measured with small models (Recipe). Among equally fast
// ones (FORECAST_TOLERANCE) it needs the fewest tokens, and then the least memory.
#pragma once

#include "kernels/cpu/product_rates.h"
#include "plan/recipes.h"
#include "plan/simulation.h"
#include "program/fit.h"
#include "program/machine_rates.h"

#define FORECAST_MOST 3e7 // micro-batches to be simulated for one rule: half a second
#define FORECAST_TOLERANCE 0.02

// ---- What a micro-batch takes ---------------------------------------------------------

// On the CPU: computes some with random parameters. NAN where memory or threads are refused.
static inline double micro_batch_measure(const Run *run, int threads) {
    ModelSettings settings = run->model.settings;
    Run *trial = trial_of(run, &run->options);
    Arena *arena = &trial->arena;
    size_t parameters = run->part.table.parameter_count, rows = tokens_per_micro_batch(run);
    float *weights, *gradients; // (parameters)
    int32_t *tokens;            // (rows)
    enum { TIMES = 5 };
    double seconds[1 + TIMES] = {0}; // the first is not counted
    Error unused;
    Stream stream = {.pool = thread_pool_create(threads, false), .precision = settings.precision};
    arena_reserve(arena, MEMORY_PARAMETERS, "parameters", parameters * sizeof(float), &weights);
    arena_reserve(arena, MEMORY_GRADIENTS, "gradients", parameters * sizeof(float), &gradients);
    arena_reserve(arena, MEMORY_WORKSPACE, "tokens", rows * sizeof(int32_t), &tokens);
    model_reserve(&trial->model, arena, &run->config, &settings);
    bool ready = arena_commit(arena, &unused);
    if (ready) {
        parameters_initialize(&run->part.table, 1, stream.pool, weights);
        for (size_t i = 0; i < run->part.frozen_count; i++) {
            real_store(run->part.frozen, i, 1e-2f * (float)(i % 7), settings.precision);
        }
        model_random_tokens(&run->config, rows, tokens);
        gemm_open(&stream, trial->model.gemm_workspace);
        for (int i = 0; i <= TIMES; i++) {
            double began = clock_seconds();
            model_gradients(&trial->model, &stream, weights, gradients, tokens, tokens, NULL);
            seconds[i] = clock_seconds() - began;
        }
    }
    arena_release(arena);
    thread_pool_destroy(stream.pool);
    trial_free(trial);
    double middle = median_of(seconds + 1, TIMES); // and sorts them
    // Alone the least counts: others may use the machine. Ranks together have what they will have.
    return !ready ? (double)NAN : run->transport.link.start != NULL ? middle : seconds[1];
}

#define MICRO_BATCH_MOST 3e10 // operations: one of more is not computed for a plan
#define GPU_SHARE 0.4         // of its peak: a careful guess, as an H100 reached 0.44 with 125M

// What recomputing layers costs, as a factor: a forward pass more, of three passes' operations.
static inline double recomputing(const Run *run) {
    return run->model.settings.recompute == RECOMPUTE_BLOCK ? 4.0 / 3 : 1;
}

// Without --like: seconds, and where they come from. NAN: not known.
static inline double micro_batch_seconds(const Run *run, char reason[RULE_TEXT]) {
    const Options *options = &run->options;
    double tokens = tokens_per_micro_batch(run);
    double operations = trained_flops_per_token(&run->part, &run->config, (int)options->seq_len) * tokens;
    Precision precision = run->placement.precision;
    // Ranks that would share a host like this one share its threads; started ones have already.
    int threads = run->threads.threads,
        each = run->transport.local_size > 1 ? 1 : (int)options->ranks_per_host;
    if (options->threads == 0 && each > 1) { threads = each < threads ? threads / each : 1; }
    snprintf(reason, RULE_TEXT, "as --compute-ms says");
    if (options->compute_ms > 0) { return options->compute_ms / 1e3; }
    if (run->placement.on_gpu) {
        double made = operations * recomputing(run),
               peak = options->gpu_tflops > 0 ? 1e12 * options->gpu_tflops : gpu_peak(&run->placement);
        snprintf(reason, RULE_TEXT, "a guess: %.3g TFLOP at %.0f %% of the GPU's peak of %.4g TFLOP/s",
                 made / 1e12, 100 * GPU_SHARE, peak / 1e12);
        return made / (GPU_SHARE * peak);
    }
    snprintf(reason, RULE_TEXT, "measured %s, with %d thread%s",
             run->transport.link.start != NULL ? "by all ranks at once" : "here", threads, plural(threads));
    if (operations <= MICRO_BATCH_MOST) { return micro_batch_measure(run, threads); }
    const bool wanted[2] = {precision == PRECISION_FP32, precision == PRECISION_BF16};
    ProductRates rates = product_rates_measure(threads, wanted, (int)fmin(tokens, 1024), run->config.channels,
                                               run->config.mlp_channels, 0.3);
    // What the rest of the model leaves of the measured rate (dev/results/bf16-2026-11-22.md).
    double share = precision == PRECISION_BF16 ? 0.78 : 0.95;
    operations *= recomputing(run);
    snprintf(reason, RULE_TEXT,
             "worked out: %.3g GFLOP at %.0f %% of the %.0f GFLOP/s that products reach here",
             operations / 1e9, 100 * share, rates.gflops[precision]);
    return rates.gflops[precision] > 0 ? operations / (share * rates.gflops[precision] * 1e9) : (double)NAN;
}

// ---- The machine ----------------------------------------------------------------------

#define TCP_PAYLOAD 0.957 // the share of Ethernet's bytes that are not headers
#define HOST_MBIT 10000.0
#define HOST_US 50.0

// Memory bandwidth in bytes/s
#define CPU_CACHED 6e10     // of a CPU rank whose state fits into its caches
#define CPU_MEMORY 1.2e10   // of a CPU rank whose state does not
#define CPU_EXCHANGE 2.5e10 // of a CPU rank that encodes and adds messages, mostly in a cache
#define GPU_MEMORY 2e12
#define CPU_CACHE 3.2e7 // bytes

// What one second of work for an exchange takes from the overlapped computation on a CPU: the
// second itself, and what it costs to switch between the two and to fill caches again.
#define CPU_TAKEN 2.0

#define NCCL_MESSAGE 6e-6 // seconds of a thread of NCCL for a message between hosts, sent and received
#define GPU_TAKEN 0.06    // what an exchange by NCCL may take from the overlapped computation

static inline bool plan_emulates(const Options *options) {
    return options->host_mbit == 0 && options->link_mbit > 0;
}

static inline void machine_set_exchange(Machine *machine, const Placement *placement, const Options *options,
                                        int ranks) {
    bool nccl = placement->uses_nccl;
    machine->taken_of_time = placement->on_gpu && nccl ? GPU_TAKEN : 0;
    machine->chunk = nccl ? (double)placement->nccl.buffer_limit / sizeof(float) / ranks : 0;
    if (nccl) { machine->message_seconds = NCCL_MESSAGE; }
    machine->sleeps = !nccl && !plan_emulates(options); // an emulated link says when to look
}

// micro_batch: seconds of one on a rank.
static inline Machine machine_of_run(const Run *run, double micro_batch) {
    const Options *options = &run->options;
    bool on_gpu = run->placement.on_gpu, emulated = plan_emulates(options);
    bool cached = (double)run->part.table.parameter_count * 4 * sizeof(float) < CPU_CACHE;
    double memory = on_gpu ? GPU_MEMORY : cached ? CPU_CACHED : CPU_MEMORY;
    double mbit = options->host_mbit > 0 ? options->host_mbit : emulated ? options->link_mbit : HOST_MBIT;
    double link_us = options->link_us > 0 || emulated ? options->link_us : HOST_US;
    double us = options->host_us > 0 ? options->host_us : link_us;
    double inside = options->inside_mbit > 0 ? options->inside_mbit * 1e6 / 8 : INFINITY;
    double flops = trained_flops_per_token(&run->part, &run->config, (int)options->seq_len) *
                   tokens_per_micro_batch(run) / micro_batch;
    Machine machine = {.host = {mbit * 1e6 / 8 * (emulated ? 1 : TCP_PAYLOAD), us / 1e6},
                       .inside = {inside, options->inside_us / 1e6},
                       .micro_batch = micro_batch,
                       .slow_seconds = options->slow_ms / 1e3,
                       .slow_rank = (int)options->slow_rank,
                       .memory_bytes_per_second = memory,
                       .exchange_bytes_per_second = on_gpu ? GPU_MEMORY : CPU_EXCHANGE,
                       .flops_per_second = flops,
                       .exchange_flops_per_second = on_gpu ? flops : flops / run->threads.threads,
                       .taken_of_work = on_gpu ? 0 : CPU_TAKEN,
                       .message_seconds = on_gpu ? 1e-6 : 5e-6,
                       .wake_seconds = on_gpu ? 10e-6 : 100e-6};
    machine_set_exchange(&machine, &run->placement, options, run->transport.size);
    return machine;
}

// ---- The rules ------------------------------------------------------------------------

typedef struct ForecastRow {
    Options options;    // of the run
    TokensNeeded needs; // over plain training with its inner optimizer
    Error refused;      // why it cannot be run or simulated so; none: it can
    SimulatedCommit commit;
    double tokens_per_second;
    size_t bytes; // of one rank
    bool fits;    // or it is not known whether it does
} ForecastRow;

enum {
    FORECAST_RECIPES = 2 * RECIPE_COUNT, // with two inner optimizers, at most
    FORECAST_VARIANTS = 8,
    FORECAST_COMMITS = 100 // that a recommended command trains for, at least
};

// What the command of a row trains on. The tokens of --epochs are not known here: 0.
static inline double row_tokens(const ForecastRow *row) {
    double micro_batch = row->options.micro_batch * row->options.seq_len;
    double least = ceil(FORECAST_COMMITS * row->commit.micro_batches * micro_batch);
    return row->options.epochs > 0 ? 0 : fmax(row->options.tokens, least);
}

typedef struct Forecast {
    Machine machine;
    // All rules as asked for, in the order of RULES; recipes that differ; variants of the run.
    ForecastRow rows[RULE_COUNT + FORECAST_RECIPES + FORECAST_VARIANTS];
    int count, own, recipes_end;
    int recommended, committing; // of rules and recipes; the latter of those that are not local; -1: none
} Forecast;

// Simulates a run whose memory was reserved.
static inline void forecast_simulate(Run *trial, const Machine *machine, ForecastRow *row) {
    const Options *options = &trial->options;
    Transport *transport = &trial->transport;
    const Groups *hosts = &transport->hosts;
    MemoryRoom room = memory_room(trial);
    int size = transport->size, own = own_micro_batches(trial);
    Machine counted = *machine;
    Simulation simulation;
    char unused[160];
    bool unequal = options->rank_accumulate[0] != '\0';
    double *counts = unequal ? MEMORY_OF(double, size) : NULL;
    for (int rank = 0; unequal && rank < size; rank++) {
        counts[rank] = (double)options_rank_accumulate(options, rank) / own;
    }
    counted.counts = counts;
    // What link_measure would find on these machines.
    double host_rate = machine->host.bytes_per_second / ceil((double)size / hosts->hosts);
    LinkMeasure link = {machine_records(machine, transport, sizeof(double)),
                        hosts->hosts > 1 ? host_rate : machine->exchange_bytes_per_second};
    bucket_for_link(&trial->scheduler, options, &trial->placement, &link, unused);
    simulation_open(&simulation, &trial->scheduler, &counted);
    double length = simulation_length(&simulation);
    if (length > FORECAST_MOST) {
        error_set(&row->refused, "%.2g micro-batches would have to be simulated, which takes too long",
                  length);
    } else {
        row->commit = simulation_of_rule(&simulation, options_rule(options));
        row->tokens_per_second =
            row->commit.micro_batches * tokens_per_micro_batch(trial) / row->commit.seconds;
        row->bytes = trial->arena.bytes;
        row->fits = arena_fits(&trial->arena, &room);
    }
    simulation_close(&simulation);
    free(counts);
}

// undo: what it sets gets its default.
static inline void recipe_apply(const Recipe *recipe, bool undo, Options *options) {
    char name[32], value[32];
    int length = 0;
    Error never;
    const char *at = recipe->options;
    for (; sscanf(at, " --%31s %31s%n", name, value, &length) == 2; at += length) {
        const OptionSpec *option = option_find(name);
        option_set(option, options, undo ? option->default_text : value, &never);
    }
}

// What a run with these options needs, over plain training with its inner optimizer: as measured
// for the recipe that it follows, else for the rule's defaults.
static inline TokensNeeded options_needs(const Options *options) {
    const Recipe *followed = NULL;
    for (int i = 0; i < RECIPE_COUNT; i++) {
        if (RECIPES[i].rule != options_rule(options)) { continue; }
        Options other = *options;
        recipe_apply(&RECIPES[i], false, &other);
        if (options_are_same(&other, options)) { followed = &RECIPES[i]; }
    }
    assert(followed != NULL && "a rule without a row in RECIPES");
    TokensNeeded needs = options->inner == INNER_MUON ? followed->with_muon : followed->with_adamw;
    double pairs = options_rule(options)->kind == RULE_LOCAL ? (double)options->ranks / 2 : 1;
    needs.least = 1 + pairs * (needs.least - 1);
    needs.most = 1 + pairs * (needs.most - 1);
    return needs;
}

// Whether that was measured with these options: of all that recipes name, each is at its default,
// or they are as in a recipe.
static inline bool options_are_measured(const Options *options) {
    Options plain = *options;
    bool measured = false;
    for (int i = 0; i < RECIPE_COUNT; i++) { recipe_apply(&RECIPES[i], true, &plain); }
    for (int i = 0; i < RECIPE_COUNT; i++) {
        Options other = plain;
        recipe_apply(&RECIPES[i], false, &other);
        measured |= RECIPES[i].rule == options_rule(options) && options_are_same(&other, options);
    }
    return measured;
}

// What `run` would do with these options. A micro-batch of another size takes as long for a token.
static inline void forecast_row(const Run *run, const Machine *machine, const Options *options,
                                ForecastRow *row) {
    memset(row, 0, sizeof *row);
    row->options = *options;
    row->needs = options_needs(options);
    bool valid = options_check(options, &row->refused) &&
                 options_check_rule(options, run->config.layers, &row->refused);
    Run *trial = valid ? trial_reserve(run, options, &row->refused) : NULL;
    if (trial != NULL) {
        Machine scaled = *machine;
        scaled.micro_batch *=
            (double)options->micro_batch / run->options.micro_batch * recomputing(trial) / recomputing(run);
        forecast_simulate(trial, &scaled, row);
    }
    trial_free(trial);
}

static inline bool forecast_is_possible(const ForecastRow *row) {
    return !error_is_set(&row->refused) && row->fits;
}

// Sets the rate of the link between hosts, or of what ranks do for an exchange where there is one
// host, so that the run makes as many tokens a second as it did.
static inline void forecast_fit(const Run *run, Machine *machine, double tokens_per_second) {
    bool outside = run->transport.hosts.hosts > 1;
    double *rate = outside ? &machine->host.bytes_per_second : &machine->exchange_bytes_per_second;
    double low = log(1e3), high = log(1e12);
    ForecastRow *row = MEMORY_OF(ForecastRow, 1);
    for (int halving = 0; halving < 20; halving++) {
        *rate = exp((low + high) / 2);
        forecast_row(run, machine, &run->options, row);
        *(row->tokens_per_second < tokens_per_second ? &low : &high) = log(*rate);
    }
    free(row);
}

// Plain training with Muon over AdamW: measured with 4 k and 16 k tokens a commit (claim M1).
static const TokensNeeded MUON_NEEDS = {0.23, 0.6};

// The middle of what was measured: a factor, so the geometric mean.
static inline double tokens_needed(TokensNeeded needs) { return sqrt(needs.least * needs.most); }

// Over plain training with AdamW.
static inline double row_tokens_needed(const ForecastRow *row) {
    return tokens_needed(row->needs) * (row->options.inner == INNER_MUON ? tokens_needed(MUON_NEEDS) : 1);
}

// How fast a run approaches a loss: tokens of plain training a second.
static inline double row_progress(const ForecastRow *row) {
    return row->tokens_per_second / row_tokens_needed(row);
}

// Of all rules and recipes, of those that are not local, or of those of the rule with this number.
enum { CHOOSE_ANY = -1, CHOOSE_COMMITTING = -2 };

static inline int forecast_choose(const Forecast *forecast, int wanted) {
    const ForecastRow *rows = forecast->rows;
    double progress[RULE_COUNT + FORECAST_RECIPES], first = 0; // progress: 0 where it is not allowed
    int chosen = -1;
    for (int i = 0; i < forecast->recipes_end; i++) {
        bool local = options_rule(&rows[i].options)->kind == RULE_LOCAL;
        bool allowed = forecast_is_possible(&rows[i]) &&
                       (wanted == CHOOSE_ANY || (wanted == CHOOSE_COMMITTING && !local) ||
                        wanted == rows[i].options.rule);
        progress[i] = allowed ? row_progress(&rows[i]) : 0;
        first = fmax(first, progress[i]);
    }
    for (int i = 0; i < forecast->recipes_end; i++) {
        if (!(progress[i] > 0 && progress[i] >= (1 - FORECAST_TOLERANCE) * first)) { continue; }
        double more = chosen < 0 ? -1 : row_tokens_needed(&rows[i]) - row_tokens_needed(&rows[chosen]);
        if (more < 0 || (!(more > 0) && rows[i].bytes < rows[chosen].bytes)) { chosen = i; }
    }
    return chosen;
}

// A row for a run with another rule or inner optimizer than the plan's, which NCCL may not be able
// to serve, or alone.
static inline void forecast_alternative(const Run *run, Options *options, const Machine *machine,
                                        ForecastRow *row) {
    Run *other = trial_of(run, &run->options);
    Machine counted = *machine;
    placement_plan_gpu_exchange(&other->placement, options);
    machine_set_exchange(&counted, &other->placement, options, run->transport.size);
    if (options->fit) {
        options->recompute = run->placement.asked_recompute;
        fit_options(other, options);
    }
    forecast_row(other, &counted, options, row);
    trial_free(other);
}

// Every rule in the other ways that were measured; of a new model that has AdamW, with Muon, too,
// unless these ranks would be refused (exchange_hellos).
static inline void forecast_add_recipes(const Run *run, Forecast *forecast) {
    bool is_new = model_is_new(run, &run->options);
    for (int i = 0; i < RULE_COUNT * RECIPE_COUNT; i++) {
        const ForecastRow *asked = &forecast->rows[i / RECIPE_COUNT];
        const Recipe *recipe = &RECIPES[i % RECIPE_COUNT];
        bool with_muon = is_new && asked->options.inner == INNER_ADAMW &&
                         (run->placement.all_round_alike || !recipe->rule->replicated);
        if (error_is_set(&asked->refused) || recipe->rule != options_rule(&asked->options)) { continue; }
        for (int muon = 0; muon <= with_muon; muon++) {
            Options other = asked->options;
            if (muon) { other.inner = INNER_MUON; }
            if (options_are_adaptive(&other)) {
                other.accumulate = (int64_t)(asked->commit.micro_batches / run->transport.size + 0.5);
            }
            recipe_apply(recipe, false, &other);
            if (options_are_same(&other, &asked->options)) { continue; }
            ForecastRow *row = &forecast->rows[forecast->count++];
            forecast_alternative(run, &other, &forecast->machine, row);
        }
    }
}

// The run's own rule with coarser wires, a coarser estimate, larger batches, and overlap.
static inline void forecast_add_variants(const Run *run, Forecast *forecast) {
    const OptionSpec *estimate = option_find("estimate-wire");
    Options variants[FORECAST_VARIANTS];
    int count = 0;
    Error never;
    for (int i = 0; i < FORECAST_VARIANTS; i++) { variants[i] = run->options; }
    for (int wire = WIRE_BF16; wire <= WIRE_INT8; wire++) {
        if (wire > run->options.wire) { variants[count++].wire = wire; }
    }
    if (option_list_names(estimate->rules, options_rule(&run->options)->name)) {
        option_set(estimate, &variants[count++], "int4", &never);
    }
    bool fixed = run->options.rank_accumulate[0] == '\0' && run->options.accumulate > 0;
    for (int factor = 2; fixed && factor <= 4; factor *= 2) { variants[count++].accumulate *= factor; }
    if (!run->options.overlap) { variants[count++].overlap = true; }
    for (int i = 0; i < count; i++) {
        forecast_row(run, &forecast->machine, &variants[i], &forecast->rows[forecast->count++]);
    }
}

// All rules, the run's first: with --accumulate auto it says how large the others' batch is. What
// another rule does not have is at its default. variants: also the run's own rule otherwise.
static inline void forecast_make(const Run *run, const Machine *machine, bool variants, Forecast *forecast) {
    int size = run->transport.size, own = run->options.rule;
    Error unused;
    memset(forecast, 0, sizeof *forecast);
    forecast->machine = *machine;
    forecast->own = own;
    forecast->count = RULE_COUNT;
    ForecastRow *row = &forecast->rows[own];
    forecast_row(run, machine, &run->options, row);
    double total = error_is_set(&row->refused) ? options_total_accumulate(&run->options, size)
                                               : row->commit.micro_batches;
    for (int rule = 0; rule < RULE_COUNT; rule++) {
        if (rule == own) { continue; }
        Options options = run->options;
        options.rule = rule;
        bool chosen = options_chose(&options, &options.inner);
        if (chosen && !muon_suits(run, &options)) { options.inner = INNER_ADAMW; }
        for (EACH_OPTION(option)) {
            if (!option_is_of_rule(option, RULES[rule].rule)) { option_set_default(option, &options); }
        }
        if (!options_check_columns(&options, &unused)) { // it has a format of its own
            option_set_default(option_find("wire"), &options);
            option_set_default(option_find("exchange"), &options);
        }
        bool lost_list = run->options.rank_accumulate[0] != '\0' && options.rank_accumulate[0] == '\0';
        if (options_are_adaptive(&run->options) || lost_list) {
            options.accumulate = (int64_t)(total / size + 0.5);
        }
        forecast_alternative(run, &options, machine, &forecast->rows[rule]);
    }
    forecast_add_recipes(run, forecast);
    forecast->recipes_end = forecast->count;
    if (variants) { forecast_add_variants(run, forecast); }
    forecast->recommended = forecast_choose(forecast, CHOOSE_ANY);
    forecast->committing = forecast_choose(forecast, CHOOSE_COMMITTING);
}

// " --name value" for every option of the run's rule that is not as in `reference`, as in a shell;
// for the caller to free.
static inline char *options_as_text(const Options *options, const Options *reference) {
    char *text = NULL, value[OPTION_VALUE_SIZE], quoted[4 * sizeof(OptionText) + 3];
    size_t length = 0;
    FILE *memory = open_memstream(&text, &length);
    for (EACH_OPTION(option)) {
        bool ours = option_is_of_rule(option, options_rule(options));
        if (!ours || option_is_same(option, options, reference)) { continue; }
        fprintf(memory, " --%s %s", option->name,
                text_for_shell(option_print_value(option, options, value), quoted, sizeof quoted));
    }
    fclose(memory);
    return text;
}

// The options of a row that differ from the run of its rule as asked for; for the caller to free.
static inline char *forecast_options(const Forecast *forecast, const ForecastRow *row) {
    return options_as_text(&row->options, &forecast->rows[row->options.rule].options);
}
