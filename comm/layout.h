// layout.h: which rank owns which element of a vector that all ranks reduce and gather.
//
// The vector is cut into cells, every cell into one piece for each rank, and piece r of
// every cell belongs to rank r. What a rank owns, its pieces one behind the other, is its
// shard.
//
//            cell 0         cell 1         cell 2
//   flat    | r0 | r1 | r2 | r0 | r1 | r2 | r0 | r1 | r2 |     3 ranks, 3 cells
//                 ----           ----           ----
//   own           | 0 |          | 1 |          | 2 |          the shard of rank 1
//
// `flat` counts elements of the whole vector, padded to whole cells; `own` counts
// elements of one rank's shard.
//
// Why cells: every range of whole cells is shared out evenly among the ranks. A bucket (the
// part of a vector that travels at a time) is such a range. So rules that send the gradients
// of the last layers while the first ones are still being computed keep all ranks busy.
//
// The cut depends on nothing but the length of the vector and the number of ranks.
// Neither the size of buckets nor that of messages moves an element to another owner or
// changes the order of a sum.
#ifndef ACCO_COMM_LAYOUT_H
#define ACCO_COMM_LAYOUT_H

#include <assert.h>
#include <stddef.h>

#include "runtime/numbers.h"

// At most this many cells. Pieces are whole pairs of cache lines; if they are long enough,
// whole blocks of the coarse wire formats (WIRE_BLOCK).
enum { LAYOUT_CELLS = 128, LAYOUT_LINE = 32, LAYOUT_BLOCK = 256 };

typedef struct Layout {
    size_t count; // elements of the vector, without padding
    int size;     // ranks, and pieces of a cell
    size_t piece; // elements of a piece
    size_t cells;
} Layout;

static inline size_t layout_round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

static inline Layout layout_make(size_t count, int size) {
    Layout layout;
    size_t cell_limit = (size_t)size * LAYOUT_CELLS;
    size_t piece = (count + cell_limit - 1) / cell_limit;
    layout.count = count;
    layout.size = size;
    layout.piece = layout_round_up(piece > 0 ? piece : 1, piece >= LAYOUT_BLOCK ? LAYOUT_BLOCK : LAYOUT_LINE);
    size_t cell = layout.piece * (size_t)size;
    layout.cells = (count + cell - 1) / cell;
    return layout;
}

// Elements of a shard: what each rank owns, padding included.
static inline size_t layout_shard(const Layout *layout) { return layout->cells * layout->piece; }

// Elements of the padded vector: all shards.
static inline size_t layout_padded(const Layout *layout) {
    return layout_shard(layout) * (size_t)layout->size;
}

// First flat element of a cell. For cell `cells`, behind the last one: the padded length.
static inline size_t layout_cell_begin(const Layout *layout, size_t cell) {
    return cell * layout->piece * (size_t)layout->size;
}

// Where element `own` (0 .. shard - 1) of `rank` lies in the flat vector.
static inline size_t layout_flat(const Layout *layout, int rank, size_t own) {
    return layout_cell_begin(layout, own / layout->piece) + (size_t)rank * layout->piece +
           own % layout->piece;
}

// How many elements from `own` on are contiguous in the flat vector too: those to the end of
// its piece, but not beyond `end` (> own).
static inline size_t layout_range(const Layout *layout, size_t own, size_t end) {
    size_t rest = layout->piece - own % layout->piece;
    assert(own < end);
    return size_min(end - own, rest);
}

// The layout of a vector of words of 32 bits, each of which holds two bf16 elements of this
// one. Pieces are even.
static inline Layout layout_of_pairs(const Layout *layout) {
    Layout pairs = *layout;
    pairs.count = (layout->count + 1) / 2;
    pairs.piece = layout->piece / 2;
    return pairs;
}

#endif
