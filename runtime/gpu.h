// gpu.h: the GPU of this process: its memory, its queues, and waiting for them. Only
// runtime/, comm/nccl.h and kernels/ call CUDA.
//
// A task of a stream (device.h) puts its kernels into the stream's CUDA queue and has ended when
// they have: events, watermarks and deadlines mean the same as on the CPU. No wait blocks inside
// CUDA. A program built without it has the same functions and never finds a GPU.
#pragma once

#include "runtime/errors.h"
#include "runtime/precision.h"

typedef struct Gpu {
    int number; // this rank's GPU on its node; -1: the CPU is used
    int count;  // how many this node has
    char name[256];
    char bus[32];   // PCI address: another rank may see the same GPU under another number
    int capability; // 10 * major + minor
    int sm_count;   // streaming multiprocessors
    size_t memory_total, memory_available;
} Gpu;

// NVTX ranges: profilers show with them what a thread was doing. Without a profiler a call only
// tests a pointer. The header is missing in some installations of CUDA.
#if defined(ACCO_HAVE_CUDA) && __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
static inline void gpu_range_begin(const char *name) { (void)nvtxRangePushA(name); }
static inline void gpu_range_end(void) { (void)nvtxRangePop(); }
#else
static inline void gpu_range_begin(const char *name) { (void)name; }
static inline void gpu_range_end(void) {}
#endif

#ifdef ACCO_HAVE_CUDA
#include <cuda_runtime.h>

// Ends all ranks with CUDA's reason: after an error nothing on the device can be trusted.
#define CUDA_CHECK(call) cuda_check((call), #call)

static inline void cuda_check(cudaError_t status, const char *call) {
    char text[512];
    if (status == cudaSuccess) { return; }
    snprintf(text, sizeof text, "CUDA: %s: %s", cudaGetErrorString(status), call);
    failure_report(text);
}

static inline bool gpu_is_built_in(void) { return true; }

// For ranks that may send by NCCL. By default a kernel is loaded when first used. Loading may wait
// for running kernels, and a kernel of NCCL may run until a later kernel sends: a deadlock. It takes
// half a gigabyte. Must be called before MPI, which may start the driver, which reads the variable
// once. What the user has set stays.
static inline void gpu_load_eagerly(void) { setenv("CUDA_MODULE_LOADING", "EAGER", 0); }

static inline void gpu_version(char *text, size_t size) {
    snprintf(text, size, "%d.%d", CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
}

// Rank r of a node gets GPU r modulo the number of GPUs. Kernels need compute capability 8.0.
static inline bool gpu_open(Gpu *gpu, int local_rank, Error *error) {
    memset(gpu, 0, sizeof *gpu);
    gpu->number = -1;
    int driver = 0, runtime = 0;
    cudaError_t status = cudaGetDeviceCount(&gpu->count);
    bool known =
        cudaDriverGetVersion(&driver) == cudaSuccess && cudaRuntimeGetVersion(&runtime) == cudaSuccess;
    if (status != cudaSuccess && known && driver > 0 && driver / 1000 < runtime / 1000) {
        return error_set(
            error,
            "no GPU can be used: the driver is for CUDA %d.%d, and this program was built with %d.%d: "
            "install a newer driver, or build with an older CUDA (CUDA_HOME)",
            driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    }
    if (status != cudaSuccess) {
        return error_set(error, "no GPU can be used: %s", cudaGetErrorString(status));
    }
    if (gpu->count == 0) { return error_set(error, "this node has no GPU"); }
    int number = local_rank % gpu->count;
    cudaDeviceProp properties;
    status = cudaSetDevice(number);
    if (status == cudaSuccess) { status = cudaGetDeviceProperties(&properties, number); }
    if (status == cudaSuccess) { status = cudaDeviceGetPCIBusId(gpu->bus, sizeof gpu->bus, number); }
    if (status == cudaSuccess) { status = cudaMemGetInfo(&gpu->memory_available, &gpu->memory_total); }
    if (status != cudaSuccess) {
        return error_set(error, "GPU %d cannot be used: %s", number, cudaGetErrorString(status));
    }
    snprintf(gpu->name, sizeof gpu->name, "%s", properties.name);
    gpu->capability = 10 * properties.major + properties.minor;
    gpu->sm_count = properties.multiProcessorCount;
    if (gpu->capability < 80) {
        return error_set(error, "GPU %d, %s, has compute capability %d.%d; at least 8.0 is needed", number,
                         gpu->name, properties.major, properties.minor);
    }
    gpu->number = number;
    return true;
}

static inline void gpu_measure(Gpu *gpu) {
    CUDA_CHECK(cudaMemGetInfo(&gpu->memory_available, &gpu->memory_total));
}

// Every thread that uses the GPU calls it once.
static inline void gpu_enter_thread(const Gpu *gpu) {
    if (gpu != NULL && gpu->number >= 0) { CUDA_CHECK(cudaSetDevice(gpu->number)); }
}

static inline void *gpu_queue_create(bool high_priority) {
    int least = 0, greatest = 0;
    cudaStream_t queue = NULL;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&queue, cudaStreamNonBlocking, high_priority ? greatest : least));
    return (void *)queue;
}

