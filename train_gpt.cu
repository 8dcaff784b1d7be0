// train_gpt.cu: main and the training loop. Read it from top to bottom: the commands, the start
// of a run, the loop, the end of a run.
//
// The update rule (rules.h) decides what a commit is and what overlaps what; this file calls
// one commit after another. Errors are explained in runtime/errors.h.

#include "evaluation/eval.h"       // defines: command_eval: how good a model is
#include "evaluation/sample.h"     // defines: command_sample, print_sample: text out
#include "plan/choose.h"           // defines: choose_by_measurement: what is auto
#include "plan/plan.h"             // defines: command_plan: memory and time of a run, before it is paid for
#include "program/announce.h"      // defines: announce_run, print_end, print_build_facts: what it says
#include "program/average.h"       // defines: command_average: the mean of the last checkpoints
#include "program/data.h"          // defines: open_data, tokenize_data: what is trained on
#include "program/export.h"        // defines: command_export: a model for other programs
#include "program/fit.h"           // defines: fit_check: is there memory enough?
#include "program/json_lines.h"    // defines: command_tokenize: token files of lines of JSON
#include "program/machine_rates.h" // defines: choose_precision: fp32 or bf16, by measurement
#include "program/resume.h"        // defines: begin_checkpoint, resume_run, roll_back: a run on disk
#include "program/setup.h"         // defines: choose_model, reserve_memory: choices before training
#include "program/spike_report.h"  // defines: report_spike, fail_spike: steps that were not made
#include "program/start.h"         // defines: open_run_directory, start_run: memory, threads, parameters
#include "program/start_watch.h"   // defines: start_watch_begin: a deadline before ranks have met
#include "program/validation.h"    // defines: validate_commit: the loss on held-out data

static void meet_ranks(Run *run, bool understood, Error *error);
static int command_train(Run *run);
static void choose_alone(Run *run);
static void choose_together(Run *run, const Hello *hellos);
static bool train(Run *run);
static void train_to_target(Run *run);
static void save_checkpoint(Run *run, bool beside);
static void make_up_validation(Run *run);
static bool ends_at_commit(const Run *run);
static void follow_commits(Run *run, bool last);
static int finish_run(Run *run, bool saved);
static void write_trace(Run *run);
static void release_run(Run *run, int exit_code);

int main(int argc, char **argv) {
    Run *run = MEMORY_OF(Run, 1);
    Error error = {""};
    files_open_standard();
    setvbuf(stderr, NULL, _IOLBF, BUFSIZ); // a line is one write: neither a launcher nor a thread tears it
    signal(SIGXFSZ, SIG_IGN);              // a file at its size limit is reported as a full disk is
    bool understood =
        options_parse(argc, argv, &run->options, &error) && options_check(&run->options, &error);
    if (transport_was_launched() && run->options.gpu_exchange != GPU_EXCHANGE_HOST) { gpu_load_eagerly(); }
    meet_ranks(run, understood, &error);
    run->rule = options_rule(&run->options);
    find_models(&run->options);
    int exit_code = 0;
    switch (run->options.command) {
    case COMMAND_TRAIN: exit_code = command_train(run); break;
    case COMMAND_PLAN: exit_code = command_plan(run); break;
    case COMMAND_SAMPLE: exit_code = command_sample(&run->options); break;
    case COMMAND_EVAL: exit_code = command_eval(run); break;
    case COMMAND_AVERAGE: exit_code = command_average(&run->options); break;
    case COMMAND_EXPORT: exit_code = command_export(&run->options); break;
    case COMMAND_TOKENIZE: exit_code = command_tokenize(&run->options); break;
    case COMMAND_HELP:
        if (!options_print_topic(stdout, run->options.topic, &error)) { exit_user_mistake(&error); }
        break;
    case COMMAND_HELP_MARKDOWN: options_print_markdown(stdout); break;
    case COMMAND_VERSION: print_build_facts(); break;
    }
    // Training has a log; what other commands print is all that they do.
    if (run->options.command != COMMAND_TRAIN && (fflush(stdout) != 0 || ferror(stdout) != 0)) {
        fprintf(stderr, "train_gpt: what it found could not be written: %s\n", strerror(errno));
        exit_code = EXIT_SYSTEM_FAILURE;
    }
    // Otherwise the thread that waits for signals reads it to the end.
    if (run->signal_watch.transport == NULL) { free(run); }
    exit(exit_code);
}

