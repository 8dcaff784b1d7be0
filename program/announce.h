// announce.h: how the program was built, what a run has chosen, and what came of it.
// Every choice that the program made by itself is printed with its reason. Rank 0 only.
#pragma once

#include <sys/statvfs.h>

#include "program/agreement.h"
#include "program/data.h"
#include "program/machine_rates.h"
#include "program/rank_pace.h"
#include "runtime/names.h"

// --version: gcc's __VERSION__ is a bare number; others name themselves.
static inline void print_build_facts(void) {
    char mpi[128], cuda[64], nccl[64], products[128];
    transport_mpi_version(mpi, sizeof mpi);
    gpu_version(cuda, sizeof cuda);
    nccl_version(nccl, sizeof nccl);
    bool is_number = __VERSION__[0] >= '0' && __VERSION__[0] <= '9';
    printf("acco.c %s\ncommit     %s\ncompiler   %s%s\nprocessor  %s\nproducts   %s\nMPI        %s\n"
           "CUDA       %s\nNCCL       %s\n",
           ACCO_VERSION, ACCO_REVISION[0] != '\0' ? ACCO_REVISION : "unknown", is_number ? "gcc " : "",
           __VERSION__, ACCO_PROCESSOR[0] != '\0' ? ACCO_PROCESSOR : "unknown",
           matmul_describe_library(products), mpi, cuda, nccl);
}

// Which part of the parameters Muon steps, and the rate of the others if it is another.
static inline void print_muon(const Run *run) {
    const Options *options = &run->options;
    int matrices = 0;
    size_t elements = 0;
    for (int i = 0; i < run->tensor_count; i++) {
        const OptimizerTensor *tensor = &run->tensors[i];
        if (tensor->rows == 0) { continue; }
        matrices++;
        elements += tensor->end - tensor->begin;
    }
    if (matrices > 0) {
        char rate[NUMBER_TEXT_SIZE] = "";
        if (options->muon_adamw_rate != options->learning_rate) {
            snprintf(rate, sizeof rate, " at %g", options->muon_adamw_rate);
        }
        printf("muon       %ssteps %d %s, %.0f %% of the parameters; AdamW steps the others%s\n",
               options_chose(options, &options->inner) ? "chosen for a new model and large commits: " : "",
               matrices, matrices == 1 ? "matrix" : "matrices",
               100.0 * elements / run->part.table.parameter_count, rate);
    }
}

static inline void print_batch(const Run *run) {
    const Options *options = &run->options;
    char text[NUMBER_TEXT_SIZE], total[NUMBER_TEXT_SIZE], epochs[48] = "";
    double epoch = tokens_per_epoch(&run->data);
    int ranks = run->transport.size;
    const char *commit = step_name(run->rule);
    int64_t per_commit = nominal_tokens_per_commit(run);
    int64_t commits = (options->tokens + per_commit - 1) / per_commit;
    // The last commit is whole, so that more may be trained than was asked for.
    double trained = commits * per_commit;
    if (epoch > 0) {
        snprintf(epochs, sizeof epochs, " (%.4g epoch%s)", trained / epoch, trained == epoch ? "" : "s");
    }
    // One gradient sum is left when training ends; finish() commits it.
    bool drains = run->rule->kind == RULE_OVERLAPPED && run->rule->finish != NULL;
    int64_t batches = options_total_accumulate(options, ranks);
    printf("batch      %lld micro-batch%s over %d rank%s x %d sequence%s x %d token%s = %s token%s per %s%s; "
           "%s token%s %s %s%lld %s%s%s%s\n",
           (long long)batches, batches == 1 ? "" : "es", ranks, plural(ranks), run->B, plural(run->B), run->T,
           plural(run->T), human_count(per_commit, text), plural(per_commit), commit,
           run->scheduler.settings.adaptive ? " or more (auto: as many as hide the communication)" : "",
           human_count(options->tokens, total), plural(options->tokens), options->tokens == 1 ? "is" : "are",
           run->scheduler.settings.adaptive ? "at most " : "", (long long)commits, commit, plural(commits),
           epochs, drains ? ", and one more for the gradients under way at the end" : "");
    if (run->bucket_reason[0] != '\0') {
        const Layout *layout = &run->scheduler.layout;
        size_t cells = job_bucket_cells(&run->scheduler, layout);
        printf("buckets    %zu of %.3g MB (%s)\n", (layout->cells + cells - 1) / cells,
               layout_padded(layout) / layout->cells * cells * sizeof(float) / 1e6, run->bucket_reason);
    }
    char low[NUMBER_TEXT_SIZE] = "", decay[NUMBER_TEXT_SIZE + 32] = "";
    human_count(options->decay_tokens, text);
    if (options->schedule != SCHEDULE_CONSTANT) {
        snprintf(low, sizeof low, " to %g", options->minimum_learning_rate);
        bool late =
            options->decay_tokens > 0 && options->decay_tokens < options->tokens; // not from the start
        if (late) {
            snprintf(decay, sizeof decay, " in the last %s token%s", text, plural(options->decay_tokens));
        }
    }
    printf("rate       peak %g%s, %s%s%s, warm-up %lld %s%s%s, moved by %s\n", options->learning_rate,
           run->rate_reason, options_choice_name(options, &options->schedule), low, decay,
           (long long)options->warmup, commit, plural(options->warmup),
           options->warmup > commits ? " (more than the run has: it does not reach its peak)" : "",
           options->learning_rate_by == RATE_BY_COMMITS ? "commits" : "micro-batch gradients");
    print_muon(run);
}

