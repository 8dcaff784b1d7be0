// test_transport.c: collectives against plain loops, deadlines, the emulated link and its
// measurement.
//
// As in test_rules.c, ranks are threads of this process, or processes under mpirun. The
// number formats have a test of their own, test_wire.c.

#include "test/harness.h"

#include "comm/exchange.h"
#include "comm/probe.h"
#include "comm/transport_mpi.h"
#include "test/threads_link.h"

enum { MAX_FLAT = 4, MAX_RANKS = 8 }; // ranks without and with hosts that have several

static Transport *process_transport; // set once in main

// ---------------------------------------------------------------------------------------
// A reduce-scatter and then an all-gather of a vector, in one range or in several

typedef struct CollectiveSpec {
    size_t count;
    WireFormat wire;
    size_t bucket;  // cells that travel together; 0: all
    size_t message; // elements of a message, a multiple of LAYOUT_BLOCK; 0: what the transport takes
    bool from_source, on_base; // of the all-gather: see Collective
    double chaos_seconds, link_bytes_per_second, link_latency;
    const int *hosts; // (ranks): of every rank, the lowest rank of its host. NULL: every rank by itself
    int matrices;     // that have one owner each; 0: all pieces are equal
} CollectiveSpec;

typedef struct CollectiveResult {
    float *scattered; // (padded): after the reduce-scatter
    float *gathered;  // (padded): after the all-gather
    uint64_t bytes_sent, bytes_sent_outside;
    double seconds;
    double delay; // what chaos_seconds adds at least: a draw before each operation
} CollectiveResult;

// What rank `rank` contributes at element i: signs, sizes and fractions vary. what: the
// vector that is reduced, the source of the gather, or its base.
typedef enum Contribution { BUFFER_OF = 1, SOURCE_OF = 101, BASE_OF_ALL = 201 } Contribution;

static float contribution(Contribution what, int rank, size_t i) {
    uint64_t bits = random_hash((uint64_t)what + (uint64_t)rank, i);
    float size = wire_float_from_bits((uint32_t)(119 + (bits >> 60)) << 23 |
                                      (uint32_t)(bits & 0x7fffffu)); // 2^-8 to 2^8
    return (bits >> 32 & 1) != 0 ? -size : size;
}

static void fill(float *values, size_t count, Contribution what, int rank) {
    for (size_t i = 0; i < count; i++) { values[i] = contribution(what, rank, i); }
}

typedef struct Buffers {
    Arena arena;
    float *buffer, *source, *base; // (padded), (shard), (padded)
} Buffers;

// Matrices of very different lengths, with a few elements between them, behind a third that is
// none.
static Layout layout_of(const CollectiveSpec *spec, int ranks) {
    LayoutMatrix matrices[64];
    size_t at = spec->count / 3, each = (spec->count - at) / (size_t)(spec->matrices + 1);
    if (spec->matrices == 0) { return layout_make(spec->count, ranks); }
    for (int i = 0; i < spec->matrices; i++) {
        matrices[i].begin = at + 7 * (size_t)(i % 3);
        at += i % 4 == 0 ? each / 2 : each;
        matrices[i].end = at;
    }
    return layout_make_whole(spec->count, ranks, matrices, spec->matrices);
}

static void open_buffers(Buffers *buffers, const CollectiveSpec *spec, const Layout *layout,
                         Transport *transport) {
    Error error = {""};
    size_t padded = layout_padded(layout) * sizeof(float), shard = layout_shard(layout);
    memset(buffers, 0, sizeof *buffers);
    arena_reserve(&buffers->arena, MEMORY_COMMUNICATION, "buffer", padded, &buffers->buffer);
    arena_reserve(&buffers->arena, MEMORY_COMMUNICATION, "source", shard * sizeof(float), &buffers->source);
    arena_reserve(&buffers->arena, MEMORY_COMMUNICATION, "base", padded, &buffers->base);
    transport->messages.limit = spec->message;
    transport->two_level = spec->hosts != NULL;
    transport_meet(transport, spec->hosts != NULL ? spec->hosts[transport->rank] : transport->rank);
    host_collectives_reserve(transport, &buffers->arena, shard);
    if (!arena_commit(&buffers->arena, &error)) { abort(); }
    fill(buffers->buffer, layout_padded(layout), BUFFER_OF, transport->rank);
    fill(buffers->source, shard, SOURCE_OF, transport->rank);
    fill(buffers->base, layout_padded(layout), BASE_OF_ALL, 0);
}

// The delays that these draws will cause.
static double delay_ahead(const Transport *transport, double chaos_seconds, size_t operations) {
    Random chaos = transport->chaos;
    double sum = 0;
    for (size_t i = 0; i < operations && transport->size > 1; i++) {
        sum += chaos_seconds * random_uniform(&chaos);
    }
    return sum;
}

static float *copy_floats(const float *from, size_t count) {
    float *copy = (float *)malloc(count * sizeof(float) + 1);
    memcpy(copy, from, count * sizeof(float));
    return copy;
}

// Buckets of the reduce-scatter come from the end, those of the all-gather from the
// start, as in training.
static void run_collectives(const CollectiveSpec *spec, Transport *transport, CollectiveResult *result) {
    Layout layout = layout_of(spec, transport->size);
    size_t cells = layout.cells, bucket = spec->bucket > 0 ? spec->bucket : cells;
    Buffers buffers;
    open_buffers(&buffers, spec, &layout, transport);
    transport->chaos_seconds = spec->chaos_seconds;
    transport->link_bytes_per_second = spec->link_bytes_per_second;
    transport->link_latency = spec->link_latency;
    transport->bytes_sent = transport->bytes_sent_outside = 0;
    result->delay = delay_ahead(transport, spec->chaos_seconds, 2 * ((cells + bucket - 1) / bucket));
    Collective collective = {.layout = &layout, .wire = spec->wire, .buffer = buffers.buffer};
    double began = clock_seconds();
    for (collective.end = cells; collective.end > 0; collective.end = collective.first) {
        collective.first = collective.end > bucket ? collective.end - bucket : 0;
        host_exchange(transport, &collective, REDUCE_SCATTER);
    }
    result->scattered = copy_floats(buffers.buffer, layout_padded(&layout));
    collective.source = spec->from_source ? buffers.source : NULL;
    collective.base = spec->on_base ? buffers.base : NULL;
    for (collective.first = 0; collective.first < cells; collective.first = collective.end) {
        collective.end = size_min(collective.first + bucket, cells);
        host_exchange(transport, &collective, ALL_GATHER);
    }
    result->seconds = clock_seconds() - began;
    result->gathered = copy_floats(buffers.buffer, layout_padded(&layout));
    result->bytes_sent = transport->bytes_sent;
    result->bytes_sent_outside = transport->bytes_sent_outside;
    transport->chaos_seconds = transport->link_bytes_per_second = transport->link_latency = 0;
    layout_free(&layout);
    arena_release(&buffers.arena);
}

