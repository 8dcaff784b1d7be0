// test_replay.c: under every rule the program ends in the same bits as the sequential
// simulation of replay.h, the replay.
//
// First the replay itself is tested, on examples that were worked out by hand. Then the
// real binary runs under mpirun, as its users start it, with 2, 3 and 20 ranks. The
// replay reads the options from the run's log and trains once more in this process. It
// must end with the same parameters and validation loss, and have the same gradient norm
// and learning rate at every commit.
#define _GNU_SOURCE
#include "test/program/program.h"

#include "checkpoint/hf_model.h"
#include "program/agreement.h"
#include "program/training_problem.h"
#include "test/model_loss.h"
#include "test/rule_cases.h"
#include "test/rules/replay.h"
#include "test/rules/worked_streaming.h"

// ---- Worked examples ------------------------------------------------------------------

enum { HAND_UPDATES = 32, HAND_EVALUATIONS = 64, HAND_ELEMENTS = 2 };

// A problem of one or two elements, and a record of its training.
typedef struct Hand {
    int element_count;
    float (*gradient)(int worker, uint64_t index, int element, float parameter);
    float updates[HAND_UPDATES][HAND_ELEMENTS]; // what the workers share after each update
    int update_count;
    // The parameters at which each micro-batch of each worker was computed.
    float evaluations[2][HAND_EVALUATIONS][HAND_ELEMENTS];
    int evaluation_count[2];
    float end[HAND_ELEMENTS];
    double gradients_done;
} Hand;

static MicroBatchResult hand_micro_batch(void *self, int worker, uint64_t index, const float *parameters,
                                         float *gradients) {
    Hand *hand = (Hand *)self;
    assert_true(index == (uint64_t)hand->evaluation_count[worker] && index < HAND_EVALUATIONS);
    for (int i = 0; i < hand->element_count; i++) {
        hand->evaluations[worker][index][i] = parameters[i];
        gradients[i] += hand->gradient(worker, index, i, parameters[i]);
    }
    hand->evaluation_count[worker]++;
    return (MicroBatchResult){.predicted = 1};
}

static void hand_updated(void *self, const ReplayUpdate *update) {
    Hand *hand = (Hand *)self;
    assert_true(hand->update_count < HAND_UPDATES);
    memcpy(hand->updates[hand->update_count++], update->parameters,
           (size_t)hand->element_count * sizeof(float));
}

static void hand_train(Hand *hand, const ReplaySettings *settings, float start) {
    ReplayProblem problem = {hand, (size_t)hand->element_count, 1, hand_micro_batch, hand_updated};
    for (int i = 0; i < hand->element_count; i++) { hand->end[i] = start; }
    hand->gradients_done = replay_run(settings, &problem, hand->end);
}

// theta - X of micro-batch j, where X is j on worker 0 and 4 + 2j on worker 1. A second
// element has half the target.
static float scalar_gradient(int worker, uint64_t index, int element, float parameter) {
    float target = worker == 0 ? (float)index : 4.0f + 2.0f * (float)index;
    return parameter - (element == 0 ? target : target / 2);
}

static ReplaySettings scalar_settings(const char *rule, bool sgd, int accumulate, double target) {
    ReplaySettings settings;
    memset(&settings, 0, sizeof settings);
    settings.rule = rule;
    settings.workers = 2;
    settings.accumulate[0] = settings.accumulate[1] = accumulate;
    settings.round_a[0] = settings.round_a[1] = accumulate / 2;
    settings.target = target;
    settings.sgd = sgd;
    settings.rate.kind = SCHEDULE_CONSTANT;
    settings.rate.peak = sgd ? 0.5 : 0.1;
    settings.rate.step = 1;
    settings.beta1 = 0.9;
    settings.beta2 = 0.95;
    settings.epsilon = 1e-8;
    settings.weight_decay = 0.1;
    settings.fragments = 1;
    return settings;
}

// What is expected of element 0. UNCHECKED ends a list; what comes after it may be
// anything.
typedef struct Path {
    double updates[6];
    double evaluations[8]; // of worker 0
    double end;            // after training
} Path;

#define UNCHECKED NAN

static void expect_list(const double *expected, int room, const float (*seen)[HAND_ELEMENTS], int count,
                        double tolerance, const char *what) {
    for (int i = 0; i < room && !isnan(expected[i]); i++) {
        assert_true(i < count);
        assert_close(seen[i][0], expected[i], tolerance, what);
    }
}

static Hand expect_path(const ReplaySettings *settings, const Path *path, double tolerance) {
    Hand hand;
    memset(&hand, 0, sizeof hand);
    hand.element_count = 1;
    hand.gradient = scalar_gradient;
    hand_train(&hand, settings, 8);
    expect_list(path->updates, 6, hand.updates, hand.update_count, tolerance, "theta");
    expect_list(path->evaluations, 8, hand.evaluations[0], hand.evaluation_count[0], tolerance,
                "evaluated at");
    if (!isnan(path->end)) { assert_close(hand.end[0], path->end, tolerance, "theta at the end"); }
    return hand;
}

// The examples with AdamW were computed in double, the replay computes in fp32.
#define ADAMW_TOLERANCE 2e-6

static void ddp_and_zero1_follow_the_worked_example(void **state) {
    (void)state;
    static const char *const rules[] = {"ddp", "zero1"};
    const Path sgd = {
        {5.375, 5.5625, 7.15625, UNCHECKED}, {8, 8, 5.375, 5.375, 5.5625, 5.5625, UNCHECKED}, 7.15625};
    const Path adamw = {
        {7.820000000190476, 7.651326351663929, 7.517874316291992, UNCHECKED}, {UNCHECKED}, 7.517874316291992};
    for (int i = 0; i < 2; i++) {
        ReplaySettings settings = scalar_settings(rules[i], true, 2, 12);
        expect_path(&settings, &sgd, 0);
        settings = scalar_settings(rules[i], false, 2, 12);
        expect_path(&settings, &adamw, ADAMW_TOLERANCE);
    }
}

