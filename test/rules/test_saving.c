// test_saving.c: what a checkpoint brings to disk, and in which order.
//
// After a power failure a file holds what was there at its latest fsync, and a directory
// the names that were there at its own. No test can pull the plug, so this one watches
// the calls: the program's fsync() is the one below, which notes what it was called for.
#include <stdbool.h>

#include "runtime/system.h"

// Of file systems that cannot exchange two names.
static bool names_stay;
#define names_exchange(one, other) (!names_stay && names_exchange(one, other))

#include "test/rules/rules_bench.h"

#include "checkpoint/save.h"

// ---- The watch ------------------------------------------------------------------------

enum { MOST_SYNCS = 64 };

typedef struct Sync {
    char path[PATH_MAX];
    bool is_directory;
    bool published; // commit-N had its name already
    uint32_t sum;   // CRC-32 of the file as it was then
} Sync;

typedef struct Watch {
    const char *final; // the path of commit-N
    Sync syncs[MOST_SYNCS];
    int count;
    int fails; // this call, from 1 on, fails as if the disk did; 0: none
} Watch;

static Watch watch;

// CRC-32 of a file.
static uint32_t file_sum(const char *path) {
    static unsigned char block[1 << 16];
    uint32_t sum = 0;
    FILE *file = fopen(path, "rb");
    if (file == NULL) { return 0; }
    for (size_t count; (count = fread(block, 1, sizeof block, file)) > 0;) {
        sum = (uint32_t)crc32(sum, block, (uInt)count);
    }
    fclose(file);
    return sum;
}

// Takes the place of the C library's. Threads of one checkpoint call it one after
// another.
int fsync(int descriptor) {
    if (watch.final != NULL && watch.count < MOST_SYNCS) {
        Sync *sync = &watch.syncs[watch.count++];
        char link[64];
        struct stat status;
        snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
        ssize_t length = readlink(link, sync->path, sizeof sync->path - 1);
        sync->path[length > 0 ? length : 0] = '\0';
        sync->is_directory = fstat(descriptor, &status) == 0 && S_ISDIR(status.st_mode);
        sync->published = access(watch.final, F_OK) == 0;
        sync->sum = sync->is_directory ? 0 : file_sum(sync->path);
        if (watch.count == watch.fails) {
            errno = EIO;
            return -1;
        }
    }
    return (int)syscall(SYS_fsync, descriptor);
}

static const char *last_name(const char *path) { return strrchr(path, '/') + 1; }

// The latest sync of a file or directory of this name; -1: there was none.
static int sync_of(const char *name, bool is_directory) {
    int found = -1;
    for (int i = 0; i < watch.count; i++) {
        const Sync *sync = &watch.syncs[i];
        if (sync->is_directory == is_directory && strcmp(last_name(sync->path), name) == 0) { found = i; }
    }
    return found;
}

// ---- What must have been brought to disk ----------------------------------------------

// Every file below `directory` was synced with the bytes that it has, before commit-N had
// its name and before checkpoint.json, which comes last. Returns how many there are.
static int expect_files(const char *directory, int manifest) {
    int count = 0;
    DIR *stream = opendir(directory);
    assert_non_null(stream);
    for (struct dirent *entry; (entry = readdir(stream)) != NULL;) {
        char path[PATH_MAX];
        if (entry->d_name[0] == '.') { continue; }
        assert_true(snprintf(path, sizeof path, "%s/%s", directory, entry->d_name) < (int)sizeof path);
        if (entry->d_type == DT_DIR) {
            count += expect_files(path, manifest);
            continue;
        }
        int found = sync_of(entry->d_name, false);
        if (found < 0 || watch.syncs[found].sum != file_sum(path)) {
            fail_msg("%s was not synced as it is", path);
        }
        if (watch.syncs[found].published || found > manifest) { fail_msg("%s was synced too late", path); }
        count++;
    }
    closedir(stream);
    return count;
}

