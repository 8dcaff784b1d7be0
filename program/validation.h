// validation.h: the loss of the committed parameters on held-out data, and what follows from it.
//
// Each rank computes every size-th batch of all sources; sums travel after each round of batches,
// so all ranks know the same loss and leave together when one of them is asked to stop. Its time is
// not training time. program/data.h says which windows are held out.
#pragma once

#include "program/resume.h"

typedef struct Validation {
    Run *run;
    const void *parameters;        // the committed ones, as the model takes them
    int64_t batch;                 // the one that this rank computes, counted through all sources
    Tally mine[DATA_SOURCES_MOST]; // of what this rank has done of each
} Validation;

// One held-out batch. Compute stream.
static inline void validate_task(void *context, Stream *stream) {
    Validation *validation = (Validation *)context;
    Run *run = validation->run;
    const DataLoader *data = validation_loader(run);
    const Batch *batch = &run->training.batch;
    int64_t number = validation->batch; // in its source
    uint64_t begin = 0;                 // of the source's windows
    int source = 0;
    for (; number >= validation_batches(run, source); source++) {
        number -= validation_batches(run, source);
        begin += data->sources[source].validation_windows;
    }
    Tally *sums = &validation->mine[source];
    uint64_t first = begin + (uint64_t)number * run->B, windows = data->sources[source].validation_windows;
    int count = (int)tokens_per_micro_batch(run);
    double perfect;
    Error error = {""};
    if (!data_loader_fill(data, DATA_VALIDATION, first, run->B, batch->tokens, batch->targets, &perfect,
                          &error)) {
        training_lose_data(&run->training, &error);
        return;
    }
    // Behind the source's last window stand others, which do not count.
    for (int i = 0; i < count && windows > 0; i++) {
        if (first + (i / run->T) >= begin + windows) { batch->targets[i] = -1; }
    }
    double predicted = targets_predicted(batch->targets, count);
    if (predicted == 0) { return; }
    ModelQuery query = {
        .B = run->B, .T = run->T, .tokens = batch->tokens, .targets = batch->targets, .count = count};
    const float *losses = model_losses(&run->model, stream, validation->parameters, &query, NULL);
    double loss = losses_mean(stream, losses, batch->targets, count);
    sums->loss += loss * predicted;
    sums->perfect_loss += perfect * predicted;
    sums->predicted += predicted;
}

// Writes into run->reports the mean loss over the predicted tokens of the held-out batches; of
// several sources the weighted mean. False: a rank was asked to stop, and all left it unfinished.
static inline bool validate(Run *run) {
    Scheduler *s = &run->scheduler;
    const DataLoader *data = validation_loader(run);
    int64_t batches = 0, ranks = run->transport.size;
    int sources = data->source_count;
    for (int i = 0; i < sources; i++) { batches += validation_batches(run, i); }
    // Waiting for communication under way still counts as training. Then the transport is free.
    scheduler_settle(s);
    double began = clock_seconds();
    Validation validation = {.run = run, .parameters = borrow_committed(s, run->rule, false)};
    Tally total[DATA_SOURCES_MOST]; // of all ranks
    bool stopped = false;
    for (int64_t first = 0; first < batches && !stopped; first += ranks) {
        validation.batch = first + run->transport.rank;
        if (validation.batch < batches) { scheduler_call(s, s->compute, validate_task, &validation); }
        validation.mine->stops = scheduler_is_asked_to_stop(s);
        Tally *all = (Tally *)transport_collect_records(s->transport, "validation", validation.mine,
                                                        sources * sizeof *all);
        memset(total, 0, sizeof total);
        for (int i = 0; i < ranks * sources; i++) { tally_add(&total[i % sources], &all[i]); }
        free(all);
        s->wishes.stop_agreed = s->wishes.stop_agreed || total->stops > 0;
        stopped = s->wishes.stop_agreed && first + ranks < batches;
        double now = clock_seconds();
        int64_t done = int64_min(first + ranks, batches);
        Progress progress = {"validation, ", "batches", done, batches, now - began, QUIET_SECONDS};
        if (run_is_main(run) && now - began >= 1) { terminal_bar(&run->terminal, &progress, now); }
    }
    return_committed(s, validation.parameters);
    if (!stopped) {
        Reports *reports = &run->reports;
        reports->validation = 0;
        for (int i = 0; i < sources; i++) {
            reports->source_validation[i] = tally_mean_loss(&total[i]);
            reports->validation += data_loader_share(data, i) * reports->source_validation[i];
        }
        reports->perfect_validation = total->perfect_loss / total->predicted;
    }
    run->clock.paused += clock_seconds() - began;
    return !stopped;
}

// Validates; notes whether it is the best (--keep-best), and how many were not (--stop-after).
static inline void validate_commit(Run *run) {
    if (!validate(run)) { return; }
    CheckpointedRun *checkpointed = &run->checkpointed;
    double loss = run->reports.validation; // the same on all ranks
    int64_t commit = run->scheduler.optimizer.steps;
    checkpointed->validated_commit = commit;
    if (isfinite(loss) && (checkpointed->best_commit == 0 || loss < checkpointed->best_loss)) {
        checkpointed->best_commit = commit;
        checkpointed->best_loss = loss;
        checkpointed->worse = 0;
        if (run->options.keep_best) { run->scheduler.wishes.save_agreed = true; }
    } else if (!isnan(loss)) { // without a loss it says nothing
        checkpointed->worse++;
    }
    if (run_is_main(run)) {
        report_validation(&run->reports, tokens_done(run), training_seconds(&run->clock));
    }
}
