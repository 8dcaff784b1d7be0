// spike_report.h: what a run says about spikes (scheduler/spike.h), with which no step was made.
// For the user to find the cause, it names the rank and, where it can, the sequences or the tensor.
#pragma once

#include "program/resume.h"

enum { SPIKE_TEXT_SIZE = 600 };

// The number, in the order of training, of the first sequence at the site of a spike.
static inline int64_t spike_first_sequence(const CheckpointedRun *run, const SpikeReport *spike) {
    uint64_t micro_batch = (uint64_t)spike->site.micro_batch - 1;
    return (run->data_base + (int64_t)micro_batch_number(run->scheduler->settings.turn, run->transport->size,
                                                         spike->rank, micro_batch)) *
           run->B;
}

// The tensor to which the element at the site of a spike belongs.
static inline const ParameterInfo *spike_tensor(const ParameterTable *table, const SpikeReport *spike) {
    int i = table->count - 1;
    while (i > 0 && table->entries[i].offset > spike->site.element - 1) { i--; }
    return &table->entries[i];
}

static inline void describe_spike(const CheckpointedRun *run, const DataLoader *data, char *text,
                                  size_t size) {
    const SpikeReport *spike = &run->scheduler->spikes.latest;
    bool high_loss = spike->kind == SPIKE_HIGH_LOSS;
    int rank = spike->rank;
    if (spike->kind == SPIKE_LOSS && spike->site.micro_batch == 0) { // handed over before the run was resumed
        snprintf(text, size, "the loss of rank %d is not a finite number", rank);
    } else if (spike->kind == SPIKE_LOSS) {
        uint64_t first = spike_first_sequence(run, spike), token;
        char place[256] = "";
        if (!data->builtin) {
            const DataFile *file =
                data_loader_find(data, data_loader_window(data, DATA_TRAINING, first), &token);
            snprintf(place, sizeof place, ": %.200s from token %llu", file->path, (unsigned long long)token);
        }
        snprintf(text, size,
                 "the loss of rank %d is not a finite number in its micro-batch %.0f (of %d sequence%s, the "
                 "first is number %llu in the order of training%s)",
                 rank, spike->site.micro_batch - 1, run->B, plural(run->B), (unsigned long long)first, place);
    } else if (spike->kind == SPIKE_GRADIENT && rank < 0) {
        snprintf(text, size, "the sum of the gradients is not finite although every rank's own are");
    } else if (spike->kind == SPIKE_GRADIENT) {
        const ParameterInfo *tensor = spike_tensor(run->table, spike);
        size_t within = (size_t)spike->site.element - 1 - tensor->offset,
               columns = tensor->columns > 0 ? (size_t)tensor->columns : 1;
        char column[32] = "";
        if (tensor->columns > 0) { snprintf(column, sizeof column, ", %zu", within % columns); }
        snprintf(text, size,
                 "the gradient of rank %d is not finite although its loss is; the backward pass met it first "
                 "in %s[%zu%s]",
                 rank, tensor->name, within / columns, column);
    } else if (spike->kind == SPIKE_PARAMETERS) {
        snprintf(
            text, size,
            "rank %d cannot recover: its parameters, or %d gradients in a row, are NaN, infinite or above "
            "--spike-limit",
            rank, SPIKE_PATIENCE);
    } else if (run->rule->kind == RULE_LOCAL) {
        snprintf(text, size, "%s of rank %d is far larger than the ones before it",
                 high_loss ? "a loss" : "a gradient", rank);
    } else {
        snprintf(text, size,
                 "%s is %.3g, and at most %.3g was expected from earlier commits; rank %d has the largest",
                 high_loss ? "the loss" : "the gradient's norm", spike->measured, spike->largest, rank);
    }
}

// The spikes since the last call; fail_spike announces an end, roll_back a rollback.
static inline void report_spike(Run *run) {
    const Scheduler *s = &run->scheduler;
    const Options *options = &run->options;
    char text[SPIKE_TEXT_SIZE];
    bool is_new = s->spikes.count > run->reports.seen.spikes;
    run->reports.seen.spikes = s->spikes.count;
    if (!is_new || !run_is_main(run)) { return; }
    terminal_clear(&run->terminal);
    describe_spike(&run->checkpointed, &run->data, text, sizeof text);
    static const char *const kinds[] = {"none", "loss", "gradient", "norm", "high loss", "parameters"};
    const SpikeReport *spike = &s->spikes.latest;
    json_t *first = json_null(), *sequences = json_null(), *tensor = json_null();
    if (spike->site.micro_batch > 0) {
        first = json_integer((json_int_t)spike_first_sequence(&run->checkpointed, spike));
        sequences = json_integer(run->B);
    }
    if (spike->site.element > 0 && spike->kind == SPIKE_GRADIENT) {
        tensor = json_string(spike_tensor(&run->part.table, spike)->name);
    }
    const char *action = s->spikes.failed ? "stop" : options_choice_name(options, &options->on_spike);
    report_event(&run->reports,
                 json_pack("{s:s, s:s, s:I, s:i, s:o, s:o, s:o, s:o, s:o, s:o, s:s, s:o, s:o}", "event",
                           "spike", "kind", kinds[spike->kind], "commit", (json_int_t)spike->commit, "rank",
                           spike->rank, "first_sequence", first, "sequences", sequences, "tensor", tensor,
                           "measured", log_real(spike->measured), "largest", log_real(spike->largest),
                           "steps", log_real(spike->steps), "action", action, "text", log_text(text), "count",
                           log_real(s->spikes.count)));
    if (s->spikes.failed) { return; }
    printf("%6lld spike: %s", (long long)spike->commit, text);
    if (s->settings.on_spike == SPIKE_SKIP) {
        printf("; left out%s, %.0f so far", spike->steps > 1 ? " with others" : "", s->spikes.count);
    }
    printf("\n");
    fflush(stdout);
}

// Says why the run ends, in order: all ranks know, and nothing was updated with it.
static inline void fail_spike(Run *run) {
    const Scheduler *s = &run->scheduler;
    SpikePolicy policy = s->settings.on_spike;
    char text[SPIKE_TEXT_SIZE], tried[96] = "";
    terminal_clear(&run->terminal);
    report_event(&run->reports, json_pack("{s:s, s:s, s:I}", "event", "end", "reason", "spike", "commit",
                                          (json_int_t)s->optimizer.steps));
    if (policy == SPIKE_SKIP && s->spikes.in_a_row >= SPIKE_PATIENCE) {
        snprintf(tried, sizeof tried, "%d in a row were left out; ", SPIKE_PATIENCE);
    } else if (policy == SPIKE_ROLLBACK && run->saving.rollback_commit < 0) {
        snprintf(tried, sizeof tried, "there is no checkpoint to go back to; ");
    } else if (policy == SPIKE_ROLLBACK) {
        snprintf(tried, sizeof tried, "going back to %s %lld %d times did not help; ", step_name(run->rule),
                 (long long)run->saving.rollback_commit, ROLLBACK_PATIENCE);
    }
    describe_spike(&run->checkpointed, &run->data, text, sizeof text);
    fprintf(stderr,
            "train_gpt: after %s %lld %s; %snothing was updated with it: lower --lr or --grad-clip, look at "
            "these data%s\n",
            step_name(run->rule), (long long)s->spikes.latest.commit, text, tried,
            policy == SPIKE_STOP ? ", or continue with --on-spike skip" : "");
}
