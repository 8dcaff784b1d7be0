// cuda_kernels.h: what the tests of CUDA kernels share: device copies of exactly the
// size that a kernel may touch, random numbers, a CPU stream for the oracle and a CUDA
// stream for the kernel under test.
//
// `make test` compiles these tests with the host's compiler against the emulator
// (test/simt) and runs every case in each of its orders. Where nvcc is, it also compiles
// them with nvcc and runs them on a machine that executes PTX (test/ptx). `make
// test-gpu` runs them on a GPU, with larger shapes unless ACCO_SMALL is set, which is
// for tools that make everything a hundred times slower.
#pragma once

#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

extern "C" {
#include <cmocka.h>
}

#include "kernels/cuda/language.cuh"
#include "runtime/random.h"

#if defined(ACCO_SIMT_H)
enum { CUDA_EMULATED = 1, CUDA_AS_PTX = 0 };
#elif defined(ACCO_PTX)
enum { CUDA_EMULATED = 0, CUDA_AS_PTX = 1, SIMT_ORDERS = 2 };
extern "C" void machine_use_order(int order);
#else
enum { CUDA_EMULATED = 0, CUDA_AS_PTX = 0, SIMT_ORDERS = 1 };
#endif

// Whether only shapes that are small enough for the emulator are run.
static inline bool cuda_small_shapes(void) {
    return CUDA_EMULATED || CUDA_AS_PTX || getenv("ACCO_SMALL") != NULL;
}

// Every case runs once for each order; on a GPU there is one.
static inline void cuda_use_order(int order) {
#if defined(ACCO_SIMT_H)
    simt_order() = (SimtOrder)order;
#elif defined(ACCO_PTX)
    machine_use_order(order);
#else
    (void)order;
#endif
}

// From here on kernels are not run, but counted by `count`; NULL: they are run again.
// Only in the emulator.
typedef void CudaLaunchCounter(const void *kernel);
#ifdef ACCO_SIMT_H
static inline CudaLaunchCounter *&cuda_launch_counter(void) {
    static CudaLaunchCounter *counter = nullptr;
    return counter;
}
static inline bool cuda_count_launch(const SimtLaunch *launch) {
    cuda_launch_counter()(launch->kernel);
    return false;
}
static inline void cuda_count_launches(CudaLaunchCounter *count) {
    cuda_launch_counter() = count;
    simt_observer() = count != nullptr ? cuda_count_launch : nullptr;
}
#else
static inline void cuda_count_launches(CudaLaunchCounter *) {}
#endif

// Whether the library has products of FP8 here.
static inline bool cuda_has_fp8(void) {
    cudaDeviceProp properties = {};
    if (CUDA_EMULATED || CUDA_AS_PTX) { return true; }
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    return 10 * properties.major + properties.minor >= 89;
}

static inline Stream *cuda_test_stream(Precision precision) {
    static Stream stream;
    if (stream.queue == NULL) {
        cudaStream_t queue;
        CUDA_CHECK(cudaStreamCreateWithPriority(&queue, cudaStreamNonBlocking, 0));
        stream.queue = (void *)queue;
        stream.name = "test";
    }
    stream.precision = precision;
    return &stream;
}

static inline void cuda_test_wait(Stream *stream) {
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(cudaStreamSynchronize((cudaStream_t)stream->queue));
}

// `bytes` bytes of device memory and nothing behind them; filled with NaNs (0xff). Free
// with cudaFree.
static inline void *device_new(size_t bytes) {
    void *memory = NULL;
    CUDA_CHECK(cudaMalloc(&memory, bytes));
    CUDA_CHECK(cudaMemsetAsync(memory, 0xff, bytes, (cudaStream_t)cuda_test_stream(PRECISION_FP32)->queue));
    return memory;
}

static inline void *device_from_host(const void *host, size_t bytes) {
    Stream *stream = cuda_test_stream(PRECISION_FP32);
    void *memory = device_new(bytes);
    CUDA_CHECK(cudaMemcpyAsync(memory, host, bytes, cudaMemcpyHostToDevice, (cudaStream_t)stream->queue));
    cuda_test_wait(stream);
    return memory;
}

static inline void device_to_host(void *host, const void *device, size_t bytes) {
    Stream *stream = cuda_test_stream(PRECISION_FP32);
    CUDA_CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, (cudaStream_t)stream->queue));
    cuda_test_wait(stream);
}

static inline uint16_t host_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

