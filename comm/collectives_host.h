// collectives_host.h: reduce-scatter and all-gather of vectors in host memory, with the
// messages of a transport. The contract is in collective.h.
//
//   host_reduce_scatter   every rank ends with the sum of what it owns
//   host_all_gather       every rank ends with the whole vector
//
// Both work on two levels, so that a vector crosses the slow link between hosts only once
// per host. groups.h says which rank is whose delegate.
//
//                    first                                  then
//   reduce-scatter   inside hosts: delegates add up what    between hosts: a delegate sends
//                    the ranks of their host have for       the sum of its host to the owner,
//                    each owner, in fp32                    in the wire format; it adds
//   all-gather       between hosts: an owner sends its      inside hosts: the delegate passes
//                    elements to its delegates, in the      the very message on
//                    wire format
//
// In the flat exchange every rank is a host, and only what is between hosts remains.
//
// The own elements of every rank in the cells [first, end) are cut into chunks, a chunk into ranges:
//
//   own      | piece | piece | piece | piece |   of one rank, in these cells
//   chunk    |<---- one ---->|<- the next -->|   what travels at a time: whole pieces, or a
//                                                part of one
//   range    |<----->|<----->|                   a piece or a part of one: contiguous in the
//                                                vector, and encoded by itself
//
// Chunks take turns on the two lanes of each level. While one is added up or decoded,
// messages of the others are under way on both levels, and on the link between hosts those
// of the next chunk always wait behind those of the one before:
//
//   reduce-scatter   inside hosts     | 0 | 1 | 2 |
//                    between hosts        |   0   |   1   |   2   |
//   all-gather       between hosts    |   0   |   1   |   2   |
//                    inside hosts             | 0 |   | 1 |   | 2 |
//
// There is no deadlock: all ranks start the messages of a level in the order of chunks, and
// none waits for a message that another starts only after waiting for one of its own.
#ifndef ACCO_COMM_COLLECTIVES_HOST_H
#define ACCO_COMM_COLLECTIVES_HOST_H

#include "comm/collective.h"
#include "comm/transport.h"

// ---------------------------------------------------------------------------------------
// Message buffers

// A lane receives about 1 MB, so that messages are added up while they are in the second-level
// cache. On two levels it is more, because a rank collects messages for several owners, and
// those between hosts should not become too short. All ranks get the same answer.
static inline size_t host_chunk_elements(const Transport *transport) {
    const Groups *groups = transport_groups(transport);
    size_t lane = groups_are_flat(groups) ? (size_t)1 << 18 : (size_t)1 << 20;
    size_t chunk = lane / (size_t)size_max((size_t)groups->size - 1, 1);
    chunk = chunk < 2048 ? 2048 : size_min(chunk, (size_t)1 << 18) / LAYOUT_BLOCK * LAYOUT_BLOCK;
    return transport->messages.limit > 0 ? transport->messages.limit : chunk;
}

// Plans the message buffers for shards of at most `shard` elements. No format needs more room
// than fp32.
static inline void host_collectives_reserve(Transport *transport, Arena *arena, size_t shard) {
    if (transport->size == 1) { return; }
    const Groups *groups = transport_groups(transport);
    MessageBuffers *messages = &transport->messages;
    size_t mine = (size_t)owners_count(groups, transport->rank), hosts = (size_t)groups->hosts;
    size_t mates = (size_t)groups_count(groups, groups->host_of[transport->rank]) - 1;
    messages->chunk = layout_round_up(size_min(shard, host_chunk_elements(transport)), LAYOUT_BLOCK);
    messages->slot_bytes = messages->chunk * sizeof(float);
    messages->lanes = shard <= messages->chunk ? 1 : TRANSPORT_LANES;
    messages->inside_slots = mates > 0 ? size_max(mates * mine, (size_t)transport->size - mine) : 0;
    messages->sent_slots = size_max(mine - 1, 1);
    messages->received_slots = size_max(hosts - 1, mates > 0 ? mine : mine - 1);
    size_t slot = messages->lanes * messages->slot_bytes;
    arena_reserve_host(arena, MEMORY_COMMUNICATION, "messages being sent", messages->sent_slots * slot,
                       &messages->sent);
    arena_reserve_host(arena, MEMORY_COMMUNICATION, "messages being received",
                       messages->received_slots * slot, &messages->received);
    if (messages->inside_slots == 0) { return; }
    arena_reserve_host(arena, MEMORY_COMMUNICATION, "messages being sent inside the host",
                       messages->inside_slots * slot, &messages->inside_sent);
    arena_reserve_host(arena, MEMORY_COMMUNICATION, "messages being received inside the host",
                       messages->inside_slots * slot, &messages->inside_received);
}

