// test_replay.c: the program against the plain loop of replay.h, bit for bit, for every
// rule; and the plain loop against worked examples.
//
// First the oracle itself: what it makes of problems that can be followed by hand. Then
// the real binary under mpirun, as its users start it, with 2, 3 and 32 ranks: the replay
// reads from the run's log what was asked for, does it again in this process, and must
// end with the same parameters, the same validation loss, and the same gradient norm and
// learning rate at every commit.
#define _GNU_SOURCE
#include "test/program.h"

#include "program/agreement.h"
#include "test/replay.h"
#include "test/worked_streaming.h"

// ---------------------------------------------------------------------------------------
// Worked examples

enum { HAND_UPDATES = 32, HAND_EVALUATIONS = 64, HAND_ELEMENTS = 2 };

// A problem of one or two elements, and what was seen while it was trained.
typedef struct Hand {
    int element_count;
    float (*gradient)(int worker, uint64_t index, int element, float parameter);
    float updates[HAND_UPDATES][HAND_ELEMENTS];
    int update_count;
    float evaluations[2][HAND_EVALUATIONS]
                     [HAND_ELEMENTS]; // where each micro-batch of each worker was evaluated
    int evaluation_count[2];
    float end[HAND_ELEMENTS];
    double gradients_done;
} Hand;

static double hand_micro_batch(void *self, int worker, uint64_t index, const float *parameters,
                               float *gradients) {
    Hand *hand = (Hand *)self;
    assert_true(index == (uint64_t)hand->evaluation_count[worker] && index < HAND_EVALUATIONS);
    for (int i = 0; i < hand->element_count; i++) {
        hand->evaluations[worker][index][i] = parameters[i];
        gradients[i] += hand->gradient(worker, index, i, parameters[i]);
    }
    hand->evaluation_count[worker]++;
    return 0;
}

static void hand_updated(void *self, const ReplayUpdate *update) {
    Hand *hand = (Hand *)self;
    assert_true(hand->update_count < HAND_UPDATES);
    memcpy(hand->updates[hand->update_count++], update->parameters,
           (size_t)hand->element_count * sizeof(float));
}

static void hand_train(Hand *hand, const ReplaySettings *settings, float start) {
    ReplayProblem problem = {hand, (size_t)hand->element_count, hand_micro_batch, hand_updated};
    for (int i = 0; i < hand->element_count; i++) { hand->end[i] = start; }
    hand->gradients_done = replay_run(settings, &problem, hand->end);
}

// S1: theta - X, with X = j on worker 0 and 4 + 2j on worker 1; a second element has half
// the target.
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

// What must be seen of element 0; NaN ends a list, and a rule may be seen longer than the
// list.
typedef struct Path {
    double updates[6];
    double evaluations[8]; // of worker 0
    double end;            // NaN: not said
} Path;

#define REST NAN

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

// The examples in AdamW are in double.
#define ADAMW_TOLERANCE 2e-6

static void ddp_and_zero1_follow_the_worked_example(void **state) {
    (void)state;
    static const char *const rules[] = {"ddp", "zero1"};
    const Path sgd = {{5.375, 5.5625, 7.15625, REST}, {8, 8, 5.375, 5.375, 5.5625, 5.5625, REST}, 7.15625};
    const Path adamw = {
        {7.820000000190476, 7.651326351663929, 7.517874316291992, REST}, {REST}, 7.517874316291992};
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
    const Path sgd = {{5.375, 4.25, 5.9375, 9.6875, REST}, {8, 8, 8, 8, 5.375, 5.375, 4.25, 4.25}, 9.6875};
    Hand hand = expect_path(&settings, &sgd, 0);
    assert_int_equal(hand.update_count, 4);
    assert_true(hand.gradients_done == 16);
    settings = scalar_settings("dpu", false, 2, 12);
    const Path adamw = {{7.820000000190476, 7.650092549585583, 7.513295032542005, REST}, {REST}, NAN};
    expect_path(&settings, &adamw, ADAMW_TOLERANCE);
}

