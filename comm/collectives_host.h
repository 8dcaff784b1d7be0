// collectives_host.h: reduce-scatter and all-gather of vectors in host memory, by messages on two
// levels. The contract is in collective.h; groups.h says which rank is whose delegate.
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
// The own elements of every rank in the cells [first, end) are cut into chunks, a chunk into
// ranges:
//
//   own      | piece | piece | piece | piece |   of one rank, in these cells
//   chunk    |<---- one ---->|<- the next -->|   what travels at a time: whole pieces, or a
//                                                part of one
//   range    |<----->|<----->|                   a piece or a part of one: contiguous in the
//                                                vector, and encoded by itself
//
// Chunks take turns on the two lanes of each level. While one is added up or decoded, others are
// under way on both levels, and the link between hosts always has the next one's messages queued:
//
//   reduce-scatter   inside hosts     | 0 | 1 | 2 |
//                    between hosts        |   0   |   1   |   2   |
//   all-gather       between hosts    |   0   |   1   |   2   |
//                    inside hosts             | 0 |   | 1 |   | 2 |
//
// There is no deadlock: all ranks start the messages of a level in the order of chunks, and none
// waits for a message that another starts only after waiting for one of its own.
#pragma once

#include "comm/collective.h"
#include "comm/transport.h"

// A lane receives about 1 MB, so that messages are added up while they are in the second-level
// cache; on two levels more, because a rank collects messages for several owners, and those between
// hosts should not become too short. All ranks get the same answer.
static inline size_t host_chunk_elements(const Transport *transport) {
    const Groups *groups = transport_groups(transport);
    size_t lane = groups_are_flat(groups) ? (size_t)1 << 18 : (size_t)1 << 20;
    size_t chunk = lane / size_max((size_t)groups->size - 1, 1);
    chunk = chunk < 2048 ? 2048 : size_min(chunk, (size_t)1 << 18) / LAYOUT_BLOCK * LAYOUT_BLOCK;
    return transport->messages.limit > 0 ? transport->messages.limit : chunk;
}

// Message buffers for shards of at most `shard` elements; no format takes more than fp32.
static inline void host_collectives_reserve(Transport *transport, Arena *arena, size_t shard) {
    static const char *const names[MESSAGE_BUFFERS] = {"messages being sent", "messages being received",
                                                       "messages being sent inside the host",
                                                       "messages being received inside the host"};
    if (transport->size == 1) { return; }
    const Groups *groups = transport_groups(transport);
    MessageBuffers *messages = &transport->messages;
    size_t mine = (size_t)groups_count_owners(groups, groups->rank), hosts = (size_t)groups->hosts;
    size_t others = (size_t)groups->size - mine, mates = (size_t)groups->mates;
    size_t inside = mates > 1 ? size_max((mates - 1) * mine, others) : 0;
    const size_t slots[MESSAGE_BUFFERS] = {size_max(mine - 1, 1),
                                           size_max(hosts - 1, mates > 1 ? mine : mine - 1), inside, inside};
    messages->chunk = layout_round_up(size_min(shard, host_chunk_elements(transport)), LAYOUT_BLOCK);
    size_t lanes = shard <= messages->chunk ? 1 : TRANSPORT_LANES; // 1: everything is one chunk
    for (int i = 0; i < MESSAGE_BUFFERS; i++) {
        size_t bytes = lanes * slots[i] * messages->chunk * sizeof(float);
        messages->slots[i] = slots[i];
        if (bytes == 0) { continue; }
        arena_reserve_host(arena, MEMORY_COMMUNICATION, names[i], bytes, &messages->buffers[i]);
    }
}

// The messages of a lane, one behind the other.
static inline char *host_messages(const Transport *transport, MessageBuffer buffer, Lane lane) {
    const MessageBuffers *messages = &transport->messages;
    size_t slot = (size_t)lane.number * messages->slots[buffer]; // the first of the lane
    return messages->buffers[buffer] + slot * messages->chunk * sizeof(float);
}

