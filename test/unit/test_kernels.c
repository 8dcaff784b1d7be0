// test_kernels.c: each operation against its plain definition in double, at odd shapes,
// with NaN, and with 1 and 3 threads.
//
// test_gpt.c compares the whole model with Hugging Face; here a failure names the
// operation.
#include "test/harness.h"

#include <dirent.h>

#include "kernels/kernels.h"
#include "runtime/random.h"
#include "test/layer_calls.h"

#if defined(__SANITIZE_THREAD__)
enum { THREADS_OF_A_PLAIN_PROCESS = 2 }; // ThreadSanitizer has one of its own
#else
enum { THREADS_OF_A_PLAIN_PROCESS = 1 };
#endif

static Random test_random;

static float *random_array(size_t count) {
    float *values = (float *)malloc((count > 0 ? count : 1) * sizeof(float));
    for (size_t i = 0; i < count; i++) { values[i] = (float)random_normal(&test_random); }
    return values;
}

static float *copy_array(const float *values, size_t count) {
    float *copy = (float *)malloc(count * sizeof(float));
    memcpy(copy, values, count * sizeof(float));
    return copy;
}

static void assert_arrays_close(const char *what, const float *got, const double *expected, size_t count,
                                double tolerance) {
    for (size_t i = 0; i < count; i++) {
        double difference = fabs((double)got[i] - expected[i]);
        if (!(difference <= tolerance * fmax(1.0, fabs(expected[i])))) {
            fail_msg("%s[%zu]: %.9g, expected %.9g", what, i, (double)got[i], expected[i]);
        }
    }
}

static Stream test_stream(int threads) {
    Stream stream;
    memset(&stream, 0, sizeof stream);
    stream.pool = thread_pool_create(threads, true);
    return stream;
}

// ---- Vector math ----------------------------------------------------------------------

static void test_exp(void **state) {
    (void)state;
    for (double x = -87.0; x < 88.7; x += 0.000713) {
        double expected = exp((double)(float)x), got = (double)vector_exp((float)x);
        if (!(fabs(got - expected) <= 3e-7 * expected)) {
            fail_msg("exp(%.9g): relative error %.2e", x, fabs(got / expected - 1));
        }
    }
    for (float x = -104.0f; x < -87.0f; x += 0.01f) {
        assert_true(fabs((double)vector_exp(x) - exp((double)x)) <= 1.5e-45);
    }
    assert_true(isnan(vector_exp(NAN)) && isnan(vector_exp(-NAN)));
    assert_true(vector_exp(-INFINITY) == 0.0f && vector_exp(-200.0f) == 0.0f && vector_exp(0.0f) == 1.0f);
    assert_true(vector_exp(INFINITY) == INFINITY && vector_exp(89.0f) == INFINITY);
}

static void test_logistic(void **state) {
    (void)state;
    float complement;
    for (double x = -86.0; x < 90.0; x += 0.00117) {
        double expected = 1.0 / (1.0 + exp(-(double)(float)x)), other = 1.0 / (1.0 + exp((double)(float)x));
        double got = (double)vector_logistic((float)x, &complement);
        assert_true(fabs(got - expected) <= 5e-7 * expected);
        if (x < 85.0) { assert_true(fabs((double)complement - other) <= 6e-7 * other); }
    }
    assert_true(isnan(vector_logistic(NAN, &complement)) && isnan(complement));
    assert_true(vector_logistic(INFINITY, &complement) == 1.0f && complement == 0.0f);
    assert_true(vector_logistic(-INFINITY, &complement) < 1e-37f && complement == 1.0f);
}

// The same functions inside loops that the compiler vectorises.
static void test_vectorised_loops(void **state) {
    (void)state;
    float in[100], out[100];
    for (int i = 0; i < 100; i++) { in[i] = (float)(i - 50) * 2.1f; }
    in[37] = NAN;
    in[62] = -INFINITY;
    for (int i = 0; i < 100; i++) { out[i] = vector_exp(in[i]); }
    for (int i = 0; i < 100; i++) {
        double expected = exp((double)in[i]);
        bool good = isnan(in[i])      ? isnan(out[i])
                    : expected > 3e38 ? isinf(out[i])
                                      : fabs((double)out[i] - expected) <= 3e-7 * expected + 1e-44;
        if (!good) { fail_msg("exp(%g) in a loop: %g", (double)in[i], (double)out[i]); }
    }
}

// ---- Matmul ---------------------------------------------------------------------------

static double product_element(const Matmul *work, int m, int n) {
    double sum = 0.0;
    for (int k = 0; k < work->K; k++) {
        size_t a = work->a_transposed ? (size_t)k * (size_t)work->a_stride + (size_t)m
                                      : (size_t)m * (size_t)work->a_stride + (size_t)k;
        size_t b = work->b_transposed ? (size_t)n * (size_t)work->b_stride + (size_t)k
                                      : (size_t)k * (size_t)work->b_stride + (size_t)n;
        sum += (double)real_floats_const(work->a)[a] * (double)real_floats_const(work->b)[b];
    }
    return sum;
}

enum { BY_ONE_THREAD, BY_THREE_THREADS, BY_PLAIN, WAYS };

