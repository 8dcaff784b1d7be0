// language.cuh: the language of our kernels: CUDA C++, and one wrapper for each thing
// that C++ alone cannot express.
//
// nvcc compiles the source for GPUs; the host's compiler compiles the same source against an
// emulator (test/simt), and `make test` runs the kernels with it. This imposes some rules:
//   * a kernel is launched by cuda_launch
//   * all shared memory is dynamic and comes from cuda_shared()
//   * blocks consist of whole warps; all 32 lanes take part in what a warp does together
//   * tensor cores, matrix loads and asynchronous copies are used by the wrappers below
//   * results do not depend on the order of threads or blocks: no atomic float operations
//
// `R` in templates is the type of parameters and activations, float or __nv_bfloat16; of
// an operation X, cuda_X<R> launches the kernels for one R, and kernels.h chooses the R
// of the stream's precision. Arithmetic is fp32 whatever R is.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "runtime/device.h"

enum { WARP = 32, CUDA_SHARED_DEFAULT = 48 * 1024 };

// A function that kernels call.
#define DEVICE static __device__ __forceinline__

// Stands before loops over arrays that must stay in registers. With an index that is
// known only at run time the compiler would put them into memory.
#ifndef UNROLL
#define UNROLL _Pragma("unroll")
#endif

// ---- Launching ------------------------------------------------------------------------

