// test_launch_checks.c: what launch_checks.h decides under the launchers, core bindings
// and containers of other machines, whose numbers and variables are given here; and what
// placement.h leaves to NCCL on other GPUs, setup.h chooses for other models and links, and fit.h
// lets a rank of other machines have.

#include "test/harness.h"

#include "program/announce.h"
#include "program/fit.h"
#include "program/launch_checks.h"
#include "program/start_watch.h"

// Sets the launchers' variables to those of "NAME=value NAME=value", and no others.
static void set_environment(const char *text) {
    static const char *const names[] = {"OMPI_COMM_WORLD_RANK",
                                        "OMPI_COMM_WORLD_SIZE",
                                        "PMI_RANK",
                                        "PMI_SIZE",
                                        "PMIX_RANK",
                                        "MPI_LOCALNRANKS",
                                        "SLURM_PROCID",
                                        "SLURM_NTASKS",
                                        "SLURM_STEP_NUM_TASKS",
                                        "WORLD_SIZE",
                                        "RANK",
                                        "LOCAL_RANK",
                                        "PALS_SIZE",
                                        "FLUX_JOB_SIZE",
                                        "JSM_NAMESPACE_SIZE",
                                        "MV2_COMM_WORLD_SIZE"};
    char copy[128], *rest = NULL;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) { unsetenv(names[i]); }
    snprintf(copy, sizeof copy, "%s", text);
    for (char *entry = strtok_r(copy, " ", &rest); entry != NULL; entry = strtok_r(NULL, " ", &rest)) {
        char *value = strchr(entry, '=');
        *value++ = '\0';
        assert_int_equal(setenv(entry, value, 1), 0);
    }
}

// One of the variables that Open MPI, MPICH, Slurm and Intel MPI set tells that MPI is to be
// asked; those of a Slurm job alone do not, in which a program may run by itself.
static void test_launchers_are_noticed(void **state) {
    (void)state;
    static const struct {
        const char *text;
        bool launched;
    } cases[] = {{"", false},
                 {"OMPI_COMM_WORLD_SIZE=2", true},
                 {"PMI_SIZE=2", true},
                 {"PMI_RANK=0", true},
                 {"PMIX_RANK=0", true},
                 {"MPI_LOCALNRANKS=1", true},
                 {"SLURM_PROCID=0 SLURM_NTASKS=8", false},
                 {"WORLD_SIZE=2 RANK=1", false}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        set_environment(cases[i].text);
        if (transport_was_launched() != cases[i].launched) { fail_msg("%s", cases[i].text); }
    }
}

static void test_launcher_rank(void **state) {
    (void)state;
    static const struct {
        const char *text;
        int rank;
    } cases[] = {{"", 0},
                 {"OMPI_COMM_WORLD_RANK=3", 3},
                 {"PMI_RANK=1", 1},
                 {"PMIX_RANK=2", 2},
                 {"SLURM_PROCID=5", 5},
                 {"SLURM_PROCID=0 OMPI_COMM_WORLD_RANK=3", 3}, // mpirun inside a batch job
                 {"PMI_RANK=x SLURM_PROCID=5", 5},
                 {"OMPI_COMM_WORLD_RANK=-1", 0},
                 {"OMPI_COMM_WORLD_RANK=", 0},
                 {"XPMI_RANK=4", 0}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        set_environment(cases[i].text);
        assert_int_equal(launch_launcher_rank(), cases[i].rank);
    }
}

// Expects that a world of one is refused with a message that contains `part`, or accepted
// where that is NULL; and that a world of two is always accepted.
static void expect_copies(const char *text, bool has_mpi, const char *part) {
    Error error;
    set_environment(text);
    error.text[0] = '\0';
    bool fine = launch_check_copies(1, has_mpi, &error);
    if (fine != (part == NULL)) { fail_msg("%s: %s", text, fine ? "accepted" : error.text); }
    if (part != NULL && strstr(error.text, part) == NULL) { fail_msg("%s says %s", text, error.text); }
    if (!launch_check_copies(2, has_mpi, &error)) { fail_msg("%s: refused with two ranks", text); }
}

static void test_independent_copies(void **state) {
    (void)state;
    expect_copies("", true, NULL);
    expect_copies("SLURM_STEP_NUM_TASKS=8 SLURM_PROCID=0", true,
                  "8 independent copies were started: use srun --mpi=pmix or mpirun of the MPI that it was");
    expect_copies("SLURM_STEP_NUM_TASKS=8 SLURM_PROCID=3", false,
                  "8 independent copies were started: it was built without MPI");
    expect_copies("WORLD_SIZE=2 RANK=1 LOCAL_RANK=1", true, "2 independent copies were started");
    expect_copies("WORLD_SIZE=2", true, NULL);
    expect_copies("PALS_SIZE=3", true, "3 independent copies were started");
    expect_copies("FLUX_JOB_SIZE=2", true, "2 independent copies were started");
    expect_copies("JSM_NAMESPACE_SIZE=2", true, "2 independent copies were started");
    expect_copies("MV2_COMM_WORLD_SIZE=2", true, "2 independent copies were started");
    expect_copies("MV2_COMM_WORLD_SIZE=1", true, NULL);
    // srun -n 1 inside a job of 8
    expect_copies("SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=8 SLURM_PROCID=0", true, NULL);
    expect_copies("SLURM_NTASKS=8 SLURM_PROCID=2", true, "8 independent copies were started");
    expect_copies("SLURM_NTASKS=8 SLURM_PROCID=0", true,
                  "8 tasks are in this Slurm job, and this program runs alone: use srun --mpi=pmix (for one "
                  "rank srun -n 1) or mpirun");
    expect_copies("SLURM_NTASKS=8 SLURM_PROCID=0", false, "libopenmpi-dev");
    expect_copies("SLURM_NTASKS=8", true, NULL);
    expect_copies("OMPI_COMM_WORLD_SIZE=4", true,
                  "4 independent copies were started: use srun --mpi=pmix or mpirun of the MPI");
    expect_copies("OMPI_COMM_WORLD_SIZE=4", false, "libopenmpi-dev");
    expect_copies("PMI_SIZE=4", true, "4 independent copies");
    // mpirun -np 1 inside a job of 8
    expect_copies("OMPI_COMM_WORLD_SIZE=1 SLURM_NTASKS=8 SLURM_PROCID=0", true, NULL);
    expect_copies("PMI_SIZE=1 SLURM_STEP_NUM_TASKS=8", true, NULL);
}

