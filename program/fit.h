// fit.h: does a run fit into the memory that there is? If not, what would? That is found by trial:
// the reservations are made again with other options, which allocates nothing.
#pragma once

#include "program/setup.h"

// Bytes that one rank may use, 0: not known; or that it needs.
typedef struct MemoryRoom {
    size_t gpu, host;
} MemoryRoom;

// What a rank takes beside its plan: stacks, the workspaces of libraries, the buffers of MPI. With
// plans of 200 to 440 MB it was 10 to 30 MB more than is taken when its memory is planned.
#define MEMORY_BESIDE ((size_t)32 << 20)

// Ranks share their host's memory.
static inline MemoryRoom memory_room(const Run *run) {
    size_t share = run->placement.host_available / run->transport.local_size;
    if (share > 0) { share = share > MEMORY_BESIDE ? share - MEMORY_BESIDE : 1; }
    MemoryRoom room = {run->placement.on_gpu ? placement_room(&run->placement) : 0, share};
    return room;
}

static inline MemoryRoom arena_needs(const Arena *arena) {
    MemoryRoom needs = {arena->on_gpu ? arena->bytes : 0, arena->on_gpu ? arena->host_bytes : arena->bytes};
    return needs;
}

static inline bool arena_fits(const Arena *arena, const MemoryRoom *room) {
    MemoryRoom needs = arena_needs(arena);
    return (room->gpu == 0 || needs.gpu <= room->gpu) && (room->host == 0 || needs.host <= room->host);
}

// `run` with other options. Only options on which the setup of `run` does not depend may differ:
// the rule's, the micro-batch's, --seq-len, --recompute and --inner.
static inline Run *trial_of(const Run *run, const Options *options) {
    Run *trial = MEMORY_OF(Run, 1);
    trial->options = *options;
    trial->B = (int)options->micro_batch;
    trial->T = (int)options->seq_len;
    trial->threads = run->threads;
    trial->placement = run->placement;
    if (placement_uneven(options) != NULL) { trial->placement.uses_nccl = false; }
    trial->config = run->config;
    trial->part = run->part;
    trial->transport = run->transport;
    trial->data = run->data;
    trial->model.settings = run->model.settings;
    return trial;
}

static inline void trial_free(Run *trial) {
    if (trial == NULL) { return; }
    scheduler_free(&trial->scheduler);
    free(trial->tensors);
    free(trial);
}

// With its reservations, but without memory. NULL: with an error.
static inline Run *trial_reserve(const Run *run, const Options *options, Error *error) {
    if ((double)options->micro_batch * options->seq_len > MOST_TOKENS_OF_A_MICRO_BATCH) {
        error_set(error, "a micro-batch has too many tokens");
        return NULL;
    }
    Run *trial = trial_of(run, options);
    choose_tensors(trial);
    if (reserve_memory(trial, error)) { return trial; }
    trial_free(trial);
    return NULL;
}

static inline bool fit_try(const Run *run, const MemoryRoom *room, const Options *options) {
    Error unused = {""};
    Run *trial = trial_reserve(run, options, &unused);
    bool fits = trial != NULL && arena_fits(&trial->arena, room);
    trial_free(trial);
    return fits;
}

// The largest --micro-batch with which the run would fit; 0: none.
static inline int64_t fit_micro_batch(const Run *run, const MemoryRoom *room, const Options *options) {
    const int64_t most = (int64_t)option_of(offsetof(Options, micro_batch))->maximum;
    Options trial = *options;
    int64_t least = 0, first_too_large = 1;
    for (trial.micro_batch = 1; first_too_large <= most && fit_try(run, room, &trial);) {
        least = first_too_large;
        trial.micro_batch = first_too_large = int64_min(2 * first_too_large, most + 1);
    }
    while (first_too_large - least > 1) {
        trial.micro_batch = (least + first_too_large) / 2;
        *(fit_try(run, room, &trial) ? &least : &first_too_large) = trial.micro_batch;
    }
    return least;
}

// The share of the memory that --fit fills: a plan is exact within half a percent.
#define FIT_SHARE 0.98

