// training_problem.h: a model on data; they meet the scheduler here and nowhere else.
//
// Micro-batches are counted over all ranks (micro_batch_number) and over all parts of a run that
// was resumed, so no sample is used twice and none is left out, whatever the number of ranks. Only
// with --accumulate auto some are: nobody knows how far each rank will come.
#pragma once

#include "comm/transport.h"
#include "dataloader.h"
#include "models/decoder.h"
#include "scheduler/state.h"

// A micro-batch on the host.
typedef struct Batch {
    int32_t *tokens, *targets; // (B, T)
    double perfect_loss;       // of a perfect model; NAN: unknown
    uint64_t first_sample;     // in the global order
    bool is_filled;
} Batch;

typedef struct TrainingProblem {
    Transport *transport; // whose rank and ranks share the data
    const int *turn;      // SchedulerSettings::turn
    Model *model;
    const ParameterTable *table; // the model's
    const DataLoader *data;
    int B, T;                 // sequences in a micro-batch, tokens in a sequence
    const int64_t *data_base; // the first micro-batch that was not used before; a rollback changes it
    double slow_seconds;      // how long this rank sleeps after each micro-batch (--slow-rank)
    Batch batch;              // of the compute stream
    Batch next_batch;         // on a GPU: it is filled while the GPU computes with `batch`
    Error lost;               // which data cannot be read any more, or have changed; empty: none
    bool data_changed;        // some micro-batches were perhaps of other data
} TrainingProblem;

static inline void training_reserve(TrainingProblem *training, Arena *arena) {
    size_t bytes = (size_t)training->B * training->T * sizeof(int32_t), next = arena->on_gpu ? bytes : 0;
    const ArenaRow rows[] = {
        {MEMORY_WORKSPACE, "tokens", bytes, &training->batch.tokens},
        {MEMORY_WORKSPACE, "targets", bytes, &training->batch.targets},
        {MEMORY_WORKSPACE, "next tokens", next, &training->next_batch.tokens},
        {MEMORY_WORKSPACE, "next targets", next, &training->next_batch.targets},
    };
    arena_reserve_rows(arena, rows, sizeof rows / sizeof rows[0], true);
}

// The first sample, in the global order, of micro-batch `index` of this rank.
static inline uint64_t training_first_sample(const TrainingProblem *training, uint64_t index) {
    const Transport *transport = training->transport;
    uint64_t number = micro_batch_number(training->turn, transport->size, transport->rank, index);
    return (*training->data_base + number) * training->B;
}

static inline bool training_fill(const TrainingProblem *training, Batch *batch, uint64_t first_sample,
                                 Error *error) {
    batch->first_sample = first_sample;
    batch->is_filled = data_loader_fill(training->data, DATA_TRAINING, first_sample, training->B,
                                        batch->tokens, batch->targets, &batch->perfect_loss, error);
    return batch->is_filled;
}

// Data are lost: the run is to save itself and to end. The first reason stays. Compute stream,
// or between two commits, when nothing runs there.
static inline void training_lose_data(TrainingProblem *training, const Error *error) {
    if (!error_is_set(&training->lost)) { training->lost = *error; }
    __atomic_store_n(&training->transport->asked_to_stop, true, __ATOMIC_RELAXED);
}

// Data that cannot be read any more count as a micro-batch in which nothing is to be predicted.
// While a GPU computes, the host fills the next batch, since reading from disk may take long.
static inline MicroBatchResult training_micro_batch(void *self, Stream *stream, uint64_t index,
                                                    const void *weights, float *gradients, const Pace *pace) {
    TrainingProblem *training = (TrainingProblem *)self;
    Model *model = training->model;
    Batch *batch = &training->batch, *next = &training->next_batch;
    uint64_t first_sample = training_first_sample(training, index);
    size_t count = (size_t)training->B * training->T;
    Error error = {""}, unused = {""};
    if (next->is_filled && next->first_sample == first_sample) {
        Batch used = *batch;
        *batch = *next;
        *next = used;
        next->is_filled = false;
    } else if (!training_fill(training, batch, first_sample, &error)) {
        training->data_changed = true;
        training_lose_data(training, &error);
        memset(batch->tokens, 0, count * sizeof *batch->tokens);
        for (size_t i = 0; i < count; i++) { batch->targets[i] = -1; }
    }
    const float *losses =
        model_gradients(model, stream, weights, gradients, batch->tokens, batch->targets, pace);
    if (model->settings.on_gpu) {
        training_fill(training, next, training_first_sample(training, index + 1), &unused);
    }
    MicroBatchResult result;
    result.loss = losses_mean(stream, losses, batch->targets, count);
    result.perfect_loss = batch->perfect_loss;
    result.predicted = targets_predicted(batch->targets, count);
    if (training->slow_seconds > 0) { sleep_seconds(training->slow_seconds); }
    return result;
}

// To Muon a tensor of queries, keys and values is three.
enum { TRAINING_PARTS = 3 };

// What the optimizer needs to know of the model's tensors; returns their number, at most
// TRAINING_PARTS table->count. decays_all: vectors, too. muon: of the layers' matrices.
static inline int training_tensors(const ParameterTable *table, bool decays_all, bool muon,
                                   OptimizerTensor *tensors) {
    int count = 0;
    for (int i = 0; i < table->count; i++) {
        const ParameterInfo *entry = &table->entries[i];
        bool whole = muon && entry->is_projection;
        size_t part = entry->count / entry->stacked;
        for (int k = 0; k < entry->stacked; k++) {
            OptimizerTensor tensor = {.begin = entry->offset + k * part,
                                      .end = entry->offset + (k + 1) * part,
                                      .decays = entry->is_matrix || decays_all,
                                      .rows = whole ? entry->rows / entry->stacked : 0,
                                      .columns = whole ? entry->columns : 0};
            optimizer_tensors_add(tensors, &count, tensor);
        }
    }
    return count;
}
