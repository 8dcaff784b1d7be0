// program.h: starts the real binary the way a user does, and reads what it leaves behind.
//
// A Stage is where a test program works: a scratch directory with the files that its runs
// need, and how to start ranks. The environment says what to test (test/run sets it):
//   TRAIN_GPT      the binary
//   MPIRUN         the launcher with its flags
//   HAVE_MPI       yes or no; without it, tests that need several ranks are skipped
//   PROJECT_ROOT   the root of the source tree
//
// A command runs through /bin/sh in a process group of its own, its output goes to files,
// and it has a time limit. Several may run at once, because mpirun mostly sleeps while it
// starts. Each has its own TMPDIR: Open MPI keeps a directory there that all mpiruns of a
// user share, and one of them fails when another removes it. Version 5 keeps its shared memory
// there as well. In /dev/shm, its place, 16 bits of a hash tell the files of two mpiruns apart:
// 31652 and 31659, as process numbers, give the same, and a rank crashed. stage_end_test, the
// teardown of every test, ends the programs that a failing test leaves running.
#pragma once

#include "runtime/errors.h" // PRINTF_LIKE
#include "test/harness.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <limits.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>

enum { STAGE_PROGRAMS = 20, STAGE_COMMAND_SIZE = 8192, STAGE_PATH_SIZE = 1024, PROGRAM_SECONDS = 150 };

typedef struct Stage {
    char directory[STAGE_PATH_SIZE / 2]; // absolute; removed at the end
    char binary[STAGE_PATH_SIZE], launcher[STAGE_PATH_SIZE], root[STAGE_PATH_SIZE];
    char terminal[64]; // what programs have as their terminal, beside the files; "": none
    bool has_mpi;
    int count;                     // programs and directories made so far: numbers their names
    pid_t running[STAGE_PROGRAMS]; // 0: a free place
    char **texts;                  // what programs printed; freed by stage_end_test
    int text_count;
} Stage;

typedef struct Program {
    pid_t pid; // also its process group
    char output_path[STAGE_PATH_SIZE], error_path[STAGE_PATH_SIZE], scratch_path[STAGE_PATH_SIZE];
} Program;

// How a program ended and what it printed. exit_code is 128 + N after signal N, and -1
// when the time limit ended it. The stage owns the texts.
typedef struct Outcome {
    int exit_code;
    char *output, *errors;
} Outcome;

// The rank of a process, as Open MPI and MPICH tell it; and what begins the command of a rank that
// works in rank-0, rank-1 and so on. (The mpirun of Open MPI 5.0.7 crashes where ranks are given
// commands of their own with ':'.)
#define RANK_IN_SHELL "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"
#define IN_DIRECTORY_OF_RANK "sh -c 'cd rank-" RANK_IN_SHELL " && exec \"$0\" \"$@\"' "

// How a command is started, beyond the command itself. All zero: in the stage's
// directory, without limits.
typedef struct Setting {
    const char *directory;
    long file_bytes; // RLIMIT_FSIZE; 0: none
    // A write beyond the limit fails instead of killing the process. Every rank ignores
    // the signal for itself, because mpirun does not pass on what it ignores.
    bool ignore_xfsz;
    const char *second;       // arguments of rank 1, without quotation marks; NULL: those of rank 0
    const char *second_has;   // NAME=VALUE in the environment of rank 1 alone; NULL: nothing
    const char *tasks, *task; // SLURM_STEP_NUM_TASKS and SLURM_PROCID; NULL: not set
    size_t stack_bytes;       // RLIMIT_STACK, the size of a new thread's stack; 0: as it is
    int early_signal;         // has already come when the program begins, and is blocked; 0: none
} Setting;

static inline double program_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static inline void program_pause(double seconds) {
    struct timespec pause = {(time_t)seconds, (long)(1e9 * (seconds - (double)(time_t)seconds))};
    nanosleep(&pause, NULL);
}

