// agreement.h: what all ranks must agree on: that none of them has failed (only one may see a
// mistake, such as a file that is missing on its node), that they were started with the same
// options, that they hold the same parameters. All functions but the two that exit are collective.
#pragma once

#include "program/run.h"

// ---- Ending early ---------------------------------------------------------------------

// Prints the error and exits. For a process that is alone, or that the other ranks have left. Open
// MPI's launcher may hang when it has to end ranks; so this waits for them to be gone. A mistake
// that all copies of a launcher make is told by one of them; a failure is each one's own.
static inline void exit_alone(int exit_code, const Error *error) {
    if (exit_code == EXIT_USER_MISTAKE && launch_launcher_rank() != 0) { exit(0); }
    fflush(stdout);
    fprintf(stderr, "train_gpt: %s\n", error->text);
    if (transport_was_launched()) { sleep_seconds(0.5); }
    exit(exit_code);
}

static inline void exit_user_mistake(const Error *error) { exit_alone(EXIT_USER_MISTAKE, error); }

// Returns where every rank is good. Otherwise prints the first error and ends all ranks with its
// exit code, as it does with a rank that was asked to stop before training.
static inline void agree_or_exit(Run *run, bool good, int exit_code, const Error *error) {
    Transport *transport = &run->transport;
    Verdict bad;
    Error asked = {"stopped before training began, because it was asked to: there is nothing to save"};
    if (good && __atomic_load_n(&transport->asked_to_stop, __ATOMIC_RELAXED)) {
        good = false;
        exit_code = EXIT_ASKED_TO_STOP;
        error = &asked;
        signal_watch_settle(&run->signal_watch);
    }
    if (transport_first_failure(transport, "agreement", good ? 0 : exit_code, error, &bad) < 0) { return; }
    if (run_is_main(run)) {
        bool elsewhere = strcmp(bad.host, transport->host) != 0;
        fprintf(stderr, "train_gpt: %s%s%s\n", elsewhere ? bad.host : "", elsewhere ? ": " : "",
                bad.error.text);
    }
    placement_close(&run->placement);
    transport_let_launcher_read(transport);
    transport_close(transport);
    exit(bad.exit_code);
}

// ---- Exchanging facts -----------------------------------------------------------------

// Waits until rank 0 has done something long. Rank 0 itself waits no longer than usual,
// so that the run ends if another rank dies meanwhile. operation: a literal.
static inline void wait_for_rank_zero(Transport *transport, const char *operation) {
    transport_barrier_patiently(transport, operation, transport->rank == 0 ? 0 : 1e6);
}

// All ranks introduce themselves. Ranks with different options would train nonsense, and are
// refused. Returns the hellos of all ranks (size), for the life of the process.
static inline const Hello *exchange_hellos(Run *run) {
    Transport *transport = &run->transport;
    Error error = {""};
    Hello mine = {
        .pid = (int)getpid(), .threads = run->threads.threads, .cores = run->threads.cores, .host = ""};
    const Gpu *gpu = placement_gpu(&run->placement);
    snprintf(mine.device, sizeof mine.device, "%.60s", gpu != NULL ? gpu->name : "CPU");
    if (gpu != NULL) {
        mine.capability = gpu->capability;
        mine.gpu_memory = gpu->memory_total;
        memcpy(mine.bus, gpu->bus, sizeof mine.bus);
    }
    memcpy(mine.host, transport->host, sizeof mine.host);
    snprintf(mine.revision, sizeof mine.revision, "%.31s", ACCO_REVISION);
    memcpy(mine.rounding, run->placement.rounding, sizeof mine.rounding);
    Hello *all = (Hello *)transport_collect_records(transport, "greeting", &mine, sizeof mine);
    for (int rank = 0; rank < transport->size; rank++) {
        run->placement.ranks_on_gpus += all[rank].capability > 0;
    }
    __atomic_store_n(&run->signal_watch.hellos, all, __ATOMIC_RELEASE);
    Options first = run->options;
    share_from_rank_zero(transport, "sharing", &first, sizeof first);
    // --threads may follow the host, and so may the place of a --config.
    for (EACH_OPTION(option)) {
        bool may_differ =
            option->offset == offsetof(Options, threads) || option->offset == offsetof(Options, config);
        if (may_differ || option_is_same(option, &run->options, &first)) { continue; }
        char text[OPTION_VALUE_SIZE], value[64], first_value[64];
        text_excerpt(option_print_value(option, &run->options, text), value);
        text_excerpt(option_print_value(option, &first, text), first_value);
        error_set(&error,
                  "rank %d on %s was started with other options than rank 0 on %s: --%s is %s instead of %s",
                  transport->rank, transport->host, all[0].host, option->name, value, first_value);
        break;
    }
    // Muon's products are rounded by the library's choice; all else that every rank computes by
    // itself is elementwise, and has the same bits in every program.
    for (int rank = 1; rank < transport->size && run->rule->replicated; rank++) {
        char sharding[RULE_TEXT];
        if (run->options.inner != INNER_MUON || strcmp(all[rank].rounding, all[0].rounding) == 0) {
            continue;
        }
        error_set(
            &error,
            "with --optimizer %s and --inner muon every rank makes the same steps by itself, and rank %d "
            "on %s (%s) rounds them differently than rank 0 on %s (%s): use %s for such ranks",
            run->rule->name, rank, all[rank].host, all[rank].rounding, all[0].host, all[0].rounding,
            rule_list(rule_shards, sharding));
        break;
    }
    agree_or_exit(run, !error_is_set(&error), EXIT_USER_MISTAKE, &error);
    return all;
}

