// test_cuda_attention.cu: attention on the device against the CPU's, with both families
// of kernels (tiles and rows), at odd shapes.
//
// Device and CPU start from the same rounded numbers. Besides being close, results must
// have the same bits in every order of threads, nothing may be written outside the
// outputs, nothing outside the band may have an effect, and no NaN inside it may be lost.
#include "test/cuda/cuda_kernels.h"

#include "kernels/kernels.h"
#include "test/layer_calls.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

typedef struct AttentionCase {
    int B, T, heads, D, window;
    int gap;                 // elements between rows of d_qkv
    int second, third, rest; // where documents begin, those of sample b at b more; 0, 0, 0: there are none
    int kv_heads;            // 0: as many as heads
    bool exact;              // in fp32, of small_cases
} AttentionCase;

static const AttentionCase small_cases[] = {
    {1, 70, 2, 64, 0, 0},
    {2, 65, 1, 80, 16, 8},
    {1, 130, 1, 128, 33, 0},
    {1, 33, 3, 32, 7, 0},
    {1, 5, 1, 64, 3, 0},
    {1, 1, 2, 16, 0, 16},
    {1, 64, 1, 48, 64, 0},
    {1, 150, 1, 96, 1, 0},
    {1, 193, 1, 16, 70, 0},
    {1, 197, 1, 32, 0, 0},
    {1, 128, 2, 16, 500, 0},
    {2, 17, 3, 20, 5, 0},
    {1, 21, 2, 64, 4, 1},
    {1, 130, 1, 32, 95, 0},
    {1, 140, 1, 80, 50, 0},
    {1, 100, 1, 16, 34, 0}, // rectangles with one pair outside the band, and with one pair inside
    {1, 40, 2, 136, 9, 2},
    {1, 150, 1, 96, 0, 0},
    {1, 140, 1, 48, 0, 0},
    // Documents: within a tile, on its edge, of one token, across tiles, in a window.
    {2, 150, 1, 16, 0, 0, 1, 63, 64},
    {1, 200, 1, 32, 0, 0, 64, 128, 129},
    {1, 140, 1, 48, 40, 0, 20, 30, 100},
    {2, 135, 2, 64, 0, 8, 66, 67, 130},
    {1, 150, 1, 80, 33, 0, 10, 95, 149},
    {1, 130, 1, 96, 0, 0, 127, 128, 129},
    {1, 200, 1, 128, 0, 0, 31, 97, 161},
    {2, 37, 3, 20, 5, 0, 3, 16, 17},
    {1, 40, 1, 136, 0, 2, 7, 8, 30},
    // Several heads of queries for each of keys: one tile of queries, several, windows, documents.
    {2, 35, 4, 16, 0, 0, 0, 0, 0, 2},
    {1, 150, 3, 16, 40, 16, 0, 0, 0, 1},
    {1, 130, 2, 32, 0, 0, 0, 0, 0, 1},
    {1, 100, 2, 48, 7, 8, 0, 0, 0, 1},
    {1, 261, 2, 64, 0, 64, 0, 0, 0, 1},
    {2, 131, 6, 64, 33, 0, 0, 0, 0, 2},
    {1, 140, 3, 80, 0, 0, 0, 0, 0, 1},
    {1, 131, 2, 96, 50, 0, 0, 0, 0, 1},
    {1, 135, 4, 128, 0, 128, 0, 0, 0, 2},
    {2, 17, 4, 40, 5, 0, 0, 0, 0, 2},
    {1, 21, 2, 64, 4, 1, 0, 0, 0, 1},
    {2, 150, 2, 16, 0, 0, 1, 63, 64, 1},
    {1, 135, 2, 32, 20, 0, 66, 67, 130, 1},
    {1, 75, 2, 48, 0, 0, 20, 30, 64, 1},
    {2, 135, 2, 64, 0, 8, 66, 67, 130, 1},
    {1, 150, 2, 80, 33, 0, 10, 95, 149, 1},
    {1, 130, 2, 96, 0, 0, 127, 128, 129, 1},
    {1, 140, 2, 128, 0, 0, 31, 97, 131, 1},
    {1, 37, 4, 20, 5, 0, 3, 16, 17, 2},
    {1, 70, 1, 64, 0, 0, 0, 0, 0, 0, true},
    {2, 17, 3, 20, 5, 0, 0, 0, 0, 0, true},
    {1, 40, 1, 200, 0, 2, 0, 0, 0, 0, true},
    {1, 33, 3, 32, 7, 1, 0, 0, 0, 0, true},
    {1, 1, 2, 80, 0, 0, 0, 0, 0, 0, true},
    {1, 65, 1, 128, 16, 4, 0, 0, 0, 0, true},
    {2, 37, 2, 20, 0, 0, 3, 16, 17, 0, true},
    {1, 40, 1, 80, 9, 1, 1, 8, 30, 0, true},
    {2, 33, 4, 16, 0, 0, 0, 0, 0, 1, true},
    {1, 37, 6, 64, 9, 2, 0, 0, 0, 2, true},
    {1, 21, 2, 128, 0, 0, 3, 16, 17, 1, true},
};
static const AttentionCase gpu_cases[] = {
    {4, 1024, 12, 64, 0, 0},
    {4, 1024, 12, 64, 256, 0},
    {1, 1024, 20, 128, 0, 0},
    {1, 2048, 20, 128, 256, 2560},
    {1, 2048, 8, 80, 256, 0},
    {1, 1000, 12, 64, 100, 8},
    {3, 777, 5, 96, 0, 0},
    {1, 333, 3, 40, 50, 1},
    {4, 1024, 12, 64, 0, 0, 100, 512, 900},
    {2, 2048, 32, 64, 0, 0, 0, 0, 0, 8},
    {1, 1023, 16, 128, 512, 0, 0, 0, 0, 8},
};