static void expect_threads(int mask, int node, int ranks, int asked, int threads, const char *reason,
                           const char *warning) {
    ThreadChoice choice;
    memset(&choice, 'x', sizeof choice);
    launch_choose_threads(mask, node, ranks, asked, &choice);
    if (choice.threads != threads || strstr(choice.reason, reason) == NULL) {
        fail_msg("%d threads: %s", choice.threads, choice.reason);
    }
    if (warning == NULL ? choice.warning[0] != '\0' : strstr(choice.warning, warning) == NULL) {
        fail_msg("warning: %s", choice.warning);
    }
}

static void test_threads(void **state) {
    (void)state;
    expect_threads(8, 8, 1, 0, 8, "8 cores of this node for 1 rank", NULL);
    expect_threads(1, 1, 1, 0, 1, "1 core of this node for 1 rank", NULL);
    expect_threads(8, 8, 2, 0, 4, "8 cores of this node for 2 ranks", NULL);
    expect_threads(8, 8, 3, 0, 2, "8 cores of this node for 3 ranks", NULL);
    expect_threads(2, 2, 4, 0, 1, "2 cores of this node for 4 ranks", NULL);
    expect_threads(1, 1, 4, 0, 1, "1 core of this node for 4 ranks", NULL);
    // Open MPI binds one or two ranks to a core each
    expect_threads(1, 8, 1, 0, 1, "bound this rank to 1 of 8 cores", "start with mpirun --bind-to none ...");
    expect_threads(1, 8, 2, 0, 1, "bound this rank to 1 of 8 cores",
                   "bound to 1 core where 4 could be its share");
    expect_threads(3, 8, 2, 0, 3, "bound this rank to 3 of 8 cores", "--cpus-per-task=4");
    expect_threads(4, 8, 2, 0, 4, "of this node for 2 ranks", NULL); // bound to its fair share
    expect_threads(1, 2, 2, 0, 1, "of this node for 2 ranks", NULL);
    // --threads
    expect_threads(8, 8, 1, 3, 3, "--threads", NULL);
    expect_threads(1, 8, 2, 1, 1, "--threads", NULL); // the binding is meant
    expect_threads(1, 8, 2, 4, 4, "--threads", "--bind-to none");
    expect_threads(8, 8, 2, 4, 4, "--threads", NULL);
    expect_threads(8, 8, 2, 5, 5, "--threads",
                   "--threads 5 for each of 2 ranks is more than the 8 cores here: slower than 4");
    expect_threads(
        2, 12, 3, 0, 2, "the launcher bound this rank to 2 of 12 cores",
        "this rank is bound to 2 cores where 4 could be its share: start with mpirun --bind-to none "
        "... (under srun: --cpus-per-task=4), or say --threads 2 if the binding is meant");
    expect_threads(1, 1, 1, 3, 3, "--threads",
                   "--threads 3 for each of 1 rank is more than the 1 core here: slower than 1");
    // a container limits the share of time: fewer cores than the mask shows
    expect_threads(64, 2, 1, 0, 2, "2 cores of this node for 1 rank", NULL);
    expect_threads(64, 2, 2, 0, 1, "2 cores of this node for 2 ranks", NULL);
}

static void test_core_lists(void **state) {
    (void)state;
    static const char list[] = "0-3,8,10-11\n";
    static const bool has[] = {true,  true, true,  true, false, false, false,
                               false, true, false, true, true,  false};
    for (long core = 0; core < (long)sizeof has; core++) {
        assert_int_equal(core_list_has(list, core), has[core]);
    }
    static const char *const none_of_seven[] = {"", "\n", "x", "0-", "8-", "9-3", "0,,1", "-1", "71", "1-x"};
    for (size_t i = 0; i < sizeof none_of_seven / sizeof none_of_seven[0]; i++) {
        assert_false(core_list_has(none_of_seven[i], 7));
    }
}

static void put(const char *root, const char *name, const char *text) {
    char path[300], command[400];
    snprintf(command, sizeof command, "mkdir -p \"$(dirname '%s/%s')\"", root, name);
    assert_int_equal(system(command), 0);
    snprintf(path, sizeof path, "%s/%s", root, name);
    FILE *file = fopen(path, "w");
    assert_true(file != NULL && fputs(text, file) >= 0 && fclose(file) == 0);
}

