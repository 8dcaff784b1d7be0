// report.h: what a run says: the block at the start, a line per report, the end. Rank 0
// only.
//
// The same facts go to the terminal and, as JSON, to the log. Every choice that the
// program made by itself stands in the first block with its reason.
#ifndef ACCO_PROGRAM_REPORT_H
#define ACCO_PROGRAM_REPORT_H

#include "program/setup.h"

// What only rank 0 can fail at while training runs: writing its files.
static inline void check_written(Run *run, bool written, const Error *error) {
    if (!written) {
        transport_fail(&run->transport, "%s: free some space or choose another --out; the model is lost",
                       error->text);
    }
}

// ---------------------------------------------------------------------------------------
// What is printed and logged at the start

static inline void print_memory(const Run *run) {
    printf("memory     %.1f MB per rank:", (double)run->arena.bytes / 1e6);
    for (int i = 0; i < MEMORY_CLASS_COUNT; i++) {
        printf("%s %s %.1f", i > 0 ? "," : "", memory_class_name((MemoryClass)i),
               (double)arena_class_bytes(&run->arena, (MemoryClass)i) / 1e6);
    }
    printf("\n");
}

static inline void print_model(const Run *run) {
    const GptNeoConfig *config = &run->config;
    char data[512];
    data_loader_describe(&run->data, data, sizeof data);
    printf("model      %s: %.2f M parameters, %d layers, %d channels, %d heads, window %d, %d positions, "
           "vocabulary %d\n",
           config->name, (double)run->table.parameter_count / 1e6, config->layers, config->channels,
           config->heads, config->window, config->positions, config->vocabulary);
    printf("data       %s\n", data);
}

static inline const char *step_name(const Run *run) {
    return run->rule->kind == RULE_LOCAL ? "inner step" : "commit";
}

static inline void print_batch(const Run *run) {
    const Options *options = &run->options;
    char text[LOG_NUMBER_SIZE], total[LOG_NUMBER_SIZE];
    int ranks = run->transport.size;
    const char *commit = step_name(run);
    const char *drained =
        run->rule->finish == drain ? ", and one more for the gradients under way at the end" : "";
    printf("batch      %lld micro-batches over %d rank%s x %d sequence%s x %d tokens = %s tokens per %s%s; "
           "%s tokens are %lld %ss%s\n",
           (long long)nominal_micro_batches(run), ranks, ranks == 1 ? "" : "s", run->B,
           run->B == 1 ? "" : "s", run->T, human_count((double)nominal_tokens_per_commit(run), text), commit,
           run->scheduler.settings.adaptive ? " or more (auto: as many as fit beside the communication)" : "",
           human_count((double)options->tokens, total), (long long)nominal_commits(run), commit, drained);
    if (run->bucket_reason[0] != '\0') {
        const Layout *layout = &run->scheduler.layout;
        size_t cells = job_bucket_cells(&run->scheduler, layout);
        printf("buckets    %zu of %.3g MB (%s)\n", (layout->cells + cells - 1) / cells,
               (double)(cells * layout->piece * (size_t)layout->size * sizeof(float)) / 1e6,
               run->bucket_reason);
    }
    bool constant = strcmp(options->schedule, "constant") == 0;
    printf("rate       peak %g%s, %s to %g, warm-up %lld %ss, moved by %s\n", options->learning_rate,
           run->rate_reason, options->schedule,
           constant ? options->learning_rate : options->minimum_learning_rate, (long long)options->warmup,
           commit, strcmp(options->learning_rate_by, "commits") == 0 ? "commits" : "micro-batch gradients");
}

