// trace.h: what the two streams of a rank did, and when.
//
// Tasks say afterwards when they ran (trace_add), each lane from its own thread. Two
// readers:
//
//   the report of every commit   trace_take: how long compute and communication ran, and how much of the latter nothing hid. Always on.
//   --trace FILE                 trace_gather_and_write: every span of every rank as Chrome trace JSON, kept in memory until the end.
//
// Sums. A span counts where it lies: trace_take(until) counts the parts before `until`
// that no earlier take has counted, and later parts stay for later takes. Communication
// that is hidden is an interval of its own, the overlap of two spans; it is found when
// the second of the two is added, and counted in the same way. Exposed is communication
// less overlap. So over all takes every sum is exact, in whatever order the lanes add;
// and a single take is exact if every span that began before its `until` has been added.
// Otherwise
//
//   * a communication span that is added after a take, though it began before, counts whole in the next take, with all of its overlap;
//   * so does a compute span; and where it hides communication that the earlier take has called exposed, the next take has that much less,
//     down to 0, and what remains of the debt goes to the take after that.
//
// The overlaps need no search. Spans of a lane do not overlap and come in their order, so
// no later span of a lane begins before its latest end, and intervals of the other lane
// that end before that are done with. Each interval enters and leaves each queue once.
// Queues are bounded, so that nothing grows where nobody takes or one lane is silent; see
// TRACE_HISTORY.
//
// Clocks. Each rank has a monotonic clock with a start of its own. Its distance to the
// clock of rank 0 is measured at the start and at the end of a run, which also shows how
// fast the two drift apart; spans in between are moved along the line through the two.
#ifndef ACCO_COMM_TRACE_H
#define ACCO_COMM_TRACE_H

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/stat.h>

#include "comm/transport.h"

enum {
    // Intervals of a queue. Beyond it, the oldest that waits for a take counts in the
    // next one, whatever its `until`; and a communication span that runs beside more
    // compute spans than these sees the oldest as idle time.
    TRACE_HISTORY = 65536,
    TRACE_MAX_SPANS = 2000000, // kept for a file: 80 MB; later ones are counted as dropped
    TRACE_NAME_SIZE = 24,      // bytes of a name with its end
    TRACE_PATH_SIZE = 4096,
    TRACE_PIECE = 1024, // spans that one collective brings from every rank: 57 kB from each
    TRACE_CLOCK_ROUNDS =
        16 // of a measurement: the more, the likelier one without a disturbance on either way
};

typedef enum TraceLane { TRACE_COMPUTE, TRACE_COMMUNICATION, TRACE_LANES } TraceLane;

typedef struct Span {
    const char *name;
    double began, ended; // clock_seconds()
    int64_t commit;
    TraceLane lane;
} Span;

typedef struct Interval {
    double began, ended;
} Interval;

// Disjoint intervals in their order; a ring.
typedef struct Intervals {
    Interval *items; // (TRACE_HISTORY)
    uint64_t added, removed;
    double evicted; // length of what had to make room
} Intervals;

typedef struct Trace {
    pthread_mutex_t mutex;
    Intervals untaken[TRACE_LANES]; // waiting for a take
    Intervals recent[TRACE_LANES];  // a span of the other lane that is still to come may overlap these
    Intervals overlaps;             // communication that was hidden; waiting for a take
    double lane_ended[TRACE_LANES]; // of the latest span
    double exposed_carried; // at most 0: what was called exposed before a late compute span proved it hidden
    bool keep;
    Span *spans; // (span_capacity)
    size_t span_count, span_capacity;
    int64_t dropped;
} Trace;

typedef struct TraceSums {
    double compute_seconds, communication_seconds, exposed_seconds;
} TraceSums;

// ---------------------------------------------------------------------------------------
// Queues of intervals

static inline Interval *intervals_first(Intervals *queue) {
    return &queue->items[queue->removed % TRACE_HISTORY];
}

static inline void intervals_add(Intervals *queue, double began, double ended) {
    if (queue->added - queue->removed == TRACE_HISTORY) {
        const Interval *oldest = intervals_first(queue);
        queue->evicted += oldest->ended - oldest->began;
        queue->removed++;
    }
    Interval *item = &queue->items[queue->added++ % TRACE_HISTORY];
    item->began = began;
    item->ended = ended;
}

