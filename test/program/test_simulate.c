// test_simulate.c: dev/simulate on few machines: the page, its pictures and its table;
// and the messages about mistakes. What draws needs gnuplot and Python and is skipped where one is
// missing.
#include "test/program/program.h"

static Stage stage;
static bool can_draw;

static Outcome simulate(const char *arguments, int exit_code) {
    Outcome outcome = program_run(&stage, 0, arguments);
    outcome_check(&outcome, exit_code, arguments);
    assert_int_equal(text_lines(outcome.errors), exit_code == 0 ? 0 : 1);
    return outcome;
}

static const char *simulated(const char *name) {
    char path[STAGE_PATH_SIZE];
    if (!can_draw) { leave_out("gnuplot and python3 (Debian: gnuplot-nox python3)"); }
    if (access(stage_path(&stage, "out", path), F_OK) != 0) { simulate("out --coarse", 0); }
    const char *text = stage_read_text(&stage, stage_path(&stage, name, path));
    if (text == NULL) { fail_msg("there is no %s", name); }
    return text;
}

static void the_page_has_every_picture_and_says_what_it_rests_on(void **state) {
    (void)state;
    static const char *const parts[] = {"<title>links<",
                                        "<title>hosts<",
                                        "<title>together<",
                                        "<title>all<",
                                        "<title>few_curves<",
                                        "<title>few_maps<",
                                        ">acco-wp<",
                                        ">streaming-diloco<",
                                        "125M, 8 GPUs a host, 400 Gbit/s",
                                        "is simulated",
                                        "69.5 ms for 32 x 1024 tokens",
                                        "223.2 ms for 16 x 1024 tokens",
                                        "An H100 took 58.9 ms for 125M and 255 ms for 1.3B",
                                        " beyond.",
                                        "</html>"};
    const char *page = simulated("out/index.html");
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) { text_check(page, parts[i], "the page"); }
    assert_int_equal(text_count(page, "<svg"), 6);
    assert_int_equal(text_count(page, "</svg>"), 6);
    assert_null(strstr(page, "<script"));
    assert_null(strstr(page, "src="));
}

typedef struct Plan {
    char rule[32];
    double mbit, count, computing;
    int fits, recommended;
} Plan;

// The next line of plans.tsv of the first map; false: there is none.
static bool next_plan(const char **line, Plan *plan) {
    while (**line != '\0') {
        const char *this = *line, *end = strchr(this, '\n');
        *line = end + 1;
        if (sscanf(this, "links 125M 8 4 %lf %lf %31s %*f %lf %d %d", &plan->mbit, &plan->count, plan->rule,
                   &plan->computing, &plan->fits, &plan->recommended) == 6) {
            return true;
        }
    }
    return false;
}

// Three links times three numbers of micro-batches. acco needs two micro-batches.
static void the_table_has_every_machine_and_rule(void **state) {
    (void)state;
    const char *line = simulated("out/plans.tsv");
    double slow = NAN, fast = NAN;
    int lines = 0, recommended = 0;
    for (Plan plan; next_plan(&line, &plan); lines++) {
        assert_true(plan.computing > 0 && plan.computing <= 1 && plan.fits == 1);
        recommended += plan.recommended;
        if (strcmp(plan.rule, "zero1") == 0 && plan.count == 4) {
            *(plan.mbit == 100 ? &slow : &fast) = plan.computing;
        }
    }
    assert_int_equal(lines, 3 * (9 + 9 + 8));
    assert_int_equal(recommended, 9);
    assert_true(slow < 0.1 && fast > 0.9);
}

static void a_mistake_is_one_line_here_too(void **state) {
    (void)state;
    static const char *const mistakes[][2] = {
        {"out --fine", "there is no option '--fine'; there are --compute-ms and --coarse"},
        {"out elsewhere", "one directory, not 'out' and 'elsewhere'"},
        {"out --compute-ms", "--compute-ms needs a value"},
        {"out --compute-ms '69 223'", "--compute-ms is '69 223'; give three numbers"},
        {"out --coarse --compute-ms '0 1 1'", "a plan failed: "}};
    for (size_t i = 0; i < sizeof mistakes / sizeof mistakes[0]; i++) {
        if (can_draw || i < 4) {
            text_check(simulate(mistakes[i][0], 2).errors, mistakes[i][1], mistakes[i][0]);
        }
    }
}

// Before the first plan, of which there are more than a thousand.
static void python_is_missed_at_the_start(void **state) {
    (void)state;
    char few[STAGE_PATH_SIZE], *path = strdup(getenv("PATH"));
    shell(&stage, "mkdir -p few && for tool in sh dirname basename cat sed grep awk; do ln -sf \"$(command "
                  "-v $tool)\" few; done && "
                  "printf '#!/bin/sh\\n' > few/gnuplot && chmod +x few/gnuplot");
    setenv("PATH", stage_path(&stage, "few", few), 1);
    text_check(simulate("nothing", 2).errors, "python3 is missing", "no Python");
    setenv("PATH", path, 1);
    free(path);
}

static int open_stage(void **state) {
    *state = &stage;
    stage_open(&stage);
    setenv("PROGRAM", stage.binary, 1);
    program_use_script(&stage, "dev/simulate");
    can_draw = has_gnuplot_here() && system("command -v python3 > /dev/null") == 0;
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        STAGE_TEST(stage, the_page_has_every_picture_and_says_what_it_rests_on),
        STAGE_TEST(stage, the_table_has_every_machine_and_rule),
        STAGE_TEST(stage, a_mistake_is_one_line_here_too),
        STAGE_TEST(stage, python_is_missed_at_the_start),
    };
    return cmocka_run_group_tests(tests, open_stage, stage_close_group) == 0 ? 0 : 1;
}
