// test_cuda_model.cu: the whole model on the device against the CPU's, and against
// itself.
//
// Kernels have tests of their own. These test how the model combines them: where a layer
// finds its activations, what is computed again, when weights are converted, in which
// order gradients are added. Before its first pass all activations and all workspace of a
// model on the device are NaN, so that the pass reads nothing that it has not computed.
// Bounds are about twice the worst of fifty runs.
#include "test/cuda/cuda_kernels.h"

#include "models/families.h"
#include "program/training_problem.h"
#include "scheduler/optimizer.h"
#include "test/harness.h"
#include "test/model_loss.h"
#include "test/sgd.h"

typedef struct Shape {
    int layers, channels, heads, inner, window, vocabulary, B, T;
    bool documents;            // attention stays in them; each is a few tokens, and begins with the last one
    const ModelFamily *family; // NULL: a GPT; the rest is for the others
    int kv_heads, head_channels;
    bool biases; // of a Llama, all of them, and its head is a tensor of its own
} Shape;

// Heads of 16 columns (tiles of tensor cores), of 20, and rows that are not aligned.
// Layers 1, 3, ... see a window; window 0: it is a GPT-2.
static const Shape shapes[] = {
    {2, 32, 2, 128, 5, 61, 2, 9, false}, {2, 40, 2, 160, 5, 61, 1, 19, false},
    {3, 60, 3, 75, 4, 61, 1, 13, false}, {2, 32, 2, 96, 0, 61, 1, 19, false},
    {2, 30, 3, 75, 0, 61, 2, 7, false},  {2, 32, 2, 96, 5, 61, 2, 19, true},
    {2, 30, 3, 75, 0, 61, 2, 13, true},
};
// With rotary positions: as many heads of keys, one, and between; heads that together are wider
// than the rest; rows that are not aligned.
static const Shape families[] = {
    {2, 64, 4, 96, 0, 61, 2, 9, false, &llama_family, 2, 16, true},
    {2, 40, 2, 160, 0, 61, 1, 19, true, &llama_family, 2, 20, false},
    {2, 48, 3, 80, 5, 61, 1, 19, false, &mistral_family, 1, 16, false},
    {2, 32, 4, 75, 5, 61, 1, 13, false, &qwen2_family, 2, 16, false},
    {2, 32, 4, 128, 0, 61, 2, 19, true, &qwen3_family, 2, 16, false},
    {2, 30, 3, 75, 4, 61, 1, 13, false, &qwen3_family, 1, 10, false},
};
static const Shape small = {2, 32, 2, 50, 3, 29, 1, 5, false},
                   real = {2, 768, 12, 3072, 256, 50257, 2, 1024, false},
                   real_family = {2,     1024,          16, 3072, 512,  50257, 2, 1024,
                                  false, &qwen3_family, 8,  128,  false};
enum { SHAPES = sizeof shapes / sizeof *shapes, FAMILIES = sizeof families / sizeof *families };

static Random test_random;
static char test_name[128]; // describes the current case in a failure

// ---- What both sides start from -------------------------------------------------------

typedef struct Inputs {
    ModelConfig config;
    ParameterTable table; // of what is trained
    TrainedPart part;     // frozen_count 0: all of it
    int B, T;
    bool fp8; // models on the device have products in FP8
    float *parameters;
    float *frozen; // (part.frozen_count)
    int32_t *tokens, *targets;
    uint32_t separator;  // ModelSettings::separator; 0: NULL
    Precision precision; // of models on the device
    double *rounding;    // (table.count), of allowed_by_rounding; NULL: it is not asked
} Inputs;

static void inputs_configure(ModelConfig *config, const Shape *shape) {
    memset(config, 0, sizeof *config);
    config->family = shape->family != NULL ? shape->family
                     : shape->window > 0   ? &gpt_neo_family
                                           : &gpt2_family;
    if (shape->family != NULL) {
        config_json_fill(config);
        config->rotary.theta = 1e4;
        config->kv_heads = shape->kv_heads;
        config->head_channels = shape->head_channels;
        config->tied = !shape->biases;
        config->out_biases = config->mlp_biases = shape->biases;
        config->qkv_biases = config->qkv_biases || shape->biases;
    } else {
        config->scaled_scores = shape->window == 0;
    }
    config->layers = shape->layers;
    config->channels = shape->channels;
    config->heads = shape->heads;
    config->mlp_channels = shape->inner;
    config->window = shape->window;
    config->positions = shape->T + 3;
    config->vocabulary = shape->vocabulary;
    config->epsilon = 1e-5;
    for (int l = 0; l < shape->layers; l++) { config->local[l] = shape->window > 0 && l % 2 == 1; }
}

// Random inputs. Parameters are rounded to bf16, so that both precisions start from the
// same. The last target always counts.
static void inputs_open(Inputs *inputs, const Shape *shape) {
    int rows = shape->B * shape->T;
    memset(inputs, 0, sizeof *inputs);
    inputs_configure(&inputs->config, shape);
    parameter_table_make(&inputs->config, &inputs->table);
    inputs->B = shape->B;
    inputs->T = shape->T;
    inputs->separator = shape->documents ? (uint32_t)shape->vocabulary : 0;
    // What SwiGLU adds is a product: with smaller matrices all positions would be nearly the
    // same, and the gradients of queries and keys little but rounding.
    float size = shape->family != NULL ? 10.0f : 5.0f;
    inputs->parameters = host_normals(&test_random, inputs->table.parameter_count, 0.1);
    for (int i = 0; i < inputs->table.count; i++) {
        const ParameterInfo *entry = &inputs->table.entries[i];
        float scale = entry->is_matrix ? size / sqrtf((float)shape->channels) : 1.0f,
              *values = inputs->parameters + entry->offset;
        for (size_t j = 0; j < entry->count; j++) { values[j] = entry->fill + scale * values[j]; }
    }
    host_round(inputs->parameters, inputs->table.parameter_count, PRECISION_BF16);
    inputs->tokens = (int32_t *)malloc((size_t)rows * sizeof(int32_t));
    inputs->targets = (int32_t *)malloc((size_t)rows * sizeof(int32_t));
    for (int i = 0; i < rows; i++) {
        inputs->tokens[i] = (int32_t)(random_uniform(&test_random) * shape->vocabulary);
        if (shape->documents && i % 7 == 5) { inputs->tokens[i] = shape->vocabulary - 1; }
        bool counts = i == rows - 1 || random_uniform(&test_random) < 0.8;
        inputs->targets[i] = counts ? (int32_t)(random_uniform(&test_random) * shape->vocabulary) : -1;
    }
}

