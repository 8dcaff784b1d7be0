// test_fuzz.c: no input breaks a parser. make fuzz searches for such inputs with clang's
// libFuzzer. This test does a part of that in seconds and with any compiler: it runs the
// targets of test/fuzz on their seeds and on damaged copies of them, the same ones every
// time.
//
// Every target runs in a process of its own and keeps its current input in memory that it
// shares with the test. So whatever ends it (a violated property, a sanitizer, a signal,
// the alarm), the test can say which input it was, and leaves that in a file.
#include <dirent.h>
#include <errno.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "test/harness.h"

#include "test/fuzz/fuzz_checkpoint.h"
#include "test/fuzz/fuzz_config.h"
#include "test/fuzz/fuzz_dataloader.h"
#include "test/fuzz/fuzz_documents.h"
#include "test/fuzz/fuzz_eval.h"
#include "test/fuzz/fuzz_hf_model.h"
#include "test/fuzz/fuzz_options.h"
#include "test/fuzz/fuzz_safetensors.h"
#include "test/fuzz/fuzz_text.h"
#include "test/fuzz/fuzz_token_file.h"
#include "test/fuzz/fuzz_tokenizer.h"

enum {
    MOST_SEEDS = 64,
    SEED_BYTES = 1 << 13,
    INPUT_BYTES = 2 * SEED_BYTES,
    DAMAGED = 1000, // damaged copies of every seed
    PATIENCE = 120  // seconds for a target; enough under every sanitizer
};

typedef struct Named {
    const char *name;
    FuzzTarget target;
} Named;

static const Named targets[] = {{"checkpoint", fuzz_checkpoint},
                                {"config", fuzz_config},
                                {"dataloader", fuzz_dataloader},
                                {"documents", fuzz_documents},
                                {"eval", fuzz_eval},
                                {"options", fuzz_options},
                                {"hf_model", fuzz_hf_model},
                                {"safetensors", fuzz_safetensors},
                                {"token_file", fuzz_token_file},
                                {"text", fuzz_text},
                                {"tokenizer", fuzz_tokenizer}};

enum { TARGET_COUNT = sizeof targets / sizeof targets[0] };

// The input that the child is working on. Shared.
typedef struct Input {
    char label[300];
    size_t size;
    uint8_t bytes[INPUT_BYTES];
} Input;

typedef struct Seed {
    char name[128];
    size_t size;
    uint8_t bytes[SEED_BYTES];
} Seed;

typedef struct Seeds {
    int count;
    Seed seeds[MOST_SEEDS];
} Seeds;

// ---- Seeds ----------------------------------------------------------------------------

// The path of test/fuzz with `inside` behind it.
static const char *folder_of(const char *inside, char path[512]) {
    const char *root = getenv("PROJECT_ROOT");
    snprintf(path, 512, "%.300s/test/fuzz%s", root != NULL ? root : ".", inside);
    return path;
}

static int compare_seeds(const void *a, const void *b) {
    return strcmp(((const Seed *)a)->name, ((const Seed *)b)->name);
}

static void read_seed(Seed *seed, const char *folder, const char *name) {
    char path[900];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    snprintf(seed->name, sizeof seed->name, "%.127s", name);
    FILE *file = fopen(path, "rb");
    if (file == NULL) { fail_msg("cannot read %s: %s", path, strerror(errno)); }
    seed->size = fread(seed->bytes, 1, sizeof seed->bytes, file);
    if (fgetc(file) != EOF) { fail_msg("%s has more than %d bytes: seeds are small", path, (int)SEED_BYTES); }
    fclose(file);
}

// The seeds of a target in the order of their names. Free with free.
static Seeds *read_seeds(const char *name) {
    char inside[64], folder[512];
    Seeds *seeds = (Seeds *)calloc(1, sizeof *seeds);
    snprintf(inside, sizeof inside, "/corpus/%s", name);
    DIR *directory = opendir(folder_of(inside, folder));
    if (directory == NULL || seeds == NULL) {
        fail_msg("there is no %s: PROJECT_ROOT says where test/fuzz is", folder);
    }
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;) {
        if (entry->d_name[0] == '.') { continue; }
        assert_true(seeds->count < MOST_SEEDS);
        read_seed(&seeds->seeds[seeds->count++], folder, entry->d_name);
    }
    closedir(directory);
    qsort(seeds->seeds, (size_t)seeds->count, sizeof(Seed), compare_seeds);
    return seeds;
}

// ---- Damage ---------------------------------------------------------------------------

// A number below `count`; 0 if count is 0.
static size_t pick(Random *random, size_t count) {
    return count > 0 ? (size_t)(random_bits(random) % count) : 0;
}

// Replaces `removed` bytes at `at` by `count` others; does nothing if there is no room.
static void replace(Input *input, size_t at, size_t removed, const uint8_t *bytes, size_t count) {
    size_t rest = input->size - at - removed;
    if (at + count + rest > INPUT_BYTES) { return; }
    memmove(input->bytes + at + count, input->bytes + at + removed, rest);
    memcpy(input->bytes + at, bytes, count);
    input->size = at + count + rest;
}

// Flips a bit, or writes a byte that means something to a parser.
static void damage_bytes(Input *input, Random *random) {
    static const uint8_t telling[] = {0,  1,  9,  10,  32,  34,  35,  45,  48, 57,
                                      92, 91, 93, 123, 125, 127, 128, 192, 255};
    size_t at = pick(random, input->size);
    if (input->size == 0) { return; }
    if (pick(random, 2) == 0) {
        input->bytes[at] ^= (uint8_t)(1u << pick(random, 8));
    } else {
        input->bytes[at] = telling[pick(random, sizeof telling)];
    }
}