// Removes what lies before `until`, and returns its length.
static inline double intervals_take(Intervals *queue, double until) {
    double sum = queue->evicted;
    queue->evicted = 0;
    while (queue->removed < queue->added) {
        Interval *first = intervals_first(queue);
        if (first->began >= until) { break; }
        if (first->ended > until) {
            sum += until - first->began;
            first->began = until;
            break;
        }
        sum += first->ended - first->began;
        queue->removed++;
    }
    return sum;
}

// ---------------------------------------------------------------------------------------
// Adding and taking

// keep: spans are also kept for trace_gather_and_write. The trace may not move while
// threads add to it.
static inline void trace_open(Trace *trace, bool keep) {
    memset(trace, 0, sizeof *trace);
    pthread_mutex_init(&trace->mutex, NULL);
    Interval **queues[] = {&trace->untaken[TRACE_COMPUTE].items, &trace->untaken[TRACE_COMMUNICATION].items,
                           &trace->recent[TRACE_COMPUTE].items, &trace->recent[TRACE_COMMUNICATION].items,
                           &trace->overlaps.items};
    for (size_t i = 0; i < sizeof queues / sizeof queues[0]; i++) {
        *queues[i] = (Interval *)calloc(TRACE_HISTORY, sizeof(Interval));
    }
    trace->lane_ended[TRACE_COMPUTE] = trace->lane_ended[TRACE_COMMUNICATION] = -INFINITY;
    trace->keep = keep;
}

static inline void trace_close(Trace *trace) {
    for (int lane = 0; lane < TRACE_LANES; lane++) {
        free(trace->untaken[lane].items);
        free(trace->recent[lane].items);
    }
    free(trace->overlaps.items);
    free(trace->spans);
    trace->spans = NULL;
    pthread_mutex_destroy(&trace->mutex);
}

static inline void trace_keep_span(Trace *trace, const Span *span) {
    if (trace->span_count == trace->span_capacity && trace->span_capacity < TRACE_MAX_SPANS) {
        size_t capacity = trace->span_capacity == 0 ? 4096 : 2 * trace->span_capacity;
        if (capacity > TRACE_MAX_SPANS) { capacity = TRACE_MAX_SPANS; }
        Span *grown = (Span *)realloc(trace->spans, capacity * sizeof *grown);
        if (grown != NULL) {
            trace->spans = grown;
            trace->span_capacity = capacity;
        }
    }
    if (trace->span_count < trace->span_capacity) {
        trace->spans[trace->span_count++] = *span;
    } else {
        trace->dropped++;
    }
}

// Finds what the new span of `lane` shares with spans of the other lane, and forgets
// those of them that end before it does: what comes after it on its lane also begins
// after it. All earlier overlaps lie in earlier spans of this lane, so overlaps too are
// found in order.
static inline void trace_match(Trace *trace, TraceLane lane, double began, double ended) {
    Intervals *others = &trace->recent[lane == TRACE_COMPUTE ? TRACE_COMMUNICATION : TRACE_COMPUTE];
    while (others->removed < others->added) {
        const Interval *other = intervals_first(others);
        double from = fmax(began, other->began), to = fmin(ended, other->ended);
        if (from < to) { intervals_add(&trace->overlaps, from, to); }
        if (other->ended > ended) { return; }
        others->removed++;
    }
}

static inline bool trace_character_is_plain(char c) { return c >= 32 && c < 127 && c != '"' && c != '\\'; }

// Names go into JSON as they are.
static inline bool trace_name_is_plain(const char *name) {
    size_t length = 0;
    while (length < TRACE_NAME_SIZE && trace_character_is_plain(name[length])) { length++; }
    return length < TRACE_NAME_SIZE && name[length] == '\0';
}

