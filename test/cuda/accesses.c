// accesses.c: the functions that code compiled with -fsanitize=thread calls (accesses.h).
// It is compiled without that flag itself. One thread counts at a time.
#include "test/cuda/accesses.h"

#include <stdlib.h>

static struct {
    const char *memory;
    size_t bytes;         // 0: nothing is counted
    bool *read, *written; // (bytes / ACCESS_SECTOR)
    uint64_t asked;
} counting;

void accesses_begin(const void *memory, size_t bytes) {
    counting.memory = (const char *)memory;
    counting.read = (bool *)calloc(bytes / ACCESS_SECTOR, 1);
    counting.written = (bool *)calloc(bytes / ACCESS_SECTOR, 1);
    counting.asked = 0;
    counting.bytes = bytes;
}

void accesses_add(const void *place, size_t bytes, bool written) {
    size_t first = (uintptr_t)place - (uintptr_t)counting.memory;
    if (first >= counting.bytes || bytes > counting.bytes - first || bytes == 0) { return; }
    bool *sectors = written ? counting.written : counting.read;
    counting.asked += bytes;
    for (size_t i = first / ACCESS_SECTOR; i <= (first + bytes - 1) / ACCESS_SECTOR; i++) {
        sectors[i] = true;
    }
}

Accesses accesses_end(void) {
    Accesses result = {counting.asked, 0};
    for (size_t i = 0; i < counting.bytes / ACCESS_SECTOR; i++) {
        result.touched_bytes += (uint64_t)(counting.read[i] + counting.written[i]) * ACCESS_SECTOR;
    }
    counting.bytes = 0;
    free(counting.read);
    free(counting.written);
    return result;
}

// ---- What the compiler calls ----------------------------------------------------------

#define ACCESS(bytes) \
    void __tsan_read##bytes(void *place) { accesses_add(place, bytes, false); } \
    void __tsan_write##bytes(void *place) { accesses_add(place, bytes, true); } \
    void __tsan_unaligned_read##bytes(void *place) { accesses_add(place, bytes, false); } \
    void __tsan_unaligned_write##bytes(void *place) { accesses_add(place, bytes, true); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void *place, long bytes) { accesses_add(place, (size_t)bytes, false); }
void __tsan_write_range(void *place, long bytes) { accesses_add(place, (size_t)bytes, true); }
void __tsan_vptr_update(void *place, void *value) { (void)place, (void)value; }
void __tsan_func_entry(void *caller) { (void)caller; }
void __tsan_func_exit(void *caller) { (void)caller; }
void __tsan_init(void) {}

// Code of the host uses these; kernels have no atomic operations.
#define ATOMIC(bits) \
    uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t *place, int order) { \
        (void)order; \
        return __atomic_load_n(place, __ATOMIC_SEQ_CST); \
    } \
    void __tsan_atomic##bits##_store(volatile uint##bits##_t *place, uint##bits##_t value, int order) { \
        (void)order; \
        __atomic_store_n(place, value, __ATOMIC_SEQ_CST); \
    } \
    uint##bits##_t __tsan_atomic##bits##_fetch_add(volatile uint##bits##_t *place, uint##bits##_t value, \
                                                   int order) { \
        (void)order; \
        return __atomic_fetch_add(place, value, __ATOMIC_SEQ_CST); \
    } \
    uint##bits##_t __tsan_atomic##bits##_fetch_sub(volatile uint##bits##_t *place, uint##bits##_t value, \
                                                   int order) { \
        (void)order; \
        return __atomic_fetch_sub(place, value, __ATOMIC_SEQ_CST); \
    }
ATOMIC(8)
ATOMIC(32)
ATOMIC(64)