static void dpu_follows_the_worked_example(void **state) {
    (void)state;
    ReplaySettings settings = scalar_settings("dpu", true, 2, 12);
    const Path sgd = {
        {5.375, 4.25, 5.9375, 9.6875, UNCHECKED}, {8, 8, 8, 8, 5.375, 5.375, 4.25, 4.25}, 9.6875};
    Hand hand = expect_path(&settings, &sgd, 0);
    assert_int_equal(hand.update_count, 4);
    assert_true(hand.gradients_done == 16);
    settings = scalar_settings("dpu", false, 2, 12);
    const Path adamw = {
        {7.820000000190476, 7.650092549585583, 7.513295032542005, UNCHECKED}, {UNCHECKED}, UNCHECKED};
    expect_path(&settings, &adamw, ADAMW_TOLERANCE);
}

static void acco_wp_follows_the_worked_example(void **state) {
    (void)state;
    ReplaySettings settings = scalar_settings("acco-wp", true, 2, 12);
    const Path sgd = {
        {5.375, 4.25, 7.25, 11.5625, UNCHECKED}, {8, 8, 8, 8, 2.75, 2.75, 3.125, 3.125}, 11.5625};
    Hand hand = expect_path(&settings, &sgd, 0);
    assert_int_equal(hand.update_count, 4);
    settings.target = 16;
    hand = expect_path(&settings, &sgd, 100); // one round more sees the third prediction
    assert_true(hand.updates[3][0] == 11.5625f && hand.evaluations[0][8][0] == 10.25f);
    settings = scalar_settings("acco-wp", false, 2, 16);
    const Path adamw = {
        {7.820000000190476, 7.650092549585583, 7.515647789287045, UNCHECKED}, {UNCHECKED}, UNCHECKED};
    hand = expect_path(&settings, &adamw, ADAMW_TOLERANCE);
    static const double predicted[] = {7.641800000379048, 7.48343317962174, 7.404604409304794};
    for (int i = 0; i < 3; i++) {
        assert_close(hand.evaluations[0][4 + 2 * i][0], predicted[i], ADAMW_TOLERANCE, "prediction");
    }
}

static void acco_follows_the_worked_example(void **state) {
    (void)state;
    ReplaySettings settings = scalar_settings("acco", true, 2, 12);
    const Path sgd = {{5.375, 5.65625, 7.2734375, UNCHECKED},
                      {8, 8, 5, 5.375, 5.375, 5.65625, 6.96875, UNCHECKED},
                      7.2734375};
    Hand hand = expect_path(&settings, &sgd, 0);
    assert_int_equal(hand.update_count, 3);
    assert_true(hand.gradients_done == 12 &&
                hand.evaluation_count[0] == 7); // the last round A is thrown away
    settings = scalar_settings("acco", false, 2, 12);
    const Path adamw = {{7.820000000190476, 7.651326351664015, 7.517904095233705, UNCHECKED},
                        {8, 8, 7.820000000166667, 7.820000000190476, 7.6468900592858775, 7.651326351664015,
                         7.5082060760890466, UNCHECKED},
                        7.517904095233705};
    expect_path(&settings, &adamw, ADAMW_TOLERANCE);
}

static void acco_with_unequal_workers_follows_the_worked_example(void **state) {
    (void)state;
    ReplaySettings settings = scalar_settings("acco", true, 2, 24);
    settings.accumulate[1] = 6;
    settings.round_a[1] = 3;
    const Path round = {{7.4375, 12.203125, 19.26171875, UNCHECKED},
                        {8, 8, 6.25, 7.4375, 11.3125, 12.203125, 18.296875, UNCHECKED},
                        19.26171875};
    expect_path(&settings, &round, 0);
    settings.first_round[0] = settings.first_round[1] = 1;
    settings.target = 22;
    const Path one = {{6.416666666666667, 10.25, 16.770833333333332, UNCHECKED},
                      {8, 8, 5, 6.416666666666667, 9.416666666666668, 10.25, 15.791666666666666, UNCHECKED},
                      16.770833333333332};
    Hand hand = expect_path(&settings, &one, 4e-6);
    assert_true(hand.gradients_done == 22);
}

// With --sequential 2, two commits are as under zero1. Then the overlapped rule starts at
// their result, with the next data; its first commit is as under zero1, too.
static void a_sequential_start_is_zero1(void **state) {
    (void)state;
    static const char *const rules[] = {"dpu", "acco-wp", "acco"};
    const Path longer = {
        {5.375, 5.5625, 7.15625, UNCHECKED}, {8, 8, 5.375, 5.375, 5.5625, 5.5625, UNCHECKED}, UNCHECKED};
    const Path shorter = {{5.375, 5.5625, UNCHECKED}, {8, 8, 5.375, 5.375, UNCHECKED}, 5.5625};
    for (int i = 0; i < 3; i++) {
        ReplaySettings settings = scalar_settings(rules[i], true, 2, 12);
        settings.sequential = 2;
        expect_path(&settings, &longer, 0);
        settings.target = 8; // ends before anything overlaps
        Hand hand = expect_path(&settings, &shorter, 0);
        assert_int_equal(hand.update_count, 2);
        assert_int_equal(hand.evaluation_count[0], 4);
    }
}

static ReplaySettings outer_settings(const char *rule, int period, double inner_steps) {
    ReplaySettings settings = scalar_settings(rule, true, 1, 2 * inner_steps);
    settings.period = period;
    settings.outer_rate = settings.mu = 0.5;
    settings.co2_beta = 0.5;
    settings.co2_alpha = settings.co2_gap = 1;
    return settings;
}

static void co2_follows_the_worked_example(void **state) {
    (void)state;
    const struct {
        double beta, phi, gap;
        Path path;
        bool eager;
    } rows[] = {
        {0.5, 0, 1, {{8, 4.25, 0.875, 2.75, UNCHECKED}, {8, 4, 8, 5, 4.25, UNCHECKED}, 2.75}, false},
        {0.5, 1, 1, {{8, 7, 6, 5.8125, UNCHECKED}, {8, 4, 8, 5, 7, UNCHECKED}, 5.8125}, false},
        {0, 0, 1, {{8, 4.25, 2.75, 6.3125, UNCHECKED}, {8, 4, 8, 5, 4.25, UNCHECKED}, 6.3125}, false},
        {0.5,
         0,
         2,
         {{8, 6.125, 4.4375, 4.671875, UNCHECKED}, {8, 4, 8, 5, 6.125, UNCHECKED}, 4.671875},
         false},
        {0,
         0,
         1,
         {{8, 4.25, 4.15625, 7.75390625, UNCHECKED}, {8, 4, 5.25, 3.625, 3.28125, UNCHECKED}, 7.75390625},
         true},
    };
    for (int i = 0; i < 10; i++) {
        ReplaySettings settings = outer_settings("co2", 2, 6);
        settings.co2_beta = rows[i / 2].beta;
        settings.co2_phi = rows[i / 2].phi;
        settings.co2_gap = rows[i / 2].gap;
        settings.co2_eager = rows[i / 2].eager;
        settings.plain_outer = i % 2 == 1;
        Hand hand = expect_path(&settings, &rows[i / 2].path, 0);
        assert_int_equal(hand.update_count, 4);
    }
}

