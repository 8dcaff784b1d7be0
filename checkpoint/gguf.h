// gguf.h: writes a GGUF file, the format of llama.cpp, Ollama and LM Studio.
//
//     "GGUF", version 3, the numbers of tensors and of keys
//     each key: its name, its type, its value
//     each tensor: its name, its sizes (the innermost first), its type, where its data begin
//     the data, each tensor at a multiple of 32 bytes
//
// A text is its length in 8 bytes and its bytes; all numbers are little-endian, as the machine must
// be. Keys gather in memory; tensors are named first, and written afterwards in the same order.
// Types: fp32, fp16, bf16, and q8_0: 32 numbers of a row as int8 with one scale in fp16.
#pragma once

#include "kernels/wire.h"
#include "runtime/files.h"
#include "runtime/memory.h"

// The format's own numbers.
typedef enum GgufType { GGUF_F32 = 0, GGUF_F16 = 1, GGUF_Q8_0 = 8, GGUF_BF16 = 30 } GgufType;

enum { GGUF_U32 = 4, GGUF_I32 = 5, GGUF_REAL = 6, GGUF_FLAG = 7, GGUF_TEXT = 8, GGUF_LIST = 9 };
enum { GGUF_VERSION = 3, GGUF_ALIGNMENT = 32, GGUF_BLOCK = 32, GGUF_BLOCK_BYTES = 34, GGUF_NAME = 96 };

typedef struct GgufTensor {
    char name[GGUF_NAME];
    size_t rows, columns; // rows 0: a vector of `columns`
    GgufType type;
} GgufTensor;

// Begins with zeros; gguf_begin_keys and gguf_close are its ends.
typedef struct Gguf {
    FILE *keys; // to memory
    char *bytes;
    size_t size;
    uint64_t key_count;
    GgufTensor *tensors; // (tensor_count)
    size_t tensor_count;
} Gguf;

static inline void gguf_begin_keys(Gguf *gguf) { gguf->keys = open_memstream(&gguf->bytes, &gguf->size); }

static inline void gguf_close(Gguf *gguf) {
    if (gguf->keys != NULL) { fclose(gguf->keys); }
    free(gguf->bytes);
    free(gguf->tensors);
}

static inline void gguf_write_u32(FILE *file, uint32_t value) { fwrite(&value, sizeof value, 1, file); }
static inline void gguf_write_u64(FILE *file, uint64_t value) { fwrite(&value, sizeof value, 1, file); }

static inline void gguf_write_text(FILE *file, const char *text) {
    gguf_write_u64(file, strlen(text));
    fwrite(text, 1, strlen(text), file);
}

static inline void gguf_begin_key(Gguf *gguf, const char *key, uint32_t type) {
    gguf_write_text(gguf->keys, key);
    gguf_write_u32(gguf->keys, type);
    gguf->key_count++;
}

static inline void gguf_add_text(Gguf *gguf, const char *key, const char *value) {
    gguf_begin_key(gguf, key, GGUF_TEXT);
    gguf_write_text(gguf->keys, value);
}

static inline void gguf_add_number(Gguf *gguf, const char *key, int value) {
    gguf_begin_key(gguf, key, GGUF_U32);
    gguf_write_u32(gguf->keys, (uint32_t)value);
}

static inline void gguf_add_real(Gguf *gguf, const char *key, double value) {
    float narrow = (float)value;
    gguf_begin_key(gguf, key, GGUF_REAL);
    fwrite(&narrow, sizeof narrow, 1, gguf->keys);
}

static inline void gguf_add_flag(Gguf *gguf, const char *key, bool value) {
    gguf_begin_key(gguf, key, GGUF_FLAG);
    fputc(value, gguf->keys);
}

// The caller writes the `count` elements, of that type, to gguf->keys.
static inline void gguf_begin_list(Gguf *gguf, const char *key, uint32_t type, size_t count) {
    gguf_begin_key(gguf, key, GGUF_LIST);
    gguf_write_u32(gguf->keys, type);
    gguf_write_u64(gguf->keys, count);
}

// To nearest even; what is too large becomes infinite.
static inline uint16_t fp16_from_float(float value) {
    uint32_t bits = wire_float_bits(value), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest >= 0x47800000u) { return (uint16_t)(sign | (rest > 0x7f800000u ? 0x7e00u : 0x7c00u)); }
    if (rest < 0x38800000u) { // subnormal: the sum's last bit is worth 2^-24, which rounds
        return (uint16_t)(sign | (wire_float_bits(wire_float_from_bits(rest) + 0.5f) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13));
}

static inline size_t gguf_count(const GgufTensor *tensor) {
    return (tensor->rows > 0 ? tensor->rows : 1) * tensor->columns;
}

