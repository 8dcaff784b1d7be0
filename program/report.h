// report.h: what a run says: the block at the start, reports while it trains, the end.
// Rank 0 only.
//
// The same facts go to the terminal and, as JSON, to the log. Every choice that the
// program made by itself is printed once, in the first block, with its reason.
#ifndef ACCO_PROGRAM_REPORT_H
#define ACCO_PROGRAM_REPORT_H

#include "program/agreement.h"
#include "program/data.h"
#include "program/run_directory.h"
#include "program/setup.h"
#include "runtime/names.h"

// ---------------------------------------------------------------------------------------
// A log that cannot be written: training goes on, as it does without a checkpoint. While the
// disk is full its lines wait in memory; what cannot even wait is lost, and said.

// Says when the disk is full, and when it no longer is.
static inline void print_disk_full(Run *run) {
    bool full = run->log.held_bytes + run->curves.held_bytes > 0;
    if (full == run->disk_full) { return; }
    run->disk_full = full;
    terminal_clear(&run->terminal);
    printf("%6lld %s\n", (long long)run->scheduler.optimizer.commits,
           full ? "the disk of --out is full: training goes on, and the log waits in memory for space"
           : run->lost_lines == 0 ? "there is space on the disk again: the log is whole"
                                  : "there is space on the disk again: the log goes on");
    fflush(stdout);
}

// Notes whether a line was written, or waits, and says once if one is lost. So will the
// exit code.
static inline void note_written(Run *run, bool written, const Error *error) {
    print_disk_full(run);
    if (written || run->lost_lines++ > 0) { return; }
    terminal_clear(&run->terminal);
    fprintf(stderr, "train_gpt: %s; training goes on, but what cannot be written is lost\n", error->text);
}

// Writes the lines that wait for space.
static inline void flush_logs(Run *run) {
    Error error = {""};
    (void)(log_flush(&run->log, &error) && log_flush(&run->curves, &error)); // otherwise they wait on
    print_disk_full(run);
}

// The end of the log. Lines that still wait for space are lost.
static inline void close_logs(Run *run) {
    Log *logs[] = {&run->log, &run->curves};
    for (size_t i = 0; i < sizeof logs / sizeof logs[0]; i++) {
        Error error = {""};
        int lines = log_held_lines(logs[i]);
        if (!log_flush(logs[i], &error)) {
            note_written(run, false, &error);
            run->lost_lines += lines - 1;
        }
        log_close(logs[i]);
    }
}

// Appends an event to the log; releases it.
static inline void report_event(Run *run, json_t *event) {
    Error error = {""};
    note_written(run, log_event(&run->log, event, &error), &error);
}

// ---------------------------------------------------------------------------------------
// The start

// What goes into a commit, and how the learning rate moves.
static inline void print_batch(const Run *run) {
    const Options *options = &run->options;
    char text[NUMBER_TEXT_SIZE], total[NUMBER_TEXT_SIZE], epochs[48] = "";
    double epoch = tokens_per_epoch(run);
    if (epoch > 0) { snprintf(epochs, sizeof epochs, " (%.4g epochs)", (double)options->tokens / epoch); }
    int ranks = run->transport.size;
    const char *commit = step_name(run);
    // Such a rule ends with a commit of what was computed beside the last one.
    bool drains = run->rule->kind == RULE_OVERLAPPED && run->rule->finish != NULL;
    printf("batch      %lld micro-batches over %d rank%s x %d sequence%s x %d tokens = %s tokens per %s%s; "
           "%s tokens%s are %lld %ss%s\n",
           (long long)nominal_micro_batches(run), ranks, ranks == 1 ? "" : "s", run->B,
           run->B == 1 ? "" : "s", run->T, human_count((double)nominal_tokens_per_commit(run), text), commit,
           run->scheduler.settings.adaptive ? " or more (auto: as many as fit beside the communication)" : "",
           human_count((double)options->tokens, total), epochs, (long long)nominal_commits(run), commit,
           drains ? ", and one more for the gradients under way at the end" : "");
    if (run->bucket_reason[0] != '\0') {
        const Layout *layout = &run->scheduler.layout;
        size_t cells = job_bucket_cells(&run->scheduler, layout);
        printf("buckets    %zu of %.3g MB (%s)\n", (layout->cells + cells - 1) / cells,
               (double)(cells * layout->piece * (size_t)layout->size * sizeof(float)) / 1e6,
               run->bucket_reason);
    }
    bool constant = options->schedule == SCHEDULE_CONSTANT;
    printf("rate       peak %g%s, %s to %g, warm-up %lld %ss, moved by %s\n", options->learning_rate,
           run->rate_reason, options_choice_name(options, &options->schedule),
           constant ? options->learning_rate : options->minimum_learning_rate, (long long)options->warmup,
           commit, options->learning_rate_by == RATE_BY_COMMITS ? "commits" : "micro-batch gradients");
}

