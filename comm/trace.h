// trace.h: what the compute stream and the communication stream of a rank did, and when.
//
// A task calls trace_begin when it starts and trace_end when it is done, each stream in a
// lane of its own. Two readers:
//
//   reports        trace_take: seconds of compute, of communication, and of exposed
//                  communication since the report before. Always on.
//   --trace FILE   trace_write: every span of every rank as Chrome trace JSON. Spans are
//                  kept in memory until then.
//
// In the CUDA program a span is also a range of NVTX, which profilers show under its name.
//
// Exposed communication is the time in which communication ran and compute did not: what
// overlapping failed to hide.
//
//   compute         ####....####
//   communication   ..######....     6 of communication, 4 of them exposed
//
// The sums need no list of spans. Every begin, end and take adds the time since the one
// before to the sums of the lanes that were running. So all sums are exact, a span that is
// under way at a take is divided there, and nothing is counted twice. The clock is read while
// the mutex is held: otherwise the two threads could report their times in the wrong order.
//
// Each rank has a monotonic clock with a start of its own. Its offset to the clock of
// rank 0 is measured at the start and at the end of a run, which also shows how fast the
// two drift apart. Spans in between are moved along the line through both.
#ifndef ACCO_COMM_TRACE_H
#define ACCO_COMM_TRACE_H

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/stat.h>

#include "comm/transport.h"
#include "runtime/files.h"

enum {
    TRACE_MAX_SPANS = 2000000, // kept for the file: 80 MB; later ones are only counted
    TRACE_PIECE_BYTES = 65536, // of text that a rank sends to rank 0 at a time
    TRACE_EVENT_BYTES = 512,   // more than any line of the file has
    TRACE_CLOCK_ROUNDS = 16    // of a measurement: with many, one of them is undisturbed
};

// The name of spans in which a micro-batch is computed. A micro-batch may take several spans,
// because it may wait for parameters in between.
#define TRACE_MICRO_BATCH "micro-batch"

typedef enum TraceLane { TRACE_COMPUTE, TRACE_COMMUNICATION, TRACE_LANES } TraceLane;

typedef struct Span {
    const char *name;
    double began, ended; // clock_seconds()
    int64_t commit;
    TraceLane lane;
} Span;

typedef struct TraceSums {
    double compute_seconds, communication_seconds, exposed_seconds;
    // Only of spans that have ended. The CPU time is that of the stream's own thread: less than
    // the span if the thread waited, for messages or for a core.
    double micro_batch_seconds, micro_batch_cpu_seconds;
} TraceSums;

typedef struct Trace {
    pthread_mutex_t mutex;
    bool running[TRACE_LANES];
    double began[TRACE_LANES];      // of the span that is running
    const char *names[TRACE_LANES]; // its name
    double cpu_began[TRACE_LANES];  // thread_cpu_seconds() when it began
    double counted_until;           // `sums` holds everything before this time
    TraceSums sums;                 // since the latest take
    bool keep;
    Span *spans; // (span_capacity)
    size_t span_count, span_capacity;
    int64_t dropped;
} Trace;

// ---------------------------------------------------------------------------------------
// Spans and sums

// keep: spans are kept for trace_write. The trace must stay where it is while threads use
// it.
static inline void trace_open(Trace *trace, bool keep) {
    memset(trace, 0, sizeof *trace);
    pthread_mutex_init(&trace->mutex, NULL);
    trace->keep = keep;
}

static inline void trace_close(Trace *trace) {
    free(trace->spans);
    trace->spans = NULL;
    pthread_mutex_destroy(&trace->mutex);
}

// Adds the time since the last call to the sums of what has been running since then.
static inline void trace_count_until(Trace *trace, double now) {
    double seconds = now - trace->counted_until;
    bool computes = trace->running[TRACE_COMPUTE], communicates = trace->running[TRACE_COMMUNICATION];
    assert(seconds >= 0);
    if (computes) { trace->sums.compute_seconds += seconds; }
    if (communicates) { trace->sums.communication_seconds += seconds; }
    if (communicates && !computes) { trace->sums.exposed_seconds += seconds; }
    trace->counted_until = now;
}

// The following three do the work at a given time. Their caller holds the mutex, and times may
// not go back.
static inline void trace_begin_at(Trace *trace, TraceLane lane, const char *name, double now) {
    assert(!trace->running[lane]);
    trace_count_until(trace, now);
    trace->running[lane] = true;
    trace->began[lane] = now;
    trace->names[lane] = name;
    trace->cpu_began[lane] = thread_cpu_seconds();
}

