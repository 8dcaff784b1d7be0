// test_cuda_matmul.cu: what is kept for matrix products on the device: plans for the
// shapes used last, and nothing of the others.
//
// The products themselves are the library's; test_cuda_model.cu tests that it is asked
// for the right ones. Those with GELU in an epilogue, which are only benchmarked
// (dev/gpu/gelu_epilogues.cuh), are compared here with the formulas and with the
// program's own form.
#include "test/cuda/cuda_kernels.h"

#include "dev/gpu/gelu_epilogues.cuh"
#include "kernels/kernels.h"
#include "test/layer_calls.h"

enum { INPUTS = 24, OUTPUTS = 40, SHAPES = 130 };

static Random test_random;

static CudaGemmLibrary *library_of(const Stream *stream) { return (CudaGemmLibrary *)stream->gemm; }

// The arrays of products of up to SHAPES rows.
typedef struct Products {
    Stream stream;
    void *workspace;
    float *input, *weight, *output; // on the host
    Real *device_input, *device_weight, *device_output;
} Products;

static Products products_open(Precision precision) {
    Products products;
    products.stream = *cuda_test_stream(precision);
    CUDA_CHECK(cudaMalloc(&products.workspace, GEMM_WORKSPACE_BYTES));
    products.input = host_normals(&test_random, SHAPES * INPUTS, 1.0);
    products.weight = host_normals(&test_random, OUTPUTS * INPUTS, 1.0);
    products.output = (float *)malloc(SHAPES * OUTPUTS * sizeof(float));
    host_round(products.input, SHAPES * INPUTS, precision);
    host_round(products.weight, OUTPUTS * INPUTS, precision);
    products.device_input = device_reals(products.input, SHAPES * INPUTS, precision);
    products.device_weight = device_reals(products.weight, OUTPUTS * INPUTS, precision);
    products.device_output = (Real *)device_new(SHAPES * OUTPUTS * precision_bytes(precision));
    cuda_gemm_open(&products.stream, products.workspace);
    return products;
}

static void products_close(Products *products) {
    cuda_gemm_close(&products->stream);
    CUDA_CHECK(cudaFree(products->workspace));
    CUDA_CHECK(cudaFree(products->device_input));
    CUDA_CHECK(cudaFree(products->device_weight));
    CUDA_CHECK(cudaFree(products->device_output));
    free(products->input);
    free(products->weight);
    free(products->output);
}

static void products_run(Products *products, int rows) {
    matmul_forward(&products->stream, products->device_output, OUTPUTS, products->device_input,
                   products->device_weight, rows, INPUTS, OUTPUTS);
}

// Runs one and compares it with sums in fp64.
static void products_check(Products *products, int rows) {
    Precision precision = products->stream.precision;
    double tolerance = precision == PRECISION_FP32 ? 1e-4 : 0x1p-8;
    size_t count = (size_t)rows * OUTPUTS;
    Worst worst = {};
    products_run(products, rows);
    host_reals(products->output, products->device_output, count, precision);
    for (size_t i = 0; i < count; i++) {
        double sum = 0;
        for (size_t k = 0; k < INPUTS; k++) {
            sum += (double)products->input[i / OUTPUTS * INPUTS + k] *
                   (double)products->weight[i % OUTPUTS * INPUTS + k];
        }
        worst_add(&worst, i, (double)products->output[i], sum, tolerance * fmax(1, fabs(sum)));
    }
    char what[48];
    snprintf(what, sizeof what, "product in %s, %d rows", precision_name(precision), rows);
    check_worst(what, worst);
}

// As many shapes as anybody likes: each batch of an evaluation may have its own.
static void any_number_of_shapes_is_computed(void **state) {
    (void)state;
    for (int precision = 0; precision < 2; precision++) {
        Products products = products_open(precision == 0 ? PRECISION_FP32 : PRECISION_BF16);
        for (int i = 0; i < 2 * SHAPES; i++) {
            products_check(&products, 1 + i % SHAPES);
            assert_true(library_of(&products.stream)->count <= CUDA_GEMM_SHAPES);
        }
        products_close(&products);
    }
}

