// eval_score.h: log-likelihoods of the sequences of an EvaluateSet, by a model and all
// ranks.
//
// Rank r of N scores batches r, r + N, ... After each round all ranks exchange their
// scores, which are kept in the order of the data. A batch does not depend on the number
// of ranks, so neither does a score, to the last bit.
//
// A batch is one forward pass. Only some positions predict something that counts, so
// their hidden states are gathered first, and the projection to logits, the most
// expensive part, is done for these alone.
//
//   evaluator_reserve, arena_commit; then evaluate_run on all ranks
#ifndef ACCO_EVALUATION_EVAL_SCORE_H
#define ACCO_EVALUATION_EVAL_SCORE_H

#include "comm/transport.h"
#include "evaluation/eval_tasks.h"
#include "evaluation/sampler.h" // sampler_largest
#include "gpt_neo.h"

typedef struct Evaluator {
    GptNeo model;
    int32_t *tokens, *targets; // (B, T)
    Real *logits;              // (chunk, logits_stride), on the host; only with a GPU
    float *row;                // (V), one row of them as float; only in bf16
} Evaluator;

// What the model says about one sequence.
typedef struct EvaluateScore {
    double log_likelihood; // natural, of the tokens that count
    int64_t counted;       // tokens that count: those scored, less those that a mask leaves out
    int64_t bytes;         // of their text; -1: unknown
    int64_t greedy;        // lambada: 1 where each of them is the most probable token
} EvaluateScore;

// Called on every rank after every round.
typedef struct EvaluateProgress {
    void (*tell)(void *context, int64_t done, int64_t total); // tokens; or NULL
    void *context;
} EvaluateProgress;

// Reserves a model for batches of B x T positions, with no more activations than a
// forward pass needs. `evaluator` must not move afterwards.
static inline void evaluator_reserve(Evaluator *evaluator, Arena *arena, const GptNeoConfig *config,
                                     const GptNeoSettings *asked) {
    memset(evaluator, 0, sizeof *evaluator);
    GptNeoSettings settings = *asked;
    GptNeo *model = &evaluator->model;
    settings.recompute = RECOMPUTE_BLOCK; // so that all layers share one set of activations
    gpt_neo_reserve(model, arena, config, &settings);
    size_t bytes = (size_t)settings.B * (size_t)settings.T * sizeof(int32_t);
    size_t logits = (size_t)model->chunk * (size_t)model->logits_stride * precision_bytes(settings.precision);
    arena_reserve_host(arena, MEMORY_WORKSPACE, "tokens to evaluate", bytes, &evaluator->tokens);
    arena_reserve_host(arena, MEMORY_WORKSPACE, "targets to evaluate", bytes, &evaluator->targets);
    if (settings.on_gpu) {
        arena_reserve_host(arena, MEMORY_WORKSPACE, "logits on the host", logits, &evaluator->logits);
    }
    if (settings.precision == PRECISION_BF16) {
        arena_reserve_host(arena, MEMORY_WORKSPACE, "a row of logits",
                           (size_t)config->vocabulary * sizeof(float), &evaluator->row);
    }
}

// ---------------------------------------------------------------------------------------
// Filling a batch

// Bytes of a token's text; -1: unknown.
static inline int64_t evaluate_token_bytes(const EvaluateSet *set, const DataFile *file, int32_t token) {
    size_t bytes = 1;
    if (set->request.tokenizer != NULL) {
        tokenizer_bytes(set->request.tokenizer, token, &bytes);
    } else if (set->request.task == EVALUATE_PERPLEXITY && file->token_bytes != 1) {
        return -1;
    }
    return (int64_t)bytes;
}

// Writes the inputs of a sequence to tokens (length - 1), and the scored tokens to
// targets (scored), -1 where one does not count.
static inline bool evaluator_fill_row(const Evaluator *evaluator, const EvaluateSet *set,
                                      const EvaluateSequence *sequence, int32_t *tokens, int32_t *targets,
                                      EvaluateScore *score, Error *error) {
    const DataFile *file = &set->data.files[sequence->file];
    int vocabulary = evaluator->model.config.vocabulary, context = sequence->length - sequence->scored;
    for (int t = 0; t < sequence->length; t++) {
        uint64_t position = sequence->begin + (uint64_t)t;
        uint32_t token = data_token(file, position);
        if (token >= (uint32_t)vocabulary) { return data_token_error(file, position, vocabulary, error); }
        if (t < sequence->length - 1) { tokens[t] = (int32_t)token; }
        if (t < context) { continue; }
        bool counts = token_mask_counts(file->mask, position);
        int64_t bytes = evaluate_token_bytes(set, file, (int32_t)token);
        targets[t - context] = counts ? (int32_t)token : -1;
        score->counted += counts;
        score->bytes = bytes < 0 ? -1 : score->bytes + (counts ? bytes : 0);
    }
    return true;
}

