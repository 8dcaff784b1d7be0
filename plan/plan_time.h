// plan_time.h: the second half of train_gpt plan: what a micro-batch takes, what follows from
// it for every rule, and which to take, as a table and as JSON.
#ifndef ACCO_PLAN_PLAN_TIME_H
#define ACCO_PLAN_PLAN_TIME_H

#include "kernels/cpu/product_rates.h"
#include "plan/like.h"

// ---------------------------------------------------------------------------------------
// What a micro-batch takes

enum { MICRO_BATCH_TRIES = 5 };

// Threads of a rank, where several share a host as large as this one.
static inline int plan_threads(const Run *run) {
    int threads = run->threads.threads, each = (int)run->options.ranks_per_host;
    if (run->options.threads > 0 || each <= 1) { return threads; }
    return each < threads ? threads / each : 1;
}

// On the CPU: computes some with random parameters. NAN where there is no memory.
static inline double micro_batch_measure(Run *run) {
    GptNeoSettings settings = run->model.settings;
    GptNeo *model = (GptNeo *)malloc(sizeof *model);
    Arena *arena = (Arena *)calloc(1, sizeof *arena);
    ThreadPool *pool = thread_pool_create(plan_threads(run), false);
    size_t parameters = run->table.parameter_count, rows = (size_t)tokens_per_micro_batch(run);
    float *weights = (float *)malloc(parameters * sizeof(float)), *gradients = (float *)calloc(parameters, 4);
    int32_t *tokens = (int32_t *)malloc(rows * sizeof(int32_t));
    double tries[MICRO_BATCH_TRIES], seconds = NAN;
    Error unused;
    Stream stream;
    memset(&stream, 0, sizeof stream);
    stream.pool = pool;
    stream.precision = settings.precision;
    bool ready = model != NULL && arena != NULL && pool != NULL && weights != NULL && gradients != NULL &&
                 tokens != NULL;
    if (ready) {
        gpt_neo_reserve(model, arena, &run->config, &settings);
        ready = arena_commit(arena, &unused);
    }
    if (ready) {
        gpt_neo_initialize(&run->table, 1, pool, weights);
        gpt_neo_random_tokens(&run->config, rows, tokens);
        for (int i = -1; i < MICRO_BATCH_TRIES; i++) {
            double began = clock_seconds();
            gpt_neo_gradients(model, &stream, weights, gradients, tokens, tokens, NULL);
            if (i >= 0) { tries[i] = clock_seconds() - began; }
        }
        seconds = tries[0]; // the least: others may use the machine, too
        for (int i = 1; i < MICRO_BATCH_TRIES; i++) { seconds = fmin(seconds, tries[i]); }
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

// Seconds; NAN where they cannot be measured.
static inline double micro_batch_by_products(Run *run, char reason[RULE_TEXT]) {
    double operations = gpt_neo_flops_per_token(&run->config, run->T) * (double)tokens_per_micro_batch(run);
    Precision precision = run->placement.precision;
    ThreadPool *pool = thread_pool_create(plan_threads(run), false);
    if (pool == NULL) { return NAN; }
    const bool wanted[2] = {precision == PRECISION_FP32, precision == PRECISION_BF16};
    ProductRates rates =
        product_rates_measure(pool, wanted, (int)int64_min(tokens_per_micro_batch(run), 1024),
                              run->config.channels, run->config.mlp_channels, 0.3);
    thread_pool_destroy(pool);
    double share = precision == PRECISION_BF16 ? PRODUCTS_SHARE_BF16 : PRODUCTS_SHARE_FP32;
    if (!(rates.gflops[precision] > 0)) { return NAN; }
    snprintf(reason, RULE_TEXT,
             "worked out: %.3g GFLOP at %.0f %% of the %.0f GFLOP/s that products reach here",
             operations / 1e9, 100 * share, rates.gflops[precision]);
    return operations / (share * rates.gflops[precision] * 1e9);
}

// Without --like: seconds, and where they come from. NAN: not known.
static inline double find_micro_batch_seconds(Run *run, char reason[RULE_TEXT]) {
    double operations = gpt_neo_flops_per_token(&run->config, run->T) * (double)tokens_per_micro_batch(run);
    snprintf(reason, RULE_TEXT, "as --compute-ms says");
    if (run->options.compute_ms > 0) { return run->options.compute_ms / 1e3; }
    if (run->placement.on_gpu) { return NAN; }
    if (operations > MICRO_BATCH_MOST) { return micro_batch_by_products(run, reason); }
    int threads = plan_threads(run);
    snprintf(reason, RULE_TEXT, "measured here, with %d thread%s", threads, threads == 1 ? "" : "s");
    return micro_batch_measure(run);
}

// What the machines cost, from --like or without it.
static inline bool plan_machine(Run *run, Machine *machine, char reason[RULE_TEXT], Error *error) {
    if (run->options.like[0] == '\0') {
        *machine = machine_of_run(run, find_micro_batch_seconds(run, reason));
        return true;
    }
    LikeRun like;
    if (!like_read(run, &like, error)) { return false; }
    *machine = machine_of_run(run, like.micro_batch);
    like_set_machine(run, &like, machine);
    snprintf(reason, RULE_TEXT, "as in %.200s%s", run->options.like,
             (double)tokens_per_micro_batch(run) != like.tokens ? ", in proportion to its tokens" : "");
    return true;
}

// ---------------------------------------------------------------------------------------
// Saying it

// At least so many commits are what a recommended command trains for.
enum { PLAN_COMMITS = 100 };

// The options of a run under this rule that are not at their defaults, as on a command line.
static inline void print_command_line(FILE *file, const Run *run, const Options *asked,
                                      const ForecastRow *row) {
    char words[OPTION_SHELL_TEXT];
    Options defaults;
    options_defaults(&defaults);
    fprintf(file, "mpirun --bind-to none -np %d ./train_gpt --optimizer %s", run->transport.size,
            row->rule->name);
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
        const OptionSpec *option = &option_table[i];
        const Options *options = option->advice == ADVISED_IF_GIVEN ? asked : &row->options;
        bool advised = option->advice != NOT_ADVISED && option_is_of_command(option, COMMAND_TRAIN);
        if (!advised || option_is_same(option, options, &defaults)) { continue; }
        fprintf(file, " %s", option_for_shell(option, &row->options, words));
    }
    double least = PLAN_COMMITS * row->commit.micro_batches * (double)tokens_per_micro_batch(run);
    double tokens = fmax((double)row->options.tokens, ceil(least));
    if (row->options.epochs == 0 && tokens != (double)defaults.tokens) {
        fprintf(file, " --tokens %.0f", tokens);
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

// asked: the options as the user gave them.
static inline void forecast_print(const Run *run, const Options *asked, const Forecast *forecast,
                                  const char *reason) {
    const Machine *machine = &forecast->machine;
    char text[NUMBER_TEXT_SIZE];
    printf("\ntime             a micro-batch takes a rank %s (%s)\n",
           human_milliseconds(1e3 * machine->micro_batch, text), reason);
    printf("                 a host sends %s bits a second to the others, a message takes %g us\n\n",
           human_count(machine->host.bytes_per_second * 8, text), 1e6 * machine->host.latency);
    printf("  %-17s %8s %8s %11s %9s %10s %10s\n", "rule", "commit", "tokens/s", "computing", "waiting",
           "host sends", "memory");
    for (int i = 0; i < RULE_COUNT; i++) {
        print_forecast_row(&forecast->rows[i], forecast->rows[i].rule == run->rule);
    }
    char local[RULE_TEXT];
    printf("\nA commit of %s is an inner step. * is the rule asked for.\n", rule_list(rule_is_local, local));
    if (forecast->recommended < 0) {
        printf("recommended      none: no rule fits into the memory and can be simulated\n");
        return;
    }
    const ForecastRow *best = &forecast->rows[forecast->recommended];
    printf("recommended      %s: %s tokens/s, %.0f %% of the time computing\n", best->rule->name,
           human_count(best->tokens_per_second, text), 100 * best->commit.computing / best->commit.seconds);
    printf("                 ");
    print_command_line(stdout, run, asked, best);
    if (forecast->committing >= 0 && best->rule->kind == RULE_LOCAL) {
        const ForecastRow *other = &forecast->rows[forecast->committing];
        printf("or               %s, the fastest in which all ranks make every step together: %s tokens/s\n",
               other->rule->name, human_count(other->tokens_per_second, text));
        printf("                 ");
        print_command_line(stdout, run, asked, other);
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
            rows, json_pack("{s:s, s:i, s:o, s:o, s:o, s:o, s:o, s:o, s:I, s:b}", "rule", row->rule->name,
                            "departs", row->rule->departs, "commit_ms", log_real(1e3 * commit->seconds),
                            "tokens_per_second", log_real(row->tokens_per_second), "computing",
                            log_real(commit->computing / commit->seconds), "waiting_ms",
                            log_real(1e3 * commit->waiting), "micro_batches", log_real(commit->micro_batches),
                            "host_bytes", log_real(commit->bytes_outside), "memory_bytes",
                            (json_int_t)row->bytes, "fits", (int)row->fits));
    }
    int best = forecast->recommended;
    return json_pack("{s:s, s:i, s:i, s:o, s:o, s:o, s:o, s:o}", "rule", run->rule->name, "ranks",
                     run->transport.size, "hosts", run->transport.hosts.hosts, "micro_batch_ms",
                     log_real(1e3 * machine->micro_batch), "host_bytes_per_second",
                     log_real(machine->host.bytes_per_second), "host_latency",
                     log_real(machine->host.latency), "recommended",
                     best >= 0 ? json_string(forecast->rows[best].rule->name) : json_null(), "rules", rows);
}

// Prints what the run and its alternatives would take, and writes it to --json.
static inline bool plan_time(Run *run, const Options *asked, Error *error) {
    Forecast *forecast = (Forecast *)malloc(sizeof *forecast);
    Machine machine;
    char reason[RULE_TEXT];
    if (forecast == NULL) { return error_set(error, "no memory for a forecast"); }
    bool made = plan_machine(run, &machine, reason, error);
    if (made && isnan(machine.micro_batch)) {
        printf(
            "time             not known: a micro-batch cannot be measured here; give --compute-ms, or --like "
            "and a run\n");
        made =
            run->options.json[0] == '\0' ||
            error_set(error, "--json: there are no times to write, because what a micro-batch takes is not "
                             "known: give --compute-ms or --like");
    } else if (made) {
        made = forecast_make(run, &machine, forecast, error);
        if (made) { forecast_print(run, asked, forecast, reason); }
        if (made && run->options.json[0] != '\0') {
            json_t *object = forecast_as_json(run, forecast);
            made =
                json_dump_file(object, run->options.json, JSON_INDENT(1) | JSON_REAL_PRECISION(9)) == 0 ||
                error_set(error, "--json %.300s cannot be written: %s", run->options.json, strerror(errno));
            json_decref(object);
        }
    }
    free(forecast);
    return made;
}

#endif
