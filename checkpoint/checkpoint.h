// checkpoint.h: the format of a checkpoint, on which its writer, checkpoint/save.h, and
// its reader, checkpoint/load.h, must agree.
//
// A checkpoint holds everything that a run needs to go on as if it had never stopped. It
// is a directory of its own, OUT/checkpoints/step-N:
//
//   model/              the committed parameters as a Hugging Face directory, which
//                       transformers loads as it is
//   state.safetensors   vectors of the optimizer and of the rule, cut into the model's
//                       tensors: master/NAME, exp_avg/NAME, ...
//   checkpoint.json     the manifest: what the run was, its counters, its position in the
//                       data, what the rule remembers; and a CRC-32 of every block of
//                       state.safetensors, and of the manifest itself
//
// Vectors are logical: none of them is "the bytes of rank 3". What all ranks share is
// written once, each part by the rank that owns it; what every worker has of its own
// stands under worker.R/. So a run with another number of ranks, or of another rule, can
// go on from it. What is then not exactly as before is reported.
//
//   vector        of which rules         what
//   master        all                    the exact parameters; local: the outer ones
//   parameters    sharded; local: of     what compute uses, where it is not the
//                 each worker            master: an estimate, rounded, or a worker's
//                                        own. "casts": they are casts of the master
//   gradients     overlapped: of each    handed over, and waiting for the next job
//                 worker
//   momentum      local                  of the outer step
//   exchange      with a job in flight   the sum that the next boundary will apply
//                 between commits
//   exp_avg,      all; local: of each    AdamW's moments, in the format of --moments; all
//   exp_avg_sq    worker                 other vectors are fp32
#ifndef ACCO_CHECKPOINT_CHECKPOINT_H
#define ACCO_CHECKPOINT_CHECKPOINT_H

#include <zlib.h>

#include "checkpoint/hf_model.h"
#include "checkpoint/safetensors.h"
#include "comm/verdict.h"
#include "gpt_neo_config.h"
#include "rules.h"
#include "runtime/files.h"
#include "runtime/log.h"

enum {
    CHECKPOINT_VERSION = 2,
    CHECKPOINT_MAX_VECTORS = 8,
    CHECKPOINT_BLOCK = 4 << 20, // bytes under one checksum
    CHECKPOINT_STAGE = 1 << 20, // elements that are copied from or to a GPU at a time
    CHECKPOINT_PATH_SIZE = RUN_PATH_SIZE + 96
};

// Commits in no particular order.
typedef struct CommitSet {
    int64_t *commits; // (count)
    int count;
} CommitSet;

static inline bool commit_set_has(const CommitSet *set, int64_t commit) {
    int i = 0;
    while (i < set->count && set->commits[i] != commit) { i++; }
    return i < set->count;
}

static inline void commit_set_add(CommitSet *set, int64_t commit) {
    set->commits = (int64_t *)realloc(set->commits, (size_t)(set->count + 1) * sizeof commit);
    set->commits[set->count++] = commit;
}

static inline void commit_set_remove(CommitSet *set, int64_t commit) {
    for (int i = 0; i < set->count; i++) {
        if (set->commits[i] == commit) { set->commits[i--] = set->commits[--set->count]; }
    }
}

static inline void commit_set_clear(CommitSet *set) {
    free(set->commits);
    set->commits = NULL;
    set->count = 0;
}

