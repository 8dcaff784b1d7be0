// checkpoint/load.h: going on from a checkpoint: opening and judging it, which trusts
// nothing that stands there, and putting its vectors and numbers where a run of now has
// them.
//
// Whatever is wrong is found before anything of the run is changed, and is an error that
// all ranks share; every block of the state is read and summed up, shared out over the
// ranks. What cannot be as if nothing had happened (another rule, other ranks, another
// device) is said.
#ifndef ACCO_CHECKPOINT_LOAD_H
#define ACCO_CHECKPOINT_LOAD_H

#include <fcntl.h>

#include "checkpoint/checkpoint.h"

// ---------------------------------------------------------------------------------------
// Checksums: CRC-32 of every block of the state, shared out over the ranks

static inline size_t checkpoint_block_count(size_t bytes) {
    return (bytes + CHECKPOINT_BLOCK - 1) / CHECKPOINT_BLOCK;
}

// sums (blocks): those of this rank's blocks, 0 elsewhere.
static inline bool checkpoint_sum_blocks(const Run *run, int descriptor, size_t bytes, uint32_t *sums,
                                         Error *error) {
    unsigned char *block = (unsigned char *)malloc(CHECKPOINT_BLOCK);
    bool good = block != NULL || error_set(error, "no memory for a block of the state");
    size_t step = (size_t)run->transport.size;
    for (size_t i = (size_t)run->transport.rank; good && i < checkpoint_block_count(bytes); i += step) {
        size_t begin = i * CHECKPOINT_BLOCK,
               size = bytes - begin < (size_t)CHECKPOINT_BLOCK ? bytes - begin : (size_t)CHECKPOINT_BLOCK;
        good = pread(descriptor, block, size, (off_t)begin) == (ssize_t)size ||
               error_set(error, "the state ends early");
        if (good) { sums[i] = (uint32_t)crc32(0, block, (uInt)size); }
    }
    free(block);
    return good;
}

// All ranks; `sums` (blocks), for the caller to free. NULL with an error, the same on all
// ranks.
static inline uint32_t *checkpoint_sums(Run *run, const char *path, size_t *blocks, Error *error) {
    Transport *transport = &run->transport;
    struct stat status;
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    bool good = descriptor >= 0 && fstat(descriptor, &status) == 0;
    if (!good) { error_set(error, "cannot open %.400s: %s", path, strerror(errno)); }
    uint64_t size = good ? (uint64_t)status.st_size : 0;
    if (!all_ranks_have(run, size)) {
        good = false;
        if (!error_is_set(error)) { error_set(error, "%.400s has not the same length on all ranks", path); }
    }
    *blocks = good ? checkpoint_block_count((size_t)status.st_size) : 0;
    size_t bytes = *blocks * sizeof(uint32_t);
    uint32_t *mine = (uint32_t *)calloc(*blocks + 1, sizeof *mine);
    good = good && checkpoint_sum_blocks(run, descriptor, (size_t)status.st_size, mine, error);
    if (descriptor >= 0) { close(descriptor); }
    if (!all_ranks_good(run, good, error)) {
        free(mine);
        return NULL;
    }
    uint32_t *all = (uint32_t *)calloc((size_t)transport->size * (*blocks + 1), sizeof *all);
    transport_all_gather_records(transport, "checkpoint", mine, all, bytes);
    for (size_t i = 0; i < *blocks; i++) { mine[i] = all[(i % (size_t)transport->size) * *blocks + i]; }
    free(all);
    return mine;
}

// ---------------------------------------------------------------------------------------
// Loading

typedef struct CheckpointSource {
    char path[CHECKPOINT_PATH];
    json_t *numbers;
    SafetensorsFile state;
    const char *rule;
    int workers;
    char remarks[512]; // what is not exact; empty: everything is
} CheckpointSource;

static inline void checkpoint_remark(CheckpointSource *source, const char *text) {
    size_t used = strlen(source->remarks);
    snprintf(source->remarks + used, sizeof source->remarks - used, "%s%s", used > 0 ? "; " : "", text);
}

