// test_cuda_counters.cu: how many bytes each CUDA kernel moves and how many operations it
// leaves to tensor cores, counted in the emulator, against the formulas of
// docs/kernels.md.
//
// accesses.h counts the loads and stores in device memory, which a GPU calls global
// memory. Two numbers come of it:
//
//   asked     bytes that threads ask for, each access by itself. A value that a thread
//             keeps in a register counts once.
//   touched   sectors of 32 bytes, the unit in which a GPU reads and writes memory, that
//             were read at least once, and those that were written at least once: what
//             passes to and from memory if caches hold everything that is used again
//
// Operations of tensor cores are counted where the emulator computes them. Not counted
// are other arithmetic, shared memory, and what a library computes.
#include "test/cuda/cuda_kernels.h"

#include "ddp.h"
#include "kernels/kernels.h"
#include "models/decoder.h"
#include "models/families.h"
#include "test/cuda/accesses.h"
#include "test/layer_calls.h"

// ---- Counting -------------------------------------------------------------------------

enum { ARENA_BYTES = 1 << 24 };

// All device memory of a case; arrays lie in it one behind the other.
alignas(256) static char arena[ARENA_BYTES];
static size_t arena_used;

static void count_copy(const void *source, size_t bytes) { accesses_add(source, bytes, false); }

// ---- Cases ----------------------------------------------------------------------------

// One shape for all: B sequences of T tokens, so N rows, of C channels; attention has one
// head of D channels.
enum {
    B = 2,
    T = 256,
    N = B * T,
    C = 256,
    D = 64,
    F = 4 * C,
    V = 1001,
    STRIDE = 1024, // between rows of logits
    P = 1 << 16,   // parameters
    WINDOW = 96,
    COMMIT_ROWS = 64 // tokens of a commit
};

// The allowed difference of what is counted: biases, statistics, sums, targets and losses are
// not in the formulas.
#define MARGIN 0.02

// `count` elements of device memory, full of small numbers that are finite in either
// format.
template <typename Type> static Type *array(size_t count) {
    arena_used = (arena_used + 255) / 256 * 256;
    char *place = arena + arena_used;
    arena_used += count * sizeof(Type);
    assert_true(arena_used <= ARENA_BYTES);
    memset(place, 0x3c, count * sizeof(Type)); // 0.0115 in fp32 as in bf16
    return (Type *)(void *)place;
}

static Real *array_of_reals(size_t count, Precision precision) {
    return (Real *)(void *)array<char>(count * precision_bytes(precision));
}

// What a case expects, by the formulas of docs/kernels.md.
typedef struct Expected {
    double touched, asked; // bytes; asked for: at most
    // Operations of tensor cores: at least and at most.
    double fewest_products, most_products;
} Expected;

typedef Expected (*CounterCase)(Stream *stream, double e);

static void begin_counting(void) {
    accesses_begin(arena, ARENA_BYTES);
    simt_counts.product_operations = 0;
}

static int32_t *tokens_on_device(int32_t *host) {
    for (int i = 0; i < N; i++) { host[i] = (int32_t)((unsigned)i * 7919u % V); }
    int32_t *device = array<int32_t>(N);
    memcpy(device, host, N * sizeof *host);
    return device;
}

// The column sums of `arrays` arrays: each block of rows writes its own to a workspace,
// which is read once.
static double workspace_bytes(double columns) { return 8.0 * columns * cuda_row_blocks(N); }

static Expected embedding_forward_case(Stream *stream, double e) {
    Real *output = array_of_reals((size_t)N * C, stream->precision),
         *wte = array_of_reals((size_t)V * C, stream->precision),
         *wpe = array_of_reals((size_t)T * C, stream->precision);
    int32_t host[N], *tokens = tokens_on_device(host);
    begin_counting();
    call_embedding_forward(stream, output, wte, wpe, tokens, B, T, C);
    // B sequences share the positions. Each thread, with 16 bytes of a row, asks for the
    // token.
    double rows = e * N * C;
    return {2 * rows + rows / B, 3 * rows + rows / 16 * sizeof(int32_t), 0, 0};
}