static void diloco_follows_the_worked_example(void **state) {
    (void)state;
    const Path path = {
        {5.1875, 5.17578125, 7.168701171875, UNCHECKED}, {8, 4, 5.1875, UNCHECKED}, 7.168701171875};
    for (int i = 0; i < 4; i++) {
        ReplaySettings settings = outer_settings(i / 2 == 0 ? "diloco" : "streaming-diloco", 2, 6);
        settings.plain_outer = i % 2 == 1;
        Hand hand = expect_path(&settings, &path, 0); // one fragment, no delay and alpha 0: the same rule
        assert_int_equal(hand.update_count, 3);
    }
}

// test_rules.c explains the numbers.
static void sparse_loco_follows_the_worked_example(void **state) {
    (void)state;
    ReplaySettings settings = outer_settings("sparse-loco", 2, 4);
    settings.delay = 1;
    settings.sparse_beta = 0.5;
    settings.sparse_alpha = 1;
    const Path path = {{5, 4.625, 5.5625, UNCHECKED}, {8, 4, 3.5, 2.75, UNCHECKED}, 5.5625};
    Hand hand = expect_path(&settings, &path, 0);
    assert_int_equal(hand.update_count, 3);
}

static void diloco_of_single_steps_is_ddp(void **state) {
    (void)state;
    ReplaySettings settings = outer_settings("diloco", 1, 6), ddp = scalar_settings("ddp", true, 1, 12);
    settings.outer_rate = 1;
    settings.mu = 0;
    Path path = {{UNCHECKED}, {UNCHECKED}, UNCHECKED};
    Hand one = expect_path(&settings, &path, 0), other = expect_path(&ddp, &path, 0);
    assert_int_equal(one.update_count, 6);
    assert_memory_equal(one.updates, other.updates, sizeof one.updates);
}

// A last period that is shorter than the others still ends with an outer step.
static void a_short_last_period_ends_with_an_outer_step(void **state) {
    (void)state;
    ReplaySettings settings = outer_settings("diloco", 2, 5);
    // The third period has one step, from 5.17578125 to 4.587890625 and 8.587890625:
    //   mean D     (0.587890625 - 3.412109375) / 2        = -1.412109375
    //   momentum   1.265625 / 2 + D                       = -0.779296875
    //   theta      5.17578125 - (D + momentum / 2) / 2    =  6.07666015625
    const Path diloco = {{5.1875, 5.17578125, 6.07666015625, UNCHECKED}, {UNCHECKED}, 6.07666015625};
    expect_path(&settings, &diloco, 0);
    settings = outer_settings("co2", 2, 5);
    // The third period starts at 4.25 with X 4 and 12 and ends at 4.125 and 8.125:
    //   mean D     (0.125 - 3.875) / 2    = -1.875
    //   momentum   3.375 / 2 + D          = -0.1875
    const Path co2 = {{8, 4.25, 0.875, 1.0625, UNCHECKED}, {UNCHECKED}, 1.0625};
    expect_path(&settings, &co2, 0);
}

static const uint8_t two_fragments[HAND_ELEMENTS] = {0, 1};

static void streaming_with_two_workers_follows_the_worked_example(void **state) {
    (void)state;
    static const double outer[4] = {5.75, 4.109375, 6.21875, 4.041748046875};
    ReplaySettings settings = outer_settings("streaming-diloco", 4, 9);
    settings.fragments = 2;
    settings.fragment_of = two_fragments;
    settings.delay = 1;
    settings.alpha = 0.5;
    Hand hand;
    memset(&hand, 0, sizeof hand);
    hand.element_count = 2;
    hand.gradient = scalar_gradient;
    hand_train(&hand, &settings, 8);
    for (int step = 0; step < 9; step++) {
        for (int i = 0; i < 4; i++) {
            assert_close(hand.evaluations[i / 2][step][i % 2], streaming_local[i / 2][step][i % 2], 0,
                         "local parameters");
        }
    }
    for (int i = 0; i < 4; i++) { assert_close(hand.updates[i][i % 2], outer[i], 0, "outer parameters"); }
    // After step 9 both fragments are exchanged once more, and the local parameters
    // become the outer ones:
    //              fragment 0                      fragment 1
    //   local      7.15478515625, 17.64599609375   3.78912353515625, 8.01519775390625
    //   mean D     -6.181640625                    -1.86041259765625
    //   momentum   0.375 / 2 + D                   1.8193359375 / 2 + D
    //   outer      6.21875 - step                  4.041748046875 - step
    // with step = (D + momentum / 2) / 2.
    assert_int_equal(hand.update_count, 6);
    assert_close(hand.end[0], 10.80810546875, 0, "outer parameters at the end");
    assert_close(hand.end[1], 5.2096405029296875, 0, "outer parameters at the end");
}

static float constant_gradient(int worker, uint64_t index, int element, float parameter) {
    (void)worker, (void)index, (void)element, (void)parameter;
    return 2;
}

static void streaming_follows_the_sequences_of_torchft(void **state) {
    (void)state;
    for (int i = 0; i < 12; i++) {
        const StreamingSequence *sequence = &streaming_sequences[i / 2];
        ReplaySettings settings = outer_settings("streaming-diloco", 6, 16);
        settings.rate.peak = 1;
        settings.outer_rate = 2;
        settings.mu = 0;
        settings.fragments = 2;
        settings.fragment_of = two_fragments;
        settings.delay = sequence->delay;
        settings.alpha = sequence->alpha;
        settings.plain_outer = i % 2 == 1;
        Hand hand;
        memset(&hand, 0, sizeof hand);
        hand.element_count = 2;
        hand.gradient = constant_gradient;
        hand_train(&hand, &settings, 1);
        for (int step = 0; step < 16; step++) {
            for (int j = 0; j < 2; j++) {
                assert_close(hand.evaluations[0][step][j], sequence->values[j][step], 0, "local parameters");
            }
        }
    }
}

