// safetensors.h: reads and writes files of named tensors.
//
// The format: 8 bytes little-endian N, N bytes of JSON, then the data.
//
//     {"__metadata__": {KEY: TEXT, ...},
//      NAME: {"dtype": "F32", "shape": [2, 3], "data_offsets": [BEGIN, END]}, ...}
//
// Offsets count from the end of the JSON, which may be padded with spaces. Every byte of the data
// belongs to exactly one tensor. Elements are little-endian, as the machine must be.
//
// Reading: the bytes may be anything. In a file that has been opened, every tensor has the size
// that its type and shape say. Data may lie at any address, because old files have headers of odd
// lengths: so elements are copied, never pointed to.
//
// Writing: a plan determines every byte but the data. One process creates the file; then any number
// of processes with the same plan join and write the parts that they own. The file is whole when
// file_finish has returned in all of them; until then no reader may look for its name.
#pragma once

#include <jansson.h>

#include "kernels/wire.h"
#include "runtime/files.h"

// Every type once: its name and the bytes of an element.
#define SAFETENSORS_TYPES(TYPE) \
    TYPE(BOOL, 1), TYPE(U8, 1), TYPE(I8, 1), TYPE(F8_E4M3, 1), TYPE(F8_E5M2, 1), TYPE(U16, 2), TYPE(I16, 2), \
        TYPE(F16, 2), TYPE(BF16, 2), TYPE(U32, 4), TYPE(I32, 4), TYPE(F32, 4), TYPE(U64, 8), TYPE(I64, 8), \
        TYPE(F64, 8)
