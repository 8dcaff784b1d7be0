// agreement.h: what all ranks must agree on before they train together: that none of them has failed, that they were
// started with the same options, that they hold the same parameters.
#ifndef ACCO_PROGRAM_AGREEMENT_H
#define ACCO_PROGRAM_AGREEMENT_H

#include "comm/verdict.h"
#include "program/run.h"

// ---------------------------------------------------------------------------------------
// Ending early

// Before MPI: prints once per job and exits 2. Open MPI's launcher may hang when many
// ranks fail at once or when it has to end them, so the others leave in peace, and rank 0
// fails when they have gone.
static inline void exit_user_mistake(const Error *error) {
    if (launch_launcher_rank(getenv) != 0) { exit(0); }
    fprintf(stderr, "train_gpt: %s\n", error->text);
    if (transport_was_launched()) { sleep_seconds(0.5); }
    exit(EXIT_USER_MISTAKE);
}

// If any rank has an error the first such rank's is printed, and all end with its exit
// code.
static inline void agree_or_exit(Run *run, int exit_code, const Error *error) {
    Transport *transport = &run->transport;
    Verdict bad;
    if (transport_first_failure(transport, "agreement", exit_code, error, &bad) < 0) { return; }
    bool elsewhere = strcmp(bad.host, transport->host) != 0;
    if (run_is_main(run)) {
        fprintf(stderr, "train_gpt: %s%s%s\n", elsewhere ? bad.host : "", elsewhere ? ": " : "",
                bad.error.text);
    }
    transport_close(transport);
    exit(bad.exit_code);
}

// ---------------------------------------------------------------------------------------
// Agreement between ranks

// What every rank tells the others at the start.
typedef struct Hello {
    uint64_t options_hash;
    int pid, threads, on_gpu;
    char host[64], device[64];
} Hello;

// Goes on with `hash`; all parts but the last are whole words.
static inline uint64_t hash_more(uint64_t hash, const void *bytes, size_t count) {
    for (size_t i = 0; i < count; i += 4) {
        uint32_t word = 0;
        memcpy(&word, (const char *)bytes + i, count - i < sizeof word ? count - i : sizeof word);
        hash = random_hash(hash, word);
    }
    return hash;
}

static inline uint64_t hash_bytes(const void *bytes, size_t count) { return hash_more(count, bytes, count); }

static inline uint64_t hash_options(const Options *options) {
    json_t *object = options_as_json(options);
    char *text = json_dumps(object, JSON_COMPACT | JSON_SORT_KEYS);
    uint64_t hash = hash_bytes(text, strlen(text));
    free(text);
    json_decref(object);
    return hash;
}

// Ranks that run with other options would train nonsense without a word: refused. Returns
// all hellos (size), for the caller to free.
static inline Hello *greet(Run *run) {
    Transport *transport = &run->transport;
    Hello mine;
    memset(&mine, 0, sizeof mine);
    mine.options_hash = hash_options(&run->options);
    mine.pid = (int)getpid();
    mine.threads = run->threads.threads;
    mine.on_gpu = run->placement.on_gpu ? 1 : 0;
    snprintf(mine.device, sizeof mine.device, "%.60s", mine.on_gpu ? run->placement.gpu.name : "CPU");
    memcpy(mine.host, transport->host, sizeof mine.host);
    Hello *all = (Hello *)calloc((size_t)transport->size, sizeof *all);
    transport_all_gather_records(transport, "greeting", &mine, all, sizeof mine);
    Error error = {""};
    for (int rank = 1; rank < transport->size && !error_is_set(&error); rank++) {
        if (all[rank].options_hash == all[0].options_hash) { continue; }
        error_set(&error, "rank %d on %s was started with other options than rank 0 on %s", rank,
                  all[rank].host, all[0].host);
    }
    agree_or_exit(run, error_is_set(&error) ? EXIT_USER_MISTAKE : 0, &error);
    for (int rank = 0; rank < transport->size; rank++) { run->placement.ranks_on_gpus += all[rank].on_gpu; }
    return all;
}

