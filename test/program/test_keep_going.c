// test_keep_going.c: scripts/keep-going starts a job again, and only as long as that helps.
//
// The first test trains under the real mpirun. In the others stand-ins (shell scripts that
// the test writes) take the place of the launcher, of the program and of ssh.
#include "test/program/program.h"

static Stage stage;

static void write_script(const char *name, const char *text) {
    char path[STAGE_PATH_SIZE];
    stage_write(&stage, name, text);
    assert_int_equal(chmod(stage_path(&stage, name, path), 0777), 0);
}

// A command of the environment; one of the stage's scripts, where it begins with "./".
static void set_command(const char *variable, const char *command) {
    char path[STAGE_PATH_SIZE];
    setenv(variable, command[0] == '.' ? stage_path(&stage, command + 2, path) : command, 1);
}

// What starts ranks, what they are, and what says which hosts answer.
static void set_commands(const char *launcher, const char *program, const char *remote) {
    set_command("MPIRUN", launcher);
    set_command("TRAIN_GPT", program);
    set_command("REMOTE", remote);
}

static Outcome keep_going(const char *arguments, int exit_code) {
    Outcome outcome = program_run(&stage, 0, arguments);
    outcome_check(&outcome, exit_code, arguments);
    return outcome;
}

static int count_of(const char *text, const char *part) {
    int count = 0;
    for (const char *at = text; (at = strstr(at, part)) != NULL; at++) { count++; }
    return count;
}

// Waits until a file is there.
static void stage_wait_for(const char *name) {
    char path[STAGE_PATH_SIZE];
    for (double until = program_clock() + 60; access(stage_path(&stage, name, path), F_OK) != 0;) {
        if (program_clock() > until) { fail_msg("there is no %s", name); }
        program_pause(0.01);
    }
}

// ---- Real training --------------------------------------------------------------------

static const char *const options = "--optimizer zero1 --seq-len 16 --micro-batch 1 --threads 1 --tokens 6400 "
                                   "--val-batches none --sample-tokens none --save-every 10 --report-every 5 "
                                   "--slow-rank 0 --slow-ms 5";

// Kills rank 1 as soon as there is a checkpoint of commit 20.
static void kill_a_rank(const char *out) {
    char folder[STAGE_PATH_SIZE], name[128];
    snprintf(name, sizeof name, "%s/checkpoints/commit-20", out);
    stage_wait_for(name);
    snprintf(name, sizeof name, "%s/log.jsonl", out);
    char *text = file_read(stage_path(&stage, name, folder));
    text[strcspn(text, "\n")] = '\0'; // the start event: later lines may not be whole yet
    json_t *start = json_loads(text, 0, NULL);
    pid_t victim = (pid_t)log_number(json_array_get(json_object_get(start, "ranks"), 1), "pid");
    json_decref(start);
    free(text);
    assert_int_equal(kill(victim, SIGKILL), 0);
}

static void a_killed_rank_changes_no_bit(void **state) {
    (void)state;
    char arguments[600];
    Setting setting;
    memset(&setting, 0, sizeof setting);
    stage_need_mpi(&stage);
    stage_write(&stage, "hosts", "# one machine\nlocalhost slots=2\n");
    set_commands(stage.launcher, stage_variable("PROGRAM", ""), "true");
    snprintf(arguments, sizeof arguments, "hosts -- --out b %s", options);
    Program program = program_start(&stage, 0, &setting, arguments);
    snprintf(arguments, sizeof arguments, "hosts -- --out a %s", options);
    Program undisturbed = program_start(&stage, 0, &setting, arguments);
    kill_a_rank("b");
    Outcome broken = program_finish(&stage, &program), whole = program_finish(&stage, &undisturbed);
    outcome_check(&whole, 0, "a job that nobody disturbs");
    assert_int_equal(count_of(whole.output, "the job died"), 0);
    outcome_check(&broken, 0, "a job whose rank was killed");
    assert_int_equal(count_of(broken.output, "the job died at commit "), 1);
    assert_int_equal(count_of(broken.output, "resumed    from "), 1);
    json_t *logs[2] = {log_read(&stage, "a"), log_read(&stage, "b")};
    assert_string_equal(log_fingerprint(logs[0]).text, log_fingerprint(logs[1]).text);
    json_decref(logs[0]);
    json_decref(logs[1]);
}

// ---- Stand-ins ------------------------------------------------------------------------

// The launcher runs one process, whatever it was told, and says how many it was to be. The file of
// hosts is as some editors leave it: its lines end as on Windows, and the last one does not end.
static void write_launcher(void) {
    write_script("launch", "#!/bin/sh\n"
                           "shift 2; echo \"asked for $2 ranks\"; shift 2\n"
                           "exec \"$@\"\n");
    stage_write(&stage, "two", "one slots=1 max_slots=9\r\nother slots=3");
}

