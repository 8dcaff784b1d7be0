// test_bf16.c: in bf16 a kernel for CPUs computes what it computes in fp32 from the same
// numbers, rounded once; and a model in bf16 is near the one in fp32.
//
// Inputs are numbers that bf16 can hold. So the only difference allowed is the rounding of
// what is stored: one part in 256 of an element, and for sums over rows none but the order
// of additions.
#include "test/harness.h"

#include <sys/mman.h>

#include "runtime/device.h"

// A clock that moves by this many seconds whenever it is read; 0: the machine's.
static double clock_step, clock_told;
#define clock_seconds() (clock_step > 0 ? clock_told += clock_step : clock_seconds())

#include "kernels/cpu/product_rates.h"
#include "runtime/random.h"
#include "test/layer_calls.h"
#include "test/model_loss.h"

static Random test_random;

// An array in both formats, with the same values.
typedef struct Both {
    size_t count;
    float *floats;
    uint16_t *halves;
} Both;

static Both both_new(size_t count) {
    Both both = {count, (float *)malloc(count * sizeof(float)), (uint16_t *)malloc(count * sizeof(uint16_t))};
    for (size_t i = 0; i < count; i++) {
        both.halves[i] = bf16_from_float((float)random_normal(&test_random));
        both.floats[i] = bf16_to_float(both.halves[i]);
    }
    return both;
}

static void both_free(Both *both) {
    free(both->floats);
    free(both->halves);
}

static Real *both_reals(const Both *both, Precision precision) {
    return precision == PRECISION_FP32 ? as_reals(both->floats) : (Real *)(void *)both->halves;
}

// bf16 has eight digits. loose: what sums in another order may add.
static void check_both(const char *what, const Both *both, double loose) {
    for (size_t i = 0; i < both->count; i++) {
        double expected = (double)both->floats[i], got = (double)bf16_to_float(both->halves[i]);
        if (!(fabs(got - expected) <= fabs(expected) / 256 + loose)) {
            fail_msg("%s[%zu]: %.9g, in fp32 %.9g", what, i, got, expected);
        }
    }
}

static void check_sums(const char *what, const float *got, const float *expected, size_t count,
                       double tolerance) {
    for (size_t i = 0; i < count; i++) { assert_close((double)got[i], (double)expected[i], tolerance, what); }
}

static Stream stream_in(Precision precision, int threads) {
    Stream stream;
    memset(&stream, 0, sizeof stream);
    stream.pool = thread_pool_create(threads, true);
    stream.precision = precision;
    size_t bytes = gemm_workspace_bytes(false, precision, threads), unit = AMX_ALIGNMENT;
    gemm_open(&stream, bytes > 0 ? aligned_alloc(unit, (bytes + unit - 1) / unit * unit) : NULL);
    return stream;
}

static void stream_end(Stream *stream) {
    free(stream->gemm);
    thread_pool_destroy(stream->pool);
}

// ---- Products: by oneDNN and by the plain loops ---------------------------------------

static void check_products(int rows, int inputs, int outputs) {
    Both input = both_new((size_t)(rows * inputs)), weight = both_new((size_t)(outputs * inputs)),
         output = both_new((size_t)(rows * outputs)), d_input = both_new((size_t)(rows * inputs));
    size_t weights = (size_t)(outputs * inputs);
    float *d_weight[2];
    for (int precision = 0; precision < 2; precision++) {
        Stream stream = stream_in((Precision)precision, 2);
        d_weight[precision] = (float *)calloc(weights, sizeof(float));
        for (size_t i = 0; i < weights; i++) { d_weight[precision][i] = (float)i; } // it is added to
        Real *out = both_reals(&output, stream.precision);
        const Real *in = both_reals(&input, stream.precision), *w = both_reals(&weight, stream.precision);
        matmul_backward_input(&stream, both_reals(&d_input, stream.precision), inputs, out, outputs, w, rows,
                              inputs, outputs);
        matmul_backward_weight(&stream, d_weight[precision], out, outputs, in, rows, inputs, outputs, false);
        matmul_forward(&stream, out, outputs, in, w, rows, inputs, outputs);
        stream_end(&stream);
    }
    check_both("output", &output, 1e-4);
    check_both("gradient of the input", &d_input, 1e-4);
    for (size_t i = 0; i < weights; i++) {
        assert_close((double)d_weight[1][i], (double)d_weight[0][i], 1e-4 * (1 + (double)i),
                     "gradient of the weight");
    }
    free(d_weight[0]);
    free(d_weight[1]);
    both_free(&input);
    both_free(&weight);
    both_free(&output);
    both_free(&d_input);
}