static Layernorm layernorm_case(Precision precision, bool branch) {
    size_t all = (size_t)N * C;
    Layernorm work = {};
    work.output = array_of_reals(all, precision);
    work.statistics = array<float>(2 * N);
    work.residual = array_of_reals(all, precision);
    work.residual_before = branch ? array_of_reals(all, precision) : NULL;
    work.branch = branch ? array_of_reals(all, precision) : NULL;
    work.branch_bias = branch ? array_of_reals(C, precision) : NULL;
    work.weight = array_of_reals(C, precision);
    work.bias = array_of_reals(C, precision);
    work.epsilon = 1e-5f;
    work.rows = N;
    work.channels = C;
    return work;
}

// Weight, bias and the branch's bias are asked for by every row, and stay in a cache.
static Expected layernorm_first_case(Stream *stream, double e) {
    Layernorm work = layernorm_case(stream->precision, false);
    begin_counting();
    layernorm_forward(stream, &work);
    return {2 * e * N * C, 4 * e * N * C, 0, 0};
}

static Expected layernorm_forward_case(Stream *stream, double e) {
    Layernorm work = layernorm_case(stream->precision, true);
    begin_counting();
    layernorm_forward(stream, &work);
    return {4 * e * N * C, 7 * e * N * C, 0, 0};
}

static Expected layernorm_backward_case(Stream *stream, double e) {
    size_t all = (size_t)N * C;
    Layernorm work = {};
    work.d_residual = array_of_reals(all, stream->precision);
    work.accumulate = true;
    work.d_weight = array<float>(C);
    work.d_bias = array<float>(C);
    work.d_branch_bias = array<float>(C);
    work.partials = array<float>((size_t)CUDA_ROW_BLOCKS * 3 * C);
    work.d_output = array_of_reals(all, stream->precision);
    work.residual = array_of_reals(all, stream->precision);
    work.statistics = array<float>(2 * N);
    work.weight = array_of_reals(C, stream->precision);
    work.rows = N;
    work.channels = C;
    begin_counting();
    layernorm_backward(stream, &work);
    // Each group of threads that shares a row asks for the weight once, and each thread,
    // with 16 bytes of a row, for its mean and 1/stddev.
    double bytes = 4 * e * N * C + workspace_bytes(3 * C);
    int groups = layernorm_groups(C, (int)(16 / e), LAYERNORM_AHEAD_BLOCK).groups;
    return {bytes, bytes + e * C * groups * cuda_row_blocks(N) + e * N * C / 16 * 2 * sizeof(float), 0, 0};
}

// Neither mean nor bias; the branch has none, either.
static Expected rmsnorm_forward_case(Stream *stream, double e) {
    Layernorm work = layernorm_case(stream->precision, true);
    work.bias = work.branch_bias = NULL;
    begin_counting();
    layernorm_forward(stream, &work);
    return {4 * e * N * C, 5 * e * N * C, 0, 0};
}

static Expected rmsnorm_backward_case(Stream *stream, double e) {
    Layernorm work = layernorm_case(stream->precision, false);
    work.d_residual = array_of_reals((size_t)N * C, stream->precision);
    work.accumulate = true;
    work.d_weight = array<float>(C);
    work.partials = array<float>((size_t)CUDA_ROW_BLOCKS * 2 * C);
    work.d_output = work.output;
    begin_counting();
    layernorm_backward(stream, &work);
    // Sums of d_residual are left, too, which only a branch with a bias needs.
    double bytes = 4 * e * N * C + workspace_bytes(C) + 4.0 * C * cuda_row_blocks(N);
    int groups = layernorm_groups(C, (int)(16 / e), LAYERNORM_AHEAD_BLOCK).groups;
    return {bytes, bytes + e * C * groups * cuda_row_blocks(N) + e * N * C / 16 * sizeof(float), 0, 0};
}

