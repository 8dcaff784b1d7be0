// numbers.h: the smaller and the larger of two integers.
#ifndef ACCO_RUNTIME_NUMBERS_H
#define ACCO_RUNTIME_NUMBERS_H

#include <stddef.h>
#include <stdint.h>

static inline size_t size_min(size_t a, size_t b) { return a < b ? a : b; }
static inline size_t size_max(size_t a, size_t b) { return a > b ? a : b; }
static inline int64_t int64_min(int64_t a, int64_t b) { return a < b ? a : b; }

#endif
