// test_build.c: what a user says about compilers, libraries and GPUs reaches every part of
// the build, and a change of it rebuilds; what is missing is named. And scripts/train.slurm
// refuses a program that cannot use the GPUs of its job.
//
// The Makefile and the scripts are copied to a scratch directory. Compilers are a small
// shell script under several names, which notes how it was called and writes an empty
// program: nothing is really compiled, so no library need be here, and a build takes
// a moment.
#define _GNU_SOURCE
#include "test/program/program.h"

static const char compiler[] =
    "#!/bin/sh\n"
    "name=$(basename \"$0\")\n"
    "echo \"$name $*\" >> \"${CALLS:-calls}\"\n"
    "case \" $* \" in\n"
    "*/sums.c*) [ ! -e adds-wrongly ] || status=3 ;;\n"
    "*\" -lz \"*) [ ! -e no-zlib ] || { echo 'ld: error: cannot find -lz' >&2; exit 1; } ;;\n"
    "*\" --version \"*) echo \"$name 1.0, release 12.8, V12.8.1\"; exit 0 ;;\n"
    "*\" --list-gpu-arch \"*)\n"
    "    for known in 75 80 86 89 90 100 120; do [ $known -gt ${NEWEST:-999} ] || echo compute_$known; done\n"
    "    exit 0 ;;\n"
    "*\" --showme:compile \"*) echo -Ifrom-mpicc; exit 0 ;;\n"
    "*\" --showme:link \"*) echo -lfrom-mpicc; exit 0 ;;\n"
    "esac\n"
    "while [ $# -gt 0 ]; do [ \"$1\" != -o ] || result=$2; shift; done\n"
    "[ -z \"${result:-}\" ] || { printf '#!/bin/sh\\nexit %s\\n' ${status:-0} > \"$result\" && chmod +x "
    "\"$result\"; }\n";

// Runs `command` in the scratch directory; everything that it prints is in `output`.
static Outcome run(Stage *stage, const char *command) {
    Setting setting;
    memset(&setting, 0, sizeof setting);
    char arguments[STAGE_COMMAND_SIZE];
    snprintf(arguments, sizeof arguments, "-c '%s' 2>&1", command);
    return program_run_with(stage, 0, &setting, arguments);
}

#define FAKES "CC=./cc CXX=./c++ "
#define ON_CPUS FAKES "CUDA=0 "
#define ON_GPUS FAKES "CUDA=1 NVCC=./nvcc "

// What compilers were called with by this build.
static const char *build(Stage *stage, const char *wishes) {
    char command[STAGE_COMMAND_SIZE], path[STAGE_PATH_SIZE];
    shell(stage, "rm -f calls && touch calls");
    snprintf(command, sizeof command, "make %s", wishes);
    Outcome outcome = run(stage, command);
    outcome_check(&outcome, 0, wishes);
    return stage_read_text(stage, stage_path(stage, "calls", path));
}

static void expect_failure(Stage *stage, const char *wishes, const char *part, const char *not_part) {
    char command[STAGE_COMMAND_SIZE];
    snprintf(command, sizeof command, "make %s", wishes);
    Outcome outcome = run(stage, command);
    outcome_check(&outcome, 2, wishes);
    text_check(outcome.output, part, wishes);
    if (strstr(outcome.output, not_part) != NULL) {
        fail_msg("%s: \"%s\" in %s", wishes, not_part, outcome.output);
    }
}

// The call that compiles the program, or the one that links it, into `line`.
static const char *call_with(const char *calls, const char *part, char line[4096]) {
    const char *found = strstr(calls, part);
    if (found == NULL) { fail_msg("no compiler was called with %s: %.2000s", part, calls); }
    while (found > calls && found[-1] != '\n') { found--; }
    snprintf(line, 4096, "%.*s", (int)strcspn(found, "\n"), found);
    return line;
}

static const char compiles[] = "-c train_gpt.cu -o", links[] = ".o -o train_gpt ",
                  links_cuda[] = ".o -o train_gpt_cuda ";

