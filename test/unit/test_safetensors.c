// test_safetensors.c: what one process or several write is read again bit by bit; every
// damaged file is refused with one clear line; and whatever its bytes are, nothing
// outside the file is read, which the sanitizers would report.
#include "test/harness.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "checkpoint/safetensors.h"
#include "runtime/random.h"

static char scratch_directory[] = "/tmp/test_safetensors.XXXXXX";

static const char *scratch(const char *name) {
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", scratch_directory, name);
    return path;
}

// An item of the metadata; NULL: there is none of this key.
static const char *metadata(const SafetensorsFile *file, const char *key) {
    return json_string_value(json_object_get(json_object_get(file->header, "__metadata__"), key));
}

static void open_or_fail(SafetensorsFile *file, const char *path) {
    Error error;
    if (!safetensors_open(file, path, &error)) { fail_msg("%s", error.text); }
}

static const SafetensorsEntry *find_or_fail(const SafetensorsFile *file, const char *name) {
    const SafetensorsEntry *entry = safetensors_find(file, name);
    if (entry == NULL) { fail_msg("%s has no %s", file->path, name); }
    return entry;
}

// ---- A file of every type -------------------------------------------------------------

enum { ODD = 7 * 5 };

static void fill_bytes(uint8_t *bytes, size_t count, uint64_t seed) {
    Random random = {seed};
    for (size_t i = 0; i < count; i++) { bytes[i] = (uint8_t)random_bits(&random); }
}

// Where the data of a planned tensor begin and end in the file.
static size_t planned_place(const SafetensorsPlan *plan, const char *name, size_t end) {
    const json_t *entry = json_object_get(plan->tensors, name);
    assert_non_null(entry);
    return plan->header_bytes +
           (size_t)json_integer_value(json_array_get(json_object_get(entry, "data_offsets"), end));
}

static const char *name_of(int tensor) {
    static char name[16];
    snprintf(name, sizeof name, "t%d", tensor);
    return name;
}

// Tensors t0, t1, ... of all types, the widest first, (7, 5), a scalar, and one without elements.
static void plan_all_types(SafetensorsPlan *plan) {
    static const size_t shape[2] = {7, 5}, none[3] = {3, 0, 2};
    *plan = (SafetensorsPlan){.tensors = json_object()};
    json_object_set_new(plan->tensors, "__metadata__",
                        json_pack("{s:s, s:s}", "format", "pt", "note", "a \"quoted\" line\nand \xc3\xbc"));
    safetensors_plan_add(plan, "scalar", SAFETENSORS_I64, 0, NULL);
    safetensors_plan_add(plan, "empty", SAFETENSORS_F32, 3, none);
    for (int type = SAFETENSORS_TYPE_COUNT - 1; type >= 0; type--) {
        safetensors_plan_add(plan, name_of(type), (SafetensorsType)type, 2, shape);
    }
    safetensors_plan_add(plan, "\xe6\xbc\xa2 \"x\"", SAFETENSORS_U8, 2, shape);
    safetensors_plan_finish(plan);
}

// Each tensor in two parts, the second one first.
static void write_all_types(const char *path, const SafetensorsPlan *plan) {
    Error error = {""};
    uint8_t bytes[ODD * 8];
    const char *name;
    json_t *entry;
    uint64_t seed = 0;
    bool good = safetensors_create(path, plan, &error);
    int descriptor = good ? safetensors_join(path, plan, &error) : -1;
    json_object_foreach(plan->tensors, name, entry) {
        if (strcmp(name, "__metadata__") == 0) { continue; }
        size_t begin = planned_place(plan, name, 0), count = planned_place(plan, name, 1) - begin,
               cut = count / 3;
        fill_bytes(bytes, sizeof bytes, seed++);
        good = good && file_write_all(descriptor, bytes + cut, count - cut, (off_t)(begin + cut)) &&
               file_write_all(descriptor, bytes, cut, (off_t)begin);
    }
    if (descriptor < 0 || !file_finish(descriptor, path, good, &error)) { fail_msg("%s", error.text); }
}

