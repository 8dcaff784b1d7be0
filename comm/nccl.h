// nccl.h: messages between GPUs over NCCL, and every wait for them. The only file that
// includes nccl.h of the library; collectives_nccl.h builds the collectives.
//
// One communicator of all ranks carries what travels between hosts; on two levels the ranks of each
// host have another one. They are non-blocking: nccl_settle polls them and CUDA, with a deadline.
// When it passes or NCCL reports an error, transport_fail ends all ranks. ncclCommAbort would wait
// for ranks that may have died. program/placement.h decides whether NCCL is used: it needs a GPU of
// its own for every rank.
#pragma once

#include "comm/collective.h"
#include "comm/transport.h"

#ifdef ACCO_HAVE_NCCL
#include <nccl.h>
#else
typedef void *ncclComm_t;
#endif

typedef struct Nccl {
    ncclComm_t communicators[TRANSPORT_LEVELS]; // by Level; NULL: nothing travels there
    Transport *transport;
    int mine_count;  // how many owners this rank is the delegate of
    int other_count; // how many owners its mates are the delegates of
    // Lists of owners in GPU memory.
    int *owners;        // (mine_count): those whose delegate this rank is
    int *remote_owners; // (mine_count - 1): without itself, in the order in which it sends to them
    int *sent_owners;   // (other_count): its mates' owners, in the order in which it sends to its mates
    void *inside_queue; // for messages inside the host
    void *between_done, *inside_done; // marks in the queues
    size_t buffer_limit;              // bytes of the messages of all ranks that are under way; 0: chosen
    // collectives_nccl.h reserves these.
    size_t cells;          // at most this many travel at a time
    char *received, *sent; // between hosts
    char *inside_received, *inside_sent;
    char **gathered; // the one of them that holds the messages of all ranks
} Nccl;

#ifdef ACCO_HAVE_NCCL
static inline bool nccl_is_built_in(void) { return true; }

// text <- the version that the program was built with.
static inline void nccl_version(char *text, size_t size) {
    snprintf(text, size, "%d.%d.%d", NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH);
}

// Ends all ranks. Does not return.
static inline void nccl_fail(Nccl *nccl, Level level, const char *what, const char *why) {
    ncclComm_t communicator = nccl->communicators[level];
    const char *last = communicator != NULL ? ncclGetLastError(communicator) : "";
    transport_fail(nccl->transport, "NCCL, %s%s: %s%s%s", what, transport_level_name(nccl->transport, level),
                   why, last[0] != '\0' ? "; " : "", last);
}

// Ends all ranks unless the call succeeded or continues in the background.
static inline void nccl_check(Nccl *nccl, Level level, ncclResult_t status, const char *what) {
    if (status != ncclSuccess && status != ncclInProgress) {
        nccl_fail(nccl, level, what, ncclGetErrorString(status));
    }
}

// Waits until NCCL has accepted the last call on a level and, with a queue, until everything in
// that CUDA queue has ended. what: for messages.
static inline void nccl_settle(Nccl *nccl, Level level, void *queue, const char *what) {
    for (double began = clock_seconds(), looked = began;;) {
        ncclResult_t state = ncclSuccess;
        if (nccl->communicators[level] != NULL) {
            nccl_check(nccl, level, ncclCommGetAsyncError(nccl->communicators[level], &state), what);
            nccl_check(nccl, level, state, what);
        }
        if (state == ncclSuccess && (queue == NULL || gpu_queue_is_idle(queue))) { return; }
        double now = clock_seconds(), waited = now - began;
        if (now - looked > 1) { began += now - looked; } // this process was stopped: see transport_wait
        looked = now;
        if (waited > nccl->transport->timeout_seconds) {
            nccl_fail(
                nccl, level, what,
                nccl->transport->commit == 0
                    ? "a rank did not take part in time; at the start that is often a network "
                      "interface which other hosts do not reach: NCCL_SOCKET_IFNAME=eth0 names the right "
                      "one, NCCL_DEBUG=INFO says which is taken; --timeout-s sets how long to wait"
                    : "a rank did not take part in time: it may have died or hang; --timeout-s sets how "
                      "long to wait");
        }
        if (waited > TRANSPORT_SPIN_SECONDS) { sleep_seconds(fmin(waited / 8, 100e-6)); }
    }
}

// Messages between nccl_begin and nccl_end travel together, all on one level.
static inline void nccl_begin(Nccl *nccl) {
    nccl_check(nccl, BETWEEN_HOSTS, ncclGroupStart(), "begin of messages");
}

