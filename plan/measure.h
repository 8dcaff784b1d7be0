// measure.h: how long a micro-batch and an exchange take, measured on the run itself before
// training: its own model and data, ranks and link. plan/choose.h chooses by these numbers.
//
// Both are measured at the same time, because they share cores and memory. The exchange is the
// reduce-scatter and the all-gather of a job. Nothing is trained: gradients are dropped.
#pragma once

#include "scheduler.h"

enum { MEASURE_REPEATS = 3 }; // the median counts

// Seconds that are long enough to be measured. Only a part of a longer exchange is sent.
#define MEASURE_SECONDS 0.2

typedef struct MeasuredRound {
    Scheduler *scheduler;
    WireFormat wire;
    size_t cells; // how many of the layout's are exchanged
    // Seconds. While it is measured: of these cells on the slowest rank, and of all micro-batches.
    // As a result: of a whole exchange, and of one micro-batch on this rank while it lasts.
    double exchange, micro_batch;
    int micro_batches;
} MeasuredRound;

// Communication stream. The ranks begin together, so that no rank's wait for another is
// counted. The communication buffer holds nothing of use afterwards.
static inline void measure_exchange_task(void *context, Stream *stream) {
    MeasuredRound *round = (MeasuredRound *)context;
    Scheduler *s = round->scheduler;
    Collective collective = {.layout = &s->layout,
                             .end = round->cells,
                             .wire = round->wire,
                             .buffer = s->comm_buffer.data,
                             .base = wire_is_coarse(round->wire) ? s->parameters.data : NULL},
               gather = collective;
    gather.wire = job_gather_wire(s, round->wire);
    double seconds[MEASURE_REPEATS];
    for (int i = 0; i < MEASURE_REPEATS; i++) {
        transport_barrier(s->transport, "measuring"); // a rank that waited long wakes up late:
        transport_barrier(s->transport, "measuring"); // after the second one all are awake
        double began = clock_seconds();
        comm_exchange(&s->comm, stream, &collective, REDUCE_SCATTER);
        comm_exchange(&s->comm, stream, &gather, ALL_GATHER);
        stream_settle(stream);
        seconds[i] = clock_seconds() - began;
    }
    round->exchange = transport_fold(s->transport, "measuring", median_of(seconds, MEASURE_REPEATS), fmax);
}

// Compute stream. The micro-batch is training's next one, which computes it again.
static inline void measure_micro_batch_task(void *context, Stream *stream) {
    MeasuredRound *round = (MeasuredRound *)context;
    Scheduler *s = round->scheduler;
    double began = clock_seconds();
    scheduler_micro_batch(s, stream, s->micro_batches_begun, true);
    stream_settle(stream);
    round->micro_batch += clock_seconds() - began;
    round->micro_batches++;
}

// All ranks, before the training of an overlapped rule begins: the times of a round whose job uses
// this wire. Both streams; the host waits.
static inline MeasuredRound measure_round(Scheduler *s, WireFormat wire) {
    MeasuredRound round = {.scheduler = s, .wire = wire, .cells = 1};
    size_t all = s->layout.cells;
    assert(s->settings.kind == RULE_OVERLAPPED && !s->job_in_flight && !is_handed_over(s));
    scheduler_call(s, s->compute, measure_micro_batch_task, &round); // warms up, and makes gradients to send
    scheduler_call(s, s->compute, boundary_task, s);
    for (;; round.cells = size_min(4 * round.cells, all)) {
        scheduler_call(s, s->communication, measure_exchange_task, &round);
        if (round.exchange >= MEASURE_SECONDS || round.cells == all) { break; }
    }
    // The same part once more, overlapped with computation.
    round.micro_batch = round.micro_batches = 0;
    stream_run(s->communication, measure_exchange_task, &round);
    event_record(&s->communicated, s->communication);
    do {
        scheduler_call(s, s->compute, measure_micro_batch_task, &round);
    } while (!event_query(&s->communicated));
    round.exchange = round.exchange * all / round.cells;
    round.micro_batch /= round.micro_batches;
    return round;
}
