// collectives_host.h: how ranks add up and spread vectors.
//
//   host_reduce_scatter   every rank ends with the sum of what it owns (layout.h)
//   host_all_gather       everybody ends with what every rank owns
//
// Each rank sends a piece straight to its owner, and the owner adds what comes in the
// order of ranks, in fp32. A ring moves the same number of bytes, but its order of
// summation differs from piece to piece and a narrow wire would round every partial sum;
// here a value is rounded once, the sum is the same for every owner, and it is the sum
// that a plain loop over the workers gives, bit for bit. Every rank sends and receives at
// the same time, so both directions of a link are busy. Messages are small enough to be
// added while they are in the cache, and two to each rank are under way at any time.
//
// Formats that are too coarse for parameters (wire.h) carry their difference to a vector
// that all ranks hold already; what rounding left over is part of the next difference.
#ifndef ACCO_COMM_COLLECTIVES_HOST_H
#define ACCO_COMM_COLLECTIVES_HOST_H

#include "comm/layout.h"
#include "comm/transport.h"
#include "kernels/wire.h"

// ---------------------------------------------------------------------------------------
// Room for messages

// About 1 MB of received chunks per lane: they are added while they are in the
// second-level cache.
static inline size_t host_chunk_elements(int size) {
    size_t chunk = ((size_t)1 << 18) / (size_t)(size > 1 ? size - 1 : 1);
    return chunk < 8192 ? 8192 : chunk / LAYOUT_BLOCK * LAYOUT_BLOCK;
}

// Reserves the buffers for exchanging shards of at most `shard` elements in any format:
// no format needs more room than fp32.
static inline void host_collectives_reserve(Transport *transport, Arena *arena, size_t shard) {
    if (transport->size == 1) { return; }
    size_t limit = host_chunk_elements(transport->size);
    transport->chunk = layout_round_up(shard < limit ? shard : limit, LAYOUT_BLOCK);
    transport->slot_bytes = transport->chunk * sizeof(float);
    size_t slots = (size_t)(shard <= transport->chunk ? 1 : TRANSPORT_LANES) * (size_t)(transport->size - 1);
    arena_reserve_host(arena, MEMORY_COMMUNICATION, "messages being received", slots * transport->slot_bytes,
                       &transport->receive_buffers);
    arena_reserve_host(arena, MEMORY_COMMUNICATION, "messages being sent", slots * transport->slot_bytes,
                       &transport->send_buffers);
}

// The slot of another rank: slots are in the order in which ranks follow this one.
static inline char *host_slot(const Transport *transport, char *buffers, int lane, int peer) {
    size_t others = (size_t)(transport->size - 1),
           slot = (size_t)(peer - transport->rank - 1 + transport->size) % (size_t)transport->size;
    assert(slot < others);
    return buffers + ((size_t)lane * others + slot) * transport->slot_bytes;
}

// ---------------------------------------------------------------------------------------
// What travels

// What a reduce-scatter or an all-gather moves. Both work on a stretch [first, end) of
// everybody's own elements, whole cells of the layout.
typedef struct Collective {
    const Layout *layout;
    WireFormat wire;
    float *buffer; // (padded)
    const float
        *source; // all-gather: what this rank spreads, (shard) own elements; NULL: it stands in `buffer`
    const float *
        base; // all-gather: (padded) what all ranks hold already: the difference to it travels. NULL: the values themselves
} Collective;

// Own elements that travel in one message to each rank; empty past the end.
typedef struct Chunk {
    size_t begin, end;
} Chunk;

