// test_trained.c: models of which only a part is trained (models/trained.h), against the whole
// model: what stays trained must have the same gradients, bit for bit, and a model with adapters
// must be the model whose matrices are W + alpha / r B A.
#include "test/harness.h"

#include "program/training_problem.h"
#include "test/model_loss.h"

enum { B = 2, T = 11 };

// ---- A model and its vectors ----------------------------------------------------------

typedef struct Fixture {
    ModelConfig config;
    TrainedPart part;
    Arena arena;
    Model model;
    Stream stream;
    float *parameters, *gradients; // what is trained
    int32_t tokens[B * T], targets[B * T];
} Fixture;

static ModelConfig small_config(bool gpt2) {
    ModelConfig config = {.family = gpt2 ? &gpt2_family : &gpt_neo_family,
                          .layers = 3,
                          .channels = 12,
                          .heads = 3,
                          .mlp_channels = 20,
                          .window = 4,
                          .positions = 13,
                          .vocabulary = 17,
                          .local = {false, !gpt2},
                          .scaled_scores = gpt2,
                          .epsilon = 1e-5f};
    return config;
}

// Every element follows from its place in the whole model.
static float weight_of(const ParameterInfo *entry, size_t i) {
    Random random = {.state = random_hash(3, entry->offset + i)};
    return (float)(0.3 * random_normal(&random));
}

static void fixture_open(Fixture *fixture, bool gpt2, const TrainedChoice *choice, Precision precision,
                         Recompute recompute) {
    Error error = {""};
    memset(fixture, 0, sizeof *fixture);
    fixture->config = small_config(gpt2);
    TrainedPart *part = &fixture->part;
    if (!trained_part_make(part, &fixture->config, choice, &error)) { fail_msg("%s", error.text); }
    ModelSettings settings = model_on_cpu(B, T, 2);
    settings.precision = precision;
    settings.given_weights = false;
    settings.recompute = recompute;
    settings.part = part->frozen_count > 0 ? part : NULL;
    size_t bytes = part->table.parameter_count * sizeof(float);
    arena_reserve(&fixture->arena, MEMORY_PARAMETERS, "parameters", bytes, &fixture->parameters);
    arena_reserve(&fixture->arena, MEMORY_GRADIENTS, "gradients", bytes, &fixture->gradients);
    model_reserve(&fixture->model, &fixture->arena, &fixture->config, &settings);
    assert_true(arena_commit(&fixture->arena, &error));
    fixture->stream.pool = thread_pool_create(2, true);
    fixture->stream.precision = precision;
    for (int i = 0; i < part->model.count; i++) {
        const ParameterInfo *entry = &part->model.entries[i];
        const TensorPlace *place = &part->places[i];
        for (size_t j = 0; j < entry->count; j++) {
            if (place->kind == TRAINED_WHOLE) {
                fixture->parameters[place->trained + j] = weight_of(entry, j);
            } else {
                real_store(part->frozen, place->frozen + j, weight_of(entry, j), precision);
            }
        }
    }
    for (size_t i = 0; i < part->table.parameter_count && part->rank > 0; i++) {
        Random random = {.state = random_hash(4, i)};
        fixture->parameters[i] = (float)(0.2 * random_normal(&random));
    }
    Random random = {.state = 7};
    for (int i = 0; i < B * T; i++) {
        fixture->tokens[i] = (int32_t)(random_uniform(&random) * fixture->config.vocabulary);
        fixture->targets[i] =
            i % 5 == 2 ? -1 : (int32_t)(random_uniform(&random) * fixture->config.vocabulary);
    }
}

static void fixture_close(Fixture *fixture) {
    thread_pool_destroy(fixture->stream.pool);
    arena_release(&fixture->arena);
    trained_part_free(&fixture->part);
}

static float fixture_gradients(Fixture *fixture, const Pace *pace) {
    return model_loss_and_gradients(&fixture->model, &fixture->stream, fixture->parameters,
                                    fixture->gradients, fixture->tokens, fixture->targets, pace);
}

// The gradients of a sum that begins, whatever stood there.
static float fixture_begin(Fixture *fixture) {
    const Pace pace = {.begins = true};
    for (size_t i = 0; i < fixture->part.table.parameter_count; i++) { fixture->gradients[i] = NAN; }
    return fixture_gradients(fixture, &pace);
}

