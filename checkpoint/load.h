// checkpoint/load.h: continuing from a checkpoint.
//
// No byte of a checkpoint is trusted. Everything that can be wrong is found before anything of the
// run changes, and is an error on all ranks alike. A run that differs from the saved one (another
// rule, number of ranks, kind of device, or option that changes the numbers) cannot continue bit
// for bit. That is a remark, no error.
#pragma once

#include "checkpoint/checkpoint.h"

enum { CHECKPOINT_REMARKS_SIZE = 512 };

// A checkpoint that this rank has opened. Below, `run` is always the present run, not the saving
// one.
typedef struct CheckpointSource {
    char path[CHECKPOINT_PATH_SIZE];
    json_t *manifest; // NULL: it is not open
    bool refused;     // it can be read, but is of another model, or of other moments
    SafetensorsFile state;
    CheckpointedRun before;      // the saving run: RUN_NUMBERS and PROGRESS_NUMBERS of it
    const Rule *rule;            // of that run
    const ParameterTable *table; // of the present run
    bool same_rule;              // as the present run's
    bool muon;                   // its inner optimizer
    bool in_flight;              // it had a job under way
    WorkerNumbers *numbers;      // (workers): of each of its ranks
    int workers;
    int *turn;         // (workers): SchedulerSettings::turn of that run, or NULL
    uint64_t furthest; // of all its micro-batches: behind those that its workers have begun
} CheckpointSource;

// ---- Opening --------------------------------------------------------------------------

// Reads how many micro-batches its ranks had in a turn. False: there cannot be such numbers.
static inline bool source_read_turn(CheckpointSource *source) {
    const json_t *list = json_object_get(source->manifest, "turn");
    if (list == NULL) { return true; } // one each
    if (json_array_size(list) != (size_t)source->workers) { return false; }
    source->turn = MEMORY_OF(int, source->workers);
    for (int i = 0; i < source->workers; i++) {
        json_int_t count = json_integer_value(json_array_get(list, (size_t)i));
        if (count < 1 || count > 1000000) { return false; }
        source->turn[i] = (int)count;
    }
    return true;
}

// Reads the numbers of the manifest. False: they are not the state of a run of its rule.
static inline bool source_read_numbers(CheckpointSource *source) {
    const json_t *manifest = source->manifest, *workers = json_object_get(manifest, "workers"),
                 *applied = json_object_get(manifest, "applied_at");
    const Rule *rule = source->rule;
    CheckpointedRun *before = &source->before;
    size_t count = json_array_size(workers), fragments = json_array_size(applied);
    Scheduler s;
    bool good = rule != NULL && json_is_boolean(json_object_get(manifest, "job_in_flight")) &&
                json_is_array(json_object_get(manifest, "block_crc32")) &&
                numbers_read(manifest, SCHEDULER_NUMBERS, &s) &&
                numbers_read(manifest, RUN_NUMBERS, before) &&
                numbers_read(manifest, PROGRESS_NUMBERS, before) && before->B > 0 && before->T > 0;
    if (good && source->in_flight) {
        good = rule->job_in_flight_between_commits &&
               numbers_read(json_object_get(manifest, "job"), JOB_NUMBERS, &s.job) && s.job.kind == AVERAGE &&
               s.job.fragment == 0;
    }
    good = good && count >= 1 && count <= 1000000 && source_read_turn(source);
    if (good) { source->numbers = MEMORY_OF(WorkerNumbers, count); }
    double turn = 0; // micro-batches of all ranks
    for (size_t i = 0; good && i < count; i++) { turn += micro_batches_in_turn(source->turn, (int)i); }
    for (size_t i = 0; good && i < count; i++) {
        WorkerNumbers *worker = &source->numbers[i];
        good = numbers_read(json_array_get(workers, i), WORKER_NUMBERS, worker) &&
               isfinite(worker->norms.mean) && isfinite(worker->losses.mean) &&
               (double)worker->micro_batches_begun * turn <= 0x1p53;
        if (!good) { break; }
        source->furthest = size_max(source->furthest, micro_batches_passed(source->turn, (int)count, (int)i,
                                                                           worker->micro_batches_begun));
    }
    // No fragment was applied in the future, and the next one is one of them.
    good = good && json_is_array(applied) && (fragments > 0 || rule->kind != RULE_LOCAL);
    for (size_t i = 0; good && i < fragments; i++) {
        const json_t *item = json_array_get(applied, i);
        good = json_is_integer(item) && json_integer_value(item) >= 0 &&
               json_integer_value(item) <= s.optimizer.steps;
    }
    good = good && s.local.fragment >= 0 && (size_t)s.local.fragment < size_max(fragments, 1);
    // The position in the data, counted in tokens: load_numbers computes with it.
    return good &&
           ((double)before->data_base + (double)source->furthest) * (double)before->B * (double)before->T <=
               0x1p53;
}

