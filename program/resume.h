// resume.h: saving a run, resuming it, and rolling it back to a checkpoint after a spike:
// when that is done, what is printed and logged of it, and how clocks, reports and data go on.
#pragma once

#include <float.h>

#include "checkpoint/save.h"
#include "program/data.h"

static inline void open_checkpoints(Run *run) {
    const Options *options = &run->options;
    uLong sum = 0;
    for (int i = 0; i < run->part.table.count; i++) {
        const ParameterInfo *info = &run->part.table.entries[i];
        sum = crc32_z(sum, (const Bytef *)info->name, strlen(info->name));
        sum = crc32_z(sum, (const Bytef *)&info->count, sizeof info->count);
    }
    CheckpointedRun checkpointed = {.transport = &run->transport,
                                    .scheduler = &run->scheduler,
                                    .rule = run->rule,
                                    .config = &run->config,
                                    .table = &run->part.table,
                                    .part = &run->part,
                                    .base = &run->base,
                                    .base_directory = options_start(options),
                                    .trained_sum = (int64_t)sum,
                                    .B = run->B,
                                    .T = run->T,
                                    .directory = run->directory,
                                    .tokenizer = options->tokenizer[0] != '\0' ? options->tokenizer
                                                                               : options_start(options),
                                    .version = ACCO_VERSION,
                                    .revision = ACCO_REVISION,
                                    .rounding = run->placement.rounding,
                                    .keep = options->keep,
                                    .keep_every = options->keep_every,
                                    .keep_best = options->keep_best,
                                    .product_processors = run->placement.product_processors,
                                    .data = run->data_identity,
                                    .fresh_moments = options->fresh_moments};
    Error error = {""};
    options_save_times(options, &run->saving.times, &error); // cannot fail: it has been checked
    run->checkpointed = checkpointed;
}

// A branch that ended before it had saved itself begins again where it began.
static inline void find_branch(Options *options) {
    char path[sizeof(OptionText) + 16];
    bool begins = options->command == COMMAND_TRAIN && strcmp(options->resume, "auto") == 0 &&
                  checkpoint_newest(options->out, INT64_MAX) < 0;
    if (!begins) { return; }
    snprintf(path, sizeof path, "%s/config.json", options->out);
    json_t *config = json_file_load(path, 0, NULL);
    const char *from = json_text(config, "resume");
    options->branch_again = from != NULL && strcmp(from, "auto") != 0 && strcmp(from, "off") != 0 &&
                            strlen(from) < sizeof options->resume;
    if (options->branch_again) { strcpy(options->resume, from); }
    json_decref(config);
}

// A run stands for its newest checkpoint, and a checkpoint for the model in it.
static inline void find_models(Options *options) {
    OptionText asked;
    find_branch(options);
    memcpy(asked, options->from, sizeof asked);
    bool newest = checkpoint_find(options->from, sizeof options->from);
    checkpoint_find(options->finetune, sizeof options->finetune);
    hf_model_find(options->from, sizeof options->from);
    hf_model_find(options->finetune, sizeof options->finetune);
    // Adapters without a tokenizer have that of their model.
    const char *start = options_start(options);
    bool lacks = options->tokenizer[0] == '\0' && !hf_model_has(start, "tokenizer.json");
    char base[PATH_MAX];
    if (lacks && adapters_find_base(start, base) && hf_model_has(base, "tokenizer.json") &&
        strlen(base) < sizeof options->tokenizer) {
        strcpy(options->tokenizer, base);
    }
    bool is_path = strcmp(options->resume, "auto") != 0 && strcmp(options->resume, "off") != 0;
    if (is_path) { checkpoint_find(options->resume, sizeof options->resume); }
    bool reads = options->command == COMMAND_SAMPLE || options->command == COMMAND_EVAL;
    if (newest && reads && launch_launcher_rank() == 0) {
        printf("%-14s %s, the newest checkpoint of %s\n", "model", options->from, asked);
    }
}

// ---- Saving ---------------------------------------------------------------------------

