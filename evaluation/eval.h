// eval.h: `train_gpt eval`: the perplexity of a text, LAMBADA or HellaSwag for a model on disk.
//
// eval_tasks.h reads the data into sequences; here all ranks score them. A batch does not
// depend on the number of ranks, so neither does a score, to the last bit.
#pragma once

#include "comm/transport.h"
#include "evaluation/eval_tasks.h"
#include "models/decoder.h"
#include "program/data.h" // tokenizer_path

typedef struct Evaluator {
    Model model;
    int32_t *tokens;                        // (B, T); the others, too, filled from the front:
    int32_t *positions, *targets, *largest; // what is predicted, and the most probable tokens there (lambada)
} Evaluator;

typedef struct EvaluateScore {
    double log_likelihood; // natural, of the tokens that count
    int64_t counted;       // tokens that count: those scored, less those that a mask leaves out
    int64_t bytes;         // of their text; -1: unknown
    int64_t greedy;        // lambada: 1 where each of them is the most probable token
} EvaluateScore;

// Reserves a model for the batches of `request`. `evaluator` must not move afterwards.
static inline void evaluator_reserve(Evaluator *evaluator, Arena *arena, const ModelConfig *config,
                                     const ModelSettings *machine, const EvaluateRequest *request) {
    ModelSettings settings = *machine;
    size_t bytes = (size_t)request->B * request->T * sizeof(int32_t);
    settings.B = request->B;
    settings.T = evaluate_inputs(request);
    settings.recompute = RECOMPUTE_BLOCK; // so that all layers share one set of activations
    settings.ranks_tokens = request->task == EVALUATE_LAMBADA;
    model_reserve(&evaluator->model, arena, config, &settings);
    arena_reserve_host(arena, MEMORY_WORKSPACE, "tokens to evaluate", bytes, &evaluator->tokens);
    arena_reserve_host(arena, MEMORY_WORKSPACE, "positions to evaluate", bytes, &evaluator->positions);
    arena_reserve_host(arena, MEMORY_WORKSPACE, "targets to evaluate", bytes, &evaluator->targets);
    arena_reserve_host(arena, MEMORY_WORKSPACE, "most probable tokens", bytes, &evaluator->largest);
}

// scores: of the sequences of a batch, in its order (EVALUATE_MOST_ROWS at most; zeros before).
// parameters: (parameter_count), for the kernels. False: a token beyond the vocabulary.
static inline bool evaluator_score(Evaluator *evaluator, Stream *stream, const float *parameters,
                                   const EvaluateSet *set, size_t batch, EvaluateScore *scores,
                                   Error *error) {
    Model *model = &evaluator->model;
    const Tokenizer *tokenizer = set->request.tokenizer;
    // The parameters never change, so a GPU converts its weights once.
    const Pace pace = {.version = 1};
    int rows = (int)(set->starts[batch + 1] - set->starts[batch]),
        T = evaluate_sequence(set, batch, 0)->length - 1; // the first is the longest
    ModelQuery query = {.B = rows,
                        .T = T,
                        .tokens = evaluator->tokens,
                        .positions = evaluator->positions,
                        .targets = evaluator->targets,
                        .largest = model->settings.ranks_tokens ? evaluator->largest : NULL};
    // Behind a shorter sequence stands token 0; nothing that counts attends to it.
    memset(evaluator->tokens, 0, (size_t)rows * T * sizeof(int32_t));
    for (int row = 0; row < rows; row++) {
        const EvaluateSequence *sequence = evaluate_sequence(set, batch, row);
        const DataFile *file = &set->data.files[sequence->file];
        bool is_text = set->request.task != EVALUATE_PERPLEXITY || file->content.token_bytes == 1;
        for (int t = 0; t < sequence->length; t++) {
            uint64_t place = sequence->begin + t;
            uint32_t token = token_file_token(&file->content, place);
            int vocabulary = model->config.vocabulary;
            if (token >= (uint32_t)vocabulary) { return data_token_error(file, place, vocabulary, error); }
            if (t < T) { evaluator->tokens[row * T + t] = (int32_t)token; }
            if (t < sequence->length - sequence->scored) { continue; }
            bool counts = token_mask_counts(file->content.mask, place);
            size_t bytes = 1; // of the token's text; a special token, such as <|endoftext|>, has none
            if (tokenizer != NULL) { tokenizer_bytes(tokenizer, (int32_t)token, &bytes); }
            if (tokenizer != NULL && tokenizer->is_special[token]) { bytes = 0; }
            evaluator->positions[query.count] = row * T + t - 1;
            evaluator->targets[query.count++] = counts ? (int32_t)token : -1;
            scores[row].counted += counts;
            scores[row].bytes += counts ? (int64_t)bytes : 0;
        }
        if (tokenizer == NULL && !is_text) { scores[row].bytes = -1; }
    }
    const float *losses = model_losses(model, stream, parameters, &query, &pace);
    stream_settle(stream);
    for (int row = 0, i = 0; row < rows; row++) {
        int end = i + evaluate_sequence(set, batch, row)->scored;
        scores[row].greedy = 1;
        for (; i < end; i++) {
            scores[row].log_likelihood -= losses[i];
            if (query.largest != NULL && query.largest[i] != query.targets[i]) { scores[row].greedy = 0; }
        }
    }
    return true;
}

