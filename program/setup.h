// setup.h: what is decided before training, in this order: model, length, rates, memory,
// bucket size. (data.h opens the data, between model and length.)
#pragma once

#include "comm/probe.h"
#include "program/agreement.h"

// What is trained. Frozen tensors must come from somewhere, though a plan need not know where.
static inline bool choose_part(const Options *options, const ModelConfig *config, TrainedPart *part,
                               Error *error) {
    TrainedChoice choice = {.freeze = options->freeze,
                            .adapted = options->lora_on,
                            .rank = (int)options->lora_rank,
                            .alpha = options->lora_alpha};
    const char *start = options_start(options);
    if (!trained_part_make(part, config, &choice, error)) { return false; }
    if (part->frozen_count == 0 || options->command == COMMAND_PLAN) { return true; }
    if (start[0] == '\0') {
        return error_set(error, "--%s needs a model that is trained: give --finetune DIR or --from DIR",
                         choice.rank > 0 ? "lora-rank" : "freeze");
    }
    return choice.rank == 0 || !hf_model_has(start, ADAPTERS_CONFIG) ||
           error_set(error,
                     "%.300s has adapters already: merge them first, by train_gpt export --from RUN --to DIR",
                     start);
}

typedef struct DeviceRecord {
    char rounding[sizeof((Placement *)0)->rounding];
    bool on_gpu;
} DeviceRecord;

// Collective: finds the device, and what is said of all ranks' devices.
static inline bool choose_device(Run *run, bool plan, Error *error) {
    Placement *placement = &run->placement;
    Transport *transport = &run->transport;
    bool good = placement_choose_device(placement, &run->options, transport->local_rank, plan, error);
    placement->all_on_gpus = placement->on_gpu;
    placement->all_round_alike = true;
    if (transport->size <= 1) { return good; } // also a plan's, whose ranks are supposed
    DeviceRecord mine = {"", placement->on_gpu};
    memcpy(mine.rounding, placement->rounding, sizeof mine.rounding);
    DeviceRecord *all = (DeviceRecord *)transport_collect_records(transport, "devices", &mine, sizeof mine);
    for (int rank = 0; rank < transport->size; rank++) {
        placement->all_on_gpus &= all[rank].on_gpu;
        placement->all_round_alike &= strcmp(all[rank].rounding, mine.rounding) == 0;
    }
    free(all);
    return good;
}

// Whether these options train all of a model from its beginning.
static inline bool model_is_new(const Run *run, const Options *options) {
    return options_start(options)[0] == '\0' && run->part.frozen_count == 0;
}

// Whether --inner auto is Muon with these options. Where a commit has 16 k tokens Muon needs a
// quarter to a half of AdamW's commits, with 0.28 M to 32 M parameters; with fewer tokens it gains
// less, and its step takes a larger part of the time (dev/results/muon-adamw-rate-2026-11-29.md).
// A --lr that is given may be meant for AdamW, and a model that AdamW has trained was not measured.
// Not all ranks suit it: whole matrices travel among GPUs without NCCL (placement_uneven), and
// ranks that repeat each other's steps must round alike (exchange_hellos).
static inline bool muon_suits(const Run *run, const Options *options) {
    const Rule *rule = options_rule(options);
    const Placement *placement = &run->placement;
    int64_t per_commit =
        options_total_accumulate(options, run->transport.size) * options->micro_batch * options->seq_len;
    bool ranks_suit = run->transport.size == 1 || ((rule->kind == RULE_LOCAL || !placement->all_on_gpus) &&
                                                   (!rule->replicated || placement->all_round_alike));
    return model_is_new(run, options) && per_commit >= 16384 && ranks_suit &&
           option_is_open(option_at(options, &options->learning_rate), options);
}

// How the optimizer sees the tensors of what is trained.
static inline void choose_tensors(Run *run) {
    const ParameterTable *table = &run->part.table;
    run->tensors = MEMORY_OF(OptimizerTensor, TRAINING_PARTS * table->count);
    run->tensor_count = training_tensors(table, run->options.decay == DECAY_ALL,
                                         run->options.inner == INNER_MUON, run->tensors);
}

