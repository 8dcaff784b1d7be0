// optimizer.h: the optimizer state of one worker and one step of it.
//
// A worker owns pieces of the flat parameter vector (comm/layout.h): one piece that is
// all of it under rules that do not shard, its share of every cell under those that do.
// Its state lies in the order of its own elements, without gaps. Weight decay applies to
// some tensors only, given as ranges of the flat vector, so a piece may cut through
// tensors anywhere. Nothing here communicates.
#ifndef ACCO_OPTIMIZER_H
#define ACCO_OPTIMIZER_H

#include <math.h>
#include <stdint.h>

#include "comm/layout.h"
#include "kernels/kernels.h"
#include "runtime/memory.h"

typedef enum OptimizerKind { OPTIMIZER_ADAMW, OPTIMIZER_SGD } OptimizerKind;

// A stretch of the flat parameter vector to which weight decay applies.
typedef struct DecayRange {
    size_t begin, end;
} DecayRange;

// Appends [begin, end) to `ranges`, joined to the last one where it follows on. To be
// called in ascending order.
static inline void decay_ranges_add(DecayRange *ranges, int *count, size_t begin, size_t end) {
    if (*count > 0 && ranges[*count - 1].end == begin) {
        ranges[*count - 1].end = end;
    } else {
        ranges[*count].begin = begin;
        ranges[(*count)++].end = end;
    }
}

typedef struct OptimizerSettings {
    OptimizerKind kind;
    double beta1, beta2, epsilon, weight_decay;
    const DecayRange *decay_ranges; // sorted, disjoint; borrowed
    int decay_range_count;
} OptimizerSettings;

typedef struct Optimizer {
    OptimizerSettings settings;
    Layout layout; // whose pieces `rank` owns
    int rank;
    float *master, *first_moment, *second_moment; // (layout_shard): own elements
    int64_t commits;
} Optimizer;

// The layout of a state that is not shared out: one piece of exactly `count` elements.
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
    size_t bytes = layout_shard(layout) * sizeof(float);
    if (!master_is_elsewhere) {
        arena_reserve(arena, MEMORY_OPTIMIZER, "master parameters", bytes, &optimizer->master);
    }
    if (settings->kind == OPTIMIZER_ADAMW) {
        arena_reserve(arena, MEMORY_OPTIMIZER, "AdamW first moment", bytes, &optimizer->first_moment);
        arena_reserve(arena, MEMORY_OPTIMIZER, "AdamW second moment", bytes, &optimizer->second_moment);
    }
}

// master <- what this worker owns of parameters (layout_padded).
static inline void optimizer_take_master(Optimizer *optimizer, Stream *stream, const float *parameters) {
    size_t shard = layout_shard(&optimizer->layout);
    for (size_t own = 0; own < shard;) {
        size_t run = layout_run(&optimizer->layout, own, shard);
        stream_copy(stream, optimizer->master + own,
                    parameters + layout_flat(&optimizer->layout, optimizer->rank, own), run * sizeof(float));
        own += run;
    }
}

// One step as the host asked for it: the same for every element but for the weight decay.
typedef struct OptimizerStep {
    const float *gradient; // (layout_padded)
    float *out;            // (layout_padded), may be `gradient` itself; NULL: only the master, of a commit
    double divisor, scale; // of the gradient
    double learning_rate;
    bool commit; // moves the state; otherwise an estimate, and the state stays bitwise as it was
} OptimizerStep;

// Where the run of elements that starts at `position` and decays or not as a whole ends,
// not beyond `end`.
static inline size_t optimizer_run_end(const OptimizerSettings *settings, size_t position, size_t end,
                                       bool *decays) {
    *decays = false;
    for (int i = 0; i < settings->decay_range_count; i++) {
        const DecayRange *range = &settings->decay_ranges[i];
        if (range->end <= position) { continue; }
        *decays = range->begin <= position;
        size_t stop = *decays ? range->end : range->begin;
        return stop < end ? stop : end;
    }
    return end;
}

static inline void optimizer_step_run(Optimizer *optimizer, Stream *stream, const OptimizerStep *step,
                                      size_t own, size_t flat, size_t count, double weight_decay) {
    const OptimizerSettings *settings = &optimizer->settings;
    bool has_moments = settings->kind == OPTIMIZER_ADAMW;
    AdamWRange range;
    memset(&range, 0, sizeof range);
    range.master = optimizer->master + own;
    range.out = step->out != NULL ? step->out + flat : range.master;
    range.first_moment = has_moments ? optimizer->first_moment + own : NULL;
    range.second_moment = has_moments ? optimizer->second_moment + own : NULL;
    range.gradient = step->gradient + flat;
    range.count = count;
    range.step = adamw_step(settings->beta1, settings->beta2, (double)(optimizer->commits + 1),
                            settings->epsilon, step->learning_rate, weight_decay);
    range.step.divisor = (float)step->divisor;
    range.step.scale = (float)step->scale;
    if (has_moments) {
        adamw(stream, &range, step->commit);
    } else {
        sgd_step(&range, step->commit);
    }
}

// Steps everything that this worker owns, on the pool of `stream`.
static inline void optimizer_step(Optimizer *optimizer, Stream *stream, const OptimizerStep *step) {
    const OptimizerSettings *settings = &optimizer->settings;
    size_t shard = layout_shard(&optimizer->layout);
    for (size_t own = 0; own < shard;) {
        size_t flat = layout_flat(&optimizer->layout, optimizer->rank, own);
        bool decays;
        size_t run = optimizer->layout.size == 1
                         ? shard - own
                         : layout_run(&optimizer->layout, own, shard); // alone, all is one run
        size_t end = optimizer_run_end(settings, flat, flat + run, &decays);
        optimizer_step_run(optimizer, stream, step, own, flat, end - flat,
                           decays ? settings->weight_decay : 0.0);
        own += end - flat;
    }
    if (step->commit) { optimizer->commits++; }
}

// ---------------------------------------------------------------------------------------
// The learning rate as a function of progress
//
// Progress is counted in micro-batch gradients committed by all workers together (--lr-by
// grads), so that rules and runs with different or varying batch sizes see the same rate
// at the same number of tokens; or it is counted in commits (--lr-by commits). Warm-up is
// linear, and its first commit has a rate above zero. An estimate uses the rate of the
// commit that it anticipates: progress moves at commits only.

// --schedule, in the order of its choices.
typedef enum ScheduleKind { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT } ScheduleKind;

typedef struct LearningRate {
    ScheduleKind kind;
    double peak, minimum;
    double step;   // progress that a commit of nominal size makes
    double warmup; // progress at which the peak is reached
    double total;  // progress at which the minimum is reached
} LearningRate;

// The rate of the commit that starts when `progress` has been made.
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

#endif
