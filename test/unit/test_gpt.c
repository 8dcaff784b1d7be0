// test_gpt.c: the model against Hugging Face's values, against finite differences,
// and against itself (threads, repeated calls, accumulation).
//
// Reference files are in test/reference; dev/reference makes them and describes their
// format. ACCO_REFERENCE names another directory.
#include "test/harness.h"

#include "program/training_problem.h"
#include "rules.h"
#include "test/model_loss.h"
#include "test/reference.h"
#include "test/threads_link.h"

// ---- A model with its memory ----------------------------------------------------------

typedef struct Fixture {
    ModelConfig config;
    ParameterTable table; // of what is trained
    TrainedPart part;     // with adapters
    Arena arena;
    Model model;
    Stream stream; // only its pool is used
    float *parameters, *gradients;
    int32_t *tokens, *targets;
} Fixture;

// With part.rank > 0 the model has adapters; else the fixture is empty.
static void fixture_fill(Fixture *fixture, const ModelConfig *config, ModelSettings settings) {
    Error error;
    int B = settings.B, T = settings.T;
    fixture->config = *config;
    if (fixture->part.rank > 0) {
        fixture->table = fixture->part.table;
        settings.part = &fixture->part;
    } else {
        parameter_table_make(config, &fixture->table);
    }
    size_t bytes = fixture->table.parameter_count * sizeof(float);
    arena_reserve(&fixture->arena, MEMORY_PARAMETERS, "parameters", bytes, &fixture->parameters);
    arena_reserve(&fixture->arena, MEMORY_GRADIENTS, "gradients", bytes, &fixture->gradients);
    model_reserve(&fixture->model, &fixture->arena, config, &settings);
    assert_true(arena_commit(&fixture->arena, &error));
    fixture->stream.pool = thread_pool_create(settings.threads, true);
    fixture->tokens = (int32_t *)malloc((size_t)(B * T) * sizeof(int32_t));
    fixture->targets = (int32_t *)malloc((size_t)(B * T) * sizeof(int32_t));
    Random random;
    random.state = 7;
    for (int i = 0; i < B * T; i++) {
        fixture->tokens[i] = (int32_t)(random_uniform(&random) * config->vocabulary);
        fixture->targets[i] =
            random_uniform(&random) < 0.2 ? -1 : (int32_t)(random_uniform(&random) * config->vocabulary);
    }
    for (size_t i = 0; i < fixture->table.parameter_count; i++) {
        fixture->parameters[i] = (float)(0.3 * random_normal(&random));
    }
}

static void fixture_open_settings(Fixture *fixture, const ModelConfig *config,
                                  const ModelSettings *settings) {
    memset(fixture, 0, sizeof *fixture);
    fixture_fill(fixture, config, *settings);
}

static void fixture_open_recompute(Fixture *fixture, const ModelConfig *config, int B, int T, int threads,
                                   Recompute recompute) {
    ModelSettings settings = model_on_cpu(B, T, threads);
    settings.recompute = recompute;
    fixture_open_settings(fixture, config, &settings);
}

static void fixture_open(Fixture *fixture, const ModelConfig *config, int B, int T, int threads) {
    fixture_open_recompute(fixture, config, B, T, threads, RECOMPUTE_NONE);
}

static void fixture_close(Fixture *fixture) {
    thread_pool_destroy(fixture->stream.pool);
    arena_release(&fixture->arena);
    if (fixture->part.rank > 0) {
        trained_part_free(&fixture->part);
    } else {
        parameter_table_free(&fixture->table);
    }
    free(fixture->tokens);
    free(fixture->targets);
}

static float fixture_gradients(Fixture *fixture) {
    return model_loss_and_gradients(&fixture->model, &fixture->stream, fixture->parameters,
                                    fixture->gradients, fixture->tokens, fixture->targets, NULL);
}

// Of the mean over the predicted tokens: a micro-batch has the gradient of their sum, divided by
// all of its tokens.
static float fixture_mean_gradients(Fixture *fixture) {
    size_t rows = model_rows(&fixture->model);
    int predicted = targets_predicted(fixture->targets, rows);
    float loss = fixture_gradients(fixture), whole = (float)rows / (float)(predicted > 0 ? predicted : 1);
    for (size_t i = 0; i < fixture->table.parameter_count; i++) { fixture->gradients[i] *= whole; }
    return loss;
}

static ModelConfig small_config(int layers, int channels, int heads, int inner, int window, int positions,
                                int vocabulary) {
    ModelConfig config;
    memset(&config, 0, sizeof config);
    config.family = &gpt_neo_family;
    config.layers = layers;
    config.channels = channels;
    config.heads = heads;
    config.mlp_channels = inner;
    config.window = window;
    config.positions = positions;
    config.vocabulary = vocabulary;
    config.epsilon = 1e-5;
    for (int l = 0; l < layers; l++) { config.local[l] = l % 2 == 1; }
    return config;
}

// The same model as a GPT-2: without local layers, with what GPT-Neo does not have.
static ModelConfig as_gpt2(ModelConfig config) {
    config.family = &gpt2_family;
    config.scaled_scores = true;
    memset(config.local, 0, sizeof config.local);
    return config;
}

static void assert_arrays_close(const char *what, const float *got, const float *expected, size_t count,
                                double tolerance) {
    double worst = 0.0;
    for (size_t i = 0; i < count; i++) {
        double allowed = tolerance * fmax(1.0, fabs((double)expected[i])),
               difference = fabs((double)got[i] - (double)expected[i]);
        if (!(difference <= allowed)) {
            fail_msg("%s[%zu]: %.9g, expected %.9g", what, i, (double)got[i], (double)expected[i]);
        }
        worst = fmax(worst, difference);
    }
    if (getenv("ACCO_TEST_VERBOSE") != NULL) { printf("%-60s %.2e\n", what, worst); }
}

// ---- Parity with Hugging Face ---------------------------------------------------------

static ModelConfig reference_config(const Tensors *tensors) {
    const char *layers = tensors_text(tensors, "layers");
    ModelConfig config = small_config(
        (int)strlen(layers), (int)tensors_number(tensors, "channels"), (int)tensors_number(tensors, "heads"),
        (int)tensors_number(tensors, "inner"), (int)tensors_number(tensors, "window"),
        (int)tensors_number(tensors, "positions"), (int)tensors_number(tensors, "vocabulary"));
    for (int l = 0; l < config.layers; l++) { config.local[l] = layers[l] == 'l'; }
    config.epsilon = tensors_number(tensors, "layer_norm_epsilon");
    return config.window == 0 ? as_gpt2(config) : config;
}

// Where element i of a tensor as Hugging Face stores it is among ours.
static size_t as_stored(const ParameterInfo *entry, size_t i) {
    size_t rows = (size_t)entry->rows;
    return entry->is_transposed ? i % rows * (size_t)entry->columns + i / rows : i;
}