// The rule and the numbers of its paper.
static inline void print_rule(const Run *run) {
    const Options *options = &run->options;
    printf("rule       %s: %s%s\n", run->rule->name, run->rule->summary,
           options->overlap ? "" : "; --overlap off: no two things at a time");
    if (strcmp(run->rule->name, "co2") == 0) {
        printf("           tau %lld, beta %g, alpha %g, phi %g%s, gap %s\n", (long long)options->co2_tau,
               options->co2_beta, options->co2_alpha, options->co2_phi,
               options->co2_phi > 0 ? "" : " (no clipping)", options->co2_gap);
    } else if (run->rule->kind == RULE_LOCAL) {
        printf("           H %lld, outer rate %g, mu %g", (long long)options->diloco_h,
               options->diloco_outer_lr, options->diloco_mu);
        if (strcmp(run->rule->name, "diloco") != 0) {
            printf("; P %lld (%s), tau %lld, alpha %g", (long long)options->streaming_p,
                   options->streaming_order, (long long)options->streaming_tau, options->streaming_alpha);
        }
        printf("\n");
    }
    if (options->spike_limit > 0 || strcmp(options->on_spike, "stop") != 0) {
        char limit[64] = "";
        if (options->spike_limit > 0) {
            snprintf(limit, sizeof limit, ", or too large by limit %g", options->spike_limit);
        }
        printf("           a loss or gradient that is not finite%s: %s\n", limit, options->on_spike);
    }
    if (options->sequential > 0) {
        printf("           the first %lld commits are sequential\n", (long long)options->sequential);
    }
}

// What ranks send each other, and in which format.
static inline void print_wire(const Run *run) {
    const Options *options = &run->options;
    printf("%s on the wire", options->wire);
    if (run->scheduler.settings.estimate_wire != run->scheduler.settings.wire) {
        printf(", %s for estimates", options->estimate_wire);
    }
    if (options->link_mbit > 0) { printf(", at most %g Mbit/s", options->link_mbit); }
    if (options->link_us > 0) { printf(", every message %g us late", options->link_us); }
    printf("%s\n", options->link_mbit > 0 || options->link_us > 0 ? " (emulated)" : "");
}

// Where rank 0 computes; others may differ.
static inline void print_device(const Run *run) {
    const Placement *placement = &run->placement;
    int threads = run->threads.threads;
    printf("device     %s; %s\n", placement->device_reason, precision_name(placement->precision));
    if (placement->ranks_on_gpus > 0 && placement->ranks_on_gpus < run->transport.size) {
        printf("           %d of %d ranks compute on GPUs, the others on CPUs: the log says which\n",
               placement->ranks_on_gpus, run->transport.size);
    }
    if (placement->on_gpu) {
        printf("keeps      recompute %s (%s)\n", recompute_name(run->model.settings.recompute),
               placement->recompute_reason);
        if (run->transport.size > 1) { printf("exchange   %s\n", placement->gpu_exchange_reason); }
        return;
    }
    printf("threads    %d per rank (%s); matrix products by %s\n", threads, run->threads.reason,
           matmul_library());
}

static inline void print_start(const Run *run) {
    const Transport *transport = &run->transport;
    printf("acco.c %s\n", ACCO_VERSION);
    print_model(run);
    print_rule(run);
    if (transport->size == 1) {
        printf("ranks      1 (%s)\n", transport->reason);
    } else {
        printf("ranks      %d over %s (%s), ", transport->size, transport->link.name, transport->reason);
        print_wire(run);
    }
    print_device(run);
    print_batch(run);
    print_memory(run);
    if (run->threads.warning[0] != '\0') { printf("warning    %s\n", run->threads.warning); }
    printf("run        %s\n\n", run->directory);
    fflush(stdout);
}

static inline json_t *memory_as_json(const Run *run) {
    json_t *object = json_object();
    for (int i = 0; i < MEMORY_CLASS_COUNT; i++) {
        json_object_set_new(object, memory_class_name((MemoryClass)i),
                            json_integer((json_int_t)arena_class_bytes(&run->arena, (MemoryClass)i)));
    }
    json_object_set_new(object, "total", json_integer((json_int_t)run->arena.bytes));
    return object;
}

static inline void log_start(Run *run, const Hello *hellos) {
    json_t *ranks = json_array();
    for (int rank = 0; rank < run->transport.size; rank++) {
        json_array_append_new(ranks, json_pack("{s:o, s:i, s:i, s:o}", "host", log_text(hellos[rank].host),
                                               "pid", hellos[rank].pid, "threads", hellos[rank].threads,
                                               "device", log_text(hellos[rank].device)));
    }
    json_t *event = json_pack("{s:s, s:s, s:I, s:s, s:I, s:I, s:o, s:o, s:o}", "event", "start", "version",
                              ACCO_VERSION, "time", (json_int_t)time(NULL), "transport",
                              run->transport.link.name, "parameters", (json_int_t)run->table.parameter_count,
                              "bucket_bytes", (json_int_t)run->scheduler.settings.bucket, "ranks", ranks,
                              "memory", memory_as_json(run), "options", options_as_json(&run->options));
    Error error = {""};
    check_written(run, log_event(&run->log, event, &error), &error);
}