// The messages of a lane, one behind the other. buffer: one of the four above.
static inline char *host_lane(const MessageBuffers *messages, char *buffer, size_t slots, Lane lane) {
    assert((size_t)lane.number < messages->lanes);
    return buffer + (size_t)lane.number * slots * messages->slot_bytes;
}

// ---------------------------------------------------------------------------------------
// Chunks and ranges

// A collective under way, as its stages see it.
typedef struct HostExchange {
    Transport *transport;
    const Collective *collective;
    const Groups *groups;
    int rank, host, mates; // this rank, its host, and the ranks there, itself included
    size_t first, end;     // cells
    size_t length;         // own elements in them, of the rank that has most
} HostExchange;

// Where the own elements of `rank` in the cells of the exchange begin in its shard.
static inline size_t host_begin(const HostExchange *exchange, int rank) {
    return layout_piece(exchange->collective->layout, exchange->first, rank).own;
}

static inline size_t host_end(const HostExchange *exchange, int rank) {
    return layout_piece(exchange->collective->layout, exchange->end, rank).own;
}

static inline HostExchange host_exchange(Transport *transport, const Collective *collective, size_t first,
                                         size_t end) {
    const Groups *groups = transport_groups(transport);
    int host = groups->host_of[transport->rank];
    HostExchange exchange = {.transport = transport,
                             .collective = collective,
                             .groups = groups,
                             .rank = transport->rank,
                             .host = host,
                             .mates = groups_count(groups, host),
                             .first = first,
                             .end = end,
                             .length = layout_most(collective->layout, first, end)};
    return exchange;
}

// The own elements [begin, end) of every rank, counted from its first one in the exchange, which
// travel together. A rank that has fewer sends a shorter message, or none.
typedef struct Chunk {
    size_t begin, end;
} Chunk;

// The chunk from `begin` on; empty at the end. Where pieces are equal, it has whole ones if they
// fit into a message; otherwise a piece is cut into equal parts at multiples of LAYOUT_BLOCK.
static inline Chunk host_next_chunk(const HostExchange *exchange, size_t begin) {
    size_t piece = exchange->collective->layout->piece, most = exchange->transport->messages.chunk;
    size_t length = exchange->length - begin;
    if (piece == 0) {
        length = size_min(length, most);
    } else if (piece <= most) {
        length = size_min(length, most / piece * piece);
    } else {
        size_t parts = (piece + most - 1) / most, rest = piece - begin % piece;
        length = size_min(size_min(length, rest), layout_round_up((piece + parts - 1) / parts, LAYOUT_BLOCK));
    }
    Chunk chunk = {begin, begin + length};
    return chunk;
}

typedef struct ChunkRange {
    LayoutRange at;
    size_t offset; // of its bytes in the message
} ChunkRange;

// Steps to the owner's next range in the chunk; `range` begins as {0}. Returns false behind the
// last one, when range->offset is the size of the message.
static inline bool host_next_range(const HostExchange *exchange, WireFormat wire, int owner, Chunk chunk,
                                   ChunkRange *range) {
    size_t begin = host_begin(exchange, owner);
    range->offset += wire_bytes(wire, range->at.count);
    if (range->at.count == 0) { range->at.own = begin + chunk.begin; }
    return layout_next(exchange->collective->layout, owner,
                       size_min(begin + chunk.end, host_end(exchange, owner)), &range->at);
}

// The size of the owner's elements of the chunk when they are encoded.
static inline size_t host_chunk_bytes(const HostExchange *exchange, WireFormat wire, int owner, Chunk chunk) {
    ChunkRange range = {0};
    while (host_next_range(exchange, wire, owner, chunk, &range)) {}
    return range.offset;
}