static inline void checkpoint_close(CheckpointSource *source) {
    json_decref(source->numbers);
    safetensors_close(&source->state);
}

// A whole number of a manifest that is a count.
static inline bool is_count(const json_t *object, const char *key) {
    const json_t *item = json_object_get(object, key);
    return json_is_integer(item) && json_integer_value(item) >= 0 &&
           json_integer_value(item) <= (json_int_t)1 << 53;
}

// A number in a string, finite and not negative.
static inline bool is_amount(const json_t *object, const char *key) {
    const char *text = json_string_value(json_object_get(object, key));
    char *end = NULL;
    double value = text == NULL ? -1 : strtod(text, &end);
    return text != NULL && end != text && *end == '\0' && value >= 0 && value <= 0x1p53;
}

static inline bool tally_is_sane(const json_t *tally) {
    const json_t *site = json_object_get(tally, "site");
    bool good = is_amount(site, "micro_batch") && is_amount(site, "element");
    for (int i = 0; i < TALLY_SUM_COUNT; i++) {
        const TallySum *sum = &TALLY_SUMS[i];
        good = good && (sum->name == NULL || !sum->is_amount || is_amount(tally, sum->name));
    }
    return good;
}

static inline bool detector_is_sane(const json_t *detector) {
    return is_amount(detector, "learned") && is_amount(detector, "variance") &&
           json_is_string(json_object_get(detector, "mean")) && isfinite(number_from_json(detector, "mean"));
}

static inline bool workers_are_sane(const json_t *workers) {
    bool good =
        json_is_array(workers) && json_array_size(workers) >= 1 && json_array_size(workers) <= 1000000;
    for (size_t i = 0; good && i < json_array_size(workers); i++) {
        const json_t *worker = json_array_get(workers, i);
        good = is_count(worker, "micro_batches_begun") && tally_is_sane(json_object_get(worker, "tally")) &&
               tally_is_sane(json_object_get(worker, "handed_over")) &&
               json_is_string(json_object_get(worker, "local_norm")) &&
               json_is_string(json_object_get(worker, "local_rate")) &&
               is_amount(worker, "spikes_in_a_row") && detector_is_sane(json_object_get(worker, "norms")) &&
               detector_is_sane(json_object_get(worker, "losses"));
    }
    return good;
}

static inline bool fragments_are_sane(const json_t *numbers, bool streaming) {
    const json_t *applied = json_object_get(numbers, "applied_at");
    int64_t count = (int64_t)json_array_size(applied), commit = integer_from_json(numbers, "commit");
    bool good = json_is_array(applied) && is_count(numbers, "fragment") && (count > 0 || !streaming);
    for (int64_t i = 0; good && i < count; i++) {
        const json_t *item = json_array_get(applied, (size_t)i);
        good = json_is_integer(item) && json_integer_value(item) >= 0 && json_integer_value(item) <= commit;
    }
    return good && integer_from_json(numbers, "fragment") < (count > 1 ? count : 1);
}

// All tokens that the workers have begun with can be counted: load_position does so.
static inline bool position_is_sane(const json_t *numbers) {
    const json_t *workers = json_object_get(numbers, "workers");
    int64_t furthest = 0;
    for (size_t i = 0; i < json_array_size(workers); i++) {
        int64_t begun = integer_from_json(json_array_get(workers, i), "micro_batches_begun");
        furthest = begun > furthest ? begun : furthest;
    }
    double batches =
        (double)integer_from_json(numbers, "data_base") + (double)furthest * (double)json_array_size(workers);
    return batches * (double)integer_from_json(numbers, "sequences") *
               (double)integer_from_json(numbers, "length") <=
           0x1p53;
}

