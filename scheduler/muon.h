// muon.h: one step of Muon (Jordan et al., 2024) on one matrix W (rows, columns), with the scale
// of Moonlight (arXiv 2502.16982).
//
//   m = mu m + (1 - mu) g             the momentum; g is the mean over micro-batches, clipped
//   X = (1 - mu) g + mu m             Nesterov
//   X = X / max(|X|, 1e-7)            the Frobenius norm
//   `iterations` times:
//       A = X X'                      of a tall matrix A = X' X, and below X P for P X
//       P = a I + b A + c A A         (a, b, c) = (3.4445, -4.7750, 2.0315)
//       X = P X
//   W = W - learning rate (0.2 sqrt(max(rows, columns)) X + weight decay W)
//
// The iterations (Newton and Schulz) take every singular value of X to about 1: the step is as long
// in directions that gradients seldom have as in those that they always have. Such an X has a mean
// square of 1 / max(rows, columns), and 0.2 is the root mean square of AdamW's steps, so a learning
// rate that suits AdamW suits Muon. The whole matrix must be here (layout_make_whole).
//
// A GPU takes equal matrices together, since the products of a small one do not fill it: the four
// (C, C) of a layer have as many elements as the (4C, C) for which the workspace is there anyway.
// The library chooses for a full batch, however many there are: so a matrix always has the same
// bits.
#pragma once

#include "kernels/kernels.h"
#include "runtime/memory.h"

enum { MUON_TOGETHER = 4 }; // matrices in a batch, at most

// Workspace for matrices of at most `count` elements whose shorter side is at most `side`.
typedef struct MuonWorkspace {
    size_t count, side;
    int together;              // matrices in a batch, at most
    Real *x, *next;            // (count) each, in the stream's precision
    Real *square, *polynomial; // (together, side, side) each, the same
    double *partials;          // (buffer_blocks(count))
    void *gemm;                // gemm_workspace_bytes, for a stream that has no products of its own
} MuonWorkspace;

static inline void muon_reserve(MuonWorkspace *workspace, Arena *arena, Precision precision) {
    size_t element = precision_bytes(precision), whole = workspace->count * element;
    workspace->together = arena->on_gpu ? MUON_TOGETHER : 1;
    size_t square = (size_t)workspace->together * workspace->side * workspace->side * element;
    size_t partials = buffer_blocks(workspace->count) * sizeof(double);
    size_t products = gemm_workspace_bytes(arena->on_gpu, precision, 1);
    const MemoryClass W = MEMORY_WORKSPACE;
    const ArenaRow rows[] = {
        {W, "Muon: direction", whole, &workspace->x},
        {W, "Muon: next direction", whole, &workspace->next},
        {W, "Muon: square", square, &workspace->square},
        {W, "Muon: polynomial", square, &workspace->polynomial},
        {W, "Muon: partial sums", partials, &workspace->partials},
        {W, "Muon: products", products, &workspace->gemm},
    };
    arena_reserve_rows(arena, rows, sizeof rows / sizeof rows[0], false);
}

static inline double muon_flops(int rows, int columns, int iterations) {
    double m = rows < columns ? rows : columns, n = rows < columns ? columns : rows;
    return iterations * (4 * m * m * n + 2 * m * m * m);
}

typedef struct MuonBatch { // matrices of one shape
    int rows, columns, count;
    StepRange ranges[MUON_TOGETHER]; // (count): all but what only Muon has
} MuonBatch;

// How many matrices of `elements` elements a full batch has.
static inline int muon_most(const MuonWorkspace *workspace, size_t elements) {
    return (int)size_min((size_t)workspace->together, workspace->count / elements);
}

// Steps the matrices of the batch, and empties it.
static inline void muon_step(Stream *stream, const MuonWorkspace *workspace, MuonBatch *batch,
                             int iterations) {
    int rows = batch->rows, columns = batch->columns, count = batch->count;
    bool tall = rows > columns;
    int side = tall ? columns : rows, longer = tall ? rows : columns;
    size_t elements = (size_t)rows * columns;
    int most = muon_most(workspace, elements);
    Real *x = workspace->x, *next = workspace->next;
    Real *square = workspace->square, *polynomial = workspace->polynomial;
    for (int i = 0; i < count; i++) {
        StepRange *range = &batch->ranges[i];
        range->step.learning_rate *= 0.2f * sqrtf((float)longer);
        range->partials = workspace->partials;
        range->direction = real_at(x, (size_t)i * elements, stream->precision);
        range->precision = stream->precision;
        muon_norm(stream, range);
        muon_direction(stream, range);
    }
    for (int i = 0; i < iterations; i++) {
        matmul_products(stream, square, x, tall, x, !tall, side, side, longer, count, most);
        matmul_products(stream, polynomial, square, false, square, false, side, side, side, count, most);
        muon_polynomial(stream, polynomial, square, side, count);
        matmul_products(stream, next, tall ? x : polynomial, false, tall ? polynomial : x, false, rows,
                        columns, side, count, most);
        Real *taken = x;
        x = next;
        next = taken;
    }
    for (int i = 0; i < count; i++) {
        batch->ranges[i].direction = real_at(x, (size_t)i * elements, stream->precision);
        muon_apply(stream, &batch->ranges[i]);
    }
    batch->count = 0;
}

// Adds a matrix to the batch. It is stepped with the next of another shape, when the batch is
// full, or by muon_step.
static inline void muon_add(Stream *stream, const MuonWorkspace *workspace, MuonBatch *batch, StepRange range,
                            int rows, int columns, int iterations) {
    bool is_full = batch->count == muon_most(workspace, (size_t)rows * columns);
    if (batch->count > 0 && (is_full || batch->rows != rows || batch->columns != columns)) {
        muon_step(stream, workspace, batch, iterations);
    }
    batch->rows = rows;
    batch->columns = columns;
    batch->ranges[batch->count++] = range;
}
