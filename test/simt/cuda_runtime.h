// cuda_runtime.h: stands in for the toolkit's header where kernels are emulated (simt.h).
// It has the parts of the language and of the runtime that this project uses.
//
// Streams do not run beside the host: a call that puts work into a stream does it and
// then returns. Device memory is memory of the host.
#pragma once

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <utility>

#include "simt.h"

#define CUDART_VERSION 0 // no CUDA

// ---- The language ---------------------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct __align__(8) float2 {
    float x, y;
};
struct __align__(16) float4 {
    float x, y, z, w;
};
struct __align__(8) uint2 {
    unsigned x, y;
};
struct __align__(16) uint4 {
    unsigned x, y, z, w;
};
struct __align__(16) int4 {
    int x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline void __stwb(uint4 *place, uint4 value) { *place = value; }

inline void __syncthreads() { simt_block_barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { simt_warp_exchange(mask, "", 0); }

template <typename T> inline T __shfl_sync(unsigned mask, T value, int source) {
    const char(*slots)[SIMT_SLOT] = simt_warp_exchange(mask, &value, sizeof value);
    T result;
    memcpy(&result, slots[source & 31], sizeof result);
    return result;
}

template <typename T> inline T __shfl_xor_sync(unsigned mask, T value, int lanes) {
    return __shfl_sync(mask, value, (simt_self()->number % SIMT_WARP) ^ lanes);
}

template <typename T> inline T __shfl_down_sync(unsigned mask, T value, unsigned lanes) {
    int source = simt_self()->number % SIMT_WARP + (int)lanes;
    return __shfl_sync(mask, value, source < SIMT_WARP ? source : simt_self()->number % SIMT_WARP);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    unsigned result = 0, mine = predicate != 0;
    const char(*slots)[SIMT_SLOT] = simt_warp_exchange(mask, &mine, sizeof mine);
    for (int lane = 0; lane < SIMT_WARP; lane++) {
        unsigned other = 0;
        if (mask >> lane & 1u) { memcpy(&other, slots[lane], sizeof other); }
        result |= other << lane;
    }
    return result;
}

inline int atomicAdd(int *place, int value) { return __atomic_fetch_add(place, value, __ATOMIC_RELAXED); }
inline unsigned atomicAdd(unsigned *place, unsigned value) {
    return __atomic_fetch_add(place, value, __ATOMIC_RELAXED);
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

inline unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float a, float b) {
    return fabsf(b) > 0x1p126f && fabsf(b) < INFINITY ? a * 0.0f : a / b;
}
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
template <typename T> inline T __ldg(const T *place) { return *place; }

// ---- The runtime ----------------------------------------------------------------------

typedef enum cudaError {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInsufficientDriver = 35,
    cudaErrorLaunchFailure = 719,
    cudaErrorNotReady = 600
} cudaError_t;
typedef struct SimtStream *cudaStream_t;
typedef struct SimtEvent *cudaEvent_t;
enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2 };
enum { SIMT_PROCESSORS = 4 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

struct SimtStream {
    int priority;
};
struct SimtEvent {
    int recorded; // how often
};
struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem;
    int major, minor, multiProcessorCount;
};
struct cudaLaunchAttribute;
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};

inline const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaSuccess                 ? "no error"
           : error == cudaErrorMemoryAllocation ? "out of memory"
           : error == cudaErrorLaunchFailure    ? "unspecified launch failure"
           : error == cudaErrorInsufficientDriver
               ? "CUDA driver version is insufficient for CUDA runtime version"
               : "invalid argument";
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

