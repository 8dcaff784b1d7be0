// test_trace.c: the sums of a trace against pictures and a count of unit cells, clocks
// that run apart, and the file.
//
// Where a test gives the times itself they are small multiples of a power of two: sums
// have no rounding and are compared exactly.
#include "test/harness.h"

#include <fcntl.h>
#include <jansson.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "comm/trace.h"
#include "test/threads_link.h"

enum { MAX_RANKS = 4, CELLS = 400 };

static void assert_sums(TraceSums sums, double compute, double communication, double exposed) {
    assert_close(sums.compute, compute, 0, "compute");
    assert_close(sums.communication, communication, 0, "communication");
    assert_close(sums.exposed, exposed, 0, "exposed");
}

// The same as trace_begin and so on, at a time that the test gives.
static __thread double told_time;

static double told_clock(void) { return told_time; }

static void begin_at(Trace *trace, TraceLane lane, const char *name, double at) {
    told_time = at;
    trace->clock = told_clock;
    trace_begin(trace, lane, name);
}

static void end_at(Trace *trace, TraceLane lane, int64_t commit, double at) {
    told_time = at;
    trace->clock = told_clock;
    trace_end(trace, lane, commit);
}

static TraceSums take_at(Trace *trace, double at) {
    told_time = at;
    trace->clock = told_clock;
    return trace_take(trace);
}

static void begin_compute(Trace *trace, double at) { begin_at(trace, TRACE_COMPUTE, "span", at); }
static void end_compute(Trace *trace, double at) { end_at(trace, TRACE_COMPUTE, 0, at); }
static void begin_communication(Trace *trace, double at) { begin_at(trace, TRACE_COMMUNICATION, "span", at); }
static void end_communication(Trace *trace, double at) { end_at(trace, TRACE_COMMUNICATION, 0, at); }

// ---- Sums: pictures -------------------------------------------------------------------

static void exposed_is_communication_beside_which_nothing_computes(void **state) {
    (void)state;
    Trace trace;
    trace_open(&trace, false);
    assert_sums(take_at(&trace, 1), 0, 0, 0);
    // compute        ####....####
    // communication  ..######....
    begin_compute(&trace, 10);
    begin_communication(&trace, 12);
    end_compute(&trace, 14);
    end_communication(&trace, 18);
    begin_compute(&trace, 18);
    end_compute(&trace, 22);
    assert_sums(take_at(&trace, 22), 8, 6, 4);
    // compute        .##.##.##.
    // communication  ##########
    begin_communication(&trace, 30);
    for (double began = 31; began < 39; began += 3) {
        begin_compute(&trace, began);
        end_compute(&trace, began + 2);
    }
    end_communication(&trace, 40);
    assert_sums(take_at(&trace, 40), 6, 10, 4);
    // compute        ##########
    // communication  .##.##..##
    begin_compute(&trace, 50);
    begin_communication(&trace, 51);
    end_communication(&trace, 53);
    begin_communication(&trace, 54);
    end_communication(&trace, 56);
    begin_communication(&trace, 58);
    end_communication(&trace, 60);
    end_compute(&trace, 60);
    assert_sums(take_at(&trace, 60), 10, 6, 0);
    // spans that touch share nothing; a span without length adds nothing
    begin_compute(&trace, 70);
    end_compute(&trace, 71);
    begin_communication(&trace, 71);
    end_communication(&trace, 72);
    begin_communication(&trace, 72);
    end_communication(&trace, 72);
    assert_sums(take_at(&trace, 80), 1, 1, 1);
    assert_sums(take_at(&trace, 80), 0, 0, 0);
    trace_close(&trace);
}

static void a_span_across_a_take_is_divided_there(void **state) {
    (void)state;
    Trace trace;
    trace_open(&trace, false);
    // compute        ####....##|#.
    // communication  ..########|##..
    begin_compute(&trace, 0);
    begin_communication(&trace, 2);
    end_compute(&trace, 4);
    begin_compute(&trace, 8);
    assert_sums(take_at(&trace, 10), 6, 8, 4);
    end_compute(&trace, 11);
    assert_sums(take_at(&trace, 11), 1, 1, 0);
    end_communication(&trace, 12);
    assert_sums(take_at(&trace, 20), 0, 1, 1);
    trace_close(&trace);
}

