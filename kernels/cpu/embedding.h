// embedding.h: token embedding plus position embedding, and the gradients of both tables.
//
//   forward    output[b][t] = wte[tokens[b][t]] + wpe[t], if there is a wpe
//   backward   d_wte[tokens[b][t]] += d_output[b][t];  d_wpe[t] += d_output[b][t]
//
// output, d_output (B, T, C); wte (V, C); wpe (positions, C); tokens (B, T). In backward several
// positions may add to the same row of d_wte: each task owns a strip of columns and visits all
// positions in order, so there are no races, and the same sums for any number of threads.
#pragma once

#include "kernels/cpu/reals.h"
#include "kernels/cpu/row_blocks.h"

enum {
    EMBEDDING_STRIP = 64,  // columns of one task: four cache lines
    EMBEDDING_SEGMENT = 64 // see embedding.cuh
};

typedef struct Embedding {
    Real *output;          // forward (B, T, C)
    const Real *wte, *wpe; // forward (V, C), (positions, C) or NULL
    float *d_wte, *d_wpe;  // backward; one of them may be NULL
    float *partials;       // backward on a GPU (embedding_partials_floats)
    const Real *d_output;  // backward (B, T, C)
    const int32_t *tokens; // (B, T)
    const int32_t *order;  // backward on a GPU (B, T): embedding_order
    int B, T, channels;
    Precision precision;
} Embedding;

REAL_LOOP void embedding_forward_rows(const Embedding *work, int block, Precision precision) {
    size_t C = (size_t)work->channels;
    int rows = work->B * work->T;
    for (int row = row_block_begin(block, rows); row < row_block_begin(block + 1, rows); row++) {
        const Real *token = real_at_const(work->wte, (size_t)work->tokens[row] * C, precision);
        Real *output = real_at(work->output, (size_t)row * C, precision);
        if (work->wpe == NULL) {
            memcpy((void *)output, (const void *)token, C * precision_bytes(precision));
            continue;
        }
        const Real *position = real_at_const(work->wpe, (size_t)(row % work->T) * C, precision);
        for (size_t c = 0; c < C; c++) {
            float sum = real_load(token, c, precision) + real_load(position, c, precision);
            real_store(output, c, sum, precision);
        }
    }
}

REAL_KERNEL(cpu_embedding_forward, Embedding, precision, embedding_forward_rows,
            row_block_count(work->B * work->T))

REAL_LOOP void embedding_backward_strip(const Embedding *work, int strip, Precision precision) {
    size_t C = (size_t)work->channels, begin = (size_t)strip * EMBEDDING_STRIP,
           end = size_min(begin + EMBEDDING_STRIP, C);
    for (int row = 0; row < work->B * work->T; row++) {
        float *tables[2] = {work->d_wte, work->d_wpe};
        size_t places[2] = {(size_t)work->tokens[row] * C, (size_t)(row % work->T) * C};
        const Real *d_output = real_at_const(work->d_output, (size_t)row * C, precision);
        for (int i = 0; i < 2; i++) {
            float *sums = tables[i] != NULL ? tables[i] + places[i] : NULL;
            for (size_t c = begin; c < end && sums != NULL; c++) {
                sums[c] += real_load(d_output, c, precision);
            }
        }
    }
}

REAL_KERNEL(cpu_embedding_backward, Embedding, precision, embedding_backward_strip,
            (work->channels + EMBEDDING_STRIP - 1) / EMBEDDING_STRIP)

// Floats of partials for embedding_backward, on a GPU: each segment has a sum for the
// range that it continues, and one for the range that the next segment continues.
static inline size_t embedding_partials_floats(int rows, int C) {
    return ((size_t)rows + EMBEDDING_SEGMENT - 1) / EMBEDDING_SEGMENT * 2 * (size_t)C;
}

// order (rows) = the indices of tokens (rows), sorted by token, equal tokens by index: the order in
// which a GPU sums the gradient of wte. A counting sort; counts (V + 1) is workspace.
static inline void embedding_order(int32_t *order, int32_t *counts, const int32_t *tokens, int rows, int V) {
    memset(counts, 0, ((size_t)V + 1) * sizeof *counts);
    for (int row = 0; row < rows; row++) { counts[tokens[row] + 1]++; }
    for (int token = 0; token < V; token++) { counts[token + 1] += counts[token]; }
    for (int row = 0; row < rows; row++) { order[counts[tokens[row]]++] = row; }
}
