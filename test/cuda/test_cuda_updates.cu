// test_cuda_updates.cu: the CUDA kernels that have no matrix product in them: loss,
// optimizer, whole buffers, outer steps, codecs of the wire.
//
// The oracles are the CPU's kernels on the same numbers. Codecs must give the same bytes;
// elsewhere a fused multiplication and addition may round once less. Outputs are filled
// with NaN beforehand, memory ends where an array ends, and every order of threads must
// give the same bits.

#include "test/cuda/cuda_kernels.h"

#include <float.h>

#include "kernels/kernels.h"

#ifdef ACCO_SIMT_H
#include "comm/nccl.h"
#include "test/harness.h"
#endif

static Random test_random;
static Stream cpu_stream;

// Device arrays that begin `offset` elements behind an aligned address; the memory ends
// where the array ends.
static float *device_floats(const float *host, size_t count, size_t offset) {
    float *device = (float *)device_new((count + offset) * sizeof(float)) + offset;
    CUDA_CHECK(cudaMemcpyAsync(device, host, count * sizeof(float), cudaMemcpyHostToDevice,
                               (cudaStream_t)cuda_test_stream(PRECISION_FP32)->queue));
    cuda_test_wait(cuda_test_stream(PRECISION_FP32));
    return device;
}

static void host_floats(float *host, const float *device, size_t count) {
    device_to_host(host, device, count * sizeof(float));
}

static float *host_copy(const float *values, size_t count) {
    float *copy = (float *)malloc(count * sizeof(float));
    memcpy(copy, values, count * sizeof(float));
    return copy;
}

// The first order's output is what the others must repeat.
static void check_repeats(const char *what, void *first, const void *now, size_t bytes, int order) {
    if (order == 0) { memcpy(first, now, bytes); }
    if (memcmp(first, now, bytes) != 0) { fail_msg("%s: another order of threads gives other bits", what); }
}

// Compares bits, but any NaN equals any other.
static void check_same(const char *what, const float *got, const float *expected, size_t count) {
    for (size_t i = 0; i < count; i++) {
        bool same =
            isnan(expected[i]) ? isnan(got[i]) : wire_float_bits(got[i]) == wire_float_bits(expected[i]);
        if (!same) {
            fail_msg("%s: element %zu of %zu is %a, expected %a", what, i, count, (double)got[i],
                     (double)expected[i]);
        }
    }
}

// ---- Cross entropy --------------------------------------------------------------------

typedef struct LossCase {
    int rows, V, stride, offset; // offset: of the first logit, in elements
    float gradient_scale;
} LossCase;

// The last three have rows that are not whole packs.
static const LossCase LOSS_CASES[] = {{5, 97, 104, 0, 0.125f},
                                      {3, 1031, 1032, 0, 1.0f},
                                      {7, 1031, 1048, 0, 0.0f},
                                      {2, 8, 8, 0, 3.0f},
                                      {3, 1, 8, 0, 1.0f},
                                      {1, 6200, 6208, 0, 0.01f},
                                      {cuda_small_shapes() ? 2 : 1031, cuda_small_shapes() ? 12301 : 50257,
                                       cuda_small_shapes() ? 12304 : 50264, 0, 1e-3f},
                                      {5, 97, 97, 0, 0.125f},
                                      {3, 1031, 1033, 0, 1.0f},
                                      {2, 3200, 3200, 1, 0.5f}};
// Negative where a row does not count.
static int32_t *loss_targets(int rows, int V) {
    int32_t *targets = (int32_t *)malloc((size_t)rows * sizeof *targets);
    for (int row = 0; row < rows; row++) {
        targets[row] = row % 3 == 1 ? -1 - row : (int32_t)(random_bits(&test_random) % (uint64_t)V);
    }
    targets[rows - 1] = rows > 2 ? V - 1 : 0;
    return targets;
}

// (rows, V); some are large.
static float *loss_logits(int rows, int V, Precision precision) {
    size_t count = (size_t)rows * (size_t)V;
    float *logits = host_normals(&test_random, count, 3.0);
    for (size_t i = 0; i < count; i += 1 + random_bits(&test_random) % 50) {
        logits[i] = random_bits(&test_random) & 1 ? 80.0f : -80.0f;
    }
    host_round(logits, count, precision);
    return logits;
}

// logits (rows, V) in and out, through a device array whose padding is NaN before and
// must be 0 after, if there are gradients.
static void loss_run(const LossCase *c, Precision precision, float *logits, float *losses,
                     const int32_t *targets) {
    size_t V = (size_t)c->V, stride = (size_t)c->stride, count = (size_t)c->rows * stride,
           offset = (size_t)c->offset;
    float *spaced = (float *)malloc((count + offset) * sizeof(float));
    for (size_t i = 0; i < count + offset; i++) { spaced[i] = NAN; }
    for (int row = 0; row < c->rows; row++) {
        memcpy(spaced + offset + (size_t)row * stride, logits + (size_t)row * V, V * sizeof(float));
    }
    Real *device = device_reals(spaced, count + offset, precision);
    float *device_losses = (float *)device_new((size_t)c->rows * sizeof(float));
    int32_t *device_targets = (int32_t *)device_from_host(targets, (size_t)c->rows * sizeof *targets);
    Stream *stream = cuda_test_stream(precision);
    cross_entropy(stream, real_at(device, offset, precision), c->stride, device_losses, device_targets,
                  c->rows, c->V, c->gradient_scale);
    cuda_test_wait(stream);
    host_reals(spaced, device, count + offset, precision);
    host_floats(losses, device_losses, (size_t)c->rows);
    for (int row = 0; row < c->rows; row++) {
        const float *mine = spaced + offset + (size_t)row * stride;
        memcpy(logits + (size_t)row * V, mine, V * sizeof(float));
        for (size_t i = V; i < stride && c->gradient_scale != 0.0f; i++) { assert_true(mine[i] == 0.0f); }
    }
    CUDA_CHECK(cudaFree(device));
    CUDA_CHECK(cudaFree(device_losses));
    CUDA_CHECK(cudaFree(device_targets));
    free(spaced);
}

