// fuzz_config.h: a Hugging Face config.json. What is accepted is a model that can be laid
// out, and the config.json that is written for it describes the same model.
#pragma once

#include "checkpoint/hf_model.h"
#include "test/fuzz/fuzz.h"

static inline bool fuzz_config_load(FuzzPart part, ModelConfig *config) {
    FuzzFile file;
    Error error = {""};
    fuzz_file_open(&file, part);
    bool good = fuzz_accepted(model_config_load(file.path, config, &error), &error);
    fuzz_file_close(&file);
    memset(config->name, 0, sizeof config->name); // the path
    return good;
}

static inline void fuzz_config_again(const ModelConfig *config) {
    ModelConfig again;
    json_t *root = hf_model_describe(config, NULL);
    char *text = json_dumps(root, 0);
    fuzz_require(text != NULL, "a configuration can be written");
    FuzzPart part = {(const uint8_t *)text, strlen(text)};
    fuzz_require(fuzz_config_load(part, &again), "a written configuration is accepted");
    fuzz_require(memcmp(&again, config, sizeof again) == 0, "a written configuration is the same");
    free(text);
    json_decref(root);
}

static inline void fuzz_config_lay_out(const ModelConfig *config) {
    ParameterTable table;
    size_t position = 0;
    parameter_table_make(config, &table);
    for (int i = 0; i < table.count; i++) {
        fuzz_require(table.entries[i].offset == position && table.entries[i].count > 0,
                     "tensors lie back to back");
        position += table.entries[i].count;
    }
    fuzz_require(position == table.parameter_count, "all parameters belong to tensors");
    parameter_table_free(&table);
}

static inline bool fuzz_config(const uint8_t *data, size_t size) {
    ModelConfig config;
    FuzzPart part = {data, size};
    if (!fuzz_config_load(part, &config)) { return false; }
    fuzz_require(config.layers >= 1 && config.layers <= MODEL_MAX_LAYERS, "there are 1 to 96 layers");
    fuzz_require(config.channels >= 1 && config.heads >= 1 && model_head_size(&config) >= 1 &&
                     config.heads % model_kv_heads(&config) == 0,
                 "heads have a size, and share keys evenly");
    fuzz_require(config.mlp_channels >= 1 && (config.window >= 1 || config.family != &gpt_neo_family) &&
                     config.positions >= 1 && config.vocabulary >= 1,
                 "sizes are at least 1");
    fuzz_require(config.epsilon > 0 && config.epsilon <= 0.1, "epsilon is above 0 and at most 0.1");
    fuzz_config_lay_out(&config);
    fuzz_config_again(&config);
    return true;
}
