// test_cuda_layers.cu: norms, rotary positions, activations, the embedding and the sums over
// rows on the device, against the CPU's kernels; casts to FP8 and products of it, against a table
// of its numbers.
//
// Device and CPU start from the same rounded inputs. Results must be close, and have the
// same bits in every order of threads and blocks. Shapes are odd on purpose: rows that no
// number of blocks divides, columns that allow no 16-byte access, rows wider than a
// block.
#include "test/cuda/cuda_kernels.h"

#include "kernels/kernels.h"
#include "test/layer_calls.h"

enum { KEPT = 64 };

static Random test_random;
static uint64_t test_seed;

// What a case has allocated, on the host and on the device.
static void *kept_host[KEPT], *kept_device[KEPT];
static int kept_host_count, kept_device_count;

static float *keep(float *host) {
    assert_true(kept_host_count < KEPT);
    kept_host[kept_host_count++] = host;
    return host;
}

template <typename T> static T *keep_device(T *device) {
    assert_true(kept_device_count < KEPT);
    kept_device[kept_device_count++] = (void *)device;
    return device;
}

static void keep_nothing(void) {
    while (kept_host_count > 0) { free(kept_host[--kept_host_count]); }
    while (kept_device_count > 0) { CUDA_CHECK(cudaFree(kept_device[--kept_device_count])); }
}

static Stream *cpu_stream(void) {
    static Stream stream;
    if (stream.pool == NULL) { stream.pool = thread_pool_create(1, true); }
    return &stream;
}

// Random numbers, rounded to the precision.
static float *numbers(size_t count, double stddev, Precision precision) {
    float *host = keep(host_normals(&test_random, count, stddev));
    host_round(host, count, precision);
    return host;
}

static float *room(size_t count) { return keep((float *)malloc(count * sizeof(float))); }

static float *copy_of(const float *host, size_t count) {
    float *copy = room(count);
    memcpy(copy, host, count * sizeof(float));
    return copy;
}

static Real *on_device(const float *host, size_t count, Precision precision) {
    return keep_device(device_reals(host, count, precision));
}
static float *floats_on_device(const float *host, size_t count) {
    return keep_device((float *)device_from_host(host, count * sizeof(float)));
}
static Real *poisoned(size_t count, Precision precision) {
    return keep_device((Real *)device_new(count * precision_bytes(precision)));
}
static float *poisoned_floats(size_t count) {
    return keep_device((float *)device_new(count * sizeof(float)));
}

static float *from_device(const Real *device, size_t count, Precision precision) {
    float *host = room(count);
    host_reals(host, device, count, precision);
    return host;
}

static float *floats_from_device(const float *device, size_t count) {
    return from_device((const Real *)(const void *)device, count, PRECISION_FP32);
}

// Outputs are rounded once; half a unit of bf16 is 2^-8 of a number at most.
static double rounding(Precision precision) { return precision == PRECISION_FP32 ? 1e-5 : 0x1p-8 + 1e-5; }

// The results of one kernel in all orders: the first must be close to what is expected,
// the others must have its bits.
typedef struct Result {
    const char *what;
    const float *expected;
    size_t count;
    double tolerance;
    float *first; // in memory of its own: cases give theirs back after each order
} Result;

static void result_check(Result *result, int order, const float *got) {
    if (order == 0) {
        free(result->first);
        result->first = (float *)malloc(result->count * sizeof(float));
        memcpy(result->first, got, result->count * sizeof(float));
        check_close(result->what, got, result->expected, result->count, result->tolerance);
    } else if (memcmp(result->first, got, result->count * sizeof(float)) != 0) {
        fail_msg("%s: other bits in order %d", result->what, order);
    }
}

static void results_end(Result *results, int count) {
    for (int i = 0; i < count; i++) { free(results[i].first); }
}

static int seed_test(void **state) {
    (void)state;
    test_seed = seed_of_tests();
    test_random.state = random_hash(test_seed, 17);
    return 0;
}

// isfinite is a macro here and a template there.
static bool is_finite_number(float value) { return isfinite(value) != 0; }

// ---- Sums over rows -------------------------------------------------------------------

typedef struct SumsCase {
    int blocks, stride, columns;
} SumsCase;

static const SumsCase sums_cases[] = {
    {1, 9, 7}, {3, 33, 33}, {17, 100, 64}, {CUDA_ROW_BLOCKS, 301, 97}, {131, 31, 31}};

static void run_sums_case(const SumsCase *shape) {
    size_t columns = (size_t)shape->columns, count = (size_t)shape->blocks * (size_t)shape->stride;
    float *partials = numbers(count, 1, PRECISION_FP32), *before = numbers(columns, 1, PRECISION_FP32),
          *expected = copy_of(before, columns);
    column_sums_add(cpu_stream(), expected, partials, shape->blocks, shape->stride, shape->columns);
    Result result = {"sums", expected, columns, 1e-6, NULL};
    float *device_partials = floats_on_device(partials, count - (size_t)(shape->stride - shape->columns));
    for (int order = 0; order < SIMT_ORDERS; order++) {
        cuda_use_order(order);
        float *sums = floats_on_device(before, columns);
        Stream *stream = cuda_test_stream(PRECISION_BF16);
        cuda_column_sums_add(stream, {.first = sums}, 1, device_partials, shape->blocks, shape->stride,
                             shape->columns);
        cuda_test_wait(stream);
        result_check(&result, order, floats_from_device(sums, columns));
    }
    results_end(&result, 1);
    keep_nothing();
}

static void test_column_sums(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof sums_cases / sizeof *sums_cases; i++) { run_sums_case(&sums_cases[i]); }
}

// ---- LayerNorm and RMSNorm ------------------------------------------------------------

typedef struct NormCase {
    int rows, channels;
    bool branch;     // forward: a branch is added; backward: the gradient of its bias is wanted
    bool accumulate; // backward
    bool rms;        // it is an RMSNorm
    bool bare;       // forward: the branch has no bias
} NormCase;

// Some have enough rows for several rounds of each block in backward.
static const NormCase norm_cases[] = {
    {5, 1, false, true},
    {5, 37, true, true},
    {7, 64, true, true},
    {300, 24, true, false},
    {9, 768, true, true},
    {3, 1001, false, true},
    {2, 1048, true, false},
    {31, 300, true, true},
    {2, 3080, true, true},
    {3, 6160, true, false},
    {2, 8192, false, true},
    {2, 8191, true, true},
    {1700, 264, true, true},
    {530, 1544, true, true},
    {540, 515, false, true},
    {270, 3080, true, true},
    {5, 37, true, true, true},
    {300, 24, false, false, true},
    {9, 768, true, true, true, true},
    {2, 1048, true, false, true},
    {31, 300, true, true, true, true},
    {2, 8192, true, true, true, true},
    {2, 8191, false, true, true},
    {3, 1001, true, true, true, true},
    {1700, 264, true, true, true},
    {270, 3080, false, true, true},
    {3, 6160, true, true, true},
};
static const NormCase real_norm_cases[] = {{8192, 768, true, true},   {4099, 2560, true, true},
                                           {8191, 1000, true, false}, {2048, 2048, false, true},
                                           {1025, 4097, true, true},  {8192, 2048, true, true, true, true}};