// The weights of the reference are computed from their names
// (dev/reference/make_reference.py).
static void reference_weights(const Tensors *tensors, const ParameterInfo *entry, float *weights) {
    size_t length = strlen(entry->name);
    bool bias = strcmp(entry->name + length - 5, ".bias") == 0,
         layernorm = strstr(entry->name, ".ln_") != NULL;
    bool embedding = strstr(entry->name, ".wte.") != NULL || strstr(entry->name, ".wpe.") != NULL;
    const char *key = bias        ? "scale_biases"
                      : layernorm ? "scale_layernorm"
                      : embedding ? "scale_embeddings"
                                  : "scale_matrices";
    float constant = layernorm && !bias ? 1.0f : 0.0f, scale = (float)tensors_number(tensors, key);
    float *stored = (float *)malloc(entry->count * sizeof(float));
    reference_stream(entry->name, (uint64_t)tensors_number(tensors, "seed"), scale, entry->count, stored);
    for (size_t i = 0; i < entry->count; i++) { weights[as_stored(entry, i)] = stored[i] + constant; }
    free(stored);
}

// wte: (V, C)
static void check_logits(Fixture *fixture, const Tensors *tensors, const Real *wte) {
    int rows = (int)model_rows(&fixture->model), V = fixture->config.vocabulary;
    float *logits = (float *)malloc((size_t)rows * (size_t)V * sizeof(float));
    matmul_forward(&fixture->stream, as_reals(logits), V, head_input(&fixture->model), wte, rows,
                   fixture->config.channels, V);
    assert_arrays_close("logits", logits, (const float *)tensors_get(tensors, "logits"),
                        (size_t)rows * (size_t)V, 1e-5);
    free(logits);
}

static void check_tensors(Fixture *fixture, const Tensors *tensors, const char *prefix, const float *values) {
    for (int i = 0; i < fixture->table.count; i++) {
        const ParameterInfo *entry = &fixture->table.entries[i];
        char name[128];
        snprintf(name, sizeof name, "%s.%s", prefix, entry->name);
        const float *expected = (const float *)tensors_get(tensors, name);
        float *stored = (float *)malloc(entry->count * sizeof(float));
        for (size_t j = 0; j < entry->count; j++) { stored[j] = values[entry->offset + as_stored(entry, j)]; }
        assert_arrays_close(name, stored, expected, entry->count, 1e-5);
        free(stored);
    }
}

static void fixture_open_reference(Fixture *fixture, const Tensors *tensors, int threads) {
    ModelConfig config = reference_config(tensors);
    int B = (int)tensors_number(tensors, "batch_size"), T = (int)tensors_number(tensors, "sequence_length");
    fixture_open(fixture, &config, B, T, threads);
    memcpy(fixture->tokens, tensors_get(tensors, "tokens"), (size_t)(B * T) * sizeof(int32_t));
    memcpy(fixture->targets, tensors_get(tensors, "targets"), (size_t)(B * T) * sizeof(int32_t));
    for (int i = 0; i < fixture->table.count; i++) {
        reference_weights(tensors, &fixture->table.entries[i],
                          fixture->parameters + fixture->table.entries[i].offset);
    }
}

static void check_first_pass(Fixture *fixture, const Tensors *tensors) {
    float expected = (float)*(const double *)tensors_get(tensors, "losses");
    float forward =
        model_loss(&fixture->model, &fixture->stream, fixture->parameters, fixture->tokens, fixture->targets);
    float loss = fixture_mean_gradients(fixture);
    assert_true(forward == loss);
    assert_arrays_close("loss", &loss, &expected, 1, 1e-5);
    check_logits(fixture, tensors, as_reals(fixture->parameters));
    check_tensors(fixture, tensors, "grad", fixture->gradients);
}

// ---- Training with the real scheduler, every rank on the same batch -------------------

enum { MAX_STEPS = 16, MAX_TENSORS = 256 };

typedef struct ReferenceRank {
    Fixture fixture;
    SchedulerSettings settings;
    OptimizerTensor tensors[MAX_TENSORS];
    int steps;
    double losses[MAX_STEPS];
    float *parameters; // (parameter_count), after the last step
    bool forward_agrees;
} ReferenceRank;

// Gradients first, because that pass waits for parameters as they arrive; afterwards all
// have arrived.
static MicroBatchResult reference_micro_batch(void *self, Stream *stream, uint64_t index, const void *weights,
                                              float *gradients, const Pace *pace) {
    const float *parameters = (const float *)weights;
    (void)index;
    ReferenceRank *rank = (ReferenceRank *)self;
    Fixture *fixture = &rank->fixture;
    float loss = model_loss_and_gradients(&fixture->model, stream, parameters, gradients, fixture->tokens,
                                          fixture->targets, pace);
    float forward = model_loss(&fixture->model, stream, parameters, fixture->tokens, fixture->targets);
    rank->forward_agrees = rank->forward_agrees && forward == loss;
    double predicted = targets_predicted(fixture->targets, model_rows(&fixture->model));
    MicroBatchResult result = {(double)loss, (double)NAN, predicted};
    return result;
}

static SchedulerSettings reference_settings(const Tensors *tensors, const OptimizerTensor *ranges,
                                            int count) {
    SchedulerSettings settings;
    memset(&settings, 0, sizeof settings);
    settings.kind = RULE_SYNCHRONOUS;
    settings.overlap = true;
    settings.micro_batches = 1;
    settings.bucket_bytes = 20000; // bytes: several buckets, so that both passes really wait
    settings.rate.kind = SCHEDULE_CONSTANT;
    settings.rate.peak = tensors_number(tensors, "learning_rate");
    settings.rate.step = 1;
    settings.optimizer.beta1 = tensors_number(tensors, "beta1");
    settings.optimizer.beta2 = tensors_number(tensors, "beta2");
    settings.optimizer.epsilon = tensors_number(tensors, "epsilon");
    settings.optimizer.weight_decay = tensors_number(tensors, "weight_decay");
    settings.optimizer.tensors = ranges;
    settings.optimizer.tensor_count = count;
    settings.optimizer.muon_momentum = 0.95;
    settings.optimizer.muon_iterations = 5;
    return settings;
}

