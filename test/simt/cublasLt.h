// cublasLt.h: stands in for the library where kernels are emulated (simt.h). Behind the
// part of its interface that this project uses there are plain loops. It offers two
// algorithms, which add in opposite orders. Where it may, they add two halves of k that are
// rounded to the type of the result. It ignores other preferences and workspaces, and
// counts what it describes, so that tests see what the program keeps.
//
// Products of FP8 are as the library's documentation has them for GPUs before 10.0: a is
// transposed and b is not, one of them at least is e4m3, rows of operands lie a multiple
// of 16 bytes apart, there is one scale for each operand, and here the result is bf16. An H100
// refused scales that were not aligned to 16 bytes, which the documentation does not say, and
// refused them in the product alone: the heuristic and the check took them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <math.h>

#include <vector>

#ifdef ACCO_SIMT_H // the toolkit has it in a header of its own
typedef enum cudaDataType_t {
    CUDA_R_32F = 0,
    CUDA_R_16BF = 14,
    CUDA_R_8F_E4M3 = 28,
    CUDA_R_8F_E5M2 = 29
} cudaDataType_t;
#endif
typedef enum cublasStatus_t {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_ARCH_MISMATCH = 8,
    CUBLAS_STATUS_EXECUTION_FAILED = 13,
    CUBLAS_STATUS_NOT_SUPPORTED = 15
} cublasStatus_t;
typedef enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68 } cublasComputeType_t;
typedef enum cublasOperation_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 } cublasOperation_t;
enum cublasLtMatmulDescAttributes_t {
    CUBLASLT_MATMUL_DESC_TRANSA = 3,
    CUBLASLT_MATMUL_DESC_TRANSB = 4,
    CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET = 15,
    CUBLASLT_MATMUL_DESC_A_SCALE_POINTER = 17,
    CUBLASLT_MATMUL_DESC_B_SCALE_POINTER = 18
};
enum { CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2, CUBLASLT_REDUCTION_SCHEME_MASK = 7 };
enum cublasLtMatmulPreferenceAttributes_t {
    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
    CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8
};

enum cublasLtMatrixLayoutAttribute_t {
    CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT = 5,
    CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET = 6
};

struct SimtMatmulDesc {
    cublasOperation_t a, b;
    int processors; // that the product may count on; 0: all
    const float *a_scale, *b_scale;
};
struct SimtMatrixLayout {
    cudaDataType_t type;
    uint64_t rows, columns;
    int64_t stride;
    int32_t count = 1;  // of matrices
    int64_t offset = 0; // elements from one to the next
};
typedef struct SimtProducts *cublasLtHandle_t;
typedef SimtMatmulDesc *cublasLtMatmulDesc_t;
typedef SimtMatrixLayout *cublasLtMatrixLayout_t;
struct SimtPreference {
    uint32_t reduction_schemes;
};
typedef SimtPreference *cublasLtMatmulPreference_t;
struct cublasLtMatmulAlgo_t {
    uint64_t data[8]; // its number, 0 or 1; whether it rounds the halves of a sum, 0 or 1
};
struct cublasLtMatmulHeuristicResult_t {
    cublasLtMatmulAlgo_t algo;
    size_t workspaceSize;
    cublasStatus_t state; // without success the members before it mean nothing
};

// Descriptions of products and matrices: how many there are, and how many products were
// ever described.
inline int &simt_library_objects() {
    static int count = 0;
    return count;
}
inline int &simt_library_products() {
    static int count = 0;
    return count;
}

