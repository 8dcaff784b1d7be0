// test_plot.c: scripts/plot on tables that this test writes: the page, the pictures, and
// the messages about mistakes.
//
// Two runs: one that went well, in a directory whose name HTML must escape; and one with
// unknown values, resumed from an earlier commit, whose last line is still being written. Columns
// are not in the program's order, because they are found by name. Tests that draw need gnuplot
// and are skipped where there is none.
#include "test/program/program.h"

static Stage stage;
static bool has_gnuplot;

static const char *const start_format = "start.event\tstart\nstart.parameters\t857344\nstart."
                                        "model\ttiny\nstart.ranks\t2\nstart.ranks.0.device\tCPU\n"
                                        "start.measured\t\nstart.options.optimizer\t%s\nstart.options."
                                        "wire\tint8\nstart.options.link-mbit\t500.0\n";

static const char *const heading =
    "seconds\tcommit\ttokens\tgrads\tloss\tperfect_loss\tvalidation_loss\tlr\tgrad_norm\ttokens_per_second\t"
    "communication_ms\texposed_ms\tsteps\tgrads_per_commit\tmfu\n";

// 1000 tokens in 4 gradients of each commit, 100 ms, of which 30 were spent waiting.
static const char *const report_format =
    "%g\t%d\t%d\t%d\t%s\t%s\tnan\t0.002\t1.5\t10000\t60\t30\t1\t4\tnan\n";

// After 20 commits.
static const char *const validation_format =
    "2\t20\t20000\tnan\tnan\t%s\t1.25\tnan\tnan\tnan\tnan\tnan\tnan\tnan\tnan\n";

typedef struct FakeTable {
    char text[65536];
    size_t length;
} FakeTable;

typedef struct FakeRun {
    FakeTable facts, rows; // run.tsv, progress.tsv
} FakeRun;

static void add(FakeTable *table, const char *format, ...) {
    va_list values;
    va_start(values, format);
    table->length +=
        (size_t)vsnprintf(table->text + table->length, sizeof table->text - table->length, format, values);
    va_end(values);
    assert_true(table->length < sizeof table->text);
}

// A run whose progress.tsv has nothing but its heading; rule NULL: without run.tsv.
static void begin(FakeRun *run, const char *rule) {
    memset(run, 0, sizeof *run);
    if (rule != NULL) { add(&run->facts, start_format, rule); }
    add(&run->rows, "%s", heading);
}

static void add_report(FakeRun *run, int commit, const char *loss, const char *perfect_loss) {
    add(&run->rows, report_format, 0.1 * commit, commit, 1000 * commit, 4 * commit, loss, perfect_loss);
}

static void add_reports(FakeRun *run, int first, int last, int unknown_at, const char *perfect_loss) {
    for (int commit = first; commit <= last; commit++) {
        char loss[32];
        snprintf(loss, sizeof loss, "%g", 1 + 4.0 / commit);
        add_report(run, commit, commit == unknown_at ? "nan" : loss, perfect_loss);
    }
}

static void write_run(const char *name, const FakeRun *run) {
    char path[STAGE_PATH_SIZE], file[256];
    assert_int_equal(mkdir(stage_path(&stage, name, path), 0777), 0);
    snprintf(file, sizeof file, "%s/progress.tsv", name);
    stage_write(&stage, file, run->rows.text);
    snprintf(file, sizeof file, "%s/run.tsv", name);
    if (run->facts.length > 0) { stage_write(&stage, file, run->facts.text); }
}

static void write_good_run(void) {
    static FakeRun run;
    begin(&run, "acco");
    add_reports(&run, 1, 20, 0, "0.07");
    add(&run.rows, validation_format, "0.0625");
    add(&run.facts, "end.event\tend\nend.reason\tdone\nend.commit\t20\n");
    write_run("a<b>&c", &run);
}

