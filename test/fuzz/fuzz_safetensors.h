// fuzz_safetensors.h: a safetensors file. In what is accepted every tensor lies inside
// the file and is as large as its shape says, and each byte of the data belongs to one of
// them. All can be read as floats, and can be written and read again.
#pragma once

#include "checkpoint/safetensors.h"
#include "test/fuzz/fuzz.h"

static inline void fuzz_safetensors_entry(const SafetensorsFile *file, const SafetensorsEntry *entry) {
    size_t count = 1, width = SAFETENSORS_INFO[entry->type].bytes;
    for (int i = 0; i < entry->dimensions; i++) { count *= entry->shape[i]; }
    fuzz_require(entry->count == count && entry->bytes == count * width,
                 "a tensor has as many bytes as its shape says");
    fuzz_require(entry->data >= file->bytes + 8 &&
                     entry->bytes <= (size_t)(file->bytes + file->size - entry->data),
                 "a tensor lies inside the file");
    fuzz_require(safetensors_find(file, entry->name) == entry, "a tensor is found by its name");
    fuzz_touch(entry->data, entry->bytes);
    if (!safetensors_is_real(entry->type)) { return; }
    float *values = (float *)malloc((count + 1) * sizeof *values);
    fuzz_require(values != NULL, "no tensor is much larger than the file");
    safetensors_read_floats(entry, 0, count, values);
    safetensors_read_floats(entry, count / 2, count - count / 2, values);
    free(values);
}

static inline void fuzz_safetensors_places(const SafetensorsFile *file, size_t data_begin) {
    uint8_t *owners = (uint8_t *)calloc(file->size + 1, 1);
    fuzz_require(owners != NULL, "there is memory as large as the file");
    for (size_t i = 0; i < file->count; i++) {
        for (size_t k = 0; k < file->entries[i].bytes; k++) {
            owners[file->entries[i].data - file->bytes + k]++;
        }
    }
    for (size_t i = 0; i < file->size; i++) {
        fuzz_require(owners[i] == (i >= data_begin), "every byte of the data belongs to one tensor");
    }
    free(owners);
}

static inline bool fuzz_safetensors_same(const SafetensorsEntry *a, const SafetensorsEntry *b) {
    return strcmp(a->name, b->name) == 0 && a->type == b->type &&
           safetensors_has_shape(a, b->dimensions, b->shape);
}

// A plan of the same tensors makes a header that is read as the same tensors.
static inline void fuzz_safetensors_again(const SafetensorsFile *file) {
    SafetensorsPlan plan;
    SafetensorsFile again;
    Error error = {""};
    plan = (SafetensorsPlan){.tensors = json_object()};
    for (size_t i = 0; i < file->count; i++) {
        const SafetensorsEntry *entry = &file->entries[i];
        safetensors_plan_add(&plan, entry->name, entry->type, entry->dimensions, entry->shape);
    }
    safetensors_plan_finish(&plan);
    uint8_t *bytes = (uint8_t *)calloc(plan.file_bytes, 1);
    fuzz_require(bytes != NULL, "a file written again is not much larger");
    memcpy(bytes, plan.header, plan.header_bytes);
    fuzz_require(safetensors_open_memory(&again, bytes, plan.file_bytes, "again", &error),
                 "what is written can be read");
    fuzz_require(again.count == file->count, "all tensors are written");
    for (size_t i = 0; i < again.count; i++) {
        const SafetensorsEntry *entry = safetensors_find(file, again.entries[i].name);
        fuzz_require(entry != NULL && fuzz_safetensors_same(entry, &again.entries[i]),
                     "a tensor is written as it was read");
    }
    safetensors_close(&again);
    safetensors_plan_free(&plan);
    free(bytes);
}

static inline bool fuzz_safetensors(const uint8_t *data, size_t size) {
    SafetensorsFile file;
    Error error = {""};
    uint64_t header = 0;
    if (!fuzz_accepted(safetensors_open_memory(&file, data, size, "input.safetensors", &error), &error)) {
        return false;
    }
    for (int i = 7; i >= 0; i--) { header = header << 8 | data[i]; }
    for (size_t i = 0; i < file.count; i++) { fuzz_safetensors_entry(&file, &file.entries[i]); }
    fuzz_safetensors_places(&file, 8 + (size_t)header);
    fuzz_safetensors_again(&file);
    safetensors_close(&file);
    return true;
}