// ---- The outer kernels ----------------------------------------------------------------

enum { OUTER_ELEMENTS = 1003 };

static void fill_noise(float *values, uint64_t seed, double size) {
    for (uint64_t i = 0; i < OUTER_ELEMENTS; i++) {
        Random random = {random_hash(seed, i)};
        values[i] = (float)(size * random_normal(&random));
    }
}

static void expect_near(const float *values, const float *expected, const char *what) {
    for (int i = 0; i < OUTER_ELEMENTS; i++) {
        assert_close(values[i], expected[i], 4e-7 * (1 + fabs(expected[i])), what);
    }
}

// The arrays of a kernel, or of the formulas beside it.
typedef struct OuterArrays {
    float outer[OUTER_ELEMENTS], momentum[OUTER_ELEMENTS], local[OUTER_ELEMENTS], exchange[OUTER_ELEMENTS],
        start[OUTER_ELEMENTS];
} OuterArrays;

static void outer_kernels_equal_the_formulas_but_for_rounding(void **state) {
    (void)state;
    static OuterArrays kernel, plain;
    for (int i = 0; i < 8; i++) {
        fill_noise(kernel.outer, 1, 1);
        fill_noise(kernel.momentum, 2, 0.5);
        fill_noise(kernel.local, 3, 1);
        fill_noise(kernel.exchange, 4, 3);
        fill_noise(kernel.start, 5, 1);
        plain = kernel;
        bool apart = i != 6; // the start or the base
        OuterRange range = {kernel.outer,
                            kernel.momentum,
                            kernel.local,
                            kernel.exchange,
                            apart ? kernel.start : kernel.outer,
                            OUTER_ELEMENTS};
        OuterRange formulas = {
            plain.outer,   plain.momentum, plain.local, plain.exchange, apart ? plain.start : plain.outer,
            OUTER_ELEMENTS};
        if (i < 3) {
            NesterovStep step = {.inverse_weight = 1.0f / 3,
                                 .learning_rate = 0.7f,
                                 .momentum = 0.9f,
                                 .alpha = 0.5f * (float)i};
            cpu_outer_nesterov(&range, &step);
            replay_plain_nesterov(&formulas, &step);
        } else if (i < 7) {
            MomentumStep step = {.inverse_weight = 1.0f / 3,
                                 .weight = 0.75f,
                                 .own_share = i == 4 || i == 5 ? 1.0f / 3 : 0,
                                 .beta = 0.4f,
                                 .alpha = 0.8f,
                                 .phi = i % 2 == 0 ? 0.3f : 0.0f,
                                 .gap = 1.5f,
                                 .received = i >= 5};
            cpu_outer_momentum(&range, &step);
            replay_plain_co2(&formulas, &step);
        } else {
            cpu_outer_pseudo_gradient(&range, 0.75f);
            for (int j = 0; j < OUTER_ELEMENTS; j++) {
                plain.exchange[j] = 0.75f * (plain.outer[j] - plain.local[j]);
            }
        }
        expect_near(kernel.outer, plain.outer, "outer");
        expect_near(kernel.momentum, plain.momentum, "momentum");
        expect_near(kernel.local, plain.local, "local");
        expect_near(kernel.exchange, plain.exchange, "exchange");
    }
}

// ---- A run of the program, and the replay of it ---------------------------------------

// A rank gets 14 micro-batches and a part of one; 8 and a part where there are many
// ranks.
enum { MODEL_POSITIONS = 32, TOKENS_OF_FEW = 450, TOKENS_OF_MANY = 260, RERUN_COMMITS = 64 };

// The options of a run, as its log has them.
typedef struct LoggedOptions {
    json_t *options; // borrowed
    int ranks;
} LoggedOptions;

// A number; `otherwise` where the option has a word instead.
static double logged_number(const LoggedOptions *logged, const char *name, double otherwise) {
    json_t *value = json_object_get(logged->options, name);
    if (value == NULL) { fail_msg("--%s is not in the log", name); }
    return json_is_number(value) ? json_number_value(value) : otherwise;
}

static const char *logged_text(const LoggedOptions *logged, const char *name) {
    const char *text = json_string_value(json_object_get(logged->options, name));
    if (text == NULL) { fail_msg("--%s is not in the log as a word", name); }
    return text;
}

static bool logged_is(const LoggedOptions *logged, const char *name, const char *word) {
    return strcmp(logged_text(logged, name), word) == 0;
}

// The model and the data, which all workers of the replay use in turns.
typedef struct Rerun {
    LoggedOptions logged;
    ModelConfig config;
    TrainedPart part;
    DataLoader data;
    Arena arena;
    Model model;
    Stream stream;
    int B, T;
    int32_t *tokens, *targets; // (B, T)
    float *parameters;
    uint8_t *decays, *fragment_of;  // (parameter_count)
    OptimizerTensor *tensors;       // (TRAINING_PARTS part.table.count)
    int accumulate[REPLAY_WORKERS]; // micro-batches of each rank in a commit
    ReplayUpdate updates[RERUN_COMMITS];
    int update_count;
} Rerun;

// Where a micro-batch of a rank lies in the data. They are dealt out one by one: ranks take one
// each in turn, but those that have had their number for this commit wait for the next.
static uint64_t rerun_deal(const Rerun *rerun, int worker, uint64_t index) {
    uint64_t number = 0, had = 0;
    for (;;) {
        bool any = true;
        for (int round = 0; any; round++) {
            any = false;
            for (int rank = 0; rank < rerun->logged.ranks; rank++) {
                if (round >= rerun->accumulate[rank]) { continue; }
                any = true;
                if (rank == worker && had++ == index) { return number; }
                number++;
            }
        }
    }
}

