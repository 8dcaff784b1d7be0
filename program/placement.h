// placement.h: where a rank computes, in what precision, how vectors travel between
// ranks, and which activations are kept for the backward pass.
//
// Each is chosen once, before memory is planned, and printed with its reason.
#pragma once

#include "comm/exchange.h"
#include "kernels/cpu/product_rates.h"
#include "models/decoder.h"
#include "options/options_check.h"
#include "program/launch_checks.h"
#include "rules.h"
#include "runtime/process_limits.h"

typedef struct Placement {
    Gpu gpu;
    bool on_gpu;
    bool all_on_gpus, all_round_alike; // of all ranks: each on a GPU; their `rounding` is the same
    size_t host_available; // bytes of this machine that may be taken when the device is chosen; 0: not known
    Precision precision;
    bool fp8;                   // --products fp8
    ProductRates own_rates;     // of this rank on a CPU; 0: not measured
    ProductRates product_rates; // of the slowest one
    Nccl nccl;
    bool uses_nccl;
    OptionChoice asked_recompute; // of a plan, before --fit
    int product_processors;       // of the GPU, that products during an exchange may count on; 0: all
    int sharing;                  // how many ranks compute on this rank's GPU, itself included
    int ranks_on_gpus;            // how many of all ranks compute on GPUs
    bool all_cast;      // there are several ranks, and all compute with bf16 casts of the parameters
    char odd_one[320];  // names a rank whose GPU differs from most ranks'; empty: none
    char rounding[160]; // what decides how this rank rounds: its device, or its processor and library
    char device_reason[1100], exchange_reason[256], gpu_exchange_reason[192], recompute_reason[192];
} Placement;

// NULL: this rank computes on the CPU.
static inline const Gpu *placement_gpu(const Placement *placement) {
    return placement->on_gpu ? &placement->gpu : NULL;
}

// ---- Device and precision -------------------------------------------------------------

// plan: --device cuda needs no GPU here, as the plan is for a machine that has one.
static inline bool placement_choose_device(Placement *placement, const Options *options, int local_rank,
                                           bool plan, Error *error) {
    Error reason = {""};
    bool asked = options->device == DEVICE_CUDA, refused = options->device == DEVICE_CPU;
    if (options->gpu_memory > 0) { // a plan for a GPU elsewhere, whose host is not known
        char size[SIZE_TEXT];
        placement->on_gpu = true;
        placement->gpu.memory_total = placement->gpu.memory_available = options->gpu_memory;
        snprintf(placement->device_reason, sizeof placement->device_reason, "a GPU with %s, as asked for",
                 size_text(placement->gpu.memory_total, size));
        return true;
    }
    placement->host_available = memory_available();
    bool found = !refused && gpu_open(&placement->gpu, local_rank, &reason) &&
                 kernels_can_run(&placement->gpu, &reason);
    if (asked && !found && !plan) { return error_set(error, "--device cuda: %s", reason.text); }
    placement->on_gpu = found || asked;
    cpu_describe_rounding(placement->rounding);
    if (found) {
        snprintf(placement->rounding, sizeof placement->rounding, "%.80s, compute capability %d.%d",
                 placement->gpu.name, placement->gpu.capability / 10, placement->gpu.capability % 10);
        gpu_measure(&placement->gpu); // kernels take memory, too
        snprintf(placement->device_reason, sizeof placement->device_reason,
                 "GPU %d of %d, %s, %d processors, %.1f GB free", placement->gpu.number, placement->gpu.count,
                 placement->gpu.name, placement->gpu.sm_count, (double)placement->gpu.memory_available / 1e9);
    } else {
        placement->gpu.number = asked ? 0 : -1;
        snprintf(placement->device_reason, sizeof placement->device_reason, "%s (%s)",
                 asked ? "a GPU" : "CPU", refused || asked ? "as asked for" : reason.text);
    }
    return true;
}