// How many micro-batches each rank has in a commit, where these are given.
static inline void choose_turn(Run *run) {
    int size = run->transport.size;
    if (run->options.rank_accumulate[0] == '\0') { return; }
    run->turn = MEMORY_OF(int, size);
    for (int rank = 0; rank < size; rank++) {
        run->turn[rank] = options_rank_accumulate(&run->options, rank);
    }
}

static inline bool choose_model(Run *run, Error *error) {
    Options *options = &run->options;
    const char *start = options_start(options);
    char base[PATH_MAX]; // adapters are of another directory's model, and peft's have no config.json
    Adapters adapters;
    bool starts = start[0] != '\0', adapted = starts && hf_model_has(start, ADAPTERS_CONFIG);
    // Every rank checks what it reads, but only when there is a run directory already.
    bool good = (!starts || hf_model_check_directory(start, error)) &&
                (!starts || !run_is_main(run) || file_sums_check(start, error)) &&
                (!adapted || (adapters_read_config(start, &adapters, base, error) &&
                              hf_model_check_directory(base, error)));
    if (!good || !model_find(adapted ? base : options_model(options), &run->config, error)) { return false; }
    int positions = run->config.positions;
    if (options->seq_len > positions) {
        return error_set(error, "--seq-len %lld is longer than the %d positions of %s: use at most %d",
                         (long long)options->seq_len, positions, run->config.name, positions);
    }
    TrainedPart *part = &run->part;
    if (!choose_part(options, &run->config, part, error)) { return false; }
    choose_turn(run);
    if (options_leave(options, &options->micro_batch)) {
        options->micro_batch = part->model.parameter_count < 5000000 ? 1 : 8;
    }
    run->B = (int)options->micro_batch;
    if (options_leave(options, &options->seq_len)) { options->seq_len = int64_min(positions, 1024); }
    run->T = (int)options->seq_len;
    // What follows counts tokens and elements in int and int64_t.
    double per_rank = (double)run->B * run->T,
           per_commit = per_rank * options_total_accumulate(options, run->transport.size);
    if (per_rank > MOST_TOKENS_OF_A_MICRO_BATCH || per_commit > 1e15) {
        return error_set(
            error,
            "--micro-batch %d x --seq-len %d, %.3g tokens a commit: that is more than can be counted here",
            run->B, run->T, per_commit);
    }
    if (options_leave(options, &options->inner)) {
        options->inner = muon_suits(run, options) ? INNER_MUON : INNER_ADAMW;
    }
    choose_tensors(run);
    return options_check_rule(options, run->config.layers, error);
}

// Tokens of all ranks per commit or inner step; with --accumulate auto the least.
static inline int64_t nominal_tokens_per_commit(const Run *run) {
    return options_total_accumulate(&run->options, run->transport.size) * tokens_per_micro_batch(run);
}

// Whether what AdamW steps beside Muon learns more at four times --lr: 0.04 to 0.22 nats with a
// vocabulary of 4,096 or 50,257; with letters, or with local steps, a little less
// (dev/results/muon-adamw-rate-2026-11-29.md). Untied heads and trained models were not tried.
static inline bool embeds_fast(const Run *run) {
    const ParameterTable *table = &run->part.model;
    const Options *options = &run->options;
    const DataLoader *data = &run->data;
    bool letters = options->tokenizer[0] == '\0' &&
                   (data->builtin || (data->files != NULL && data->files[0].content.token_bytes == 1));
    return model_is_new(run, options) && !options->fresh_moments && !letters &&
           run->config.vocabulary >= 4096 && run->rule->kind != RULE_LOCAL &&
           table->entries[table->head].role == TENSOR_EMBEDDING;
}

