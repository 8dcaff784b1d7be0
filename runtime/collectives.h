// collectives.h: how ranks add up and spread vectors.
//
//   transport_reduce_scatter   every rank ends with the sum of what it owns (layout.h)
//   transport_all_gather       everybody ends with what every rank owns
//
// Each rank sends a piece straight to its owner, and the owner adds what comes in the order of ranks, in fp32. A ring moves the same number
// of bytes, but its order of summation differs from piece to piece and a narrow wire would round every partial sum; here a value is
// rounded once, the sum is the same for every owner, and it is the sum that a plain loop over the workers gives, bit for bit. Every rank
// sends and receives at the same time, so both directions of a link are busy. Messages are small enough to be added while they are in the
// cache, and two to each rank are under way at any time.
//
// Formats that are too coarse for parameters (wire.h) carry their difference to a vector that all ranks hold already; what rounding left
// over is part of the next difference.
#ifndef ACCO_COLLECTIVES_H
#define ACCO_COLLECTIVES_H

#include "layout.h"
#include "transport.h"
#include "wire.h"

// ---------------------------------------------------------------------------------------------------------------------------------------
// Room for messages

// About 1 MB of received chunks per lane: they are added while they are in the second-level cache.
static inline size_t transport_chunk_elements(int size) {
    size_t chunk = ((size_t)1 << 18) / (size_t)(size > 1 ? size - 1 : 1);
    return chunk < 8192 ? 8192 : chunk / LAYOUT_BLOCK * LAYOUT_BLOCK;
}

// Reserves the buffers for exchanging shards of at most `shard` elements in any format: no format needs more room than fp32.
static inline void transport_reserve(Transport *transport, Arena *arena, size_t shard) {
    if (transport->size == 1) { return; }
    size_t limit = transport_chunk_elements(transport->size);
    transport->chunk = layout_round_up(shard < limit ? shard : limit, LAYOUT_BLOCK);
    transport->slot_bytes = transport->chunk * sizeof(float);
    size_t slots = (size_t)(shard <= transport->chunk ? 1 : TRANSPORT_LANES) * (size_t)(transport->size - 1);
    arena_reserve_host(arena, MEMORY_EXCHANGE, "messages being received", slots * transport->slot_bytes, &transport->receive_buffers);
    arena_reserve_host(arena, MEMORY_EXCHANGE, "messages being sent", slots * transport->slot_bytes, &transport->send_buffers);
}