// Everything that loading takes out of checkpoint.json is there and can be.
static inline bool numbers_are_sane(const json_t *numbers, const Rule *rule) {
    static const char *const counts[] = {"parameters", "commit",    "reports",
                                         "data_base",  "sequences", "length"};
    const json_t *job = json_object_get(numbers, "job"),
                 *in_flight = json_object_get(numbers, "job_in_flight");
    bool good = rule != NULL && json_is_boolean(in_flight) && json_is_object(job) &&
                is_amount(numbers, "gradients_done") && is_amount(numbers, "seconds") &&
                is_amount(numbers, "spikes") && is_amount(numbers, "rollbacks") &&
                json_is_array(json_object_get(numbers, "block_crc32"));
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        good = good && is_count(numbers, counts[i]);
    }
    good = good && integer_from_json(numbers, "sequences") > 0 && integer_from_json(numbers, "length") > 0;
    if (good && json_is_true(in_flight)) {
        good = rule->job_in_flight_between_commits && integer_from_json(job, "kind") == AVERAGE &&
               integer_from_json(job, "fragment") == 0 && tally_is_sane(json_object_get(job, "total"));
    }
    return good && workers_are_sane(json_object_get(numbers, "workers")) && position_is_sane(numbers) &&
           fragments_are_sane(numbers, rule->kind == RULE_LOCAL);
}

// The state holds what a run of its rule leaves.
static inline bool source_is_complete(const CheckpointSource *source, const Run *run, const Rule *rule) {
    static const char *const own[] = {"exp_avg", "exp_avg_sq", "parameters"};
    bool local = rule->kind == RULE_LOCAL,
         in_flight = json_is_true(json_object_get(source->numbers, "job_in_flight"));
    bool good = area_find(&source->state, &run->table, "master", -1) != NULL;
    for (int worker = local ? 0 : -1; good && worker < (local ? source->workers : 0); worker++) {
        for (int i = 0; i < (local || !rule->replicated ? 3 : 2); i++) {
            good = good && area_find(&source->state, &run->table, own[i], worker) != NULL;
        }
    }
    if (local) { good = good && area_find(&source->state, &run->table, "momentum", -1) != NULL; }
    return good && in_flight == (area_find(&source->state, &run->table, "exchange", -1) != NULL);
}

// Gradients wait in overlapped rules only, and of all workers.
static inline bool source_gradients_fit(const CheckpointSource *source, const Run *run, const Rule *rule) {
    bool first = area_find(&source->state, &run->table, "gradients", 0) != NULL,
         good = !first || rule->kind == RULE_OVERLAPPED;
    for (int worker = 1; good && worker < source->workers; worker++) {
        good = (area_find(&source->state, &run->table, "gradients", worker) != NULL) == first;
    }
    return good;
}

static inline bool checkpoint_open_numbers(CheckpointSource *source, const char *path, Error *error) {
    char file[CHECKPOINT_PATH + 32];
    json_error_t problem;
    snprintf(file, sizeof file, "%.*s/checkpoint.json", CHECKPOINT_PATH, path);
    source->numbers = json_load_file(file, JSON_REJECT_DUPLICATES, &problem);
    if (source->numbers == NULL) { return error_set(error, "%.400s: %.120s", file, problem.text); }
    source->rule = json_string_value(json_object_get(source->numbers, "optimizer"));
    source->workers = (int)json_array_size(json_object_get(source->numbers, "workers"));
    if (!json_is_integer(json_object_get(source->numbers, "checkpoint")) ||
        integer_from_json(source->numbers, "checkpoint") != CHECKPOINT_VERSION || source->rule == NULL) {
        return error_set(error, "%.400s is no checkpoint of this version", path);
    }
    if (integer_from_json(source->numbers, "checksum") != manifest_checksum(source->numbers)) {
        return error_set(error, "%.400s is damaged: it is not what was written", file);
    }
    if (!numbers_are_sane(source->numbers, rule_find(source->rule))) {
        return error_set(error, "%.400s is no state that a run of %.40s can be in", file, source->rule);
    }
    return true;
}

