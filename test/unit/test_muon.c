// test_muon.c: steps of Muon on single matrices, against torch.optim.Muon
// (test/reference/muon.safetensors, made by dev/reference/make_muon.py), and what every step
// promises: estimates leave the state as it was, threads do not change a bit, and what is
// orthogonal already stays so.
#include "test/harness.h"

#include "scheduler/optimizer.h"
#include "test/reference.h"

enum { STEPS = 3, MOST = 8192 };

static const int SHAPES[][2] = {{1, 1},   {1, 7},   {7, 1},   {3, 5},  {5, 3},
                                {16, 16}, {33, 32}, {17, 64}, {96, 24}};

enum { SHAPE_COUNT = sizeof SHAPES / sizeof SHAPES[0] };

typedef struct Bench {
    OptimizerTensor tensor;
    Optimizer optimizer;
    Arena arena;
    Stream stream; // only its pool is used
} Bench;

// The optimizer of one matrix.
static void bench_open(Bench *bench, int rows, int columns, int iterations, int threads,
                       Precision precision) {
    Layout whole = optimizer_whole((size_t)rows * (size_t)columns);
    OptimizerSettings settings = {.weight_decay = 0.1,
                                  .muon_momentum = 0.95,
                                  .muon_iterations = iterations,
                                  .tensors = &bench->tensor,
                                  .tensor_count = 1,
                                  .precision = precision};
    OptimizerTensor tensor = {0, whole.count, true, rows, columns};
    Error error = {""};
    memset(bench, 0, sizeof *bench);
    bench->tensor = tensor;
    bench->stream.precision = precision;
    bench->stream.pool = thread_pool_create(threads, false);
    optimizer_reserve(&bench->optimizer, &bench->arena, &settings, &whole, 0, false);
    assert_true(arena_commit(&bench->arena, &error));
}

static void bench_close(Bench *bench) {
    thread_pool_destroy(bench->stream.pool);
    arena_release(&bench->arena);
}

static void bench_step(Bench *bench, const float *gradient, double rate, float *out, bool commit) {
    OptimizerStep step = {
        .gradient = gradient, .out = out, .divisor = 1, .scale = 1, .learning_rate = rate, .keeps = commit};
    optimizer_step(&bench->optimizer, &bench->stream, &step);
}

static void expect_torch(const Tensors *tensors, int rows, int columns) {
    static const double rates[STEPS] = {0.02, 0.01, 0.03};
    size_t count = (size_t)rows * (size_t)columns, bytes = count * sizeof(float);
    float gradient[MOST], estimate[MOST], before[2 * MOST];
    Bench bench;
    char name[64];
    uint64_t seed = (uint64_t)tensors_number(tensors, "seed");
    assert_true(count <= MOST);
    bench_open(&bench, rows, columns, 5, 1, PRECISION_FP32);
    snprintf(name, sizeof name, "%dx%d.weight", rows, columns);
    reference_stream(name, seed, 0.5f, count, bench.optimizer.master);
    for (int step = 0; step < STEPS; step++) {
        snprintf(name, sizeof name, "%dx%d.gradient.%d", rows, columns, step);
        reference_stream(name, seed, 0x1p-10f, count, gradient);
        memcpy(before, bench.optimizer.master, bytes);
        memcpy(before + count, bench.optimizer.first_moment, bytes);
        bench_step(&bench, gradient, rates[step], estimate, false);
        assert_memory_equal(before, bench.optimizer.master, bytes);
        assert_memory_equal(before + count, bench.optimizer.first_moment, bytes);
        assert_int_equal(bench.optimizer.steps, step);
        bench_step(&bench, gradient, rates[step], NULL, true);
        assert_memory_equal(estimate, bench.optimizer.master, bytes);
        bench_step(&bench, gradient, 0, gradient, false); // an estimate may replace its gradient
        assert_memory_equal(gradient, bench.optimizer.master, bytes);
        snprintf(name, sizeof name, "%dx%d.after.%d", rows, columns, step);
        const float *expected = (const float *)tensors_get(tensors, name);
        for (size_t i = 0; i < count; i++) {
            assert_close(bench.optimizer.master[i], expected[i], 1e-6, name);
        }
    }
    bench_close(&bench);
}

static void a_step_equals_torchs(void **state) {
    (void)state;
    Tensors tensors = tensors_open("muon");
    for (int i = 0; i < SHAPE_COUNT; i++) { expect_torch(&tensors, SHAPES[i][0], SHAPES[i][1]); }
    tensors_close(&tensors);
}

static void threads_do_not_change_a_bit(void **state) {
    (void)state;
    enum { ROWS = 331, COLUMNS = 517 };
    static float gradient[ROWS * COLUMNS], outs[2][ROWS * COLUMNS];
    for (int precision = PRECISION_FP32; precision <= PRECISION_BF16; precision++) {
        for (int i = 0; i < 2; i++) {
            Bench bench;
            bench_open(&bench, ROWS, COLUMNS, 5, i == 0 ? 1 : 3, (Precision)precision);
            reference_stream("gradient", 1, 1e-4f, ROWS * COLUMNS, gradient);
            reference_stream("weight", 1, 1.0f, ROWS * COLUMNS, bench.optimizer.master);
            bench_step(&bench, gradient, 0.01, outs[i], true);
            bench_close(&bench);
        }
        assert_memory_equal(outs[0], outs[1], sizeof outs[0]);
    }
}

