// signals.h: what a rank does when it is asked to stop, or killed from outside.
//
// SIGINT, SIGTERM, SIGHUP and SIGUSR1 all ask a rank to stop: it sets Transport::asked_to_stop. All
// ranks learn of it with the next job (Wishes::stop_agreed), with the next batch of a validation,
// or when they next agree on something (agree_or_exit). They save what there is and leave together,
// however long that takes; only a second SIGINT ends a rank at once.
//
// The launcher also uses SIGTERM to end the remaining ranks when one has died, and says only which
// and where. So a rank prints where it was, whether the process of a rank on this host is gone, and
// what is lost: only ranks 0 and 1, in case one of these has died, and not when it leaves in order
// or has already said why the run must end.
//
// FAILURE_SIGNAL (runtime/system.h) comes from this process itself: something that knows no
// ranks has failed, such as CUDA, and all ranks end at once. SIGPIPE is ignored: the log has
// all that a reader who has gone, as behind `| head`, would have read (report_window).
#pragma once

#include "comm/transport.h"
#include "program/launch_checks.h"

enum { SIGNAL_WATCH_RANKS = 2 }; // how many ranks print where they were

// Seconds within which a second SIGINT counts as the first: a key that bounced, or a wrapper
// that passes on what the terminal has already sent to all.
#define SIGNAL_WATCH_SAME 0.5

// Must live as long as the process: the thread reads it until the end.
typedef struct SignalWatch {
    Transport *transport;
    sigset_t signals;     // that ask to stop, and FAILURE_SIGNAL
    int64_t saved_commit; // atomic: of the newest checkpoint on disk; -1: there is none
    const Hello *hellos;  // atomic: (ranks), which live as long as the process; NULL: not known yet
    bool told;            // atomic: which signal it was
} SignalWatch;

// Before the first thread is made: blocks the signals that ask to stop, in all. Signals
// that the parent process ignores (nohup) stay ignored.
static inline void signal_watch_mask(SignalWatch *watch) {
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1};
    sigemptyset(&watch->signals);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        struct sigaction action;
        bool ignored = sigaction(numbers[i], NULL, &action) == 0 && action.sa_handler == SIG_IGN;
        if (!ignored) { sigaddset(&watch->signals, numbers[i]); }
    }
    sigaddset(&watch->signals, FAILURE_SIGNAL);
    pthread_sigmask(SIG_BLOCK, &watch->signals, NULL);
    signal(SIGPIPE, SIG_IGN);
}

static inline void signal_watch_note_saved(SignalWatch *watch, int64_t commit) {
    __atomic_store_n(&watch->saved_commit, commit, __ATOMIC_RELAXED);
}

// text <- what a run loses that ends here.
static inline const char *signal_watch_lost(const SignalWatch *watch, char text[64]) {
    long long saved = (long long)__atomic_load_n(&watch->saved_commit, __ATOMIC_RELAXED);
    if (saved < 0) { return strcpy(text, "nothing of this run is saved"); }
    snprintf(text, 64, "all after checkpoint commit-%lld is lost", saved);
    return text;
}

