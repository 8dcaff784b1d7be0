// gelu_epilogues.cuh: products of the MLP that end with bias and GELU, with bias alone,
// or with GELU's derivative, in an epilogue of the library. The program does not use
// them: its products are followed by the kernels of kernels/cuda/gelu.cuh.
// dev/gpu/bench_cuda.cu times both forms, and test_cuda_matmul.cu compares their results.
// What each form costs: docs/kernels.md, section 8.
//
//   forward    saved = input weight^T + bias;  output = gelu(saved)
//   backward   d_input = (d_output weight) gelu'(saved);  d_bias = sum of d_input's rows
//   the next   d_weight += d_input^T input;  d_bias = sum of d_input's rows, in fp32
//
// How this differs from the program's form: `saved` contains the bias; whether gelu reads
// its input before or after that is rounded to `saved` is not documented; the bias
// gradient has the type of the product's result, bf16 in backward and fp32 in the next
// product; and it is overwritten, so that a kernel has to add it to the fp32 gradient.
// Everything else is bf16.
#pragma once

#include "kernels/cuda/column_sums.cuh"
#include "kernels/cuda/matmul.cuh"

// A product with an epilogue, planned when it is first run. All zeros: not yet planned.
typedef struct EpilogueProduct {
    bool planned;
    cublasStatus_t status; // without success the library cannot do it, and there is no plan
    CudaGemmPlan plan;
} EpilogueProduct;

// All that a product reads and writes. result (n, m) is the product of b and a.
typedef struct EpilogueArrays {
    const void *a, *b;
    void *result;
    void *saved; // (n, m): GELU's input; NULL: none
    void *bias;  // (m), or (n) for BGRADB: the bias, or its gradient; NULL: none
} EpilogueArrays;

static inline void epilogue_point(const CudaGemmPlan *plan, const EpilogueArrays *arrays) {
    if (arrays->saved != NULL) {
        cuda_gemm_set(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, arrays->saved);
    }
    if (arrays->bias != NULL) {
        cuda_gemm_set(plan->operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, arrays->bias);
    }
}