// One problem and its arrays on the device.
typedef struct Problem {
    AttentionCase shape;
    Precision precision;
    int C, keys, wide; // channels of queries, of keys, and of queries, keys and values
    int d_stride;
    size_t rows, count, qkv_count, d_count;
    Real *qkv, *d_output, *output, *d_qkv;
    float *logsumexp, *workspace;
} Problem;

static bool has_documents(const AttentionCase *shape) { return shape->second > 0; }

// The first key that a query of a sample may see.
static int document_start(const AttentionCase *shape, int sample, int query) {
    const int begins[3] = {shape->second, shape->third, shape->rest};
    int start = 0;
    for (int i = 0; i < 3 && has_documents(shape); i++) {
        if (begins[i] + sample <= query) { start = begins[i] + sample; }
    }
    return start;
}

// starts (B, T), to be freed; NULL without documents.
static int32_t *document_starts(const AttentionCase *shape) {
    if (!has_documents(shape)) { return NULL; }
    int32_t *starts = (int32_t *)malloc((size_t)shape->B * (size_t)shape->T * sizeof *starts);
    for (int b = 0; b < shape->B; b++) {
        for (int t = 0; t < shape->T; t++) { starts[b * shape->T + t] = document_start(shape, b, t); }
    }
    return starts;
}

// The forward pass; the backward pass takes d_qkv and d_output besides.
static Attention attention_of(const Problem *problem, Real *output, float *logsumexp, float *workspace,
                              const Real *qkv, const int32_t *starts) {
    AttentionCase shape = problem->shape;
    Attention work = {.output = output,
                      .logsumexp = logsumexp,
                      .scratch = workspace,
                      .qkv = qkv,
                      .B = shape.B,
                      .T = shape.T,
                      .channels = problem->C,
                      .heads = shape.heads,
                      .kv_heads = shape.kv_heads,
                      .d_qkv_stride = problem->d_stride,
                      .window = shape.window < shape.T ? shape.window : 0,
                      .precision = problem->precision,
                      .starts = starts};
    return work;
}

