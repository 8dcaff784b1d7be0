// test_program.c: the program as its users start it, alone and under mpirun: the same bits, the log, the plan, the files, and everything
// that can go wrong. All models are tiny: what is tested here is the program, not the kernels.
#define _GNU_SOURCE // prlimit
#include "test/program.h"

#include <dirent.h>

#include "corpus.h"
#include "runtime/options.h"

enum { T = 32, MICRO_BATCH = 2 }; // of base.txt

// One test and what it plays on; refusal: only for the tests of bad input.
typedef struct Refusal {
    const char *name, *arguments, *part; // part: what the message must hold
} Refusal;

typedef struct Scene {
    Stage *stage;
    const Refusal *refusal;
} Scene;

static Stage *stage_of(void **state) { return ((Scene *)*state)->stage; }

// Skips the test where there is no MPI.
static Stage *stage_with_ranks(void **state) {
    if (!stage_of(state)->has_mpi) {
        print_message("no MPI here: left out\n");
        skip();
    }
    return stage_of(state);
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// The same bits

// Starts three runs at once that may differ in time only, and checks that they do not differ in bits. Returns the bits.
static Fingerprint check_overlap(Stage *stage, int ranks, const char *options) {
    static const char *const ways[] = {"--overlap on", "--overlap off", "--chaos-ms 20"};
    Training trainings[3];
    Fingerprint prints[3];
    char text[512];
    for (int i = 0; i < 3; i++) {
        snprintf(text, sizeof text, "%s %s", options, ways[i]);
        trainings[i] = training_start(stage, ranks, text);
    }
    for (int i = 0; i < 3; i++) { prints[i] = training_fingerprint(stage, &trainings[i]); }
    for (int i = 1; i < 3; i++) {
        if (strcmp(prints[i].text, prints[0].text) != 0) {
            fail_msg("%d ranks, %s: %s gives %s, %s gives %s", ranks, options, ways[0], prints[0].text, ways[i], prints[i].text);
        }
    }
    return prints[0];
}

static void test_same_bits_ddp(void **state) { check_overlap(stage_with_ranks(state), 2, "--optimizer ddp"); }
static void test_same_bits_zero1(void **state) { check_overlap(stage_with_ranks(state), 2, "--optimizer zero1"); }
static void test_same_bits_acco(void **state) { check_overlap(stage_with_ranks(state), 2, "--optimizer acco --accumulate 4"); }
static void test_same_bits_acco_three_ranks(void **state) { check_overlap(stage_with_ranks(state), 3, "--optimizer acco"); }

static void test_same_bits_bf16_wire(void **state) {
    Stage *stage = stage_with_ranks(state);
    static const char *const rules[] = {"--optimizer ddp", "--optimizer zero1", "--optimizer acco"};
    for (int i = 0; i < 3; i++) {
        char narrow[128];
        snprintf(narrow, sizeof narrow, "%s --wire bf16", rules[i]);
        Fingerprint half = check_overlap(stage, 2, narrow);
        Training training = training_start(stage, 2, rules[i]);
        Fingerprint full = training_fingerprint(stage, &training);
        if (strcmp(half.text, full.text) == 0) { fail_msg("%s: --wire bf16 changes nothing, so it does nothing", rules[i]); }
    }
}

// Every shard but the last has the same size, and the parameters of this model do not divide by 3: the padding takes part.
static void test_zero1_is_ddp(void **state) {
    Stage *stage = stage_with_ranks(state);
    for (int ranks = 1; ranks <= 4; ranks++) {
        Training zero1 = training_start(stage, ranks, "--optimizer zero1");
        Training ddp = training_start(stage, ranks, "--optimizer ddp");
        Fingerprint expected = training_fingerprint(stage, &ddp);
        json_t *events = training_finish(stage, &zero1);
        assert_int_not_equal((int64_t)log_number(log_event_of(events, "start", 0), "parameters") % 3, 0);
        Fingerprint print = log_fingerprint(events);
        json_decref(events);
        if (strcmp(print.text, expected.text) != 0) { fail_msg("%d ranks: zero1 gives %s, ddp %s", ranks, print.text, expected.text); }
    }
}

static void test_one_rank_of_mpi_is_alone(void **state) {
    Stage *stage = stage_with_ranks(state);
    Training alone = training_start(stage, 0, ""), launched = training_start(stage, 1, "");
    Fingerprint a = training_fingerprint(stage, &alone), b = training_fingerprint(stage, &launched);
    assert_string_equal(a.text, b.text);
}

static void test_threads_change_nothing(void **state) {
    Stage *stage = stage_of(state);
    Training one = training_start(stage, 0, "--threads 1"), three = training_start(stage, 0, "--threads 3");
    Fingerprint a = training_fingerprint(stage, &one), b = training_fingerprint(stage, &three);
    assert_string_equal(a.text, b.text);
}

// Another seed gives another run: fingerprints are not constant.
static void test_seed_changes_bits(void **state) {
    Stage *stage = stage_of(state);
    Training one = training_start(stage, 0, "--seed 1"), two = training_start(stage, 0, "--seed 2");
    Fingerprint a = training_fingerprint(stage, &one), b = training_fingerprint(stage, &two);
    assert_string_not_equal(a.text, b.text);
}

// The same global batch over 1, 2 and 4 ranks holds the same samples; only the order of summation differs.
static void test_ranks_see_the_same_data(void **state) {
    Stage *stage = stage_with_ranks(state);
    static const int ranks[] = {1, 2, 4};
    Training trainings[3];
    json_t *events[3];
    char options[128];
    for (int i = 0; i < 3; i++) {
        snprintf(options, sizeof options, "--optimizer zero1 --tokens 8k --report-every 1 --accumulate %d", 8 / ranks[i]);
        trainings[i] = training_start(stage, ranks[i], options);
    }
    for (int i = 0; i < 3; i++) { events[i] = training_finish(stage, &trainings[i]); }
    int reports = 0;
    for (json_t *first; (first = log_event_of(events[0], "report", reports)) != NULL; reports++) {
        for (int i = 1; i < 3; i++) {
            json_t *other = log_event_of(events[i], "report", reports);
            assert_non_null(other);
            assert_int_equal(log_number(other, "tokens"), log_number(first, "tokens"));
            assert_close(log_number(other, "perfect_loss"), log_number(first, "perfect_loss"), 1e-9, "perfect loss: other samples");
            assert_close(log_number(other, "loss"), log_number(first, "loss"), 1e-4, "loss");
            assert_close(log_number(other, "lr"), log_number(first, "lr"), 1e-9, "learning rate");
        }
    }
    assert_int_equal(reports, 8000 / (8 * MICRO_BATCH * T) + 1);
    for (int i = 0; i < 3; i++) { json_decref(events[i]); }
}

// The fast rank computes on while it waits for the slow one; the program itself compares the replicas at the end.
static void test_adaptive_with_a_slow_rank(void **state) {
    Stage *stage = stage_with_ranks(state);
    json_t *events = train(stage, 2, "--accumulate auto --slow-rank 1 --slow-ms 30 --tokens 60k --report-every 1 --timeout-s 30");
    json_t *report = log_event_of(events, "report", -1), *end = log_event_of(events, "end", -1);
    log_fingerprint(events);
    if (!(log_number(report, "grads_per_commit") > 2 * 2)) { fail_msg("%g gradients per commit", log_number(report, "grads_per_commit")); }
    assert_int_equal(log_number(report, "commit"), log_number(end, "commit"));
    assert_true(log_number(end, "tokens") >= 60000);
    json_decref(events);
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// The log, the plan, the files

static void check_start_event(json_t *event, int ranks) {
    double sum = 0;
    const char *name;
    json_t *value, *options = json_object_get(event, "options"), *memory = json_object_get(event, "memory");
    assert_non_null(event);
    assert_true(json_is_string(json_object_get(event, "version")) && json_is_string(json_object_get(event, "transport")));
    assert_int_equal(json_array_size(json_object_get(event, "ranks")), ranks);
    for (int rank = 0; rank < ranks; rank++) {
        json_t *entry = json_array_get(json_object_get(event, "ranks"), (size_t)rank);
        assert_true(json_is_string(json_object_get(entry, "host")));
        assert_true(log_number(entry, "pid") > 1 && log_number(entry, "threads") == 1);
    }
    json_object_foreach(memory, name, value) { sum += strcmp(name, "total") == 0 ? 0 : (double)json_integer_value(value); }
    assert_true(sum > 0 && sum <= log_number(memory, "total"));
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
        if (json_object_get(options, option_table[i].name) == NULL) { fail_msg("--%s is not in the start event", option_table[i].name); }
    }
}

static void check_report_event(json_t *event, int64_t commit, int grads_per_commit) {
    static const char *const fields[] = {"loss",       "lr",               "grad_norm",  "tokens_per_second",
                                         "compute_ms", "communication_ms", "exposed_ms", "seconds"};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) { assert_true(log_number(event, fields[i]) >= 0); }
    assert_int_equal(log_number(event, "commit"), commit);
    assert_int_equal(log_number(event, "grads"), commit * grads_per_commit);
    assert_int_equal(log_number(event, "tokens"), commit * grads_per_commit * MICRO_BATCH * T);
    assert_close(log_number(event, "grads_per_commit"), grads_per_commit, 1e-9, "gradients per commit");
    assert_true(log_number(event, "compute_ms") > 0 && log_number(event, "lr") > 0 && log_number(event, "loss") < 7);
}

