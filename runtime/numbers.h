// numbers.h: the smaller and the larger of two numbers; the median; bytes as text.
#ifndef ACCO_RUNTIME_NUMBERS_H
#define ACCO_RUNTIME_NUMBERS_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static inline size_t size_min(size_t a, size_t b) { return a < b ? a : b; }
static inline size_t size_max(size_t a, size_t b) { return a > b ? a : b; }
static inline int64_t int64_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline double real_add(double a, double b) { return a + b; }

static inline int numbers_compare(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

// Sorts values (count >= 1); the median, with an even count the larger middle one.
static inline double median_of(double *values, size_t count) {
    qsort(values, count, sizeof values[0], numbers_compare);
    return values[count / 2];
}

enum { SIZE_TEXT = 24 };

// text <- "112 bytes", "9.22 kB", "147 MB", "2.86 GB": powers of 1000. Returns text.
static inline const char *size_text(size_t bytes, char text[SIZE_TEXT]) {
    static const char *const units[] = {"kB", "MB", "GB", "TB"};
    double amount = (double)bytes / 1e3;
    int unit = 0;
    if (bytes < 1000) {
        snprintf(text, SIZE_TEXT, "%zu byte%s", bytes, bytes == 1 ? "" : "s");
        return text;
    }
    for (; amount >= 999.5 && unit < 3; unit++) { amount /= 1e3; }
    snprintf(text, SIZE_TEXT, "%.*f %s", amount < 9.995 ? 2 : amount < 99.95 ? 1 : 0, amount, units[unit]);
    return text;
}

#endif