// The iterations take singular values to 0.7 .. 1.2 (Jordan's coefficients never settle), so the
// mean square of a step lies near that of an orthogonal matrix, at any scale of the gradient. In
// bf16 the same, with its rounding.
// Of a matrix with sides m <= n: A = X X', A A, and P X.
static void operations_are_those_of_three_products(void **state) {
    (void)state;
    for (int m = 1; m < 9; m += 3) {
        for (int n = m; n < 20; n += 5) {
            double products = 2.0 * m * m * n + 2.0 * m * m * m + 2.0 * m * m * n;
            assert_true(muon_flops(m, n, 5) == 5 * products && muon_flops(n, m, 1) == products);
        }
    }
}

static void a_step_is_as_long_for_any_gradient(void **state) {
    (void)state;
    enum { ROWS = 48, COLUMNS = 80, COUNT = ROWS * COLUMNS };
    static float gradient[COUNT], out[COUNT];
    static const float scales[] = {1e-12f, 1e-3f, 1e9f};
    for (int precision = PRECISION_FP32; precision <= PRECISION_BF16; precision++) {
        for (int i = 0; i < 3; i++) {
            Bench bench;
            double squares = 0;
            bench_open(&bench, ROWS, COLUMNS, 5, 1, (Precision)precision);
            reference_stream("gradient", 2, scales[i], COUNT, gradient);
            bench_step(&bench, gradient, 1, out, false);
            for (int j = 0; j < COUNT; j++) { squares += (double)out[j] * out[j]; }
            assert_close(sqrt(squares / COUNT) / 0.2, 0.95, i == 0 ? 1 : 0.25,
                         "root mean square of a step, over 0.2");
            bench_close(&bench);
        }
    }
}

// Without iterations a step goes along the momentum, divided by its norm. Two steps on a matrix of
// several blocks, the second with a divisor and a scale; copies in bf16 are those of the result.
static void a_large_matrix_moves_by_its_momentum_over_the_norm(void **state) {
    (void)state;
    enum { ROWS = 517, COLUMNS = 331, COUNT = ROWS * COLUMNS };
    static float gradient[COUNT], out[COUNT];
    static double theta[COUNT], momentum[COUNT], x[COUNT];
    static uint16_t casts[COUNT];
    Bench bench;
    bench_open(&bench, ROWS, COLUMNS, 0, 2, PRECISION_FP32);
    reference_stream("weight", 4, 1.0f, COUNT, bench.optimizer.master);
    for (int i = 0; i < COUNT; i++) { theta[i] = bench.optimizer.master[i]; }
    for (int t = 0; t < 2; t++) {
        double squares = 0, divisor = t == 0 ? 1 : 3, scale = t == 0 ? 1 : 0.5;
        OptimizerStep step = {.gradient = gradient,
                              .out = out,
                              .casts = (Real *)(void *)casts,
                              .divisor = divisor,
                              .scale = scale,
                              .learning_rate = 5,
                              .keeps = true};
        reference_stream(t == 0 ? "gradient" : "second", 4, 1.0f, COUNT, gradient);
        for (int i = 0; i < COUNT; i++) {
            double g = gradient[i] / divisor * scale;
            momentum[i] = 0.95 * momentum[i] + 0.05 * g;
            x[i] = 0.05 * g + 0.95 * momentum[i];
            squares += x[i] * x[i];
        }
        memset(casts, 0xff, sizeof casts);
        optimizer_step(&bench.optimizer, &bench.stream, &step);
        for (int i = 0; i < COUNT; i++) {
            theta[i] -= 5 * (0.2 * sqrt(ROWS) * x[i] / sqrt(squares) + 0.1 * theta[i]);
            assert_close(out[i], theta[i], 1e-6, "parameter");
            assert_true(out[i] == bench.optimizer.master[i] && casts[i] == bf16_from_float(out[i]));
        }
    }
    bench_close(&bench);
}

// Of a gradient of zeros there is no direction: only the decay moves the matrix.
static void a_gradient_of_zeros_leaves_the_decay(void **state) {
    (void)state;
    enum { ROWS = 3, COLUMNS = 5, COUNT = ROWS * COLUMNS };
    static const float gradient[COUNT];
    float before[COUNT];
    Bench bench;
    bench_open(&bench, ROWS, COLUMNS, 5, 1, PRECISION_FP32);
    reference_stream("weight", 5, 1.0f, COUNT, bench.optimizer.master);
    memcpy(before, bench.optimizer.master, sizeof before);
    bench_step(&bench, gradient, 0.5, NULL, true);
    for (int i = 0; i < COUNT; i++) {
        assert_close(bench.optimizer.master[i], 0.95 * before[i], 1e-7, "parameter");
    }
    bench_close(&bench);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_equals_torchs),
        cmocka_unit_test(threads_do_not_change_a_bit),
        cmocka_unit_test(operations_are_those_of_three_products),
        cmocka_unit_test(a_step_is_as_long_for_any_gradient),
        cmocka_unit_test(a_large_matrix_moves_by_its_momentum_over_the_norm),
        cmocka_unit_test(a_gradient_of_zeros_leaves_the_decay),
    };
    return cmocka_run_group_tests(tests, NULL, NULL) == 0 ? 0 : 1;
}
