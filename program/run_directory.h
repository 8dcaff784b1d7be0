// run_directory.h: which directory a run writes to, what it is called, and that no other run
// writes there at the same time. Rank 0 only.
//
// `--out auto` takes the next free number below runs/. A directory that the user names must
// not hold the log of another run, unless this run continues it.
#ifndef ACCO_PROGRAM_RUN_DIRECTORY_H
#define ACCO_PROGRAM_RUN_DIRECTORY_H

#include <ctype.h>
#include <pthread.h>
#include <regex.h>
#include <signal.h>

#include "runtime/device.h"
#include "runtime/log.h"

// mkdir -p.
static inline bool run_directory_make(const char *path, Error *error) {
    char partial[RUN_PATH_SIZE];
    size_t length = strlen(path);
    assert(length < sizeof partial);
    for (size_t i = 1; i <= length; i++) {
        if (path[i] != '/' && path[i] != '\0') { continue; }
        memcpy(partial, path, i);
        partial[i] = '\0';
        if (mkdir(partial, 0777) != 0 && errno != EEXIST) {
            return error_set(error, "cannot create the directory %.400s: %s: choose another with --out",
                             partial, strerror(errno));
        }
    }
    return true;
}

// The part of --model or --from that tells models apart, as a file name: "tiny", "gpt" of
// my/gpt or my/gpt/config.json, "a" of runs/a/checkpoints/commit-7/model.
static inline void run_directory_model_name(const char *model, char name[64]) {
    // The last part but for those that say where in a run or a model a file is, and not which.
    static const char last[] = "([^/]*)(/+(config\\.json|model|checkpoints|commit-[0-9]+))*/*$";
    regmatch_t match[2] = {{0, 0}, {0, 0}};
    regex_t pattern;
    if (regcomp(&pattern, last, REG_EXTENDED) == 0) {
        regexec(&pattern, model, 2, match, 0);
        regfree(&pattern);
    }
    const char *start = model + match[1].rm_so, *end = model + match[1].rm_eo;
    if (end - start > 5 && strncmp(end - 5, ".json", 5) == 0) { end -= 5; }
    int length = 0;
    for (; start < end && length < 63; start++) {
        bool plain = isalnum((unsigned char)*start) || *start == '.' || *start == '_';
        name[length++] = plain ? *start : '-';
    }
    name[length] = '\0';
    if (length == 0 || name[0] == '.') { strcpy(name, "model"); }
}

// False: the directory holds the log of a run. resumes: it may.
static inline bool run_directory_check_log(const char *directory, bool resumes, Error *error) {
    struct stat status;
    char log_path[RUN_PATH_SIZE + 16];
    snprintf(log_path, sizeof log_path, "%s/log.jsonl", directory);
    return resumes || lstat(log_path, &status) != 0 ||
           error_set(
               error,
               "--out %.400s already holds the log of a run: choose another directory, leave out --out, or "
               "continue that run with --resume auto",
               directory);
}

// Creates the directory of a run, with all its parents, and writes its path.
//   out       --out; "auto": runs/MODEL-RULE-N with the first N that is free
//   model     options_model
//   resumes   the directory may hold the log of an earlier part of this run
// Errors: another run's log.jsonl is there, or the directory cannot be made or written.
static inline bool run_directory_create(const char *out, const char *model, const char *rule, bool resumes,
                                        char path[RUN_PATH_SIZE], Error *error) {
    char name[64];
    run_directory_model_name(model, name);
    bool numbered = strcmp(out, "auto") == 0;
    if (numbered && !run_directory_make("runs", error)) { return false; }
    for (int number = 1; numbered; number++) {
        snprintf(path, RUN_PATH_SIZE, "runs/%s-%.64s-%d", name, rule, number);
        // mkdir decides which number is free: two runs started at once get two numbers.
        if (mkdir(path, 0777) == 0) { return true; }
        if (errno != EEXIST) { return run_directory_make(path, error); }
    }
    if (strlen(out) + 64 > RUN_PATH_SIZE) {
        return error_set(error, "--out is longer than %d characters", RUN_PATH_SIZE - 65);
    }
    strcpy(path, out);
    struct stat status;
    if (stat(path, &status) == 0 && !S_ISDIR(status.st_mode)) {
        return error_set(error, "--out %.400s is not a directory", path);
    }
    if (!run_directory_check_log(path, resumes, error) || !run_directory_make(path, error)) { return false; }
    if (faccessat(AT_FDCWD, path, W_OK | X_OK, AT_EACCESS) != 0) {
        return error_set(error, "cannot write to the directory %.400s: %s: choose another with --out", path,
                         strerror(errno));
    }
    return true;
}

// ---------------------------------------------------------------------------------------
// The lock
//
// OUT/lock holds the host and the process id of rank 0, which touches the file every
// RUN_LOCK_BEAT seconds. A run that finds the file takes it over at once if that process ran on
// this host and is gone. Otherwise it watches the file for a while: the owner is on another
// host, or its number now belongs to another process. A file that nobody touches was left by
// a run that was killed, or whose machine was lost.
//
// Locks of the system (flock, fcntl) would end with their process. But several file systems
// of clusters offer none, or only one that other hosts do not see, and NFS keeps the lock of
// a machine that has died.

#define RUN_LOCK_BEAT 2.0      // seconds between two touches
#define RUN_LOCK_PATIENCE 15.0 // seconds without a touch after which the owner is dead
#define RUN_LOCK_LOOK 0.1      // seconds between two looks at the lock of another run

