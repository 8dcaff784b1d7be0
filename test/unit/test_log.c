// test_log.c: the run directory, log.jsonl and progress.tsv, and the lines on the
// terminal; what they stand on: numbers and words for people, files, and a lack of memory.
#define _GNU_SOURCE // posix_openpt

#include <signal.h>
#include <sys/resource.h>

#include "test/harness.h"

#include "program/report.h"
#include "program/run_directory.h"
#include "program/spike_report.h"
#include "runtime/names.h"

static char scratch[64]; // a directory of this test's own, in which it runs
static char start_directory[1024];

static char *read_file(const char *path) {
    FILE *file = fopen(path, "r");
    if (file == NULL) { fail_msg("cannot read %s", path); }
    char *text = (char *)calloc(1, 1 << 20);
    size_t length = fread(text, 1, (1 << 20) - 1, file);
    text[length] = '\0';
    fclose(file);
    return text;
}

static void expect_text(const char *text, const char *part) {
    if (strstr(text, part) == NULL) { fail_msg("%s\n  lacks %s", text, part); }
}

static Report sample_report(void) {
    Report report = report_unknown();
    report.commit = 120;
    report.gradients = 480;
    report.tokens = 983040;
    report.seconds = 61.5;
    report.loss = 1.2345678;
    report.perfect_loss = 1.1;
    report.learning_rate = 6e-4;
    report.gradient_norm = 0.85;
    report.tokens_per_second = 12345;
    report.model_tflops = 9.66;
    report.mfu = 0.31;
    report.compute_ms = 123.4;
    report.communication_ms = 45.6;
    report.exposed_ms = 0.7;
    report.steps = 10;
    report.gradients_per_commit = 4;
    report.bytes_sent = 123456789012;
    return report;
}

// Reports with both files in a directory, and a terminal that is not shown. Static: too
// large for the stack.
static Reports *reports_in(const char *directory) {
    static Reports reports;
    static Terminal terminal;
    Error error;
    memset(&reports, 0, sizeof reports);
    terminal_open(&terminal, stdout);
    reports.terminal = &terminal;
    assert_true(reports_open(&reports, directory, &error));
    return &reports;
}

// Line `index` of a JSON Lines text, parsed; every line up to it must be one whole
// object.
static json_t *parse_line(const char *text, int index) {
    for (int i = 0;; i++) {
        const char *end = strchr(text, '\n');
        if (end == NULL) { fail_msg("no line %d", index); }
        json_error_t error;
        json_t *object = json_loadb(text, (size_t)(end - text), 0, &error);
        if (!json_is_object(object)) { fail_msg("line %d is no object: %s", i, error.text); }
        if (i == index) { return object; }
        json_decref(object);
        text = end + 1;
    }
}

// ---------------------------------------------------------------------------------------

static void test_human_numbers(void **state) {
    (void)state;
    static const struct {
        double value;
        const char *text;
    } counts[] = {{0, "0"},         {7, "7"},          {999, "999"},       {999.4, "999"},
                  {999.6, "1.00k"}, {1000, "1.00k"},   {12345, "12.3k"},   {99949, "99.9k"},
                  {99960, "100k"},  {999499, "999k"},  {999950, "1.00M"},  {1500000, "1.50M"},
                  {2e9, "2.00G"},   {1.5e12, "1.50T"}, {-12345, "-12.3k"}, {NAN, "-"},
                  {INFINITY, "-"},  {9994, "9.99k"},   {9996, "10.0k"}},
      milliseconds[] = {{0, "0.0ms"},     {0.61, "0.6ms"},  {99.94, "99.9ms"},
                        {99.96, "100ms"}, {999.4, "999ms"}, {999.6, "1.00s"},
                        {9994, "9.99s"},  {9996, "10.0s"},  {99960, "100s"}};
    static const struct {
        double seconds;
        const char *text;
    } durations[] = {{0, "0:00"},          {6.6, "0:07"}, {59.6, "1:00"}, {754, "12:34"}, {3723, "1:02:03"},
                     {183840, "2d 03:04"}, {NAN, "?"},    {-1, "?"},      {INFINITY, "?"}};
    char text[NUMBER_TEXT_SIZE];
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        assert_string_equal(human_count(counts[i].value, text), counts[i].text);
    }
    for (size_t i = 0; i < sizeof milliseconds / sizeof milliseconds[0]; i++) {
        assert_string_equal(human_milliseconds(milliseconds[i].value, text), milliseconds[i].text);
    }
    for (size_t i = 0; i < sizeof durations / sizeof durations[0]; i++) {
        assert_string_equal(human_duration(durations[i].seconds, text), durations[i].text);
    }
}

// Sizes have the digits of counts, with bytes for a unit. Of values the larger middle one counts.
static void test_sizes_and_medians(void **state) {
    (void)state;
    static const struct {
        size_t bytes;
        const char *text;
    } sizes[] = {{0, "0 bytes"},        {1, "1 byte"},           {112, "112 bytes"},
                 {999, "999 bytes"},    {1000, "1.00 kB"},       {9220, "9.22 kB"},
                 {147000000, "147 MB"}, {2860000000, "2.86 GB"}, {999500000, "1.00 GB"}};
    char text[SIZE_TEXT];
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        assert_string_equal(size_text(sizes[i].bytes, text), sizes[i].text);
    }
    double one[] = {7}, two[] = {5, 3}, odd[] = {3, -8, 40, 2, 1e9}, even[] = {10, 9, 2e-3, 1e-3};
    assert_true(median_of(one, 1) == 7 && median_of(two, 2) == 5);
    assert_true(median_of(odd, 5) == 3 && median_of(even, 4) == 9);
    assert_true(odd[0] == -8 && odd[1] == 2 && odd[3] == 40 && odd[4] == 1e9); // sorted
}

