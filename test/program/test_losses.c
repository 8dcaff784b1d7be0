// test_losses.c: what a reported loss is a loss of.
//
// Training, validation and `eval` all mean nats per predicted token: what a mask leaves
// out counts nowhere. And whatever the rule, a report names the steps whose losses are
// in it.
//
// The steps here are too small to change anything, so a loss depends on the data alone.
#include "test/program/fleet.h"
#include "test/program/masked.h"

enum { LENGTH = 8, WINDOWS = 40 };

// ---- Masks ----------------------------------------------------------------------------

// Predicted tokens of a window: none in every third one.
static int predicted_in(int window) { return window % 3 == 0 ? 0 : 1 + window % LENGTH; }

static int none_in(int window) { return 0 * window; }

// Nothing in those windows that are held out for validation, whose first token the window before
// them predicts.
static int predicted_at_the_start(int window) {
    return window < WINDOWS - 3 ? predicted_in(window) : window == WINDOWS - 3 ? LENGTH : 0;
}

// What `train_gpt eval` prints for the model of a run. Its windows count the token that
// is predicted last, those of the data loader do not.
static double evaluated(Stage *stage, const Training *training, int commits) {
    char arguments[512];
    snprintf(arguments, sizeof arguments,
             "eval --from %s/checkpoints/commit-%d/model --data masked.bin --seq-len %d --stride %d "
             "--device cpu --threads 1",
             training->out, commits, LENGTH + 1, LENGTH);
    Outcome outcome = program_run(stage, 0, arguments);
    outcome_check(&outcome, 0, arguments);
    text_check(outcome.output, "nats per token", arguments);
    return atof(strstr(outcome.output, "nats per token") + strlen("nats per token"));
}

// Runs of one epoch, and how many commits, or inner steps, that is.
typedef struct Epoch {
    int ranks, commits;
    const char *options;
} Epoch;

static const Epoch epochs[] = {
    {0, 8, "--optimizer ddp --micro-batch 1 --accumulate 5"},
    {0, 20, "--optimizer diloco --diloco-H 4 --micro-batch 1 --accumulate 2"},
    {0, 5, "--optimizer acco --micro-batch 4 --accumulate 2"},
    {2, 5, "--optimizer zero1 --micro-batch 1 --accumulate 4"},
};

enum { EPOCHS = sizeof epochs / sizeof epochs[0] };

#define MASKED \
    "--data masked.bin --val-data same.bin --seq-len 8 --tokens 320 --val-batches 90 --val-every end "

// Over one epoch all three see every token once, in micro-batches that predict between
// none and all of theirs. Validation is asked for more batches than there are.
static void training_validation_and_evaluation_agree(void **state) {
    Stage *stage = stage_of(state);
    Fleet *fleet = fleet_new(stage);
    int count = stage->has_mpi ? EPOCHS : EPOCHS - 1;
    for (int i = 0; i < count; i++) {
        fleet_start(fleet, epochs[i].ranks, MASKED "--report-every 100 %s", epochs[i].options);
    }
    fleet_finish(fleet);
    for (int i = 0; i < count; i++) {
        const Training *training = &fleet->trainings[i];
        double loss = evaluated(stage, training, epochs[i].commits);
        assert_true(loss > 1);
        assert_null(log_event_of(fleet->events[i], "report", 1));
        assert_close(fleet_number(fleet, i, "report", 0, "loss"), loss, 1e-5, training->what);
        assert_close(fleet_number(fleet, i, "validation", 0, "loss"), loss, 1e-5, training->what);
    }
}

// A commit that predicts nothing has no loss, and is no spike.
static void without_predicted_tokens_there_is_no_loss(void **state) {
    Stage *stage = stage_of(state);
    json_t *events = train(stage, 0,
                           MASKED "--optimizer ddp --micro-batch 1 --accumulate 1 --report-every 1 "
                                  "--spike-limit 1 --on-spike skip"),
           *report;
    int unknown = 0, expected = 0, count = 0;
    for (int window = 0; window < WINDOWS; window++) { expected += predicted_in(window) == 0; }
    for (; (report = log_event_of(events, "report", count)) != NULL; count++) {
        unknown += json_is_null(json_object_get(report, "loss"));
    }
    assert_int_equal(unknown, expected);
    assert_true(count > expected);
    json_decref(events);
}

// The first window of same.bin predicts nothing: a validation of that alone has no loss, and is
// neither better nor worse than others.
static void a_validation_without_a_loss_ends_nothing(void **state) {
    Stage *stage = stage_of(state);
    Outcome outcome = program_run(stage, 0,
                                  "--config base.json --data masked.bin --val-data same.bin --seq-len 8 "
                                  "--tokens 320 --optimizer ddp --val-batches 1 --val-every 2 --stop-after 1 "
                                  "--out unknown");
    outcome_check(&outcome, 0, "--stop-after");
    text_check(outcome.output, "    20 validation without a loss", "--stop-after");
    text_check(outcome.output, "trained    20 commits", "--stop-after");
    assert_null(strstr(outcome.output, "nan"));
}