// It was cut by a crash, went on, ended, and was resumed again when nothing was left to do. Then
// it went on to more tokens.
static void write_broken_run(void) {
    static FakeRun run;
    begin(&run, "zero1");
    add_reports(&run, 1, 10, 5, "nan");
    add(&run.rows, "1.1\t11\n\n"); // cut by a crash, after which there is an empty line
    add(&run.facts, "checkpoint.com\n\n");
    add(&run.facts, start_format, "zero1");
    add(&run.facts, "resume.event\tresume\nresume.commit\t8\n");
    add_reports(&run, 9, 11, 0, "nan");
    add(&run.facts, "end.reason\tdone\nend.commit\t11\n\n");
    add(&run.rows, "\n");
    for (int i = 0; i < 2; i++) {
        add(&run.facts, start_format, "zero1");
        add(&run.facts, "resume.event\tresume\nresume.commit\t11\n");
        if (i == 0) { add(&run.facts, "end.reason\tdone\nend.commit\t11\n"); }
    }
    add_reports(&run, 12, 13, 0, "nan");
    add(&run.rows, "1.4\t14\t14000\t56\t9"); // still being written
    add(&run.facts, "checkpoint.co");
    write_run("it's", &run);
}

// Runs scripts/plot with `arguments`; expects that exit code, and one line of error where
// it is not 0.
static Outcome plot(const char *arguments, int exit_code) {
    Outcome outcome = program_run(&stage, 0, arguments);
    outcome_check(&outcome, exit_code, arguments);
    assert_int_equal(text_lines(outcome.errors), exit_code == 0 ? 0 : 1);
    return outcome;
}

static const char *drawn(const char *name) {
    char path[STAGE_PATH_SIZE];
    const char *text = stage_read_text(&stage, stage_path(&stage, name, path));
    if (text == NULL) { fail_msg("there is no %s", name); }
    return text;
}

static void need_gnuplot(void) {
    if (!has_gnuplot) { leave_out("gnuplot (Debian: gnuplot-nox)"); }
}

// How many line segments curve number `which` in `colour` has in a panel: its points
// minus its pieces.
static int pen_moves(const char *page, const char *panel, const char *colour, int which) {
    char mark[64], stroke[64];
    snprintf(mark, sizeof mark, "id=\"%s_plot_", panel);
    snprintf(stroke, sizeof stroke, "<path stroke=\"%s\"", colour);
    const char *path = strstr(page, mark);
    if (path == NULL) { fail_msg("there is no curve in %s", panel); }
    for (int i = 0; i <= which; i++) {
        path = strstr(path + 1, stroke);
        if (path == NULL) { fail_msg("%s has no curve %d in %s", panel, i, colour); }
    }
    int moves = 0;
    for (const char *at = path; *at != '>'; at++) { moves += *at == 'L'; }
    return moves;
}

// The page of both runs, which is drawn by the first test that needs it.
static const char *page_of_both(void) {
    char path[STAGE_PATH_SIZE];
    need_gnuplot();
    if (access(stage_path(&stage, "page.html", path), F_OK) != 0) {
        assert_string_equal(plot("--out page.html 'a<b>&c' \"it's/progress.tsv\"", 0).output, "page.html\n");
    }
    return drawn("page.html");
}

static const char *const blue = "rgb(  0,  71, 144)", *const orange = "rgb(242, 121,  11)";

static void the_page_has_every_panel_and_every_run(void **state) {
    (void)state;
    const char *page = page_of_both();
    static const char *const parts[] = {
        ">Loss against tokens<",
        ">Loss against time<",
        ">Throughput<",
        ">Gradient norm<",
        ">Communication<",
        ">Learning rate<",
        "a&lt;b&gt;&amp;c",
        "it's",
        "<td>acco<small>int8, 500 Mbit/s</small></td>",
        "<td>2<small>CPU</small></td>",
        "<td>857k<small>tiny</small></td>",
        "<td>20.0k<small>20 commits</small></td>",
        "<td>10.0k</td>",
        "<td>1.2000</td>",
        "<td>1.2500<small>best possible 0.0625</small></td>",
        "<td>30.0 %</td>",
        "<td>done</td>",
        "<td>no end yet<small>resumed: 2; lines of its tables that cannot be read: 2</small></td>",
        "<td>13.0k<small>13 commits</small></td>",
        "prefers-color-scheme: dark",
        "</html>"};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) { text_check(page, parts[i], "page.html"); }
    assert_int_equal(text_count(page, "<svg"), 6);
    assert_null(strstr(page, "a<b>"));
}

