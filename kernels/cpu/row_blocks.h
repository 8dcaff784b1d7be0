// row_blocks.h: how kernels cut a (rows, columns) array into tasks, and how sums over
// rows stay independent of the number of threads.
//
// Rows are cut into at most ROW_BLOCKS blocks, a number that depends on the rows alone. A
// kernel that sums over rows adds the rows of a block, in order, to partial sums of that block;
// then column_sums_add adds the partial sums in the order of blocks. So the additions are the
// same no matter which thread runs a block.
#pragma once

#include "runtime/device.h"
#include "runtime/numbers.h"

enum {
    ROW_BLOCKS = 32,       // at most
    CUDA_ROW_BLOCKS = 264, // on a GPU: see column_sums.cuh
    COLUMN_BLOCK = 256     // columns of a task of column_sums_add
};

static inline int row_block_count(int rows) { return int_min(rows, ROW_BLOCKS); }

// The first row of block `block`; for block row_block_count(rows), one behind the last, `rows`.
static inline int row_block_begin(int block, int rows) {
    return (int)((long long)rows * block / row_block_count(rows));
}

typedef struct ColumnSums {
    float *sums;
    const float *partials;
    int blocks, stride, columns;
} ColumnSums;

static inline void column_sums_task(void *context, int task, int thread) {
    (void)thread;
    const ColumnSums *work = (const ColumnSums *)context;
    int begin = task * COLUMN_BLOCK, end = int_min(begin + COLUMN_BLOCK, work->columns);
    for (int block = 0; block < work->blocks; block++) {
        const float *partial = work->partials + (size_t)block * work->stride;
        for (int c = begin; c < end; c++) { work->sums[c] += partial[c]; }
    }
}

// sums (columns) += the sum over blocks of partials (blocks, stride), in order.
static inline void column_sums_add(Stream *stream, float *sums, const float *partials, int blocks, int stride,
                                   int columns) {
    ColumnSums work = {
        .sums = sums, .partials = partials, .blocks = blocks, .stride = stride, .columns = columns};
    thread_pool_run(stream->pool, (columns + COLUMN_BLOCK - 1) / COLUMN_BLOCK, column_sums_task, &work);
}