static inline bool source_is_of_model(const CheckpointSource *source, const Run *run) {
    json_t *model = model_to_json(run);
    bool same = json_equal(json_object_get(source->numbers, "model"), model) != 0;
    json_decref(model);
    return same;
}

static inline bool checkpoint_open_all(CheckpointSource *source, const Run *run, const char *path,
                                       Error *error) {
    char file[CHECKPOINT_PATH + 32];
    snprintf(file, sizeof file, "%.*s/state.safetensors", CHECKPOINT_PATH, path);
    if (!checkpoint_open_numbers(source, path, error) || !safetensors_open(&source->state, file, error)) {
        return false;
    }
    const Rule *rule = rule_find(source->rule);
    if (!source_is_of_model(source, run) ||
        integer_from_json(source->numbers, "parameters") != (int64_t)run->table.parameter_count) {
        return error_set(error, "%.400s is of another model than %s", path, run->config.name);
    }
    if (source_is_complete(source, run, rule) && source_gradients_fit(source, run, rule)) { return true; }
    return error_set(error, "%.400s does not hold what a run of %s leaves", file, rule->name);
}

// Of this rank alone: the files are there, sound, and for this model. On failure there is
// nothing to close.
static inline bool checkpoint_open(CheckpointSource *source, const Run *run, const char *path, Error *error) {
    memset(source, 0, sizeof *source);
    snprintf(source->path, sizeof source->path, "%s", path);
    bool good = checkpoint_open_all(source, run, path, error);
    if (!good) { checkpoint_close(source); }
    return good;
}

// Of this rank alone: the newest checkpoint of the run in `directory`, if there is one
// that can be read, is of this run's model.
static inline bool checkpoint_check_model(const Run *run, const char *directory, Error *error) {
    CheckpointSource source;
    Error unreadable = {""};
    memset(&source, 0, sizeof source);
    int64_t commit = checkpoint_newest(directory, INT64_MAX);
    if (commit < 0) { return true; }
    CheckpointPaths paths = checkpoint_paths(directory, commit);
    bool same =
        !checkpoint_open_numbers(&source, paths.final, &unreadable) || source_is_of_model(&source, run);
    checkpoint_close(&source);
    return same || error_set(error,
                             "%.400s is of another model than %s: give the --model that it was trained with, "
                             "or another --out",
                             paths.final, run->config.name);
}

// All ranks: every block is what was written.
static inline bool checkpoint_verify(CheckpointSource *source, Run *run, Error *error) {
    char file[CHECKPOINT_PATH + 32];
    size_t blocks;
    snprintf(file, sizeof file, "%s/state.safetensors", source->path);
    uint32_t *sums = checkpoint_sums(run, file, &blocks, error);
    if (sums == NULL) { return false; }
    const json_t *expected = json_object_get(source->numbers, "block_crc32");
    bool good = json_array_size(expected) == blocks;
    for (size_t i = 0; good && i < blocks; i++) {
        good = json_integer_value(json_array_get(expected, i)) == (json_int_t)sums[i];
    }
    free(sums);
    return good || error_set(error, "%.400s is damaged: its bytes are not those that were written", file);
}

static inline bool state_read_piece(void *context, size_t flat, float *host, size_t count, Error *error) {
    const float *from = (const float *)context;
    (void)error;
    if (from == NULL) {
        memset(host, 0, count * sizeof(float));
    } else {
        memcpy(host, from + flat, count * sizeof(float));
    }
    return true;
}

// What this rank has of the vector <- from (parameter_count), or zeros.
static inline void state_read(Run *run, const SavedVector *vector, const float *from, float *stage) {
    PieceWalk walk = {&run->scheduler, true, stage, state_read_piece, (void *)from};
    Error error = {""};
    walk_vector(&walk, vector, false, &error);
}

static inline const float *source_area(const CheckpointSource *source, const Run *run, const char *vector,
                                       int worker) {
    return area_find(&source->state, &run->table, vector, worker);
}

