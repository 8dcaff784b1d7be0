// sample.h: text from a model, one token at a time, with the keys and values of all
// earlier positions kept.
//
// A step runs the model's own layers on a batch of one position (the same kernels as in
// training, one row); only attention differs: it reads the cache, and local layers read
// no more of it than their window. Logits of a step equal those of a full forward pass up
// to rounding. The sampler has an arena of its own, so that training reserves nothing for
// it. Sampling ends when all positions of the model are used; the context does not slide,
// because the positions are learned and the cache holds what was computed with them.
//
//   sampler_reserve, arena_commit;   then for each text:  sampler_reset, sampler_generate  or  sampler_step + sampler_choose by hand
#ifndef ACCO_PROGRAM_SAMPLE_H
#define ACCO_PROGRAM_SAMPLE_H

#include "checkpoint/hf_model.h"
#include "gpt_neo.h"
#include "program/setup.h"
#include "tokenizer/text_codec.h"

typedef struct Sampler {
    GptNeo model;  // of one position
    float *keys;   // (L, positions, C)
    float *values; // (L, positions, C)
    float *scores; // (H, positions)
    float *sorted; // (V): workspace of top-k
    int length;    // positions in the cache
} Sampler;

// Plans the memory for a pool of `threads`. `sampler` must stay where it is.
static inline void sampler_reserve(Sampler *sampler, Arena *arena, const GptNeoConfig *config, int threads) {
    size_t positions = (size_t)config->positions * sizeof(float), C = (size_t)config->channels;
    memset(sampler, 0, sizeof *sampler);
    GptNeoSettings settings = gpt_neo_on_cpu(1, 1, threads);
    gpt_neo_reserve(&sampler->model, arena, config, &settings);
    arena_reserve(arena, MEMORY_ACTIVATIONS, "cached keys", (size_t)config->layers * positions * C,
                  &sampler->keys);
    arena_reserve(arena, MEMORY_ACTIVATIONS, "cached values", (size_t)config->layers * positions * C,
                  &sampler->values);
    arena_reserve(arena, MEMORY_WORKSPACE, "decoding scores", (size_t)config->heads * positions,
                  &sampler->scores);
    arena_reserve(arena, MEMORY_WORKSPACE, "top-k", (size_t)config->vocabulary * sizeof(float),
                  &sampler->sorted);
}

// Forgets the text.
static inline void sampler_reset(Sampler *sampler) { sampler->length = 0; }

// Puts the layer's new key and value into the cache and attends to what is there.
static inline void sampler_attend(Sampler *sampler, Stream *stream, int l) {
    GptNeo *model = &sampler->model;
    const GptNeoConfig *config = &model->config;
    GptNeoLayer layer = gpt_neo_layer(model, l);
    size_t C = (size_t)config->channels, cache = (size_t)l * (size_t)config->positions * C,
           place = cache + (size_t)sampler->length * C;
    const float *qkv = real_floats(layer.qkv);
    memcpy(sampler->keys + place, qkv + C, C * sizeof(float));
    memcpy(sampler->values + place, qkv + 2 * C, C * sizeof(float));
    cpu_attention_decode(stream, real_floats(layer.attention), sampler->scores, qkv, sampler->keys + cache,
                         sampler->values + cache, sampler->length, config->positions, config->channels,
                         config->heads, gpt_neo_window(config, l));
}

// Appends `token` to the text. Returns the logits (V) of what follows, valid until the
// next step, or NULL if all positions are used.
static inline const float *sampler_step(Sampler *sampler, Stream *stream, const float *parameters,
                                        int32_t token) {
    GptNeo *model = &sampler->model;
    const GptNeoConfig *config = &model->config;
    int L = config->layers, C = config->channels;
    assert(token >= 0 && token < config->vocabulary);
    if (sampler->length == config->positions) { return NULL; }
    gpt_neo_take_parameters(model, parameters, NULL);
    const Real *wte = gpt_neo_weight(model, model->offsets[GPT_NEO_WTE]);
    const Real *position =
        gpt_neo_weight(model, model->offsets[GPT_NEO_WPE] + (size_t)sampler->length * (size_t)C);
    embedding_forward(stream, model->residuals, wte, position, &token, 1, 1, C);
    for (int l = 0; l < L; l++) {
        gpt_neo_qkv_forward(model, stream, l, l > 0);
        sampler_attend(sampler, stream, l);
        gpt_neo_mlp_forward(model, stream, l);
        gpt_neo_projection_forward(model, stream, l);
    }
    gpt_neo_layernorm(model, stream, 2 * L, true);
    matmul_forward(stream, model->logits, config->vocabulary, gpt_neo_hidden(model), wte, 1, C,
                   config->vocabulary);
    sampler->length++;
    return real_floats(model->logits);
}

