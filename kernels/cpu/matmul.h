// matmul.h: the matrix products of the linear layers, the LM head and attention.
//
//   forward           output = input weight^T       (rows, outputs), sums over inputs
//   backward input    d_input = d_output weight     (rows, inputs), sums over outputs
//   backward weight   d_weight += d_output^T input  (outputs, inputs), sums over rows
//
// fp32, row-major, with strides; weight (outputs, inputs) as PyTorch stores it. All three
// are result = a b [+ result] with some operand transposed; matmul_block_plain is the
// plain loop.
//
// oneDNN computes, single-threaded, inside our tasks. The result is cut into tiles whose
// size depends on the shape alone, never on the number of threads, and never across the
// inner dimension K: an element is one sum in one order whichever thread computes it. On
// two AVX-512 cores our tiles reach the rate of oneDNN's own threads (about 300 GFLOP/s;
// make bench prints both), and our threads stay the only ones in the process: no second
// pool spins while communication needs a core. The limit is the rate of the multiply-add
// units.
//
// oneDNN is kept single-threaded through the OpenMP setting of the calling thread; the
// symbols are weak, because a oneDNN built without OpenMP does not need them. Where the
// library is absent (ACCO_NO_ONEDNN) or refuses, matmul_block_plain computes: blocked,
// vectorised by the compiler, several times slower. The tests also compare against it.
#ifndef ACCO_KERNELS_CPU_MATMUL_H
#define ACCO_KERNELS_CPU_MATMUL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include "runtime/device.h"

#ifndef ACCO_NO_ONEDNN
#include <oneapi/dnnl/dnnl.h>
#ifdef __cplusplus
extern "C" {
#endif
extern int omp_get_max_threads(void) __attribute__((weak));
extern void omp_set_num_threads(int threads) __attribute__((weak));
#ifdef __cplusplus
}
#endif
#endif

// result (M, N) = a (M, K) b (K, N) [+ result]. A transposed operand is stored as (K, M)
// or (N, K). Strides are between rows as stored.
typedef struct Matmul {
    int M, N, K;
    const float *a;
    int a_stride;
    bool a_transposed;
    const float *b;
    int b_stride;
    bool b_transposed;
    float *result;
    int result_stride;
    bool accumulate; // += instead of =
} Matmul;

enum {
    MATMUL_TILE_ELEMENTS = 512 * 1024, // elements of a tile at most: 2 MB
    MATMUL_TILES = 4,                  // tiles at least: with a large K even a small result is a long task,
    MATMUL_TILE_LEAST = 64 * 1024,     // but no tile is cut below this many elements for that
    MATMUL_TILE_SIDE = 8192,           // a side at most: threads also share a product with a single row
    MATMUL_TILE_STEP = 48,             // tile sides are multiples of this: whole register tiles of oneDNN
    MATMUL_PLAIN_BLOCK = 128           // sides of a packed block of matmul_block_plain: 64 KB
};

// Copies rows k0 to k0 + depth and columns n0 to n0 + width of b to `packed` (depth,
// MATMUL_PLAIN_BLOCK).
static inline void matmul_pack(const Matmul *work, int k0, int depth, int n0, int width, float *packed) {
    for (int k = 0; k < depth; k++) {
        for (int n = 0; n < width; n++) {
            size_t row = (size_t)(work->b_transposed ? n0 + n : k0 + k),
                   column = (size_t)(work->b_transposed ? k0 + k : n0 + n);
            packed[k * MATMUL_PLAIN_BLOCK + n] = work->b[row * (size_t)work->b_stride + column];
        }
    }
}

// One product without the library, on the calling thread:
//   for m, for n, for k: result[m][n] += a[m][k] b[k][n]
// in blocks of k and n, with b packed. Every element is summed over k in ascending order.
static inline void matmul_block_plain(const Matmul *work) {
    float packed[MATMUL_PLAIN_BLOCK * MATMUL_PLAIN_BLOCK];
    for (int n0 = 0; n0 < work->N; n0 += MATMUL_PLAIN_BLOCK) {
        int width = work->N - n0 < MATMUL_PLAIN_BLOCK ? work->N - n0 : MATMUL_PLAIN_BLOCK;
        if (!work->accumulate) {
            for (int m = 0; m < work->M; m++) {
                for (int n = 0; n < width; n++) {
                    work->result[(size_t)m * (size_t)work->result_stride + (size_t)(n0 + n)] = 0.0f;
                }
            }
        }
        for (int k0 = 0; k0 < work->K; k0 += MATMUL_PLAIN_BLOCK) {
            int depth = work->K - k0 < MATMUL_PLAIN_BLOCK ? work->K - k0 : MATMUL_PLAIN_BLOCK;
            matmul_pack(work, k0, depth, n0, width, packed);
            for (int m = 0; m < work->M; m++) {
                float *row = work->result + (size_t)m * (size_t)work->result_stride + n0;
                for (int k = 0; k < depth; k++) {
                    size_t a_row = (size_t)(work->a_transposed ? k0 + k : m),
                           a_column = (size_t)(work->a_transposed ? m : k0 + k);
                    float factor = work->a[a_row * (size_t)work->a_stride + a_column];
                    const float *line = packed + k * MATMUL_PLAIN_BLOCK;
                    for (int n = 0; n < width; n++) { row[n] += factor * line[n]; }
                }
            }
        }
    }
}

