// start.h: from choices to a run that can train: files, memory, threads, parameters, streams.
//
// The order matters: the directory exists before memory is filled, so that a mistake in
// --out costs nothing; emulated delays begin after the ranks' clocks were compared.
#pragma once

#include "program/machine_rates.h"
#include "program/setup.h"

static inline bool save_configuration(const Options *options, const char *directory, Error *error) {
    char path[RUN_PATH_SIZE + 16];
    snprintf(path, sizeof path, "%s/config.json", directory);
    return options_save_file(options, path, error);
}

// Rank 0 makes the run directory, and all ranks learn its name. A --trace in it waits for it.
static inline void open_run_directory(Run *run) {
    Error error = {""};
    bool made = true;
    const char *out = run->options.out, *trace = run->options.trace;
    if (run_is_main(run)) {
        size_t length = strlen(out);
        bool resumes = strcmp(run->options.resume, "auto") == 0 || run->options.branch_again,
             traced = trace[0] != '\0',
             inside = length > 0 && strncmp(trace, out, length) == 0 &&
                      (trace[length] == '/' || out[length - 1] == '/');
        made = (!traced || inside || trace_path_check(trace, &error)) &&
               run_directory_create(out, options_model(&run->options), run->rule->name, run->directory,
                                    &error) &&
               run_directory_lock(run->directory, run->transport.host, &error) &&
               run_directory_check_files(run->directory, resumes, &error) &&
               (!inside || trace_path_check(trace, &error));
    }
    agree_or_exit(run, made, EXIT_USER_MISTAKE, &error);
    share_from_rank_zero(&run->transport, "sharing", run->directory, sizeof run->directory);
    // A run that ends while it tokenizes goes on with its options, too.
    made = !run_is_main(run) || hf_model_has(run->directory, "config.json") ||
           save_configuration(&run->options, run->directory, &error);
    agree_or_exit(run, made, EXIT_SYSTEM_FAILURE, &error);
}

// Where first parameters wait on their way to a GPU, or to another precision.
typedef struct Staging {
    Stream *stream;
    float *host;     // (most)
    Real *converted; // (most), bf16
} Staging;

// to (count), in `precision`, = staging->host.
static inline void staging_copy(const Staging *staging, Real *to, size_t count, Precision precision) {
    const Real *from = precision == PRECISION_BF16 ? staging->converted : as_reals(staging->host);
    for (size_t i = 0; i < count && precision == PRECISION_BF16; i++) {
        real_store(staging->converted, i, staging->host[i], precision);
    }
    stream_copy(staging->stream, to, from, count * precision_bytes(precision));
    stream_settle(staging->stream);
}

// Reads the model that training begins with, tensor by tensor: trained ones go to target, in the
// scheduler's order, frozen ones to their place. The file is mapped: a host reads the disk once.
static inline void read_start(Run *run, const Staging *staging, float *target) {
    const TrainedPart *part = &run->part;
    Error error = {""};
    bool good = hf_model_open(&run->base, options_start(&run->options), &error);
    uLong sum = 0;
    agree_or_exit(run, good, EXIT_USER_MISTAKE, &error);
    for (int i = 0; i < part->model.count; i++) {
        const TensorPlace *place = &part->places[i];
        size_t count = part->model.entries[i].count;
        hf_model_read_tensor(&run->base, i, staging->host);
        if (place->kind == TRAINED_WHOLE) {
            staging_copy(staging, as_reals(target + place->trained), count, PRECISION_FP32);
            continue;
        }
        Precision precision = run->placement.precision;
        staging_copy(staging, real_at(part->frozen, place->frozen, precision), count, precision);
        sum = crc32_z(sum, (const Bytef *)staging->host, count * sizeof(float));
    }
    int64_t mine = run->checkpointed.frozen_sum = sum, first = mine;
    share_from_rank_zero(&run->transport, "first parameters", &first, sizeof first);
    good = first == mine || error_set(&error, "rank %d reads another model in %.300s than rank 0",
                                      run->transport.rank, options_start(&run->options));
    agree_or_exit(run, good, EXIT_USER_MISTAKE, &error);
    if (part->frozen_count == 0) { hf_model_close(&run->base); }
}

// The first parameters, of a model on disk or random: the same on all ranks. Adapters are random.
static inline void initialize_parameters(Run *run) {
    const ParameterTable *table = &run->part.table, *model = &run->part.model;
    bool reads = options_start(&run->options)[0] != '\0', random = !reads || run->part.rank > 0;
    size_t most = random ? table->parameter_count : 0;
    for (int i = 0; i < model->count; i++) { most = size_max(most, model->entries[i].count); }
    float *target = scheduler_first_parameters(&run->scheduler);
    Stream stream = {.queue = run->placement.on_gpu ? gpu_queue_create(false) : NULL};
    Staging staging = {.stream = &stream,
                       .host = MEMORY_OF(float, most),
                       .converted = (Real *)memory_take(most, sizeof(uint16_t))};
    if (random) {
        parameters_initialize(table, run->options.seed, run->pool, staging.host);
        staging_copy(&staging, as_reals(target), table->parameter_count, PRECISION_FP32);
    }
    if (reads) { read_start(run, &staging, target); }
    if (stream_is_on_gpu(&stream)) { gpu_queue_destroy(stream.queue); }
    free(staging.host);
    free(staging.converted);
}

// Prepares the model's matrix products on a GPU.
static inline void prepare_model_task(void *context, Stream *stream) {
    Run *run = (Run *)context;
    model_start(&run->model, stream, scheduler_weights(&run->scheduler), run->scheduler.gradients.data);
}

// Begins the effective configuration, the log and the curves, then everything that computes.
static inline void start_run(Run *run) {
    Transport *transport = &run->transport;
    Error error = {""};
    bool opened = !run_is_main(run) || (save_configuration(&run->options, run->directory, &error) &&
                                        reports_open(&run->reports, run->directory, &error));
    bool good = opened && arena_commit(&run->arena, &error);
    agree_or_exit(run, good, EXIT_SYSTEM_FAILURE, &error);
    bool may_spin = run->threads.threads * transport->local_size <= run->threads.cores;
    run->pool = thread_pool_create(run->threads.threads, may_spin);
    initialize_parameters(run);
    transport->timeout_seconds = run->options.timeout_s;
    bool traced = run->options.trace[0] != '\0';
    if (traced) { run->clock_at_start = trace_measure_clock(transport, clock_seconds); }
    transport->chaos_seconds = run->options.chaos_ms / 1e3;
    emulate_network(transport, &run->options);
    bucket_for_link(&run->scheduler, &run->options, &run->placement, NULL, run->bucket_reason);
    scheduler_start(&run->scheduler, run->pool, traced);
    check_replicas(&run->scheduler, scheduler_weights(&run->scheduler), weights_bytes(&run->scheduler));
    scheduler_call(&run->scheduler, run->scheduler.compute, prepare_model_task, run);
}