// The slot of another rank: slots are in the order in which ranks follow this one.
static inline char *transport_slot(const Transport *transport, char *buffers, int lane, int peer) {
    size_t others = (size_t)(transport->size - 1), slot = (size_t)(peer - transport->rank - 1 + transport->size) % (size_t)transport->size;
    assert(slot < others);
    return buffers + ((size_t)lane * others + slot) * transport->slot_bytes;
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// What travels

// What a reduce-scatter or an all-gather moves. Both work on a stretch [first, end) of everybody's own elements, whole cells of the layout.
typedef struct Exchange {
    const Layout *layout;
    WireFormat wire;
    float *buffer;       // (padded)
    const float *source; // all-gather: what this rank spreads, (shard) own elements; NULL: it stands in `buffer`
    const float *base;   // all-gather: (padded) what all ranks hold already: the difference to it travels. NULL: the values themselves
} Exchange;

// Own elements that travel in one message to each rank; empty past the end.
typedef struct Chunk {
    size_t begin, end;
} Chunk;

// Whole pieces where they fit into a message, otherwise equal parts of a piece, cut where the blocks of coarse formats are.
static inline Chunk transport_next_chunk(const Transport *transport, const Layout *layout, size_t begin, size_t end) {
    size_t piece = layout->piece, length;
    if (begin >= end) {
        length = 0;
    } else if (piece <= transport->chunk) {
        length = transport->chunk / piece * piece;
        if (length > end - begin) { length = end - begin; }
    } else {
        size_t parts = (piece + transport->chunk - 1) / transport->chunk;
        length = layout_round_up((piece + parts - 1) / parts, LAYOUT_BLOCK);
        size_t run = layout_run(layout, begin, end);
        if (length > run) { length = run; }
    }
    Chunk chunk = {begin, begin + length};
    return chunk;
}

static inline size_t transport_chunk_bytes(const Exchange *exchange, Chunk chunk) {
    size_t bytes = 0;
    for (size_t own = chunk.begin; own < chunk.end;) {
        size_t run = layout_run(exchange->layout, own, chunk.end);
        bytes += wire_bytes(exchange->wire, run);
        own += run;
    }
    return bytes;
}

// Whether the chunk lies in one stretch of memory in the very format that travels: then it needs no copy.
static inline bool transport_is_plain(const Exchange *exchange, Chunk chunk) {
    size_t length = chunk.end - chunk.begin;
    return exchange->wire == WIRE_FP32 && length > 0 && layout_run(exchange->layout, chunk.begin, chunk.end) == length;
}

static inline void transport_encode_chunk(const Exchange *exchange, int rank, Chunk chunk, char *out) {
    for (size_t own = chunk.begin; own < chunk.end;) {
        size_t run = layout_run(exchange->layout, own, chunk.end);
        wire_encode(exchange->wire, out, exchange->buffer + layout_flat(exchange->layout, rank, own), run);
        out += wire_bytes(exchange->wire, run);
        own += run;
    }
}

static inline void transport_post_scatter(Transport *transport, const Exchange *exchange, int lane, Chunk chunk) {
    size_t bytes = transport_chunk_bytes(exchange, chunk);
    for (int step = 1; step < transport->size && bytes > 0; step++) {
        int to = transport_peer(transport, step), from = transport_peer(transport, transport->size - step);
        void *data = transport_slot(transport, transport->send_buffers, lane, to);
        if (transport_is_plain(exchange, chunk)) {
            data = exchange->buffer + layout_flat(exchange->layout, to, chunk.begin);
        } else {
            transport_encode_chunk(exchange, to, chunk, (char *)data);
        }
        transport_post(transport, lane, false, from, transport_slot(transport, transport->receive_buffers, lane, from), bytes);
        transport_post(transport, lane, true, to, data, bytes);
    }
}

// Elements that are added or rounded at a time: whole blocks of the coarse formats.
enum { TRANSPORT_BLOCK = 4 * WIRE_BLOCK };

// mine (count), one run <- the sum over ranks in their order, each rounded once to the wire; the others' runs start at `offset` bytes of
// their slots.
static inline void transport_sum_run(Transport *transport, const Exchange *exchange, int lane, float *mine, size_t count, size_t offset) {
    float sum[TRANSPORT_BLOCK];
    uint32_t own[TRANSPORT_BLOCK]; // the widest format is fp32
    for (size_t begin = 0; begin < count; begin += TRANSPORT_BLOCK) {
        size_t n = count - begin < (size_t)TRANSPORT_BLOCK ? count - begin : (size_t)TRANSPORT_BLOCK;
        memset(sum, 0, sizeof sum);
        wire_encode(exchange->wire, own, mine + begin, n);
        for (int rank = 0; rank < transport->size; rank++) {
            const char *slot = (const char *)own;
            if (rank != transport->rank) {
                slot = transport_slot(transport, transport->receive_buffers, lane, rank) + offset + wire_bytes(exchange->wire, begin);
            }
            wire_add(exchange->wire, sum, slot, n);
        }
        memcpy(mine + begin, sum, n * sizeof(float));
    }
}

static inline void transport_sum_chunk(Transport *transport, const Exchange *exchange, int lane, Chunk chunk) {
    size_t offset = 0;
    for (size_t own = chunk.begin; own < chunk.end;) {
        size_t run = layout_run(exchange->layout, own, chunk.end);
        float *mine = exchange->buffer + layout_flat(exchange->layout, transport->rank, own);
        transport_sum_run(transport, exchange, lane, mine, run, offset);
        offset += wire_bytes(exchange->wire, run);
        own += run;
    }
}

// On return the own elements [first, end) of this rank hold the sum over all ranks; the others' are as they were. A world of one has
// nothing to add and rounds nothing.
static inline void transport_reduce_scatter(Transport *transport, const Exchange *exchange, size_t first, size_t end) {
    if (transport->size == 1) { return; }
    transport_begin(transport, "reduce-scatter");
    int lane = 0;
    Chunk chunk = transport_next_chunk(transport, exchange->layout, first, end);
    transport_post_scatter(transport, exchange, lane, chunk);
    while (chunk.begin < chunk.end) {
        Chunk next = transport_next_chunk(transport, exchange->layout, chunk.end, end);
        transport_post_scatter(transport, exchange, 1 - lane, next);
        transport_wait(transport, lane);
        transport_sum_chunk(transport, exchange, lane, chunk);
        chunk = next;
        lane = 1 - lane;
    }
}

// target <- what arrives when source (count) travels: rounded to the wire, and on top of `base` where there is one. out: the message, or
// NULL.
static inline void transport_round_run(const Exchange *exchange, float *target, const float *source, const float *base, size_t count,
                                       char *out) {
    float values[TRANSPORT_BLOCK];
    uint32_t message[TRANSPORT_BLOCK];
    for (size_t begin = 0; begin < count; begin += TRANSPORT_BLOCK) {
        size_t n = count - begin < (size_t)TRANSPORT_BLOCK ? count - begin : (size_t)TRANSPORT_BLOCK;
        char *encoded = out != NULL ? out + wire_bytes(exchange->wire, begin) : (char *)message;
        for (size_t i = 0; i < n; i++) { values[i] = base != NULL ? source[begin + i] - base[begin + i] : source[begin + i]; }
        wire_encode(exchange->wire, encoded, values, n);
        wire_decode(exchange->wire, values, encoded, n);
        for (size_t i = 0; i < n; i++) { target[begin + i] = base != NULL ? base[begin + i] + values[i] : values[i]; }
    }
}

// This rank's chunk: everybody, the owner too, ends with what the wire lets through.
static inline void transport_round_chunk(Transport *transport, const Exchange *exchange, Chunk chunk, char *out) {
    for (size_t own = chunk.begin; own < chunk.end;) {
        size_t run = layout_run(exchange->layout, own, chunk.end), flat = layout_flat(exchange->layout, transport->rank, own);
        const float *source = exchange->source != NULL ? exchange->source + own : exchange->buffer + flat;
        transport_round_run(exchange, exchange->buffer + flat, source, exchange->base != NULL ? exchange->base + flat : NULL, run, out);
        if (out != NULL) { out += wire_bytes(exchange->wire, run); }
        own += run;
    }
}

static inline void transport_post_gather(Transport *transport, const Exchange *exchange, int lane, Chunk chunk) {
    size_t bytes = transport_chunk_bytes(exchange, chunk);
    if (bytes == 0) { return; }
    bool plain = transport_is_plain(exchange, chunk) && exchange->base == NULL;
    float *mine = exchange->buffer + layout_flat(exchange->layout, transport->rank, chunk.begin);
    void *data = mine;
    if (!plain) {
        data = transport_slot(transport, transport->send_buffers, lane, transport_peer(transport, 1)); // the same for everybody
        transport_round_chunk(transport, exchange, chunk, (char *)data);
    } else if (exchange->source != NULL) {
        memcpy(mine, exchange->source + chunk.begin, bytes);
    }
    for (int step = 1; step < transport->size; step++) {
        int to = transport_peer(transport, step), from = transport_peer(transport, transport->size - step);
        void *target = transport_slot(transport, transport->receive_buffers, lane, from);
        if (plain) { target = exchange->buffer + layout_flat(exchange->layout, from, chunk.begin); }
        transport_post(transport, lane, false, from, target, bytes);
        transport_post(transport, lane, true, to, data, bytes);
    }
}

static inline void transport_place_run(const Exchange *exchange, size_t flat, size_t count, const char *in) {
    float *target = exchange->buffer + flat;
    if (exchange->base == NULL) {
        wire_decode(exchange->wire, target, in, count);
        return;
    }
    float values[TRANSPORT_BLOCK];
    const float *base = exchange->base + flat;
    for (size_t begin = 0; begin < count; begin += TRANSPORT_BLOCK) {
        size_t n = count - begin < (size_t)TRANSPORT_BLOCK ? count - begin : (size_t)TRANSPORT_BLOCK;
        wire_decode(exchange->wire, values, in + wire_bytes(exchange->wire, begin), n);
        for (size_t i = 0; i < n; i++) { target[begin + i] = base[begin + i] + values[i]; }
    }
}

static inline void transport_place_chunk(Transport *transport, const Exchange *exchange, int lane, Chunk chunk) {
    if (transport_is_plain(exchange, chunk) && exchange->base == NULL) { return; }
    for (int rank = 0; rank < transport->size; rank++) {
        if (rank == transport->rank) { continue; }
        const char *in = transport_slot(transport, transport->receive_buffers, lane, rank);
        for (size_t own = chunk.begin; own < chunk.end;) {
            size_t run = layout_run(exchange->layout, own, chunk.end);
            transport_place_run(exchange, layout_flat(exchange->layout, rank, own), run, in);
            in += wire_bytes(exchange->wire, run);
            own += run;
        }
    }
}

// On return `buffer` holds, for every rank, that rank's own elements [first, end): the same bits everywhere, as the wire lets them
// through. A world of one rounds as more would.
static inline void transport_all_gather(Transport *transport, const Exchange *exchange, size_t first, size_t end) {
    Chunk all = {first, end};
    if (transport->size == 1) {
        transport_round_chunk(transport, exchange, all, NULL);
        return;
    }
    transport_begin(transport, "all-gather");
    int lane = 0;
    Chunk chunk = transport_next_chunk(transport, exchange->layout, first, end);
    transport_post_gather(transport, exchange, lane, chunk);
    while (chunk.begin < chunk.end) {
        Chunk next = transport_next_chunk(transport, exchange->layout, chunk.end, end);
        transport_post_gather(transport, exchange, 1 - lane, next);
        transport_wait(transport, lane);
        transport_place_chunk(transport, exchange, lane, chunk);
        chunk = next;
        lane = 1 - lane;
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// What the link is like

typedef struct LinkMeasure {
    double latency; // seconds of the smallest exchange
    double rate;    // bytes per second that leave one rank
} LinkMeasure;

enum { LINK_PROBES = 16, LINK_PROBE_BYTES = 4096 };

// The mean time of an exchange of `bytes` records: the same number on all ranks, that of the slowest.
static inline double transport_time_exchange(Transport *transport, size_t bytes, int tries) {
    char *mine = (char *)calloc(1, bytes), *all = (char *)calloc((size_t)transport->size, bytes);
    double *times = (double *)calloc((size_t)transport->size, sizeof(double));
    double slowest = 0, began = clock_seconds();
    for (int i = 0; i < tries; i++) { transport_exchange(transport, "measurement of the link", mine, all, bytes); }
    double mean = (clock_seconds() - began) / tries;
    transport_exchange(transport, "measurement of the link", &mean, times, sizeof mean);
    for (int rank = 0; rank < transport->size; rank++) { slowest = fmax(slowest, times[rank]); }
    free(mine);
    free(all);
    free(times);
    return slowest;
}

// All ranks call it and get the same answer. Messages grow until one takes well over the latency, or a twentieth of a second, so that a
// slow link is not kept busy for long.
static inline LinkMeasure transport_measure(Transport *transport) {
    LinkMeasure measure = {0, INFINITY};
    if (transport->size == 1) { return measure; }
    measure.latency = transport_time_exchange(transport, sizeof(double), LINK_PROBES);
    for (size_t bytes = LINK_PROBE_BYTES; bytes <= (size_t)1 << 20; bytes *= 4) {
        double seconds = transport_time_exchange(transport, bytes, 2);
        measure.rate = (double)bytes * (transport->size - 1) / fmax(seconds - measure.latency, 1e-9);
        if (seconds > 20 * measure.latency && seconds > 0.05) { break; }
    }
    return measure;
}

#endif