// The rule and the numbers of its paper.
static inline void print_rule(const Run *run) {
    const Options *options = &run->options;
    printf("rule       %s: %s%s\n", run->rule->name, run->rule->summary,
           options->overlap ? "" : "; --overlap off: no two things at a time");
    if (run->rule->describe != NULL) {
        char text[RULE_TEXT];
        run->rule->describe(options_of_rule(options), &run->scheduler.settings, text);
        printf("           %s\n", text);
    }
    if (run->rule_reason[0] != '\0') { printf("           %s\n", run->rule_reason); }
    if (options->spike_limit > 0 || options->on_spike != SPIKE_STOP) {
        char limit[64] = "";
        if (options->spike_limit > 0) {
            snprintf(limit, sizeof limit, ", or too large by limit %g", options->spike_limit);
        }
        printf("           a loss or gradient that is not finite%s: %s\n", limit,
               options_choice_name(options, &options->on_spike));
    }
    if (options->sequential > 0) {
        printf("           the first %lld commits are sequential\n", (long long)options->sequential);
    }
}

// In which format ranks send vectors to each other, and over what emulated link.
static inline void print_wire(const Run *run) {
    const Options *options = &run->options;
    printf("%s on the wire", wire_name(run->scheduler.settings.wire));
    if (run->scheduler.settings.estimate_wire != run->scheduler.settings.wire) {
        printf(", %s for estimates", wire_name(run->scheduler.settings.estimate_wire));
    }
    if (run->scheduler.settings.gathers_casts) { printf(", bf16 for the parameters that all compute with"); }
    if (options->link_mbit > 0) { printf(", at most %g Mbit/s", options->link_mbit); }
    if (options->link_us > 0) { printf(", every message %g us late", options->link_us); }
    printf("%s\n", options_emulate_link(options) ? " (emulated)" : "");
}

// What reports compare model operations with, if that is known.
static inline void print_peak(const Run *run) {
    if (!(run->peak_flops > 0)) { return; }
    printf("peak       %.4g TFLOP/s over all ranks: %s; \"mfu\" in log.jsonl is the share of it\n",
           run->peak_flops / 1e12,
           run->placement.on_gpu ? "bf16, as the maker states it" : "products of a layer, measured now");
}

// With --tune-products: whose algorithms the matrix products of a GPU use.
static inline void print_products(const Run *run) {
    const ProductChoices *products = &run->products;
    const char *asked = run->options.tune_products;
    if (strcmp(asked, "off") == 0) { return; }
    if (strcmp(asked, "on") == 0) {
        printf("products   the fastest of the library's algorithms for %d shapes, %d of them chosen before; "
               "%s/products.json has them for --tune-products\n",
               products->count, products->found, run->directory);
    } else {
        printf("products   %d shapes as in %s; %d that it lacks and %d that the library refused get the "
               "library's first choice\n",
               products->found, asked, products->missed, products->refused);
    }
    if (run->placement.odd_one[0] != '\0') {
        printf("           ranks with another kind of GPU than rank 0 take the library's first choice\n");
    }
}

// Where rank 0 computes; other ranks may compute elsewhere.
static inline void print_device(const Run *run) {
    const Placement *placement = &run->placement;
    int threads = run->threads.threads;
    char products[96];
    printf("device     %s; %s\n", placement->device_reason, precision_name(placement->precision));
    if (placement->ranks_on_gpus > 0 && placement->ranks_on_gpus < run->transport.size) {
        printf("           %d of %d ranks compute on GPUs, the others on CPUs: the log says which\n",
               placement->ranks_on_gpus, run->transport.size);
    }
    if (placement->odd_one[0] != '\0') { printf("           %s\n", placement->odd_one); }
    print_peak(run);
    if (placement->on_gpu) {
        printf("keeps      recompute %s (%s)\n", recompute_name(run->model.settings.recompute),
               placement->recompute_reason);
        if (run->transport.size > 1) { printf("           %s\n", placement->gpu_exchange_reason); }
        print_products(run);
        return;
    }
    printf("threads    %d per rank (%s); matrix products by %s\n", threads, run->threads.reason,
           matmul_library(products));
    const double *rates = placement->product_rates.gflops;
    if (rates[PRECISION_FP32] > 0) {
        printf("           at %.0f GFLOP/s in fp32 and %.0f in bf16%s: %s\n", rates[PRECISION_FP32],
               rates[PRECISION_BF16], run->transport.size > 1 ? " on the slowest rank" : "",
               product_rates_faster(&placement->product_rates) == PRECISION_BF16 ? "bf16 is faster"
                                                                                 : "fp32 is as fast");
    }
    if (run->options.precision_kept) {
        printf("           --precision fastest: %s, as the run that goes on has begun\n",
               precision_name(placement->precision));
    }
}

