// collective.h: what a reduce-scatter or an all-gather moves, and what both promise.
//
//                    every rank begins with   and ends with
//   reduce-scatter   a whole vector           its own elements of the sum over ranks
//   all-gather       its own elements         the whole vector
//
// layout.h says which rank owns what, groups.h which ranks share a host.
//
// The ranks of a host first add up each piece in fp32, from 0 and in the order of ranks. The sum
// goes straight to the piece's owner, encoded once in the wire format (kernels/wire.h). The owner
// decodes and adds in fp32, from 0 and in the order of hosts; its own host's sum is rounded, too.
// A ring would move as many bytes, but add in another order for every piece and round every partial
// sum. Here the sum equals two plain loops' bit for bit, however the vector travels (exchange.h).
//
// After an all-gather all ranks have the same bits: the owner, too, keeps what the wire has
// rounded. Formats that are too coarse for parameters carry the difference to a vector that all
// ranks have already (base), so that what rounding loses is part of the next difference.
// Sums can have the same: where a rank encodes a part of a sum, it keeps what rounding loses of it
// (unsent), and adds that to the part the next time (error feedback, as in 1-bit SGD).
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
    float *unsent; // (padded): what rounding has lost of the sums that this rank has encoded. NULL: it is
                   // dropped. In memory where messages are encoded; not used where there is a base
    // For an all-gather only:
    const float *source; // (shard): this rank's own elements, which it sends; NULL: they are in `buffer`
    const float *base;   // (padded), the same on all ranks: differences to it travel; may be `buffer`. NULL:
                         // values themselves do
} Collective;

// What this rank sends in an all-gather, of a stretch of its own elements.
static inline const float *collective_source(const Collective *collective, const LayoutRange *range) {
    return collective->source != NULL ? collective->source + range->own : collective->buffer + range->flat;
}

static inline const float *collective_base(const Collective *collective, size_t flat) {
    return collective->base != NULL ? collective->base + flat : NULL;
}