// A message is one line, and quotes no more than a line's worth of what it complains of.
static void test_words_of_errors(void **state) {
    (void)state;
    char letters[70], excerpt[64], list[16] = "";
    Error error;
    memset(letters, 'x', sizeof letters);
    letters[60] = '\0';
    assert_string_equal(text_excerpt(letters, excerpt), letters);
    letters[60] = 'x';
    letters[61] = '\0';
    text_excerpt(letters, excerpt);
    assert_int_equal(strspn(excerpt, "x"), 60);
    assert_string_equal(excerpt + 60, "...");
    assert_false(error_set(&error, "a\nb\x7f\x1f %s", "c d\xff"));
    assert_string_equal(error.text, "a?b?? c d\xff");
    errno = ENOSPC;
    assert_false(error_set_file(&error, "read", "a/b"));
    assert_string_equal(error.text, "cannot read a/b: No space left on device");
    text_join(list, sizeof list, ", ", "%s", "one");
    text_join(list, sizeof list, ", ", "%d", 2);
    assert_string_equal(list, "one, 2");
    text_join(list, sizeof list, ", ", "%s", "thirty-three");
    assert_string_equal(list, "one, 2, thirty-");
    text_join(list, sizeof list, ", ", "%s", "four");
    assert_string_equal(list, "one, 2, thirty-");
}

static void test_text_is_repaired(void **state) {
    (void)state;
    static const struct {
        const char *bytes, *text;
    } cases[] = {{"plain", "plain"},
                 {"caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80", "caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"},
                 {"\xff\xfe", "??"},
                 {"a\xc3", "a?"}, // cut off
                 {"\xc3(", "?("},
                 {"\xc0\x80", "??"},      // overlong
                 {"\xe0\x80\x80", "???"}, // overlong
                 {"\xed\xa0\x80", "???"}, // surrogate
                 {"\xf0\x80\x80\x80", "????"},
                 {"\xf4\x90\x80\x80", "????"}, // beyond U+10FFFF
                 {"\xf0\x9f\x98", "???"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        json_t *string = log_text(cases[i].bytes);
        assert_non_null(string);
        assert_string_equal(json_string_value(string), cases[i].text);
        json_decref(string);
    }
    for (int c = 1; c < 65536; c++) { // no pair of bytes makes a string that JSON refuses
        char pair[3] = {(char)c, (char)(c >> 8), '\0'};
        json_t *string = log_text(pair);
        assert_non_null(string);
        json_decref(string);
    }
}

// ---------------------------------------------------------------------------------------

static void test_directories_are_numbered(void **state) {
    (void)state;
    char path[RUN_PATH_SIZE];
    Error error;
    assert_true(run_directory_create("auto", "tiny", "acco", path, &error));
    assert_string_equal(path, "runs/tiny-acco-1");
    assert_true(run_directory_create("auto", "tiny", "acco", path, &error));
    assert_string_equal(path, "runs/tiny-acco-2");
    assert_int_equal(rmdir("runs/tiny-acco-1"), 0);
    assert_true(run_directory_create("auto", "tiny", "acco", path, &error));
    assert_string_equal(path, "runs/tiny-acco-1");
    assert_true(run_directory_create("auto", "/models/my gpt/config.json", "ddp", path, &error));
    assert_string_equal(path, "runs/my-gpt-ddp-1");
    static const struct {
        const char *model, *name;
    } cases[] = {{"125M", "125M"},
                 {"a/b.json", "b"},
                 {"a/b/", "b"},
                 {"config.json", "config"},
                 {"/", "model"},
                 {"..", "model"},
                 {"a\nb", "a-b"},
                 {"My_model.2", "My_model.2"},
                 {"runs/a-1/checkpoints/commit-20/model", "a-1"},
                 {"commit-20/model/", "commit-20"},
                 {"a/commit-2x", "commit-2x"},
                 {"model", "model"},
                 {"hub/gpt-neo-125M/", "gpt-neo-125M"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char name[64];
        run_directory_model_name(cases[i].model, name);
        assert_string_equal(name, cases[i].name);
    }
}

static void test_directories_that_are_named(void **state) {
    (void)state;
    char path[RUN_PATH_SIZE], again[RUN_PATH_SIZE];
    Error error;
    assert_true(run_directory_create("a/b//c", "tiny", "acco", path, &error));
    assert_string_equal(path, "a/b//c");
    assert_true(run_directory_create("a/b//c/", "tiny", "acco", path, &error)); // empty: may be used
    reports_close(reports_in(path));
    assert_false(run_directory_check_files("a/b/c", false, &error));
    expect_text(error.text, "a/b/c already holds the log of a run");
    assert_false(run_directory_create("a/b/c/log.jsonl", "tiny", "acco", again, &error));
    expect_text(error.text, "cannot write to the directory a/b/c/log.jsonl: Not a directory");
    assert_false(run_directory_create("a/b/c/log.jsonl/deeper", "tiny", "acco", again, &error));
    expect_text(error.text, "Not a directory");
    assert_false(run_directory_create("/proc/there", "tiny", "acco", again, &error));
    expect_text(error.text, "cannot create the directory /proc/there");
}

// Everything in a directory is removed, but of a link only the link: what it points to may be
// somebody else's. What is not there is no error.
static void test_trees_are_removed(void **state) {
    (void)state;
    static const char *const directories[] = {"theirs", "tree", "tree/a", "tree/a/b", "tree/.hidden"},
                             *const files[] = {"theirs/file", "tree/file", "tree/a/b/file", "tree/.hidden/f"};
    for (int i = 0; i < 5; i++) { assert_int_equal(mkdir(directories[i], 0777), 0); }
    for (int i = 0; i < 4; i++) { assert_int_equal(fclose(fopen(files[i], "w")), 0); }
    assert_int_equal(symlink("../theirs", "tree/link"), 0);
    assert_int_equal(symlink("../../theirs/file", "tree/a/link"), 0);
    assert_true(directory_has("tree", "fi") && directory_has("tree/a", "b") && directory_has("tree", "link"));
    assert_false(directory_has("tree", "ile") || directory_has("tree/a", "bb") || directory_has("none", ""));
    tree_remove("tree/link");
    assert_true(access("theirs/file", F_OK) == 0 && access("tree/link", F_OK) != 0);
    assert_int_equal(symlink("../theirs", "tree/link"), 0);
    tree_remove("tree");
    tree_remove("tree");
    assert_true(access("tree", F_OK) != 0 && access("theirs/file", F_OK) == 0);
    tree_remove("theirs/file");
    assert_true(access("theirs/file", F_OK) != 0 && access("theirs", F_OK) == 0);
    tree_remove("theirs");
}

// The first line that begins so, without its beginning; a name that is too long is said.
static void test_lines_and_paths(void **state) {
    (void)state;
    char line[64] = "as before", path[PATH_MAX], directory[PATH_MAX + 10];
    Error error = {""};
    FILE *file = fopen("lines", "w");
    assert_true(file != NULL &&
                fputs("MemTotal: 5 kB\n MemFree: 1\nMemFree: 2 kB\nMemFree: 3 kB\n", file) >= 0);
    assert_int_equal(fclose(file), 0);
    assert_true(file_read_line("lines", "MemFree:", line, sizeof line));
    assert_string_equal(line, " 2 kB\n");
    assert_true(file_read_line("lines", "", line, sizeof line));
    assert_string_equal(line, "MemTotal: 5 kB\n");
    assert_false(file_read_line("lines", "Free", line, sizeof line) ||
                 file_read_line("none", "", line, sizeof line));
    assert_true(path_within(path, "a/b", "c", &error));
    assert_string_equal(path, "a/b/c");
    memset(directory, 'd', sizeof directory);
    directory[PATH_MAX - 3] = '\0';
    assert_true(path_within(path, directory, "c", &error));
    assert_int_equal(strlen(path), PATH_MAX - 1);
    assert_false(path_within(path, directory, "cc", &error));
    expect_text(error.text, "the path of cc in ddd");
    expect_text(error.text, "... is too long");
}

// ---- What ends a process ----------------------------------------------------------------

static void take_too_much(const void *context) { // more than any machine has
    const bool *grows = (const bool *)context;
    if (*grows) {
        memory_grow(memory_take(1, 1), SIZE_MAX / 4);
    } else {
        memory_take(SIZE_MAX / 64, 16);
    }
}

static void test_a_lack_of_memory_ends_the_process(void **state) {
    (void)state;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    skip(); // their allocators end it before
#endif
    char *none = (char *)memory_take(0, 8); // no error
    assert_non_null(none);
    free(none);
    for (int i = 0; i < 2; i++) {
        bool grows = i == 1;
        char message[256];
        int status = run_in_child(take_too_much, &grows, message, sizeof message);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SYSTEM_FAILURE);
        assert_string_equal(message, "train_gpt: the system has no memory left\n");
    }
}

typedef struct MappedFile {
    const char *bytes;
    size_t at; // which of them is read
    char read;
} MappedFile;

static void read_mapped_byte(void *context) {
    MappedFile *file = (MappedFile *)context;
    file->read = ((volatile const char *)file->bytes)[file->at];
}

// Once file_read_mapped has returned, whatever it has read, it counts no more for what is read
// elsewhere.
static void read_what_is_gone(const void *context) {
    bool gone = *(const bool *)context;
    const char *path = "shorter";
    size_t size;
    Error error;
    MappedFile file = {(const char *)file_map(path, "a file", &size, &error), gone ? 9000 : 0, 0};
    if (file.bytes == NULL || size != 10000 || truncate(path, 100) != 0) { _exit(10); }
    if (file_read_mapped(read_mapped_byte, &file) == gone) { _exit(11); }
    if (!gone && file.read != 'x') { _exit(12); }
    file.at = 9000;
    read_mapped_byte(&file);
}

static void test_a_file_that_becomes_shorter_ends_the_process(void **state) {
    (void)state;
    char bytes[10000], message[256];
    memset(bytes, 'x', sizeof bytes);
    for (int i = 0; i < 2; i++) {
        bool gone = i == 1;
        FILE *file = fopen("shorter", "w");
        assert_true(file != NULL && fwrite(bytes, 1, sizeof bytes, file) == sizeof bytes &&
                    fclose(file) == 0);
        int status = run_in_child(read_what_is_gone, &gone, message, sizeof message);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), EXIT_SYSTEM_FAILURE);
        assert_string_equal(
            message, "train_gpt: a file has become shorter while it was read, or its disk has failed\n");
    }
}

