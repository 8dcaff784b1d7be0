// test_cuda_matmul.cu: what is kept for matrix products on the device: plans for the
// shapes used last, and nothing of the others.
//
// The products themselves are the library's; test_cuda_model.cu tests that it is asked
// for the right ones.
#include "test/cuda/cuda_kernels.h"

#include "kernels/kernels.h"
#ifdef ACCO_SIMT_H
#include "test/harness.h"
#endif

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

// ---- What the library is told of a product ---------------------------------------------

// What divides an address and the length of a row: on a GPU it crashes where the library relies on
// more, and is slow where it is told less.
static void alignments_are_those_of_their_operands(void **state) {
    (void)state;
    static const struct {
        size_t place;
        int stride;
        Precision precision;
        uint32_t alignment;
    } cases[] = {{256, 8, PRECISION_FP32, 16}, {256, 4, PRECISION_FP32, 16}, {256, 6, PRECISION_FP32, 8},
                 {256, 3, PRECISION_FP32, 4},  {264, 8, PRECISION_FP32, 8},  {260, 6, PRECISION_FP32, 4},
                 {256, 8, PRECISION_BF16, 16}, {256, 3, PRECISION_BF16, 2},  {258, 64, PRECISION_BF16, 2},
                 {64, 8, PRECISION_E4M3, 8},   {272, 16, PRECISION_E5M2, 16}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_int_equal(
            cuda_gemm_alignment((const void *)cases[i].place, cases[i].stride, cases[i].precision),
            cases[i].alignment);
    }
    Products products = products_open(PRECISION_FP32);
    const CudaGemm *gemm = &library_of(&products.stream)->plans[0].gemm;
    matmul_forward(&products.stream, real_at(products.device_output, 2, PRECISION_FP32), 8,
                   real_at(products.device_input, 1, PRECISION_FP32), products.device_weight, 5, 4, 8);
    // The library's a is the weight, and its b the input.
    assert_true(gemm->a_alignment == 16 && gemm->b_alignment == 4 && gemm->result_alignment == 8);
    products_close(&products);
}

static void a_product_is_described(void **state) {
    (void)state;
    CudaGemm gemm = {};
    char text[256];
    gemm.m = 5, gemm.n = 7, gemm.k = 9;
    gemm.b_precision = PRECISION_BF16, gemm.result_precision = PRECISION_FP32;
    cuda_gemm_text(text, sizeof text, &gemm);
    assert_string_equal(text, "a product of m 5, n 7, k 9, of bf16, the result fp32");
    gemm.a_transposed = true;
    cuda_gemm_text(text, sizeof text, &gemm);
    assert_string_equal(text, "a product of m 5, n 7, k 9, a transposed, of bf16, the result fp32");
    gemm.a_transposed = false, gemm.b_transposed = true;
    gemm.b_precision = PRECISION_E5M2, gemm.result_precision = PRECISION_BF16;
    cuda_gemm_text(text, sizeof text, &gemm);
    assert_string_equal(text, "a product of m 5, n 7, k 9, b transposed, of e5m2, the result bf16");
}

// ---- Offers that are refused ----------------------------------------------------------

#ifdef ACCO_SIMT_H
// What `run` says on stderr is written to text.
static void say_into(char text[512], void (*run)(Products *products), Products *products) {
    Capture capture = capture_begin(stderr);
    run(products);
    capture_end(&capture, text, 512);
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_number_of_shapes_is_computed),
        cmocka_unit_test(what_gives_way_leaves_nothing),
        cmocka_unit_test(what_is_used_keeps_its_plan),
        cmocka_unit_test(a_limit_has_plans_of_its_own),
        cmocka_unit_test(alignments_are_those_of_their_operands),
        cmocka_unit_test(a_product_is_described),
        cmocka_unit_test(a_refused_offer_gives_way_to_the_next),
        cmocka_unit_test(a_failure_is_no_refusal),
    };
    test_random.state = random_hash(seed_of_tests(), 31);
    return cmocka_run_group_tests_name("cuda_matmul", tests, NULL, NULL);
}