static void data_without_anything_to_predict_are_refused(void **state) {
    Stage *stage = stage_of(state);
    static const struct {
        const char *data, *part; // NULL: they are taken
    } cases[] = {
        {"--data none.bin",
         "none.bin: masks leave out all that could be predicted in its 38 windows of 9 tokens"},
        {"--data none.bin --val-batches none", "none.bin: masks leave out all"},
        {"--data masked.bin --val-data none.bin", "none.bin: masks leave out all"},
        {"--data begin.bin", "begin.bin: masks leave out all that could be predicted in its 2 windows of 9 "
                             "tokens for validation"},
        {"--data masked.bin:1,none.bin:1", "none.bin: masks leave out all"},
        {"--data begin.bin --val-batches none", NULL},
        {"--data begin.bin --val-data same.bin", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char arguments[256];
        snprintf(arguments, sizeof arguments, "--config base.json --seq-len 8 --tokens 32 --out taken-%zu %s",
                 i, cases[i].data);
        Outcome outcome = program_run(stage, 0, arguments);
        outcome_check(&outcome, cases[i].part == NULL ? 0 : 2, arguments);
        if (cases[i].part != NULL) { text_check(outcome.errors, cases[i].part, arguments); }
    }
}

// ---- Steps ----------------------------------------------------------------------------

enum { STEPS = 24 };

static const char *const with_local_steps[] = {
    "--optimizer co2 --co2-tau 4",
    "--optimizer co2 --co2-tau 5",
    "--optimizer diloco --diloco-H 5",
    "--optimizer streaming-diloco --diloco-H 4 --streaming-P 2 --streaming-tau 1",
    "--optimizer streaming-diloco --diloco-H 6 --streaming-P 2 --streaming-tau 2",
};

enum { WITH_LOCAL_STEPS = sizeof with_local_steps / sizeof with_local_steps[0] };

// Run 0 reports every step by itself. Each report of run i is the mean of those from the
// step behind its report before up to the step that it names; no step is in none or in
// two.
static void check_labels(const Fleet *fleet, int i) {
    const char *what = fleet->trainings[i].what;
    int done = 0;
    json_t *report;
    for (int n = 0; (report = log_event_of(fleet->events[i], "report", n)) != NULL; n++) {
        int step = (int)log_number(report, "commit"), first = done;
        double sum = 0;
        if (!(step > done && step <= STEPS)) { fail_msg("%s: step %d after %d", what, step, done); }
        for (; done < step; done++) { sum += fleet_number(fleet, 0, "report", done, "loss"); }
        assert_close(log_number(report, "loss"), sum / (step - first), 1e-5, what);
        assert_close(log_number(report, "tokens"), fleet_number(fleet, 0, "report", step - 1, "tokens"), 0,
                     what);
        assert_close(log_number(report, "grads_per_commit"), 2, 0, what);
        json_t *speed = json_object_get(report, "tokens_per_second");
        assert_true(json_is_null(speed) || json_number_value(speed) > 0);
    }
    assert_int_equal(done, STEPS);
}

static void reports_name_the_steps_of_their_losses(void **state) {
    Fleet *fleet = fleet_new(stage_of(state));
    fleet_start(fleet, 0, "--optimizer ddp");
    for (int i = 0; i < WITH_LOCAL_STEPS; i++) { fleet_start(fleet, 0, "%s", with_local_steps[i]); }
    fleet_finish(fleet);
    for (int i = 1; i < fleet->count; i++) { check_labels(fleet, i); }
}

// ---- The stage ------------------------------------------------------------------------

static void write_stage(const Stage *stage) {
    char path[STAGE_PATH_SIZE], base[2 * STAGE_PATH_SIZE];
    stage_write(stage, "model.json",
                "{\"model_type\": \"gpt_neo\", \"num_layers\": 2, \"hidden_size\": 16, \"num_heads\": 2, "
                "\"window_size\": 8,\n \"max_position_embeddings\": 16, \"vocab_size\": 256,\n"
                " \"attention_types\": [[[\"global\", \"local\"], 1]]}\n");
    snprintf(base, sizeof base,
             "{\"model\": \"%s\", \"micro-batch\": 1, \"accumulate\": 2, \"tokens\": %d, \"lr\": 1e-12, "
             "\"report-every\": 1, \"val-batches\": 2, \"sample-tokens\": \"none\", \"threads\": 1, "
             "\"timeout-s\": 100, \"device\": \"cpu\"}\n",
             stage_path(stage, "model.json", path), STEPS * 2 * 16);
    stage_write(stage, "base.json", base);
    stage_write_masked(stage, "masked.bin", WINDOWS, LENGTH, predicted_in);
    // Data to validate on must be another file.
    stage_write_masked(stage, "same.bin", WINDOWS, LENGTH, predicted_in);
    stage_write_masked(stage, "none.bin", WINDOWS, LENGTH, none_in);
    stage_write_masked(stage, "begin.bin", WINDOWS, LENGTH, predicted_at_the_start);
}

#define LOSSES_TEST(function) cmocka_unit_test_prestate_setup_teardown(function, NULL, stage_end_test, &stage)

int main(void) {
    static Stage stage;
    const struct CMUnitTest tests[] = {
        LOSSES_TEST(training_validation_and_evaluation_agree),
        LOSSES_TEST(without_predicted_tokens_there_is_no_loss),
        LOSSES_TEST(a_validation_without_a_loss_ends_nothing),
        LOSSES_TEST(data_without_anything_to_predict_are_refused),
        LOSSES_TEST(reports_name_the_steps_of_their_losses),
    };
    stage_open(&stage);
    write_stage(&stage);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    stage_close(&stage);
    return failed;
}
