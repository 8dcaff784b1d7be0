// export.h: train_gpt export, a model for other programs.
//
//     train_gpt export --from RUN --to mine.gguf      for llama.cpp, Ollama and LM Studio
//     train_gpt export --from RUN --to DIRECTORY      for transformers
//
// Adapters are merged; with --merge off they are a GGUF of their own, to be loaded onto a GGUF of
// their model. Beside a GGUF of a model lies mine.Modelfile, with which `ollama create` takes it.
// One process, on the host. A GGUF gets its name when it is whole.
#pragma once

#include "checkpoint/gguf_model.h"
#include "program/data.h"

typedef struct Export {
    const Options *options;
    const char *file;                    // the last part of --to
    char tokenizer[TOKENIZER_PATH_SIZE]; // a directory, or a tokenizer.json; empty: none
    HfModel model;
    Tokenizer codec;
    Chat chat;
    Gguf gguf;
    bool merges;    // the model with its adapters, else only these
    bool unwritten; // what failed is the disk
} Export;

// In the order of the words of --type.
static const struct {
    GgufType type;
    int file_type; // the format's own number
} export_types[] = {{GGUF_F32, 0}, {GGUF_F16, 1}, {GGUF_BF16, 32}, {GGUF_Q8_0, 7}};

enum { EXPORT_TYPE = 1 }; // the default, f16

// Names the tensors: all of the model, or A and B of each adapter. The positions stay fp32.
static inline void export_name_tensors(Export *task, GgufType type) {
    const ModelConfig *config = &task->model.config;
    const ParameterTable *table = &task->model.table;
    size_t rank = task->model.adapters.rank;
    char name[GGUF_NAME];
    for (int i = 0; i < table->count; i++) {
        const ParameterInfo *info = &table->entries[i];
        size_t rows = info->rows, columns = info->columns;
        if (task->merges) {
            gguf_name(config, info, "", name);
            gguf_add_tensor(&task->gguf, name, info->is_matrix ? rows : 0, info->is_matrix ? columns : rows,
                            info->role == TENSOR_POSITIONS ? GGUF_F32 : type);
        } else if (task->model.adapters.entries[2 * i] != NULL) {
            gguf_name(config, info, ".lora_a", name);
            gguf_add_tensor(&task->gguf, name, rank, columns, type);
            gguf_name(config, info, ".lora_b", name);
            gguf_add_tensor(&task->gguf, name, rows, rank, type);
        }
    }
}

// Writes the tensors in that order. values: room for the largest.
static inline bool export_write_tensors(Export *task, float *values, FILE *file, Error *error) {
    const HfModel *model = &task->model;
    const GgufTensor *tensor = task->gguf.tensors, *end = tensor + task->gguf.tensor_count;
    bool good = true;
    if (task->merges && gguf_factors(&model->config, values)) { gguf_write_tensor(tensor++, values, file); }
    for (int i = 0; i < model->table.count; i++) {
        const ParameterInfo *info = &model->table.entries[i];
        const SafetensorsEntry *const *sides = model->adapters.entries + (task->merges ? 0 : 2 * i);
        int parts = task->merges ? 1 : sides[0] != NULL ? 2 : 0;
        for (int side = 0; side < parts && good; side++, tensor++) {
            if (task->merges) {
                hf_model_read_tensor(model, i, values);
            } else {
                safetensors_read_floats(sides[side], 0, sides[side]->count, values);
            }
            if (task->merges || side == 1) {
                gguf_order_rows(&model->config, info, values, tensor->rows > 0 ? tensor->columns : 1);
            }
            good = gguf_write_tensor(tensor, values, file) ||
                   error_set(error, "%s has a number that this --type cannot hold: choose f32", tensor->name);
            task->unwritten = ferror(file) != 0;
            good = good && (!task->unwritten || error_set_file(error, "write", task->options->to));
        }
    }
    assert(!good || tensor == end);
    return good;
}

// The keys and names of all that the file will hold.
static inline bool export_plan(Export *task, Error *error) {
    const ModelConfig *config = &task->model.config;
    const Options *options = task->options;
    Gguf *gguf = &task->gguf;
    char name[sizeof(OptionText)];
    gguf_begin_keys(gguf);
    gguf_add_text(gguf, "general.architecture", config->family->gguf);
    gguf_add_text(gguf, "general.type", task->merges ? "model" : "adapter");
    snprintf(name, sizeof name, "%.*s", (int)(strlen(task->file) - strlen(".gguf")), task->file);
    gguf_add_text(gguf, "general.name", name);
    gguf_add_number(gguf, "general.file_type", export_types[options->type].file_type);
    gguf_add_number(gguf, "general.quantization_version", 2);
    if (task->merges) {
        float *factors = MEMORY_OF(float, model_head_size(config));
        gguf_add_config(gguf, config);
        if (gguf_factors(config, factors)) {
            gguf_add_tensor(gguf, "rope_freqs.weight", 0, (size_t)model_head_size(config) / 2, GGUF_F32);
        }
        free(factors);
    } else {
        const Adapters *adapters = &task->model.adapters;
        gguf_add_text(gguf, "adapter.type", "lora");
        gguf_add_real(gguf, "adapter.lora.alpha", (double)adapters->scale * adapters->rank);
    }
    export_name_tensors(task, export_types[options->type].type);
    return !task->merges ||
           gguf_add_tokenizer(gguf, task->tokenizer, config, &task->codec, &task->chat, error);
}