// ---- Sums: random spans against cells of length one -----------------------------------

typedef struct Interval {
    int began, ended;
} Interval;

// Random spans in [0, CELLS), a cell at a time: touching ones and long ones among them.
static int random_spans(Random *random, Interval spans[CELLS]) {
    int count = 0, reach = 1 + (int)(random_bits(random) % 12);
    for (int at = (int)(random_bits(random) % 8); at < CELLS;) {
        int ended = at + 1 + (int)(random_bits(random) % (uint64_t)reach);
        ended = ended < CELLS ? ended : CELLS;
        spans[count].began = at;
        spans[count++].ended = ended;
        at = ended + (random_bits(random) % 3 == 0 ? 0 : (int)(random_bits(random) % (uint64_t)reach));
    }
    return count;
}

// What begins and ends in a lane at one time.
static void play_until(Trace *trace, TraceLane lane, const Interval *spans, int count, int *next, int at) {
    if (*next < count && spans[*next].ended == at && trace->running[lane]) {
        end_at(trace, lane, 0, at);
        (*next)++;
    }
    if (*next < count && spans[*next].began == at) { begin_at(trace, lane, "span", at); }
}

static void random_spans_and_takes_agree_with_counted_cells(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 400; seed++) {
        Random random = {random_hash(seed, 0)};
        Interval spans[TRACE_LANES][CELLS];
        bool busy[TRACE_LANES][CELLS];
        int counts[TRACE_LANES], next[TRACE_LANES] = {0, 0}, taken = 0;
        memset(busy, 0, sizeof busy);
        for (int lane = 0; lane < TRACE_LANES; lane++) {
            counts[lane] = random_spans(&random, spans[lane]);
            for (int i = 0; i < counts[lane]; i++) {
                for (int cell = spans[lane][i].began; cell < spans[lane][i].ended; cell++) {
                    busy[lane][cell] = true;
                }
            }
        }
        Trace trace;
        trace_open(&trace, false);
        for (int at = 0; at <= CELLS; at++) {
            play_until(&trace, TRACE_COMPUTE, spans[0], counts[0], &next[0], at);
            play_until(&trace, TRACE_COMMUNICATION, spans[1], counts[1], &next[1], at);
            if (random_bits(&random) % 8 != 0 && at < CELLS) { continue; }
            int compute = 0, communication = 0, exposed = 0;
            for (; taken < at; taken++) {
                compute += busy[TRACE_COMPUTE][taken];
                communication += busy[TRACE_COMMUNICATION][taken];
                exposed += busy[TRACE_COMMUNICATION][taken] && !busy[TRACE_COMPUTE][taken];
            }
            assert_sums(take_at(&trace, at), compute, communication, exposed);
        }
        assert_true(next[0] == counts[0] && next[1] == counts[1]);
        trace_close(&trace);
    }
}

// ---- Bounds and threads ---------------------------------------------------------------

static void compute_for(double seconds) {
    for (double until = thread_cpu_seconds() + seconds; thread_cpu_seconds() < until;) {}
}

// What the thread computes outside of micro-batches does not count.
static void micro_batches_have_the_time_that_their_thread_computed(void **state) {
    (void)state;
    Trace trace;
    trace_open(&trace, false);
    for (int i = 0; i < 2; i++) {
        compute_for(0.05);
        begin_at(&trace, TRACE_COMPUTE, i == 0 ? TRACE_MICRO_BATCH : "inner step", 10 + i);
        compute_for(0.02);
        end_at(&trace, TRACE_COMPUTE, 0, 10.5 + i);
    }
    TraceSums sums = trace_take(&trace);
    assert_true(sums.micro_batch == 0.5 && sums.micro_batch_cpu >= 0.02 && sums.micro_batch_cpu < 0.05);
    trace_close(&trace);
}