typedef struct World {
    const CollectiveSpec *spec;
    CollectiveResult *results; // (ranks)
} World;

static void run_world_rank(Transport *transport, void *context) {
    World *world = (World *)context;
    run_collectives(world->spec, transport, &world->results[transport->rank]);
}

// Runs body on `ranks` ranks. False where this world does not have `ranks` ranks.
static bool run_ranks(int ranks, ThreadsBody body, void *context) {
    if (process_transport->size == 1) {
        threads_run(ranks, body, context);
    } else if (process_transport->size == ranks) {
        body(process_transport, context);
    }
    return process_transport->size == 1 || process_transport->size == ranks;
}

static bool run_world(const CollectiveSpec *spec, int ranks, CollectiveResult *results) {
    World world = {spec, results};
    memset(results, 0, sizeof(CollectiveResult) * (size_t)ranks);
    return run_ranks(ranks, run_world_rank, &world);
}

static void free_results(CollectiveResult *results, int ranks) {
    for (int i = 0; i < ranks; i++) {
        free(results[i].scattered);
        free(results[i].gathered);
    }
}

// ---- The expected results, by plain loops over whole pieces ---------------------------

// What arrives when `values` (count) travel as one run.
static void through_wire(WireFormat wire, float *values, size_t count) {
    char *message = (char *)malloc(wire_bytes(wire, count) + 1);
    wire_encode(wire, message, values, count);
    wire_decode(wire, values, message, count);
    free(message);
}

// The lowest rank of a rank's host.
static int leader_of(const CollectiveSpec *spec, int rank) {
    return spec->hosts != NULL ? spec->hosts[rank] : rank;
}

// sum (piece) <- what the ranks of one host bring, added up.
static void expected_host_sum(const CollectiveSpec *spec, int ranks, int leader, size_t flat, size_t piece,
                              float *sum) {
    memset(sum, 0, piece * sizeof(float));
    for (int from = 0; from < ranks; from++) {
        if (leader_of(spec, from) != leader) { continue; }
        for (size_t i = 0; i < piece; i++) { sum[i] += contribution(BUFFER_OF, from, flat + i); }
    }
}

static int expected_hosts(const CollectiveSpec *spec, int ranks) {
    int hosts = 0;
    for (int rank = 0; rank < ranks; rank++) { hosts += leader_of(spec, rank) == rank ? 1 : 0; }
    return hosts;
}

// sum (piece) <- what the owner of the piece at `flat` ends with: the sums of the hosts,
// each rounded once, added up.
static void expected_sum(const CollectiveSpec *spec, int ranks, size_t flat, size_t piece, float *sum) {
    float *values = (float *)malloc(piece * sizeof(float));
    bool alone = expected_hosts(spec, ranks) == 1;
    memset(sum, 0, piece * sizeof(float));
    for (int leader = 0; leader < ranks; leader++) {
        if (leader_of(spec, leader) != leader) { continue; }
        expected_host_sum(spec, ranks, leader, flat, piece, values);
        if (!alone) { through_wire(spec->wire, values, piece); }
        for (size_t i = 0; i < piece; i++) { sum[i] = alone ? values[i] : sum[i] + values[i]; }
    }
    free(values);
}

// The place of a rank among those of its host, and how many there are.
static int place_of(const CollectiveSpec *spec, int rank) {
    int place = 0;
    for (int other = 0; other < rank; other++) { place += leader_of(spec, other) == leader_of(spec, rank); }
    return place;
}

static int mates_of(const CollectiveSpec *spec, int ranks, int rank) {
    int mates = 0;
    for (int other = 0; other < ranks; other++) { mates += leader_of(spec, other) == leader_of(spec, rank); }
    return mates;
}

// Whether `rank` adds up, on its host, what goes to `owner`.
static bool is_delegate(const CollectiveSpec *spec, int ranks, int rank, int owner) {
    return place_of(spec, owner) % mates_of(spec, ranks, rank) == place_of(spec, rank) &&
           (leader_of(spec, rank) != leader_of(spec, owner) || rank == owner);
}

// values (piece) <- what a rank that is not the owner has after the reduce-scatter.
static void expected_elsewhere(const CollectiveSpec *spec, int ranks, int rank, int owner, size_t flat,
                               size_t piece, float *values) {
    if (is_delegate(spec, ranks, rank, owner) && mates_of(spec, ranks, rank) > 1) {
        expected_host_sum(spec, ranks, leader_of(spec, rank), flat, piece, values);
    } else {
        for (size_t i = 0; i < piece; i++) { values[i] = contribution(BUFFER_OF, rank, flat + i); }
    }
}

// Pieces that a rank sends to other hosts for one cell: of sums, and of what is gathered.
static uint64_t expected_outside(const CollectiveSpec *spec, int ranks, int rank) {
    uint64_t sums = 0;
    for (int owner = 0; owner < ranks; owner++) {
        sums += owner != rank && is_delegate(spec, ranks, rank, owner) ? 1 : 0;
    }
    return sums + (uint64_t)expected_hosts(spec, ranks) - 1;
}

// values (piece): in, the sum; out, what everybody has of the piece after the all-gather.
static void expected_gather(const CollectiveSpec *spec, int owner, const LayoutRange *piece, float *values) {
    for (size_t i = 0; i < piece->count; i++) {
        if (spec->from_source) { values[i] = contribution(SOURCE_OF, owner, piece->own + i); }
        if (spec->on_base) { values[i] -= contribution(BASE_OF_ALL, 0, piece->flat + i); }
    }
    through_wire(spec->wire, values, piece->count);
    for (size_t i = 0; i < piece->count && spec->on_base; i++) {
        values[i] = contribution(BASE_OF_ALL, 0, piece->flat + i) + values[i];
    }
}

// The sum where a rank owns, what it brought or a part of it elsewhere; then the same on
// all ranks.
// Returns false at the first bit that differs.
static bool check_piece(const CollectiveSpec *spec, const Layout *layout, const CollectiveResult *results,
                        int owner, size_t cell) {
    LayoutRange range = layout_piece(layout, cell, owner);
    size_t piece = range.count, flat = range.flat, bytes = piece * sizeof(float);
    if (piece == 0) { return true; }
    float *values = (float *)malloc(bytes);
    bool good = true;
    for (int rank = 0; rank < layout->size; rank++) {
        if (results[rank].scattered == NULL) { continue; }
        expected_elsewhere(spec, layout->size, rank, owner, flat, piece, values);
        if (rank == owner) { expected_sum(spec, layout->size, flat, piece, values); }
        good = good && memcmp(results[rank].scattered + flat, values, bytes) == 0;
    }
    expected_sum(spec, layout->size, flat, piece, values);
    expected_gather(spec, owner, &range, values);
    for (int rank = 0; rank < layout->size; rank++) {
        good = good &&
               (results[rank].gathered == NULL || memcmp(results[rank].gathered + flat, values, bytes) == 0);
    }
    free(values);
    return good;
}