// ---- Chunks and ranges ----------------------------------------------------------------

typedef struct HostExchange {
    Transport *transport;
    const Groups *groups;
    const Collective *collective;
    size_t length; // own elements in its cells, of the rank that has most
} HostExchange;

// The own elements [begin, end) of every rank, counted from its first one in the exchange, which
// travel together. A rank that has fewer sends a shorter message, or none.
typedef struct Chunk {
    size_t begin, end;
    int lane; // of each level; chunks take turns
} Chunk;

// The chunk behind another; empty at the end. Where pieces are equal, it has whole ones if they
// fit into a message; otherwise a piece is cut into equal parts at multiples of LAYOUT_BLOCK.
static inline Chunk host_next_chunk(const HostExchange *exchange, const Chunk *before) {
    size_t begin = before->end;
    size_t piece = exchange->collective->layout->piece, most = exchange->transport->messages.chunk;
    size_t length = size_min(exchange->length - begin, piece > 0 ? most / piece * piece : most);
    if (piece > most) {
        size_t parts = (piece + most - 1) / most, rest = piece - begin % piece;
        length = size_min(exchange->length - begin, rest);
        length = size_min(length, layout_round_up((piece + parts - 1) / parts, LAYOUT_BLOCK));
    }
    Chunk chunk = {begin, begin + length, (before->lane + 1) % TRANSPORT_LANES};
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
    const Collective *collective = exchange->collective;
    const Layout *layout = collective->layout;
    size_t begin = layout_piece(layout, collective->first, owner).own,
           end = layout_piece(layout, collective->end, owner).own;
    range->offset += wire_bytes(wire, range->at.count);
    if (range->at.count == 0) { range->at.own = begin + chunk.begin; }
    return layout_next(layout, owner, size_min(begin + chunk.end, end), &range->at);
}

// The size of the owner's elements of the chunk when they are encoded.
static inline size_t host_bytes(const HostExchange *exchange, WireFormat wire, int owner, Chunk chunk) {
    ChunkRange range = {0};
    while (host_next_range(exchange, wire, owner, chunk, &range)) {}
    return range.offset;
}

// The same of all owners whose delegate a rank is.
static inline size_t host_delegated_bytes(const HostExchange *exchange, WireFormat wire, int delegate,
                                          Chunk chunk) {
    size_t bytes = 0;
    for (int owner = -1; groups_next_owner(exchange->groups, delegate, &owner);) {
        bytes += host_bytes(exchange, wire, owner, chunk);
    }
    return bytes;
}

// Where the owner's elements of the chunk are in the vector, if they can be sent from there without
// a copy: they are contiguous, and the wire format is fp32. Otherwise NULL.
static inline void *host_plain(const HostExchange *exchange, int owner, Chunk chunk) {
    const Collective *collective = exchange->collective;
    ChunkRange range = {0};
    if (collective->wire != WIRE_FP32 || !host_next_range(exchange, WIRE_FP32, owner, chunk, &range)) {
        return NULL;
    }
    float *place = collective->buffer + range.at.flat;
    return host_next_range(exchange, WIRE_FP32, owner, chunk, &range) ? NULL : place;
}

// Elements that are added up or rounded at a time: whole blocks of the coarse formats.
enum { HOST_BLOCK = 4 * WIRE_BLOCK };

// out <- a run of a sum, which begins at flat element `flat`. In fp32 nothing is lost.
static inline void host_encode(const Collective *collective, WireFormat wire, char *out, const float *values,
                               size_t flat, size_t count) {
    float arrives[HOST_BLOCK];
    if (collective->unsent == NULL || wire == WIRE_FP32) {
        wire_encode(wire, out, values, count);
        return;
    }
    for (size_t begin = 0; begin < count; begin += HOST_BLOCK) {
        size_t n = size_min(count - begin, HOST_BLOCK);
        float *unsent = collective->unsent + flat + begin;
        for (size_t i = 0; i < n; i++) { unsent[i] += values[begin + i]; }
        wire_encode(wire, out + wire_bytes(wire, begin), unsent, n);
        wire_decode(wire, arrives, out + wire_bytes(wire, begin), n);
        for (size_t i = 0; i < n; i++) { unsent[i] -= arrives[i]; }
    }
}

