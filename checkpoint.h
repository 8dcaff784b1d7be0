// checkpoint.h: everything that a run needs to go on as if it had never stopped, on disk.
//
// A checkpoint is a directory of its own, OUT/checkpoints/step-N:
//
//   model/              the committed parameters as a Hugging Face directory, which transformers loads as it is
//   state.safetensors   vectors of the optimizer and of the rule, cut into the model's tensors: master/NAME, exp_avg/NAME, ...
//   checkpoint.json     numbers: the schedule, positions in the data, what the rule remembers; and a checksum of every block of the state
//
// Vectors are logical, never "rank 3's bytes": what ranks share is written once, by whoever owns a piece of it, and what each worker has of
// its own stands under worker.R/. So another number of ranks, and another rule, can go on from it; what is not exact then is said.
//
//   vector       which rules                    what
//   master       all                            the exact parameters; in local rules the outer ones
//   exp_avg ...  all; local: of each worker     AdamW's moments
//   parameters   sharded; local: of each worker what compute uses, where it is not the master: an estimate, a rounding, a walk of one's own
//   gradients    dpu, acco-wp, acco: worker     what was handed over and waits for the next job
//   momentum     local                          of the outer step
//   exchange     co2                            the sum that the next boundary will apply
//
// Saving happens between two commits, with both streams idle. All ranks write their parts of one file, in a directory that they all see,
// under a name of its own; when every part is on disk the directory is renamed: a checkpoint is whole or absent. Any failure leaves the
// ones before it as they were, and the run goes on.
#ifndef ACCO_CHECKPOINT_H
#define ACCO_CHECKPOINT_H

#include <dirent.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <zlib.h>

#include "pretrained.h"
#include "run.h"
#include "runtime/safetensors.h"

enum {
    CHECKPOINT_VERSION = 1,
    CHECKPOINT_VECTORS = 8,
    CHECKPOINT_BLOCK = 4 << 20, // bytes under one checksum
    CHECKPOINT_STAGE = 1 << 20, // elements that are copied from or to a GPU at a time
    CHECKPOINT_PATH = RUN_PATH_SIZE + 96
};

typedef enum SavedScope {
    SAVED_SHARED, // the same on all ranks, whole
    SAVED_SHARD,  // every rank has what it owns
    SAVED_WORKER  // every rank has a whole one of its own
} SavedScope;

typedef struct SavedVector {
    const char *name;
    SavedScope scope;
    float *data; // where kernels work; (parameter_count), of a shard its own elements
} SavedVector;

static inline void saved_vector_add(SavedVector *vectors, int *count, const char *name, SavedScope scope, float *data) {
    SavedVector vector = {name, scope, data};
    assert(*count < CHECKPOINT_VECTORS);
    vectors[(*count)++] = vector;
}

// What this run saves now. Returns how many there are.
static inline int saved_vectors(Scheduler *s, SavedVector vectors[CHECKPOINT_VECTORS]) {
    bool local = s->settings.kind == RULE_LOCAL, sharded = !local && !s->settings.replicated;
    SavedScope moments = local ? SAVED_WORKER : sharded ? SAVED_SHARD : SAVED_SHARED;
    int count = 0;
    saved_vector_add(vectors, &count, "master", sharded ? SAVED_SHARD : SAVED_SHARED, local ? s->outer : s->optimizer.master);
    saved_vector_add(vectors, &count, "exp_avg", moments, s->optimizer.first_moment);
    saved_vector_add(vectors, &count, "exp_avg_sq", moments, s->optimizer.second_moment);
    if (sharded || local) { saved_vector_add(vectors, &count, "parameters", local ? SAVED_WORKER : SAVED_SHARED, s->parameters.data); }
    if (local) { saved_vector_add(vectors, &count, "momentum", SAVED_SHARED, s->momentum); }
    if (local && s->job_in_flight) { saved_vector_add(vectors, &count, "exchange", SAVED_SHARED, s->exchange.data); }
    if (!local && is_handed_over(s)) { saved_vector_add(vectors, &count, "gradients", SAVED_WORKER, s->exchange.data); }
    return count;
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// Numbers

// A double that comes back bit for bit, and may be NaN.
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
    return json_pack("{s:o, s:o, s:o, s:o, s:o}", "micro_batches", number_to_json(tally->micro_batches), "loss",
                     number_to_json(tally->loss), "perfect_loss", number_to_json(tally->perfect_loss), "not_finite",
                     number_to_json(tally->not_finite), "left_out", number_to_json(tally->left_out));
}

static inline Tally tally_from_json(const json_t *object) {
    Tally tally;
    memset(&tally, 0, sizeof tally);
    tally.micro_batches = number_from_json(object, "micro_batches");
    tally.loss = number_from_json(object, "loss");
    tally.perfect_loss = number_from_json(object, "perfect_loss");
    tally.not_finite = number_from_json(object, "not_finite");
    tally.left_out = number_from_json(object, "left_out");
    return tally;
}

// What one worker alone knows; travels between ranks as it is.
typedef struct WorkerNumbers {
    uint64_t micro_batches_begun;
    Tally tally, handed_over; // of the accumulator, and of what waits for the next job
    double local_norm, local_rate;
    SpikeDetector norms, losses;
    double spikes_in_a_row;
} WorkerNumbers;

