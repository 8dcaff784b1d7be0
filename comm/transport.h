// transport.h: the ranks of a job, messages between them, and the end of the job when one
// does not answer.
//
//   collectives.h   reduce-scatter and all-gather of vectors
//        |
//   Transport       transfers, waits with deadlines, the emulated link; built on them:
//        |            transport_all_gather_records    a small record of every rank
//        |            transport_barrier               every rank has arrived
//   Link            start_send, start_receive, is_done: MPI (transport_mpi.h), threads
//                   (test/threads_link.h), or none for a world of one rank
//
// A link only needs point-to-point messages; everything else is built on top of them.
// One thread at a time uses a transport (the communication stream, once it runs), and all
// ranks call the same operations in the same order.
//
// A waiting rank does not spin: between looks it sleeps for an eighth of the time it has
// already waited, at most 5 ms, so that the compute threads keep their cores. Every wait
// has a deadline. When it passes, transport_fail names the ranks that were waited for and
// ends the whole job.
//
// A slow network can be emulated: messages then leave through a token bucket, and arrive
// late by a fixed latency.
#ifndef ACCO_COMM_TRANSPORT_H
#define ACCO_COMM_TRANSPORT_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/device.h"
#include "runtime/errors.h"
#include "runtime/memory.h"
#include "runtime/random.h"

// What a link needs to recognise a message that is under way: room for any link's
// request.
typedef struct LinkRequest {
    void *words[4];
} LinkRequest;

// Point-to-point messages. Messages between two ranks arrive in the order in which they
// were started.
typedef struct Link {
    const char *name;
    void *state;
    void (*start_send)(void *state, LinkRequest *request, int peer, const void *data, size_t bytes);
    void (*start_receive)(void *state, LinkRequest *request, int peer, void *data, size_t bytes);
    // Also makes progress. True once; then the request is gone.
    bool (*is_done)(void *state, LinkRequest *request);
    void (*abort)(void *state, int exit_code); // ends every rank; does not return
    void (*close)(void *state);
} Link;

typedef enum TransferState { TRANSFER_NONE, TRANSFER_DELAYED, TRANSFER_ACTIVE } TransferState;

// One message to or from one rank.
typedef struct Transfer {
    TransferState state;
    bool is_send;
    int peer;
    void *data;
    size_t bytes;
    double start_at; // clock_seconds() when the emulated link lets the message start
    LinkRequest request;
} Transfer;

// Transfers are grouped into two lanes, which are waited for separately: while the chunk
// that came in one lane is added up, the next one is under way in the other.
enum { TRANSPORT_LANES = 2, TRANSPORT_MAX_LISTED = 8 };

// How long a wait polls before it sleeps: about as long as a chunk takes between two
// ranks of one machine.
#define TRANSPORT_SPIN_SECONDS 50e-6

typedef struct Transport {
    int rank, size;
    int local_rank, local_size; // among the ranks of this node
    char host[64];
    const char *reason; // why this link was chosen, for the start-up block
    Link link;
    double timeout_seconds; // of every wait
    // Injected on purpose, for tests and measurements: delays, and a slow link.
    double chaos_seconds;         // a random delay up to this before every operation; results must not change
    double link_bytes_per_second; // rate of the emulated link; 0: no limit
    double link_latency;          // of the emulated link, seconds
    double link_free_at;          // clock_seconds() when the emulated link has sent what it was given
    Random chaos;
    // Where this rank is, for messages. Atomic: a signal is answered with them.
    int64_t commit;
    const char *operation;
    bool leaving;        // closed, or the reason why the job ends has been printed
    Transfer *transfers; // (lanes, 2, size): receives, then sends
    // Message buffers of collectives_host.h, which reserves them in the arena.
    size_t chunk;          // most elements of one message
    size_t slot_bytes;     // of one message
    char *receive_buffers; // (lanes, size - 1, slot_bytes): one slot for each other rank
    char *send_buffers;    // the same
    uint64_t bytes_sent;   // atomic: other threads read it to show progress
} Transport;

// Prints one line with rank, host, commit and the given text, and ends all ranks with
// EXIT_SYSTEM_FAILURE. Does not return. Any thread may call it.
PRINTF_LIKE(2, 3) static inline void transport_fail(Transport *transport, const char *format, ...) {
    char text[1024];
    __atomic_store_n(&transport->leaving, true, __ATOMIC_RELAXED);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fflush(stdout);
    fprintf(stderr, "train_gpt: [rank %d of %d on %s, commit %lld] %s\n", transport->rank, transport->size,
            transport->host, (long long)transport->commit, text);
    fflush(stderr);
    if (transport->link.abort != NULL) { transport->link.abort(transport->link.state, EXIT_SYSTEM_FAILURE); }
    _exit(EXIT_SYSTEM_FAILURE);
}

// ---------------------------------------------------------------------------------------
// Opening