// Heads of queries and of keys, 4 to 1, in rows of queries, keys and values.
enum { Q_HEADS = 4, HEADS = Q_HEADS + 1, QKV = (HEADS + 1) * D };

// Each head asks for the turns of its position, which stay in a cache.
static Expected rotary_case(Stream *stream, double e, bool backward, bool normed) {
    Rotary work = {.values = array_of_reals((size_t)N * QKV, stream->precision),
                   .turns = array<float>((size_t)T * D),
                   .rows = N,
                   .T = T,
                   .heads = Q_HEADS,
                   .kv_heads = 1,
                   .head_size = D,
                   .stride = QKV,
                   .scale = 0.125f,
                   .epsilon = 1e-6f,
                   .backward = backward};
    if (normed) {
        work.saved = array_of_reals((size_t)N * HEADS * D, stream->precision);
        work.partials = array<float>((size_t)CUDA_ROW_BLOCKS * 2 * D);
        for (int key = 0; key < 2; key++) {
            work.weights[key] = array_of_reals(D, stream->precision);
            work.d_weights[key] = array<float>(D);
        }
    }
    begin_counting();
    rotary(stream, &work);
    int blocks = backward ? cuda_row_blocks(N) : (int)cuda_blocks(N, ROTARY_ROWS);
    double heads = e * N * HEADS * D, sums = normed && backward ? workspace_bytes(2 * D) : 0,
           groups = ROTARY_THREADS / (D / 2 / (16 / e));
    return {(normed ? 3 : 2) * heads + 4.0 * T * D + sums,
            (normed ? 3 : 2) * heads + 4.0 * N * HEADS * D + sums +
                (normed ? 2 * e * D * groups * blocks : 0),
            0, 0};
}
static Expected rotary_forward(Stream *stream, double e) { return rotary_case(stream, e, false, false); }
static Expected rotary_backward(Stream *stream, double e) { return rotary_case(stream, e, true, false); }
static Expected rotary_norm_forward(Stream *stream, double e) { return rotary_case(stream, e, false, true); }
static Expected rotary_norm_backward(Stream *stream, double e) { return rotary_case(stream, e, true, true); }

static Expected swiglu_case(Stream *stream, double e, bool backward) {
    Swiglu work = {.output = array_of_reals((size_t)N * F, stream->precision),
                   .saved = array_of_reals((size_t)N * 2 * F, stream->precision),
                   .gradient = backward ? array_of_reals((size_t)N * 2 * F, stream->precision) : NULL,
                   .rows = N,
                   .columns = F,
                   .gradient_stride = 2 * F};
    begin_counting();
    swiglu(stream, &work);
    return {(backward ? 5 : 3) * e * N * F, (backward ? 5 : 3) * e * N * F, 0, 0};
}
static Expected swiglu_forward(Stream *stream, double e) { return swiglu_case(stream, e, false); }
static Expected swiglu_backward(Stream *stream, double e) { return swiglu_case(stream, e, true); }

static Expected gelu_forward_case(Stream *stream, double e) {
    Real *output = array_of_reals((size_t)N * F, stream->precision),
         *saved = array_of_reals((size_t)N * F, stream->precision),
         *bias = array_of_reals(F, stream->precision);
    begin_counting();
    call_gelu_forward(stream, output, saved, bias, N, F);
    return {2 * e * N * F, (2 + 1.0 / GELU_ROWS) * e * N * F, 0, 0};
}

static Expected gelu_backward_case(Stream *stream, double e) {
    Real *gradient = array_of_reals((size_t)N * F, stream->precision),
         *saved = array_of_reals((size_t)N * F, stream->precision),
         *bias = array_of_reals(F, stream->precision);
    float *d_bias = array<float>(F), *partials = array<float>((size_t)CUDA_ROW_BLOCKS * F);
    begin_counting();
    call_gelu_backward(stream, gradient, F, d_bias, partials, saved, bias, N, F);
    double bytes = 3 * e * N * F + workspace_bytes(F);
    return {bytes, bytes + e * F * cuda_row_blocks(N), 0, 0};
}

