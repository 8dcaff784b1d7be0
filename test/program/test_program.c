// test_program.c: what the program promises to its users. The real binary is started as a
// user starts it, alone and under mpirun, on models so small that a run takes a moment:
// what is tested here is the program, not its kernels. The sections are the promises:
//
//   Bits             what may change only the time of a run changes no bit of its result
//   Rules            every option of a rule has an effect; ranks may do unequal work
//   Wire formats     every format trains, and sends as many bytes as it promises
//   Validation       is done on the parameters that the run would end with
//   Samples          are written by the committed parameters, and are in the log
//   Length           epochs are another way to write tokens
//   Learning         the built-in corpus is learned, and so is a text file
//   Traces           --trace and the reports say the same; a slow rank holds nobody up
//   Logs             every commit is counted, in JSON and as a table
//   Memory           a run reserves what the plan says, to the byte, and uses about that
//   Texts            the saved configuration, docs/options.md, --help, --version
//   User mistakes    one line that says what is wrong, exit code 2, nothing left behind
//   Lost ranks       the whole job ends within seconds, and a message names the rank
//   Ends by signals  the log is whole and no rank is left over
//   System failures  too many threads, a full disk: one line, exit code 3; a log or a
//                    trace that cannot be written ends nothing, but is no success
//   Spikes           a NaN stops the run; bad data can be skipped or rolled back
#define _GNU_SOURCE // prlimit
#include "test/program/fleet.h"

#include <dirent.h>
#include <sys/socket.h>

#include "comm/layout.h"
#include "options/options_help.h"
#include "runtime/log.h"
#include "tokenizer/corpus.h"

enum { T = 32, MICRO_BATCH = 2 }; // of base.json

typedef struct Refusal {
    const char *name, *arguments, *part; // part: what the message must contain
} Refusal;

// The state of a test that is made from a row of a table.
typedef struct Scene {
    Stage *stage;
    const RuleCase *rule; // one of the two
    const Refusal *refusal;
} Scene;

// ---- Bits -----------------------------------------------------------------------------

// The validation loss at the end is well below the loss before training.
static void check_learned(const Fleet *fleet, int i) {
    double before = fleet_number(fleet, i, "report", 0, "loss"),
           after = fleet_number(fleet, i, "validation", -1, "loss");
    if (!(after < before - 0.3)) {
        fail_msg("%s: the loss went from %g to %g", fleet->trainings[i].what, before, after);
    }
}

// Overlap, threads, random delays and samples change the time of a run, but not its
// result.
static void any_order_gives_the_same_bits(void **state) {
    const Scene *scene = (Scene *)*state;
    const RuleCase *rule = scene->rule;
    Fleet *fleet = fleet_new(scene->stage);
    fleet_start(fleet, 0, "--lr 0.01 %s", rule->options);
    fleet_start(fleet, 0, "--lr 0.01 %s --overlap off --threads 2", rule->options);
    int first = fleet->count;
    if (scene->stage->has_mpi) {
        fleet_start(fleet, 2, "--lr 0.01 %s", rule->options);
        fleet_start(fleet, 2, "--lr 0.01 %s --threads 2", rule->options);
        fleet_start(fleet, 2, "--lr 0.01 %s --overlap off", rule->options);
        fleet_start(fleet, 2, "--lr 0.01 %s --chaos-ms %d", rule->options, rule->chaos_ms);
        fleet_start(fleet, 2, "--lr 0.01 %s --sample-every 2 --sample-tokens 9", rule->options);
    }
    fleet_finish(fleet);
    for (int i = 0; i < fleet->count; i++) {
        check_same(fleet, i, i < first ? 0 : first);
        check_learned(fleet, i);
    }
}

static void three_ranks_give_the_same_bits_in_any_order(void **state) {
    static const char *const ways[] = {"--overlap on", "--overlap off", "--chaos-ms 10"};
    Fleet *fleet = fleet_new(stage_with_ranks(state));
    for (int i = 0; i < 6; i++) {
        fleet_start(fleet, 3, "%s %s", rule_cases[i < 3 ? ACCO : STREAMING_DILOCO].options, ways[i % 3]);
    }
    fleet_finish(fleet);
    for (int i = 0; i < 6; i++) { check_same(fleet, i, i < 3 ? 0 : 3); }
}

// Samples and validations are no training. Of this run samples take nearly all of the time.
static void pauses_are_not_counted_as_training(void **state) {
    Stage *stage = stage_of(state);
    double began = program_clock();
    Outcome outcome =
        program_run(stage, 0,
                    "--optimizer ddp --seq-len 16 --tokens 250 --sample-every 1 "
                    "--sample-tokens 2000 --val-every 1 --val-batches 1 --threads 1 --out pauses");
    outcome_check(&outcome, 0, "samples");
    json_t *events = log_read(stage, "pauses");
    double wall = program_clock() - began, seconds = log_number(log_event_of(events, "end", -1), "seconds");
    if (!(seconds < 0.5 * wall)) { fail_msg("%g of %g s are called training", seconds, wall); }
    json_decref(events);
}

// Buckets decide only when something is sent. ddp and zero1 are the same mathematics.
static void buckets_change_no_bit(void **state) {
    static const char *const sizes[] = {"0.001", "0.03", "0.05", "1000", "auto"};
    static const char *const shown[] = {"buckets    108 of 0.00128 MB (as asked for)", "buckets    5 of ",
                                        "buckets    3 of ", "buckets    1 of 0.138 MB (as asked for)",
                                        "(measured: "};
    Fleet *fleet = fleet_new(stage_with_ranks(state));
    for (int i = 0; i < 10; i++) {
        fleet_start(fleet, 2, "--optimizer %s --bucket-mb %s", i < 5 ? "ddp" : "zero1", sizes[i % 5]);
    }
    fleet_finish(fleet);
    for (int i = 0; i < 10; i++) {
        check_same(fleet, i, 0);
        const char *line = strstr(fleet_output(fleet, i), "\nbuckets ");
        if (line == NULL) { fail_msg("%s: it says nothing about buckets", fleet->trainings[i].what); }
        text_check(line, shown[i % 5], fleet->trainings[i].what);
    }
}

// The parameters of this model do not divide by 3, so the padding takes part.
static void zero1_gives_the_bits_of_ddp(void **state) {
    Fleet *fleet = fleet_new(stage_with_ranks(state));
    for (int ranks = 1; ranks <= 4; ranks++) {
        fleet_start(fleet, ranks, "--optimizer zero1");
        fleet_start(fleet, ranks, "--optimizer ddp");
    }
    fleet_finish(fleet);
    assert_int_not_equal((int64_t)fleet_number(fleet, 0, "start", 0, "parameters") % 3, 0);
    for (int i = 0; i < fleet->count; i += 2) { check_same(fleet, i, i + 1); }
}

// Where every commit is sequential, nothing of an overlapped rule is left but zero1.
static void sequential_commits_give_the_bits_of_zero1(void **state) {
    Fleet *fleet = fleet_new(stage_with_ranks(state));
    fleet_start(fleet, 2, "--optimizer zero1");
    fleet_start(fleet, 2, "--optimizer dpu --sequential 1000");
    fleet_start(fleet, 2, "--optimizer acco-wp --sequential 1000");
    fleet_start(fleet, 2, "--optimizer acco --sequential 1000");
    fleet_finish(fleet);
    for (int i = 1; i < 4; i++) { check_same(fleet, i, 0); }
}

static void sequential_commits_can_be_those_of_the_warm_up(void **state) {
    Fleet *fleet = fleet_new(stage_with_ranks(state));
    fleet_start(fleet, 2, "--optimizer acco --warmup 3 --sequential warmup");
    fleet_start(fleet, 2, "--optimizer acco --warmup 3 --sequential 3");
    fleet_finish(fleet);
    check_same(fleet, 0, 1);
}

static void one_rank_under_mpirun_gives_the_bits_of_none(void **state) {
    Fleet *fleet = fleet_new(stage_with_ranks(state));
    fleet_start(fleet, 0, "%s", "");
    fleet_start(fleet, 1, "%s", "");
    fleet_finish(fleet);
    check_same(fleet, 0, 1);
}

static void threads_change_no_bit(void **state) {
    Fleet *fleet = fleet_new(stage_of(state));
    fleet_start(fleet, 0, "--threads 1");
    fleet_start(fleet, 0, "--threads 3");
    fleet_finish(fleet);
    check_same(fleet, 0, 1);
}

// On a CPU, too, where its library of matrix products can: the bits do not depend on threads,
// overlap or the order of messages, and the loss is near that in fp32.
static void bf16_trains_on_cpus(void **state) {
    Stage *stage = stage_of(state);
    stage_allow_instructions(true);
    Outcome can = program_run(stage, 0, "plan --precision bf16");
    if (can.exit_code == 2 && strstr(can.errors, "has no products of bf16") != NULL) {
        leave_out("oneDNN on a processor with AVX-512 or AMX");
    }
    outcome_check(&can, 0, "plan --precision bf16");
    Fleet *fleet = fleet_new(stage);
    fleet_start(fleet, 0, "--lr 0.003 --precision fp32");
    fleet_start(fleet, 0, "--lr 0.003 --precision bf16 --threads 1");
    fleet_start(fleet, 0, "--lr 0.003 --precision bf16 --threads 3");
    if (stage->has_mpi) {
        fleet_start(fleet, 2, "--lr 0.003 --precision bf16");
        fleet_start(fleet, 2, "--lr 0.003 --precision bf16 --overlap off --chaos-ms 3");
    }
    fleet_finish(fleet);
    check_same(fleet, 1, 2);
    if (stage->has_mpi) { check_same(fleet, 3, 4); }
    double losses[2];
    for (int i = 0; i < 2; i++) {
        losses[i] = log_number(log_event_of(fleet->events[i], "report", -1), "loss");
    }
    assert_close(losses[1], losses[0], 0.02 * losses[0], "loss in bf16");
    assert_true(losses[1] != losses[0]);
}

// An evaluation in bf16 chooses the same words, with nearly the same perplexity.
static void bf16_evaluates_on_cpus(void **state) {
    static const char *const precisions[] = {"fp32", "bf16"};
    Stage *stage = stage_of(state);
    stage_allow_instructions(true);
    Outcome can = program_run(stage, 0, "plan --precision bf16");
    if (can.exit_code != 0) { leave_out("oneDNN on a processor with AVX-512 or AMX"); }
    Fleet *fleet = fleet_new(stage);
    fleet_start(fleet, 0, "--lr 0.003");
    fleet_finish(fleet);
    stage_write(stage, "words.jsonl",
                "{\"text\": \"a little cat saw a cat\"}\n{\"text\": \"they played all day\"}\n");
    double perplexity[2], accuracy[2];
    for (int i = 0; i < 2; i++) {
        char arguments[256];
        snprintf(arguments, sizeof arguments,
                 "eval --from %.100s --task lambada --data words.jsonl --device cpu --precision %s",
                 fleet->trainings[0].out, precisions[i]);
        Outcome outcome = program_run(stage, 0, arguments);
        outcome_check(&outcome, 0, arguments);
        perplexity[i] = text_number(outcome.output, "\nperplexity", arguments);
        accuracy[i] = text_number(outcome.output, "\nacc ", arguments);
    }
    assert_close(perplexity[1], perplexity[0], 0.05 * perplexity[0], "perplexity");
    assert_close(accuracy[1], accuracy[0], 1e-9, "acc");
}

// Ranks measure, and all take bf16 where it is a tenth faster on the slowest of them. Who asks for
// bf16 is told the same.
static void the_fastest_format_is_measured(void **state) {
    Stage *stage = stage_of(state);
    stage_allow_instructions(true);
    Fleet *fleet = fleet_new(stage);
    fleet_start(fleet, 0, "--precision fastest --optimizer ddp");
    if (stage->has_mpi) { fleet_start(fleet, 2, "--precision fastest"); }
    int asked =
        fleet_start(fleet, 0, "--precision bf16 --seq-len 4 --optimizer ddp"); // slower, where so small
    fleet_start(fleet, 0, "--precision auto --optimizer ddp");
    fleet_finish(fleet);
    for (int i = 0; i < fleet->count; i++) {
        json_t *start = log_event_of(fleet->events[i], "start", -1),
               *rates = json_object_get(start, "product_gflops");
        if (i == fleet->count - 1) {
            assert_true(json_is_null(rates));
            continue;
        }
        double fp32 = log_number(rates, "fp32"), bf16 = log_number(rates, "bf16");
        json_t *chosen = json_object_get(json_object_get(start, "options"), "precision");
        assert_true(fp32 > 0);
        bool faster = bf16 > 1.1 * fp32;
        assert_string_equal(json_string_value(chosen), faster || i == asked ? "bf16" : "fp32");
        const char *output = fleet_output(fleet, i);
        text_check(output, faster ? ": bf16 is faster\n" : ": fp32 is as fast\n", "start block");
        assert_close(text_number(output, "\n           at ", "start block"), fp32, 0.5, "fp32");
        assert_close(text_number(output, "GFLOP/s in fp32 and ", "start block"), bf16, 0.5, "bf16");
    }
}

// The bits of moments in bf16 depend neither on threads nor on the order of messages, and
// not on who owns them: under both rules all ranks make one step. The loss is near that with
// fp32.
static void moments_in_bf16_repeat(void **state) {
    Stage *stage = stage_of(state);
    Fleet *fleet = fleet_new(stage);
    int ranks = stage->has_mpi ? 2 : 0;
    fleet_start(fleet, ranks, "--lr 0.003 --optimizer zero1");
    fleet_start(fleet, ranks, "--lr 0.003 --optimizer zero1 --moments bf16 --threads 1");
    fleet_start(fleet, ranks, "--lr 0.003 --optimizer zero1 --moments bf16 --threads 3 --chaos-ms 3");
    fleet_start(fleet, ranks, "--lr 0.003 --optimizer ddp --moments bf16 --threads 2 --overlap off");
    fleet_finish(fleet);
    check_same(fleet, 1, 2);
    check_same(fleet, 1, 3);
    double losses[2];
    for (int i = 0; i < 2; i++) {
        losses[i] = log_number(log_event_of(fleet->events[i], "report", -1), "loss");
    }
    assert_close(losses[1], losses[0], 0.02 * losses[0], "loss with moments in bf16");
    assert_true(losses[1] != losses[0]);
}

// What AdamW steps beside Muon may have a rate of its own, also of a worker. If none is
// given it is --lr.
static void adamw_beside_muon_has_a_rate_of_its_own(void **state) {
    static const char *const rules[] = {"acco", "diloco --diloco-H 2"};
    Fleet *fleet = fleet_new(stage_of(state));
    for (int i = 0; i < 2; i++) {
        char options[100];
        snprintf(options, sizeof options, "--inner muon --lr 0.003 --optimizer %s", rules[i]);
        fleet_start(fleet, 0, "%s", options);
        fleet_start(fleet, 0, "%s --muon-adamw-lr 0.003", options);
        fleet_start(fleet, 0, "%s --muon-adamw-lr 0.02", options);
    }
    fleet_finish(fleet);
    for (int i = 0; i < 6; i += 3) {
        check_same(fleet, i, i + 1);
        assert_string_not_equal(fleet->prints[i].text, fleet->prints[i + 2].text);
        text_check(fleet_output(fleet, i), "; AdamW steps the others\n", "muon");
        text_check(fleet_output(fleet, i + 2), "; AdamW steps the others at 0.02\n", "muon");
    }
}

// So fingerprints are not constant.
static void another_seed_gives_other_bits(void **state) {
    Fleet *fleet = fleet_new(stage_of(state));
    fleet_start(fleet, 0, "--seed 1");
    fleet_start(fleet, 0, "--seed 2");
    fleet_finish(fleet);
    check_all_differ(fleet);
}

// The same global batch on 1, 2 and 4 ranks consists of the same samples. Only the order
// of summation differs.
static void any_number_of_ranks_trains_on_the_same_data(void **state) {
    Fleet *fleet = fleet_new(stage_with_ranks(state));
    for (int ranks = 1; ranks <= 4; ranks *= 2) {
        fleet_start(fleet, ranks, "--optimizer zero1 --tokens 8k --report-every 1 --accumulate %d",
                    8 / ranks);
    }
    fleet_finish(fleet);
    int reports = 0;
    for (json_t *first; (first = log_event_of(fleet->events[0], "report", reports)) != NULL; reports++) {
        for (int i = 1; i < 3; i++) {
            json_t *other = log_event_of(fleet->events[i], "report", reports);
            assert_non_null(other);
            assert_int_equal(log_number(other, "tokens"), log_number(first, "tokens"));
            assert_close(log_number(other, "perfect_loss"), log_number(first, "perfect_loss"), 1e-9,
                         "perfect loss: other samples");
            assert_close(log_number(other, "loss"), log_number(first, "loss"), 1e-4, "loss");
            assert_close(log_number(other, "lr"), log_number(first, "lr"), 1e-9, "learning rate");
        }
    }
    assert_int_equal(reports, 8000 / (8 * MICRO_BATCH * T) + 1);
}

// ---- Rules ----------------------------------------------------------------------------

#define SOME_CO2 "--optimizer co2 --co2-tau 3 "
#define SOME_DILOCO "--optimizer diloco --diloco-H 4 "
#define SOME_SPARSE "--optimizer sparse-loco --sparse-H 4 --sparse-tau 1 "
#define SOME_STREAMING "--model deep.json --optimizer streaming-diloco --diloco-H 6 "