// ---------------------------------------------------------------------------------------
// While it trains

static inline void collect_commit(Run *run) {
    const CommitReport *commit = &run->scheduler.report;
    CommitReport *sum = &run->sum;
    run->reports_seen = run->scheduler.reports;
    run->has_news = true;
    sum->micro_batches += commit->micro_batches;
    sum->loss += commit->loss * commit->micro_batches;
    sum->perfect_loss += commit->perfect_loss * commit->micro_batches;
    sum->compute_seconds += commit->compute_seconds;
    sum->communication_seconds += commit->communication_seconds;
    sum->exposed_seconds += commit->exposed_seconds;
}

static inline Report make_report(Run *run) {
    const CommitReport *last = &run->scheduler.report, *sum = &run->sum;
    double commits = fmax((double)(last->commit - run->sum_began_commit), 1), now = training_seconds(run);
    double micro_batches = last->gradients_done - run->sum_began_gradients;
    Report report;
    report.commit = last->commit;
    report.grads = (int64_t)last->gradients_done;
    report.tokens = report.grads * tokens_per_micro_batch(run);
    report.loss = sum->loss / sum->micro_batches;
    report.perfect_loss = sum->perfect_loss / sum->micro_batches;
    report.lr = last->learning_rate;
    report.grad_norm = last->gradient_norm;
    report.tokens_per_second = micro_batches * (double)tokens_per_micro_batch(run) / (now - run->sum_began);
    report.compute_ms = 1e3 * sum->compute_seconds / commits;
    report.communication_ms = 1e3 * sum->communication_seconds / commits;
    report.exposed_ms = 1e3 * sum->exposed_seconds / commits;
    report.grads_per_commit = micro_batches / commits;
    report.seconds = now;
    report.bytes_sent = (double)__atomic_load_n(&run->transport.bytes_sent, __ATOMIC_RELAXED);
    run->sum_began = now;
    run->sum_began_commit = last->commit;
    run->sum_began_gradients = last->gradients_done;
    run->has_news = false;
    memset(&run->sum, 0, sizeof run->sum);
    return report;
}

// ---------------------------------------------------------------------------------------
// Steps that were not made

enum { SPIKE_TEXT = 600 };

// The first of the sequences that a micro-batch of a rank consists of, in the order of
// the data.
static inline int64_t first_sequence(const Run *run, int rank, double micro_batch) {
    return (run->checkpointed.data_base + (int64_t)micro_batch * run->transport.size + rank) * run->B;
}

// Which tensor an element of the flat vector belongs to.
static inline const ParameterInfo *tensor_of(const Run *run, size_t element) {
    int i = run->table.count - 1;
    while (i > 0 && run->table.entries[i].offset > element) { i--; }
    return &run->table.entries[i];
}

static inline void describe_loss(const Run *run, const SpikeReport *spike, char *text, size_t size) {
    double micro_batch = spike->site.micro_batch - 1;
    int64_t first = first_sequence(run, spike->rank, micro_batch);
    snprintf(text, size, "the loss of rank %d is not a finite number", spike->rank);
    size_t used = strlen(text);
    if (spike->site.micro_batch == 0) { return; } // it was handed over before the run was resumed
    snprintf(text + used, size - used,
             " in its micro-batch %.0f (of %d sequence%s, the first is number %lld in the order of training",
             micro_batch, run->B, run->B == 1 ? "" : "s", (long long)first);
    used = strlen(text);
    if (!run->data.builtin) {
        uint64_t start;
        const DataFile *file =
            data_loader_find(&run->data, data_loader_window(&run->data, (uint64_t)first), &start);
        snprintf(text + used, size - used, ": %.200s from token %llu", file->path, (unsigned long long)start);
    }
    used = strlen(text);
    snprintf(text + used, size - used, ")");
}

