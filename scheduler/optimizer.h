// optimizer.h: AdamW or Muon on what one worker owns, and the learning rate that it steps with.
//
// A worker owns pieces of the flat parameter vector (comm/layout.h): one piece that is
// the whole vector under rules that do not shard, its share of every cell under rules
// that do. Its state lies in the order of its own elements, without gaps. A piece may
// begin or end anywhere inside a tensor. Nothing here communicates.
//
//   learning_rate_at(progress) -> optimizer_step: a commit (the state moves)
//                                              or an estimate (the state stays)
#pragma once

#include "comm/layout.h"
#include "kernels/kernels.h"
#include "runtime/memory.h"
#include "scheduler/muon.h"

// ---- The learning rate ----------------------------------------------------------------

// Progress is counted in micro-batch gradients of all workers (--lr-by grads), so that runs with
// other batch sizes have the same rate at the same number of tokens; or in commits.

// The choices of --schedule, in their order.
typedef enum ScheduleKind {
    SCHEDULE_COSINE,
    SCHEDULE_LINEAR,
    SCHEDULE_WSD, // warm-up, stable, decay (arXiv 2404.06395), which falls as 1 - sqrt (2405.18392)
    SCHEDULE_CONSTANT
} ScheduleKind;

typedef struct LearningRate {
    ScheduleKind kind; // of the decay from peak to minimum
    double peak, minimum;
    double step;   // progress that a commit of nominal size makes
    double warmup; // progress at which the peak is reached
    double total;  // progress at which the minimum is reached
    double decay;  // progress that the decay lasts, at most all after the warm-up
} LearningRate;

// The rate of the commit that starts when `progress` has been made. The first is above zero.
static inline double learning_rate_at(const LearningRate *schedule, double progress) {
    if (progress + schedule->step < schedule->warmup) {
        return schedule->peak * (progress + schedule->step) / schedule->warmup;
    }
    if (schedule->kind == SCHEDULE_CONSTANT) { return schedule->peak; }
    double begin = fmax(schedule->warmup, schedule->total - schedule->decay), span = schedule->total - begin;
    double fraction = span > 0 ? (progress - begin) / span : progress < begin ? 0 : 1;
    fraction = fraction < 0 ? 0 : fraction > 1 ? 1 : fraction;
    double factor = schedule->kind == SCHEDULE_LINEAR ? 1.0 - fraction
                    : schedule->kind == SCHEDULE_WSD  ? 1.0 - sqrt(fraction)
                                                      : 0.5 * (1.0 + cos(3.14159265358979323846 * fraction));
    return schedule->minimum + (schedule->peak - schedule->minimum) * factor;
}

// ---- The state ------------------------------------------------------------------------

// What the optimizer needs to know of a tensor, elements [begin, end) of the flat vector.
typedef struct OptimizerTensor {
    size_t begin, end;
    bool decays;       // weight decay applies to it
    int rows, columns; // Muon steps it, a whole matrix; rows 0: AdamW does, element by element
} OptimizerTensor;

// Appends a tensor; one that AdamW steps joins the one before where the two touch and weight
// decay applies to both or to none. Call in ascending order.
static inline void optimizer_tensors_add(OptimizerTensor *tensors, int *count, OptimizerTensor tensor) {
    OptimizerTensor *last = *count > 0 ? &tensors[*count - 1] : NULL;
    if (last != NULL && last->end == tensor.begin && last->decays == tensor.decays && last->rows == 0 &&
        tensor.rows == 0) {
        last->end = tensor.end;
    } else {
        tensors[(*count)++] = tensor;
    }
}

// Steps all elements of a range as `adamw` does (kernels/kernels.h), in host memory.
typedef void ElementwiseStep(Stream *stream, const StepRange *range);

typedef struct OptimizerSettings {
    ElementwiseStep *elementwise_step; // NULL: adamw. Tests put plain SGD here (test/sgd.h)
    double beta1, beta2, epsilon, weight_decay;
    double muon_momentum;
    double adamw_ratio; // the rate of what AdamW steps beside Muon over Muon's; 0: they are the same
    int muon_iterations;
    const OptimizerTensor *tensors; // sorted, disjoint; borrowed. AdamW steps what is in none, without decay
    int tensor_count;
    Precision moments;   // in which the moments are kept; bf16 is rounded at random (kernels/moments.h)
    uint64_t seed;       // for that rounding: the same on all workers that keep the same moments
    Precision precision; // of Muon's products, as in the streams that step
} OptimizerSettings;

