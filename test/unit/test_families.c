// test_families.c: Llama, Mistral, Qwen2 and Qwen3 against what transformers computes: logits,
// losses of ten steps, gradients; the model against itself (decoding, threads, computing again,
// adapters); and what the pages read, write and refuse of a config.json.
//
// dev/reference/make_families.py makes test/reference/families.safetensors.
#include "test/harness.h"

#include "checkpoint/hf_model.h"
#include "evaluation/sample.h"
#include "program/training_problem.h"
#include "test/model_loss.h"
#include "test/reference.h"

static char scratch_file[] = "/tmp/test_families.XXXXXX";

// ---- A case of the reference ----------------------------------------------------------

typedef struct Fixture {
    json_t *about; // B, T, seed, config, tensors
    ModelConfig config;
    ParameterTable table;
    Arena arena;
    Model model;
    Stream stream;
    int B, T;
    float *parameters, *gradients; // (parameter_count)
    const int32_t *tokens, *targets;
} Fixture;

enum { STEPS = 10, FEWEST_CASES = 9, MOST_CASES = 64 };

static const char *CASES[MOST_CASES]; // of the file: "llama 3" and others
static int CASE_COUNT;

static const void *case_values(const Tensors *tensors, const char *name, const char *kind) {
    char key[64];
    snprintf(key, sizeof key, "%s/%s", name, kind);
    return tensors_get(tensors, key);
}

static void config_read(const json_t *root, ModelConfig *config, Error *error) {
    error->text[0] = '\0';
    assert_int_equal(json_dump_file(root, scratch_file, JSON_REAL_PRECISION(17)), 0);
    if (!model_config_load(scratch_file, config, error)) { assert_true(error->text[0] != '\0'); }
}

static ModelConfig config_of(const json_t *root) {
    ModelConfig config;
    Error error;
    config_read(root, &config, &error);
    if (error.text[0] != '\0') { fail_msg("%s", error.text); }
    return config;
}

// Weights as make_families.py makes them from their names.
static void fill(const Fixture *fixture, float *parameters) {
    uint64_t seed = (uint64_t)json_integer_value(json_object_get(fixture->about, "seed"));
    for (int i = 0; i < fixture->table.count; i++) {
        const ParameterInfo *entry = &fixture->table.entries[i];
        bool bias = strcmp(strrchr(entry->name, '.'), ".bias") == 0,
             norm = strstr(entry->name, "norm") != NULL;
        float scale = bias ? 0.125f : norm ? 0.25f : strstr(entry->name, "embed") != NULL ? 0.5f : 0.25f;
        float *values = parameters + entry->offset;
        reference_stream(entry->name, seed, scale, entry->count, values);
        for (size_t j = 0; j < entry->count && norm && !bias; j++) { values[j] += 1.0f; }
    }
}

static void open_model(Fixture *fixture, ModelSettings settings) {
    Error error;
    memset(&fixture->arena, 0, sizeof fixture->arena);
    memset(&fixture->stream, 0, sizeof fixture->stream);
    fixture->stream.precision = settings.precision;
    model_reserve(&fixture->model, &fixture->arena, &fixture->config, &settings);
    assert_true(arena_commit(&fixture->arena, &error));
    memset(fixture->arena.base, 0xFF, fixture->arena.bytes); // what is read before it is written is NaN
    fixture->stream.pool = thread_pool_create(settings.threads, true);
}

static void close_model(Fixture *fixture) {
    thread_pool_destroy(fixture->stream.pool);
    arena_release(&fixture->arena);
}

static void open_case(Fixture *fixture, const Tensors *tensors, const char *name) {
    memset(fixture, 0, sizeof *fixture);
    fixture->about = json_loads(tensors_text(tensors, name), 0, NULL);
    fixture->config = config_of(json_object_get(fixture->about, "config"));
    parameter_table_make(&fixture->config, &fixture->table);
    fixture->B = (int)json_integer_value(json_object_get(fixture->about, "B"));
    fixture->T = (int)json_integer_value(json_object_get(fixture->about, "T"));
    fixture->parameters = (float *)malloc(fixture->table.parameter_count * sizeof(float));
    fixture->gradients = (float *)calloc(fixture->table.parameter_count, sizeof(float));
    fixture->tokens = (const int32_t *)case_values(tensors, name, "tokens");
    fixture->targets = (const int32_t *)case_values(tensors, name, "targets");
    fill(fixture, fixture->parameters);
}

static void close_case(Fixture *fixture) {
    parameter_table_free(&fixture->table);
    free(fixture->parameters);
    free(fixture->gradients);
    json_decref(fixture->about);
}

// Gradients of the mean over the targets that count.
static float pass(Fixture *fixture) {
    size_t rows = model_rows(&fixture->model), count = fixture->table.parameter_count;
    const Pace pace = {.begins = true};
    float loss = model_loss_and_gradients(&fixture->model, &fixture->stream, fixture->parameters,
                                          fixture->gradients, fixture->tokens, fixture->targets, &pace);
    float whole = (float)rows / (float)targets_predicted(fixture->targets, rows);
    for (size_t i = 0; i < count; i++) { fixture->gradients[i] *= whole; }
    return loss;
}

static void check_close(const char *what, const char *of, const float *got, const float *expected,
                        size_t count, double tolerance) {
    for (size_t i = 0; i < count; i++) {
        double difference = fabs((double)got[i] - (double)expected[i]);
        if (!(difference <= tolerance * fmax(1, fabs((double)expected[i])))) {
            fail_msg("%s: %s[%zu] is %.9g, expected %.9g", of, what, i, (double)got[i], (double)expected[i]);
        }
    }
}

static float *logits_of(Fixture *fixture) {
    const Model *model = &fixture->model;
    int rows = (int)model_rows(model), V = fixture->config.vocabulary;
    float *logits = (float *)malloc((size_t)rows * (size_t)V * sizeof(float));
    matmul_forward(&fixture->stream, as_reals(logits), V, head_input(model), weights_of(model, model->head),
                   rows, fixture->config.channels, V);
    return logits;
}

