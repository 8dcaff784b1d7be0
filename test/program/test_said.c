// test_said.c: what the program says, word for word. Most of what can go wrong in a message (a
// wrong number, a line that is missing, the words of another case) no other test would see.
//
// said/NAME.txt is what a terminal shows: a command behind "$ ", then what it prints, then the next
// command. All commands of a file work in one directory, where reference is test/reference and
// like is the log of a run. Blanks of any number are alike. ~ stands for a number with its unit,
// which varies from run to run or machine to machine, * for anything, and a line ... for any lines.
// Lines about how busy or how large the machine is are left out.
//
// A message that has changed on purpose is copied there from what the failing test prints.

#include "program.h"

#include <ctype.h>
#include <glob.h>

static Stage stage;

// ---- Comparing ------------------------------------------------------------------------

static bool says(const char *said, const char *expected) {
    while (*expected != '\0') {
        if (*expected == '*') {
            for (;; said++) {
                if (says(said, expected + 1)) { return true; }
                if (*said == '\0') { return false; }
            }
        }
        if (*expected == '~') {
            size_t number = strspn(said, "0123456789.:+-");
            if (number == 0) { return false; }
            said += number;
            while (isalpha((unsigned char)*said) || isdigit((unsigned char)*said) || *said == '-') { said++; }
            expected++;
            continue;
        }
        if (*said != *expected) { return false; }
        bool blank = *said == ' ';
        said++;
        expected++;
        while (blank && *said == ' ') { said++; }
        while (blank && *expected == ' ') { expected++; }
    }
    while (*said == ' ') { said++; }
    return *said == '\0';
}

static void numbers_and_gaps_are_found(void **state) {
    (void)state;
    assert_true(says("memory     29.6 MB, at 1.2e-04", "memory ~ MB, at ~"));
    assert_true(says("in 12ms or 1:02:03, -2.5 %", "in ~ or ~, ~ %"));
    assert_true(says("threads 2 (why); by oneDNN", "threads 2 (*); by *"));
    assert_false(says("threads 2 (why); by oneDNN", "threads 3 (*); by *"));
    assert_false(says("loss nan", "loss ~"));
    assert_false(says("a line and more", "a line"));
    assert_false(says("a line", "a line and more"));
}

// The next line of a text, ended by a zero byte; NULL: there is none.
static char *next_line(char **rest) {
    char *line = *rest;
    if (line == NULL || *line == '\0') { return NULL; }
    char *end = strchr(line, '\n');
    *rest = end == NULL ? NULL : end + 1;
    if (end != NULL) { *end = '\0'; }
    return line;
}

static bool is_about_the_machine(const char *line) {
    static const char *const beginnings[] = {"warning", "network", "slow", "           --rank-accumulate"};
    for (size_t i = 0; i < sizeof beginnings / sizeof beginnings[0]; i++) {
        if (strncmp(line, beginnings[i], strlen(beginnings[i])) == 0) { return true; }
    }
    return false;
}

// What a command of the shell prints in the directory NAME; train_gpt is the program.
static char *run_command(const char *name, const char *command) {
    const char *arguments = strstr(command, "train_gpt ");
    char directory[STAGE_PATH_SIZE], path[STAGE_PATH_SIZE];
    stage_path(&stage, name, directory);
    if (arguments == NULL) {
        shell(&stage, "cd %s && { %s; } > ../said.txt", name, command);
        return stage_read_text(&stage, stage_path(&stage, "said.txt", path));
    }
    int ranks = 0;
    sscanf(command, "mpirun -np %d", &ranks);
    Setting setting = {.directory = directory};
    Outcome outcome = program_run_with(&stage, ranks, &setting, arguments + strlen("train_gpt"));
    outcome_check(&outcome, 0, command);
    return outcome.output;
}

