// fuzz_checkpoint.h: a checkpoint: checkpoint.json, and behind a line of dashes
// state.safetensors. What is accepted has every vector of its rule inside the file, and
// numbers that a run of one, two or three ranks can go on from, with the same rule or
// another.
//
// A fuzzer would never guess the checksum and the model in checkpoint.json. The harness
// makes them right, so that the checks behind them are reached. The model's configuration
// is that of the smallest preset, but it has only two tensors of three elements in all,
// so that inputs stay small.
#pragma once

#include "checkpoint/load.h"
#include "options/options_parse.h"
#include "test/fuzz/fuzz.h"

enum { FUZZ_CHECKPOINT_FRAGMENTS = 2 };

// What a CheckpointedRun points to.
typedef struct FuzzRun {
    CheckpointedRun checkpointed;
    Transport transport;
    Scheduler scheduler;
    ModelConfig config;
    ParameterTable table;
} FuzzRun;

// Options at their defaults, made once: making them takes longer than most refusals.
static inline json_t *fuzz_checkpoint_options(void) {
    static json_t *object;
    Options options;
    if (object == NULL) {
        options_defaults(&options);
        object = options_as_json(&options);
    }
    return object;
}

static inline void fuzz_checkpoint_run(FuzzRun *run, const char *rule, int rank, int ranks) {
    CheckpointedRun *checkpointed = &run->checkpointed;
    run->transport.rank = rank;
    run->transport.size = ranks;
    model_config_from_preset(&MODEL_PRESETS[0], &run->config);
    run->table.entries = (ParameterInfo *)calloc(2, sizeof *run->table.entries);
    run->scheduler.local.fragments =
        (Fragment *)calloc(FUZZ_CHECKPOINT_FRAGMENTS, sizeof *run->scheduler.local.fragments);
    fuzz_require(run->table.entries != NULL && run->scheduler.local.fragments != NULL,
                 "there is memory for a small run");
    parameter_table_add(&run->table, "transformer.", "a", 2, 0, 0.0f);
    parameter_table_add(&run->table, "transformer.", "b", 1, 0, 0.0f);
    checkpointed->transport = run->scheduler.transport = &run->transport;
    checkpointed->scheduler = &run->scheduler;
    checkpointed->rule = rule_find(rule);
    checkpointed->config = &run->config;
    checkpointed->table = &run->table;
    checkpointed->B = 2;
    checkpointed->T = 8;
    checkpointed->options = fuzz_checkpoint_options();
    run->scheduler.settings.local.fragments = FUZZ_CHECKPOINT_FRAGMENTS;
    run->scheduler.settings.kind = checkpointed->rule->kind;
}

static inline void fuzz_checkpoint_run_free(FuzzRun *run) {
    free(run->scheduler.local.fragments);
    parameter_table_free(&run->table);
    free(run);
}

// Writes checkpoint.json with the right model and checksum; what is no JSON object, as it
// is.
static inline void fuzz_checkpoint_seal(const FuzzFolder *folder, const CheckpointedRun *run, FuzzPart part) {
    json_t *manifest = json_loadb((const char *)part.bytes, part.size, JSON_REJECT_DUPLICATES, NULL);
    if (json_is_object(manifest)) {
        json_object_set_new(manifest, "model", hf_model_describe(run->config, NULL));
        json_object_set_new(manifest, "checksum", json_integer(manifest_checksum(manifest)));
    }
    char *text = json_dumps(manifest, JSON_ENCODE_ANY);
    FuzzPart sealed = {(const uint8_t *)text, text != NULL ? strlen(text) : 0};
    fuzz_folder_add(folder, "checkpoint.json", text != NULL ? sealed : part);
    free(text);
    json_decref(manifest);
}

// ---- What must hold of a checkpoint that was accepted ---------------------------------

static inline void fuzz_checkpoint_area(const CheckpointSource *source, const CheckpointedRun *run,
                                        SourceArea area) {
    const uint8_t *bytes = (const uint8_t *)area.data, *end = source->state.bytes + source->state.size;
    size_t needed = run->table->parameter_count * precision_bytes(area.format);
    if (area.data == NULL) { return; }
    fuzz_require(bytes >= source->state.bytes && needed <= (size_t)(end - bytes),
                 "a vector lies inside the file");
    fuzz_touch(area.data, needed);
}