// The names: those in the directory before it is renamed, its new name after that.
static void expect_saved_in_order(const CheckpointPaths *paths) {
    int manifest = sync_of("checkpoint.json", false), model = sync_of("model", true),
        inside = sync_of("unfinished", true), outside = sync_of("checkpoints", true);
    assert_true(watch.count > 0 && watch.count < MOST_SYNCS && manifest >= 0);
    assert_true(expect_files(paths->final, manifest) >= 4); // the manifest, the state, two of the model
    if (!(model >= 0 && model < manifest)) { fail_msg("the names of the model's files: %d", model); }
    if (!(inside > manifest && !watch.syncs[inside].published)) { fail_msg("the files' names: %d", inside); }
    if (!(outside > inside && watch.syncs[outside].published)) { fail_msg("the new name: %d", outside); }
}

// ---- A run that saves -----------------------------------------------------------------

// While a checkpoint is written a better one is found, which is on disk only after that: the best
// one of before stays until then.
static void expect_best_to_stay(CheckpointedRun *run, Bench *bench, bool beside) {
    Error error = {""};
    SavedReport report;
    CheckpointPaths best = checkpoint_paths(run->directory, run->saved_commit);
    run->keep_best = true;
    run->best_commit = run->saved_commit;
    bench->rule->advance(&bench->scheduler);
    assert_true(checkpoint_begin(run, beside, &error));
    run->best_commit = bench->scheduler.optimizer.steps + 1;
    assert_true(checkpoint_end(run, &report, &error));
    assert_int_equal(access(best.final, F_OK), 0);
    bench->rule->advance(&bench->scheduler);
    assert_true(checkpoint_begin(run, beside, &error) && checkpoint_end(run, &report, &error));
    assert_true(access(best.final, F_OK) != 0);
}

static int save_after_two_commits(const char *rule, const char *directory, bool beside, int fails) {
    ModelConfig config;
    TrainedPart part;
    const TrainedChoice everything = {.freeze = "", .adapted = "*"};
    Error error = {""};
    model_config_from_preset(&MODEL_PRESETS[0], &config);
    config.layers = 1;
    config.channels = config.mlp_channels = 16;
    assert_true(trained_part_make(&part, &config, &everything, &error));
    RunSpec spec = noisy_spec(rule, part.table.parameter_count);
    Transport transport;
    transport_open_alone(&transport, "a test");
    Bench *bench = (Bench *)malloc(sizeof *bench);
    bench_open(bench, &spec, &transport, NULL);
    for (int i = 0; i < 2; i++) { bench->rule->advance(&bench->scheduler); }
    CheckpointedRun run;
    memset(&run, 0, sizeof run);
    run.transport = &transport;
    run.scheduler = &bench->scheduler;
    run.rule = bench->rule;
    run.config = &config;
    run.table = &part.table;
    run.part = &part;
    run.B = run.T = 1;
    run.directory = directory;
    run.version = "a test";
    run.revision = "abc";
    run.rounding = "by hand";
    run.keep = 1;
    run.options = json_object();
    run.data = "";
    CheckpointPaths paths = checkpoint_paths(directory, bench->scheduler.optimizer.steps);
    SavedReport report;
    memset(&watch, 0, sizeof watch);
    watch.final = paths.final;
    watch.fails = fails;
    bool begun = checkpoint_begin(&run, beside, &error);
    bool saved = begun && checkpoint_end(&run, &report, &error);
    watch.final = NULL;
    if (saved == (fails > 0)) { fail_msg("call %d of fsync fails: saved %d, %s", fails, saved, error.text); }
    if (saved) { expect_saved_in_order(&paths); }
    if (!saved) {
        bool published = watch.syncs[fails - 1].published;
        assert_non_null(strstr(error.text, strerror(EIO)));
        assert_int_equal(access(paths.final, F_OK) == 0, published);
        assert_true(run.saved_commit < bench->scheduler.optimizer.steps);
    }
    int syncs = watch.count;
    if (saved && fails == 0) { expect_best_to_stay(&run, bench, beside); }
    json_decref(run.options);
    bench_close(bench);
    transport_close(&transport);
    trained_part_free(&part);
    free(bench);
    return syncs;
}