// No assertions of cmocka here: with two ranks this is not the main thread.
static void train_rank(ReferenceRank *rank, Transport *transport) {
    size_t count = rank->fixture.table.parameter_count;
    Problem problem = {.self = rank,
                       .parameter_count = count,
                       .tokens = (double)model_rows(&rank->fixture.model),
                       .micro_batch = reference_micro_batch};
    Arena arena;
    memset(&arena, 0, sizeof arena);
    Scheduler s;
    Error error = {""};
    scheduler_reserve(&s, &arena, &rank->settings, &problem, transport);
    if (!arena_commit(&arena, &error)) { abort(); }
    memcpy(s.parameters.data, rank->fixture.parameters, count * sizeof(float));
    scheduler_start(&s, rank->fixture.stream.pool, false);
    for (int step = 0; step < rank->steps; step++) {
        zero1_commit(&s);
        rank->losses[step] = s.report.loss;
    }
    scheduler_settle(&s);
    rank->parameters = (float *)malloc(count * sizeof(float));
    memcpy(rank->parameters, s.parameters.data, count * sizeof(float));
    scheduler_stop(&s);
    arena_release(&arena);
}

// context: ReferenceRank, one for each rank.
static void train_threads_rank(Transport *transport, void *context) {
    train_rank((ReferenceRank *)context + transport->rank, transport);
}

static void train_two_ranks(ReferenceRank *ranks) { threads_run(2, train_threads_rank, ranks); }

static void rank_open(ReferenceRank *rank, const Tensors *tensors, int threads, bool muon) {
    memset(rank, 0, sizeof *rank);
    fixture_open_reference(&rank->fixture, tensors, threads);
    assert_true(TRAINING_PARTS * rank->fixture.table.count <= MAX_TENSORS);
    int count = training_tensors(&rank->fixture.table, false, muon, rank->tensors);
    rank->settings = reference_settings(tensors, rank->tensors, count);
    rank->steps = (int)tensors_number(tensors, "steps");
    rank->forward_agrees = true;
    assert_true(rank->steps <= MAX_STEPS);
}

static void rank_close(ReferenceRank *rank) {
    free(rank->parameters);
    fixture_close(&rank->fixture);
}

static void check_training(ReferenceRank *rank, const Tensors *tensors) {
    const double *losses = (const double *)tensors_get(tensors, "losses");
    for (int step = 0; step < rank->steps; step++) {
        assert_close(rank->losses[step], losses[step], 1e-5 * fmax(1.0, losses[step]), "loss");
    }
    check_tensors(&rank->fixture, tensors, "after", rank->parameters);
    assert_true(rank->forward_agrees);
}

// The mean of two equal gradients is that gradient, so two ranks must end with the bits
// of one. trained: has the losses and the parameters at the end.
static void check_training_of(const Tensors *tensors, const Tensors *trained, int threads, bool muon) {
    ReferenceRank alone, two[2];
    rank_open(&alone, tensors, threads, muon);
    check_first_pass(&alone.fixture, tensors);
    Transport transport;
    transport_open_alone(&transport, "a test");
    train_rank(&alone, &transport);
    transport_close(&transport);
    check_training(&alone, trained);
    for (int i = 0; i < 2; i++) { rank_open(&two[i], tensors, 1, muon); }
    train_two_ranks(two);
    for (int i = 0; i < 2; i++) {
        check_training(&two[i], trained);
        // Whether ranks own whole matrices or all the same part, the norm is not added up in one
        // order; that moves no step here, because nothing is clipped.
        assert_memory_equal(two[i].parameters, alone.parameters,
                            alone.fixture.table.parameter_count * sizeof(float));
        assert_memory_equal(two[i].losses, alone.losses, sizeof alone.losses);
        rank_close(&two[i]);
    }
    rank_close(&alone);
}

static void check_reference(const char *name, int threads) {
    Tensors tensors = tensors_open(name);
    check_training_of(&tensors, &tensors, threads, false);
    tensors_close(&tensors);
}

static void muon_trains_as_in_torch(void **state) {
    (void)state;
    Tensors tensors = tensors_open("window_below_length"), trained = tensors_open("muon");
    for (int threads = 1; threads <= 3; threads += 2) {
        check_training_of(&tensors, &trained, threads, true);
    }
    tensors_close(&trained);
    tensors_close(&tensors);
}

// The logits of peft are those of the model with its adapters merged, ours of the model
// beside its adapters.
static void check_adapters(const char *model, const char *adapters) {
    Tensors tensors = tensors_open(model), trained = tensors_open(adapters);
    TrainedChoice choice = {.freeze = "",
                            .adapted = "*",
                            .rank = (int)tensors_number(&trained, "rank"),
                            .alpha = tensors_number(&trained, "alpha")};
    ModelConfig config = reference_config(&tensors);
    int B = (int)tensors_number(&tensors, "batch_size"), T = (int)tensors_number(&tensors, "sequence_length");
    static ReferenceRank rank;
    Error error = {""};
    memset(&rank, 0, sizeof rank);
    Fixture *fixture = &rank.fixture;
    TrainedPart *part = &fixture->part;
    assert_true(trained_part_make(part, &config, &choice, &error));
    fixture_fill(fixture, &config, model_on_cpu(B, T, 2));
    memcpy(fixture->tokens, tensors_get(&tensors, "tokens"), (size_t)(B * T) * sizeof(int32_t));
    memcpy(fixture->targets, tensors_get(&tensors, "targets"), (size_t)(B * T) * sizeof(int32_t));
    for (int i = 0; i < part->model.count; i++) {
        reference_weights(&tensors, &part->model.entries[i],
                          real_floats(part->frozen) + part->places[i].frozen);
    }
    for (int i = 0; i < part->table.count; i++) {
        const ParameterInfo *entry = &part->table.entries[i];
        reference_stream(entry->name, (uint64_t)tensors_number(&tensors, "seed"),
                         (float)tensors_number(&trained, "scale"), entry->count,
                         fixture->parameters + entry->offset);
    }
    int count = training_tensors(&part->table, false, false, rank.tensors);
    rank.settings = reference_settings(&tensors, rank.tensors, count);
    rank.settings.rate.peak = tensors_number(&trained, "learning_rate");
    rank.steps = (int)tensors_number(&tensors, "steps");
    rank.forward_agrees = true;
    Transport transport;
    transport_open_alone(&transport, "a test");
    train_rank(&rank, &transport);
    transport_close(&transport);
    check_training(&rank, &trained);
    model_loss(&fixture->model, &fixture->stream, rank.parameters, fixture->tokens, fixture->targets);
    check_logits(fixture, &trained, part->frozen);
    rank_close(&rank);
    tensors_close(&trained);
    tensors_close(&tensors);
}

static void adapters_train_as_in_peft(void **state) {
    (void)state;
    check_adapters("window_below_length", "lora");
    check_adapters("gpt2_three_heads", "lora_gpt2");
}

static void test_window_below_length(void **state) {
    (void)state;
    check_reference("window_below_length", 1);
}

static void test_window_above_length(void **state) {
    (void)state;
    check_reference("window_above_length", 2);
}

