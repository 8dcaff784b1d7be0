// collectives_host.h: reduce-scatter and all-gather of vectors in host memory, with the
// messages of a transport. The contract is in collective.h.
//
//   host_reduce_scatter   every rank ends with the sum of what it owns
//   host_all_gather       every rank ends with the whole vector
//
// A stretch is cut into chunks, a chunk into runs:
//
//   own      | piece | piece | piece | piece |   of one rank, [first, end)
//   chunk    |<---- one ---->|<- the next -->|   a message to each rank: whole pieces, or
//                                                a part of one
//   run      |<----->|<----->|                   a piece or a part: encoded by itself
//
// Chunks go in turn through the two lanes of the transport. While the received messages
// of one are added up or decoded, those of the next are under way. Every rank sends and
// receives at the same time, so both directions of its link are busy.
#ifndef ACCO_COMM_COLLECTIVES_HOST_H
#define ACCO_COMM_COLLECTIVES_HOST_H

#include "comm/collective.h"
#include "comm/transport.h"

// ---------------------------------------------------------------------------------------
// Message buffers

// About 1 MB of received messages in each lane, so that they are added up while they are
// in the second-level cache.
static inline size_t host_chunk_elements(int size) {
    size_t chunk = ((size_t)1 << 18) / (size_t)(size > 1 ? size - 1 : 1);
    return chunk < 8192 ? 8192 : chunk / LAYOUT_BLOCK * LAYOUT_BLOCK;
}

// Reserves the message buffers for shards of at most `shard` elements in any format: none
// needs more room than fp32.
static inline void host_collectives_reserve(Transport *transport, Arena *arena, size_t shard) {
    if (transport->size == 1) { return; }
    transport->chunk = layout_round_up(size_min(shard, host_chunk_elements(transport->size)), LAYOUT_BLOCK);
    transport->slot_bytes = transport->chunk * sizeof(float);
    size_t lanes = shard <= transport->chunk ? 1 : TRANSPORT_LANES;
    size_t bytes = lanes * (size_t)(transport->size - 1) * transport->slot_bytes;
    arena_reserve_host(arena, MEMORY_COMMUNICATION, "messages being received", bytes,
                       &transport->receive_buffers);
    arena_reserve_host(arena, MEMORY_COMMUNICATION, "messages being sent", bytes, &transport->send_buffers);
}

// The buffer of the message to or from another rank: slots are in the order in which
// ranks follow this one.
static inline char *host_slot(const Transport *transport, char *buffers, int lane, int peer) {
    size_t others = (size_t)(transport->size - 1),
           slot = (size_t)(peer - transport->rank - 1 + transport->size) % (size_t)transport->size;
    assert(slot < others);
    return buffers + ((size_t)lane * others + slot) * transport->slot_bytes;
}

// ---------------------------------------------------------------------------------------
// Chunks and runs

// Own elements [begin, end) that travel in one message to each rank.
typedef struct Chunk {
    size_t begin, end;
} Chunk;

// The chunk from `begin` on; empty at the end. Whole pieces where they fit into a
// message, otherwise equal parts of a piece, whose cuts are multiples of LAYOUT_BLOCK.
static inline Chunk host_next_chunk(const Transport *transport, const Layout *layout, size_t begin,
                                    size_t end) {
    size_t piece = layout->piece, length;
    if (begin >= end) {
        length = 0;
    } else if (piece <= transport->chunk) {
        length = size_min(transport->chunk / piece * piece, end - begin);
    } else {
        size_t parts = (piece + transport->chunk - 1) / transport->chunk;
        length = layout_round_up((piece + parts - 1) / parts, LAYOUT_BLOCK);
        length = size_min(length, layout_run(layout, begin, end));
    }
    Chunk chunk = {begin, begin + length};
    return chunk;
}

// A stretch of a chunk that is contiguous in the vector.
typedef struct ChunkRun {
    size_t own;    // its first element
    size_t count;  // elements
    size_t offset; // of its bytes in the message
} ChunkRun;

// Steps to the next run of the chunk; `run` begins as {chunk.begin, 0, 0}. Returns false
// behind the last one, when run->offset is the size of the message.
static inline bool host_next_run(const Collective *collective, Chunk chunk, ChunkRun *run) {
    run->own += run->count;
    run->offset += wire_bytes(collective->wire, run->count);
    if (run->own >= chunk.end) { return false; }
    run->count = layout_run(collective->layout, run->own, chunk.end);
    return true;
}

static inline size_t host_chunk_bytes(const Collective *collective, Chunk chunk) {
    ChunkRun run = {chunk.begin, 0, 0};
    while (host_next_run(collective, chunk, &run)) {}
    return run.offset;
}

