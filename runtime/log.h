// log.h: a file that only grows, one whole line at a time, and JSON objects as its lines.
//
// Every line is one write() to a file opened for appending, so a program that dies leaves only
// whole lines. A write that fails half way is undone, and the caller gets an Error. But a full disk
// may have space again in a minute: a patient log keeps the lines in memory, and the next write
// begins with them. Events that are lost all the same leave {"event":"gap","lines":N} before the
// next one.
//
// JSON has no NaN: it becomes null. Text that is not UTF-8 (a small model samples arbitrary bytes)
// is repaired. Not thread safe: one thread of one rank owns a Log.
#pragma once

#include <jansson.h>
#include <math.h>

#include "runtime/files.h"
#include "runtime/utf8.h"

enum {
    RUN_PATH_SIZE = 1280, // a directory and a file in it, longer than any option's text
    LOG_JSON_DIGITS = 12, // 0.1 stays 0.1 in the file; losses are float32 and need 9
    LOG_WAITING_BYTES = 1 << 24
};

typedef struct Log {
    int descriptor;  // -1: not open
    int64_t missing; // events in a row that could not be written
    char path[RUN_PATH_SIZE + 16];
    bool patient;         // lines wait while the disk is full
    char *waiting;        // whole lines that are not in the file yet
    size_t waiting_bytes; // at most LOG_WAITING_BYTES
} Log;

// Opens DIRECTORY/NAME for appending, and creates it where there is none.
static inline bool log_open(Log *log, const char *directory, const char *name, Error *error) {
    memset(log, 0, sizeof *log);
    snprintf(log->path, sizeof log->path, "%.*s/%s", RUN_PATH_SIZE - 1, directory, name);
    log->descriptor = open(log->path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    return log->descriptor >= 0 ||
           error_set(error, "cannot open %.400s for writing: %s", log->path, strerror(errno));
}

// Writes the lines that wait and `length` bytes more, normally in one write(). On failure
// nothing of them stays in the file.
static inline bool log_append(Log *log, const char *text, size_t length, Error *error) {
    size_t total = log->waiting_bytes + length;
    char *all = (char *)memory_grow(log->waiting, total + 1);
    struct stat status;
    memcpy(all + log->waiting_bytes, text, length);
    log->waiting = all;
    bool regular = fstat(log->descriptor, &status) == 0 && S_ISREG(status.st_mode);
    bool written = file_write_all(log->descriptor, all, total, FILE_POSITION);
    int reason = errno;
    if (!written && regular && ftruncate(log->descriptor, status.st_size) != 0) { reason = errno; }
    bool waits = !written && (reason == ENOSPC || reason == EDQUOT) && log->patient &&
                 length <= LOG_WAITING_BYTES - log->waiting_bytes;
    if (!written && !waits) { error_set(error, "cannot write %.400s: %s", log->path, strerror(reason)); }
    log->waiting_bytes = written ? 0 : waits ? total : log->waiting_bytes;
    return written || waits;
}

// Ends the last line, if a crash of the machine has cut it off: the next one must not be lost, too.
static inline bool log_end_line(Log *log, Error *error) {
    char last = '\n';
    struct stat status;
    int file = open(log->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // opening a pipe must not wait
    bool cut = file >= 0 && fstat(file, &status) == 0 && S_ISREG(status.st_mode) &&
               pread(file, &last, 1, status.st_size - 1) == 1 && last != '\n';
    if (file >= 0) { close(file); }
    return !cut || log_append(log, "\n", 1, error);
}

// Lines that wait are lost.
static inline void log_close(Log *log) {
    if (log->descriptor >= 0) { close(log->descriptor); }
    free(log->waiting);
    log->waiting = NULL;
    log->waiting_bytes = 0;
    log->descriptor = -1;
}

// A JSON number, or null where the value is NaN or infinite.
static inline json_t *log_real(double value) { return isfinite(value) ? json_real(value) : json_null(); }

// A JSON string of zero-terminated bytes: those that are not part of UTF-8 become '?'.
static inline json_t *log_text(const char *text) {
    char *clean = strdup(text);
    size_t count = strlen(clean), length = 1;
    for (size_t i = 0; i < count; i += length) {
        if (utf8_scan((const uint8_t *)clean + i, count - i, &length) == UTF8_VALID) { continue; }
        clean[i] = '?';
        length = 1;
    }
    json_t *string = json_string(clean);
    free(clean);
    return string;
}

// Appends one JSON object, which must have the key "event", as one line. Releases the
// object, also on failure. Build its reals with log_real and foreign text with log_text.
static inline bool log_event(Log *log, json_t *event, Error *error) {
    assert(event != NULL && json_object_get(event, "event") != NULL);
    char *text = json_dumps(event, JSON_COMPACT | JSON_REAL_PRECISION(LOG_JSON_DIGITS)), gap[64] = "";
    json_decref(event);
    if (log->missing > 0) {
        snprintf(gap, sizeof gap, "{\"event\":\"gap\",\"lines\":%lld}\n", (long long)log->missing);
    }
    size_t length = strlen(gap) + strlen(text) + 1;
    char *line = (char *)memory_take(length + 1, 1);
    snprintf(line, length + 1, "%s%s\n", gap, text);
    bool written = log_append(log, line, length, error);
    log->missing = written ? 0 : log->missing + 1;
    free(text);
    free(line);
    return written;
}