// Says where there is less to validate on than --val-batches asks for.
static inline void print_validation_cap(Run *run) {
    int64_t batches = validation_batches(run), asked = run->options.val_batches;
    if (batches == asked) { return; }
    printf("           --val-batches %lld is more than there is: a validation visits every held-out window "
           "once, in %lld micro-batch%s\n",
           (long long)asked, (long long)batches, batches == 1 ? "" : "es");
}

// Where there are several hosts: what each has, and through which networks it might talk.
// A host is told by its name, and is listed where its first rank is.
static inline void print_hosts(FILE *file, const Hello *hellos, int ranks) {
    enum { MOST = 16 };
    int hosts = 0;
    bool several = false;
    for (int rank = 0; rank < ranks; rank++) {
        several = several || strcmp(hellos[rank].host, hellos[0].host) != 0;
    }
    for (int rank = 0; several && rank < ranks; rank++) {
        int first = 0, mates = 0;
        while (strcmp(hellos[first].host, hellos[rank].host) != 0) { first++; }
        if (first < rank) { continue; }
        for (int other = rank; other < ranks; other++) {
            mates += strcmp(hellos[other].host, hellos[rank].host) == 0;
        }
        if (hosts++ >= MOST) { continue; }
        fprintf(file, "%s %s: %d rank%s, the first is %d; %s, %d thread%s each; %s\n",
                hosts == 1 ? "hosts     " : "          ", hellos[rank].host, mates, mates == 1 ? "" : "s",
                rank, hellos[rank].device, hellos[rank].threads, hellos[rank].threads == 1 ? "" : "s",
                hellos[rank].interfaces[0] != '\0' ? hellos[rank].interfaces : "no network");
    }
    if (hosts > MOST) { fprintf(file, "           and %d more: log.jsonl has all\n", hosts - MOST); }
}

static inline void print_warnings(const Run *run) {
    const char *warnings[] = {run->threads.warning, run->space_warning, run->shared_memory_warning};
    for (size_t i = 0; i < sizeof warnings / sizeof warnings[0]; i++) {
        if (warnings[i][0] != '\0') { printf("warning    %s\n", warnings[i]); }
    }
}

// The start-up block, once everything in it is known.
static inline void print_start(Run *run, const Hello *hellos) {
    const Transport *transport = &run->transport;
    const GptNeoConfig *config = &run->config;
    char data[512];
    data_loader_describe(&run->data, data, sizeof data);
    printf("acco.c %s\n", ACCO_VERSION);
    printf("model      %s: %.2f M parameters, %d layers, %d channels, %d heads, window %d, %d positions, "
           "vocabulary %d\n",
           config->name, (double)run->table.parameter_count / 1e6, config->layers, config->channels,
           config->heads, config->window, config->positions, config->vocabulary);
    printf("data       %s\n", data);
    print_validation_cap(run);
    print_rule(run);
    if (transport->size == 1) {
        printf("ranks      1 (%s)\n", transport->reason);
    } else {
        printf("ranks      %d over %s (%s), ", transport->size, transport->link.name, transport->reason);
        print_wire(run);
        printf("exchange   %s\n", run->placement.exchange_reason);
        print_hosts(stdout, hellos, transport->size);
    }
    print_device(run);
    print_batch(run);
    printf("memory     %.1f MB per rank:", (double)run->arena.bytes / 1e6);
    for (int i = 0; i < MEMORY_CLASS_COUNT; i++) {
        printf("%s %s %.1f", i > 0 ? "," : "", memory_class_name((MemoryClass)i),
               (double)arena_class_bytes(&run->arena, (MemoryClass)i) / 1e6);
    }
    printf("\n");
    print_warnings(run);
    if (run->options.kept[0] != '\0') {
        printf("options    where none are given, as in %s\n", run->options.kept);
    }
    printf("run        %s\n\n", run->directory);
    fflush(stdout);
}