static inline void trace_end_at(Trace *trace, TraceLane lane, int64_t commit, double now) {
    assert(trace->running[lane]);
    trace_count_until(trace, now);
    trace->running[lane] = false;
    Span span = {.name = trace->names[lane],
                 .began = trace->began[lane],
                 .ended = now,
                 .commit = commit,
                 .lane = lane};
    bool of_micro_batch = strcmp(span.name, TRACE_MICRO_BATCH) == 0;
    double cpu = thread_cpu_seconds() - trace->cpu_began[lane];
    trace->sums.micro_batch_seconds += of_micro_batch ? span.ended - span.began : 0;
    trace->sums.micro_batch_cpu_seconds += of_micro_batch ? cpu : 0;
    if (!trace->keep) { return; }
    if (trace->span_count == trace->span_capacity && trace->span_capacity < TRACE_MAX_SPANS) {
        size_t capacity = size_min(size_max(4096, 2 * trace->span_capacity), TRACE_MAX_SPANS);
        Span *grown = (Span *)realloc(trace->spans, capacity * sizeof *grown);
        trace->spans = grown != NULL ? grown : trace->spans;
        trace->span_capacity = grown != NULL ? capacity : trace->span_capacity;
    }
    if (trace->span_count < trace->span_capacity) {
        trace->spans[trace->span_count++] = span;
    } else {
        trace->dropped++;
    }
}

static inline TraceSums trace_take_at(Trace *trace, double now) {
    TraceSums none;
    memset(&none, 0, sizeof none);
    trace_count_until(trace, now);
    TraceSums sums = trace->sums;
    trace->sums = none;
    return sums;
}

// A span of `lane` begins. Spans of one lane do not overlap, and end on the thread that
// began them. name: a literal of plain letters, because it goes into JSON as it is.
static inline void trace_begin(Trace *trace, TraceLane lane, const char *name) {
    gpu_range_begin(name);
    pthread_mutex_lock(&trace->mutex);
    trace_begin_at(trace, lane, name, clock_seconds());
    pthread_mutex_unlock(&trace->mutex);
}

// The span of `lane` that is running ends; it belongs to `commit`.
static inline void trace_end(Trace *trace, TraceLane lane, int64_t commit) {
    pthread_mutex_lock(&trace->mutex);
    trace_end_at(trace, lane, commit, clock_seconds());
    pthread_mutex_unlock(&trace->mutex);
    gpu_range_end();
}

// The sums since the previous take.
static inline TraceSums trace_take(Trace *trace) {
    pthread_mutex_lock(&trace->mutex);
    TraceSums sums = trace_take_at(trace, clock_seconds());
    pthread_mutex_unlock(&trace->mutex);
    return sums;
}

// ---------------------------------------------------------------------------------------
// Clocks

// How far the clock of rank 0 is from this rank's clock.
typedef struct ClockOffset {
    double time;    // this rank's clock when it was measured
    double seconds; // to be added to this rank's clock to get that of rank 0
    double error;   // the true value is at most this far away
} ClockOffset;

// All ranks call it together. clock: clock_seconds, except in tests.
//
// A round is a barrier and an all-gather. This rank reads its clock before the barrier (sent)
// and after the all-gather (received). Rank 0 reads its own in between (stamp) and sends it.
// It did so after a message arrived that this rank sent after `sent`, and before it sent one
// that this rank had at `received`. So on this rank's clock the stamp was read between the
// two, and the offset lies between stamp - received and stamp - sent. This holds for all
// rounds: the answer is the middle of what their intervals have in common, and its error is at
// most half of the shortest round trip. All ranks send at once and wait for the slowest, which
// makes rounds longer but not wrong.
static inline ClockOffset trace_measure_clock(Transport *transport, double (*clock)(void)) {
    double received = 0, low = -INFINITY, high = INFINITY;
    for (int round = 0; round < TRACE_CLOCK_ROUNDS; round++) {
        double sent = clock();
        transport_barrier(transport, "clock measurement");
        double stamp = clock();
        double *stamps =
            (double *)transport_collect_records(transport, "clock measurement", &stamp, sizeof stamp);
        received = clock();
        low = fmax(low, stamps[0] - received);
        high = fmin(high, stamps[0] - sent);
        free(stamps);
    }
    ClockOffset offset = {
        .time = received, .seconds = low + (high - low) / 2, .error = fmax((high - low) / 2, 0)};
    if (transport->rank == 0) { offset.seconds = offset.error = 0; }
    return offset;
}