static inline void print_rule(const Options *options, const SchedulerSettings *settings, const char *reason) {
    const Rule *rule = options_rule(options);
    printf("rule       %s: %s%s\n", rule->name, rule->summary,
           options->overlap ? "" : "; --overlap off: no two things at a time");
    char text[RULE_TEXT], value[OPTION_VALUE_SIZE];
    const char *before = "          ", *after = "";
    for (EACH_OPTION(option)) {
        bool is_own = option->offset - offsetof(Options, rules) < sizeof(RuleOptions);
        if (!is_own || !option_is_of_rule(option, rule)) { continue; }
        printf("%s --%s %s", before, option->name, option_print_value(option, options, value));
        before = "";
        after = "\n";
    }
    printf("%s", after);
    if (rule->describe != NULL) {
        rule->describe(settings, text);
        printf("           %s\n", text);
    }
    if (reason[0] != '\0') { printf("           %s\n", reason); }
    if (options->spike_limit > 0 || options->on_spike != SPIKE_STOP) {
        printf("           a loss or gradient that is not finite");
        if (options->spike_limit > 0) { printf(", or too large by limit %g", options->spike_limit); }
        printf(": %s\n", options_choice_name(options, &options->on_spike));
    }
    if (options->sequential == 1) { printf("           the first commit is sequential\n"); }
    if (options->sequential > 1) {
        printf("           the first %lld commits are sequential\n", (long long)options->sequential);
    }
}

// The device of rank 0; other ranks may compute elsewhere.
static inline void print_device(const Run *run) {
    const Placement *placement = &run->placement;
    int threads = run->threads.threads;
    char products[128];
    printf("device     %s; %s%s\n", placement->device_reason, precision_name(placement->precision),
           placement->fp8 ? ", products of the layers in FP8" : "");
    if (placement->odd_one[0] != '\0') { printf("           %s\n", placement->odd_one); }
    if (run->reports.peak_flops > 0) {
        printf("peak       %.4g TFLOP/s over all ranks: %s; \"mfu\" in log.jsonl is the share of it\n",
               run->reports.peak_flops / 1e12,
               placement->on_gpu ? "bf16, as the maker states it" : "products of a layer, measured now");
    }
    if (placement->on_gpu) {
        printf("keeps      recompute %s (%s)\n", recompute_name(run->model.settings.recompute),
               placement->recompute_reason);
        if (run->transport.size > 1) { printf("           %s\n", placement->gpu_exchange_reason); }
        return;
    }
    printf("threads    %d per rank (%s); matrix products by %s\n", threads, run->threads.reason,
           placement->precision == PRECISION_BF16 ? matmul_describe_library(products)
                                                  : onednn_describe(products));
    const double *rates = placement->product_rates.gflops;
    if (rates[PRECISION_FP32] > 0) {
        printf("           at %.0f GFLOP/s in fp32 and %.0f in bf16%s: %s\n", rates[PRECISION_FP32],
               rates[PRECISION_BF16], run->transport.size > 1 ? " on the slowest rank" : "",
               product_rates_faster(&placement->product_rates) == PRECISION_BF16 ? "bf16 is faster"
                                                                                 : "fp32 is as fast");
    }
}