// Expected are output and statistics that the CPU computes from the residual that the device
// stored.
static void check_norm_forward(const NormCase *shape, Precision precision, const Layernorm *device,
                               const float *weight, const float *bias, Result results[2], int order) {
    size_t rows = (size_t)shape->rows, C = (size_t)shape->channels;
    if (order == 0) {
        float *stored = from_device(device->residual, rows * C, precision), *statistics = room(2 * rows),
              *output = room(rows * C);
        Layernorm work = *device;
        work.residual = (Real *)stored;
        work.branch = NULL;
        work.output = (Real *)output;
        work.statistics = statistics;
        work.weight = (const Real *)weight;
        work.bias = shape->rms ? NULL : (const Real *)bias;
        layernorm_forward(cpu_stream(), &work);
        results[0].expected = output;
        results[1].expected = statistics;
    }
    result_check(&results[0], order, from_device(device->output, rows * C, precision));
    result_check(&results[1], order, floats_from_device(device->statistics, 2 * rows));
}

static void run_norm_forward_case(const NormCase *shape, Precision precision) {
    size_t rows = (size_t)shape->rows, C = (size_t)shape->channels, count = rows * C;
    float *before = numbers(count, 1, precision), *branch = numbers(count, 1, precision),
          *branch_bias = numbers(C, 1, precision);
    float *weight = numbers(C, 1, precision), *bias = numbers(C, 1, precision), *sum = copy_of(before, count);
    for (size_t i = 0; shape->branch && i < count; i++) {
        sum[i] += branch[i] + (shape->bare ? 0 : branch_bias[i % C]);
    }
    Result residual = {"residual", sum, count, shape->branch ? rounding(precision) : 0, NULL};
    Result results[2] = {{"output", NULL, count, rounding(precision), NULL},
                         {"statistics", NULL, 2 * rows, 1e-5, NULL}};
    for (int order = 0; order < SIMT_ORDERS; order++) {
        cuda_use_order(order);
        Layernorm work;
        memset(&work, 0, sizeof work);
        work.output = poisoned(count, precision);
        work.statistics = poisoned_floats(2 * rows);
        work.residual = shape->branch ? poisoned(count, precision) : on_device(before, count, precision);
        work.residual_before = shape->branch ? on_device(before, count, precision) : NULL;
        work.branch = shape->branch ? on_device(branch, count, precision) : NULL;
        work.branch_bias = shape->branch && !shape->bare ? on_device(branch_bias, C, precision) : NULL;
        work.weight = on_device(weight, C, precision);
        work.bias = shape->rms ? NULL : on_device(bias, C, precision);
        work.epsilon = 1e-5f;
        work.rows = shape->rows;
        work.channels = shape->channels;
        Stream *stream = cuda_test_stream(precision);
        layernorm_forward(stream, &work);
        cuda_test_wait(stream);
        result_check(&residual, order, from_device(work.residual, count, precision));
        check_norm_forward(shape, precision, &work, weight, bias, results, order);
    }
    results_end(&residual, 1);
    results_end(results, 2);
    keep_nothing();
}

// Host arrays of one backward case, and its results.
typedef struct NormBackward {
    float *residual, *d_output, *weight, *statistics, *gradient,
        *sums; // sums (3, C): what d_weight, d_bias, d_branch_bias hold beforehand
    Result results[4];
} NormBackward;

static void norm_statistics(NormBackward *host, size_t rows, size_t C, bool rms) {
    host->statistics = room(2 * rows);
    for (size_t row = 0; row < rows; row++) {
        double sum = 0, squares = 0;
        for (size_t c = 0; c < C && !rms; c++) { sum += (double)host->residual[row * C + c]; }
        for (size_t c = 0; c < C; c++) {
            squares += pow((double)host->residual[row * C + c] - sum / (double)C, 2);
        }
        host->statistics[2 * row] = (float)(sum / (double)C);
        host->statistics[2 * row + 1] = (float)(1 / sqrt(squares / (double)C + 1e-5));
    }
}

static void norm_backward_expected(NormBackward *host, const NormCase *shape, Precision precision) {
    size_t C = (size_t)shape->channels, count = (size_t)shape->rows * C;
    float *gradient = copy_of(host->gradient, count), *sums = copy_of(host->sums, 3 * C);
    Layernorm work;
    memset(&work, 0, sizeof work);
    work.d_residual = (Real *)gradient;
    work.accumulate = shape->accumulate;
    work.d_weight = sums;
    work.d_bias = shape->rms ? NULL : sums + C;
    work.d_branch_bias = shape->branch ? sums + 2 * C : NULL;
    work.partials = room((size_t)ROW_BLOCKS * 3 * C);
    work.d_output = (const Real *)host->d_output;
    work.residual = (Real *)host->residual;
    work.statistics = host->statistics;
    work.weight = (const Real *)host->weight;
    work.rows = shape->rows;
    work.channels = shape->channels;
    layernorm_backward(cpu_stream(), &work);
    // The true gradient of one channel is 0: what is left is rounding, over sqrt(epsilon).
    double tolerance = fmax(rounding(precision), C == 1 ? 1e-3 : 0);
    Result results[4] = {{"d_residual", gradient, count, tolerance, NULL},
                         {"d_weight", sums, C, 2e-5, NULL},
                         {"d_bias", sums + C, C, 2e-5, NULL},
                         {"d_branch_bias", sums + 2 * C, C, 2e-5, NULL}};
    memcpy(host->results, results, sizeof results);
}

static void run_norm_backward_case(const NormCase *shape, Precision precision) {
    size_t rows = (size_t)shape->rows, C = (size_t)shape->channels, count = rows * C;
    NormBackward host;
    host.residual = numbers(count, 1, precision);
    host.d_output = numbers(count, 1, precision);
    host.weight = numbers(C, 1, precision);
    host.gradient = numbers(count, 1, precision);
    host.sums = numbers(3 * C, 1, PRECISION_FP32);
    norm_statistics(&host, rows, C, shape->rms);
    norm_backward_expected(&host, shape, precision);
    for (int order = 0; order < SIMT_ORDERS; order++) {
        cuda_use_order(order);
        float *sums[3];
        for (int i = 0; i < 3; i++) { sums[i] = floats_on_device(host.sums + (size_t)i * C, C); }
        Layernorm work;
        memset(&work, 0, sizeof work);
        work.d_residual =
            shape->accumulate ? on_device(host.gradient, count, precision) : poisoned(count, precision);
        work.accumulate = shape->accumulate;
        work.d_weight = sums[0];
        work.d_bias = shape->rms ? NULL : sums[1];
        work.d_branch_bias = shape->branch ? sums[2] : NULL;
        work.partials = poisoned_floats((size_t)CUDA_ROW_BLOCKS * (shape->rms ? 2 : 3) * C);
        work.d_output = on_device(host.d_output, count, precision);
        work.residual = on_device(host.residual, count, precision);
        work.statistics = floats_on_device(host.statistics, 2 * rows);
        work.weight = on_device(host.weight, C, precision);
        work.rows = shape->rows;
        work.channels = shape->channels;
        Stream *stream = cuda_test_stream(precision);
        layernorm_backward(stream, &work);
        cuda_test_wait(stream);
        result_check(&host.results[0], order, from_device(work.d_residual, count, precision));
        for (int i = 0; i < 3; i++) {
            result_check(&host.results[1 + i], order, floats_from_device(sums[i], C));
        }
    }
    results_end(host.results, 4);
    keep_nothing();
}

