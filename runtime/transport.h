// transport.h: how ranks exchange numbers.
//
// Four operations, called by one thread at a time (the communication stream, once it runs) and in the same order on every rank:
//
//   transport_exchange         a small record from every rank to every rank
//   transport_reduce_scatter   rank r ends with the sum of everybody's r-th shard
//   transport_all_gather       everybody ends with every rank's shard
//   transport_barrier          nobody leaves before all have come
//
// They are built here from point-to-point messages, the only thing a Link must offer (none for a world of one, MPI, threads in tests).
// Each rank sends a shard straight to its owner, chunk by chunk, and the owner adds the chunks in the order of ranks, in fp32. A ring moves
// the same number of bytes, but its order of summation differs from shard to shard and a narrow wire would round every partial sum; here
// a value is rounded once, the sum is the same for every owner, and it is the sum that a plain loop over the workers gives, bit for bit.
// Chunks are small enough to be added while they are in the cache, and two are under way at any time.
//
// A rank that waits does not spin: it sleeps between looks for an eighth of the time it has already waited, 5 ms at most, so that the
// compute threads keep their cores. Every wait has a deadline; when it passes, transport_fail names what was awaited from whom and ends the whole job.
#ifndef ACCO_TRANSPORT_H
#define ACCO_TRANSPORT_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device.h"
#include "errors.h"
#include "memory.h"
#include "random.h"

typedef enum WireFormat { WIRE_FP32, WIRE_BF16 } WireFormat;

static inline size_t wire_bytes(WireFormat wire) { return wire == WIRE_BF16 ? 2 : 4; }

// The request of a link that is under way; room for what any link needs to recognise it.
typedef struct LinkRequest {
    void *words[4];
} LinkRequest;

// Point-to-point messages. Messages between two ranks arrive in the order in which they were started.
typedef struct Link {
    const char *name;
    void *state;
    void (*start_send)(void *state, LinkRequest *request, int peer, const void *data, size_t bytes);
    void (*start_receive)(void *state, LinkRequest *request, int peer, void *data, size_t bytes);
    bool (*is_done)(void *state, LinkRequest *request); // also makes progress; true once, then the request is gone
    void (*abort)(void *state, int exit_code);          // ends every rank; does not return
    void (*close)(void *state);
} Link;

typedef enum TransferState { TRANSFER_NONE, TRANSFER_DELAYED, TRANSFER_ACTIVE } TransferState;

typedef struct Transfer {
    TransferState state;
    bool is_send;
    int peer;
    void *data;
    size_t bytes;
    double start_at; // clock_seconds() at which an emulated link lets the message through
    LinkRequest request;
} Transfer;

// Two lanes: while the chunk in one is added up, the next one is on its way in the other.
enum { TRANSPORT_LANES = 2, TRANSPORT_MAX_LISTED = 8 };

// How long a wait looks without sleeping: about as long as a chunk takes between two ranks of one machine.
#define TRANSPORT_SPIN_SECONDS 50e-6

typedef struct Transport {
    int rank, size;
    int local_rank, local_size; // among the ranks of this node
    char host[64];
    const char *reason; // why this link was chosen, for the start-up block
    Link link;
    WireFormat wire;
    double timeout_seconds;
    double chaos_seconds;  // before every operation: a random delay up to this, to show that results do not depend on time
    double link_bytes_per_second; // 0: as fast as it goes; otherwise messages leave through a token bucket of this rate
    Random chaos;
    // Where we are, for messages.
    int64_t commit;
    const char *operation;
    Transfer *transfers; // (lanes, 2, size): receives, then sends
    // Chunk buffers, reserved in the arena.
    size_t chunk;          // elements of one message
    char *receive_buffers; // (lanes, size - 1, chunk) elements of the wire, one slot for each other rank
    char *send_buffers;    // the same; only for a wire that is not fp32
    // Measured.
    uint64_t bytes_sent; // atomic: others look at it for progress
    double link_free_at;
} Transport;