// In the flat exchange a rank sends what it has for the others, and what it owns to each of them.
static void expect_whole_bytes(const CollectiveSpec *spec, const Layout *layout,
                               const CollectiveResult *results) {
    uint64_t all = 0, owned[MAX_RANKS] = {0};
    for (size_t cell = 0; cell < layout->cells; cell++) {
        for (int rank = 0; rank < layout->size; rank++) {
            uint64_t bytes = wire_bytes(spec->wire, layout_piece(layout, cell, rank).count);
            owned[rank] += bytes;
            all += bytes;
        }
    }
    for (int rank = 0; rank < layout->size && spec->hosts == NULL; rank++) {
        if (results[rank].gathered == NULL) { continue; }
        assert_int_equal(results[rank].bytes_sent, all + owned[rank] * (uint64_t)(layout->size - 2));
    }
}

// Returns false where the world does not fit.
static bool check_world(const CollectiveSpec *spec, int ranks) {
    CollectiveResult results[MAX_RANKS];
    if (!run_world(spec, ranks, results)) { return false; }
    Layout layout = layout_of(spec, ranks);
    for (size_t cell = 0; cell < layout.cells; cell++) {
        for (int owner = 0; owner < ranks; owner++) {
            if (!check_piece(spec, &layout, results, owner, cell)) {
                fail_msg(
                    "%zu elements over %s, %d ranks, buckets of %zu, messages of %zu: cell %zu of rank %d",
                    spec->count, wire_name(spec->wire), ranks, spec->bucket, spec->message, cell, owner);
            }
        }
    }
    uint64_t column = layout.cells * wire_bytes(spec->wire, layout.piece);
    if (spec->matrices > 0) { expect_whole_bytes(spec, &layout, results); }
    for (int rank = 0; rank < ranks; rank++) {
        if (results[rank].gathered == NULL) { continue; }
        assert_true(spec->matrices > 0 ||
                    results[rank].bytes_sent_outside == expected_outside(spec, ranks, rank) * column);
        assert_true(spec->hosts != NULL || results[rank].bytes_sent == results[rank].bytes_sent_outside);
        assert_true(results[rank].seconds >= 0.999 * results[rank].delay);
    }
    free_results(results, ranks);
    layout_free(&layout);
    return true;
}

// ---- Collectives ----------------------------------------------------------------------

// A vector of 1, shards below, at and above one message, and several messages with a
// short last one.
static void collectives_equal_plain_loops_bit_for_bit(void **state) {
    (void)state;
    bool fits = false;
    for (int ranks = 1; ranks <= MAX_FLAT; ranks++) {
        size_t chunk = ((size_t)1 << 18) / (ranks > 1 ? (size_t)ranks - 1 : 1) / LAYOUT_BLOCK * LAYOUT_BLOCK;
        size_t n = (size_t)ranks;
        size_t counts[] = {1, 32 * n, 1003 * n, chunk * n, chunk * n + 32, (2 * chunk + 96) * n};
        for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
            for (int wire = 0; wire < WIRE_FORMAT_COUNT; wire++) {
                if (counts[i] > 500000 && wire % 2 != ranks % 2) { continue; } // long ones: two formats each
                CollectiveSpec spec = {counts[i], (WireFormat)wire, 0, 0, false, false, 0, 0, 0, NULL, 0};
                fits = check_world(&spec, ranks) || fits;
            }
        }
    }
    if (!fits) { skip(); }
}

// One rank owns the whole of a matrix: shards differ, and a chunk may hold a part of a piece,
// several, or none of a rank.
static void whole_matrices_travel_to_their_owners(void **state) {
    (void)state;
    static const int two_hosts[] = {0, 0, 2, 2, 2, 5, 5, 5};
    bool fits = false;
    for (int ranks = 1; ranks <= 5; ranks++) {
        for (int kind = 0; kind < 48; kind++) {
            CollectiveSpec spec = {.count = kind % 2 == 0 ? 30011 : 2500,
                                   .wire = (WireFormat)(kind % WIRE_FORMAT_COUNT),
                                   .bucket = kind % 3 == 0 ? 0 : 3,
                                   .message = kind % 4 == 0   ? 256
                                              : kind % 4 == 1 ? 1024
                                                              : 0,
                                   .from_source = kind / 2 % 2 == 1,
                                   .on_base = kind / 4 % 2 == 1,
                                   .hosts = kind / 8 % 2 == 1 && ranks > 2 ? two_hosts : NULL,
                                   .matrices = kind % 5 == 0 ? 2 : 17};
            fits = check_world(&spec, ranks) || fits;
        }
    }
    if (!fits) { skip(); }
}

// What is spread may stand elsewhere, and may travel as a difference to what all ranks
// hold.
static void what_is_gathered_has_a_source_and_a_base(void **state) {
    (void)state;
    bool fits = false;
    for (int ranks = 1; ranks <= MAX_FLAT; ranks++) {
        for (int kind = 1; kind < 4; kind++) {
            for (int wire = 0; wire < WIRE_FORMAT_COUNT; wire++) {
                CollectiveSpec spec = {
                    30011, (WireFormat)wire, 0, 0, kind % 2 == 1, kind / 2 == 1, 0, 0, 0, NULL, 0};
                fits = check_world(&spec, ranks) || fits;
            }
        }
    }
    if (!fits) { skip(); }
}

// How a vector is cut into buckets and messages changes nothing: check_world compares
// with whole pieces. The pieces of 70001 elements are longer than these messages, those
// of 9001 are shorter.
static void buckets_and_messages_change_no_bit(void **state) {
    (void)state;
    static const size_t counts[] = {9001, 70001}, buckets[] = {3, 7, 64}, messages[] = {256, 512, 1024};
    bool fits = false;
    for (int ranks = 1; ranks <= MAX_FLAT; ranks++) {
        for (int i = 0; i < 12; i++) {
            WireFormat wire = (WireFormat)(i % WIRE_FORMAT_COUNT);
            CollectiveSpec spec = {counts[i % 5 % 2],
                                   wire,
                                   buckets[i % 3],
                                   messages[i / 4],
                                   i % 5 < 2,
                                   i / 2 % 2 == 1,
                                   0,
                                   0,
                                   0,
                                   NULL,
                                   0};
            fits = check_world(&spec, ranks) || fits;
        }
    }
    if (!fits) { skip(); }
}