// Every group from the process's own to the root limits it, in both versions, and what others of a
// group use is not to be had.
static void test_control_groups(void **state) {
    (void)state;
    char root[] = "/tmp/acco-groups-XXXXXX", self[64], command[128];
    assert_non_null(mkdtemp(root));
    snprintf(self, sizeof self, "%s/self", root);
    put(root, "self", "0::/job/step\n");
    GroupLimits limits = group_limits(self, root);
    assert_true(limits.memory == SIZE_MAX && isinf(limits.cores) && limits.set[0] == '\0');
    put(root, "cpuset.cpus.effective", "0-63\n"); // of the group that is nearest
    assert_string_equal(group_limits(self, root).set, "0-63");
    put(root, "job/cpuset.cpus.effective", "8-11,40-43\n");
    assert_string_equal(group_limits(self, root).set, "8-11,40-43");
    put(root, "job/step/memory.max", "max\n");
    put(root, "job/step/cpu.max", "max 100000\n");
    put(root, "job/memory.max", "1000000\n");
    limits = group_limits(self, root);
    assert_true(limits.memory == 1000000 && isinf(limits.cores));
    put(root, "job/memory.current", "700000\n");
    put(root, "job/memory.stat", "anon 1\nactive_file 150000\ninactive_file 50000\n");
    put(root, "job/cpu.max", "150000 100000\n");
    limits = group_limits(self, root);
    assert_true(limits.memory == 500000 && limits.cores == 1.5);
    put(root, "cpu.max", "800000 100000\n"); // a wider one around it changes nothing
    assert_true(group_limits(self, root).cores == 1.5);
    put(root, "job/step/cpu.max", "50000 100000\n"); // nor does one around a narrower one
    assert_true(group_limits(self, root).cores == 0.5);
    put(root, "cpu.max", "max 100000\n");
    put(root, "memory.max", "400000\n"); // of the root, as in a container
    assert_true(group_limits(self, root).memory == 400000);
    put(root, "job/memory.current", "7000000\n");
    assert_true(group_limits(self, root).memory == 0);
    put(root, "self", "5:cpu,cpuacct:/a\n4:memory:/a/b\nnonsense\n0::/none\n");
    put(root, "memory/a/memory.limit_in_bytes", "300000\n");
    put(root, "memory/a/b/memory.limit_in_bytes", "9223372036854771712\n");
    put(root, "memory/a/memory.usage_in_bytes", "60000\n");
    put(root, "cpu,cpuacct/a/cpu.cfs_quota_us", "50000\n");
    put(root, "cpu,cpuacct/a/cpu.cfs_period_us", "100000\n");
    limits = group_limits(self, root);
    assert_true(limits.memory == 240000 && limits.cores == 0.5);
    put(root, "memory/a/memory.stat",
        "inactive_file 5000\ntotal_inactive_file 12000\ntotal_active_file 8000\n"); // total: with a/b
    assert_true(group_limits(self, root).memory == 260000);
    put(root, "cpu,cpuacct/a/cpu.cfs_quota_us", "-1\n");
    assert_true(isinf(group_limits(self, root).cores));
    put(root, "self", "3:cpuset:/a\n");
    put(root, "cpuset/a/cpuset.effective_cpus", "2\n");
    assert_string_equal(group_limits(self, root).set, "2");
    limits = group_limits("/nowhere", "/nowhere");
    assert_true(limits.memory == SIZE_MAX && isinf(limits.cores));
    snprintf(command, sizeof command, "rm -r '%s'", root);
    assert_int_equal(system(command), 0);
    assert_true(cores_within_share(8, 1.5) == 2 && cores_within_share(8, 0.5) == 1);
    assert_true(cores_within_share(2, 1.5) == 2 && cores_within_share(2, INFINITY) == 2);
    assert_true(cores_within_share(0, INFINITY) == 1);
}

// Eight hardware threads of four cores, as Linux mostly numbers them; the last two say
// nothing of their core.
static bool two_threads_a_core(long core, char *list, int size) {
    if (core >= 6) { return false; }
    snprintf(list, (size_t)size, "%ld,%ld\n", core % 4, core % 4 + 4);
    return true;
}

static void test_physical_cores(void **state) {
    (void)state;
    static const struct {
        const char *list;
        int cores;
    } cases[] = {{"0", 1},     {"0-3", 4}, {"0,4", 1}, {"4", 1},
                 {"1,4-5", 2}, {"0-5", 4}, {"2,6", 2}, {"3,7", 2}};
    assert_int_equal(core_lists_physical("0-3", "1,4-5", two_threads_a_core), 1);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *list = cases[i].list;
        assert_int_equal(core_lists_physical(list, list, two_threads_a_core), cases[i].cores);
        assert_int_equal(core_lists_physical(list, "0-100", two_threads_a_core), cases[i].cores);
    }
}

static void test_shared_memory(void **state) {
    (void)state;
    char warning[256];
    launch_judge_shared_memory(67108864, 2, warning, sizeof warning);
    assert_non_null(strstr(warning, "/dev/shm has 67.1 MB"));
    assert_non_null(strstr(warning, "--shm-size=2g"));
    launch_judge_shared_memory(67108864, 1, warning, sizeof warning); // no messages
    assert_string_equal(warning, "");
    launch_judge_shared_memory(1000000000, 8, warning, sizeof warning);
    assert_string_equal(warning, "");
    launch_judge_shared_memory(0, 8, warning, sizeof warning); // there is none
    assert_string_equal(warning, "");
}