// With emulated links each rank of one machine is a host by itself, unless the user says otherwise.
static inline void meet_on_hosts(Transport *transport, const Options *options) {
    bool emulated = options_emulate_link(options) && transport->hosts.hosts == 1;
    int per_host = options->ranks_per_host == 0 && emulated ? 1 : (int)options->ranks_per_host;
    if (per_host > 0) { transport_meet(transport, transport->rank / per_host * per_host); }
}

// From here on messages between hosts are as slow as --link-mbit and --link-us say.
static inline void emulate_network(Transport *transport, const Options *options) {
    int sharing = groups_count(&transport->hosts, transport->hosts.host);
    transport->link_bytes_per_second = options->link_mbit * 1e6 / 8 / sharing;
    transport->link_latency = options->link_us / 1e6;
}

// ---- Parameters -----------------------------------------------------------------------

// Bytes of what a micro-batch computes with (scheduler_weights).
static inline size_t weights_bytes(const Scheduler *s) {
    return s->problem.parameter_count * (s->settings.keeps_casts ? 2 : sizeof(float));
}

enum {
    HASH_PIECE = 1 << 26, // bytes that are copied from a GPU at a time
    HASH_BLOCK = 1 << 18, // that a thread hashes at a time
    HASH_BLOCKS = HASH_PIECE / HASH_BLOCK
};

typedef struct Hashing {
    const char *bytes;
    size_t count;
    uint64_t blocks[HASH_BLOCKS];
} Hashing;

static inline void hash_task(void *context, int block, int thread) {
    (void)thread;
    Hashing *work = (Hashing *)context;
    size_t begin = (size_t)block * HASH_BLOCK, end = size_min(work->count, begin + HASH_BLOCK);
    uint64_t hash = 0;
    for (size_t i = begin; i < end; i += 8) {
        uint64_t word = 0;
        memcpy(&word, work->bytes + i, size_min(end - i, sizeof word));
        hash = random_hash(hash, word);
    }
    work->blocks[block] = hash;
}

// Continues a hash by at most HASH_PIECE bytes; every part but the last has as many. Threads share
// the blocks, whose hashes are added in order.
static inline uint64_t hash_more(ThreadPool *pool, uint64_t hash, const void *bytes, size_t count) {
    Hashing work = {.bytes = (const char *)bytes, .count = count};
    int blocks = (int)((count + HASH_BLOCK - 1) / HASH_BLOCK);
    thread_pool_run(pool, blocks, hash_task, &work);
    for (int block = 0; block < blocks; block++) { hash = random_hash(hash, work.blocks[block]); }
    return hash;
}

// Ends the run unless all ranks hold the same parameters (bytes), bit for bit, as they must at the
// start, at every checkpoint and at the end, whatever the rule. Returns their fingerprint.
static inline uint64_t check_replicas(const Scheduler *s, const void *parameters, size_t bytes) {
    Transport *transport = s->transport;
    Stream *stream = s->compute;
    uint64_t mine = bytes;
    size_t most = size_min(bytes, HASH_PIECE);
    char *copy = stream_is_on_gpu(stream) ? (char *)memory_take(1, most) : NULL; // from a GPU
    for (size_t begin = 0; begin < bytes; begin += most) {
        size_t part = size_min(bytes - begin, most);
        const char *piece = (const char *)parameters + begin;
        if (copy != NULL) {
            stream_copy(stream, copy, piece, part);
            stream_settle(stream);
        }
        mine = hash_more(stream->pool, mine, copy != NULL ? copy : piece, part);
    }
    free(copy);
    uint64_t *all = (uint64_t *)transport_collect_records(transport, "fingerprint", &mine, sizeof mine);
    for (int rank = 0; rank < transport->size; rank++) {
        if (all[rank] == all[0]) { continue; }
        transport_fail(
            transport,
            "the parameters of rank %d differ from rank 0's: their programs round "
            "differently (the start says whether builds or processors differ), or this is a bug in "
            "train_gpt. Checkpoints of before are sound",
            rank);
    }
    free(all);
    return mine;
}

// The same for the committed parameters (borrow_committed), between two commits: compute may hold
// others, as a worker of a local rule does. exact: for those that casts were made of.
static inline uint64_t check_committed(Scheduler *s, const Rule *rule, bool exact) {
    const void *committed = borrow_committed(s, rule, exact);
    size_t bytes = exact ? s->problem.parameter_count * sizeof(float) : weights_bytes(s);
    uint64_t fingerprint = check_replicas(s, committed, bytes);
    return_committed(s, committed);
    return fingerprint;
}