static Expected cross_entropy_case(Stream *stream, double e) {
    Real *logits = array_of_reals((size_t)N * STRIDE, stream->precision);
    float *losses = array<float>(N);
    int32_t host[N], *targets = tokens_on_device(host);
    begin_counting();
    cross_entropy(stream, logits, STRIDE, losses, targets, N, V, 1.0f);
    // It reads the logits twice, the second time from a cache; each thread, with 16 bytes
    // of a row, asks for the target and its logit. Padding is written, too.
    return {e * N * (V + STRIDE), e * N * (2 * V + STRIDE) + e * N * STRIDE / 16 * (e + sizeof(int32_t)), 0,
            0};
}

static Expected embedding_backward_case(Stream *stream, double e) {
    float *d_wte = array<float>((size_t)V * C), *d_wpe = array<float>((size_t)T * C),
          *partials = array<float>(embedding_partials_floats(N, C));
    Real *d_output = array_of_reals((size_t)N * C, stream->precision);
    int32_t host[N], sorted[N], counts[V + 1], *tokens = tokens_on_device(host), *order = array<int32_t>(N);
    embedding_order(sorted, counts, host, N, V);
    memcpy(order, sorted, sizeof sorted);
    begin_counting();
    call_embedding_backward(stream, d_wte, d_wpe, partials, d_output, tokens, order, B, T, C);
    // All tokens differ; a position is B rows.
    return {e * N * C + 8.0 * N * C + 8.0 * T * C, 2 * e * N * C + 8.0 * N * C + 8.0 * T * C, 0, 0};
}

// Pairs of a query and a key, over all sequences: those that are visible, or those in the
// rectangles of `rows` queries and `columns` keys in which at least one is.
static double visible_pairs(int window, int rows, int columns) {
    double rectangles = 0;
    for (int query = 0; query < T; query += rows) {
        for (int key = 0; key < query + rows; key += columns) {
            rectangles += window == 0 || key + columns - 1 > query - window;
        }
    }
    return B * rectangles * rows * columns;
}

// What a block owns at D = 64: four warps of two tiles of 16 rows.
enum { BLOCK_ROWS = 128 };

// Tensor cores compute whole rectangles, of at most 32 rows of a warp and a tile of 64.
// Each block of queries asks once for the keys and values of the tiles that it sees.
static Expected attention_forward_case(Stream *stream, int window) {
    Real *output = array_of_reals((size_t)N * D, PRECISION_BF16),
         *qkv = array_of_reals((size_t)N * 3 * D, PRECISION_BF16);
    float *logsumexp = array<float>(N);
    begin_counting();
    call_attention_forward(stream, output, logsumexp, NULL, qkv, B, T, D, 1, window);
    double tile = CUDA_ATTENTION_TILE,
           asked = 2.0 * D * (2 * N + 2 * visible_pairs(window, BLOCK_ROWS, tile) / BLOCK_ROWS);
    return {8.0 * N * D, asked, 4.0 * D * visible_pairs(window, 1, 1),
            4.0 * D * visible_pairs(window, 32, tile)};
}

// Twice: for d_q each block of queries asks for keys and values, for d_k and d_v each block
// of keys asks for queries, d_output, logsumexp and delta. Before that, delta takes output and
// d_output.
static Expected attention_backward_case(Stream *stream, int window) {
    Real *d_qkv = array_of_reals((size_t)N * 3 * D, PRECISION_BF16),
         *d_output = array_of_reals((size_t)N * D, PRECISION_BF16),
         *output = array_of_reals((size_t)N * D, PRECISION_BF16),
         *qkv = array_of_reals((size_t)N * 3 * D, PRECISION_BF16);
    float *logsumexp = array<float>(N), *deltas = array<float>(N);
    begin_counting();
    call_attention_backward(stream, d_qkv, 3 * D, deltas, d_output, output, qkv, logsumexp, B, T, D, 1,
                            window);
    double tile = CUDA_ATTENTION_TILE, loads = visible_pairs(window, BLOCK_ROWS, tile) / BLOCK_ROWS,
           asked = 2.0 * D * (2 * N + 3 * N + 4 * N + 4 * loads) + 8 * loads;
    return {16.0 * N * D, asked, 10.0 * D * visible_pairs(window, 1, 1),
            14.0 * D * visible_pairs(window, 32, tile)};
}

