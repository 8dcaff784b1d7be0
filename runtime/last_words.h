// last_words.h: a rank that is ended from outside says where it was.
//
// When a rank dies, the launcher ends the others with SIGTERM before any of them can miss it, and says only which rank it was and where.
// What the others were doing is known to them alone: a thread waits for the signal, writes one line, and lets the signal do its work. Two
// ranks speak, 0 and 1, so that one of them is left whoever has died; a job of a thousand ranks does not need a thousand lines. A rank that
// leaves in order, or that has said why the job must end, is silent.
//
//   last_words_block     before the first thread is made: the signal is blocked in all of them
//   last_words_prepare   from now on; the transport must live as long as the process
#ifndef ACCO_LAST_WORDS_H
#define ACCO_LAST_WORDS_H

#include <pthread.h>
#include <signal.h>

#include "transport.h"

enum { LAST_WORDS_RANKS = 2 };

static inline sigset_t last_words_signals(void) {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    return signals;
}

static inline void last_words_block(void) {
    sigset_t signals = last_words_signals();
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
}

static inline void last_words_unblock(void) {
    sigset_t signals = last_words_signals();
    pthread_sigmask(SIG_UNBLOCK, &signals, NULL);
}

static inline void *last_words_main(void *argument) {
    const Transport *transport = (const Transport *)argument;
    sigset_t signals = last_words_signals();
    int number = 0;
    while (sigwait(&signals, &number) != 0) {}
    bool speaks = transport->size > 1 && transport->rank < LAST_WORDS_RANKS;
    if (speaks && !__atomic_load_n(&transport->leaving, __ATOMIC_RELAXED)) {
        fprintf(stderr, "train_gpt: [rank %d of %d on %s, commit %lld] ended from outside; the latest operation between ranks was: %s\n",
                transport->rank, transport->size, transport->host, (long long)__atomic_load_n(&transport->commit, __ATOMIC_RELAXED),
                __atomic_load_n(&transport->operation, __ATOMIC_RELAXED));
        fflush(stderr);
    }
    last_words_unblock();
    raise(number);
    return NULL;
}

// Where there is no thread for it the signal does its work in silence.
static inline void last_words_prepare(Transport *transport) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, last_words_main, transport) == 0) {
        pthread_detach(thread);
    } else {
        last_words_unblock();
    }
}

#endif