static const TrainedChoice everything = {.freeze = "", .adapted = "*"};

// ---- Freezing -------------------------------------------------------------------------

static void check_frozen(bool gpt2, const char *freeze, Precision precision, Recompute recompute) {
    TrainedChoice choice = {.freeze = freeze, .adapted = "*"};
    Fixture whole, some;
    fixture_open(&whole, gpt2, &everything, precision, recompute);
    fixture_open(&some, gpt2, &choice, precision, recompute);
    assert_true(some.part.frozen_count + some.part.table.parameter_count == whole.part.table.parameter_count);
    for (int pass = 0; pass < 2; pass++) { // gradients are set, and then added to
        float expected = pass == 0 ? fixture_begin(&whole) : fixture_gradients(&whole, NULL),
              loss = pass == 0 ? fixture_begin(&some) : fixture_gradients(&some, NULL);
        assert_true(loss == expected);
    }
    float forward = model_loss(&some.model, &some.stream, some.parameters, some.tokens, some.targets);
    assert_true(forward ==
                model_loss(&whole.model, &whole.stream, whole.parameters, whole.tokens, whole.targets));
    int compared = 0;
    for (int i = 0; i < some.part.model.count; i++) {
        const ParameterInfo *entry = &some.part.model.entries[i];
        if (some.part.places[i].kind != TRAINED_WHOLE) { continue; }
        assert_memory_equal(some.gradients + some.part.places[i].trained, whole.gradients + entry->offset,
                            entry->count * sizeof(float));
        compared++;
    }
    assert_int_equal(compared, some.part.table.count);
    fixture_close(&whole);
    fixture_close(&some);
}

static void what_stays_trained_has_the_gradients_of_the_whole_model(void **state) {
    (void)state;
    static const char *const patterns[] = {"wte",          "wpe",      "wte,wpe",         "h.0.*,wte,wpe",
                                           "wte,wpe,h.*",  "*.weight", "*.bias",          "ln_*",
                                           "c_proj,h.1.*", "h.[01].*", "wte,wpe,h.[02].*"};
    for (size_t i = 0; i < sizeof patterns / sizeof patterns[0]; i++) {
        for (int gpt2 = 0; gpt2 < 2; gpt2++) {
            check_frozen(gpt2 == 1, patterns[i], PRECISION_FP32, RECOMPUTE_NONE);
            check_frozen(gpt2 == 1, patterns[i], PRECISION_FP32, RECOMPUTE_BLOCK);
            check_frozen(gpt2 == 1, patterns[i], PRECISION_BF16, RECOMPUTE_NONE);
        }
    }
    check_frozen(false, "q_proj,k_proj,v_proj,wte", PRECISION_FP32, RECOMPUTE_NONE);
    check_frozen(true, "c_attn", PRECISION_FP32, RECOMPUTE_NONE);
}

// The places that a pass announces are those of the trained vector, and do not grow.
typedef struct Watch {
    size_t needed, open, end;
} Watch;

static void watch_need(void *self, size_t end) {
    Watch *watch = (Watch *)self;
    assert_true(end >= watch->needed && end <= watch->end);
    watch->needed = end;
}

static void watch_finish(void *self, size_t begin) {
    Watch *watch = (Watch *)self;
    assert_true(begin <= watch->open);
    watch->open = begin;
}

static void passes_keep_pace_in_the_trained_vector(void **state) {
    (void)state;
    TrainedChoice choice = {.freeze = "wte,wpe,h.0.*,h.2.ln_*", .adapted = "*"};
    Fixture fixture;
    fixture_open(&fixture, false, &choice, PRECISION_FP32, RECOMPUTE_NONE);
    size_t count = fixture.part.table.parameter_count;
    Watch watch = {.open = count, .end = count};
    Pace pace = {.self = &watch, .version = 1, .need = watch_need, .finish = watch_finish};
    fixture_gradients(&fixture, &pace);
    assert_true(watch.needed == count && watch.open == 0);
    fixture_close(&fixture);
}

// ---- Adapters -------------------------------------------------------------------------

