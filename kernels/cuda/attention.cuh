// attention.cuh: causal attention on a GPU, global or within a local window, forward and backward.
//
// Computes what kernels/cpu/attention.h defines. Scores and softmax are fp32. Scores live
// only in registers: forward keeps the logsumexp of each row, and backward computes the
// probabilities again from it.
//
// There are two families of kernels.
//
// Tiles (bf16, usual head sizes, rows of whole 16 bytes) use tensor cores. A block owns one tile of
// rows of one head (queries in forward and for dQ, keys for dK and dV). Each of its 4 warps has 16
// or 32 of the rows. The block walks over the tiles of the other side that its band of the (query,
// key) plane meets; the next tile is copied while this one is used. Tiles outside the band are
// never read, and only tiles on its edge are masked. A product leaves its result in the registers
// from which the next product takes its left operand, so neither scores nor probabilities pass
// through shared memory. With 16 rows a warp the reads of shared memory are the limit: four cycles
// of them for two products, half of an H100's rate.
//
// Rows (everything else) give each row a warp, whose lanes share the columns of the head.
// These kernels are for correctness.
//
// Backward computes scores twice, by queries for dQ and by keys for dK and dV. So each gradient has
// one writer, which adds in the order of rows: no atomic operations, and the same bits always.
//
// A NaN reaches the whole row through the sum of exponentials: the maximum skips it, the
// sum does not.
#pragma once

#include "kernels/cpu/attention.h"
#include "kernels/cuda/language.cuh"

enum {
    CUDA_ATTENTION_TILE = 64, // keys, or queries where a block owns keys
    CUDA_ATTENTION_WARPS = 4,
    CUDA_ATTENTION_THREADS = CUDA_ATTENTION_WARPS * WARP,
    CUDA_ATTENTION_PADDING = 8, // elements behind a row in shared memory: 8 rows lie in different banks
    CUDA_ATTENTION_MAX_HEAD = 256,
    CUDA_ATTENTION_SHARED_BYTES = 99 << 10 // of shared memory that a block may have on every GPU from 8.0 on
};

static constexpr float CUDA_ATTENTION_LOG2E = 1.44269504f;

// The sample and the head on which a block works.
struct CudaAttentionPlace {
    size_t row;      // the sample's first, in (B T, ...)
    size_t column;   // the head's first, in C
    size_t head;     // in (B, H)
    unsigned keys;   // of qkv: from a head to its keys, and from there to its values
    unsigned values; // KV D
    unsigned stride; // from a position to the next
    int group;       // heads of queries that have these keys
};

// GROUPED: several heads of queries share their keys. by_keys: the block has keys; its place is
// that of the first head of their queries.
template <bool GROUPED> DEVICE CudaAttentionPlace cuda_attention_place(const Attention &work, bool by_keys) {
    CudaAttentionPlace place;
    unsigned C = (unsigned)work.channels, group = GROUPED ? (unsigned)attention_group(&work) : 1,
             head = by_keys ? blockIdx.y * group : blockIdx.y;
    place.row = (size_t)blockIdx.z * work.T;
    place.column = (size_t)head * (work.channels / work.heads);
    place.head = (size_t)blockIdx.z * work.heads + head;
    place.keys = GROUPED ? C - (head - head / group) * (C / (unsigned)work.heads) : C;
    place.values = C / group;
    place.stride = C + 2 * place.values;
    place.group = (int)group;
    return place;
}

// ---------------------------------------------------------------------------------------
// The band of the (query, key) plane: query i sees the keys j with i - window < j <= i and,
// with documents, j >= starts[i]

// The first key that a query sees. A query behind the last one has a row of 0 and sees what the
// last one sees.
template <bool DOCUMENTS> DEVICE int cuda_attention_first_key(const Attention &work, int query) {
    int key = attention_oldest_key(query, work.window);
    if constexpr (DOCUMENTS) {
        int start = work.starts[(int)blockIdx.z * work.T + (query < work.T ? query : work.T - 1)];
        key = start > key ? start : key;
    }
    return key;
}

// One more than the last query that sees the key.
template <bool DOCUMENTS> DEVICE int cuda_attention_end_query(const Attention &work, int key) {
    int end = work.window > 0 && key + work.window < work.T ? key + work.window : work.T;
    if constexpr (DOCUMENTS) {
        for (int low = key + 1; low < end;) { // starts never fall
            int middle = (low + end) / 2;
            bool is_seen = work.starts[(int)blockIdx.z * work.T + middle] <= key;
            low = is_seen ? middle + 1 : low;
            end = is_seen ? end : middle;
        }
    }
    return end;
}

enum CudaAttentionBand { CUDA_ATTENTION_OUTSIDE, CUDA_ATTENTION_EDGE, CUDA_ATTENTION_INSIDE };

// Whether none, some or all pairs of a rectangle of queries and keys are in the band.
template <bool DOCUMENTS>
DEVICE CudaAttentionBand cuda_attention_band(int query, int queries, int key, int keys,
                                             const Attention &work) {
    int last_query = query + queries - 1, last_key = key + keys - 1, window = work.window;
    if (key > last_query || (window > 0 && last_key <= query - window)) { return CUDA_ATTENTION_OUTSIDE; }
    bool inside = last_key <= query && (window == 0 || key > last_query - window);
    if constexpr (DOCUMENTS) {
        if (last_key < cuda_attention_first_key<DOCUMENTS>(work, query)) { return CUDA_ATTENTION_OUTSIDE; }
        inside = inside && key >= cuda_attention_first_key<DOCUMENTS>(work, last_query);
    }
    return inside ? CUDA_ATTENTION_INSIDE : CUDA_ATTENTION_EDGE;
}

