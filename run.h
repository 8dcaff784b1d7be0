// run.h: one run: what was asked for, what was chosen, what it lives on.
//
// Everything that is decided before training is decided here, in this order: model, rates, data, agreement between ranks, run directory,
// memory. Until memory is allocated, whatever is wrong with what the user asked for ends all ranks with one line and exit code 2; ranks
// meet in agree_or_exit, so that a mistake which only one of them can see (a file that is missing on its node) ends them all in order.
#ifndef ACCO_RUN_H
#define ACCO_RUN_H

#include "dataloader.h"
#include "gpt_neo.h"
#include "placement.h"
#include "rules.h"
#include "runtime/last_words.h"
#include "runtime/log.h"
#include "runtime/options.h"
#include "runtime/preflight.h"
#include "runtime/transport_mpi.h"

enum { ROLLBACK_PATIENCE = 3 }; // how often a spike may send a run back to the same checkpoint

// One run, or the plan of one. Everything that lives as long as the program does.
typedef struct Run {
    Options options;
    Transport transport;
    ThreadChoice threads;
    Placement placement;
    GptNeoConfig config;
    ParameterTable table;
    int B, T;
    const Rule *rule;
    DecayRange *decay_ranges;
    size_t layer_begins[GPT_NEO_MAX_LAYERS + 1]; // where each layer begins in the flat vector, and where the last one ends
    char rate_reason[64], bucket_reason[160];
    DataLoader data, validation_data; // the latter only with --val-data
    Arena arena;
    Team *team;
    GptNeo model;
    Scheduler scheduler;
    int32_t *tokens, *targets; // (B, T): the batch of the compute stream
    // Rank 0 only.
    char directory[RUN_PATH_SIZE];
    Log log;
    Terminal terminal;
    // The report that is being collected, and clocks.
    double started, paused; // clock_seconds() at the start of training; seconds spent on validation since
    double seconds_before;            // of training before a checkpoint that this run goes on from
    int64_t data_base;                // micro-batches of all ranks that came before the first of this run's
    LastWords words;
    double clock_offset, trace_began; // to rank 0's clock, and when that was
    CommitReport sum;       // over the commits since the latest report
    int64_t sum_began_commit; // those of the latest report
    double sum_began_gradients;
    int64_t commit_seen, reports_seen; // the latest commit that was looked at; the scheduler's reports until then
    bool has_news;                     // since the latest report
    struct Saver *saver;               // the checkpoint that is being written; NULL: none
    double saving_seconds;             // that training has waited for it
    int64_t saved_commit, saved_reports; // the scheduler's, of what is on disk
    double spikes_seen;                // of the scheduler's
    int64_t rollback_commit;           // that of the checkpoint which was gone back to last, and how often in a row
    int rollback_repeats;
    double sum_began;
    double validation_loss, perfect_validation_loss; // of the latest validation
} Run;

static inline bool run_is_main(const Run *run) { return run->transport.rank == 0; }

// Seconds of training, without validation, checkpoints and what came before; over all parts of a run that was resumed.
static inline double training_seconds(const Run *run) { return run->seconds_before + clock_seconds() - run->started - run->paused; }

// ---------------------------------------------------------------------------------------------------------------------------------------
// Ending early

// Before MPI: prints once per job and exits 2. Open MPI's launcher may hang when many ranks fail at once or when it has to end them, so the
// others leave in peace, and rank 0 fails when they have gone.
static inline void exit_user_mistake(const Error *error) {
    if (preflight_launcher_rank(getenv) != 0) { exit(0); }
    fprintf(stderr, "train_gpt: %s\n", error->text);
    if (transport_was_launched()) { sleep_seconds(0.5); }
    exit(EXIT_USER_MISTAKE);
}

typedef struct Verdict {
    int exit_code; // 0: good
    char host[64];
    Error error;
} Verdict;

