// spike_report.h: what a run says about spikes (spike.h): losses, gradients and norms
// with which no step was made. Rank 0 only.
//
// A spike is useful to know about only if the user can find its cause. So the text names
// the rank, and where it can the sequences that went in or the tensor that came out.
#ifndef ACCO_PROGRAM_SPIKE_REPORT_H
#define ACCO_PROGRAM_SPIKE_REPORT_H

#include "program/report.h"

enum { SPIKE_TEXT_SIZE = 600 };

// The number, in the order of training, of the first sequence of a rank's micro-batch.
static inline int64_t spike_first_sequence(const Run *run, int rank, double micro_batch) {
    return (run->checkpointed.data_base + (int64_t)micro_batch * run->transport.size + rank) * run->B;
}

// The tensor to which an element of the flat parameter vector belongs.
static inline const ParameterInfo *spike_tensor(const Run *run, size_t element) {
    int i = run->table.count - 1;
    while (i > 0 && run->table.entries[i].offset > element) { i--; }
    return &run->table.entries[i];
}

static inline void spike_describe_loss(const Run *run, const SpikeReport *spike, char *text, size_t size) {
    size_t used = (size_t)snprintf(text, size, "the loss of rank %d is not a finite number", spike->rank);
    // Where it was handed over before the run was resumed, nobody knows which micro-batch
    // it was.
    if (spike->site.micro_batch == 0) { return; }
    double micro_batch = spike->site.micro_batch - 1;
    uint64_t first = (uint64_t)spike_first_sequence(run, spike->rank, micro_batch), token;
    used += (size_t)snprintf(
        text + used, size - used,
        " in its micro-batch %.0f (of %d sequence%s, the first is number %llu in the order of training",
        micro_batch, run->B, run->B == 1 ? "" : "s", (unsigned long long)first);
    if (!run->data.builtin) {
        const DataFile *file = data_loader_find(&run->data, data_loader_window(&run->data, first), &token);
        used += (size_t)snprintf(text + used, size - used, ": %.200s from token %llu", file->path,
                                 (unsigned long long)token);
    }
    snprintf(text + used, size - used, ")");
}

static inline void spike_describe_gradient(const Run *run, const SpikeReport *spike, char *text,
                                           size_t size) {
    if (spike->rank < 0) {
        snprintf(text, size, "the sum of the gradients is not finite although those of every rank are");
        return;
    }
    size_t element = (size_t)spike->site.element - 1;
    const ParameterInfo *tensor = spike_tensor(run, element);
    size_t within = element - tensor->offset, columns = tensor->columns > 0 ? (size_t)tensor->columns : 1;
    char column[32] = "";
    if (tensor->columns > 0) { snprintf(column, sizeof column, ", %zu", within % columns); }
    snprintf(text, size,
             "the gradient of rank %d is not finite although its loss is; the backward pass met it first in "
             "%s[%zu%s]",
             spike->rank, tensor->name, within / columns, column);
}

static inline void spike_describe(const Run *run, const SpikeReport *spike, char *text, size_t size) {
    bool high_loss = spike->kind == SPIKE_HIGH_LOSS;
    if (spike->kind == SPIKE_LOSS) {
        spike_describe_loss(run, spike, text, size);
    } else if (spike->kind == SPIKE_GRADIENT) {
        spike_describe_gradient(run, spike, text, size);
    } else if (spike->kind == SPIKE_PARAMETERS) {
        snprintf(text, size,
                 "the parameters of rank %d are useless: they, or %d gradients in a row, are not finite or "
                 "too large",
                 spike->rank, SPIKE_PATIENCE);
    } else if (run->rule->kind == RULE_LOCAL) {
        snprintf(text, size, "%s of rank %d is far larger than those before it",
                 high_loss ? "a loss" : "a gradient", spike->rank);
    } else {
        snprintf(
            text, size,
            "%s is %.3g, and at most %.3g was expected after those before it; that of rank %d is the largest",
            high_loss ? "the loss" : "the gradient's norm", spike->measured, spike->largest, spike->rank);
    }
}

