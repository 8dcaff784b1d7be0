// nccl.h: messages between GPUs over NCCL, and every wait for them. The only file that
// includes nccl.h of the library; collectives_nccl.h builds the collectives.
//
// The communicator is non-blocking, and nothing here waits inside NCCL or CUDA:
// nccl_settle polls both, with a deadline. When it passes or NCCL reports an error,
// transport_fail ends all ranks. ncclCommAbort is not used: it would wait for ranks that
// may have died.
//
// NCCL needs a GPU of its own for every rank. program/placement.h decides whether it is
// used. A build without NCCL never creates a communicator.
#ifndef ACCO_COMM_NCCL_H
#define ACCO_COMM_NCCL_H

#include "comm/transport.h"

#ifdef ACCO_HAVE_NCCL
#include <nccl.h>

typedef struct Nccl {
    ncclComm_t communicator;
    Transport *transport;
    char *send, *receive; // (buffer_bytes): reserved by collectives_nccl.h
    size_t buffer_bytes;
} Nccl;

static inline bool nccl_is_built_in(void) { return true; }

// Fails the job. Does not return.
static inline void nccl_fail(Nccl *nccl, const char *what, const char *why) {
    const char *last = nccl->communicator != NULL ? ncclGetLastError(nccl->communicator) : "";
    transport_fail(nccl->transport, "NCCL, %s: %s%s%s", what, why, last[0] != '\0' ? "; " : "", last);
}

// Fails the job unless the call succeeded or goes on in the background.
static inline void nccl_check(Nccl *nccl, ncclResult_t status, const char *what) {
    if (status != ncclSuccess && status != ncclInProgress) {
        nccl_fail(nccl, what, ncclGetErrorString(status));
    }
}

// Whether NCCL has accepted the last call on the communicator.
static inline bool nccl_is_ready(Nccl *nccl, const char *what) {
    ncclResult_t state = ncclSuccess;
    nccl_check(nccl, ncclCommGetAsyncError(nccl->communicator, &state), what);
    nccl_check(nccl, state, what);
    return state == ncclSuccess;
}

// Waits until NCCL has accepted the last call and, with a queue, until everything in that
// CUDA queue has ended. what: for messages.
static inline void nccl_settle(Nccl *nccl, void *queue, const char *what) {
    double began = clock_seconds(), looked = began;
    while (!nccl_is_ready(nccl, what) || (queue != NULL && !gpu_queue_is_idle(queue))) {
        double now = clock_seconds(), waited = now - began;
        if (now - looked > 1) { began += now - looked; } // this process was stopped: see transport_wait
        looked = now;
        if (waited > nccl->transport->timeout_seconds) {
            nccl_fail(nccl, what,
                      "a rank did not take part in time: it may have died or hang; --timeout-s sets how "
                      "long to wait");
        }
        if (waited > TRANSPORT_SPIN_SECONDS) { sleep_seconds(fmin(waited / 8, 100e-6)); }
    }
}

// Messages between nccl_begin and nccl_end travel together.
static inline void nccl_begin(Nccl *nccl) { nccl_check(nccl, ncclGroupStart(), "begin of messages"); }

// On return the messages are in the stream's queue: what the queue does later sees the
// data received.
static inline void nccl_end(Nccl *nccl) {
    nccl_check(nccl, ncclGroupEnd(), nccl->transport->operation);
    nccl_settle(nccl, NULL, nccl->transport->operation);
}

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

// ---------------------------------------------------------------------------------------
// Opening

// Sends a byte from every rank to every rank, so that NCCL connects them and takes its
// memory now, and not in the first collective.
static inline void nccl_connect(Nccl *nccl) {
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

// All ranks call it, after transport_open and gpu_open. ctas: at most this many thread
// blocks of the GPU for NCCL; 0: NCCL chooses.
static inline void nccl_open(Nccl *nccl, Transport *transport, int ctas) {
    ncclUniqueId mine; // of rank 0: how the others find it
    memset(&mine, 0, sizeof mine);
    nccl->transport = transport;
    if (transport->rank == 0) { nccl_check(nccl, ncclGetUniqueId(&mine), "start"); }
    ncclUniqueId *all =
        (ncclUniqueId *)transport_collect_records(transport, "start of NCCL", &mine, sizeof mine);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    if (ctas > 0) { config.maxCTAs = ctas; }
    nccl_check(nccl,
               ncclCommInitRankConfig(&nccl->communicator, transport->size, all[0], transport->rank, &config),
               "start");
    nccl_settle(nccl, NULL, "start");
    nccl_connect(nccl);
    free(all);
}

static inline void nccl_close(Nccl *nccl) {
    ncclCommFinalize(nccl->communicator);
    nccl_settle(nccl, NULL, "end");
    ncclCommDestroy(nccl->communicator);
}

#else // without NCCL: nccl_is_built_in() is false, so nobody calls the rest

typedef struct Nccl {
    Transport *transport;
    char *send, *receive;
    size_t buffer_bytes;
} Nccl;

// clang-format off
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
// clang-format on

#endif

#endif