// What each host has, if there are several: known by its name, in the order of its first rank.
static inline void print_hosts(FILE *file, const Hello *hellos, int ranks) {
    enum { MOST = 16 };
    int hosts = 0;
    for (int rank = 0; rank < ranks; rank++) {
        int first = 0, mates = 0;
        while (strcmp(hellos[first].host, hellos[rank].host) != 0) { first++; }
        if (first < rank) { continue; }
        for (int other = rank; other < ranks; other++) {
            mates += strcmp(hellos[other].host, hellos[rank].host) == 0;
        }
        if (mates == ranks) { return; }
        if (hosts++ >= MOST) { continue; }
        fprintf(file, "%s %s: %d rank%s, the first is %d; %s, %d thread%s each\n",
                hosts == 1 ? "hosts     " : "          ", hellos[rank].host, mates, plural(mates), rank,
                hellos[rank].device, hellos[rank].threads, plural(hellos[rank].threads));
    }
    if (hosts > MOST) { fprintf(file, "           and %d more: log.jsonl has all\n", hosts - MOST); }
}

// Names the first rank whose program is of another commit than rank 0's, or rounds in another way.
static inline void print_builds(const Hello *hellos, int ranks) {
    for (int rank = 1; rank < ranks; rank++) {
        const Hello *odd = &hellos[rank], *first = hellos;
        bool revision = strcmp(odd->revision, first->revision) != 0,
             rounding = strcmp(odd->rounding, first->rounding) != 0;
        if (!revision && !rounding) { continue; }
        printf("builds     rank %d on %s differs from rank 0 on %s: %s\n", rank, odd->host, first->host,
               revision ? "its program is of another commit" : "it rounds in another way");
        for (int i = rank; i >= 0; i -= rank) { // both
            printf("           rank %d: commit %s; %s\n", i,
                   hellos[i].revision[0] != '\0' ? hellos[i].revision : "unknown", hellos[i].rounding);
        }
        return;
    }
}

static inline void print_model(const ModelConfig *config, const TrainedPart *part) {
    double all = part->model.parameter_count, trained = part->table.parameter_count;
    int key_heads = model_kv_heads(config);
    printf("model      %s: %.2f M parameters, %d layer%s, %d channels, %d head%s, ", config->name, all / 1e6,
           config->layers, plural(config->layers), config->channels, config->heads, plural(config->heads));
    if (key_heads < config->heads) { printf("%d of keys, ", key_heads); }
    if (config->window > 0) { printf("window %d, ", config->window); }
    printf("%d positions, vocabulary %d\n", config->positions, config->vocabulary);
    if (part->frozen_count > 0) {
        printf("trains     %.4g M parameters, %.3g %% of them: ", trained / 1e6, 100 * trained / all);
        if (part->rank == 0) { printf("what --freeze leaves\n"); }
        if (part->rank > 0) {
            int count = part->table.count / 2;
            printf("adapters of rank %d, alpha %g, on %d %s\n", part->rank, part->alpha, count,
                   count == 1 ? "matrix" : "matrices");
        }
    }
    if (config->dropout > 0) {
        printf("           no dropout: the %g of its config.json is ignored\n", config->dropout);
    }
}

// Prints each source's share, if there are several, and which sources a validation visits whole.
static inline void print_sources(Run *run) {
    const DataLoader *data = &run->data, *held = validation_loader(run);
    double samples = (double)run->options.tokens / run->T;
    for (int i = 0; i < data->source_count && data->source_count > 1; i++) {
        const DataSource *source = &data->sources[i];
        double share = data_loader_share(data, i);
        printf("           %s: %.4g %% of the samples; its %llu window%s visited %.4g times\n", source->name,
               100 * share, (unsigned long long)source->training_windows,
               source->training_windows == 1 ? " is" : "s are", share * samples / source->training_windows);
    }
    for (int i = 0; i < held->source_count; i++) {
        int64_t batches = validation_batches(run, i), asked = run->options.val_batches;
        if (batches == asked) { continue; }
        printf("           --val-batches %lld is more than there is of %s: a validation visits every "
               "held-out window once, in %lld micro-batch%s\n",
               (long long)asked, held->sources[i].name, (long long)batches, batches == 1 ? "" : "es");
    }
}