// A task of `commit` ran on `lane` from `began` to `ended` (clock_seconds()). Call it in
// the order of the ends; spans of one lane do not overlap. name: a static string, shorter
// than TRACE_NAME_SIZE, printable ASCII without quotes and backslashes.
static inline void trace_add(Trace *trace, TraceLane lane, const char *name, int64_t commit, double began,
                             double ended) {
    assert(began <= ended && trace_name_is_plain(name));
    Span span = {name, began, ended, commit, lane};
    pthread_mutex_lock(&trace->mutex);
    assert(began >= trace->lane_ended[lane]);
    trace->lane_ended[lane] = ended;
    intervals_add(&trace->untaken[lane], began, ended);
    intervals_add(&trace->recent[lane], began, ended);
    trace_match(trace, lane, began, ended);
    if (trace->keep) { trace_keep_span(trace, &span); }
    pthread_mutex_unlock(&trace->mutex);
}

// Sums over what lies before `until` and was not taken before; the head of this file says
// what happens to spans that are added late. Seconds. exposed: communication during which
// no compute span ran. Call it about once per commit: what is taken together costs one
// step per span.
static inline TraceSums trace_take(Trace *trace, double until) {
    TraceSums sums;
    pthread_mutex_lock(&trace->mutex);
    sums.compute_seconds = intervals_take(&trace->untaken[TRACE_COMPUTE], until);
    sums.communication_seconds = intervals_take(&trace->untaken[TRACE_COMMUNICATION], until);
    double exposed =
        sums.communication_seconds - intervals_take(&trace->overlaps, until) + trace->exposed_carried;
    trace->exposed_carried = fmin(exposed, 0);
    sums.exposed_seconds = fmax(exposed, 0);
    pthread_mutex_unlock(&trace->mutex);
    return sums;
}

// ---------------------------------------------------------------------------------------
// Clocks

typedef struct ClockOffset {
    double seconds; // to be added to this rank's clock to get that of rank 0
    double error;   // the true value is at most this far away
} ClockOffset;

// How far the clock of rank 0 is from `clock`. All ranks call it together.
//
// A round is two exchanges. This rank looks at its clock before the first (sent) and
// after the second (received); rank 0 looks at its own in between (stamp) and sends that
// in the second. The stamp is read after rank 0 has what this rank sent after `sent`, and
// before rank 0 sends what this rank has at `received`; so on this rank's clock it was
// read between the two, and the offset lies between stamp - received and stamp - sent.
// All rounds must hold, so the answer is the middle of what they have in common, and its
// error is at most half of the shortest round trip. That everybody sends at once, and
// waits for the slowest, makes rounds longer but not wrong.
static inline ClockOffset trace_measure_offset(Transport *transport, double (*clock)(void)) {
    double *stamps = (double *)calloc((size_t)transport->size, sizeof(double)); // (size)
    double low = -INFINITY, high = INFINITY;
    for (int round = 0; round < TRACE_CLOCK_ROUNDS; round++) {
        double sent = clock();
        transport_all_gather_records(transport, "clock exchange", &sent, stamps, sizeof sent);
        double stamp = clock();
        transport_all_gather_records(transport, "clock exchange", &stamp, stamps, sizeof stamp);
        double received = clock();
        low = fmax(low, stamps[0] - received);
        high = fmin(high, stamps[0] - sent);
    }
    free(stamps);
    ClockOffset offset = {low + (high - low) / 2, fmax((high - low) / 2, 0)};
    ClockOffset none = {0, 0};
    return transport->rank == 0 ? none : offset;
}

// Seconds to add to this rank's clock_seconds() to get that of rank 0; off by half of the
// shortest of TRACE_CLOCK_ROUNDS round trips at most. All ranks call it together.
static inline double trace_clock_offset(Transport *transport) {
    return trace_measure_offset(transport, clock_seconds).seconds;
}

// Two measurements, and this rank's clock_seconds() at each.
typedef struct ClockMap {
    double offset_at_start, time_at_start, offset_at_end, time_at_end;
} ClockMap;

// A time of this rank's clock on that of rank 0. Outside the two measurements the nearer
// one holds.
static inline double clock_map_time(const ClockMap *map, double time) {
    double between = map->time_at_end - map->time_at_start;
    double share = between > 0 ? fmin(fmax((time - map->time_at_start) / between, 0), 1) : 0;
    return time + map->offset_at_start + share * (map->offset_at_end - map->offset_at_start);
}

