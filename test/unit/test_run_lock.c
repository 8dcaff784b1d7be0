// test_run_lock.c: who may write into the directory of a run: one process at a time; a file
// that a crash, another machine or another program has left keeps nobody out.
#include "test/harness.h"

#include <signal.h>
#include <sys/wait.h>

#include "program/run_directory.h"

#define PATIENCE 0.6

typedef struct Scene {
    char directory[64], path[96];
} Scene;

static int begin(void **state) {
    static Scene scene;
    snprintf(scene.directory, sizeof scene.directory, "/tmp/acco-lock-XXXXXX");
    if (mkdtemp(scene.directory) == NULL) { return -1; }
    snprintf(scene.path, sizeof scene.path, "%s/lock", scene.directory);
    *state = &scene;
    return 0;
}

static int end(void **state) {
    tree_remove(((Scene *)*state)->directory);
    return 0;
}

// The thread of a lock reads it until the process ends.
static RunLock *new_lock(void) {
    static RunLock locks[64];
    static int count = 0;
    assert_true(count < 64);
    return &locks[count++];
}

static bool take(const Scene *scene, RunLock *lock, Error *error) {
    error->text[0] = '\0';
    return run_lock_take(lock, scene->directory, "here", PATIENCE, error);
}

static void write_lock(const Scene *scene, const char *text) {
    FILE *file = fopen(scene->path, "w");
    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

// Starts a process that touches the lock as an owner does. The caller ends it.
static pid_t start_toucher(const Scene *scene) {
    pid_t child = fork();
    while (child == 0 && utimensat(AT_FDCWD, scene->path, NULL, 0) == 0) { sleep_seconds(0.05); }
    if (child == 0) { _exit(0); }
    return child;
}

static void end_toucher(pid_t child) {
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
}

static void a_living_owner_keeps_the_directory(void **state) {
    const Scene *scene = (const Scene *)*state;
    RunLock *first = new_lock(), *second = new_lock();
    Error error;
    char process[64];
    assert_true(take(scene, first, &error));
    pid_t child = start_toucher(scene); // more often than the owner itself
    assert_false(take(scene, second, &error));
    end_toucher(child);
    snprintf(process, sizeof process, "in use by another run: process %d on here", (int)getpid());
    assert_non_null(strstr(error.text, process));
    run_lock_release(second); // what does not hold the lock leaves it
    assert_int_equal(access(scene->path, F_OK), 0);
    run_lock_release(first);
    assert_true(take(scene, new_lock(), &error));
}

static void a_dead_owner_keeps_nothing(void **state) {
    const Scene *scene = (const Scene *)*state;
    Error error;
    char text[64];
    pid_t child = fork();
    if (child == 0) { _exit(0); }
    assert_int_equal(waitpid(child, NULL, 0), child);
    snprintf(text, sizeof text, "here %d\n", (int)child);
    write_lock(scene, text);
    double began = clock_seconds();
    assert_true(take(scene, new_lock(), &error));
    assert_true(clock_seconds() - began < PATIENCE / 2); // on one host it is known at once
}

// The slower of two runs that have found the same owner dead replaces the lock of the other,
// which notices.
static void of_two_that_take_over_one_does(void **state) {
    const Scene *scene = (const Scene *)*state;
    Error error;
    write_lock(scene, "far 1\n");
    pid_t child = fork();
    while (child == 0) { // the slower one: waits for the new lock, and replaces it
        char text[RUN_LOCK_TEXT];
        bool there = run_lock_read(scene->path, text) >= 0;
        if (there && strncmp(text, "here", 4) == 0) { break; }
        sleep_seconds(0.01);
    }
    if (child == 0) {
        write_lock(scene, "near 2\n");
        _exit(0);
    }
    assert_false(take(scene, new_lock(), &error));
    waitpid(child, NULL, 0);
    assert_non_null(strstr(error.text, "taken by another run at the same moment: near 2"));
}

// After a restart of the machine another process may have the number of the dead one.
static void a_process_of_the_same_number_is_not_the_owner(void **state) {
    const Scene *scene = (const Scene *)*state;
    Error error;
    char text[64];
    snprintf(text, sizeof text, "here %d\n", (int)getpid());
    write_lock(scene, text);
    assert_true(take(scene, new_lock(), &error));
}

static void an_owner_elsewhere_that_is_silent_has_died(void **state) {
    static const char *const left[] = {"far 1\n",    "",          "rubbish",        "far",
                                       "\xff\xfe 7", "here -1\n", "{\"pid\":\"x\"}"};
    const Scene *scene = (const Scene *)*state;
    Error error;
    for (size_t i = 0; i < sizeof left / sizeof left[0]; i++) {
        char text[RUN_LOCK_TEXT], mine[64];
        write_lock(scene, left[i]);
        RunLock *lock = new_lock();
        assert_true(take(scene, lock, &error));
        assert_true(run_lock_read(scene->path, text) >= 0);
        snprintf(mine, sizeof mine, "here %d\n", (int)getpid());
        assert_string_equal(text, mine);
        run_lock_release(lock);
    }
}

static void an_owner_elsewhere_that_touches_its_lock_keeps_it(void **state) {
    const Scene *scene = (const Scene *)*state;
    Error error;
    write_lock(scene, "far 1\n");
    pid_t child = start_toucher(scene);
    bool taken = take(scene, new_lock(), &error);
    end_toucher(child);
    assert_false(taken);
    assert_non_null(strstr(error.text, "process 1 on far"));
}

// The owner's own thread touches the file.
static void an_owner_touches_its_lock(void **state) {
    const Scene *scene = (const Scene *)*state;
    Error error;
    RunLock *lock = new_lock();
    char text[RUN_LOCK_TEXT];
    struct timespec old = {1, 0}, times[2] = {old, old};
    int64_t touched = 1000000000;
    assert_true(take(scene, lock, &error));
    sleep_seconds(RUN_LOCK_BEAT / 4);
    assert_int_equal(utimensat(AT_FDCWD, scene->path, times, 0), 0);
    for (int i = 0; i < 40 && touched == 1000000000; i++) {
        sleep_seconds(RUN_LOCK_BEAT / 10);
        touched = run_lock_read(scene->path, text);
    }
    assert_true(touched > 1000000000);
    run_lock_release(lock);
}

// A run that was stopped and replaced does not end the lock of the run that replaced it. It
// releases before its thread looks again, which would end this process.
static void a_replaced_owner_leaves_the_new_lock(void **state) {
    const Scene *scene = (const Scene *)*state;
    RunLock *lock = new_lock();
    Error error;
    assert_true(take(scene, lock, &error));
    sleep_seconds(0.2); // behind the first look of its thread
    write_lock(scene, "elsewhere 7\n");
    run_lock_release(lock);
    assert_int_equal(access(scene->path, F_OK), 0);
}

#define LOCK_TEST(function) cmocka_unit_test_setup_teardown(function, begin, end)

int main(void) {
    const struct CMUnitTest tests[] = {
        LOCK_TEST(a_living_owner_keeps_the_directory),
        LOCK_TEST(a_dead_owner_keeps_nothing),
        LOCK_TEST(of_two_that_take_over_one_does),
        LOCK_TEST(a_process_of_the_same_number_is_not_the_owner),
        LOCK_TEST(an_owner_elsewhere_that_is_silent_has_died),
        LOCK_TEST(an_owner_elsewhere_that_touches_its_lock_keeps_it),
        LOCK_TEST(an_owner_touches_its_lock),
        LOCK_TEST(a_replaced_owner_leaves_the_new_lock),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
