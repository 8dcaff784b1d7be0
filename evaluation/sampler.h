// sampler.h: writes text with a model, one token at a time, on the CPU.
//
// A step decodes one token: the model caches what it needs of all earlier positions. The
// logits of a step equal those of a full forward pass up to rounding. When all positions
// of the model are used, the text ends.
//
// A sampler has an arena of its own, so training reserves nothing for it. Order of calls:
//
//   sampler_reserve, arena_commit
//   either sampler_generate, or sampler_step and sampler_choose in turn
#ifndef ACCO_EVALUATION_SAMPLER_H
#define ACCO_EVALUATION_SAMPLER_H

#include "models.h"

typedef struct Sampler {
    Model model;
    float *sorted;       // (V), workspace of top-k
    const float *logits; // (V), of the latest step
    int length;          // of the text so far
} Sampler;

// Reserves memory for a stream with a pool of `threads`. The arena keeps pointers into
// *sampler, which must not move before arena_commit.
static inline void sampler_reserve(Sampler *sampler, Arena *arena, const ModelConfig *config, int threads) {
    ModelSettings settings = model_on_cpu(1, 1, threads);
    settings.decodes = true;
    memset(sampler, 0, sizeof *sampler);
    model_reserve(&sampler->model, arena, config, &settings);
    arena_reserve(arena, MEMORY_WORKSPACE, "top-k", (size_t)config->vocabulary * sizeof(float),
                  &sampler->sorted);
}

// Appends `token` to the text. Returns the logits (V) of the token that follows, valid
// until the next step, or NULL if all positions are used. parameters: (parameter_count),
// on the host.
static inline const float *sampler_step(Sampler *sampler, Stream *stream, const float *parameters,
                                        int32_t token) {
    Model *model = &sampler->model;
    if (sampler->length == model->config.positions) { return NULL; }
    sampler->logits = model->family->decode(&model->state, stream, parameters, sampler->length++, token);
    return sampler->logits;
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

// Chooses the next token from the logits of the latest step: the most probable one where
// the temperature is 0, otherwise one drawn from softmax(logits / temperature). With
// top_k > 0 only the top_k largest logits, and those equal to the last of them, can be
// drawn. Returns -1 if the logits are not numbers.
static inline int32_t sampler_choose(Sampler *sampler, double temperature, int top_k, Random *random) {
    const float *logits = sampler->logits;
    int V = sampler->model.config.vocabulary;
    int32_t best = logits_largest(as_reals_const(logits), V, PRECISION_FP32);
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

// on_token is called with each token as soon as it is chosen, and returns whether more
// are wanted.
typedef struct SamplerListener {
    void *self;
    bool (*on_token)(void *self, int32_t token);
} SamplerListener;

// Appends the prompt (at least one token) to the text, then writes up to `count` tokens
// that follow to output. Returns how many. They are fewer if the positions are used up,
// if the listener wants no more, and if the logits are not numbers; 0 if the prompt does
// not fit. listener: or NULL.
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
