// attention.h: causal self-attention, global or within a local window, forward and backward.
//
// For each sample and head, with q, k, v (T, D) and D = C / H:
//
//   s[i][j] = q[i] . k[j]                 not scaled: queries come divided by sqrt(D) (bias.h, rotary.h)
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
// qkv and d_qkv are (B, T, C + 2 KV D), where the fused projection leaves them: q, k, v of a
// position side by side, head h at columns h D of each. There are KV heads of keys and values, and
// H / KV heads of queries, side by side, for each. output (B, T, C), logsumexp (B, H, T).
//
// A task is one (sample, head); backward it is one (sample, head of keys), which takes the heads of
// its queries one after the other, because all of them add to d_k and d_v. It takes queries in
// blocks of ATTENTION_ROWS and computes scores only for the keys that a block may see; so keys
// outside the window or in earlier documents cost nothing, and a task needs O(T) memory for each
// row of a block.
// Probabilities are never stored: backward computes the scores again, block by block, and
// p = exp(s - logsumexp). The limit is the matrix products (matmul.h), then the
// exponential. Every sum runs inside one task, in order.
//
// In bf16 a task copies its head to floats, computes with them, and rounds its results
// once. So scores and probabilities are fp32, and the gradients of keys and values are summed
// in fp32 over all blocks of queries. With AMX products read bf16: the head where it is, and the
// probabilities and the gradients of scores, which are rounded for them, as on a GPU.
#pragma once

#include "kernels/cpu/matmul.h"

enum { ATTENTION_ROWS = 64 };

typedef struct Attention {
    Real *output;         // (B, T, C): written by forward, read by backward on a GPU
    float *logsumexp;     // (B, H, T): written by forward, read by backward
    float *scratch;       // attention_scratch_floats
    const Real *qkv;      // (B, T, C + 2 KV D)
    Real *d_qkv;          // backward, as qkv, rows d_qkv_stride apart; NULL: forward
    const Real *d_output; // backward (B, T, C)
    int B, T, channels, heads;
    int kv_heads; // 0: as many as heads
    int d_qkv_stride;
    int window; // keys that a query sees, its own included; 0: all up to its own
    Precision precision;
    AmxWorkspace *amx; // on a CPU, of each thread: bf16 is multiplied by AMX; NULL: it is not
    // (B, T): the first key that each query may see, never falling within a sample; NULL: key 0
    const int32_t *starts;
} Attention;

WIRE_FUNCTION int attention_oldest_key(int query, int window) {
    return window > 0 && query - window + 1 > 0 ? query - window + 1 : 0;
}

// Each thread of a pool has two blocks of scores and, in bf16, the same rounded, and a head as
// floats: qkv, d_qkv (T, 3D), and output or d_output (T, D).
static inline size_t attention_workspace_floats(int T, int D, int threads, Precision precision) {
    size_t head = precision == PRECISION_FP32 ? 0 : ATTENTION_ROWS + 7 * (size_t)D;
    return (size_t)threads * T * (2 * ATTENTION_ROWS + head);
}

// Of the heads of queries, how many have the same keys and values.
WIRE_FUNCTION int attention_group(const Attention *work) {
    return work->kv_heads > 0 ? work->heads / work->kv_heads : 1;
}

// Elements from one position to the next in qkv.
WIRE_FUNCTION int attention_stride(const Attention *work) {
    return work->channels + 2 * (work->channels / attention_group(work));
}

// Rows of an operand of a product.
typedef struct AttentionRows {
    const Real *data;
    int stride; // elements
} AttentionRows;

// A head of a sample, in the arrays themselves or in the workspace. What is computed is floats,
// with positions `..._stride` apart.
typedef struct AttentionHead {
    int T, D, window;
    int d_qkv_stride, output_stride;
    Precision operands;     // of products: fp32 or, with AMX, bf16
    AmxWorkspace *amx;      // NULL: there is none
    AttentionRows q, k, v;  // (T, D)
    AttentionRows d_output; // backward (T, D)
    Real *rounded[2];       // with AMX, (ATTENTION_ROWS, T): the scores in bf16
    float *d_q, *d_k, *d_v;
    float *output;         // forward
    const int32_t *starts; // (T), or NULL
    float *logsumexp;      // (T)
    float *scores;         // (2, ATTENTION_ROWS, T)
} AttentionHead;

