// transport.h: the ranks, messages between them, and the end of all when one is silent.
//
//   exchange.h      reduce-scatter and all-gather of vectors
//        |
//   Transport       transfers, waits with deadlines, the emulated link; built on them:
//        |            transport_all_gather_records    a small record of every rank
//        |            transport_barrier               every rank has arrived
//   Link            point to point: MPI (transport_mpi.h), threads
//                   (test/threads_link.h), or none for a world of one rank
//
// One thread at a time uses a transport (the communication stream while it has tasks, otherwise the
// host's thread), and all ranks call the same operations in order. A rank that waits sleeps between
// polls, so that the compute threads keep their cores. At a deadline, which every wait has, it
// names those that it waits for and ends all ranks.
#pragma once

#include "comm/groups.h"
#include "runtime/device.h"
#include "runtime/memory.h"
#include "runtime/random.h"

// A link's handle of a message that is under way: room for any link's request.
typedef struct LinkRequest {
    void *words[4];
} LinkRequest;

// Messages between two ranks arrive in the order in which they were started.
typedef struct Link {
    const char *name;
    void *state;
    void (*start)(void *state, LinkRequest *request, bool is_send, int peer, void *data, size_t bytes);
    // Also makes progress. True once, after which the request is gone.
    bool (*is_done)(void *state, LinkRequest *request);
    // NULL: nothing to end. 0: all end in good order. Otherwise ends all, never returns.
    void (*end)(void *state, int exit_code);
} Link;

typedef enum TransferState { TRANSFER_NONE, TRANSFER_DELAYED, TRANSFER_ACTIVE } TransferState;

typedef struct Transfer {
    TransferState state;
    bool is_send;
    int peer;
    void *data;
    size_t bytes;
    double start_at;       // clock_seconds() when the emulated link lets the message start
    struct Transfer *next; // that the emulated link holds back
    LinkRequest request;
} Transfer;

// Transfers are grouped into lanes, which are waited for separately. Each level has two:
// while a chunk that came in one lane is added up, the next chunk is under way in the other.
typedef enum Level { INSIDE_HOSTS, BETWEEN_HOSTS } Level;

enum { TRANSPORT_LANES = 2, TRANSPORT_LEVELS = 2, TRANSPORT_MAX_LISTED = 8 };

typedef struct Lane {
    Level level;
    int number; // 0 .. TRANSPORT_LANES - 1
} Lane;

// How long a wait polls before it sleeps: about as long as a chunk takes in a machine. Then it
// sleeps for an eighth of the time that it has waited, at most SLEEP_SECONDS: a message that has
// arrived waits for half of it on average; a poll takes some microseconds from the computation.
#define TRANSPORT_SPIN_SECONDS 50e-6
#define TRANSPORT_SLEEP_SECONDS 1e-3

enum { TRANSPORT_HOST_BYTES = 64 };

typedef struct HostRecord {
    int leader; // the lowest rank of the host
    char name[TRANSPORT_HOST_BYTES];
} HostRecord;

// Message buffers of the collectives in host memory, which reserve them in the arena
// (collectives_host.h). The first two serve what travels between hosts.
typedef enum MessageBuffer {
    MESSAGES_SENT,
    MESSAGES_RECEIVED,
    MESSAGES_SENT_INSIDE,
    MESSAGES_RECEIVED_INSIDE,
    MESSAGE_BUFFERS
} MessageBuffer;

typedef struct MessageBuffers {
    size_t limit;                   // of elements in a chunk; 0: chosen. For tests
    size_t chunk;                   // most elements of one rank that travel at a time
    size_t slots[MESSAGE_BUFFERS];  // of a lane; a slot has room for a chunk in any format
    char *buffers[MESSAGE_BUFFERS]; // (lanes, slots, chunk * sizeof(float))
} MessageBuffers;

