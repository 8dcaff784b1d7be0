// checkpoint/save.h: writing a checkpoint, beside training where memory allows.
//
//   compute, communication   | training | begin |  training ...                     | end | training ...
//   writer (a thread)                           | parts to disk . sync . model/ |
//
//   begin   between two commits, both streams idle: makes a directory under a name of its own, gathers the numbers, and copies what this
//           rank has to write; where there is no room for the copy it is written now instead
//   writer  writes the copies and adds up their checksums; knows files only, no other rank
//   end     between two commits, when every rank's writer has ended, which all learn of with the same job (Tally::ended): checkpoint.json,
//           and the directory gets its name
//
// All ranks write their parts of one file, in a directory that they all see. A checkpoint
// is whole or absent: any failure, at any time, leaves the ones before it as they were,
// and the run goes on. Checksums are those of what was meant to be written, taken from
// memory.
#ifndef ACCO_CHECKPOINT_SAVE_H
#define ACCO_CHECKPOINT_SAVE_H

#include <fcntl.h>

#include "checkpoint/checkpoint.h"

// ---------------------------------------------------------------------------------------
// Files and folders

static inline bool checkpoint_prepare(const CheckpointPaths *paths, const SafetensorsPlan *plan,
                                      Error *error) {
    tree_remove(paths->temporary);
    if ((mkdir(paths->folder, 0777) != 0 && errno != EEXIST) || mkdir(paths->temporary, 0777) != 0) {
        return error_set(error, "cannot create %.400s: %s", paths->temporary, strerror(errno));
    }
    SafetensorsWriter writer;
    return safetensors_create(&writer, paths->state, plan, error) &&
           safetensors_writer_finish(&writer, error);
}

static inline bool checkpoint_write_manifest(const char *path, json_t *numbers, Error *error) {
    json_object_set_new(numbers, "checksum", json_integer(manifest_checksum(numbers)));
    bool written = json_dump_file(numbers, path, JSON_INDENT(1)) == 0;
    if (!written) { error_set(error, "cannot write %.400s: %s", path, strerror(errno)); }
    return written && path_sync(path, error);
}

// Of those up to `commit`, which was just saved, keeps the latest `keep`, and the first
// at or beyond each multiple of `every` (0: none). What has a larger number was passed
// over when this run went on, and does not count.
static inline void checkpoint_retain(const char *directory, int64_t commit, int64_t keep, int64_t every) {
    CheckpointPaths paths = checkpoint_paths(directory, 0);
    CheckpointList list = checkpoint_list(paths.folder);
    int count = 0;
    while (count < list.count && list.commits[count] <= commit) { count++; }
    for (int i = 0; i + keep < count; i++) {
        int64_t before = i > 0 ? list.commits[i - 1] : 0;
        if (every > 0 && list.commits[i] / every > before / every) { continue; }
        tree_remove(checkpoint_paths(directory, list.commits[i]).final);
    }
    free(list.commits);
}

// ---------------------------------------------------------------------------------------
// Parts: what this rank writes of state.safetensors

// A stretch that does not cross the edge of a block.
typedef struct SavedPart {
    size_t place, bytes; // in the file
    uint64_t crc;        // CRC-32, once it has been written
} SavedPart;

// One checkpoint that is being made.
struct Saver {
    Run *run;
    CheckpointPaths paths;
    SafetensorsPlan plan;
    SafetensorsWriter file;
    size_t area;   // where the vector at hand begins in the file
    char *copies;  // of all parts, one behind the other; NULL: they are written as they come
    size_t copied; // bytes
    SavedPart *parts;
    size_t count, capacity;
    int64_t commit, reports; // the scheduler's
    json_t *numbers;         // rank 0: what checkpoint.json says but for checksums
    float *committed;        // rank 0: (parameter_count) on the host, what model/ is made of
    bool owns_committed;
    bool beside; // a thread writes
    pthread_t thread;
    bool good; // so far, on this rank
    Error error;
    double seconds; // that the thread took
};

typedef struct Saver Saver;

static inline bool saver_write(const Saver *saver, SavedPart *part, const void *from, Error *error) {
    part->crc = crc32(0, (const unsigned char *)from, (uInt)part->bytes);
    return safetensors_write_bytes(&saver->file, part->place, from, part->bytes, error);
}

static inline void saver_add(Saver *saver, const SavedPart *part) {
    if (saver->count == saver->capacity) {
        saver->capacity = 2 * saver->capacity + 64;
        saver->parts = (SavedPart *)realloc(saver->parts, saver->capacity * sizeof *saver->parts);
    }
    saver->parts[saver->count++] = *part;
}

