// matmul.cuh: the matrix products of the linear layers and of the LM head, on a GPU.
//
// Contract: kernels/kernels.h (matmul_forward, matmul_backward_input,
// matmul_backward_weight); the plain loops are in kernels/cpu/matmul.h.
//
// cuBLASLt, the library, stores matrices column by column, so to it a row-major (rows, columns)
// array is the transposed matrix. Therefore every product here is written for the transposed
// result: of y = x W^T it is told y^T = W x^T. Operands are in the stream's precision, sums are
// fp32 (never TF32, and with FP8 never the library's fast accumulation). Weight gradients are
// fp32, and the product itself adds to them (beta = 1), or sets them where a sum begins. Why no
// epilogue of the library is used: docs/kernels.md, section 8.
//
// For every shape the library offers several algorithms. Its first offer is taken, so that
// runs repeat bit for bit. What the quickest would save, dev/gpu/bench measures. An offer that
// the library itself refuses gives way to the next one, once, when the plan is made or first
// run, and a line says so. Both follow from the shape, the version of the library and the kind
// of GPU, and from nothing that was measured, so all ranks with the same GPUs take the same one.
//
// The algorithm is kept in a plan, for the shapes used last: training has about twenty, but every
// batch of an evaluation may have rows of its own. Where an exchange may be under way
// (scheduler.h), a shape has a second plan, which counts on fewer multiprocessors. Some
// products are several at once, of matrices that lie one behind the other: their algorithm
// is chosen for the largest number of them, so that bits do not depend on how many there are,
// and must be able to do fewer.
//
// Products of FP8 sum over what lies side by side in both operands: GPUs before 10.0 have
// no others.
#pragma once

#include <cublasLt.h>

#include "kernels/cpu/matmul.h"
#include "kernels/cuda/language.cuh"

enum {
    CUDA_GEMM_SHAPES = 96, // whose plans a stream keeps: twice as many as training has
    CUDA_GEMM_OFFERS = 32  // algorithms asked for, for each shape
};

// result (n, m), rows result_stride apart, from the product of b and a. In the library's order,
// columns first: (m, n) = (m, k) (k, n).
typedef struct CudaGemm {
    int m, n, k;
    bool a_transposed, b_transposed;
    int a_stride, b_stride, result_stride;
    Precision a_precision, b_precision, result_precision;
    int most;                                            // products at once, see above
    int sm_count;                                        // as in CudaGemmLibrary
    uint32_t a_alignment, b_alignment, result_alignment; // bytes; filled in by cuda_gemm_align
    bool operator==(const CudaGemm &) const = default;
} CudaGemm;

// A shape and the algorithm chosen for it.
typedef struct CudaGemmPlan {
    CudaGemm gemm;
    uint64_t used; // the number of the latest product that did
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, result;
    cublasLtMatmulAlgo_t algorithm;
    int next;     // the library's offer behind the one that was taken
    bool has_run; // so its algorithm stays
} CudaGemmPlan;

// What a stream keeps for its products.
typedef struct CudaGemmLibrary {
    cublasLtHandle_t handle;
    void *workspace;   // (GEMM_WORKSPACE_BYTES)
    int sm_count;      // multiprocessors that products may count on now; 0: all
    uint64_t products; // so far
    bool has_refused;  // a first offer, which was said
    int count;         // of plans
    CudaGemmPlan plans[CUDA_GEMM_SHAPES];
} CudaGemmLibrary;

#define CUBLAS_CHECK(call) cublas_check((call), #call)

static inline void cublas_check(cublasStatus_t status, const char *call) {
    if (status == CUBLAS_STATUS_SUCCESS) { return; }
    char text[512];
    snprintf(text, sizeof text, "cuBLASLt: status %d: %s", (int)status, call);
    failure_report(text);
}

template <typename T>
static inline void cuda_gemm_set(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute,
                                 const T &value) {
    CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(layout, attribute, &value, sizeof value));
}

template <typename T>
static inline void cuda_gemm_set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
                                 const T &value) {
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof value));
}

template <typename T>
static inline void cuda_gemm_set(cublasLtMatmulPreference_t preference,
                                 cublasLtMatmulPreferenceAttributes_t attribute, const T &value) {
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
}