static inline float host_from_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Rounds host (count) to the precision, in place, because the oracle must start from the
// same numbers.
static inline void host_round(float *host, size_t count, Precision precision) {
    for (size_t i = 0; precision == PRECISION_BF16 && i < count; i++) {
        host[i] = host_from_bf16(host_bf16(host[i]));
    }
}

// A device copy of host (count) in the precision; host should be rounded already.
static inline Real *device_reals(const float *host, size_t count, Precision precision) {
    if (precision == PRECISION_FP32) { return (Real *)device_from_host(host, count * sizeof(float)); }
    uint16_t *halves = (uint16_t *)malloc(count * sizeof(uint16_t));
    for (size_t i = 0; i < count; i++) { halves[i] = host_bf16(host[i]); }
    Real *device = (Real *)device_from_host(halves, count * sizeof(uint16_t));
    free(halves);
    return device;
}

static inline void host_reals(float *host, const Real *device, size_t count, Precision precision) {
    if (precision == PRECISION_FP32) {
        device_to_host(host, device, count * sizeof(float));
        return;
    }
    uint16_t *halves = (uint16_t *)malloc(count * sizeof(uint16_t));
    device_to_host(halves, device, count * sizeof(uint16_t));
    for (size_t i = 0; i < count; i++) { host[i] = host_from_bf16(halves[i]); }
    free(halves);
}

// The same numbers in every run, so that a test of the same code ends alike; others with
// ACCO_TEST_SEED. Prints the seed, which repeats a failure.
static inline uint64_t seed_of_tests(void) {
    const char *text = getenv("ACCO_TEST_SEED");
    uint64_t seed = text != NULL ? strtoull(text, NULL, 10) : 1;
    print_message("seed %llu\n", (unsigned long long)seed);
    return seed;
}

static inline float *host_normals(Random *random, size_t count, double stddev) {
    float *values = (float *)malloc(count * sizeof(float));
    for (size_t i = 0; i < count; i++) { values[i] = (float)(stddev * random_normal(random)); }
    return values;
}

// |a - b| over all elements, divided by |b| or by the norm that `count` elements of `size`
// have, whichever is larger; NaN where either has one. Where terms of `size` may cancel, |b|
// alone can be arbitrarily small beside their rounding.
static inline double error_of_terms(const float *a, const float *b, size_t count, double size) {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < count; i++) {
        difference += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        norm += (double)b[i] * (double)b[i];
    }
    return sqrt(difference) / fmax(fmax(sqrt(norm), size * sqrt((double)count)), 1e-30);
}

static inline double relative_error(const float *a, const float *b, size_t count) {
    return error_of_terms(a, b, count, 0);
}

// Appends what was compared, its error and what is allowed to the file that ACCO_ERRORS names:
// whole lines, also where several programs write to it. test/ptx/run makes a table of the largest.
static inline void keep_error(const char *what, double error, double allowed) {
    char line[512];
    const char *path = getenv("ACCO_ERRORS");
    int file = path != NULL ? open(path, O_WRONLY | O_CREAT | O_APPEND, 0666) : -1;
    if (path == NULL) { return; }
    int length = snprintf(line, sizeof line, "%.400s\t%g\t%g\n", what, error, allowed);
    if (file < 0 || write(file, line, (size_t)length) != length) {
        print_message("%s is not kept: %s", path, line);
    }
    if (file >= 0) { close(file); }
}

// Where elements are compared one by one: the element whose difference is the largest share of what
// is allowed for it. A NaN stays.
typedef struct Worst {
    double share, got, expected;
    size_t element;
} Worst;

static inline void worst_add(Worst *worst, size_t element, double got, double expected, double allowed) {
    double difference = fabs(got - expected), share = difference == 0 ? 0 : difference / allowed;
    if (share <= worst->share || isnan(worst->share)) { return; }
    *worst = {share, got, expected, element};
}

#define check_worst(what, worst) \
    do { \
        keep_error(what, (worst).share, 1); \
        if (!((worst).share <= 1)) { \
            fail_msg("%s: element %zu is %.9g, expected %.9g: %g times as far off as is allowed", what, \
                     (worst).element, (worst).got, (worst).expected, (worst).share); \
        } \
    } while (0)

#define check_close(what, a, b, count, tolerance) check_close_terms(what, a, b, count, 0, tolerance)

#define check_close_terms(what, a, b, count, size, tolerance) \
    do { \
        double check_error = error_of_terms(a, b, count, size); \
        keep_error(what, check_error, tolerance); \
        if (!(check_error <= (tolerance))) { \
            fail_msg("%s: relative error %g, allowed %g", what, check_error, (double)(tolerance)); \
        } \
    } while (0)
