// setup.h: what is decided before training, in this order: model, length, rates, memory,
// bucket size. (data.h opens the data, between model and length.)
#ifndef ACCO_PROGRAM_SETUP_H
#define ACCO_PROGRAM_SETUP_H

#include "training_problem.h"

// ---------------------------------------------------------------------------------------
// The model, and the numbers that follow from it

#define MOST_TOKENS_OF_A_MICRO_BATCH 1e9

// Micro-batches of all ranks per commit (in local rules: per inner step); with
// --accumulate auto the least possible number.
static inline int64_t nominal_micro_batches(const Run *run) {
    return options_total_accumulate(&run->options, run->transport.size);
}

// Larger models want smaller rates: GPT-3's table (Brown et al., 2020, table 2.1), and
// our own measurement for the tiny ones. Fine-tuning takes a tenth, so that what was
// learned is kept: ACCO's paper fine-tunes 2.7B with 2e-5.
static inline double automatic_learning_rate(Run *run) {
    double parameters = (double)run->table.parameter_count;
    bool finetunes = run->options.finetune[0] != '\0';
    snprintf(run->rate_reason, sizeof run->rate_reason, ", chosen for %s%.3g M parameters",
             finetunes ? "fine-tuning " : "", parameters / 1e6);
    double rate = parameters < 5e6     ? 2e-3
                  : parameters < 60e6  ? 1e-3
                  : parameters < 250e6 ? 6e-4
                  : parameters < 900e6 ? 3e-4
                                       : 1.6e-4;
    return finetunes ? rate / 10 : rate;
}

static inline bool choose_model(Run *run, Error *error) {
    Options *options = &run->options;
    const char *start = options_start(options);
    if (start[0] != '\0' && !hf_model_check_directory(start, error)) { return false; }
    // Every rank checks what it reads, but only when there is a run directory already.
    if (start[0] != '\0' && run_is_main(run) && !file_sums_check(start, error)) { return false; }
    if (!gpt_neo_config_find(start[0] != '\0' ? start : options->model, &run->config, error)) {
        return false;
    }
    int positions = run->config.positions;
    if (options->seq_len > positions) {
        return error_set(error, "--seq-len %lld is longer than the %d positions of %s: use at most %d",
                         (long long)options->seq_len, positions, run->config.name, positions);
    }
    gpt_neo_parameter_table(&run->config, &run->table);
    if (options->micro_batch == 0) { options->micro_batch = run->table.parameter_count < 5000000 ? 1 : 8; }
    run->B = (int)options->micro_batch;
    if (options->seq_len == 0) { options->seq_len = int64_min(positions, 1024); }
    run->T = (int)options->seq_len;
    // What follows counts tokens and elements in int and int64_t.
    double per_rank = (double)run->B * run->T, per_commit = per_rank * (double)nominal_micro_batches(run);
    if (per_rank > MOST_TOKENS_OF_A_MICRO_BATCH || per_commit > 1e15) {
        return error_set(
            error,
            "--micro-batch %d x --seq-len %d, %.3g tokens a commit: that is more than can be counted here",
            run->B, run->T, per_commit);
    }
    int layers = run->config.layers;
    for (int l = 0; l <= layers; l++) {
        run->layer_begins[l] = run->table.entries[gpt_neo_tensor(l, TENSOR_LN_1_WEIGHT)].offset;
    }
    return options_check_rule(options, layers, error);
}

// The ranges of the flat parameter vector that decay. Returns how many there are.
static inline int choose_decay_ranges(Run *run) {
    bool all = run->options.decay == DECAY_ALL;
    int count = 0;
    run->decay_ranges = (DecayRange *)calloc((size_t)run->table.count, sizeof *run->decay_ranges);
    for (int i = 0; i < run->table.count; i++) {
        const ParameterInfo *entry = &run->table.entries[i];
        if (entry->is_matrix || all) {
            decay_ranges_add(run->decay_ranges, &count, entry->offset, entry->offset + entry->count);
        }
    }
    return count;
}

static inline int64_t nominal_tokens_per_commit(const Run *run) {
    return nominal_micro_batches(run) * tokens_per_micro_batch(run);
}

static inline int64_t nominal_commits(const Run *run) {
    int64_t per_commit = nominal_tokens_per_commit(run);
    return (run->options.tokens + per_commit - 1) / per_commit;
}

