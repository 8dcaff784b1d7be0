// collectives_nccl.h: reduce-scatter and all-gather of vectors in GPU memory, from GPU to
// GPU with the messages of NCCL. The contract is in collective.h.
//
// NCCL only moves bytes. Our own kernels encode, add and decode (kernels/cuda/wire.cuh):
// any wire format travels, and sums are those of collectives_host.h bit for bit.
//
// A batch is as many cells as the message buffers hold. A message has pieces of owners:
//
//   | owner a: cell 0, cell 1, ... | owner b: cell 0, cell 1, ... | ...
//
// so that one kernel encodes what goes to all ranks, another one adds up all that has
// come, and there is one message to each rank. Owners begin at multiples of 128 bytes.
//
//   reduce-scatter   queue    first                             then
//     inside         own      pack for every rank of the host   add up, into the vector
//     between        stream   encode for every remote owner     add up, into own pieces
//   all-gather
//     between        stream   encode own pieces                 -
//     inside         own      pass on what has come             decode all
//
// Each level has a communicator and a queue, so that both are busy at the same time, with
// successive batches. All ranks put the same messages into them in the same order.
#ifndef ACCO_COMM_COLLECTIVES_NCCL_H
#define ACCO_COMM_COLLECTIVES_NCCL_H

#include "comm/collective.h"
#include "comm/nccl.h"
#include "kernels/kernels.h"

// Of encoded messages in each direction: enough for a fast link, little beside a model.
enum { NCCL_BUFFER_BYTES = 32 << 20, NCCL_ALIGNMENT = 128 };

// ---------------------------------------------------------------------------------------
// Message buffers

static inline size_t nccl_piece_bytes(WireFormat wire, size_t piece) {
    return layout_round_up(wire_bytes(wire, piece), 16);
}

static inline size_t nccl_owner_bytes(WireFormat wire, size_t piece, size_t cells) {
    return layout_round_up(cells * nccl_piece_bytes(wire, piece), NCCL_ALIGNMENT);
}

// Reserves the message buffers for vectors of this layout: for at least one cell, at most
// all of them. A plan calls this without nccl_open.
static inline void nccl_collectives_reserve(Nccl *nccl, const Transport *transport, Arena *arena,
                                            const Layout *layout) {
    const Groups *groups = transport_groups(transport);
    size_t mine = (size_t)groups_count_owners(groups, groups->rank), others = (size_t)layout->size - mine;
    size_t cell = layout->piece * (size_t)layout->size * sizeof(float);
    size_t most = nccl->buffer_limit > 0 ? nccl->buffer_limit : (size_t)NCCL_BUFFER_BYTES;
    nccl->cells = size_max(1, size_min(layout->cells, most / cell));
    size_t owner = nccl_owner_bytes(WIRE_FP32, layout->piece, nccl->cells);
    nccl->received_bytes = size_max((size_t)groups->hosts, mine) * owner;
    arena_reserve(arena, MEMORY_COMMUNICATION, "messages being received", 2 * nccl->received_bytes,
                  &nccl->received);
    arena_reserve(arena, MEMORY_COMMUNICATION, "messages being sent", mine * owner, &nccl->sent);
    if (groups->mates == 1) { return; }
    arena_reserve(arena, MEMORY_COMMUNICATION, "messages being received inside the host",
                  size_max((size_t)groups->mates * mine, others) * owner, &nccl->inside_received);
    arena_reserve(arena, MEMORY_COMMUNICATION, "messages being sent inside the host", others * owner,
                  &nccl->inside_sent);
}

#ifdef ACCO_HAVE_NCCL
// Cells [first, first + cells) of a collective.
typedef struct NcclBatch {
    Nccl *nccl;
    const Groups *groups;
    Stream *stream; // between hosts
    Stream inside;  // a copy of it with the queue for messages inside the host
    const Collective *collective;
    size_t first, cells;
    int number;        // of the batch: buffers alternate
    float *vector;     // where the batch begins in the vector
    const float *base; // and in its base; NULL: there is none
    char *received;    // what other hosts send
} NcclBatch;