static void products_are_rounded_once(void **state) {
    (void)state;
    check_products(1, 1, 1);
    check_products(5, 7, 3);
    check_products(67, 129, 33);
    check_products(700, 64, 1003); // several tiles
}

static void the_plain_loops_are_those_of_the_library(void **state) {
    (void)state;
    enum { M = 70, N = 130, K = 257 };
    for (int transposed = 0; transposed < 4; transposed++) {
        bool a_transposed = (transposed & 1) != 0, b_transposed = (transposed & 2) != 0;
        Both a = both_new(M * K), b = both_new(K * N), result = both_new(M * N);
        uint16_t *plain = (uint16_t *)malloc(M * N * sizeof(uint16_t));
        Matmul work = matmul_describe(PRECISION_BF16, both_reals(&result, PRECISION_BF16), N,
                                      both_reals(&a, PRECISION_BF16), a_transposed ? M : K, a_transposed,
                                      both_reals(&b, PRECISION_BF16), b_transposed ? K : N, b_transposed, M,
                                      N, K, false);
        matmul_block(&work);
        for (size_t i = 0; i < M * N; i++) { result.floats[i] = bf16_to_float(result.halves[i]); }
        work.result = (Real *)(void *)plain;
        matmul_block_plain(&work);
        // Both were rounded, and may have been from two sides of a tie.
        for (size_t i = 0; i < M * N; i++) {
            double expected = (double)result.floats[i];
            assert_close((double)bf16_to_float(plain[i]), expected, fabs(expected) / 127 + 1e-4,
                         "plain product");
        }
        free(plain);
        both_free(&a);
        both_free(&b);
        both_free(&result);
    }
}

// What the library multiplies in bf16, it multiplies in fp32 through the same calls, on every
// processor. The scale, what is added to, the strides and the layouts must arrive. Elements
// between the rows of a result stay as they are.
static void a_described_product_is_that_of_the_plain_loops(void **state) {
    (void)state;
#ifdef ACCO_NO_ONEDNN
    skip();
#else
    enum { M = 37, N = 29, K = 53, GAP = 3, STRIDE = N + GAP };
    for (int kind = 0; kind < 16; kind++) {
        bool a_transposed = (kind & 1) != 0, b_transposed = (kind & 2) != 0, adds = (kind & 4) != 0;
        Both a = both_new(K * (M + GAP) + M * (K + GAP)), b = both_new(K * (N + GAP) + N * (K + GAP)),
             expected = both_new(M * STRIDE);
        float got[M * STRIDE];
        memcpy(got, expected.floats, sizeof got);
        Matmul work = matmul_describe(PRECISION_FP32, as_reals(expected.floats), STRIDE, as_reals(a.floats),
                                      (a_transposed ? M : K) + GAP, a_transposed, as_reals(b.floats),
                                      (b_transposed ? K : N) + GAP, b_transposed, M, N, K, adds);
        work.scale = (kind & 8) != 0 ? 0.125f : 1.0f;
        OnednnMatrix left = {a.floats, M, K, work.a_stride, a_transposed, PRECISION_FP32},
                     right = {b.floats, K, N, work.b_stride, b_transposed, PRECISION_FP32},
                     result = {got, M, N, STRIDE, false, PRECISION_FP32};
        assert_true(onednn_multiply_any(&left, &right, &result, work.scale, adds));
        matmul_block_plain(&work);
        check_sums("described product", got, expected.floats, M * STRIDE, 1e-4);
        both_free(&a);
        both_free(&b);
        both_free(&expected);
    }
#endif
}

// ---- Products by AMX ------------------------------------------------------------------