static void what_is_written_is_read_again(void **state) {
    (void)state;
    static const size_t shape[2] = {7, 5}, none[3] = {3, 0, 2};
    SafetensorsPlan plan;
    SafetensorsFile file;
    uint8_t bytes[ODD * 8];
    const char *name;
    json_t *planned;
    uint64_t seed = 0;
    plan_all_types(&plan);
    write_all_types(scratch("all"), &plan);
    open_or_fail(&file, scratch("all"));
    assert_int_equal(file.size, plan.file_bytes);
    assert_int_equal(file.count, SAFETENSORS_TYPE_COUNT + 3);
    json_object_foreach(plan.tensors, name, planned) {
        if (strcmp(name, "__metadata__") == 0) { continue; }
        const SafetensorsEntry *entry = find_or_fail(&file, name);
        size_t begin = planned_place(&plan, name, 0);
        assert_int_equal((size_t)(entry->data - file.bytes), begin);
        assert_int_equal(entry->bytes, planned_place(&plan, name, 1) - begin);
        assert_int_equal(begin % SAFETENSORS_INFO[entry->type].bytes, 0);
        fill_bytes(bytes, sizeof bytes, seed++);
        assert_memory_equal(entry->data, bytes, entry->bytes);
    }
    for (int type = 0; type < SAFETENSORS_TYPE_COUNT; type++) {
        const SafetensorsEntry *entry = find_or_fail(&file, name_of(type));
        assert_true((int)entry->type == type && safetensors_has_shape(entry, 2, shape));
    }
    assert_true(safetensors_has_shape(find_or_fail(&file, "scalar"), 0, NULL));
    assert_true(safetensors_has_shape(find_or_fail(&file, "empty"), 3, none));
    assert_string_equal(metadata(&file, "format"), "pt");
    assert_string_equal(metadata(&file, "note"), "a \"quoted\" line\nand \xc3\xbc");
    assert_null(metadata(&file, "no"));
    assert_null(safetensors_find(&file, "__metadata__"));
    assert_null(safetensors_find(&file, "t"));
    safetensors_close(&file);
    safetensors_plan_free(&plan);
}

static void a_file_that_is_made_anew_holds_nothing_of_the_old_one(void **state) {
    (void)state;
    SafetensorsPlan plan;
    SafetensorsFile file;
    Error error;
    size_t shape[1] = {100};
    uint8_t zeros[100] = {0};
    plan_all_types(&plan);
    write_all_types(scratch("all"), &plan);
    safetensors_plan_free(&plan);
    plan = (SafetensorsPlan){.tensors = json_object()};
    safetensors_plan_add(&plan, "x", SAFETENSORS_U8, 1, shape);
    safetensors_plan_finish(&plan);
    assert_true(safetensors_create(scratch("all"), &plan, &error));
    open_or_fail(&file, scratch("all"));
    assert_memory_equal(find_or_fail(&file, "x")->data, zeros, sizeof zeros);
    safetensors_close(&file);
    safetensors_plan_free(&plan);
}

static void the_header_is_padded_to_eight_bytes(void **state) {
    (void)state;
    for (int length = 1; length <= 9; length++) {
        SafetensorsPlan plan;
        SafetensorsFile file;
        Error error;
        size_t shape[1] = {3};
        char name[16] = "";
        for (int i = 0; i < length; i++) { strcat(name, "x"); }
        plan = (SafetensorsPlan){.tensors = json_object()};
        safetensors_plan_add(&plan, name, SAFETENSORS_U8, 1, shape);
        safetensors_plan_finish(&plan);
        assert_int_equal(plan.header_bytes % 8, 0);
        uint8_t *bytes = (uint8_t *)calloc(1, plan.file_bytes);
        memcpy(bytes, plan.header, plan.header_bytes);
        if (!safetensors_open_memory(&file, bytes, plan.file_bytes, "memory", &error)) {
            fail_msg("%s", error.text);
        }
        assert_non_null(safetensors_find(&file, name));
        safetensors_close(&file);
        safetensors_plan_free(&plan);
        free(bytes);
    }
}