static inline void log_spike(Run *run, const SpikeReport *spike, const char *text) {
    static const char *const kinds[] = {"none", "loss", "gradient", "norm", "high loss", "parameters"};
    json_t *first = json_null(), *sequences = json_null(), *tensor = json_null();
    if (spike->site.micro_batch > 0) {
        first = json_integer((json_int_t)spike_first_sequence(run, spike->rank, spike->site.micro_batch - 1));
        sequences = json_integer(run->B);
    }
    if (spike->site.element > 0 && spike->kind == SPIKE_GRADIENT) {
        tensor = json_string(spike_tensor(run, (size_t)spike->site.element - 1)->name);
    }
    report_event(run, json_pack("{s:s, s:s, s:I, s:i, s:o, s:o, s:o, s:o, s:o, s:o, s:s, s:o, s:o}", "event",
                                "spike", "kind", kinds[spike->kind], "commit", (json_int_t)spike->commit,
                                "rank", spike->rank, "first_sequence", first, "sequences", sequences,
                                "tensor", tensor, "measured", log_real(spike->measured), "largest",
                                log_real(spike->largest), "steps", log_real(spike->steps), "action",
                                run->scheduler.spikes.failed
                                    ? "stop"
                                    : options_choice_name(&run->options, &run->options.on_spike),
                                "text", log_text(text), "count", log_real(run->scheduler.spikes.count)));
}

// Reports the spikes since the last call. The end of the run is announced by fail_spike,
// a rollback by roll_back.
static inline void report_spike(Run *run) {
    const Scheduler *s = &run->scheduler;
    char text[SPIKE_TEXT_SIZE];
    bool is_new = s->spikes.count > run->seen.spikes;
    run->seen.spikes = s->spikes.count;
    if (!is_new || !run_is_main(run)) { return; }
    terminal_clear(&run->terminal);
    spike_describe(run, &s->spikes.latest, text, sizeof text);
    log_spike(run, &s->spikes.latest, text);
    if (s->spikes.failed) { return; }
    printf("%6lld spike: %s", (long long)s->spikes.latest.commit, text);
    if (s->settings.on_spike == SPIKE_SKIP) {
        printf("; left out%s, %.0f so far", s->spikes.latest.steps > 1 ? " with others" : "",
               s->spikes.count);
    }
    printf("\n");
    fflush(stdout);
}

// Says why the run ends. All ranks know of the spike and nothing was updated with it, so
// the job ends in order.
static inline void fail_spike(Run *run) {
    const Scheduler *s = &run->scheduler;
    char text[SPIKE_TEXT_SIZE], tried[96] = "";
    if (!run_is_main(run)) { return; }
    terminal_clear(&run->terminal);
    Error error = {""}; // the message below matters more than a log that cannot be written
    log_event(&run->log,
              json_pack("{s:s, s:s, s:I}", "event", "end", "reason", "spike", "commit",
                        (json_int_t)s->optimizer.commits),
              &error);
    SpikePolicy policy = s->settings.on_spike;
    if (policy == SPIKE_SKIP && s->spikes.in_a_row >= SPIKE_PATIENCE) {
        snprintf(tried, sizeof tried, "%d in a row were left out; ", SPIKE_PATIENCE);
    } else if (policy == SPIKE_ROLLBACK && run->rollback_commit < 0) {
        snprintf(tried, sizeof tried, "there is no checkpoint to go back to; ");
    } else if (policy == SPIKE_ROLLBACK) {
        snprintf(tried, sizeof tried, "going back to %s %lld %d times did not help; ", step_name(run),
                 (long long)run->rollback_commit, ROLLBACK_PATIENCE);
    }
    spike_describe(run, &s->spikes.latest, text, sizeof text);
    fprintf(stderr,
            "train_gpt: after %s %lld %s; %snothing was updated with it: lower --lr or --grad-clip, look at "
            "these data%s\n",
            step_name(run), (long long)s->spikes.latest.commit, text, tried,
            policy == SPIKE_STOP ? ", or go on with --on-spike skip" : "");
}

#endif
