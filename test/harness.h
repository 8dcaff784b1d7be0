// harness.h: what every test written in C includes: cmocka with the headers it needs, a
// comparison of numbers that a NaN fails, and ways to see what is printed and a program end.
#pragma once

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
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

// Ends a test that this machine cannot run. needs: what would bring it. test/run counts these
// lines.
static inline void leave_out(const char *needs) {
    print_message("left out: it needs %s\n", needs);
    skip();
}

// What is printed to a stream meanwhile.
typedef struct Capture {
    FILE *stream, *file; // file: what is printed goes there
    int kept;            // the stream's own descriptor
} Capture;

static inline Capture capture_begin(FILE *stream) {
    fflush(stream);
    Capture capture = {stream, tmpfile(), dup(fileno(stream))};
    assert_true(capture.file != NULL && capture.kept >= 0);
    assert_true(dup2(fileno(capture.file), fileno(stream)) >= 0);
    return capture;
}

// text (size): what was printed, as much as fits.
static inline void capture_end(Capture *capture, char *text, size_t size) {
    fflush(capture->stream);
    assert_true(dup2(capture->kept, fileno(capture->stream)) >= 0);
    close(capture->kept);
    rewind(capture->file);
    text[fread(text, 1, size - 1, capture->file)] = '\0';
    fclose(capture->file);
}

// Calls `run` in a child process. Returns the status it ends with, as waitpid does, and
// in `message` what it wrote to stderr, as much as fits.
static inline int run_in_child(void (*run)(const void *context), const void *context, char *message,
                               size_t size) {
    int pipe_ends[2];
    assert_int_equal(pipe(pipe_ends), 0);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        struct rlimit none = {0, 0};
        setrlimit(RLIMIT_CORE, &none);
        alarm(60); // in case it never ends
        dup2(pipe_ends[1], STDERR_FILENO);
        run(context);
        _exit(0);
    }
    close(pipe_ends[1]);
    size_t length = 0;
    for (ssize_t count; (count = read(pipe_ends[0], message + length, size - 1 - length)) > 0;) {
        length += (size_t)count;
    }
    message[length] = '\0';
    close(pipe_ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    return status;
}