// ---- What transformers computes -------------------------------------------------------

static void check_gradients(const Fixture *fixture, const char *name, const float *expected) {
    const json_t *names = json_object_get(fixture->about, "tensors");
    size_t samples = (size_t)json_integer_value(json_object_get(fixture->about, "samples"));
    assert_int_equal(json_array_size(names), fixture->table.count);
    for (size_t n = 0; n < json_array_size(names); n++) {
        const char *wanted = json_string_value(json_array_get(names, n));
        const ParameterInfo *entry = fixture->table.entries;
        while (entry < fixture->table.entries + fixture->table.count && strcmp(entry->name, wanted) != 0) {
            entry++;
        }
        if (entry == fixture->table.entries + fixture->table.count) {
            fail_msg("%s has no %s", name, wanted);
        }
        size_t count = entry->count < samples ? entry->count : samples;
        for (size_t i = 0; i < count; i++) {
            check_close(wanted, name, fixture->gradients + entry->offset + i * entry->count / count,
                        expected + i, 1, 1e-5);
        }
        expected += count;
    }
}

// A model of which `part` is trained, with the parameters of the case in both vectors.
static float *open_part(Fixture *fixture, TrainedPart *part, const TrainedChoice *choice) {
    Error error = {""};
    if (!trained_part_make(part, &fixture->config, choice, &error)) { fail_msg("%s", error.text); }
    ModelSettings settings = model_on_cpu(fixture->B, fixture->T, 2);
    settings.part = part;
    open_model(fixture, settings);
    float *trained = (float *)malloc(part->table.parameter_count * sizeof(float));
    for (int i = 0; i < part->model.count; i++) {
        const ParameterInfo *entry = &part->model.entries[i];
        bool whole = part->places[i].kind == TRAINED_WHOLE;
        memcpy(whole ? trained + part->places[i].trained : real_floats(part->frozen) + part->places[i].frozen,
               fixture->parameters + entry->offset, entry->count * sizeof(float));
    }
    return trained;
}

// An optimizer as the reference has it, for `count` parameters.
static void begin_steps(Optimizer *optimizer, Arena *arena, Stream *stream, const OptimizerTensor *ranges,
                        int range_count, const float *parameters, size_t count) {
    Layout whole = optimizer_whole(count);
    OptimizerSettings settings = {.beta1 = 0.9,
                                  .beta2 = 0.95,
                                  .epsilon = 1e-5,
                                  .weight_decay = 0.1,
                                  .muon_momentum = 0.95,
                                  .muon_iterations = 5,
                                  .tensors = ranges,
                                  .tensor_count = range_count};
    Error error;
    optimizer_reserve(optimizer, arena, &settings, &whole, 0, false);
    assert_true(arena_commit(arena, &error));
    optimizer_take_master(optimizer, stream, parameters);
}

// Losses of ten steps, each before its update, by AdamW or by Muon with AdamW; those of torch.
static void check_steps(const Tensors *tensors, const char *name, bool muon) {
    Fixture fixture;
    Optimizer optimizer;
    Arena arena = {0};
    OptimizerTensor ranges[256];
    open_case(&fixture, tensors, name);
    open_model(&fixture, model_on_cpu(fixture.B, fixture.T, 2));
    assert_true(TRAINING_PARTS * fixture.table.count <= 256);
    begin_steps(&optimizer, &arena, &fixture.stream, ranges,
                training_tensors(&fixture.table, false, muon, ranges), fixture.parameters,
                fixture.table.parameter_count);
    const double *losses = (const double *)case_values(tensors, name, muon ? "muon losses" : "losses");
    for (int step = 0; step < STEPS; step++) {
        float loss = pass(&fixture), expected = (float)losses[step];
        check_close(muon ? "loss by Muon" : "loss", name, &loss, &expected, 1, 1e-5);
        if (step == 0 && !muon) {
            float *logits = logits_of(&fixture);
            size_t number = model_rows(&fixture.model) * (size_t)fixture.config.vocabulary;
            check_close("logits", name, logits, (const float *)case_values(tensors, name, "logits"), number,
                        1e-5);
            free(logits);
            check_gradients(&fixture, name, (const float *)case_values(tensors, name, "grad"));
        }
        OptimizerStep update = {.gradient = fixture.gradients,
                                .out = fixture.parameters,
                                .divisor = 1,
                                .scale = 1,
                                .learning_rate = 1e-3,
                                .keeps = true};
        optimizer_step(&optimizer, &fixture.stream, &update);
    }
    close_model(&fixture);
    close_case(&fixture);
    arena_release(&arena);
}

// The same of adapters of all products of the layers, as peft trains them.
static void check_adapter_steps(const Tensors *tensors, const char *name) {
    const TrainedChoice choice = {.freeze = "", .adapted = "*_proj", .rank = 3, .alpha = 6};
    Fixture fixture;
    TrainedPart part;
    Optimizer optimizer;
    Arena arena = {0};
    OptimizerTensor ranges[256];
    open_case(&fixture, tensors, name);
    float *trained = open_part(&fixture, &part, &choice);
    size_t count = part.table.parameter_count, rows = model_rows(&fixture.model);
    float *gradients = (float *)calloc(count, sizeof *gradients);
    for (int i = 0; i < part.table.count; i++) {
        const ParameterInfo *entry = &part.table.entries[i];
        reference_stream(entry->name, (uint64_t)json_integer_value(json_object_get(fixture.about, "seed")),
                         0.125f, entry->count, trained + entry->offset);
    }
    assert_true(TRAINING_PARTS * part.table.count <= 256);
    begin_steps(&optimizer, &arena, &fixture.stream, ranges,
                training_tensors(&part.table, false, false, ranges), trained, count);
    const double *losses = (const double *)case_values(tensors, name, "adapter losses");
    OptimizerStep update = {
        .gradient = gradients, .out = trained, .scale = 1, .learning_rate = 1e-2, .keeps = true};
    update.divisor = (double)targets_predicted(fixture.targets, rows) / (double)rows;
    for (int step = 0; step < STEPS; step++) {
        const Pace pace = {.begins = true};
        float expected = (float)losses[step],
              loss = model_loss_and_gradients(&fixture.model, &fixture.stream, trained, gradients,
                                              fixture.tokens, fixture.targets, &pace);
        check_close("loss of adapters", name, &loss, &expected, 1, 1e-5);
        optimizer_step(&optimizer, &fixture.stream, &update);
    }
    close_model(&fixture);
    trained_part_free(&part);
    close_case(&fixture);
    arena_release(&arena);
    free(trained);
    free(gradients);
}

