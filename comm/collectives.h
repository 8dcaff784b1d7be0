// collectives.h: the collectives, on vectors wherever they lie.
//
//   where the vector lies   how it travels
//   host memory             collectives_host.h
//   GPU, with NCCL          from GPU to GPU; our kernels encode, add and decode (kernels.h: wire_*)
//   GPU, without            through pinned host memory, and there by collectives_host.h: several ranks on one GPU, ranks with and without
//                           GPUs, no NCCL. On a slow network this costs little, and the host's cores do the adding
//
// All three give the same bits. Both functions return when the vector is as promised;
// what the stream does later sees it.
#ifndef ACCO_COMM_COLLECTIVES_H
#define ACCO_COMM_COLLECTIVES_H

#include "comm/nccl.h"
#include "kernels/kernels.h"

// How vectors of this process travel.
typedef struct CommBackend {
    Transport *transport;
    bool on_gpu; // the vectors lie there
    Nccl *nccl;  // NULL: through the host
    float *vector,
        *base; // (padded) pinned: what stands for the vector, and for Collective::base, on the host
} CommBackend;

// Plans what a comm needs for vectors of at most this layout. `comm` must stay where it
// is.
static inline void comm_reserve(CommBackend *comm, Arena *arena, const Layout *layout, bool with_base) {
    bool alone = comm->transport->size == 1;
    size_t bytes = layout_padded(layout) * sizeof(float);
    if (comm->nccl != NULL && !alone) {
        nccl_reserve(comm->nccl, arena, layout);
        return;
    }
    host_collectives_reserve(comm->transport, arena, layout_shard(layout));
    if (comm->on_gpu && (!alone || with_base)) {
        arena_reserve_host(arena, MEMORY_COMMUNICATION, "vector on the host", bytes, &comm->vector);
        if (with_base) {
            arena_reserve_host(arena, MEMORY_COMMUNICATION, "base on the host", bytes, &comm->base);
        }
    }
}

// ---------------------------------------------------------------------------------------
// Through the host

// Flat elements [begin, end) of a vector in GPU memory, to or from the same place of its
// stand-in.
static inline void comm_copy(Stream *stream, float *to, const float *from, size_t begin, size_t end) {
    stream_copy(stream, to + begin, from + begin, (end - begin) * sizeof(float));
}

static inline void staged_reduce_scatter(CommBackend *comm, Stream *stream, const Collective *collective,
                                         size_t first, size_t end) {
    const Layout *layout = collective->layout;
    Collective staged = *collective;
    staged.buffer = comm->vector;
    comm_copy(stream, comm->vector, collective->buffer, layout_cell_begin(layout, first / layout->piece),
              layout_cell_begin(layout, end / layout->piece));
    stream_settle(stream);
    host_reduce_scatter(comm->transport, &staged, first, end);
    for (size_t own = first; own < end; own += layout->piece) {
        size_t flat = layout_flat(layout, comm->transport->rank, own);
        comm_copy(stream, collective->buffer, comm->vector, flat, flat + layout->piece);
    }
    stream_settle(stream);
}

static inline void staged_all_gather(CommBackend *comm, Stream *stream, const Collective *collective,
                                     size_t first, size_t end) {
    const Layout *layout = collective->layout;
    size_t begin = layout_cell_begin(layout, first / layout->piece),
           stop = layout_cell_begin(layout, end / layout->piece);
    Collective staged = *collective;
    staged.buffer = comm->vector;
    staged.source = NULL;
    staged.base = collective->base != NULL ? comm->base : NULL;
    for (size_t own = first; own < end; own += layout->piece) {
        size_t flat = layout_flat(layout, comm->transport->rank, own);
        const float *source =
            collective->source != NULL ? collective->source + own : collective->buffer + flat;
        stream_copy(stream, comm->vector + flat, source, layout->piece * sizeof(float));
    }
    if (collective->base != NULL) { comm_copy(stream, comm->base, collective->base, begin, stop); }
    stream_settle(stream);
    host_all_gather(comm->transport, &staged, first, end);
    comm_copy(stream, collective->buffer, comm->vector, begin, stop);
    stream_settle(stream);
}

// ---------------------------------------------------------------------------------------
// From GPU to GPU

// Cells that go at a time.
static inline size_t nccl_cells(const Nccl *nccl, const Layout *layout) {
    size_t cells = nccl->buffer_bytes / (layout->piece * (size_t)layout->size * sizeof(float));
    return cells < 1 ? 1 : cells;
}

// Whether pieces that lie side by side may be encoded as one run: blocks of coarse
// formats must not cross them.
static inline bool pieces_are_one_run(const Collective *collective) {
    return !wire_is_coarse(collective->wire) || collective->layout->piece % WIRE_BLOCK == 0;
}

// `pieces` pieces from `values` on, side by side, encoded to `out`.
static inline void encode_pieces(Stream *stream, const Collective *collective, char *out, const float *values,
                                 const float *base, size_t pieces) {
    size_t run = pieces_are_one_run(collective) ? pieces : 1, piece = collective->layout->piece;
    for (size_t i = 0; i < pieces; i += run) {
        wire_encode_on_gpu(stream, collective->wire, out + i * wire_bytes(collective->wire, piece),
                           values + i * piece, base != NULL ? base + i * piece : NULL, run * piece);
    }
}

static inline void decode_pieces(Stream *stream, const Collective *collective, float *values, const char *in,
                                 const float *base, size_t pieces) {
    size_t run = pieces_are_one_run(collective) ? pieces : 1, piece = collective->layout->piece;
    for (size_t i = 0; i < pieces; i += run) {
        wire_decode_on_gpu(stream, collective->wire, values + i * piece,
                           in + i * wire_bytes(collective->wire, piece),
                           base != NULL ? base + i * piece : NULL, run * piece);
    }
}