// A plan that gives way takes all that the library has described for it along.
static void what_gives_way_leaves_nothing(void **state) {
    (void)state;
    Products products = products_open(PRECISION_FP32);
    for (int i = 0; i < SHAPES; i++) { products_run(&products, 1 + i); }
    assert_int_equal(library_of(&products.stream)->count, CUDA_GEMM_SHAPES);
#ifdef ACCO_SIMT_H
    assert_int_equal(simt_library_objects(), 4 * CUDA_GEMM_SHAPES);
#endif
    products_close(&products);
#ifdef ACCO_SIMT_H
    assert_int_equal(simt_library_objects(), 0);
#endif
}

// Shapes that come back again and again, as those of training do, are planned once,
// whatever comes between.
static void what_is_used_keeps_its_plan(void **state) {
    (void)state;
    Products products = products_open(PRECISION_FP32);
    CudaGemmLibrary *library = library_of(&products.stream);
#ifdef ACCO_SIMT_H
    int before = simt_library_products();
#endif
    for (int i = 1; i < SHAPES; i++) {
        products_run(&products, i);
        products_run(&products, SHAPES);
    }
    int found = 0;
    for (int i = 0; i < library->count; i++) { found += library->plans[i].gemm.n == SHAPES; }
    assert_int_equal(found, 1);
#ifdef ACCO_SIMT_H
    assert_int_equal(simt_library_products() - before, SHAPES);
#endif
    products_close(&products);
}

// A shape has a plan for each number of multiprocessors, which are kept while limits change.
static void a_limit_has_plans_of_its_own(void **state) {
    (void)state;
    Products products = products_open(PRECISION_FP32);
    CudaGemmLibrary *library = library_of(&products.stream);
    for (int i = 0; i < 6; i++) {
        gemm_limit(&products.stream, i % 2 == 0 ? 0 : 3);
        products_check(&products, 7);
        assert_int_equal(library->count, i == 0 ? 1 : 2);
    }
#ifdef ACCO_SIMT_H
    assert_int_equal(library->plans[0].operation->processors, 0);
    assert_int_equal(library->plans[1].operation->processors, 3);
#endif
    products_close(&products);
}

// ---- Offers that are refused ----------------------------------------------------------

#ifdef ACCO_SIMT_H
// What `run` says on stderr is written to text.
static void say_into(char text[512], void (*run)(Products *products), Products *products) {
    FILE *file = tmpfile();
    int terminal = dup(STDERR_FILENO);
    assert_true(file != NULL && terminal >= 0 && dup2(fileno(file), STDERR_FILENO) >= 0);
    run(products);
    fflush(stderr);
    assert_true(dup2(terminal, STDERR_FILENO) >= 0);
    close(terminal);
    rewind(file);
    text[fread(text, 1, 511, file)] = '\0';
    fclose(file);
}

static void run_three_shapes(Products *products) {
    for (int rows = 5; rows <= 7; rows++) {
        for (int i = 0; i < 2; i++) { products_check(products, rows); }
    }
}

// Three matrices at once, then fewer: 4 rows of the input each, all of the weight's own.
static void run_batches(Products *products) {
    for (int count = 3; count > 0; count--) {
        matmul_products(&products->stream, products->device_output, products->device_input, false,
                        products->device_weight, true, 4, 4, INPUTS, count, 3);
        Worst worst = {};
        host_reals(products->output, products->device_output, (size_t)count * 16, PRECISION_FP32);
        for (int i = 0; i < count * 16; i++) {
            double sum = 0;
            for (int k = 0; k < INPUTS; k++) {
                sum += (double)products->input[i / 4 * INPUTS + k] *
                       (double)products->weight[(i / 16 * 4 + i % 4) * INPUTS + k];
            }
            worst_add(&worst, (size_t)i, (double)products->output[i], sum, 1e-4 * fmax(1, fabs(sum)));
        }
        check_worst("products at once", worst);
    }
}
#endif

