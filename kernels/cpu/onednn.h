// onednn.h: a product of two matrices by oneDNN 2 or 3, on the calling thread. Only this file
// knows how the two versions differ, and what stands in for the library where it is absent
// (ACCO_NO_ONEDNN). scripts/probe compiles and links this file to find out which it is.
//
// oneDNN is kept single-threaded through the OpenMP setting of the calling thread. The symbols
// are weak: they come from the OpenMP that oneDNN itself loads, or are NULL if it needs none.
//
// fp32 is dnnl_sgemm, which all versions have. Other formats have no such form in C, so a product
// is described anew each time. oneDNN caches what it has compiled for one: asking again in every
// tile costs 3 microseconds.
#pragma once

#include <stdbool.h>
#include <stdio.h>

#include "runtime/precision.h"

// (rows, columns), one row every `stride` elements. transposed: stored as (columns, rows).
typedef struct OnednnMatrix {
    void *data;
    int rows, columns, stride;
    bool transposed;
    Precision precision; // fp32 or bf16
} OnednnMatrix;

#ifdef ACCO_NO_ONEDNN

// What these two do is said below, where the library is.
static inline bool onednn_multiply(const OnednnMatrix *a, const OnednnMatrix *b, const OnednnMatrix *result,
                                   float scale, bool accumulate) {
    (void)a, (void)b, (void)result, (void)scale, (void)accumulate;
    return false;
}

static inline const char *onednn_describe(char text[96]) {
    snprintf(text, 96, "our own loops, 13 times slower in training than oneDNN (make info says why)");
    return text;
}

#else

#include <oneapi/dnnl/dnnl.h>
#ifdef __cplusplus
extern "C" {
#endif
extern int omp_get_max_threads(void) __attribute__((weak));
extern void omp_set_num_threads(int threads) __attribute__((weak));
#ifdef __cplusplus
}
#endif

// ---- What differs ---------------------------------------------------------------------

#if DNNL_VERSION_MAJOR >= 3
typedef const_dnnl_memory_desc_t OnednnLayout;

// NULL: refused.
static inline dnnl_memory_t onednn_memory(dnnl_engine_t engine, void *data, dnnl_data_type_t type,
                                          const dnnl_dims_t sides, const dnnl_dims_t strides) {
    dnnl_memory_desc_t layout = NULL;
    dnnl_memory_t memory = NULL;
    if (dnnl_memory_desc_create_with_strides(&layout, 2, sides, type, strides) != dnnl_success ||
        dnnl_memory_create(&memory, layout, engine, data) != dnnl_success) {
        memory = NULL;
    }
    dnnl_memory_desc_destroy(layout);
    return memory;
}

// result = scale a b [+ result]
static inline bool onednn_set_scale_and_sum(dnnl_primitive_attr_t attributes, dnnl_post_ops_t afterwards,
                                            float scale, bool accumulate) {
    return (scale == 1.0f ||
            dnnl_post_ops_append_eltwise(afterwards, dnnl_eltwise_linear, scale, 0.0f) == dnnl_success) &&
           (!accumulate ||
            dnnl_post_ops_append_sum(afterwards, 1.0f, 0, dnnl_data_type_undef) == dnnl_success) &&
           dnnl_primitive_attr_set_post_ops(attributes, afterwards) == dnnl_success;
}

static inline bool onednn_choose(dnnl_primitive_desc_t *choice, const OnednnLayout layouts[3],
                                 dnnl_primitive_attr_t attributes, dnnl_engine_t engine) {
    return dnnl_matmul_primitive_desc_create(choice, engine, layouts[0], layouts[1], NULL, layouts[2],
                                             attributes) == dnnl_success;
}
#else
typedef const dnnl_memory_desc_t *OnednnLayout;

static inline dnnl_memory_t onednn_memory(dnnl_engine_t engine, void *data, dnnl_data_type_t type,
                                          const dnnl_dims_t sides, const dnnl_dims_t strides) {
    dnnl_memory_desc_t layout;
    dnnl_memory_t memory = NULL;
    if (dnnl_memory_desc_init_by_strides(&layout, 2, sides, type, strides) != dnnl_success ||
        dnnl_memory_create(&memory, &layout, engine, data) != dnnl_success) {
        return NULL;
    }
    return memory;
}

static inline bool onednn_set_scale_and_sum(dnnl_primitive_attr_t attributes, dnnl_post_ops_t afterwards,
                                            float scale, bool accumulate) {
    return dnnl_primitive_attr_set_output_scales(attributes, 1, 0, &scale) == dnnl_success &&
           (!accumulate || dnnl_post_ops_append_sum(afterwards, 1.0f) == dnnl_success) &&
           dnnl_primitive_attr_set_post_ops(attributes, afterwards) == dnnl_success;
}

static inline bool onednn_choose(dnnl_primitive_desc_t *choice, const OnednnLayout layouts[3],
                                 dnnl_primitive_attr_t attributes, dnnl_engine_t engine) {
    dnnl_matmul_desc_t wanted;
    return dnnl_matmul_desc_init(&wanted, layouts[0], layouts[1], NULL, layouts[2]) == dnnl_success &&
           dnnl_primitive_desc_create(choice, &wanted, attributes, engine, NULL) == dnnl_success;
}
#endif