// Gives the model the shape of a batch, at most (B, T) positions, and fills tokens (rows,
// length) and targets: the scored ones of all rows, without gaps. Starts the scores
// (rows). Returns the number of targets; -1: an error.
static inline int evaluator_fill(Evaluator *evaluator, const EvaluateSet *set, size_t batch,
                                 EvaluateScore *scores, Error *error) {
    GptNeo *model = &evaluator->model;
    const GptNeoSettings *settings = &model->settings;
    size_t rows = set->starts[batch + 1] - set->starts[batch],
           length = (size_t)evaluate_sequence(set, batch, 0)->length - 1; // of its longest sequence
    int scored = 0;
    assert(length <= (size_t)settings->T && rows * length <= (size_t)settings->B * (size_t)settings->T);
    model->B = (int)rows;
    model->T = (int)length;
    // Behind a shorter sequence stands token 0; nothing that counts attends to it.
    memset(evaluator->tokens, 0, rows * length * sizeof(int32_t));
    memset(scores, 0, rows * sizeof *scores);
    for (size_t row = 0; row < rows; row++) {
        const EvaluateSequence *sequence = evaluate_sequence(set, batch, row);
        if (!evaluator_fill_row(evaluator, set, sequence, evaluator->tokens + row * length,
                                evaluator->targets + scored, &scores[row], error)) {
            return -1;
        }
        scored += sequence->scored;
    }
    return scored;
}

// ---------------------------------------------------------------------------------------
// Scoring a batch

// Moves the hidden states that predict a target to the front of model->branch, in the
// order of the targets.
static inline void evaluator_gather(Evaluator *evaluator, Stream *stream, const EvaluateSet *set,
                                    size_t batch) {
    GptNeo *model = &evaluator->model;
    size_t C = (size_t)model->config.channels, bytes = C * precision_bytes(model->settings.precision),
           done = 0;
    for (size_t row = 0; row < (size_t)model->B; row++) {
        const EvaluateSequence *sequence = evaluate_sequence(set, batch, row);
        size_t scored = (size_t)sequence->scored,
               first = row * (size_t)model->T + (size_t)sequence->length - 1 - scored;
        stream_copy(stream, real_at(model->branch, done * C, model->settings.precision),
                    real_at(gpt_neo_hidden(model), first * C, model->settings.precision), scored * bytes);
        done += scored;
    }
}

// largest (count): the most probable token of each row of model->logits; -1 where there
// is none.
static inline void evaluator_find_largest(Evaluator *evaluator, Stream *stream, int count, int32_t *largest) {
    GptNeo *model = &evaluator->model;
    size_t V = (size_t)model->config.vocabulary, stride = (size_t)model->logits_stride,
           bytes = precision_bytes(model->settings.precision);
    const Real *logits = model->logits;
    if (stream->queue != NULL) {
        stream_copy(stream, evaluator->logits, logits, (size_t)count * stride * bytes);
        stream_settle(stream);
        logits = evaluator->logits;
    }
    for (int i = 0; i < count; i++) {
        const Real *row = real_at_const(logits, (size_t)i * stride, model->settings.precision);
        const float *values = (const float *)(const void *)row;
        if (model->settings.precision == PRECISION_BF16) {
            for (size_t v = 0; v < V; v++) {
                evaluator->row[v] = bf16_to_float(((const uint16_t *)(const void *)row)[v]);
            }
            values = evaluator->row;
        }
        largest[i] = sampler_largest(values, (int)V);
    }
}

static inline void evaluator_pace_nothing(void *self, size_t at) { (void)self, (void)at; }