// ---- Files ----------------------------------------------------------------------------

// The whole file, followed by a zero byte. NULL: there is no such file.
static inline char *file_read(const char *path) {
    FILE *file = fopen(path, "rb");
    if (file == NULL) { return NULL; }
    size_t length = 0, room = 4096;
    char *text = (char *)malloc(room + 1);
    for (size_t n; (n = fread(text + length, 1, room - length, file)) > 0;) {
        length += n;
        if (length == room) { text = (char *)realloc(text, (room *= 2) + 1); }
    }
    text[length] = '\0';
    fclose(file);
    return text;
}

static inline void file_write(const char *path, const void *bytes, size_t count) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, count, file), count);
    assert_int_equal(fclose(file), 0);
}

// ---- The stage ------------------------------------------------------------------------

static inline const char *stage_variable(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value != NULL && value[0] != '\0' ? value : otherwise;
}

// The test itself may run inside a job of a cluster, or as root. The programs that it
// starts must not notice the first, and Open MPI must allow the second.
static inline void stage_clean_environment(void) {
    static const char *const foreign[] = {
        "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_SIZE",     "PMI_RANK",    "PMIX_RANK",
        "MPI_LOCALNRANKS",      "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_NTASKS"};
    for (size_t i = 0; i < sizeof foreign / sizeof foreign[0]; i++) { unsetenv(foreign[i]); }
    if (geteuid() == 0) {
        setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
        setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    }
}

// With which instructions oneDNN multiplies in the programs of a test. Each of them compiles its
// products anew: for AVX-512 in 35 ms, which is longer than the models here are trained, for SSE4.1
// in next to no time. Tests of test/unit and of test/rules have all instructions.
static inline void stage_allow_instructions(bool all) {
    if (all) {
        unsetenv("ONEDNN_MAX_CPU_ISA");
    } else {
        setenv("ONEDNN_MAX_CPU_ISA", "SSE41", 1);
    }
}

static inline void stage_open(Stage *stage) {
    char path[PATH_MAX];
    memset(stage, 0, sizeof *stage);
    stage_clean_environment();
    stage_allow_instructions(false);
    const char *binary = realpath(stage_variable("TRAIN_GPT", "./train_gpt"), path);
    if (binary == NULL) {
        fail_msg("there is no program at %s: say where with TRAIN_GPT",
                 stage_variable("TRAIN_GPT", "./train_gpt"));
    }
    snprintf(stage->binary, sizeof stage->binary, "%.*s", (int)sizeof stage->binary - 1, path);
    snprintf(stage->launcher, sizeof stage->launcher, "%s",
             stage_variable("MPIRUN", "mpirun --oversubscribe --bind-to none"));
    snprintf(stage->root, sizeof stage->root, "%s", stage_variable("PROJECT_ROOT", "."));
    stage->has_mpi = strcmp(stage_variable("HAVE_MPI", "yes"), "yes") == 0;
    snprintf(stage->directory, sizeof stage->directory, "%.400s/acco-program-XXXXXX",
             stage_variable("TMPDIR", "/tmp"));
    assert_non_null(mkdtemp(stage->directory));
}

// DIRECTORY/name of the stage, in the caller's buffer.
static inline const char *stage_path(const Stage *stage, const char *name, char path[STAGE_PATH_SIZE]) {
    snprintf(path, STAGE_PATH_SIZE, "%s/%.400s", stage->directory, name);
    return path;
}

static inline void stage_write(const Stage *stage, const char *name, const char *text) {
    char path[STAGE_PATH_SIZE];
    file_write(stage_path(stage, name, path), text, strlen(text));
}

// Runs a command of the shell in the stage, which must succeed.
PRINTF_LIKE(2, 3) static inline void shell(const Stage *stage, const char *format, ...) {
    char command[4 * STAGE_PATH_SIZE], rest[2 * STAGE_PATH_SIZE];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(rest, sizeof rest, format, arguments);
    va_end(arguments);
    snprintf(command, sizeof command, "cd '%s' && %s", stage->directory, rest);
    if (system(command) != 0) { fail_msg("%s", command); }
}