// Sets 16 rows of scores to -infinity outside the band. Rows are queries and columns are
// keys; TRANSPOSED: the other way round.
template <int N, bool TRANSPOSED, bool DOCUMENTS>
DEVICE void cuda_attention_mask(float scores[N / 8][4], int first_row, int first_column,
                                const Attention &work) {
    int window = work.window;
    int row = first_row + lane_index() / 4, column = first_column + lane_index() % 4 * 2;
    UNROLL
    for (int n = 0; n < N / 8; n++) {
        UNROLL
        for (int i = 0; i < 4; i++) {
            int y = row + i / 2 * 8, x = column + n * 8 + i % 2, query = TRANSPOSED ? x : y,
                key = TRANSPOSED ? y : x;
            bool hidden = key > query || (window > 0 && key <= query - window);
            if constexpr (DOCUMENTS) {
                hidden = key > query || key < cuda_attention_first_key<DOCUMENTS>(work, query);
            }
            if (hidden) { scores[n][i] = -INFINITY; }
        }
    }
}

// ---------------------------------------------------------------------------------------
// Tiles: rows of one head in shared memory, D columns and the padding. A warp has M times 16 rows.

template <int D> static constexpr int cuda_attention_stride = D + CUDA_ATTENTION_PADDING;

// Columns of scores that backward holds in registers at a time: as many as fit with the sums.
template <int D, int M> static constexpr int cuda_attention_chunk = D *M <= 80 ? 32 : 16;

// The rows of shared memory from the `own` rows of a block to stage 0. The tiles of the other
// side, 64 rows of two matrices, take turns in stages 0 and 1. Stage 1 lies on top of the own
// rows, which are no longer needed once they are in registers. At the end the own rows take up
// results, after a barrier.
static __host__ __device__ constexpr int cuda_attention_own_rows(int own) {
    return own > 2 * CUDA_ATTENTION_TILE ? own : 2 * CUDA_ATTENTION_TILE;
}

// Starts to copy rows [first, first + ROWS) of a head, `stride` apart, to `tile`; rows
// from T on become 0. Called by the whole block.
template <int D, int ROWS>
DEVICE void cuda_attention_copy(__nv_bfloat16 *tile, const __nv_bfloat16 *head, unsigned stride, int first,
                                int T) {
    enum { PIECES = D / 8 };
    UNROLL
    for (int k = 0; k < ROWS * PIECES / CUDA_ATTENTION_THREADS; k++) {
        int i = k * CUDA_ATTENTION_THREADS + (int)threadIdx.x, row = i / PIECES, piece = i % PIECES;
        bool valid = first + row < T;
        // 32 bits, because offsets stay in registers from tile to tile.
        unsigned offset = (unsigned)(first + row) * stride + (unsigned)piece * 8;
        copy_async(tile + row * cuda_attention_stride<D> + piece * 8, head + (valid ? offset : 0), valid);
    }
}

// Loads 16 rows of a tile as the left operand of a product.
template <int D> DEVICE void cuda_attention_left(uint32_t left[D / 16][4], const __nv_bfloat16 *rows) {
    const __nv_bfloat16 *place = rows + lane_index() % 16 * cuda_attention_stride<D> + lane_index() / 16 * 8;
    UNROLL
    for (int k = 0; k < D / 16; k++) { matrix_load_x4<false>(left[k], place + k * 16); }
}

// scores (16 M, N) = left (16 M, D) times N rows of a tile, transposed.
template <int D, int M, int N>
DEVICE void cuda_attention_scores(float scores[M][N / 8][4], const uint32_t left[M][D / 16][4],
                                  const __nv_bfloat16 *rows) {
    int lane = lane_index();
    const __nv_bfloat16 *place =
        rows + (lane / 16 * 8 + lane % 8) * cuda_attention_stride<D> + lane / 8 % 2 * 8;
    UNROLL
    for (int i = 0; i < M * (N / 8) * 4; i++) { scores[i / (N / 2)][i / 4 % (N / 8)][i % 4] = 0.0f; }
    UNROLL
    for (int k = 0; k < D / 16; k++) {
        UNROLL
        for (int n = 0; n < N / 16; n++) {
            uint32_t right[4];
            matrix_load_x4<false>(right, place + n * 16 * cuda_attention_stride<D> + k * 16);
            UNROLL
            for (int m = 0; m < M; m++) {
                mma_m16n8k16(scores[m][2 * n], left[m][k], right);
                mma_m16n8k16(scores[m][2 * n + 1], left[m][k], right + 2);
            }
        }
    }
}

// sums (16 M, D) += weights (16 M, N) times N rows of a tile. The weights, probabilities
// or ds, are rounded to bf16.
template <int D, int M, int N>
DEVICE void cuda_attention_collect(float sums[M][D / 8][4], const float weights[M][N / 8][4],
                                   const __nv_bfloat16 *rows) {
    const __nv_bfloat16 *place = rows + lane_index() % 16 * cuda_attention_stride<D> + lane_index() / 16 * 8;
    UNROLL
    for (int k = 0; k < N / 16; k++) {
        uint32_t left[M][4];
        UNROLL
        for (int m = 0; m < M; m++) {
            UNROLL
            for (int i = 0; i < 4; i++) {
                const float *pair = &weights[m][2 * k + i / 2][i % 2 * 2];
                left[m][i] = bf16_pair(pair[0], pair[1]);
            }
        }
        UNROLL
        for (int n = 0; n < D / 16; n++) {
            uint32_t right[4];
            matrix_load_x4<true>(right, place + k * 16 * cuda_attention_stride<D> + n * 16);
            UNROLL
            for (int m = 0; m < M; m++) {
                mma_m16n8k16(sums[m][2 * n], left[m], right);
                mma_m16n8k16(sums[m][2 * n + 1], left[m], right + 2);
            }
        }
    }
}

// Writes 16 rows of sums, each times its factor, as rows [first, first + 16) of the head,
// except those from T on. They pass through `rows`, 16 rows of a tile that belong to this
// warp and are no longer needed, so that global memory is written 16 bytes at a time.
template <int D>
DEVICE void cuda_attention_store(__nv_bfloat16 *head, size_t stride, int first, int T,
                                 const float sums[D / 8][4], const float factors[2], __nv_bfloat16 *rows) {
    enum { PIECES = D / 8 };
    int lane = lane_index(), g = lane / 4, t = lane % 4;
    UNROLL
    for (int n = 0; n < D / 8; n++) {
        UNROLL
        for (int r = 0; r < 2; r++) {
            float low = sums[n][2 * r] * factors[r], high = sums[n][2 * r + 1] * factors[r];
            *reinterpret_cast<uint32_t *>(rows + (g + r * 8) * cuda_attention_stride<D> + n * 8 + 2 * t) =
                bf16_pair(low, high);
        }
    }
    __syncwarp();
    for (int i = lane; i < 16 * PIECES; i += WARP) {
        int row = i / PIECES, piece = i % PIECES;
        if (first + row >= T) { continue; }
        auto pack = piece_load<8>((const __nv_bfloat16 *)rows + row * cuda_attention_stride<D> + piece * 8);
        store_16_bytes(head + (size_t)(first + row) * stride + piece * 8, &pack);
    }
}