// Two heads of queries for one of keys. Each asks for the keys and values, and a block of keys for
// the queries of both.
static Expected attention_shared_case(Stream *stream, bool backward) {
    Attention work = {.output = array_of_reals((size_t)N * 2 * D, PRECISION_BF16),
                      .logsumexp = array<float>(2 * N),
                      .scratch = array<float>(2 * N),
                      .qkv = array_of_reals((size_t)N * 4 * D, PRECISION_BF16),
                      .d_qkv = backward ? array_of_reals((size_t)N * 4 * D, PRECISION_BF16) : NULL,
                      .d_output = array_of_reals((size_t)N * 2 * D, PRECISION_BF16),
                      .B = B,
                      .T = T,
                      .channels = 2 * D,
                      .heads = 2,
                      .kv_heads = 1,
                      .d_qkv_stride = 4 * D};
    begin_counting();
    attention(stream, &work);
    double tile = CUDA_ATTENTION_TILE, loads = 2 * visible_pairs(0, BLOCK_ROWS, tile) / BLOCK_ROWS,
           products = 2 * (backward ? 14.0 : 4.0) * D, fewest = 2 * (backward ? 10.0 : 4.0) * D;
    return {2.0 * D * N * (backward ? 12 : 6),
            2.0 * D * (backward ? 2 * 2 * N + 3 * 2 * N + 4 * 2 * N + 4 * loads : 2 * 2 * N + 2 * loads) +
                8 * loads,
            fewest * visible_pairs(0, 1, 1), products * visible_pairs(0, 32, tile)};
}
static Expected attention_shared_forward(Stream *stream, double) {
    return attention_shared_case(stream, false);
}
static Expected attention_shared_backward(Stream *stream, double) {
    return attention_shared_case(stream, true);
}

static Expected attention_forward_global(Stream *stream, double) { return attention_forward_case(stream, 0); }
static Expected attention_forward_local(Stream *stream, double) {
    return attention_forward_case(stream, WINDOW);
}
static Expected attention_backward_global(Stream *stream, double) {
    return attention_backward_case(stream, 0);
}
static Expected attention_backward_local(Stream *stream, double) {
    return attention_backward_case(stream, WINDOW);
}

static Expected adamw_case(Stream *stream, Precision moments, bool commit, bool casts) {
    double bytes = (commit ? 16.0 + 4 * precision_bytes(moments) : 12.0 + 2 * precision_bytes(moments)) * P +
                   (casts ? 2.0 * P : 0);
    StepRange range = {};
    range.moments = moments;
    range.out = array<float>(P);
    range.master = array<float>(P);
    range.first_moment = as_reals(array<float>(P));
    range.second_moment = as_reals(array<float>(P));
    range.gradient = array<float>(P);
    range.casts = casts ? array_of_reals(P, PRECISION_BF16) : NULL;
    range.count = P;
    range.keeps = commit;
    begin_counting();
    adamw(stream, &range);
    return {bytes, bytes, 0, 0};
}
static Expected adamw_commit(Stream *stream, double) {
    return adamw_case(stream, PRECISION_FP32, true, false);
}
static Expected adamw_commit_with_casts(Stream *stream, double) {
    return adamw_case(stream, PRECISION_FP32, true, true);
}
static Expected adamw_estimate(Stream *stream, double) {
    return adamw_case(stream, PRECISION_FP32, false, false);
}
static Expected adamw_narrow_commit(Stream *stream, double) {
    return adamw_case(stream, PRECISION_BF16, true, false);
}
static Expected adamw_narrow_estimate(Stream *stream, double) {
    return adamw_case(stream, PRECISION_BF16, false, false);
}