// The results of a run, on the host.
typedef struct Results {
    float *output, *logsumexp, *d_qkv;
} Results;

static Random test_random;
static uint64_t test_seed;

static Stream *cpu_stream(void) {
    static Stream stream;
    if (stream.pool == NULL) { stream.pool = thread_pool_create(1, false); }
    return &stream;
}

static Problem problem_new(AttentionCase shape, Precision precision) {
    Problem problem;
    memset(&problem, 0, sizeof problem);
    problem.shape = shape;
    problem.precision = precision;
    problem.C = shape.heads * shape.D;
    problem.keys = (shape.kv_heads > 0 ? shape.kv_heads : shape.heads) * shape.D;
    problem.wide = problem.C + 2 * problem.keys;
    problem.d_stride = problem.wide + shape.gap;
    problem.rows = (size_t)shape.B * (size_t)shape.T;
    problem.count = problem.rows * (size_t)problem.C;
    problem.qkv_count = problem.rows * (size_t)problem.wide;
    problem.d_count =
        (problem.rows - 1) * (size_t)problem.d_stride + (size_t)problem.wide; // nothing behind the last row
    return problem;
}

static Results results_new(const Problem *problem) {
    Results results;
    results.output = (float *)malloc(problem->count * sizeof(float));
    results.logsumexp = (float *)malloc(problem->rows * (size_t)problem->shape.heads * sizeof(float));
    results.d_qkv = (float *)malloc(problem->d_count * sizeof(float));
    return results;
}

static void results_free(Results *results) {
    free(results->output);
    free(results->logsumexp);
    free(results->d_qkv);
}

static bool results_same(const Problem *problem, const Results *a, const Results *b) {
    return memcmp(a->output, b->output, problem->count * sizeof(float)) == 0 &&
           memcmp(a->logsumexp, b->logsumexp, problem->rows * (size_t)problem->shape.heads * sizeof(float)) ==
               0 &&
           memcmp(a->d_qkv, b->d_qkv, problem->d_count * sizeof(float)) == 0;
}

typedef void Backward(Stream *stream, const Attention &work);

// Forward and backward on the device from qkv (B, T, wide) and d_output (B, T, C), into
// memory full of NaNs. backward: what to call instead of the product's choice of kernels.
static void device_run_with(Problem *problem, Results *results, const float *qkv, const float *d_output,
                            Backward *backward) {
    AttentionCase shape = problem->shape;
    Precision precision = problem->precision;
    size_t numbers = problem->rows * (size_t)shape.heads, bytes = precision_bytes(precision);
    Real *device_qkv = device_reals(qkv, problem->qkv_count, precision),
         *device_d = device_reals(d_output, problem->count, precision);
    Real *output = (Real *)device_new(problem->count * bytes),
         *d_qkv = (Real *)device_new(problem->d_count * bytes);
    float *logsumexp = (float *)device_new(numbers * sizeof(float));
    float *workspace = (float *)device_new(numbers * sizeof(float));
    int32_t *starts = document_starts(&shape), *device_starts = NULL;
    if (starts != NULL) {
        device_starts = (int32_t *)device_from_host(starts, problem->rows * sizeof *starts);
    }
    Stream *stream = cuda_test_stream(precision); // only now: those above set it to fp32
    Attention work = attention_of(problem, output, logsumexp, workspace, device_qkv, device_starts);
    attention(stream, &work);
    work.d_qkv = d_qkv;
    work.d_output = device_d;
    if (backward == NULL) { attention(stream, &work); }
    if (backward != NULL) { backward(stream, work); }
    cuda_test_wait(stream);
    host_reals(results->output, output, problem->count, precision);
    host_reals(results->d_qkv, d_qkv, problem->d_count, precision);
    device_to_host(results->logsumexp, logsumexp, numbers * sizeof(float));
    void *all[7] = {device_qkv, device_d, output, d_qkv, logsumexp, workspace, device_starts};
    for (int i = 0; i < 7; i++) { CUDA_CHECK(cudaFree(all[i])); }
    free(starts);
}

