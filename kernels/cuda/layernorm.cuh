// layernorm.cuh: LayerNorm or RMSNorm, fused with the residual addition before it, on a GPU.
//
// Computes what kernels/cpu/layernorm.h defines. CENTRES: it is a LayerNorm; an RMSNorm has neither
// mean nor bias, and the branch before it may have no bias. Statistics are taken of the residual as
// it is stored, in R, because backward reads no other.
//
// Layout: a group of whole warps works on a row, each thread on COUNT Pieces of it
// (column_sums.cuh), and a block on as many rows as it has groups. All groups pass the
// same barriers, including those without a row. A row stays in registers between its sums
// and its result.
//
// Backward sums three things over rows: the gradients of weight and, of a LayerNorm, of bias,
// and the finished d_residual. So each of at most CUDA_ROW_BLOCKS blocks goes down rows of its
// own, and its threads keep the three sums of their columns in registers. While a row is
// computed, the next one is loaded (AHEAD), which keeps memory busy during the reduction.
// Very wide rows, and rows that are not aligned, lack the registers for this.
#pragma once

#include "kernels/cpu/layernorm.h"
#include "kernels/cuda/column_sums.cuh"

enum {
    LAYERNORM_CHANNELS = 8192, // the widest row
    LAYERNORM_THREADS = 512,   // the most of a block
    LAYERNORM_BLOCK = 128,     // in a block that has several groups
    // The same two for backward with AHEAD: two such blocks fit a multiprocessor.
    LAYERNORM_AHEAD_THREADS = 768,
    LAYERNORM_AHEAD_BLOCK = 384,
    LAYERNORM_PIECES = 4,        // of a thread, in forward
    LAYERNORM_WIDE_ELEMENTS = 16 // of a thread, in backward of wide rows and for rows that are not aligned
};

// How the warps of a block are grouped.
struct LayernormGroups {
    int warps, groups; // of a group, of a block
};

static inline LayernormGroups layernorm_groups(int channels, int elements, int block) {
    LayernormGroups result;
    result.warps = (int)cuda_blocks((size_t)channels, (size_t)elements * WARP);
    int threads = result.warps * WARP;
    result.groups = threads < block ? block / threads : 1;
    return result;
}

// Replaces N values by their sums over a group, for all its threads, with one barrier.
// scratch: N floats for each warp of the block.
template <int N> DEVICE void layernorm_group_sums(float values[N], float *scratch, int warps) {
    UNROLL
    for (int i = 0; i < N; i++) { values[i] = warp_sum(values[i]); }
    if (warps == 1) { return; }
    UNROLL
    for (int i = 0; i < N; i++) {
        if (lane_index() == 0) { scratch[warp_index() * N + i] = values[i]; }
    }
    __syncthreads();
    const float *group = scratch + warp_index() / warps * warps * N;
    UNROLL
    for (int i = 0; i < N; i++) {
        values[i] = 0.0f;
        for (int warp = 0; warp < warps; warp++) { values[i] += group[warp * N + i]; }
    }
}

// ---- Forward --------------------------------------------------------------------------

// A thread's columns of its row: piece i begins with column first + i step and exists if
// that is below `channels`.
struct LayernormColumns {
    int first, step, channels;
};

template <int WIDTH> DEVICE LayernormColumns layernorm_columns(int channels, int warps, bool valid) {
    LayernormColumns columns;
    columns.first = (warp_index() % warps * WARP + lane_index()) * WIDTH;
    columns.step = warps * WARP * WIDTH;
    columns.channels = valid ? channels : 0;
    return columns;
}

// x becomes the finished residual of the row at offset `place`; 0 behind the row's end.
template <typename R, int WIDTH, int COUNT, bool CENTRES>
DEVICE void layernorm_residual(float x[COUNT][WIDTH], const Layernorm &work, size_t place,
                               const LayernormColumns &columns) {
    const R *source =
        (work.branch != NULL ? reals<R>(work.residual_before) : reals<R>((const Real *)work.residual)) +
        place;
    Piece<R, WIDTH> before[COUNT], branch[COUNT];
    UNROLL
    for (int i = 0; i < COUNT; i++) {
        int c = columns.first + i * columns.step;
        if (c >= columns.channels) { continue; }
        before[i] = piece_load<WIDTH>(source + c);
        if (work.branch != NULL) { branch[i] = piece_load<WIDTH>(reals<R>(work.branch) + place + c); }
    }
    UNROLL
    for (int i = 0; i < COUNT; i++) {
        int c = columns.first + i * columns.step;
        bool there = c < columns.channels;
        if (there && work.branch != NULL) {
            float branches[WIDTH], biases[WIDTH] = {};
            piece_unpack(x[i], before[i]);
            piece_unpack(branches, branch[i]);
            if (CENTRES || work.branch_bias != NULL) {
                piece_unpack(biases, piece_load<WIDTH>(reals<R>(work.branch_bias) + c));
            }
            UNROLL
            for (int k = 0; k < WIDTH; k++) { x[i][k] += branches[k] + biases[k]; }
            piece_pack(before[i], x[i]);
            piece_store<WIDTH>(reals<R>(work.residual) + place + c, before[i]);
        }
        piece_unpack(x[i], before[i]);
        UNROLL
        for (int k = 0; k < WIDTH; k++) { x[i][k] = there ? x[i][k] : 0.0f; }
    }
}