// From now on only a part is trained. Adapters are random.
static void inputs_choose_part(Inputs *inputs, const TrainedChoice *choice) {
    TrainedPart *part = &inputs->part;
    Error error = {""};
    if (!trained_part_make(part, &inputs->config, choice, &error)) { fail_msg("%s", error.text); }
    float *trained = host_normals(&test_random, part->table.parameter_count, 0.1);
    inputs->frozen = (float *)malloc(part->frozen_count * sizeof(float));
    for (int i = 0; i < part->model.count; i++) {
        const ParameterInfo *entry = &part->model.entries[i];
        const TensorPlace *place = &part->places[i];
        bool whole = place->kind == TRAINED_WHOLE;
        memcpy(whole ? trained + place->trained : inputs->frozen + place->frozen,
               inputs->parameters + entry->offset, entry->count * sizeof(float));
    }
    host_round(trained, part->table.parameter_count, PRECISION_BF16);
    parameter_table_free(&inputs->table);
    free(inputs->parameters);
    inputs->table = part->table;
    inputs->parameters = trained;
}

static void inputs_close(Inputs *inputs) {
    if (inputs->frozen != NULL) {
        trained_part_free(&inputs->part);
    } else {
        parameter_table_free(&inputs->table);
    }
    free(inputs->rounding);
    free(inputs->frozen);
    free(inputs->parameters);
    free(inputs->tokens);
    free(inputs->targets);
}

// ---- A model with its memory, here or on the device -----------------------------------

typedef struct Machine {
    const Inputs *inputs;
    TrainedPart part; // that of the inputs, with frozen parameters of its own
    Arena arena;
    Model model;
    Optimizer optimizer;
    OptimizerTensor ranges[256];
    Stream stream; // kernels are put into its queue by the calling thread
    float *parameters, *gradients;
    float loss;     // of the latest pass
    float *results; // (parameter_count): its gradients, for the host
} Machine;

// Threads of the CPU, whose bits do not depend on their number.
static int cpu_threads(void) { return cuda_small_shapes() ? 1 : 8; }

static ModelSettings settings_on_cpu(const Inputs *inputs) {
    ModelSettings settings = model_on_cpu(inputs->B, inputs->T, cpu_threads());
    settings.separator = inputs->separator > 0 ? &inputs->separator : NULL;
    return settings;
}

static ModelSettings settings_on_device(const Inputs *inputs, Precision precision, Recompute recompute) {
    ModelSettings settings = settings_on_cpu(inputs);
    settings.threads = 0;
    settings.on_gpu = true;
    settings.precision = precision;
    settings.recompute = recompute;
    settings.given_weights = false;
    settings.fp8 = inputs->fp8;
    return settings;
}

static size_t machine_bytes(const Machine *machine) { return machine->model.parameter_count * sizeof(float); }

// Epsilon is large, so that a step is about proportional to the gradient. Otherwise
// elements near 0 would step by their sign.
static void machine_reserve_optimizer(Machine *machine) {
    const ParameterTable *table = &machine->inputs->table;
    OptimizerSettings settings = {.beta1 = 0.9,
                                  .beta2 = 0.95,
                                  .epsilon = 1e-1,
                                  .weight_decay = 0.1,
                                  .tensors = machine->ranges,
                                  .tensor_count = training_tensors(table, false, false, machine->ranges)};
    Layout layout = optimizer_whole(table->parameter_count);
    optimizer_reserve(&machine->optimizer, &machine->arena, &settings, &layout, 0, false);
}

static void machine_poison(Machine *machine) {
    const Arena *arena = &machine->arena;
    for (int i = 0; i < arena->count; i++) {
        const Reservation *reservation = &arena->reservations[i];
        MemoryClass kind = reservation->row.memory_class;
        if (kind != MEMORY_ACTIVATIONS && kind != MEMORY_WORKSPACE) { continue; }
        if (reservation->on_host) {
            memset(arena->host_base + reservation->offset, 0xff, reservation->row.bytes);
        } else {
            gpu_fill(machine->stream.queue, arena->base + reservation->offset, 0xff, reservation->row.bytes);
        }
    }
}

static void machine_set_parameters(Machine *machine, const float *parameters) {
    stream_copy(&machine->stream, machine->parameters, parameters, machine_bytes(machine));
    stream_settle(&machine->stream);
}

// The frozen parameters in the precision of the model.
static void machine_set_frozen(Machine *machine) {
    size_t count = machine->part.frozen_count;
    Precision precision = machine->stream.precision;
    Real *values = (Real *)malloc(count * sizeof(float));
    for (size_t i = 0; i < count; i++) { real_store(values, i, machine->inputs->frozen[i], precision); }
    stream_copy(&machine->stream, machine->part.frozen, values, count * precision_bytes(precision));
    stream_settle(&machine->stream);
    free(values);
}

static void machine_open(Machine *machine, const Inputs *inputs, ModelSettings settings) {
    Error error;
    memset(machine, 0, sizeof *machine);
    machine->inputs = inputs;
    machine->part = inputs->part;
    if (inputs->frozen != NULL) { settings.part = &machine->part; }
    machine->arena.on_gpu = settings.on_gpu;
    size_t bytes = inputs->table.parameter_count * sizeof(float);
    arena_reserve(&machine->arena, MEMORY_PARAMETERS, "parameters", bytes, &machine->parameters);
    arena_reserve(&machine->arena, MEMORY_GRADIENTS, "gradients", bytes, &machine->gradients);
    model_reserve(&machine->model, &machine->arena, &inputs->config, &settings);
    machine_reserve_optimizer(machine);
    assert_true(arena_commit(&machine->arena, &error));
    machine->stream.precision = settings.precision;
    if (settings.on_gpu) {
        machine->stream.queue = gpu_queue_create(false);
        gemm_open(&machine->stream, machine->model.gemm_workspace);
        machine_poison(machine);
    } else {
        machine->stream.pool = thread_pool_create(cpu_threads(), true);
    }
    machine->results = (float *)malloc(bytes);
    machine_set_parameters(machine, inputs->parameters);
    machine_set_frozen(machine);
}