typedef struct Transport {
    int rank, size;
    int local_rank, local_size; // among the ranks of this node
    char host[TRANSPORT_HOST_BYTES];
    HostRecord *met;    // (size): where every rank is; NULL until transport_meet
    Groups hosts;       // which ranks share a host: the slow link lies between hosts
    Groups flat;        // every rank by itself
    bool two_level;     // the exchange adds up inside hosts first
    bool library;       // NCCL's own collectives carry vectors, and add in an order of their own
    const char *reason; // why this link was chosen, for the start-up block
    Link link;
    double timeout_seconds; // of every wait
    bool asked_to_stop;     // atomic: this rank is to save and leave with all others
    // Injected on purpose, for tests and measurements: delays, and a slow link.
    double chaos_seconds;         // a random delay up to this before every operation; results must not change
    double link_bytes_per_second; // rate of the emulated link; 0: no limit
    double link_latency;          // of the emulated link, seconds
    double link_free_at;          // clock_seconds() when the emulated link has sent what it was given
    Random chaos;
    // Where this rank is, for messages. Atomic, because a thread that answers a signal reads them.
    int64_t commit;
    const char *operation;
    bool leaving;                     // closed, or the reason why all ranks end has been printed
    Transfer *transfers;              // (levels, lanes, 2, size): receives, then sends
    Transfer *delayed, *delayed_last; // a list of those that the emulated link holds back, as posted
    MessageBuffers messages;
    uint64_t bytes_sent;         // atomic: other threads read it to show progress
    uint64_t bytes_sent_outside; // of these, to other hosts; atomic
} Transport;

// Before an end with a code other than 0, so that the rank's last words are heard: Open MPI's
// mpirun ends a job with the first such rank, the only one too; version 5 may then drop what it
// has not read yet.
static inline void transport_let_launcher_read(const Transport *transport) {
    fflush(stdout);
    if (transport->link.end != NULL) { sleep_seconds(0.2); }
}

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
    transport_let_launcher_read(transport);
    if (transport->link.end != NULL) { transport->link.end(transport->link.state, EXIT_SYSTEM_FAILURE); }
    _exit(EXIT_SYSTEM_FAILURE);
}

// ---- Opening --------------------------------------------------------------------------

// For links. Every `per_host` ranks in a row share a host, until the ranks meet.
static inline void transport_prepare(Transport *transport, int rank, int size, int per_host, const Link *link,
                                     const char *reason) {
    memset(transport, 0, sizeof *transport);
    transport->rank = rank;
    transport->size = size;
    transport->local_size = 1;
    transport->link = *link;
    transport->reason = reason;
    transport->operation = "start";
    transport->timeout_seconds = 300;
    transport->chaos.state = 77u + (uint64_t)rank;
    transport->transfers = MEMORY_OF(Transfer, 2 * TRANSPORT_LEVELS * TRANSPORT_LANES * size);
    gethostname(transport->host, sizeof transport->host - 1);
    groups_make_even(&transport->flat, rank, size, 1);
    groups_make_even(&transport->hosts, rank, size, per_host);
}

// A world of one rank: every operation returns at once.
static inline void transport_open_alone(Transport *transport, const char *reason) {
    const Link none = {.name = "alone"};
    transport_prepare(transport, 0, 1, 1, &none, reason);
}

// For a plan: every `ranks_per_host` ranks share a host. It cannot send anything. Rank 0 needs the
// most memory: where the last host has fewer ranks, those of the others have more to pass on.
static inline void transport_open_supposed(Transport *transport, int size, int ranks_per_host) {
    const Link none = {.name = "supposed"};
    transport_prepare(transport, 0, size, ranks_per_host, &none, "a plan");
}

static inline void transport_close(Transport *transport) {
    __atomic_store_n(&transport->leaving, true, __ATOMIC_RELAXED);
    free(transport->transfers);
    free(transport->met);
    transport->transfers = NULL;
    transport->met = NULL;
    groups_free(&transport->hosts);
    groups_free(&transport->flat);
    if (transport->link.end != NULL) { transport->link.end(transport->link.state, 0); }
}

// How the exchange sees the ranks.
static inline const Groups *transport_groups(const Transport *transport) {
    return transport->two_level ? &transport->hosts : &transport->flat;
}

// The same text whenever sums are added in the same order; for log and checkpoints.
static inline void transport_sum_order(const Transport *transport, char *text, size_t size) {
    const Groups *groups = transport_groups(transport);
    uint64_t hash = 0;
    for (int rank = 0; rank < groups->size; rank++) {
        hash = random_hash(hash, (uint64_t)groups->host_of[rank]);
    }
    if (transport->library || groups_are_flat(groups)) {
        snprintf(text, size, transport->library ? "library" : "flat");
    } else {
        snprintf(text, size, "%d hosts, %016llx", groups->hosts, (unsigned long long)hash);
    }
}