// Replaces a number in a text by another one.
static void damage_number(Input *input, Random *random) {
    static const char *const numbers[] = {
        "0", "-1", "1e400", "2147483648", "4294967295", "9223372036854775807", "1.5", "null", "nan"};
    const char *number = numbers[pick(random, sizeof numbers / sizeof numbers[0])];
    size_t at = pick(random, input->size), end;
    while (at < input->size && (input->bytes[at] < '0' || input->bytes[at] > '9')) { at++; }
    for (end = at; end < input->size && input->bytes[end] >= '0' && input->bytes[end] <= '9'; end++) {}
    if (at < end) { replace(input, at, end - at, (const uint8_t *)number, strlen(number)); }
}

// Inserts a stretch of another seed of the target, or replaces a stretch by it.
static void damage_splice(Input *input, const Seeds *seeds, Random *random) {
    const Seed *other = &seeds->seeds[pick(random, (size_t)seeds->count)];
    size_t from = pick(random, other->size), count = pick(random, other->size - from + 1);
    size_t at = pick(random, input->size + 1), removed = pick(random, input->size - at + 1);
    replace(input, at, pick(random, 2) == 0 ? removed : 0, other->bytes + from, count);
}

static void damage(Input *input, const Seeds *seeds, Random *random) {
    switch (pick(random, 6)) {
    case 0: input->size = pick(random, input->size + 1); break;
    case 1: damage_splice(input, seeds, random); break;
    case 2: damage_number(input, random); break;
    case 3: { // a stretch goes
        size_t at = pick(random, input->size + 1);
        replace(input, at, pick(random, input->size - at + 1) / 4, (const uint8_t *)"", 0);
        break;
    }
    default: damage_bytes(input, random);
    }
}

// ---- Running targets ------------------------------------------------------------------

// Gives the target a copy of exactly the input's size, for the sanitizer.
static bool run_input(FuzzTarget target, const Input *input) {
    FuzzPart part = {input->bytes, input->size};
    uint8_t *copy = fuzz_copy(part);
    bool accepted = target(copy, input->size);
    free(copy);
    return accepted;
}

static void take_seed(Input *input, const Seed *seed) {
    snprintf(input->label, sizeof input->label, "%s", seed->name);
    memcpy(input->bytes, seed->bytes, seed->size);
    input->size = seed->size;
}

// In the child: all seeds, then damaged copies of all. Returns if no input broke the
// parser.
static void run_target(const Named *named, const Seeds *seeds, Input *input) {
    Random random = {20261120};
    alarm(PATIENCE);
    for (int i = 0; i < seeds->count; i++) {
        take_seed(input, &seeds->seeds[i]);
        bool accepted = run_input(named->target, input), good = strncmp(input->label, "good-", 5) == 0;
        fuzz_require(accepted == good, "seeds good-* are accepted, bad-* are refused");
    }
    for (int i = 0; i < seeds->count; i++) {
        for (int copy = 0; copy < DAMAGED; copy++) {
            take_seed(input, &seeds->seeds[i]);
            snprintf(input->label, sizeof input->label, "%s, damaged copy %d", seeds->seeds[i].name, copy);
            for (size_t times = 1 + pick(&random, 3); times > 0; times--) { damage(input, seeds, &random); }
            run_input(named->target, input);
        }
    }
}

// Writes the input that ended the child into a file.
static void save_input(const Named *named, const Input *input, char path[512]) {
    const char *parent = getenv("TMPDIR");
    snprintf(path, 512, "%.300s/fuzz-%s-%d", parent != NULL ? parent : "/tmp", named->name, (int)getpid());
    FILE *file = fopen(path, "wb");
    if (file != NULL) {
        fwrite(input->bytes, 1, input->size, file);
        fclose(file);
    }
}

static void no_input_breaks_it(void **state) {
    const Named *named = (const Named *)*state;
    Seeds *seeds = read_seeds(named->name);
    Input *input =
        (Input *)mmap(NULL, sizeof *input, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(seeds->count > 0 && input != MAP_FAILED);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        run_target(named, seeds, input);
        exit(0); // and not _exit, because exit looks for leaks
    }
    int status = 0;
    assert_true(child > 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    free(seeds);
    if (status != 0) {
        char path[512];
        save_input(named, input, path);
        fail_msg("%s: %s ended it with status 0x%x; the input is in %s", named->name, input->label,
                 (unsigned)status, path);
    }
    munmap(input, sizeof *input);
}

// make fuzz finds the targets by the names of their files. The table above has the same
// ones.
static void every_target_is_run_here(void **state) {
    char path[512];
    int found = 0;
    DIR *directory = opendir(folder_of("", path));
    assert_non_null(directory);
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;) {
        char name[64] = "";
        if (sscanf(entry->d_name, "fuzz_%63[a-z_].h", name) != 1) { continue; }
        bool known = false;
        for (int i = 0; i < (int)TARGET_COUNT; i++) { known = known || strcmp(targets[i].name, name) == 0; }
        if (!known) { fail_msg("%s is a target that this test does not run", entry->d_name); }
        found++;
    }
    closedir(directory);
    assert_int_equal(found, TARGET_COUNT);
    (void)state;
}

int main(void) {
    struct CMUnitTest tests[TARGET_COUNT + 1];
    memset(tests, 0, sizeof tests);
    for (int i = 0; i < (int)TARGET_COUNT; i++) {
        tests[i].name = targets[i].name;
        tests[i].test_func = no_input_breaks_it;
        tests[i].initial_state = (void *)&targets[i];
    }
    tests[TARGET_COUNT].name = "every_target_is_run_here";
    tests[TARGET_COUNT].test_func = every_target_is_run_here;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