inline cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    *handle = nullptr;
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t) { return CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *operation, cublasComputeType_t,
                                               cudaDataType_t) {
    *operation = new SimtMatmulDesc{};
    simt_library_objects()++;
    simt_library_products()++;
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t operation) {
    delete operation;
    simt_library_objects()--;
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation,
                                                     cublasLtMatmulDescAttributes_t attribute,
                                                     const void *value, size_t) {
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA: operation->a = *(const cublasOperation_t *)value; break;
    case CUBLASLT_MATMUL_DESC_TRANSB: operation->b = *(const cublasOperation_t *)value; break;
    case CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET: operation->processors = *(const int *)value; break;
    case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER: operation->a_scale = *(const float *const *)value; break;
    case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER: operation->b_scale = *(const float *const *)value; break;
    default: return CUBLAS_STATUS_INVALID_VALUE;
    }
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType_t type,
                                                 uint64_t rows, uint64_t columns, int64_t stride) {
    if (stride < (int64_t)rows) { return CUBLAS_STATUS_INVALID_VALUE; }
    *layout = new SimtMatrixLayout{type, rows, columns, stride};
    simt_library_objects()++;
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                       cublasLtMatrixLayoutAttribute_t attribute,
                                                       const void *value, size_t) {
    if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) { layout->count = *(const int32_t *)value; }
    if (attribute == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET) {
        layout->offset = *(const int64_t *)value;
    }
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    delete layout;
    simt_library_objects()--;
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) {
    *preference = new SimtPreference{CUBLASLT_REDUCTION_SCHEME_MASK};
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    delete preference;
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                           cublasLtMatmulPreferenceAttributes_t attribute,
                                                           const void *value, size_t) {
    if (attribute == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK) {
        preference->reduction_schemes = *(const uint32_t *)value;
    }
    return CUBLAS_STATUS_SUCCESS;
}
inline size_t simt_bytes(cudaDataType_t type) { return type == CUDA_R_32F ? 4 : type == CUDA_R_16BF ? 2 : 1; }
// Whether the description is one of a product that the library can do.
inline bool simt_can_multiply(const SimtMatmulDesc *operation, const SimtMatrixLayout *a,
                              const SimtMatrixLayout *b, const SimtMatrixLayout *d) {
    if (simt_bytes(a->type) > 1 && simt_bytes(b->type) > 1) { return a->type == b->type; }
    return simt_bytes(a->type) == simt_bytes(b->type) && operation->a == CUBLAS_OP_T &&
           operation->b == CUBLAS_OP_N && (a->type == CUDA_R_8F_E4M3 || b->type == CUDA_R_8F_E4M3) &&
           a->stride % 16 == 0 && b->stride % 16 == 0 && d->stride % 8 == 0 && d->type == CUDA_R_16BF &&
           operation->a_scale != nullptr && operation->b_scale != nullptr;
}
inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t operation,
                                                     cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                     cublasLtMatrixLayout_t, cublasLtMatrixLayout_t d,
                                                     cublasLtMatmulPreference_t preference, int,
                                                     cublasLtMatmulHeuristicResult_t *offers, int *count) {
    *count = 0;
    if (simt_algorithm_lacks() || !simt_can_multiply(operation, a, b, d)) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    uint64_t rounds =
        (preference->reduction_schemes & ~(uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) != 0;
    uint64_t first = operation->processors != 0 && simt_plans_differ();
    offers[0] = {{{first, rounds}}, 0, CUBLAS_STATUS_SUCCESS};
    offers[1] = {{{1 - first, rounds}}, 0, CUBLAS_STATUS_SUCCESS};
    if (simt_offer_is("state")) { offers[first].state = CUBLAS_STATUS_NOT_SUPPORTED; }
    *count = 2;
    return CUBLAS_STATUS_SUCCESS;
}
inline bool simt_knows(const cublasLtMatmulAlgo_t *algorithm) {
    static const uint64_t zeros[6] = {0};
    return algorithm->data[0] <= 1 && algorithm->data[1] <= 1 &&
           memcmp(algorithm->data + 2, zeros, sizeof zeros) == 0;
}
inline cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t d,
                                              const cublasLtMatmulAlgo_t *algorithm,
                                              cublasLtMatmulHeuristicResult_t *found) {
    bool first = algorithm->data[0] == 0,
         refused = first && (simt_offer_is("check") || (simt_offer_is("few") && d->count < 3));
    found->workspaceSize = first && simt_offer_is("workspace") ? SIZE_MAX : 0;
    return !refused && simt_knows(algorithm) && simt_can_multiply(operation, a, b, d)
               ? CUBLAS_STATUS_SUCCESS
               : CUBLAS_STATUS_NOT_SUPPORTED;
}
// The number of a code: a sign, exponents biased by 7 or 15, and 3 or 2 bits of mantissa.
// Of e4m3 only the largest code is a NaN, e5m2 has what IEEE's formats have.
inline float simt_fp8(uint8_t code, cudaDataType_t type) {
    bool wide = type == CUDA_R_8F_E5M2;
    int places = wide ? 2 : 3, bias = wide ? 15 : 7, exponent = (code & 127) >> places,
        mantissa = code & ((1 << places) - 1);
    float sign = code >> 7 ? -1.0f : 1.0f;
    if (wide && exponent == 31) { return mantissa == 0 ? sign * INFINITY : NAN; }
    if (!wide && (code & 127) == 127) { return NAN; }
    if (exponent == 0) { return sign * ldexpf((float)mantissa, 1 - bias - places); }
    return sign * ldexpf((float)(mantissa + (1 << places)), exponent - bias - places);
}
inline float simt_element(const void *data, size_t place, cudaDataType_t type) {
    if (type == CUDA_R_32F) { return ((const float *)data)[place]; }
    if (type == CUDA_R_16BF) { return __bfloat162float(((const __nv_bfloat16 *)data)[place]); }
    return simt_fp8(((const uint8_t *)data)[place], type);
}
// The operand as floats: (rows, columns) after transposition, row after row. The
// library's matrices are stored column after column.
inline std::vector<float> simt_operand(const void *data, const SimtMatrixLayout *layout, bool transposed,
                                       uint64_t rows, uint64_t columns) {
    std::vector<float> result(rows * columns);
    for (uint64_t row = 0; row < rows; row++) {
        for (uint64_t column = 0; column < columns; column++) {
            size_t place =
                transposed ? row * (size_t)layout->stride + column : column * (size_t)layout->stride + row;
            result[row * columns + column] = simt_element(data, place, layout->type);
        }
    }
    return result;
}