static void acco_wp_follows_the_worked_example(void **state) {
    (void)state;
    ReplaySettings settings = scalar_settings("acco-wp", true, 2, 12);
    const Path sgd = {{5.375, 4.25, 7.25, 11.5625, REST}, {8, 8, 8, 8, 2.75, 2.75, 3.125, 3.125}, 11.5625};
    Hand hand = expect_path(&settings, &sgd, 0);
    assert_int_equal(hand.update_count, 4);
    settings.target = 16;
    hand = expect_path(&settings, &sgd, 100); // one round more sees the third prediction
    assert_true(hand.updates[3][0] == 11.5625f && hand.evaluations[0][8][0] == 10.25f);
    settings = scalar_settings("acco-wp", false, 2, 16);
    const Path adamw = {{7.820000000190476, 7.650092549585583, 7.515647789287045, REST}, {REST}, NAN};
    hand = expect_path(&settings, &adamw, ADAMW_TOLERANCE);
    static const double predicted[] = {7.641800000379048, 7.48343317962174, 7.404604409304794};
    for (int i = 0; i < 3; i++) {
        assert_close(hand.evaluations[0][4 + 2 * i][0], predicted[i], ADAMW_TOLERANCE, "prediction");
    }
}

static void acco_follows_the_worked_example(void **state) {
    (void)state;
    ReplaySettings settings = scalar_settings("acco", true, 2, 12);
    const Path sgd = {
        {5.375, 5.65625, 7.2734375, REST}, {8, 8, 5, 5.375, 5.375, 5.65625, 6.96875, REST}, 7.2734375};
    Hand hand = expect_path(&settings, &sgd, 0);
    assert_int_equal(hand.update_count, 3);
    assert_true(hand.gradients_done == 12 && hand.evaluation_count[0] == 7); // the last half A is thrown away
    settings = scalar_settings("acco", false, 2, 12);
    const Path adamw = {{7.820000000190476, 7.651326351664015, 7.517904095233705, REST},
                        {8, 8, 7.820000000166667, 7.820000000190476, 7.6468900592858775, 7.651326351664015,
                         7.5082060760890466, REST},
                        7.517904095233705};
    expect_path(&settings, &adamw, ADAMW_TOLERANCE);
}

static void acco_with_unequal_workers_follows_the_worked_example(void **state) {
    (void)state;
    ReplaySettings settings = scalar_settings("acco", true, 2, 24);
    settings.accumulate[1] = 6;
    const Path round = {{7.4375, 12.203125, 19.26171875, REST},
                        {8, 8, 6.25, 7.4375, 11.3125, 12.203125, 18.296875, REST},
                        19.26171875};
    expect_path(&settings, &round, 0);
    settings.first_half[0] = settings.first_half[1] = 1;
    settings.target = 22;
    const Path one = {{6.416666666666667, 10.25, 16.770833333333332, REST},
                      {8, 8, 5, 6.416666666666667, 9.416666666666668, 10.25, 15.791666666666666, REST},
                      16.770833333333332};
    Hand hand = expect_path(&settings, &one, 4e-6);
    assert_true(hand.gradients_done == 22);
}

// Two commits as under zero1; then the overlapped scheme starts where they ended, with
// the next data.
static void a_sequential_start_is_zero1(void **state) {
    (void)state;
    static const char *const rules[] = {"dpu", "acco-wp", "acco"};
    const Path longer = {{5.375, 5.5625, 7.15625, REST},
                         {8, 8, 5.375, 5.375, 5.5625, 5.5625, REST},
                         NAN}; // the third one, too
    const Path shorter = {{5.375, 5.5625, REST}, {8, 8, 5.375, 5.375, REST}, 5.5625};
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
    } rows[] = {
        {0.5, 0, 1, {{8, 4.25, 0.875, 2.75, REST}, {8, 4, 8, 5, 4.25, REST}, 2.75}},
        {0.5, 1, 1, {{8, 7, 6, 5.8125, REST}, {8, 4, 8, 5, 7, REST}, 5.8125}},
        {0, 0, 1, {{8, 4.25, 2.75, 6.3125, REST}, {8, 4, 8, 5, 4.25, REST}, 6.3125}},
        {0.5, 0, 2, {{8, 6.125, 4.4375, 4.671875, REST}, {8, 4, 8, 5, 6.125, REST}, 4.671875}},
    };
    for (int i = 0; i < 8; i++) {
        ReplaySettings settings = outer_settings("co2", 2, 6);
        settings.co2_beta = rows[i / 2].beta;
        settings.co2_phi = rows[i / 2].phi;
        settings.co2_gap = rows[i / 2].gap;
        settings.plain_outer = i % 2 == 1;
        Hand hand = expect_path(&settings, &rows[i / 2].path, 0);
        assert_int_equal(hand.update_count, 4);
    }
}

