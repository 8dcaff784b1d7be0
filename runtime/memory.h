// memory.h: one arena, planned before anything runs.
//
// Every module reserves what it will need: a class, a name, a size, and the address of the pointer to fill. The table of reservations is
// printed by `train_gpt plan` and by every run, and the same table places the pointers: memory that was not planned cannot be used.
//
//   arena_reserve(...) any number of times  ->  [arena_print]  ->  arena_commit(): one mapping, pointers set, zeroed  ->  arena_release()
//
// The mapping is anonymous and untouched pages cost nothing, so arena_resident_bytes() tells how much of the plan was really used.
#ifndef ACCO_MEMORY_H
#define ACCO_MEMORY_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "errors.h"

typedef enum MemoryClass {
    MEMORY_PARAMETERS,
    MEMORY_GRADIENTS,
    MEMORY_EXCHANGE, // communication buffers
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

// Two cache lines: keeps neighbours apart for AVX-512 and for the adjacent-line prefetcher.
enum { ARENA_ALIGNMENT = 128, ARENA_MAX_RESERVATIONS = 512 };

typedef struct Reservation {
    MemoryClass memory_class;
    const char *name; // static storage
    size_t bytes;
    size_t offset; // from the start of the mapping
    void *slot;    // address of the pointer that arena_commit fills
} Reservation;

typedef struct Arena {
    Reservation reservations[ARENA_MAX_RESERVATIONS];
    int count;
    size_t bytes; // planned so far, alignment included
    char *base;   // NULL until arena_commit
} Arena;

// Plans `bytes` bytes; `slot` is the address of a pointer variable that must stay where it is until arena_commit, which sets it.
static inline void arena_reserve(Arena *arena, MemoryClass memory_class, const char *name, size_t bytes, void *slot) {
    assert(arena->base == NULL && arena->count < ARENA_MAX_RESERVATIONS);
    Reservation *reservation = &arena->reservations[arena->count++];
    reservation->memory_class = memory_class;
    reservation->name = name;
    reservation->bytes = bytes;
    reservation->offset = arena->bytes;
    reservation->slot = slot;
    arena->bytes += (bytes + ARENA_ALIGNMENT - 1) / ARENA_ALIGNMENT * ARENA_ALIGNMENT;
}

static inline size_t arena_class_bytes(const Arena *arena, MemoryClass memory_class) {
    size_t bytes = 0;
    for (int i = 0; i < arena->count; i++) {
        if (arena->reservations[i].memory_class == memory_class) { bytes += arena->reservations[i].bytes; }
    }
    return bytes;
}

// The limit of the memory control group in which this process sees itself, as in a container; SIZE_MAX where there is none.
static inline size_t memory_group_limit(void) {
    static const char *const files[] = {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"};
    for (int version = 0; version < 2; version++) {
        unsigned long long limit = 0;
        FILE *file = fopen(files[version], "r");
        bool read = file != NULL && fscanf(file, "%llu", &limit) == 1; // "max" is no number
        if (file != NULL) { fclose(file); }
        if (read) { return (size_t)limit; }
    }
    return SIZE_MAX;
}

// Bytes that the system could give out now without swapping; 0 where it does not tell.
static inline size_t memory_available(void) {
    FILE *file = fopen("/proc/meminfo", "r");
    char line[128];
    unsigned long long kilobytes = 0;
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        if (sscanf(line, "MemAvailable: %llu kB", &kilobytes) == 1) { break; }
    }
    if (file != NULL) { fclose(file); }
    size_t machine = (size_t)kilobytes * 1024, group = memory_group_limit();
    return machine < group ? machine : group;
}

// Whether `ranks` processes of this node can each have what is planned. Without this the system would promise it, and kill them when they
// use it.
static inline bool arena_check(const Arena *arena, int ranks, Error *error) {
    size_t available = memory_available();
    if (available == 0 || arena->bytes <= available / (size_t)ranks) { return true; }
    return error_set(
        error,
        "%d rank%s of this node need%s %.2f GB each, and %.2f GB are available: lower --micro-batch or --seq-len, choose a smaller "
        "--model, or start fewer ranks here (train_gpt plan says what takes how much)",
        ranks, ranks == 1 ? "" : "s", ranks == 1 ? "s" : "", (double)arena->bytes / 1e9, (double)available / 1e9);
}

// Maps the planned bytes, zeroed, and sets every reserved pointer. On failure nothing is mapped and `error` says how much was asked for.
static inline bool arena_commit(Arena *arena, Error *error) {
    assert(arena->base == NULL);
    void *base = mmap(NULL, arena->bytes + ARENA_ALIGNMENT, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        return error_set(error, "the system refused %.2f GB of memory: lower --micro-batch or --seq-len, or choose a smaller --model",
                         (double)arena->bytes / 1e9);
    }
    arena->base = (char *)base;
    for (int i = 0; i < arena->count; i++) {
        void *pointer = arena->base + arena->reservations[i].offset;
        memcpy(arena->reservations[i].slot, &pointer, sizeof pointer);
    }
    return true;
}

// Bytes of the mapping that are in memory now: what the run has touched of what it planned. 0 where the system cannot tell.
static inline size_t arena_resident_bytes(const Arena *arena) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t pages = (arena->bytes + page - 1) / page;
    unsigned char *resident = (unsigned char *)malloc(pages);
    size_t count = 0;
    if (resident != NULL && mincore(arena->base, arena->bytes, resident) == 0) {
        for (size_t i = 0; i < pages; i++) { count += resident[i] & 1; }
    }
    free(resident);
    return count * page;
}

static inline void arena_release(Arena *arena) {
    if (arena->base != NULL) { munmap(arena->base, arena->bytes + ARENA_ALIGNMENT); }
    memset(arena, 0, sizeof *arena);
}

#endif