// Training was blocked for `blocked` seconds, and after a failure, which `error` holds, continues.
static inline void report_checkpoint(Run *run, const SavedReport *report, double blocked,
                                     const Error *error) {
    bool saved = !error_is_set(error);
    if (!run_is_main(run)) { return; }
    report_begin_table(&run->reports);
    if (!saved) {
        printf("%6lld no checkpoint: %s\n", (long long)report->commit, error->text);
    } else {
        printf("%6lld checkpoint in %.1f s, %.1f s of it during training\n", (long long)report->commit,
               blocked + report->seconds, report->seconds);
    }
    fflush(stdout);
    report_event(&run->reports,
                 json_pack("{s:s, s:I, s:b, s:o, s:o, s:o}", "event", "checkpoint", "commit",
                           (json_int_t)report->commit, "saved", saved ? 1 : 0, "seconds", log_real(blocked),
                           "beside_seconds", log_real(report->seconds), "problem", log_text(error->text)));
}

// Ends the checkpoint that is being written, if any. Returns whether it is on disk.
static inline bool end_checkpoint(Run *run) {
    SavedReport report;
    Error error = {""}, unused = {""};
    if (run->checkpointed.saver == NULL) { return false; }
    double began = clock_seconds();
    // Before it has its name: a run that is resumed does not repeat the lines before it.
    if (run_is_main(run)) { reports_flush(&run->reports, &unused); }
    bool saved = checkpoint_end(&run->checkpointed, &report, &error);
    double waited = clock_seconds() - began;
    run->clock.paused += waited;
    report_checkpoint(run, &report, run->saving.seconds + waited, &error);
    if (saved) { signal_watch_note_saved(&run->signal_watch, report.commit); }
    return saved;
}

// Begins a checkpoint; none is being written. Training has waited for it since `stopped`, and
// checkpointed.seconds is how long it had trained by then. False, with an error: it has failed.
// beside: training continues while it is written.
static inline bool begin_checkpoint(Run *run, bool beside, double stopped, Error *error) {
    Saving *saving = &run->saving;
    run->checkpointed.data_changed = run->training.data_changed;
    bool begun = checkpoint_begin(&run->checkpointed, beside, error);
    saving->began = clock_seconds(); // the clock of --save-every starts anew
    saving->seconds = saving->began - stopped;
    run->clock.paused += saving->seconds;
    return begun;
}

// ---- Resuming -------------------------------------------------------------------------

// Reports continue from the state that was just loaded, after `seconds` of training.
static inline void continue_reports(Run *run, double seconds) {
    const Scheduler *s = &run->scheduler;
    Reports *reports = &run->reports;
    window_begin(reports, seconds);
    reports->seen.commit = run->checkpointed.saved_commit = s->optimizer.steps;
    reports->seen.reports = run->checkpointed.saved_reports = s->reports;
    reports->seen.spikes = s->spikes.count;
    reports->micro_batches_before = s->micro_batches_begun;
    reports->micro_batch_seconds = 0;
    signal_watch_note_saved(&run->signal_watch, s->optimizer.steps);
}

// Loads the newest sound checkpoint of the run's directory. Damaged ones are named, noted and
// skipped, but for damage in model/ only. Returns its commit; -1: there is none.
static inline int64_t load_newest(Run *run) {
    CheckpointedRun *checkpointed = &run->checkpointed;
    checkpointed->damaged_count = 0;
    for (int64_t commit = INT64_MAX;;) {
        Error error = {""};
        commit = checkpoint_newest(checkpointed->directory, commit);
        share_from_rank_zero(checkpointed->transport, "sharing", &commit, sizeof commit);
        if (commit < 0) { return -1; }
        CheckpointPaths paths = checkpoint_paths(checkpointed->directory, commit);
        bool loads = checkpoint_load(&run->source, checkpointed, paths.final, &error);
        bool whole =
            loads && (checkpointed->transport->rank != 0 || checkpoint_model_is_whole(paths.final, &error));
        if (whole) { return commit; }
        checkpointed->damaged = (int64_t *)memory_grow(
            checkpointed->damaged, (checkpointed->damaged_count + 1) * sizeof *checkpointed->damaged);
        checkpointed->damaged[checkpointed->damaged_count++] = commit;
        if (checkpointed->transport->rank == 0) {
            printf("resumed    %s commit-%lld%s: %s\n", loads ? "from" : "not from", (long long)commit,
                   loads ? ", whose model/ is damaged, so that --keep does not count it" : "", error.text);
        }
        if (loads) { return commit; }
    }
}

// --decay-now: from the checkpoint on the rate falls, and the run ends that many tokens later.
static inline bool decay_from_checkpoint(Options *options, Error *error) {
    if (options->decay_now == 0) { return true; }
    options->tokens = (int64_t)ceil(checkpoint_tokens(options->resume)) + options->decay_now;
    if (options->tokens > (int64_t)OPTION_NO_LIMIT) {
        return error_set(error,
                         "--decay-now %lld: with the tokens before it that is more than can be counted here: "
                         "at most %.0f",
                         (long long)options->decay_now, OPTION_NO_LIMIT);
    }
    options->decay_tokens = options->decay_now;
    return true;
}