typedef struct SourceArea {
    const Real *data;            // (parameter_count); NULL: there is none
    Precision format, wanted;    // as it was saved, and as read_piece converts it
    bool without_muon;           // the matrices that Muon steps are missing
    float scale;                 // what is read from it is multiplied by this
    const ParameterTable *table; // where its tensors are
} SourceArea;

// worker: whose vector it is; -1: all share it. The file must have all of its tensors, in
// one format and one behind the other. Where Muon steps everything, AdamW's vector has none.
static inline SourceArea source_area(const CheckpointSource *source, const char *vector, int worker) {
    SourceArea none = {.scale = 1}, area = none;
    const uint8_t *begin = NULL;
    area.without_muon = source->muon && strcmp(vector, "exp_avg_sq") == 0;
    area.table = source->table;
    for (int i = 0; i < area.table->count; i++) {
        const ParameterInfo *info = &area.table->entries[i];
        char name[128];
        if (area.without_muon && info->is_projection) { continue; }
        area_name(name, vector, worker, info->name);
        const SafetensorsEntry *entry = safetensors_find(&source->state, name);
        if (entry == NULL) { return none; }
        if (begin == NULL) {
            begin = entry->data;
            area.format = entry->type == SAFETENSORS_BF16 ? PRECISION_BF16 : PRECISION_FP32;
        }
        size_t bytes = precision_bytes(area.format);
        if (entry->type != area_type(area.format) || entry->bytes != info->count * bytes ||
            entry->data != begin + area_place(area.table, area.without_muon, info->offset) * bytes) {
            return none;
        }
    }
    if (begin == NULL) { begin = source->state.bytes; }
    if ((uintptr_t)begin % precision_bytes(area.format) != 0) { return none; }
    area.data = (const Real *)begin;
    return area;
}

static inline bool source_has(const CheckpointSource *source, const char *vector, int worker) {
    return source_area(source, vector, worker).data != NULL;
}

// The state holds every vector that the rule under which it was saved has.
static inline bool source_is_complete(const CheckpointSource *source) {
    const Rule *rule = source->rule;
    bool local = rule->kind == RULE_LOCAL;
    bool good = source_has(source, "master", -1);
    for (int worker = local ? 0 : -1; good && worker < (local ? source->workers : 0); worker++) {
        good = source_has(source, "exp_avg", worker) && source_has(source, "exp_avg_sq", worker) &&
               (rule->replicated || source_has(source, "parameters", worker));
    }
    bool with_errors = local && !source_has(source, "momentum", -1); // then every worker has one
    // Only overlapped rules have gradients waiting for a job; then every worker has them.
    bool waiting = source_has(source, "gradients", 0);
    for (int worker = 0; good && worker < source->workers; worker++) {
        good = (!with_errors || source_has(source, "error", worker)) &&
               source_has(source, "gradients", worker) == waiting;
    }
    return good && source->in_flight == source_has(source, "exchange", -1) &&
           (!waiting || rule->kind == RULE_OVERLAPPED);
}