static void families_are_those_of_transformers(void **state) {
    const Tensors *tensors = (const Tensors *)*state;
    for (int c = 0; c < CASE_COUNT; c++) {
        check_steps(tensors, CASES[c], false);
        check_steps(tensors, CASES[c], true);
        check_adapter_steps(tensors, CASES[c]);
    }
}

// ---- The model against itself ---------------------------------------------------------

// The logits of a pass with these settings, and its gradients. The caller frees both.
static void run_once(const Tensors *tensors, const char *name, ModelSettings settings, float **logits,
                     float **gradients) {
    Fixture fixture;
    open_case(&fixture, tensors, name);
    settings.B = fixture.B;
    settings.T = fixture.T;
    open_model(&fixture, settings);
    model_forward(&fixture.model, &fixture.stream, fixture.parameters, fixture.tokens, NULL);
    *logits = settings.precision == PRECISION_FP32 ? logits_of(&fixture) : NULL;
    pass(&fixture);
    *gradients = fixture.gradients;
    fixture.gradients = NULL;
    close_model(&fixture);
    close_case(&fixture);
}

static void threads_and_computing_again_change_no_bit(void **state) {
    const Tensors *tensors = (const Tensors *)*state;
    for (int c = 0; c < CASE_COUNT; c++) {
        Fixture fixture;
        open_case(&fixture, tensors, CASES[c]);
        size_t count = fixture.table.parameter_count,
               number = (size_t)(fixture.B * fixture.T) * (size_t)fixture.config.vocabulary;
        close_case(&fixture);
        ModelSettings one = model_on_cpu(1, 1, 1), three = model_on_cpu(1, 1, 3), rounded = three;
        three.recompute = RECOMPUTE_BLOCK;
        rounded.precision = PRECISION_BF16;
        rounded.given_weights = false;
        float *logits[3], *gradients[3];
        run_once(tensors, CASES[c], one, &logits[0], &gradients[0]);
        run_once(tensors, CASES[c], three, &logits[1], &gradients[1]);
        assert_memory_equal(logits[0], logits[1], number * sizeof(float));
        assert_memory_equal(gradients[0], gradients[1], count * sizeof(float));
        run_once(tensors, CASES[c], rounded, &logits[2], &gradients[2]);
        double square = 0, difference = 0;
        for (size_t i = 0; i < count; i++) {
            square += pow((double)gradients[0][i], 2);
            difference += pow((double)gradients[2][i] - (double)gradients[0][i], 2);
        }
        assert_close(sqrt(difference / square), 0, 0.03, CASES[c]); // numbers of 8 bits
        free(gradients[2]);
        for (int i = 0; i < 2; i++) {
            free(logits[i]);
            free(gradients[i]);
        }
    }
}

// A token at a time, with keys and values of those before it.
static void decoding_gives_the_logits_of_the_whole_text(void **state) {
    const Tensors *tensors = (const Tensors *)*state;
    for (int c = 0; c < CASE_COUNT; c++) {
        Fixture fixture;
        Sampler sampler;
        Arena arena;
        Error error;
        open_case(&fixture, tensors, CASES[c]);
        memset(&arena, 0, sizeof arena);
        sampler_reserve(&sampler, &arena, &fixture.config, 2);
        assert_true(arena_commit(&arena, &error));
        Stream stream = {.pool = thread_pool_create(2, true)};
        const float *expected = (const float *)case_values(tensors, CASES[c], "logits");
        for (int t = 0; t < fixture.T; t++) {
            size_t V = (size_t)fixture.config.vocabulary;
            const float *logits = sampler_step(&sampler, &stream, fixture.parameters, fixture.tokens[t]);
            check_close("logits of decoding", CASES[c], logits, expected + (size_t)t * V, V, 1e-5);
        }
        thread_pool_destroy(stream.pool);
        arena_release(&arena);
        close_case(&fixture);
    }
}

// Rotary positions are relative: behind a separator a document is as if it stood alone.
static void a_document_sees_nothing_of_the_one_before_it(void **state) {
    const Tensors *tensors = (const Tensors *)*state;
    for (int c = 0; c < CASE_COUNT; c++) {
        Fixture fixture;
        enum { FIRST = 5 };
        float *logits[2];
        open_case(&fixture, tensors, CASES[c]);
        int T = fixture.T;
        size_t V = (size_t)fixture.config.vocabulary;
        int32_t *text = (int32_t *)malloc((size_t)T * sizeof *text);
        for (int t = 0; t < T; t++) { text[t] = 1 + (fixture.tokens[t] + t) % (int32_t)(V - 1); }
        text[FIRST] = 0; // begins the second document
        const uint32_t separator = 1;
        for (int i = 0; i < 2; i++) { // all of it, and the second document alone
            ModelSettings settings = model_on_cpu(1, i == 0 ? T : T - FIRST, 2);
            settings.separator = &separator;
            open_model(&fixture, settings);
            model_forward(&fixture.model, &fixture.stream, fixture.parameters, text + (i == 0 ? 0 : FIRST),
                          NULL);
            logits[i] = logits_of(&fixture);
            close_model(&fixture);
        }
        check_close("logits", CASES[c], logits[0] + FIRST * V, logits[1], (size_t)(T - FIRST) * V, 1e-5);
        free(logits[0]);
        free(logits[1]);
        free(text);
        close_case(&fixture);
    }
}

// ---- Adapters, frozen parts, Muon -----------------------------------------------------