// The curve as columns: a heading, one row for each report and each validation, eight cells each.
static void check_table(const Stage *stage, const char *out, int rows) {
    char path[STAGE_PATH_SIZE], name[128];
    snprintf(name, sizeof name, "%s/progress.tsv", out);
    char *text = file_read(stage_path(stage, name, path));
    assert_non_null(text);
    assert_int_equal(text_lines(text), rows + 1);
    assert_int_equal(text_count(text, "\t"), 7 * (rows + 1));
    free(text);
}

static void check_log(Stage *stage, int ranks, const char *options, int grads_per_commit) {
    Training training = training_start(stage, ranks, options);
    json_t *events = training_finish(stage, &training), *event;
    check_start_event(json_array_get(events, 0), ranks > 0 ? ranks : 1);
    int64_t commits = (4000 + grads_per_commit * MICRO_BATCH * T - 1) / (grads_per_commit * MICRO_BATCH * T);
    int reports = 0, validations = 0;
    double seconds = 0;
    for (; (event = log_event_of(events, "report", reports)) != NULL; reports++) {
        check_report_event(event, 4 * (reports + 1) < commits ? 4 * (reports + 1) : commits, grads_per_commit);
        assert_true(log_number(event, "seconds") >= seconds);
        seconds = log_number(event, "seconds");
    }
    assert_int_equal(reports, (commits + 3) / 4);
    for (; (event = log_event_of(events, "validation", validations)) != NULL; validations++) {
        assert_true(log_number(event, "loss") > 0 && log_number(event, "perfect_loss") > 0 && log_number(event, "tokens") > 0);
        assert_true(log_number(event, "commit") <= commits);
    }
    assert_int_equal(validations, (commits + 6) / 7);
    event = json_array_get(events, json_array_size(events) - 1);
    assert_string_equal(json_string_value(json_object_get(event, "event")), "end");
    assert_string_equal(json_string_value(json_object_get(event, "reason")), "done");
    assert_int_equal(log_number(event, "commit"), commits);
    assert_int_equal(log_number(event, "tokens"), commits * grads_per_commit * MICRO_BATCH * T);
    assert_true(log_number(event, "seconds") > 0 && log_number(event, "tokens_per_second") > 0);
    check_table(stage, training.out, reports + validations);
    json_decref(events);
}

