// plan.h: train_gpt plan: what memory a rank needs and whether it is there, how long a commit takes
// under every rule, and which rule to take.
//
// A plan makes the choices and reservations of the run itself, and ends where a run would allocate.
// Times are simulated (forecast.h) from what is measured here, by the ranks that would train
// (network.h), or was measured by a run (like.h).
#pragma once

#include "plan/forecast.h"
#include "plan/like.h"
#include "plan/network.h"
#include "plan/page.h"
#include "program/rank_pace.h"

static inline void print_memory_row(const char *indent, const char *name, size_t bytes, const char *note) {
    char size[SIZE_TEXT];
    printf("%s%-*s %10s %15zu%s\n", indent, 34 - (int)strlen(indent), name, size_text(bytes, size), bytes,
           note);
}

static inline void print_memory_verdict(const Run *run) {
    MemoryRoom room = memory_room(run);
    const Arena *arena = &run->arena;
    char needed[SIZE_TEXT], available[SIZE_TEXT], left[SIZE_TEXT];
    Error reason = {""};
    if (!fit_check(run, &room, &reason)) {
        printf("fits             no: %s\n", reason.text);
        return;
    }
    size_t bytes = arena->bytes, most = arena->on_gpu ? room.gpu : room.host;
    if (most == 0) {
        printf("fits             not known: %s\n",
               arena->on_gpu ? "there is no GPU here; --gpu-memory 80G plans for one that has 80 GB"
                             : "this system does not say how much memory is free");
        return;
    }
    printf("fits             yes: %s of the %s for this rank %s; %s are left\n", size_text(bytes, needed),
           size_text(most, available), arena->on_gpu ? "on the GPU" : "on this machine",
           size_text(most - bytes, left));
    double together = (double)bytes * run->options.ranks;
    if (!arena->on_gpu && run->options.ranks > 1 && run->transport.local_size == 1) {
        printf("                 %lld ranks on this machine would need %s, which %s\n",
               (long long)run->options.ranks, size_text((size_t)together, needed),
               together <= most ? "fits, too" : "does not fit");
    }
    Options with_blocks = run->options;
    printf("                 the largest micro-batch that fits is %lld",
           (long long)fit_micro_batch(run, &room, &run->options));
    if (fit_recompute(run, &with_blocks)) {
        printf(", with --recompute block %lld", (long long)fit_micro_batch(run, &room, &with_blocks));
    }
    printf("\n");
}

static inline void print_memory(const Run *run) {
    const Options *options = &run->options;
    const Arena *arena = &run->arena;
    double parameters = run->part.model.parameter_count;
    size_t state = 0; // bytes that do not grow with the micro-batch
    int ranks = run->transport.size, threads = run->threads.threads;
    printf("%s, %s, %d rank%s, micro-batch %lld x %lld, %s, %d thread%s: memory of one rank\n\n",
           run->config.name, options_rule(options)->name, ranks, plural(ranks),
           (long long)options->micro_batch, (long long)options->seq_len,
           run->placement.precision == PRECISION_BF16 ? "bf16" : "fp32", threads, plural(threads));
    printf("%-34s %10s %15s\n", "", "", "bytes");
    for (int i = 0; i < MEMORY_CLASS_COUNT; i++) {
        print_memory_row("", memory_class_name((MemoryClass)i), arena_class_bytes(arena, (MemoryClass)i), "");
        for (int j = 0; j < arena->count; j++) {
            const ArenaRow *row = &arena->reservations[j].row;
            bool on_host = arena->reservations[j].on_host;
            if (row->memory_class != (MemoryClass)i) { continue; }
            bool grows = i == MEMORY_ACTIVATIONS || i == MEMORY_WORKSPACE;
            state += grows || on_host ? 0 : row->bytes;
            print_memory_row("  ", row->name, row->bytes, on_host ? "  on the host" : "");
        }
    }
    print_memory_row("", arena->on_gpu ? "total on the GPU" : "total", arena->bytes, "  with alignment");
    if (arena->on_gpu) { print_memory_row("", "total on the host", arena->host_bytes, ""); }
    printf("\nper parameter    %.2f bytes; %.2f of them do not depend on the micro-batch\n",
           (double)arena->bytes / parameters, (double)state / parameters);
    if (arena->on_gpu) {
        printf("recompute        %s (%s)\n", recompute_name(run->model.settings.recompute),
               run->placement.recompute_reason);
    }
    printf("device           %s\n", run->placement.device_reason);
    print_memory_verdict(run);
}

