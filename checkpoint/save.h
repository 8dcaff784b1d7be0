// checkpoint/save.h: writing a checkpoint, beside training where memory allows.
//
//   streams             training | begin | training ...                | end | training
//   writer (a thread)                    | parts to disk, sync, model/ |
//
//   begin    between two commits, both streams idle: makes the temporary directory,
//            gathers the numbers, and copies what this rank has to write; without memory
//            for a copy it writes at once
//   writer   writes the copies and computes their checksums; needs no other rank
//   end      between two commits, when the writer of every rank has ended, which all
//            ranks learn with the same job (Tally::ended): writes checkpoint.json, and
//            renames the directory
//
// All ranks write their parts of one file, in a directory that all of them see.
//
// A checkpoint is whole or absent, no matter when the program or the machine stops. The
// order of the steps ensures it:
//
//   1. every rank writes its parts of state.safetensors under the temporary name and
//      syncs the file; rank 0 also writes and syncs model/
//   2. all ranks agree that all of that is on disk
//   3. rank 0 writes and syncs checkpoint.json, which comes last because it holds the
//      checksums of the state
//   4. rank 0 syncs the temporary directory, renames it to commit-N, and syncs the folder
//      that holds it (directory_publish in runtime/files.h)
//   5. only then older checkpoints are removed
//
// A failure at any step leaves the older checkpoints as they were, and training continues.
// Checksums are computed in memory, from what was meant to be written: if the disk stores
// something else, loading finds out.
#ifndef ACCO_CHECKPOINT_SAVE_H
#define ACCO_CHECKPOINT_SAVE_H

#include "checkpoint/checkpoint.h"

// ---------------------------------------------------------------------------------------
// The checkpoint that is being made

// Consecutive bytes of state.safetensors that this rank writes; they do not cross the
// edge of a block. Ranks exchange it as a record.
typedef struct SavedPart {
    size_t place, bytes; // in the file
    uint64_t crc;        // CRC-32, once the part has been written
} SavedPart;

typedef struct Saver {
    CheckpointedRun *run;
    CheckpointPaths paths;
    SafetensorsPlan plan;    // for state.safetensors
    int state;               // descriptor of state.safetensors; -1: not open
    size_t area;             // where the vector that is being walked begins in the file
    size_t width;            // bytes of each of its elements
    bool without_muon;       // it lacks the matrices that Muon steps
    char *copies;            // all parts, one behind the other; NULL: parts are written as they come
    size_t copied;           // bytes of `copies` that are filled
    SavedPart *parts;        // (count)
    size_t count, capacity;  // of parts
    int64_t commit, reports; // the scheduler's counters
    json_t *manifest;        // rank 0: checkpoint.json without its checksums
    float *committed;        // rank 0: (parameter_count) on the host, for model/
    bool owns_committed;
    bool beside; // a thread writes
    pthread_t thread;
    bool good;      // so far, on this rank
    Error error;    // what went wrong on this rank
    double seconds; // that the writer took
} Saver;

// All ranks. Gathers what each of them knows alone, and plans state.safetensors: the
// areas of all vectors (count) in their order, those of workers one behind the other.
static inline Saver *saver_create(CheckpointedRun *run, const SavedVector *vectors, int count) {
    Saver *saver = (Saver *)calloc(1, sizeof *saver);
    saver->run = run;
    saver->commit = run->scheduler->optimizer.commits;
    saver->reports = run->scheduler->reports;
    saver->paths = checkpoint_paths(run->directory, saver->commit);
    saver->state = -1;
    WorkerNumbers mine = worker_numbers(run->scheduler);
    WorkerNumbers *all =
        (WorkerNumbers *)transport_collect_records(run->transport, "checkpoint", &mine, sizeof mine);
    if (run->transport->rank == 0) { saver->manifest = manifest_make(run, all); }
    free(all);
    bool muon = checkpoint_has_muon(run);
    safetensors_plan_start(&saver->plan);
    for (const SavedVector *vector = vectors; vector < vectors + count; vector++) {
        bool of_workers = vector->scope == SAVED_WORKER;
        for (int worker = 0; worker < (of_workers ? run->transport->size : 1); worker++) {
            for (int i = 0; i < run->table->count; i++) {
                const ParameterInfo *entry = &run->table->entries[i];
                char name[128];
                size_t shape[2];
                if (!area_has(entry, vector->of_adamw && muon)) { continue; }
                int dimensions = hf_model_shape(entry, shape);
                area_name(name, vector->name, of_workers ? worker : -1, entry->name);
                safetensors_plan_add(&saver->plan, name, area_type(vector->saved), dimensions, shape);
            }
        }
    }
    safetensors_plan_finish(&saver->plan);
    return saver;
}

