// peak.h: the rate that a run's model operations are compared with, so that reports can
// say what share of it the run reaches (model FLOPs utilisation, MFU).
//
// On a GPU that is what its maker states for dense products of bf16, without sparsity. On
// CPUs it is the rate of the products of a layer (kernels/cpu/product_rates.h), measured
// when the run begins, by all ranks at once because they share the machine. This takes
// PEAK_SECONDS, so it is done only where the run is long. Where a rank does not know its
// rate, nobody does.
#ifndef ACCO_PROGRAM_PEAK_H
#define ACCO_PROGRAM_PEAK_H

#include "program/run.h"

#define PEAK_SECONDS 0.2
#define PEAK_LONG_RUN 1e14 // model operations of a rank: ten minutes of a small machine, half one of a large

typedef struct GpuPeak {
    const char *part; // of the GPU's name; the first row that fits counts
    double flops;     // of dense products of bf16, in a second
} GpuPeak;

// From NVIDIA's data sheets. GPUs that are sold with several limits of power, and those
// that add products of bf16 at half the rate in fp32, are left out.
static const GpuPeak GPU_PEAKS[] = {{"H100 PCIe", 756e12}, {"H800 PCIe", 756e12}, {"H100 NVL", 835e12},
                                    {"H200 NVL", 835e12},  {"H100", 989e12},      {"H200", 989e12},
                                    {"GH200", 989e12},     {"H800", 989e12},      {"A100", 312e12},
                                    {"A800", 312e12}};

// Whether `part` stands in `name` as whole words, which spaces and hyphens part.
static inline bool gpu_name_has(const char *name, const char *part) {
    size_t length = strlen(part);
    for (const char *at = name; (at = strstr(at, part)) != NULL; at++) {
        bool begins = at == name || at[-1] == ' ' || at[-1] == '-';
        if (begins && (at[length] == '\0' || at[length] == ' ' || at[length] == '-')) { return true; }
    }
    return false;
}

// NAN: not known, as of a slice of a GPU.
static inline double gpu_peak(const char *name) {
    bool slice = gpu_name_has(name, "MIG") || gpu_name_has(name, "GRID");
    for (size_t i = 0; !slice && i < sizeof GPU_PEAKS / sizeof GPU_PEAKS[0]; i++) {
        if (gpu_name_has(name, GPU_PEAKS[i].part)) { return GPU_PEAKS[i].flops; }
    }
    return NAN;
}

// Compute stream: *context, a double, becomes the operations a second of the products of a
// layer of 1024 inputs and outputs, in the stream's precision.
static inline void measure_products_task(void *context, Stream *stream) {
    double *rate = (double *)context;
    const bool wanted[2] = {stream->precision == PRECISION_FP32, stream->precision == PRECISION_BF16};
    ProductRates rates = product_rates_measure(stream->pool, wanted, 512, 1024, 1024, PEAK_SECONDS);
    double gflops = rates.gflops[stream->precision];
    *rate = gflops > 0 ? gflops * 1e9 : (double)NAN;
}

// All ranks, before training: sets run->peak_flops. A GPU counts once, however many ranks
// share it.
static inline void find_peak(Run *run) {
    double operations = (double)run->options.tokens * model_flops_per_token(&run->config, run->T);
    double mine = NAN, *all;
    if (run->placement.on_gpu) {
        bool half = run->placement.precision == PRECISION_BF16;
        mine = half ? gpu_peak(run->placement.gpu.name) / run->placement.sharing : (double)NAN;
    } else if (run->placement.own_rates.gflops[run->placement.precision] > 0) {
        mine = 1e9 * run->placement.own_rates.gflops[run->placement.precision];
    } else if (operations / run->transport.size >= PEAK_LONG_RUN) {
        scheduler_call(&run->scheduler, run->scheduler.compute, measure_products_task, &mine);
    }
    all = (double *)transport_collect_records(&run->transport, "measuring", &mine, sizeof mine);
    run->peak_flops = 0;
    for (int rank = 0; rank < run->transport.size; rank++) { run->peak_flops += all[rank]; }
    free(all);
}

#endif
