// optimizer.h: the optimizer state of one worker and one step of it.
//
// A worker owns the elements [begin, end) of the flat parameter vector: all of them under DDP, one shard under every rule that shards.
// Weight decay applies to some tensors only, given as ranges of the flat vector, so a shard may cut through tensors anywhere.
// Runs on the communication stream; nothing here communicates.
#ifndef ACCO_OPTIMIZER_H
#define ACCO_OPTIMIZER_H

#include <math.h>
#include <stdint.h>

#include "kernels/kernels.h"
#include "runtime/memory.h"

typedef enum OptimizerKind { OPTIMIZER_ADAMW, OPTIMIZER_SGD } OptimizerKind;

// A stretch of the flat parameter vector to which weight decay applies.
typedef struct DecayRange {
    size_t begin, end;
} DecayRange;

// Appends [begin, end) to `ranges`, joined to the last one where it follows on. To be called in ascending order.
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
    size_t begin, end;                           // the elements that this worker owns
    float *master, *first_moment, *second_moment; // (end - begin)
    int64_t commits;
} Optimizer;

// Plans the state for [begin, end). `master_is_elsewhere`: the caller points `master` to a buffer that it keeps anyway.
static inline void optimizer_reserve(Optimizer *optimizer, Arena *arena, const OptimizerSettings *settings, size_t begin, size_t end,
                                     bool master_is_elsewhere) {
    optimizer->settings = *settings;
    optimizer->begin = begin;
    optimizer->end = end;
    size_t bytes = (end - begin) * sizeof(float);
    if (!master_is_elsewhere) { arena_reserve(arena, MEMORY_OPTIMIZER, "master parameters", bytes, &optimizer->master); }
    if (settings->kind == OPTIMIZER_ADAMW) {
        arena_reserve(arena, MEMORY_OPTIMIZER, "AdamW first moment", bytes, &optimizer->first_moment);
        arena_reserve(arena, MEMORY_OPTIMIZER, "AdamW second moment", bytes, &optimizer->second_moment);
    }
}

static inline void optimizer_step_range(Optimizer *optimizer, Stream *stream, AdamWRange *range, bool commit) {
    if (optimizer->settings.kind == OPTIMIZER_SGD) {
        sgd_step(range, commit);
    } else {
        adamw(stream, range, commit);
    }
}

static inline AdamWRange optimizer_range(const Optimizer *optimizer, const float *gradient, float *out, size_t begin, size_t end) {
    AdamWRange range;
    memset(&range, 0, sizeof range);
    size_t offset = begin - optimizer->begin;
    bool has_moments = optimizer->settings.kind == OPTIMIZER_ADAMW;
    range.out = out + offset;
    range.master = optimizer->master + offset;
    range.first_moment = has_moments ? optimizer->first_moment + offset : NULL;
    range.second_moment = has_moments ? optimizer->second_moment + offset : NULL;
    range.gradient = gradient + offset;
    range.count = end - begin;
    return range;
}

// Where the run of elements that starts at `position` and decays or not as a whole ends, not beyond `end`.
static inline size_t optimizer_run_end(const OptimizerSettings *settings, size_t position, size_t end, bool *decays) {
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

// out (end - begin) <- the parameters after a step with gradient (end - begin) / divisor * scale. `commit` moves the state; otherwise it is
// an estimate and the state stays bitwise as it was.
static inline void optimizer_step(Optimizer *optimizer, Stream *stream, const float *gradient, float *out, double divisor, double scale,
                                  double learning_rate, bool commit) {
    const OptimizerSettings *settings = &optimizer->settings;
    double t = (double)(optimizer->commits + 1);
    for (size_t position = optimizer->begin; position < optimizer->end;) {
        bool decays;
        size_t stop = optimizer_run_end(settings, position, optimizer->end, &decays);
        AdamWRange range = optimizer_range(optimizer, gradient, out, position, stop);
        range.step =
            adamw_step(settings->beta1, settings->beta2, t, settings->epsilon, learning_rate, decays ? settings->weight_decay : 0.0);
        range.step.divisor = (float)divisor;
        range.step.scale = (float)scale;
        optimizer_step_range(optimizer, stream, &range, commit);
        position = stop;
    }
    if (commit) { optimizer->commits++; }
}

#endif