template <typename R, int WIDTH, int COUNT, bool CENTRES>
static __global__ void __launch_bounds__(LAYERNORM_THREADS)
    layernorm_forward_kernel(Layernorm work, LayernormGroups shape) {
    float *scratch = (float *)cuda_shared(); // (2, warps of the block)
    int row = (int)blockIdx.x * shape.groups + warp_index() / shape.warps;
    LayernormColumns columns = layernorm_columns<WIDTH>(work.channels, shape.warps, row < work.rows);
    size_t place = (size_t)row * work.channels;
    float x[COUNT][WIDTH], sum = 0.0f;
    layernorm_residual<R, WIDTH, COUNT, CENTRES>(x, work, place, columns);
    UNROLL
    for (int i = 0; CENTRES && i < COUNT; i++) {
        for (int k = 0; k < WIDTH; k++) { sum += x[i][k]; }
    }
    if (CENTRES) { layernorm_group_sums<1>(&sum, scratch, shape.warps); }
    float mean = CENTRES ? sum / (float)work.channels : 0.0f;
    float squares = 0.0f;
    UNROLL
    for (int i = 0; i < COUNT; i++) {
        if (columns.first + i * columns.step >= columns.channels) { break; }
        for (int k = 0; k < WIDTH; k++) { squares += (x[i][k] - mean) * (x[i][k] - mean); }
    }
    layernorm_group_sums<1>(&squares, scratch + shape.warps * shape.groups, shape.warps);
    float scale = 1.0f / sqrtf(squares / (float)work.channels + work.epsilon);
    UNROLL
    for (int i = 0; i < COUNT; i++) {
        int c = columns.first + i * columns.step;
        if (c >= columns.channels) { break; }
        Piece<R, WIDTH> weight = piece_load<WIDTH>(reals<R>(work.weight) + c), bias, output;
        float weights[WIDTH], biases[WIDTH];
        if (CENTRES) { bias = piece_load<WIDTH>(reals<R>(work.bias) + c); }
        piece_unpack(weights, weight);
        if (CENTRES) { piece_unpack(biases, bias); }
        UNROLL
        for (int k = 0; k < WIDTH; k++) {
            float n = (x[i][k] - mean) * scale * weights[k];
            weights[k] = CENTRES ? n + biases[k] : n;
        }
        piece_pack(output, weights);
        piece_store<WIDTH>(reals<R>(work.output) + place + c, output);
    }
    if (columns.first == 0 && row < work.rows) {
        work.statistics[2 * (size_t)row] = mean;
        work.statistics[2 * (size_t)row + 1] = scale;
    }
}

template <typename R, int WIDTH, int COUNT, bool CENTRES>
static inline void layernorm_forward_start(Stream *stream, const Layernorm *work) {
    LayernormGroups shape = layernorm_groups(work->channels, WIDTH * COUNT, LAYERNORM_BLOCK);
    int warps = shape.warps * shape.groups;
    cuda_launch(stream, layernorm_forward_kernel<R, WIDTH, COUNT, CENTRES>,
                dim3(cuda_blocks((size_t)work->rows, (size_t)shape.groups)), dim3((unsigned)warps * WARP),
                2 * (size_t)warps * sizeof(float), *work, shape);
}

// At most LAYERNORM_CHANNELS channels, here and below.
template <typename R, bool CENTRES>
static inline void layernorm_forward_kind(Stream *stream, const Layernorm *work) {
    size_t C = (size_t)work->channels;
    bool packed = pack_fits(C, reals<R>(work->output), reals<R>(work->residual), reals<R>(work->weight),
                            reals<R>(work->bias), reals<R>(work->residual_before), reals<R>(work->branch),
                            reals<R>(work->branch_bias));
    (packed ? layernorm_forward_start<R, PACK<R>, LAYERNORM_PIECES, CENTRES>
            : layernorm_forward_start<R, 1, LAYERNORM_WIDE_ELEMENTS, CENTRES>)(stream, work);
}

