// harness.h: what every test written in C includes: cmocka with the headers it needs, and a
// comparison of numbers that a NaN fails.
#ifndef ACCO_TEST_HARNESS_H
#define ACCO_TEST_HARNESS_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

// Fails unless |value - expected| <= tolerance; NaN on either side fails.
static inline void assert_close(double value, double expected, double tolerance, const char *what) {
    double difference = fabs(value - expected);
    if (!(difference <= tolerance)) {
        fail_msg("%s: %.17g, expected %.17g, difference %.3g > %.3g", what, value, expected, difference,
                 tolerance);
    }
}

#endif
