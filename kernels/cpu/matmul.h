// matmul.h: the matrix products of the linear layers, the LM head and attention.
//
//   forward           output = input weight^T       (rows, outputs), sums over inputs
//   backward input    d_input = d_output weight     (rows, inputs), sums over outputs
//   backward weight   d_weight += d_output^T input  (outputs, inputs), sums over rows
//
// Row-major, with strides; weight (outputs, inputs) as PyTorch stores it. All three are
// result = a b [+ result] with some operand transposed. Operands are both fp32 or both bf16;
// sums are fp32, and a result that is bf16 is rounded once.
//
// oneDNN computes, single-threaded, inside our tasks; where there is AMX, amx.h computes those of
// bf16 in a model and in Muon. The result is cut into tiles whose size depends on the shape alone
// (in amx.h on the threads, too, which moves no bit there), and never across the inner dimension
// K: an element is one sum in one order no matter which thread computes it. Our threads stay the
// only ones in the process, at the rate of oneDNN's own (make bench prints both): no second pool
// spins while communication needs a core.
//
// If the library (onednn.h) is absent or refuses, matmul_block_plain computes: blocked,
// vectorised by the compiler, and 13 times slower in training; the tests also compare against it.
#pragma once

#include "kernels/cpu/amx.h"
#include "kernels/cpu/onednn.h"
#include "kernels/cpu/vector_math.h"

// result (M, N) = scale a (M, K) b (K, N) [+ result]. A transposed operand is stored as
// (K, M) or (N, K). Strides are between rows as stored.
typedef struct Matmul {
    int M, N, K;
    Precision precision, b_precision; // of a and b: they differ where both are FP8's, on GPUs
    const Real *a;
    int a_stride;
    bool a_transposed;
    const Real *b;
    int b_stride;
    bool b_transposed;
    Precision result_precision;
    Real *result;
    int result_stride;
    bool accumulate; // += instead of =
    float scale;
    int count, most; // products of matrices that lie one behind the other, and their largest count
    const float *a_scale, *b_scale; // of operands in FP8, in a GPU's memory; otherwise NULL
} Matmul;

enum {
    GEMM_WORKSPACE_BYTES = 32 << 20,   // for the products of a stream of a GPU
    MATMUL_TILE_ELEMENTS = 512 * 1024, // elements of a tile at most: 2 MB
    MATMUL_TILES = 4,                  // tiles at least: with a large K even a small result is a long task.
    MATMUL_TILE_LEAST = 64 * 1024,     // But a tile of this many elements is not cut for that
    MATMUL_TILE_SIDE = 8192,           // a side at most: threads also share a product with a single row
    MATMUL_TILE_STEP = 48,             // tile sides are multiples of this: whole register tiles of oneDNN
    MATMUL_PLAIN_BLOCK = 128,          // sides of a packed block of matmul_block_plain: 64 KB
    MATMUL_PLAIN_ROWS = 64             // of the result that it computes at a time
};

// Copies rows k0 to k0 + depth and columns n0 to n0 + width of b to `packed` (depth,
// MATMUL_PLAIN_BLOCK).
REAL_LOOP void matmul_pack(const Matmul *work, int k0, int depth, int n0, int width, float *packed,
                           Precision precision) {
    for (int k = 0; k < depth; k++) {
        for (int n = 0; n < width; n++) {
            size_t row = (size_t)(work->b_transposed ? n0 + n : k0 + k),
                   column = (size_t)(work->b_transposed ? k0 + k : n0 + n);
            packed[k * MATMUL_PLAIN_BLOCK + n] =
                real_load(work->b, row * (size_t)work->b_stride + column, precision);
        }
    }
}

// sums (rows, MATMUL_PLAIN_BLOCK) += rows m0 to m0 + rows and columns k0 to k0 + depth of a
// times packed (depth, MATMUL_PLAIN_BLOCK); `width` columns of it count.
REAL_LOOP void matmul_add_block(const Matmul *work, int m0, int rows, int k0, int depth, int width,
                                const float *packed, float *sums, Precision precision) {
    for (int m = 0; m < rows; m++) {
        float *row = sums + m * MATMUL_PLAIN_BLOCK;
        for (int k = 0; k < depth; k++) {
            size_t a_row = (size_t)(work->a_transposed ? k0 + k : m0 + m),
                   a_column = (size_t)(work->a_transposed ? m0 + m : k0 + k);
            float factor =
                work->scale * real_load(work->a, a_row * (size_t)work->a_stride + a_column, precision);
            const float *line = packed + k * MATMUL_PLAIN_BLOCK;
            for (int n = 0; n < width; n++) { row[n] = multiply_add(factor, line[n], row[n]); }
        }
    }
}