// Dies after the report of commit 5. Where a file "moves" exists, a rank says that it came
// one commit farther than the time before.
static void write_dying_program(void) {
    write_script("die", "#!/bin/sh\n"
                        "mkdir -p c; echo 5 >> c/progress.tsv\n"
                        "[ -e moves ] || exit 3\n"
                        "count=$(cat moves)\n"
                        "echo $((count + 1)) > moves\n"
                        "echo \"train_gpt: [rank 0 of 1 on here, commit $count] no\" >&2\n"
                        "[ $count -lt 9 ] && exit 3\n"
                        "exit 0\n");
}

static void three_deaths_at_one_commit_are_the_end(void **state) {
    (void)state;
    write_launcher();
    write_dying_program();
    set_commands("./launch", "./die", "true");
    Outcome outcome = keep_going("two -- --out c", 3);
    assert_int_equal(count_of(outcome.output, "the job died at commit 5 with code 3"), 3);
    text_check(outcome.output, "three times at the same commit", "three deaths");
    stage_write(&stage, "moves", "6\n");
    outcome = keep_going("two -- --out c", 0);
    text_check(outcome.output, "the job died at commit 8 with code 3", "a rank says where it was");
    assert_int_equal(count_of(outcome.output, "the job died"), 3);
}

// A job that dies while it starts has not died where the one before it did, which the tables
// end with.
static void deaths_at_the_start_are_not_those_before(void **state) {
    (void)state;
    write_launcher();
    write_script("die", "#!/bin/sh\n"
                        "mkdir -p f\n"
                        "if [ -e f/run.tsv ]; then exit 1; fi\n"
                        "printf 'checkpoint.commit\\t7\\n' > f/run.tsv\n"
                        "exit 3\n");
    set_commands("./launch", "./die", "true");
    Outcome outcome = keep_going("two -- --out f", 3);
    assert_int_equal(
        count_of(outcome.output, "the job died at commit 7 with code 3; there is no checkpoint yet"), 1);
    assert_int_equal(count_of(outcome.output, "the job died at the start with code 1"), 3);
}

// The second host answers once the job runs, and the next checkpoint is written when it was
// asked.
static void a_host_that_comes_back_takes_part(void **state) {
    (void)state;
    write_launcher();
    write_script("answer", "#!/bin/sh\n"
                           "[ \"$1\" = one ] || { [ -e second ] && : > asked; }\n");
    write_script("train", "#!/bin/sh\n"
                          "trap 'exit 75' USR1\n"
                          "if [ -e second ]; then exit 0; fi\n"
                          "mkdir -p d/checkpoints/commit-1; : > second\n"
                          "until [ -e asked ]; do sleep 0.1; done\n"
                          "mkdir -p d/checkpoints/commit-2\n"
                          "for i in $(seq 300); do sleep 0.1; done\n");
    set_commands("./launch", "./train", "./answer");
    Outcome outcome = keep_going("two -- --out d", 0);
    text_check(outcome.output, "1 rank on 1 of 2 hosts: one", "a host is away");
    text_check(outcome.output, "a host is back", "a host is back");
    text_check(outcome.output, "asked for 1 ranks", "a host is away");
    text_check(outcome.output, "asked for 4 ranks", "a host is back");
}

// Whoever died may hold the lock of the directory for a while; another run does so until it ends.
static void a_lock_that_is_left_is_waited_for(void **state) {
    (void)state;
    write_launcher();
    write_script("train", "#!/bin/sh\n"
                          "mkdir -p j; echo x >> j/starts\n"
                          "case $(wc -l < j/starts) in 1 | 3) ;; 2) exit 3 ;; *) exit 0 ;; esac\n"
                          "echo 'train_gpt: --out j is in use by another run: process 1 on one. Wait' >&2\n"
                          "exit 2\n");
    set_commands("./launch", "./train", "true");
    Outcome outcome = keep_going("two -- --out j", 2);
    assert_int_equal(count_of(outcome.output, "asking again in 5 s"), 0);
    outcome = keep_going("two -- --out j", 0);
    assert_int_equal(count_of(outcome.output, "the job died at the start with code 3"), 1);
    assert_int_equal(count_of(outcome.output, "asking again in 5 s"), 1);
}