// Hosts with equally many ranks, with unequally many, with ranks that do not follow each
// other, and a single host. Messages shorter and longer than a piece.
static const struct {
    int ranks, leaders[MAX_RANKS];
} HOSTS[] = {
    {4, {0, 0, 2, 2}},
    {4, {0, 1, 0, 1}},
    {6, {0, 0, 0, 3, 3, 3}},
    {6, {0, 0, 2, 2, 4, 4}},
    {5, {0, 0, 2, 2, 4}},
    {5, {0, 1, 1, 1, 1}},
    {7, {0, 0, 0, 3, 0, 3, 6}},
    {8, {0, 0, 0, 0, 4, 4, 4, 4}},
    {8, {0, 0, 2, 2, 4, 4, 6, 6}},
    {3, {0, 0, 0}},
};

static void two_levels_equal_plain_loops_bit_for_bit(void **state) {
    (void)state;
    static const size_t counts[] = {1, 9001, 70001}, messages[] = {256, 1024, 0};
    bool fits = false;
    for (size_t i = 0; i < sizeof HOSTS / sizeof HOSTS[0]; i++) {
        for (int wire = 0; wire < WIRE_FORMAT_COUNT; wire++) {
            for (int kind = 0; kind < 3; kind++) {
                CollectiveSpec spec = {counts[(kind + wire) % 3],
                                       (WireFormat)wire,
                                       kind == 1 ? 7 : 0,
                                       messages[kind],
                                       kind != 1,
                                       (wire + kind) % 2 == 1,
                                       kind == 2 ? 1e-3 : 0,
                                       0,
                                       0,
                                       HOSTS[i].leaders,
                                       0};
                fits = check_world(&spec, HOSTS[i].ranks) || fits;
            }
        }
    }
    if (!fits) { skip(); }
}

// The delays do happen: check_world compares the time taken with the numbers drawn.
static void delays_change_no_bit(void **state) {
    (void)state;
    bool fits = false;
    for (int ranks = 2; ranks <= MAX_FLAT; ranks++) {
        CollectiveSpec spec = {20011, WIRE_BF16, 30, 256, false, false, 5e-3, 0, 0, NULL, 0};
        fits = check_world(&spec, ranks) || fits;
    }
    if (!fits) { skip(); }
}

// A collective on a range of a vector touches nothing else.
static void run_partly(Transport *transport, void *context) {
    bool *good = (bool *)context;
    CollectiveSpec spec = {9001, WIRE_INT8, 0, 256, false, false, 0, 0, 0, NULL, 0};
    Layout layout = layout_make(spec.count, transport->size);
    size_t first = layout_cell_begin(&layout, 3), last = layout_cell_begin(&layout, 9);
    Buffers buffers;
    open_buffers(&buffers, &spec, &layout, transport);
    Collective collective = {
        .layout = &layout, .first = 3, .end = 9, .wire = spec.wire, .buffer = buffers.buffer};
    host_exchange(transport, &collective, REDUCE_SCATTER);
    host_exchange(transport, &collective, ALL_GATHER);
    good[transport->rank] = true;
    for (size_t i = 0; i < layout_padded(&layout); i++) {
        bool same = buffers.buffer[i] == contribution(BUFFER_OF, transport->rank, i);
        good[transport->rank] = good[transport->rank] && (same || (i >= first && i < last));
    }
    arena_release(&buffers.arena);
}

static void a_range_touches_nothing_else(void **state) {
    (void)state;
    bool fits = false;
    for (int ranks = 1; ranks <= MAX_FLAT; ranks++) {
        bool good[MAX_RANKS] = {false};
        bool ran = run_ranks(ranks, run_partly, good);
        fits = ran || fits;
        for (int rank = 0; rank < ranks && ran; rank++) {
            assert_true(good[rank] || (process_transport->size > 1 && rank != process_transport->rank));
        }
    }
    if (!fits) { skip(); }
}

// ---- Records --------------------------------------------------------------------------

enum { RECORD_RANKS = 20 };

typedef struct RecordCheck {
    int ranks_per_host;
    bool by_turns; // neighbours are on different hosts, as with mpirun --map-by node
    bool good[RECORD_RANKS];
} RecordCheck;

// Records of odd sizes, one after another, come in the order of ranks; then a barrier.
// Where every rank is a host of its own, each sends every record of others at most once.
static void gather_records(Transport *transport, void *context) {
    RecordCheck *check = (RecordCheck *)context;
    unsigned char mine[77], all[RECORD_RANKS * 77];
    bool good = true;
    join_hosts(transport, check->ranks_per_host);
    int hosts = transport->hosts.hosts;
    if (check->by_turns) { transport_meet(transport, transport->rank % hosts); }
    for (size_t bytes = 1; bytes <= sizeof mine; bytes += 19) {
        memset(mine, 8 * transport->rank + (int)bytes % 8, bytes);
        uint64_t before = transport->bytes_sent;
        transport_all_gather_records(transport, "a test", mine, all, bytes);
        for (size_t i = 0; i < bytes * (size_t)transport->size; i++) {
            good = good && all[i] == (unsigned char)(8 * (int)(i / bytes) + (int)bytes % 8);
        }
        bool once = transport->bytes_sent - before == (uint64_t)(transport->size - 1) * bytes;
        good = good && (once || check->ranks_per_host > 0);
    }
    double timeout = transport->timeout_seconds;
    transport_barrier_patiently(transport, "a test", 10 * timeout);
    check->good[transport->rank] = good && transport->timeout_seconds == timeout; // patience ends with it
}

static void records_come_in_the_order_of_ranks(void **state) {
    (void)state;
    static const int worlds[] = {1, 2, 3, 4, 9, RECORD_RANKS};
    bool fits = false;
    for (int i = 0; i < 30; i++) {
        int ranks = worlds[i / 5], kind = i % 5;
        RecordCheck check;
        memset(&check, 0, sizeof check);
        check.ranks_per_host = kind == 0 ? 0 : 2 + kind % 2;
        check.by_turns = kind > 2;
        bool ran = run_ranks(ranks, gather_records, &check);
        fits = ran || fits;
        for (int rank = 0; rank < ranks && ran; rank++) {
            assert_true(check.good[rank] || (process_transport->size > 1 && rank != process_transport->rank));
        }
    }
    if (!fits) { skip(); }
}

// ---- What ranks agree on ----------------------------------------------------------------

typedef struct Agreement {
    int exit_codes[4];
    int rank[4], exit_code[4]; // what each rank is told
    char said[4][64];
    double folded[4];
    char shared[4], met[4][64];
    int hosts[4];
} Agreement;