// With many rows blocks of the backward pass go down several; those of the forward pass never do.
static void run_norm_case(const NormCase *shape) {
    bool many = shape->rows > CUDA_ROW_BLOCKS && cuda_small_shapes();
    for (int precision = PRECISION_FP32; precision <= PRECISION_BF16; precision++) {
        if (!many || shape->rows == 300) { run_norm_forward_case(shape, (Precision)precision); }
        run_norm_backward_case(shape, (Precision)precision);
    }
}

static void test_layernorm(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof norm_cases / sizeof *norm_cases; i++) { run_norm_case(&norm_cases[i]); }
    for (size_t i = 0; !cuda_small_shapes() && i < sizeof real_norm_cases / sizeof *real_norm_cases; i++) {
        run_norm_case(&real_norm_cases[i]);
    }
}

// A NaN spoils its row, and in backward the sums of columns, and nothing else.
static void test_layernorm_passes_nan(void **state) {
    (void)state;
    enum { ROWS = 6, C = 40, BAD = 4 };
    const float bad[2] = {NAN, INFINITY};
    for (int i = 0; i < 4; i++) {
        Precision precision = (Precision)(i % 2);
        float *x = numbers(ROWS * C, 1, precision), *weight = numbers(C, 1, precision),
              *statistics = numbers(2 * ROWS, 1, PRECISION_FP32);
        x[BAD * C + 21] = bad[i / 2];
        Layernorm forward;
        memset(&forward, 0, sizeof forward);
        forward.output = poisoned(ROWS * C, precision);
        forward.statistics = poisoned_floats(2 * ROWS);
        forward.residual = on_device(x, ROWS * C, precision);
        forward.weight = forward.bias = on_device(weight, C, precision);
        forward.epsilon = 1e-5f;
        forward.rows = ROWS;
        forward.channels = C;
        Layernorm backward;
        memset(&backward, 0, sizeof backward);
        float *sums = floats_on_device(numbers(C, 1, PRECISION_FP32), C),
              *other_sums = floats_on_device(numbers(C, 1, PRECISION_FP32), C);
        backward.d_residual = poisoned(ROWS * C, precision);
        backward.d_weight = sums;
        backward.d_bias = other_sums;
        backward.partials = poisoned_floats((size_t)CUDA_ROW_BLOCKS * 3 * C);
        backward.d_output = forward.residual;
        backward.residual = on_device(numbers(ROWS * C, 1, precision), ROWS * C, precision);
        backward.statistics = floats_on_device(statistics, 2 * ROWS);
        backward.weight = forward.weight;
        backward.rows = ROWS;
        backward.channels = C;
        Stream *stream = cuda_test_stream(precision);
        layernorm_forward(stream, &forward);
        layernorm_backward(stream, &backward);
        cuda_test_wait(stream);
        float *output = from_device(forward.output, ROWS * C, precision),
              *gradient = from_device(backward.d_residual, ROWS * C, precision);
        for (int k = 0; k < ROWS * C; k++) {
            assert_int_equal(is_finite_number(gradient[k]), k / C != BAD);
            if (k / C != BAD || k % C == 21) { assert_int_equal(is_finite_number(output[k]), k / C != BAD); }
        }
        float *d_weight = floats_from_device(sums, C), *d_bias = floats_from_device(other_sums, C);
        for (int c = 0; c < C; c++) {
            assert_true(is_finite_number(d_weight[c]) == (c != 21) &&
                        is_finite_number(d_bias[c]) == (c != 21));
        }
        keep_nothing();
    }
}

// ---- GELU -----------------------------------------------------------------------------

typedef struct GeluCase {
    int rows, columns, gap; // gap: behind each row of the gradient
} GeluCase;

static const GeluCase gelu_cases[] = {{1, 6, 0},     {5, 37, 3},   {9, 64, 0},  {300, 40, 8},  {3, 999, 1},
                                      {7, 4200, 16}, {6, 5000, 0}, {11, 72, 5}, {1403, 24, 8}, {1403, 23, 0}};
static const GeluCase real_gelu_cases[] = {{8192, 3072, 16}, {1023, 10240, 0}, {4095, 3071, 1}};

static void run_cases(void (*run)(const GeluCase *shape, Precision precision)) {
    for (int i = 0; i < 2 * (int)(sizeof gelu_cases / sizeof *gelu_cases); i++) {
        run(&gelu_cases[i / 2], i % 2 == 0 ? PRECISION_FP32 : PRECISION_BF16);
    }
}

static void run_gelu_case(const GeluCase *shape, Precision precision) {
    size_t columns = (size_t)shape->columns, stride = columns + (size_t)shape->gap,
           count = (size_t)shape->rows * columns;
    size_t gradient_count = (size_t)shape->rows * stride;
    float *product = numbers(count, 2, precision), *bias = numbers(columns, 1, precision),
          *d_output = numbers(gradient_count, 1, precision);
    float *output = copy_of(product, count), *derivative = copy_of(product, count),
          *before = numbers(columns, 1, PRECISION_FP32);
    float *gradient = copy_of(d_output, gradient_count), *d_bias = copy_of(before, columns);
    call_gelu_forward(cpu_stream(), as_reals(output), as_reals(derivative), as_reals(bias), shape->rows,
                      shape->columns);
    float *partials = room(ROW_BLOCKS * columns);
    call_gelu_backward(cpu_stream(), as_reals(gradient), (int)stride, d_bias, partials, as_reals(derivative),
                       NULL, shape->rows, shape->columns);
    Result results[4] = {{"output", output, count, rounding(precision), NULL},
                         {"saved", product, count, 0, NULL},
                         {"gradient", gradient, gradient_count, rounding(precision), NULL},
                         {"d_bias", d_bias, columns, 1e-5, NULL}};
    for (int order = 0; order < SIMT_ORDERS; order++) {
        cuda_use_order(order);
        Real *device_output = poisoned(count, precision), *saved = on_device(product, count, precision);
        Real *device_bias = on_device(bias, columns, precision),
             *device_gradient = on_device(d_output, gradient_count, precision);
        float *device_d_bias = floats_on_device(before, columns),
              *device_partials = poisoned_floats((size_t)CUDA_ROW_BLOCKS * columns);
        Stream *stream = cuda_test_stream(precision);
        call_gelu_forward(stream, device_output, saved, device_bias, shape->rows, shape->columns);
        call_gelu_backward(stream, device_gradient, (int)stride, device_d_bias, device_partials, saved,
                           device_bias, shape->rows, shape->columns);
        cuda_test_wait(stream);
        result_check(&results[0], order, from_device(device_output, count, precision));
        result_check(&results[1], order, from_device(saved, count, precision));
        result_check(&results[2], order, from_device(device_gradient, gradient_count, precision));
        result_check(&results[3], order, floats_from_device(device_d_bias, columns));
    }
    results_end(results, 4);
    keep_nothing();
}

static void test_gelu(void **state) {
    (void)state;
    run_cases(run_gelu_case);
    for (size_t i = 0; !cuda_small_shapes() && i < sizeof real_gelu_cases / sizeof *real_gelu_cases; i++) {
        run_gelu_case(&real_gelu_cases[i], PRECISION_FP32);
        run_gelu_case(&real_gelu_cases[i], PRECISION_BF16);
    }
}