// A command that trains as this row plans; no options of plans, and no names of one run's files.
static inline void print_command(const Run *run, const ForecastRow *row) {
    Options options = row->options, defaults;
    options_defaults(&defaults);
    for (EACH_OPTION(option)) {
        if (option->of_one_run || !option_is_of_command(option, COMMAND_TRAIN)) {
            option_set_default(option, &options);
        }
    }
    if (options.epochs == 0) { options.tokens = (int64_t)row_tokens(row); }
    if (options.inner != run->options.inner) { // a rate for AdamW is none for Muon
        options.learning_rate = defaults.learning_rate;
        options.minimum_learning_rate = defaults.minimum_learning_rate;
    }
    if (options.inner == INNER_ADAMW && !muon_suits(run, &options)) { options.inner = defaults.inner; }
    options.config[0] = '\0';     // what the file says is in the options
    defaults.rule = options.rule; // it is always named, here
    // A plan need not know where what is frozen comes from; training has to.
    bool starts = run->part.frozen_count == 0 || options_start(&options)[0] != '\0';
    if (!starts) {
        snprintf(options.model, sizeof options.model, "%s", defaults.model);
        snprintf(options.finetune, sizeof options.finetune, "DIR");
    }
    char *text = options_as_text(&options, &defaults);
    printf("                 mpirun --bind-to none -np %d ./train_gpt --optimizer %s%s\n",
           run->transport.size, options_rule(&options)->name, text);
    if (!starts) {
        printf("                 DIR: of a trained %s, as what is frozen needs\n", run->config.name);
    }
    free(text);
}

// own: the row of the rule that is asked for. Another one names its --inner, if that differs.
static inline void print_forecast_row(const ForecastRow *row, const ForecastRow *own) {
    char rate[NUMBER_TEXT_SIZE], time[NUMBER_TEXT_SIZE], waiting[NUMBER_TEXT_SIZE], size[SIZE_TEXT],
        sent[SIZE_TEXT];
    const SimulatedCommit *commit = &row->commit;
    const Rule *rule = options_rule(&row->options);
    char mark = row == own ? '*' : ' ';
    if (error_is_set(&row->refused)) {
        printf("%c %-17s not simulated: %s\n", mark, rule->name, row->refused.text);
        return;
    }
    printf("%c %-17s %8s %8s %6.2f %9.0f %% %9s %10s %10s%s%s", mark, rule->name,
           human_milliseconds(1e3 * commit->seconds, time), human_count(row->tokens_per_second, rate),
           tokens_needed(row->needs), 100 * commit->computing / commit->seconds,
           human_milliseconds(1e3 * commit->waiting, waiting), size_text((size_t)commit->bytes_outside, sent),
           size_text(row->bytes, size), rule->kind == RULE_LOCAL ? "  per inner step" : "",
           row->fits ? "" : "  does not fit");
    if (row->options.fit && row->fits) {
        printf("  --micro-batch %lld", (long long)row->options.micro_batch);
    }
    if (row->options.inner != own->options.inner) {
        printf("  --inner %s", options_choice_name(&row->options, &row->options.inner));
    }
    printf("\n");
}

// "or   RULE --name value ..., the first ...: 26.9k tokens/s, 10.0G tokens in 4d 07:15".
static inline void print_recommended(const char *word, const char *remark, const Forecast *forecast,
                                     const ForecastRow *row) {
    char *options = forecast_options(forecast, row), rate[NUMBER_TEXT_SIZE], text[NUMBER_TEXT_SIZE];
    double speed = row->tokens_per_second, tokens = row_tokens(row);
    printf("%-16s %s%s%s: %s tokens/s", word, options_rule(&row->options)->name, options, remark,
           human_count(speed, rate));
    if (tokens > 0) {
        printf(", %s tokens in %s", human_count(tokens, rate), human_duration(tokens / speed, text));
    }
    free(options);
}

// How sure the tokens are that a recommended row needs. switches: to Muon.
static inline void print_needs(const ForecastRow *row, bool switches) {
    TokensNeeded needs = row->needs;
    const char *rule = options_rule(&row->options)->name;
    bool measured = options_are_measured(&row->options);
    printf("loss             %s", measured ? "" : "at its defaults ");
    if (needs.least == 1 && needs.most == 1) {
        printf("the steps of %s equal plain data-parallel training's\n", rule);
    } else {
        char least[32] = "";
        if (needs.least < needs.most) { snprintf(least, sizeof least, "%.3g to ", needs.least); }
        printf("%s needs %s%.3g times the tokens of plain data-parallel training\n", rule, least, needs.most);
    }
    if (!measured) { printf("                 what it needs with these options was not measured\n"); }
    if (switches) {
        printf("                 Muon needs %.3g to %.3g of AdamW's tokens\n", MUON_NEEDS.least,
               MUON_NEEDS.most);
    }
    printf("                 measured on small models, not predicted (docs/simulation.md)\n");
}