// The pieces of these owners (count), which are listed in GPU memory.
static inline WirePieces nccl_pieces(const NcclBatch *batch, WireFormat wire, const int *owners, int count) {
    const Layout *layout = batch->collective->layout;
    size_t cell = layout->piece * (size_t)layout->size;
    WirePieces pieces = {.count = layout->piece,
                         .bytes = nccl_piece_bytes(wire, layout->piece),
                         .owner_bytes = nccl_owner_bytes(wire, layout->piece, batch->cells),
                         .cells = batch->cells,
                         .owner_count = (size_t)count,
                         .owners = owners,
                         .owner_stride = layout->piece,
                         .cell_stride = cell,
                         .base_stride = cell};
    return pieces;
}

// ---------------------------------------------------------------------------------------
// Reduce-scatter

// Every rank of this host adds up what the others have for the owners whose delegate it
// is. Its own part is packed among those that arrive.
static inline void nccl_reduce_inside(NcclBatch *batch) {
    Nccl *nccl = batch->nccl;
    const Groups *groups = batch->groups;
    WirePieces others = nccl_pieces(batch, WIRE_FP32, nccl->sent_owners, nccl->other_count),
               own = nccl_pieces(batch, WIRE_FP32, nccl->owners, nccl->mine_count);
    size_t mine = (size_t)nccl->mine_count * own.owner_bytes;
    char *out = nccl->inside_sent, *in = nccl->inside_received;
    if (groups->mates == 1) { return; }
    wire_encode_on_gpu(&batch->inside, WIRE_FP32, out, batch->vector, NULL, &others);
    wire_encode_on_gpu(&batch->inside, WIRE_FP32, in + (size_t)groups->place[groups->rank] * mine,
                       batch->vector, NULL, &own);
    nccl_begin(nccl);
    for (int step = 1; step < groups->mates; step++) {
        int to = groups_mate(groups, step), from = groups_mate(groups, -step);
        size_t bytes = (size_t)groups_count_owners(groups, to) * own.owner_bytes;
        char *part = in + (size_t)groups->place[from] * mine;
        nccl_post(nccl, INSIDE_HOSTS, batch->inside.queue, true, to, out, bytes);
        nccl_post(nccl, INSIDE_HOSTS, batch->inside.queue, false, from, part, mine);
        out += bytes;
    }
    nccl_end(nccl, INSIDE_HOSTS);
    wire_sum_on_gpu(&batch->inside, WIRE_FP32, batch->vector, in, mine, groups->mates, &own);
    gpu_mark(nccl->inside_done[batch->number % 2], batch->inside.queue);
    gpu_wait_for(batch->stream->queue, nccl->inside_done[batch->number % 2]);
}

// The sums of this host go to their owners, and those of all hosts are added up.
static inline void nccl_reduce_between(NcclBatch *batch) {
    Nccl *nccl = batch->nccl;
    const Groups *groups = batch->groups;
    WireFormat wire = batch->collective->wire;
    WirePieces remote = nccl_pieces(batch, wire, nccl->remote_owners, nccl->mine_count - 1),
               own = nccl_pieces(batch, wire, NULL, 1);
    size_t owner = own.owner_bytes;
    float *mine = batch->vector + (size_t)groups->rank * own.count;
    char *out = nccl->sent, *in = batch->received;
    if (groups->hosts == 1) { return; }
    wire_encode_on_gpu(batch->stream, wire, out, batch->vector, NULL, &remote);
    wire_encode_on_gpu(batch->stream, wire, in + (size_t)groups->host * owner, mine, NULL, &own);
    nccl_begin(nccl);
    for (int step = 1; step < groups->hosts; step++) {
        int host = groups_other_host(groups, step), other = groups_other_host(groups, -step);
        for (int place = groups->place[groups->rank]; place < groups_count(groups, host);
             place += groups->mates, out += owner) {
            int to = groups_rank(groups, host, place);
            nccl_post(nccl, BETWEEN_HOSTS, batch->stream->queue, true, to, out, owner);
        }
        int from = groups_delegate(groups, other, groups->rank);
        nccl_post(nccl, BETWEEN_HOSTS, batch->stream->queue, false, from, in + (size_t)other * owner, owner);
    }
    nccl_end(nccl, BETWEEN_HOSTS);
    wire_sum_on_gpu(batch->stream, wire, mine, in, owner, groups->hosts, &own);
}

