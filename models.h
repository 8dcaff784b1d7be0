// models.h: the families of models, their presets, and one model of any family.
#pragma once

#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gpt.h"
#include "runtime/json_files.h"
#include "runtime/names.h"
#include "trained.h"

static const ModelFamily *const MODEL_FAMILIES[] = {&gpt_neo_family, &gpt2_family};

// window: of every second layer, which is local; 0: no layer is. The MLP is four times as
// wide as the model.
typedef struct ModelPreset {
    const char *name;
    const ModelFamily *family;
    int layers, channels, heads, window, positions, vocabulary;
} ModelPreset;

// 125M as in the ACCO paper; 1.3B and 2.7B as EleutherAI publishes them. The paper gives
// no sizes for its 36M model with a vocabulary of 10000: this is the published
// TinyStories-33M with that vocabulary, 36.8M parameters. tiny reads bytes and has 0.86M
// parameters. The sizes of GPT-2 are OpenAI's: 124M, 355M, 774M and 1.56B parameters.
static const ModelPreset MODEL_PRESETS[] = {
    {"tiny", &gpt_neo_family, 4, 128, 4, 64, 256, 256},
    {"36M", &gpt_neo_family, 4, 768, 16, 256, 1024, 10000},
    {"125M", &gpt_neo_family, 12, 768, 12, 256, 1024, 50257},
    {"1.3B", &gpt_neo_family, 24, 2048, 16, 256, 2048, 50257},
    {"2.7B", &gpt_neo_family, 32, 2560, 20, 256, 2048, 50257},
    {"gpt2", &gpt2_family, 12, 768, 12, 0, 1024, 50257},
    {"gpt2-medium", &gpt2_family, 24, 1024, 16, 0, 1024, 50257},
    {"gpt2-large", &gpt2_family, 36, 1280, 20, 0, 1024, 50257},
    {"gpt2-xl", &gpt2_family, 48, 1600, 25, 0, 1024, 50257},
};

enum { MODEL_PRESET_COUNT = sizeof MODEL_PRESETS / sizeof MODEL_PRESETS[0] };

static inline void model_config_from_preset(const ModelPreset *preset, ModelConfig *config) {
    memset(config, 0, sizeof *config);
    snprintf(config->name, sizeof config->name, "%s", preset->name);
    config->family = preset->family;
    config->layers = preset->layers;
    config->channels = preset->channels;
    config->heads = preset->heads;
    config->mlp_channels = 4 * preset->channels;
    config->window = preset->window;
    config->positions = preset->positions;
    config->vocabulary = preset->vocabulary;
    config->epsilon = 1e-5;
    config->qkv_biases = config->scaled_scores = preset->family == &gpt2_family;
    for (int l = 0; l < preset->layers; l++) { config->local[l] = preset->window > 0 && l % 2 == 1; }
}

// NULL: no preset has that name.
static inline const ModelPreset *model_preset_find(const char *name) {
    for (int i = 0; i < MODEL_PRESET_COUNT; i++) {
        if (strcmp(name, MODEL_PRESETS[i].name) == 0) { return &MODEL_PRESETS[i]; }
    }
    return NULL;
}

// Reads a Hugging Face config.json.
static inline bool model_config_load(const char *path, ModelConfig *config, Error *error) {
    json_error_t problem;
    json_t *root = json_file_load(path, 0, &problem);
    if (root == NULL) { return error_set(error, "%s is no config.json of a model: %s", path, problem.text); }
    memset(config, 0, sizeof *config);
    size_t length = strlen(path), skip = length < sizeof config->name ? 0 : length - sizeof config->name + 1;
    snprintf(config->name, sizeof config->name, "%s", path + skip);
    const char *type = json_string_value(json_object_get(root, "model_type")),
               *quote = type == NULL ? "" : "\"";
    char allowed[256] = "";
    for (size_t i = 0; i < sizeof MODEL_FAMILIES / sizeof MODEL_FAMILIES[0]; i++) {
        const ModelFamily *family = MODEL_FAMILIES[i];
        text_join(allowed, sizeof allowed, " or ", "\"%s\"", family->name);
        if (type != NULL && strcmp(type, family->name) == 0) { config->family = family; }
    }
    bool good =
        config->family != NULL
            ? config->family->read_config(root, path, config, error)
            : error_set(error,
                        "%s: \"model_type\" is %s%.60s%s and must be %s: other models are not supported",
                        path, quote, type == NULL ? "not given" : type, quote, allowed);
    json_decref(root);
    return good;
}