// An emulated link is the host's: its ranks share the bytes, and each message is as late.
static void test_shared_links(void **state) {
    (void)state;
    const Options options = {.link_mbit = 8, .link_us = 50};
    const struct {
        int rank, per_host;
        double rate; // bytes/s
    } cases[] = {{0, 1, 1e6}, {1, 2, 5e5}, {4, 3, 5e5}, {2, 3, 1e6 / 3}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Transport transport;
        memset(&transport, 0, sizeof transport);
        groups_make_even(&transport.hosts, cases[i].rank, 5, cases[i].per_host);
        emulate_network(&transport, &options);
        assert_close(transport.link_bytes_per_second, cases[i].rate, 1e-6, "rate");
        assert_close(transport.link_latency, 50e-6, 1e-12, "latency");
        groups_free(&transport.hosts);
    }
}

// Every host once, with its first rank; nothing where there is one.
static void test_hosts(void **state) {
    (void)state;
    static const Hello hellos[] = {{.threads = 4, .host = "pc1", .device = "CPU"},
                                   {.threads = 1, .capability = 90, .host = "pc2", .device = "some GPU"},
                                   {.threads = 4, .host = "pc1", .device = "CPU"}};
    char *text = NULL;
    size_t length = 0;
    FILE *file = open_memstream(&text, &length);
    print_hosts(file, hellos, 1);
    fflush(file);
    assert_int_equal(length, 0);
    print_hosts(file, hellos, 3);
    fclose(file);
    assert_string_equal(text, "hosts      pc1: 2 ranks, the first is 0; CPU, 4 threads each\n"
                              "           pc2: 1 rank, the first is 1; some GPU, 1 thread each\n");
    free(text);
    enum { MANY = 19 };
    static Hello many[2 * MANY];
    for (int rank = 0; rank < 2 * MANY; rank++) {
        many[rank].threads = 2;
        snprintf(many[rank].host, sizeof many[rank].host, "pc%d", rank / 2);
        snprintf(many[rank].device, sizeof many[rank].device, "CPU");
    }
    file = open_memstream(&text, &length);
    print_hosts(file, many, 2 * MANY);
    fclose(file);
    assert_non_null(strstr(text, "\n           pc15: 2 ranks, the first is 30; CPU, 2 threads each\n"
                                 "           and 3 more: log.jsonl has all\n"));
    free(text);
}

// n = sqrt(C / latency) buckets of an exchange of C seconds: here 1.6 MB on 4 ranks at 1 MB/s,
// 1.2 s in one direction, of which a rule that replicates needs two, each with its own latency.
static void buckets_are_as_many_as_the_link_wants(void **state) {
    (void)state;
    static const struct {
        RuleKind kind;
        int ranks;
        bool replicated;
        WireFormat wire;
        double rate, latency, asked; // asked: --bucket-mb
        double bytes;                // 0: it has none
        const char *reason;
    } cases[] = {
        {RULE_SYNCHRONOUS, 4, false, WIRE_FP32, 1e6, 12e-3, 0, 1.6e5,
         "measured: 1.2e+04 us a message, 1 MB/s; 1.2 s for all of it"},
        {RULE_SYNCHRONOUS, 4, true, WIRE_FP32, 1e6, 12e-3, 0, 1.6e5,
         "measured: 1.2e+04 us a message, 1 MB/s; 2.41 s for all of it"},
        {RULE_SYNCHRONOUS, 4, false, WIRE_BF16, 1e6, 6e-3, 0, 1.6e5,
         "measured: 6e+03 us a message, 1 MB/s; 0.602 s for all of it"},
        {RULE_SYNCHRONOUS, 4, false, WIRE_FP32, 1e9, 1e-6, 0, 8e5,
         "measured: 1 us a message, 1e+03 MB/s; 0.0012 s for all of it"}, // threads wake up in 300 us
        {RULE_SYNCHRONOUS, 4, false, WIRE_FP32, 1e9, 1, 0, 1.6e6, "measured: 1e+06 us"},
        {RULE_SYNCHRONOUS, 4, false, WIRE_FP32, 1e6, 1e-3, 0.5, 5e5, "as asked for"},
        {RULE_SYNCHRONOUS, 1, false, WIRE_FP32, 1e6, 1e-3, 0, 0, ""},
        {RULE_OVERLAPPED, 4, false, WIRE_FP32, 1e6, 1e-3, 0, 0, ""},
    };
    static const Placement host;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Transport transport = {.size = cases[i].ranks};
        Scheduler *s = MEMORY_OF(Scheduler, 1);
        Options options = {.bucket_mb = cases[i].asked};
        LinkMeasure link = {cases[i].latency, cases[i].rate};
        char reason[160] = "";
        s->transport = &transport;
        s->settings.kind = cases[i].kind;
        s->settings.replicated = cases[i].replicated;
        s->settings.wire = cases[i].wire;
        s->layout = layout_make(400000, cases[i].ranks);
        bucket_for_link(s, &options, &host, &link, reason);
        double padded = (double)layout_padded(&s->layout) / 400000; // a little more than 1
        assert_close((double)s->settings.bucket_bytes, cases[i].bytes, (padded * padded - 1) * 1.6e6 + 1,
                     "bytes");
        if (strncmp(reason, cases[i].reason, strlen(cases[i].reason)) != 0) { fail_msg("%s", reason); }
        free(s);
    }
}

