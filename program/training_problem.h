// training_problem.h: what the scheduler trains: a GPT-Neo on the run's data. Model, data
// and scheduler meet here and nowhere else.
#ifndef ACCO_PROGRAM_TRAINING_PROBLEM_H
#define ACCO_PROGRAM_TRAINING_PROBLEM_H

#include "program/agreement.h"

// What the scheduler calls for a micro-batch. Number `index` of this rank is number
// data_base + index * ranks + rank of all ranks, and that number times B is its first
// sample in the global order. data_base: the first micro-batch that was not yet used when
// the run was resumed.
static inline MicroBatchResult train_micro_batch(void *self, Stream *stream, uint64_t index,
                                                 const void *weights, float *gradients, const Pace *pace) {
    Run *run = (Run *)self;
    const Transport *transport = &run->transport;
    uint64_t first = ((uint64_t)run->checkpointed.data_base + index * (uint64_t)transport->size +
                      (uint64_t)transport->rank) *
                     (uint64_t)run->B;
    MicroBatchResult result;
    Error error = {""};
    if (!data_loader_fill(&run->data, first, run->B, run->tokens, run->targets, &result.perfect_loss,
                          &error)) {
        transport_fail(&run->transport, "%s", error.text);
    }
    result.loss =
        gpt_neo_loss_and_gradients(&run->model, stream, weights, gradients, run->tokens, run->targets, pace);
    result.predicted = gpt_neo_predicted(&run->model, run->targets);
    if (run->options.slow_rank == transport->rank) { sleep_seconds(run->options.slow_ms / 1e3); }
    return result;
}

static inline Problem training_problem(Run *run) {
    Problem problem = {run, run->table.parameter_count, train_micro_batch, run->layer_begins,
                       run->config.layers};
    return problem;
}

#endif