// All ranks meet before one of them can leave: under mpirun the others would wait for ever
// for it. understood: false if the command line has an error, which is in `error`.
// Training, eval and a plan keep the transport; of other commands all ranks but 0 exit. Help and
// --version never meet: scripts that start ranks may call them first, and a process of
// mpirun can use MPI only once.
static void meet_ranks(Run *run, bool understood, Error *error) {
    OptionsCommand command = run->options.command;
    bool trains = understood && command == COMMAND_TRAIN,
         plans = command == COMMAND_PLAN && transport_was_launched(),
         together = trains || plans || command == COMMAND_EVAL;
    if (!understood && !transport_was_launched()) { exit_user_mistake(error); }
    if (!together && (!transport_was_launched() || (understood && command >= COMMAND_HELP))) { return; }
    if (trains) { signal_watch_mask(&run->signal_watch); } // before MPI or anything else makes a thread
    StartWatch watch = {.begun = false};
    if (transport_was_launched()) { start_watch_begin(&watch, run->options.timeout_s); }
    bool opened = transport_open(&run->transport, error);
    if (watch.begun) { start_watch_end(&watch); }
    if (!opened) { exit_user_mistake(error); }
    if (trains) {
        run->signal_watch.transport = &run->transport;
        signal_watch_prepare(&run->signal_watch);
        terminal_open(&run->terminal, stdout);
    }
    agree_or_exit(run, understood, EXIT_USER_MISTAKE, error);
    OptionsCommand first = command;
    share_from_rank_zero(&run->transport, "commands", &first, sizeof first);
    if (command != first) {
        error_set(error, "rank %d was started with the command %s and rank 0 with %s: start all ranks alike",
                  run->transport.rank, command_names[command], command_names[first]);
    }
    agree_or_exit(run, command == first, EXIT_USER_MISTAKE, error);
    // A start with a large model from a slow disk may take longer than a commit of training.
    run->transport.timeout_seconds = fmax(run->transport.timeout_seconds, run->options.timeout_s);
    if (together) { return; }
    transport_close(&run->transport);
    if (run->transport.rank != 0) { exit(0); }
}

// ---- A run -----------------------------------------------------------------------------

static int command_train(Run *run) {
    choose_alone(run);
    const Hello *hellos = exchange_hellos(run);
    choose_together(run, hellos);
    open_checkpoints(run);
    check_resume(run);
    open_run_directory(run);
    tokenize_data(run);
    start_run(run);
    choose_by_measurement(run);
    announce_run(run, hellos);
    resume_run(run);
    Error none = {""};
    agree_or_exit(run, true, 0, &none); // a wish to stop that came while the checkpoint was read
    int exit_code = finish_run(run, train(run));
    release_run(run, exit_code);
    return exit_code;
}

// Decides what a rank can decide by itself: device, model, rates, data.
static void choose_alone(Run *run) {
    Options *options = &run->options;
    Placement *placement = &run->placement;
    Transport *transport = &run->transport;
    Error error = {""};
    launch_threads(transport->local_size, (int)options->threads, &run->threads);
    options_measure_anew(options, transport->size);
    bool good = choose_device(run, false, &error) && decay_from_checkpoint(options, &error) &&
                placement_choose_precision(placement, options, &error) &&
                launch_check_copies(transport->size, transport_has_mpi(), &error) &&
                choose_model(run, &error) && open_data(run, &error) && choose_length(run, &error) &&
                check_tokenizer(run, &error);
    if (!good && options->kept[0] != '\0') { // the mistake may be in what was not written now
        text_join(error.text, sizeof error.text, "; ", "what is not given is as in %.300s", options->kept);
    }
    wait_for_rank_zero(transport, "checking the model"); // its checksums: a large one takes minutes
    agree_or_exit(run, good, EXIT_USER_MISTAKE, &error);
}

// Decides what depends on the other ranks: how GPUs exchange, and so the plan of memory.
static void choose_together(Run *run, const Hello *hellos) {
    Error error = {""};
    Transport *transport = &run->transport;
    const Options *options = &run->options;
    choose_precision(run);
    meet_on_hosts(transport, options);
    placement_choose_exchange(&run->placement, options, transport);
    bool good = placement_choose_gpu_exchange(&run->placement, options, transport, hellos, &error) &&
                reserve_memory(run, &error);
    MemoryRoom room = memory_room(run);
    good = good && fit_check(run, &room, &error);
    agree_or_exit(run, good, EXIT_USER_MISTAKE, &error);
}

// ---- The loop --------------------------------------------------------------------------

// Returns whether the state at the end is on disk, or is not meant to be.
static bool train(Run *run) {
    Scheduler *s = &run->scheduler;
    run->clock.started = run->saving.began = clock_seconds();
    if (run->owes_validation) { make_up_validation(run); }
    train_to_target(run);
    while (s->spikes.rollback_due && roll_back(run)) { train_to_target(run); }
    watch_data(run);
    end_checkpoint(run);
    if (s->spikes.failed) {
        if (run_is_main(run)) { fail_spike(run); }
        return false;
    }
    const CheckpointedRun *checkpointed = &run->checkpointed;
    bool saved =
        checkpointed->saved_commit == s->optimizer.steps && checkpointed->saved_reports == s->reports;
    if (saved || run->saving.times.never) { return true; }
    save_checkpoint(run, false);
    return end_checkpoint(run);
}

