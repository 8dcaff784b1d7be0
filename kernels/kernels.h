// kernels.h: every operation, and the one place that chooses where it runs.
//
// The contract of all operations: arrays are row-major, with the shapes written at each
// declaration. A kernel is called in a task of `stream` and allocates nothing. On the CPU it runs
// on the stream's thread pool and has finished when it returns. On a GPU the call puts it into the
// stream's queue and returns; later kernels of the stream see its result. Arrays of Real are in the
// stream's precision; arithmetic and sums are fp32 everywhere.
//
// Results repeat bit for bit and do not depend on the number of threads. Gradients of parameters
// are added to (+=); other outputs are overwritten unless stated. NaN and infinity in an input
// reach the output. The CPU version is the specification; test/cuda/test_cuda_*.cu compare the CUDA
// version with it at odd shapes. docs/kernels.md explains each operation.
#pragma once

#include "kernels/cpu/adamw.h"
#include "kernels/cpu/attention.h"
#include "kernels/cpu/bias.h"
#include "kernels/cpu/buffers.h"
#include "kernels/cpu/cross_entropy.h"
#include "kernels/cpu/embedding.h"
#include "kernels/cpu/gelu.h"
#include "kernels/cpu/layernorm.h"
#include "kernels/cpu/matmul.h"
#include "kernels/cpu/muon.h"
#include "kernels/cpu/outer.h"
#include "kernels/cpu/rotary.h"
#include "kernels/cpu/row_blocks.h"
#include "kernels/cpu/sparse.h"
#include "kernels/cpu/swiglu.h"
#include "kernels/wire.h"

#ifdef ACCO_HAVE_CUDA
#include "kernels/cuda/adamw.cuh"
#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/bias.cuh"
#include "kernels/cuda/buffers.cuh"
#include "kernels/cuda/cross_entropy.cuh"
#include "kernels/cuda/embedding.cuh"
#include "kernels/cuda/fp8.cuh"
#include "kernels/cuda/gelu.cuh"
#include "kernels/cuda/layernorm.cuh"
#include "kernels/cuda/matmul.cuh"
#include "kernels/cuda/muon.cuh"
#include "kernels/cuda/outer.cuh"
#include "kernels/cuda/rotary.cuh"
#include "kernels/cuda/sparse.cuh"
#include "kernels/cuda/swiglu.cuh"
#include "kernels/cuda/wire.cuh"
// On a GPU's stream: makes the call, which puts a kernel into the stream's queue, and returns
// from the calling function.
#define KERNEL_ON_GPU(stream, call) \
    if (stream_is_on_gpu(stream)) { \
        call; \
        return; \
    }
