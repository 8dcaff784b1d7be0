// products_file.h: the algorithms of a GPU's matrix products (kernels/products.h) in a
// file: what --tune-products writes and takes back.
//
// products.json in the directory of a run: the GPU and the version of the library that
// the algorithms are for, and for each shape its numbers and the library's own bytes, as
// hexadecimal digits. The library may be given them back in another process, of the same
// version. A damaged file is an Error. Whether the library refuses every algorithm that it
// did not make itself, its makers do not say: use files of runs that you trust.
#ifndef ACCO_PROGRAM_PRODUCTS_FILE_H
#define ACCO_PROGRAM_PRODUCTS_FILE_H

#include "program/run.h"
#include "runtime/files.h"

#define PRODUCTS_EXPECTED "it must be a products.json that a run with --tune-products on has written"

static inline bool products_are_asked(const Run *run) {
    return strcmp(run->options.tune_products, "off") != 0;
}

// ---------------------------------------------------------------------------------------
// As JSON

static inline json_t *product_to_json(const ProductChoice *choice) {
    char digits[2 * PRODUCT_ALGORITHM_BYTES + 1];
    json_t *object = json_object();
    for (int i = 0; i < PRODUCT_NUMBERS; i++) {
        json_object_set_new(object, product_number_name(i), json_integer(choice->numbers[i]));
    }
    for (int i = 0; i < PRODUCT_ALGORITHM_BYTES; i++) {
        snprintf(digits + 2 * i, 3, "%02x", choice->algorithm[i]);
    }
    json_object_set_new(object, "algorithm", json_string(digits));
    return object;
}

static inline json_t *products_to_json(const ProductChoices *choices) {
    json_t *list = json_array();
    for (int i = 0; i < choices->count; i++) {
        json_array_append_new(list, product_to_json(&choices->list[i]));
    }
    return json_pack("{s:o, s:i, s:i, s:i, s:o}", "gpu", log_text(choices->place.gpu), "capability",
                     choices->place.capability, "processors", choices->place.processors, "library",
                     choices->place.library, "products", list);
}

// The value of a hexadecimal digit; -1: it is none.
static inline int products_digit(char c) {
    const char *digits = "0123456789abcdef", *place = strchr(digits, c);
    return c == '\0' || place == NULL ? -1 : (int)(place - digits);
}

static inline bool products_read_algorithm(const json_t *value,
                                           unsigned char algorithm[PRODUCT_ALGORITHM_BYTES]) {
    const char *digits = json_string_value(value);
    if (digits == NULL || json_string_length(value) != 2 * PRODUCT_ALGORITHM_BYTES) { return false; }
    for (int i = 0; i < PRODUCT_ALGORITHM_BYTES; i++) {
        int high = products_digit(digits[2 * i]), low = products_digit(digits[2 * i + 1]);
        if (high < 0 || low < 0) { return false; }
        algorithm[i] = (unsigned char)(16 * high + low);
    }
    return true;
}

// A whole number from 0 to INT_MAX.
static inline bool products_read_number(const json_t *object, const char *name, const char *path, int *number,
                                        Error *error) {
    const json_t *value = json_object_get(object, name);
    json_int_t wide = json_integer_value(value);
    *number = (int)wide;
    return (json_is_integer(value) && wide >= 0 && wide <= INT_MAX) ||
           error_set(error, "%.300s is damaged: \"%s\" must be a whole number from 0 to %d", path, name,
                     INT_MAX);
}

static inline bool products_read_choice(const json_t *object, const char *path, ProductChoices *choices,
                                        Error *error) {
    ProductChoice choice;
    if (choices->count == PRODUCT_CHOICES) {
        return error_set(error, "%.300s lists more than %d products", path, PRODUCT_CHOICES);
    }
    for (int i = 0; i < PRODUCT_NUMBERS; i++) {
        if (!products_read_number(object, product_number_name(i), path, &choice.numbers[i], error)) {
            return false;
        }
    }
    if (!products_read_algorithm(json_object_get(object, "algorithm"), choice.algorithm)) {
        return error_set(error, "%.300s is damaged: an \"algorithm\" must be %d digits of 0 to 9 and a to f",
                         path, 2 * PRODUCT_ALGORITHM_BYTES);
    }
    if (product_find(choices, choice.numbers) != NULL) {
        return error_set(error, "%.300s is damaged: it lists a product of m %d, n %d, k %d twice", path,
                         choice.numbers[0], choice.numbers[1], choice.numbers[2]);
    }
    product_keep(choices, choice.numbers, choice.algorithm);
    return true;
}