// The k-th largest (k from 1) of `count` values, which are reordered. Quickselect around
// the middle element.
static inline float sampler_kth_largest(float *values, int count, int k) {
    int low = 0, high = count - 1;
    while (low < high) {
        float pivot = values[low + (high - low) / 2];
        int i = low, j = high;
        while (i <= j) {
            while (values[i] > pivot) { i++; }
            while (values[j] < pivot) { j--; }
            if (i <= j) {
                float swapped = values[i];
                values[i++] = values[j];
                values[j--] = swapped;
            }
        }
        if (k - 1 <= j) {
            high = j;
        } else if (k - 1 >= i) {
            low = i;
        } else {
            break;
        }
    }
    return values[k - 1];
}

// The first of the largest logits; -1 where one is NaN or none is above -infinity: such a
// model has nothing to say.
static inline int32_t sampler_largest(const float *logits, int count) {
    int32_t best = -1;
    float maximum = -INFINITY;
    for (int v = 0; v < count; v++) {
        if (isnan(logits[v])) { return -1; }
        if (logits[v] > maximum) {
            maximum = logits[v];
            best = v;
        }
    }
    return best;
}

// Chooses the next token from the logits of the latest step. temperature 0: the most
// probable one; else from softmax(logits / temperature), of the top_k largest logits
// (with those equal to the last of them) if top_k > 0. Returns -1 if the logits are not
// numbers.
static inline int32_t sampler_choose(Sampler *sampler, double temperature, int top_k, Random *random) {
    const float *logits = real_floats(sampler->model.logits);
    int V = sampler->model.config.vocabulary;
    int32_t best = sampler_largest(logits, V);
    if (best < 0 || !(temperature > 0.0)) { return best; }
    float least = -INFINITY;
    if (top_k > 0 && top_k < V) {
        memcpy(sampler->sorted, logits, (size_t)V * sizeof(float));
        least = sampler_kth_largest(sampler->sorted, V, top_k);
    }
    double sum = 0.0, maximum = (double)logits[best];
    for (int v = 0; v < V; v++) {
        sum += logits[v] >= least ? exp(((double)logits[v] - maximum) / temperature) : 0.0;
    }
    double left = random_uniform(random) * sum;
    for (int v = 0; v < V; v++) {
        left -= logits[v] >= least ? exp(((double)logits[v] - maximum) / temperature) : 0.0;
        if (left < 0.0 && logits[v] >= least) { return v; }
    }
    return best; // rounding left a crumb
}

// Sees each token as soon as it is chosen. Returns whether there is to be another.
typedef struct SamplerListener {
    void *self;
    bool (*hear)(void *self, int32_t token);
} SamplerListener;

// Appends the prompt (at least one token) to the text and writes up to `count` following
// tokens to output. Returns how many: fewer where the positions are used up or the
// listener has heard enough, 0 where already the prompt does not fit, and it stops at
// logits that are not numbers. listener: or NULL.
static inline int sampler_generate(Sampler *sampler, Stream *stream, const float *parameters,
                                   const int32_t *prompt, int prompt_count, int32_t *output, int count,
                                   double temperature, int top_k, Random *random,
                                   const SamplerListener *listener) {
    assert(prompt_count >= 1);
    for (int i = 0; i < prompt_count; i++) {
        if (sampler_step(sampler, stream, parameters, prompt[i]) == NULL) { return 0; }
    }
    for (int i = 0; i < count; i++) {
        output[i] = sampler_choose(sampler, temperature, top_k, random);
        if (output[i] < 0) { return i; }
        if (listener != NULL && !listener->hear(listener->self, output[i])) { return i + 1; }
        if (i + 1 < count && sampler_step(sampler, stream, parameters, output[i]) == NULL) { return i + 1; }
    }
    return count;
}

// ---------------------------------------------------------------------------------------
// A sample

enum { SAMPLE_STREAM = 20 }; // of the random numbers that hang on --seed

typedef struct Sample {
    const Options *options;
    Sampler sampler;
    TextCodec spelling;
    TokenList prompt;
    const float *parameters; // (parameter_count), on the host
} Sample;

// A text ends where the model says so.
static inline bool sample_hear(void *self, int32_t token) {
    Sample *sample = (Sample *)self;
    if (token == text_codec_end(&sample->spelling)) { return false; }
    text_codec_print(&sample->spelling, token, false, stdout);
    return true;
}

