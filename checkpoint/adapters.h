// adapters.h: low-rank adapters (models/trained.h) on disk, as the library peft keeps them.
//
//   adapter_config.json          the rank, alpha, which matrices have one, the model they belong to
//   adapter_model.safetensors    base_model.model.MODULE.lora_A.weight (r, inputs), ...lora_B.weight
//                                (outputs, r)
//
// The model is another directory, which adapter_config.json names. hf_model.h opens both as
// one model, whose matrices are W + alpha / r B A; peft's with use_rslora, W + alpha / sqrt(r) B A.
#pragma once

#include "checkpoint/file_sums.h"
#include "checkpoint/safetensors.h"
#include "models/trained.h"
#include "runtime/json_files.h"

#define ADAPTERS_CONFIG "adapter_config.json"
#define ADAPTERS_WEIGHTS "adapter_model.safetensors"
#define ADAPTERS_PREFIX "base_model.model." // of every name
#define ADAPTERS_MERGE "merge them with peft (merge_and_unload, save_pretrained)"

typedef struct Adapters {
    SafetensorsFile file;
    int rank;
    float scale;                      // of B A
    const SafetensorsEntry **entries; // (tensors of the model, 2): A and B, or NULL
} Adapters;

static inline void adapters_close(Adapters *adapters) {
    safetensors_close(&adapters->file);
    free(adapters->entries);
    adapters->entries = NULL;
}

// matrix (rows, columns) += scale b (rows, rank) a (rank, columns)
static inline void adapters_merge(float *matrix, const float *a, const float *b, int rows, int columns,
                                  int rank, float scale) {
    for (int i = 0; i < rows; i++) {
        float *row = matrix + (size_t)i * columns;
        for (int k = 0; k < rank; k++) {
            const float *other = a + (size_t)k * columns;
            float factor = scale * b[(size_t)i * rank + k];
            for (int j = 0; j < columns; j++) { row[j] += factor * other[j]; }
        }
    }
}

// Whether no key asks for more than plain LoRA. Of the kinds that peft calls use_..., one is known.
static inline bool adapters_accept_kind(json_t *root, const char *path, Error *error) {
    static const char *const others[] = {"alora_invocation_tokens", "trainable_token_indices",
                                         "layer_replication", "lora_bias", "target_parameters"};
    const char *key;
    json_t *value;
    json_object_foreach(root, key, value) {
        bool other = strncmp(key, "use_", 4) == 0 && strcmp(key, "use_rslora") != 0;
        for (size_t i = 0; i < sizeof others / sizeof others[0] && !other; i++) {
            other = strcmp(key, others[i]) == 0;
        }
        bool asks = json_is_true(value) || json_is_string(value) || json_is_number(value) ||
                    json_array_size(value) > 0 || json_object_size(value) > 0;
        if (!other || !asks) { continue; }
        return error_set(error, "%.300s: \"%.40s\" is not supported: " ADAPTERS_MERGE, path, key);
    }
    return true;
}

