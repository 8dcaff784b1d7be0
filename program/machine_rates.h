// machine_rates.h: is bf16 worth it here, and what rate do reports compare a run with?
//
// Where ranks on CPUs might compute in bf16 (--precision bf16, fastest), they measure their matrix
// products at the model's own shape, and the slowest counts. The peak, of which reports give the
// share (model FLOPs utilisation, MFU), is of a GPU its maker's number for dense products of bf16;
// of CPUs the rate of the products of a layer, measured by all ranks at once because they share the
// machine, and only where the run is long.
#pragma once

#include "kernels/cpu/product_rates.h"
#include "program/agreement.h"

#define PRODUCT_RATES_SECONDS 2.0
#define PEAK_SECONDS 0.2
#define PEAK_LONG_RUN 1e14 // model operations of a rank: ten minutes of a small machine, half one of a large

// Collective, with the same options. Measures if --precision leaves something to find
// out. Afterwards the options name the format: checkpoints do not know `fastest`.
static inline void choose_precision(Run *run) {
    Options *options = &run->options;
    Placement *placement = &run->placement;
    const bool both[2] = {true, true};
    bool asked = options_leave(options, &options->precision);
    if (!asked && options->precision != PRECISION_ASK_BF16) { return; }
    if (placement->ranks_on_gpus == run->transport.size) {
        if (asked) { options->precision = PRECISION_AUTO; }
        return;
    }
    if (run_is_main(run)) { printf("measuring  matrix products in fp32 and in bf16\n"); }
    fflush(stdout);
    ProductRates mine = {{INFINITY, INFINITY}}, slowest; // a rank on a GPU holds up no other
    if (!placement->on_gpu) {
        placement->own_rates = mine =
            product_rates_measure(run->threads.threads, both, (int)tokens_per_micro_batch(run),
                                  run->config.channels, run->config.mlp_channels, PRODUCT_RATES_SECONDS);
    }
    for (int i = 0; i < 2; i++) {
        slowest.gflops[i] = transport_fold(&run->transport, "rates of matrix products", mine.gflops[i], fmin);
    }
    placement->product_rates = slowest;
    if (!asked) { return; }
    Precision faster = product_rates_faster(&slowest);
    if (!placement->on_gpu) { placement->precision = faster; }
    options->precision = faster == PRECISION_BF16        ? PRECISION_ASK_BF16
                         : placement->ranks_on_gpus == 0 ? PRECISION_ASK_FP32
                                                         : PRECISION_AUTO; // GPUs compute in bf16
}

// From NVIDIA's data sheets. Left out are GPUs that are sold with several limits of power, and
// GPUs that add products of bf16 at half the rate in fp32.
static const struct {
    const char *part; // of the GPU's name; the first row that fits counts
    double flops;     // of dense products of bf16, in a second
} GPU_PEAKS[] = {{"H100 PCIe", 756e12}, {"H800 PCIe", 756e12}, {"H100 NVL", 835e12}, {"H200 NVL", 835e12},
                 {"H100", 989e12},      {"H200", 989e12},      {"GH200", 989e12},    {"H800", 989e12},
                 {"A100", 312e12},      {"A800", 312e12}};

// Whether `part` stands in `name` as whole words; spaces and hyphens separate words.
static inline bool gpu_name_has(const char *name, const char *part) {
    size_t length = strlen(part);
    for (const char *at = name; (at = strstr(at, part)) != NULL; at++) {
        bool begins = at == name || at[-1] == ' ' || at[-1] == '-';
        if (begins && (at[length] == '\0' || at[length] == ' ' || at[length] == '-')) { return true; }
    }
    return false;
}

// The maker's operations/s of a GPU that computes in bf16; NAN: not known, or not a whole GPU.
static inline double gpu_peak(const Placement *placement) {
    const char *name = placement->gpu.name;
    bool whole =
        placement->precision == PRECISION_BF16 && !gpu_name_has(name, "MIG") && !gpu_name_has(name, "GRID");
    for (size_t i = 0; whole && i < sizeof GPU_PEAKS / sizeof GPU_PEAKS[0]; i++) {
        if (gpu_name_has(name, GPU_PEAKS[i].part)) { return GPU_PEAKS[i].flops; }
    }
    return NAN;
}

// All ranks, before training: the rate of all together in operations a second; NAN where one
// rank does not know its own. A GPU counts once, however many ranks share it.
static inline double find_peak(Run *run) {
    const Placement *placement = &run->placement;
    Precision precision = placement->precision;
    double operations = run->options.tokens * trained_flops_per_token(&run->part, &run->config, run->T);
    ProductRates rates = placement->own_rates; // of --precision, if it has measured
    double mine = NAN;
    if (placement->on_gpu) {
        mine = gpu_peak(placement) / placement->sharing;
    } else if (rates.gflops[precision] > 0 || operations / run->transport.size >= PEAK_LONG_RUN) {
        const bool wanted[2] = {precision == PRECISION_FP32, precision == PRECISION_BF16};
        if (!(rates.gflops[precision] > 0)) {
            rates = product_rates_measure(run->threads.threads, wanted, 512, 1024, 1024, PEAK_SECONDS);
        }
        if (rates.gflops[precision] > 0) { mine = 1e9 * rates.gflops[precision]; }
    }
    return transport_fold(&run->transport, "measuring", mine, real_add);
}