// A vector of the optimizer, which other rules keep in another place: the whole one, or
// that of one worker.
static inline const float *source_moment(CheckpointSource *source, const Run *run,
                                         const SavedVector *vector) {
    int worker = run->transport.rank % source->workers;
    const float *shared = source_area(source, run, vector->name, -1),
                *own = source_area(source, run, vector->name, worker);
    if (vector->scope == SAVED_WORKER) { return own != NULL ? own : shared; }
    return shared != NULL ? shared : source_area(source, run, vector->name, 0);
}

// What compute uses, as it was; where that makes no sense any more the exact parameters.
static inline const float *source_parameters(CheckpointSource *source, const Run *run,
                                             const SavedVector *vector, bool same_rule) {
    bool of_worker = vector->scope == SAVED_WORKER;
    bool usable = same_rule && (!of_worker || source->workers == run->transport.size);
    const float *found =
        usable ? source_area(source, run, vector->name, of_worker ? run->transport.rank : -1) : NULL;
    return found != NULL ? found : source_area(source, run, "master", -1);
}

// The gradient sums that wait for the next job: those of all workers that this rank
// stands for, added up. Free it.
static inline float *source_gradients(CheckpointSource *source, const Run *run, Tally *handed_over,
                                      Tally *kept) {
    size_t count = run->table.parameter_count;
    float *sum = (float *)calloc(count, sizeof(float));
    const json_t *workers = json_object_get(source->numbers, "workers");
    memset(handed_over, 0, sizeof *handed_over);
    memset(kept, 0, sizeof *kept);
    for (int worker = run->transport.rank; worker < source->workers; worker += run->transport.size) {
        const float *gradients = source_area(source, run, "gradients", worker);
        WorkerNumbers numbers = worker_numbers_from_json(json_array_get(workers, (size_t)worker));
        for (size_t i = 0; gradients != NULL && i < count; i++) { sum[i] += gradients[i]; }
        tally_add(handed_over, &numbers.handed_over);
        tally_add(kept, &numbers.tally);
    }
    return sum;
}

// The sum under way as the ranks of now would have sent it: their mean is that of those
// who did. Free it.
static inline float *source_exchange(const CheckpointSource *source, const Run *run) {
    size_t count = run->table.parameter_count;
    float *sum = (float *)malloc(count * sizeof(float)),
          scale = (float)run->transport.size / (float)source->workers;
    const float *saved = source_area(source, run, "exchange", -1);
    for (size_t i = 0; i < count; i++) { sum[i] = saved[i] * scale; }
    return sum;
}

// ACCO's half batch stands in the accumulator as well, and grows there.
static inline void load_gradients(CheckpointSource *source, Run *run, float *stage) {
    Scheduler *s = &run->scheduler;
    float *sum = source_gradients(source, run, &s->job.tally, &s->tally);
    SavedVector exchange = {"gradients", SAVED_WORKER, s->comm_buffer.data},
                accumulator = {"gradients", SAVED_WORKER, s->gradients.data};
    state_read(run, &exchange, sum, stage);
    if (s->tally.micro_batches > 0) { state_read(run, &accumulator, sum, stage); }
    s->comm_buffer.state = BUFFER_READY;
    free(sum);
}

static inline void load_vectors(CheckpointSource *source, Run *run, bool same_rule) {
    Scheduler *s = &run->scheduler;
    SavedVector vectors[CHECKPOINT_VECTORS];
    float *stage = (float *)malloc(CHECKPOINT_STAGE * sizeof(float));
    s->job_in_flight = same_rule && json_is_true(json_object_get(source->numbers, "job_in_flight"));
    float *exchange = s->job_in_flight ? source_exchange(source, run) : NULL;
    int count = saved_vectors(s, vectors);
    for (int i = 0; i < count; i++) {
        bool moment = strncmp(vectors[i].name, "exp_avg", 7) == 0,
             parameters = strcmp(vectors[i].name, "parameters") == 0;
        const float *from = moment ? source_moment(source, run, &vectors[i])
                            : strcmp(vectors[i].name, "exchange") == 0 ? exchange
                            : parameters ? source_parameters(source, run, &vectors[i], same_rule)
                                         : source_area(source, run, vectors[i].name, -1);
        state_read(run, &vectors[i], from, stage);
    }
    if (s->job_in_flight) { s->comm_buffer.state = BUFFER_WRITING; } // as if its job had just ended
    bool waiting = same_rule && source_area(source, run, "gradients", 0) != NULL;
    if (waiting) { load_gradients(source, run, stage); }
    free(exchange);
    free(stage);
}