static inline void print_recommendation(const Run *run, const Forecast *forecast) {
    const ForecastRow *own = &forecast->rows[forecast->own];
    if (forecast->recommended < 0) {
        printf("recommended      none: %s\n",
               error_is_set(&own->refused) ? own->refused.text : "no rule fits into the memory");
        return;
    }
    const ForecastRow *best = &forecast->rows[forecast->recommended];
    print_recommended("recommended", "", forecast, best);
    printf(", %.0f %% of the time computing\n", 100 * best->commit.computing / best->commit.seconds);
    print_command(run, best);
    if (forecast->committing >= 0 && forecast->committing != forecast->recommended) {
        const ForecastRow *other = &forecast->rows[forecast->committing];
        print_recommended("or", ", the first at a loss in which all ranks make every step together", forecast,
                          other);
        printf("\n");
        print_command(run, other);
    }
    print_needs(best, best->options.inner != own->options.inner);
}

// Prints what would reach the run's loss sooner, and how many updates the same tokens then give:
// the best way to run each rule. fits: the simulation of the run takes as long as it took. Returns
// the lines for --json.
static inline json_t *print_faster(const Forecast *forecast, bool fits) {
    const ForecastRow *own = &forecast->rows[forecast->own];
    bool told[RULE_COUNT] = {false};
    json_t *lines = json_array();
    printf("faster           by a simulation%s, the same loss would take "
           "(fewer updates may need more tokens):\n",
           fits ? " that fits this run" : ", which does not fit this run");
    while (json_array_size(lines) < 4) {
        const ForecastRow *best = own;
        for (int i = 0; i < forecast->count; i++) {
            const ForecastRow *row = &forecast->rows[i];
            bool open = !told[row->options.rule] && forecast_is_possible(row);
            if (open && row_progress(row) > row_progress(best)) { best = row; }
        }
        double gain = row_progress(best) / row_progress(own);
        double updates = own->commit.micro_batches / best->commit.micro_batches;
        if (!(gain > 1.1)) { break; } // less is not worth a line
        bool local = options_rule(&best->options)->kind == RULE_LOCAL;
        told[best->options.rule] = true;
        char *options = options_as_text(&best->options, &own->options), factor[NUMBER_TEXT_SIZE + 12];
        snprintf(factor, sizeof factor, "%.2g times the", updates);
        printf("                 %3.*f %% of this run's time:%s (%s updates%s)\n", gain > 100 ? 1 : 0,
               100 / gain, options, fabs(updates - 1) < 0.01 ? "same number of" : factor,
               local ? ", made by each rank alone" : "");
        json_array_append_new(lines, json_pack("{s:s, s:o, s:o}", "options", options + 1, "speedup",
                                               log_real(gain), "updates", log_real(updates)));
        free(options);
    }
    if (json_array_size(lines) == 0) { printf("                 nothing that was tried saves a tenth\n"); }
    return lines;
}