static void test_directory_without_permission(void **state) {
    (void)state;
    char path[RUN_PATH_SIZE];
    Error error;
    assert_int_equal(mkdir("closed", 0555), 0);
    assert_int_equal(chmod(scratch, 0755), 0);
    uid_t user = geteuid();
    if (user == 0) { assert_int_equal(seteuid(65534), 0); } // root may write anywhere
    bool inside = run_directory_create("closed", "tiny", "acco", path, &error);
    Error below_error;
    bool below = run_directory_create("closed/below", "tiny", "acco", path, &below_error);
    Log log;
    Error log_error;
    bool opened = log_open(&log, "closed", "log.jsonl", &log_error);
    assert_int_equal(seteuid(user), 0);
    assert_false(inside || below || opened);
    expect_text(error.text,
                "cannot write to the directory closed: Permission denied: choose another with --out");
    expect_text(below_error.text, "cannot create the directory closed/below: Permission denied");
    expect_text(log_error.text, "cannot open closed/log.jsonl for writing: Permission denied");
}

// What the program prints to be copied into a shell arrives there as it is.
static void test_words_for_a_shell(void **state) {
    (void)state;
    static const char *const words[] = {"runs/tiny-acco-1",    "my runs/a",  "it's", "''",
                                        "$HOME `id` \"x\" \\", "~",          "*",    "a\nb",
                                        "-n #;&|<>!",          "caf\xc3\xa9"};
    char quoted[128], command[256], back[128];
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        snprintf(command, sizeof command, "printf %%s %s", text_for_shell(words[i], quoted, sizeof quoted));
        FILE *shell = popen(command, "r");
        assert_non_null(shell);
        size_t length = fread(back, 1, sizeof back - 1, shell);
        back[length] = '\0';
        assert_int_equal(pclose(shell), 0);
        assert_string_equal(back, words[i]);
    }
    assert_string_equal(text_for_shell(words[0], quoted, sizeof quoted), words[0]);
    assert_string_equal(text_for_shell("", quoted, sizeof quoted), "''");
}

// ---------------------------------------------------------------------------------------

// What a report has in the log.
static const char *const keys[] = {"event",
                                   "commit",
                                   "grads",
                                   "tokens",
                                   "loss",
                                   "lr",
                                   "grad_norm",
                                   "tokens_per_second",
                                   "compute_ms",
                                   "communication_ms",
                                   "exposed_ms",
                                   "steps",
                                   "grads_per_commit",
                                   "seconds",
                                   "perfect_loss",
                                   "bytes_sent",
                                   "bytes_sent_outside",
                                   "model_tflops",
                                   "mfu"};