// The biases of queries, keys and values; a third of the columns is scaled.
static void run_bias_case(const GeluCase *shape, Precision precision) {
    size_t columns = (size_t)shape->columns, stride = columns + (size_t)shape->gap,
           count = (size_t)shape->rows * stride;
    float *values = numbers(count, 2, precision), *bias = numbers(columns, 1, precision),
          *before = numbers(columns, 1, PRECISION_FP32), *d_bias = copy_of(before, columns);
    float *forward = copy_of(values, count), *backward = copy_of(values, count);
    Bias work = {.bias = as_reals(bias), .partials = room(ROW_BLOCKS * columns), .rows = shape->rows};
    work.columns = shape->columns;
    work.stride = (int)stride;
    work.scaled = shape->columns / 3;
    work.scale = 0.3f;
    work.values = as_reals(forward);
    bias_add(cpu_stream(), &work);
    work.values = as_reals(backward);
    work.d_bias = d_bias;
    bias_add(cpu_stream(), &work);
    Result results[3] = {{"values", forward, count, rounding(precision), NULL},
                         {"gradient", backward, count, rounding(precision), NULL},
                         {"d_bias", d_bias, columns, 1e-5, NULL}};
    for (int order = 0; order < SIMT_ORDERS; order++) {
        cuda_use_order(order);
        Real *sums = on_device(values, count, precision), *gradient = on_device(values, count, precision);
        work.values = sums;
        work.bias = on_device(bias, columns, precision);
        work.d_bias = NULL;
        work.partials = poisoned_floats((size_t)CUDA_ROW_BLOCKS * columns);
        bias_add(cuda_test_stream(precision), &work);
        work.values = gradient;
        work.d_bias = floats_on_device(before, columns);
        bias_add(cuda_test_stream(precision), &work);
        cuda_test_wait(cuda_test_stream(precision));
        result_check(&results[0], order, from_device(sums, count, precision));
        result_check(&results[1], order, from_device(gradient, count, precision));
        result_check(&results[2], order, floats_from_device(work.d_bias, columns));
    }
    results_end(results, 3);
    keep_nothing();
}

static void test_bias(void **state) {
    (void)state;
    run_cases(run_bias_case);
}

// Element by element against the definition in double, from the smallest numbers to those
// whose square overflows.
static void test_gelu_far_out(void **state) {
    (void)state;
    enum { COUNT = 26 };
    const float x[COUNT] = {0,     1e-30f, -1e-30f, 1e-3f, -1e-3f, 1,      -1,       3,    -3,
                            6,     -6,     8,       -8,    12,     -12,    100.0f,   -100, 1e4f,
                            -1e4f, 1e15f,  -1e15f,  1e25f, -1e32f, -3e38f, INFINITY, NAN};
    float zeros[COUNT] = {}, ones[COUNT];
    for (int i = 0; i < COUNT; i++) { ones[i] = 1.0f; }
    Real *saved = on_device(x, COUNT, PRECISION_FP32), *bias = on_device(zeros, COUNT, PRECISION_FP32),
         *output = poisoned(COUNT, PRECISION_FP32);
    Real *gradient = on_device(ones, COUNT, PRECISION_FP32);
    float *d_bias = floats_on_device(zeros, COUNT), *partials = poisoned_floats(CUDA_ROW_BLOCKS * COUNT);
    Stream *stream = cuda_test_stream(PRECISION_FP32);
    call_gelu_forward(stream, output, saved, bias, 1, COUNT);
    call_gelu_backward(stream, gradient, COUNT, d_bias, partials, saved, bias, 1, COUNT);
    cuda_test_wait(stream);
    float *values = from_device(output, COUNT, PRECISION_FP32),
          *derivatives = from_device(gradient, COUNT, PRECISION_FP32);
    Worst worst = {}, slopes = {};
    for (int i = 0; i < COUNT - 2; i++) {
        double z = (double)x[i], twice_u = 2 * sqrt(2 / M_PI) * (z + 0.044715 * z * z * z),
               s = 1 / (1 + exp(-twice_u));
        double slope =
            s +
            (s == 0 || s == 1 ? 0 : z * s * s * exp(-twice_u) * 2 * sqrt(2 / M_PI) * (1 + 0.134145 * z * z));
        worst_add(&worst, (size_t)i, (double)values[i], z * s, 1e-5 * fabs(z * s) + 1e-20);
        worst_add(&slopes, (size_t)i, (double)derivatives[i], slope, 2e-5 * fabs(slope) + 1e-7);
    }
    check_worst("gelu far out", worst);
    check_worst("slope of gelu far out", slopes);
    for (int i = COUNT - 2; i < COUNT; i++) {
        assert_false(is_finite_number(values[i]) || is_finite_number(derivatives[i]));
    }
    keep_nothing();
}

// ---- SwiGLU ---------------------------------------------------------------------------

// Backward overwrites the `columns` gradients of each row by twice as many.
static void run_swiglu_case(const GeluCase *shape, Precision precision) {
    size_t rows = (size_t)shape->rows, columns = (size_t)shape->columns,
           stride = 2 * columns + (size_t)shape->gap, count = rows * columns, gradient_count = rows * stride;
    float *inputs = numbers(2 * count, 2, precision), *d_output = numbers(gradient_count, 1, precision);
    float *output = room(count), *saved = copy_of(inputs, 2 * count),
          *gradient = copy_of(d_output, gradient_count);
    Swiglu work = {.output = as_reals(output), .saved = as_reals(saved), .rows = shape->rows};
    work.columns = shape->columns;
    work.gradient_stride = (int)stride;
    swiglu(cpu_stream(), &work);
    work.gradient = as_reals(gradient);
    swiglu(cpu_stream(), &work);
    Result results[3] = {{"output", output, count, rounding(precision), NULL},
                         {"saved", inputs, 2 * count, 0, NULL},
                         {"gradient", gradient, gradient_count, rounding(precision), NULL}};
    for (int order = 0; order < SIMT_ORDERS; order++) {
        cuda_use_order(order);
        work.output = poisoned(count, precision);
        work.saved = on_device(inputs, 2 * count, precision);
        work.gradient = NULL;
        swiglu(cuda_test_stream(precision), &work);
        work.gradient = on_device(d_output, gradient_count, precision);
        swiglu(cuda_test_stream(precision), &work);
        cuda_test_wait(cuda_test_stream(precision));
        result_check(&results[0], order, from_device(work.output, count, precision));
        result_check(&results[1], order, from_device(work.saved, 2 * count, precision));
        result_check(&results[2], order, from_device(work.gradient, gradient_count, precision));
    }
    results_end(results, 3);
    keep_nothing();
}

static void test_swiglu(void **state) {
    (void)state;
    run_cases(run_swiglu_case);
    const GeluCase real = {4096, 8192, 0};
    if (!cuda_small_shapes()) { run_swiglu_case(&real, PRECISION_BF16); }
}

