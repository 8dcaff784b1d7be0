// signals.h: what a rank does when it is asked to stop, or when it is killed from
// outside.
//
// SIGUSR1 and SIGTERM ask a training rank to stop. The rank sets a flag; all ranks learn
// of it with the next job, write a checkpoint, and exit together
// (Scheduler::stop_agreed).
//
// But SIGTERM is also how the launcher ends the remaining ranks when one of them has
// died, and it says only which rank died and where. What the others were waiting for,
// only they know. So on SIGTERM a rank prints one line that says where it was. If it
// cannot leave in order, because it waits for the dead rank, the launcher's SIGKILL ends
// it soon; where no SIGKILL comes, it ends itself after SIGNAL_WATCH_PATIENCE.
//
// Only ranks 0 and 1 print the line: two, so that one is left whichever rank has died,
// and not more, because a job of a thousand ranks does not need a thousand lines. A rank
// that leaves in order, or that has already said why the job must end, prints nothing.
//
//   signal_watch_mask      before the first thread is created: blocks the signals in all
//   signal_watch_prepare   starts a thread that waits for them
#ifndef ACCO_PROGRAM_SIGNALS_H
#define ACCO_PROGRAM_SIGNALS_H

#include <pthread.h>
#include <signal.h>

#include "comm/transport.h"

enum { SIGNAL_WATCH_RANKS = 2 }; // how many ranks print where they were

#define SIGNAL_WATCH_PATIENCE 60.0 // seconds after SIGTERM, in which a rank may still leave in order

// Must live as long as the process: the thread reads it until the end.
typedef struct SignalWatch {
    Transport *transport;
    bool *stop_requested; // atomic
    bool accepting;       // atomic: training has begun, so that stop_requested is looked at
} SignalWatch;

static inline sigset_t signal_watch_signals(void) {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGUSR1);
    return signals;
}

// how: SIG_BLOCK or SIG_UNBLOCK, for this thread and those that it will make.
static inline void signal_watch_mask(int how) {
    sigset_t signals = signal_watch_signals();
    pthread_sigmask(how, &signals, NULL);
}

// Prints where this rank was, if it is one that prints.
static inline void signal_watch_report(const Transport *transport) {
    bool prints = transport->size > 1 && transport->rank < SIGNAL_WATCH_RANKS;
    if (!prints || __atomic_load_n(&transport->leaving, __ATOMIC_RELAXED)) { return; }
    fprintf(stderr,
            "train_gpt: [rank %d of %d on %s, commit %lld] ended from outside; the latest operation between "
            "ranks was: %s\n",
            transport->rank, transport->size, transport->host,
            (long long)__atomic_load_n(&transport->commit, __ATOMIC_RELAXED),
            __atomic_load_n(&transport->operation, __ATOMIC_RELAXED));
    fflush(stderr);
}

// Waits for this rank to leave in order. Returns whether it does in time.
static inline bool signal_watch_wait_leaving(const Transport *transport) {
    for (double until = clock_seconds() + SIGNAL_WATCH_PATIENCE; clock_seconds() < until;) {
        if (__atomic_load_n(&transport->leaving, __ATOMIC_RELAXED)) { return true; }
        sleep_seconds(0.05);
    }
    return false;
}

static inline void *signal_watch_main(void *argument) {
    SignalWatch *watch = (SignalWatch *)argument;
    sigset_t signals = signal_watch_signals();
    int number = 0;
    for (;;) {
        while (sigwait(&signals, &number) != 0) {}
        bool accepted = __atomic_load_n(&watch->accepting, __ATOMIC_RELAXED);
        if (accepted) { __atomic_store_n(watch->stop_requested, true, __ATOMIC_RELAXED); }
        if (number == SIGUSR1 && accepted) { continue; }
        signal_watch_report(watch->transport);
        if (accepted && signal_watch_wait_leaving(watch->transport)) { return NULL; }
        break;
    }
    signal_watch_mask(SIG_UNBLOCK);
    raise(number); // with the default action, which ends the process
    return NULL;
}

// If the system gives no thread, the signals keep their default action.
static inline void signal_watch_prepare(SignalWatch *watch) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, signal_watch_main, watch) == 0) {
        pthread_detach(thread);
    } else {
        signal_watch_mask(SIG_UNBLOCK);
    }
}

#endif
