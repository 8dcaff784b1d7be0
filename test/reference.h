// reference.h: reads the files in test/reference that scripts in dev/reference have made.
// ACCO_REFERENCE names another directory.
#pragma once

#include <jansson.h>

#include "runtime/random.h"
#include "test/harness.h"

// A safetensors file, read whole.
typedef struct Tensors {
    char *bytes;
    json_t *header;
    const char *data;
} Tensors;

static inline Tensors tensors_open(const char *name) {
    Tensors tensors;
    char path[1024];
    const char *directory = getenv("ACCO_REFERENCE");
    snprintf(path, sizeof path, "%s/%s.safetensors", directory != NULL ? directory : "test/reference", name);
    FILE *file = fopen(path, "rb");
    if (file == NULL) { fail_msg("cannot open %s: run from the project's root", path); }
    fseek(file, 0, SEEK_END);
    size_t size = (size_t)ftell(file);
    rewind(file);
    tensors.bytes = (char *)malloc(size);
    assert_true(fread(tensors.bytes, 1, size, file) == size);
    fclose(file);
    uint64_t length;
    memcpy(&length, tensors.bytes, sizeof length);
    tensors.header = json_loadb(tensors.bytes + 8, (size_t)length, 0, NULL);
    assert_non_null(tensors.header);
    tensors.data = tensors.bytes + 8 + length;
    return tensors;
}

static inline void tensors_close(Tensors *tensors) {
    json_decref(tensors->header);
    free(tensors->bytes);
}

static inline const void *tensors_get(const Tensors *tensors, const char *name) {
    const json_t *offsets = json_object_get(json_object_get(tensors->header, name), "data_offsets");
    if (offsets == NULL) { fail_msg("the reference has no %s", name); }
    return tensors->data + json_integer_value(json_array_get(offsets, 0));
}

static inline const char *tensors_text(const Tensors *tensors, const char *key) {
    return json_string_value(json_object_get(json_object_get(tensors->header, "__metadata__"), key));
}

static inline double tensors_number(const Tensors *tensors, const char *key) {
    return atof(tensors_text(tensors, key));
}

// values (count) <- the numbers in [-scale, scale) that make_reference.py makes of a name.
static inline void reference_stream(const char *name, uint64_t seed, float scale, size_t count,
                                    float *values) {
    Random random = {UINT64_C(0xCBF29CE484222325)};
    for (const char *c = name; *c != '\0'; c++) {
        random.state = (random.state ^ (uint8_t)*c) * UINT64_C(0x100000001B3);
    }
    random.state ^= seed;
    for (size_t i = 0; i < count; i++) {
        values[i] = (float)((int)(random_bits(&random) >> 48) - 32768) / 32768.0f * scale;
    }
}
