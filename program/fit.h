// fit.h: does a run fit into the memory that there is? Where it does not: what would?
//
// A plan and the start of a run ask the same question and give the same answer. What would
// fit is found by trial: the reservations are made again with other options
// (reserve_memory), which allocates nothing.
#ifndef ACCO_PROGRAM_FIT_H
#define ACCO_PROGRAM_FIT_H

#include "program/setup.h"

// Bytes that one rank may use; 0: not known.
typedef struct MemoryRoom {
    size_t gpu, host;
} MemoryRoom;

// Of the host every rank of the node has an equal share. A plan for a GPU elsewhere knows
// nothing of the host there.
static inline MemoryRoom memory_room(const Run *run) {
    bool elsewhere = run->options.gpu_memory > 0;
    MemoryRoom room = {run->placement.on_gpu ? placement_room(&run->placement) : 0,
                       elsewhere ? 0 : memory_available() / (size_t)run->transport.local_size};
    return room;
}

static inline size_t arena_gpu_bytes(const Arena *arena) { return arena->on_gpu ? arena->bytes : 0; }
static inline size_t arena_host_bytes(const Arena *arena) {
    return arena->on_gpu ? arena->host_bytes : arena->bytes;
}

static inline bool arena_fits(const Arena *arena, const MemoryRoom *room) {
    return (room->gpu == 0 || arena_gpu_bytes(arena) <= room->gpu) &&
           (room->host == 0 || arena_host_bytes(arena) <= room->host);
}

// ---------------------------------------------------------------------------------------
// Trials

// Whether the run would fit with these options. Only --micro-batch, --seq-len, --recompute
// and --optimizer may differ from the run's.
static inline bool fit_try(const Run *run, const MemoryRoom *room, const Options *options) {
    Run *trial = (Run *)malloc(sizeof *trial);
    Error never = {""};
    if (trial == NULL) { return false; }
    *trial = *run;
    trial->options = *options;
    trial->rule = options_rule(options);
    trial->B = (int)options->micro_batch;
    trial->T = (int)options->seq_len;
    memset(&trial->arena, 0, sizeof trial->arena);
    bool counted = (double)trial->B * trial->T <= MOST_TOKENS_OF_A_MICRO_BATCH;
    bool fits = counted && reserve_memory(trial, &never) && arena_fits(&trial->arena, room);
    if (counted) {
        fragments_free(&trial->scheduler);
        free(trial->decay_ranges);
    }
    free(trial);
    return fits;
}

// The largest --micro-batch with which the run would fit; 0: none.
static inline int64_t fit_micro_batch(const Run *run, const MemoryRoom *room, const Options *options) {
    enum { MOST = 65536 };
    Options trial = *options;
    int64_t least = 0, first_too_large = 1;
    for (trial.micro_batch = 1; first_too_large <= MOST && fit_try(run, room, &trial);) {
        least = first_too_large;
        trial.micro_batch = first_too_large = 2 * first_too_large;
    }
    while (first_too_large - least > 1) {
        trial.micro_batch = (least + first_too_large) / 2;
        *(fit_try(run, room, &trial) ? &least : &first_too_large) = trial.micro_batch;
    }
    return least;
}

// The largest half, quarter, ... of --seq-len with which the run fits, in micro-batches of
// one sequence; 0: none of at least 16 tokens.
static inline int64_t fit_sequence(const Run *run, const MemoryRoom *room) {
    Options trial = run->options;
    trial.micro_batch = 1;
    trial.recompute = 1 + RECOMPUTE_BLOCK;
    for (trial.seq_len = run->T / 2; trial.seq_len >= 16; trial.seq_len /= 2) {
        if (fit_try(run, room, &trial)) { return trial.seq_len; }
    }
    return 0;
}

// Tokens of a micro-batch at which matrix products are as fast as they get, nearly.
static inline int64_t fit_enough_tokens(const Run *run) { return run->placement.on_gpu ? 8192 : 1024; }

// --fit: the options with the least recomputation with which a micro-batch is large enough,
// and with the largest micro-batch that then fits; where none is large enough, the largest of
// all. False where none fits, or the memory is not known.
static inline bool fit_options(const Run *run, const MemoryRoom *room, Options *options) {
    int64_t best = 0, enough = (fit_enough_tokens(run) + run->T - 1) / run->T;
    bool is_open = run->options.recompute == 0;
    int first = is_open ? RECOMPUTE_NONE : run->options.recompute - 1;
    int last = is_open ? RECOMPUTE_BLOCK : first;
    if (room->gpu == 0 && room->host == 0) { return false; }
    for (int level = first; level <= last && best < enough; level++) {
        bool on_gpu_only = level != RECOMPUTE_NONE && level != RECOMPUTE_BLOCK;
        if (on_gpu_only && !run->placement.on_gpu) { continue; }
        Options trial = run->options;
        trial.recompute = 1 + level;
        int64_t largest = fit_micro_batch(run, room, &trial);
        if (largest <= best) { continue; }
        best = largest;
        *options = trial;
        options->micro_batch = largest;
    }
    return best > 0;
}