// The environment says which GPUs a program finds:
//   SIMT_GPUS        how many. A list such as 1,0 has a number for each rank of Open MPI
//                    in turn, and begins again at its end
//   SIMT_MEMORY_MB   the memory of each; of every rank's, where it is a list
//   SIMT_OWN_GPUS    set: every rank sees GPUs of its own, as some launchers arrange it
inline int simt_number_of_rank(const char *variable, int otherwise) {
    const char *list = getenv(variable), *rank = getenv("OMPI_COMM_WORLD_RANK");
    if (list == nullptr) { return otherwise; }
    for (int i = rank != nullptr ? atoi(rank) : 0; i > 0; i--) {
        const char *comma = strchr(list, ',');
        list = comma != nullptr ? comma + 1 : getenv(variable);
    }
    return atoi(list);
}
//   SIMT_KIND        a number that is part of the name of a GPU; lists, too
//   SIMT_NAME        the name of all GPUs, in the place of "emulator"
//   SIMT_CAPABILITY  ten times their compute capability; lists, too
//   SIMT_NO_CODE     set: the program has no kernels for them
//   SIMT_DRIVER      the version of CUDA that the driver is for, 11040 for 11.4; the
//                    library is of version 12.4
//   SIMT_FAIL_LAUNCH, SIMT_FAIL_PRODUCT
//                    the launch of a kernel, or the product of the library, that fails,
//                    counted from 1; 0: none; lists, too
//   SIMT_NO_ALGORITHM
//                    the shape, counted from 1, for which the library has no algorithm
//   SIMT_OFFER       what is wrong with the library's algorithm 0, which it offers first: "state", the
//                    offer says itself that it is none; "check", the library refuses it when asked;
//                    "few", for fewer than three products at once; "workspace", it then wants more
//                    than was said; "run", it is refused when it is run; "launch", it then fails
//   SIMT_PLANS_DIFFER
//                    set: the library's first offer is another one where a product may count
//                    on some processors only
//   SIMT_SAY_LOADING set: the first call says on stderr when kernels would be loaded
inline int simt_devices() { return simt_number_of_rank("SIMT_GPUS", 1); }
inline size_t simt_memory_bytes() { return (size_t)simt_number_of_rank("SIMT_MEMORY_MB", 4096) << 20; }
inline bool simt_launch_fails() {
    static const int failing = simt_number_of_rank("SIMT_FAIL_LAUNCH", 0);
    static int launches = 0;
    return failing > 0 && __atomic_add_fetch(&launches, 1, __ATOMIC_RELAXED) == failing;
}
inline bool simt_product_fails() {
    static const int failing = simt_number_of_rank("SIMT_FAIL_PRODUCT", 0);
    static int products = 0;
    return failing > 0 && __atomic_add_fetch(&products, 1, __ATOMIC_RELAXED) == failing;
}
inline bool simt_algorithm_lacks() {
    static const int lacking = simt_number_of_rank("SIMT_NO_ALGORITHM", 0);
    static int shapes = 0;
    return lacking > 0 && __atomic_add_fetch(&shapes, 1, __ATOMIC_RELAXED) == lacking;
}
inline bool simt_offer_is(const char *wrong) {
    const char *wish = getenv("SIMT_OFFER");
    return wish != nullptr && strcmp(wish, wrong) == 0;
}
inline bool simt_plans_differ() {
    static const bool differ = getenv("SIMT_PLANS_DIFFER") != nullptr;
    return differ;
}
// How many processors NCCL was allowed to take: products must be planned for the others.
inline int &simt_processors_taken() {
    static int taken = 0;
    return taken;
}
// The driver reads the variable once, when it is first called.
inline void simt_say_loading() {
    static const char *const loading = getenv("CUDA_MODULE_LOADING");
    if (getenv("SIMT_SAY_LOADING") == nullptr) { return; }
    fprintf(stderr, "emulator: kernels are loaded %s\n", loading != nullptr ? loading : "by default");
}
inline cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = 12040;
    return cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int *version) {
    *version = simt_number_of_rank("SIMT_DRIVER", 12080);
    return cudaSuccess;
}
inline cudaError_t cudaGetDeviceCount(int *count) {
    simt_say_loading();
    if (simt_number_of_rank("SIMT_DRIVER", 12080) < 12000) { return cudaErrorInsufficientDriver; }
    *count = simt_devices();
    return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
    return device >= 0 && device < simt_devices() ? cudaSuccess : cudaErrorInvalidValue;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
    if (device < 0 || device >= simt_devices()) { return cudaErrorInvalidValue; }
    memset(properties, 0, sizeof *properties);
    int kind = simt_number_of_rank("SIMT_KIND", 0);
    const char *name = getenv("SIMT_NAME") != nullptr ? getenv("SIMT_NAME") : "emulator";
    snprintf(properties->name, sizeof properties->name, kind > 0 ? "%.99s %d" : "%.99s", name, kind);
    properties->totalGlobalMem = simt_memory_bytes();
    properties->major = simt_number_of_rank("SIMT_CAPABILITY", 90) / 10;
    properties->minor = simt_number_of_rank("SIMT_CAPABILITY", 90) % 10;
    properties->multiProcessorCount = SIMT_PROCESSORS;
    return cudaSuccess;
}
inline cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    const char *rank = getenv("OMPI_COMM_WORLD_RANK");
    int node = getenv("SIMT_OWN_GPUS") != nullptr && rank != nullptr ? atoi(rank) : 0;
    snprintf(text, (size_t)size, "0000:%02x:%02x.0", node, device);
    return cudaSuccess;
}
struct cudaFuncAttributes {
    int binaryVersion;
};
template <typename F> inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *, F *) {
    return getenv("SIMT_NO_CODE") == nullptr ? cudaSuccess : cudaErrorInvalidValue;
}
inline cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *available = *total = simt_memory_bytes();
    return cudaSuccess;
}