static void machine_close(Machine *machine) {
    gemm_close(&machine->stream);
    if (machine->stream.queue != NULL) { gpu_queue_destroy(machine->stream.queue); }
    if (machine->stream.pool != NULL) { thread_pool_destroy(machine->stream.pool); }
    arena_release(&machine->arena);
    free(machine->results);
}

static void machine_add_gradients(Machine *machine, const Pace *pace) {
    const Inputs *inputs = machine->inputs;
    machine->loss = model_loss_and_gradients(&machine->model, &machine->stream, machine->parameters,
                                             machine->gradients, inputs->tokens, inputs->targets, pace);
    stream_copy(&machine->stream, machine->results, machine->gradients, machine_bytes(machine));
    stream_settle(&machine->stream);
}

static void machine_poison_gradients(Machine *machine) {
    if (machine->stream.queue != NULL) {
        gpu_fill(machine->stream.queue, machine->gradients, 0xff, machine_bytes(machine));
    } else {
        memset(machine->gradients, 0xff, machine_bytes(machine));
    }
}

// Begins a sum, over NaNs.
static void machine_pass(Machine *machine, const Pace *pace) {
    Pace beginning = {};
    if (pace != NULL) { beginning = *pace; }
    beginning.begins = true;
    machine_poison_gradients(machine);
    machine_add_gradients(machine, &beginning);
}

static float machine_loss(Machine *machine) {
    const Inputs *inputs = machine->inputs;
    return model_loss(&machine->model, &machine->stream, machine->parameters, inputs->tokens,
                      inputs->targets);
}

static Machine *machine_of_cpu(const Inputs *inputs) {
    Machine *machine = (Machine *)malloc(sizeof *machine);
    machine_open(machine, inputs, settings_on_cpu(inputs));
    return machine;
}

// The CPU's in bf16, which shows what rounding alone does.
static Machine *machine_that_rounds(const Inputs *inputs) {
    Machine *machine = (Machine *)malloc(sizeof *machine);
    ModelSettings settings = settings_on_cpu(inputs);
    settings.precision = PRECISION_BF16;
    settings.given_weights = false;
    machine_open(machine, inputs, settings);
    return machine;
}

static Machine *machine_of_device(const Inputs *inputs, Precision precision, Recompute recompute) {
    Machine *machine = (Machine *)malloc(sizeof *machine);
    machine_open(machine, inputs, settings_on_device(inputs, precision, recompute));
    return machine;
}

static void machine_free(Machine *machine) {
    machine_close(machine);
    free(machine);
}

// ---- Comparisons ----------------------------------------------------------------------

// Queries and keys of attention, and their adapters: their gradients are differences of
// products, and the rounding of the products remains.
static bool is_query_or_key(const ParameterInfo *entry) {
    static const char *const adapters[3] = {".q_proj.lora", ".k_proj.lora", ".c_attn.lora"};
    for (int i = 0; i < 3; i++) {
        if (strstr(entry->name, adapters[i]) != NULL) { return true; }
    }
    static const int roles[6] = {TENSOR_Q,      TENSOR_K,      TENSOR_QKV_BIAS,
                                 TENSOR_K_BIAS, TENSOR_Q_NORM, TENSOR_K_NORM};
    for (int i = 0; i < 6; i++) {
        if (entry->role == roles[i]) { return true; }
    }
    return false;
}

// The root mean square of the weight's gradient where `entry` is a key's bias, otherwise 0. The
// scores of a query change by the same amount for all keys, but for the rotation, so the terms of
// this bias's gradient nearly cancel. The weight's gradient has the same terms, times inputs of
// about 1, that do not cancel.
static double size_of_terms(const Inputs *inputs, const float *gradients, const ParameterInfo *entry) {
    const ParameterInfo *weight = entry;
    if (entry->role != TENSOR_K_BIAS) { return 0; }
    while (weight > inputs->table.entries && !(weight->role == TENSOR_K && weight->layer == entry->layer)) {
        weight--;
    }
    assert_int_equal(weight->role, TENSOR_K);
    double squares = 0;
    for (size_t i = 0; i < weight->count; i++) {
        squares += (double)gradients[weight->offset + i] * gradients[weight->offset + i];
    }
    return sqrt(squares / (double)weight->count);
}

// With a real vocabulary and a thousand positions some gradients nearly cancel, those of vectors
// most: bf16 moves them by a tenth or more, on every machine. So what it does on the CPU says what
// a GPU may do. In four models an H200 had, in bf16, up to 2.7 times the CPU's error in matrices
// and 9.8 times in vectors, which have few elements; in fp32 up to 1/169 of it. It is computed when
// it is first asked for.
static double allowed_by_rounding(const Inputs *inputs, int tensor) {
    if (inputs->rounding == NULL) { return 0; }
    if (!isnan(inputs->rounding[0])) { return inputs->rounding[tensor]; }
    Machine *exact = machine_of_cpu(inputs), *rounded = machine_that_rounds(inputs);
    machine_pass(exact, NULL);
    machine_pass(rounded, NULL);
    for (int i = 0; i < inputs->table.count; i++) {
        const ParameterInfo *entry = &inputs->table.entries[i];
        double times = inputs->precision == PRECISION_FP32 ? 1.0 / 64 : entry->is_matrix ? 4 : 16;
        inputs->rounding[i] = times * relative_error(rounded->results + entry->offset,
                                                     exact->results + entry->offset, entry->count);
    }
    machine_free(exact);
    machine_free(rounded);
    return inputs->rounding[tensor];
}

// Twice the tolerance for queries and keys.
static void check_tensors(const Inputs *inputs, const float *got, const float *expected, double tolerance) {
    for (int i = 0; i < inputs->table.count; i++) {
        const ParameterInfo *entry = &inputs->table.entries[i];
        char what[256];
        snprintf(what, sizeof what, "%s: %s", test_name, entry->name);
        if (getenv("ACCO_TEST_VERBOSE") != NULL) {
            print_message("%-100s %.2e\n", what,
                          relative_error(got + entry->offset, expected + entry->offset, entry->count));
        }
        double allowed = is_query_or_key(entry) ? 2 * tolerance : tolerance;
        double size = size_of_terms(inputs, expected, entry);
        if (!(error_of_terms(got + entry->offset, expected + entry->offset, entry->count, size) <= allowed)) {
            allowed = fmax(allowed, allowed_by_rounding(inputs, i));
        }
        check_close_terms(what, got + entry->offset, expected + entry->offset, entry->count, size, allowed);
    }
}

