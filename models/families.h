// families.h: the list of families, and the models that have a name.
//
// No other code knows a family by its name; help texts do.
#pragma once

#include "models/gpt2.h"
#include "models/gpt_neo.h"
#include "models/qwen3.h"
#include "runtime/json_files.h"
#include "runtime/names.h"

static const ModelFamily *const MODEL_FAMILIES[] = {&gpt_neo_family, &gpt2_family,  &llama_family,
                                                    &mistral_family, &qwen2_family, &qwen3_family};

// window: of every second layer, which is local; 0: no layer is. The last columns are not for GPT:
// factor is that of llama3's positions, beyond 8192 of them; 0: positions are not scaled.
typedef struct ModelPreset {
    const char *name;
    const ModelFamily *family;
    int layers, channels, heads, mlp_channels, window, positions, vocabulary, kv_heads, head_channels;
    bool tied;
    double epsilon, deviation, theta, factor; // epsilon and deviation 0: the family's
} ModelPreset;

// 125M as in the ACCO paper; 1.3B and 2.7B as EleutherAI publishes them. The paper gives no sizes
// for its 36M model with a vocabulary of 10000: this is the published TinyStories-33M with that
// vocabulary, 36.8M parameters. tiny reads bytes and has 0.86M parameters. The sizes of GPT-2 are
// OpenAI's: 124M, 355M, 774M and 1.56B parameters. The others are those of their files on the Hub.
static const ModelPreset MODEL_PRESETS[] = {
    {"tiny", &gpt_neo_family, 4, 128, 4, 512, 64, 256, 256, 0, 0, true, 0, 0, 0, 0},
    {"36M", &gpt_neo_family, 4, 768, 16, 3072, 256, 1024, 10000, 0, 0, true, 0, 0, 0, 0},
    {"125M", &gpt_neo_family, 12, 768, 12, 3072, 256, 1024, 50257, 0, 0, true, 0, 0, 0, 0},
    {"1.3B", &gpt_neo_family, 24, 2048, 16, 8192, 256, 2048, 50257, 0, 0, true, 0, 0, 0, 0},
    {"2.7B", &gpt_neo_family, 32, 2560, 20, 10240, 256, 2048, 50257, 0, 0, true, 0, 0, 0, 0},
    {"gpt2", &gpt2_family, 12, 768, 12, 3072, 0, 1024, 50257, 0, 0, true, 0, 0, 0, 0},
    {"gpt2-medium", &gpt2_family, 24, 1024, 16, 4096, 0, 1024, 50257, 0, 0, true, 0, 0, 0, 0},
    {"gpt2-large", &gpt2_family, 36, 1280, 20, 5120, 0, 1024, 50257, 0, 0, true, 0, 0, 0, 0},
    {"gpt2-xl", &gpt2_family, 48, 1600, 25, 6400, 0, 1024, 50257, 0, 0, true, 0, 0, 0, 0},
    {"smollm2-135M", &llama_family, 30, 576, 9, 1536, 0, 8192, 49152, 3, 64, true, 1e-5, 1 / 24.0, 1e5, 0},
    {"smollm2-360M", &llama_family, 32, 960, 15, 2560, 0, 8192, 49152, 5, 64, true, 1e-5, 0.02, 1e5, 0},
    {"tinyllama-1.1B", &llama_family, 22, 2048, 32, 5632, 0, 2048, 32000, 4, 64, false, 1e-5, 0, 1e4, 0},
    {"llama-3.2-1B", &llama_family, 16, 2048, 32, 8192, 0, 131072, 128256, 8, 64, true, 1e-5, 0, 5e5, 32},
    {"qwen2.5-0.5B", &qwen2_family, 24, 896, 14, 4864, 0, 32768, 151936, 2, 64, true, 0, 0, 1e6, 0},
    {"qwen3-0.6B", &qwen3_family, 28, 1024, 16, 3072, 0, 40960, 151936, 8, 128, true, 0, 0, 1e6, 0},
};

enum { MODEL_PRESET_COUNT = sizeof MODEL_PRESETS / sizeof MODEL_PRESETS[0] };

static inline void model_config_from_preset(const ModelPreset *preset, ModelConfig *config) {
    memset(config, 0, sizeof *config);
    snprintf(config->name, sizeof config->name, "%s", preset->name);
    config->family = preset->family;
    config_json_fill(config);
    config->layers = preset->layers;
    config->channels = preset->channels;
    config->heads = preset->heads;
    config->mlp_channels = preset->mlp_channels;
    config->window = preset->window;
    config->positions = preset->positions;
    config->vocabulary = preset->vocabulary;
    config->kv_heads = preset->kv_heads;
    config->head_channels = preset->head_channels;
    config->tied = preset->tied;
    if (preset->epsilon > 0) { config->epsilon = preset->epsilon; }
    if (preset->deviation > 0) { config->deviation = preset->deviation; }
    config->rotary.theta = preset->theta;
    if (preset->factor > 0) {
        RotaryPositions scaled = {.kind = ROTARY_LLAMA3, .theta = preset->theta, .factor = preset->factor};
        scaled.original = 8192, scaled.low = 1, scaled.high = 4;
        config->rotary = scaled;
    }
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
            ? config_json_read(root, path, config, error)
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
    char excerpt[64], hint[NAME_HINT], list[384] = "";
    for (int i = 0; i < MODEL_PRESET_COUNT; i++) {
        names[i] = MODEL_PRESETS[i].name;
        text_join(list, sizeof list, i < MODEL_PRESET_COUNT - 1 ? ", " : " or ", "%s", names[i]);
    }
    return error_set(error, "unknown model %s%s: choose %s, or give a Hugging Face config.json",
                     text_excerpt(name_or_path, excerpt),
                     name_hint(name_or_path, names, MODEL_PRESET_COUNT, hint), list);
}