// ---- Forward by tiles -----------------------------------------------------------------

// The running softmax of 16 queries of a warp. A lane has two of the rows, g and g + 8.
struct CudaAttentionRows {
    float maximum[2];
    float total[2]; // the sum of exp(score - maximum) over this lane's columns
};

// scores (16, TILE) become exp(score - maximum) for the new maximum; total and sums,
// collected under the old one, are rescaled to it.
template <int D>
DEVICE void cuda_attention_softmax(float scores[CUDA_ATTENTION_TILE / 8][4], float sums[D / 8][4],
                                   CudaAttentionRows &rows) {
    UNROLL
    for (int r = 0; r < 2; r++) {
        float maximum = rows.maximum[r];
        UNROLL
        for (int n = 0; n < CUDA_ATTENTION_TILE / 8; n++) {
            maximum = fmaxf(maximum, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
        }
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 1));
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, 2));
        // 0 until a key has been seen, because -infinity minus -infinity would be NaN.
        float base = maximum == -INFINITY ? 0.0f : maximum * CUDA_ATTENTION_LOG2E;
        float shrink = exp2_approximate(rows.maximum[r] * CUDA_ATTENTION_LOG2E - base),
              total = rows.total[r] * shrink;
        UNROLL
        for (int n = 0; n < CUDA_ATTENTION_TILE / 8; n++) {
            UNROLL
            for (int i = 2 * r; i < 2 * r + 2; i++) {
                scores[n][i] = exp2_approximate(scores[n][i] * CUDA_ATTENTION_LOG2E - base);
                total += scores[n][i];
            }
        }
        UNROLL
        for (int n = 0; n < D / 8; n++) {
            sums[n][2 * r] *= shrink;
            sums[n][2 * r + 1] *= shrink;
        }
        rows.maximum[r] = maximum;
        rows.total[r] = total;
    }
}

// Finishes 16 queries: divides by the sums of exponentials, writes output and logsumexp.
template <int D>
DEVICE void cuda_attention_finish(const Attention &work, const CudaAttentionPlace &place, int first,
                                  const float sums[D / 8][4], const CudaAttentionRows &rows,
                                  __nv_bfloat16 *own) {
    __nv_bfloat16 *output = reals<__nv_bfloat16>(work.output) + place.row * (size_t)work.channels;
    float *logsumexp = work.logsumexp + place.head * (size_t)work.T, factors[2];
    UNROLL
    for (int r = 0; r < 2; r++) {
        int query = first + lane_index() / 4 + r * 8;
        float total = rows.total[r];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        factors[r] = 1.0f / total;
        if (lane_index() % 4 == 0 && query < work.T) { logsumexp[query] = rows.maximum[r] + logf(total); }
    }
    cuda_attention_store<D>(output + place.column, (size_t)work.channels, first, work.T, sums, factors, own);
}

// Block (x, head, sample): 64 M queries. The last queries come first, because in a global
// layer they see most keys.
template <int D, int M, bool DOCUMENTS, bool GROUPED>
static __global__ void __launch_bounds__(CUDA_ATTENTION_THREADS)
    cuda_attention_forward_kernel(Attention work) {
    enum {
        TILE = CUDA_ATTENTION_TILE,
        QUERIES = 16 * M * CUDA_ATTENTION_WARPS,
        STRIDE = cuda_attention_stride<D>,
        OVERLAY = cuda_attention_own_rows(QUERIES) * STRIDE
    };
    __nv_bfloat16 *queries = (__nv_bfloat16 *)cuda_shared(), *keys = queries + OVERLAY,
                  *values = keys + TILE * STRIDE;
    CudaAttentionPlace place = cuda_attention_place<GROUPED>(work, false);
    int T = work.T, first = (int)(gridDim.x - 1 - blockIdx.x) * QUERIES, mine = warp_index() * 16 * M;
    int begin = cuda_attention_first_key<DOCUMENTS>(work, first) / TILE * TILE,
        end = first + QUERIES < T ? first + QUERIES : T;
    unsigned stride = place.stride;
    const __nv_bfloat16 *q = reals<__nv_bfloat16>(work.qkv) + place.row * stride + place.column,
                        *k = q + (int)place.keys, *v = k + (int)place.values; // int: fewer registers
    cuda_attention_copy<D, QUERIES>(queries, q, stride, first, T);
    cuda_attention_copy<D, TILE>(keys, k, stride, begin, T);
    cuda_attention_copy<D, TILE>(values, v, stride, begin, T);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    uint32_t left[M][D / 16][4];
    float sums[M][D / 8][4] = {};
    CudaAttentionRows rows[M];
    UNROLL
    for (int m = 0; m < M; m++) {
        cuda_attention_left<D>(left[m], queries + (mine + m * 16) * STRIDE);
        rows[m] = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
    }
    for (int key = begin, stage = 0; key < end; key += TILE, stage ^= 1) {
        copy_async_wait<0>(); // this stage has arrived; after the barrier no thread reads the other one
        __syncthreads();
        if (key + TILE < end) {
            cuda_attention_copy<D, TILE>(keys - (stage ^ 1) * OVERLAY, k, stride, key + TILE, T);
            cuda_attention_copy<D, TILE>(values - (stage ^ 1) * OVERLAY, v, stride, key + TILE, T);
            copy_async_commit();
        }
        CudaAttentionBand band = cuda_attention_band<DOCUMENTS>(first + mine, 16 * M, key, TILE, work);
        if (band == CUDA_ATTENTION_OUTSIDE) { continue; }
        float scores[M][TILE / 8][4];
        cuda_attention_scores<D, M, TILE>(scores, left, keys - stage * OVERLAY);
        UNROLL
        for (int m = 0; m < M; m++) {
            if (band == CUDA_ATTENTION_EDGE) {
                cuda_attention_mask<TILE, false, DOCUMENTS>(scores[m], first + mine + m * 16, key, work);
            }
            cuda_attention_softmax<D>(scores[m], sums[m], rows[m]);
        }
        cuda_attention_collect<D, M, TILE>(sums, scores, values - stage * OVERLAY);
    }
    __syncthreads(); // stage 1 is no longer read: there the own rows take up results
    UNROLL
    for (int m = 0; m < M; m++) {
        cuda_attention_finish<D>(work, place, first + mine + m * 16, sums[m], rows[m],
                                 queries + (mine + m * 16) * STRIDE);
    }
}

