// wait.h: how the host waits for the streams.
#pragma once

#include "scheduler/state.h"

// Grows whenever one of the streams makes progress.
static inline uint64_t scheduler_progress(Scheduler *s) {
    return __atomic_load_n(&s->micro_batches_begun, __ATOMIC_RELAXED) +
           __atomic_load_n(&s->transport->bytes_sent, __ATOMIC_RELAXED);
}

// Waits for an event. The transport's own deadline comes first and says more; this one
// catches a program in which nothing moves at all.
static inline void scheduler_wait_event(Scheduler *s, const Event *event) {
    double patience = 10 * s->transport->timeout_seconds + 3600;
    uint64_t seen;
    do {
        seen = scheduler_progress(s);
        if (event_wait(event, patience)) { return; }
    } while (scheduler_progress(s) != seen);
    transport_fail(s->transport, "nothing has moved for %.0f s while waiting for the %s stream", patience,
                   event->stream->name);
}

// Waits until the whole of s->parameters has arrived.
static inline void scheduler_settle(Scheduler *s) { scheduler_wait_event(s, &s->communicated); }

// Runs a task on a stream, behind what is queued there, and waits for it (H3, H4).
static inline void scheduler_call(Scheduler *s, Stream *stream, StreamTask task, void *context) {
    Event *event = stream == s->compute ? &s->computed : &s->communicated;
    stream_run(stream, task, context);
    event_record(event, stream);
    scheduler_wait_event(s, event);
}