static void diloco_follows_the_worked_example(void **state) {
    (void)state;
    const Path path = {{5.1875, 5.17578125, 7.168701171875, REST}, {8, 4, 5.1875, REST}, 7.168701171875};
    for (int i = 0; i < 4; i++) {
        ReplaySettings settings = outer_settings(i / 2 == 0 ? "diloco" : "streaming-diloco", 2, 6);
        settings.plain_outer = i % 2 == 1;
        Hand hand = expect_path(&settings, &path, 0); // one fragment, no delay and alpha 0: the same rule
        assert_int_equal(hand.update_count, 3);
    }
}

static void diloco_of_single_steps_is_ddp(void **state) {
    (void)state;
    ReplaySettings settings = outer_settings("diloco", 1, 6), ddp = scalar_settings("ddp", true, 1, 12);
    settings.outer_rate = 1;
    settings.mu = 0;
    Path path = {{REST}, {REST}, NAN};
    Hand one = expect_path(&settings, &path, 0), other = expect_path(&ddp, &path, 0);
    assert_int_equal(one.update_count, 6);
    assert_memory_equal(one.updates, other.updates, sizeof one.updates);
}

// A round that is cut short by the end still ends with an outer step.
static void local_rules_end_with_what_they_have_learned(void **state) {
    (void)state;
    ReplaySettings settings = outer_settings("diloco", 2, 5);
    // The third round has one step: locals 5.17578125 -> 4.587890625 and 8.587890625, D
    // 0.58789.. and -3.41210.., mean -1.412109375, momentum 0.5 * 1.265625 - 1.412109375
    // = -0.779296875, theta 5.17578125 - 0.5 * (-1.412109375 - 0.3896484375)
    const Path diloco = {{5.1875, 5.17578125, 6.07666015625, REST}, {REST}, 6.07666015625};
    expect_path(&settings, &diloco, 0);
    settings = outer_settings("co2", 2, 5);
    // The third round starts at 4.25 with X 4 and 12: locals 4.125 and 8.125; mean D
    // -1.875; momentum 0.5 * 3.375 - 1.875 = -0.1875
    const Path co2 = {{8, 4.25, 0.875, 1.0625, REST}, {REST}, 1.0625};
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
    // After step 9 both fragments are exchanged once more, and become what the outer ones
    // become.
    // 0: locals 7.15478515625 and 17.64599609375, mean D -6.181640625, momentum 0.5 *
    // 0.375 - 6.181640625, outer 6.21875 - 0.5 * ... 1: locals 3.78912353515625 and
    // 8.01519775390625, mean D -1.86041259765625, momentum 0.5 * 1.8193359375 -
    // 1.86041259765625
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

// ---------------------------------------------------------------------------------------
// The outer kernels

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

// Arrays of one kernel and of the plain loop beside it.
typedef struct OuterArrays {
    float outer[OUTER_ELEMENTS], momentum[OUTER_ELEMENTS], local[OUTER_ELEMENTS], exchange[OUTER_ELEMENTS];
} OuterArrays;

static void outer_kernels_equal_the_formulas_but_for_rounding(void **state) {
    (void)state;
    static OuterArrays kernel, plain;
    for (int i = 0; i < 8; i++) {
        fill_noise(kernel.outer, 1, 1);
        fill_noise(kernel.momentum, 2, 0.5);
        fill_noise(kernel.local, 3, 1);
        fill_noise(kernel.exchange, 4, 3);
        plain = kernel;
        if (i < 3) {
            NesterovStep step = {1.0f / 3, 0.7f, 0.9f, 0.5f * (float)i};
            cpu_outer_nesterov(kernel.outer, kernel.momentum, kernel.local, kernel.exchange, OUTER_ELEMENTS,
                               &step);
            replay_plain_nesterov(plain.outer, plain.momentum, plain.local, plain.exchange, OUTER_ELEMENTS,
                                  &step);
        } else if (i < 7) {
            MomentumStep step = {1.0f / 3, 0.4f, 0.8f, i % 2 == 0 ? 0.3f : 0.0f, 1.5f, i >= 5};
            cpu_outer_momentum(kernel.outer, kernel.momentum, kernel.local, kernel.exchange, OUTER_ELEMENTS,
                               &step);
            replay_plain_co2(plain.outer, plain.momentum, plain.local, plain.exchange, OUTER_ELEMENTS, &step);
        } else {
            cpu_outer_pseudo_gradient(kernel.exchange, kernel.outer, kernel.local, OUTER_ELEMENTS);
            for (int j = 0; j < OUTER_ELEMENTS; j++) { plain.exchange[j] = plain.outer[j] - plain.local[j]; }
        }
        expect_near(kernel.outer, plain.outer, "outer");
        expect_near(kernel.momentum, plain.momentum, "momentum");
        expect_near(kernel.local, plain.local, "local");
        expect_near(kernel.exchange, plain.exchange, "exchange");
    }
}

// ---------------------------------------------------------------------------------------
// A run of the program, done again

// A rank has 14 and a bit micro-batches, or 8 and a bit where there are many ranks.
enum { MODEL_POSITIONS = 32, TOKENS_OF_FEW = 450, TOKENS_OF_MANY = 260, MANY_RANKS = 32, AGAIN_COMMITS = 64 };

// What the options of a run say, as its log has them.
typedef struct Asked {
    json_t *options; // borrowed
    int ranks;
} Asked;

// A number; `otherwise` where a word stands for it.
static double asked_number(const Asked *asked, const char *name, double otherwise) {
    json_t *value = json_object_get(asked->options, name);
    if (value == NULL) { fail_msg("--%s is not in the log", name); }
    return json_is_number(value) ? json_number_value(value) : otherwise;
}

static const char *asked_text(const Asked *asked, const char *name) {
    const char *text = json_string_value(json_object_get(asked->options, name));
    if (text == NULL) { fail_msg("--%s is not in the log as a word", name); }
    return text;
}

static bool asked_is(const Asked *asked, const char *name, const char *word) {
    return strcmp(asked_text(asked, name), word) == 0;
}

// The model and the data that all workers of the replay use in turns.
typedef struct Again {
    Asked asked;
    GptNeoConfig config;
    ParameterTable table;
    DataLoader data;
    Arena arena;
    GptNeo model;
    Stream stream;
    int B, T;
    int32_t *tokens, *targets; // (B, T)
    float *parameters;
    uint8_t *decays, *fragment_of; // (parameter_count)
    ReplayUpdate updates[AGAIN_COMMITS];
    int update_count;
} Again;

static double again_micro_batch(void *self, int worker, uint64_t index, const float *parameters,
                                float *gradients) {
    Again *again = (Again *)self;
    uint64_t first = (index * (uint64_t)again->asked.ranks + (uint64_t)worker) * (uint64_t)again->B;
    double perfect;
    Error error = {""};
    assert_true(
        data_loader_fill(&again->data, first, again->B, again->tokens, again->targets, &perfect, &error));
    return gpt_neo_loss_and_gradients(&again->model, &again->stream, parameters, gradients, again->tokens,
                                      again->targets, NULL);
}

static void again_updated(void *self, const ReplayUpdate *update) {
    Again *again = (Again *)self;
    assert_true(again->update_count < AGAIN_COMMITS);
    again->updates[again->update_count++] = *update;
}

static void again_open_model(Again *again) {
    const Asked *asked = &again->asked;
    Error error = {""};
    assert_true(gpt_neo_config_find(asked_text(asked, "model"), &again->config, &error));
    gpt_neo_parameter_table(&again->config, &again->table);
    again->B = (int)asked_number(asked, "micro-batch", 0);
    again->T = (int)asked_number(asked, "seq-len", 0);
    DataRequest request = {asked_text(asked, "data"), again->T, again->config.vocabulary,
                           (uint64_t)asked_number(asked, "seed", 0), true};
    assert_true(data_loader_open(&again->data, &request, &error));
    size_t bytes = (size_t)(again->B * again->T) * sizeof(int32_t), count = again->table.parameter_count;
    again->stream.pool = thread_pool_create(1, false);
    GptNeoSettings settings = gpt_neo_on_cpu(again->B, again->T, 1);
    gpt_neo_reserve(&again->model, &again->arena, &again->config, &settings);
    arena_reserve(&again->arena, MEMORY_WORKSPACE, "tokens", bytes, &again->tokens);
    arena_reserve(&again->arena, MEMORY_WORKSPACE, "targets", bytes, &again->targets);
    arena_reserve(&again->arena, MEMORY_PARAMETERS, "parameters", count * sizeof(float), &again->parameters);
    arena_reserve(&again->arena, MEMORY_WORKSPACE, "decays", count, &again->decays);
    arena_reserve(&again->arena, MEMORY_WORKSPACE, "fragments", count, &again->fragment_of);
    assert_true(arena_commit(&again->arena, &error));
    gpt_neo_initialize(&again->table, (uint64_t)asked_number(asked, "seed", 0), again->stream.pool,
                       again->parameters);
}

static void again_close(Again *again) {
    data_loader_close(&again->data);
    parameter_table_free(&again->table);
    thread_pool_destroy(again->stream.pool);
    arena_release(&again->arena);
}

// The layer of a tensor; -1: of none.
static int layer_of(const char *name) {
    const char *part = strstr(name, ".h.");
    return part != NULL ? atoi(part + 3) : strncmp(name, "h.", 2) == 0 ? atoi(name + 2) : -1;
}

static void again_label(Again *again, ReplaySettings *settings) {
    bool all = asked_is(&again->asked, "decay", "all");
    for (int i = 0; i < again->table.count; i++) {
        const ParameterInfo *entry = &again->table.entries[i];
        memset(again->decays + entry->offset, all || entry->is_matrix ? 1 : 0, entry->count);
        int layer = layer_of(entry->name), fragment = 0;
        if (layer >= 0 && settings->fragments > 1) {
            bool strided = asked_is(&again->asked, "streaming-order", "strided");
            fragment =
                strided ? layer % settings->fragments : layer * settings->fragments / again->config.layers;
        }
        memset(again->fragment_of + entry->offset, fragment, entry->count);
    }
    settings->decays = again->decays;
    settings->fragment_of = again->fragment_of;
}

// --rank-accumulate is a list with a number for each rank, or empty.
static void ask_accumulate(const Asked *asked, ReplaySettings *settings) {
    const char *list = asked_text(asked, "rank-accumulate");
    for (int rank = 0; rank < asked->ranks; rank++) {
        settings->accumulate[rank] = list[0] != '\0' ? atoi(list) : (int)asked_number(asked, "accumulate", 0);
        list += strcspn(list, ",");
        list += *list == ',';
    }
}

static void ask_rate(const Asked *asked, ReplaySettings *settings, double tokens_per_micro_batch) {
    LearningRate *rate = &settings->rate;
    double per_commit = 0;
    for (int rank = 0; rank < asked->ranks; rank++) { per_commit += settings->accumulate[rank]; }
    settings->target = ceil(asked_number(asked, "tokens", 0) / tokens_per_micro_batch);
    settings->rate_by_commits = asked_is(asked, "lr-by", "commits");
    rate->kind = asked_is(asked, "schedule", "cosine")   ? SCHEDULE_COSINE
                 : asked_is(asked, "schedule", "linear") ? SCHEDULE_LINEAR
                                                         : SCHEDULE_CONSTANT;
    rate->peak = asked_number(asked, "lr", NAN);
    rate->minimum = asked_number(asked, "min-lr", NAN);
    rate->step = settings->rate_by_commits ? 1 : per_commit;
    rate->warmup = asked_number(asked, "warmup", NAN) * rate->step;
    rate->total = asked_number(asked, "tokens", 0) / tokens_per_micro_batch /
                  (settings->rate_by_commits ? per_commit : 1);
}

static void ask_local(const Asked *asked, ReplaySettings *settings) {
    if (strcmp(settings->rule, "co2") == 0) {
        settings->period = (int)asked_number(asked, "co2-tau", 0);
        settings->co2_beta = asked_number(asked, "co2-beta", 0);
        settings->co2_alpha = asked_number(asked, "co2-alpha", 0);
        settings->co2_phi = asked_number(asked, "co2-phi", 0);
        settings->co2_gap = atof(strchr(asked_text(asked, "co2-gap"), ':') + 1);
        return;
    }
    settings->period = (int)asked_number(asked, "diloco-H", 0);
    settings->outer_rate = asked_number(asked, "diloco-outer-lr", 0);
    settings->mu = asked_number(asked, "diloco-mu", 0);
    if (strcmp(settings->rule, "streaming-diloco") != 0) { return; }
    settings->fragments = (int)asked_number(asked, "streaming-P", 0);
    settings->delay = (int)asked_number(asked, "streaming-tau", 0);
    settings->alpha = asked_number(asked, "streaming-alpha", 0);
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

static ReplaySettings ask(const Asked *asked, double tokens_per_micro_batch) {
    ReplaySettings settings;
    memset(&settings, 0, sizeof settings);
    settings.rule = asked_text(asked, "optimizer");
    settings.workers = asked->ranks;
    ask_accumulate(asked, &settings);
    for (int rank = 0; rank < asked->ranks; rank++) {
        settings.first_half[rank] = (int)asked_number(asked, "acco-init", 0);
    }
    settings.sequential = (int)asked_number(asked, "sequential", 0);
    settings.clip = asked_number(asked, "grad-clip", 0);
    assert_true(wire_find(asked_text(asked, "wire"), &settings.wire));
    settings.estimate_wire = settings.wire;
    assert_true(wire_find(asked_text(asked, "estimate-wire"), &settings.estimate_wire) ||
                asked_is(asked, "estimate-wire", "same"));
    settings.beta1 = asked_number(asked, "beta1", NAN);
    settings.beta2 = asked_number(asked, "beta2", NAN);
    settings.epsilon = asked_number(asked, "eps", NAN);
    settings.weight_decay = asked_number(asked, "weight-decay", NAN);
    ask_rate(asked, &settings, tokens_per_micro_batch);
    if (replay_rule_find(settings.rule)->local) { ask_local(asked, &settings); }
    return settings;
}

// As the program does it: every rank adds up its share, then the sums are added in the
// order of ranks.
static double again_validate(Again *again) {
    int batches = (int)asked_number(&again->asked, "val-batches", 0);
    double sum = 0, perfect;
    for (int rank = 0; rank < again->asked.ranks; rank++) {
        double mine = 0;
        for (int batch = rank; batch < batches; batch += again->asked.ranks) {
            Error error = {""};
            uint64_t first = (uint64_t)(batch * again->B);
            assert_true(data_loader_fill_validation(&again->data, first, again->B, again->tokens,
                                                    again->targets, &perfect, &error));
            mine +=
                gpt_neo_loss(&again->model, &again->stream, again->parameters, again->tokens, again->targets);
        }
        sum += mine;
    }
    return sum / batches;
}

// The same number, as far as the log writes it down.
static void expect_logged(json_t *event, const char *field, double expected, const char *what) {
    char text[600], number[64];
    snprintf(text, sizeof text, "%.500s: %s", what, field);
    snprintf(number, sizeof number, "%.*g", LOG_JSON_DIGITS, expected);
    assert_close(log_number(event, field), strtod(number, NULL), 0, text);
}

// At every commit of a rule whose workers step together.
static void expect_commits(json_t *events, const Again *again, const char *what) {
    int count = 0;
    for (json_t *event; (event = log_event_of(events, "report", count)) != NULL; count++) {
        const ReplayUpdate *update = &again->updates[count];
        char text[512];
        assert_true(count < again->update_count);
        snprintf(text, sizeof text, "%.400s, commit %d", what, count + 1);
        expect_logged(event, "lr", update->learning_rate, text);
        expect_logged(event, "grad_norm", update->gradient_norm, text);
        expect_logged(event, "grads", update->gradients_done, text);
    }
    assert_int_equal(count, again->update_count);
}

typedef struct Case {
    int ranks;
    const char *options;
} Case;

static void expect_same_bits(Stage *stage, const Case *c) {
    static Again again;
    char options[STAGE_COMMAND_SIZE / 2];
    int tokens = c->ranks < MANY_RANKS ? TOKENS_OF_FEW : TOKENS_OF_MANY;
    snprintf(options, sizeof options, "%s --tokens %d", c->options, tokens * c->ranks);
    Training training = training_start(stage, c->ranks, options);
    json_t *events = training_finish(stage, &training), *end = log_event_of(events, "end", -1);
    memset(&again, 0, sizeof again);
    again.asked.options = json_object_get(log_event_of(events, "start", 0), "options");
    again.asked.ranks = c->ranks;
    again_open_model(&again);
    ReplaySettings settings = ask(&again.asked, again.B * again.T);
    again_label(&again, &settings);
    ReplayProblem problem = {&again, again.table.parameter_count, again_micro_batch, again_updated};
    double gradients = replay_run(&settings, &problem, again.parameters);
    if (!replay_rule_find(settings.rule)->local) { expect_commits(events, &again, training.what); }
    expect_logged(end, "tokens", gradients * again.B * again.T, training.what);
    char text[32];
    uint64_t hash = hash_bytes(again.parameters, again.table.parameter_count * sizeof(float));
    snprintf(text, sizeof text, "%016llx", (unsigned long long)hash);
    Fingerprint print = log_fingerprint(events);
    if (strcmp(print.text, text) != 0) {
        fail_msg("%s: the parameters are %s, the replay's %s", training.what, print.text, text);
    }
    expect_logged(log_event_of(events, "validation", -1), "loss", again_validate(&again), training.what);
    again_close(&again);
    json_decref(events);
}

// Sizes that do not fit: steps that do not divide, clips that bite, warm-ups that end,
// shards that are padded.
static const Case cases[] = {
    {2, "--optimizer ddp --accumulate 3 --grad-clip 0.9 --bucket-mb 0.05"},
    {3, "--optimizer ddp --wire bf16"},
    {MANY_RANKS, "--optimizer ddp --accumulate 1"},
    {3, "--optimizer ddp --wire int8"},
    {2, "--optimizer zero1 --decay all --lr-by commits --schedule linear"},
    {3, "--optimizer zero1 --accumulate 4 --grad-clip 0.9 --wire bf16"},
    {3, "--optimizer zero1 --rank-accumulate 3,1,2 --bucket-mb 0.02 --micro-batch 2 --seq-len 20"},
    {2, "--optimizer zero1 --wire int8 --bucket-mb 0.02"},
    {MANY_RANKS, "--optimizer zero1 --accumulate 1 --grad-clip 0.5"},
    {2, "--optimizer dpu --sequential 2"},
    {3, "--optimizer dpu --accumulate 4 --grad-clip 0.9 --wire bf16"},
    {3, "--optimizer dpu --wire e3m0 --sequential 1"},
    {MANY_RANKS, "--optimizer dpu --accumulate 1"},
    {2, "--optimizer acco-wp --accumulate 3 --grad-clip 0.9 --lr-by commits"},
    {3, "--optimizer acco-wp --sequential 2 --wire bf16"},
    {2, "--optimizer acco-wp --wire int8 --sequential 1"},
    {MANY_RANKS, "--optimizer acco-wp --accumulate 1"},
    {2, "--optimizer acco --accumulate 4 --acco-init 1 --grad-clip 0.9"},
    {3, "--optimizer acco --sequential 2 --wire bf16"},
    {3, "--optimizer acco --rank-accumulate 4,2,6 --lr-by commits"},
    {2, "--optimizer acco --wire bf16 --estimate-wire fp32"},
    {3, "--optimizer acco --estimate-wire e3m0 --grad-clip 0.9"},
    {3, "--optimizer acco --wire int8 --acco-init 1 --accumulate 4"},
    {MANY_RANKS, "--optimizer acco"},
    {2, "--optimizer co2 --co2-tau 3 --co2-beta 0.5 --co2-phi 0.001 --co2-gap const:1.5"},
    {3,
     "--optimizer co2 --co2-tau 2 --co2-alpha 0.8 --co2-beta 0.2 --accumulate 3 --grad-clip 0.9 --wire bf16"},
    {2, "--optimizer co2 --co2-tau 2 --wire e3m0"},
    {MANY_RANKS, "--optimizer co2 --co2-tau 2 --accumulate 1 --co2-beta 0.3"},
    {2, "--optimizer diloco --diloco-H 3 --grad-clip 0.9"},
    {3, "--optimizer diloco --diloco-H 4 --accumulate 3 --diloco-outer-lr 0.5 --diloco-mu 0.6 --lr-by "
        "commits --wire bf16"},
    {2, "--optimizer diloco --diloco-H 3 --wire int8"},
    {MANY_RANKS, "--optimizer diloco --diloco-H 3 --accumulate 1"},
    {2, "--optimizer streaming-diloco --diloco-H 4 --streaming-P 2 --streaming-tau 0 --streaming-alpha 0"},
    {3, "--optimizer streaming-diloco --diloco-H 4 --streaming-P 2 --streaming-tau 1 --streaming-alpha 0.5 "
        "--grad-clip 0.9"},
    {2, "--optimizer streaming-diloco --diloco-H 6 --streaming-P 2 --streaming-tau 1 --streaming-alpha 0 "
        "--streaming-order sequential"},
    {2, "--optimizer streaming-diloco --diloco-H 6 --streaming-P 3 --streaming-tau 0 --streaming-alpha 0.5 "
        "--wire bf16"},
    {3, "--optimizer streaming-diloco --diloco-H 4 --streaming-P 1 --streaming-tau 2 --streaming-alpha 0.5 "
        "--accumulate 1"},
    {3, "--optimizer streaming-diloco --diloco-H 4 --streaming-P 2 --streaming-tau 1 --streaming-order "
        "sequential --wire e3m0"},
    {MANY_RANKS,
     "--optimizer streaming-diloco --diloco-H 4 --streaming-P 2 --streaming-tau 1 --accumulate 1"},
};

enum { CASES = sizeof cases / sizeof cases[0] };

typedef struct Scene {
    Stage *stage;
    const Case *one;
} Scene;

static void the_program_does_what_the_replay_does(void **state) {
    const Scene *scene = (const Scene *)*state;
    if (!scene->stage->has_mpi) {
        print_message("no MPI here: left out\n");
        skip();
    }
    expect_same_bits(scene->stage, scene->one);
}

static int end_programs(void **state) {
    stage_end_all(((const Scene *)*state)->stage);
    return 0;
}

// Three layers, so that two fragments differ and one order from the other.
static void write_stage(const Stage *stage) {
    char path[STAGE_PATH_SIZE], base[2 * STAGE_PATH_SIZE];
    json_t *model = json_pack("{s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:[[[s, s, s], i]]}", "model_type",
                              "gpt_neo", "num_layers", 3, "hidden_size", 32, "num_heads", 2, "window_size", 8,
                              "max_position_embeddings", MODEL_POSITIONS, "vocab_size", 256,
                              "attention_types", "global", "local", "global", 1);
    char *text = json_dumps(model, JSON_INDENT(2));
    stage_write(stage, "model.json", text);
    free(text);
    json_decref(model);
    snprintf(base, sizeof base,
             "model = %s\nmicro-batch = 1\naccumulate = 2\nlr = 0.003\nmin-lr = 0.0005\nwarmup = "
             "2\nreport-every = 1\n"
             "val-every = end\nval-batches = 5\nsample-tokens = none\nthreads = 1\ntimeout-s = 100\n",
             stage_path(stage, "model.json", path));
    stage_write(stage, "base.txt", base);
}

int main(void) {
    static Stage stage;
    static Scene scenes[CASES];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ddp_and_zero1_follow_the_worked_example),
        cmocka_unit_test(dpu_follows_the_worked_example),
        cmocka_unit_test(acco_wp_follows_the_worked_example),
        cmocka_unit_test(acco_follows_the_worked_example),
        cmocka_unit_test(acco_with_unequal_workers_follows_the_worked_example),
        cmocka_unit_test(a_sequential_start_is_zero1),
        cmocka_unit_test(co2_follows_the_worked_example),
        cmocka_unit_test(diloco_follows_the_worked_example),
        cmocka_unit_test(diloco_of_single_steps_is_ddp),
        cmocka_unit_test(local_rules_end_with_what_they_have_learned),
        cmocka_unit_test(streaming_with_two_workers_follows_the_worked_example),
        cmocka_unit_test(streaming_follows_the_sequences_of_torchft),
        cmocka_unit_test(outer_kernels_equal_the_formulas_but_for_rounding),
    };
    enum { NAMED = sizeof tests / sizeof tests[0] };
    static struct CMUnitTest all[NAMED + CASES];
    static char names[CASES][200];
    memcpy(all, tests, sizeof tests);
    for (int i = 0; i < CASES; i++) {
        scenes[i].stage = &stage;
        scenes[i].one = &cases[i];
        snprintf(names[i], sizeof names[i], "%d ranks do what the replay does: %s", cases[i].ranks,
                 cases[i].options);
        struct CMUnitTest test = {names[i], the_program_does_what_the_replay_does, NULL, end_programs,
                                  &scenes[i]};
        all[NAMED + i] = test;
    }
    stage_open(&stage);
    write_stage(&stage);
    int failed = _cmocka_run_group_tests("replay", all, NAMED + CASES, NULL, NULL);
    stage_close(&stage);
    return failed;
}