static double fold_in_order(double a, double b) { return 10 * a + b; }

static void agree(Transport *transport, void *context) {
    Agreement *agreement = (Agreement *)context;
    int rank = transport->rank;
    Error error = {""};
    Verdict verdict;
    memset(&verdict, 0, sizeof verdict);
    snprintf(transport->host, sizeof transport->host, "pc%d", rank);
    if (agreement->exit_codes[rank] != 0) { error_set(&error, "no %d", rank); }
    agreement->rank[rank] =
        transport_first_failure(transport, "a test", agreement->exit_codes[rank], &error, &verdict);
    agreement->exit_code[rank] = verdict.exit_code;
    snprintf(agreement->said[rank], sizeof agreement->said[rank], "%.20s: %.30s", verdict.host,
             verdict.error.text);
    agreement->folded[rank] = transport_fold(transport, "a test", rank + 1, fold_in_order);
    agreement->shared[rank] = (char)('a' + rank);
    transport_meet(transport, rank - rank % 2);
    agreement->hosts[rank] = transport->hosts.hosts;
    for (int i = 0; i < 4; i++) {
        text_join(agreement->met[rank], sizeof agreement->met[rank], " ", "%s:%d", transport->met[i].name,
                  transport->met[i].leader);
    }
    share_from_rank_zero(transport, "a test", &agreement->shared[rank], 1);
}

// All ranks are told of the first one that failed, what it says and on which host it is; and where
// each of them is.
static void all_ranks_hear_of_the_first_failure(void **state) {
    (void)state;
    if (process_transport->size > 1) { skip(); }
    static const struct {
        int exit_codes[4], rank, exit_code;
        const char *said;
    } cases[] = {{{0, 0, 0, 0}, -1, 0, ": "},
                 {{0, 2, 0, 3}, 1, 2, "pc1: no 1"},
                 {{3, 2, 2, 2}, 0, 3, "pc0: no 0"},
                 {{0, 0, 0, 3}, 3, 3, "pc3: no 3"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Agreement agreement;
        memset(&agreement, 0, sizeof agreement);
        memcpy(agreement.exit_codes, cases[i].exit_codes, sizeof agreement.exit_codes);
        threads_run(4, agree, &agreement);
        for (int rank = 0; rank < 4; rank++) {
            assert_int_equal(agreement.rank[rank], cases[i].rank);
            assert_int_equal(agreement.exit_code[rank], cases[i].exit_code);
            assert_string_equal(agreement.said[rank], cases[i].said);
            assert_true(agreement.folded[rank] == 1234 && agreement.shared[rank] == 'a');
            assert_int_equal(agreement.hosts[rank], 2);
            assert_string_equal(agreement.met[rank], "pc0:0 pc1:0 pc2:2 pc3:2");
        }
    }
}

// ---- Many ranks -----------------------------------------------------------------------

enum { MANY_RANKS = 64 };

typedef struct ManyRanks {
    int ranks_per_host;
    int records[MANY_RANKS], vectors[MANY_RANKS]; // messages that each rank sends
    bool good[MANY_RANKS];
} ManyRanks;

static void count_messages(Transport *transport, void *context) {
    ManyRanks *many = (ManyRanks *)context;
    ThreadsRank *self = (ThreadsRank *)transport->link.state;
    int rank = transport->rank, size = transport->size, all[MANY_RANKS];
    join_hosts(transport, many->ranks_per_host);
    int before = self->messages;
    transport_all_gather_records(transport, "a test", &rank, all, sizeof rank);
    many->records[rank] = self->messages - before;
    many->good[rank] = true;
    for (int i = 0; i < size; i++) { many->good[rank] = many->good[rank] && all[i] == i; }
    Layout layout = layout_make(32 * (size_t)size, size); // one chunk
    Arena arena;
    Error error = {""};
    Collective collective = {.layout = &layout, .end = layout.cells, .wire = WIRE_BF16};
    memset(&arena, 0, sizeof arena);
    arena_reserve(&arena, MEMORY_COMMUNICATION, "buffer", layout_padded(&layout) * sizeof(float),
                  &collective.buffer);
    host_collectives_reserve(transport, &arena, layout_shard(&layout));
    if (!arena_commit(&arena, &error)) { abort(); }
    for (size_t i = 0; i < layout_padded(&layout); i++) { collective.buffer[i] = 1; }
    before = self->messages;
    host_exchange(transport, &collective, REDUCE_SCATTER);
    many->vectors[rank] = self->messages - before;
    host_exchange(transport, &collective, ALL_GATHER);
    for (size_t i = 0; i < layout_padded(&layout); i++) {
        many->good[rank] = many->good[rank] && collective.buffer[i] == (float)size;
    }
    arena_release(&arena);
}

// Records: one to every other host, inside hosts one from and one to every rank. Vectors: one
// to every rank of the host, and one to every other host.
static void messages_are_few_among_many_ranks(void **state) {
    (void)state;
    if (process_transport->size > 1) { skip(); }
    static const struct {
        int ranks, per_host, records, vectors;
    } rows[] = {{8, 0, 7, 7}, {MANY_RANKS, 0, 63, 63}, {MANY_RANKS, 8, 14, 14}, {MANY_RANKS, 16, 18, 18}};
    for (int i = 0; i < 4; i++) {
        ManyRanks many;
        memset(&many, 0, sizeof many);
        many.ranks_per_host = rows[i].per_host;
        threads_run(rows[i].ranks, count_messages, &many);
        for (int rank = 0; rank < rows[i].ranks; rank++) {
            assert_true(many.good[rank]);
            assert_true(many.records[rank] <= rows[i].records);
            assert_int_equal(many.vectors[rank], rows[i].vectors);
        }
        assert_int_equal(many.records[0], rows[i].records);
    }
}

// What a lane receives in a turn is about a megabyte, and on two levels four; with many ranks the
// messages do not become shorter than 8 kB.
static void messages_are_as_long_as_the_cache_likes(void **state) {
    (void)state;
    static const struct {
        int ranks, per_host;
        size_t elements;
    } rows[] = {{2, 1, 262144}, {3, 1, 131072}, {4, 1, 87296},  {100, 1, 2560}, {129, 1, 2048},
                {500, 1, 2048}, {4, 2, 262144}, {8, 4, 149760}, {500, 8, 2048}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        Transport transport;
        transport_open_supposed(&transport, rows[i].ranks, rows[i].per_host);
        transport.two_level = rows[i].per_host > 1;
        assert_int_equal(host_chunk_elements(&transport), rows[i].elements);
        transport_close(&transport);
    }
}

// By hand: slots of messages, of 256 floats each. In the flat exchange one to and one from every
// other rank. On two levels, of 8 ranks on 2 hosts: one to the other host, two from it, which are
// passed on, and inside the host six in each direction. Two of each where there are several chunks.
static void messages_have_room(void **state) {
    (void)state;
    static const struct {
        int ranks, per_host;
        size_t shard, slots, vectors; // vectors: of the host that a GPU's are staged in, with_base or not
        bool on_gpu, with_base;
    } rows[] = {{1, 1, 3000, 0, 0, false, true},  {3, 1, 256, 2 + 2, 0, false, false},
                {3, 1, 257, 8, 0, false, true},   {8, 4, 200, 1 + 2 + 6 + 6, 0, false, false},
                {8, 4, 3000, 30, 0, false, true}, {1, 1, 3000, 0, 0, true, false},
                {1, 1, 3000, 0, 2, true, true},   {3, 1, 257, 8, 1, true, false},
                {3, 1, 257, 8, 2, true, true}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        Transport transport;
        Arena arena;
        CommBackend comm;
        Layout layout = {.count = 1, .size = rows[i].ranks, .piece = rows[i].shard, .cells = 1};
        memset(&arena, 0, sizeof arena);
        memset(&comm, 0, sizeof comm);
        transport_open_supposed(&transport, rows[i].ranks, rows[i].per_host);
        transport.two_level = rows[i].per_host > 1;
        transport.messages.limit = 256;
        comm.transport = &transport;
        comm.on_gpu = arena.on_gpu = rows[i].on_gpu;
        comm_reserve(&comm, &arena, &layout, rows[i].with_base);
        size_t vector = rows[i].shard * (size_t)rows[i].ranks * sizeof(float);
        assert_int_equal(arena_class_bytes(&arena, MEMORY_COMMUNICATION),
                         rows[i].slots * 256 * sizeof(float) + rows[i].vectors * vector);
        assert_true(rows[i].on_gpu ? arena.bytes == 0 : arena.host_bytes == 0); // messages stay on the host
        transport_close(&transport);
    }
}

// By hand: vectors in GPU memory, whose messages are encoded there. Of eight ranks on two hosts
// each owns 1 of 8 and is the delegate of 2; a message begins at a line of 128 bytes.
static void messages_of_nccl_have_room(void **state) {
    (void)state;
    enum { PIECE = 40, CELLS = 10, CELL = 8 * PIECE * 4 };
    static const struct {
        int per_host;
        size_t limit, cells, owners; // limit: bytes of buffer_limit; owners: whose messages there is room for
    } rows[] = {{1, 0, CELLS, 8 + 8}, {1, 4 * CELL, 4, 8 + 8},         {1, 4 * CELL - 1, 3, 8 + 8},
                {1, 5, 1, 8 + 8},     {4, 4 * CELL, 4, 2 + 2 + 8 + 6}, {8, 0, CELLS, 1 + 1 + 8 + 7}};
    const Layout layout = {.count = 8 * PIECE * CELLS, .size = 8, .piece = PIECE, .cells = CELLS};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        Transport transport;
        Arena arena;
        Nccl nccl;
        memset(&nccl, 0, sizeof nccl);
        memset(&arena, 0, sizeof arena);
        nccl.buffer_limit = rows[i].limit;
        transport_open_supposed(&transport, 8, rows[i].per_host);
        transport.two_level = rows[i].per_host > 1;
        nccl_collectives_reserve(&nccl, &transport, &arena, &layout);
        assert_int_equal(nccl.cells, rows[i].cells);
        size_t owner = (rows[i].cells * PIECE * 4 + 127) / 128 * 128;
        assert_int_equal(arena_class_bytes(&arena, MEMORY_COMMUNICATION), rows[i].owners * owner);
        assert_true(nccl.gathered == (rows[i].per_host > 1 ? &nccl.inside_received : &nccl.received));
        transport_close(&transport);
    }
}

