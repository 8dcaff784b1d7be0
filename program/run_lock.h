// run_lock.h: no two runs write into one directory at the same time.
//
// Rank 0 makes the file OUT/lock, which says who has the directory, and touches it every
// RUN_LOCK_BEAT seconds. Whoever finds such a file looks whether its owner is alive. On the
// same machine it asks the kernel for the process, and knows at once. From elsewhere it
// watches the file for RUN_LOCK_PATIENCE seconds: one that nobody touches belongs to a run
// that has ended, and is replaced. So a lock outlives a crash, a kill -9 or the loss of a
// machine by seconds at most, and `--resume auto` goes on.
//
// Why not a lock of the system (flock, fcntl)? It would end with its process, which is
// better on one machine. But several file systems of clusters offer none, or only one
// that other hosts do not see, and say nothing; and NFS keeps the lock of a machine that
// has died. A file that is made exclusively and touched works the same everywhere: it
// needs no clock that hosts share, no free space, and of NFS only that opening a file
// shows its present state.
//
// An owner that slept for longer than the others' patience may find the file replaced. It
// then fails its job at the next beat, before it harms the run that went on without it.
//
//   run_lock_take      takes the directory, or says who has it
//   run_lock_keep      starts the thread that touches the file
//   run_lock_release   at the end of a run
#ifndef ACCO_PROGRAM_RUN_LOCK_H
#define ACCO_PROGRAM_RUN_LOCK_H

#include <pthread.h>
#include <pwd.h>
#include <time.h>

#include "comm/transport.h"
#include "runtime/log.h"

#define RUN_LOCK_BEAT 2.0      // seconds between two touches
#define RUN_LOCK_PATIENCE 15.0 // seconds without a touch after which an owner elsewhere is dead

enum { RUN_LOCK_TEXT = 1024 };

// Must live as long as the process: the thread reads it until the end.
typedef struct RunLock {
    Transport *transport;          // whose job fails when the lock is lost
    char path[RUN_PATH_SIZE + 16]; // OUT/lock; empty: nothing is locked
    char text[RUN_LOCK_TEXT];      // what is in it
    bool released;                 // atomic
} RunLock;

// What a process can be recognised by: the boot of its machine, the name space of its
// process id, and when it started.
typedef struct ProcessName {
    char boot[64], space[64], started[32];
} ProcessName;

// The first line of a small file of the kernel; empty where there is none.
static inline void run_lock_read_line(const char *path, char *line, size_t size) {
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = descriptor >= 0 ? read(descriptor, line, size - 1) : 0;
    if (descriptor >= 0) { close(descriptor); }
    line[length > 0 ? length : 0] = '\0';
    line[strcspn(line, "\n")] = '\0';
}

// started is empty where there is no such process, or only what is left of one that has
// ended.
static inline ProcessName run_lock_process(int pid) {
    ProcessName name;
    char path[64], line[1024];
    memset(&name, 0, sizeof name);
    run_lock_read_line("/proc/sys/kernel/random/boot_id", name.boot, sizeof name.boot);
    ssize_t length = readlink("/proc/self/ns/pid", name.space, sizeof name.space - 1);
    name.space[length > 0 ? length : 0] = '\0';
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    run_lock_read_line(path, line, sizeof line);
    const char *field = strrchr(line, ')'); // the name before it may hold anything
    if (field == NULL || field[1] == '\0' || field[2] == 'Z' || field[2] == 'X') { return name; }
    for (int i = 2; i < 22 && field != NULL; i++) { field = strchr(field + 1, ' '); }
    if (field != NULL) {
        snprintf(name.started, sizeof name.started, "%.*s", (int)strcspn(field + 1, " "), field + 1);
    }
    return name;
}

static inline void run_lock_write_text(const char *host, char text[RUN_LOCK_TEXT]) {
    ProcessName me = run_lock_process((int)getpid());
    const struct passwd *user = getpwuid(geteuid());
    char since[64];
    time_t now = time(NULL);
    struct tm parts;
    strftime(since, sizeof since, "%Y-%m-%d %H:%M:%S UTC", gmtime_r(&now, &parts));
    json_t *object = json_pack("{s:o, s:i, s:o, s:s, s:s, s:s, s:s}", "host", log_text(host), "pid",
                               (int)getpid(), "user", log_text(user != NULL ? user->pw_name : "unknown"),
                               "since", since, "boot", me.boot, "space", me.space, "started", me.started);
    json_dumpb(object, text, RUN_LOCK_TEXT - 1, JSON_COMPACT);
    json_decref(object);
}

// What is in the file and when it was last touched. False: there is no file.
static inline bool run_lock_read(const char *path, char text[RUN_LOCK_TEXT], struct timespec *touched) {
    struct stat status;
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0 || fstat(descriptor, &status) != 0) {
        if (descriptor >= 0) { close(descriptor); }
        return false;
    }
    ssize_t length = read(descriptor, text, RUN_LOCK_TEXT - 1);
    text[length > 0 ? length : 0] = '\0';
    *touched = status.st_mtim;
    close(descriptor);
    return true;
}