// For gradients. Those of the head's input are sums over the vocabulary, each of which may round
// in its own order; all lower layers inherit that.
static double gradient_tolerance(const Inputs *inputs, Precision precision) {
    if (precision == PRECISION_BF16) { return inputs->config.rotary.theta > 0 ? 8e-2 : 4e-2; }
    return inputs->config.vocabulary > 10000 ? 2e-5 : 5e-6;
}

static void check_loss(float got, float expected, double tolerance) {
    char what[256];
    double error = fabs((double)got - (double)expected) / fabs((double)expected);
    snprintf(what, sizeof what, "%s: loss", test_name);
    keep_error(what, error, tolerance);
    if (!(error <= tolerance)) { fail_msg("%s %.9g, expected %.9g", what, (double)got, (double)expected); }
}

static void check_same_bits(const Machine *machine, float loss, const float *gradients) {
    if (memcmp(&machine->loss, &loss, sizeof loss) != 0) {
        fail_msg("%s: loss %.9g, expected the bits of %.9g", test_name, (double)machine->loss, (double)loss);
    }
    for (int i = 0; i < machine->inputs->table.count; i++) {
        const ParameterInfo *entry = &machine->inputs->table.entries[i];
        if (memcmp(machine->results + entry->offset, gradients + entry->offset,
                   entry->count * sizeof(float)) != 0) {
            fail_msg("%s: the gradient of %s has other bits", test_name, entry->name);
        }
    }
}

static float *copy_of_results(const Machine *machine) {
    float *copy = (float *)malloc(machine_bytes(machine));
    memcpy(copy, machine->results, machine_bytes(machine));
    return copy;
}

static void name_case(const char *what, const Shape *shape, Precision precision) {
    snprintf(test_name, sizeof test_name, "%s, %s C %d, B %d, T %d, %s", what,
             shape->family != NULL ? shape->family->name : "gpt", shape->channels, shape->B, shape->T,
             precision_name(precision));
}

// Each case once in each precision, with random inputs.
static void for_both_precisions(const char *what, const Shape *shape,
                                void (*check)(const Inputs *inputs, Precision precision)) {
    for (int precision = PRECISION_FP32; precision <= PRECISION_BF16; precision++) {
        Inputs inputs;
        name_case(what, shape, (Precision)precision);
        inputs_open(&inputs, shape);
        inputs.precision = (Precision)precision;
        if (shape->vocabulary > 10000) {
            inputs.rounding = (double *)malloc((size_t)inputs.table.count * sizeof(double));
            inputs.rounding[0] = NAN;
        }
        check(&inputs, (Precision)precision);
        inputs_close(&inputs);
    }
}

// In bf16 with products of FP8, which want multiples of 16. A GPT-Neo, a GPT-2 and a Qwen3.
static void for_fp8(const char *what, void (*check)(const Inputs *inputs, Precision precision)) {
    static const Shape fp8_shapes[] = {{2, 32, 2, 128, 5, 61, 2, 24},
                                       {2, 48, 3, 96, 0, 61, 1, 32},
                                       {2, 32, 2, 96, 0, 61, 1, 32, false, &qwen3_family, 1, 32, false}};
    for (int i = 0; i < 3; i++) {
        Inputs inputs;
        name_case(what, &fp8_shapes[i], PRECISION_E4M3);
        inputs_open(&inputs, &fp8_shapes[i]);
        inputs.fp8 = true;
        check(&inputs, PRECISION_BF16);
        inputs_close(&inputs);
    }
}

static void for_all_shapes(const char *what, void (*check)(const Inputs *inputs, Precision precision)) {
    for (int i = 0; i < SHAPES; i++) { for_both_precisions(what, &shapes[i], check); }
    for (int i = 0; i < FAMILIES; i++) { for_both_precisions(what, &families[i], check); }
    if (!cuda_small_shapes()) {
        for_both_precisions(what, &real, check);
        for_both_precisions(what, &real_family, check);
    }
}

// ---- Against the CPU ------------------------------------------------------------------

// Every order of threads and blocks gives the bits of the first.
static void check_against_cpu(const Inputs *inputs, Precision precision) {
    bool half = precision == PRECISION_BF16;
    Machine *cpu = machine_of_cpu(inputs), *first = NULL;
    machine_pass(cpu, NULL);
    for (int order = 0; order < SIMT_ORDERS; order++) {
        cuda_use_order(order);
        Machine *machine = machine_of_device(inputs, precision, RECOMPUTE_NONE);
        machine_pass(machine, NULL);
        if (first == NULL) {
            first = machine;
            check_loss(machine->loss, cpu->loss, half ? 5e-3 : 1e-6);
            check_tensors(inputs, machine->results, cpu->results, gradient_tolerance(inputs, precision));
            continue;
        }
        check_same_bits(machine, first->loss, first->results);
        machine_free(machine);
    }
    cuda_use_order(0);
    machine_free(first);
    machine_free(cpu);
}

static void test_loss_and_gradients(void **state) {
    (void)state;
    for_all_shapes("against the CPU", check_against_cpu);
}

// How far the steps move each parameter.
static void machine_train(Machine *machine, int steps, float *moved) {
    const float *before = machine->inputs->parameters;
    OptimizerStep step = {.gradient = machine->gradients,
                          .out = machine->parameters,
                          .divisor = 3.0,
                          .scale = 2.5,
                          .learning_rate = 1e-2,
                          .keeps = true};
    optimizer_take_master(&machine->optimizer, &machine->stream, machine->parameters);
    for (int i = 0; i < steps; i++) {
        machine_pass(machine, NULL);
        optimizer_step(&machine->optimizer, &machine->stream, &step);
    }
    stream_copy(&machine->stream, moved, machine->parameters, machine_bytes(machine));
    stream_settle(&machine->stream);
    for (size_t i = 0; i < machine->model.parameter_count; i++) { moved[i] -= before[i]; }
}