// "options" of a row: the options that differ from the run of its rule as asked for.
static inline json_t *forecast_as_json(const Run *run, const Forecast *forecast) {
    const Machine *machine = &forecast->machine;
    json_t *rules = json_array(), *recipes = json_array();
    const ForecastRow *best = forecast->recommended >= 0 ? &forecast->rows[forecast->recommended] : NULL;
    for (int i = 0; i < forecast->recipes_end; i++) {
        const ForecastRow *row = &forecast->rows[i];
        const SimulatedCommit *commit = &row->commit;
        if (error_is_set(&row->refused)) { continue; }
        char *options = forecast_options(forecast, row);
        json_t *object = json_pack(
            "{s:s, s:s, s:o, s:o, s:o, s:o, s:o, s:o, s:I, s:o, s:I, s:b}", "rule",
            options_rule(&row->options)->name, "options", options[0] == ' ' ? options + 1 : options,
            "tokens_needed", log_real(row_tokens_needed(row)), "commit_ms", log_real(1e3 * commit->seconds),
            "tokens_per_second", log_real(row->tokens_per_second), "computing",
            log_real(commit->computing / commit->seconds), "waiting_ms", log_real(1e3 * commit->waiting),
            "micro_batches", log_real(commit->micro_batches), "micro_batch",
            (json_int_t)row->options.micro_batch, "host_bytes", log_real(commit->bytes_outside),
            "memory_bytes", (json_int_t)row->bytes, "fits", (int)row->fits);
        free(options);
        if (row == best) { json_object_set_new(object, "recommended", json_true()); }
        json_array_append_new(i < RULE_COUNT ? rules : recipes, object);
    }
    return json_pack("{s:s, s:i, s:i, s:o, s:o, s:o, s:s?, s:o, s:o}", "rule",
                     RULES[forecast->own].rule->name, "ranks", run->transport.size, "hosts",
                     run->transport.hosts.hosts, "micro_batch_ms", log_real(1e3 * machine->micro_batch),
                     "host_bytes_per_second", log_real(machine->host.bytes_per_second), "host_latency",
                     log_real(machine->host.latency), "recommended",
                     best != NULL ? options_rule(&best->options)->name : NULL, "rules", rules, "recipes",
                     recipes);
}

// The option that asks for a file of times, as in a message; NULL: none does.
static inline const char *plan_file(const Options *options) {
    return options->json[0] != '\0' ? "--json" : options->page[0] != '\0' ? "--page" : NULL;
}

// Names the rank for which the others wait, if there is one. seconds (ranks): of a micro-batch.
static inline void plan_slow_rank(const Options *options, const Network *network, const double *seconds,
                                  int ranks) {
    SlowRank slow = rank_pace_find(options, seconds, ranks);
    if (slow.rank < 0) { return; }
    rank_pace_print(options, seconds, ranks, slow, network != NULL ? network->hellos[slow.rank].host : "",
                    17);
}

// Prints what the plan's ranks have measured, and what is odd. Returns it for --json.
static inline json_t *plan_network(const Run *run, const Network *network, Machine *machine) {
    json_t *odd = network_odd(network), *object = network_as_json(network, odd);
    network_set_machine(network, &run->options, machine);
    if (network->groups->hosts > 1) { network_print(network, odd); }
    if (machine->slowness != NULL) { // in any unit
        plan_slow_rank(&run->options, network, machine->slowness, network->groups->size);
    }
    json_decref(odd);
    return object;
}

// What the times of a plan stand on.
typedef struct PlanTimes {
    const LikeRun *like;    // the run of --like; NULL: none
    bool again;             // the plan is for that very run, whose log tells how fast its network is
    const Network *network; // that its ranks have measured; NULL: it has none
    double micro_batch;     // seconds, where --like does not say; NAN: not known
    char reason[RULE_TEXT]; // where that comes from
} PlanTimes;

static inline void plan_take_like(const Run *run, PlanTimes *times, Machine *machine) {
    const LikeRun *like = times->like;
    const Transport *transport = &run->transport;
    double tokens = tokens_per_micro_batch(run);
    bool emulated = options_emulate_link(&run->options); // between ranks of one host
    int together = emulated ? transport->size : transport->size / transport->hosts.hosts;
    like_set_machine(like, tokens, times->again, together, machine);
    if (times->again && like->rank_seconds != NULL) {
        plan_slow_rank(&run->options, NULL, like->rank_seconds, like->ranks);
    }
    snprintf(times->reason, sizeof times->reason, "as in %.200s%s", run->options.like,
             tokens != like->tokens ? ", in proportion to its tokens" : "");
}

#define PLAN_FITS 0.05 // a simulation that differs so little from its run fits it

// Of a plan for the run of --like: how many times as long as the run its simulation takes. 1: as
// long; 0: it is not simulated.
static inline double plan_misfit(const PlanTimes *times, const Forecast *forecast) {
    double simulated = forecast->rows[forecast->own].tokens_per_second,
           misfit = simulated > 0 ? times->like->tokens_per_second / simulated : 0;
    return fabs(misfit - 1) < PLAN_FITS ? 1 : misfit;
}