static void test_report_and_validation(void **state) {
    (void)state;
    static Scheduler scheduler;
    Report report = sample_report();
    assert_int_equal(mkdir("reports", 0777), 0);
    Reports *reports = reports_in("reports");
    report_log(reports, &report);
    report.loss = NAN;
    report.gradient_norm = INFINITY;
    report.perfect_loss = -NAN;
    report.mfu = NAN;
    report_log(reports, &report);
    scheduler.optimizer.steps = 130;
    reports->scheduler = &scheduler;
    reports->validation = 1.3;
    reports->perfect_validation = 0.25;
    report_validation(reports, 1000000, 70);
    reports_close(reports);
    assert_int_equal(reports->lost_lines, 0);
    char *text = read_file("reports/log.jsonl");
    json_t *first = parse_line(text, 0), *second = parse_line(text, 1), *third = parse_line(text, 2);
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        assert_non_null(json_object_get(first, keys[i]));
    }
    assert_int_equal(json_object_size(first), sizeof keys / sizeof keys[0]);
    assert_string_equal(json_string_value(json_object_get(first, "event")), "report");
    assert_true(json_number_value(json_object_get(first, "loss")) == 1.2345678);
    assert_true(json_number_value(json_object_get(first, "exposed_ms")) == 0.7);
    assert_int_equal(json_integer_value(json_object_get(first, "tokens")), 983040);
    assert_int_equal(json_integer_value(json_object_get(first, "bytes_sent")),
                     123456789012); // whole, beyond 32 bits
    assert_true(json_is_null(json_object_get(second, "loss")) &&
                json_is_null(json_object_get(second, "grad_norm")));
    // What only some machines know is there where it is known.
    assert_true(json_number_value(json_object_get(first, "mfu")) == 0.31);
    assert_null(json_object_get(second, "mfu"));
    assert_string_equal(json_string_value(json_object_get(third, "event")), "validation");
    assert_true(json_number_value(json_object_get(third, "perfect_loss")) == 0.25);
    expect_text(text, "\"lr\":0.0006,");
    free(text);
    json_decref(first);
    json_decref(second);
    json_decref(third);
    text = read_file("reports/progress.tsv");
    assert_string_equal(
        text,
        "commit\ttokens\tseconds\tloss\tvalidation_loss\tlr\tgrad_norm\ttokens_per_second\tgrads\t"
        "perfect_loss\tcompute_ms\tcommunication_ms\texposed_ms\tsteps\tmicro_batch_ms\t"
        "micro_batch_cpu_ms\tgrads_per_commit\tbytes_sent\tbytes_sent_outside\tmodel_tflops\tmfu\n"
        "120\t983040\t61.5\t1.2345678\tnan\t0.0006\t0.85\t12345\t480\t1.1\t123.4\t45.6\t0.7\t10\tnan\t"
        "nan\t4\t123456789012\tnan\t9.66\t0.31\n"
        "120\t983040\t61.5\tnan\tnan\t0.0006\tnan\t12345\t480\tnan\t123.4\t45.6\t0.7\t10\tnan\t"
        "nan\t4\t123456789012\tnan\t9.66\tnan\n"
        "130\t1000000\t70\tnan\t1.3\tnan\tnan\tnan\tnan\t0.25\tnan\tnan\tnan\tnan\tnan\tnan\tnan\tnan\tnan"
        "\tnan\tnan\n");
    free(text);
    assert_string_equal(text = read_file("reports/run.tsv"), ""); // reports are not among the facts
    free(text);
}

// run.tsv has a line for each member of an event, whatever the member holds.
static const struct {
    const char *key;
    double wanted[2];
} windows[] = {{"commit", {3, 8}},
               {"grads", {12, 32}},
               {"tokens", {1200, 3200}},
               {"seconds", {10, 30}},
               {"loss", {2.5, 3}},
               {"perfect_loss", {1.5, 2}},
               {"lr", {0.5, 0.25}},
               {"grad_norm", {4, 2}},
               {"tokens_per_second", {120, 110}},
               {"compute_ms", {500, 600}},
               {"communication_ms", {1000, 1200}},
               {"exposed_ms", {250, 300}},
               {"steps", {6, 10}},
               {"micro_batch_ms", {1000, 1500}},
               {"micro_batch_cpu_ms", {500, 750}},
               {"grads_per_commit", {12.5 / 3, 4}},
               {"bytes_sent", {300, 800}},
               {"bytes_sent_outside", {100, 200}},
               {"model_tflops", {240, 220}},
               {"mfu", {0.24, 0.22}}};

// The half `half` of a run of two reports, of two commits each, more steps than commits, and one
// commit without a loss.
static void report_half(Reports *reports, Scheduler *scheduler, int half) {
    CommitReport *commit = &scheduler->report;
    for (int i = 0; i < 2; i++) {
        commit->commit = half == 0 ? 1 + 2 * i : 4 + 4 * i;
        commit->gradients_done = 4 * commit->commit + (i == 1 ? 0.5 : 0);
        commit->predicted = half == 0 ? 100 + 200 * i : 50 * i;
        commit->loss = half == 0 ? 1 + 2 * i : i == 0 ? (double)NAN : 3;
        commit->perfect_loss = commit->loss - 1;
        commit->learning_rate = half == 0 ? 0.5 : 0.25;
        commit->gradient_norm = half == 0 ? 4 : 2;
        double each = half == 0 ? 1.5 : 3;
        commit->seconds = (TraceSums){each, 2 * each, each / 2, 2 * each, each};
        window_add_commit(reports);
    }
    scheduler->optimizer.steps = half == 0 ? 6 : 16;
    scheduler->gradients_done = half == 0 ? 12 : 34; // some are not committed yet
    scheduler->micro_batches_begun = half == 0 ? 6 : 14;
    scheduler->transport->bytes_sent = half == 0 ? 300 : 800;
    scheduler->transport->bytes_sent_outside = half == 0 ? 100 : 200;
    report_window(reports, half == 0 ? 10 : 30);
}