static void check_training(const Inputs *inputs, Precision precision) {
    bool half = precision == PRECISION_BF16;
    Machine *cpu = machine_of_cpu(inputs), *device = machine_of_device(inputs, precision, RECOMPUTE_NONE);
    float *expected = (float *)malloc(machine_bytes(cpu)), *moved = (float *)malloc(machine_bytes(cpu));
    machine_train(cpu, 2, expected);
    machine_train(device, 2, moved);
    check_tensors(inputs, moved, expected, half ? gradient_tolerance(inputs, precision) : 1e-4);
    // In bf16 AdamW turns the rounding of small gradients into whole steps: of 127 draws half were
    // off by less than 4e-4, the worst by 5.2e-3.
    check_loss(machine_loss(device), machine_loss(cpu), half ? 1e-2 : 1e-6);
    free(expected);
    free(moved);
    machine_free(cpu);
    machine_free(device);
}

// Plain SGD works on memory of the host. The child ends before it calls CUDA.
static void step_with_sgd(const void *context) {
    Machine *machine = (Machine *)(uintptr_t)context;
    OptimizerStep step = {.gradient = machine->gradients,
                          .out = machine->parameters,
                          .divisor = 1.0,
                          .scale = 1.0,
                          .learning_rate = 1e-2,
                          .keeps = true};
    machine->optimizer.settings.elementwise_step = sgd_step;
    optimizer_step(&machine->optimizer, &machine->stream, &step);
}

static void check_sgd_is_refused(const Inputs *inputs, Precision precision) {
    char message[1024];
    Machine *machine = machine_of_device(inputs, precision, RECOMPUTE_NONE);
    int status = run_in_child(step_with_sgd, machine, message, sizeof message);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    assert_non_null(strstr(message, "works on memory of the host, not of a GPU"));
    machine_free(machine);
}

static void test_sgd_is_refused(void **state) {
    (void)state;
    for_both_precisions("SGD", &small, check_sgd_is_refused);
}

static void test_optimizer_steps(void **state) {
    (void)state;
    for_all_shapes("steps of AdamW", check_training);
}

// ---- Against itself -------------------------------------------------------------------

static void check_recompute(const Inputs *inputs, Precision precision) {
    Machine *kept = machine_of_device(inputs, precision, RECOMPUTE_NONE);
    machine_pass(kept, NULL);
    for (int level = RECOMPUTE_NONE + 1; level < RECOMPUTE_LEVELS; level++) {
        Machine *machine = machine_of_device(inputs, precision, (Recompute)level);
        machine_pass(machine, NULL);
        check_same_bits(machine, kept->loss, kept->results);
        assert_true(machine->arena.bytes < kept->arena.bytes);
        machine_free(machine);
    }
    machine_free(kept);
}

static void test_recompute(void **state) {
    (void)state;
    for_all_shapes("recompute", check_recompute);
}

// Models with frozen tensors, and with adapters. With odd dimensions a bias in one vector may
// be aligned and a weight in the other not; then LayerNorm takes another kernel where it is
// computed again without its bias, and rounds in another order.
static void check_part(const Shape *shape, const TrainedChoice *choice) {
    for (int precision = PRECISION_FP32; precision <= PRECISION_BF16; precision++) {
        Inputs inputs;
        name_case(choice->rank > 0 ? "adapters" : choice->freeze, shape, (Precision)precision);
        inputs_open(&inputs, shape);
        inputs_choose_part(&inputs, choice);
        check_against_cpu(&inputs, (Precision)precision);
        if (shape->inner % 8 == 0) { check_recompute(&inputs, (Precision)precision); }
        check_training(&inputs, (Precision)precision);
        inputs_close(&inputs);
    }
}

static void test_trained_parts(void **state) {
    (void)state;
    static const TrainedChoice choices[] = {{"wte,h.0.*", "*", 0, 1},
                                            {"wpe,ln_*,*proj", "*", 0, 1},
                                            {"*.bias,c_fc", "*", 0, 1},
                                            {"", "*", 3, 6},
                                            {"", "c_*", 8, 4}};
    int count = sizeof choices / sizeof choices[0];
    for (int i = 0; i < (CUDA_AS_PTX ? 1 : SHAPES); i++) { // every choice with half of the shapes
        for (int c = i % 2; c < count; c += CUDA_AS_PTX ? 3 : 2) { check_part(&shapes[i], &choices[c]); }
    }
    static const TrainedChoice of_families[] = {{"*norm.weight,layers.0.*", "*", 0, 1}, {"", "*", 3, 6}};
    for (int i = 0; i < (CUDA_AS_PTX ? 0 : FAMILIES); i++) {
        check_part(&families[i], &of_families[0]);
        check_part(&families[i], &of_families[1]);
    }
}

static void check_accumulation(const Inputs *inputs, Precision precision) {
    Machine *machine = machine_of_device(inputs, precision, RECOMPUTE_NONE);
    machine_pass(machine, NULL);
    float *once = copy_of_results(machine), loss = machine->loss;
    machine_add_gradients(machine, NULL);
    for (size_t i = 0; i < machine->model.parameter_count; i++) { machine->results[i] /= 2.0f; }
    check_loss(machine->loss, loss, 0.0);
    check_tensors(inputs, machine->results, once, 1e-6);
    machine_pass(machine, NULL);
    check_same_bits(machine, loss, once);
    // A sum that begins is one that is added to zeros.
    stream_clear(&machine->stream, machine->gradients, machine_bytes(machine));
    machine_add_gradients(machine, NULL);
    check_same_bits(machine, loss, once);
    check_loss(machine_loss(machine), loss, 0.0);
    free(once);
    machine_free(machine);
}

static void test_gradients_accumulate(void **state) {
    (void)state;
    for_both_precisions("accumulation", &shapes[0], check_accumulation);
    for_both_precisions("accumulation", &shapes[2], check_accumulation);
    for_both_precisions("accumulation", &families[5], check_accumulation);
}

// Starting overwrites gradients and changes no later result.
static void check_start(const Inputs *inputs, Precision precision) {
    Machine *plain = machine_of_device(inputs, precision, RECOMPUTE_NONE),
            *started = machine_of_device(inputs, precision, RECOMPUTE_NONE);
    machine_pass(plain, NULL);
    gemm_close(&started->stream);
    machine_poison_gradients(started);
    model_start(&started->model, &started->stream, started->parameters, started->gradients);
    stream_copy(&started->stream, started->results, started->gradients, machine_bytes(started));
    stream_settle(&started->stream);
    for (size_t i = 0; i < started->model.parameter_count; i++) { assert_false(isnan(started->results[i])); }
    machine_pass(started, NULL);
    check_same_bits(started, plain->loss, plain->results);
    machine_free(plain);
    machine_free(started);
}