static void loss_check(const LossCase *c, Precision precision) {
    size_t rows = (size_t)c->rows, V = (size_t)c->V;
    float *logits = loss_logits(c->rows, c->V, precision), *expected = host_copy(logits, rows * V),
          *first = host_copy(logits, rows * V);
    float *losses = (float *)malloc(rows * sizeof(float)),
          *expected_losses = (float *)malloc(rows * sizeof(float));
    int32_t *targets = loss_targets(c->rows, c->V);
    cross_entropy(&cpu_stream, as_reals(expected), c->V, expected_losses, targets, c->rows, c->V,
                  c->gradient_scale);
    for (int order = 0; order < SIMT_ORDERS; order++) {
        float *got = host_copy(logits, rows * V);
        cuda_use_order(order);
        loss_run(c, precision, got, losses, targets);
        check_repeats("gradients", first, got, rows * V * sizeof(float), order);
        free(got);
        Worst worst = {};
        for (size_t row = 0; row < rows; row++) {
            double value = (double)expected_losses[row];
            worst_add(&worst, row, (double)losses[row], value, 4e-6 * fmax(1, fabs(value)));
        }
        check_worst("losses", worst);
        for (size_t row = 0; row < rows; row++) {
            if (c->gradient_scale == 0.0f) { continue; }
            double bound =
                precision == PRECISION_FP32 ? 4e-6 : 4e-3; // 2^-8 is half of the last place of a bf16
            // At the target p - 1 may cancel. The roundings of a p near 1 and of its sum remain.
            double size = 0.06 * fabs((double)c->gradient_scale) / sqrt((double)V);
            check_close_terms("gradient of a row", first + row * V, expected + row * V, V, size, bound);
        }
    }
    free(logits);
    free(expected);
    free(first);
    free(losses);
    free(expected_losses);
    free(targets);
}

static void cross_entropy_equals_the_cpu(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof LOSS_CASES / sizeof LOSS_CASES[0]; i++) {
        loss_check(&LOSS_CASES[i], PRECISION_FP32);
        loss_check(&LOSS_CASES[i], PRECISION_BF16);
    }
}

// Rows: a NaN; +infinity; mostly -infinity; only -infinity; ordinary. What is not finite
// reaches its own row and no other.
static void cross_entropy_shows_what_is_not_finite(void **state) {
    (void)state;
    enum { ROWS = 5, V = 1031 };
    const LossCase shape = {ROWS, V, 1032, 0, 0.5f};
    const int32_t targets[ROWS] = {0, 1, 2, 3, 4};
    for (int precision = 0; precision < 2; precision++) {
        for (int order = 0; order < SIMT_ORDERS; order++) {
            float *logits = loss_logits(ROWS, V, (Precision)precision), losses[ROWS], expected_losses[ROWS];
            logits[V - 1] = NAN;
            logits[V + 700] = INFINITY;
            for (int v = 3; v < V; v++) { logits[2 * V + v] = -INFINITY; }
            for (int v = 0; v < V; v++) { logits[3 * V + v] = -INFINITY; }
            float *expected = host_copy(logits, ROWS * V);
            cross_entropy(&cpu_stream, as_reals(expected), V, expected_losses, targets, ROWS, V,
                          shape.gradient_scale);
            cuda_use_order(order);
            loss_run(&shape, (Precision)precision, logits, losses, targets);
            for (int row = 0; row < ROWS; row++) {
                bool finite = row == 2 || row == 4;
                assert_true(isnan(losses[row]) == !finite && isnan(expected_losses[row]) == !finite);
                if (!finite) { assert_true(isnan(logits[row * V + row]) && isnan(expected[row * V + row])); }
                if (finite) {
                    check_close("a row beside NaNs", logits + row * V, expected + row * V, V, 4e-3);
                }
            }
            free(expected);
            free(logits);
        }
    }
}

// ---- AdamW ----------------------------------------------------------------------------

enum AdamWOut { OUT_APART, OUT_GRADIENT, OUT_MASTER, OUT_COUNT };

typedef struct AdamWArrays {
    float *values[5]; // out, master, first and second moment, gradient; out may be one of the others
} AdamWArrays;

static const size_t ELEMENT_COUNTS[] = {
    1, 3, 4, 5, 255, 1023, 1024, 1025, 5003, (size_t)(cuda_small_shapes() ? 9000 : 7000003)};

enum { ELEMENT_COUNT_COUNT = sizeof ELEMENT_COUNTS / sizeof ELEMENT_COUNTS[0] };

static StepRange adamw_range(const AdamWArrays *arrays, size_t count, bool commit) {
    StepRange range;
    memset(&range, 0, sizeof range);
    range.out = arrays->values[0];
    range.master = arrays->values[1];
    range.first_moment = as_reals(arrays->values[2]);
    range.second_moment = as_reals(arrays->values[3]);
    range.gradient = arrays->values[4];
    range.count = count;
    range.step = adamw_step(0.9, 0.95, 7, 1e-8, 6e-4, 0.1);
    range.step.divisor = 3.0f;
    range.step.scale = 0.37f;
    range.keeps = commit;
    return range;
}

static const double ADAMW_SIZE = 0.02; // the standard deviation of what a step starts from

// The five arrays, one behind the other; the second moment is no less than 0.
static float *adamw_start(size_t count) {
    float *start = host_normals(&test_random, 5 * count, ADAMW_SIZE);
    for (size_t i = 3 * count; i < 4 * count; i++) { start[i] *= start[i]; }
    return start;
}

static void adamw_alias(AdamWArrays *arrays, int out) {
    if (out == OUT_GRADIENT) { arrays->values[0] = arrays->values[4]; }
    if (out == OUT_MASTER) { arrays->values[0] = arrays->values[1]; }
}

// A step on the device. Its casts, which begin at element `odd`, must have the bits of casts that
// are made after it.
static void adamw_with_casts(StepRange *range, size_t odd) {
    size_t bytes = range->count * sizeof(uint16_t);
    char *host = (char *)malloc(2 * bytes);
    uint16_t *casts = (uint16_t *)device_new(bytes + odd * sizeof *casts),
             *after = (uint16_t *)device_new(bytes);
    range->casts = (Real *)(void *)(casts + odd);
    adamw(cuda_test_stream(PRECISION_FP32), range);
    reals_from_floats(cuda_test_stream(PRECISION_BF16), (Real *)(void *)after, range->out, range->count);
    cuda_test_wait(cuda_test_stream(PRECISION_BF16));
    device_to_host(host, casts + odd, bytes);
    device_to_host(host + bytes, after, bytes);
    assert_memory_equal(host, host + bytes, bytes);
    CUDA_CHECK(cudaFree(casts));
    CUDA_CHECK(cudaFree(after));
    free(host);
}

// Arrays `got` (5, count) <- the start values (5, count) after a step on the device. offset: of the
// arrays, and of the casts behind them, the one that is not aligned.
static void adamw_run(float *got, const float *start, size_t count, int out, bool commit, size_t offset) {
    AdamWArrays arrays, apart;
    for (size_t i = 0; i < 5; i++) {
        arrays.values[i] = device_floats(start + i * count, count, i == offset ? 1 : 0);
    }
    apart = arrays;
    adamw_alias(&arrays, out);
    StepRange range = adamw_range(&arrays, count, commit);
    adamw_with_casts(&range, offset == 5 ? 1 : 0);
    for (size_t i = 0; i < 5; i++) {
        host_floats(got + i * count, arrays.values[i], count);
        CUDA_CHECK(cudaFree(apart.values[i] - (i == offset ? 1 : 0)));
    }
}