// Whole pieces where they fit into a message, otherwise equal parts of a piece, cut where
// the blocks of coarse formats are.
static inline Chunk host_next_chunk(const Transport *transport, const Layout *layout, size_t begin,
                                    size_t end) {
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

static inline size_t host_chunk_bytes(const Collective *collective, Chunk chunk) {
    size_t bytes = 0;
    for (size_t own = chunk.begin; own < chunk.end;) {
        size_t run = layout_run(collective->layout, own, chunk.end);
        bytes += wire_bytes(collective->wire, run);
        own += run;
    }
    return bytes;
}

// Whether the chunk lies in one stretch of memory in the very format that travels: then
// it needs no copy.
static inline bool host_is_plain(const Collective *collective, Chunk chunk) {
    size_t length = chunk.end - chunk.begin;
    return collective->wire == WIRE_FP32 && length > 0 &&
           layout_run(collective->layout, chunk.begin, chunk.end) == length;
}

static inline void host_encode_chunk(const Collective *collective, int rank, Chunk chunk, char *out) {
    for (size_t own = chunk.begin; own < chunk.end;) {
        size_t run = layout_run(collective->layout, own, chunk.end);
        wire_encode(collective->wire, out, collective->buffer + layout_flat(collective->layout, rank, own),
                    run);
        out += wire_bytes(collective->wire, run);
        own += run;
    }
}

static inline void host_post_scatter(Transport *transport, const Collective *collective, int lane,
                                     Chunk chunk) {
    size_t bytes = host_chunk_bytes(collective, chunk);
    for (int step = 1; step < transport->size && bytes > 0; step++) {
        int to = transport_peer(transport, step), from = transport_peer(transport, transport->size - step);
        void *data = host_slot(transport, transport->send_buffers, lane, to);
        if (host_is_plain(collective, chunk)) {
            data = collective->buffer + layout_flat(collective->layout, to, chunk.begin);
        } else {
            host_encode_chunk(collective, to, chunk, (char *)data);
        }
        transport_post(transport, lane, false, from,
                       host_slot(transport, transport->receive_buffers, lane, from), bytes);
        transport_post(transport, lane, true, to, data, bytes);
    }
}

// Elements that are added or rounded at a time: whole blocks of the coarse formats.
enum { HOST_SUM_BLOCK = 4 * WIRE_BLOCK };

// mine (count), one run <- the sum over ranks in their order, each rounded once to the
// wire; the others' runs start at `offset` bytes of their slots.
static inline void host_sum_run(Transport *transport, const Collective *collective, int lane, float *mine,
                                size_t count, size_t offset) {
    float sum[HOST_SUM_BLOCK];
    uint32_t own[HOST_SUM_BLOCK]; // the widest format is fp32
    for (size_t begin = 0; begin < count; begin += HOST_SUM_BLOCK) {
        size_t n = count - begin < (size_t)HOST_SUM_BLOCK ? count - begin : (size_t)HOST_SUM_BLOCK;
        memset(sum, 0, sizeof sum);
        wire_encode(collective->wire, own, mine + begin, n);
        for (int rank = 0; rank < transport->size; rank++) {
            const char *slot = (const char *)own;
            if (rank != transport->rank) {
                slot = host_slot(transport, transport->receive_buffers, lane, rank) + offset +
                       wire_bytes(collective->wire, begin);
            }
            wire_add(collective->wire, sum, slot, n);
        }
        memcpy(mine + begin, sum, n * sizeof(float));
    }
}

static inline void host_sum_chunk(Transport *transport, const Collective *collective, int lane, Chunk chunk) {
    size_t offset = 0;
    for (size_t own = chunk.begin; own < chunk.end;) {
        size_t run = layout_run(collective->layout, own, chunk.end);
        float *mine = collective->buffer + layout_flat(collective->layout, transport->rank, own);
        host_sum_run(transport, collective, lane, mine, run, offset);
        offset += wire_bytes(collective->wire, run);
        own += run;
    }
}

// On return the own elements [first, end) of this rank hold the sum over all ranks; the
// others' are as they were. A world of one has nothing to add and rounds nothing.
static inline void host_reduce_scatter(Transport *transport, const Collective *collective, size_t first,
                                       size_t end) {
    if (transport->size == 1) { return; }
    transport_begin(transport, "reduce-scatter");
    int lane = 0;
    Chunk chunk = host_next_chunk(transport, collective->layout, first, end);
    host_post_scatter(transport, collective, lane, chunk);
    while (chunk.begin < chunk.end) {
        Chunk next = host_next_chunk(transport, collective->layout, chunk.end, end);
        host_post_scatter(transport, collective, 1 - lane, next);
        transport_wait(transport, lane);
        host_sum_chunk(transport, collective, lane, chunk);
        chunk = next;
        lane = 1 - lane;
    }
}

// target <- what arrives when source (count) travels: rounded to the wire, and on top of
// `base` where there is one. out: the message, or NULL.
static inline void host_round_run(const Collective *collective, float *target, const float *source,
                                  const float *base, size_t count, char *out) {
    float values[HOST_SUM_BLOCK];
    uint32_t message[HOST_SUM_BLOCK];
    for (size_t begin = 0; begin < count; begin += HOST_SUM_BLOCK) {
        size_t n = count - begin < (size_t)HOST_SUM_BLOCK ? count - begin : (size_t)HOST_SUM_BLOCK;
        char *encoded = out != NULL ? out + wire_bytes(collective->wire, begin) : (char *)message;
        for (size_t i = 0; i < n; i++) {
            values[i] = base != NULL ? source[begin + i] - base[begin + i] : source[begin + i];
        }
        wire_encode(collective->wire, encoded, values, n);
        wire_decode(collective->wire, values, encoded, n);
        for (size_t i = 0; i < n; i++) {
            target[begin + i] = base != NULL ? base[begin + i] + values[i] : values[i];
        }
    }
}

// This rank's chunk: everybody, the owner too, ends with what the wire lets through.
static inline void host_round_chunk(Transport *transport, const Collective *collective, Chunk chunk,
                                    char *out) {
    for (size_t own = chunk.begin; own < chunk.end;) {
        size_t run = layout_run(collective->layout, own, chunk.end),
               flat = layout_flat(collective->layout, transport->rank, own);
        const float *source =
            collective->source != NULL ? collective->source + own : collective->buffer + flat;
        host_round_run(collective, collective->buffer + flat, source,
                       collective->base != NULL ? collective->base + flat : NULL, run, out);
        if (out != NULL) { out += wire_bytes(collective->wire, run); }
        own += run;
    }
}

static inline void host_post_gather(Transport *transport, const Collective *collective, int lane,
                                    Chunk chunk) {
    size_t bytes = host_chunk_bytes(collective, chunk);
    if (bytes == 0) { return; }
    bool plain = host_is_plain(collective, chunk) && collective->base == NULL;
    float *mine = collective->buffer + layout_flat(collective->layout, transport->rank, chunk.begin);
    void *data = mine;
    if (!plain) {
        data = host_slot(transport, transport->send_buffers, lane,
                         transport_peer(transport, 1)); // the same for everybody
        host_round_chunk(transport, collective, chunk, (char *)data);
    } else if (collective->source != NULL) {
        memcpy(mine, collective->source + chunk.begin, bytes);
    }
    for (int step = 1; step < transport->size; step++) {
        int to = transport_peer(transport, step), from = transport_peer(transport, transport->size - step);
        void *target = host_slot(transport, transport->receive_buffers, lane, from);
        if (plain) { target = collective->buffer + layout_flat(collective->layout, from, chunk.begin); }
        transport_post(transport, lane, false, from, target, bytes);
        transport_post(transport, lane, true, to, data, bytes);
    }
}

static inline void host_place_run(const Collective *collective, size_t flat, size_t count, const char *in) {
    float *target = collective->buffer + flat;
    if (collective->base == NULL) {
        wire_decode(collective->wire, target, in, count);
        return;
    }
    float values[HOST_SUM_BLOCK];
    const float *base = collective->base + flat;
    for (size_t begin = 0; begin < count; begin += HOST_SUM_BLOCK) {
        size_t n = count - begin < (size_t)HOST_SUM_BLOCK ? count - begin : (size_t)HOST_SUM_BLOCK;
        wire_decode(collective->wire, values, in + wire_bytes(collective->wire, begin), n);
        for (size_t i = 0; i < n; i++) { target[begin + i] = base[begin + i] + values[i]; }
    }
}

static inline void host_place_chunk(Transport *transport, const Collective *collective, int lane,
                                    Chunk chunk) {
    if (host_is_plain(collective, chunk) && collective->base == NULL) { return; }
    for (int rank = 0; rank < transport->size; rank++) {
        if (rank == transport->rank) { continue; }
        const char *in = host_slot(transport, transport->receive_buffers, lane, rank);
        for (size_t own = chunk.begin; own < chunk.end;) {
            size_t run = layout_run(collective->layout, own, chunk.end);
            host_place_run(collective, layout_flat(collective->layout, rank, own), run, in);
            in += wire_bytes(collective->wire, run);
            own += run;
        }
    }
}

// On return `buffer` holds, for every rank, that rank's own elements [first, end): the
// same bits everywhere, as the wire lets them through. A world of one rounds as more
// would.
static inline void host_all_gather(Transport *transport, const Collective *collective, size_t first,
                                   size_t end) {
    Chunk all = {first, end};
    if (transport->size == 1) {
        host_round_chunk(transport, collective, all, NULL);
        return;
    }
    transport_begin(transport, "all-gather");
    int lane = 0;
    Chunk chunk = host_next_chunk(transport, collective->layout, first, end);
    host_post_gather(transport, collective, lane, chunk);
    while (chunk.begin < chunk.end) {
        Chunk next = host_next_chunk(transport, collective->layout, chunk.end, end);
        host_post_gather(transport, collective, 1 - lane, next);
        transport_wait(transport, lane);
        host_place_chunk(transport, collective, lane, chunk);
        chunk = next;
        lane = 1 - lane;
    }
}

// ---------------------------------------------------------------------------------------
// What the link is like

typedef struct LinkMeasure {
    double latency; // seconds of the smallest collective
    double rate;    // bytes per second that leave one rank
} LinkMeasure;

enum { LINK_PROBES = 16, LINK_PROBE_BYTES = 4096 };

// The mean time of an exchange of `bytes` records: the same number on all ranks, that of
// the slowest.
static inline double link_time_records(Transport *transport, size_t bytes, int tries) {
    char *mine = (char *)calloc(1, bytes), *all = (char *)calloc((size_t)transport->size, bytes);
    double *times = (double *)calloc((size_t)transport->size, sizeof(double));
    double slowest = 0, began = clock_seconds();
    for (int i = 0; i < tries; i++) {
        transport_all_gather_records(transport, "measurement of the link", mine, all, bytes);
    }
    double mean = (clock_seconds() - began) / tries;
    transport_all_gather_records(transport, "measurement of the link", &mean, times, sizeof mean);
    for (int rank = 0; rank < transport->size; rank++) { slowest = fmax(slowest, times[rank]); }
    free(mine);
    free(all);
    free(times);
    return slowest;
}

// All ranks call it and get the same answer. Messages grow until one takes well over the
// latency, or a twentieth of a second, so that a slow link is not kept busy for long.
static inline LinkMeasure link_measure(Transport *transport) {
    LinkMeasure measure = {0, INFINITY};
    if (transport->size == 1) { return measure; }
    measure.latency = link_time_records(transport, sizeof(double), LINK_PROBES);
    for (size_t bytes = LINK_PROBE_BYTES; bytes <= (size_t)1 << 20; bytes *= 4) {
        double seconds = link_time_records(transport, bytes, 2);
        measure.rate = (double)bytes * (transport->size - 1) / fmax(seconds - measure.latency, 1e-9);
        if (seconds > 20 * measure.latency && seconds > 0.05) { break; }
    }
    return measure;
}

#endif