// The arrays of later runs must be aligned as those of the first.
static inline void epilogue_plan(Stream *stream, EpilogueProduct *product, const CudaGemm *gemm,
                                 cublasLtEpilogue_t epilogue, const EpilogueArrays *arrays) {
    const CudaGemmLibrary *library = (const CudaGemmLibrary *)stream->gemm;
    CudaGemmPlan *plan = &product->plan;
    int64_t stride = gemm->m;
    plan->gemm = *gemm;
    cuda_gemm_align(&plan->gemm, arrays->a, arrays->b, arrays->result);
    cuda_gemm_describe(plan);
    cuda_gemm_set(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
    if (arrays->saved != NULL) {
        cuda_gemm_set(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, stride);
    }
    epilogue_point(plan, arrays);
    product->status = cuda_gemm_take(library, plan);
    product->planned = true;
    if (product->status != CUBLAS_STATUS_SUCCESS) { cuda_gemm_forget(plan); }
}

// Queues the product. Returns the library's error if it has no algorithm for it, or if
// what it offers fails; then nothing was done, then and in all later calls.
static inline cublasStatus_t epilogue_run(Stream *stream, EpilogueProduct *product, const CudaGemm *gemm,
                                          cublasLtEpilogue_t epilogue, const EpilogueArrays *arrays) {
    if (!product->planned) { epilogue_plan(stream, product, gemm, epilogue, arrays); }
    if (product->status != CUBLAS_STATUS_SUCCESS) { return product->status; }
    epilogue_point(&product->plan, arrays);
    Matmul call = {.a = (const Real *)arrays->b,
                   .b = (const Real *)arrays->a,
                   .result = (Real *)arrays->result,
                   .accumulate = epilogue == CUBLASLT_EPILOGUE_BGRADB, // the gradient of a weight
                   .scale = 1.0f,
                   .count = 1};
    product->status = cuda_gemm_run(stream, &product->plan, &call);
    if (product->status != CUBLAS_STATUS_SUCCESS) { cuda_gemm_forget(&product->plan); }
    return product->status;
}

// Forgets the plan.
static inline void epilogue_close(EpilogueProduct *product) {
    if (product->planned && product->status == CUBLAS_STATUS_SUCCESS) { cuda_gemm_forget(&product->plan); }
    memset(product, 0, sizeof *product);
}

// ---- The operations. Arrays of bf16; returns as epilogue_run does ---------------------

// A product of operands in the stream's precision, with a result of the same kind.
static inline CudaGemm epilogue_gemm(const Stream *stream, int m, int n, int k, bool a_transposed,
                                     int a_stride, int b_stride, int result_stride) {
    return {.m = m,
            .n = n,
            .k = k,
            .a_transposed = a_transposed,
            .a_stride = a_stride,
            .b_stride = b_stride,
            .result_stride = result_stride,
            .a_precision = stream->precision,
            .b_precision = stream->precision,
            .result_precision = stream->precision};
}

// output, saved (rows, outputs); input (rows, inputs); weight (outputs, inputs); bias
// (outputs).
static inline cublasStatus_t epilogue_gelu_forward(Stream *stream, EpilogueProduct *product, Real *output,
                                                   Real *saved, const Real *input, const Real *weight,
                                                   const Real *bias, int rows, int inputs, int outputs) {
    CudaGemm gemm = epilogue_gemm(stream, outputs, rows, inputs, true, inputs, inputs, outputs);
    EpilogueArrays arrays = {weight, input, output, saved, (void *)(uintptr_t)bias};
    return epilogue_run(stream, product, &gemm, CUBLASLT_EPILOGUE_GELU_AUX_BIAS, &arrays);
}

// saved (rows, outputs), and nothing else.
static inline cublasStatus_t epilogue_bias_forward(Stream *stream, EpilogueProduct *product, Real *saved,
                                                   const Real *input, const Real *weight, const Real *bias,
                                                   int rows, int inputs, int outputs) {
    CudaGemm gemm = epilogue_gemm(stream, outputs, rows, inputs, true, inputs, inputs, outputs);
    EpilogueArrays arrays = {weight, input, saved, NULL, (void *)(uintptr_t)bias};
    return epilogue_run(stream, product, &gemm, CUBLASLT_EPILOGUE_BIAS, &arrays);
}

// d_input (rows, inputs), rows stride apart; saved (rows, inputs); d_output (rows,
// outputs); weight (outputs, inputs). d_bias (inputs), bf16, is overwritten; NULL: no sum
// is taken.
static inline cublasStatus_t epilogue_gelu_backward(Stream *stream, EpilogueProduct *product, Real *d_input,
                                                    int stride, Real *d_bias, const Real *saved,
                                                    const Real *d_output, const Real *weight, int rows,
                                                    int inputs, int outputs) {
    CudaGemm gemm = epilogue_gemm(stream, inputs, rows, outputs, false, inputs, outputs, stride);
    EpilogueArrays arrays = {weight, d_output, d_input, (void *)(uintptr_t)saved, d_bias};
    return epilogue_run(stream, product, &gemm,
                        d_bias != NULL ? CUBLASLT_EPILOGUE_DGELU_BGRAD : CUBLASLT_EPILOGUE_DGELU, &arrays);
}

// d_weight (outputs, inputs), fp32, +=; d_bias (outputs), fp32, is overwritten with the
// sum over rows of d_output (rows, outputs), rows stride apart; input (rows, inputs).
static inline cublasStatus_t epilogue_weight_backward(Stream *stream, EpilogueProduct *product,
                                                      float *d_weight, float *d_bias, const Real *d_output,
                                                      int stride, const Real *input, int rows, int inputs,
                                                      int outputs) {
    CudaGemm gemm = epilogue_gemm(stream, inputs, outputs, rows, false, inputs, stride, inputs);
    EpilogueArrays arrays = {input, d_output, d_weight, NULL, d_bias};
    gemm.b_transposed = true;
    gemm.result_precision = PRECISION_FP32;
    return epilogue_run(stream, product, &gemm, CUBLASLT_EPILOGUE_BGRADB, &arrays);
}

template <typename R> static __global__ void epilogue_add_kernel(float *sums, const R *values, int columns) {
    int c = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (c < columns) { sums[c] += to_float(values[c]); }
}

// d_bias (columns), fp32, += sums (columns), of R: float or __nv_bfloat16.
template <typename R>
static inline void epilogue_add(Stream *stream, float *d_bias, const R *sums, int columns) {
    cuda_launch(stream, epilogue_add_kernel<R>, dim3(cuda_blocks((size_t)columns, 256)), dim3(256), 0, d_bias,
                sums, columns);
}

enum { EPILOGUE_ROWS = 8 }; // that a thread loads before it adds them

template <int WIDTH>
static __global__ void __launch_bounds__(COLUMN_STRIP)
    epilogue_sums_kernel(float *partials, const __nv_bfloat16 *gradient, int stride, int rows, int columns) {
    int c = strip_column(WIDTH), block = (int)blockIdx.x, blocks = (int)gridDim.x;
    if (c >= columns) { return; }
    float sums[WIDTH] = {};
    int end = cuda_row_begin(block + 1, blocks, rows);
    for (int row = cuda_row_begin(block, blocks, rows); row < end; row += EPILOGUE_ROWS) {
        Piece<__nv_bfloat16, WIDTH> pieces[EPILOGUE_ROWS];
        UNROLL
        for (int i = 0; i < EPILOGUE_ROWS; i++) {
            if (row + i >= end) { break; }
            pieces[i] = piece_load<WIDTH>(gradient + (size_t)(row + i) * (size_t)stride + c);
        }
        UNROLL
        for (int i = 0; i < EPILOGUE_ROWS; i++) {
            if (row + i >= end) { break; }
            float values[WIDTH];
            piece_unpack(values, pieces[i]);
            UNROLL
            for (int k = 0; k < WIDTH; k++) { sums[k] += values[k]; }
        }
    }
    floats_write<WIDTH, false>(partials + (size_t)block * (size_t)columns + c, sums);
}

// d_bias (columns), fp32, += the sum over rows of gradient (rows, columns), rows stride
// apart: what DGELU leaves to be done. columns and stride are multiples of 8. partials
// (CUDA_ROW_BLOCKS, columns) is workspace.
static inline void epilogue_sums(Stream *stream, float *d_bias, float *partials, const Real *gradient,
                                 int stride, int rows, int columns) {
    assert(columns % 8 == 0 && stride % 8 == 0);
    strips_launch(stream, epilogue_sums_kernel<8>, (unsigned)cuda_row_blocks(rows), columns, 8, 0, partials,
                  reals<__nv_bfloat16>(gradient), stride, rows, columns);
    cuda_column_sums_add(stream, {.first = d_bias}, 1, partials, cuda_row_blocks(rows), columns, columns);
}