static Expected squares_case(Stream *stream, double) {
    double *partials = array<double>(buffer_blocks(P));
    float *values = array<float>(P);
    begin_counting();
    cuda_buffer_sums_of_squares(stream, partials, values, P, P, 1);
    return {4.0 * P, 4.0 * P, 0, 0};
}

static Expected casts_case(Stream *stream, double e) {
    Real *out = array_of_reals(P, stream->precision);
    float *in = array<float>(P);
    begin_counting();
    reals_from_floats(stream, out, in, P);
    return {(4 + e) * P, (4 + e) * P, 0, 0};
}

static Expected pseudo_gradient_case(Stream *stream, double) {
    OuterRange range = {
        .outer = array<float>(P), .local = array<float>(P), .exchange = array<float>(P), .count = P};
    begin_counting();
    cuda_outer_pseudo_gradient(stream, &range, 0.5f);
    return {12.0 * P, 12.0 * P, 0, 0};
}

static Expected nesterov_case(Stream *stream, double) {
    OuterRange range = {array<float>(P), array<float>(P), array<float>(P), array<float>(P), NULL, P};
    NesterovStep step = {};
    begin_counting();
    cuda_outer_nesterov(stream, &range, &step);
    return {28.0 * P, 28.0 * P, 0, 0};
}

static Expected momentum_case(Stream *stream, double) {
    float *outer = array<float>(P);
    OuterRange range = {outer, array<float>(P), array<float>(P), array<float>(P), outer, P};
    MomentumStep step = {};
    step.received = true;
    begin_counting();
    cuda_outer_momentum(stream, &range, &step);
    return {32.0 * P, 32.0 * P, 0, 0};
}

typedef struct Counted {
    const char *name;
    CounterCase run;
    bool in_fp32; // too; attention has tiles in bf16 only
} Counted;

static const Counted cases[] = {
    {"embedding forward", embedding_forward_case, true},
    {"LayerNorm, the first", layernorm_first_case, true},
    {"LayerNorm forward", layernorm_forward_case, true},
    {"LayerNorm backward", layernorm_backward_case, true},
    {"RMSNorm forward", rmsnorm_forward_case, true},
    {"RMSNorm backward", rmsnorm_backward_case, true},
    {"rotary positions forward", rotary_forward, true},
    {"rotary positions backward", rotary_backward, true},
    {"rotary positions and norms of heads forward", rotary_norm_forward, true},
    {"rotary positions and norms of heads backward", rotary_norm_backward, true},
    {"SwiGLU forward", swiglu_forward, true},
    {"SwiGLU backward", swiglu_backward, true},
    {"attention with shared keys, forward", attention_shared_forward, false},
    {"attention with shared keys, backward", attention_shared_backward, false},
    {"GELU forward", gelu_forward_case, true},
    {"GELU backward", gelu_backward_case, true},
    {"cross entropy", cross_entropy_case, true},
    {"embedding backward", embedding_backward_case, true},
    {"attention forward, global", attention_forward_global, false},
    {"attention forward, local", attention_forward_local, false},
    {"attention backward, global", attention_backward_global, false},
    {"attention backward, local", attention_backward_local, false},
    {"AdamW, commit", adamw_commit, true},
    {"AdamW, commit, and casts", adamw_commit_with_casts, true},
    {"AdamW, estimate", adamw_estimate, true},
    {"AdamW, commit, bf16 moments", adamw_narrow_commit, true},
    {"AdamW, estimate, bf16 moments", adamw_narrow_estimate, true},
    {"norm", squares_case, true},
    {"weights from fp32", casts_case, true},
    {"pseudo-gradient", pseudo_gradient_case, true},
    {"outer step, Nesterov", nesterov_case, true},
    {"outer step, momentum", momentum_case, true},
};

