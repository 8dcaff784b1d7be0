// hf_model.h: reads and writes a model as Hugging Face keeps it: a directory with
// config.json and model.safetensors.
//
// Reading takes what transformers' from_pretrained takes: one file, or shards with an index; names
// with or without the family's prefix; fp32, bf16, fp16 or fp64. Constants that old versions stored
// (attention masks) are ignored. A file with both of two tied tensors must have the same bits in
// both, and every weight must be finite. All of that is checked when the directory is opened;
// reading parameters afterwards cannot fail. A directory of adapters (adapters.h) is read as the
// model that it names, with the adapters merged.
//
// Writing makes what from_pretrained takes, and checksums of the files (file_sums.h).
#pragma once

#include "checkpoint/adapters.h"
#include "models/families.h"

enum { HF_MODEL_SHARD_NAME = 128, HF_MODEL_PART = 1024 }; // floats read of a transposed matrix at a time

typedef struct HfModelFile {
    char name[HF_MODEL_SHARD_NAME]; // in the directory
    SafetensorsFile file;
} HfModelFile;

typedef struct HfModel {
    ModelConfig config;
    ParameterTable table;
    HfModelFile *files; // (file_count)
    int file_count;
    const SafetensorsEntry **sources; // (table.count): the file entry of each tensor of the table
    const SafetensorsEntry *head;     // lm_head.weight, or NULL
    Adapters adapters;
} HfModel;

static inline bool hf_model_has(const char *directory, const char *name) {
    Error ignored;
    char path[PATH_MAX];
    return path_within(path, directory, name, &ignored) && access(path, F_OK) == 0;
}

// ---- Reading: the files ---------------------------------------------------------------

// Opens a file of the model and returns its index; -1 with an error.
static inline int hf_model_add_file(HfModel *model, const char *directory, const char *name, Error *error) {
    char path[PATH_MAX];
    size_t bytes = ((size_t)model->file_count + 1) * sizeof *model->files;
    model->files = (HfModelFile *)memory_grow(model->files, bytes);
    HfModelFile *file = &model->files[model->file_count];
    snprintf(file->name, sizeof file->name, "%s", name);
    if (!path_within(path, directory, name, error) || !safetensors_open(&file->file, path, error)) {
        return -1;
    }
    return model->file_count++;
}

// The name of a tensor in a file without the family's prefix, which files may leave out.
static inline const char *hf_model_bare(const HfModel *model, const char *name) {
    const char *prefix = model->config.family->prefix;
    return name + (strncmp(name, prefix, strlen(prefix)) == 0 ? strlen(prefix) : 0);
}

// Opens the files that model.safetensors.index.json names, each when it is first named,
// and checks that every tensor is in the file that the index gives for it. Converters leave names
// there of what they have left out: constants, and one of two tied tensors.
static inline bool hf_model_open_shards(HfModel *model, const char *directory, Error *error) {
    char path[PATH_MAX];
    json_error_t problem;
    if (!path_within(path, directory, "model.safetensors.index.json", error)) { return false; }
    json_t *root = json_file_load(path, JSON_REJECT_DUPLICATES, &problem),
           *map = json_object_get(root, "weight_map"), *value;
    const char *name;
    bool good =
        (root != NULL || error_set(error, "%.300s: %.120s", path, problem.text)) &&
        (json_object_size(map) > 0 ||
         error_set(error, "%.300s: \"weight_map\" must be a JSON object that gives a file for every tensor",
                   path));
    json_object_foreach(map, name, value) {
        const char *shard = json_string_value(value);
        size_t length = shard != NULL ? strlen(shard) : 0;
        if (length == 0 || length >= HF_MODEL_SHARD_NAME || shard[0] == '.' || strchr(shard, '/') != NULL) {
            good = error_set(error, "%.300s: tensor %.80s must be in a file beside it, not \"%.80s\"", path,
                             name, shard != NULL ? shard : "");
            break;
        }
        int index = 0;
        while (index < model->file_count && strcmp(model->files[index].name, shard) != 0) { index++; }
        if (index == model->file_count) { index = hf_model_add_file(model, directory, shard, error); }
        const char *bare = hf_model_bare(model, name), *head = model->table.entries[model->table.head].name;
        bool needed = strcmp(bare, "lm_head.weight") != 0 && strcmp(bare, hf_model_bare(model, head)) != 0 &&
                      !model_is_constant(bare, &model->config);
        good = index >= 0 && (!needed || safetensors_find(&model->files[index].file, name) != NULL ||
                              error_set(error, "%.300s says that tensor %.80s is in %.80s, but it is not",
                                        path, name, shard));
        if (!good) { break; }
    }
    json_decref(root);
    return good;
}