// Fills in the rates that were left to the program. A constant rate has no minimum. While
// --epochs are not counted yet, a warm-up that is a part of them is not either.
static inline bool choose_rates(Run *run, Error *error) {
    Options *options = &run->options;
    double parameters = run->part.table.parameter_count;
    int64_t per_commit = nominal_tokens_per_commit(run);
    bool finetunes = options->finetune[0] != '\0';
    if (options_leave(options, &options->learning_rate)) {
        // Larger models want smaller rates: GPT-3's table (Brown et al., 2020, table 2.1), our own
        // measurement for tiny ones. Muon's best is higher by the root of the tokens of a commit:
        // 1 time at 1 k, 4 times from 16 k on, with 0.26 M to 32 M parameters
        // (dev/results/muon-32M-2026-11-28.md, dev/results/muon-adamw-rate-2026-11-29.md).
        // Fine-tuning takes a tenth (ACCO's paper: 2e-5).
        bool muon = options->inner == INNER_MUON;
        double rate = parameters < 5e6     ? 2e-3
                      : parameters < 20e6  ? 1e-3
                      : parameters < 250e6 ? 6e-4
                      : parameters < 900e6 ? 3e-4
                                           : 1.6e-4;
        double factor = muon ? fmin(fmax(sqrt(per_commit / 1024.0), 1), 4) : 1;
        options->learning_rate = rate * factor / (finetunes ? 10 : 1);
        snprintf(run->rate_reason, sizeof run->rate_reason, ", chosen for %s%.3g M parameters%s",
                 finetunes ? "fine-tuning " : "", parameters / 1e6, muon ? " and Muon" : "");
    }
    if (options->inner == INNER_MUON && options_leave(options, &options->muon_adamw_rate)) {
        options->muon_adamw_rate = fmin(options->learning_rate * (embeds_fast(run) ? 4 : 1), 100);
    }
    if (options->schedule != SCHEDULE_CONSTANT && options_leave(options, &options->minimum_learning_rate)) {
        options->minimum_learning_rate = options->learning_rate / 10;
    }
    if (options->epochs == 0 && options->schedule == SCHEDULE_WSD &&
        options_leave(options, &options->decay_tokens)) {
        options->decay_tokens = options->tokens / 5;
    }
    if (options_leave(options, &options->weight_decay)) { options->weight_decay = finetunes ? 0 : 0.1; }
    if (options->epochs == 0 && options_leave(options, &options->warmup)) {
        int64_t commits = (options->tokens + per_commit - 1) / per_commit,
                share = int64_min(commits / 20, 1000);
        // While a local rule's outer momentum gathers what it averages over, steps should be
        // small. It gained 0.32 nats at 0.9 (dev/results/local-rules-2026-11-25.md).
        SchedulerSettings settings = {.local = {.steps = 1}}; // of a rule that exchanges at every step
        if (run->rule->configure != NULL) { run->rule->configure(options_of_rule(options), &settings); }
        double momentum = fmax(settings.local.outer_nesterov.momentum, settings.local.outer_momentum.beta);
        int64_t remembered = momentum > 0 ? (int64_t)ceil(settings.local.steps / (1 - momentum)) : 0;
        options->warmup = (int64_t)fmax(share, int64_min(remembered, commits / 3));
    }
    if (options_leave(options, &options->sequential)) { options->sequential = options->warmup; }
    return options->minimum_learning_rate <= options->learning_rate ||
           error_set(error, "--min-lr %g is above the automatic --lr %g: give --lr too",
                     options->minimum_learning_rate, options->learning_rate);
}

// Tokens of one pass over the data; 0: endless, not known yet, or each source has its own epochs.
static inline double tokens_per_epoch(const DataLoader *data) {
    return data->source_count > 1 ? 0 : (double)data->training_windows * data->sequence_length;
}

// From now on --epochs are --tokens; the rates follow from them. The epochs of a text that is to
// be tokenized are counted when this is called again with its tokens.
static inline bool choose_length(Run *run, Error *error) {
    Options *options = &run->options;
    double asked = options->epochs;
    if (asked > 0 && run->data.source_count > 1) {
        return error_set(error, "--epochs: each of several sources has epochs of its own: give --tokens");
    }
    if (asked > 0 && run->data.training_windows > 0) {
        double tokens = ceil(asked * tokens_per_epoch(&run->data));
        if (!(tokens <= OPTION_NO_LIMIT)) {
            return error_set(error,
                             "--epochs %g of %.300s are %.3g tokens: that is more than can be counted here",
                             asked, run->data.name, tokens);
        }
        options->tokens = (int64_t)tokens;
        options->epochs = 0;
    }
    return choose_rates(run, error) && options_check_ranks(options, run->transport.size, run->T, error);
}