static void test_log_alone(void **state) { check_log(stage_of(state), 0, "--val-every 7 --optimizer ddp --accumulate 3", 3); }
static void test_log_two_ranks(void **state) { check_log(stage_with_ranks(state), 2, "--val-every 7", 4); }

// Pages are touched whole, so a model this small is the hardest to predict.
static void check_memory(Stage *stage, int ranks, const char *options) {
    json_t *events = train(stage, ranks, options), *end = log_event_of(events, "end", -1);
    double planned = log_number(end, "planned_bytes"), used = log_number(end, "used_bytes");
    json_decref(events);
    if (!(fabs(used - planned) <= 0.02 * planned)) {
        fail_msg("%d ranks, %s: planned %.0f bytes, used %.0f: %+.1f %%", ranks, options, planned, used, 100 * (used - planned) / planned);
    }
}

static void test_memory_is_as_planned_alone(void **state) {
    check_memory(stage_of(state), 0, "--optimizer ddp");
    check_memory(stage_of(state), 0, "--optimizer zero1");
    check_memory(stage_of(state), 0, "--optimizer acco");
}

static void test_memory_is_as_planned_two_ranks(void **state) {
    check_memory(stage_with_ranks(state), 2, "--optimizer ddp");
    check_memory(stage_of(state), 2, "--optimizer zero1");
    check_memory(stage_of(state), 2, "--optimizer acco");
    check_memory(stage_of(state), 2, "--optimizer acco --wire bf16");
}

static void check_plan(Stage *stage, int ranks, const char *options) {
    char arguments[512];
    json_t *events = train(stage, ranks, options);
    int64_t planned = (int64_t)log_number(log_event_of(events, "end", -1), "planned_bytes");
    json_decref(events);
    snprintf(arguments, sizeof arguments, "plan --config base.txt --ranks %d %s", ranks > 0 ? ranks : 1, options);
    Outcome outcome = program_run(stage, 0, arguments);
    outcome_check(&outcome, 0, arguments);
    const char *total = strstr(outcome.output, "\ntotal ");
    assert_non_null(total);
    assert_int_equal(strtoll(total + 7, NULL, 10), planned);
    assert_string_equal(outcome.errors, "");
}

static void test_plan_equals_run(void **state) {
    check_plan(stage_of(state), 0, "--optimizer ddp");
    check_plan(stage_of(state), 0, "--optimizer acco --micro-batch 3 --threads 2");
}

static void test_plan_equals_run_two_ranks(void **state) {
    check_plan(stage_with_ranks(state), 2, "--optimizer zero1");
    check_plan(stage_of(state), 2, "--optimizer acco --wire bf16");
}

// 2.7 billion parameters and 64 ranks, on whatever machine this is: a plan allocates nothing.
static void test_plan_of_a_large_model(void **state) {
    Outcome outcome = program_run(stage_of(state), 0, "plan --model 2.7B --ranks 64 --threads 8");
    outcome_check(&outcome, 0, "plan --model 2.7B");
    const char *total = strstr(outcome.output, "\ntotal ");
    assert_non_null(total);
    assert_true(strtoll(total + 7, NULL, 10) > 2 * 4 * 2650000000LL);
}

// The file without the line of --out, which is the only one that may differ.
static char *read_saved(const Stage *stage, const char *name) {
    char path[STAGE_PATH_SIZE];
    char *text = file_read(stage_path(stage, name, path));
    assert_non_null(text);
    char *out = strstr(text, "\nout = ");
    assert_non_null(out);
    char *end = out + 1 + strcspn(out + 1, "\n");
    memmove(out, end, strlen(end) + 1);
    return text;
}

// From the sample to the names of the files, as the terminal shows them.
static void cut_sample(char *output, const char *what) {
    char *begin = strstr(output, "\nsample "), *end = strstr(output, "\nlog ");
    if (begin == NULL || end == NULL || end < begin) { fail_msg("%s: there is no sample in: %s", what, output); }
    *end = '\0';
    memmove(output, begin, strlen(begin) + 1);
}

static void test_saved_config_repeats_the_run(void **state) {
    Stage *stage = stage_of(state);
    Outcome first = program_run(stage, 0, "--config base.txt --optimizer zero1 --accumulate 3 --lr 0.0035 --beta2 0.97 --seed 7 "
                                          "--weight-decay 0.07 --sample-tokens 60 --prompt ' one \"two\" # three\\four' --report-every 1 "
                                          "--out saved-1");
    outcome_check(&first, 0, "the first run");
    Outcome second = program_run(stage, 0, "--config saved-1/config.txt --out saved-2");
    outcome_check(&second, 0, "the run from the saved configuration");
    json_t *events[2] = {log_read(stage, "saved-1"), log_read(stage, "saved-2")};
    assert_string_equal(log_fingerprint(events[0]).text, log_fingerprint(events[1]).text);
    int reports = 0;
    for (json_t *report; (report = log_event_of(events[0], "report", reports)) != NULL; reports++) {
        json_t *other = log_event_of(events[1], "report", reports);
        assert_true(json_equal(json_object_get(report, "loss"), json_object_get(other, "loss")));
        assert_true(json_equal(json_object_get(report, "lr"), json_object_get(other, "lr")));
    }
    assert_true(reports > 15);
    json_decref(events[0]);
    json_decref(events[1]);
    char *saved[2] = {read_saved(stage, "saved-1/config.txt"), read_saved(stage, "saved-2/config.txt")};
    assert_string_equal(saved[0], saved[1]);
    free(saved[0]);
    free(saved[1]);
    cut_sample(first.output, "the first run");
    cut_sample(second.output, "the second run");
    text_check(first.output, " one \"two\" # three\\four", "the sample");
    assert_string_equal(first.output, second.output);
}