static void test_start(void **state) {
    (void)state;
    for_both_precisions("start", &small, check_start);
    for_both_precisions("start", &families[4], check_start);
}

// The last chunk has fewer rows. Sums over rows that are split between chunks have other
// bits. On a GPU a product of fewer rows may also be another algorithm's.
static void check_chunks(const Inputs *inputs, Precision precision) {
    Machine *whole = machine_of_device(inputs, precision, RECOMPUTE_NONE),
            *parts = machine_of_device(inputs, precision, RECOMPUTE_NONE);
    machine_pass(whole, NULL);
    parts->model.chunk = 7;
    machine_pass(parts, NULL);
    check_loss(parts->loss, whole->loss, CUDA_EMULATED ? 0.0 : 1e-5);
    check_tensors(inputs, parts->results, whole->results,
                  CUDA_EMULATED ? 1e-6 : gradient_tolerance(inputs, precision));
    machine_free(whole);
    machine_free(parts);
}

static void test_chunks_of_logits(void **state) {
    (void)state;
    for_both_precisions("chunks", &shapes[1], check_chunks);
    for_both_precisions("chunks", &shapes[2], check_chunks);
}

// The products of the head take more columns than the vocabulary has: 63 more in a model
// of 65 tokens, whose weights are all of wpe and a part of the first layer. Nothing
// changes.
static void check_columns(const Inputs *inputs, Precision precision) {
    int V = inputs->config.vocabulary;
    if (inputs->table.head == inputs->table.count - 1) { return; } // nothing is behind it
    Machine *wide = machine_of_device(inputs, precision, RECOMPUTE_NONE),
            *narrow = machine_of_device(inputs, precision, RECOMPUTE_NONE);
    assert_int_equal(wide->model.logits_columns, (V + 63) / 64 * 64);
    narrow->model.logits_columns = V;
    machine_pass(wide, NULL);
    machine_pass(narrow, NULL);
    check_loss(wide->loss, narrow->loss, 1e-5);
    check_tensors(inputs, wide->results, narrow->results, gradient_tolerance(inputs, precision));
    if (CUDA_EMULATED) { check_same_bits(wide, narrow->loss, narrow->results); }
    const CudaGemmLibrary *library = (const CudaGemmLibrary *)wide->stream.gemm;
    for (int i = 0; i < library->count; i++) {
        const CudaGemm *gemm = &library->plans[i].gemm;
        if (gemm->m == V || gemm->n == V || gemm->k == V) { fail_msg("%s: a product of %d", test_name, V); }
    }
    machine_free(wide);
    machine_free(narrow);
}

static void test_columns_of_logits(void **state) {
    static const Shape behind_wpe = {1, 32, 2, 50, 3, 65, 1, 5};
    (void)state;
    for_all_shapes("columns", check_columns);
    for_both_precisions("columns", &behind_wpe, check_columns);
}

// A model with so few parameters behind wte computes the columns of its vocabulary. It
// has 8 channels, because a LayerNorm of 2 returns little more than the sign of their
// difference, and rounding can change that.
static void check_few_parameters(const Inputs *inputs, Precision precision) {
    Machine *cpu = machine_of_cpu(inputs), *machine = machine_of_device(inputs, precision, RECOMPUTE_NONE);
    assert_int_equal(machine->model.logits_columns, inputs->config.vocabulary);
    machine_pass(cpu, NULL);
    machine_pass(machine, NULL);
    check_loss(machine->loss, cpu->loss, precision == PRECISION_BF16 ? 1e-2 : 1e-6);
    machine_free(cpu);
    machine_free(machine);
}

static void test_few_parameters(void **state) {
    static const Shape tiny = {1, 8, 1, 3, 3, 65, 1, 2};
    (void)state;
    for_both_precisions("few parameters", &tiny, check_few_parameters);
}

// ---- Pace: waiting for parameters, announcing gradients -------------------------------

static void pace_is_open(void *self, size_t position) { (void)self, (void)position; }

static Pace pace_of_version(uint64_t version) {
    Pace pace = {.version = version, .need = pace_is_open, .finish = pace_is_open};
    return pace;
}

static void pass_with_version(Machine *machine, uint64_t version, float loss, const float *gradients) {
    Pace pace = pace_of_version(version);
    machine_pass(machine, version > 0 ? &pace : NULL);
    check_same_bits(machine, loss, gradients);
}

// A weight copy is used as long as the version is the same; without a version, never. In
// fp32 there is no copy, and every change has an effect.
static void check_versions(const Inputs *inputs, Precision precision) {
    bool copied = precision == PRECISION_BF16;
    Machine *machine = machine_of_device(inputs, precision, RECOMPUTE_NONE);
    float *others = host_normals(&test_random, machine->model.parameter_count, 0.1);
    Pace pace = pace_of_version(7);
    machine_pass(machine, &pace);
    float *old_gradients = copy_of_results(machine), old_loss = machine->loss;
    machine_set_parameters(machine, others);
    machine_pass(machine, NULL);
    float *new_gradients = copy_of_results(machine), new_loss = machine->loss;
    assert_true(new_loss != old_loss);
    pass_with_version(machine, 8, new_loss, new_gradients);
    machine_set_parameters(machine, inputs->parameters);
    pass_with_version(machine, 8, copied ? new_loss : old_loss, copied ? new_gradients : old_gradients);
    pass_with_version(machine, 9, old_loss, old_gradients);
    machine_set_parameters(machine, others);
    pass_with_version(machine, 9, copied ? old_loss : new_loss, copied ? old_gradients : new_gradients);
    check_loss(machine_loss(machine), new_loss, 0.0);
    machine_set_parameters(machine, inputs->parameters);
    pass_with_version(machine, 9, old_loss, old_gradients);
    free(others);
    free(old_gradients);
    free(new_gradients);
    machine_free(machine);
}

static void test_versions_of_weights(void **state) {
    (void)state;
    for_both_precisions("versions", &small, check_versions);
}

