// product_rates.h: how fast this rank's threads compute matrix products, in fp32 and in
// bf16.
//
// Which format is faster depends on the processor. With AVX-512 BF16 bf16 is about twice
// as fast, with AMX several times; processors without these convert, and may be slower
// than in fp32. Only a measurement tells. It computes the three products of a linear
// layer at the model's own shape, with random numbers, in both formats in turns, because
// the clock of a shared machine changes from moment to moment.
#ifndef ACCO_KERNELS_CPU_PRODUCT_RATES_H
#define ACCO_KERNELS_CPU_PRODUCT_RATES_H

#include <math.h>
#include <string.h>

#include "kernels/cpu/matmul.h"
#include "runtime/numbers.h"
#include "runtime/random.h"

enum {
    PRODUCT_RATES_ROUNDS = 49, // at most; the median counts
    PRODUCT_RATES_ROWS = 1024  // at most: more rows are computed no faster
};

// Multiply-adds count as two operations.
typedef struct ProductRates {
    double gflops[2]; // by Precision; 0: the library has no products in this format
} ProductRates;

// bf16 where it is faster by more than measurements vary: otherwise its rounding buys
// nothing.
static inline Precision product_rates_faster(const ProductRates *rates) {
    bool faster = rates->gflops[PRECISION_BF16] > 1.1 * rates->gflops[PRECISION_FP32];
    return faster ? PRECISION_BF16 : PRECISION_FP32;
}

// The arrays of a linear layer, in one format.
typedef struct ProductLayer {
    int rows, inputs, outputs;
    Real *input;     // (rows, inputs)
    Real *weight;    // (outputs, inputs)
    Real *output;    // (rows, outputs)
    Real *d_input;   // (rows, inputs)
    float *d_weight; // (outputs, inputs)
} ProductLayer;

static inline Real *product_layer_values(size_t count, Precision precision, uint64_t seed) {
    Real *values = (Real *)malloc(count * precision_bytes(precision));
    Random random = {random_hash(seed, count)};
    for (size_t i = 0; values != NULL && i < count; i++) {
        real_store(values, i, (float)(random_uniform(&random) - 0.5), precision);
    }
    return values;
}

static inline void product_layer_free(ProductLayer *layer) {
    free(layer->input);
    free(layer->weight);
    free(layer->output);
    free(layer->d_input);
    free(layer->d_weight);
}

// Returns false where there is no memory.
static inline bool product_layer_make(ProductLayer *layer, Precision precision, int rows, int inputs,
                                      int outputs) {
    size_t in = (size_t)rows * (size_t)inputs, out = (size_t)rows * (size_t)outputs,
           weight = (size_t)outputs * (size_t)inputs;
    layer->rows = rows;
    layer->inputs = inputs;
    layer->outputs = outputs;
    layer->input = product_layer_values(in, precision, 1);
    layer->weight = product_layer_values(weight, precision, 2);
    layer->output = product_layer_values(out, precision, 3);
    layer->d_input = product_layer_values(in, precision, 4);
    layer->d_weight = (float *)calloc(weight, sizeof(float));
    return layer->input != NULL && layer->weight != NULL && layer->output != NULL && layer->d_input != NULL &&
           layer->d_weight != NULL;
}

// Seconds of the layer's three products.
static inline double product_layer_time(Stream *stream, const ProductLayer *layer) {
    int rows = layer->rows, inputs = layer->inputs, outputs = layer->outputs;
    double began = clock_seconds();
    cpu_matmul_forward(stream, layer->output, outputs, layer->input, layer->weight, rows, inputs, outputs);
    cpu_matmul_backward_input(stream, layer->d_input, inputs, layer->output, outputs, layer->weight, rows,
                              inputs, outputs);
    cpu_matmul_backward_weight(stream, layer->d_weight, layer->output, outputs, layer->input, rows, inputs,
                               outputs);
    return clock_seconds() - began;
}

// Measures for about `seconds`, and each format at least once; of bf16 nothing where the
// library has no such products. Runs on the calling thread and those of the pool. A rate
// is 0 where it was not measured, also for want of memory.
static inline ProductRates product_rates_measure(ThreadPool *pool, const bool wanted[2], int rows, int inputs,
                                                 int outputs, double seconds) {
    ProductRates rates = {{0, 0}};
    ProductLayer layers[2];
    bool has[2] = {wanted[PRECISION_FP32], wanted[PRECISION_BF16] && matmul_has_bf16()}, made = true;
    double times[2][PRODUCT_RATES_ROUNDS], end = clock_seconds() + seconds;
    int rounds = 0;
    Stream stream;
    memset(layers, 0, sizeof layers);
    memset(&stream, 0, sizeof stream);
    stream.pool = pool;
    if (rows > PRODUCT_RATES_ROWS) { rows = PRODUCT_RATES_ROWS; }
    for (int format = 0; format < 2; format++) {
        made = made && (!has[format] ||
                        product_layer_make(&layers[format], (Precision)format, rows, inputs, outputs));
    }
    while (made && rounds < PRODUCT_RATES_ROUNDS && (rounds == 0 || clock_seconds() < end)) {
        for (int format = 0; format < 2; format++) {
            stream.precision = (Precision)format;
            if (has[format]) { times[format][rounds] = product_layer_time(&stream, &layers[format]); }
        }
        rounds++;
    }
    double operations = 6.0 * rows * inputs * outputs;
    for (int format = 0; format < 2; format++) {
        product_layer_free(&layers[format]);
        if (rounds == 0 || !has[format]) { continue; }
        rates.gflops[format] = operations / fmax(median_of(times[format], (size_t)rounds), 1e-9) / 1e9;
    }
    return rates;
}

#endif