// whole->parameters = the model that `adapted` is, with its adapters in its matrices.
static void merge_by_the_formula(const Fixture *adapted, Fixture *whole) {
    const TrainedPart *part = &adapted->part;
    for (int i = 0; i < part->model.count; i++) {
        const ParameterInfo *entry = &part->model.entries[i];
        if (part->places[i].kind != TRAINED_ADAPTED) { continue; }
        int rows = entry->rows, columns = entry->columns, r = part->rank;
        const float *a = adapted->parameters + part->places[i].trained, *b = a + r * columns;
        for (int row = 0; row < rows; row++) {
            for (int column = 0; column < columns; column++) {
                double sum = 0;
                for (int k = 0; k < r; k++) {
                    sum += (double)b[row * r + k] * (double)a[k * columns + column];
                }
                whole->parameters[entry->offset + (size_t)(row * columns + column)] +=
                    (float)(part->alpha / r * sum);
            }
        }
    }
}

// d_a = alpha / r b^T d_w and d_b = alpha / r d_w a^T, of the merged matrix's gradient.
static void expect_adapter_gradients(const Fixture *adapted, const Fixture *whole, double tolerance) {
    const TrainedPart *part = &adapted->part;
    for (int i = 0; i < part->model.count; i++) {
        const ParameterInfo *entry = &part->model.entries[i];
        if (part->places[i].kind != TRAINED_ADAPTED) { continue; }
        int rows = entry->rows, columns = entry->columns, r = part->rank;
        const float *a = adapted->parameters + part->places[i].trained, *b = a + r * columns,
                    *d_a = adapted->gradients + part->places[i].trained, *d_b = d_a + r * columns,
                    *d_w = whole->gradients + entry->offset;
        for (int k = 0; k < r; k++) {
            for (int column = 0; column < columns; column++) {
                double sum = 0;
                for (int row = 0; row < rows; row++) {
                    sum += (double)b[row * r + k] * (double)d_w[row * columns + column];
                }
                assert_close((double)d_a[k * columns + column], part->alpha / r * sum, tolerance,
                             entry->name);
            }
            for (int row = 0; row < rows; row++) {
                double sum = 0;
                for (int column = 0; column < columns; column++) {
                    sum += (double)d_w[row * columns + column] * (double)a[k * columns + column];
                }
                assert_close((double)d_b[row * r + k], part->alpha / r * sum, tolerance, entry->name);
            }
        }
    }
}

static void check_adapters(bool gpt2, const char *adapted, int rank, Precision precision, Recompute recompute,
                           double tolerance) {
    TrainedChoice choice = {.freeze = "", .adapted = adapted, .rank = rank, .alpha = 2.5};
    Fixture some, whole;
    fixture_open(&some, gpt2, &choice, precision, recompute);
    fixture_open(&whole, gpt2, &everything, precision, recompute);
    merge_by_the_formula(&some, &whole);
    double expected = (double)fixture_gradients(&whole, NULL);
    assert_close((double)fixture_gradients(&some, NULL), expected, tolerance, "loss");
    double forward =
        (double)model_loss(&some.model, &some.stream, some.parameters, some.tokens, some.targets);
    assert_close(forward, expected, tolerance, "loss without gradients");
    expect_adapter_gradients(&some, &whole, tolerance);
    fixture_begin(&some);
    expect_adapter_gradients(&some, &whole, tolerance);
    fixture_close(&some);
    fixture_close(&whole);
}

static void a_model_with_adapters_is_the_merged_model(void **state) {
    (void)state;
    for (int gpt2 = 0; gpt2 < 2; gpt2++) {
        check_adapters(gpt2 == 1, "*", 3, PRECISION_FP32, RECOMPUTE_NONE, 3e-5);
        check_adapters(gpt2 == 1, "*", 1, PRECISION_FP32, RECOMPUTE_BLOCK, 3e-5);
        check_adapters(gpt2 == 1, "*", 16, PRECISION_BF16, RECOMPUTE_NONE, 0.1);
        check_adapters(gpt2 == 1, "c_fc", 2, PRECISION_FP32, RECOMPUTE_NONE, 3e-5);
    }
    check_adapters(false, "q_proj,v_proj", 2, PRECISION_FP32, RECOMPUTE_NONE, 3e-5);
    check_adapters(true, "h.1.*", 2, PRECISION_FP32, RECOMPUTE_NONE, 3e-5);
}