// Any two runs of a row differ in their rule or in one of its options, so no two may end
// with the same bits.
static const char *const varied[][FLEET] = {
    {"--optimizer acco --accumulate 4", "--optimizer acco --accumulate 4 --acco-init 1",
     "--optimizer acco --accumulate 4 --sequential 3", "--optimizer dpu", "--optimizer dpu --sequential 3",
     "--optimizer acco-wp", "--optimizer acco-wp --sequential 3", SOME_CO2, "--optimizer co2 --co2-tau 4",
     SOME_CO2 "--co2-beta 0.5", SOME_CO2 "--co2-alpha 0.5", SOME_CO2 "--co2-phi 1e-4", SOME_CO2 "--co2-gap 3",
     SOME_CO2 "--co2-eager off"},
    {SOME_DILOCO, "--optimizer diloco --diloco-H 5", SOME_DILOCO "--diloco-outer-lr 0.5",
     SOME_DILOCO "--diloco-mu 0.5", SOME_STREAMING,
     "--model deep.json --optimizer streaming-diloco --diloco-H 8", SOME_STREAMING "--streaming-P 3",
     SOME_STREAMING "--streaming-tau 0", SOME_STREAMING "--streaming-alpha 0",
     SOME_STREAMING "--diloco-mu 0.5"},
    {SOME_SPARSE, "--optimizer sparse-loco --sparse-H 5 --sparse-tau 1", SOME_SPARSE "--sparse-beta 0.5",
     SOME_SPARSE "--sparse-alpha 0.5", "--optimizer sparse-loco --sparse-H 4 --sparse-tau 2",
     "--optimizer sparse-loco --sparse-H 4"},
};

// A rule that somebody adds must not be left out of rule_cases.h, whose rows most tests of
// whole runs go through.
static void every_rule_is_tested(void **state) {
    (void)state;
    assert_int_equal(RULES_TESTED, RULE_COUNT);
    for (int i = 0; i < RULE_COUNT; i++) { assert_string_equal(rule_cases[i].name, RULES[i].rule->name); }
}

static void every_option_of_a_rule_matters(void **state) {
    Stage *stage = stage_with_ranks(state);
    for (size_t row = 0; row < sizeof varied / sizeof varied[0]; row++) {
        Fleet *fleet = fleet_new(stage);
        for (int i = 0; i < FLEET && varied[row][i] != NULL; i++) {
            fleet_start(fleet, 2, "%s", varied[row][i]);
        }
        fleet_finish(fleet);
        check_all_differ(fleet);
    }
}

// As long as what the outer momentum remembers: H / (1 - mu) steps, at most a third of the
// run; without momentum a twentieth of it.
static void a_warm_up_is_as_long_as_an_outer_momentum(void **state) {
    Fleet *fleet = fleet_new(stage_of(state));
    static const char *const rows[][2] = {
        {"0", "warm-up 3 inner steps"}, {"0.5", "warm-up 8 inner steps"}, {"0.9", "warm-up 21 inner steps"}};
    for (int i = 0; i < 3; i++) {
        fleet_start(fleet, 0, "--optimizer diloco --diloco-H 4 --warmup auto --tokens 8k --diloco-mu %s",
                    rows[i][0]);
    }
    fleet_start(fleet, 0, "--optimizer zero1 --warmup 1000 --tokens 8k");
    fleet_finish(fleet);
    for (int i = 0; i < 3; i++) { text_check(fleet_output(fleet, i), rows[i][1], rows[i][0]); }
    assert_null(strstr(fleet_output(fleet, 0), "more than the run has"));
    text_check(fleet_output(fleet, 3), "warm-up 1000 commits (more than the run has", "--warmup 1000");
}

// 6 micro-batches a commit, from whichever rank they come. (The program itself checks at
// the end that both replicas agree.)
static void ranks_may_do_unequal_work(void **state) {
    Fleet *fleet = fleet_new(stage_with_ranks(state));
    for (int i = DDP; i <= ACCO; i++) {
        fleet_start(fleet, 2, "--optimizer %s --rank-accumulate 4,2 --report-every 1 --lr 0.01",
                    rule_cases[i].name);
    }
    int even = fleet_start(fleet, 2, "--optimizer zero1 --rank-accumulate 3,3");
    int plain = fleet_start(fleet, 2, "--optimizer zero1 --accumulate 3");
    fleet_finish(fleet);
    check_same(fleet, even, plain);
    for (int i = DDP; i <= ACCO; i++) {
        check_learned(fleet, i);
        json_t *report;
        for (int n = 0; (report = log_event_of(fleet->events[i], "report", n)) != NULL; n++) {
            assert_int_equal(log_number(report, "commit"), n + 1);
            assert_int_equal(log_number(report, "grads"), 6 * (n + 1));
            assert_int_equal(log_number(report, "tokens"), 6 * (n + 1) * MICRO_BATCH * T);
        }
    }
}

// ---- Wire formats ---------------------------------------------------------------------

// The bytes that one of two ranks sends in a job: the other rank's half of the sum, then
// its own half of the parameters, and in between its record of counts, losses and spikes.
// Narrow formats send scales before the codes of a piece; here every piece is shorter
// than a block of codes, so it has one in fp32, or the eight of int4 in bf16.
static double job_bytes(const char *wire, double parameters) {
    Layout layout = layout_make((size_t)parameters, 2);
    size_t piece = layout.piece, record = 14 * sizeof(double);
    assert_true(piece < 256);
    size_t bytes = strcmp(wire, "fp32") == 0   ? 4 * piece
                   : strcmp(wire, "bf16") == 0 ? 2 * piece
                   : strcmp(wire, "int8") == 0 ? 4 + piece
                   : strcmp(wire, "int4") == 0 ? 16 + piece / 2
                                               : 4 + piece / 2;
    return (double)(2 * layout.cells * bytes + record);
}

// Between the first report and the last, every commit sends `per_report` bytes.
static void check_bytes(const Fleet *fleet, int i, double per_report) {
    int reports = 0;
    while (log_event_of(fleet->events[i], "report", reports) != NULL) { reports++; }
    assert_true(reports > 2);
    double first = fleet_number(fleet, i, "report", 0, "bytes_sent"),
           last = fleet_number(fleet, i, "report", -1, "bytes_sent");
    double sent = last - first, expected = per_report * (reports - 1);
    if (sent != expected) {
        fail_msg("%s: %.0f bytes sent, expected %.0f", fleet->trainings[i].what, sent, expected);
    }
}

typedef struct WireCase {
    const char *rule, *wire, *estimate;
} WireCase;

// Of zero1 and ddp without overlap only: with it, the gather is still under way when the
// report counts bytes.
static const WireCase wire_cases[] = {
    {"zero1 --overlap off", "fp32", "same"},
    {"zero1 --overlap off", "bf16", "same"},
    {"zero1 --overlap off", "int8", "same"},
    {"zero1 --overlap off", "e3m0", "same"},
    {"ddp --overlap off", "int8", "same"},
    {"diloco --diloco-H 4", "fp32", "same"},
    {"diloco --diloco-H 4", "bf16", "same"},
    {"diloco --diloco-H 4", "int8", "same"},
    {"diloco --diloco-H 4", "e3m0", "same"},
    {"acco", "fp32", "same"},
    {"acco", "bf16", "same"},
    {"acco", "int8", "same"},
    {"acco", "e3m0", "same"},
    {"acco", "fp32", "bf16"},
    {"acco", "bf16", "int8"},
    {"acco", "fp32", "int4"},
};

static void every_wire_format_sends_what_it_promises(void **state) {
    enum { CASES = sizeof wire_cases / sizeof wire_cases[0] };
    Fleet *fleet = fleet_new(stage_with_ranks(state));
    for (int i = 0; i < CASES; i++) {
        const WireCase *wire = &wire_cases[i];
        fleet_start(fleet, 2,
                    "--report-every 1 --val-batches none --optimizer %s --wire %s --estimate-wire %s",
                    wire->rule, wire->wire, wire->estimate);
    }
    fleet_finish(fleet);
    check_all_differ(fleet);
    double parameters = fleet_number(fleet, 0, "start", 0, "parameters");
    for (int i = 0; i < CASES; i++) {
        const WireCase *wire = &wire_cases[i];
        char shown[32];
        double commit = job_bytes(wire->wire, parameters);
        double estimate =
            strcmp(wire->estimate, "same") == 0 ? commit : job_bytes(wire->estimate, parameters);
        check_bytes(fleet, i, strcmp(wire->rule, "acco") == 0 ? commit + estimate : commit);
        snprintf(shown, sizeof shown, "%s on the wire", wire->wire);
        text_check(fleet_output(fleet, i), shown, fleet->trainings[i].what);
    }
}

// ---- Validation -----------------------------------------------------------------------

// The validation loss that was logged at a commit (in local rules: at an inner step).
static double validation_at(const Fleet *fleet, int i, double commit) {
    json_t *event;
    for (int n = 0; (event = log_event_of(fleet->events[i], "validation", n)) != NULL; n++) {
        if (log_number(event, "commit") == commit) { return log_number(event, "loss"); }
    }
    fail_msg("%s: no validation at %g", fleet->trainings[i].what, commit);
    return 0;
}

// A run that passes a commit validates there what a run that ends there ends with:
// neither predicted parameters nor a worker's own. Of dpu and acco-wp the first two
// commits are the same by definition, because their gradients are those at the initial
// parameters; the fourth is not.
static void validation_is_of_the_committed_parameters(void **state) {
    static const char *const rules[] = {"zero1", "acco", "diloco --diloco-H 4", "ddp", "dpu", "acco-wp"};
    Fleet *fleet = fleet_new(stage_with_ranks(state));
    for (int i = 0; i < 12; i++) {
        fleet_start(fleet, 2,
                    "--optimizer %s --tokens %s --val-every 1 --schedule constant --warmup 0 --lr 0.01",
                    rules[i / 2], i % 2 == 0 ? "2k" : "4k");
    }
    fleet_finish(fleet);
    for (int i = 0; i < 12; i += 2) {
        double commit = fleet_number(fleet, i, "end", 0, "commit"),
               last = fleet_number(fleet, i, "validation", -1, "loss");
        double passing = validation_at(fleet, i + 1, commit);
        if (passing != last) {
            fail_msg("%s: %.9g, a longer run at its commit: %.9g", fleet->trainings[i].what, last, passing);
        }
        assert_true(last != fleet_number(fleet, i + 1, "validation", -1, "loss"));
    }
    assert_true(validation_at(fleet, 9, 1) == validation_at(fleet, 11, 1) &&
                validation_at(fleet, 9, 2) == validation_at(fleet, 11, 2));
    assert_true(validation_at(fleet, 9, 4) != validation_at(fleet, 11, 4));
}

// With an outer learning rate of almost 0 the outer parameters stay where they began,
// wherever the workers go meanwhile.
static void validation_is_of_the_outer_parameters(void **state) {
    Fleet *fleet = fleet_new(stage_with_ranks(state));
    fleet_start(fleet, 2, "--lr 0.01 --val-every 1 --optimizer diloco --diloco-H 8 --diloco-outer-lr 1e-6");
    fleet_start(fleet, 2, "--lr 0.01 --val-every 1 --optimizer co2 --co2-tau 8 --co2-alpha 1e-6");
    int streaming = fleet_start(
        fleet, 2,
        "--lr 0.01 --val-every 1 --optimizer streaming-diloco --diloco-H 4 --diloco-outer-lr 1e-6 "
        "--streaming-alpha 1 --report-every 1");
    fleet_finish(fleet);
    for (int i = 0; i < 3; i++) {
        json_t *event;
        for (int n = 0; (event = log_event_of(fleet->events[i], "validation", n)) != NULL; n++) {
            assert_close(log_number(event, "loss"), log(256), 0.3, "the loss of parameters that do not move");
            assert_close(log_number(event, "loss"), fleet_number(fleet, i, "validation", 0, "loss"), 1e-3,
                         fleet->trainings[i].what);
        }
    }
    double before = fleet_number(fleet, streaming, "report", 0, "loss"),
           after = fleet_number(fleet, streaming, "report", -1, "loss");
    if (!(after < before - 0.3)) { fail_msg("the workers stood still too: %g, %g", before, after); }
}

// ---- Samples --------------------------------------------------------------------------

// In the log, what is not UTF-8 is replaced.
static void check_printed(const char *output, const char *text, const char *what) {
    json_t *clean = log_text(output);
    text_check(json_string_value(clean), text, what);
    json_decref(clean);
}

// A sample during training is that of the checkpoint of the same commit, whatever the
// rule computes with between two commits and wherever the parameters are.
static void samples_are_of_the_committed_parameters(void **state) {
    enum { RUNS = 5, EVERY = 3 };
    static const int rules[RUNS] = {ZERO1, ACCO_WP, ACCO, CO2, STREAMING_DILOCO};
    static const char *const sampling =
        "--sample-tokens 40 --temperature 1 --top-k off --prompt 'A small ' --seed 7";
    Stage *stage = stage_with_ranks(state);
    Fleet *fleet = fleet_new(stage);
    for (int i = 0; i < RUNS; i++) {
        fleet_start(fleet, 2, "%s --lr 0.01 --data text.txt --save-every %d --keep 100 --sample-every %d %s",
                    rule_cases[rules[i]].options, EVERY, EVERY, sampling);
    }
    fleet_finish(fleet);
    for (int i = 0; i < RUNS; i++) {
        json_t *sample;
        int count = 0;
        for (; (sample = log_event_of(fleet->events[i], "sample", count)) != NULL; count++) {
            char command[STAGE_COMMAND_SIZE];
            const char *text = json_string_value(json_object_get(sample, "text"));
            json_t *next = log_event_of(fleet->events[i], "sample", count + 1);
            if (next != NULL && log_number(next, "commit") == log_number(sample, "commit")) {
                continue; // what was still under way is now in that checkpoint
            }
            snprintf(command, sizeof command, "sample --from %s/checkpoints/commit-%d %s --threads 1",
                     fleet->trainings[i].out, (int)log_number(sample, "commit"), sampling);
            Outcome outcome = program_run(stage, 0, command);
            outcome_check(&outcome, 0, command);
            assert_int_equal(strncmp(text, "A small ", 8), 0);
            check_printed(outcome.output, text, command);
            check_printed(fleet_output(fleet, i), text, fleet->trainings[i].what);
        }
        if (count < 3) { fail_msg("%s: %d samples", fleet->trainings[i].what, count); }
    }
}

// ---- Length ---------------------------------------------------------------------------

// Epochs are another way to write tokens, also for a run that goes on.
static void epochs_are_tokens(void **state) {
    Stage *stage = stage_of(state);
    Fleet *fleet = fleet_new(stage);
    fleet_start(fleet, 0, "--data text.txt --epochs 2");
    fleet_finish(fleet);
    json_t *start = log_event_of(fleet->events[0], "start", 0);
    int64_t tokens = (int64_t)log_number(json_object_get(start, "options"), "tokens");
    char epochs[64]; // that the commits make
    snprintf(epochs, sizeof epochs, " commits (%.4g epochs)",
             2 * log_number(log_event_of(fleet->events[0], "end", -1), "tokens") / (double)tokens);
    text_check(fleet_output(fleet, 0), epochs, "--epochs 2");
    assert_true(tokens > 7000 && tokens % (2 * T) == 0); // of 4200 bytes, less the end
    assert_true(log_number(start, "epochs") == 2);
    fleet_start(fleet, 0, "--data text.txt --tokens %lld", (long long)tokens);
    fleet_start(fleet, 0, "--data text.txt --epochs 2 --resume %s", fleet->trainings[0].out);
    for (int i = 1; i < 3; i++) { fleet->events[i] = training_finish(stage, &fleet->trainings[i]); }
    for (int i = 1; i < 3; i++) { fleet->prints[i] = log_fingerprint(fleet->events[i]); }
    check_same(fleet, 0, 1);
    check_same(fleet, 0, 2);
    assert_true(json_is_true(json_object_get(log_event_of(fleet->events[2], "resume", 0), "exact")));
    text_check(fleet_output(fleet, 2), "nothing is left to do", "--epochs 2 again");
}

// ---- Learning -------------------------------------------------------------------------

// A byte of this corpus has corpus_entropy(T) = 0.057 nats. This model is at 5.5 before
// training and below 0.1 after 50 thousand tokens.
static void the_builtin_corpus_is_learned(void **state) {
    Stage *stage = stage_of(state);
    json_t *events = train(
        stage, 0, "--tokens 60k --micro-batch 8 --lr 0.01 --report-every 1 --val-batches 64 --val-every end");
    json_t *validation = log_event_of(events, "validation", -1);
    double loss = log_number(validation, "loss"), perfect = log_number(validation, "perfect_loss");
    assert_close(log_number(log_event_of(events, "report", 0), "loss"), log(256), 0.3,
                 "the loss before training");
    assert_close(perfect, corpus_entropy(T), 0.008, "the loss of a perfect model");
    if (!(loss < 0.2)) { fail_msg("the validation loss is %g after 60 thousand tokens", loss); }
    if (!(loss > perfect - 0.005)) {
        fail_msg("the validation loss is %g, better than the perfect %g", loss, perfect);
    }
    json_decref(events);
}