static inline void gpu_queue_destroy(void *queue) { CUDA_CHECK(cudaStreamDestroy((cudaStream_t)queue)); }

// A point of a queue that another queue can wait for.
static inline void *gpu_mark_create(void) {
    cudaEvent_t mark = NULL;
    CUDA_CHECK(cudaEventCreateWithFlags(&mark, cudaEventDisableTiming));
    return (void *)mark;
}

static inline void gpu_mark_destroy(void *mark) { CUDA_CHECK(cudaEventDestroy((cudaEvent_t)mark)); }

// Moves the mark behind everything that is in the queue now.
static inline void gpu_mark(void *mark, void *queue) {
    CUDA_CHECK(cudaEventRecord((cudaEvent_t)mark, (cudaStream_t)queue));
}

static inline bool gpu_has_ended(cudaError_t status) {
    if (status != cudaErrorNotReady) { cuda_check(status, "what a kernel did"); }
    return status != cudaErrorNotReady;
}

// Whether everything before the mark has ended; true for a mark that was never moved.
static inline bool gpu_mark_is_reached(void *mark) {
    return gpu_has_ended(cudaEventQuery((cudaEvent_t)mark));
}

// What is put into the queue from now on starts when the mark's present position has been
// reached. A mark that was never moved delays nothing.
static inline void gpu_wait_for(void *queue, void *mark) {
    CUDA_CHECK(cudaStreamWaitEvent((cudaStream_t)queue, (cudaEvent_t)mark, 0));
}

static inline bool gpu_queue_is_idle(void *queue) {
    return gpu_has_ended(cudaStreamQuery((cudaStream_t)queue));
}

// NULL: there is not enough memory.
static inline void *gpu_allocate(size_t bytes) {
    void *memory = NULL;
    return cudaMalloc(&memory, bytes) == cudaSuccess ? memory : NULL;
}

static inline void *gpu_allocate_host(size_t bytes) {
    void *memory = NULL;
    return cudaMallocHost(&memory, bytes) == cudaSuccess ? memory : NULL;
}

static inline void gpu_release(void *memory) { CUDA_CHECK(cudaFree(memory)); }
static inline void gpu_release_host(void *memory) { CUDA_CHECK(cudaFreeHost(memory)); }

static inline void gpu_copy(void *queue, void *to, const void *from, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, (cudaStream_t)queue));
}

static inline void gpu_fill(void *queue, void *memory, int byte, size_t bytes) {
    CUDA_CHECK(cudaMemsetAsync(memory, byte, bytes, (cudaStream_t)queue));
}

#else // without CUDA: gpu_open never succeeds, so the rest is never called

// clang-format off
static inline bool gpu_is_built_in(void) { return false; }
static inline void gpu_load_eagerly(void) {}
static inline void gpu_version(char *text, size_t size) { snprintf(text, size, "none: for CPUs only"); }
static inline bool gpu_open(Gpu *gpu, int local_rank, Error *error) {
    (void)local_rank;
    memset(gpu, 0, sizeof *gpu);
    gpu->number = -1;
    return error_set(error, "this program was built without CUDA");
}
static inline void gpu_measure(Gpu *gpu) { (void)gpu; }
static inline void gpu_enter_thread(const Gpu *gpu) { (void)gpu; }
static inline void *gpu_queue_create(bool high_priority) { (void)high_priority; return NULL; }
static inline void gpu_queue_destroy(void *queue) { (void)queue; }
static inline void *gpu_mark_create(void) { return NULL; }
static inline void gpu_mark_destroy(void *mark) { (void)mark; }
static inline void gpu_mark(void *mark, void *queue) { (void)mark, (void)queue; }
static inline bool gpu_mark_is_reached(void *mark) { (void)mark; return true; }
static inline void gpu_wait_for(void *queue, void *mark) { (void)queue, (void)mark; }
static inline bool gpu_queue_is_idle(void *queue) { return queue == NULL; }
static inline void *gpu_allocate(size_t bytes) { (void)bytes; return NULL; }
static inline void *gpu_allocate_host(size_t bytes) { (void)bytes; return NULL; }
static inline void gpu_release(void *memory) { (void)memory; }
static inline void gpu_release_host(void *memory) { (void)memory; }
static inline void gpu_copy(void *queue, void *to, const void *from, size_t bytes) {
    (void)queue, (void)to, (void)from, (void)bytes;
}
static inline void gpu_fill(void *queue, void *memory, int byte, size_t bytes) {
    (void)queue, (void)memory, (void)byte, (void)bytes;
}
// clang-format on

#endif

// Whether this process uses a GPU. gpu: may be NULL.
static inline bool gpu_is_used(const Gpu *gpu) { return gpu != NULL && gpu->number >= 0; }