// Parameters on the device are NaN until they are asked for, and gradients are copied
// when the pass says that they are finished.
typedef struct Watch {
    Machine *machine;
    size_t needed, open; // [0, needed) has been asked for; [open, parameter_count) is finished
    int needs, finishes;
    float *finished; // (parameter_count)
} Watch;

static void watch_need(void *self, size_t end) {
    Watch *watch = (Watch *)self;
    Machine *machine = watch->machine;
    assert_true(end >= watch->needed && end <= machine->model.parameter_count);
    stream_copy(&machine->stream, machine->parameters + watch->needed,
                machine->inputs->parameters + watch->needed, (end - watch->needed) * sizeof(float));
    watch->needed = end;
    watch->needs++;
}

static void watch_finish(void *self, size_t begin) {
    Watch *watch = (Watch *)self;
    Machine *machine = watch->machine;
    assert_true(begin <= watch->open);
    stream_copy(&machine->stream, watch->finished + begin, machine->gradients + begin,
                (watch->open - begin) * sizeof(float));
    watch->open = begin;
    watch->finishes++;
}

static void check_pace(const Inputs *inputs, Precision precision) {
    Machine *plain = machine_of_device(inputs, precision, RECOMPUTE_NONE),
            *paced = machine_of_device(inputs, precision, RECOMPUTE_BLOCK);
    size_t count = plain->model.parameter_count;
    machine_pass(plain, NULL);
    gpu_fill(paced->stream.queue, paced->parameters, 0xff, machine_bytes(paced));
    Watch watch = {paced, 0, count, 0, 0, (float *)malloc(machine_bytes(paced))};
    Pace pace = {.self = &watch, .version = 1, .need = watch_need, .finish = watch_finish};
    machine_pass(paced, &pace);
    check_same_bits(paced, plain->loss, plain->results);
    assert_memory_equal(watch.finished + watch.open, plain->results + watch.open,
                        (count - watch.open) * sizeof(float));
    assert_true(watch.needed == count && watch.needs >= inputs->config.layers + 2 &&
                watch.finishes >= 2 * inputs->config.layers);
    assert_true(watch.open == weights_at(&paced->model, 0, TENSOR_NORM_1));
    free(watch.finished);
    machine_free(plain);
    machine_free(paced);
}

static void test_the_passes_keep_pace(void **state) {
    (void)state;
    for_both_precisions("pace", &shapes[2], check_pace);
    for_both_precisions("pace", &families[0], check_pace);
}

// ---- Edges ----------------------------------------------------------------------------

static void check_no_target(const Inputs *inputs, Precision precision) {
    Machine *machine = machine_of_device(inputs, precision, RECOMPUTE_NONE);
    for (int i = 0; i < inputs->B * inputs->T; i++) { inputs->targets[i] = i % 2 == 0 ? -1 : -100; }
    machine_pass(machine, NULL);
    assert_true(machine->loss == 0.0f && machine_loss(machine) == 0.0f);
    for (size_t i = 0; i < machine->model.parameter_count; i++) { assert_true(machine->results[i] == 0.0f); }
    machine_free(machine);
}

static void test_no_target_counts(void **state) {
    (void)state;
    for_both_precisions("no target", &small, check_no_target);
}

static void check_nan(const Inputs *inputs, Precision precision) {
    Machine *machine = machine_of_device(inputs, precision, RECOMPUTE_NONE);
    float missing = NAN;
    for (int i = 0; i < inputs->table.count; i++) {
        const ParameterInfo *entry = &inputs->table.entries[i];
        size_t row = i == 0 ? (size_t)inputs->tokens[0] * (size_t)inputs->config.channels
                            : 0; // of wte: a row that is used
        machine_set_parameters(machine, inputs->parameters);
        stream_copy(&machine->stream, machine->parameters + entry->offset + row, &missing, sizeof missing);
        if (!isnan(machine_loss(machine))) { fail_msg("%s: NaN in %s is lost", test_name, entry->name); }
    }
    machine_set_parameters(machine, inputs->parameters);
    assert_true(isfinite(machine_loss(machine)));
    machine_free(machine);
}

static void test_nan_is_seen(void **state) {
    (void)state;
    for_both_precisions("NaN", &small, check_nan);
    for_both_precisions("NaN", &families[3], check_nan);
    for_both_precisions("NaN", &families[5], check_nan);
}

// ---- FP8, against bf16 ----------------------------------------------------------------

// How many plans there are for products with so many results and terms, whose activations
// or gradients are in that format.
static int plans_of(const Machine *machine, int m, int k, Precision format) {
    const CudaGemmLibrary *library = (const CudaGemmLibrary *)machine->stream.gemm;
    int count = 0;
    for (int i = 0; i < library->count; i++) {
        const CudaGemm *gemm = &library->plans[i].gemm;
        count += gemm->m == m && gemm->k == k && gemm->b_precision == format;
    }
    return count;
}

// Activations are e4m3 and gradients e5m2: seen at the products of queries, keys and
// values, whose shapes no others have.
static void check_fp8(const Inputs *inputs, Precision precision) {
    Inputs plain_inputs = *inputs;
    plain_inputs.fp8 = false;
    int C = inputs->config.channels, QKV = model_dimension(&inputs->config, DIM_QKV);
    Machine *plain = machine_of_device(&plain_inputs, precision, RECOMPUTE_NONE),
            *fp8 = machine_of_device(inputs, precision, RECOMPUTE_NONE);
    machine_pass(plain, NULL);
    machine_pass(fp8, NULL);
    double allowed = inputs->config.rotary.theta > 0 ? 0.05 : 0.015; // its matrices are larger
    check_loss(fp8->loss, plain->loss, allowed);
    check_tensors(inputs, fp8->results, plain->results, 0.5);
    for (int format = PRECISION_E4M3; format <= PRECISION_E5M2; format++) {
        assert_int_equal(plans_of(fp8, QKV, C, (Precision)format), format == PRECISION_E4M3);
        assert_int_equal(plans_of(fp8, C, QKV, (Precision)format), format == PRECISION_E5M2);
    }
    float *moved = copy_of_results(plain), *expected = copy_of_results(plain);
    machine_train(plain, 4, expected);
    machine_train(fp8, 4, moved);
    check_tensors(inputs, moved, expected, 0.5);
    check_loss(machine_loss(fp8), machine_loss(plain), allowed);
    free(moved);
    free(expected);
    machine_free(plain);
    machine_free(fp8);
}