// ---------------------------------------------------------------------------------------
// All-gather

// This rank's own pieces go to its delegates on the other hosts. What it receives as a
// delegate, its own among it, lies owner behind owner.
static inline void nccl_gather_between(NcclBatch *batch) {
    Nccl *nccl = batch->nccl;
    const Groups *groups = batch->groups;
    const Collective *collective = batch->collective;
    size_t piece = collective->layout->piece;
    WirePieces own = nccl_pieces(batch, collective->wire, NULL, 1);
    size_t owner = own.owner_bytes;
    char *in = batch->received, *mine = in + (size_t)nccl->mine_index * owner;
    if (collective->source != NULL) { own.cell_stride = piece; }
    gpu_wait_for(batch->stream->queue, nccl->inside_done[batch->number % 2]); // of two batches ago
    LayoutRange first = layout_piece(collective->layout, batch->first, groups->rank);
    wire_encode_on_gpu(batch->stream, collective->wire, mine, collective_source(collective, &first),
                       batch->base != NULL ? batch->base + (size_t)groups->rank * piece : NULL, &own);
    if (groups->hosts > 1) {
        nccl_begin(nccl);
        for (int step = 1; step < groups->hosts; step++) {
            int to = groups_delegate(groups, groups_other_host(groups, step), groups->rank);
            nccl_post(nccl, BETWEEN_HOSTS, batch->stream->queue, true, to, mine, owner);
        }
        for (int from = -1; groups_next_owner(groups, groups->rank, &from); in += owner) {
            if (from == groups->rank) { continue; }
            nccl_post(nccl, BETWEEN_HOSTS, batch->stream->queue, false, from, in, owner);
        }
        nccl_end(nccl, BETWEEN_HOSTS);
    }
    gpu_mark(nccl->between_done, batch->stream->queue);
    gpu_wait_for(batch->inside.queue, nccl->between_done);
}

// What has arrived goes to the other ranks of this host, and all of it is decoded.
static inline void nccl_gather_inside(NcclBatch *batch) {
    Nccl *nccl = batch->nccl;
    const Groups *groups = batch->groups;
    WireFormat wire = batch->collective->wire;
    WirePieces others = nccl_pieces(batch, wire, nccl->received_owners, nccl->other_count),
               own = nccl_pieces(batch, wire, nccl->owners, nccl->mine_count);
    size_t mine = (size_t)nccl->mine_count * own.owner_bytes;
    char *out = batch->received, *in = nccl->inside_received;
    if (groups->mates > 1) {
        nccl_begin(nccl);
        for (int step = 1; step < groups->mates; step++) {
            int to = groups_mate(groups, step), from = groups_mate(groups, -step);
            size_t bytes = (size_t)groups_count_owners(groups, from) * own.owner_bytes;
            nccl_post(nccl, INSIDE_HOSTS, batch->inside.queue, true, to, out, mine);
            nccl_post(nccl, INSIDE_HOSTS, batch->inside.queue, false, from, in, bytes);
            in += bytes;
        }
        nccl_end(nccl, INSIDE_HOSTS);
        wire_decode_on_gpu(&batch->inside, wire, batch->vector, nccl->inside_received, batch->base, &others);
    }
    wire_decode_on_gpu(&batch->inside, wire, batch->vector, out, batch->base, &own);
    gpu_mark(nccl->inside_done[batch->number % 2], batch->inside.queue);
}

// ---------------------------------------------------------------------------------------
// The library's own collectives (--exchange library): they may be faster at scale, but their
// bits depend on more than the ranks. A cell is one call, and the calls of a batch are a
// group. In bf16 the library also adds in bf16.

