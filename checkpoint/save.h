// checkpoint/save.h: writing a checkpoint, during training where memory allows.
//
//   streams             training | begin | training ...                | end | training
//   writer (a thread)                    | parts to disk, sync, model/ |
//
// Begin and end are between two commits. Begin copies what this rank has to write into the one
// file of all ranks, or writes it at once if there is no memory for copies. All learn with the
// same job (Tally::ended) that every writer has ended.
//
// A checkpoint is whole or absent, whenever the program or the machine stops, by order:
//
//   1. every rank writes its parts of state.safetensors under the temporary name and
//      syncs the file; rank 0 also writes and syncs model/
//   2. all ranks agree that all of that is on disk
//   3. rank 0 writes and syncs checkpoint.json, which holds the checksums of the state
//   4. rank 0 gives the temporary directory its final name (directory_publish)
//   5. only then older checkpoints are removed
//
// A failure at any step leaves the older checkpoints as they were, and training continues.
// Checksums are of what was meant to be written: loading finds out if the disk stores another.
#pragma once

#include "checkpoint/checkpoint.h"
#include "runtime/process_limits.h"

// ---- The checkpoint that is being made ------------------------------------------------

// Bytes of state.safetensors that this rank has copied, to write them later.
typedef struct SavedPart {
    size_t place, bytes; // in the file
} SavedPart;

typedef struct Saver {
    CheckpointedRun *run;
    CheckpointPaths paths;
    SafetensorsPlan plan;                 // for state.safetensors
    int state;                            // descriptor of state.safetensors; -1: not open
    size_t areas[CHECKPOINT_MAX_VECTORS]; // (vectors): where this rank's area of each begins in the data
    const SavedVector *vector;            // that is being walked
    size_t area;                          // where its area begins in the file
    uint32_t *sums; // (blocks): this rank's share of the CRC-32 of each block of the file
    size_t blocks;
    char *copies;     // all parts, one behind the other; NULL: all is written as it comes
    size_t copied;    // bytes of `copies` that are filled
    SavedPart *parts; // (count)
    size_t count;
    int64_t commit, reports; // the scheduler's counters
    int64_t best_commit;     // of the run when this was begun: a better one may not be on disk yet
    json_t *manifest;        // rank 0: checkpoint.json without its checksums
    const float *committed;  // rank 0: (parameter_count) on the host, for model/
    float *own;              // the same, if it is a copy
    bool beside;             // a thread writes
    pthread_t thread;
    bool good;      // so far, on this rank
    Error error;    // what went wrong on this rank
    double seconds; // that the writer took
} Saver;

// All ranks. Gathers what each of them knows alone, and plans state.safetensors: the areas of
// vectors (count) in their order; of a worker's vector one for each worker.
static inline Saver *saver_create(CheckpointedRun *run, const SavedVector *vectors, int count) {
    Saver *saver = MEMORY_OF(Saver, 1);
    saver->run = run;
    saver->commit = run->scheduler->optimizer.steps;
    saver->best_commit = run->best_commit;
    saver->reports = run->scheduler->reports;
    saver->paths = checkpoint_paths(run->directory, saver->commit);
    saver->state = -1;
    const Scheduler *s = run->scheduler;
    run->next_learning_rate = scheduler_learning_rate(s);
    WorkerNumbers mine = {.micro_batches_begun = s->micro_batches_begun,
                          .tally = s->gradients.tally,
                          .handed_over = s->comm_buffer.tally,
                          .local_norm = s->local.norm,
                          .local_rate = s->local.rate,
                          .norms = s->spikes.norms,
                          .losses = s->spikes.losses,
                          .spikes_in_a_row = s->spikes.in_a_row,
                          .data_changed = run->data_changed};
    WorkerNumbers *all =
        (WorkerNumbers *)transport_collect_records(run->transport, "checkpoint", &mine, sizeof mine);
    if (run->transport->rank == 0) { saver->manifest = manifest_make(run, all); }
    free(all);
    bool muon = checkpoint_has_muon(run);
    saver->plan.tensors = json_object();
    for (const SavedVector *vector = vectors; vector < vectors + count; vector++) {
        bool of_workers = vector->scope == SAVED_WORKER;
        for (int worker = 0; worker < (of_workers ? run->transport->size : 1); worker++) {
            if (!of_workers || worker == run->transport->rank) {
                saver->areas[vector - vectors] = saver->plan.file_bytes;
            }
            for (int i = 0; i < run->table->count; i++) {
                const ParameterInfo *entry = &run->table->entries[i];
                char name[128];
                size_t shape[2];
                if (vector->of_adamw && muon && entry->is_projection) { continue; }
                int dimensions = hf_model_shape(entry, false, shape);
                area_name(name, vector->name, of_workers ? worker : -1, entry->name);
                safetensors_plan_add(&saver->plan, name, area_type(vector->format), dimensions, shape);
            }
        }
    }
    safetensors_plan_finish(&saver->plan);
    saver->blocks = (saver->plan.file_bytes + CHECKPOINT_BLOCK - 1) / CHECKPOINT_BLOCK;
    saver->sums = MEMORY_OF(uint32_t, saver->blocks);
    return saver;
}