static void adamw_check(size_t count, int out, bool commit) {
    float *start = adamw_start(count), *expected = host_copy(start, 5 * count);
    float *first = host_copy(start, 5 * count), *got = host_copy(start, 5 * count);
    AdamWArrays arrays;
    for (size_t i = 0; i < 5; i++) { arrays.values[i] = expected + i * count; }
    adamw_alias(&arrays, out);
    StepRange range = adamw_range(&arrays, count, commit);
    cpu_adamw(&cpu_stream, &range);
    for (int order = 0; order < SIMT_ORDERS; order++) {
        cuda_use_order(order);
        for (size_t offset = 0; offset <= 6; offset++) { // 6: all arrays are aligned
            adamw_run(got, start, count, out, commit, offset);
            check_repeats("optimizer step", first, got, 5 * count * sizeof(float), offset > 0 || order > 0);
        }
        const char *const names[5] = {"out", "master", "first moment", "second moment", "gradient"};
        for (size_t i = 0; i < 5; i++) { // the terms of a second moment cannot cancel, and a gradient stays
            double size = i == 3 || (i == 4 && out != OUT_GRADIENT) ? 0 : ADAMW_SIZE;
            check_close_terms(names[i], got + i * count, arrays.values[i], count, size, 1e-6);
        }
    }
    free(start);
    free(expected);
    free(first);
    free(got);
}

static void adamw_equals_the_cpu(void **state) {
    (void)state;
    for (int i = 0; i < ELEMENT_COUNT_COUNT; i++) {
        for (int out = 0; out < OUT_COUNT; out++) {
            adamw_check(ELEMENT_COUNTS[i], out, true);
            if (out != OUT_MASTER) { adamw_check(ELEMENT_COUNTS[i], out, false); }
        }
    }
}

// An estimate equals the commit that would follow, and moves nothing. A NaN in a gradient
// reaches parameter and moments.
static void adamw_estimates_what_it_would_commit(void **state) {
    (void)state;
    enum { COUNT = 1027 };
    float *start = adamw_start(COUNT), *estimate = host_copy(start, 5 * COUNT),
          *commit = host_copy(start, 5 * COUNT);
    start[4 * COUNT + 1026] = NAN;
    adamw_run(estimate, start, COUNT, OUT_APART, false, 6);
    adamw_run(commit, start, COUNT, OUT_APART, true, 6);
    assert_memory_equal(estimate, commit, COUNT * sizeof(float));
    assert_memory_equal(commit, commit + COUNT, COUNT * sizeof(float));
    assert_memory_equal(estimate + COUNT, start + COUNT, 4 * COUNT * sizeof(float));
    assert_true(isnan(commit[1026]) && isnan(commit[2 * COUNT + 1026]) && isnan(commit[3 * COUNT + 1026]) &&
                !isnan(commit[1025]));
    free(start);
    free(estimate);
    free(commit);
}

// With betas of 1/2, gradients of few bits and no division, every operation but the last
// addition is exact, fused or not: a GPU must have the CPU's bits before they are rounded.
// The result goes apart from the master copy, over the gradient, where `flat` is odd.
static StepRange half_range(float *master, float *gradient, void *first, void *second, size_t count,
                            size_t flat) {
    StepRange range;
    memset(&range, 0, sizeof range);
    range.master = master;
    range.out = flat % 2 == 1 ? gradient : master;
    range.first_moment = (Real *)first;
    range.second_moment = (Real *)second;
    range.gradient = gradient;
    range.count = count;
    range.flat = flat;
    range.moments = PRECISION_BF16;
    range.key = moment_key(5, 1000);
    range.step = adamw_step(0.5, 0.5, 3, 1e-8, 6e-4, 0.1);
    range.keeps = true;
    return range;
}

// odd: the moments begin at an odd element, so that none can be read in one access.
static void half_moments_check(size_t count, size_t flat, size_t odd) {
    float *master = (float *)calloc(3 * count, sizeof(float)), *gradient = master + count,
          *got = gradient + count;
    uint16_t *expected[2], *device[2], *halves = (uint16_t *)malloc((count + odd) * sizeof *halves);
    for (size_t i = 0; i < count; i++) {
        master[i] = (float)random_normal(&test_random);
        gradient[i] = (float)((int)(random_bits(&test_random) % 2001) - 1000) / 64.0f;
    }
    float *device_master = device_floats(master, count, 0),
          *device_gradient = device_floats(gradient, count, 0);
    for (int moment = 0; moment < 2; moment++) {
        expected[moment] = (uint16_t *)calloc(count + odd, sizeof *halves);
        for (size_t i = 0; i < count; i++) {
            float value = (float)random_normal(&test_random);
            expected[moment][odd + i] = host_bf16(moment == 0 ? value : value * value);
        }
        device[moment] = (uint16_t *)device_from_host(expected[moment], (count + odd) * sizeof *halves);
    }
    StepRange on_cpu = half_range(master, gradient, expected[0] + odd, expected[1] + odd, count, flat);
    StepRange on_gpu =
        half_range(device_master, device_gradient, device[0] + odd, device[1] + odd, count, flat);
    cpu_adamw(&cpu_stream, &on_cpu);
    adamw_with_casts(&on_gpu, odd);
    for (int moment = 0; moment < 2; moment++) {
        device_to_host(halves, device[moment], (count + odd) * sizeof *halves);
        assert_memory_equal(halves, expected[moment], (count + odd) * sizeof *halves);
        CUDA_CHECK(cudaFree(device[moment]));
        free(expected[moment]);
    }
    host_floats(got, device_master, count);
    check_close("parameters", got, master, count, 1e-6);
    host_floats(got, on_gpu.out, count);
    check_close("results", got, on_cpu.out, count, 1e-6);
    CUDA_CHECK(cudaFree(device_master));
    CUDA_CHECK(cudaFree(device_gradient));
    free(halves);
    free(master);
}

static void moments_in_bf16_have_the_bits_of_the_cpu(void **state) {
    (void)state;
    static const size_t flats[] = {0, 5, ((size_t)1 << 32) - 3};
    for (int order = 0; order < SIMT_ORDERS; order++) {
        cuda_use_order(order);
        for (int i = 0; i < ELEMENT_COUNT_COUNT; i++) {
            half_moments_check(ELEMENT_COUNTS[i], flats[i % 3], (size_t)(i + order) % 2);
            half_moments_check(ELEMENT_COUNTS[i], flats[(i + 1) % 3], (size_t)(i + order + 1) % 2);
        }
    }
}

// ---- Buffers --------------------------------------------------------------------------

static void squares_check(size_t count, size_t offset) {
    size_t blocks = buffer_blocks(count);
    float *host = host_normals(&test_random, count, 3.0), *values = device_floats(host, count, offset);
    double *expected = (double *)malloc(blocks * sizeof(double)),
           *got = (double *)malloc(blocks * sizeof(double));
    double *first = (double *)malloc(blocks * sizeof(double)),
           *partials = (double *)device_new(blocks * sizeof(double));
    for (int order = 0; order < SIMT_ORDERS; order++) {
        cuda_use_order(order);
        cuda_buffer_sums_of_squares(cuda_test_stream(PRECISION_FP32), partials, values, count, count, 1);
        cuda_test_wait(cuda_test_stream(PRECISION_FP32));
        device_to_host(got, partials, blocks * sizeof(double));
        check_repeats("sums of squares", first, got, blocks * sizeof(double), order);
    }
    cpu_buffer_sum_of_squares(&cpu_stream, host, count, expected);
    Worst worst = {};
    for (size_t i = 0; i < blocks; i++) { worst_add(&worst, i, got[i], expected[i], 1e-12 * expected[i]); }
    check_worst("sums of squares", worst);
    CUDA_CHECK(cudaFree(values - offset));
    CUDA_CHECK(cudaFree(partials));
    free(host);
    free(expected);
    free(got);
    free(first);
}