static void counts_check(const Counted *c, Precision precision, const Accesses *counted,
                         const Expected *expected) {
    double touched = (double)counted->touched_bytes / expected->touched,
           asked = (double)counted->asked_bytes / expected->asked,
           products = (double)simt_counts.product_operations;
    bool good = fabs(touched - 1) <= MARGIN && asked <= 1 + MARGIN && products >= expected->fewest_products &&
                products <= expected->most_products;
    if (getenv("VERBOSE") != NULL || !good) {
        print_message("%s, %s: touches %.4f of the bytes of its formula, asks for %.4f; %.4g operations of "
                      "%.4g to %.4g\n",
                      c->name, precision_name(precision), touched, asked, products, expected->fewest_products,
                      expected->most_products);
    }
    assert_true(good);
}

static void kernels_move_what_their_formulas_say(void **state) {
    (void)state;
    for (size_t i = 0; i < 2 * (sizeof cases / sizeof cases[0]); i++) {
        const Counted *c = &cases[i / 2];
        Precision precision = i % 2 == 0 ? PRECISION_BF16 : PRECISION_FP32;
        if (precision == PRECISION_FP32 && !c->in_fp32) { continue; }
        arena_used = 0;
        Expected expected = c->run(cuda_test_stream(precision), (double)precision_bytes(precision));
        Accesses counted = accesses_end();
        counts_check(c, precision, &counted, &expected);
    }
}

// ---- A commit -------------------------------------------------------------------------

// A rank that trains a small GPT-Neo in bf16, one micro-batch a commit.
typedef struct Trainer {
    Model model;
    Scheduler scheduler;
    Arena arena;
    int32_t tokens[COMMIT_ROWS];
} Trainer;

static MicroBatchResult trainer_micro_batch(void *self, Stream *stream, uint64_t, const void *weights,
                                            float *gradients, const Pace *pace) {
    Trainer *trainer = (Trainer *)self;
    const float *losses =
        model_gradients(&trainer->model, stream, weights, gradients, trainer->tokens, trainer->tokens, pace);
    return {losses_mean(stream, losses, trainer->tokens, COMMIT_ROWS), NAN, COMMIT_ROWS};
}

static ModelConfig trainer_config(void) {
    ModelConfig config = {};
    config.family = &gpt_neo_family;
    config.layers = 2;
    config.channels = 64;
    config.heads = 2;
    config.mlp_channels = 256;
    config.window = 16;
    config.positions = COMMIT_ROWS;
    config.vocabulary = 64;
    config.epsilon = 1e-5;
    return config;
}

// shards: as zero1, whose ranks gather casts; otherwise as ddp, and the model casts.
static void trainer_open(Trainer *trainer, bool shards, const Gpu *gpu, Transport *transport,
                         ThreadPool *pool) {
    ModelConfig config = trainer_config();
    ParameterTable table;
    Error error;
    parameter_table_make(&config, &table);
    ModelSettings model = {.B = 1, .T = COMMIT_ROWS, .on_gpu = true, .precision = PRECISION_BF16};
    SchedulerSettings settings = {.kind = RULE_SYNCHRONOUS, .replicated = !shards, .overlap = true};
    model.given_weights = settings.gathers_casts = settings.keeps_casts = shards;
    settings.micro_batches = 1;
    settings.target = 100;
    settings.rate = {SCHEDULE_CONSTANT, 1e-3, 0, 1, 0, 0, 0};
    settings.optimizer.beta1 = 0.9;
    settings.optimizer.beta2 = 0.95;
    settings.optimizer.epsilon = 1e-8;
    settings.device.gpu = gpu;
    settings.device.precision = PRECISION_BF16;
    Problem problem = {.self = trainer,
                       .parameter_count = table.parameter_count,
                       .tokens = COMMIT_ROWS,
                       .micro_batch = trainer_micro_batch,
                       .copy = &trainer->model.copy};
    trainer->arena.on_gpu = true;
    scheduler_reserve(&trainer->scheduler, &trainer->arena, &settings, &problem, transport);
    model_reserve(&trainer->model, &trainer->arena, &config, &model);
    assert_true(arena_commit(&trainer->arena, &error));
    model_random_tokens(&config, COMMIT_ROWS, trainer->tokens);
    for (int i = 0; i < table.count; i++) {
        const ParameterInfo *entry = &table.entries[i];
        for (size_t k = 0; k < entry->count; k++) {
            scheduler_first_parameters(&trainer->scheduler)[entry->offset + k] =
                entry->is_matrix ? 0.01f * (float)(k % 7) - 0.03f : entry->fill;
        }
    }
    scheduler_start(&trainer->scheduler, pool, false);
    gemm_open(trainer->scheduler.compute, trainer->model.gemm_workspace);
    parameter_table_free(&table);
}