static inline void saver_free(Saver *saver) {
    if (saver->state >= 0) { close(saver->state); }
    json_decref(saver->manifest);
    safetensors_plan_free(&saver->plan);
    free(saver->sums);
    free(saver->copies);
    free(saver->parts);
    free(saver->own);
    free(saver);
}

// ---- Begin: this rank's parts are copied, or written ----------------------------------

// Writes bytes [place, place + bytes) of the file. The CRC-32 of a block is the exclusive or of
// its parts' CRC-32s, each moved to its place, so it can be collected in any order.
static inline bool saver_write(Saver *saver, size_t place, const char *from, size_t bytes, Error *error) {
    for (size_t size; bytes > 0; place += size, from += size, bytes -= size) {
        size_t block = place / CHECKPOINT_BLOCK,
               end = size_min((block + 1) * CHECKPOINT_BLOCK, saver->plan.file_bytes);
        size = size_min(bytes, end - place);
        uLong sum = crc32_z(0, (const Bytef *)from, size);
        saver->sums[block] ^= (uint32_t)crc32_combine(sum, 0, (z_off_t)(end - place - size));
        if (!file_write_all(saver->state, from, size, (off_t)place)) {
            return error_set_file(error, "write", saver->paths.state);
        }
    }
    return true;
}

// Copies elements of the vector that is being walked, or writes them.
static inline bool saver_take(void *context, size_t flat, Real *host, size_t count, Error *error) {
    Saver *saver = (Saver *)context;
    bool without_muon = saver->vector->of_adamw && checkpoint_has_muon(saver->run);
    size_t place = area_place(saver->run->table, without_muon, flat);
    SavedPart part = {saver->area + saved_bytes(saver->vector, place), saved_bytes(saver->vector, count)};
    if (saver->copies == NULL) {
        return saver_write(saver, part.place, (const char *)host, part.bytes, error);
    }
    memcpy(saver->copies + saver->copied, host, part.bytes);
    saver->copied += part.bytes;
    saver->parts = (SavedPart *)memory_grow(saver->parts, (saver->count + 1) * sizeof part);
    saver->parts[saver->count++] = part;
    return true;
}

// Takes all that this rank writes. The copies of a node's ranks may use half of its free memory.
static inline bool saver_collect(Saver *saver, const SavedVector *vectors, int count, const float *committed,
                                 bool beside, Error *error) {
    const CheckpointedRun *run = saver->run;
    Scheduler *s = run->scheduler;
    bool is_main = run->transport->rank == 0;
    size_t elements = run->table->parameter_count, whole = elements * sizeof(float),
           part = layout_shard(&s->layout) + (size_t)run->transport->size; // elements, at most
    size_t copies = 0;
    for (int i = 0; i < count; i++) {
        copies += saved_bytes(&vectors[i], vectors[i].scope == SAVED_WORKER ? elements : part);
    }
    bool fits = copies + (is_main ? whole : 0) < memory_available() / 2 / (size_t)run->transport->local_size;
    saver->state = safetensors_join(saver->paths.state, &saver->plan, error);
    if (saver->state < 0) { return false; }
    saver->copies = beside && fits ? (char *)malloc(copies) : NULL;
    PieceWalk walk = {.scheduler = s,
                      .stage = s->settings.device.gpu != NULL ? MEMORY_OF(float, CHECKPOINT_STAGE) : NULL,
                      .visit = saver_take,
                      .context = saver};
    bool good = !is_main || saver_write(saver, 0, saver->plan.header, saver->plan.header_bytes, error);
    for (int i = 0; good && i < count; i++) {
        saver->vector = &vectors[i];
        saver->area = saver->plan.header_bytes + saver->areas[i];
        good = walk_vector(&walk, saver->vector, error);
    }
    free(walk.stage);
    saver->committed = committed;
    // The model needs a copy if it is on a GPU, or if training continues meanwhile.
    if (!good || !is_main || (saver->copies == NULL && s->settings.device.gpu == NULL)) { return good; }
    saver->committed = saver->own = MEMORY_OF(float, elements);
    stream_copy(s->compute, saver->own, committed, whole);
    stream_settle(s->compute);
    return true;
}

