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

// ---------------------------------------------------------------------------------------
// Chunks and ranges

// The own elements [begin, end) of every rank, which travel together, in ranges of equal length.
typedef struct Chunk {
    size_t begin, end;
    size_t range, range_bytes; // elements of a range, and its bytes in a message
    size_t bytes;              // of a message with the elements of one rank
} Chunk;

// The chunk has whole pieces, or a part of one.
static inline Chunk host_chunk(const Collective *collective, size_t begin, size_t length) {
    size_t range = size_min(length, collective->layout->piece);
    size_t range_bytes = wire_bytes(collective->wire, range);
    Chunk chunk = {.begin = begin,
                   .end = begin + length,
                   .range = range,
                   .range_bytes = range_bytes,
                   .bytes = length > 0 ? length / range * range_bytes : 0};
    return chunk;
}

// The chunk from `begin` on; empty at the end. It has whole pieces if they fit into a
// message; otherwise a piece is cut into equal parts at multiples of LAYOUT_BLOCK.
static inline Chunk host_next_chunk(const Transport *transport, const Collective *collective, size_t begin,
                                    size_t end) {
    size_t piece = collective->layout->piece, most = transport->messages.chunk;
    size_t length = size_min(most / piece * piece, end - begin);
    if (piece > most && begin < end) {
        size_t parts = (piece + most - 1) / most;
        length = layout_round_up((piece + parts - 1) / parts, LAYOUT_BLOCK);
        length = size_min(length, layout_range(collective->layout, begin, end));
    }
    return host_chunk(collective, begin, length);
}

// Whether the chunk can be sent from the vector without a copy: it is contiguous there, and
// the wire format is fp32.
static inline bool host_is_plain(const Collective *collective, Chunk chunk) {
    return collective->wire == WIRE_FP32 && chunk.range == chunk.end - chunk.begin;
}

// Elements that are added up or rounded at a time: whole blocks of the coarse formats.
enum { HOST_BLOCK = 4 * WIRE_BLOCK };

// A chunk passes three stages, one per turn, and each turn works on three chunks: the newest
// and the two before it. `number` counts chunks, so that their lanes alternate.
typedef struct HostStage {
    void (*work)(Transport *transport, const Collective *collective, int number, Chunk chunk);
    int age; // of the chunk that it works on, in turns
} HostStage;

enum { HOST_STAGES = 3 };

// Takes all chunks of [first, end) through the stages (HOST_STAGES), which are given in the
// order of their work in a turn.
static inline void host_for_chunks(Transport *transport, const Collective *collective, size_t first,
                                   size_t end, const HostStage *stages) {
    Chunk none = host_chunk(collective, end, 0), chunks[HOST_STAGES] = {none, none, none}; // by age
    chunks[0] = host_next_chunk(transport, collective, first, end);
    for (int turn = 0; chunks[0].begin < end || chunks[1].begin < end || chunks[2].begin < end; turn++) {
        for (int i = 0; i < HOST_STAGES; i++) {
            Chunk chunk = chunks[stages[i].age];
            if (chunk.begin < end) { stages[i].work(transport, collective, turn - stages[i].age, chunk); }
        }
        chunks[2] = chunks[1];
        chunks[1] = chunks[0];
        chunks[0] = host_next_chunk(transport, collective, chunks[1].end, end);
    }
}

// ---------------------------------------------------------------------------------------
// Reduce-scatter

