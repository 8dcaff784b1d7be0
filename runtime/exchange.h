// exchange.h: the collectives, on vectors wherever they lie.
//
//   where the vector lies   how it travels
//   host memory             collectives.h
//   GPU, with NCCL          from GPU to GPU; our kernels encode, add and decode (kernels.h: wire_*)
//   GPU, without            through pinned host memory, and there by collectives.h: several ranks on one GPU, ranks with and without
//                           GPUs, no NCCL. On a slow network this costs little, and the host's cores do the adding
//
// All three give the same bits. Both functions return when the vector is as promised; what the stream does later sees it.
#ifndef ACCO_EXCHANGE_H
#define ACCO_EXCHANGE_H

#include "../kernels/kernels.h"
#include "nccl.h"

// How vectors of this process travel.
typedef struct Carrier {
    Transport *transport;
    bool on_gpu; // the vectors lie there
    Nccl *nccl;  // NULL: through the host
    float *vector, *base; // (padded) pinned: what stands for the vector, and for Exchange::base, on the host
} Carrier;

// Plans what a carrier needs for vectors of at most this layout. `carrier` must stay where it is.
static inline void carrier_reserve(Carrier *carrier, Arena *arena, const Layout *layout, bool with_base) {
    bool alone = carrier->transport->size == 1;
    size_t bytes = layout_padded(layout) * sizeof(float);
    if (carrier->nccl != NULL && !alone) {
        nccl_reserve(carrier->nccl, arena, layout);
        return;
    }
    transport_reserve(carrier->transport, arena, layout_shard(layout));
    if (carrier->on_gpu && (!alone || with_base)) {
        arena_reserve_host(arena, MEMORY_EXCHANGE, "vector on the host", bytes, &carrier->vector);
        if (with_base) { arena_reserve_host(arena, MEMORY_EXCHANGE, "base on the host", bytes, &carrier->base); }
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// Through the host

// Flat elements [begin, end) of a vector in GPU memory, to or from the same place of its stand-in.
static inline void carrier_copy(Stream *stream, float *to, const float *from, size_t begin, size_t end) {
    stream_copy(stream, to + begin, from + begin, (end - begin) * sizeof(float));
}

static inline void staged_reduce_scatter(Carrier *carrier, Stream *stream, const Exchange *exchange, size_t first, size_t end) {
    const Layout *layout = exchange->layout;
    Exchange staged = *exchange;
    staged.buffer = carrier->vector;
    carrier_copy(stream, carrier->vector, exchange->buffer, layout_cell_begin(layout, first / layout->piece),
                 layout_cell_begin(layout, end / layout->piece));
    stream_settle(stream);
    transport_reduce_scatter(carrier->transport, &staged, first, end);
    for (size_t own = first; own < end; own += layout->piece) {
        size_t flat = layout_flat(layout, carrier->transport->rank, own);
        carrier_copy(stream, exchange->buffer, carrier->vector, flat, flat + layout->piece);
    }
    stream_settle(stream);
}

static inline void staged_all_gather(Carrier *carrier, Stream *stream, const Exchange *exchange, size_t first, size_t end) {
    const Layout *layout = exchange->layout;
    size_t begin = layout_cell_begin(layout, first / layout->piece), stop = layout_cell_begin(layout, end / layout->piece);
    Exchange staged = *exchange;
    staged.buffer = carrier->vector;
    staged.source = NULL;
    staged.base = exchange->base != NULL ? carrier->base : NULL;
    for (size_t own = first; own < end; own += layout->piece) {
        size_t flat = layout_flat(layout, carrier->transport->rank, own);
        const float *source = exchange->source != NULL ? exchange->source + own : exchange->buffer + flat;
        stream_copy(stream, carrier->vector + flat, source, layout->piece * sizeof(float));
    }
    if (exchange->base != NULL) { carrier_copy(stream, carrier->base, exchange->base, begin, stop); }
    stream_settle(stream);
    transport_all_gather(carrier->transport, &staged, first, end);
    carrier_copy(stream, exchange->buffer, carrier->vector, begin, stop);
    stream_settle(stream);
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// From GPU to GPU

// Cells that go at a time.
static inline size_t nccl_cells(const Nccl *nccl, const Layout *layout) {
    size_t cells = nccl->buffer_bytes / (layout->piece * (size_t)layout->size * sizeof(float));
    return cells < 1 ? 1 : cells;
}

// Whether pieces that lie side by side may be encoded as one run: blocks of coarse formats must not cross them.
static inline bool pieces_are_one_run(const Exchange *exchange) {
    return !wire_is_coarse(exchange->wire) || exchange->layout->piece % WIRE_BLOCK == 0;
}

// `pieces` pieces from `values` on, side by side, encoded to `out`.
static inline void encode_pieces(Stream *stream, const Exchange *exchange, char *out, const float *values, const float *base,
                                 size_t pieces) {
    size_t run = pieces_are_one_run(exchange) ? pieces : 1, piece = exchange->layout->piece;
    for (size_t i = 0; i < pieces; i += run) {
        wire_encode_on_gpu(stream, exchange->wire, out + i * wire_bytes(exchange->wire, piece), values + i * piece,
                           base != NULL ? base + i * piece : NULL, run * piece);
    }
}

static inline void decode_pieces(Stream *stream, const Exchange *exchange, float *values, const char *in, const float *base,
                                 size_t pieces) {
    size_t run = pieces_are_one_run(exchange) ? pieces : 1, piece = exchange->layout->piece;
    for (size_t i = 0; i < pieces; i += run) {
        wire_decode_on_gpu(stream, exchange->wire, values + i * piece, in + i * wire_bytes(exchange->wire, piece),
                           base != NULL ? base + i * piece : NULL, run * piece);
    }
}

// Cells [first, first + cells): encoded, (cells, ranks, piece); received, (ranks, cells, piece); added.
static inline void nccl_reduce_cells(Nccl *nccl, Stream *stream, const Exchange *exchange, size_t first, size_t cells) {
    const Layout *layout = exchange->layout;
    size_t size = (size_t)layout->size, bytes = wire_bytes(exchange->wire, layout->piece);
    float *begin = exchange->buffer + layout_cell_begin(layout, first);
    encode_pieces(stream, exchange, nccl->send, begin, NULL, cells * size);
    nccl_begin(nccl);
    for (size_t step = 0; step < size; step++) {
        size_t to = (size_t)transport_peer(nccl->transport, (int)step), from = (size_t)transport_peer(nccl->transport, (int)(size - step));
        for (size_t cell = 0; cell < cells; cell++) {
            nccl_send(nccl, stream, (int)to, nccl->send + (cell * size + to) * bytes, bytes);
            nccl_receive(nccl, stream, (int)from, nccl->receive + (from * cells + cell) * bytes, bytes);
        }
    }
    nccl_end(nccl);
    for (size_t cell = 0; cell < cells; cell++) {
        float *mine = begin + (cell * size + (size_t)nccl->transport->rank) * layout->piece;
        wire_sum_on_gpu(stream, exchange->wire, mine, nccl->receive + cell * bytes, cells * bytes, layout->size, layout->piece);
    }
}

// Cells [first, first + cells): the own pieces encoded, (cells, piece); received as they lie in the vector, (cells, ranks, piece); decoded,
// the own ones too.
static inline void nccl_gather_cells(Nccl *nccl, Stream *stream, const Exchange *exchange, size_t first, size_t cells) {
    const Layout *layout = exchange->layout;
    size_t size = (size_t)layout->size, bytes = wire_bytes(exchange->wire, layout->piece), begin = layout_cell_begin(layout, first);
    for (size_t cell = 0; cell < cells; cell++) {
        size_t own = (first + cell) * layout->piece, flat = layout_flat(layout, nccl->transport->rank, own);
        const float *source = exchange->source != NULL ? exchange->source + own : exchange->buffer + flat;
        wire_encode_on_gpu(stream, exchange->wire, nccl->send + cell * bytes, source, exchange->base != NULL ? exchange->base + flat : NULL,
                           layout->piece);
    }
    nccl_begin(nccl);
    for (size_t step = 0; step < size; step++) {
        size_t to = (size_t)transport_peer(nccl->transport, (int)step), from = (size_t)transport_peer(nccl->transport, (int)(size - step));
        for (size_t cell = 0; cell < cells; cell++) {
            nccl_send(nccl, stream, (int)to, nccl->send + cell * bytes, bytes);
            nccl_receive(nccl, stream, (int)from, nccl->receive + (cell * size + from) * bytes, bytes);
        }
    }
    nccl_end(nccl);
    decode_pieces(stream, exchange, exchange->buffer + begin, nccl->receive, exchange->base != NULL ? exchange->base + begin : NULL,
                  cells * size);
}

typedef void (*NcclCells)(Nccl *nccl, Stream *stream, const Exchange *exchange, size_t first, size_t cells);

static inline void nccl_for_cells(Nccl *nccl, Stream *stream, const Exchange *exchange, size_t first, size_t end, NcclCells work) {
    size_t piece = exchange->layout->piece, most = nccl_cells(nccl, exchange->layout);
    for (size_t cell = first / piece; cell < end / piece; cell += most) {
        work(nccl, stream, exchange, cell, end / piece - cell < most ? end / piece - cell : most);
    }
    nccl_settle(nccl, stream->queue, nccl->transport->operation);
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// What everybody else calls: own elements [first, end), whole cells, as in collectives.h

static inline void exchange_reduce_scatter(Carrier *carrier, Stream *stream, const Exchange *exchange, size_t first, size_t end) {
    if (carrier->transport->size == 1) { return; }
    if (!carrier->on_gpu) {
        transport_reduce_scatter(carrier->transport, exchange, first, end);
    } else if (carrier->nccl == NULL) {
        staged_reduce_scatter(carrier, stream, exchange, first, end);
    } else {
        transport_begin(carrier->transport, "reduce-scatter");
        nccl_for_cells(carrier->nccl, stream, exchange, first, end, nccl_reduce_cells);
    }
}

// A world of one on a GPU: what the wire lets through.
static inline void gather_alone_on_gpu(Carrier *carrier, Stream *stream, const Exchange *exchange, size_t first, size_t end) {
    if (wire_is_coarse(exchange->wire)) {
        staged_all_gather(carrier, stream, exchange, first, end);
        return;
    }
    if (exchange->source != NULL) {
        stream_copy(stream, exchange->buffer + first, exchange->source + first, (end - first) * sizeof(float));
    }
    if (exchange->wire == WIRE_BF16) { buffer_round(stream, exchange->buffer + first, end - first); }
    stream_settle(stream);
}

static inline void exchange_all_gather(Carrier *carrier, Stream *stream, const Exchange *exchange, size_t first, size_t end) {
    if (!carrier->on_gpu) {
        transport_all_gather(carrier->transport, exchange, first, end);
    } else if (carrier->transport->size == 1) {
        gather_alone_on_gpu(carrier, stream, exchange, first, end);
    } else if (carrier->nccl == NULL) {
        staged_all_gather(carrier, stream, exchange, first, end);
    } else {
        transport_begin(carrier->transport, "all-gather");
        nccl_for_cells(carrier->nccl, stream, exchange, first, end, nccl_gather_cells);
    }
}

#endif