// An offer that the library itself refuses gives way to the next: where the offer says so, where
// the library says so when asked, for all counts of products or for some, where it wants too much
// workspace, and where it refuses as late as at the first run. The program says it once.
static void a_refused_offer_gives_way_to_the_next(void **state) {
    (void)state;
#ifdef ACCO_SIMT_H
    static const char *const wrong[] = {"", "state", "check", "few", "workspace", "run"};
    for (int i = 0; i < 6; i++) {
        for (int batch = 0; batch < 2; batch++) {
            char text[512];
            Products products = products_open(PRECISION_FP32);
            const CudaGemmLibrary *library = library_of(&products.stream);
            setenv("SIMT_OFFER", wrong[i], 1);
            say_into(text, batch == 1 ? run_batches : run_three_shapes, &products);
            unsetenv("SIMT_OFFER");
            assert_int_equal(library->count, batch == 1 ? 1 : 3);
            for (int k = 0; k < library->count; k++) {
                assert_int_equal(library->plans[k].algorithm.data[0], i > 0);
            }
            const char *said = strstr(text, "cuBLASLt refuses its own first offer for a product of m ");
            assert_int_equal(said != NULL, i > 0);
            assert_true(said == NULL || strstr(said + 1, "cuBLASLt") == NULL);
            products_close(&products);
        }
    }
#endif
}

// One that fails otherwise, perhaps on this rank alone, does not; and what has run stays.
static void a_failure_is_no_refusal(void **state) {
    (void)state;
#ifdef ACCO_SIMT_H
    static const struct {
        const char *wrong;
        cublasStatus_t first, second; // of the first run, and of one that comes after a good one
    } cases[] = {{"run", CUBLAS_STATUS_SUCCESS, CUBLAS_STATUS_NOT_SUPPORTED},
                 {"launch", CUBLAS_STATUS_EXECUTION_FAILED, CUBLAS_STATUS_EXECUTION_FAILED}};
    for (int i = 0; i < 4; i++) {
        Products products = products_open(PRECISION_FP32);
        CudaGemmLibrary *library = library_of(&products.stream);
        products_run(&products, 7);
        CudaGemmPlan *plan = &library->plans[0];
        plan->has_run = i % 2 == 1;
        library->has_refused = true; // nothing is printed
        setenv("SIMT_OFFER", cases[i / 2].wrong, 1);
        Matmul call = {.a = products.device_input,
                       .b = products.device_weight,
                       .result = products.device_output,
                       .scale = 1.0f,
                       .count = 1};
        cublasStatus_t status = cuda_gemm_run(&products.stream, plan, &call);
        unsetenv("SIMT_OFFER");
        assert_int_equal(status, i % 2 == 1 ? cases[i / 2].second : cases[i / 2].first);
        assert_int_equal(plan->algorithm.data[0], i == 0);
        products_close(&products);
    }
#endif
}

// ---------------------------------------------------------------------------------------
// GELU in epilogues. bf16 rounds by 2^-9 of a value at most; bounds are 2^-8 of each
// value that is rounded on the way, and for a GPU's approximate tanh, which may be wrong
// by 2^-11, 2^-10 of GELU's argument, and 2^-8 of what its derivative multiplies.

static double gelu_tanh(double x) { return tanh(sqrt(2 / 3.14159265358979) * (x + 0.044715 * x * x * x)); }

static double gelu_exact(double x) { return 0.5 * x * (1 + gelu_tanh(x)); }

static double gelu_slope(double x) {
    double t = gelu_tanh(x);
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * sqrt(2 / 3.14159265358979) * (1 + 3 * 0.044715 * x * x);
}

// The emulated library has two algorithms, which round at different places. On a GPU the
// first one offered is tested.
#ifdef ACCO_SIMT_H
enum { ALGORITHMS = 2 };
static void use_algorithm(EpilogueProduct *product, int i) { product->plan.algorithm.data[0] = (uint64_t)i; }
#else
enum { ALGORITHMS = 1 };
static void use_algorithm(EpilogueProduct *, int) {}
#endif

