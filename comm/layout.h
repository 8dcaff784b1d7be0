// layout.h: which rank owns which element of a vector that all ranks reduce and gather.
//
// The vector is cut into cells, a cell into at most one piece for each rank, and piece r
// belongs to rank r. What a rank owns, its pieces one behind the other, is its shard.
//
//            cell 0         cell 1         cell 2
//   flat    | r0 | r1 | r2 | r0 | r1 | r2 | r0 | r1 | r2 |     3 ranks, 3 cells
//                 ----           ----           ----
//   own           | 0 |          | 1 |          | 2 |          the shard of rank 1
//
// `flat` counts elements of the vector, padded to whole cells; `own` counts a shard's elements.
//
// Every range of cells, such as a bucket, is shared out evenly: so all ranks are busy with the last
// layers' gradients while others are still computed. Pieces are all equal (layout_make), unless an
// optimizer needs whole matrices (layout_make_whole): then a piece is a run of matrices with the
// vectors between them, and what is not a matrix fills up the shards, so that all are about as
// long.
#pragma once

#include "runtime/errors.h"
#include "runtime/numbers.h"

// About this many cells. Pieces are whole pairs of cache lines; if they are long enough,
// whole blocks of the coarse wire formats (WIRE_BLOCK).
enum { LAYOUT_CELLS = 128, LAYOUT_LINE = 32, LAYOUT_BLOCK = 256 };

// A stretch of one rank's elements that is contiguous in its shard and in the flat vector.
typedef struct LayoutRange {
    size_t own, flat, count;
} LayoutRange;

typedef struct Layout {
    size_t count; // elements of the vector, without padding
    int size;     // ranks, and pieces of a cell
    size_t piece; // elements of a piece; 0: they differ, and begin at multiples of LAYOUT_BLOCK in a shard
    size_t cells;
    // Where pieces differ; otherwise NULL. Freed by layout_free.
    size_t *begins;      // (cells + 1): of each cell in the flat vector
    LayoutRange *pieces; // (cells + 1, size); the last row says where shards end
    bool pairs;          // begins and pieces count bf16 elements: two fill one float of this vector
} Layout;

static inline size_t layout_round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

static inline Layout layout_make(size_t count, int size) {
    Layout layout = {.count = count, .size = size};
    size_t cell_limit = (size_t)size * LAYOUT_CELLS;
    size_t piece = (count + cell_limit - 1) / cell_limit;
    layout.piece = layout_round_up(piece > 0 ? piece : 1, piece >= LAYOUT_BLOCK ? LAYOUT_BLOCK : LAYOUT_LINE);
    size_t cell = layout.piece * (size_t)size;
    layout.cells = (count + cell - 1) / cell;
    return layout;
}

// First flat element of a cell. For cell `cells`, behind the last one: the padded length.
static inline size_t layout_cell_begin(const Layout *layout, size_t cell) {
    return layout->begins == NULL ? cell * layout->piece * (size_t)layout->size
                                  : layout->begins[cell] >> layout->pairs;
}

// The piece of `rank` in a cell; of cell `cells`: where its shard ends.
static inline LayoutRange layout_piece(const Layout *layout, size_t cell, int rank) {
    size_t flat = layout_cell_begin(layout, cell) + (size_t)rank * layout->piece;
    LayoutRange range = {.own = cell * layout->piece, .flat = flat, .count = layout->piece};
    if (layout->pieces != NULL) {
        range = layout->pieces[cell * (size_t)layout->size + rank];
        range.own >>= layout->pairs;
        range.flat >>= layout->pairs;
        range.count >>= layout->pairs;
    }
    return range;
}

// Elements of the longest shard in the cells [begin, end), gaps and padding included.
static inline size_t layout_most(const Layout *layout, size_t begin, size_t end) {
    size_t most = 0;
    for (int rank = 0; rank < layout->size; rank++) {
        most = size_max(most, layout_piece(layout, end, rank).own - layout_piece(layout, begin, rank).own);
    }
    return most;
}

// Elements of a whole shard, and of the padded vector.
static inline size_t layout_shard(const Layout *layout) { return layout_most(layout, 0, layout->cells); }
static inline size_t layout_padded(const Layout *layout) { return layout_cell_begin(layout, layout->cells); }