// A byte of this corpus has corpus_entropy(T) = 0.057 nats; this model is at 5.5 before training and below 0.1 after 50 thousand tokens.
static void test_learns_the_builtin_corpus(void **state) {
    Stage *stage = stage_of(state);
    json_t *events = train(stage, 0, "--tokens 60k --micro-batch 8 --lr 0.01 --report-every 1 --val-batches 64 --val-every end");
    json_t *validation = log_event_of(events, "validation", -1);
    double loss = log_number(validation, "loss"), perfect = log_number(validation, "perfect_loss");
    assert_close(log_number(log_event_of(events, "report", 0), "loss"), log(256), 0.3, "the loss before training");
    assert_close(perfect, corpus_entropy(T), 0.008, "the loss of a perfect model");
    if (!(loss < 0.2)) { fail_msg("the validation loss is %g after 60 thousand tokens", loss); }
    if (!(loss > perfect - 0.005)) { fail_msg("the validation loss is %g, better than the perfect %g", loss, perfect); }
    json_decref(events);
}

static void test_trains_on_a_text(void **state) {
    Stage *stage = stage_of(state);
    json_t *events = train(stage, 0, "--data text.txt --tokens 20k --lr 0.01 --accumulate 4");
    json_t *first = log_event_of(events, "report", 0), *last = log_event_of(events, "report", -1);
    assert_true(log_number(last, "loss") < log_number(first, "loss") - 1);
    assert_true(json_is_null(json_object_get(last, "perfect_loss"))); // nobody knows the entropy of a file
    json_decref(events);
}

// What goes to a file or a pipe is for reading: no bar, no cursor movements; also under mpirun, which gives its ranks a terminal.
static void test_output_in_a_file_is_plain(void **state) {
    Stage *stage = stage_of(state);
    for (int ranks = 0; ranks <= (stage->has_mpi ? 2 : 0); ranks += 2) {
        Outcome outcome = program_run(stage, ranks, "--config base.txt");
        outcome_check(&outcome, 0, "a short run");
        if (strchr(outcome.output, '\033') != NULL) { fail_msg("%d ranks: the output holds escape sequences", ranks); }
        if (strchr(outcome.output, '\r') != NULL) { fail_msg("%d ranks: the output holds carriage returns", ranks); }
    }
}

static void test_readme_has_the_options(void **state) {
    char path[PATH_MAX + 16];
    snprintf(path, sizeof path, "%s/README.md", stage_of(state)->root);
    char *readme = file_read(path), *expected = NULL;
    size_t size = 0;
    if (readme == NULL) { fail_msg("there is no %s: PROJECT_ROOT says where it is", path); }
    FILE *file = open_memstream(&expected, &size);
    options_print_markdown(file);
    fclose(file);
    const char *open_mark = "<!-- options -->\n", *close_mark = "<!-- /options -->";
    char *begin = strstr(readme, open_mark), *end = strstr(readme, close_mark);
    if (begin == NULL || end == NULL || end < begin) { fail_msg("%s has no section from %s to %s", path, "<!-- options -->", close_mark); }
    *end = '\0';
    if (strcmp(begin + strlen(open_mark), expected) != 0) { fail_msg("the options of %s are not those of the program: make readme", path); }
    free(expected);
    free(readme);
}

static void test_help_names_every_option(void **state) {
    static const char *const ways[] = {"--help", "help", "-h", "--optimiser x --help"};
    for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++) {
        Outcome outcome = program_run(stage_of(state), 0, ways[i]);
        outcome_check(&outcome, 0, ways[i]);
        assert_string_equal(outcome.errors, "");
        for (int j = 0; j < OPTION_COUNT_OF_TABLE; j++) {
            char name[64];
            snprintf(name, sizeof name, "  --%s ", option_table[j].name);
            text_check(outcome.output, name, ways[i]);
        }
    }
}