// A chunk passes three stages, one per turn, and each turn works on three chunks: the newest
// and the two before it.
typedef struct HostStage {
    void (*work)(const HostExchange *exchange, Chunk chunk);
    int age; // of the chunk that it works on, in turns
} HostStage;

enum { HOST_STAGES = 3 };

// Takes all chunks through the stages, given in the order of their work in a turn.
static inline void host_for_chunks(const HostExchange *exchange, const HostStage *stages) {
    size_t end = exchange->length;
    Chunk none = {end, end, 0}, start = {.lane = -1};
    Chunk chunks[HOST_STAGES] = {host_next_chunk(exchange, &start), none, none}; // by age
    while (chunks[0].begin < end || chunks[1].begin < end || chunks[2].begin < end) {
        for (int i = 0; i < HOST_STAGES; i++) {
            Chunk chunk = chunks[stages[i].age];
            if (chunk.begin < end) { stages[i].work(exchange, chunk); }
        }
        chunks[2] = chunks[1];
        chunks[1] = chunks[0];
        chunks[0] = host_next_chunk(exchange, &chunks[1]);
    }
}

// ---- Reduce-scatter -------------------------------------------------------------------

// Every rank of this host gets the parts that it adds up: the chunk of all owners whose
// delegate it is, one owner behind the other.
static inline void host_reduce_inside(const HostExchange *exchange, Chunk chunk) {
    const Groups *groups = exchange->groups;
    Lane lane = {INSIDE_HOSTS, chunk.lane};
    if (groups->mates == 1) { return; }
    size_t received = host_delegated_bytes(exchange, WIRE_FP32, groups->rank, chunk);
    char *out = host_messages(exchange->transport, MESSAGES_SENT_INSIDE, lane);
    char *in = host_messages(exchange->transport, MESSAGES_RECEIVED_INSIDE, lane);
    for (int step = 1; step < groups->mates; step++) {
        int to = groups_mate(groups, step), from = groups_mate(groups, -step);
        char *message = out;
        for (int owner = -1; groups_next_owner(groups, to, &owner);) {
            for (ChunkRange range = {0}; host_next_range(exchange, WIRE_FP32, owner, chunk, &range);) {
                size_t bytes = range.at.count * sizeof(float);
                memcpy(out, exchange->collective->buffer + range.at.flat, bytes);
                out += bytes;
            }
        }
        transport_post(exchange->transport, lane, false, from, in, received);
        transport_post(exchange->transport, lane, true, to, message, (size_t)(out - message));
        in += received;
    }
}

// The owner's elements of the chunk in `buffer` become the sum of what `count` ranks or hosts have,
// in their order. This rank is number `own`; its elements are rounded as those of the others
// are. messages (count - 1, bytes): those of number own - 1, own - 2, ..., around to own + 1.
static inline void host_add_up(const HostExchange *exchange, WireFormat wire, int owner, Chunk chunk,
                               const char *messages, size_t bytes, int count, int own) {
    float sum[HOST_BLOCK];
    uint32_t mine[HOST_BLOCK]; // encoded; the widest format is fp32
    for (ChunkRange range = {0}; host_next_range(exchange, wire, owner, chunk, &range);) {
        for (size_t begin = 0; begin < range.at.count; begin += HOST_BLOCK) {
            float *values = exchange->collective->buffer + range.at.flat + begin;
            size_t n = size_min(range.at.count - begin, HOST_BLOCK),
                   place = range.offset + wire_bytes(wire, begin);
            memset(sum, 0, sizeof sum);
            host_encode(exchange->collective, wire, (char *)mine, values, range.at.flat + begin, n);
            for (int i = 0; i < count; i++) {
                size_t message = (size_t)((own - i + count) % count); // 0: this rank's
                wire_add(wire, sum, i == own ? (char *)mine : messages + (message - 1) * bytes + place, n);
            }
            memcpy(values, sum, n * sizeof(float));
        }
    }
}

