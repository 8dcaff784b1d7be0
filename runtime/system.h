// system.h: what Linux has and other systems have in another way, or not at all.
//
// The rest of the program is POSIX. Where a system lacks something, a function below does less: a
// sleep ends later, a directory is replaced in two steps. Linux is what is tested.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifdef __linux__
#include <linux/fs.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#endif

// ---- The processor --------------------------------------------------------------------

#ifdef __x86_64__
// Before main, and compiled for every processor: on one that lacks what the program was built
// for, the first such instruction would end it without a word.
__attribute__((constructor, target("arch=x86-64"))) static void processor_check(void) {
    const char *missing = NULL;
    __builtin_cpu_init();
#ifdef __AVX512F__
    if (!__builtin_cpu_supports("avx512f")) { missing = "AVX-512"; }
#endif
#ifdef __FMA__
    if (!__builtin_cpu_supports("fma")) { missing = "FMA"; }
#endif
#ifdef __AVX2__
    if (!__builtin_cpu_supports("avx2")) { missing = "AVX2"; }
#endif
    if (missing == NULL) { return; }
    fprintf(stderr,
            "train_gpt: it was built for processors with %s, which this one lacks: build it here, or for all "
            "x86-64 processors with make ARCH_FLAGS=-march=x86-64\n",
            missing);
    _exit(2);
}
#endif

// ---- Threads and signals --------------------------------------------------------------

// Lets the calling thread run as soon as it is woken, also while others keep all cores
// busy: else it may be 3 to 10 ms late for messages. It asks for the shortest time
// slices, which Linux schedules first from version 6.12 on; older systems ignore it.
static inline void thread_wake_promptly(void) {
#ifdef __linux__
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period; // nanoseconds
    } attributes = {.size = sizeof attributes, .flags = 0x08, .runtime = 100000};
    // The flag is SCHED_FLAG_KEEP_POLICY; with real-time policies it then does nothing.
    attributes.nice = getpriority(PRIO_PROCESS, 0);
    syscall(SYS_sched_setattr, 0, &attributes, 0);
#endif
}

// Lets the calling thread's short sleeps end when they should, not 50 us later.
static inline void thread_sleep_exactly(void) {
#ifdef __linux__
    prctl(PR_SET_TIMERSLACK, 1UL);
#endif
}

// The clock of deadlines of condition_create's conditions: on macOS it jumps when the date is set.
#ifdef __APPLE__
#define CONDITION_CLOCK CLOCK_REALTIME
static inline void condition_create(pthread_cond_t *condition) { pthread_cond_init(condition, NULL); }
#else
#define CONDITION_CLOCK CLOCK_MONOTONIC
static inline void condition_create(pthread_cond_t *condition) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CONDITION_CLOCK);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}
#endif

// FAILURE_SIGNAL carries the text of a failure from code that does not know ranks to the thread
// that waits for signals (program/signals.h). failure_send: false, it was not sent. signal_wait:
// waits for one of `signals` and returns it; *failure: the text that this process sent, or NULL.
#ifdef SIGRTMIN
#define FAILURE_SIGNAL (SIGRTMIN + 2)
static inline bool failure_send(const char *text) {
    union sigval value;
    value.sival_ptr = (void *)(size_t)text;
    return sigqueue(getpid(), FAILURE_SIGNAL, value) == 0;
}
static inline int signal_wait(const sigset_t *signals, const char **failure) {
    siginfo_t information;
    int number = 0;
    while ((number = sigwaitinfo(signals, &information)) < 0) {}
    bool sent = number == FAILURE_SIGNAL && information.si_code == SI_QUEUE && information.si_pid == getpid();
    *failure = sent ? (const char *)information.si_value.sival_ptr : NULL;
    return number;
}
#else
// Signals without values: the text is printed where it is known.
#define FAILURE_SIGNAL SIGUSR2
static inline bool failure_send(const char *text) {
    fprintf(stderr, "train_gpt: %s\n", text);
    return kill(getpid(), FAILURE_SIGNAL) == 0;
}
static inline int signal_wait(const sigset_t *signals, const char **failure) {
    int number = 0;
    while (sigwait(signals, &number) != 0) {}
    *failure = number == FAILURE_SIGNAL ? "the failure that the line above tells of" : NULL;
    return number;
}
#endif

// ---- Files ----------------------------------------------------------------------------

// Exchanges two names of one file system, so that at no moment either is missing. False: it could
// not.
static inline bool names_exchange(const char *one, const char *other) {
#if defined(__linux__)
    return syscall(SYS_renameat2, AT_FDCWD, one, AT_FDCWD, other, RENAME_EXCHANGE) == 0;
#elif defined(__APPLE__)
    return renamex_np(one, other, RENAME_SWAP) == 0;
#else
    return one == other;
#endif
}

// line <- what follows `prefix` in the first line of a file that begins with it.
static inline bool file_read_line(const char *path, const char *prefix, char *line, int size) {
    FILE *file = fopen(path, "r");
    bool found = false;
    size_t skip = strlen(prefix);
    while (!found && file != NULL && fgets(line, size, file) != NULL) {
        found = strncmp(line, prefix, skip) == 0;
    }
    if (found) { memmove(line, line + skip, strlen(line + skip) + 1); }
    if (file != NULL) { fclose(file); }
    return found;
}

// When the file or its name was changed last: ctime, which nothing can set back.
static inline struct timespec file_changed_at(const struct stat *status) {
#ifdef __APPLE__
    return status->st_ctimespec;
#else
    return status->st_ctim;
#endif
}

// Does the process that started this one print to a terminal?
static inline bool parent_prints_to_terminal(void) {
    char link[64], target[64];
    snprintf(link, sizeof link, "/proc/%d/fd/1", (int)getppid());
    ssize_t length = readlink(link, target, sizeof target - 1);
    target[length > 0 ? length : 0] = '\0';
    return strncmp(target, "/dev/pts/", 9) == 0 || strncmp(target, "/dev/tty", 8) == 0;
}

// ---- Memory ---------------------------------------------------------------------------

// Maps bytes of memory, zeroed, for munmap; MAP_FAILED: refused. A page takes memory when it is
// first written.
static inline void *memory_map(size_t bytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_NORESERVE
    flags |= MAP_NORESERVE;
#endif
    return mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
}

// Bytes of a mapping that are in memory now; 0: not known.
static inline size_t memory_resident(void *base, size_t bytes) {
#ifdef __linux__
    typedef unsigned char PageState;
#else
    typedef char PageState;
#endif
    size_t page = (size_t)sysconf(_SC_PAGESIZE), pages = (bytes + page - 1) / page, count = 0;
    PageState *resident = base != NULL ? (PageState *)malloc(pages) : NULL;
    if (resident != NULL && mincore(base, bytes, resident) == 0) {
        for (size_t i = 0; i < pages; i++) { count += resident[i] & 1; }
    }
    free(resident);
    return count * page;
}