// Reads adapter_config.json of `directory`: rank and scale, and the directory of the model.
// Refuses what changes the formula above.
static inline bool adapters_read_config(const char *directory, Adapters *adapters, char base[PATH_MAX],
                                        Error *error) {
    // The words of init_lora_weights with which peft leaves W as it is.
    static const char *const begins[4] = {"gaussian", "eva", "orthogonal", "mica"};
    char path[PATH_MAX];
    json_error_t problem;
    if (!path_within(path, directory, ADAPTERS_CONFIG, error)) { return false; }
    json_t *root = json_file_load(path, 0, &problem);
    const char *begun = json_text(root, "init_lora_weights");
    const json_t *rank = json_object_get(root, "r"), *alpha = json_object_get(root, "lora_alpha"),
                 *model = json_object_get(root, "base_model_name_or_path");
    const Condition conditions[] = {
        {json_says(root, "peft_type", "LORA"), "peft_type must be \"LORA\""},
        {json_object_get(root, "bias") == NULL || json_says(root, "bias", "none"),
         "bias must be \"none\": " ADAPTERS_MERGE},
        {json_is_integer(rank) && json_integer_value(rank) >= 1 && json_integer_value(rank) <= 65536,
         "r must be a whole number from 1 to 65536"},
        {json_is_number(alpha) && fabs(json_number_value(alpha)) <= 1e6, "lora_alpha must be a number"},
        {json_is_string(model) && json_string_length(model) < PATH_MAX,
         "base_model_name_or_path must be the directory of the model"},
        {json_array_size(json_object_get(root, "modules_to_save")) == 0,
         "modules_to_save is not supported: " ADAPTERS_MERGE},
        {json_object_size(json_object_get(root, "rank_pattern")) == 0,
         "rank_pattern is not supported: " ADAPTERS_MERGE},
        {json_object_size(json_object_get(root, "alpha_pattern")) == 0,
         "alpha_pattern is not supported: " ADAPTERS_MERGE},
    };
    bool good = root != NULL || error_set(error, "%.300s: %.120s", path, problem.text);
    for (size_t i = 0; i < sizeof conditions / sizeof conditions[0] && good; i++) {
        good = conditions[i].holds || error_set(error, "%.300s: %s", path, conditions[i].text);
    }
    good = good && adapters_accept_kind(root, path, error);
    bool stays = begun == NULL;
    for (int i = 0; i < 4 && !stays; i++) { stays = strcmp(begun, begins[i]) == 0; }
    if (good && !stays) {
        good = error_set(error,
                         "%.300s: adapters that began as \"%.40s\" change the model, too: " ADAPTERS_MERGE,
                         path, begun);
    }
    if (good) {
        adapters->rank = (int)json_integer_value(rank);
        double divisor = json_flag(root, "use_rslora") ? sqrt(adapters->rank) : adapters->rank;
        adapters->scale = (float)(json_number_value(alpha) / divisor);
        snprintf(base, PATH_MAX, "%s", json_string_value(model));
    }
    json_decref(root);
    return good;
}

// base <- the directory of the model of the adapters in `directory`. False: it has none, or they
// cannot be read.
static inline bool adapters_find_base(const char *directory, char base[PATH_MAX]) {
    Adapters adapters;
    Error ignored;
    return directory[0] != '\0' && adapters_read_config(directory, &adapters, base, &ignored);
}

// Finds the matrix of the table that `entry` belongs to, and checks type and shape.
static inline bool adapters_place(Adapters *adapters, const SafetensorsEntry *entry,
                                  const ParameterTable *table, Error *error) {
    static const char *const sides[2] = {".lora_A.weight", ".lora_B.weight"};
    const char *name = entry->name;
    if (strncmp(name, ADAPTERS_PREFIX, strlen(ADAPTERS_PREFIX)) == 0) { name += strlen(ADAPTERS_PREFIX); }
    for (int i = 0; i < table->count; i++) {
        const ParameterInfo *info = &table->entries[i];
        size_t module = (size_t)(strrchr(info->name, '.') - info->name);
        for (int side = 0; side < 2 && info->is_projection; side++) {
            if (strncmp(name, info->name, module) != 0 || strcmp(name + module, sides[side]) != 0) {
                continue;
            }
            size_t rank = (size_t)adapters->rank, shape[2] = {side == 0 ? rank : (size_t)info->rows,
                                                              side == 0 ? (size_t)info->columns : rank};
            adapters->entries[2 * i + side] = entry;
            return ((safetensors_is_real(entry->type) && safetensors_has_shape(entry, 2, shape)) ||
                    error_set(error, "%s: %.80s must be of numbers, and of shape (%zu, %zu)",
                              adapters->file.path, entry->name, shape[0], shape[1])) &&
                   safetensors_check_finite(entry, error);
        }
    }
    return error_set(
        error,
        "%s: %.80s belongs to no matrix of a layer of the model: the adapters are another model's, "
        "or of more than the layers, and peft merges them (merge_and_unload, save_pretrained)",
        adapters->file.path, entry->name);
}