// A long vector is copied in several pieces; nothing beside its range is.
static void a_staged_copy_has_several_pieces(void **state) {
    (void)state;
    const size_t begin = 5, end = begin + 2 * (size_t)STAGED_PIECE + 9, count = end + 3;
    float *from = (float *)malloc(2 * count * sizeof *from), *to = from + count;
    Stream stream;
    memset(&stream, 0, sizeof stream);
    for (size_t i = 0; i < count; i++) {
        from[i] = (float)(i % 65521);
        to[i] = -1;
    }
    staged_copy(&stream, to, from, begin, end);
    for (size_t i = 0; i < count; i++) {
        assert_true(to[i] == (i >= begin && i < end ? (float)(i % 65521) : -1));
    }
    free(from);
}

// ---- The emulated link ----------------------------------------------------------------

// A message cannot leave before the emulated link has let it through: a bound that no
// fast machine can beat.
static void the_emulated_link_is_as_slow_as_it_says(void **state) {
    (void)state;
    CollectiveSpec spec = {200000, WIRE_FP32, 0, 0, false, false, 0, 8e6, 0, NULL, 0};
    CollectiveResult results[2];
    if (!run_world(&spec, 2, results)) { skip(); }
    for (int rank = 0; rank < 2; rank++) {
        if (results[rank].gathered != NULL) {
            assert_true(results[rank].seconds >= (double)results[rank].bytes_sent / 8e6 * 0.999);
        }
    }
    free_results(results, 2);
}

// Buckets wait for one another, so each of them is late once in the reduce-scatter and
// once in the all-gather. No bit depends on it.
static void the_emulated_link_is_as_late_as_it_says(void **state) {
    (void)state;
    CollectiveSpec spec = {9001, WIRE_E3M0, 50, 0, false, false, 0, 0, 10e-3, NULL, 0};
    bool fits = false;
    for (int ranks = 2; ranks <= 3; ranks++) {
        CollectiveResult results[MAX_RANKS];
        if (!run_world(&spec, ranks, results)) { continue; }
        Layout layout = layout_make(spec.count, ranks);
        size_t buckets = (layout.cells + spec.bucket - 1) / spec.bucket;
        for (int rank = 0; rank < ranks; rank++) {
            if (results[rank].gathered != NULL) {
                assert_true(results[rank].seconds >= 0.999 * 10e-3 * 2 * (double)buckets);
            }
        }
        free_results(results, ranks);
        fits = check_world(&spec, ranks) || fits;
    }
    if (!fits) { skip(); }
}

