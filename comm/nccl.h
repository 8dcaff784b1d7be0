// nccl.h: vectors in GPU memory, exchanged between GPUs without a way through the host.
//
// NCCL moves bytes; what they mean is ours. As in collectives_host.h every rank sends
// each piece straight to its owner, who adds what comes in the order of ranks, in fp32:
// the same bytes, the same sums, bit for bit, as over MPI. Any wire format travels,
// because encoding, adding and decoding are our own kernels. A stretch of cells that fits
// into the message buffers goes at a time.
//
// The communicator is non-blocking, and nothing here waits inside NCCL or CUDA:
// nccl_settle looks at both, and at the clock. When a deadline passes or NCCL reports an
// error, transport_fail ends all ranks, and with them what NCCL has on the GPUs;
// ncclCommAbort would wait for ranks that may be no more.
//
// NCCL wants a GPU for every rank (before its version 2.30 without exception); what
// stands in its way, placement.h finds (nccl_obstacle).
#ifndef ACCO_COMM_NCCL_H
#define ACCO_COMM_NCCL_H

#include "comm/collectives_host.h"

enum {
    NCCL_BUFFER_BYTES = 32 << 20
}; // of encoded messages in each direction: enough to fill a fast link, small beside a model

#ifdef ACCO_HAVE_NCCL
#include <nccl.h>

typedef struct Nccl {
    ncclComm_t communicator;
    Transport *transport;
    char *send, *receive; // (NCCL_BUFFER_BYTES or one cell, whichever is more)
    size_t buffer_bytes;
} Nccl;

static inline bool nccl_is_built_in(void) { return true; }

static inline void nccl_fail(Nccl *nccl, const char *what, const char *why) {
    const char *last = nccl->communicator != NULL ? ncclGetLastError(nccl->communicator) : "";
    transport_fail(nccl->transport, "NCCL, %s: %s%s%s", what, why, last[0] != '\0' ? "; " : "", last);
}

// A call that may still be under way in the background is good.
static inline void nccl_check(Nccl *nccl, ncclResult_t status, const char *what) {
    if (status != ncclSuccess && status != ncclInProgress) {
        nccl_fail(nccl, what, ncclGetErrorString(status));
    }
}

// True when what was last asked of the communicator has been taken up.
static inline bool nccl_is_ready(Nccl *nccl, const char *what) {
    ncclResult_t state = ncclSuccess;
    nccl_check(nccl, ncclCommGetAsyncError(nccl->communicator, &state), what);
    nccl_check(nccl, state, what);
    return state == ncclSuccess;
}

// Until the communicator has taken up what was asked of it and, with a queue, the queue
// is done with it.
static inline void nccl_settle(Nccl *nccl, void *queue, const char *what) {
    double began = clock_seconds(), looked = began;
    while (!nccl_is_ready(nccl, what) || (queue != NULL && !gpu_queue_is_idle(queue))) {
        double now = clock_seconds(), waited = now - began;
        if (now - looked > 1) {
            began += now - looked;
        } // this process itself was stopped: the others are not to blame
        looked = now;
        if (waited > nccl->transport->timeout_seconds) {
            nccl_fail(nccl, what,
                      "a rank did not take part in time: it may have died or hang; --timeout-s sets how long "
                      "to wait");
        }
        if (waited > TRANSPORT_SPIN_SECONDS) { sleep_seconds(fmin(waited / 8, 100e-6)); }
    }
}

static inline void nccl_begin(Nccl *nccl) { nccl_check(nccl, ncclGroupStart(), "begin of messages"); }

// The messages are in the stream's queue then: what the queue does later sees what they
// brought.
static inline void nccl_end(Nccl *nccl) {
    nccl_check(nccl, ncclGroupEnd(), nccl->transport->operation);
    nccl_settle(nccl, NULL, nccl->transport->operation);
}

// A byte from everybody to everybody: connections are made and NCCL takes its memory now,
// not in the first exchange.
static inline void nccl_meet(Nccl *nccl) {
    int size = nccl->transport->size;
    char *bytes = (char *)gpu_allocate((size_t)size + 1);
    void *queue = gpu_queue_create(false);
    if (bytes == NULL) { nccl_fail(nccl, "start", "the GPU has no memory left"); }
    nccl_begin(nccl);
    for (int peer = 0; peer < size; peer++) {
        nccl_check(nccl, ncclSend(bytes, 1, ncclChar, peer, nccl->communicator, (cudaStream_t)queue),
                   "start");
        nccl_check(nccl,
                   ncclRecv(bytes + 1 + peer, 1, ncclChar, peer, nccl->communicator, (cudaStream_t)queue),
                   "start");
    }
    nccl_end(nccl);
    nccl_settle(nccl, queue, "start");
    gpu_queue_destroy(queue);
    gpu_release(bytes);
}

