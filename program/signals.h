// signals.h: a rank that is asked to stop, or ended from outside.
//
// SIGUSR1 and SIGTERM ask a rank that trains to stop: it sets a flag, all ranks learn of
// it with the next exchange, save, and leave together. But when a rank dies, the launcher
// ends the others with SIGTERM as well, and says only which rank it was and where. What
// the others were doing is known to them alone. So on SIGTERM one line says where this
// rank was; if it cannot leave in order, because it waits for a rank that is no more, the
// launcher's SIGKILL ends it soon, and otherwise we do.
//
// Two ranks speak, 0 and 1, so that one of them is left whoever has died; a job of a
// thousand ranks does not need a thousand lines. A rank that leaves in order, or that has
// said why the job must end, is silent.
//
//   signal_watch_block     before the first thread is made: the signals are blocked in all of them
//   signal_watch_prepare   from now on a thread of its own waits for them
#ifndef ACCO_PROGRAM_SIGNALS_H
#define ACCO_PROGRAM_SIGNALS_H

#include <pthread.h>
#include <signal.h>

#include "comm/transport.h"

enum { SIGNAL_WATCH_RANKS = 2 };

#define SIGNAL_WATCH_PATIENCE 60.0 // seconds between SIGTERM and the end of a rank that does not come to one

// Lives as long as the process.
typedef struct SignalWatch {
    Transport *transport;
    bool *stop_requested; // atomic
    bool accepting;       // atomic: somebody looks at stop_requested
} SignalWatch;

static inline sigset_t signal_watch_signals(void) {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGUSR1);
    return signals;
}

static inline void signal_watch_block(void) {
    sigset_t signals = signal_watch_signals();
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
}

static inline void signal_watch_unblock(void) {
    sigset_t signals = signal_watch_signals();
    pthread_sigmask(SIG_UNBLOCK, &signals, NULL);
}

static inline void signal_watch_speak(const Transport *transport) {
    bool speaks = transport->size > 1 && transport->rank < SIGNAL_WATCH_RANKS;
    if (!speaks || __atomic_load_n(&transport->leaving, __ATOMIC_RELAXED)) { return; }
    fprintf(stderr,
            "train_gpt: [rank %d of %d on %s, commit %lld] ended from outside; the latest operation between "
            "ranks was: %s\n",
            transport->rank, transport->size, transport->host,
            (long long)__atomic_load_n(&transport->commit, __ATOMIC_RELAXED),
            __atomic_load_n(&transport->operation, __ATOMIC_RELAXED));
    fflush(stderr);
}

// Whether this rank comes to an orderly end.
static inline bool signal_watch_leaves(const Transport *transport) {
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
        signal_watch_speak(watch->transport);
        if (accepted && signal_watch_leaves(watch->transport)) { return NULL; }
        break;
    }
    signal_watch_unblock();
    raise(number);
    return NULL;
}

// Where there is no thread for it the signals do their work in silence.
static inline void signal_watch_prepare(SignalWatch *watch) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, signal_watch_main, watch) == 0) {
        pthread_detach(thread);
    } else {
        signal_watch_unblock();
    }
}

#endif