static void a_changed_wish_rebuilds(void **state) {
    Stage *stage = stage_of(state);
    static const char *const wishes[] = {ON_CPUS, "CC=./other CXX=./c++ CUDA=0 ", ON_CPUS "LDFLAGS=-Lmine ",
                                         ON_GPUS, ON_GPUS "NCCL_HOME=nccl ",      ON_CPUS};
    char command[1024], line[4096];
    for (size_t i = 0; i < sizeof wishes / sizeof wishes[0]; i++) {
        snprintf(command, sizeof command, "make --question %s", wishes[i]);
        Outcome before = run(stage, command);
        outcome_check(&before, 1, wishes[i]);
        call_with(build(stage, wishes[i]), i == 3 || i == 4 ? links_cuda : links, line);
        Outcome after = run(stage, command);
        outcome_check(&after, 0, wishes[i]);
    }
}

static void wishes_reach_the_program_for_cpus(void **state) {
    Stage *stage = stage_of(state);
    char line[4096];
    const char *calls = build(
        stage, "CC=./other CXX=./c++ CUDA=0 CPPFLAGS=\"-Imine -DMINE\" LDFLAGS=-Wl,-rpath,mine MPI_HOME=mpi "
               "ARCH_FLAGS=-march=some ");
    call_with(calls, compiles, line);
    assert_true(strncmp(line, "other ", 6) == 0);
    text_check(line, "-Imine -DMINE", "compiling");
    text_check(line, "-march=some", "compiling");
    text_check(line, "-DACCO_HAVE_MPI -Ifrom-mpicc", "compiling");
    call_with(calls, links, line);
    text_check(line, "-Wl,-rpath,mine", "linking");
    text_check(line, "-lfrom-mpicc -Lmpi/lib -Wl,-rpath,mpi/lib", "linking");
    shell(stage, "grep -qx 'MPIRUN := mpi/bin/mpirun' build/config.mk");
    build(stage, ON_CPUS "MPICC=mpi/bin/mpicc.other ");
    shell(stage, "grep -qx 'MPIRUN := mpi/bin/mpirun.other' build/config.mk");
}

static void a_compiler_that_adds_wrongly_gets_no_avx512(void **state) {
    Stage *stage = stage_of(state);
    char line[4096];
    call_with(build(stage, ON_CPUS), compiles, line);
    assert_null(strstr(line, "-mno-avx512f"));
    shell(stage, "rm -rf build && touch adds-wrongly");
    call_with(build(stage, ON_CPUS), compiles, line);
    text_check(line, "-march=native -mno-avx512f ", "compiling");
    shell(stage, "grep -q \"without AVX-512, in which this compiler adds up wrongly\" build/config.mk.txt");
    call_with(build(stage, ON_GPUS), compiles, line);
    text_check(line, "-march=native -mno-avx512f ", "compiling");
}

static void wishes_reach_the_program_for_gpus(void **state) {
    Stage *stage = stage_of(state);
    char line[4096];
    const char *calls =
        build(stage, FAKES "CUDA=1 CUDA_HOME=toolkit NCCL_HOME=nccl CPPFLAGS=-Imine LDFLAGS=-Wl,-rpath,mine "
                           "ARCH_FLAGS=-march=some");
    call_with(calls, compiles, line);
    text_check(line, "nvcc ", "compiling");
    text_check(line, "-ccbin ./c++", "compiling");
    text_check(line, "-Imine -Inccl/include -Itoolkit/include", "compiling");
    text_check(line, "-march=some", "compiling");
    text_check(line, "-DACCO_HAVE_NCCL", "compiling");
    static const char *const architectures[] = {"sm_80", "sm_86",  "sm_89",
                                                "sm_90", "sm_120", "code=compute_80"};
    for (int i = 0; i < 6; i++) { text_check(line, architectures[i], "compiling"); }
    call_with(calls, links_cuda, line);
    assert_true(strncmp(line, "c++ ", 4) == 0);
    text_check(line, "-Wl,-rpath,mine -lnccl", "linking");
    text_check(line, "-Lnccl/lib -Wl,-rpath,nccl/lib -Ltoolkit/lib64 -Wl,-rpath,toolkit/lib64", "linking");
    shell(stage, "test -x train_gpt");
    setenv("NEWEST", "90", 1); // an older nvcc
    call_with(build(stage, ON_GPUS "LDFLAGS=-Lx"), compiles, line);
    unsetenv("NEWEST");
    text_check(line, "sm_90", "compiling");
    text_check(line, "code=compute_80", "compiling");
    assert_null(strstr(line, "sm_120"));
    call_with(build(stage, ON_GPUS "ARCH=\"89 90\""), compiles, line);
    text_check(line, "code=compute_89", "compiling");
    assert_null(strstr(line, "sm_86"));
}