static inline bool transport_is_outside(const Transport *transport, int peer) {
    return transport->hosts.host_of[peer] != transport->hosts.host;
}

static inline Transfer *transport_transfer(Transport *transport, Lane lane, bool is_send, int peer) {
    int row = ((int)lane.level * TRANSPORT_LANES + lane.number) * 2 + (is_send ? 1 : 0);
    return &transport->transfers[row * transport->size + peer];
}

// ---- Messages -------------------------------------------------------------------------

static inline void transport_start_transfer(Transport *transport, Transfer *transfer) {
    transport->link.start(transport->link.state, &transfer->request, transfer->is_send, transfer->peer,
                          transfer->data, transfer->bytes);
    transfer->state = TRANSFER_ACTIVE;
}

static inline void transport_count(Transport *transport, size_t bytes, size_t outside) {
    __atomic_fetch_add(&transport->bytes_sent, bytes, __ATOMIC_RELAXED);
    __atomic_fetch_add(&transport->bytes_sent_outside, outside, __ATOMIC_RELAXED);
}

// Starts a message in a lane, at most one to and one from each peer; until transport_wait `data`
// must stay as it is. Both sides must give the same number of bytes; of none nothing is sent.
static inline void transport_post(Transport *transport, Lane lane, bool is_send, int peer, void *data,
                                  size_t bytes) {
    Transfer *transfer = transport_transfer(transport, lane, is_send, peer);
    if (bytes == 0) { return; }
    assert(transfer->state == TRANSFER_NONE);
    transfer->is_send = is_send;
    transfer->peer = peer;
    transfer->data = data;
    transfer->bytes = bytes;
    bool outside = is_send && transport_is_outside(transport, peer);
    if (is_send) { transport_count(transport, bytes, outside ? bytes : 0); }
    double rate = transport->link_bytes_per_second, latency = transport->link_latency;
    if (!outside || (rate <= 0 && latency <= 0)) {
        transport_start_transfer(transport, transfer);
        return;
    }
    // The emulated link: messages leave at its rate, and each is late by its latency.
    transport->link_free_at =
        fmax(transport->link_free_at, clock_seconds()) + (rate > 0 ? (double)bytes / rate : 0);
    transfer->start_at = transport->link_free_at + latency;
    transfer->state = TRANSFER_DELAYED;
    transfer->next = NULL;
    *(transport->delayed != NULL ? &transport->delayed_last->next : &transport->delayed) = transfer;
    transport->delayed_last = transfer;
}

// The level, for messages, as in "reduce-scatter inside the host"; "" if there is only one.
static inline const char *transport_level_name(const Transport *transport, Level level) {
    return !transport->two_level ? "" : level == INSIDE_HOSTS ? " inside the host" : " between hosts";
}

// Ends all ranks and names those that this one waits for in a lane: which have not sent, or
// where all have, which have not received.
static inline void transport_fail_overdue(Transport *transport, Lane lane, double waited) {
    char list[TRANSPORT_MAX_LISTED * 80] = "";
    const HostRecord *met = transport->met; // NULL: the ranks have not met yet
    size_t bytes = 0;
    int count = 0, is_send = 0;
    for (; count == 0 && is_send < 2; is_send++) {
        for (int peer = 0; peer < transport->size; peer++) {
            const Transfer *transfer = transport_transfer(transport, lane, is_send == 1, peer);
            if (transfer->state == TRANSFER_NONE) { continue; }
            bytes += transfer->bytes;
            if (count++ == TRANSPORT_MAX_LISTED) { text_join(list, sizeof list, ", ", "..."); }
            if (count > TRANSPORT_MAX_LISTED) { continue; }
            text_join(list, sizeof list, ", ", "%d%s%s", peer, met != NULL ? " on " : "",
                      met != NULL ? met[peer].name : "");
        }
    }
    transport_fail(transport,
                   "%s%s: rank %s did not %s for %.0f s (%zu bytes outstanding). It, or a rank that it waits "
                   "for, may be dead, stuck, or much slower than the others: look at its node; --timeout-s "
                   "sets how long to wait",
                   transport->operation, transport_level_name(transport, lane.level), list,
                   is_send == 1 ? "arrive" : "take its data", waited, bytes);
}