// null: nothing was measured.
static inline json_t *product_rates_json(const ProductRates *rates) {
    if (!(rates->gflops[PRECISION_FP32] > 0)) { return json_null(); }
    return json_pack("{s:f, s:f}", "fp32", rates->gflops[PRECISION_FP32], "bf16",
                     rates->gflops[PRECISION_BF16]);
}

// The event "start": all that is needed to repeat the run. hellos (size): of all ranks.
static inline void log_start(Run *run, const Hello *hellos) {
    json_t *ranks = json_array(), *memory = json_object();
    for (int rank = 0; rank < run->transport.size; rank++) {
        json_array_append_new(ranks, json_pack("{s:o, s:i, s:i, s:o}", "host", log_text(hellos[rank].host),
                                               "pid", hellos[rank].pid, "threads", hellos[rank].threads,
                                               "device", log_text(hellos[rank].device)));
    }
    for (int i = 0; i < MEMORY_CLASS_COUNT; i++) {
        json_object_set_new(memory, memory_class_name((MemoryClass)i),
                            json_integer((json_int_t)arena_class_bytes(&run->arena, (MemoryClass)i)));
    }
    json_object_set_new(memory, "total", json_integer((json_int_t)run->arena.bytes));
    char exchange[64], model[64];
    double epoch = tokens_per_epoch(run);
    run_directory_model_name(options_model(&run->options), model);
    transport_sum_order(&run->transport, exchange, sizeof exchange);
    report_event(run,
                 json_pack("{s:s, s:s, s:I, s:s, s:s, s:o, s:I, s:o, s:I, s:o, s:o, s:o, s:o, s:o}", "event",
                           "start", "version", ACCO_VERSION, "time", (json_int_t)time(NULL), "transport",
                           run->transport.link.name, "exchange", exchange, "model", log_text(model),
                           "parameters", (json_int_t)run->table.parameter_count, "epochs",
                           log_real(epoch > 0 ? (double)run->options.tokens / epoch : (double)NAN),
                           "bucket_bytes", (json_int_t)run->scheduler.settings.bucket, "measured",
                           log_text(run->rule_reason), "ranks", ranks, "memory", memory, "options",
                           options_as_json(&run->options), "product_gflops",
                           product_rates_json(&run->placement.product_rates)));
}

// ---------------------------------------------------------------------------------------
// While it trains

// Adds the latest commit to the window of the next report.
static inline void window_add_commit(Run *run) {
    const CommitReport *commit = &run->scheduler.report;
    CommitReport *sum = &run->window.sum;
    run->window.has_commits = true;
    if (commit->predicted > 0) { // otherwise there is no loss
        sum->predicted += commit->predicted;
        sum->loss += commit->loss * commit->predicted;
        sum->perfect_loss += commit->perfect_loss * commit->predicted;
    }
    sum->compute_seconds += commit->compute_seconds;
    sum->communication_seconds += commit->communication_seconds;
    sum->exposed_seconds += commit->exposed_seconds;
    sum->micro_batch_seconds += commit->micro_batch_seconds;
    sum->micro_batch_cpu_seconds += commit->micro_batch_cpu_seconds;
    run->exposed_seconds += commit->exposed_seconds;
}

// Begins a new window behind the latest report, after `seconds` seconds of training.
static inline void window_begin(Run *run, double seconds) {
    const Scheduler *s = &run->scheduler;
    memset(&run->window, 0, sizeof run->window);
    run->window.from_commit = s->report.commit;
    run->window.from_gradients = s->report.gradients_done;
    run->window.from_step = s->optimizer.commits;
    run->window.from_work = s->gradients_done;
    run->window.from_seconds = seconds;
    run->window.from_micro_batches = s->micro_batches_begun;
}

// Says once that what is printed reaches nobody: the reader of a pipe has gone, or the disk
// below a file is full. Training goes on.
static inline void note_unwritten(Run *run) {
    if (run->is_unwritten || ferror(stdout) == 0) { return; }
    run->is_unwritten = true;
    fprintf(stderr,
            "train_gpt: what is printed cannot be written any more; training goes on, and %s has it all\n",
            run->log.path);
}