static void sums_of_squares_equal_the_cpu(void **state) {
    (void)state;
    const size_t counts[] = {
        1, 2047, 2050, BUFFER_BLOCK - 1, BUFFER_BLOCK, BUFFER_BLOCK + 1, 2 * BUFFER_BLOCK + 4099};
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        squares_check(counts[i], 0);
        squares_check(counts[i], 3);
    }
    if (!cuda_small_shapes()) { squares_check(38597377, 0); }
}

static void convert_check(const float *host, const float *rounded, size_t count, size_t offset,
                          Precision precision) {
    Real *out = (Real *)device_new((count + offset) * precision_bytes(precision)),
         *begin = real_at(out, offset, precision);
    float *in = device_floats(host, count, offset), *got = host_copy(host, count);
    reals_from_floats(cuda_test_stream(precision), begin, in, count);
    cuda_test_wait(cuda_test_stream(precision));
    host_reals(got, begin, count, precision);
    check_same("conversion", got, precision == PRECISION_FP32 ? host : rounded, count);
    cuda_buffer_round(cuda_test_stream(precision), in, count);
    cuda_test_wait(cuda_test_stream(precision));
    host_floats(got, in, count);
    check_same("rounding", got, rounded, count);
    CUDA_CHECK(cudaFree(in - offset));
    CUDA_CHECK(cudaFree(out));
    free(got);
}

// Ties to both sides, a NaN, numbers that round to infinity, the smallest number.
static void conversions_round_to_nearest_even(void **state) {
    (void)state;
    const float special[3] = {NAN, FLT_MAX, 0x1p-149f};
    for (int i = 0; i < ELEMENT_COUNT_COUNT; i++) {
        size_t count = ELEMENT_COUNTS[i];
        float *host = host_normals(&test_random, count, 1.0), *rounded = host_copy(host, count);
        host[0] = 0x1.01p0f;
        host[count / 2] = -0x1.03p0f;
        host[count - 1] = special[i % 3];
        for (size_t j = 0; j < count; j++) { rounded[j] = bf16_to_float(bf16_from_float(host[j])); }
        for (int run = 0; run < 4 * SIMT_ORDERS; run++) {
            cuda_use_order(run / 4);
            convert_check(host, rounded, count, (size_t)(run % 2), (Precision)(run / 2 % 2));
        }
        free(host);
        free(rounded);
    }
}

// ---- Outer steps ----------------------------------------------------------------------

enum OuterKind {
    OUTER_DELTA,
    OUTER_NESTEROV,
    OUTER_NESTEROV_MERGED,
    OUTER_CO2_FIRST,
    OUTER_CO2,
    OUTER_CO2_CLIPPED,
    OUTER_CO2_EAGER,
    OUTER_KINDS
};

enum { OUTER_ARRAYS = 5 };

// On arrays (OUTER_ARRAYS, count): outer or base, momentum, local, sum or exchange, start.
static void outer_run(bool on_device, int kind, float *const arrays[OUTER_ARRAYS], size_t count) {
    NesterovStep step = {.inverse_weight = 1.0f / 3,
                         .learning_rate = 0.7f,
                         .momentum = 0.9f,
                         .alpha = kind == OUTER_NESTEROV_MERGED ? 0.25f : 0.0f};
    MomentumStep co2 = {.inverse_weight = 1.0f / 3,
                        .weight = 0.75f,
                        .own_share = kind == OUTER_CO2_EAGER ? 1.0f / 3 : 0,
                        .beta = 0.8f,
                        .alpha = 0.6f,
                        .phi = kind == OUTER_CO2_CLIPPED ? 0.05f : 0.0f,
                        .gap = 1.7f,
                        .received = kind != OUTER_CO2_FIRST};
    Stream *stream = cuda_test_stream(PRECISION_FP32);
    OuterRange range = {arrays[0], arrays[1], arrays[2], arrays[3], arrays[0], count};
    if (kind == OUTER_CO2_EAGER) { range.start = arrays[4]; }
    if (kind == OUTER_DELTA && on_device) {
        cuda_outer_pseudo_gradient(stream, &range, 0.75f);
    } else if (kind == OUTER_DELTA) {
        cpu_outer_pseudo_gradient(&range, 0.75f);
    } else if (kind < OUTER_CO2_FIRST && on_device) {
        cuda_outer_nesterov(stream, &range, &step);
    } else if (kind < OUTER_CO2_FIRST) {
        cpu_outer_nesterov(&range, &step);
    } else if (on_device) {
        cuda_outer_momentum(stream, &range, &co2);
    } else {
        cpu_outer_momentum(&range, &co2);
    }
}

static void outer_check(int kind, size_t count) {
    float *start = host_normals(&test_random, OUTER_ARRAYS * count, 0.1), *expected, *first, *got;
    start[count + count / 3] = NAN; // a momentum
    expected = host_copy(start, OUTER_ARRAYS * count);
    first = host_copy(start, OUTER_ARRAYS * count);
    got = host_copy(start, OUTER_ARRAYS * count);
    float *arrays[OUTER_ARRAYS];
    for (size_t i = 0; i < OUTER_ARRAYS; i++) { arrays[i] = expected + i * count; }
    outer_run(false, kind, arrays, count);
    for (int run = 0; run < (OUTER_ARRAYS + 1) * SIMT_ORDERS; run++) {
        size_t odd = (size_t)(run % (OUTER_ARRAYS + 1)); // the array that is not aligned; the last: all are
        for (size_t i = 0; i < OUTER_ARRAYS; i++) {
            arrays[i] = device_floats(start + i * count, count, i == odd ? 3 : 0);
        }
        cuda_use_order(run / (OUTER_ARRAYS + 1));
        outer_run(true, kind, arrays, count);
        cuda_test_wait(cuda_test_stream(PRECISION_FP32));
        for (size_t i = 0; i < OUTER_ARRAYS; i++) {
            host_floats(got + i * count, arrays[i], count);
            CUDA_CHECK(cudaFree(arrays[i] - (i == odd ? 3 : 0)));
        }
        check_repeats("outer step", first, got, OUTER_ARRAYS * count * sizeof(float), run);
    }
    Worst worst = {};
    for (size_t i = 0; i < OUTER_ARRAYS * count; i++) {
        double value = (double)expected[i];
        if (isnan(value) && isnan(got[i])) { continue; }
        worst_add(&worst, i, (double)got[i], value, 1e-7 + 1e-6 * fabs(value));
    }
    char what[32];
    snprintf(what, sizeof what, "outer step of kind %d", kind);
    check_worst(what, worst);
    free(start);
    free(expected);
    free(first);
    free(got);
}

