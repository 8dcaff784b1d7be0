// transport_mpi.h: the link over MPI, or a world of one. The only file with mpi.h.
//
// Only MPI_Isend, MPI_Irecv and MPI_Test carry vectors and records: Open MPI 4.1 makes no progress
// on non-blocking collectives unless it is polled, spins in the blocking ones, and chooses the
// order of summation by itself. A build without MPI is always a world of one rank.
#pragma once

#include "comm/transport.h"

// Whether a launcher (mpirun, srun) started this process: it sets one of these variables.
// Otherwise there are no other ranks, and MPI is not even initialised.
static inline bool transport_was_launched(void) {
    static const char *const variables[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK",
                                            "MPI_LOCALNRANKS"};
    for (size_t i = 0; i < sizeof variables / sizeof variables[0]; i++) {
        if (getenv(variables[i]) != NULL) { return true; }
    }
    return false;
}

#ifdef ACCO_HAVE_MPI
// Without the C++ bindings, withdrawn from the standard, that some versions still have.
#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#endif
#include <mpi.h>

enum { TRANSPORT_MPI_TAG = 7 };

static inline MPI_Request *transport_mpi_request(LinkRequest *request) {
    return (MPI_Request *)request->words;
}

static inline void transport_mpi_start(void *state, LinkRequest *request, bool is_send, int peer, void *data,
                                       size_t bytes) {
    (void)state;
    MPI_Request *started = transport_mpi_request(request);
    if (is_send) {
        MPI_Isend(data, (int)bytes, MPI_BYTE, peer, TRANSPORT_MPI_TAG, MPI_COMM_WORLD, started);
    } else {
        MPI_Irecv(data, (int)bytes, MPI_BYTE, peer, TRANSPORT_MPI_TAG, MPI_COMM_WORLD, started);
    }
}

static inline bool transport_mpi_is_done(void *state, LinkRequest *request) {
    (void)state;
    int done = 0;
    MPI_Test(transport_mpi_request(request), &done, MPI_STATUS_IGNORE);
    return done != 0;
}

static inline void transport_mpi_end(void *state, int exit_code) {
    (void)state;
    if (exit_code == 0) {
        MPI_Finalize();
    } else {
        MPI_Abort(MPI_COMM_WORLD, exit_code);
    }
}

static inline bool transport_has_mpi(void) { return true; }

// text <- name and version of the MPI library in use, which need not be initialised.
static inline void transport_mpi_version(char *text, size_t size) {
    char library[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    MPI_Get_library_version(library, &length);
    snprintf(text, size, "%.*s", (int)strcspn(library, ",\n"), library);
}

#else

static inline bool transport_has_mpi(void) { return false; }

static inline void transport_mpi_version(char *text, size_t size) {
    snprintf(text, size, "none: a world of one rank");
}

#endif

// Joins the other ranks. Without a launcher, or without MPI in the build, it opens a world of
// one rank. False, with the reason, if MPI cannot be used.
static inline bool transport_open(Transport *transport, Error *error) {
    (void)error;
#ifdef ACCO_HAVE_MPI
    if (!transport_was_launched()) {
        transport_open_alone(transport, "not started by mpirun or srun");
        return true;
    }
    // What the user has set stays. By default Open MPI's TCP sends the rest of a long message in
    // one piece, behind which the go-ahead for the other direction waits: both together take a
    // third longer (dev/results). Our messages of about a megabyte are sent without a go-ahead.
    setenv("OMPI_MCA_btl_tcp_eager_limit", "2000000", 0);
    setenv("OMPI_MCA_btl_tcp_max_send_size", "2000000", 0);
    setenv("HWLOC_COMPONENTS", "-gl", 0); // looking for GPUs through X displays can take seconds
    int provided = 0, rank, size;
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &provided) != MPI_SUCCESS ||
        provided < MPI_THREAD_SERIALIZED) {
        return error_set(error, "this MPI library does not allow calls from a thread "
                                "(MPI_THREAD_SERIALIZED): build it with thread support");
    }
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    const Link link = {.name = "MPI",
                       .start = transport_mpi_start,
                       .is_done = transport_mpi_is_done,
                       .end = transport_mpi_end};
    transport_prepare(transport, rank, size, 1, &link, "started by an MPI launcher");
    MPI_Comm node;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node);
    MPI_Comm_rank(node, &transport->local_rank);
    MPI_Comm_size(node, &transport->local_size);
    int leader = rank;
    MPI_Bcast(&leader, 1, MPI_INT, 0, node); // ranks keep their order in `node`: 0 is the lowest
    MPI_Comm_free(&node);
    transport_meet(transport, leader);
#else
    transport_open_alone(transport, "built without MPI");
#endif
    return true;
}