// Where the owner's elements of the chunk are in the vector, if they can be sent from there without
// a copy: they are contiguous, and the wire format is fp32. Otherwise NULL.
static inline float *host_plain(const HostExchange *exchange, int owner, Chunk chunk) {
    const Collective *collective = exchange->collective;
    ChunkRange range = {0};
    if (collective->wire != WIRE_FP32 || !host_next_range(exchange, WIRE_FP32, owner, chunk, &range)) {
        return NULL;
    }
    float *place = collective->buffer + range.at.flat;
    return host_next_range(exchange, WIRE_FP32, owner, chunk, &range) ? NULL : place;
}

// Starts a message, if it is not empty.
static inline void host_post(const HostExchange *exchange, Lane lane, bool is_send, int peer, void *data,
                             size_t bytes) {
    if (bytes > 0) { transport_post(exchange->transport, lane, is_send, peer, data, bytes); }
}

// Elements that are added up or rounded at a time: whole blocks of the coarse formats.
enum { HOST_BLOCK = 4 * WIRE_BLOCK };

// A chunk passes three stages, one per turn, and each turn works on three chunks: the newest
// and the two before it. `number` counts chunks, so that their lanes alternate.
typedef struct HostStage {
    void (*work)(const HostExchange *exchange, int number, Chunk chunk);
    int age; // of the chunk that it works on, in turns
} HostStage;

enum { HOST_STAGES = 3 };

// Takes all chunks through the stages (HOST_STAGES), which are given in the order of their work in
// a turn.
static inline void host_for_chunks(const HostExchange *exchange, const HostStage *stages) {
    size_t end = exchange->length;
    Chunk none = {end, end}, chunks[HOST_STAGES] = {none, none, none}; // by age
    chunks[0] = host_next_chunk(exchange, 0);
    for (int turn = 0; chunks[0].begin < end || chunks[1].begin < end || chunks[2].begin < end; turn++) {
        for (int i = 0; i < HOST_STAGES; i++) {
            Chunk chunk = chunks[stages[i].age];
            if (chunk.begin < end) { stages[i].work(exchange, turn - stages[i].age, chunk); }
        }
        chunks[2] = chunks[1];
        chunks[1] = chunks[0];
        chunks[0] = host_next_chunk(exchange, chunks[1].end);
    }
}

// ---------------------------------------------------------------------------------------
// Reduce-scatter

// The size of the message with all owners whose delegate a rank is.
static inline size_t host_owners_bytes(const HostExchange *exchange, WireFormat wire, int delegate,
                                       Chunk chunk) {
    size_t bytes = 0;
    for (OwnerWalk walk = owners_of(exchange->groups, delegate); owners_next(&walk);) {
        bytes += host_chunk_bytes(exchange, wire, walk.owner, chunk);
    }
    return bytes;
}

// Every rank of this host gets the parts that it adds up: the chunk of all owners whose
// delegate it is, one owner behind the other.
static inline void host_reduce_inside(const HostExchange *exchange, int number, Chunk chunk) {
    const Collective *collective = exchange->collective;
    MessageBuffers *messages = &exchange->transport->messages;
    Lane lane = {INSIDE_HOSTS, number % TRANSPORT_LANES};
    if (exchange->mates == 1) { return; }
    char *out = host_lane(messages, messages->inside_sent, messages->inside_slots, lane);
    char *in = host_lane(messages, messages->inside_received, messages->inside_slots, lane);
    size_t received = host_owners_bytes(exchange, WIRE_FP32, exchange->rank, chunk);
    for (int step = 1; step < exchange->mates; step++) {
        int to = groups_mate(exchange->groups, exchange->rank, step),
            from = groups_mate(exchange->groups, exchange->rank, -step);
        char *message = out;
        for (OwnerWalk walk = owners_of(exchange->groups, to); owners_next(&walk);) {
            for (ChunkRange range = {0}; host_next_range(exchange, WIRE_FP32, walk.owner, chunk, &range);) {
                size_t bytes = range.at.count * sizeof(float);
                memcpy(out, collective->buffer + range.at.flat, bytes);
                out += bytes;
            }
        }
        host_post(exchange, lane, false, from, in, received);
        host_post(exchange, lane, true, to, message, (size_t)(out - message));
        in += received;
    }
}