// The operation where the stream is: on the CPU, or on a GPU, where it is a template over the
// type of `precision`.
#define KERNEL(operation, precision, stream, ...) \
    (!stream_is_on_gpu(stream)       ? cpu_##operation(stream, __VA_ARGS__) \
     : (precision) == PRECISION_BF16 ? cuda_##operation<__nv_bfloat16>(stream, __VA_ARGS__) \
                                     : cuda_##operation<float>(stream, __VA_ARGS__))
#else
#define KERNEL_ON_GPU(stream, call) (void)(stream);
#define KERNEL(operation, precision, stream, ...) cpu_##operation(stream, __VA_ARGS__)
#endif

// Whether this program contains code for the GPU: it may have been built for others only.
// Loads the library, and after gpu_load_eagerly all kernels: whoever measures the GPU's memory
// afterwards then sees what they take.
static inline bool kernels_can_run(const Gpu *gpu, Error *error) {
#ifdef ACCO_HAVE_CUDA
    cudaFuncAttributes attributes;
    cudaError_t status = cudaFuncGetAttributes(&attributes, reals_from_floats_kernel<float>);
    if (status != cudaSuccess) {
        return error_set(error,
                         "this program has no code for GPU %d, %s, of compute capability %d.%d: build it "
                         "with ARCH=%d (%s)",
                         gpu->number, gpu->name, gpu->capability / 10, gpu->capability % 10, gpu->capability,
                         cudaGetErrorString(status));
    }
    cublasLtHandle_t library = NULL;
    cublasStatus_t loaded = cublasLtCreate(&library);
    if (loaded == CUBLAS_STATUS_SUCCESS) { loaded = cublasLtDestroy(library); }
    if (loaded != CUBLAS_STATUS_SUCCESS) {
        return error_set(error, "cuBLASLt cannot be used on GPU %d, %s: status %d", gpu->number, gpu->name,
                         (int)loaded);
    }
#endif
    (void)gpu, (void)error;
    return true;
}

// ---- Workspace ------------------------------------------------------------------------

// Floats for partial sums over rows of `width` columns.
static inline size_t row_partials_floats(bool on_gpu, size_t width) {
    return (on_gpu ? (size_t)CUDA_ROW_BLOCKS : (size_t)ROW_BLOCKS) * width;
}

// Floats of scratch for attention: on a GPU the deltas of backward; on the CPU, for
// `threads` of the pool.
static inline size_t attention_scratch_floats(bool on_gpu, int B, int T, int C, int heads, int threads,
                                              Precision precision) {
    return on_gpu ? (size_t)B * heads * T : attention_workspace_floats(T, C / heads, threads, precision);
}

// ---- Matrix products ------------------------------------------------------------------

// Bytes of workspace for the products of a stream, where its kernels run; a CPU with AMX
// wants some for each of the pool's threads.
static inline size_t gemm_workspace_bytes(bool on_gpu, Precision precision, int threads) {
    if (on_gpu) { return GEMM_WORKSPACE_BYTES; }
    bool amx = precision == PRECISION_BF16 && amx_is_there();
    return amx ? (size_t)threads * sizeof(AmxWorkspace) + AMX_ALIGNMENT : 0;
}

// Must be called before the first product of a GPU's stream; on a CPU bf16 is multiplied by AMX
// from then on. workspace (gemm_workspace_bytes): NULL where they are 0.
static inline void gemm_open(Stream *stream, void *workspace) {
    KERNEL_ON_GPU(stream, cuda_gemm_open(stream, workspace))
    size_t behind = (size_t)((uintptr_t)workspace % AMX_ALIGNMENT);
    stream->gemm = behind == 0 ? workspace : (char *)workspace + AMX_ALIGNMENT - behind;
}

// From now on products of this stream count on `sm_count` GPU multiprocessors; 0: on all.
static inline void gemm_limit(Stream *stream, int sm_count) {
    (void)sm_count;
    KERNEL_ON_GPU(stream, cuda_gemm_limit(stream, sm_count))
}

static inline void gemm_close(Stream *stream) {
    KERNEL_ON_GPU(stream, cuda_gemm_close(stream))
    stream->gemm = NULL;
}

static inline void matmul(Stream *stream, const Matmul *work) {
    KERNEL_ON_GPU(stream, cuda_matmul(stream, work))
    cpu_matmul(stream, work);
}

// output (rows, outputs), rows output_stride apart, = input (rows, inputs) weight^T for
// weight (outputs, inputs), as PyTorch stores it.
static inline void matmul_forward(Stream *stream, Real *output, int output_stride, const Real *input,
                                  const Real *weight, int rows, int inputs, int outputs) {
    Matmul work = matmul_describe(stream->precision, output, output_stride, input, inputs, false, weight,
                                  inputs, true, rows, outputs, inputs, false);
    matmul(stream, &work);
}

// d_input (rows, inputs) = d_output (rows, outputs) weight. Rows of both are their strides apart.
static inline void matmul_backward_input(Stream *stream, Real *d_input, int d_input_stride,
                                         const Real *d_output, int d_output_stride, const Real *weight,
                                         int rows, int inputs, int outputs) {
    Matmul work = matmul_describe(stream->precision, d_input, d_input_stride, d_output, d_output_stride,
                                  false, weight, inputs, false, rows, inputs, outputs, false);
    matmul(stream, &work);
}

// d_weight (outputs, inputs) += d_output^T input; begins: = it. On the CPU matmul_padded_stride
// gives the stride at which d_output is read fastest.
static inline void matmul_backward_weight(Stream *stream, float *d_weight, const Real *d_output,
                                          int d_output_stride, const Real *input, int rows, int inputs,
                                          int outputs, bool begins) {
    Matmul work = matmul_describe(stream->precision, as_reals(d_weight), inputs, d_output, d_output_stride,
                                  true, input, inputs, false, outputs, inputs, rows, true);
    work.accumulate = !begins;
    matmul(stream, &work);
}

// A low-rank product, added to a frozen weight's product (LoRA, arXiv 2106.09685): as if the
// weight were weight + scale b a, which is never made.
typedef struct LowRank {
    const Real *a, *b; // (rank, inputs), (outputs, rank)
    float *d_a, *d_b;  // their gradients; NULL: forward
    bool begins;       // these are set, not added to
    Real *inner;       // (rows, rank), workspace
    int rank, rows, inputs, outputs;
    float scale;
} LowRank;

// One of its products. accumulate: the result is added to, whatever its precision.
static inline void low_rank_product(Stream *stream, Real *result, int result_stride, const Real *a,
                                    int a_stride, const Real *b, int b_stride, bool b_transposed, int rows,
                                    int columns, int inner, float scale, bool accumulate) {
    Matmul work = matmul_describe(stream->precision, result, result_stride, a, a_stride, false, b, b_stride,
                                  b_transposed, rows, columns, inner, false);
    work.scale = scale;
    work.accumulate = accumulate;
    matmul(stream, &work);
}

// output (rows, outputs), rows output_stride apart, += scale (input a^T) b^T for input
// (rows, inputs).
static inline void low_rank_forward(Stream *stream, const LowRank *work, Real *output, int output_stride,
                                    const Real *input) {
    int r = work->rank, rows = work->rows;
    low_rank_product(stream, work->inner, r, input, work->inputs, work->a, work->inputs, true, rows, r,
                     work->inputs, work->scale, false);
    low_rank_product(stream, output, output_stride, work->inner, r, work->b, r, true, rows, work->outputs, r,
                     1.0f, true);
}

// d_b += scale d_output^T (input a^T), d_a += scale (d_output b)^T input (begins: =), and
// d_input (rows, inputs), rows d_input_stride apart, += scale (d_output b) a.
static inline void low_rank_backward(Stream *stream, const LowRank *work, Real *d_input, int d_input_stride,
                                     const Real *d_output, int d_output_stride, const Real *input) {
    int r = work->rank, rows = work->rows, inputs = work->inputs, outputs = work->outputs;
    low_rank_product(stream, work->inner, r, input, inputs, work->a, inputs, true, rows, r, inputs,
                     work->scale, false);
    matmul_backward_weight(stream, work->d_b, d_output, d_output_stride, work->inner, rows, r, outputs,
                           work->begins);
    low_rank_product(stream, work->inner, r, d_output, d_output_stride, work->b, r, false, rows, r, outputs,
                     work->scale, false);
    matmul_backward_weight(stream, work->d_a, work->inner, r, input, rows, inputs, r, work->begins);
    low_rank_product(stream, d_input, d_input_stride, work->inner, r, work->a, inputs, false, rows, inputs, r,
                     1.0f, true);
}

// `count` products result (M, N) = a (M, K) b (K, N), each dense, one behind the other; a
// transposed operand is stored as (K, M) or (N, K). On a GPU they are one call, and their bits
// depend on `most`, the largest count, but not on count. On the CPU count is 1.
static inline void matmul_products(Stream *stream, Real *result, const Real *a, bool a_transposed,
                                   const Real *b, bool b_transposed, int M, int N, int K, int count,
                                   int most) {
    Matmul work = matmul_describe(stream->precision, result, N, a, a_transposed ? M : K, a_transposed, b,
                                  b_transposed ? K : N, b_transposed, M, N, K, false);
    work.count = count;
    work.most = most;
    matmul(stream, &work);
}

// FP8 on a GPU, from bf16 and to it: out = in (rows, columns), rows `stride` apart.
// turns: the codes of the transposed matrix follow. largest (CUDA_ROW_BLOCKS): workspace.
static inline void fp8_cast(Stream *stream, const Fp8 *out, bool turns, float *largest, const Real *in,
                            int rows, int columns, int stride) {
    (void)out, (void)turns, (void)largest, (void)in, (void)rows, (void)columns, (void)stride;
    KERNEL_ON_GPU(stream, cuda_fp8_cast(stream, out, turns, largest, in, rows, columns, stride))
}

// result (rows, outputs) = a (rows, inputs) b^T for b (outputs, inputs).
static inline void matmul_fp8(Stream *stream, Real *result, int result_stride, const Fp8 *a, const Fp8 *b,
                              int rows, int inputs, int outputs) {
    Matmul work = matmul_describe(PRECISION_BF16, result, result_stride, (Real *)a->codes, inputs, false,
                                  (Real *)b->codes, inputs, true, rows, outputs, inputs, false);
    work.precision = a->format;
    work.b_precision = b->format;
    work.a_scale = a->scale;
    work.b_scale = b->scale;
    matmul(stream, &work);
}

// ---- Layers ---------------------------------------------------------------------------

// Each takes a struct, whose header in kernels/cpu/ has the formulas and the shapes, with
// all that the pass needs but the precision.
#define LAYER(operation, Work) \
    static inline void operation(Stream *stream, const Work *work) { \
        Work here = *work; \
        here.precision = stream->precision; \
        KERNEL(operation, stream->precision, stream, &here); \
    }

LAYER(embedding_forward, Embedding)
LAYER(embedding_backward, Embedding)
LAYER(layernorm_forward, Layernorm)
LAYER(layernorm_backward, Layernorm)
LAYER(attention, Attention) // forward; with a d_qkv backward, from what forward has written
LAYER(bias_add, Bias)       // forward; with a d_bias backward
// Forward leaves in `saved` what backward needs. On the CPU this is the derivative: to keep it
// costs less than to compute it again. On a GPU `saved` does not change, and the same call
// computes the output again.
LAYER(gelu_forward, Gelu)
LAYER(gelu_backward, Gelu)

// Forward changes `saved` on the CPU only, as gelu_forward; with a gradient backward.
LAYER(swiglu, Swiglu)
LAYER(rotary, Rotary) // forward or backward

// losses (rows) = -log softmax(logits)[target], 0 where target < 0. logits (rows, V),
// rows `stride` apart, are overwritten by gradient_scale (softmax - one-hot), 0 where
// target < 0; if gradient_scale is 0, their new values mean nothing.
static inline void cross_entropy(Stream *stream, Real *logits, int stride, float *losses,
                                 const int32_t *targets, int rows, int vocabulary, float gradient_scale) {
    CrossEntropy work = {logits,     losses, targets,        rows,
                         vocabulary, stride, gradient_scale, stream->precision};
    KERNEL(cross_entropy, stream->precision, stream, &work);
}

// ---- Updates: whole vectors of fp32 ---------------------------------------------------

// A step over a range: of AdamW (kernels/cpu/adamw.h), and the elementwise parts of one of Muon
// (kernels/cpu/muon.h). keeps: moves master and moments; otherwise only writes to range->out
// what a commit would write.
#define STEP(operation, precision) \
    static inline void operation(Stream *stream, const StepRange *range) { \
        assert(range->keeps || range->out != range->master); \
        KERNEL(operation, precision, stream, range); \
    }

STEP(adamw, range->moments)
STEP(muon_norm, range->moments)
STEP(muon_direction, stream->precision)
STEP(muon_apply, stream->precision)

// Each of the `count` polynomials (side, side) = a I + b square + c polynomial.
static inline void muon_polynomial(Stream *stream, Real *polynomial, const Real *square, int side,
                                   int count) {
    KERNEL(muon_polynomial, stream->precision, stream, polynomial, square, side, count);
}

static inline void buffer_copy(Stream *stream, float *out, const float *in, size_t count) {
    KERNEL_ON_GPU(stream, stream_copy(stream, out, in, count * sizeof *in))
    cpu_buffer_copy(stream, out, in, count);
}

// The sum of squares of `pieces` pieces of `count` values, `stride` apart, added in a
// fixed order. partials (pieces, buffer_blocks(count)) is workspace that the host can
// read. Waits for the stream.
static inline double buffer_sum_of_squares(Stream *stream, const float *values, size_t count, size_t stride,
                                           size_t pieces, double *partials) {
    double sum = 0;
#ifdef ACCO_HAVE_CUDA
    if (stream_is_on_gpu(stream)) {
        cuda_buffer_sums_of_squares(stream, partials, values, count, stride, pieces);
        stream_settle(stream);
        for (size_t i = 0; i < pieces * buffer_blocks(count); i++) { sum += partials[i]; }
        return sum;
    }
#endif
    for (size_t piece = 0; piece < pieces; piece++) {
        sum += cpu_buffer_sum_of_squares(stream, values + piece * stride, count, partials);
    }
    return sum;
}

// Rounds each element of values (count) to the nearest bf16.
static inline void buffer_round(Stream *stream, float *values, size_t count) {
    KERNEL_ON_GPU(stream, cuda_buffer_round(stream, values, count))
    for (size_t i = 0; i < count; i++) { values[i] = bf16_to_float(bf16_from_float(values[i])); }
}

// out (count), in the stream's precision, = in (count).
static inline void reals_from_floats(Stream *stream, Real *out, const float *in, size_t count) {
    KERNEL(reals_from_floats, stream->precision, stream, out, in, count);
}

// The outer steps of kernels/cpu/outer.h and kernels/cpu/sparse.h; on the CPU they run in the
// calling thread.
static inline void outer_pseudo_gradient(Stream *stream, const OuterRange *range, float weight) {
    KERNEL_ON_GPU(stream, cuda_outer_pseudo_gradient(stream, range, weight))
    cpu_outer_pseudo_gradient(range, weight);
}

static inline void outer_nesterov(Stream *stream, const OuterRange *range, const NesterovStep *step) {
    KERNEL_ON_GPU(stream, cuda_outer_nesterov(stream, range, step))
    cpu_outer_nesterov(range, step);
}

static inline void outer_momentum(Stream *stream, const OuterRange *range, const MomentumStep *step) {
    KERNEL_ON_GPU(stream, cuda_outer_momentum(stream, range, step))
    cpu_outer_momentum(range, step);
}

static inline void sparse_encode(Stream *stream, const OuterRange *range, SparseBlock *blocks, float beta) {
    KERNEL_ON_GPU(stream, cuda_sparse_encode(stream, range, blocks, beta))
    cpu_sparse_encode(range, blocks, beta);
}

static inline void sparse_apply(Stream *stream, const OuterRange *range, const SparseBlock *blocks,
                                size_t stride, const SparseStep *step) {
    KERNEL_ON_GPU(stream, cuda_sparse_apply(stream, range, blocks, stride, step))
    cpu_sparse_apply(range, blocks, stride, step);
}
