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
// The iterations (Newton and Schulz) take every singular value of X to about 1: the step is as
// long in the directions that gradients seldom have as in those that they always have. Such an
// X has a mean square of 1 / max(rows, columns), and 0.2 is the root mean square of AdamW's
// steps, so a learning rate that suits AdamW suits Muon.
//
// The whole matrix must be here (layout_make_whole). Its momentum is the only state. The
// products take 5 (4 m m n + 2 m m m) operations for m <= n, and nearly all of the time.
#ifndef ACCO_MUON_H
#define ACCO_MUON_H

#include "kernels/kernels.h"
#include "runtime/memory.h"

// Workspace for matrices of at most `count` elements whose shorter side is at most `side`.
typedef struct MuonWorkspace {
    size_t count, side;
    Real *x, *next;            // (count) each, in the stream's precision
    Real *square, *polynomial; // (side, side) each, the same
    double *partials;          // (buffer_blocks(count))
    void *gemm;                // GEMM_WORKSPACE_BYTES, for a GPU's stream that has no products of its own
} MuonWorkspace;

static inline void muon_reserve(MuonWorkspace *workspace, Arena *arena, Precision precision) {
    size_t element = precision_bytes(precision), whole = workspace->count * element;
    size_t square = workspace->side * workspace->side * element;
    arena_reserve(arena, MEMORY_WORKSPACE, "Muon: direction", whole, &workspace->x);
    arena_reserve(arena, MEMORY_WORKSPACE, "Muon: next direction", whole, &workspace->next);
    arena_reserve(arena, MEMORY_WORKSPACE, "Muon: square", square, &workspace->square);
    arena_reserve(arena, MEMORY_WORKSPACE, "Muon: polynomial", square, &workspace->polynomial);
    arena_reserve(arena, MEMORY_WORKSPACE, "Muon: partial sums",
                  buffer_blocks(workspace->count) * sizeof(double), &workspace->partials);
    if (arena->on_gpu) {
        arena_reserve(arena, MEMORY_WORKSPACE, "Muon: products", GEMM_WORKSPACE_BYTES, &workspace->gemm);
    }
}

static inline double muon_flops(int rows, int columns, int iterations) {
    double m = rows < columns ? rows : columns, n = rows < columns ? columns : rows;
    return iterations * (4 * m * m * n + 2 * m * m * m);
}

// Steps a matrix. range: all but what only Muon has.
static inline void muon_step(Stream *stream, const MuonWorkspace *workspace, StepRange range, int rows,
                             int columns, int iterations) {
    bool tall = rows > columns;
    int side = tall ? columns : rows, longer = tall ? rows : columns;
    Real *x = workspace->x, *next = workspace->next;
    Real *square = workspace->square, *polynomial = workspace->polynomial;
    range.step.learning_rate *= 0.2f * sqrtf((float)longer);
    range.partials = workspace->partials;
    range.direction = x;
    range.precision = stream->precision;
    muon_norm(stream, &range);
    muon_direction(stream, &range);
    for (int i = 0; i < iterations; i++) {
        matmul_product(stream, square, x, tall, x, !tall, side, side, longer);
        matmul_product(stream, polynomial, square, false, square, false, side, side, side);
        muon_polynomial(stream, polynomial, square, side);
        if (tall) {
            matmul_product(stream, next, x, false, polynomial, false, rows, columns, columns);
        } else {
            matmul_product(stream, next, polynomial, false, x, false, rows, columns, rows);
        }
        Real *taken = x;
        x = next;
        next = taken;
    }
    range.direction = x;
    muon_apply(stream, &range);
}

#endif