static void test_a_report_is_of_what_came_since_the_last(void **state) {
    (void)state;
    static Scheduler scheduler;
    static Transport transport;
    assert_int_equal(mkdir("windows", 0777), 0);
    Reports *reports = reports_in("windows");
    reports->scheduler = &scheduler;
    reports->micro_batch_tokens = 100;
    reports->token_flops = 2e12;
    reports->peak_flops = 1e15;
    scheduler.transport = &transport;
    window_begin(reports, 0);
    for (int half = 0; half < 2; half++) { report_half(reports, &scheduler, half); }
    window_begin(reports, 30);
    report_window(reports, 31); // nothing was computed since
    assert_close(reports->exposed_seconds, 4.5, 1e-12, "waited");
    assert_close(reports->micro_batch_seconds, 18, 1e-12, "micro-batches");
    reports_close(reports);
    char *text = read_file("windows/log.jsonl");
    for (int half = 0; half < 2; half++) {
        json_t *report = parse_line(text, half);
        for (size_t i = 0; i < sizeof windows / sizeof windows[0]; i++) {
            double wanted = windows[i].wanted[half];
            assert_close(json_number_value(json_object_get(report, windows[i].key)), wanted, 1e-11 * wanted,
                         windows[i].key);
        }
        json_decref(report);
    }
    json_t *idle = parse_line(text, 2);
    assert_true(json_is_null(json_object_get(idle, "tokens_per_second")) &&
                json_is_null(json_object_get(idle, "loss")) &&
                json_object_get(idle, "micro_batch_ms") == NULL);
    json_decref(idle);
    free(text);
}

static void test_facts(void **state) {
    (void)state;
    assert_int_equal(mkdir("facts", 0777), 0);
    Reports *reports = reports_in("facts");
    report_event(reports,
                 json_pack("{s:s, s:I, s:n, s:f, s:b, s:{s:s, s:f}, s:[{s:s, s:i}, {s:s, s:i}], s:[]}",
                           "event", "start", "commit", (json_int_t)7, "unknown", "share", 0.1, "saved", 1,
                           "options", "optimizer", "acco", "lr", 0.0006, "ranks", "host", "a", "pid", 1,
                           "host", "b", "pid", 2, "times"));
    report_event(reports, json_pack("{s:s, s:o}", "event", "end", "reason", log_text("a\tb\nc \"d\"\xff")));
    reports_close(reports);
    assert_int_equal(reports->lost_lines, 0);
    char *text = read_file("facts/run.tsv");
    assert_string_equal(text, "start.event\tstart\n"
                              "start.commit\t7\n"
                              "start.unknown\tnull\n"
                              "start.share\t0.1\n"
                              "start.saved\ttrue\n"
                              "start.options.optimizer\tacco\n"
                              "start.options.lr\t0.0006\n"
                              "start.ranks\t2\n"
                              "start.ranks.0.host\ta\n"
                              "start.ranks.0.pid\t1\n"
                              "start.times\t0\n"
                              "end.event\tend\n"
                              "end.reason\ta\\tb\\nc \\\"d\\\"?\n");
    free(text);
}

// A machine crashed while lines were written: what the next part of the run writes stands on
// lines of its own.
static void test_a_line_that_was_cut_off_ends(void **state) {
    (void)state;
    static const char *const names[] = {"cut/log.jsonl", "cut/progress.tsv", "cut/run.tsv"};
    Report report = sample_report();
    assert_int_equal(mkdir("cut", 0777), 0);
    for (int i = 0; i < 2; i++) {
        Reports *reports = reports_in("cut");
        report_log(reports, &report);
        report_event(reports, json_pack("{s:s, s:s}", "event", "end", "reason", "done"));
        reports_close(reports);
        struct stat status;
        for (int file = 0; file < 3 && i == 0; file++) {
            assert_int_equal(stat(names[file], &status), 0);
            assert_int_equal(truncate(names[file], status.st_size - 3), 0);
        }
    }
    char *text = read_file("cut/run.tsv"), *curves = read_file("cut/progress.tsv"),
         *log = read_file("cut/log.jsonl"), *torn = strstr(log, "\"done\n");
    assert_string_equal(text, "end.event\tend\nend.reason\tdo\nend.event\tend\nend.reason\tdone\n");
    const char *first = strchr(curves, '\n') + 1, *second = strchr(first, '\n') + 1;
    size_t cut = (size_t)(second - first) - 1; // the rows are alike
    assert_int_equal(strlen(second), cut + 3);
    assert_memory_equal(first, second, cut);
    assert_non_null(torn); // of the event's end, and then all is whole
    json_decref(parse_line(strchr(torn, '\n') + 1, 1));
    free(text);
    free(curves);
    free(log);
}

// Behind a rollback, or with other batches, a run goes on elsewhere in the data.
static void test_a_spike_names_its_sequences(void **state) {
    (void)state;
    Scheduler *scheduler = (Scheduler *)calloc(1, sizeof *scheduler);
    Transport transport = {.size = 2};
    const SpikeReport spike = {.kind = SPIKE_LOSS, .rank = 1, .site = {.micro_batch = 4}};
    const CheckpointedRun run = {.transport = &transport, .scheduler = scheduler, .B = 3, .data_base = 10};
    const DataLoader data = {.builtin = true};
    char text[SPIKE_TEXT_SIZE];
    scheduler->spikes.latest = spike;
    describe_spike(&run, &data, text, sizeof text);
    assert_string_equal(text,
                        "the loss of rank 1 is not a finite number in its micro-batch 3 (of 3 sequences, "
                        "the first is number 51 in the order of training)");
    // Of the second of two tensors, which has rows of 5: element 13 of it, counted from 0.
    static ParameterInfo entries[3] = {
        {.name = "a"}, {.name = "w", .offset = 7, .columns = 5}, {.name = "b", .offset = 27}};
    const ParameterTable table = {.entries = entries, .count = 3};
    const SpikeReport matrix = {.kind = SPIKE_GRADIENT, .rank = 1, .site = {.element = 21}},
                      vector = {.kind = SPIKE_GRADIENT, .rank = 0, .site = {.element = 28}};
    const CheckpointedRun with_table = {.transport = &transport, .scheduler = scheduler, .table = &table};
    scheduler->spikes.latest = matrix;
    describe_spike(&with_table, &data, text, sizeof text);
    assert_string_equal(text, "the gradient of rank 1 is not finite although its loss is; the backward pass "
                              "met it first in w[2, 3]");
    scheduler->spikes.latest = vector;
    describe_spike(&with_table, &data, text, sizeof text);
    assert_non_null(strstr(text, "the gradient of rank 0 is"));
    assert_non_null(strstr(text, " first in b[0]"));
    free(scheduler);
}