// Where a head begins in an array whose rows are `stride` apart. part 0: in one of queries or
// outputs; 1 and 2: the keys and the values that it reads, in one of queries, keys and values.
static inline size_t attention_place(const Attention *work, int head, int part, int stride) {
    int D = work->channels / work->heads, h = head % work->heads, group = attention_group(work);
    int column = part == 0 ? h * D : work->channels + ((part - 1) * work->heads + h) / group * D;
    return (size_t)(head / work->heads) * (size_t)work->T * stride + column;
}

// out (T, D), rows out_stride apart, = in (T, D), rows in_stride apart.
REAL_LOOP void attention_copy(Real *out, int out_stride, Precision out_precision, const Real *in,
                              int in_stride, Precision in_precision, int T, int D) {
    for (int t = 0; t < T; t++) {
        Real *to = real_at(out, (size_t)t * out_stride, out_precision);
        const Real *from = real_at_const(in, (size_t)t * in_stride, in_precision);
        for (size_t d = 0; d < (size_t)D; d++) {
            real_store(to, d, real_load(from, d, in_precision), out_precision);
        }
    }
}

static inline AttentionRows attention_rows(const Real *data, size_t place, int stride, Precision precision) {
    AttentionRows rows = {real_at_const(data, place, precision), stride};
    return rows;
}

// `rows` on from row `row`, column `column`.
static inline AttentionRows attention_from(const AttentionHead *head, AttentionRows rows, int row) {
    return attention_rows(rows.data, (size_t)row * (size_t)rows.stride, rows.stride, head->operands);
}

// Gives a head in bf16 its place in the workspace `room`, behind the scores. Without AMX qkv and
// d_output are copied; the caller must copy back what it computes.
static inline void attention_place_head(const Attention *work, float *room, AttentionHead *head) {
    int T = head->T, D = head->D, C = work->channels, stride = attention_stride(work);
    size_t scores = ATTENTION_ROWS * (size_t)T, part = (size_t)T * D;
    float *rounded = room, *qkv = rounded + scores, *d_qkv = qkv + 3 * part;
    head->d_qkv_stride = 3 * D;
    head->output_stride = D;
    head->d_q = d_qkv, head->d_k = d_qkv + D, head->d_v = d_qkv + 2 * D;
    head->output = d_qkv + 3 * part;
    if (head->amx != NULL) {
        for (size_t i = 0; i < 2; i++) {
            head->rounded[i] = real_at(as_reals(rounded), i * scores, PRECISION_BF16);
        }
        return;
    }
    AttentionRows *copies[3] = {&head->q, &head->k, &head->v};
    for (int i = 0; i < 3; i++) {
        attention_copy(as_reals(qkv + i * D), 3 * D, PRECISION_FP32, copies[i]->data, stride, PRECISION_BF16,
                       T, D);
        *copies[i] = attention_rows(as_reals_const(qkv), (size_t)(i * D), 3 * D, PRECISION_FP32);
    }
    if (work->d_qkv != NULL) {
        attention_copy(as_reals(head->output), D, PRECISION_FP32, head->d_output.data, C, PRECISION_BF16, T,
                       D);
        head->d_output = attention_rows(as_reals_const(head->output), 0, D, PRECISION_FP32);
    }
}

// Head `index` of B * H.
static inline AttentionHead attention_head(const Attention *work, int index, int thread) {
    int T = work->T, C = work->channels, D = C / work->heads, stride = attention_stride(work);
    size_t out = attention_place(work, index, 0, C), in[3], d_in[3];
    for (int part = 0; part < 3; part++) {
        in[part] = attention_place(work, index, part, stride);
        d_in[part] = attention_place(work, index, part, work->d_qkv_stride);
    }
    Precision precision = work->precision;
    bool backward = work->d_qkv != NULL;
    size_t floats_of_thread = attention_workspace_floats(T, D, 1, precision);
    float *scores = work->scratch + (size_t)thread * floats_of_thread;
    AttentionHead head = {.T = T,
                          .D = D,
                          .window = work->window,
                          .d_qkv_stride = work->d_qkv_stride,
                          .output_stride = C,
                          .operands = work->amx != NULL ? precision : PRECISION_FP32,
                          .amx = work->amx != NULL ? &work->amx[thread] : NULL,
                          .q = attention_rows(work->qkv, in[0], stride, precision),
                          .k = attention_rows(work->qkv, in[1], stride, precision),
                          .v = attention_rows(work->qkv, in[2], stride, precision),
                          .d_output = attention_rows(work->d_output, backward ? out : 0, C, precision),
                          .starts = work->starts != NULL ? work->starts + index / work->heads * T : NULL,
                          .logsumexp = work->logsumexp + (size_t)index * T,
                          .scores = scores};
    if (precision == PRECISION_BF16) {
        attention_place_head(work, scores + 2 * ATTENTION_ROWS * (size_t)T, &head);
        return head;
    }
    head.output = real_floats(work->output) + out;
    if (backward) {
        float *d_qkv = real_floats(work->d_qkv);
        head.d_q = d_qkv + d_in[0], head.d_k = d_qkv + d_in[1], head.d_v = d_qkv + d_in[2];
    }
    return head;
}