// Waits for these parts. For every owner whose delegate this rank is, `buffer` then holds the
// sum over the ranks of this host.
static inline void host_sum_inside(const HostExchange *exchange, Chunk chunk) {
    const Groups *groups = exchange->groups;
    Lane lane = {INSIDE_HOSTS, chunk.lane};
    size_t bytes = host_delegated_bytes(exchange, WIRE_FP32, groups->rank, chunk);
    const char *in = host_messages(exchange->transport, MESSAGES_RECEIVED_INSIDE, lane);
    transport_wait(exchange->transport, lane);
    for (int owner = -1; groups_next_owner(groups, groups->rank, &owner);) {
        host_add_up(exchange, WIRE_FP32, owner, chunk, in, bytes, groups->mates, groups->place[groups->rank]);
        in += host_bytes(exchange, WIRE_FP32, owner, chunk);
    }
}

// The sums of this host are made, and go to their owners.
static inline void host_reduce_between(const HostExchange *exchange, Chunk chunk) {
    const Groups *groups = exchange->groups;
    const Collective *collective = exchange->collective;
    WireFormat wire = collective->wire;
    Lane lane = {BETWEEN_HOSTS, chunk.lane};
    if (groups->mates > 1) { host_sum_inside(exchange, chunk); }
    size_t received = host_bytes(exchange, wire, groups->rank, chunk);
    char *out = host_messages(exchange->transport, MESSAGES_SENT, lane);
    char *in = host_messages(exchange->transport, MESSAGES_RECEIVED, lane);
    for (int step = 1; step < groups->hosts; step++) {
        int from = groups_delegate(groups, groups_other_host(groups, -step), groups->rank);
        int host = groups_other_host(groups, step);
        transport_post(exchange->transport, lane, false, from, in, received);
        in += received;
        for (int owner = -1; groups_next_owner_on(groups, host, groups->rank, &owner);) {
            void *plain = host_plain(exchange, owner, chunk);
            ChunkRange range = {0};
            while (host_next_range(exchange, wire, owner, chunk, &range)) {
                if (plain != NULL) { continue; }
                host_encode(collective, wire, out + range.offset, collective->buffer + range.at.flat,
                            range.at.flat, range.at.count);
            }
            transport_post(exchange->transport, lane, true, owner, plain != NULL ? plain : out, range.offset);
            out += plain != NULL ? 0 : range.offset;
        }
    }
}

// Own elements become the sum over the hosts.
static inline void host_reduce_finish(const HostExchange *exchange, Chunk chunk) {
    const Groups *groups = exchange->groups;
    WireFormat wire = exchange->collective->wire;
    Lane lane = {BETWEEN_HOSTS, chunk.lane};
    if (groups->hosts == 1) { return; }
    transport_wait(exchange->transport, lane);
    host_add_up(exchange, wire, groups->rank, chunk,
                host_messages(exchange->transport, MESSAGES_RECEIVED, lane),
                host_bytes(exchange, wire, groups->rank, chunk), groups->hosts, groups->host);
}

// ---- All-gather -----------------------------------------------------------------------

