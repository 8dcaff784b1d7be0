// optimizer.h: AdamW on what one worker owns, and the learning rate that it steps with.
//
// A worker owns pieces of the flat parameter vector (comm/layout.h): one piece that is
// the whole vector under rules that do not shard, its share of every cell under rules
// that do. Its state (master copy and two moments) lies in the order of its own elements,
// without gaps. Weight decay applies to some tensors only, given as ranges of the flat
// vector; a piece may begin or end anywhere inside a tensor. Nothing here communicates.
//
//   learning_rate_at(progress) -> optimizer_step: a commit (the state moves)
//                                              or an estimate (the state stays)
#ifndef ACCO_OPTIMIZER_H
#define ACCO_OPTIMIZER_H

#include <math.h>
#include <stdint.h>

#include "comm/layout.h"
#include "kernels/kernels.h"
#include "runtime/memory.h"

// ---------------------------------------------------------------------------------------
// The learning rate

// Progress is counted in micro-batch gradients that all workers together have committed
// (--lr-by grads), so that rules and runs with different or varying batch sizes have the
// same rate at the same number of tokens; or in commits (--lr-by commits). An estimate
// uses the rate of the commit that it anticipates, because progress moves at commits
// only.

// --schedule, in the order of its choices.
typedef enum ScheduleKind { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT } ScheduleKind;

typedef struct LearningRate {
    ScheduleKind kind; // of the decay from peak to minimum
    double peak, minimum;
    double step;   // progress that a commit of nominal size makes
    double warmup; // progress at which the peak is reached
    double total;  // progress at which the minimum is reached
} LearningRate;

// The rate of the commit that starts when `progress` has been made. The warm-up is
// linear; its first commit already has a rate above zero.
static inline double learning_rate_at(const LearningRate *schedule, double progress) {
    if (progress + schedule->step < schedule->warmup) {
        return schedule->peak * (progress + schedule->step) / schedule->warmup;
    }
    if (schedule->kind == SCHEDULE_CONSTANT) { return schedule->peak; }
    double span = schedule->total - schedule->warmup;
    double fraction = span > 0 ? (progress - schedule->warmup) / span : 1.0;
    fraction = fraction < 0 ? 0 : fraction > 1 ? 1 : fraction;
    double factor = schedule->kind == SCHEDULE_LINEAR ? 1.0 - fraction
                                                      : 0.5 * (1.0 + cos(3.14159265358979323846 * fraction));
    return schedule->minimum + (schedule->peak - schedule->minimum) * factor;
}

// ---------------------------------------------------------------------------------------
// Weight decay

// A range [begin, end) of the flat parameter vector to which weight decay applies.
typedef struct DecayRange {
    size_t begin, end;
} DecayRange;

// Appends [begin, end) to `ranges`, merged with the last range where the two touch. Call
// in ascending order.
static inline void decay_ranges_add(DecayRange *ranges, int *count, size_t begin, size_t end) {
    if (*count > 0 && ranges[*count - 1].end == begin) {
        ranges[*count - 1].end = end;
    } else {
        ranges[*count].begin = begin;
        ranges[(*count)++].end = end;
    }
}

// ---------------------------------------------------------------------------------------
// The state

// The step of every element in a range, as `adamw` makes it (kernels/kernels.h), in memory
// of the host.
typedef void ElementwiseStep(Stream *stream, const AdamWRange *range);

typedef struct OptimizerSettings {
    ElementwiseStep *elementwise_step; // NULL: adamw. Tests put plain SGD here (test/sgd.h)
    double beta1, beta2, epsilon, weight_decay;
    const DecayRange *decay_ranges; // sorted, disjoint; borrowed
    int decay_range_count;
    Precision moments; // in which the moments are kept; bf16 is rounded at random (kernels/moments.h)
    uint64_t seed;     // for that rounding: the same on all workers that keep the same moments
} OptimizerSettings;

typedef struct Optimizer {
    OptimizerSettings settings;
    Layout layout; // `rank` owns its pieces
    int rank;
    float *master;                      // (layout_shard): own elements
    Real *first_moment, *second_moment; // the same, in the format settings.moments
    int64_t commits;
} Optimizer;

// The layout of a state that is not sharded: one piece of exactly `count` elements.
static inline Layout optimizer_whole(size_t count) {
    Layout layout = {count, 1, count, 1};
    return layout;
}