// Writes or copies bytes of the file.
static inline bool saver_take(Saver *saver, size_t place, const char *from, size_t bytes, Error *error) {
    while (bytes > 0) {
        size_t room = CHECKPOINT_BLOCK - place % CHECKPOINT_BLOCK, size = bytes < room ? bytes : room;
        SavedPart part = {place, size, 0};
        if (saver->copies != NULL) {
            memcpy(saver->copies + saver->copied, from, size);
            saver->copied += size;
        } else if (!saver_write(saver, &part, from, error)) {
            return false;
        }
        saver_add(saver, &part);
        place += size;
        from += size;
        bytes -= size;
    }
    return true;
}

static inline bool saver_take_piece(void *context, size_t flat, float *host, size_t count, Error *error) {
    Saver *saver = (Saver *)context;
    return saver_take(saver, saver->area + flat * sizeof(float), (const char *)host, count * sizeof(float),
                      error);
}

// All that this rank has, of what all have its share; rank 0 stands for the header.
static inline bool saver_walk(Saver *saver, const SavedVector *vectors, int count, Error *error) {
    Run *run = saver->run;
    float *stage = run->placement.on_gpu ? (float *)malloc(CHECKPOINT_STAGE * sizeof(float)) : NULL;
    PieceWalk walk = {&run->scheduler, false, stage, saver_take_piece, saver};
    size_t bytes = run->table.parameter_count * sizeof(float);
    bool good =
        !run_is_main(run) || saver_take(saver, 0, saver->plan.header, saver->plan.header_bytes, error);
    size_t begin = saver->plan.header_bytes;
    for (int i = 0; good && i < count; i++) {
        size_t areas = vectors[i].scope == SAVED_WORKER ? (size_t)run->transport.size : 1;
        saver->area = begin + (areas > 1 ? (size_t)run->transport.rank * bytes : 0);
        good = walk_vector(&walk, &vectors[i], true, error);
        begin += areas * bytes;
    }
    free(stage);
    return good;
}

// The plan of state.safetensors: the areas of all vectors, in their order, those of
// workers one behind the other.
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

// What copies of this rank's parts take at most.
static inline size_t saver_room(const Saver *saver, const SavedVector *vectors, int count) {
    const Run *run = saver->run;
    size_t whole = run->table.parameter_count * sizeof(float), room = saver->plan.header_bytes;
    size_t shard = layout_shard(&run->scheduler.layout) * sizeof(float);
    for (int i = 0; i < count; i++) {
        room +=
            vectors[i].scope == SAVED_WORKER ? whole : shard + (size_t)run->transport.size * sizeof(float);
    }
    return room;
}

// ---------------------------------------------------------------------------------------
// Writing

// The directory whose tokenizer goes with the model; NULL: none is known.
static inline const char *tokenizer_directory(const Options *options) {
    const char *path = options->tokenizer[0] != '\0' ? options->tokenizer : options_start(options);
    struct stat status;
    return stat(path, &status) == 0 && S_ISDIR(status.st_mode) ? path : NULL;
}

// Rank 0, of the committed parameters for the rest of the world. On the CPU they need a
// copy only if training goes on.
static inline bool saver_take_model(Saver *saver, const float *committed, Error *error) {
    Run *run = saver->run;
    size_t bytes = run->table.parameter_count * sizeof(float);
    saver->committed = (float *)committed;
    if (!saver->beside && !run->placement.on_gpu) { return true; }
    saver->committed = (float *)malloc(bytes);
    saver->owns_committed = saver->committed != NULL;
    if (!saver->owns_committed) {
        return error_set(error, "no memory for a copy of the parameters: %zu bytes", bytes);
    }
    stream_copy(run->scheduler.compute, saver->committed, committed, bytes);
    stream_settle(run->scheduler.compute);
    return true;
}

// To the disk with all that is left to write.
static inline bool saver_finish_files(Saver *saver, Error *error) {
    Run *run = saver->run;
    const char *from = saver->copies;
    for (size_t i = 0; from != NULL && i < saver->count; i++) {
        if (!saver_write(saver, &saver->parts[i], from, error)) { return false; }
        from += saver->parts[i].bytes;
    }
    if (fsync(saver->file.descriptor) != 0) {
        return error_set(error, "cannot write %s: %s", saver->file.path, strerror(errno));
    }
    return !run_is_main(run) || hf_model_save(saver->paths.model, &run->config, &run->table, saver->committed,
                                              SAFETENSORS_F32, tokenizer_directory(&run->options), error);
}

