// trace.h: what the compute stream and the communication stream of a rank did, and when.
//
// A task calls trace_begin and trace_end, each stream in a lane of its own. Two readers:
//
//   reports        trace_take: seconds of compute, of communication, and of exposed
//                  communication since the report before. Always on.
//   --trace FILE   trace_write: every span of every rank as Chrome trace JSON. Spans are
//                  kept in memory until then.
//
// In the CUDA program a span is also a range of NVTX, which profilers show under its name.
// Exposed communication, which overlapping failed to hide, runs while compute does not:
//
//   compute         ####....####
//   communication   ..######....     6 of communication, 4 of them exposed
//
// The sums need no list of spans: every begin, end and take adds the time since the one before to
// the sums of the lanes that were running. The clock is read while the mutex is held, so that the
// two threads report their times in order.
//
// Each rank's clock has its own start. Its offset to rank 0's clock is measured at the start and at
// the end of a run; spans in between are moved along the line through both.
#pragma once

#include "comm/transport.h"
#include "runtime/files.h"

enum {
    TRACE_MAX_SPANS = 2000000, // kept for the file: 96 MB; later ones are only counted
    TRACE_PIECE = 1024,        // spans that a rank sends to rank 0 at a time
    TRACE_CLOCK_ROUNDS = 16    // of a measurement: with many, one of them is undisturbed
};

// A micro-batch may take several such spans, because it may wait for parameters.
#define TRACE_MICRO_BATCH "micro-batch"

typedef enum TraceLane { TRACE_COMPUTE, TRACE_COMMUNICATION, TRACE_LANES } TraceLane;

typedef struct Span {
    double began, ended; // clock_seconds()
    int64_t commit;
    TraceLane lane;
    char name[20];
} Span;

// Seconds.
typedef struct TraceSums {
    double compute, communication, exposed;
    // Of spans that have ended. The CPU time is less if the thread waited, for messages or a core.
    double micro_batch, micro_batch_cpu;
} TraceSums;

typedef struct Trace {
    pthread_mutex_t mutex;
    double (*clock)(void); // clock_seconds, except in tests
    bool running[TRACE_LANES];
    Span current[TRACE_LANES];     // the span that is running
    double cpu_began[TRACE_LANES]; // thread_cpu_seconds() when it began
    double counted_until;          // `sums` holds everything before this time
    TraceSums sums;                // since the latest take
    Span *spans;                   // (TRACE_MAX_SPANS) if they are kept
    size_t span_count;
    int64_t dropped;
} Trace;

// ---- Spans and sums -------------------------------------------------------------------

// keep: for trace_write. The trace must stay where it is while threads use it.
static inline void trace_open(Trace *trace, bool keep) {
    memset(trace, 0, sizeof *trace);
    pthread_mutex_init(&trace->mutex, NULL);
    trace->clock = clock_seconds;
    trace->spans = keep ? MEMORY_OF(Span, TRACE_MAX_SPANS) : NULL;
}

static inline void trace_close(Trace *trace) {
    free(trace->spans);
    trace->spans = NULL;
    pthread_mutex_destroy(&trace->mutex);
}

// Adds the time since the last call to the sums of what has been running since then. Returns
// the time. The caller holds the mutex.
static inline double trace_count(Trace *trace) {
    double now = trace->clock(), seconds = now - trace->counted_until;
    bool computes = trace->running[TRACE_COMPUTE], communicates = trace->running[TRACE_COMMUNICATION];
    assert(seconds >= 0);
    if (computes) { trace->sums.compute += seconds; }
    if (communicates) { trace->sums.communication += seconds; }
    if (communicates && !computes) { trace->sums.exposed += seconds; }
    trace->counted_until = now;
    return now;
}

// A span of `lane` begins. Spans of one lane do not overlap, and end on the thread that
// began them. name: a literal of plain letters, because it goes into JSON as it is.
static inline void trace_begin(Trace *trace, TraceLane lane, const char *name) {
    Span *span = &trace->current[lane];
    gpu_range_begin(name);
    pthread_mutex_lock(&trace->mutex);
    assert(!trace->running[lane] && strlen(name) < sizeof span->name);
    snprintf(span->name, sizeof span->name, "%s", name);
    span->lane = lane;
    span->began = trace_count(trace);
    trace->running[lane] = true;
    trace->cpu_began[lane] = thread_cpu_seconds();
    pthread_mutex_unlock(&trace->mutex);
}

