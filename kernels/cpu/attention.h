// attention.h: causal self-attention, global or within a local window, forward and
// backward.
//
// For each sample and head, with q, k, v (T, D) and D = C / H:
//
//   s[i][j] = q[i] . k[j]                 not scaled: GPT-2's queries come divided by sqrt(D) (bias.h)
//   p[i] = softmax of s[i] over visible j: j <= i, with a window j > i - window, and with
//          documents j >= starts[i]
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
// scores only for the keys that a block may see; so keys outside the window or in earlier
// documents cost nothing, and a task needs O(T) memory for each row of a block.
// Probabilities are never stored: backward computes the scores again, block by block, and
// p = exp(s - logsumexp). The limit is the matrix products (matmul.h), then the
// exponential. Every sum runs inside one task, in order.
//
// In bf16 a task copies its head to floats, computes with them, and rounds its results
// once. So scores and probabilities are fp32, and the gradients of keys and values are summed
// in fp32 over all blocks of queries.
#pragma once

#include "kernels/cpu/matmul.h"
#include "kernels/cpu/vector_math.h"
#include "runtime/device.h"

enum { ATTENTION_ROWS = 64 };

typedef struct Attention {
    Real *output;         // (B, T, C): written by forward, read by backward on a GPU
    float *logsumexp;     // (B, H, T): written by forward, read by backward
    float *scratch;       // attention_scratch_floats
    const Real *qkv;      // (B, T, 3C)
    Real *d_qkv;          // backward (B, T, 3C), rows d_qkv_stride apart; NULL: forward
    const Real *d_output; // backward (B, T, C)
    int B, T, channels, heads, d_qkv_stride;
    int window; // keys that a query sees, its own included; 0: all up to its own
    Precision precision;
    // (B, T): the first key that each query may see, never falling within a sample; NULL: key 0
    const int32_t *starts;
} Attention;

// The first key of a query's window.
WIRE_FUNCTION int attention_oldest_key(int query, int window) {
    return window > 0 && query - window + 1 > 0 ? query - window + 1 : 0;
}

// Each thread of a pool has two blocks of scores and, in bf16, a head as floats: qkv, d_qkv
// (T, 3D), and output or d_output (T, D).
static inline size_t attention_workspace_floats(int T, int D, int threads, Precision precision) {
    size_t head = precision == PRECISION_FP32 ? 0 : 7 * (size_t)D;
    return (size_t)threads * (size_t)T * (2 * ATTENTION_ROWS + head);
}

// A head of a sample in floats, in the arrays themselves or in the workspace. Positions are
// `..._stride` floats apart; q, k and v of a position are `..._part` floats apart.
typedef struct AttentionHead {
    int T, D, window;
    int qkv_stride, qkv_part, d_qkv_stride, d_qkv_part, output_stride;
    const float *qkv;
    float *d_qkv;
    float *output;         // forward
    const float *d_output; // backward, rows output_stride apart
    const int32_t *starts; // (T), or NULL
    float *logsumexp;      // (T)
    float *scores;         // (2, ATTENTION_ROWS, T)
} AttentionHead;

// Where the head of a task begins in an array whose rows are `stride` apart.
static inline size_t attention_place(const Attention *work, int task, int stride) {
    int D = work->channels / work->heads;
    return (size_t)(task / work->heads) * (size_t)work->T * (size_t)stride +
           (size_t)(task % work->heads) * (size_t)D;
}

// out (T, D), rows out_stride apart, = in (T, D), rows in_stride apart.
REAL_LOOP void attention_copy(Real *out, int out_stride, Precision out_precision, const Real *in,
                              int in_stride, Precision in_precision, int T, int D) {
    for (int t = 0; t < T; t++) {
        Real *to = real_at(out, (size_t)t * (size_t)out_stride, out_precision);
        const Real *from = real_at_const(in, (size_t)t * (size_t)in_stride, in_precision);
        for (size_t d = 0; d < (size_t)D; d++) {
            real_store(to, d, real_load(from, d, in_precision), out_precision);
        }
    }
}