// ---------------------------------------------------------------------------------------
// Backward: ds = p (dp - delta) with p = exp(s - logsumexp), dp = dO v, and delta =
// sum(dO O) of a row, which equals sum(p dp). The scratch holds the deltas (B, H, T)

// Writes deltas. A GROUP of lanes shares a row, WIDTH elements at a time.
template <typename R, int GROUP, int WIDTH>
static __global__ void cuda_attention_delta_kernel(Attention work) {
    CudaAttentionPlace place = cuda_attention_place<false>(work, false);
    int T = work.T, D = work.channels / work.heads, lane = (int)threadIdx.x % GROUP;
    int row = (int)(blockIdx.x * blockDim.x + threadIdx.x) / GROUP;
    size_t start = (place.row + (size_t)row) * (size_t)work.channels + place.column;
    float sum = 0.0f;
    for (int d = lane * WIDTH; row < T && d < D; d += GROUP * WIDTH) {
        const R *a = reals<R>(work.d_output) + start + d, *b = reals<R>(work.output) + start + d;
        if constexpr (WIDTH == 1) {
            sum += to_float(*a) * to_float(*b);
        } else {
            float a_values[WIDTH], b_values[WIDTH];
            piece_unpack(a_values, piece_load<WIDTH>(a));
            piece_unpack(b_values, piece_load<WIDTH>(b));
            UNROLL
            for (int i = 0; i < WIDTH; i++) { sum += a_values[i] * b_values[i]; }
        }
    }
    for (int lanes = GROUP / 2; lanes > 0; lanes /= 2) { sum += __shfl_xor_sync(0xffffffffu, sum, lanes); }
    if (row < T && lane == 0) { work.scratch[place.head * (size_t)T + row] = sum; }
}

// Writes 16 M rows of sums as rows [first, first + 16 M) of the head, as cuda_attention_store does.
template <int D, int M>
DEVICE void cuda_attention_store_all(__nv_bfloat16 *head, size_t stride, int first, int T,
                                     const float sums[M][D / 8][4], __nv_bfloat16 *rows) {
    const float factors[2] = {1.0f, 1.0f};
    UNROLL
    for (int m = 0; m < M; m++) {
        cuda_attention_store<D>(head, stride, first + m * 16, T, sums[m], factors,
                                rows + m * 16 * cuda_attention_stride<D>);
    }
}

// One p from its s. log2_sumexp: the logsumexp divided by log(2).
DEVICE float cuda_attention_probability(float score, float log2_sumexp) {
    return exp2_approximate(score * CUDA_ATTENTION_LOG2E - log2_sumexp);
}

// d_queries += ds K, for 16 M queries and 64 keys.
template <int D, int M, bool DOCUMENTS>
DEVICE void cuda_attention_d_queries_tile(float d_queries[M][D / 8][4], const uint32_t q[M][D / 16][4],
                                          const uint32_t d_output[M][D / 16][4], const __nv_bfloat16 *keys,
                                          const __nv_bfloat16 *values, const float log2_sumexp[M][2],
                                          const float deltas[M][2], int query, int key,
                                          const Attention &work) {
    enum { CHUNK = cuda_attention_chunk<D, M> };
    for (int c = 0; c < CUDA_ATTENTION_TILE; c += CHUNK) {
        CudaAttentionBand band = cuda_attention_band<DOCUMENTS>(query, 16 * M, key + c, CHUNK, work);
        if (band == CUDA_ATTENTION_OUTSIDE) { continue; }
        float scores[M][CHUNK / 8][4], d_scores[M][CHUNK / 8][4];
        cuda_attention_scores<D, M, CHUNK>(scores, q, keys + c * cuda_attention_stride<D>);
        cuda_attention_scores<D, M, CHUNK>(d_scores, d_output, values + c * cuda_attention_stride<D>);
        UNROLL
        for (int m = 0; m < M; m++) {
            if (band == CUDA_ATTENTION_EDGE) {
                cuda_attention_mask<CHUNK, false, DOCUMENTS>(scores[m], query + m * 16, key + c, work);
            }
            UNROLL
            for (int i = 0; i < CHUNK / 2; i++) {
                float p = cuda_attention_probability(scores[m][i / 4][i % 4], log2_sumexp[m][i % 4 / 2]);
                d_scores[m][i / 4][i % 4] = p * (d_scores[m][i / 4][i % 4] - deltas[m][i % 4 / 2]);
            }
        }
        cuda_attention_collect<D, M, CHUNK>(d_queries, d_scores, keys + c * cuda_attention_stride<D>);
    }
}