// Fills in place and list. path: for messages.
static inline bool products_from_json(const json_t *root, const char *path, ProductChoices *choices,
                                      Error *error) {
    const json_t *list = json_object_get(root, "products"), *object;
    const char *gpu = json_string_value(json_object_get(root, "gpu"));
    ProductPlace *place = &choices->place;
    size_t i;
    if (gpu == NULL || !json_is_array(list)) {
        return error_set(error, "%.300s has no \"gpu\" and \"products\": %s", path, PRODUCTS_EXPECTED);
    }
    if (strlen(gpu) >= sizeof place->gpu) {
        return error_set(error, "%.300s: \"gpu\" is longer than the name of any GPU: %s", path,
                         PRODUCTS_EXPECTED);
    }
    snprintf(place->gpu, sizeof place->gpu, "%s", gpu);
    bool good = products_read_number(root, "capability", path, &place->capability, error) &&
                products_read_number(root, "processors", path, &place->processors, error) &&
                products_read_number(root, "library", path, &place->library, error);
    json_array_foreach(list, i, object) { good = good && products_read_choice(object, path, choices, error); }
    return good;
}

static inline bool products_read(const char *path, ProductChoices *choices, Error *error) {
    json_error_t problem;
    size_t size = 0;
    void *bytes = file_map(path, PRODUCTS_EXPECTED, &size, error);
    if (bytes == NULL) { return false; }
    json_t *root = json_loadb((const char *)bytes, size, JSON_REJECT_DUPLICATES, &problem);
    bool good = root != NULL ? products_from_json(root, path, choices, error)
                             : error_set(error, "%.300s is damaged: %.120s: %s", path, problem.text,
                                         PRODUCTS_EXPECTED);
    json_decref(root);
    munmap(bytes, size);
    return good;
}

// ---------------------------------------------------------------------------------------
// Of a run

static inline ProductPlace products_here(const Run *run) {
    const Gpu *gpu = &run->placement.gpu;
    ProductPlace place;
    memset(&place, 0, sizeof place);
    snprintf(place.gpu, sizeof place.gpu, "%s", gpu->name);
    place.capability = gpu->capability;
    place.processors = gpu->sm_count;
    place.library = gemm_version();
    return place;
}

// Rank 0, before the run has a directory: reads the file that --tune-products names.
static inline bool products_open_named(Run *run, Error *error) {
    const char *path = run->options.tune_products;
    ProductChoices *choices = &run->products;
    if (!products_are_asked(run)) { return true; }
    ProductPlace here = products_here(run), *there = &choices->place;
    if (!run->placement.on_gpu) {
        return error_set(error, "--tune-products %.200s: rank 0 chooses for all, and computes on a CPU",
                         path);
    }
    if (strcmp(path, "on") == 0) { return true; }
    if (!products_read(path, choices, error)) {
        Error reason = *error;
        return error_set(error, "--tune-products is on, off or a file: %.900s", reason.text);
    }
    return product_place_is_same(there, &here) ||
           error_set(
               error,
               "--tune-products %.200s was made on %.100s (%d.%d, %d processors) with version %d of the "
               "library of products; here are %.100s (%d.%d, %d processors) and version %d: make "
               "another with --tune-products on",
               path, there->gpu, there->capability / 10, there->capability % 10, there->processors,
               there->library, here.gpu, here.capability / 10, here.capability % 10, here.processors,
               here.library);
}

static inline void products_path(const Run *run, char path[RUN_PATH_SIZE + 16]) {
    snprintf(path, RUN_PATH_SIZE + 16, "%s/products.json", run->directory);
}

// Rank 0, with --tune-products on: a run that goes on in its directory keeps the choices
// that are there, unless they are for another GPU or library.
static inline bool products_open_kept(Run *run, Error *error) {
    char path[RUN_PATH_SIZE + 16];
    ProductChoices *choices = &run->products;
    if (strcmp(run->options.tune_products, "on") != 0) { return true; }
    ProductPlace here = products_here(run);
    products_path(run, path);
    if (access(path, F_OK) == 0 && !products_read(path, choices, error)) { return false; }
    if (!product_place_is_same(&choices->place, &here)) { choices->count = 0; }
    choices->place = here;
    choices->tuning = true;
    return true;
}

// What this rank's products use. Ranks with another kind of GPU than rank 0 cannot use its
// choices.
static inline ProductChoices *products_in_use(Run *run) {
    ProductPlace here = products_here(run);
    return products_are_asked(run) && product_place_is_same(&run->products.place, &here) ? &run->products
                                                                                         : NULL;
}

// Rank 0: writes what was chosen into the directory of the run; the file is whole or absent.
static inline bool products_save(const Run *run, Error *error) {
    char path[RUN_PATH_SIZE + 16];
    products_path(run, path);
    FILE *file = file_replace_begin(path, error);
    if (file == NULL) { return false; }
    json_t *object = products_to_json(&run->products);
    bool written = json_dumpf(object, file, JSON_INDENT(1)) == 0;
    json_decref(object);
    return file_replace_end(file, path, written, error);
}

#endif