// The run that a checkpoint describes, and what is known about its checkpoints. The
// program fills in the first part before it saves or loads; what pointers point to
// belongs to the program.
typedef struct CheckpointedRun {
    Transport *transport;
    Scheduler *scheduler; // its vectors, numbers and streams
    const Rule *rule;
    const GptNeoConfig *config;
    const ParameterTable *table;
    int B, T;               // shape of a micro-batch
    const char *directory;  // OUT
    const char *tokenizer;  // where the tokenizer of the model may be; NULL: there is none
    const char *version;    // of the program
    int64_t keep;           // how many of the latest checkpoints stay
    int64_t keep_every;     // the first one at or beyond each multiple of this stays too; 0: none
    json_t *options;        // the effective options, name: value
    int product_processors; // of a GPU, that matrix products may count on; 0: all
    const char *measured;   // why the options have what was chosen by a measurement; "": nothing was
    // Whether going on with `now` instead of `before` (NULL: not known then) leads to
    // other bits.
    bool (*option_change_matters)(const void *context, const char *name, const json_t *before,
                                  const json_t *now);
    const void *option_context; // its first argument

    // Saved and loaded with everything else. data_base counts micro-batches of all ranks:
    // the data before it was used before this process began, or before it rolled back.
    int64_t data_base;
    double seconds; // of training so far; the program sets it before it saves

    // Changed by saving.
    struct Saver *saver;                 // the checkpoint that is being written; NULL: none
    int64_t saved_commit, saved_reports; // the scheduler's, of the newest checkpoint on disk

    // Changed by loading.
    CommitSet damaged; // checkpoints that could not be loaded
} CheckpointedRun;

// ---------------------------------------------------------------------------------------
// Vectors

typedef enum SavedScope {
    SAVED_SHARED, // the same on all ranks, whole
    SAVED_SHARD,  // every rank has what it owns
    SAVED_WORKER  // every rank has a whole one of its own
} SavedScope;

typedef struct SavedVector {
    const char *name;
    SavedScope scope;
    Real *data;      // where kernels work; (parameter_count), of a shard its own elements
    Precision held;  // the format of `data`
    Precision saved; // in the file: the same, but casts, which only a GPU keeps, are saved as fp32
} SavedVector;

static inline SavedVector saved_floats(const char *name, SavedScope scope, float *data) {
    SavedVector vector = {name, scope, as_reals(data), PRECISION_FP32, PRECISION_FP32};
    return vector;
}

static inline size_t saved_bytes(const SavedVector *vector, size_t elements) {
    return elements * precision_bytes(vector->saved);
}

static inline void saved_vector_add(SavedVector *vectors, int *count, SavedVector vector) {
    assert(*count < CHECKPOINT_MAX_VECTORS);
    vectors[(*count)++] = vector;
}

// The vectors of a run in its present state, in the order of the file. Returns how many
// there are. Moments come last: where they are bf16, what stands behind them need not be
// aligned for fp32.
static inline int saved_vectors(Scheduler *s, SavedVector vectors[CHECKPOINT_MAX_VECTORS]) {
    bool local = s->settings.kind == RULE_LOCAL, sharded = !local && !s->settings.replicated;
    SavedScope moments = local ? SAVED_WORKER : sharded ? SAVED_SHARD : SAVED_SHARED;
    Precision format = s->optimizer.settings.moments;
    SavedVector casts = {"parameters", SAVED_SHARED, s->casts, PRECISION_BF16, PRECISION_FP32},
                first = {"exp_avg", moments, s->optimizer.first_moment, format, format},
                second = {"exp_avg_sq", moments, s->optimizer.second_moment, format, format};
    int count = 0;
    saved_vector_add(
        vectors, &count,
        saved_floats("master", sharded ? SAVED_SHARD : SAVED_SHARED, local ? s->outer : s->optimizer.master));
    if (s->settings.keeps_casts) {
        saved_vector_add(vectors, &count, casts);
    } else if (sharded || local) {
        saved_vector_add(vectors, &count,
                         saved_floats("parameters", local ? SAVED_WORKER : SAVED_SHARED, s->parameters.data));
    }
    if (local) { saved_vector_add(vectors, &count, saved_floats("momentum", SAVED_SHARED, s->momentum)); }
    if (local && s->job_in_flight) {
        saved_vector_add(vectors, &count, saved_floats("exchange", SAVED_SHARED, s->comm_buffer.data));
    }
    if (!local && is_handed_over(s)) {
        saved_vector_add(vectors, &count, saved_floats("gradients", SAVED_WORKER, s->comm_buffer.data));
    }
    saved_vector_add(vectors, &count, first);
    saved_vector_add(vectors, &count, second);
    return count;
}

