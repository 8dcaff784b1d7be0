// checkpoint.h: the format of a checkpoint, on which its writer (save.h) and its reader (load.h)
// agree. It has all that a run needs to continue as if it had never stopped: a directory,
// OUT/checkpoints/commit-N, where N counts commits; local rules count inner steps.
//
//   model/              the committed parameters as a Hugging Face directory, which
//                       transformers loads as it is
//   state.safetensors   vectors of the optimizer and of the rule, cut into the model's
//                       tensors: master/NAME, exp_avg/NAME, ...
//   checkpoint.json     the manifest: what the run was, its counters, its position in the
//                       data, what the rule remembers; and a CRC-32 of every block of
//                       state.safetensors, and of the manifest itself
//
// Vectors are logical: what all ranks share is written once, each part by its owner; what
// each worker has for itself is stored as worker.R.VECTOR. So a run with another number
// of ranks, or another rule, can continue.
//
//   vector        which rules save it    content
//   master        all                    the exact parameters; local rules: the outer ones
//   parameters    sharded; local: each   what compute uses, where that is not the master:
//                 worker its own         an estimate, a rounded copy, or a worker's own.
//                                        "casts" in the manifest: casts of the master
//   gradients     overlapped: each       the sums that wait for the next job
//                 worker its own
//   momentum      local, not sparse      the momentum of the outer step
//   error         sparse: each its own   what has not been sent yet
//   unsent        in 4 bits: each its    what rounding has lost of its gradients
//                 own
//   exchange      with a job in flight   the sum that the next boundary will apply
//                 between commits
//   exp_avg,      all; local: each       the moments, in the format of --moments; casts are bf16, all
//   exp_avg_sq    worker its own         others fp32. exp_avg_sq lacks the matrices that Muon steps
#pragma once

#include "checkpoint/committed.h"
#include "checkpoint/hf_model.h"
#include "rules.h"
#include "runtime/log.h"

enum {
    CHECKPOINT_VERSION = 5,
    CHECKPOINT_MAX_VECTORS = 10,
    CHECKPOINT_BLOCK = 4 << 20, // bytes under one checksum
    CHECKPOINT_STAGE = 1 << 20, // elements that are copied from or to a GPU at a time
    CHECKPOINT_PATH_SIZE = RUN_PATH_SIZE + 96
};

// The run that a checkpoint describes. The program fills in the first part, and owns what it points
// to.
typedef struct CheckpointedRun {
    Transport *transport;
    Scheduler *scheduler; // its vectors, numbers and streams
    const Rule *rule;
    const ModelConfig *config;
    const ParameterTable *table; // of what is trained
    const TrainedPart *part;
    const HfModel *base;        // what is frozen, if anything is
    const char *base_directory; // of that model
    int64_t frozen_sum;         // CRC-32 of what is frozen; 0: nothing is
    int64_t trained_sum;        // of the names and sizes of what is trained
    int B, T;                   // shape of a micro-batch
    const char *directory;      // OUT
    const char *tokenizer;      // where the tokenizer of the model may be; NULL: there is none
    const char *version;        // of the program
    const char *revision;       // of its sources
    const char *rounding;       // what decides how this machine rounds
    int64_t keep;               // how many of the latest checkpoints stay
    int64_t keep_every;         // the first one at or beyond each multiple of this stays too; 0: none
    bool keep_best;             // the one of best_commit stays too
    json_t *options;            // the effective options, name: value
    int product_processors;     // GPU multiprocessors that products during an exchange may use; 0: all
    const char *data;           // what the training data are (data_loader_identify)
    bool data_changed;  // this rank has perhaps trained on others; the program sets it before it saves
    bool fresh_moments; // a checkpoint of another inner optimizer may be loaded, without its moments

    // Saved and loaded with everything else. data_base counts micro-batches of all ranks:
    // the data before it was used before this process began, or before it rolled back.
    int64_t data_base;
    double seconds;            // of training so far; the program sets it before it saves
    double next_learning_rate; // by the schedule of the run that saved it
    int64_t validated_commit;  // the commit of the latest validation
    int64_t best_commit;       // the commit of the validation with the lowest loss; 0: there was none
    double best_loss;
    int64_t worse; // validations since then

    // Changed by saving.
    struct Saver *saver;                 // the checkpoint that is being written; NULL: none
    int64_t saved_commit, saved_reports; // the scheduler's counters in the newest checkpoint on disk

    int64_t *damaged; // (damaged_count): the commits of checkpoints that could not be loaded
    int damaged_count;
} CheckpointedRun;