// Element by element against the definition in double. A NaN or infinity is never lost.
static void test_swiglu_far_out(void **state) {
    (void)state;
    enum { COUNT = 20 };
    const float x[COUNT] = {0,   1e-30f, 1e-3f, -1e-3f, 1,      -1,    3,     -3,     12,       -12,
                            -80, 100.0f, -100,  1e4f,   -1e15f, 1e25f, 1e18f, -3e38f, INFINITY, NAN};
    float inputs[2 * COUNT], ones[2 * COUNT];
    for (int i = 0; i < COUNT; i++) { inputs[i] = x[i], inputs[COUNT + i] = 0.5f; }
    for (int i = 0; i < 2 * COUNT; i++) { ones[i] = 1.0f; }
    Swiglu work = {.output = poisoned(COUNT, PRECISION_FP32),
                   .saved = on_device(inputs, 2 * COUNT, PRECISION_FP32),
                   .rows = 1,
                   .columns = COUNT,
                   .gradient_stride = 2 * COUNT};
    swiglu(cuda_test_stream(PRECISION_FP32), &work);
    work.gradient = on_device(ones, 2 * COUNT, PRECISION_FP32);
    swiglu(cuda_test_stream(PRECISION_FP32), &work);
    cuda_test_wait(cuda_test_stream(PRECISION_FP32));
    float *values = from_device(work.output, COUNT, PRECISION_FP32),
          *slopes = from_device(work.gradient, 2 * COUNT, PRECISION_FP32);
    Worst worst[3] = {};
    for (int i = 0; i < COUNT - 2; i++) {
        double g = (double)x[i], s = 1 / (1 + exp(-g)), rest = s == 0 ? 0 : g * s / (1 + exp(g));
        worst_add(&worst[0], (size_t)i, (double)values[i], g * s / 2, 1e-5 * fabs(g * s) + 1e-20);
        worst_add(&worst[1], (size_t)i, (double)slopes[i], (s + rest) / 2, 2e-5 * fabs(s + rest) + 1e-7);
        worst_add(&worst[2], (size_t)i, (double)slopes[COUNT + i], g * s, 1e-5 * fabs(g * s) + 1e-20);
    }
    check_worst("swiglu far out", worst[0]);
    check_worst("slope of the gate far out", worst[1]);
    check_worst("slope of swiglu far out", worst[2]);
    for (int i = COUNT - 2; i < COUNT; i++) {
        assert_false(is_finite_number(values[i]) || is_finite_number(slopes[i]));
    }
    keep_nothing();
}

// ---- Rotary positions -----------------------------------------------------------------

typedef struct RotaryCase {
    int rows, T, heads, kv_heads, D, gap; // gap: behind the queries and keys of each row
} RotaryCase;

// Of the models' heads and others, rows that are not aligned, more rows than blocks, more heads of
// a block than groups of lanes.
static const RotaryCase rotary_cases[] = {
    {14, 7, 2, 1, 16, 16}, {5, 5, 3, 3, 64, 64},   {18, 9, 4, 2, 128, 256},   {9, 3, 5, 1, 80, 80},
    {6, 3, 2, 2, 40, 40},  {10, 5, 2, 1, 20, 3},   {7, 7, 1, 1, 2, 0},        {4, 2, 3, 1, 256, 0},
    {3, 3, 2, 1, 250, 1},  {700, 350, 2, 1, 8, 0}, {1061, 1061, 3, 1, 16, 8}, {530, 265, 9, 3, 128, 8},
};
static const RotaryCase real_rotary_cases[] = {{4096, 2048, 32, 8, 64, 512}, {4095, 819, 16, 8, 128, 1024}};

// Whole rows and their gaps, of which only the heads change.
static void run_rotary_case(const RotaryCase *shape, bool normed, Precision precision) {
    int D = shape->D, heads = shape->heads + shape->kv_heads;
    size_t rows = (size_t)shape->rows, width = (size_t)(heads * D), stride = width + (size_t)shape->gap,
           count = rows * stride, table = (size_t)(shape->T * D);
    float *inputs = numbers(count, 1, precision), *gradients = numbers(count, 1, precision),
          *weights = numbers(2 * (size_t)D, 1, precision),
          *before = numbers(2 * (size_t)D, 1, PRECISION_FP32), *turns = numbers(table, 1, PRECISION_FP32),
          *values = copy_of(inputs, count), *gradient = copy_of(gradients, count),
          *saved = room(rows * width), *sums = copy_of(before, 2 * (size_t)D);
    Rotary work = {.saved = as_reals(saved), .turns = turns, .rows = shape->rows, .T = shape->T};
    work.heads = shape->heads, work.kv_heads = shape->kv_heads, work.head_size = D, work.stride = (int)stride;
    work.scale = 0.3f, work.epsilon = 1e-5f, work.partials = room((size_t)ROW_BLOCKS * 2 * (size_t)D);
    for (int key = 0; key < 2 && normed; key++) {
        work.weights[key] = as_reals(weights + key * D), work.d_weights[key] = sums + key * D;
    }
    Rotary device = work;
    work.values = as_reals(values);
    rotary(cpu_stream(), &work);
    float *expected_saved = copy_of(saved, rows * width); // of numbers that are rounded already
    work.values = as_reals(gradient), work.backward = true;
    rotary(cpu_stream(), &work);
    Result results[4] = {{"values", values, count, rounding(precision), NULL},
                         {"gradient", gradient, count, rounding(precision), NULL},
                         {"d_weights", sums, 2 * (size_t)D, 2e-5, NULL},
                         {"saved", expected_saved, rows * width, 0, NULL}};
    for (int order = 0; order < SIMT_ORDERS; order++) {
        cuda_use_order(order);
        Real *forward = on_device(inputs, count, precision),
             *backward = on_device(gradients, count, precision);
        float *d_weights = floats_on_device(before, 2 * (size_t)D);
        device.turns = floats_on_device(turns, table);
        device.saved = normed ? poisoned(rows * width, precision) : NULL;
        device.partials = poisoned_floats((size_t)CUDA_ROW_BLOCKS * 2 * (size_t)D);
        for (int key = 0; key < 2 && normed; key++) {
            device.weights[key] = on_device(weights + key * D, (size_t)D, precision);
            device.d_weights[key] = d_weights + key * D;
        }
        device.values = forward, device.backward = false;
        rotary(cuda_test_stream(precision), &device);
        device.values = backward, device.backward = true;
        rotary(cuda_test_stream(precision), &device);
        cuda_test_wait(cuda_test_stream(precision));
        result_check(&results[0], order, from_device(forward, count, precision));
        result_check(&results[1], order, from_device(backward, count, precision));
        result_check(&results[2], order, floats_from_device(d_weights, 2 * (size_t)D));
        if (normed) { result_check(&results[3], order, from_device(device.saved, rows * width, precision)); }
    }
    results_end(results, 4);
    keep_nothing();
}

static void test_rotary(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++) {
        for (size_t k = 0; k < sizeof rotary_cases / sizeof *rotary_cases; k++) {
            run_rotary_case(&rotary_cases[k], i / 2 != 0, (Precision)(i % 2));
        }
        for (size_t k = 0; !cuda_small_shapes() && k < 2; k++) {
            run_rotary_case(&real_rotary_cases[k], i / 2 != 0, (Precision)(i % 2));
        }
    }
}

