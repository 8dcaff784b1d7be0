// attention.h: causal self-attention, global or within a local window, forward and
// backward.
//
// For each sample and head, with q, k, v (T, D) and D = C / H:
//
//   s[i][j] = q[i] . k[j]                 GPT-Neo does not scale scores by 1/sqrt(D)
//   p[i] = softmax of s[i] over visible j: j <= i and, with a window, j > i - window
//   output[i] = sum over j of p[i][j] v[j]
//   logsumexp[i] = log(sum over j of exp(s[i][j]))
//
//   backward, from dO = d_output and with dp[i][j] = dO[i] . v[j]:
//   ds[i][j] = p[i][j] (dp[i][j] - sum over j of p[i][j] dp[i][j])
//   d_q[i] = sum over j of ds[i][j] k[j]
//   d_k[j] = sum over i of ds[i][j] q[i]
//   d_v[j] = sum over i of p[i][j] dO[i]
//
// qkv and d_qkv are (B, T, 3C), where the fused projection leaves them: q, k, v of a
// position side by side, head h at columns h D of each. output (B, T, C), logsumexp (B,
// H, T).
//
// A task is one (sample, head). It takes queries in blocks of ATTENTION_ROWS and computes
// scores only for the keys that a block may see; so keys outside the window cost nothing,
// and a task needs O(T) memory for each row of a block. Probabilities are never stored:
// backward computes the scores again, block by block, and p = exp(s - logsumexp). The
// limit is the matrix products (matmul.h), then the exponential. Every sum runs inside
// one task, in order.
#ifndef ACCO_KERNELS_CPU_ATTENTION_H
#define ACCO_KERNELS_CPU_ATTENTION_H

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "kernels/cpu/matmul.h"
#include "kernels/cpu/vector_math.h"
#include "runtime/device.h"

enum { ATTENTION_ROWS = 64 };

typedef struct Attention {
    float *output;         // forward (B, T, C)
    float *logsumexp;      // (B, H, T)
    const float *qkv;      // (B, T, 3C)
    float *d_qkv;          // backward (B, T, 3C), rows d_qkv_stride apart
    const float *d_output; // backward (B, T, C)
    float *workspace;      // attention_workspace_floats
    int B, T, channels, heads, d_qkv_stride;
    int window; // keys that a query sees, its own included; 0: all up to its own
} Attention;

// Workspace for a pool of `threads`: two blocks of scores for each.
static inline size_t attention_workspace_floats(int T, int threads) {
    return (size_t)threads * 2 * ATTENTION_ROWS * (size_t)T;
}

// A block of queries of one head, and the keys that some of them see.
typedef struct AttentionBlock {
    int first, rows;     // queries [first, first + rows)
    int keys, key_count; // keys [keys, keys + key_count)
    int window, D, stride;
    const float *q, *k, *v; // the block's first query, key and value; rows are `stride` apart
} AttentionBlock;

static inline AttentionBlock attention_block(const Attention *work, int sample, int head, int first) {
    AttentionBlock block;
    int C = work->channels, D = C / work->heads;
    block.first = first;
    block.rows = work->T - first < ATTENTION_ROWS ? work->T - first : ATTENTION_ROWS;
    block.keys = work->window > 0 && first - work->window + 1 > 0 ? first - work->window + 1 : 0;
    block.key_count = first + block.rows - block.keys;
    block.window = work->window;
    block.D = D;
    block.stride = 3 * C;
    const float *base =
        work->qkv + (size_t)sample * (size_t)work->T * 3 * (size_t)C + (size_t)head * (size_t)D;
    block.q = base + (size_t)first * 3 * (size_t)C;
    block.k = base + (size_t)block.keys * 3 * (size_t)C + C;
    block.v = block.k + C;
    return block;
}

// The columns [*begin, *end) of the block's scores that query `row` of the block sees.
static inline void attention_visible(const AttentionBlock *block, int row, int *begin, int *end) {
    int query = block->first + row;
    int oldest = block->window > 0 && query - block->window + 1 > 0 ? query - block->window + 1 : 0;
    *begin = oldest - block->keys;
    *end = query + 1 - block->keys;
}

// result (M, N) = or += a (M, K) b (K, N), on the calling thread.
static inline void attention_matmul(float *result, int result_stride, const float *a, int a_stride,
                                    bool a_transposed, const float *b, int b_stride, bool b_transposed, int M,
                                    int N, int K, bool accumulate) {
    Matmul work = matmul_describe(result, result_stride, a, a_stride, a_transposed, b, b_stride, b_transposed,
                                  M, N, K, accumulate);
    matmul_block(&work);
}