// The format's own library refuses longer headers, and so do we, before there is a file.
static void a_header_that_is_too_long_is_refused(void **state) {
    (void)state;
    SafetensorsPlan plan;
    Error error = {""};
    size_t length = SAFETENSORS_MAX_HEADER, shape[1] = {1};
    char *note = (char *)malloc(length + 1);
    memset(note, 'x', length);
    note[length] = '\0';
    plan = (SafetensorsPlan){.tensors = json_object()};
    safetensors_plan_add(&plan, "x", SAFETENSORS_U8, 1, shape);
    json_object_set_new(plan.tensors, "__metadata__", json_pack("{s:s}", "note", note));
    safetensors_plan_finish(&plan);
    unlink(scratch("long"));
    assert_false(safetensors_create(scratch("long"), &plan, &error));
    if (strstr(error.text, "the format allows 100000000") == NULL) { fail_msg("%s", error.text); }
    assert_int_equal(access(scratch("long"), F_OK), -1);
    safetensors_plan_free(&plan);
    free(note);
}

static void files_of_the_formats_own_library_are_read(void **state) {
    (void)state;
    SafetensorsFile file;
    open_or_fail(&file, "test/reference/window_below_length.safetensors");
    const SafetensorsEntry *losses = find_or_fail(&file, "losses"), *tokens = find_or_fail(&file, "tokens");
    static const size_t ten[1] = {10}, batch[2] = {2, 23};
    float first[10];
    assert_true(losses->type == SAFETENSORS_F64 && safetensors_has_shape(losses, 1, ten));
    assert_true(tokens->type == SAFETENSORS_I32 && safetensors_has_shape(tokens, 2, batch));
    assert_false(safetensors_has_shape(tokens, 1, batch));
    assert_false(safetensors_is_real(tokens->type));
    safetensors_read_floats(losses, 0, 10, first);
    assert_true(first[0] > first[9] && first[9] > 0.0f);
    assert_string_equal(metadata(&file, "layers"), "gl");
    safetensors_close(&file);
}

// ---- Numbers --------------------------------------------------------------------------

static double half_value(uint16_t half) {
    int exponent = half >> 10 & 31, fraction = half & 0x3ff;
    double magnitude = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
    return half & 0x8000 ? -magnitude : magnitude;
}

static SafetensorsEntry entry_of(SafetensorsType type, size_t count, const void *data) {
    SafetensorsEntry entry;
    memset(&entry, 0, sizeof entry);
    entry.type = type;
    entry.count = count;
    entry.data = (const uint8_t *)data;
    return entry;
}

// All 65536 of them, with subnormals, both zeros, infinities and NaNs.
static void every_half_is_converted_exactly(void **state) {
    (void)state;
    enum { ALL = 1 << 16 };
    uint16_t *halves = (uint16_t *)malloc(ALL * sizeof *halves);
    float *floats = (float *)malloc(ALL * sizeof *floats);
    for (int i = 0; i < ALL; i++) { halves[i] = (uint16_t)i; }
    SafetensorsEntry entry = entry_of(SAFETENSORS_F16, ALL, halves);
    safetensors_read_floats(&entry, 0, ALL, floats);
    for (int i = 0; i < ALL; i++) {
        bool special = (i >> 10 & 31) == 31;
        uint32_t bits = wire_float_bits(floats[i]);
        if (special) {
            assert_true((i & 0x3ff) != 0 ? isnan(floats[i]) : isinf(floats[i]));
            assert_int_equal(bits & 0x7fffffu, (uint32_t)(i & 0x3ff) << 13);
        } else if (!((double)floats[i] == half_value((uint16_t)i))) {
            fail_msg("%04x is %.9g, not %.9g", (unsigned)i, (double)floats[i], half_value((uint16_t)i));
        }
        assert_int_equal(bits >> 31, i >> 15);
    }
    entry = entry_of(SAFETENSORS_BF16, ALL, halves);
    safetensors_read_floats(&entry, 0, ALL, floats);
    for (int i = 0; i < ALL; i++) { assert_int_equal(wire_float_bits(floats[i]), (uint32_t)i << 16); }
    free(halves);
    free(floats);
}