// The settings that follow from the length of the run.
static inline void choose_schedule(const Options *options, int ranks, SchedulerSettings *settings) {
    bool by_commits = options->learning_rate_by == RATE_BY_COMMITS;
    double per_commit = options_total_accumulate(options, ranks), step = by_commits ? 1 : per_commit;
    double micro_batch = options->micro_batch * options->seq_len;
    double total = (double)options->tokens / micro_batch, counted = by_commits ? per_commit : 1;
    settings->target = ceil(total);
    settings->sequential = options->sequential;
    settings->rate_by_commits = by_commits;
    LearningRate rate = {
        .kind = (ScheduleKind)options->schedule,
        .peak = options->learning_rate,
        .minimum = options->minimum_learning_rate,
        .step = step,
        .warmup = options->warmup * step,
        .total = total / counted,
        // All that is left by the warm-up, where it is not given.
        .decay =
            (options->decay_tokens == 0 ? total : (double)options->decay_tokens / micro_batch) / counted};
    settings->rate = rate;
}

// The micro-batches of this rank per commit; 0: auto. A plan takes those of the rank that has the
// most, which the exchange of a commit follows: its simulation cuts the others' into as many.
static inline int own_micro_batches(const Run *run) {
    const Options *options = &run->options;
    int own = options_rank_accumulate(options, run->transport.rank);
    for (int rank = 0; options->command == COMMAND_PLAN && rank < run->transport.size; rank++) {
        int other = options_rank_accumulate(options, rank);
        own = other > own ? other : own;
    }
    return own;
}

static inline SchedulerSettings choose_settings(Run *run) {
    const Options *options = &run->options;
    const Rule *rule = options_rule(options);
    const Transport *transport = &run->transport;
    Placement *placement = &run->placement;
    uint64_t seed = options->seed;
    int own = own_micro_batches(run);
    SchedulerSettings settings = {
        .kind = rule->kind,
        .replicated = rule->replicated,
        .overlap = options->overlap,
        .adaptive = options_are_adaptive(options),
        .micro_batches = own > 0 ? own : 1 + rule->further_rounds, // auto: the least possible
        .turn = run->turn,
        .wire = (WireFormat)options->wire,
        .estimate_wire = (WireFormat)options->wire,
        .gradient_clip = options->grad_clip,
        .on_spike = (SpikePolicy)options->on_spike,
        .spike_limit = options->spike_limit,
        .optimizer = {.beta1 = options->beta1,
                      .beta2 = options->beta2,
                      .epsilon = options->eps,
                      .weight_decay = options->weight_decay,
                      .muon_momentum = options->muon_momentum,
                      .adamw_ratio = options->muon_adamw_rate / options->learning_rate, // 0 without Muon
                      .muon_iterations = (int)options->muon_iterations,
                      .tensors = run->tensors,
                      .tensor_count = run->tensor_count,
                      .moments = (Precision)options->moments,
                      // Moments are rounded at random: ranks that step by themselves do it in
                      // different ways, so the mean over the ranks is more exact.
                      .seed = rule->kind == RULE_LOCAL ? random_hash(seed, transport->rank) : seed,
                      .precision = placement->precision},
        .local = {.fragments = 1},
        .device = {.gpu = placement_gpu(placement),
                   .precision = placement->precision,
                   .nccl = placement->uses_nccl ? &placement->nccl : NULL,
                   .product_processors = placement->product_processors}};
    choose_schedule(options, transport->size, &settings);
    if (rule->configure != NULL) { rule->configure(options_of_rule(options), &settings); }
    // Casts travel in twos, which must not belong to two ranks.
    bool in_twos = true;
    for (int i = 0; i < run->tensor_count && options->inner == INNER_MUON; i++) {
        in_twos = in_twos && run->tensors[i].begin % 2 == 0 && run->tensors[i].end % 2 == 0;
    }
    settings.gathers_casts =
        placement->all_cast && rule_shards(rule) && settings.wire == WIRE_FP32 && in_twos;
    settings.keeps_casts = settings.gathers_casts && !wire_is_coarse(settings.estimate_wire);
    return settings;
}

