// nccl.h: stands in for the library where kernels are emulated (simt.h). The messages of
// a group travel over MPI when the group ends.
//
// Like the library it may answer that a call is still in progress, which the program must
// wait for. Unlike the library it refuses nothing and never fails.
#ifndef ACCO_SIMT_NCCL_H
#define ACCO_SIMT_NCCL_H

#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <vector>

#include "cuda_runtime.h"

typedef enum ncclResult_t { ncclSuccess = 0, ncclInProgress = 7 } ncclResult_t;
typedef enum ncclDataType_t { ncclChar = 0 } ncclDataType_t;
struct ncclUniqueId {
    char internal[128];
};
struct ncclConfig_t {
    int blocking, maxCTAs;
};
#define NCCL_CONFIG_INITIALIZER \
    { 1, 0 }

struct SimtMessage {
    bool is_send;
    void *data;
    size_t bytes;
    int peer;
};

struct SimtCommunicator {
    MPI_Comm world;
    int rank;
    bool busy; // ncclCommGetAsyncError must say once more that a call is in progress
    std::vector<SimtMessage> messages;
};
typedef SimtCommunicator *ncclComm_t;

// The communicator whose group is open in this thread.
inline ncclComm_t &simt_open_group() {
    static thread_local ncclComm_t communicator = nullptr;
    return communicator;
}

inline const char *ncclGetErrorString(ncclResult_t) { return "no error"; }
inline const char *ncclGetLastError(ncclComm_t) { return ""; }
inline ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    memset(id, 7, sizeof *id);
    return ncclSuccess;
}
inline ncclResult_t ncclCommInitRankConfig(ncclComm_t *communicator, int, ncclUniqueId id, int rank,
                                           ncclConfig_t *) {
    if (id.internal[0] != 7) { simt_fail("NCCL starts with an id that is not the one of rank 0"); }
    *communicator = new SimtCommunicator{MPI_COMM_WORLD, rank, true, {}};
    return ncclInProgress;
}
inline ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t *state) {
    *state = communicator->busy ? ncclInProgress : ncclSuccess;
    communicator->busy = false;
    return ncclSuccess;
}
inline ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
inline ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
    delete communicator;
    return ncclSuccess;
}

inline ncclResult_t ncclGroupStart() { return ncclSuccess; }
inline ncclResult_t simt_message(ncclComm_t communicator, bool is_send, void *data, size_t bytes, int peer) {
    if (communicator->busy) { simt_fail("a message while an earlier call of NCCL is in progress"); }
    simt_open_group() = communicator;
    communicator->messages.push_back({is_send, data, bytes, peer});
    return ncclSuccess;
}
inline ncclResult_t ncclSend(const void *data, size_t bytes, ncclDataType_t, int peer,
                             ncclComm_t communicator, cudaStream_t) {
    return simt_message(communicator, true, (void *)data, bytes, peer);
}
inline ncclResult_t ncclRecv(void *data, size_t bytes, ncclDataType_t, int peer, ncclComm_t communicator,
                             cudaStream_t) {
    return simt_message(communicator, false, data, bytes, peer);
}
inline ncclResult_t ncclGroupEnd() {
    enum { SIMT_NCCL_TAG = 99 };
    ncclComm_t communicator = simt_open_group();
    std::vector<MPI_Request> requests;
    for (const SimtMessage &message : communicator->messages) {
        MPI_Request request;
        if (message.is_send) {
            MPI_Isend(message.data, (int)message.bytes, MPI_BYTE, message.peer, SIMT_NCCL_TAG,
                      communicator->world, &request);
        } else {
            MPI_Irecv(message.data, (int)message.bytes, MPI_BYTE, message.peer, SIMT_NCCL_TAG,
                      communicator->world, &request);
        }
        requests.push_back(request);
    }
    MPI_Waitall((int)requests.size(), requests.data(), MPI_STATUSES_IGNORE);
    communicator->messages.clear();
    communicator->busy = true;
    return ncclInProgress;
}

#endif