// Block (x, head, sample): 64 M queries, the last ones first, as in forward.
template <int D, int M, bool DOCUMENTS, bool GROUPED>
static __global__ void __launch_bounds__(CUDA_ATTENTION_THREADS)
    cuda_attention_d_queries_kernel(Attention work) {
    enum {
        TILE = CUDA_ATTENTION_TILE,
        QUERIES = 16 * M * CUDA_ATTENTION_WARPS,
        STRIDE = cuda_attention_stride<D>,
        OVERLAY = cuda_attention_own_rows(2 * QUERIES) * STRIDE
    };
    __nv_bfloat16 *queries = (__nv_bfloat16 *)cuda_shared(), *d_outputs = queries + QUERIES * STRIDE,
                  *keys = queries + OVERLAY, *values = keys + TILE * STRIDE;
    CudaAttentionPlace place = cuda_attention_place<GROUPED>(work, false);
    int T = work.T, first = (int)(gridDim.x - 1 - blockIdx.x) * QUERIES, mine = warp_index() * 16 * M;
    int begin = cuda_attention_first_key<DOCUMENTS>(work, first) / TILE * TILE,
        end = first + QUERIES < T ? first + QUERIES : T;
    unsigned C = (unsigned)work.channels, stride = place.stride;
    const __nv_bfloat16 *q = reals<__nv_bfloat16>(work.qkv) + place.row * stride + place.column,
                        *k = q + place.keys, *v = k + place.values;
    cuda_attention_copy<D, QUERIES>(queries, q, stride, first, T);
    cuda_attention_copy<D, QUERIES>(
        d_outputs, reals<__nv_bfloat16>(work.d_output) + place.row * C + place.column, C, first, T);
    cuda_attention_copy<D, TILE>(keys, k, stride, begin, T);
    cuda_attention_copy<D, TILE>(values, v, stride, begin, T);
    copy_async_commit();
    float log2_sumexp[M][2], row_deltas[M][2], sums[M][D / 8][4] = {};
    UNROLL
    for (int i = 0; i < 2 * M; i++) {
        int row = first + mine + lane_index() / 4 + i * 8;
        size_t number = place.head * (size_t)T + row;
        log2_sumexp[i / 2][i % 2] = row < T ? work.logsumexp[number] * CUDA_ATTENTION_LOG2E : 0.0f;
        row_deltas[i / 2][i % 2] = row < T ? work.scratch[number] : 0.0f;
    }
    copy_async_wait<0>();
    __syncthreads();
    uint32_t left_q[M][D / 16][4], left_d[M][D / 16][4];
    UNROLL
    for (int m = 0; m < M; m++) {
        cuda_attention_left<D>(left_q[m], queries + (mine + m * 16) * STRIDE);
        cuda_attention_left<D>(left_d[m], d_outputs + (mine + m * 16) * STRIDE);
    }
    for (int key = begin, stage = 0; key < end; key += TILE, stage ^= 1) {
        copy_async_wait<0>(); // this stage has arrived; after the barrier no thread reads the other one
        __syncthreads();
        if (key + TILE < end) {
            cuda_attention_copy<D, TILE>(keys - (stage ^ 1) * OVERLAY, k, stride, key + TILE, T);
            cuda_attention_copy<D, TILE>(values - (stage ^ 1) * OVERLAY, v, stride, key + TILE, T);
            copy_async_commit();
        }
        cuda_attention_d_queries_tile<D, M, DOCUMENTS>(sums, left_q, left_d, keys - stage * OVERLAY,
                                                       values - stage * OVERLAY, log2_sumexp, row_deltas,
                                                       first + mine, key, work);
    }
    __syncthreads(); // stage 1 is no longer read: there the own rows take up results
    cuda_attention_store_all<D, M>(reals<__nv_bfloat16>(work.d_qkv) + place.row * (size_t)work.d_qkv_stride +
                                       place.column,
                                   (size_t)work.d_qkv_stride, first + mine, T, sums, queries + mine * STRIDE);
}

// This thread's part of the numbers that go with 64 queries: the first half of the block
// loads logsumexp, divided by log(2), the second half deltas. Queries from T on add
// nothing whatever their probabilities, because their rows are 0.
DEVICE float cuda_attention_row_number(const float *logsumexp, const float *deltas, int first, int T) {
    int query = first + (int)threadIdx.x % CUDA_ATTENTION_TILE;
    bool sums = (int)threadIdx.x < CUDA_ATTENTION_TILE;
    if (query >= T) { return 0.0f; }
    return sums ? logsumexp[query] * CUDA_ATTENTION_LOG2E : deltas[query];
}

// The two of a row of numbers that belong to columns 2t, 2t+1 of a tile of 8 columns.
DEVICE float2 cuda_attention_columns(const float *numbers, int column) {
    return *reinterpret_cast<const float2 *>(numbers + column + lane_index() % 4 * 2);
}

// d_values += p^T dO and d_keys += ds^T Q, for 16 M keys and 64 queries. numbers: 64
// times the logsumexp divided by log(2), then 64 deltas. p is used up before dp is made,
// because there are not enough registers for both at a time.
template <int D, int M, bool DOCUMENTS>
DEVICE void cuda_attention_d_keys_tile(float d_keys[M][D / 8][4], float d_values[M][D / 8][4],
                                       const uint32_t k[M][D / 16][4], const uint32_t v[M][D / 16][4],
                                       const __nv_bfloat16 *queries, const __nv_bfloat16 *d_outputs,
                                       const float *numbers, int query, int key, const Attention &work) {
    enum { CHUNK = cuda_attention_chunk<D, M> };
    for (int c = 0; c < CUDA_ATTENTION_TILE; c += CHUNK) {
        const __nv_bfloat16 *q_rows = queries + c * cuda_attention_stride<D>,
                            *d_rows = d_outputs + c * cuda_attention_stride<D>;
        CudaAttentionBand band = cuda_attention_band<DOCUMENTS>(query + c, CHUNK, key, 16 * M, work);
        if (band == CUDA_ATTENTION_OUTSIDE) { continue; }
        float scores[M][CHUNK / 8][4], d_scores[M][CHUNK / 8][4];
        cuda_attention_scores<D, M, CHUNK>(scores, k, q_rows);
        UNROLL
        for (int m = 0; m < M && band == CUDA_ATTENTION_EDGE; m++) {
            cuda_attention_mask<CHUNK, true, DOCUMENTS>(scores[m], key + m * 16, query + c, work);
        }
        UNROLL
        for (int n = 0; n < CHUNK / 8; n++) {
            float2 log2_sumexp = cuda_attention_columns(numbers, c + n * 8);
            UNROLL
            for (int i = 0; i < 4 * M; i++) {
                float *score = &scores[i / 4][n][i % 4];
                *score = cuda_attention_probability(*score, i % 2 == 0 ? log2_sumexp.x : log2_sumexp.y);
            }
        }
        cuda_attention_collect<D, M, CHUNK>(d_values, scores, d_rows);
        cuda_attention_scores<D, M, CHUNK>(d_scores, v, d_rows);
        UNROLL
        for (int n = 0; n < CHUNK / 8; n++) {
            float2 deltas = cuda_attention_columns(numbers + CUDA_ATTENTION_TILE, c + n * 8);
            UNROLL
            for (int i = 0; i < 4 * M; i++) {
                float *d_score = &d_scores[i / 4][n][i % 4];
                *d_score = scores[i / 4][n][i % 4] * (*d_score - (i % 2 == 0 ? deltas.x : deltas.y));
            }
        }
        cuda_attention_collect<D, M, CHUNK>(d_keys, d_scores, q_rows);
    }
}

