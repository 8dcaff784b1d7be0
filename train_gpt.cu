// train_gpt.cu: the program. options -> setup -> rounds -> report, top to bottom.
//
//   train_gpt [train] OPTIONS    trains, alone or as one rank under mpirun or srun
//   train_gpt plan OPTIONS       prints how much memory each rank needs, and allocates nothing
//   train_gpt help               every option
//
// Until the memory is allocated, whatever is wrong with what the user asked for ends all ranks with one line and exit code 2.
// Afterwards only the system can fail: one line with rank, host and operation, and exit code 3 for the whole job.

#include <signal.h>

#include "dataloader.h"                // defines: data_loader_open, data_loader_fill: tokens in, batches out
#include "gpt_neo.h"                   // defines: gpt_neo_loss_and_gradients: the model
#include "rules.h"                     // defines: RULES, rule_find: ddp, zero1, acco over the scheduler's verbs
#include "runtime/log.h"               // defines: log_open, log_report, terminal_report: what a run leaves behind
#include "runtime/options.h"           // defines: options_parse: the table of options
#include "runtime/preflight.h"         // defines: preflight_threads, preflight_check_copies: what to check before starting
#include "runtime/transport_mpi.h"     // defines: transport_open: the other ranks
#include "sampler.h"                   // defines: sampler_generate: stories out

enum { FINGERPRINT_SEED = 20 };

// One run, or the plan of one. Everything that lives as long as the program does.
typedef struct Run {
    Options options;
    Transport transport;
    ThreadChoice threads;
    GptNeoConfig config;
    ParameterTable table;
    int B, T;
    const Rule *rule;
    DecayRange *decay_ranges;
    char rate_reason[64];
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
    CommitReport sum;       // over the commits since the latest report
    int64_t commits_in_sum;
    double sum_began;
    double validation_loss, perfect_validation_loss; // of the latest validation
} Run;

static inline bool run_is_main(const Run *run) { return run->transport.rank == 0; }

// ---------------------------------------------------------------------------------------------------------------------------------------
// Ending early

// Before MPI: prints once per job and exits 2.
static void exit_user_mistake(const Error *error) {
    if (preflight_launcher_rank(getenv) == 0) { fprintf(stderr, "train_gpt: %s\n", error->text); }
    exit(EXIT_USER_MISTAKE);
}

typedef struct Verdict {
    int exit_code; // 0: good
    char text[sizeof(Error) + 1];
} Verdict;

// All ranks meet here. If any of them has an error the first such rank's is printed, and all end with its exit code.
static void agree_or_exit(Run *run, int exit_code, const Error *error) {
    Transport *transport = &run->transport;
    Verdict mine;
    memset(&mine, 0, sizeof mine);
    mine.exit_code = exit_code;
    snprintf(mine.text, sizeof mine.text, "%s", error->text);
    Verdict *all = (Verdict *)calloc((size_t)transport->size, sizeof *all);
    transport_exchange(transport, "agreement", &mine, all, sizeof mine);
    for (int rank = 0; rank < transport->size; rank++) {
        exit_code = all[rank].exit_code;
        if (exit_code == 0) { continue; }
        if (run_is_main(run)) { fprintf(stderr, "train_gpt: %s%s\n", rank > 0 ? "(on another node) " : "", all[rank].text); }
        free(all);
        transport_close(transport);
        exit(exit_code);
    }
    free(all);
}