// Says why the GPU has lowered its clock, once for each reason.
static inline void print_throttled(Run *run, const NvmlReading *gpu) {
    char text[NVML_TEXT_SIZE];
    uint64_t reasons = nvml_slowing(gpu->reasons) & ~run->throttle_told;
    if (reasons == 0) { return; }
    run->throttle_told |= reasons;
    printf("%6lld the GPU's clock is held down by %s", (long long)run->scheduler.report.commit,
           nvml_reasons_text(reasons, text));
    if (isfinite(gpu->clock)) {
        printf("; it is at %.0f MHz, of at most %.0f", gpu->clock, gpu->highest_clock);
    }
    if (isfinite(gpu->watts)) { printf("; power %.0f watts", gpu->watts); }
    printf("\n");
    fflush(stdout);
}

// Prints and logs the commits in the window, and begins a new one. Losses, rates and
// counts are those of the commits that it names. Where an exchange takes several steps,
// the run is ahead of them: speeds are those of what it has computed since the latest
// report, and unknown where that is nothing.
static inline void report_window(Run *run) {
    const Scheduler *s = &run->scheduler;
    const CommitReport *last = &s->report, *sum = &run->window.sum;
    double commits = fmax((double)(last->commit - run->window.from_commit), 1),
           steps = fmax((double)(s->optimizer.commits - run->window.from_step), 1);
    double gradients = last->gradients_done - run->window.from_gradients,
           work = s->gradients_done - run->window.from_work;
    double tokens = (double)tokens_per_micro_batch(run), now = training_seconds(run);
    Report report = report_unknown();
    report.commit = (double)last->commit;
    // A run that was resumed with other sequences may have done part of a micro-batch.
    report.gradients = floor(last->gradients_done);
    report.tokens = report.gradients * tokens;
    report.seconds = now;
    report.loss = sum->loss / sum->predicted;
    report.perfect_loss = sum->perfect_loss / sum->predicted;
    report.learning_rate = last->learning_rate;
    report.gradient_norm = last->gradient_norm;
    if (work > 0) { report.tokens_per_second = work * tokens / (now - run->window.from_seconds); }
    report.compute_ms = 1e3 * sum->compute_seconds / steps;
    report.communication_ms = 1e3 * sum->communication_seconds / steps;
    report.exposed_ms = 1e3 * sum->exposed_seconds / steps;
    double micro_batches = (double)(s->micro_batches_begun - run->window.from_micro_batches);
    if (micro_batches > 0) {
        report.micro_batch_ms = 1e3 * sum->micro_batch_seconds / micro_batches;
        report.micro_batch_cpu_ms = 1e3 * sum->micro_batch_cpu_seconds / micro_batches;
    }
    report.steps = steps;
    report.gradients_per_commit = gradients / commits;
    report.model_tflops = report.tokens_per_second * gpt_neo_flops_per_token(&run->config, run->T) / 1e12;
    report.mfu = report.model_tflops * 1e12 / run->peak_flops;
    NvmlReading gpu = nvml_read(&run->nvml);
    report.gpu_clock = gpu.clock;
    report.gpu_watts = gpu.watts;
    report.gpu_throttle = gpu.reasons_as_number;
    report.bytes_sent = (double)__atomic_load_n(&run->transport.bytes_sent, __ATOMIC_RELAXED);
    report.bytes_sent_outside = (double)__atomic_load_n(&run->transport.bytes_sent_outside, __ATOMIC_RELAXED);
    window_begin(run, now);
    Error error = {""};
    terminal_report(&run->terminal, &report);
    print_throttled(run, &gpu);
    note_unwritten(run);
    note_written(run, progress_log_report(&run->log, &run->curves, &report, &error), &error);
}

// Prints and logs the latest validation.
static inline void report_validation(Run *run) {
    int64_t commit = run->scheduler.optimizer.commits;
    double loss = run->validation_loss, perfect = run->perfect_validation_loss;
    Error error = {""};
    terminal_clear(&run->terminal);
    printf("%6lld validation loss %.4f", (long long)commit, loss);
    if (isfinite(perfect)) { printf(", a perfect model has %.4f", perfect); }
    printf("\n");
    fflush(stdout);
    note_written(run,
                 progress_log_validation(&run->log, &run->curves, commit, tokens_done(run),
                                         training_seconds(run), loss, perfect, &error),
                 &error);
}

// ---------------------------------------------------------------------------------------
// The end

#define WAITING_SHARE 0.1 // of the time: more is worth a line at the end

// The run's directory as a word of a command line.
static inline const char *directory_for_shell(const Run *run, char word[4 * RUN_PATH_SIZE + 3]) {
    return text_for_shell(run->directory, word, 4 * RUN_PATH_SIZE + 3);
}