static void kept_spans_are_bounded_and_the_rest_is_counted(void **state) {
    (void)state;
    Trace trace;
    trace_open(&trace, true);
    for (int i = 0; i < TRACE_MAX_SPANS + 7; i++) {
        begin_at(&trace, TRACE_COMPUTE, "span", i);
        end_at(&trace, TRACE_COMPUTE, i, i + 1);
    }
    assert_int_equal(trace.span_count, TRACE_MAX_SPANS);
    assert_int_equal(trace.dropped, 7);
    assert_int_equal(trace.spans[TRACE_MAX_SPANS - 1].commit, TRACE_MAX_SPANS - 1);
    assert_close(take_at(&trace, 1e9).compute, TRACE_MAX_SPANS + 7, 0, "compute, dropped or not");
    trace_close(&trace);
    trace_open(&trace, false);
    begin_compute(&trace, 1);
    end_compute(&trace, 2);
    assert_null(trace.spans);
    assert_int_equal(trace.dropped, 0);
    trace_close(&trace);
}

enum { PRODUCED = 20000 };

typedef struct Producer {
    Trace *trace;
    TraceLane lane;
    int ended; // atomic
} Producer;

static void *produce(void *argument) {
    Producer *producer = (Producer *)argument;
    for (int i = 0; i < PRODUCED; i++) {
        trace_begin(producer->trace, producer->lane, "span");
        trace_end(producer->trace, producer->lane, i);
    }
    __atomic_store_n(&producer->ended, 1, __ATOMIC_RELEASE);
    return NULL;
}

// The sums of the spans that were kept: those of a lane come in their order.
static TraceSums sums_of_spans(const Trace *trace) {
    TraceSums sums = {0, 0, 0, 0, 0};
    const Span *lanes[TRACE_LANES][PRODUCED];
    int counts[TRACE_LANES] = {0, 0};
    for (size_t i = 0; i < trace->span_count; i++) {
        const Span *span = &trace->spans[i];
        lanes[span->lane][counts[span->lane]++] = span;
        *(span->lane == TRACE_COMPUTE ? &sums.compute : &sums.communication) += span->ended - span->began;
    }
    sums.exposed = sums.communication;
    for (int i = 0, j = 0; i < counts[0] && j < counts[1];) {
        const Span *compute = lanes[0][i], *communication = lanes[1][j];
        double shared =
            fmin(compute->ended, communication->ended) - fmax(compute->began, communication->began);
        if (shared > 0) { sums.exposed -= shared; }
        i += compute->ended <= communication->ended;
        j += compute->ended > communication->ended;
    }
    return sums;
}

static void two_threads_may_trace_while_the_host_takes(void **state) {
    (void)state;
    Trace trace;
    trace_open(&trace, true);
    Producer producers[TRACE_LANES] = {{&trace, TRACE_COMPUTE, 0}, {&trace, TRACE_COMMUNICATION, 0}};
    pthread_t threads[TRACE_LANES];
    for (int i = 0; i < TRACE_LANES; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, produce, &producers[i]), 0);
    }
    TraceSums total = {0, 0, 0, 0, 0};
    for (bool ended = false; !ended;) {
        ended = __atomic_load_n(&producers[0].ended, __ATOMIC_ACQUIRE) +
                    __atomic_load_n(&producers[1].ended, __ATOMIC_ACQUIRE) ==
                2;
        TraceSums sums = trace_take(&trace);
        total.compute += sums.compute;
        total.communication += sums.communication;
        total.exposed += sums.exposed;
    }
    for (int i = 0; i < TRACE_LANES; i++) { pthread_join(threads[i], NULL); }
    assert_int_equal(trace.span_count, 2 * PRODUCED);
    TraceSums expected = sums_of_spans(&trace);
    assert_true(expected.compute > 0 && expected.communication > 0);
    assert_close(total.compute, expected.compute, 1e-9, "compute");
    assert_close(total.communication, expected.communication, 1e-9, "communication");
    assert_close(total.exposed, expected.exposed, 1e-9, "exposed");
    trace_close(&trace);
}

// ---- Clocks ---------------------------------------------------------------------------

static __thread double clock_shift; // of the rank that this thread is

static double shifted_clock(void) { return clock_seconds() + clock_shift; }

typedef struct ClockWorld {
    double chaos_seconds;
    ClockOffset offsets[MAX_RANKS];
} ClockWorld;