static inline int nccl_peer(const Nccl *nccl, Level level, int rank) {
    return level == INSIDE_HOSTS ? transport_groups(nccl->transport)->place[rank] : rank;
}

// Afterwards the messages are in their queue: what follows there sees the data received.
static inline void nccl_end(Nccl *nccl, Level level) {
    nccl_check(nccl, level, ncclGroupEnd(), nccl->transport->operation);
    nccl_settle(nccl, level, NULL, nccl->transport->operation);
}

// Puts a message into a CUDA queue. `data` of a message that is sent stays as it is.
static inline void nccl_post(Nccl *nccl, Level level, void *queue, bool is_send, int peer, void *data,
                             size_t bytes) {
    ncclComm_t communicator = nccl->communicators[level];
    cudaStream_t stream = (cudaStream_t)queue;
    int number = nccl_peer(nccl, level, peer);
    if (is_send) {
        transport_count(nccl->transport, bytes, transport_is_outside(nccl->transport, peer) ? bytes : 0);
    }
    nccl_check(nccl, level,
               is_send ? ncclSend(data, bytes, ncclChar, number, communicator, stream)
                       : ncclRecv(data, bytes, ncclChar, number, communicator, stream),
               is_send ? "send" : "receive");
}

// The level whose communicator has all ranks.
static inline Level nccl_level_of_all(const Nccl *nccl) {
    return transport_groups(nccl->transport)->hosts > 1 ? BETWEEN_HOSTS : INSIDE_HOSTS;
}

// A reduce-scatter or an all-gather by the library: `count` elements of each rank. Between
// nccl_begin and nccl_end, as messages are.
static inline void nccl_collect(Nccl *nccl, void *queue, CollectiveKind kind, ncclDataType_t type,
                                const void *in, void *out, size_t count) {
    Level level = nccl_level_of_all(nccl);
    ncclComm_t communicator = nccl->communicators[level];
    cudaStream_t stream = (cudaStream_t)queue;
    nccl_check(nccl, level,
               kind == REDUCE_SCATTER ? ncclReduceScatter(in, out, count, type, ncclSum, communicator, stream)
                                      : ncclAllGather(in, out, count, type, communicator, stream),
               nccl->transport->operation);
    // Counted as in a ring: what a rank passes on. One rank per host sends it to another host.
    const Groups *hosts = &nccl->transport->hosts;
    size_t element = type == ncclChar ? 1 : type == ncclBfloat16 ? 2 : 4;
    size_t bytes = count * element * (size_t)(nccl->transport->size - 1);
    transport_count(nccl->transport, bytes, hosts->hosts > 1 ? bytes / (size_t)hosts->mates : 0);
}

// Exchanges a byte with every rank that this one has messages for, so that NCCL connects them and
// takes its memory now. NCCL's own collectives have connections of their own, which depend on the
// size: they are run on a vector of a batch's length.
static inline void nccl_connect(Nccl *nccl, Level level) {
    const Groups *groups = transport_groups(nccl->transport);
    bool library = nccl->transport->library, all = level == nccl_level_of_all(nccl);
    if (level == INSIDE_HOSTS && groups->mates == 1) { return; }
    size_t size = (size_t)groups->size, count = all ? nccl->buffer_limit / sizeof(float) / size : 1;
    float *vector = (float *)gpu_allocate(size * count * sizeof(float));
    void *queue = gpu_queue_create(false);
    if (vector == NULL) { nccl_fail(nccl, level, "start", "the GPU has no memory left"); }
    nccl_begin(nccl);
    float *own = vector + (size_t)groups->rank * count;
    if (library) { nccl_collect(nccl, queue, REDUCE_SCATTER, ncclFloat, vector, own, count); }
    if (all) { nccl_collect(nccl, queue, ALL_GATHER, ncclFloat, own, vector, count); }
    for (int peer = 0; !library && peer < groups->size; peer++) {
        int host = groups->host_of[peer];
        bool inside = host == groups->host;
        char *bytes = (char *)vector; // one to send, and one for each peer
        if (inside != (level == INSIDE_HOSTS) || peer == groups->rank) { continue; }
        if (inside || groups_delegate(groups, groups->host, peer) == groups->rank) {
            nccl_post(nccl, level, queue, true, peer, bytes, 1);
        }
        if (inside || groups_delegate(groups, host, groups->rank) == peer) {
            nccl_post(nccl, level, queue, false, peer, bytes + 1 + peer, 1);
        }
    }
    nccl_end(nccl, level);
    nccl_settle(nccl, level, queue, "start");
    gpu_queue_destroy(queue);
    gpu_release(vector);
}

