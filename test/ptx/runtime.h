// runtime.h: the functions of the CUDA runtime that the program's host code calls. A
// launch looks its kernel up in the PTX by the name under which nvcc registered it, and
// takes the arguments as the PTX declares the parameters.
//
// Memory is the host's. An allocation has the size that was asked for and is aligned to
// 256 bytes, no more.
//
//   PTX_FILE      the PTX: it must have every kernel that is launched
//   PTX_SEED      a number: other random orders
//   PTX_REPORT    a file: gets a line for each kernel that was run, and one for each of
//                 its instructions that was never executed
#pragma once

#include <cuda_runtime.h>
#include <sys/mman.h>

#include "test/ptx/execute.h"

// Shared memory of a block that may be had without asking, at most on any GPU, and on
// those that have least (8.6, 8.9 and 12.0).
enum {
    SHARED_DEFAULT = 48 << 10,
    SHARED_MOST = 227 << 10,
    SHARED_LEAST = 99 << 10,
    ALLOCATION_ALIGNMENT = 256
};

struct HostKernel {
    std::string name;
    size_t shared_allowed = SHARED_DEFAULT;
};

static inline std::map<const void *, HostKernel> &host_kernels() {
    static std::map<const void *, HostKernel> all;
    return all;
}

static void machine_end(void) {
    const char *path = getenv("PTX_REPORT");
    FILE *out = path != nullptr ? fopen(path, "a") : nullptr;
    for (auto &[name, kernel] : machine().kernels) {
        if (out == nullptr || kernel.launches == 0) { continue; }
        fprintf(out, "kernel\t%s\t%lu\t%lu\t%zu\n", name.c_str(), kernel.launches, kernel.executed,
                kernel.code.size());
        for (size_t i = 0; i < kernel.code.size(); i++) {
            const Instruction &missed = kernel.code[i];
            if (missed.executed > 0) { continue; }
            fprintf(out, "missed\t%s\t%zu\t%s:%d\t%s\n", name.c_str(), i, missed.file, missed.line,
                    missed.text.c_str());
        }
    }
    if (out != nullptr) { fclose(out); }
    fflush(stdout);
    if (!machine().reported.empty()) { _Exit(3); }
}

static inline void machine_begin(void) {
    if (!machine().kernels.empty()) { return; }
    const char *path = getenv("PTX_FILE"), *seed = getenv("PTX_SEED");
    if (seed != nullptr) { machine().random ^= strtoull(seed, nullptr, 0) * 0x9e3779b97f4a7c15u; }
    machine_load(path != nullptr ? path : "build/ptx/program.ptx");
    atexit(machine_end);
}

static inline cudaError_t machine_launch(const void *host, const cudaLaunchConfig_t &config,
                                         void **arguments) {
    machine_begin();
    auto registered = host_kernels().find(host);
    if (registered == host_kernels().end()) { report_and_end("a launch of what is no kernel", ""); }
    const HostKernel &function = registered->second;
    auto found = machine().kernels.find(function.name);
    if (found == machine().kernels.end()) {
        report_and_end("a kernel that is not in the PTX", function.name);
    }
    Kernel &kernel = found->second;
    if (!kernel.unknown.empty()) {
        report_and_end("a kernel that cannot be run", kernel.name + ": " + kernel.unknown);
    }
    Dim grid = {config.gridDim.x, config.gridDim.y, config.gridDim.z},
        block = {config.blockDim.x, config.blockDim.y, config.blockDim.z};
    uint64_t threads = block.count();
    size_t shared = config.dynamicSmemBytes;
    bool grid_fits = grid.count() > 0 && grid.x <= 0x7fffffffu && grid.y <= 65535 && grid.z <= 65535;
    bool block_fits = threads > 0 && threads <= 1024 && threads % LANES == 0 && block.z <= 64 &&
                      (kernel.max_threads == 0 || threads <= kernel.max_threads);
    bool shared_fits = shared <= function.shared_allowed && shared <= SHARED_LEAST;
    if (!grid_fits || !block_fits || !shared_fits || config.numAttrs != 0) {
        report("a launch beyond the limits",
               kernel.name + text_of(": grid %u %u %u, block %u %u %u, %zu bytes of shared memory", grid.x,
                                     grid.y, grid.z, block.x, block.y, block.z, shared));
        return cudaErrorInvalidConfiguration;
    }
    std::vector<char> parameters(kernel.parameter_bytes);
    for (size_t i = 0; i < kernel.parameters.size(); i++) {
        memcpy(&parameters[kernel.parameters[i].offset], arguments[i], kernel.parameters[i].size);
    }
    machine_run(kernel, grid, block, shared, parameters.data());
    return cudaSuccess;
}

