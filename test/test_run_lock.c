// test_run_lock.c: who may write into the directory of a run: one process at a time; what a
// crash, another machine or a file of rubbish leaves behind keeps nobody out.
#include "test/harness.h"

#include <sys/wait.h>

#include "program/run_lock.h"

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

static bool take(const Scene *scene, RunLock *lock, Error *error) {
    memset(lock, 0, sizeof *lock);
    error->text[0] = '\0';
    return run_lock_take(lock, scene->directory, "here", PATIENCE, error);
}

static void write_lock(const Scene *scene, const char *text) {
    FILE *file = fopen(scene->path, "w");
    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

static void a_living_owner_keeps_the_directory(void **state) {
    const Scene *scene = (const Scene *)*state;
    RunLock first, second;
    Error error;
    char process[32];
    assert_true(take(scene, &first, &error));
    double began = clock_seconds();
    assert_false(take(scene, &second, &error));
    assert_true(clock_seconds() - began < PATIENCE / 2); // on one machine nobody has to wait
    snprintf(process, sizeof process, "process %d", (int)getpid());
    assert_non_null(strstr(error.text, process));
    assert_non_null(strstr(error.text, "on here"));
    assert_non_null(strstr(error.text, " UTC"));
    assert_int_equal(access(scene->path, F_OK), 0);
    run_lock_release(&second); // who has nothing takes nothing away
    assert_int_equal(access(scene->path, F_OK), 0);
    run_lock_release(&first);
    assert_true(take(scene, &second, &error));
}

static void a_dead_owner_keeps_nothing(void **state) {
    const Scene *scene = (const Scene *)*state;
    RunLock lock;
    Error error;
    pid_t child = fork();
    if (child == 0) { _exit(take(scene, &lock, &error) ? 0 : 1); } // without a release, as after a kill
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    double began = clock_seconds();
    assert_true(take(scene, &lock, &error));
    assert_true(clock_seconds() - began < PATIENCE / 2);
}

// Another process may have got the number of a dead one.
static void a_process_of_the_same_number_is_not_the_owner(void **state) {
    const Scene *scene = (const Scene *)*state;
    ProcessName me = run_lock_process((int)getpid());
    RunLock lock;
    Error error;
    char text[512];
    assert_true(me.boot[0] != '\0' && me.space[0] != '\0' && me.started[0] != '\0');
    snprintf(text, sizeof text,
             "{\"host\":\"h\",\"pid\":%d,\"boot\":\"%s\",\"space\":\"%s\",\"started\":\"1\"}", (int)getpid(),
             me.boot, me.space);
    write_lock(scene, text);
    assert_true(take(scene, &lock, &error));
}

static const char elsewhere[] =
    "{\"host\":\"far\",\"pid\":1,\"user\":\"u\",\"since\":\"then\",\"boot\":\"b\","
    "\"space\":\"s\",\"started\":\"1\"}";

static void an_owner_elsewhere_that_is_silent_has_died(void **state) {
    static const char *const left[] = {elsewhere, "", "rubbish", "{}", "{\"pid\":\"x\"}", "[1]"};
    const Scene *scene = (const Scene *)*state;
    RunLock lock;
    Error error;
    for (size_t i = 0; i < sizeof left / sizeof left[0]; i++) {
        write_lock(scene, left[i]);
        assert_true(take(scene, &lock, &error));
        assert_true(run_lock_is_ours(&lock));
    }
}

static void an_owner_elsewhere_that_touches_its_lock_keeps_it(void **state) {
    const Scene *scene = (const Scene *)*state;
    RunLock lock;
    Error error;
    write_lock(scene, elsewhere);
    pid_t child = fork();
    for (int i = 0; child == 0 && i < 100; i++) {
        utimensat(AT_FDCWD, scene->path, NULL, 0);
        sleep_seconds(0.05);
    }
    if (child == 0) { _exit(0); }
    bool taken = take(scene, &lock, &error);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    assert_false(taken);
    assert_non_null(strstr(error.text, "of u on far, process 1, since then"));
}

static void a_lock_that_was_taken_over_is_noticed(void **state) {
    const Scene *scene = (const Scene *)*state;
    RunLock lock;
    Error error;
    assert_true(take(scene, &lock, &error));
    assert_true(run_lock_is_ours(&lock));
    write_lock(scene, elsewhere);
    assert_false(run_lock_is_ours(&lock));
    run_lock_release(&lock);
    assert_int_equal(access(scene->path, F_OK), 0);
}

#define LOCK_TEST(function) cmocka_unit_test_setup_teardown(function, begin, end)

int main(void) {
    const struct CMUnitTest tests[] = {
        LOCK_TEST(a_living_owner_keeps_the_directory),
        LOCK_TEST(a_dead_owner_keeps_nothing),
        LOCK_TEST(a_process_of_the_same_number_is_not_the_owner),
        LOCK_TEST(an_owner_elsewhere_that_is_silent_has_died),
        LOCK_TEST(an_owner_elsewhere_that_touches_its_lock_keeps_it),
        LOCK_TEST(a_lock_that_was_taken_over_is_noticed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