// Every rank of this host gets the parts that it adds up: the chunk of all owners whose
// delegate it is, one owner behind the other.
static inline void host_reduce_inside(Transport *transport, const Collective *collective, int number,
                                      Chunk chunk) {
    const Groups *groups = transport_groups(transport);
    Lane lane = {INSIDE_HOSTS, number % TRANSPORT_LANES};
    if (groups->mates == 1) { return; }
    size_t received = (size_t)groups_count_owners(groups, groups->rank) * (chunk.end - chunk.begin);
    float *out = (float *)(void *)host_messages(transport, MESSAGES_SENT_INSIDE, lane);
    float *in = (float *)(void *)host_messages(transport, MESSAGES_RECEIVED_INSIDE, lane);
    for (int step = 1; step < groups->mates; step++) {
        int to = groups_mate(groups, step), from = groups_mate(groups, -step);
        size_t packed = 0;
        for (int owner = -1; groups_next_owner(groups, to, &owner);) {
            for (size_t own = chunk.begin; own < chunk.end; own += chunk.range) {
                memcpy(out + packed, collective->buffer + layout_flat(collective->layout, owner, own),
                       chunk.range * sizeof(float));
                packed += chunk.range;
            }
        }
        transport_post(transport, lane, false, from, in, received * sizeof(float));
        transport_post(transport, lane, true, to, out, packed * sizeof(float));
        in += received;
        out += packed;
    }
}

