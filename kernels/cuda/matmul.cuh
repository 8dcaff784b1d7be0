// matmul.cuh: matrix products on a GPU, by cuBLASLt: a library's field, and tensor cores
// for bf16.
//
// The library counts columns first; a row-major (rows, columns) array is its (columns,
// rows) matrix, so every product here is written for the transposed result. Operands are
// in the stream's precision, sums are fp32 (never TF32). Weight gradients are fp32 and
// added to by the product itself (beta = 1). No epilogue is used: bias and GELU need a
// pass of their own for what they keep, and the residual addition is part of the next
// LayerNorm.
//
// For every shape the library offers several algorithms. Its first offer is taken, so
// that runs repeat bit for bit. If asked to, they are timed instead, once, in a first
// pass over a model whose results do not matter (products_tune); afterwards a shape
// always uses the same one. All work space is the one buffer that was planned.
#ifndef ACCO_KERNELS_CUDA_MATMUL_CUH
#define ACCO_KERNELS_CUDA_MATMUL_CUH

#include <cublasLt.h>

#include "kernels/cuda/language.cuh"

enum {
    CUDA_PRODUCTS_WORKSPACE = 32 << 20,
    CUDA_PRODUCT_SHAPES = 64,
    CUDA_PRODUCT_OFFERS = 8,
    CUDA_PRODUCT_TRIES = 3
};

// result (n, m), rows result_stride apart, = or += the product of b and a as the library
// sees them: (m, k) (k, n), columns first.
typedef struct CudaProduct {
    int m, n, k;
    bool a_transposed, b_transposed;
    int a_stride, b_stride, result_stride;
    Precision precision;        // of a and b
    Precision result_precision; // of the result
    bool accumulate;
    uint32_t a_alignment, b_alignment, result_alignment; // bytes; filled in
} CudaProduct;

typedef struct CudaProductPlan {
    CudaProduct product;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, result;
    cublasLtMatmulAlgo_t algorithm;
} CudaProductPlan;

typedef struct CudaProducts {
    cublasLtHandle_t handle;
    void *workspace; // (CUDA_PRODUCTS_WORKSPACE)
    int processors;  // that products may count on; 0: all
    bool tuning;
    int count;
    CudaProductPlan plans[CUDA_PRODUCT_SHAPES];
} CudaProducts;

#define CUBLAS_CHECK(call) cublas_check((call), #call)

static inline void cublas_check(cublasStatus_t status, const char *call) {
    if (status == CUBLAS_STATUS_SUCCESS) { return; }
    fprintf(stderr, "train_gpt: cuBLASLt: status %d: %s\n", (int)status, call);
    fflush(stderr);
    _exit(EXIT_SYSTEM_FAILURE);
}

static inline cudaDataType_t cuda_data_type(Precision precision) {
    return precision == PRECISION_FP32 ? CUDA_R_32F : CUDA_R_16BF;
}

// ---------------------------------------------------------------------------------------
// Plans

static inline bool cuda_product_is_same(const CudaProduct *x, const CudaProduct *y) {
    return x->m == y->m && x->n == y->n && x->k == y->k && x->a_transposed == y->a_transposed &&
           x->b_transposed == y->b_transposed && x->a_stride == y->a_stride && x->b_stride == y->b_stride &&
           x->result_stride == y->result_stride && x->precision == y->precision &&
           x->result_precision == y->result_precision && x->accumulate == y->accumulate &&
           x->a_alignment == y->a_alignment && x->b_alignment == y->b_alignment &&
           x->result_alignment == y->result_alignment;
}

static inline void cuda_product_layout(cublasLtMatrixLayout_t *layout, Precision precision, bool transposed,
                                       int rows, int columns, int stride) {
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(layout, cuda_data_type(precision),
                                            (uint64_t)(transposed ? columns : rows),
                                            (uint64_t)(transposed ? rows : columns), stride));
}