// Runs a job that ends with `code` when it is told to stop, and tells keep-going to stop.
static Outcome stopped(int code) {
    char script[256];
    Setting setting;
    memset(&setting, 0, sizeof setting);
    snprintf(script, sizeof script,
             "#!/bin/sh\ntrap 'exit %d' USR1\n: > runs\nfor i in $(seq 300); do sleep 0.1; done\n", code);
    write_script("train", script);
    set_commands("./launch", "./train", "true");
    char path[STAGE_PATH_SIZE];
    unlink(stage_path(&stage, "runs", path));
    Program program = program_start(&stage, 0, &setting, "two -- --out g");
    stage_wait_for("runs");
    assert_int_equal(kill(program.pid, SIGTERM), 0);
    return program_finish(&stage, &program);
}

static void a_stop_is_passed_on(void **state) {
    (void)state;
    write_launcher();
    Outcome saved = stopped(75);
    outcome_check(&saved, 75, "a stop");
    Outcome failed = stopped(3);
    outcome_check(&failed, 3, "a stop that could not save");
    text_check(failed.output, "asked to stop and ended with code 3", "a stop that could not save");
    Outcome unsaved = stopped(4);
    outcome_check(&unsaved, 4, "a stop of a job that saves nothing");
}

// A wish to stop that comes when the hosts are known and the job has not begun yet: when
// keep-going asks for the newest checkpoint, by a stand-in for find.
static void a_stop_before_the_job_begins_is_heard(void **state) {
    (void)state;
    char path[4 * STAGE_PATH_SIZE];
    const char *before = getenv("PATH");
    write_launcher();
    write_script("find",
                 "#!/bin/sh\n"
                 "case $1 in */checkpoints)\n"
                 "    if [ ! -e told ]; then : > told; kill -TERM $(cut -d ' ' -f 5 /proc/$$/stat); fi ;;\n"
                 "esac\n"
                 "PATH=${PATH#*:} exec find \"$@\"\n");
    write_script("train", "#!/bin/sh\ntrap 'exit 75' USR1\nfor i in $(seq 100); do sleep 0.1; done\n");
    set_commands("./launch", "./train", "true");
    snprintf(path, sizeof path, "%s:%s", stage.directory, before);
    char *kept = strdup(before);
    setenv("PATH", path, 1);
    keep_going("two -- --out i", 75);
    setenv("PATH", kept, 1);
    free(kept);
}

// Without checkpoints it would begin at zero for ever.
static void what_saves_nothing_is_not_begun_again(void **state) {
    (void)state;
    write_launcher();
    write_script("die",
                 "#!/bin/sh\nmkdir -p h; printf 'start.options.save-every\\tnever\\n' > h/run.tsv; exit 3\n");
    set_commands("./launch", "./die", "true");
    Outcome outcome = keep_going("two -- --out h", 4);
    assert_int_equal(count_of(outcome.output, "asked for 4 ranks"), 1);
    text_check(outcome.output, "--save-every never has left nothing", "a run that saves nothing");
}

static void mistakes_are_not_repeated(void **state) {
    (void)state;
    write_launcher();
    write_script("refuse", "#!/bin/sh\necho no >&2\nexit 2\n");
    set_commands("./launch", "./refuse", "true");
    Outcome outcome = keep_going("two -- --out e", 2);
    assert_int_equal(count_of(outcome.output, "asked for 4 ranks"), 1);
    text_check(keep_going("two -- --tokens 5", 2).errors, "--out DIRECTORY is missing", "no --out");
    text_check(keep_going("nowhere -- --out e", 2).errors, "nowhere cannot be read", "no host file");
    stage_write(&stage, "nobody", "# pc1 slots=2\n");
    text_check(keep_going("nobody -- --out e", 2).errors, "nobody has no host", "an empty host file");
    text_check(keep_going("two --out e", 2).errors, "keep-going HOSTFILE", "no --");
}

int main(int argc, char **argv) {
    char program[STAGE_PATH_SIZE], script[2 * STAGE_PATH_SIZE];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_killed_rank_changes_no_bit),
        cmocka_unit_test(three_deaths_at_one_commit_are_the_end),
        cmocka_unit_test(a_host_that_comes_back_takes_part),
        cmocka_unit_test(deaths_at_the_start_are_not_those_before),
        cmocka_unit_test(a_lock_that_is_left_is_waited_for),
        cmocka_unit_test(a_stop_is_passed_on),
        cmocka_unit_test(a_stop_before_the_job_begins_is_heard),
        cmocka_unit_test(what_saves_nothing_is_not_begun_again),
        cmocka_unit_test(mistakes_are_not_repeated),
    };
    if (argc > 1) { cmocka_set_test_filter(argv[1]); }
    stage_open(&stage);
    snprintf(program, sizeof program, "%s", stage.binary);
    setenv("PROGRAM", program, 1);
    snprintf(script, sizeof script, "%s/scripts/keep-going", stage.root);
    assert_non_null(realpath(script, stage.binary));
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    stage_close(&stage);
    return failed;
}
