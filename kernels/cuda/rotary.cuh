// rotary.cuh: turns heads by their positions, after a norm of each head, on a GPU.
//
// Computes what kernels/cpu/rotary.h defines, but rounds once: not between norm and turn.
//
// Layout: a group of 1, 2, 4, ... or 32 lanes works on a head, each on COUNT Pieces of its first
// half and on the same of its second. Blocks have queries (blockIdx.y 0) or keys (1), so that the
// weights stay in registers, and take the heads of their rows one behind the other. Where
// gradients of weights are summed, there are at most CUDA_ROW_BLOCKS blocks (column_sums.cuh): a
// thread sums over the heads of its group, then the block over its groups in order.
#pragma once

#include "kernels/cpu/rotary.h"
#include "kernels/cuda/column_sums.cuh"

enum { ROTARY_THREADS = 256, ROTARY_ROWS = 8, ROTARY_COUNT = 4 /* Pieces of one element */ };

// A thread's columns: piece i begins with column first + i step of the first half, piece COUNT + i
// with the same of the second, and they exist if that is below `half` and there is a head.
struct RotaryColumns {
    int first, step, half;
    bool valid;
};

// x is 0 where there is nothing.
template <typename R, int WIDTH, int COUNT>
DEVICE void rotary_load(float x[2 * COUNT * WIDTH], const R *head, const RotaryColumns &columns) {
    UNROLL
    for (int i = 0; i < 2 * COUNT; i++) {
        int c = columns.first + i % COUNT * columns.step;
        bool there = columns.valid && c < columns.half;
        Piece<R, WIDTH> piece;
        if (there) { piece = piece_load<WIDTH>(head + i / COUNT * columns.half + c); }
        piece_unpack(x + i * WIDTH, piece);
        UNROLL
        for (int k = i * WIDTH; k < (i + 1) * WIDTH; k++) { x[k] = there ? x[k] : 0.0f; }
    }
}

template <typename R, int WIDTH, int COUNT>
DEVICE void rotary_store(R *head, const float x[2 * COUNT * WIDTH], const RotaryColumns &columns) {
    UNROLL
    for (int i = 0; i < 2 * COUNT; i++) {
        int c = columns.first + i % COUNT * columns.step;
        Piece<R, WIDTH> piece;
        piece_pack(piece, x + i * WIDTH);
        if (columns.valid && c < columns.half) {
            piece_store<WIDTH>(head + i / COUNT * columns.half + c, piece);
        }
    }
}

// turns (D): of the position.
template <int WIDTH, int COUNT>
DEVICE void rotary_turn_pieces(float x[2 * COUNT * WIDTH], const float *turns, const RotaryColumns &columns,
                               float scale, bool back) {
    constexpr int STEP = WIDTH < 4 ? 1 : 4;
    UNROLL
    for (int k = 0; k < COUNT * WIDTH; k += STEP) {
        int c = columns.first + k / WIDTH * columns.step + k % WIDTH;
        if (!columns.valid || c >= columns.half) { break; }
        Piece<float, STEP> cosines = piece_load<STEP>(turns + c),
                           sines = piece_load<STEP>(turns + columns.half + c);
        UNROLL
        for (int j = 0; j < STEP; j++) {
            float a = x[k + j], b = x[COUNT * WIDTH + k + j], cosine = scale * cosines.values[j],
                  sine = scale * (back ? -sines.values[j] : sines.values[j]);
            x[k + j] = a * cosine - b * sine;
            x[COUNT * WIDTH + k + j] = b * cosine + a * sine;
        }
    }
}

// The norm of a head, forward in x and, with its input `before`, back to its gradient. sums +=
// the head's part of the gradient of the weight.
template <int N, bool BACKWARD>
DEVICE void rotary_norm_head(float x[N], const float before[N], const float weights[N], float sums[N],
                             const Rotary &work, int group, bool valid) {
    float totals[2] = {}, D = (float)work.head_size;
    auto group_sum = [group](float value) {
        for (int lanes = group / 2; lanes > 0; lanes /= 2) {
            value += __shfl_xor_sync(0xffffffffu, value, lanes);
        }
        return value;
    };
    UNROLL
    for (int k = 0; k < N; k++) { totals[0] += BACKWARD ? before[k] * before[k] : x[k] * x[k]; }
    float scale = 1.0f / sqrtf(group_sum(totals[0]) / D + work.epsilon);
    if constexpr (!BACKWARD) {
        UNROLL
        for (int k = 0; k < N; k++) { x[k] = x[k] * scale * weights[k]; }
    } else {
        UNROLL
        for (int k = 0; k < N; k++) {
            totals[1] += x[k] * weights[k] * (before[k] * scale);
            if (valid) { sums[k] += x[k] * (before[k] * scale); }
        }
        float mean = group_sum(totals[1]) / D;
        UNROLL
        for (int k = 0; k < N; k++) { x[k] = scale * (x[k] * weights[k] - before[k] * scale * mean); }
    }
}

