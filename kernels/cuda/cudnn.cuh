// cudnn.cuh: attention's forward pass by cuDNN, in programs that were built with CUDNN=1.
//
// Contract: kernels/cpu/attention.h, without documents. Our own kernels compute the backward
// pass: they need the output and the logsumexp, which cuDNN calls its statistics.
//
// A plan belongs to a shape; compiling one takes a second or so, and a training has two shapes
// at most. Its workspace is that of the products (matmul.cuh), which are never under way at
// the same time. Where cuDNN has no plan for a shape, or none that fits, our own kernel
// computes, and a line says so once.
#pragma once

// The frontend has a constant of this name, and Linux a macro.
#pragma push_macro("BLOCK_SIZE")
#undef BLOCK_SIZE
#include <cudnn_frontend.h>
#pragma pop_macro("BLOCK_SIZE")

#include "kernels/cpu/attention.h"
#include "kernels/cuda/matmul.cuh"

enum { CUDNN_SHAPES = 8 }; // whose plans a stream keeps

// What cuDNN calls the vectors.
enum CudnnVector : int64_t { CUDNN_QUERIES, CUDNN_KEYS, CUDNN_VALUES, CUDNN_OUTPUT, CUDNN_LOGSUMEXP };

typedef struct CudnnPlan {
    int B, T, channels, heads, window;
    std::shared_ptr<cudnn_frontend::graph::Graph> graph; // NULL: cuDNN has no plan
} CudnnPlan;

// What a stream has of cuDNN; it hangs on the stream's CudaGemmLibrary.
typedef struct CudnnLibrary {
    cudnnHandle_t handle;
    int count;
    CudnnPlan plans[CUDNN_SHAPES];
} CudnnLibrary;

static inline void cudnn_check(cudnnStatus_t status, const char *call) {
    char text[512];
    if (status == CUDNN_STATUS_SUCCESS) { return; }
    snprintf(text, sizeof text, "cuDNN: %s: %s", cudnnGetErrorString(status), call);
    failure_report(text);
}

// What is multiplied: (B, heads, T, D), which lies in qkv as (B, T, 3, heads, D), or in the output
// as (B, T, heads, D).
static inline cudnn_frontend::graph::Tensor_attributes cudnn_tensor(const CudnnPlan *plan, CudnnVector vector,
                                                                    int64_t row) {
    int64_t D = plan->channels / plan->heads;
    return cudnn_frontend::graph::Tensor_attributes()
        .set_uid(vector)
        .set_dim({plan->B, plan->heads, plan->T, D})
        .set_stride({plan->T * row, D, row, 1});
}

// Why there is no plan; empty: there is one.
static inline std::string cudnn_make_plan(CudnnLibrary *library, CudnnPlan *plan) {
    using namespace cudnn_frontend;
    int64_t C = plan->channels, workspace = 0;
    std::shared_ptr<graph::Graph> made = std::make_shared<graph::Graph>();
    made->set_io_data_type(DataType_t::BFLOAT16)
        .set_intermediate_data_type(DataType_t::FLOAT)
        .set_compute_data_type(DataType_t::FLOAT);
    graph::SDPA_attributes options;
    options.set_name("attention").set_generate_stats(true).set_attn_scale(1.0f).set_causal_mask(true);
    if (plan->window > 0) { options.set_diagonal_band_left_bound(plan->window); }
    auto [output, logsumexp] = made->sdpa(made->tensor(cudnn_tensor(plan, CUDNN_QUERIES, 3 * C)),
                                          made->tensor(cudnn_tensor(plan, CUDNN_KEYS, 3 * C)),
                                          made->tensor(cudnn_tensor(plan, CUDNN_VALUES, 3 * C)), options);
    graph::Tensor_attributes place = cudnn_tensor(plan, CUDNN_OUTPUT, C);
    output->set_output(true).set_uid(CUDNN_OUTPUT).set_dim(place.get_dim()).set_stride(place.get_stride());
    logsumexp->set_output(true)
        .set_uid(CUDNN_LOGSUMEXP)
        .set_data_type(DataType_t::FLOAT)
        .set_dim({plan->B, plan->heads, plan->T, 1})
        .set_stride({(int64_t)plan->heads * plan->T, plan->T, 1, 1});
    cudnn_frontend::error_t status = made->build(library->handle, {HeurMode_t::A});
    if (status.is_good()) { (void)(status = made->get_workspace_size(workspace)); }
    if (status.is_bad()) { return status.get_message(); }
    if (workspace > GEMM_WORKSPACE_BYTES) { return "its workspace is larger than that of the products"; }
    plan->graph = made;
    return "";
}