// The scores of all sequences in the order of the data, to be freed. Rank r of N scores
// batches r, r + N, ... stream: of the task this runs in, or the calling thread's. terminal: shows
// the progress; or NULL. An error ends all ranks.
static inline EvaluateScore *evaluate_run(Evaluator *evaluator, Stream *stream, const float *parameters,
                                          const EvaluateSet *set, Transport *transport, Terminal *terminal) {
    size_t ranks = transport->size, record = EVALUATE_MOST_ROWS * sizeof(EvaluateScore);
    EvaluateScore mine[EVALUATE_MOST_ROWS];
    EvaluateScore *scores = MEMORY_OF(EvaluateScore, set->count);
    Progress progress = {"", "tokens", 0, 0, 0, QUIET_SECONDS};
    double began = clock_seconds();
    for (size_t i = 0; i < set->count; i++) { progress.total += set->sequences[i].scored; }
    // Rounds would not match between ranks that do not see the same sequences.
    uint64_t checksum = crc32_z(0, (const Bytef *)set->sequences, set->count * sizeof *set->sequences),
             first_checksum = checksum;
    share_from_rank_zero(transport, "data", &first_checksum, sizeof checksum);
    if (checksum != first_checksum) {
        transport_fail(transport, "%s holds other data than on rank 0: it must be the same for all ranks",
                       set->request.path);
    }
    for (size_t first = 0; first < set->batch_count; first += ranks) {
        Error error = {""};
        size_t batch = first + transport->rank;
        memset(mine, 0, sizeof mine);
        if (batch < set->batch_count &&
            !evaluator_score(evaluator, stream, parameters, set, batch, mine, &error)) {
            transport_fail(transport, "%s", error.text);
        }
        EvaluateScore *all = (EvaluateScore *)transport_collect_records(transport, "scores", mine, record);
        for (size_t rank = 0; rank < ranks && first + rank < set->batch_count; rank++) {
            const EvaluateScore *score = all + rank * EVALUATE_MOST_ROWS;
            for (size_t i = set->starts[first + rank]; i < set->starts[first + rank + 1]; i++) {
                scores[set->order[i] - set->sequences] = *score++;
                progress.done += set->order[i]->scored;
            }
        }
        free(all);
        progress.seconds = clock_seconds() - began;
        if (terminal != NULL) { terminal_bar(terminal, &progress, clock_seconds()); }
    }
    return scores;
}

typedef struct EvaluateSummary {
    uint64_t items;   // windows or lines
    uint64_t counted; // tokens
    double nats;      // per token
    // perplexity: exp of nats; lambada: exp of minus a last word's mean log-likelihood
    double perplexity;
    double bits_per_byte; // NaN: the bytes are unknown
    // lambada: share of lines in which every token of the word is the most probable one;
    // hellaswag: in which the right ending has the largest log-likelihood
    double accuracy;
    double accuracy_norm; // hellaswag: the same for log-likelihoods divided by characters
} EvaluateSummary;

// The choice of a line with the largest log-likelihood (per character); the first of equals.
static inline int evaluate_best(const EvaluateSequence *first, const EvaluateScore *scores,
                                bool by_character) {
    int best = 0;
    double largest = -INFINITY;
    for (int i = 0; i < first->choices; i++) {
        // An ending without characters gets -infinity.
        double value = scores[i].log_likelihood / (by_character ? first[i].characters : 1);
        if (!(value > largest)) { continue; }
        best = i;
        largest = value;
    }
    return best;
}

