// account.h: what the host does with the numbers that a job brings: the report of a commit, the
// count of gradients, the verdict on spikes, and what the ranks wish for. wait_for() calls
// scheduler_account_job once per job, when it has ended.
#pragma once

#include "scheduler/state.h"

// Whether a spike has ended the run or sends it back. Local rules then apply no result any more.
static inline bool scheduler_is_halted(const Scheduler *s) {
    return s->spikes.failed || s->spikes.rollback_due;
}

// Skipped steps; the job of a local rule does not know which value was too large.
static inline void scheduler_note_spike(Scheduler *s, SpikeKind kind, double steps) {
    const Job *job = &s->job;
    bool high = kind == SPIKE_HIGH_LOSS;
    SpikeReport report = {.kind = kind,
                          .commit = job->commit,
                          .rank = job->first_bad_rank,
                          .site = job->site,
                          .measured = high ? tally_mean_loss(&job->total) : job->gradient_norm,
                          .largest = high ? job->largest_loss : job->largest_norm,
                          .steps = steps};
    if (job->kind == AVERAGE) { report.measured = NAN; }
    s->spikes.latest = report;
    s->spikes.count += steps;
}

// Adds what a job brought to the report, which is complete after a commit. An estimate that
// was refused is not reported: the commit has the same bad gradients, and its job knows more
// about them.
static inline void scheduler_account_job(Scheduler *s) {
    const Job *job = &s->job;
    SpikeState *spikes = &s->spikes;
    bool local = job->kind == AVERAGE;
    s->wishes.stop_agreed |= job->total.stops > 0;
    s->wishes.save_agreed |= job->total.saves > 0;
    s->wishes.all_writers_done = job->total.ended == s->transport->size;
    if (job->kind == ESTIMATE) { return; }
    if (job->spike != SPIKE_NONE) {
        SpikePolicy policy = s->settings.on_spike;
        scheduler_note_spike(s, job->spike, 1);
        spikes->in_a_row += !local;
        bool patient = spikes->in_a_row < SPIKE_PATIENCE && job->spike != SPIKE_PARAMETERS;
        spikes->failed |= policy == SPIKE_STOP || (policy == SPIKE_SKIP && !patient);
        spikes->rollback_due = policy == SPIKE_ROLLBACK;
        return;
    }
    if (job->total.left_out > 0) { scheduler_note_spike(s, spike_kind_of(&job->site), job->total.left_out); }
    if (job->total.micro_batches == 0) { return; }
    if (!local) {
        s->gradients_done += job->total.micro_batches;
        spikes->in_a_row = 0;
    }
    CommitReport report = {.commit = local ? job->commit : s->optimizer.steps,
                           .gradients_done = local ? job->gradients_done : s->gradients_done,
                           .micro_batches = job->total.micro_batches,
                           .predicted = job->total.predicted,
                           .loss = tally_mean_loss(&job->total),
                           .perfect_loss = job->total.perfect_loss / job->total.predicted,
                           .learning_rate = job->learning_rate,
                           .gradient_norm = job->gradient_norm,
                           .seconds = trace_take(&s->trace)};
    s->report = report;
    s->reports++;
}