// The plan of a shape; NULL: there is none.
static inline CudnnPlan *cudnn_plan(Stream *stream, const Attention *work) {
    CudaGemmLibrary *products = (CudaGemmLibrary *)stream->gemm;
    if (products->cudnn == NULL) {
        products->cudnn = new CudnnLibrary();
        cudnn_check(cudnnCreate(&products->cudnn->handle), "cudnnCreate");
        cudnn_check(cudnnSetStream(products->cudnn->handle, (cudaStream_t)stream->queue), "cudnnSetStream");
    }
    CudnnLibrary *library = products->cudnn;
    for (int i = 0; i < library->count; i++) {
        CudnnPlan *plan = &library->plans[i];
        if (plan->B == work->B && plan->T == work->T && plan->channels == work->channels &&
            plan->heads == work->heads && plan->window == work->window) {
            return plan->graph != NULL ? plan : NULL;
        }
    }
    // Where shapes have no end, as in an evaluation, the first few are enough.
    if (library->count == CUDNN_SHAPES) { return NULL; }
    CudnnPlan *plan = &library->plans[library->count++];
    plan->B = work->B;
    plan->T = work->T;
    plan->channels = work->channels;
    plan->heads = work->heads;
    plan->window = work->window;
    std::string reason = cudnn_make_plan(library, plan);
    if (plan->graph == NULL) {
        fprintf(stderr,
                "train_gpt: attention is not by cuDNN for %d x %d positions, %d heads of %d: %.300s\n",
                work->B, work->T, work->heads, work->channels / work->heads, reason.c_str());
    }
    return plan->graph != NULL ? plan : NULL;
}

// Whether cuDNN has put the forward pass into the stream's queue.
static inline bool cudnn_attention_forward(Stream *stream, const Attention *work) {
    if (work->d_qkv != NULL || work->starts != NULL || work->precision != PRECISION_BF16) { return false; }
    CudnnPlan *plan = cudnn_plan(stream, work);
    if (plan == NULL) { return false; }
    CudaGemmLibrary *products = (CudaGemmLibrary *)stream->gemm;
    __nv_bfloat16 *qkv = (__nv_bfloat16 *)reals<__nv_bfloat16>(work->qkv);
    std::unordered_map<int64_t, void *> vectors = {{CUDNN_QUERIES, qkv},
                                                   {CUDNN_KEYS, qkv + work->channels},
                                                   {CUDNN_VALUES, qkv + 2 * work->channels},
                                                   {CUDNN_OUTPUT, work->output},
                                                   {CUDNN_LOGSUMEXP, work->logsumexp}};
    cudnn_frontend::error_t status =
        plan->graph->execute(products->cudnn->handle, vectors, products->workspace);
    if (status.is_bad()) { failure_report(("cuDNN: " + status.get_message()).c_str()); }
    return true;
}

static inline void cudnn_close(Stream *stream) {
    CudnnLibrary *library = ((CudaGemmLibrary *)stream->gemm)->cudnn;
    if (library == NULL) { return; }
    cudnn_check(cudnnDestroy(library->handle), "cudnnDestroy");
    delete library;
}