// The words of a template in Go, and behind them a text of the chat: {{ "..." }}.
static inline void modelfile_add(FILE *file, const char *words, const char *text) {
    json_t *value = json_string(text);
    char *quoted = json_dumps(value, JSON_ENCODE_ANY);
    fprintf(file, "%s{{ %s }}", words, quoted);
    free(quoted);
    json_decref(value);
}

// The chat's texts around what is said, as chat_text puts them; without a chat a text goes on. The
// token in front of a text is left out: who loads the model puts it there.
static inline void modelfile_template(const Chat *chat, const Tokenizer *tokenizer, FILE *file) {
    const AddedToken *begin = tokenizer_added(tokenizer, NULL, tokenizer->begin);
    fputs("TEMPLATE \"\"\"", file);
    if (chat->root == NULL) {
        fputs("{{ .Prompt }}\"\"\"\n", file);
        return;
    }
    const char *starts[2] = {chat->first[0], chat->system[0]};
    for (int i = 0; i < 2 && begin != NULL; i++) {
        bool begins = starts[i] != NULL && strncmp(starts[i], begin->text, begin->length) == 0;
        if (begins) { starts[i] += begin->length; }
    }
    modelfile_add(file,
                  "{{- $system := \"\" }}{{- $begun := false }}{{- range .Messages }}"
                  "{{- if eq .Role \"system\" }}{{- $system = .Content }}"
                  "{{- else if eq .Role \"assistant\" }}{{ .Content }}{{- else }}{{- if $begun }}",
                  chat->next[0]);
    modelfile_add(file, "{{ .Content }}", chat->next[1]);
    if (chat->system[0] != NULL) {
        modelfile_add(file, "{{- else if $system }}", starts[1]);
        modelfile_add(file, "{{ $system }}", chat->system[1]);
        modelfile_add(file, "{{ .Content }}", chat->system[2]);
    }
    modelfile_add(file, "{{- else }}", starts[0]);
    modelfile_add(file, "{{ .Content }}", chat->first[1]);
    fputs("{{- end }}{{- $begun = true }}{{- end }}{{- end }}", file);
    if (chat->thought != NULL) { modelfile_add(file, "", chat->thought); }
    fputs("\"\"\"\n", file);
}

// path: of the GGUF.
static inline bool export_modelfile(const Export *task, const char *path, Error *error) {
    const Options *options = task->options;
    const char *system = options->system;
    FILE *file = file_replace_begin(path, error);
    if (file == NULL) { return false; }
    fprintf(file, "FROM ./%s\n", task->file);
    modelfile_template(&task->chat, &task->codec, file);
    if (task->chat.root != NULL) {
        const AddedToken *end = tokenizer_added(&task->codec, NULL, task->chat.end);
        fprintf(file, "PARAMETER stop \"%s\"\n", end->text);
    }
    if (system[0] != '\0') { fprintf(file, "SYSTEM \"\"\"%s\"\"\"\n", system); }
    return file_replace_end(file, path, true, error);
}

static inline bool export_gguf(Export *task, Error *error) {
    const Options *options = task->options;
    const ParameterTable *table = &task->model.table;
    size_t largest = model_head_size(&task->model.config);
    bool good = gguf_accept(&task->model.config, error);
    if (good && task->merges && task->tokenizer[0] == '\0') {
        good = error_set(error, "%.300s has no tokenizer.json, which a GGUF needs: name one with --tokenizer",
                         options->from);
    }
    good = good && (!task->merges || (tokenizer_open(&task->codec, task->tokenizer, error) &&
                                      chat_open(&task->chat, task->tokenizer, &task->codec, error)));
    if (good && options->system[0] != '\0' &&
        (task->chat.system[0] == NULL || strstr(options->system, "\"\"\""))) {
        good = error_set(
            error, "--system needs a model, not adapters alone, with a chat.json beside its tokenizer "
                   "(python -m tokenizer.chat) whose chat takes a system text, and no \"\"\" in the text");
    }
    good = good && export_plan(task, error);
    FILE *file = good ? file_replace_begin(options->to, error) : NULL;
    if (file == NULL) { return false; }
    errno = 0;
    for (int i = 0; i < 2 * table->count; i++) {
        const SafetensorsEntry *side = task->merges ? NULL : task->model.adapters.entries[i];
        largest = size_max(largest, side != NULL ? side->count : table->entries[i / 2].count);
    }
    float *values = MEMORY_OF(float, largest);
    gguf_write_head(&task->gguf, file);
    good = export_write_tensors(task, values, file, error);
    free(values);
    Error why = *error; // of what was not written
    bool ended = file_replace_end(file, options->to, good, error);
    task->unwritten |= good && !ended;
    if (!good) { *error = why; }
    return good && ended;
}