// Until enough tokens have been trained on, a spike halts the run, or it is to stop.
static void train_to_target(Run *run) {
    Scheduler *s = &run->scheduler;
    const Rule *rule = run->rule;
    Saving *saving = &run->saving;
    // A resumed run may have come this far before. One that rolls back at its end has not.
    bool was_done = saving->rollback_repeats == 0 && (has_all_tokens(run) || has_stopped_improving(run));
    while (!has_all_tokens(run) && !has_stopped_improving(run) && !scheduler_is_halted(s) &&
           !s->wishes.stop_agreed) {
        int64_t before = s->optimizer.steps;
        rule->advance(s);
        bool last = has_all_tokens(run) && rule->finish == NULL;
        report_spike(run);
        if (scheduler_is_halted(s)) { return; }
        follow_commits(run, last);
        if (s->wishes.all_writers_done) { end_checkpoint(run); }
        bool due = s->wishes.save_agreed || is_due(before, s->optimizer.steps, saving->times.commits);
        if (due && !last && !ends_at_commit(run)) { save_checkpoint(run, true); }
        // --save-every with a time: rank 0 asks by its clock; all learn of it with the next job.
        if (run_is_main(run) && saving->times.seconds > 0 &&
            clock_seconds() - saving->began >= saving->times.seconds) {
            __atomic_store_n(&s->wishes.save_requested, true, __ATOMIC_RELAXED);
        }
    }
    bool early = s->wishes.stop_agreed || has_stopped_improving(run);
    if (early && run_is_main(run) && run->reports.window.has_commits) {
        report_window(&run->reports, training_seconds(&run->clock));
    }
    if (s->wishes.stop_agreed || (rule->finish == NULL && !was_done)) { return; }
    bool changed = rule->finish != NULL && rule->finish(s);
    report_spike(run);
    if (scheduler_is_halted(s)) { return; }
    if (changed) { run->checkpointed.validated_commit = 0; } // it was of other parameters
    // A run that was stopped before or in its last validation makes it when it is resumed.
    bool owes =
        was_done && run->options.val_batches > 0 && run->checkpointed.validated_commit != s->optimizer.steps;
    if (changed || owes) { // what was saved of this commit is no longer the state of the run
        end_checkpoint(run);
        run->checkpointed.saved_commit = -1;
    }
    run->nothing_left = was_done && !changed && !owes;
    if (!run->nothing_left) { follow_commits(run, true); }
}

// Saves the state, of which the ranks first make sure that all have the same.
// beside: training continues while it is written.
static void save_checkpoint(Run *run, bool beside) {
    end_checkpoint(run);
    double stopped = clock_seconds();
    run->checkpointed.seconds = training_seconds(&run->clock);
    watch_data(run);
    // Each rank makes the steps by itself.
    bool replicated = run->scheduler.transport->size > 1 && !rule_shards(run->rule);
    if (replicated) { check_committed(&run->scheduler, run->rule, false); }
    Error error = {""};
    if (begin_checkpoint(run, beside, stopped, &error)) { return; }
    SavedReport report = {run->scheduler.optimizer.steps, 0};
    report_checkpoint(run, &report, run->saving.seconds, &error);
}

// The validation in which the run was stopped. What was saved then does not know of it.
static void make_up_validation(Run *run) {
    const Scheduler *s = &run->scheduler;
    validate_commit(run);
    if (run->checkpointed.validated_commit != s->optimizer.steps) { return; } // stopped again
    run->checkpointed.saved_commit = -1;
    if (s->wishes.save_agreed) { save_checkpoint(run, true); }
}

// Whether Rule::finish is still to come and makes no commit of its own: this one is validated,
// sampled and saved behind it, once.
static bool ends_at_commit(const Run *run) {
    return run->rule->kind == RULE_LOCAL && run->rule->finish != NULL && has_all_tokens(run);
}