// The parameters that compute uses (parameter_count), where the host can read them. The
// streams have been started and are idle.
static inline float *borrow_host_parameters(Run *run) {
    Scheduler *s = &run->scheduler;
    if (!run->placement.on_gpu) { return s->parameters.data; }
    size_t bytes = run->table.parameter_count * sizeof(float);
    float *copy = (float *)malloc(bytes);
    if (copy == NULL) {
        transport_fail(&run->transport, "no memory for a copy of the parameters: %zu bytes", bytes);
    }
    stream_copy(s->compute, copy, s->parameters.data, bytes);
    stream_settle(s->compute);
    return copy;
}

static inline void return_host_parameters(Run *run, float *parameters) {
    if (run->placement.on_gpu) { free(parameters); }
}

enum { HASH_PIECE = 1 << 24 }; // elements that a GPU's parameters are copied at a time

static inline uint64_t hash_parameters(Run *run, const float *parameters) {
    size_t count = run->table.parameter_count;
    if (!run->placement.on_gpu) { return hash_bytes(parameters, count * sizeof(float)); }
    size_t most = count < (size_t)HASH_PIECE ? count : (size_t)HASH_PIECE;
    float *piece = (float *)malloc(most * sizeof(float));
    uint64_t hash = count * sizeof(float);
    for (size_t begin = 0; begin < count; begin += most) {
        size_t part = count - begin < most ? count - begin : most;
        stream_copy(run->scheduler.compute, piece, parameters + begin, part * sizeof(float));
        stream_settle(run->scheduler.compute);
        hash = hash_more(hash, piece, part * sizeof(float));
    }
    free(piece);
    return hash;
}

// All ranks must hold the same parameters, bit for bit: at the start, and at the end
// whatever the rule did. Returns their fingerprint.
static inline uint64_t check_replicas(Run *run, const float *parameters) {
    Transport *transport = &run->transport;
    uint64_t mine = hash_parameters(run, parameters);
    uint64_t *all = (uint64_t *)calloc((size_t)transport->size, sizeof mine);
    transport_all_gather_records(transport, "fingerprint", &mine, all, sizeof mine);
    for (int rank = 0; rank < transport->size; rank++) {
        if (all[rank] != all[0]) {
            transport_fail(transport, "rank %d holds other parameters than rank 0: this is a bug of ours",
                           rank);
        }
    }
    free(all);
    return mine;
}

// All ranks get rank 0's.
static inline void share_from_rank_zero(Run *run, void *bytes, size_t count) {
    char *all = (char *)malloc((size_t)run->transport.size * count);
    transport_all_gather_records(&run->transport, "sharing", bytes, all, count);
    memcpy(bytes, all, count);
    free(all);
}

// The run directory, its files and the effective configuration; rank 0, but an error ends
// everybody. All ranks learn its name.
static inline void open_run_directory(Run *run) {
    Error error = {""};
    int exit_code = 0;
    if (run_is_main(run)) {
        char path[RUN_PATH_SIZE + 16];
        bool traceable = run->options.trace[0] == '\0' || trace_path_check(run->options.trace, &error);
        bool made = traceable &&
                    run_directory_create(run->options.out, run->options.model, run->options.rule,
                                         strcmp(run->options.resume, "auto") == 0, run->directory, &error);
        snprintf(path, sizeof path, "%s/config.txt", run->directory);
        bool good = made && options_save_file(&run->options, path, &error) &&
                    log_open(&run->log, run->directory, &error);
        exit_code = good   ? 0
                    : made ? EXIT_SYSTEM_FAILURE
                           : EXIT_USER_MISTAKE; // a directory that can be had but not filled: the disk
    }
    agree_or_exit(run, exit_code, &error);
    share_from_rank_zero(run, run->directory, sizeof run->directory);
}

#endif