// What is asked for, the limit, is no part of it.
static inline json_t *detector_to_json(const SpikeDetector *detector) {
    return json_pack("{s:o, s:o, s:o}", "learned", number_to_json(detector->learned), "mean", number_to_json(detector->mean), "variance",
                     number_to_json(detector->variance));
}

static inline SpikeDetector detector_from_json(const json_t *object) {
    SpikeDetector detector = {0, number_from_json(object, "learned"), number_from_json(object, "mean"), number_from_json(object, "variance")};
    return detector;
}

static inline WorkerNumbers worker_numbers(const Scheduler *s) {
    WorkerNumbers numbers = {s->micro_batches_begun, s->tally, s->job.tally, s->local_norm,
                             s->local_rate,          s->norms, s->losses,    s->spikes_in_a_row};
    return numbers;
}

static inline json_t *worker_numbers_to_json(const WorkerNumbers *numbers) {
    return json_pack("{s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "micro_batches_begun", (json_int_t)numbers->micro_batches_begun, "tally",
                     tally_to_json(&numbers->tally), "handed_over", tally_to_json(&numbers->handed_over), "local_norm",
                     number_to_json(numbers->local_norm), "local_rate", number_to_json(numbers->local_rate), "norms",
                     detector_to_json(&numbers->norms), "losses", detector_to_json(&numbers->losses), "spikes_in_a_row",
                     number_to_json(numbers->spikes_in_a_row));
}

