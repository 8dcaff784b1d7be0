// trained.h: which part of a model is trained: all of it, all but frozen tensors, or
// low-rank matrices beside frozen ones (LoRA, arXiv 2106.09685).
//
//   trained    W x
//   frozen     W x
//   adapted    W x + alpha / r B (A x)    W frozen, A (r, inputs) and B (outputs, r) trained
//
// Scheduler, optimizer, wires and checkpoints know a vector of what is trained, and no
// other. The frozen tensors lie in a vector of their own, in the precision of the model.
// A TrainedPart says where each tensor of the model is; the model reads both vectors.
#pragma once

#include <fnmatch.h>

#include "models/model.h"
#include "runtime/names.h"

typedef enum TrainedKind { TRAINED_WHOLE, TRAINED_FROZEN, TRAINED_ADAPTED } TrainedKind;

typedef struct TensorPlace {
    TrainedKind kind;
    // Where it begins in the trained vector: the tensor; A, with B behind it; or, where
    // nothing of it is trained, the next one that is.
    size_t trained;
    size_t frozen; // in the frozen vector, unless the tensor is trained
} TensorPlace;

typedef struct TrainedPart {
    ParameterTable model; // every tensor
    ParameterTable table; // what is trained
    TensorPlace *places;  // (model.count)
    int rank;             // r; 0: there are no adapters
    double alpha;
    float scale;         // alpha / r
    size_t frozen_count; // 0: all is trained
    Real *frozen;        // (frozen_count), where kernels want them; model_reserve plans it
} TrainedPart;

// Patterns are lists with commas between them.
typedef struct TrainedChoice {
    const char *freeze;  // what is frozen; "": nothing
    const char *adapted; // what has adapters
    int rank;            // 0: no adapters; otherwise all tensors are frozen
    double alpha;
} TrainedChoice;

// model_flops_per_token of what is computed: a frozen matrix has no gradient of its own, and
// its adapter multiplies, too.
static inline double trained_flops_per_token(const TrainedPart *part, const ModelConfig *config, int T) {
    double flops = model_flops_per_token(config, &part->model, T);
    for (int i = 0; i < part->model.count; i++) {
        const ParameterInfo *entry = &part->model.entries[i];
        if (part->places[i].kind == TRAINED_WHOLE) { continue; }
        if (entry->is_projection || entry->is_head) { flops -= 2.0 * (double)entry->count; }
        if (part->places[i].kind == TRAINED_ADAPTED) {
            flops += 6.0 * part->rank * (entry->rows + entry->columns);
        }
    }
    return flops;
}

// The module of a tensor by the tensor's name, which may lack the family's prefix:
// h.0.mlp.c_fc, and c_fc.
typedef struct TrainedModule {
    char path[sizeof((ParameterInfo *)NULL)->name - sizeof ".lora_A.weight"];
    char word[32];
} TrainedModule;

static inline TrainedModule trained_module(const char *name) {
    TrainedModule module;
    const char *end = strrchr(name, '.');
    snprintf(module.path, sizeof module.path, "%.*s", end != NULL ? (int)(end - name) : 0, name);
    const char *point = strrchr(module.path, '.');
    snprintf(module.word, sizeof module.word, "%.31s", point != NULL ? point + 1 : module.path);
    return module;
}

enum { TRAINED_WORDS = 32 }; // that a hint is chosen from, at most

static inline bool trained_refuse_pattern(const TrainedPart *part, const char *option, const char *pattern,
                                          bool projections, Error *error) {
    TrainedModule modules[TRAINED_WORDS];
    const char *words[TRAINED_WORDS] = {NULL}, *example = "";
    char hint[NAME_HINT];
    int count = 0;
    for (int i = 0; i < part->model.count && count < TRAINED_WORDS; i++) {
        const ParameterInfo *entry = &part->model.entries[i];
        if (projections && !entry->is_projection) { continue; }
        if (count == 0) { example = entry->name + entry->prefix; }
        modules[count] = trained_module(entry->name + entry->prefix);
        words[count] = modules[count].word;
        count++;
    }
    return error_set(error, "--%s: no %s matches \"%.80s\"%s; names are such as %s", option,
                     projections ? "matrix of a layer" : "tensor of the model", pattern,
                     name_hint(pattern, words, count, hint), example);
}

// Whether a pattern of the shell (* ? [...]) means the tensor: by its name, h.0.mlp.c_fc.weight, by
// that of its module, h.0.mlp.c_fc, or by the end of one, c_fc.weight or c_fc.
static inline bool trained_is_meant(const char *pattern, const char *name) {
    for (const char *tail = name; strchr(tail, '.') != NULL; tail = strchr(tail, '.') + 1) {
        bool means = fnmatch(pattern, tail, 0) == 0 || fnmatch(pattern, trained_module(tail).path, 0) == 0;
        if (means) { return true; }
    }
    return false;
}