// New memory is full of NaNs.
inline cudaError_t simt_allocate(void **pointer, size_t bytes) {
    *pointer = nullptr;
    if (bytes <= simt_memory_bytes() && posix_memalign(pointer, 256, bytes) != 0) { *pointer = nullptr; }
    if (*pointer == nullptr) { return cudaErrorMemoryAllocation; }
    memset(*pointer, 0xff, bytes);
    return cudaSuccess;
}
template <typename T> inline cudaError_t cudaMalloc(T **pointer, size_t bytes) {
    return simt_allocate((void **)pointer, bytes);
}
template <typename T> inline cudaError_t cudaMallocHost(T **pointer, size_t bytes) {
    return simt_allocate((void **)pointer, bytes);
}
inline cudaError_t cudaFree(void *pointer) {
    free(pointer);
    return cudaSuccess;
}
inline cudaError_t cudaFreeHost(void *pointer) { return cudaFree(pointer); }

inline cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    (void)flags;
    *stream = new SimtStream{priority};
    return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    delete stream;
    return cudaSuccess;
}
// How many questions a stream answers with "not yet".
inline int &simt_not_ready() {
    static int questions = 0;
    return questions;
}
inline cudaError_t cudaStreamQuery(cudaStream_t) {
    if (simt_not_ready() == 0) { return cudaSuccess; }
    simt_not_ready()--;
    return cudaErrorNotReady;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    *event = new SimtEvent{0};
    return cudaSuccess;
}
inline cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
    event->recorded++;
    return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t, cudaEvent_t) {
    *milliseconds = 0;
    return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
inline cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t) {
    memmove(target, source, bytes);
    return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void *target, int value, size_t bytes, cudaStream_t) {
    memset(target, value, bytes);
    return cudaSuccess;
}
template <typename F> inline cudaError_t cudaFuncSetAttribute(F *, cudaFuncAttribute, int) {
    return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Parameters...),
                                      Arguments &&...arguments) {
    if (simt_launch_fails()) { return cudaErrorLaunchFailure; }
    SimtLaunch launch = {(const void *)kernel, config->gridDim, config->blockDim, config->dynamicSmemBytes};
    if (simt_observer() != nullptr && !simt_observer()(&launch)) { return cudaSuccess; }
    simt_launch(config->gridDim, config->blockDim, config->dynamicSmemBytes, [&] { kernel(arguments...); });
    return cudaSuccess;
}