static void adapters_are_those_of_the_merged_model(void **state) {
    const Tensors *tensors = (const Tensors *)*state;
    const TrainedChoice choice = {
        .freeze = "", .adapted = "q_proj,v_proj,k_proj,o_proj,up_proj,down_proj", .rank = 3, .alpha = 6};
    for (int c = 0; c < CASE_COUNT; c++) {
        Fixture fixture;
        TrainedPart part;
        Random random = {.state = 5};
        open_case(&fixture, tensors, CASES[c]);
        float *trained = open_part(&fixture, &part, &choice);
        size_t count = part.table.parameter_count;
        for (size_t i = 0; i < count; i++) { trained[i] = (float)(0.2 * random_normal(&random)); }
        float *gradients = (float *)calloc(count, sizeof *gradients);
        assert_int_equal(part.table.count, 2 * 6 * fixture.config.layers);
        float loss = model_loss_and_gradients(&fixture.model, &fixture.stream, trained, gradients,
                                              fixture.tokens, fixture.targets, NULL);
        close_model(&fixture);

        // The gradient of W + s B A, by which those of A and B follow.
        for (int i = 0; i < part.model.count; i++) {
            const ParameterInfo *entry = &part.model.entries[i];
            if (part.places[i].kind != TRAINED_ADAPTED) { continue; }
            const float *a = trained + part.places[i].trained, *b = a + (size_t)(3 * entry->columns);
            adapters_merge(fixture.parameters + entry->offset, a, b, entry->rows, entry->columns, 3,
                           part.scale);
        }
        open_model(&fixture, model_on_cpu(fixture.B, fixture.T, 2));
        float merged = model_loss_and_gradients(&fixture.model, &fixture.stream, fixture.parameters,
                                                fixture.gradients, fixture.tokens, fixture.targets, NULL);
        check_close("loss", CASES[c], &loss, &merged, 1, 1e-5);
        for (int i = 0; i < part.model.count; i++) {
            const ParameterInfo *entry = &part.model.entries[i];
            if (part.places[i].kind != TRAINED_ADAPTED) { continue; }
            size_t first = part.places[i].trained, second = first + (size_t)(3 * entry->columns);
            for (int k = 0; k < 3; k++) {
                for (int column = 0; column < entry->columns; column++) {
                    float sum = 0;
                    for (int row = 0; row < entry->rows; row++) {
                        sum += part.scale * trained[second + (size_t)(row * 3 + k)] *
                               fixture.gradients[entry->offset + (size_t)(row * entry->columns + column)];
                    }
                    check_close(entry->name, CASES[c], gradients + first + k * entry->columns + column, &sum,
                                1, 2e-5);
                }
            }
        }
        close_model(&fixture);
        close_case(&fixture);
        trained_part_free(&part);
        free(trained);
        free(gradients);
    }
}

static void what_stays_trained_has_the_gradients_of_the_whole_model(void **state) {
    const Tensors *tensors = (const Tensors *)*state;
    static const char *const patterns[] = {
        "embed_tokens", "*norm*", "layers.0.*", "self_attn.*",
        "mlp.*",        "*.bias", "lm_head",    "q_norm,k_proj,q_proj,v_proj"};
    int tried = 0;
    for (int c = 0; c < CASE_COUNT; c++) {
        for (size_t p = 0; p < sizeof patterns / sizeof patterns[0]; p++) {
            Fixture fixture;
            TrainedPart part;
            Error error;
            TrainedChoice choice = {.freeze = patterns[p], .adapted = ""};
            open_case(&fixture, tensors, CASES[c]);
            if (!trained_part_make(&part, &fixture.config, &choice, &error)) { // there is no such tensor
                close_case(&fixture);
                continue;
            }
            trained_part_free(&part);
            float *trained = open_part(&fixture, &part, &choice),
                  *some = (float *)calloc(part.table.parameter_count, sizeof *some);
            model_loss_and_gradients(&fixture.model, &fixture.stream, trained, some, fixture.tokens,
                                     fixture.targets, NULL);
            close_model(&fixture);
            open_model(&fixture, model_on_cpu(fixture.B, fixture.T, 1));
            model_loss_and_gradients(&fixture.model, &fixture.stream, fixture.parameters, fixture.gradients,
                                     fixture.tokens, fixture.targets, NULL);
            for (int i = 0; i < part.model.count; i++) {
                const ParameterInfo *entry = &part.model.entries[i];
                if (part.places[i].kind != TRAINED_WHOLE) { continue; }
                assert_memory_equal(some + part.places[i].trained, fixture.gradients + entry->offset,
                                    entry->count * sizeof(float));
            }
            close_model(&fixture);
            trained_part_free(&part);
            close_case(&fixture);
            free(trained);
            free(some);
            tried++;
        }
    }
    assert_true(tried > 50);
}

// ---- Directories ----------------------------------------------------------------------

// The model in a directory, which is removed with what is in it by the caller.
static bool read_directory(const char *directory, const Fixture *fixture, Error *error) {
    HfModel model;
    error->text[0] = '\0';
    if (!hf_model_open(&model, directory, error)) { return false; }
    size_t count = model.table.parameter_count;
    float *values = (float *)malloc(count * sizeof *values);
    hf_model_read(&model, values);
    assert_true(count == fixture->table.parameter_count);
    assert_memory_equal(values, fixture->parameters, count * sizeof *values);
    free(values);
    hf_model_close(&model);
    return true;
}

// Changes a flag in the config.json of the directory, and what reading says then.
static void check_refusal(const char *directory, const Fixture *fixture, const char *key, bool value,
                          const char *expected) {
    char path[PATH_MAX];
    Error error;
    snprintf(path, sizeof path, "%s/config.json", directory);
    json_t *root = json_load_file(path, 0, NULL), *kept = json_copy(root);
    json_object_set_new(root, key, json_boolean(value));
    assert_int_equal(json_dump_file(root, path, 0), 0);
    assert_false(read_directory(directory, fixture, &error));
    if (strstr(error.text, expected) == NULL) { fail_msg("%s", error.text); }
    assert_int_equal(json_dump_file(kept, path, 0), 0);
    json_decref(root);
    json_decref(kept);
}