// For links: sets the defaults, once rank and size are known.
static inline void transport_prepare(Transport *transport) {
    transport->operation = "start";
    transport->timeout_seconds = 300;
    transport->chaos.state = 77u + (uint64_t)transport->rank;
    transport->transfers =
        (Transfer *)calloc((size_t)(TRANSPORT_LANES * 2 * transport->size), sizeof(Transfer));
    gethostname(transport->host, sizeof transport->host - 1);
}

// A world of one rank: every operation returns at once.
static inline void transport_open_alone(Transport *transport, const char *reason) {
    memset(transport, 0, sizeof *transport);
    transport->size = transport->local_size = 1;
    transport->link.name = "alone";
    transport->reason = reason;
    transport_prepare(transport);
}

static inline void transport_close(Transport *transport) {
    __atomic_store_n(&transport->leaving, true, __ATOMIC_RELAXED);
    free(transport->transfers);
    transport->transfers = NULL;
    if (transport->link.close != NULL) { transport->link.close(transport->link.state); }
}

static inline Transfer *transport_transfer(Transport *transport, int lane, bool is_send, int peer) {
    return &transport->transfers[(lane * 2 + (is_send ? 1 : 0)) * transport->size + peer];
}

// ---------------------------------------------------------------------------------------
// Messages

static inline void transport_start_transfer(Transport *transport, Transfer *transfer) {
    Link *link = &transport->link;
    if (transfer->is_send) {
        link->start_send(link->state, &transfer->request, transfer->peer, transfer->data, transfer->bytes);
    } else {
        link->start_receive(link->state, &transfer->request, transfer->peer, transfer->data, transfer->bytes);
    }
    transfer->state = TRANSFER_ACTIVE;
}

// Starts a message in a lane; transport_wait waits for it. `data` must stay as it is
// until then. At most one message to and one from each peer may be under way in a lane.
// Both sides must give the same number of bytes.
static inline void transport_post(Transport *transport, int lane, bool is_send, int peer, void *data,
                                  size_t bytes) {
    Transfer *transfer = transport_transfer(transport, lane, is_send, peer);
    assert(transfer->state == TRANSFER_NONE);
    transfer->is_send = is_send;
    transfer->peer = peer;
    transfer->data = data;
    transfer->bytes = bytes;
    if (is_send) { __atomic_fetch_add(&transport->bytes_sent, bytes, __ATOMIC_RELAXED); }
    double rate = transport->link_bytes_per_second;
    if (is_send && (rate > 0 || transport->link_latency > 0)) {
        // Messages leave one after another at the link's rate, and each is late by its
        // latency.
        transport->link_free_at =
            fmax(transport->link_free_at, clock_seconds()) + (rate > 0 ? (double)bytes / rate : 0);
        transfer->start_at = transport->link_free_at + transport->link_latency;
        transfer->state = TRANSFER_DELAYED;
    } else {
        transport_start_transfer(transport, transfer);
    }
}

// Makes progress with one transfer; true when it has ended.
static inline bool transport_advance(Transport *transport, Transfer *transfer) {
    if (transfer->state == TRANSFER_DELAYED && clock_seconds() >= transfer->start_at) {
        transport_start_transfer(transport, transfer);
    }
    if (transfer->state == TRANSFER_ACTIVE &&
        transport->link.is_done(transport->link.state, &transfer->request)) {
        transfer->state = TRANSFER_NONE;
        return true;
    }
    return false;
}

// Fails the job and names the ranks that this rank still waits for: those that have not
// sent, or if there are none, those that have not received.
static inline void transport_fail_overdue(Transport *transport, int lane, double waited) {
    for (int is_send = 0; is_send < 2; is_send++) {
        char list[256] = "";
        int listed = 0;
        size_t bytes = 0;
        for (int peer = 0; peer < transport->size; peer++) {
            Transfer *transfer = transport_transfer(transport, lane, is_send == 1, peer);
            if (transfer->state == TRANSFER_NONE) { continue; }
            bytes += transfer->bytes;
            size_t used = strlen(list);
            if (listed++ < TRANSPORT_MAX_LISTED) {
                snprintf(list + used, sizeof list - used, "%s%d", used > 0 ? ", " : "", peer);
            }
        }
        if (listed > 0) {
            transport_fail(transport,
                           "%s: rank %s%s did not %s for %.0f s (%zu bytes outstanding). It may have died, "
                           "hang, or be much slower than the others: look at its node; --timeout-s sets how "
                           "long to wait",
                           transport->operation, list, listed > TRANSPORT_MAX_LISTED ? ", ..." : "",
                           is_send == 1 ? "take its data" : "arrive", waited, bytes);
        }
    }
}