static void device_run(Problem *problem, Results *results, const float *qkv, const float *d_output) {
    device_run_with(problem, results, qkv, d_output, NULL);
}

static void oracle_run(const Problem *problem, Results *results, const float *qkv, const float *d_output) {
    AttentionCase shape = problem->shape;
    float *workspace = (float *)malloc(
        attention_workspace_floats(shape.T, problem->C / shape.heads, 1, PRECISION_FP32) * sizeof(float));
    int32_t *starts = document_starts(&shape);
    Attention work = attention_of(problem, as_reals(results->output), results->logsumexp, workspace,
                                  as_reals_const(qkv), starts);
    attention(cpu_stream(), &work);
    work.d_qkv = as_reals(results->d_qkv);
    work.d_output = as_reals_const(d_output);
    attention(cpu_stream(), &work);
    free(starts);
    free(workspace);
}

// Scores of a few units, so that softmax is neither flat nor one-hot.
static float *random_qkv(const Problem *problem) {
    float *qkv = host_normals(&test_random, problem->qkv_count, sqrt(2.0 / sqrt((double)problem->shape.D)));
    host_round(qkv, problem->qkv_count, problem->precision);
    return qkv;
}

static float *random_d_output(const Problem *problem) {
    float *d_output = host_normals(&test_random, problem->count, 1.0);
    host_round(d_output, problem->count, problem->precision);
    return d_output;
}

static void describe(char *text, size_t size, const Problem *problem, const char *what) {
    AttentionCase shape = problem->shape;
    snprintf(text, size,
             "%s, %s, B %d T %d heads %d of %d D %d window %d gap %d documents %d %d %d, seed %llu", what,
             precision_name(problem->precision), shape.B, shape.T, shape.heads, shape.kv_heads, shape.D,
             shape.window, shape.gap, shape.second, shape.third, shape.rest, (unsigned long long)test_seed);
}

// Columns of dQ, dK or dV.
static int part_width(const Problem *problem, int part) { return part == 0 ? problem->C : problem->keys; }
static int part_column(const Problem *problem, int part) {
    return part == 0 ? 0 : problem->C + (part - 1) * problem->keys;
}

// dQ, dK or dV, without the gaps.
static float *gradient_part(const Problem *problem, const float *d_qkv, int part) {
    size_t width = (size_t)part_width(problem, part);
    float *values = (float *)malloc(problem->rows * width * sizeof(float));
    for (size_t row = 0; row < problem->rows; row++) {
        memcpy(values + row * width,
               d_qkv + row * (size_t)problem->d_stride + (size_t)part_column(problem, part),
               width * sizeof(float));
    }
    return values;
}

static void check_elements(const char *what, const float *got, const float *expected, size_t count,
                           double tolerance) {
    Worst worst = {};
    for (size_t i = 0; i < count; i++) {
        double value = (double)expected[i];
        worst_add(&worst, i, (double)got[i], value, tolerance * fmax(1, fabs(value)));
    }
    check_worst(what, worst);
}

// In bf16, dQ and dK suffer from the rounding of `output` in delta, which shows where the
// mean is over a few rows only.
static void check_gradient(const Problem *problem, const char *name, const float *got, const float *expected,
                           size_t count) {
    bool half = problem->precision == PRECISION_BF16, small = problem->shape.T < 32;
    char text[200];
    describe(text, sizeof text, problem, name);
    check_elements(text, got, expected, count, half ? 0.1 : 1e-4);
    if (problem->shape.window == 1 || problem->shape.T == 1) {
        return;
    } // one key: dQ and dK are 0 but for rounding
    check_close(text, got, expected, count, !half ? 5e-6 : small ? 4e-2 : 1e-2);
}