// Translates a time of this rank's clock to that of rank 0. Outside the two measurements the
// nearer one is used.
static inline double clock_on_rank_0(const ClockOffset *start, const ClockOffset *end, double time) {
    double between = end->time - start->time;
    double share = between > 0 ? fmin(fmax((time - start->time) / between, 0), 1) : 0;
    return time + start->seconds + share * (end->seconds - start->seconds);
}

// ---------------------------------------------------------------------------------------
// Text: each rank writes its own events, piece by piece, one per line

typedef struct TracePiece {
    int64_t bytes; // of text; 0: this rank has no more
    char text[TRACE_PIECE_BYTES];
} TracePiece;

// A rank's text, and how much of it has been written.
typedef struct TraceText {
    const Trace *trace;
    const Transport *transport;
    const ClockOffset *start, *end;
    double origin;  // what the file calls 0, on the clock of rank 0
    bool has_names; // the events that name the rank and its lanes have been written
    size_t next_span;
} TraceText;

// Adds one event, with the comma before it.
PRINTF_LIKE(2, 3) static inline void trace_piece_add(TracePiece *piece, const char *format, ...) {
    char *place = piece->text + piece->bytes;
    va_list arguments;
    va_start(arguments, format);
    memcpy(place, ",\n", 2);
    int length = vsnprintf(place + 2, TRACE_EVENT_BYTES - 2, format, arguments);
    va_end(arguments);
    assert(length < TRACE_EVENT_BYTES - 2);
    piece->bytes += 2 + length;
}

static inline void trace_piece_add_label(TracePiece *piece, int rank, int lane, const char *kind,
                                         const char *key, const char *value) {
    trace_piece_add(piece, "{\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"name\":\"%s\",\"args\":{\"%s\":\"%s\"}}",
                    rank, lane, kind, key, value);
}

// What viewers call the rank and its lanes, and where they show it.
static inline void trace_piece_add_names(TracePiece *piece, const Trace *trace, const Transport *transport) {
    int rank = transport->rank;
    char name[96], labels[64];
    snprintf(name, sizeof name, "rank %d on %s", rank, transport->host);
    for (char *c = name; *c != '\0'; c++) {
        if (*c < 32 || *c == 127 || *c == '"' || *c == '\\') { *c = '?'; } // a host name may be anything
    }
    trace_piece_add_label(piece, rank, 0, "process_name", "name", name);
    trace_piece_add(
        piece,
        "{\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"name\":\"process_sort_index\",\"args\":{\"sort_index\":%d}}",
        rank, rank);
    trace_piece_add_label(piece, rank, TRACE_COMPUTE, "thread_name", "name", "compute");
    trace_piece_add_label(piece, rank, TRACE_COMMUNICATION, "thread_name", "name", "communication");
    if (trace->dropped > 0) {
        snprintf(labels, sizeof labels, "%lld spans dropped", (long long)trace->dropped);
        trace_piece_add_label(piece, rank, 0, "process_labels", "labels", labels);
    }
}

// Fills the piece with the next events. Both ends of a span are rounded to nanoseconds, not
// its duration: so spans that touch do not overlap in the file.
static inline void trace_text_fill(TraceText *text, TracePiece *piece) {
    piece->bytes = 0;
    if (!text->has_names) { trace_piece_add_names(piece, text->trace, text->transport); }
    text->has_names = true;
    for (; text->next_span < text->trace->span_count; text->next_span++) {
        if (piece->bytes + TRACE_EVENT_BYTES > TRACE_PIECE_BYTES) { return; }
        const Span *span = &text->trace->spans[text->next_span];
        double from = clock_on_rank_0(text->start, text->end, span->began) - text->origin;
        double to = clock_on_rank_0(text->start, text->end, span->ended) - text->origin;
        long long began = llround(from * 1e9), ended = llround(to * 1e9);
        long long duration = ended > began ? ended - began : 0;
        trace_piece_add(piece,
                        "{\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"name\":\"%s\",\"ts\":%lld.%03lld,"
                        "\"dur\":%lld.%03lld,\"args\":{\"commit\":%lld}}",
                        text->transport->rank, (int)span->lane, span->name, began / 1000, began % 1000,
                        duration / 1000, duration % 1000, (long long)span->commit);
    }
}

// ---------------------------------------------------------------------------------------
// The file