// ---- The writer -----------------------------------------------------------------------

static inline void *saver_main(void *argument) {
    Saver *saver = (Saver *)argument;
    const CheckpointedRun *run = saver->run;
    Error *error = &saver->error;
    double began = clock_seconds();
    const char *from = saver->copies, *tokenizer = run->tokenizer;
    bool good = true;
    for (size_t i = 0; good && i < saver->count; i++) {
        good = saver_write(saver, saver->parts[i].place, from, saver->parts[i].bytes, error);
        from += saver->parts[i].bytes;
    }
    good = file_finish(saver->state, saver->paths.state, good, error);
    saver->state = -1;
    if (good && run->transport->rank == 0) {
        bool has_tokenizer = tokenizer != NULL && access(tokenizer, R_OK) == 0;
        good = hf_model_save_trained(saver->paths.model, run->config, run->part, saver->committed, run->base,
                                     run->base_directory, has_tokenizer ? tokenizer : NULL, error);
    }
    saver->good = good;
    saver->seconds = clock_seconds() - began;
    __atomic_store_n(&run->scheduler->wishes.writer_done, true, __ATOMIC_RELEASE);
    return NULL;
}

// Seconds that ranks wait for one that still writes, perhaps to a slow file system.
#define CHECKPOINT_PATIENCE 3600.0

// Makes the unfinished checkpoint's directory and file, and takes this rank's part. False, with the
// same error on all ranks: run->saver is not set.
static inline bool saver_begin(CheckpointedRun *run, const float *committed, bool beside, Error *error) {
    Scheduler *s = run->scheduler;
    SavedVector vectors[CHECKPOINT_MAX_VECTORS];
    bool is_main = run->transport->rank == 0;
    int count = saved_vectors(s, vectors);
    Saver *saver = saver_create(run, vectors, count);
    const CheckpointPaths *paths = &saver->paths;
    if (is_main) { tree_remove(paths->temporary); } // an interrupted attempt may have left it
    // Also makes the run's directory, if somebody has removed or renamed it.
    bool good = !is_main || (directory_make(paths->temporary, "", error) &&
                             safetensors_create(paths->state, &saver->plan, error));
    if (!all_ranks_good(run, good, error)) {
        if (is_main) { tree_remove(paths->temporary); }
        saver_free(saver);
        return false;
    }
    saver->good = saver_collect(saver, vectors, count, committed, beside, &saver->error);
    saver->beside =
        saver->copies != NULL && saver->good && pthread_create(&saver->thread, NULL, saver_main, saver) == 0;
    if (!saver->beside && saver->good) { saver_main(saver); }
    if (!saver->beside) { __atomic_store_n(&s->wishes.writer_done, true, __ATOMIC_RELEASE); }
    run->saver = saver;
    if (beside) { // a rank without memory for copies has written at once
        transport_barrier_patiently(run->transport, "checkpoint", CHECKPOINT_PATIENCE);
    }
    return true;
}