// --decay-now: whether the rate has its peak at the checkpoint. With other batches or another
// --lr-by than the run had, the same tokens may lie in the warm-up, or behind the end.
static inline bool check_decay(const Run *run, Error *error) {
    const Options *options = &run->options;
    const LearningRate *rate = &run->scheduler.settings.rate;
    const char *resume = options->resume;
    int64_t commit = integer_from_json(run->source.manifest, "commit");
    double before = options->tokens - options->decay_now;
    double done =
        run->scheduler.settings.rate_by_commits ? commit : before / (options->micro_batch * options->seq_len);
    if (done < rate->warmup) {
        return error_set(error,
                         "--decay-now: at commit %lld of %.300s the rate still rises, for %lld commit%s: "
                         "take a later checkpoint, or give a --warmup of at most %.0f",
                         (long long)commit, resume, (long long)options->warmup, plural(options->warmup),
                         floor(done / rate->step));
    }
    bool has_fallen = done >= rate->total, never_falls = done + rate->decay <= rate->total - rate->decay;
    return (!has_fallen && !never_falls) ||
           error_set(error,
                     "--decay-now: by --lr-by commits the rate %s commit %lld of %.300s, whose batches were "
                     "%s: give --lr-by grads",
                     has_fallen ? "has fallen already at" : "does not fall before the run ends, counted from",
                     (long long)commit, resume, has_fallen ? "smaller" : "larger");
}

// Before anything is made: the checkpoint of --resume can be read, and fits this run.
static inline void check_resume(Run *run) {
    Options *options = &run->options;
    const CheckpointedRun *checkpointed = &run->checkpointed;
    Error error = {""};
    bool good = true;
    if (strcmp(options->resume, "auto") == 0) { // the newest that can be read; otherwise loading says why
        for (int64_t commit = INT64_MAX; good && run->source.manifest == NULL &&
                                         (commit = checkpoint_newest(options->out, commit)) >= 0;) {
            CheckpointPaths paths = checkpoint_paths(options->out, commit);
            good = checkpoint_open(&run->source, checkpointed, paths.final, &error) || !run->source.refused;
        }
    } else if (strcmp(options->resume, "off") != 0) {
        good = checkpoint_open(&run->source, checkpointed, options->resume, &error) &&
               (options->decay_now == 0 || check_decay(run, &error));
        options->decay_now = 0;
    }
    agree_or_exit(run, good, EXIT_USER_MISTAKE, &error);
    const json_t *manifest = run->source.manifest;
    if (manifest != NULL) { // to whoever ends the run before it is loaded
        signal_watch_note_saved(&run->signal_watch, integer_from_json(manifest, "commit"));
    }
}

// Adds to remarks which options change bits and are others than in the run that is resumed, and
// to `keeping` those about keeping checkpoints. Nothing is held out of the built-in corpus.
static inline void compare_options(const Run *run, char remarks[CHECKPOINT_REMARKS_SIZE], char keeping[160]) {
    char now[OPTION_VALUE_SIZE], old[OPTION_VALUE_SIZE];
    const json_t *options = json_object_get(run->source.manifest, "options");
    for (EACH_OPTION(option)) {
        const json_t *before = json_object_get(options, option->name),
                     *value = json_object_get(run->checkpointed.options, option->name);
        if (json_equal(before, value)) { continue; }
        json_t *word = json_string(option->word == NULL ? "" : option->word);
        bool turns_on_or_off = json_equal(before, word) != json_equal(value, word);
        json_decref(word);
        bool holds_out = option->effect == HELD_OUT && !run->data.builtin && turns_on_or_off;
        if (option->effect == OTHER_BITS || holds_out) {
            text_join(remarks, CHECKPOINT_REMARKS_SIZE, "; ", "another --%.40s", option->name);
        }
        Options then = run->options;
        Error error = {""}; // a checkpoint holds what was valid
        if (option->effect == KEPT_FILES && option_set_json(option, &then, before, &error)) {
            text_join(keeping, 160, ", ", "--%s %s (was %s)", option->name,
                      option_print_value(option, &run->options, now), option_print_value(option, &then, old));
        }
    }
}