static inline void saver_free(Saver *saver) {
    if (saver->state >= 0) { close(saver->state); }
    if (saver->owns_committed) { free(saver->committed); }
    json_decref(saver->manifest);
    safetensors_plan_free(&saver->plan);
    free(saver->copies);
    free(saver->parts);
    free(saver);
}

// Rank 0 creates the temporary directory, and state.safetensors in it, full of zeros.
static inline bool saver_create_files(const Saver *saver, Error *error) {
    const CheckpointPaths *paths = &saver->paths;
    tree_remove(paths->temporary); // an interrupted attempt may have left it
    if ((mkdir(paths->folder, 0777) != 0 && errno != EEXIST) || mkdir(paths->temporary, 0777) != 0) {
        return error_set(error, "cannot create %.400s: %s", paths->temporary, strerror(errno));
    }
    return safetensors_create(paths->state, &saver->plan, error);
}

// ---------------------------------------------------------------------------------------
// Begin: this rank's parts are copied, or written

static inline bool saver_write_part(const Saver *saver, SavedPart *part, const void *from, Error *error) {
    part->crc = crc32(0, (const unsigned char *)from, (uInt)part->bytes);
    return file_write_all(saver->state, from, part->bytes, (off_t)part->place) ||
           error_set(error, "cannot write %.400s: %s", saver->paths.state, strerror(errno));
}

// Makes bytes [place, place + bytes) of the file parts of this rank; they are at `from`.
static inline bool saver_take(Saver *saver, size_t place, const char *from, size_t bytes, Error *error) {
    while (bytes > 0) {
        size_t size = size_min(bytes, CHECKPOINT_BLOCK - place % CHECKPOINT_BLOCK);
        SavedPart part = {.place = place, .bytes = size, .crc = 0};
        if (saver->copies != NULL) {
            memcpy(saver->copies + saver->copied, from, size);
            saver->copied += size;
        } else if (!saver_write_part(saver, &part, from, error)) {
            return false;
        }
        if (saver->count == saver->capacity) {
            saver->capacity = 2 * saver->capacity + 64;
            saver->parts = (SavedPart *)realloc(saver->parts, saver->capacity * sizeof part);
        }
        saver->parts[saver->count++] = part;
        place += size;
        from += size;
        bytes -= size;
    }
    return true;
}

static inline bool saver_take_piece(void *context, size_t flat, Real *host, size_t count, Error *error) {
    Saver *saver = (Saver *)context;
    size_t place = area_place(saver->run->table, saver->without_muon, flat);
    return saver_take(saver, saver->area + place * saver->width, (const char *)host, count * saver->width,
                      error);
}

// Rank 0 takes the committed parameters, for model/. It needs a copy if they are on a GPU,
// or if training continues meanwhile.
static inline bool saver_take_model(Saver *saver, const float *committed, Error *error) {
    Scheduler *s = saver->run->scheduler;
    size_t bytes = saver->run->table->parameter_count * sizeof(float);
    saver->committed = (float *)committed;
    if (!saver->beside && s->settings.gpu == NULL) { return true; }
    saver->committed = (float *)malloc(bytes);
    saver->owns_committed = saver->committed != NULL;
    if (!saver->owns_committed) {
        return error_set(error, "no memory for a copy of the parameters: %zu bytes", bytes);
    }
    stream_copy(s->compute, saver->committed, committed, bytes);
    stream_settle(s->compute);
    return true;
}