// Sets the kind of each tensor that a pattern of the list matches. Each must match one;
// projections: only matrices of layers count.
static inline bool trained_mark(TrainedPart *part, const char *option, const char *patterns, bool projections,
                                TrainedKind kind, Error *error) {
    char list[1024], *rest = list;
    assert(strlen(patterns) < sizeof list);
    snprintf(list, sizeof list, "%s", patterns);
    for (char *pattern; (pattern = strsep(&rest, ",")) != NULL;) {
        int matched = 0;
        for (int i = 0; i < part->model.count; i++) {
            const ParameterInfo *entry = &part->model.entries[i];
            bool counts = !projections || entry->is_projection;
            if (!counts || !trained_is_meant(pattern, entry->name + entry->prefix)) { continue; }
            part->places[i].kind = kind;
            matched++;
        }
        if (pattern[0] == '\0') {
            return error_set(error, "--%s \"%.80s\": a pattern is empty; take a comma away", option,
                             patterns);
        }
        if (matched == 0) { return trained_refuse_pattern(part, option, pattern, projections, error); }
    }
    return true;
}

// Lays out both vectors, in the order of the model, by the kinds of the places. An adapter's A
// begins as a Linear of PyTorch does, within +-1 / sqrt(inputs), and B at 0: so the model
// begins as it was.
static inline void trained_lay_out(TrainedPart *part) {
    ParameterTable *table = &part->table;
    const ParameterTable *model = &part->model;
    table->layers = model->layers;
    table->entries = MEMORY_OF(ParameterInfo, 2 * (size_t)model->count);
    for (int i = 0, layer = 0; i < model->count; i++) {
        const ParameterInfo *entry = &model->entries[i];
        TensorPlace *place = &part->places[i];
        if (layer <= model->layers && entry->offset == model->layer_begins[layer]) {
            table->layer_begins[layer++] = table->parameter_count;
        }
        place->trained = table->parameter_count;
        place->frozen = part->frozen_count;
        if (place->kind == TRAINED_WHOLE) {
            ParameterInfo *own = &table->entries[table->count++];
            *own = *entry;
            own->offset = place->trained;
            table->parameter_count += entry->count;
            continue;
        }
        part->frozen_count += entry->count;
        if (place->kind != TRAINED_ADAPTED) { continue; }
        TrainedModule module = trained_module(entry->name);
        ParameterInfo *a =
            parameter_table_add(table, module.path, ".lora_A.weight", part->rank, entry->columns, 0);
        a->uniform = 1.0f / sqrtf((float)entry->columns);
        parameter_table_add(table, module.path, ".lora_B.weight", entry->rows, part->rank, 0);
        a[0].is_projection = a[1].is_projection = true;
    }
}

static inline void trained_part_free(TrainedPart *part) {
    parameter_table_free(&part->model);
    parameter_table_free(&part->table);
    free(part->places);
    part->places = NULL;
}

// False with an error, and nothing to free: a pattern matches nothing, nothing is left to
// train, or the tensors of one matrix are not treated alike.
static inline bool trained_part_make(TrainedPart *part, const ModelConfig *config,
                                     const TrainedChoice *choice, Error *error) {
    memset(part, 0, sizeof *part);
    parameter_table_make(config, &part->model);
    part->places = MEMORY_OF(TensorPlace, part->model.count);
    part->rank = choice->rank;
    part->alpha = choice->alpha;
    part->scale = choice->rank > 0 ? (float)(choice->alpha / choice->rank) : 0;
    for (int i = 0; choice->rank > 0 && i < part->model.count; i++) { part->places[i].kind = TRAINED_FROZEN; }
    bool good = choice->rank > 0
                    ? trained_mark(part, "lora-on", choice->adapted, true, TRAINED_ADAPTED, error)
                    : choice->freeze[0] == '\0' ||
                          trained_mark(part, "freeze", choice->freeze, false, TRAINED_FROZEN, error);
    for (int i = 1; good && choice->rank == 0 && i < part->model.count; i++) {
        const ParameterInfo *entry = &part->model.entries[i], *before = entry - 1;
        if (!entry->joins_before || part->places[i].kind == part->places[i - 1].kind) { continue; }
        good = error_set(error, "--freeze: %s and %s are one matrix here: freeze both or neither",
                         before->name + before->prefix, entry->name + entry->prefix);
    }
    if (good) { trained_lay_out(part); }
    if (good && part->table.parameter_count == 0) {
        good = error_set(error, "--freeze %.80s leaves nothing to train", choice->freeze);
    }
    if (!good) { trained_part_free(part); }
    return good;
}
