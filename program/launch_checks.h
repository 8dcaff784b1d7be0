// launch_checks.h: mistakes in launching the program, found before they cost anything.
//
// Open MPI binds each of one or two ranks to one core, so that more threads bring nothing. A
// launcher of another MPI starts N copies that each believe to be alone. Decisions are
// functions of numbers and of the environment, so that tests can put them on any machine.
#pragma once

#include "runtime/files.h"
#include "runtime/process_limits.h"

// What every rank tells the others at the start.
typedef struct Hello {
    int pid, threads;
    int cores;         // of its host, that ranks may use
    int capability;    // of its GPU; 0: it computes on the CPU
    size_t gpu_memory; // bytes
    char host[64], device[64], bus[32];
    char revision[32], rounding[160]; // of its program (ACCO_REVISION); how it rounds (Placement)
} Hello;

typedef struct ThreadChoice {
    int threads, cores;
    char reason[256];  // why this many
    char warning[512]; // empty: nothing to warn about
} ThreadChoice;

// A whole number >= 0 from the first of these variables, divided by blanks, that has one; else -1.
static inline long launch_environment_number(const char *names) {
    char name[64], rest;
    long value = -1, read;
    for (int length = 0; value < 0 && sscanf(names, " %63s%n", name, &length) == 1; names += length) {
        const char *text = getenv(name);
        bool is_number = text != NULL && text[0] >= '0' && text[0] <= '9';
        if (is_number && sscanf(text, "%ld%c", &read, &rest) == 1) { value = read; }
    }
    return value;
}

// The rank that the launcher gave this process, known before MPI is initialised; 0: there is no
// sign of a launcher. A process that mpirun started inside a Slurm job has the variables of both.
static inline int launch_launcher_rank(void) {
    long rank = launch_environment_number("OMPI_COMM_WORLD_RANK PMI_RANK PMIX_RANK SLURM_PROCID");
    return rank > 0 ? (int)rank : 0;
}

// Refuses to run where a launcher started several processes, but this one sees a world of
// one. has_mpi: the program was built with MPI.
static inline bool launch_check_copies(int world_size, bool has_mpi, Error *error) {
    if (world_size > 1) { return true; }
    // The last four are of launchers that start no MPI known here: PALS, Flux, jsrun, MVAPICH's.
    long started = launch_environment_number("OMPI_COMM_WORLD_SIZE PMI_SIZE SLURM_STEP_NUM_TASKS PALS_SIZE "
                                             "FLUX_JOB_SIZE JSM_NAMESPACE_SIZE MV2_COMM_WORLD_SIZE");
    if (started < 0 && launch_environment_number("LOCAL_RANK") >= 0) { // torchrun, and no batch script
        started = launch_environment_number("WORLD_SIZE");
    }
    long slurm_rank = launch_environment_number("SLURM_PROCID");
    bool certain = started >= 0 || slurm_rank > 0;
    if (started < 0 && slurm_rank >= 0) { started = launch_environment_number("SLURM_NTASKS"); }
    if (started <= 1) { return true; }
    // Task 0 of many looks the same as a batch script that calls the program directly.
    return error_set(error, "%ld %s: %suse srun --mpi=pmix%s or mpirun%s", started,
                     certain ? "independent copies were started"
                             : "tasks are in this Slurm job, and this program runs alone",
                     has_mpi ? "" : "it was built without MPI: install libopenmpi-dev, run make again, and ",
                     certain ? "" : " (for one rank srun -n 1)",
                     has_mpi ? " of the MPI that it was built with (ldd train_gpt names it)" : "");
}

// Chooses how many threads this rank computes with: a fair share of the node_cores that
// its local_ranks may use together, one at least. A narrower affinity mask (mask_cores)
// is obeyed, with a warning. asked: --threads; 0: choose here.
static inline void launch_choose_threads(int mask_cores, int node_cores, int local_ranks, int asked,
                                         ThreadChoice *choice) {
    int share = node_cores / local_ranks < 1 ? 1 : node_cores / local_ranks;
    int threads = asked > 0 ? asked : mask_cores < share ? mask_cores : share;
    choice->threads = threads;
    choice->cores = node_cores;
    choice->warning[0] = '\0';
    if (asked > 0) {
        snprintf(choice->reason, sizeof choice->reason, "asked for with --threads");
    } else if (mask_cores < share) {
        snprintf(choice->reason, sizeof choice->reason, "the launcher bound this rank to %d of %d cores",
                 mask_cores, node_cores);
    } else {
        snprintf(choice->reason, sizeof choice->reason, "%d core%s of this node for %d rank%s", node_cores,
                 plural(node_cores), local_ranks, plural(local_ranks));
    }
    if (mask_cores < share && (asked == 0 || asked > mask_cores)) {
        snprintf(choice->warning, sizeof choice->warning,
                 "this rank is bound to %d core%s where %d could be its share: start with mpirun --bind-to "
                 "none ... (under srun: --cpus-per-task=%d), or say --threads %d if the binding is meant",
                 mask_cores, plural(mask_cores), share, share, mask_cores);
    } else if (asked > share) {
        snprintf(choice->warning, sizeof choice->warning,
                 "--threads %d for each of %d rank%s is more than the %d core%s here: slower than %d", asked,
                 local_ranks, plural(local_ranks), node_cores, plural(node_cores), share);
    }
}

static inline void launch_threads(int local_ranks, int asked, ThreadChoice *choice) {
    launch_choose_threads(process_cores(), machine_cores(), local_ranks, asked, choice);
}

// warning <- what to say if messages between the ranks of a node go through /dev/shm and that
// is small, as in containers; empty: nothing. bytes: its size; 0: there is none.
static inline void launch_judge_shared_memory(size_t bytes, int local_ranks, char *warning, size_t size) {
    char text[SIZE_TEXT];
    warning[0] = '\0';
    if (local_ranks < 2 || bytes == 0 || bytes >= 1000000000) { return; }
    snprintf(warning, size,
             "/dev/shm has %s, and MPI and NCCL may carry messages between the ranks of a node there: give a "
             "container more, docker run --shm-size=2g",
             size_text(bytes, text));
}