// Sets one owner's elements of the chunk in `buffer` to what its message holds.
static inline void host_decode_chunk(const HostExchange *exchange, int owner, Chunk chunk,
                                     const char *message) {
    const Collective *collective = exchange->collective;
    WireFormat wire = collective->wire;
    for (ChunkRange range = {0}; host_next_range(exchange, wire, owner, chunk, &range);) {
        float *target = collective->buffer + range.at.flat, values[HOST_BLOCK]; // target may be base
        const float *base = collective_base(collective, range.at.flat);
        const char *in = message + range.offset;
        if (base == NULL) { wire_decode(wire, target, in, range.at.count); }
        for (size_t begin = 0; base != NULL && begin < range.at.count; begin += HOST_BLOCK) {
            size_t n = size_min(range.at.count - begin, HOST_BLOCK);
            wire_decode(wire, values, in + wire_bytes(wire, begin), n);
            for (size_t i = 0; i < n; i++) { target[begin + i] = base[begin + i] + values[i]; }
        }
    }
}

// Encodes this rank's own elements of the chunk, or their difference to the base, as a message,
// and decodes it as the other ranks do.
static inline void host_round_chunk(const HostExchange *exchange, Chunk chunk, char *message) {
    const Collective *collective = exchange->collective;
    WireFormat wire = collective->wire;
    int rank = exchange->groups->rank;
    float values[HOST_BLOCK];
    for (ChunkRange range = {0}; host_next_range(exchange, wire, rank, chunk, &range);) {
        const float *source = collective_source(collective, &range.at),
                    *base = collective_base(collective, range.at.flat);
        char *out = message + range.offset;
        if (base == NULL) {
            host_encode(collective, wire, out, source, range.at.flat, range.at.count);
            continue;
        }
        for (size_t begin = 0; begin < range.at.count; begin += HOST_BLOCK) {
            size_t n = size_min(range.at.count - begin, HOST_BLOCK);
            for (size_t i = 0; i < n; i++) { values[i] = source[begin + i] - base[begin + i]; }
            wire_encode(wire, out + wire_bytes(wire, begin), values, n);
        }
    }
    host_decode_chunk(exchange, rank, chunk, message);
}

// Where in `buffer` an owner's message is received: it is what shall stand there, and no other rank
// waits for this one to pass it on. Otherwise NULL.
static inline void *host_arrival(const HostExchange *exchange, int owner, Chunk chunk) {
    bool as_it_is = exchange->groups->mates == 1 && exchange->collective->base == NULL;
    return as_it_is ? host_plain(exchange, owner, chunk) : NULL;
}

// Own elements go to the delegates on the other hosts. What this rank receives as a
// delegate lies owner behind owner, its own among them if it has mates, which get it all.
static inline void host_gather_between(const HostExchange *exchange, Chunk chunk) {
    const Groups *groups = exchange->groups;
    const Collective *collective = exchange->collective;
    Lane lane = {BETWEEN_HOSTS, chunk.lane};
    size_t sent = host_bytes(exchange, collective->wire, groups->rank, chunk);
    char *in = host_messages(exchange->transport, MESSAGES_RECEIVED, lane);
    char *mine = host_messages(exchange->transport, MESSAGES_SENT, lane);
    void *place = host_arrival(exchange, groups->rank, chunk);
    for (int owner = -1; groups_next_owner(groups, groups->rank, &owner);) {
        if (owner == groups->rank) {
            mine = groups->mates > 1 ? in : mine;
            in += groups->mates > 1 ? sent : 0;
            continue;
        }
        size_t bytes = host_bytes(exchange, collective->wire, owner, chunk);
        void *arrival = host_arrival(exchange, owner, chunk);
        transport_post(exchange->transport, lane, false, owner, arrival != NULL ? arrival : in, bytes);
        in += bytes;
    }
    if (place == NULL) {
        host_round_chunk(exchange, chunk, mine);
    } else if (collective->source != NULL) {
        size_t own = layout_piece(collective->layout, collective->first, groups->rank).own + chunk.begin;
        memcpy(place, collective->source + own, sent);
    }
    for (int step = 1; step < groups->hosts; step++) {
        int to = groups_delegate(groups, groups_other_host(groups, step), groups->rank);
        transport_post(exchange->transport, lane, true, to, place != NULL ? place : mine, sent);
    }
}