static void doubles_are_rounded_and_floats_copied(void **state) {
    (void)state;
    static const double doubles[6] = {1.0 / 3.0, -1e-310, 1e-40, INFINITY, -0.0, NAN};
    float floats[6], again[6];
    SafetensorsEntry entry = entry_of(SAFETENSORS_F64, 6, doubles);
    safetensors_read_floats(&entry, 0, 6, floats);
    for (int i = 0; i < 5; i++) {
        assert_int_equal(wire_float_bits(floats[i]), wire_float_bits((float)doubles[i]));
    }
    assert_true(isnan(floats[5]));
    entry = entry_of(SAFETENSORS_F32, 6, floats);
    safetensors_read_floats(&entry, 0, 6, again);
    assert_memory_equal(again, floats, sizeof floats);
    safetensors_read_floats(&entry, 2, 3, again);
    assert_memory_equal(again, floats + 2, 3 * sizeof *floats);
}

static void data_at_an_odd_address_is_read(void **state) {
    (void)state;
    float values[3] = {1.5f, -2.25f, 1e-42f}, floats[3];
    char bytes[sizeof values + 1];
    memcpy(bytes + 1, values, sizeof values);
    SafetensorsEntry entry = entry_of(SAFETENSORS_F32, 3, bytes + 1);
    safetensors_read_floats(&entry, 0, 3, floats);
    assert_memory_equal(floats, values, sizeof values);
}

// ---- Several processes write one file -------------------------------------------------

enum { WRITERS = 4, LARGE = 30011 };

// One rank's part of both tensors. The parts meet in the middle of a page.
static int join_and_write(const char *path, const SafetensorsPlan *plan, const float *values, int rank) {
    Error error = {""};
    int descriptor = safetensors_join(path, plan, &error);
    size_t begin = LARGE * (size_t)rank / WRITERS, end = LARGE * (size_t)(rank + 1) / WRITERS;
    bool good = descriptor >= 0;
    for (int i = 0; good && i < 2; i++) {
        size_t place = planned_place(plan, name_of(i), 0) + begin * sizeof *values;
        good = file_write_all(descriptor, values + begin, (end - begin) * sizeof *values, (off_t)place);
    }
    good = descriptor >= 0 && file_finish(descriptor, path, good, &error);
    if (!good) { fprintf(stderr, "%s\n", error.text); }
    return good ? 0 : 1;
}

static void processes_write_one_file_together(void **state) {
    (void)state;
    SafetensorsPlan plan;
    SafetensorsFile file;
    Error error = {""};
    size_t shape[1] = {LARGE};
    float values[LARGE], floats[LARGE];
    Random random = {5};
    for (int i = 0; i < LARGE; i++) { values[i] = (float)random_normal(&random); }
    plan = (SafetensorsPlan){.tensors = json_object()};
    for (int i = 0; i < 2; i++) { safetensors_plan_add(&plan, name_of(i), SAFETENSORS_F32, 1, shape); }
    safetensors_plan_finish(&plan);
    assert_true(safetensors_create(scratch("together"), &plan, &error));
    pid_t children[WRITERS];
    for (int rank = 0; rank < WRITERS; rank++) {
        children[rank] = fork();
        if (children[rank] == 0) { _exit(join_and_write(scratch("together"), &plan, values, rank)); }
    }
    for (int rank = 0; rank < WRITERS; rank++) {
        int status = -1;
        assert_true(waitpid(children[rank], &status, 0) == children[rank] && status == 0);
    }
    open_or_fail(&file, scratch("together"));
    for (int i = 0; i < 2; i++) {
        safetensors_read_floats(find_or_fail(&file, name_of(i)), 0, LARGE, floats);
        assert_memory_equal(floats, values, sizeof values);
    }
    safetensors_close(&file);
    safetensors_plan_free(&plan);
}

// ---- Failures of the system -----------------------------------------------------------

static void expect_words(const Error *error, const char *words) {
    if (strstr(error->text, words) == NULL) { fail_msg("'%s' does not say '%s'", error->text, words); }
    assert_null(strchr(error->text, '\n'));
}

static void plan_one(SafetensorsPlan *plan, size_t count) {
    size_t shape[1] = {count};
    *plan = (SafetensorsPlan){.tensors = json_object()};
    safetensors_plan_add(plan, "x", SAFETENSORS_F32, 1, shape);
    safetensors_plan_finish(plan);
}

