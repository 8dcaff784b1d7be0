// rotary.h: turns the heads of queries and keys by their positions, after a norm of each head where
// a family has one.
//
// For each head x (D) of a row at position t, with halves x1 and x2 and angles a (D/2) of t:
//
//   forward    x = n weight, n = x / sqrt(mean(x²) + epsilon)      where there is a weight
//              x1, x2 = scale (x1 cos(a) - x2 sin(a)), scale (x2 cos(a) + x1 sin(a))
//   backward   the gradient is turned by -a, then
//              d_x = (g - n mean(g n)) / sqrt(mean(x²) + epsilon), g = d weight;  d_weight += sum of d n
//
// A row of values begins with H heads of queries and KV heads of keys. scale is that of attention's
// scores; for keys it is 1. The limit is memory. Tasks and the sums over rows: row_blocks.h.
#pragma once

#include "kernels/cpu/row_blocks.h"
#include "kernels/cpu/vector_math.h"

typedef struct Rotary {
    Real *values;           // (rows, (H + KV) D), rows `stride` apart: heads; backward: their gradients
    Real *saved;            // (rows, (H + KV) D) with weights: heads before their norm; forward writes it
    const float *turns;     // (T, D): cos(a), then sin(a)
    const Real *weights[2]; // (D) of queries and of keys, or NULL
    float *d_weights[2];    // backward, with weights
    float *partials;        // backward, with weights (row_partials_floats(2 D))
    int rows, T, heads, kv_heads, head_size, stride;
    float scale, epsilon;
    bool backward;
    Precision precision;
} Rotary;

REAL_LOOP void rotary_turn(Real *x, const float *turns, int half, float scale, bool back,
                           Precision precision) {
#pragma omp simd
    for (size_t i = 0; i < (size_t)half; i++) {
        float a = real_load(x, i, precision), b = real_load(x, i + (size_t)half, precision),
              cosine = scale * turns[i],
              sine = scale * (back ? -turns[i + (size_t)half] : turns[i + (size_t)half]);
        real_store(x, i, a * cosine - b * sine, precision);
        real_store(x, i + (size_t)half, b * cosine + a * sine, precision);
    }
}

// The norm of one head (D) and, with d_weight, back through it.
REAL_LOOP void rotary_norm(Real *values, Real *saved, const Real *weight, float *d_weight, size_t D,
                           float epsilon, Precision precision) {
    float squares[SUM_LANES] = {0}, products[SUM_LANES] = {0};
    if (d_weight == NULL) { memcpy((void *)saved, (void *)values, D * precision_bytes(precision)); }
    LANE_LOOP(i, lane, D, {
        float x = real_load(saved, i, precision);
        squares[lane] = multiply_add(x, x, squares[lane]);
    });
    float scale = 1.0f / sqrtf(lanes_sum(squares) / (float)D + epsilon);
    if (d_weight == NULL) {
        for (size_t i = 0; i < D; i++) {
            real_store(values, i, real_load(saved, i, precision) * scale * real_load(weight, i, precision),
                       precision);
        }
        return;
    }
    LANE_LOOP(i, lane, D, {
        float d = real_load(values, i, precision), n = real_load(saved, i, precision) * scale;
        products[lane] = multiply_add(d * real_load(weight, i, precision), n, products[lane]);
        d_weight[i] = multiply_add(d, n, d_weight[i]);
    });
    float mean = lanes_sum(products) / (float)D;
    for (size_t i = 0; i < D; i++) {
        float g = real_load(values, i, precision) * real_load(weight, i, precision);
        real_store(values, i, scale * (g - real_load(saved, i, precision) * scale * mean), precision);
    }
}

REAL_LOOP void rotary_rows(const Rotary *work, int block, Precision precision) {
    int D = work->head_size, heads = work->heads + work->kv_heads;
    bool normed = work->weights[0] != NULL, back = work->backward;
    float *sums = work->partials + (size_t)block * 2 * D;
    if (normed && back) { memset(sums, 0, 2 * (size_t)D * sizeof *sums); }
    for (int row = row_block_begin(block, work->rows); row < row_block_begin(block + 1, work->rows); row++) {
        const float *turns = work->turns + (size_t)(row % work->T) * (size_t)D;
        for (int h = 0; h < heads; h++) {
            size_t key = h < work->heads ? 0 : 1, place = (size_t)row * heads + h;
            Real *x = real_at(work->values, (size_t)row * work->stride + (h * D), precision),
                 *saved = normed ? real_at(work->saved, place * (size_t)D, precision) : NULL;
            float scale = key ? 1.0f : work->scale;
            if (back) { rotary_turn(x, turns, D / 2, scale, true, precision); }
            if (normed) {
                rotary_norm(x, saved, work->weights[key], back ? sums + key * (size_t)D : NULL, (size_t)D,
                            work->epsilon, precision);
            }
            if (!back) { rotary_turn(x, turns, D / 2, scale, false, precision); }
        }
    }
}

REAL_KERNEL(rotary_blocks, Rotary, precision, rotary_rows, row_block_count(work->rows))

static inline void cpu_rotary(Stream *stream, const Rotary *work) {
    int blocks = row_block_count(work->rows), D = work->head_size;
    rotary_blocks(stream, work);
    for (int key = 0; key < 2 && work->backward && work->weights[0] != NULL; key++) {
        column_sums_add(stream, work->d_weights[key], work->partials + key * D, blocks, 2 * D, D);
    }
}