static double shift_of_rank(int rank) { return rank % 2 == 0 ? 100.5 - 7 * rank : 3000.25 * rank; }

static void measure_rank(Transport *transport, void *context) {
    ClockWorld *world = (ClockWorld *)context;
    clock_shift = shift_of_rank(transport->rank);
    transport->chaos_seconds = world->chaos_seconds;
    world->offsets[transport->rank] = trace_measure_clock(transport, shifted_clock);
}

static void assert_offsets(double chaos_seconds) {
    for (int ranks = 1; ranks <= MAX_RANKS; ranks++) {
        ClockWorld world;
        memset(&world, 0, sizeof world);
        world.chaos_seconds = chaos_seconds;
        threads_run(ranks, measure_rank, &world);
        assert_close(world.offsets[0].seconds, 0, 0, "offset of rank 0");
        for (int rank = 1; rank < ranks; rank++) {
            double error = world.offsets[rank].error;
            assert_close(error, 0, 0.5, "error bound"); // something, on a machine that does other things too
            assert_close(world.offsets[rank].seconds, shift_of_rank(0) - shift_of_rank(rank), error + 1e-9,
                         "offset");
        }
    }
}

static void offsets_are_within_their_bound(void **state) {
    (void)state;
    assert_offsets(0);
}

// Delays that are not the same on both ways, and ranks that come late.
static void offsets_are_within_their_bound_when_messages_are_late(void **state) {
    (void)state;
    assert_offsets(2e-3);
}

// A link to rank 0, whose clock shows the true time. A round takes `forth` until rank 0 reads its
// clock, and `back` until its message is here.
typedef struct ClockLink {
    double now, forth[TRACE_CLOCK_ROUNDS], back[TRACE_CLOCK_ROUNDS];
    int round;
} ClockLink;

static ClockLink *clock_link;

static double late_clock(void) { return clock_link->now + 1000; }

static void clock_start(void *state, LinkRequest *request, bool is_send, int peer, void *data, size_t bytes) {
    ClockLink *link = (ClockLink *)state;
    (void)request, (void)peer;
    if (!is_send && bytes == 1) { link->now += link->forth[link->round]; } // the barrier
    if (is_send || bytes != sizeof link->now) { return; }
    memcpy(data, &link->now, sizeof link->now);
    link->now += link->back[link->round++];
}

static bool clock_is_done(void *state, LinkRequest *request) {
    (void)state, (void)request;
    return true;
}

// By hand: the shortest ways, of different rounds, bound the offset from both sides.
static void the_shortest_ways_bound_an_offset(void **state) {
    (void)state;
    ClockLink told = {.now = 5};
    const Link link = {.name = "told", .state = &told, .start = clock_start, .is_done = clock_is_done};
    Transport transport;
    for (int i = 0; i < TRACE_CLOCK_ROUNDS; i++) {
        told.forth[i] = i == 5 ? 0.003 : 0.02;
        told.back[i] = i == 11 ? 0.001 : 0.01;
    }
    clock_link = &told;
    transport_prepare(&transport, 1, 2, 1, &link, "a test");
    ClockOffset offset = trace_measure_clock(&transport, late_clock);
    transport_close(&transport);
    assert_int_equal(told.round, TRACE_CLOCK_ROUNDS);
    assert_close(offset.time, told.now + 1000, 0, "time of the measurement");
    assert_close(offset.seconds, -1000 + 0.001, 1e-9, "offset");
    assert_close(offset.error, 0.002, 1e-9, "error");
}

static void a_clock_that_drifts_is_mapped_along_the_line(void **state) {
    (void)state;
    // this clock shows 1000 + t * (1 + 2^-10) where that of rank 0 shows t
    ClockOffset start = {1000, 0 - 1000.0, 0}, end = {2025, 1024 - 2025.0, 0};
    assert_close(clock_on_rank_0(&start, &end, 1000), 0, 0, "start");
    assert_close(clock_on_rank_0(&start, &end, 2025), 1024, 0, "end");
    assert_close(clock_on_rank_0(&start, &end, 1000 + 512.5), 512, 1e-9, "half way");
    assert_close(clock_on_rank_0(&start, &end, 990), -10, 0, "before the start");
    assert_close(clock_on_rank_0(&start, &end, 2030), 1029, 0, "after the end");
    ClockOffset point = {10, 5, 0};
    assert_close(clock_on_rank_0(&point, &point, 10), 15, 0, "both measurements at the same time");
}