// The head of a task. In bf16 qkv and d_output are copied, and the caller must copy back what
// it computes.
static inline AttentionHead attention_head(const Attention *work, int task, int thread) {
    int T = work->T, C = work->channels, D = C / work->heads;
    size_t in = attention_place(work, task, 3 * C), out = attention_place(work, task, C),
           d_in = attention_place(work, task, work->d_qkv_stride), floats = (size_t)T * (size_t)D;
    size_t floats_of_thread = attention_workspace_floats(T, D, 1, work->precision);
    AttentionHead head = {.T = T,
                          .D = D,
                          .window = work->window,
                          .qkv_stride = 3 * C,
                          .qkv_part = C,
                          .d_qkv_stride = work->d_qkv_stride,
                          .d_qkv_part = C,
                          .output_stride = C,
                          .starts = work->starts != NULL ? work->starts + task / work->heads * T : NULL,
                          .logsumexp = work->logsumexp + (size_t)task * (size_t)T,
                          .scores = work->scratch + (size_t)thread * floats_of_thread};
    if (work->precision == PRECISION_FP32) {
        head.qkv = real_floats_const(work->qkv) + in;
        head.output = real_floats(work->output) + out;
        if (work->d_qkv != NULL) {
            head.d_qkv = real_floats(work->d_qkv) + d_in;
            head.d_output = real_floats_const(work->d_output) + out;
        }
        return head;
    }
    float *qkv = head.scores + 2 * ATTENTION_ROWS * (size_t)T;
    head.qkv_stride = head.d_qkv_stride = 3 * D;
    head.qkv_part = head.d_qkv_part = head.output_stride = D;
    head.qkv = qkv;
    head.d_qkv = qkv + 3 * floats;
    head.output = head.d_qkv + 3 * floats;
    head.d_output = head.output;
    for (int part = 0; part < 3; part++) {
        attention_copy(as_reals(qkv + part * D), 3 * D, PRECISION_FP32,
                       real_at_const(work->qkv, in + (size_t)part * (size_t)C, PRECISION_BF16), 3 * C,
                       PRECISION_BF16, T, D);
    }
    if (work->d_qkv != NULL) {
        attention_copy(as_reals(head.output), D, PRECISION_FP32,
                       real_at_const(work->d_output, out, PRECISION_BF16), C, PRECISION_BF16, T, D);
    }
    return head;
}

// A block of queries, and the keys that some of them see.
typedef struct AttentionBlock {
    int first, rows;        // queries [first, first + rows)
    int keys, key_count;    // keys [keys, keys + key_count)
    const float *q, *k, *v; // the block's first query, key and value; rows are qkv_stride apart
} AttentionBlock;

// The first key that a query of the head sees.
static inline int attention_first_key(const AttentionHead *head, int query) {
    int oldest = attention_oldest_key(query, head->window);
    return head->starts != NULL && head->starts[query] > oldest ? head->starts[query] : oldest;
}

static inline AttentionBlock attention_block(const AttentionHead *head, int first) {
    AttentionBlock block;
    block.first = first;
    block.rows = head->T - first < ATTENTION_ROWS ? head->T - first : ATTENTION_ROWS;
    block.keys = attention_first_key(head, first);
    block.key_count = first + block.rows - block.keys;
    block.q = head->qkv + (size_t)first * (size_t)head->qkv_stride;
    block.k = head->qkv + (size_t)block.keys * (size_t)head->qkv_stride + head->qkv_part;
    block.v = block.k + head->qkv_part;
    return block;
}

// result (M, N) = or += a (M, K) b (K, N), on the calling thread.
static inline void attention_matmul(float *result, int result_stride, const float *a, int a_stride,
                                    bool a_transposed, const float *b, int b_stride, bool b_transposed, int M,
                                    int N, int K, bool accumulate) {
    Matmul work =
        matmul_describe(PRECISION_FP32, as_reals(result), result_stride, as_reals_const(a), a_stride,
                        a_transposed, as_reals_const(b), b_stride, b_transposed, M, N, K, accumulate);
    matmul_block(&work);
}

// Turns a row of scores into probabilities in place, 0 outside [begin, end). Returns its
// logsumexp.
static inline float attention_softmax(float *scores, int begin, int end, int columns) {
    float *row = scores + begin, sums[SUM_LANES] = {0};
    float maximum = row_maximum(as_reals_const(row), (size_t)(end - begin), PRECISION_FP32);
    LANE_LOOP(j, lane, (size_t)(end - begin), {
        float e = vector_exp(row[j] - maximum);
        row[j] = e;
        sums[lane] += e;
    });
    float sum = lanes_sum(sums), scale = 1.0f / sum;
    for (int j = begin; j < end; j++) { scores[j] *= scale; }
    for (int j = 0; j < begin; j++) { scores[j] = 0.0f; }
    for (int j = end; j < columns; j++) { scores[j] = 0.0f; }
    return maximum + logf(sum);
}

static inline void attention_forward_task(void *context, int task, int thread) {
    const Attention *work = (const Attention *)context;
    AttentionHead head = attention_head(work, task, thread);
    int T = head.T, D = head.D, stride = head.qkv_stride;
    for (int first = 0; first < T; first += ATTENTION_ROWS) {
        AttentionBlock block = attention_block(&head, first);
        int keys = block.key_count;
        attention_matmul(head.scores, keys, block.q, stride, false, block.k, stride, true, block.rows, keys,
                         D, false);
        for (int row = 0; row < block.rows; row++) {
            int begin = attention_first_key(&head, first + row) - block.keys,
                end = first + row + 1 - block.keys;
            head.logsumexp[first + row] =
                attention_softmax(head.scores + (size_t)row * (size_t)keys, begin, end, keys);
        }
        attention_matmul(head.output + (size_t)first * (size_t)head.output_stride, head.output_stride,
                         head.scores, keys, false, block.v, stride, false, block.rows, D, keys, false);
    }
    if (work->precision == PRECISION_BF16) {
        int C = work->channels;
        attention_copy(real_at(work->output, attention_place(work, task, C), PRECISION_BF16), C,
                       PRECISION_BF16, as_reals(head.output), D, PRECISION_FP32, T, D);
    }
}