// The ranks of a host share its memory, but for what each takes beside its plan.
static void a_rank_has_its_share_of_the_memory(void **state) {
    (void)state;
    Run *run = MEMORY_OF(Run, 1);
    run->transport.local_size = 4;
    run->placement.host_available = (size_t)4 << 30;
    run->placement.gpu.memory_available = 2000;
    run->placement.sharing = 2;
    MemoryRoom room = memory_room(run);
    assert_true(room.gpu == 0 && room.host == ((size_t)1 << 30) - MEMORY_BESIDE);
    run->placement.on_gpu = true;
    assert_int_equal(memory_room(run).gpu, 950);
    run->placement.host_available = 4 * MEMORY_BESIDE; // known, and nothing is left
    assert_int_equal(memory_room(run).host, 1);
    run->placement.host_available = 0; // not known
    assert_int_equal(memory_room(run).host, 0);
    static const struct {
        bool on_gpu;
        MemoryRoom room;
        bool fits;
    } cases[] = {{false, {0, 100}, true}, {false, {0, 99}, false}, {false, {50, 100}, true},
                 {false, {0, 0}, true},   {true, {100, 10}, true}, {true, {99, 10}, false},
                 {true, {100, 9}, false}, {true, {0, 10}, true},   {true, {100, 0}, true}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Arena arena = {.bytes = 100, .host_bytes = 10, .on_gpu = cases[i].on_gpu};
        if (arena_fits(&arena, &cases[i].room) != cases[i].fits) { fail_msg("case %zu", i); }
    }
    free(run);
}

// What rank_pace_print prints, for the caller to free.
static char *said_of_pace(const Options *options, const double *seconds, int ranks, const char *where) {
    char *text = (char *)calloc(1, 1024);
    Capture capture = capture_begin(stdout);
    rank_pace_print(options, seconds, ranks, rank_pace_find(options, seconds, ranks), where, 11);
    capture_end(&capture, text, 1024);
    assert_true(text[0] != '\0');
    return text;
}

static void a_slow_rank_is_told_with_what_helps(void **state) {
    (void)state;
    static const char micro_batch[] = "takes 3.0 times as long for a micro-batch as the median of all ranks, "
                                      "which wait for it\n",
                      part[] = "takes 3.0 times as long for its part of a commit as the median of all ranks, "
                               "which wait for it\n";
    static const double seconds[18] = {1, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1},
                        equal[2] = {1, 1}, near[2] = {1, 1.4};
    static const struct {
        const char *rule, *now, *where;
        const double *seconds;
        int ranks;
        const char *lines[2];
    } cases[] = {
        {"zero1",
         "",
         "pc2",
         seconds,
         2,
         {micro_batch, "           --rank-accumulate 3,1 shares the work by speed\n"}},
        {"diloco",
         "",
         "",
         seconds,
         2,
         {micro_batch, "           --rank-accumulate 3,1, under ddp, zero1, dpu, acco-wp "
                       "or acco shares the work by speed\n"}},
        {"zero1", "1,3", "", equal, 2, {part, "           --rank-accumulate 2,2 shares the work by speed\n"}},
        {"zero1", "1,1", "", near, 2, {NULL, ""}},         // whole numbers share no better
        {"zero1", "", "", seconds, 18, {micro_batch, ""}}, // too many for a list
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Options options;
        Error error;
        char wanted[1024];
        options_defaults(&options);
        assert_true(option_set(option_find("optimizer"), &options, cases[i].rule, &error));
        strcpy(options.rank_accumulate, cases[i].now);
        char *text = said_of_pace(&options, cases[i].seconds, cases[i].ranks, cases[i].where);
        if (cases[i].lines[0] != NULL) {
            snprintf(wanted, sizeof wanted, "slow       rank 1%s%s %s%s",
                     cases[i].where[0] != '\0' ? " on " : "", cases[i].where, cases[i].lines[0],
                     cases[i].lines[1]);
            assert_string_equal(text, wanted);
        } else {
            assert_null(strstr(text, "--rank-accumulate"));
        }
        free(text);
    }
}

// A run of two ranks with these options, windows of 256 tokens and, where none is given,
// micro-batches of one; for the caller to free.
static Run *run_of_two_ranks(const char *options) {
    Run *run = MEMORY_OF(Run, 1);
    Error error = {""};
    char line[256] = "train_gpt ", *words[24];
    int count = 0;
    strcat(line, options);
    for (char *word = strtok(line, " "); word != NULL; word = strtok(NULL, " ")) { words[count++] = word; }
    if (!options_parse(count, words, &run->options, &error)) { fail_msg("%s", error.text); }
    run->rule = options_rule(&run->options);
    run->transport.size = 2;
    if (run->options.micro_batch == 0) { run->options.micro_batch = 1; }
    run->B = (int)run->options.micro_batch;
    run->T = (int)(run->options.seq_len = 256);
    run->placement.all_round_alike = true;
    return run;
}