inline void simt_check_processors(cublasLtMatmulDesc_t operation) {
    int taken = simt_processors_taken(), left = taken < SIMT_PROCESSORS ? SIMT_PROCESSORS - taken : 0;
    if (taken > 0 && operation->processors != 0 && operation->processors != left) {
        simt_fail("a product is not planned for the processors that NCCL leaves");
    }
}

inline float simt_round(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

// One of the products.
inline void simt_product(cublasLtMatmulDesc_t operation, float scale, const void *a,
                         cublasLtMatrixLayout_t a_layout, const void *b, cublasLtMatrixLayout_t b_layout,
                         float keep, const void *c, void *d, cublasLtMatrixLayout_t d_layout,
                         const cublasLtMatmulAlgo_t *algorithm) {
    bool a_transposed = operation->a == CUBLAS_OP_T, b_transposed = operation->b == CUBLAS_OP_T;
    uint64_t m = d_layout->rows, n = d_layout->columns, k = a_transposed ? a_layout->rows : a_layout->columns;
    std::vector<float> left = simt_operand(b, b_layout, !b_transposed, n, k),
                       right = simt_operand(a, a_layout, !a_transposed, k, m);
    std::vector<float> sum(m);
    if (simt_bytes(a_layout->type) == 1) { scale *= *operation->a_scale * *operation->b_scale; }
    bool reversed = algorithm->data[0] == 1;
    for (uint64_t column = 0; column < n; column++) {
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (uint64_t step = 0; step < k; step++) {
            uint64_t i = reversed ? k - 1 - step : step;
            float factor = left[column * k + i];
            for (uint64_t row = 0; row < m; row++) { sum[row] += factor * right[i * m + row]; }
            if (step + 1 != k / 2 || d_layout->type == CUDA_R_32F || algorithm->data[1] == 0) { continue; }
            for (uint64_t row = 0; row < m; row++) { sum[row] = simt_round(sum[row]); }
        }
        for (uint64_t row = 0; row < m; row++) {
            size_t place = column * (size_t)d_layout->stride + row;
            bool is_float = d_layout->type == CUDA_R_32F;
            float value = scale * sum[row];
            if (keep != 0.0f) {
                value += keep * (is_float ? ((const float *)c)[place]
                                          : __bfloat162float(((const __nv_bfloat16 *)c)[place]));
            }
            if (is_float) {
                ((float *)d)[place] = value;
            } else {
                ((__nv_bfloat16 *)d)[place] = __float2bfloat16_rn(value);
            }
        }
    }
}

// Other products have no scales.
inline bool simt_scales_are_aligned(const SimtMatmulDesc *operation) {
    return (uintptr_t)operation->a_scale % 16 == 0 && (uintptr_t)operation->b_scale % 16 == 0;
}
// d = alpha op(a) op(b) + beta c. c has the layout of d, and is read unless beta is 0.
inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t operation, const void *alpha,
                                     const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                                     cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                                     cublasLtMatrixLayout_t, void *d, cublasLtMatrixLayout_t d_layout,
                                     const cublasLtMatmulAlgo_t *algorithm, void *, size_t, cudaStream_t) {
    simt_check_processors(operation);
    bool first = algorithm->data[0] == 0;
    if (simt_product_fails() || (first && simt_offer_is("launch"))) { return CUBLAS_STATUS_EXECUTION_FAILED; }
    if ((first && simt_offer_is("run")) || !simt_knows(algorithm) ||
        !simt_can_multiply(operation, a_layout, b_layout, d_layout) || !simt_scales_are_aligned(operation)) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    bool a_transposed = operation->a == CUBLAS_OP_T, b_transposed = operation->b == CUBLAS_OP_T;
    uint64_t k = a_transposed ? a_layout->rows : a_layout->columns;
    uint64_t a_rows = a_transposed ? a_layout->columns : a_layout->rows,
             b_columns = b_transposed ? b_layout->rows : b_layout->columns;
    uint64_t b_rows = b_transposed ? b_layout->columns : b_layout->rows;
    int32_t count = d_layout->count;
    if (a_rows != d_layout->rows || b_columns != d_layout->columns || b_rows != k ||
        a_layout->count != count || b_layout->count != count) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    auto at = [](const void *data, cublasLtMatrixLayout_t layout, int32_t i) {
        return (const char *)data + i * layout->offset * (int64_t)simt_bytes(layout->type);
    };
    for (int32_t i = 0; i < count; i++) {
        simt_product(operation, *(const float *)alpha, at(a, a_layout, i), a_layout, at(b, b_layout, i),
                     b_layout, *(const float *)beta, at(c, d_layout, i), (void *)at(d, d_layout, i), d_layout,
                     algorithm);
    }
    return CUBLAS_STATUS_SUCCESS;
}