static void outer_steps_equal_the_cpu(void **state) {
    (void)state;
    for (int kind = 0; kind < OUTER_KINDS; kind++) {
        for (int i = 0; i < ELEMENT_COUNT_COUNT; i++) { outer_check(kind, ELEMENT_COUNTS[i]); }
    }
}

// ---- The steps of SparseLoCo, with the bits of the CPU --------------------------------

enum { SPARSE_COUNTS = 9, SPARSE_RANKS = 7 };

static const size_t SPARSE_SIZES[SPARSE_COUNTS] = {1, 3, 63, 64, 65, 4095, 4096, 4097, 2 * 4096 + 700};

// many: normal numbers; otherwise few different ones, so that most have equals.
static float *sparse_inputs(size_t count, bool many) {
    float *values = host_normals(&test_random, count, 0.1);
    for (size_t i = 0; i < count && !many; i++) { values[i] = floorf(20 * values[i]) / 8; }
    return values;
}

static void sparse_check_encode(size_t count, bool many, bool bad) {
    float *error = sparse_inputs(count, many), *outer = sparse_inputs(count, many),
          *local = sparse_inputs(count, many), *got = host_copy(error, count), *expected;
    size_t bytes = sparse_blocks(count) * sizeof(SparseBlock);
    SparseBlock *blocks = (SparseBlock *)malloc(bytes), *first = (SparseBlock *)malloc(bytes),
                *found = (SparseBlock *)malloc(bytes);
    if (bad) { local[count / 2] = INFINITY; }
    expected = host_copy(error, count);
    OuterRange range = {.outer = outer, .local = local, .exchange = expected, .count = count};
    cpu_sparse_encode(&range, blocks, 0.95f);
    for (int order = 0; order < SIMT_ORDERS; order++) {
        Stream *stream = cuda_test_stream(PRECISION_FP32);
        SparseBlock *there = (SparseBlock *)device_new(bytes);
        float *on_device[] = {device_floats(error, count, 0), device_floats(outer, count, 1),
                              device_floats(local, count, 3)};
        cuda_use_order(order);
        OuterRange range_there = {
            .outer = on_device[1], .local = on_device[2], .exchange = on_device[0], .count = count};
        cuda_sparse_encode(stream, &range_there, there, 0.95f);
        cuda_test_wait(stream);
        device_to_host(found, there, bytes);
        host_floats(got, on_device[0], count);
        check_repeats("sparse blocks", first, found, bytes, order);
        if (memcmp(found, blocks, bytes) != 0 && !bad) { fail_msg("%zu elements: other blocks", count); }
        check_same("error", got, expected, count);
        for (int i = 0; i < 3; i++) { CUDA_CHECK(cudaFree(on_device[i] - (i == 0 ? 0 : 2 * i - 1))); }
        CUDA_CHECK(cudaFree(there));
    }
    free(error), free(outer), free(local), free(got), free(expected);
    free(blocks), free(first), free(found);
}

static void sparse_errors_have_the_bits_of_the_cpu(void **state) {
    (void)state;
    for (int i = 0; i < SPARSE_COUNTS; i++) {
        for (int many = 0; many < 2; many++) { sparse_check_encode(SPARSE_SIZES[i], many != 0, false); }
        sparse_check_encode(SPARSE_SIZES[i], true, true);
    }
}

static void sparse_check_apply(size_t count, bool keeps, bool eager) {
    float weights[SPARSE_RANKS], total = 0;
    for (int rank = 0; rank < SPARSE_RANKS; rank++) { total += weights[rank] = 1 / (1 + 0.3f * (float)rank); }
    SparseStep step = {.ranks = SPARSE_RANKS, .alpha = 0.7f, .total = total, .weights = weights};
    size_t bytes = sparse_blocks(count) * sizeof(SparseBlock), stride = sparse_blocks(count);
    float *outer = sparse_inputs(count, true), *local = sparse_inputs(count, true),
          *sent = sparse_inputs(count, true), *unsent = sparse_inputs(count, true),
          *zeros = (float *)calloc(count, sizeof(float)), *got = host_copy(outer, count),
          *moved = host_copy(outer, count), *moved_local = host_copy(local, count);
    SparseBlock *blocks = (SparseBlock *)malloc(SPARSE_RANKS * bytes);
    for (size_t rank = 0; rank < SPARSE_RANKS; rank++) {
        float *error = sparse_inputs(count, true);
        OuterRange range = {.outer = zeros, .local = zeros, .exchange = error, .count = count};
        cpu_sparse_encode(&range, blocks + rank * stride, 1.0f);
        free(error);
    }
    OuterRange range = {moved, NULL, moved_local, eager ? unsent : NULL, keeps ? sent : NULL, count};
    cpu_sparse_apply(&range, blocks, stride, &step);
    for (int order = 0; order < SIMT_ORDERS; order++) {
        Stream *stream = cuda_test_stream(PRECISION_FP32);
        SparseBlock *there = (SparseBlock *)device_new(SPARSE_RANKS * bytes);
        CUDA_CHECK(cudaMemcpyAsync(there, blocks, SPARSE_RANKS * bytes, cudaMemcpyHostToDevice,
                                   (cudaStream_t)stream->queue));
        float *on_device[] = {device_floats(outer, count, 0), device_floats(local, count, 0),
                              device_floats(sent, count, 0), device_floats(unsent, count, 0)};
        SparseStep step_there = step;
        step_there.weights = device_floats(weights, SPARSE_RANKS, 0);
        cuda_use_order(order);
        OuterRange range_there = {
            on_device[0], NULL, on_device[1], eager ? on_device[3] : NULL, keeps ? on_device[2] : NULL,
            count};
        cuda_sparse_apply(stream, &range_there, there, stride, &step_there);
        cuda_test_wait(stream);
        host_floats(got, on_device[0], count);
        check_same("outer", got, moved, count);
        host_floats(got, on_device[1], count);
        check_same("local", got, moved_local, count);
        for (int i = 0; i < 4; i++) { CUDA_CHECK(cudaFree(on_device[i])); }
        CUDA_CHECK(cudaFree(there));
        CUDA_CHECK(cudaFree((void *)step_there.weights));
    }
    free(outer), free(local), free(sent), free(unsent), free(zeros), free(got), free(moved);
    free(moved_local), free(blocks);
}

static void sparse_outer_steps_have_the_bits_of_the_cpu(void **state) {
    (void)state;
    for (int i = 0; i < SPARSE_COUNTS; i++) {
        for (int form = 0; form < 4; form++) {
            sparse_check_apply(SPARSE_SIZES[i], form % 2 != 0, form / 2 != 0);
        }
    }
}

// ---- Wire formats ---------------------------------------------------------------------

