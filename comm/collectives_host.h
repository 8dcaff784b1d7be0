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
// The own elements [first, end) of every rank are cut into chunks, a chunk into ranges:
//
//   own      | piece | piece | piece | piece |   of one rank, [first, end)
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

// The own elements [begin, end) of every rank, which travel together.
typedef struct Chunk {
    size_t begin, end;
} Chunk;

// The chunk from `begin` on; empty at the end. It has whole pieces if they fit into a
// message; otherwise a piece is cut into equal parts at multiples of LAYOUT_BLOCK.
static inline Chunk host_next_chunk(const Transport *transport, const Layout *layout, size_t begin,
                                    size_t end) {
    size_t piece = layout->piece, most = transport->messages.chunk, length;
    if (begin >= end) {
        length = 0;
    } else if (piece <= most) {
        length = size_min(most / piece * piece, end - begin);
    } else {
        size_t parts = (piece + most - 1) / most;
        length = layout_round_up((piece + parts - 1) / parts, LAYOUT_BLOCK);
        length = size_min(length, layout_range(layout, begin, end));
    }
    Chunk chunk = {begin, begin + length};
    return chunk;
}

typedef struct ChunkRange {
    size_t own;    // its first element
    size_t count;  // elements
    size_t offset; // of its bytes in the message
} ChunkRange;

// Steps to the next range of the chunk; `range` begins as {.own = chunk.begin}. Returns false
// behind the last one, when range->offset is the size of the message.
static inline bool host_next_range(const Collective *collective, Chunk chunk, ChunkRange *range) {
    range->own += range->count;
    range->offset += wire_bytes(collective->wire, range->count);
    if (range->own >= chunk.end) { return false; }
    range->count = layout_range(collective->layout, range->own, chunk.end);
    return true;
}

// The size of one rank's elements of the chunk when they are encoded.
static inline size_t host_chunk_bytes(const Collective *collective, Chunk chunk) {
    ChunkRange range = {.own = chunk.begin};
    while (host_next_range(collective, chunk, &range)) {}
    return range.offset;
}

// Whether the chunk can be sent from the vector without a copy: it is contiguous there, and
// the wire format is fp32.
static inline bool host_is_plain(const Collective *collective, Chunk chunk) {
    size_t length = chunk.end - chunk.begin;
    return collective->wire == WIRE_FP32 && length > 0 &&
           layout_range(collective->layout, chunk.begin, chunk.end) == length;
}

// Elements that are added up or rounded at a time: whole blocks of the coarse formats.
enum { HOST_BLOCK = 4 * WIRE_BLOCK };

// A collective under way, as its stages see it.
typedef struct HostExchange {
    Transport *transport;
    const Collective *collective;
    const Groups *groups;
    int rank, host, mates; // this rank, its host, and the ranks there, itself included
} HostExchange;

static inline HostExchange host_exchange(Transport *transport, const Collective *collective) {
    const Groups *groups = transport_groups(transport);
    int host = groups->host_of[transport->rank];
    HostExchange exchange = {.transport = transport,
                             .collective = collective,
                             .groups = groups,
                             .rank = transport->rank,
                             .host = host,
                             .mates = groups_count(groups, host)};
    return exchange;
}

// A chunk passes three stages, one per turn, and each turn works on three chunks: the newest
// and the two before it. `number` counts chunks, so that their lanes alternate.
typedef struct HostStage {
    void (*work)(const HostExchange *exchange, int number, Chunk chunk);
    int age; // of the chunk that it works on, in turns
} HostStage;

enum { HOST_STAGES = 3 };

// Takes all chunks of [first, end) through the stages (HOST_STAGES), which are given in the
// order of their work in a turn.
static inline void host_for_chunks(const HostExchange *exchange, size_t first, size_t end,
                                   const HostStage *stages) {
    const Layout *layout = exchange->collective->layout;
    Chunk none = {end, end}, chunks[HOST_STAGES] = {none, none, none}; // by age
    chunks[0] = host_next_chunk(exchange->transport, layout, first, end);
    for (int turn = 0; chunks[0].begin < end || chunks[1].begin < end || chunks[2].begin < end; turn++) {
        for (int i = 0; i < HOST_STAGES; i++) {
            Chunk chunk = chunks[stages[i].age];
            if (chunk.begin < end) { stages[i].work(exchange, turn - stages[i].age, chunk); }
        }
        chunks[2] = chunks[1];
        chunks[1] = chunks[0];
        chunks[0] = host_next_chunk(exchange->transport, layout, chunks[1].end, end);
    }
}