static MicroBatchResult rerun_micro_batch(void *self, int worker, uint64_t index, const float *parameters,
                                          float *gradients) {
    Rerun *rerun = (Rerun *)self;
    uint64_t first = rerun_deal(rerun, worker, index) * (uint64_t)rerun->B;
    double perfect;
    Error error = {""};
    assert_true(data_loader_fill(&rerun->data, DATA_TRAINING, first, rerun->B, rerun->tokens, rerun->targets,
                                 &perfect, &error));
    float loss = model_loss_and_gradients(&rerun->model, &rerun->stream, parameters, gradients, rerun->tokens,
                                          rerun->targets, NULL);
    MicroBatchResult result = {(double)loss, perfect,
                               targets_predicted(rerun->targets, (size_t)rerun->B * (size_t)rerun->T)};
    return result;
}

static void rerun_updated(void *self, const ReplayUpdate *update) {
    Rerun *rerun = (Rerun *)self;
    assert_true(rerun->update_count < RERUN_COMMITS);
    rerun->updates[rerun->update_count++] = *update;
}

// Fills the parameters, and what is frozen, with what the run began with.
static void rerun_begin(Rerun *rerun) {
    TrainedPart *part = &rerun->part;
    const char *from = logged_text(&rerun->logged, "from");
    HfModel model;
    Error error = {""};
    parameters_initialize(&part->table, (uint64_t)logged_number(&rerun->logged, "seed", 0),
                          rerun->stream.pool, rerun->parameters);
    if (from[0] == '\0') { return; }
    assert_true(hf_model_open(&model, from, &error));
    for (int i = 0; i < part->model.count; i++) {
        const TensorPlace *place = &part->places[i];
        hf_model_read_tensor(&model, i,
                             place->kind == TRAINED_WHOLE ? rerun->parameters + place->trained
                                                          : real_floats(part->frozen) + place->frozen);
    }
    hf_model_close(&model);
}

static void rerun_open_model(Rerun *rerun) {
    const LoggedOptions *logged = &rerun->logged;
    Error error = {""};
    TrainedPart *part = &rerun->part;
    const char *freeze = json_string_value(json_object_get(logged->options, "freeze")); // or null
    TrainedChoice choice = {.freeze = freeze != NULL ? freeze : "",
                            .adapted = logged_text(logged, "lora-on"),
                            .rank = (int)logged_number(logged, "lora-rank", 0),
                            .alpha = logged_number(logged, "lora-alpha", NAN)};
    const char *from = logged_text(logged, "from");
    assert_true(model_find(from[0] != '\0' ? from : logged_text(logged, "model"), &rerun->config, &error));
    assert_true(trained_part_make(part, &rerun->config, &choice, &error));
    rerun->B = (int)logged_number(logged, "micro-batch", 0);
    rerun->T = (int)logged_number(logged, "seq-len", 0);
    DataRequest request = {logged_text(logged, "data"),
                           rerun->T,
                           rerun->config.vocabulary,
                           (uint64_t)logged_number(logged, "seed", 0),
                           true,
                           NULL,
                           false,
                           false};
    assert_true(data_loader_open(&rerun->data, &request, &error));
    size_t bytes = (size_t)(rerun->B * rerun->T) * sizeof(int32_t), count = part->table.parameter_count;
    rerun->stream.pool = thread_pool_create(1, false);
    ModelSettings settings = model_on_cpu(rerun->B, rerun->T, 1);
    settings.part = part->frozen_count > 0 ? part : NULL;
    arena_reserve(&rerun->arena, MEMORY_PARAMETERS, "frozen", part->frozen_count * sizeof(float),
                  &part->frozen);
    model_reserve(&rerun->model, &rerun->arena, &rerun->config, &settings);
    arena_reserve(&rerun->arena, MEMORY_WORKSPACE, "tokens", bytes, &rerun->tokens);
    arena_reserve(&rerun->arena, MEMORY_WORKSPACE, "targets", bytes, &rerun->targets);
    arena_reserve(&rerun->arena, MEMORY_PARAMETERS, "parameters", count * sizeof(float), &rerun->parameters);
    arena_reserve(&rerun->arena, MEMORY_WORKSPACE, "decays", count, &rerun->decays);
    arena_reserve(&rerun->arena, MEMORY_WORKSPACE, "fragments", count, &rerun->fragment_of);
    arena_reserve(&rerun->arena, MEMORY_WORKSPACE, "tensors",
                  TRAINING_PARTS * (size_t)part->table.count * sizeof *rerun->tensors, &rerun->tensors);
    assert_true(arena_commit(&rerun->arena, &error));
    rerun_begin(rerun);
}

static void rerun_close(Rerun *rerun) {
    data_loader_close(&rerun->data);
    trained_part_free(&rerun->part);
    thread_pool_destroy(rerun->stream.pool);
    arena_release(&rerun->arena);
}

// The layer that a tensor belongs to; -1: none.
// Of "transformer.h.2.ln_1.weight" or "model.layers.2.mlp.up_proj.weight"; -1: in none.
static int layer_of(const char *name) {
    static const char *const layers[] = {"h.", "layers."};
    for (int i = 0; i < 2; i++) {
        const char *part = strstr(name, layers[i]);
        if (part != NULL && (part == name || part[-1] == '.')) { return atoi(part + strlen(layers[i])); }
    }
    return -1;
}

static void rerun_label(Rerun *rerun, ReplaySettings *settings) {
    bool all = logged_is(&rerun->logged, "decay", "all");
    for (int i = 0; i < rerun->part.table.count; i++) {
        const ParameterInfo *entry = &rerun->part.table.entries[i];
        memset(rerun->decays + entry->offset, all || entry->is_matrix ? 1 : 0, entry->count);
        int layer = layer_of(entry->name), fragment = 0;
        if (layer >= 0 && settings->fragments > 1) { fragment = layer % settings->fragments; }
        memset(rerun->fragment_of + entry->offset, fragment, entry->count);
    }
    settings->tensors = rerun->tensors;
    settings->tensor_count =
        training_tensors(&rerun->part.table, all, logged_is(&rerun->logged, "inner", "muon"), rerun->tensors);
    settings->muon_momentum = logged_number(&rerun->logged, "muon-momentum", 0);
    settings->adamw_ratio =
        logged_number(&rerun->logged, "muon-adamw-lr", 0) / logged_number(&rerun->logged, "lr", 0);
    settings->muon_iterations = (int)logged_number(&rerun->logged, "muon-iterations", 0);
    settings->decays = rerun->decays;
    settings->fragment_of = rerun->fragment_of;
}

