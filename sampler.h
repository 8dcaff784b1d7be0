// sampler.h: text from a model, one token at a time, with the keys and values of all earlier positions kept.
//
// A step runs the model's own layers on a batch of one position (the same kernels as in training, one row); only attention differs: it
// reads the cache, and local layers read no more of it than their window. Logits of a step equal those of a full forward pass up to
// rounding. The sampler has an arena of its own, so that training reserves nothing for it. Sampling ends when all positions of the model
// are used; the context does not slide, because the positions are learned and the cache holds what was computed with them.
//
//   sampler_reserve, arena_commit;   then for each text:  sampler_reset, sampler_generate  or  sampler_step + sampler_choose by hand
#ifndef ACCO_SAMPLER_H
#define ACCO_SAMPLER_H

#include "gpt_neo.h"

typedef struct Sampler {
    GptNeo model;  // of one position
    float *keys;   // (L, positions, C)
    float *values; // (L, positions, C)
    float *scores; // (H, positions)
    float *sorted; // (V): workspace of top-k
    int length;    // positions in the cache
} Sampler;

// Plans the memory for a team of `threads`. `sampler` must stay where it is.
static inline void sampler_reserve(Sampler *sampler, Arena *arena, const GptNeoConfig *config, int threads) {
    size_t positions = (size_t)config->positions * sizeof(float), C = (size_t)config->channels;
    memset(sampler, 0, sizeof *sampler);
    GptNeoSettings settings = gpt_neo_on_cpu(1, 1, threads);
    gpt_neo_reserve(&sampler->model, arena, config, &settings);
    arena_reserve(arena, MEMORY_ACTIVATIONS, "cached keys", (size_t)config->layers * positions * C, &sampler->keys);
    arena_reserve(arena, MEMORY_ACTIVATIONS, "cached values", (size_t)config->layers * positions * C, &sampler->values);
    arena_reserve(arena, MEMORY_WORKSPACE, "decoding scores", (size_t)config->heads * positions, &sampler->scores);
    arena_reserve(arena, MEMORY_WORKSPACE, "top-k", (size_t)config->vocabulary * sizeof(float), &sampler->sorted);
}

// Forgets the text.
static inline void sampler_reset(Sampler *sampler) { sampler->length = 0; }

// Puts the layer's new key and value into the cache and attends to what is there.
static inline void sampler_attend(Sampler *sampler, Stream *stream, int l) {
    GptNeo *model = &sampler->model;
    const GptNeoConfig *config = &model->config;
    size_t C = (size_t)config->channels, layer = (size_t)l * (size_t)config->positions * C, place = layer + (size_t)sampler->length * C;
    const float *qkv = real_floats(gpt_neo_qkv(model, l));
    memcpy(sampler->keys + place, qkv + C, C * sizeof(float));
    memcpy(sampler->values + place, qkv + 2 * C, C * sizeof(float));
    cpu_attention_decode(stream, real_floats(gpt_neo_attended(model, l)), sampler->scores, qkv, sampler->keys + layer,
                         sampler->values + layer, sampler->length, config->positions, config->channels, config->heads,
                         gpt_neo_window(config, l));
}

// Appends `token` to the text. Returns the logits (V) of what follows, valid until the next step, or NULL if all positions are used.
static inline const float *sampler_step(Sampler *sampler, Stream *stream, const float *parameters, int32_t token) {
    GptNeo *model = &sampler->model;
    const GptNeoConfig *config = &model->config;
    int L = config->layers, C = config->channels;
    assert(token >= 0 && token < config->vocabulary);
    if (sampler->length == config->positions) { return NULL; }
    gpt_neo_take_parameters(model, parameters, NULL);
    const Real *wte = gpt_neo_weight(model, model->offsets[GPT_NEO_WTE]);
    const Real *position = gpt_neo_weight(model, model->offsets[GPT_NEO_WPE] + (size_t)sampler->length * (size_t)C);
    embedding_forward(stream, model->residuals, wte, position, &token, 1, 1, C);
    for (int l = 0; l < L; l++) {
        gpt_neo_layer_enter(model, stream, l, l > 0);
        sampler_attend(sampler, stream, l);
        gpt_neo_layer_leave(model, stream, l);
    }
    gpt_neo_layernorm(model, stream, 2 * L, true);
    matmul_forward(stream, model->logits, config->vocabulary, gpt_neo_hidden(model), wte, 1, C, config->vocabulary);
    sampler->length++;
    return real_floats(model->logits);
}

// The k-th largest (k from 1) of `count` values, which are reordered. Quickselect around the middle element.
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

// The first of the largest logits; -1 where one is NaN or none is above -infinity: such a model has nothing to say.
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

// Chooses the next token from the logits of the latest step. temperature 0: the most probable one; else from softmax(logits / temperature),
// of the top_k largest logits (with those equal to the last of them) if top_k > 0. Returns -1 if the logits are not numbers.
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
    for (int v = 0; v < V; v++) { sum += logits[v] >= least ? exp(((double)logits[v] - maximum) / temperature) : 0.0; }
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

// Appends the prompt (at least one token) to the text and writes up to `count` following tokens to output. Returns how many: fewer where
// the positions are used up or the listener has heard enough, 0 where already the prompt does not fit, and it stops at logits that are
// not numbers. listener: or NULL.
static inline int sampler_generate(Sampler *sampler, Stream *stream, const float *parameters, const int32_t *prompt, int prompt_count,
                                   int32_t *output, int count, double temperature, int top_k, Random *random,
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

#endif
