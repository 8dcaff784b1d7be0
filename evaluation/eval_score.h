// eval_score.h: log-likelihoods of the sequences of an EvaluateSet, by a model and all
// ranks.
//
// Rank r of N scores batches r, r + N, ... After each round all ranks exchange their
// scores, which are kept in the order of the data. A batch does not depend on the number
// of ranks, so neither does a score, to the last bit.
//
//   evaluator_reserve, arena_commit; then evaluate_run on all ranks
#ifndef ACCO_EVALUATION_EVAL_SCORE_H
#define ACCO_EVALUATION_EVAL_SCORE_H

#include "comm/transport.h"
#include "evaluation/eval_tasks.h"
#include "models.h"

typedef struct Evaluator {
    Model model;
    int32_t *tokens; // (B, T)
    // (B, T), filled from the front: the positions that predict
    // something, their targets, and the most probable tokens there (lambada)
    int32_t *positions, *targets, *largest;
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

// Reserves a model for the batches of `request`, with no more
// activations than a forward pass needs. `evaluator` must not move afterwards.
static inline void evaluator_reserve(Evaluator *evaluator, Arena *arena, const ModelConfig *config,
                                     const ModelSettings *machine, const EvaluateRequest *request) {
    ModelSettings settings = *machine;
    size_t bytes = (size_t)request->B * (size_t)request->T * sizeof(int32_t);
    settings.B = request->B;
    settings.T = request->T;
    settings.recompute = RECOMPUTE_BLOCK; // so that all layers share one set of activations
    settings.ranks_tokens = request->task == EVALUATE_LAMBADA;
    model_reserve(&evaluator->model, arena, config, &settings);
    arena_reserve_host(arena, MEMORY_WORKSPACE, "tokens to evaluate", bytes, &evaluator->tokens);
    arena_reserve_host(arena, MEMORY_WORKSPACE, "positions to evaluate", bytes, &evaluator->positions);
    arena_reserve_host(arena, MEMORY_WORKSPACE, "targets to evaluate", bytes, &evaluator->targets);
    arena_reserve_host(arena, MEMORY_WORKSPACE, "most probable tokens", bytes, &evaluator->largest);
}

// ---------------------------------------------------------------------------------------
// Filling a batch

// Fills tokens (rows, length) with the inputs of a batch, and positions and targets with
// what is scored, -1 where a target does not count. Starts the scores (rows).
static inline bool evaluator_fill(Evaluator *evaluator, const EvaluateSet *set, size_t batch,
                                  ModelQuery *query, EvaluateScore *scores, Error *error) {
    const Tokenizer *tokenizer = set->request.tokenizer;
    int vocabulary = evaluator->model.config.vocabulary, rows = query->B, T = query->T;
    // Behind a shorter sequence stands token 0; nothing that counts attends to it.
    memset(evaluator->tokens, 0, (size_t)rows * (size_t)T * sizeof(int32_t));
    memset(scores, 0, (size_t)rows * sizeof *scores);
    for (int row = 0; row < rows; row++) {
        const EvaluateSequence *sequence = evaluate_sequence(set, batch, (size_t)row);
        const DataFile *file = &set->data.files[sequence->file];
        bool is_text = set->request.task != EVALUATE_PERPLEXITY || file->content.token_bytes == 1;
        int context = sequence->length - sequence->scored;
        for (int t = 0; t < sequence->length; t++) {
            uint64_t place = sequence->begin + (uint64_t)t;
            uint32_t token = data_token(file, place);
            if (token >= (uint32_t)vocabulary) { return data_token_error(file, place, vocabulary, error); }
            if (t < sequence->length - 1) { evaluator->tokens[row * T + t] = (int32_t)token; }
            if (t < context) { continue; }
            bool counts = token_mask_counts(file->content.mask, place);
            size_t bytes = 1; // of the token's text
            if (tokenizer != NULL) { tokenizer_bytes(tokenizer, (int32_t)token, &bytes); }
            evaluator->positions[query->count] = row * T + t - 1;
            evaluator->targets[query->count++] = counts ? (int32_t)token : -1;
            scores[row].counted += counts;
            scores[row].bytes += counts ? (int64_t)bytes : 0;
        }
        if (tokenizer == NULL && !is_text) { scores[row].bytes = -1; }
    }
    return true;
}

static inline void evaluator_pace_nothing(void *self, size_t at) { (void)self, (void)at; }

// Scores of the sequences of a batch, in its order (EVALUATE_MOST_ROWS at most).
// parameters: (parameter_count), where the kernels want them. False: a token beyond the
// vocabulary.
static inline bool evaluator_score(Evaluator *evaluator, Stream *stream, const float *parameters,
                                   const EvaluateSet *set, size_t batch, EvaluateScore *scores,
                                   Error *error) {
    Model *model = &evaluator->model;
    // Version 1 in every batch: the parameters do not change, so a GPU converts its
    // weights once.
    const Pace pace = {NULL, 1, evaluator_pace_nothing, evaluator_pace_nothing};
    ModelQuery query = {.B = (int)(set->starts[batch + 1] - set->starts[batch]),
                        .T = evaluate_sequence(set, batch, 0)->length - 1, // the first is the longest
                        .tokens = evaluator->tokens,
                        .positions = evaluator->positions,
                        .targets = evaluator->targets,
                        .largest = model->settings.ranks_tokens ? evaluator->largest : NULL};
    if (!evaluator_fill(evaluator, set, batch, &query, scores, error)) { return false; }
    const float *losses = model->family->losses(&model->state, stream, parameters, &query, &pace);
    stream_settle(stream);
    for (int row = 0, i = 0; row < query.B; row++) {
        int end = i + evaluate_sequence(set, batch, (size_t)row)->scored;
        scores[row].greedy = 1;
        for (; i < end; i++) {
            scores[row].log_likelihood -= (double)losses[i];
            if (query.largest != NULL && query.largest[i] != query.targets[i]) { scores[row].greedy = 0; }
        }
    }
    return true;
}

// ---------------------------------------------------------------------------------------
// All batches, by all ranks

// The scores of all sequences, in the order of the data, for the caller to free; on every
// rank the same. `stream` is that of the task this runs in, or on the CPU the calling
// thread's. An error ends all ranks.
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
    // Rounds would not match between ranks that do not see the same sequences.
    uint64_t fingerprint = random_hash((uint64_t)set->request.task, (uint64_t)set->request.B);
    for (size_t i = 0; i < set->count; i++) {
        const EvaluateSequence *sequence = set->order[i];
        fingerprint = random_hash(fingerprint, sequence->begin);
        fingerprint = random_hash(fingerprint, (uint64_t)sequence->length << 32 | (uint32_t)sequence->scored);
    }
    uint64_t *fingerprints =
        (uint64_t *)transport_collect_records(transport, "data", &fingerprint, sizeof fingerprint);
    for (int rank = 0; rank < transport->size; rank++) {
        if (fingerprints[rank] == fingerprint) { continue; }
        transport_fail(transport, "rank %d sees other data in %s: the file must be the same for all ranks",
                       rank, set->request.path);
    }
    free(fingerprints);
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
