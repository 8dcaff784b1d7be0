// build_facts.h: what `train_gpt --version` says of the program: what it was built from,
// with what, and for what. Enough to tell two builds apart in a report of a problem.
#ifndef ACCO_PROGRAM_BUILD_FACTS_H
#define ACCO_PROGRAM_BUILD_FACTS_H

#include "comm/nccl.h"
#include "comm/transport_mpi.h"
#include "kernels/kernels.h"
#include "options/options.h"

// One fact a line, the version first. gcc's __VERSION__ is a bare number; others name
// themselves.
static inline void print_build_facts(FILE *file) {
    char mpi[128], cuda[64], nccl[64], products[96];
    transport_mpi_version(mpi, sizeof mpi);
    gpu_version(cuda, sizeof cuda);
    nccl_version(nccl, sizeof nccl);
    bool is_number = __VERSION__[0] >= '0' && __VERSION__[0] <= '9';
    fprintf(file, "acco.c %s\n", ACCO_VERSION);
    fprintf(file, "commit     %s\n", ACCO_REVISION[0] != '\0' ? ACCO_REVISION : "unknown");
    fprintf(file, "compiler   %s%s\n", is_number ? "gcc " : "", __VERSION__);
    fprintf(file, "processor  %s\n", ACCO_PROCESSOR[0] != '\0' ? ACCO_PROCESSOR : "unknown");
    fprintf(file, "products   %s\n", matmul_library(products));
    fprintf(file, "MPI        %s\n", mpi);
    fprintf(file, "CUDA       %s\n", cuda);
    fprintf(file, "NCCL       %s\n", nccl);
}

#endif