static inline bool placement_choose_precision(Placement *placement, const Options *options, Error *error) {
    bool bf16 = options->precision == PRECISION_ASK_BF16, fp32 = options->precision == PRECISION_ASK_FP32;
    if (bf16 && !placement->on_gpu && !matmul_has_bf16()) {
        char library[96];
        return error_set(error,
                         "--precision bf16: %s has no products of bf16 for this processor; use fp32, and "
                         "--wire bf16 to halve the traffic",
                         onednn_describe(library));
    }
    placement->precision = bf16 || (placement->on_gpu && !fp32) ? PRECISION_BF16 : PRECISION_FP32;
    placement->fp8 = options->products == PRODUCTS_FP8;
    // A plan may be for a GPU elsewhere, whose capability is not known.
    int capability = placement->gpu.capability;
    return !placement->fp8 || (placement->on_gpu && (capability == 0 || capability >= 89)) ||
           error_set(error, "--products fp8 needs a GPU of compute capability 8.9 or more; this rank has: %s",
                     placement->device_reason);
}

// Refuses shapes that the kernels for GPUs cannot compute.
static inline bool placement_check_shapes(const Placement *placement, const ModelConfig *config, int B, int T,
                                          Error *error) {
    int C = config->channels, D = model_head_size(config);
    if (!placement->on_gpu) { return true; }
    if (C > 8192 || D > 256) {
        return error_set(error,
                         "on a GPU hidden_size is at most 8192 and a head at most 256 wide; %s has %d and "
                         "%d: use --device cpu",
                         config->name, C, D);
    }
    int queries = model_dimension(config, DIM_HEADS), keys = model_dimension(config, DIM_KV);
    if (placement->fp8 && ((int64_t)B * T | C | config->mlp_channels | queries | keys) % FP8_UNIT != 0) {
        return error_set(
            error,
            "--products fp8: the tokens of a micro-batch, hidden_size, intermediate_size and the "
            "channels of queries and of keys must be multiples of %d; %s has %d, %d, %d and %d",
            FP8_UNIT, config->name, C, config->mlp_channels, queries, keys);
    }
    // Behind norms of heads stand matrices, whose rows are read 16 bytes at a time.
    if (placement->fp8 && config->head_norms && D % 8 != 0) {
        return error_set(error, "--products fp8: head_dim must be a multiple of 8 in %s; %s has %d",
                         config->family->name, config->name, D);
    }
    if (B > 65535 || (double)T * model_dimension(config, DIM_QKV) > 4294967295.0) {
        return error_set(error,
                         "--micro-batch %d x --seq-len %d is too large for a GPU's kernels: at most 65535 "
                         "sequences, and 2^32 numbers in the queries, keys and values of one",
                         B, T);
    }
    return true;
}

// Before memory is planned: whether a host adds up first (comm/groups.h).
static inline void placement_choose_exchange(Placement *placement, const Options *options,
                                             Transport *transport) {
    const Groups *hosts = &transport->hosts;
    bool helps = hosts->hosts > 1 && hosts->hosts < transport->size;
    transport->two_level =
        options->exchange == EXCHANGE_TWO_LEVEL || (options->exchange == EXCHANGE_AUTO && helps);
    transport->library = options->exchange == EXCHANGE_LIBRARY;
    bool flat = !transport->two_level && !transport->library;
    const char *other = transport->two_level
                            ? "on two levels"
                            : "by NCCL's own collectives: bits depend on it and on how GPUs are connected";
    char counts[64];
    groups_describe(hosts, counts, sizeof counts);
    snprintf(placement->exchange_reason, sizeof placement->exchange_reason, "%s, %s%s", flat ? "flat" : other,
             counts, flat && helps ? ": several ranks of a host send the same sums over its link" : "");
}

// ---- GPU exchange ---------------------------------------------------------------------

// What the GPUs of all ranks have in common.
typedef struct GpuFleet {
    bool mixed;     // they are of several kinds, or some ranks have none
    bool shared;    // several ranks compute on one
    size_t buffers; // bytes of NCCL's messages, the same on all ranks
} GpuFleet;