// What this rank has received from the other hosts goes to its mates, with its own elements.
static inline void host_gather_inside(const HostExchange *exchange, Chunk chunk) {
    const Groups *groups = exchange->groups;
    WireFormat wire = exchange->collective->wire;
    Lane lane = {INSIDE_HOSTS, chunk.lane}, between = {BETWEEN_HOSTS, chunk.lane};
    transport_wait(exchange->transport, between);
    if (groups->mates == 1) { return; }
    char *out = host_messages(exchange->transport, MESSAGES_RECEIVED, between);
    char *in = host_messages(exchange->transport, MESSAGES_RECEIVED_INSIDE, lane);
    size_t sent = host_delegated_bytes(exchange, wire, groups->rank, chunk);
    for (int step = 1; step < groups->mates; step++) {
        int to = groups_mate(groups, step), from = groups_mate(groups, -step);
        size_t received = host_delegated_bytes(exchange, wire, from, chunk);
        transport_post(exchange->transport, lane, false, from, in, received);
        transport_post(exchange->transport, lane, true, to, out, sent);
        in += received;
    }
}

// Decodes what has come from the other hosts, to this rank and then to each of its mates.
static inline void host_gather_finish(const HostExchange *exchange, Chunk chunk) {
    const Groups *groups = exchange->groups;
    WireFormat wire = exchange->collective->wire;
    Lane lane = {INSIDE_HOSTS, chunk.lane}, between = {BETWEEN_HOSTS, chunk.lane};
    const char *in = host_messages(exchange->transport, MESSAGES_RECEIVED, between);
    for (int step = 0; step < groups->mates; step++) {
        if (step == 1) {
            transport_wait(exchange->transport, lane);
            in = host_messages(exchange->transport, MESSAGES_RECEIVED_INSIDE, lane);
        }
        for (int owner = -1; groups_next_owner(groups, groups_mate(groups, -step), &owner);) {
            bool own = owner == groups->rank;
            if (!own && host_arrival(exchange, owner, chunk) == NULL) {
                host_decode_chunk(exchange, owner, chunk, in);
            }
            in += own && groups->mates == 1 ? 0 : host_bytes(exchange, wire, owner, chunk);
        }
    }
}

// After a reduce-scatter `buffer` holds the sums that this rank owns and, where it is a delegate,
// sums over its host; everything else in it is as before. A world of one rank adds and rounds
// nothing, and an exchange on two levels with only one host does not round either. An all-gather
// always rounds, which changes nothing in fp32.
static inline void host_exchange(Transport *transport, const Collective *collective, CollectiveKind kind) {
    // The all-gather begins with the oldest chunk: it frees the lanes of the newest.
    static const HostStage stages[][HOST_STAGES] = {
        {{host_reduce_inside, 0}, {host_reduce_between, 1}, {host_reduce_finish, 2}},
        {{host_gather_finish, 2}, {host_gather_between, 0}, {host_gather_inside, 1}}};
    const Layout *layout = collective->layout;
    HostExchange exchange = {.transport = transport,
                             .groups = transport_groups(transport),
                             .collective = collective,
                             .length = layout_most(layout, collective->first, collective->end)};
    if (transport->size > 1) {
        transport_begin(transport, collective_name(kind));
        host_for_chunks(&exchange, stages[kind]);
        return;
    }
    bool rounds = collective->wire != WIRE_FP32 || collective->source != NULL || collective->base != NULL;
    if (kind != ALL_GATHER || !rounds) { return; }
    uint32_t message[HOST_BLOCK]; // the widest format is fp32
    for (Chunk part = {0}; part.begin < exchange.length; part.begin = part.end) {
        part.end = part.begin + size_min(layout->piece - part.begin % layout->piece, HOST_BLOCK);
        host_round_chunk(&exchange, part, (char *)message);
    }
}