// ---------------------------------------------------------------------------------------
// Reduce-scatter

// Every rank of this host gets the parts that it adds up: the chunk of all owners whose
// delegate it is, one owner behind the other.
static inline void host_reduce_inside(const HostExchange *exchange, int number, Chunk chunk) {
    const Collective *collective = exchange->collective;
    MessageBuffers *messages = &exchange->transport->messages;
    Lane lane = {INSIDE_HOSTS, number % TRANSPORT_LANES};
    if (exchange->mates == 1) { return; }
    size_t received = (size_t)owners_count(exchange->groups, exchange->rank) * (chunk.end - chunk.begin);
    float *out = (float *)(void *)host_lane(messages, messages->inside_sent, messages->inside_slots, lane);
    float *in = (float *)(void *)host_lane(messages, messages->inside_received, messages->inside_slots, lane);
    for (int step = 1; step < exchange->mates; step++) {
        int to = groups_mate(exchange->groups, exchange->rank, step),
            from = groups_mate(exchange->groups, exchange->rank, -step);
        size_t packed = 0;
        for (OwnerWalk walk = owners_of(exchange->groups, to); owners_next(&walk);) {
            for (size_t own = chunk.begin, count; own < chunk.end; own += count) {
                count = layout_range(collective->layout, own, chunk.end);
                memcpy(out + packed, collective->buffer + layout_flat(collective->layout, walk.owner, own),
                       count * sizeof(float));
                packed += count;
            }
        }
        transport_post(exchange->transport, lane, false, from, in, received * sizeof(float));
        transport_post(exchange->transport, lane, true, to, out, packed * sizeof(float));
        in += received;
        out += packed;
    }
}

