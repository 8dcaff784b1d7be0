// files.h: mapping, writing, bringing to disk, publishing and removing files.
//
// What is reported as written survives a power failure: fsync of a file brings its bytes to disk,
// fsync of its directory its name. So a directory that must be whole or absent is written and
// synced under a temporary name; directory_publish syncs it, renames it, which is atomic, and syncs
// the parent.
#pragma once

#include <assert.h>
#include <dirent.h>
#include <limits.h>
#include <setjmp.h>
#include <stddef.h>

#include "runtime/errors.h"

// Opens standard input, output or errors where they are missing: a file could get such a number.
static inline void files_open_standard(void) {
    int file = open("/dev/null", O_RDWR);
    while (file >= 0 && file <= STDERR_FILENO) { file = open("/dev/null", O_RDWR); }
    close(file);
}

// ---- Reading --------------------------------------------------------------------------

static inline bool path_within(char path[PATH_MAX], const char *directory, const char *name, Error *error) {
    return snprintf(path, PATH_MAX, "%s/%s", directory, name) < PATH_MAX ||
           error_set(error, "the path of %.80s in %.200s... is too long", name, directory);
}

// Where a thread continues if the mapped file that it reads becomes shorter. A signal handler
// is given nothing of its caller's, so this is the one variable that stands in no struct.
static __thread sigjmp_buf *volatile file_rescue;

// SIGBUS: a page that was read lies behind the end of its file.
static inline void file_bus_error(int number) {
    static const char text[] =
        "train_gpt: a file has become shorter while it was read, or its disk has failed\n";
    (void)number;
    if (file_rescue != NULL) { siglongjmp(*file_rescue, 1); }
    ssize_t written = write(STDERR_FILENO, text, sizeof text - 1);
    (void)written;
    _exit(EXIT_SYSTEM_FAILURE);
}

// Calls read(context), which reads a mapped file and owns nothing. False: the file has become
// shorter, and read did not reach its end.
static inline bool file_read_mapped(void (*read_file)(void *context), void *context) {
    sigjmp_buf here;
    if (sigsetjmp(here, 1) != 0) {
        file_rescue = NULL;
        return false;
    }
    file_rescue = &here;
    read_file(context);
    file_rescue = NULL;
    return true;
}

// Maps a regular file that is not empty, for munmap(result, *size); NULL: an error. expected: what
// it should be. If it becomes shorter, reading behind its end ends the process with exit code 3,
// unless inside of file_read_mapped.
static inline void *file_map(const char *path, const char *expected, size_t *size, Error *error) {
    static const char pointer[] = "version https://git-lfs"; // a file's pointer begins so
    struct stat status;
    void *mapping = MAP_FAILED;
    struct sigaction action = {0};
    action.sa_handler = file_bus_error;
    action.sa_flags = SA_NODEFER;
    sigaction(SIGBUS, &action, NULL);
    // O_NONBLOCK: opening a pipe must not wait for its writer, because it is refused below.
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0 || fstat(descriptor, &status) != 0) {
        error_set_file(error, "read", path);
    } else if (!S_ISREG(status.st_mode)) {
        error_set(error, "%.400s is not a regular file (but a directory, a pipe or a device): %s", path,
                  expected);
    } else if (status.st_size == 0) {
        error_set(error, "%.400s is empty: %s", path, expected);
    } else {
        *size = (size_t)status.st_size;
        mapping = mmap(NULL, *size, PROT_READ, MAP_PRIVATE, descriptor, 0);
        if (mapping == MAP_FAILED) {
            error_set_file(error, "map", path);
        } else if (*size >= sizeof pointer && memcmp(mapping, pointer, sizeof pointer - 1) == 0) {
            error_set(error,
                      "%.400s is only the pointer that Git LFS leaves in place of a file: run git lfs pull",
                      path);
            munmap(mapping, *size);
            mapping = MAP_FAILED;
        }
    }
    if (descriptor >= 0) { close(descriptor); }
    return mapping == MAP_FAILED ? NULL : mapping;
}

// ---- Writing --------------------------------------------------------------------------

enum { FILE_POSITION = -1 }; // as an offset: the descriptor's position, or the end for O_APPEND

// False: errno says why, and a part of the bytes may have been written.
static inline bool file_write_all(int descriptor, const void *bytes, size_t count, off_t offset) {
    for (size_t done = 0; done < count;) {
        const char *rest = (const char *)bytes + done;
        ssize_t written = offset == FILE_POSITION
                              ? write(descriptor, rest, count - done)
                              : pwrite(descriptor, rest, count - done, offset + (off_t)done);
        if (written < 0 && errno == EINTR) { continue; }
        if (written == 0) { errno = EIO; }
        if (written <= 0) { return false; }
        done += (size_t)written;
    }
    return true;
}

