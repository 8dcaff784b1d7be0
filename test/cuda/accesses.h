// accesses.h: counts the loads and stores of code that was compiled with
// -fsanitize=thread.
//
// The compiler puts a call before every access to memory that others may see. The
// functions that are called are those of accesses.c, not ThreadSanitizer's, and count the
// accesses to one piece of memory. Copies of the C library (memcpy) call nothing.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { ACCESS_SECTOR = 32 }; // the unit in which a GPU reads and writes memory

typedef struct Accesses {
    uint64_t asked_bytes;   // each access by itself
    uint64_t touched_bytes; // sectors that were read at least once, and that were written at least once
} Accesses;

// Begins to count accesses to `memory` (bytes, a multiple of ACCESS_SECTOR).
void accesses_begin(const void *memory, size_t bytes);

// An access that calls nothing by itself.
void accesses_add(const void *place, size_t bytes, bool written);

// What was counted; counting ends.
Accesses accesses_end(void);

#ifdef __cplusplus
}
#endif