// Runs a command, and compares what it says with what is expected.
static void compare_command(const char *name, const char *command, char *wanted) {
    char *output = run_command(name, command), *whole = strdup(output), *said = whole,
         *line = next_line(&said);
    bool skips = false; // behind a line ...
    for (char *expected; (expected = next_line(&wanted)) != NULL;) {
        if (strcmp(expected, "...") == 0) {
            skips = true;
            continue;
        }
        while (line != NULL && (skips ? !says(line, expected) : is_about_the_machine(line))) {
            line = next_line(&said);
        }
        if (line == NULL || !says(line, expected)) {
            fprintf(stderr, "all of it:\n%s\n", output); // too long for fail_msg
            fail_msg("%s\n%s\nexpected: %s\nsaid:     %s", name, command, expected,
                     line == NULL ? "(the end)" : line);
        }
        skips = false;
        line = next_line(&said);
    }
    while (line != NULL && (skips || is_about_the_machine(line))) { line = next_line(&said); }
    if (line != NULL && line[0] == '\0') { line = next_line(&said); } // as between two transcripts
    if (line != NULL) { fail_msg("%s\n%s\nsaid more: %s", name, command, line); }
    free(whole);
}

// Cuts a text before its next command, and a blank line there. Returns the command, NULL: there is
// none; wanted <- what is expected of it.
static char *next_command(char **rest, char **wanted) {
    static char nothing[1];
    char *command = next_line(rest), *next = *rest;
    *wanted = nothing;
    if (command == NULL || next == NULL || strncmp(next, "$ ", 2) == 0) { return command; }
    *wanted = next;
    *rest = strstr(next, "\n$ ");
    if (*rest != NULL) { *(*rest)++ = '\0'; }
    size_t length = strlen(next);
    if (length > 0 && next[length - 1] == '\n') { next[length - 1] = '\0'; }
    return command;
}

// A file of said/: its name is that of the test, and of the directory in which its commands work.
static void it_is_said(void **state) {
    const char *name = (const char *)*state;
    char path[2 * STAGE_PATH_SIZE];
    shell(&stage,
          "mkdir %s && root='%s' && ln -s \"$root\"/test/reference "
          "\"$root\"/test/program/said/like %s",
          name, stage.root, name);
    snprintf(path, sizeof path, "%s/test/program/said/%s.txt", stage.root, name);
    char *text = file_read(path), *rest = text, *wanted;
    assert_non_null(text);
    for (char *command; (command = next_command(&rest, &wanted)) != NULL;) {
        assert_memory_equal(command, "$ ", 2);
        if (strncmp(command, "$ mpirun", 8) == 0) { stage_need_mpi(&stage); }
        compare_command(name, command + 2, wanted);
    }
    free(text);
}

static int end_programs(void **state) {
    (void)state;
    stage_end_all(&stage);
    return 0;
}

int main(void) {
    enum { MOST = 32 };
    static struct CMUnitTest tests[MOST] = {cmocka_unit_test(numbers_and_gaps_are_found)};
    size_t count = 1;
    glob_t files;
    stage_open(&stage);
    char pattern[STAGE_PATH_SIZE + 64], root[PATH_MAX];
    if (realpath(stage.root, root) == NULL) { return 1; }
    snprintf(stage.root, sizeof stage.root, "%.*s", (int)sizeof stage.root - 1, root);
    setenv("TRAIN_GPT", stage.binary, 1); // for commands of the shell
    snprintf(pattern, sizeof pattern, "%s/test/program/said/*.txt", stage.root);
    if (glob(pattern, 0, NULL, &files) != 0 || files.gl_pathc >= MOST) { return 1; }
    for (size_t i = 0; i < files.gl_pathc; i++) {
        char *name = strrchr(files.gl_pathv[i], '/') + 1;
        name[strlen(name) - strlen(".txt")] = '\0';
        struct CMUnitTest test = {name, it_is_said, NULL, end_programs, name};
        tests[count++] = test;
    }
    int failed = _cmocka_run_group_tests("said", tests, count, NULL, NULL);
    stage_close(&stage);
    globfree(&files);
    return failed;
}