static void check_results(const Problem *problem, const Results *got, const Results *expected) {
    static const char *const names[3] = {"dQ", "dK", "dV"};
    char text[200];
    describe(text, sizeof text, problem, "output");
    check_close(text, got->output, expected->output, problem->count,
                problem->precision == PRECISION_BF16 ? 4e-3 : 2e-6);
    describe(text, sizeof text, problem, "logsumexp");
    check_elements(text, got->logsumexp, expected->logsumexp, problem->rows * (size_t)problem->shape.heads,
                   1e-5);
    for (int part = 0; part < 3; part++) {
        float *a = gradient_part(problem, got->d_qkv, part),
              *b = gradient_part(problem, expected->d_qkv, part);
        check_gradient(problem, names[part], a, b, problem->rows * (size_t)part_width(problem, part));
        free(a);
        free(b);
    }
    for (size_t i = 0; i < problem->d_count; i++) { // the gaps between rows must not be written
        if (i % (size_t)problem->d_stride >= (size_t)problem->wide) { assert_true(isnan(got->d_qkv[i])); }
    }
}

static void check_case(AttentionCase shape, Precision precision) {
    Problem problem = problem_new(shape, precision);
    float *qkv = random_qkv(&problem), *d_output = random_d_output(&problem);
    Results expected = results_new(&problem), results[SIMT_ORDERS];
    oracle_run(&problem, &expected, qkv, d_output);
    for (int order = 0; order < SIMT_ORDERS; order++) {
        cuda_use_order(order);
        results[order] = results_new(&problem);
        device_run(&problem, &results[order], qkv, d_output);
        check_results(&problem, &results[order], &expected);
        assert_true(results_same(&problem, &results[order], &results[0]));
    }
    for (int order = 0; order < SIMT_ORDERS; order++) { results_free(&results[order]); }
    results_free(&expected);
    free(qkv);
    free(d_output);
}

static void test_against_cpu(void **state) {
    (void)state;
    for (size_t i = 0; i < COUNT(small_cases); i++) {
        check_case(small_cases[i], small_cases[i].exact ? PRECISION_FP32 : PRECISION_BF16);
    }
    for (size_t i = 0; i < COUNT(gpu_cases) && !cuda_small_shapes(); i++) {
        check_case(gpu_cases[i], PRECISION_BF16);
        check_case(gpu_cases[i], PRECISION_FP32);
    }
}

// One or two tiles a warp: the same sums in the same order, so the same bits.
static void test_tiles_of_a_warp(void **state) {
    (void)state;
    if (CUDA_AS_PTX) { skip(); } // the program has only the chosen ones
    static const struct {
        AttentionCase shape;
        Backward *one, *two;
    } cases[] = {
        {{1, 130, 1, 16, 33, 0},
         cuda_attention_backward_tiles<16, false, false, 1, 1>,
         cuda_attention_backward_tiles<16, false, false, 2, 2>},
        {{1, 97, 2, 32, 0, 0},
         cuda_attention_backward_tiles<32, false, false, 1, 1>,
         cuda_attention_backward_tiles<32, false, false, 2, 2>},
        {{1, 70, 1, 48, 1, 8},
         cuda_attention_backward_tiles<48, false, false, 1, 1>,
         cuda_attention_backward_tiles<48, false, false, 2, 2>},
        {{2, 150, 1, 64, 40, 0},
         cuda_attention_backward_tiles<64, false, false, 1, 1>,
         cuda_attention_backward_tiles<64, false, false, 2, 2>},
        {{1, 81, 1, 80, 0, 0},
         cuda_attention_backward_tiles<80, false, false, 1, 1>,
         cuda_attention_backward_tiles<80, false, false, 2, 1>},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        Problem problem = problem_new(cases[i].shape, PRECISION_BF16);
        float *qkv = random_qkv(&problem), *d_output = random_d_output(&problem);
        Results one = results_new(&problem), two = results_new(&problem), chosen = results_new(&problem);
        device_run_with(&problem, &one, qkv, d_output, cases[i].one);
        device_run_with(&problem, &two, qkv, d_output, cases[i].two);
        device_run(&problem, &chosen, qkv, d_output);
        assert_true(results_same(&problem, &one, &two));
        assert_true(results_same(&problem, &one, &chosen));
        results_free(&one);
        results_free(&two);
        results_free(&chosen);
        free(qkv);
        free(d_output);
    }
}