// Prints what follows the prompt, token by token.
static inline void sample_print_text(Sample *sample, Stream *stream) {
    const Options *options = sample->options;
    Random random = {random_hash((uint64_t)options->seed, SAMPLE_STREAM)};
    SamplerListener listener = {sample, sample_hear};
    int32_t *output = (int32_t *)calloc((size_t)options->sample_tokens, sizeof(int32_t));
    sampler_generate(&sample->sampler, stream, sample->parameters, sample->prompt.ids,
                     (int)sample->prompt.count, output, (int)options->sample_tokens, options->temperature,
                     (int)options->top_k, &random, &listener);
    text_codec_print(&sample->spelling, 0, true, stdout);
    printf("\n");
    free(output);
}

// A text by the model, with a cache of keys and values in an arena of its own; on the
// CPU, whatever trained it.
static inline bool sample_run(Sample *sample, const GptNeoConfig *config, ThreadPool *pool, int threads,
                              Error *error) {
    Stream here; // of this thread
    Arena arena;
    memset(&here, 0, sizeof here);
    memset(&arena, 0, sizeof arena);
    here.pool = pool;
    bool good = text_codec_encode(&sample->spelling, sample->options->prompt, &sample->prompt, error);
    if (good) { sampler_reserve(&sample->sampler, &arena, config, threads); }
    good = good && arena_commit(&arena, error);
    if (good) {
        printf("\nsample     temperature %g, top-k %lld%s\n%s", sample->options->temperature,
               (long long)sample->options->top_k,
               sample->spelling.kind == TEXT_CODEC_IDS
                   ? ": token ids, as there is no vocabulary to spell them with"
                   : "",
               sample->options->prompt);
        sample_print_text(sample, &here);
    }
    arena_release(&arena);
    token_list_free(&sample->prompt);
    return good;
}

// Where the tokenizer is: as asked for, or beside the model that training began with.
static inline const char *tokenizer_path(const Options *options, char path[2048]) {
    struct stat status;
    snprintf(path, 2048, "%.1000s", options->tokenizer);
    if (path[0] != '\0' || options_start(options)[0] == '\0') { return path; }
    snprintf(path, 2048, "%.1000s/tokenizer.json", options_start(options));
    if (stat(path, &status) != 0) { path[0] = '\0'; }
    return path;
}

// Before anything is trained: the tokenizer can be read, it is the one that made the
// data, and it spells the prompt. Rank 0.
static inline bool check_tokenizer(const Run *run, Error *error) {
    TextCodec spelling;
    TokenList prompt = {NULL, 0, 0};
    char path[2048];
    if (!run_is_main(run) || tokenizer_path(&run->options, path)[0] == '\0') { return true; }
    if (!text_codec_open(&spelling, path, false, run->config.vocabulary, error)) { return false; }
    const uint8_t *hash = run->data.builtin ? NULL : run->data.files[0].tokenizer_hash;
    bool good = hash == NULL || memcmp(hash, spelling.tokenizer.hash, SHARD_HASH_BYTES) == 0 ||
                error_set(error, "%.400s is not the tokenizer that made %.400s", path, run->options.data);
    good = good && text_codec_encode(&spelling, run->options.prompt, &prompt, error);
    token_list_free(&prompt);
    text_codec_close(&spelling);
    return good;
}

static inline void print_sample(Run *run) {
    Sample *sample = (Sample *)calloc(1, sizeof *sample);
    char path[2048];
    Error error = {""};
    if (run->options.sample_tokens > 0) {
        sample->options = &run->options;
        float *parameters = borrow_host_parameters(run);
        sample->parameters = parameters;
        bool good = text_codec_open(&sample->spelling, tokenizer_path(&run->options, path),
                                    data_is_bytes(run), run->config.vocabulary, &error);
        if (good) {
            good = sample_run(sample, &run->config, run->pool, run->threads.threads, &error);
            text_codec_close(&sample->spelling);
        }
        if (!good) { printf("\nno sample: %s\n", error.text); }
        return_host_parameters(run, parameters);
    }
    free(sample);
}

// A text by a model on disk; a world of one.
static inline int command_sample(Run *run) {
    Error error = {""};
    HfModel model;
    char path[2048];
    if (run->options.from[0] == '\0') {
        error_set(&error,
                  "sample needs --from DIR, a directory with config.json and model.safetensors, such as "
                  "RUN/checkpoints/step-N/model");
        exit_user_mistake(&error);
    }
    Sample *sample = (Sample *)calloc(1, sizeof *sample);
    sample->options = &run->options;
    if (!hf_model_open(&model, run->options.from, &error) ||
        !text_codec_open(&sample->spelling, tokenizer_path(&run->options, path),
                         model.config.vocabulary == 256, model.config.vocabulary, &error)) {
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
    text_codec_close(&sample->spelling);
    thread_pool_destroy(pool);
    free(parameters);
    hf_model_close(&model);
    free(sample);
    return 0;
}

#endif