// A block of queries, and the keys that some of them see.
typedef struct AttentionBlock {
    int first, rows;       // queries [first, first + rows)
    int keys, key_count;   // keys [keys, keys + key_count)
    AttentionRows q, k, v; // from the block's first query, key and value on
} AttentionBlock;

// The first key that a query of the head sees.
static inline int attention_first_key(const AttentionHead *head, int query) {
    int oldest = attention_oldest_key(query, head->window);
    return head->starts != NULL && head->starts[query] > oldest ? head->starts[query] : oldest;
}

// With AMX keys begin where a unit does: so blocks but the last have no remainder of one.
static inline AttentionBlock attention_block(const AttentionHead *head, int first) {
    int oldest = attention_first_key(head, first), keys = head->amx != NULL ? oldest & -AMX_UNIT : oldest;
    AttentionBlock block = {.first = first,
                            .rows = int_min(head->T - first, ATTENTION_ROWS),
                            .keys = keys,
                            .q = attention_from(head, head->q, first),
                            .k = attention_from(head, head->k, keys),
                            .v = attention_from(head, head->v, keys)};
    block.key_count = first + block.rows - keys;
    return block;
}

// result (M, N) = or += a (M, K) b (K, N), on the calling thread.
static inline void attention_matmul(const AttentionHead *head, float *result, int result_stride,
                                    AttentionRows a, bool a_transposed, AttentionRows b, bool b_transposed,
                                    int M, int N, int K, bool accumulate) {
    Matmul work = matmul_describe(head->operands, as_reals(result), result_stride, a.data, a.stride,
                                  a_transposed, b.data, b.stride, b_transposed, M, N, K, accumulate);
    work.result_precision = PRECISION_FP32;
    if (head->amx != NULL) {
        matmul_block_amx(&work, head->amx);
    } else {
        matmul_block(&work);
    }
}

// scores (rows, keys), or the gradients of scores behind them (which = 1), as a factor of products.
static inline AttentionRows attention_factor(const AttentionHead *head, const float *scores, int which,
                                             const AttentionBlock *block) {
    int keys = block->key_count;
    if (head->amx == NULL) { return attention_rows(as_reals_const(scores), 0, keys, PRECISION_FP32); }
    attention_copy(head->rounded[which], keys, PRECISION_BF16, as_reals_const(scores), keys, PRECISION_FP32,
                   block->rows, keys);
    return attention_rows(head->rounded[which], 0, keys, PRECISION_BF16);
}