// --rank-accumulate is a list with a number for each rank, or empty.
static void read_accumulate(const LoggedOptions *logged, ReplaySettings *settings) {
    const char *list = logged_text(logged, "rank-accumulate");
    for (int rank = 0; rank < logged->ranks; rank++) {
        settings->accumulate[rank] =
            list[0] != '\0' ? atoi(list) : (int)logged_number(logged, "accumulate", 0);
        list += strcspn(list, ",");
        list += *list == ',';
    }
}

// The split is a share of round A, "half", or "wire": as the bits of the two formats,
// with the scales of coarse blocks of 256. At least one micro-batch is in each round.
static void read_rounds(const LoggedOptions *logged, ReplaySettings *settings) {
    static const double bits[] = {32, 16, 8 + 32.0 / 256, 4 + 32.0 / 256, 4 + 32.0 / 256};
    double share = atof(logged_text(logged, "acco-split"));
    if (logged_is(logged, "acco-split", "half")) { share = 0.5; }
    if (logged_is(logged, "acco-split", "wire")) {
        share = bits[settings->wire] / (bits[settings->wire] + bits[settings->estimate_wire]);
    }
    assert_true(share > 0 && share < 1);
    for (int rank = 0; rank < logged->ranks; rank++) {
        int k = settings->accumulate[rank], a = (int)lround(share * k);
        settings->round_a[rank] = a < 1 ? 1 : a >= k ? k - 1 : a;
        settings->first_round[rank] = (int)logged_number(logged, "acco-init", 0);
    }
}

static void read_rate(const LoggedOptions *logged, ReplaySettings *settings, double tokens_per_micro_batch) {
    LearningRate *rate = &settings->rate;
    double per_commit = 0;
    for (int rank = 0; rank < logged->ranks; rank++) { per_commit += settings->accumulate[rank]; }
    settings->target = ceil(logged_number(logged, "tokens", 0) / tokens_per_micro_batch);
    settings->rate_by_commits = logged_is(logged, "lr-by", "commits");
    rate->kind = logged_is(logged, "schedule", "cosine")   ? SCHEDULE_COSINE
                 : logged_is(logged, "schedule", "linear") ? SCHEDULE_LINEAR
                 : logged_is(logged, "schedule", "wsd")    ? SCHEDULE_WSD
                                                           : SCHEDULE_CONSTANT;
    rate->peak = logged_number(logged, "lr", NAN);
    rate->minimum = logged_number(logged, "min-lr", NAN);
    rate->step = settings->rate_by_commits ? 1 : per_commit;
    rate->warmup = logged_number(logged, "warmup", NAN) * rate->step;
    rate->total = logged_number(logged, "tokens", 0) / tokens_per_micro_batch /
                  (settings->rate_by_commits ? per_commit : 1);
    rate->decay = logged_number(logged, "decay-tokens", logged_number(logged, "tokens", 0)) /
                  tokens_per_micro_batch / (settings->rate_by_commits ? per_commit : 1);
}

static void read_local(const LoggedOptions *logged, ReplaySettings *settings) {
    if (strcmp(settings->rule, "co2") == 0) {
        settings->period = (int)logged_number(logged, "co2-tau", 0);
        settings->co2_beta = logged_number(logged, "co2-beta", 0);
        settings->co2_alpha = logged_number(logged, "co2-alpha", 0);
        settings->co2_phi = logged_number(logged, "co2-phi", 0);
        settings->co2_gap = logged_number(logged, "co2-gap", 0);
        settings->co2_eager = json_is_true(json_object_get(logged->options, "co2-eager"));
        return;
    }
    if (strcmp(settings->rule, "sparse-loco") == 0) {
        settings->period = (int)logged_number(logged, "sparse-H", 0);
        settings->delay = (int)logged_number(logged, "sparse-tau", 0);
        settings->sparse_beta = logged_number(logged, "sparse-beta", 0);
        settings->sparse_eager = json_is_true(json_object_get(logged->options, "sparse-eager"));
        settings->sparse_alpha = logged_number(logged, "sparse-alpha", 0);
        return;
    }
    settings->period = (int)logged_number(logged, "diloco-H", 0);
    bool streams = strcmp(settings->rule, "streaming-diloco") == 0;
    settings->outer_rate = logged_number(logged, "diloco-outer-lr", streams ? 0.7 : 1);
    settings->mu = logged_number(logged, "diloco-mu", streams ? 0.9 : 0.3);
    if (!streams) { return; }
    settings->fragments = (int)logged_number(logged, "streaming-P", 0);
    settings->delay = (int)logged_number(logged, "streaming-tau", 0);
    settings->alpha = logged_number(logged, "streaming-alpha", 0);
}

// Looks a format up. Returns false, and leaves *format, for any other word.
static bool wire_find(const char *name, WireFormat *format) {
    for (int i = 0; i < WIRE_FORMAT_COUNT; i++) {
        if (strcmp(wire_name((WireFormat)i), name) == 0) {
            *format = (WireFormat)i;
            return true;
        }
    }
    return false;
}

static ReplaySettings read_settings(const LoggedOptions *logged, double tokens_per_micro_batch) {
    ReplaySettings settings;
    memset(&settings, 0, sizeof settings);
    settings.rule = logged_text(logged, "optimizer");
    settings.workers = logged->ranks;
    read_accumulate(logged, &settings);
    settings.workers_per_host = (int)logged_number(logged, "ranks-per-host", 0);
    settings.sequential = (int)logged_number(logged, "sequential", 0);
    settings.clip = logged_number(logged, "grad-clip", 0);
    assert_true(wire_find(logged_text(logged, "wire"), &settings.wire));
    settings.estimate_wire = settings.wire;
    assert_true(wire_find(logged_text(logged, "estimate-wire"), &settings.estimate_wire) ||
                logged_is(logged, "estimate-wire", "same"));
    if (strcmp(settings.rule, "acco") == 0) { read_rounds(logged, &settings); }
    settings.beta1 = logged_number(logged, "beta1", NAN);
    settings.beta2 = logged_number(logged, "beta2", NAN);
    settings.epsilon = logged_number(logged, "eps", NAN);
    settings.weight_decay = logged_number(logged, "weight-decay", NAN);
    read_rate(logged, &settings, tokens_per_micro_batch);
    if (replay_rule_find(settings.rule)->local) { read_local(logged, &settings); }
    return settings;
}