static void directories_are_read_as_they_were_written(void **state) {
    const Tensors *tensors = (const Tensors *)*state;
    for (int c = 0; c < CASE_COUNT; c++) {
        Fixture fixture;
        Error error;
        char directory[] = "/tmp/test_families_dir.XXXXXX", model[64], command[128];
        open_case(&fixture, tensors, CASES[c]);
        assert_non_null(mkdtemp(directory));
        snprintf(model, sizeof model, "%s/model", directory);
        if (!hf_model_save(model, &fixture.config, &fixture.table, fixture.parameters, NULL, NULL, NULL,
                           &error) ||
            !read_directory(model, &fixture, &error)) {
            fail_msg("%s", error.text);
        }
        snprintf(command, sizeof command, "rm %s/checksums.json", model); // config.json is to change
        assert_int_equal(system(command), 0);
        check_refusal(model, &fixture, "tie_word_embeddings", !fixture.config.tied,
                      fixture.config.tied ? "lm_head.weight is missing"
                                          : "lm_head.weight differs from model.embed_tokens");
        if (fixture.config.mlp_biases && fixture.config.qkv_biases) {
            check_refusal(model, &fixture, "attention_bias", false, "proj.bias is unknown");
            check_refusal(model, &fixture, "mlp_bias", false, "proj.bias is unknown");
        }
        snprintf(command, sizeof command, "rm -r %s", directory);
        assert_int_equal(system(command), 0);
        close_case(&fixture);
    }
}

// ---- config.json and the presets ------------------------------------------------------

static void presets_have_the_published_numbers_of_parameters(void **state) {
    (void)state;
    static const struct {
        const char *name;
        size_t parameters;
        double theta, epsilon, deviation;
    } presets[] = {
        {"smollm2-135M", 134515008, 1e5, 1e-5, 0.0416666667}, {"smollm2-360M", 361821120, 1e5, 1e-5, 0.02},
        {"tinyllama-1.1B", 1100048384, 1e4, 1e-5, 0.02},      {"llama-3.2-1B", 1235814400, 5e5, 1e-5, 0.02},
        {"qwen2.5-0.5B", 494032768, 1e6, 1e-6, 0.02},         {"qwen3-0.6B", 596049920, 1e6, 1e-6, 0.02}};
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++) {
        ModelConfig config, again;
        ParameterTable table;
        Error error;
        OptimizerTensor tensors[1024];
        assert_true(model_find(presets[i].name, &config, &error));
        parameter_table_make(&config, &table);
        assert_true(table.parameter_count == presets[i].parameters);
        assert_true(config.rotary.theta == presets[i].theta && config.epsilon == presets[i].epsilon);
        assert_close(config.deviation, presets[i].deviation, 1e-9, "deviation");
        const RotaryPositions *rotary = &config.rotary;
        bool scaled = strcmp(presets[i].name, "llama-3.2-1B") == 0;
        assert_true(rotary->factor == (scaled ? 32 : 0) && rotary->original == (scaled ? 8192 : 0));
        assert_true(rotary->low == (scaled ? 1 : 0) && rotary->high == (scaled ? 4 : 0));
        // Muon steps W_q, W_k, W_v, W_o, W_gate, W_up and W_down each by itself.
        int matrices = 0, count = training_tensors(&table, false, true, tensors);
        for (int t = 0; t < count; t++) { matrices += tensors[t].rows > 0; }
        assert_int_equal(matrices, 7 * config.layers);
        json_t *root = hf_model_describe(&config, NULL);
        config_read(root, &again, &error);
        memcpy(again.name, config.name, sizeof again.name);
        again.deviation = config.deviation;
        assert_memory_equal(&again, &config, sizeof config);
        json_decref(root);
        parameter_table_free(&table);
    }
}

static void a_written_configuration_is_the_same(void **state) {
    const Tensors *tensors = (const Tensors *)*state;
    for (int c = 0; c < CASE_COUNT; c++) {
        Fixture fixture;
        ModelConfig again;
        Error error;
        open_case(&fixture, tensors, CASES[c]);
        json_t *root = hf_model_describe(&fixture.config, NULL);
        config_read(root, &again, &error);
        assert_memory_equal(&again, &fixture.config, sizeof again);
        // Each of both spellings of positions is enough.
        for (int i = 0; i < 2; i++) {
            json_t *half = json_copy(root);
            json_object_del(half, i == 0 ? "rope_parameters" : "rope_scaling");
            if (i == 1) { json_object_del(half, "rope_theta"); }
            config_read(half, &again, &error);
            assert_memory_equal(&again, &fixture.config, sizeof again);
            json_decref(half);
        }
        // Older versions of transformers read max_window_layers, and no layer_types.
        if (strcmp(CASES[c], "qwen2 windows") == 0) {
            json_object_del(root, "layer_types");
            config_read(root, &again, &error);
            assert_memory_equal(&again, &fixture.config, sizeof again);
        }
        json_decref(root);
        close_case(&fixture);
    }
}

// Messages and logs name a model by its path, or by the end of a long one.
static void a_model_has_the_end_of_its_path_as_its_name(void **state) {
    (void)state;
    static const size_t lengths[] = {30, 61, 62, 63, 64, 65, 100};
    json_t *root = json_pack("{s:s, s:i, s:i, s:i, s:i, s:i, s:i}", "model_type", "llama", "hidden_size", 8,
                             "num_attention_heads", 2, "num_hidden_layers", 1, "intermediate_size", 10,
                             "vocab_size", 20, "max_position_embeddings", 9);
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        char path[128] = "/tmp/test_families.";
        ModelConfig config;
        Error error;
        size_t kept = sizeof config.name - 1;
        while (strlen(path) < lengths[i]) {
            strcat(path, (const char[]){(char)('a' + strlen(path) % 26), '\0'});
        }
        assert_int_equal(json_dump_file(root, path, 0), 0);
        if (!model_config_load(path, &config, &error)) { fail_msg("%s", error.text); }
        assert_string_equal(config.name, path + (lengths[i] > kept ? lengths[i] - kept : 0));
        unlink(path);
    }
    json_decref(root);
}

