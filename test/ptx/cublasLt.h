// cublasLt.h: stands in for the library where PTX is executed (machine.h): the plain
// loops of the emulator, between the toolkit's own types. The machine is told what they
// write.
#pragma once

#include <cuda_runtime.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// What the loops ask the emulator for.
enum { SIMT_PROCESSORS = 1 };
static inline int simt_processors_taken(void) { return 0; }
static inline bool simt_algorithm_lacks(void) { return false; }
static inline bool simt_plans_differ(void) { return false; }
static inline bool simt_offer_is(const char *) { return false; }
static inline bool simt_product_fails(void) { return false; }
static inline void simt_fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    abort();
}

#define cublasLtMatmul simt_matmul
#include "test/simt/cublasLt.h"
#undef cublasLtMatmul

extern "C" void machine_mark_written(const void *memory, size_t bytes);

static inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                            const void *alpha, const void *a, cublasLtMatrixLayout_t a_layout,
                                            const void *b, cublasLtMatrixLayout_t b_layout, const void *beta,
                                            const void *c, cublasLtMatrixLayout_t c_layout, void *d,
                                            cublasLtMatrixLayout_t d_layout,
                                            const cublasLtMatmulAlgo_t *algorithm, void *workspace,
                                            size_t bytes, cudaStream_t stream) {
    size_t size = d_layout->type == CUDA_R_32F ? 4 : 2, rows = d_layout->rows, columns = d_layout->columns;
    for (size_t column = 0; column < columns; column++) {
        for (int32_t i = 0; i < d_layout->count; i++) {
            size_t place = (size_t)i * (size_t)d_layout->offset + column * (size_t)d_layout->stride;
            machine_mark_written((char *)d + place * size, rows * size);
        }
    }
    return simt_matmul(handle, operation, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout,
                       algorithm, workspace, bytes, stream);
}
