// product_rates.h: how fast this machine's processors compute matrix products, in fp32 and in
// bf16: for --precision fastest, the peak that a run's model operations are compared with
// (program/machine_rates.h), and plans.
//
// Which format is faster depends on the processor. With AVX-512 BF16 bf16 is about twice
// as fast, with AMX several times; processors without these convert, and may be slower
// than in fp32. The three products of a linear layer are computed with random numbers, in the
// two formats in turns, because the clock of a shared machine changes from moment to moment.
#pragma once

#include "kernels/kernels.h"

enum {
    PRODUCT_RATES_ROUNDS = 49, // at most; the median counts
    PRODUCT_RATES_ROWS = 1024  // at most: more rows are computed no faster
};

// Multiply-adds count as two operations.
typedef struct ProductRates {
    double gflops[2]; // by Precision; 0: the library has no products in this format
} ProductRates;

// bf16 where it is faster by more than measurements vary: otherwise its rounding buys nothing.
static inline Precision product_rates_faster(const ProductRates *rates) {
    bool faster = rates->gflops[PRECISION_BF16] > 1.1 * rates->gflops[PRECISION_FP32];
    return faster ? PRECISION_BF16 : PRECISION_FP32;
}

// Random numbers (count) for both formats: two of bf16 side by side are one of fp32, of about the
// upper one's size.
static inline Real *product_rates_numbers(size_t count, Random *random) {
    Real *numbers = (Real *)memory_take(count, sizeof(float));
    for (size_t i = 0; i < 2 * count; i++) {
        real_store(numbers, i, (float)(random_uniform(random) - 0.5), PRECISION_BF16);
    }
    return numbers;
}

// Measures with as many threads of its own for about `seconds`, and each wanted format
// (by Precision) at least once. A rate is 0 where it was not measured, because it is not wanted
// or the library has no products of bf16.
static inline ProductRates product_rates_measure(int threads, const bool wanted[2], int rows, int inputs,
                                                 int outputs, double seconds) {
    ProductRates rates = {{0, 0}};
    double times[2][PRODUCT_RATES_ROUNDS];
    int rounds = 0;
    Stream stream;
    memset(&stream, 0, sizeof stream);
    stream.pool = thread_pool_create(threads, false);
    size_t bytes = gemm_workspace_bytes(false, PRECISION_BF16, threads);
    void *workspace = bytes > 0 ? memory_take(1, bytes) : NULL;
    gemm_open(&stream, workspace);
    bool has[2] = {wanted[PRECISION_FP32], wanted[PRECISION_BF16] && matmul_has_bf16()};
    if (rows > PRODUCT_RATES_ROWS) { rows = PRODUCT_RATES_ROWS; }
    size_t ins = (size_t)rows * inputs, outs = (size_t)rows * outputs, weights = (size_t)outputs * inputs;
    Random random = {random_hash(1, ins)};
    Real *input = product_rates_numbers(ins, &random), *weight = product_rates_numbers(weights, &random),
         *output = product_rates_numbers(outs, &random), *d_input = product_rates_numbers(ins, &random),
         *d_weight = product_rates_numbers(weights, &random);
    double end = clock_seconds() + seconds;
    for (; rounds < PRODUCT_RATES_ROUNDS && (rounds == 0 || clock_seconds() < end); rounds++) {
        for (int format = 0; format < 2; format++) {
            double began = clock_seconds();
            if (!has[format]) { continue; }
            stream.precision = (Precision)format;
            matmul_forward(&stream, output, outputs, input, weight, rows, inputs, outputs);
            matmul_backward_input(&stream, d_input, inputs, output, outputs, weight, rows, inputs, outputs);
            matmul_backward_weight(&stream, real_floats(d_weight), output, outputs, input, rows, inputs,
                                   outputs, false);
            times[format][rounds] = clock_seconds() - began;
        }
    }
    free(workspace);
    free(input);
    free(weight);
    free(output);
    free(d_input);
    free(d_weight);
    for (int format = 0; format < 2; format++) {
        if (rounds == 0 || !has[format]) { continue; }
        rates.gflops[format] =
            6e-9 * rows * inputs * outputs / fmax(median_of(times[format], (size_t)rounds), 1e-9);
    }
    thread_pool_destroy(stream.pool);
    return rates;
}
