// test_hundred_lines.c: docs/acco_in_100_lines.c keeps what it says: its threads compute ACCO's
// two formulas bit for bit, they hide the network, and it is a program of at most 100 lines.
#define main hundred_lines_main
#include "docs/acco_in_100_lines.c"
#undef main
#include "test/harness.h"

static const char *root(void) { return getenv("PROJECT_ROOT") != NULL ? getenv("PROJECT_ROOT") : "."; }

typedef struct State {
    float theta[SIZE], momentum[SIZE];
} State;

// Opt: a step of SGD with momentum, from the sums of all workers.
static State step(State state, float sums[WORKERS][SIZE], int count) {
    for (int i = 0; i < SIZE; i++) {
        float sum = sums[0][i];
        for (int w = 1; w < WORKERS; w++) { sum += sums[w][i]; }
        state.momentum[i] = 0.5f * (state.momentum[i] + sum / (float)count);
        state.theta[i] -= 0.5f * state.momentum[i];
    }
    return state;
}

// A round at theta, with the samples from `sample` on: accumulate(), which reads and writes
// nothing else.
static void add_round(float sums[WORKERS][SIZE], const float theta[SIZE], int sample) {
    Scheduler s = {.sample = sample};
    memcpy(s.theta, theta, sizeof s.theta);
    memcpy(s.gradients, sums, sizeof s.gradients);
    accumulate(&s);
    memcpy(sums, s.gradients, sizeof s.gradients);
}

//   theta~(t+1) = Opt?(theta(t), A / count(A))
//   theta (t+1) = Opt (theta(t), (A + B) / count(A + B))
// One after the other, without a scheduler. A is computed at theta~(t), B at theta(t).
static void threads_compute_the_formulas(void **unused) {
    (void)unused;
    enum { ROUND = WORKERS * SAMPLES, STEPS = 4 };
    State theta = {{0}, {0}}, estimate = theta;
    Scheduler threads = {.overlap = 1}, in_turn = {.overlap = 0};
    for (int t = 0; t < STEPS; t++) {
        float sums[WORKERS][SIZE] = {{0}};
        add_round(sums, estimate.theta, 2 * t * ROUND);
        estimate = step(theta, sums, WORKERS);
        add_round(sums, theta.theta, (2 * t + 1) * ROUND);
        theta = step(theta, sums, 2 * WORKERS);
        assert_true(t == 0 || memcmp(estimate.theta, theta.theta, sizeof theta.theta) != 0);

        acco_commit(&threads);
        acco_commit(&in_turn);
        assert_memory_equal(threads.master, theta.theta, sizeof theta.theta);
        assert_memory_equal(in_turn.master, theta.theta, sizeof theta.theta);
        assert_memory_equal(threads.momentum, theta.momentum, sizeof theta.momentum);
        assert_int_equal(threads.overlap, 1);
    }
}

// Runs the commands of a shell, which print at most `size` bytes. Returns how they ended.
static int run_shell(const char *commands, char *output, size_t size) {
    FILE *pipe = popen(commands, "r");
    assert_non_null(pipe);
    size_t length = fread(output, 1, size - 1, pipe);
    output[length] = '\0';
    return pclose(pipe);
}

// As its head says, with all warnings. What the second stream saves is for somebody who looks: a
// busy machine starts threads late.
static void it_runs_as_its_head_says(void **unused) {
    (void)unused;
    char command[4096], output[4096], ddp[256], in_turn[256], threads[256];
    double seconds[3]; // of ddp, of acco with one stream, of acco with two
    snprintf(
        command, sizeof command,
        "dir=$(mktemp -d) && ${CC:-cc} -O2 -Wall -Wextra -Werror '%s/docs/acco_in_100_lines.c' -o $dir/a "
        "-lpthread -lm 2>&1 && $dir/a; code=$?; rm -r $dir; exit $code",
        root());
    assert_int_equal(run_shell(command, output, sizeof output), 0);
    assert_int_equal(sscanf(output,
                            "%*[^\n]\nddp %lf %255[^\n]\nacco, one stream at a time %lf %255[^\n]\n"
                            "acco, two streams %lf %255[^\n]",
                            &seconds[0], ddp, &seconds[1], in_turn, &seconds[2], threads),
                     6);
    for (int i = 0; i < 3; i++) { assert_true(seconds[i] > 0); }
    assert_string_equal(threads, in_turn);
    assert_string_not_equal(threads, ddp);
    assert_close(strtod(threads, NULL), 1.266, 0.001, "the curve's mean, I0(1)");
}

static void it_has_100_lines_of_100_columns(void **unused) {
    (void)unused;
    char path[4096], line[256];
    snprintf(path, sizeof path, "%s/docs/acco_in_100_lines.c", root());
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    int lines = 0;
    for (; fgets(line, sizeof line, file) != NULL; lines++) { assert_true(strlen(line) <= 101); }
    fclose(file);
    assert_true(lines <= 100);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_compute_the_formulas),
        cmocka_unit_test(it_runs_as_its_head_says),
        cmocka_unit_test(it_has_100_lines_of_100_columns),
    };
    return cmocka_run_group_tests_name("hundred lines", tests, NULL, NULL);
}
