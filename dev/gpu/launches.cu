// launches.cu: the kernels that a training step of each preset launches, with threads and
// shared memory of a block. dev/gpu/resources compiles it against the emulator
// (test/simt): nothing runs, and no address is used.
//
// A line is: the kernel's address in this program, as nm prints it; threads; bytes of
// shared memory; the preset; fp32 or bf16.
#include "test/cuda/cuda_kernels.h"

#include "kernels/kernels.h"
#include "models/decoder.h"
#include "models/families.h"
#include "test/layer_calls.h"

// What the line of a launch ends with.
static const char *launches_of(const char *name) {
    static const char *current = "";
    if (name != NULL) { current = name; }
    return current;
}

static bool print_launch(const SimtLaunch *launch) {
    printf("%016lx %u %zu %s\n", (unsigned long)launch->kernel, launch->block.x, launch->shared,
           launches_of(NULL));
    return false;
}

// An address with the alignment of the arena's; nobody looks there.
static Real *somewhere(void) { return (Real *)(uintptr_t)(1u << 20); }
static float *floats_somewhere(void) { return (float *)(void *)somewhere(); }

static void launch_attention(Stream *stream, const ModelConfig *config) {
    Real *reals = somewhere();
    for (int local = 0; local <= (config->window > 0); local++) {
        Attention work = {.output = reals,
                          .logsumexp = floats_somewhere(),
                          .scratch = floats_somewhere(),
                          .qkv = reals,
                          .d_output = reals,
                          .B = 1,
                          .T = config->positions,
                          .channels = model_dimension(config, DIM_HEADS),
                          .heads = config->heads,
                          .kv_heads = model_kv_heads(config),
                          .d_qkv_stride = model_dimension(config, DIM_QKV),
                          .window = local * config->window};
        attention(stream, &work);
        work.d_qkv = reals;
        attention(stream, &work);
    }
}

static void launch_gpt(Stream *stream, const ModelConfig *config) {
    int T = config->positions, C = config->channels, F = config->mlp_channels;
    Real *reals = somewhere();
    float *floats = floats_somewhere();
    Bias bias = {reals, reals, NULL, floats, T, 3 * C, 3 * C, C, 0.125f};
    bias_add(stream, &bias);
    bias.d_bias = floats;
    bias_add(stream, &bias);
    call_gelu_forward(stream, reals, reals, reals, T, F);
    call_gelu_backward(stream, reals, F, floats, floats, reals, reals, T, F);
}

// Rotary positions, with norms of heads and without, and SwiGLU.
static void launch_others(Stream *stream, const ModelConfig *config) {
    int D = model_head_size(config), F = config->mlp_channels;
    Real *reals = somewhere();
    float *floats = floats_somewhere();
    Rotary turned = {.values = reals,
                     .saved = reals,
                     .turns = floats,
                     .d_weights = {floats, floats},
                     .partials = floats,
                     .rows = config->positions,
                     .T = config->positions,
                     .heads = config->heads,
                     .kv_heads = model_kv_heads(config),
                     .head_size = D,
                     .stride = model_dimension(config, DIM_QKV)};
    Swiglu gated = {reals, reals, NULL, config->positions, F, 2 * F};
    if (config->head_norms) { turned.weights[0] = turned.weights[1] = reals; }
    for (int pass = 0; pass < 2; pass++) {
        turned.backward = pass == 1;
        gated.gradient = pass == 1 ? reals : NULL;
        rotary(stream, &turned);
        swiglu(stream, &gated);
    }
}

static void launch_layers(Stream *stream, const ModelConfig *config) {
    int T = config->positions, C = config->channels;
    bool gpt = config->rotary.theta == 0;
    int32_t *numbers = (int32_t *)(void *)somewhere();
    Real *reals = somewhere();
    float *floats = floats_somewhere();
    Layernorm forward = {.statistics = floats,
                         .residual = reals,
                         .weight = reals,
                         .bias = gpt ? reals : NULL,
                         .epsilon = 1e-5f,
                         .rows = T,
                         .channels = C,
                         .output = reals,
                         .residual_before = reals,
                         .branch = reals,
                         .branch_bias = gpt ? reals : NULL};
    Layernorm backward = forward;
    backward.d_residual = reals;
    backward.d_weight = backward.partials = floats;
    backward.d_bias = backward.d_branch_bias = gpt ? floats : NULL;
    backward.d_output = reals;
    call_embedding_forward(stream, reals, reals, gpt ? reals : NULL, numbers, 1, T, C);
    layernorm_forward(stream, &forward);
    layernorm_backward(stream, &backward);
    launch_attention(stream, config);
    (gpt ? launch_gpt : launch_others)(stream, config);
    for (int format = PRECISION_E4M3; stream->precision == PRECISION_BF16 && format <= PRECISION_E5M2;
         format++) {
        Fp8 matrix = {(uint8_t *)(void *)reals, floats, (Precision)format};
        fp8_cast(stream, &matrix, format == PRECISION_E4M3, floats, reals, C, C, C);
    }
    cross_entropy(stream, reals, head_logits_stride(config->vocabulary, true), floats, numbers, T,
                  config->vocabulary, 1.0f);
    call_embedding_backward(stream, floats, gpt ? floats : NULL, floats, reals, numbers, numbers, 1, T, C);
}

static void launch_updates(Stream *stream) {
    enum { COUNT = 1 << 20 };
    float *floats = floats_somewhere();
    StepRange range = {};
    range.out = range.master = floats;
    range.gradient = floats;
    range.first_moment = range.second_moment = somewhere();
    range.count = COUNT;
    range.keeps = true;
    for (int half = 0; half < 2; half++) { // --moments fp32 and bf16
        range.moments = half ? PRECISION_BF16 : PRECISION_FP32;
        adamw(stream, &range);
    }
    reals_from_floats(stream, somewhere(), floats, COUNT);
    cuda_buffer_sums_of_squares(stream, (double *)(void *)floats, floats, COUNT, COUNT, 1);
}

int main(void) {
    simt_observer() = print_launch;
    for (int i = 0; i < 2 * MODEL_PRESET_COUNT; i++) {
        ModelConfig config;
        model_config_from_preset(&MODEL_PRESETS[i / 2], &config);
        bool half = i % 2 != 0;
        char name[96];
        snprintf(name, sizeof name, "%s %s", config.name, half ? "bf16" : "fp32");
        launches_of(name);
        Stream *stream = cuda_test_stream(half ? PRECISION_BF16 : PRECISION_FP32);
        launch_layers(stream, &config);
        launch_updates(stream);
    }
    return 0;
}