static const size_t WIRE_COUNTS[] = {1,   2,   3,   5,   7,   8,   31,  33,   127,  128, 129,
                                     130, 254, 255, 256, 257, 263, 385, 2047, 2049, 4099};

enum { WIRE_COUNT_COUNT = sizeof WIRE_COUNTS / sizeof WIRE_COUNTS[0], WIRE_RANKS = 3 };

typedef enum Family {
    FAMILY_NORMAL,   // as gradients are
    FAMILY_WIDE,     // 40 octaves in one block
    FAMILY_WHOLE,    // halves of whole numbers: many ties
    FAMILY_DENORMAL, // up to where the smallest normal numbers are
    FAMILY_HUGE,     // up to the largest number
    FAMILY_ZERO,     // both zeros
    FAMILY_BITS,     // any number
    FAMILY_SPECIAL,  // as gradients are, but for a NaN or an infinity here and there
    FAMILY_COUNT
} Family;

static float wire_draw(Family family) {
    double sign = random_bits(&test_random) & 1 ? 1 : -1, uniform = random_uniform(&test_random),
           normal = random_normal(&test_random);
    switch (family) {
    case FAMILY_WIDE: return (float)(sign * exp2(-40 * uniform));
    case FAMILY_WHOLE: return (float)(sign * floor(255 * uniform) / 2);
    case FAMILY_DENORMAL: return (float)(sign * exp2(-149 + 32 * uniform));
    case FAMILY_HUGE: return uniform < 0.01 ? (float)(sign * FLT_MAX) : (float)(sign * FLT_MAX * uniform);
    case FAMILY_ZERO: return sign < 0 ? -0.0f : 0.0f;
    case FAMILY_BITS: return wire_float_from_bits((uint32_t)random_bits(&test_random));
    case FAMILY_SPECIAL:
        return uniform < 0.0005  ? (float)NAN
               : uniform < 0.001 ? (float)(sign * INFINITY)
                                 : (float)(1e-3 * normal);
    default: return (float)(1e-3 * normal);
    }
}

typedef struct WireCase {
    WireFormat format;
    size_t count, offset; // offset: of floats and of encoded words behind aligned addresses
    size_t bytes;         // of a run
    float *values, *base; // (count)
} WireCase;

static void check_bytes(const char *what, const WireCase *c, const void *got, const void *expected,
                        size_t bytes) {
    if (memcmp(got, expected, bytes) != 0) {
        fail_msg("%s: %zu elements are %s otherwise", wire_name(c->format), c->count, what);
    }
}

// The kernel must write what the CPU writes, every byte. With a base the NaNs of a
// difference may have other bits; then the decoded values are compared.
static void wire_check_encode(const WireCase *c, const float *base, const float *sent, void *encoded) {
    Stream *stream = cuda_test_stream(PRECISION_FP32);
    float *values = device_floats(c->values, c->count, c->offset),
          *device_base = device_floats(c->base, c->count, c->offset);
    char *out = (char *)device_new(c->bytes + 4 * c->offset), *expected = (char *)malloc(c->bytes);
    WirePieces run = wire_range(c->format, c->count);
    cuda_wire_encode(stream, c->format, out + 4 * c->offset, values, base != NULL ? device_base : NULL, &run);
    cuda_test_wait(stream);
    device_to_host(encoded, out + 4 * c->offset, c->bytes);
    wire_encode(c->format, expected, sent, c->count);
    if (base == NULL || wire_is_coarse(c->format)) {
        check_bytes("encoded", c, encoded, expected, c->bytes);
    } else {
        float *a = host_copy(c->values, c->count), *b = host_copy(c->values, c->count);
        wire_decode(c->format, a, encoded, c->count);
        wire_decode(c->format, b, expected, c->count);
        check_same("difference", a, b, c->count);
        free(a);
        free(b);
    }
    CUDA_CHECK(cudaFree(values - c->offset));
    CUDA_CHECK(cudaFree(device_base - c->offset));
    CUDA_CHECK(cudaFree(out));
    free(expected);
}

// What was not sent, here the base, is added before, and what rounding loses is left, as on the
// CPU.
static void wire_check_unsent(const WireCase *c) {
    Stream *stream = cuda_test_stream(PRECISION_FP32);
    float *values = device_floats(c->values, c->count, c->offset),
          *unsent = device_floats(c->base, c->count, c->offset), *sent = host_copy(c->values, c->count),
          *left = host_copy(c->base, c->count), *got = host_copy(c->base, c->count);
    char *out = (char *)device_new(c->bytes + 4 * c->offset), *encoded = (char *)malloc(c->bytes),
         *expected = (char *)malloc(c->bytes);
    WirePieces run = wire_range(c->format, c->count);
    run.unsent = unsent;
    cuda_wire_encode(stream, c->format, out + 4 * c->offset, values, NULL, &run);
    cuda_test_wait(stream);
    device_to_host(encoded, out + 4 * c->offset, c->bytes);
    host_floats(got, unsent, c->count);
    for (size_t i = 0; i < c->count; i++) { sent[i] += c->base[i]; }
    wire_encode(c->format, expected, sent, c->count);
    check_bytes("encoded with what was not sent", c, encoded, expected, c->bytes);
    wire_decode(c->format, left, expected, c->count);
    for (size_t i = 0; i < c->count; i++) { left[i] = sent[i] - left[i]; }
    check_same("not sent", got, left, c->count);
    CUDA_CHECK(cudaFree(values - c->offset));
    CUDA_CHECK(cudaFree(unsent - c->offset));
    CUDA_CHECK(cudaFree(out));
    void *on_host[] = {sent, left, got, encoded, expected};
    for (int i = 0; i < 5; i++) { free(on_host[i]); }
}

// Decoding alone gives the CPU's bits, NaNs too; with a base, which is also the output,
// the same sums.
static void wire_check_decode(const WireCase *c, const void *encoded) {
    Stream *stream = cuda_test_stream(PRECISION_FP32);
    float *out = (float *)device_new((c->count + c->offset) * sizeof(float)),
          *base = device_floats(c->base, c->count, c->offset);
    char *in = (char *)device_new(c->bytes + 4 * c->offset) + 4 * c->offset;
    CUDA_CHECK(cudaMemcpyAsync(in, encoded, c->bytes, cudaMemcpyHostToDevice, (cudaStream_t)stream->queue));
    float *got = host_copy(c->values, c->count), *expected = host_copy(c->values, c->count);
    WirePieces run = wire_range(c->format, c->count);
    cuda_wire_decode(stream, c->format, out + c->offset, in, NULL, &run);
    cuda_wire_decode(stream, c->format, base, in, base, &run);
    cuda_test_wait(stream);
    host_floats(got, out + c->offset, c->count);
    wire_decode(c->format, expected, encoded, c->count);
    check_bytes("decoded", c, got, expected, c->count * sizeof(float));
    host_floats(got, base, c->count);
    for (size_t i = 0; i < c->count; i++) { expected[i] = c->base[i] + expected[i]; }
    check_same("decoded on a base", got, expected, c->count);
    CUDA_CHECK(cudaFree(out));
    CUDA_CHECK(cudaFree(base - c->offset));
    CUDA_CHECK(cudaFree(in - 4 * c->offset));
    free(got);
    free(expected);
}