// A NaN spoils its head, and in backward the sums of its weight, and nothing else.
static void test_rotary_passes_nan(void **state) {
    (void)state;
    enum { D = 16, HEADS = 3, ROWS = 5, COUNT = ROWS * HEADS * D, BAD = (2 * HEADS + 1) * D + 3 };
    for (int i = 0; i < 4; i++) {
        Precision precision = (Precision)(i % 2);
        float *x = numbers(COUNT, 1, precision),
              *sums = floats_on_device(numbers(2 * D, 1, PRECISION_FP32), 2 * D);
        Rotary work = {.turns = floats_on_device(numbers(ROWS * D, 1, PRECISION_FP32), ROWS * D),
                       .rows = ROWS};
        work.T = ROWS, work.heads = 2, work.kv_heads = 1, work.head_size = D, work.stride = HEADS * D;
        work.scale = 0.5f, work.epsilon = 1e-5f, work.backward = i / 2 != 0;
        work.saved = on_device(x, COUNT, precision);
        work.partials = poisoned_floats(CUDA_ROW_BLOCKS * 2 * D);
        for (int key = 0; key < 2; key++) {
            work.weights[key] = on_device(numbers(D, 1, precision), D, precision);
            work.d_weights[key] = sums + key * D;
        }
        x[BAD] = NAN;
        work.values = on_device(x, COUNT, precision);
        rotary(cuda_test_stream(precision), &work);
        cuda_test_wait(cuda_test_stream(precision));
        float *got = from_device(work.values, COUNT, precision), *d_weights = floats_from_device(sums, 2 * D);
        for (int k = 0; k < COUNT; k++) { assert_int_equal(is_finite_number(got[k]), k / D != BAD / D); }
        assert_int_equal(is_finite_number(d_weights[3]), i / 2 == 0);
        for (int k = D; k < 2 * D; k++) { assert_true(is_finite_number(d_weights[k])); }
        keep_nothing();
    }
}

// ---- Embedding ------------------------------------------------------------------------

typedef struct EmbeddingCase {
    int B, T, channels, vocabulary;
    double skew; // share of the positions that have token V / 2
    bool bare;   // there is no table of positions
} EmbeddingCase;

static const EmbeddingCase embedding_cases[] = {
    {1, 1, 1, 1, 0},       {3, 7, 37, 11, 0},     {2, 64, 24, 3, 0.5},        {5, 129, 16, 300, 0.3},
    {1, 128, 12, 2, 1},    {2, 1107, 8, 5, 0.99}, {1, 257, 13, 7, 0.01},      {3, 50, 4104, 9, 0.2},
    {4, 97, 520, 1000, 0}, {2, 700, 13, 5, 0.9},  {2, 67, 24, 11, 0.2, true}, {3, 7, 37, 11, 0, true},
};
static const EmbeddingCase real_embedding_cases[] = {
    {24, 1024, 768, 50257, 0.05}, {7, 1023, 2560, 256, 0.18}, {3, 999, 765, 50257, 1}};

static int32_t *embedding_tokens(const EmbeddingCase *shape) {
    int rows = shape->B * shape->T;
    int32_t *tokens = (int32_t *)room((size_t)rows);
    for (int i = 0; i < rows; i++) {
        bool frequent = random_uniform(&test_random) < shape->skew;
        tokens[i] =
            frequent ? shape->vocabulary / 2 : (int32_t)(random_uniform(&test_random) * shape->vocabulary);
    }
    return tokens;
}

static int32_t *checked_order(const EmbeddingCase *shape, const int32_t *tokens) {
    int rows = shape->B * shape->T;
    int32_t *order = (int32_t *)room((size_t)rows);
    int32_t *counts = (int32_t *)room((size_t)shape->vocabulary + 1);
    embedding_order(order, counts, tokens, rows, shape->vocabulary);
    for (int i = 1; i < rows; i++) {
        int32_t before = tokens[order[i - 1]], token = tokens[order[i]];
        assert_true(before < token || (before == token && order[i - 1] < order[i]));
    }
    return order;
}

static void run_embedding_forward_case(const EmbeddingCase *shape, Precision precision) {
    size_t C = (size_t)shape->channels, count = (size_t)shape->B * (size_t)shape->T * C,
           V = (size_t)shape->vocabulary, T = (size_t)shape->T;
    int32_t *tokens = embedding_tokens(shape);
    float *wte = numbers(V * C, 1, precision), *wpe = numbers(T * C, 1, precision), *expected = room(count);
    call_embedding_forward(cpu_stream(), as_reals(expected), as_reals(wte),
                           shape->bare ? NULL : as_reals(wpe), tokens, shape->B, shape->T, shape->channels);
    host_round(expected, count, precision);
    Result result = {"embedding", expected, count, 0, NULL};
    const int32_t *device_tokens =
        keep_device((int32_t *)device_from_host(tokens, count / C * sizeof(int32_t)));
    const Real *device_wte = on_device(wte, V * C, precision), *device_wpe = on_device(wpe, T * C, precision);
    for (int order = 0; order < SIMT_ORDERS; order++) {
        cuda_use_order(order);
        Real *output = poisoned(count, precision);
        Stream *stream = cuda_test_stream(precision);
        call_embedding_forward(stream, output, device_wte, shape->bare ? NULL : device_wpe, device_tokens,
                               shape->B, shape->T, shape->channels);
        cuda_test_wait(stream);
        result_check(&result, order, from_device(output, count, precision));
    }
    results_end(&result, 1);
    keep_nothing();
}

static void run_embedding_backward_case(const EmbeddingCase *shape, Precision precision) {
    size_t C = (size_t)shape->channels, rows = (size_t)shape->B * (size_t)shape->T,
           V = (size_t)shape->vocabulary, T = (size_t)shape->T;
    int32_t *tokens = embedding_tokens(shape), *order_host = checked_order(shape, tokens);
    float *d_output = numbers(rows * C, 1, precision), *wte = numbers(V * C, 1, PRECISION_FP32),
          *wpe = numbers(T * C, 1, PRECISION_FP32);
    float *expected_wte = copy_of(wte, V * C), *expected_wpe = copy_of(wpe, T * C);
    call_embedding_backward(cpu_stream(), expected_wte, shape->bare ? NULL : expected_wpe, NULL,
                            as_reals(d_output), tokens, NULL, shape->B, shape->T, shape->channels);
    Result results[2] = {{"d_wte", expected_wte, V * C, 1e-5, NULL},
                         {"d_wpe", expected_wpe, T * C, 1e-6, NULL}};
    const int32_t *device_tokens = keep_device((int32_t *)device_from_host(tokens, rows * sizeof(int32_t)));
    const int32_t *device_order =
        keep_device((int32_t *)device_from_host(order_host, rows * sizeof(int32_t)));
    const Real *gradient = on_device(d_output, rows * C, precision);
    for (int order = 0; order < SIMT_ORDERS; order++) {
        cuda_use_order(order);
        float *d_wte = floats_on_device(wte, V * C), *d_wpe = floats_on_device(wpe, T * C);
        float *partials = poisoned_floats(embedding_partials_floats((int)rows, shape->channels));
        Stream *stream = cuda_test_stream(precision);
        call_embedding_backward(stream, d_wte, shape->bare ? NULL : d_wpe, partials, gradient, device_tokens,
                                device_order, shape->B, shape->T, shape->channels);
        cuda_test_wait(stream);
        result_check(&results[0], order, floats_from_device(d_wte, V * C));
        result_check(&results[1], order, floats_from_device(d_wpe, T * C));
    }
    results_end(results, 2);
    keep_nothing();
}

static void run_embedding_case(const EmbeddingCase *shape) {
    for (int precision = PRECISION_FP32; precision <= PRECISION_BF16; precision++) {
        run_embedding_forward_case(shape, (Precision)precision);
        run_embedding_backward_case(shape, (Precision)precision);
    }
}