// One product on the calling thread, for use inside a task.
static inline void matmul_block(const Matmul *work) {
#ifndef ACCO_NO_ONEDNN
    if (omp_set_num_threads != NULL && omp_get_max_threads() != 1) { omp_set_num_threads(1); }
    dnnl_status_t status =
        dnnl_sgemm(work->a_transposed ? 'T' : 'N', work->b_transposed ? 'T' : 'N', work->M, work->N, work->K,
                   1.0f, work->a, work->a_stride, work->b, work->b_stride, work->accumulate ? 1.0f : 0.0f,
                   work->result, work->result_stride);
    if (status == dnnl_success) { return; }
#endif
    matmul_block_plain(work);
}

typedef struct MatmulTiles {
    const Matmul *whole;
    int tile_M, tile_N, tiles_N;
} MatmulTiles;

// The row stride for a gradient of `columns` columns that a product reads transposed.
// Rows a power of two apart fall into the same few sets of the first-level cache, which
// costs a quarter of the rate (123 instead of 156 GFLOP/s a core at 3072 columns).
static inline int matmul_padded_stride(int columns) { return columns % 256 == 0 ? columns + 16 : columns; }

// Halves the longer side, rounded up to a multiple of MATMUL_TILE_STEP, until tiles are
// small enough and there are enough of them. The result depends on M and N only.
static inline void matmul_choose_tile(int M, int N, int *tile_M, int *tile_N) {
    long long whole = (long long)M * N, most = whole / MATMUL_TILES;
    if (most < MATMUL_TILE_LEAST) { most = MATMUL_TILE_LEAST; }
    if (most > MATMUL_TILE_ELEMENTS) { most = MATMUL_TILE_ELEMENTS; }
    *tile_M = M;
    *tile_N = N;
    while ((long long)*tile_M * *tile_N > most || *tile_M > MATMUL_TILE_SIDE || *tile_N > MATMUL_TILE_SIDE) {
        int *side = *tile_M >= *tile_N ? tile_M : tile_N;
        *side = (*side / 2 + MATMUL_TILE_STEP - 1) / MATMUL_TILE_STEP * MATMUL_TILE_STEP;
    }
}

static inline void matmul_tile_task(void *context, int task, int thread) {
    (void)thread;
    const MatmulTiles *tiles = (const MatmulTiles *)context;
    Matmul tile = *tiles->whole;
    int m0 = task / tiles->tiles_N * tiles->tile_M, n0 = task % tiles->tiles_N * tiles->tile_N;
    tile.M = tile.M - m0 < tiles->tile_M ? tile.M - m0 : tiles->tile_M;
    tile.N = tile.N - n0 < tiles->tile_N ? tile.N - n0 : tiles->tile_N;
    tile.a += tile.a_transposed ? (size_t)m0 : (size_t)m0 * (size_t)tile.a_stride;
    tile.b += tile.b_transposed ? (size_t)n0 * (size_t)tile.b_stride : (size_t)n0;
    tile.result += (size_t)m0 * (size_t)tile.result_stride + (size_t)n0;
    matmul_block(&tile);
}

// One product on the stream's pool, a tile a task.
static inline void matmul(Stream *stream, const Matmul *work) {
    MatmulTiles tiles;
    tiles.whole = work;
    matmul_choose_tile(work->M, work->N, &tiles.tile_M, &tiles.tile_N);
    tiles.tiles_N = (work->N + tiles.tile_N - 1) / tiles.tile_N;
    thread_pool_run(stream->pool, (work->M + tiles.tile_M - 1) / tiles.tile_M * tiles.tiles_N,
                    matmul_tile_task, &tiles);
}

static inline Matmul matmul_describe(float *result, int result_stride, const float *a, int a_stride,
                                     bool a_transposed, const float *b, int b_stride, bool b_transposed,
                                     int M, int N, int K, bool accumulate) {
    Matmul work = {
        M, N, K, a, a_stride, a_transposed, b, b_stride, b_transposed, result, result_stride, accumulate};
    return work;
}

// output = input weight^T
static inline void cpu_matmul_forward(Stream *stream, float *output, int output_stride, const float *input,
                                      const float *weight, int rows, int inputs, int outputs) {
    Matmul work = matmul_describe(output, output_stride, input, inputs, false, weight, inputs, true, rows,
                                  outputs, inputs, false);
    matmul(stream, &work);
}

// d_input = d_output weight
static inline void cpu_matmul_backward_input(Stream *stream, float *d_input, int d_input_stride,
                                             const float *d_output, int d_output_stride, const float *weight,
                                             int rows, int inputs, int outputs) {
    Matmul work = matmul_describe(d_input, d_input_stride, d_output, d_output_stride, false, weight, inputs,
                                  false, rows, inputs, outputs, false);
    matmul(stream, &work);
}

// d_weight += d_output^T input
static inline void cpu_matmul_backward_weight(Stream *stream, float *d_weight, const float *d_output,
                                              int d_output_stride, const float *input, int rows, int inputs,
                                              int outputs) {
    Matmul work = matmul_describe(d_weight, inputs, d_output, d_output_stride, true, input, inputs, false,
                                  outputs, inputs, rows, true);
    matmul(stream, &work);
}

// text <- the library that computes matrix products on CPUs, for reports.
static inline const char *matmul_library(char text[96]) {
#ifdef ACCO_NO_ONEDNN
    snprintf(text, 96, "our own loops, several times slower than oneDNN (make info says why it is not used)");
#else
    const dnnl_version_t *version = dnnl_version();
    snprintf(text, 96, "oneDNN %d.%d.%d", version->major, version->minor, version->patch);
#endif
    return text;
}

#endif
