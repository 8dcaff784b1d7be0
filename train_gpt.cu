// train_gpt.cu: the program. options -> setup -> rounds -> report, top to bottom.
//
//   train_gpt [train] OPTIONS    trains, alone or as one rank under mpirun or srun
//   train_gpt sample OPTIONS     prints a text by a model on disk
//   train_gpt eval OPTIONS       perplexity, LAMBADA or HellaSwag of a model on disk
//   train_gpt plan OPTIONS       prints how much memory each rank needs, and allocates nothing
//   train_gpt help               every option
//
// The user's mistakes end all ranks with one line and exit code 2 before anything is
// allocated (run.h). Afterwards only the system can fail: one line with rank, host and
// operation, and exit code 3 for the whole job (comm/transport.h).

#include <signal.h>

#include "checkpoint/load.h" // defines: checkpoint_load: going on from disk
#include "checkpoint/save.h" // defines: checkpoint_begin, checkpoint_end: a run on disk
#include "program/eval.h"    // defines: command_eval: how good a model is
#include "program/plan.h"    // defines: command_plan: how much memory a run would need
#include "program/report.h"  // defines: print_start, report lines, print_end: what a run says
#include "program/sample.h"  // defines: command_sample, print_sample: text out
#include "program/setup.h" // defines: choose_model, open_data, reserve_memory: what is decided before training

// ---------------------------------------------------------------------------------------
// Training

typedef struct Validation {
    Run *run;
    const float *parameters;
    double loss, perfect_loss, batches; // in: nothing; out: sums over this rank's share, then over all
} Validation;

