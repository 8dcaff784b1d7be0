// collectives_nccl.h: reduce-scatter and all-gather of vectors in GPU memory, from GPU to
// GPU with the messages of NCCL. The contract is in collective.h.
//
// NCCL only moves bytes. Our own kernels encode, add and decode (kernels/cuda/wire.cuh),
// so any wire format travels, and the sums are those of collectives_host.h bit for bit:
// on the same two levels, or flat.
//
// A batch is as many cells as the message buffers hold. A message has the pieces of one owner
// or of several:
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

// Bytes of encoded messages in each direction: enough to fill a fast link, and little beside a
// model.
enum { NCCL_BUFFER_BYTES = 32 << 20, NCCL_ALIGNMENT = 128 };

// ---------------------------------------------------------------------------------------
// Message buffers

static inline size_t nccl_piece_bytes(WireFormat wire, size_t piece) {
    return layout_round_up(wire_bytes(wire, piece), 16);
}

// Bytes of an owner's pieces in a message.
static inline size_t nccl_owner_bytes(WireFormat wire, size_t piece, size_t cells) {
    return layout_round_up(cells * nccl_piece_bytes(wire, piece), NCCL_ALIGNMENT);
}

// Reserves the message buffers for vectors of this layout: for at least one cell, at most
// all of them. A plan calls this without nccl_open.
static inline void nccl_collectives_reserve(Nccl *nccl, const Transport *transport, Arena *arena,
                                            const Layout *layout) {
    const Groups *groups = transport_groups(transport);
    size_t mine = (size_t)owners_count(groups, transport->rank), others = (size_t)layout->size - mine;
    size_t mates = (size_t)groups_count(groups, groups->host_of[transport->rank]);
    size_t cell = layout->piece * (size_t)layout->size * sizeof(float);
    size_t most = nccl->buffer_limit > 0 ? nccl->buffer_limit : (size_t)NCCL_BUFFER_BYTES;
    nccl->cells = size_max(1, size_min(layout->cells, most / cell));
    size_t owner = nccl_owner_bytes(WIRE_FP32, layout->piece, nccl->cells);
    nccl->received_bytes = size_max((size_t)groups->hosts, mine) * owner;
    arena_reserve(arena, MEMORY_COMMUNICATION, "messages being received", 2 * nccl->received_bytes,
                  &nccl->received);
    arena_reserve(arena, MEMORY_COMMUNICATION, "messages being sent", mine * owner, &nccl->sent);
    if (mates == 1) { return; }
    arena_reserve(arena, MEMORY_COMMUNICATION, "messages being received inside the host",
                  size_max(mates * mine, others) * owner, &nccl->inside_received);
    arena_reserve(arena, MEMORY_COMMUNICATION, "messages being sent inside the host", others * owner,
                  &nccl->inside_sent);
}

// ---------------------------------------------------------------------------------------
// Batches