static void a_full_disk_is_an_error_that_names_the_file(void **state) {
    (void)state;
    SafetensorsPlan plan;
    Error error;
    struct rlimit old, small = {4096, 4096};
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    small.rlim_max = old.rlim_max;
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &small);
    plan_one(&plan, 5000);
    bool created = safetensors_create(scratch("large"), &plan, &error);
    setrlimit(RLIMIT_FSIZE, &old);
    signal(SIGXFSZ, handler);
    assert_false(created);
    expect_words(&error, "/large: File too large");
    safetensors_plan_free(&plan);
}

static void files_that_cannot_be_opened_are_named(void **state) {
    (void)state;
    SafetensorsPlan plan;
    SafetensorsFile file;
    Error error;
    plan_one(&plan, 8);
    assert_false(safetensors_create(scratch("no/such/x"), &plan, &error));
    expect_words(&error, "/no/such/x: No such file");
    assert_true(safetensors_create(scratch("short"), &plan, &error));
    safetensors_plan_free(&plan);
    plan_one(&plan, 9);
    assert_int_equal(safetensors_join(scratch("short"), &plan, &error), -1);
    expect_words(&error, "is not the file that is to be written together");
    safetensors_plan_free(&plan);
    assert_false(safetensors_open(&file, scratch("none"), &error));
    expect_words(&error, "/none: No such file");
    assert_false(safetensors_open(&file, scratch_directory, &error));
    expect_words(&error, "is not a regular file");
    assert_false(safetensors_open(&file, "/dev/null", &error));
    expect_words(&error, "is not a regular file");
    fclose(fopen(scratch("zero"), "w"));
    assert_false(safetensors_open(&file, scratch("zero"), &error));
    expect_words(&error, "is empty");
}

// ---- Damaged files --------------------------------------------------------------------

// Opens a copy that ends where the bytes end, so that a sanitizer sees a read beyond;
// touches all that an opened file promises.
static bool try_bytes(const void *bytes, size_t size, Error *error) {
    SafetensorsFile file;
    uint8_t *copy = (uint8_t *)malloc(size > 0 ? size : 1);
    float value = 0.0f;
    volatile uint8_t sum = 0;
    memcpy(copy, bytes, size);
    error->text[0] = '\0';
    bool good = safetensors_open_memory(&file, copy, size, "x.safetensors", error);
    for (size_t i = 0; good && i < file.count; i++) {
        const SafetensorsEntry *entry = &file.entries[i];
        assert_true(i == 0 || strcmp(file.entries[i - 1].name, entry->name) < 0);
        assert_ptr_equal(safetensors_find(&file, entry->name), entry);
        for (size_t j = 0; j < entry->bytes; j++) { sum = (uint8_t)(sum + entry->data[j]); }
        for (size_t j = 0; safetensors_is_real(entry->type) && j < entry->count; j++) {
            safetensors_read_floats(entry, j, 1, &value);
        }
    }
    if (good) { safetensors_close(&file); }
    free(copy);
    return good;
}

// Makes a file of a header and `size` bytes of data.
static size_t make_file(uint8_t *bytes, const char *header, size_t length, uint64_t said, size_t size) {
    for (int i = 0; i < 8; i++) { bytes[i] = (uint8_t)(said >> (8 * i)); }
    memcpy(bytes + 8, header, length);
    memset(bytes + 8 + length, 0x3c, size);
    return 8 + length + size;
}

static void expect_refusal(const uint8_t *bytes, size_t size, const char *what, const char *words) {
    Error error;
    if (try_bytes(bytes, size, &error)) { fail_msg("accepted: %s", what); }
    if (strstr(error.text, words) == NULL) { fail_msg("'%s' does not say '%s'", error.text, words); }
    for (const char *c = error.text; *c != '\0'; c++) { assert_true((unsigned char)*c >= 32 && *c != 127); }
    assert_non_null(strstr(error.text, "x.safetensors"));
}

#define TENSOR(dtype, shape, offsets) "{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}"
#define ONE(dtype, shape, offsets) "{\"a\":" TENSOR(dtype, shape, offsets) "}"
#define TWO(offsets, other) \
    "{\"a\":" TENSOR("\"F32\"", "[2]", offsets) ",\"b\":" TENSOR("\"F32\"", "[2]", other) "}"

