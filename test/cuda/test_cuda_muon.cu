// test_cuda_muon.cu: a step of Muon on a GPU against the same step on the CPU, at odd shapes, tall and
// wide, and in every order of threads the same bits.
#include "test/cuda/cuda_kernels.h"

#include "optimizer.h"

enum { ORDERS = 2 };

static const int SHAPES[][2] = {{1, 1},   {1, 9},   {9, 1},    {8, 8},  {24, 40},
                                {40, 24}, {33, 65}, {130, 48}, {65, 70}};

// Elements before the matrix, which are not its: some matrices begin where 16 bytes do not.
static size_t matrix_begin(int rows) { return (size_t)(rows % 2); }

// One matrix, its optimizer and the stream that steps it.
typedef struct Bench {
    OptimizerTensor tensor;
    Optimizer optimizer;
    Arena arena;
    Stream stream;
    float *gradient, *out; // where the kernels run
} Bench;

static void bench_open(Bench *bench, int rows, int columns, Precision precision, Precision moments,
                       bool on_gpu) {
    memset(bench, 0, sizeof *bench);
    size_t begin = matrix_begin(rows), count = begin + (size_t)rows * (size_t)columns,
           bytes = count * sizeof(float);
    OptimizerTensor tensor = {begin, count, true, rows, columns};
    bench->tensor = tensor;
    OptimizerSettings settings = {.weight_decay = 0.1,
                                  .muon_momentum = 0.9,
                                  .muon_iterations = 3,
                                  .tensors = &bench->tensor,
                                  .tensor_count = 1,
                                  .moments = moments,
                                  .seed = 3,
                                  .precision = precision};
    Layout whole = optimizer_whole(count);
    Error error;
    bench->arena.on_gpu = on_gpu;
    optimizer_reserve(&bench->optimizer, &bench->arena, &settings, &whole, 0, false);
    arena_reserve(&bench->arena, MEMORY_GRADIENTS, "gradient", bytes, &bench->gradient);
    arena_reserve(&bench->arena, MEMORY_GRADIENTS, "out", bytes, &bench->out);
    assert_true(arena_commit(&bench->arena, &error));
    bench->stream.precision = precision;
    if (on_gpu) {
        bench->stream = *cuda_test_stream(precision);
        gemm_open(&bench->stream, bench->optimizer.muon.gemm);
    } else {
        bench->stream.pool = thread_pool_create(1, false);
    }
}

static void bench_close(Bench *bench) {
    if (bench->stream.queue != NULL) {
        gemm_close(&bench->stream);
    } else {
        thread_pool_destroy(bench->stream.pool);
    }
    arena_release(&bench->arena);
}

// An estimate and two commits. moved (3, count): how far each is from the start.
static void bench_run(Bench *bench, const float *master, const float *gradient, float *moved) {
    size_t count = bench->tensor.end, bytes = count * sizeof(float);
    stream_copy(&bench->stream, bench->optimizer.master, master, bytes);
    stream_copy(&bench->stream, bench->gradient, gradient, bytes);
    for (int i = 0; i < 3; i++) {
        OptimizerStep step = {.gradient = bench->gradient,
                              .out = bench->out,
                              .divisor = 3,
                              .scale = 0.7,
                              .learning_rate = 0.01,
                              .commit = i > 0};
        optimizer_step(&bench->optimizer, &bench->stream, &step);
        stream_copy(&bench->stream, moved + (size_t)i * count, bench->out, bytes);
        stream_settle(&bench->stream);
        for (size_t j = 0; j < count; j++) { moved[(size_t)i * count + j] -= master[j]; }
    }
}

static void check_shape(int rows, int columns, Precision precision, Precision moments) {
    size_t count = matrix_begin(rows) + (size_t)rows * (size_t)columns;
    Random random = {(uint64_t)(rows * 1000 + columns)};
    float *master = host_normals(&random, count, 0.5), *gradient = host_normals(&random, count, 1e-3);
    float *expected = (float *)malloc(3 * count * sizeof(float)),
          *first = (float *)malloc(3 * count * sizeof(float)),
          *moved = (float *)malloc(3 * count * sizeof(float));
    Bench cpu;
    bench_open(&cpu, rows, columns, precision, moments, false);
    bench_run(&cpu, master, gradient, expected);
    bench_close(&cpu);
    for (int order = 0; order < ORDERS; order++) {
        Bench device;
        cuda_use_order(order);
        bench_open(&device, rows, columns, precision, moments, true);
        bench_run(&device, master, gradient, moved);
        bench_close(&device);
        double error = relative_error(moved, expected, 3 * count);
        double most = precision == PRECISION_BF16 ? 3e-2 : 1e-4;
        if (!(error <= most)) {
            fail_msg("%d x %d in %s: relative error %g", rows, columns, precision_name(precision), error);
        }
        assert_memory_equal(moved, moved + count, count * sizeof(float)); // the estimate is the commit
        if (order == 0) { memcpy(first, moved, 3 * count * sizeof(float)); }
        assert_memory_equal(first, moved, 3 * count * sizeof(float));
    }
    cuda_use_order(0);
    free(master);
    free(gradient);
    free(expected);
    free(first);
    free(moved);
}

static void a_step_equals_the_cpus(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof SHAPES / sizeof SHAPES[0]; i++) {
        check_shape(SHAPES[i][0], SHAPES[i][1], PRECISION_FP32, PRECISION_FP32);
        check_shape(SHAPES[i][0], SHAPES[i][1], PRECISION_FP32, PRECISION_BF16);
        check_shape(SHAPES[i][0], SHAPES[i][1], PRECISION_BF16, PRECISION_FP32);
        check_shape(SHAPES[i][0], SHAPES[i][1], PRECISION_BF16, PRECISION_BF16);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_step_equals_the_cpus)};
    return cmocka_run_group_tests(tests, NULL, NULL) == 0 ? 0 : 1;
}