// Looks at the commits since the last call: reports, validates, samples and redraws the
// bar where that is due. last: training ends here, so everything is due.
static void follow_commits(Run *run, bool last) {
    const Options *options = &run->options;
    const Scheduler *s = &run->scheduler;
    Reports *reports = &run->reports;
    bool is_new = s->reports > reports->seen.reports, reports_here = run_is_main(run);
    if (!is_new && !last) { return; }
    if (is_new) { window_add_commit(reports); }
    int64_t before = reports->seen.commit, now = s->optimizer.steps;
    bool waits = !last && ends_at_commit(run), validated = run->checkpointed.validated_commit == now;
    reports->seen.reports = s->reports;
    reports->seen.commit = now;
    if (reports_here && reports->window.has_commits && (last || is_due(before, now, options->report_every))) {
        report_window(reports, training_seconds(&run->clock));
        watch_data(run);
    }
    if (options->val_batches > 0 && !waits && (last ? !validated : is_due(before, now, options->val_every))) {
        validate_commit(run);
    }
    if (!last && !waits && !s->wishes.stop_agreed && is_due(before, now, options->sample_every)) {
        print_sample(run, false);
    }
    if (reports_here) {
        double seconds = training_seconds(&run->clock);
        Progress progress = {
            "", "tokens", tokens_done(run), options->tokens, seconds, QUIET_TRAINING_SECONDS};
        terminal_bar(&run->terminal, &progress, clock_seconds());
    }
}

// ---- The end of a run ------------------------------------------------------------------

// Checks and describes the result. saved: whether it is on disk. Returns the exit code.
static int finish_run(Run *run, bool saved) {
    Scheduler *s = &run->scheduler;
    Transport *transport = &run->transport;
    scheduler_settle(s);
    write_trace(run); // of a failed run too: it shows what led to that
    if (s->spikes.failed) {
        if (run_is_main(run)) { reports_close(&run->reports); }
        return EXIT_SYSTEM_FAILURE;
    }
    uint64_t fingerprint = check_committed(s, run->rule, false);
    // The weights may be casts of what counts.
    if (s->settings.gathers_casts) { fingerprint = check_committed(s, run->rule, true); }
    double computed = s->micro_batches_begun - run->reports.micro_batches_before;
    RankPace mine = {computed > 0 ? run->reports.micro_batch_seconds / computed : 0,
                     run->reports.exposed_seconds};
    RankPace *paces = (RankPace *)transport_collect_records(transport, "means", &mine, sizeof mine);
    const Error *lost = &run->training.lost;
    Verdict found;
    int rank = transport_first_failure(transport, "data", error_is_set(lost), lost, &found);
    bool lost_data = rank >= 0;
    if (lost_data && run_is_main(run)) {
        fprintf(stderr, "train_gpt: rank %d on %s: %s\n", rank, found.host, found.error.text);
    }
    if (run_is_main(run)) { print_end(run, fingerprint, paces, saved, lost_data); }
    free(paces);
    if (!s->wishes.stop_agreed && !run->nothing_left) { print_sample(run, true); }
    if (run_is_main(run)) {
        print_files(run);
        reports_close(&run->reports);
        static const char why[] = "the reason is printed above";
        long long lines = (long long)run->reports.lost_lines;
        if (lines > 0) {
            fprintf(stderr, "train_gpt: %lld line%s of the log or of its tables could not be written: %s\n",
                    lines, plural(lines), why);
        }
        if (!saved) { fprintf(stderr, "train_gpt: the end of this run is not on disk: %s\n", why); }
    }
    bool lacks = run->trace_is_lost || run->reports.lost_lines > 0;
    share_from_rank_zero(transport, "sharing", &lacks, sizeof lacks);
    if (!saved || lost_data || (lacks && !s->wishes.stop_agreed)) { return EXIT_SYSTEM_FAILURE; }
    if (!s->wishes.stop_agreed) { return 0; }
    return run->saving.times.never ? EXIT_STOPPED_UNSAVED : EXIT_ASKED_TO_STOP;
}

// All ranks, with --trace: writes their spans to one file, in the time of rank 0's clock.
// A trace that cannot be written is no reason to lose the end of a run.
static void write_trace(Run *run) {
    if (run->options.trace[0] == '\0') { return; }
    Transport *transport = &run->transport;
    Error error = {""};
    transport->link_bytes_per_second = transport->link_latency = transport->chaos_seconds = 0; // no emulation
    ClockOffset end = trace_measure_clock(transport, clock_seconds);
    if (!trace_write(&run->scheduler.trace, transport, &run->clock_at_start, &end, run->options.trace,
                     &error)) {
        if (run_is_main(run)) { fprintf(stderr, "train_gpt: there is no trace: %s\n", error.text); }
        run->trace_is_lost = true;
    }
}

// Ends what could not be cut off; memory ends with the process.
static void release_run(Run *run, int exit_code) {
    gemm_close(run->scheduler.compute);
    scheduler_stop(&run->scheduler);
    thread_pool_destroy(run->pool);
    transport_barrier(&run->transport, "end");
    placement_close(&run->placement);
    if (exit_code != 0) { transport_let_launcher_read(&run->transport); }
    transport_close(&run->transport);
}