static inline void cuda_gemm_layout(cublasLtMatrixLayout_t *layout, const CudaGemm *gemm, Precision precision,
                                    bool transposed, int rows, int columns, int stride) {
    static const cudaDataType_t types[] = {CUDA_R_32F, CUDA_R_16BF, CUDA_R_8F_E4M3, CUDA_R_8F_E5M2};
    int64_t stored_columns = transposed ? rows : columns, offset = stride * stored_columns;
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(layout, types[precision], (uint64_t)(transposed ? columns : rows),
                                            (uint64_t)stored_columns, stride));
    if (gemm->most > 1) {
        cuda_gemm_set(*layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, gemm->most);
        cuda_gemm_set(*layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, offset);
    }
}

static inline void cuda_gemm_describe(CudaGemmPlan *plan) {
    const CudaGemm *gemm = &plan->gemm;
    const cublasOperation_t operations[] = {CUBLAS_OP_N, CUBLAS_OP_T}; // by whether it is transposed
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&plan->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    cuda_gemm_set(plan->operation, CUBLASLT_MATMUL_DESC_TRANSA, operations[gemm->a_transposed]);
    cuda_gemm_set(plan->operation, CUBLASLT_MATMUL_DESC_TRANSB, operations[gemm->b_transposed]);
    if (gemm->sm_count > 0) {
        cuda_gemm_set(plan->operation, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, gemm->sm_count);
    }
    if (gemm->a_precision > PRECISION_BF16) { // the library sees that there will be scales
        cuda_gemm_set(plan->operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, plan);
        cuda_gemm_set(plan->operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, plan);
    }
    cuda_gemm_layout(&plan->a, gemm, gemm->a_precision, gemm->a_transposed, gemm->m, gemm->k, gemm->a_stride);
    cuda_gemm_layout(&plan->b, gemm, gemm->b_precision, gemm->b_transposed, gemm->k, gemm->n, gemm->b_stride);
    cuda_gemm_layout(&plan->result, gemm, gemm->result_precision, false, gemm->m, gemm->n,
                     gemm->result_stride);
}

// The alignment in bytes that the library may rely on: the largest power of two, 16 at
// most, that divides both the address and the row length.
static inline uint32_t cuda_gemm_alignment(const void *place, int stride, Precision precision) {
    size_t common = (size_t)(uintptr_t)place | (size_t)stride * precision_bytes(precision) | 16;
    return (uint32_t)(common & (~common + 1));
}

// The algorithms that the library proposes for a plan, the best first by its own estimate.
static inline cublasStatus_t cuda_gemm_ask(const CudaGemmLibrary *library, const CudaGemmPlan *plan,
                                           cublasLtMatmulHeuristicResult_t offers[CUDA_GEMM_OFFERS],
                                           int *count) {
    const CudaGemm *gemm = &plan->gemm;
    cublasLtMatmulPreference_t preference;
    size_t workspace_bytes = GEMM_WORKSPACE_BYTES;
    *count = 0;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    cuda_gemm_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
    // A product that is cut along k adds its parts in fp32, also where the result is
    // bf16: the library would else be free to round the parts to the result's type first.
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    if (gemm->result_precision != PRECISION_FP32) {
        cuda_gemm_set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes);
    }
    cuda_gemm_set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, gemm->a_alignment);
    cuda_gemm_set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, gemm->b_alignment);
    cuda_gemm_set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, gemm->result_alignment);
    cuda_gemm_set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, gemm->result_alignment);
    cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(library->handle, plan->operation, plan->a, plan->b, plan->result,
                                       plan->result, preference, CUDA_GEMM_OFFERS, offers, count);
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    return status;
}

// From now on the plan is one of `count` products at once.
static inline void cuda_gemm_set_count(const CudaGemmPlan *plan, int count) {
    const cublasLtMatrixLayout_t layouts[] = {plan->a, plan->b, plan->result};
    for (int i = 0; i < 3 && plan->gemm.most > 1; i++) {
        cuda_gemm_set(layouts[i], CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, count);
    }
}

