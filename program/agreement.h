// agreement.h: what all ranks must agree on: that none of them has failed, that they were
// started with the same options, that they hold the same parameters.
//
// Until memory is allocated, a mistake of the user ends all ranks with one line and exit
// code 2. Some mistakes only one rank can see, such as a file that is missing on its
// node; therefore all ranks meet in agree_or_exit, and leave in order. All functions but
// exit_user_mistake are collective: every rank calls them, in the same order.
#ifndef ACCO_PROGRAM_AGREEMENT_H
#define ACCO_PROGRAM_AGREEMENT_H

#include "comm/verdict.h"
#include "program/run.h"

// ---------------------------------------------------------------------------------------
// Ending early

// Prints the mistake and exits with 2. For a process that is alone, or that the other ranks
// have left to do what takes no more than one. Open MPI's launcher may hang when it has to
// end ranks; so this one waits for them to be gone.
static inline void exit_user_mistake(const Error *error) {
    if (launch_launcher_rank(getenv) != 0) { exit(0); }
    fflush(stdout);
    fprintf(stderr, "train_gpt: %s\n", error->text);
    if (transport_was_launched()) { sleep_seconds(0.5); }
    exit(EXIT_USER_MISTAKE);
}

// Returns where every rank's exit_code is 0. Otherwise prints the error of the first rank
// that has one, and ends all ranks with its exit code. Until training begins a rank that
// was asked to stop does so here.
static inline void agree_or_exit(Run *run, int exit_code, const Error *error) {
    Transport *transport = &run->transport;
    Verdict bad;
    Error asked = {"stopped before training began, because it was asked to: there is nothing to save"};
    if (exit_code == 0 && signal_watch_is_asked(&run->signal_watch)) {
        exit_code = EXIT_ASKED_TO_STOP;
        error = &asked;
    }
    if (transport_first_failure(transport, "agreement", exit_code, error, &bad) < 0) { return; }
    bool elsewhere = strcmp(bad.host, transport->host) != 0;
    if (run_is_main(run)) {
        fprintf(stderr, "train_gpt: %s%s%s\n", elsewhere ? bad.host : "", elsewhere ? ": " : "",
                bad.error.text);
    }
    run_lock_release(&run->lock);
    placement_close(&run->placement);
    transport_close(transport);
    exit(bad.exit_code);
}

// Ends all ranks where one was started with another command than rank 0.
static inline void agree_on_command(Run *run) {
    Transport *transport = &run->transport;
    Error error = {""};
    int32_t mine = (int32_t)run->options.command;
    int32_t *all = (int32_t *)transport_collect_records(transport, "commands", &mine, sizeof mine);
    if (mine != all[0]) {
        error_set(&error, "rank %d was started with the command %s and rank 0 with %s: start all ranks alike",
                  transport->rank, command_names[mine], command_names[all[0]]);
    }
    free(all);
    agree_or_exit(run, error_is_set(&error) ? EXIT_USER_MISTAKE : 0, &error);
}

// ---------------------------------------------------------------------------------------
// Exchanging facts

// Waits until rank 0 has done something that takes longer than any message. Rank 0 itself
// waits no longer than usual, so that the job ends when another rank is gone meanwhile.
// operation: a literal, for messages.
static inline void wait_for_rank_zero(Run *run, const char *operation) {
    Transport *transport = &run->transport;
    double timeout_seconds = transport->timeout_seconds;
    if (!run_is_main(run)) { transport->timeout_seconds = 1e6; }
    transport_barrier(transport, operation); // sleeps while it waits
    transport->timeout_seconds = timeout_seconds;
}

// Overwrites `bytes` (count) on all ranks with those of rank 0.
static inline void share_from_rank_zero(Run *run, void *bytes, size_t count) {
    void *all = transport_collect_records(&run->transport, "sharing", bytes, count);
    memcpy(bytes, all, count);
    free(all);
}

// All ranks: the mean of what each of them gives.
static inline double mean_over_ranks(Transport *transport, double value) {
    double sum = 0, *all = (double *)transport_collect_records(transport, "means", &value, sizeof value);
    for (int rank = 0; rank < transport->size; rank++) { sum += all[rank]; }
    free(all);
    return sum / transport->size;
}

// Continues a hash. Every part but the last must be a multiple of 4 bytes.
static inline uint64_t hash_more(uint64_t hash, const void *bytes, size_t count) {
    for (size_t i = 0; i < count; i += 4) {
        uint32_t word = 0;
        memcpy(&word, (const char *)bytes + i, size_min(count - i, sizeof word));
        hash = random_hash(hash, word);
    }
    return hash;
}

static inline uint64_t hash_bytes(const void *bytes, size_t count) { return hash_more(count, bytes, count); }

// What every rank must have been given alike: all but --threads, which may follow its host.
static inline json_t *common_options(const Options *options) {
    json_t *object = options_as_json(options);
    json_object_del(object, option_of(offsetof(Options, threads))->name);
    return object;
}

static inline uint64_t hash_options(const Options *options) {
    json_t *object = common_options(options);
    char *text = json_dumps(object, JSON_COMPACT | JSON_SORT_KEYS);
    uint64_t hash = hash_bytes(text, strlen(text));
    free(text);
    json_decref(object);
    return hash;
}

