// collectives_nccl.h: reduce-scatter and all-gather of vectors in GPU memory, from GPU to
// GPU over NCCL. The contract is in collective.h.
//
// NCCL only moves bytes. Our kernels encode, add and decode (kernels/cuda/wire.cuh), so sums equal
// collectives_host.h's bit for bit. An all-gather adds nothing, so it is the library's own.
//
// A batch is as many cells as the message buffers hold. A message has pieces of owners:
//
//   | owner a: cell 0, cell 1, ... | owner b: cell 0, cell 1, ... | ...
//
// so that one kernel encodes what goes to all ranks, another one adds up all that has come, and
// there is one message to each rank.
//
//   reduce-scatter   queue    first                             then
//     inside         own      pack for every rank of the host   add up, into the vector
//     between        stream   encode for every remote owner     add up, into own pieces
//   all-gather       stream   encode own pieces                 decode all
//
// What is gathered as it is, in fp32 or as casts, goes from vector to vector in one batch. A level
// of a reduce-scatter has a communicator and a queue of its own: both are busy at the same time.
#pragma once

#include "comm/collective.h"
#include "comm/nccl.h"
#include "kernels/kernels.h"

// Bytes of encoded messages in each direction. The host takes about 0.1 ms for a batch; a fast
// link moves 30 MB in this time.
enum { NCCL_BUFFER_BYTES = 128 << 20, NCCL_ALIGNMENT = 128 };

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
    size_t owner = nccl_owner_bytes(WIRE_FP32, layout->piece, nccl->cells), all = (size_t)layout->size;
    bool inside = groups->mates > 1;
    size_t received = (inside ? (size_t)groups->hosts : all) * owner,
           inside_received = inside ? size_max((size_t)groups->mates * mine, all) * owner : 0,
           inside_sent = inside ? others * owner : 0;
    const MemoryClass C = MEMORY_COMMUNICATION;
    const ArenaRow rows[] = {
        {C, "messages being received", received, &nccl->received},
        {C, "messages being sent", mine * owner, &nccl->sent},
        {C, "messages being received inside the host", inside_received, &nccl->inside_received},
        {C, "messages being sent inside the host", inside_sent, &nccl->inside_sent}};
    arena_reserve_rows(arena, rows, 4, false);
    nccl->gathered = inside ? &nccl->inside_received : &nccl->received;
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
    float *vector;     // where the batch begins in the vector
    float *unsent;     // and in what is kept of sums; NULL: it is dropped
    const float *base; // and in its base; NULL: there is none
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