// All that load_vectors takes out of the state.
static inline void fuzz_checkpoint_vectors(const CheckpointSource *source, CheckpointedRun *run) {
    static const char *const names[] = {"master",   "parameters", "momentum",
                                        "exchange", "exp_avg",    "exp_avg_sq"};
    SavedScope scope = run->rule->kind == RULE_LOCAL ? SAVED_WORKER : SAVED_SHARED;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        SavedVector vector = {.name = names[i], .scope = scope, .format = PRECISION_FP32};
        SourceArea area = source_vector(source, run, &vector);
        fuzz_require(area.data != NULL || i > 1, "there are parameters to go on from");
        fuzz_checkpoint_area(source, run, area);
    }
    free(source_gradients(source, run, &run->scheduler->comm_buffer.tally, &run->scheduler->gradients.tally));
}

static inline void fuzz_checkpoint_numbers(CheckpointSource *source, CheckpointedRun *run) {
    Scheduler *s = run->scheduler;
    load_numbers(source, run);
    fuzz_require(s->optimizer.steps >= 0 && s->optimizer.steps <= INT64_C(1) << 53, "commits can be counted");
    fuzz_require(s->reports >= 0 && run->data_base >= 0, "reports and micro-batches can be counted");
    fuzz_require(s->gradients_done >= 0 && isfinite(s->gradients_done), "gradients can be counted");
    fuzz_require(s->micro_batches_begun <= UINT64_C(1) << 53, "micro-batches of a worker can be counted");
    fuzz_require(s->local.fragment >= 0 && s->local.fragment < FUZZ_CHECKPOINT_FRAGMENTS,
                 "the next fragment is one of them");
    for (int i = 0; i < FUZZ_CHECKPOINT_FRAGMENTS; i++) {
        fuzz_require(s->local.fragments[i].applied_at >= 0 &&
                         s->local.fragments[i].applied_at <= s->optimizer.steps,
                     "no fragment is of the future");
    }
    char remarks[CHECKPOINT_REMARKS_SIZE];
    source_find_remarks(source, run, remarks);
    fuzz_require(strnlen(remarks, sizeof remarks) < sizeof remarks, "remarks have an end");
}

// Opens the checkpoint in `folder` for a run of `rule`, as every rank does. Returns
// whether it was accepted.
static inline bool fuzz_checkpoint_open(const FuzzFolder *folder, const char *rule, int rank, int ranks,
                                        FuzzPart seal) {
    FuzzRun *run = (FuzzRun *)calloc(1, sizeof *run);
    CheckpointSource source = {.manifest = NULL};
    Error error = {""};
    fuzz_require(run != NULL, "there is memory for a run");
    fuzz_checkpoint_run(run, rule, rank, ranks);
    CheckpointedRun *checkpointed = &run->checkpointed;
    if (seal.size > 0) { fuzz_checkpoint_seal(folder, checkpointed, seal); }
    bool good = fuzz_accepted(checkpoint_open(&source, checkpointed, folder->path, &error), &error);
    if (good) {
        run->scheduler.job_in_flight = source.same_rule && source.in_flight;
        fuzz_checkpoint_vectors(&source, checkpointed);
        fuzz_checkpoint_numbers(&source, checkpointed);
        checkpoint_close(&source);
    }
    fuzz_checkpoint_run_free(run);
    return good;
}

static inline bool fuzz_checkpoint(const uint8_t *data, size_t size) {
    static const char *const rules[] = {"co2", "streaming-diloco", "acco", "zero1"};
    const FuzzPart nothing = {NULL, 0};
    FuzzPart parts[2];
    FuzzFolder folder;
    fuzz_split(data, size, parts, 2);
    fuzz_folder_open(&folder);
    fuzz_folder_add(&folder, "checkpoint.json", parts[0]);
    fuzz_folder_add(&folder, "state.safetensors", parts[1]);
    fuzz_checkpoint_open(&folder, "ddp", 0, 1, nothing);
    bool good = fuzz_checkpoint_open(&folder, "ddp", 0, 1, parts[0]);
    for (size_t i = 0; good && i < sizeof rules / sizeof rules[0]; i++) {
        int ranks = 1 + (int)i % 3;
        bool same = fuzz_checkpoint_open(&folder, rules[i], ranks - 1, ranks, nothing);
        fuzz_require(same, "what one run accepts every run of the model accepts");
    }
    fuzz_folder_close(&folder);
    return good;
}