// Waits for these parts. For every owner whose delegate this rank is, `buffer` then holds the
// sum over the ranks of this host, in their order.
static inline void host_sum_inside(const HostExchange *exchange, int number, Chunk chunk) {
    const Collective *collective = exchange->collective;
    MessageBuffers *messages = &exchange->transport->messages;
    Lane lane = {INSIDE_HOSTS, number % TRANSPORT_LANES};
    int mates = exchange->mates, place = exchange->groups->place[exchange->rank];
    size_t length = chunk.end - chunk.begin; // one owner's part of a message
    size_t stride = (size_t)owners_count(exchange->groups, exchange->rank) * length;
    const float *in =
        (const float *)(void *)host_lane(messages, messages->inside_received, messages->inside_slots, lane);
    float sum[HOST_BLOCK];
    transport_wait(exchange->transport, lane);
    for (OwnerWalk walk = owners_of(exchange->groups, exchange->rank); owners_next(&walk); in += length) {
        for (size_t own = chunk.begin, count; own < chunk.end; own += count) {
            float *mine = collective->buffer + layout_flat(collective->layout, walk.owner, own);
            count = size_min(layout_range(collective->layout, own, chunk.end), HOST_BLOCK);
            memset(sum, 0, sizeof sum);
            for (int mate = 0; mate < mates; mate++) {
                size_t message = (size_t)((place - mate + mates) % mates); // 0: this rank
                const float *part = mate == place ? mine : in + (message - 1) * stride + (own - chunk.begin);
                wire_add(WIRE_FP32, sum, part, count);
            }
            memcpy(mine, sum, count * sizeof(float));
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
    size_t bytes = host_chunk_bytes(collective, chunk);
    bool plain = host_is_plain(collective, chunk);
    char *out = host_lane(messages, messages->sent, messages->sent_slots, lane);
    char *in = host_lane(messages, messages->received, messages->received_slots, lane);
    for (int step = 1; step < groups->hosts; step++) {
        int from = groups_delegate(groups, groups_other_host(groups, exchange->host, -step), exchange->rank);
        int host = groups_other_host(groups, exchange->host, step);
        transport_post(exchange->transport, lane, false, from, in, bytes);
        in += bytes;
        OwnerWalk walk = owners_on(groups, exchange->rank, host, host + 1);
        while (owners_next(&walk)) {
            void *message = collective->buffer + layout_flat(collective->layout, walk.owner, chunk.begin);
            if (!plain) {
                ChunkRange range = {.own = chunk.begin};
                while (host_next_range(collective, chunk, &range)) {
                    size_t flat = layout_flat(collective->layout, walk.owner, range.own);
                    wire_encode(collective->wire, out + range.offset, collective->buffer + flat, range.count);
                }
                message = out;
                out += bytes;
            }
            transport_post(exchange->transport, lane, true, walk.owner, message, bytes);
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
    size_t bytes = host_chunk_bytes(collective, chunk);
    const char *in = host_lane(messages, messages->received, messages->received_slots, lane);
    float sum[HOST_BLOCK];
    uint32_t own[HOST_BLOCK]; // encoded; the widest format is fp32
    if (hosts == 1) { return; }
    transport_wait(exchange->transport, lane);
    for (ChunkRange range = {.own = chunk.begin}; host_next_range(collective, chunk, &range);) {
        float *mine = collective->buffer + layout_flat(collective->layout, exchange->rank, range.own);
        for (size_t begin = 0; begin < range.count; begin += HOST_BLOCK) {
            size_t count = size_min(range.count - begin, HOST_BLOCK);
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

// On return this rank's own elements [first, end) hold the sum over all ranks. Elsewhere in
// `buffer`, what this rank is a delegate for holds sums over its host; the rest is as it was.
// A world of one rank adds nothing and rounds nothing, and an exchange on two levels with only
// one host does not round either.
static inline void host_reduce_scatter(Transport *transport, const Collective *collective, size_t first,
                                       size_t end) {
    if (transport->size == 1) { return; }
    HostExchange exchange = host_exchange(transport, collective);
    transport_begin(transport, "reduce-scatter");
    static const HostStage stages[HOST_STAGES] = {
        {host_reduce_inside, 0}, {host_reduce_between, 1}, {host_reduce_finish, 2}};
    host_for_chunks(&exchange, first, end, stages);
}

// ---------------------------------------------------------------------------------------
// All-gather

// Sets this rank's own elements of the chunk in `buffer` to what the other ranks receive: they
// are encoded and decoded again. If there is a base, the difference to it is rounded, and base
// is added again. message: receives the encoded chunk; may be NULL.
static inline void host_round_chunk(const Transport *transport, const Collective *collective, Chunk chunk,
                                    char *message) {
    WireFormat wire = collective->wire;
    float values[HOST_BLOCK];
    uint32_t own[HOST_BLOCK];
    for (ChunkRange range = {.own = chunk.begin}; host_next_range(collective, chunk, &range);) {
        size_t flat = layout_flat(collective->layout, transport->rank, range.own);
        float *target = collective->buffer + flat;
        const float *source = collective_source(collective, transport->rank, range.own),
                    *base = collective_base(collective, flat);
        for (size_t begin = 0; begin < range.count; begin += HOST_BLOCK) {
            size_t n = size_min(range.count - begin, HOST_BLOCK);
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

// Whether messages are received in `buffer` itself: they are what it shall hold, and no other
// rank waits for this one to pass them on.
static inline bool host_arrives_in_place(const HostExchange *exchange, Chunk chunk) {
    return exchange->mates == 1 && exchange->collective->base == NULL &&
           host_is_plain(exchange->collective, chunk);
}

// This rank's own elements go to its delegates on the other hosts. What it receives as a
// delegate lies owner behind owner; its own elements are among them if it has mates, which
// get it all.
static inline void host_gather_between(const HostExchange *exchange, int number, Chunk chunk) {
    const Collective *collective = exchange->collective;
    const Groups *groups = exchange->groups;
    MessageBuffers *messages = &exchange->transport->messages;
    Lane lane = {BETWEEN_HOSTS, number % TRANSPORT_LANES};
    size_t bytes = host_chunk_bytes(collective, chunk);
    bool in_place = host_arrives_in_place(exchange, chunk);
    char *in = host_lane(messages, messages->received, messages->received_slots, lane), *mine = in;
    OwnerWalk walk = owners_of(groups, exchange->rank);
    while (owners_next(&walk)) {
        if (walk.owner == exchange->rank) {
            bool passed_on = exchange->mates > 1;
            mine = passed_on ? in : host_lane(messages, messages->sent, messages->sent_slots, lane);
            in += passed_on ? bytes : 0;
            continue;
        }
        void *target = in_place
                           ? collective->buffer + layout_flat(collective->layout, walk.owner, chunk.begin)
                           : (float *)(void *)in;
        transport_post(exchange->transport, lane, false, walk.owner, target, bytes);
        in += bytes;
    }
    if (in_place) {
        mine = (char *)(collective->buffer + layout_flat(collective->layout, exchange->rank, chunk.begin));
        if (collective->source != NULL) { memcpy(mine, collective->source + chunk.begin, bytes); }
    } else {
        host_round_chunk(exchange->transport, collective, chunk, mine);
    }
    for (int step = 1; step < groups->hosts; step++) {
        int to = groups_delegate(groups, groups_other_host(groups, exchange->host, step), exchange->rank);
        transport_post(exchange->transport, lane, true, to, mine, bytes);
    }
}

// What this rank has received from the other hosts goes to its mates, with its own elements.
static inline void host_gather_inside(const HostExchange *exchange, int number, Chunk chunk) {
    MessageBuffers *messages = &exchange->transport->messages;
    Lane lane = {INSIDE_HOSTS, number % TRANSPORT_LANES}, between = {BETWEEN_HOSTS, lane.number};
    size_t bytes = host_chunk_bytes(exchange->collective, chunk);
    transport_wait(exchange->transport, between);
    if (exchange->mates == 1) { return; }
    char *out = host_lane(messages, messages->received, messages->received_slots, between);
    char *in = host_lane(messages, messages->inside_received, messages->inside_slots, lane);
    size_t sent = (size_t)owners_count(exchange->groups, exchange->rank) * bytes;
    for (int step = 1; step < exchange->mates; step++) {
        int to = groups_mate(exchange->groups, exchange->rank, step),
            from = groups_mate(exchange->groups, exchange->rank, -step);
        size_t received = (size_t)owners_count(exchange->groups, from) * bytes;
        transport_post(exchange->transport, lane, false, from, in, received);
        transport_post(exchange->transport, lane, true, to, out, sent);
        in += received;
    }
}

// Decodes the chunk of all owners whose delegate a rank is. Returns the end of `in`.
static inline const char *host_decode_owners(const HostExchange *exchange, int delegate, Chunk chunk,
                                             const char *in) {
    const Collective *collective = exchange->collective;
    size_t bytes = host_chunk_bytes(collective, chunk);
    OwnerWalk walk = owners_of(exchange->groups, delegate);
    while (owners_next(&walk)) {
        bool own = walk.owner == exchange->rank;
        ChunkRange range = {.own = chunk.begin};
        while (!own && host_next_range(collective, chunk, &range)) {
            size_t flat = layout_flat(collective->layout, walk.owner, range.own);
            float *target = collective->buffer + flat, values[HOST_BLOCK]; // target may be base
            const float *base = collective_base(collective, flat);
            if (base == NULL) { wire_decode(collective->wire, target, in + range.offset, range.count); }
            for (size_t begin = 0; base != NULL && begin < range.count; begin += HOST_BLOCK) {
                size_t n = size_min(range.count - begin, HOST_BLOCK);
                wire_decode(collective->wire, values, in + range.offset + wire_bytes(collective->wire, begin),
                            n);
                for (size_t i = 0; i < n; i++) { target[begin + i] = base[begin + i] + values[i]; }
            }
        }
        in += own && exchange->mates == 1 ? 0 : bytes;
    }
    return in;
}

static inline void host_gather_finish(const HostExchange *exchange, int number, Chunk chunk) {
    MessageBuffers *messages = &exchange->transport->messages;
    Lane lane = {INSIDE_HOSTS, number % TRANSPORT_LANES}, between = {BETWEEN_HOSTS, lane.number};
    if (host_arrives_in_place(exchange, chunk)) { return; }
    host_decode_owners(exchange, exchange->rank, chunk,
                       host_lane(messages, messages->received, messages->received_slots, between));
    if (exchange->mates == 1) { return; }
    transport_wait(exchange->transport, lane);
    const char *in = host_lane(messages, messages->inside_received, messages->inside_slots, lane);
    for (int step = 1; step < exchange->mates; step++) {
        in = host_decode_owners(exchange, groups_mate(exchange->groups, exchange->rank, -step), chunk, in);
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
    HostExchange exchange = host_exchange(transport, collective);
    transport_begin(transport, "all-gather");
    // The oldest chunk first: it frees the lanes that the newest takes.
    static const HostStage stages[HOST_STAGES] = {
        {host_gather_finish, 2}, {host_gather_between, 0}, {host_gather_inside, 1}};
    host_for_chunks(&exchange, first, end, stages);
}

#endif