// ---- Reading: the tensors -------------------------------------------------------------

// "(61, 24)"
static inline const char *hf_model_shape_text(int dimensions, const size_t *shape, char text[96]) {
    char list[92] = "";
    for (int i = 0; i < dimensions; i++) { text_join(list, sizeof list, ", ", "%zu", shape[i]); }
    snprintf(text, 96, "(%s)", list);
    return text;
}

static inline int hf_model_shape(const ParameterInfo *info, bool transposed, size_t shape[2]) {
    shape[transposed] = (size_t)info->rows;
    shape[!transposed] = (size_t)info->columns;
    return info->columns > 0 ? 2 : 1;
}

// Finds the tensor of the table that `entry` is, and checks its type and shape.
static inline bool hf_model_place(HfModel *model, const SafetensorsEntry *entry, Error *error) {
    const char *name = hf_model_bare(model, entry->name);
    const SafetensorsEntry **source = strcmp(entry->name, "lm_head.weight") == 0 ? &model->head : NULL;
    const ParameterInfo *info = &model->table.entries[model->table.head], *own = model->table.entries;
    for (int i = 0; i < model->table.count; i++, own++) {
        if (strcmp(own->name + own->prefix, name) != 0) { continue; }
        source = &model->sources[i];
        info = own;
    }
    if (source == NULL) {
        return model_is_constant(name, &model->config) || error_set(error, "%.80s is unknown", entry->name);
    }
    if (*source != NULL) { return error_set(error, "%.80s occurs twice", entry->name); }
    *source = entry;
    size_t shape[2];
    int dimensions = hf_model_shape(info, info->is_transposed, shape);
    char got[96], wanted[96];
    if (!safetensors_is_real(entry->type)) {
        return error_set(error, "%.80s is %s, allowed are F32, BF16, F16 and F64", entry->name,
                         SAFETENSORS_INFO[entry->type].name);
    }
    return (safetensors_has_shape(entry, dimensions, shape) ||
            error_set(error, "%.80s has shape %s, expected %s", entry->name,
                      hf_model_shape_text(entry->dimensions, entry->shape, got),
                      hf_model_shape_text(dimensions, shape, wanted))) &&
           safetensors_check_finite(entry, error);
}

// Every tensor of the table is in the files once, with its shape, and nothing else is.
static inline bool hf_model_match(HfModel *model, Error *error) {
    for (int f = 0; f < model->file_count; f++) {
        const SafetensorsFile *file = &model->files[f].file;
        for (size_t i = 0; i < file->count; i++) {
            if (!hf_model_place(model, &file->entries[i], error)) { return false; }
        }
    }
    // Some libraries store only one of two tied tensors, which may be either of them.
    const SafetensorsEntry **embedding = &model->sources[model->table.head], *head = model->head;
    if (*embedding == NULL) { *embedding = head; }
    if (head != NULL && (head->type != (*embedding)->type || head->bytes != (*embedding)->bytes ||
                         memcmp(head->data, (*embedding)->data, head->bytes) != 0)) {
        return error_set(error, "lm_head.weight differs from %.80s, but it must be the same matrix",
                         (*embedding)->name);
    }
    for (int i = 0; i < model->table.count; i++) {
        if (model->sources[i] == NULL) {
            return error_set(error, "%s is missing", model->table.entries[i].name);
        }
    }
    return true;
}

static inline void hf_model_close(HfModel *model) {
    for (int i = 0; i < model->file_count; i++) { safetensors_close(&model->files[i].file); }
    free(model->files);
    free(model->sources);
    adapters_close(&model->adapters);
    parameter_table_free(&model->table);
    memset(model, 0, sizeof *model);
}