static void a_text_file_is_learned(void **state) {
    Stage *stage = stage_of(state);
    json_t *events = train(stage, 0, "--data text.txt --tokens 20k --lr 0.01 --accumulate 4");
    json_t *first = log_event_of(events, "report", 0), *last = log_event_of(events, "report", -1);
    assert_true(log_number(last, "loss") < log_number(first, "loss") - 1);
    assert_true(json_is_null(json_object_get(last, "perfect_loss"))); // the entropy of a file is unknown
    json_decref(events);
}

// ---- Traces ---------------------------------------------------------------------------

enum { TRACE_RANKS = 2, LANES = 2, LANE_SPANS = 100000 }; // lanes: compute, communication

// The spans of one lane of one rank, one after another.
typedef struct Spans {
    int count, micro_batches;
    double began[LANE_SPANS], ended[LANE_SPANS]; // microseconds
    double commit[LANE_SPANS];                   // commits made before the span
    bool trains[LANE_SPANS];                     // it is a micro-batch or an inner step
} Spans;

typedef struct TraceFileContent {
    Spans lanes[TRACE_RANKS][LANES];
    int named; // ranks and lanes that have a name
} TraceFileContent;

static bool is_span_name(const char *name, int lane) {
    static const char *const names[LANES][4] = {{"micro-batch", "boundary", "inner step", "outer step"},
                                                {"reduce-scatter", "all-gather", "summary", "step"}};
    for (int i = 0; i < 4; i++) {
        if (strcmp(names[lane][i], name) == 0) { return true; }
    }
    return false;
}

static void trace_content_add(TraceFileContent *content, json_t *event, const char *what) {
    int rank = (int)log_number(event, "pid"), lane = (int)log_number(event, "tid");
    assert_true(rank >= 0 && rank < TRACE_RANKS && lane >= 0 && lane < LANES);
    Spans *spans = &content->lanes[rank][lane];
    const char *name = json_string_value(json_object_get(event, "name"));
    double began = log_number(event, "ts"), duration = log_number(event, "dur");
    double last = spans->count == 0 ? 0 : spans->ended[spans->count - 1];
    json_t *commit = json_object_get(json_object_get(event, "args"), "commit");
    if (name == NULL || !is_span_name(name, lane)) {
        fail_msg("%s: a span of lane %d is called %s", what, lane, name);
    }
    if (!(began >= last - 1e-3 && duration >= 0)) {
        fail_msg("%s: %s at %.3f begins before %.3f", what, name, began, last);
    }
    assert_true(json_is_integer(commit) && spans->count < LANE_SPANS);
    int i = spans->count++;
    spans->began[i] = began;
    spans->ended[i] = began + duration;
    spans->commit[i] = json_number_value(commit);
    spans->trains[i] = strcmp(name, "micro-batch") == 0 || strcmp(name, "inner step") == 0;
    spans->micro_batches += strcmp(name, "micro-batch") == 0;
}

static void trace_content_read(Stage *stage, const char *file, TraceFileContent *content, const char *what) {
    char path[STAGE_PATH_SIZE];
    json_error_t problem;
    size_t i;
    json_t *event, *root = json_load_file(stage_path(stage, file, path), JSON_REJECT_DUPLICATES, &problem);
    if (root == NULL) { fail_msg("%s: %s:%d: %s", what, file, problem.line, problem.text); }
    memset(content, 0, sizeof *content);
    json_array_foreach(json_object_get(root, "traceEvents"), i, event) {
        const char *phase = json_string_value(json_object_get(event, "ph")),
                   *name = json_string_value(json_object_get(event, "name"));
        assert_true(phase != NULL && name != NULL);
        if (strcmp(phase, "X") == 0) {
            trace_content_add(content, event, what);
        } else {
            content->named += strcmp(name, "process_name") == 0 || strcmp(name, "thread_name") == 0;
        }
    }
    json_decref(root);
    assert_int_equal(content->named, TRACE_RANKS * (1 + LANES));
}

// How long both lanes were busy at once before `until`.
static double spans_overlap(const Spans *a, const Spans *b, double until) {
    double overlap = 0;
    for (int i = 0, j = 0; i < a->count && j < b->count;) {
        double both = fmin(fmin(a->ended[i], b->ended[j]), until) - fmax(a->began[i], b->began[j]);
        overlap += both > 0 ? both : 0;
        if (a->ended[i] < b->ended[j]) {
            i++;
        } else {
            j++;
        }
    }
    return overlap;
}

// The sum over all steps, in microseconds. A report has the mean over its steps, in
// milliseconds.
static double reported_us(json_t *events, const char *field) {
    double sum = 0;
    json_t *report;
    for (int n = 0; (report = log_event_of(events, "report", n)) != NULL; n++) {
        sum += 1e3 * log_number(report, field) * log_number(report, "steps");
    }
    return sum;
}

// When the lane had been busy for `busy` microseconds; infinite: never.
static double spans_time_at(const Spans *spans, double busy) {
    for (int i = 0; i < spans->count; i++) {
        double duration = spans->ended[i] - spans->began[i];
        if (busy <= duration) { return spans->began[i] + busy; }
        busy -= duration;
    }
    return INFINITY;
}

// Behind `moment` a lane may do what is left of the last commit, such as a gather or an
// outer step, for as long as the machine pleases. But it may not train.
static void check_no_training_behind(const Spans *spans, double moment, double last_commit,
                                     const char *what) {
    for (int i = 0; i < spans->count; i++) {
        if (spans->ended[i] <= moment || (!spans->trains[i] && spans->commit[i] >= last_commit - 1)) {
            continue;
        }
        fail_msg("%s: no report counts the span of commit %g from %.3f to %.3f; the last one ends at %.3f",
                 what, spans->commit[i], spans->began[i], spans->ended[i], moment);
    }
}

// Reports and trace are made of the same spans. So there is one moment, that of the last
// report, up to which both have the same sums, however slow the machine is. Times in the
// file are rounded to nanoseconds, which adds up over the spans. Exposed is communication
// during which nothing was computed.
static void check_sums(json_t *events, const Spans *compute, const Spans *communication, const char *what) {
    double rounding = 0.001 * (compute->count + communication->count + 2);
    double computed = reported_us(events, "compute_ms"),
           communicated = reported_us(events, "communication_ms"),
           exposed = reported_us(events, "exposed_ms");
    double from = fmax(spans_time_at(compute, computed - rounding),
                       spans_time_at(communication, communicated - rounding));
    double to = fmin(spans_time_at(compute, computed + rounding),
                     spans_time_at(communication, communicated + rounding));
    if (!(from <= to && isfinite(from))) {
        fail_msg("%s: at no moment does the trace have %.3f us of compute and %.3f of communication, as "
                 "reported: the one sum is reached at %.3f, the other is exceeded at %.3f",
                 what, computed, communicated, from, to);
    }
    double hidden = spans_overlap(compute, communication, from);
    assert_close(exposed, communicated - hidden, 4 * rounding, what);
    double last_commit = log_number(log_event_of(events, "report", -1), "commit");
    // The sums may be off by `rounding` either way, so the report came at most twice that
    // after `from`.
    check_no_training_behind(compute, from + 2 * rounding, last_commit, what);
    check_no_training_behind(communication, from + 2 * rounding, last_commit, what);
}

static void traces_show_what_reports_count(void **state) {
    static TraceFileContent content;
    Fleet *fleet = fleet_new(stage_with_ranks(state));
    for (int i = 0; i < RULES_TESTED; i++) {
        fleet_start(fleet, 2, "%s --tokens 12k --val-every end --trace trace-%d.json", rule_cases[i].options,
                    i);
    }
    fleet_finish(fleet);
    for (int i = 0; i < RULES_TESTED; i++) {
        char file[32];
        const char *what = fleet->trainings[i].what;
        snprintf(file, sizeof file, "trace-%d.json", i);
        trace_content_read(fleet->stage, file, &content, what);
        for (int rank = 0; rank < TRACE_RANKS; rank++) {
            assert_true(content.lanes[rank][0].micro_batches >= 12000 / MICRO_BATCH / T / 2);
            assert_true(content.lanes[rank][1].count > 0);
        }
        check_sums(fleet->events[i], &content.lanes[0][0], &content.lanes[0][1], what);
    }
}

// Who waits for the network is told, with the command that says what would be faster.
static void exposed_communication_is_told(void **state) {
    Fleet *fleet = fleet_new(stage_with_ranks(state));
    fleet_start(fleet, 2, "--tokens 1536 --link-mbit 4 --optimizer zero1");
    fleet_start(fleet, 0, "--optimizer zero1");
    fleet_finish(fleet);
    const char *what = fleet->trainings[0].what, *line = strstr(fleet_output(fleet, 0), "\nnetwork ");
    if (line == NULL) { fail_msg("%s: not a word about the network", what); }
    text_check(line, "train_gpt plan --like ", what);
    assert_true(fleet_number(fleet, 0, "end", 0, "exposed_share") > 0.1);
    assert_null(strstr(fleet_output(fleet, 1), "\nnetwork "));
    // Of a run that goes on it is the share of the time since then.
    char out[64];
    snprintf(out, sizeof out, "%s", fleet->trainings[0].out);
    fleet = fleet_new(fleet->stage);
    fleet_start(fleet, 2, "--tokens 1664 --link-mbit 4 --optimizer zero1 --resume %s", out);
    fleet_finish(fleet);
    assert_true(fleet_number(fleet, 0, "end", 0, "exposed_share") > 0.1);
}

// With --accumulate auto the fast rank goes on computing while it waits for the slow one.
// (The program itself checks at the end that both replicas agree.)
static void a_slow_rank_holds_nobody_up(void **state) {
    static TraceFileContent content;
    static const char *const rules[] = {"acco", "dpu", "acco-wp"};
    Fleet *fleet = fleet_new(stage_with_ranks(state));
    for (int i = 0; i < 3; i++) {
        fleet_start(fleet, 2,
                    "--optimizer %s --accumulate auto --slow-rank 1 --slow-ms 30 --tokens 120k "
                    "--report-every 1 --timeout-s 30 --trace slow-%d.json",
                    rules[i], i);
    }
    fleet_finish(fleet);
    for (int i = 0; i < 3; i++) {
        char file[32];
        snprintf(file, sizeof file, "slow-%d.json", i);
        trace_content_read(fleet->stage, file, &content, fleet->trainings[i].what);
        int fast = content.lanes[0][0].micro_batches, slow = content.lanes[1][0].micro_batches;
        if (!(fast > 2 * slow)) {
            fail_msg("%s: %d micro-batches, the slow rank has %d", fleet->trainings[i].what, fast, slow);
        }
        double commit = fleet_number(fleet, i, "end", 0, "commit"),
               tokens = fleet_number(fleet, i, "end", 0, "tokens");
        assert_int_equal(fleet_number(fleet, i, "report", -1, "commit"), commit);
        assert_int_equal(fleet_number(fleet, i, "report", -1, "tokens"), tokens);
        assert_true(tokens >= 120000); // so many because a busy machine makes larger commits, and so fewer
        check_learned(fleet, i);
    }
}

// ---- Logs -----------------------------------------------------------------------------

static void check_start_event(json_t *event, int ranks) {
    double sum = 0;
    const char *name;
    json_t *value, *options = json_object_get(event, "options"), *memory = json_object_get(event, "memory");
    assert_non_null(event);
    assert_true(json_is_string(json_object_get(event, "version")) &&
                json_is_string(json_object_get(event, "transport")));
    assert_int_equal(json_array_size(json_object_get(event, "ranks")), ranks);
    for (int rank = 0; rank < ranks; rank++) {
        json_t *entry = json_array_get(json_object_get(event, "ranks"), (size_t)rank);
        assert_true(json_is_string(json_object_get(entry, "host")));
        assert_true(log_number(entry, "pid") > 1 && log_number(entry, "threads") == 1);
    }
    json_object_foreach(memory, name, value) {
        sum += strcmp(name, "total") == 0 ? 0 : (double)json_integer_value(value);
    }
    assert_true(sum > 0 && sum <= log_number(memory, "total"));
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
        if (json_object_get(options, option_table[i].name) == NULL) {
            fail_msg("--%s is not in the start event", option_table[i].name);
        }
    }
}

static void check_report_event(json_t *event, int64_t commit, int grads_per_commit) {
    static const char *const fields[] = {
        "loss",       "lr",     "grad_norm", "tokens_per_second", "compute_ms", "communication_ms",
        "exposed_ms", "seconds"};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        assert_true(log_number(event, fields[i]) >= 0);
    }
    assert_int_equal(log_number(event, "commit"), commit);
    assert_int_equal(log_number(event, "grads"), commit * grads_per_commit);
    assert_int_equal(log_number(event, "tokens"), commit * grads_per_commit * MICRO_BATCH * T);
    assert_close(log_number(event, "grads_per_commit"), grads_per_commit, 1e-9, "gradients per commit");
    assert_true(log_number(event, "compute_ms") > 0 && log_number(event, "lr") > 0 &&
                log_number(event, "loss") < 7);
}

// progress.tsv: a heading and one row for each report and each validation, 21 cells each. run.tsv:
// how the run began and ended. Scripts read both by the names in them.
static void check_tables(const Stage *stage, const char *out, int reports, int validations) {
    char path[STAGE_PATH_SIZE], name[128];
    snprintf(name, sizeof name, "%s/progress.tsv", out);
    char *text = file_read(stage_path(stage, name, path));
    assert_non_null(text);
    assert_int_equal(text_lines(text), reports + validations + 1);
    assert_int_equal(text_count(text, "\t"), 20 * (reports + validations + 1));
    free(text);
    shell(
        stage,
        ". '%s/scripts/common' && [ $(fact %s end.reason)$(fact %s start.options.report-every) = done4 ] && "
        "[ $(column %s commit loss steps | grep -c '^[48]\t[0-9.]*\t4$') = 2 ] && "
        "[ $(column %s commit steps | wc -l) = %d ] && "
        "[ $(column %s perfect_loss validation_loss | wc -l) = %d ] && ! column %s colour 2> none",
        stage->root, out, out, out, out, reports, out, validations, out);
}

static void check_log(Stage *stage, int ranks, const char *options, int grads_per_commit) {
    Training training = training_start(stage, ranks, options);
    json_t *events = training_finish(stage, &training), *event;
    check_start_event(json_array_get(events, 0), ranks > 0 ? ranks : 1);
    int64_t commits = (4000 + grads_per_commit * MICRO_BATCH * T - 1) / (grads_per_commit * MICRO_BATCH * T);
    int reports = 0, validations = 0;
    double seconds = 0;
    for (; (event = log_event_of(events, "report", reports)) != NULL; reports++) {
        check_report_event(event, 4 * (reports + 1) < commits ? 4 * (reports + 1) : commits,
                           grads_per_commit);
        assert_true(log_number(event, "seconds") >= seconds);
        seconds = log_number(event, "seconds");
    }
    assert_int_equal(reports, (commits + 3) / 4);
    for (; (event = log_event_of(events, "validation", validations)) != NULL; validations++) {
        assert_true(log_number(event, "loss") > 0 && log_number(event, "perfect_loss") > 0 &&
                    log_number(event, "tokens") > 0);
        assert_true(log_number(event, "commit") <= commits);
    }
    assert_int_equal(validations, (commits + 6) / 7);
    event = json_array_get(events, json_array_size(events) - 1);
    assert_string_equal(json_string_value(json_object_get(event, "event")), "end");
    assert_string_equal(json_string_value(json_object_get(event, "reason")), "done");
    assert_int_equal(log_number(event, "commit"), commits);
    assert_int_equal(log_number(event, "tokens"), commits * grads_per_commit * MICRO_BATCH * T);
    assert_true(log_number(event, "seconds") > 0 && log_number(event, "tokens_per_second") > 0);
    check_tables(stage, training.out, reports, validations);
    json_decref(events);
}

static void the_log_of_one_rank_counts_every_commit(void **state) {
    check_log(stage_of(state), 0, "--val-every 7 --optimizer ddp --accumulate 3", 3);
}
static void the_log_of_two_ranks_counts_every_commit(void **state) {
    check_log(stage_with_ranks(state), 2, "--val-every 7", 4);
}

// What goes into a file or a pipe is plain text: no progress bar, no cursor movements.
// That holds under mpirun too, which gives its ranks a terminal.
static void output_in_a_file_is_plain_text(void **state) {
    Stage *stage = stage_of(state);
    for (int ranks = 0; ranks <= (stage->has_mpi ? 2 : 0); ranks += 2) {
        Outcome outcome = program_run(stage, ranks, "--config base.json");
        outcome_check(&outcome, 0, "a short run");
        if (strchr(outcome.output, '\033') != NULL) {
            fail_msg("%d ranks: the output holds escape sequences", ranks);
        }
        if (strchr(outcome.output, '\r') != NULL) {
            fail_msg("%d ranks: the output holds carriage returns", ranks);
        }
    }
}

// ---- Memory ---------------------------------------------------------------------------