static void check_product(int M, int N, int K, int transposed, bool accumulate, int padding) {
    Stream one = test_stream(1), three = test_stream(3);
    Matmul work = {.scale = 1.0f, .count = 1, .most = 1};
    work.M = M;
    work.N = N;
    work.K = K;
    work.a_transposed = (transposed & 1) != 0;
    work.b_transposed = (transposed & 2) != 0;
    work.a_stride = (work.a_transposed ? M : K) + padding;
    work.b_stride = (work.b_transposed ? K : N) + padding;
    work.result_stride = N + padding;
    work.accumulate = accumulate;
    float *a = random_array((size_t)work.a_stride * (size_t)(work.a_transposed ? K : M));
    float *b = random_array((size_t)work.b_stride * (size_t)(work.b_transposed ? N : K));
    work.precision = work.result_precision = PRECISION_FP32;
    work.a = as_reals(a);
    work.b = as_reals(b);
    size_t count = (size_t)M * (size_t)work.result_stride;
    float *start = random_array(count), *results[WAYS];
    if (!accumulate) { start[0] = NAN; } // must be overwritten
    for (int way = 0; way < WAYS; way++) {
        results[way] = copy_array(start, count);
        work.result = as_reals(results[way]);
        if (way == BY_PLAIN) {
            matmul_block_plain(&work);
        } else {
            matmul(way == BY_ONE_THREAD ? &one : &three, &work);
        }
    }
    for (int m = 0; m < M; m++) {
        for (int n = 0; n < work.result_stride; n++) {
            size_t i = (size_t)m * (size_t)work.result_stride + (size_t)n;
            double expected = n >= N ? (double)start[i]
                                     : product_element(&work, m, n) + (accumulate ? (double)start[i] : 0.0);
            for (int way = 0; way < WAYS; way++) {
                assert_arrays_close("product", results[way] + i, &expected, 1, 2e-5);
            }
        }
    }
    for (size_t i = 0; i < count; i++) {
        assert_memory_equal(&results[BY_ONE_THREAD][i], &results[BY_THREE_THREADS][i], sizeof(float));
    }
    for (int way = 0; way < WAYS; way++) { free(results[way]); }
    free(start);
    free(a);
    free(b);
    thread_pool_destroy(one.pool);
    thread_pool_destroy(three.pool);
}

static void test_matmul(void **state) {
    (void)state;
    for (int transposed = 0; transposed < 4; transposed++) {
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            check_product(1, 1, 1, transposed, accumulate == 1, 0);
            check_product(7, 13, 5, transposed, accumulate == 1, 3);
            check_product(130, 67, 129, transposed, accumulate == 1, 1);
            check_product(1, 200, 33, transposed, accumulate == 1, 0);
            check_product(701, 1003, 9, transposed, accumulate == 1, 0); // several tiles
        }
    }
}

// oneDNN must not start threads of its own: with a pool of one the process has as many
// threads as before.
static void test_matmul_starts_no_threads(void **state) {
    (void)state;
    char library[96];
    if (strstr(onednn_describe(library), "oneDNN ") != library) { leave_out("oneDNN"); }
    Stream stream = test_stream(1);
    float *a = random_array(700 * 700), *b = random_array(700 * 700), *result = random_array(700 * 700);
    matmul_forward(&stream, as_reals(result), 700, as_reals(a), as_reals(b), 700, 700, 700);
    DIR *directory = opendir("/proc/self/task");
    int threads = 0;
    while (directory != NULL && threads < 100) {
        const struct dirent *entry = readdir(directory);
        if (entry == NULL) { break; }
        threads += entry->d_name[0] != '.';
    }
    if (directory != NULL) { closedir(directory); }
    assert_true(directory == NULL || threads <= THREADS_OF_A_PLAIN_PROCESS);
    free(a);
    free(b);
    free(result);
    thread_pool_destroy(stream.pool);
}

static void test_matmul_tiles(void **state) {
    (void)state;
    const int shapes[6][2] = {{1, 1}, {1, 50257}, {4096, 50257}, {50257, 768}, {8192, 65536}, {1000000, 3}};
    for (int i = 0; i < 6; i++) {
        int M = 0, N = 0;
        matmul_choose_tile(shapes[i][0], shapes[i][1], &M, &N);
        assert_true(M >= 1 && N >= 1 && M <= MATMUL_TILE_SIDE && N <= MATMUL_TILE_SIDE &&
                    M * N <= MATMUL_TILE_ELEMENTS);
    }
}

static void test_linear(void **state) {
    (void)state;
    int rows = 29, inputs = 11, outputs = 17;
    Stream stream = test_stream(2);
    float *x = random_array((size_t)(rows * inputs)), *w = random_array((size_t)(outputs * inputs)),
          *dy = random_array((size_t)(rows * outputs));
    float *y = random_array((size_t)(rows * outputs)), *dx = random_array((size_t)(rows * inputs)),
          *dw = random_array((size_t)(outputs * inputs));
    float *dw_before = copy_array(dw, (size_t)(outputs * inputs));
    matmul_forward(&stream, as_reals(y), outputs, as_reals(x), as_reals(w), rows, inputs, outputs);
    matmul_backward_input(&stream, as_reals(dx), inputs, as_reals(dy), outputs, as_reals(w), rows, inputs,
                          outputs);
    matmul_backward_weight(&stream, dw, as_reals(dy), outputs, as_reals(x), rows, inputs, outputs, false);
    for (int r = 0; r < rows; r++) {
        for (int o = 0; o < outputs; o++) {
            double sum = 0.0;
            for (int i = 0; i < inputs; i++) { sum += (double)x[r * inputs + i] * (double)w[o * inputs + i]; }
            assert_arrays_close("forward", &y[r * outputs + o], &sum, 1, 1e-5);
        }
        for (int i = 0; i < inputs; i++) {
            double sum = 0.0;
            for (int o = 0; o < outputs; o++) {
                sum += (double)dy[r * outputs + o] * (double)w[o * inputs + i];
            }
            assert_arrays_close("backward input", &dx[r * inputs + i], &sum, 1, 1e-5);
        }
    }
    for (int o = 0; o < outputs; o++) {
        for (int i = 0; i < inputs; i++) {
            double sum = (double)dw_before[o * inputs + i];
            for (int r = 0; r < rows; r++) { sum += (double)dy[r * outputs + o] * (double)x[r * inputs + i]; }
            assert_arrays_close("backward weight", &dw[o * inputs + i], &sum, 1, 1e-5);
        }
    }
    float *all[7] = {x, w, dy, y, dx, dw, dw_before};
    for (int i = 0; i < 7; i++) { free(all[i]); }
    thread_pool_destroy(stream.pool);
}

