// like.h: what the log of a run says about the run and its machines, for plan --like RUN.
//
// Ranks that compete for cores show it as crowding: the wall time of a micro-batch over its CPU
// time. Ranks that take turns do not: then their threads over the cores say it.
#pragma once

#include "plan/machine.h"
#include "runtime/log.h"

typedef struct LikeRun {
    int ranks, ranks_of_host; // the latter: of the host of rank 0
    bool on_gpu;              // rank 0
    double threads, cores;    // of rank 0, and of its host
    double parameters;
    double tokens;                       // of a micro-batch
    double micro_batch, micro_batch_cpu; // seconds of rank 0, the mean over its reports
    double computing;                    // share of the time in which rank 0 computed
    double tokens_per_second;            // of all ranks, communication included
    double *rank_seconds;                // (ranks): of a micro-batch of each; NULL: the run has not ended
} LikeRun;

static inline double like_number(const json_t *event, const char *name) {
    return json_number_value(json_object_get(event, name));
}

// Whether the run that starts here computes as the one before it in the log.
static inline bool like_take_start(const json_t *event, LikeRun *like) {
    const LikeRun before = *like;
    const json_t *ranks = json_object_get(event, "ranks"), *options = json_object_get(event, "options");
    const json_t *first = json_array_get(ranks, 0), *host = json_object_get(first, "host");
    const char *device = json_string_value(json_object_get(first, "device"));
    like->on_gpu = device != NULL && strcmp(device, "CPU") != 0;
    like->threads = like_number(first, "threads");
    like->cores = like_number(first, "cores");
    like->ranks = (int)json_array_size(ranks);
    like->ranks_of_host = 0;
    for (int rank = 0; rank < like->ranks; rank++) {
        like->ranks_of_host += json_equal(json_object_get(json_array_get(ranks, rank), "host"), host);
    }
    like->parameters = like_number(event, "parameters");
    like->tokens = like_number(options, "micro-batch") * like_number(options, "seq-len");
    free(like->rank_seconds); // of as many ranks as the run had before it was resumed
    like->rank_seconds = NULL;
    return like->ranks == before.ranks && like->tokens == before.tokens && like->threads == before.threads &&
           like->on_gpu == before.on_gpu;
}

// Reads the log. A resumed run counts from its resumption on; until it reports, if it computes as
// before, the reports before that count. The first report, with cold caches, counts only if there
// is no other. False: there is no log, or it has no report.
static inline bool like_read(const char *name, LikeRun *like, Error *error) {
    char path[PATH_MAX + 16], *line = NULL;
    size_t room = 0;
    int reports = 0;                    // since the latest start
    double steps = 0;                   // of those that count
    double seconds = 0, tokens = 0;     // of training, at the first of them
    double total_seconds = 0, done = 0; // and at the last
    memset(like, 0, sizeof *like);
    snprintf(path, sizeof path, "%s/log.jsonl", name);
    FILE *file = fopen(path, "r");
    if (file == NULL) { return error_set(error, "--like %.300s: there is no log.jsonl of a run", name); }
    while (getline(&line, &room, file) > 0) {
        json_t *event = json_loads(line, 0, NULL);
        const char *kind = "";
        json_unpack(event, "{s:s}", "event", &kind);
        bool reported = strcmp(kind, "report") == 0 && like->ranks > 0 &&
                        like_number(event, "micro_batch_ms") > 0 && like_number(event, "steps") > 0;
        if (strcmp(kind, "start") == 0) {
            steps = like_take_start(event, like) ? steps : 0;
            reports = 0;
        } else if (strcmp(kind, "end") == 0) {
            const json_t *times = json_object_get(event, "rank_micro_batch_ms");
            size_t count = like->ranks;
            bool first = json_array_size(times) == count && like->rank_seconds == NULL;
            if (first) { like->rank_seconds = MEMORY_OF(double, count); }
            for (size_t i = 0; i < count && like->rank_seconds != NULL; i++) {
                like->rank_seconds[i] = json_number_value(json_array_get(times, i)) / 1e3;
            }
        } else if (reported) {
            total_seconds = like_number(event, "seconds");
            done = like_number(event, "tokens");
            if (++reports == 1) {
                seconds = total_seconds;
                tokens = done;
                like->tokens_per_second = like_number(event, "tokens_per_second");
            }
            // Sums, at first: of each step of the report.
            if (reports <= 2) { steps = like->micro_batch = like->micro_batch_cpu = like->computing = 0; }
            double more = like_number(event, "steps");
            steps += more;
            like->micro_batch += more * like_number(event, "micro_batch_ms") / 1e3;
            like->micro_batch_cpu += more * like_number(event, "micro_batch_cpu_ms") / 1e3;
            like->computing += more * like_number(event, "compute_ms") / 1e3;
        }
        json_decref(event);
    }
    free(line);
    fclose(file);
    if (!(steps > 0) || !(like->tokens > 0)) {
        return error_set(error, "--like %.300s: no report of its log says what a micro-batch took", name);
    }
    like->micro_batch /= steps;
    like->micro_batch_cpu /= steps;
    like->computing /= total_seconds > seconds ? total_seconds - seconds : seconds;
    if (total_seconds > seconds) { like->tokens_per_second = (done - tokens) / (total_seconds - seconds); }
    return true;
}

// Threads for each core of a host that `ranks` ranks share, at least 1.
static inline double like_crowd(const LikeRun *like, int ranks) {
    return like->cores > 0 ? fmax(ranks * like->threads / like->cores, 1) : 1;
}

// Sets what the run tells of its machines, for micro-batches of `tokens` tokens. again: the plan is
// for this very run, with as many ranks. together: ranks of the plan that share a host.
static inline void like_set_machine(const LikeRun *like, double tokens, bool again, int together,
                                    Machine *machine) {
    machine->micro_batch = like->micro_batch * tokens / like->tokens;
    if (like->on_gpu || !(like->micro_batch_cpu > 0)) { return; } // threads of the host tell nothing of a GPU
    double crowding = fmax(like->micro_batch / like->micro_batch_cpu, 1);
    // Others had the cores only while they computed. In another plan they may always compute.
    double share = !again && like->computing > 0.2 && like->computing < 1 ? like->computing : 1;
    // Where the plan's ranks have more of a core each, the run's crowding tells nothing of them.
    double crowd = like_crowd(like, together), was = like_crowd(like, like->ranks_of_host);
    double full = fmax(crowd, crowd < was ? 1 : 1 + (crowding - 1) / share);
    machine->micro_batch *= full / crowding;
    machine->exchange_bytes_per_second /= full;
    machine->memory_bytes_per_second /= full;
}