// One product without the library, on the calling thread:
//   for m, for n, for k: result[m][n] += scale a[m][k] b[k][n]
// in blocks of m, k and n, with b packed. Every element is summed over k in ascending order.
static inline void matmul_block_plain(const Matmul *work) {
    float packed[MATMUL_PLAIN_BLOCK * MATMUL_PLAIN_BLOCK], sums[MATMUL_PLAIN_ROWS * MATMUL_PLAIN_BLOCK];
    for (int n0 = 0; n0 < work->N; n0 += MATMUL_PLAIN_BLOCK) {
        int width = int_min(work->N - n0, MATMUL_PLAIN_BLOCK);
        for (int m0 = 0; m0 < work->M; m0 += MATMUL_PLAIN_ROWS) {
            int rows = int_min(work->M - m0, MATMUL_PLAIN_ROWS);
            for (int i = 0; i < rows * width; i++) {
                size_t place = (size_t)(m0 + i / width) * (size_t)work->result_stride + (n0 + i % width);
                sums[i / width * MATMUL_PLAIN_BLOCK + i % width] =
                    work->accumulate ? real_load(work->result, place, work->result_precision) : 0.0f;
            }
            for (int k0 = 0; k0 < work->K; k0 += MATMUL_PLAIN_BLOCK) {
                int depth = int_min(work->K - k0, MATMUL_PLAIN_BLOCK);
                REAL_CALL(work->precision, matmul_pack, work, k0, depth, n0, width, packed);
                REAL_CALL(work->precision, matmul_add_block, work, m0, rows, k0, depth, width, packed, sums);
            }
            for (int i = 0; i < rows * width; i++) {
                size_t place = (size_t)(m0 + i / width) * (size_t)work->result_stride + (n0 + i % width);
                real_store(work->result, place, sums[i / width * MATMUL_PLAIN_BLOCK + i % width],
                           work->result_precision);
            }
        }
    }
}

// One product by the library, on the calling thread. False: it has no such product on this
// processor, or is absent.
static inline bool matmul_block_library(const Matmul *work) {
    OnednnMatrix a = {(void *)work->a, work->M, work->K, work->a_stride, work->a_transposed, work->precision},
                 b = {(void *)work->b, work->K, work->N, work->b_stride, work->b_transposed, work->precision},
                 result = {work->result,        work->M, work->N,
                           work->result_stride, false,   work->result_precision};
    return onednn_multiply(&a, &b, &result, work->scale, work->accumulate);
}

// One product on the calling thread, for use inside a task.
static inline void matmul_block(const Matmul *work) {
    if (!matmul_block_library(work)) { matmul_block_plain(work); }
}

// A product of bf16, as AMX takes it.
typedef struct MatmulAmx {
    AmxOperand a, b;
    AmxResult result;
} MatmulAmx;

static inline MatmulAmx matmul_as_amx(const Matmul *work) {
    MatmulAmx amx = {
        {(const uint16_t *)work->a, work->M, work->K, work->a_stride, !work->a_transposed},
        {(const uint16_t *)work->b, work->N, work->K, work->b_stride, work->b_transposed},
        {work->result, work->result_stride, work->result_precision, work->accumulate, work->scale}};
    return amx;
}

typedef struct MatmulTiles {
    const Matmul *whole;
    int tile_M, tile_N, tiles_N;
    AmxWorkspace *amx; // of each thread; NULL: the library computes
} MatmulTiles;

// The row stride for a gradient of `columns` columns that a product reads transposed.
// Rows a power of two apart fall into the same few sets of the first-level cache, which
// costs a quarter of the rate (123 instead of 156 GFLOP/s a core at 3072 columns).
// Rows are longer by a line of the cache, so that each begins with one: with half a line AMX
// is 6 % slower.
static inline int matmul_padded_stride(int columns, Precision precision) {
    return columns % 256 == 0 ? columns + 64 / (int)precision_bytes(precision) : columns;
}

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
    const MatmulTiles *tiles = (const MatmulTiles *)context;
    Matmul tile = *tiles->whole;
    int m0 = task / tiles->tiles_N * tiles->tile_M, n0 = task % tiles->tiles_N * tiles->tile_N;
    tile.M = int_min(tile.M - m0, tiles->tile_M);
    tile.N = int_min(tile.N - n0, tiles->tile_N);
    tile.a =
        real_at_const(tile.a, tile.a_transposed ? (size_t)m0 : (size_t)m0 * tile.a_stride, tile.precision);
    tile.b =
        real_at_const(tile.b, tile.b_transposed ? (size_t)n0 * tile.b_stride : (size_t)n0, tile.precision);
    tile.result = real_at(tile.result, (size_t)m0 * tile.result_stride + n0, tile.result_precision);
    if (tiles->amx != NULL) {
        MatmulAmx amx = matmul_as_amx(&tile);
        amx_multiply(&amx.a, &amx.b, &amx.result, &tiles->amx[thread]);
    } else {
        matmul_block(&tile);
    }
}