template <typename R> static inline void cuda_layernorm_forward(Stream *stream, const Layernorm *work) {
    (work->bias != NULL ? layernorm_forward_kind<R, true> : layernorm_forward_kind<R, false>)(stream, work);
}

// ---------------------------------------------------------------------------------------
// Backward. With n = (x - mean) scale and g = d_output weight:
// dx = scale (g - mean(g) - n mean(g n)); of an RMSNorm the means of x and of g are 0

// What a thread loads of a row.
template <typename R, int WIDTH, int COUNT, bool CENTRES> struct LayernormSlice {
    Piece<R, WIDTH> x[COUNT], d_output[COUNT];
    float mean = 0.0f, scale = 0.0f;
};

// Sums over rows that a block leaves: of the weight, of a LayerNorm's bias, of the branch's bias.
template <bool CENTRES> static constexpr int LAYERNORM_ARRAYS = CENTRES ? 3 : 2;

// What a thread keeps for its columns from row to row. The weight is kept if a thread has one
// piece; with several there are no registers left for it.
template <typename R, int WIDTH, int COUNT, bool CENTRES> struct LayernormSums {
    Piece<R, WIDTH> weight;
    float d_weight[COUNT][WIDTH], d_bias[COUNT][WIDTH], d_branch[COUNT][WIDTH];
};

// The weights of a piece, which begins with column `c`: those kept, or read again from a cache.
template <typename R, int WIDTH, int COUNT, bool CENTRES>
DEVICE void layernorm_weights(float weights[WIDTH], const LayernormSums<R, WIDTH, COUNT, CENTRES> &sums,
                              const Layernorm &work, int c) {
    Piece<R, WIDTH> weight = COUNT == 1 ? sums.weight : piece_load<WIDTH>(reals<R>(work.weight) + c);
    piece_unpack(weights, weight);
}

template <typename R, int WIDTH, int COUNT, bool CENTRES>
DEVICE void layernorm_slice_load(LayernormSlice<R, WIDTH, COUNT, CENTRES> &slice, const Layernorm &work,
                                 int row, const LayernormColumns &columns) {
    size_t place = (size_t)row * work.channels;
    slice.mean = CENTRES ? work.statistics[2 * (size_t)row] : 0.0f;
    slice.scale = work.statistics[2 * (size_t)row + 1];
    UNROLL
    for (int i = 0; i < COUNT; i++) {
        int c = columns.first + i * columns.step;
        if (c >= columns.channels) { break; }
        slice.x[i] = piece_load<WIDTH>(reals<R>(work.residual) + place + c);
        slice.d_output[i] = piece_load<WIDTH>(reals<R>(work.d_output) + place + c);
    }
}

// Adds the row to d_weight and d_bias of its columns. sums_g becomes this thread's part
// of sum(g) and sum(g n).
template <typename R, int WIDTH, int COUNT, bool CENTRES>
DEVICE void layernorm_slice_sum(LayernormSums<R, WIDTH, COUNT, CENTRES> &sums,
                                const LayernormSlice<R, WIDTH, COUNT, CENTRES> &slice, const Layernorm &work,
                                const LayernormColumns &columns, float sums_g[2]) {
    UNROLL
    for (int i = 0; i < COUNT; i++) {
        int c = columns.first + i * columns.step;
        if (c >= columns.channels) { break; }
        float x[WIDTH], d_output[WIDTH], weight[WIDTH];
        piece_unpack(x, slice.x[i]);
        piece_unpack(d_output, slice.d_output[i]);
        layernorm_weights(weight, sums, work, c);
        UNROLL
        for (int k = 0; k < WIDTH; k++) {
            float n = (x[k] - slice.mean) * slice.scale, g = d_output[k] * weight[k];
            sums_g[0] += g;
            sums_g[1] += g * n;
            sums.d_weight[i][k] += d_output[k] * n;
            if (CENTRES) { sums.d_bias[i][k] += d_output[k]; }
        }
    }
}

