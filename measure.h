// measure.h: how long a micro-batch and an exchange take, measured on the run itself
// before training: its own model and data, ranks and link.
//
// For choices that a rule leaves to a measurement (Rule::measure). Both are measured
// beside each other, as training runs them, because they share cores, memory and, on a
// GPU, multiprocessors. Nothing is trained: gradients are dropped, parameters, optimizer
// and the position in the data stay as they are.
#ifndef ACCO_MEASURE_H
#define ACCO_MEASURE_H

#include "scheduler.h"

// An exchange is long enough to be measured after so many seconds; of a longer one only a
// part is sent.
#define MEASURE_SECONDS 0.2

typedef struct MeasuredRound {
    double exchange;    // seconds of the reduce-scatter and the all-gather of a job; of the slowest rank
    double micro_batch; // seconds of one beside it; of this rank
} MeasuredRound;

typedef struct MeasureWork {
    Scheduler *scheduler;
    WireFormat wire;
    size_t cells;                             // of the layout, from its start
    double exchange_seconds, compute_seconds; // out; the latter adds up
} MeasureWork;

// Communication stream. What it leaves in the communication buffer is of no use.
static inline void measure_exchange_task(void *context, Stream *stream) {
    MeasureWork *work = (MeasureWork *)context;
    Scheduler *s = work->scheduler;
    Collective collective = {&s->layout, work->wire, s->comm_buffer.data, NULL,
                             wire_is_coarse(work->wire) ? s->parameters.data : NULL};
    size_t end = work->cells * s->layout.piece;
    double began = clock_seconds();
    comm_reduce_scatter(&s->comm, stream, &collective, 0, end);
    comm_all_gather(&s->comm, stream, &collective, 0, end);
    stream_settle(stream);
    work->exchange_seconds = clock_seconds() - began;
}

// Compute stream. The micro-batch is the first of training, which will compute it again.
static inline void measure_micro_batch_task(void *context, Stream *stream) {
    MeasureWork *work = (MeasureWork *)context;
    Scheduler *s = work->scheduler;
    Pace pace = {s, s->parameters_version, scheduler_need, scheduler_finish};
    double began = clock_seconds();
    s->problem.micro_batch(s->problem.self, stream, s->micro_batches_begun, s->parameters.data,
                           s->gradients.data, &pace);
    stream_settle(stream);
    work->compute_seconds += clock_seconds() - began;
}

// All ranks: seconds of the exchange of the first `cells` cells, on the slowest rank.
static inline double measure_part(Scheduler *s, MeasureWork *work, size_t cells) {
    work->cells = cells;
    scheduler_call(s, s->communication, measure_exchange_task, work);
    double slowest = 0, *all = (double *)transport_collect_records(s->transport, "measuring the link",
                                                                   &work->exchange_seconds, sizeof(double));
    for (int rank = 0; rank < s->transport->size; rank++) { slowest = fmax(slowest, all[rank]); }
    free(all);
    return slowest;
}

// All ranks, between two commits of an overlapped rule and with nothing handed over: the
// times of a round whose job uses this wire. Both streams; the host waits.
static inline MeasuredRound measure_round(Scheduler *s, WireFormat wire) {
    MeasureWork work = {s, wire, 0, 0, 0};
    MeasuredRound measured = {0, 0};
    size_t all = s->layout.cells, cells = 1;
    assert(s->settings.kind == RULE_OVERLAPPED && !s->job_in_flight && !is_handed_over(s));
    scheduler_call(s, s->compute, measure_micro_batch_task, &work); // warms up, and leaves gradients to send
    scheduler_move_gradients(s, s->comm_buffer.data, false);
    while (measure_part(s, &work, cells) < MEASURE_SECONDS && cells < all) {
        cells = size_min(4 * cells, all);
    }
    // The same part once more, beside computation.
    int micro_batches = 0;
    work.compute_seconds = 0;
    stream_run(s->communication, measure_exchange_task, &work);
    event_record(s->communicated, s->communication);
    do {
        scheduler_call(s, s->compute, measure_micro_batch_task, &work);
        micro_batches++;
    } while (!event_query(s->communicated));
    measured.micro_batch = work.compute_seconds / micro_batches;
    double *seconds = (double *)transport_collect_records(s->transport, "measuring the link",
                                                          &work.exchange_seconds, sizeof(double));
    for (int rank = 0; rank < s->transport->size; rank++) {
        measured.exchange = fmax(measured.exchange, seconds[rank] * (double)all / (double)cells);
    }
    free(seconds);
    scheduler_move_gradients(s, NULL, true);
    return measured;
}

#endif