// Waits for the program to end until `until` (program_clock). True: it has ended, with
// *exit_code.
static inline bool program_has_ended(Stage *stage, pid_t pid, double until, int *exit_code) {
    int status;
    while (waitpid(pid, &status, WNOHANG) != pid) {
        if (program_clock() >= until) { return false; }
        program_pause(0.002);
    }
    for (int i = 0; i < STAGE_PROGRAMS; i++) {
        if (stage->running[i] == pid) { stage->running[i] = 0; }
    }
    *exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return true;
}

// Ends a program: with SIGTERM first, so that mpirun can end its ranks, then with
// SIGKILL.
static inline void program_end(Stage *stage, pid_t pid) {
    int exit_code;
    kill(-pid, SIGTERM);
    if (program_has_ended(stage, pid, program_clock() + 3, &exit_code)) { return; }
    kill(-pid, SIGKILL);
    program_has_ended(stage, pid, program_clock() + 3, &exit_code);
}

// Ends the programs that still run and frees what programs printed.
static inline void stage_end_all(Stage *stage) {
    for (int i = 0; i < STAGE_PROGRAMS; i++) {
        if (stage->running[i] != 0) { program_end(stage, stage->running[i]); }
    }
    for (int i = 0; i < stage->text_count; i++) { free(stage->texts[i]); }
    free(stage->texts);
    stage->texts = NULL;
    stage->text_count = 0;
}

static inline void stage_close(Stage *stage) {
    char command[STAGE_PATH_SIZE];
    stage_end_all(stage);
    snprintf(command, sizeof command, "rm -rf '%s'", stage->directory);
    assert_int_equal(system(command), 0);
}

static inline void stage_need_mpi(const Stage *stage) {
    if (!stage->has_mpi) { leave_out("MPI (Debian: libopenmpi-dev openmpi-bin)"); }
}

// For tests whose state is the stage itself:

static inline Stage *stage_of(void **state) { return (Stage *)*state; }

static inline Stage *stage_with_ranks(void **state) {
    stage_need_mpi(stage_of(state));
    return stage_of(state);
}

// The teardown of a group of tests whose setup has made the stage its state.
static inline int stage_close_group(void **state) {
    stage_close(stage_of(state));
    return 0;
}

// The teardown of a test.
static inline int stage_end_test(void **state) {
    stage_end_all(stage_of(state));
    stage_allow_instructions(false);
    return 0;
}

// A test that gets `stage` and leaves no process behind.
#define STAGE_TEST(stage, function) \
    cmocka_unit_test_prestate_setup_teardown(function, NULL, stage_end_test, &stage)

// ---- Programs -------------------------------------------------------------------------