static void what_is_missing_is_named(void **state) {
    Stage *stage = stage_of(state);
    expect_failure(stage, "CC=nonexistent CXX=./c++ CUDA=0", "no C compiler that works as 'nonexistent'",
                   "jansson");
    expect_failure(stage, "CC=nonexistent CXX=./c++ CUDA=0 ARCH_FLAGS=-march=some",
                   "no C compiler that works as 'nonexistent'", "does not know");
    expect_failure(stage, FAKES "CUDA=1 NVCC=/nope", "there is no NVCC=/nope", "-c train_gpt.cu");
    expect_failure(stage, FAKES "train_gpt_cuda NVCC=/nope", "there is no NVCC=/nope", "127");
    expect_failure(stage, FAKES "CUDA=1 CUDA_HOME=/nope", "CUDA_HOME=/nope has no bin/nvcc", "127");
    expect_failure(stage, FAKES "CUDA=2", "CUDA=2 is neither 0", "built train_gpt");
    shell(stage, "rm -rf build && touch no-zlib");
    expect_failure(stage, ON_CPUS, "zlib           missing", "jansson        missing");
    shell(stage, "rm no-zlib");
}

// make probes where build/config.mk is missing; the one of before knows no nvcc.
static void a_compiler_for_gpus_that_was_fetched_is_looked_for(void **state) {
    Stage *stage = stage_of(state);
    build(stage, ON_CPUS);
    shell(stage,
          "mkdir -p build/cuda/bin && cp nvcc build/cuda/bin && test -e build/config.mk && "
          "scripts/cuda > said && grep -q already said && test ! -e build/config.mk && rm -r build/cuda");
}

static void make_installs_and_explains(void **state) {
    Stage *stage = stage_of(state);
    build(stage, ON_CPUS "install PREFIX=there");
    shell(stage, "test -x there/bin/train_gpt && grep -q '4: it was asked to stop' "
                 "there/share/man/man1/train_gpt.1 && "
                 "there/bin/acco-launch echo launched > launched && grep -q launched launched && "
                 "{ there/bin/acco-keep-going 2> usage; grep -q HOSTFILE usage; }");
    shell(stage, "printf '#!/bin/sh\\necho \"  train_gpt asked for $*\"\\n' > train_gpt");
    build(stage, ON_CPUS "install PREFIX=there"); // the page has what this program says, not one in PATH
    shell(stage, "grep -qx 'train_gpt asked for help' there/share/man/man1/train_gpt.1");
    shell(stage, "printf '#!/bin/sh\\nexit 1\\n' > train_gpt && ! scripts/install train_gpt nowhere && "
                 "test ! -e nowhere && rm train_gpt");
    build(stage, ON_CPUS "install PREFIX=\"over there\"");
    shell(stage, "test -x 'over there/bin/train_gpt'");
    run(stage, "make uninstall PREFIX=\"over there\"");
    shell(stage, "test -z \"$(find 'over there' -type f -o -type l)\"");
    Outcome outcome = run(stage, "make help");
    outcome_check(&outcome, 0, "make help");
    text_check(outcome.output, "make CUDA=1", "make help");
    text_check(outcome.output, "NCCL_HOME", "make help");
    assert_null(strstr(outcome.output, "#"));
}