// What this worker alone knows, where it is the same worker.
static inline void load_own_numbers(CheckpointSource *source, Run *run, bool same_rule) {
    Scheduler *s = &run->scheduler;
    const json_t *workers = json_object_get(source->numbers, "workers");
    WorkerNumbers mine = worker_numbers_from_json(json_array_get(workers, (size_t)run->transport.rank));
    s->micro_batches_begun = mine.micro_batches_begun;
    s->local_norm = mine.local_norm;
    s->local_rate = mine.local_rate;
    if (!same_rule || s->settings.kind != RULE_LOCAL) { return; }
    s->tally = mine.tally;
    if (s->settings.on_spike == SPIKE_SKIP) { return; }
    s->tally.left_out = 0; // or the run would end at once, as the other one has
    memset(&s->tally.site, 0, sizeof s->tally.site);
}

// Micro-batches of then in those of now: other ranks or other micro-batches begin where
// the furthest rank was.
static inline void load_position(CheckpointSource *source, Run *run, double scale) {
    const json_t *workers = json_object_get(source->numbers, "workers");
    int64_t furthest = 0;
    for (int worker = 0; worker < source->workers; worker++) {
        int64_t begun = integer_from_json(json_array_get(workers, (size_t)worker), "micro_batches_begun");
        if (begun > furthest) { furthest = begun; }
    }
    run->data_base = (int64_t)ceil(((double)run->data_base + (double)furthest * source->workers) * scale);
}

static inline void load_fragments(CheckpointSource *source, Scheduler *s) {
    const json_t *applied = json_object_get(source->numbers, "applied_at");
    if (s->fragments == NULL || json_array_size(applied) != (size_t)s->settings.fragments) { return; }
    s->fragment = (int)integer_from_json(source->numbers, "fragment");
    for (int i = 0; i < s->settings.fragments; i++) {
        s->fragments[i].applied_at = (int64_t)json_integer_value(json_array_get(applied, (size_t)i));
    }
}

// What is usual; under local rules for a worker, one with another number where there are
// more of them now.
static inline void load_detectors(CheckpointSource *source, Run *run) {
    Scheduler *s = &run->scheduler;
    const json_t *workers = json_object_get(source->numbers, "workers");
    WorkerNumbers numbers =
        worker_numbers_from_json(json_array_get(workers, (size_t)(run->transport.rank % source->workers)));
    s->norms = numbers.norms;
    s->losses = numbers.losses;
    s->norms.limit = s->losses.limit = s->settings.spike_limit;
    s->spikes_in_a_row = numbers.spikes_in_a_row;
}

static inline void load_numbers(CheckpointSource *source, Run *run, bool same_rule) {
    Scheduler *s = &run->scheduler;
    const json_t *numbers = source->numbers;
    double then =
        (double)integer_from_json(numbers, "sequences") * (double)integer_from_json(numbers, "length");
    double scale = then / (double)tokens_per_micro_batch(run);
    s->optimizer.commits = integer_from_json(numbers, "commit");
    s->gradients_done = number_from_json(numbers, "gradients_done") * scale;
    s->reports = integer_from_json(numbers, "reports");
    s->spikes = number_from_json(numbers, "spikes");
    s->rollbacks = number_from_json(numbers, "rollbacks");
    s->report.commit = s->optimizer.commits;
    s->report.gradients_done = s->gradients_done;
    if (s->job_in_flight) { job_from_json(json_object_get(numbers, "job"), &s->job); }
    if (same_rule) { load_fragments(source, s); }
    run->data_base = integer_from_json(numbers, "data_base");
    load_detectors(source, run);
    if (source->workers != run->transport.size || scale != 1) {
        load_position(source, run, scale);
    } else {
        load_own_numbers(source, run, same_rule);
    }
}