// At once and beside training; of each kind of rule one.
static void everything_is_on_disk_before_a_checkpoint_has_its_name(void **state) {
    (void)state;
    static const char *const rules[] = {"zero1", "acco", "co2"};
    for (int i = 0; i < 6; i++) {
        char directory[] = "/tmp/acco-saving-XXXXXX";
        assert_non_null(mkdtemp(directory));
        save_after_two_commits(rules[i / 2], directory, i % 2 == 1, 0);
        tree_remove(directory);
    }
}

// Whichever fsync fails, the checkpoint is not called saved, and has its name only if all that it
// consists of was on disk before.
static void a_disk_that_fails_saves_nothing(void **state) {
    (void)state;
    for (int beside = 0; beside < 2; beside++) {
        for (int fails = 0, syncs = 1; fails <= syncs; fails++) {
            char directory[] = "/tmp/acco-saving-XXXXXX";
            assert_non_null(mkdtemp(directory));
            int made = save_after_two_commits("zero1", directory, beside == 1, fails);
            if (fails == 0) { syncs = made; }
            tree_remove(directory);
        }
    }
}

// A checkpoint that a user has renamed, to keep it, is none of the run's any more.
static void other_names_are_no_checkpoints(void **state) {
    (void)state;
    static const char *const names[] = {"commit-7", "commit-9.old", "commit-8 copy", "commit-", "unfinished"};
    char folder[] = "/tmp/acco-saving-XXXXXX", path[PATH_MAX];
    assert_non_null(mkdtemp(folder));
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        assert_int_equal(mkdir(path, 0777), 0);
    }
    assert_int_equal(checkpoint_newest_in(folder, INT64_MAX), 7);
    assert_int_equal(checkpoint_newest_in(folder, 7), -1);
    tree_remove(folder);
}

// What was there before is replaced and leaves nothing behind. A name is in the directory before
// its last slash, which may be the root.
static void a_directory_takes_the_place_of_another(void **state) {
    (void)state;
    static const char *const names[][2] = {{"/tmp", "/"}, {"/tmp/x", "/tmp"}, {"x", "."}};
    char folder[] = "/tmp/acco-saving-XXXXXX", made[PATH_MAX], final[PATH_MAX], file[PATH_MAX + 8];
    Error error = {""};
    memset(&watch, 0, sizeof watch);
    watch.final = "";
    assert_non_null(mkdtemp(folder));
    snprintf(made, sizeof made, "%s/unfinished", folder);
    snprintf(final, sizeof final, "%s/final", folder);
    for (int round = 0; round < 3; round++) {
        names_stay = round == 2;
        assert_int_equal(mkdir(made, 0777), 0);
        snprintf(file, sizeof file, "%s/file-%d", made, round);
        fclose(fopen(file, "w"));
        assert_true(directory_publish(made, final, &error));
        snprintf(file, sizeof file, "file-%d", round);
        assert_true(directory_has(final, file) && !directory_has(folder, "unfinished"));
        snprintf(file, sizeof file, "file-%d", round - 1);
        assert_true(round == 0 || !directory_has(final, file));
    }
    names_stay = false;
    int next = dup(0);
    close(next);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        assert_true(name_sync(names[i][0], &error));
        assert_true(watch.syncs[watch.count - 1].is_directory);
        char whole[PATH_MAX];
        assert_string_equal(watch.syncs[watch.count - 1].path, realpath(names[i][1], whole));
    }
    assert_int_equal(dup(0), next); // nothing stays open
    close(next);
    tree_remove(folder);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_directory_takes_the_place_of_another),
        cmocka_unit_test(everything_is_on_disk_before_a_checkpoint_has_its_name),
        cmocka_unit_test(a_disk_that_fails_saves_nothing),
        cmocka_unit_test(other_names_are_no_checkpoints),
    };
    return run_rules_tests(tests, sizeof tests / sizeof tests[0]);
}