// Opens the adapters in `directory` for a model with this table. On failure there is nothing
// to close.
static inline bool adapters_open(Adapters *adapters, const char *directory, const ParameterTable *table,
                                 Error *error) {
    char path[PATH_MAX];
    if (!path_within(path, directory, ADAPTERS_WEIGHTS, error)) { return false; }
    if (access(path, F_OK) != 0) {
        return error_set(error,
                         "%.300s has no %s. An adapter_model.bin is converted in Python by peft's "
                         "AutoPeftModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT)",
                         directory, ADAPTERS_WEIGHTS);
    }
    if (!safetensors_open(&adapters->file, path, error)) { return false; }
    adapters->entries = MEMORY_OF(const SafetensorsEntry *, 2 * (size_t)table->count);
    bool good = adapters->file.count > 0 ||
                error_set(error, "%s holds no adapter: what wrote it has lost them", adapters->file.path);
    for (size_t i = 0; i < adapters->file.count && good; i++) {
        good = adapters_place(adapters, &adapters->file.entries[i], table, error);
    }
    for (int i = 0; i < table->count && good; i++) {
        good = (adapters->entries[2 * i] == NULL) == (adapters->entries[2 * i + 1] == NULL) ||
               error_set(error, "%s has only one of lora_A and lora_B for %s", adapters->file.path,
                         table->entries[i].name);
    }
    if (!good) { adapters_close(adapters); }
    return good;
}

// Adds the adapter of table->entries[i], if it has one, to its matrix (rows, columns).
static inline void adapters_apply(const Adapters *adapters, const ParameterInfo *info, int i, float *matrix) {
    const SafetensorsEntry *a = adapters->entries[2 * i], *b = adapters->entries[2 * i + 1];
    if (a == NULL) { return; }
    float *values = MEMORY_OF(float, a->count + b->count);
    safetensors_read_floats(a, 0, a->count, values);
    safetensors_read_floats(b, 0, b->count, values + a->count);
    adapters_merge(matrix, values, values + a->count, info->rows, info->columns, adapters->rank,
                   adapters->scale);
    free(values);
}

static inline bool adapters_write_config(const char *directory, const TrainedPart *part, const char *base,
                                         Error *error) {
    char whole[PATH_MAX];
    json_t *modules = json_array();
    bool transposed = false;
    for (int i = 0; i < part->model.count; i++) {
        const ParameterInfo *info = &part->model.entries[i];
        if (part->places[i].kind != TRAINED_ADAPTED) { continue; }
        // peft takes a module whose name ends with one of these, behind a point.
        const char *name = strchr(info->name, '.') + 1;
        json_array_append_new(modules, json_stringn(name, (size_t)(strrchr(name, '.') - name)));
        transposed = info->is_transposed;
    }
    // A directory above may have a name that is not UTF-8, which JSON cannot hold; `base` is.
    json_t *model = realpath(base, whole) != NULL ? json_string(whole) : NULL;
    if (model == NULL) { model = json_string(base); }
    json_t *root =
        json_pack("{s:s, s:s, s:o, s:i, s:f, s:f, s:s, s:b, s:b, s:b, s:o}", "peft_type", "LORA", "task_type",
                  "CAUSAL_LM", "base_model_name_or_path", model, "r", part->rank, "lora_alpha", part->alpha,
                  "lora_dropout", 0.0, "bias", "none", "fan_in_fan_out", transposed, "inference_mode", 1,
                  "init_lora_weights", 1, "target_modules", modules);
    return json_write(root, directory, ADAPTERS_CONFIG, JSON_INDENT(2) | JSON_REAL_PRECISION(9), error);
}