// What every rank tells the others at the start.
typedef struct Hello {
    uint64_t options_hash;
    int pid, threads, on_gpu;
    char host[64], device[64];
    char interfaces[96]; // of its host: launch_interfaces
} Hello;

// Ends all ranks, of which some have other options than rank 0: names the first option.
static inline void refuse_other_options(Run *run, const Hello *hellos) {
    Options *first = (Options *)malloc(sizeof *first);
    Error error = {""};
    assert(first != NULL);
    *first = run->options;
    share_from_rank_zero(run, first, sizeof *first);
    json_t *mine = common_options(&run->options), *theirs = common_options(first);
    for (int i = 0; i < OPTION_COUNT_OF_TABLE && !error_is_set(&error); i++) {
        const char *name = option_table[i].name;
        const json_t *here = json_object_get(mine, name), *there = json_object_get(theirs, name);
        char here_text[64], there_text[64];
        if (here == NULL || json_equal(here, there)) { continue; }
        char *here_value = json_dumps(here, JSON_ENCODE_ANY),
             *there_value = json_dumps(there, JSON_ENCODE_ANY);
        error_set(&error,
                  "rank %d on %s was started with other options than rank 0 on %s: --%s is %s instead of %s",
                  run->transport.rank, hellos[run->transport.rank].host, hellos[0].host, name,
                  text_excerpt(here_value, here_text), text_excerpt(there_value, there_text));
        free(here_value);
        free(there_value);
    }
    agree_or_exit(run, error_is_set(&error) ? EXIT_USER_MISTAKE : 0, &error);
    json_decref(mine);
    json_decref(theirs);
    free(first);
}

// Who waits for signals learns which processes of this host are ranks.
static inline void meet_processes(Run *run, const Hello *hellos) {
    const Transport *transport = &run->transport;
    int *pids = (int *)calloc((size_t)transport->size, sizeof *pids);
    for (int rank = 0; pids != NULL && rank < transport->size; rank++) {
        bool here = strcmp(hellos[rank].host, hellos[transport->rank].host) == 0;
        pids[rank] = here ? hellos[rank].pid : 0;
    }
    signal_watch_meet(&run->signal_watch, pids);
}

// Refuses ranks that were started with different options, which would otherwise train
// nonsense in silence. Returns the hellos of all ranks (size), for the caller to free.
static inline Hello *exchange_hellos(Run *run) {
    Transport *transport = &run->transport;
    Hello mine;
    memset(&mine, 0, sizeof mine);
    mine.options_hash = hash_options(&run->options);
    mine.pid = (int)getpid();
    mine.threads = run->threads.threads;
    mine.on_gpu = run->placement.on_gpu ? 1 : 0;
    snprintf(mine.device, sizeof mine.device, "%.60s", mine.on_gpu ? run->placement.gpu.name : "CPU");
    memcpy(mine.host, transport->host, sizeof mine.host);
    launch_interfaces(mine.interfaces, sizeof mine.interfaces);
    Hello *all = (Hello *)transport_collect_records(transport, "greeting", &mine, sizeof mine);
    meet_processes(run, all);
    bool alike = true;
    for (int rank = 1; rank < transport->size; rank++) {
        alike = alike && all[rank].options_hash == all[0].options_hash;
    }
    if (!alike) { refuse_other_options(run, all); }
    for (int rank = 0; rank < transport->size; rank++) { run->placement.ranks_on_gpus += all[rank].on_gpu; }
    return all;
}

// ---------------------------------------------------------------------------------------
// Parameters

// Bytes of what a micro-batch computes with (scheduler_weights).
static inline size_t weights_bytes(const Run *run) {
    return run->table.parameter_count * (run->scheduler.settings.keeps_casts ? 2 : sizeof(float));
}

enum { HASH_PIECE = 1 << 26 }; // bytes that are copied from a GPU at a time

// data (bytes), on the device.
static inline uint64_t hash_on_device(Run *run, const void *data, size_t bytes) {
    if (!run->placement.on_gpu) { return hash_bytes(data, bytes); }
    size_t most = size_min(bytes, HASH_PIECE);
    char *piece = (char *)malloc(most);
    uint64_t hash = bytes;
    for (size_t begin = 0; begin < bytes; begin += most) {
        size_t part = size_min(bytes - begin, most);
        stream_copy(run->scheduler.compute, piece, (const char *)data + begin, part);
        stream_settle(run->scheduler.compute);
        hash = hash_more(hash, piece, part);
    }
    free(piece);
    return hash;
}

// Fails the job unless all ranks hold the same parameters (bytes), bit for bit: at the start
// and at the end of training they must, whatever the rule does. Returns their fingerprint.
static inline uint64_t check_replicas(Run *run, const void *parameters, size_t bytes) {
    Transport *transport = &run->transport;
    uint64_t mine = hash_on_device(run, parameters, bytes);
    uint64_t *all = (uint64_t *)transport_collect_records(transport, "fingerprint", &mine, sizeof mine);
    for (int rank = 0; rank < transport->size; rank++) {
        if (all[rank] == all[0]) { continue; }
        transport_fail(transport, "the parameters of rank %d differ from those of rank 0: a bug in train_gpt",
                       rank);
    }
    free(all);
    return mine;
}

#endif