// Sums up the scores of evaluate_run. False: a score is not a number, or no token counts.
static inline bool evaluate_summarise(const EvaluateSet *set, const EvaluateScore *scores,
                                      EvaluateSummary *summary, Error *error) {
    EvaluateTask task = set->request.task;
    double sum = 0;
    int64_t bytes = 0;
    memset(summary, 0, sizeof *summary);
    for (size_t i = 0; i < set->count; i++) {
        if (!isfinite(scores[i].log_likelihood)) { // such a model must not look like a bad one
            return error_set(error,
                             "the model gives %g as a log-likelihood (sequence %zu of %.300s): its weights "
                             "or outputs are not numbers",
                             scores[i].log_likelihood, i, set->request.path);
        }
        sum -= scores[i].log_likelihood;
        summary->counted += scores[i].counted;
        bytes = bytes < 0 || scores[i].bytes < 0 ? -1 : bytes + scores[i].bytes;
    }
    if (summary->counted == 0) {
        bool cut = set->request.limit > 0 && set->count >= (size_t)set->request.limit;
        return error_set(error, "%.300s: masks leave out all that could be predicted in its %s%zu window%s%s",
                         set->request.path, cut ? "first " : "", set->count, plural(set->count),
                         cut ? ": give a larger --limit" : "");
    }
    bool windows = task == EVALUATE_PERPLEXITY;
    summary->items = windows ? set->count : set->questions;
    summary->nats = sum / summary->counted;
    summary->perplexity = exp(windows ? summary->nats : sum / set->count);
    summary->bits_per_byte = bytes > 0 ? sum / (log(2.0) * bytes) : (double)NAN;
    if (windows) { return true; }
    size_t right = 0, right_norm = 0;
    for (size_t i = 0; i < set->count; i++) {
        const EvaluateSequence *first = &set->sequences[i];
        if (first->choices == 0) { continue; }
        right += task == EVALUATE_LAMBADA ? scores[i].greedy == 1
                                          : evaluate_best(first, &scores[i], false) == first->label;
        right_norm += evaluate_best(first, &scores[i], true) == first->label;
    }
    summary->accuracy = (double)right / set->questions;
    summary->accuracy_norm = (double)right_norm / set->questions;
    return true;
}

static inline void evaluate_print(const char *task, const EvaluateSet *set, const EvaluateSummary *summary) {
    EvaluateTask kind = set->request.task;
    bool windows = kind == EVALUATE_PERPLEXITY, chooses = kind == EVALUATE_HELLASWAG;
    printf("evaluation     %s, %s, contexts of %d\n", task, set->request.path, set->request.T);
    printf("%-14s %llu\n", windows ? "windows" : "lines", (unsigned long long)summary->items);
    printf("tokens         %llu\n", (unsigned long long)summary->counted);
    if (windows) { printf("nats per token %.6f\n", summary->nats); }
    if (!chooses) { printf("perplexity     %.6g\n", summary->perplexity); }
    bool bytes = windows && isfinite(summary->bits_per_byte);
    if (bytes) { printf("bits per byte  %.6f\n", summary->bits_per_byte); }
    if (!windows) { printf("acc            %.6f\n", summary->accuracy); }
    if (chooses) { printf("acc_norm       %.6f\n", summary->accuracy_norm); }
}

typedef struct Evaluation {
    Run *run;
    HfModel model;
    TextCodec codec;
    EvaluateSet set;
    Evaluator evaluator;
    float *parameters;     // (parameter_count), where the kernels want them
    EvaluateScore *scores; // result
} Evaluation;

// Opens the model, the tokenizer and the data. Errors may be this rank's alone.
static inline bool evaluation_open(Evaluation *evaluation, const Options *options, Error *error) {
    HfModel *model = &evaluation->model;
    TextCodec *codec = &evaluation->codec;
    char path[TOKENIZER_PATH_SIZE];
    if (strcmp(options->data, "builtin") == 0) {
        return error_set(error, "eval needs --data FILE: a text, token files, or the lines of --task; the "
                                "built-in corpus is made up while training, and has no end");
    }
    if (!hf_model_open(model, options->from, error)) { return false; }
    int vocabulary = model->config.vocabulary, positions = model->config.positions;
    EvaluateRequest request = {
        .task = (EvaluateTask)options->task,
        .path = options->data,
        .vocabulary = vocabulary,
        .B = options->micro_batch > 0 ? (int)options->micro_batch : 8,
        .T = (int)(options->seq_len > 0 ? options->seq_len : int64_min(positions, 1024)),
        .stride = (int)options->stride,
        .limit = options->limit,
        .divides = options->attend == ATTEND_DOCUMENT,
    };
    if (evaluate_inputs(&request) > positions) {
        return error_set(error, "--seq-len %d is longer than the model's %d positions%s", request.T,
                         positions, request.task == EVALUATE_PERPLEXITY ? " and the token behind them" : "");
    }
    if ((double)request.B * request.T > MOST_TOKENS_OF_A_MICRO_BATCH) {
        return error_set(error, "--micro-batch %d x --seq-len %d: that is more than can be counted here",
                         request.B, request.T);
    }
    if (!text_codec_open(codec, tokenizer_path(options, path), vocabulary == 256, vocabulary, error)) {
        return false;
    }
    request.tokenizer = codec->kind == TEXT_CODEC_TOKENIZER ? &codec->tokenizer : NULL;
    return evaluate_set_open(&evaluation->set, &request, error);
}