// Prints and logs how training ended. fingerprint: of the parameters, from
// check_replicas. exposed: seconds in which a rank only waited for communication, the mean.
static inline void print_end(Run *run, uint64_t fingerprint, double exposed) {
    long long commits = (long long)run->scheduler.optimizer.commits;
    double seconds = training_seconds(run),
           tokens = run->scheduler.gradients_done * (double)tokens_per_micro_batch(run);
    double waiting = exposed / (seconds - run->seconds_before); // share of this part of the run
    double planned = (double)run->arena.bytes, used = (double)arena_resident_bytes(&run->arena);
    double rate = tokens / seconds * gpt_neo_flops_per_token(&run->config, run->T) / 1e9;
    terminal_clear(&run->terminal);
    if (run->nothing_left) {
        printf("finished   nothing is left to do: this run had its %.0f tokens; with a larger --tokens it "
               "goes on\n",
               tokens);
    } else {
        char share[48] = "";
        if (run->peak_flops > 0) {
            snprintf(share, sizeof share, ", %.1f %% of the peak", 100 * rate * 1e9 / run->peak_flops);
        }
        printf("\ntrained    %lld %ss, %.0f tokens in %.1f s: %.0f tokens/s, %.1f GFLOP/s over all "
               "ranks%s\n",
               commits, step_name(run), tokens, seconds, tokens / seconds, rate, share);
    }
    if (waiting > WAITING_SHARE) {
        char word[4 * RUN_PATH_SIZE + 3];
        printf("network    %.0f %% of the time ranks only waited for communication; train_gpt plan --like %s "
               "says what would be faster\n",
               100 * waiting, directory_for_shell(run, word));
    }
    if (!isnan(run->validation_loss)) {
        printf("loss       %.4f nats per token on text it has not seen", run->validation_loss);
        if (isfinite(run->perfect_validation_loss)) { // known where the text comes from a grammar
            printf("; the best possible, knowing the grammar, is %.4f", run->perfect_validation_loss);
        }
        printf("\n");
    }
    printf("memory     planned %.1f MB, used %.1f MB (%+.2f %%)\n", planned / 1e6, used / 1e6,
           100 * (used - planned) / planned);
    printf("parameters fingerprint %016llx, the same on every rank\n", (unsigned long long)fingerprint);
    char text[32];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)fingerprint);
    report_event(run, json_pack("{s:s, s:s, s:I, s:I, s:o, s:o, s:o, s:I, s:I, s:s}", "event", "end",
                                "reason", run->scheduler.stop_agreed ? "asked to stop" : "done", "commit",
                                (json_int_t)commits, "tokens", (json_int_t)tokens, "seconds",
                                log_real(seconds), "tokens_per_second", log_real(tokens / seconds),
                                "exposed_share", log_real(waiting), "planned_bytes", (json_int_t)planned,
                                "used_bytes", (json_int_t)used, "parameters_fingerprint", text));
}

// After a run that was asked to stop. saved: whether its end is on disk.
static inline void print_stopped(const Run *run, bool saved) {
    char word[4 * RUN_PATH_SIZE + 3];
    printf("stopped    because it was asked to");
    if (!run->save_times.never) {
        printf("; it goes on with --out %s --resume auto%s", directory_for_shell(run, word),
               saved ? "" : ", from an earlier checkpoint");
    }
    printf("\n");
}

// Where everything is that the run has written.
static inline void print_files(const Run *run) {
    char word[4 * RUN_PATH_SIZE + 3];
    if (run->save_times.never) { printf("not saved  as --save-every never asks: there is no checkpoint\n"); }
    printf("\nlog        %s/log.jsonl\ncurves     %s/progress.tsv (scripts/plot %s makes "
           "%s/plot.html)\nsettings   %s/config.json (train_gpt --config it)\n",
           run->directory, run->directory, directory_for_shell(run, word), run->directory, run->directory);
    if (run->options.trace[0] != '\0' && !run->trace_is_lost) {
        printf("trace      %s (https://ui.perfetto.dev opens it)\n", run->options.trace);
    }
}

// What the run should have left and did not. saved: whether its end is on disk.
static inline void print_missing(const Run *run, bool saved) {
    if (run->lost_lines > 0) {
        fprintf(stderr,
                "train_gpt: %lld line%s of the log or of progress.tsv could not be written: the reason is "
                "printed above\n",
                (long long)run->lost_lines, run->lost_lines == 1 ? "" : "s");
    }
    if (!saved) {
        fprintf(stderr, "train_gpt: the end of this run is not on disk: the reason is printed above\n");
    }
}

#endif