static void test_opening_again_appends(void **state) {
    (void)state;
    Error error;
    assert_int_equal(mkdir("again", 0777), 0);
    for (int i = 0; i < 3; i++) {
        Reports *reports = reports_in("again");
        assert_true(log_event(
            &reports->log,
            json_pack("{s:s, s:i, s:o}", "event", "start", "number", i, "text", log_text("a\nb\"\xff")),
            &error));
        reports_close(reports);
    }
    char *text = read_file("again/log.jsonl");
    for (int i = 0; i < 3; i++) {
        json_t *event = parse_line(text, i);
        assert_int_equal(json_integer_value(json_object_get(event, "number")), i);
        assert_string_equal(json_string_value(json_object_get(event, "text")), "a\nb\"?");
        json_decref(event);
    }
    free(text);
    text = read_file("again/progress.tsv");
    const char *rest = strchr(text, '\n') + 1; // one heading, and a gap for each time that it went on
    assert_string_equal(rest, "\n\n");
    free(text);
}

static void test_missing_directory(void **state) {
    (void)state;
    Reports reports;
    Error error;
    assert_false(reports_open(&reports, "no/such/place", &error));
    expect_text(error.text, "cannot open no/such/place/log.jsonl for writing: No such file or directory");
    assert_int_equal(reports.log.descriptor, -1);
    log_close(&reports.log); // harmless
}

static void test_disk_full(void **state) {
    (void)state;
    Error error;
    Report report = sample_report();
    assert_int_equal(mkdir("full", 0777), 0);
    assert_int_equal(symlink("/dev/full", "full/log.jsonl"), 0);
    Reports *reports = reports_in("full");
    report_log(reports, &report);
    assert_int_equal(reports->lost_lines, 1);
    assert_false(log_append(&reports->log, "x\n", 2, &error));
    expect_text(error.text, "cannot write full/log.jsonl: No space left on device");
    reports_close(reports);
    char *curves = read_file("full/progress.tsv"); // the heading, and the row all the same
    const char *row = strchr(curves, '\n') + 1;
    assert_true(strchr(row, '\n') != NULL);
    free(curves);
}

// What waits in any of the three files is written at the end of a run, if there is room then.
static void test_disk_full_until_the_end(void **state) {
    (void)state;
    Report report = sample_report();
    assert_int_equal(mkdir("late", 0777), 0);
    Reports *reports = reports_in("late");
    Log *logs[] = {&reports->log, &reports->curves, &reports->facts};
    int files[3], full = open("/dev/full", O_WRONLY);
    for (int i = 0; i < 3; i++) {
        logs[i]->patient = true;
        files[i] = dup(logs[i]->descriptor);
        assert_true(dup2(full, logs[i]->descriptor) >= 0);
    }
    report_log(reports, &report);
    report_event(reports, json_pack("{s:s, s:i}", "event", "late", "number", 7));
    assert_int_equal(reports->lost_lines, 0);
    for (int i = 0; i < 3; i++) {
        assert_true(logs[i]->waiting_bytes > 0);
        assert_true(dup2(files[i], logs[i]->descriptor) >= 0);
        close(files[i]);
    }
    close(full);
    reports_close(reports);
    assert_int_equal(reports->lost_lines, 0);
    static const char *const wanted[][2] = {{"late/log.jsonl", "\"number\":7"},
                                            {"late/progress.tsv", "0.31"},
                                            {"late/run.tsv", "late.number\t7"}};
    for (int i = 0; i < 3; i++) {
        char *text = read_file(wanted[i][0]);
        if (strstr(text, wanted[i][1]) == NULL) { fail_msg("%s: %s", wanted[i][0], text); }
        free(text);
    }
}

// Where there is none, they are counted as lost.
static void test_disk_full_at_the_end(void **state) {
    (void)state;
    Report report = sample_report();
    assert_int_equal(mkdir("lost", 0777), 0);
    Reports *reports = reports_in("lost");
    Log *logs[] = {&reports->log, &reports->curves, &reports->facts};
    int full = open("/dev/full", O_WRONLY);
    for (int i = 0; i < 3; i++) {
        logs[i]->patient = true;
        assert_true(dup2(full, logs[i]->descriptor) >= 0);
    }
    close(full);
    report_log(reports, &report); // a line of the log, and a row
    report_event(reports, json_pack("{s:s, s:i}", "event", "lost", "number", 7)); // and two facts
    assert_int_equal(reports->lost_lines, 0);
    reports_close(reports);
    assert_int_equal(reports->lost_lines, 5);
}

// While the disk is full, lines of a patient log wait, and come first when there is
// space again. Other failures are said.
static void test_disk_full_for_a_while(void **state) {
    (void)state;
    Log log;
    Error error = {""};
    assert_int_equal(mkdir("while", 0777), 0);
    assert_true(log_open(&log, "while", "log.jsonl", &error));
    log.patient = true;
    assert_true(log_append(&log, "one\n", 4, &error));
    int file = dup(log.descriptor), full = open("/dev/full", O_WRONLY);
    assert_true(file >= 0 && full >= 0 && dup2(full, log.descriptor) >= 0);
    assert_true(log_append(&log, "two\n", 4, &error) && log_append(&log, "three\n", 6, &error));
    assert_int_equal(log.waiting_bytes, 10);
    char *much = (char *)calloc(LOG_WAITING_BYTES, 1);
    assert_false(log_append(&log, much, LOG_WAITING_BYTES, &error)); // more than ever waits
    expect_text(error.text, "cannot write while/log.jsonl: No space left on device");
    free(much);
    assert_true(dup2(file, log.descriptor) >= 0);
    assert_true(log_append(&log, "four\n", 5, &error));
    assert_true(log.waiting_bytes == 0);
    int reads = open("while", O_RDONLY); // what does not get better is said at once
    assert_true(reads >= 0 && dup2(reads, log.descriptor) >= 0);
    assert_false(log_append(&log, "five\n", 5, &error));
    expect_text(error.text, "cannot write while/log.jsonl: Bad file descriptor");
    assert_true(log.waiting_bytes == 0);
    close(reads);
    close(file);
    close(full);
    log_close(&log);
    char *text = read_file("while/log.jsonl");
    expect_text(text, "one\ntwo\nthree\nfour\n");
    free(text);
}