// The validation loss. As in the program, every rank adds up its share, and then the sums
// are added in the order of ranks.
static double rerun_validate(Rerun *rerun) {
    int batches = (int)logged_number(&rerun->logged, "val-batches", 0);
    double sum = 0, perfect, predicted = rerun->B * rerun->T; // in every batch
    for (int rank = 0; rank < rerun->logged.ranks; rank++) {
        double mine = 0;
        for (int batch = rank; batch < batches; batch += rerun->logged.ranks) {
            Error error = {""};
            uint64_t first = (uint64_t)(batch * rerun->B);
            assert_true(data_loader_fill(&rerun->data, DATA_VALIDATION, first, rerun->B, rerun->tokens,
                                         rerun->targets, &perfect, &error));
            double loss =
                model_loss(&rerun->model, &rerun->stream, rerun->parameters, rerun->tokens, rerun->targets);
            mine += loss * predicted;
        }
        sum += mine;
    }
    return sum / (batches * predicted);
}

// The log has this number, with the digits that a log has.
static void expect_logged(json_t *event, const char *field, double expected, const char *what) {
    char text[600], number[64];
    snprintf(text, sizeof text, "%.500s: %s", what, field);
    snprintf(number, sizeof number, "%.*g", LOG_JSON_DIGITS, expected);
    assert_close(log_number(event, field), strtod(number, NULL), 0, text);
}

// Compares every report of a rule whose workers step together.
static void expect_commits(json_t *events, const Rerun *rerun, const char *what) {
    int count = 0;
    for (json_t *event; (event = log_event_of(events, "report", count)) != NULL; count++) {
        const ReplayUpdate *update = &rerun->updates[count];
        char text[512];
        assert_true(count < rerun->update_count);
        snprintf(text, sizeof text, "%.400s, commit %d", what, count + 1);
        expect_logged(event, "lr", update->learning_rate, text);
        expect_logged(event, "grad_norm", update->gradient_norm, text);
        expect_logged(event, "grads", update->gradients_done, text);
    }
    assert_int_equal(count, rerun->update_count);
}

static void expect_same_bits(Stage *stage, const ReplayCase *c) {
    static Rerun rerun;
    char options[STAGE_COMMAND_SIZE / 2];
    int tokens = c->ranks < MANY_RANKS ? TOKENS_OF_FEW : TOKENS_OF_MANY;
    snprintf(options, sizeof options, "%s --tokens %d", c->options, tokens * c->ranks);
    Training training = training_start(stage, c->ranks, options);
    json_t *events = training_finish(stage, &training), *end = log_event_of(events, "end", -1);
    memset(&rerun, 0, sizeof rerun);
    rerun.logged.options = json_object_get(log_event_of(events, "start", 0), "options");
    rerun.logged.ranks = c->ranks;
    rerun_open_model(&rerun);
    ReplaySettings settings = read_settings(&rerun.logged, rerun.B * rerun.T);
    rerun_label(&rerun, &settings);
    memcpy(rerun.accumulate, settings.accumulate, sizeof rerun.accumulate);
    size_t count = rerun.part.table.parameter_count;
    ReplayProblem problem = {&rerun, count, rerun.B * rerun.T, rerun_micro_batch, rerun_updated};
    double gradients = replay_run(&settings, &problem, rerun.parameters);
    if (!replay_rule_find(settings.rule)->local) { expect_commits(events, &rerun, training.what); }
    expect_logged(end, "tokens", gradients * rerun.B * rerun.T, training.what);
    char text[32];
    ThreadPool *pool = thread_pool_create(1, false);
    uint64_t hash = hash_more(pool, count * sizeof(float), rerun.parameters, count * sizeof(float));
    thread_pool_destroy(pool);
    snprintf(text, sizeof text, "%016llx", (unsigned long long)hash);
    Fingerprint print = log_fingerprint(events);
    if (strcmp(print.text, text) != 0) {
        fail_msg("%s: the parameters are %s, the replay's %s", training.what, print.text, text);
    }
    expect_logged(log_event_of(events, "validation", -1), "loss", rerun_validate(&rerun), training.what);
    rerun_close(&rerun);
    json_decref(events);
}

enum { REPLAYS = RULES_TESTED * MOST_REPLAYS, CASES = REPLAYS + 2 * RULES_TESTED }; // at most

// A rule that somebody adds must not be left out here.
static void every_rule_is_replayed(void **state) {
    (void)state;
    assert_int_equal(REPLAY_RULE_COUNT, RULE_COUNT);
    assert_int_equal(RULES_TESTED, RULE_COUNT);
    for (int rule = 0; rule < RULE_COUNT; rule++) {
        assert_true(rule_cases[rule].replays[0].ranks > 0);
        assert_non_null(replay_rule_find(RULES[rule].rule->name));
    }
}

typedef struct Scene {
    Stage *stage;
    ReplayCase one;
    char options[250 + STAGE_PATH_SIZE], name[250];
} Scene;

static void the_program_equals_the_replay(void **state) {
    const Scene *scene = (const Scene *)*state;
    if (!scene->stage->has_mpi) {
        print_message("no MPI here: skipped\n");
        skip();
    }
    expect_same_bits(scene->stage, &scene->one);
}

static int end_programs(void **state) {
    stage_end_all(((const Scene *)*state)->stage);
    return 0;
}

// The models that cases train in turns; what of them is frozen or gets adapters.
static const struct {
    const char *config, *start, *name, *frozen, *adapted;
} replayed_models[] = {
    {"model.json", "start", "", "wte,h.1.*,ln_1", "*proj,c_*"},
    {"gpt2.json", "start-gpt2", " of a GPT-2", "wte,h.1.*,ln_1", "*proj,c_*"},
    {"qwen3.json", "start-qwen3", " of a Qwen3", "embed_tokens,layers.1.*,*_layernorm", "*proj"},
};
enum { REPLAYED_MODELS = sizeof replayed_models / sizeof replayed_models[0] };

