// file_sums.h: checksums of a model's files, in a file of the same directory.
//
//   checksums.json    {"config.json": CRC-32, "model.safetensors": CRC-32, ...}
//
// A directory without it is not checked; a user who changes a file on purpose removes it. The sum
// of the weights is of what was meant to be written, so it reveals a disk that stores something
// else. A gigabyte takes less than a second.
#pragma once

#include <jansson.h>
#include <zlib.h>

#include "runtime/files.h"

#define FILE_SUMS_NAME "checksums.json"

// Writes `root`, which it takes, as the file `name` in `directory`. True: it is on disk.
static inline bool json_write(json_t *root, const char *directory, const char *name, size_t flags,
                              Error *error) {
    char path[PATH_MAX];
    bool good = path_within(path, directory, name, error) &&
                (json_dump_file(root, path, flags) == 0 || error_set_file(error, "write", path)) &&
                path_sync(path, error);
    json_decref(root);
    return good;
}

// The CRC-32 of a file that is not empty.
static inline bool file_sum_compute(const char *path, uint32_t *sum, Error *error) {
    size_t size = 0;
    void *bytes = file_map(path, "expected a file of a model", &size, error);
    if (bytes == NULL) { return false; }
    *sum = (uint32_t)crc32_z(0, (const Bytef *)bytes, size);
    munmap(bytes, size);
    return true;
}

// Writes the sums of all files in `directory` that are not empty; of `known` it is `sum`.
static inline bool file_sums_write(const char *directory, const char *known, uint32_t sum, Error *error) {
    char path[PATH_MAX];
    json_t *sums = json_object();
    DIR *list = opendir(directory);
    bool good = list != NULL || error_set_file(error, "read", directory);
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
    if (good) { return json_write(sums, directory, FILE_SUMS_NAME, JSON_INDENT(1) | JSON_SORT_KEYS, error); }
    json_decref(sums);
    return false;
}

// Whether the files in `directory` are as they were written. True for a directory without
// checksums, which may be damaged themselves.
static inline bool file_sums_check(const char *directory, Error *error) {
    char list[PATH_MAX], path[PATH_MAX];
    json_error_t problem;
    json_t *expected;
    const char *name;
    if (!path_within(list, directory, FILE_SUMS_NAME, error)) { return false; }
    if (access(list, F_OK) != 0) { return true; }
    json_t *sums = json_load_file(list, JSON_REJECT_DUPLICATES, &problem);
    bool good = json_is_object(sums) || error_set(error, "%.300s is damaged: %.120s", list,
                                                  sums == NULL ? problem.text : "it is no JSON object");
    json_object_foreach(sums, name, expected) {
        uint32_t found = 0;
        bool sane = json_is_integer(expected) && name[0] != '\0' && strchr(name, '/') == NULL;
        for (const char *c = name; *c != '\0'; c++) { sane = sane && (unsigned char)*c >= 32 && *c != 127; }
        good = (sane || error_set(error, "%.300s is damaged: it must give a number for each file", list)) &&
               path_within(path, directory, name, error) && file_sum_compute(path, &found, error) &&
               (json_integer_value(expected) == (json_int_t)found ||
                error_set(error,
                          "%.300s is damaged, or was changed: it is not what " FILE_SUMS_NAME
                          " beside it says; if the change is meant, remove " FILE_SUMS_NAME,
                          path));
        if (!good) { break; }
    }
    json_decref(sums);
    return good;
}
