// exchange.h: reduce-scatter and all-gather of vectors, wherever they are, for the scheduler. The
// contract is in collective.h.
//
//   where the vector is   how it travels
//   host memory           through the transport: collectives_host.h
//   GPU, with NCCL        from GPU to GPU: collectives_nccl.h
//   GPU, without NCCL     staged: copied to pinned host memory, and from there as above
//                         (several ranks on one GPU, ranks with and without GPUs)
//
// All three give the same bits, unless NCCL adds (--exchange library). When they return, later
// tasks of the stream see what they did.
#pragma once

#include "comm/collectives_host.h"
#include "comm/collectives_nccl.h"
#include "kernels/kernels.h"

typedef struct CommBackend {
    Transport *transport;
    bool on_gpu;                    // the vectors are in GPU memory
    Nccl *nccl;                     // NULL: through the transport
    float *host_buffer, *host_base; // (padded), pinned: for staging `buffer` and `base` of a Collective
} CommBackend;

// Reserves memory for the collectives of vectors of at most this layout. `comm` must stay
// where it is until the arena is committed. with_base: some collectives will have a base.
static inline void comm_reserve(CommBackend *comm, Arena *arena, const Layout *layout, bool with_base) {
    bool alone = comm->transport->size == 1;
    size_t bytes = layout_padded(layout) * sizeof(float);
    if (comm->nccl != NULL && !alone) {
        nccl_collectives_reserve(comm->nccl, comm->transport, arena, layout);
        return;
    }
    host_collectives_reserve(comm->transport, arena, layout_shard(layout));
    if (!comm->on_gpu) { return; }
    const ArenaRow rows[] = {
        {MEMORY_COMMUNICATION, "vector on the host", alone && !with_base ? 0 : bytes, &comm->host_buffer},
        {MEMORY_COMMUNICATION, "base on the host", with_base ? bytes : 0, &comm->host_base}};
    arena_reserve_rows(arena, rows, 2, true);
}

// Elements of a copy. A GPU makes one copy in each direction at a time, and a batch of tokens would
// wait for a whole vector: 16 MiB take less than a millisecond. Much smaller ones would cost more,
// because the host notices an end up to 0.1 ms late.
enum { STAGED_PIECE = 1 << 22 };

// Copies flat elements [begin, end) between a vector in GPU memory and its copy on the
// host. On return the last piece may still be under way.
static inline void staged_copy(Stream *stream, float *to, const float *from, size_t begin, size_t end) {
    for (size_t first = begin; first < end; first += STAGED_PIECE) {
        if (first > begin) { stream_settle(stream); }
        size_t count = size_min(end - first, STAGED_PIECE);
        stream_copy(stream, to + first, from + first, count * sizeof(float));
    }
}

static inline void staged_exchange(CommBackend *comm, Stream *stream, const Collective *collective,
                                   CollectiveKind kind) {
    const Layout *layout = collective->layout;
    int rank = comm->transport->rank;
    size_t begin = layout_cell_begin(layout, collective->first),
           stop = layout_cell_begin(layout, collective->end),
           own_end = layout_piece(layout, collective->end, rank).own;
    LayoutRange range = {.own = layout_piece(layout, collective->first, rank).own};
    Collective staged = *collective;
    staged.buffer = comm->host_buffer;
    staged.source = NULL;
    staged.base = collective->base != NULL ? comm->host_base : NULL;
    if (kind == REDUCE_SCATTER) {
        staged_copy(stream, staged.buffer, collective->buffer, begin, stop);
    } else {
        while (layout_next(layout, rank, own_end, &range)) {
            stream_copy(stream, staged.buffer + range.flat, collective_source(collective, &range),
                        range.count * sizeof(float));
        }
        if (staged.base != NULL) { staged_copy(stream, comm->host_base, collective->base, begin, stop); }
    }
    stream_settle(stream);
    host_exchange(comm->transport, &staged, kind);
    if (kind == REDUCE_SCATTER) {
        while (layout_next(layout, rank, own_end, &range)) {
            staged_copy(stream, collective->buffer, staged.buffer, range.flat, range.flat + range.count);
        }
    } else {
        staged_copy(stream, collective->buffer, staged.buffer, begin, stop);
    }
    stream_settle(stream);
}

static inline void comm_exchange(CommBackend *comm, Stream *stream, const Collective *collective,
                                 CollectiveKind kind) {
    bool alone = comm->transport->size == 1;
    if (alone && kind == REDUCE_SCATTER) { return; }
    if (!comm->on_gpu) {
        host_exchange(comm->transport, collective, kind);
    } else if (alone && !wire_is_coarse(collective->wire)) {
        // Values are rounded as the wire would round them. Coarse formats are rare in a world of
        // one rank: they go through the host and need no code of their own.
        size_t begin = layout_cell_begin(collective->layout, collective->first),
               count = layout_cell_begin(collective->layout, collective->end) - begin;
        float *own = collective->buffer + begin;
        if (collective->source != NULL) {
            stream_copy(stream, own, collective->source + begin, count * sizeof(float));
        }
        if (collective->wire == WIRE_BF16) { buffer_round(stream, own, count); }
        stream_settle(stream);
#ifdef ACCO_HAVE_NCCL
    } else if (!alone && comm->nccl != NULL) {
        nccl_exchange(comm->nccl, stream, collective, kind);
#endif
    } else {
        staged_exchange(comm, stream, collective, kind);
    }
}

// GPUs: gathers bf16 casts in `casts` (padded). Two of them travel as one fp32 element. is_cast:
// this rank's own are there.
static inline void comm_gather_casts(CommBackend *comm, Stream *stream, const Collective *collective,
                                     Real *casts, bool is_cast) {
    const Layout *layout = collective->layout;
    (void)is_cast;
#ifdef ACCO_HAVE_CUDA
    int rank = comm->transport->rank;
    size_t own_end = layout_piece(layout, collective->end, rank).own;
    LayoutRange range = {.own = layout_piece(layout, collective->first, rank).own};
    while (!is_cast && layout_next(layout, rank, own_end, &range)) {
        WirePieces pieces = wire_range(WIRE_BF16, range.count);
        if (layout->piece > 0) { // all pieces at once
            pieces.cells = collective->end - collective->first;
            pieces.bytes = layout_cell_begin(layout, 1) * 2;
            pieces.cell_stride = collective->source != NULL ? layout->piece : layout_cell_begin(layout, 1);
        }
        cuda_wire_encode(stream, WIRE_BF16, real_at(casts, range.flat, PRECISION_BF16),
                         collective_source(collective, &range), NULL, &pieces);
        if (layout->piece > 0) { break; }
    }
#endif
    Layout words = *layout; // of 32 bits; pieces are even
    words.count = (layout->count + 1) / 2;
    words.piece = layout->piece / 2;
    words.pairs = true;
    Collective travelling = {.layout = &words,
                             .first = collective->first,
                             .end = collective->end,
                             .wire = WIRE_FP32,
                             .buffer = (float *)casts};
    comm_exchange(comm, stream, &travelling, ALL_GATHER);
}