// The runs of three ranks: encoded values, differences, values again; the gaps between
// them are NaN.
static void wire_check_sum(const WireCase *c, const void *runs[WIRE_RANKS]) {
    Stream *stream = cuda_test_stream(PRECISION_FP32);
    size_t stride = c->bytes + 4 * (1 + c->offset), bytes = (WIRE_RANKS - 1) * stride + c->bytes;
    char *in = (char *)device_new(bytes + 4 * c->offset) + 4 * c->offset;
    float *out = (float *)device_new((c->count + c->offset) * sizeof(float)),
          *got = host_copy(c->values, c->count);
    float *expected = (float *)calloc(c->count, sizeof(float));
    for (size_t rank = 0; rank < WIRE_RANKS; rank++) {
        CUDA_CHECK(cudaMemcpyAsync(in + rank * stride, runs[rank], c->bytes, cudaMemcpyHostToDevice,
                                   (cudaStream_t)stream->queue));
        wire_add(c->format, expected, runs[rank], c->count);
    }
    WirePieces run = wire_range(c->format, c->count);
    cuda_wire_sum(stream, c->format, out + c->offset, in, stride, WIRE_RANKS, &run);
    cuda_test_wait(stream);
    host_floats(got, out + c->offset, c->count);
    check_same("sum over ranks", got, expected, c->count);
    CUDA_CHECK(cudaFree(in - 4 * c->offset));
    CUDA_CHECK(cudaFree(out));
    free(got);
    free(expected);
}

static void wire_check(WireFormat format, size_t count, Family family, size_t offset) {
    WireCase c = {format, count, offset, wire_bytes(format, count), NULL, NULL};
    c.values = host_normals(&test_random, count, 1.0);
    for (size_t i = 0; i < count; i++) { c.values[i] = wire_draw(family); }
    c.base = host_normals(&test_random, count, 1e-3);
    float *difference = host_copy(c.values, count);
    for (size_t i = 0; i < count; i++) { difference[i] = c.values[i] - c.base[i]; }
    char *encoded = (char *)malloc(c.bytes), *encoded_difference = (char *)malloc(c.bytes);
    wire_check_encode(&c, NULL, c.values, encoded);
    wire_check_encode(&c, c.base, difference, encoded_difference);
    if (wire_is_coarse(format)) { wire_check_unsent(&c); }
    wire_check_decode(&c, encoded);
    const void *runs[WIRE_RANKS] = {encoded, encoded_difference, encoded};
    wire_check_sum(&c, runs);
    free(c.values);
    free(c.base);
    free(difference);
    free(encoded);
    free(encoded_difference);
}

static void wire_formats_equal_the_cpu_bit_for_bit(void **state) {
    (void)state;
    for (int i = 0; i < WIRE_COUNT_COUNT; i++) {
        for (int work = 0; work < WIRE_FORMAT_COUNT * FAMILY_COUNT; work++) {
            Family family = (Family)(work / WIRE_FORMAT_COUNT);
            cuda_use_order((i + work) % SIMT_ORDERS);
            wire_check((WireFormat)(work % WIRE_FORMAT_COUNT), WIRE_COUNTS[i], family,
                       (size_t)((i + (int)family) % 4));
        }
    }
    for (int format = 0; format < WIRE_FORMAT_COUNT && !cuda_small_shapes(); format++) {
        wire_check((WireFormat)format, 38597377, FAMILY_SPECIAL, 0);
    }
}

// Blocks of only the midpoints between two values of a coarse format and the numbers next
// to them, at every scale.
static void wire_formats_round_ties_as_the_cpu(void **state) {
    (void)state;
    for (int trial = 0; trial < (cuda_small_shapes() ? 60 : 600); trial++) {
        static const WireFormat coarse[] = {WIRE_INT8, WIRE_INT4, WIRE_E3M0};
        WireFormat format = coarse[trial % 3];
        int steps = format == WIRE_INT8 ? WIRE_INT8_STEPS : WIRE_INT4_STEPS;
        float values[4 * WIRE_BLOCK],
            base[4 * WIRE_BLOCK] = {0}, largest = (float)exp2(-140 + 267 * random_uniform(&test_random));
        float unit = format == WIRE_E3M0 ? largest / 128 : wire_int_scale(wire_float_bits(largest), steps);
        char encoded[4 * WIRE_BLOCK + 16];
        for (size_t i = 0; i < 4 * WIRE_BLOCK; i++) {
            double level = format == WIRE_E3M0 ? exp2((double)(i / 3 % 8)) * (i % 2 == 0 ? 1.5 : -0.75)
                                               : (double)(i / 3 % (size_t)(2 * steps)) - steps + 0.5;
            float middle = (float)(level * (double)unit),
                  near[3] = {middle, nextafterf(middle, INFINITY), nextafterf(middle, -INFINITY)};
            values[i] = i % WIRE_BLOCK == 0 || fabsf(near[i % 3]) > largest ? largest : near[i % 3];
        }
        WireCase c = {format, 4 * WIRE_BLOCK, 0, wire_bytes(format, 4 * WIRE_BLOCK), values, base};
        wire_check_encode(&c, NULL, values, encoded);
        wire_check_decode(&c, encoded);
    }
}

// ---- Messages of pieces ---------------------------------------------------------------

enum { PIECES_RANKS = 5, PIECES_CELLS = 3, PIECES_OWNERS = 3 };
static const int PIECES_LIST[PIECES_OWNERS] = {3, 0, 4};

// A message of the pieces of three owners out of five, in an order of its own; or of one
// owner, as differences to a base that lies otherwise than the values, as a shard does
// beside the vector.
typedef struct PiecesCase {
    WireFormat format;
    bool on_base;
    WirePieces pieces, target; // as it is encoded; as it is decoded and added up
    size_t all;                // elements of the vector
    float *values, *base;      // (all)
} PiecesCase;

static PiecesCase pieces_case(WireFormat format, size_t piece, bool on_base) {
    size_t bytes = wire_bytes(format, piece) + 12, owners = on_base ? 1 : PIECES_OWNERS,
           cell = PIECES_RANKS * piece;
    PiecesCase c;
    WirePieces pieces = {piece, bytes, PIECES_CELLS * bytes + 4, PIECES_CELLS, owners, NULL, piece,
                         cell,  cell};
    c.format = format;
    c.on_base = on_base;
    c.pieces = c.target = pieces;
    c.pieces.base_stride = on_base ? piece : cell;
    c.all = PIECES_CELLS * cell;
    c.values = host_normals(&test_random, c.all, 1e-3);
    c.base = host_normals(&test_random, c.all, 1e-3);
    return c;
}