// GPT-3's rates by size; a tenth to fine-tune; with Muon more where a commit has more tokens. What
// is given stays.
static void rates_follow_from_the_model_and_the_batch(void **state) {
    (void)state;
    static const struct {
        double parameters;
        const char *options; // of two ranks: 4 sequences a commit, of 256 tokens
        double rate, least, weight_decay;
        int64_t warmup, decay;
    } cases[] = {
        {4.9e6, "", 2e-3, 2e-4, 0.1, 48, 0},
        {5e6, "", 1e-3, 1e-4, 0.1, 48, 0},
        {19.9e6, "", 1e-3, 1e-4, 0.1, 48, 0},
        {20e6, "", 6e-4, 6e-5, 0.1, 48, 0},
        {249e6, "", 6e-4, 6e-5, 0.1, 48, 0},
        {250e6, "", 3e-4, 3e-5, 0.1, 48, 0},
        {900e6, "", 1.6e-4, 1.6e-5, 0.1, 48, 0},
        {7e6, "--finetune D", 1e-4, 1e-5, 0, 48, 0},
        {7e6, "--from D --weight-decay 0.5", 1e-3, 1e-4, 0.5, 48, 0},
        {7e6, "--lr 0.5 --min-lr 0.125 --warmup 7", 0.5, 0.125, 0.1, 7, 0},
        {7e6, "--tokens 100M", 1e-3, 1e-4, 0.1, 1000, 0},
        {7e6, "--schedule constant", 1e-3, -1, 0.1, 48, 0},
        {7e6, "--schedule wsd", 1e-3, 1e-4, 0.1, 48, 200000},
        {7e6, "--schedule wsd --decay-tokens 5k", 1e-3, 1e-4, 0.1, 48, 5000},
        {7e6, "--inner muon", 1e-3, 1e-4, 0.1, 48, 0},
        {7e6, "--inner muon --micro-batch 4", 2e-3, 2e-4, 0.1, 12, 0},
        {7e6, "--inner muon --micro-batch 64", 4e-3, 4e-4, 0.1, 0, 0},
        {7e6, "--optimizer diloco --diloco-H 20 --diloco-mu 0.75", 1e-3, 1e-4, 0.1, 80, 0},
        {7e6, "--optimizer diloco --diloco-H 500", 1e-3, 1e-4, 0.1, 325, 0},
        {7e6, "--epochs 2 --data f --schedule wsd", 1e-3, 1e-4, 0.1, -1, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Run *run = run_of_two_ranks(cases[i].options);
        Error error = {""};
        if (run->options.tokens == 1500000) { run->options.tokens = 1000000; } // not given
        run->part.table.parameter_count = (size_t)cases[i].parameters;
        if (!choose_rates(run, &error)) { fail_msg("%s: %s", cases[i].options, error.text); }
        const Options *chosen = &run->options;
        assert_close(chosen->learning_rate, cases[i].rate, 1e-12, cases[i].options);
        assert_close(chosen->minimum_learning_rate, cases[i].least, 1e-12, cases[i].options);
        assert_close(chosen->weight_decay, cases[i].weight_decay, 0, cases[i].options);
        assert_int_equal(chosen->warmup, cases[i].warmup);
        assert_int_equal(chosen->decay_tokens, cases[i].decay);
        free(run);
    }
}

// --inner auto: Muon where a new model has large commits and no rate is given.
static void what_steps_follows_from_the_start_and_the_batch(void **state) {
    (void)state;
    static const struct {
        const char *options; // --micro-batch 16: 16,384 tokens a commit
        bool suits;
    } cases[] = {{"", false},
                 {"--micro-batch 15", false},
                 {"--micro-batch 16", true},
                 {"--micro-batch 16 --optimizer diloco", true},
                 {"--micro-batch 8 --rank-accumulate 2,5", false},
                 {"--micro-batch 8 --rank-accumulate 2,6", true},
                 {"--micro-batch 15 --accumulate auto", false}, // one in each round, at least
                 {"--micro-batch 16 --accumulate auto", true},
                 {"--micro-batch 16 --lr 1e-3", false},
                 {"--micro-batch 16 --finetune D", false},
                 {"--micro-batch 16 --from D", false}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Run *run = run_of_two_ranks(cases[i].options);
        if (muon_suits(run, &run->options) != cases[i].suits) {
            fail_msg("otherwise: '%s'", cases[i].options);
        }
        free(run);
    }
    Error error = {""};
    Run *run = run_of_two_ranks("--micro-batch 16");
    run->part.frozen_count = 1; // of a plan, which needs no model
    assert_false(muon_suits(run, &run->options));
    run->part.frozen_count = 0;
    assert_true(muon_suits(run, &run->options));
    run->placement.all_on_gpus = true; // which exchange equal pieces by NCCL, and no whole matrices
    assert_false(muon_suits(run, &run->options));
    option_set(option_find("optimizer"), &run->options, "diloco", &error);
    assert_true(muon_suits(run, &run->options));
    option_set(option_find("optimizer"), &run->options, "zero1", &error);
    run->placement.all_on_gpus = run->placement.all_round_alike = false;
    assert_true(muon_suits(run, &run->options));
    option_set(option_find("optimizer"), &run->options, "ddp", &error); // each rank makes every step
    assert_false(muon_suits(run, &run->options));
    run->transport.size = 1;
    run->options.accumulate = 4;
    run->placement.all_on_gpus = true;
    assert_true(muon_suits(run, &run->options));
    free(run);
}

// The rate of what AdamW steps beside Muon, as a multiple of --lr.
static void embeddings_of_many_tokens_have_a_rate_of_their_own(void **state) {
    (void)state;
    static const struct {
        const char *options;
        int vocabulary, head;
        double factor;
    } cases[] = {{"--optimizer ddp", 4096, TENSOR_EMBEDDING, 4},
                 {"--optimizer acco", 50257, TENSOR_EMBEDDING, 4},
                 {"--optimizer acco", 4095, TENSOR_EMBEDDING, 1},
                 {"--optimizer acco", 50257, TENSOR_HEAD, 1},
                 {"--optimizer streaming-diloco", 50257, TENSOR_EMBEDDING, 1},
                 {"--optimizer acco --finetune D", 50257, TENSOR_EMBEDDING, 1},
                 {"--optimizer acco --resume R --fresh-moments on", 50257, TENSOR_EMBEDDING, 1},
                 {"--optimizer acco --data letters", 50257, TENSOR_EMBEDDING, 1},
                 {"--optimizer acco --data letters --tokenizer T", 50257, TENSOR_EMBEDDING, 4},
                 {"--optimizer acco --muon-adamw-lr 0.5", 50257, TENSOR_EMBEDDING, 250}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char options[128];
        Error error = {""};
        ParameterInfo entries[2] = {{.role = TENSOR_EMBEDDING}, {.role = cases[i].head}};
        snprintf(options, sizeof options, "--inner muon --lr 0.002 %s", cases[i].options);
        Run *run = run_of_two_ranks(options);
        DataFile letters = {.content.token_bytes = 1};
        run->config.vocabulary = cases[i].vocabulary;
        run->data.files = strstr(options, "letters") == NULL ? NULL : &letters;
        run->part.model = (ParameterTable){.entries = entries, .count = 2, .head = 1};
        if (!choose_rates(run, &error)) { fail_msg("%s: %s", options, error.text); }
        assert_close(run->options.muon_adamw_rate / run->options.learning_rate, cases[i].factor, 1e-12,
                     options);
        free(run);
    }
}

static void test_processors_for_nccl(void **state) {
    (void)state;
    assert_int_equal(placement_default_ctas(132), 8);
    assert_int_equal(placement_default_ctas(64), 8);
    assert_int_equal(placement_default_ctas(63), 4); // 7 would be an eighth, and NCCL would take 8
    assert_int_equal(placement_default_ctas(24), 2);
    assert_int_equal(placement_default_ctas(4), 1);
    for (int ctas = 1; ctas <= 32; ctas *= 2) { assert_int_equal(placement_taken_ctas(ctas, false), ctas); }
    assert_int_equal(placement_taken_ctas(6, false), 8);
    assert_int_equal(placement_taken_ctas(33, false), 64);
    assert_int_equal(placement_taken_ctas(6, true), 6); // collectives of the library
    // Its messages: little beside the memory, and no shorter with thousands of ranks.
    assert_int_equal(placement_nccl_bytes((size_t)80e9, 8), 128 << 20);
    assert_int_equal(placement_nccl_bytes((size_t)24e9, 8), 48e6);
    assert_int_equal(placement_nccl_bytes((size_t)80e9, 511), 128 << 20);
    assert_int_equal(placement_nccl_bytes((size_t)80e9, 1024), 512 << 20);
}

static void test_this_machine(void **state) {
    (void)state;
    ThreadChoice choice;
    assert_true(machine_cores() >= 1 && process_cores() >= 1);
    FILE *file = fopen("/proc/meminfo", "r");
    double kilobytes = 0, limit = (double)process_limits().memory;
    char line[256];
    while (file != NULL && fgets(line, sizeof line, file) != NULL &&
           sscanf(line, "MemAvailable: %lf", &kilobytes) != 1) {}
    if (file != NULL) { fclose(file); }
    double left = (double)memory_available() / fmax(fmin(1024 * kilobytes, limit), 1);
    assert_true(kilobytes == 0 || (left > 0.1 && left < 10)); // others take and give some meanwhile
    // A rank whose share is smaller than what it takes beside its plan has no room for one.
    // A plan for a GPU elsewhere knows nothing of the memory of its host.
    for (int elsewhere = 0; elsewhere < 2; elsewhere++) {
        Error error = {""};
        Run *run = MEMORY_OF(Run, 1);
        run->transport.local_size = 1000000;
        run->options.device = DEVICE_CPU;
        run->options.gpu_memory = elsewhere ? 80000000000 : 0;
        assert_true(placement_choose_device(&run->placement, &run->options, 0, true, &error));
        assert_true(kilobytes == 0 || memory_room(run).host == (elsewhere ? 0 : 1));
        free(run);
    }
    launch_threads(1, 0, &choice);
    assert_true(choice.threads >= 1 && choice.threads <= process_cores() && choice.reason[0] != '\0');
    launch_threads(1000000, 0, &choice);
    assert_int_equal(choice.threads, 1);
}

// By hand: of four ranks of which two take three times as long, the slower two are above the
// median; the slowest of all is named.
static void a_slow_rank_is_found(void **state) {
    (void)state;
    static const struct {
        int ranks, accumulate, slow;
        double seconds[4], factor;
        const char *list, *rule, *now; // rule NULL: zero1; now: --rank-accumulate
    } cases[] = {
        {2, 2, 1, {1, 3}, 3, "3,1", NULL, NULL},
        {2, 4, 1, {1, 3}, 3, "6,2", NULL, NULL},
        {2, 2, 1, {1, 3}, 3, "6,2", "acco", NULL}, // a micro-batch for each of its two rounds
        {2, 2, 1, {1, 3}, 3, "3,1", "acco-wp", NULL},
        {2, 2, 0, {4, 1}, 4, "1,4", NULL, NULL},
        {4, 2, 3, {1, 1, 3, 3.5}, 3.5, "3,3,1,1", NULL, NULL},
        {3, 3, -1, {1, 1.2, 1.1}, 0, "3,3,3", NULL, NULL},
        {4, 4, 2, {1, 1, 2, 1}, 2, "5,5,2,5", NULL, NULL},
        {2, 1, -1, {0, 0}, 0, NULL, NULL, NULL},
        {2, 2, -1, {1, 3}, 0, "3,1", NULL, "3,1"}, // both are done at once
        {2, 2, 0, {1, 3}, 2, "5,2", NULL, "6,1"},
        {2, 2, 1, {1, 1}, 3, "2,2", NULL, "1,3"},
        {4, 2, 2, {1, 1, 4, 2}, 4, "4,4,1,2", NULL, NULL}, // the slowest of two
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Options options;
        char list[128];
        Error error;
        options_defaults(&options);
        options.accumulate = cases[i].accumulate;
        assert_true(option_set(option_find("optimizer"), &options,
                               cases[i].rule != NULL ? cases[i].rule : "zero1", &error));
        if (cases[i].now != NULL) { strcpy(options.rank_accumulate, cases[i].now); }
        SlowRank slow = rank_pace_find(&options, cases[i].seconds, cases[i].ranks);
        assert_int_equal(slow.rank, cases[i].slow);
        if (slow.rank >= 0 && !(fabs(slow.factor - cases[i].factor) < 1e-12)) { fail_msg("%g", slow.factor); }
        if (cases[i].list == NULL) { continue; }
        rank_pace_list(&options, cases[i].seconds, cases[i].ranks, list);
        assert_string_equal(list, cases[i].list);
    }
}

// ---- A start that does not start -------------------------------------------------------

static void wait_alone(const void *context) {
    StartWatch watch;
    start_watch_begin(&watch, *(const double *)context);
    pause();
}

// The deadline counts from the beginning, and not from the word that is said on the way to it.
static void the_start_ends_at_its_deadline(void **state) {
    (void)state;
    enum { SECONDS = 3 };
    const double timeout = SECONDS;
    char said[1024];
    double began = clock_seconds();
    int status = run_in_child(wait_alone, &timeout, said, sizeof said);
    double took = clock_seconds() - began;
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SYSTEM_FAILURE);
    assert_non_null(strstr(said, "has not met the other ranks in 3 s"));
    if (!(took >= SECONDS && took < 1.45 * SECONDS)) { fail_msg("%g s", took); }
}