static inline void *saver_main(void *argument) {
    Saver *saver = (Saver *)argument;
    double began = clock_seconds();
    saver->good = saver_finish_files(saver, &saver->error);
    saver->seconds = clock_seconds() - began;
    __atomic_store_n(&saver->run->scheduler.writer_done, true, __ATOMIC_RELEASE);
    return NULL;
}

// The parts of this rank and the model, on their way. Copies may take half of what the
// node has left for each of its ranks.
static inline bool saver_collect(Saver *saver, const SavedVector *vectors, int count, const float *committed,
                                 bool beside, Error *error) {
    Run *run = saver->run;
    size_t room = saver_room(saver, vectors, count),
           model = run_is_main(run) ? run->table.parameter_count * sizeof(float) : 0;
    bool fits = room + model < memory_available() / 2 / (size_t)run->transport.local_size;
    if (!safetensors_join(&saver->file, saver->paths.state, &saver->plan, error)) { return false; }
    saver->copies = beside && fits ? (char *)malloc(room) : NULL;
    saver->beside = saver->copies != NULL;
    return saver_walk(saver, vectors, count, error) &&
           (!run_is_main(run) || saver_take_model(saver, committed, error));
}

static inline void saver_start(Saver *saver) {
    saver->run->scheduler.writer_done = false;
    saver->run->scheduler.all_writers_done = false;
    saver->run->scheduler.job.total.ended = 0; // of a job in flight, which knows of the writers before
    saver->beside =
        saver->beside && saver->good && pthread_create(&saver->thread, NULL, saver_main, saver) == 0;
    if (saver->beside) { return; }
    if (saver->good) { saver_main(saver); }
    __atomic_store_n(&saver->run->scheduler.writer_done, true, __ATOMIC_RELEASE);
}

// ---------------------------------------------------------------------------------------
// Checksums: CRC-32 of every block, put together from those of all parts

static inline int saved_part_compare(const void *left, const void *right) {
    size_t a = ((const SavedPart *)left)->place, b = ((const SavedPart *)right)->place;
    return a < b ? -1 : a > b;
}

// All ranks; the parts of all of them in the order of the file, for the caller to free.
// Returns how many there are.
static inline size_t saver_gather_parts(const Saver *saver, SavedPart **parts) {
    Transport *transport = &saver->run->transport;
    uint64_t count = saver->count, most = 0, total = 0;
    uint64_t *counts = (uint64_t *)calloc((size_t)transport->size, sizeof count);
    transport_all_gather_records(transport, "checkpoint", &count, counts, sizeof count);
    for (int rank = 0; rank < transport->size; rank++) { most = counts[rank] > most ? counts[rank] : most; }
    SavedPart *mine = (SavedPart *)calloc((size_t)most + 1, sizeof *mine);
    SavedPart *all = (SavedPart *)calloc((size_t)transport->size * ((size_t)most + 1), sizeof *all);
    if (count > 0) { memcpy(mine, saver->parts, (size_t)count * sizeof *mine); }
    transport_all_gather_records(transport, "checkpoint", mine, all, ((size_t)most + 1) * sizeof *mine);
    for (int rank = 0; rank < transport->size; rank++) {
        memmove(all + total, all + (size_t)rank * ((size_t)most + 1), (size_t)counts[rank] * sizeof *all);
        total += counts[rank];
    }
    qsort(all, (size_t)total, sizeof *all, saved_part_compare);
    free(mine);
    free(counts);
    *parts = all;
    return (size_t)total;
}

// [blocks]. The parts are all of the file, and none of it twice.
static inline json_t *saver_sums(const Saver *saver, const SavedPart *parts, size_t count) {
    json_t *list = json_array();
    uint32_t sum = 0;
    size_t end = 0;
    for (size_t i = 0; i < count; i++) {
        bool begins = parts[i].place % CHECKPOINT_BLOCK == 0;
        assert(parts[i].place == end);
        end += parts[i].bytes;
        sum = begins ? (uint32_t)parts[i].crc
                     : (uint32_t)crc32_combine(sum, (uLong)parts[i].crc, (z_off_t)parts[i].bytes);
        if (end % CHECKPOINT_BLOCK == 0 || i + 1 == count) {
            json_array_append_new(list, json_integer((json_int_t)sum));
        }
    }
    assert(end == saver->plan.file_bytes);
    (void)saver, (void)end;
    return list;
}

// ---------------------------------------------------------------------------------------
// The life of a checkpoint

