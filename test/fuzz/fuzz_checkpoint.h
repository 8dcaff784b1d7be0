// fuzz_checkpoint.h: a checkpoint: checkpoint.json, and behind a line of dashes
// state.safetensors. What is accepted has every vector of its rule inside the file, and
// numbers that a run of one, two or three ranks can go on from, with the same rule or
// another.
//
// The checksum and the model of checkpoint.json are made right, which no fuzzer would
// guess: so that the checks behind them are reached. The model's configuration is that of
// the smallest preset, but it has only two tensors, of three elements in all: inputs stay
// small.
#ifndef ACCO_TEST_FUZZ_FUZZ_CHECKPOINT_H
#define ACCO_TEST_FUZZ_FUZZ_CHECKPOINT_H

#include "checkpoint/load.h"
#include "test/fuzz/fuzz.h"

enum { FUZZ_CHECKPOINT_FRAGMENTS = 2 };

static inline void fuzz_checkpoint_run(Run *run, const char *rule, int rank, int ranks) {
    run->rule = rule_find(rule);
    run->transport.rank = rank;
    run->transport.size = ranks;
    run->B = 2;
    run->T = 8;
    gpt_neo_config_from_preset(&gpt_neo_presets()[0], &run->config);
    options_defaults(&run->options);
    run->table.entries = (ParameterInfo *)calloc(2, sizeof *run->table.entries);
    run->scheduler.fragments =
        (Fragment *)calloc(FUZZ_CHECKPOINT_FRAGMENTS, sizeof *run->scheduler.fragments);
    fuzz_require(run->table.entries != NULL && run->scheduler.fragments != NULL,
                 "there is memory for a small run");
    parameter_table_add(&run->table, -1, "a", 2, 0, 0.0f);
    parameter_table_add(&run->table, -1, "b", 1, 0, 0.0f);
    run->scheduler.settings.fragments = FUZZ_CHECKPOINT_FRAGMENTS;
    run->scheduler.settings.kind = run->rule->kind;
}

static inline void fuzz_checkpoint_run_free(Run *run) {
    free(run->scheduler.fragments);
    parameter_table_free(&run->table);
    free(run);
}

// checkpoint.json with a model and a checksum that are right; what is no JSON object, as
// it is.
static inline void fuzz_checkpoint_seal(const FuzzFolder *folder, const Run *run, FuzzPart part) {
    json_t *numbers = json_loadb((const char *)part.bytes, part.size, JSON_REJECT_DUPLICATES, NULL);
    if (json_is_object(numbers)) {
        json_object_set_new(numbers, "model", model_to_json(run));
        json_object_set_new(numbers, "checksum", json_integer(manifest_checksum(numbers)));
    }
    char *text = json_dumps(numbers, JSON_ENCODE_ANY);
    FuzzPart sealed = {(const uint8_t *)text, text != NULL ? strlen(text) : 0};
    fuzz_folder_add(folder, "checkpoint.json", text != NULL ? sealed : part);
    free(text);
    json_decref(numbers);
}

// ----------------------------------------------------------------------------------------------------------------------------- laws

static inline void fuzz_checkpoint_area(const CheckpointSource *source, const Run *run, const float *area) {
    const uint8_t *bytes = (const uint8_t *)area, *end = source->state.bytes + source->state.size;
    size_t needed = run->table.parameter_count * sizeof(float);
    if (area == NULL) { return; }
    fuzz_require(bytes >= source->state.bytes && needed <= (size_t)(end - bytes),
                 "a vector lies inside the file");
    fuzz_touch(area, needed);
}

// All that load_vectors takes out of the state.
static inline void fuzz_checkpoint_vectors(CheckpointSource *source, Run *run, bool same_rule) {
    static const char *const moments[2] = {"exp_avg", "exp_avg_sq"};
    SavedScope scope = run->rule->kind == RULE_LOCAL ? SAVED_WORKER : SAVED_SHARED;
    for (int i = 0; i < 2; i++) {
        SavedVector vector = {moments[i], scope, NULL};
        fuzz_checkpoint_area(source, run, source_moment(source, run, &vector));
    }
    SavedVector parameters = {"parameters", scope, NULL};
    const float *found = source_parameters(source, run, &parameters, same_rule),
                *master = source_area(source, run, "master", -1);
    fuzz_require(found != NULL && master != NULL, "there are parameters to go on from");
    fuzz_checkpoint_area(source, run, found);
    fuzz_checkpoint_area(source, run, master);
    fuzz_checkpoint_area(source, run, source_area(source, run, "momentum", -1));
    if (run->scheduler.job_in_flight) { free(source_exchange(source, run)); }
    free(source_gradients(source, run, &run->scheduler.job.tally, &run->scheduler.tally));
}

static inline void fuzz_checkpoint_numbers(CheckpointSource *source, Run *run, bool same_rule) {
    Scheduler *s = &run->scheduler;
    load_numbers(source, run, same_rule);
    fuzz_require(s->optimizer.commits >= 0 && s->optimizer.commits <= INT64_C(1) << 53,
                 "commits can be counted");
    fuzz_require(s->reports >= 0 && run->data_base >= 0, "reports and micro-batches can be counted");
    fuzz_require(s->gradients_done >= 0 && isfinite(s->gradients_done), "gradients can be counted");
    fuzz_require(s->micro_batches_begun <= UINT64_C(1) << 53, "micro-batches of a worker can be counted");
    fuzz_require(s->fragment >= 0 && s->fragment < FUZZ_CHECKPOINT_FRAGMENTS,
                 "the next fragment is one of them");
    for (int i = 0; i < FUZZ_CHECKPOINT_FRAGMENTS; i++) {
        fuzz_require(s->fragments[i].applied_at >= 0 && s->fragments[i].applied_at <= s->optimizer.commits,
                     "no fragment is of the future");
    }
    checkpoint_judge(source, run, same_rule);
    fuzz_require(strnlen(source->remarks, sizeof source->remarks) < sizeof source->remarks,
                 "remarks have an end");
}

// Opens the checkpoint in `folder` for a run of `rule`, as every rank does. Returns
// whether it was accepted.
static inline bool fuzz_checkpoint_open(const FuzzFolder *folder, const char *rule, int rank, int ranks,
                                        FuzzPart seal) {
    Run *run = (Run *)calloc(1, sizeof *run);
    CheckpointSource source;
    Error error = {""};
    fuzz_require(run != NULL, "there is memory for a run");
    fuzz_checkpoint_run(run, rule, rank, ranks);
    if (seal.size > 0) { fuzz_checkpoint_seal(folder, run, seal); }
    bool good = fuzz_accepted(checkpoint_open(&source, run, folder->path, &error), &error);
    if (good) {
        bool same_rule = strcmp(source.rule, rule) == 0;
        run->scheduler.job_in_flight =
            same_rule && json_is_true(json_object_get(source.numbers, "job_in_flight"));
        fuzz_checkpoint_vectors(&source, run, same_rule);
        fuzz_checkpoint_numbers(&source, run, same_rule);
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

#endif