// ---- What does not --------------------------------------------------------------------

// oneDNN's product of these layouts; NULL: it has none on this processor.
static inline dnnl_primitive_t onednn_product(dnnl_engine_t engine, const OnednnLayout layouts[3],
                                              float scale, bool accumulate) {
    dnnl_primitive_t product = NULL;
    dnnl_primitive_desc_t choice = NULL;
    dnnl_primitive_attr_t attributes = NULL;
    dnnl_post_ops_t afterwards = NULL;
    if (dnnl_primitive_attr_create(&attributes) != dnnl_success ||
        dnnl_post_ops_create(&afterwards) != dnnl_success ||
        !onednn_set_scale_and_sum(attributes, afterwards, scale, accumulate) ||
        !onednn_choose(&choice, layouts, attributes, engine) ||
        dnnl_primitive_create(&product, choice) != dnnl_success) {
        product = NULL;
    }
    dnnl_primitive_desc_destroy(choice);
    dnnl_post_ops_destroy(afterwards);
    dnnl_primitive_attr_destroy(attributes);
    return product;
}

// The product of any formats, as onednn_multiply.
static inline bool onednn_multiply_any(const OnednnMatrix *a, const OnednnMatrix *b,
                                       const OnednnMatrix *result, float scale, bool accumulate) {
    const OnednnMatrix *const matrices[3] = {a, b, result};
    dnnl_engine_t engine = NULL;
    dnnl_stream_t stream = NULL;
    dnnl_exec_arg_t arguments[3] = {{DNNL_ARG_SRC, NULL}, {DNNL_ARG_WEIGHTS, NULL}, {DNNL_ARG_DST, NULL}};
    OnednnLayout layouts[3];
    dnnl_primitive_t product = NULL;
    bool good = dnnl_engine_create(&engine, dnnl_cpu, 0) == dnnl_success &&
                dnnl_stream_create(&stream, engine, dnnl_stream_default_flags) == dnnl_success;
    for (int i = 0; i < 3 && good; i++) {
        const OnednnMatrix *matrix = matrices[i];
        dnnl_dims_t sides = {matrix->rows, matrix->columns},
                    strides = {matrix->transposed ? 1 : matrix->stride,
                               matrix->transposed ? matrix->stride : 1};
        arguments[i].memory = onednn_memory(
            engine, matrix->data, matrix->precision == PRECISION_BF16 ? dnnl_bf16 : dnnl_f32, sides, strides);
        good = arguments[i].memory != NULL &&
               dnnl_memory_get_memory_desc(arguments[i].memory, &layouts[i]) == dnnl_success;
    }
    good = good && (product = onednn_product(engine, layouts, scale, accumulate)) != NULL &&
           dnnl_primitive_execute(product, stream, 3, arguments) == dnnl_success &&
           dnnl_stream_wait(stream) == dnnl_success;
    for (int i = 0; i < 3; i++) { dnnl_memory_destroy(arguments[i].memory); }
    dnnl_primitive_destroy(product);
    dnnl_stream_destroy(stream);
    dnnl_engine_destroy(engine);
    return good;
}

// result = scale a b [+ result], on the calling thread. a and b have one format; result, which
// is not transposed, has the same one or is fp32. False: the library has no such product on
// this processor.
static inline bool onednn_multiply(const OnednnMatrix *a, const OnednnMatrix *b, const OnednnMatrix *result,
                                   float scale, bool accumulate) {
    if (omp_set_num_threads != NULL && omp_get_max_threads() != 1) { omp_set_num_threads(1); }
    if (a->precision == PRECISION_BF16) { return onednn_multiply_any(a, b, result, scale, accumulate); }
    return dnnl_sgemm(a->transposed ? 'T' : 'N', b->transposed ? 'T' : 'N', a->rows, b->columns, a->columns,
                      scale, (const float *)a->data, a->stride, (const float *)b->data, b->stride,
                      accumulate ? 1.0f : 0.0f, (float *)result->data, result->stride) == dnnl_success;
}

// text <- what computes matrix products on CPUs: another version, or another set of instructions,
// which the library chooses by the processor, rounds in another way.
static inline const char *onednn_describe(char text[96]) {
    const struct {
        dnnl_cpu_isa_t least;
        const char *name;
    } sets[] = {{dnnl_cpu_isa_avx512_core_amx, " for AMX"},
                {dnnl_cpu_isa_avx512_core, " for AVX-512"},
                {dnnl_cpu_isa_avx2, " for AVX2"},
                {dnnl_cpu_isa_sse41, " for SSE4.1"}};
    const dnnl_version_t *version = dnnl_version();
    unsigned used = (unsigned)dnnl_get_effective_cpu_isa(), found = 0;
    while (found < 4 && (used & (unsigned)sets[found].least) != (unsigned)sets[found].least) { found++; }
    snprintf(text, 96, "oneDNN %d.%d.%d%s", version->major, version->minor, version->patch,
             found < 4 ? sets[found].name : "");
    return text;
}

#endif