// Reads the config.json of a case with other values for the keys of `change`.
static void read_changed(const Tensors *tensors, const char *of, const char *change, ModelConfig *config,
                         Error *error) {
    json_t *about = json_loads(tensors_text(tensors, of), 0, NULL), *keys = json_loads(change, 0, NULL);
    assert_non_null(keys);
    json_object_update(json_object_get(about, "config"), keys);
    config_read(json_object_get(about, "config"), config, error);
    json_decref(about);
    json_decref(keys);
}

static const struct {
    const char *of, *change, *error; // change: keys of config.json; error: NULL: it is accepted
} key_cases[] = {
    {"llama 3", "{\"quantization_config\": {\"bits\": 4}}", "\"quantization_config\""},
    {"llama 3", "{\"text_config\": {}}", "\"text_config\""},
    {"llama 3", "{\"final_logit_softcapping\": 30.0}", "\"final_logit_softcapping\""},
    {"llama 3", "{\"attn_logit_softcapping\": 50.0}", "\"attn_logit_softcapping\""},
    {"llama 3", "{\"model_type\": \"gemma2\"}", "\"model_type\""},
    {"llama 3", "{\"model_type\": \"llama4\"}", "\"model_type\" is \"llama4\" and must be"},
    {"llama 3", "{\"model_type\": \"lla\"}", "\"model_type\" is \"lla\" and must be"},
    {"qwen2 windows", "{\"model_type\": \"qwen2_moe\"}", "\"model_type\" is \"qwen2_moe\" and must be"},
    {"qwen3 biases", "{\"model_type\": \"qwen3_moe\"}", "\"model_type\" is \"qwen3_moe\" and must be"},
    {"llama 3", "{\"hidden_act\": \"gelu\"}", "\"hidden_act\" must be \"silu\""},
    {"llama 3", "{\"partial_rotary_factor\": 0.5}", "\"partial_rotary_factor\" must be 1"},
    {"llama 3", "{\"rope_scaling\": {\"type\": \"longrope\"}}",
     "\"rope_scaling\": \"rope_type\" is \"longrope\""},
    {"llama 3", "{\"rope_scaling\": null, \"rope_parameters\": {\"type\": \"longrope\"}}",
     "\"rope_parameters\": \"rope_type\" is \"longrope\""},
    {"llama 3", "{\"rope_scaling\": {}, \"rope_parameters\": {\"rope_type\": 7}}",
     "\"rope_parameters\": \"rope_type\" is \"\" and must be"},
    {"llama 3", "{\"rope_parameters\": {\"rope_type\": \"mrope\"}}",
     "\"rope_parameters\": \"rope_type\" is \"mrope\""},
    {"llama 3", "{\"rope_parameters\": {\"rope_type\": \"linear\"}}", "\"factor\""},
    {"llama 3", "{\"rope_parameters\": {\"rope_type\": \"linear\", \"factor\": -1}}", "\"factor\""},
    {"llama 3", "{\"rope_parameters\": {\"rope_type\": \"linear\", \"factor\": 0}}", "\"factor\""},
    {"llama 3", "{\"rope_parameters\": {\"partial_rotary_factor\": 0.5}}", "\"partial_rotary_factor\""},
    {"llama 3", "{\"rope_parameters\": {\"rope_theta\": 0.5}}", "\"rope_theta\" must be above 1"},
    {"llama 3", "{\"rope_parameters\": {\"rope_theta\": 1e13}}", "\"rope_theta\" must be a number"},
    {"llama 3", "{\"rope_parameters\": {\"rope_type\": \"llama3\", \"factor\": 2, \"high_freq_factor\": 4}}",
     "\"low_freq_factor\""},
    {"llama 3", "{\"rope_parameters\": {\"rope_type\": \"llama3\", \"factor\": 2, \"low_freq_factor\": 1}}",
     "\"high_freq_factor\""},
    {"llama 3",
     "{\"rope_parameters\": {\"rope_type\": \"llama3\", \"factor\": 2, \"low_freq_factor\": 4, "
     "\"high_freq_factor\": 4}}",
     "\"high_freq_factor\" must be above"},
    {"llama 3", "{\"num_hidden_layers\": 97}", "\"num_hidden_layers\" must be a whole number"},
    {"llama 3", "{\"num_key_value_heads\": 3}", "num_key_value_heads 3"},
    {"llama 3", "{\"head_dim\": 7}", "\"head_dim\" 7 must be even"},
    {"llama 3", "{\"hidden_size\": 34, \"head_dim\": 8}", "hidden_size 34 must be a multiple"},
    {"llama 3", "{\"hidden_size\": 8192, \"head_dim\": null}", "\"head_dim\" 2048 must be even"},
    {"mistral window", "{\"hidden_size\": 34, \"head_dim\": null}", "hidden_size 34 must be a multiple"},
    {"mistral window", "{\"sliding_window\": 0}", "\"sliding_window\""},
    {"qwen2 windows", "{\"layer_types\": [\"full_attention\", \"chunked_attention\", \"full_attention\"]}",
     "\"layer_types\""},
    {"qwen2 windows", "{\"layer_types\": [\"full_attention\"]}", "\"layer_types\""},
    {"qwen2 windows",
     "{\"layer_types\": [\"full_attention\", \"full_attention\", \"full_attention\", "
     "\"full_attention\"]}",
     "\"layer_types\""},
    {"llama 3", "{\"pretraining_tp\": 2, \"rope_interleaved\": false, \"rope_scaling\": null}", NULL},
    {"llama 3", "{\"quantization_config\": null, \"sliding_window\": 5}", NULL},
    {"llama 3", "{\"partial_rotary_factor\": null, \"text_config\": false, \"hidden_act\": \"silu\"}", NULL},
    {"llama 3", "{\"partial_rotary_factor\": 1.0, \"rms_norm_eps\": 0.1}", NULL},
    {"llama 3", "{\"rms_norm_eps\": 0}", "\"rms_norm_eps\" must be a number above 0, at most 0.1"},
    {"llama 3", "{\"rms_norm_eps\": 0.11}", "\"rms_norm_eps\" must be a number above 0, at most 0.1"},
    {"llama 3", "{\"rms_norm_eps\": 1e-60}", "\"rms_norm_eps\" must be a number above 0"}, // 0 as a float
    {"mistral window", "{\"hidden_size\": 34, \"head_dim\": 8}", NULL},
};