// Takes everything that this rank writes: its own vectors, its part of what all ranks have,
// and on rank 0 also the header and the model. The copies may use half of the memory that
// is free on the node, divided by the ranks there.
static inline bool saver_collect(Saver *saver, const SavedVector *vectors, int count, const float *committed,
                                 bool beside, Error *error) {
    const CheckpointedRun *run = saver->run;
    Scheduler *s = run->scheduler;
    bool is_main = run->transport->rank == 0;
    size_t elements = run->table->parameter_count, whole = elements * sizeof(float),
           ranks = (size_t)run->transport->size, begin = saver->plan.header_bytes;
    size_t part = layout_shard(&s->layout) + ranks; // elements, at most
    size_t copies = saver->plan.header_bytes;
    for (int i = 0; i < count; i++) {
        copies += saved_bytes(&vectors[i], vectors[i].scope == SAVED_WORKER ? elements : part);
    }
    bool fits = copies + (is_main ? whole : 0) < memory_available() / 2 / (size_t)run->transport->local_size;
    saver->state = safetensors_join(saver->paths.state, &saver->plan, error);
    if (saver->state < 0) { return false; }
    saver->copies = beside && fits ? (char *)malloc(copies) : NULL;
    saver->beside = saver->copies != NULL;
    PieceWalk walk = {.scheduler = s,
                      .stage =
                          s->settings.gpu != NULL ? (float *)malloc(CHECKPOINT_STAGE * sizeof(float)) : NULL,
                      .visit = saver_take_piece,
                      .context = saver};
    bool good = !is_main || saver_take(saver, 0, saver->plan.header, saver->plan.header_bytes, error);
    for (int i = 0; good && i < count; i++) {
        saver->without_muon = vectors[i].of_adamw && checkpoint_has_muon(run);
        size_t areas = vectors[i].scope == SAVED_WORKER ? ranks : 1,
               bytes = saved_bytes(&vectors[i], area_place(run->table, saver->without_muon, elements));
        saver->width = saved_bytes(&vectors[i], 1);
        saver->area = begin + (areas > 1 ? (size_t)run->transport->rank * bytes : 0);
        good = walk_vector(&walk, &vectors[i], true, error);
        begin += areas * bytes;
    }
    free(walk.stage);
    return good && (!is_main || saver_take_model(saver, committed, error));
}

// ---------------------------------------------------------------------------------------
// The writer

// Brings to disk everything that this rank has to write.
static inline bool saver_finish_files(Saver *saver, Error *error) {
    const CheckpointedRun *run = saver->run;
    const char *from = saver->copies, *tokenizer = run->tokenizer;
    for (size_t i = 0; from != NULL && i < saver->count; i++) {
        if (!saver_write_part(saver, &saver->parts[i], from, error)) { return false; }
        from += saver->parts[i].bytes;
    }
    int state = saver->state;
    saver->state = -1;
    if (!file_finish(state, saver->paths.state, true, error)) { return false; }
    if (run->transport->rank != 0) { return true; }
    struct stat status;
    bool has_tokenizer = tokenizer != NULL && stat(tokenizer, &status) == 0 && S_ISDIR(status.st_mode);
    return hf_model_save(saver->paths.model, run->config, run->table, saver->committed,
                         has_tokenizer ? tokenizer : NULL, error);
}

static inline void *saver_main(void *argument) {
    Saver *saver = (Saver *)argument;
    double began = clock_seconds();
    saver->good = saver_finish_files(saver, &saver->error);
    saver->seconds = clock_seconds() - began;
    __atomic_store_n(&saver->run->scheduler->wishes.writer_done, true, __ATOMIC_RELEASE);
    return NULL;
}

// Seconds that ranks wait for one that is still writing: it may have much to write to a slow
// file system.
#define CHECKPOINT_PATIENCE 3600.0