// Block (x, head of keys, sample): 64 M keys. The first keys come first, because in a global
// layer most queries see them. Heads of queries that share the keys come one behind the other.
template <int D, int M, bool DOCUMENTS, bool GROUPED>
static __global__ void __launch_bounds__(CUDA_ATTENTION_THREADS)
    cuda_attention_d_keys_kernel(Attention work) {
    enum {
        TILE = CUDA_ATTENTION_TILE,
        KEYS = 16 * M * CUDA_ATTENTION_WARPS,
        STRIDE = cuda_attention_stride<D>,
        OVERLAY = cuda_attention_own_rows(2 * KEYS) * STRIDE
    };
    __nv_bfloat16 *keys = (__nv_bfloat16 *)cuda_shared(), *values = keys + KEYS * STRIDE,
                  *queries = keys + OVERLAY, *d_outputs = queries + TILE * STRIDE;
    float *numbers = (float *)(d_outputs + TILE * STRIDE);
    CudaAttentionPlace place = cuda_attention_place<GROUPED>(work, true);
    int T = work.T, first = (int)blockIdx.x * KEYS, mine = warp_index() * 16 * M;
    int end = cuda_attention_end_query<DOCUMENTS>(work, first + KEYS - 1);
    unsigned C = (unsigned)work.channels, stride = place.stride;
    const __nv_bfloat16 *q = reals<__nv_bfloat16>(work.qkv) + place.row * stride + place.column,
                        *d_o = reals<__nv_bfloat16>(work.d_output) + place.row * C + place.column;
    const float *logsumexp = work.logsumexp + place.head * (size_t)T,
                *deltas = work.scratch + place.head * (size_t)T;
    cuda_attention_copy<D, KEYS>(keys, q + place.keys, stride, first, T);
    cuda_attention_copy<D, KEYS>(values, q + place.keys + place.values, stride, first, T);
    cuda_attention_copy<D, TILE>(queries, q, stride, first, T);
    cuda_attention_copy<D, TILE>(d_outputs, d_o, C, first, T);
    copy_async_commit();
    numbers[threadIdx.x] = cuda_attention_row_number(logsumexp, deltas, first, T);
    copy_async_wait<0>();
    __syncthreads();
    uint32_t left_k[M][D / 16][4], left_v[M][D / 16][4];
    float d_keys[M][D / 8][4] = {}, d_values[M][D / 8][4] = {};
    UNROLL
    for (int m = 0; m < M; m++) {
        cuda_attention_left<D>(left_k[m], keys + (mine + m * 16) * STRIDE);
        cuda_attention_left<D>(left_v[m], values + (mine + m * 16) * STRIDE);
    }
    for (int query = first, stage = 0, head = 0, next; query < end; query = next, stage ^= 1) {
        copy_async_wait<0>(); // this stage has arrived; after the barrier no thread reads the other one
        __syncthreads();
        next = query + TILE;
        if (next >= end && ++head < place.group) { next = first; }
        bool more = next < end;
        float number = 0.0f;
        if (more) {
            cuda_attention_copy<D, TILE>(queries - (stage ^ 1) * OVERLAY, q + head * D, stride, next, T);
            cuda_attention_copy<D, TILE>(d_outputs - (stage ^ 1) * OVERLAY, d_o + head * D, C, next, T);
            copy_async_commit();
            number = cuda_attention_row_number(logsumexp + head * T, deltas + head * T, next, T);
        } // stored only after the products, which hide the wait for it
        cuda_attention_d_keys_tile<D, M, DOCUMENTS>(
            d_keys, d_values, left_k, left_v, queries - stage * OVERLAY, d_outputs - stage * OVERLAY,
            numbers + stage * CUDA_ATTENTION_THREADS, query, first + mine, work);
        if (more) { numbers[(stage ^ 1) * CUDA_ATTENTION_THREADS + (int)threadIdx.x] = number; }
    }
    __syncthreads(); // stage 1 is no longer read: there the own rows take up results
    __nv_bfloat16 *d_k =
        reals<__nv_bfloat16>(work.d_qkv) + place.row * (size_t)work.d_qkv_stride + place.column + place.keys;
    cuda_attention_store_all<D, M>(d_k, (size_t)work.d_qkv_stride, first + mine, T, d_keys,
                                   keys + mine * STRIDE);
    cuda_attention_store_all<D, M>(d_k + place.values, (size_t)work.d_qkv_stride, first + mine, T, d_values,
                                   values + mine * STRIDE);
}

// ---- Rows: a lane has the PARTS columns of the head from `lane` on, 32 apart ----------

template <typename R, int PARTS>
DEVICE void cuda_attention_row_load(float row[PARTS], const R *place, int D) {
    UNROLL
    for (int i = 0; i < PARTS; i++) {
        int d = lane_index() + i * WARP;
        row[i] = d < D ? to_float(place[d]) : 0.0f;
    }
}

template <typename R, int PARTS>
DEVICE void cuda_attention_row_store(R *place, const float row[PARTS], float factor, int D) {
    UNROLL
    for (int i = 0; i < PARTS; i++) {
        int d = lane_index() + i * WARP;
        if (d < D) { place[d] = from_float<R>(row[i] * factor); }
    }
}

template <int PARTS> DEVICE float cuda_attention_row_product(const float a[PARTS], const float b[PARTS]) {
    float sum = 0.0f;
    UNROLL
    for (int i = 0; i < PARTS; i++) { sum += a[i] * b[i]; }
    return warp_sum(sum);
}