// ---- The file -------------------------------------------------------------------------

static char directory[] = "/tmp/acco-trace-XXXXXX"; // made in main

typedef struct Path {
    char text[256];
} Path;

static Path path_of(const char *name) {
    Path path;
    snprintf(path.text, sizeof path.text, "%s/%s", directory, name);
    return path;
}

static bool exists(const char *name) { return access(path_of(name).text, F_OK) == 0; }

static char *read_text(const char *path) {
    FILE *file = fopen(path, "r");
    if (file == NULL) { return NULL; }
    char *text = NULL;
    size_t size = 0;
    if (getdelim(&text, &size, EOF, file) < 0) { text[0] = '\0'; }
    fclose(file);
    return text;
}

// One rank of a world whose clock is rate times the true time plus a shift.
typedef struct FileRank {
    int spans;
    double shift, rate;
    Error error;
    bool written;
} FileRank;

typedef struct FileWorld {
    Path path;
    FileRank ranks[MAX_RANKS];
} FileWorld;

static const char *const span_names[] = {"micro-batch", "reduce-scatter", "all-gather 3"};

// Span i of a rank in true seconds, and what else is said of it. Rank 2 is the first.
static Span true_span(int rank, int i) {
    double began = 50 + 0.001 * (rank == 2 ? 0 : 1 + rank) + 0.0005 * i;
    Span span = {began, began + 0.0001 * (1 + i % 4), 1000 * rank + i, TRACE_COMPUTE, ""};
    if (i % 2 == 1) { span.lane = TRACE_COMMUNICATION; }
    snprintf(span.name, sizeof span.name, "%s", span_names[(rank + i) % 3]);
    return span;
}

static void write_rank(Transport *transport, void *context) {
    FileWorld *world = (FileWorld *)context;
    FileRank *self = &world->ranks[transport->rank];
    Trace trace;
    trace_open(&trace, true);
    snprintf(transport->host, sizeof transport->host, "pc%d", transport->rank);
    for (int i = 0; i < self->spans; i++) {
        Span span = true_span(transport->rank, i);
        begin_at(&trace, span.lane, span.name, self->shift + self->rate * span.began);
        end_at(&trace, span.lane, span.commit, self->shift + self->rate * span.ended);
    }
    double first = self->shift + self->rate * 10, last = self->shift + self->rate * 100;
    ClockOffset start = {first, 10 - first, 0}, end = {last, 100 - last, 0};
    trace.dropped = transport->rank == 2 ? 12 : 0;
    self->written = trace_write(&trace, transport, &start, &end, world->path.text, &self->error);
    trace_close(&trace);
}

static void open_file_world(FileWorld *world, const char *name) {
    memset(world, 0, sizeof *world);
    world->path = path_of(name);
    for (int rank = 0; rank < MAX_RANKS; rank++) {
        world->ranks[rank].spans =
            rank == 1 ? 0 : 2000 + 600 * rank; // several pieces, of some ranks more than of others
        world->ranks[rank].shift = shift_of_rank(rank) - shift_of_rank(0);
        world->ranks[rank].rate = 1 + 1e-5 * rank;
    }
}

static double number_of(const json_t *event, const char *key) {
    const json_t *value = json_object_get(event, key);
    assert_true(json_is_number(value));
    return json_number_value(value);
}