// Whether another value leads to other bits. What only reports, places or times things
// does not; rule and model are compared by themselves;
// --val-batches decides whether a tail of the data is held out.
static inline bool option_is_decisive(const char *name) {
    static const char *const harmless[] = {
        "optimizer",    "overlap",   "bucket-mb",    "model",   "from",         "finetune",  "device",
        "gpu-exchange", "recompute", "nccl-ctas",    "threads", "ranks",        "timeout-s", "link-mbit",
        "link-us",      "chaos-ms",  "slow-rank",    "slow-ms", "save-every",   "keep",      "keep-every",
        "resume",       "out",       "config",       "trace",   "report-every", "val-every", "prompt",
        "temperature",  "top-k",     "sample-tokens"};
    for (size_t i = 0; i < sizeof harmless / sizeof harmless[0]; i++) {
        if (strcmp(name, harmless[i]) == 0) { return false; }
    }
    return true;
}

// What cannot be as if nothing had happened.
static inline void checkpoint_judge(CheckpointSource *source, const Run *run, bool same_rule) {
    const json_t *options = json_object_get(source->numbers, "options");
    json_t *now = options_as_json(&run->options);
    const char *name;
    json_t *value;
    if (!same_rule) {
        checkpoint_remark(source,
                          "another rule: what the old one had under way is dropped, moments are taken over");
    }
    if (source->workers != run->transport.size) {
        bool local = run->rule->kind == RULE_LOCAL;
        checkpoint_remark(
            source,
            local
                ? "another number of ranks: all go on from the outer parameters"
                : "another number of ranks: sums are rounded in another order, data go on where the furthest "
                  "rank was");
    }
    const char *device = json_string_value(json_object_get(source->numbers, "device"));
    if (device != NULL && (strcmp(device, "cuda") == 0) != run->placement.on_gpu) {
        checkpoint_remark(source, "another kind of device rounds in another way");
    }
    json_object_foreach(now, name, value) {
        const json_t *before = json_object_get(options, name);
        if (!option_is_decisive(name) || json_equal(before, value)) { continue; }
        bool holds_out =
            strcmp(name, "val-batches") == 0 && !run->data.builtin; // only with or without matters
        if (strcmp(name, "val-batches") == 0 &&
            (!holds_out || json_is_string(before) == json_is_string(value))) {
            continue;
        }
        char text[64];
        snprintf(text, sizeof text, "another --%.40s", name);
        checkpoint_remark(source, text);
    }
    json_decref(now);
}

// All ranks, after scheduler_start: the run is where the checkpoint was made. On failure
// the run is as it was.
static inline bool checkpoint_load(Run *run, const char *path, char remarks[512], Error *error) {
    CheckpointSource source;
    bool opened = checkpoint_open(&source, run, path, error);
    if (!all_ranks_good(run, opened, error)) {
        if (opened) { checkpoint_close(&source); }
        return false;
    }
    bool good = checkpoint_verify(&source, run, error), same_rule = strcmp(source.rule, run->rule->name) == 0;
    if (all_ranks_good(run, good, error)) {
        load_vectors(&source, run, same_rule);
        load_numbers(&source, run, same_rule);
        run->scheduler.parameters_version++;
        run->seconds_before = number_from_json(source.numbers, "seconds");
        checkpoint_judge(&source, run, same_rule);
        snprintf(remarks, 512, "%s", source.remarks);
    } else {
        good = false;
    }
    checkpoint_close(&source);
    return good;
}

#endif
