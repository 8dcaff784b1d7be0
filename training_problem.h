// training_problem.h: what the scheduler trains: a GPT-Neo on the run's data. Model, data
// and scheduler meet here and nowhere else.
#ifndef ACCO_TRAINING_PROBLEM_H
#define ACCO_TRAINING_PROBLEM_H

#include "program/agreement.h"

// The first sample, in the global order, of micro-batch `index` of this rank, which is
// number data_base + index * ranks + rank of all ranks. data_base: the first micro-batch
// that was not yet used when the run was resumed.
static inline uint64_t micro_batch_first_sample(const Run *run, uint64_t index) {
    const Transport *transport = &run->transport;
    return ((uint64_t)run->checkpointed.data_base + index * (uint64_t)transport->size +
            (uint64_t)transport->rank) *
           (uint64_t)run->B;
}

static inline bool batch_fill(const Run *run, Batch *batch, uint64_t first_sample, Error *error) {
    batch->first_sample = first_sample;
    batch->is_filled = data_loader_fill(&run->data, first_sample, run->B, batch->tokens, batch->targets,
                                        &batch->perfect_loss, error);
    return batch->is_filled;
}

// run->batch <- the samples from first_sample on, which may be filled already.
static inline void batch_take(Run *run, uint64_t first_sample) {
    Error error = {""};
    Batch next = run->next_batch;
    if (next.is_filled && next.first_sample == first_sample) {
        run->next_batch = run->batch;
        run->next_batch.is_filled = false;
        run->batch = next;
    } else if (!batch_fill(run, &run->batch, first_sample, &error)) {
        transport_fail(&run->transport, "%s", error.text);
    }
}

// What the scheduler calls for a micro-batch. While a GPU computes, the host fills the next
// one: data that are not in memory yet may take longer to come than a launch takes. What
// is wrong with them is said when they are needed, if they ever are.
static inline MicroBatchResult train_micro_batch(void *self, Stream *stream, uint64_t index,
                                                 const void *weights, float *gradients, const Pace *pace) {
    Run *run = (Run *)self;
    MicroBatchResult result;
    Error unused = {""};
    batch_take(run, micro_batch_first_sample(run, index));
    const Batch *batch = &run->batch;
    int counting =
        gpt_neo_gradients(&run->model, stream, weights, gradients, batch->tokens, batch->targets, pace);
    if (run->placement.on_gpu) {
        batch_fill(run, &run->next_batch, micro_batch_first_sample(run, index + 1), &unused);
    }
    result.loss = gpt_neo_mean_loss(&run->model, stream, counting);
    result.perfect_loss = batch->perfect_loss;
    result.predicted = gpt_neo_predicted(&run->model, batch->targets);
    if (run->options.slow_rank == run->transport.rank) { sleep_seconds(run->options.slow_ms / 1e3); }
    return result;
}

static inline Problem training_problem(Run *run) {
    Problem problem = {.self = run,
                       .parameter_count = run->table.parameter_count,
                       .micro_batch = train_micro_batch,
                       .layer_begins = run->layer_begins,
                       .layer_count = run->config.layers};
    return problem;
}

#endif