// Each rank's spans of a file come in their order.
static void assert_spans(const json_t *events, const FileWorld *world, int ranks) {
    int next[MAX_RANKS] = {0, 0, 0, 0};
    double origin = true_span(ranks > 2 ? 2 : 0, 0).began;
    for (size_t i = 0; i < json_array_size(events); i++) {
        const json_t *event = json_array_get(events, i);
        if (strcmp(json_string_value(json_object_get(event, "ph")), "X") != 0) { continue; }
        int rank = (int)number_of(event, "pid");
        assert_in_range(rank, 0, ranks - 1);
        Span span = true_span(rank, next[rank]++);
        assert_string_equal(json_string_value(json_object_get(event, "name")), span.name);
        assert_int_equal((int)number_of(event, "tid"), span.lane == TRACE_COMPUTE ? 0 : 1);
        assert_int_equal((int)number_of(json_object_get(event, "args"), "commit"), span.commit);
        assert_close(number_of(event, "ts"), (span.began - origin) * 1e6, 1.1e-3,
                     "ts"); // microseconds; the file has nanoseconds
        assert_close(number_of(event, "dur"), (span.ended - span.began) * 1e6, 2.1e-3, "dur");
    }
    for (int rank = 0; rank < ranks; rank++) { assert_int_equal(next[rank], world->ranks[rank].spans); }
}

// What viewers call each rank, and whose spans are not all there.
static void assert_names(const json_t *events, int ranks) {
    int names = 0, labels = 0;
    for (size_t i = 0; i < json_array_size(events); i++) {
        const json_t *event = json_array_get(events, i), *arguments = json_object_get(event, "args");
        const char *about = json_string_value(json_object_get(event, "name"));
        char text[64];
        if (strcmp(json_string_value(json_object_get(event, "ph")), "M") != 0) { continue; }
        int rank = (int)number_of(event, "pid");
        assert_in_range(rank, 0, ranks - 1);
        if (strcmp(about, "process_name") == 0) {
            snprintf(text, sizeof text, "rank %d on pc%d", names, names);
            assert_int_equal(rank, names++);
            assert_string_equal(json_string_value(json_object_get(arguments, "name")), text);
        } else if (strcmp(about, "process_sort_index") == 0) {
            assert_int_equal((int)number_of(arguments, "sort_index"), rank);
        } else if (strcmp(about, "process_labels") == 0) {
            assert_int_equal(rank, 2);
            assert_string_equal(json_string_value(json_object_get(arguments, "labels")), "12 spans dropped");
            labels++;
        }
    }
    assert_int_equal(names, ranks);
    assert_int_equal(labels, ranks > 2 ? 1 : 0);
}

// Between the first line and the last every line is an event, with a comma but for the
// last one.
static size_t assert_one_event_per_line(char *text) {
    size_t events = 0;
    char *line = strtok(text, "\n");
    assert_string_equal(line, "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[");
    for (line = strtok(NULL, "\n"); line != NULL && line[0] != ']'; line = strtok(NULL, "\n")) {
        size_t length = strlen(line);
        if (line[length - 1] == ',') { line[length - 1] = '\0'; }
        json_t *event = json_loads(line, 0, NULL);
        assert_true(json_is_object(event));
        json_decref(event);
        events++;
    }
    assert_non_null(line);
    assert_string_equal(line, "]}");
    return events;
}

static void the_file_has_every_span_of_every_rank_in_one_time(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= MAX_RANKS; ranks++) {
        FileWorld world;
        open_file_world(&world, "trace.json");
        threads_run(ranks, write_rank, &world);
        for (int rank = 0; rank < ranks; rank++) {
            assert_true(world.ranks[rank].written);
            assert_false(error_is_set(&world.ranks[rank].error));
        }
        json_error_t error;
        json_t *trace = json_load_file(world.path.text, JSON_REJECT_DUPLICATES, &error);
        assert_non_null(trace);
        const json_t *events = json_object_get(trace, "traceEvents");
        assert_true(json_is_array(events));
        assert_spans(events, &world, ranks);
        assert_names(events, ranks);
        char *text = read_text(world.path.text);
        assert_int_equal(assert_one_event_per_line(text), json_array_size(events));
        free(text);
        json_decref(trace);
    }
    assert_false(exists("trace.json.new"));
}

