// fuzz_hf_model.h: a directory of a Hugging Face model. The parts of the input are the
// files named below, in this order. What is accepted has every tensor of its
// configuration, and reading them all cannot fail.
#ifndef ACCO_TEST_FUZZ_FUZZ_HF_MODEL_H
#define ACCO_TEST_FUZZ_FUZZ_HF_MODEL_H

#include "checkpoint/hf_model.h"
#include "test/fuzz/fuzz.h"

enum { FUZZ_HF_MODEL_FILES = 8 };

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

static inline bool fuzz_hf_model(const uint8_t *data, size_t size) {
    static const char *const names[FUZZ_HF_MODEL_FILES] = {
        "config.json",    "model.safetensors", "model.safetensors.index.json",
        "a.safetensors",  "b.safetensors",     "tokenizer_config.json",
        "tokenizer.json", "vocab.json"};
    FuzzPart parts[FUZZ_HF_MODEL_FILES];
    FuzzFolder folder;
    HfModel model;
    Error error = {""};
    fuzz_split(data, size, parts, FUZZ_HF_MODEL_FILES);
    fuzz_folder_open(&folder);
    for (int i = 0; i < FUZZ_HF_MODEL_FILES; i++) {
        if (parts[i].size > 0) { fuzz_folder_add(&folder, names[i], parts[i]); }
    }
    bool good = fuzz_accepted(hf_model_open(&model, folder.path, &error), &error);
    if (good) {
        fuzz_hf_model_tensors(&model);
        hf_model_close(&model);
    }
    int id = hf_model_special_id(folder.path, "eos_token", 300);
    fuzz_require(id >= -1 && id < 300, "a special token is below the vocabulary");
    fuzz_folder_close(&folder);
    return good;
}

#endif