// All ranks, between two commits, while no other checkpoint is being made; sets run->saver. beside:
// as above, if memory allows. False, with the same error on all ranks: there is nothing to end.
static inline bool checkpoint_begin(CheckpointedRun *run, bool beside, Error *error) {
    Scheduler *s = run->scheduler;
    const float *committed = (const float *)borrow_committed(s, run->rule, true);
    // It answers all wishes so far, also those that a job in flight has gathered.
    __atomic_store_n(&s->wishes.save_requested, false, __ATOMIC_RELAXED);
    s->wishes.save_agreed = s->wishes.writer_done = s->wishes.all_writers_done = false;
    s->job.total.saves = s->job.total.ended = 0;
    bool good = s->job_in_flight && s->job.spike != SPIKE_NONE
                    ? error_set(error, "the exchange between the ranks that is in flight holds a spike")
                    : saver_begin(run, committed, beside, error);
    return_committed(s, committed);
    return good;
}

// ---- End: checksums, checkpoint.json, the final name ----------------------------------

// Steps 3 and 4 of the order above, on rank 0. shares (ranks, blocks): the sums of all.
static inline bool saver_publish(Saver *saver, const uint32_t *shares, Error *error) {
    const CheckpointPaths *paths = &saver->paths;
    json_t *manifest = saver->manifest, *sums = json_array();
    for (size_t block = 0; block < saver->blocks; block++) {
        uint32_t sum = 0;
        for (size_t rank = 0; rank < (size_t)saver->run->transport->size; rank++) {
            sum ^= shares[rank * saver->blocks + block];
        }
        json_array_append_new(sums, json_integer((json_int_t)sum));
    }
    json_object_set_new(manifest, "block_bytes", json_integer(CHECKPOINT_BLOCK));
    json_object_set_new(manifest, "block_crc32", sums);
    json_object_set_new(manifest, "checksum", json_integer(manifest_checksum(manifest)));
    saver->manifest = NULL;
    // A checkpoint of the same commit, of an earlier part of the run, is replaced.
    return json_write(manifest, paths->temporary, "checkpoint.json", JSON_INDENT(1), error) &&
           directory_publish(paths->temporary, paths->final, error);
}

// The newest checkpoint before commit `before` that is not damaged; -1: there is none.
static inline int64_t checkpoint_newest_sound(const CheckpointedRun *run, int64_t before) {
    int64_t commit = checkpoint_newest(run->directory, before);
    for (int i = 0; i < run->damaged_count; i++) {
        if (run->damaged[i] == commit && commit >= 0) { return checkpoint_newest_sound(run, commit); }
    }
    return commit;
}

typedef struct SavedReport {
    int64_t commit;
    double seconds; // that rank 0 was writing while training continued; 0: it was not
} SavedReport;

// The same for the end of what checkpoint_begin began. False: nothing has changed.
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
        uint32_t *shares = (uint32_t *)transport_collect_records(run->transport, "checkpoint", saver->sums,
                                                                 saver->blocks * sizeof *saver->sums);
        bool published = !is_main || saver_publish(saver, shares, error);
        transport_barrier_patiently(run->transport, "checkpoint", CHECKPOINT_PATIENCE);
        good = all_ranks_good(run, published, error);
        free(shares);
    }
    if (is_main && !good) { tree_remove(saver->paths.temporary); }
    if (good) {
        for (int i = 0; i < run->damaged_count; i++) { // a damaged one of this commit is replaced
            if (run->damaged[i] == saver->commit) { run->damaged[i] = -1; }
        }
        // Removes old checkpoints, but for those that keep, keep_every and keep_best are for. Those
        // beyond the new one, which this run passed over when it was resumed, stay and do not
        // count; nor do damaged ones, because somebody may want to look at them.
        int64_t every = run->keep_every, kept = 0;
        for (int64_t commit = saver->commit, older; is_main && commit >= 0; commit = older) {
            older = checkpoint_newest_sound(run, commit);
            bool first = every > 0 && commit / every > (older < 0 ? 0 : older) / every;
            bool best = run->keep_best && (commit == run->best_commit || commit == saver->best_commit);
            if (++kept > run->keep && !first && !best) {
                tree_remove(checkpoint_paths(run->directory, commit).final);
            }
        }
        run->saved_commit = saver->commit;
        run->saved_reports = saver->reports;
    }
    report->commit = saver->commit;
    report->seconds = saver->beside ? fmax(saver->seconds - waited, 0) : 0;
    run->saver = NULL;
    saver_free(saver);
    return good;
}