// ---- Vectors --------------------------------------------------------------------------

typedef enum SavedScope {
    SAVED_SHARED, // the same on all ranks, whole
    SAVED_SHARD,  // every rank has what it owns
    SAVED_WORKER  // every rank has a whole one of its own
} SavedScope;

typedef struct SavedVector {
    const char *name;
    SavedScope scope;
    Real *data; // where kernels work; (parameter_count), or this rank's shard of it
    Precision format;
    bool of_adamw; // has only what AdamW steps, and lies in the order of optimizer_next()
} SavedVector;

static inline size_t saved_bytes(const SavedVector *vector, size_t elements) {
    return elements * precision_bytes(vector->format);
}

// The vectors of a run now, in the order of the file; returns how many. Moments and casts
// come last: behind one in bf16, a vector might not be aligned for fp32.
static inline int saved_vectors(const Scheduler *s, SavedVector vectors[CHECKPOINT_MAX_VECTORS]) {
    bool local = s->settings.kind == RULE_LOCAL, sharded = scheduler_shards(&s->settings),
         sparse = s->settings.local.sparse, casts = s->settings.keeps_casts;
    SavedScope master = sharded ? SAVED_SHARD : SAVED_SHARED, own = local ? SAVED_WORKER : SAVED_SHARED,
               moments = local ? SAVED_WORKER : master;
    const Optimizer *optimizer = &s->optimizer;
    const Precision fp32 = PRECISION_FP32, format = optimizer->settings.moments;
    Real *exact = as_reals(local ? s->local.outer : optimizer->master),
         *exchanged = as_reals(s->comm_buffer.data);
    const struct {
        bool is_saved;
        SavedVector vector;
    } rows[] = {
        {true, {"master", master, exact, fp32, false}},
        {!casts && (sharded || local), {"parameters", own, as_reals(s->parameters.data), fp32, false}},
        {sparse, {"error", SAVED_WORKER, exchanged, fp32, false}},
        {scheduler_feeds_back(&s->settings, s->transport->size),
         {"unsent", SAVED_WORKER, as_reals(s->unsent), fp32, false}},
        {local && !sparse, {"momentum", SAVED_SHARED, as_reals(s->local.momentum), fp32, false}},
        {local && s->job_in_flight, {"exchange", SAVED_SHARED, exchanged, fp32, false}},
        {!local && is_handed_over(s), {"gradients", SAVED_WORKER, exchanged, fp32, false}},
        {true, {"exp_avg", moments, optimizer->first_moment, format, false}},
        {true, {"exp_avg_sq", moments, optimizer->second_moment, format, true}},
        {casts, {"parameters", SAVED_SHARED, s->casts, PRECISION_BF16, false}},
    };
    int count = 0;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if (rows[i].is_saved) { vectors[count++] = rows[i].vector; }
    }
    return count;
}

// ---- The manifest ---------------------------------------------------------------------

// How a number of the run's state is stored, and which values of it are sound.
typedef enum NumberKind {
    NUMBER_INT,    // int
    NUMBER_COUNT,  // int64_t or uint64_t, from 0 to 2^53
    NUMBER_FLAG,   // bool
    NUMBER_REAL,   // double, as text: it comes back bit for bit, and may be NaN
    NUMBER_AMOUNT, // the same, from 0 to 2^53
    NUMBER_GROUP   // an object of numbers
} NumberKind;