// What one run was is not said of the next.
static void runs_in_another_order_have_the_same_rows(void **state) {
    (void)state;
    need_gnuplot();
    plot("--out turned.html \"it's\" 'a<b>&c'", 0);
    const char *page = drawn("turned.html");
    text_check(page,
               "<td>no end yet<small>resumed: 2; lines of its tables that cannot be read: 2</small></td>",
               "the first run");
    text_check(page, "<td>done</td>", "the second run");
}

static void the_page_needs_nothing_else(void **state) {
    (void)state;
    const char *page = page_of_both();
    int names = text_count(page, "xmlns=\"http://www.w3.org/2000/svg\"") +
                text_count(page, "xmlns:xlink=\"http://www.w3.org/1999/xlink\"");
    assert_int_equal(text_count(page, "http"), names);
    assert_int_equal(text_count(page, "href="), text_count(page, "href=\"#"));
    static const char *const absent[] = {"src=", "<script", "<link", "@import", "url("};
    for (size_t i = 0; i < sizeof absent / sizeof absent[0]; i++) { assert_null(strstr(page, absent[i])); }
}

// The thin curve of the broken run has 10 reports, one of them unknown, then 3 more after
// the run was resumed, and 2 after the last time: pieces of 4, 5, 3 and 2 points.
static void the_pen_is_lifted_where_nothing_is_known_and_where_a_run_was_resumed(void **state) {
    (void)state;
    const char *page = page_of_both();
    assert_int_equal(pen_moves(page, "loss_tokens", orange, 0), 3 + 4 + 2 + 1);
    assert_int_equal(pen_moves(page, "throughput", blue, 0), 19);
    assert_int_equal(pen_moves(page, "throughput", orange, 0), 9 + 2 + 1);
}

// Reads a run by scripts/plot.awk alone, into its own directory.
static void read_tables(const char *name) {
    shell(&stage, "cd %s && echo %s > names && awk -v to=. -f '%s/scripts/plot.awk' n=1 run.tsv progress.tsv",
          name, name, stage.root);
}

// Of a run that has not ended, at 130k of 160k tokens, of which the last 60k are the decay.
static void the_rate_to_come_is_that_of_the_schedule(void **state) {
    (void)state;
    static const struct {
        const char *schedule;
        double rate;
    } cases[] = {{"cosine", 1.1e-3}, {"linear", 1.1e-3}, {"wsd", 2e-4 + 1.8e-3 * 0.29289321881345254}};
    static FakeRun run;
    for (int i = 0; i < 3; i++) {
        char name[32];
        begin(&run, "ddp");
        add(&run.facts, "start.options.lr\t0.002\nstart.options.min-lr\t0.0002\nstart.options.schedule\t%s\n",
            cases[i].schedule);
        add(&run.facts,
            "start.options.decay-tokens\t60000\nstart.options.tokens\t160000\nstart.options.warmup\t5\n");
        add_reports(&run, 1, 100, 0, "nan");
        snprintf(name, sizeof name, "to-come-%d", i);
        write_run(name, &run);
        read_tables(name);
        snprintf(name, sizeof name, "to-come-%d/1.future", i);
        const char *line = strstr(drawn(name), "130000 ");
        assert_non_null(line);
        double rate = strtod(line + strlen("130000 "), NULL);
        if (!(fabs(rate - cases[i].rate) <= 1e-8)) { fail_msg("%s: %g", cases[i].schedule, rate); }
    }
}

// One commit of 100 ms waited for 30, each of the next three for 60.
static void waiting_counts_by_the_steps_of_a_report(void **state) {
    (void)state;
    static FakeRun run;
    begin(&run, "ddp");
    add_report(&run, 1, "2", "nan");
    add(&run.rows, "0.4\t4\t4000\t16\t2\tnan\tnan\t0.002\t1.5\t10000\t60\t60\t3\t4\tnan\n");
    write_run("waits", &run);
    read_tables("waits");
    text_check(drawn("waits/rows"), "<td>52.5 %</td>", "the row");
}