// Waits until all transfers of a lane have ended. Ends all ranks at the deadline.
static inline void transport_wait(Transport *transport, Lane lane) {
    const Link *link = &transport->link;
    Transfer *transfers = transport_transfer(transport, lane, false, 0);
    int count = 2 * transport->size;
    double began = clock_seconds(), progressed = began, looked = began;
    for (;;) {
        int open = 0;
        bool progress = false;
        // Starts what the emulated link lets through by now, of any lane, in the order in
        // which it was posted, because a link keeps the order of messages.
        for (Transfer *due; (due = transport->delayed) != NULL && due->start_at <= clock_seconds();) {
            transport->delayed = due->next;
            transport_start_transfer(transport, due);
            progress = true;
        }
        for (int i = 0; i < count; i++) {
            Transfer *transfer = &transfers[i];
            if (transfer->state == TRANSFER_NONE) { continue; }
            if (transfer->state == TRANSFER_ACTIVE && link->is_done(link->state, &transfer->request)) {
                transfer->state = TRANSFER_NONE;
                progress = true;
            } else {
                open++;
            }
        }
        if (open == 0) { return; }
        double now = clock_seconds();
        // More than a second between two polls: this process itself was stopped, and that
        // time does not count against the others.
        if (now - looked > 1) { began += now - looked; }
        looked = now;
        if (progress) { progressed = now; }
        // Inside a host twice as long: a mate that waits itself, for another host, is not to blame.
        if (now - began > transport->timeout_seconds * (lane.level == INSIDE_HOSTS ? 2 : 1)) {
            transport_fail_overdue(transport, lane, now - began);
        }
        double waited = now - progressed;
        if (waited <= TRANSPORT_SPIN_SECONDS) { continue; }
        double pause = fmin(fmax(waited / 8, TRANSPORT_SPIN_SECONDS), TRANSPORT_SLEEP_SECONDS);
        if (transport->delayed != NULL) { // not beyond the time when the next message may start
            pause = fmin(pause, fmax(transport->delayed->start_at - now, 0));
        }
        sleep_seconds(pause);
    }
}

// Every operation begins with this. operation: a literal, for messages.
static inline void transport_begin(Transport *transport, const char *operation) {
    __atomic_store_n(&transport->operation, operation, __ATOMIC_RELAXED);
    if (transport->chaos_seconds > 0) {
        sleep_seconds(transport->chaos_seconds * random_uniform(&transport->chaos));
    }
}

// ---- Operations -----------------------------------------------------------------------

// all (size, bytes) <- the records of all ranks in the order of ranks; `mine` (bytes) is this
// rank's. They travel from every rank to the first one of its host, from each of these to all
// others, and back. Returns when every rank has called it.
static inline void transport_all_gather_records(Transport *transport, const char *operation, const void *mine,
                                                void *all, size_t bytes) {
    memcpy((char *)all + (size_t)transport->rank * bytes, mine, bytes);
    if (transport->size == 1) { return; }
    const Groups *groups = transport_groups(transport);
    const Lane lane = {INSIDE_HOSTS, 0}, between = {BETWEEN_HOSTS, 0};
    int first = groups_rank(groups, groups->host, 0);
    transport_begin(transport, operation);
    if (transport->rank != first) {
        transport_post(transport, lane, true, first, (char *)all + (size_t)transport->rank * bytes, bytes);
        transport_wait(transport, lane);
        transport_post(transport, lane, false, first, all, (size_t)transport->size * bytes);
        transport_wait(transport, lane);
        return;
    }
    char *packed = (char *)memory_take((size_t)transport->size, bytes); // host after host
    char *ours = packed + (size_t)groups->begins[groups->host] * bytes;
    memcpy(ours, mine, bytes);
    for (int place = 1; place < groups->mates; place++) {
        transport_post(transport, lane, false, groups_rank(groups, groups->host, place),
                       ours + (size_t)place * bytes, bytes);
    }
    transport_wait(transport, lane);
    for (int step = 1; step < groups->hosts; step++) {
        int to = groups_other_host(groups, step), from = groups_other_host(groups, -step);
        transport_post(transport, between, false, groups_rank(groups, from, 0),
                       packed + (size_t)groups->begins[from] * bytes,
                       (size_t)groups_count(groups, from) * bytes);
        transport_post(transport, between, true, groups_rank(groups, to, 0), ours,
                       (size_t)groups->mates * bytes);
    }
    transport_wait(transport, between);
    for (int i = 0; i < transport->size; i++) {
        memcpy((char *)all + (size_t)groups->ranks[i] * bytes, packed + (size_t)i * bytes, bytes);
    }
    free(packed);
    for (int place = 1; place < groups->mates; place++) {
        transport_post(transport, lane, true, groups_rank(groups, groups->host, place), all,
                       (size_t)transport->size * bytes);
    }
    transport_wait(transport, lane);
}