// Reserves everything that a run allocates. Whether there is as much memory fit.h asks.
static inline bool reserve_memory(Run *run, Error *error) {
    const Options *options = &run->options;
    Placement *placement = &run->placement;
    Arena *arena = &run->arena;
    SchedulerSettings settings = choose_settings(run);
    ModelSettings model = {.B = run->B,
                           .T = run->T,
                           .threads = run->threads.threads,
                           .on_gpu = placement->on_gpu,
                           .precision = placement->precision,
                           .given_weights = settings.keeps_casts,
                           .part = run->part.frozen_count > 0 ? &run->part : NULL,
                           .fp8 = placement->fp8};
    if (options->attend == ATTEND_DOCUMENT) { model.separator = &run->data.separator; }
    bool slow = options->slow_rank == run->transport.rank;
    TrainingProblem training = {.transport = &run->transport,
                                .turn = run->turn,
                                .model = &run->model,
                                .table = &run->part.table,
                                .data = &run->data,
                                .B = model.B,
                                .T = model.T,
                                .data_base = &run->checkpointed.data_base,
                                .slow_seconds = slow ? options->slow_ms / 1e3 : 0};
    run->training = training;
    Problem problem = {.self = &run->training,
                       .parameter_count = training.table->parameter_count,
                       .tokens = (double)model.B * model.T,
                       .micro_batch = training_micro_batch,
                       .copy = &run->model.copy,
                       .layer_begins = training.table->layer_begins,
                       .layer_count = training.table->layers};
    arena->on_gpu = placement->on_gpu;
    scheduler_reserve(&run->scheduler, arena, &settings, &problem, &run->transport);
    training_reserve(&run->training, arena);
    if (!placement_check_shapes(placement, &run->config, model.B, model.T, error) ||
        !placement_choose_recompute(placement, options, &run->config, arena->bytes, &model, error)) {
        return false;
    }
    model_reserve(&run->model, arena, &run->config, &model);
    return true;
}

// Chooses how many bytes of gradients travel together in the backward pass. After it the last
// bucket is still to be sent, and each costs a latency: n buckets of an exchange of C seconds take
// C / n + n * latency, least at n = sqrt(C / latency). supposed: a plan's link; NULL: it is
// measured.
static inline void bucket_for_link(Scheduler *s, const Options *options, const Placement *placement,
                                   const LinkMeasure *supposed, char reason[160]) {
    SchedulerSettings *settings = &s->settings;
    double bytes = (double)layout_padded(&s->layout) * sizeof(float), ranks = s->transport->size;
    if (settings->kind != RULE_SYNCHRONOUS || ranks == 1) { return; }
    settings->bucket_bytes = (size_t)(options->bucket_mb * 1e6);
    snprintf(reason, 160, "as asked for");
    if (settings->bucket_bytes > 0) { return; }
    if (placement->uses_nccl) {
        settings->bucket_bytes = placement->nccl.buffer_limit;
        snprintf(reason, 160, "what fits into NCCL's message buffers");
        return;
    }
    LinkMeasure link = supposed != NULL ? *supposed : link_measure(s->transport, false);
    double share = (double)wire_bytes(settings->wire, WIRE_BLOCK) / (WIRE_BLOCK * sizeof(float));
    double passes = settings->replicated ? 2 : 1;
    double seconds = passes * bytes * share * (ranks - 1) / ranks / link.rate;
    // A bucket costs more than its messages: its exchange begins and ends by itself, with
    // threads that must be woken (dev/results/simulation-2026-11-22.md).
    double latency = fmax(link.latency, 300e-6);
    double buckets = fmin(fmax(sqrt(seconds / (passes * latency)), 1), s->layout.cells);
    settings->bucket_bytes = (size_t)(bytes / buckets);
    snprintf(reason, 160, "measured: %.3g us a message, %.3g MB/s; %.3g s for all of it", 1e6 * link.latency,
             link.rate / 1e6, seconds);
}
