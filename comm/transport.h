// transport.h: ranks, messages between them, and what happens when one does not come.
//
// A transport is opened by one of its links (none for a world of one, MPI, threads in
// tests). A link only needs point-to-point messages; everything else is built here and in
// collectives_host.h on top of them. All of it is called by one thread at a time (the
// communication stream, once it runs) and in the same order on every rank:
//
//   transport_all_gather_records   a small record from every rank to every rank; also tells who has arrived
//   transport_barrier    nobody leaves before all have come
//
// A rank that waits does not spin: it sleeps between looks for an eighth of the time it
// has already waited, 5 ms at most, so that the compute threads keep their cores. Every
// wait has a deadline; when it passes, transport_fail names what was awaited from whom
// and ends the whole job. A slow link can be emulated: messages then leave through a
// token bucket, and late.
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

// The request of a link that is under way; room for what any link needs to recognise it.
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
    bool (*is_done)(void *state,
                    LinkRequest *request);     // also makes progress; true once, then the request is gone
    void (*abort)(void *state, int exit_code); // ends every rank; does not return
    void (*close)(void *state);
} Link;

typedef enum TransferState { TRANSFER_NONE, TRANSFER_DELAYED, TRANSFER_ACTIVE } TransferState;

typedef struct Transfer {
    TransferState state;
    bool is_send;
    int peer;
    void *data;
    size_t bytes;
    double start_at; // clock_seconds() at which an emulated link lets the message through
    LinkRequest request;
} Transfer;

// Two lanes: while the chunk in one is added up, the next one is on its way in the other.
enum { TRANSPORT_LANES = 2, TRANSPORT_MAX_LISTED = 8 };

// How long a wait looks without sleeping: about as long as a chunk takes between two
// ranks of one machine.
#define TRANSPORT_SPIN_SECONDS 50e-6

typedef struct Transport {
    int rank, size;
    int local_rank, local_size; // among the ranks of this node
    char host[64];
    const char *reason; // why this link was chosen, for the start-up block
    Link link;
    double timeout_seconds;
    double
        chaos_seconds; // before every operation: a random delay up to this, to show that results do not depend on time
    double
        link_bytes_per_second; // 0: as fast as it goes; otherwise messages leave through a token bucket of this rate
    double link_latency; // seconds by which every message is late
    Random chaos;
    // Where we are, for messages.
    int64_t commit; // atomic, as the next two: whoever is ended from outside reads them
    const char *operation;
    bool leaving;        // in order, or after saying why the job must end
    Transfer *transfers; // (lanes, 2, size): receives, then sends
    // Chunk buffers, reserved in the arena.
    size_t chunk;          // most elements of one message
    size_t slot_bytes;     // of one message
    char *receive_buffers; // (lanes, size - 1, slot_bytes): one slot for each other rank
    char *send_buffers;    // the same
    // Measured.
    uint64_t bytes_sent; // atomic: others look at it for progress
    double link_free_at;
} Transport;

// Prints one line that says where this happened and what to do, and ends all ranks with
// EXIT_SYSTEM_FAILURE. Any thread may call it.
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

// What every link does once it knows rank and size.
static inline void transport_prepare(Transport *transport) {
    transport->operation = "start";
    transport->timeout_seconds = 300;
    transport->chaos.state = 77u + (uint64_t)transport->rank;
    transport->transfers =
        (Transfer *)calloc((size_t)(TRANSPORT_LANES * 2 * transport->size), sizeof(Transfer));
    gethostname(transport->host, sizeof transport->host - 1);
}

// A world of one: every operation returns at once.
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

// When the emulated link has let `bytes` through: messages leave one after another at its
// rate, and each is on its way for the latency.
static inline double transport_departure(Transport *transport, size_t bytes) {
    double now = clock_seconds();
    if (transport->link_free_at < now) { transport->link_free_at = now; }
    if (transport->link_bytes_per_second > 0) {
        transport->link_free_at += (double)bytes / transport->link_bytes_per_second;
    }
    return transport->link_free_at + transport->link_latency;
}

static inline void transport_post(Transport *transport, int lane, bool is_send, int peer, void *data,
                                  size_t bytes) {
    Transfer *transfer = transport_transfer(transport, lane, is_send, peer);
    assert(transfer->state == TRANSFER_NONE);
    transfer->is_send = is_send;
    transfer->peer = peer;
    transfer->data = data;
    transfer->bytes = bytes;
    if (is_send) { __atomic_fetch_add(&transport->bytes_sent, bytes, __ATOMIC_RELAXED); }
    if (is_send && (transport->link_bytes_per_second > 0 || transport->link_latency > 0)) {
        transfer->start_at = transport_departure(transport, bytes);
        transfer->state = TRANSFER_DELAYED;
    } else {
        transport_start_transfer(transport, transfer);
    }
}

// Looks at one transfer; true when it has ended.
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

// Names the ranks that the deadline caught: those we still expect something from, else
// those that do not take what we send.
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
                           "hang, or be much slower than "
                           "the others: look at its node; --timeout-s sets how long to wait",
                           transport->operation, list, listed > TRANSPORT_MAX_LISTED ? ", ..." : "",
                           is_send == 1 ? "take its data" : "arrive", waited, bytes);
        }
    }
}

// Waits until all transfers of a lane have ended. Sleeps between looks, longer the longer
// nothing happens.
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
        if (now - looked > 1) {
            began += now - looked;
        } // this process itself was stopped: the others are not to blame
        looked = now;
        if (progress) { progressed = now; }
        if (now - began > transport->timeout_seconds) {
            transport_fail_overdue(transport, lane, now - began);
        }
        double waited = now - progressed;
        if (waited > TRANSPORT_SPIN_SECONDS) { sleep_seconds(fmin(fmax(waited / 8, 50e-6), 5e-3)); }
    }
}

// Peers in an order in which no two ranks start with the same one.
static inline int transport_peer(const Transport *transport, int step) {
    return (transport->rank + step) % transport->size;
}

static inline void transport_begin(Transport *transport, const char *operation) {
    __atomic_store_n(&transport->operation, operation, __ATOMIC_RELAXED);
    if (transport->chaos_seconds > 0) {
        sleep_seconds(transport->chaos_seconds * random_uniform(&transport->chaos));
    }
}

// ---------------------------------------------------------------------------------------
// Operations

// all (size, bytes): the records of all ranks in the order of ranks; `mine` (bytes) is
// this rank's. Also tells who has arrived.
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

// The records of all ranks, (size, bytes) in the order of ranks, for the caller to free. Fails the job where there is no memory for them.
static inline void *transport_collect_records(Transport *transport, const char *operation, const void *mine,
                                              size_t bytes) {
    void *all = calloc((size_t)transport->size, bytes);
    if (all == NULL) { transport_fail(transport, "%s: no memory for the records of all ranks", operation); }
    transport_all_gather_records(transport, operation, mine, all, bytes);
    return all;
}

static inline void transport_barrier(Transport *transport, const char *operation) {
    char mine = 0;
    char *all = (char *)malloc((size_t)transport->size);
    transport_all_gather_records(transport, operation, &mine, all, 1);
    free(all);
}

#endif