static inline bool source_open_manifest(CheckpointSource *source, const CheckpointedRun *run, Error *error) {
    const char *path = source->path;
    char file[CHECKPOINT_PATH_SIZE + 32];
    json_error_t problem;
    snprintf(file, sizeof file, "%s/checkpoint.json", path);
    source->manifest = json_load_file(file, JSON_REJECT_DUPLICATES, &problem);
    if (source->manifest == NULL && access(file, F_OK) != 0) {
        return error_set(error,
                         "%.400s is no checkpoint: it has no checkpoint.json; give --resume a run or one of "
                         "its checkpoints, RUN/checkpoints/commit-N, and --from a model",
                         path);
    }
    if (source->manifest == NULL) { return error_set(error, "%.400s: %.120s", file, problem.text); }
    const char *rule = json_text(source->manifest, "optimizer");
    if (!json_is_integer(json_object_get(source->manifest, "checkpoint")) ||
        integer_from_json(source->manifest, "checkpoint") != CHECKPOINT_VERSION || rule == NULL) {
        return error_set(
            error, "%.400s is no checkpoint of this version of the program; --from reads its model", path);
    }
    source->rule = rule_find(rule);
    source->same_rule = source->rule == run->rule;
    source->muon = json_flag(source->manifest, "muon");
    source->in_flight = json_flag(source->manifest, "job_in_flight");
    source->workers = (int)json_array_size(json_object_get(source->manifest, "workers"));
    if (integer_from_json(source->manifest, "checksum") != manifest_checksum(source->manifest)) {
        return error_set(error, "%.400s is damaged: it is not what was written", file);
    }
    return source_read_numbers(source) ||
           error_set(error, "%.400s holds a state that no run of %.40s can be in", file, rule);
}

// The checkpoint is of this run's model, and the same tensors are trained.
static inline bool source_is_of_model(const CheckpointSource *source, const CheckpointedRun *run,
                                      Error *error) {
    // Whole, because models with tensors of the same shapes may compute different things.
    json_t *model = hf_model_describe(run->config, NULL);
    bool same = json_equal(json_object_get(source->manifest, "model"), model) != 0;
    json_decref(model);
    if (!same) {
        return error_set(error,
                         "%.400s is of another model than %s: give the --model that it was trained with",
                         source->path, run->config->name);
    }
    long long trained = (long long)integer_from_json(source->manifest, "parameters");
    return (trained == (long long)run->table->parameter_count &&
            source->before.trained_sum == run->trained_sum) ||
           error_set(error,
                     "%.400s has other trained parameters, %lld, than this run, %zu: --freeze and --lora-... "
                     "must be as they were",
                     source->path, trained, run->table->parameter_count);
}

static inline void checkpoint_close(CheckpointSource *source) {
    json_decref(source->manifest);
    free(source->numbers);
    free(source->turn);
    safetensors_close(&source->state);
    memset(source, 0, sizeof *source);
}

// One rank alone: opens a checkpoint, and checks that its files are there, sound and of this run's
// model, but reads no vectors. source: zeros, or one that was opened before, perhaps the same. On
// failure there is nothing to close.
static inline bool checkpoint_open(CheckpointSource *source, const CheckpointedRun *run, const char *path,
                                   Error *error) {
    char file[CHECKPOINT_PATH_SIZE + 32];
    if (source->manifest != NULL && strcmp(source->path, path) == 0) { return true; }
    checkpoint_close(source);
    snprintf(source->path, sizeof source->path, "%s", path);
    source->table = run->table;
    snprintf(file, sizeof file, "%s/state.safetensors", source->path);
    bool readable = source_open_manifest(source, run, error);
    bool fits = readable && source_is_of_model(source, run, error);
    if (fits && source->muon != checkpoint_has_muon(run) && !run->fresh_moments) {
        fits = error_set(error,
                         "%.400s was trained with --inner %s: continue with that, or add --fresh-moments on, "
                         "and the moments start from zero",
                         path, source->muon ? "muon" : "adamw");
    }
    bool good = fits && safetensors_open(&source->state, file, error);
    if (good && !source_is_complete(source)) {
        good = error_set(error, "%.400s lacks a vector that every checkpoint of %s has", file,
                         source->rule->name);
    }
    if (!good) { checkpoint_close(source); }
    source->refused = readable && !fits;
    return good;
}