static void a_run_that_got_no_better_has_no_rate_to_come(void **state) {
    (void)state;
    static FakeRun run;
    char path[STAGE_PATH_SIZE];
    begin(&run, "ddp");
    add(&run.facts, "start.options.lr\t0.002\nstart.options.tokens\t160000\nend.reason\tno lower loss\n");
    add_reports(&run, 1, 100, 0, "nan");
    write_run("no-better", &run);
    read_tables("no-better");
    assert_int_not_equal(access(stage_path(&stage, "no-better/1.rate", path), F_OK), -1);
    assert_int_equal(access(stage_path(&stage, "no-better/1.future", path), F_OK), -1);
}

static void a_long_curve_is_drawn_as_means(void **state) {
    (void)state;
    need_gnuplot();
    static FakeRun run;
    begin(&run, NULL);
    for (int i = 1; i <= 250; i++) { add_report(&run, i, i % 2 == 0 ? "2" : "4", "nan"); }
    write_run("long", &run);
    assert_string_equal(plot("long", 0).output, "long/plot.html\n");
    assert_int_equal(pen_moves(drawn("long/plot.html"), "throughput", blue, 0), 124);
}

static void one_report_is_a_mark(void **state) {
    (void)state;
    need_gnuplot();
    static FakeRun run;
    begin(&run, NULL);
    add(&run.rows, "0.634362304\t1\t1048577\t4\t2\tnan\tnan\tnan\tnan\t1500000\tnan\tnan\t1\t4\tnan\n");
    write_run("one", &run);
    plot("one", 0);
    const char *page = drawn("one/plot.html");
    text_check(page, "#throughput-gpPt6", "one report");
    text_check(page, "#loss_tokens-gpPt6", "one report");
    text_check(page, "#loss_time-gpPt6", "one report, whose time is above what six digits say");
}

static void a_panel_of_which_nothing_is_known_says_so(void **state) {
    (void)state;
    need_gnuplot();
    static FakeRun run;
    begin(&run, NULL);
    add(&run.rows, validation_format, "nan");
    write_run("validated", &run);
    plot("validated", 0);
    assert_int_equal(text_count(drawn("validated/plot.html"), "nothing is known yet"), 4);
}

static void pictures_are_what_their_names_say(void **state) {
    (void)state;
    need_gnuplot();
    plot("--out all.png 'a<b>&c' \"it's\"", 0);
    plot("--out all.svg 'a<b>&c' \"it's\"", 0);
    plot("--out all.pdf 'a<b>&c' \"it's\"", 0);
    assert_memory_equal(drawn("all.pdf"), "%PDF-1.", 7);
    assert_memory_equal(drawn("all.png"), "\x89PNG\r\n\x1a\n", 9);
    char path[STAGE_PATH_SIZE];
    struct stat status;
    assert_int_equal(stat(stage_path(&stage, "all.png", path), &status), 0);
    assert_true(status.st_size > 10000);
    static const char *const parts[] = {"a&lt;b",        "it's",          "Loss against time",
                                        "Communication", "Learning rate", "</svg>"};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        text_check(drawn("all.svg"), parts[i], "all.svg");
    }
}

// A best possible loss of 0.0625 under losses from 5 down to 1.2 is said, and the axis
// has labels for the losses; one of 0.8 is drawn.
static void a_best_loss_far_below_does_not_squeeze_the_curves(void **state) {
    (void)state;
    static const char *const note = "the best possible, 0.0625, is far below";
    static const char *const labels[] = {">1.5<", ">2<", ">3<", ">4<", ">5<"};
    const char *page = page_of_both();
    assert_int_equal(text_count(page, note), 2);
    for (size_t i = 0; i < sizeof labels / sizeof labels[0]; i++) {
        text_check(page, labels[i], "loss axis");
    }
    static FakeRun run;
    begin(&run, NULL);
    add_reports(&run, 1, 20, 0, "0.8");
    write_run("near", &run);
    plot("near", 0);
    assert_null(strstr(drawn("near/plot.html"), "far below"));
    assert_int_not_equal(pen_moves(drawn("near/plot.html"), "loss_tokens", blue, 1), 0);
}

