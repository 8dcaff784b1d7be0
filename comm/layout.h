// layout.h: who owns which element of a vector that all ranks exchange.
//
// The vector is cut into cells of size * piece elements, and piece r of every cell
// belongs to rank r:
//
//   flat    | r0 | r1 | r2 | r0 | r1 | r2 | r0 | r1 | r2 |      3 ranks, 3 cells
//   own       of rank 1: pieces 1, 4, 7, one behind the other: shard = cells * piece elements
//
// So every stretch of whole cells is shared out evenly, and a bucket is a stretch of
// cells: rules that send the gradients of the last layers while the first ones are still
// being computed keep all ranks busy. The cut depends on the length and the number of
// ranks alone. Neither the size of a bucket nor that of a message moves an element to
// another owner, and no sum changes its order.
#ifndef ACCO_COMM_LAYOUT_H
#define ACCO_COMM_LAYOUT_H

#include <assert.h>
#include <stddef.h>

// At most this many cells; pieces are whole cache lines, and whole blocks of the coarse
// wire formats where they are long enough.
enum { LAYOUT_CELLS = 128, LAYOUT_LINE = 32, LAYOUT_BLOCK = 256 };

typedef struct Layout {
    size_t count; // elements of the vector
    int size;     // ranks
    size_t piece; // elements
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

static inline size_t layout_shard(const Layout *layout) { return layout->cells * layout->piece; }
static inline size_t layout_padded(const Layout *layout) {
    return layout_shard(layout) * (size_t)layout->size;
}

// First flat element of a cell; of cell `cells`: the padded length.
static inline size_t layout_cell_begin(const Layout *layout, size_t cell) {
    return cell * layout->piece * (size_t)layout->size;
}

// Where element `own` (0 .. shard - 1) of `rank` lies in the flat vector.
static inline size_t layout_flat(const Layout *layout, int rank, size_t own) {
    return layout_cell_begin(layout, own / layout->piece) + (size_t)rank * layout->piece +
           own % layout->piece;
}

// Elements from `own` to the end of its piece, but not beyond `end`: they lie side by
// side in the flat vector too.
static inline size_t layout_run(const Layout *layout, size_t own, size_t end) {
    size_t rest = layout->piece - own % layout->piece;
    assert(own < end);
    return end - own < rest ? end - own : rest;
}

#endif