static void test_masked_targets(void **state) {
    (void)state;
    check_reference("masked_targets", 3);
}

static void gpt2_computes_what_transformers_computes(void **state) {
    (void)state;
    check_reference("gpt2_three_heads", 1);
    check_reference("gpt2_one_head", 2);
    check_reference("gpt2_masked_targets", 3);
    check_reference("gpt2_wide_head", 2);
}

// ---- Finite differences ---------------------------------------------------------------

// d(loss)/d(parameter) by central differences of a float loss, with several step sizes.
// Loose, but independent of any other program.
static void check_differences(const ModelConfig *config, int B, int T) {
    Fixture fixture;
    fixture_open(&fixture, config, B, T, 2);
    fixture_mean_gradients(&fixture);
    for (int i = 0; i < fixture.table.count; i++) {
        const ParameterInfo *entry = &fixture.table.entries[i];
        // In the direction of the tensor's own gradient the derivative of the loss is the
        // norm of the gradient.
        float *gradient = fixture.gradients + entry->offset, *parameters = fixture.parameters + entry->offset;
        double square = 0.0, difference = 0.0, step = 2e-3;
        for (size_t j = 0; j < entry->count; j++) { square += (double)gradient[j] * (double)gradient[j]; }
        double norm = sqrt(square);
        if (norm < 1e-3) { continue; }
        float *saved = (float *)malloc(entry->count * sizeof(float));
        memcpy(saved, parameters, entry->count * sizeof(float));
        // Fourth-order central difference.
        const double weights[4] = {-1.0 / 12, 8.0 / 12, -8.0 / 12, 1.0 / 12}, places[4] = {2, 1, -1, -2};
        for (int k = 0; k < 4; k++) {
            for (size_t j = 0; j < entry->count; j++) {
                parameters[j] = saved[j] + (float)(places[k] * step / norm * (double)gradient[j]);
            }
            float loss = model_loss(&fixture.model, &fixture.stream, fixture.parameters, fixture.tokens,
                                    fixture.targets);
            difference += weights[k] * (double)loss / step;
        }
        memcpy(parameters, saved, entry->count * sizeof(float));
        free(saved);
        if (!(fabs(difference - norm) <= 2e-3 * norm + 1e-3)) {
            fail_msg("%s: %.6g by differences, %.6g", entry->name, difference, norm);
        }
    }
    fixture_close(&fixture);
}

static void test_finite_differences(void **state) {
    (void)state;
    ModelConfig deep = small_config(3, 12, 3, 20, 4, 11, 17), one = small_config(1, 8, 1, 8, 2, 4, 3);
    ModelConfig gpt2 = as_gpt2(deep);
    check_differences(&deep, 2, 9);
    check_differences(&one, 1, 1);
    check_differences(&gpt2, 2, 9);
}

// ---- Against itself -------------------------------------------------------------------

static void fixture_copy_inputs(Fixture *to, const Fixture *from) {
    size_t bytes = model_rows(&from->model) * sizeof(int32_t);
    memcpy(to->tokens, from->tokens, bytes);
    memcpy(to->targets, from->targets, bytes);
    memcpy(to->parameters, from->parameters, from->table.parameter_count * sizeof(float));
}

static void check_same_bits(const ModelConfig *config, int B, int T) {
    Fixture one, three;
    fixture_open(&one, config, B, T, 1);
    fixture_open(&three, config, B, T, 3);
    fixture_copy_inputs(&three, &one);
    size_t bytes = one.table.parameter_count * sizeof(float);
    float loss = fixture_gradients(&one);
    for (int repetition = 0; repetition < 3; repetition++) {
        memset(three.gradients, 0, bytes);
        assert_true(fixture_gradients(&three) == loss);
        assert_memory_equal(three.gradients, one.gradients, bytes);
    }
    fixture_close(&one);
    fixture_close(&three);
}

static void test_threads_do_not_change_bits(void **state) {
    (void)state;
    ModelConfig odd = small_config(2, 48, 4, 100, 21, 150, 1001),
                wide = small_config(1, 768, 12, 3072, 64, 128, 5003);
    ModelConfig gpt2 = as_gpt2(odd);
    check_same_bits(&odd, 3, 131);
    check_same_bits(&gpt2, 3, 131);
    check_same_bits(&odd, 1, 1);
    check_same_bits(&wide, 4, 128);
}

static void test_gradients_accumulate(void **state) {
    (void)state;
    ModelConfig config = small_config(2, 32, 4, 50, 9, 40, 67);
    Fixture fixture;
    fixture_open(&fixture, &config, 2, 33, 2);
    size_t count = fixture.table.parameter_count;
    float *once = (float *)malloc(count * sizeof(float));
    fixture_gradients(&fixture);
    memcpy(once, fixture.gradients, count * sizeof(float));
    fixture_gradients(&fixture);
    for (size_t i = 0; i < count; i++) {
        if (!(fabsf(fixture.gradients[i] - 2.0f * once[i]) <= 1e-5f * fmaxf(1.0f, fabsf(once[i])))) {
            fail_msg("element %zu", i);
        }
    }
    // A micro-batch in which nothing is predicted adds nothing.
    memcpy(once, fixture.gradients, count * sizeof(float));
    for (size_t i = 0; i < model_rows(&fixture.model); i++) { fixture.targets[i] = -1; }
    fixture_gradients(&fixture);
    assert_memory_equal(fixture.gradients, once, count * sizeof(float));
    free(once);
    fixture_close(&fixture);
}

// Recomputed activations have the same bits as kept ones, also where layers have
// different windows.
static void check_recompute(const ModelConfig *config, int B, int T, int threads) {
    Fixture kept, again;
    fixture_open(&kept, config, B, T, threads);
    fixture_open_recompute(&again, config, B, T, threads, RECOMPUTE_BLOCK);
    fixture_copy_inputs(&again, &kept);
    size_t bytes = kept.table.parameter_count * sizeof(float);
    assert_true(again.arena.bytes < kept.arena.bytes);
    for (int repetition = 0; repetition < 2; repetition++) { // the second on what the first leaves behind
        assert_true(fixture_gradients(&again) == fixture_gradients(&kept));
        assert_memory_equal(again.gradients, kept.gradients, bytes);
    }
    fixture_close(&kept);
    fixture_close(&again);
}

static void test_recompute(void **state) {
    (void)state;
    ModelConfig deep = small_config(3, 40, 2, 70, 5, 40, 61), one = small_config(1, 24, 3, 50, 3, 20, 19);
    ModelConfig gpt2 = as_gpt2(deep);
    check_recompute(&deep, 2, 33, 2);
    check_recompute(&gpt2, 2, 33, 2);
    check_recompute(&one, 1, 7, 1);
}

// ---- Documents ------------------------------------------------------------------------