// On SIGTERM, on the ranks that print: where it was, and advice. first: not asked before.
static inline void signal_watch_report(const SignalWatch *watch, bool first) {
    const Transport *transport = watch->transport;
    const Hello *hellos = __atomic_load_n(&watch->hellos, __ATOMIC_ACQUIRE);
    bool all_live = hellos != NULL; // every rank is on this host, and lives
    int lost = -1;                  // the first rank on this host whose process is gone
    char gone[96] = "", text[64];
    if (transport->rank >= SIGNAL_WATCH_RANKS || __atomic_load_n(&transport->leaving, __ATOMIC_RELAXED)) {
        return;
    }
    // A launcher has waited for a process that died before it ends the others.
    for (int rank = 0; hellos != NULL && rank < transport->size && lost < 0; rank++) {
        bool here = strcmp(hellos[rank].host, transport->host) == 0;
        if (here && kill(hellos[rank].pid, 0) != 0 && errno == ESRCH) { lost = rank; }
        all_live = all_live && here && lost < 0;
    }
    if (lost >= 0) {
        snprintf(gone, sizeof gone, " because rank %d here, process %d, is gone", lost, hellos[lost].pid);
    }
    fprintf(
        stderr,
        "train_gpt: [rank %d of %d on %s, commit %lld] ended from outside%s; the latest operation between "
        "ranks was: %s\n",
        transport->rank, transport->size, transport->host,
        (long long)__atomic_load_n(&transport->commit, __ATOMIC_RELAXED), gone,
        __atomic_load_n(&transport->operation, __ATOMIC_RELAXED));
    bool advises = transport->rank == (lost == 0 ? 1 : 0);
    if (advises && lost >= 0) {
        fprintf(stderr,
                "train_gpt: %s; --save-every 10m saves a run on the way, --resume auto continues it\n",
                signal_watch_lost(watch, text));
    } else if (advises && first && all_live && getenv("OMPI_COMM_WORLD_SIZE") != NULL) {
        // mpirun passes every wish to end on as SIGTERM, and SIGKILL a second later. Version 5 no
        // longer forwards what ranks say by then: the terminal tells whoever pressed Ctrl-C.
        FILE *heard = getenv("PRTE_LAUNCHED") != NULL ? fopen("/dev/tty", "w") : NULL;
        fprintf(heard != NULL ? heard : stderr,
                "train_gpt: mpirun leaves its ranks a second or less to save; started with scripts/launch "
                "mpirun ..., they have all the time they need\n");
        if (heard != NULL) { fclose(heard); }
    }
}

static inline void *signal_watch_main(void *argument) {
    SignalWatch *watch = (SignalWatch *)argument;
    double interrupted = -INFINITY; // clock_seconds() of the first SIGINT
    const char *failure;
    int number = 0;
    for (;;) {
        number = signal_wait(&watch->signals, &failure);
        if (failure != NULL) {
            transport_fail(watch->transport, "%s; the latest operation between ranks was: %s", failure,
                           __atomic_load_n(&watch->transport->operation, __ATOMIC_RELAXED));
        }
        if (number == FAILURE_SIGNAL) { continue; } // from another process, which is not believed
        bool first = !__atomic_exchange_n(&watch->transport->asked_to_stop, true, __ATOMIC_RELAXED);
        double now = clock_seconds();
        if (number == SIGTERM && watch->transport->size > 1) {
            signal_watch_report(watch, first);
        } else if (first && watch->transport->rank == 0) { // because saving may take a while
            fprintf(stderr, "%strain_gpt: asked to stop by %s%s\n", isatty(STDERR_FILENO) == 1 ? "\n" : "",
                    number == SIGINT    ? "SIGINT"
                    : number == SIGHUP  ? "SIGHUP"
                    : number == SIGTERM ? "SIGTERM"
                                        : "SIGUSR1",
                    number == SIGINT ? "; a second SIGINT ends it at once" : "");
        }
        __atomic_store_n(&watch->told, true, __ATOMIC_RELEASE);
        if (number != SIGINT) { continue; }
        if (isfinite(interrupted) && now - interrupted > SIGNAL_WATCH_SAME) { break; }
        if (!isfinite(interrupted)) { interrupted = now; }
    }
    char text[64];
    if (watch->transport->rank == 0) {
        fprintf(stderr, "train_gpt: ended at once by a second SIGINT: %s\n", signal_watch_lost(watch, text));
    }
    pthread_sigmask(SIG_UNBLOCK, &watch->signals, NULL);
    raise(number); // with the default action, which ends the process
    return NULL;
}

// For a rank that exits because it was asked to: waits until it has been told which signal it was,
// a fifth of a second at most, because nobody may read what is printed.
static inline void signal_watch_settle(const SignalWatch *watch) {
    for (int i = 0; i < 20 && !__atomic_load_n(&watch->told, __ATOMIC_ACQUIRE); i++) { sleep_seconds(0.01); }
}

// Starts the thread that waits for them; without one they keep their default action.
static inline void signal_watch_prepare(SignalWatch *watch) {
    pthread_t thread;
    watch->saved_commit = -1;
    if (pthread_create(&thread, NULL, signal_watch_main, watch) == 0) {
        pthread_detach(thread);
    } else {
        pthread_sigmask(SIG_UNBLOCK, &watch->signals, NULL);
    }
}
