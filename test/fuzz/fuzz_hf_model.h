// fuzz_hf_model.h: a directory of a Hugging Face model. The parts of the input are the
// files named below, in this order; the last two, adapters, may belong to the model. What is
// accepted has every tensor of its configuration, and reading them all cannot fail.
#pragma once

#include "checkpoint/hf_model.h"
#include "test/fuzz/fuzz.h"

enum { FUZZ_HF_MODEL_FILES = 8, FUZZ_ADAPTERS = 2 };

static inline void fuzz_hf_model_tensors(const HfModel *model) {
    for (int i = 0; i < model->table.count; i++) {
        const SafetensorsEntry *source = model->sources[i];
        const ParameterInfo *info = &model->table.entries[i];
        fuzz_require(source != NULL && source->count == info->count,
                     "every tensor of the table is there, in its size");
        fuzz_require(safetensors_is_real(source->type), "every tensor holds real numbers");
    }
    float *parameters = (float *)malloc(model->table.parameter_count * sizeof *parameters);
    fuzz_require(parameters != NULL, "no model is much larger than its files");
    hf_model_read(model, parameters);
    fuzz_touch(parameters, model->table.parameter_count * sizeof *parameters);
    free(parameters);
}

// Whether the two parts are adapters of the model; then they are in it from now on.
static inline bool fuzz_hf_model_adapt(HfModel *model, const FuzzFolder *folder, const FuzzPart *parts) {
    char base[PATH_MAX];
    Error error = {""};
    fuzz_folder_add(folder, ADAPTERS_CONFIG, parts[0]);
    fuzz_folder_add(folder, ADAPTERS_WEIGHTS, parts[1]);
    return fuzz_accepted(adapters_read_config(folder->path, &model->adapters, base, &error) &&
                             adapters_open(&model->adapters, folder->path, &model->table, &error),
                         &error);
}

static inline bool fuzz_hf_model(const uint8_t *data, size_t size) {
    static const char *const names[FUZZ_HF_MODEL_FILES] = {
        "config.json",    "model.safetensors", "model.safetensors.index.json",
        "a.safetensors",  "b.safetensors",     "tokenizer_config.json",
        "tokenizer.json", "vocab.json"};
    FuzzPart parts[FUZZ_HF_MODEL_FILES + FUZZ_ADAPTERS];
    FuzzFolder folder;
    HfModel model;
    Error error = {""};
    fuzz_split(data, size, parts, FUZZ_HF_MODEL_FILES + FUZZ_ADAPTERS);
    fuzz_folder_open(&folder);
    for (int i = 0; i < FUZZ_HF_MODEL_FILES; i++) {
        if (parts[i].size > 0) { fuzz_folder_add(&folder, names[i], parts[i]); }
    }
    bool good = fuzz_accepted(hf_model_open(&model, folder.path, &error), &error);
    if (good) {
        bool adapts = parts[FUZZ_HF_MODEL_FILES].size > 0;
        bool fits = !adapts || fuzz_hf_model_adapt(&model, &folder, parts + FUZZ_HF_MODEL_FILES);
        fuzz_hf_model_tensors(&model);
        hf_model_close(&model);
        good = fits;
    }
    int id = hf_model_special_id(folder.path, "eos_token", 300);
    fuzz_require(id >= -1 && id < 300, "a special token is below the vocabulary");
    fuzz_folder_close(&folder);
    return good;
}