// All ranks, between two commits, while no other checkpoint is being made; sets
// run->saver. beside: training continues while it is written, if memory allows. False
// with an error, the same on all ranks: there is nothing to end.
static inline bool checkpoint_begin(CheckpointedRun *run, bool beside, Error *error) {
    Scheduler *s = run->scheduler;
    SavedVector vectors[CHECKPOINT_MAX_VECTORS];
    bool is_main = run->transport->rank == 0;
    scheduler_settle(s);
    if (s->job_in_flight && s->job.spike != SPIKE_NONE) {
        return error_set(error, "the exchange between the ranks that is in flight holds a spike");
    }
    const float *committed = borrow_committed(s, run->rule);
    int count = saved_vectors(s, vectors);
    Saver *saver = saver_create(run, vectors, count);
    bool good = all_ranks_good(run, !is_main || saver_create_files(saver, error), error);
    if (good) {
        saver->good = saver_collect(saver, vectors, count, committed, beside, &saver->error);
        s->wishes.writer_done = s->wishes.all_writers_done = false;
        s->job.total.ended = 0; // a job in flight has counted the writers of the checkpoint before
        saver->beside =
            saver->beside && saver->good && pthread_create(&saver->thread, NULL, saver_main, saver) == 0;
        if (!saver->beside && saver->good) { saver_main(saver); }
        if (!saver->beside) { __atomic_store_n(&s->wishes.writer_done, true, __ATOMIC_RELEASE); }
        run->saver = saver;
        if (beside) { // a rank without memory for copies has written at once
            transport_barrier_patiently(run->transport, "checkpoint", CHECKPOINT_PATIENCE);
        }
    } else {
        if (is_main) { tree_remove(saver->paths.temporary); }
        saver_free(saver);
    }
    return_committed(s, committed);
    return good;
}

// ---------------------------------------------------------------------------------------
// End: checksums, checkpoint.json, the final name

static inline int saved_part_compare(const void *left, const void *right) {
    size_t a = ((const SavedPart *)left)->place, b = ((const SavedPart *)right)->place;
    return a < b ? -1 : a > b;
}

// All ranks. Returns the parts of all of them in the order of the file, which the caller
// frees, and their number.
static inline SavedPart *saver_gather_parts(const Saver *saver, size_t *total) {
    Transport *transport = saver->run->transport;
    size_t room = 1; // every rank's record has room for the longest list, and at least for one part
    size_t *counts =
        (size_t *)transport_collect_records(transport, "checkpoint", &saver->count, sizeof saver->count);
    for (int rank = 0; rank < transport->size; rank++) { room = size_max(room, counts[rank]); }
    SavedPart *mine = (SavedPart *)calloc(room, sizeof *mine);
    if (saver->count > 0) { memcpy(mine, saver->parts, saver->count * sizeof *mine); }
    SavedPart *all =
        (SavedPart *)transport_collect_records(transport, "checkpoint", mine, room * sizeof *mine);
    *total = 0;
    for (int rank = 0; rank < transport->size; rank++) {
        memmove(all + *total, all + (size_t)rank * room, counts[rank] * sizeof *all);
        *total += counts[rank];
    }
    qsort(all, *total, sizeof *all, saved_part_compare);
    free(mine);
    free(counts);
    return all;
}