// About how many bytes a checkpoint will have on disk, the model in it included. between:
// one of the middle of a run, which may hold an exchange that is under way. The scheduler's
// memory needs no more than to be planned.
static inline size_t checkpoint_bytes(const Scheduler *s, bool between) {
    Scheduler at_rest = *s;
    SavedVector vectors[CHECKPOINT_MAX_VECTORS];
    size_t whole = s->problem.parameter_count * sizeof(float), ranks = (size_t)s->transport->size;
    int count = saved_vectors(&at_rest, vectors);
    size_t bytes = whole; // the model
    for (int i = 0; i < count; i++) {
        bytes += saved_bytes(&vectors[i], s->problem.parameter_count) *
                 (vectors[i].scope == SAVED_WORKER ? ranks : 1);
    }
    if (between && s->settings.kind == RULE_LOCAL) { bytes += whole; }
    if (between && s->settings.kind == RULE_OVERLAPPED) { bytes += whole * ranks; }
    return bytes;
}

// ---------------------------------------------------------------------------------------
// The manifest: numbers

// As text: a double comes back bit for bit, and may be NaN.
static inline json_t *number_to_json(double value) {
    char text[64];
    snprintf(text, sizeof text, "%.17g", value);
    return json_string(text);
}

static inline double number_from_json(const json_t *object, const char *key) {
    const char *text = json_string_value(json_object_get(object, key));
    return text == NULL ? 0 : strtod(text, NULL);
}

static inline int64_t integer_from_json(const json_t *object, const char *key) {
    return (int64_t)json_integer_value(json_object_get(object, key));
}

static inline json_t *tally_to_json(const Tally *tally) {
    json_t *object = json_object();
    for (int i = 0; i < TALLY_SUM_COUNT; i++) {
        const TallySum *sum = &TALLY_SUMS[i];
        if (sum->name == NULL) { continue; }
        json_object_set_new(object, sum->name, number_to_json(*tally_sum((Tally *)tally, sum)));
    }
    const SpikeSite *site = &tally->site;
    json_object_set_new(object, "site",
                        json_pack("{s:o, s:o, s:b}", "micro_batch", number_to_json(site->micro_batch),
                                  "element", number_to_json(site->element), "high_loss",
                                  site->high_loss ? 1 : 0));
    return object;
}

static inline Tally tally_from_json(const json_t *object) {
    Tally tally;
    memset(&tally, 0, sizeof tally);
    for (int i = 0; i < TALLY_SUM_COUNT; i++) {
        const TallySum *sum = &TALLY_SUMS[i];
        if (sum->name != NULL) { *tally_sum(&tally, sum) = number_from_json(object, sum->name); }
    }
    const json_t *site = json_object_get(object, "site");
    tally.site.micro_batch = number_from_json(site, "micro_batch");
    tally.site.element = number_from_json(site, "element");
    tally.site.high_loss = json_is_true(json_object_get(site, "high_loss"));
    return tally;
}

// The limit of a detector is an option, and no part of what it has learned.
static inline json_t *detector_to_json(const SpikeDetector *detector) {
    return json_pack("{s:o, s:o, s:o}", "learned", number_to_json(detector->learned), "mean",
                     number_to_json(detector->mean), "variance", number_to_json(detector->variance));
}

static inline SpikeDetector detector_from_json(const json_t *object) {
    SpikeDetector detector = {0, number_from_json(object, "learned"), number_from_json(object, "mean"),
                              number_from_json(object, "variance")};
    return detector;
}

