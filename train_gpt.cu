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

#include "program/eval.h"   // defines: command_eval: how good a model is
#include "program/plan.h"   // defines: command_plan: how much memory a run would need
#include "program/report.h" // defines: print_start, report lines, print_end: what a run says
#include "program/resume.h" // defines: begin_checkpoint, resume_run, roll_back: a run on disk
#include "program/sample.h" // defines: command_sample, print_sample: text out
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
    if (traced) { run->clock_offset = trace_clock_offset(&run->transport); }
    run->trace_began = clock_seconds();
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
    double now = clock_seconds(), offset = trace_clock_offset(&run->transport);
    if (!trace_gather_and_write(&run->scheduler.trace, &run->transport, run->clock_offset, run->trace_began,
                                offset, now, run->options.trace, &error)) {
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
    close_checkpoints(run);
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
    open_checkpoints(run);
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
    run->rule = rule_find(run->options.rule);
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