static inline void describe_gradient(const Run *run, const SpikeReport *spike, char *text, size_t size) {
    if (spike->rank < 0) {
        snprintf(text, size, "the sum of the gradients is not finite although those of every rank are");
        return;
    }
    size_t element = (size_t)spike->site.element - 1;
    const ParameterInfo *tensor = tensor_of(run, element);
    size_t within = element - tensor->offset, columns = tensor->columns > 0 ? (size_t)tensor->columns : 1;
    snprintf(text, size,
             "the gradient of rank %d is not finite although its loss is; the backward pass met it first in "
             "%s[%zu",
             spike->rank, tensor->name, within / columns);
    size_t used = strlen(text);
    if (tensor->columns > 0) {
        snprintf(text + used, size - used, ", %zu]", within % columns);
    } else {
        snprintf(text + used, size - used, "]");
    }
}

static inline const char *describe_spike(const Run *run, const SpikeReport *spike, char *text, size_t size) {
    switch (spike->kind) {
    case SPIKE_LOSS: describe_loss(run, spike, text, size); break;
    case SPIKE_GRADIENT: describe_gradient(run, spike, text, size); break;
    case SPIKE_PARAMETERS:
        snprintf(text, size,
                 "the parameters of rank %d lead nowhere: they, or %d gradients in a row, are not finite or "
                 "too large",
                 spike->rank, SPIKE_PATIENCE);
        break;
    default: {
        bool high = spike->kind == SPIKE_HIGH_LOSS;
        if (run->rule->kind == RULE_LOCAL) {
            snprintf(text, size, "%s of rank %d is far larger than those before it",
                     high ? "a loss" : "a gradient", spike->rank);
        } else {
            snprintf(text, size,
                     "%s is %.3g, and after those before it at most %.3g was to be expected; that of rank %d "
                     "is the largest",
                     high ? "the loss" : "the gradient's norm", spike->measured, spike->largest, spike->rank);
        }
    }
    }
    return text;
}

static inline void log_spike(Run *run, const SpikeReport *spike, const char *text) {
    static const char *const kinds[] = {"none", "loss", "gradient", "norm", "high loss", "parameters"};
    bool has_batch = spike->site.micro_batch > 0,
         has_element = spike->site.element > 0 && spike->kind == SPIKE_GRADIENT;
    int64_t first = has_batch ? first_sequence(run, spike->rank, spike->site.micro_batch - 1) : 0;
    json_t *event = json_pack(
        "{s:s, s:s, s:I, s:i, s:o, s:o, s:o, s:o, s:o, s:o, s:s, s:o}", "event", "spike", "kind",
        kinds[spike->kind], "commit", (json_int_t)spike->commit, "rank", spike->rank, "first_sequence",
        has_batch ? json_integer((json_int_t)first) : json_null(), "sequences",
        has_batch ? json_integer(run->B) : json_null(), "tensor",
        has_element ? json_string(tensor_of(run, (size_t)spike->site.element - 1)->name) : json_null(),
        "measured", log_real(spike->measured), "largest", log_real(spike->largest), "steps",
        log_real(spike->steps), "action", run->scheduler.failed ? "stop" : run->options.on_spike, "text",
        log_text(text));
    json_object_set_new(event, "count", log_real(run->scheduler.spikes));
    Error error = {""};
    check_written(run, log_event(&run->log, event, &error), &error);
}

// Says what was left out since the latest look; the end of a run is said by fail_spike, a
// rollback by whoever does it.
static inline void report_spike(Run *run) {
    const Scheduler *s = &run->scheduler;
    char text[SPIKE_TEXT];
    bool news = s->spikes > run->spikes_seen;
    run->spikes_seen = s->spikes;
    if (!news || !run_is_main(run)) { return; }
    terminal_clear(&run->terminal);
    describe_spike(run, &s->spike, text, sizeof text);
    log_spike(run, &s->spike, text);
    if (s->failed) { return; }
    printf("%7lld spike: %s", (long long)s->spike.commit, text);
    if (s->settings.on_spike == SPIKE_SKIP) {
        printf("; left out%s, %.0f so far", s->spike.steps > 1 ? " with others" : "", s->spikes);
    }
    printf("\n");
    fflush(stdout);
}