// Plans the state for the pieces of `rank`. `master_is_elsewhere`: the caller points
// `master` to a buffer that it keeps anyway.
static inline void optimizer_reserve(Optimizer *optimizer, Arena *arena, const OptimizerSettings *settings,
                                     const Layout *layout, int rank, bool master_is_elsewhere) {
    optimizer->settings = *settings;
    optimizer->layout = *layout;
    optimizer->rank = rank;
    size_t shard = layout_shard(layout), bytes = shard * precision_bytes(settings->moments);
    if (!master_is_elsewhere) {
        arena_reserve(arena, MEMORY_OPTIMIZER, "master parameters", shard * sizeof(float),
                      &optimizer->master);
    }
    arena_reserve(arena, MEMORY_OPTIMIZER, "AdamW first moment", bytes, &optimizer->first_moment);
    arena_reserve(arena, MEMORY_OPTIMIZER, "AdamW second moment", bytes, &optimizer->second_moment);
}

// Copies this worker's elements of `parameters` (layout_padded) into the master.
static inline void optimizer_take_master(Optimizer *optimizer, Stream *stream, const float *parameters) {
    size_t shard = layout_shard(&optimizer->layout);
    for (size_t own = 0; own < shard;) {
        size_t count = layout_range(&optimizer->layout, own, shard);
        stream_copy(stream, optimizer->master + own,
                    parameters + layout_flat(&optimizer->layout, optimizer->rank, own),
                    count * sizeof(float));
        own += count;
    }
}

// ---------------------------------------------------------------------------------------
// A step

typedef struct OptimizerStep {
    const float *gradient; // (layout_padded): a sum over micro-batches
    float *out;            // (layout_padded): the new parameters; may be `gradient` itself. NULL: the
                           // master is the result, which only a commit may ask for
    double divisor, scale; // the gradient is divided by the number of micro-batches, and clipped
    double learning_rate;
    bool commit; // moves the state; otherwise an estimate, and the state stays bitwise as it was
} OptimizerStep;

// The end of the longest range of elements from `position` on, at most to `end`, in which
// either all elements decay or none; *decays says which.
static inline size_t optimizer_range_end(const OptimizerSettings *settings, size_t position, size_t end,
                                         bool *decays) {
    *decays = false;
    for (int i = 0; i < settings->decay_range_count; i++) {
        const DecayRange *range = &settings->decay_ranges[i];
        if (range->end <= position) { continue; }
        *decays = range->begin <= position;
        return size_min(*decays ? range->end : range->begin, end);
    }
    return end;
}

// Steps all elements that this worker owns, range by range: a range is contiguous in the
// flat vector and has one weight decay.
static inline void optimizer_step(Optimizer *optimizer, Stream *stream, const OptimizerStep *step) {
    const OptimizerSettings *settings = &optimizer->settings;
    const Layout *layout = &optimizer->layout;
    size_t shard = layout_shard(layout);
    assert((settings->elementwise_step == NULL || stream->queue == NULL) &&
           "a step other than AdamW's works on memory of the host, not on that of a GPU");
    for (size_t own = 0; own < shard;) {
        size_t flat = layout_flat(layout, optimizer->rank, own);
        size_t contiguous = layout->size == 1 ? shard - own : layout_range(layout, own, shard);
        bool decays;
        size_t end = optimizer_range_end(settings, flat, flat + contiguous, &decays);
        AdamWRange range = {
            .out = step->out != NULL ? step->out + flat : optimizer->master + own,
            .master = optimizer->master + own,
            .first_moment = real_at(optimizer->first_moment, own, settings->moments),
            .second_moment = real_at(optimizer->second_moment, own, settings->moments),
            .gradient = step->gradient + flat,
            .count = end - flat,
            .flat = flat,
            .moments = settings->moments,
            .key = moment_key(settings->seed, optimizer->commits),
            .step = adamw_step(settings->beta1, settings->beta2, (double)(optimizer->commits + 1),
                               settings->epsilon, step->learning_rate, decays ? settings->weight_decay : 0.0),
            .commit = step->commit,
        };
        range.step.divisor = (float)step->divisor;
        range.step.scale = (float)step->scale;
        (settings->elementwise_step != NULL ? settings->elementwise_step : adamw)(stream, &range);
        own += end - flat;
    }
    if (step->commit) { optimizer->commits++; }
}

#endif