// Waits until all transfers of a lane have ended, or fails the job at the deadline.
static inline void transport_wait(Transport *transport, int lane) {
    Transfer *transfers = transport_transfer(transport, lane, false, 0);
    int count = 2 * transport->size;
    double began = clock_seconds();
    double progressed = began, looked = began;
    for (;;) {
        int open = 0;
        bool progress = false;
        for (int i = 0; i < count; i++) {
            if (transfers[i].state == TRANSFER_NONE) { continue; }
            if (transport_advance(transport, &transfers[i])) {
                progress = true;
            } else {
                open++;
            }
        }
        if (open == 0) { return; }
        double now = clock_seconds();
        // More than a second between two looks: this process itself was stopped, and that
        // time does not count against the others.
        if (now - looked > 1) { began += now - looked; }
        looked = now;
        if (progress) { progressed = now; }
        if (now - began > transport->timeout_seconds) {
            transport_fail_overdue(transport, lane, now - began);
        }
        double waited = now - progressed;
        if (waited > TRANSPORT_SPIN_SECONDS) { sleep_seconds(fmin(fmax(waited / 8, 50e-6), 5e-3)); }
    }
}

// The rank to which this one sends in a step (1 .. size - 1). In one step no two ranks
// send to the same peer.
static inline int transport_peer(const Transport *transport, int step) {
    return (transport->rank + step) % transport->size;
}

// Every operation begins with this. operation: a literal, for messages.
static inline void transport_begin(Transport *transport, const char *operation) {
    __atomic_store_n(&transport->operation, operation, __ATOMIC_RELAXED);
    if (transport->chaos_seconds > 0) {
        sleep_seconds(transport->chaos_seconds * random_uniform(&transport->chaos));
    }
}

// ---------------------------------------------------------------------------------------
// Operations

// all (size, bytes) <- the records of all ranks in the order of ranks; `mine` (bytes) is
// this rank's. Returns when every rank has called it.
static inline void transport_all_gather_records(Transport *transport, const char *operation, const void *mine,
                                                void *all, size_t bytes) {
    memcpy((char *)all + (size_t)transport->rank * bytes, mine, bytes);
    if (transport->size == 1) { return; }
    transport_begin(transport, operation);
    for (int step = 1; step < transport->size; step++) {
        int peer = transport_peer(transport, step);
        transport_post(transport, 0, false, peer, (char *)all + (size_t)peer * bytes, bytes);
        transport_post(transport, 0, true, peer, (char *)all + (size_t)transport->rank * bytes, bytes);
    }
    transport_wait(transport, 0);
}

// The records of all ranks, (size, bytes) in the order of ranks, for the caller to free.
// Fails the job where there is no memory for them.
static inline void *transport_collect_records(Transport *transport, const char *operation, const void *mine,
                                              size_t bytes) {
    void *all = calloc((size_t)transport->size, bytes);
    if (all == NULL) { transport_fail(transport, "%s: no memory for the records of all ranks", operation); }
    transport_all_gather_records(transport, operation, mine, all, bytes);
    return all;
}

// Returns when every rank has called it.
static inline void transport_barrier(Transport *transport, const char *operation) {
    char mine = 0;
    free(transport_collect_records(transport, operation, &mine, 1));
}

// ---------------------------------------------------------------------------------------
// Measuring the link

typedef struct LinkMeasure {
    double latency; // seconds of the smallest all-gather of records
    double rate;    // bytes per second that leave one rank
} LinkMeasure;

enum { LINK_PROBES = 16, LINK_PROBE_BYTES = 4096 };

// The mean seconds of an all-gather of records of `bytes`, on the slowest rank: the same
// number on all ranks.
static inline double link_time_records(Transport *transport, size_t bytes, int tries) {
    static const char operation[] = "measurement of the link";
    char *mine = (char *)calloc(1, bytes), *all = (char *)calloc((size_t)transport->size, bytes);
    double began = clock_seconds();
    for (int i = 0; i < tries; i++) { transport_all_gather_records(transport, operation, mine, all, bytes); }
    double mean = (clock_seconds() - began) / tries, slowest = 0;
    double *means = (double *)transport_collect_records(transport, operation, &mean, sizeof mean);
    for (int rank = 0; rank < transport->size; rank++) { slowest = fmax(slowest, means[rank]); }
    free(mine);
    free(all);
    free(means);
    return slowest;
}

// All ranks call it and get the same answer. Records grow until one takes well over the
// latency and a twentieth of a second, so that a slow link is not kept busy for long.
static inline LinkMeasure link_measure(Transport *transport) {
    LinkMeasure measure = {0, INFINITY};
    if (transport->size == 1) { return measure; }
    measure.latency = link_time_records(transport, sizeof(double), LINK_PROBES);
    for (size_t bytes = LINK_PROBE_BYTES; bytes <= (size_t)1 << 20; bytes *= 4) {
        double seconds = link_time_records(transport, bytes, 2);
        measure.rate = (double)bytes * (transport->size - 1) / fmax(seconds - measure.latency, 1e-9);
        if (seconds > 20 * measure.latency && seconds > 0.05) { break; }
    }
    return measure;
}

#endif