// ---------------------------------------------------------------------------------------
// The file: one event per line. Rank 0 writes it under another name and renames it when
// it is whole.

// A span on its way to the file.
typedef struct SpanRecord {
    char name[TRACE_NAME_SIZE];
    double began, ended; // clock of rank 0
    int64_t commit;
    int64_t lane;
} SpanRecord;

typedef struct TraceFile {
    FILE *stream; // NULL: not open
    const char *path;
    char partial[TRACE_PATH_SIZE]; // the name until it is whole
    double origin;                 // what the file calls 0
    bool has_events;
    int reason; // errno of the first write that failed
} TraceFile;

static inline bool trace_file_partial(const char *path, char partial[TRACE_PATH_SIZE], Error *error) {
    int length = snprintf(partial, TRACE_PATH_SIZE, "%s.partial", path);
    return length < TRACE_PATH_SIZE || error_set(error, "--trace %.200s...: the name is too long", path);
}

// Whether a trace can be written there: worth asking before hours of training. What is
// not a plain file is refused, because a file that is renamed to /dev/null replaces it.
static inline bool trace_path_check(const char *path, Error *error) {
    char partial[TRACE_PATH_SIZE];
    struct stat status;
    if (!trace_file_partial(path, partial, error)) { return false; }
    if (stat(path, &status) == 0 && !S_ISREG(status.st_mode)) {
        const char *kind = S_ISDIR(status.st_mode) ? "a directory" : "not a plain file";
        return error_set(error, "--trace %.400s is %s: give the name of a file", path, kind);
    }
    int descriptor = open(partial, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (descriptor < 0) {
        return error_set(error, "cannot write the trace %.400s: %s: choose another file", path,
                         strerror(errno));
    }
    close(descriptor);
    unlink(partial);
    return true;
}

static inline bool trace_file_open(TraceFile *file, const char *path, Error *error) {
    memset(file, 0, sizeof *file);
    file->path = path;
    if (!trace_path_check(path, error) || !trace_file_partial(path, file->partial, error)) { return false; }
    file->stream = fopen(file->partial, "w");
    if (file->stream == NULL) {
        return error_set(error, "cannot write the trace %.400s: %s", path, strerror(errno));
    }
    fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[", file->stream); // into the buffer: cannot fail here
    return true;
}

// The first failure is the one to tell of.
static inline void trace_file_note(TraceFile *file, bool succeeded) {
    if (!succeeded && file->reason == 0) { file->reason = errno != 0 ? errno : EIO; }
}

// One event, without the comma that follows.
PRINTF_LIKE(2, 3) static inline void trace_file_event(TraceFile *file, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    trace_file_note(file, fputs(file->has_events ? ",\n" : "\n", file->stream) >= 0);
    trace_file_note(file, vfprintf(file->stream, format, arguments) >= 0);
    va_end(arguments);
    file->has_events = true;
}

static inline void trace_file_text(TraceFile *file, int rank, int lane, const char *kind, const char *key,
                                   const char *value) {
    trace_file_event(file, "{\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"name\":\"%s\",\"args\":{\"%s\":\"%s\"}}",
                     rank, lane, kind, key, value);
}

// What viewers call the rank and its lanes, and where they show it.
static inline void trace_file_rank(TraceFile *file, int rank, const char *host, int64_t dropped) {
    static const char *const lanes[] = {"compute", "communication"};
    char name[96], labels[64];
    snprintf(name, sizeof name, "rank %d on %s", rank, host);
    snprintf(labels, sizeof labels, "%lld spans dropped", (long long)dropped);
    trace_file_text(file, rank, 0, "process_name", "name", name);
    trace_file_event(
        file,
        "{\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"name\":\"process_sort_index\",\"args\":{\"sort_index\":%d}}",
        rank, rank);
    for (int lane = 0; lane < TRACE_LANES; lane++) {
        trace_file_text(file, rank, lane, "thread_name", "name", lanes[lane]);
    }
    if (dropped > 0) { trace_file_text(file, rank, 0, "process_labels", "labels", labels); }
}

// Both ends are rounded to nanoseconds, not the duration: so neighbours that do not
// overlap do not overlap in the file.
static inline void trace_file_span(TraceFile *file, int rank, const SpanRecord *span) {
    long long began = llround((span->began - file->origin) * 1e9),
              ended = llround((span->ended - file->origin) * 1e9);
    long long duration = ended > began ? ended - began : 0;
    trace_file_event(
        file,
        "{\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"name\":\"%s\",\"ts\":%lld.%03lld,\"dur\":%lld.%03lld,"
        "\"args\":{\"commit\":%lld}}",
        rank, (int)span->lane, span->name, began / 1000, began % 1000, duration / 1000, duration % 1000,
        (long long)span->commit);
}

// Ends the file and gives it its name; after a failure nothing stays of it, and what had
// that name before is still there.
static inline bool trace_file_close(TraceFile *file, Error *error) {
    trace_file_note(file, fputs("\n]}\n", file->stream) >= 0);
    trace_file_note(file, fclose(file->stream) == 0);
    if (file->reason == 0) { trace_file_note(file, rename(file->partial, file->path) == 0); }
    if (file->reason == 0) { return true; }
    unlink(file->partial);
    return error_set(error, "cannot write the trace %.400s: %s", file->path, strerror(file->reason));
}

// ---------------------------------------------------------------------------------------
// Gathering: every rank brings its spans piece by piece, and rank 0 writes each piece as
// it comes, so that nobody ever holds more than one piece of all ranks. The exchange is
// the transport's, which brings everything to everybody; all but rank 0 throw it away.

typedef struct TraceHello {
    char host[64];
    double earliest; // begin of the first span, clock of rank 0; infinite: there is none
    int64_t spans, dropped;
    int64_t failed; // rank 0: the file could not be opened
} TraceHello;

typedef struct TracePiece {
    int64_t failed; // rank 0: what came before could not be written
    SpanRecord spans[TRACE_PIECE];
} TracePiece;

typedef struct TraceGathering {
    const Trace *trace;
    Transport *transport;
    ClockMap clocks;
    TraceHello *hellos; // (size)
    TracePiece *pieces; // (size)
    TracePiece *mine;
    TraceFile file; // rank 0
    Error error;    // rank 0
} TraceGathering;

static inline int64_t trace_gathering_failed(const TraceGathering *gathering) {
    return error_is_set(&gathering->error) || gathering->file.reason != 0 ? 1 : 0;
}

static inline void trace_gathering_open(TraceGathering *gathering, const char *path) {
    Transport *transport = gathering->transport;
    gathering->hellos = (TraceHello *)calloc((size_t)transport->size, sizeof(TraceHello));
    gathering->pieces = (TracePiece *)calloc((size_t)transport->size, sizeof(TracePiece));
    gathering->mine = (TracePiece *)calloc(1, sizeof(TracePiece));
    if (gathering->hellos == NULL || gathering->pieces == NULL || gathering->mine == NULL) {
        transport_fail(transport, "no memory for gathering the trace: %zu bytes",
                       (size_t)(transport->size + 1) * sizeof(TracePiece));
    }
    if (transport->rank == 0) { trace_file_open(&gathering->file, path, &gathering->error); }
}

// Who is there, with how much, since when.
static inline void trace_gather_hellos(TraceGathering *gathering) {
    const Trace *trace = gathering->trace;
    Transport *transport = gathering->transport;
    TraceHello mine;
    memset(&mine, 0, sizeof mine);
    memcpy(mine.host, transport->host, sizeof mine.host - 1);
    for (char *c = mine.host; *c != '\0'; c++) {
        if (!trace_character_is_plain(*c)) { *c = '?'; }
    }
    mine.earliest = INFINITY;
    mine.spans = (int64_t)trace->span_count;
    mine.dropped = trace->dropped;
    mine.failed = trace_gathering_failed(gathering);
    for (size_t i = 0; i < trace->span_count; i++) {
        mine.earliest = fmin(mine.earliest, clock_map_time(&gathering->clocks, trace->spans[i].began));
    }
    transport_all_gather_records(transport, "trace hello", &mine, gathering->hellos, sizeof mine);
    if (transport->rank != 0 || mine.failed) { return; }
    double origin = INFINITY;
    for (int rank = 0; rank < transport->size; rank++) {
        const TraceHello *hello = &gathering->hellos[rank];
        trace_file_rank(&gathering->file, rank, hello->host, hello->dropped);
        origin = fmin(origin, hello->earliest);
    }
    gathering->file.origin = origin;
}

// How many of a rank's spans are in its piece number `index`.
static inline int64_t trace_piece_spans(int64_t spans, int64_t index) {
    int64_t left = spans - index * TRACE_PIECE, all = TRACE_PIECE;
    return left < 0 ? 0 : left < all ? left : all;
}

static inline void trace_fill_piece(TraceGathering *gathering, int64_t index) {
    const Trace *trace = gathering->trace;
    TracePiece *piece = gathering->mine;
    piece->failed = trace_gathering_failed(gathering);
    int64_t count = trace_piece_spans((int64_t)trace->span_count, index);
    for (int64_t i = 0; i < count; i++) {
        const Span *span = &trace->spans[index * TRACE_PIECE + i];
        SpanRecord *record = &piece->spans[i];
        snprintf(record->name, sizeof record->name, "%s", span->name);
        record->began = clock_map_time(&gathering->clocks, span->began);
        record->ended = clock_map_time(&gathering->clocks, span->ended);
        record->commit = span->commit;
        record->lane = span->lane;
    }
}

// Exchanges one piece of every rank, and writes them on rank 0. False on all ranks when
// rank 0 cannot write.
static inline bool trace_gather_piece(TraceGathering *gathering, int64_t index) {
    Transport *transport = gathering->transport;
    trace_fill_piece(gathering, index);
    transport_all_gather_records(transport, "trace gathering", gathering->mine, gathering->pieces,
                                 sizeof(TracePiece));
    if (gathering->pieces[0].failed) { return false; }
    for (int rank = 0; rank < transport->size && transport->rank == 0; rank++) {
        int64_t count = trace_piece_spans(gathering->hellos[rank].spans, index);
        for (int64_t i = 0; i < count; i++) {
            trace_file_span(&gathering->file, rank, &gathering->pieces[rank].spans[i]);
        }
    }
    return true;
}

// Rank 0 ends the file, and everybody learns how that went.
static inline bool trace_gathering_close(TraceGathering *gathering, Error *error) {
    Transport *transport = gathering->transport;
    if (gathering->file.stream != NULL) { trace_file_close(&gathering->file, &gathering->error); }
    Error *errors = (Error *)calloc((size_t)transport->size, sizeof(Error)); // (size)
    if (errors == NULL) { transport_fail(transport, "no memory for gathering the trace"); }
    transport_all_gather_records(transport, "trace verdict", &gathering->error, errors, sizeof(Error));
    bool written = !error_is_set(&errors[0]);
    if (!written) { *error = errors[0]; }
    free(errors);
    free(gathering->hellos);
    free(gathering->pieces);
    free(gathering->mine);
    return written;
}

// Writes the spans of all ranks to `path`, which only rank 0 looks at. All ranks call it,
// each with its own two trace_clock_offset and its clock_seconds() at these, when nothing
// is added any more; all get the same verdict and the same text. In the file ts is in
// microseconds since the earliest span of all ranks.
static inline bool trace_gather_and_write(Trace *trace, Transport *transport, double offset_at_start,
                                          double time_at_start, double offset_at_end, double time_at_end,
                                          const char *path, Error *error) {
    TraceGathering gathering;
    memset(&gathering, 0, sizeof gathering);
    ClockMap clocks = {offset_at_start, time_at_start, offset_at_end, time_at_end};
    gathering.trace = trace;
    gathering.transport = transport;
    gathering.clocks = clocks;
    trace_gathering_open(&gathering, path);
    trace_gather_hellos(&gathering);
    int64_t most = 0;
    for (int rank = 0; rank < transport->size; rank++) {
        if (gathering.hellos[rank].spans > most) { most = gathering.hellos[rank].spans; }
    }
    bool going = gathering.hellos[0].failed == 0;
    for (int64_t index = 0; index * TRACE_PIECE < most && going; index++) {
        going = trace_gather_piece(&gathering, index);
    }
    return trace_gathering_close(&gathering, error);
}

#endif