static void test_embedding(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof embedding_cases / sizeof *embedding_cases; i++) {
        run_embedding_case(&embedding_cases[i]);
    }
    for (size_t i = 0; !cuda_small_shapes() && i < sizeof real_embedding_cases / sizeof *real_embedding_cases;
         i++) {
        run_embedding_case(&real_embedding_cases[i]);
    }
}

// ---------------------------------------------------------------------------------------
// FP8. The CPU has none: the oracle is a table of the format's numbers, which is counted
// up.

typedef struct Fp8Table {
    float numbers[128]; // of the codes without a sign
    int largest;        // the code of the largest number
} Fp8Table;

// From 0 on in equal steps, which double behind every 2^places numbers, but not behind
// the first ones.
static Fp8Table fp8_table(Precision format) {
    Fp8Table table;
    int block = format == PRECISION_E4M3 ? 8 : 4;
    float number = 0, step = format == PRECISION_E4M3 ? 0x1p-9f : 0x1p-16f;
    for (int code = 0; code < 128; code++) {
        table.numbers[code] = number;
        number += step;
        if (code >= block && (code + 1) % block == 0) { step *= 2; }
    }
    table.largest = format == PRECISION_E4M3 ? 126 : 123;
    return table;
}

static float fp8_number(const Fp8Table *table, uint8_t code) {
    float number = (code & 127) <= table->largest ? table->numbers[code & 127] : NAN;
    return code & 128 ? -number : number;
}

// The nearest number, of two equally near the even code; beyond the largest that one.
static uint8_t fp8_nearest(const Fp8Table *table, float value) {
    int best = 0;
    if (isnan(value)) { return 0x7f; }
    for (int code = 1; code <= table->largest; code++) {
        double before = fabs(fabs((double)value) - (double)table->numbers[best]),
               now = fabs(fabs((double)value) - (double)table->numbers[code]);
        if (now < before || (now == before && code % 2 == 0)) { best = code; }
    }
    if (fabsf(value) >= table->numbers[table->largest]) { best = table->largest; }
    return (uint8_t)(best | (signbit(value) ? 128 : 0));
}

static void check_code(const char *what, size_t i, const Fp8Table *table, float value, uint8_t got) {
    uint8_t expected = fp8_nearest(table, value);
    if (isnan(value) ? (got & 127) != 127 : got != expected) {
        fail_msg("%s, element %zu: %.9g became code %02x, %g; expected %02x, %g", what, i, (double)value, got,
                 (double)fp8_number(table, got), expected, (double)fp8_number(table, expected));
    }
}

// What a cast makes of a matrix on the device.
typedef struct Fp8Cast {
    Fp8 device;
    float scale;
    uint8_t *codes; // on the host; where it turns, those of the transposed matrix follow
} Fp8Cast;

// values (rows, columns), rows `stride` apart.
static Fp8Cast fp8_cast_of(const float *values, int rows, int columns, int stride, Precision format,
                           bool turns) {
    size_t count = (size_t)rows * (size_t)columns, bytes = turns ? 2 * count : count;
    Stream *stream = cuda_test_stream(PRECISION_BF16);
    Fp8Cast cast = {{keep_device((uint8_t *)device_new(bytes)), poisoned_floats(1), format}, 0, NULL};
    const Real *in = on_device(values, (size_t)(rows - 1) * (size_t)stride + (size_t)columns, PRECISION_BF16);
    fp8_cast(stream, &cast.device, turns, poisoned_floats(CUDA_ROW_BLOCKS), in, rows, columns, stride);
    cuda_test_wait(stream);
    cast.codes = (uint8_t *)room(bytes / sizeof(float));
    device_to_host(&cast.scale, cast.device.scale, sizeof cast.scale);
    device_to_host(cast.codes, cast.device.codes, bytes);
    return cast;
}

static float fp8_limit(Precision format) { return format == PRECISION_E4M3 ? 448.0f : 57344.0f; }

// Every bf16 up to the largest number of the format, which makes the scale 1.
static void test_fp8_of_every_number(void **state) {
    (void)state;
    for (int format = PRECISION_E4M3; format <= PRECISION_E5M2; format++) {
        Fp8Table table = fp8_table((Precision)format);
        float *values = room(1 << 16), limit = fp8_limit((Precision)format);
        int count = 0;
        for (unsigned bits = 0; bits < 1 << 16; bits++) {
            float value = host_from_bf16((uint16_t)bits);
            if (fabsf(value) <= limit) { values[count++] = value; }
        }
        while (count % 16 != 0) { values[count++] = 0; }
        assert_true(table.numbers[table.largest] == limit && count > 30000);
        for (int order = 0; order < SIMT_ORDERS; order++) {
            cuda_use_order(order);
            Fp8Cast cast = fp8_cast_of(values, count / 16, 16, 16, (Precision)format, false);
            assert_true(cast.scale == 1.0f);
            for (int i = 0; i < count; i++) {
                check_code("every number", (size_t)i, &table, values[i], cast.codes[i]);
            }
        }
        keep_nothing();
    }
}

// Numbers that no bf16 is, and some that are larger than all of the format.
static void test_fp8_codes(void **state) {
    (void)state;
#ifdef ACCO_SIMT_H
    for (int format = PRECISION_E4M3; format <= PRECISION_E5M2; format++) {
        Fp8Table table = fp8_table((Precision)format);
        float limit = fp8_limit((Precision)format),
              far[] = {limit * 1.0001f, -1.07f * limit, 1.2f * limit, 1e30f, -INFINITY, NAN};
        for (int i = 0; i < 100000; i++) {
            float value =
                ldexpf((float)random_normal(&test_random), (int)(random_bits(&test_random) % 50) - 30);
            if (i < 127) { value = nextafterf((table.numbers[i] + table.numbers[i + 1]) / 2, i % 2 * limit); }
            if (i >= 127 && i < 133) { value = far[i - 127]; }
            uint32_t code =
                format == PRECISION_E4M3 ? fp8_code<PRECISION_E4M3>(value) : fp8_code<PRECISION_E5M2>(value);
            check_code("a number", (size_t)i, &table, value, (uint8_t)code);
        }
    }
#endif
}

// Rows with gaps of NaN, and the transposed matrix.
static void check_fp8_matrix(int rows, int columns, int stride, Precision format, float size) {
    Fp8Table table = fp8_table(format);
    bool turns = format == PRECISION_E4M3 && rows % 16 == 0;
    size_t count = (size_t)rows * (size_t)stride;
    float *values = numbers(count, (double)size, PRECISION_BF16), most = 0;
    for (size_t i = 0; i < count; i++) {
        if (i % (size_t)stride >= (size_t)columns) { values[i] = NAN; }
        most = fmaxf(most, fabsf(values[i]));
    }
    most = fmaxf(most, 1e-30f);
    float limit = fp8_limit(format), inverse = limit / most;
    for (int order = 0; order < SIMT_ORDERS; order++) {
        cuda_use_order(order);
        Fp8Cast cast = fp8_cast_of(values, rows, columns, stride, format, turns);
        assert_true(cast.scale == most / limit);
        for (int row = 0; row < rows; row++) {
            for (int column = 0; column < columns; column++) {
                size_t place = (size_t)row * (size_t)columns + (size_t)column;
                float value = values[(size_t)row * (size_t)stride + (size_t)column] * inverse;
                check_code("a matrix", place, &table, value, cast.codes[place]);
                if (!turns) { continue; }
                assert_int_equal(cast.codes[(size_t)(rows * columns + column * rows + row)],
                                 cast.codes[place]);
            }
        }
    }
    keep_nothing();
}