// A number's name in the manifest, and its place in a struct. A table ends with a row without name.
typedef struct StateNumber {
    const char *key;
    NumberKind kind;
    size_t offset;
    const struct StateNumber *members; // of a group
} StateNumber;

#define NUMBER_AS(key, kind, type, member) \
    { key, NUMBER_##kind, offsetof(type, member), NULL }
#define NUMBER(kind, type, member) NUMBER_AS(#member, kind, type, member)
#define GROUP(members, type, member) \
    { #member, NUMBER_GROUP, offsetof(type, member), members }
#define NUMBERS_END \
    { NULL, NUMBER_INT, 0, NULL }

static const StateNumber SITE_NUMBERS[] = {NUMBER(AMOUNT, SpikeSite, micro_batch),
                                           NUMBER(AMOUNT, SpikeSite, element),
                                           NUMBER(FLAG, SpikeSite, high_loss), NUMBERS_END};

// Without what the job fills in.
static const StateNumber TALLY_NUMBERS[] = {NUMBER(AMOUNT, Tally, micro_batches),
                                            NUMBER(AMOUNT, Tally, predicted),
                                            NUMBER(REAL, Tally, loss),
                                            NUMBER(REAL, Tally, perfect_loss),
                                            NUMBER(AMOUNT, Tally, not_finite),
                                            NUMBER(AMOUNT, Tally, left_out),
                                            GROUP(SITE_NUMBERS, Tally, site),
                                            NUMBERS_END};

// The limit of a detector is an option, and no part of what it has learned.
static const StateNumber DETECTOR_NUMBERS[] = {NUMBER(AMOUNT, SpikeDetector, learned),
                                               NUMBER(REAL, SpikeDetector, mean),
                                               NUMBER(AMOUNT, SpikeDetector, variance), NUMBERS_END};

// What only this worker knows. Ranks exchange it as a record.
typedef struct WorkerNumbers {
    uint64_t micro_batches_begun;
    Tally tally, handed_over; // of the accumulator; of the gradients that wait for the next job
    double local_norm, local_rate;
    SpikeDetector norms, losses;
    double spikes_in_a_row;
    bool data_changed; // some that it has trained on are perhaps not those that the checkpoint names
} WorkerNumbers;

static const StateNumber WORKER_NUMBERS[] = {
    NUMBER(COUNT, WorkerNumbers, micro_batches_begun), GROUP(TALLY_NUMBERS, WorkerNumbers, tally),
    GROUP(TALLY_NUMBERS, WorkerNumbers, handed_over),  NUMBER(REAL, WorkerNumbers, local_norm),
    NUMBER(REAL, WorkerNumbers, local_rate),           GROUP(DETECTOR_NUMBERS, WorkerNumbers, norms),
    GROUP(DETECTOR_NUMBERS, WorkerNumbers, losses),    NUMBER(AMOUNT, WorkerNumbers, spikes_in_a_row),
    NUMBER(FLAG, WorkerNumbers, data_changed),         NUMBERS_END};

// The latest job. If it is in flight, the next boundary will apply its result.
static const StateNumber JOB_NUMBERS[] = {
    NUMBER(INT, Job, kind),           NUMBER(COUNT, Job, commit),       NUMBER(AMOUNT, Job, gradients_done),
    NUMBER(INT, Job, fragment),       NUMBER(REAL, Job, learning_rate), NUMBER(REAL, Job, gradient_norm),
    NUMBER(INT, Job, first_bad_rank), GROUP(TALLY_NUMBERS, Job, total), NUMBERS_END};

static const StateNumber SCHEDULER_NUMBERS[] = {
    NUMBER_AS("commit", COUNT, Scheduler, optimizer.steps),
    NUMBER(AMOUNT, Scheduler, gradients_done),
    NUMBER_AS("spikes", AMOUNT, Scheduler, spikes.count),
    NUMBER_AS("rollbacks", AMOUNT, Scheduler, spikes.rollbacks),
    NUMBER_AS("fragment", INT, Scheduler, local.fragment),
    NUMBER_AS("beside_commit", INT, Scheduler, settings.device.beside[0]),
    NUMBER_AS("beside_estimate", INT, Scheduler, settings.device.beside[1]),
    NUMBER(COUNT, Scheduler, reports),
    NUMBER_AS("reported_commit", COUNT, Scheduler, report.commit),
    NUMBER_AS("reported_gradients", AMOUNT, Scheduler, report.gradients_done),
    NUMBERS_END};

static const StateNumber RUN_NUMBERS[] = {NUMBER_AS("sequences", INT, CheckpointedRun, B),
                                          NUMBER_AS("length", INT, CheckpointedRun, T),
                                          NUMBER(INT, CheckpointedRun, product_processors),
                                          NUMBER_AS("frozen_crc32", COUNT, CheckpointedRun, frozen_sum),
                                          NUMBER_AS("trained_crc32", COUNT, CheckpointedRun, trained_sum),
                                          NUMBERS_END};

static const StateNumber PROGRESS_NUMBERS[] = {NUMBER(COUNT, CheckpointedRun, data_base),
                                               NUMBER(AMOUNT, CheckpointedRun, seconds),
                                               NUMBER(AMOUNT, CheckpointedRun, next_learning_rate),
                                               NUMBER(COUNT, CheckpointedRun, validated_commit),
                                               NUMBER(COUNT, CheckpointedRun, best_commit),
                                               NUMBER(REAL, CheckpointedRun, best_loss),
                                               NUMBER_AS("worse_validations", COUNT, CheckpointedRun, worse),
                                               NUMBERS_END};

// Adds the numbers of the struct at `base` to a JSON object, which it returns.
static inline json_t *numbers_write(json_t *object, const StateNumber *number, const void *base) {
    for (; number->key != NULL; number++) {
        const void *at = (const char *)base + number->offset;
        json_t *item = NULL;
        char text[64];
        switch (number->kind) {
        case NUMBER_INT: item = json_integer(*(const int *)at); break;
        case NUMBER_COUNT: item = json_integer((json_int_t) * (const int64_t *)at); break;
        case NUMBER_FLAG: item = json_boolean(*(const bool *)at); break;
        case NUMBER_REAL:
        case NUMBER_AMOUNT:
            snprintf(text, sizeof text, "%.17g", *(const double *)at);
            item = json_string(text);
            break;
        case NUMBER_GROUP: item = numbers_write(json_object(), number->members, at);
        }
        json_object_set_new(object, number->key, item);
    }
    return object;
}

// Fills in the numbers of the struct at `base`. False: one of them is missing or cannot be.
static inline bool numbers_read(const json_t *object, const StateNumber *number, void *base) {
    bool good = json_is_object(object);
    for (; good && number->key != NULL; number++) {
        void *at = (char *)base + number->offset;
        const json_t *item = json_object_get(object, number->key);
        const char *text = json_string_value(item);
        char *end = NULL;
        json_int_t whole = json_integer_value(item);
        double real = text != NULL ? strtod(text, &end) : -1;
        bool is_real = text != NULL && end != text && *end == '\0';
        switch (number->kind) {
        case NUMBER_INT:
            good = json_is_integer(item) && whole == (int)whole;
            *(int *)at = (int)whole;
            break;
        case NUMBER_COUNT:
            good = json_is_integer(item) && whole >= 0 && whole <= (json_int_t)1 << 53;
            *(int64_t *)at = (int64_t)whole;
            break;
        case NUMBER_FLAG:
            good = json_is_boolean(item);
            *(bool *)at = json_is_true(item);
            break;
        case NUMBER_REAL:
        case NUMBER_AMOUNT:
            good = is_real && (number->kind == NUMBER_REAL || (real >= 0 && real <= 0x1p53));
            *(double *)at = real;
            break;
        case NUMBER_GROUP: good = numbers_read(item, number->members, at);
        }
    }
    return good;
}

static inline int64_t integer_from_json(const json_t *object, const char *key) {
    return (int64_t)json_integer_value(json_object_get(object, key));
}

static inline bool checkpoint_has_muon(const CheckpointedRun *run) {
    return run->scheduler->optimizer.muon.count > 0;
}

// The manifest without its checksums. workers (size): the numbers of every rank.
static inline json_t *manifest_make(const CheckpointedRun *run, const WorkerNumbers *workers) {
    const Scheduler *s = run->scheduler;
    json_t *list = json_array(), *applied = json_array();
    char exchange[64];
    json_t *model = hf_model_describe(run->config, NULL);
    transport_sum_order(run->transport, exchange, sizeof exchange);
    for (int rank = 0; rank < run->transport->size; rank++) {
        json_array_append_new(list, numbers_write(json_object(), WORKER_NUMBERS, &workers[rank]));
    }
    for (int i = 0; s->local.fragments != NULL && i < s->settings.local.fragments; i++) {
        json_array_append_new(applied, json_integer((json_int_t)s->local.fragments[i].applied_at));
    }
    json_t *manifest = json_pack(
        "{s:i, s:s, s:s, s:s, s:s, s:I, s:o, s:s, s:s, s:o, s:b, s:o, s:o, s:O, s:s, s:b, s:b}", "checkpoint",
        CHECKPOINT_VERSION, "program", run->version, "revision", run->revision, "rounding", run->rounding,
        "optimizer", run->rule->name, "parameters", (json_int_t)run->table->parameter_count, "model", model,
        "device", s->settings.device.gpu != NULL ? "cuda" : "cpu", "data", run->data, "applied_at", applied,
        "job_in_flight", s->job_in_flight ? 1 : 0, "job", numbers_write(json_object(), JOB_NUMBERS, &s->job),
        "workers", list, "options", run->options, "exchange", exchange, "casts",
        s->settings.gathers_casts && !rule_is_ahead(run->rule, s), "muon", checkpoint_has_muon(run));
    if (s->settings.turn != NULL) {
        json_t *turn = json_array();
        for (int rank = 0; rank < run->transport->size; rank++) {
            json_array_append_new(turn, json_integer(s->settings.turn[rank]));
        }
        json_object_set_new(manifest, "turn", turn);
    }
    numbers_write(manifest, SCHEDULER_NUMBERS, s);
    numbers_write(manifest, RUN_NUMBERS, run);
    return numbers_write(manifest, PROGRESS_NUMBERS, run);
}

// CRC-32 of everything in the manifest but the member "checksum" itself.
static inline json_int_t manifest_checksum(const json_t *manifest) {
    json_t *others = json_copy((json_t *)manifest);
    json_object_del(others, "checksum");
    char *text = json_dumps(others, JSON_COMPACT | JSON_SORT_KEYS);
    json_int_t sum =
        text == NULL ? -1 : (json_int_t)crc32(0, (const unsigned char *)text, (uInt)strlen(text));
    free(text);
    json_decref(others);
    return sum;
}

// ---- Areas of state.safetensors: one vector each, its tensors in the model's order ------

// worker: whose vector it is; -1: all workers share it.
static inline void area_name(char name[128], const char *vector, int worker, const char *tensor) {
    char owner[24] = "";
    if (worker >= 0) { snprintf(owner, sizeof owner, "worker.%d.", worker); }
    snprintf(name, 128, "%s%s/%s", owner, vector, tensor);
}

static inline SafetensorsType area_type(Precision format) {
    return format == PRECISION_BF16 ? SAFETENSORS_BF16 : SAFETENSORS_F32;
}

// Where flat element `flat` stands in an area; of parameter_count: how many elements it has.
// without_muon: it lacks the matrices that Muon steps, which are the projections.
static inline size_t area_place(const ParameterTable *table, bool without_muon, size_t flat) {
    size_t place = flat;
    for (int i = 0; without_muon && i < table->count && table->entries[i].offset < flat; i++) {
        if (table->entries[i].is_projection) { place -= table->entries[i].count; }
    }
    return place;
}

// About how many bytes a checkpoint takes on disk, once the scheduler's memory has been planned.
static inline size_t checkpoint_bytes(const Scheduler *s, const TrainedPart *part) {
    SavedVector vectors[CHECKPOINT_MAX_VECTORS];
    size_t elements = part->table.parameter_count, whole = elements * sizeof(float),
           ranks = (size_t)s->transport->size;
    int count = saved_vectors(s, vectors);
    // The model with all that is frozen, or adapters alone.
    size_t bytes = part->rank > 0 ? whole : part->model.parameter_count * sizeof(float);
    for (int i = 0; i < count; i++) {
        bool without_muon = vectors[i].of_adamw && s->optimizer.muon.count > 0;
        bytes += saved_bytes(&vectors[i], area_place(&part->table, without_muon, elements)) *
                 (vectors[i].scope == SAVED_WORKER ? ranks : 1);
    }
    if (s->settings.kind == RULE_LOCAL && !s->settings.local.sparse) { bytes += whole; }
    if (s->settings.kind == RULE_OVERLAPPED) { bytes += whole * ranks; }
    return bytes;
}

// ---- Pieces: the parts of a vector that this rank writes or reads ---------------------

typedef struct PieceWalk {
    Scheduler *scheduler;
    // The visitor fills `host`, which then goes to the vector. Otherwise each rank visits
    // its part of a shared vector, and together they visit every element once.
    bool loads;
    float *stage; // (CHECKPOINT_STAGE) on the host; not used on the CPU
    // Reads or writes elements [flat, flat + count) at `host`, in the file's format.
    bool (*visit)(void *context, size_t flat, Real *host, size_t count, Error *error);
    void *context;
} PieceWalk;

// Elements [begin, begin + count) of the vector as it lies on this rank.
static inline bool walk_piece(const PieceWalk *walk, const SavedVector *vector, size_t begin, size_t flat,
                              size_t count, Error *error) {
    Stream *stream = walk->scheduler->compute;
    if (!stream_is_on_gpu(stream)) {
        return walk->visit(walk->context, flat, real_at(vector->data, begin, vector->format), count, error);
    }
    for (size_t done = 0; done < count; done += CHECKPOINT_STAGE) {
        size_t part = size_min(count - done, CHECKPOINT_STAGE), bytes = saved_bytes(vector, part);
        Real *data = real_at(vector->data, begin + done, vector->format);
        if (!walk->loads) { stream_copy(stream, walk->stage, data, bytes); }
        stream_settle(stream);
        if (!walk->visit(walk->context, flat + done, as_reals(walk->stage), part, error)) { return false; }
        if (walk->loads) { stream_copy(stream, data, walk->stage, bytes); }
        stream_settle(stream);
    }
    return true;
}

static inline bool walk_vector(const PieceWalk *walk, const SavedVector *vector, Error *error) {
    Scheduler *s = walk->scheduler;
    size_t count = s->problem.parameter_count, rank = (size_t)s->transport->rank,
           size = (size_t)s->transport->size;
    bool part = !walk->loads && vector->scope == SAVED_SHARED;
    size_t begin = part ? count / size * rank : 0,
           end = part && rank + 1 < size ? count / size * (rank + 1) : count;
    bool good = true;
    if (vector->of_adamw) {
        for (OptimizerRange range = {0}; good && optimizer_next(&s->optimizer, &range);) {
            size_t from = size_max(range.flat, begin), to = size_min(range.flat + range.count, end);
            if (optimizer_range_is_muons(&range) || from >= to) { continue; }
            good = walk_piece(walk, vector, range.second + (from - range.flat), from, to - from, error);
        }
    } else if (vector->scope == SAVED_SHARD) {
        for (LayoutRange range = {0}; good && layout_next(&s->layout, (int)rank, SIZE_MAX, &range);) {
            if (range.flat >= count) { break; }
            good = walk_piece(walk, vector, range.own, range.flat, size_min(range.count, count - range.flat),
                              error);
        }
    } else {
        good = walk_piece(walk, vector, begin, begin, end - begin, error);
    }
    return good;
}

// All ranks: a checkpoint is made and loaded by all or by none. False on all where one is
// not good, with the error of the first of these.
static inline bool all_ranks_good(const CheckpointedRun *run, bool good, Error *error) {
    Verdict bad;
    int rank = transport_first_failure(run->transport, "checkpoint", good ? 0 : 1, error, &bad);
    if (rank >= 0) { error_set(error, "rank %d on %s: %.900s", rank, bad.host, bad.error.text); }
    return rank < 0;
}

// ---- Paths, and which checkpoints there are -------------------------------------------

typedef struct CheckpointPaths {
    char folder[CHECKPOINT_PATH_SIZE];    // OUT/checkpoints
    char temporary[CHECKPOINT_PATH_SIZE]; // OUT/checkpoints/unfinished, where every checkpoint is made
    char final[CHECKPOINT_PATH_SIZE];     // OUT/checkpoints/commit-N
    char state[CHECKPOINT_PATH_SIZE + 32], model[CHECKPOINT_PATH_SIZE + 32]; // within temporary
} CheckpointPaths;

static inline CheckpointPaths checkpoint_paths(const char *directory, int64_t commit) {
    CheckpointPaths paths;
    snprintf(paths.folder, sizeof paths.folder, "%.*s/checkpoints", RUN_PATH_SIZE, directory);
    snprintf(paths.temporary, sizeof paths.temporary, "%.*s/unfinished", CHECKPOINT_PATH_SIZE - 16,
             paths.folder);
    snprintf(paths.final, sizeof paths.final, "%.*s/commit-%lld", CHECKPOINT_PATH_SIZE - 32, paths.folder,
             (long long)commit);
    snprintf(paths.state, sizeof paths.state, "%s/state.safetensors", paths.temporary);
    snprintf(paths.model, sizeof paths.model, "%s/model", paths.temporary);
    return paths;
}

// The newest finished checkpoint of a folder before commit `before`; -1: none.
static inline int64_t checkpoint_newest_in(const char *folder, int64_t before) {
    int64_t newest = -1;
    DIR *directory = opendir(folder);
    for (struct dirent *entry; directory != NULL && (entry = readdir(directory)) != NULL;) {
        long long commit;
        char rest;
        bool finished = sscanf(entry->d_name, "commit-%lld%c", &commit, &rest) == 1;
        if (finished && commit < before && commit > newest) { newest = commit; }
    }
    if (directory != NULL) { closedir(directory); }
    return newest;
}

static inline int64_t checkpoint_newest(const char *directory, int64_t before) {
    return checkpoint_newest_in(checkpoint_paths(directory, 0).folder, before);
}

// Where `directory` is a run or its folder of checkpoints, changes it to the newest of
// them. `directory` has room for `capacity` bytes. Returns whether it was changed.
static inline bool checkpoint_find(char *directory, size_t capacity) {
    bool found = hf_model_has(directory, "checkpoint.json"); // a config.json may be a model's or a run's
    for (int i = 0; i < 2 && !found && directory[0] != '\0'; i++) {
        char path[CHECKPOINT_PATH_SIZE];
        snprintf(path, sizeof path, "%.*s%s", RUN_PATH_SIZE, directory, i == 0 ? "" : "/checkpoints");
        int64_t newest = checkpoint_newest_in(path, INT64_MAX);
        if (newest < 0 || strlen(path) + 32 >= capacity) { continue; }
        snprintf(directory, capacity, "%s/commit-%lld", path, (long long)newest);
        return true;
    }
    return false;
}