// A header, the bytes of data behind it, and what must be said about them.
typedef struct Damage {
    const char *header;
    size_t data;
    const char *words;
} Damage;

static const Damage DAMAGES[] = {
    {"[]", 0, "no safetensors file"},
    {" {}", 0, "no safetensors file"},
    {"", 4, "no safetensors file"},
    {"{", 0, "no safetensors file"},
    {"null", 0, "no safetensors file"},
    {"{]", 0, "not valid"},
    {"{\"a\"}", 0, "not valid"},
    {"{\"a\":{}", 0, "not valid"},
    {"{} {}", 0, "not valid"},
    {"{}x", 0, "not valid"},
    {"{\"a\":nul}", 0, "not valid"},
    {"{\"\xff\":{}}", 0, "not valid"},
    {"{\"a\\u0000b\":{}}", 0, "not valid"},
    {"{\"a\\ud800\":{}}", 0, "not valid"},
    {"{\"a\nb\":{}}", 0, "not valid"},
    {"{\"a\":{},\"a\":{}}", 0, "duplicate"},
    {ONE("\"F32\",\"dtype\":\"F32\"", "[1]", "[0,4]"), 4, "duplicate"},
    {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "duplicate"},
    {"{\"__metadata__\":[]}", 0, "must be a JSON object of strings"},
    {"{\"__metadata__\":\"x\"}", 0, "must be a JSON object of strings"},
    {"{\"__metadata__\":{\"a\":1}}", 0, "must be a JSON object of strings"},
    {"{\"__metadata__\":{\"a\":\"b\",\"c\":{}}}", 0, "must be a JSON object of strings"},
    {"{\"a\\u0007\":{}}", 0, "control character"},
    {"{\"a\\n\":{}}", 0, "control character"},
    {"{\"\\u007f\":{}}", 0, "control character"},
    {"{\"a\":1}", 0, "must be an object"},
    {"{\"a\":[]}", 0, "must be an object"},
    {"{\"a\":null}", 0, "must be an object"},
    {"{\"a\":{}}", 0, "dtype"},
    {ONE("\"F33\"", "[1]", "[0,4]"), 4, "unknown \"dtype\" F33"},
    {ONE("\"f32\"", "[1]", "[0,4]"), 4, "unknown \"dtype\""},
    {ONE("\"\"", "[1]", "[0,4]"), 4, "unknown \"dtype\""},
    {ONE("32", "[1]", "[0,4]"), 4, "a text \"dtype\""},
    {ONE("\"F32\"", "1", "[0,4]"), 4, "\"shape\" of tensor a"},
    {ONE("\"F32\"", "null", "[0,4]"), 4, "\"shape\""},
    {ONE("\"F32\"", "{}", "[0,4]"), 4, "\"shape\""},
    {ONE("\"F32\"", "[-1]", "[0,4]"), 4, "\"shape\""},
    {ONE("\"F32\"", "[1.0]", "[0,4]"), 4, "\"shape\""},
    {ONE("\"F32\"", "[\"1\"]", "[0,4]"), 4, "\"shape\""},
    {ONE("\"F32\"", "[true]", "[0,4]"), 4, "\"shape\""},
    {ONE("\"F32\"", "[[1]]", "[0,4]"), 4, "\"shape\""},
    {ONE("\"F32\"", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4, "at most 8"},
    {ONE("\"F32\"", "[99999999999999999999]", "[0,4]"), 4, "not valid"},
    {ONE("\"F32\"", "[9223372036854775807]", "[0,4]"), 4, "larger than any memory"},
    {ONE("\"F32\"", "[4294967296,4294967296]", "[0,0]"), 0, "larger than any memory"},
    {ONE("\"F32\"", "[4611686018427387904]", "[0,0]"), 0, "larger than any memory"},
    {ONE("\"F64\"", "[2305843009213693952]", "[0,0]"), 0, "larger than any memory"},
    {ONE("\"U8\"", "[9223372036854775807,3,0]", "[0,0]"), 0, "larger than any memory"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "data_offsets"},
    {ONE("\"F32\"", "[1]", "4"), 4, "data_offsets"},
    {ONE("\"F32\"", "[1]", "[0]"), 4, "data_offsets"},
    {ONE("\"F32\"", "[1]", "[0,4,8]"), 4, "data_offsets"},
    {ONE("\"F32\"", "[1]", "[-4,0]"), 4, "data_offsets"},
    {ONE("\"F32\"", "[1]", "[0,-1]"), 4, "data_offsets"},
    {ONE("\"F32\"", "[1]", "[4,0]"), 4, "data_offsets"},
    {ONE("\"F32\"", "[1]", "[0,4.0]"), 4, "data_offsets"},
    {ONE("\"F32\"", "[1]", "[0,null]"), 4, "data_offsets"},
    {ONE("\"F32\"", "[1]", "[0,4]"), 3,
     "ends at byte 4 of the data, but the file has only 3: it is truncated"},
    {ONE("\"F32\"", "[1]", "[0,4]"), 0, "truncated"},
    {ONE("\"F32\"", "[1]", "[9223372036854775803,9223372036854775807]"), 4, "truncated"},
    {ONE("\"F32\"", "[2]", "[0,4]"), 4, "has 4 bytes, but its dtype F32 and its shape make 8"},
    {ONE("\"BF16\"", "[1]", "[0,4]"), 4, "make 2"},
    {ONE("\"F32\"", "[]", "[0,0]"), 0, "make 4"},
    {ONE("\"F32\"", "[0]", "[0,4]"), 4, "make 0"},
    {ONE("\"F32\"", "[1]", "[0,4]"), 5, "last 1 bytes belong to no tensor"},
    {"{}", 1, "last 1 bytes"},
    {ONE("\"F32\"", "[1]", "[4,8]"), 8, "begins at byte 4 of the data, not at 0"},
    {TWO("[0,8]", "[4,12]"), 12, "tensor b begins at byte 4 of the data, not at 8"},
    {TWO("[0,8]", "[0,8]"), 8, "begins at byte"},
    {TWO("[8,16]", "[4,12]"), 16, "tensor b begins at byte 4 of the data, not at 0"},
    {TWO("[0,8]", "[12,20]"), 20, "begins at byte 12 of the data, not at 8"},
    {"{\"a\":" TENSOR("\"F32\"", "[2]", "[0,8]") ",\"b\":" TENSOR("\"F32\"", "[0]", "[4,4]") "}", 8,
     "begins at byte"},
};

static void damaged_headers_are_refused_with_a_clear_line(void **state) {
    (void)state;
    uint8_t bytes[1024];
    size_t count = sizeof DAMAGES / sizeof DAMAGES[0];
    assert_true(count >= 60);
    for (size_t i = 0; i < count; i++) {
        size_t length = strlen(DAMAGES[i].header);
        expect_refusal(bytes, make_file(bytes, DAMAGES[i].header, length, length, DAMAGES[i].data),
                       DAMAGES[i].header, DAMAGES[i].words);
    }
}

static void lengths_that_cannot_be_are_refused(void **state) {
    (void)state;
    static const uint64_t lengths[] = {0, 1, 3, 100, 1000000, 99999999};
    static const uint64_t huge[] = {100000001, UINT64_C(1) << 32, INT64_MAX, UINT64_MAX - 7, UINT64_MAX};
    uint8_t bytes[64];
    size_t size = make_file(bytes, "{}", 2, 2, 0);
    Error error;
    assert_true(try_bytes(bytes, size, &error)); // no tensors is fine
    for (size_t i = 0; i < size; i++) { expect_refusal(bytes, i, "cut", "truncated"); }
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        expect_refusal(bytes, make_file(bytes, "{}", 2, lengths[i], 0), "length", "no safetensors file");
    }
    for (size_t i = 0; i < sizeof huge / sizeof *huge; i++) {
        expect_refusal(bytes, make_file(bytes, "{}", 2, huge[i], 0), "length", "at most 100000000");
    }
}