// And what a user has trained there is left alone.
static void a_tree_without_git_is_checked(void **state) {
    Stage *stage = stage_of(state);
    shell(stage,
          "mkdir -p tree/dev tree/run && cp -r '%s'/*.h '%s/models' '%s/options' tree && "
          "cp '%s/dev/check-rules' '%s/dev/arrows.txt' tree/dev && "
          "echo '{\"optimizer\": \"acco\"}' > tree/run/config.json && tree/dev/check-rules && "
          "echo 'int x = gpt2_x();' >> tree/scheduler.h && "
          "! tree/dev/check-rules > said && grep -q 'scheduler.h.*gpt2_x' said",
          stage->root, stage->root, stage->root, stage->root, stage->root);
}

// ---- scripts/train.slurm --------------------------------------------------------------

// The job's script under a srun that prints its command and ends with `code`.
static Outcome submit(Stage *stage, const char *facts, const char *gpus, int code, const char *arguments) {
    char command[2 * STAGE_PATH_SIZE];
    shell(stage, "printf '#!/bin/sh\\necho \"%s\"\\n' > train_gpt && chmod +x train_gpt", facts);
    shell(stage,
          "printf '#!/bin/sh\\necho srun \"$@\"\\n[ ! -e ranks ] || . ./ranks\\nexit %d\\n' > bin/srun && "
          "chmod +x bin/srun",
          code);
    snprintf(command, sizeof command,
             "PATH=$PWD/bin:$PATH SLURM_JOB_ID=7 SLURM_CPUS_PER_TASK=1 SLURM_GPUS_ON_NODE=%s "
             "scripts/train.slurm %s",
             gpus, arguments);
    return run(stage, command);
}

static void a_job_uses_its_gpus_or_ends(void **state) {
    Stage *stage = stage_of(state);
    static const char cpu[] = "CUDA       none: for CPUs only", gpu[] = "CUDA       12.8";
    Outcome outcome = submit(stage, cpu, "8", 0, "--model tiny");
    outcome_check(&outcome, 2, "a program for CPUs on GPUs");
    text_check(outcome.output, "was built for CPUs: build it with make CUDA=1", "a program for CPUs on GPUs");
    assert_null(strstr(outcome.output, "srun"));
    outcome = submit(stage, cpu, "8", 0, "--device cpu");
    outcome_check(&outcome, 0, "CPUs as asked for");
    outcome = submit(stage, cpu, "", 0, "--model tiny");
    outcome_check(&outcome, 0, "no GPUs");
    text_check(outcome.output, "./train_gpt --out runs/slurm-7 --resume auto --model tiny", "no GPUs");
    outcome = submit(stage, gpu, "8", 0, "--model tiny");
    outcome_check(&outcome, 0, "GPUs");
    text_check(outcome.output, "--device cuda --model tiny", "GPUs");
    outcome = submit(stage, gpu, "8", 132, "--model tiny");
    outcome_check(&outcome, 132, "another processor");
    text_check(outcome.output, "make ARCH_FLAGS=-march=x86-64-v3", "another processor");
}

// A job whose ranks end with `code` after they have logged a report of `commit` (-1: they
// have not come so far). requeued: the script must ask Slurm for that, and for nothing else.
static Outcome end_at(Stage *stage, int commit, int code, int exit_code, bool requeued) {
    char report[128] = ":", what[64];
    snprintf(what, sizeof what, "commit %d, code %d", commit, code);
    if (commit >= 0) { snprintf(report, sizeof report, "echo %d >> runs/slurm-7/progress.tsv", commit); }
    shell(stage, "printf '#!/bin/sh\necho scontrol \"$@\"\n' > bin/scontrol && chmod +x bin/scontrol");
    stage_write(stage, "ranks", report);
    Outcome outcome = submit(stage, "CUDA       none", "", code, "--model tiny");
    outcome_check(&outcome, exit_code, what);
    if ((strstr(outcome.output, "scontrol requeue 7") != NULL) != requeued) {
        fail_msg("%s: %s requeued: %.900s", what, requeued ? "not" : "was", outcome.output);
    }
    return outcome;
}

