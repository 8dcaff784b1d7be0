// nccl.h: stands in for the library where kernels are emulated (simt.h). The messages of
// a group travel over MPI when the group ends.
//
// Like the library it may answer that a call is still in progress, which the program must
// wait for. Unlike the library it never fails; what it refuses are habits that cost time
// on a GPU: to leave the number of thread blocks open, and messages that begin anywhere.
#pragma once

#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <vector>

#include "cuda_bf16.h"
#include "cuda_runtime.h"

#define NCCL_MAJOR 0
#define NCCL_MINOR 0
#define NCCL_PATCH 0

typedef enum ncclResult_t { ncclSuccess = 0, ncclInProgress = 7 } ncclResult_t;
typedef enum ncclDataType_t { ncclChar = 0, ncclFloat = 7, ncclBfloat16 = 9 } ncclDataType_t;
typedef enum ncclRedOp_t { ncclSum = 0 } ncclRedOp_t;
struct ncclUniqueId {
    char internal[128];
};
struct ncclConfig_t {
    int blocking, maxCTAs, cgaClusterSize;
};
#define NCCL_CONFIG_INITIALIZER \
    { 1, 0, 4 }

struct SimtMessage {
    bool is_send;
    void *data;
    size_t bytes;
    int peer;
};

// A collective of the library, done when the group ends.
struct SimtCollective {
    bool reduces;
    const void *in;
    void *out;
    size_t count; // elements that each rank receives, or sends
    ncclDataType_t type;
};

struct SimtCommunicator {
    MPI_Comm world;
    int rank;
    bool busy; // ncclCommGetAsyncError must say once more that a call is in progress
    std::vector<SimtMessage> messages;
    std::vector<SimtCollective> collectives;
};
typedef SimtCommunicator *ncclComm_t;

// The communicator whose group is open in this thread.
inline ncclComm_t &simt_open_group() {
    static thread_local ncclComm_t communicator = nullptr;
    return communicator;
}

inline const char *ncclGetErrorString(ncclResult_t) { return "no error"; }
inline const char *ncclGetLastError(ncclComm_t) { return ""; }
// The id says which rank of the world has made it.
inline ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    memset(id, 7, sizeof *id);
    memcpy(id->internal + 4, &rank, sizeof rank);
    return ncclSuccess;
}
// NCCL's threads run until its communicators are destroyed, and CUDA ends before them when
// the process does. So an exit in good order, behind MPI_Finalize, has none left.
inline int &simt_communicators() {
    static int count = 0;
    return count;
}
inline void simt_check_communicators() {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized && simt_communicators() > 0) { simt_fail("the process ends before NCCL does"); }
}
inline void simt_check_communicators_at_exit() {
    static const int registered = atexit(simt_check_communicators);
    (void)registered;
}
// All ranks of the world open their communicators at the same time.
inline ncclResult_t ncclCommInitRankConfig(ncclComm_t *communicator, int size, ncclUniqueId id, int rank,
                                           ncclConfig_t *config) {
    int first, found, number;
    simt_check_communicators_at_exit();
    simt_communicators()++;
    memcpy(&first, id.internal + 4, sizeof first);
    if (id.internal[0] != 7) { simt_fail("NCCL starts with an id that no rank has made"); }
    if (config->cgaClusterSize != 1) { simt_fail("blocks of NCCL must begin together"); }
    if (config->maxCTAs < 1) { simt_fail("NCCL may take as many processors as it likes"); }
    simt_processors_taken() += config->maxCTAs;
    *communicator = new SimtCommunicator{MPI_COMM_NULL, rank, true, {}, {}};
    MPI_Comm_split(MPI_COMM_WORLD, first, rank, &(*communicator)->world);
    MPI_Comm_size((*communicator)->world, &found);
    MPI_Comm_rank((*communicator)->world, &number);
    if (found != size || number != rank) { simt_fail("NCCL starts with ranks that do not fit together"); }
    return ncclInProgress;
}
inline ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t *state) {
    *state = communicator->busy ? ncclInProgress : ncclSuccess;
    communicator->busy = false;
    return ncclSuccess;
}
inline ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
inline ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
    MPI_Comm_free(&communicator->world);
    delete communicator;
    simt_communicators()--;
    return ncclSuccess;
}

inline ncclResult_t ncclGroupStart() { return ncclSuccess; }
inline ncclResult_t simt_message(ncclComm_t communicator, bool is_send, void *data, size_t bytes, int peer) {
    enum { SIMT_NCCL_LINE = 128 };
    if (communicator->busy) { simt_fail("a message while an earlier call of NCCL is in progress"); }
    if (bytes > 1 && (uintptr_t)data % SIMT_NCCL_LINE != 0) {
        simt_fail("a message that does not begin at a multiple of 128 bytes");
    }
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
inline ncclResult_t simt_collective(ncclComm_t communicator, const SimtCollective &collective) {
    if (communicator->busy) { simt_fail("a collective while an earlier call of NCCL is in progress"); }
    simt_open_group() = communicator;
    communicator->collectives.push_back(collective);
    return ncclSuccess;
}
inline ncclResult_t ncclReduceScatter(const void *in, void *out, size_t count, ncclDataType_t type,
                                      ncclRedOp_t, ncclComm_t communicator, cudaStream_t) {
    return simt_collective(communicator, {true, in, out, count, type});
}
inline ncclResult_t ncclAllGather(const void *in, void *out, size_t count, ncclDataType_t type,
                                  ncclComm_t communicator, cudaStream_t) {
    return simt_collective(communicator, {false, in, out, count, type});
}

// Adds in fp32, from the last rank to the first: another order than the program's, as the
// library may choose.
inline void simt_run_collective(ncclComm_t communicator, const SimtCollective &work) {
    int size;
    MPI_Comm_size(communicator->world, &size);
    size_t element = work.type == ncclFloat  ? 4
                     : work.type == ncclChar ? 1
                                             : 2,
           mine = work.count * element, all = mine * (size_t)size;
    if (!work.reduces) {
        std::vector<char> sent((const char *)work.in, (const char *)work.in + mine); // may be part of `out`
        MPI_Allgather(sent.data(), (int)mine, MPI_BYTE, work.out, (int)mine, MPI_BYTE, communicator->world);
        return;
    }
    std::vector<char> parts(all);
    MPI_Alltoall(work.in, (int)mine, MPI_BYTE, parts.data(), (int)mine, MPI_BYTE, communicator->world);
    for (size_t i = 0; i < work.count; i++) {
        float sum = 0;
        for (int rank = size - 1; rank >= 0; rank--) {
            const char *part = parts.data() + (size_t)rank * mine + i * element;
            uint32_t bits = 0;
            memcpy((char *)&bits + 4 - element, part, element);
            float value;
            memcpy(&value, &bits, 4);
            sum += value;
        }
        if (work.type == ncclFloat) {
            ((float *)work.out)[i] = sum;
        } else {
            ((__nv_bfloat16 *)work.out)[i] = __float2bfloat16_rn(sum);
        }
    }
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
    for (const SimtCollective &work : communicator->collectives) { simt_run_collective(communicator, work); }
    communicator->collectives.clear();
    communicator->busy = true;
    return ncclInProgress;
}