// A directory without adapters.
static inline bool hf_model_open_whole(HfModel *model, const char *directory, Error *error) {
    char path[PATH_MAX];
    bool good = false;
    Error problem;
    memset(model, 0, sizeof *model);
    if (!file_sums_check(directory, error) || !path_within(path, directory, "config.json", error) ||
        !model_config_load(path, &model->config, error)) {
        return false;
    }
    parameter_table_make(&model->config, &model->table);
    model->sources = MEMORY_OF(const SafetensorsEntry *, model->table.count);
    if (hf_model_has(directory, "model.safetensors")) {
        good = hf_model_add_file(model, directory, "model.safetensors", error) >= 0;
    } else if (hf_model_has(directory, "model.safetensors.index.json")) {
        good = hf_model_open_shards(model, directory, error);
    } else if (hf_model_has(directory, ADAPTERS_CONFIG)) {
        error_set(error, "%.300s holds adapters, too, and no model: merge them by export --to DIRECTORY",
                  directory);
    } else {
        error_set(
            error,
            "%.300s has no model.safetensors, nor shards with an index. A pytorch_model.bin is converted "
            "in Python by transformers' AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT)",
            directory);
    }
    if (good && !hf_model_match(model, &problem)) {
        good = error_set(error, "%.150s does not hold the model of its config.json: %.800s", directory,
                         problem.text);
    }
    if (!good) { hf_model_close(model); }
    return good;
}

#define HF_MODEL_GIVE \
    "a directory with config.json and model.safetensors, a checkpoint, or a run that has one"

// Whether `directory`, which --from or --finetune names, may hold a model.
static inline bool hf_model_check_directory(const char *directory, Error *error) {
    char excerpt[64];
    struct stat status;
    if (directory[0] == '\0') { return error_set(error, "give --from DIR, " HF_MODEL_GIVE); }
    if (stat(directory, &status) == 0) {
        // The config.json of a run is another one.
        if (hf_model_has(directory, "run.tsv") && !hf_model_has(directory, "model.safetensors")) {
            return error_set(error, "%.300s is a run without a checkpoint: give " HF_MODEL_GIVE, directory);
        }
        return hf_model_has(directory, "config.json") || hf_model_has(directory, ADAPTERS_CONFIG) ||
               error_set(
                   error,
                   "%.300s is no directory with a config.json, and no checkpoint either: give " HF_MODEL_GIVE,
                   directory);
    }
    int reason = errno;
    text_excerpt(directory, excerpt);
    if (model_preset_find(directory) != NULL) {
        return error_set(
            error, "there is no directory %s: to train the preset %s from random parameters, give --model %s",
            excerpt, excerpt, excerpt);
    }
    return error_set(error,
                     "%s is neither a directory (%s) nor the name of a preset; a model of the hub must be "
                     "downloaded first",
                     excerpt, strerror(reason));
}

// Opens the model in `directory`, and checks that its files are as they were written and hold
// exactly the tensors of its configuration. On failure there is nothing to close.
static inline bool hf_model_open(HfModel *model, const char *directory, Error *error) {
    if (!hf_model_check_directory(directory, error)) { return false; }
    if (!hf_model_has(directory, ADAPTERS_CONFIG)) { return hf_model_open_whole(model, directory, error); }
    Adapters adapters = {.rank = 0};
    char base[PATH_MAX];
    if (!file_sums_check(directory, error) || !adapters_read_config(directory, &adapters, base, error)) {
        return false;
    }
    if (!hf_model_has(base, "config.json")) {
        return error_set(error,
                         "%.300s holds adapters of %.300s, which is no directory of a model here: download "
                         "it, and write its path into base_model_name_or_path of %s",
                         directory, base, ADAPTERS_CONFIG);
    }
    if (!hf_model_open_whole(model, base, error)) {
        Error reason = *error;
        return error_set(error, "%.300s holds adapters of %.300s: %.800s", directory, base, reason.text);
    }
    bool good = adapters_open(&adapters, directory, &model->table, error);
    model->adapters = adapters;
    if (!good) { hf_model_close(model); }
    return good;
}

// Fills the tensor `out`, of table.entries[i].
static inline void hf_model_read_tensor(const HfModel *model, int i, float *out) {
    const ParameterInfo *info = &model->table.entries[i];
    float part[HF_MODEL_PART];
    size_t rows = (size_t)info->rows, columns = (size_t)info->columns;
    if (!info->is_transposed) { safetensors_read_floats(model->sources[i], 0, info->count, out); }
    for (size_t place = 0, count; info->is_transposed && place < info->count; place += count) {
        count = size_min(HF_MODEL_PART, rows - place % rows);
        safetensors_read_floats(model->sources[i], place, count, part);
        for (size_t j = 0; j < count; j++) { out[(place % rows + j) * columns + place / rows] = part[j]; }
    }
    if (model->adapters.entries != NULL) { adapters_apply(&model->adapters, info, i, out); }
}