static inline void print_start(Run *run, const Hello *hellos) {
    const Options *options = &run->options;
    const Transport *transport = &run->transport;
    char data[512], warning[256];
    data_loader_describe(&run->data, data, sizeof data);
    printf("acco.c %s\n", ACCO_VERSION);
    print_model(&run->config, &run->part);
    if (run->part.frozen_count > 0 && hf_model_has(options_start(options), "../checkpoint.json")) {
        printf("           what is frozen stays in that checkpoint: keep it, its own run may remove it\n");
    }
    printf("data       %s\n", data);
    print_sources(run);
    print_rule(options, &run->scheduler.settings, run->rule_reason);
    if (transport->size == 1) {
        printf("ranks      1 (%s)\n", transport->reason);
    } else {
        printf("ranks      %d over %s (%s), ", transport->size, transport->link.name, transport->reason);
        // The format in which ranks send vectors to each other, and over what emulated link.
        const SchedulerSettings *settings = &run->scheduler.settings;
        bool two = settings->estimate_wire != settings->wire;
        printf("%s on the wire", wire_name(settings->wire));
        if (two) { printf(", %s for estimates", wire_name(settings->estimate_wire)); }
        if (settings->gathers_casts) { printf(", bf16 for the parameters that all compute with"); }
        if (options->link_mbit > 0) { printf(", at most %g Mbit/s", options->link_mbit); }
        if (options->link_us > 0) { printf(", every message %g us late", options->link_us); }
        printf("%s\n", options_emulate_link(options) ? " (emulated)" : "");
        printf("exchange   %s\n", run->placement.exchange_reason);
        print_hosts(stdout, hellos, transport->size);
        print_builds(hellos, transport->size);
    }
    print_device(run);
    print_batch(run);
    printf("memory     %.1f MB per rank:", (double)run->arena.bytes / 1e6);
    for (int i = 0; i < MEMORY_CLASS_COUNT; i++) {
        printf("%s %s %.1f", i > 0 ? "," : "", memory_class_name((MemoryClass)i),
               arena_class_bytes(&run->arena, (MemoryClass)i) / 1e6);
    }
    printf("\n");
    if (run->threads.warning[0] != '\0') { printf("warning    %s\n", run->threads.warning); }
    struct statvfs disk;
    size_t shared = statvfs("/dev/shm", &disk) == 0 ? disk.f_blocks * disk.f_frsize : 0;
    launch_judge_shared_memory(shared, transport->local_size, warning, sizeof warning);
    if (warning[0] != '\0') { printf("warning    %s\n", warning); }
    if (options->kept[0] != '\0') {
        printf("options    where %s, as in %s\n",
               options->config[0] == '\0' ? "none are given" : "the program chooses", options->kept);
    }
    // A disk that fills while a run trains does not end it, but then nothing is saved.
    if (!run->saving.times.never && statvfs(run->directory, &disk) == 0) {
        char space[SIZE_TEXT], checkpoint[SIZE_TEXT];
        printf("disk       %s free; a checkpoint takes about %s, and --keep %lld stay%s\n",
               size_text(disk.f_bavail * disk.f_frsize, space),
               size_text(checkpoint_bytes(&run->scheduler, &run->part), checkpoint), (long long)options->keep,
               options->keep == 1 ? "s" : "");
    }
    printf("run        %s\n\n", run->directory);
    fflush(stdout);
}