// Whether the chunk can be sent from the vector as it is, without a copy: it is
// contiguous there, and fp32 travels.
static inline bool host_is_plain(const Collective *collective, Chunk chunk) {
    size_t length = chunk.end - chunk.begin;
    return collective->wire == WIRE_FP32 && length > 0 &&
           layout_run(collective->layout, chunk.begin, chunk.end) == length;
}

// Elements that are added up or rounded at a time: whole blocks of the coarse formats.
enum { HOST_BLOCK = 4 * WIRE_BLOCK };

// Starts or finishes the messages of a chunk in a lane.
typedef void (*HostStep)(Transport *transport, const Collective *collective, int lane, Chunk chunk);

// All chunks of [first, end): the messages of the next are started before those of one
// are waited for and finished.
static inline void host_for_chunks(Transport *transport, const Collective *collective, size_t first,
                                   size_t end, HostStep start, HostStep finish) {
    int lane = 0;
    Chunk chunk = host_next_chunk(transport, collective->layout, first, end);
    start(transport, collective, lane, chunk);
    while (chunk.begin < chunk.end) {
        Chunk next = host_next_chunk(transport, collective->layout, chunk.end, end);
        start(transport, collective, 1 - lane, next);
        transport_wait(transport, lane);
        finish(transport, collective, lane, chunk);
        chunk = next;
        lane = 1 - lane;
    }
}

// ---------------------------------------------------------------------------------------
// Reduce-scatter

static inline void host_start_scatter(Transport *transport, const Collective *collective, int lane,
                                      Chunk chunk) {
    const Layout *layout = collective->layout;
    size_t bytes = host_chunk_bytes(collective, chunk);
    for (int step = 1; step < transport->size && bytes > 0; step++) {
        int to = transport_peer(transport, step), from = transport_peer(transport, transport->size - step);
        char *data = host_slot(transport, transport->send_buffers, lane, to);
        if (host_is_plain(collective, chunk)) {
            data = (char *)(collective->buffer + layout_flat(layout, to, chunk.begin));
        } else {
            ChunkRun run = {chunk.begin, 0, 0};
            while (host_next_run(collective, chunk, &run)) {
                wire_encode(collective->wire, data + run.offset,
                            collective->buffer + layout_flat(layout, to, run.own), run.count);
            }
        }
        transport_post(transport, lane, false, from,
                       host_slot(transport, transport->receive_buffers, lane, from), bytes);
        transport_post(transport, lane, true, to, data, bytes);
    }
}

// This rank's own elements of the run <- their sum over ranks.
static inline void host_sum_run(Transport *transport, const Collective *collective, int lane, ChunkRun run) {
    float *mine = collective->buffer + layout_flat(collective->layout, transport->rank, run.own);
    float sum[HOST_BLOCK];
    uint32_t own[HOST_BLOCK]; // encoded; the widest format is fp32
    for (size_t begin = 0; begin < run.count; begin += HOST_BLOCK) {
        size_t count = size_min(run.count - begin, HOST_BLOCK);
        memset(sum, 0, sizeof sum);
        wire_encode(collective->wire, own, mine + begin, count);
        for (int rank = 0; rank < transport->size; rank++) {
            const char *in = (const char *)own;
            if (rank != transport->rank) {
                in = host_slot(transport, transport->receive_buffers, lane, rank) + run.offset +
                     wire_bytes(collective->wire, begin);
            }
            wire_add(collective->wire, sum, in, count);
        }
        memcpy(mine + begin, sum, count * sizeof(float));
    }
}

static inline void host_finish_scatter(Transport *transport, const Collective *collective, int lane,
                                       Chunk chunk) {
    ChunkRun run = {chunk.begin, 0, 0};
    while (host_next_run(collective, chunk, &run)) { host_sum_run(transport, collective, lane, run); }
}

// On return this rank's own elements [first, end) hold the sum over all ranks; the rest
// of `buffer` is as it was. A world of one rank has nothing to add and rounds nothing.
static inline void host_reduce_scatter(Transport *transport, const Collective *collective, size_t first,
                                       size_t end) {
    if (transport->size == 1) { return; }
    transport_begin(transport, "reduce-scatter");
    host_for_chunks(transport, collective, first, end, host_start_scatter, host_finish_scatter);
}

// ---------------------------------------------------------------------------------------
// All-gather