// Waits for these parts. For every owner whose delegate this rank is, `buffer` then holds the
// sum over the ranks of this host, in their order.
static inline void host_sum_inside(const HostExchange *exchange, int number, Chunk chunk) {
    const Collective *collective = exchange->collective;
    MessageBuffers *messages = &exchange->transport->messages;
    Lane lane = {INSIDE_HOSTS, number % TRANSPORT_LANES};
    int mates = exchange->mates, place = exchange->groups->place[exchange->rank];
    size_t message = host_owners_bytes(exchange, WIRE_FP32, exchange->rank, chunk) / sizeof(float);
    const float *in =
        (const float *)(void *)host_lane(messages, messages->inside_received, messages->inside_slots, lane);
    float sum[HOST_BLOCK];
    transport_wait(exchange->transport, lane);
    for (OwnerWalk walk = owners_of(exchange->groups, exchange->rank); owners_next(&walk);) {
        for (ChunkRange range = {0}; host_next_range(exchange, WIRE_FP32, walk.owner, chunk, &range);) {
            for (size_t begin = 0, count; begin < range.at.count; begin += count) {
                float *mine = collective->buffer + range.at.flat + begin;
                count = size_min(range.at.count - begin, HOST_BLOCK);
                memset(sum, 0, sizeof sum);
                for (int mate = 0; mate < mates; mate++) {
                    size_t number_of_message = (size_t)((place - mate + mates) % mates); // 0: this rank
                    const float *part = mate == place ? mine : in + (number_of_message - 1) * message;
                    wire_add(WIRE_FP32, sum, part, count);
                }
                memcpy(mine, sum, count * sizeof(float));
                in += count;
            }
        }
    }
}

// The sums of this host are made, and go to their owners.
static inline void host_reduce_between(const HostExchange *exchange, int number, Chunk chunk) {
    const Collective *collective = exchange->collective;
    const Groups *groups = exchange->groups;
    MessageBuffers *messages = &exchange->transport->messages;
    Lane lane = {BETWEEN_HOSTS, number % TRANSPORT_LANES};
    if (exchange->mates > 1) { host_sum_inside(exchange, number, chunk); }
    WireFormat wire = collective->wire;
    size_t received = host_chunk_bytes(exchange, wire, exchange->rank, chunk);
    char *out = host_lane(messages, messages->sent, messages->sent_slots, lane);
    char *in = host_lane(messages, messages->received, messages->received_slots, lane);
    for (int step = 1; step < groups->hosts; step++) {
        int from = groups_delegate(groups, groups_other_host(groups, exchange->host, -step), exchange->rank);
        int host = groups_other_host(groups, exchange->host, step);
        host_post(exchange, lane, false, from, in, received);
        in += received;
        OwnerWalk walk = owners_on(groups, exchange->rank, host, host + 1);
        while (owners_next(&walk)) {
            size_t bytes = host_chunk_bytes(exchange, wire, walk.owner, chunk);
            void *message = host_plain(exchange, walk.owner, chunk);
            if (message == NULL) {
                for (ChunkRange range = {0}; host_next_range(exchange, wire, walk.owner, chunk, &range);) {
                    wire_encode(wire, out + range.offset, collective->buffer + range.at.flat, range.at.count);
                }
                message = out;
                out += bytes;
            }
            host_post(exchange, lane, true, walk.owner, message, bytes);
        }
    }
}

// Waits for the sums of the other hosts. This rank's own elements become the sum over the
// hosts, in their order.
static inline void host_reduce_finish(const HostExchange *exchange, int number, Chunk chunk) {
    const Collective *collective = exchange->collective;
    WireFormat wire = collective->wire;
    MessageBuffers *messages = &exchange->transport->messages;
    Lane lane = {BETWEEN_HOSTS, number % TRANSPORT_LANES};
    int hosts = exchange->groups->hosts;
    size_t bytes = host_chunk_bytes(exchange, wire, exchange->rank, chunk);
    const char *in = host_lane(messages, messages->received, messages->received_slots, lane);
    float sum[HOST_BLOCK];
    uint32_t own[HOST_BLOCK]; // encoded; the widest format is fp32
    if (hosts == 1) { return; }
    transport_wait(exchange->transport, lane);
    for (ChunkRange range = {0}; host_next_range(exchange, wire, exchange->rank, chunk, &range);) {
        float *mine = collective->buffer + range.at.flat;
        for (size_t begin = 0; begin < range.at.count; begin += HOST_BLOCK) {
            size_t count = size_min(range.at.count - begin, HOST_BLOCK);
            memset(sum, 0, sizeof sum);
            wire_encode(wire, own, mine + begin, count);
            for (int host = 0; host < hosts; host++) {
                const char *message = (const char *)own;
                if (host != exchange->host) {
                    size_t slot = (size_t)((exchange->host - host + hosts) % hosts - 1);
                    message = in + slot * bytes + range.offset + wire_bytes(wire, begin);
                }
                wire_add(wire, sum, message, count);
            }
            memcpy(mine + begin, sum, count * sizeof(float));
        }
    }
}