// The kernel gives memory in whole pages, so a model this small is the hardest to
// predict. The buffer of messages is planned for the longest message; shorter ones, of
// small buckets or of streaming-diloco's fragments, leave some of it untouched.
static void check_memory(void **state, int ranks) {
    Fleet *fleet = fleet_new(ranks > 0 ? stage_with_ranks(state) : stage_of(state));
    for (int i = 0; i < RULES_TESTED; i++) {
        fleet_start(fleet, ranks, "%s %s", rule_cases[i].options, i <= ZERO1 ? "--bucket-mb 1000" : "");
    }
    fleet_finish(fleet);
    for (int i = 0; i < RULES_TESTED; i++) {
        double planned = fleet_number(fleet, i, "end", 0, "planned_bytes"),
               used = fleet_number(fleet, i, "end", 0, "used_bytes");
        if (used <= 1.02 * planned && used >= 0.96 * planned) { continue; }
        fail_msg("%s: planned %.0f bytes, used %.0f: %+.1f %%", fleet->trainings[i].what, planned, used,
                 100 * (used / planned - 1));
    }
}

static void one_rank_uses_the_memory_it_planned(void **state) { check_memory(state, 0); }
static void two_ranks_use_the_memory_they_planned(void **state) { check_memory(state, 2); }

// The bytes in the row "total" of a plan.
static long long planned_bytes(const char *plan) {
    const char *total = strstr(plan, "\ntotal ");
    long long bytes = 0;
    if (total == NULL || sscanf(total, " total %*s %*s %lld", &bytes) != 1) {
        fail_msg("no total in %.3000s", plan);
    }
    return bytes;
}

// wire: for the rules under which whole vectors travel.
static void check_plan(void **state, int ranks, const char *more, const char *wire) {
    Fleet *fleet = fleet_new(ranks > 0 ? stage_with_ranks(state) : stage_of(state));
    const char *wires[RULES_TESTED];
    for (int i = 0; i < RULES_TESTED; i++) {
        wires[i] = rule_cases[i].exchanges > 0 ? wire : "";
        fleet_start(fleet, ranks, "%s %s %s", rule_cases[i].options, more, wires[i]);
    }
    fleet_finish(fleet);
    for (int i = 0; i < RULES_TESTED; i++) {
        char arguments[512];
        int64_t planned = (int64_t)fleet_number(fleet, i, "end", 0, "planned_bytes");
        snprintf(arguments, sizeof arguments, "plan --config base.json --ranks %d %s %s %s",
                 ranks > 0 ? ranks : 1, rule_cases[i].options, more, wires[i]);
        Outcome outcome = program_run(fleet->stage, 0, arguments);
        outcome_check(&outcome, 0, arguments);
        assert_int_equal(planned_bytes(outcome.output), planned);
        text_check(outcome.output, "\nfits             yes: ", arguments);
        assert_string_equal(outcome.errors, "");
    }
}

static void plan_prints_what_one_rank_reserves(void **state) {
    check_plan(state, 0, "--micro-batch 3 --threads 2", "");
}
static void plan_prints_what_two_ranks_reserve(void **state) { check_plan(state, 2, "", "--wire int8"); }

// 2.7 billion parameters and 64 ranks, on whatever machine this is: planning allocates
// nothing.
static void a_plan_allocates_nothing(void **state) {
    Outcome outcome = program_run(stage_of(state), 0, "plan --model 2.7B --ranks 64 --threads 8");
    outcome_check(&outcome, 0, "plan --model 2.7B");
    assert_true(planned_bytes(outcome.output) > 2 * 4 * 2650000000LL);
}

// ---- Before training ------------------------------------------------------------------

// Ranks with other commands, or of which one has a mistake in its command line, do not wait
// for each other for ever.
static void ranks_that_differ_end_at_once(void **state) {
#define TRAINING "--config base.json --out never"
    Stage *stage = stage_with_ranks(state);
    static const struct {
        const char *first, *second, *part;
    } cases[] = {
        {"plan", TRAINING, "rank 1 was started with the command train and rank 0 with plan"},
        {TRAINING, "sample --from x", "rank 1 was started with the command sample and rank 0 with train"},
        {TRAINING, "--bogus 1", "unknown option --bogus"},
        {"--bogus 1", TRAINING, "unknown option --bogus"},
        {"eval --from x --data y", TRAINING, "rank 1 was started with the command train"},
    };
#undef TRAINING
    enum { CASES = sizeof cases / sizeof cases[0] };
    Program programs[CASES];
    for (int i = 0; i < CASES; i++) {
        Setting setting = {.second = cases[i].second};
        programs[i] = program_start(stage, 2, &setting, cases[i].first);
    }
    for (int i = 0; i < CASES; i++) {
        Outcome outcome = program_finish_within(stage, &programs[i], 60);
        outcome_check(&outcome, 2, cases[i].part);
        text_check(outcome.errors, cases[i].part, cases[i].first);
        assert_int_equal(text_count(outcome.errors, "train_gpt: "), 1);
    }
}

// Steps of Muon that every rank makes by itself would drift apart where oneDNN rounds differently.
// Other rules go on, --inner auto is AdamW for such ranks, and the start says which rank differs.
static void ranks_that_round_differently_are_named(void **state) {
    Stage *stage = stage_with_ranks(state);
    Setting setting = {.second_has = "ONEDNN_MAX_CPU_ISA=SSE41"};
    static const struct {
        const char *options;
        bool refused, muon;
    } cases[] = {{"--inner muon --optimizer ddp", true, false},
                 {"--inner muon --optimizer zero1", false, true},
                 {"--optimizer ddp --micro-batch 128 --tokens 16384", false, false},
                 {"--optimizer zero1 --micro-batch 128 --tokens 16384", false, true}};
    library_instructions(stage);
    for (int i = 0; i < 4; i++) {
        char arguments[256];
        snprintf(arguments, sizeof arguments, "--config base.json %s --out rounds-%d", cases[i].options, i);
        Program program = program_start(stage, 2, &setting, arguments);
        Outcome outcome = program_finish_within(stage, &program, 100);
        outcome_check(&outcome, cases[i].refused ? 2 : 0, arguments);
        text_check(cases[i].refused ? outcome.errors : outcome.output,
                   cases[i].refused ? "rounds them differently than rank 0" : "\nbuilds     rank 1 on ",
                   arguments);
        if ((strstr(outcome.output, "\nmuon ") != NULL) != cases[i].muon) { fail_msg("Muon: %s", arguments); }
    }
}

// Open MPI with one rank on each of two hosts, which are both this machine: what it starts by ssh
// elsewhere begins here. They are one job, with the bits of two ranks on one host. (With more ranks
// on such a host Open MPI crashes: for it, all of them have the same address.)
static void ranks_of_two_hosts_train_together(void **state) {
    Stage *stage = stage_with_ranks(state);
    char version[STAGE_PATH_SIZE + 32];
    snprintf(version, sizeof version, "%s --version | grep -q 'Open MPI'", stage->launcher);
    if (system(version) != 0) { leave_out("Open MPI"); }
    Fleet *fleet = fleet_new(stage);
    fleet_start(fleet, 2, "--optimizer zero1");
    fleet_finish(fleet);
    stage_write(stage, "agent", "#!/bin/sh\nshift\nexec sh -c \"$*\"\n");
    shell(stage,
          "chmod +x agent && OMPI_MCA_btl=self,tcp OMPI_MCA_plm_rsh_agent=\"$PWD/agent\" "
          "PRTE_MCA_plm_ssh_agent=\"$PWD/agent\" timeout 100 %s --host localhost:1,elsewhere:1 -np 2 "
          "\"$TRAIN_GPT\" --config base.json --optimizer zero1 --out hosts > hosts.txt 2>&1 < /dev/null || "
          "! cat hosts.txt",
          stage->launcher);
    char path[STAGE_PATH_SIZE];
    text_check(stage_read_text(stage, stage_path(stage, "hosts.txt", path)),
               "\nexchange   flat, 2 hosts of 1 rank\n", "two hosts");
    json_t *events = log_read(stage, "hosts");
    assert_string_equal(log_fingerprint(events).text, fleet->prints[0].text);
    json_decref(events);
}

// A rank that does not come: no function of MPI returns, and the start ends all the same.
static void a_start_without_a_rank_ends_at_its_deadline(void **state) {
    Stage *stage = stage_with_ranks(state);
    char command[2 * STAGE_PATH_SIZE];
    snprintf(command, sizeof command,
             "%s -np 2 sh -c '[ " RANK_IN_SHELL " = 0 ] || exec sleep 60; exec \"$0\" \"$@\"' \"$TRAIN_GPT\" "
             "--config base.json --timeout-s 2 --out alone > alone.txt 2>&1; echo \"code $?\" >> alone.txt",
             stage->launcher);
    double began = program_clock();
    shell(stage, "%s", command);
    char path[STAGE_PATH_SIZE];
    const char *printed = stage_read_text(stage, stage_path(stage, "alone.txt", path));
    text_check(printed, "has waited for the other ranks for 1 s, and waits until 2 s", "a start");
    text_check(printed, "has not met the other ranks in 2 s (--timeout-s)", "a start");
    text_check(printed, "code 3", "a start");
    assert_true(program_clock() - began < 50);
}

// Whoever waits for a slow rank must not be told of the network.
static void a_slow_rank_is_named(void **state) {
    Stage *stage = stage_with_ranks(state);
    Outcome outcome = program_run(stage, 2,
                                  "--config base.json --optimizer zero1 --accumulate 2 --slow-rank 1 "
                                  "--slow-ms 60 --out slow --tokens 2k");
    outcome_check(&outcome, 0, "--slow-rank");
    text_check(outcome.output, "\nslow       rank 1 on ", "--slow-rank");
    text_check(outcome.output, " times as long for a micro-batch as the median", "--slow-rank");
    text_check(outcome.output, "--rank-accumulate ", "--slow-rank");
    outcome = program_run(stage, 0, "plan --like slow");
    outcome_check(&outcome, 0, "plan --like slow");
    text_check(outcome.output, "\nslow             rank 1 takes ", "plan --like slow");
    shell(stage, "tail -n 1 slow/log.jsonl | grep -q '\"rank_micro_batch_ms\":.[0-9.]*,[0-9.]*.}'");
}

// One process answers for all.
static void a_plan_under_a_launcher_is_printed_once(void **state) {
    Outcome outcome = program_run(stage_with_ranks(state), 2, "plan --ranks 2");
    outcome_check(&outcome, 0, "plan");
    assert_int_equal(text_count(outcome.output, "memory of one rank"), 1);
}

// ---- Texts ----------------------------------------------------------------------------

// A saved configuration without the line of --out, which is the only one that may differ.
static char *read_saved(const Stage *stage, const char *name) {
    char path[STAGE_PATH_SIZE];
    char *text = file_read(stage_path(stage, name, path));
    assert_non_null(text);
    char *out = strstr(text, "\n \"out\": ");
    assert_non_null(out);
    char *end = out + 1 + strcspn(out + 1, "\n");
    memmove(out, end, strlen(end) + 1);
    return text;
}

// Keeps of a run's output what lies between the sample and the names of the files.
static void cut_sample(char *output, const char *what) {
    char *begin = strstr(output, "\nsample "), *end = strstr(output, "\nlog ");
    if (begin == NULL || end == NULL || end < begin) {
        fail_msg("%s: there is no sample in: %s", what, output);
    }
    *end = '\0';
    memmove(output, begin, strlen(begin) + 1);
}

static void the_saved_configuration_repeats_the_run(void **state) {
    Stage *stage = stage_of(state);
    Outcome first = program_run(
        stage, 0,
        "--config base.json --optimizer zero1 --accumulate 3 --lr 0.0035 --beta2 0.97 --seed 7 "
        "--weight-decay 0.07 --sample-tokens 60 --prompt ' one \"two\" # three\\four' --report-every 1 "
        "--out saved-1");
    outcome_check(&first, 0, "the first run");
    Outcome second = program_run(stage, 0, "--config saved-1/config.json --out saved-2");
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
    char *saved[2] = {read_saved(stage, "saved-1/config.json"), read_saved(stage, "saved-2/config.json")};
    assert_string_equal(saved[0], saved[1]);
    free(saved[0]);
    free(saved[1]);
    cut_sample(first.output, "the first run");
    cut_sample(second.output, "the second run");
    text_check(first.output, " one \"two\" # three\\four", "the sample");
    assert_string_equal(first.output, second.output);
}

// Every rank takes the split that was measured: one that took another would have other bits than
// the run whose configuration names it.
static void ranks_of_unequal_rounds_choose_alike(void **state) {
    Stage *stage = stage_with_ranks(state);
    json_t *chosen =
        train(stage, 3, "--optimizer acco --rank-accumulate 8,2,5 --acco-split auto --link-mbit 50");
    char name[64], options[128];
    snprintf(name, sizeof name, "run-%d/config.json", stage->count);
    char *saved = read_saved(stage, name);
    assert_null(strstr(saved, "\"acco-split\": \"auto\""));
    free(saved);
    snprintf(options, sizeof options, "--config %s --out split-again", name);
    Outcome outcome = program_run(stage, 3, options);
    outcome_check(&outcome, 0, options);
    json_t *repeated = log_read(stage, "split-again");
    assert_string_equal(log_fingerprint(chosen).text, log_fingerprint(repeated).text);
    json_decref(chosen);
    json_decref(repeated);
}

// A validation before the first report stands under the heading of the table, too. Where
// there is no scripts/plot, nobody is sent to it.
static void the_table_begins_with_its_heading(void **state) {
    Outcome outcome = program_run(stage_of(state), 0,
                                  "--config base.json --report-every 1000 --val-every 2 --val-batches 2");
    outcome_check(&outcome, 0, "a validation before a report");
    const char *heading = strstr(outcome.output, "\ncommit tokens "),
               *validation = strstr(outcome.output, " validation loss ");
    assert_true(heading != NULL && validation != NULL && heading < validation);
    assert_null(strstr(heading + 1, "\ncommit tokens "));
    assert_null(strstr(outcome.output, "scripts/plot"));
}

// What `make run` starts takes options of the user's in the place of its own.
// What leaks under a launcher is Open MPI's (test/run).
static void the_first_run_takes_options(void **state) {
    Stage *stage = stage_of(state);
    shell(stage, "out=$PWD/first && cd \"$PROJECT_ROOT\" && export ASAN_OPTIONS=detect_leaks=0 && "
                 "scripts/first-run --optimizer zero1 --tokens=2k --sample-tokens 4 --prompt 'Two words' "
                 "--out \"$out\" > \"$out.txt\" && grep -q '^rule       zero1' \"$out.txt\" && "
                 "grep -q \" --prompt 'Two words' \" \"$out.txt\" && grep -q '^Two words' \"$out.txt\" && "
                 "grep -q 'muon       steps' \"$out.txt\" && "
                 "scripts/first-run --config \"$out/config.json\" --out \"$out-again\" > \"$out.txt\" && "
                 "grep -q '^rule       zero1' \"$out.txt\" && grep -q '^Two words' \"$out.txt\"");
}

// Started without standard output, as by some daemons: no file of the run gets what would
// be printed.
static void closed_output_reaches_no_file(void **state) {
    Stage *stage = stage_of(state);
    shell(stage, "\"$TRAIN_GPT\" --config base.json --out silent <&- >&- 2>&-");
    shell(stage, "! grep -v '^{\"event\"' silent/log.jsonl && ! grep '^acco.c' silent/progress.tsv");
}

// A line on stderr is one write. Datagrams keep writes apart.
static void a_message_is_written_whole(void **state) {
    Stage *stage = stage_of(state);
    int ends[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_DGRAM, 0, ends), 0);
    char name[301], text[1024];
    memset(name, 'x', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    pid_t child = fork();
    if (child == 0) {
        if (dup2(ends[1], STDERR_FILENO) == STDERR_FILENO) {
            execl(stage->binary, "train_gpt", "--data", name, (char *)NULL);
        }
        _exit(125);
    }
    close(ends[1]);
    ssize_t bytes = recv(ends[0], text, sizeof text, 0);
    close(ends[0]);
    int status = 0;
    assert_true(waitpid(child, &status, 0) == child && WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 2);
    assert_true(bytes > (ssize_t)sizeof name && text[bytes - 1] == '\n');
}

static void the_page_of_options_is_current(void **state) {
    char path[PATH_MAX + 16];
    snprintf(path, sizeof path, "%s/docs/options.md", stage_of(state)->root);
    char *page = file_read(path), *expected = NULL;
    size_t size = 0;
    if (page == NULL) { fail_msg("there is no %s: PROJECT_ROOT says where it is", path); }
    FILE *file = open_memstream(&expected, &size);
    options_print_markdown(file);
    fclose(file);
    const char *open_mark = "<!-- options -->\n", *close_mark = "<!-- /options -->";
    char *begin = strstr(page, open_mark), *end = strstr(page, close_mark);
    if (begin == NULL || end == NULL || end < begin) {
        fail_msg("%s has no section from %s to %s", path, "<!-- options -->", close_mark);
    }
    *end = '\0';
    if (strcmp(begin + strlen(open_mark), expected) != 0) {
        fail_msg("the options of %s are not those of the program: make options", path);
    }
    free(expected);
    free(page);
}

