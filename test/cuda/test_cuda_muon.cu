// test_cuda_muon.cu: a step of Muon on a GPU against the same step on the CPU, at odd shapes, tall
// and wide, and in every order of threads the same bits; several matrices, of which equal ones are
// taken together.
#include "test/cuda/cuda_kernels.h"

#include "scheduler/optimizer.h"

enum { ORDERS = 2, MATRICES = 12 };

typedef struct Shape {
    int rows, columns;
} Shape;

static const Shape SHAPES[] = {{1, 1},   {1, 9},    {9, 1},   {8, 8},    {24, 40}, {40, 24},
                               {33, 65}, {130, 48}, {65, 70}, {184, 190}}; // the last has two partial sums

// The largest has four times the elements of most others: four of these are a full batch. Once
// there are five of them, and once two. Neighbours may have equal rows and other columns, or the
// other way round.
static const Shape SEVERAL[] = {{24, 40}, {24, 40}, {24, 40}, {24, 40}, {24, 40}, {48, 80},
                                {40, 24}, {40, 24}, {24, 40}, {24, 20}, {7, 20},  {7, 5}};

// Matrices, their optimizer and the stream that steps them.
typedef struct Bench {
    OptimizerTensor tensors[MATRICES];
    size_t count; // of elements. The first are not a matrix's: some matrices begin where 16 bytes do not
    Optimizer optimizer;
    Arena arena;
    Stream stream;
    float *gradient, *out; // where the kernels run
    Real *casts;           // the same
} Bench;

static size_t elements_of(const Shape *shapes, int matrices) {
    size_t count = (size_t)(shapes->rows % 2);
    for (int i = 0; i < matrices; i++) { count += (size_t)shapes[i].rows * (size_t)shapes[i].columns; }
    return count;
}