static inline size_t allocation_room(size_t bytes) {
    return (bytes + 2 * ALLOCATION_ALIGNMENT + 4095) / 4096 * 4096;
}

static inline void *pages_new(size_t bytes) {
    void *pages =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) { report_and_end("no memory", ""); }
    madvise(pages, bytes, MADV_HUGEPAGE); // a wish
    return pages;
}

// What Allocation keeps of each byte: two stamps, and whether it was written. Never 0 bytes.
static inline size_t marks_room(size_t bytes) { return (2 * sizeof(uint64_t) + 1) * bytes + 1; }

static inline void *machine_allocate(size_t bytes) {
    machine_begin();
    char *begin = (char *)pages_new(allocation_room(bytes)) + ALLOCATION_ALIGNMENT;
    memset(begin, 0xcd, bytes);
    uint64_t *stamps = (uint64_t *)pages_new(marks_room(bytes));
    machine().allocations[(uintptr_t)begin] = {begin, bytes, stamps, stamps + bytes,
                                               (uint8_t *)(stamps + 2 * bytes)};
    return begin;
}

// A copy or a fill by the host.
static inline void check_range(const void *memory, size_t bytes, const char *what) {
    Allocation *found = allocation_at((uintptr_t)memory);
    if (found != nullptr && (const char *)memory + bytes > found->begin + found->bytes) {
        report("the host copies behind the end of an allocation", what);
    }
}

// Ours: which order the next launches have (1: lanes are split at random), and that the
// host itself has written device memory.
extern "C" void machine_use_order(int order) { machine().split_groups = order == 1; }
extern "C" void machine_mark_written(const void *memory, size_t bytes) { mark_written(memory, bytes); }

// nvcc's code calls these before main, and around a launch.
extern "C" void **__cudaRegisterFatBinary(void *) {
    static void *handle;
    return &handle;
}
extern "C" void __cudaRegisterFatBinaryEnd(void **) {}
extern "C" void __cudaUnregisterFatBinary(void **) {}
extern "C" char __cudaInitModule(void **) { return 1; }
extern "C" void __cudaRegisterFunction(void **, const char *host, char *, const char *name, int, uint3 *,
                                       uint3 *, dim3 *, dim3 *, int *) {
    host_kernels()[host].name = name;
}
extern "C" unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, struct CUstream_st *) { abort(); }
extern "C" cudaError_t __cudaPopCallConfiguration(dim3 *, dim3 *, size_t *, void *) { abort(); }
extern "C" cudaError_t __cudaGetKernel(cudaKernel_t *, const void *) { abort(); }
extern "C" cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void **, size_t, cudaStream_t) {
    abort();
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *host, void **arguments) {
    return machine_launch(host, *config, arguments);
}
cudaError_t cudaFuncSetAttribute(const void *host, cudaFuncAttribute attribute, int value) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value > SHARED_MOST) {
        return cudaErrorInvalidValue;
    }
    host_kernels()[host].shared_allowed = (size_t)value;
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
    *attributes = {};
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **memory, size_t bytes) {
    *memory = machine_allocate(bytes);
    return cudaSuccess;
}
cudaError_t cudaMallocHost(void **memory, size_t bytes) {
    *memory = machine_allocate(bytes);
    mark_written(*memory, bytes);
    return cudaSuccess;
}
cudaError_t cudaFree(void *memory) {
    Allocation *found = allocation_at((uintptr_t)memory);
    if (memory == nullptr) { return cudaSuccess; }
    if (found == nullptr || found->begin != memory) {
        report_and_end("memory is freed that was not allocated", "");
    }
    munmap((char *)memory - ALLOCATION_ALIGNMENT, allocation_room(found->bytes));
    munmap(found->writers, marks_room(found->bytes));
    machine().allocations.erase((uintptr_t)memory);
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void *memory) { return cudaFree(memory); }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    check_range(to, bytes, "to");
    check_range(from, bytes, "from");
    Allocation *source = allocation_at((uintptr_t)from);
    for (size_t i = 0; source != nullptr && i < bytes; i++) {
        if (source->written[(size_t)((const char *)from - source->begin) + i]) { continue; }
        report("the host copies what nobody wrote", text_of("byte %zu of %zu", i, bytes));
    }
    memmove(to, from, bytes);
    mark_written(to, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *memory, int byte, size_t bytes, cudaStream_t) {
    check_range(memory, bytes, "a fill");
    memset(memory, byte, bytes);
    mark_written(memory, bytes);
    return cudaSuccess;
}
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
const char *cudaGetErrorString(cudaError_t) { return "the machine that executes PTX has said why"; }

// Work has ended when it is queued.
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) {
    *stream = (cudaStream_t)1;
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    *event = (cudaEvent_t)1;
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = *greatest = 0;
    return cudaSuccess;
}