// Of `count` numbers: whole blocks.
static inline size_t gguf_bytes(GgufType type, size_t count) {
    return type == GGUF_F32    ? 4 * count
           : type == GGUF_Q8_0 ? count / GGUF_BLOCK * GGUF_BLOCK_BYTES
                               : 2 * count;
}

enum { GGUF_PART = 4096 }; // numbers that are encoded at a time: whole blocks

// out <- in (count) in this type, which is not fp32. False: it cannot hold one of them.
static inline bool gguf_encode(GgufType type, const float *in, size_t count, uint8_t *out) {
    uint16_t infinite = 0;
    for (; type == GGUF_Q8_0 && count > 0; count -= GGUF_BLOCK, in += GGUF_BLOCK, out += GGUF_BLOCK_BYTES) {
        float most = 0;
        for (int i = 0; i < GGUF_BLOCK; i++) { most = fmaxf(most, fabsf(in[i])); }
        float inverse = most > 1e-30f ? 127 / most : 0; // below, the scale is 0
        uint16_t scale = fp16_from_float(most / 127);
        memcpy(out, &scale, sizeof scale);
        for (int i = 0; i < GGUF_BLOCK; i++) { out[2 + i] = (uint8_t)(int8_t)roundf(in[i] * inverse); }
        infinite |= (scale & 0x7c00u) == 0x7c00u;
    }
    for (size_t i = 0; i < count; i++) {
        uint16_t half = type == GGUF_BF16 ? bf16_from_float(in[i]) : fp16_from_float(in[i]);
        uint16_t exponent = type == GGUF_F16 ? 0x7c00u : 0x7f80u;
        infinite |= (half & exponent) == exponent;
        memcpy(out + 2 * i, &half, sizeof half);
    }
    return infinite == 0;
}

// Names the next tensor. Vectors, and matrices that the caller asks for in fp32, stay so; rows that
// do not consist of whole blocks become fp16 instead of q8_0.
static inline GgufTensor *gguf_add_tensor(Gguf *gguf, const char *name, size_t rows, size_t columns,
                                          GgufType type) {
    size_t bytes = (gguf->tensor_count + 1) * sizeof *gguf->tensors;
    gguf->tensors = (GgufTensor *)memory_grow(gguf->tensors, bytes);
    GgufTensor *tensor = &gguf->tensors[gguf->tensor_count++];
    snprintf(tensor->name, sizeof tensor->name, "%s", name);
    tensor->rows = rows;
    tensor->columns = columns;
    tensor->type = rows == 0 ? GGUF_F32 : type == GGUF_Q8_0 && columns % GGUF_BLOCK != 0 ? GGUF_F16 : type;
    return tensor;
}

static inline void gguf_pad(FILE *file, size_t bytes) {
    for (; bytes % GGUF_ALIGNMENT != 0; bytes++) { fputc(0, file); }
}

// Everything before the data, when all keys and tensors are there.
static inline void gguf_write_head(Gguf *gguf, FILE *file) {
    uint64_t place = 0;
    fflush(gguf->keys);
    fwrite("GGUF", 1, 4, file);
    gguf_write_u32(file, GGUF_VERSION);
    gguf_write_u64(file, gguf->tensor_count);
    gguf_write_u64(file, gguf->key_count);
    fwrite(gguf->bytes, 1, gguf->size, file);
    for (size_t i = 0; i < gguf->tensor_count; i++) {
        const GgufTensor *tensor = &gguf->tensors[i];
        gguf_write_text(file, tensor->name);
        gguf_write_u32(file, tensor->rows > 0 ? 2 : 1);
        gguf_write_u64(file, tensor->columns);
        if (tensor->rows > 0) { gguf_write_u64(file, tensor->rows); }
        gguf_write_u32(file, tensor->type);
        gguf_write_u64(file, place);
        place += (gguf_bytes(tensor->type, gguf_count(tensor)) + GGUF_ALIGNMENT - 1) / GGUF_ALIGNMENT *
                 GGUF_ALIGNMENT;
    }
    gguf_pad(file, (size_t)ftello(file));
}

// The data of the next tensor: values (rows, columns). False: its type cannot hold one of them.
static inline bool gguf_write_tensor(const GgufTensor *tensor, const float *values, FILE *file) {
    size_t count = gguf_count(tensor), part;
    uint8_t bytes[2 * GGUF_PART];
    bool good = true;
    if (tensor->type == GGUF_F32) { fwrite(values, sizeof *values, count, file); }
    for (size_t i = 0; tensor->type != GGUF_F32 && i < count; i += part) {
        part = size_min(GGUF_PART, count - i);
        good = gguf_encode(tensor->type, values + i, part, bytes) && good;
        fwrite(bytes, 1, gguf_bytes(tensor->type, part), file);
    }
    gguf_pad(file, gguf_bytes(tensor->type, count));
    return good;
}