// Fills in the rates that were left to the program, so that the saved configuration has
// them. A constant rate has no minimum. Where --epochs are still to be counted, so is a
// warm-up that is a part of them.
static inline bool choose_rates(Run *run, Error *error) {
    Options *options = &run->options;
    bool constant = options->schedule == SCHEDULE_CONSTANT;
    if (options->learning_rate == 0) { options->learning_rate = automatic_learning_rate(run); }
    if (options->minimum_learning_rate < 0 && !constant) {
        options->minimum_learning_rate = options->learning_rate / 10;
    }
    if (options->weight_decay < 0) { options->weight_decay = options->finetune[0] != '\0' ? 0 : 0.1; }
    if (options->warmup < 0 && options->epochs == 0) {
        options->warmup = int64_min(nominal_commits(run) / 20, 1000);
    }
    if (options->sequential < 0) { options->sequential = options->warmup; }
    if (options->minimum_learning_rate > options->learning_rate) {
        return error_set(error, "--min-lr %g is above the automatic --lr %g: give --lr too",
                         options->minimum_learning_rate, options->learning_rate);
    }
    return true;
}

// Tokens of one pass over the training data; 0: they are endless, or not known yet.
static inline double tokens_per_epoch(const Run *run) { return (double)run->data.training_windows * run->T; }

// What --epochs are as --tokens, which they are from now on.
static inline bool count_epochs(Run *run, Error *error) {
    Options *options = &run->options;
    double tokens = ceil(options->epochs * tokens_per_epoch(run));
    if (!(tokens <= OPTION_NO_LIMIT)) {
        return error_set(error,
                         "--epochs %g of %.300s are %.3g tokens: that is more than can be counted here",
                         options->epochs, run->data.name, tokens);
    }
    options->tokens = (int64_t)tokens;
    options->epochs = 0;
    return true;
}

// How long the run is, and what follows from that. Of a text that is still to be
// tokenized nobody knows the length: for its --epochs this is called again when there are
// tokens.
static inline bool choose_length(Run *run, Error *error) {
    Options *options = &run->options;
    double asked = options->epochs;
    if (asked > 0 && run->data.training_windows > 0 && !count_epochs(run, error)) { return false; }
    if (!choose_rates(run, error)) { return false; }
    bool counted = asked > 0 && options->epochs == 0;
    if (counted && options->tokens < nominal_tokens_per_commit(run)) {
        return error_set(
            error,
            "--epochs %g are %lld tokens, less than one commit of %lld: raise --epochs, or lower "
            "--micro-batch, --seq-len or --%saccumulate",
            asked, (long long)options->tokens, (long long)nominal_tokens_per_commit(run),
            options->rank_accumulate[0] == '\0' ? "" : "rank-");
    }
    return options_check_ranks(options, run->transport.size, run->T, error);
}

// Micro-batch gradients of all workers at which training ends.
static inline double target_gradients(const Run *run) {
    return ceil((double)run->options.tokens / (double)tokens_per_micro_batch(run));
}

// The settings that follow from the length of the run.
static inline void choose_schedule(const Run *run, SchedulerSettings *settings) {
    const Options *options = &run->options;
    bool by_commits = options->learning_rate_by == RATE_BY_COMMITS;
    double per_commit = (double)nominal_micro_batches(run);
    double total = (double)options->tokens / (double)tokens_per_micro_batch(run);
    settings->target = target_gradients(run);
    settings->rate_by_commits = by_commits;
    settings->rate.kind = (ScheduleKind)options->schedule;
    settings->rate.peak = options->learning_rate;
    settings->rate.minimum = options->minimum_learning_rate;
    settings->rate.step = by_commits ? 1 : per_commit;
    settings->rate.warmup = (double)options->warmup * settings->rate.step;
    settings->rate.total = by_commits ? total / per_commit : total;
}

// Of the random rounding of moments. Workers that step by themselves keep moments of their own,
// so each rounds them in its own way, and the mean over the workers is more exact than one.
static inline uint64_t moments_seed(const Run *run) {
    uint64_t seed = (uint64_t)run->options.seed;
    return run->rule->kind == RULE_LOCAL ? random_hash(seed, (uint64_t)run->transport.rank) : seed;
}

static inline SchedulerSettings choose_settings(Run *run) {
    const Options *options = &run->options;
    SchedulerSettings settings;
    memset(&settings, 0, sizeof settings);
    settings.kind = run->rule->kind;
    settings.replicated = run->rule->replicated;
    settings.overlap = options->overlap;
    settings.adaptive = options_are_adaptive(options);
    int own = options_rank_accumulate(options, run->transport.rank, run->transport.size);
    settings.micro_batches = own > 0 ? own : run->rule->rounds_per_commit; // auto: the least possible
    settings.sequential = options->sequential;
    settings.wire = settings.estimate_wire = (WireFormat)options->wire;
    settings.gradient_clip = options->grad_clip;
    settings.on_spike = (SpikePolicy)options->on_spike;
    settings.spike_limit = options->spike_limit;
    choose_schedule(run, &settings);
    settings.fragments = 1;
    if (run->rule->configure != NULL) { run->rule->configure(options_of_rule(options), &settings); }
    settings.optimizer.beta1 = options->beta1;
    settings.optimizer.beta2 = options->beta2;
    settings.optimizer.epsilon = options->eps;
    settings.optimizer.weight_decay = options->weight_decay;
    settings.optimizer.decay_range_count = choose_decay_ranges(run);
    settings.optimizer.decay_ranges = run->decay_ranges;
    settings.optimizer.moments = (Precision)options->moments;
    settings.optimizer.seed = moments_seed(run);
    settings.gpu = placement_gpu(&run->placement);
    settings.precision = run->placement.precision;
    settings.nccl = run->placement.uses_nccl ? &run->placement.nccl : NULL;
    settings.gathers_casts = run->placement.all_cast && rule_shards(run->rule) && settings.wire == WIRE_FP32;
    settings.keeps_casts = settings.gathers_casts && !wire_is_coarse(settings.estimate_wire);
    return settings;
}

