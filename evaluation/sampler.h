// sampler.h: writes text with a model, one token at a time, on the CPU.
//
// The keys and values of all earlier positions are cached, so a step runs the model's
// layers on a batch of one position, with the kernels that training uses. Only attention
// is another kernel: it reads the cache, and in local layers only the window. The logits
// of a step equal those of a full forward pass up to rounding. When all positions of the
// model are used, the text ends: the context cannot slide, because position embeddings
// are learned and the cached keys and values were computed with them.
//
// A sampler has an arena of its own, so training reserves nothing for it. Order of calls:
//
//   sampler_reserve, arena_commit
//   either sampler_generate, or sampler_step and sampler_choose in turn
//   sampler_reset and the same again for another text
#ifndef ACCO_EVALUATION_SAMPLER_H
#define ACCO_EVALUATION_SAMPLER_H

#include "gpt_neo.h"

typedef struct Sampler {
    GptNeo model;  // for a batch of one position
    float *keys;   // (L, positions, C)
    float *values; // (L, positions, C)
    float *scores; // (H, positions)
    float *sorted; // (V), workspace of top-k
    int length;    // of the text so far: positions in the cache
} Sampler;

// Reserves memory for a stream with a pool of `threads`. The arena keeps pointers into
// *sampler, which must not move before arena_commit.
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

// Begins a new text.
static inline void sampler_reset(Sampler *sampler) { sampler->length = 0; }

// Attention of layer `l` for the new position: puts its key and value into the cache and
// attends to what is there.
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

// Appends `token` to the text. Returns the logits (V) of the token that follows, valid
// until the next step, or NULL where all positions are used. parameters:
// (parameter_count), on the host.
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

// The k-th largest of `count` values, k from 1. Reorders them: quickselect with the
// middle element as pivot.
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

// The first of the largest logits; -1 where one of them is NaN or all are -infinity.
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

// Chooses the next token from the logits of the latest step: the most probable one where
// the temperature is 0, otherwise one drawn from softmax(logits / temperature). With
// top_k > 0 only the top_k largest logits, and those equal to the last of them, can be
// drawn. Returns -1 where the logits are not numbers.
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
    return best; // the sum was rounded, and the draw lay beyond all of it
}

// on_token is called with each token as soon as it is chosen, and returns whether to go
// on.
typedef struct SamplerListener {
    void *self;
    bool (*on_token)(void *self, int32_t token);
} SamplerListener;

// Appends the prompt (at least one token) to the text, then writes up to `count` tokens
// that follow to output. Returns how many. They are fewer where the positions are used
// up, where the listener does not want to go on, and where the logits are not numbers; 0
// where the prompt does not fit. listener: or NULL.
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
        if (listener != NULL && !listener->on_token(listener->self, output[i])) { return i + 1; }
        if (i + 1 < count && sampler_step(sampler, stream, parameters, output[i]) == NULL) { return i + 1; }
    }
    return count;
}

#endif