static inline size_t layout_cell_with(const Layout *layout, size_t flat) {
    if (layout->begins == NULL) { return flat / layout_cell_begin(layout, 1); }
    size_t cell = 0;
    while (layout_cell_begin(layout, cell + 1) <= flat) { cell++; }
    return cell;
}

// Steps through a rank's own elements up to `end`, stretch by stretch; `range` begins as {.own =
// the first}. Returns false behind the last one.
static inline bool layout_next(const Layout *layout, int rank, size_t end, LayoutRange *range) {
    size_t own = range->own + range->count;
    end = size_min(end, layout_piece(layout, layout->cells, rank).own);
    if (own >= end) { return false; }
    size_t cell = layout->piece > 0 ? own / layout->piece : 0, last = layout->cells;
    while (layout->piece == 0 && last - cell > 1) { // finds the last piece that begins at `own` or before
        size_t middle = (cell + last) / 2;
        bool is_behind = layout_piece(layout, middle, rank).own > own;
        cell = is_behind ? cell : middle;
        last = is_behind ? middle : last;
    }
    LayoutRange piece = layout_piece(layout, cell, rank);
    while (own >= piece.own + piece.count) { // a gap
        piece = layout_piece(layout, ++cell, rank);
        own = size_max(own, piece.own);
        if (own >= end) { return false; }
    }
    range->own = own;
    range->flat = piece.flat + (own - piece.own);
    range->count = size_min(piece.own + piece.count, end) - own;
    return true;
}

// ---- Whole matrices -------------------------------------------------------------------

// Elements [begin, end) of the vector, which one rank must own.
typedef struct LayoutMatrix {
    size_t begin, end;
} LayoutMatrix;

typedef struct LayoutBuilder {
    Layout layout;
    size_t room;   // cells
    size_t *ends;  // (size): of the shards
    double *share; // (size): of what is no matrix
    double shared; // their sum
    bool open;     // the last cell may grow
} LayoutBuilder;

static inline void layout_open_cell(LayoutBuilder *builder, size_t flat) {
    Layout *layout = &builder->layout;
    size_t size = (size_t)layout->size;
    if (layout->cells + 2 > builder->room) {
        builder->room = 2 * builder->room + 64;
        layout->begins = (size_t *)memory_grow(layout->begins, builder->room * sizeof *layout->begins);
        layout->pieces =
            (LayoutRange *)memory_grow(layout->pieces, builder->room * size * sizeof *layout->pieces);
    }
    layout->begins[layout->cells] = flat;
    for (size_t rank = 0; rank < size; rank++) {
        LayoutRange empty = {.own = builder->ends[rank], .flat = flat, .count = 0};
        layout->pieces[layout->cells * size + rank] = empty;
    }
}

// Gives [begin, end) to a rank: in its piece of the last cell, or in a new cell.
static inline void layout_give(LayoutBuilder *builder, int rank, size_t begin, size_t end) {
    Layout *layout = &builder->layout;
    size_t size = (size_t)layout->size;
    LayoutRange *piece = builder->open ? &layout->pieces[(layout->cells - 1) * size + (size_t)rank] : NULL;
    if (piece == NULL || (piece->count > 0 && piece->flat + piece->count != begin)) {
        layout_open_cell(builder, begin);
        piece = &layout->pieces[layout->cells++ * size + (size_t)rank];
    }
    builder->open = true;
    if (piece->count == 0) { piece->flat = begin; }
    piece->count = end - piece->flat;
    builder->ends[rank] = layout_round_up(piece->own + piece->count, LAYOUT_BLOCK);
}

// Shares [begin, end), which holds no matrix, out among the ranks: cells of about the usual
// length, whose pieces are as long as the ranks' shares.
static inline void layout_share_out(LayoutBuilder *builder, size_t begin, size_t end) {
    size_t count = end - begin, least = (size_t)builder->layout.size * LAYOUT_LINE; // of a cell
    size_t cells = size_max(1, size_min(count * LAYOUT_CELLS / builder->layout.count, count / least));
    for (size_t cell = 0, first = begin, last; cell < cells; cell++, first = last) {
        size_t whole = count * (cell + 1) / cells / LAYOUT_LINE * LAYOUT_LINE, from = first;
        last = cell + 1 == cells ? end : begin + whole;
        size_t unit =
            (last - first) / (size_t)builder->layout.size >= LAYOUT_BLOCK ? LAYOUT_BLOCK : LAYOUT_LINE;
        double before = 0;
        builder->open = false;
        for (int rank = 0; rank < builder->layout.size; rank++) {
            before += builder->share[rank];
            size_t to = first + (size_t)((double)(last - first) * before / builder->shared) / unit * unit;
            to = rank == builder->layout.size - 1 ? last : size_min(to, last);
            if (to > from) { layout_give(builder, rank, from, to); }
            from = to;
        }
    }
    builder->open = false;
}