static void help_names_every_option(void **state) {
    static const char *const ways[] = {"--help", "help all", "--optimiser x --help"};
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

// What somebody who reports a problem is asked for.
static void version_tells_the_build(void **state) {
    static const char *const facts[] = {"acco.c " ACCO_VERSION "\ncommit     ",
                                        "\ncompiler   ",
                                        "\nprocessor  -m",
                                        "\nproducts   o",
                                        "\nMPI        ",
                                        "\nCUDA       ",
                                        "\nNCCL       "};
    Outcome outcome = program_run(stage_of(state), 0, "--version");
    outcome_check(&outcome, 0, "--version");
    for (size_t i = 0; i < sizeof facts / sizeof facts[0]; i++) {
        text_check(outcome.output, facts[i], "--version");
    }
    const char *mpi = strstr(outcome.output, "\nMPI ") + 1; // libraries go on with how they were built
    assert_true(strcspn(mpi, "\n") < strcspn(mpi, ","));
    assert_int_equal(text_lines(outcome.output), 8);
    assert_true((strstr(outcome.output, "MPI        none") == NULL) == stage_of(state)->has_mpi);
}

// ---------------------------------------------------------------------------------------
// User mistakes: exit code 2, one line, and nothing left behind. The commands run in an
// empty directory within the stage.

#define BASE "--config ../base.json "

static const Refusal refusals[] = {
    {"unknown option", BASE "--optimiser acco", "--optimizer"},
    {"unknown option far from all", BASE "--qqqqqqqqqqqq 1", "--help"},
    {"unknown command", "trian", "train"},
    {"rollback without checkpoints", BASE "--on-spike rollback", "--save-every"},
    {"rollback without any checkpoint", BASE "--on-spike rollback --save-every never", "--save-every"},
    {"nearly never", BASE "--save-every nevr", "nevr is not valid (did you mean never?)"},
    {"a time without a known unit", BASE "--save-every 10d", "30s, 10m or 2h"},
    {"a time that is too short", BASE "--save-every 0.1s", "a time of 1s or more"},
    {"a number of commits below 1", BASE "--save-every 0", "0 is not valid"},
    {"two models to begin with", BASE "--from a --finetune b", "choose one"},
    {"fine-tuning a sample", "sample --finetune b", "--finetune has no effect on train_gpt sample"},
    {"a sample of no model", "sample --from nope", "nope is neither a directory"},
    {"a start that is a preset", BASE "--from tiny", "give --model tiny"},
    {"a start that is a file", BASE "--from ../empty.txt", "../empty.txt is no directory"},
    {"a start without a model", BASE "--from ../used", "no directory with a config.json"},
    {"NCCL without a GPU", BASE "--device cpu --gpu-exchange nccl", "--gpu-exchange nccl"},
    {"multiprocessors without a GPU", BASE "--device cpu --nccl-ctas 4", "--nccl-ctas has no effect"},
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
    {"bad line of a configuration file", "--config ../typing.txt",
     "typing.txt: unknown option micro-bach: did you mean micro-batch?"},
    {"missing data", BASE "--data ../absent.txt", "no file '../absent.txt'"},
    {"validation data of training", BASE "--data ../text.txt --val-data ./../text.txt",
     "is among --data, too"},
    {"missing validation data", BASE "--val-data ../absent.txt", "no file '../absent.txt'"},
    {"empty data", BASE "--data ../empty.txt", "is empty"},
    {"data is a directory without tokens", BASE "--data ../used", "holds no .bin file"},
    {"header that promises more", BASE "--data ../promises.bin",
     "its header promises 1000 tokens of 2 bytes"},
    {"header that is cut", BASE "--data ../cut.bin", "truncated"},
    {"odd number of bytes", BASE "--data ../odd.bin", "an odd number"},
    {"token beyond the vocabulary", BASE "--data ../beyond.bin", "token 300 at position 70 "},
    {"sequence longer than the positions", BASE "--seq-len 33", "at most 32"},
    {"text too short for a window", BASE "--data ../word.txt", "--seq-len"},
    {"text too short for the batch", BASE "--data ../short.txt --micro-batch 50 --tokens 1M",
     "lower --micro-batch"},
    {"epochs of what is endless", BASE "--epochs 2", "--epochs needs --data, whose default, builtin,"},
    {"epochs less than a commit", BASE "--data ../text.txt --epochs 0.01",
     "--tokens 40 is less than one commit"},
    {"tokens less than a commit", BASE "--tokens 100", "less than one commit"},
    {"out below a file", BASE "--out ../empty.txt/x", "Not a directory"},
    {"out is a file", BASE "--out ../empty.txt", "Not a directory: choose another with --out"},
    {"out where nothing can be made", BASE "--out /proc/x", "cannot create the directory /proc/x"},
    {"out of an earlier run", BASE "--out ../used", "already holds"},
    {"fp16", BASE "--precision fp16", "fp16 is unknown (did you mean fp32?)"},
    {"moments in fp16", BASE "--moments fp16",
     "--moments: fp16 is unknown (did you mean fp32?); allowed: fp32 or bf16"},
    {"acco with one round", BASE "--optimizer acco --accumulate 1", "use 2 or more"},
    {"ddp with auto", BASE "--optimizer ddp --accumulate auto", "needs --optimizer dpu, acco-wp or acco"},
    {"diloco with auto", BASE "--optimizer diloco --accumulate auto", "diloco takes a fixed number"},
    {"auto with a schedule by commits", BASE "--accumulate auto --lr-by commits", "with --lr-by commits"},
    {"auto with a list", BASE "--accumulate auto --rank-accumulate 2", "choose one"},
    {"option of another rule", BASE "--co2-tau 4",
     "--co2-tau belongs to --optimizer co2, this run uses acco"},
    {"option of two other rules", BASE "--bucket-mb 1", "--bucket-mb belongs to --optimizer ddp or zero1"},
    {"estimate of a rule without", BASE "--optimizer dpu --estimate-wire int8",
     "--estimate-wire belongs to --optimizer acco"},
    {"list of a local rule", BASE "--optimizer co2 --rank-accumulate 2,2", "--rank-accumulate belongs to"},
    {"word in the list", BASE "--optimizer ddp --rank-accumulate 4,two", "rank 1 has no valid number"},
    {"zero in the list", BASE "--optimizer ddp --rank-accumulate 0,4", "rank 0 has no valid number"},
    {"list with an end", BASE "--optimizer ddp --rank-accumulate 4,", "rank 1 has no valid number"},
    {"a single micro-batch in acco's list", BASE "--rank-accumulate 4,1",
     "rank 1's 1: acco computes a commit in 2"},
    {"split that is none", BASE "--acco-split 7:1",
     "--acco-split 7:1 is no split; allowed: wire, auto, half"},
    {"list for more ranks", BASE "--rank-accumulate 4,2,2", "has 3 numbers for "},
    {"list for fewer ranks of a plan", "plan --config ../base.json --ranks 3 --rank-accumulate 4,2",
     "has 2 numbers for 3 ranks"},
    {"unknown wire", BASE "--wire fp8", "fp32, bf16, int8, int4 or e3m0"},
    {"gap below 1", BASE "--optimizer co2 --co2-gap 0.5", "allowed: 1 .. 1000000"},
    {"steps that fragments do not share", BASE "--optimizer streaming-diloco --diloco-H 7", "use 8"},
    {"fewer steps than fragments", BASE "--optimizer streaming-diloco --diloco-H 1",
     "is not a multiple of --streaming-P 2"},
    {"fragment that is too late", BASE "--optimizer streaming-diloco --diloco-H 4 --streaming-tau 2",
     "not below H/P = 2"},
    {"sparse exchange that is too late", BASE "--optimizer sparse-loco --sparse-H 4 --sparse-tau 4",
     "use 0 .. 3"},
    {"wire of a sparse rule", BASE "--optimizer sparse-loco --wire bf16",
     "--wire bf16 does not go together with"},
    {"more fragments than layers", BASE "--optimizer streaming-diloco --streaming-P 3", "has only 2 layers"},
    {"trace where nothing can be made", BASE "--trace /proc/x/trace.json", "/proc/x/trace.json"},
    {"trace that is a directory", BASE "--trace ../used", "../used"},
    {"more memory than there is", BASE "--model 2.7B --seq-len 2048 --micro-batch 65536 --tokens 10G",
     "are available"},
    {"auto without overlap", BASE "--accumulate auto --overlap off", "with --overlap off"},
    {"minimum rate above the rate", BASE "--lr 0.001 --min-lr 0.002", "is above --lr"},
    {"slow rank without a time", BASE "--slow-rank 0", "needs --slow-ms"},
    {"slow rank that is not there", BASE "--slow-rank 7 --slow-ms 1", "--slow-rank 7"},
    {"prompt without a sample", BASE "--prompt x", "with --sample-tokens none"},
    {"ranks outside a plan", BASE "--ranks 2", "it is for plan"},
    {"unknown model", BASE "--model tinny", "tiny"},
    {"unknown model of a plan", "plan --model tinny", "tiny"},
    {"model file that is absent", BASE "--model ../absent.json", "No such file"},
    {"model file with bad json", BASE "--model ../broken.json", "near"},
    {"model of another type", BASE "--model ../type.json", "and must be \"gpt_neo\" or \"gpt2\""},
    {"text as a model", BASE "--model ../text.txt", "text.txt is no config.json of a model"},
    {"text as a checkpoint", BASE "--resume ../base.json",
     "base.json is no checkpoint: it has no checkpoint.json"},
    {"directory without a checkpoint", BASE "--resume ..", "RUN/checkpoints/commit-N"},
    {"evaluation of the built-in corpus", "eval --from .. --data builtin", "the built-in corpus is made up"},
    {"evaluation without a model", "eval --data ../base.json", "give --from DIR"},
    {"text that is far too short", BASE "--data ../three.txt",
     "is too short: of its 3 tokens training with a validation takes"},
    {"help on nothing", "help optimzer", "did you mean optimizer?"},
    {"memory of a GPU in a run", BASE "--gpu-memory 8G", "it is for plan"},
    {"model with another activation", BASE "--model ../relu.json", "must be \"gelu_new\" or"},
    {"model with a small vocabulary", BASE "--model ../bytes.json", "at least 256"},
    {"line end in a name", BASE "--model \"$(printf 'a\\nb')\"", "unknown model"},
    {"line end in a path", BASE "--data \"$(printf '../a\\nb')\"", "../a"},
};

enum { REFUSALS = sizeof refusals / sizeof refusals[0], AT_ONCE = STAGE_PROGRAMS };

// Makes a new empty directory; its absolute path.
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

// What is wrong with a refusal, or NULL. alone: mpirun adds nothing to the message.
static const char *refusal_fault(const Outcome *outcome, const char *directory, const char *part,
                                 bool alone) {
    if (outcome->exit_code != 2) { return "the exit code is not 2"; }
    if (text_count(outcome->errors, "train_gpt: ") != 1) { return "there is not one message"; }
    if (alone && strncmp(outcome->errors, "train_gpt: ", 11) != 0) {
        return "something stands before the message";
    }
    if (alone && text_lines(outcome->errors) != 1) { return "the message has not one line"; }
    if (strstr(outcome->errors, part) == NULL) { return "the message does not say it"; }
    if (outcome->output[0] != '\0') { return "something was printed"; }
    return directory_is_empty(directory) ? NULL : "it left something in the working directory";
}

static void it_is_refused(void **state) {
    const Scene *scene = (const Scene *)*state;
    const Refusal *refusal = scene->refusal;
    char directory[STAGE_PATH_SIZE];
    make_empty_directory(scene->stage, directory);
    Setting setting = {.directory = directory};
    Outcome outcome = program_run_with(scene->stage, 0, &setting, refusal->arguments);
    const char *fault = refusal_fault(&outcome, directory, refusal->part, true);
    if (fault != NULL) {
        fail_msg("%s: %s (\"%s\"): exit code %d\nerrors: %.1000s\noutput: %.300s", refusal->arguments, fault,
                 refusal->part, outcome.exit_code, outcome.errors, outcome.output);
    }
}

// All of them again with two ranks, several at once: each message is printed once.
static void two_ranks_refuse_with_one_message(void **state) {
    enum { EVERY = 3 }; // all ranks leave in one of two ways, whatever the mistake is
    Stage *stage = stage_with_ranks(state);
    Program programs[AT_ONCE];
    char directories[AT_ONCE][STAGE_PATH_SIZE];
    int faults = 0;
    for (int first = 0; first < REFUSALS; first += EVERY * AT_ONCE) {
        for (int i = 0; i < AT_ONCE && first + EVERY * i < REFUSALS; i++) {
            make_empty_directory(stage, directories[i]);
            Setting setting = {.directory = directories[i]};
            programs[i] = program_start(stage, 2, &setting, refusals[first + EVERY * i].arguments);
        }
        for (int i = 0; i < AT_ONCE && first + EVERY * i < REFUSALS; i++) {
            Outcome outcome = program_finish(stage, &programs[i]);
            const Refusal *refusal = &refusals[first + EVERY * i];
            const char *fault = refusal_fault(&outcome, directories[i], refusal->part, false);
            if (fault == NULL) { continue; }
            print_error("%s: %s: exit code %d\n%.700s\n", refusal->arguments, fault, outcome.exit_code,
                        outcome.errors);
            faults++;
        }
    }
    assert_int_equal(faults, 0);
}

// Without this capability root may not write everywhere.
static void a_directory_without_permission_is_refused(void **state) {
    Stage *stage = stage_of(state);
    char directory[STAGE_PATH_SIZE];
    make_empty_directory(stage, directory);
    assert_int_equal(chmod(directory, 0555), 0);
    shell(stage,
          "{ %s '%s' --config base.json --out '%s' 2> errors; test $? = 2; } && grep -q 'Permission denied' "
          "errors",
          geteuid() == 0 ? "setpriv --bounding-set -dac_override" : "", stage->binary, directory);
}

// Instead of a signal at its first instruction.
static void another_processor_is_told(void **state) {
#if !defined(__AVX2__) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    (void)state;
    leave_out("a build for processors with AVX2, without a sanitizer");
#else
    Stage *stage = stage_of(state);
    if (system("command -v qemu-x86_64 > /dev/null") != 0) { leave_out("qemu-x86_64 (Debian: qemu-user)"); }
    shell(stage,
          "{ qemu-x86_64 -cpu Nehalem '%s' --version 2> errors; test $? = 2; } && "
          "grep -q 'built for processors with AVX2, which this one lacks' errors",
          stage->binary);
#endif
}

// A launcher that does not speak this MPI starts copies that know nothing of each other.
static void independent_copies_are_refused(void **state) {
    Stage *stage = stage_of(state);
    char directory[STAGE_PATH_SIZE];
    make_empty_directory(stage, directory);
    Setting setting = {.directory = directory, .tasks = "8", .task = "3"};
    Outcome outcome = program_run_with(stage, 0, &setting, BASE);
    const char *fault = refusal_fault(&outcome, directory, "8 independent copies were started", true);
    if (fault != NULL) { fail_msg("%s: exit code %d: %s", fault, outcome.exit_code, outcome.errors); }
    text_check(outcome.errors, "mpirun", "the advice");
}

static void ranks_with_other_options_are_refused(void **state) {
    static const char *const others[][2] = {{"--seed 2", ": --seed is 2 instead of 1"},
                                            {"--val-every 7", ": --val-every is 7 instead of "},
                                            {"--overlap off", ": --overlap is off instead of on"}};
    Stage *stage = stage_with_ranks(state);
    char second[200];
    Setting setting = {.second = second};
    for (int i = 0; i < 3; i++) {
        snprintf(second, sizeof second, "--config base.json --out m %s", others[i][0]);
        Outcome outcome = program_run_with(stage, 2, &setting, "--config base.json --out m");
        outcome_check(&outcome, 2, others[i][0]);
        text_check(outcome.errors, "rank 1", others[i][0]);
        text_check(outcome.errors, "other options", others[i][0]);
        text_check(outcome.errors, others[i][1], others[i][0]);
        assert_int_equal(text_count(outcome.errors, "train_gpt: "), 1);
    }
    setting.second = "--config base.json --out m --threads 2";
    Outcome outcome = program_run_with(stage, 2, &setting, "--config base.json --out m --threads 1");
    outcome_check(&outcome, 0, "ranks with other numbers of threads");
}

// ---- Lost ranks -----------------------------------------------------------------------

// Waits until the run has written a report, and takes the process ids of its ranks from
// the start event.
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
            for (int i = 0; i < ranks; i++) {
                pids[i] = (pid_t)log_number(json_array_get(list, (size_t)i), "pid");
            }
            json_decref(start);
            free(text);
            return;
        }
        free(text);
        if (program_clock() > until) { fail_msg("%s: no report for 60 s", training->what); }
        if (program_has_ended(stage, training->program.pid, 0, &exit_code)) {
            fail_msg("%s: ended early, %d", training->what, exit_code);
        }
        program_pause(0.02);
    }
}

// Whether the process ends within the time. A zombie that nobody waits for has ended.
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

enum { MOST_LOST_RANKS = 4 };

// How a rank is lost.
typedef struct Loss {
    int ranks, victim, signal_number;
    int mates;                           // ranks of a host
    int rules[RULES_TESTED], rule_count; // one job for each, all at once
    const char *options;                 // beside those of the rule
} Loss;