// Bytes of NCCL's messages on a GPU: small compared with the model. From 512 ranks on they
// grow with the number of ranks, whose shares of the model shrink: a message to each would
// become so short that its own cost counts (dev/results/scale-2026-11-25.md).
static inline size_t placement_nccl_bytes(size_t gpu_memory, int ranks) {
    return size_min(NCCL_BUFFER_BYTES, gpu_memory / 500) * size_max(1, (size_t)ranks / 256);
}

// Compares the GPUs of all ranks. Sets how many ranks share this one's GPU, and names the first
// rank that does not compute on what most ranks compute on. hellos (ranks).
static inline GpuFleet placement_compare_gpus(Placement *placement, const Hello *hellos, int ranks,
                                              int own_rank) {
    GpuFleet fleet = {false, false, SIZE_MAX};
    const Hello *usual = hellos, *odd = hellos;
    int most = 0;
    for (int rank = 0; rank < ranks; rank++) {
        const Hello *hello = &hellos[rank];
        int alike = 0, sharing = 0;
        for (int other = 0; other < ranks; other++) {
            bool same_place =
                strcmp(hellos[other].host, hello->host) == 0 && strcmp(hellos[other].bus, hello->bus) == 0;
            alike += strcmp(hellos[other].device, hello->device) == 0;
            sharing += hello->capability > 0 && hellos[other].capability > 0 && same_place;
        }
        if (alike > most) {
            most = alike;
            usual = hello;
        }
        if (rank == own_rank && placement->on_gpu) { placement->sharing = sharing; }
        fleet.shared = fleet.shared || sharing > 1;
        fleet.mixed = fleet.mixed || hello->capability != hellos[0].capability;
        fleet.buffers = size_min(fleet.buffers, placement_nccl_bytes(hello->gpu_memory, ranks));
    }
    while (odd < hellos + ranks && strcmp(odd->device, usual->device) == 0) { odd++; }
    if (odd < hellos + ranks) {
        snprintf(placement->odd_one, sizeof placement->odd_one,
                 "rank %d on %s computes on %s, %d of %d ranks on %s", (int)(odd - hellos), odd->host,
                 odd->capability > 0 ? odd->device : "the CPU", most, ranks,
                 usual->capability > 0 ? usual->device : "the CPU");
    }
    return fleet;
}

// The largest power of two that is at most `limit`, and at least 1.
static inline int placement_power_below(int limit) {
    int power = 1;
    while (2 * power <= limit) { power *= 2; }
    return power;
}

// What NCCL may take of a GPU's multiprocessors on each level of the exchange. Its own
// choice would be 16 to 32, of 132 on an H100, and a matrix product that counts on all of
// them would need a second wave for a few tiles. Eight must carry what a step exchanges: 12
// to 65 GB/s for models of 125M to 1.3B on 8 GPUs, if steps take as long as predicted. On a
// small GPU they are at most an eighth of it, and a power of two, because messages take one.
static inline int placement_default_ctas(int processors) {
    return placement_power_below((int)int64_min(processors / 8, 8));
}

// What NCCL takes with a limit of `ctas` on a level. For messages it rounds up to a power of
// two (ncclTopoComputeP2pChannels), not for collectives of the library.
static inline int placement_taken_ctas(int ctas, bool library) {
    return library || ctas == 1 ? ctas : 2 * placement_power_below(ctas - 1);
}