// Syncs and closes a file after its last write. written: whether all writes succeeded; if
// not, errno still says why. Returns true when its bytes are on disk.
static inline bool file_finish(int descriptor, const char *path, bool written, Error *error) {
    int reason = written && fsync(descriptor) == 0 ? 0 : errno;
    if (close(descriptor) != 0 && reason == 0) { reason = errno; }
    return reason == 0 || error_set(error, "cannot write %.400s: %s", path, strerror(reason));
}

// Brings a closed file's bytes, or the names in a directory, to disk.
static inline bool path_sync(const char *path, Error *error) {
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    bool good = (descriptor >= 0 && fsync(descriptor) == 0) ||
                error_set(error, "cannot bring %.400s to disk: %s", path, strerror(errno));
    if (descriptor >= 0) { close(descriptor); }
    return good;
}

// Brings the name of a file or directory to disk.
static inline bool name_sync(const char *path, Error *error) {
    char parent[PATH_MAX];
    snprintf(parent, sizeof parent, "%s", path);
    char *slash = strrchr(parent, '/');
    if (slash != NULL) { slash[slash == parent] = '\0'; } // "/name" is in "/"
    return path_sync(slash != NULL ? parent : ".", error);
}

static inline void file_replacement_path(char temporary[PATH_MAX], const char *path) {
    snprintf(temporary, PATH_MAX, "%.*s.new", PATH_MAX - 5, path);
}

// Begins a file that replaces `path` once it is whole: file_replace_end gives it that name, or
// on failure removes it and leaves `path` as it was. NULL: an error.
static inline FILE *file_replace_begin(const char *path, Error *error) {
    char temporary[PATH_MAX];
    file_replacement_path(temporary, path);
    FILE *file = fopen(temporary, "w");
    if (file == NULL) { error_set_file(error, "create", path); }
    return file;
}

// written: all writes succeeded; if not, errno says why. True: file and name are on disk.
static inline bool file_replace_end(FILE *file, const char *path, bool written, Error *error) {
    char temporary[PATH_MAX];
    file_replacement_path(temporary, path);
    bool good = written && fflush(file) == 0 && !ferror(file) && fsync(fileno(file)) == 0;
    int reason = good ? 0 : errno;
    good = fclose(file) == 0 && good;
    if (good && rename(temporary, path) == 0) { return name_sync(path, error); }
    if (reason == 0) { reason = errno; }
    unlink(temporary);
    return error_set(error, "cannot write %.400s: %s", path, strerror(reason));
}

// ---- Directories ----------------------------------------------------------------------

// mkdir -p. hint: stands at the end of the error.
static inline bool directory_make(const char *path, const char *hint, Error *error) {
    char partial[PATH_MAX];
    size_t length = strlen(path);
    assert(length < sizeof partial);
    for (size_t i = 1; i <= length; i++) {
        if (path[i] != '/' && path[i] != '\0') { continue; }
        memcpy(partial, path, i);
        partial[i] = '\0';
        if (mkdir(partial, 0777) != 0 && errno != EEXIST) {
            return error_set(error, "cannot create the directory %.400s: %s%s", partial, strerror(errno),
                             hint);
        }
    }
    return true;
}

// Removes a file, or a directory with everything in it. What cannot be removed stays.
static inline void tree_remove(const char *path) {
    if (unlink(path) == 0) { return; } // a file, or a link, whose target stays
    DIR *directory = opendir(path);
    for (struct dirent *entry; directory != NULL && (entry = readdir(directory)) != NULL;) {
        char inner[PATH_MAX];
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) { continue; }
        if (snprintf(inner, sizeof inner, "%s/%s", path, entry->d_name) < (int)sizeof inner) {
            tree_remove(inner);
        }
    }
    if (directory != NULL) { closedir(directory); }
    rmdir(path);
}

// Whether a directory has an entry whose name begins so.
static inline bool directory_has(const char *path, const char *begins) {
    DIR *directory = opendir(path);
    bool found = false;
    for (struct dirent *entry; !found && directory != NULL && (entry = readdir(directory)) != NULL;) {
        found = strncmp(entry->d_name, begins, strlen(begins)) == 0;
    }
    if (directory != NULL) { closedir(directory); }
    return found;
}

// Gives a finished directory, whose files are all synced, its final name, in place of what has it
// already. Returns true when the new name is on disk.
static inline bool directory_publish(const char *temporary, const char *final, Error *error) {
    if (!path_sync(temporary, error)) { return false; }
    // No moment is without either directory. It fails where there is nothing to replace,
    // which is usual, and on file systems that cannot exchange names.
    bool exchanged = names_exchange(temporary, final);
    if (!exchanged) { tree_remove(final); }
    if (!exchanged && rename(temporary, final) != 0) {
        return error_set(error, "cannot rename %.400s to %.400s: %s", temporary, final, strerror(errno));
    }
    bool good = name_sync(final, error);
    if (good && exchanged) { tree_remove(temporary); } // the new name is on disk
    return good;
}