// Waits for these parts. For every owner whose delegate this rank is, `buffer` then holds the
// sum over the ranks of this host, in their order.
static inline void host_sum_inside(Transport *transport, const Collective *collective, Lane lane,
                                   Chunk chunk) {
    const Groups *groups = transport_groups(transport);
    int mates = groups->mates, place = groups->place[groups->rank];
    size_t length = chunk.end - chunk.begin; // one owner's part of a message
    size_t stride = (size_t)groups_count_owners(groups, groups->rank) * length;
    const float *in = (const float *)(void *)host_messages(transport, MESSAGES_RECEIVED_INSIDE, lane);
    float sum[HOST_BLOCK];
    transport_wait(transport, lane);
    for (int owner = -1; groups_next_owner(groups, groups->rank, &owner); in += length) {
        for (size_t own = chunk.begin, count; own < chunk.end; own += count) {
            float *mine = collective->buffer + layout_flat(collective->layout, owner, own);
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
static inline void host_reduce_between(Transport *transport, const Collective *collective, int number,
                                       Chunk chunk) {
    const Groups *groups = transport_groups(transport);
    Lane lane = {BETWEEN_HOSTS, number % TRANSPORT_LANES}, inside = {INSIDE_HOSTS, lane.number};
    if (groups->mates > 1) { host_sum_inside(transport, collective, inside, chunk); }
    bool plain = host_is_plain(collective, chunk);
    char *out = host_messages(transport, MESSAGES_SENT, lane);
    char *in = host_messages(transport, MESSAGES_RECEIVED, lane);
    for (int step = 1; step < groups->hosts; step++) {
        int from = groups_delegate(groups, groups_other_host(groups, -step), groups->rank);
        int host = groups_other_host(groups, step);
        transport_post(transport, lane, false, from, in, chunk.bytes);
        in += chunk.bytes;
        for (int place = groups->place[groups->rank]; place < groups_count(groups, host);
             place += groups->mates) {
            int owner = groups_rank(groups, host, place);
            void *message = out;
            if (plain) { message = collective->buffer + layout_flat(collective->layout, owner, chunk.begin); }
            for (size_t own = chunk.begin; !plain && own < chunk.end; own += chunk.range) {
                size_t flat = layout_flat(collective->layout, owner, own);
                wire_encode(collective->wire, out, collective->buffer + flat, chunk.range);
                out += chunk.range_bytes;
            }
            transport_post(transport, lane, true, owner, message, chunk.bytes);
        }
    }
}

// Waits for the sums of the other hosts. This rank's own elements become the sum over the
// hosts, in their order.
static inline void host_reduce_finish(Transport *transport, const Collective *collective, int number,
                                      Chunk chunk) {
    const Groups *groups = transport_groups(transport);
    WireFormat wire = collective->wire;
    Lane lane = {BETWEEN_HOSTS, number % TRANSPORT_LANES};
    int hosts = groups->hosts;
    const char *in = host_messages(transport, MESSAGES_RECEIVED, lane);
    float sum[HOST_BLOCK];
    uint32_t own[HOST_BLOCK]; // encoded; the widest format is fp32
    if (hosts == 1) { return; }
    transport_wait(transport, lane);
    for (size_t first = chunk.begin; first < chunk.end; first += chunk.range, in += chunk.range_bytes) {
        float *mine = collective->buffer + layout_flat(collective->layout, groups->rank, first);
        for (size_t begin = 0; begin < chunk.range; begin += HOST_BLOCK) {
            size_t count = size_min(chunk.range - begin, HOST_BLOCK);
            memset(sum, 0, sizeof sum);
            wire_encode(wire, own, mine + begin, count);
            for (int host = 0; host < hosts; host++) {
                const char *message = (const char *)own;
                if (host != groups->host) {
                    size_t slot = (size_t)((groups->host - host + hosts) % hosts - 1);
                    message = in + slot * chunk.bytes + wire_bytes(wire, begin);
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
    transport_begin(transport, "reduce-scatter");
    static const HostStage stages[HOST_STAGES] = {
        {host_reduce_inside, 0}, {host_reduce_between, 1}, {host_reduce_finish, 2}};
    host_for_chunks(transport, collective, first, end, stages);
}

// ---------------------------------------------------------------------------------------
// All-gather

// Sets one owner's elements of the chunk in `buffer` to what its message holds.
static inline void host_decode_chunk(const Collective *collective, int owner, Chunk chunk,
                                     const char *message) {
    WireFormat wire = collective->wire;
    for (size_t own = chunk.begin; own < chunk.end; own += chunk.range, message += chunk.range_bytes) {
        size_t flat = layout_flat(collective->layout, owner, own);
        float *target = collective->buffer + flat, values[HOST_BLOCK]; // target may be base
        const float *base = collective_base(collective, flat);
        if (base == NULL) { wire_decode(wire, target, message, chunk.range); }
        for (size_t begin = 0; base != NULL && begin < chunk.range; begin += HOST_BLOCK) {
            size_t n = size_min(chunk.range - begin, HOST_BLOCK);
            wire_decode(wire, values, message + wire_bytes(wire, begin), n);
            for (size_t i = 0; i < n; i++) { target[begin + i] = base[begin + i] + values[i]; }
        }
    }
}

// Encodes this rank's own elements of the chunk, or their difference to the base, as a message,
// and decodes it as the other ranks do.
static inline void host_round_chunk(const Collective *collective, int rank, Chunk chunk, char *message) {
    WireFormat wire = collective->wire;
    float values[HOST_BLOCK];
    char *out = message;
    for (size_t own = chunk.begin; own < chunk.end; own += chunk.range, out += chunk.range_bytes) {
        const float *source = collective_source(collective, rank, own),
                    *base = collective_base(collective, layout_flat(collective->layout, rank, own));
        if (base == NULL) { wire_encode(wire, out, source, chunk.range); }
        for (size_t begin = 0; base != NULL && begin < chunk.range; begin += HOST_BLOCK) {
            size_t n = size_min(chunk.range - begin, HOST_BLOCK);
            for (size_t i = 0; i < n; i++) { values[i] = source[begin + i] - base[begin + i]; }
            wire_encode(wire, out + wire_bytes(wire, begin), values, n);
        }
    }
    host_decode_chunk(collective, rank, chunk, message);
}

// Whether messages are received in `buffer` itself: they are what it shall hold, and no other
// rank waits for this one to pass them on.
static inline bool host_arrives_in_place(const Groups *groups, const Collective *collective, Chunk chunk) {
    return groups->mates == 1 && collective->base == NULL && host_is_plain(collective, chunk);
}

// This rank's own elements go to its delegates on the other hosts. What it receives as a
// delegate lies owner behind owner; its own elements are among them if it has mates, which
// get it all.
static inline void host_gather_between(Transport *transport, const Collective *collective, int number,
                                       Chunk chunk) {
    const Groups *groups = transport_groups(transport);
    const Layout *layout = collective->layout;
    Lane lane = {BETWEEN_HOSTS, number % TRANSPORT_LANES};
    bool in_place = host_arrives_in_place(groups, collective, chunk), passed_on = groups->mates > 1;
    char *in = host_messages(transport, MESSAGES_RECEIVED, lane);
    char *mine = host_messages(transport, MESSAGES_SENT, lane);
    for (int owner = -1; groups_next_owner(groups, groups->rank, &owner);) {
        void *flat = collective->buffer + layout_flat(layout, owner, chunk.begin);
        if (owner != groups->rank) {
            transport_post(transport, lane, false, owner, in_place ? flat : (void *)in, chunk.bytes);
        } else if (passed_on || in_place) {
            mine = in_place ? (char *)flat : in;
        }
        in += owner != groups->rank || passed_on ? chunk.bytes : 0;
    }
    if (!in_place) {
        host_round_chunk(collective, groups->rank, chunk, mine);
    } else if (collective->source != NULL) {
        memcpy(mine, collective->source + chunk.begin, chunk.bytes);
    }
    for (int step = 1; step < groups->hosts; step++) {
        int to = groups_delegate(groups, groups_other_host(groups, step), groups->rank);
        transport_post(transport, lane, true, to, mine, chunk.bytes);
    }
}

// What this rank has received from the other hosts goes to its mates, with its own elements.
static inline void host_gather_inside(Transport *transport, const Collective *collective, int number,
                                      Chunk chunk) {
    (void)collective; // the chunk says it all
    const Groups *groups = transport_groups(transport);
    Lane lane = {INSIDE_HOSTS, number % TRANSPORT_LANES}, between = {BETWEEN_HOSTS, lane.number};
    transport_wait(transport, between);
    if (groups->mates == 1) { return; }
    char *out = host_messages(transport, MESSAGES_RECEIVED, between);
    char *in = host_messages(transport, MESSAGES_RECEIVED_INSIDE, lane);
    size_t sent = (size_t)groups_count_owners(groups, groups->rank) * chunk.bytes;
    for (int step = 1; step < groups->mates; step++) {
        int to = groups_mate(groups, step), from = groups_mate(groups, -step);
        size_t received = (size_t)groups_count_owners(groups, from) * chunk.bytes;
        transport_post(transport, lane, false, from, in, received);
        transport_post(transport, lane, true, to, out, sent);
        in += received;
    }
}

// Decodes what has come from the other hosts, to this rank and then to each of its mates.
static inline void host_gather_finish(Transport *transport, const Collective *collective, int number,
                                      Chunk chunk) {
    const Groups *groups = transport_groups(transport);
    Lane lane = {INSIDE_HOSTS, number % TRANSPORT_LANES}, between = {BETWEEN_HOSTS, lane.number};
    if (host_arrives_in_place(groups, collective, chunk)) { return; }
    const char *in = host_messages(transport, MESSAGES_RECEIVED, between);
    for (int step = 0; step < groups->mates; step++) {
        if (step == 1) {
            transport_wait(transport, lane);
            in = host_messages(transport, MESSAGES_RECEIVED_INSIDE, lane);
        }
        for (int owner = -1; groups_next_owner(groups, groups_mate(groups, -step), &owner);) {
            bool own = owner == groups->rank;
            if (!own) { host_decode_chunk(collective, owner, chunk, in); }
            in += own && groups->mates == 1 ? 0 : chunk.bytes;
        }
    }
}

// On return `buffer` holds every rank's own elements [first, end), rounded by the wire:
// the same bits on all ranks. A world of one rank rounds as a larger one would.
static inline void host_all_gather(Transport *transport, const Collective *collective, size_t first,
                                   size_t end) {
    if (transport->size == 1) {
        uint32_t message[HOST_BLOCK]; // the widest format is fp32
        for (size_t own = first, count; own < end; own += count) {
            count = size_min(layout_range(collective->layout, own, end), HOST_BLOCK);
            host_round_chunk(collective, 0, host_chunk(collective, own, count), (char *)message);
        }
        return;
    }
    transport_begin(transport, "all-gather");
    // The oldest chunk first: it frees the lanes that the newest takes.
    static const HostStage stages[HOST_STAGES] = {
        {host_gather_finish, 2}, {host_gather_between, 0}, {host_gather_inside, 1}};
    host_for_chunks(transport, collective, first, end, stages);
}

#endif