// ---------------------------------------------------------------------------------------
// Answers

// The options with whole layers recomputed; false: they ask for it already, or the program
// does where it helps.
static inline bool fit_recompute(const Run *run, Options *options) {
    bool automatic = options->recompute == 0 && run->placement.on_gpu;
    if (automatic || options->recompute == 1 + RECOMPUTE_BLOCK) { return false; }
    options->recompute = 1 + RECOMPUTE_BLOCK;
    return true;
}

// The first rule that shards the optimizer's state and fits; NULL: none, or the run's does.
static inline const char *fit_rule(const Run *run, const MemoryRoom *room) {
    Options trial = run->options;
    if (run->transport.size == 1 || rule_shards(run->rule)) { return NULL; }
    for (trial.rule = 0; trial.rule < RULE_COUNT; trial.rule++) {
        if (rule_shards(options_rule(&trial)) && fit_try(run, room, &trial)) {
            return options_rule(&trial)->name;
        }
    }
    return NULL;
}

// text <- what the user could change, one way or another.
static inline void fit_suggest(const Run *run, const MemoryRoom *room, char *text, size_t size) {
    Options with_blocks = run->options;
    bool can_recompute = fit_recompute(run, &with_blocks);
    int64_t micro_batch = fit_micro_batch(run, room, &run->options);
    int64_t micro_batch_of_blocks = can_recompute ? fit_micro_batch(run, room, &with_blocks) : 0;
    const char *rule = fit_rule(run, room), *name = run->config.name;
    int length = 0;
    text[0] = '\0';
    if (micro_batch > 0) {
        length += snprintf(text, size, "--micro-batch %lld fits, ", (long long)micro_batch);
    }
    if (micro_batch_of_blocks >= run->B) {
        length += snprintf(text + length, size - (size_t)length, "--recompute block fits, ");
    } else if (micro_batch_of_blocks > micro_batch) {
        length +=
            snprintf(text + length, size - (size_t)length, "--recompute block with --micro-batch %lld fits, ",
                     (long long)micro_batch_of_blocks);
    }
    if (rule != NULL) {
        length += snprintf(text + length, size - (size_t)length, "--optimizer %s fits, ", rule);
    }
    int64_t sequence = length == 0 ? fit_sequence(run, room) : 0;
    if (sequence > 0) {
        length += snprintf(text, size, "--seq-len %lld --micro-batch 1 --recompute block fits, ",
                           (long long)sequence);
    }
    if (length > 0) {
        text[length - 2] = '\0'; // the last comma
    } else {
        snprintf(text, size, "no --micro-batch of %s fits: choose a smaller --model%s", name,
                 rule_shards(run->rule) ? ", or more ranks, which share the optimizer's state" : "");
    }
}

// The sentence for a run that does not fit. Memory must have been reserved.
static inline void fit_explain(const Run *run, const MemoryRoom *room, Error *error) {
    char needed[SIZE_TEXT], available[SIZE_TEXT], hint[400];
    bool of_gpu = room->gpu > 0 && arena_gpu_bytes(&run->arena) > room->gpu;
    int ranks = run->transport.local_size;
    size_text(of_gpu ? arena_gpu_bytes(&run->arena) : arena_host_bytes(&run->arena), needed);
    size_text(of_gpu ? room->gpu : room->host, available);
    fit_suggest(run, room, hint, sizeof hint);
    if (of_gpu) {
        error_set(error,
                  "%s with --micro-batch %d needs %s on the GPU, and %s are available for this rank: %s",
                  run->config.name, run->B, needed, available, hint);
    } else {
        error_set(error, "%s with --micro-batch %d needs %s of memory%s, and %s are available%s: %s",
                  run->config.name, run->B, needed, ranks > 1 ? " for each rank" : "", available,
                  ranks > 1 ? " for each of those on this node" : "", hint);
    }
}

// Refuses a run that does not fit. Without this check the system would promise memory of
// the host, and kill processes when they use it.
static inline bool fit_check(const Run *run, Error *error) {
    MemoryRoom room = memory_room(run);
    if (arena_fits(&run->arena, &room)) { return true; }
    fit_explain(run, &room, error);
    return false;
}

#endif