// target (count) <- source (count), rounded by the wire: encoded and decoded again. Where
// base (count) is not NULL, the difference to it is rounded, and base is added again.
// message: receives the encoded run; NULL: nobody needs it.
static inline void host_round_run(WireFormat wire, float *target, const float *source, const float *base,
                                  size_t count, char *message) {
    float values[HOST_BLOCK];
    uint32_t own[HOST_BLOCK];
    for (size_t begin = 0; begin < count; begin += HOST_BLOCK) {
        size_t n = size_min(count - begin, HOST_BLOCK);
        char *encoded = message != NULL ? message + wire_bytes(wire, begin) : (char *)own;
        for (size_t i = 0; i < n; i++) {
            values[i] = base != NULL ? source[begin + i] - base[begin + i] : source[begin + i];
        }
        wire_encode(wire, encoded, values, n);
        wire_decode(wire, values, encoded, n);
        for (size_t i = 0; i < n; i++) {
            target[begin + i] = base != NULL ? base[begin + i] + values[i] : values[i];
        }
    }
}

// This rank's own elements of the chunk in `buffer` <- what the other ranks receive of
// them. message: as above.
static inline void host_round_chunk(const Transport *transport, const Collective *collective, Chunk chunk,
                                    char *message) {
    ChunkRun run = {chunk.begin, 0, 0};
    while (host_next_run(collective, chunk, &run)) {
        size_t flat = layout_flat(collective->layout, transport->rank, run.own);
        host_round_run(collective->wire, collective->buffer + flat,
                       collective_source(collective, transport->rank, run.own),
                       collective_base(collective, flat), run.count,
                       message != NULL ? message + run.offset : NULL);
    }
}

static inline void host_start_gather(Transport *transport, const Collective *collective, int lane,
                                     Chunk chunk) {
    size_t bytes = host_chunk_bytes(collective, chunk);
    if (bytes == 0) { return; }
    bool plain = host_is_plain(collective, chunk) && collective->base == NULL;
    float *mine = collective->buffer + layout_flat(collective->layout, transport->rank, chunk.begin);
    void *message = mine;
    if (!plain) { // one message for all ranks: it needs one slot
        message = host_slot(transport, transport->send_buffers, lane, transport_peer(transport, 1));
        host_round_chunk(transport, collective, chunk, (char *)message);
    } else if (collective->source != NULL) {
        memcpy(mine, collective->source + chunk.begin, bytes);
    }
    for (int step = 1; step < transport->size; step++) {
        int to = transport_peer(transport, step), from = transport_peer(transport, transport->size - step);
        void *target = host_slot(transport, transport->receive_buffers, lane, from);
        if (plain) { target = collective->buffer + layout_flat(collective->layout, from, chunk.begin); }
        transport_post(transport, lane, false, from, target, bytes);
        transport_post(transport, lane, true, to, message, bytes);
    }
}

// target (count) <- the encoded run at `in`, on top of base where it is not NULL.
static inline void host_decode_run(WireFormat wire, float *target, const float *base, const char *in,
                                   size_t count) {
    if (base == NULL) {
        wire_decode(wire, target, in, count);
        return;
    }
    float values[HOST_BLOCK]; // target may be base
    for (size_t begin = 0; begin < count; begin += HOST_BLOCK) {
        size_t n = size_min(count - begin, HOST_BLOCK);
        wire_decode(wire, values, in + wire_bytes(wire, begin), n);
        for (size_t i = 0; i < n; i++) { target[begin + i] = base[begin + i] + values[i]; }
    }
}

static inline void host_finish_gather(Transport *transport, const Collective *collective, int lane,
                                      Chunk chunk) {
    if (host_is_plain(collective, chunk) && collective->base == NULL) { return; }
    for (int rank = 0; rank < transport->size; rank++) {
        if (rank == transport->rank) { continue; }
        const char *in = host_slot(transport, transport->receive_buffers, lane, rank);
        ChunkRun run = {chunk.begin, 0, 0};
        while (host_next_run(collective, chunk, &run)) {
            size_t flat = layout_flat(collective->layout, rank, run.own);
            host_decode_run(collective->wire, collective->buffer + flat, collective_base(collective, flat),
                            in + run.offset, run.count);
        }
    }
}

// On return `buffer` holds every rank's own elements [first, end), rounded by the wire:
// the same bits on all ranks. A world of one rank rounds as a larger one would.
static inline void host_all_gather(Transport *transport, const Collective *collective, size_t first,
                                   size_t end) {
    if (transport->size == 1) {
        Chunk all = {first, end};
        host_round_chunk(transport, collective, all, NULL);
        return;
    }
    transport_begin(transport, "all-gather");
    host_for_chunks(transport, collective, first, end, host_start_gather, host_finish_gather);
}

#endif
