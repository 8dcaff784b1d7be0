// test_run_lock.c: who may write into the directory of a run: one process at a time. What a
// process has left, however it ended, keeps nobody out.
#include "test/harness.h"

#include <sys/wait.h>

#include "program/run_directory.h"

static char directory[] = "/tmp/acco-lock-XXXXXX";

static bool take(Error *error) {
    error->text[0] = '\0';
    return run_directory_lock(directory, "here", error);
}

// A process that holds the lock until it is killed; it has it when this returns.
static pid_t start_owner(void) {
    int ready[2];
    char byte = 0;
    Error error;
    assert_int_equal(pipe(ready), 0);
    pid_t child = fork();
    if (child == 0) {
        alarm(60); // a test that fails leaves it behind
        byte = take(&error) ? 'y' : 'n';
        if (write(ready[1], &byte, 1) != 1) { _exit(1); }
        for (;;) { pause(); }
    }
    assert_int_equal(read(ready[0], &byte, 1), 1);
    assert_int_equal(byte, 'y');
    close(ready[0]);
    close(ready[1]);
    return child;
}

static void only_a_living_owner_keeps_the_directory(void **state) {
    (void)state;
    Error error;
    char owner[64];
    for (int time = 0; time < 2; time++) {
        pid_t child = start_owner();
        assert_false(take(&error));
        snprintf(owner, sizeof owner, "in use by another run: process %d on here.", (int)child);
        assert_non_null(strstr(error.text, owner));
        kill(child, SIGKILL);
        assert_int_equal(waitpid(child, NULL, 0), child);
    }
    assert_true(take(&error));
    assert_false(take(&error)); // also within one process: a lock belongs to what is open
}

static int begin(void **state) {
    (void)state;
    return mkdtemp(directory) == NULL ? -1 : 0;
}

static int end(void **state) {
    (void)state;
    tree_remove(directory);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(only_a_living_owner_keeps_the_directory)};
    return cmocka_run_group_tests(tests, begin, end);
}