// Scores of the sequences of a batch, in its order (EVALUATE_MOST_ROWS at most).
// parameters: (parameter_count), where the kernels want them. False: a token beyond the
// vocabulary.
static inline bool evaluator_score(Evaluator *evaluator, Stream *stream, const float *parameters,
                                   const EvaluateSet *set, size_t batch, EvaluateScore *scores,
                                   Error *error) {
    GptNeo *model = &evaluator->model;
    int C = model->config.channels, V = model->config.vocabulary, stride = model->logits_stride,
        columns = model->logits_columns;
    // Version 1 in every batch: the parameters do not change, so a GPU converts its
    // weights once.
    const Pace pace = {NULL, 1, evaluator_pace_nothing, evaluator_pace_nothing};
    int scored = evaluator_fill(evaluator, set, batch, scores, error), done = 0;
    if (scored < 0) { return false; }
    gpt_neo_forward(model, stream, parameters, evaluator->tokens, &pace);
    evaluator_gather(evaluator, stream, set, batch);
    const int32_t *targets = gpt_neo_upload(model, stream, model->targets, evaluator->targets);
    const Real *wte = gpt_neo_weight(model, model->offsets[GPT_NEO_WTE]);
    // The inputs are used up, and there are at least as many of them as targets.
    int32_t *largest = set->request.task == EVALUATE_LAMBADA ? evaluator->tokens : NULL;
    for (int first = 0; first < scored; first += model->chunk) {
        int count = scored - first < model->chunk ? scored - first : model->chunk;
        const Real *hidden =
            real_at_const(model->branch, (size_t)first * (size_t)C, model->settings.precision);
        matmul_forward(stream, model->logits, stride, hidden, wte, count, C, columns);
        if (largest != NULL) { evaluator_find_largest(evaluator, stream, count, largest + first); }
        cross_entropy(stream, model->logits, stride, model->losses + first, targets + first, count, V, 0.0f);
    }
    stream_settle(stream);
    for (int row = 0; row < model->B; row++) {
        int end = done + evaluate_sequence(set, batch, (size_t)row)->scored;
        scores[row].greedy = 1;
        for (; done < end; done++) {
            scores[row].log_likelihood -= (double)model->losses[done];
            if (largest != NULL && largest[done] != evaluator->targets[done]) { scores[row].greedy = 0; }
        }
    }
    return true;
}

// ---------------------------------------------------------------------------------------
// All batches, by all ranks

// Fails the job where ranks do not see the same sequences: their rounds would not match.
static inline void evaluate_check_ranks(const EvaluateSet *set, Transport *transport) {
    uint64_t mine = random_hash((uint64_t)set->request.task, (uint64_t)set->request.B);
    for (size_t i = 0; i < set->count; i++) {
        const EvaluateSequence *sequence = set->order[i];
        mine = random_hash(mine, sequence->begin);
        mine = random_hash(mine, (uint64_t)sequence->length << 32 | (uint32_t)sequence->scored);
    }
    uint64_t *all = (uint64_t *)transport_collect_records(transport, "data", &mine, sizeof mine);
    for (int rank = 0; rank < transport->size; rank++) {
        if (all[rank] == mine) { continue; }
        transport_fail(transport, "rank %d sees other data in %s: the file must be the same for all ranks",
                       rank, set->request.path);
    }
    free(all);
}

// The scores of all sequences, in the order of the data, for the caller to free; on every
// rank the same. `stream` is that of the task this runs in, or on the CPU the calling
// thread's. Any error fails the job.
static inline EvaluateScore *evaluate_run(Evaluator *evaluator, Stream *stream, const float *parameters,
                                          const EvaluateSet *set, Transport *transport,
                                          const EvaluateProgress *progress) {
    size_t ranks = (size_t)transport->size, record = EVALUATE_MOST_ROWS * sizeof(EvaluateScore);
    EvaluateScore mine[EVALUATE_MOST_ROWS];
    EvaluateScore *scores = (EvaluateScore *)calloc(set->count, sizeof *scores);
    if (scores == NULL) {
        transport_fail(transport, "no memory for the scores of %zu sequences", set->count);
    }
    int64_t done = 0, total = 0;
    for (size_t i = 0; i < set->count; i++) { total += set->sequences[i].scored; }
    evaluate_check_ranks(set, transport);
    for (size_t first = 0; first < set->batch_count; first += ranks) {
        Error error = {""};
        size_t batch = first + (size_t)transport->rank;
        memset(mine, 0, sizeof mine);
        if (batch < set->batch_count &&
            !evaluator_score(evaluator, stream, parameters, set, batch, mine, &error)) {
            transport_fail(transport, "%s", error.text);
        }
        EvaluateScore *all = (EvaluateScore *)transport_collect_records(transport, "scores", mine, record);
        for (size_t rank = 0; rank < ranks && first + rank < set->batch_count; rank++) {
            for (size_t i = set->starts[first + rank]; i < set->starts[first + rank + 1]; i++) {
                scores[set->order[i] - set->sequences] =
                    all[rank * EVALUATE_MOST_ROWS + i - set->starts[first + rank]];
                done += set->order[i]->scored;
            }
        }
        free(all);
        if (progress != NULL && progress->tell != NULL) { progress->tell(progress->context, done, total); }
    }
    return scores;
}

#endif