// `name_or_path`: a preset, a config.json, or a directory that holds one. `error` says
// what is wrong and what is allowed.
static inline bool model_find(const char *name_or_path, ModelConfig *config, Error *error) {
    const ModelPreset *preset = model_preset_find(name_or_path);
    if (preset != NULL) {
        model_config_from_preset(preset, config);
        return true;
    }
    struct stat status;
    bool exists = stat(name_or_path, &status) == 0;
    if (exists && S_ISDIR(status.st_mode)) {
        char path[PATH_MAX + 16];
        snprintf(path, sizeof path, "%s/config.json", name_or_path);
        return model_config_load(path, config, error);
    }
    if (exists || strchr(name_or_path, '/') != NULL) {
        return model_config_load(name_or_path, config, error);
    }
    const char *names[MODEL_PRESET_COUNT];
    char excerpt[64], hint[NAME_HINT], list[256] = "";
    for (int i = 0; i < MODEL_PRESET_COUNT; i++) {
        names[i] = MODEL_PRESETS[i].name;
        text_join(list, sizeof list, i < MODEL_PRESET_COUNT - 1 ? ", " : " or ", "%s", names[i]);
    }
    return error_set(error, "unknown model %s%s: choose %s, or give a Hugging Face config.json",
                     text_excerpt(name_or_path, excerpt),
                     name_hint(name_or_path, names, MODEL_PRESET_COUNT, hint), list);
}

// ---- One model ------------------------------------------------------------------------

// The functions of its family take &model->state as `self`.
typedef struct Model {
    const ModelFamily *family;
    ModelConfig config;
    ModelSettings settings;
    void *gemm_workspace; // on a GPU (GEMM_WORKSPACE_BYTES)
    union {
        Gpt gpt;
    } state;
} Model;

// Plans activations and workspace. `model` must stay where it is until the arena is
// released.
static inline void model_reserve(Model *model, Arena *arena, const ModelConfig *config,
                                 const ModelSettings *settings) {
    assert(settings->B >= 1 && settings->T >= 1 && settings->T <= config->positions &&
           (long long)settings->B * settings->T < INT_MAX / 2);
    memset(model, 0, sizeof *model);
    model->family = config->family;
    model->config = *config;
    model->settings = *settings;
    model->family->reserve(&model->state, arena, config, settings);
    if (settings->part != NULL) {
        arena_reserve(arena, MEMORY_PARAMETERS, "frozen parameters",
                      settings->part->frozen_count * precision_bytes(settings->precision),
                      &settings->part->frozen);
    }
    if (settings->on_gpu) {
        arena_reserve(arena, MEMORY_WORKSPACE, "matrix products", GEMM_WORKSPACE_BYTES,
                      &model->gemm_workspace);
    }
}

// tokens (count) <- random tokens, for a pass whose result is not used.
static inline void model_random_tokens(const ModelConfig *config, size_t count, int32_t *tokens) {
    for (size_t i = 0; i < count; i++) {
        tokens[i] = (int32_t)(random_hash(i, 0) % (uint64_t)config->vocabulary);
    }
}

// Prepares a GPU before the first pass, on the stream that will compute: one pass over
// random tokens loads all kernels and plans all matrix products. `gradients` is overwritten.
static inline void model_start(Model *model, Stream *stream, const void *parameters, float *gradients) {
    if (!model->settings.on_gpu) { return; }
    size_t rows = (size_t)model->settings.B * (size_t)model->settings.T;
    int32_t *tokens = (int32_t *)memory_take(1, rows * sizeof(int32_t));
    const Pace pace = {.begins = true};
    model_random_tokens(&model->config, rows, tokens);
    gemm_open(stream, model->gemm_workspace);
    model->family->gradients(&model->state, stream, parameters, gradients, tokens, tokens, &pace);
    stream_settle(stream);
    free(tokens);
}

static inline void model_stop(Model *model, Stream *stream) {
    if (model->settings.on_gpu) { gemm_close(stream); }
}