static void test_version(void **state) {
    Outcome outcome = program_run(stage_of(state), 0, "--version");
    outcome_check(&outcome, 0, "--version");
    text_check(outcome.output, ACCO_VERSION, "--version");
    assert_int_equal(text_lines(outcome.output), 1);
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// What the user gets wrong: exit code 2, one line, and no trace. The commands run in an empty directory of the stage.

#define BASE "--config ../base.txt "

static const Refusal refusals[] = {
    {"unknown option", BASE "--optimiser acco", "--optimizer"},
    {"unknown option far from all", BASE "--qqqqqqqqqqqq 1", "--help"},
    {"unknown command", "trian", "train"},
    {"word that is no option", "train acco", "unexpected word acco"},
    {"option twice", BASE "--seed 1 --seed 1", "twice"},
    {"option without a value", BASE "--seed", "--seed needs a value"},
    {"bad integer", BASE "--accumulate 2x", "not a whole number"},
    {"bad real", BASE "--lr fast", "not a number"},
    {"nan as a number", BASE "--lr nan", "not a number"},
    {"bad count", BASE "--tokens 1.5T", "not a whole number"},
    {"bad switch", BASE "--overlap maybe", "on or off"},
    {"unknown rule", BASE "--optimizer zero2", "zero1"},
    {"integer out of range", BASE "--micro-batch 0", "1 .. 65536"},
    {"real out of range", BASE "--beta1 1", "0 .. 0.999999"},
    {"huge integer", BASE "--seed 99999999999999999999", "out of range"},
    {"missing configuration file", "--config ../absent.txt", "cannot read ../absent.txt"},
    {"bad line of a configuration file", "--config ../typing.txt", "typing.txt:2: unknown option micro-bach: did you mean micro-batch?"},
    {"missing data", BASE "--data ../absent.txt", "no file '../absent.txt'"},
    {"missing validation data", BASE "--val-data ../absent.txt", "no file '../absent.txt'"},
    {"empty data", BASE "--data ../empty.txt", "is empty"},
    {"data is a directory without tokens", BASE "--data ../used", "holds no .bin file"},
    {"header that promises more", BASE "--data ../promises.bin", "promises 1000 tokens"},
    {"header that is cut", BASE "--data ../cut.bin", "truncated"},
    {"odd number of bytes", BASE "--data ../odd.bin", "an odd number"},
    {"token beyond the vocabulary", BASE "--data ../beyond.bin", "token 300 at position 70 "},
    {"sequence longer than the positions", BASE "--seq-len 33", "at most 32"},
    {"text too short for a window", BASE "--data ../word.txt", "--seq-len"},
    {"text too short for the batch", BASE "--data ../short.txt --micro-batch 50 --tokens 1M", "--micro-batch to"},
    {"tokens less than a commit", BASE "--tokens 100", "less than one commit"},
    {"out below a file", BASE "--out ../empty.txt/x", "Not a directory"},
    {"out is a file", BASE "--out ../empty.txt", "not a directory"},
    {"out where nothing can be made", BASE "--out /proc/x", "cannot create the directory /proc/x"},
    {"out of an earlier run", BASE "--out ../used", "already holds"},
    {"fp16", BASE "--precision fp16", "use fp32"},
    {"bf16 arithmetic", BASE "--precision bf16", "use fp32"},
    {"acco with an odd number", BASE "--optimizer acco --accumulate 3", "use 2 or 4"},
    {"ddp with auto", BASE "--optimizer ddp --accumulate auto", "needs --optimizer acco"},
    {"auto without overlap", BASE "--accumulate auto --overlap off", "--overlap on"},
    {"minimum rate above the rate", BASE "--lr 0.001 --min-lr 0.002", "is above --lr"},
    {"slow rank without a time", BASE "--slow-rank 0", "needs --slow-ms"},
    {"slow rank that is not there", BASE "--slow-rank 7 --slow-ms 1", "--slow-rank 7"},
    {"prompt without a sample", BASE "--prompt x", "would be no sample"},
    {"ranks outside a plan", BASE "--ranks 2", "mpirun -np 2"},
    {"unknown model", BASE "--model tinny", "tiny"},
    {"unknown model of a plan", "plan --model tinny", "tiny"},
    {"model file that is absent", BASE "--model ../absent.json", "No such file"},
    {"model file with bad json", BASE "--model ../broken.json", "near"},
    {"model of another type", BASE "--model ../type.json", "gpt_neo"},
    {"model with dropout", BASE "--model ../dropout.json", "dropout is not supported"},
    {"model with a small vocabulary", BASE "--model ../bytes.json", "at least 256"},
    {"line end in a name", BASE "--model \"$(printf 'a\\nb')\"", "unknown model"},
    {"line end in a path", BASE "--data \"$(printf '../a\\nb')\"", "../a"},
};

enum { REFUSALS = sizeof refusals / sizeof refusals[0], AT_ONCE = 6 };

// A new empty directory, as an absolute path.
static void make_empty_directory(Stage *stage, char path[STAGE_PATH_SIZE]) {
    char name[64];
    snprintf(name, sizeof name, "empty-%d", ++stage->count);
    assert_int_equal(mkdir(stage_path(stage, name, path), 0777), 0);
}

static bool directory_is_empty(const char *path) {
    DIR *directory = opendir(path);
    int entries = 0;
    while (readdir(directory) != NULL) { entries++; }
    closedir(directory);
    return entries == 2;
}

// What is wrong with a refusal, or NULL.
static const char *refusal_fault(const Outcome *outcome, const char *directory, const char *part, bool alone) {
    if (outcome->exit_code != 2) { return "the exit code is not 2"; }
    if (text_count(outcome->errors, "train_gpt: ") != 1) { return "there is not one message"; }
    if (alone && strncmp(outcome->errors, "train_gpt: ", 11) != 0) { return "something stands before the message"; }
    if (alone && text_lines(outcome->errors) != 1) { return "the message has not one line"; }
    if (strstr(outcome->errors, part) == NULL) { return "the message does not say it"; }
    if (outcome->output[0] != '\0') { return "something was printed"; }
    return directory_is_empty(directory) ? NULL : "it left something in the working directory";
}

static void test_refusal(void **state) {
    Scene *scene = (Scene *)*state;
    const Refusal *refusal = scene->refusal;
    char directory[STAGE_PATH_SIZE];
    make_empty_directory(scene->stage, directory);
    Setting setting = {directory, 0, false, NULL, NULL};
    Program program = program_start(scene->stage, 0, &setting, refusal->arguments);
    Outcome outcome = program_finish(scene->stage, &program);
    const char *fault = refusal_fault(&outcome, directory, refusal->part, true);
    if (fault != NULL) {
        fail_msg("%s: %s (\"%s\"): exit code %d\nerrors: %.1000s\noutput: %.300s", refusal->arguments, fault, refusal->part,
                 outcome.exit_code, outcome.errors, outcome.output);
    }
}

// All of them again with two ranks, some at once: each is said once.
static void test_refusals_of_two_ranks(void **state) {
    Stage *stage = stage_with_ranks(state);
    Program programs[AT_ONCE];
    char directories[AT_ONCE][STAGE_PATH_SIZE];
    int faults = 0;
    for (int first = 0; first < REFUSALS; first += AT_ONCE) {
        int count = REFUSALS - first < AT_ONCE ? REFUSALS - first : (int)AT_ONCE;
        for (int i = 0; i < count; i++) {
            make_empty_directory(stage, directories[i]);
            Setting setting = {directories[i], 0, false, NULL, NULL};
            programs[i] = program_start(stage, 2, &setting, refusals[first + i].arguments);
        }
        for (int i = 0; i < count; i++) {
            Outcome outcome = program_finish(stage, &programs[i]);
            const Refusal *refusal = &refusals[first + i];
            const char *fault = refusal_fault(&outcome, directories[i], refusal->part, false);
            if (fault == NULL) { continue; }
            print_error("%s: %s: exit code %d\n%.700s\n", refusal->arguments, fault, outcome.exit_code, outcome.errors);
            faults++;
        }
    }
    assert_int_equal(faults, 0);
}

// Root may write anywhere, so this one is for everybody else.
static void test_refuses_out_without_permission(void **state) {
    Stage *stage = stage_of(state);
    char directory[STAGE_PATH_SIZE], arguments[2 * STAGE_PATH_SIZE];
    if (geteuid() == 0) {
        print_message("root may write everywhere: left out\n");
        skip();
    }
    make_empty_directory(stage, directory);
    assert_int_equal(chmod(directory, 0555), 0);
    snprintf(arguments, sizeof arguments, "--config base.txt --out %s", directory);
    Outcome outcome = program_run(stage, 0, arguments);
    outcome_check(&outcome, 2, arguments);
    text_check(outcome.errors, "Permission denied", arguments);
}

// A launcher that does not speak this MPI starts copies that are all alone.
static void test_refuses_independent_copies(void **state) {
    Stage *stage = stage_of(state);
    char directory[STAGE_PATH_SIZE];
    make_empty_directory(stage, directory);
    Setting setting = {directory, 0, false, "8", "3"};
    Program program = program_start(stage, 0, &setting, BASE);
    Outcome outcome = program_finish(stage, &program);
    const char *fault = refusal_fault(&outcome, directory, "8 independent copies were started", true);
    if (fault != NULL) { fail_msg("%s: exit code %d: %s", fault, outcome.exit_code, outcome.errors); }
    text_check(outcome.errors, "mpirun", "the advice");
}

static void test_refuses_ranks_with_other_options(void **state) {
    Stage *stage = stage_with_ranks(state);
    char arguments[2 * STAGE_PATH_SIZE];
    snprintf(arguments, sizeof arguments, "--config base.txt --out m : -np 1 '%s' --config base.txt --out m --seed 2", stage->binary);
    Outcome outcome = program_run(stage, 1, arguments);
    outcome_check(&outcome, 2, "ranks with other options");
    text_check(outcome.errors, "rank 1", "ranks with other options");
    text_check(outcome.errors, "other options", "ranks with other options");
    assert_int_equal(text_count(outcome.errors, "train_gpt: "), 1);
}

// ---------------------------------------------------------------------------------------------------------------------------------------
// What the system does to a run: exit code 3 and the whole job down, within seconds

// Waits until the run has written a report; fills the process ids of its ranks from the start event.
static void wait_for_report(Stage *stage, const Training *training, pid_t *pids, int ranks) {
    char path[STAGE_PATH_SIZE], name[128];
    double until = program_clock() + 60;
    int exit_code;
    snprintf(name, sizeof name, "%s/log.jsonl", training->out);
    stage_path(stage, name, path);
    for (;;) {
        char *text = file_read(path);
        if (text != NULL && strstr(text, "{\"event\":\"report\"") != NULL) {
            text[strcspn(text, "\n")] = '\0';
            json_t *start = json_loads(text, 0, NULL), *list = json_object_get(start, "ranks");
            assert_int_equal(json_array_size(list), ranks);
            for (int i = 0; i < ranks; i++) { pids[i] = (pid_t)log_number(json_array_get(list, (size_t)i), "pid"); }
            json_decref(start);
            free(text);
            return;
        }
        free(text);
        if (program_clock() > until) { fail_msg("%s: no report for 60 s", training->what); }
        if (program_has_ended(stage, training->program.pid, 0, &exit_code)) { fail_msg("%s: ended early, %d", training->what, exit_code); }
        program_pause(0.02);
    }
}

// Whether the process has ended within the time; a zombie that nobody fetches has.
static bool process_is_gone(pid_t pid, double seconds) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    for (double until = program_clock() + seconds; program_clock() < until; program_pause(0.01)) {
        char *text = file_read(path);
        const char *name_end = text == NULL ? NULL : strrchr(text, ')');
        bool gone = name_end == NULL || name_end[2] == 'Z' || name_end[2] == 'X';
        free(text);
        if (gone) { return true; }
    }
    return false;
}