// The records of all ranks, (size, bytes) in the order of ranks, for the caller to free.
static inline void *transport_collect_records(Transport *transport, const char *operation, const void *mine,
                                              size_t bytes) {
    void *all = memory_take((size_t)transport->size, bytes);
    transport_all_gather_records(transport, operation, mine, all, bytes);
    return all;
}

// The numbers of all ranks, folded in the order of ranks, as by fmax: the same on all.
static inline double transport_fold(Transport *transport, const char *operation, double mine,
                                    double (*fold)(double, double)) {
    double *all = (double *)transport_collect_records(transport, operation, &mine, sizeof mine);
    double folded = all[0];
    for (int rank = 1; rank < transport->size; rank++) { folded = fold(folded, all[rank]); }
    free(all);
    return folded;
}

// Overwrites `bytes` (count) on all ranks with rank 0's.
static inline void share_from_rank_zero(Transport *transport, const char *operation, void *bytes,
                                        size_t count) {
    void *all = transport_collect_records(transport, operation, bytes, count);
    memcpy(bytes, all, count);
    free(all);
}

static inline void transport_barrier(Transport *transport, const char *operation) {
    char mine = 0;
    free(transport_collect_records(transport, operation, &mine, 1));
}

// The same where a rank may be busy for long, as with files: waits for `seconds`.
static inline void transport_barrier_patiently(Transport *transport, const char *operation, double seconds) {
    double timeout_seconds = transport->timeout_seconds;
    transport->timeout_seconds = fmax(timeout_seconds, seconds);
    transport_barrier(transport, operation); // sleeps while it waits
    transport->timeout_seconds = timeout_seconds;
}

// What a rank says of something that it did. A step at which only some can fail must end the same
// way on all: otherwise the others wait for messages that never come.
typedef struct Verdict {
    int exit_code; // 0: it worked
    char host[64];
    Error error;
} Verdict;

// All ranks call it, each with its own result. Returns the lowest rank whose exit_code is
// not 0, and its verdict; -1: it worked on all ranks.
static inline int transport_first_failure(Transport *transport, const char *operation, int exit_code,
                                          const Error *error, Verdict *found) {
    Verdict mine;
    memset(&mine, 0, sizeof mine);
    mine.exit_code = exit_code;
    memcpy(mine.host, transport->host, sizeof mine.host);
    mine.error = *error;
    Verdict *all = (Verdict *)transport_collect_records(transport, operation, &mine, sizeof mine);
    int rank = 0;
    while (rank < transport->size && all[rank].exit_code == 0) { rank++; }
    if (rank < transport->size) { *found = all[rank]; }
    free(all);
    return rank < transport->size ? rank : -1;
}

// All ranks tell each other where they are; before, each counts as a host of its own. leader: the
// lowest rank on this rank's host.
static inline void transport_meet(Transport *transport, int leader) {
    size_t size = (size_t)transport->size;
    HostRecord mine;
    memset(&mine, 0, sizeof mine);
    mine.leader = leader;
    snprintf(mine.name, sizeof mine.name, "%s", transport->host);
    HostRecord *all = (HostRecord *)transport_collect_records(transport, "meeting", &mine, sizeof mine);
    int *leader_of = MEMORY_OF(int, size);
    for (size_t i = 0; i < size; i++) { leader_of[i] = all[i].leader; }
    groups_free(&transport->hosts);
    groups_make(&transport->hosts, transport->rank, transport->size, leader_of);
    free(leader_of);
    free(transport->met);
    transport->met = all;
}