// On return this rank's own elements of cells [first, end) hold the sum over all ranks. Elsewhere in
// `buffer`, what this rank is a delegate for holds sums over its host; the rest is as it was.
// A world of one rank adds nothing and rounds nothing, and an exchange on two levels with only
// one host does not round either.
static inline void host_reduce_scatter(Transport *transport, const Collective *collective, size_t first,
                                       size_t end) {
    if (transport->size == 1) { return; }
    HostExchange exchange = host_exchange(transport, collective, first, end);
    transport_begin(transport, "reduce-scatter");
    static const HostStage stages[HOST_STAGES] = {
        {host_reduce_inside, 0}, {host_reduce_between, 1}, {host_reduce_finish, 2}};
    host_for_chunks(&exchange, stages);
}

// ---------------------------------------------------------------------------------------
// All-gather

// Sets this rank's own elements of the chunk in `buffer` to what the other ranks receive: they
// are encoded and decoded again. If there is a base, the difference to it is rounded, and base
// is added again. message: receives the encoded chunk; may be NULL.
static inline void host_round_chunk(const HostExchange *exchange, Chunk chunk, char *message) {
    const Collective *collective = exchange->collective;
    WireFormat wire = collective->wire;
    float values[HOST_BLOCK];
    uint32_t own[HOST_BLOCK];
    for (ChunkRange range = {0}; host_next_range(exchange, wire, exchange->rank, chunk, &range);) {
        float *target = collective->buffer + range.at.flat;
        const float *source = collective_source(collective, &range.at),
                    *base = collective_base(collective, range.at.flat);
        for (size_t begin = 0; begin < range.at.count; begin += HOST_BLOCK) {
            size_t n = size_min(range.at.count - begin, HOST_BLOCK);
            char *encoded = message != NULL ? message + range.offset + wire_bytes(wire, begin) : (char *)own;
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
}

// Where in `buffer` an owner's message is received: it is what shall stand there, and no other rank
// waits for this one to pass it on. Otherwise NULL.
static inline float *host_arrival(const HostExchange *exchange, int owner, Chunk chunk) {
    bool as_it_is = exchange->mates == 1 && exchange->collective->base == NULL;
    return as_it_is ? host_plain(exchange, owner, chunk) : NULL;
}

// This rank's own elements go to its delegates on the other hosts. What it receives as a
// delegate lies owner behind owner; its own elements are among them if it has mates, which
// get it all.
static inline void host_gather_between(const HostExchange *exchange, int number, Chunk chunk) {
    const Collective *collective = exchange->collective;
    const Groups *groups = exchange->groups;
    MessageBuffers *messages = &exchange->transport->messages;
    Lane lane = {BETWEEN_HOSTS, number % TRANSPORT_LANES};
    size_t sent = host_chunk_bytes(exchange, collective->wire, exchange->rank, chunk);
    char *in = host_lane(messages, messages->received, messages->received_slots, lane), *mine = in;
    OwnerWalk walk = owners_of(groups, exchange->rank);
    while (owners_next(&walk)) {
        if (walk.owner == exchange->rank) {
            bool passed_on = exchange->mates > 1;
            mine = passed_on ? in : host_lane(messages, messages->sent, messages->sent_slots, lane);
            in += passed_on ? sent : 0;
            continue;
        }
        size_t bytes = host_chunk_bytes(exchange, collective->wire, walk.owner, chunk);
        float *place = host_arrival(exchange, walk.owner, chunk);
        host_post(exchange, lane, false, walk.owner, place != NULL ? (void *)place : in, bytes);
        in += bytes;
    }
    float *place = host_arrival(exchange, exchange->rank, chunk);
    if (place != NULL) {
        mine = (char *)place;
        size_t own = host_begin(exchange, exchange->rank) + chunk.begin;
        if (collective->source != NULL) { memcpy(mine, collective->source + own, sent); }
    } else {
        host_round_chunk(exchange, chunk, mine);
    }
    for (int step = 1; step < groups->hosts; step++) {
        int to = groups_delegate(groups, groups_other_host(groups, exchange->host, step), exchange->rank);
        host_post(exchange, lane, true, to, mine, sent);
    }
}

// What this rank has received from the other hosts goes to its mates, with its own elements.
static inline void host_gather_inside(const HostExchange *exchange, int number, Chunk chunk) {
    MessageBuffers *messages = &exchange->transport->messages;
    Lane lane = {INSIDE_HOSTS, number % TRANSPORT_LANES}, between = {BETWEEN_HOSTS, lane.number};
    WireFormat wire = exchange->collective->wire;
    transport_wait(exchange->transport, between);
    if (exchange->mates == 1) { return; }
    char *out = host_lane(messages, messages->received, messages->received_slots, between);
    char *in = host_lane(messages, messages->inside_received, messages->inside_slots, lane);
    size_t sent = host_owners_bytes(exchange, wire, exchange->rank, chunk);
    for (int step = 1; step < exchange->mates; step++) {
        int to = groups_mate(exchange->groups, exchange->rank, step),
            from = groups_mate(exchange->groups, exchange->rank, -step);
        size_t received = host_owners_bytes(exchange, wire, from, chunk);
        host_post(exchange, lane, false, from, in, received);
        host_post(exchange, lane, true, to, out, sent);
        in += received;
    }
}

// Decodes the chunk of all owners whose delegate a rank is. Returns the end of `in`.
static inline const char *host_decode_owners(const HostExchange *exchange, int delegate, Chunk chunk,
                                             const char *in) {
    const Collective *collective = exchange->collective;
    WireFormat wire = collective->wire;
    for (OwnerWalk walk = owners_of(exchange->groups, delegate); owners_next(&walk);) {
        bool own = walk.owner == exchange->rank, there = host_arrival(exchange, walk.owner, chunk) != NULL;
        for (ChunkRange range = {0};
             !own && !there && host_next_range(exchange, wire, walk.owner, chunk, &range);) {
            float *target = collective->buffer + range.at.flat, values[HOST_BLOCK]; // target may be base
            const float *base = collective_base(collective, range.at.flat);
            const char *message = in + range.offset;
            if (base == NULL) { wire_decode(wire, target, message, range.at.count); }
            for (size_t begin = 0; base != NULL && begin < range.at.count; begin += HOST_BLOCK) {
                size_t n = size_min(range.at.count - begin, HOST_BLOCK);
                wire_decode(wire, values, message + wire_bytes(wire, begin), n);
                for (size_t i = 0; i < n; i++) { target[begin + i] = base[begin + i] + values[i]; }
            }
        }
        in += own && exchange->mates == 1 ? 0 : host_chunk_bytes(exchange, wire, walk.owner, chunk);
    }
    return in;
}

static inline void host_gather_finish(const HostExchange *exchange, int number, Chunk chunk) {
    MessageBuffers *messages = &exchange->transport->messages;
    Lane lane = {INSIDE_HOSTS, number % TRANSPORT_LANES}, between = {BETWEEN_HOSTS, lane.number};
    host_decode_owners(exchange, exchange->rank, chunk,
                       host_lane(messages, messages->received, messages->received_slots, between));
    if (exchange->mates == 1) { return; }
    transport_wait(exchange->transport, lane);
    const char *in = host_lane(messages, messages->inside_received, messages->inside_slots, lane);
    for (int step = 1; step < exchange->mates; step++) {
        in = host_decode_owners(exchange, groups_mate(exchange->groups, exchange->rank, -step), chunk, in);
    }
}

// On return `buffer` holds every rank's own elements of cells [first, end), rounded by the wire:
// the same bits on all ranks. A world of one rank rounds as a larger one would.
static inline void host_all_gather(Transport *transport, const Collective *collective, size_t first,
                                   size_t end) {
    HostExchange exchange = host_exchange(transport, collective, first, end);
    if (transport->size == 1) {
        Chunk all = {0, exchange.length};
        host_round_chunk(&exchange, all, NULL);
        return;
    }
    transport_begin(transport, "all-gather");
    // The oldest chunk first: it frees the lanes that the newest takes.
    static const HostStage stages[HOST_STAGES] = {
        {host_gather_finish, 2}, {host_gather_between, 0}, {host_gather_inside, 1}};
    host_for_chunks(&exchange, stages);
}

#endif