static void what_a_page_cannot_compute_is_refused_by_its_key(void **state) {
    const Tensors *tensors = (const Tensors *)*state;
    for (size_t i = 0; i < sizeof key_cases / sizeof key_cases[0]; i++) {
        ModelConfig config;
        Error error;
        read_changed(tensors, key_cases[i].of, key_cases[i].change, &config, &error);
        bool named = key_cases[i].error == NULL ? error.text[0] == '\0'
                                                : strstr(error.text, key_cases[i].error) != NULL;
        if (!named) { fail_msg("%s: \"%s\"", key_cases[i].change, error.text); }
    }
}

static void a_key_that_no_page_can_guess_must_be_there(void **state) {
    (void)state;
    static const char *const needed[] = {"num_hidden_layers", "hidden_size", "num_attention_heads",
                                         "intermediate_size", "vocab_size",  "max_position_embeddings"};
    static const char *const types[] = {"llama", "mistral", "qwen2", "qwen3"};
    for (size_t i = 0; i < 4 * 6; i++) {
        json_t *root = json_pack("{s:s}", "model_type", types[i / 6]);
        ModelConfig config;
        Error error;
        char expected[64];
        for (size_t k = 0; k < 6; k++) {
            if (k != i % 6) { json_object_set_new(root, needed[k], json_integer(8)); }
        }
        config_read(root, &config, &error);
        snprintf(expected, sizeof expected, "\"%s\" is not given", needed[i % 6]);
        if (strstr(error.text, expected) == NULL) { fail_msg("%s: \"%s\"", expected, error.text); }
        json_decref(root);
    }
}

// What no case of the reference depends on.
static void keys_mean_what_they_say(void **state) {
    const Tensors *tensors = (const Tensors *)*state;
    ModelConfig config;
    Error error;
    read_changed(tensors, "mistral window", "{\"num_key_value_heads\": null, \"sliding_window\": null}",
                 &config, &error);
    assert_true(config.kv_heads == config.heads && config.window == 0 && !config.local[0]);
    read_changed(tensors, "qwen2 windows", "{\"max_window_layers\": null, \"layer_types\": null}", &config,
                 &error);
    assert_true(config.window > 0 && !config.local[0] && !config.local[2]); // from layer 28 on
    read_changed(tensors, "qwen2 windows", "{\"use_sliding_window\": false}", &config, &error);
    assert_true(config.window == 0 && !config.local[1]);
    read_changed(tensors, "qwen2 windows", "{\"max_window_layers\": 1, \"layer_types\": null}", &config,
                 &error);
    assert_true(!config.local[0] && config.local[1] && config.local[2]);
    read_changed(tensors, "llama 3", "{\"attention_dropout\": 0.1}", &config, &error);
    assert_true(config.dropout == 0.1 && config.epsilon == 1e-6);
    read_changed(tensors, "llama 3",
                 "{\"rope_parameters\": null, \"rope_scaling\": null, \"rope_theta\": 500}", &config, &error);
    assert_true(config.rotary.theta == 500);
    read_changed(tensors, "llama 3",
                 "{\"rope_parameters\": {\"type\": \"linear\", \"factor\": 3}, \"rope_scaling\": {}}",
                 &config, &error);
    assert_true(config.rotary.kind == ROTARY_LINEAR && config.rotary.factor == 3);
    read_changed(tensors, "llama 3",
                 "{\"rope_scaling\": null, \"rope_parameters\": {\"rope_type\": \"llama3\", \"factor\": 2, "
                 "\"low_freq_factor\": 1, \"high_freq_factor\": 4}}",
                 &config, &error);
    assert_true(config.rotary.original == config.positions);
    read_changed(tensors, "llama 3",
                 "{\"rope_scaling\": null, \"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 2}}",
                 &config, &error);
    assert_true(config.rotary.original == config.positions && config.rotary.low == 1 &&
                config.rotary.high == 32);
    json_t *root = hf_model_describe(&config, NULL);
    assert_true(json_number_value(json_object_get(root, "rope_theta")) == config.rotary.theta);
    json_decref(root);
    read_changed(tensors, "qwen3 biases", "{}", &config, &error);
    root = hf_model_describe(&config, NULL);
    assert_null(json_object_get(root, "q_norm")); // no key, but what the family has
    json_decref(root);
}