// Writes the gradient of the row and adds it to d_branch of its columns. g_mean =
// mean(g), product_mean = mean(g n).
template <typename R, int WIDTH, int COUNT, bool CENTRES>
DEVICE void layernorm_slice_finish(LayernormSums<R, WIDTH, COUNT, CENTRES> &sums,
                                   const LayernormSlice<R, WIDTH, COUNT, CENTRES> &slice,
                                   Piece<R, WIDTH> before[COUNT], const Layernorm &work, int row,
                                   const LayernormColumns &columns, float g_mean, float product_mean) {
    R *d_residual = reals<R>(work.d_residual) + (size_t)row * work.channels;
    UNROLL
    for (int i = 0; i < COUNT; i++) {
        int c = columns.first + i * columns.step;
        if (c >= columns.channels) { break; }
        float x[WIDTH], d_output[WIDTH], weight[WIDTH], total[WIDTH] = {};
        piece_unpack(x, slice.x[i]);
        piece_unpack(d_output, slice.d_output[i]);
        layernorm_weights(weight, sums, work, c);
        if (work.accumulate) { piece_unpack(total, before[i]); }
        UNROLL
        for (int k = 0; k < WIDTH; k++) {
            float n = (x[k] - slice.mean) * slice.scale, g = d_output[k] * weight[k];
            total[k] += slice.scale * (g - g_mean - n * product_mean);
            sums.d_branch[i][k] += total[k];
        }
        piece_pack(before[i], total);
        piece_store<WIDTH>(d_residual + c, before[i]);
    }
}

// partials (N, C) = the sums of the block: its groups' sums, added in order. shared (groups, N, C)
// with N = LAYERNORM_ARRAYS.
template <typename R, int WIDTH, int COUNT, bool CENTRES>
DEVICE void layernorm_sums_store(const LayernormSums<R, WIDTH, COUNT, CENTRES> &sums, float *partials,
                                 float *shared, int group, int groups, const LayernormColumns &columns) {
    constexpr int N = LAYERNORM_ARRAYS<CENTRES>;
    int C = columns.channels;
    float *mine = shared + (size_t)group * N * C;
    UNROLL
    for (int i = 0; i < COUNT; i++) {
        int c = columns.first + i * columns.step;
        if (c >= C) { break; }
        floats_write<WIDTH, false>(mine + c, sums.d_weight[i]);
        if (CENTRES) { floats_write<WIDTH, false>(mine + C + c, sums.d_bias[i]); }
        floats_write<WIDTH, false>(mine + (N - 1) * C + c, sums.d_branch[i]);
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < N * C; i += (int)blockDim.x) {
        float sum = shared[i];
        for (int other = 1; other < groups; other++) { sum += shared[(size_t)other * N * C + i]; }
        partials[i] = sum;
    }
}

// The rows from `begin` to `end`, one for each group at a time. scratch (2, warps of the
// block, 2): two halves that take turns, so that one barrier a row is enough. A thread
// that writes a half again has passed the barrier of the other half, and all threads that
// read the first have reached that barrier.
template <typename R, int WIDTH, int COUNT, bool AHEAD, bool CENTRES>
DEVICE void layernorm_backward_rows(LayernormSums<R, WIDTH, COUNT, CENTRES> &sums, const Layernorm &work,
                                    const LayernormGroups &shape, const LayernormColumns &columns, int begin,
                                    int end, float *scratch) {
    const Real *d_residual = work.d_residual;
    LayernormSlice<R, WIDTH, COUNT, CENTRES> slice, next;
    int row = begin + warp_index() / shape.warps, rounds = (end - begin + shape.groups - 1) / shape.groups;
    if (AHEAD && row < end) { layernorm_slice_load(next, work, row, columns); }
    for (; rounds > 0; row += shape.groups, rounds--) {
        if (AHEAD) { slice = next; }
        if (!AHEAD && row < end) { layernorm_slice_load(slice, work, row, columns); }
        if (AHEAD && row + shape.groups < end) {
            layernorm_slice_load(next, work, row + shape.groups, columns);
        }
        Piece<R, WIDTH> before[COUNT]; // d_residual, if it is to be added to
        UNROLL
        for (int i = 0; i < COUNT; i++) {
            int c = columns.first + i * columns.step;
            if (row >= end || c >= columns.channels || !work.accumulate) { break; }
            before[i] = piece_load<WIDTH>(reals<R>(d_residual) + (size_t)row * work.channels + c);
        }
        float sums_g[2] = {0.0f, 0.0f};
        if (row < end) { layernorm_slice_sum(sums, slice, work, columns, sums_g); }
        layernorm_group_sums<CENTRES ? 2 : 1>(
            sums_g + !CENTRES, scratch + rounds % 2 * 2 * shape.warps * shape.groups, shape.warps);
        float C = (float)work.channels, g_mean = CENTRES ? __fdividef(sums_g[0], C) : 0.0f;
        if (row < end) {
            layernorm_slice_finish(sums, slice, before, work, row, columns, g_mean, __fdividef(sums_g[1], C));
        }
    }
}