// Prints one line that says where this happened and what to do, and ends all ranks with EXIT_SYSTEM_FAILURE. Any thread may call it.
PRINTF_LIKE(2, 3) static inline void transport_fail(Transport *transport, const char *format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fflush(stdout);
    fprintf(stderr, "train_gpt: [rank %d of %d on %s, commit %lld] %s\n", transport->rank, transport->size, transport->host,
            (long long)transport->commit, text);
    fflush(stderr);
    if (transport->link.abort != NULL) { transport->link.abort(transport->link.state, EXIT_SYSTEM_FAILURE); }
    _exit(EXIT_SYSTEM_FAILURE);
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// bfloat16 as a wire format: the upper half of an fp32, rounded to nearest even; NaN stays NaN.

static inline uint16_t bf16_from_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uint32_t quiet = (bits >> 16) | 0x40u;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

static inline float bf16_to_float(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline void bf16_encode(uint16_t *out, const float *in, size_t count) {
#pragma omp simd
    for (size_t i = 0; i < count; i++) { out[i] = bf16_from_float(in[i]); }
}

static inline void bf16_decode(float *out, const uint16_t *in, size_t count) {
#pragma omp simd
    for (size_t i = 0; i < count; i++) { out[i] = bf16_to_float(in[i]); }
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// Opening

// What every link does once it knows rank and size.
static inline void transport_prepare(Transport *transport) {
    transport->operation = "start";
    transport->timeout_seconds = 300;
    transport->chaos.state = 77u + (uint64_t)transport->rank;
    transport->transfers = (Transfer *)calloc((size_t)(TRANSPORT_LANES * 2 * transport->size), sizeof(Transfer));
    gethostname(transport->host, sizeof transport->host - 1);
}

// A world of one: every operation returns at once.
static inline void transport_open_alone(Transport *transport, const char *reason) {
    memset(transport, 0, sizeof *transport);
    transport->size = transport->local_size = 1;
    transport->link.name = "alone";
    transport->reason = reason;
    transport_prepare(transport);
}

static inline void transport_close(Transport *transport) {
    free(transport->transfers);
    transport->transfers = NULL;
    if (transport->link.close != NULL) { transport->link.close(transport->link.state); }
}

// About 1 MB of received chunks per lane: they are added while they are in the second-level cache.
static inline size_t transport_chunk_elements(int size) {
    size_t chunk = ((size_t)1 << 18) / (size_t)(size > 1 ? size - 1 : 1);
    return chunk < 8192 ? 8192 : chunk / 32 * 32;
}

// Reserves the chunk buffers for exchanging shards of `shard` elements.
static inline void transport_reserve(Transport *transport, Arena *arena, size_t shard) {
    if (transport->size == 1) { return; }
    size_t limit = transport_chunk_elements(transport->size), chunks = (shard + limit - 1) / limit;
    transport->chunk = ((shard + chunks - 1) / chunks + 31) / 32 * 32; // about equal, so that what is planned is used
    size_t slots = (size_t)(chunks < TRANSPORT_LANES ? 1 : TRANSPORT_LANES) * (size_t)(transport->size - 1);
    size_t bytes = slots * transport->chunk * wire_bytes(transport->wire);
    arena_reserve(arena, MEMORY_EXCHANGE, "chunks being received", bytes, &transport->receive_buffers);
    if (transport->wire != WIRE_FP32) { arena_reserve(arena, MEMORY_EXCHANGE, "chunks being sent", bytes, &transport->send_buffers); }
}

static inline Transfer *transport_transfer(Transport *transport, int lane, bool is_send, int peer) {
    return &transport->transfers[(lane * 2 + (is_send ? 1 : 0)) * transport->size + peer];
}

// The slot of another rank: slots are in the order in which ranks follow this one.
static inline char *transport_slot(const Transport *transport, char *buffers, int lane, int peer) {
    size_t others = (size_t)(transport->size - 1), slot = (size_t)(peer - transport->rank - 1 + transport->size) % (size_t)transport->size;
    assert(slot < others);
    return buffers + ((size_t)lane * others + slot) * transport->chunk * wire_bytes(transport->wire);
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// Messages

static inline void transport_start_transfer(Transport *transport, Transfer *transfer) {
    Link *link = &transport->link;
    if (transfer->is_send) {
        link->start_send(link->state, &transfer->request, transfer->peer, transfer->data, transfer->bytes);
    } else {
        link->start_receive(link->state, &transfer->request, transfer->peer, transfer->data, transfer->bytes);
    }
    transfer->state = TRANSFER_ACTIVE;
}

// When the emulated link has let `bytes` through: messages leave one after another at its rate.
static inline double transport_departure(Transport *transport, size_t bytes) {
    double now = clock_seconds();
    if (transport->link_free_at < now) { transport->link_free_at = now; }
    transport->link_free_at += (double)bytes / transport->link_bytes_per_second;
    return transport->link_free_at;
}

static inline void transport_post(Transport *transport, int lane, bool is_send, int peer, void *data, size_t bytes) {
    Transfer *transfer = transport_transfer(transport, lane, is_send, peer);
    assert(transfer->state == TRANSFER_NONE);
    transfer->is_send = is_send;
    transfer->peer = peer;
    transfer->data = data;
    transfer->bytes = bytes;
    if (is_send) { __atomic_fetch_add(&transport->bytes_sent, bytes, __ATOMIC_RELAXED); }
    if (is_send && transport->link_bytes_per_second > 0) {
        transfer->start_at = transport_departure(transport, bytes);
        transfer->state = TRANSFER_DELAYED;
    } else {
        transport_start_transfer(transport, transfer);
    }
}

// Looks at one transfer; true when it has ended.
static inline bool transport_advance(Transport *transport, Transfer *transfer) {
    if (transfer->state == TRANSFER_DELAYED && clock_seconds() >= transfer->start_at) { transport_start_transfer(transport, transfer); }
    if (transfer->state == TRANSFER_ACTIVE && transport->link.is_done(transport->link.state, &transfer->request)) {
        transfer->state = TRANSFER_NONE;
        return true;
    }
    return false;
}

// Names the ranks that the deadline caught: those we still expect something from, else those that do not take what we send.
static inline void transport_fail_overdue(Transport *transport, int lane, double waited) {
    for (int is_send = 0; is_send < 2; is_send++) {
        char list[256] = "";
        int listed = 0;
        size_t bytes = 0;
        for (int peer = 0; peer < transport->size; peer++) {
            Transfer *transfer = transport_transfer(transport, lane, is_send == 1, peer);
            if (transfer->state == TRANSFER_NONE) { continue; }
            bytes += transfer->bytes;
            size_t used = strlen(list);
            if (listed++ < TRANSPORT_MAX_LISTED) { snprintf(list + used, sizeof list - used, "%s%d", used > 0 ? ", " : "", peer); }
        }
        if (listed > 0) {
            transport_fail(transport,
                           "%s: rank %s%s did not %s for %.0f s (%zu bytes outstanding). It may have died, hang, or be much slower than "
                           "the others: look at its node; --timeout-s sets how long to wait",
                           transport->operation, list, listed > TRANSPORT_MAX_LISTED ? ", ..." : "",
                           is_send == 1 ? "take its data" : "arrive", waited, bytes);
        }
    }
}

// Waits until all transfers of a lane have ended. Sleeps between looks, longer the longer nothing happens.
static inline void transport_wait(Transport *transport, int lane) {
    Transfer *transfers = transport_transfer(transport, lane, false, 0);
    int count = 2 * transport->size;
    double began = clock_seconds();
    double progressed = began, looked = began;
    for (;;) {
        int open = 0;
        bool progress = false;
        for (int i = 0; i < count; i++) {
            if (transfers[i].state == TRANSFER_NONE) { continue; }
            if (transport_advance(transport, &transfers[i])) {
                progress = true;
            } else {
                open++;
            }
        }
        if (open == 0) { return; }
        double now = clock_seconds();
        if (now - looked > 1) { began += now - looked; } // this process itself was stopped: the others are not to blame
        looked = now;
        if (progress) { progressed = now; }
        if (now - began > transport->timeout_seconds) { transport_fail_overdue(transport, lane, now - began); }
        double waited = now - progressed;
        if (waited > TRANSPORT_SPIN_SECONDS) { sleep_seconds(fmin(fmax(waited / 8, 50e-6), 5e-3)); }
    }
}

// Peers in an order in which no two ranks start with the same one.
static inline int transport_peer(const Transport *transport, int step) { return (transport->rank + step) % transport->size; }

static inline void transport_begin(Transport *transport, const char *operation) {
    transport->operation = operation;
    if (transport->chaos_seconds > 0) { sleep_seconds(transport->chaos_seconds * random_uniform(&transport->chaos)); }
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// Operations

// all (size, bytes): the records of all ranks in the order of ranks; `mine` (bytes) is this rank's. Also tells who has arrived.
static inline void transport_exchange(Transport *transport, const char *operation, const void *mine, void *all, size_t bytes) {
    memcpy((char *)all + (size_t)transport->rank * bytes, mine, bytes);
    if (transport->size == 1) { return; }
    transport_begin(transport, operation);
    for (int step = 1; step < transport->size; step++) {
        int peer = transport_peer(transport, step);
        transport_post(transport, 0, false, peer, (char *)all + (size_t)peer * bytes, bytes);
        transport_post(transport, 0, true, peer, (char *)all + (size_t)transport->rank * bytes, bytes);
    }
    transport_wait(transport, 0);
}

static inline void transport_barrier(Transport *transport, const char *operation) {
    char mine = 0;
    char *all = (char *)malloc((size_t)transport->size);
    transport_exchange(transport, operation, &mine, all, 1);
    free(all);
}

// Elements of chunk `index` of a shard of `shard` elements; 0 past the end.
static inline size_t transport_chunk_size(const Transport *transport, size_t shard, size_t index) {
    size_t begin = index * transport->chunk;
    if (begin >= shard) { return 0; }
    return shard - begin < transport->chunk ? shard - begin : transport->chunk;
}

static inline void transport_post_scatter(Transport *transport, const float *buffer, size_t shard, size_t index) {
    int lane = (int)(index % TRANSPORT_LANES);
    size_t count = transport_chunk_size(transport, shard, index);
    size_t bytes = count * wire_bytes(transport->wire);
    for (int step = 1; step < transport->size && count > 0; step++) {
        int to = transport_peer(transport, step);
        int from = transport_peer(transport, transport->size - step);
        const float *piece = buffer + (size_t)to * shard + index * transport->chunk;
        void *data = (void *)piece;
        if (transport->wire == WIRE_BF16) {
            data = transport_slot(transport, transport->send_buffers, lane, to);
            bf16_encode((uint16_t *)data, piece, count);
        }
        transport_post(transport, lane, false, from, transport_slot(transport, transport->receive_buffers, lane, from), bytes);
        transport_post(transport, lane, true, to, data, bytes);
    }
}

static inline void transport_add_fp32(float *sum, const float *in, size_t count) {
#pragma omp simd
    for (size_t i = 0; i < count; i++) { sum[i] += in[i]; }
}

static inline void transport_add_bf16(float *sum, const uint16_t *in, size_t count) {
#pragma omp simd
    for (size_t i = 0; i < count; i++) { sum[i] += bf16_to_float(in[i]); }
}

// mine[i] <- sum over ranks of their i-th element, in the order of ranks, each rounded once to the wire.
static inline void transport_sum_chunk(Transport *transport, float *mine, int lane, size_t count) {
    enum { BLOCK = 1024 };
    float own[BLOCK], sum[BLOCK];
    uint16_t own_half[BLOCK];
    for (size_t begin = 0; begin < count; begin += BLOCK) {
        size_t n = count - begin < (size_t)BLOCK ? count - begin : (size_t)BLOCK;
        memcpy(own, mine + begin, n * sizeof(float));
        memset(sum, 0, sizeof sum);
        for (int rank = 0; rank < transport->size; rank++) {
            bool is_own = rank == transport->rank;
            const void *slot = is_own ? NULL : transport_slot(transport, transport->receive_buffers, lane, rank);
            if (transport->wire == WIRE_FP32) {
                transport_add_fp32(sum, is_own ? own : (const float *)slot + begin, n);
            } else {
                if (is_own) { bf16_encode(own_half, own, n); }
                transport_add_bf16(sum, is_own ? own_half : (const uint16_t *)slot + begin, n);
            }
        }
        memcpy(mine + begin, sum, n * sizeof(float));
    }
}

// buffer (size, shard): on return this rank's shard holds the sum over all ranks; the other shards are as they were.
static inline void transport_reduce_scatter(Transport *transport, float *buffer, size_t shard) {
    if (transport->size == 1) { return; }
    transport_begin(transport, "reduce-scatter");
    float *mine = buffer + (size_t)transport->rank * shard;
    size_t chunks = (shard + transport->chunk - 1) / transport->chunk;
    transport_post_scatter(transport, buffer, shard, 0);
    for (size_t index = 0; index < chunks; index++) {
        transport_post_scatter(transport, buffer, shard, index + 1);
        int lane = (int)(index % TRANSPORT_LANES);
        transport_wait(transport, lane);
        transport_sum_chunk(transport, mine + index * transport->chunk, lane, transport_chunk_size(transport, shard, index));
    }
}

static inline void transport_post_gather(Transport *transport, float *buffer, size_t shard, size_t index) {
    int lane = (int)(index % TRANSPORT_LANES);
    size_t count = transport_chunk_size(transport, shard, index);
    size_t bytes = count * wire_bytes(transport->wire);
    float *mine = buffer + (size_t)transport->rank * shard + index * transport->chunk;
    void *data = mine;
    if (transport->wire == WIRE_BF16) {
        data = transport_slot(transport, transport->send_buffers, lane, transport_peer(transport, 1)); // the same for everybody
        bf16_encode((uint16_t *)data, mine, count);
        bf16_decode(mine, (const uint16_t *)data, count); // the owner keeps what the others get
    }
    for (int step = 1; step < transport->size && count > 0; step++) {
        int to = transport_peer(transport, step);
        int from = transport_peer(transport, transport->size - step);
        void *target = buffer + (size_t)from * shard + index * transport->chunk;
        if (transport->wire == WIRE_BF16) { target = transport_slot(transport, transport->receive_buffers, lane, from); }
        transport_post(transport, lane, false, from, target, bytes);
        transport_post(transport, lane, true, to, data, bytes);
    }
}

static inline void transport_place_chunk(Transport *transport, float *buffer, size_t shard, size_t index) {
    if (transport->wire != WIRE_BF16) { return; }
    int lane = (int)(index % TRANSPORT_LANES);
    for (int rank = 0; rank < transport->size; rank++) {
        if (rank == transport->rank) { continue; }
        const void *slot = transport_slot(transport, transport->receive_buffers, lane, rank);
        float *target = buffer + (size_t)rank * shard + index * transport->chunk;
        bf16_decode(target, (const uint16_t *)slot, transport_chunk_size(transport, shard, index));
    }
}

// buffer (size, shard): this rank's shard goes to everybody; all ranks end with the same bits, rounded to the wire.
static inline void transport_all_gather(Transport *transport, float *buffer, size_t shard) {
    if (transport->size == 1) { // the same bits as with more ranks
        for (size_t i = 0; i < shard && transport->wire == WIRE_BF16; i++) { buffer[i] = bf16_to_float(bf16_from_float(buffer[i])); }
        return;
    }
    transport_begin(transport, "all-gather");
    size_t chunks = (shard + transport->chunk - 1) / transport->chunk;
    transport_post_gather(transport, buffer, shard, 0);
    for (size_t index = 0; index < chunks; index++) {
        if (index + 1 < chunks) { transport_post_gather(transport, buffer, shard, index + 1); }
        transport_wait(transport, (int)(index % TRANSPORT_LANES));
        transport_place_chunk(transport, buffer, shard, index);
    }
}

#endif