// By the formulas of positions.h at their borders, for heads of 8 channels.
static void positions_turn_by_the_formulas_of_their_kind(void **state) {
    const Tensors *tensors = (const Tensors *)*state;
    const double grown = 1 + 0.1 * log(4);
    const struct {
        const char *parameters;
        double growth;
        int pair;
        double slower; // its frequency, as a part of what it is by default
    } cases[] = {
        {"\"rope_type\": \"yarn\", \"factor\": 4, \"mscale\": 0.7", grown, 0, 1},
        {"\"rope_type\": \"yarn\", \"factor\": 4, \"mscale_all_dim\": 0.4", grown, 0, 1},
        {"\"rope_type\": \"yarn\", \"factor\": 4, \"attention_factor\": 1.3", 1.3, 0, 1},
        {"\"rope_type\": \"yarn\", \"factor\": 0.5", 1, 0, 1},
        // A wave of 108.8 positions, beyond the border of 60.
        {"\"rope_type\": \"llama3\", \"rope_theta\": 300, \"factor\": 4, \"low_freq_factor\": 1, "
         "\"high_freq_factor\": 4, \"original_max_position_embeddings\": 60.9",
         1, 2, 0.25},
        // Ramps from 2.6, cut down, to 5.6, cut up; from 0 to 10.4, cut to 7; from 0 to 0.
        {"\"rope_type\": \"yarn\", \"rope_theta\": 100, \"factor\": 4, "
         "\"original_max_position_embeddings\": 4096",
         grown, 3, 0.25 / 4 + 0.75},
        {"\"rope_type\": \"yarn\", \"rope_theta\": 100, \"factor\": 4, \"beta_fast\": 1e5, "
         "\"original_max_position_embeddings\": 1000000",
         grown, 3, 3.0 / 7 / 4 + 4.0 / 7},
        {"\"rope_type\": \"yarn\", \"factor\": 4, \"original_max_position_embeddings\": 4", grown, 1, 0.25},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ModelConfig config;
        Error error;
        char change[256];
        float turns[8];
        snprintf(change, sizeof change, "{\"rope_scaling\": null, \"rope_parameters\": {%s}}",
                 cases[i].parameters);
        read_changed(tensors, "llama 3", change, &config, &error);
        assert_int_equal(model_head_size(&config), 8);
        int pair = cases[i].pair;
        double expected = cases[i].slower * pow(config.rotary.theta, -pair / 4.0);
        float f = positions_frequency(&config.rotary, 8, pair);
        assert_close((double)f / expected, 1, 1e-5, cases[i].parameters);
        assert_close(positions_growth(&config.rotary), cases[i].growth, 1e-9, cases[i].parameters);
        assert_true(config.rotary.original == floor(config.rotary.original));
        // Angles are rounded to fp32 also where that is coarse.
        positions_turn(&config, 1000003, 1, turns);
        assert_true(turns[pair] == (float)(positions_growth(&config.rotary) * cos((double)(1000003.0f * f))));
    }
}

// A bias of queries, keys and values is one vector to the passes, and so is that of gate and up.
static void half_of_a_joined_bias_cannot_be_frozen(void **state) {
    static const char *const biases[] = {"q_proj.bias", "v_proj.bias", "up_proj.bias"};
    ModelConfig config;
    Error error;
    read_changed((const Tensors *)*state, "llama one key head", "{}", &config, &error);
    for (size_t i = 0; i < 3; i++) {
        const TrainedChoice choice = {.freeze = biases[i], .adapted = ""};
        TrainedPart part;
        assert_false(trained_part_make(&part, &config, &choice, &error));
        if (strstr(error.text, "are one matrix here") == NULL) { fail_msg("%s", error.text); }
    }
}

static void absent_keys_have_the_defaults_of_their_family(void **state) {
    (void)state;
    static const struct {
        const char *type;
        int kv_heads, head, window;
        bool biases, norms;
    } cases[] = {{"llama", 32, 2, 0, false, false},
                 {"mistral", 8, 2, 4096, false, false},
                 {"qwen2", 32, 2, 0, true, false},
                 {"qwen3", 32, 128, 0, false, true}};
    for (size_t i = 0; i < 4; i++) {
        json_t *root = json_pack("{s:s, s:i, s:i, s:i, s:i, s:i, s:i}", "model_type", cases[i].type,
                                 "hidden_size", 64, "num_attention_heads", 32, "num_hidden_layers", 2,
                                 "intermediate_size", 10, "vocab_size", 20, "max_position_embeddings", 9000);
        ModelConfig config = config_of(root);
        assert_int_equal(config.kv_heads, cases[i].kv_heads);
        assert_int_equal(model_head_size(&config), cases[i].head);
        assert_true(config.window == cases[i].window && config.local[1] == (cases[i].window > 0));
        assert_true(config.qkv_biases == cases[i].biases && config.head_norms == cases[i].norms);
        assert_true(!config.tied && !config.out_biases && !config.mlp_biases && config.epsilon == 1e-6);
        assert_true(config.rotary.theta == 1e4 && config.rotary.kind == ROTARY_DEFAULT);
        json_decref(root);
    }
}

int main(void) {
    Tensors tensors;
    int file = mkstemp(scratch_file);
    if (file < 0) { abort(); }
    close(file);
    tensors = tensors_open("families");
    const char *name;
    json_t *about;
    json_object_foreach(json_object_get(tensors.header, "__metadata__"), name, about) {
        if (CASE_COUNT == MOST_CASES) { abort(); }
        CASES[CASE_COUNT++] = name;
    }
    if (CASE_COUNT < FEWEST_CASES) { abort(); } // tests of no case would pass
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_prestate(families_are_those_of_transformers, &tensors),
        cmocka_unit_test_prestate(threads_and_computing_again_change_no_bit, &tensors),
        cmocka_unit_test_prestate(decoding_gives_the_logits_of_the_whole_text, &tensors),
        cmocka_unit_test_prestate(a_document_sees_nothing_of_the_one_before_it, &tensors),
        cmocka_unit_test_prestate(adapters_are_those_of_the_merged_model, &tensors),
        cmocka_unit_test_prestate(what_stays_trained_has_the_gradients_of_the_whole_model, &tensors),
        cmocka_unit_test_prestate(directories_are_read_as_they_were_written, &tensors),
        cmocka_unit_test(presets_have_the_published_numbers_of_parameters),
        cmocka_unit_test_prestate(a_written_configuration_is_the_same, &tensors),
        cmocka_unit_test_prestate(what_a_page_cannot_compute_is_refused_by_its_key, &tensors),
        cmocka_unit_test(absent_keys_have_the_defaults_of_their_family),
        cmocka_unit_test(a_model_has_the_end_of_its_path_as_its_name),
        cmocka_unit_test(a_key_that_no_page_can_guess_must_be_there),
        cmocka_unit_test_prestate(keys_mean_what_they_say, &tensors),
        cmocka_unit_test_prestate(positions_turn_by_the_formulas_of_their_kind, &tensors),
        cmocka_unit_test_prestate(half_of_a_joined_bias_cannot_be_frozen, &tensors),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    tensors_close(&tensors);
    unlink(scratch_file);
    return failed;
}
