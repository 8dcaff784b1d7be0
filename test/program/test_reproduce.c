// test_reproduce.c: dev/reproduce/run: every claim can be listed at every scale; a claim is
// run, judged and drawn, and what has been run is not run again; and the messages about
// mistakes. Runs are so short here that what they say means nothing.
#include "test/program/program.h"

static Stage stage;
static bool can_run; // there are mpirun, gnuplot and python3

static Outcome reproduce(const char *arguments, int exit_code) {
    Outcome outcome = program_run(&stage, 0, arguments);
    outcome_check(&outcome, exit_code, arguments);
    return outcome;
}

static void skip_unless_it_can_run(void) {
    if (!can_run) { leave_out("mpirun, gnuplot and python3 (Debian: openmpi-bin gnuplot-nox python3)"); }
}

static void every_claim_is_listed_at_every_scale(void **state) {
    (void)state;
    static const char *const claims[] = {"A1",  "A2",  "A3", "A4", "A5", "A6",  "A7",      "A8", "A9",
                                         "A10", "A11", "C1", "C2", "C3", "S1",  "S2",      "S3", "S4",
                                         "M1",  "M2",  "M3", "M4", "M5", "map", "map-muon"};
    static const char *const scales[] = {"--dry-run --out o", "--dry-run --out o --scale gpu --data .",
                                         "--dry-run --out o --scale paper --data ."};
    skip_unless_it_can_run();
    setenv("SEEDS", "1", 1); // a third of the runs, and of the time
    for (size_t i = 0; i < sizeof scales / sizeof scales[0]; i++) {
        Outcome outcome = reproduce(scales[i], 0);
        assert_int_equal(text_lines(outcome.errors), 0);
        for (size_t j = 0; j < sizeof claims / sizeof claims[0]; j++) {
            char heading[16];
            snprintf(heading, sizeof heading, "\n# %s: ", claims[j]);
            text_check(outcome.output, heading, scales[i]);
        }
        text_check(outcome.output, i < 2 ? " -np " : "sbatch --wait --nodes 4 --ntasks-per-node 8 ",
                   scales[i]);
    }
    unsetenv("SEEDS");
}

static void a_claim_is_run_once_judged_and_drawn(void **state) {
    (void)state;
    char path[STAGE_PATH_SIZE];
    skip_unless_it_can_run();
    setenv("PART", "0.002", 1);
    setenv("SEEDS", "2", 1);
    Outcome first = reproduce("A2 --out o --results r", 0);
    text_check(first.output, "8-acco-wp-64x64-5M-2 ", "the last run");
    text_check(first.output, " 0 runs left, ", "the last run");
    text_check(first.output, "\nA2: ", "the verdict");
    Outcome second = reproduce("A2 --out o --results r", 0);
    unsetenv("PART");
    unsetenv("SEEDS");
    assert_int_equal(text_count(second.output, " runs left, "), 0);
    text_check(second.output, "A2: ", "the verdict");
    const char *page = stage_read_text(&stage, stage_path(&stage, "r/acco.html", path));
    assert_non_null(page);
    text_check(page, "<svg", "the page");
    text_check(page, "<td>acco-wp</td>", "the page");
    text_check(page, "not yet run", "the page");
    text_check(page, "--optimizer acco-wp --accumulate 8 ", "the page");
    assert_non_null(stage_read_text(&stage, stage_path(&stage, "r/index.html", path)));
}

static void a_mistake_is_one_line_here_too(void **state) {
    (void)state;
    static const char *const mistakes[][2] = {
        {"A12", "there is no claim 'A12'; there are acco, co2, diloco, muon, A1 A2 "},
        {"--fast", "there is no option '--fast'"},
        {"--scale", "--scale needs a value"},
        {"--scale big", "--scale is 'big'; there are box, gpu and paper"},
        {"--data nowhere", "--data nowhere is no directory"},
        {"--scale paper --hosts nowhere", "--hosts nowhere: there is no such file"},
        {"--hosts .", "--hosts .: there is no such file"},
        {"--scale gpu", "--scale gpu needs --data DIR"},
    };
    for (size_t i = 0; i < sizeof mistakes / sizeof mistakes[0]; i++) {
        Outcome outcome = reproduce(mistakes[i][0], 2);
        text_check(outcome.errors, mistakes[i][1], mistakes[i][0]);
        assert_int_equal(text_lines(outcome.errors), 1);
    }
}

static int open_stage(void **state) {
    *state = &stage;
    stage_open(&stage);
    setenv("PROGRAM", stage.binary, 1);
    program_use_script(&stage, "dev/reproduce/run");
    can_run = has_gnuplot_here() && system("command -v python3 > /dev/null") == 0 &&
              getenv("MPIRUN") != NULL && getenv("MPIRUN")[0] != '\0';
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        STAGE_TEST(stage, every_claim_is_listed_at_every_scale),
        STAGE_TEST(stage, a_claim_is_run_once_judged_and_drawn),
        STAGE_TEST(stage, a_mistake_is_one_line_here_too),
    };
    return cmocka_run_group_tests(tests, open_stage, stage_close_group) == 0 ? 0 : 1;
}