// Where documents begin in sample b, but for the first: at these, b later.
static const int document_begins[5] = {1, 2, 40, 64, 131};

// A fixture whose attention stays inside documents, which begin with the last token.
static void fixture_open_documents(Fixture *fixture, const ModelConfig *config, int B, int T, int threads,
                                   Recompute recompute, const uint32_t *separator) {
    ModelSettings settings = model_on_cpu(B, T, threads);
    settings.recompute = recompute;
    settings.separator = separator;
    fixture_open_settings(fixture, config, &settings);
    for (int i = 0; i < B * T; i++) {
        fixture->tokens[i] %= config->vocabulary - 1;
        for (int k = 0; k < 5; k++) {
            if (i % T == document_begins[k] + i / T) { fixture->tokens[i] = config->vocabulary - 1; }
        }
    }
}

// Tokens [begin, begin + length) of the fixture by themselves, at the same positions, in a
// model that knows no documents. Its losses must be those of the fixture; its gradients are
// added to `expected` by its share of the tokens.
static void check_document_alone(const Fixture *packed, int begin, int length, double *expected) {
    Fixture alone;
    const ModelConfig *config = &packed->config;
    size_t count = packed->table.parameter_count,
           wpe = packed->model.places[model_tensor(config->layers, TENSOR_POSITIONS)].trained,
           end = weights_at(&packed->model, 0, TENSOR_NORM_1), C = (size_t)config->channels;
    int position = begin % packed->model.T;
    fixture_open(&alone, config, 1, length, 1);
    memcpy(alone.parameters, packed->parameters, count * sizeof(float));
    memcpy(alone.tokens, packed->tokens + begin, (size_t)length * sizeof(int32_t));
    memcpy(alone.targets, packed->targets + begin, (size_t)length * sizeof(int32_t));
    alone.model.position = position;
    fixture_gradients(&alone);
    double share = length / (double)model_rows(&packed->model);
    for (int t = 0; t < length; t++) {
        if (alone.targets[t] < 0) { continue; }
        assert_arrays_close("loss", packed->model.losses + begin + t, alone.model.losses + t, 1, 1e-5);
    }
    for (size_t i = 0; i < count; i++) { // gradients of positions lie at the first ones here
        bool lies = i >= wpe && i < end;
        if (lies && i - wpe >= (size_t)length * C) { continue; }
        expected[i + (lies ? (size_t)position * C : 0)] += share * (double)alone.gradients[i];
    }
    fixture_close(&alone);
}

static void check_documents(const ModelConfig *config, int B, int T) {
    uint32_t separator = (uint32_t)config->vocabulary, none = 0;
    Fixture packed, again, plain;
    fixture_open_documents(&packed, config, B, T, 1, RECOMPUTE_NONE, &separator);
    fixture_open_documents(&again, config, B, T, 3, RECOMPUTE_BLOCK, &separator);
    size_t count = packed.table.parameter_count;
    double *expected = (double *)calloc(count, sizeof *expected);
    float loss = fixture_gradients(&packed), *close = (float *)malloc(count * sizeof *close);
    for (int i = 0, begin = 0; i < B * T; i++) {
        if (i + 1 < B * T && (i + 1) % T != 0 && packed.tokens[i + 1] != config->vocabulary - 1) { continue; }
        check_document_alone(&packed, begin, i + 1 - begin, expected);
        begin = i + 1;
    }
    for (size_t i = 0; i < count; i++) { close[i] = (float)expected[i]; }
    assert_arrays_close("gradients of documents", packed.gradients, close, count, 2e-5);
    assert_true(fixture_gradients(&again) == loss);
    assert_memory_equal(again.gradients, packed.gradients, count * sizeof(float));
    assert_true(model_loss(&again.model, &again.stream, again.parameters, again.tokens, again.targets) ==
                loss);
    fixture_open(&plain, config, B, T, 2); // one document: the bits of attention over all
    fixture_copy_inputs(&plain, &packed);
    again.model.settings.separator = &none;
    assert_true(fixture_gradients(&plain) != loss);
    assert_true(fixture_gradients(&plain) == fixture_gradients(&again));
    free(expected);
    free(close);
    fixture_close(&packed);
    fixture_close(&again);
    fixture_close(&plain);
}

static void test_documents(void **state) {
    (void)state;
    ModelConfig neo = small_config(3, 24, 3, 40, 9, 150, 31), gpt2 = as_gpt2(neo);
    check_documents(&neo, 2, 150);
    check_documents(&gpt2, 2, 150);
    check_documents(&neo, 3, 7);
}

static void test_no_target_counts(void **state) {
    (void)state;
    ModelConfig config = small_config(2, 16, 2, 24, 3, 8, 19);
    Fixture fixture;
    fixture_open(&fixture, &config, 2, 8, 2);
    for (int i = 0; i < 16; i++) { fixture.targets[i] = i % 2 == 0 ? -1 : -100; }
    assert_true(fixture_gradients(&fixture) == 0.0f);
    for (size_t i = 0; i < fixture.table.parameter_count; i++) { assert_true(fixture.gradients[i] == 0.0f); }
    assert_true(model_loss(&fixture.model, &fixture.stream, fixture.parameters, fixture.tokens,
                           fixture.targets) == 0.0f);
    fixture_close(&fixture);
}

static void check_nan_is_seen(const ModelConfig *config) {
    for (int i = 0, count = 1; i < count; i++) {
        Fixture fixture;
        fixture_open(&fixture, config, 2, 8, 2);
        count = fixture.table.count;
        const ParameterInfo *entry = &fixture.table.entries[i];
        size_t row = i == 0 ? (size_t)fixture.tokens[0] * 16 : 0; // of wte: a row that is used
        fixture.parameters[entry->offset + row] = NAN;
        if (!isnan(fixture_gradients(&fixture))) { fail_msg("NaN in %s is lost", entry->name); }
        fixture_close(&fixture);
    }
}

static void test_nan_is_seen(void **state) {
    (void)state;
    ModelConfig neo = small_config(2, 16, 2, 24, 3, 8, 19), gpt2 = as_gpt2(neo);
    check_nan_is_seen(&neo);
    check_nan_is_seen(&gpt2);
}

