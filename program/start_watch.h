// start_watch.h: a deadline for the time before the ranks have met.
//
// The library of MPI waits for ever for a rank that does not come, or whose packets a firewall
// drops. No function of it returns, so a thread of our own keeps the time. It says once that the
// start takes long, and ends the process at --timeout-s; the launcher then ends the others.
#pragma once

#include "program/launch_checks.h"
#include "runtime/device.h"

typedef struct StartWatch {
    pthread_t thread;
    bool begun, met; // met: atomic
    int rank;        // by the launcher
    double timeout_seconds;
} StartWatch;

enum { START_IS_SLOW = 20 }; // seconds

// Waits until the ranks have met, for at most `seconds`. Returns whether they have.
static inline bool start_watch_wait(const StartWatch *watch, double seconds) {
    double end = clock_seconds() + seconds;
    bool met;
    while (!(met = __atomic_load_n(&watch->met, __ATOMIC_ACQUIRE)) && clock_seconds() < end) {
        sleep_seconds(5e-3);
    }
    return met;
}

static inline void *start_watch_thread(void *context) {
    const StartWatch *watch = (const StartWatch *)context;
    char host[64] = "";
    double first = fmin(START_IS_SLOW, watch->timeout_seconds / 2);
    gethostname(host, sizeof host - 1);
    if (start_watch_wait(watch, first)) { return NULL; }
    if (watch->rank == 0) {
        fprintf(stderr,
                "train_gpt: rank 0 on %s has waited for the other ranks for %.0f s, and waits until %.0f s "
                "(--timeout-s)\n",
                host, first, watch->timeout_seconds);
    }
    if (start_watch_wait(watch, watch->timeout_seconds - first)) { return NULL; }
    fprintf(stderr,
            "train_gpt: rank %d on %s has not met the other ranks in %.0f s (--timeout-s). Most often a "
            "firewall drops what the hosts send each other, or MPI has taken a network interface that the "
            "other host cannot reach: --mca in docs/cluster.md\n",
            watch->rank, host, watch->timeout_seconds);
    _exit(EXIT_SYSTEM_FAILURE);
}

// Before MPI is called, which sets variables of the environment: the thread reads none. Not begun:
// the system gives no thread, and there is no deadline.
static inline void start_watch_begin(StartWatch *watch, double timeout_seconds) {
    watch->met = false;
    watch->rank = launch_launcher_rank();
    watch->timeout_seconds = timeout_seconds;
    watch->begun = pthread_create(&watch->thread, NULL, start_watch_thread, watch) == 0;
}

static inline void start_watch_end(StartWatch *watch) {
    __atomic_store_n(&watch->met, true, __ATOMIC_RELEASE);
    pthread_join(watch->thread, NULL);
}
