// memory.h: one arena for all large memory, planned before anything runs.
//
// Modules reserve what they need, with the address of a pointer. The table of these,
// which plans and runs print, sets the pointers: what was not planned cannot be used.
//
// arena_reserve plans memory that kernels work on: on a GPU, device memory. arena_reserve_host plans
// memory that the host works on too: on a GPU, pinned host memory. On the CPU both are one anonymous
// mapping; pages of it that are never touched cost nothing.
#pragma once

#include "runtime/files.h"
#include "runtime/gpu.h"
#include "runtime/numbers.h"

typedef enum MemoryClass {
    MEMORY_PARAMETERS,
    MEMORY_GRADIENTS,
    MEMORY_COMMUNICATION,
    MEMORY_OPTIMIZER,
    MEMORY_ACTIVATIONS,
    MEMORY_WORKSPACE,
    MEMORY_CLASS_COUNT
} MemoryClass;

static inline const char *memory_class_name(MemoryClass memory_class) {
    static const char *const names[MEMORY_CLASS_COUNT] = {"parameters", "gradients",   "communication",
                                                          "optimizer",  "activations", "workspace"};
    return names[memory_class];
}

// The alignment serves AVX-512, keeps neighbours out of the adjacent-line prefetcher's
// reach, and is what libraries on a GPU ask for.
enum { ARENA_ALIGNMENT = 256, ARENA_MAX_RESERVATIONS = 512 };

typedef struct ArenaRow {
    MemoryClass memory_class;
    const char *name; // static storage
    size_t bytes;
    void *slot; // address of the pointer that arena_commit fills
} ArenaRow;

typedef struct Reservation {
    ArenaRow row;
    bool on_host;  // in the host's mapping, if that is another one
    size_t offset; // from the start of its mapping
} Reservation;

typedef struct Arena {
    Reservation reservations[ARENA_MAX_RESERVATIONS];
    int count;
    bool on_gpu;       // set before the first reservation
    size_t bytes;      // planned so far where kernels work, alignment included
    size_t host_bytes; // on a GPU: planned so far in pinned host memory
    char *base;        // NULL until arena_commit
    char *host_base;   // on a GPU
} Arena;

static inline void arena_add(Arena *arena, ArenaRow row, bool on_host) {
    assert(arena->base == NULL && arena->count < ARENA_MAX_RESERVATIONS);
    bool apart = on_host && arena->on_gpu;
    size_t *total = apart ? &arena->host_bytes : &arena->bytes;
    Reservation reservation = {row, apart, *total};
    arena->reservations[arena->count++] = reservation;
    *total += (row.bytes + ARENA_ALIGNMENT - 1) / ARENA_ALIGNMENT * ARENA_ALIGNMENT;
}

// Plans `bytes` bytes. slot: the address of a pointer variable, which must stay where it
// is until arena_commit sets it. name: a literal.
static inline void arena_reserve(Arena *arena, MemoryClass memory_class, const char *name, size_t bytes,
                                 void *slot) {
    ArenaRow row = {memory_class, name, bytes, slot};
    arena_add(arena, row, false);
}

static inline void arena_reserve_host(Arena *arena, MemoryClass memory_class, const char *name, size_t bytes,
                                      void *slot) {
    ArenaRow row = {memory_class, name, bytes, slot};
    arena_add(arena, row, true);
}

// Leaves out rows of 0 bytes: their pointers stay as they are.
static inline void arena_reserve_rows(Arena *arena, const ArenaRow *rows, size_t count, bool on_host) {
    for (size_t i = 0; i < count; i++) {
        if (rows[i].bytes > 0) { arena_add(arena, rows[i], on_host); }
    }
}

static inline size_t arena_class_bytes(const Arena *arena, MemoryClass memory_class) {
    size_t bytes = 0;
    for (int i = 0; i < arena->count; i++) {
        const ArenaRow *row = &arena->reservations[i].row;
        if (row->memory_class == memory_class) { bytes += row->bytes; }
    }
    return bytes;
}

static inline bool arena_refused(const char *what, size_t bytes, Error *error) {
    return error_set(
        error, "%s refused %.2f GB of memory: lower --micro-batch or --seq-len, or choose a smaller --model",
        what, (double)bytes / 1e9);
}

// Maps the plan, zeroed, and sets every pointer. False, with an error: it was refused.
static inline bool arena_commit(Arena *arena, Error *error) {
    assert(arena->base == NULL);
    if (arena->on_gpu) {
        arena->base = (char *)gpu_allocate(arena->bytes + ARENA_ALIGNMENT);
        if (arena->base == NULL) { return arena_refused("the GPU", arena->bytes, error); }
        arena->host_base = (char *)gpu_allocate_host(arena->host_bytes + ARENA_ALIGNMENT);
        if (arena->host_base == NULL) { return arena_refused("the system", arena->host_bytes, error); }
        memset(arena->host_base, 0, arena->host_bytes);
        void *queue = gpu_queue_create(false);
        gpu_fill(queue, arena->base, 0, arena->bytes);
        while (!gpu_queue_is_idle(queue)) {}
        gpu_queue_destroy(queue);
    } else {
        void *base = memory_map(arena->bytes + ARENA_ALIGNMENT);
        if (base == MAP_FAILED) { return arena_refused("the system", arena->bytes, error); }
        arena->base = (char *)base;
    }
    for (int i = 0; i < arena->count; i++) {
        const Reservation *reservation = &arena->reservations[i];
        void *pointer = (reservation->on_host ? arena->host_base : arena->base) + reservation->offset;
        memcpy(reservation->row.slot, &pointer, sizeof pointer);
    }
    return true;
}

// Bytes of the mapping that are in memory now; on a GPU all of it. 0: not known.
static inline size_t arena_resident_bytes(const Arena *arena) {
    return arena->on_gpu ? arena->bytes : memory_resident(arena->base, arena->bytes);
}

static inline void arena_release(Arena *arena) {
    if (arena->on_gpu) {
        if (arena->base != NULL) { gpu_release(arena->base); }
        if (arena->host_base != NULL) { gpu_release_host(arena->host_base); }
    } else if (arena->base != NULL) {
        munmap(arena->base, arena->bytes + ARENA_ALIGNMENT);
    }
    memset(arena, 0, sizeof *arena);
}