// Whether the library can do what it offers, in the workspace there is, for every count of
// products.
static inline bool cuda_gemm_is_usable(const CudaGemmLibrary *library, const CudaGemmPlan *plan,
                                       const cublasLtMatmulHeuristicResult_t *offer) {
    cublasStatus_t status = offer->state;
    int count = 1;
    do {
        cublasLtMatmulHeuristicResult_t found = *offer;
        if (status != CUBLAS_STATUS_SUCCESS) { return false; }
        cuda_gemm_set_count(plan, count);
        status = cublasLtMatmulAlgoCheck(library->handle, plan->operation, plan->a, plan->b, plan->result,
                                         plan->result, &offer->algo, &found);
        if (found.workspaceSize > GEMM_WORKSPACE_BYTES) { return false; }
    } while (++count <= plan->gemm.most);
    return status == CUBLAS_STATUS_SUCCESS;
}

// Takes the next of the library's offers for the plan that can be used: for a new one its first.
static inline cublasStatus_t cuda_gemm_take(const CudaGemmLibrary *library, CudaGemmPlan *plan) {
    cublasLtMatmulHeuristicResult_t offers[CUDA_GEMM_OFFERS];
    int count;
    cublasStatus_t status = cuda_gemm_ask(library, plan, offers, &count);
    while (plan->next < count && !cuda_gemm_is_usable(library, plan, &offers[plan->next])) { plan->next++; }
    if (status == CUBLAS_STATUS_SUCCESS && plan->next >= count) { return CUBLAS_STATUS_NOT_SUPPORTED; }
    if (status == CUBLAS_STATUS_SUCCESS) { plan->algorithm = offers[plan->next++].algo; }
    return status;
}

// Puts the product into the queue. Sides and strides are the plan's, whose a is the product's b.
static inline cublasStatus_t cuda_gemm_call(const Stream *stream, const CudaGemmPlan *plan,
                                            const Matmul *work) {
    const CudaGemmLibrary *library = (const CudaGemmLibrary *)stream->gemm;
    float beta = work->accumulate ? 1.0f : 0.0f;
    cuda_gemm_set_count(plan, work->count);
    return cublasLtMatmul(library->handle, plan->operation, &work->scale, work->b, plan->a, work->a, plan->b,
                          &beta, work->result, plan->result, work->result, plan->result, &plan->algorithm,
                          library->workspace, GEMM_WORKSPACE_BYTES, (cudaStream_t)stream->queue);
}

// Whether the library says that the algorithm does not suit the product; it has then done nothing.
// Other errors, such as a launch that fails, may happen on one rank alone: no rank takes another
// algorithm because of them.
static inline bool cuda_gemm_is_refusal(cublasStatus_t status) {
    return status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE ||
           status == CUBLAS_STATUS_ARCH_MISMATCH;
}

static inline void cuda_gemm_text(char *text, size_t size, const CudaGemm *gemm) {
    snprintf(text, size, "a product of m %d, n %d, k %d%s%s, of %s, the result %s", gemm->m, gemm->n, gemm->k,
             gemm->a_transposed ? ", a transposed" : "", gemm->b_transposed ? ", b transposed" : "",
             precision_name(gemm->b_precision), precision_name(gemm->result_precision));
}

static inline void cuda_gemm_check(cublasStatus_t status, const char *what, const CudaGemm *gemm) {
    if (status == CUBLAS_STATUS_SUCCESS) { return; }
    char text[256];
    size_t length = (size_t)snprintf(text, sizeof text, "%s ", what);
    cuda_gemm_text(text + length, sizeof text - length, gemm);
    cublas_check(status, text);
}

// cuda_gemm_call for a plan that may be new: an offer that is refused gives way to the next one.
static inline cublasStatus_t cuda_gemm_run(Stream *stream, CudaGemmPlan *plan, const Matmul *work) {
    CudaGemmLibrary *library = (CudaGemmLibrary *)stream->gemm;
    cublasStatus_t status = cuda_gemm_call(stream, plan, work);
    while (!plan->has_run && cuda_gemm_is_refusal(status) &&
           cuda_gemm_take(library, plan) == CUBLAS_STATUS_SUCCESS) {
        status = cuda_gemm_call(stream, plan, work);
    }
    if (status == CUBLAS_STATUS_SUCCESS && plan->next > 1 && !library->has_refused) {
        char text[256];
        cuda_gemm_text(text, sizeof text, &plan->gemm);
        fprintf(stderr,
                "train_gpt: cuBLASLt refuses its own first offer for %s; number %d is taken. Others are not "
                "named\n",
                text, plan->next);
        library->has_refused = true;
    }
    plan->has_run |= status == CUBLAS_STATUS_SUCCESS;
    return status;
}