// The frozen matrices are in FP8, the products of the adapters are not.
static void check_fp8_beside_adapters(Precision precision) {
    static const Shape shape = {2, 32, 2, 128, 5, 61, 2, 24};
    static const TrainedChoice choice = {"", "*", 4, 8};
    Inputs adapted;
    inputs_open(&adapted, &shape);
    inputs_choose_part(&adapted, &choice);
    adapted.fp8 = true;
    check_fp8(&adapted, precision);
    inputs_close(&adapted);
}

// As PTX only the kernels count, and those of FP8 are in test_cuda_layers.
static void test_fp8(void **state) {
    (void)state;
    if (!cuda_has_fp8()) { skip(); }
    for_fp8("FP8", check_fp8);
    if (CUDA_AS_PTX) { return; }
    check_fp8_beside_adapters(PRECISION_BF16);
    for_fp8("FP8, recompute", check_recompute);
    for_fp8("FP8, accumulation", check_accumulation);
    for_fp8("FP8, start", check_start);
    for_fp8("FP8, versions", check_versions);
    for_fp8("FP8, pace", check_pace);
    for_fp8("FP8, NaN", check_nan);
}

// ---- How often a pass launches a kernel -----------------------------------------------

enum { MOST_KERNELS = 64 };

typedef struct Launches {
    const void *kernel;
    int count;
} Launches;

static Launches *launches_of_all(void) {
    static Launches table[MOST_KERNELS];
    return table;
}

static void count_launch(const void *kernel) {
    Launches *entry = launches_of_all();
    while (entry->kernel != NULL && entry->kernel != kernel) { entry++; }
    assert_true(entry < launches_of_all() + MOST_KERNELS - 1);
    entry->kernel = kernel;
    entry->count++;
}

template <typename Kernel> static int launches_of(Kernel *kernel) {
    for (const Launches *entry = launches_of_all(); entry->kernel != NULL; entry++) {
        if (entry->kernel == (const void *)kernel) { return entry->count; }
    }
    return 0;
}

// The sum over the lines "    kernel | launches" of what dev/gpu/predict prints that begin so.
static int predicted_launches(const char *kernel) {
    char command[512], line[256];
    const char *root = getenv("PROJECT_ROOT");
    int launches = 0;
    snprintf(command, sizeof command, "%.400s/dev/gpu/predict 125M 32 1024", root != NULL ? root : ".");
    FILE *file = popen(command, "r");
    if (file == NULL) { fail_msg("%s does not run", command); }
    while (fgets(line, sizeof line, file) != NULL) {
        const char *bar = strchr(line, '|');
        if (bar != NULL && strncmp(line, "    ", 4) == 0 && strncmp(line + 4, kernel, strlen(kernel)) == 0) {
            launches += atoi(bar + 1);
        }
    }
    pclose(file);
    return launches;
}

// The layers and windows of 125M, and as many chunks of logits, but few rows and columns.
static void test_launches_are_as_predicted(void **state) {
    (void)state;
    if (!CUDA_EMULATED) { skip(); }
    typedef __nv_bfloat16 R;
    Shape shape = {12, 16, 1, 64, 96, 64, 4, 256};
    Inputs inputs;
    inputs_open(&inputs, &shape);
    Machine *machine = machine_of_device(&inputs, PRECISION_BF16, RECOMPUTE_NONE);
    int rows = 32 * 1024,
        chunk = head_chunk_rows(rows, HEAD_GPU_CHUNK, head_logits_stride(50257, true), PRECISION_BF16, true);
    machine->model.chunk = shape.B * shape.T / ((rows + chunk - 1) / chunk);
    cuda_count_launches(count_launch);
    machine_pass(machine, NULL);
    cuda_count_launches(NULL);
    const struct {
        const char *name;
        int launches;
    } counted[] = {
        {"embedding forward", launches_of(embedding_forward_kernel<R, 8>)},
        {"embedding backward", launches_of(embedding_segments_kernel<R, 8>)},
        {"layernorm forward", launches_of(layernorm_forward_kernel<R, 8, 4, true>)},
        {"layernorm backward", launches_of(layernorm_backward_kernel<R, 8, 1, true, true>)},
        {"gelu forward", launches_of(gelu_forward_kernel<R, 8>)},
        {"gelu backward", launches_of(gelu_backward_kernel<R, 8>)},
        {"cross entropy, one chunk", launches_of(cross_entropy_kernel<R>)},
        {"attention forward", launches_of(cuda_attention_forward_kernel<16, 2, false, false>)},
        {"attention backward", launches_of(cuda_attention_delta_kernel<R, 2, 8>)},
    };
    for (size_t i = 0; i < sizeof counted / sizeof *counted; i++) {
        int predicted = predicted_launches(counted[i].name);
        if (predicted != counted[i].launches || predicted == 0) {
            fail_msg("%s: %d launches predicted, %d counted", counted[i].name, predicted,
                     counted[i].launches);
        }
    }
    machine_free(machine);
    inputs_close(&inputs);
}

static int seed_test(void **state) {
    (void)state;
    test_random.state = random_hash(seed_of_tests(), 29);
    return 0;
}

// test_cuda_model PATTERN runs the tests whose names match.
int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_loss_and_gradients),
        cmocka_unit_test(test_optimizer_steps),
        cmocka_unit_test(test_trained_parts),
        cmocka_unit_test(test_sgd_is_refused),
        cmocka_unit_test(test_recompute),
        cmocka_unit_test(test_gradients_accumulate),
        cmocka_unit_test(test_start),
        cmocka_unit_test(test_chunks_of_logits),
        cmocka_unit_test(test_columns_of_logits),
        cmocka_unit_test(test_few_parameters),
        cmocka_unit_test(test_versions_of_weights),
        cmocka_unit_test(test_the_passes_keep_pace),
        cmocka_unit_test(test_no_target_counts),
        cmocka_unit_test(test_nan_is_seen),
        cmocka_unit_test(test_launches_are_as_predicted),
        cmocka_unit_test(test_fp8),
    };
    if (argc > 1) { cmocka_set_test_filter(argv[1]); }
    return cmocka_run_group_tests_name("cuda_model", tests, seed_test, NULL);
}