// All ranks, after transport_open and gpu_open. ctas: blocks of the GPU that NCCL may use
// at most; 0: as many as it likes.
static inline void nccl_open(Nccl *nccl, Transport *transport, int ctas) {
    ncclUniqueId mine;
    memset(&mine, 0, sizeof mine);
    nccl->transport = transport;
    if (transport->rank == 0) { nccl_check(nccl, ncclGetUniqueId(&mine), "start"); }
    ncclUniqueId *all = (ncclUniqueId *)calloc((size_t)transport->size, sizeof mine);
    transport_all_gather_records(transport, "start of NCCL", &mine, all, sizeof mine);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    if (ctas > 0) { config.maxCTAs = ctas; }
    nccl_check(nccl,
               ncclCommInitRankConfig(&nccl->communicator, transport->size, all[0], transport->rank, &config),
               "start");
    nccl_settle(nccl, NULL, "start");
    nccl_meet(nccl);
    free(all);
}

static inline void nccl_close(Nccl *nccl) {
    ncclCommFinalize(nccl->communicator);
    nccl_settle(nccl, NULL, "end");
    ncclCommDestroy(nccl->communicator);
}

// ---------------------------------------------------------------------------------------
// Messages: those between nccl_begin and nccl_end travel together

// To oneself, too: it is the same to NCCL, and nobody else's time.
static inline void nccl_send(Nccl *nccl, Stream *stream, int peer, const void *data, size_t bytes) {
    if (peer != nccl->transport->rank) {
        __atomic_fetch_add(&nccl->transport->bytes_sent, bytes, __ATOMIC_RELAXED);
    }
    nccl_check(nccl, ncclSend(data, bytes, ncclChar, peer, nccl->communicator, (cudaStream_t)stream->queue),
               "send");
}

static inline void nccl_receive(Nccl *nccl, Stream *stream, int peer, void *data, size_t bytes) {
    nccl_check(nccl, ncclRecv(data, bytes, ncclChar, peer, nccl->communicator, (cudaStream_t)stream->queue),
               "receive");
}

#else

typedef struct Nccl {
    Transport *transport;
    char *send, *receive;
    size_t buffer_bytes;
} Nccl;

static inline bool nccl_is_built_in(void) { return false; }
static inline void nccl_open(Nccl *nccl, Transport *transport, int ctas) {
    (void)nccl, (void)transport, (void)ctas;
}
static inline void nccl_close(Nccl *nccl) { (void)nccl; }
static inline void nccl_begin(Nccl *nccl) { (void)nccl; }
static inline void nccl_end(Nccl *nccl) { (void)nccl; }
static inline void nccl_settle(Nccl *nccl, void *queue, const char *what) {
    (void)nccl, (void)queue, (void)what;
}
static inline void nccl_send(Nccl *nccl, Stream *stream, int peer, const void *data, size_t bytes) {
    (void)nccl, (void)stream, (void)peer, (void)data, (void)bytes;
}
static inline void nccl_receive(Nccl *nccl, Stream *stream, int peer, void *data, size_t bytes) {
    (void)nccl, (void)stream, (void)peer, (void)data, (void)bytes;
}

#endif

// Plans the message buffers for vectors of this layout.
static inline void nccl_reserve(Nccl *nccl, Arena *arena, const Layout *layout) {
    size_t cell = layout->piece * (size_t)layout->size * sizeof(float), whole = cell * layout->cells;
    nccl->buffer_bytes = whole < (size_t)NCCL_BUFFER_BYTES  ? whole
                         : cell > (size_t)NCCL_BUFFER_BYTES ? cell
                                                            : (size_t)NCCL_BUFFER_BYTES;
    arena_reserve(arena, MEMORY_COMMUNICATION, "messages being received", nccl->buffer_bytes, &nccl->receive);
    arena_reserve(arena, MEMORY_COMMUNICATION, "messages being sent", nccl->buffer_bytes, &nccl->send);
}

#endif