// What one worker alone knows. Ranks exchange it as a record.
typedef struct WorkerNumbers {
    uint64_t micro_batches_begun;
    Tally tally, handed_over; // of the accumulator; of the gradients that wait for the next job
    double local_norm, local_rate;
    SpikeDetector norms, losses;
    double spikes_in_a_row;
} WorkerNumbers;

static inline WorkerNumbers worker_numbers(const Scheduler *s) {
    WorkerNumbers numbers = {s->micro_batches_begun, s->tally, s->job.tally, s->local_norm,
                             s->local_rate,          s->norms, s->losses,    s->spikes_in_a_row};
    return numbers;
}

static inline json_t *worker_numbers_to_json(const WorkerNumbers *numbers) {
    return json_pack("{s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "micro_batches_begun",
                     (json_int_t)numbers->micro_batches_begun, "tally", tally_to_json(&numbers->tally),
                     "handed_over", tally_to_json(&numbers->handed_over), "local_norm",
                     number_to_json(numbers->local_norm), "local_rate", number_to_json(numbers->local_rate),
                     "norms", detector_to_json(&numbers->norms), "losses", detector_to_json(&numbers->losses),
                     "spikes_in_a_row", number_to_json(numbers->spikes_in_a_row));
}

// Of worker number `worker` of a manifest's list of them.
static inline WorkerNumbers worker_numbers_from_json(const json_t *workers, int worker) {
    const json_t *object = json_array_get(workers, (size_t)worker);
    WorkerNumbers numbers = {(uint64_t)integer_from_json(object, "micro_batches_begun"),
                             tally_from_json(json_object_get(object, "tally")),
                             tally_from_json(json_object_get(object, "handed_over")),
                             number_from_json(object, "local_norm"),
                             number_from_json(object, "local_rate"),
                             detector_from_json(json_object_get(object, "norms")),
                             detector_from_json(json_object_get(object, "losses")),
                             number_from_json(object, "spikes_in_a_row")};
    return numbers;
}

// The latest job; where it is in flight, its result waits for the next boundary.
static inline json_t *job_to_json(const Job *job) {
    return json_pack("{s:i, s:I, s:o, s:i, s:o, s:o, s:i, s:o}", "kind", (int)job->kind, "commit",
                     (json_int_t)job->commit, "gradients_done", number_to_json(job->gradients_done),
                     "fragment", job->fragment, "learning_rate", number_to_json(job->learning_rate),
                     "gradient_norm", number_to_json(job->gradient_norm), "first_bad_rank",
                     job->first_bad_rank, "total", tally_to_json(&job->total));
}

static inline void job_from_json(const json_t *object, Job *job) {
    job->kind = (JobKind)integer_from_json(object, "kind");
    job->commit = integer_from_json(object, "commit");
    job->gradients_done = number_from_json(object, "gradients_done");
    job->fragment = (int)integer_from_json(object, "fragment");
    job->learning_rate = number_from_json(object, "learning_rate");
    job->gradient_norm = number_from_json(object, "gradient_norm");
    job->first_bad_rank = (int)integer_from_json(object, "first_bad_rank");
    job->spike = SPIKE_NONE; // checkpoint_begin saves no job with a spike
    job->total = tally_from_json(json_object_get(object, "total"));
}

// ---------------------------------------------------------------------------------------
// The manifest

// The model's whole configuration: two models may have tensors of the same shapes and yet
// compute different things.
static inline json_t *model_to_json(const CheckpointedRun *run) {
    return hf_model_describe(run->config, SAFETENSORS_F32, NULL);
}