typedef struct Optimizer {
    OptimizerSettings settings;
    Layout layout; // `rank` owns its pieces
    int rank;
    float *master;       // (layout_shard): own elements
    Real *first_moment;  // the same, in the format settings.moments; of a matrix Muon's momentum
    Real *second_moment; // of what AdamW steps (OptimizerRange::second), in the same format
    size_t second_count;
    MuonWorkspace muon;
    double flops;  // of Muon's matrix products in a step, on the rank with most
    int64_t steps; // that have been made
} Optimizer;

// Own elements that are stepped in one way: contiguous in the shard and in the flat vector, and
// of one tensor. A matrix of Muon is one range.
typedef struct OptimizerRange {
    size_t own, flat, count;
    size_t second;                 // the first one's place among the second moments
    const OptimizerTensor *tensor; // NULL: in none
    int next_tensor;               // the first one that ends behind the range
    LayoutRange stretch;           // of the layout: what the range is a part of
} OptimizerRange;

static inline bool optimizer_range_is_muons(const OptimizerRange *range) {
    return range->tensor != NULL && range->tensor->rows > 0;
}

// Steps through all ranges; `range` begins as {0}. Returns false behind the last one.
static inline bool optimizer_next(const Optimizer *optimizer, OptimizerRange *range) {
    const OptimizerSettings *settings = &optimizer->settings;
    LayoutRange *stretch = &range->stretch;
    if (!optimizer_range_is_muons(range)) { range->second += range->count; }
    range->own += range->count;
    range->flat += range->count;
    if (range->own >= stretch->own + stretch->count) {
        if (!layout_next(&optimizer->layout, optimizer->rank, SIZE_MAX, stretch)) { return false; }
        range->own = stretch->own;
        range->flat = stretch->flat;
    }
    const OptimizerTensor *tensor = settings->tensors + range->next_tensor,
                          *behind = settings->tensors + settings->tensor_count;
    while (tensor < behind && tensor->end <= range->flat) { tensor++; }
    range->next_tensor = (int)(tensor - settings->tensors);
    range->tensor = tensor < behind && tensor->begin <= range->flat ? tensor : NULL;
    size_t end = stretch->flat + stretch->count;
    if (tensor < behind) { end = size_min(end, range->tensor != NULL ? tensor->end : tensor->begin); }
    range->count = end - range->flat;
    return true;
}

// The layout of a state that is not sharded: one piece of exactly `count` elements.
static inline Layout optimizer_whole(size_t count) {
    Layout layout = {.count = count, .size = 1, .piece = count, .cells = 1};
    return layout;
}

// Plans the state for the pieces of `rank`; of what depends on the rank as much as any needs, so
// that one plan holds for all. master_is_elsewhere: the caller has a buffer for it anyway.
static inline void optimizer_reserve(Optimizer *optimizer, Arena *arena, const OptimizerSettings *settings,
                                     const Layout *layout, int rank, bool master_is_elsewhere) {
    memset(optimizer, 0, sizeof *optimizer);
    optimizer->settings = *settings;
    optimizer->layout = layout->size > 1 ? *layout : optimizer_whole(layout_shard(layout));
    optimizer->rank = rank;
    MuonWorkspace *muon = &optimizer->muon;
    Optimizer one = *optimizer;
    bool differ = one.layout.pieces != NULL;
    for (one.rank = differ ? 0 : rank; one.rank < (differ ? one.layout.size : rank + 1); one.rank++) {
        double flops = 0;
        for (OptimizerRange range = {0}; optimizer_next(&one, &range);) {
            if (!optimizer_range_is_muons(&range)) {
                optimizer->second_count = size_max(optimizer->second_count, range.second + range.count);
                continue;
            }
            int rows = range.tensor->rows, columns = range.tensor->columns;
            muon->count = size_max(muon->count, range.count);
            muon->side = size_max(muon->side, (size_t)int_min(rows, columns));
            flops += muon_flops(rows, columns, settings->muon_iterations);
        }
        optimizer->flops = fmax(optimizer->flops, flops);
    }
    size_t shard = layout_shard(&optimizer->layout), element = precision_bytes(settings->moments),
           master = master_is_elsewhere ? 0 : shard * sizeof(float);
    const char *first = muon->count > 0 ? "momentum and first moment" : "AdamW first moment";
    const ArenaRow rows[] = {
        {MEMORY_OPTIMIZER, "master parameters", master, &optimizer->master},
        {MEMORY_OPTIMIZER, first, shard * element, &optimizer->first_moment},
        {MEMORY_OPTIMIZER, "AdamW second moment", optimizer->second_count * element,
         &optimizer->second_moment},
    };
    arena_reserve_rows(arena, rows, sizeof rows / sizeof rows[0], false);
    if (muon->count > 0) { muon_reserve(muon, arena, settings->precision); }
}