static void validate_task(void *context, Stream *stream) {
    Validation *sum = (Validation *)context;
    Run *run = sum->run;
    const DataLoader *data = run->options.val_data[0] != '\0' ? &run->validation_data : &run->data;
    for (int64_t batch = run->transport.rank; batch < run->options.val_batches;
         batch += run->transport.size) {
        double perfect;
        Error error = {""};
        if (!data_loader_fill_validation(data, (uint64_t)(batch * run->B), run->B, run->tokens, run->targets,
                                         &perfect, &error)) {
            transport_fail(&run->transport, "%s", error.text);
        }
        sum->loss += gpt_neo_loss(&run->model, stream, sum->parameters, run->tokens, run->targets);
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
    transport_all_gather_records(transport, "validation", mine, all, sizeof mine);
    sum->loss = sum->perfect_loss = sum->batches = 0;
    for (int rank = 0; rank < transport->size; rank++) {
        sum->loss += all[3 * rank];
        sum->perfect_loss += all[3 * rank + 1];
        sum->batches += all[3 * rank + 2];
    }
    free(all);
}

// Mean validation loss of the committed parameters, on all ranks; the batches are shared
// out. Returns it, and what a perfect model would have.
static double validate(Run *run, double *perfect_loss) {
    Scheduler *s = &run->scheduler;
    scheduler_settle(s); // waiting for what is on its way belongs to training
    double began = clock_seconds();
    Validation sum = {run, borrow_committed(s, run->rule), 0, 0, 0};
    scheduler_call(s, s->compute, validate_task, &sum);
    return_committed(s, sum.parameters);
    scheduler_call(s, s->communication, validate_exchange_task, &sum);
    run->paused += clock_seconds() - began;
    *perfect_loss = sum.perfect_loss / sum.batches;
    return sum.loss / sum.batches;
}

static void validate_and_report(Run *run) {
    double perfect, loss = validate(run, &perfect);
    run->validation_loss = loss;
    run->perfect_validation_loss = perfect;
    if (!run_is_main(run)) { return; }
    Error error = {""};
    int64_t commit = run->scheduler.optimizer.commits,
            tokens = (int64_t)run->scheduler.gradients_done * tokens_per_micro_batch(run);
    terminal_clear(&run->terminal);
    printf("%7lld validation loss %.4f", (long long)commit, loss);
    if (isfinite(perfect)) { printf(", a perfect model has %.4f", perfect); }
    printf("\n");
    fflush(stdout);
    check_written(
        run, log_validation(&run->log, commit, tokens, training_seconds(run), loss, perfect, &error), &error);
}

// Whether a multiple of `every` lies in (before, now]: a local rule commits several at a
// time.
static bool is_due(int64_t before, int64_t now, int64_t every) {
    return every > 0 && now / every > before / every;
}

static void report_commit(Run *run, bool last) {
    const CommitReport *commit = &run->scheduler.report;
    int64_t before = run->commit_seen;
    if (run->scheduler.reports == run->reports_seen && !last) { return; }
    if (run->scheduler.reports > run->reports_seen) { collect_commit(run); }
    run->commit_seen = commit->commit;
    if (run_is_main(run) && run->has_news &&
        (last || is_due(before, commit->commit, run->options.report_every))) {
        Report report = make_report(run);
        Error error = {""};
        terminal_report(&run->terminal, &report);
        check_written(run, log_report(&run->log, &report, &error), &error);
    }
    bool validates = last || is_due(before, commit->commit, run->options.val_every);
    if (run->options.val_batches > 0 && validates) { validate_and_report(run); }
    if (run_is_main(run)) {
        terminal_bar(&run->terminal, (int64_t)run->scheduler.gradients_done * tokens_per_micro_batch(run),
                     run->options.tokens, training_seconds(run));
    }
}

// A failure is said and costs the new checkpoint only.
static void report_checkpoint(Run *run, const SavedReport *report, double waited, bool saved,
                              const Error *error) {
    if (!run_is_main(run)) { return; }
    terminal_clear(&run->terminal);
    if (!saved) {
        printf("%7lld no checkpoint: %s\n", (long long)report->commit, error->text);
    } else if (report->seconds > 0) {
        printf("%7lld checkpoint in %.1f s, %.1f s of it beside training\n", (long long)report->commit,
               waited + report->seconds, report->seconds);
    } else {
        printf("%7lld checkpoint in %.1f s\n", (long long)report->commit, waited);
    }
    fflush(stdout);
    Error log_error = {""};
    json_t *event = json_pack("{s:s, s:I, s:b, s:o, s:o, s:o}", "event", "checkpoint", "commit",
                              (json_int_t)report->commit, "saved", saved ? 1 : 0, "seconds", log_real(waited),
                              "beside_seconds", log_real(report->seconds), "problem", log_text(error->text));
    check_written(run, log_event(&run->log, event, &log_error), &log_error);
}

// Ends the checkpoint that is being written, if there is one. Returns whether it is on
// disk.
static bool end_checkpoint(Run *run) {
    SavedReport report;
    Error error = {""};
    if (run->saver == NULL) { return false; }
    double began = clock_seconds();
    bool saved = checkpoint_end(run, &report, &error);
    run->saving_seconds += clock_seconds() - began;
    run->paused += clock_seconds() - began;
    report_checkpoint(run, &report, run->saving_seconds, saved, &error);
    return saved;
}

static void begin_checkpoint(Run *run, bool beside) {
    SavedReport report = {run->scheduler.optimizer.commits, 0};
    Error error = {""};
    end_checkpoint(run);
    double began = clock_seconds();
    bool begun = checkpoint_begin(run, beside, &error);
    run->saving_seconds = clock_seconds() - began;
    run->paused += run->saving_seconds;
    if (!begun) { report_checkpoint(run, &report, run->saving_seconds, false, &error); }
}

// The state at the end of a run. Returns whether it is on disk.
static bool save_checkpoint(Run *run) {
    const Scheduler *s = &run->scheduler;
    end_checkpoint(run);
    if (run->saved_commit == s->optimizer.commits && run->saved_reports == s->reports) { return true; }
    begin_checkpoint(run, false);
    return end_checkpoint(run);
}

// ---------------------------------------------------------------------------------------
// Going on from a checkpoint

// What the reports go on from.
static void continue_reports(Run *run, double seconds) {
    const Scheduler *s = &run->scheduler;
    run->commit_seen = run->sum_began_commit = run->saved_commit = s->optimizer.commits;
    run->reports_seen = run->saved_reports = s->reports;
    run->spikes_seen = s->spikes;
    run->sum_began_gradients = s->gradients_done;
    run->sum_began = seconds;
    run->has_news = false;
    memset(&run->sum, 0, sizeof run->sum);
}

// Loads the newest checkpoint in the run's directory that is good; damaged ones are named
// and passed over. Returns its commit; -1: there is none.
static int64_t load_newest(Run *run, char remarks[512]) {
    int64_t commit = INT64_MAX;
    for (bool loaded = false; !loaded && commit >= 0;) {
        Error error = {""};
        commit = checkpoint_newest(run->directory, commit);
        share_from_rank_zero(run, &commit, sizeof commit);
        loaded = commit >= 0 &&
                 checkpoint_load(run, checkpoint_paths(run->directory, commit).final, remarks, &error);
        bool damaged = commit >= 0 && !loaded;
        if (damaged && run_is_main(run)) {
            printf("resumed    not from step-%lld: %s\n", (long long)commit, error.text);
        }
    }
    return commit;
}

// The number of micro-batches, counted over all ranks, at which data begin that no rank
// has asked for.
static int64_t fresh_data(Run *run, bool least) {
    Transport *transport = &run->transport;
    uint64_t mine = run->scheduler.micro_batches_begun;
    uint64_t *all = (uint64_t *)calloc((size_t)transport->size, sizeof mine);
    transport_all_gather_records(transport, "position in the data", &mine, all, sizeof mine);
    uint64_t found = all[0];
    for (int rank = 1; rank < transport->size; rank++) {
        if (least ? all[rank] < found : all[rank] > found) { found = all[rank]; }
    }
    free(all);
    return run->data_base + (int64_t)found * transport->size;
}

static void report_rollback(Run *run, int64_t from, int64_t to) {
    Error error = {""};
    if (!run_is_main(run)) { return; }
    printf("%7lld back to the checkpoint of %s %lld, rollback %.0f; on with new data\n", (long long)from,
           step_name(run), (long long)to, run->scheduler.rollbacks);
    fflush(stdout);
    json_t *event = json_pack("{s:s, s:I, s:I, s:o}", "event", "rollback", "from", (json_int_t)from, "commit",
                              (json_int_t)to, "count", log_real(run->scheduler.rollbacks));
    check_written(run, log_event(&run->log, event, &error), &error);
}

// Back to the newest good checkpoint of this run, and on with data behind those that it
// had come to. False: the run ends.
static bool roll_back(Run *run) {
    Scheduler *s = &run->scheduler;
    char remarks[512];
    double began = clock_seconds() - run->paused;
    scheduler_settle(s); // nobody else may be exchanging anything now
    int64_t position = fresh_data(run, false), from = s->optimizer.commits;
    double spikes = s->spikes, rollbacks = s->rollbacks + 1, seconds = run->seconds_before;
    end_checkpoint(run);
    scheduler_drop(s);
    int64_t commit = load_newest(run, remarks);
    // Gradients that waited in a checkpoint, which may have been made just before the
    // spike, would bring it back.
    if (run->rule->kind == RULE_OVERLAPPED) { scheduler_drop(s); }
    run->rollback_repeats = commit == run->rollback_commit ? run->rollback_repeats + 1 : 1;
    run->rollback_commit = commit;
    s->spikes = spikes;
    s->rollbacks = rollbacks;
    s->failed = commit < 0 || run->rollback_repeats > ROLLBACK_PATIENCE;
    if (s->failed) { return false; }
    run->data_base += position - fresh_data(run, true);
    run->seconds_before = seconds;
    run->paused = clock_seconds() - began; // with what ending a checkpoint took
    continue_reports(run, training_seconds(run));
    run->saved_commit = -1; // what is on disk knows nothing of the rollback
    report_rollback(run, from, commit);
    return true;
}

// ---------------------------------------------------------------------------------------
// The loop

// Until the target, a spike that ends it, or somebody who asks to stop.
static void train_to_target(Run *run) {
    Scheduler *s = &run->scheduler;
    double target = target_gradients(run);
    bool done = s->gradients_done >= target; // by the run that this one goes on from
    while (s->gradients_done < target && !scheduler_is_halted(s) && !s->stop_agreed) {
        int64_t before = s->optimizer.commits;
        run->rule->commit(s);
        bool last = s->gradients_done >= target && run->rule->finish == NULL;
        report_spike(run);
        if (scheduler_is_halted(s)) { return; }
        report_commit(run, last);
        if (s->all_writers_done) { end_checkpoint(run); }
        if (!last && is_due(before, s->optimizer.commits, run->options.save_every)) {
            begin_checkpoint(run, true);
        }
    }
    if (s->stop_agreed || (run->rule->finish == NULL && !done)) { return; }
    if (run->rule->finish != NULL) { run->rule->finish(s); }
    report_spike(run);
    if (!scheduler_is_halted(s)) { report_commit(run, true); }
}

// Returns whether its end is on disk.
static bool train(Run *run) {
    Scheduler *s = &run->scheduler;
    run->started = clock_seconds();
    run->validation_loss = NAN;
    __atomic_store_n(&run->signal_watch.accepting, true, __ATOMIC_RELAXED);
    train_to_target(run);
    while (s->rollback_due && roll_back(run)) { train_to_target(run); }
    if (!s->failed) { return save_checkpoint(run); }
    end_checkpoint(run);
    fail_spike(run);
    return false;
}

// ---------------------------------------------------------------------------------------
// The life of a run

// On all ranks the same.
static void initialize_parameters(Run *run) {
    float *target = run->scheduler.parameters.data;
    size_t bytes = run->table.parameter_count * sizeof(float);
    float *host = run->placement.on_gpu ? (float *)malloc(bytes) : target;
    if (host == NULL) {
        transport_fail(&run->transport, "no memory for the first parameters: %zu bytes", bytes);
    }
    if (options_start(&run->options)[0] != '\0') {
        HfModel model;
        Error error = {""};
        bool opened = hf_model_open(&model, options_start(&run->options), &error);
        agree_or_exit(run, opened ? 0 : EXIT_USER_MISTAKE, &error);
        hf_model_read(&model, host);
        hf_model_close(&model);
    } else {
        gpt_neo_initialize(&run->table, (uint64_t)run->options.seed, run->pool, host);
    }
    if (!run->placement.on_gpu) { return; }
    void *queue = gpu_queue_create(false);
    gpu_copy(queue, target, host, bytes);
    while (!gpu_queue_is_idle(queue)) { sleep_seconds(1e-4); }
    gpu_queue_destroy(queue);
    free(host);
}

// What NCCL takes of the GPU's processors is no longer there for products that run beside
// it.
static void warm_up_task(void *context, Stream *stream) {
    Run *run = (Run *)context;
    int taken = run->placement.uses_nccl ? (int)run->options.nccl_ctas : 0;
    gpt_neo_start(&run->model, stream, run->scheduler.parameters.data, run->scheduler.gradients.data,
                  taken > 0 ? run->placement.gpu.processors - taken : 0, run->options.tune_products);
}

static void print_resumed(Run *run, const char *path, const char *remarks) {
    long long commit = (long long)run->scheduler.optimizer.commits;
    printf("resumed    from %s at %s %lld; %s%s\n\n", path, step_name(run), commit,
           remarks[0] == '\0' ? "exact" : "not exact: ", remarks);
    fflush(stdout);
    Error error = {""};
    json_t *event =
        json_pack("{s:s, s:I, s:o, s:b, s:o}", "event", "resume", "commit", (json_int_t)commit, "checkpoint",
                  log_text(path), "exact", remarks[0] == '\0' ? 1 : 0, "remarks", log_text(remarks));
    check_written(run, log_event(&run->log, event, &error), &error);
}

// Before anything is made for the run: all ranks can read the checkpoint that was asked
// for, and what is there is of this model.
static void check_resume(Run *run) {
    const char *resume = run->options.resume;
    CheckpointSource source;
    Error error = {""};
    bool good = true;
    if (strcmp(resume, "auto") == 0) {
        good = checkpoint_check_model(run, run->options.out, &error);
    } else if (strcmp(resume, "off") != 0) {
        good = checkpoint_open(&source, run, resume, &error);
        if (good) { checkpoint_close(&source); }
    }
    agree_or_exit(run, good ? 0 : EXIT_USER_MISTAKE, &error);
}

static void resume_run(Run *run) {
    const char *resume = run->options.resume;
    bool newest = strcmp(resume, "auto") == 0;
    char remarks[512];
    Error error = {""};
    int64_t commit = -1;
    if (strcmp(resume, "off") == 0) { return; }
    if (newest) {
        commit = load_newest(run, remarks);
    } else if (!checkpoint_load(run, resume, remarks, &error)) {
        agree_or_exit(run, EXIT_USER_MISTAKE, &error);
    }
    if (newest && commit < 0) {
        if (run_is_main(run)) {
            printf("resumed    nothing: there is no good checkpoint in %s; a new run begins\n\n",
                   run->directory);
        }
        return;
    }
    continue_reports(run, run->seconds_before);
    if (run_is_main(run)) {
        print_resumed(run, newest ? checkpoint_paths(run->directory, commit).final : resume, remarks);
    }
}

static void start_run(Run *run, const Hello *hellos) {
    Error error = {""};
    agree_or_exit(run, arena_commit(&run->arena, &error) ? 0 : EXIT_SYSTEM_FAILURE, &error);
    bool room = run->threads.threads * run->transport.local_size <= launch_node_cores();
    run->pool = thread_pool_create(run->threads.threads, room);
    if (run->pool == NULL) {
        transport_fail(&run->transport, "the system does not give %d threads: lower --threads",
                       run->threads.threads);
    }
    initialize_parameters(run);
    run->transport.timeout_seconds = run->options.timeout_s;
    bool traced = run->options.trace[0] != '\0';
    if (traced) { run->clock_at_start = trace_measure_clock(&run->transport, clock_seconds); }
    run->transport.chaos_seconds = run->options.chaos_ms / 1e3;
    run->transport.link_bytes_per_second = run->options.link_mbit * 1e6 / 8;
    run->transport.link_latency = run->options.link_us / 1e6;
    choose_bucket(run);
    run->transport.bytes_sent = 0; // of the training alone
    scheduler_start(&run->scheduler, run->pool, traced);
    check_replicas(run, run->scheduler.parameters.data);
    scheduler_call(&run->scheduler, run->scheduler.compute, warm_up_task, run);
    if (run_is_main(run)) {
        terminal_open(&run->terminal, stdout);
        print_start(run);
        log_start(run, hellos);
    }
    resume_run(run);
}

// All ranks: their spans go to rank 0, in its clock. A trace that cannot be written is no
// reason to lose the end of a run.
static void write_trace(Run *run) {
    if (run->options.trace[0] == '\0') { return; }
    Error error = {""};
    run->transport.link_bytes_per_second = run->transport.link_latency = run->transport.chaos_seconds =
        0; // the emulated trouble is over
    ClockOffset end = trace_measure_clock(&run->transport, clock_seconds);
    if (!trace_write(&run->scheduler.trace, &run->transport, &run->clock_at_start, &end, run->options.trace,
                     &error)) {
        if (run_is_main(run)) { fprintf(stderr, "train_gpt: there is no trace: %s\n", error.text); }
        run->options.trace[0] = '\0';
    }
}

static void finish_run(Run *run, bool saved) {
    scheduler_settle(&run->scheduler);
    write_trace(run);
    const float *committed = borrow_committed(
        &run->scheduler, run->rule); // workers that were stopped may have walked on by themselves
    uint64_t fingerprint = check_replicas(run, committed);
    return_committed(&run->scheduler, committed);
    if (!run_is_main(run)) { return; }
    print_end(run, fingerprint);
    if (run->scheduler.stop_agreed) {
        printf("stopped    because it was asked to; it goes on with --out %s --resume auto%s\n",
               run->directory, saved ? "" : ", from an earlier checkpoint");
    } else {
        print_sample(run);
    }
    print_files(run);
    log_close(&run->log);
}

static void release_run(Run *run) {
    gpt_neo_stop(&run->model, run->scheduler.compute);
    scheduler_stop(&run->scheduler);
    thread_pool_destroy(run->pool);
    arena_release(&run->arena);
    parameter_table_free(&run->table);
    free(run->decay_ranges);
    data_loader_close(&run->data);
    if (run->options.val_data[0] != '\0') { data_loader_close(&run->validation_data); }
    run->transport.timeout_seconds =
        1e6; // rank 0 may be writing a long sample; who waits here sleeps, in MPI_Finalize he would spin
    transport_barrier(&run->transport, "end");
    placement_close(&run->placement);
    transport_close(&run->transport);
}

// ---------------------------------------------------------------------------------------
// Commands

static int command_train(Run *run) {
    Error error = {""};
    signal_watch_block();
    if (!transport_open(&run->transport, &error)) { exit_user_mistake(&error); }
    run->signal_watch.transport = &run->transport;
    run->signal_watch.stop_requested = &run->scheduler.stop_requested;
    signal_watch_prepare(&run->signal_watch);
    launch_threads(run->transport.local_size, (int)run->options.threads, &run->threads);
    bool good =
        placement_choose_device(&run->placement, &run->options, run->transport.local_rank, false, &error) &&
        placement_choose_precision(&run->placement, &run->options, &error) &&
        launch_check_copies(run->transport.size, transport_has_mpi(), getenv, &error) &&
        choose_model(run, &error) && choose_rates(run, &error) &&
        options_check_ranks(&run->options, run->transport.size, run->T, &error) && open_data(run, &error) &&
        check_tokenizer(run, &error);
    agree_or_exit(run, good ? 0 : EXIT_USER_MISTAKE, &error);
    Hello *hellos = greet(run);
    bool alike = run->rule->replicated || run->rule->kind == RULE_LOCAL;
    good = placement_choose_gpu_exchange(&run->placement, &run->options, &run->transport, alike, &error) &&
           reserve_memory(run, training_problem(run), &error) &&
           arena_check(&run->arena, run->transport.local_size, &error);
    agree_or_exit(run, good ? 0 : EXIT_USER_MISTAKE, &error);
    check_resume(run);
    open_run_directory(run);
    start_run(run, hellos);
    free(hellos);
    bool saved = train(run), stopped = run->scheduler.failed;
    if (stopped) {
        scheduler_settle(&run->scheduler);
        write_trace(run); // shows how it came to that
    } else {
        finish_run(run, saved);
    }
    if (!stopped && !saved && run_is_main(run)) {
        fprintf(stderr, "train_gpt: the end of this run is not on disk; why stands above\n");
    }
    release_run(run);
    return stopped || !saved ? EXIT_SYSTEM_FAILURE : run->scheduler.stop_agreed ? EXIT_ASKED_TO_STOP : 0;
}

int main(int argc, char **argv) {
    Run *run = (Run *)calloc(1, sizeof *run);
    Error error = {""};
    signal(SIGXFSZ, SIG_IGN); // a file at its size limit is reported as a full disk is
    if (!options_parse(argc, argv, &run->options, &error) || !options_check(&run->options, &error)) {
        exit_user_mistake(&error);
    }
    run->rule = RULES[run->options.rule].rule;
    hf_model_find(run->options.from, sizeof run->options.from);
    hf_model_find(run->options.finetune, sizeof run->options.finetune);
    int status = 0;
    switch (run->options.command) {
    case COMMAND_TRAIN: status = command_train(run); break;
    case COMMAND_PLAN: status = command_plan(run); break;
    case COMMAND_SAMPLE: status = command_sample(run); break;
    case COMMAND_EVAL: status = command_eval(run); break;
    case COMMAND_HELP: options_print_help(stdout); break;
    case COMMAND_HELP_MARKDOWN: options_print_markdown(stdout); break;
    case COMMAND_VERSION: printf("acco.c %s\n", ACCO_VERSION); break;
    }
    exit(
        status); // and nobody frees the run: the thread that waits for signals looks at it to the end (signals.h)
}