// A GPU's library may lack an epilogue; the emulated one has them.
static bool is_offered(cublasStatus_t status) {
    bool offered = status == CUBLAS_STATUS_SUCCESS;
    if (!offered) { print_message("the library lacks it: status %d\n", (int)status); }
    assert_true(offered || !CUDA_EMULATED);
    return offered;
}

// A row of random numbers, on the host and on the device.
typedef struct Numbers {
    float *host;
    Real *device;
} Numbers;

static Numbers numbers_new(size_t count) {
    Numbers numbers;
    numbers.host = host_normals(&test_random, count, 1.0);
    host_round(numbers.host, count, PRECISION_BF16);
    numbers.device = device_reals(numbers.host, count, PRECISION_BF16);
    return numbers;
}

static void numbers_free(Numbers *numbers) {
    free(numbers->host);
    CUDA_CHECK(cudaFree(numbers->device));
}

// output and saved (SHAPES, OUTPUTS), both bf16, against the formulas; NULL: is not
// looked at.
static void check_forward(const char *what, const Products *products, const float *bias, const Real *output,
                          const Real *saved) {
    size_t count = (size_t)SHAPES * OUTPUTS;
    float *outputs = products->output, *inputs = (float *)malloc(count * sizeof(float));
    if (output != NULL) { host_reals(outputs, output, count, PRECISION_BF16); }
    if (saved != NULL) { host_reals(inputs, saved, count, PRECISION_BF16); }
    Worst worst = {}, worst_saved = {};
    for (size_t i = 0; i < count; i++) {
        double sum = 0;
        for (size_t k = 0; k < INPUTS; k++) {
            sum += (double)products->input[i / OUTPUTS * INPUTS + k] *
                   (double)products->weight[i % OUTPUTS * INPUTS + k];
        }
        double x = sum + (double)bias[i % OUTPUTS], y = gelu_exact(x);
        if (saved != NULL) { worst_add(&worst_saved, i, (double)inputs[i], x, 0x1p-8 * fabs(x) + 1e-5); }
        double bound = 0x1p-8 * (fabs(y) + (fabs(x) + fabs(sum)) * fabs(gelu_slope(x))) + 0x1p-10 * fabs(x);
        if (output != NULL) { worst_add(&worst, i, (double)outputs[i], y, bound + 1e-5); }
    }
    check_worst(what, worst);
    check_worst("GELU's input that is saved", worst_saved);
    free(inputs);
}

static void check_bias_alone(Products *products, const Numbers *bias) {
    EpilogueProduct product = {};
    Real *saved = (Real *)device_new((size_t)SHAPES * OUTPUTS * 2);
    if (is_offered(epilogue_bias_forward(&products->stream, &product, saved, products->device_input,
                                         products->device_weight, bias->device, SHAPES, INPUTS, OUTPUTS))) {
        check_forward("the bias", products, bias->host, NULL, saved);
    }
    epilogue_close(&product);
    CUDA_CHECK(cudaFree(saved));
}

static void gelu_in_an_epilogue_agrees_with_our_kernel(void **state) {
    (void)state;
    Products products = products_open(PRECISION_BF16);
    Numbers bias = numbers_new(OUTPUTS);
    EpilogueProduct product = {};
    size_t bytes = (size_t)SHAPES * OUTPUTS * 2;
    for (int i = 0; i < ALGORITHMS; i++) {
        Real *saved = (Real *)device_new(bytes), *output = (Real *)device_new(bytes);
        if (product.planned) { use_algorithm(&product, i); }
        if (is_offered(epilogue_gelu_forward(&products.stream, &product, output, saved, products.device_input,
                                             products.device_weight, bias.device, SHAPES, INPUTS, OUTPUTS))) {
            check_forward("the epilogue", &products, bias.host, output, saved);
        }
        CUDA_CHECK(cudaFree(saved));
        CUDA_CHECK(cudaFree(output));
    }
    epilogue_close(&product);
    check_bias_alone(&products, &bias);
    Real *output = (Real *)device_new(bytes);
    products_run(&products, SHAPES);
    call_gelu_forward(&products.stream, output, products.device_output, bias.device, SHAPES, OUTPUTS);
    check_forward("our kernel", &products, bias.host, output, NULL);
    CUDA_CHECK(cudaFree(output));
    numbers_free(&bias);
    products_close(&products);
}