static const char endless[] = "--tokens 1000G --report-every 20 --val-batches none";

static void check_killed_rank(void **state, int victim) {
    Stage *stage = stage_with_ranks(state);
    pid_t pids[2];
    char name[32];
    Training training = training_start(stage, 2, endless);
    wait_for_report(stage, &training, pids, 2);
    assert_int_equal(kill(pids[victim], SIGKILL), 0);
    Outcome outcome = program_finish_within(stage, &training.program, 10);
    if (outcome.exit_code <= 0) { fail_msg("exit code %d (-1: still there after 10 s): %s", outcome.exit_code, outcome.errors); }
    assert_true(process_is_gone(pids[1 - victim], 5));
    snprintf(name, sizeof name, "rank %d", victim);
    text_check(outcome.errors, name, "a killed rank");
    json_decref(log_read(stage, training.out)); // every line is whole
}

static void test_killed_rank(void **state) { check_killed_rank(state, 1); }
static void test_killed_rank_zero(void **state) { check_killed_rank(state, 0); }

static void test_stopped_rank(void **state) {
    Stage *stage = stage_with_ranks(state);
    pid_t pids[2];
    char options[128];
    snprintf(options, sizeof options, "%s --timeout-s 2", endless);
    Training training = training_start(stage, 2, options);
    wait_for_report(stage, &training, pids, 2);
    assert_int_equal(kill(pids[1], SIGSTOP), 0);
    Outcome outcome = program_finish_within(stage, &training.program, 15);
    bool gone = process_is_gone(pids[1], 5);
    if (!gone) { kill(pids[1], SIGKILL); }
    outcome_check(&outcome, 3, "a stopped rank");
    assert_true(gone);
    // It may have been stopped before it sent or before it received. mpirun wakes it to end it: it must not blame rank 0 then.
    const char *place = strstr(outcome.errors, "] "), *end = strstr(outcome.errors, ": rank 1 did not ");
    if (place == NULL || end == NULL || end < place + 5) { fail_msg("no message names operation and rank 1: %s", outcome.errors); }
    if (strstr(outcome.errors, "rank 0 did not") != NULL) { fail_msg("rank 0 is blamed, too: %s", outcome.errors); }
    text_check(outcome.errors, "commit ", "a stopped rank");
    json_decref(log_read(stage, training.out));
}

