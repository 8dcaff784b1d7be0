// column_sums.cuh: how kernels cut a (rows, columns) array into blocks and threads, and
// how sums over rows stay bit-reproducible.
//
// Layout: a thread owns some neighbouring columns, a Piece: 16 bytes if rows are aligned, otherwise
// one element. It goes down some rows. Threads lie side by side in strips of at most COLUMN_STRIP:
// a warp reads whole cache lines, and what belongs to a column (a bias, a sum) is loaded once.
//
// A kernel that sums over rows cuts them into at most CUDA_ROW_BLOCKS blocks, a number
// that depends on the rows alone: two for each multiprocessor of an H200. Each block leaves its
// sums in a workspace (CUDA_ROW_BLOCKS, width) of floats, and cuda_column_sums_add adds them up
// in a fixed order. There COLUMN_SLICES warps share a column, because there are few columns.
#pragma once

#include "kernels/cpu/row_blocks.h"
#include "kernels/cuda/language.cuh"

enum { COLUMN_STRIP = 384, COLUMN_SLICES = 16 };

// place (WIDTH) = values, or += if ADD, 16 bytes at a time.
template <int WIDTH, bool ADD> DEVICE void floats_write(float *place, const float values[WIDTH]) {
    constexpr int STEP = WIDTH < 4 ? 1 : 4;
    UNROLL
    for (int i = 0; i < WIDTH; i += STEP) {
        Piece<float, STEP> piece;
        if constexpr (ADD) { piece = piece_load<STEP>(place + i); }
        for (int k = 0; k < STEP; k++) {
            piece.values[k] = ADD ? piece.values[k] + values[i + k] : values[i + k];
        }
        piece_store<STEP>(place + i, piece);
    }
}

// Launches `blocks` blocks for each strip of columns; a thread has `width` columns.
template <typename... Parameters, typename... Arguments>
static inline void strips_launch(Stream *stream, void (*kernel)(Parameters...), unsigned blocks, int columns,
                                 int width, size_t shared, Arguments... arguments) {
    size_t pieces = (size_t)(columns / width);
    unsigned strips = cuda_blocks(pieces, COLUMN_STRIP);
    unsigned threads = cuda_blocks(cuda_blocks(pieces, strips), WARP) * WARP;
    cuda_launch(stream, kernel, dim3(blocks, strips), dim3(threads), shared, arguments...);
}

// The first column of this thread's piece; blocks of one strip have the same blockIdx.y.
DEVICE int strip_column(int width) { return (int)(blockIdx.y * blockDim.x + threadIdx.x) * width; }

static inline int cuda_row_blocks(int rows) { return int_min(rows, CUDA_ROW_BLOCKS); }

// The first row of block `block` of `blocks`; for block `blocks`, one behind the last,
// `rows`. If rows do not divide evenly, the first blocks have one row more.
DEVICE int cuda_row_begin(int block, int blocks, int rows) {
    int longer = rows % blocks;
    return rows / blocks * block + (block < longer ? block : longer);
}

// The destinations of up to three arrays of sums that lie side by side in a row of partials.
struct ColumnTargets {
    float *first, *second, *third;
};

static __global__ void __launch_bounds__(WARP *COLUMN_SLICES)
    column_sums_kernel(ColumnTargets targets, const float *partials, int blocks, int stride, int columns) {
    float *slices = (float *)cuda_shared(); // (COLUMN_SLICES, WARP)
    int column = (int)blockIdx.x * WARP + lane_index(), slice = warp_index();
    const float *mine = partials + (size_t)blockIdx.y * columns + column;
    float sum = 0.0f;
    if (column < columns) {
        for (int block = slice; block < blocks; block += COLUMN_SLICES) {
            sum += mine[(size_t)block * stride];
        }
    }
    slices[slice * WARP + lane_index()] = sum;
    __syncthreads();
    if (slice != 0 || column >= columns) { return; }
    for (int i = 1; i < COLUMN_SLICES; i++) { sum += slices[i * WARP + lane_index()]; }
    float *sums = blockIdx.y == 0 ? targets.first : blockIdx.y == 1 ? targets.second : targets.third;
    sums[column] += sum;
}

// Adds the partial sums of `arrays` arrays of `columns` columns at once. They lie side by
// side in each row of partials (blocks, stride).
static inline void cuda_column_sums_add(Stream *stream, ColumnTargets targets, int arrays,
                                        const float *partials, int blocks, int stride, int columns) {
    dim3 grid(cuda_blocks((size_t)columns, WARP), (unsigned)arrays);
    cuda_launch(stream, column_sums_kernel, grid, dim3(WARP * COLUMN_SLICES),
                COLUMN_SLICES * WARP * sizeof(float), targets, partials, blocks, stride, columns);
}