// Tokens that were trained on until the checkpoint at `path`; 0 where it cannot be read.
static inline double checkpoint_tokens(const char *path) {
    char file[CHECKPOINT_PATH_SIZE + 32];
    CheckpointedRun run;
    Scheduler s;
    snprintf(file, sizeof file, "%.*s/checkpoint.json", CHECKPOINT_PATH_SIZE, path);
    json_t *manifest = json_load_file(file, JSON_REJECT_DUPLICATES, NULL);
    bool good = numbers_read(manifest, SCHEDULER_NUMBERS, &s) && numbers_read(manifest, RUN_NUMBERS, &run);
    json_decref(manifest);
    return good ? s.gradients_done * run.B * run.T : 0;
}

// All ranks: every block of the state is what was written, block i by rank i mod ranks. False with
// an error of this rank. The file is read, not mapped: a failing disk is then an error, and no
// signal. What is frozen must be as it was.
static inline bool checkpoint_verify(const CheckpointSource *source, const CheckpointedRun *run,
                                     Error *error) {
    const char *path = source->path;
    const Transport *transport = run->transport;
    const json_t *expected = json_object_get(source->manifest, "block_crc32");
    char file[CHECKPOINT_PATH_SIZE + 32];
    int64_t mine = integer_from_json(source->manifest, "checksum"), first = mine;
    share_from_rank_zero(run->transport, "checkpoint", &first, sizeof first);
    if (first != mine) { return error_set(error, "%.400s is another checkpoint than on rank 0", path); }
    if (source->before.frozen_sum != run->frozen_sum) {
        return error_set(error, "%.400s was trained with other frozen parameters than %.400s has", path,
                         run->base_directory);
    }
    snprintf(file, sizeof file, "%s/state.safetensors", path);
    size_t bytes = source->state.size, blocks = (bytes + CHECKPOINT_BLOCK - 1) / CHECKPOINT_BLOCK;
    int descriptor = open(file, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) { return error_set_file(error, "open", file); }
    unsigned char *block = MEMORY_OF(unsigned char, CHECKPOINT_BLOCK);
    bool good = json_array_size(expected) == blocks;
    for (size_t i = (size_t)transport->rank; good && i < blocks; i += (size_t)transport->size) {
        size_t begin = i * CHECKPOINT_BLOCK, size = size_min(bytes - begin, CHECKPOINT_BLOCK);
        good = pread(descriptor, block, size, (off_t)begin) == (ssize_t)size &&
               (json_int_t)crc32_z(0, block, size) == json_integer_value(json_array_get(expected, i));
    }
    close(descriptor);
    free(block);
    return good || error_set(error, "%.400s is damaged: its bytes are not those that were written", file);
}

// ---- Vectors: where each of the present run's comes from ------------------------------