// Whether a survivor says where it was when the job ended, in words that begin like this.
static bool survivor_says(const Outcome *outcome, const Loss *loss, const char *host, const char *words) {
    for (int rank = 0; rank < loss->ranks; rank++) {
        char expected[160];
        snprintf(expected, sizeof expected, "train_gpt: [rank %d of %d on %.63s, commit ", rank, loss->ranks,
                 host);
        const char *message = rank == loss->victim ? NULL : strstr(outcome->errors, expected);
        const char *place = message == NULL ? NULL : strstr(message, "] ");
        if (place != NULL && strncmp(place + 2, words, strlen(words)) == 0) { return true; }
    }
    return false;
}

// What is wrong with the end of a job that lost a rank, or NULL. A killed rank is named by
// mpirun, and a surviving rank says in which commit and operation it was. A rank that does
// not arrive, or one of its host that waits for it, is named by the program itself.
static const char *loss_fault(const Outcome *outcome, const Loss *loss) {
    char host[64] = "", expected[128];
    gethostname(host, sizeof host - 1);
    if (outcome->exit_code <= 0) { return "it did not fail, or not in time"; }
    if (strstr(outcome->errors, host) == NULL) { return "the host is not named"; }
    if (loss->signal_number == SIGKILL) {
        snprintf(expected, sizeof expected, "ended from outside because rank %d here, process ",
                 loss->victim);
        if (!survivor_says(outcome, loss, host, expected)) { return "no survivor says who is gone"; }
        if (strstr(outcome->errors, "is gone; the latest operation between ranks was: ") == NULL) {
            return "no survivor says where it was";
        }
        if (text_count(outcome->errors, "nothing of this run is saved; --save-every 10m saves") != 1) {
            return "it is not said what is lost";
        }
        return strstr(outcome->errors, "scripts/launch") == NULL ? NULL
                                                                 : "who lost a rank is told to stop well";
    }
    if (outcome->exit_code != 3) { return "the exit code is not 3"; }
    // mpirun wakes the stopped rank in order to end it. It must not blame another then.
    bool named = false;
    for (int rank = 0; rank < loss->ranks; rank++) {
        snprintf(expected, sizeof expected, ": rank %d on %.63s", rank, host);
        if (strstr(outcome->errors, expected) == NULL) { continue; }
        if (rank / loss->mates != loss->victim / loss->mates) { return "another host is blamed"; }
        named = true;
    }
    return named ? NULL : "no message names host, operation and rank";
}

// One rank of every job is killed or stopped.
static void check_loss(void **state, const Loss *loss) {
    enum { DEADLINE = 4 };
    Stage *stage = stage_with_ranks(state);
    Training trainings[RULES_TESTED];
    pid_t pids[RULES_TESTED][MOST_LOST_RANKS];
    bool killed = loss->signal_number == SIGKILL;
    int faults = 0, jobs = loss->rule_count;
    for (int i = 0; i < jobs; i++) {
        char options[512];
        snprintf(options, sizeof options, "%s %s %s --timeout-s %d", rule_cases[loss->rules[i]].options,
                 endless, loss->options, killed ? 100 : DEADLINE);
        trainings[i] = training_start(stage, loss->ranks, options);
    }
    for (int i = 0; i < jobs; i++) { wait_for_report(stage, &trainings[i], pids[i], loss->ranks); }
    for (int i = 0; i < jobs; i++) { assert_int_equal(kill(pids[i][loss->victim], loss->signal_number), 0); }
    double until = program_clock() + (killed ? 10 : DEADLINE + 10);
    for (int i = 0; i < jobs; i++) {
        Outcome outcome = program_finish_within(stage, &trainings[i].program, until - program_clock());
        const char *fault = loss_fault(&outcome, loss);
        for (int rank = 0; rank < loss->ranks && fault == NULL; rank++) {
            fault = process_is_gone(pids[i][rank], 5) ? NULL : "a rank is still there";
        }
        json_decref(log_read(stage, trainings[i].out)); // fails unless every line is whole
        kill(pids[i][loss->victim], SIGKILL);
        if (fault == NULL) { continue; }
        print_error("%s: %s: exit code %d\n%.1500s\n", trainings[i].what, fault, outcome.exit_code,
                    outcome.errors);
        faults++;
    }
    assert_int_equal(faults, 0);
}

static void check_lost_rank(void **state, int victim, int signal_number) {
    Loss loss = {2, victim, signal_number, 1, {0}, RULES_TESTED, ""};
    for (int i = 0; i < RULES_TESTED; i++) { loss.rules[i] = i; }
    check_loss(state, &loss);
}

static void a_killed_rank_0_ends_the_job(void **state) { check_lost_rank(state, 0, SIGKILL); }
static void a_killed_rank_1_ends_the_job(void **state) { check_lost_rank(state, 1, SIGKILL); }
static void a_stopped_rank_0_ends_the_job(void **state) { check_lost_rank(state, 0, SIGSTOP); }
static void a_stopped_rank_1_ends_the_job(void **state) { check_lost_rank(state, 1, SIGSTOP); }

// On two hosts of two ranks. Most ranks wait for the lost one only through others of its host.
static void check_lost_on_two_levels(void **state, int victim, int signal_number) {
    Loss loss = {4, victim, signal_number, 2, {ZERO1, ACCO, DILOCO}, 3, "--ranks-per-host 2"};
    check_loss(state, &loss);
}

static void a_killed_rank_on_two_levels_ends_the_job(void **state) {
    check_lost_on_two_levels(state, 3, SIGKILL);
}
static void a_stopped_leader_of_a_host_is_named(void **state) { check_lost_on_two_levels(state, 2, SIGSTOP); }
static void a_stopped_rank_inside_a_host_is_named(void **state) {
    check_lost_on_two_levels(state, 1, SIGSTOP);
}

// ---- Ends by signals ------------------------------------------------------------------

// Programs get a terminal from now on. Returns its other end, from which the caller reads what
// they write on it, and which it closes.
static int stage_open_terminal(Stage *stage) {
    int screen = posix_openpt(O_RDWR | O_NOCTTY | O_NONBLOCK);
    assert_true(screen >= 0 && grantpt(screen) == 0 && unlockpt(screen) == 0);
    snprintf(stage->terminal, sizeof stage->terminal, "%s", ptsname(screen));
    return screen;
}

// Whoever ends a run by hand finds whole lines in its log, and no rank left over.
static void check_signal(void **state, int ranks, int signal_number) {
    Stage *stage = ranks > 0 ? stage_with_ranks(state) : stage_of(state);
    pid_t pids[2];
    char said[4096] = "";
    int size = ranks > 0 ? ranks : 1, screen = stage_open_terminal(stage);
    Training training = training_start(stage, ranks, endless);
    stage->terminal[0] = '\0';
    wait_for_report(stage, &training, pids, size);
    assert_int_equal(kill(training.program.pid, signal_number), 0);
    Outcome outcome = program_finish_within(stage, &training.program, 10);
    ssize_t heard = read(screen, said, sizeof said - 1);
    (void)heard; // nothing, as a rule
    close(screen);
    if (outcome.exit_code <= 0) {
        fail_msg("signal %d, %d ranks: exit code %d", signal_number, ranks, outcome.exit_code);
    }
    if (ranks == 0) { assert_int_equal(outcome.exit_code, 75); }
    // Open MPI 5 forwards nothing any more, so this is said on the terminal.
    if (ranks > 0 && strstr(outcome.errors, "started with scripts/launch") == NULL) {
        text_check(said, "started with scripts/launch", "mpirun is told to end");
    }
    for (int i = 0; i < size; i++) { assert_true(process_is_gone(pids[i], 5)); }
    json_t *events = log_read(stage, training.out), *end = log_event_of(events, "end", -1);
    // A launcher passes SIGINT on as SIGTERM, and may follow with SIGKILL before a rank
    // is done.
    assert_true(end != NULL || ranks > 0);
    if (end != NULL) {
        assert_string_equal(json_string_value(json_object_get(end, "reason")), "asked to stop");
        assert_true(json_is_true(json_object_get(log_event_of(events, "checkpoint", -1), "saved")));
        // What was trained since the report before is in one, too.
        assert_true(log_number(log_event_of(events, "report", -1), "commit") == log_number(end, "commit"));
    }
    json_decref(events);
}

static void one_rank_ends_well_by_signal(void **state) {
    check_signal(state, 0, SIGINT);
    check_signal(state, 0, SIGTERM);
    check_signal(state, 0, SIGHUP);
    check_signal(state, 0, SIGUSR1);
}

// A run that will be long measures the rate of a matrix product when it begins, and its
// reports tell the share of it. In a short one only the operations are known.
static void a_long_run_tells_its_share_of_the_product_rate(void **state) {
    Stage *stage = stage_of(state);
    pid_t pid;
    double peak = 0;
    Training training = training_start(stage, 0, endless);
    wait_for_report(stage, &training, &pid, 1);
    assert_int_equal(kill(pid, SIGUSR1), 0);
    Outcome outcome = program_finish_within(stage, &training.program, 20);
    const char *line = strstr(outcome.output, "\npeak       ");
    assert_true(line != NULL &&
                sscanf(line, "\npeak %lf TFLOP/s over all ranks: products of a layer", &peak) == 1);
    text_check(outcome.output, " % of the peak\n", training.what);
    json_t *events = log_read(stage, training.out), *report = log_event_of(events, "report", 0);
    double share = log_number(report, "model_tflops") / peak;
    assert_true(share > 0); // of a tiny model; on a loaded machine it may be above 1
    assert_true(fabs(log_number(report, "mfu") - share) <= 1e-3 * share);
    json_decref(events);
    training = training_start(stage, 0, "--tokens 2k --val-batches none");
    events = training_finish(stage, &training);
    report = log_event_of(events, "report", -1);
    assert_true(log_number(report, "model_tflops") > 0);
    assert_null(json_object_get(report, "mfu"));
    json_decref(events);
}

// It has nothing to go on from, so whoever starts stopped jobs again must not start it.
static void a_stop_that_saves_nothing_has_a_code_of_its_own(void **state) {
    Stage *stage = stage_of(state);
    pid_t pid;
    char options[256];
    snprintf(options, sizeof options, "%s --save-every never", endless);
    Training training = training_start(stage, 0, options);
    wait_for_report(stage, &training, &pid, 1);
    assert_int_equal(kill(pid, SIGUSR1), 0);
    Outcome outcome = program_finish_within(stage, &training.program, 20);
    outcome_check(&outcome, 4, training.what);
    text_check(outcome.output, "stopped    because it was asked to\n", training.what);
    text_check(outcome.output, "not saved  because of --save-every never", training.what);
}

static void two_ranks_end_well_by_signal(void **state) {
    check_signal(state, 2, SIGINT);
    check_signal(state, 2, SIGTERM);
}

// The run was asked to stop, has saved its last commit, and said so.
static void check_saved_stop(Stage *stage, const Training *training) {
    Outcome outcome = program_finish_within(stage, &training->program, 30);
    outcome_check(&outcome, 75, training->what);
    text_check(outcome.output, "continue with --out", training->what);
    json_t *events = log_read(stage, training->out);
    json_t *end = log_event_of(events, "end", -1), *saved = log_event_of(events, "checkpoint", -1);
    assert_true(end != NULL && json_is_true(json_object_get(saved, "saved")));
    assert_true(log_number(saved, "commit") == log_number(end, "commit"));
    json_decref(events);
}

// Commits that take longer than the second that mpirun leaves to its ranks.
static const char slow_commits[] = "--tokens 1000G --report-every 1 --val-batches none --accumulate 2 "
                                   "--slow-rank 0 --slow-ms 1000 --optimizer zero1";

// Ctrl-C, which reaches all in front of the terminal, and SIGTERM, which reaches who it was
// sent to.
static void launched_ranks_have_time_to_save(void **state) {
    Stage *stage = stage_with_ranks(state);
    char plain[STAGE_PATH_SIZE];
    Training trainings[2];
    pid_t pids[2];
    strcpy(plain, stage->launcher);
    snprintf(stage->launcher, sizeof stage->launcher, "'%.400s/scripts/launch' %.500s", stage->root, plain);
    for (int i = 0; i < 2; i++) { trainings[i] = training_start(stage, 2, slow_commits); }
    strcpy(stage->launcher, plain);
    for (int i = 0; i < 2; i++) {
        wait_for_report(stage, &trainings[i], pids, 2);
        pid_t pid = trainings[i].program.pid;
        assert_int_equal(i == 0 ? kill(-pid, SIGINT) : kill(pid, SIGTERM), 0);
    }
    for (int i = 0; i < 2; i++) { check_saved_stop(stage, &trainings[i]); }
}

// mpirun forgets a signal that comes before it has ranks. Here a script stands for it.
static void a_stop_before_there_are_ranks_is_repeated(void **state) {
    Stage *stage = stage_of(state);
    stage_write(stage, "early",
                "#!/bin/sh\ntrap '' USR1; touch begun; sleep 1; trap 'exit 75' USR1\n"
                "for i in 1 2 3 4 5 6 7 8 9; do sleep 1; done\n");
    shell(stage,
          "chmod +x early; '%s/scripts/launch' ./early > launch.txt 2>&1 & launch=$!; "
          "while [ ! -e begun ]; do sleep 0.05; done; kill -TERM $launch; wait $launch; [ $? = 75 ]",
          stage->root);
}

// Whoever asks twice does not want to wait for what is saved; whoever closes the terminal after a
// Ctrl-C does.
static void a_second_signal_ends_a_launch_and_a_closed_terminal_does_not(void **state) {
    Stage *stage = stage_of(state);
    stage_write(stage, "saving",
                "#!/bin/sh\ntrap 'trap \"\" USR1; touch $1.asked; sleep 5; exit 75' USR1; touch $1\nwhile :; "
                "do sleep 0.1; done\n");
    shell(stage,
          "chmod +x saving; for second in TERM HUP; do ( "
          "  '%s/scripts/launch' ./saving $second > launch-$second.txt 2>&1 & launch=$!; "
          "  while [ ! -e $second ]; do sleep 0.05; done; kill -TERM $launch; "
          "  while [ ! -e $second.asked ]; do sleep 0.05; done; sleep 2.5; kill -$second $launch; "
          "  wait $launch; echo $? > $second.code ) & done; wait; "
          "[ \"$(cat TERM.code HUP.code)\" = \"$(printf '143\\n75')\" ] && "
          "grep -q 'is lost' launch-TERM.txt && ! grep -q 'is lost' launch-HUP.txt",
          stage->root);
}

// What goes to a full disk is no success, also where it was written some time before the end.
static void results_that_are_lost_are_no_success(void **state) {
    Stage *stage = stage_of(state);
    Outcome outcome = program_run(stage, 0, "--config base.json --tokens 128 --out lost");
    outcome_check(&outcome, 0, "a model");
    stage_write(stage, "prompts.txt", "a\nb\n");
    static const char *const commands[] = {"help all",
                                           "sample --from lost --prompts prompts.txt --sample-tokens 3"};
    for (int i = 0; i < 2; i++) {
        shell(stage,
              "'%s' %s > /dev/full 2> full.txt; [ $? = 3 ] && grep -q 'could not be written: No space' "
              "full.txt",
              stage->binary, commands[i]);
    }
}

// A validation that takes minutes ends between two batches, also where only one rank was
// asked.
static void a_validation_hears_a_signal(void **state) {
    static const char long_validation[] =
        "--tokens 1000G --report-every 1 --val-every 1 --val-batches 1000000";
    Stage *stage = stage_of(state);
    Training trainings[2];
    pid_t pids[2];
    int runs = stage->has_mpi ? 2 : 1;
    for (int i = 0; i < runs; i++) { trainings[i] = training_start(stage, 2 * i, long_validation); }
    for (int i = 0; i < runs; i++) {
        wait_for_report(stage, &trainings[i], pids, i + 1);
        assert_int_equal(kill(pids[i], SIGUSR1), 0);
    }
    for (int i = 0; i < runs; i++) { check_saved_stop(stage, &trainings[i]); }
}

static void a_signal_while_it_starts_is_heard(void **state) {
    static const int numbers[] = {SIGTERM, SIGINT, SIGHUP, SIGUSR1};
    Stage *stage = stage_of(state);
    for (int i = 0; i < 4; i++) {
        Setting setting = {.early_signal = numbers[i]};
        char arguments[256];
        snprintf(arguments, sizeof arguments, "--config base.json --out early-%d %s", i, endless);
        Program program = program_start(stage, 0, &setting, arguments);
        Outcome outcome = program_finish_within(stage, &program, 20);
        outcome_check(&outcome, 75, "a signal at the start");
        text_check(outcome.errors, "asked to stop by SIG", "a signal at the start");
    }
}

static void a_second_interrupt_ends_it_at_once(void **state) {
    Stage *stage = stage_of(state);
    Training first = training_start(stage, 0, "--tokens 2k --val-batches none --optimizer ddp");
    json_t *events = training_finish(stage, &first);
    char options[256], lost[80] = "second SIGINT: nothing of this run is saved";
    for (int resumes = 0; resumes < 2; resumes++) {
        pid_t pid;
        snprintf(options, sizeof options,
                 "--tokens 1000G --report-every 1 --val-batches none --accumulate 1 --slow-rank 0 --slow-ms "
                 "3000 --optimizer ddp --resume %s",
                 resumes ? first.out : "off");
        Training training = training_start(stage, 0, options);
        wait_for_report(stage, &training, &pid, 1);
        assert_int_equal(kill(pid, SIGINT), 0);
        program_pause(0.05); // the key bounced
        assert_int_equal(kill(pid, SIGINT), 0);
        program_pause(0.7);
        assert_int_equal(kill(pid, SIGINT), 0);
        Outcome outcome = program_finish_within(stage, &training.program, 20);
        outcome_check(&outcome, 128 + SIGINT, training.what);
        text_check(outcome.errors, lost, training.what);
        snprintf(lost, sizeof lost, "second SIGINT: all after checkpoint commit-%.0f is lost",
                 log_number(log_event_of(events, "end", -1), "commit"));
    }
    json_decref(events);
}