// Turns a row of scores into probabilities in place, 0 outside [begin, end). Returns its
// logsumexp.
static inline float attention_softmax(float *scores, int begin, int end, int columns) {
    float maximum = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : maximum)
    for (int j = begin; j < end; j++) { maximum = scores[j] > maximum ? scores[j] : maximum; }
#pragma omp simd reduction(+ : sum)
    for (int j = begin; j < end; j++) {
        float e = vector_exp(scores[j] - maximum);
        scores[j] = e;
        sum += e;
    }
    float scale = 1.0f / sum;
    for (int j = begin; j < end; j++) { scores[j] *= scale; }
    for (int j = 0; j < begin; j++) { scores[j] = 0.0f; }
    for (int j = end; j < columns; j++) { scores[j] = 0.0f; }
    return maximum + logf(sum);
}

static inline void attention_forward_task(void *context, int task, int thread) {
    const Attention *work = (const Attention *)context;
    int T = work->T, C = work->channels, D = C / work->heads, sample = task / work->heads,
        head = task % work->heads;
    float *scores = work->workspace + (size_t)thread * 2 * ATTENTION_ROWS * (size_t)T;
    float *output = work->output + (size_t)sample * (size_t)T * (size_t)C + (size_t)head * (size_t)D;
    float *logsumexp = work->logsumexp + (size_t)task * (size_t)T;
    for (int first = 0; first < T; first += ATTENTION_ROWS) {
        AttentionBlock block = attention_block(work, sample, head, first);
        int keys = block.key_count, stride = block.stride;
        attention_matmul(scores, keys, block.q, stride, false, block.k, stride, true, block.rows, keys, D,
                         false);
        for (int row = 0; row < block.rows; row++) {
            int begin, end;
            attention_visible(&block, row, &begin, &end);
            logsumexp[first + row] = attention_softmax(scores + (size_t)row * (size_t)keys, begin, end, keys);
        }
        attention_matmul(output + (size_t)first * (size_t)C, C, scores, keys, false, block.v, stride, false,
                         block.rows, D, keys, false);
    }
}

static inline void cpu_attention_forward(Stream *stream, float *output, float *logsumexp, float *workspace,
                                         const float *qkv, int B, int T, int C, int heads, int window) {
    Attention work = {output, logsumexp, qkv, NULL, NULL, workspace, B, T, C, heads, 0, window};
    thread_pool_run(stream->pool, B * heads, attention_forward_task, &work);
}

// Turns a row of scores s into p = exp(s - logsumexp), and a row of dp into ds = p (dp -
// sum(p dp)), both 0 outside [begin, end).
static inline void attention_softmax_backward(float *__restrict__ scores, float *__restrict__ d_scores,
                                              float logsumexp, int begin, int end, int columns) {
    float product = 0.0f;
#pragma omp simd reduction(+ : product)
    for (int j = begin; j < end; j++) {
        float p = vector_exp(scores[j] - logsumexp);
        scores[j] = p;
        product += p * d_scores[j];
    }
    for (int j = begin; j < end; j++) { d_scores[j] = scores[j] * (d_scores[j] - product); }
    for (int j = 0; j < begin; j++) { scores[j] = d_scores[j] = 0.0f; }
    for (int j = end; j < columns; j++) { scores[j] = d_scores[j] = 0.0f; }
}

// A block of queries: writes their gradient and adds to those of the keys and values that
// they see. d_qkv: this head's columns in row 0 of this sample.
static inline void attention_backward_block(const Attention *work, const AttentionBlock *block, float *scores,
                                            float *d_qkv, const float *d_output, const float *logsumexp) {
    int C = work->channels, D = block->D, keys = block->key_count, stride = block->stride, rows = block->rows,
        d_stride = work->d_qkv_stride;
    float *d_scores = scores + ATTENTION_ROWS * (size_t)work->T;
    float *d_q = d_qkv + (size_t)block->first * (size_t)d_stride,
          *d_k = d_qkv + (size_t)block->keys * (size_t)d_stride + C, *d_v = d_k + C;
    attention_matmul(scores, keys, block->q, stride, false, block->k, stride, true, rows, keys, D, false);
    attention_matmul(d_scores, keys, d_output, C, false, block->v, stride, true, rows, keys, D, false);
    for (int row = 0; row < rows; row++) {
        int begin, end;
        size_t offset = (size_t)row * (size_t)keys;
        attention_visible(block, row, &begin, &end);
        attention_softmax_backward(scores + offset, d_scores + offset, logsumexp[row], begin, end, keys);
    }
    attention_matmul(d_v, d_stride, scores, keys, true, d_output, C, false, keys, D, rows, true);
    attention_matmul(d_q, d_stride, d_scores, keys, false, block->k, stride, false, rows, D, keys, false);
    attention_matmul(d_k, d_stride, d_scores, keys, true, block->q, stride, false, keys, D, rows, true);
}