template <int PARTS>
DEVICE void cuda_attention_row_add(float sums[PARTS], float factor, const float row[PARTS]) {
    UNROLL
    for (int i = 0; i < PARTS; i++) { sums[i] += factor * row[i]; }
}

// A warp does one query.
template <typename R, int PARTS, bool DOCUMENTS>
static __global__ void cuda_attention_forward_rows_kernel(Attention work) {
    CudaAttentionPlace place = cuda_attention_place<true>(work, false);
    int T = work.T, D = work.channels / work.heads,
        query = (int)blockIdx.x * CUDA_ATTENTION_WARPS + warp_index();
    if (query >= T) { return; } // all lanes of the warp
    size_t C = (size_t)work.channels, stride = place.stride;
    const R *head = reals<R>(work.qkv) + place.row * stride + place.column, *keys = head + place.keys;
    float q[PARTS], row[PARTS], sums[PARTS] = {}, maximum = -INFINITY, total = 0.0f;
    cuda_attention_row_load<R, PARTS>(q, head + (size_t)query * stride, D);
    for (int key = cuda_attention_first_key<DOCUMENTS>(work, query); key <= query; key++) {
        cuda_attention_row_load<R, PARTS>(row, keys + (size_t)key * stride, D);
        float score = cuda_attention_row_product<PARTS>(q, row), next = fmaxf(maximum, score);
        float base = next == -INFINITY ? 0.0f : next, shrink = expf(maximum - base), p = expf(score - base);
        cuda_attention_row_load<R, PARTS>(row, keys + (size_t)key * stride + place.values, D);
        UNROLL
        for (int i = 0; i < PARTS; i++) { sums[i] = sums[i] * shrink + p * row[i]; }
        total = total * shrink + p;
        maximum = next;
    }
    cuda_attention_row_store<R, PARTS>(reals<R>(work.output) + (place.row + (size_t)query) * C + place.column,
                                       sums, 1.0f / total, D);
    if (lane_index() == 0) { work.logsumexp[place.head * (size_t)T + query] = maximum + logf(total); }
}

// A warp does dQ of one query or, BY_KEY, dK and dV of one key, for one head of its queries after
// the other.
template <typename R, int PARTS, bool BY_KEY, bool DOCUMENTS>
static __global__ void cuda_attention_backward_rows_kernel(Attention work) {
    CudaAttentionPlace place = cuda_attention_place<true>(work, BY_KEY);
    int T = work.T, D = work.channels / work.heads, heads = BY_KEY ? place.group : 1,
        own = (int)blockIdx.x * CUDA_ATTENTION_WARPS + warp_index();
    if (own >= T) { return; } // all lanes of the warp
    int begin = BY_KEY ? own : cuda_attention_first_key<DOCUMENTS>(work, own),
        end = BY_KEY ? cuda_attention_end_query<DOCUMENTS>(work, own) : own + 1;
    size_t C = (size_t)work.channels, stride = place.stride, head_rows = place.head * (size_t)T;
    const R *head = reals<R>(work.qkv) + place.row * stride + place.column, *keys = head + place.keys,
            *d_output = reals<R>(work.d_output) + place.row * C + place.column;
    float q[PARTS], d_o[PARTS], k[PARTS], v[PARTS], sums[PARTS] = {}, d_v[PARTS] = {};
    auto load_query = [&](size_t query) {
        cuda_attention_row_load<R, PARTS>(q, head + query * stride, D);
        cuda_attention_row_load<R, PARTS>(d_o, d_output + query * C, D);
    };
    auto load_key = [&](size_t key) {
        cuda_attention_row_load<R, PARTS>(k, keys + key * stride, D);
        cuda_attention_row_load<R, PARTS>(v, keys + key * stride + place.values, D);
    };
    BY_KEY ? load_key((size_t)own) : load_query((size_t)own);
    for (; heads > 0; heads--, head += D, d_output += D, head_rows += (size_t)T) {
        for (int other = begin; other < end; other++) {
            size_t query = (size_t)(BY_KEY ? other : own);
            BY_KEY ? load_query((size_t)other) : load_key((size_t)other);
            float p = expf(cuda_attention_row_product<PARTS>(q, k) - work.logsumexp[head_rows + query]),
                  d_score = p * (cuda_attention_row_product<PARTS>(d_o, v) - work.scratch[head_rows + query]);
            cuda_attention_row_add<PARTS>(sums, d_score, BY_KEY ? q : k);
            if (BY_KEY) { cuda_attention_row_add<PARTS>(d_v, p, d_o); }
        }
    }
    R *target = reals<R>(work.d_qkv) + (place.row + (size_t)own) * (size_t)work.d_qkv_stride + place.column +
                (BY_KEY ? place.keys : 0);
    cuda_attention_row_store<R, PARTS>(target, sums, 1.0f, D);
    if (BY_KEY) { cuda_attention_row_store<R, PARTS>(target + place.values, d_v, 1.0f, D); }
}

// ---- Launches -------------------------------------------------------------------------

// Bytes of shared memory that a block uses whose own rows are `own`.
static constexpr size_t cuda_attention_bytes(int D, int own) {
    return (size_t)(cuda_attention_own_rows(own) + 2 * CUDA_ATTENTION_TILE) *
           (size_t)(D + CUDA_ATTENTION_PADDING) * sizeof(__nv_bfloat16);
}

// The same for each kernel of the backward pass.
static constexpr size_t cuda_attention_d_queries_bytes(int D, int tiles) {
    return cuda_attention_bytes(D, 2 * 16 * tiles * CUDA_ATTENTION_WARPS);
}
static constexpr size_t cuda_attention_d_keys_bytes(int D, int tiles) {
    return cuda_attention_d_queries_bytes(D, tiles) + 2 * CUDA_ATTENTION_THREADS * sizeof(float);
}

// Blocks of `rows` rows of one head of queries; by_key: of keys.
static inline dim3 cuda_attention_grid(const Attention &work, int rows, bool by_key = false) {
    unsigned heads = (unsigned)(work.heads / (by_key ? attention_group(&work) : 1));
    return dim3(cuda_blocks((size_t)work.T, (size_t)rows), heads, (unsigned)work.B);
}

