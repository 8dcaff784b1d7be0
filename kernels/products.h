// products.h: which algorithms a GPU's library of matrix products uses, as data that a
// program can keep and give back. Plain C: a file of them is read by programs without
// CUDA, too (program/products_file.h).
//
// The library offers several algorithms for a shape. They round differently, and which is
// the fastest is found by timing, which is never quite the same twice. Choices that are
// kept make runs repeat bit for bit.
#ifndef ACCO_KERNELS_PRODUCTS_H
#define ACCO_KERNELS_PRODUCTS_H

#include <stdbool.h>
#include <string.h>

enum {
    PRODUCT_CHOICES = 64, // that are kept: three times the shapes of training
    PRODUCT_NUMBERS = 15,
    PRODUCT_ALGORITHM_BYTES = 64
};

// All that an algorithm is chosen by: result (n, m) = or += the product of b and a, as
// CudaGemm has it; alignments in bytes; processors: how many of the GPU's a product may
// count on, 0: all.
static inline const char *product_number_name(int i) {
    static const char *const names[PRODUCT_NUMBERS] = {
        "m",           "n",           "k",           "a_transposed", "b_transposed",
        "a_stride",    "b_stride",    "c_stride",    "inputs_bf16",  "result_bf16",
        "accumulates", "a_alignment", "b_alignment", "c_alignment",  "processors"};
    return names[i];
}

typedef struct ProductChoice {
    int numbers[PRODUCT_NUMBERS];
    unsigned char
        algorithm[PRODUCT_ALGORITHM_BYTES]; // the library's own, to be given back to the same version
} ProductChoice;

// What the bytes of an algorithm are valid for.
typedef struct ProductPlace {
    char gpu[256];
    int capability; // 10 * major + minor
    int processors;
    int library; // its version
} ProductPlace;

typedef struct ProductChoices {
    ProductPlace place;
    // Shapes that are not listed are timed, and listed. Otherwise they get the library's
    // first offer.
    bool tuning;
    int count;
    ProductChoice list[PRODUCT_CHOICES];
    // Of the shapes that were looked up since the counts were cleared: those that were
    // listed, those that were not, and those whose algorithm the library refused.
    int found, missed, refused;
} ProductChoices;

static inline bool product_place_is_same(const ProductPlace *a, const ProductPlace *b) {
    return strcmp(a->gpu, b->gpu) == 0 && a->capability == b->capability && a->processors == b->processors &&
           a->library == b->library;
}

// The choice for a shape; NULL: none is listed.
static inline ProductChoice *product_find(ProductChoices *choices, const int numbers[PRODUCT_NUMBERS]) {
    for (int i = 0; i < choices->count; i++) {
        ProductChoice *choice = &choices->list[i];
        if (memcmp(choice->numbers, numbers, sizeof choice->numbers) == 0) { return choice; }
    }
    return NULL;
}

// Lists an algorithm for a shape, in place of the one that it had. Where the list is full,
// it is not kept.
static inline void product_keep(ProductChoices *choices, const int numbers[PRODUCT_NUMBERS],
                                const void *algorithm) {
    ProductChoice *choice = product_find(choices, numbers);
    if (choice == NULL && choices->count == PRODUCT_CHOICES) { return; }
    if (choice == NULL) { choice = &choices->list[choices->count++]; }
    memcpy(choice->numbers, numbers, sizeof choice->numbers);
    memcpy(choice->algorithm, algorithm, sizeof choice->algorithm);
}

#endif