// Where a vector of the present run comes from; no data: it starts from zero.
static inline SourceArea source_vector(const CheckpointSource *source, const CheckpointedRun *run,
                                       const SavedVector *vector) {
    const char *name = vector->name;
    int rank = run->transport->rank, ranks = run->transport->size;
    bool of_worker = vector->scope == SAVED_WORKER;
    SourceArea none = {.scale = 1}, shared = source_area(source, name, -1);
    if (strncmp(name, "exp_avg", 7) == 0) {
        // The saving run's workers shared AdamW's moments, or each had its own, by its rule.
        SourceArea own = source_area(source, name, of_worker ? rank % source->workers : 0);
        if (source->muon != checkpoint_has_muon(run)) { return none; }
        return shared.data == NULL || (of_worker && own.data != NULL) ? own : shared;
    }
    if (strcmp(name, "parameters") == 0) {
        // What compute uses: the saved ones, if this worker existed before under the same rule;
        // otherwise, and where casts were saved that this run does not use, the exact ones.
        bool cast = json_flag(source->manifest, "casts") && !run->scheduler->settings.gathers_casts;
        bool usable = source->same_rule && !cast && (!of_worker || source->workers == ranks);
        SourceArea own = usable && of_worker ? source_area(source, name, rank) : usable ? shared : none;
        return own.data != NULL ? own : source_area(source, "master", -1);
    }
    // What a worker has not sent yet belongs to the parameters from which it has trained. They have
    // it already, or not, as that run was eager.
    if (strcmp(name, "error") == 0) {
        const json_t *eager = json_object_get(json_object_get(source->manifest, "options"), "sparse-eager");
        bool usable = source->same_rule && source->workers == ranks &&
                      json_is_true(eager) == run->scheduler->settings.local.sparse_eager;
        return usable ? source_area(source, name, rank) : none;
    }
    // What rounding has lost is small: another number of workers begins without it.
    if (strcmp(name, "unsent") == 0) {
        return source->same_rule && source->workers == ranks ? source_area(source, name, rank) : none;
    }
    // The sum that the job in flight has exchanged: its mean over the ranks is as before.
    if (strcmp(name, "exchange") == 0) { shared.scale = (float)ranks / (float)source->workers; }
    return shared;
}

// Micro-batches of this run in a saved one, by their tokens.
static inline double source_scale(const CheckpointSource *source, const CheckpointedRun *run) {
    return (double)source->before.B * (double)source->before.T / (double)((int64_t)run->B * run->T);
}

// The gradient sums that wait for the next job, of the old workers that are dealt out to this rank,
// in micro-batches of this run. The caller frees the sum (parameter_count).
static inline float *source_gradients(const CheckpointSource *source, const CheckpointedRun *run,
                                      Tally *handed_over, Tally *kept) {
    size_t count = run->table->parameter_count;
    double scale = source_scale(source, run);
    float *sum = MEMORY_OF(float, count);
    memset(handed_over, 0, sizeof *handed_over);
    memset(kept, 0, sizeof *kept);
    for (int worker = run->transport->rank; worker < source->workers; worker += run->transport->size) {
        SourceArea gradients = source_area(source, "gradients", worker);
        for (size_t i = 0; gradients.data != NULL && i < count; i++) {
            sum[i] += real_load(gradients.data, i, gradients.format) * (float)scale;
        }
        tally_add(handed_over, &source->numbers[worker].handed_over);
        tally_add(kept, &source->numbers[worker].tally);
    }
    handed_over->micro_batches *= scale;
    kept->micro_batches *= scale;
    return sum;
}

// Moments that were saved as fp32 and are bf16 now are rounded to nearest. This happens once,
// and no optimizer step is lost by it.
static inline bool read_piece(void *context, size_t flat, Real *host, size_t count, Error *error) {
    const SourceArea *from = (const SourceArea *)context;
    Precision is = from->wanted;
    (void)error;
    if (from->data == NULL) {
        memset(host, 0, count * precision_bytes(is));
        return true;
    }
    size_t place = area_place(from->table, from->without_muon, flat);
    if (from->format == is && from->scale == 1) {
        memcpy(host, real_at_const(from->data, place, is), count * precision_bytes(is));
        return true;
    }
    for (size_t i = 0; i < count; i++) {
        real_store(host, i, real_load(from->data, place + i, from->format) * from->scale, is);
    }
    return true;
}

// Fills what this rank has of the vector from `from`; with zeros if that has no data.
static inline void read_vector(CheckpointedRun *run, const SavedVector *vector, SourceArea from,
                               float *stage) {
    PieceWalk walk = {
        .scheduler = run->scheduler, .loads = true, .stage = stage, .visit = read_piece, .context = &from};
    Error never;
    from.wanted = vector->format;
    walk_vector(&walk, vector, &never);
}