static inline void nccl_list_owners(Nccl *nccl) {
    const Groups *groups = transport_groups(nccl->transport);
    int rank = groups->rank, count = 0;
    size_t bytes = 3 * (size_t)groups->size * sizeof(int);
    int *lists = (int *)gpu_allocate_host(bytes);
    nccl->owners = (int *)gpu_allocate(bytes);
    if (lists == NULL || nccl->owners == NULL) {
        nccl_fail(nccl, BETWEEN_HOSTS, "start", "there is no memory left");
    }
    for (int owner = -1; groups_next_owner(groups, rank, &owner);) { lists[count++] = owner; }
    nccl->mine_count = count;
    nccl->remote_owners = nccl->owners + count;
    for (int step = 1; step < groups->hosts; step++) {
        int host = groups_other_host(groups, step);
        for (int owner = -1; groups_next_owner_on(groups, host, rank, &owner);) { lists[count++] = owner; }
    }
    nccl->sent_owners = nccl->owners + count;
    for (int step = 1; step < groups->mates; step++) {
        int mate = groups_mate(groups, step);
        for (int owner = -1; groups_next_owner(groups, mate, &owner);) { lists[count++] = owner; }
    }
    nccl->other_count = groups->size - nccl->mine_count;
    gpu_copy(nccl->inside_queue, nccl->owners, lists, (size_t)count * sizeof(int));
    nccl_settle(nccl, BETWEEN_HOSTS, nccl->inside_queue, "start");
    gpu_release_host(lists);
}

// All ranks, after transport_open, gpu_open and the choice of the groups. ctas: the most
// thread blocks of the GPU on each level, 1 or more. buffer_limit: see Nccl.
static inline void nccl_open(Nccl *nccl, Transport *transport, int ctas, size_t buffer_limit) {
    const Groups *groups = transport_groups(transport);
    memset(nccl, 0, sizeof *nccl);
    nccl->transport = transport;
    nccl->buffer_limit = buffer_limit;
    nccl->inside_queue = gpu_queue_create(true);
    nccl->between_done = gpu_mark_create();
    nccl->inside_done = gpu_mark_create();
    nccl_list_owners(nccl);
    for (int i = 0; i < TRANSPORT_LEVELS; i++) {
        Level level = (Level)i;
        bool inside = level == INSIDE_HOSTS;
        if (inside ? !transport->two_level : groups->hosts == 1) { continue; }
        // A communicator's first rank makes the identifier by which the other ranks find it.
        int first = inside ? groups_rank(groups, groups->host, 0) : 0;
        ncclUniqueId mine;
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        ncclComm_t communicator = NULL;
        memset(&mine, 0, sizeof mine);
        config.blocking = 0;
        config.maxCTAs = ctas;
        config.cgaClusterSize = 1; // blocks that must begin together find no room during a product
        if (groups->rank == first) { nccl_check(nccl, level, ncclGetUniqueId(&mine), "start"); }
        ncclUniqueId *all =
            (ncclUniqueId *)transport_collect_records(transport, "start of NCCL", &mine, sizeof mine);
        ncclResult_t status =
            ncclCommInitRankConfig(&communicator, inside ? groups->mates : groups->size, all[first],
                                   nccl_peer(nccl, level, groups->rank), &config);
        free(all);
        nccl->communicators[level] = communicator;
        nccl_check(nccl, level, status, "start");
        nccl_settle(nccl, level, NULL, "start");
        nccl_connect(nccl, level);
    }
}

static inline void nccl_close(Nccl *nccl) {
    for (int level = 0; level < TRANSPORT_LEVELS; level++) {
        if (nccl->communicators[level] == NULL) { continue; }
        ncclCommFinalize(nccl->communicators[level]);
        nccl_settle(nccl, (Level)level, NULL, "end");
        ncclCommDestroy(nccl->communicators[level]);
    }
    gpu_queue_destroy(nccl->inside_queue);
    gpu_mark_destroy(nccl->between_done);
    gpu_mark_destroy(nccl->inside_done);
    gpu_release(nccl->owners);
}

#else // without NCCL: nccl_is_built_in() is false, so the rest is never called

static inline bool nccl_is_built_in(void) { return false; }
static inline void nccl_version(char *text, size_t size) { snprintf(text, size, "none"); }
static inline void nccl_open(Nccl *nccl, Transport *transport, int ctas, size_t buffer_limit) {
    (void)nccl, (void)transport, (void)ctas, (void)buffer_limit;
}
static inline void nccl_close(Nccl *nccl) { (void)nccl; }

#endif