static inline void attention_backward_task(void *context, int task, int thread) {
    const Attention *work = (const Attention *)context;
    int T = work->T, C = work->channels, D = C / work->heads, sample = task / work->heads,
        head = task % work->heads;
    size_t first_row = (size_t)sample * (size_t)T, head_offset = (size_t)head * (size_t)D,
           d_stride = (size_t)work->d_qkv_stride;
    float *scores = work->workspace + (size_t)thread * 2 * ATTENTION_ROWS * (size_t)T,
          *d_qkv = work->d_qkv + first_row * d_stride + head_offset;
    for (int t = 0; t < T; t++) { // several blocks of queries add to the same keys and values
        memset(d_qkv + (size_t)t * d_stride + C, 0, (size_t)D * sizeof *d_qkv);
        memset(d_qkv + (size_t)t * d_stride + 2 * C, 0, (size_t)D * sizeof *d_qkv);
    }
    for (int first = 0; first < T; first += ATTENTION_ROWS) {
        AttentionBlock block = attention_block(work, sample, head, first);
        attention_backward_block(work, &block, scores, d_qkv,
                                 work->d_output + (first_row + (size_t)first) * (size_t)C + head_offset,
                                 work->logsumexp + (size_t)task * (size_t)T + first);
    }
}

static inline void cpu_attention_backward(Stream *stream, float *d_qkv, int d_qkv_stride, float *workspace,
                                          const float *d_output, const float *qkv, const float *logsumexp,
                                          int B, int T, int C, int heads, int window) {
    Attention work = {NULL,  (float *)logsumexp, qkv,   d_qkv, d_output, workspace, B, T, C,
                      heads, d_qkv_stride,       window};
    thread_pool_run(stream->pool, B * heads, attention_backward_task, &work);
}

// ---------------------------------------------------------------------------------------
// Decoding: one query against the keys and values of all earlier positions

typedef struct AttentionDecode {
    float *output, *scores;             // (C), (H, positions)
    const float *query, *keys, *values; // (C), (positions, C), (positions, C)
    int position, positions, channels, heads, window;
} AttentionDecode;

static inline void attention_decode_task(void *context, int task, int thread) {
    (void)thread;
    const AttentionDecode *work = (const AttentionDecode *)context;
    int C = work->channels, D = C / work->heads, last = work->position;
    int first = work->window > 0 && last - work->window + 1 > 0 ? last - work->window + 1 : 0;
    size_t head = (size_t)task * (size_t)D;
    float *scores = work->scores + (size_t)task * (size_t)work->positions, *output = work->output + head;
    for (int j = first; j <= last; j++) {
        const float *key = work->keys + (size_t)j * (size_t)C + head, *query = work->query + head;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int d = 0; d < D; d++) { sum += query[d] * key[d]; }
        scores[j] = sum;
    }
    attention_softmax(scores, first, last + 1, last + 1);
    memset(output, 0, (size_t)D * sizeof *output);
    for (int j = first; j <= last; j++) {
        const float *value = work->values + (size_t)j * (size_t)C + head;
        for (int d = 0; d < D; d++) { output[d] += scores[j] * value[d]; }
    }
}

// output (C) = attention of query (C) at `position` over keys and values (positions, C)
// up to there. scores (heads, positions) is workspace.
static inline void cpu_attention_decode(Stream *stream, float *output, float *scores, const float *query,
                                        const float *keys, const float *values, int position, int positions,
                                        int C, int heads, int window) {
    AttentionDecode work = {output, scores, query, keys, values, position, positions, C, heads, window};
    thread_pool_run(stream->pool, heads, attention_decode_task, &work);
}

#endif