// --fit: the least recomputation with which a micro-batch is large enough for matrix
// products to be nearly as fast as they get, and the largest micro-batch that fits. If
// none is large enough: the largest. False: none fits, or the memory is not known.
static inline bool fit_options(const Run *run, Options *options) {
    const Options asked = *options;
    MemoryRoom whole = memory_room(run),
               room = {(size_t)(FIT_SHARE * (double)whole.gpu), (size_t)(FIT_SHARE * (double)whole.host)};
    int64_t tokens = run->placement.on_gpu ? 8192 : 1024;
    int64_t best = 0, enough = (tokens + asked.seq_len - 1) / asked.seq_len;
    bool is_open = asked.recompute == 0;
    int first = is_open ? RECOMPUTE_NONE : asked.recompute - 1, last = is_open ? RECOMPUTE_BLOCK : first;
    if (room.gpu == 0 && room.host == 0) { return false; }
    for (int level = first; level <= last && best < enough; level++) {
        bool on_gpu_only = level != RECOMPUTE_NONE && level != RECOMPUTE_BLOCK;
        if (on_gpu_only && !run->placement.on_gpu) { continue; }
        Options trial = asked;
        trial.recompute = 1 + level;
        int64_t largest = fit_micro_batch(run, &room, &trial);
        if (largest <= best) { continue; }
        best = largest;
        *options = trial;
        options->micro_batch = largest;
    }
    return best > 0;
}

// Recomputes whole layers. False: options ask for it, or the program does it where it helps.
static inline bool fit_recompute(const Run *run, Options *options) {
    bool automatic = options->recompute == 0 && run->placement.on_gpu;
    if (automatic || options->recompute == 1 + RECOMPUTE_BLOCK) { return false; }
    options->recompute = 1 + RECOMPUTE_BLOCK;
    return true;
}

enum { FIT_TEXT = 400 };

// Refuses a run, whose memory has been reserved, that does not fit, and says what the user could
// change. Otherwise the system would promise memory, and kill processes when they use it.
static inline bool fit_check(const Run *run, const MemoryRoom *room, Error *error) {
    if (arena_fits(&run->arena, room)) { return true; }
    const Rule *rule = options_rule(&run->options);
    Options trial = run->options;
    char needed[SIZE_TEXT], available[SIZE_TEXT], text[FIT_TEXT] = "";
    int64_t largest = fit_micro_batch(run, room, &trial);
    if (largest > 0) { text_join(text, sizeof text, ", ", "--micro-batch %lld fits", (long long)largest); }
    int64_t largest_of_blocks = fit_recompute(run, &trial) ? fit_micro_batch(run, room, &trial) : 0;
    if (largest_of_blocks >= run->options.micro_batch) {
        text_join(text, sizeof text, ", ", "--recompute block fits");
    } else if (largest_of_blocks > largest) {
        text_join(text, sizeof text, ", ", "--recompute block with --micro-batch %lld fits",
                  (long long)largest_of_blocks);
    }
    trial = run->options;
    bool shards = run->transport.size == 1 || rule_shards(rule); // or another rule would not help
    for (trial.rule = 0; trial.rule < RULE_COUNT && !shards; trial.rule++) {
        shards = rule_shards(options_rule(&trial)) && fit_try(run, room, &trial);
        if (shards) { text_join(text, sizeof text, ", ", "--optimizer %s fits", options_rule(&trial)->name); }
    }
    trial = run->options;
    trial.micro_batch = 1;
    trial.recompute = 1 + RECOMPUTE_BLOCK;
    for (trial.seq_len /= 2; trial.seq_len >= 16 && text[0] == '\0'; trial.seq_len /= 2) {
        if (!fit_try(run, room, &trial)) { continue; }
        text_join(text, sizeof text, ", ", "--seq-len %lld --micro-batch 1 --recompute block fits",
                  (long long)trial.seq_len);
    }
    if (text[0] == '\0') {
        text_join(text, sizeof text, ", ", "no --micro-batch of %s fits: choose a smaller --model%s",
                  run->config.name,
                  rule_shards(rule) ? ", or more ranks, which share the optimizer's state" : "");
    }
    MemoryRoom needs = arena_needs(&run->arena);
    bool of_gpu = room->gpu > 0 && needs.gpu > room->gpu;
    return error_set(error, "%s with --micro-batch %lld needs %s %s for a rank, and %s are available: %s",
                     run->config.name, (long long)run->options.micro_batch,
                     size_text(of_gpu ? needs.gpu : needs.host, needed), of_gpu ? "on the GPU" : "of memory",
                     size_text(of_gpu ? room->gpu : room->host, available), text);
}