// Cases for the gradient of the second product's input, and of the bias.
typedef struct BackwardCase {
    const char *what;
    bool epilogue, sums; // sums: the epilogue sums the bias gradient; otherwise a kernel does
} BackwardCase;

enum { GAP = 8, STRIDE = INPUTS + GAP, D_BIAS_BEFORE = 1000 };

// Runs one form; false: the library lacks it.
static bool run_backward(Products *products, const BackwardCase *form, EpilogueProduct *product,
                         const Numbers *d_output, const Numbers *saved, Real *gradient, float *d_bias) {
    Stream *stream = &products->stream;
    bool done = true;
    float *partials = (float *)device_new((size_t)CUDA_ROW_BLOCKS * INPUTS * sizeof(float));
    Real *sums = (Real *)device_new(INPUTS * 2), *no_bias = (Real *)device_new(INPUTS * 2);
    if (form->epilogue) {
        done = is_offered(epilogue_gelu_backward(
            stream, product, gradient, STRIDE, form->sums ? sums : (Real *)NULL, saved->device,
            d_output->device, products->device_weight, SHAPES, INPUTS, OUTPUTS));
        if (form->sums) {
            epilogue_add(stream, d_bias, reals<__nv_bfloat16>(sums), INPUTS);
        } else {
            epilogue_sums(stream, d_bias, partials, gradient, STRIDE, SHAPES, INPUTS);
        }
    } else {
        CUDA_CHECK(cudaMemsetAsync(no_bias, 0, INPUTS * 2, (cudaStream_t)stream->queue));
        matmul_backward_input(stream, gradient, STRIDE, d_output->device, OUTPUTS, products->device_weight,
                              SHAPES, INPUTS, OUTPUTS);
        call_gelu_backward(stream, gradient, STRIDE, d_bias, partials, saved->device, no_bias, SHAPES,
                           INPUTS);
    }
    cuda_test_wait(stream);
    CUDA_CHECK(cudaFree(partials));
    CUDA_CHECK(cudaFree(sums));
    CUDA_CHECK(cudaFree(no_bias));
    return done;
}

// gradient (SHAPES, INPUTS), STRIDE apart, and d_bias (INPUTS), which was D_BIAS_BEFORE,
// against the formulas. The gaps must still be NaN.
static void check_backward(const char *what, const Products *products, const float *d_output,
                           const float *saved, const Real *gradient, const float *d_bias) {
    float gradients[SHAPES * STRIDE], biases[INPUTS];
    Worst worst = {}, worst_bias = {};
    host_reals(gradients, gradient, SHAPES * STRIDE, PRECISION_BF16);
    device_to_host(biases, d_bias, sizeof biases);
    for (size_t c = 0; c < STRIDE; c++) {
        double total = D_BIAS_BEFORE, size = 1;
        for (size_t row = 0; row < SHAPES; row++) {
            size_t place = row * STRIDE + c;
            if (c >= INPUTS) {
                assert_true(isnan(gradients[place]));
                continue;
            }
            double sum = 0, x = (double)saved[row * INPUTS + c];
            for (size_t k = 0; k < OUTPUTS; k++) {
                sum += (double)d_output[row * OUTPUTS + k] * (double)products->weight[k * INPUTS + c];
            }
            double value = sum * gelu_slope(x);
            worst_add(&worst, place, (double)gradients[place], value,
                      0x1p-7 * fabs(value) + 0x1p-8 * fabs(sum) + 1e-5);
            total += value;
            size += fabs(value) + fabs(sum);
        }
        if (c < INPUTS) { worst_add(&worst_bias, c, (double)biases[c], total, 0x1p-8 * size); }
    }
    check_worst(what, worst);
    check_worst("bias gradient of GELU", worst_bias);
}