static void check_disk_full(const Outcome *outcome, int exit_code, const char *file, const char *reason) {
    outcome_check(outcome, exit_code, "disk full");
    assert_int_equal(text_count(outcome->errors, "train_gpt: "), 1);
    text_check(outcome->errors, file, "disk full");
    text_check(outcome->errors, reason, "disk full");
}

// No file of this process may grow beyond 8 kB, which the log does after two dozen reports: a disk that fills while the run goes on.
static void test_disk_full_while_running(void **state) {
    Stage *stage = stage_of(state);
    Setting setting = {NULL, 8192, true, NULL, NULL};
    Program program = program_start(stage, 0, &setting, "--config base.txt --tokens 100k --report-every 1 --out full-1");
    Outcome outcome = program_finish(stage, &program);
    check_disk_full(&outcome, 3, "full-1/log.jsonl", "File too large");
    assert_int_equal(text_lines(outcome.errors), 1);
    json_t *events = log_read(stage, "full-1"); // the half line is gone
    assert_non_null(log_event_of(events, "report", 5));
    json_decref(events);
}

static void make_full_directory(const Stage *stage, const char *name, const char *file) {
    char path[STAGE_PATH_SIZE], link_path[STAGE_PATH_SIZE + 64];
    if (access("/dev/full", W_OK) != 0) {
        print_message("there is no /dev/full here: left out\n");
        skip();
    }
    assert_int_equal(mkdir(stage_path(stage, name, path), 0777), 0);
    snprintf(link_path, sizeof link_path, "%s/%s", path, file);
    assert_int_equal(symlink("/dev/full", link_path), 0);
}

// Full from the beginning: nothing was trained yet, but it is the system that fails.
static void test_disk_full_at_the_start(void **state) {
    Stage *stage = stage_of(state);
    make_full_directory(stage, "full-2", "progress.tsv");
    Outcome outcome = program_run(stage, 0, "--config base.txt --out full-2");
    check_disk_full(&outcome, 3, "full-2/progress.tsv", "No space left on device");
    make_full_directory(stage, "full-3", "config.txt");
    outcome = program_run(stage, 0, "--config base.txt --out full-3");
    check_disk_full(&outcome, 3, "full-3/config.txt", "No space left on device");
}

static void test_disk_full_of_two_ranks(void **state) {
    Stage *stage = stage_with_ranks(state);
    pid_t pids[2];
    Setting setting = {NULL, 0, true, NULL, NULL};
    char arguments[512];
    Training training;
    memset(&training, 0, sizeof training);
    strcpy(training.out, "full-4");
    strcpy(training.what, "disk full with two ranks");
    snprintf(arguments, sizeof arguments, "--config base.txt --out full-4 %s", endless);
    training.program = program_start(stage, 2, &setting, arguments);
    wait_for_report(stage, &training, pids, 2);
    struct rlimit limit = {1, 1};
    assert_int_equal(prlimit(pids[0], RLIMIT_FSIZE, &limit, NULL), 0);
    Outcome outcome = program_finish_within(stage, &training.program, 15);
    check_disk_full(&outcome, 3, "full-4/log.jsonl", "File too large");
    assert_true(process_is_gone(pids[0], 5) && process_is_gone(pids[1], 5));
}

// Without --beta2 and with almost no --eps a gradient of zero after another one is an infinite step.
static void check_not_finite(Stage *stage, int ranks, const char *out) {
    char arguments[512];
    snprintf(arguments, sizeof arguments,
             "--config base.txt --out %s --lr 100 --grad-clip off --warmup 0 --weight-decay 0 --beta2 0 --eps 1e-30 --report-every 1", out);
    Outcome outcome = program_run(stage, ranks, arguments);
    outcome_check(&outcome, 3, "a loss that is not finite");
    assert_int_equal(text_count(outcome.errors, "train_gpt: "), 1);
    json_t *events = log_read(stage, out), *end = log_event_of(events, "end", -1);
    assert_non_null(end);
    assert_string_equal(json_string_value(json_object_get(end, "reason")), "not finite");
    int64_t commit = (int64_t)log_number(end, "commit");
    char expected[64];
    snprintf(expected, sizeof expected, "finite after commit %lld", (long long)commit);
    if (strstr(outcome.errors, "is not a finite number") != NULL) {
        snprintf(expected, sizeof expected, "is not a finite number after commit %lld", (long long)commit);
    }
    text_check(outcome.errors, expected, "the commit");
    json_t *report = log_event_of(events, "report", -1);
    assert_true(report == NULL || (int64_t)log_number(report, "commit") <= commit);
    json_decref(events);
}

static void test_not_finite(void **state) { check_not_finite(stage_of(state), 0, "nan-1"); }
static void test_not_finite_two_ranks(void **state) { check_not_finite(stage_with_ranks(state), 2, "nan-2"); }

// ---------------------------------------------------------------------------------------------------------------------------------------
// The stage's files

// A model of 34 thousand parameters. `change` replaces a value or adds one.
static void write_model(const Stage *stage, const char *name, const char *change, json_t *value) {
    json_t *model = json_pack("{s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:[[[s, s], i]]}", "model_type", "gpt_neo", "num_layers", 2,
                              "hidden_size", 32, "num_heads", 2, "window_size", 8, "max_position_embeddings", T, "vocab_size", 256,
                              "attention_types", "global", "local", 1);
    if (change != NULL) { json_object_set_new(model, change, value); }
    char *text = json_dumps(model, JSON_INDENT(2));
    stage_write(stage, name, text);
    free(text);
    json_decref(model);
}

// llm.c's token file: a header of 256 words, then ids of two bytes. `promised`: what the header says; ids are 1, but 300 at `strange`.
static void write_tokens(const Stage *stage, const char *name, int promised, int count, int strange) {
    char path[STAGE_PATH_SIZE];
    unsigned char bytes[1024 + 2 * 512];
    int32_t header[3] = {20240520, 1, promised};
    assert_true(count <= 512);
    memset(bytes, 0, sizeof bytes);
    memcpy(bytes, header, sizeof header);
    for (int i = 0; i < count; i++) {
        uint16_t token = i == strange ? 300 : 1;
        memcpy(bytes + 1024 + 2 * i, &token, sizeof token);
    }
    file_write(stage_path(stage, name, path), bytes, (size_t)(1024 + 2 * count));
}