// Opens NCCL; products that overlap it are planned for the processors that it leaves.
static inline bool placement_open_nccl(Placement *placement, const Options *options, Transport *transport,
                                       size_t buffers, Error *error) {
    int processors = placement->gpu.sm_count, ctas = (int)options->nccl_ctas;
    if (ctas == 0) { ctas = placement_default_ctas(processors); }
    nccl_open(&placement->nccl, transport, ctas, buffers);
    gpu_measure(&placement->gpu); // NCCL has taken some of the memory
    const ncclComm_t *communicators = placement->nccl.communicators;
    int levels = (communicators[INSIDE_HOSTS] != NULL) + (communicators[BETWEEN_HOSTS] != NULL),
        most = processors / 2 / levels;
    int taken = placement_taken_ctas(ctas, transport->library) * levels;
    if (!transport->library) { most = placement_power_below(most); }
    if (ctas > most) {
        return error_set(error,
                         "--nccl-ctas %d leaves less than half of this GPU's %d processors to the "
                         "computation, with %d level%s of exchange: at most %d",
                         ctas, processors, levels, plural(levels), most);
    }
    placement->product_processors = processors - taken; // also without --overlap: bits are the same
    snprintf(placement->gpu_exchange_reason, sizeof placement->gpu_exchange_reason,
             "from GPU to GPU by NCCL, which takes at most %d of %d processors; products "
             "meanwhile count on the others",
             taken, processors);
    return true;
}

// Why NCCL, whose kernels want equal pieces, cannot send this run's gradients; NULL: it can.
static inline const char *placement_uneven(const Options *options) {
    bool whole = options->inner == INNER_MUON && options_rule(options)->kind != RULE_LOCAL;
    return whole ? "with --inner muon ranks own whole matrices, and NCCL is used for equal pieces only"
                 : NULL;
}

// Collective; all ranks choose the same, and refuse options for GPUs or for NCCL if neither is
// used. hellos (ranks): of all of them.
static inline bool placement_choose_gpu_exchange(Placement *placement, const Options *options,
                                                 Transport *transport, const Hello *hellos, Error *error) {
    int ranks = transport->size;
    bool asked = options->gpu_exchange == GPU_EXCHANGE_NCCL,
         host = options->gpu_exchange == GPU_EXCHANGE_HOST;
    const char *no_gpu = placement->ranks_on_gpus > 0 ? NULL
                         : gpu_is_built_in()          ? "no rank computes on a GPU"
                                                      : "this program was built for CPUs only";
    if (asked && no_gpu != NULL) { return error_set(error, "--gpu-exchange nccl has no effect: %s", no_gpu); }
    GpuFleet fleet = placement_compare_gpus(placement, hellos, ranks, transport->rank);
    bool lacking = placement->ranks_on_gpus < ranks;
    const char *obstacle = ranks == 1                      ? "there is one rank, so nothing is exchanged"
                           : options_emulate_link(options) ? "links are emulated in host memory"
                           : !nccl_is_built_in()           ? "this program was built without NCCL"
                           : lacking                       ? "not every rank has a GPU"
                           : fleet.shared                  ? "several ranks share a GPU, which NCCL refuses"
                                                           : placement_uneven(options);
    if (fleet.mixed && !rule_shards(options_rule(options))) {
        char sharding[RULE_TEXT];
        return error_set(error,
                         "with --optimizer %s every rank makes the same steps by itself, and GPUs and CPUs, "
                         "or GPUs of several kinds, round them differently (%s): use %s for such ranks, or "
                         "--device cpu",
                         options_rule(options)->name, placement->odd_one, rule_list(rule_shards, sharding));
    }
    if (asked && ranks > 1 && obstacle != NULL) {
        return error_set(error, "--gpu-exchange nccl: %s", obstacle);
    }
    placement->uses_nccl = !host && obstacle == NULL;
    if (transport->library && !placement->uses_nccl) {
        return error_set(error, "--exchange library is NCCL's, which cannot be used here: %s",
                         host ? "--gpu-exchange is host" : obstacle);
    }
    if (options->nccl_ctas > 0 && !placement->uses_nccl) {
        return error_set(error, "--nccl-ctas has no effect: %s",
                         no_gpu != NULL ? no_gpu : "GPUs do not exchange by NCCL here");
    }
    // Of all ranks: --precision is one.
    placement->all_cast = placement->precision == PRECISION_BF16 && ranks > 1 && !lacking;
    if (placement->on_gpu) { gpu_measure(&placement->gpu); } // others have taken what CUDA needs of it
    if (placement->uses_nccl) {
        return placement_open_nccl(placement, options, transport, fleet.buffers, error);
    }
    snprintf(placement->gpu_exchange_reason, sizeof placement->gpu_exchange_reason, "through host memory: %s",
             host ? "as asked for" : obstacle);
    return true;
}