// builder->share <- how much of `rest`, what is no matrix, each rank gets so that all shards are
// as equal as the matrices (loads) allow.
static inline void layout_level(LayoutBuilder *builder, const double *loads, double rest) {
    int size = builder->layout.size, active = 0;
    double level = INFINITY, before;
    do { // the ranks above the level get nothing, which lowers it for the others
        double sum = rest;
        before = level;
        active = 0;
        for (int rank = 0; rank < size; rank++) {
            if (loads[rank] < before) {
                sum += loads[rank];
                active++;
            }
        }
        level = sum / active;
    } while (level < before);
    for (int rank = 0; rank < size; rank++) {
        builder->share[rank] = loads[rank] < level ? level - loads[rank] : 0;
    }
    builder->shared = rest;
}

static inline size_t layout_length(const LayoutMatrix *matrix) { return matrix->end - matrix->begin; }

// Each matrix goes to the rank that owns least so far: neighbours of one length go to different
// ranks, so that every bucket keeps all of them busy. The longest matrices come first, because
// what is short levels the loads best. owners (matrix_count), loads (size) <- the result.
static inline void layout_choose_owners(const LayoutMatrix *matrices, int matrix_count, int size, int *owners,
                                        double *loads) {
    for (int i = 0; i < matrix_count; i++) { owners[i] = -1; }
    for (int given = 0; given < matrix_count; given++) {
        int longest = -1, least = 0;
        for (int i = 0; i < matrix_count; i++) {
            bool longer = longest < 0 || layout_length(&matrices[i]) > layout_length(&matrices[longest]);
            if (owners[i] < 0 && longer) { longest = i; }
        }
        for (int rank = 1; rank < size; rank++) { least = loads[rank] < loads[least] ? rank : least; }
        owners[longest] = least;
        loads[least] += (double)layout_length(&matrices[longest]);
    }
}

// Matrices (matrix_count) ascend. The vectors between two matrices go with the one before.
static inline Layout layout_make_whole(size_t count, int size, const LayoutMatrix *matrices,
                                       int matrix_count) {
    if (size == 1 || matrix_count == 0) { return layout_make(count, size); }
    LayoutBuilder builder = {.layout = {.count = count, .size = size}};
    builder.ends = MEMORY_OF(size_t, size);
    builder.share = MEMORY_OF(double, size);
    double *loads = MEMORY_OF(double, size), rest = 0;
    int *owners = MEMORY_OF(int, (size_t)matrix_count + 1);
    size_t little = count / LAYOUT_CELLS;
    layout_choose_owners(matrices, matrix_count, size, owners, loads);
    for (int i = 0; i <= matrix_count; i++) {
        size_t begin = i > 0 ? matrices[i - 1].end : 0, end = i < matrix_count ? matrices[i].begin : count;
        if (end - begin > little) { rest += (double)(end - begin); }
    }
    layout_level(&builder, loads, rest);
    for (int i = 0; i <= matrix_count; i++) {
        size_t begin = i > 0 ? matrices[i - 1].end : 0, end = i < matrix_count ? matrices[i].begin : count;
        if (end - begin > little) {
            layout_share_out(&builder, begin, end);
        } else if (end > begin) {
            layout_give(&builder, owners[i > 0 ? i - 1 : 0], begin, end);
        }
        if (i < matrix_count) { layout_give(&builder, owners[i], matrices[i].begin, matrices[i].end); }
    }
    layout_open_cell(&builder, layout_round_up(count, LAYOUT_LINE)); // the end
    free(builder.ends);
    free(builder.share);
    free(loads);
    free(owners);
    return builder.layout;
}

static inline void layout_free(Layout *layout) {
    free(layout->begins);
    free(layout->pieces);
    memset(layout, 0, sizeof *layout);
}