// `| head`: the run goes on without a reader, and its log has it all.
static void a_reader_that_leaves_ends_nothing(void **state) {
    Stage *stage = stage_of(state);
    Outcome outcome = program_run(
        stage, 0,
        "--config base.json --report-every 1 --slow-rank 0 --slow-ms 2 --out piped 2> piped.txt | head -n 1");
    outcome_check(&outcome, 0, "| head");
    char path[STAGE_PATH_SIZE];
    json_t *events = log_read(stage, "piped"), *end = log_event_of(events, "end", -1);
    assert_true(end != NULL &&
                json_is_true(json_object_get(log_event_of(events, "checkpoint", -1), "saved")));
    assert_string_equal(json_string_value(json_object_get(end, "reason")), "done");
    text_check(stage_read_text(stage, stage_path(stage, "piped.txt", path)), "training goes on", "| head");
    json_decref(events);
}

// ---- System failures ------------------------------------------------------------------

// No system has room for so many stacks of a terabyte each.
static void threads_that_cannot_be_had_end_the_run(void **state) {
#ifdef __SANITIZE_THREAD__
    leave_out("a build without ThreadSanitizer, which refuses huge stacks");
#endif
    Stage *stage = stage_of(state);
    struct rlimit limit;
    Setting setting = {.stack_bytes = (size_t)1 << 40};
    assert_int_equal(getrlimit(RLIMIT_STACK, &limit), 0);
    if (limit.rlim_max != RLIM_INFINITY && limit.rlim_max < setting.stack_bytes) {
        leave_out("stacks of a terabyte (ulimit -Hs)");
    }
    Outcome outcome =
        program_run_with(stage, 0, &setting, "--config base.json --threads 4096 --out threads-1");
    outcome_check(&outcome, 3, "threads that cannot be had");
    text_check(outcome.errors, "the system does not give 4096 threads: lower --threads",
               "threads that cannot be had");
    assert_int_equal(text_lines(outcome.errors), 1);
}

static void check_disk_full(const Outcome *outcome, int exit_code, const char *file, const char *reason) {
    outcome_check(outcome, exit_code, "disk full");
    // The launcher ends the other ranks because of the one that fails, and they say so.
    int ended = text_count(outcome->errors, "ended from outside");
    assert_int_equal(text_count(outcome->errors, "train_gpt: ") - ended, 1);
    text_check(outcome->errors, file, "disk full");
    text_check(outcome->errors, reason, "disk full");
}

// No file of this process may grow beyond 12 kB, which the log does after a dozen reports.
// As with a checkpoint that fails, training goes on, and the exit code says that
// something is missing.
static void a_log_that_fills_the_disk_ends_nothing(void **state) {
    Stage *stage = stage_of(state);
    Setting setting = {.file_bytes = 12288, .ignore_xfsz = true};
    Outcome outcome =
        program_run_with(stage, 0, &setting,
                         "--config base.json --tokens 6400 --report-every 1 --save-every never --out full-1");
    outcome_check(&outcome, 3, "a full log");
    assert_int_equal(text_lines(outcome.errors), 2);
    text_check(outcome.errors, "full-1/log.jsonl: File too large; training goes on", "a full log");
    text_check(outcome.errors, " lines of the log or of its tables could not be written", "a full log");
    text_check(outcome.output, "trained    50 commits", "a full log");
    json_t *events = log_read(stage, "full-1"); // without half a line; the end is short and may still fit
    assert_true(log_event_of(events, "report", 5) != NULL && log_event_of(events, "report", 49) == NULL);
    json_decref(events);
}

// The trace of so many commits is longer than a file may be, and nothing else is.
static void a_lost_trace_is_no_success(void **state) {
    Stage *stage = stage_of(state);
    Setting setting = {.file_bytes = 16384, .ignore_xfsz = true};
    Outcome outcome = program_run_with(stage, 0, &setting,
                                       "--config base.json --tokens 16k --report-every 1000 --val-every end "
                                       "--save-every never --trace t.json --out lost-trace");
    outcome_check(&outcome, 3, "a lost trace");
    assert_int_equal(text_lines(outcome.errors), 1);
    text_check(outcome.errors, "there is no trace: cannot write t.json: File too large", "a lost trace");
    assert_null(strstr(outcome.output, "ui.perfetto.dev"));
    json_t *events = log_read(stage, "lost-trace");
    assert_non_null(log_event_of(events, "end", 0));
    json_decref(events);
}

// A new directory with a file in it that is always full.
static void make_full_directory(const Stage *stage, const char *name, const char *file) {
    char path[STAGE_PATH_SIZE], link_path[STAGE_PATH_SIZE + 64];
    if (access("/dev/full", W_OK) != 0) { leave_out("/dev/full"); }
    assert_int_equal(mkdir(stage_path(stage, name, path), 0777), 0);
    snprintf(link_path, sizeof link_path, "%s/%s", path, file);
    assert_int_equal(symlink("/dev/full", link_path), 0);
}

// The disk is full from the beginning. Nothing was trained yet, but it is the system that
// fails, not the user.
static void a_disk_that_is_full_ends_the_run(void **state) {
    Stage *stage = stage_of(state);
    make_full_directory(stage, "full-2", "progress.tsv");
    Outcome outcome = program_run(stage, 0, "--config base.json --out full-2");
    check_disk_full(&outcome, 3, "full-2/progress.tsv", "No space left on device");
    make_full_directory(stage, "full-3", "config.json.new");
    outcome = program_run(stage, 0, "--config base.json --out full-3");
    check_disk_full(&outcome, 3, "full-3/config.json", "No space left on device");
}

// When there is room again the log goes on, and says how many lines it lacks. The run can
// still be stopped and saved.
static void a_log_goes_on_when_there_is_room(void **state) {
    Stage *stage = stage_with_ranks(state);
    pid_t pids[2];
    Setting setting = {.ignore_xfsz = true};
    char arguments[512], path[STAGE_PATH_SIZE];
    Training training;
    memset(&training, 0, sizeof training);
    strcpy(training.out, "full-4");
    strcpy(training.what, "disk full with two ranks");
    snprintf(arguments, sizeof arguments, "--config base.json --out full-4 %s", endless);
    training.program = program_start(stage, 2, &setting, arguments);
    wait_for_report(stage, &training, pids, 2);
    struct rlimit limit = {1, RLIM_INFINITY};
    assert_int_equal(prlimit(pids[0], RLIMIT_FSIZE, &limit, NULL), 0);
    wait_for_text(training.program.error_path, "full-4/log.jsonl: File too large; training goes on");
    limit.rlim_cur = RLIM_INFINITY;
    assert_int_equal(prlimit(pids[0], RLIMIT_FSIZE, &limit, NULL), 0);
    wait_for_text(stage_path(stage, "full-4/log.jsonl", path), "{\"event\":\"gap\",\"lines\":");
    assert_int_equal(kill(pids[0], SIGUSR1), 0);
    Outcome outcome = program_finish_within(stage, &training.program, 15);
    outcome_check(&outcome, 75, training.what); // saved: it can go on
    text_check(outcome.errors, " of the log or of its tables could not be written", training.what);
    json_t *events = log_read(stage, training.out);
    assert_true(log_number(log_event_of(events, "gap", 0), "lines") >= 1);
    assert_non_null(log_event_of(events, "end", 0));
    json_decref(events);
}

// ---- Spikes ---------------------------------------------------------------------------

// With --beta2 0 and almost no --eps, a zero gradient after another one makes an infinite
// step.
#define INFINITE_STEP "--lr 100 --grad-clip off --warmup 0 --weight-decay 0 --beta2 0 --eps 1e-30 "

static void check_not_finite(Stage *stage, int ranks, const char *out) {
    char arguments[512];
    snprintf(arguments, sizeof arguments, "--config base.json --out %s " INFINITE_STEP "--report-every 1",
             out);
    Outcome outcome = program_run(stage, ranks, arguments);
    outcome_check(&outcome, 3, "a loss that is not finite");
    assert_int_equal(text_count(outcome.errors, "train_gpt: "), 1);
    json_t *events = log_read(stage, out), *end = log_event_of(events, "end", -1);
    assert_non_null(end);
    assert_string_equal(json_string_value(json_object_get(end, "reason")), "spike");
    shell(stage, "grep -qx 'end.reason.spike' %s/run.tsv", out);
    int64_t commit = (int64_t)log_number(end, "commit");
    char expected[64];
    snprintf(expected, sizeof expected, "train_gpt: after commit %lld the ", (long long)commit);
    text_check(outcome.errors, expected, "the commit");
    json_t *spike = log_event_of(events, "spike", -1);
    assert_non_null(spike);
    assert_string_equal(json_string_value(json_object_get(spike, "action")), "stop");
    bool loss = strcmp(json_string_value(json_object_get(spike, "kind")), "loss") == 0;
    text_check(outcome.errors, loss ? " in its micro-batch " : " transformer.", "the batch or the tensor");
    assert_true(json_is_integer(json_object_get(spike, "first_sequence")) == loss);
    json_t *report = log_event_of(events, "report", -1);
    assert_true(report == NULL || (int64_t)log_number(report, "commit") <= commit);
    json_decref(events);
}

// A run that is resumed with other micro-batches counts them anew, but not its data.
static void a_nan_is_found_in_the_data_of_a_resumed_run(void **state) {
    Stage *stage = stage_of(state);
    static const char *const commands[] = {
        "--config base.json --optimizer ddp --out whole --micro-batch 1 --tokens 640",
        "--config base.json --out broken --resume whole --micro-batch 2 --tokens 20k " INFINITE_STEP};
    Outcome outcome = program_run(stage, 0, commands[0]);
    outcome_check(&outcome, 0, commands[0]);
    outcome = program_run(stage, 0, commands[1]);
    outcome_check(&outcome, 3, commands[1]);
    json_t *before = log_read(stage, "whole"), *events = log_read(stage, "broken");
    double begun = log_number(log_event_of(before, "end", -1), "tokens") / T;
    double first = log_number(log_event_of(events, "spike", -1), "first_sequence");
    double micro_batch = text_number(outcome.errors, " in its micro-batch", "the message");
    assert_close(first, begun + 2 * micro_batch, 0, "the sequence");
    assert_close(text_number(outcome.errors, " the first is number", "the message"), first, 0, "the message");
    json_decref(before);
    json_decref(events);
}

static void a_nan_stops_one_rank(void **state) { check_not_finite(stage_of(state), 0, "nan-1"); }
static void a_nan_stops_two_ranks(void **state) { check_not_finite(stage_with_ranks(state), 2, "nan-2"); }

// A text that repeats one word, and within it a stretch that no model can predict.
static void write_garbage(const Stage *stage) {
    enum { BYTES = 48000, FIRST = 20000, GARBAGE = 150 };
    static char text[BYTES + 1];
    Random random = {1};
    for (int i = 0; i < BYTES; i++) { text[i] = "abcdefgh "[i % 9]; }
    for (int i = FIRST; i < FIRST + GARBAGE; i++) { text[i] = (char)(1 + random_bits(&random) % 255); }
    stage_write(stage, "garbage.txt", text);
}

#define GARBAGE \
    "--data garbage.txt --val-batches none --micro-batch 1 --lr 3e-3 --schedule constant " \
    "--warmup 0 --keep 100 "

static int count_events(json_t *events, const char *kind) {
    int count = 0;
    while (log_event_of(events, kind, count) != NULL) { count++; }
    return count;
}

// The garbage is met twice at least, unless the batches are large.
static json_t *run_garbage(Stage *stage, int ranks, const char *options, const char *out) {
    char arguments[512];
    const char *length = strstr(options, "--tokens") == NULL ? "--tokens 72k" : "";
    snprintf(arguments, sizeof arguments, "--config base.json " GARBAGE "%s %s --out %s", length, options,
             out);
    Outcome outcome = program_run(stage, ranks, arguments);
    outcome_check(&outcome, 0, arguments);
    return log_read(stage, out);
}

// The numbers of a checkpoint. The caller releases them.
static json_t *saved_numbers(Stage *stage, const char *out, int commit) {
    char name[128], path[STAGE_PATH_SIZE];
    snprintf(name, sizeof name, "%s/checkpoints/commit-%d/checkpoint.json", out, commit);
    json_t *numbers = json_load_file(stage_path(stage, name, path), 0, NULL);
    assert_non_null(numbers);
    assert_true(json_array_size(json_object_get(numbers, "workers")) == 2);
    return numbers;
}

// Bad data are skipped and the run goes on. A run that is resumed among them skips the
// same.
static void spikes_can_be_skipped(void **state) {
    Stage *stage = stage_with_ranks(state);
    write_garbage(stage);
    json_t *whole =
        run_garbage(stage, 2, "--optimizer zero1 --spike-limit 2 --on-spike skip --save-every 20", "skip");
    int spikes = count_events(whole, "spike"),
        middle = (int)log_number(log_event_of(whole, "spike", spikes / 2), "commit") / 20 * 20;
    char options[128];
    snprintf(options, sizeof options,
             "--optimizer zero1 --spike-limit 2 --on-spike skip --resume skip/checkpoints/commit-%d", middle);
    json_t *half = run_garbage(stage, 2, options, "skip-2");
    int after = count_events(half, "spike");
    if (!(spikes > after && after > 0)) {
        fail_msg("%d spikes, %d of them behind commit %d", spikes, after, middle);
    }
    json_t *last = log_event_of(whole, "spike", -1);
    assert_true(log_number(last, "count") == spikes);
    assert_true(log_number(log_event_of(half, "spike", -1), "count") == spikes);
    assert_string_equal(json_string_value(json_object_get(last, "kind")), "norm");
    assert_true(log_number(last, "measured") > log_number(last, "largest"));
    assert_string_equal(log_fingerprint(whole).text, log_fingerprint(half).text);
    int end = (int)log_number(log_event_of(whole, "end", -1), "commit");
    json_t *saved = saved_numbers(stage, "skip", end), *resumed = saved_numbers(stage, "skip-2", end);
    // Also what they take for a usual norm and loss.
    assert_true(json_equal(json_object_get(saved, "workers"), json_object_get(resumed, "workers")));
    json_decref(saved);
    json_decref(resumed);
    json_decref(whole);
    json_decref(half);
}

// All data that were begun are in a commit that counts, or were given up with a
// rollback: the commits behind the checkpoint, and the one that was not made. So no data
// come twice, and none are passed over.
static void check_data_after_rollbacks(json_t *events, const json_t *numbers) {
    double position =
               log_number(json_array_get(json_object_get(numbers, "workers"), 0), "micro_batches_begun") * 2 +
               log_number((json_t *)numbers, "data_base"),
           per_commit = log_number(log_event_of(events, "report", 0), "grads_per_commit"), given_up = 0;
    json_t *rollback;
    for (int i = 0; (rollback = log_event_of(events, "rollback", i)) != NULL; i++) {
        given_up += log_number(rollback, "from") - log_number(rollback, "commit") + 1;
    }
    double done = log_number(log_event_of(events, "end", -1), "tokens") / T;
    assert_close(position, done + given_up * per_commit, 0, "position in the data");
}

// A run that starts from the checkpoint of the latest rollback, with the data behind the
// spike, ends in the same bits as the one that has rolled back. What overlapped rules had
// handed over is dropped by a rollback, and kept by a resumed run.
static void check_bits_after_rollbacks(Stage *stage, const char *options, const char *out, json_t *events,
                                       const json_t *numbers) {
    int commit = (int)log_number(log_event_of(events, "rollback", -1), "commit");
    char command[2 * STAGE_PATH_SIZE], name[STAGE_PATH_SIZE], path[STAGE_PATH_SIZE], more[512];
    snprintf(command, sizeof command, "cd '%s' && rm -rf moved && cp -r %s/checkpoints/commit-%d moved",
             stage->directory, out, commit);
    assert_int_equal(system(command), 0);
    snprintf(name, sizeof name, "moved/checkpoint.json");
    json_t *moved = json_load_file(stage_path(stage, name, path), 0, NULL);
    json_object_set(moved, "data_base", json_object_get(numbers, "data_base"));
    manifest_sign(moved);
    assert_int_equal(json_dump_file(moved, path, 0), 0);
    json_decref(moved);
    snprintf(more, sizeof more, "%s --resume moved", options);
    snprintf(name, sizeof name, "%s-again", out);
    json_t *again = run_garbage(stage, 2, more, name);
    assert_null(log_event_of(again, "spike", 0));
    assert_string_equal(log_fingerprint(again).text, log_fingerprint(events).text);
    json_decref(again);
}

