// fuzz.h: what all fuzz targets share.
//
// A target is a function fuzz_NAME(data, size) in fuzz_NAME.h. It gives the bytes to one
// parser and checks the properties that the parser promises. What it accepts can be read
// to the last byte and is consistent; what it refuses, it refuses with a message of one
// line. Where a property is violated the target ends the process, as sanitizers do. It
// returns whether the input was accepted, and keeps no state from one input to the next.
//
// Seeds are in corpus/NAME. A seed good-* must be accepted and a seed bad-* refused, so
// that seeds do not go stale when a format changes.
//
// Two programs call targets: libFuzzer (entry.c, make fuzz), which searches for new
// inputs, and test_fuzz.c (make test), which runs the seeds and damaged copies of them.
//
// A parser that wants a file gets one in memory, without a name (FuzzFile). One that
// wants several files gets a directory (FuzzFolder) in TMPDIR, or else in memory.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "runtime/errors.h"

typedef bool (*FuzzTarget)(const uint8_t *data, size_t size);

// Ends the process unless the property holds.
static inline void fuzz_require(bool holds, const char *property) {
    if (holds) { return; }
    fprintf(stderr, "a property is violated: %s\n", property);
    abort();
}

// Returns `accepted`, what a parser has returned. A refusal must have a message of one
// line.
static inline bool fuzz_accepted(bool accepted, const Error *error) {
    if (accepted) { return true; }
    size_t length = strnlen(error->text, sizeof error->text);
    fuzz_require(length > 0 && length < sizeof error->text, "a refusal has a message");
    for (size_t i = 0; i < length; i++) {
        fuzz_require((uint8_t)error->text[i] >= 32 && error->text[i] != 127,
                     "the message of a refusal is one line");
    }
    return false;
}

// Reads every byte, so that the sanitizer sees where that is not allowed.
static inline void fuzz_touch(const void *bytes, size_t size) {
    uint8_t sum = 0;
    for (size_t i = 0; i < size; i++) { sum = (uint8_t)(sum + ((const uint8_t *)bytes)[i]); }
    __asm__ volatile("" : : "r"(sum)); // keeps the compiler from removing the loop
}

// ---- Parts of an input ----------------------------------------------------------------

typedef struct FuzzPart {
    const uint8_t *bytes;
    size_t size;
} FuzzPart;

// Where the first line of five dashes begins; `size`: there is none.
static inline size_t fuzz_find_cut(const uint8_t *data, size_t size) {
    for (size_t i = 0; i + 7 <= size; i++) {
        if (memcmp(data + i, "\n-----\n", 7) == 0) { return i; }
    }
    return size;
}

// Cuts an input into `count` parts, which are separated by lines of five dashes. Parts
// that it does not have are empty.
static inline void fuzz_split(const uint8_t *data, size_t size, FuzzPart *parts, int count) {
    for (int i = 0; i < count; i++) {
        size_t cut = i + 1 < count ? fuzz_find_cut(data, size) : size, next = cut < size ? cut + 7 : size;
        FuzzPart part = {data, cut};
        parts[i] = part;
        data += next;
        size -= next;
    }
}

// A copy of exactly its size, so that the sanitizer sees accesses past its end. Free with
// free.
static inline uint8_t *fuzz_copy(FuzzPart part) {
    uint8_t *copy = (uint8_t *)malloc(part.size + (part.size == 0));
    fuzz_require(copy != NULL, "there is memory for a copy of the input");
    if (part.size > 0) { memcpy(copy, part.bytes, part.size); }
    return copy;
}

// A copy that ends with a zero byte, for parsers of texts. Free with free.
static inline char *fuzz_copy_text(FuzzPart part) {
    char *copy = (char *)malloc(part.size + 1);
    fuzz_require(copy != NULL, "there is memory for a copy of the input");
    if (part.size > 0) { memcpy(copy, part.bytes, part.size); }
    copy[part.size] = '\0';
    return copy;
}

// ---- Files for parsers ----------------------------------------------------------------

static inline void fuzz_write(int descriptor, FuzzPart part) {
    bool written = descriptor >= 0 && write(descriptor, part.bytes, part.size) == (ssize_t)part.size;
    fuzz_require(written, "the fuzzer can write its own files");
}

typedef struct FuzzFile {
    int descriptor;
    char path[32];
} FuzzFile;

// A file in memory. It uses the system call because the wrapper needs _GNU_SOURCE before
// the first system header.
static inline void fuzz_file_open(FuzzFile *file, FuzzPart part) {
    file->descriptor = (int)syscall(SYS_memfd_create, "fuzz", 0u);
    fuzz_write(file->descriptor, part);
    snprintf(file->path, sizeof file->path, "/proc/self/fd/%d", file->descriptor);
}

static inline void fuzz_file_close(FuzzFile *file) { close(file->descriptor); }

typedef struct FuzzFolder {
    char path[512];
} FuzzFolder;

static inline void fuzz_folder_open(FuzzFolder *folder) {
    const char *parent = getenv("TMPDIR"), *memory = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    snprintf(folder->path, sizeof folder->path, "%.400s/fuzz.XXXXXX", parent != NULL ? parent : memory);
    fuzz_require(mkdtemp(folder->path) != NULL, "TMPDIR names a directory to write in");
}

static inline void fuzz_folder_add(const FuzzFolder *folder, const char *name, FuzzPart part) {
    char path[600];
    snprintf(path, sizeof path, "%s/%s", folder->path, name);
    int descriptor = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    fuzz_write(descriptor, part);
    close(descriptor);
}

static inline void fuzz_folder_close(const FuzzFolder *folder) {
    DIR *directory = opendir(folder->path);
    for (struct dirent *entry; directory != NULL && (entry = readdir(directory)) != NULL;) {
        char path[800];
        snprintf(path, sizeof path, "%s/%s", folder->path, entry->d_name);
        unlink(path);
    }
    if (directory != NULL) { closedir(directory); }
    rmdir(folder->path);
}