// Whether an option is another one than in the run that is resumed.
static inline bool option_differs(const Run *run, const OptionSpec *option) {
    const json_t *then = json_object_get(run->source.manifest, "options"), *now = run->checkpointed.options;
    return !json_equal(json_object_get(then, option->name), json_object_get(now, option->name));
}

// Losses on other windows are no measure for those to come: the next one is the lowest. Until then
// the checkpoint of the lowest so far stays.
static inline void forget_other_validations(Run *run) {
    bool other = !has_validation_data(&run->options) && // else they are no part of --data
                 !json_says(run->source.manifest, "data", run->data_identity);
    for (EACH_OPTION(option)) {
        size_t at = option->offset; // what a window is, how many are visited, what is made up
        bool shapes = at == offsetof(Options, seq_len) || at == offsetof(Options, micro_batch) ||
                      at == offsetof(Options, attend) ||
                      (at == offsetof(Options, seed) && validation_loader(run)->builtin);
        other = other || ((shapes || option->effect == HELD_OUT) && option_differs(run, option));
    }
    if (!other) { return; }
    run->checkpointed.worse = 0;
    run->checkpointed.best_loss = DBL_MAX;
}

// Whether the run was stopped in a validation before its end (train_to_target knows of the last
// one). Of a run that validated at other times, or not at all, that is not known.
static inline bool has_left_validation(const Run *run) {
    const Scheduler *s = &run->scheduler;
    bool same = run->options.val_batches > 0 && !has_all_tokens(run) && !has_stopped_improving(run) &&
                !option_differs(run, option_of(offsetof(Options, val_every))) &&
                !option_differs(run, option_of(offsetof(Options, val_batches)));
    // It was due at the latest commit, or at the latest steps that a local rule makes at a time.
    int64_t steps = s->optimizer.steps, before = steps - (int64_t)fmax(s->settings.local.steps, 1),
            validated = run->checkpointed.validated_commit;
    return same && s->reports > 0 && // else nothing is validated yet
           is_due(before > validated ? before : validated, steps, run->options.val_every);
}

// Prints and logs from where the run goes on. again: in the same directory.
static inline void report_resumed(Run *run, const char *resume, bool again) {
    long long commit = (long long)run->scheduler.optimizer.steps;
    char remarks[CHECKPOINT_REMARKS_SIZE], keeping[160] = "";
    source_find_remarks(&run->source, &run->checkpointed, remarks);
    compare_options(run, remarks, keeping);
    bool exact = remarks[0] == '\0';
    printf("resumed    from %s at %s %lld; %s%s\n", resume, step_name(run->rule), commit,
           exact ? "exact" : "not exact: ", remarks);
    const char *start = options_start(&run->options);
    if (start[0] != '\0' && run->part.frozen_count == 0) {
        printf("           with its parameters; %s is not loaded\n", start);
    }
    if (again && keeping[0] != '\0') {
        printf("           %s: what only the former kept is removed when the next checkpoint is written\n",
               keeping);
    }
    double before = run->checkpointed.next_learning_rate, now = scheduler_learning_rate(&run->scheduler);
    if (!has_all_tokens(run) && !(fabs(now - before) <= 1e-4 * before)) {
        printf("           the schedule is another one: the learning rate goes from %.5g to %.5g here\n",
               before, now);
        if (run->options.schedule != SCHEDULE_CONSTANT && before > 1e-12) {
            printf("           (--schedule constant --lr %.5g --warmup 0 leaves it where it was)\n", before);
        }
    }
    printf("\n");
    fflush(stdout);
    report_event(&run->reports, json_pack("{s:s, s:I, s:o, s:b, s:o}", "event", "resume", "commit",
                                          (json_int_t)commit, "checkpoint", log_text(resume), "exact",
                                          exact ? 1 : 0, "remarks", log_text(remarks)));
}