// Every rank of this host adds up what the others have for the owners whose delegate it is. Its own
// part is packed among those that arrive.
static inline void nccl_reduce_inside(NcclBatch *batch) {
    Nccl *nccl = batch->nccl;
    const Groups *groups = batch->groups;
    WirePieces others = nccl_pieces(batch, WIRE_FP32, nccl->sent_owners, nccl->other_count),
               own = nccl_pieces(batch, WIRE_FP32, nccl->owners, nccl->mine_count);
    size_t mine = (size_t)nccl->mine_count * own.owner_bytes;
    char *out = nccl->inside_sent, *in = nccl->inside_received;
    if (groups->mates == 1) { return; }
    cuda_wire_encode(&batch->inside, WIRE_FP32, out, batch->vector, NULL, &others);
    cuda_wire_encode(&batch->inside, WIRE_FP32, in + (size_t)groups->place[groups->rank] * mine,
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
    cuda_wire_sum(&batch->inside, WIRE_FP32, batch->vector, in, mine, groups->mates, &own);
    gpu_mark(nccl->inside_done, batch->inside.queue);
    gpu_wait_for(batch->stream->queue, nccl->inside_done);
}

// The sums of this host go to their owners, and the owners add up the sums of all hosts.
static inline void nccl_reduce_between(NcclBatch *batch) {
    Nccl *nccl = batch->nccl;
    const Groups *groups = batch->groups;
    WireFormat wire = batch->collective->wire;
    WirePieces remote = nccl_pieces(batch, wire, nccl->remote_owners, nccl->mine_count - 1),
               own = nccl_pieces(batch, wire, NULL, 1);
    size_t owner = own.owner_bytes;
    float *mine = batch->vector + (size_t)groups->rank * own.count;
    remote.unsent = batch->unsent;
    own.unsent = batch->unsent != NULL ? batch->unsent + (size_t)groups->rank * own.count : NULL;
    char *out = nccl->sent, *in = nccl->received;
    if (groups->hosts == 1) { return; }
    cuda_wire_encode(batch->stream, wire, out, batch->vector, NULL, &remote);
    cuda_wire_encode(batch->stream, wire, in + (size_t)groups->host * owner, mine, NULL, &own);
    nccl_begin(nccl);
    for (int step = 1; step < groups->hosts; step++) {
        int host = groups_other_host(groups, step), other = groups_other_host(groups, -step);
        for (int to = -1; groups_next_owner_on(groups, host, groups->rank, &to); out += owner) {
            nccl_post(nccl, BETWEEN_HOSTS, batch->stream->queue, true, to, out, owner);
        }
        int from = groups_delegate(groups, other, groups->rank);
        nccl_post(nccl, BETWEEN_HOSTS, batch->stream->queue, false, from, in + (size_t)other * owner, owner);
    }
    nccl_end(nccl, BETWEEN_HOSTS);
    cuda_wire_sum(batch->stream, wire, mine, in, owner, groups->hosts, &own);
}

// Whether own pieces go from vector to vector as they are.
static inline bool nccl_gathers_as_it_is(const Collective *collective) {
    return collective->wire == WIRE_FP32 && collective->base == NULL;
}

static inline void nccl_gather(NcclBatch *batch) {
    Nccl *nccl = batch->nccl;
    const Collective *collective = batch->collective;
    const Layout *layout = collective->layout;
    size_t rank = (size_t)batch->groups->rank, piece = layout->piece;
    WirePieces own = nccl_pieces(batch, collective->wire, NULL, 1),
               all = nccl_pieces(batch, collective->wire, NULL, layout->size);
    LayoutRange first = layout_piece(layout, batch->first, (int)rank);
    const float *source = collective_source(collective, &first);
    char *in = *nccl->gathered, *mine = in + rank * own.owner_bytes;
    if (collective->source != NULL) { own.cell_stride = piece; }
    own.unsent = batch->unsent != NULL ? batch->unsent + rank * piece : NULL;
    if (!nccl_gathers_as_it_is(collective)) {
        cuda_wire_encode(batch->stream, collective->wire, mine, source,
                         batch->base != NULL ? batch->base + rank * piece : NULL, &own);
        nccl_begin(nccl);
        nccl_collect(nccl, batch->stream->queue, ALL_GATHER, ncclChar, mine, in, own.owner_bytes);
        nccl_end(nccl, nccl_level_of_all(nccl));
        cuda_wire_decode(batch->stream, collective->wire, batch->vector, in, batch->base, &all);
        return;
    }
    nccl_begin(nccl);
    for (size_t i = 0; i < batch->cells; i++) {
        nccl_collect(nccl, batch->stream->queue, ALL_GATHER, ncclFloat, source + i * own.cell_stride,
                     batch->vector + i * all.cell_stride, piece);
    }
    nccl_end(nccl, nccl_level_of_all(nccl));
}

// The library's own reduce-scatter (--exchange library): it may be faster at scale, but its bits
// depend on more than the ranks. A cell is one call. In bf16 the library also adds in bf16.
static inline void nccl_reduce_by_library(NcclBatch *batch) {
    Nccl *nccl = batch->nccl;
    bool bf16 = batch->collective->wire == WIRE_BF16;
    size_t piece = batch->collective->layout->piece, element = bf16 ? 2 : 4;
    size_t cell = piece * (size_t)batch->groups->size, own = (size_t)batch->groups->rank * piece;
    char *data = bf16 ? nccl->sent : (char *)batch->vector;
    WirePieces all = wire_range(WIRE_BF16, batch->cells * cell),
               mine = nccl_pieces(batch, WIRE_BF16, NULL, 1);
    mine.bytes = cell * element;
    if (bf16) { cuda_wire_encode(batch->stream, WIRE_BF16, data, batch->vector, NULL, &all); }
    nccl_begin(nccl);
    for (size_t i = 0; i < batch->cells; i++) {
        char *whole = data + i * mine.bytes; // the cell
        nccl_collect(nccl, batch->stream->queue, REDUCE_SCATTER, bf16 ? ncclBfloat16 : ncclFloat, whole,
                     whole + own * element, piece);
    }
    nccl_end(nccl, nccl_level_of_all(nccl));
    if (bf16) {
        cuda_wire_decode(batch->stream, WIRE_BF16, batch->vector + own, data + own * element, NULL, &mine);
    }
}

// Returns when all is done.
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
    size_t most = !reduces && nccl_gathers_as_it_is(collective) ? end : nccl->cells;
    transport_begin(transport, collective_name(kind));
    gpu_mark(nccl->between_done, stream->queue);
    gpu_wait_for(nccl->inside_queue, nccl->between_done); // what the stream has done so far
    for (batch.first = collective->first; batch.first < end; batch.first += batch.cells) {
        size_t flat = layout_cell_begin(collective->layout, batch.first);
        batch.cells = size_min(end - batch.first, most);
        batch.vector = collective->buffer + flat;
        batch.base = collective_base(collective, flat);
        batch.unsent = collective->unsent != NULL ? collective->unsent + flat : NULL;
        if (!reduces) {
            nccl_gather(&batch);
        } else if (transport->library) {
            nccl_reduce_by_library(&batch);
        } else {
            nccl_reduce_inside(&batch);
            nccl_reduce_between(&batch);
        }
    }
    // The level that came first is waited for first, so that a late rank is named for that level.
    nccl_settle(nccl, INSIDE_HOSTS, nccl->inside_queue, transport->operation);
    nccl_settle(nccl, BETWEEN_HOSTS, stream->queue, transport->operation);
}

#endif