// Memory that ends where a page begins that may not be touched: who goes beyond it crashes.
static size_t edge_pages(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

static void *edge_new(size_t bytes) {
    size_t pages = edge_pages(bytes);
    char *base = (char *)mmap(NULL, pages + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(base != MAP_FAILED && mprotect(base + pages, 4096, PROT_NONE) == 0);
    return base + pages - bytes;
}

static void edge_free(void *memory, size_t bytes) {
    munmap((char *)memory + bytes - edge_pages(bytes), edge_pages(bytes) + 4096);
}

// A matrix of small integers, `gap` columns of NaN behind each row but the last: sums of their
// products are exact in any order, and who reads a gap is seen.
static size_t integers_bytes(int rows, int columns, int gap) {
    return ((size_t)rows * (columns + gap) - gap) * sizeof(uint16_t);
}

static uint16_t *integers(int rows, int columns, int gap) {
    size_t bytes = integers_bytes(rows, columns, gap);
    uint16_t *numbers = (uint16_t *)edge_new(bytes);
    for (int i = 0; i < (int)(bytes / sizeof *numbers); i++) {
        float number = (float)(int)(random_uniform(&test_random) * 9) - 4;
        numbers[i] = bf16_from_float(i % (columns + gap) < columns ? number : NAN);
    }
    return numbers;
}

// A product and what it is computed with. Elements of its result are integers, before.
typedef struct Exact {
    int M, N, K, a_gap, b_gap, gap;
    bool a_transposed, b_transposed, adds, rounds;
    float scale;
} Exact;

// The same elements by AMX, by one thread or three, as by the plain loops, to the bit; and
// nothing between the rows is written.
static void check_exact(const Exact *exact, const Stream streams[2]) {
    int M = exact->M, N = exact->N, K = exact->K, stride = N + exact->gap;
    bool a_transposed = exact->a_transposed, b_transposed = exact->b_transposed;
    int a_rows = a_transposed ? K : M, a_columns = a_transposed ? M : K, b_rows = b_transposed ? N : K,
        b_columns = b_transposed ? K : N;
    Precision precision = exact->rounds ? PRECISION_BF16 : PRECISION_FP32;
    size_t count = (size_t)M * stride - exact->gap, bytes = count * precision_bytes(precision);
    uint16_t *a = integers(a_rows, a_columns, exact->a_gap), *b = integers(b_rows, b_columns, exact->b_gap);
    Real *results[3];
    for (int way = 0; way < 3; way++) {
        results[way] = (Real *)edge_new(bytes);
        for (size_t i = 0; i < count; i++) { real_store(results[way], i, (float)(i % 13), precision); }
        Matmul work = matmul_describe(PRECISION_BF16, results[way], stride, (Real *)(void *)a,
                                      a_columns + exact->a_gap, a_transposed, (Real *)(void *)b,
                                      b_columns + exact->b_gap, b_transposed, M, N, K, exact->adds);
        work.result_precision = precision;
        work.scale = exact->scale;
        if (way == 2) {
            matmul_block_plain(&work);
        } else {
            Stream stream = streams[way];
            matmul(&stream, &work);
        }
        if (way < 2) { continue; }
        for (int other = 0; other < 2; other++) {
            if (memcmp(results[other], results[2], bytes) == 0) { continue; }
            fail_msg("%d x %d x %d%s%s%s%s: not the plain loops' bits", M, N, K,
                     a_transposed ? ", a turned" : "", b_transposed ? ", b turned" : "",
                     exact->adds ? ", added" : "", exact->rounds ? ", rounded" : "");
        }
    }
    for (int way = 0; way < 3; way++) { edge_free(results[way], bytes); }
    edge_free(a, integers_bytes(a_rows, a_columns, exact->a_gap));
    edge_free(b, integers_bytes(b_rows, b_columns, exact->b_gap));
}

static void amx_computes_what_the_plain_loops_do(void **state) {
    (void)state;
    if (!amx_is_there()) { leave_out("to run on a processor with AMX"); }
    const int shapes[][3] = {{1, 1, 1},       {5, 7, 3},       {32, 32, 32},   {33, 31, 33},
                             {16, 48, 64},    {64, 40, 160},   {70, 530, 100}, {31, 9, 1056},
                             {40, 600, 1537}, {530, 33, 1600}, {67, 300, 97},  {1, 1000, 70},
                             {1100, 3, 40},   {1030, 520, 64}, {97, 65, 3100}, {64, 33, 2080}};
    Stream streams[2] = {stream_in(PRECISION_BF16, 1), stream_in(PRECISION_BF16, 3)};
    for (size_t shape = 0; shape < sizeof shapes / sizeof shapes[0]; shape++) {
        for (int kind = 0; kind < 16; kind++) {
            Exact exact = {
                shapes[shape][0], shapes[shape][1], shapes[shape][2], kind % 3,        kind % 5, kind % 4,
                (kind & 1) != 0,  (kind & 2) != 0,  (kind & 4) != 0,  (kind & 8) != 0, 1.0f};
            exact.scale = kind % 5 == 4 ? 0.25f : 1.0f;
            check_exact(&exact, streams);
        }
    }
    stream_end(&streams[0]);
    stream_end(&streams[1]);
}

// Bits of an element depend neither on the tile that it is in nor on threads, also where sums are
// not exact: the product of some rows and columns is those of the whole.
static void amx_sums_have_one_order(void **state) {
    (void)state;
    if (!amx_is_there()) { leave_out("to run on a processor with AMX"); }
    enum { M = 1090, N = 600, K = 1630, ROWS = 70, COLUMNS = 40, ROW = 1003, COLUMN = 490 };
    Stream one = stream_in(PRECISION_BF16, 1), three = stream_in(PRECISION_BF16, 3);
    for (int transposed = 0; transposed < 2; transposed++) {
        bool turned = transposed == 1;
        Both a = both_new(M * K), b = both_new(K * N);
        float *whole = (float *)calloc(M * N, sizeof *whole),
              *part = (float *)calloc(ROWS * COLUMNS, sizeof *part);
        Real *left = both_reals(&a, PRECISION_BF16), *right = both_reals(&b, PRECISION_BF16);
        Matmul all = matmul_describe(PRECISION_BF16, as_reals(whole), N, left, turned ? M : K, turned, right,
                                     turned ? N : K, !turned, M, N, K, true),
               some = all;
        matmul(&three, &all);
        some.M = ROWS, some.N = COLUMNS, some.result = as_reals(part), some.result_stride = COLUMNS;
        some.a = real_at_const(left, turned ? ROW : (size_t)ROW * K, PRECISION_BF16);
        some.b = real_at_const(right, turned ? COLUMN : (size_t)COLUMN * K, PRECISION_BF16);
        matmul(&one, &some);
        for (int row = 0; row < ROWS; row++) {
            assert_memory_equal(part + (size_t)row * COLUMNS, whole + (size_t)(ROW + row) * N + COLUMN,
                                COLUMNS * sizeof *part);
        }
        free(whole);
        free(part);
        both_free(&a);
        both_free(&b);
    }
    stream_end(&one);
    stream_end(&three);
}

// What a tile keeps has room in the workspace, on any machine: panels of b as deep as a pass, and
// the sums that are not in the result, of one row of blocks or, where they wait, of all. Long
// results are cut until each thread has two tiles, but not into sides below 256.
static void amx_tiles_have_room(void **state) {
    (void)state;
    static const int sides[] = {1, 31, 33, 500, 513, 1000, 2049, 5000, 30000, 60001},
                     depths[] = {32, 33, 1024, 1025, 4096};
    for (int kind = 0; kind < 10 * 10 * 5 * 8; kind++) {
        int M = sides[kind % 10], N = sides[kind / 10 % 10], depth = depths[kind / 100 % 5], tile_M, tile_N;
        bool rows_are_lines = (kind / 500 & 1) != 0, in_place = (kind / 500 & 2) != 0;
        int threads = (kind / 500 & 4) != 0 ? 16 : 1;
        AmxOperand a = {NULL, M, depth, depth, rows_are_lines}, b = {NULL, N, depth, depth, true};
        AmxResult result = {NULL, N, in_place ? PRECISION_FP32 : PRECISION_BF16, false, 1.0f};
        amx_choose_tile(&a, &b, &result, threads, &tile_M, &tile_N);
        long long waiting = in_place ? AMX_PANEL : tile_N, across = (N + tile_N - 1) / tile_N,
                  down = (M + tile_M - 1) / tile_M;
        waiting *= amx_sums_wait(depth) ? tile_M : AMX_PANEL;
        if (!(tile_M >= AMX_PANEL && tile_N >= AMX_PANEL && tile_M % AMX_PANEL == 0 &&
              tile_N % AMX_PANEL == 0 && tile_N <= AMX_COLUMNS && waiting <= AMX_SUMS)) {
            fail_msg("%d x %d x %d: tiles of %d x %d", M, N, depth, tile_M, tile_N);
        }
        bool long_sides = M >= 2 * AMX_LEAST_SIDE * down || N >= 2 * AMX_LEAST_SIDE * across;
        assert_true(threads == 1 || across * down >= AMX_TILES * threads || !long_sides);
        assert_true(M <= AMX_PANEL || tile_M < M + AMX_PANEL);
    }
}

// ---- Layers ---------------------------------------------------------------------------

static void layernorms_round_what_they_store(void **state) {
    (void)state;
    enum { ROWS = 37, C = 131, COUNT = ROWS * C };
    Both before = both_new(COUNT), branch = both_new(COUNT), residual = both_new(COUNT),
         output = both_new(COUNT), d_output = both_new(COUNT), d_residual = both_new(COUNT),
         bias = both_new(C), weight = both_new(C), shift = both_new(C);
    float statistics[2][2 * ROWS], sums[2][3][C],
        *partials = (float *)malloc(ROW_BLOCKS * 3 * C * sizeof(float));
    memset(sums, 0, sizeof sums);
    // The residual is stored, and what follows reads it as it is stored.
    for (int precision = 1; precision >= 0; precision--) {
        Precision p = (Precision)precision;
        Stream stream = stream_in(p, 2);
        Layernorm forward = {.statistics = statistics[p],
                             .residual = both_reals(&residual, p),
                             .weight = both_reals(&weight, p),
                             .bias = both_reals(&shift, p),
                             .epsilon = 1e-5f,
                             .rows = ROWS,
                             .channels = C,
                             .output = both_reals(&output, p),
                             .residual_before = both_reals(&before, p),
                             .branch = both_reals(&branch, p),
                             .branch_bias = both_reals(&bias, p)};
        if (p == PRECISION_FP32) {
            for (size_t i = 0; i < COUNT; i++) {
                float exact = before.floats[i] + (branch.floats[i] + bias.floats[i % C]);
                assert_int_equal(residual.halves[i], bf16_from_float(exact));
                residual.floats[i] = bf16_to_float(residual.halves[i]);
            }
            forward.branch = NULL;
        }
        layernorm_forward(&stream, &forward);
        Layernorm backward = {.statistics = statistics[p],
                              .residual = both_reals(&residual, p),
                              .weight = both_reals(&weight, p),
                              .rows = ROWS,
                              .channels = C,
                              .d_residual = both_reals(&d_residual, p),
                              .accumulate = true,
                              .d_weight = sums[p][0],
                              .d_bias = sums[p][1],
                              .d_branch_bias = sums[p][2],
                              .partials = partials,
                              .d_output = both_reals(&d_output, p)};
        layernorm_backward(&stream, &backward);
        stream_end(&stream);
    }
    check_both("output", &output, 1e-5);
    check_both("gradient", &d_residual, 1e-5);
    check_sums("sums over rows", &sums[1][0][0], &sums[0][0][0], 3 * C, 1e-3);
    Both *all[9] = {&before, &branch, &residual, &output, &d_output, &d_residual, &bias, &weight, &shift};
    for (int i = 0; i < 9; i++) { both_free(all[i]); }
    free(partials);
}

static void gelus_round_what_they_store(void **state) {
    (void)state;
    enum { ROWS = 41, F = 301, COUNT = ROWS * F };
    Both saved = both_new(COUNT), output = both_new(COUNT), gradient = both_new(COUNT), bias = both_new(F);
    float d_bias[2][F], expected[F], *partials = (float *)malloc(ROW_BLOCKS * F * sizeof(float)),
                                     *d_output = (float *)malloc(COUNT * sizeof(float));
    memset(d_bias, 0, sizeof d_bias);
    memset(expected, 0, sizeof expected);
    memcpy(d_output, gradient.floats, COUNT * sizeof(float));
    for (int precision = 0; precision < 2; precision++) {
        Precision p = (Precision)precision;
        Stream stream = stream_in(p, 3);
        call_gelu_forward(&stream, both_reals(&output, p), both_reals(&saved, p), both_reals(&bias, p), ROWS,
                          F);
        call_gelu_backward(&stream, both_reals(&gradient, p), F, d_bias[p], partials, both_reals(&saved, p),
                           NULL, ROWS, F);
        stream_end(&stream);
    }
    check_both("output", &output, 1e-6);
    check_both("derivative", &saved, 1e-6);
    // The derivative was rounded before it was multiplied by. The product is summed as it
    // is, and rounded where it is stored.
    for (size_t i = 0; i < COUNT; i++) {
        float product = d_output[i] * bf16_to_float(saved.halves[i]);
        assert_int_equal(gradient.halves[i], bf16_from_float(product));
        expected[i % F] += product;
    }
    check_sums("gradient of the bias", d_bias[1], expected, F, 1e-4);
    both_free(&saved);
    both_free(&output);
    both_free(&gradient);
    both_free(&bias);
    free(d_output);
    free(partials);
}

static void embeddings_are_rounded_once(void **state) {
    (void)state;
    enum { B = 3, T = 7, C = 130, V = 5 };
    Both wte = both_new(V * C), wpe = both_new(T * C), output = both_new(B * T * C);
    float d_wte[2][V * C], d_wpe[2][T * C];
    int32_t tokens[B * T];
    memset(d_wte, 0, sizeof d_wte);
    memset(d_wpe, 0, sizeof d_wpe);
    for (int i = 0; i < B * T; i++) { tokens[i] = i * 3 % V; }
    for (int precision = 0; precision < 2; precision++) {
        Precision p = (Precision)precision;
        Stream stream = stream_in(p, 2);
        call_embedding_backward(&stream, d_wte[p], d_wpe[p], NULL, both_reals(&output, p), tokens, NULL, B, T,
                                C);
        call_embedding_forward(&stream, both_reals(&output, p), both_reals(&wte, p), both_reals(&wpe, p),
                               tokens, B, T, C);
        stream_end(&stream);
    }
    check_both("output", &output, 0);
    assert_memory_equal(d_wte[0], d_wte[1], sizeof d_wte[0]);
    assert_memory_equal(d_wpe[0], d_wpe[1], sizeof d_wpe[0]);
    both_free(&wte);
    both_free(&wpe);
    both_free(&output);
}

// Also where the model is sure of the target: the gradient there is p - 1, not p rounded
// and then 1 less.
static void losses_are_exact_and_their_gradients_rounded_once(void **state) {
    (void)state;
    enum { ROWS = 9, V = 333 };
    Both logits = both_new(ROWS * V);
    float losses[2][ROWS];
    int32_t targets[ROWS];
    for (int row = 0; row < ROWS; row++) {
        targets[row] = row == 4 ? -1 : row * 31;
        if (row > 5) { // p of the target is within a thousandth of 1
            logits.floats[row * V + targets[row]] = 14.0f;
            logits.halves[row * V + targets[row]] = bf16_from_float(14.0f);
        }
    }
    for (int precision = 0; precision < 2; precision++) {
        Precision p = (Precision)precision;
        Stream stream = stream_in(p, 2);
        cross_entropy(&stream, both_reals(&logits, p), V, losses[p], targets, ROWS, V, 0.25f);
        stream_end(&stream);
    }
    check_sums("losses", losses[1], losses[0], ROWS, 1e-6);
    check_both("gradient", &logits, 1e-8);
    both_free(&logits);
}

// by_amx: the products of bf16.
static void check_attention_by(bool by_amx, int B, int T, int C, int H, int KV, int window) {
    int width = C + 2 * KV * (C / H);
    size_t rows = (size_t)(B * T), count = rows * (size_t)C, whole = rows * (size_t)width;
    Both qkv = both_new(whole), output = both_new(count), d_output = both_new(count), d_qkv = both_new(whole);
    float *logsumexp[2];
    for (size_t i = 0; i < whole; i++) { // scores of a few units
        qkv.floats[i] *= 0.5f;
        qkv.halves[i] = bf16_from_float(qkv.floats[i]);
    }
    for (int precision = 0; precision < 2; precision++) {
        Precision p = (Precision)precision;
        Stream stream = stream_in(p, 2);
        void *amx = stream.gemm;
        stream.gemm = by_amx ? amx : NULL;
        float *workspace = (float *)malloc(attention_workspace_floats(T, C / H, 2, p) * sizeof(float));
        logsumexp[p] = (float *)malloc(rows * (size_t)H * sizeof(float));
        Attention work = {.output = both_reals(&output, p),
                          .logsumexp = logsumexp[p],
                          .scratch = workspace,
                          .qkv = both_reals(&qkv, p),
                          .d_output = both_reals(&d_output, p),
                          .B = B,
                          .T = T,
                          .channels = C,
                          .heads = H,
                          .kv_heads = KV,
                          .d_qkv_stride = width,
                          .window = window};
        attention(&stream, &work);
        work.d_qkv = both_reals(&d_qkv, p);
        attention(&stream, &work);
        stream.gemm = amx;
        free(workspace);
        stream_end(&stream);
    }
    // For AMX probabilities and gradients of scores are rounded, each by one part in 512.
    check_both("attention", &output, by_amx ? 4e-3 : 1e-5);
    check_both("gradient of qkv", &d_qkv, by_amx ? 2e-2 : 1e-4);
    check_sums("logsumexp", logsumexp[1], logsumexp[0], rows * (size_t)H, 1e-5);
    free(logsumexp[0]);
    free(logsumexp[1]);
    both_free(&qkv);
    both_free(&output);
    both_free(&d_output);
    both_free(&d_qkv);
}

static void check_attention(int B, int T, int C, int H, int KV, int window) {
    check_attention_by(false, B, T, C, H, KV, window);
    if (amx_is_there()) { check_attention_by(true, B, T, C, H, KV, window); }
}

static void attention_is_rounded_once(void **state) {
    (void)state;
    check_attention(1, 1, 8, 1, 1, 0);
    check_attention(2, 65, 24, 3, 3, 0);
    check_attention(2, 130, 32, 2, 2, 17);
    check_attention(2, 70, 96, 6, 2, 30);
    check_attention(1, 600, 8, 1, 1, 0); // with AMX several tiles of keys
}

// ---- The model ------------------------------------------------------------------------

// A copy of the parameters stays while their version is known to be the same. A pass that knows
// of no version, as a validation, makes it again.
static void expect_new_copies(Model *model, Stream *stream, const float *parameters, size_t count,
                              const int32_t *tokens, const int32_t *targets) {
    float *changed = (float *)malloc(count * sizeof(float)), *unused = (float *)calloc(count, sizeof(float));
    for (size_t i = 0; i < count; i++) { changed[i] = 1.5f * parameters[i]; }
    const Pace first = {.version = 1}, second = {.version = 2};
    float before = model_loss_and_gradients(model, stream, parameters, unused, tokens, targets, &first),
          known = model_loss_and_gradients(model, stream, changed, unused, tokens, targets, &first),
          unknown = model_loss(model, stream, changed, tokens, targets),
          after = model_loss_and_gradients(model, stream, changed, unused, tokens, targets, &second);
    assert_true(known == before && unknown == after && after != before);
    free(changed);
    free(unused);
}

// Loss and gradients of a small model in both formats; with any number of threads the same
// bits.
static void check_model(const ModelFamily *family) {
    enum { B = 3, T = 29, RUNS = 3 };
    const Precision precisions[RUNS] = {PRECISION_FP32, PRECISION_BF16, PRECISION_BF16};
    ModelConfig config;
    ParameterTable table;
    Error error;
    float losses[RUNS], *parameters, *gradients[RUNS];
    int32_t tokens[B * T], targets[B * T];
    assert_true(model_find("tiny", &config, &error));
    config.family = family;
    config.scaled_scores = family == &gpt2_family;
    parameter_table_make(&config, &table);
    parameters = (float *)malloc(table.parameter_count * sizeof(float));
    for (int i = 0; i < B * T; i++) {
        tokens[i] = (int32_t)(random_uniform(&test_random) * config.vocabulary);
        targets[i] = (int32_t)(random_uniform(&test_random) * config.vocabulary);
    }
    for (int run = 0; run < RUNS; run++) {
        Model model;
        Arena arena;
        ModelSettings settings = model_on_cpu(B, T, run + 1);
        Stream stream = stream_in(precisions[run], run + 1);
        memset(&arena, 0, sizeof arena);
        settings.precision = precisions[run];
        settings.given_weights = false;
        model_reserve(&model, &arena, &config, &settings);
        assert_true(arena_commit(&arena, &error));
        if (run == 0) { parameters_initialize(&table, 3, stream.pool, parameters); }
        gradients[run] = (float *)calloc(table.parameter_count, sizeof(float));
        losses[run] =
            model_loss_and_gradients(&model, &stream, parameters, gradients[run], tokens, targets, NULL);
        if (run > 0) {
            expect_new_copies(&model, &stream, parameters, table.parameter_count, tokens, targets);
        }
        arena_release(&arena);
        stream_end(&stream);
    }
    assert_close((double)losses[1], (double)losses[0], 2e-3, "loss");
    assert_true(losses[1] == losses[2]);
    assert_memory_equal(gradients[1], gradients[2], table.parameter_count * sizeof(float));
    for (int t = 0; t < table.count; t++) {
        const ParameterInfo *entry = &table.entries[t];
        double squares = 0, differences = 0;
        for (size_t i = entry->offset; i < entry->offset + entry->count; i++) {
            double difference = (double)gradients[1][i] - (double)gradients[0][i];
            squares += (double)gradients[0][i] * (double)gradients[0][i];
            differences += difference * difference;
        }
        if (!(sqrt(differences) <= 0.03 * sqrt(squares) + 1e-9)) {
            fail_msg("gradient of %s: off by %.3f of its norm", entry->name, sqrt(differences / squares));
        }
    }
    for (int run = 0; run < RUNS; run++) { free(gradients[run]); }
    free(parameters);
    parameter_table_free(&table);
}

static void a_model_in_bf16_is_near_that_in_fp32(void **state) {
    (void)state;
    check_model(&gpt_neo_family);
    check_model(&gpt2_family);
}

// A rate is that of products in its own format, and the faster one is chosen.
static void rates_are_measured_in_both_formats(void **state) {
    (void)state;
    const bool both[2] = {true, true}, one[2] = {true, false};
    ProductRates rates = product_rates_measure(2, both, 64, 96, 200, 0.05),
                 single = product_rates_measure(2, one, 64, 96, 200, 0.05);
    assert_true(rates.gflops[PRECISION_FP32] > 0 && rates.gflops[PRECISION_FP32] < 1e6);
    assert_true((rates.gflops[PRECISION_BF16] > 0) == matmul_has_bf16() &&
                rates.gflops[PRECISION_BF16] < 1e6);
    assert_true(single.gflops[PRECISION_FP32] > 0 && single.gflops[PRECISION_BF16] == 0);
    // Of many rows a part is computed, and counted: a thousand times as much, were all counted.
    double some = product_rates_measure(2, one, PRODUCT_RATES_ROWS, 96, 200, 0.05).gflops[PRECISION_FP32],
           more = product_rates_measure(2, one, 1 << 20, 96, 200, 0.05).gflops[PRECISION_FP32];
    if (!(more < 100 * some)) { fail_msg("%g GFLOP/s for more rows, %g for some", more, some); }
    // Of three products of 2 operations for each of their elements, that take 2 seconds.
    clock_step = 2;
    rates = product_rates_measure(1, both, 64, 96, 200, 100);
    single = product_rates_measure(1, one, 1 << 20, 96, 200, 0);
    clock_step = 0;
    assert_close(rates.gflops[PRECISION_FP32], 3e-9 * 64 * 96 * 200, 1e-12, "rate in fp32");
    assert_close(rates.gflops[PRECISION_BF16], matmul_has_bf16() ? 3e-9 * 64 * 96 * 200 : 0, 1e-12,
                 "rate in bf16");
    assert_close(single.gflops[PRECISION_FP32], 3e-9 * PRODUCT_RATES_ROWS * 96 * 200, 1e-12, "of a part");
    ProductRates slower = {{200, 150}}, faster = {{100, 150}}, noise = {{100, 105}}, missing = {{100, 0}};
    assert_true(product_rates_faster(&slower) == PRECISION_FP32);
    assert_true(product_rates_faster(&faster) == PRECISION_BF16);
    assert_true(product_rates_faster(&noise) == PRECISION_FP32);
    assert_true(product_rates_faster(&missing) == PRECISION_FP32);
}

int main(void) {
    test_random.state = 16;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_are_rounded_once),
        cmocka_unit_test(the_plain_loops_are_those_of_the_library),
        cmocka_unit_test(a_described_product_is_that_of_the_plain_loops),
        cmocka_unit_test(amx_computes_what_the_plain_loops_do),
        cmocka_unit_test(amx_sums_have_one_order),
        cmocka_unit_test(amx_tiles_have_room),
        cmocka_unit_test(layernorms_round_what_they_store),
        cmocka_unit_test(gelus_round_what_they_store),
        cmocka_unit_test(embeddings_are_rounded_once),
        cmocka_unit_test(losses_are_exact_and_their_gradients_rounded_once),
        cmocka_unit_test(attention_is_rounded_once),
        cmocka_unit_test(a_model_in_bf16_is_near_that_in_fp32),
        cmocka_unit_test(rates_are_measured_in_both_formats),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