// All ranks, after scheduler_start: does what --resume asks for.
static inline void resume_run(Run *run) {
    const char *resume = run->options.resume;
    CheckpointPaths newest;
    Error error = {""};
    bool again = strcmp(resume, "auto") == 0;
    if (strcmp(resume, "off") == 0) { return; }
    if (again) {
        int64_t commit = load_newest(run);
        if (commit < 0 && run->checkpointed.damaged_count > 0) { // which may still be repaired
            error_set(&error,
                      "--resume auto: no checkpoint in %.300s can be loaded, for the reasons above. Repair "
                      "them, or move them away to begin at zero, or choose another --out",
                      run->directory);
            agree_or_exit(run, false, EXIT_USER_MISTAKE, &error);
        } else if (commit < 0) {
            if (run_is_main(run)) {
                printf("resumed    nothing: there is no checkpoint in %s; a new run begins\n\n",
                       run->directory);
            }
            return;
        }
        newest = checkpoint_paths(run->directory, commit);
        resume = newest.final;
        forget_other_validations(run);
    } else if (!checkpoint_load(&run->source, &run->checkpointed, resume, &error)) {
        agree_or_exit(run, false, EXIT_USER_MISTAKE, &error);
    } else { // a branch starts its own best-loss record; the old run's best checkpoint is elsewhere
        run->checkpointed.best_commit = run->checkpointed.worse = 0;
    }
    run->clock.before = run->checkpointed.seconds;
    continue_reports(run, run->clock.before);
    if (!again) { run->checkpointed.saved_commit = -1; } // it is in another run's directory
    if (run_is_main(run)) { report_resumed(run, resume, again); }
    run->owes_validation = has_left_validation(run);
    checkpoint_close(&run->source);
}

enum { ROLLBACK_PATIENCE = 3 }; // how often a spike may send a run back to the same checkpoint

// In the micro-batches of all ranks: where the first lies that some rank has not begun, or, behind,
// those that no rank has.
static inline int64_t data_position(const CheckpointedRun *checkpointed, bool behind) {
    Transport *transport = checkpointed->transport;
    const Scheduler *s = checkpointed->scheduler;
    const int *turn = s->settings.turn;
    int rank = transport->rank, ranks = transport->size;
    uint64_t mine = behind ? micro_batches_passed(turn, ranks, rank, s->micro_batches_begun)
                           : micro_batch_number(turn, ranks, rank, s->micro_batches_begun);
    double (*fold)(double, double) = fmin;
    if (behind) { fold = fmax; }
    return checkpointed->data_base +
           (int64_t)transport_fold(transport, "position in the data", (double)mine, fold);
}

// Continues from the newest sound checkpoint with data that no rank has used before.
// False: there is none, or it has failed ROLLBACK_PATIENCE times; the run ends.
static inline bool roll_back(Run *run) {
    Scheduler *s = &run->scheduler;
    CheckpointedRun *checkpointed = &run->checkpointed;
    Saving *saving = &run->saving;
    double began = clock_seconds() - run->clock.paused;
    scheduler_settle(s); // the exchanges below must be the only ones
    int64_t position = data_position(checkpointed, true), from = s->optimizer.steps;
    double spikes = s->spikes.count, rollbacks = s->spikes.rollbacks + 1;
    end_checkpoint(run);
    scheduler_drop(s);
    int64_t commit = load_newest(run);
    checkpoint_close(&run->source);
    // Gradients saved while they waited may be from just before the spike, and repeat it. Without
    // them compute goes on from what was committed, and not from a prediction.
    if (run->rule->kind == RULE_OVERLAPPED) {
        const void *committed = borrow_committed(s, run->rule, false), *weights = scheduler_weights(s);
        if (committed != weights) { stream_copy(s->compute, (void *)weights, committed, weights_bytes(s)); }
        scheduler_drop(s);
    }
    saving->rollback_repeats = commit == saving->rollback_commit ? saving->rollback_repeats + 1 : 1;
    saving->rollback_commit = commit;
    s->spikes.count = spikes;
    s->spikes.rollbacks = rollbacks;
    s->spikes.failed = commit < 0 || saving->rollback_repeats > ROLLBACK_PATIENCE;
    if (s->spikes.failed) { return false; }
    checkpointed->data_base += position - data_position(checkpointed, false);
    run->clock.paused = clock_seconds() - began; // all of this, with what end_checkpoint has already counted
    continue_reports(run, training_seconds(&run->clock));
    run->checkpointed.saved_commit = -1; // the checkpoint on disk does not know of the rollback
    if (!run_is_main(run)) { return true; }
    printf("%6lld back to the checkpoint of %s %lld, rollback %.0f; on with new data\n", (long long)from,
           step_name(run->rule), (long long)commit, rollbacks);
    fflush(stdout);
    Error error = {""};
    if (!log_append(&run->reports.curves, "\n", 1, &error)) { reports_lose(&run->reports, 1, &error); }
    report_event(&run->reports,
                 json_pack("{s:s, s:I, s:I, s:o}", "event", "rollback", "from", (json_int_t)from, "commit",
                           (json_int_t)commit, "count", log_real(rollbacks)));
    return true;
}