static void adapters_begin_without_effect(void **state) {
    (void)state;
    TrainedChoice choice = {.freeze = "", .adapted = "*", .rank = 2, .alpha = 16};
    Fixture some, whole;
    fixture_open(&some, false, &choice, PRECISION_FP32, RECOMPUTE_NONE);
    fixture_open(&whole, false, &everything, PRECISION_FP32, RECOMPUTE_NONE);
    parameters_initialize(&some.part.table, 5, some.stream.pool, some.parameters);
    assert_true(fixture_gradients(&some, NULL) == fixture_gradients(&whole, NULL));
    for (int i = 0; i < some.part.table.count; i++) {
        const ParameterInfo *entry = &some.part.table.entries[i];
        bool is_a = strstr(entry->name, ".lora_A.weight") != NULL;
        double least = 0, most = 0, bound = 1 / sqrt((double)entry->columns);
        for (size_t j = 0; j < entry->count; j++) {
            least = fmin(least, (double)some.parameters[entry->offset + j]);
            most = fmax(most, (double)some.parameters[entry->offset + j]);
        }
        bool within = most <= bound && least >= -bound && fmax(most, -least) > 0.7 * bound;
        bool uniform = within && most > 0.6 * bound && least < -0.6 * bound; // of both signs
        assert_true(is_a ? uniform : least == 0 && most == 0);
        assert_true(is_a || strstr(entry->name, ".lora_B.weight") != NULL);
        assert_true(entry->is_matrix && entry->is_projection);
    }
    fixture_close(&some);
    fixture_close(&whole);
}

// ---- Vectors and patterns -------------------------------------------------------------

static void vectors_follow_the_order_of_the_model(void **state) {
    (void)state;
    ModelConfig config = small_config(false);
    TrainedChoice choice = {.freeze = "wte,h.1.*,ln_1", .adapted = "*"};
    TrainedPart part;
    Error error = {""};
    assert_true(trained_part_make(&part, &config, &choice, &error));
    size_t trained = 0, frozen = 0;
    for (int i = 0, t = 0; i < part.model.count; i++) {
        const ParameterInfo *entry = &part.model.entries[i];
        assert_int_equal(part.places[i].trained, trained);
        if (part.places[i].kind == TRAINED_WHOLE) {
            const ParameterInfo *own = &part.table.entries[t++];
            assert_string_equal(own->name, entry->name);
            assert_true(own->offset == trained && own->count == entry->count);
            assert_true(own->is_projection == entry->is_projection);
            trained += entry->count;
        } else {
            assert_int_equal(part.places[i].frozen, frozen);
            frozen += entry->count;
        }
    }
    assert_int_equal(part.table.parameter_count, trained);
    assert_int_equal(part.frozen_count, frozen);
    const size_t *begins = part.table.layer_begins;
    assert_int_equal(part.table.layers, 3);
    assert_int_equal(begins[0], 13 * 12); // wpe
    assert_int_equal(begins[2], begins[1]);
    assert_int_equal(begins[3] - begins[2], begins[1] - begins[0]);
    assert_int_equal(trained - begins[3], 2 * 12); // ln_f
    trained_part_free(&part);
}

static void operations_are_those_that_are_computed(void **state) {
    (void)state;
    ModelConfig config = small_config(false);
    TrainedChoice choice = {.freeze = "wte,wpe,h.0.*", .adapted = "*"},
                  adapters = {.freeze = "", .adapted = "c_fc", .rank = 2, .alpha = 1};
    TrainedPart part;
    Error error = {""};
    assert_true(trained_part_make(&part, &config, &choice, &error));
    double all = model_flops_per_token(&config, &part.model, T), layer = 4 * 12 * 12 + 2 * 12 * 20,
           wte = 17 * 12;
    assert_close(trained_flops_per_token(&part, &config, T), all - 2 * (wte + layer), 1e-6, "frozen");
    trained_part_free(&part);
    assert_true(trained_part_make(&part, &config, &adapters, &error));
    assert_close(trained_flops_per_token(&part, &config, T),
                 all - 2 * (wte + 3 * layer) + 3 * 6 * 2 * (12 + 20), 1e-6, "adapters");
    trained_part_free(&part);
}