static bool sees(const AttentionCase *shape, int query, int key) {
    return key <= query && (shape->window == 0 || key > query - shape->window) &&
           key >= document_start(shape, 0, query);
}

// Whether `count` elements at `place` in two arrays have the same bits.
static bool same_at(const float *a, const float *b, size_t place, int count) {
    return memcmp(a + place, b + place, (size_t)count * sizeof(float)) == 0;
}

// Changes q, k, v and d_output of one position of sample 0. Only those rows of output,
// logsumexp and dQ may change that see it, and those of dK and dV that share a query with
// it; all others keep their bits.
static void check_band(AttentionCase shape, Precision precision, int changed) {
    Problem problem = problem_new(shape, precision);
    float *qkv = random_qkv(&problem), *d_output = random_d_output(&problem);
    Results before = results_new(&problem), after = results_new(&problem);
    int C = problem.C, wide = problem.wide;
    device_run(&problem, &before, qkv, d_output);
    for (int i = 0; i < wide; i++) { qkv[changed * wide + i] = (float)(i % 13 - 6); }
    for (int i = 0; i < C; i++) { d_output[changed * C + i] = (float)(i % 7 - 3); }
    device_run(&problem, &after, qkv, d_output);
    for (int row = 0; row < shape.T; row++) {
        bool query_changes = sees(&shape, row, changed), key_changes = false;
        for (int i = row; i < shape.T; i++) {
            key_changes = key_changes || (sees(&shape, i, row) && sees(&shape, i, changed));
        }
        size_t d_row = (size_t)row * (size_t)problem.d_stride;
        assert_true(query_changes || same_at(before.output, after.output, (size_t)row * (size_t)C, C));
        assert_true(query_changes || same_at(before.logsumexp, after.logsumexp, (size_t)row, 1));
        assert_true(row != changed ||
                    !same_at(before.output, after.output, (size_t)row * (size_t)C, C)); // it did change
        assert_true(query_changes || same_at(before.d_qkv, after.d_qkv, d_row, C));
        assert_true(key_changes || same_at(before.d_qkv, after.d_qkv, d_row + (size_t)C, wide - C));
    }
    for (int sample = 1; sample < shape.B; sample++) {
        size_t skipped = (size_t)sample * (size_t)shape.T;
        assert_true(same_at(before.output, after.output, skipped * (size_t)C, shape.T * C));
        assert_true(same_at(before.d_qkv, after.d_qkv, skipped * (size_t)problem.d_stride,
                            (shape.T - 1) * problem.d_stride + wide));
    }
    results_free(&before);
    results_free(&after);
    free(qkv);
    free(d_output);
}

static void test_band(void **state) {
    (void)state;
    const AttentionCase cases[] = {{1, 130, 1, 64, 33, 0},
                                   {2, 150, 1, 32, 0, 0},
                                   {1, 200, 1, 16, 64, 0},
                                   {2, 150, 1, 32, 0, 0, 30, 65, 66},
                                   {1, 200, 1, 64, 64, 0, 63, 100, 129},
                                   {2, 130, 2, 64, 33, 0, 0, 0, 0, 1},
                                   {1, 150, 3, 16, 0, 0, 30, 65, 66, 1}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        check_band(cases[i], PRECISION_BF16, 0);
        check_band(cases[i], PRECISION_BF16, 63);
        check_band(cases[i], PRECISION_BF16, 64);
    }
    const AttentionCase narrow = {2, 50, 1, 20, 9, 0};
    const AttentionCase documents = {2, 50, 2, 20, 0, 0, 1, 28, 31, 1};
    check_band(narrow, PRECISION_BF16, 0);
    check_band(narrow, PRECISION_FP32, 29);
    check_band(documents, PRECISION_BF16, 0);
    check_band(documents, PRECISION_FP32, 29);
}