// partials (D) = the sums of the block's groups. shared (groups, D).
template <int WIDTH, int COUNT>
DEVICE void rotary_sums_store(const float sums[2 * COUNT * WIDTH], const RotaryColumns &columns,
                              float *partials, float *shared, int group, int D) {
    int groups = (int)blockDim.x / group;
    rotary_store<float, WIDTH, COUNT>(shared + (int)threadIdx.x / group * D, sums, columns);
    __syncthreads();
    for (int i = (int)threadIdx.x; i < D; i += (int)blockDim.x) {
        float sum = shared[i];
        for (int other = 1; other < groups; other++) { sum += shared[other * D + i]; }
        partials[i] = sum;
    }
}

template <typename R, int WIDTH, int COUNT, bool NORMED, bool BACKWARD>
static __global__ void __launch_bounds__(ROTARY_THREADS) rotary_kernel(Rotary work, int group) {
    constexpr int N = 2 * COUNT * WIDTH;
    bool keys = blockIdx.y > 0;
    int D = work.head_size, heads = keys ? work.kv_heads : work.heads, block = (int)blockIdx.x,
        begin = cuda_row_begin(block, (int)gridDim.x, work.rows),
        count = (cuda_row_begin(block + 1, (int)gridDim.x, work.rows) - begin) * heads;
    RotaryColumns columns = {(int)threadIdx.x % group * WIDTH, group * WIDTH, D / 2, true};
    float x[N], before[N], weights[N], sums[N] = {};
    if (NORMED) {
        const Real *weight = keys ? work.weights[1] : work.weights[0];
        rotary_load<R, WIDTH, COUNT>(weights, reals<R>(weight), columns);
    }
    for (int first = 0; first < count; first += (int)blockDim.x / group) {
        int i = first + (int)threadIdx.x / group, row = begin + i / heads,
            head = i % heads + (keys ? work.heads : 0);
        columns.valid = i < count; // all lanes of a warp take part in sums
        R *place = reals<R>(work.values) + (size_t)row * work.stride + head * D,
          *saved = reals<R>(work.saved) + ((size_t)row * (work.heads + work.kv_heads) + head) * D;
        const float *turns = work.turns + (size_t)(row % work.T) * D;
        float scale = keys ? 1.0f : work.scale;
        rotary_load<R, WIDTH, COUNT>(x, (const R *)place, columns);
        if (NORMED && BACKWARD) { rotary_load<R, WIDTH, COUNT>(before, (const R *)saved, columns); }
        if (NORMED && !BACKWARD) { rotary_store<R, WIDTH, COUNT>(saved, x, columns); }
        if (BACKWARD) { rotary_turn_pieces<WIDTH, COUNT>(x, turns, columns, scale, true); }
        if (NORMED) { rotary_norm_head<N, BACKWARD>(x, before, weights, sums, work, group, columns.valid); }
        if (!BACKWARD) { rotary_turn_pieces<WIDTH, COUNT>(x, turns, columns, scale, false); }
        rotary_store<R, WIDTH, COUNT>(place, x, columns);
    }
    if (NORMED && BACKWARD) {
        columns.valid = true;
        float *partials = work.partials + ((size_t)block * 2 + blockIdx.y) * D;
        rotary_sums_store<WIDTH, COUNT>(sums, columns, partials, (float *)cuda_shared(), group, D);
    }
}

template <typename R, int WIDTH, int COUNT, bool NORMED, bool BACKWARD>
static inline void rotary_start(Stream *stream, const Rotary &work) {
    bool sums = NORMED && BACKWARD;
    int D = work.head_size, group = 1,
        blocks = sums ? cuda_row_blocks(work.rows) : (int)cuda_blocks((size_t)work.rows, ROTARY_ROWS);
    while (group * WIDTH * COUNT < D / 2) { group *= 2; }
    assert(group <= WARP && D % 2 == 0);
    cuda_launch(stream, rotary_kernel<R, WIDTH, COUNT, NORMED, BACKWARD>, dim3((unsigned)blocks, 2),
                dim3(ROTARY_THREADS), sums ? (size_t)(ROTARY_THREADS / group * D) * sizeof(float) : 0, work,
                group);
    if (!sums) { return; }
    cuda_column_sums_add(stream, {.first = work.d_weights[0], .second = work.d_weights[1]}, 2, work.partials,
                         blocks, 2 * D, D);
}

template <typename R, bool NORMED, bool BACKWARD>
static inline void rotary_choose(Stream *stream, const Rotary &work) {
    size_t half = (size_t)work.head_size / 2;
    bool packed = pack_fits((size_t)work.stride, reals<R>(work.values)) &&
                  pack_fits(half, reals<R>(work.saved), reals<R>(work.weights[0]), reals<R>(work.weights[1]),
                            work.turns);
    (packed ? rotary_start<R, PACK<R>, 1, NORMED, BACKWARD>
            : rotary_start<R, 1, ROTARY_COUNT, NORMED, BACKWARD>)(stream, work);
}

// Heads of at most 256 channels.
template <typename R> static inline void cuda_rotary(Stream *stream, const Rotary *work) {
    bool normed = work->weights[0] != NULL;
    (work->backward ? normed ? rotary_choose<R, true, true> : rotary_choose<R, false, true>
     : normed ? rotary_choose<R, true, false>
                    : rotary_choose<R, false, false>)(stream, *work);
}
