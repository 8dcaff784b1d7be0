// numbers.h: the smaller and the larger of two numbers; the median; numbers for people.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static inline size_t size_min(size_t a, size_t b) { return a < b ? a : b; }
static inline size_t size_max(size_t a, size_t b) { return a > b ? a : b; }
static inline int int_min(int a, int b) { return a < b ? a : b; }
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

// The ending of a noun behind a count.
static inline const char *plural(int64_t count) { return count == 1 ? "" : "s"; }

enum { NUMBER_TEXT_SIZE = 32, SIZE_TEXT = NUMBER_TEXT_SIZE + 8 }; // for people

// 999, 12.3k, 1.50M, 2.00G: the unit is chosen after rounding (999950 is 1.00M).
static inline const char *human_count(double value, char text[NUMBER_TEXT_SIZE]) {
    static const char *const units[] = {"", "k", "M", "G", "T", "P"};
    if (!isfinite(value)) { return strcpy(text, "-"); }
    int unit = 0;
    double scaled = value;
    while (fabs(scaled) >= 999.5 && unit < 5) {
        scaled /= 1000;
        unit++;
    }
    double size = fabs(scaled);
    int decimals = unit == 0 ? 0 : size < 9.995 ? 2 : size < 99.95 ? 1 : 0;
    snprintf(text, NUMBER_TEXT_SIZE, "%.*f%s", decimals, scaled, units[unit]);
    return text;
}

// The same of bytes: "112 bytes", "9.22 kB", "147 MB", "2.86 GB".
static inline const char *size_text(size_t bytes, char text[SIZE_TEXT]) {
    char count[NUMBER_TEXT_SIZE];
    int digits = (int)strlen(human_count((double)bytes, count)) - 1;
    if (bytes < 1000) {
        snprintf(text, SIZE_TEXT, "%s byte%s", count, plural(bytes));
    } else {
        snprintf(text, SIZE_TEXT, "%.*s %cB", digits, count, count[digits]);
    }
    return text;
}
