// test_cuda_matmul.cu: what is kept for matrix products on the device: plans for the
// shapes used last, and nothing of the others.
//
// The products themselves are the library's; test_cuda_model.cu tests that it is asked
// for the right ones.
#include "test/cuda_kernels.h"

#include <time.h>

#include "kernels/cuda/matmul.cuh"

enum { INPUTS = 24, OUTPUTS = 40, SHAPES = 100 };

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
    CUDA_CHECK(cudaMalloc(&products.workspace, CUDA_GEMM_WORKSPACE));
    products.input = host_normals(&test_random, SHAPES * INPUTS, 1.0);
    products.weight = host_normals(&test_random, OUTPUTS * INPUTS, 1.0);
    products.output = (float *)malloc(SHAPES * OUTPUTS * sizeof(float));
    host_round(products.input, SHAPES * INPUTS, precision);
    host_round(products.weight, OUTPUTS * INPUTS, precision);
    products.device_input = device_reals(products.input, SHAPES * INPUTS, precision);
    products.device_weight = device_reals(products.weight, OUTPUTS * INPUTS, precision);
    products.device_output = (Real *)device_new(SHAPES * OUTPUTS * precision_bytes(precision));
    cuda_gemm_open(&products.stream, products.workspace, 0);
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
    cuda_matmul_forward(&products->stream, products->device_output, OUTPUTS, products->device_input,
                        products->device_weight, rows, INPUTS, OUTPUTS);
}

// Runs one and compares it with sums in fp64.
static void products_check(Products *products, int rows) {
    Precision precision = products->stream.precision;
    double worst = precision == PRECISION_FP32 ? 1e-4 : 0x1p-8;
    size_t count = (size_t)rows * OUTPUTS;
    products_run(products, rows);
    host_reals(products->output, products->device_output, count, precision);
    for (size_t i = 0; i < count; i++) {
        double sum = 0;
        for (size_t k = 0; k < INPUTS; k++) {
            sum += (double)products->input[i / OUTPUTS * INPUTS + k] *
                   (double)products->weight[i % OUTPUTS * INPUTS + k];
        }
        double difference = fabs((double)products->output[i] - sum);
        if (!(difference <= worst * fmax(1.0, fabs(sum)))) {
            fail_msg("%d rows, element %zu: %g, expected %g", rows, i, (double)products->output[i], sum);
        }
    }
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_number_of_shapes_is_computed),
        cmocka_unit_test(what_gives_way_leaves_nothing),
        cmocka_unit_test(what_is_used_keeps_its_plan),
    };
    uint64_t seed = (uint64_t)time(NULL);
    test_random.state = random_hash(seed, 31);
    print_message("seed %llu\n", (unsigned long long)seed);
    return cmocka_run_group_tests_name("cuda_matmul", tests, NULL, NULL);
}