static void a_job_that_dies_goes_back_into_the_queue(void **state) {
    Stage *stage = stage_of(state);
    shell(stage, "rm -rf runs");
    end_at(stage, -1, 137, 0, true); // a node was lost while the ranks started
    end_at(stage, -1, 1, 0, true);
    end_at(stage, 20, 137, 0, true); // counting starts again
    end_at(stage, 20, 3, 0, true);
    end_at(stage, 40, 75, 0, true); // asked to stop, and saved
    end_at(stage, 40, 3, 0, true);
    end_at(stage, 40, 139, 0, true);
    Outcome outcome = end_at(stage, 40, 3, 3, false);
    text_check(outcome.output, "three times in a row at commit 40, now with code 3: that is not the nodes",
               "three deaths");
    assert_null(strstr(outcome.output, "--time"));
    end_at(stage, 40, 3, 0, true); // somebody has requeued it
    end_at(stage, 60, 0, 0, false);
    end_at(stage, 60, 2, 2, false);
    end_at(stage, -1, 75, 0, true); // a time limit that ends it before it trains
    end_at(stage, -1, 75, 0, true);
    outcome = end_at(stage, -1, 75, 3, false);
    text_check(outcome.output, "at the start, where it was asked to stop", "three stops");
    text_check(outcome.output, "the --time is too short", "three stops");
}

static void a_job_that_saves_nothing_is_not_begun_again(void **state) {
    Stage *stage = stage_of(state);
    shell(stage, "rm -rf runs");
    end_at(stage, 20, 4, 4, false);
    shell(stage, "printf 'start.options.save-every\\tnever\\n' > runs/slurm-7/run.tsv");
    Outcome outcome = end_at(stage, 30, 137, 4, false);
    text_check(outcome.output, "--save-every never has left nothing", "a death of a run that saves nothing");
}

static int open_stage(void **state) {
    static Stage stage;
    static const char *const inherited[] = {"MAKEFLAGS",  "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "CC",
                                            "CXX",        "MPICC",  "NVCC",      "CPPFLAGS",      "LDFLAGS",
                                            "ARCH_FLAGS", "CUDA",   "CUDA_HOME", "NCCL_HOME",     "MPI_HOME"};
    for (size_t i = 0; i < sizeof inherited / sizeof inherited[0]; i++) { unsetenv(inherited[i]); }
    stage_open(&stage);
    unsetenv("TRAIN_GPT"); // train.slurm would start it
    snprintf(stage.binary, sizeof stage.binary, "/bin/sh");
    shell(&stage,
          "cp -r '%s/Makefile' '%s/scripts' . && mkdir -p bin mpi/bin mpi/lib toolkit/bin toolkit/lib64 "
          "nccl/lib plan kernels/cpu && : > plan/page.html && : > kernels/cpu/onednn.h",
          stage.root, stage.root);
    stage_write(&stage, "cc", compiler);
    stage_write(&stage, "train_gpt.cu", "");
    shell(&stage, "chmod +x cc && for name in c++ other nvcc toolkit/bin/nvcc mpi/bin/mpicc mpi/bin/mpirun "
                  "mpi/bin/mpicc.other mpi/bin/mpirun.other "
                  "bin/mpicc; do cp cc $name; done");
    *state = &stage;
    return 0;
}

#define BUILD_TEST(name) cmocka_unit_test_teardown(name, stage_end_test)

int main(void) {
    const struct CMUnitTest tests[] = {
        BUILD_TEST(a_changed_wish_rebuilds),
        BUILD_TEST(wishes_reach_the_program_for_cpus),
        BUILD_TEST(a_compiler_that_adds_wrongly_gets_no_avx512),
        BUILD_TEST(wishes_reach_the_program_for_gpus),
        BUILD_TEST(what_is_missing_is_named),
        BUILD_TEST(a_compiler_for_gpus_that_was_fetched_is_looked_for),
        BUILD_TEST(make_installs_and_explains),
        BUILD_TEST(a_tree_without_git_is_checked),
        BUILD_TEST(a_job_uses_its_gpus_or_ends),
        BUILD_TEST(a_job_that_dies_goes_back_into_the_queue),
        BUILD_TEST(a_job_that_saves_nothing_is_not_begun_again),
    };
    return cmocka_run_group_tests(tests, open_stage, stage_close_group);
}