// Puts the kernel into the stream's queue. shared: bytes of dynamic shared memory of a block.
template <typename... Parameters, typename... Arguments>
static inline void cuda_launch(Stream *stream, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                               size_t shared, Arguments... arguments) {
    if (shared > (size_t)CUDA_SHARED_DEFAULT) {
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = (cudaStream_t)stream->queue;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

static inline unsigned cuda_blocks(size_t count, size_t block) {
    return (unsigned)((count + block - 1) / block);
}

// ---- What C++ cannot express ------------------------------------------------------------
// The emulator (test/simt/cuda_bf16.h) has its own functions of these names.

#ifdef __CUDACC__
// The dynamic shared memory of this block, aligned to 128 bytes if its size is a multiple of that.
DEVICE char *cuda_shared() {
    extern __shared__ __align__(128) char memory[];
    return memory;
}

// Two bf16 in one register, the first in the lower half, as tensor cores take them.
DEVICE uint32_t bf16_pair(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// 2^x in one instruction, to about 2 units in the last place; denormal results become 0.
DEVICE float exp2_approximate(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// Tensor cores (PTX ISA, "Matrix fragments for mma.m16n8k16"). With g = lane / 4, t =
// lane % 4 a lane holds:
//
//   a (16, 16)   a[0]: row g, columns 2t, 2t+1; a[1]: row g + 8; a[2], a[3]: 8 columns on
//   b (16, 8)    b[0]: rows 2t, 2t+1 of column g; b[1]: 8 rows on
//   d (16, 8)    d[0], d[1]: row g, columns 2t, 2t+1; d[2], d[3]: row g + 8

// d += a b; a and b in bf16, sums in fp32. Called by the whole warp.
DEVICE void mma_m16n8k16(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Loads four 8 x 8 matrices of bf16 from shared memory. Lane l gives the address of row l % 8 of
// matrix l / 8, a multiple of 16 bytes. r[i] becomes the elements (row g, columns 2t, 2t+1) of
// matrix i; TRANSPOSED: (rows 2t, 2t+1 of column g). Called by the whole warp.
template <bool TRANSPOSED> DEVICE void matrix_load_x4(uint32_t r[4], const void *row) {
    uint32_t address = (uint32_t)__cvta_generic_to_shared(row);
    if (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
    }
}

// Starts to copy 16 bytes from global to shared memory; both addresses are multiples of 16. If
// not `valid`, zeros arrive and nothing is read.
DEVICE void copy_async(void *shared, const void *global, bool valid) {
    uint32_t address = (uint32_t)__cvta_generic_to_shared(shared);
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(bytes)
                 : "memory");
}

// Closes a group of this thread's copies.
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most GROUPS of this thread's latest groups are unfinished. What other
// threads copied is visible after a barrier behind this wait.
template <int GROUPS> DEVICE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}
#endif

// ---- Numbers --------------------------------------------------------------------------

DEVICE float to_float(float value) { return value; }
DEVICE float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename R> DEVICE R from_float(float value);
template <> __device__ __forceinline__ float from_float<float>(float value) { return value; }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
    return __float2bfloat16_rn(value);
}

// Returns 1 / (1 + exp(-x)); *complement becomes 1 minus that, without cancellation.
// The bound keeps exp finite; the comparison is false for NaN, which passes through. At
// the bound the quotient is 0: __fdividef gives 0 for divisors from 2^126 on.
DEVICE float logistic(float x, float *complement) {
    float e = __expf(x < -88.0f ? 88.0f : -x), s = __fdividef(1.0f, 1.0f + e);
    *complement = e * s;
    return s;
}

// An array of Real as an array of R.
template <typename R> static __host__ __device__ __forceinline__ R *reals(Real *place) { return (R *)place; }
template <typename R> static __host__ __device__ __forceinline__ const R *reals(const Real *place) {
    return (const R *)place;
}

// ---- Several elements in one access ---------------------------------------------------

// WIDTH elements that one thread loads or stores at once. Eight bf16 are kept as pairs,
// because the compiler would otherwise give each a register of its own.
template <typename R, int WIDTH> struct __align__(WIDTH * sizeof(R)) Piece { R values[WIDTH]; };

template <> struct __align__(16) Piece<__nv_bfloat16, 8> { uint32_t pairs[4]; };

template <typename R, int WIDTH> DEVICE void piece_unpack(float values[WIDTH], const Piece<R, WIDTH> &piece) {
    UNROLL
    for (int k = 0; k < WIDTH; k++) { values[k] = to_float(piece.values[k]); }
}

DEVICE void piece_unpack(float values[8], const Piece<__nv_bfloat16, 8> &piece) {
    UNROLL
    for (int k = 0; k < 4; k++) {
        values[2 * k] = __uint_as_float(piece.pairs[k] << 16);
        values[2 * k + 1] = __uint_as_float(piece.pairs[k] & 0xffff0000u);
    }
}

// Rounds to R.
template <int WIDTH, typename R> DEVICE void piece_pack(Piece<R, WIDTH> &piece, const float values[WIDTH]) {
    UNROLL
    for (int k = 0; k < WIDTH; k++) { piece.values[k] = from_float<R>(values[k]); }
}

DEVICE void piece_pack(Piece<__nv_bfloat16, 8> &piece, const float values[8]) {
    UNROLL
    for (int k = 0; k < 4; k++) { piece.pairs[k] = bf16_pair(values[2 * k], values[2 * k + 1]); }
}

template <int WIDTH, typename R> DEVICE Piece<R, WIDTH> piece_load(const R *place) {
    return *reinterpret_cast<const Piece<R, WIDTH> *>(place);
}

template <int WIDTH, typename R> DEVICE void piece_store(R *place, const Piece<R, WIDTH> &piece) {
    *reinterpret_cast<Piece<R, WIDTH> *>(place) = piece;
}

// 16 bytes in one store. Where elements lie in registers of their own, nvcc may store
// them one by one.
DEVICE void store_16_bytes(void *place, const void *bytes) {
    uint4 words;
    memcpy(&words, bytes, sizeof words);
    __stwb((uint4 *)place, words);
}

// Elements of a pack: 16 bytes, the widest access of one thread. Addresses must be multiples of 16.
template <typename R> static constexpr int PACK = 16 / sizeof(R);

// Whether rows of `columns` elements, one behind the other from each of `places` on, may
// be read in packs.
template <typename... R> static inline bool pack_fits(size_t columns, const R *...places) {
    return (((uintptr_t)places % 16 == 0 && columns % (16 / sizeof(R)) == 0) && ...);
}

// ---- Within a warp and within a block -------------------------------------------------

DEVICE int lane_index() { return (int)(threadIdx.x % WARP); }
DEVICE int warp_index() { return (int)(threadIdx.x / WARP); }

// The sum over the lanes of a warp, for all of them, with the same bits: float addition
// commutes, and each step adds the same two halves in both lanes.
template <typename T> DEVICE T warp_sum(T value) {
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) { value += __shfl_xor_sync(0xffffffffu, value, lanes); }
    return value;
}

// The maximum over the lanes; a NaN is skipped.
DEVICE float warp_max(float value) {
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) {
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, lanes));
    }
    return value;
}

// The sum over all threads of a one-dimensional block, for all of them. scratch: one T for each
// warp, in shared memory; it may be used again only after the next barrier of the block.
template <typename T> DEVICE T block_sum(T value, T *scratch) {
    int warps = (int)(blockDim.x / WARP);
    value = warp_sum(value);
    if (lane_index() == 0) { scratch[warp_index()] = value; }
    __syncthreads();
    T sum = 0;
    for (int i = 0; i < warps; i++) { sum += scratch[i]; }
    return sum;
}

DEVICE float block_max(float value, float *scratch) {
    int warps = (int)(blockDim.x / WARP);
    value = warp_max(value);
    if (lane_index() == 0) { scratch[warp_index()] = value; }
    __syncthreads();
    float maximum = scratch[0];
    for (int i = 1; i < warps; i++) { maximum = fmaxf(maximum, scratch[i]); }
    return maximum;
}