static inline void cuda_product_describe(const CudaProducts *products, CudaProductPlan *plan) {
    const CudaProduct *product = &plan->product;
    cublasOperation_t a_operation = product->a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t b_operation = product->b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    int32_t processors = products->processors;
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&plan->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(plan->operation, CUBLASLT_MATMUL_DESC_TRANSA, &a_operation,
                                                sizeof a_operation));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(plan->operation, CUBLASLT_MATMUL_DESC_TRANSB, &b_operation,
                                                sizeof b_operation));
    if (processors > 0) {
        CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(plan->operation, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET,
                                                    &processors, sizeof processors));
    }
    cuda_product_layout(&plan->a, product->precision, product->a_transposed, product->m, product->k,
                        product->a_stride);
    cuda_product_layout(&plan->b, product->precision, product->b_transposed, product->k, product->n,
                        product->b_stride);
    cuda_product_layout(&plan->result, product->result_precision, false, product->m, product->n,
                        product->result_stride);
}

// The largest power of two that divides the address and the row length, 16 at most; what
// the library may rely on.
static inline uint32_t cuda_product_alignment(const void *place, int stride, Precision precision) {
    size_t common = (size_t)(uintptr_t)place | (size_t)stride * precision_bytes(precision) | 16;
    return (uint32_t)(common & (~common + 1));
}

static inline void cuda_prefer_alignment(cublasLtMatmulPreference_t preference,
                                         cublasLtMatmulPreferenceAttributes_t attribute,
                                         const uint32_t *bytes) {
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, bytes, sizeof *bytes));
}

static inline int cuda_product_offers(const CudaProducts *products, const CudaProductPlan *plan,
                                      cublasLtMatmulHeuristicResult_t offers[CUDA_PRODUCT_OFFERS]) {
    const CudaProduct *product = &plan->product;
    cublasLtMatmulPreference_t preference;
    size_t room = CUDA_PRODUCTS_WORKSPACE;
    int count = 0;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                      &room, sizeof room));
    cuda_prefer_alignment(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &product->a_alignment);
    cuda_prefer_alignment(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &product->b_alignment);
    cuda_prefer_alignment(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &product->result_alignment);
    cuda_prefer_alignment(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &product->result_alignment);
    CUBLAS_CHECK(cublasLtMatmulAlgoGetHeuristic(products->handle, plan->operation, plan->a, plan->b,
                                                plan->result, plan->result, preference, CUDA_PRODUCT_OFFERS,
                                                offers, &count));
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    if (count == 0) { cublas_check(CUBLAS_STATUS_NOT_SUPPORTED, "no algorithm for a product of this shape"); }
    return count;
}

static inline cublasStatus_t cuda_product_run(Stream *stream, const CudaProductPlan *plan,
                                              const cublasLtMatmulAlgo_t *algorithm, const void *a,
                                              const void *b, void *result) {
    const CudaProducts *products = (const CudaProducts *)stream->products;
    float one = 1.0f, beta = plan->product.accumulate ? 1.0f : 0.0f;
    return cublasLtMatmul(products->handle, plan->operation, &one, a, plan->a, b, plan->b, &beta, result,
                          plan->result, result, plan->result, algorithm, products->workspace,
                          CUDA_PRODUCTS_WORKSPACE, (cudaStream_t)stream->queue);
}

// Milliseconds of the quickest of some runs; infinite where the algorithm does not work.
static inline float cuda_product_time(Stream *stream, const CudaProductPlan *plan,
                                      const cublasLtMatmulAlgo_t *algorithm, const void *a, const void *b,
                                      void *result) {
    cudaEvent_t began, ended;
    float best = INFINITY;
    CUDA_CHECK(cudaEventCreate(&began));
    CUDA_CHECK(cudaEventCreate(&ended));
    for (int i = 0; i < CUDA_PRODUCT_TRIES; i++) {
        float milliseconds = INFINITY;
        CUDA_CHECK(cudaEventRecord(began, (cudaStream_t)stream->queue));
        if (cuda_product_run(stream, plan, algorithm, a, b, result) != CUBLAS_STATUS_SUCCESS) { break; }
        CUDA_CHECK(cudaEventRecord(ended, (cudaStream_t)stream->queue));
        stream_settle(stream);
        CUDA_CHECK(cudaEventElapsedTime(&milliseconds, began, ended));
        best = fminf(best, milliseconds);
    }
    CUDA_CHECK(cudaEventDestroy(began));
    CUDA_CHECK(cudaEventDestroy(ended));
    return best;
}

