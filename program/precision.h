// precision.h: what bf16 is worth on the CPUs of this run.
//
// Processors differ: bf16 may be several times faster than fp32, or slower. So where a run
// on CPUs might compute in bf16 (--precision bf16, fastest), every rank measures its matrix
// products for two seconds, at the model's own shape (kernels/cpu/product_rates.h). Ranks
// wait for each other, so the rate of the slowest one counts in each format.
#ifndef ACCO_PROGRAM_PRECISION_H
#define ACCO_PROGRAM_PRECISION_H

#include "kernels/cpu/product_rates.h"
#include "program/agreement.h"

#define PRODUCT_RATES_SECONDS 2.0

// What the ranks on CPUs, and no others, have measured.
typedef struct RankRates {
    bool on_cpu;
    ProductRates rates;
} RankRates;

// The rates of the slowest rank on a CPU, in each format by itself. ranks (count).
static inline ProductRates slowest_rates(const RankRates *ranks, int count) {
    ProductRates slowest = {{INFINITY, INFINITY}};
    for (int rank = 0; rank < count; rank++) {
        for (int format = 0; ranks[rank].on_cpu && format < 2; format++) {
            slowest.gflops[format] = fmin(slowest.gflops[format], ranks[rank].rates.gflops[format]);
        }
    }
    return slowest;
}

// On the CPU: the rates of this rank's own threads, which exist only for as long as that
// takes.
static inline ProductRates measure_own_products(const Run *run) {
    ProductRates none = {{0, 0}};
    const GptNeoConfig *config = &run->config;
    ThreadPool *pool = thread_pool_create(run->threads.threads, false);
    if (pool == NULL) { return none; }
    const bool both[2] = {true, true};
    ProductRates rates = product_rates_measure(pool, both, (int)tokens_per_micro_batch(run), config->channels,
                                               config->mlp_channels, PRODUCT_RATES_SECONDS);
    thread_pool_destroy(pool);
    return rates;
}

// Collective, where all ranks were given the same options. Measures where --precision
// leaves something to find out, and does what `fastest` asks for. From then on the options
// name the format that was chosen: checkpoints and config.json do not know `fastest`.
static inline void choose_precision(Run *run) {
    Options *options = &run->options;
    Placement *placement = &run->placement;
    bool asked = options->precision == PRECISION_FASTEST;
    if (!asked && options->precision != PRECISION_ASK_BF16) { return; }
    if (placement->ranks_on_gpus == run->transport.size) {
        if (asked) { options->precision = PRECISION_AUTO; }
        return;
    }
    RankRates mine;
    memset(&mine, 0, sizeof mine);
    mine.on_cpu = !placement->on_gpu;
    if (run_is_main(run)) { printf("measuring  matrix products in fp32 and in bf16\n"); }
    fflush(stdout);
    if (mine.on_cpu) { placement->own_rates = mine.rates = measure_own_products(run); }
    RankRates *ranks = (RankRates *)transport_collect_records(&run->transport, "rates of matrix products",
                                                              &mine, sizeof mine);
    placement->product_rates = slowest_rates(ranks, run->transport.size);
    free(ranks);
    if (!asked) { return; }
    Precision faster = product_rates_faster(&placement->product_rates);
    if (mine.on_cpu) { placement->precision = faster; }
    bool all_alike = placement->ranks_on_gpus == 0 || faster == PRECISION_BF16;
    options->precision = !all_alike                 ? PRECISION_AUTO
                         : faster == PRECISION_BF16 ? PRECISION_ASK_BF16
                                                    : PRECISION_ASK_FP32;
}

#endif