// The manifest without its checksums. workers (size): the numbers of all ranks.
static inline json_t *manifest_make(const CheckpointedRun *run, const WorkerNumbers *workers) {
    const Scheduler *s = run->scheduler;
    json_t *list = json_array(), *applied = json_array();
    char exchange[64];
    transport_sum_order(run->transport, exchange, sizeof exchange);
    for (int rank = 0; rank < run->transport->size; rank++) {
        json_array_append_new(list, worker_numbers_to_json(&workers[rank]));
    }
    for (int i = 0; s->fragments != NULL && i < s->settings.fragments; i++) {
        json_array_append_new(applied, json_integer((json_int_t)s->fragments[i].applied_at));
    }
    return json_pack("{s:i, s:s, s:s, s:I, s:o, s:s, s:i, s:i, s:I, s:o, s:o, s:o, s:I, s:I, s:o, s:I, s:o, "
                     "s:i, s:o, s:b, s:o, s:o, s:O, s:s, s:s, s:b, s:i}",
                     "checkpoint", CHECKPOINT_VERSION, "program", run->version, "optimizer", run->rule->name,
                     "parameters", (json_int_t)run->table->parameter_count, "model", model_to_json(run),
                     "device", s->settings.gpu != NULL ? "cuda" : "cpu", "sequences", run->B, "length",
                     run->T, "commit", (json_int_t)s->optimizer.commits, "gradients_done",
                     number_to_json(s->gradients_done), "spikes", number_to_json(s->spikes), "rollbacks",
                     number_to_json(s->rollbacks), "reports", (json_int_t)s->reports, "reported_commit",
                     (json_int_t)s->report.commit, "reported_gradients",
                     number_to_json(s->report.gradients_done), "data_base", (json_int_t)run->data_base,
                     "seconds", number_to_json(run->seconds), "fragment", s->fragment, "applied_at", applied,
                     "job_in_flight", s->job_in_flight ? 1 : 0, "job", job_to_json(&s->job), "workers", list,
                     "options", run->options, "measured", run->measured, "exchange", exchange, "casts",
                     s->settings.gathers_casts && !rule_is_ahead(run->rule, s), "product_processors",
                     run->product_processors);
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

// ---------------------------------------------------------------------------------------
// Areas of state.safetensors: one vector each, with the model's tensors one behind the
// other in the order of the flat vector

// worker: whose; -1: shared by all of them.
static inline void area_name(char name[128], const char *vector, int worker, const char *tensor) {
    if (worker >= 0) {
        snprintf(name, 128, "worker.%d.%s/%s", worker, vector, tensor);
    } else {
        snprintf(name, 128, "%s/%s", vector, tensor);
    }
}

static inline SafetensorsType area_type(Precision format) {
    return format == PRECISION_BF16 ? SAFETENSORS_BF16 : SAFETENSORS_F32;
}

static inline void area_plan(SafetensorsPlan *plan, const ParameterTable *table, const char *vector,
                             int worker, Precision format) {
    for (int i = 0; i < table->count; i++) {
        const ParameterInfo *entry = &table->entries[i];
        char name[128];
        size_t shape[2];
        int dimensions = hf_model_shape(entry, shape);
        area_name(name, vector, worker, entry->name);
        safetensors_plan_add(plan, name, area_type(format), dimensions, shape);
    }
}

// The first element of an area (parameter_count) in this format; NULL: the file has none of
// this name, format and size.
static inline const Real *area_find(const SafetensorsFile *file, const ParameterTable *table,
                                    const char *vector, int worker, Precision format) {
    const uint8_t *begin = NULL;
    size_t bytes = precision_bytes(format);
    for (int i = 0; i < table->count; i++) {
        char name[128];
        area_name(name, vector, worker, table->entries[i].name);
        const SafetensorsEntry *entry = safetensors_find(file, name);
        if (entry == NULL || entry->type != area_type(format) ||
            entry->bytes != table->entries[i].count * bytes) {
            return NULL;
        }
        if (i == 0) { begin = entry->data; }
        if (entry->data != begin + table->entries[i].offset * bytes) { return NULL; }
    }
    return (uintptr_t)begin % bytes == 0 ? (const Real *)(const void *)begin : NULL;
}

// ---------------------------------------------------------------------------------------
// Pieces: the parts of a vector that this rank writes or reads

// `host` (count) stands for elements [flat, flat + count) of the vector, in the format of the
// file.
typedef bool (*PieceVisit)(void *context, size_t flat, Real *host, size_t count, Error *error);

typedef struct PieceWalk {
    Scheduler *scheduler;
    bool writes_to_device; // what the visitor leaves in `host` is copied to where kernels work
    float *stage;          // (CHECKPOINT_STAGE) on the host; not used on the CPU
    PieceVisit visit;
    void *context;
} PieceWalk;

// Copies `count` elements of the vector, from its element `begin` on, from a GPU to the
// stage or back.
static inline void walk_copy(const PieceWalk *walk, const SavedVector *vector, size_t begin, size_t count) {
    Stream *stream = walk->scheduler->compute;
    bool writes = walk->writes_to_device;
    Real *data = real_at(vector->data, begin, vector->held);
    if (vector->held != vector->saved && writes) {
        casts_from_host(stream, data, walk->stage, count);
    } else if (vector->held != vector->saved) {
        casts_to_host(stream, walk->stage, data, count);
    } else {
        void *stage = walk->stage;
        stream_copy(stream, writes ? data : stage, writes ? stage : data, saved_bytes(vector, count));
        stream_settle(stream);
    }
}

// Elements [begin, begin + count) of the vector as it lies on this rank.
static inline bool walk_piece(const PieceWalk *walk, const SavedVector *vector, size_t begin, size_t flat,
                              size_t count, Error *error) {
    if (walk->scheduler->compute->queue == NULL) {
        assert(vector->held == vector->saved);
        return walk->visit(walk->context, flat, real_at(vector->data, begin, vector->held), count, error);
    }
    for (size_t done = 0; done < count; done += CHECKPOINT_STAGE) {
        size_t part = size_min(count - done, CHECKPOINT_STAGE);
        if (!walk->writes_to_device) { walk_copy(walk, vector, begin + done, part); }
        if (!walk->visit(walk->context, flat + done, as_reals(walk->stage), part, error)) { return false; }
        if (walk->writes_to_device) { walk_copy(walk, vector, begin + done, part); }
    }
    return true;
}

// Visits all elements that this rank has. divided: of a shared vector only this rank's
// part, so that all ranks together visit every element once.
static inline bool walk_vector(const PieceWalk *walk, const SavedVector *vector, bool divided, Error *error) {
    Scheduler *s = walk->scheduler;
    size_t count = s->problem.parameter_count, rank = (size_t)s->transport->rank,
           size = (size_t)s->transport->size;
    if (vector->scope != SAVED_SHARD) {
        bool part = divided && vector->scope == SAVED_SHARED;
        size_t begin = part ? count / size * rank : 0,
               end = part && rank + 1 < size ? count / size * (rank + 1) : count;
        return walk_piece(walk, vector, begin, begin, end - begin, error);
    }
    for (size_t own = 0; own < layout_shard(&s->layout); own += s->layout.piece) {
        size_t flat = layout_flat(&s->layout, s->transport->rank, own), end = flat + s->layout.piece;
        if (flat >= count) { break; }
        if (!walk_piece(walk, vector, own, flat, size_min(end, count) - flat, error)) { return false; }
    }
    return true;
}

// ---------------------------------------------------------------------------------------
// Agreement: a checkpoint is made by all ranks or by none, and loaded by all or by none

// All ranks. True on all of them when all are good; otherwise false on all of them, and
// `error` is that of the first rank that is not.
static inline bool all_ranks_good(const CheckpointedRun *run, bool good, Error *error) {
    Verdict bad;
    int rank = transport_first_failure(run->transport, "checkpoint", good ? 0 : 1, error, &bad);
    if (rank >= 0) { error_set(error, "rank %d on %s: %.900s", rank, bad.host, bad.error.text); }
    return rank < 0;
}

// ---------------------------------------------------------------------------------------
// Paths, and which checkpoints there are

typedef struct CheckpointPaths {
    char folder[CHECKPOINT_PATH_SIZE];    // OUT/checkpoints
    char temporary[CHECKPOINT_PATH_SIZE]; // OUT/checkpoints/unfinished, where every checkpoint is made
    char final[CHECKPOINT_PATH_SIZE];     // OUT/checkpoints/step-N
    // Within temporary.
    char state[CHECKPOINT_PATH_SIZE + 32], manifest[CHECKPOINT_PATH_SIZE + 32],
        model[CHECKPOINT_PATH_SIZE + 32];
} CheckpointPaths;

static inline CheckpointPaths checkpoint_paths(const char *directory, int64_t commit) {
    CheckpointPaths paths;
    snprintf(paths.folder, sizeof paths.folder, "%.*s/checkpoints", RUN_PATH_SIZE, directory);
    snprintf(paths.temporary, sizeof paths.temporary, "%.*s/unfinished", CHECKPOINT_PATH_SIZE - 16,
             paths.folder);
    snprintf(paths.final, sizeof paths.final, "%.*s/step-%lld", CHECKPOINT_PATH_SIZE - 32, paths.folder,
             (long long)commit);
    snprintf(paths.state, sizeof paths.state, "%s/state.safetensors", paths.temporary);
    snprintf(paths.manifest, sizeof paths.manifest, "%s/checkpoint.json", paths.temporary);
    snprintf(paths.model, sizeof paths.model, "%s/model", paths.temporary);
    return paths;
}

typedef struct CheckpointList {
    int64_t *commits; // (count), ascending
    int count;
} CheckpointList;

static inline int checkpoint_compare(const void *left, const void *right) {
    int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return a < b ? -1 : a > b;
}

// The finished checkpoints in a folder; the caller frees list.commits.
static inline CheckpointList checkpoint_list(const char *folder) {
    CheckpointList list = {NULL, 0};
    DIR *directory = opendir(folder);
    for (struct dirent *entry; directory != NULL && (entry = readdir(directory)) != NULL;) {
        long long commit;
        char rest;
        if (sscanf(entry->d_name, "step-%lld%c", &commit, &rest) != 1 || commit < 0) { continue; }
        list.commits = (int64_t *)realloc(list.commits, (size_t)(list.count + 1) * sizeof(int64_t));
        list.commits[list.count++] = commit;
    }
    if (directory != NULL) { closedir(directory); }
    if (list.count > 0) { qsort(list.commits, (size_t)list.count, sizeof(int64_t), checkpoint_compare); }
    return list;
}

// Where `directory` is a run or its folder of checkpoints, changes it to the newest of
// them. `directory` has room for `capacity` bytes. Returns whether it was changed.
static inline bool checkpoint_find(char *directory, size_t capacity) {
    static const char *const folders[] = {"", "/checkpoints"};
    bool found = hf_model_has(directory, "checkpoint.json"); // a config.json may be that of a model or a run
    for (int i = 0; i < 2 && !found && directory[0] != '\0'; i++) {
        char path[CHECKPOINT_PATH_SIZE];
        snprintf(path, sizeof path, "%.*s%s", RUN_PATH_SIZE, directory, folders[i]);
        CheckpointList list = checkpoint_list(path);
        if (list.count > 0 && strlen(path) + 32 < capacity) {
            snprintf(directory, capacity, "%s/step-%lld", path, (long long)list.commits[list.count - 1]);
            free(list.commits);
            return true;
        }
        free(list.commits);
    }
    return false;
}

// The commit of the newest finished checkpoint of the run in `directory` from before
// commit `before`; -1: there is none.
static inline int64_t checkpoint_newest(const char *directory, int64_t before) {
    CheckpointList list = checkpoint_list(checkpoint_paths(directory, 0).folder);
    int64_t newest = -1;
    for (int i = 0; i < list.count && list.commits[i] < before; i++) { newest = list.commits[i]; }
    free(list.commits);
    return newest;
}

#endif