// Small chunks of logits give what one chunk gives.
static void test_chunks_of_logits(void **state) {
    (void)state;
    ModelConfig config = small_config(1, 24, 2, 30, 5, 20, 53);
    Fixture whole, parts;
    fixture_open(&whole, &config, 2, 19, 2);
    fixture_open(&parts, &config, 2, 19, 2);
    fixture_copy_inputs(&parts, &whole);
    parts.model.chunk = 7;
    float loss = fixture_gradients(&whole);
    assert_true(fixture_gradients(&parts) == loss);
    assert_arrays_close("chunked gradients", parts.gradients, whole.gradients, whole.table.parameter_count,
                        1e-6);
    fixture_close(&whole);
    fixture_close(&parts);
    assert_int_equal(head_chunk_rows(38, 1, 53, PRECISION_FP32, false), 38);
    assert_true((size_t)head_chunk_rows(8192, 1, 50257, PRECISION_FP32, false) * 50257 * 4 <=
                HEAD_LOGITS_BYTES);
    assert_int_equal(head_chunk_rows(5, 1, 1 << 24, PRECISION_FP32, false), 3);
    assert_int_equal(head_chunk_rows(5, 1, 1 << 30, PRECISION_FP32, false), 1);
}

// On a GPU chunks have whole tiles and as many rows as are allowed, fewer where that makes them
// equal, or where the vocabulary is large.
static void test_chunks_on_a_gpu(void **state) {
    typedef struct Chunk {
        int rows, most, stride, chunk;
    } Chunk;
    static const Chunk chunks[] = {{32 * 1024, 8192, 50304, 8192},  {32 * 1024, 16384, 50304, 16384},
                                   {32 * 1024, 11000, 50304, 8192}, {32 * 1024, 11008, 50304, 11008},
                                   {65536, 8192, 50304, 8192},      {65536, 65536, 50304, 16384},
                                   {10000, 8192, 50304, 5120},      {5000, 8192, 50304, 5000},
                                   {600, 8192, 50304, 600},         {200, 8192, 50304, 200},
                                   {300, 256, 50304, 256},          {300, 100, 50304, 100},
                                   {5, 8192, 1 << 30, 1},           {200, 8192, 1 << 24, 50}};
    (void)state;
    for (size_t i = 0; i < sizeof chunks / sizeof chunks[0]; i++) {
        const Chunk *c = &chunks[i];
        assert_int_equal(head_chunk_rows(c->rows, c->most, c->stride, PRECISION_BF16, true), c->chunk);
        assert_true((size_t)c->chunk * (size_t)c->stride * 2 <= HEAD_GPU_LOGITS_BYTES);
    }
}

// ---- Pace: waiting for parameters, announcing gradients -------------------------------

// Parameters that have not been asked for are NaN, and gradients are copied when the pass
// says that they are finished.
typedef struct Watch {
    Fixture *fixture;
    float *arrived;      // (parameter_count): what the pass may read
    float *finished;     // (parameter_count): gradients as they were when the pass finished them
    size_t needed, open; // [0, needed) has been asked for; [open, parameter_count) is finished
    int needs, finishes;
} Watch;

static void watch_need(void *self, size_t end) {
    Watch *watch = (Watch *)self;
    assert_true(end >= watch->needed && end <= watch->fixture->table.parameter_count);
    memcpy(watch->arrived + watch->needed, watch->fixture->parameters + watch->needed,
           (end - watch->needed) * sizeof(float));
    watch->needed = end;
    watch->needs++;
}

static void watch_finish(void *self, size_t begin) {
    Watch *watch = (Watch *)self;
    assert_true(begin <= watch->open);
    memcpy(watch->finished + begin, watch->fixture->gradients + begin, (watch->open - begin) * sizeof(float));
    watch->open = begin;
    watch->finishes++;
}

// A pass asks for parameters before it reads them, part by part. What it says is finished
// does not change any more: all but the embeddings, in half layers.
static void test_the_passes_keep_pace(void **state) {
    (void)state;
    ModelConfig config = small_config(4, 24, 3, 40, 5, 20, 53);
    Fixture fixture;
    fixture_open(&fixture, &config, 2, 17, 2);
    size_t count = fixture.table.parameter_count, bytes = count * sizeof(float);
    float *expected = (float *)malloc(bytes);
    float loss = fixture_gradients(&fixture);
    memcpy(expected, fixture.gradients, bytes);
    memset(fixture.gradients, 0, bytes);
    Watch watch = {&fixture, (float *)malloc(bytes), (float *)malloc(bytes), 0, count, 0, 0};
    for (size_t i = 0; i < count; i++) { watch.arrived[i] = NAN; }
    Pace pace = {.self = &watch, .version = 1, .need = watch_need, .finish = watch_finish};
    float paced = model_loss_and_gradients(&fixture.model, &fixture.stream, watch.arrived, fixture.gradients,
                                           fixture.tokens, fixture.targets, &pace);
    assert_true(paced == loss);
    assert_memory_equal(fixture.gradients, expected, bytes);
    assert_memory_equal(watch.finished + watch.open, expected + watch.open,
                        (count - watch.open) * sizeof(float));
    assert_true(watch.needed == count && watch.needs >= config.layers + 2);
    assert_true(watch.open == fixture.table.layer_begins[0] && watch.finishes >= 2 * config.layers);
    free(expected);
    free(watch.arrived);
    free(watch.finished);
    fixture_close(&fixture);
}

// ---- Configuration and table ----------------------------------------------------------

static const ParameterInfo *entry_of(const ParameterTable *table, int layer, int role) {
    int i = 0;
    while (table->entries[i].layer != layer || table->entries[i].role != role) { i++; }
    return &table->entries[i];
}

// How many matrices Muon steps: all are (C, C) but for the MLP's two.
static int muon_matrices(const ParameterTable *table, int C) {
    OptimizerTensor tensors[2 * MODEL_TENSORS];
    int matrices = 0, squares = 0;
    for (int i = training_tensors(table, false, true, tensors) - 1; i >= 0; i--) {
        matrices += tensors[i].rows > 0;
        squares += tensors[i].rows == C && tensors[i].columns == C;
    }
    assert_int_equal(3 * squares, 2 * matrices);
    return matrices;
}

static void test_presets(void **state) {
    (void)state;
    const struct {
        const char *name;
        size_t parameters;
    } expected[9] = {{"tiny", 857344},           {"36M", 36810240},         {"125M", 124412160},
                     {"1.3B", 1315575808},       {"2.7B", 2651307520},      {"gpt2", 124439808},
                     {"gpt2-medium", 354823168}, {"gpt2-large", 774030080}, {"gpt2-xl", 1557611200}};
    for (int i = 0; i < 9; i++) {
        bool gpt2 = i >= 5;
        ModelConfig config;
        Error error;
        ParameterTable table;
        assert_true(model_find(expected[i].name, &config, &error));
        parameter_table_make(&config, &table);
        assert_int_equal(table.parameter_count, expected[i].parameters);
        assert_int_equal(muon_matrices(&table, config.channels), 6 * config.layers);
        assert_true(!config.local[0] && config.local[1] == !gpt2 && config.scaled_scores == gpt2);
        size_t offset = 0;
        for (int t = 0; t < table.count; t++) {
            assert_int_equal(table.entries[t].offset, offset);
            offset += table.entries[t].count;
        }
        assert_string_equal(table.entries[0].name, "transformer.wte.weight");
        assert_string_equal(entry_of(&table, 1, TENSOR_Q)->name,
                            gpt2 ? "transformer.h.1.attn.c_attn.weight"
                                 : "transformer.h.1.attn.attention.q_proj.weight");
        assert_string_equal(entry_of(&table, 2, TENSOR_DOWN_BIAS)->name, "transformer.h.2.mlp.c_proj.bias");
        assert_string_equal(table.entries[table.count - 1].name, "transformer.ln_f.bias");
        assert_true(entry_of(&table, 0, TENSOR_UP)->rows == 4 * config.channels);
        parameter_table_free(&table);
    }
}