// If registers allow it, a warp has 32 rows: what it reads from shared memory then serves twice.
template <int D, bool DOCUMENTS, bool GROUPED>
static inline void cuda_attention_forward_tiles(Stream *stream, const Attention &work) {
    enum { M = D <= 64 ? 2 : 1, QUERIES = 16 * M * CUDA_ATTENTION_WARPS };
    constexpr size_t shared = cuda_attention_bytes(D, QUERIES);
    static_assert(shared <= CUDA_ATTENTION_SHARED_BYTES, "more than a desktop GPU has");
    cuda_launch(stream, cuda_attention_forward_kernel<D, M, DOCUMENTS, GROUPED>,
                cuda_attention_grid(work, QUERIES), dim3(CUDA_ATTENTION_THREADS), shared, work);
}

template <typename R, int GROUP, int WIDTH>
static inline void cuda_attention_deltas(Stream *stream, const Attention &work) {
    cuda_launch(stream, cuda_attention_delta_kernel<R, GROUP, WIDTH>,
                cuda_attention_grid(work, CUDA_ATTENTION_THREADS / GROUP), dim3(CUDA_ATTENTION_THREADS), 0,
                work);
}

// QUERIES, KEYS: the 16-row tiles of a warp in each kernel: two if registers allow it, so that
// what it reads from shared memory serves twice. dK and dV need twice the sums. Results do not
// depend on these numbers.
template <int D, bool DOCUMENTS, bool GROUPED, int QUERIES = D <= 80 ? 2 : 1, int KEYS = D <= 64 ? 2 : 1>
static inline void cuda_attention_backward_tiles(Stream *stream, const Attention &work) {
    enum { GROUP = D <= 16 ? 2 : D <= 32 ? 4 : D <= 64 ? 8 : 16 }; // lanes with 8 elements each, a power of 2
    enum { WARP_ROWS = 16 * CUDA_ATTENTION_WARPS };
    static_assert(cuda_attention_d_queries_bytes(D, QUERIES) <= CUDA_ATTENTION_SHARED_BYTES &&
                      cuda_attention_d_keys_bytes(D, KEYS) <= CUDA_ATTENTION_SHARED_BYTES,
                  "more than a desktop GPU has");
    dim3 block(CUDA_ATTENTION_THREADS);
    cuda_attention_deltas<__nv_bfloat16, GROUP, 8>(stream, work);
    cuda_launch(stream, cuda_attention_d_queries_kernel<D, QUERIES, DOCUMENTS, GROUPED>,
                cuda_attention_grid(work, QUERIES * WARP_ROWS), block,
                cuda_attention_d_queries_bytes(D, QUERIES), work);
    cuda_launch(stream, cuda_attention_d_keys_kernel<D, KEYS, DOCUMENTS, GROUPED>,
                cuda_attention_grid(work, KEYS * WARP_ROWS, true), block,
                cuda_attention_d_keys_bytes(D, KEYS), work);
}

template <typename R, int PARTS, bool DOCUMENTS>
static inline void cuda_attention_rows(Stream *stream, const Attention &work) {
    dim3 grid = cuda_attention_grid(work, CUDA_ATTENTION_WARPS), block(CUDA_ATTENTION_THREADS);
    if (work.d_qkv == NULL) {
        cuda_launch(stream, cuda_attention_forward_rows_kernel<R, PARTS, DOCUMENTS>, grid, block, 0, work);
        return;
    }
    cuda_attention_deltas<R, WARP, 1>(stream, work);
    cuda_launch(stream, cuda_attention_backward_rows_kernel<R, PARTS, false, DOCUMENTS>, grid, block, 0,
                work);
    cuda_launch(stream, cuda_attention_backward_rows_kernel<R, PARTS, true, DOCUMENTS>,
                cuda_attention_grid(work, CUDA_ATTENTION_WARPS, true), block, 0, work);
}

template <int D, bool DOCUMENTS, bool GROUPED>
static inline void cuda_attention_tiles(Stream *stream, const Attention &work) {
    (work.d_qkv == NULL ? cuda_attention_forward_tiles<D, DOCUMENTS, GROUPED>
                        : cuda_attention_backward_tiles<D, DOCUMENTS, GROUPED>)(stream, work);
}

// By tiles, if the heads have one of these sizes and all rows are aligned; otherwise by rows.
// Within a sample, kernels count elements in 32 bits.
template <typename R, bool DOCUMENTS, bool GROUPED, int... SIZES>
static inline void cuda_attention_choose(Stream *stream, const Attention &work) {
    int D = work.channels / work.heads;
    size_t C = (size_t)work.channels, stride = (size_t)attention_stride(&work);
    assert(work.channels % work.heads == 0 && D <= CUDA_ATTENTION_MAX_HEAD && work.window >= 0);
    assert((size_t)work.T * stride <= UINT32_MAX);
    bool fits = work.precision == PRECISION_BF16 && pack_fits(stride, reals<__nv_bfloat16>(work.qkv)) &&
                pack_fits(C, reals<__nv_bfloat16>(work.output), reals<__nv_bfloat16>(work.d_output)) &&
                pack_fits((size_t)work.d_qkv_stride, reals<__nv_bfloat16>(work.d_qkv));
    if (fits &&
        ((D == SIZES && (cuda_attention_tiles<SIZES, DOCUMENTS, GROUPED>(stream, work), true)) || ...)) {
        return;
    }
    (D <= 2 * WARP ? cuda_attention_rows<R, 2, DOCUMENTS> : cuda_attention_rows<R, 8, DOCUMENTS>)(stream,
                                                                                                  work);
}

template <typename R, bool GROUPED>
static inline void cuda_attention_kind(Stream *stream, const Attention &work) {
    (work.starts == NULL
         ? cuda_attention_choose<R, false, GROUPED, 16, 32, 48, 64, 80, 96, 128>
         : cuda_attention_choose<R, true, GROUPED, 16, 32, 48, 64, 80, 96, 128>)(stream, work);
}

template <typename R> static inline void cuda_attention(Stream *stream, const Attention *work) {
    (attention_group(work) > 1 ? cuda_attention_kind<R, true> : cuda_attention_kind<R, false>)(stream, *work);
}