static inline void load_vectors(const CheckpointSource *source, CheckpointedRun *run) {
    Scheduler *s = run->scheduler;
    SavedVector vectors[CHECKPOINT_MAX_VECTORS];
    float *stage = MEMORY_OF(float, CHECKPOINT_STAGE);
    s->job_in_flight = source->same_rule && source->in_flight;
    int count = saved_vectors(s, vectors);
    for (int i = 0; i < count; i++) {
        read_vector(run, &vectors[i], source_vector(source, run, &vectors[i]), stage);
    }
    if (s->job_in_flight) { s->comm_buffer.state = BUFFER_WRITING; } // as if its job had just ended
    if (source->same_rule && source_has(source, "gradients", 0)) {
        float *sum = source_gradients(source, run, &s->comm_buffer.tally, &s->gradients.tally);
        SourceArea from = {.data = as_reals_const(sum), .format = PRECISION_FP32, .scale = 1};
        SavedVector to = {
            .scope = SAVED_WORKER, .data = as_reals(s->comm_buffer.data), .format = from.format};
        read_vector(run, &to, from, stage);
        to.data = as_reals(s->gradients.data);
        // After hand_over(KEEP) the accumulator holds the same sum, and grows.
        if (s->gradients.tally.micro_batches > 0) { read_vector(run, &to, from, stage); }
        s->comm_buffer.state = BUFFER_READY;
        free(sum);
    }
    free(stage);
}

// Whether micro-batches were numbered as by this run of as many ranks.
static inline bool source_has_turn(const CheckpointSource *source, const CheckpointedRun *run) {
    const int *turn = run->scheduler->settings.turn;
    for (int i = 0; i < source->workers; i++) {
        if (micro_batches_in_turn(turn, i) != micro_batches_in_turn(source->turn, i)) { return false; }
    }
    return true;
}

// Sets the counters of the run. If there are more ranks now, some take over another worker's spike
// detectors. The other numbers of a worker are used only with the same number of ranks, and of
// tokens in a micro-batch.
static inline void load_numbers(const CheckpointSource *source, CheckpointedRun *run) {
    Scheduler *s = run->scheduler;
    const json_t *manifest = source->manifest, *applied = json_object_get(manifest, "applied_at");
    WorkerNumbers mine = source->numbers[run->transport->rank % source->workers];
    numbers_read(manifest, SCHEDULER_NUMBERS, s);
    numbers_read(manifest, PROGRESS_NUMBERS, run);
    double scale = source_scale(source, run);
    s->gradients_done *= scale;
    s->report.gradients_done *= scale;
    if (!source->same_rule) { // then reports begin anew, at the present commit
        s->report.commit = s->optimizer.steps;
        s->report.gradients_done = s->gradients_done;
    }
    if (s->job_in_flight) {
        numbers_read(json_object_get(manifest, "job"), JOB_NUMBERS, &s->job);
        s->job.gradients_done *= scale;
        s->job.total.micro_batches *= scale;
        s->job.spike = SPIKE_NONE; // checkpoint_begin saves no job with a spike
    }
    bool same_fragments = source->same_rule && s->local.fragments != NULL &&
                          json_array_size(applied) == (size_t)s->settings.local.fragments;
    if (!same_fragments) { s->local.fragment = 0; }
    for (int i = 0; same_fragments && i < s->settings.local.fragments; i++) {
        s->local.fragments[i].applied_at = (int64_t)json_integer_value(json_array_get(applied, (size_t)i));
    }
    s->spikes.norms = mine.norms;
    s->spikes.losses = mine.losses;
    s->spikes.norms.limit = s->spikes.losses.limit = s->settings.spike_limit;
    s->spikes.in_a_row = mine.spikes_in_a_row;
    if (source->workers != run->transport->size || scale != 1 || !source_has_turn(source, run)) {
        // The data continue where the furthest worker was, so that none are used twice.
        run->data_base = (int64_t)ceil(((double)run->data_base + (double)source->furthest) * scale);
        return;
    }
    s->micro_batches_begun = mine.micro_batches_begun;
    s->local.norm = mine.local_norm;
    s->local.rate = mine.local_rate;
    if (!source->same_rule || s->settings.kind != RULE_LOCAL) { return; }
    s->gradients.tally = mine.tally;
    if (s->settings.on_spike == SPIKE_SKIP) { return; }
    // A spike in this tally ended the run that saved it, and would end this one at once.
    s->gradients.tally.left_out = 0;
    memset(&s->gradients.tally.site, 0, sizeof s->gradients.tally.site);
}