static void the_derivative_in_an_epilogue_agrees_with_our_kernel(void **state) {
    (void)state;
    static const BackwardCase forms[3] = {
        {"our kernel", false, false}, {"DGELU_BGRAD", true, true}, {"DGELU and a sum", true, false}};
    Products products = products_open(PRECISION_BF16);
    Numbers d_output = numbers_new(SHAPES * OUTPUTS), saved = numbers_new(SHAPES * INPUTS);
    float before[INPUTS];
    for (size_t i = 0; i < INPUTS; i++) { before[i] = D_BIAS_BEFORE; }
    for (size_t form = 0; form < 3; form++) {
        EpilogueProduct product = {};
        for (int i = 0; i < (forms[form].epilogue ? ALGORITHMS : 1); i++) {
            Real *gradient = (Real *)device_new(SHAPES * STRIDE * 2);
            float *d_bias = (float *)device_from_host(before, sizeof before);
            if (product.planned) { use_algorithm(&product, i); }
            if (run_backward(&products, &forms[form], &product, &d_output, &saved, gradient, d_bias)) {
                check_backward(forms[form].what, &products, d_output.host, saved.host, gradient, d_bias);
            }
            CUDA_CHECK(cudaFree(gradient));
            CUDA_CHECK(cudaFree(d_bias));
        }
        epilogue_close(&product);
    }
    numbers_free(&d_output);
    numbers_free(&saved);
    products_close(&products);
}

// The sums that DGELU leaves to be done, of more rows than there are blocks, so that each
// block has several. Numbers are integers: sums are exact.
static void all_rows_of_a_gradient_are_added(void **state) {
    (void)state;
    enum { COLUMNS = 16, WIDE = 24, ROWS = 11 * CUDA_ROW_BLOCKS + 5 };
    float *gradient = (float *)malloc(ROWS * WIDE * sizeof(float)), sums[COLUMNS] = {};
    for (size_t i = 0; i < (size_t)ROWS * WIDE; i++) {
        gradient[i] = (float)(random_hash(i, 3) % 17) - 8;
        if (i % WIDE < COLUMNS) { sums[i % WIDE] += gradient[i]; }
    }
    Stream *stream = cuda_test_stream(PRECISION_BF16);
    Real *device_gradient = device_reals(gradient, ROWS * WIDE, PRECISION_BF16);
    float zeros[COLUMNS] = {}, results[COLUMNS], *d_bias = (float *)device_from_host(zeros, sizeof zeros),
          *partials = (float *)device_new((size_t)CUDA_ROW_BLOCKS * COLUMNS * sizeof(float));
    epilogue_sums(stream, d_bias, partials, device_gradient, WIDE, ROWS, COLUMNS);
    device_to_host(results, d_bias, sizeof results);
    assert_memory_equal(results, sums, sizeof sums);
    CUDA_CHECK(cudaFree(device_gradient));
    CUDA_CHECK(cudaFree(d_bias));
    CUDA_CHECK(cudaFree(partials));
    free(gradient);
}