static void write_data(const Stage *stage) {
    static const char sentence[] = "A small ship sailed over the quiet sea, and the wind was kind to it.\n";
    char path[STAGE_PATH_SIZE], text[64 * sizeof sentence] = "";
    for (int i = 0; i < 60; i++) { strcat(text, sentence); }
    stage_write(stage, "text.txt", text);
    text[600] = '\0';
    stage_write(stage, "short.txt", text);
    stage_write(stage, "word.txt", "sea\n");
    stage_write(stage, "empty.txt", "");
    write_tokens(stage, "promises.bin", 1000, 100, -1);
    write_tokens(stage, "beyond.bin", 500, 500, 70);
    int32_t cut[3] = {20240520, 1, 1000};
    file_write(stage_path(stage, "cut.bin", path), cut, sizeof cut);
    file_write(stage_path(stage, "odd.bin", path), text, 401);
}

static void write_stage(const Stage *stage) {
    char path[STAGE_PATH_SIZE], base[2 * STAGE_PATH_SIZE];
    write_model(stage, "model.json", NULL, NULL);
    write_model(stage, "type.json", "model_type", json_string("gpt2"));
    write_model(stage, "dropout.json", "resid_dropout", json_real(0.1));
    write_model(stage, "bytes.json", "vocab_size", json_integer(99));
    stage_write(stage, "broken.json", "{\"model_type\": \"gpt_neo\",\n \"num_layers\": }\n");
    stage_write(stage, "typing.txt", "seed = 1\nmicro-bach = 2\n");
    snprintf(base, sizeof base,
             "# what most tests share\nmodel = %s\nmicro-batch = %d\ntokens = 4k\nreport-every = 4\nval-batches = 2\nsample-tokens = none\n"
             "threads = 1\ntimeout-s = 100\n",
             stage_path(stage, "model.json", path), MICRO_BATCH);
    stage_write(stage, "base.txt", base);
    write_data(stage);
    assert_int_equal(mkdir(stage_path(stage, "used", path), 0777), 0);
    stage_write(stage, "used/log.jsonl", "");
}

static int end_programs(void **state) {
    stage_end_all(stage_of(state));
    return 0;
}

#define PROGRAM_TEST(function) cmocka_unit_test_prestate_setup_teardown(function, NULL, end_programs, &plain)

int main(void) {
    static Stage stage;
    static Scene plain, scenes[REFUSALS];
    plain.stage = &stage;
    const struct CMUnitTest tests[] = {
        PROGRAM_TEST(test_same_bits_ddp),
        PROGRAM_TEST(test_same_bits_zero1),
        PROGRAM_TEST(test_same_bits_acco),
        PROGRAM_TEST(test_same_bits_acco_three_ranks),
        PROGRAM_TEST(test_same_bits_bf16_wire),
        PROGRAM_TEST(test_zero1_is_ddp),
        PROGRAM_TEST(test_one_rank_of_mpi_is_alone),
        PROGRAM_TEST(test_threads_change_nothing),
        PROGRAM_TEST(test_seed_changes_bits),
        PROGRAM_TEST(test_ranks_see_the_same_data),
        PROGRAM_TEST(test_adaptive_with_a_slow_rank),
        PROGRAM_TEST(test_log_alone),
        PROGRAM_TEST(test_log_two_ranks),
        PROGRAM_TEST(test_memory_is_as_planned_alone),
        PROGRAM_TEST(test_memory_is_as_planned_two_ranks),
        PROGRAM_TEST(test_plan_equals_run),
        PROGRAM_TEST(test_plan_equals_run_two_ranks),
        PROGRAM_TEST(test_plan_of_a_large_model),
        PROGRAM_TEST(test_saved_config_repeats_the_run),
        PROGRAM_TEST(test_learns_the_builtin_corpus),
        PROGRAM_TEST(test_trains_on_a_text),
        PROGRAM_TEST(test_output_in_a_file_is_plain),
        PROGRAM_TEST(test_readme_has_the_options),
        PROGRAM_TEST(test_help_names_every_option),
        PROGRAM_TEST(test_version),
        PROGRAM_TEST(test_refusals_of_two_ranks),
        PROGRAM_TEST(test_refuses_out_without_permission),
        PROGRAM_TEST(test_refuses_independent_copies),
        PROGRAM_TEST(test_refuses_ranks_with_other_options),
        PROGRAM_TEST(test_killed_rank),
        PROGRAM_TEST(test_killed_rank_zero),
        PROGRAM_TEST(test_stopped_rank),
        PROGRAM_TEST(test_disk_full_while_running),
        PROGRAM_TEST(test_disk_full_at_the_start),
        PROGRAM_TEST(test_disk_full_of_two_ranks),
        PROGRAM_TEST(test_not_finite),
        PROGRAM_TEST(test_not_finite_two_ranks),
    };
    enum { NAMED = sizeof tests / sizeof tests[0] };
    static struct CMUnitTest all[NAMED + REFUSALS];
    static char names[REFUSALS][96];
    memcpy(all, tests, sizeof tests);
    for (int i = 0; i < REFUSALS; i++) {
        scenes[i].stage = &stage;
        scenes[i].refusal = &refusals[i];
        snprintf(names[i], sizeof names[i], "refuses: %s", refusals[i].name);
        struct CMUnitTest test = {names[i], test_refusal, NULL, end_programs, &scenes[i]};
        all[NAMED + i] = test;
    }
    stage_open(&stage);
    write_stage(&stage);
    int failed = _cmocka_run_group_tests("program", all, NAMED + REFUSALS, NULL, NULL);
    stage_close(&stage);
    return failed;
}