// ---- Whole vectors --------------------------------------------------------------------

// Copies, roundings and sums of squares of less than a block, of whole blocks, and of one and a
// remainder; nothing behind the end is written.
static void test_buffers(void **state) {
    (void)state;
    enum { BEHIND = 3 };
    static const size_t counts[] = {0, 1, BUFFER_BLOCK, BUFFER_BLOCK + 1, 2 * BUFFER_BLOCK, 100003};
    Stream stream = test_stream(3), halves = stream;
    halves.precision = PRECISION_BF16;
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
        size_t count = counts[c], all = count + BEHIND;
        float *values = random_array(all), *out = random_array(all), *before = copy_array(out, all);
        uint16_t *rounded = (uint16_t *)malloc(all * sizeof *rounded);
        double partials[8], squares = 0, pieces = 0;
        memset(rounded, 0xff, all * sizeof *rounded);
        buffer_copy(&stream, out, values, count);
        reals_from_floats(&halves, (Real *)(void *)rounded, values, count);
        for (size_t i = 0; i < all; i++) {
            assert_true(out[i] == (i < count ? values[i] : before[i]));
            assert_int_equal(rounded[i], i < count ? bf16_from_float(values[i]) : 0xffff);
            double square = (double)values[i] * (double)values[i];
            squares += i < count ? square : 0;
            pieces += i < 7 || (i >= 12 && i < 19) || (i >= 24 && i < 31) ? square : 0;
        }
        assert_close(buffer_sum_of_squares(&stream, values, count, count, 1, partials), squares,
                     1e-12 * squares, "sum of squares");
        if (count >= 100) { // three pieces of 7 elements, 12 apart
            assert_close(buffer_sum_of_squares(&stream, values, 7, 12, 3, partials), pieces, 1e-12 * pieces,
                         "sum of squares of pieces");
        }
        buffer_round(&stream, out, count);
        for (size_t i = 0; i < all; i++) {
            assert_true(out[i] == (i < count ? bf16_to_float(rounded[i]) : before[i]));
        }
        free(values);
        free(out);
        free(before);
        free(rounded);
    }
    thread_pool_destroy(stream.pool);
}

// ---- LayerNorm ------------------------------------------------------------------------

// In double, for a row x: y, the normalised row, and the gradient dx for the gradient dy of
// y. bias NULL: an RMSNorm.
static void layernorm_reference(const double *x, const float *weight, const float *bias, const float *dy,
                                int C, double epsilon, double *y, double *dx, double *normalised) {
    double mean = 0.0, variance = 0.0, sum = 0.0, product = 0.0;
    for (int c = 0; c < C && bias != NULL; c++) { mean += x[c] / C; }
    for (int c = 0; c < C; c++) { variance += (x[c] - mean) * (x[c] - mean) / C; }
    double scale = 1.0 / sqrt(variance + epsilon);
    for (int c = 0; c < C; c++) {
        normalised[c] = (x[c] - mean) * scale;
        y[c] = normalised[c] * (double)weight[c] + (bias != NULL ? (double)bias[c] : 0.0);
        sum += bias != NULL ? (double)dy[c] * (double)weight[c] / C : 0.0;
        product += (double)dy[c] * (double)weight[c] * normalised[c] / C;
    }
    for (int c = 0; c < C; c++) {
        dx[c] = scale * ((double)dy[c] * (double)weight[c] - sum - normalised[c] * product);
    }
}

