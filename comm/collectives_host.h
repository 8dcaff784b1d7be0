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
// A stretch is cut into chunks, a chunk into runs:
//
//   own      | piece | piece | piece | piece |   of one rank, [first, end)
//   chunk    |<---- one ---->|<- the next -->|   what each rank owns of one exchange: whole
//                                                pieces, or a part of one
//   run      |<----->|<----->|                   a piece or a part: encoded by itself
//
// Chunks go in turn through the two lanes of each level. While one is added up or decoded,
// messages of the others are under way on both levels, and on the link between hosts those
// of the next chunk always wait behind those of the one before:
//
//   reduce-scatter   inside hosts     | 0 | 1 | 2 |
//                    between hosts        |   0   |   1   |   2   |
//   all-gather       between hosts    |   0   |   1   |   2   |
//                    inside hosts             | 0 |   | 1 |   | 2 |
//
// All ranks start the messages of a level in the order of chunks, and none waits for a
// message that another starts only after waiting for one of its own: nothing can lock.
#ifndef ACCO_COMM_COLLECTIVES_HOST_H
#define ACCO_COMM_COLLECTIVES_HOST_H

#include "comm/collective.h"
#include "comm/transport.h"

// ---------------------------------------------------------------------------------------
// Message buffers

// About 1 MB of received messages in each lane, so that they are added up while they are
// in the second-level cache. On two levels messages for several owners are collected, and
// those between hosts should not become too short. The same on all ranks.
static inline size_t host_chunk_elements(const Transport *transport) {
    const Groups *groups = transport_groups(transport);
    size_t lane = groups_are_flat(groups) ? (size_t)1 << 18 : (size_t)1 << 20;
    size_t chunk = lane / (size_t)size_max((size_t)groups->size - 1, 1);
    chunk = chunk < 2048 ? 2048 : size_min(chunk, (size_t)1 << 18) / LAYOUT_BLOCK * LAYOUT_BLOCK;
    return transport->messages.limit > 0 ? transport->messages.limit : chunk;
}

// Plans the message buffers for shards of at most `shard` elements in any format: none
// needs more room than fp32.
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

// The messages of a lane, one behind the other: `buffer` is one of the four above.
static inline char *host_lane(const MessageBuffers *messages, char *buffer, size_t slots, Lane lane) {
    assert((size_t)lane.number < messages->lanes);
    return buffer + (size_t)lane.number * slots * messages->slot_bytes;
}

// ---------------------------------------------------------------------------------------
// Chunks and runs

// Own elements [begin, end), of every rank, that travel at a time.
typedef struct Chunk {
    size_t begin, end;
} Chunk;

// The chunk from `begin` on; empty at the end. Whole pieces where they fit into a
// message, otherwise equal parts of a piece, whose cuts are multiples of LAYOUT_BLOCK.
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

// Of one rank's elements of the chunk, encoded.
static inline size_t host_chunk_bytes(const Collective *collective, Chunk chunk) {
    ChunkRun run = {chunk.begin, 0, 0};
    while (host_next_run(collective, chunk, &run)) {}
    return run.offset;
}