// In the child, between fork and exec. The file limit comes last, so that it cannot hit
// what is written before exec.
static inline void program_become(const Stage *stage, const Program *program, const Setting *setting,
                                  const char *command) {
    const char *directory = setting->directory != NULL ? setting->directory : stage->directory;
    // Whoever leads a session gets the terminal that it opens.
    bool seated =
        stage->terminal[0] == '\0' ? setpgid(0, 0) == 0 : setsid() > 0 && open(stage->terminal, O_RDWR) >= 0;
    int in = open("/dev/null", O_RDONLY),
        out = open(program->output_path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    int errors = open(program->error_path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    bool ready = seated && chdir(directory) == 0 && dup2(in, 0) == 0 && dup2(out, 1) == 1 &&
                 dup2(errors, 2) == 2 && mkdir(program->scratch_path, 0777) == 0 &&
                 setenv("TMPDIR", program->scratch_path, 1) == 0 &&
                 setenv("OMPI_MCA_btl_sm_backing_directory", program->scratch_path, 1) == 0;
    if (setting->tasks != NULL) { ready = ready && setenv("SLURM_STEP_NUM_TASKS", setting->tasks, 1) == 0; }
    if (setting->task != NULL) { ready = ready && setenv("SLURM_PROCID", setting->task, 1) == 0; }
    signal(SIGINT, SIG_DFL); // a shell's background job ignores it
    signal(SIGHUP, SIG_DFL);
    if (setting->early_signal != 0) {
        sigset_t early;
        sigemptyset(&early);
        sigaddset(&early, setting->early_signal);
        ready =
            ready && sigprocmask(SIG_BLOCK, &early, NULL) == 0 && kill(getpid(), setting->early_signal) == 0;
    }
    if (setting->stack_bytes > 0) {
        struct rlimit limit;
        ready = ready && getrlimit(RLIMIT_STACK, &limit) == 0;
        limit.rlim_cur = (rlim_t)setting->stack_bytes;
        ready = ready && setrlimit(RLIMIT_STACK, &limit) == 0;
    }
    if (setting->file_bytes > 0) {
        struct rlimit limit = {(rlim_t)setting->file_bytes, (rlim_t)setting->file_bytes};
        ready = ready && setrlimit(RLIMIT_FSIZE, &limit) == 0;
    }
    if (ready) { execl("/bin/sh", "sh", "-c", command, (char *)NULL); }
    _exit(125);
}

// Starts the binary with `ranks` ranks; 0: without a launcher. `arguments` are written as
// in a shell.
static inline Program program_start(Stage *stage, int ranks, const Setting *setting, const char *arguments) {
    char command[STAGE_COMMAND_SIZE + 3 * STAGE_PATH_SIZE], launcher[STAGE_PATH_SIZE + 32] = "", name[64];
    Program program;
    memset(&program, 0, sizeof program);
    int place = 0;
    while (place < STAGE_PROGRAMS && stage->running[place] != 0) { place++; }
    assert_true(place < STAGE_PROGRAMS);
    if (ranks > 0) { snprintf(launcher, sizeof launcher, "%s -np %d ", stage->launcher, ranks); }
    char shell[STAGE_COMMAND_SIZE] = "";
    if (setting->ignore_xfsz) {
        strcpy(shell, "sh -c 'trap \"\" XFSZ; exec \"$0\" \"$@\"' ");
    } else if (setting->second != NULL) {
        snprintf(shell, sizeof shell, "sh -c '[ " RANK_IN_SHELL " = 0 ] || set -- %s; exec \"$0\" \"$@\"' ",
                 setting->second);
    }
    if (setting->second_has != NULL) {
        snprintf(shell, sizeof shell, "sh -c '[ " RANK_IN_SHELL " = 0 ] || export %s; exec \"$0\" \"$@\"' ",
                 setting->second_has);
    }
    snprintf(command, sizeof command, "exec %s%s'%s' %s", launcher, shell, stage->binary, arguments);
    snprintf(name, sizeof name, "output-%d", ++stage->count);
    stage_path(stage, name, program.output_path);
    snprintf(name, sizeof name, "errors-%d", stage->count);
    stage_path(stage, name, program.error_path);
    snprintf(name, sizeof name, "t%d", stage->count); // short: paths of sockets in it have at most 108 bytes
    stage_path(stage, name, program.scratch_path);
    program.pid = fork();
    assert_true(program.pid >= 0);
    if (program.pid == 0) { program_become(stage, &program, setting, command); }
    // The child does the same, and one of the two is first. With a terminal it leads a session.
    if (stage->terminal[0] == '\0') { setpgid(program.pid, program.pid); }
    stage->running[place] = program.pid;
    return program;
}

// The file's text, which the stage owns.
static inline char *stage_read_text(Stage *stage, const char *path) {
    stage->texts = (char **)realloc(stage->texts, (size_t)(stage->text_count + 1) * sizeof *stage->texts);
    return stage->texts[stage->text_count++] = file_read(path);
}

// Waits for the end, for at most `seconds`; then ends the program.
static inline Outcome program_finish_within(Stage *stage, const Program *program, double seconds) {
    Outcome outcome;
    if (!program_has_ended(stage, program->pid, program_clock() + seconds, &outcome.exit_code)) {
        program_end(stage, program->pid);
        outcome.exit_code = -1;
    }
    outcome.output = stage_read_text(stage, program->output_path);
    outcome.errors = stage_read_text(stage, program->error_path);
    return outcome;
}

static inline Outcome program_finish(Stage *stage, const Program *program) {
    return program_finish_within(stage, program, PROGRAM_SECONDS);
}

// Runs the binary from start to end.
static inline Outcome program_run_with(Stage *stage, int ranks, const Setting *setting,
                                       const char *arguments) {
    Program program = program_start(stage, ranks, setting, arguments);
    return program_finish(stage, &program);
}

// From now on program_run starts a script of the project instead of train_gpt.
static inline void program_use_script(Stage *stage, const char *script) {
    char root[PATH_MAX];
    assert_non_null(realpath(stage->root, root));
    snprintf(stage->binary, sizeof stage->binary, "%.900s/%s", root, script);
}

static inline bool has_gnuplot_here(void) { return system("command -v gnuplot > /dev/null 2>&1") == 0; }

static inline Outcome program_run(Stage *stage, int ranks, const char *arguments) {
    Setting setting;
    memset(&setting, 0, sizeof setting);
    return program_run_with(stage, ranks, &setting, arguments);
}

// Fails, and shows what the program printed, unless it ended with `exit_code`.
static inline void outcome_check(const Outcome *outcome, int exit_code, const char *what) {
    if (outcome->exit_code == exit_code) { return; }
    fail_msg("%s: exit code %d%s, expected %d\nerrors: %.1500s\noutput: %.1500s", what, outcome->exit_code,
             outcome->exit_code == -1 ? " (out of time)" : "", exit_code, outcome->errors, outcome->output);
}

static inline int text_count(const char *text, const char *part) {
    int count = 0;
    for (const char *found = text; (found = strstr(found, part)) != NULL; found += strlen(part)) { count++; }
    return count;
}

static inline void text_check(const char *text, const char *part, const char *what) {
    if (strstr(text, part) == NULL) { fail_msg("%s: \"%s\" is not in: %.1500s", what, part, text); }
}

// The number behind `name`, which must be in the text.
static inline double text_number(const char *text, const char *name, const char *what) {
    text_check(text, name, what);
    return strtod(strstr(text, name) + strlen(name), NULL);
}

// Lines that are not empty.
static inline int text_lines(const char *text) {
    int count = 0;
    for (const char *line = text; *line != '\0'; line += strcspn(line, "\n"), line += *line == '\n') {
        count += *line != '\n';
    }
    return count;
}

// ---- Runs and their logs --------------------------------------------------------------

// Waits until a file contains a text.
static inline void wait_for_text(const char *path, const char *part) {
    for (double until = program_clock() + 20;; program_pause(0.02)) {
        char *text = file_read(path);
        bool found = text != NULL && strstr(text, part) != NULL;
        free(text);
        if (found) { return; }
        if (program_clock() > until) { fail_msg("%s does not say \"%s\"", path, part); }
    }
}

// The events of DIRECTORY/log.jsonl as an array. Fails unless every line is whole and an
// object with a member "event".
static inline json_t *log_read(const Stage *stage, const char *directory) {
    char path[STAGE_PATH_SIZE + 16];
    stage_path(stage, directory, path);
    strcat(path, "/log.jsonl");
    char *text = file_read(path);
    if (text == NULL) { fail_msg("there is no %s", path); }
    json_t *events = json_array();
    for (char *line = text; *line != '\0';) {
        char *end = strchr(line, '\n');
        if (end == NULL) { fail_msg("%s: the last line is not whole: %.300s", path, line); }
        json_error_t problem;
        json_t *event = json_loadb(line, (size_t)(end - line), JSON_REJECT_DUPLICATES, &problem);
        if (!json_is_string(json_object_get(event, "event"))) {
            fail_msg("%s: not an event (%s): %.300s", path, problem.text, line);
        }
        json_array_append_new(events, event);
        line = end + 1;
    }
    free(text);
    return events;
}

// The n-th event of a kind (borrowed); n < 0 counts from the end. NULL: there are fewer.
static inline json_t *log_event_of(json_t *events, const char *kind, int n) {
    size_t count = json_array_size(events);
    for (size_t i = 0; i < count; i++) {
        json_t *event = json_array_get(events, n >= 0 ? i : count - 1 - i);
        if (strcmp(json_string_value(json_object_get(event, "event")), kind) == 0 &&
            (n >= 0 ? n-- : ++n) == 0) {
            return event;
        }
    }
    return NULL;
}

// A number of an event. Fails where it is absent, null or not a number.
static inline double log_number(json_t *event, const char *field) {
    json_t *value = json_object_get(event, field);
    if (!json_is_number(value)) { fail_msg("%s is not a number in the log", field); }
    return json_number_value(value);
}

// A training run that is under way, in its own directory within the stage.
typedef struct Training {
    Program program;
    char out[64], what[512];
} Training;

static inline Training training_start(Stage *stage, int ranks, const char *options) {
    char arguments[STAGE_COMMAND_SIZE];
    Setting setting;
    Training training;
    memset(&setting, 0, sizeof setting);
    snprintf(training.out, sizeof training.out, "run-%d", stage->count + 1);
    snprintf(training.what, sizeof training.what, "%d ranks, %.450s", ranks, options);
    snprintf(arguments, sizeof arguments, "--config base.json --out %s %s", training.out, options);
    training.program = program_start(stage, ranks, &setting, arguments);
    return training;
}

// Waits for a run that must end well; returns its log. What it printed stays in
// output_path until the stage closes.
static inline json_t *training_finish(Stage *stage, const Training *training) {
    Outcome outcome = program_finish(stage, &training->program);
    outcome_check(&outcome, 0, training->what);
    text_check(outcome.output, "fingerprint", training->what);
    json_t *events = log_read(stage, training->out);
    if (log_event_of(events, "end", -1) == NULL) { fail_msg("%s: the log has no end", training->what); }
    return events;
}

static inline json_t *train(Stage *stage, int ranks, const char *options) {
    Training training = training_start(stage, ranks, options);
    return training_finish(stage, &training);
}

typedef struct Fingerprint {
    char text[32];
} Fingerprint;

static inline Fingerprint log_fingerprint(json_t *events) {
    Fingerprint print;
    const char *text =
        json_string_value(json_object_get(log_event_of(events, "end", -1), "parameters_fingerprint"));
    assert_non_null(text);
    assert_int_equal(strlen(text), 16);
    snprintf(print.text, sizeof print.text, "%s", text);
    return print;
}

static inline Fingerprint training_fingerprint(Stage *stage, const Training *training) {
    json_t *events = training_finish(stage, training);
    Fingerprint print = log_fingerprint(events);
    json_decref(events);
    return print;
}

// ---- The library of matrix products ---------------------------------------------------

// "AVX" or "AMX": what the library of products multiplies with from now on, until the test ends. A
// test that needs one of them is left out elsewhere.
static inline const char *library_instructions(Stage *stage) {
    stage_allow_instructions(true);
    Outcome version = program_run(stage, 0, "--version");
    if (strstr(version.output, " for AVX") != NULL) { return "AVX"; }
    if (strstr(version.output, " for AMX") == NULL) { leave_out("oneDNN on a processor with AVX"); }
    return "AMX";
}