static void check_layernorm(int rows, int C, bool branch, bool accumulate, bool biased, int threads) {
    Stream stream = test_stream(threads);
    size_t count = (size_t)rows * (size_t)C, width = (size_t)C;
    float *before = random_array(count), *added = random_array(count), *added_bias = random_array(width),
          *weight = random_array(width);
    float *bias = random_array(width), *residual = branch ? random_array(count) : copy_array(before, count),
          *output = random_array(count);
    float *statistics = random_array(2 * (size_t)rows), *dy = random_array(count),
          *d_residual = random_array(count);
    float *d_before = copy_array(d_residual, count), *partials = random_array(ROW_BLOCKS * 3 * width);
    float *sums = random_array(3 * width);
    double *expected_sums = (double *)malloc(7 * width * sizeof(double)), *x = expected_sums + 3 * width,
           *y = x + width, *dx = y + width, *normalised = dx + width;
    for (size_t i = 0; i < 3 * width; i++) { expected_sums[i] = (double)sums[i]; }
    Layernorm layer = {.statistics = statistics,
                       .residual = as_reals(residual),
                       .weight = as_reals(weight),
                       .bias = biased ? as_reals(bias) : NULL,
                       .epsilon = 1e-5f,
                       .rows = rows,
                       .channels = C,
                       .output = as_reals(output),
                       .residual_before = as_reals(branch ? before : NULL),
                       .branch = as_reals(branch ? added : NULL),
                       .branch_bias = as_reals(branch && biased ? added_bias : NULL),
                       .d_residual = as_reals(d_residual),
                       .accumulate = accumulate,
                       .d_weight = sums,
                       .d_bias = biased ? sums + width : NULL,
                       .d_branch_bias = branch ? sums + 2 * width : NULL,
                       .partials = partials,
                       .d_output = as_reals(dy)};
    layernorm_forward(&stream, &layer);
    layernorm_backward(&stream, &layer);
    for (int row = 0; row < rows; row++) {
        size_t offset = (size_t)row * width;
        for (size_t c = 0; c < width; c++) {
            x[c] = (double)before[offset + c] +
                   (branch ? (double)added[offset + c] + (biased ? (double)added_bias[c] : 0.0) : 0.0);
        }
        layernorm_reference(x, weight, biased ? bias : NULL, dy + offset, C, 1e-5, y, dx, normalised);
        assert_arrays_close("residual", residual + offset, x, width, 1e-6);
        assert_arrays_close("layernorm", output + offset, y, width, C == 1 ? 1e-4 : 2e-5);
        for (size_t c = 0; c < width; c++) {
            dx[c] += accumulate ? (double)d_before[offset + c] : 0.0;
            double terms[3] = {(double)dy[offset + c] * normalised[c], biased ? (double)dy[offset + c] : 0.0,
                               branch ? dx[c] : 0.0};
            for (size_t s = 0; s < 3; s++) { expected_sums[s * width + c] += terms[s]; }
        }
        assert_arrays_close("d_residual", d_residual + offset, dx, width, 1e-4);
    }
    for (size_t s = 0; s < 3; s++) {
        assert_arrays_close("column sums", sums + s * width, expected_sums + s * width, width, 2e-4);
    }
    float *all[13] = {before,     added, added_bias, weight,   bias,     residual, output,
                      statistics, dy,    d_residual, d_before, partials, sums};
    for (int i = 0; i < 13; i++) { free(all[i]); }
    free(expected_sums);
    thread_pool_destroy(stream.pool);
}

static void test_layernorm(void **state) {
    (void)state;
    for (int biased = 0; biased < 2; biased++) { // without biases it is an RMSNorm
        check_layernorm(1, 8, false, false, biased, 1);
        check_layernorm(37, 29, true, true, biased, 3);
        check_layernorm(100, 768, true, false, biased, 2);
        check_layernorm(33, 17, false, true, biased, 2);
    }
}

// ---- GELU -----------------------------------------------------------------------------