// All ranks' numbers (size), for the caller to free.
static inline WorkerNumbers *checkpoint_gather_numbers(Run *run) {
    Transport *transport = &run->transport;
    WorkerNumbers mine = worker_numbers(&run->scheduler);
    WorkerNumbers *all = (WorkerNumbers *)calloc((size_t)transport->size, sizeof mine);
    transport_all_gather_records(transport, "checkpoint", &mine, all, sizeof mine);
    return all;
}

static inline Saver *saver_new(Run *run) {
    Saver *saver = (Saver *)calloc(1, sizeof *saver);
    saver->run = run;
    saver->commit = run->scheduler.optimizer.commits;
    saver->reports = run->scheduler.reports;
    saver->paths = checkpoint_paths(run->directory, saver->commit);
    saver->file.descriptor = -1;
    WorkerNumbers *workers = checkpoint_gather_numbers(run);
    if (run_is_main(run)) { saver->numbers = checkpoint_numbers(run, workers); }
    free(workers);
    return saver;
}

static inline void saver_free(Saver *saver) {
    if (saver->file.descriptor >= 0) { close(saver->file.descriptor); }
    if (saver->owns_committed) { free(saver->committed); }
    json_decref(saver->numbers);
    safetensors_plan_free(&saver->plan);
    free(saver->copies);
    free(saver->parts);
    free(saver);
}

// All ranks, between two commits, when no other checkpoint is being made. beside:
// training goes on while it is written, where memory allows. False with an error, the
// same on all ranks: there is nothing to end.
static inline bool checkpoint_begin(Run *run, bool beside, Error *error) {
    Scheduler *s = &run->scheduler;
    SavedVector vectors[CHECKPOINT_VECTORS];
    scheduler_settle(s);
    if (s->job_in_flight && s->job.spike != SPIKE_NONE) {
        return error_set(error, "what is under way between the ranks is a spike");
    }
    const float *committed = borrow_committed(s, run->rule);
    int count = saved_vectors(s, vectors);
    Saver *saver = saver_new(run);
    state_plan(run, vectors, count, &saver->plan);
    bool good = all_ranks_good(
        run, !run_is_main(run) || checkpoint_prepare(&saver->paths, &saver->plan, error), error);
    if (good) {
        saver->good = saver_collect(saver, vectors, count, committed, beside, &saver->error);
        saver_start(saver);
        run->saver = saver;
    } else {
        if (run_is_main(run)) { tree_remove(saver->paths.temporary); }
        saver_free(saver);
    }
    return_committed(s, committed);
    return good;
}

// What is left when all files are on disk: checkpoint.json and the name. Rank 0.
static inline bool saver_publish(Saver *saver, const SavedPart *parts, size_t count, Error *error) {
    json_object_set_new(saver->numbers, "block_bytes", json_integer(CHECKPOINT_BLOCK));
    json_object_set_new(saver->numbers, "block_crc32", saver_sums(saver, parts, count));
    return checkpoint_write_manifest(saver->paths.manifest, saver->numbers, error) &&
           directory_publish(saver->paths.temporary, saver->paths.final, true, error);
}

// What became of a checkpoint.
typedef struct SavedReport {
    int64_t commit;
    double seconds; // beside training, on rank 0; 0: none
} SavedReport;

// All ranks, between two commits: waits for the writers, and ends what checkpoint_begin
// began. False with an error, the same on all ranks: then there is no new checkpoint, and
// the others are as they were.
static inline bool checkpoint_end(Run *run, SavedReport *report, Error *error) {
    Saver *saver = run->saver;
    SavedPart *parts = NULL;
    scheduler_settle(&run->scheduler);
    double waited = clock_seconds();
    if (saver->beside) { pthread_join(saver->thread, NULL); }
    waited = clock_seconds() - waited;
    *error = saver->error;
    bool good = all_ranks_good(run, saver->good, error);
    size_t count = good ? saver_gather_parts(saver, &parts) : 0;
    if (good && run_is_main(run)) { good = saver_publish(saver, parts, count, error); }
    good = good || count > 0 ? all_ranks_good(run, good, error) : false;
    if (run_is_main(run) && good) {
        checkpoint_retain(run->directory, saver->commit, run->options.keep, run->options.keep_every);
    }
    if (run_is_main(run) && !good) { tree_remove(saver->paths.temporary); }
    report->commit = saver->commit;
    report->seconds = saver->beside ? fmax(saver->seconds - waited, 0) : 0;
    if (good) {
        run->saved_commit = saver->commit;
        run->saved_reports = saver->reports;
    }
    run->saver = NULL;
    saver_free(saver);
    free(parts);
    return good;
}
#endif