// message <- what `buffer` holds of a rank's elements of the chunk, encoded.
static inline void host_encode_chunk(const Collective *collective, int owner, Chunk chunk, char *message) {
    ChunkRun run = {chunk.begin, 0, 0};
    while (host_next_run(collective, chunk, &run)) {
        wire_encode(collective->wire, message + run.offset,
                    collective->buffer + layout_flat(collective->layout, owner, run.own), run.count);
    }
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

// A collective under way, as its steps see it.
typedef struct HostExchange {
    Transport *transport;
    const Collective *collective;
    const Groups *groups;
    int rank, host, mates; // of this rank; ranks on its host, itself included
} HostExchange;

static inline HostExchange host_exchange(Transport *transport, const Collective *collective) {
    const Groups *groups = transport_groups(transport);
    int host = groups->host_of[transport->rank];
    HostExchange exchange = {transport,       collective, groups,
                             transport->rank, host,       groups_count(groups, host)};
    return exchange;
}

// A chunk passes three stages, one a turn, and each turn works on three chunks: on the
// newest, on that of the turn before, and on the one before that. `number` counts chunks,
// so that their lanes alternate.
typedef struct HostStage {
    void (*work)(const HostExchange *exchange, int number, Chunk chunk);
    int age; // of the chunk that it works on, in turns
} HostStage;

enum { HOST_STAGES = 3 };

// All chunks of [first, end). stages (HOST_STAGES): in the order of their work in a turn.
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

// message <- the chunk of all owners whose delegate a rank is, one owner behind the other.
// Returns its elements.
static inline size_t host_pack_owners(const HostExchange *exchange, int delegate, Chunk chunk,
                                      float *message) {
    const Collective *collective = exchange->collective;
    size_t packed = 0;
    OwnerWalk walk = owners_of(exchange->groups, delegate);
    while (owners_next(&walk)) {
        for (size_t own = chunk.begin, count; own < chunk.end; own += count) {
            count = layout_run(collective->layout, own, chunk.end);
            memcpy(message + packed, collective->buffer + layout_flat(collective->layout, walk.owner, own),
                   count * sizeof(float));
            packed += count;
        }
    }
    return packed;
}

// Every rank of this host gets what it adds up.
static inline void host_reduce_inside(const HostExchange *exchange, int number, Chunk chunk) {
    MessageBuffers *messages = &exchange->transport->messages;
    Lane lane = {INSIDE_HOSTS, number % TRANSPORT_LANES};
    if (exchange->mates == 1) { return; }
    size_t received = (size_t)owners_count(exchange->groups, exchange->rank) * (chunk.end - chunk.begin);
    float *out = (float *)(void *)host_lane(messages, messages->inside_sent, messages->inside_slots, lane);
    float *in = (float *)(void *)host_lane(messages, messages->inside_received, messages->inside_slots, lane);
    for (int step = 1; step < exchange->mates; step++) {
        int to = groups_mate(exchange->groups, exchange->rank, step),
            from = groups_mate(exchange->groups, exchange->rank, -step);
        size_t packed = host_pack_owners(exchange, to, chunk, out);
        transport_post(exchange->transport, lane, false, from, in, received * sizeof(float));
        transport_post(exchange->transport, lane, true, to, out, packed * sizeof(float));
        in += received;
        out += packed;
    }
}

// What this host has for an owner <- its sum over the ranks of the host, in their order.
// in: the owner's elements in the first message. stride: from one message to the next.
static inline void host_sum_mates(const HostExchange *exchange, Chunk chunk, int owner, const float *in,
                                  size_t stride) {
    const Collective *collective = exchange->collective;
    int place = exchange->groups->place[exchange->rank];
    float sum[HOST_BLOCK];
    for (size_t own = chunk.begin, count; own < chunk.end; own += count) {
        float *mine = collective->buffer + layout_flat(collective->layout, owner, own);
        count = size_min(layout_run(collective->layout, own, chunk.end), HOST_BLOCK);
        memset(sum, 0, sizeof sum);
        for (int mate = 0; mate < exchange->mates; mate++) {
            size_t message = (size_t)((place - mate + exchange->mates) % exchange->mates); // 0: this rank
            const float *part = mate == place ? mine : in + (message - 1) * stride + (own - chunk.begin);
            wire_add(WIRE_FP32, sum, part, count);
        }
        memcpy(mine, sum, count * sizeof(float));
    }
}

static inline void host_sum_inside(const HostExchange *exchange, int number, Chunk chunk) {
    MessageBuffers *messages = &exchange->transport->messages;
    Lane lane = {INSIDE_HOSTS, number % TRANSPORT_LANES};
    if (exchange->mates == 1) { return; }
    size_t count = chunk.end - chunk.begin;
    size_t stride = (size_t)owners_count(exchange->groups, exchange->rank) * count;
    const float *in =
        (const float *)(void *)host_lane(messages, messages->inside_received, messages->inside_slots, lane);
    transport_wait(exchange->transport, lane);
    OwnerWalk walk = owners_of(exchange->groups, exchange->rank);
    for (; owners_next(&walk); in += count) { host_sum_mates(exchange, chunk, walk.owner, in, stride); }
}

// The sums of this host are made, and go to their owners.
static inline void host_reduce_between(const HostExchange *exchange, int number, Chunk chunk) {
    const Collective *collective = exchange->collective;
    const Groups *groups = exchange->groups;
    MessageBuffers *messages = &exchange->transport->messages;
    Lane lane = {BETWEEN_HOSTS, number % TRANSPORT_LANES};
    host_sum_inside(exchange, number, chunk);
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
                message = out;
                host_encode_chunk(collective, walk.owner, chunk, out);
                out += bytes;
            }
            transport_post(exchange->transport, lane, true, walk.owner, message, bytes);
        }
    }
}

