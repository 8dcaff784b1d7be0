// errors.h: the three kinds of failure, and what each of them looks like.
//
//   the user's mistake     the Error travels up to main, which prints one line and exits
//                          with 2, before anything is allocated
//   the system's failure   one line with rank, host, commit, operation and a hint; then all
//                          ranks end with exit code 3. So does a lack of memory
//   our bug                assert
//
// Functions that read what the user gave us return bool and fill an Error. They never
// print or exit, so that tests can make them fail. Exit codes are named only here.
#pragma once

#include <stdarg.h>

#include "runtime/system.h"

enum {
    EXIT_USER_MISTAKE = 2,
    EXIT_SYSTEM_FAILURE = 3,
    EXIT_STOPPED_UNSAVED = 4, // asked to stop, and --save-every never: there is no checkpoint
    EXIT_ASKED_TO_STOP = 75   // EX_TEMPFAIL of sysexits.h: try again later
};

#define PRINTF_LIKE(format_index, first_argument) \
    __attribute__((format(printf, format_index, first_argument)))

// One sentence without a newline: what was wrong, and what is allowed. Empty: no error.
typedef struct Error {
    char text[1024];
} Error;

// Whether something holds, and what is said of that: rows of a table.
typedef struct Condition {
    bool holds;
    const char *text;
} Condition;

// Fills `error`, cut at its size. False, so that callers can `return error_set(...)`.
PRINTF_LIKE(2, 3) static inline bool error_set(Error *error, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    for (char *c = error->text; *c != '\0'; c++) { // a file name with a newline must not make two lines
        if ((unsigned char)*c < 32 || *c == 127) { *c = '?'; }
    }
    return false;
}

// The same for a file: what it cannot be, and errno.
static inline bool error_set_file(Error *error, const char *verb, const char *path) {
    return error_set(error, "cannot %s %.400s: %s", verb, path, strerror(errno));
}

// Appends to a list in words: the separator stands between what it has and what comes, cut at
// `size`.
PRINTF_LIKE(4, 5)
static inline void text_join(char *text, size_t size, const char *separator, const char *format, ...) {
    size_t length = strlen(text);
    va_list arguments;
    va_start(arguments, format);
    if (length > 0) { snprintf(text + length, size - length, "%s", separator); }
    length = strlen(text);
    vsnprintf(text + length, size - length, format, arguments);
    va_end(arguments);
}

static inline bool error_is_set(const Error *error) { return error->text[0] != '\0'; }

// Does not return. The text goes to the thread that waits for signals (program/signals.h), which
// adds rank and commit and ends all ranks; where no thread does, only this process ends.
static inline void failure_report(const char *text) {
    enum { PATIENCE = 10 }; // seconds; ending all ranks takes less than one
    sigset_t blocked;
    bool watched =
        pthread_sigmask(SIG_BLOCK, NULL, &blocked) == 0 && sigismember(&blocked, FAILURE_SIGNAL) == 1;
    if (watched && failure_send(text)) { sleep(PATIENCE); }
    fprintf(stderr, "train_gpt: %s\n", text);
    fflush(stderr);
    _exit(EXIT_SYSTEM_FAILURE);
}

// Memory for `count` elements of `size` bytes, zeroed, for the caller to free. Where the system
// has none, the process ends, and with it a run: no caller knows anything better.
static inline void *memory_take(size_t count, size_t size) {
    void *memory = calloc(count > 0 ? count : 1, size);
    if (memory == NULL) { failure_report("the system has no memory left"); }
    return memory;
}

// The same for `count` elements of a type.
#define MEMORY_OF(type, count) ((type *)memory_take((size_t)(count), sizeof(type)))

// The same for `memory` (or NULL) that grows to `bytes`; what is new in it is not zeroed.
static inline void *memory_grow(void *memory, size_t bytes) {
    void *larger = realloc(memory, bytes);
    if (larger == NULL) { failure_report("the system has no memory left"); }
    return larger;
}