// Files that another writer may make, and that must be read.
static void unusual_but_whole_files_are_read(void **state) {
    (void)state;
    static const Damage good[] = {
        {"{}      ", 0, ""},
        {"{\"__metadata__\":{}}", 0, ""},
        {"{ \"a\" : " TENSOR("\"F32\"", "[ 1 ]", "[ 0, 4 ]") " } \n", 4, ""},
        {"{\"\":" TENSOR("\"U8\"", "[3]", "[0,3]") "}", 3, ""},
        {ONE("\"I64\"", "[]", "[0,8]"), 8, ""},
        {TWO("[8,16]", "[0,8]"), 16, ""},
        {"{\"a\":" TENSOR("\"F32\"", "[0]", "[8,8]") ",\"b\":" TENSOR("\"F32\"", "[2]", "[0,8]") "}", 8, ""},
        {"{\"a\":" TENSOR("\"F32\"", "[2]", "[0,8]") ",\"b\":" TENSOR("\"F32\"", "[0]", "[0,0]") "}", 8, ""},
        {"{\"a\":" TENSOR("\"U8\"", "[1]", "[0,1]") ",\"b\":" TENSOR("\"F64\"", "[1]", "[1,9]") "}", 9,
         ""}, // not aligned
    };
    uint8_t bytes[512];
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        Error error;
        size_t length = strlen(good[i].header);
        if (!try_bytes(bytes, make_file(bytes, good[i].header, length, length, good[i].data), &error)) {
            fail_msg("%s", error.text);
        }
    }
}