// What only rank 0 can fail at while training runs: writing its files.
static void check_written(Run *run, bool written, const Error *error) {
    if (!written) { transport_fail(&run->transport, "%s: free some space or choose another --out; the model is lost", error->text); }
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// Setting up

// Larger models want smaller rates: GPT-3's table (Brown et al., 2020, table 2.1), and our own measurement for the tiny ones.
static double automatic_learning_rate(Run *run) {
    double parameters = (double)run->table.parameter_count;
    snprintf(run->rate_reason, sizeof run->rate_reason, ", chosen for %.3g M parameters", parameters / 1e6);
    return parameters < 5e6 ? 2e-3 : parameters < 60e6 ? 1e-3 : parameters < 250e6 ? 6e-4 : parameters < 900e6 ? 3e-4 : 1.6e-4;
}

static bool choose_model(Run *run, Error *error) {
    Options *options = &run->options;
    if (!gpt_neo_config_find(options->model, &run->config, error)) { return false; }
    int positions = run->config.positions;
    if (options->seq_len > positions) {
        return error_set(error, "--seq-len %lld is longer than the %d positions of %s: use at most %d", (long long)options->seq_len, positions,
                         run->config.name, positions);
    }
    gpt_neo_parameter_table(&run->config, &run->table);
    if (options->micro_batch == 0) { options->micro_batch = run->table.parameter_count < 5000000 ? 1 : 8; }
    run->B = (int)options->micro_batch;
    run->T = options->seq_len > 0 ? (int)options->seq_len : positions < 1024 ? positions : 1024;
    return true;
}

// Ranges of the flat parameter vector that decay: neighbours merged.
static int choose_decay_ranges(Run *run) {
    bool all = strcmp(run->options.decay, "all") == 0;
    run->decay_ranges = (DecayRange *)calloc((size_t)run->table.count, sizeof *run->decay_ranges);
    int count = 0;
    for (int i = 0; i < run->table.count; i++) {
        const ParameterInfo *entry = &run->table.entries[i];
        if (!entry->is_matrix && !all) { continue; }
        if (count > 0 && run->decay_ranges[count - 1].end == entry->offset) {
            run->decay_ranges[count - 1].end += entry->count;
        } else {
            run->decay_ranges[count].begin = entry->offset;
            run->decay_ranges[count++].end = entry->offset + entry->count;
        }
    }
    return count;
}

static int64_t tokens_per_micro_batch(const Run *run) { return (int64_t)run->B * run->T; }

// Micro-batches per rank and commit; with --accumulate auto the least possible number.
static int nominal_accumulation(const Run *run) {
    return run->options.accumulate > 0 ? (int)run->options.accumulate : run->rule->rounds_per_commit;
}

static int64_t nominal_tokens_per_commit(const Run *run) {
    return (int64_t)run->transport.size * nominal_accumulation(run) * tokens_per_micro_batch(run);
}

static int64_t nominal_commits(const Run *run) {
    int64_t per_commit = nominal_tokens_per_commit(run);
    return (run->options.tokens + per_commit - 1) / per_commit;
}

// Spells out what was left to us, so that the saved configuration says it. A constant rate has no minimum.
static bool choose_rates(Run *run, Error *error) {
    Options *options = &run->options;
    bool constant = strcmp(options->schedule, "constant") == 0;
    if (options->learning_rate == 0) { options->learning_rate = automatic_learning_rate(run); }
    if (options->minimum_learning_rate < 0 && !constant) { options->minimum_learning_rate = options->learning_rate / 10; }
    if (options->warmup < 0) { options->warmup = nominal_commits(run) / 20 < 1000 ? nominal_commits(run) / 20 : 1000; }
    if (options->minimum_learning_rate > options->learning_rate) {
        return error_set(error, "--min-lr %g is above the automatic --lr %g: give --lr too", options->minimum_learning_rate,
                         options->learning_rate);
    }
    return true;
}

static LearningRate choose_schedule(const Run *run) {
    const Options *options = &run->options;
    LearningRate rate;
    bool by_commits = strcmp(options->learning_rate_by, "commits") == 0;
    double per_commit = (double)run->transport.size * nominal_accumulation(run);
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

static SchedulerSettings choose_settings(Run *run) {
    const Options *options = &run->options;
    SchedulerSettings settings;
    memset(&settings, 0, sizeof settings);
    settings.overlapped = run->rule->overlapped;
    settings.replicated = run->rule->replicated;
    settings.wait_after_launch = !options->overlap;
    settings.adaptive = options->accumulate == 0;
    settings.round_size = nominal_accumulation(run) / run->rule->rounds_per_commit;
    settings.gradient_clip = options->grad_clip;
    settings.rate_by_commits = strcmp(options->learning_rate_by, "commits") == 0;
    settings.rate = choose_schedule(run);
    settings.optimizer.kind = OPTIMIZER_ADAMW;
    settings.optimizer.beta1 = options->beta1;
    settings.optimizer.beta2 = options->beta2;
    settings.optimizer.epsilon = options->eps;
    settings.optimizer.weight_decay = options->weight_decay;
    settings.optimizer.decay_range_count = choose_decay_ranges(run);
    settings.optimizer.decay_ranges = run->decay_ranges;
    return settings;
}

static bool open_data(Run *run, Error *error) {
    const Options *options = &run->options;
    bool separate = options->val_data[0] != '\0';
    DataRequest request = {options->data, run->T, run->config.vocabulary, (uint64_t)options->seed, !separate && options->val_batches > 0};
    if (!data_loader_open(&run->data, &request, error)) { return false; }
    if (!data_loader_require(&run->data, run->transport.size, run->B, error)) { return false; }
    if (!separate) { return true; }
    DataRequest held = {options->val_data, run->T, run->config.vocabulary, (uint64_t)options->seed, false};
    return data_loader_open(&run->validation_data, &held, error);
}

static MicroBatchResult train_micro_batch(void *self, Stream *stream, uint64_t index, const float *parameters, float *gradients);

// The one table of memory: what `plan` prints, what a run prints, and what is allocated.
static void reserve_memory(Run *run) {
    Problem problem = {run, run->table.parameter_count, train_micro_batch};
    SchedulerSettings settings = choose_settings(run);
    run->transport.wire = strcmp(run->options.wire, "bf16") == 0 ? WIRE_BF16 : WIRE_FP32;
    scheduler_reserve(&run->scheduler, &run->arena, &settings, &problem, &run->transport);
    gpt_neo_reserve(&run->model, &run->arena, &run->config, run->B, run->T, run->threads.threads);
    size_t bytes = (size_t)tokens_per_micro_batch(run) * sizeof(int32_t);
    arena_reserve(&run->arena, MEMORY_WORKSPACE, "tokens", bytes, &run->tokens);
    arena_reserve(&run->arena, MEMORY_WORKSPACE, "targets", bytes, &run->targets);
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// Agreement between ranks

// What every rank tells the others at the start.
typedef struct Hello {
    uint64_t options_hash;
    int pid, threads;
    char host[64];
} Hello;

static uint64_t hash_bytes(const void *bytes, size_t count) {
    uint64_t hash = FINGERPRINT_SEED;
    for (size_t i = 0; i + 4 <= count; i += 4) {
        uint32_t word;
        memcpy(&word, (const char *)bytes + i, sizeof word);
        hash = random_hash(hash, word);
    }
    return hash;
}

static uint64_t hash_options(const Options *options) {
    json_t *object = options_as_json(options);
    char *text = json_dumps(object, JSON_COMPACT | JSON_SORT_KEYS);
    uint64_t hash = hash_bytes(text, strlen(text));
    free(text);
    json_decref(object);
    return hash;
}

// Ranks that run with other options would train nonsense without a word: refused. Returns all hellos (size), for the caller to free.
static Hello *greet(Run *run) {
    Transport *transport = &run->transport;
    Hello mine;
    memset(&mine, 0, sizeof mine);
    mine.options_hash = hash_options(&run->options);
    mine.pid = (int)getpid();
    mine.threads = run->threads.threads;
    memcpy(mine.host, transport->host, sizeof mine.host);
    Hello *all = (Hello *)calloc((size_t)transport->size, sizeof *all);
    transport_exchange(transport, "greeting", &mine, all, sizeof mine);
    Error error = {""};
    for (int rank = 1; rank < transport->size && !error_is_set(&error); rank++) {
        if (all[rank].options_hash == all[0].options_hash) { continue; }
        error_set(&error, "rank %d on %s was started with other options than rank 0 on %s", rank, all[rank].host, all[0].host);
    }
    agree_or_exit(run, error_is_set(&error) ? EXIT_USER_MISTAKE : 0, &error);
    return all;
}

// All ranks must hold the same parameters, bit for bit: at the start, and at the end whatever the rule did. Returns their fingerprint.
static uint64_t check_replicas(Run *run) {
    Transport *transport = &run->transport;
    uint64_t mine = hash_bytes(run->scheduler.parameters.data, run->table.parameter_count * sizeof(float));
    uint64_t *all = (uint64_t *)calloc((size_t)transport->size, sizeof mine);
    transport_exchange(transport, "fingerprint", &mine, all, sizeof mine);
    for (int rank = 0; rank < transport->size; rank++) {
        if (all[rank] != all[0]) { transport_fail(transport, "rank %d holds other parameters than rank 0: this is a bug of ours", rank); }
    }
    free(all);
    return mine;
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// What is printed and logged at the start

static void print_memory(const Run *run) {
    printf("memory     %.1f MB per rank:", (double)run->arena.bytes / 1e6);
    for (int i = 0; i < MEMORY_CLASS_COUNT; i++) {
        printf("%s %s %.1f", i > 0 ? "," : "", memory_class_name((MemoryClass)i), (double)arena_class_bytes(&run->arena, (MemoryClass)i) / 1e6);
    }
    printf("\n");
}

static void print_model(const Run *run) {
    const GptNeoConfig *config = &run->config;
    char data[512];
    data_loader_describe(&run->data, data, sizeof data);
    printf("model      %s: %.2f M parameters, %d layers, %d channels, %d heads, window %d, %d positions, vocabulary %d\n", config->name,
           (double)run->table.parameter_count / 1e6, config->layers, config->channels, config->heads, config->window, config->positions,
           config->vocabulary);
    printf("data       %s\n", data);
}

static void print_batch(const Run *run) {
    const Options *options = &run->options;
    char text[LOG_NUMBER_SIZE], total[LOG_NUMBER_SIZE];
    printf("batch      %d rank%s x %d micro-batches x %d x %d = %s tokens per commit%s; %s tokens are %lld commits\n", run->transport.size,
           run->transport.size == 1 ? "" : "s", nominal_accumulation(run), run->B, run->T,
           human_count((double)nominal_tokens_per_commit(run), text),
           options->accumulate == 0 ? " or more (auto: as many as fit beside the communication)" : "", human_count((double)options->tokens, total),
           (long long)nominal_commits(run));
    bool constant = strcmp(options->schedule, "constant") == 0;
    printf("rate       peak %g%s, %s to %g, warm-up %lld commits, counted by %s\n", options->learning_rate, run->rate_reason, options->schedule,
           constant ? options->learning_rate : options->minimum_learning_rate, (long long)options->warmup, options->learning_rate_by);
}

static void print_start(const Run *run) {
    const Transport *transport = &run->transport;
    printf("acco.c %s\n", ACCO_VERSION);
    print_model(run);
    printf("rule       %s: %s%s\n", run->rule->name, run->rule->summary, run->options.overlap ? "" : "; --overlap off: no two things at a time");
    printf("ranks      %d over %s (%s), %s on the wire%s\n", transport->size, transport->link.name, transport->reason, run->options.wire,
           run->options.link_mbit > 0 ? ", on an emulated slow link" : "");
    printf("threads    %d per rank (%s); matrix products by %s\n", run->threads.threads, run->threads.reason, matmul_library());
    print_batch(run);
    print_memory(run);
    if (run->threads.warning[0] != '\0') { printf("warning    %s\n", run->threads.warning); }
    printf("run        %s\n\n", run->directory);
    fflush(stdout);
}

static json_t *memory_as_json(const Run *run) {
    json_t *object = json_object();
    for (int i = 0; i < MEMORY_CLASS_COUNT; i++) {
        json_object_set_new(object, memory_class_name((MemoryClass)i), json_integer((json_int_t)arena_class_bytes(&run->arena, (MemoryClass)i)));
    }
    json_object_set_new(object, "total", json_integer((json_int_t)run->arena.bytes));
    return object;
}

static void log_start(Run *run, const Hello *hellos) {
    json_t *ranks = json_array();
    for (int rank = 0; rank < run->transport.size; rank++) {
        json_array_append_new(ranks, json_pack("{s:o, s:i, s:i}", "host", log_text(hellos[rank].host), "pid", hellos[rank].pid, "threads",
                                               hellos[rank].threads));
    }
    json_t *event = json_pack("{s:s, s:s, s:s, s:I, s:o, s:o, s:o}", "event", "start", "version", ACCO_VERSION, "transport",
                              run->transport.link.name, "parameters", (json_int_t)run->table.parameter_count, "ranks", ranks, "memory",
                              memory_as_json(run), "options", options_as_json(&run->options));
    Error error = {""};
    check_written(run, log_event(&run->log, event, &error), &error);
}

// The run directory, its files and the effective configuration; rank 0, but an error ends everybody.
static void open_run_directory(Run *run) {
    Error error = {""};
    int exit_code = 0;
    if (run_is_main(run)) {
        char path[RUN_PATH_SIZE + 16];
        bool made = run_directory_create(run->options.out, run->options.model, run->options.optimizer, run->directory, &error);
        snprintf(path, sizeof path, "%s/config.txt", run->directory);
        bool good = made && options_save_file(&run->options, path, &error) && log_open(&run->log, run->directory, &error);
        exit_code = good ? 0 : made ? EXIT_SYSTEM_FAILURE : EXIT_USER_MISTAKE; // a directory that can be had but not filled: the disk
    }
    agree_or_exit(run, exit_code, &error);
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// Training

// The scheduler's Problem: micro-batch `index` of this rank is sample number (index * ranks + rank) * B and the next B-1 of the global order.
static MicroBatchResult train_micro_batch(void *self, Stream *stream, uint64_t index, const float *parameters, float *gradients) {
    Run *run = (Run *)self;
    const Transport *transport = &run->transport;
    uint64_t first = (index * (uint64_t)transport->size + (uint64_t)transport->rank) * (uint64_t)run->B;
    MicroBatchResult result;
    Error error = {""};
    if (!data_loader_fill(&run->data, first, run->B, run->tokens, run->targets, &result.perfect_loss, &error)) {
        transport_fail(&run->transport, "%s", error.text);
    }
    result.loss = gpt_neo_loss_and_gradients(&run->model, stream, parameters, gradients, run->tokens, run->targets);
    if (run->options.slow_rank == transport->rank) { sleep_seconds(run->options.slow_ms / 1e3); }
    return result;
}

typedef struct Validation {
    Run *run;
    double loss, perfect_loss, batches; // in: nothing; out: sums over this rank's share, then over all
} Validation;

static void validate_task(void *context, Stream *stream) {
    Validation *sum = (Validation *)context;
    Run *run = sum->run;
    const DataLoader *data = run->options.val_data[0] != '\0' ? &run->validation_data : &run->data;
    for (int64_t batch = run->transport.rank; batch < run->options.val_batches; batch += run->transport.size) {
        double perfect;
        Error error = {""};
        if (!data_loader_fill_validation(data, (uint64_t)(batch * run->B), run->B, run->tokens, run->targets, &perfect, &error)) {
            transport_fail(&run->transport, "%s", error.text);
        }
        sum->loss += gpt_neo_loss(&run->model, stream, run->scheduler.parameters.data, run->tokens, run->targets);
        sum->perfect_loss += perfect;
        sum->batches += 1;
    }
}

static void validate_exchange_task(void *context, Stream *stream) {
    (void)stream;
    Validation *sum = (Validation *)context;
    Transport *transport = &sum->run->transport;
    double mine[3] = {sum->loss, sum->perfect_loss, sum->batches};
    double *all = (double *)calloc((size_t)transport->size, sizeof mine);
    transport_exchange(transport, "validation", mine, all, sizeof mine);
    sum->loss = sum->perfect_loss = sum->batches = 0;
    for (int rank = 0; rank < transport->size; rank++) {
        sum->loss += all[3 * rank];
        sum->perfect_loss += all[3 * rank + 1];
        sum->batches += all[3 * rank + 2];
    }
    free(all);
}

// Mean validation loss of the committed parameters, on all ranks; the batches are shared out. Returns it, and what a perfect model would have.
static double validate(Run *run, double *perfect_loss) {
    double began = clock_seconds();
    Validation sum = {run, 0, 0, 0};
    scheduler_call(&run->scheduler, run->scheduler.compute, validate_task, &sum);
    scheduler_call(&run->scheduler, run->scheduler.communication, validate_exchange_task, &sum);
    run->paused += clock_seconds() - began;
    *perfect_loss = sum.perfect_loss / sum.batches;
    return sum.loss / sum.batches;
}

static double training_seconds(const Run *run) { return clock_seconds() - run->started - run->paused; }

static void validate_and_report(Run *run) {
    double perfect, loss = validate(run, &perfect);
    run->validation_loss = loss;
    run->perfect_validation_loss = perfect;
    if (!run_is_main(run)) { return; }
    Error error = {""};
    const CommitReport *last = &run->scheduler.report;
    int64_t tokens = (int64_t)last->gradients_done * tokens_per_micro_batch(run);
    terminal_clear(&run->terminal);
    printf("%7lld validation loss %.4f", (long long)last->commit, loss);
    if (isfinite(perfect)) { printf(", a perfect model has %.4f", perfect); }
    printf("\n");
    fflush(stdout);
    check_written(run, log_validation(&run->log, last->commit, tokens, training_seconds(run), loss, perfect, &error), &error);
}

static void collect_commit(Run *run) {
    const CommitReport *commit = &run->scheduler.report;
    CommitReport *sum = &run->sum;
    run->commits_in_sum++;
    sum->micro_batches += commit->micro_batches;
    sum->loss += commit->loss * commit->micro_batches;
    sum->perfect_loss += commit->perfect_loss * commit->micro_batches;
    sum->compute_seconds += commit->compute_seconds;
    sum->communication_seconds += commit->communication_seconds;
    sum->exposed_seconds += commit->exposed_seconds;
}

static Report make_report(Run *run) {
    const CommitReport *last = &run->scheduler.report, *sum = &run->sum;
    double commits = (double)run->commits_in_sum, now = training_seconds(run);
    Report report;
    report.commit = last->commit;
    report.grads = (int64_t)last->gradients_done;
    report.tokens = report.grads * tokens_per_micro_batch(run);
    report.loss = sum->loss / sum->micro_batches;
    report.perfect_loss = sum->perfect_loss / sum->micro_batches;
    report.lr = last->learning_rate;
    report.grad_norm = last->gradient_norm;
    report.tokens_per_second = sum->micro_batches * (double)tokens_per_micro_batch(run) / (now - run->sum_began);
    report.compute_ms = 1e3 * sum->compute_seconds / commits;
    report.communication_ms = 1e3 * sum->communication_seconds / commits;
    report.exposed_ms = 1e3 * sum->exposed_seconds / commits;
    report.grads_per_commit = sum->micro_batches / commits;
    report.seconds = now;
    run->sum_began = now;
    run->commits_in_sum = 0;
    memset(&run->sum, 0, sizeof run->sum);
    return report;
}

static void report_commit(Run *run, bool last) {
    collect_commit(run);
    const CommitReport *commit = &run->scheduler.report;
    if (run_is_main(run) && (last || commit->commit % run->options.report_every == 0)) {
        Report report = make_report(run);
        Error error = {""};
        terminal_report(&run->terminal, &report);
        check_written(run, log_report(&run->log, &report, &error), &error);
    }
    int64_t every = run->options.val_every;
    if (run->options.val_batches > 0 && (last || (every > 0 && commit->commit % every == 0))) { validate_and_report(run); }
    if (run_is_main(run)) {
        terminal_bar(&run->terminal, (int64_t)commit->gradients_done * tokens_per_micro_batch(run), run->options.tokens, training_seconds(run));
    }
}

// A loss or a gradient that is not finite: every rank knows, nothing was updated, and the job ends in order.
static void fail_not_finite(Run *run) {
    const Scheduler *s = &run->scheduler;
    if (!run_is_main(run)) { return; }
    terminal_clear(&run->terminal);
    Error error = {""};
    log_event(&run->log, json_pack("{s:s, s:s, s:I}", "event", "end", "reason", "not finite", "commit", (json_int_t)s->optimizer.commits), &error);
    if (s->job.first_bad_rank >= 0) {
        fprintf(stderr, "train_gpt: the loss of rank %d is not a finite number after commit %lld; nothing was updated with it: lower --lr or "
                        "--grad-clip, or look at the data of that rank\n", s->job.first_bad_rank, (long long)s->optimizer.commits);
    } else {
        fprintf(stderr, "train_gpt: the gradient is not finite after commit %lld although every loss is; nothing was updated with it: lower "
                        "--lr or --grad-clip\n", (long long)s->optimizer.commits);
    }
}

static void train(Run *run) {
    Scheduler *s = &run->scheduler;
    double target = ceil((double)run->options.tokens / (double)tokens_per_micro_batch(run));
    run->started = clock_seconds();
    if (run->rule->begin != NULL) { run->rule->begin(s); }
    while (s->gradients_done < target && !s->stopped) {
        run->rule->round(s);
        if (!s->stopped) { report_commit(run, s->gradients_done >= target); }
    }
    if (s->stopped) { fail_not_finite(run); }
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// The end

// How far from the best possible: known where the data come from a grammar.
static void print_distance(const Run *run) {
    if (run->options.val_batches == 0) { return; }
    double loss = run->validation_loss, perfect = run->perfect_validation_loss;
    printf("loss       %.4f nats per token on text it has not seen", loss);
    if (isfinite(perfect)) { printf("; the best possible, knowing the grammar, is %.4f", perfect); }
    printf("\n");
}

static void print_end(Run *run, uint64_t fingerprint) {
    const CommitReport *last = &run->scheduler.report;
    double seconds = training_seconds(run), tokens = last->gradients_done * (double)tokens_per_micro_batch(run);
    double planned = (double)run->arena.bytes, used = (double)arena_resident_bytes(&run->arena);
    double rate = tokens / seconds * gpt_neo_flops_per_token(&run->config, run->T) / 1e9;
    terminal_clear(&run->terminal);
    printf("\ntrained    %lld commits, %.0f tokens in %.1f s: %.0f tokens/s, %.1f GFLOP/s over all ranks\n", (long long)last->commit, tokens,
           seconds, tokens / seconds, rate);
    print_distance(run);
    printf("memory     planned %.1f MB, used %.1f MB (%+.2f %%)\n", planned / 1e6, used / 1e6, 100 * (used - planned) / planned);
    printf("parameters fingerprint %016llx, the same on every rank\n", (unsigned long long)fingerprint);
    char text[32];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)fingerprint);
    json_t *event = json_pack("{s:s, s:s, s:I, s:I, s:o, s:o, s:I, s:I, s:s}", "event", "end", "reason", "done", "commit",
                              (json_int_t)last->commit, "tokens", (json_int_t)tokens, "seconds", log_real(seconds), "tokens_per_second",
                              log_real(tokens / seconds), "planned_bytes", (json_int_t)planned, "used_bytes", (json_int_t)used,
                              "parameters_fingerprint", text);
    Error error = {""};
    check_written(run, log_event(&run->log, event, &error), &error);
}

typedef struct Sample {
    Run *run;
    Sampler sampler;
    int32_t *prompt, *output; // (prompt_count), (count)
    int prompt_count, count;
} Sample;

static void sample_task(void *context, Stream *stream) {
    Sample *sample = (Sample *)context;
    const Options *options = &sample->run->options;
    Random random = {random_hash((uint64_t)options->seed, FINGERPRINT_SEED)};
    sample->count = sampler_generate(&sample->sampler, stream, sample->run->scheduler.parameters.data, sample->prompt, sample->prompt_count,
                                     sample->output, sample->count, options->temperature, (int)options->top_k, &random);
}

static bool data_is_bytes(const Run *run) { return run->data.builtin || run->data.files[0].token_bytes == 1; }

// Without --prompt a text begins behind a line end, as every window of the built-in corpus does.
static void encode_prompt(const Run *run, Sample *sample) {
    const char *prompt = run->options.prompt[0] != '\0' ? run->options.prompt : "\n";
    sample->prompt_count = data_is_bytes(run) ? (int)strlen(prompt) : 1;
    sample->prompt = (int32_t *)calloc((size_t)sample->prompt_count, sizeof(int32_t));
    for (int i = 0; i < sample->prompt_count; i++) { sample->prompt[i] = data_is_bytes(run) ? (unsigned char)prompt[i] : run->config.vocabulary - 1; }
}

static void print_sampled_tokens(const Run *run, const Sample *sample) {
    printf("\nsample     temperature %g, top-k %lld%s\n%s", run->options.temperature, (long long)run->options.top_k,
           data_is_bytes(run) ? "" : ": token ids, as there is no vocabulary to spell them with", run->options.prompt);
    for (int i = 0; i < sample->count; i++) {
        if (data_is_bytes(run)) {
            putchar(sample->output[i] == '\n' || sample->output[i] >= ' ' ? sample->output[i] : '?');
        } else {
            printf("%d ", sample->output[i]);
        }
    }
    printf("\n");
}

// A text by the trained model, with a cache of keys and values in an arena of its own.
static void print_sample(Run *run) {
    if (run->options.sample_tokens == 0) { return; }
    Sample sample;
    memset(&sample, 0, sizeof sample);
    sample.run = run;
    sample.count = (int)run->options.sample_tokens;
    sample.output = (int32_t *)calloc((size_t)sample.count, sizeof(int32_t));
    encode_prompt(run, &sample);
    Arena arena;
    memset(&arena, 0, sizeof arena);
    Error error = {""};
    sampler_reserve(&sample.sampler, &arena, &run->config, run->threads.threads);
    if (arena_commit(&arena, &error)) {
        scheduler_call(&run->scheduler, run->scheduler.compute, sample_task, &sample);
        print_sampled_tokens(run, &sample);
    } else {
        printf("\nno sample: %s\n", error.text);
    }
    arena_release(&arena);
    free(sample.prompt);
    free(sample.output);
}

static void print_files(const Run *run) {
    printf("\nlog        %s/log.jsonl\ncurve      %s/progress.tsv (scripts/plot %s > loss.svg)\nsettings   %s/config.txt (train_gpt --config "
           "it)\n",
           run->directory, run->directory, run->directory, run->directory);
}

static void start_run(Run *run, const Hello *hellos) {
    Error error = {""};
    agree_or_exit(run, arena_commit(&run->arena, &error) ? 0 : EXIT_USER_MISTAKE, &error);
    gpt_neo_initialize(&run->table, (uint64_t)run->options.seed, run->scheduler.parameters.data);
    check_replicas(run);
    run->transport.timeout_seconds = run->options.timeout_s;
    run->transport.chaos_seconds = run->options.chaos_ms / 1e3;
    run->transport.link_bytes_per_second = run->options.link_mbit * 1e6 / 8;
    bool room = run->threads.threads * run->transport.local_size <= preflight_node_cores();
    run->team = team_create(run->threads.threads, room);
    scheduler_start(&run->scheduler, run->team);
    if (run_is_main(run)) {
        terminal_open(&run->terminal, stdout);
        print_start(run);
        log_start(run, hellos);
    }
}

static void finish_run(Run *run) {
    uint64_t fingerprint = check_replicas(run);
    if (!run_is_main(run)) { return; }
    print_end(run, fingerprint);
    print_sample(run);
    print_files(run);
    log_close(&run->log);
}

static void release_run(Run *run) {
    scheduler_stop(&run->scheduler);
    team_destroy(run->team);
    arena_release(&run->arena);
    parameter_table_free(&run->table);
    free(run->decay_ranges);
    data_loader_close(&run->data);
    if (run->options.val_data[0] != '\0') { data_loader_close(&run->validation_data); }
    transport_close(&run->transport);
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// Commands

static int command_train(Run *run) {
    Error error = {""};
    if (!transport_open(&run->transport, &error)) { exit_user_mistake(&error); }
    preflight_threads(run->transport.local_size, (int)run->options.threads, &run->threads);
    bool good = preflight_check_copies(run->transport.size, strcmp(transport_library(), "MPI") == 0, getenv, &error) &&
                choose_model(run, &error) && choose_rates(run, &error) &&
                options_check_ranks(&run->options, run->transport.size, run->T, &error) && open_data(run, &error);
    agree_or_exit(run, good ? 0 : EXIT_USER_MISTAKE, &error);
    Hello *hellos = greet(run);
    open_run_directory(run);
    reserve_memory(run);
    start_run(run, hellos);
    free(hellos);
    train(run);
    bool stopped = run->scheduler.stopped;
    if (!stopped) { finish_run(run); }
    release_run(run);
    return stopped ? EXIT_SYSTEM_FAILURE : 0;
}

static int command_plan(Run *run) {
    Error error = {""};
    transport_open_alone(&run->transport, "a plan");
    run->transport.size = (int)run->options.ranks;
    if (!choose_model(run, &error) || !choose_rates(run, &error)) { exit_user_mistake(&error); }
    preflight_threads(1, (int)run->options.threads, &run->threads);
    reserve_memory(run);
    printf("%s, %s, %d ranks, micro-batch %d x %d: bytes of one rank\n\n", run->config.name, run->rule->name, run->transport.size, run->B, run->T);
    for (int i = 0; i < MEMORY_CLASS_COUNT; i++) {
        printf("%-15s %15zu\n", memory_class_name((MemoryClass)i), arena_class_bytes(&run->arena, (MemoryClass)i));
        for (int j = 0; j < run->arena.count; j++) {
            const Reservation *reservation = &run->arena.reservations[j];
            if (reservation->memory_class == (MemoryClass)i) { printf("  %-25s %15zu\n", reservation->name, reservation->bytes); }
        }
    }
    transport_close(&run->transport);
    printf("%-15s %15zu  (with alignment; %.2f bytes per parameter)\n", "total", run->arena.bytes,
           (double)run->arena.bytes / (double)run->table.parameter_count);
    parameter_table_free(&run->table);
    free(run->decay_ranges);
    return 0;
}

int main(int argc, char **argv) {
    Run *run = (Run *)calloc(1, sizeof *run);
    Error error = {""};
    signal(SIGXFSZ, SIG_IGN); // a file at its size limit is reported as a full disk is
    if (!options_parse(argc, argv, &run->options, &error) || !options_check(&run->options, &error)) { exit_user_mistake(&error); }
    run->rule = rule_find(run->options.optimizer);
    int status = 0;
    switch (run->options.command) {
    case COMMAND_TRAIN: status = command_train(run); break;
    case COMMAND_PLAN: status = command_plan(run); break;
    case COMMAND_HELP: options_print_help(stdout); break;
    case COMMAND_HELP_MARKDOWN: options_print_markdown(stdout); break;
    case COMMAND_VERSION: printf("acco.c %s\n", ACCO_VERSION); break;
    }
    free(run);
    return status;
}