enum { RUN_LOCK_TEXT = 128 };

// Must live as long as the process: its thread reads it until the end.
typedef struct RunLock {
    char path[RUN_PATH_SIZE + 16]; // OUT/lock; empty: nothing is locked
    char text[RUN_LOCK_TEXT];      // what this run wrote into it; empty: the disk was full
    bool released;                 // atomic
} RunLock;

// What the file says, and when it was last touched, in nanoseconds; -1: it is not there.
static inline int64_t run_lock_read(const char *path, char text[RUN_LOCK_TEXT]) {
    struct stat status;
    int descriptor = open(path, O_RDONLY | O_CLOEXEC); // anew: NFS shows the present state only then
    ssize_t length = descriptor >= 0 ? read(descriptor, text, RUN_LOCK_TEXT - 1) : 0;
    bool there = descriptor >= 0 && fstat(descriptor, &status) == 0;
    text[length > 0 ? length : 0] = '\0';
    if (descriptor >= 0) { close(descriptor); }
    return there ? (int64_t)status.st_mtim.tv_sec * 1000000000 + status.st_mtim.tv_nsec : -1;
}

// Whether the owner of the file is alive; then the error names it.
static inline bool run_lock_is_held(const char *directory, const char *path, const char *host,
                                    double patience, Error *error) {
    char text[RUN_LOCK_TEXT], present[RUN_LOCK_TEXT], owner[65] = "";
    int64_t touched = run_lock_read(path, text);
    int pid = 0;
    if (touched < 0) { return false; }
    bool named = sscanf(text, "%64s %d", owner, &pid) == 2 && pid > 0;
    bool here = named && strcmp(owner, host) == 0;
    if (here && kill(pid, 0) != 0 && errno == ESRCH) { return false; }
    if (!here) {
        fprintf(stderr, "train_gpt: --out %.400s has the lock of a run on %s: watching it for %.0f s\n",
                directory, named ? owner : "an unknown host", patience);
    }
    for (double until = clock_seconds() + patience; clock_seconds() < until; sleep_seconds(RUN_LOCK_LOOK)) {
        int64_t latest = run_lock_read(path, present);
        if (latest < 0) { return false; }
        if (latest == touched && strcmp(text, present) == 0) { continue; }
        error_set(error,
                  "--out %.300s is in use by another run: process %d on %s. Wait for it, stop it, or choose "
                  "another --out",
                  directory, pid, named ? owner : "an unknown host");
        return true;
    }
    return false;
}

static inline bool run_lock_is_ours(const RunLock *lock) {
    char text[RUN_LOCK_TEXT];
    return run_lock_read(lock->path, text) < 0 || strcmp(text, lock->text) == 0;
}

// A run that was stopped for a while may find that another one took it for dead.
static inline void *run_lock_beat(void *argument) {
    RunLock *lock = (RunLock *)argument;
    while (!__atomic_load_n(&lock->released, __ATOMIC_ACQUIRE)) {
        if (!run_lock_is_ours(lock)) {
            failure_report(
                "the lock of --out is now another run's, which took this one for dead: two runs must "
                "not write into one directory");
        }
        utimensat(AT_FDCWD, lock->path, NULL, 0);
        sleep_seconds(RUN_LOCK_BEAT);
    }
    return NULL;
}

// Takes the directory for this process. patience: seconds for which a lock is watched.
// False: another run holds it. If no file can be made, nothing is locked.
static inline bool run_lock_take(RunLock *lock, const char *directory, const char *host, double patience,
                                 Error *error) {
    char text[RUN_LOCK_TEXT], *mine = lock->text;
    bool taken_over = false;
    int descriptor;
    pthread_t thread;
    snprintf(lock->path, sizeof lock->path, "%.*s/lock", RUN_PATH_SIZE - 1, directory);
    while ((descriptor = open(lock->path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666)) < 0) {
        bool exists = errno == EEXIST;
        bool held = exists && run_lock_is_held(directory, lock->path, host, patience, error);
        taken_over = exists && !held && (unlink(lock->path) == 0 || errno == ENOENT);
        if (taken_over) { continue; }
        lock->path[0] = '\0';
        return !held;
    }
    snprintf(mine, RUN_LOCK_TEXT, "%.64s %d\n", host, (int)getpid());
    bool written = write(descriptor, mine, strlen(mine)) >= 0;
    if (!written) { mine[0] = '\0'; } // a full disk: an empty file is a lock, too
    close(descriptor);
    // Of two runs that find the same owner dead, the slower one removes the lock of the other.
    if (taken_over) { sleep_seconds(2 * RUN_LOCK_LOOK); }
    if (taken_over && (run_lock_read(lock->path, text) < 0 || strcmp(text, mine) != 0)) {
        lock->path[0] = '\0';
        return error_set(error, "--out %.300s was taken by another run at the same moment: %.100s", directory,
                         text);
    }
    // Without a thread the lock holds for as long as others watch it.
    if (pthread_create(&thread, NULL, run_lock_beat, lock) == 0) { pthread_detach(thread); }
    return true;
}

static inline void run_lock_release(RunLock *lock) {
    if (lock->path[0] == '\0' || __atomic_exchange_n(&lock->released, true, __ATOMIC_ACQ_REL)) { return; }
    if (run_lock_is_ours(lock)) { unlink(lock->path); }
}

#endif