static void test_fp8_matrices(void **state) {
    (void)state;
    const int shapes[][3] = {{1, 16, 16}, {16, 48, 48}, {48, 16, 24}, {37, 80, 96}, {160, 112, 112}};
    const float sizes[] = {1, 1e-3f, 1e4f, 1e-33f, 0};
    for (int i = 0; i < 5; i++) {
        for (int format = PRECISION_E4M3; format <= PRECISION_E5M2; format++) {
            const int *shape = shapes[i];
            check_fp8_matrix(shape[0], shape[1], shape[2], (Precision)format, sizes[i]);
            check_fp8_matrix(shape[0], shape[1], shape[2], (Precision)format, 1);
        }
    }
    if (!cuda_small_shapes()) { check_fp8_matrix(2048, 3072, 3072, PRECISION_E4M3, 1); }
}

// A matrix that is too large for the blocks there are, as it is for a GPU's from half a million
// elements on: they take turns. The largest magnitude comes last.
static void test_fp8_blocks_take_turns(void **state) {
    (void)state;
    enum { ROWS = 64, COLUMNS = 384, COUNT = ROWS * COLUMNS, BLOCKS = 2 };
    float *values = numbers(COUNT, 1, PRECISION_BF16);
    values[COUNT - 1] = -100;
    Fp8Cast whole = fp8_cast_of(values, ROWS, COLUMNS, COLUMNS, PRECISION_E4M3, true);
    assert_true(whole.scale == 100 / 448.0f);
    const __nv_bfloat16 *in = reals<__nv_bfloat16>(on_device(values, COUNT, PRECISION_BF16));
    for (int order = 0; order < SIMT_ORDERS; order++) {
        Stream *stream = cuda_test_stream(PRECISION_BF16);
        float *largest = poisoned_floats(BLOCKS), *scale = poisoned_floats(1), got;
        uint8_t *codes = keep_device((uint8_t *)device_new(2 * COUNT)), *host = (uint8_t *)room(COUNT / 2);
        size_t shared = FP8_THREADS / WARP * sizeof(float);
        cuda_use_order(order);
        cuda_launch(stream, fp8_largest_kernel, dim3(BLOCKS), dim3(FP8_THREADS), shared, largest, in,
                    COUNT / 8, COLUMNS / 8, COLUMNS);
        cuda_launch(stream, fp8_cast_kernel<PRECISION_E4M3, false>, dim3(BLOCKS), dim3(FP8_THREADS), shared,
                    codes, scale, largest, in, ROWS, COLUMNS, COLUMNS);
        cuda_launch(stream, fp8_cast_kernel<PRECISION_E4M3, true>, dim3(BLOCKS), dim3(FP8_THREADS), shared,
                    codes + COUNT, scale, largest, in, ROWS, COLUMNS, COLUMNS);
        cuda_test_wait(stream);
        device_to_host(&got, scale, sizeof got);
        device_to_host(host, codes, 2 * COUNT);
        assert_true(got == whole.scale);
        assert_memory_equal(host, whole.codes, 2 * COUNT);
    }
    keep_nothing();
}

// input (rows, inputs) times weight^T (outputs, inputs) by their codes; the result has
// gaps.
static void check_fp8_product(int rows, int inputs, int outputs, Precision format, const float *special) {
    Fp8Table a_table = fp8_table(format), b_table = fp8_table(PRECISION_E4M3);
    int stride = outputs + 8;
    // Tensor cores of an H100 add products of FP8 with fewer bits than fp32 has.
    double sums = CUDA_EMULATED || CUDA_AS_PTX ? 1e-6 : 1e-3;
    float *values = numbers((size_t)(rows * inputs), 3e-4, PRECISION_BF16),
          *weights = numbers((size_t)(outputs * inputs), 70, PRECISION_BF16);
    if (special != NULL) { values[rows / 2 * inputs + 3] = *special; }
    Fp8Cast a = fp8_cast_of(values, rows, inputs, inputs, format, false),
            b = fp8_cast_of(weights, outputs, inputs, inputs, PRECISION_E4M3, false);
    Stream stream = *cuda_test_stream(PRECISION_BF16);
    cuda_gemm_open(&stream, keep_device((void *)device_new(GEMM_WORKSPACE_BYTES)));
    Real *result = poisoned((size_t)(rows * stride), PRECISION_BF16);
    matmul_fp8(&stream, result, stride, &a.device, &b.device, rows, inputs, outputs);
    cuda_test_wait(&stream);
    float *got = from_device(result, (size_t)(rows * stride), PRECISION_BF16);
    Worst worst = {};
    for (int i = 0; i < rows * stride; i++) {
        double sum = 0, size = 0;
        for (int k = 0; i % stride < outputs && k < inputs; k++) {
            double product = (double)fp8_number(&a_table, a.codes[i / stride * inputs + k]) *
                             (double)fp8_number(&b_table, b.codes[i % stride * inputs + k]);
            sum += product;
            size += fabs(product);
        }
        double expected = sum * (double)a.scale * (double)b.scale,
               bound = 0x1p-8 * fabs(expected) + sums * size * (double)a.scale * (double)b.scale;
        // A NaN breaks its row, an infinity everything.
        bool broken =
            i % stride >= outputs || (special != NULL && (isinf(*special) || i / stride == rows / 2));
        if (!broken) {
            worst_add(&worst, (size_t)i, (double)got[i], expected, bound);
        } else if (!isnan(got[i])) {
            fail_msg("%d x %d x %d, element %d: %g, expected NaN", rows, inputs, outputs, i, (double)got[i]);
        }
    }
    char what[64];
    snprintf(what, sizeof what, "FP8 product, %d x %d x %d", rows, inputs, outputs);
    check_worst(what, worst);
    cuda_gemm_close(&stream);
    keep_nothing();
}

// What is not finite reaches the product.
static void test_fp8_products(void **state) {
    (void)state;
    const float specials[] = {NAN, INFINITY};
    if (!cuda_has_fp8()) { skip(); }
    cuda_use_order(0);
    for (int format = PRECISION_E4M3; format <= PRECISION_E5M2; format++) {
        check_fp8_product(5, 48, 32, (Precision)format, NULL);
        check_fp8_product(32, 16, 80, (Precision)format, NULL);
        for (int i = 0; i < 2; i++) { check_fp8_product(3, 32, 16, (Precision)format, &specials[i]); }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_column_sums),
        cmocka_unit_test(test_layernorm),
        cmocka_unit_test(test_layernorm_passes_nan),
        cmocka_unit_test(test_gelu),
        cmocka_unit_test(test_gelu_far_out),
        cmocka_unit_test(test_bias),
        cmocka_unit_test(test_swiglu),
        cmocka_unit_test(test_swiglu_far_out),
        cmocka_unit_test(test_rotary),
        cmocka_unit_test(test_rotary_passes_nan),
        cmocka_unit_test(test_embedding),
        cmocka_unit_test(test_fp8_of_every_number),
        cmocka_unit_test(test_fp8_codes),
        cmocka_unit_test(test_fp8_matrices),
        cmocka_unit_test(test_fp8_blocks_take_turns),
        cmocka_unit_test(test_fp8_products),
    };
    return cmocka_run_group_tests_name("cuda_layers", tests, seed_test, NULL);
}