// Bytes of an array that a commit asks for, for each parameter.
static double commit_asks(Trainer *trainer, const void *array, size_t element) {
    size_t count = trainer->scheduler.problem.parameter_count;
    accesses_begin(array, count * element / ACCESS_SECTOR * ACCESS_SECTOR);
    zero1_commit(&trainer->scheduler); // ddp's, too
    scheduler_settle(&trainer->scheduler);
    return (double)accesses_end().asked_bytes / (double)count;
}

// A commit of one micro-batch. A gradient is written by the product that begins the sum, and read
// by the norm and by AdamW: 12 bytes a parameter, and more for the few that are added to, of
// vectors and of embeddings. Of the master copy AdamW reads 4 bytes and writes 4; nobody else reads
// it, since AdamW writes the casts, too.
static void check_commit(bool shards) {
    Trainer *trainer = (Trainer *)calloc(1, sizeof *trainer);
    Scheduler *s = &trainer->scheduler;
    Transport transport;
    Gpu gpu;
    Error error;
    ThreadPool *pool = thread_pool_create(1, false);
    transport_open_alone(&transport, "a test");
    assert_true(gpu_open(&gpu, 0, &error));
    trainer_open(trainer, shards, &gpu, &transport, pool);
    zero1_commit(s); // casts of the first parameters are made apart
    double gradients = commit_asks(trainer, s->gradients.data, sizeof(float)),
           master = commit_asks(trainer, s->optimizer.master, sizeof(float));
    if (!(gradients >= 12 && gradients <= 12.5 && master == 8)) {
        fail_msg("bytes a parameter: gradients %g, master %g", gradients, master);
    }
    const uint16_t *casts = (const uint16_t *)(const void *)(shards ? s->casts : scheduler_copy(s));
    for (size_t i = 0; i < s->problem.parameter_count; i++) {
        assert_int_equal(casts[i], host_bf16(s->optimizer.master[i]));
    }
    gemm_close(s->compute);
    scheduler_stop(s);
    arena_release(&trainer->arena);
    transport_close(&transport);
    thread_pool_destroy(pool);
    free(trainer);
}

static void a_commit_moves_what_its_parts_say(void **state) {
    (void)state;
    check_commit(false);
    check_commit(true);
}

// Reads `in` twice, by loads and by asynchronous copies, and writes every other sector of
// `out`.
static __global__ void wasteful_kernel(float *out, const float *in) {
    float *shared = (float *)(void *)cuda_shared();
    size_t i = blockIdx.x * blockDim.x + threadIdx.x;
    float value = in[i];
    __syncthreads();
    if (threadIdx.x % 4 == 0) { copy_async(shared + threadIdx.x, in + i, true); }
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    if (i / 8 % 2 == 0) { out[i] = value + shared[threadIdx.x]; }
}

static void every_access_is_counted(void **state) {
    (void)state;
    arena_used = 0;
    float *out = array<float>(P), *in = array<float>(P);
    begin_counting();
    cuda_launch(cuda_test_stream(PRECISION_FP32), wasteful_kernel, dim3(P / 256), dim3(256), 1024, out, in);
    Accesses counted = accesses_end();
    assert_int_equal(counted.asked_bytes, 10 * P);
    assert_int_equal(counted.touched_bytes, 6 * P);
    assert_int_equal(simt_counts.product_operations, 0);
}

int main(void) {
    simt_copy_observer() = count_copy;
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_access_is_counted),
                                       cmocka_unit_test(kernels_move_what_their_formulas_say),
                                       cmocka_unit_test(a_commit_moves_what_its_parts_say)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