// This rank's own elements of the run <- their sum over the hosts, in their order. in: the
// first message. bytes: of a message.
static inline void host_sum_run(const HostExchange *exchange, ChunkRun run, const char *in, size_t bytes) {
    const Collective *collective = exchange->collective;
    WireFormat wire = collective->wire;
    int hosts = exchange->groups->hosts;
    float *mine = collective->buffer + layout_flat(collective->layout, exchange->rank, run.own);
    float sum[HOST_BLOCK];
    uint32_t own[HOST_BLOCK]; // encoded; the widest format is fp32
    for (size_t begin = 0; begin < run.count; begin += HOST_BLOCK) {
        size_t count = size_min(run.count - begin, HOST_BLOCK);
        memset(sum, 0, sizeof sum);
        wire_encode(wire, own, mine + begin, count);
        for (int host = 0; host < hosts; host++) {
            const char *message = (const char *)own;
            if (host != exchange->host) {
                size_t slot = (size_t)((exchange->host - host + hosts) % hosts - 1);
                message = in + slot * bytes + run.offset + wire_bytes(wire, begin);
            }
            wire_add(wire, sum, message, count);
        }
        memcpy(mine + begin, sum, count * sizeof(float));
    }
}

static inline void host_reduce_finish(const HostExchange *exchange, int number, Chunk chunk) {
    const Collective *collective = exchange->collective;
    MessageBuffers *messages = &exchange->transport->messages;
    Lane lane = {BETWEEN_HOSTS, number % TRANSPORT_LANES};
    size_t bytes = host_chunk_bytes(collective, chunk);
    const char *in = host_lane(messages, messages->received, messages->received_slots, lane);
    if (exchange->groups->hosts == 1) { return; }
    transport_wait(exchange->transport, lane);
    ChunkRun run = {chunk.begin, 0, 0};
    while (host_next_run(collective, chunk, &run)) { host_sum_run(exchange, run, in, bytes); }
}

// On return this rank's own elements [first, end) hold the sum over all ranks. Of the rest
// of `buffer`, what this rank is a delegate for holds sums of its host, and what is left is
// as it was. A world of one rank has nothing to add and rounds nothing, and neither does
// an exchange on two levels with only one host.
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

// Whether received messages are what `buffer` shall hold, and nobody waits for them to be
// passed on: then they arrive there.
static inline bool host_arrives_in_place(const HostExchange *exchange, Chunk chunk) {
    return exchange->mates == 1 && exchange->collective->base == NULL &&
           host_is_plain(exchange->collective, chunk);
}

// This rank's own elements go to its delegates on the other hosts. What it receives as a
// delegate lies owner behind owner, its own among it where mates are to get it all.
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

// What this rank has received from the other hosts goes to its mates, with its own.
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
        ChunkRun run = {chunk.begin, 0, 0};
        while (!own && host_next_run(collective, chunk, &run)) {
            size_t flat = layout_flat(collective->layout, walk.owner, run.own);
            host_decode_run(collective->wire, collective->buffer + flat, collective_base(collective, flat),
                            in + run.offset, run.count);
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