static inline void plan_print_links(const Run *run, const Machine *machine, const PlanTimes *times,
                                    const Forecast *forecast) {
    char text[NUMBER_TEXT_SIZE], from[96] = "";
    double misfit = times->again ? plan_misfit(times, forecast) : 0;
    if (misfit == 1) {
        snprintf(from, sizeof from, " (so that the simulation of that run takes as long as it took)");
    } else if (misfit > 0) {
        snprintf(from, sizeof from,
                 " (at best: the simulation of that run takes %.2g times as long as it took)", misfit);
    } else if (times->network != NULL && run->options.host_mbit == 0) {
        snprintf(from, sizeof from, " (measured between all ranks)");
    }
    printf("\ntime             a micro-batch takes a rank %s (%s)\n",
           human_milliseconds(1e3 * machine->micro_batch, text), times->reason);
    if (run->transport.hosts.hosts > 1) {
        printf("                 a host sends %s bits a second to the others, a message takes %.3g us%s\n\n",
               human_count(machine->host.bytes_per_second * 8, text), 1e6 * machine->host.latency, from);
    } else {
        printf("                 a rank reads and writes %s bytes a second for an exchange%s\n\n",
               human_count(machine->exchange_bytes_per_second, text), times->again ? from : "");
    }
}

// Prints what the run and its alternatives would take, and writes it to --json and --page.
static inline bool plan_time(const Run *run, PlanTimes *times, Error *error) {
    const Options *options = &run->options;
    Machine machine = machine_of_run(run, times->micro_batch);
    json_t *measured = times->network != NULL ? plan_network(run, times->network, &machine) : json_null();
    if (times->like != NULL) { plan_take_like(run, times, &machine); }
    if (isnan(machine.micro_batch)) {
        static const char advice[] = "give --gpu-tflops and its peak, --compute-ms, or --like and a run";
        printf("time             not known: a micro-batch cannot be measured here; %s\n", advice);
        const char *file = plan_file(options);
        json_decref(measured);
        return file == NULL ||
               error_set(error, "%s: what a micro-batch takes is not known: %s", file, advice);
    }
    Forecast *forecast = MEMORY_OF(Forecast, 1);
    if (times->again) { forecast_fit(run, &machine, times->like->tokens_per_second); }
    double began = clock_seconds();
    forecast_make(run, &machine, times->again, forecast);
    double seconds = clock_seconds() - began;
    plan_print_links(run, &machine, times, forecast);
    printf("  %-17s %8s %8s %6s %11s %9s %10s %10s\n", "rule", "commit", "tokens/s", "needs", "computing",
           "waiting", "host sends", "memory");
    const ForecastRow *rows = forecast->rows;
    for (int i = 0; i < RULE_COUNT; i++) { print_forecast_row(&rows[i], &rows[forecast->own]); }
    printf(
        "\n* is the rule asked for. needs: times the tokens of plain data-parallel training for a loss.\n");
    print_recommendation(run, forecast);
    json_t *object = forecast_as_json(run, forecast);
    json_object_set_new(object, "network", measured);
    if (times->again && forecast_is_possible(&forecast->rows[forecast->own])) {
        json_object_set_new(object, "faster", print_faster(forecast, plan_misfit(times, forecast) == 1));
    }
    bool written = options->json[0] == '\0' ||
                   json_dump_file(object, options->json, JSON_INDENT(1) | JSON_REAL_PRECISION(9)) == 0 ||
                   error_set(error, "--json %.300s cannot be written: %s", options->json, strerror(errno));
    if (written && options->page[0] != '\0') {
        written = page_write(run, forecast, times->reason, seconds, error);
        if (written) { printf("page             %s\n", options->page); }
    }
    json_decref(object);
    free(forecast);
    return written;
}

static inline bool plan_check_like(const Run *run, const LikeRun *like, Error *error) {
    const char *name = run->options.like;
    if (like->parameters != run->part.table.parameter_count) {
        return error_set(error,
                         "--like %.300s: that run trained a model of %.0f parameters, this plan is for %zu",
                         name, like->parameters, run->part.table.parameter_count);
    }
    return like->on_gpu == run->placement.on_gpu ||
           error_set(error, "--like %.300s: that run computed on %s, this plan is for %s", name,
                     like->on_gpu ? "a GPU" : "CPUs",
                     run->placement.on_gpu ? "a GPU" : "CPUs: --gpu-memory plans for a GPU elsewhere");
}

// Ends the program if something is wrong: on this rank or, where several measure, on any.
static inline void plan_agree(Run *run, bool good, const Error *error) {
    if (run->transport.link.start != NULL) {
        agree_or_exit(run, good, EXIT_USER_MISTAKE, error);
    } else if (!good) {
        exit_user_mistake(error);
    }
}