static double gelu_reference(double x) {
    return 0.5 * x * (1.0 + tanh(sqrt(2.0 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
}

static void test_gelu(void **state) {
    (void)state;
    int rows = 41, columns = 301;
    size_t count = (size_t)(rows * columns);
    Stream stream = test_stream(3);
    float *product = random_array(count), *bias = random_array((size_t)columns),
          *output = random_array(count), *gradient = random_array(count);
    for (size_t i = 0; i < count; i++) { product[i] *= 2.0f; }
    float *derivative = copy_array(product, count), *upstream = copy_array(gradient, count),
          *d_bias = random_array((size_t)columns);
    float *d_bias_before = copy_array(d_bias, (size_t)columns),
          *partials = random_array((size_t)(ROW_BLOCKS * columns));
    call_gelu_forward(&stream, as_reals(output), as_reals(derivative), as_reals(bias), rows, columns);
    call_gelu_backward(&stream, as_reals(gradient), columns, d_bias, partials, as_reals(derivative), NULL,
                       rows, columns);
    for (int c = 0; c < columns; c++) {
        double sum = (double)d_bias_before[c];
        for (int r = 0; r < rows; r++) {
            size_t i = (size_t)(r * columns + c);
            double x = (double)product[i] + (double)bias[c], step = 1e-5;
            double expected = gelu_reference(x),
                   slope = (gelu_reference(x + step) - gelu_reference(x - step)) / (2 * step);
            double back = slope * (double)upstream[i];
            assert_arrays_close("gelu", &output[i], &expected, 1, 1e-6);
            assert_arrays_close("gelu derivative", &derivative[i], &slope, 1, 3e-6);
            assert_arrays_close("gelu gradient", &gradient[i], &back, 1, 1e-5);
            sum += back;
        }
        assert_arrays_close("gelu bias", &d_bias[c], &sum, 1, 1e-4);
    }
    derivative[5] = NAN;
    call_gelu_forward(&stream, as_reals(output), as_reals(derivative), as_reals(bias), 1, columns);
    assert_true(isnan(output[5]) && isnan(derivative[5]) && !isnan(output[6]));
    float *all[8] = {product, bias, output, gradient, derivative, upstream, d_bias, d_bias_before};
    for (int i = 0; i < 8; i++) { free(all[i]); }
    free(partials);
    thread_pool_destroy(stream.pool);
}

// ---- SwiGLU ---------------------------------------------------------------------------

static void test_swiglu(void **state) {
    (void)state;
    enum { ROWS = 41, F = 301, STRIDE = 2 * F + 5 };
    Stream stream = test_stream(3);
    float *saved = random_array(ROWS * 2 * F), *output = random_array(ROWS * F),
          *gradient = random_array(ROWS * STRIDE), *given = copy_array(saved, ROWS * 2 * F),
          *upstream = copy_array(gradient, ROWS * STRIDE);
    Swiglu work = {.output = as_reals(output), .saved = as_reals(saved), .rows = ROWS, .columns = F};
    swiglu(&stream, &work);
    work.gradient = as_reals(gradient);
    work.gradient_stride = STRIDE;
    swiglu(&stream, &work);
    for (int i = 0; i < ROWS * F; i++) {
        int at = i / F * STRIDE + i % F, gate = i / F * 2 * F + i % F;
        double g = (double)given[gate], u = (double)given[gate + F], s = 1 / (1 + exp(-g)), y = g * s * u,
               d = (double)upstream[at], d_g = d * u * s * (1 + g * (1 - s)), d_u = d * g * s;
        assert_arrays_close("swiglu", &output[i], &y, 1, 1e-6);
        assert_arrays_close("gradient of the gate", &gradient[at], &d_g, 1, 2e-6);
        assert_arrays_close("gradient of what it gates", &gradient[at + F], &d_u, 1, 2e-6);
    }
    work.gradient = NULL;
    saved[3] = NAN;
    swiglu(&stream, &work);
    assert_true(isnan(output[3]) && isnan(saved[3]) && !isnan(output[4]));
    float *all[5] = {saved, output, gradient, given, upstream};
    for (int i = 0; i < 5; i++) { free(all[i]); }
    thread_pool_destroy(stream.pool);
}

// ---- Rotary positions -----------------------------------------------------------------

// A head of x (D) in double, normed if there is a weight and turned: y, and the norm's n.
static void rotary_reference(const float *x, const float *weight, const float *turns, int D, double scale,
                             double *y, double *n) {
    double square = 1e-6;
    for (int i = 0; i < D; i++) { square += (double)x[i] * (double)x[i] / D; }
    for (int i = 0; i < D; i++) { n[i] = weight != NULL ? (double)x[i] / sqrt(square) : (double)x[i]; }
    for (int i = 0; i < D; i++) {
        int other = (i + D / 2) % D;
        double mine = n[i] * (weight != NULL ? (double)weight[i] : 1),
               half = n[other] * (weight != NULL ? (double)weight[other] : 1);
        y[i] = scale * (mine * (double)turns[i % (D / 2)] +
                        (i < D / 2 ? -half : half) * (double)turns[D / 2 + i % (D / 2)]);
    }
}

// The gradient of sum(upstream * y) by a head x (D) against differences, in double, and that by its
// weight, which d_weight grows by. All arrays have D elements; weight may be NULL.
static void check_rotary_head(float *x, float *weight, const float *turns, int D, double scale,
                              const float *upstream, const float *gradient, double *d_weight) {
    double *more = (double *)malloc((size_t)(3 * D) * sizeof(double)), *less = more + D, *n = less + D;
    for (int i = 0; i < D; i++) {
        double by_x = 0, step;
        float kept = x[i];
        x[i] = kept + 0.01f;
        rotary_reference(x, weight, turns, D, scale, more, n);
        step = (double)x[i];
        x[i] = kept - 0.01f;
        rotary_reference(x, weight, turns, D, scale, less, n);
        step -= (double)x[i];
        x[i] = kept;
        for (int j = 0; j < D; j++) { by_x += (double)upstream[j] * (more[j] - less[j]) / step; }
        assert_arrays_close("gradient", gradient + i, &by_x, 1, 2e-3);
        if (weight == NULL) { continue; }
        kept = weight[i];
        weight[i] = kept + 1;
        rotary_reference(x, weight, turns, D, scale, more, n);
        weight[i] = kept;
        rotary_reference(x, weight, turns, D, scale, less, n);
        for (int j = 0; j < D; j++) { d_weight[i] += (double)upstream[j] * (more[j] - less[j]); }
    }
    free(more);
}

static void check_rotary(int B, int T, int H, int KV, int D, bool normed, int threads) {
    Stream stream = test_stream(threads);
    int rows = B * T, heads = H + KV, width = heads * D, stride = width + 7;
    size_t count = (size_t)(rows * stride);
    float *values = random_array(count), *gradient = random_array(count),
          *turns = random_array((size_t)(T * D)), *saved = random_array(count),
          *partials = random_array((size_t)(ROW_BLOCKS * 2 * D)), *weights = random_array((size_t)(2 * D)),
          *sums = random_array((size_t)(2 * D)), *given = copy_array(values, count),
          *upstream = copy_array(gradient, count);
    double *expected = (double *)malloc((size_t)(4 * D) * sizeof(double)), *y = expected + 2 * D, *n = y + D;
    for (int i = 0; i < 2 * D; i++) { expected[i] = (double)sums[i]; }
    for (int t = 0; t < T; t++) { // true angles
        for (int i = 0; i < D / 2; i++) {
            turns[t * D + i] = (float)cos(0.3 * t * (i + 1));
            turns[t * D + D / 2 + i] = (float)sin(0.3 * t * (i + 1));
        }
    }
    Rotary work = {.values = as_reals(values),
                   .saved = as_reals(saved),
                   .turns = turns,
                   .weights = {normed ? as_reals(weights) : NULL, normed ? as_reals(weights + D) : NULL},
                   .d_weights = {sums, sums + D},
                   .partials = partials,
                   .rows = rows,
                   .T = T,
                   .heads = H,
                   .kv_heads = KV,
                   .head_size = D,
                   .stride = stride,
                   .scale = 0.37f,
                   .epsilon = 1e-6f};
    rotary(&stream, &work);
    work.values = as_reals(gradient);
    work.backward = true;
    rotary(&stream, &work);
    for (int h = 0; h < rows * heads; h++) {
        int at = h / heads * stride + h % heads * D, key = h % heads >= H;
        float *weight = normed ? weights + key * D : NULL, *turn = turns + h / heads % T * D;
        double scale = key ? 1.0 : (double)0.37f;
        rotary_reference(given + at, weight, turn, D, scale, y, n);
        assert_arrays_close("turned", values + at, y, (size_t)D, 3e-6);
        check_rotary_head(given + at, weight, turn, D, scale, upstream + at, gradient + at,
                          expected + key * D);
    }
    assert_arrays_close("gradient of the weights", sums, expected, (size_t)(2 * D), 1e-4);
    float *all[9] = {values, gradient, turns, saved, partials, weights, sums, given, upstream};
    for (int i = 0; i < 9; i++) { free(all[i]); }
    free(expected);
    thread_pool_destroy(stream.pool);
}

static void test_rotary(void **state) {
    (void)state;
    for (int normed = 0; normed < 2; normed++) {
        check_rotary(1, 1, 1, 1, 2, normed, 1);
        check_rotary(3, 13, 6, 2, 40, normed, 3);
        check_rotary(2, 20, 3, 1, 16, normed, 2);
    }
}

// ---- Embedding ------------------------------------------------------------------------

static void test_embedding(void **state) {
    (void)state;
    enum { B = 3, T = 7, C = 130, V = 5 };
    Stream stream = test_stream(3);
    int32_t tokens[B * T];
    float *wte = random_array(V * C), *wpe = random_array(T * C), *output = random_array(B * T * C),
          *d_output = random_array(B * T * C);
    float *d_wte = random_array(V * C), *d_wpe = random_array(T * C);
    double d_tokens[V * C], d_positions[T * C];
    for (int i = 0; i < V * C; i++) { d_tokens[i] = (double)d_wte[i]; }
    for (int i = 0; i < T * C; i++) { d_positions[i] = (double)d_wpe[i]; }
    for (int i = 0; i < B * T; i++) { tokens[i] = (int32_t)(random_uniform(&test_random) * V); }
    call_embedding_forward(&stream, as_reals(output), as_reals(wte), as_reals(wpe), tokens, B, T, C);
    call_embedding_backward(&stream, d_wte, d_wpe, NULL, as_reals(d_output), tokens, NULL, B, T, C);
    for (int row = 0; row < B * T; row++) {
        for (int c = 0; c < C; c++) {
            double expected = (double)wte[tokens[row] * C + c] + (double)wpe[row % T * C + c];
            assert_arrays_close("embedding", &output[row * C + c], &expected, 1, 1e-6);
            d_tokens[tokens[row] * C + c] += (double)d_output[row * C + c];
            d_positions[row % T * C + c] += (double)d_output[row * C + c];
        }
    }
    assert_arrays_close("d_wte", d_wte, d_tokens, V * C, 1e-5);
    assert_arrays_close("d_wpe", d_wpe, d_positions, T * C, 1e-5);
    float *all[6] = {wte, wpe, output, d_output, d_wte, d_wpe};
    for (int i = 0; i < 6; i++) { free(all[i]); }
    thread_pool_destroy(stream.pool);
}

// ---- Cross entropy --------------------------------------------------------------------

static void check_cross_entropy(int rows, int V, float scale, double offset) {
    Stream stream = test_stream(3);
    size_t count = (size_t)rows * (size_t)V;
    float *logits = random_array(count), *losses = random_array((size_t)rows);
    int32_t *targets = (int32_t *)malloc((size_t)rows * sizeof(int32_t));
    for (size_t i = 0; i < count; i++) { logits[i] = 3.0f * logits[i] + (float)offset; }
    for (int r = 0; r < rows; r++) {
        targets[r] = r % 5 == 2 ? -100 : (int32_t)(random_uniform(&test_random) * V);
    }
    float *given = copy_array(logits, count);
    cross_entropy(&stream, as_reals(logits), V, losses, targets, rows, V, scale);
    for (int r = 0; r < rows; r++) {
        const float *row = given + (size_t)r * (size_t)V;
        double maximum = -INFINITY, sum = 0.0;
        for (int v = 0; v < V; v++) { maximum = fmax(maximum, (double)row[v]); }
        for (int v = 0; v < V; v++) { sum += exp((double)row[v] - maximum); }
        double loss =
            targets[r] < 0 ? 0.0 : log(sum) + maximum - (double)row[targets[r] < 0 ? 0 : targets[r]];
        assert_arrays_close("loss", &losses[r], &loss, 1, 1e-6);
        for (int v = 0; v < V && scale != 0.0f; v++) {
            double p = exp((double)row[v] - maximum) / sum,
                   gradient = targets[r] < 0 ? 0.0 : (double)scale * (p - (v == targets[r]));
            if (!(fabs((double)logits[(size_t)r * (size_t)V + (size_t)v] - gradient) <=
                  1e-6 * fabs((double)scale))) {
                fail_msg("gradient");
            }
        }
    }
    logits[V / 2] = NAN; // row 0 counts
    cross_entropy(&stream, as_reals(logits), V, losses, targets, 1, V, scale);
    assert_true(isnan(losses[0]) && (scale == 0.0f || isnan(logits[0])));
    free(logits);
    free(given);
    free(losses);
    free(targets);
    thread_pool_destroy(stream.pool);
}

static void test_cross_entropy(void **state) {
    (void)state;
    check_cross_entropy(1, 3, 1.0f, 0.0);
    check_cross_entropy(27, 1009, 0.01f, 50.0);
    check_cross_entropy(9, 100, 0.0f, -200.0);
    check_cross_entropy(6, 1, 0.5f, 0.0);
}

// ---- Attention, by brute force over all pairs -----------------------------------------

typedef struct AttentionCase {
    int B, T, C, H, KV, window, threads;
    int32_t documents[4]; // where documents begin in sample 0; in sample b these b later. Zeros: nowhere
} AttentionCase;

// starts (B, T) of the case's documents.
static void attention_starts(const AttentionCase *shape, int32_t *starts) {
    for (int b = 0; b < shape->B; b++) {
        for (int t = 0, first = 0; t < shape->T; t++) {
            for (int i = 0; i < 4; i++) {
                if (shape->documents[i] > 0 && shape->documents[i] + b == t) { first = t; }
            }
            starts[b * shape->T + t] = first;
        }
    }
}

// Numbers of a position's queries, keys and values.
static int attention_width(const AttentionCase *shape) {
    return shape->C + 2 * shape->KV * (shape->C / shape->H);
}

// Softmax probabilities of one query in double; what is not visible stays 0.
static void attention_probabilities(const AttentionCase *shape, const float *qkv, int sample, int head, int i,
                                    double *p) {
    int C = shape->C, D = C / shape->H, start = 0, width = attention_width(shape),
        key = C + head / (shape->H / shape->KV) * D - head * D;
    for (int k = 0; k < 4; k++) {
        int begin = shape->documents[k] > 0 ? shape->documents[k] + sample : 0;
        if (begin <= i && begin > start) { start = begin; }
    }
    const float *base = qkv + (size_t)(sample * shape->T * width + head * D);
    double sum = 0.0, maximum = -INFINITY;
    for (int pass = 0; pass < 2; pass++) {
        for (int j = 0; j < shape->T; j++) {
            double score = 0.0;
            bool visible = j >= start && j <= i && (shape->window == 0 || j > i - shape->window);
            for (int d = 0; d < D; d++) {
                score += (double)base[i * width + d] * (double)base[j * width + key + d];
            }
            if (pass == 0 && visible) { maximum = fmax(maximum, score); }
            if (pass == 1) { sum += p[j] = visible ? exp(score - maximum) : 0.0; }
        }
    }
    for (int j = 0; j < shape->T; j++) { p[j] /= sum; }
}

// Adds one query's part to output (B, T, C) and d_qkv (B, T, 3C).
static void attention_reference(const AttentionCase *shape, const float *qkv, const float *d_output,
                                int sample, int head, int i, double *p, double *output, double *d_qkv) {
    int T = shape->T, C = shape->C, D = C / shape->H, width = attention_width(shape);
    size_t row = (size_t)sample * (size_t)T, base = row * (size_t)width,
           query = base + (size_t)(i * width + head * D),
           keys = base + (size_t)(C + head / (shape->H / shape->KV) * D), values = (size_t)(shape->KV * D);
    size_t out = (row + (size_t)i) * (size_t)C + (size_t)(head * D);
    double mean = 0.0;
    attention_probabilities(shape, qkv, sample, head, i, p);
    for (int j = 0; j < T; j++) {
        size_t key = keys + (size_t)(j * width), value = key + values;
        for (int d = 0; d < D; d++) {
            output[out + (size_t)d] += p[j] * (double)qkv[value + (size_t)d];
            mean += p[j] * (double)d_output[out + (size_t)d] * (double)qkv[value + (size_t)d];
        }
    }
    for (int j = 0; j < T; j++) {
        size_t key = keys + (size_t)(j * width), value = key + values;
        double d_probability = 0.0;
        for (int d = 0; d < D; d++) {
            d_probability += (double)d_output[out + (size_t)d] * (double)qkv[value + (size_t)d];
        }
        double d_score = p[j] * (d_probability - mean);
        for (int d = 0; d < D; d++) {
            d_qkv[query + (size_t)d] += d_score * (double)qkv[key + (size_t)d];
            d_qkv[key + (size_t)d] += d_score * (double)qkv[query + (size_t)d];
            d_qkv[value + (size_t)d] += p[j] * (double)d_output[out + (size_t)d];
        }
    }
}

static void check_attention(AttentionCase shape) {
    Stream stream = test_stream(shape.threads);
    size_t rows = (size_t)shape.B * (size_t)shape.T, count = rows * (size_t)shape.C,
           width = (size_t)attention_width(&shape), whole = rows * width;
    float *qkv = random_array(whole), *output = random_array(count), *d_output = random_array(count),
          *d_qkv = random_array(whole);
    float *logsumexp = random_array(rows * (size_t)shape.H),
          *workspace = random_array(
              attention_workspace_floats(shape.T, shape.C / shape.H, shape.threads, PRECISION_FP32));
    double *expected = (double *)calloc(count, sizeof(double)),
           *d_expected = (double *)calloc(whole, sizeof(double));
    double *p = (double *)calloc((size_t)shape.T, sizeof(double));
    int32_t *starts = (int32_t *)malloc(rows * sizeof *starts);
    attention_starts(&shape, starts);
    for (size_t i = 0; i < whole; i++) { qkv[i] *= 0.5f; } // scores of a few units
    Attention forward = {.output = as_reals(output),
                         .logsumexp = logsumexp,
                         .scratch = workspace,
                         .qkv = as_reals(qkv),
                         .B = shape.B,
                         .T = shape.T,
                         .channels = shape.C,
                         .heads = shape.H,
                         .kv_heads = shape.KV < shape.H ? shape.KV : 0,
                         .d_qkv_stride = (int)width,
                         .window = shape.window < shape.T ? shape.window : 0,
                         .starts = shape.documents[0] > 0 ? starts : NULL},
              backward = forward;
    backward.d_qkv = as_reals(d_qkv);
    backward.d_output = as_reals(d_output);
    attention(&stream, &forward);
    attention(&stream, &backward);
    for (int b = 0; b < shape.B; b++) {
        for (int h = 0; h < shape.H; h++) {
            for (int i = 0; i < shape.T; i++) {
                attention_reference(&shape, qkv, d_output, b, h, i, p, expected, d_expected);
            }
        }
    }
    assert_arrays_close("attention", output, expected, count, 2e-5);
    assert_arrays_close("d_qkv", d_qkv, d_expected, whole, 1e-4);
    float *again = copy_array(d_qkv, whole); // one thread makes the same bits
    Stream one = test_stream(1);
    attention(&one, &backward);
    assert_memory_equal(again, d_qkv, whole * sizeof(float));
    thread_pool_destroy(one.pool);
    free(again);
    qkv[(size_t)(shape.T - 1) * width] = NAN; // last query of the first sample, head 0
    attention(&stream, &forward);
    assert_true(isnan(output[(size_t)(shape.T - 1) * (size_t)shape.C]) &&
                (shape.T == 1 || !isnan(output[0])));
    float *all[6] = {qkv, output, d_output, d_qkv, logsumexp, workspace};
    for (int i = 0; i < 6; i++) { free(all[i]); }
    free(starts);
    free(expected);
    free(d_expected);
    free(p);
    thread_pool_destroy(stream.pool);
}

static void test_attention(void **state) {
    (void)state;
    const AttentionCase cases[] = {{1, 1, 8, 1, 1, 0, 1, {0}},
                                   {1, 1, 8, 1, 1, 4, 1, {0}},
                                   {2, 5, 24, 3, 3, 2, 3, {0}},
                                   {2, 63, 32, 4, 4, 0, 2, {0}},
                                   {1, 64, 64, 1, 1, 64, 1, {0}},
                                   {2, 65, 64, 1, 1, 1, 2, {0}},
                                   {1, 130, 96, 3, 3, 17, 3, {0}},
                                   {2, 131, 128, 2, 2, 0, 2, {0}},
                                   {1, 200, 128, 1, 1, 70, 2, {0}},
                                   {1, 150, 40, 5, 5, 500, 2, {0}},
                                   {1, 193, 48, 1, 1, 128, 2, {0}},
                                   // Documents: of one token, of whole blocks, across blocks, in a
                                   // window.
                                   {3, 5, 24, 3, 3, 0, 2, {1, 2}},
                                   {1, 192, 16, 1, 1, 0, 1, {64, 128}},
                                   {2, 131, 64, 2, 2, 0, 2, {1, 63, 66}},
                                   {2, 200, 48, 3, 3, 20, 3, {10, 64, 65, 130}},
                                   {1, 150, 40, 5, 5, 70, 2, {149}},
                                   {1, 190, 32, 4, 4, 500, 2, {65, 127}},
                                   // Heads that share keys and values: one for all, and groups.
                                   {2, 67, 40, 5, 1, 0, 3, {0}},
                                   {1, 130, 240, 6, 2, 70, 3, {0}},
                                   {2, 66, 48, 4, 2, 0, 2, {10, 64}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) { check_attention(cases[i]); }
}

// Keys outside the window or the document are not even read.
static void check_attention_skips(int window, const int32_t *starts) {
    enum { T = 300, C = 16, WINDOW = 40 };
    Stream stream = test_stream(2);
    float *qkv = random_array(T * 3 * C), *output = random_array(T * C), *logsumexp = random_array(T);
    float *workspace = random_array(attention_workspace_floats(T, C, 2, PRECISION_FP32));
    for (int i = 0; i < 100 * 3 * C; i++) { qkv[i] = NAN; }
    Attention work = {.output = as_reals(output),
                      .logsumexp = logsumexp,
                      .scratch = workspace,
                      .qkv = as_reals(qkv),
                      .B = 1,
                      .T = T,
                      .channels = C,
                      .heads = 1,
                      .window = window,
                      .starts = starts};
    attention(&stream, &work);
    // The first block of queries that sees none of them.
    int first_block = (100 + WINDOW + ATTENTION_ROWS - 1) / ATTENTION_ROWS * ATTENTION_ROWS;
    for (int i = first_block * C; i < T * C; i++) { assert_false(isnan(output[i])); }
    float *all[4] = {qkv, output, logsumexp, workspace};
    for (int i = 0; i < 4; i++) { free(all[i]); }
    thread_pool_destroy(stream.pool);
}

static void test_attention_skips(void **state) {
    (void)state;
    int32_t starts[300] = {0};
    for (int t = 140; t < 300; t++) { starts[t] = 100 + (t - 140) / 8; }
    check_attention_skips(40, NULL);
    check_attention_skips(0, starts);
    check_attention_skips(300, starts);
}

int main(void) {
    test_random.state = 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_matmul_starts_no_threads), // first: other tests have pools
        cmocka_unit_test(test_exp),
        cmocka_unit_test(test_logistic),
        cmocka_unit_test(test_vectorised_loops),
        cmocka_unit_test(test_matmul),
        cmocka_unit_test(test_matmul_tiles),
        cmocka_unit_test(test_linear),
        cmocka_unit_test(test_buffers),
        cmocka_unit_test(test_layernorm),
        cmocka_unit_test(test_gelu),
        cmocka_unit_test(test_swiglu),
        cmocka_unit_test(test_rotary),
        cmocka_unit_test(test_embedding),
        cmocka_unit_test(test_cross_entropy),
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_attention_skips),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