static void test_flops(void **state) {
    (void)state;
    ModelConfig config;
    Error error;
    assert_true(model_find("125M", &config, &error));
    assert_true(model_mean_keys(&config, 0, 1024) == 512.5);
    assert_true(fabs(model_mean_keys(&config, 1, 1024) - 224.125) < 1e-9);
    assert_true(model_mean_keys(&config, 1, 256) == 128.5);
    double matrices = 768.0 * 50257 + 12 * 12 * 768.0 * 768.0;
    ParameterTable table;
    parameter_table_make(&config, &table);
    assert_true(model_flops_per_token(&config, &table, 1024) ==
                6 * matrices + 6.0 * 6 * (512.5 + 224.125) * 2 * 768);
    parameter_table_free(&table);
}

static void check_initialization(const ModelConfig *config) {
    ParameterTable table;
    parameter_table_make(config, &table);
    size_t count = table.parameter_count;
    float *first = (float *)malloc(count * sizeof(float)), *second = (float *)malloc(count * sizeof(float));
    ThreadPool *one = thread_pool_create(1, false), *three = thread_pool_create(3, false);
    parameters_initialize(&table, 5, one, first);
    parameters_initialize(&table, 5, three, second);
    assert_memory_equal(first, second, count * sizeof(float));
    parameters_initialize(&table, 6, three, second);
    thread_pool_destroy(one);
    thread_pool_destroy(three);
    assert_true(memcmp(first, second, count * sizeof(float)) != 0);
    for (int i = 0; i < table.count; i++) {
        const ParameterInfo *entry = &table.entries[i];
        double mean = 0.0, square = 0.0;
        for (size_t j = 0; j < entry->count; j++) {
            mean += (double)first[entry->offset + j] / (double)entry->count;
            square +=
                (double)first[entry->offset + j] * (double)first[entry->offset + j] / (double)entry->count;
        }
        if (entry->is_matrix) {
            // GPT-2's matrices that end one of 2 x 4 branches begin smaller.
            bool last = config->family == &gpt2_family && strstr(entry->name, "c_proj") != NULL;
            double deviation = last ? 0.02 / sqrt(8.0) : 0.02;
            assert_true(fabs(mean) < deviation * 4.5 / sqrt((double)entry->count));
            assert_true(fabs(sqrt(square) - deviation) < deviation * 4.5 / sqrt(2.0 * (double)entry->count));
        } else {
            assert_true(fabs(mean - (double)entry->fill) < 1e-6);
        }
    }
    free(first);
    free(second);
    parameter_table_free(&table);
}

static void test_initialization(void **state) {
    (void)state;
    ModelConfig neo, gpt2;
    Error error;
    assert_true(model_find("tiny", &neo, &error));
    gpt2 = as_gpt2(neo);
    check_initialization(&neo);
    check_initialization(&gpt2);
}

static char scratch_path[256];