static void deep_nesting_is_refused(void **state) {
    (void)state;
    enum { DEPTH = 200000 };
    uint8_t *bytes = (uint8_t *)malloc(8 + 5 + DEPTH);
    size_t size = make_file(bytes, "{\"a\":", 5, 5 + DEPTH, DEPTH);
    memset(bytes + 13, '[', DEPTH);
    expect_refusal(bytes, size, "deep", "not valid");
    free(bytes);
}

// Every bit of the header flipped, and the file cut at every byte: it is refused or read,
// and nothing outside it is touched.
static void no_flipped_bit_leads_outside_the_file(void **state) {
    (void)state;
    SafetensorsPlan plan;
    Error error;
    int refused = 0, read = 0;
    plan_all_types(&plan);
    uint8_t *bytes = (uint8_t *)calloc(1, plan.file_bytes);
    memcpy(bytes, plan.header, plan.header_bytes);
    assert_true(try_bytes(bytes, plan.file_bytes, &error));
    for (size_t i = 0; i < plan.header_bytes; i++) {
        for (int bit = 0; bit < 8; bit++) {
            bytes[i] ^= (uint8_t)(1 << bit);
            bool good = try_bytes(bytes, plan.file_bytes, &error);
            assert_true(good != error_is_set(&error));
            refused += !good;
            read += good;
            bytes[i] ^= (uint8_t)(1 << bit);
        }
    }
    assert_true(refused > read); // in a name, a flipped bit makes just another name
    for (size_t size = 0; size < plan.file_bytes; size++) { assert_false(try_bytes(bytes, size, &error)); }
    safetensors_plan_free(&plan);
    free(bytes);
}

int main(void) {
    if (mkdtemp(scratch_directory) == NULL) { return 1; }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_written_is_read_again),
        cmocka_unit_test(a_file_that_is_made_anew_holds_nothing_of_the_old_one),
        cmocka_unit_test(the_header_is_padded_to_eight_bytes),
        cmocka_unit_test(a_header_that_is_too_long_is_refused),
        cmocka_unit_test(files_of_the_formats_own_library_are_read),
        cmocka_unit_test(every_half_is_converted_exactly),
        cmocka_unit_test(doubles_are_rounded_and_floats_copied),
        cmocka_unit_test(data_at_an_odd_address_is_read),
        cmocka_unit_test(processes_write_one_file_together),
        cmocka_unit_test(a_full_disk_is_an_error_that_names_the_file),
        cmocka_unit_test(files_that_cannot_be_opened_are_named),
        cmocka_unit_test(damaged_headers_are_refused_with_a_clear_line),
        cmocka_unit_test(lengths_that_cannot_be_are_refused),
        cmocka_unit_test(unusual_but_whole_files_are_read),
        cmocka_unit_test(deep_nesting_is_refused),
        cmocka_unit_test(no_flipped_bit_leads_outside_the_file),
    };
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    static const char *const files[] = {"all", "together", "large", "short", "zero"};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) { remove(scratch(files[i])); }
    remove(scratch_directory);
    return failures;
}