// The span of `lane` that is running ends; it belongs to `commit`.
static inline void trace_end(Trace *trace, TraceLane lane, int64_t commit) {
    Span *span = &trace->current[lane];
    pthread_mutex_lock(&trace->mutex);
    assert(trace->running[lane]);
    span->ended = trace_count(trace);
    span->commit = commit;
    trace->running[lane] = false;
    if (strcmp(span->name, TRACE_MICRO_BATCH) == 0) {
        trace->sums.micro_batch += span->ended - span->began;
        trace->sums.micro_batch_cpu += thread_cpu_seconds() - trace->cpu_began[lane];
    }
    bool full = trace->span_count == TRACE_MAX_SPANS;
    if (trace->spans != NULL && !full) { trace->spans[trace->span_count++] = *span; }
    trace->dropped += full;
    pthread_mutex_unlock(&trace->mutex);
    gpu_range_end();
}

static inline TraceSums trace_take(Trace *trace) {
    pthread_mutex_lock(&trace->mutex);
    trace_count(trace);
    TraceSums sums = trace->sums;
    memset(&trace->sums, 0, sizeof trace->sums);
    pthread_mutex_unlock(&trace->mutex);
    return sums;
}

// ---- Clocks ---------------------------------------------------------------------------

// How far the clock of rank 0 is from this rank's clock.
typedef struct ClockOffset {
    double time;    // this rank's clock when it was measured
    double seconds; // to be added to this rank's clock to get rank 0's
    double error;   // the true value is at most this far away
} ClockOffset;

// All ranks call it together. clock: clock_seconds, except in tests.
//
// A round is a barrier and an all-gather. This rank reads its clock before the one (sent) and after
// the other (received), rank 0 its own in between (stamp), and sends it. Messages order the three
// readings, so the offset lies between stamp - received and stamp - sent. The answer is the middle
// of what the intervals of all rounds have in common: its error is at most half of the shortest
// round trip. Waiting for the slowest rank makes rounds longer but not wrong.
static inline ClockOffset trace_measure_clock(Transport *transport, double (*clock)(void)) {
    double received = 0, low = -INFINITY, high = INFINITY;
    for (int round = 0; round < TRACE_CLOCK_ROUNDS; round++) {
        double sent = clock();
        transport_barrier(transport, "clock measurement");
        double stamp = clock(); // of rank 0, in the end
        share_from_rank_zero(transport, "clock measurement", &stamp, sizeof stamp);
        received = clock();
        low = fmax(low, stamp - received);
        high = fmin(high, stamp - sent);
    }
    ClockOffset offset = {
        .time = received, .seconds = low + (high - low) / 2, .error = fmax((high - low) / 2, 0)};
    if (transport->rank == 0) { offset.seconds = offset.error = 0; }
    return offset;
}

// A time of this rank on rank 0's clock, by the nearer of the two where outside of both.
static inline double clock_on_rank_0(const ClockOffset *start, const ClockOffset *end, double time) {
    double between = end->time - start->time;
    double share = between > 0 ? fmin(fmax((time - start->time) / between, 0), 1) : 0;
    return time + start->seconds + share * (end->seconds - start->seconds);
}

// ---- The file -------------------------------------------------------------------------

// Whether a trace can be written there, asked before hours of training. What is not a plain
// file is refused, because a file that is renamed to /dev/null replaces it.
static inline bool trace_path_check(const char *path, Error *error) {
    char temporary[PATH_MAX];
    struct stat status;
    if (stat(path, &status) == 0 && !S_ISREG(status.st_mode)) {
        const char *kind = S_ISDIR(status.st_mode) ? "a directory" : "not a plain file";
        return error_set(error, "--trace %.400s is %s: give the name of a file", path, kind);
    }
    Error reason;
    FILE *file = file_replace_begin(path, &reason);
    if (file == NULL) { return error_set(error, "--trace: %.600s: choose another file", reason.text); }
    fclose(file);
    file_replacement_path(temporary, path);
    unlink(temporary);
    return true;
}

// What rank 0 has to know of every rank before spans come.
typedef struct TraceRank {
    double origin; // the earliest span, on the clock of rank 0
    int64_t spans, dropped;
    char host[TRANSPORT_HOST_BYTES];
} TraceRank;

// What viewers call a rank and its lanes. The first event has no comma before it.
static inline void trace_print_names(FILE *file, int rank, const TraceRank *of_rank) {
    fprintf(
        file,
        "%s{\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"name\":\"process_name\",\"args\":{\"name\":\"rank %d on "
        "%s\"}},\n"
        "{\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"name\":\"process_sort_index\",\"args\":{\"sort_index\":%d}},\n"
        "{\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"name\":\"thread_name\",\"args\":{\"name\":\"compute\"}},\n"
        "{\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"name\":\"thread_name\",\"args\":{\"name\":\"communication\"}}",
        rank > 0 ? ",\n" : "", rank, rank, of_rank->host, rank, rank, rank, TRACE_COMPUTE, rank,
        TRACE_COMMUNICATION);
    if (of_rank->dropped == 0) { return; }
    fprintf(file,
            ",\n{\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"name\":\"process_labels\",\"args\":{\"labels\":\"%lld "
            "spans dropped\"}}",
            rank, (long long)of_rank->dropped);
}