// Cells [first, first + cells): encoded, (cells, ranks, piece); received, (ranks, cells,
// piece); added.
static inline void nccl_reduce_cells(Nccl *nccl, Stream *stream, const Collective *collective, size_t first,
                                     size_t cells) {
    const Layout *layout = collective->layout;
    size_t size = (size_t)layout->size, bytes = wire_bytes(collective->wire, layout->piece);
    float *begin = collective->buffer + layout_cell_begin(layout, first);
    encode_pieces(stream, collective, nccl->send, begin, NULL, cells * size);
    nccl_begin(nccl);
    for (size_t step = 0; step < size; step++) {
        size_t to = (size_t)transport_peer(nccl->transport, (int)step),
               from = (size_t)transport_peer(nccl->transport, (int)(size - step));
        for (size_t cell = 0; cell < cells; cell++) {
            nccl_send(nccl, stream, (int)to, nccl->send + (cell * size + to) * bytes, bytes);
            nccl_receive(nccl, stream, (int)from, nccl->receive + (from * cells + cell) * bytes, bytes);
        }
    }
    nccl_end(nccl);
    for (size_t cell = 0; cell < cells; cell++) {
        float *mine = begin + (cell * size + (size_t)nccl->transport->rank) * layout->piece;
        wire_sum_on_gpu(stream, collective->wire, mine, nccl->receive + cell * bytes, cells * bytes,
                        layout->size, layout->piece);
    }
}

// Cells [first, first + cells): the own pieces encoded, (cells, piece); received as they
// lie in the vector, (cells, ranks, piece); decoded, the own ones too.
static inline void nccl_gather_cells(Nccl *nccl, Stream *stream, const Collective *collective, size_t first,
                                     size_t cells) {
    const Layout *layout = collective->layout;
    size_t size = (size_t)layout->size, bytes = wire_bytes(collective->wire, layout->piece),
           begin = layout_cell_begin(layout, first);
    for (size_t cell = 0; cell < cells; cell++) {
        size_t own = (first + cell) * layout->piece, flat = layout_flat(layout, nccl->transport->rank, own);
        const float *source =
            collective->source != NULL ? collective->source + own : collective->buffer + flat;
        wire_encode_on_gpu(stream, collective->wire, nccl->send + cell * bytes, source,
                           collective->base != NULL ? collective->base + flat : NULL, layout->piece);
    }
    nccl_begin(nccl);
    for (size_t step = 0; step < size; step++) {
        size_t to = (size_t)transport_peer(nccl->transport, (int)step),
               from = (size_t)transport_peer(nccl->transport, (int)(size - step));
        for (size_t cell = 0; cell < cells; cell++) {
            nccl_send(nccl, stream, (int)to, nccl->send + cell * bytes, bytes);
            nccl_receive(nccl, stream, (int)from, nccl->receive + (cell * size + from) * bytes, bytes);
        }
    }
    nccl_end(nccl);
    decode_pieces(stream, collective, collective->buffer + begin, nccl->receive,
                  collective->base != NULL ? collective->base + begin : NULL, cells * size);
}

typedef void (*NcclCells)(Nccl *nccl, Stream *stream, const Collective *collective, size_t first,
                          size_t cells);

static inline void nccl_for_cells(Nccl *nccl, Stream *stream, const Collective *collective, size_t first,
                                  size_t end, NcclCells work) {
    size_t piece = collective->layout->piece, most = nccl_cells(nccl, collective->layout);
    for (size_t cell = first / piece; cell < end / piece; cell += most) {
        work(nccl, stream, collective, cell, end / piece - cell < most ? end / piece - cell : most);
    }
    nccl_settle(nccl, stream->queue, nccl->transport->operation);
}

// ---------------------------------------------------------------------------------------
// What everybody else calls: own elements [first, end), whole cells, as in
// collectives_host.h

static inline void comm_reduce_scatter(CommBackend *comm, Stream *stream, const Collective *collective,
                                       size_t first, size_t end) {
    if (comm->transport->size == 1) { return; }
    if (!comm->on_gpu) {
        host_reduce_scatter(comm->transport, collective, first, end);
    } else if (comm->nccl == NULL) {
        staged_reduce_scatter(comm, stream, collective, first, end);
    } else {
        transport_begin(comm->transport, "reduce-scatter");
        nccl_for_cells(comm->nccl, stream, collective, first, end, nccl_reduce_cells);
    }
}

// A world of one on a GPU: what the wire lets through.
static inline void gather_alone_on_gpu(CommBackend *comm, Stream *stream, const Collective *collective,
                                       size_t first, size_t end) {
    if (wire_is_coarse(collective->wire)) {
        staged_all_gather(comm, stream, collective, first, end);
        return;
    }
    if (collective->source != NULL) {
        stream_copy(stream, collective->buffer + first, collective->source + first,
                    (end - first) * sizeof(float));
    }
    if (collective->wire == WIRE_BF16) { buffer_round(stream, collective->buffer + first, end - first); }
    stream_settle(stream);
}

static inline void comm_all_gather(CommBackend *comm, Stream *stream, const Collective *collective,
                                   size_t first, size_t end) {
    if (!comm->on_gpu) {
        host_all_gather(comm->transport, collective, first, end);
    } else if (comm->transport->size == 1) {
        gather_alone_on_gpu(comm, stream, collective, first, end);
    } else if (comm->nccl == NULL) {
        staged_all_gather(comm, stream, collective, first, end);
    } else {
        transport_begin(comm->transport, "all-gather");
        nccl_for_cells(comm->nccl, stream, collective, first, end, nccl_gather_cells);
    }
}

#endif
