// collective.h: what a reduce-scatter or an all-gather moves, and what both promise.
//
//                    every rank begins with   and ends with
//   reduce-scatter   a whole vector           its own elements of the sum over ranks
//   all-gather       its own elements         the whole vector
//
// layout.h says which rank owns what, groups.h which ranks share a host.
//
// The ranks of a host first add up each piece among themselves, in fp32, from 0 and in the
// order of ranks. The host's sum goes straight to the owner of the piece, encoded once in the
// wire format (kernels/wire.h). The owner decodes what it receives and adds it in fp32, from
// 0 and in the order of hosts; the sum of its own host is rounded like the others.
//
// A ring would move as many bytes, but add in another order for every piece, and a narrow
// wire would round every partial sum. Here a value is rounded once per host, and the sum
// equals two plain loops' bit for bit, however the vector travels (exchange.h).
//
// After an all-gather all ranks have the same bits: the owner, too, keeps its values as
// the wire has rounded them. Formats that are too coarse for parameters themselves carry
// the difference to a vector that all ranks have already (base). What rounding loses is
// then part of the next difference.
#pragma once

#include <assert.h>

#include "comm/layout.h"
#include "kernels/wire.h"

// Blocks of a coarse format are never cut by a message.
static_assert((int)LAYOUT_BLOCK % (int)WIRE_BLOCK == 0, "messages hold whole blocks of every wire format");

typedef enum CollectiveKind { REDUCE_SCATTER, ALL_GATHER } CollectiveKind;

static inline const char *collective_name(CollectiveKind kind) {
    return kind == REDUCE_SCATTER ? "reduce-scatter" : "all-gather";
}

typedef struct Collective {
    const Layout *layout;
    size_t first, end; // cells of the layout: one bucket, or the whole vector
    WireFormat wire;
    float *buffer; // (padded): the vector
    // For an all-gather only:
    const float *source; // (shard): this rank's own elements, which it sends; NULL: they are in `buffer`
    const float *base;   // (padded), the same on all ranks: differences to it travel. NULL: values
                         // themselves do. May be `buffer`
} Collective;

// What this rank sends in an all-gather, of a stretch of its own elements.
static inline const float *collective_source(const Collective *collective, const LayoutRange *range) {
    return collective->source != NULL ? collective->source + range->own : collective->buffer + range->flat;
}

// The base from flat element `flat` on; NULL: there is none.
static inline const float *collective_base(const Collective *collective, size_t flat) {
    return collective->base != NULL ? collective->base + flat : NULL;
}