static inline WorkerNumbers worker_numbers_from_json(const json_t *object) {
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

// A job whose result waits for the next boundary.
static inline json_t *job_to_json(const Job *job) {
    return json_pack("{s:i, s:I, s:i, s:o, s:o, s:i, s:o}", "kind", (int)job->kind, "commit", (json_int_t)job->commit, "fragment",
                     job->fragment, "learning_rate", number_to_json(job->learning_rate), "gradient_norm",
                     number_to_json(job->gradient_norm), "first_bad_rank", job->first_bad_rank, "total",
                     tally_to_json(&job->total));
}

static inline void job_from_json(const json_t *object, Job *job) {
    job->kind = (JobKind)integer_from_json(object, "kind");
    job->commit = integer_from_json(object, "commit");
    job->fragment = (int)integer_from_json(object, "fragment");
    job->learning_rate = number_from_json(object, "learning_rate");
    job->gradient_norm = number_from_json(object, "gradient_norm");
    job->first_bad_rank = (int)integer_from_json(object, "first_bad_rank");
    job->spike = SPIKE_NONE; // no checkpoint is made of others
    job->total = tally_from_json(json_object_get(object, "total"));
}

static inline json_t *fragments_to_json(const Scheduler *s) {
    json_t *list = json_array();
    for (int i = 0; s->fragments != NULL && i < s->settings.fragments; i++) {
        json_array_append_new(list, json_integer((json_int_t)s->fragments[i].applied_at));
    }
    return list;
}

// What computes something else though its tensors may have the same sizes.
static inline json_t *model_to_json(const Run *run) { return pretrained_describe(&run->config, SAFETENSORS_F32, NULL); }

// Everything but the vectors. workers (size): of all ranks.
static inline json_t *checkpoint_numbers(const Run *run, const WorkerNumbers *workers) {
    const Scheduler *s = &run->scheduler;
    json_t *list = json_array();
    for (int rank = 0; rank < run->transport.size; rank++) { json_array_append_new(list, worker_numbers_to_json(&workers[rank])); }
    return json_pack("{s:i, s:s, s:s, s:I, s:o, s:s, s:i, s:i, s:I, s:o, s:o, s:o, s:I, s:I, s:o, s:i, s:o, s:b, s:o, s:o, s:o}", "checkpoint",
                     CHECKPOINT_VERSION, "program", ACCO_VERSION, "optimizer", run->rule->name, "parameters",
                     (json_int_t)run->table.parameter_count, "model", model_to_json(run), "device", run->placement.on_gpu ? "cuda" : "cpu",
                     "sequences", run->B, "length", run->T, "commit", (json_int_t)s->optimizer.commits, "gradients_done",
                     number_to_json(s->gradients_done), "spikes", number_to_json(s->spikes), "rollbacks", number_to_json(s->rollbacks), "reports", (json_int_t)s->reports, "data_base", (json_int_t)run->data_base,
                     "seconds", number_to_json(training_seconds(run)), "fragment", s->fragment, "applied_at", fragments_to_json(s),
                     "job_in_flight", s->job_in_flight ? 1 : 0, "job", job_to_json(&s->job), "workers", list, "options",
                     options_as_json(&run->options));
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// Areas: one vector each, the model's tensors one behind the other, as they lie in memory

static inline void area_name(char name[128], const char *vector, int worker, const char *tensor) {
    if (worker >= 0) {
        snprintf(name, 128, "worker.%d.%s/%s", worker, vector, tensor);
    } else {
        snprintf(name, 128, "%s/%s", vector, tensor);
    }
}

static inline void area_plan(SafetensorsPlan *plan, const ParameterTable *table, const char *vector, int worker) {
    for (int i = 0; i < table->count; i++) {
        const ParameterInfo *entry = &table->entries[i];
        char name[128];
        size_t shape[2] = {(size_t)entry->rows, (size_t)entry->columns};
        area_name(name, vector, worker, entry->name);
        safetensors_plan_add(plan, name, SAFETENSORS_F32, entry->columns > 0 ? 2 : 1, shape);
    }
}

// The first element of an area, or NULL where the file has none of this name and size.
static inline const float *area_find(const SafetensorsFile *file, const ParameterTable *table, const char *vector, int worker) {
    const uint8_t *begin = NULL;
    for (int i = 0; i < table->count; i++) {
        char name[128];
        area_name(name, vector, worker, table->entries[i].name);
        const SafetensorsEntry *entry = safetensors_find(file, name);
        if (entry == NULL || entry->type != SAFETENSORS_F32 || entry->bytes != table->entries[i].count * sizeof(float)) { return NULL; }
        if (i == 0) { begin = entry->data; }
        if (entry->data != begin + table->entries[i].offset * sizeof(float)) { return NULL; }
    }
    return (uintptr_t)begin % sizeof(float) == 0 ? (const float *)(const void *)begin : NULL;
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// Pieces: what of a vector this rank writes or needs

// `host` (count) stands for elements [flat, flat + count) of the vector.
typedef bool (*PieceVisit)(void *context, size_t flat, float *host, size_t count, Error *error);

typedef struct PieceWalk {
    Scheduler *scheduler;
    bool writes_to_device; // what the visitor leaves in `host` is put where kernels work
    float *stage;          // (CHECKPOINT_STAGE); on the CPU not used
    PieceVisit visit;
    void *context;
} PieceWalk;

static inline bool walk_piece(const PieceWalk *walk, float *data, size_t flat, size_t count, Error *error) {
    Stream *stream = walk->scheduler->compute;
    if (stream->queue == NULL) { return walk->visit(walk->context, flat, data, count, error); }
    for (size_t done = 0; done < count; done += CHECKPOINT_STAGE) {
        size_t part = count - done < (size_t)CHECKPOINT_STAGE ? count - done : (size_t)CHECKPOINT_STAGE;
        if (!walk->writes_to_device) {
            stream_copy(stream, walk->stage, data + done, part * sizeof(float));
            stream_settle(stream);
        }
        if (!walk->visit(walk->context, flat + done, walk->stage, part, error)) { return false; }
        if (walk->writes_to_device) {
            stream_copy(stream, data + done, walk->stage, part * sizeof(float));
            stream_settle(stream);
        }
    }
    return true;
}

// All elements that this rank has. divided: of what all ranks have, only this rank's share.
static inline bool walk_vector(const PieceWalk *walk, const SavedVector *vector, bool divided, Error *error) {
    Scheduler *s = walk->scheduler;
    size_t count = s->problem.parameter_count, rank = (size_t)s->transport->rank, size = (size_t)s->transport->size;
    if (vector->scope != SAVED_SHARD) {
        bool share = divided && vector->scope == SAVED_SHARED;
        size_t begin = share ? count / size * rank : 0, end = share && rank + 1 < size ? count / size * (rank + 1) : count;
        return walk_piece(walk, vector->data + begin, begin, end - begin, error);
    }
    for (size_t own = 0; own < layout_shard(&s->layout); own += s->layout.piece) {
        size_t flat = layout_flat(&s->layout, s->transport->rank, own), end = flat + s->layout.piece;
        if (flat >= count) { break; }
        if (!walk_piece(walk, vector->data + own, flat, (end < count ? end : count) - flat, error)) { return false; }
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// Agreement: a checkpoint is made by all ranks or by none

// True when all ranks are good; otherwise `error` becomes that of the first rank that is not.
static inline bool all_ranks_good(Run *run, bool good, Error *error) {
    Transport *transport = &run->transport;
    Verdict mine;
    memset(&mine, 0, sizeof mine);
    mine.exit_code = good ? 0 : 1;
    memcpy(mine.host, transport->host, sizeof mine.host);
    if (!good) { mine.error = *error; }
    Verdict *all = (Verdict *)calloc((size_t)transport->size, sizeof *all);
    transport_exchange(transport, "checkpoint", &mine, all, sizeof mine);
    int bad = 0;
    while (bad < transport->size && all[bad].exit_code == 0) { bad++; }
    good = bad == transport->size;
    if (!good) { error_set(error, "rank %d on %s: %.900s", bad, all[bad].host, all[bad].error.text); }
    free(all);
    return good;
}

static inline bool all_ranks_have(Run *run, uint64_t value) {
    Transport *transport = &run->transport;
    uint64_t *all = (uint64_t *)calloc((size_t)transport->size, sizeof value);
    bool same = true;
    transport_exchange(transport, "checkpoint", &value, all, sizeof value);
    for (int rank = 0; rank < transport->size; rank++) { same = same && all[rank] == all[0]; }
    free(all);
    return same;
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// Writing

typedef struct CheckpointPaths {
    char folder[CHECKPOINT_PATH];                                       // OUT/checkpoints
    char temporary[CHECKPOINT_PATH], final[CHECKPOINT_PATH];             // of this checkpoint
    char state[CHECKPOINT_PATH + 32], manifest[CHECKPOINT_PATH + 32], model[CHECKPOINT_PATH + 32]; // within temporary
} CheckpointPaths;

static inline CheckpointPaths checkpoint_paths(const char *directory, int64_t commit) {
    CheckpointPaths paths;
    snprintf(paths.folder, sizeof paths.folder, "%.*s/checkpoints", RUN_PATH_SIZE, directory);
    snprintf(paths.temporary, sizeof paths.temporary, "%.*s/unfinished", CHECKPOINT_PATH - 16, paths.folder);
    snprintf(paths.final, sizeof paths.final, "%.*s/step-%lld", CHECKPOINT_PATH - 32, paths.folder, (long long)commit);
    snprintf(paths.state, sizeof paths.state, "%s/state.safetensors", paths.temporary);
    snprintf(paths.manifest, sizeof paths.manifest, "%s/checkpoint.json", paths.temporary);
    snprintf(paths.model, sizeof paths.model, "%s/model", paths.temporary);
    return paths;
}

typedef struct StateWrite {
    SafetensorsWriter writer;
    size_t area; // the first byte of the vector at hand
} StateWrite;

static inline bool state_write_piece(void *context, size_t flat, float *host, size_t count, Error *error) {
    const StateWrite *work = (const StateWrite *)context;
    return safetensors_write_bytes(&work->writer, work->area + flat * sizeof(float), host, count * sizeof(float), error);
}

// The plan of state.safetensors: the areas of all vectors, in their order, those of workers one behind the other.
static inline void state_plan(const Run *run, const SavedVector *vectors, int count, SafetensorsPlan *plan) {
    safetensors_plan_start(plan);
    for (int i = 0; i < count; i++) {
        bool of_workers = vectors[i].scope == SAVED_WORKER;
        for (int worker = 0; worker < (of_workers ? run->transport.size : 1); worker++) {
            area_plan(plan, &run->table, vectors[i].name, of_workers ? worker : -1);
        }
    }
    safetensors_plan_finish(plan);
}

// Every rank writes what it has.
static inline bool state_write(Run *run, const SavedVector *vectors, int count, const SafetensorsPlan *plan, const char *path, float *stage,
                               Error *error) {
    StateWrite write;
    if (!safetensors_join(&write.writer, path, plan, error)) { return false; }
    write.area = plan->header_bytes;
    PieceWalk walk = {&run->scheduler, false, stage, state_write_piece, &write};
    size_t bytes = run->table.parameter_count * sizeof(float);
    bool good = true;
    for (int i = 0; good && i < count; i++) {
        size_t areas = vectors[i].scope == SAVED_WORKER ? (size_t)run->transport.size : 1, begin = write.area;
        if (areas > 1) { write.area += (size_t)run->transport.rank * bytes; }
        good = walk_vector(&walk, &vectors[i], true, error);
        write.area = begin + areas * bytes;
    }
    Error ignored;
    return safetensors_writer_finish(&write.writer, good ? error : &ignored) && good;
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// Checksums: CRC-32 of every block of the state, shared out over the ranks

static inline size_t checkpoint_block_count(size_t bytes) { return (bytes + CHECKPOINT_BLOCK - 1) / CHECKPOINT_BLOCK; }

// sums (blocks): those of this rank's blocks, 0 elsewhere.
static inline bool checkpoint_sum_blocks(const Run *run, int descriptor, size_t bytes, uint32_t *sums, Error *error) {
    unsigned char *block = (unsigned char *)malloc(CHECKPOINT_BLOCK);
    bool good = block != NULL || error_set(error, "no memory for a block of the state");
    size_t step = (size_t)run->transport.size;
    for (size_t i = (size_t)run->transport.rank; good && i < checkpoint_block_count(bytes); i += step) {
        size_t begin = i * CHECKPOINT_BLOCK, size = bytes - begin < (size_t)CHECKPOINT_BLOCK ? bytes - begin : (size_t)CHECKPOINT_BLOCK;
        good = pread(descriptor, block, size, (off_t)begin) == (ssize_t)size || error_set(error, "the state ends early");
        if (good) { sums[i] = (uint32_t)crc32(0, block, (uInt)size); }
    }
    free(block);
    return good;
}

// All ranks; `sums` (blocks), for the caller to free. NULL with an error, the same on all ranks.
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
    transport_exchange(transport, "checkpoint", mine, all, bytes);
    for (size_t i = 0; i < *blocks; i++) { mine[i] = all[(i % (size_t)transport->size) * *blocks + i]; }
    free(all);
    return mine;
}

static inline json_t *checkpoint_sums_to_json(const uint32_t *sums, size_t blocks) {
    json_t *list = json_array();
    for (size_t i = 0; i < blocks; i++) { json_array_append_new(list, json_integer((json_int_t)sums[i])); }
    return list;
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// Files and folders

// A directory of ours with everything in it; what does not go stays.
static inline void remove_tree(const char *path) {
    if (unlink(path) == 0) { return; } // above all a link, whose target is not ours
    DIR *directory = opendir(path);
    for (struct dirent *entry; directory != NULL && (entry = readdir(directory)) != NULL;) {
        char inner[CHECKPOINT_PATH + 300];
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) { continue; }
        snprintf(inner, sizeof inner, "%.*s/%s", CHECKPOINT_PATH, path, entry->d_name);
        remove_tree(inner);
    }
    if (directory != NULL) { closedir(directory); }
    rmdir(path);
}

static inline bool sync_path(const char *path, Error *error) {
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    bool good = descriptor >= 0 && fsync(descriptor) == 0;
    if (!good) { error_set(error, "cannot bring %.400s to disk: %s", path, strerror(errno)); }
    if (descriptor >= 0) { close(descriptor); }
    return good;
}

static inline bool checkpoint_prepare(const CheckpointPaths *paths, const SafetensorsPlan *plan, Error *error) {
    remove_tree(paths->temporary);
    if ((mkdir(paths->folder, 0777) != 0 && errno != EEXIST) || mkdir(paths->temporary, 0777) != 0) {
        return error_set(error, "cannot create %.400s: %s", paths->temporary, strerror(errno));
    }
    SafetensorsWriter writer;
    return safetensors_create(&writer, paths->state, plan, error) && safetensors_writer_finish(&writer, error);
}

// Of everything that checkpoint.json says but this.
static inline json_int_t manifest_checksum(const json_t *numbers) {
    json_t *others = json_copy((json_t *)numbers);
    json_object_del(others, "checksum");
    char *text = json_dumps(others, JSON_COMPACT | JSON_SORT_KEYS);
    json_int_t sum = text == NULL ? -1 : (json_int_t)crc32(0, (const unsigned char *)text, (uInt)strlen(text));
    free(text);
    json_decref(others);
    return sum;
}

static inline bool checkpoint_write_manifest(const char *path, json_t *numbers, Error *error) {
    json_object_set_new(numbers, "checksum", json_integer(manifest_checksum(numbers)));
    bool written = json_dump_file(numbers, path, JSON_INDENT(1)) == 0;
    if (!written) { error_set(error, "cannot write %.400s: %s", path, strerror(errno)); }
    return written && sync_path(path, error);
}

// One of the same number, of a run that came by here before, gives way at the moment at which the new one has its name.
static inline bool checkpoint_publish(const CheckpointPaths *paths, Error *error) {
    if (!sync_path(paths->temporary, error)) { return false; }
    bool swapped = syscall(SYS_renameat2, AT_FDCWD, paths->temporary, AT_FDCWD, paths->final, RENAME_EXCHANGE) == 0;
    if (!swapped) { remove_tree(paths->final); } // mostly there is none; or a file system that cannot exchange names
    if (!swapped && rename(paths->temporary, paths->final) != 0) {
        return error_set(error, "cannot rename %.400s: %s", paths->temporary, strerror(errno));
    }
    if (swapped) { remove_tree(paths->temporary); }
    return sync_path(paths->folder, error);
}

typedef struct CheckpointList {
    int64_t *commits; // ascending
    int count;
} CheckpointList;

static inline int checkpoint_compare(const void *left, const void *right) {
    int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return a < b ? -1 : a > b;
}

// The finished checkpoints in a folder; free with free(list.commits).
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

// The newest finished checkpoint of a run from before commit `before`; -1: there is none.
static inline int64_t checkpoint_newest(const char *directory, int64_t before) {
    CheckpointList list = checkpoint_list(checkpoint_paths(directory, 0).folder);
    int64_t newest = -1;
    for (int i = 0; i < list.count && list.commits[i] < before; i++) { newest = list.commits[i]; }
    free(list.commits);
    return newest;
}

// Of those up to `commit`, which was just saved, keeps the latest `keep`, and the first at or beyond each multiple of `every` (0: none).
// What has a larger number was passed over when this run went on, and does not count.
static inline void checkpoint_retain(const char *directory, int64_t commit, int64_t keep, int64_t every) {
    CheckpointPaths paths = checkpoint_paths(directory, 0);
    CheckpointList list = checkpoint_list(paths.folder);
    int count = 0;
    while (count < list.count && list.commits[count] <= commit) { count++; }
    for (int i = 0; i + keep < count; i++) {
        int64_t before = i > 0 ? list.commits[i - 1] : 0;
        if (every > 0 && list.commits[i] / every > before / every) { continue; }
        remove_tree(checkpoint_paths(directory, list.commits[i]).final);
    }
    free(list.commits);
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// Saving

// The directory whose tokenizer goes with the model; NULL: none is known.
static inline const char *tokenizer_directory(const Options *options) {
    const char *path = options->tokenizer[0] != '\0' ? options->tokenizer : options_start(options);
    struct stat status;
    return stat(path, &status) == 0 && S_ISDIR(status.st_mode) ? path : NULL;
}

// Rank 0: the committed parameters for the rest of the world.
static inline bool checkpoint_write_model(Run *run, const CheckpointPaths *paths, const float *committed, Error *error) {
    size_t bytes = run->table.parameter_count * sizeof(float);
    float *host = (float *)committed;
    if (run->placement.on_gpu) {
        host = (float *)malloc(bytes);
        if (host == NULL) { return error_set(error, "no memory for a copy of the parameters: %zu bytes", bytes); }
        stream_copy(run->scheduler.compute, host, committed, bytes);
        stream_settle(run->scheduler.compute);
    }
    bool good = pretrained_save(paths->model, &run->config, &run->table, host, SAFETENSORS_F32, tokenizer_directory(&run->options), error);
    if (run->placement.on_gpu) { free(host); }
    return good;
}

// All ranks' numbers (size), for the caller to free.
static inline WorkerNumbers *checkpoint_gather_numbers(Run *run) {
    Transport *transport = &run->transport;
    WorkerNumbers mine = worker_numbers(&run->scheduler);
    WorkerNumbers *all = (WorkerNumbers *)calloc((size_t)transport->size, sizeof mine);
    transport_exchange(transport, "checkpoint", &mine, all, sizeof mine);
    return all;
}

// Once all parts of the state are on disk: checksums, numbers, the model, the name.
static inline bool checkpoint_complete(Run *run, const CheckpointPaths *paths, const float *committed, Error *error) {
    size_t blocks;
    uint32_t *sums = checkpoint_sums(run, paths->state, &blocks, error);
    if (sums == NULL) { return false; }
    WorkerNumbers *workers = checkpoint_gather_numbers(run);
    bool good = true;
    if (run_is_main(run)) {
        json_t *numbers = checkpoint_numbers(run, workers);
        json_object_set_new(numbers, "block_bytes", json_integer(CHECKPOINT_BLOCK));
        json_object_set_new(numbers, "block_crc32", checkpoint_sums_to_json(sums, blocks));
        good = checkpoint_write_model(run, paths, committed, error) && checkpoint_write_manifest(paths->manifest, numbers, error) &&
               checkpoint_publish(paths, error);
        json_decref(numbers);
    }
    free(sums);
    free(workers);
    return all_ranks_good(run, good, error);
}

// Between two commits, on all ranks. False with an error, the same on all ranks: then there is no new checkpoint, and the others are as
// they were.
static inline bool checkpoint_save(Run *run, Error *error) {
    Scheduler *s = &run->scheduler;
    SavedVector vectors[CHECKPOINT_VECTORS];
    SafetensorsPlan plan;
    scheduler_settle(s);
    if (s->job_in_flight && s->job.spike != SPIKE_NONE) { return error_set(error, "what is under way between the ranks is not finite"); }
    const float *committed = borrow_committed(s, run->rule);
    CheckpointPaths paths = checkpoint_paths(run->directory, s->optimizer.commits);
    int count = saved_vectors(s, vectors);
    float *stage = (float *)malloc(CHECKPOINT_STAGE * sizeof(float));
    state_plan(run, vectors, count, &plan);
    bool good = all_ranks_good(run, !run_is_main(run) || checkpoint_prepare(&paths, &plan, error), error);
    if (good) { good = all_ranks_good(run, state_write(run, vectors, count, &plan, paths.state, stage, error), error); }
    good = good && checkpoint_complete(run, &paths, committed, error);
    if (run_is_main(run)) {
        if (!good) { remove_tree(paths.temporary); }
        if (good) { checkpoint_retain(run->directory, s->optimizer.commits, run->options.keep, run->options.keep_every); }
    }
    return_committed(s, committed);
    safetensors_plan_free(&plan);
    free(stage);
    return good;
}

// ---------------------------------------------------------------------------------------------------------------------------------------
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
    return json_is_integer(item) && json_integer_value(item) >= 0 && json_integer_value(item) <= (json_int_t)1 << 53;
}

// A number in a string, finite and not negative.
static inline bool is_amount(const json_t *object, const char *key) {
    const char *text = json_string_value(json_object_get(object, key));
    char *end = NULL;
    double value = text == NULL ? -1 : strtod(text, &end);
    return text != NULL && end != text && *end == '\0' && value >= 0 && value <= 0x1p53;
}

static inline bool tally_is_sane(const json_t *tally) { return is_amount(tally, "micro_batches") && is_amount(tally, "not_finite") && is_amount(tally, "left_out"); }

static inline bool detector_is_sane(const json_t *detector) {
    return is_amount(detector, "learned") && is_amount(detector, "variance") && json_is_string(json_object_get(detector, "mean")) &&
           isfinite(number_from_json(detector, "mean"));
}

static inline bool workers_are_sane(const json_t *workers) {
    bool good = json_is_array(workers) && json_array_size(workers) >= 1 && json_array_size(workers) <= 1000000;
    for (size_t i = 0; good && i < json_array_size(workers); i++) {
        const json_t *worker = json_array_get(workers, i);
        good = is_count(worker, "micro_batches_begun") && tally_is_sane(json_object_get(worker, "tally")) &&
               tally_is_sane(json_object_get(worker, "handed_over")) && json_is_string(json_object_get(worker, "local_norm")) &&
               json_is_string(json_object_get(worker, "local_rate")) && is_amount(worker, "spikes_in_a_row") &&
               detector_is_sane(json_object_get(worker, "norms")) && detector_is_sane(json_object_get(worker, "losses"));
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
    double batches = (double)integer_from_json(numbers, "data_base") + (double)furthest * (double)json_array_size(workers);
    return batches * (double)integer_from_json(numbers, "sequences") * (double)integer_from_json(numbers, "length") <= 0x1p53;
}

// Everything that loading takes out of checkpoint.json is there and can be.
static inline bool numbers_are_sane(const json_t *numbers, const Rule *rule) {
    static const char *const counts[] = {"parameters", "commit", "reports", "data_base", "sequences", "length"};
    const json_t *job = json_object_get(numbers, "job"), *in_flight = json_object_get(numbers, "job_in_flight");
    bool good = rule != NULL && json_is_boolean(in_flight) && json_is_object(job) && is_amount(numbers, "gradients_done") &&
                is_amount(numbers, "seconds") && is_amount(numbers, "spikes") && is_amount(numbers, "rollbacks") && json_is_array(json_object_get(numbers, "block_crc32"));
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) { good = good && is_count(numbers, counts[i]); }
    good = good && integer_from_json(numbers, "sequences") > 0 && integer_from_json(numbers, "length") > 0;
    if (good && json_is_true(in_flight)) {
        good = rule->finish == co2_finish && integer_from_json(job, "kind") == AVERAGE && integer_from_json(job, "fragment") == 0 &&
               tally_is_sane(json_object_get(job, "total"));
    }
    return good && workers_are_sane(json_object_get(numbers, "workers")) && position_is_sane(numbers) &&
           fragments_are_sane(numbers, rule->kind == RULE_LOCAL);
}

// The state holds what a run of its rule leaves.
static inline bool source_is_complete(const CheckpointSource *source, const Run *run, const Rule *rule) {
    static const char *const own[] = {"exp_avg", "exp_avg_sq", "parameters"};
    bool local = rule->kind == RULE_LOCAL, in_flight = json_is_true(json_object_get(source->numbers, "job_in_flight"));
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
    bool first = area_find(&source->state, &run->table, "gradients", 0) != NULL, good = !first || rule->kind == RULE_OVERLAPPED;
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

static inline bool checkpoint_open_all(CheckpointSource *source, const Run *run, const char *path, Error *error) {
    char file[CHECKPOINT_PATH + 32];
    snprintf(file, sizeof file, "%.*s/state.safetensors", CHECKPOINT_PATH, path);
    if (!checkpoint_open_numbers(source, path, error) || !safetensors_open(&source->state, file, error)) { return false; }
    const Rule *rule = rule_find(source->rule);
    json_t *model = model_to_json(run);
    bool same_model = json_equal(json_object_get(source->numbers, "model"), model) != 0;
    json_decref(model);
    if (!same_model || integer_from_json(source->numbers, "parameters") != (int64_t)run->table.parameter_count) {
        return error_set(error, "%.400s is of another model than %s", path, run->config.name);
    }
    if (source_is_complete(source, run, rule) && source_gradients_fit(source, run, rule)) { return true; }
    return error_set(error, "%.400s does not hold what a run of %s leaves", file, rule->name);
}

// Of this rank alone: the files are there, sound, and for this model. On failure there is nothing to close.
static inline bool checkpoint_open(CheckpointSource *source, const Run *run, const char *path, Error *error) {
    memset(source, 0, sizeof *source);
    snprintf(source->path, sizeof source->path, "%s", path);
    bool good = checkpoint_open_all(source, run, path, error);
    if (!good) { checkpoint_close(source); }
    return good;
}

// Of this rank alone: the newest checkpoint of the run in `directory`, if there is one that can be read, is of this run's model.
static inline bool checkpoint_check_model(const Run *run, const char *directory, Error *error) {
    CheckpointSource source;
    Error unreadable = {""};
    memset(&source, 0, sizeof source);
    int64_t commit = checkpoint_newest(directory, INT64_MAX);
    if (commit < 0) { return true; }
    CheckpointPaths paths = checkpoint_paths(directory, commit);
    bool read = checkpoint_open_numbers(&source, paths.final, &unreadable), same = true;
    if (read) {
        json_t *model = model_to_json(run);
        same = json_equal(json_object_get(source.numbers, "model"), model) != 0;
        json_decref(model);
    }
    checkpoint_close(&source);
    return same || error_set(error, "%.400s is of another model than %s: give the --model that it was trained with, or another --out",
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
    for (size_t i = 0; good && i < blocks; i++) { good = json_integer_value(json_array_get(expected, i)) == (json_int_t)sums[i]; }
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

static inline const float *source_area(const CheckpointSource *source, const Run *run, const char *vector, int worker) {
    return area_find(&source->state, &run->table, vector, worker);
}

// A vector of the optimizer, which other rules keep in another place: the whole one, or that of one worker.
static inline const float *source_moment(CheckpointSource *source, const Run *run, const SavedVector *vector) {
    int worker = run->transport.rank % source->workers;
    const float *shared = source_area(source, run, vector->name, -1), *own = source_area(source, run, vector->name, worker);
    if (vector->scope == SAVED_WORKER) { return own != NULL ? own : shared; }
    return shared != NULL ? shared : source_area(source, run, vector->name, 0);
}

// What compute uses, as it was; where that makes no sense any more the exact parameters.
static inline const float *source_parameters(CheckpointSource *source, const Run *run, const SavedVector *vector, bool same_rule) {
    bool of_worker = vector->scope == SAVED_WORKER;
    bool usable = same_rule && (!of_worker || source->workers == run->transport.size);
    const float *found = usable ? source_area(source, run, vector->name, of_worker ? run->transport.rank : -1) : NULL;
    return found != NULL ? found : source_area(source, run, "master", -1);
}

// The gradient sums that wait for the next job: those of all workers that this rank stands for, added up. Free it.
static inline float *source_gradients(CheckpointSource *source, const Run *run, Tally *handed_over, Tally *kept) {
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

// The sum under way as the ranks of now would have sent it: their mean is that of those who did. Free it.
static inline float *source_exchange(const CheckpointSource *source, const Run *run) {
    size_t count = run->table.parameter_count;
    float *sum = (float *)malloc(count * sizeof(float)), scale = (float)run->transport.size / (float)source->workers;
    const float *saved = source_area(source, run, "exchange", -1);
    for (size_t i = 0; i < count; i++) { sum[i] = saved[i] * scale; }
    return sum;
}

// ACCO's half batch stands in the accumulator as well, and grows there.
static inline void load_gradients(CheckpointSource *source, Run *run, float *stage) {
    Scheduler *s = &run->scheduler;
    float *sum = source_gradients(source, run, &s->job.tally, &s->tally);
    SavedVector exchange = {"gradients", SAVED_WORKER, s->exchange.data}, accumulator = {"gradients", SAVED_WORKER, s->gradients.data};
    state_read(run, &exchange, sum, stage);
    if (s->tally.micro_batches > 0) { state_read(run, &accumulator, sum, stage); }
    s->exchange.state = BUFFER_READY;
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
        bool moment = strncmp(vectors[i].name, "exp_avg", 7) == 0, parameters = strcmp(vectors[i].name, "parameters") == 0;
        const float *from = moment                                       ? source_moment(source, run, &vectors[i])
                            : strcmp(vectors[i].name, "exchange") == 0 ? exchange
                            : parameters ? source_parameters(source, run, &vectors[i], same_rule)
                                         : source_area(source, run, vectors[i].name, -1);
        state_read(run, &vectors[i], from, stage);
    }
    if (s->job_in_flight) { s->exchange.state = BUFFER_WRITING; } // as if its job had just ended
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
    if (same_rule && s->settings.kind == RULE_LOCAL) { s->tally = mine.tally; }
}

// Micro-batches of then in those of now: other ranks or other micro-batches begin where the furthest rank was.
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

// What is usual; under local rules for a worker, one with another number where there are more of them now.
static inline void load_detectors(CheckpointSource *source, Run *run) {
    Scheduler *s = &run->scheduler;
    const json_t *workers = json_object_get(source->numbers, "workers");
    WorkerNumbers numbers = worker_numbers_from_json(json_array_get(workers, (size_t)(run->transport.rank % source->workers)));
    s->norms = numbers.norms;
    s->losses = numbers.losses;
    s->norms.limit = s->losses.limit = s->settings.spike_limit;
    s->spikes_in_a_row = numbers.spikes_in_a_row;
}

static inline void load_numbers(CheckpointSource *source, Run *run, bool same_rule) {
    Scheduler *s = &run->scheduler;
    const json_t *numbers = source->numbers;
    double then = (double)integer_from_json(numbers, "sequences") * (double)integer_from_json(numbers, "length");
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

// Whether another value leads to other bits. What only reports, places or times things does not; rule and model are compared by themselves;
// --val-batches decides whether a tail of the data is held out.
static inline bool option_is_decisive(const char *name) {
    static const char *const harmless[] = {
        "optimizer",    "overlap",    "bucket-mb", "model",       "from",       "finetune", "device",        "gpu-exchange", "recompute",
        "nccl-ctas",    "threads",    "ranks",     "timeout-s",   "link-mbit",  "link-us",       "chaos-ms",     "slow-rank",
        "slow-ms",      "save-every", "keep",      "keep-every",  "resume",     "out",           "config",       "trace",
        "report-every", "val-every",  "prompt",    "temperature", "top-k",      "sample-tokens"};
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
    if (!same_rule) { checkpoint_remark(source, "another rule: what the old one had under way is dropped, moments are taken over"); }
    if (source->workers != run->transport.size) {
        bool local = run->rule->kind == RULE_LOCAL;
        checkpoint_remark(source, local ? "another number of ranks: all go on from the outer parameters"
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
        bool holds_out = strcmp(name, "val-batches") == 0 && !run->data.builtin; // only with or without matters
        if (strcmp(name, "val-batches") == 0 && (!holds_out || json_is_string(before) == json_is_string(value))) { continue; }
        char text[64];
        snprintf(text, sizeof text, "another --%.40s", name);
        checkpoint_remark(source, text);
    }
    json_decref(now);
}

// All ranks, after scheduler_start: the run is where the checkpoint was made. On failure the run is as it was.
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