// A NaN or infinity in q, k, v or d_output of one position must reach every row that sees
// it.
static void check_nan(AttentionCase shape, Precision precision, int part, float bad) {
    Problem problem = problem_new(shape, precision);
    float *qkv = random_qkv(&problem), *d_output = random_d_output(&problem);
    Results results = results_new(&problem);
    int C = problem.C, place = shape.T / 2, column = shape.D / 2;
    if (part < 3) { qkv[place * problem.wide + part_column(&problem, part) + column] = bad; }
    if (part == 3) { d_output[place * C + column] = bad; }
    device_run(&problem, &results, qkv, d_output);
    for (int row = 0; row < shape.T; row++) {
        bool query = part == 0 || part == 3 ? row == place
                                            : sees(&shape, row, place); // the rows of queries that it spoils
        bool key = part == 0 || part == 3 ? sees(&shape, place, row) : row == place; // and those of keys
        const float *d_row = results.d_qkv + (size_t)row * (size_t)problem.d_stride;
        if (query && part != 3) { assert_false(isfinite(results.output[row * C + column])); }
        if (query && part < 2) {
            assert_true(isnan(results.output[row * C]) && !isfinite(results.logsumexp[row]));
        }
        if (query) { assert_false(isfinite(d_row[0])); }
        if (key) { assert_false(isfinite(d_row[C])); }
        if (key && part != 2) { assert_false(isfinite(d_row[C + problem.keys + column])); }
    }
    results_free(&results);
    free(qkv);
    free(d_output);
}

static void test_nan(void **state) {
    (void)state;
    const AttentionCase cases[] = {
        {1, 70, 1, 64, 0, 0}, {1, 100, 1, 32, 20, 0}, {1, 30, 1, 20, 4, 0}, {1, 70, 2, 64, 0, 0, 0, 0, 0, 1}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        for (int part = 0; part < 4; part++) {
            check_nan(cases[i], PRECISION_BF16, part, NAN);
            if (cases[i].D == 20) { check_nan(cases[i], PRECISION_FP32, part, NAN); }
            if (part >= 2) {
                check_nan(cases[i], PRECISION_BF16, part, INFINITY);
            } // in q and k it may mean a probability of 0 or 1
        }
    }
}

// Scores far from 0, of both signs: only exponentials of differences do not overflow.
static void test_large_scores(void **state) {
    (void)state;
    AttentionCase shapes[] = {{1, 130, 1, 64, 0, 0}, {1, 40, 1, 20, 0, 0}};
    for (size_t i = 0; i < 2; i++) {
        Problem problem = problem_new(shapes[i], PRECISION_BF16);
        float *qkv = random_qkv(&problem), *d_output = random_d_output(&problem);
        Results got = results_new(&problem), expected = results_new(&problem);
        for (size_t k = 0; k < problem.qkv_count; k++) {
            qkv[k] *= k / (size_t)problem.C % 3 == 0 ? 128.0f : 1.0f;
        } // q
        oracle_run(&problem, &expected, qkv, d_output);
        device_run(&problem, &got, qkv, d_output);
        check_close("output of large scores", got.output, expected.output, problem.count, 1e-2);
        check_close("logsumexp of large scores", got.logsumexp, expected.logsumexp, problem.rows, 2e-6);
        results_free(&got);
        results_free(&expected);
        free(qkv);
        free(d_output);
    }
}

int main(void) {
    test_seed = seed_of_tests();
    test_random.state = test_seed;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_cpu),  cmocka_unit_test(test_tiles_of_a_warp),
        cmocka_unit_test(test_band),         cmocka_unit_test(test_nan),
        cmocka_unit_test(test_large_scores),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    thread_pool_destroy(cpu_stream()->pool);
    return failed;
}