// For a plan: ranks with a GPU each. A program built for CPUs plans for CUDA and NCCL.
static inline void placement_plan_gpu_exchange(Placement *placement, const Options *options) {
    bool has_nccl = nccl_is_built_in() || !gpu_is_built_in();
    placement->uses_nccl = placement->on_gpu && has_nccl && options->gpu_exchange != GPU_EXCHANGE_HOST &&
                           options->ranks > 1 && placement_uneven(options) == NULL;
    placement->nccl.buffer_limit = placement_nccl_bytes(placement->gpu.memory_total, (int)options->ranks);
    placement->all_cast = placement->on_gpu && placement->precision == PRECISION_BF16 && options->ranks > 1;
}

// Collective. A process that ends while NCCL's threads still run may crash.
static inline void placement_close(Placement *placement) {
    if (placement->nccl.transport != NULL) { nccl_close(&placement->nccl); }
}

// ---- Recompute ------------------------------------------------------------------------

static inline const char *recompute_name(Recompute recompute) {
    return option_of(offsetof(Options, recompute))->choices[1 + recompute]; // behind "auto"
}

// Bytes of device memory that the model takes with these settings.
static inline size_t model_bytes(const ModelConfig *config, const ModelSettings *settings) {
    Model *model = MEMORY_OF(Model, 1);
    Arena *arena = MEMORY_OF(Arena, 1);
    arena->on_gpu = settings->on_gpu;
    model_reserve(model, arena, config, settings);
    size_t bytes = arena->bytes;
    free(model);
    free(arena);
    return bytes;
}

// Bytes of the GPU that are this rank's: ranks that share one share its memory, and a
// twentieth stays free for CUDA itself. 0: there is no GPU here to measure.
static inline size_t placement_room(const Placement *placement) {
    return placement->gpu.memory_available / 20 * 19 / (placement->sharing > 1 ? placement->sharing : 1);
}

// Fills settings->recompute: the least that fits, or whole layers where nothing does, which
// program/fit.h notices. taken: bytes that everything but the model takes. A plan without a
// GPU recomputes nothing, since there is no memory to fit into.
static inline bool placement_choose_recompute(Placement *placement, const Options *options,
                                              const ModelConfig *config, size_t taken,
                                              ModelSettings *settings, Error *error) {
    bool automatic = options->recompute == 0; // otherwise a Recompute + 1
    bool fitted = options->fit && placement->asked_recompute == 0;
    const char *chosen = fitted ? "chosen by --fit" : "as asked for";
    size_t room = placement->on_gpu ? placement_room(placement) : 0;
    settings->recompute = automatic ? RECOMPUTE_NONE : (Recompute)(options->recompute - 1);
    if (!placement->on_gpu &&
        (settings->recompute == RECOMPUTE_GELU || settings->recompute == RECOMPUTE_LAYERNORM)) {
        return error_set(error, "--recompute %s is for GPUs: the CPU program has none and block",
                         recompute_name(settings->recompute));
    }
    snprintf(placement->recompute_reason, sizeof placement->recompute_reason, "%s",
             automatic ? "there is no GPU here to fit into" : chosen);
    if (room == 0) { return true; }
    while (automatic && settings->recompute < RECOMPUTE_BLOCK &&
           taken + model_bytes(config, settings) > room) {
        settings->recompute = (Recompute)(settings->recompute + 1);
    }
    size_t needed = taken + model_bytes(config, settings);
    snprintf(placement->recompute_reason, sizeof placement->recompute_reason, "%s: %.3f of %.3f GB",
             needed > room ? "does not fit"
             : automatic   ? "the least that fits"
                           : chosen,
             (double)needed / 1e9, (double)room / 1e9);
    return true;
}