// Rank 0, when everything else is on disk: steps 3 and 4 of the order above. parts (count):
// those of all ranks, in the order of the file. The checksum of a block is combined from
// those of the parts in it.
static inline bool saver_publish(Saver *saver, const SavedPart *parts, size_t count, Error *error) {
    const CheckpointPaths *paths = &saver->paths;
    json_t *manifest = saver->manifest, *sums = json_array();
    uint32_t sum = 0;
    size_t end = 0;
    for (size_t i = 0; i < count; i++) {
        bool begins = parts[i].place % CHECKPOINT_BLOCK == 0;
        assert(parts[i].place == end); // together the ranks write every byte once
        end += parts[i].bytes;
        sum = begins ? (uint32_t)parts[i].crc
                     : (uint32_t)crc32_combine(sum, (uLong)parts[i].crc, (z_off_t)parts[i].bytes);
        if (end % CHECKPOINT_BLOCK == 0 || i + 1 == count) {
            json_array_append_new(sums, json_integer((json_int_t)sum));
        }
    }
    assert(end == saver->plan.file_bytes);
    json_object_set_new(manifest, "block_bytes", json_integer(CHECKPOINT_BLOCK));
    json_object_set_new(manifest, "block_crc32", sums);
    json_object_set_new(manifest, "checksum", json_integer(manifest_checksum(manifest)));
    if (json_dump_file(manifest, paths->manifest, JSON_INDENT(1)) != 0) {
        return error_set(error, "cannot write %.400s: %s", paths->manifest, strerror(errno));
    }
    // A checkpoint of the same commit, of an earlier part of the run, is replaced.
    return path_sync(paths->manifest, error) &&
           directory_publish(paths->temporary, paths->final, true, error);
}

// Removes old checkpoints after `commit` was saved. The latest run->keep stay, and the first
// one at or beyond each multiple of run->keep_every (0: none). Checkpoints beyond `commit`,
// which this run passed over when it was resumed, stay and do not count; nor do damaged ones,
// because somebody may want to look at them.
static inline void checkpoint_retain(const CheckpointedRun *run, int64_t commit) {
    CommitSet set = checkpoint_list(checkpoint_paths(run->directory, 0).folder);
    int64_t every = run->keep_every;
    for (int i = 0; i < run->damaged.count; i++) { commit_set_remove(&set, run->damaged.commits[i]); }
    while (set.count > 0 && set.commits[set.count - 1] > commit) { set.count--; }
    for (int i = 0; i + run->keep < set.count; i++) {
        int64_t before = i > 0 ? set.commits[i - 1] : 0;
        if (every > 0 && set.commits[i] / every > before / every) { continue; }
        tree_remove(checkpoint_paths(run->directory, set.commits[i]).final);
    }
    commit_set_clear(&set);
}

typedef struct SavedReport {
    int64_t commit;
    double seconds; // that rank 0 was writing while training continued; 0: it was not
} SavedReport;

// All ranks, between two commits: waits for the writers and ends what checkpoint_begin
// began. False with an error, the same on all ranks: there is no new checkpoint, and the
// others are as they were.
static inline bool checkpoint_end(CheckpointedRun *run, SavedReport *report, Error *error) {
    Saver *saver = run->saver;
    bool is_main = run->transport->rank == 0;
    scheduler_settle(run->scheduler);
    double waited = clock_seconds();
    if (saver->beside) { pthread_join(saver->thread, NULL); }
    waited = clock_seconds() - waited;
    *error = saver->error;
    transport_barrier_patiently(run->transport, "checkpoint", CHECKPOINT_PATIENCE);
    bool good = all_ranks_good(run, saver->good, error);
    if (good) { // on all ranks, so all of them come to the exchanges below
        size_t count;
        SavedPart *parts = saver_gather_parts(saver, &count);
        bool published = !is_main || saver_publish(saver, parts, count, error);
        transport_barrier_patiently(run->transport, "checkpoint", CHECKPOINT_PATIENCE);
        good = all_ranks_good(run, published, error);
        free(parts);
    }
    if (is_main && !good) { tree_remove(saver->paths.temporary); }
    if (good) {
        commit_set_remove(&run->damaged, saver->commit); // a damaged one of this commit is replaced
        if (is_main) { checkpoint_retain(run, saver->commit); }
        run->saved_commit = saver->commit;
        run->saved_reports = saver->reports;
    }
    report->commit = saver->commit;
    report->seconds = saver->beside ? fmax(saver->seconds - waited, 0) : 0;
    run->saver = NULL;
    saver_free(saver);
    return good;
}

#endif