static inline MatmulTiles matmul_cut(const Matmul *work, AmxWorkspace *amx, int threads) {
    MatmulTiles tiles = {.whole = work, .amx = amx};
    if (amx != NULL) {
        MatmulAmx product = matmul_as_amx(work);
        amx_choose_tile(&product.a, &product.b, &product.result, threads, &tiles.tile_M, &tiles.tile_N);
    } else {
        matmul_choose_tile(work->M, work->N, &tiles.tile_M, &tiles.tile_N);
    }
    tiles.tiles_N = (work->N + tiles.tile_N - 1) / tiles.tile_N;
    return tiles;
}

static inline int matmul_tile_count(const MatmulTiles *tiles) {
    return (tiles->whole->M + tiles->tile_M - 1) / tiles->tile_M * tiles->tiles_N;
}

// One product on the stream's pool, one tile per task.
static inline void cpu_matmul(Stream *stream, const Matmul *work) {
    assert(work->count == 1);
    AmxWorkspace *amx = work->precision == PRECISION_BF16 ? (AmxWorkspace *)stream->gemm : NULL;
    MatmulTiles tiles = matmul_cut(work, amx, stream->pool->threads);
    thread_pool_run(stream->pool, matmul_tile_count(&tiles), matmul_tile_task, &tiles);
}

// One product of bf16 by AMX, on the calling thread.
static inline void matmul_block_amx(const Matmul *work, AmxWorkspace *workspace) {
    MatmulTiles tiles = matmul_cut(work, workspace, 1);
    for (int i = 0; i < matmul_tile_count(&tiles); i++) { matmul_tile_task(&tiles, i, 0); }
}

// A product whose operands have one format, and so has the result unless it accumulates: then
// it is fp32.
static inline Matmul matmul_describe(Precision precision, Real *result, int result_stride, const Real *a,
                                     int a_stride, bool a_transposed, const Real *b, int b_stride,
                                     bool b_transposed, int M, int N, int K, bool accumulate) {
    Matmul work = {.M = M,
                   .N = N,
                   .K = K,
                   .precision = precision,
                   .b_precision = precision,
                   .a = a,
                   .a_stride = a_stride,
                   .a_transposed = a_transposed,
                   .b = b,
                   .b_stride = b_stride,
                   .b_transposed = b_transposed,
                   .result_precision = accumulate ? PRECISION_FP32 : precision,
                   .result = result,
                   .result_stride = result_stride,
                   .accumulate = accumulate,
                   .scale = 1.0f,
                   .count = 1,
                   .most = 1};
    return work;
}

// text <- what computes matrix products on CPUs.
static inline const char *matmul_describe_library(char text[128]) {
    char library[96];
    snprintf(text, 128, "%s%s", amx_is_there() ? "our own tiles in bf16, else " : "",
             onednn_describe(library));
    return text;
}

// text <- what decides how results are rounded on this processor: programs of one commit that say
// the same make the same bits.
static inline const char *cpu_describe_rounding(char text[160]) {
    char library[128];
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    const char *fuses = "fused";
#else
    const char *fuses = "unfused";
#endif
    snprintf(text, 160, "%s sums, products by %s", fuses, matmul_describe_library(library));
    return text;
}

// Whether products of bf16 are computed by more than our plain loops on this processor.
static inline bool matmul_has_bf16(void) {
    enum { SIDE = 16 };
    float a[SIDE * SIDE] = {0}, result[SIDE * SIDE];
    Matmul work = matmul_describe(PRECISION_BF16, as_reals(result), SIDE, as_reals(a), SIDE, false,
                                  as_reals(a), SIDE, false, SIDE, SIDE, SIDE, false);
    return amx_is_there() || matmul_block_library(&work);
}