// Every piece against a run of its own: the message, and what it decodes to and adds up
// to, twice, on top of `base`.
static void check_pieces(const PiecesCase *c, const char *message, const float *decoded, const float *sums) {
    size_t piece = c->pieces.count, bytes = wire_bytes(c->format, piece);
    float *run = host_copy(c->values, piece), *plain = host_copy(c->values, piece);
    char *encoded = (char *)malloc(bytes);
    for (size_t i = 0; i < c->pieces.owner_count * PIECES_CELLS; i++) {
        size_t cell = i % PIECES_CELLS, owner = c->on_base ? 0 : (size_t)PIECES_LIST[i / PIECES_CELLS];
        size_t flat = (cell * PIECES_RANKS + owner) * piece;
        const char *place = message + i / PIECES_CELLS * c->pieces.owner_bytes + cell * c->pieces.bytes;
        for (size_t j = 0; j < piece; j++) {
            run[j] = c->values[flat + j] - (c->on_base ? c->base[cell * piece + j] : 0);
        }
        wire_encode(c->format, encoded, run, piece);
        wire_decode(c->format, plain, encoded, piece);
        assert_memory_equal(place, encoded, bytes);
        for (size_t j = 0; j < piece; j++) { run[j] = plain[j] + plain[j]; }
        check_same("summed pieces", sums + flat, run, piece);
        for (size_t j = 0; j < piece; j++) { run[j] = c->on_base ? c->base[flat + j] + plain[j] : plain[j]; }
        check_same("decoded pieces", decoded + flat, run, piece);
    }
    free(run);
    free(plain);
    free(encoded);
}

static void run_pieces(PiecesCase *c) {
    Stream *stream = cuda_test_stream(PRECISION_FP32);
    size_t message_bytes = c->pieces.owner_count * c->pieces.owner_bytes;
    float *values = device_floats(c->values, c->all, 0), *base = device_floats(c->base, c->all, 0),
          *decoded = device_floats(c->base, c->all, 0), *sums = device_floats(c->base, c->all, 0);
    int *list = (int *)device_new(sizeof PIECES_LIST);
    char *messages = (char *)device_new(2 * message_bytes), *got = (char *)malloc(message_bytes);
    CUDA_CHECK(cudaMemcpyAsync(list, PIECES_LIST, sizeof PIECES_LIST, cudaMemcpyHostToDevice,
                               (cudaStream_t)stream->queue));
    if (!c->on_base) { c->pieces.owners = c->target.owners = list; }
    for (size_t i = 0; i < 2; i++) {
        cuda_wire_encode(stream, c->format, messages + i * message_bytes, values, c->on_base ? base : NULL,
                         &c->pieces);
    }
    cuda_wire_decode(stream, c->format, decoded, messages, c->on_base ? decoded : NULL, &c->target);
    cuda_wire_sum(stream, c->format, sums, messages, message_bytes, 2, &c->target);
    cuda_test_wait(stream);
    float *seen = host_copy(c->base, c->all), *seen_sums = host_copy(c->base, c->all);
    device_to_host(got, messages, message_bytes);
    host_floats(seen, decoded, c->all);
    host_floats(seen_sums, sums, c->all);
    check_pieces(c, got, seen, seen_sums);
    void *on_gpu[] = {values, base, decoded, sums, list, messages};
    void *on_host[] = {seen, seen_sums, got, c->values, c->base};
    for (int i = 0; i < 6; i++) { CUDA_CHECK(cudaFree(on_gpu[i])); }
    for (int i = 0; i < 5; i++) { free(on_host[i]); }
}

static void messages_of_pieces_equal_their_runs(void **state) {
    (void)state;
    static const size_t counts[] = {32, 256, 416, 768};
    for (int trial = 0; trial < 8 * WIRE_FORMAT_COUNT; trial++) {
        PiecesCase c = pieces_case((WireFormat)(trial / 8), counts[trial / 2 % 4], trial % 2 == 1);
        cuda_use_order(trial % SIMT_ORDERS);
        run_pieces(&c);
    }
}

// ---- A GPU whose messages never end ----------------------------------------------------

#ifdef ACCO_SIMT_H
typedef struct LateMessages {
    int64_t commit;
    Level level;
    const char *said;
} LateMessages;

static void wait_for_messages(const void *context) {
    const LateMessages *late = (const LateMessages *)context;
    Transport transport;
    Nccl nccl = {};
    transport_open_supposed(&transport, 4, 2);
    transport.two_level = true;
    transport.timeout_seconds = 0.02;
    transport.commit = late->commit;
    nccl.transport = &transport;
    simt_not_ready() = INT_MAX;
    nccl_settle(&nccl, late->level, cuda_test_stream(PRECISION_FP32)->queue, "all-gather");
}
#endif

// Messages that a GPU sends have the deadline of all others. At the start the network is to blame
// more often than a rank.
static void a_message_of_nccl_that_never_ends_is_told(void **state) {
    (void)state;
#ifdef ACCO_SIMT_H
    static const LateMessages cases[] = {
        {0, BETWEEN_HOSTS,
         "commit 0] NCCL, all-gather between hosts: a rank did not take part in time; at the start that is "
         "often a network interface which other hosts do not reach: NCCL_SOCKET_IFNAME=eth0"},
        {7, INSIDE_HOSTS,
         "commit 7] NCCL, all-gather inside the host: a rank did not take part in time: it may have died"}};
    for (int i = 0; i < 2; i++) {
        char message[1024];
        int status = run_in_child(wait_for_messages, &cases[i], message, sizeof message);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SYSTEM_FAILURE);
        if (strstr(message, cases[i].said) == NULL) { fail_msg("%s", message); }
    }
#else
    skip();
#endif
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cross_entropy_equals_the_cpu),
        cmocka_unit_test(cross_entropy_shows_what_is_not_finite),
        cmocka_unit_test(adamw_equals_the_cpu),
        cmocka_unit_test(adamw_estimates_what_it_would_commit),
        cmocka_unit_test(moments_in_bf16_have_the_bits_of_the_cpu),
        cmocka_unit_test(sums_of_squares_equal_the_cpu),
        cmocka_unit_test(conversions_round_to_nearest_even),
        cmocka_unit_test(outer_steps_equal_the_cpu),
        cmocka_unit_test(sparse_errors_have_the_bits_of_the_cpu),
        cmocka_unit_test(sparse_outer_steps_have_the_bits_of_the_cpu),
        cmocka_unit_test(wire_formats_equal_the_cpu_bit_for_bit),
        cmocka_unit_test(wire_formats_round_ties_as_the_cpu),
        cmocka_unit_test(messages_of_pieces_equal_their_runs),
        cmocka_unit_test(a_message_of_nccl_that_never_ends_is_told),
    };
    test_random.state = seed_of_tests();
    cpu_stream.pool = thread_pool_create(1, true);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    thread_pool_destroy(cpu_stream.pool);
    CUDA_CHECK(cudaStreamDestroy((cudaStream_t)cuda_test_stream(PRECISION_FP32)->queue));
    return failed;
}