// ---------------------------------------------------------------------------------------
// Memory and buckets

// Makes the one table of memory: what `plan` prints, what a run prints, what is allocated.
// Whether there is so much is another question (program/fit.h).
static inline bool reserve_memory(Run *run, Problem problem, Error *error) {
    const Placement *placement = &run->placement;
    SchedulerSettings settings = choose_settings(run);
    GptNeoSettings model = {run->B,
                            run->T,
                            run->threads.threads,
                            placement->on_gpu,
                            placement->precision,
                            RECOMPUTE_NONE,
                            settings.keeps_casts};
    size_t bytes = (size_t)tokens_per_micro_batch(run) * sizeof(int32_t);
    run->arena.on_gpu = placement->on_gpu;
    scheduler_reserve(&run->scheduler, &run->arena, &settings, &problem, &run->transport);
    arena_reserve_host(&run->arena, MEMORY_WORKSPACE, "tokens", bytes, &run->batch.tokens);
    arena_reserve_host(&run->arena, MEMORY_WORKSPACE, "targets", bytes, &run->batch.targets);
    if (placement->on_gpu) {
        arena_reserve_host(&run->arena, MEMORY_WORKSPACE, "next tokens", bytes, &run->next_batch.tokens);
        arena_reserve_host(&run->arena, MEMORY_WORKSPACE, "next targets", bytes, &run->next_batch.targets);
    }
    if (!placement_check_shapes(placement, &run->config, run->B, run->T, error) ||
        !placement_choose_recompute(&run->placement, &run->options, &run->config, run->arena.bytes, &model,
                                    error)) {
        return false;
    }
    gpt_neo_reserve(&run->model, &run->arena, &run->config, &model);
    return true;
}

#define BUCKET_SECONDS 300e-6 // dev/results/simulation-2026-11-22.md

// Chooses how many bytes of gradients travel together where they are sent during the
// backward pass. When the pass has ended, the last bucket is still to be waited for, so
// more buckets leave less; but each costs the latency of a message. With n buckets of an
// exchange that takes C seconds, both together are C / n + n * latency, which is least at
// n = sqrt(C / latency).
static inline void bucket_for_link(Run *run, LinkMeasure link) {
    SchedulerSettings *settings = &run->scheduler.settings;
    const Layout *layout = &run->scheduler.layout;
    double bytes = (double)layout_padded(layout) * sizeof(float);
    if (settings->kind != RULE_SYNCHRONOUS || run->transport.size == 1) { return; }
    settings->bucket = (size_t)(run->options.bucket_mb * 1e6);
    snprintf(run->bucket_reason, sizeof run->bucket_reason, "as asked for");
    if (settings->bucket > 0) { return; }
    if (run->placement.uses_nccl) {
        settings->bucket = run->placement.nccl.buffer_limit;
        snprintf(run->bucket_reason, sizeof run->bucket_reason, "what fits into NCCL's message buffers");
        return;
    }
    double share = (double)wire_bytes(settings->wire, WIRE_BLOCK) / (WIRE_BLOCK * sizeof(float));
    double passes = settings->replicated ? 2 : 1, ranks = run->transport.size;
    double seconds = passes * bytes * share * (ranks - 1) / ranks / link.rate;
    // A bucket costs more than its messages: its exchange begins and ends by itself, with
    // threads that must be woken.
    double latency = fmax(link.latency, BUCKET_SECONDS);
    double buckets = fmin(fmax(sqrt(seconds / (passes * latency)), 1), (double)layout->cells);
    settings->bucket = (size_t)(bytes / buckets);
    snprintf(run->bucket_reason, sizeof run->bucket_reason,
             "measured: %.3g us a message, %.3g MB/s; %.3g s for all of it", 1e6 * link.latency,
             link.rate / 1e6, seconds);
}

// All ranks call it and choose the same.
static inline void choose_bucket(Run *run) {
    LinkMeasure none = {0, INFINITY};
    bool measures = run->scheduler.settings.kind == RULE_SYNCHRONOUS && run->transport.size > 1 &&
                    run->options.bucket_mb == 0 && !run->placement.uses_nccl;
    bucket_for_link(run, measures ? link_measure(&run->transport) : none);
}

#endif