// The library has read a plan when its call returns: what is under way does not need it.
static inline void cuda_gemm_forget(CudaGemmPlan *plan) {
    CUBLAS_CHECK(cublasLtMatmulDescDestroy(plan->operation));
    CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(plan->a));
    CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(plan->b));
    CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(plan->result));
}

// The plan of a shape, made when the shape is first met or was forgotten. If there is no room,
// the plan that was not used for longest gives way.
static inline CudaGemmPlan *cuda_gemm_plan(CudaGemmLibrary *library, const CudaGemm *gemm) {
    CudaGemmPlan *plan = library->plans, *end = plan + library->count, *oldest = plan;
    for (; plan < end && !(plan->gemm == *gemm); plan++) {
        oldest = plan->used < oldest->used ? plan : oldest;
    }
    bool is_known = plan < end;
    if (!is_known && library->count == CUDA_GEMM_SHAPES) {
        cuda_gemm_forget(oldest);
        plan = oldest;
    } else if (!is_known) {
        library->count++;
    }
    plan->used = ++library->products;
    if (is_known) { return plan; }
    plan->gemm = *gemm;
    plan->next = 0;
    plan->has_run = false;
    cuda_gemm_describe(plan);
    cuda_gemm_check(cuda_gemm_take(library, plan), "no algorithm for", gemm);
    return plan;
}

static inline void cuda_gemm_align(CudaGemm *gemm, const void *a, const void *b, const void *result) {
    gemm->a_alignment = cuda_gemm_alignment(a, gemm->a_stride, gemm->a_precision);
    gemm->b_alignment = cuda_gemm_alignment(b, gemm->b_stride, gemm->b_precision);
    gemm->result_alignment = cuda_gemm_alignment(result, gemm->result_stride, gemm->result_precision);
}

// Opens the library for a stream. workspace (GEMM_WORKSPACE_BYTES): device memory.
static inline void cuda_gemm_open(Stream *stream, void *workspace) {
    CudaGemmLibrary *library = (CudaGemmLibrary *)calloc(1, sizeof *library);
    assert((uintptr_t)workspace % 256 == 0); // the library requires this
    CUBLAS_CHECK(cublasLtCreate(&library->handle));
    library->workspace = workspace;
    stream->gemm = library;
}

static inline void cuda_gemm_limit(Stream *stream, int sm_count) {
    ((CudaGemmLibrary *)stream->gemm)->sm_count = sm_count;
}

static inline void cuda_gemm_close(Stream *stream) {
    CudaGemmLibrary *library = (CudaGemmLibrary *)stream->gemm;
    for (int i = 0; i < library->count; i++) { cuda_gemm_forget(&library->plans[i]); }
    CUBLAS_CHECK(cublasLtDestroy(library->handle));
    free(library);
    stream->gemm = NULL;
}

// The library stores matrices column by column: result^T (N, M) = b^T (N, K) a^T (K, M).
static inline void cuda_matmul(Stream *stream, const Matmul *work) {
    CudaGemmLibrary *library = (CudaGemmLibrary *)stream->gemm;
    CudaGemm gemm = {.m = work->N,
                     .n = work->M,
                     .k = work->K,
                     .a_transposed = work->b_transposed,
                     .b_transposed = work->a_transposed,
                     .a_stride = work->b_stride,
                     .b_stride = work->a_stride,
                     .result_stride = work->result_stride,
                     .a_precision = work->b_precision,
                     .b_precision = work->precision,
                     .result_precision = work->result_precision,
                     .most = work->most,
                     .sm_count = library->sm_count};
    cuda_gemm_align(&gemm, work->b, work->a, work->result);
    CudaGemmPlan *plan = cuda_gemm_plan(library, &gemm);
    if (work->a_scale != NULL) {
        cuda_gemm_set(plan->operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, work->b_scale);
        cuda_gemm_set(plan->operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, work->a_scale);
    }
    cuda_gemm_check(cuda_gemm_run(stream, plan, work), "cannot compute", &gemm);
}