// Messages leave one after the other at the rate of the link; each is late by the latency alone.
static void latencies_of_messages_do_not_add_up(void **state) {
    (void)state;
    Transport transport;
    char message[1000];
    transport_open_supposed(&transport, 2, 1);
    transport.link_bytes_per_second = sizeof message; // a second for each
    transport.link_latency = 5;
    double free_at = transport.link_free_at = clock_seconds() + 1000;
    for (int i = 0; i < TRANSPORT_LANES; i++) {
        const Lane lane = {BETWEEN_HOSTS, i};
        transport_post(&transport, lane, true, 1, message, sizeof message);
        double start_at = transport_transfer(&transport, lane, true, 1)->start_at;
        assert_close(start_at - free_at, i + 1 + 5, 1e-6, "seconds until a message leaves");
    }
    transport_close(&transport);
}

typedef struct Measures {
    double link_bytes_per_second, link_latency;
    LinkMeasure of[MAX_RANKS];
} Measures;

static void measure_link(Transport *transport, void *context) {
    Measures *measures = (Measures *)context;
    transport->link_bytes_per_second = measures->link_bytes_per_second;
    transport->link_latency = measures->link_latency;
    measures->of[transport->rank] = link_measure(transport, false);
    LinkMeasure mine = measures->of[transport->rank], all[MAX_RANKS];
    transport->link_bytes_per_second = transport->link_latency = 0;
    transport_all_gather_records(transport, "a test", &mine, all, sizeof mine);
    for (int rank = 0; rank < transport->size; rank++) {
        bool same = memcmp(&all[rank], &mine, sizeof mine) == 0;
        if (!same) { measures->of[transport->rank].rate = -1; } // fails below
    }
}

// All ranks get the same numbers. A link can only seem faster than it is by the noise of
// the latency that is subtracted. On a busy machine it may seem far slower, so the bound
// is wide on that side.
static void a_measured_link_is_the_emulated_one_on_all_ranks(void **state) {
    (void)state;
    static const double rates[] = {2e6, 0, 20e6}, latencies[] = {0, 10e-3, 2e-3};
    bool fits = false;
    for (int i = 0; i < 3; i++) {
        int ranks = 2 + i;
        Measures measures;
        memset(&measures, 0, sizeof measures);
        measures.link_bytes_per_second = rates[i];
        measures.link_latency = latencies[i];
        if (!run_ranks(ranks, measure_link, &measures)) { continue; }
        fits = true;
        for (int rank = 0; rank < ranks; rank++) {
            LinkMeasure measure = measures.of[rank];
            if (measure.latency == 0) { continue; } // another process
            assert_true(measure.rate > 0 && measure.latency >= latencies[i]);
            if (rates[i] > 0) {
                assert_true(measure.rate < 1.5 * rates[i] && measure.rate > 0.02 * rates[i]);
            }
        }
    }
    if (!fits) { skip(); }
}

// What a checkpoint remembers of the order in which sums are added, and what users see of hosts.
static void the_order_of_sums_has_a_name(void **state) {
    (void)state;
    static const struct {
        int leaders[4];
        bool two_level, library;
        const char *begins, *hosts;
    } cases[] = {
        {{0, 0, 2, 2}, true, false, "2 hosts, ", "2 hosts of 2 ranks"},
        {{0, 1, 0, 1}, true, false, "2 hosts, ", "2 hosts of 2 ranks"},
        {{0, 0, 0, 3}, true, false, "2 hosts, ", "2 hosts of 1 to 3 ranks"},
        {{0, 0, 0, 0}, true, false, "1 hosts, ", "1 host of 4 ranks"},
        {{0, 1, 2, 3}, true, false, "flat", "4 hosts of 1 rank"},
        {{0, 1, 2, 2}, false, false, "flat", "3 hosts of 1 to 2 ranks"},
        {{0, 0, 2, 2}, true, true, "library", "2 hosts of 2 ranks"},
    };
    enum { CASES = sizeof cases / sizeof cases[0] };
    char names[CASES][64], hosts[64];
    for (int i = 0; i < CASES; i++) {
        const Link none = {.name = "none"};
        Transport transport;
        transport_prepare(&transport, 1, 4, 1, &none, "a test");
        groups_free(&transport.hosts);
        groups_make(&transport.hosts, 1, 4, cases[i].leaders);
        transport.two_level = cases[i].two_level;
        transport.library = cases[i].library;
        transport_sum_order(&transport, names[i], sizeof names[i]);
        groups_describe(&transport.hosts, hosts, sizeof hosts);
        assert_string_equal(hosts, cases[i].hosts);
        transport_close(&transport);
        assert_memory_equal(names[i], cases[i].begins, strlen(cases[i].begins));
        for (int j = 0; j < i && i < 4; j++) { assert_string_not_equal(names[i], names[j]); }
    }
}

static void a_world_of_one_has_no_link(void **state) {
    (void)state;
    Transport alone;
    transport_open_alone(&alone, "a test");
    LinkMeasure measure = link_measure(&alone, false);
    assert_true(measure.latency == 0 && measure.rate == INFINITY && alone.bytes_sent == 0);
    transport_close(&alone);
}

// ---- A rank that does not come --------------------------------------------------------

// Rank 0 of two waits for a rank 1 that never comes.
static void wait_in_vain(const void *context) {
    (void)context;
    ThreadsRank self = {threads_world_create(2), 0, 0};
    Transport transport;
    threads_open(&transport, &self);
    transport.timeout_seconds = 0.3;
    transport.commit = 12;
    transport_barrier(&transport, "a barrier");
}

static void a_rank_that_does_not_arrive_is_named(void **state) {
    (void)state;
    if (process_transport->size > 1) { skip(); }
    char message[2048];
    int status = run_in_child(wait_in_vain, NULL, message, sizeof message);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), EXIT_SYSTEM_FAILURE);
    assert_non_null(strstr(message, "rank 0 of 2 on "));
    assert_non_null(strstr(message, "commit 12"));
    assert_non_null(strstr(message, "a barrier: rank 1 did not arrive"));
    assert_non_null(strstr(message, "--timeout-s"));
}

// Ranks 0, 1 and 2 share a host, and 2 comes a little late; rank 3, on another host, never does.
static void *wait_for_another_host(void *rank) {
    Transport transport;
    threads_open(&transport, (ThreadsRank *)rank);
    groups_free(&transport.hosts);
    groups_make_even(&transport.hosts, transport.rank, transport.size, 3);
    transport.two_level = true;
    transport.timeout_seconds = 2;
    if (transport.rank == 2) { sleep_seconds(0.5); }
    transport_barrier(&transport, "a barrier");
    return NULL;
}

static void wait_on_two_levels(const void *context) {
    ThreadsWorld *world = threads_world_create(4);
    ThreadsRank ranks[3] = {{world, 0, 0}, {world, 1, 0}, {world, 2, 0}};
    pthread_t threads[3];
    (void)context;
    for (int i = 0; i < 3; i++) { pthread_create(&threads[i], NULL, wait_for_another_host, &ranks[i]); }
    for (int i = 0; i < 3; i++) { pthread_join(threads[i], NULL); }
}