static void the_lines_of_the_file_are_as_promised(void **state) {
    (void)state;
    Transport transport;
    transport_open_alone(&transport, "a test");
    snprintf(transport.host, sizeof transport.host, "%s", "node\"7\n\x7f\\~");
    Trace trace;
    Error error = {""};
    ClockOffset same = {0, 0, 0};
    trace_open(&trace, true);
    begin_at(&trace, TRACE_COMMUNICATION, "a record", 1000.5);
    begin_at(&trace, TRACE_COMPUTE, "micro-batch", 1000.5 + 0x1p-16);
    end_at(&trace, TRACE_COMMUNICATION, 7, 1000.75);
    end_at(&trace, TRACE_COMPUTE, 8, 1001.5);
    trace.dropped = 3;
    assert_true(trace_write(&trace, &transport, &same, &same, path_of("lines.json").text, &error));
    trace_close(&trace);
    transport_close(&transport);
    char *text = read_text(path_of("lines.json").text);
    assert_string_equal(
        text,
        "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n"
        "{\"ph\":\"M\",\"pid\":0,\"tid\":0,\"name\":\"process_name\",\"args\":{\"name\":\"rank 0 on "
        "node?7???~\"}},\n"
        "{\"ph\":\"M\",\"pid\":0,\"tid\":0,\"name\":\"process_sort_index\",\"args\":{\"sort_index\":0}},\n"
        "{\"ph\":\"M\",\"pid\":0,\"tid\":0,\"name\":\"thread_name\",\"args\":{\"name\":\"compute\"}},\n"
        "{\"ph\":\"M\",\"pid\":0,\"tid\":1,\"name\":\"thread_name\",\"args\":{\"name\":\"communication\"}},\n"
        "{\"ph\":\"M\",\"pid\":0,\"tid\":0,\"name\":\"process_labels\",\"args\":{\"labels\":\"3 spans "
        "dropped\"}},\n"
        "{\"ph\":\"X\",\"pid\":0,\"tid\":1,\"name\":\"a "
        "record\",\"ts\":0.000,\"dur\":250000.000,\"args\":{\"commit\":7}},\n"
        "{\"ph\":\"X\",\"pid\":0,\"tid\":0,\"name\":\"micro-batch\",\"ts\":15.259,\"dur\":999984.741,"
        "\"args\":{\"commit\":8}}\n"
        "]}\n");
    free(text);
}

// Were durations rounded by themselves, the second would be 1 and 2 ns and end after the
// third begins.
static void spans_that_touch_do_not_overlap_in_the_file(void **state) {
    (void)state;
    Transport transport;
    transport_open_alone(&transport, "a test");
    Trace trace;
    Error error = {""};
    ClockOffset same = {0, 0, 0};
    trace_open(&trace, true);
    static const double times[] = {0, 0.6e-9, 2.1e-9, 5e-9};
    for (int i = 0; i < 3; i++) {
        begin_compute(&trace, times[i]);
        end_compute(&trace, times[i + 1]);
    }
    assert_true(trace_write(&trace, &transport, &same, &same, path_of("touch.json").text, &error));
    trace_close(&trace);
    transport_close(&transport);
    char *text = read_text(path_of("touch.json").text);
    assert_non_null(strstr(text, "\"ts\":0.000,\"dur\":0.001,"));
    assert_non_null(strstr(text, "\"ts\":0.001,\"dur\":0.001,"));
    assert_non_null(strstr(text, "\"ts\":0.002,\"dur\":0.003,"));
    free(text);
}

static void a_run_without_spans_leaves_a_file_that_parses(void **state) {
    (void)state;
    FileWorld world;
    open_file_world(&world, "empty.json");
    for (int rank = 0; rank < MAX_RANKS; rank++) { world.ranks[rank].spans = 0; }
    threads_run(2, write_rank, &world);
    assert_true(world.ranks[0].written && world.ranks[1].written);
    json_t *trace = json_load_file(world.path.text, 0, NULL);
    assert_int_equal(json_array_size(json_object_get(trace, "traceEvents")), 2 * 4);
    json_decref(trace);
}

// All ranks must fail, with one line that is the same everywhere.
static void assert_not_written(const FileWorld *world, int ranks, const char *why) {
    for (int rank = 0; rank < ranks; rank++) {
        assert_false(world->ranks[rank].written);
        assert_string_equal(world->ranks[rank].error.text, world->ranks[0].error.text);
    }
    if (strstr(world->ranks[0].error.text, why) == NULL) {
        fail_msg("'%s' does not say '%s'", world->ranks[0].error.text, why);
    }
    assert_null(strchr(world->ranks[0].error.text, '\n'));
}