template <typename R, int WIDTH, int COUNT, bool AHEAD, bool CENTRES>
static __global__ void __launch_bounds__(AHEAD ? LAYERNORM_AHEAD_THREADS : LAYERNORM_THREADS)
    layernorm_backward_kernel(Layernorm work, LayernormGroups shape) {
    // Shared memory: (2, warps of the block, 2) for sums over columns, then
    // (groups, LAYERNORM_ARRAYS, C) for sums over rows.
    float *scratch = (float *)cuda_shared(), *shared = scratch + 4 * shape.warps * shape.groups;
    int block = (int)blockIdx.x, blocks = (int)gridDim.x;
    LayernormColumns columns = layernorm_columns<WIDTH>(work.channels, shape.warps, true);
    LayernormSums<R, WIDTH, COUNT, CENTRES> sums;
    UNROLL
    for (int i = 0; i < COUNT; i++) {
        int c = columns.first + i * columns.step;
        if (COUNT == 1 && c < columns.channels) {
            sums.weight = piece_load<WIDTH>(reals<R>(work.weight) + c);
        }
        for (int k = 0; k < WIDTH; k++) {
            sums.d_weight[i][k] = sums.d_bias[i][k] = sums.d_branch[i][k] = 0.0f;
        }
    }
    layernorm_backward_rows<R, WIDTH, COUNT, AHEAD, CENTRES>(
        sums, work, shape, columns, cuda_row_begin(block, blocks, work.rows),
        cuda_row_begin(block + 1, blocks, work.rows), scratch);
    float *partials = work.partials + (size_t)block * LAYERNORM_ARRAYS<CENTRES> * (size_t)work.channels;
    layernorm_sums_store(sums, partials, shared, warp_index() / shape.warps, shape.groups, columns);
}

template <typename R, int WIDTH, int COUNT, bool AHEAD, bool CENTRES>
static inline void layernorm_backward_start(Stream *stream, const Layernorm *work) {
    LayernormGroups shape =
        layernorm_groups(work->channels, WIDTH * COUNT, AHEAD ? LAYERNORM_AHEAD_BLOCK : LAYERNORM_BLOCK);
    size_t warps = (size_t)shape.warps * shape.groups;
    size_t sums = (size_t)shape.groups * LAYERNORM_ARRAYS<CENTRES> * (size_t)work->channels,
           shared = (sums + 4 * warps) * sizeof(float);
    cuda_launch(stream, layernorm_backward_kernel<R, WIDTH, COUNT, AHEAD, CENTRES>,
                dim3((unsigned)cuda_row_blocks(work->rows)), dim3((unsigned)warps * WARP), shared, *work,
                shape);
}

// The sums of d_branch_bias are taken before d_residual is rounded.
template <typename R, bool CENTRES>
static inline void layernorm_backward_kind(Stream *stream, const Layernorm *work) {
    constexpr int WIDTH = PACK<R>, ARRAYS = LAYERNORM_ARRAYS<CENTRES>;
    int C = work->channels;
    bool packed = pack_fits((size_t)C, reals<R>(work->d_residual), reals<R>(work->d_output),
                            reals<R>(work->residual), reals<R>(work->weight));
    if (!packed) {
        layernorm_backward_start<R, 1, LAYERNORM_WIDE_ELEMENTS, false, CENTRES>(stream, work);
    } else if (C <= LAYERNORM_AHEAD_THREADS * WIDTH) {
        layernorm_backward_start<R, WIDTH, 1, true, CENTRES>(stream, work);
    } else {
        layernorm_backward_start<R, WIDTH, LAYERNORM_WIDE_ELEMENTS / WIDTH, false, CENTRES>(stream, work);
    }
    ColumnTargets targets = {.first = work->d_weight,
                             .second = CENTRES ? work->d_bias : work->d_branch_bias,
                             .third = work->d_branch_bias};
    cuda_column_sums_add(stream, targets, work->d_branch_bias != NULL ? ARRAYS : ARRAYS - 1, work->partials,
                         cuda_row_blocks(work->rows), ARRAYS * C, C);
}

template <typename R> static inline void cuda_layernorm_backward(Stream *stream, const Layernorm *work) {
    (work->d_bias != NULL ? layernorm_backward_kind<R, true> : layernorm_backward_kind<R, false>)(stream,
                                                                                                  work);
}