// All ranks meet here, and learn of the first of them that is not good. Returns its number and its verdict; -1: all are good.
static inline int first_bad_verdict(Run *run, const char *operation, int exit_code, const Error *error, Verdict *found) {
    Transport *transport = &run->transport;
    Verdict mine;
    memset(&mine, 0, sizeof mine);
    mine.exit_code = exit_code;
    memcpy(mine.host, transport->host, sizeof mine.host);
    mine.error = *error;
    Verdict *all = (Verdict *)calloc((size_t)transport->size, sizeof *all);
    transport_exchange(transport, operation, &mine, all, sizeof mine);
    int bad = 0;
    while (bad < transport->size && all[bad].exit_code == 0) { bad++; }
    if (bad < transport->size) { *found = all[bad]; }
    free(all);
    return bad < transport->size ? bad : -1;
}

// If any rank has an error the first such rank's is printed, and all end with its exit code.
static inline void agree_or_exit(Run *run, int exit_code, const Error *error) {
    Transport *transport = &run->transport;
    Verdict bad;
    if (first_bad_verdict(run, "agreement", exit_code, error, &bad) < 0) { return; }
    bool elsewhere = strcmp(bad.host, transport->host) != 0;
    if (run_is_main(run)) {
        fprintf(stderr, "train_gpt: %s%s%s\n", elsewhere ? bad.host : "", elsewhere ? ": " : "", bad.error.text);
    }
    transport_close(transport);
    exit(bad.exit_code);
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// Setting up

static inline int64_t tokens_per_micro_batch(const Run *run) { return (int64_t)run->B * run->T; }

// Micro-batches of this rank per commit (in local rules: per inner step); with --accumulate auto the least possible number.
static inline int nominal_accumulation(const Run *run) {
    int own = options_rank_accumulate(&run->options, run->transport.rank, run->transport.size);
    return own > 0 ? own : run->rule->rounds_per_commit;
}

// The same of all ranks together.
static inline int64_t nominal_micro_batches(const Run *run) { return options_total_accumulate(&run->options, run->transport.size); }

// Larger models want smaller rates: GPT-3's table (Brown et al., 2020, table 2.1), and our own measurement for the tiny ones. What has been
// learned is kept by smaller ones: ACCO's paper fine-tunes 2.7B with 2e-5.
static inline double automatic_learning_rate(Run *run) {
    double parameters = (double)run->table.parameter_count;
    bool finetunes = run->options.finetune[0] != '\0';
    snprintf(run->rate_reason, sizeof run->rate_reason, ", chosen for %s%.3g M parameters", finetunes ? "fine-tuning " : "",
             parameters / 1e6);
    double rate = parameters < 5e6 ? 2e-3 : parameters < 60e6 ? 1e-3 : parameters < 250e6 ? 6e-4 : parameters < 900e6 ? 3e-4 : 1.6e-4;
    return finetunes ? rate / 10 : rate;
}

static inline bool choose_model(Run *run, Error *error) {
    Options *options = &run->options;
    const char *start = options_start(options);
    if (!gpt_neo_config_find(start[0] != '\0' ? start : options->model, &run->config, error)) { return false; }
    int positions = run->config.positions;
    if (options->seq_len > positions) {
        return error_set(error, "--seq-len %lld is longer than the %d positions of %s: use at most %d", (long long)options->seq_len,
                         positions, run->config.name, positions);
    }
    gpt_neo_parameter_table(&run->config, &run->table);
    if (options->micro_batch == 0) { options->micro_batch = run->table.parameter_count < 5000000 ? 1 : 8; }
    run->B = (int)options->micro_batch;
    if (options->seq_len == 0) { options->seq_len = positions < 1024 ? positions : 1024; }
    run->T = (int)options->seq_len;
    // What follows counts tokens and elements in int and int64_t.
    double per_rank = (double)run->B * run->T, per_commit = per_rank * (double)nominal_micro_batches(run);
    if (per_rank > 1e9 || per_commit > 1e15) {
        return error_set(error, "--micro-batch %d x --seq-len %d, %.3g tokens a commit: that is more than can be counted here", run->B,
                         run->T, per_commit);
    }
    int layers = run->config.layers;
    for (int l = 0; l <= layers; l++) { run->layer_begins[l] = run->table.entries[gpt_neo_tensor(l, TENSOR_LN_1_WEIGHT)].offset; }
    if (strcmp(run->rule->name, "streaming-diloco") == 0 && options->streaming_p > layers) {
        return error_set(error, "--streaming-P %lld: %s has only %d layers to make fragments of", (long long)options->streaming_p,
                         run->config.name, layers);
    }
    return true;
}

// The ranges of the flat parameter vector that decay. Returns how many there are.
static inline int choose_decay_ranges(Run *run) {
    bool all = strcmp(run->options.decay, "all") == 0;
    int count = 0;
    run->decay_ranges = (DecayRange *)calloc((size_t)run->table.count, sizeof *run->decay_ranges);
    for (int i = 0; i < run->table.count; i++) {
        const ParameterInfo *entry = &run->table.entries[i];
        if (entry->is_matrix || all) { decay_ranges_add(run->decay_ranges, &count, entry->offset, entry->offset + entry->count); }
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

// Spells out what was left to us, so that the saved configuration says it. A constant rate has no minimum.
static inline bool choose_rates(Run *run, Error *error) {
    Options *options = &run->options;
    bool constant = strcmp(options->schedule, "constant") == 0;
    if (options->learning_rate == 0) { options->learning_rate = automatic_learning_rate(run); }
    if (options->minimum_learning_rate < 0 && !constant) { options->minimum_learning_rate = options->learning_rate / 10; }
    if (options->weight_decay < 0) { options->weight_decay = options->finetune[0] != '\0' ? 0 : 0.1; }
    if (options->warmup < 0) { options->warmup = nominal_commits(run) / 20 < 1000 ? nominal_commits(run) / 20 : 1000; }
    if (options->minimum_learning_rate > options->learning_rate) {
        return error_set(error, "--min-lr %g is above the automatic --lr %g: give --lr too", options->minimum_learning_rate,
                         options->learning_rate);
    }
    return true;
}

static inline LearningRate choose_schedule(const Run *run) {
    const Options *options = &run->options;
    LearningRate rate;
    bool by_commits = strcmp(options->learning_rate_by, "commits") == 0;
    double per_commit = (double)nominal_micro_batches(run);
    double total = (double)options->tokens / (double)tokens_per_micro_batch(run);
    rate.kind = strcmp(options->schedule, "cosine") == 0   ? SCHEDULE_COSINE
                : strcmp(options->schedule, "linear") == 0 ? SCHEDULE_LINEAR
                                                           : SCHEDULE_CONSTANT;
    rate.peak = options->learning_rate;
    rate.minimum = options->minimum_learning_rate;
    rate.step = by_commits ? 1 : per_commit;
    rate.warmup = (double)options->warmup * rate.step;
    rate.total = by_commits ? total / per_commit : total;
    return rate;
}

// Micro-batch gradients of all workers at which training ends.
static inline double target_gradients(const Run *run) { return ceil((double)run->options.tokens / (double)tokens_per_micro_batch(run)); }

static inline void choose_local_settings(const Run *run, SchedulerSettings *settings) {
    const Options *options = &run->options;
    bool streaming = strcmp(run->rule->name, "streaming-diloco") == 0;
    double gap = 1;
    Error error = {""};
    options_co2_gap(options, &gap, &error); // was checked
    settings->steps = (int)(strcmp(run->rule->name, "co2") == 0 ? options->co2_tau : options->diloco_h);
    settings->fragments = streaming ? (int)options->streaming_p : 1;
    settings->delay = (int)options->streaming_tau;
    settings->strided = strcmp(options->streaming_order, "strided") == 0;
    settings->outer.learning_rate = (float)options->diloco_outer_lr;
    settings->outer.momentum = (float)options->diloco_mu;
    settings->outer.alpha = (float)options->streaming_alpha;
    settings->co2.beta = (float)options->co2_beta;
    settings->co2.alpha = (float)options->co2_alpha;
    settings->co2.phi = (float)options->co2_phi;
    settings->co2.gap = (float)gap;
}

static inline SchedulerSettings choose_settings(Run *run) {
    const Options *options = &run->options;
    SchedulerSettings settings;
    memset(&settings, 0, sizeof settings);
    settings.kind = run->rule->kind;
    settings.replicated = run->rule->replicated;
    settings.overlap = options->overlap;
    settings.adaptive = options->accumulate == 0 && options->rank_accumulate[0] == '\0';
    settings.rounds_per_commit = run->rule->rounds_per_commit;
    settings.round_size = nominal_accumulation(run) / run->rule->rounds_per_commit;
    settings.first_round_size = (int)options->acco_init;
    settings.sequential = options->sequential;
    wire_find(options->wire, &settings.wire);
    if (!wire_find(options->estimate_wire, &settings.estimate_wire)) { settings.estimate_wire = settings.wire; } // "same"
    settings.gradient_clip = options->grad_clip;
    settings.on_spike = strcmp(options->on_spike, "skip") == 0       ? SPIKE_SKIP
                        : strcmp(options->on_spike, "rollback") == 0 ? SPIKE_ROLLBACK
                                                                     : SPIKE_STOP;
    settings.spike_limit = options->spike_limit;
    settings.target = target_gradients(run);
    settings.rate_by_commits = strcmp(options->learning_rate_by, "commits") == 0;
    settings.rate = choose_schedule(run);
    choose_local_settings(run, &settings);
    settings.optimizer.kind = OPTIMIZER_ADAMW;
    settings.optimizer.beta1 = options->beta1;
    settings.optimizer.beta2 = options->beta2;
    settings.optimizer.epsilon = options->eps;
    settings.optimizer.weight_decay = options->weight_decay;
    settings.optimizer.decay_range_count = choose_decay_ranges(run);
    settings.optimizer.decay_ranges = run->decay_ranges;
    settings.gpu = placement_gpu(&run->placement);
    settings.precision = run->placement.precision;
    settings.nccl = run->placement.uses_nccl ? &run->placement.nccl : NULL;
    return settings;
}

// Whether a token is a byte of text.
static inline bool data_is_bytes(const Run *run) { return run->data.builtin || run->data.files[0].token_bytes == 1; }

static inline bool open_files(DataLoader *loader, const DataRequest *request, Error *error) {
    bool good = data_loader_open(loader, request, error);
    for (int i = 0; good && !loader->builtin && i < loader->file_count; i++) {
        good = data_file_check_length(&loader->files[i], request->sequence_length, error);
    }
    return good;
}

static inline bool open_data(Run *run, Error *error) {
    const Options *options = &run->options;
    bool separate = options->val_data[0] != '\0';
    DataRequest request = {options->data, run->T, run->config.vocabulary, (uint64_t)options->seed, !separate && options->val_batches > 0};
    if (!open_files(&run->data, &request, error)) { return false; }
    if (!data_loader_require(&run->data, run->transport.size, run->B, error)) { return false; }
    bool spelled = run->options.tokenizer[0] != '\0' || options_start(&run->options)[0] != '\0';
    if (run->options.prompt[0] != '\0' && !data_is_bytes(run) && !spelled) {
        return error_set(error,
                         "--prompt needs data that are text, or a --tokenizer: %s holds token ids, and there is no vocabulary here to turn "
                         "the prompt into ids",
                         options->data);
    }
    if (!separate) { return true; }
    DataRequest held = {options->val_data, run->T, run->config.vocabulary, (uint64_t)options->seed, false};
    return open_files(&run->validation_data, &held, error);
}

// The one table of memory: what `plan` prints, what a run prints, and what is allocated.
static inline bool reserve_memory(Run *run, Problem problem, Error *error) {
    const Placement *placement = &run->placement;
    SchedulerSettings settings = choose_settings(run);
    GptNeoSettings model = {run->B, run->T, run->threads.threads, placement->on_gpu, placement->precision, RECOMPUTE_NONE};
    size_t bytes = (size_t)tokens_per_micro_batch(run) * sizeof(int32_t);
    run->arena.on_gpu = placement->on_gpu;
    scheduler_reserve(&run->scheduler, &run->arena, &settings, &problem, &run->transport);
    arena_reserve_host(&run->arena, MEMORY_WORKSPACE, "tokens", bytes, &run->tokens);
    arena_reserve_host(&run->arena, MEMORY_WORKSPACE, "targets", bytes, &run->targets);
    if (!placement_check_shapes(placement, &run->config, run->B, run->T, error) ||
        !placement_choose_recompute(&run->placement, &run->options, &run->config, run->arena.bytes, &model, error)) {
        return false;
    }
    gpt_neo_reserve(&run->model, &run->arena, &run->config, &model);
    return true;
}

// How many bytes of gradients travel together where gradients are sent behind the backward pass. More buckets leave less to wait for when
// the pass has ended, the last bucket, but each costs the latency of a message: with n buckets of an exchange of C seconds that is C / n +
// n times the latency, least at n = sqrt(C / latency). All ranks call it and choose the same.
static inline void choose_bucket(Run *run) {
    SchedulerSettings *settings = &run->scheduler.settings;
    const Layout *layout = &run->scheduler.layout;
    double bytes = (double)layout_padded(layout) * sizeof(float);
    if (settings->kind != RULE_SYNCHRONOUS || run->transport.size == 1) { return; }
    settings->bucket = (size_t)(run->options.bucket_mb * 1e6);
    snprintf(run->bucket_reason, sizeof run->bucket_reason, "as asked for");
    if (settings->bucket > 0) { return; }
    if (run->placement.uses_nccl) {
        settings->bucket = NCCL_BUFFER_BYTES;
        snprintf(run->bucket_reason, sizeof run->bucket_reason, "what fits into NCCL's message buffers");
        return;
    }
    LinkMeasure link = transport_measure(&run->transport);
    double share = (double)wire_bytes(settings->wire, WIRE_BLOCK) / (WIRE_BLOCK * sizeof(float));
    double passes = settings->replicated ? 2 : 1, ranks = run->transport.size;
    double seconds = passes * bytes * share * (ranks - 1) / ranks / link.rate;
    double latency = fmax(link.latency, TRANSPORT_SPIN_SECONDS); // who waits longer than that sleeps, and must be woken
    double buckets = fmin(fmax(sqrt(seconds / (passes * latency)), 1), (double)layout->cells);
    settings->bucket = (size_t)(bytes / buckets);
    snprintf(run->bucket_reason, sizeof run->bucket_reason, "measured: %.3g us a message, %.3g MB/s; %.3g s for all of it",
             1e6 * link.latency, link.rate / 1e6, seconds);
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// Agreement between ranks

// What every rank tells the others at the start.
typedef struct Hello {
    uint64_t options_hash;
    int pid, threads, on_gpu;
    char host[64], device[64];
} Hello;

// Goes on with `hash`; all parts but the last are whole words.
static inline uint64_t hash_more(uint64_t hash, const void *bytes, size_t count) {
    for (size_t i = 0; i < count; i += 4) {
        uint32_t word = 0;
        memcpy(&word, (const char *)bytes + i, count - i < sizeof word ? count - i : sizeof word);
        hash = random_hash(hash, word);
    }
    return hash;
}

static inline uint64_t hash_bytes(const void *bytes, size_t count) { return hash_more(count, bytes, count); }

static inline uint64_t hash_options(const Options *options) {
    json_t *object = options_as_json(options);
    char *text = json_dumps(object, JSON_COMPACT | JSON_SORT_KEYS);
    uint64_t hash = hash_bytes(text, strlen(text));
    free(text);
    json_decref(object);
    return hash;
}

// Ranks that run with other options would train nonsense without a word: refused. Returns all hellos (size), for the caller to free.
static inline Hello *greet(Run *run) {
    Transport *transport = &run->transport;
    Hello mine;
    memset(&mine, 0, sizeof mine);
    mine.options_hash = hash_options(&run->options);
    mine.pid = (int)getpid();
    mine.threads = run->threads.threads;
    mine.on_gpu = run->placement.on_gpu ? 1 : 0;
    snprintf(mine.device, sizeof mine.device, "%.60s", mine.on_gpu ? run->placement.gpu.name : "CPU");
    memcpy(mine.host, transport->host, sizeof mine.host);
    Hello *all = (Hello *)calloc((size_t)transport->size, sizeof *all);
    transport_exchange(transport, "greeting", &mine, all, sizeof mine);
    Error error = {""};
    for (int rank = 1; rank < transport->size && !error_is_set(&error); rank++) {
        if (all[rank].options_hash == all[0].options_hash) { continue; }
        error_set(&error, "rank %d on %s was started with other options than rank 0 on %s", rank, all[rank].host, all[0].host);
    }
    agree_or_exit(run, error_is_set(&error) ? EXIT_USER_MISTAKE : 0, &error);
    for (int rank = 0; rank < transport->size; rank++) { run->placement.ranks_on_gpus += all[rank].on_gpu; }
    return all;
}

// The parameters that compute uses (parameter_count), where the host can read them. The streams have been started and are idle.
static inline float *borrow_host_parameters(Run *run) {
    Scheduler *s = &run->scheduler;
    if (!run->placement.on_gpu) { return s->parameters.data; }
    size_t bytes = run->table.parameter_count * sizeof(float);
    float *copy = (float *)malloc(bytes);
    if (copy == NULL) { transport_fail(&run->transport, "no memory for a copy of the parameters: %zu bytes", bytes); }
    stream_copy(s->compute, copy, s->parameters.data, bytes);
    stream_settle(s->compute);
    return copy;
}

static inline void return_host_parameters(Run *run, float *parameters) {
    if (run->placement.on_gpu) { free(parameters); }
}

enum { HASH_PIECE = 1 << 24 }; // elements that a GPU's parameters are copied at a time

static inline uint64_t hash_parameters(Run *run, const float *parameters) {
    size_t count = run->table.parameter_count;
    if (!run->placement.on_gpu) { return hash_bytes(parameters, count * sizeof(float)); }
    size_t most = count < (size_t)HASH_PIECE ? count : (size_t)HASH_PIECE;
    float *piece = (float *)malloc(most * sizeof(float));
    uint64_t hash = count * sizeof(float);
    for (size_t begin = 0; begin < count; begin += most) {
        size_t part = count - begin < most ? count - begin : most;
        stream_copy(run->scheduler.compute, piece, parameters + begin, part * sizeof(float));
        stream_settle(run->scheduler.compute);
        hash = hash_more(hash, piece, part * sizeof(float));
    }
    free(piece);
    return hash;
}

// All ranks must hold the same parameters, bit for bit: at the start, and at the end whatever the rule did. Returns their fingerprint.
static inline uint64_t check_replicas(Run *run, const float *parameters) {
    Transport *transport = &run->transport;
    uint64_t mine = hash_parameters(run, parameters);
    uint64_t *all = (uint64_t *)calloc((size_t)transport->size, sizeof mine);
    transport_exchange(transport, "fingerprint", &mine, all, sizeof mine);
    for (int rank = 0; rank < transport->size; rank++) {
        if (all[rank] != all[0]) { transport_fail(transport, "rank %d holds other parameters than rank 0: this is a bug of ours", rank); }
    }
    free(all);
    return mine;
}

// All ranks get rank 0's.
static inline void share_from_rank_zero(Run *run, void *bytes, size_t count) {
    char *all = (char *)malloc((size_t)run->transport.size * count);
    transport_exchange(&run->transport, "sharing", bytes, all, count);
    memcpy(bytes, all, count);
    free(all);
}

// The run directory, its files and the effective configuration; rank 0, but an error ends everybody. All ranks learn its name.
static inline void open_run_directory(Run *run) {
    Error error = {""};
    int exit_code = 0;
    if (run_is_main(run)) {
        char path[RUN_PATH_SIZE + 16];
        bool traceable = run->options.trace[0] == '\0' || trace_path_check(run->options.trace, &error);
        bool made = traceable && run_directory_create(run->options.out, run->options.model, run->options.optimizer,
                                                      strcmp(run->options.resume, "auto") == 0, run->directory, &error);
        snprintf(path, sizeof path, "%s/config.txt", run->directory);
        bool good = made && options_save_file(&run->options, path, &error) && log_open(&run->log, run->directory, &error);
        exit_code = good ? 0 : made ? EXIT_SYSTEM_FAILURE : EXIT_USER_MISTAKE; // a directory that can be had but not filled: the disk
    }
    agree_or_exit(run, exit_code, &error);
    share_from_rank_zero(run, run->directory, sizeof run->directory);
}

#endif