// Runs on the stream: reads the parameters to where the kernels want them, and scores.
static inline void evaluation_task(void *context, Stream *stream) {
    Evaluation *evaluation = (Evaluation *)context;
    Model *model = &evaluation->evaluator.model;
    size_t bytes = evaluation->model.table.parameter_count * sizeof(float);
    bool on_gpu = model->settings.on_gpu;
    float *host = on_gpu ? (float *)memory_take(1, bytes) : evaluation->parameters;
    hf_model_read(&evaluation->model, host);
    if (on_gpu) {
        stream_copy(stream, evaluation->parameters, host, bytes);
        stream_settle(stream);
        free(host);
    }
    gemm_open(stream, model->gemm_workspace);
    Run *run = evaluation->run;
    evaluation->scores =
        evaluate_run(&evaluation->evaluator, stream, evaluation->parameters, &evaluation->set,
                     &run->transport, run_is_main(run) ? &run->terminal : NULL);
    gemm_close(stream);
}

// Runs on all ranks, which have met. Returns the exit status.
static inline int command_eval(Run *run) {
    const Options *options = &run->options;
    Transport *transport = &run->transport;
    Placement *placement = &run->placement;
    Error error = {""};
    EvaluateSummary summary;
    Evaluation *evaluation = MEMORY_OF(Evaluation, 1);
    const EvaluateRequest *request = &evaluation->set.request;
    evaluation->run = run;
    launch_threads(transport->local_size, (int)options->threads, &run->threads);
    bool good = placement_choose_device(placement, options, transport->local_rank, false, &error) &&
                placement_choose_precision(placement, options, &error) &&
                evaluation_open(evaluation, options, &error) &&
                placement_check_shapes(placement, &evaluation->model.config, request->B, request->T, &error);
    agree_or_exit(run, good, EXIT_USER_MISTAKE, &error);
    transport->timeout_seconds = options->timeout_s;

    ModelSettings machine = {
        .threads = run->threads.threads, .on_gpu = placement->on_gpu, .precision = placement->precision};
    if (request->divides) { machine.separator = &evaluation->set.data.separator; }
    size_t bytes = evaluation->model.table.parameter_count * sizeof(float);
    run->arena.on_gpu = placement->on_gpu;
    evaluator_reserve(&evaluation->evaluator, &run->arena, &evaluation->model.config, &machine, request);
    arena_reserve(&run->arena, MEMORY_PARAMETERS, "parameters", bytes, &evaluation->parameters);
    agree_or_exit(run, arena_commit(&run->arena, &error), EXIT_SYSTEM_FAILURE, &error);
    StreamPlace place = {.gpu = placement_gpu(placement), .precision = placement->precision};
    ThreadPool *pool = thread_pool_create(run->threads.threads, true);
    Stream *stream = stream_create("evaluation", pool, &place);
    Event ended = {NULL, 0};
    terminal_open(&run->terminal, stdout);
    stream_run(stream, evaluation_task, evaluation);
    event_record(&ended, stream);
    while (!event_wait(&ended, 3600)) {}
    terminal_clear(&run->terminal);
    good = evaluate_summarise(&evaluation->set, evaluation->scores, &summary, &error);
    agree_or_exit(run, good, EXIT_USER_MISTAKE, &error);
    if (run_is_main(run)) {
        evaluate_print(options_choice_name(options, &options->task), &evaluation->set, &summary);
    }

    stream_destroy(stream);
    thread_pool_destroy(pool);
    arena_release(&run->arena);
    free(evaluation->scores);
    evaluate_set_close(&evaluation->set);
    text_codec_close(&evaluation->codec);
    hf_model_close(&evaluation->model);
    free(evaluation);
    transport_close(transport);
    return 0;
}