static inline void cuda_product_choose(Stream *stream, CudaProductPlan *plan, const void *a, const void *b,
                                       void *result) {
    const CudaProducts *products = (const CudaProducts *)stream->products;
    cublasLtMatmulHeuristicResult_t offers[CUDA_PRODUCT_OFFERS];
    int count = cuda_product_offers(products, plan, offers), best = 0;
    float least = INFINITY;
    for (int i = 0; products->tuning && i < count; i++) {
        float milliseconds = cuda_product_time(stream, plan, &offers[i].algo, a, b, result);
        if (milliseconds < least) {
            least = milliseconds;
            best = i;
        }
    }
    plan->algorithm = offers[best].algo;
}

static inline CudaProductPlan *cuda_product_plan(Stream *stream, const CudaProduct *product, const void *a,
                                                 const void *b, void *result) {
    CudaProducts *products = (CudaProducts *)stream->products;
    for (int i = 0; i < products->count; i++) {
        if (cuda_product_is_same(&products->plans[i].product, product)) { return &products->plans[i]; }
    }
    assert(products->count < CUDA_PRODUCT_SHAPES);
    CudaProductPlan *plan = &products->plans[products->count++];
    plan->product = *product;
    cuda_product_describe(products, plan);
    cuda_product_choose(stream, plan, a, b, result);
    return plan;
}

static inline void cuda_product(Stream *stream, CudaProduct *product, const void *a, const void *b,
                                void *result) {
    product->a_alignment = cuda_product_alignment(a, product->a_stride, product->precision);
    product->b_alignment = cuda_product_alignment(b, product->b_stride, product->precision);
    product->result_alignment =
        cuda_product_alignment(result, product->result_stride, product->result_precision);
    const CudaProductPlan *plan = cuda_product_plan(stream, product, a, b, result);
    CUBLAS_CHECK(cuda_product_run(stream, plan, &plan->algorithm, a, b, result));
}

// ---------------------------------------------------------------------------------------
// What kernels.h offers

// The stream's products from now on. workspace: device memory; processors: as in
// CudaProducts.
static inline void cuda_products_open(Stream *stream, void *workspace, int processors) {
    CudaProducts *products = (CudaProducts *)calloc(1, sizeof *products);
    assert((uintptr_t)workspace % 256 == 0); // the library's wish
    CUBLAS_CHECK(cublasLtCreate(&products->handle));
    products->workspace = workspace;
    products->processors = processors;
    stream->products = products;
}

static inline void cuda_products_close(Stream *stream) {
    CudaProducts *products = (CudaProducts *)stream->products;
    for (int i = 0; i < products->count; i++) {
        CUBLAS_CHECK(cublasLtMatmulDescDestroy(products->plans[i].operation));
        CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(products->plans[i].a));
        CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(products->plans[i].b));
        CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(products->plans[i].result));
    }
    CUBLAS_CHECK(cublasLtDestroy(products->handle));
    free(products);
    stream->products = NULL;
}

static inline void cuda_products_tune(Stream *stream, bool tuning) {
    ((CudaProducts *)stream->products)->tuning = tuning;
}

static inline void cuda_matmul_forward(Stream *stream, Real *output, int output_stride, const Real *input,
                                       const Real *weight, int rows, int inputs, int outputs) {
    CudaProduct product = {
        outputs,           rows,  inputs, true, false, inputs, inputs, output_stride, stream->precision,
        stream->precision, false, 0,      0,    0};
    cuda_product(stream, &product, weight, input, output);
}

static inline void cuda_matmul_backward_input(Stream *stream, Real *d_input, int d_input_stride,
                                              const Real *d_output, int d_output_stride, const Real *weight,
                                              int rows, int inputs, int outputs) {
    CudaProduct product = {inputs,
                           rows,
                           outputs,
                           false,
                           false,
                           inputs,
                           d_output_stride,
                           d_input_stride,
                           stream->precision,
                           stream->precision,
                           false,
                           0,
                           0,
                           0};
    cuda_product(stream, &product, weight, d_output, d_input);
}

static inline void cuda_matmul_backward_weight(Stream *stream, float *d_weight, const Real *d_output,
                                               int d_output_stride, const Real *input, int rows, int inputs,
                                               int outputs) {
    CudaProduct product = {inputs, outputs,           rows,           false, true, inputs, d_output_stride,
                           inputs, stream->precision, PRECISION_FP32, true,  0,    0,      0};
    cuda_product(stream, &product, input, d_output, d_weight);
}

#endif