// Turns a row of scores into probabilities in place, 0 outside [begin, end). Returns its logsumexp.
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
    int T = head.T, D = head.D;
    for (int first = 0; first < T; first += ATTENTION_ROWS) {
        AttentionBlock block = attention_block(&head, first);
        int keys = block.key_count, rows = block.rows;
        attention_matmul(&head, head.scores, keys, block.q, false, block.k, true, rows, keys, D, false);
        for (int row = 0; row < rows; row++) {
            int begin = attention_first_key(&head, first + row) - block.keys,
                end = first + row + 1 - block.keys;
            head.logsumexp[first + row] =
                attention_softmax(head.scores + (size_t)row * keys, begin, end, keys);
        }
        AttentionRows p = attention_factor(&head, head.scores, 0, &block);
        attention_matmul(&head, head.output + (size_t)first * head.output_stride, head.output_stride, p,
                         false, block.v, false, rows, D, keys, false);
    }
    if (work->precision == PRECISION_BF16) {
        int C = work->channels;
        attention_copy(real_at(work->output, attention_place(work, task, 0, C), PRECISION_BF16), C,
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

// One head of queries: d_q, and its part of d_k and d_v.
static inline void attention_backward_head(const AttentionHead *head) {
    int T = head->T, D = head->D, stride = head->d_qkv_stride;
    float *scores = head->scores, *d_scores = scores + ATTENTION_ROWS * (size_t)T;
    for (int first = 0; first < T; first += ATTENTION_ROWS) {
        AttentionBlock block = attention_block(head, first);
        int keys = block.key_count, rows = block.rows;
        size_t key = (size_t)block.keys * stride;
        AttentionRows d_output = attention_from(head, head->d_output, first);
        attention_matmul(head, scores, keys, block.q, false, block.k, true, rows, keys, D, false);
        attention_matmul(head, d_scores, keys, d_output, false, block.v, true, rows, keys, D, false);
        for (int row = 0; row < rows; row++) {
            int begin = attention_first_key(head, first + row) - block.keys,
                end = first + row + 1 - block.keys;
            size_t offset = (size_t)row * keys;
            attention_softmax_backward(scores + offset, d_scores + offset, head->logsumexp[first + row],
                                       begin, end, keys);
        }
        AttentionRows p = attention_factor(head, scores, 0, &block),
                      ds = attention_factor(head, d_scores, 1, &block);
        attention_matmul(head, head->d_v + key, stride, p, true, d_output, false, keys, D, rows, true);
        attention_matmul(head, head->d_q + (size_t)first * stride, stride, ds, false, block.k, false, rows, D,
                         keys, false);
        attention_matmul(head, head->d_k + key, stride, ds, true, block.q, false, keys, D, rows, true);
    }
}

static inline void attention_backward_task(void *context, int task, int thread) {
    const Attention *work = (const Attention *)context;
    int group = attention_group(work), D = work->channels / work->heads;
    for (int i = task * group; i < (task + 1) * group; i++) {
        AttentionHead head = attention_head(work, i, thread);
        bool last = i == (task + 1) * group - 1;
        for (int t = 0; i == task * group && t < head.T; t++) { // all blocks of queries add to them
            memset(head.d_k + (size_t)t * head.d_qkv_stride, 0, (size_t)D * sizeof(float));
            memset(head.d_v + (size_t)t * head.d_qkv_stride, 0, (size_t)D * sizeof(float));
        }
        attention_backward_head(&head);
        const float *parts[3] = {head.d_q, head.d_k, head.d_v};
        for (int part = 0; part < (last ? 3 : 1) && work->precision == PRECISION_BF16; part++) {
            size_t place = attention_place(work, i, part, work->d_qkv_stride);
            attention_copy(real_at(work->d_qkv, place, PRECISION_BF16), work->d_qkv_stride, PRECISION_BF16,
                           as_reals_const(parts[part]), head.d_qkv_stride, PRECISION_FP32, work->T, D);
        }
    }
}

static inline void cpu_attention(Stream *stream, const Attention *work) {
    Attention here = *work;
    bool backward = work->d_qkv != NULL;
    here.amx = work->precision == PRECISION_BF16 ? (AmxWorkspace *)stream->gemm : NULL;
    thread_pool_run(stream->pool, work->B * work->heads / (backward ? attention_group(work) : 1),
                    backward ? attention_backward_task : attention_forward_task, &here);
}

// ---- Decoding -------------------------------------------------------------------------

// output = attention of a query at `position` over the keys and values up to there.
typedef struct AttentionDecode {
    float *output, *scores;             // (C), (H, positions): workspace
    const float *query, *keys, *values; // (C), (positions, KV D), (positions, KV D)
    int position, positions, channels, heads, kv_heads, window;
} AttentionDecode;

static inline void attention_decode_task(void *context, int task, int thread) {
    (void)thread;
    const AttentionDecode *work = (const AttentionDecode *)context;
    int C = work->channels, D = C / work->heads, last = work->position;
    int first = attention_oldest_key(last, work->window);
    size_t head = (size_t)task * D, width = (size_t)work->kv_heads * D,
           shared = (size_t)(task / (work->heads / work->kv_heads)) * (size_t)D;
    float *scores = work->scores + (size_t)task * work->positions, *output = work->output + head;
    for (int j = first; j <= last; j++) {
        const float *key = work->keys + (size_t)j * width + shared, *query = work->query + head;
        float sums[SUM_LANES] = {0};
        LANE_LOOP(d, lane, (size_t)D, { sums[lane] = multiply_add(query[d], key[d], sums[lane]); });
        scores[j] = lanes_sum(sums);
    }
    attention_softmax(scores, first, last + 1, last + 1);
    memset(output, 0, (size_t)D * sizeof *output);
    for (int j = first; j <= last; j++) {
        const float *value = work->values + (size_t)j * width + shared;
        for (int d = 0; d < D; d++) { output[d] = multiply_add(scores[j], value[d], output[d]); }
    }
}

static inline void cpu_attention_decode(Stream *stream, const AttentionDecode *work) {
    thread_pool_run(stream->pool, work->heads, attention_decode_task, (void *)work);
}