// full: the log when three reports did not fit, which had `written` whole lines. The two
// that came later stand behind a line that says so.
static void check_gap(char *full, int written) {
    char *text = read_file("half/log.jsonl");
    int lines = 0;
    for (const char *c = full; *c != '\0'; c++) { lines += *c == '\n'; }
    assert_int_equal(lines, written);
    assert_int_equal(strncmp(text, full, strlen(full)), 0);
    json_t *gap = parse_line(text, written), *last = parse_line(text, written + 2);
    assert_string_equal(json_string_value(json_object_get(gap, "event")), "gap");
    assert_int_equal(json_integer_value(json_object_get(gap, "lines")), 3);
    assert_string_equal(json_string_value(json_object_get(last, "event")), "report");
    json_decref(gap);
    json_decref(last);
    free(text);
    free(full);
}

// A limit in the middle of a line: the part that did fit is cut off, and what is left is
// whole lines. When there is room again, the log says what it lacks.
static void test_half_written_line_is_removed(void **state) {
    (void)state;
    Report report = sample_report();
    struct rlimit limit, small;
    int written = 0;
    assert_int_equal(mkdir("half", 0777), 0);
    Reports *reports = reports_in("half");
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    small = limit;
    small.rlim_cur = 1000;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    for (; written < 100 && reports->lost_lines == 0; written++) { report_log(reports, &report); }
    written--;
    for (int i = 0; i < 2; i++) { report_log(reports, &report); }
    assert_int_equal(reports->lost_lines, 3);
    setrlimit(RLIMIT_FSIZE, &limit);
    char *full = read_file("half/log.jsonl");
    report_log(reports, &report);
    report_log(reports, &report);
    assert_int_equal(reports->lost_lines, 3);
    reports_close(reports);
    check_gap(full, written);
    assert_in_range(written, 1, 20);
    char *text = read_file("half/log.jsonl");
    assert_true(text[strlen(text) - 1] == '\n');
    json_decref(parse_line(text, written - 1));
    free(text);
}

// ---------------------------------------------------------------------------------------

static void terminal_on_memory(Terminal *terminal, char **text, size_t *size, bool interactive) {
    memset(terminal, 0, sizeof *terminal);
    *text = NULL;
    terminal->stream = open_memstream(text, size);
    terminal->interactive = interactive;
    terminal->columns = TERMINAL_COLUMNS;
    terminal->quiet_since = -1;
}

// Reports of all sizes below a heading, in lines of one width that leaves the last of 80
// columns free; without the column for what a perfect model has where that is not known.
static void check_table(bool knows_perfect) {
    Terminal terminal;
    char *text;
    size_t size;
    Report report = sample_report();
    terminal_on_memory(&terminal, &text, &size, false);
    static Reports reports;
    memset(&reports, 0, sizeof reports);
    reports.terminal = &terminal;
    reports.knows_perfect = knows_perfect;
    report_print(&reports, &report);
    report.loss = report.gradient_norm = -NAN;
    report.perfect_loss = NAN;
    report_print(&reports, &report);
    report.commit = 999999;
    report.loss = 10.82494;
    report.perfect_loss = 0.07512;
    report.gradient_norm = 0.01234;
    report.tokens = report.tokens_per_second = 99960;
    report.compute_ms = 99950;
    report.communication_ms = 99.94;
    report.exposed_ms = 999.6;
    report.gradients_per_commit = 12.345;
    for (int i = 2; i < 21; i++) { report_print(&reports, &report); }
    fclose(terminal.stream);
    int lines = 0, headings = 0;
    assert_null(strchr(text, '\r'));
    assert_null(strstr(text, "-nan"));
    expect_text(text, " 983k ");
    expect_text(text, " 12.3k ");
    expect_text(text, " 123ms ");
    expect_text(text, " 100s 99.9ms   1.00s ");
    assert_true((strstr(text, " perfect ") != NULL) == knows_perfect);
    assert_true((strstr(text, " 1.1000 ") != NULL) == knows_perfect);
    for (char *line = strtok(text, "\n"); line != NULL; line = strtok(NULL, "\n")) {
        if (strlen(line) != (knows_perfect ? 79 : 71)) { fail_msg("%zu columns: %s", strlen(line), line); }
        lines++;
        headings += strstr(line, "tok/s") != NULL;
    }
    assert_int_equal(headings, 2);
    assert_int_equal(lines, 21 + 2);
    free(text);
}

static void test_terminal_lines_are_aligned(void **state) {
    (void)state;
    check_table(true);
    check_table(false);
}

static void bar_at(Terminal *terminal, int64_t done, int64_t total, double now) {
    Progress progress = {"", "tokens", done, total, now, 10};
    terminal_bar(terminal, &progress, now);
}

static void show_report(Terminal *terminal, const Report *report) {
    static Reports reports;
    memset(&reports, 0, sizeof reports);
    reports.terminal = terminal;
    report_print(&reports, report);
}