// Both ends of a span are rounded to nanoseconds, not its duration: so spans that touch do not
// overlap in the file. Negative: it could not be written.
static inline int trace_print_span(FILE *file, int rank, const Span *span, double origin) {
    long long began = llround((span->began - origin) * 1e9), ended = llround((span->ended - origin) * 1e9);
    long long duration = ended > began ? ended - began : 0;
    return fprintf(file,
                   ",\n{\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"name\":\"%s\",\"ts\":%lld.%03lld,"
                   "\"dur\":%lld.%03lld,\"args\":{\"commit\":%lld}}",
                   rank, (int)span->lane, span->name, began / 1000, began % 1000, duration / 1000,
                   duration % 1000, (long long)span->commit);
}

// The spans of this rank on the clock of rank 0, and what rank 0 has to know of them.
static inline TraceRank trace_move_spans(Trace *trace, const Transport *transport, const ClockOffset *start,
                                         const ClockOffset *end) {
    TraceRank mine = {
        .origin = INFINITY, .spans = (int64_t)trace->span_count, .dropped = trace->dropped, .host = ""};
    memcpy(mine.host, transport->host, sizeof mine.host);
    for (char *c = mine.host; *c != '\0'; c++) {
        if (*c < 32 || *c == 127 || *c == '"' || *c == '\\') { *c = '?'; } // a host name may be anything
    }
    for (Span *span = trace->spans; span < trace->spans + trace->span_count; span++) {
        span->began = clock_on_rank_0(start, end, span->began);
        span->ended = clock_on_rank_0(start, end, span->ended);
        mine.origin = fmin(mine.origin, span->began);
    }
    return mine;
}

// Writes the spans of all ranks to `path`, in rank 0's time, and leaves them in this time. All
// ranks call it when no span is running, each with its two measurements of the clock, and get the
// same result. ts in the file: microseconds since the earliest span.
//
// Rank 0 never holds more than one piece of each rank. If it cannot write, it receives all the
// same, because the others send. On failure a file that had the name before is still there.
static inline bool trace_write(Trace *trace, Transport *transport, const ClockOffset *start,
                               const ClockOffset *end, const char *path, Error *error) {
    const Lane lane = {BETWEEN_HOSTS, 0};
    const TraceRank mine = trace_move_spans(trace, transport, start, end);
    bool writes = transport->rank == 0;
    int size = transport->size, reason = 0; // reason: errno of the first write that failed
    TraceRank *ranks =
        (TraceRank *)transport_collect_records(transport, "start of the trace", &mine, sizeof mine);
    Span *received = MEMORY_OF(Span, writes ? (size_t)size * TRACE_PIECE : 0);
    FILE *file = writes && trace_path_check(path, error) ? file_replace_begin(path, error) : NULL;
    double origin = INFINITY;
    int64_t most = 0;
    if (file != NULL) { fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n", file); } // into its buffer
    for (int rank = 0; rank < size; rank++) {
        origin = fmin(origin, ranks[rank].origin);
        most = ranks[rank].spans > most ? ranks[rank].spans : most;
        if (file != NULL) { trace_print_names(file, rank, &ranks[rank]); }
    }
    transport_begin(transport, "gathering of the trace");
    for (int64_t begin = 0; begin < most; begin += TRACE_PIECE) {
        for (int rank = 1; rank < size; rank++) {
            int64_t count = int64_min(ranks[rank].spans - begin, TRACE_PIECE);
            if (count <= 0 || !(writes || rank == transport->rank)) { continue; }
            Span *piece = writes ? received + rank * TRACE_PIECE : trace->spans + begin;
            transport_post(transport, lane, !writes, writes ? rank : 0, piece, (size_t)count * sizeof(Span));
        }
        transport_wait(transport, lane);
        for (int rank = 0; file != NULL && reason == 0 && rank < size; rank++) {
            const Span *piece = rank == 0 ? trace->spans + begin : received + rank * TRACE_PIECE;
            for (int64_t i = 0; i < TRACE_PIECE && begin + i < ranks[rank].spans; i++) {
                if (trace_print_span(file, rank, &piece[i], origin) < 0) { reason = errno; }
            }
        }
    }
    free(received);
    free(ranks);
    if (file != NULL) {
        if (reason == 0 && fputs("\n]}\n", file) < 0) { reason = errno; }
        errno = reason;
        file_replace_end(file, path, reason == 0, error);
    }
    share_from_rank_zero(transport, "end of the trace", error, sizeof *error);
    return !error_is_set(error);
}