// Cells [first, first + cells) of a collective.
typedef struct NcclBatch {
    Nccl *nccl;
    Stream *stream; // between hosts
    Stream inside;  // a copy of it with the queue for messages inside the host
    const Collective *collective;
    size_t first, cells;
    int number; // of the batch: buffers alternate
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

// Where the batch begins in the vector.
static inline float *nccl_vector(const NcclBatch *batch) {
    return batch->collective->buffer + layout_cell_begin(batch->collective->layout, batch->first);
}

static inline const float *nccl_base(const NcclBatch *batch) {
    return collective_base(batch->collective, layout_cell_begin(batch->collective->layout, batch->first));
}

// What other hosts send: two buffers, because those of an all-gather are passed on while
// the next batch arrives.
static inline char *nccl_received(const NcclBatch *batch) {
    return batch->nccl->received + (size_t)(batch->number % 2) * batch->nccl->received_bytes;
}

static inline size_t nccl_batch_owner_bytes(const NcclBatch *batch, WireFormat wire) {
    return nccl_owner_bytes(wire, batch->collective->layout->piece, batch->cells);
}

// ---------------------------------------------------------------------------------------
// Reduce-scatter

// Every rank of this host adds up what the others have for the owners whose delegate it
// is. Its own part is packed among those that arrive.
static inline void nccl_reduce_inside(NcclBatch *batch) {
    Nccl *nccl = batch->nccl;
    const Groups *groups = transport_groups(nccl->transport);
    size_t owner = nccl_batch_owner_bytes(batch, WIRE_FP32), mine = (size_t)nccl->mine_count * owner;
    WirePieces others = nccl_pieces(batch, WIRE_FP32, nccl->sent_owners, nccl->other_count),
               own = nccl_pieces(batch, WIRE_FP32, nccl->owners, nccl->mine_count);
    if (nccl->mates == 1) { return; }
    wire_encode_on_gpu(&batch->inside, WIRE_FP32, nccl->inside_sent, nccl_vector(batch), NULL, &others);
    wire_encode_on_gpu(&batch->inside, WIRE_FP32, nccl->inside_received + (size_t)nccl->place * mine,
                       nccl_vector(batch), NULL, &own);
    char *out = nccl->inside_sent;
    nccl_begin(nccl);
    for (int step = 1; step < nccl->mates; step++) {
        int to = groups_mate(groups, nccl->transport->rank, step),
            from = groups_mate(groups, nccl->transport->rank, -step);
        size_t bytes = (size_t)owners_count(groups, to) * owner;
        size_t place = (size_t)groups->place[from];
        nccl_send(nccl, INSIDE_HOSTS, &batch->inside, to, out, bytes);
        nccl_receive(nccl, INSIDE_HOSTS, &batch->inside, from, nccl->inside_received + place * mine, mine);
        out += bytes;
    }
    nccl_end(nccl, INSIDE_HOSTS);
    wire_sum_on_gpu(&batch->inside, WIRE_FP32, nccl_vector(batch), nccl->inside_received, mine, nccl->mates,
                    &own);
    gpu_mark(nccl->inside_done[batch->number % 2], batch->inside.queue);
    gpu_wait_for(batch->stream->queue, nccl->inside_done[batch->number % 2]);
}

// The sums of this host go to their owners, and those of all hosts are added up.
static inline void nccl_reduce_between(NcclBatch *batch) {
    Nccl *nccl = batch->nccl;
    const Groups *groups = transport_groups(nccl->transport);
    WireFormat wire = batch->collective->wire;
    size_t owner = nccl_batch_owner_bytes(batch, wire), piece = batch->collective->layout->piece;
    WirePieces remote = nccl_pieces(batch, wire, nccl->remote_owners, nccl->mine_count - 1),
               own = nccl_pieces(batch, wire, NULL, 1);
    float *mine = nccl_vector(batch) + (size_t)nccl->transport->rank * piece;
    char *out = nccl->sent, *in = nccl_received(batch);
    if (groups->hosts == 1) { return; }
    wire_encode_on_gpu(batch->stream, wire, out, nccl_vector(batch), NULL, &remote);
    wire_encode_on_gpu(batch->stream, wire, in + (size_t)nccl->host * owner, mine, NULL, &own);
    nccl_begin(nccl);
    for (int step = 1; step < groups->hosts; step++) {
        int host = groups_other_host(groups, nccl->host, step);
        OwnerWalk walk = owners_on(groups, nccl->transport->rank, host, host + 1);
        for (; owners_next(&walk); out += owner) {
            nccl_send(nccl, BETWEEN_HOSTS, batch->stream, walk.owner, out, owner);
        }
        int other = groups_other_host(groups, nccl->host, -step);
        int from = groups_delegate(groups, other, nccl->transport->rank);
        nccl_receive(nccl, BETWEEN_HOSTS, batch->stream, from, in + (size_t)other * owner, owner);
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
    const Groups *groups = transport_groups(nccl->transport);
    const Collective *collective = batch->collective;
    const Layout *layout = collective->layout;
    int rank = nccl->transport->rank;
    size_t owner = nccl_batch_owner_bytes(batch, collective->wire);
    char *in = nccl_received(batch), *mine = in + (size_t)nccl->mine_index * owner;
    WirePieces own = nccl_pieces(batch, collective->wire, NULL, 1);
    const float *base = nccl_base(batch);
    if (collective->source != NULL) { own.cell_stride = layout->piece; }
    gpu_wait_for(batch->stream->queue, nccl->inside_done[batch->number % 2]); // of two batches ago
    LayoutRange first = layout_piece(layout, batch->first, rank);
    wire_encode_on_gpu(batch->stream, collective->wire, mine, collective_source(collective, &first),
                       base != NULL ? base + (size_t)rank * layout->piece : NULL, &own);
    if (groups->hosts > 1) {
        nccl_begin(nccl);
        for (int step = 1; step < groups->hosts; step++) {
            int to = groups_delegate(groups, groups_other_host(groups, nccl->host, step), rank);
            nccl_send(nccl, BETWEEN_HOSTS, batch->stream, to, mine, owner);
        }
        OwnerWalk walk = owners_of(groups, rank);
        for (; owners_next(&walk); in += owner) {
            if (walk.owner == rank) { continue; }
            nccl_receive(nccl, BETWEEN_HOSTS, batch->stream, walk.owner, in, owner);
        }
        nccl_end(nccl, BETWEEN_HOSTS);
    }
    gpu_mark(nccl->between_done, batch->stream->queue);
    gpu_wait_for(batch->inside.queue, nccl->between_done);
}

// What has arrived goes to the other ranks of this host, and all of it is decoded.
static inline void nccl_gather_inside(NcclBatch *batch) {
    Nccl *nccl = batch->nccl;
    const Groups *groups = transport_groups(nccl->transport);
    WireFormat wire = batch->collective->wire;
    size_t owner = nccl_batch_owner_bytes(batch, wire), mine = (size_t)nccl->mine_count * owner;
    WirePieces others = nccl_pieces(batch, wire, nccl->received_owners, nccl->other_count),
               own = nccl_pieces(batch, wire, nccl->owners, nccl->mine_count);
    if (nccl->mates > 1) {
        char *in = nccl->inside_received;
        nccl_begin(nccl);
        for (int step = 1; step < nccl->mates; step++) {
            int to = groups_mate(groups, nccl->transport->rank, step),
                from = groups_mate(groups, nccl->transport->rank, -step);
            size_t bytes = (size_t)owners_count(groups, from) * owner;
            nccl_send(nccl, INSIDE_HOSTS, &batch->inside, to, nccl_received(batch), mine);
            nccl_receive(nccl, INSIDE_HOSTS, &batch->inside, from, in, bytes);
            in += bytes;
        }
        nccl_end(nccl, INSIDE_HOSTS);
        wire_decode_on_gpu(&batch->inside, wire, nccl_vector(batch), nccl->inside_received, nccl_base(batch),
                           &others);
    }
    wire_decode_on_gpu(&batch->inside, wire, nccl_vector(batch), nccl_received(batch), nccl_base(batch),
                       &own);
    gpu_mark(nccl->inside_done[batch->number % 2], batch->inside.queue);
}

// ---------------------------------------------------------------------------------------
// The library's own collectives (--exchange library): they may be faster at scale, but their
// bits depend on more than the ranks. A cell is one call, and the calls of a batch are a
// group. In bf16 the library also adds in bf16.

// All elements of the batch, one behind the other.
static inline WirePieces nccl_whole(const NcclBatch *batch) {
    const Layout *layout = batch->collective->layout;
    return wire_range(WIRE_BF16, batch->cells * layout->piece * (size_t)layout->size);
}

static inline void nccl_library_reduce(NcclBatch *batch) {
    Nccl *nccl = batch->nccl;
    const Layout *layout = batch->collective->layout;
    bool bf16 = batch->collective->wire == WIRE_BF16;
    size_t element = bf16 ? 2 : 4, cell = layout->piece * (size_t)layout->size * element,
           own = (size_t)nccl->transport->rank * layout->piece;
    char *data = bf16 ? nccl->sent : (char *)nccl_vector(batch);
    WirePieces whole = nccl_whole(batch), mine = nccl_pieces(batch, WIRE_BF16, NULL, 1);
    if (bf16) { wire_encode_on_gpu(batch->stream, WIRE_BF16, data, nccl_vector(batch), NULL, &whole); }
    nccl_begin(nccl);
    for (size_t i = 0; i < batch->cells; i++) {
        char *in = data + i * cell; // each rank's part is written to its place in it
        nccl_collect(nccl, batch->stream, true, bf16, in, in + own * element, layout->piece);
    }
    nccl_end(nccl, BETWEEN_HOSTS);
    mine.bytes = cell;
    if (bf16) {
        wire_decode_on_gpu(batch->stream, WIRE_BF16, nccl_vector(batch) + own, data + own * element, NULL,
                           &mine);
    }
}

static inline void nccl_library_gather(NcclBatch *batch) {
    Nccl *nccl = batch->nccl;
    const Collective *collective = batch->collective;
    const Layout *layout = collective->layout;
    bool bf16 = collective->wire == WIRE_BF16;
    size_t piece = layout->piece, element = bf16 ? 2 : 4, cell = piece * (size_t)layout->size * element;
    LayoutRange first = layout_piece(layout, batch->first, nccl->transport->rank);
    const float *source = collective_source(collective, &first);
    size_t step = collective->source != NULL ? piece : piece * (size_t)layout->size; // between own pieces
    char *data = bf16 ? nccl_received(batch) : (char *)nccl_vector(batch);
    WirePieces whole = nccl_whole(batch), mine = nccl_pieces(batch, WIRE_BF16, NULL, 1);
    mine.cell_stride = step;
    mine.bytes = piece * element;
    if (bf16) { wire_encode_on_gpu(batch->stream, WIRE_BF16, nccl->sent, source, NULL, &mine); }
    nccl_begin(nccl);
    for (size_t i = 0; i < batch->cells; i++) {
        const void *in = bf16 ? (const void *)(nccl->sent + i * mine.bytes) : source + i * step;
        nccl_collect(nccl, batch->stream, false, bf16, in, data + i * cell, piece);
    }
    nccl_end(nccl, BETWEEN_HOSTS);
    if (bf16) { wire_decode_on_gpu(batch->stream, WIRE_BF16, nccl_vector(batch), data, NULL, &whole); }
}

// ---------------------------------------------------------------------------------------
// Cells [first, end), batch by batch: `one` serves the level that comes
// first, `two` the other. Returns when all is done.

typedef void (*NcclStep)(NcclBatch *batch);

static inline void nccl_for_batches(Nccl *nccl, Stream *stream, const Collective *collective, size_t first,
                                    size_t end, Level level, NcclStep one, NcclStep two) {
    NcclBatch batch = {.nccl = nccl,
                       .stream = stream,
                       .inside = *stream,
                       .collective = collective,
                       .first = first,
                       .cells = 0,
                       .number = 0};
    batch.inside.queue = nccl->inside_queue;
    gpu_mark(nccl->between_done, stream->queue);
    gpu_wait_for(nccl->inside_queue, nccl->between_done); // what the stream has done so far
    for (; batch.first < end; batch.first += batch.cells, batch.number++) {
        batch.cells = size_min(end - batch.first, nccl->cells);
        one(&batch);
        if (two != NULL) { two(&batch); }
    }
    // The level that came first is waited for first, so that a late rank is named for that level.
    void *queues[TRANSPORT_LEVELS] = {nccl->inside_queue, stream->queue};
    Level last = level == INSIDE_HOSTS ? BETWEEN_HOSTS : INSIDE_HOSTS;
    nccl_settle(nccl, level, queues[level], nccl->transport->operation);
    nccl_settle(nccl, last, queues[last], nccl->transport->operation);
}

static inline void nccl_reduce_scatter(Nccl *nccl, Stream *stream, const Collective *collective, size_t first,
                                       size_t end) {
    transport_begin(nccl->transport, "reduce-scatter");
    nccl_for_batches(nccl, stream, collective, first, end, INSIDE_HOSTS,
                     nccl->transport->library ? nccl_library_reduce : nccl_reduce_inside,
                     nccl->transport->library ? NULL : nccl_reduce_between);
}

static inline void nccl_all_gather(Nccl *nccl, Stream *stream, const Collective *collective, size_t first,
                                   size_t end) {
    transport_begin(nccl->transport, "all-gather");
    nccl_for_batches(nccl, stream, collective, first, end, BETWEEN_HOSTS,
                     nccl->transport->library ? nccl_library_gather : nccl_gather_between,
                     nccl->transport->library ? NULL : nccl_gather_inside);
}

#endif
