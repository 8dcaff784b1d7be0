// test_keep_going.c: scripts/keep-going starts a job again, and only as long as that helps.
//
// The first test trains under the real mpirun. In the others stand-ins (shell scripts that
// the test writes) take the place of the launcher, of the program and of ssh.
#include "test/program.h"

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

// ---------------------------------------------------------------------------------------
// Real training

static const char *const options = "--optimizer zero1 --seq-len 16 --micro-batch 1 --threads 1 --tokens 6400 "
                                   "--val-batches none --sample-tokens none --save-every 10 --report-every 5 "
                                   "--slow-rank 0 --slow-ms 5";

// Kills rank 1 as soon as there is a checkpoint of commit 20.
static void kill_a_rank(const char *out) {
    char folder[STAGE_PATH_SIZE], name[128];
    snprintf(name, sizeof name, "%s/checkpoints/step-20", out);
    for (double until = program_clock() + 60; access(stage_path(&stage, name, folder), F_OK) != 0;) {
        if (program_clock() > until) { fail_msg("there is no %s", name); }
        program_pause(0.01);
    }
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
    snprintf(arguments, sizeof arguments, "hosts -- --out a %s", options);
    Outcome whole = keep_going(arguments, 0);
    assert_int_equal(count_of(whole.output, "the job died"), 0);
    snprintf(arguments, sizeof arguments, "hosts -- --out b %s", options);
    Program program = program_start(&stage, 0, &setting, arguments);
    kill_a_rank("b");
    Outcome broken = program_finish(&stage, &program);
    outcome_check(&broken, 0, "a job whose rank was killed");
    assert_int_equal(count_of(broken.output, "the job died at commit "), 1);
    assert_int_equal(count_of(broken.output, "resumed    from "), 1);
    json_t *logs[2] = {log_read(&stage, "a"), log_read(&stage, "b")};
    assert_string_equal(log_fingerprint(logs[0]).text, log_fingerprint(logs[1]).text);
    json_decref(logs[0]);
    json_decref(logs[1]);
}

// ---------------------------------------------------------------------------------------
// Stand-ins

// The launcher runs one process, whatever it was told, and says how many it was to be.
static void write_launcher(void) {
    write_script("launch", "#!/bin/sh\n"
                           "shift 2; echo \"asked for $2 ranks\"; shift 2\n"
                           "exec \"$@\"\n");
    stage_write(&stage, "two", "one slots=1\nother slots=3\n");
}

// Dies at the commit that `count` says, which grows where a file "moves" exists.
static void write_dying_program(void) {
    write_script("die", "#!/bin/sh\n"
                        "count=$(cat count 2> /dev/null || echo 5)\n"
                        "if [ -e moves ]; then count=$((count + 1)); echo $count > count; fi\n"
                        "if [ $count -gt 9 ]; then exit 0; fi\n"
                        "echo \"train_gpt: [rank 0 of 1 on here, commit $count] no\" >&2\n"
                        "exit 3\n");
}

static void three_deaths_at_one_commit_are_the_end(void **state) {
    (void)state;
    write_launcher();
    write_dying_program();
    set_commands("./launch", "./die", "true");
    Outcome outcome = keep_going("two -- --out c", 3);
    assert_int_equal(count_of(outcome.output, "the job died at commit 5 with code 3"), 3);
    text_check(outcome.output, "three times at the same commit", "three deaths");
    stage_write(&stage, "moves", "");
    outcome = keep_going("two -- --out c", 0);
    assert_int_equal(count_of(outcome.output, "the job died"), 4);
}

// The second host answers after five seconds, and a checkpoint is written after that.
static void a_host_that_comes_back_takes_part(void **state) {
    (void)state;
    write_launcher();
    write_script("answer", "#!/bin/sh\n[ \"$1\" = one ] || [ -e second ]\n");
    write_script("train", "#!/bin/sh\n"
                          "trap 'exit 75' USR1\n"
                          "if [ -e second ]; then exit 0; fi\n"
                          "mkdir -p d/checkpoints/step-1; : > second\n"
                          "for i in 1 2 3 4 5 6 7; do sleep 1; done\n"
                          "mkdir -p d/checkpoints/step-2\n"
                          "for i in 1 2 3 4 5 6 7; do sleep 1; done\n");
    set_commands("./launch", "./train", "./answer");
    Outcome outcome = keep_going("two -- --out d", 0);
    text_check(outcome.output, "1 ranks on 1 of 2 hosts: one", "a host is away");
    text_check(outcome.output, "a host is back", "a host is back");
    text_check(outcome.output, "asked for 1 ranks", "a host is away");
    text_check(outcome.output, "asked for 4 ranks", "a host is back");
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
    text_check(keep_going("two --out e", 2).errors, "keep-going HOSTFILE", "no --");
}

int main(int argc, char **argv) {
    char program[STAGE_PATH_SIZE], script[2 * STAGE_PATH_SIZE];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_killed_rank_changes_no_bit),
        cmocka_unit_test(three_deaths_at_one_commit_are_the_end),
        cmocka_unit_test(a_host_that_comes_back_takes_part),
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