// Whether the owner runs on this machine: 1 it does, 0 it ran here and has ended, -1 it is
// or was elsewhere, or cannot be told.
static inline int run_lock_owner_here(const json_t *owner) {
    const char *boot = json_string_value(json_object_get(owner, "boot")),
               *space = json_string_value(json_object_get(owner, "space")),
               *started = json_string_value(json_object_get(owner, "started"));
    ProcessName there = run_lock_process((int)json_integer_value(json_object_get(owner, "pid")));
    if (boot == NULL || space == NULL || started == NULL) { return -1; }
    if (boot[0] == '\0' || space[0] == '\0' || started[0] == '\0') { return -1; }
    if (strcmp(boot, there.boot) != 0 || strcmp(space, there.space) != 0) { return -1; }
    return strcmp(started, there.started) == 0 ? 1 : 0;
}

// Watches a file that was last touched at `touched`. Whether it changes within `patience`
// seconds.
static inline bool run_lock_beats(const char *path, const char *text, struct timespec touched,
                                  double patience) {
    for (double until = clock_seconds() + patience; clock_seconds() < until; sleep_seconds(0.2)) {
        char present[RUN_LOCK_TEXT];
        struct timespec at;
        if (!run_lock_read(path, present, &at)) { return false; }
        if (at.tv_sec != touched.tv_sec || at.tv_nsec != touched.tv_nsec || strcmp(present, text) != 0) {
            return true;
        }
    }
    return false;
}

// Says who has the directory.
static inline void run_lock_name_owner(const json_t *owner, const char *directory, Error *error) {
    const char *user = json_string_value(json_object_get(owner, "user")),
               *host = json_string_value(json_object_get(owner, "host")),
               *since = json_string_value(json_object_get(owner, "since"));
    error_set(error,
              "--out %.300s is in use by another run: of %.60s on %.60s, process %lld, since %.40s. Wait for "
              "it, stop it, or choose another --out",
              directory, user != NULL ? user : "unknown", host != NULL ? host : "unknown",
              (long long)json_integer_value(json_object_get(owner, "pid")),
              since != NULL ? since : "unknown");
}

// Whether somebody holds the lock; then the error says who.
static inline bool run_lock_is_held(const char *directory, const char *path, double patience, Error *error) {
    char text[RUN_LOCK_TEXT];
    struct timespec touched;
    if (!run_lock_read(path, text, &touched)) { return false; }
    json_t *owner = json_loads(text, 0, NULL);
    int here = run_lock_owner_here(owner);
    if (here < 0) {
        fprintf(stderr,
                "train_gpt: --out %.400s has the lock of a run elsewhere: looking for %.0f s whether it is "
                "alive\n",
                directory, patience);
    }
    bool held = here > 0 || (here < 0 && run_lock_beats(path, text, touched, patience));
    if (held) { run_lock_name_owner(owner, directory, error); }
    json_decref(owner);
    return held;
}

// Makes the file. errno is EEXIST where there is one.
static inline bool run_lock_make(const char *path, const char *text) {
    int descriptor = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor < 0) { return false; }
    bool written = file_write_all(descriptor, text, strlen(text), FILE_POSITION);
    int reason = errno;
    close(descriptor);
    if (!written) { unlink(path); }
    errno = reason;
    return written;
}

// Takes the directory, which exists, for this process. patience: seconds for which the
// lock of a run elsewhere is watched. False: another run has it. Where no file can be made,
// nothing is locked: whatever the run writes next will say why.
static inline bool run_lock_take(RunLock *lock, const char *directory, const char *host, double patience,
                                 Error *error) {
    snprintf(lock->path, sizeof lock->path, "%.*s/lock", RUN_PATH_SIZE - 1, directory);
    memset(lock->text, 0, sizeof lock->text);
    run_lock_write_text(host, lock->text);
    while (!run_lock_make(lock->path, lock->text)) {
        bool exists = errno == EEXIST;
        bool held = exists && run_lock_is_held(directory, lock->path, patience, error);
        // Of two that have found the same owner dead, the slower one may remove the new file
        // of the other, which then fails at its next beat.
        if (exists && !held && (unlink(lock->path) == 0 || errno == ENOENT)) { continue; }
        lock->path[0] = '\0';
        return !held;
    }
    return true;
}

// Whether the file is still this run's.
static inline bool run_lock_is_ours(const RunLock *lock) {
    char text[RUN_LOCK_TEXT];
    struct timespec touched;
    return !run_lock_read(lock->path, text, &touched) || strcmp(text, lock->text) == 0;
}

static inline void *run_lock_main(void *argument) {
    RunLock *lock = (RunLock *)argument;
    while (!__atomic_load_n(&lock->released, __ATOMIC_ACQUIRE)) {
        if (!run_lock_is_ours(lock)) {
            transport_fail(lock->transport,
                           "%s is now of another run, which took this one for dead: two runs must not write "
                           "into one directory",
                           lock->path);
        }
        utimensat(AT_FDCWD, lock->path, NULL, 0);
        sleep_seconds(RUN_LOCK_BEAT);
    }
    return NULL;
}

// Starts to touch the file. Without a thread for that the lock holds only on this machine.
static inline void run_lock_keep(RunLock *lock, Transport *transport) {
    pthread_t thread;
    lock->transport = transport;
    if (lock->path[0] == '\0') { return; }
    if (pthread_create(&thread, NULL, run_lock_main, lock) == 0) { pthread_detach(thread); }
}

static inline void run_lock_release(RunLock *lock) {
    if (lock->path[0] == '\0') { return; }
    __atomic_store_n(&lock->released, true, __ATOMIC_RELEASE);
    if (run_lock_is_ours(lock)) { unlink(lock->path); }
}

#endif