// GPT-2 has them in one tensor, which may be all that is trained.
static void queries_keys_and_values_are_three_matrices_to_muon(void **state) {
    (void)state;
    ModelConfig config = small_config(true);
    TrainedChoice choice = {.freeze = "wte,wpe,ln_*,c_proj,c_fc,c_attn.bias", .adapted = "*"};
    TrainedPart part;
    Error error = {""};
    assert_true(trained_part_make(&part, &config, &choice, &error));
    assert_int_equal(part.table.count, 3);
    OptimizerTensor *tensors = MEMORY_OF(OptimizerTensor, TRAINING_PARTS * part.table.count);
    assert_int_equal(training_tensors(&part.table, false, true, tensors), 9);
    for (size_t i = 0; i < 9; i++) {
        assert_true(tensors[i].begin == i * 144 && tensors[i].end == (i + 1) * 144);
        assert_true(tensors[i].rows == 12 && tensors[i].columns == 12);
    }
    free(tensors);
    trained_part_free(&part);
}

static void patterns_mean_names_and_their_ends(void **state) {
    (void)state;
    static const struct {
        const char *pattern;
        bool means[3]; // h.1.attn.c_attn.weight, h.1.attn.c_attn.bias, wte.weight
    } cases[] = {
        {"c_attn", {true, true, false}},      {"c_attn.weight", {true, false, false}},
        {"attn.c_attn", {true, true, false}}, {"h.1.*", {true, true, false}},
        {"h.[02].*", {false, false, false}},  {"*.bias", {false, true, false}},
        {"w*", {false, false, true}},         {"weight", {false, false, false}},
        {"attn", {false, false, false}},      {"h.1.attn.c_attn", {true, true, false}},
        {"wte.weight", {false, false, true}}, {"_attn.weight", {false, false, false}},
    };
    static const char *const names[3] = {"h.1.attn.c_attn.weight", "h.1.attn.c_attn.bias", "wte.weight"};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (int j = 0; j < 3; j++) {
            if (trained_is_meant(cases[i].pattern, names[j]) != cases[i].means[j]) {
                fail_msg("%s, %s", cases[i].pattern, names[j]);
            }
        }
    }
}

static void patterns_that_cannot_be_meant_are_refused(void **state) {
    (void)state;
    const struct {
        TrainedChoice choice;
        bool gpt2;
        const char *says;
    } cases[] = {
        {{.freeze = "wte,qproj", .adapted = "*"},
         false,
         "--freeze: no tensor of the model matches \"qproj\" (did you mean q_proj?)"},
        {{.freeze = "*", .adapted = "*"}, false, "leaves nothing to train"},
        {{.freeze = "h.1.*.q_proj.*", .adapted = "*"}, false, "are one matrix here"},
        {{.freeze = "", .adapted = "wte", .rank = 2},
         false,
         "--lora-on: no matrix of a layer matches \"wte\""},
        {{.freeze = ",", .adapted = "*"}, false, "--freeze \",\": a pattern is empty"},
        {{.freeze = "wte,", .adapted = "*"}, false, "--freeze \"wte,\": a pattern is empty"},
        {{.freeze = "", .adapted = "", .rank = 2}, false, "--lora-on \"\": a pattern is empty"},
        {{.freeze = "", .adapted = "q_proj", .rank = 2}, true, "names are such as h.0.attn.c_attn.weight"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ModelConfig config = small_config(cases[i].gpt2);
        TrainedPart part;
        Error error = {""};
        assert_false(trained_part_make(&part, &config, &cases[i].choice, &error));
        if (strstr(error.text, cases[i].says) == NULL) { fail_msg("%s", error.text); }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_stays_trained_has_the_gradients_of_the_whole_model),
        cmocka_unit_test(passes_keep_pace_in_the_trained_vector),
        cmocka_unit_test(a_model_with_adapters_is_the_merged_model),
        cmocka_unit_test(adapters_begin_without_effect),
        cmocka_unit_test(vectors_follow_the_order_of_the_model),
        cmocka_unit_test(operations_are_those_that_are_computed),
        cmocka_unit_test(queries_keys_and_values_are_three_matrices_to_muon),
        cmocka_unit_test(patterns_mean_names_and_their_ends),
        cmocka_unit_test(patterns_that_cannot_be_meant_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL) == 0 ? 0 : 1;
}