// Every rollback goes back to an earlier checkpoint and then sees other data, so the run
// ends. That holds too where the checkpoint was made just before the spike and contains
// its cause. What was under way is in no later report. Spikes are counted on, although the
// checkpoint knows less of them. Returns how many rollbacks there were.
static int check_rollbacks(Stage *stage, const RuleCase *rule, int every) {
    char options[256], out[64];
    snprintf(out, sizeof out, "rollback-%s-%d", rule->name, every);
    snprintf(options, sizeof options, "%s --spike-limit 4 --on-spike rollback --save-every %d", rule->options,
             every);
    json_t *events = run_garbage(stage, 2, options, out);
    int rollbacks = count_events(events, "rollback");
    if (count_events(events, "spike") != rollbacks) { fail_msg("%s: %d rollbacks", out, rollbacks); }
    shell(stage, "[ $(grep -c '^$' %s/progress.tsv) = %d ]", out, rollbacks); // the curves are interrupted
    for (int i = 0; i < rollbacks; i++) {
        json_t *rollback = log_event_of(events, "rollback", i);
        double from = log_number(rollback, "from"), to = log_number(rollback, "commit");
        if (!(to <= from && from <= to + every + 12)) { fail_msg("%s: back from %g to %g", out, from, to); }
        assert_true(log_number(rollback, "count") == i + 1);
        assert_close(log_number(log_event_of(events, "spike", i), "count"), i + 1, 0, out);
    }
    assert_true(log_number(log_event_of(events, "end", -1), "tokens") >= 72000);
    json_t *report,
        *numbers = saved_numbers(stage, out, (int)log_number(log_event_of(events, "end", -1), "commit"));
    double usual = log_number(log_event_of(events, "report", 0), "grads_per_commit");
    for (int i = 0; (report = log_event_of(events, "report", i)) != NULL; i++) {
        assert_close(log_number(report, "grads_per_commit"), usual, 0, out);
    }
    bool zero1 = strcmp(rule->name, "zero1") == 0, diloco = strcmp(rule->name, "diloco") == 0;
    if (rollbacks > 0 && zero1) { check_data_after_rollbacks(events, numbers); }
    if (rollbacks > 0 && (zero1 || diloco)) {
        check_bits_after_rollbacks(stage, options, out, events, numbers);
    }
    json_decref(numbers);
    json_decref(events);
    print_message("%s: %d rollbacks\n", out, rollbacks);
    return rollbacks;
}

static void spikes_can_be_rolled_back(void **state) {
    Stage *stage = stage_with_ranks(state);
    write_garbage(stage);
    int rules = 0, most = 0; // rules that rolled back at least once; the most rollbacks of one
    for (int i = 0; i < RULES_TESTED; i++) {
        // A thousand checkpoints would take a disk half a minute: rules with few commits save each.
        bool few =
            strcmp(rule_cases[i].name, "diloco") == 0 || strcmp(rule_cases[i].name, "sparse-loco") == 0;
        int rollbacks = check_rollbacks(stage, &rule_cases[i], few ? 1 : i % 2 == 0 ? 9 : 20);
        rules += rollbacks > 0;
        most = rollbacks > most ? rollbacks : most;
    }
    assert_true(rules >= 4 && most >= 2);
}

// The sum that waits at the end is of garbage. What remains is what was committed, the exact copies
// from which a run of another rule goes on, and not the prediction that compute used.
static void a_rollback_at_the_end_leaves_what_was_committed(void **state) {
    static const char *const rule = "--optimizer acco-wp --sequential 0 --spike-limit 4 --on-spike";
    Stage *stage = stage_of(state);
    char options[256];
    write_garbage(stage);
    snprintf(options, sizeof options, "%s skip", rule);
    json_t *events = run_garbage(stage, 0, options, "ahead");
    int commit = (int)log_number(log_event_of(events, "spike", 0), "commit");
    json_t *report = log_event_of(events, "report", 0);
    double each = log_number(report, "tokens") / log_number(report, "commit");
    json_decref(events);
    snprintf(options, sizeof options,
             "--config base.json " GARBAGE "%s rollback --save-every 1 --tokens %.0f --out ahead-back", rule,
             each * commit);
    Outcome outcome = program_run(stage, 0, options);
    outcome_check(&outcome, 0, options);
    assert_int_equal(text_count(outcome.output, ", rollback 1; on with new data"), 1);
    text_check(outcome.output, "\ntrained    ", "what it has done before");
    events = log_read(stage, "ahead-back");
    snprintf(options, sizeof options,
             "--optimizer zero1 --resume ahead-back/checkpoints/commit-%d --tokens %.0f", commit,
             each * commit);
    json_t *exact = run_garbage(stage, 0, options, "ahead-exact");
    assert_string_equal(log_fingerprint(events).text, log_fingerprint(exact).text);
    json_decref(events);
    json_decref(exact);
}

// At the end the time of a micro-batch of rank 0 is the mean since the latest rollback, as that of
// the reports since then.
static void check_pace_after_rollbacks(json_t *events) {
    double sum = 0, steps = 0;
    for (size_t i = 0; i < json_array_size(events); i++) {
        json_t *event = json_array_get(events, i);
        const char *kind = json_string_value(json_object_get(event, "event"));
        if (strcmp(kind, "rollback") == 0) { sum = steps = 0; }
        if (strcmp(kind, "report") != 0) { continue; }
        sum += log_number(event, "steps") * log_number(event, "micro_batch_ms");
        steps += log_number(event, "steps");
    }
    json_t *told = json_object_get(log_event_of(events, "end", -1), "rank_micro_batch_ms");
    assert_close(json_number_value(json_array_get(told, 0)), sum / steps, 1e-3 * sum / steps, "pace");
}

// Ranks that make 4 and 2 micro-batches a commit share the data as they share the work. After a
// rollback they begin behind all that they had begun, 6 (from + 1) micro-batches, and count on from
// the 6 * commit of the checkpoint.
static void unequal_ranks_are_rolled_back_to_new_data(void **state) {
    Stage *stage = stage_with_ranks(state);
    write_garbage(stage);
    json_t *events = run_garbage(stage, 2,
                                 "--tokens 90k --optimizer zero1 --rank-accumulate 4,2 --spike-limit 3 "
                                 "--on-spike rollback --save-every 9",
                                 "rollback-unequal");
    double base = 0;
    json_t *rollback;
    int rollbacks = 0;
    for (; (rollback = log_event_of(events, "rollback", rollbacks)) != NULL; rollbacks++) {
        base += 6 * (log_number(rollback, "from") + 1 - log_number(rollback, "commit"));
    }
    json_t *numbers =
        saved_numbers(stage, "rollback-unequal", (int)log_number(log_event_of(events, "end", -1), "commit"));
    assert_true(rollbacks > 0);
    assert_close(log_number(numbers, "data_base"), base, 0, "where the data continue");
    check_pace_after_rollbacks(events);
    json_decref(numbers);
    json_decref(events);
}

// ---- The stage's files ----------------------------------------------------------------

// A model of 34 thousand parameters. `change` replaces a member or adds one.
static void write_model(const Stage *stage, const char *name, const char *change, json_t *value) {
    json_t *model =
        json_pack("{s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:[[[s, s], i]]}", "model_type", "gpt_neo",
                  "num_layers", 2, "hidden_size", 32, "num_heads", 2, "window_size", 8,
                  "max_position_embeddings", T, "vocab_size", 256, "attention_types", "global", "local", 1);
    if (change != NULL) { json_object_set_new(model, change, value); }
    char *text = json_dumps(model, JSON_INDENT(2));
    stage_write(stage, name, text);
    free(text);
    json_decref(model);
}

// The same with three layers, which two fragments can share in more than one way.
static void write_deep_model(const Stage *stage) {
    char path[STAGE_PATH_SIZE];
    json_t *model = json_load_file(stage_path(stage, "model.json", path), 0, NULL);
    json_object_set_new(model, "num_layers", json_integer(3));
    json_object_set_new(model, "attention_types", json_pack("[[[s], i]]", "global", 3));
    assert_int_equal(json_dump_file(model, stage_path(stage, "deep.json", path), 0), 0);
    json_decref(model);
}

// llm.c's token file: a header of 256 words, the third of which is the number of tokens
// it promises, then ids of two bytes each. All ids are 1, but the one at `strange` is
// 300.
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
    write_deep_model(stage);
    stage_write(stage, "three.txt", "abc");
    write_model(stage, "type.json", "model_type", json_string("gemma2"));
    write_model(stage, "relu.json", "activation_function", json_string("relu"));
    write_model(stage, "bytes.json", "vocab_size", json_integer(99));
    stage_write(stage, "broken.json", "{\"model_type\": \"gpt_neo\",\n \"num_layers\": }\n");
    stage_write(stage, "typing.txt", "{\"seed\": 1,\n \"micro-bach\": 2}\n");
    snprintf(base, sizeof base,
             "{\"model\": \"%s\", \"micro-batch\": %d, \"tokens\": \"4k\", \"report-every\": 4, "
             "\"val-batches\": 2, \"sample-tokens\": \"none\", \"threads\": 1, \"timeout-s\": 100, "
             "\"device\": \"cpu\"}\n",
             stage_path(stage, "model.json", path), MICRO_BATCH);
    stage_write(stage, "base.json", base);
    write_data(stage);
    assert_int_equal(mkdir(stage_path(stage, "used", path), 0777), 0);
    stage_write(stage, "used/log.jsonl", "");
}

static int end_scene(void **state) {
    stage_end_all(((const Scene *)*state)->stage);
    return 0;
}

#define PROGRAM_TEST(function) \
    cmocka_unit_test_prestate_setup_teardown(function, NULL, stage_end_test, &stage_of_all)

static Stage stage_of_all; // what every test gets

static const struct CMUnitTest tests[] = {
    PROGRAM_TEST(three_ranks_give_the_same_bits_in_any_order),
    PROGRAM_TEST(pauses_are_not_counted_as_training),
    PROGRAM_TEST(buckets_change_no_bit),
    PROGRAM_TEST(zero1_gives_the_bits_of_ddp),
    PROGRAM_TEST(sequential_commits_give_the_bits_of_zero1),
    PROGRAM_TEST(sequential_commits_can_be_those_of_the_warm_up),
    PROGRAM_TEST(one_rank_under_mpirun_gives_the_bits_of_none),
    PROGRAM_TEST(threads_change_no_bit),
    PROGRAM_TEST(bf16_trains_on_cpus),
    PROGRAM_TEST(bf16_evaluates_on_cpus),
    PROGRAM_TEST(the_fastest_format_is_measured),
    PROGRAM_TEST(moments_in_bf16_repeat),
    PROGRAM_TEST(adamw_beside_muon_has_a_rate_of_its_own),
    PROGRAM_TEST(another_seed_gives_other_bits),
    PROGRAM_TEST(any_number_of_ranks_trains_on_the_same_data),
    PROGRAM_TEST(every_rule_is_tested),
    PROGRAM_TEST(every_option_of_a_rule_matters),
    PROGRAM_TEST(a_warm_up_is_as_long_as_an_outer_momentum),
    PROGRAM_TEST(ranks_may_do_unequal_work),
    PROGRAM_TEST(every_wire_format_sends_what_it_promises),
    PROGRAM_TEST(validation_is_of_the_committed_parameters),
    PROGRAM_TEST(validation_is_of_the_outer_parameters),
    PROGRAM_TEST(samples_are_of_the_committed_parameters),
    PROGRAM_TEST(epochs_are_tokens),
    PROGRAM_TEST(the_builtin_corpus_is_learned),
    PROGRAM_TEST(a_text_file_is_learned),
    PROGRAM_TEST(traces_show_what_reports_count),
    PROGRAM_TEST(exposed_communication_is_told),
    PROGRAM_TEST(a_slow_rank_holds_nobody_up),
    PROGRAM_TEST(the_log_of_one_rank_counts_every_commit),
    PROGRAM_TEST(the_log_of_two_ranks_counts_every_commit),
    PROGRAM_TEST(output_in_a_file_is_plain_text),
    PROGRAM_TEST(one_rank_uses_the_memory_it_planned),
    PROGRAM_TEST(two_ranks_use_the_memory_they_planned),
    PROGRAM_TEST(plan_prints_what_one_rank_reserves),
    PROGRAM_TEST(plan_prints_what_two_ranks_reserve),
    PROGRAM_TEST(a_plan_allocates_nothing),
    PROGRAM_TEST(ranks_that_differ_end_at_once),
    PROGRAM_TEST(ranks_that_round_differently_are_named),
    PROGRAM_TEST(ranks_of_two_hosts_train_together),
    PROGRAM_TEST(a_start_without_a_rank_ends_at_its_deadline),
    PROGRAM_TEST(a_slow_rank_is_named),
    PROGRAM_TEST(a_plan_under_a_launcher_is_printed_once),
    PROGRAM_TEST(the_saved_configuration_repeats_the_run),
    PROGRAM_TEST(ranks_of_unequal_rounds_choose_alike),
    PROGRAM_TEST(the_table_begins_with_its_heading),
    PROGRAM_TEST(the_first_run_takes_options),
    PROGRAM_TEST(closed_output_reaches_no_file),
    PROGRAM_TEST(a_message_is_written_whole),
    PROGRAM_TEST(the_page_of_options_is_current),
    PROGRAM_TEST(help_names_every_option),
    PROGRAM_TEST(version_tells_the_build),
    PROGRAM_TEST(two_ranks_refuse_with_one_message),
    PROGRAM_TEST(a_directory_without_permission_is_refused),
    PROGRAM_TEST(another_processor_is_told),
    PROGRAM_TEST(independent_copies_are_refused),
    PROGRAM_TEST(ranks_with_other_options_are_refused),
    PROGRAM_TEST(a_killed_rank_0_ends_the_job),
    PROGRAM_TEST(a_killed_rank_1_ends_the_job),
    PROGRAM_TEST(a_stopped_rank_0_ends_the_job),
    PROGRAM_TEST(a_stopped_rank_1_ends_the_job),
    PROGRAM_TEST(a_killed_rank_on_two_levels_ends_the_job),
    PROGRAM_TEST(a_stopped_leader_of_a_host_is_named),
    PROGRAM_TEST(a_stopped_rank_inside_a_host_is_named),
    PROGRAM_TEST(one_rank_ends_well_by_signal),
    PROGRAM_TEST(a_long_run_tells_its_share_of_the_product_rate),
    PROGRAM_TEST(two_ranks_end_well_by_signal),
    PROGRAM_TEST(a_stop_that_saves_nothing_has_a_code_of_its_own),
    PROGRAM_TEST(launched_ranks_have_time_to_save),
    PROGRAM_TEST(a_stop_before_there_are_ranks_is_repeated),
    PROGRAM_TEST(a_second_signal_ends_a_launch_and_a_closed_terminal_does_not),
    PROGRAM_TEST(results_that_are_lost_are_no_success),
    PROGRAM_TEST(a_validation_hears_a_signal),
    PROGRAM_TEST(a_signal_while_it_starts_is_heard),
    PROGRAM_TEST(a_second_interrupt_ends_it_at_once),
    PROGRAM_TEST(a_reader_that_leaves_ends_nothing),
    PROGRAM_TEST(threads_that_cannot_be_had_end_the_run),
    PROGRAM_TEST(a_log_that_fills_the_disk_ends_nothing),
    PROGRAM_TEST(a_lost_trace_is_no_success),
    PROGRAM_TEST(a_disk_that_is_full_ends_the_run),
    PROGRAM_TEST(a_log_goes_on_when_there_is_room),
    PROGRAM_TEST(a_nan_stops_one_rank),
    PROGRAM_TEST(a_nan_stops_two_ranks),
    PROGRAM_TEST(a_nan_is_found_in_the_data_of_a_resumed_run),
    PROGRAM_TEST(spikes_can_be_skipped),
    PROGRAM_TEST(spikes_can_be_rolled_back),
    PROGRAM_TEST(a_rollback_at_the_end_leaves_what_was_committed),
    PROGRAM_TEST(unequal_ranks_are_rolled_back_to_new_data),
};

// test_program PATTERN runs the tests whose names match, as '*rank*'.
int main(int argc, char **argv) {
    enum { NAMED = sizeof tests / sizeof tests[0], SCENES = RULES_TESTED + REFUSALS };
    static struct CMUnitTest all[NAMED + SCENES];
    static Scene scenes[SCENES];
    static char names[SCENES][96];
    memcpy(all, tests, sizeof tests);
    for (int i = 0; i < SCENES; i++) {
        scenes[i].stage = &stage_of_all;
        struct CMUnitTest test = {names[i], any_order_gives_the_same_bits, NULL, end_scene, &scenes[i]};
        if (i < RULES_TESTED) {
            scenes[i].rule = &rule_cases[i];
            snprintf(names[i], sizeof names[i], "the same bits, and it learns: %s", rule_cases[i].name);
        } else {
            scenes[i].refusal = &refusals[i - RULES_TESTED];
            snprintf(names[i], sizeof names[i], "refuses: %s", scenes[i].refusal->name);
            test.test_func = it_is_refused;
        }
        all[NAMED + i] = test;
    }
    if (argc > 1) { cmocka_set_test_filter(argv[1]); }
    stage_open(&stage_of_all);
    write_stage(&stage_of_all);
    int failed = _cmocka_run_group_tests("program", all, NAMED + SCENES, NULL, NULL);
    stage_close(&stage_of_all);
    return failed;
}
