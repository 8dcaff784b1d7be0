// sizes.h: how much workspace the kernels for GPUs need. Plain C, so that a program that was
// built for CPUs plans the same memory for a GPU elsewhere.
#ifndef ACCO_KERNELS_CUDA_SIZES_H
#define ACCO_KERNELS_CUDA_SIZES_H

#include <stddef.h>

enum {
    CUDA_ROW_BLOCKS = 264,  // see column_sums.cuh
    EMBEDDING_SEGMENT = 64, // see embedding.cuh
    GEMM_WORKSPACE_BYTES = 32 << 20
};

// Floats of partials for embedding_backward, on a GPU: each segment has a sum for the
// range that it continues, and one for the range that the next segment continues.
static inline size_t embedding_partials_floats(int rows, int C) {
    return ((size_t)rows + EMBEDDING_SEGMENT - 1) / EMBEDDING_SEGMENT * 2 * (size_t)C;
}

#endif