// Every rank knows, nothing was updated, and the job ends in order.
static inline void fail_spike(Run *run) {
    const Scheduler *s = &run->scheduler;
    char text[SPIKE_TEXT], tried[96] = "";
    if (!run_is_main(run)) { return; }
    terminal_clear(&run->terminal);
    Error error = {""};
    log_event(&run->log,
              json_pack("{s:s, s:s, s:I}", "event", "end", "reason", "spike", "commit",
                        (json_int_t)s->optimizer.commits),
              &error);
    SpikePolicy policy = s->settings.on_spike;
    if (policy == SPIKE_SKIP && s->spikes_in_a_row >= SPIKE_PATIENCE) {
        snprintf(tried, sizeof tried, "%d in a row were left out; ", SPIKE_PATIENCE);
    } else if (policy == SPIKE_ROLLBACK && run->rollback_commit < 0) {
        snprintf(tried, sizeof tried, "there is no checkpoint to go back to; ");
    } else if (policy == SPIKE_ROLLBACK) {
        snprintf(tried, sizeof tried, "going back to %s %lld %d times did not help; ", step_name(run),
                 (long long)run->rollback_commit, ROLLBACK_PATIENCE);
    }
    fprintf(stderr,
            "train_gpt: after %s %lld %s; %snothing was updated with it: lower --lr or --grad-clip, look at "
            "these data%s\n",
            step_name(run), (long long)s->spike.commit, describe_spike(run, &s->spike, text, sizeof text),
            tried, policy == SPIKE_STOP ? ", or go on with --on-spike skip" : "");
}

// ---------------------------------------------------------------------------------------
// At the end

// How far from the best possible: known where the data come from a grammar.
static inline void print_distance(const Run *run) {
    if (isnan(run->validation_loss)) { return; } // there has been no validation yet
    double loss = run->validation_loss, perfect = run->perfect_validation_loss;
    printf("loss       %.4f nats per token on text it has not seen", loss);
    if (isfinite(perfect)) { printf("; the best possible, knowing the grammar, is %.4f", perfect); }
    printf("\n");
}

static inline void print_end(Run *run, uint64_t fingerprint) {
    const CommitReport *last = &run->scheduler.report;
    double seconds = training_seconds(run),
           tokens = last->gradients_done * (double)tokens_per_micro_batch(run);
    double planned = (double)run->arena.bytes, used = (double)arena_resident_bytes(&run->arena);
    double rate = tokens / seconds * gpt_neo_flops_per_token(&run->config, run->T) / 1e9;
    terminal_clear(&run->terminal);
    printf("\ntrained    %lld %ss, %.0f tokens in %.1f s: %.0f tokens/s, %.1f GFLOP/s over all ranks\n",
           (long long)last->commit, step_name(run), tokens, seconds, tokens / seconds, rate);
    print_distance(run);
    printf("memory     planned %.1f MB, used %.1f MB (%+.2f %%)\n", planned / 1e6, used / 1e6,
           100 * (used - planned) / planned);
    printf("parameters fingerprint %016llx, the same on every rank\n", (unsigned long long)fingerprint);
    char text[32];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)fingerprint);
    json_t *event = json_pack(
        "{s:s, s:s, s:I, s:I, s:o, s:o, s:I, s:I, s:s}", "event", "end", "reason",
        run->scheduler.stop_agreed ? "asked to stop" : "done", "commit", (json_int_t)last->commit, "tokens",
        (json_int_t)tokens, "seconds", log_real(seconds), "tokens_per_second", log_real(tokens / seconds),
        "planned_bytes", (json_int_t)planned, "used_bytes", (json_int_t)used, "parameters_fingerprint", text);
    Error error = {""};
    check_written(run, log_event(&run->log, event, &error), &error);
}

static inline void print_files(const Run *run) {
    printf("\nlog        %s/log.jsonl\ncurves     %s/progress.tsv (scripts/plot %s makes "
           "%s/plot.html)\nsettings   %s/config.txt (train_gpt "
           "--config it)\n",
           run->directory, run->directory, run->directory, run->directory, run->directory);
    if (run->options.trace[0] != '\0') {
        printf("trace      %s (https://ui.perfetto.dev opens it)\n", run->options.trace);
    }
}

#endif
