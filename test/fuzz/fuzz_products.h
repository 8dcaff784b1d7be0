// fuzz_products.h: a products.json of --tune-products. What is accepted can be written
// again, and what is written is accepted and lists the same.
#ifndef ACCO_TEST_FUZZ_FUZZ_PRODUCTS_H
#define ACCO_TEST_FUZZ_FUZZ_PRODUCTS_H

#include "program/products_file.h"
#include "test/fuzz/fuzz.h"

static inline bool fuzz_products_read(FuzzPart part, ProductChoices *choices) {
    FuzzFile file;
    Error error = {""};
    memset(choices, 0, sizeof *choices);
    fuzz_file_open(&file, part);
    bool good = fuzz_accepted(products_read(file.path, choices, &error), &error);
    fuzz_file_close(&file);
    return good;
}

static inline bool fuzz_products(const uint8_t *data, size_t size) {
    ProductChoices choices, again;
    FuzzPart part = {data, size};
    if (!fuzz_products_read(part, &choices)) { return false; }
    fuzz_require(choices.count >= 0 && choices.count <= PRODUCT_CHOICES, "a list has room for all choices");
    json_t *root = products_to_json(&choices);
    char *text = json_dumps(root, 0);
    fuzz_require(text != NULL, "choices can be written");
    FuzzPart written = {(const uint8_t *)text, strlen(text)};
    fuzz_require(fuzz_products_read(written, &again), "written choices are accepted");
    fuzz_require(product_place_is_same(&again.place, &choices.place) && again.count == choices.count &&
                     memcmp(again.list, choices.list, (size_t)choices.count * sizeof choices.list[0]) == 0,
                 "written choices are the same");
    free(text);
    json_decref(root);
    return true;
}

#endif