// A model to begin with.
static void write_start(const Stage *stage, const char *config, const char *directory) {
    char path[STAGE_PATH_SIZE], to[STAGE_PATH_SIZE];
    ModelConfig read;
    ParameterTable table;
    Error error = {""};
    assert_true(model_find(stage_path(stage, config, path), &read, &error));
    parameter_table_make(&read, &table);
    ThreadPool *pool = thread_pool_create(1, false);
    float *parameters = (float *)malloc(table.parameter_count * sizeof(float));
    parameters_initialize(&table, 9, pool, parameters);
    assert_true(
        hf_model_save(stage_path(stage, directory, to), &read, &table, parameters, NULL, NULL, NULL, &error));
    free(parameters);
    thread_pool_destroy(pool);
    parameter_table_free(&table);
}

// Three layers, so that two fragments differ in size.
static void write_stage(const Stage *stage) {
    char path[STAGE_PATH_SIZE], base[2 * STAGE_PATH_SIZE];
    json_t *model = json_pack("{s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:[[[s, s, s], i]]}", "model_type",
                              "gpt_neo", "num_layers", 3, "hidden_size", 32, "num_heads", 2, "window_size", 8,
                              "max_position_embeddings", MODEL_POSITIONS, "vocab_size", 256,
                              "attention_types", "global", "local", "global", 1);
    char *text = json_dumps(model, JSON_INDENT(2));
    stage_write(stage, "model.json", text);
    stage_write(stage, "gpt2.json",
                "{\"model_type\": \"gpt2\", \"n_layer\": 3, \"n_embd\": 32, \"n_head\": 2, "
                "\"n_positions\": 32, \"vocab_size\": 256}");
    stage_write(stage, "qwen3.json",
                "{\"model_type\": \"qwen3\", \"num_hidden_layers\": 3, \"hidden_size\": 32, "
                "\"num_attention_heads\": 4, "
                "\"num_key_value_heads\": 2, \"head_dim\": 16, \"intermediate_size\": 40, "
                "\"max_position_embeddings\": "
                "32, \"vocab_size\": 256, \"bos_token_id\": 0, \"eos_token_id\": 0}");
    free(text);
    json_decref(model);
    snprintf(base, sizeof base,
             "{\"model\": \"%s\", \"micro-batch\": 1, \"accumulate\": 2, \"lr\": 0.003, "
             "\"min-lr\": 0.0005, \"warmup\": 2, \"report-every\": 1, \"val-every\": \"end\", "
             "\"val-batches\": 5, \"sample-tokens\": \"none\", \"threads\": 1, \"timeout-s\": 100}\n",
             stage_path(stage, "model.json", path));
    stage_write(stage, "base.json", base);
    for (int i = 0; i < REPLAYED_MODELS; i++) {
        write_start(stage, replayed_models[i].config, replayed_models[i].start);
    }
}

// The rule with frozen tensors, or with adapters.
static void scene_of_a_part(Scene *scene, const Stage *stage, const RuleCase *rule, int place) {
    int model = (place / 2 + place) % REPLAYED_MODELS;
    bool adapts = place % 2 == 1;
    char start[STAGE_PATH_SIZE], part[128];
    stage_path(stage, replayed_models[model].start, start);
    snprintf(part, sizeof part, "%s '%s'%s", adapts ? "--lora-rank 3 --lora-alpha 6 --lora-on" : "--freeze",
             adapts ? replayed_models[model].adapted : replayed_models[model].frozen,
             adapts ? " --lr 0.03" : "");
    snprintf(scene->options, sizeof scene->options, "%s %s --from %s", rule->options, part, start);
    snprintf(scene->name, sizeof scene->name, "3 ranks equal the replay%s: %s %s",
             replayed_models[model].name, rule->name, part);
    scene->one.ranks = 3;
}

int main(void) {
    static Stage stage;
    static Scene scenes[CASES];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_rule_is_replayed),
        cmocka_unit_test(ddp_and_zero1_follow_the_worked_example),
        cmocka_unit_test(dpu_follows_the_worked_example),
        cmocka_unit_test(acco_wp_follows_the_worked_example),
        cmocka_unit_test(acco_follows_the_worked_example),
        cmocka_unit_test(acco_with_unequal_workers_follows_the_worked_example),
        cmocka_unit_test(a_sequential_start_is_zero1),
        cmocka_unit_test(co2_follows_the_worked_example),
        cmocka_unit_test(diloco_follows_the_worked_example),
        cmocka_unit_test(sparse_loco_follows_the_worked_example),
        cmocka_unit_test(diloco_of_single_steps_is_ddp),
        cmocka_unit_test(a_short_last_period_ends_with_an_outer_step),
        cmocka_unit_test(streaming_with_two_workers_follows_the_worked_example),
        cmocka_unit_test(streaming_follows_the_sequences_of_torchft),
        cmocka_unit_test(outer_kernels_equal_the_formulas_but_for_rounding),
    };
    enum { NAMED = sizeof tests / sizeof tests[0] };
    static struct CMUnitTest all[NAMED + CASES];
    int count = NAMED;
    memcpy(all, tests, sizeof tests);
    stage_open(&stage);
    write_stage(&stage);
    for (int i = 0; i < CASES; i++) {
        Scene *scene = &scenes[i];
        scene->stage = &stage;
        scene->one.options = scene->options;
        struct CMUnitTest test = {scene->name, the_program_equals_the_replay, NULL, end_programs, scene};
        if (i >= REPLAYS) {
            scene_of_a_part(scene, &stage, &rule_cases[(i - REPLAYS) / 2], i - REPLAYS);
            all[count++] = test;
            continue;
        }
        const RuleCase *rule = &rule_cases[i / MOST_REPLAYS];
        const ReplayCase *replay = &rule->replays[i % MOST_REPLAYS];
        if (replay->ranks == 0) { continue; }
        int model = i % MOST_REPLAYS % REPLAYED_MODELS;
        char config[STAGE_PATH_SIZE];
        snprintf(scene->options, sizeof scene->options, "--optimizer %s %s --model %s", rule->name,
                 replay->options, stage_path(&stage, replayed_models[model].config, config));
        snprintf(scene->name, sizeof scene->name, "%d ranks equal the replay%s: %s %s", replay->ranks,
                 replayed_models[model].name, rule->name, replay->options);
        scene->one.ranks = replay->ranks;
        all[count++] = test;
    }
    int failed = _cmocka_run_group_tests("replay", all, (size_t)count, NULL, NULL);
    stage_close(&stage);
    return failed;
}