// The rank on the other host is to blame, and not rank 0, although rank 1 has waited longer for it.
static void a_mate_that_waits_itself_is_not_blamed(void **state) {
    (void)state;
    if (process_transport->size > 1) { skip(); }
    char message[2048];
    int status = run_in_child(wait_on_two_levels, NULL, message, sizeof message);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SYSTEM_FAILURE);
    if (strstr(message, "a barrier between hosts: rank 3 did not arrive") == NULL) {
        fail_msg("%s", message);
    }
}

// ---- What is said of ranks that do not come ---------------------------------------------

// Messages that never end: from ranks 1 to `receives`, and to ranks 1 to `sends`.
typedef struct Overdue {
    int receives, sends;
    bool met;
    Level level;
    const char *said;
} Overdue;

static void start_nothing(void *state, LinkRequest *request, bool is_send, int peer, void *data,
                          size_t bytes) {
    (void)state, (void)request, (void)is_send, (void)peer, (void)data, (void)bytes;
}

static void fail_overdue(const void *context) {
    const Overdue *overdue = (const Overdue *)context;
    const Link link = {.name = "none", .start = start_nothing};
    const Lane lane = {overdue->level, 1};
    char message[100];
    Transport transport;
    transport_prepare(&transport, 0, 12, 1, &link, "a test");
    transport.two_level = true;
    transport.operation = "all-gather";
    if (overdue->met) { transport.met = MEMORY_OF(HostRecord, 12); }
    for (int i = 0; i < 12 && overdue->met; i++) {
        snprintf(transport.met[i].name, sizeof transport.met[i].name, "pc%d", i);
    }
    for (int i = 1; i <= overdue->receives; i++) {
        transport_post(&transport, lane, false, i, message, sizeof message);
    }
    for (int i = 1; i <= overdue->sends; i++) { transport_post(&transport, lane, true, i, message, 7); }
    transport_fail_overdue(&transport, lane, 41.6);
}

// Who has not sent is waited for by all; only where all have sent, who has not received is named.
static void ranks_that_are_overdue_are_listed(void **state) {
    (void)state;
    if (process_transport->size > 1) { skip(); }
    static const Overdue cases[] = {
        {2, 3, false, BETWEEN_HOSTS,
         "] all-gather between hosts: rank 1, 2 did not arrive for 42 s (200 bytes outstanding). It, or"},
        {8, 0, false, INSIDE_HOSTS,
         "all-gather inside the host: rank 1, 2, 3, 4, 5, 6, 7, 8 did not arrive for 42 s (800 bytes"},
        {11, 0, false, BETWEEN_HOSTS,
         "rank 1, 2, 3, 4, 5, 6, 7, 8, ... did not arrive for 42 s (1100 bytes outstanding)"},
        {0, 2, true, BETWEEN_HOSTS, "rank 1 on pc1, 2 on pc2 did not take its data for 42 s (14 bytes out"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char message[2048];
        int status = run_in_child(fail_overdue, &cases[i], message, sizeof message);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SYSTEM_FAILURE);
        if (strstr(message, cases[i].said) == NULL) { fail_msg("%s", message); }
    }
}

static void arrive_after_the_deadline(Transport *transport, void *context) {
    (void)context;
    transport->timeout_seconds = 0.05;
    if (transport->rank == 1) { sleep_seconds(0.3); }
    transport_barrier_patiently(transport, "a test", 60);
}

static void wait_patiently(const void *context) {
    (void)context;
    threads_run(2, arrive_after_the_deadline, NULL);
}

static void a_patient_barrier_waits_beyond_the_deadline(void **state) {
    (void)state;
    if (process_transport->size > 1) { skip(); }
    char message[2048];
    int status = run_in_child(wait_patiently, NULL, message, sizeof message);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) { fail_msg("%s", message); }
}

enum { NAPS = 15 }; // of a tenth of a second

static void arrive_late(Transport *transport, void *context) {
    (void)context;
    transport->timeout_seconds = 4;
    for (int nap = 0; nap < NAPS && transport->rank == 1; nap++) { sleep_seconds(0.1); }
    transport_barrier(transport, "a test");
}

// A process that is stopped for longer than its deadline, as when a laptop sleeps, blames nobody.
static void the_time_of_a_stopped_process_does_not_count(void **state) {
    (void)state;
    if (process_transport->size > 1) { skip(); }
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        threads_run(2, arrive_late, NULL);
        _exit(0);
    }
    int status = 0;
    sleep_seconds(0.3);
    kill(child, SIGSTOP);
    sleep_seconds(5);
    kill(child, SIGCONT);
    waitpid(child, &status, 0);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(void) {
    Transport transport;
    Error error = {""};
    if (!transport_open(&transport, &error)) { return 1; }
    process_transport = &transport;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(collectives_equal_plain_loops_bit_for_bit),
        cmocka_unit_test(whole_matrices_travel_to_their_owners),
        cmocka_unit_test(what_is_gathered_has_a_source_and_a_base),
        cmocka_unit_test(buckets_and_messages_change_no_bit),
        cmocka_unit_test(two_levels_equal_plain_loops_bit_for_bit),
        cmocka_unit_test(delays_change_no_bit),
        cmocka_unit_test(a_range_touches_nothing_else),
        cmocka_unit_test(records_come_in_the_order_of_ranks),
        cmocka_unit_test(all_ranks_hear_of_the_first_failure),
        cmocka_unit_test(messages_are_few_among_many_ranks),
        cmocka_unit_test(messages_are_as_long_as_the_cache_likes),
        cmocka_unit_test(messages_have_room),
        cmocka_unit_test(messages_of_nccl_have_room),
        cmocka_unit_test(a_staged_copy_has_several_pieces),
        cmocka_unit_test(the_emulated_link_is_as_slow_as_it_says),
        cmocka_unit_test(the_emulated_link_is_as_late_as_it_says),
        cmocka_unit_test(latencies_of_messages_do_not_add_up),
        cmocka_unit_test(a_measured_link_is_the_emulated_one_on_all_ranks),
        cmocka_unit_test(the_order_of_sums_has_a_name),
        cmocka_unit_test(a_world_of_one_has_no_link),
        cmocka_unit_test(a_rank_that_does_not_arrive_is_named),
        cmocka_unit_test(a_mate_that_waits_itself_is_not_blamed),
        cmocka_unit_test(ranks_that_are_overdue_are_listed),
        cmocka_unit_test(a_patient_barrier_waits_beyond_the_deadline),
        cmocka_unit_test(the_time_of_a_stopped_process_does_not_count),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    transport_close(&transport);
    return failed == 0 ? 0 : 1;
}
