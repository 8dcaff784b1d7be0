// resume.h: saving a run, going on from a checkpoint, and going back to one after a spike.
//
// checkpoint/ knows how a checkpoint is written and read; here is when, with what
// messages, and what the clocks and reports of the run go on from afterwards.
#ifndef ACCO_PROGRAM_RESUME_H
#define ACCO_PROGRAM_RESUME_H

#include "checkpoint/load.h"
#include "checkpoint/save.h"
#include "program/report.h"

// ---------------------------------------------------------------------------------------
// Saving

// A failure is said and costs the new checkpoint only.
static inline void report_checkpoint(Run *run, const SavedReport *report, double waited, bool saved,
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
static inline bool end_checkpoint(Run *run) {
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

static inline void begin_checkpoint(Run *run, bool beside) {
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
static inline bool save_checkpoint(Run *run) {
    const Scheduler *s = &run->scheduler;
    end_checkpoint(run);
    if (run->saved_commit == s->optimizer.commits && run->saved_reports == s->reports) { return true; }
    begin_checkpoint(run, false);
    return end_checkpoint(run);
}

// ---------------------------------------------------------------------------------------
// Going on from a checkpoint

// What the reports go on from.
static inline void continue_reports(Run *run, double seconds) {
    const Scheduler *s = &run->scheduler;
    window_begin(run, s->optimizer.commits, s->gradients_done, seconds);
    run->seen.commit = run->saved_commit = s->optimizer.commits;
    run->seen.reports = run->saved_reports = s->reports;
    run->seen.spikes = s->spikes;
}

// Loads the newest checkpoint in the run's directory that is good; damaged ones are named
// and passed over. Returns its commit; -1: there is none.
static inline int64_t load_newest(Run *run, char remarks[512]) {
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

static inline void print_resumed(Run *run, const char *path, const char *remarks) {
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
static inline void check_resume(Run *run) {
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

static inline void resume_run(Run *run) {
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

// ---------------------------------------------------------------------------------------
// Going back after a spike

// The number of micro-batches, counted over all ranks, at which data begin that no rank
// has asked for.
static inline int64_t fresh_data(Run *run, bool least) {
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

static inline void report_rollback(Run *run, int64_t from, int64_t to) {
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
static inline bool roll_back(Run *run) {
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

#endif