static void bench_open(Bench *bench, const Shape *shapes, int matrices, Precision precision,
                       Precision moments, bool on_gpu) {
    memset(bench, 0, sizeof *bench);
    for (int i = 0; i < matrices; i++) {
        OptimizerTensor tensor = {elements_of(shapes, i), elements_of(shapes, i + 1), true, shapes[i].rows,
                                  shapes[i].columns};
        bench->tensors[i] = tensor;
    }
    bench->count = elements_of(shapes, matrices);
    size_t bytes = bench->count * sizeof(float);
    OptimizerSettings settings = {.weight_decay = 0.1,
                                  .muon_momentum = 0.9,
                                  .muon_iterations = 3,
                                  .tensors = bench->tensors,
                                  .tensor_count = matrices,
                                  .moments = moments,
                                  .seed = 3,
                                  .precision = precision};
    Layout whole = optimizer_whole(bench->count);
    Error error;
    bench->arena.on_gpu = on_gpu;
    optimizer_reserve(&bench->optimizer, &bench->arena, &settings, &whole, 0, false);
    arena_reserve(&bench->arena, MEMORY_GRADIENTS, "gradient", bytes, &bench->gradient);
    arena_reserve(&bench->arena, MEMORY_GRADIENTS, "out", bytes, &bench->out);
    arena_reserve(&bench->arena, MEMORY_GRADIENTS, "casts", bytes / 2, &bench->casts);
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

// An estimate and two commits, each also in bf16. moved (3, count): how far each is from the start.
static void bench_run(Bench *bench, const float *master, const float *gradient, float *moved) {
    size_t count = bench->count, bytes = count * sizeof(float);
    uint16_t *casts = (uint16_t *)malloc(bytes / 2);
    stream_copy(&bench->stream, bench->optimizer.master, master, bytes);
    stream_copy(&bench->stream, bench->gradient, gradient, bytes);
    for (int i = 0; i < 3; i++) {
        OptimizerStep step = {.gradient = bench->gradient,
                              .out = bench->out,
                              .casts = bench->casts,
                              .divisor = 3,
                              .scale = 0.7,
                              .learning_rate = 0.01,
                              .keeps = i > 0};
        optimizer_step(&bench->optimizer, &bench->stream, &step);
        stream_copy(&bench->stream, moved + (size_t)i * count, bench->out, bytes);
        stream_copy(&bench->stream, casts, bench->casts, bytes / 2);
        stream_settle(&bench->stream);
        for (size_t j = 0; j < count; j++) {
            assert_int_equal(casts[j], host_bf16(moved[(size_t)i * count + j]));
            moved[(size_t)i * count + j] -= master[j];
        }
    }
    free(casts);
}

static void check_shapes(const Shape *shapes, int matrices, Precision precision, Precision moments) {
    size_t count = elements_of(shapes, matrices);
    Random random = {count};
    float *master = host_normals(&random, count, 0.5), *gradient = host_normals(&random, count, 1e-3);
    float *expected = (float *)malloc(3 * count * sizeof(float)),
          *first = (float *)malloc(3 * count * sizeof(float)),
          *moved = (float *)malloc(3 * count * sizeof(float));
    Bench cpu;
    bench_open(&cpu, shapes, matrices, precision, moments, false);
    bench_run(&cpu, master, gradient, expected);
    bench_close(&cpu);
    for (int order = 0; order < ORDERS; order++) {
        Bench device;
        cuda_use_order(order);
        bench_open(&device, shapes, matrices, precision, moments, true);
        bench_run(&device, master, gradient, moved);
        bench_close(&device);
        char what[64];
        snprintf(what, sizeof what, "Muon in %s, %d matrices from %d x %d on", precision_name(precision),
                 matrices, shapes->rows, shapes->columns);
        check_close(what, moved, expected, 3 * count, precision == PRECISION_BF16 ? 3e-2 : 1e-4);
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

// mixed: also moments in another format than the products.
static void check_formats(const Shape *shapes, int matrices, bool mixed) {
    check_shapes(shapes, matrices, PRECISION_FP32, PRECISION_FP32);
    check_shapes(shapes, matrices, PRECISION_BF16, PRECISION_BF16);
    if (!mixed) { return; }
    check_shapes(shapes, matrices, PRECISION_FP32, PRECISION_BF16);
    check_shapes(shapes, matrices, PRECISION_BF16, PRECISION_FP32);
}

static void a_step_equals_the_cpus(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof SHAPES / sizeof SHAPES[0]; i++) { check_formats(&SHAPES[i], 1, false); }
}

static void steps_of_equal_matrices_equal_the_cpus(void **state) {
    (void)state;
    check_formats(SEVERAL, MATRICES, true);
}

// out (count): the first matrix of `shapes` after three steps, by the same numbers in every
// company.
static void step_first(const Shape *shapes, int matrices, float *out) {
    size_t count = elements_of(shapes, matrices), first = elements_of(shapes, 1);
    Random random = {5};
    float *gradient = host_normals(&random, count, 1e-3), *master = host_normals(&random, count, 0.5),
          *moved = (float *)malloc(3 * count * sizeof(float));
    for (size_t i = 0; i < count; i++) { master[i] = 0.25f; }
    Bench device;
    bench_open(&device, shapes, matrices, PRECISION_BF16, PRECISION_FP32, true);
    assert_int_equal(muon_most(&device.optimizer.muon, first), 4);
    bench_run(&device, master, gradient, moved);
    bench_close(&device);
    memcpy(out, moved + 2 * count, first * sizeof(float));
    free(gradient);
    free(master);
    free(moved);
}

static void a_matrix_has_the_same_bits_in_any_company(void **state) {
    (void)state;
    static const Shape FEWER[] = {{24, 40}, {48, 80}};
    float with_many[24 * 40], with_one[24 * 40];
    step_first(SEVERAL, MATRICES, with_many);
    step_first(FEWER, 2, with_one);
    assert_memory_equal(with_many, with_one, sizeof with_one);
}

// The sum has the bits of a loop over all partial sums, in their order.
static void partial_sums_are_added_in_order(void **state) {
    (void)state;
    Random random = {11};
    for (size_t count = 1; count < 1600; count += count < 4 ? 1 : 509) {
        double partials[1600], sum = 0;
        for (size_t i = 0; i < count; i++) {
            partials[i] = exp(8 * random_normal(&random));
            sum += partials[i];
        }
        for (int order = 0; order < ORDERS; order++) {
            double *device = (double *)device_from_host(partials, count * sizeof(double)), total;
            cuda_use_order(order);
            cuda_launch(cuda_test_stream(PRECISION_FP32), muon_total_kernel, dim3(1),
                        dim3(BUFFER_SQUARES_THREADS), BUFFER_SQUARES_THREADS * sizeof(double), device, count);
            device_to_host(&total, device, sizeof total);
            assert_memory_equal(&total, &sum, sizeof sum);
            CUDA_CHECK(cudaFree(device));
        }
    }
    cuda_use_order(0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(partial_sums_are_added_in_order),
                                       cmocka_unit_test(a_step_equals_the_cpus),
                                       cmocka_unit_test(steps_of_equal_matrices_equal_the_cpus),
                                       cmocka_unit_test(a_matrix_has_the_same_bits_in_any_company)};
    return cmocka_run_group_tests(tests, NULL, NULL) == 0 ? 0 : 1;
}
