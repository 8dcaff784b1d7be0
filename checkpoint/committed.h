// committed.h: the committed parameters, lent to all ranks together between two commits, to be
// evaluated, saved or compared, and given back with return_committed.
//
// Compute may hold something else: a prediction, casts, or with local rules the parameters of one
// worker. Then the master copies of all ranks are gathered: exact ones into the gradient
// accumulator, casts into the second buffer of casts (arriving_casts).
#pragma once

#include "scheduler.h"
#include "scheduler/rule.h"

// Whether compute uses a prediction from the committed parameters.
static inline bool rule_is_ahead(const Rule *rule, const Scheduler *s) {
    return rule->predicts && is_handed_over(s);
}

typedef struct MasterGather {
    Scheduler *scheduler;
    Real *casts; // (padded); NULL: exact parameters into the gradient accumulator
} MasterGather;

static inline void gather_masters_task(void *context, Stream *stream) {
    const MasterGather *work = (const MasterGather *)context;
    Scheduler *s = work->scheduler;
    Collective collective = {.layout = &s->layout,
                             .end = s->layout.cells,
                             .wire = WIRE_FP32,
                             .buffer = s->gradients.data,
                             .source = s->optimizer.master};
    if (work->casts != NULL) {
        comm_gather_casts(&s->comm, stream, &collective, work->casts, false);
    } else {
        comm_exchange(&s->comm, stream, &collective, ALL_GATHER);
    }
}

// The parameters (parameter_count), the same bits on every rank: exact floats, or as a
// micro-batch computes with them (scheduler_weights).
static inline const void *borrow_committed(Scheduler *s, const Rule *rule, bool exact) {
    scheduler_settle(s);
    if (rule->kind == RULE_LOCAL) { return s->local.outer; }
    if (!rule_is_ahead(rule, s) && !(exact && s->settings.gathers_casts)) { return scheduler_weights(s); }
    Real *casts = exact || !s->settings.keeps_casts ? NULL : s->arriving_casts;
    MasterGather work = {.scheduler = s, .casts = casts};
    scheduler_call(s, s->communication, gather_masters_task, &work);
    return casts != NULL ? (const void *)casts : s->gradients.data;
}

// Between two commits the accumulator holds nothing, or what was handed over and is to be added
// to (hand_over).
static inline void return_committed(Scheduler *s, const void *committed) {
    if (committed != s->gradients.data || s->gradients.tally.micro_batches == 0) { return; }
    assert(is_handed_over(s));
    size_t bytes = layout_padded(&s->layout) * sizeof(float);
    stream_copy(s->compute, s->gradients.data, s->comm_buffer.data, bytes);
    stream_settle(s->compute);
}