static void a_long_run_has_hours(void **state) {
    (void)state;
    need_gnuplot();
    static const struct {
        double seconds;
        const char *label;
    } runs[] = {{10, ">seconds<"}, {100, ">minutes<"}, {2000, ">hours<"}, {40000, ">days<"}};
    static FakeRun run;
    for (int i = 0; i < 4; i++) {
        char name[16], page[32];
        begin(&run, NULL);
        for (int commit = 1; commit <= 9; commit++) {
            add(&run.rows, report_format, commit * runs[i].seconds, commit, 1000 * commit, 4 * commit, "2",
                "nan");
        }
        snprintf(name, sizeof name, "time%d", i);
        snprintf(page, sizeof page, "%s/plot.html", name);
        write_run(name, &run);
        plot(name, 0);
        text_check(drawn(page), runs[i].label, name);
    }
}

static void help_is_what_stands_at_its_head(void **state) {
    (void)state;
    const char *text = plot("--help", 0).output;
    text_check(text, "scripts/plot [--out FILE] RUN...", "--help");
    text_check(text, ".pdf", "--help");
}

static void a_mistake_is_one_line(void **state) {
    (void)state;
    static const char *const mistakes[][2] = {
        {"runs/none", "runs/none is no run"},
        {"'a<b>'", "; there: "},
        {"--out x.gif \"it's\"", ".html, .png, .svg or .pdf"},
        {"--out", "--out needs a file"},
        {"--size 3 \"it's\"", "there is no --size"},
        {"a a a a a a a a a", "at most 8"},
        {"empty", "nothing to draw yet: there is no report in empty/progress.tsv"}};
    for (size_t i = 0; i < sizeof mistakes / sizeof mistakes[0]; i++) {
        text_check(plot(mistakes[i][0], 2).errors, mistakes[i][1], mistakes[i][0]);
    }
    char path[STAGE_PATH_SIZE];
    assert_int_equal(access(stage_path(&stage, "x.gif", path), F_OK), -1);
}

static void a_place_where_nothing_can_be_written_is_one_line(void **state) {
    (void)state;
    need_gnuplot();
    text_check(plot("--out none/all.html \"it's\"", 2).errors, "cannot write none/all.html", "no directory");
}

static int open_stage(void **state) {
    *state = &stage;
    stage_open(&stage);
    program_use_script(&stage, "scripts/plot");
    has_gnuplot = has_gnuplot_here();
    static FakeRun empty;
    begin(&empty, "acco");
    write_run("empty", &empty);
    write_good_run();
    write_broken_run();
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        STAGE_TEST(stage, the_page_has_every_panel_and_every_run),
        STAGE_TEST(stage, runs_in_another_order_have_the_same_rows),
        STAGE_TEST(stage, the_page_needs_nothing_else),
        STAGE_TEST(stage, the_pen_is_lifted_where_nothing_is_known_and_where_a_run_was_resumed),
        STAGE_TEST(stage, the_rate_to_come_is_that_of_the_schedule),
        STAGE_TEST(stage, waiting_counts_by_the_steps_of_a_report),
        STAGE_TEST(stage, a_run_that_got_no_better_has_no_rate_to_come),
        STAGE_TEST(stage, a_long_curve_is_drawn_as_means),
        STAGE_TEST(stage, one_report_is_a_mark),
        STAGE_TEST(stage, a_panel_of_which_nothing_is_known_says_so),
        STAGE_TEST(stage, pictures_are_what_their_names_say),
        STAGE_TEST(stage, a_best_loss_far_below_does_not_squeeze_the_curves),
        STAGE_TEST(stage, a_long_run_has_hours),
        STAGE_TEST(stage, help_is_what_stands_at_its_head),
        STAGE_TEST(stage, a_mistake_is_one_line),
        STAGE_TEST(stage, a_place_where_nothing_can_be_written_is_one_line),
    };
    return cmocka_run_group_tests(tests, open_stage, stage_close_group);
}