// Whether a trace can be written there, asked before hours of training. What is not a plain
// file is refused, because a file that is renamed to /dev/null replaces it.
static inline bool trace_path_check(const char *path, Error *error) {
    char temporary[PATH_MAX];
    struct stat status;
    if (strlen(path) + sizeof ".new" > PATH_MAX) {
        return error_set(error, "--trace %.200s...: the name is too long", path);
    }
    if (stat(path, &status) == 0 && !S_ISREG(status.st_mode)) {
        const char *kind = S_ISDIR(status.st_mode) ? "a directory" : "not a plain file";
        return error_set(error, "--trace %.400s is %s: give the name of a file", path, kind);
    }
    FILE *file = file_replace_begin(path, error);
    if (file == NULL) {
        return error_set(error, "cannot write the trace %.400s: %s: choose another file", path,
                         strerror(errno));
    }
    fclose(file);
    file_replacement_path(temporary, path);
    unlink(temporary);
    return true;
}

// Rank 0 receives one piece of every rank at a time and writes it, so it never holds more
// than one piece of each. If it cannot write, it receives all the same, because the others
// send. On failure a file that had the name before is still there.
static inline void trace_write_file(TraceText *text, Transport *transport, const char *path, Error *error) {
    const Lane lane = {BETWEEN_HOSTS, 0};
    TracePiece *pieces = (TracePiece *)calloc((size_t)transport->size, sizeof(TracePiece));
    if (pieces == NULL) { transport_fail(transport, "no memory to gather the trace"); }
    for (int rank = 0; rank < transport->size; rank++) { pieces[rank].bytes = 1; } // not at its end
    FILE *file = trace_path_check(path, error) ? file_replace_begin(path, error) : NULL;
    if (file != NULL) { fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[", file); } // into its buffer
    int reason = 0;   // errno of the first write that failed
    size_t comma = 1; // the first event of the file has none before it
    for (bool more = true; more;) {
        if (pieces[0].bytes > 0) { trace_text_fill(text, &pieces[0]); }
        for (int rank = 1; rank < transport->size; rank++) {
            if (pieces[rank].bytes == 0) { continue; }
            transport_post(transport, lane, false, rank, &pieces[rank], sizeof(TracePiece));
        }
        transport_wait(transport, lane);
        more = false;
        for (int rank = 0; rank < transport->size; rank++) {
            size_t bytes = (size_t)pieces[rank].bytes;
            if (bytes == 0) { continue; }
            bool tries = file != NULL && reason == 0;
            if (tries && fwrite(pieces[rank].text + comma, bytes - comma, 1, file) != 1) { reason = errno; }
            comma = 0;
            more = true;
        }
    }
    free(pieces);
    if (file == NULL) { return; }
    if (reason == 0 && fputs("\n]}\n", file) < 0) { reason = errno; }
    errno = reason;
    file_replace_end(file, path, reason == 0, error);
}

// Writes the spans of all ranks to `path`, which only rank 0 uses. All ranks call it when no
// span is running, each with its own two measurements of the clock. All get the same result
// and the same error. ts in the file: microseconds since the earliest span of all ranks.
static inline bool trace_write(const Trace *trace, Transport *transport, const ClockOffset *start,
                               const ClockOffset *end, const char *path, Error *error) {
    const Lane lane = {BETWEEN_HOSTS, 0};
    TraceText text = {.trace = trace, .transport = transport, .start = start, .end = end, .origin = INFINITY};
    for (size_t i = 0; i < trace->span_count; i++) {
        text.origin = fmin(text.origin, clock_on_rank_0(start, end, trace->spans[i].began));
    }
    double *origins =
        (double *)transport_collect_records(transport, "start of the trace", &text.origin, sizeof(double));
    for (int rank = 0; rank < transport->size; rank++) { text.origin = fmin(text.origin, origins[rank]); }
    free(origins);
    transport_begin(transport, "gathering of the trace");
    TracePiece *piece = (TracePiece *)calloc(1, sizeof *piece);
    if (piece == NULL) { transport_fail(transport, "no memory to gather the trace"); }
    if (transport->rank == 0) { trace_write_file(&text, transport, path, error); }
    for (bool more = transport->rank != 0; more; more = piece->bytes > 0) {
        trace_text_fill(&text, piece);
        transport_post(transport, lane, true, 0, piece, sizeof *piece);
        transport_wait(transport, lane);
    }
    free(piece);
    Error *errors = (Error *)transport_collect_records(transport, "end of the trace", error, sizeof *error);
    *error = errors[0];
    free(errors);
    return !error_is_set(error);
}

#endif