static void a_place_where_no_file_can_be_is_an_error_on_all_ranks(void **state) {
    (void)state;
    static const char *const places[][2] = {{"missing/trace.json", "No such file"}, {"", "is a directory"}};
    for (size_t i = 0; i < 2; i++) {
        FileWorld world;
        open_file_world(&world, places[i][0]);
        threads_run(3, write_rank, &world);
        assert_not_written(&world, 3, places[i][1]);
    }
    char longest[PATH_MAX + 10];
    memset(longest, 'x', sizeof longest);
    longest[sizeof longest - 1] = '\0';
    Error error = {""};
    assert_false(trace_path_check(longest, &error));
    assert_non_null(strstr(error.text, "too long"));
    assert_true(trace_path_check(path_of("new.json").text, &error));
    assert_false(exists("new.json") || exists("new.json.new"));
}

// Renaming a file to /dev/null, which root may do, would replace the device.
static void a_device_is_refused_and_stays_a_device(void **state) {
    (void)state;
    struct stat status;
    if (mkfifo(path_of("pipe").text, 0600) != 0) { fail(); }
    FileWorld world;
    open_file_world(&world, "pipe");
    threads_run(2, write_rank, &world);
    assert_not_written(&world, 2, "not a plain file");
    assert_int_equal(stat(path_of("pipe").text, &status), 0);
    assert_true(S_ISFIFO(status.st_mode));
}

static void a_full_disk_is_an_error_on_all_ranks_and_leaves_the_old_file(void **state) {
    (void)state;
    FileWorld world;
    open_file_world(&world, "full.json");
    FILE *old = fopen(world.path.text, "w");
    fputs("old", old);
    fclose(old);
    static const int limits[] = {65536, 300}; // reached among the pieces; reached when a small file is closed
    for (int i = 0; i < 2; i++) {
        struct rlimit before, limit;
        assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
        limit.rlim_cur = (rlim_t)limits[i];
        limit.rlim_max = before.rlim_max;
        void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
        for (int rank = 0; i == 1 && rank < MAX_RANKS; rank++) { world.ranks[rank].spans = 1; }
        threads_run(3, write_rank, &world);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
        signal(SIGXFSZ, handler);
        assert_not_written(&world, 3, "File too large");
        char *text = read_text(world.path.text);
        assert_string_equal(text, "old");
        free(text);
        assert_false(exists("full.json.new"));
    }
}

int main(void) {
    if (mkdtemp(directory) == NULL) { return 1; }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exposed_is_communication_beside_which_nothing_computes),
        cmocka_unit_test(a_span_across_a_take_is_divided_there),
        cmocka_unit_test(random_spans_and_takes_agree_with_counted_cells),
        cmocka_unit_test(micro_batches_have_the_time_that_their_thread_computed),
        cmocka_unit_test(kept_spans_are_bounded_and_the_rest_is_counted),
        cmocka_unit_test(two_threads_may_trace_while_the_host_takes),
        cmocka_unit_test(offsets_are_within_their_bound),
        cmocka_unit_test(offsets_are_within_their_bound_when_messages_are_late),
        cmocka_unit_test(the_shortest_ways_bound_an_offset),
        cmocka_unit_test(a_clock_that_drifts_is_mapped_along_the_line),
        cmocka_unit_test(the_file_has_every_span_of_every_rank_in_one_time),
        cmocka_unit_test(the_lines_of_the_file_are_as_promised),
        cmocka_unit_test(spans_that_touch_do_not_overlap_in_the_file),
        cmocka_unit_test(a_run_without_spans_leaves_a_file_that_parses),
        cmocka_unit_test(a_place_where_no_file_can_be_is_an_error_on_all_ranks),
        cmocka_unit_test(a_device_is_refused_and_stays_a_device),
        cmocka_unit_test(a_full_disk_is_an_error_on_all_ranks_and_leaves_the_old_file),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    char command[64];
    snprintf(command, sizeof command, "rm -rf '%s'", directory);
    return system(command) == 0 ? failed : 1;
}
