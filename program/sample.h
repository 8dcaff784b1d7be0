// sample.h: text by a model, printed: `train_gpt sample` for a model on disk, and the
// sample that training prints at its end. Both run on the CPU, whatever device trained
// the model.
#ifndef ACCO_PROGRAM_SAMPLE_H
#define ACCO_PROGRAM_SAMPLE_H

#include "checkpoint/hf_model.h"
#include "program/data.h"
#include "program/sampler.h"
#include "program/setup.h"

enum { SAMPLE_RANDOM_STREAM = 20 }; // of those that are derived from --seed

typedef struct Sample {
    const Options *options;
    Sampler sampler;
    TextCodec codec;
    const float *parameters; // (parameter_count), on the host
} Sample;

static inline bool sample_on_token(void *self, int32_t token) {
    Sample *sample = (Sample *)self;
    if (token == text_codec_end(&sample->codec)) { return false; }
    text_codec_print(&sample->codec, token, false, stdout);
    return true;
}

// Prints the prompt and what the model writes after it, token by token. `sample` has
// options, codec and parameters; the sampler gets an arena that ends with this call.
static inline bool sample_run(Sample *sample, const GptNeoConfig *config, ThreadPool *pool, int threads,
                              Error *error) {
    const Options *options = sample->options;
    Stream here; // runs everything on this thread
    Arena arena;
    TokenList prompt = {NULL, 0, 0};
    memset(&here, 0, sizeof here);
    memset(&arena, 0, sizeof arena);
    here.pool = pool;
    bool good = text_codec_encode(&sample->codec, options->prompt, &prompt, error);
    if (good && prompt.count > (size_t)config->positions) {
        good = error_set(error, "the prompt has %zu tokens, and the model %d positions: shorten --prompt",
                         (size_t)prompt.count, config->positions);
    }
    if (good) { sampler_reserve(&sample->sampler, &arena, config, threads); }
    good = good && arena_commit(&arena, error);
    if (good) {
        Random random = {random_hash((uint64_t)options->seed, SAMPLE_RANDOM_STREAM)};
        SamplerListener listener = {sample, sample_on_token};
        int count = (int)options->sample_tokens;
        int32_t *output = (int32_t *)calloc((size_t)count, sizeof *output);
        printf("\nsample     temperature %g, top-k %lld%s\n%s", options->temperature,
               (long long)options->top_k,
               sample->codec.kind == TEXT_CODEC_IDS ? ": token ids, for there is no tokenizer" : "",
               options->prompt);
        int written =
            sampler_generate(&sample->sampler, &here, sample->parameters, prompt.ids, (int)prompt.count,
                             output, count, options->temperature, (int)options->top_k, &random, &listener);
        text_codec_print(&sample->codec, 0, true, stdout);
        printf("\n");
        // The last token of a text that fills all positions stands behind them.
        if (written < count && (int)prompt.count + written > config->positions) {
            printf("\n(ends after %d of %d tokens: the model has %d positions, the prompt included)\n",
                   written, count, config->positions);
        }
        free(output);
    }
    arena_release(&arena);
    token_list_free(&prompt);
    return good;
}

// ---------------------------------------------------------------------------------------
// The sample after training

// Prints --sample-tokens tokens of the trained model; what goes wrong is printed too, and
// does not end the run.
static inline void print_sample(Run *run) {
    char path[TOKENIZER_PATH_SIZE];
    Error error = {""};
    if (run->options.sample_tokens == 0) { return; }
    Sample *sample = (Sample *)calloc(1, sizeof *sample);
    float *parameters = borrow_host_parameters(run);
    sample->options = &run->options;
    sample->parameters = parameters;
    bool good = text_codec_open(&sample->codec, tokenizer_path(&run->options, path), data_is_bytes(run),
                                run->config.vocabulary, &error);
    if (good) {
        good = sample_run(sample, &run->config, run->pool, run->threads.threads, &error);
        text_codec_close(&sample->codec);
    }
    if (!good) { printf("\nno sample: %s\n", error.text); }
    return_host_parameters(run, parameters);
    free(sample);
}

// ---------------------------------------------------------------------------------------
// train_gpt sample

// One process, without MPI. Returns the exit status.
static inline int command_sample(Run *run) {
    Error error = {""};
    HfModel model;
    char path[TOKENIZER_PATH_SIZE];
    if (run->options.from[0] == '\0') {
        error_set(&error, "sample needs --from DIR, a directory with config.json and model.safetensors, such "
                          "as RUN/checkpoints/step-N/model");
        exit_user_mistake(&error);
    }
    Sample *sample = (Sample *)calloc(1, sizeof *sample);
    sample->options = &run->options;
    if (!hf_model_check_directory(run->options.from, &error) ||
        !hf_model_open(&model, run->options.from, &error) ||
        !text_codec_open(&sample->codec, tokenizer_path(&run->options, path), model.config.vocabulary == 256,
                         model.config.vocabulary, &error)) {
        exit_user_mistake(&error);
    }
    float *parameters = (float *)malloc(model.table.parameter_count * sizeof(float));
    launch_threads(1, (int)run->options.threads, &run->threads);
    ThreadPool *pool = thread_pool_create(run->threads.threads, true);
    bool good =
        (parameters != NULL && pool != NULL) || error_set(&error, "no memory or threads for the model");
    if (good) {
        hf_model_read(&model, parameters);
        sample->parameters = parameters;
        good = sample_run(sample, &model.config, pool, run->threads.threads, &error);
    }
    if (!good) { exit_user_mistake(&error); }
    text_codec_close(&sample->codec);
    thread_pool_destroy(pool);
    free(parameters);
    hf_model_close(&model);
    free(sample);
    return 0;
}

#endif