// Fills parameters (table.parameter_count), on the host.
static inline void hf_model_read(const HfModel *model, float *parameters) {
    for (int i = 0; i < model->table.count; i++) {
        hf_model_read_tensor(model, i, parameters + model->table.entries[i].offset);
    }
}

// The whole model (part->model.parameter_count), for the caller to free: `trained`
// (part->table.parameter_count) for what was trained, the frozen tensors from `model`.
static inline float *hf_model_complete(const HfModel *model, const TrainedPart *part, const float *trained) {
    float *out = MEMORY_OF(float, part->model.parameter_count);
    for (int i = 0; i < part->model.count; i++) {
        const ParameterInfo *info = &part->model.entries[i];
        const TensorPlace *place = &part->places[i];
        const float *from = trained + place->trained;
        float *to = out + info->offset;
        if (place->kind == TRAINED_WHOLE) {
            memcpy(to, from, info->count * sizeof(float));
        } else {
            hf_model_read_tensor(model, i, to);
        }
        if (place->kind == TRAINED_ADAPTED) {
            adapters_merge(to, from, from + (size_t)part->rank * info->columns, info->rows, info->columns,
                           part->rank, part->scale);
        }
    }
    return out;
}

// ---- Writing: the tokenizer -----------------------------------------------------------

// Copies one file. True: the copy is on disk.
static inline bool hf_model_copy_file(const char *from, const char *to, Error *error) {
    char block[1 << 16];
    ssize_t count = 1;
    int input = open(from, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // opening a pipe must not wait
    if (input < 0) { return error_set_file(error, "read", from); }
    int output = open(to, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    bool written = output >= 0;
    while (written && (count = read(input, block, sizeof block)) > 0) {
        written = file_write_all(output, block, (size_t)count, FILE_POSITION);
    }
    int reason = errno;
    bool good = output >= 0 ? file_finish(output, to, written, error) : error_set_file(error, "write", to);
    close(input);
    errno = reason;
    return count >= 0 ? good : error_set_file(error, "read", from);
}

// Where the file `name` of a tokenizer is; false: nowhere. from: its directory, the tokenizer.json
// in it, or such a file of another name, alone.
static inline bool hf_model_find_tokenizer(const char *from, const char *name, char path[PATH_MAX]) {
    struct stat status;
    const char *slash = strrchr(from, '/'), *last = slash != NULL ? slash + 1 : from;
    bool is_file = stat(from, &status) == 0 && !S_ISDIR(status.st_mode);
    if (is_file && strcmp(last, "tokenizer.json") != 0) {
        return snprintf(path, PATH_MAX, "%s", from) < PATH_MAX && strcmp(name, "tokenizer.json") == 0;
    }
    int length = is_file ? (int)(last - from) : (int)strlen(from);
    const char *between = is_file ? "" : "/";
    return snprintf(path, PATH_MAX, "%.*s%s%s", length, from, between, name) < PATH_MAX &&
           stat(path, &status) == 0;
}

// Copies the files of such a tokenizer, and how transformers is to generate with it.
static inline bool hf_model_copy_tokenizer(const char *from, const char *to, Error *error) {
    static const char *const names[] = {"tokenizer.json",
                                        "tokenizer_config.json",
                                        "tokenizer.model",
                                        "vocab.json",
                                        "merges.txt",
                                        "added_tokens.json",
                                        "special_tokens_map.json",
                                        "generation_config.json",
                                        "chat_template.jinja",
                                        "chat.json"};
    char source[PATH_MAX], target[PATH_MAX];
    bool good = true;
    for (size_t i = 0; good && i < sizeof names / sizeof names[0]; i++) {
        good = !hf_model_find_tokenizer(from, names[i], source) ||
               (path_within(target, to, names[i], error) && hf_model_copy_file(source, target, error));
    }
    return good;
}

static inline bool is_id_below(const json_t *item, int vocabulary) {
    return json_is_integer(item) && json_integer_value(item) >= 0 && json_integer_value(item) < vocabulary;
}

// The id of the token that has a role such as "eos_token" in the tokenizer at `from`, or else in
// the config.json beside it, which may have a list of them; null: it is unknown, or `from` is NULL.
// Ids are in tokenizer.json, or else in vocab.json; where there is neither (but a tokenizer.model),
// in that config.json.
static inline json_t *hf_model_special_ids(const char *from, const char *role, int vocabulary) {
    static const char *const names[4] = {"tokenizer_config.json", "config.json", "tokenizer.json",
                                         "vocab.json"};
    json_t *files[4] = {NULL, NULL, NULL, NULL}; // NULL: it is not there, or is no JSON
    char path[PATH_MAX], key[32];
    for (int i = 0; from != NULL && i < 4; i++) {
        if (!hf_model_find_tokenizer(from, names[i], path)) { continue; }
        files[i] = json_file_load(path, i == 0 ? JSON_ANY_INTEGERS : JSON_ALLOW_NUL, NULL);
    }
    snprintf(key, sizeof key, "%.20s_id", role);
    const json_t *token = json_object_get(files[0], role);
    const char *content =
        json_string_value(json_is_object(token) ? json_object_get(token, "content") : token);
    bool named = content != NULL && (files[2] != NULL || files[3] != NULL);
    const json_t *item = named ? json_object_get(files[3], content) : json_object_get(files[1], key);
    const json_t *added = content != NULL ? json_object_get(files[2], "added_tokens") : NULL;
    for (size_t i = json_array_size(added); i-- > 0;) { // the first one counts
        const json_t *entry = json_array_get(added, i);
        const char *spelling = json_text(entry, "content");
        if (spelling != NULL && strcmp(spelling, content) == 0) { item = json_object_get(entry, "id"); }
    }
    json_t *list = json_array();
    for (size_t i = 0; i < json_array_size(item); i++) {
        json_t *id = json_array_get(item, i);
        if (is_id_below(id, vocabulary)) { json_array_append(list, id); }
    }
    json_t *ids = json_array_size(list) > 0       ? json_incref(list)
                  : is_id_below(item, vocabulary) ? json_integer(json_integer_value(item))
                                                  : json_null();
    json_decref(list);
    for (int i = 0; i < 4; i++) { json_decref(files[i]); }
    return ids;
}

// The same as a number, the first of a list; -1: it is unknown.
static inline int hf_model_special_id(const char *from, const char *role, int vocabulary) {
    json_t *ids = hf_model_special_ids(from, role, vocabulary);
    const json_t *first = json_is_array(ids) ? json_array_get(ids, 0) : ids;
    int id = json_is_integer(first) ? (int)json_integer_value(first) : -1;
    json_decref(ids);
    return id;
}

// ---- Writing: the configuration -------------------------------------------------------

// config.json: everything that transformers asks for. tokenizer: the directory of the
// tokenizer, or NULL.
static inline json_t *hf_model_describe(const ModelConfig *config, const char *tokenizer) {
    static const char *const roles[2] = {"bos_token", "eos_token"};
    // "torch_dtype" is its name until transformers 4.55, "dtype" since.
    json_t *root =
        json_pack("{s:[s], s:s, s:s, s:s}", "architectures", config->family->architecture, "model_type",
                  config->family->name, "torch_dtype", "float32", "dtype", "float32");
    for (int i = 0; i < 2; i++) {
        char key[32];
        snprintf(key, sizeof key, "%s_id", roles[i]);
        json_object_set_new(root, key, hf_model_special_ids(tokenizer, roles[i], config->vocabulary));
    }
    json_t *sizes = config_json_write(config);
    json_object_update(root, sizes);
    json_decref(sizes);
    return root;
}

// ---- Writing: the weights, and the whole directory ------------------------------------

// Writes the file `name` into `directory`; *sum gets its CRC-32. prefix: of all names of
// tensors, which lie in the file as in the table. parameters (table->parameter_count), on
// the host.
static inline bool hf_model_write_weights(const char *directory, const char *name, const char *prefix,
                                          const ParameterTable *table, const float *parameters, uint32_t *sum,
                                          Error *error) {
    char path[PATH_MAX], tensor[128];
    SafetensorsPlan plan = {
        .tensors = json_pack("{s:{s:s}}", "__metadata__", "format", "pt")}; // transformers insists
    for (int i = 0; i < table->count; i++) {
        size_t shape[2];
        const ParameterInfo *info = &table->entries[i];
        int dimensions = hf_model_shape(info, info->is_transposed, shape);
        snprintf(tensor, sizeof tensor, "%s%s", prefix, info->name);
        safetensors_plan_add(&plan, tensor, SAFETENSORS_F32, dimensions, shape);
    }
    safetensors_plan_finish(&plan);
    bool created = path_within(path, directory, name, error) && safetensors_create(path, &plan, error);
    int descriptor = created ? safetensors_join(path, &plan, error) : -1;
    bool good = descriptor >= 0;
    *sum = (uint32_t)crc32_z(0, (const Bytef *)plan.header, plan.header_bytes);
    for (int i = 0; i < table->count && good; i++) {
        const ParameterInfo *info = &table->entries[i];
        size_t rows = (size_t)info->rows, bytes = info->count * sizeof(float),
               place = plan.header_bytes + info->offset * sizeof(float);
        const float *values = parameters + info->offset;
        float *turned = info->is_transposed ? MEMORY_OF(float, info->count) : NULL;
        for (size_t j = 0; turned != NULL && j < info->count; j++) {
            turned[j] = values[j % rows * (size_t)info->columns + j / rows];
        }
        if (turned != NULL) { values = turned; }
        good = file_write_all(descriptor, values, bytes, (off_t)place);
        *sum = (uint32_t)crc32_z(*sum, (const Bytef *)values, bytes);
        free(turned);
    }
    if (descriptor >= 0) { good = file_finish(descriptor, path, good, error); }
    safetensors_plan_free(&plan);
    return good;
}

// If `directory` is a checkpoint, changes it to the directory of the model in that
// checkpoint. `directory` has room for `capacity` bytes.
static inline void hf_model_find(char *directory, size_t capacity) {
    bool inside = directory[0] != '\0' && !hf_model_has(directory, "config.json") &&
                  hf_model_has(directory, "model/config.json");
    if (inside && strlen(directory) + sizeof "/model" <= capacity) { strcat(directory, "/model"); }
}

// Writes a model that transformers' from_pretrained loads; or, with `adapters`, only these, which
// peft's loads onto the model in `base`. parameters (table->parameter_count): on the host.
// tokenizer: its directory or tokenizer.json, or NULL. `directory` must not exist. True: all of it
// but its name is on disk. On failure the caller removes what there is.
static inline bool hf_model_save(const char *directory, const ModelConfig *config,
                                 const ParameterTable *table, const float *parameters, const char *tokenizer,
                                 const TrainedPart *adapters, const char *base, Error *error) {
    uint32_t sum;
    bool adapts = adapters != NULL;
    const char *name = adapts ? ADAPTERS_WEIGHTS : "model.safetensors";
    if (mkdir(directory, 0777) != 0) { return error_set_file(error, "create the directory", directory); }
    return json_write(hf_model_describe(config, tokenizer), directory, "config.json",
                      JSON_INDENT(2) | JSON_REAL_PRECISION(9), error) &&
           (tokenizer == NULL || hf_model_copy_tokenizer(tokenizer, directory, error)) &&
           (!adapts || adapters_write_config(directory, adapters, base, error)) &&
           hf_model_write_weights(directory, name, adapts ? ADAPTERS_PREFIX : "", table, parameters, &sum,
                                  error) &&
           file_sums_write(directory, name, sum, error) && path_sync(directory, error);
}

// The same where only a part of the model is trained; trained (part->table.parameter_count), on
// the host. base: what is frozen, and its directory.
static inline bool hf_model_save_trained(const char *directory, const ModelConfig *config,
                                         const TrainedPart *part, const float *trained, const HfModel *base,
                                         const char *base_directory, const char *tokenizer, Error *error) {
    const TrainedPart *adapters = part->rank > 0 ? part : NULL;
    if (part->frozen_count == 0 || adapters != NULL) {
        return hf_model_save(directory, config, &part->table, trained, tokenizer, adapters, base_directory,
                             error);
    }
    float *whole = hf_model_complete(base, part, trained);
    bool good = hf_model_save(directory, config, &part->model, whole, tokenizer, NULL, NULL, error);
    free(whole);
    return good;
}
