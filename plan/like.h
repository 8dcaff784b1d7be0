// like.h: what the log of a run says about the machines that it ran on, for a plan with
// --like RUN.
//
//   a micro-batch   what rank 0 computed in its reports, and how much that varied
//   crowding        its time over what its thread had a core for: above 1 where ranks share
//                   cores; more so where all of them compute all the time
//
// The run's links do not matter: time in which a thread waits is in neither.
#ifndef ACCO_PLAN_LIKE_H
#define ACCO_PLAN_LIKE_H

#include "plan/forecast.h"

typedef struct LikeRun {
    int ranks;
    bool on_gpu;                         // its rank 0
    double tokens;                       // of a micro-batch
    double micro_batch, micro_batch_cpu; // seconds
    double variation;                    // Machine::variation
    double computing;                    // share of the time
} LikeRun;

// Sums over reports. The weight of a report is its number of steps.
typedef struct LikeSums {
    double weight, micro_batch, square, micro_batch_cpu, micro_batches, reports;
    double computing, seconds; // of training, of it in which rank 0 computed
} LikeSums;

static inline double like_number(const json_t *event, const char *name) {
    return json_number_value(json_object_get(event, name));
}

static inline void like_add_report(const json_t *event, int ranks, LikeSums *sums) {
    double ms = like_number(event, "micro_batch_ms"), weight = like_number(event, "steps");
    if (!(ms > 0) || !(weight > 0)) { return; }
    sums->weight += weight;
    sums->micro_batch += weight * ms / 1e3;
    sums->square += weight * ms / 1e3 * ms / 1e3;
    sums->micro_batch_cpu += weight * like_number(event, "micro_batch_cpu_ms") / 1e3;
    sums->micro_batches += weight * like_number(event, "grads_per_commit") / ranks;
    sums->reports += 1;
    sums->computing += weight * like_number(event, "compute_ms") / 1e3;
    sums->seconds = like_number(event, "seconds");
}

static inline void like_take_start(const json_t *event, LikeRun *like) {
    const json_t *ranks = json_object_get(event, "ranks"), *options = json_object_get(event, "options");
    const char *device = json_string_value(json_object_get(json_array_get(ranks, 0), "device"));
    like->on_gpu = device != NULL && strcmp(device, "CPU") != 0;
    like->ranks = (int)json_array_size(ranks);
    like->tokens = like_number(options, "micro-batch") * like_number(options, "seq-len");
}

// Every line of the log. The first report, in which everything is new to the processor's
// caches, counts only where there is no other. False: there is none.
static inline bool like_read_log(FILE *file, LikeRun *like, double *parameters) {
    char *line = NULL;
    size_t room = 0;
    LikeSums first, all;
    memset(&all, 0, sizeof all);
    memset(&first, 0, sizeof first);
    while (getline(&line, &room, file) > 0) {
        json_t *event = json_loads(line, 0, NULL);
        const char *kind = json_string_value(json_object_get(event, "event"));
        if (kind != NULL && strcmp(kind, "start") == 0) {
            like_take_start(event, like);
            *parameters = like_number(event, "parameters");
        } else if (kind != NULL && strcmp(kind, "report") == 0 && like->ranks > 0) {
            like_add_report(event, like->ranks, &all);
            if (all.reports == 1) { first = all; }
        }
        json_decref(event);
    }
    free(line);
    if (!(all.reports > 0) || !(like->tokens > 0)) { return false; }
    if (all.reports == 1) { memset(&first, 0, sizeof first); }
    double weight = all.weight - first.weight, reports = all.reports - first.reports;
    like->micro_batch = (all.micro_batch - first.micro_batch) / weight;
    like->micro_batch_cpu = (all.micro_batch_cpu - first.micro_batch_cpu) / weight;
    like->computing = (all.computing - first.computing) / (all.seconds - first.seconds);
    // Reports are means over n micro-batches, which vary by a root of n less than one does.
    double square = (all.square - first.square) / weight - like->micro_batch * like->micro_batch;
    double n = (all.micro_batches - first.micro_batches) / reports;
    like->variation = reports > 2 ? sqrt(fmax(square, 0) * n) / like->micro_batch : 0;
    return true;
}

// False: there is no such run, it trained another model, or it reported nothing.
static inline bool like_read(const Run *run, LikeRun *like, Error *error) {
    const char *name = run->options.like;
    char path[PATH_MAX + 16];
    double parameters = 0;
    memset(like, 0, sizeof *like);
    snprintf(path, sizeof path, "%s/log.jsonl", name);
    FILE *file = fopen(path, "r");
    if (file == NULL) { return error_set(error, "--like %.300s: there is no log.jsonl of a run", name); }
    bool good = like_read_log(file, like, &parameters);
    fclose(file);
    if (!good) {
        return error_set(error, "--like %.300s: no report of its log says what a micro-batch took", name);
    }
    if (parameters != (double)run->table.parameter_count) {
        return error_set(error,
                         "--like %.300s: that run trained a model of %.0f parameters, this plan is for %zu",
                         name, parameters, run->table.parameter_count);
    }
    if (like->on_gpu != run->placement.on_gpu) {
        return error_set(error, "--like %.300s: that run computed on %s, this plan is for %s", name,
                         like->on_gpu ? "a GPU" : "CPUs",
                         run->placement.on_gpu ? "a GPU" : "CPUs: --gpu-memory plans for a GPU elsewhere");
    }
    return true;
}

// Sets what the run tells of its machines. On GPUs threads of the host tell nothing.
static inline void like_set_machine(const Run *run, const LikeRun *like, Machine *machine) {
    machine->micro_batch = like->micro_batch * (double)tokens_per_micro_batch(run) / like->tokens;
    machine->variation = fmin(like->variation, 1);
    if (run->placement.on_gpu || !(like->micro_batch_cpu > 0)) { return; }
    // Others had the cores for the share of the time in which they computed. In the plan they may
    // compute all the time.
    double crowding = fmax(like->micro_batch / like->micro_batch_cpu, 1);
    double share = like->computing > 0.2 && like->computing < 1 ? like->computing : 1;
    double full = 1 + (crowding - 1) / share;
    machine->micro_batch *= full / crowding;
    crowding = full;
    machine->exchange_bytes_per_second /= crowding;
    machine->memory_bytes_per_second /= crowding;
}

#endif