// Says what has been chosen, once all of it is. hellos (size): of all ranks, for the log.
static inline void announce_run(Run *run, const Hello *hellos) {
    Transport *transport = &run->transport;
    Reports *reports = &run->reports;
    reports->peak_flops = find_peak(run);
    transport->bytes_sent = transport->bytes_sent_outside = 0; // what training sends, not what led up to it
    reports->terminal = &run->terminal;
    reports->scheduler = &run->scheduler;
    reports->micro_batch_tokens = tokens_per_micro_batch(run);
    reports->token_flops = trained_flops_per_token(&run->part, &run->config, run->T);
    reports->knows_perfect = run->data.builtin;
    reports->data = &run->data;
    reports->validation_data = validation_loader(run);
    reports->validation = NAN;
    // Until now a full disk is an error.
    reports->log.patient = reports->curves.patient = reports->facts.patient = true;
    if (!run_is_main(run)) { return; }
    print_start(run, hellos);
    // The event "start" has all that is needed to repeat the run.
    json_t *ranks = json_array(), *memory = json_object();
    for (int rank = 0; rank < run->transport.size; rank++) {
        json_array_append_new(ranks,
                              json_pack("{s:o, s:i, s:i, s:i, s:o}", "host", log_text(hellos[rank].host),
                                        "pid", hellos[rank].pid, "threads", hellos[rank].threads, "cores",
                                        hellos[rank].cores, "device", log_text(hellos[rank].device)));
    }
    for (int i = 0; i < MEMORY_CLASS_COUNT; i++) {
        json_object_set_new(memory, memory_class_name((MemoryClass)i),
                            json_integer((json_int_t)arena_class_bytes(&run->arena, (MemoryClass)i)));
    }
    json_object_set_new(memory, "total", json_integer((json_int_t)run->arena.bytes));
    const double *rates = run->placement.product_rates.gflops; // 0: not measured
    json_t *gflops = rates[PRECISION_FP32] > 0 ? json_pack("{s:f, s:f}", "fp32", rates[PRECISION_FP32],
                                                           "bf16", rates[PRECISION_BF16])
                                               : json_null();
    char exchange[64], model[64];
    double epoch = tokens_per_epoch(&run->data);
    run_directory_model_name(options_model(&run->options), model);
    transport_sum_order(&run->transport, exchange, sizeof exchange);
    report_event(reports,
                 json_pack("{s:s, s:s, s:I, s:s, s:s, s:o, s:I, s:o, s:I, s:o, s:o, s:o, s:o, s:o}", "event",
                           "start", "version", ACCO_VERSION, "time", (json_int_t)time(NULL), "transport",
                           run->transport.link.name, "exchange", exchange, "model", log_text(model),
                           "parameters", (json_int_t)run->part.table.parameter_count, "epochs",
                           log_real(epoch > 0 ? (double)run->options.tokens / epoch : (double)NAN),
                           "bucket_bytes", (json_int_t)run->scheduler.settings.bucket_bytes, "measured",
                           log_text(run->rule_reason), "ranks", ranks, "memory", memory, "options",
                           options_as_json(&run->options), "product_gflops", gflops));
}

// ---- The end --------------------------------------------------------------------------

#define WAITING_SHARE 0.1 // of the time: more is worth a line at the end

// The last validation, and the best one if that was before.
static inline void print_losses(const Run *run) {
    const Reports *reports = &run->reports;
    const CheckpointedRun *checkpointed = &run->checkpointed;
    if (!isnan(reports->validation)) {
        printf("loss       %.4f nats per token on text it has not seen", reports->validation);
        if (isfinite(reports->perfect_validation)) { // known where the text comes from a grammar
            printf("; the best possible, knowing the grammar, is %.4f", reports->perfect_validation);
        }
        printf("\n");
    }
    if (checkpointed->worse > 0 && checkpointed->best_commit > 0) {
        CheckpointPaths paths = checkpoint_paths(run->directory, checkpointed->best_commit);
        bool kept = run->options.keep_best && access(paths.final, F_OK) == 0; // it was not always asked for
        printf("best       %.4f at %s %lld%s%s\n", checkpointed->best_loss, step_name(run->rule),
               (long long)checkpointed->best_commit,
               kept ? ", whose checkpoint is kept" : " (--keep-best on keeps such)",
               has_stopped_improving(run) && !has_all_tokens(run)
                   ? "; training ends, because no validation since then was better"
                   : "");
    }
}

// Prints how long ranks waited, and for whom. word: the run's directory, for a shell. times gets
// what a micro-batch of each rank took. Returns the mean share of the time a rank only waited.
static inline double print_waiting(const Run *run, const RankPace *paces, double seconds, const char *word,
                                   json_t *times) {
    int ranks = run->transport.size;
    const Hello *hellos = run->signal_watch.hellos;
    double mean = 0, least = INFINITY, *each = MEMORY_OF(double, ranks);
    for (int rank = 0; rank < ranks; rank++) {
        mean += paces[rank].exposed / ranks / seconds;
        least = fmin(least, paces[rank].exposed / seconds);
        each[rank] = paces[rank].micro_batch;
        json_array_append_new(times, log_real(1e3 * each[rank]));
    }
    SlowRank slow = rank_pace_find(&run->options, each, ranks);
    bool waits = ranks > 1 && mean > WAITING_SHARE, blames = waits && slow.rank >= 0;
    if (blames) { rank_pace_print(&run->options, each, ranks, slow, hellos[slow.rank].host, 11); }
    // A slow rank waits for the network alone.
    if (waits && (!blames || least > WAITING_SHARE)) {
        printf("network    %.0f %% of the time ranks only waited for communication; train_gpt plan --like %s "
               "says what would be faster\n",
               100 * (blames ? least : mean), word);
    }
    free(each);
    return mean;
}