// ---- Remarks --------------------------------------------------------------------------

// remarks <- what cannot continue as if nothing had happened, but for options (resume.h).
static inline void source_find_remarks(const CheckpointSource *source, const CheckpointedRun *run,
                                       char remarks[CHECKPOINT_REMARKS_SIZE]) {
    const json_t *manifest = source->manifest;
    const char *device = json_text(manifest, "device"), *exchange = json_text(manifest, "exchange"),
               *data = json_text(manifest, "data"), *revision = json_text(manifest, "revision"),
               *rounding = json_text(manifest, "rounding");
    const SchedulerSettings *settings = &run->scheduler->settings;
    bool other_ranks = source->workers != run->transport->size, local = run->rule->kind == RULE_LOCAL,
         other_data = data == NULL || strncmp(data, run->data, strcspn(run->data, ";")) != 0, changed = false;
    char today[64], rounds[300];
    bool other_device = device != NULL && (strcmp(device, "cuda") == 0) != (settings->device.gpu != NULL);
    snprintf(rounds, sizeof rounds,
             "another processor or library rounds in another way (%.100s; before %.100s)", run->rounding,
             rounding == NULL ? "unknown" : rounding);
    transport_sum_order(run->transport, today, sizeof today);
    for (int i = 0; i < source->workers; i++) { changed = changed || source->numbers[i].data_changed; }
    const Condition cases[] = {
        {!source->same_rule, "another rule: what the old rule had in flight is dropped"},
        {source->muon != checkpoint_has_muon(run), "the moments start from zero"},
        {other_ranks && local, "another number of ranks: all continue from the outer parameters"},
        {other_ranks && !local, "another number of ranks: sums are rounded in another order, data continue "
                                "where the furthest rank was"},
        {!other_ranks && !settings->local.sparse && exchange != NULL && strcmp(exchange, today) != 0,
         "other hosts, or another --exchange: sums are rounded in another order"},
        {other_device, "another kind of device rounds in another way"},
        {!other_device && (rounding == NULL || strcmp(rounding, run->rounding) != 0), rounds},
        {revision == NULL || strcmp(revision, run->revision) != 0, "a program of another commit"},
        {source->before.product_processors != run->product_processors,
         "another share of the GPU for NCCL: matrix products may be computed in another way"},
        {other_data, "other data"},
        {!other_data && strcmp(data, run->data) != 0, "other sources or weights in --data"},
        {changed, "data changed while the run trained on them"},
        {settings->adaptive, "with --accumulate auto batches follow the time"},
    };
    remarks[0] = '\0';
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        if (cases[i].holds) { text_join(remarks, CHECKPOINT_REMARKS_SIZE, "; ", "%s", cases[i].text); }
    }
}

// Whether the model in a checkpoint, which going on does not read, is what was written.
static inline bool checkpoint_model_is_whole(const char *checkpoint, Error *error) {
    char path[PATH_MAX];
    return path_within(path, checkpoint, "model", error) &&
           (hf_model_has(path, "config.json") || error_set(error, "%.400s has no config.json", path)) &&
           file_sums_check(path, error);
}

// All ranks, after scheduler_start: puts the run into the state of a checkpoint. False, with the
// same error on all ranks: the run is as it was. source: as of checkpoint_open, and then open.
static inline bool checkpoint_load(CheckpointSource *source, CheckpointedRun *run, const char *path,
                                   Error *error) {
    bool good = all_ranks_good(run, checkpoint_open(source, run, path, error), error) &&
                all_ranks_good(run, checkpoint_verify(source, run, error), error);
    if (good) {
        load_vectors(source, run);
        load_numbers(source, run);
        scheduler_change_parameters(run->scheduler, false);
    } else {
        checkpoint_close(source);
    }
    return good;
}