// The next product can sum, too. Numbers are integers, so that all sums are exact.
static void the_weight_gradient_can_sum_what_it_reads(void **state) {
    (void)state;
    enum { WIDE = OUTPUTS + GAP };
    static float input[SHAPES * INPUTS], d_output[SHAPES * WIDE], weight[OUTPUTS * INPUTS],
        results[OUTPUTS * INPUTS];
    float bias[OUTPUTS], biases[OUTPUTS];
    for (size_t i = 0; i < SHAPES * INPUTS; i++) { input[i] = (float)(random_hash(i, 5) % 17) - 8; }
    for (size_t i = 0; i < SHAPES * WIDE; i++) { d_output[i] = (float)(random_hash(i, 6) % 17) - 8; }
    for (size_t o = 0; o < OUTPUTS; o++) {
        bias[o] = D_BIAS_BEFORE;
        for (size_t row = 0; row < SHAPES; row++) { bias[o] += d_output[row * WIDE + o]; }
        for (size_t i = 0; i < INPUTS; i++) {
            weight[o * INPUTS + i] = 1;
            for (size_t row = 0; row < SHAPES; row++) {
                weight[o * INPUTS + i] += d_output[row * WIDE + o] * input[row * INPUTS + i];
            }
        }
    }
    Products products = products_open(PRECISION_BF16);
    Real *device_input = device_reals(input, SHAPES * INPUTS, PRECISION_BF16),
         *device_d_output = device_reals(d_output, SHAPES * WIDE, PRECISION_BF16);
    EpilogueProduct product = {};
    for (int i = 0; i < ALGORITHMS; i++) {
        for (size_t k = 0; k < OUTPUTS * INPUTS; k++) { results[k] = 1; }
        for (size_t k = 0; k < OUTPUTS; k++) { biases[k] = D_BIAS_BEFORE; }
        float *d_weight = (float *)device_from_host(results, sizeof results),
              *d_bias = (float *)device_from_host(biases, sizeof biases),
              *sums = (float *)device_new(sizeof biases);
        if (product.planned) { use_algorithm(&product, i); }
        if (is_offered(epilogue_weight_backward(&products.stream, &product, d_weight, sums, device_d_output,
                                                WIDE, device_input, SHAPES, INPUTS, OUTPUTS))) {
            epilogue_add(&products.stream, d_bias, (const float *)sums, OUTPUTS);
            device_to_host(results, d_weight, sizeof results);
            device_to_host(biases, d_bias, sizeof biases);
            assert_memory_equal(results, weight, sizeof weight);
            assert_memory_equal(biases, bias, sizeof bias);
        }
        CUDA_CHECK(cudaFree(d_weight));
        CUDA_CHECK(cudaFree(d_bias));
        CUDA_CHECK(cudaFree(sums));
    }
    epilogue_close(&product);
    CUDA_CHECK(cudaFree(device_input));
    CUDA_CHECK(cudaFree(device_d_output));
    products_close(&products);
}

// Rows of the kept input must be a multiple of 8 elements apart. What the library lacks,
// or offers and then fails to do, is said; it leaves nothing behind and does not end the
// program.
static void an_epilogue_that_the_library_lacks_is_said(void **state) {
    (void)state;
#ifdef ACCO_SIMT_H
    static const int tries[4] = {OUTPUTS - 3, OUTPUTS - 3, OUTPUTS, OUTPUTS}; // outputs of each
    Products products = products_open(PRECISION_BF16);
    Numbers bias = numbers_new(OUTPUTS);
    EpilogueProduct product = {};
    Real *saved = (Real *)device_new(SHAPES * OUTPUTS * 2);
    for (int i = 0; i < 4; i++) {
        if (i == 2) { epilogue_close(&product); }
        cublasStatus_t status = epilogue_gelu_forward(&products.stream, &product, products.device_output,
                                                      saved, products.device_input, products.device_weight,
                                                      bias.device, SHAPES, INPUTS, tries[i]);
        assert_int_equal(status, i == 2 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED);
        assert_int_equal(simt_library_objects(), i == 2 ? 4 : 0);
        use_algorithm(&product, 7); // there is none of this number
    }
    epilogue_close(&product);
    assert_int_equal(simt_library_objects(), 0);
    CUDA_CHECK(cudaFree(saved));
    numbers_free(&bias);
    products_close(&products);
#endif
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_number_of_shapes_is_computed),
        cmocka_unit_test(what_gives_way_leaves_nothing),
        cmocka_unit_test(what_is_used_keeps_its_plan),
        cmocka_unit_test(a_limit_has_plans_of_its_own),
        cmocka_unit_test(a_refused_offer_gives_way_to_the_next),
        cmocka_unit_test(a_failure_is_no_refusal),
        cmocka_unit_test(gelu_in_an_epilogue_agrees_with_our_kernel),
        cmocka_unit_test(the_derivative_in_an_epilogue_agrees_with_our_kernel),
        cmocka_unit_test(all_rows_of_a_gradient_are_added),
        cmocka_unit_test(the_weight_gradient_can_sum_what_it_reads),
        cmocka_unit_test(an_epilogue_that_the_library_lacks_is_said),
    };
    test_random.state = random_hash(seed_of_tests(), 31);
    return cmocka_run_group_tests_name("cuda_matmul", tests, NULL, NULL);
}