#define SAFETENSORS_NUMBER(name, bytes) SAFETENSORS_##name
#define SAFETENSORS_ROW(name, bytes) \
    { #name, bytes }

typedef enum SafetensorsType {
    SAFETENSORS_TYPES(SAFETENSORS_NUMBER),
    SAFETENSORS_TYPE_COUNT
} SafetensorsType;

enum {
    SAFETENSORS_MAX_DIMENSIONS = 8,
    SAFETENSORS_MAX_HEADER = 100000000, // bytes; the limit of the format's own library
    SAFETENSORS_PATH_SIZE = 304         // of a path in messages; longer ones are cut
};

static const struct {
    const char *name;
    size_t bytes; // of an element
} SAFETENSORS_INFO[] = {SAFETENSORS_TYPES(SAFETENSORS_ROW)};

// ---- Reading --------------------------------------------------------------------------

typedef struct SafetensorsEntry {
    const char *name; // no control characters in it
    SafetensorsType type;
    int dimensions;
    size_t shape[SAFETENSORS_MAX_DIMENSIONS];
    size_t count;        // elements; 0 is possible
    const uint8_t *data; // (bytes)
    size_t bytes;
} SafetensorsEntry;

typedef struct SafetensorsFile {
    char path[SAFETENSORS_PATH_SIZE]; // for messages
    const uint8_t *bytes;             // (size), the whole file
    size_t size;
    bool mapped;               // `bytes` are a mapping, for safetensors_close to end
    json_t *header;            // owns names and metadata
    SafetensorsEntry *entries; // (count), sorted by name
    size_t count;
} SafetensorsFile;

static inline bool safetensors_read_shape(const SafetensorsFile *file, const json_t *shape,
                                          SafetensorsEntry *entry, Error *error) {
    bool good = json_is_array(shape) && json_array_size(shape) <= SAFETENSORS_MAX_DIMENSIONS;
    bool overflow = false;
    entry->dimensions = good ? (int)json_array_size(shape) : 0;
    entry->count = 1;
    for (int i = 0; i < entry->dimensions; i++) {
        const json_t *size = json_array_get(shape, (size_t)i);
        good = good && json_is_integer(size) && json_integer_value(size) >= 0;
        entry->shape[i] = (size_t)json_integer_value(size);
        overflow |= __builtin_mul_overflow(entry->count, entry->shape[i], &entry->count);
    }
    overflow |= __builtin_mul_overflow(entry->count, SAFETENSORS_INFO[entry->type].bytes, &entry->bytes);
    return (good && !overflow) || error_set(error,
                                            "%s: the \"shape\" of tensor %.80s must be a list of at most %d "
                                            "whole numbers from 0 on, and not larger than any memory",
                                            file->path, entry->name, (int)SAFETENSORS_MAX_DIMENSIONS);
}

// Checks and fills in the entry of a tensor. data (data_size): all behind the header.
static inline bool safetensors_read_entry(const SafetensorsFile *file, const char *name, const json_t *item,
                                          const uint8_t *data, size_t data_size, SafetensorsEntry *entry,
                                          Error *error) {
    const char *path = file->path, *dtype;
    json_t *shape;
    json_int_t begin, end;
    int type = 0;
    for (const char *c = name; *c != '\0'; c++) {
        if ((unsigned char)*c < 32 || *c == 127) {
            return error_set(error, "%s: the name of tensor %.80s has a control character in it", path, name);
        }
    }
    if (json_unpack((json_t *)item, "{s:s, s:o, s:[I, I!]}", "dtype", &dtype, "shape", &shape, "data_offsets",
                    &begin, &end) != 0 ||
        begin < 0 || begin > end) {
        return error_set(error,
                         "%s: tensor %.80s must be an object with a text \"dtype\", a list \"shape\" and "
                         "\"data_offsets\" [BEGIN, END], two whole numbers from 0 on, BEGIN <= END",
                         path, name);
    }
    while (type < SAFETENSORS_TYPE_COUNT && strcmp(dtype, SAFETENSORS_INFO[type].name) != 0) { type++; }
    if (type == SAFETENSORS_TYPE_COUNT) {
        return error_set(error,
                         "%s: tensor %.80s has the unknown \"dtype\" %.40s: known are F32, BF16, F16, F64, "
                         "I64, U8 and their like",
                         path, name, dtype);
    }
    entry->name = name;
    entry->type = (SafetensorsType)type;
    if (!safetensors_read_shape(file, shape, entry, error)) { return false; }
    size_t bytes = (size_t)(end - begin);
    if ((size_t)end > data_size) {
        return error_set(
            error,
            "%s: tensor %.80s ends at byte %lld of the data, but the file has only %zu: it is truncated",
            path, name, (long long)end, data_size);
    }
    if (bytes != entry->bytes) {
        return error_set(error, "%s: tensor %.80s has %zu bytes, but its dtype %s and its shape make %zu",
                         path, name, bytes, dtype, entry->bytes);
    }
    entry->data = data + begin;
    return true;
}

static inline int safetensors_compare_places(const void *a, const void *b) {
    const SafetensorsEntry *one = (const SafetensorsEntry *)a, *other = (const SafetensorsEntry *)b;
    if (one->data != other->data) { return one->data < other->data ? -1 : 1; }
    // At the same address an empty tensor overlaps nothing: it comes first.
    return (one->bytes > other->bytes) - (one->bytes < other->bytes);
}

static inline int safetensors_compare_names(const void *a, const void *b) {
    return strcmp(((const SafetensorsEntry *)a)->name, ((const SafetensorsEntry *)b)->name);
}

// Reads and checks all entries of the header: every byte of the data (data_size), which is
// everything behind it, belongs to one tensor.
static inline bool safetensors_read_entries(SafetensorsFile *file, const uint8_t *data, size_t data_size,
                                            Error *error) {
    const char *name, *key;
    json_t *item, *value;
    size_t position = 0;
    file->entries = MEMORY_OF(SafetensorsEntry, json_object_size(file->header) + 1);
    json_object_foreach(file->header, name, item) {
        bool is_metadata = strcmp(name, "__metadata__") == 0, good = json_is_object(item);
        if (is_metadata) {
            json_object_foreach(item, key, value) { good = good && json_is_string(value); }
            if (good) { continue; }
            return error_set(error, "%s: \"__metadata__\" must be a JSON object of strings", file->path);
        }
        SafetensorsEntry *entry = &file->entries[file->count++];
        if (!safetensors_read_entry(file, name, item, data, data_size, entry, error)) { return false; }
    }
    qsort(file->entries, file->count, sizeof *file->entries, safetensors_compare_places);
    for (size_t i = 0; i < file->count; i++) {
        const SafetensorsEntry *entry = &file->entries[i];
        size_t begin = (size_t)(entry->data - data);
        if (begin != position) {
            return error_set(error,
                             "%s: tensor %.80s begins at byte %zu of the data, not at %zu, behind others",
                             file->path, entry->name, begin, position);
        }
        position += entry->bytes;
    }
    qsort(file->entries, file->count, sizeof *file->entries, safetensors_compare_names);
    return position == data_size ||
           error_set(
               error,
               "%s: the last %zu bytes belong to no tensor: they were appended, or the header is damaged",
               file->path, data_size - position);
}

static inline bool safetensors_parse(SafetensorsFile *file, Error *error) {
    uint64_t length = 0;
    if (file->size >= sizeof length) { memcpy(&length, file->bytes, sizeof length); }
    if (length < 2 || length > SAFETENSORS_MAX_HEADER || length > file->size - 8 || file->bytes[8] != '{') {
        return error_set(error,
                         "%s is truncated or no safetensors file: its %zu bytes must begin with the length "
                         "of a JSON object, at most %d, and the object",
                         file->path, file->size, (int)SAFETENSORS_MAX_HEADER);
    }
    json_error_t problem;
    file->header =
        json_loadb((const char *)file->bytes + 8, (size_t)length, JSON_REJECT_DUPLICATES, &problem);
    if (file->header == NULL) {
        return error_set(error, "%s: the header is not valid: %.120s", file->path, problem.text);
    }
    return safetensors_read_entries(file, file->bytes + 8 + length, file->size - 8 - (size_t)length, error);
}

static inline void safetensors_close(SafetensorsFile *file) {
    if (file->mapped) { munmap((void *)file->bytes, file->size); }
    json_decref(file->header);
    free(file->entries);
    memset(file, 0, sizeof *file);
}

// Like safetensors_open, of a file in memory. `bytes` (size) belong to the caller, and
// must stay as long as `file` is open. path: for messages.
static inline bool safetensors_open_memory(SafetensorsFile *file, const void *bytes, size_t size,
                                           const char *path, Error *error) {
    memset(file, 0, sizeof *file);
    snprintf(file->path, sizeof file->path, "%.*s", SAFETENSORS_PATH_SIZE - 1, path);
    file->bytes = (const uint8_t *)bytes;
    file->size = size;
    if (safetensors_parse(file, error)) { return true; }
    safetensors_close(file);
    return false;
}

// Maps the file `path` and checks its whole header. On failure there is nothing to close.
static inline bool safetensors_open(SafetensorsFile *file, const char *path, Error *error) {
    size_t size = 0;
    void *mapping = file_map(path, "expected a file of tensors", &size, error);
    if (mapping == NULL) { return false; }
    file->mapped = safetensors_open_memory(file, mapping, size, path, error);
    if (!file->mapped) { munmap(mapping, size); }
    return file->mapped;
}

static inline const SafetensorsEntry *safetensors_find(const SafetensorsFile *file, const char *name) {
    SafetensorsEntry key = {.name = name};
    return (const SafetensorsEntry *)bsearch(&key, file->entries, file->count, sizeof key,
                                             safetensors_compare_names);
}

static inline bool safetensors_has_shape(const SafetensorsEntry *entry, int dimensions, const size_t *shape) {
    return entry->dimensions == dimensions &&
           (dimensions == 0 || memcmp(entry->shape, shape, (size_t)dimensions * sizeof *shape) == 0);
}

// ---- Elements as fp32 -----------------------------------------------------------------

static inline bool safetensors_is_real(SafetensorsType type) {
    return type == SAFETENSORS_F32 || type == SAFETENSORS_BF16 || type == SAFETENSORS_F16 ||
           type == SAFETENSORS_F64;
}

// out (count): elements [first, first + count) as fp32, which the entry has, in one of
// these types: F32, BF16 and F16 are exact, F64 is rounded to nearest.
static inline void safetensors_read_floats(const SafetensorsEntry *entry, size_t first, size_t count,
                                           float *out) {
    assert(safetensors_is_real(entry->type) && first <= entry->count && count <= entry->count - first);
    const uint8_t *in = entry->data + first * SAFETENSORS_INFO[entry->type].bytes;
    if (count == 0) { return; }
    if (entry->type == SAFETENSORS_F32) {
        memcpy(out, in, count * sizeof *out);
        return;
    }
    for (size_t i = 0; i < count; i++) {
        double value;
        if (entry->type == SAFETENSORS_F64) {
            memcpy(&value, in + i * sizeof value, sizeof value);
            out[i] = (float)value;
            continue;
        }
        uint16_t half;
        memcpy(&half, in + i * sizeof half, sizeof half);
        uint32_t bits = (uint32_t)(half & 0x7fffu) << 13, sign = (uint32_t)(half & 0x8000u) << 16;
        if (entry->type == SAFETENSORS_BF16) {
            out[i] = bf16_to_float(half);
        } else if ((half & 0x7c00u) == 0x7c00u) { // infinite, or a NaN, which keeps its bits
            out[i] = wire_float_from_bits(sign | 0x7f800000u | bits);
        } else { // the factor moves the exponent from fp16's bias to fp32's, also where it is subnormal
            out[i] = wire_float_from_bits(sign | wire_float_bits(wire_float_from_bits(bits) * 0x1p112f));
        }
    }
}

static inline bool safetensors_check_finite(const SafetensorsEntry *entry, Error *error) {
    float part[1024];
    for (size_t place = 0, count; place < entry->count; place += count) {
        bool finite = true;
        count = size_min(1024, entry->count - place);
        safetensors_read_floats(entry, place, count, part);
        for (size_t i = 0; i < count; i++) { finite &= isfinite(part[i]) != 0; }
        if (!finite) {
            return error_set(error,
                             "%.80s has a number that is not finite: the file is damaged, or training went "
                             "wrong, or fp16 was too narrow",
                             entry->name);
        }
    }
    return true;
}

// ---- Writing --------------------------------------------------------------------------

// Begins with an empty object `tensors`, and zeros.
typedef struct SafetensorsPlan {
    json_t *tensors; // the header: "__metadata__", if the caller has put it there, and the tensors as added
    char *header;    // (header_bytes), as the file has it, with the 8 bytes of its length
    size_t header_bytes, file_bytes;
} SafetensorsPlan;

static inline void safetensors_plan_free(SafetensorsPlan *plan) {
    json_decref(plan->tensors);
    free(plan->header);
}

// Adds a tensor, behind the one before. The format allows no gaps: elements are aligned
// where tensors of wide elements come first. A name that occurs twice is a bug.
static inline void safetensors_plan_add(SafetensorsPlan *plan, const char *name, SafetensorsType type,
                                        int dimensions, const size_t *shape) {
    size_t bytes = SAFETENSORS_INFO[type].bytes, begin = plan->file_bytes;
    json_t *sizes = json_array();
    assert(plan->header == NULL && json_object_get(plan->tensors, name) == NULL);
    for (int i = 0; i < dimensions; i++) {
        json_array_append_new(sizes, json_integer((json_int_t)shape[i]));
        bytes *= shape[i];
    }
    plan->file_bytes = begin + bytes;
    json_object_set_new(plan->tensors, name,
                        json_pack("{s:s, s:o, s:[I, I]}", "dtype", SAFETENSORS_INFO[type].name, "shape",
                                  sizes, "data_offsets", (json_int_t)begin, (json_int_t)(begin + bytes)));
}

// Makes the header, padded to a multiple of 8 bytes, so that the data are aligned.
static inline void safetensors_plan_finish(SafetensorsPlan *plan) {
    char *text = json_dumps(plan->tensors, JSON_COMPACT);
    uint64_t length = strlen(text), padded = (length + 7) / 8 * 8;
    plan->header_bytes = 8 + padded;
    plan->file_bytes += plan->header_bytes;
    plan->header = MEMORY_OF(char, plan->header_bytes);
    memcpy(plan->header, &padded, sizeof padded);
    memcpy(plan->header + 8, text, length);
    memset(plan->header + 8 + length, ' ', padded - length);
    free(text);
}

// Creates or empties the file: writes the header, and leaves data of zeros.
static inline bool safetensors_create(const char *path, const SafetensorsPlan *plan, Error *error) {
    if (plan->header_bytes - 8 > SAFETENSORS_MAX_HEADER) {
        return error_set(error, "%.400s would have a header of %zu bytes; the format allows %d", path,
                         plan->header_bytes - 8, (int)SAFETENSORS_MAX_HEADER);
    }
    int descriptor = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (descriptor < 0) { return error_set_file(error, "write", path); }
    bool written = ftruncate(descriptor, (off_t)plan->file_bytes) == 0 &&
                   file_write_all(descriptor, plan->header, plan->header_bytes, 0);
    return file_finish(descriptor, path, written, error);
}

// Opens a file that was created with the same plan, perhaps by another process. Returns its
// descriptor, which the caller ends with file_finish; -1: an error.
static inline int safetensors_join(const char *path, const SafetensorsPlan *plan, Error *error) {
    struct stat status;
    int descriptor = open(path, O_WRONLY | O_CLOEXEC);
    if (descriptor < 0 || fstat(descriptor, &status) != 0) {
        error_set_file(error, "write", path);
    } else if ((size_t)status.st_size == plan->file_bytes) {
        return descriptor;
    } else {
        error_set(error,
                  "%.400s is not the file that is to be written together: another process has changed it",
                  path);
    }
    if (descriptor >= 0) { close(descriptor); }
    return -1;
}