// The programs that take it, and how.
static inline void export_tell(const Export *task, const char *modelfile) {
    char word[4 * sizeof(OptionText)], second[4 * sizeof(OptionText) + 64];
    text_for_shell(task->options->to, word, sizeof word);
    printf("written    %s\n", task->options->to);
    if (task->merges) {
        printf("written    %s\nllama.cpp  llama-cli -m %s\n", modelfile, word);
        printf("Ollama     ollama create NAME -f %s && ollama run NAME\n",
               text_for_shell(modelfile, second, sizeof second));
    } else {
        printf("llama.cpp  llama-cli -m MODEL.gguf --lora %s; MODEL.gguf: its model, exported, too\n", word);
    }
}

// Whether a file can be written here: what is known before minutes of work.
static inline bool export_check_target(const char *path, Error *error) {
    struct stat status;
    int reason = stat(path, &status) != 0 ? errno : S_ISDIR(status.st_mode) ? EISDIR : 0;
    errno = reason;
    return reason == 0 || reason == ENOENT || error_set_file(error, "write", path);
}

// Whether the options fit each other and what is there. modelfile: its path, or empty.
static inline bool export_check(const Options *options, const HfModel *model, const char *modelfile,
                                Error *error) {
    bool is_gguf = modelfile[0] != '\0', adapts = model->adapters.entries != NULL;
    for (const char *c = options->to; *c != '\0'; c++) {
        if ((unsigned char)*c >= 32 && *c != 127) { continue; }
        return error_set(error, "--to has a control character in it, which a Modelfile cannot have");
    }
    if (!options->merge && (!is_gguf || !adapts || !(model->adapters.scale != 0))) {
        return error_set(error,
                         "--merge off writes adapters as a GGUF: --from must have some, with an alpha that "
                         "is not 0, and --to must end with .gguf");
    }
    if (!is_gguf && (options->type != EXPORT_TYPE || options->system[0] != '\0')) {
        return error_set(error, "--type and --system are for a GGUF, and --to does not end with .gguf");
    }
    return !is_gguf || (export_check_target(options->to, error) && export_check_target(modelfile, error));
}

// options->from: the model that find_models has found. Returns the exit status.
static inline int command_export(const Options *options) {
    Error error = {""};
    Export task = {.options = options, .merges = options->merge};
    char modelfile[sizeof(OptionText) + 16] = "";
    size_t length = strlen(options->to), ending = strlen(".gguf");
    bool is_gguf = length > ending && strcasecmp(options->to + length - ending, ".gguf") == 0;
    if (is_gguf) {
        snprintf(modelfile, sizeof modelfile, "%.*s.Modelfile", (int)(length - ending), options->to);
    }
    const char *slash = strrchr(options->to, '/');
    task.file = slash != NULL ? slash + 1 : options->to;
    tokenizer_path(options, task.tokenizer);
    bool good = length > 0 || error_set(&error, "export needs --to FILE.gguf, or --to DIRECTORY");
    good = good && hf_model_open(&task.model, options->from, &error);
    const HfModel *model = &task.model;
    good = good && export_check(options, model, modelfile, &error);
    if (good && !is_gguf && options->tokenizer[0] != '\0') {
        good = tokenizer_open(&task.codec, task.tokenizer, &error);
    }
    if (good && is_gguf) {
        good = export_gguf(&task, &error);
        task.unwritten |= good && task.merges && !export_modelfile(&task, modelfile, &error);
        good = good && !task.unwritten;
        if (good) { export_tell(&task, modelfile); }
    } else if (good && (mkdir(options->to, 0777) != 0 || rmdir(options->to) != 0)) {
        good = error_set_file(&error, "create the directory", options->to);
    } else if (good) {
        float *parameters = MEMORY_OF(float, model->table.parameter_count);
        hf_model_read(model, parameters);
        // Without a tokenizer.json the model may have other files of one, and ids in config.json.
        good = hf_model_save(options->to, &model->config, &model->table, parameters,
                             task.tokenizer[0] != '\0' ? task.tokenizer : options->from, NULL, NULL, &error);
        free(parameters);
        if (!good) { tree_remove(options->to); }
        task.unwritten = !good;
        if (good) { printf("written    %s; transformers and --from take it\n", options->to); }
    }
    if (!good) { exit_alone(task.unwritten ? EXIT_SYSTEM_FAILURE : EXIT_USER_MISTAKE, &error); }
    gguf_close(&task.gguf);
    json_decref(task.chat.root);
    tokenizer_close(&task.codec);
    hf_model_close(&task.model);
    return 0;
}