// Copies this worker's elements of `parameters` (layout_padded) into the master.
static inline void optimizer_take_master(Optimizer *optimizer, Stream *stream, const float *parameters) {
    for (LayoutRange range = {0}; layout_next(&optimizer->layout, optimizer->rank, SIZE_MAX, &range);) {
        stream_copy(stream, optimizer->master + range.own, parameters + range.flat,
                    range.count * sizeof(float));
    }
}

// ---- A step ---------------------------------------------------------------------------

typedef struct OptimizerStep {
    const float *gradient; // (layout_padded): a sum over micro-batches
    float *out;            // (layout_padded): the new parameters; may be `gradient` itself. NULL: the
                           // master is the result, which only a commit may ask for
    Real *casts;           // (layout_padded), bf16: the new parameters once more; NULL: not wanted
    double divisor, scale; // the gradient is divided by the number of micro-batches, and clipped
    double learning_rate;
    bool keeps; // moves the state; otherwise an estimate, and the state stays bitwise as it was
} OptimizerStep;

static inline void optimizer_step(Optimizer *optimizer, Stream *stream, const OptimizerStep *step) {
    const OptimizerSettings *settings = &optimizer->settings;
    assert((settings->elementwise_step == NULL || (!stream_is_on_gpu(stream) && step->casts == NULL)) &&
           "a step other than AdamW's works on memory of the host, not of a GPU");
    MuonBatch batch = {0};
    for (OptimizerRange range = {0}; optimizer_next(optimizer, &range);) {
        const OptimizerTensor *tensor = range.tensor;
        bool is_muons = optimizer_range_is_muons(&range), decays = tensor != NULL && tensor->decays;
        StepRange work = {
            .out = step->out != NULL ? step->out + range.flat : optimizer->master + range.own,
            .master = optimizer->master + range.own,
            .first_moment = real_at(optimizer->first_moment, range.own, settings->moments),
            .second_moment = real_at(optimizer->second_moment, range.second, settings->moments),
            .gradient = step->gradient + range.flat,
            .casts = step->casts != NULL ? real_at(step->casts, range.flat, PRECISION_BF16) : NULL,
            .count = range.count,
            .flat = range.flat,
            .moments = settings->moments,
            .key = moment_key(settings->seed, optimizer->steps),
            .step = adamw_step(is_muons ? settings->muon_momentum : settings->beta1, settings->beta2,
                               (double)(optimizer->steps + 1), settings->epsilon, step->learning_rate,
                               decays ? settings->weight_decay : 0.0),
            .keeps = step->keeps,
        };
        if (!is_muons && settings->adamw_ratio != 0) { // the decay stays
            work.step.learning_rate = (float)(step->learning_rate * settings->adamw_ratio);
        }
        work.step.divisor = (float)step->divisor;
        work.step.scale = (float)step->scale;
        if (is_muons) {
            assert(range.count == tensor->end - tensor->begin && "a rank owns the whole matrix");
            muon_add(stream, &optimizer->muon, &batch, work, tensor->rows, tensor->columns,
                     settings->muon_iterations);
        } else {
            (settings->elementwise_step != NULL ? settings->elementwise_step : adamw)(stream, &work);
        }
    }
    if (batch.count > 0) { muon_step(stream, &optimizer->muon, &batch, settings->muon_iterations); }
    if (step->keeps) { optimizer->steps++; }
}
