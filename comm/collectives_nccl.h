// collectives_nccl.h: reduce-scatter and all-gather of vectors in GPU memory, from GPU to
// GPU with the messages of NCCL. The contract is in collective.h.
//
// NCCL only moves bytes. Our own kernels encode, add and decode (kernels/cuda/wire.cuh),
// so any wire format travels, and the sums are those of collectives_host.h bit for bit.
//
// As many cells as the message buffers hold go at a time. Encoded pieces lie like this,
// with 3 ranks and 2 cells at a time:
//
//   reduce-scatter
//     sent       | c0 to r0 | c0 to r1 | c0 to r2 | c1 to r0 | c1 to r1 | c1 to r2 |
//     received   | c0 of r0 | c1 of r0 | c0 of r1 | c1 of r1 | c0 of r2 | c1 of r2 |
//   all-gather
//     sent       | c0 | c1 |
//     received   | c0 of r0 | c0 of r1 | c0 of r2 | c1 of r0 | c1 of r1 | c1 of r2 |
//
// A rank also sends to itself: NCCL treats it as any other, and the own pieces then need
// no code of their own.
#ifndef ACCO_COMM_COLLECTIVES_NCCL_H
#define ACCO_COMM_COLLECTIVES_NCCL_H

#include "comm/collective.h"
#include "comm/nccl.h"
#include "kernels/kernels.h"

// Of encoded messages in each direction: enough to fill a fast link, small beside a
// model.
enum { NCCL_BUFFER_BYTES = 32 << 20 };

// Reserves the message buffers for vectors of this layout: at least one cell, at most the
// whole vector.
static inline void nccl_collectives_reserve(Nccl *nccl, Arena *arena, const Layout *layout) {
    size_t cell = layout->piece * (size_t)layout->size * sizeof(float);
    nccl->buffer_bytes = size_min(cell * layout->cells, size_max(cell, NCCL_BUFFER_BYTES));
    arena_reserve(arena, MEMORY_COMMUNICATION, "messages being received", nccl->buffer_bytes, &nccl->receive);
    arena_reserve(arena, MEMORY_COMMUNICATION, "messages being sent", nccl->buffer_bytes, &nccl->send);
}

// Pieces that are contiguous may be encoded as one run where blocks of the format do not
// cross their borders: then one kernel does `pieces` of them, otherwise each has its own.
static inline size_t nccl_run_pieces(const Collective *collective, size_t pieces) {
    bool joins = !wire_is_coarse(collective->wire) || collective->layout->piece % WIRE_BLOCK == 0;
    return joins ? pieces : 1;
}

// The rank to which this one sends in a step: in one step no two ranks send to the same.
static inline size_t nccl_peer(const Nccl *nccl, size_t step) {
    return ((size_t)nccl->transport->rank + step) % (size_t)nccl->transport->size;
}

// Cells [first, first + cells). On return the own pieces hold the sums, in the stream.
static inline void nccl_reduce_cells(Nccl *nccl, Stream *stream, const Collective *collective, size_t first,
                                     size_t cells) {
    const Layout *layout = collective->layout;
    size_t size = (size_t)layout->size, piece = layout->piece, bytes = wire_bytes(collective->wire, piece);
    float *begin = collective->buffer + layout_cell_begin(layout, first);
    size_t run = nccl_run_pieces(collective, cells * size);
    for (size_t i = 0; i < cells * size; i += run) {
        wire_encode_on_gpu(stream, collective->wire, nccl->send + i * bytes, begin + i * piece, NULL,
                           run * piece);
    }
    nccl_begin(nccl);
    for (size_t step = 0; step < size; step++) {
        size_t to = nccl_peer(nccl, step), from = nccl_peer(nccl, size - step);
        for (size_t cell = 0; cell < cells; cell++) {
            nccl_send(nccl, stream, (int)to, nccl->send + (cell * size + to) * bytes, bytes);
            nccl_receive(nccl, stream, (int)from, nccl->receive + (from * cells + cell) * bytes, bytes);
        }
    }
    nccl_end(nccl);
    for (size_t cell = 0; cell < cells; cell++) {
        float *mine = begin + (cell * size + (size_t)nccl->transport->rank) * piece;
        wire_sum_on_gpu(stream, collective->wire, mine, nccl->receive + cell * bytes, cells * bytes,
                        layout->size, piece);
    }
}

// Cells [first, first + cells). On return all pieces are decoded, the own ones too, in
// the stream.
static inline void nccl_gather_cells(Nccl *nccl, Stream *stream, const Collective *collective, size_t first,
                                     size_t cells) {
    const Layout *layout = collective->layout;
    size_t size = (size_t)layout->size, piece = layout->piece, bytes = wire_bytes(collective->wire, piece),
           begin = layout_cell_begin(layout, first);
    int rank = nccl->transport->rank;
    for (size_t cell = 0; cell < cells; cell++) {
        size_t own = (first + cell) * piece;
        wire_encode_on_gpu(stream, collective->wire, nccl->send + cell * bytes,
                           collective_source(collective, rank, own),
                           collective_base(collective, layout_flat(layout, rank, own)), piece);
    }
    nccl_begin(nccl);
    for (size_t step = 0; step < size; step++) {
        size_t to = nccl_peer(nccl, step), from = nccl_peer(nccl, size - step);
        for (size_t cell = 0; cell < cells; cell++) {
            nccl_send(nccl, stream, (int)to, nccl->send + cell * bytes, bytes);
            nccl_receive(nccl, stream, (int)from, nccl->receive + (cell * size + from) * bytes, bytes);
        }
    }
    nccl_end(nccl);
    size_t run = nccl_run_pieces(collective, cells * size);
    for (size_t i = 0; i < cells * size; i += run) {
        size_t flat = begin + i * piece;
        wire_decode_on_gpu(stream, collective->wire, collective->buffer + flat, nccl->receive + i * bytes,
                           collective_base(collective, flat), run * piece);
    }
}

typedef void (*NcclCells)(Nccl *nccl, Stream *stream, const Collective *collective, size_t first,
                          size_t cells);

// Own elements [first, end), whole cells, as many at a time as the buffers hold. Returns
// when all is done.
static inline void nccl_for_cells(Nccl *nccl, Stream *stream, const Collective *collective, size_t first,
                                  size_t end, NcclCells work) {
    const Layout *layout = collective->layout;
    size_t piece = layout->piece, cell_bytes = piece * (size_t)layout->size * sizeof(float);
    size_t most = size_max(nccl->buffer_bytes / cell_bytes, 1);
    for (size_t cell = first / piece; cell < end / piece; cell += most) {
        work(nccl, stream, collective, cell, size_min(end / piece - cell, most));
    }
    nccl_settle(nccl, stream->queue, nccl->transport->operation);
}

static inline void nccl_reduce_scatter(Nccl *nccl, Stream *stream, const Collective *collective, size_t first,
                                       size_t end) {
    transport_begin(nccl->transport, "reduce-scatter");
    nccl_for_cells(nccl, stream, collective, first, end, nccl_reduce_cells);
}

static inline void nccl_all_gather(Nccl *nccl, Stream *stream, const Collective *collective, size_t first,
                                   size_t end) {
    transport_begin(nccl->transport, "all-gather");
    nccl_for_cells(nccl, stream, collective, first, end, nccl_gather_cells);
}

#endif