static inline void nccl_exchange_by_library(NcclBatch *batch, bool reduces) {
    Nccl *nccl = batch->nccl;
    const Collective *collective = batch->collective;
    bool bf16 = collective->wire == WIRE_BF16;
    size_t piece = collective->layout->piece, rank = (size_t)batch->groups->rank;
    size_t element = bf16 ? 2 : 4, cell = piece * (size_t)batch->groups->size;
    LayoutRange first = layout_piece(collective->layout, batch->first, (int)rank);
    const float *source = collective_source(collective, &first);
    char *data = bf16 ? nccl->sent : (char *)batch->vector, *own = data + rank * piece * element;
    WirePieces all = wire_range(WIRE_BF16, batch->cells * cell),
               mine = nccl_pieces(batch, WIRE_BF16, NULL, 1);
    mine.bytes = cell * element;
    if (collective->source != NULL) { mine.cell_stride = piece; }
    if (bf16 && reduces) { wire_encode_on_gpu(batch->stream, WIRE_BF16, data, batch->vector, NULL, &all); }
    if (bf16 && !reduces) { wire_encode_on_gpu(batch->stream, WIRE_BF16, own, source, NULL, &mine); }
    nccl_begin(nccl);
    for (size_t i = 0; i < batch->cells; i++) {
        char *whole = data + i * mine.bytes, *part = own + i * mine.bytes; // of the cell
        const void *sent = reduces ? whole : bf16 ? part : (const char *)(source + i * mine.cell_stride);
        nccl_collect(nccl, batch->stream->queue, reduces, bf16, sent, reduces ? part : whole, piece);
    }
    nccl_end(nccl, BETWEEN_HOSTS);
    if (bf16 && reduces) {
        wire_decode_on_gpu(batch->stream, WIRE_BF16, batch->vector + rank * piece, own, NULL, &mine);
    }
    if (bf16 && !reduces) { wire_decode_on_gpu(batch->stream, WIRE_BF16, batch->vector, data, NULL, &all); }
}

// ---------------------------------------------------------------------------------------
// Both collectives, batch by batch. Returns when all is done.
static inline void nccl_exchange(Nccl *nccl, Stream *stream, const Collective *collective,
                                 CollectiveKind kind) {
    Transport *transport = nccl->transport;
    bool reduces = kind == REDUCE_SCATTER;
    size_t end = collective->end;
    NcclBatch batch = {.nccl = nccl,
                       .groups = transport_groups(transport),
                       .stream = stream,
                       .inside = *stream,
                       .collective = collective};
    batch.inside.queue = nccl->inside_queue;
    transport_begin(transport, collective_name(kind));
    gpu_mark(nccl->between_done, stream->queue);
    gpu_wait_for(nccl->inside_queue, nccl->between_done); // what the stream has done so far
    for (batch.first = collective->first; batch.first < end; batch.first += batch.cells, batch.number++) {
        size_t flat = layout_cell_begin(collective->layout, batch.first);
        batch.cells = size_min(end - batch.first, nccl->cells);
        batch.vector = collective->buffer + flat;
        batch.base = collective_base(collective, flat);
        // Two buffers: those of an all-gather are passed on while the next batch arrives.
        batch.received = nccl->received + (size_t)(batch.number % 2) * nccl->received_bytes;
        if (transport->library) {
            nccl_exchange_by_library(&batch, reduces);
        } else if (reduces) {
            nccl_reduce_inside(&batch);
            nccl_reduce_between(&batch);
        } else {
            nccl_gather_between(&batch);
            nccl_gather_inside(&batch);
        }
    }
    // The level that came first is waited for first, so that a late rank is named for that level.
    void *queues[TRANSPORT_LEVELS] = {nccl->inside_queue, stream->queue};
    Level earlier = reduces ? INSIDE_HOSTS : BETWEEN_HOSTS, later = reduces ? BETWEEN_HOSTS : INSIDE_HOSTS;
    nccl_settle(nccl, earlier, queues[earlier], transport->operation);
    nccl_settle(nccl, later, queues[later], transport->operation);
}

#else

static inline void nccl_exchange(Nccl *nccl, Stream *stream, const Collective *collective,
                                 CollectiveKind kind) {
    (void)nccl, (void)stream, (void)collective, (void)kind;
}

#endif

#endif