// The ranks of the plan: those that were started together, or as many as the options suppose.
static inline bool plan_ranks(Run *run, const LikeRun *like, Error *error) {
    Options *options = &run->options;
    Transport *transport = &run->transport;
    int started = transport->size, per_host = 1;
    if (started > 1) {
        bool agrees = options->ranks == 0 || options->ranks == started;
        options->ranks = started;
        launch_threads(transport->local_size, (int)options->threads, &run->threads);
        return agrees || error_set(error,
                                   "--ranks: %d ranks were started, and this plan measures with them; "
                                   "without mpirun a plan is for any number",
                                   started);
    }
    if (started == 1) { transport_close(transport); }
    bool as_like = like != NULL && options->ranks == 0;
    if (options->ranks == 0) { options->ranks = as_like ? like->ranks : 1; }
    if (as_like) {
        bool emulated = options_emulate_link(options) && like->ranks_of_host == like->ranks;
        per_host = emulated ? 1 : like->ranks_of_host; // ranks with an emulated link count as hosts
    }
    if (options->ranks_per_host > 0) { per_host = (int)options->ranks_per_host; }
    transport_open_supposed(transport, (int)options->ranks, per_host);
    launch_threads(1, (int)options->threads, &run->threads);
    return true;
}

// Fits the run if --fit asks for it, and reserves its memory. False: it asks for what there is not.
static inline bool plan_reserve(Run *run, Options *options, Error *error) {
    MemoryRoom room = memory_room(run);
    const Transport *transport = &run->transport;
    const char *file = plan_file(options);
    if (file != NULL && transport->size == 1) {
        return error_set(error, "%s has the times of exchanges: give --ranks 2 or more", file);
    }
    if (options->page[0] != '\0' && transport->hosts.hosts == 1) {
        return error_set(error, "--page draws the link between hosts, and all ranks of this plan are on one "
                                "host: give --ranks-per-host");
    }
    if (options->fit && !fit_options(run, options)) {
        return error_set(error, room.gpu == 0 && room.host == 0
                                    ? "--fit on: the memory is not known; --gpu-memory 80G plans for a GPU "
                                      "that has 80 GB"
                                    : "--fit on: no --micro-batch of this model fits into the memory");
    }
    run->B = (int)options->micro_batch;
    return reserve_memory(run, error);
}

static inline int command_plan(Run *run) {
    Options *options = &run->options;
    Transport *transport = &run->transport;
    Error error = {""};
    LikeRun like;
    bool measures = transport->size > 1, // its ranks were started together
        speaks = transport->rank == 0;
    if (measures) { meet_on_hosts(transport, options); }
    bool has_like = options->like[0] != '\0' && speaks,
         again = has_like && options->ranks == 0 && options->host_mbit == 0 && !measures;
    bool good = choose_device(run, true, &error) && (!has_like || like_read(options->like, &like, &error)) &&
                plan_ranks(run, has_like ? &like : NULL, &error) &&
                options_check_rank_numbers(options, transport->size, &error) && choose_model(run, &error);
    Options asked = *options; // rates are only checked: a recommended command has those that were given
    good = good && choose_rates(run, &error) && placement_choose_precision(&run->placement, options, &error);
    plan_agree(run, good, &error);
    *options = asked;
    run->placement.asked_recompute = asked.recompute;
    placement_choose_exchange(&run->placement, options, transport);
    placement_plan_gpu_exchange(&run->placement, options);
    const Hello *hellos = measures ? exchange_hellos(run) : NULL;
    good = plan_reserve(run, options, &error) && (!has_like || plan_check_like(run, &like, &error));
    plan_agree(run, good, &error);
    PlanTimes times = {.like = has_like ? &like : NULL, .again = again};
    if (speaks) { print_memory(run); }
    if (options->like[0] == '\0' && transport->size > 1) {
        times.micro_batch = micro_batch_seconds(run, times.reason);
    }
    Network network;
    if (measures) {
        fflush(stdout);
        emulate_network(transport, options);
        network = network_measure(transport, hellos, options->like[0] == '\0' ? times.micro_batch : NAN);
        times.network = &network;
    }
    bool timed = speaks && transport->size > 1;
    good = !timed || plan_time(run, &times, &error);
    plan_agree(run, good, &error);
    if (measures) { network_free(&network); }
    if (has_like) { free(like.rank_seconds); }
    scheduler_free(&run->scheduler);
    transport_close(transport);
    trained_part_free(&run->part);
    free(run->tensors);
    free(run->turn);
    return 0;
}