// Prints and logs how training ended. paces (ranks). saved: on disk. lost_data: why it ends.
static inline void print_end(Run *run, uint64_t fingerprint, const RankPace *paces, bool saved,
                             bool lost_data) {
    long long commits = (long long)run->scheduler.optimizer.steps;
    const Reports *reports = &run->reports;
    bool stopped = run->scheduler.wishes.stop_agreed, early = has_stopped_improving(run),
         whole = has_all_tokens(run);
    double seconds = training_seconds(&run->clock),
           tokens = run->scheduler.gradients_done * reports->micro_batch_tokens;
    double planned = run->arena.bytes, used = arena_resident_bytes(&run->arena);
    double flops = tokens / seconds * reports->token_flops;
    char word[4 * RUN_PATH_SIZE + 3], share[48] = "", print[32];
    snprintf(print, sizeof print, "%016llx", (unsigned long long)fingerprint);
    text_for_shell(run->directory, word, sizeof word);
    terminal_clear(&run->terminal);
    if (run->nothing_left) {
        printf("finished   nothing is left to do: this run had its %.0f tokens%s; a larger %s continues it\n",
               tokens, early ? ", the last without a lower loss" : "",
               !early  ? "--tokens"
               : whole ? "--tokens with a larger --stop-after"
                       : "--stop-after");
    } else {
        if (reports->peak_flops > 0) {
            snprintf(share, sizeof share, ", %.1f %% of the peak", 100 * flops / reports->peak_flops);
        }
        printf("\ntrained    %lld %s%s, %.0f tokens in %.1f s: %.0f tokens/s, %.1f GFLOP/s over all "
               "ranks%s\n",
               commits, step_name(run->rule), plural(commits), tokens, seconds, tokens / seconds, flops / 1e9,
               share);
    }
    json_t *times = json_array();
    double waiting = print_waiting(run, paces, seconds - run->clock.before, word, times); // in this part
    print_losses(run);
    printf("memory     planned %.1f MB, used %.1f MB (%+.2f %%)\n", planned / 1e6, used / 1e6,
           100 * (used - planned) / planned);
    printf("parameters fingerprint %s, the same on every rank\n", print);
    report_event(
        &run->reports,
        json_pack("{s:s, s:s, s:I, s:I, s:o, s:o, s:o, s:I, s:I, s:s, s:o}", "event", "end", "reason",
                  lost_data         ? "data changed"
                  : stopped         ? "asked to stop"
                  : early && !whole ? "no lower loss"
                                    : "done",
                  "commit", (json_int_t)commits, "tokens", (json_int_t)tokens, "seconds", log_real(seconds),
                  "tokens_per_second", log_real(tokens / seconds), "exposed_share", log_real(waiting),
                  "planned_bytes", (json_int_t)planned, "used_bytes", (json_int_t)used,
                  "parameters_fingerprint", print, "rank_micro_batch_ms", times));
    if (!stopped && !lost_data) { return; }
    printf("stopped    because %s", lost_data ? "data have changed" : "it was asked to");
    bool goes_on = saved || checkpoint_newest(run->directory, INT64_MAX) >= 0;
    if (!run->saving.times.never && goes_on) {
        printf("; %scontinue with --out %s --resume auto%s", lost_data ? "put them back and " : "", word,
               saved ? "" : ", from an earlier checkpoint");
    } else if (!run->saving.times.never) {
        printf("; there is no checkpoint to continue from");
    }
    printf("\n");
}

static inline void print_files(const Run *run) {
    char word[4 * RUN_PATH_SIZE + 3];
    const char *directory = run->directory;
    if (run->saving.times.never) {
        printf("not saved  because of --save-every never: there is no checkpoint\n");
    }
    char log[RUN_PATH_SIZE + 16];
    snprintf(log, sizeof log, "%s/log.jsonl", directory);
    if (access(log, F_OK) != 0) {
        printf("\nlog        %s was removed or renamed while the run trained, and with it log, curves and "
               "settings\n",
               directory);
        return;
    }
    printf("\nlog        %s\ncurves     %s/progress.tsv", log, directory);
    if (access("scripts/plot", X_OK) == 0) { // an installed program is used elsewhere
        printf(" (scripts/plot %s makes %s/plot.html)", text_for_shell(directory, word, sizeof word),
               directory);
    }
    printf("\nsettings   %s/config.json (train_gpt --config it)\n", directory);
    if (run->options.trace[0] != '\0' && !run->trace_is_lost) {
        printf("trace      %s (https://ui.perfetto.dev opens it)\n", run->options.trace);
    }
}