// Turns a row of scores s into p = exp(s - logsumexp), and a row of dp into ds = p (dp -
// sum(p dp)), both 0 outside [begin, end).
static inline void attention_softmax_backward(float *__restrict__ scores, float *__restrict__ d_scores,
                                              float logsumexp, int begin, int end, int columns) {
    float *row = scores + begin, *d_row = d_scores + begin, products[SUM_LANES] = {0};
    LANE_LOOP(j, lane, (size_t)(end - begin), {
        float p = vector_exp(row[j] - logsumexp);
        row[j] = p;
        products[lane] = multiply_add(p, d_row[j], products[lane]);
    });
    float product = lanes_sum(products);
    for (int j = begin; j < end; j++) { d_scores[j] = scores[j] * (d_scores[j] - product); }
    for (int j = 0; j < begin; j++) { scores[j] = d_scores[j] = 0.0f; }
    for (int j = end; j < columns; j++) { scores[j] = d_scores[j] = 0.0f; }
}

static inline void attention_backward_task(void *context, int task, int thread) {
    const Attention *work = (const Attention *)context;
    AttentionHead head = attention_head(work, task, thread);
    int T = head.T, D = head.D, stride = head.qkv_stride, d_stride = head.d_qkv_stride,
        d_part = head.d_qkv_part, o_stride = head.output_stride;
    float *scores = head.scores, *d_scores = scores + ATTENTION_ROWS * (size_t)T;
    for (int t = 0; t < T; t++) { // several blocks of queries add to the same keys and values
        float *d_q = head.d_qkv + (size_t)t * (size_t)d_stride;
        memset(d_q + d_part, 0, (size_t)D * sizeof(float));
        memset(d_q + 2 * d_part, 0, (size_t)D * sizeof(float));
    }
    for (int first = 0; first < T; first += ATTENTION_ROWS) {
        AttentionBlock block = attention_block(&head, first);
        int keys = block.key_count, rows = block.rows;
        const float *d_output = head.d_output + (size_t)first * (size_t)o_stride;
        float *d_q = head.d_qkv + (size_t)first * (size_t)d_stride,
              *d_k = head.d_qkv + (size_t)block.keys * (size_t)d_stride + d_part, *d_v = d_k + d_part;
        attention_matmul(scores, keys, block.q, stride, false, block.k, stride, true, rows, keys, D, false);
        attention_matmul(d_scores, keys, d_output, o_stride, false, block.v, stride, true, rows, keys, D,
                         false);
        for (int row = 0; row < rows; row++) {
            int begin = attention_first_key(&head, first + row) - block.keys,
                end = first + row + 1 - block.keys;
            size_t offset = (size_t)row * (size_t)keys;
            attention_softmax_backward(scores + offset, d_scores + offset, head.logsumexp[first + row], begin,
                                       end, keys);
        }
        attention_matmul(d_v, d_stride, scores, keys, true, d_output, o_stride, false, keys, D, rows, true);
        attention_matmul(d_q, d_stride, d_scores, keys, false, block.k, stride, false, rows, D, keys, false);
        attention_matmul(d_k, d_stride, d_scores, keys, true, block.q, stride, false, keys, D, rows, true);
    }
    for (int part = 0; part < 3 && work->precision == PRECISION_BF16; part++) {
        size_t place =
            attention_place(work, task, work->d_qkv_stride) + (size_t)part * (size_t)work->channels;
        attention_copy(real_at(work->d_qkv, place, PRECISION_BF16), work->d_qkv_stride, PRECISION_BF16,
                       as_reals(head.d_qkv + part * D), d_stride, PRECISION_FP32, T, D);
    }
}

static inline void cpu_attention(Stream *stream, const Attention *work) {
    thread_pool_run(stream->pool, work->B * work->heads,
                    work->d_qkv == NULL ? attention_forward_task : attention_backward_task, (void *)work);
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
    int first = attention_oldest_key(last, work->window);
    size_t head = (size_t)task * (size_t)D;
    float *scores = work->scores + (size_t)task * (size_t)work->positions, *output = work->output + head;
    for (int j = first; j <= last; j++) {
        const float *key = work->keys + (size_t)j * (size_t)C + head, *query = work->query + head;
        float sums[SUM_LANES] = {0};
        LANE_LOOP(d, lane, (size_t)D, { sums[lane] = multiply_add(query[d], key[d], sums[lane]); });
        scores[j] = lanes_sum(sums);
    }
    attention_softmax(scores, first, last + 1, last + 1);
    memset(output, 0, (size_t)D * sizeof *output);
    for (int j = first; j <= last; j++) {
        const float *value = work->values + (size_t)j * (size_t)C + head;
        for (int d = 0; d < D; d++) { output[d] = multiply_add(scores[j], value[d], output[d]); }
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
