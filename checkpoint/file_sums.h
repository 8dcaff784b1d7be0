// file_sums.h: checksums of the files of a model, in a file beside them.
//
//   checksums.json    {"config.json": CRC-32, "model.safetensors": CRC-32, ...}
//
// The file is copied along with the directory, and programs that do not know it ignore it.
// A directory without it, as other programs make them, is not checked. A user who changes a
// file on purpose removes it.
//
// The sum of the weights was computed from what was meant to be written, so it reveals a disk
// that stores something else. Several threads read a large file: a gigabyte takes about a
// second.
#ifndef ACCO_CHECKPOINT_FILE_SUMS_H
#define ACCO_CHECKPOINT_FILE_SUMS_H

#include <jansson.h>
#include <stdlib.h>
#include <zlib.h>

#include "runtime/files.h"
#include "runtime/numbers.h"
#include "runtime/thread_pool.h"

#define FILE_SUMS_NAME "checksums.json"

enum { FILE_SUMS_BLOCK = 1 << 24, FILE_SUMS_THREADS = 8 }; // a block: bytes that a thread sums at a time

// ---------------------------------------------------------------------------------------
// The sum of one file

typedef struct FileSumBlocks {
    const unsigned char *bytes; // (size)
    size_t size;
    uLong *sums; // (blocks)
} FileSumBlocks;

static inline size_t file_sum_block_bytes(const FileSumBlocks *blocks, int block) {
    return size_min(blocks->size - (size_t)block * FILE_SUMS_BLOCK, FILE_SUMS_BLOCK);
}

static inline void file_sum_task(void *context, int task, int thread) {
    (void)thread;
    FileSumBlocks *blocks = (FileSumBlocks *)context;
    blocks->sums[task] =
        crc32_z(0, blocks->bytes + (size_t)task * FILE_SUMS_BLOCK, file_sum_block_bytes(blocks, task));
}

// The CRC-32 of a file that is not empty.
static inline bool file_sum_compute(const char *path, uint32_t *sum, Error *error) {
    FileSumBlocks blocks = {.bytes = NULL, .size = 0, .sums = NULL};
    blocks.bytes = (const unsigned char *)file_map(path, "expected a file of a model", &blocks.size, error);
    if (blocks.bytes == NULL) { return false; }
    int count = (int)((blocks.size + FILE_SUMS_BLOCK - 1) / FILE_SUMS_BLOCK);
    int threads =
        (int)size_min(size_min((size_t)count, FILE_SUMS_THREADS), (size_t)sysconf(_SC_NPROCESSORS_ONLN));
    ThreadPool *pool = thread_pool_create(threads, false);
    blocks.sums = (uLong *)malloc((size_t)count * sizeof *blocks.sums);
    bool good = (pool != NULL && blocks.sums != NULL) ||
                error_set(error, "no memory or threads for the checksum of %.400s", path);
    if (good) {
        uLong all = crc32_z(0, NULL, 0);
        thread_pool_run(pool, count, file_sum_task, &blocks);
        for (int i = 0; i < count; i++) {
            all = crc32_combine(all, blocks.sums[i], (z_off_t)file_sum_block_bytes(&blocks, i));
        }
        *sum = (uint32_t)all;
    }
    thread_pool_destroy(pool);
    free(blocks.sums);
    munmap((void *)blocks.bytes, blocks.size);
    return good;
}

// ---------------------------------------------------------------------------------------
// The sums of a directory

// Writes the sums of all files in `directory` that are not empty. The sum of the file `known`
// is `sum`.
static inline bool file_sums_write(const char *directory, const char *known, uint32_t sum, Error *error) {
    char path[PATH_MAX];
    json_t *sums = json_object();
    DIR *list = opendir(directory);
    bool good = list != NULL || error_set(error, "cannot read %.400s: %s", directory, strerror(errno));
    for (struct dirent *entry; good && (entry = readdir(list)) != NULL;) {
        struct stat status;
        uint32_t found = sum;
        good = path_within(path, directory, entry->d_name, error);
        if (!good || stat(path, &status) != 0 || !S_ISREG(status.st_mode) || status.st_size == 0) {
            continue;
        }
        good = strcmp(entry->d_name, known) == 0 || file_sum_compute(path, &found, error);
        json_object_set_new(sums, entry->d_name, json_integer((json_int_t)found));
    }
    if (list != NULL) { closedir(list); }
    good = good && path_within(path, directory, FILE_SUMS_NAME, error);
    if (good && json_dump_file(sums, path, JSON_INDENT(1) | JSON_SORT_KEYS) != 0) {
        good = error_set(error, "cannot write %.400s: %s", path, strerror(errno));
    }
    json_decref(sums);
    return good && path_sync(path, error);
}

// Whether the file `name` in `directory` has the sum `expected`. Both come from a file that may
// be damaged.
static inline bool file_sums_check_file(const char *directory, const char *name, const json_t *expected,
                                        Error *error) {
    char path[PATH_MAX];
    uint32_t found;
    bool sane = json_is_integer(expected) && name[0] != '\0' && strchr(name, '/') == NULL;
    for (const char *c = name; *c != '\0'; c++) { sane = sane && (unsigned char)*c >= 32 && *c != 127; }
    if (!sane) {
        return error_set(error, "%.300s/" FILE_SUMS_NAME " is damaged: it must give a number for each file",
                         directory);
    }
    if (!path_within(path, directory, name, error) || !file_sum_compute(path, &found, error)) {
        return false;
    }
    return json_integer_value(expected) == (json_int_t)found ||
           error_set(error,
                     "%.300s is damaged, or was changed: it is not what " FILE_SUMS_NAME
                     " beside it says; if the change is meant, remove " FILE_SUMS_NAME,
                     path);
}

// Whether the files in `directory` are those that were written. True for a directory without
// checksums.
static inline bool file_sums_check(const char *directory, Error *error) {
    char path[PATH_MAX];
    json_error_t problem;
    json_t *expected;
    const char *name;
    if (!path_within(path, directory, FILE_SUMS_NAME, error)) { return false; }
    if (access(path, F_OK) != 0) { return true; }
    json_t *sums = json_load_file(path, JSON_REJECT_DUPLICATES, &problem);
    bool good = json_is_object(sums) || error_set(error, "%.300s is damaged: %.120s", path,
                                                  sums == NULL ? problem.text : "it is no JSON object");
    json_object_foreach(sums, name, expected) {
        good = good && file_sums_check_file(directory, name, expected, error);
    }
    json_decref(sums);
    return good;
}

#endif