// Ranks whose parameters differ in one byte have other fingerprints; threads and the length of the
// parts that are hashed at a time change none.
static void every_byte_counts_in_a_fingerprint(void **state) {
    (void)state;
    enum { COUNT = 2 * HASH_BLOCK + 13 };
    char *bytes = MEMORY_OF(char, COUNT);
    for (size_t i = 0; i < COUNT; i++) { bytes[i] = (char)(i * i / 3); }
    ThreadPool *pools[2] = {thread_pool_create(1, false), thread_pool_create(3, false)};
    uint64_t hash = hash_more(pools[0], 7, bytes, COUNT);
    assert_true(hash_more(pools[1], 7, bytes, COUNT) == hash);
    assert_true(hash_more(pools[0], 8, bytes, COUNT) != hash);
    assert_true(hash_more(pools[0], 7, bytes, COUNT - 1) != hash);
    for (size_t i = 0; i < 40; i++) {
        size_t at = i < 20 ? HASH_BLOCK - 10 + i : COUNT - 20 + (i - 20);
        bytes[at] ^= 1;
        if (hash_more(pools[i % 2], 7, bytes, COUNT) == hash) { fail_msg("byte %zu does not count", at); }
        bytes[at] ^= 1;
    }
    thread_pool_destroy(pools[0]);
    thread_pool_destroy(pools[1]);
    free(bytes);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_byte_counts_in_a_fingerprint),
        cmocka_unit_test(test_launchers_are_noticed),
        cmocka_unit_test(test_launcher_rank),
        cmocka_unit_test(test_independent_copies),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_core_lists),
        cmocka_unit_test(test_control_groups),
        cmocka_unit_test(the_start_ends_at_its_deadline),
        cmocka_unit_test(test_physical_cores),
        cmocka_unit_test(test_shared_memory),
        cmocka_unit_test(test_hosts),
        cmocka_unit_test(buckets_are_as_many_as_the_link_wants),
        cmocka_unit_test(a_rank_has_its_share_of_the_memory),
        cmocka_unit_test(a_slow_rank_is_told_with_what_helps),
        cmocka_unit_test(rates_follow_from_the_model_and_the_batch),
        cmocka_unit_test(what_steps_follows_from_the_start_and_the_batch),
        cmocka_unit_test(embeddings_of_many_tokens_have_a_rate_of_their_own),
        cmocka_unit_test(test_shared_links),
        cmocka_unit_test(test_processors_for_nccl),
        cmocka_unit_test(test_this_machine),
        cmocka_unit_test(a_slow_rank_is_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