static void test_bar_redraws_in_place(void **state) {
    (void)state;
    Terminal terminal;
    char *text;
    size_t size;
    Report report = sample_report();
    terminal_on_memory(&terminal, &text, &size, true);
    bar_at(&terminal, 0, 1000000, 0);
    bar_at(&terminal, 10000, 1000000, 0.05); // too soon
    bar_at(&terminal, 250000, 1000000, 10);
    show_report(&terminal, &report);
    bar_at(&terminal, 1000000, 1000000, 40);
    terminal_clear(&terminal);
    terminal_clear(&terminal); // nothing left to clear
    fclose(terminal.stream);
    expect_text(text, "  0 %  0 of 1.00M tokens, ? left");
    expect_text(text, " 25 %  250k of 1.00M tokens, 0:30 left\r\033[K"); // wiped before the line
    expect_text(text, "100 %  1.00M of 1.00M tokens, 0:00 left\r\033[K");
    assert_null(strstr(text, "10.0k"));
    int wipes = 0;
    for (char *c = text; (c = strstr(c, "\r\033[K")) != NULL; c++) { wipes++; }
    assert_int_equal(wipes, 5);
    char *last = strrchr(text, '['); // of the wipe
    assert_true(last != NULL && strcmp(last, "[K") == 0);
    free(text);
    terminal_on_memory(&terminal, &text, &size, true);
    bar_at(&terminal, 7, 8, 10);
    bar_at(&terminal, 8, 8, 10.01); // soon, but the last one
    fclose(terminal.stream);
    expect_text(text, "100 %  8 of 8 tokens, 0:00 left");
    free(text);
    for (int columns = 0; columns < 200; columns++) { // never wider than the screen
        terminal_on_memory(&terminal, &text, &size, true);
        terminal.columns = columns;
        bar_at(&terminal, 123456789, 1000000000, 1e5);
        fclose(terminal.stream);
        assert_true(strlen(text) - strlen("\r\033[K") <= (size_t)(columns > 2 ? columns - 1 : 1));
        free(text);
    }
}

// In a file or a pipe a line stands for the bar after ten seconds without another line.
static void test_silence_is_broken(void **state) {
    (void)state;
    Terminal terminal;
    char *text;
    size_t size;
    Report report = sample_report();
    Progress progress = {"validation, ", "batches", 3, 4, 90, 10};
    terminal_on_memory(&terminal, &text, &size, false);
    for (int now = 1000; now < 1010; now++) { bar_at(&terminal, 1, 8, now); } // from now on it is watched
    show_report(&terminal, &report);
    for (int now = 1010; now < 1030; now++) { bar_at(&terminal, 2, 8, now); }
    terminal_bar(&terminal, &progress, 1030);
    terminal_clear(&terminal);
    fclose(terminal.stream);
    char *lines = strstr(text, "\n") + 1;
    expect_text(strstr(lines, "\n"),
                "\n 25 %  2 of 8 tokens, 51:00 left\n 75 %  validation, 3 of 4 batches, 0:30 left\n");
    assert_null(strchr(text, '\033'));
    assert_ptr_equal(strstr(text, "2 of 8"), strstr(text, "2 of 8 tokens, 51:00 left")); // no line before
    free(text);
    // Training may ask for a longer silence.
    terminal_on_memory(&terminal, &text, &size, false);
    progress.silence = 60;
    for (int now = 0; now <= 60; now++) {
        progress.done = now;
        progress.total = 100;
        terminal_bar(&terminal, &progress, now);
    }
    fclose(terminal.stream);
    assert_string_equal(text, " 60 %  validation, 60 of 100 batches, 1:00 left\n");
    free(text);
}

// A screen that cannot go back in a line gets what a file gets.
static void test_dumb_terminals_get_no_bar(void **state) {
    (void)state;
    static const char *const kinds[] = {"xterm-256color", "dumb", ""};
    const char *kind = getenv("TERM");
    char before[64] = "";
    if (kind != NULL) { snprintf(before, sizeof before, "%s", kind); }
    int master = posix_openpt(O_RDWR | O_NOCTTY);
    if (master < 0 || grantpt(master) != 0 || unlockpt(master) != 0) {
        leave_out("pseudo-terminals (/dev/pts)");
    }
    FILE *stream = fopen(ptsname(master), "w");
    assert_non_null(stream);
    unsetenv("OMPI_COMM_WORLD_SIZE");
    for (int i = 0; i < 3; i++) {
        Terminal terminal;
        setenv("TERM", kinds[i], 1);
        terminal_open(&terminal, stream);
        assert_true(terminal.interactive == (i == 0));
    }
    unsetenv("TERM");
    assert_false(terminal_is_watched(stream));
    if (kind != NULL) { setenv("TERM", before, 1); }
    fclose(stream);
    close(master);
}

static int make_scratch(void **state) {
    (void)state;
    const char *parent = getenv("TMPDIR");
    snprintf(scratch, sizeof scratch, "%.40s/acco_log_XXXXXX",
             parent != NULL && strlen(parent) < 40 ? parent : "/tmp");
    return getcwd(start_directory, sizeof start_directory) == NULL || mkdtemp(scratch) == NULL ||
           chdir(scratch) != 0;
}

static int remove_scratch(void **state) {
    (void)state;
    char command[128];
    if (chdir(start_directory) != 0) { return 1; }
    snprintf(command, sizeof command, "rm -rf '%s'", scratch);
    return system(command);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_human_numbers),
        cmocka_unit_test(test_sizes_and_medians),
        cmocka_unit_test(test_words_of_errors),
        cmocka_unit_test(test_text_is_repaired),
        cmocka_unit_test(test_directories_are_numbered),
        cmocka_unit_test(test_directories_that_are_named),
        cmocka_unit_test(test_trees_are_removed),
        cmocka_unit_test(test_lines_and_paths),
        cmocka_unit_test(test_a_lack_of_memory_ends_the_process),
        cmocka_unit_test(test_a_file_that_becomes_shorter_ends_the_process),
        cmocka_unit_test(test_directory_without_permission),
        cmocka_unit_test(test_words_for_a_shell),
        cmocka_unit_test(test_report_and_validation),
        cmocka_unit_test(test_a_report_is_of_what_came_since_the_last),
        cmocka_unit_test(test_facts),
        cmocka_unit_test(test_a_spike_names_its_sequences),
        cmocka_unit_test(test_opening_again_appends),
        cmocka_unit_test(test_a_line_that_was_cut_off_ends),
        cmocka_unit_test(test_missing_directory),
        cmocka_unit_test(test_disk_full),
        cmocka_unit_test(test_disk_full_for_a_while),
        cmocka_unit_test(test_disk_full_until_the_end),
        cmocka_unit_test(test_disk_full_at_the_end),
        cmocka_unit_test(test_half_written_line_is_removed),
        cmocka_unit_test(test_terminal_lines_are_aligned),
        cmocka_unit_test(test_bar_redraws_in_place),
        cmocka_unit_test(test_silence_is_broken),
        cmocka_unit_test(test_dumb_terminals_get_no_bar),
    };
    return cmocka_run_group_tests(tests, make_scratch, remove_scratch);
}