static bool config_from_text(const char *text, ModelConfig *config, Error *error) {
    FILE *file = fopen(scratch_path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
    memset(error, 0, sizeof *error);
    return model_find(scratch_path, config, error);
}

#define CONFIG_START \
    "{\"model_type\":\"gpt_neo\",\"num_layers\":4,\"hidden_size\":768,\"num_heads\":16,\"vocab_size\":" \
    "50257,"
#define CONFIG_REST "\"max_position_embeddings\":2048,\"window_size\":256"
#define CONFIG_TYPES "\"attention_types\":[[[\"global\",\"local\"],2]]"

static void test_config_of_gpt2(void **state) {
    (void)state;
    static const char start[] = "{\"model_type\":\"gpt2\",\"n_layer\":3,\"n_embd\":12,\"n_head\":3,"
                                "\"n_positions\":20,\"n_ctx\":20,\"vocab_size\":50,";
    static const char *const texts[][2] = {
        {"\"n_inner\":null,\"attn_pdrop\":0.3,\"resid_pdrop\":0.2,\"summary_type\":\"cls_index\","
         "\"reorder_and_upcast_attn\":true,\"scale_attn_weights\":null}",
         ""},
        {"\"scale_attn_by_inverse_layer_idx\":true}", "scale_attn_by_inverse_layer_idx"},
        {"\"n_inner\":\"big\"}", "n_inner"},
        {"\"n_head\":5}", "n_embd 12 must be a multiple of n_head 5"},
        {"\"activation_function\":\"relu\"}", "gelu_new"},
        {"\"tie_word_embeddings\":false}", "tie_word_embeddings"}};
    static const char aliases[] =
        "{\"model_type\":\"gpt2\",\"num_hidden_layers\":3,\"hidden_size\":12,\"num_attention_heads\":3,"
        "\"max_position_embeddings\":20,\"vocab_size\":50,\"activation_function\":\"gelu_pytorch_tanh\","
        "\"scale_attn_weights\":false}";
    ModelConfig config;
    Error error;
    assert_true(config_from_text(aliases, &config, &error));
    assert_true(config.layers == 3 && config.channels == 12 && config.heads == 3 && config.positions == 20);
    assert_true(!config.scaled_scores && config.epsilon == 1e-5);
    assert_false(config_from_text("{\"model_type\":\"gpt2\",\"n_layer\":3,\"n_embd\":12,\"vocab_size\":50}",
                                  &config, &error));
    assert_non_null(strstr(error.text, "\"n_head\" is not given"));
    for (int i = 0; i < (int)(sizeof texts / sizeof texts[0]); i++) {
        char text[512];
        snprintf(text, sizeof text, "%s%s", start, texts[i][0]);
        bool good = config_from_text(text, &config, &error);
        if (good != (i == 0) || strstr(error.text, texts[i][1]) == NULL) {
            fail_msg("%s: \"%s\"", text, error.text);
        }
        assert_true(!good || (config.family == &gpt2_family && config.scaled_scores));
        assert_true(!good || (config.mlp_channels == 48 && config.positions == 20 && !config.local[1] &&
                              config.window == 0 && config.dropout == 0.3)); // the largest
    }
}

static const struct {
    const char *text, *message;
} bad_configs[] = {
    {"{\"model_type\":\"gptj\"}", "must be \"gpt_neo\" or \"gpt2\""},
    {"[1, 2]", "\"model_type\" is not given"},
    {"{\"model_type\":", "end of file"},
    {CONFIG_START CONFIG_REST "}", "attention_types"},
    {CONFIG_START CONFIG_REST ",\"attention_types\":[[[\"global\",\"local\"],3]]}", "num_layers"},
    {CONFIG_START CONFIG_REST ",\"attention_types\":[[[\"global\",\"local\"],1]]}", "num_layers = 4"},
    {CONFIG_START CONFIG_REST ",\"attention_types\":[[[\"flash\"],4]]}",
     "must look like [[[\"global\", \"local\"], 2]], with a kind for each of num_layers = 4 layers"},
    {CONFIG_START CONFIG_REST ",\"num_layers\":3}",
     "must look like [[[\"global\"], 3]], with a kind for each of num_layers = 3 layers"},
    {CONFIG_START CONFIG_REST ",\"attention_types\":[[[],4]]}", "look like"},
    {CONFIG_START CONFIG_REST ",\"attention_types\":[[[],4000000000000000000]]}", "look like"},
    {CONFIG_START CONFIG_REST ",\"attention_types\":7}", "look like"},
    {CONFIG_START CONFIG_REST "," CONFIG_TYPES
                              ",\"attention_layers\":[\"local\",\"local\",\"global\",\"local\"]}",
     "contradict"},
    {CONFIG_START CONFIG_REST "," CONFIG_TYPES ",\"attention_layers\":[\"global\"]}", "attention_layers"},
    {CONFIG_START CONFIG_REST "," CONFIG_TYPES ",\"activation_function\":\"gelu\"}", "gelu_new"},
    {CONFIG_START CONFIG_REST "," CONFIG_TYPES ",\"num_heads\":7}", "multiple"},
    {CONFIG_START CONFIG_REST "," CONFIG_TYPES ",\"hidden_size\":0}", "hidden_size"},
    {CONFIG_START CONFIG_REST "," CONFIG_TYPES ",\"num_layers\":97}", "96"},
    {CONFIG_START CONFIG_REST "," CONFIG_TYPES ",\"vocab_size\":99999999999}", "vocab_size"},
    {CONFIG_START CONFIG_REST "," CONFIG_TYPES ",\"window_size\":-1}", "window_size"},
    {CONFIG_START CONFIG_REST "," CONFIG_TYPES ",\"layer_norm_epsilon\":0}", "layer_norm_epsilon"},
    {CONFIG_START CONFIG_REST "," CONFIG_TYPES ",\"intermediate_size\":\"big\"}", "intermediate_size"},
    {CONFIG_START CONFIG_REST "," CONFIG_TYPES ",\"tie_word_embeddings\":false}", "tie_word_embeddings"},
};

static void test_config_json(void **state) {
    (void)state;
    ModelConfig config;
    Error error;
    assert_true(config_from_text(CONFIG_START CONFIG_REST
                                 "," CONFIG_TYPES
                                 ",\"intermediate_size\":null,\"attention_layers\":[\"global\","
                                 "\"local\",\"global\",\"local\"],\"classifier_dropout\":0.1,\"embed_"
                                 "dropout\":0,\"resid_dropout\":0.1,"
                                 "\"activation_function\":\"gelu_new\",\"layer_norm_epsilon\":1e-5}",
                                 &config, &error));
    assert_true(config.layers == 4 && config.channels == 768 && config.heads == 16 &&
                config.mlp_channels == 3072 && config.window == 256);
    assert_true(config.positions == 2048 && config.vocabulary == 50257 && config.epsilon == 1e-5);
    assert_true(config.dropout == 0.1); // read, to say that it is ignored
    assert_true(!config.local[0] && config.local[1] && !config.local[2] && config.local[3]);
    assert_true(
        config_from_text(CONFIG_START "\"max_position_embeddings\":2048," CONFIG_TYPES "}", &config, &error));
    assert_true(config.window == 256 && config.mlp_channels == 3072 && config.epsilon == 1e-5); // not given
    assert_true(config_from_text(CONFIG_START CONFIG_REST
                                 ",\"attention_layers\":[\"local\",\"global\",\"global\","
                                 "\"local\"]}",
                                 &config, &error));
    assert_true(config.local[0] && !config.local[1] && !config.local[2] && config.local[3]);
    for (size_t i = 0; i < sizeof bad_configs / sizeof *bad_configs; i++) {
        if (config_from_text(bad_configs[i].text, &config, &error)) {
            fail_msg("accepted: %s", bad_configs[i].text);
        }
        if (strstr(error.text, bad_configs[i].message) == NULL) {
            fail_msg("\"%s\" does not speak of \"%s\"", error.text, bad_configs[i].message);
        }
    }
    assert_false(model_find("126M", &config, &error));
    assert_non_null(
        strstr(error.text, "unknown model 126M (did you mean 125M?): choose tiny, 36M, 125M, 1.3B, "));
    assert_non_null(strstr(error.text, ", qwen2.5-0.5B or qwen3-0.6B, or give a Hugging Face config.json"));
    assert_false(model_find("/no/such/config.json", &config, &error));
    assert_non_null(strstr(error.text, "/no/such/config.json"));
}

int main(void) {
    char directory[] = "/tmp/test_gpt.XXXXXX";
    if (mkdtemp(directory) == NULL) { return 1; }
    snprintf(scratch_path, sizeof scratch_path, "%s/config.json", directory);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_window_below_length),
        cmocka_unit_test(test_window_above_length),
        cmocka_unit_test(test_masked_targets),
        cmocka_unit_test(gpt2_computes_what_transformers_computes),
        cmocka_unit_test(muon_trains_as_in_torch),
        cmocka_unit_test(adapters_train_as_in_peft),
        cmocka_unit_test(test_finite_differences),
        cmocka_unit_test(test_threads_do_not_change_bits),
        cmocka_unit_test(test_gradients_accumulate),
        cmocka_unit_test(test_recompute),
        cmocka_unit_test(test_documents),
        cmocka_unit_test(test_no_target_counts),
        cmocka_unit_test(test_nan_is_seen),
        cmocka_unit_test(test_chunks_of_logits),
        cmocka_unit_test(test_chunks_on_a_gpu),
        cmocka_unit_test(test_the_passes_keep_pace),
        cmocka_unit_test(test_presets),
        cmocka_unit_test(test_flops),
        cmocka_unit_test(test_initialization),
        cmocka_unit_test(test_config_json),
        cmocka_unit_test(test_config_of_gpt2),
    };
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    remove(scratch_path);
    remove(directory);
    return failures;
}
