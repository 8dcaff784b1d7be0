// bench_kernels.c: how fast the model trains on this machine, and what share of the rate
// of matrix products that is.
//
//   bench_kernels [fp32|bf16] [THREADS [ROUNDS [MODEL B T [LENGTH]]]]
//
// Defaults: fp32, all cores, 5 rounds, 36M and 125M at T=256 and T=1024. With LENGTH each round
// also has a step whose attention stays inside documents, which are so many tokens long on average.
//
// The yardstick is measured in the same rounds as the model, because a shared machine
// changes from minute to minute. It is the rate of the model's own products (weighted by their
// FLOPs in a step) and of one large square product, each in two ways. In fp32 both are
// oneDNN's sgemm, threaded by the library itself and by our tiles; in bf16 oneDNN's products
// and those of amx.h, where there is AMX. The best of the four is the yardstick of its round.
// In bf16 each product is also timed in every layout of its operands, in both ways.
//
// Data is random, because zeros would draw less power and run at a higher clock. FLOPs of the model
// are those of model_flops_per_token. The share is the median over rounds of the model's rate
// divided by the yardstick. On a machine that others use too, read the share by processor time,
// which the time of other processes does not enter.
#include <stdint.h>
#include <stdio.h>

#include "kernels/kernels.h"

enum {
    BIAS,
    EMBEDDING,
    LAYERNORM,
    LINEAR_FORWARD,
    LINEAR_BACKWARD_INPUT,
    LINEAR_BACKWARD_WEIGHT,
    ATTENTION_FORWARD,
    ATTENTION_BACKWARD,
    GELU,
    HEAD_PRODUCTS,
    CROSS_ENTROPY,
    KERNELS
};

// The model's kernels are timed where it calls them: KERNELS sums of seconds; NULL: not timed.
static double *kernel_seconds;

#define TIMED(kernel, call) \
    do { \
        double began = clock_seconds(); \
        call; \
        if (kernel_seconds != NULL) { kernel_seconds[kernel] += clock_seconds() - began; } \
    } while (0)
#define PRODUCT(kernel, values) ((values) == model->logits ? HEAD_PRODUCTS : (kernel))
#define bias_add(...) TIMED(BIAS, bias_add(__VA_ARGS__))
#define embedding_forward(...) TIMED(EMBEDDING, embedding_forward(__VA_ARGS__))
#define embedding_backward(...) TIMED(EMBEDDING, embedding_backward(__VA_ARGS__))
#define layernorm_forward(...) TIMED(LAYERNORM, layernorm_forward(__VA_ARGS__))
#define layernorm_backward(...) TIMED(LAYERNORM, layernorm_backward(__VA_ARGS__))
static void timed_gelu_forward(Stream *stream, const Gelu *work) { TIMED(GELU, gelu_forward(stream, work)); }
static void timed_gelu_backward(Stream *stream, const Gelu *work) {
    TIMED(GELU, gelu_backward(stream, work));
}
#define gelu_forward timed_gelu_forward // the model chooses one by its address
#define gelu_backward timed_gelu_backward
#define attention(stream, work) \
    TIMED((work)->d_qkv == NULL ? ATTENTION_FORWARD : ATTENTION_BACKWARD, attention(stream, work))
#define cross_entropy(...) TIMED(CROSS_ENTROPY, cross_entropy(__VA_ARGS__))
#define matmul_forward(stream, output, ...) \
    TIMED(PRODUCT(LINEAR_FORWARD, output), matmul_forward(stream, output, __VA_ARGS__))
#define matmul_backward_input(stream, input, stride, output, ...) \
    TIMED(PRODUCT(LINEAR_BACKWARD_INPUT, output), \
          matmul_backward_input(stream, input, stride, output, __VA_ARGS__))
#define matmul_backward_weight(stream, weight, output, ...) \
    TIMED(PRODUCT(LINEAR_BACKWARD_WEIGHT, output), \
          matmul_backward_weight(stream, weight, output, __VA_ARGS__))

#include "test/model_loss.h"

enum { MAX_ROUNDS = 32, SQUARE = 2048 };

typedef struct Span {
    double wall;      // seconds
    double processor; // seconds of all threads of this process, divided by their number
} Span;

typedef struct Bench {
    ModelConfig config;
    int B, T, threads, rounds;
    int length;         // of documents; 0: no such steps
    uint32_t separator; // ModelSettings::separator; 0 in the usual steps
    Model model;
    Arena arena;
    Stream stream;
    ParameterTable table;
    Precision precision;
    float *parameters, *gradients, *square[3];
    int32_t *tokens, *targets;
    Span seconds[MAX_ROUNDS];   // of the model
    Span yardstick[MAX_ROUNDS]; // seconds per FLOP
    double kernels[KERNELS], kernels_inside[KERNELS];
    double inside[MAX_ROUNDS];   // processor time of steps by documents as a share of the usual ones, in %
    double rates[4][MAX_ROUNDS]; // own shapes and square, in two ways
} Bench;

static void print_range(const char *what, const double *values, int count, const char *unit) {
    double sorted[MAX_ROUNDS];
    memcpy(sorted, values, (size_t)count * sizeof *sorted);
    double median = median_of(sorted, (size_t)count);
    printf("  %-44s %9.1f %-9s (%.1f .. %.1f)\n", what, median, unit, sorted[0], sorted[count - 1]);
}

static Span span_now(const Bench *bench) {
    struct timespec used;
    Span now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    now.wall = clock_seconds();
    now.processor = ((double)used.tv_sec + 1e-9 * (double)used.tv_nsec) / bench->threads;
    return now;
}

static Span span_since(const Bench *bench, Span started) {
    Span now = span_now(bench);
    now.wall -= started.wall;
    now.processor -= started.processor;
    return now;
}

// One product, in fp32 threaded by oneDNN (by_library) or cut into our tiles, in bf16 by oneDNN
// or as the model computes it.
static Span time_product(Bench *bench, bool by_library, const Matmul *work) {
    Span started = span_now(bench);
#ifndef ACCO_NO_ONEDNN
    if (by_library && bench->precision == PRECISION_FP32) {
        if (omp_set_num_threads != NULL) { omp_set_num_threads(bench->threads); }
        dnnl_sgemm(work->a_transposed ? 'T' : 'N', work->b_transposed ? 'T' : 'N', work->M, work->N, work->K,
                   1.0f, real_floats_const(work->a), work->a_stride, real_floats_const(work->b),
                   work->b_stride, work->accumulate ? 1.0f : 0.0f, real_floats(work->result),
                   work->result_stride);
        return span_since(bench, started);
    }
#endif
    gemm_open(&bench->stream, by_library ? NULL : bench->model.gemm_workspace);
    matmul(&bench->stream, work);
    gemm_open(&bench->stream, bench->model.gemm_workspace);
    return span_since(bench, started);
}

typedef struct Linear {
    Real *input, *d_input, *output; // output serves as its gradient too
    int d_input_stride, output_stride, rows, inputs, outputs;
    size_t weight;
} Linear;

static Linear linear_of(Real *input, Real *d_input, Real *output, int d_input_stride, int output_stride,
                        int rows, int inputs, int outputs, size_t weight) {
    Linear linear = {input, d_input, output, d_input_stride, output_stride, rows, inputs, outputs, weight};
    return linear;
}

// Its products: forward, the gradient of the input, that of the weight.
static void linear_products(const Bench *bench, Linear linear, Matmul products[3]) {
    Precision precision = bench->precision;
    Real *weight = real_at(as_reals(bench->parameters), linear.weight, precision),
         *gradient = as_reals(bench->gradients + linear.weight);
    int rows = linear.rows, inputs = linear.inputs, outputs = linear.outputs, stride = linear.output_stride;
    products[0] = matmul_describe(precision, linear.output, stride, linear.input, inputs, false, weight,
                                  inputs, true, rows, outputs, inputs, false);
    products[1] = matmul_describe(precision, linear.d_input, linear.d_input_stride, linear.output, stride,
                                  false, weight, inputs, false, rows, inputs, outputs, false);
    products[2] = matmul_describe(precision, gradient, inputs, linear.output, stride, true, linear.input,
                                  inputs, false, outputs, inputs, rows, true);
}

// Adds time and FLOPs of them, `times` each.
static void time_linear(Bench *bench, bool by_library, Linear linear, double times, Span *seconds,
                        double *flops) {
    Matmul products[3];
    linear_products(bench, linear, products);
    for (int i = 0; i < 3; i++) {
        Span span = time_product(bench, by_library, &products[i]);
        seconds->wall += times * span.wall;
        seconds->processor += times * span.processor;
    }
    *flops += times * 6.0 * linear.rows * (double)linear.inputs * linear.outputs;
}

enum { LINEARS = 5 };

// The linear layers of a model, the head last.
static void bench_linears(const Bench *bench, Linear linears[LINEARS]) {
    const Model *model = &bench->model;
    int rows = bench->B * bench->T, C = bench->config.channels, F = bench->config.mlp_channels,
        wide = model->d_wide_stride, V = bench->config.vocabulary;
    Real *normal = model->normals, *branch = model->branch, *d_wide = model->d_wide;
    linears[0] = linear_of(normal, branch, d_wide, C, wide, rows, C, 3 * C, weights_at(model, 0, TENSOR_Q));
    linears[1] = linear_of(model->attention, branch, model->d_residual, C, C, rows, C, C,
                           weights_at(model, 0, TENSOR_OUT));
    linears[2] = linear_of(normal, branch, d_wide, C, wide, rows, C, F, weights_at(model, 0, TENSOR_UP));
    linears[3] = linear_of(model->mlp_hidden, d_wide, model->d_residual, wide, C, rows, F, C,
                           weights_at(model, 0, TENSOR_DOWN));
    linears[4] = linear_of(head_input(model), branch, model->logits, C, V, model->chunk, C, V,
                           model->places[model->head].trained);
}

// Seconds per FLOP over the products of one step. Those of one layer are run once and
// counted L times, those of the head as often as there are chunks.
static Span time_own_shapes(Bench *bench, bool by_library) {
    Linear linears[LINEARS];
    bench_linears(bench, linears);
    double flops = 0.0, chunks = (double)(bench->B * bench->T) / bench->model.chunk;
    Span seconds = {0.0, 0.0};
    for (int i = 0; i < LINEARS; i++) {
        double times = i == LINEARS - 1 ? chunks : bench->config.layers;
        time_linear(bench, by_library, linears[i], times, &seconds, &flops);
    }
    seconds.wall /= flops;
    seconds.processor /= flops;
    return seconds;
}

// The median rate of a product in GFLOP/s.
static double product_rate(Bench *bench, bool by_library, const Matmul *work) {
    double seconds[MAX_ROUNDS];
    for (int round = 0; round < bench->rounds; round++) {
        seconds[round] = time_product(bench, by_library, work).wall;
    }
    return 2e-9 * work->M * (double)work->N * work->K / median_of(seconds, (size_t)bench->rounds);
}

// Each product of a step as the model computes it, by oneDNN, and the best of either in any layout
// of the operands, which are dense then.
static void print_products(Bench *bench) {
    static const char *const layers[LINEARS] = {"q, k, v", "out", "up", "down", "head"},
                             *const passes[3] = {"forward", "gradient of the input", "of the weight"};
    Linear linears[LINEARS];
    bench_linears(bench, linears);
    printf("  GFLOP/s of products           as in a step   oneDNN's   best in any layout\n");
    for (int i = 0; i < 3 * LINEARS; i++) {
        Matmul products[3];
        linear_products(bench, linears[i / 3], products);
        Matmul work = products[i % 3];
        double here = product_rate(bench, false, &work), library = product_rate(bench, true, &work),
               best = fmax(here, library);
        for (int layout = 0; layout < 8; layout++) {
            work.a_transposed = (layout & 1) != 0;
            work.b_transposed = (layout & 2) != 0;
            work.a_stride = work.a_transposed ? work.M : work.K;
            work.b_stride = work.b_transposed ? work.K : work.N;
            best = fmax(best, product_rate(bench, layout >= 4, &work));
        }
        printf("    %-7s %-21s %9.0f  %9.0f  %9.0f\n", layers[i / 3], passes[i % 3], here, library, best);
    }
}

// The best of three.
static Span time_square(Bench *bench, bool by_library) {
    Span best = {INFINITY, INFINITY};
    Matmul work = matmul_describe(bench->precision, as_reals(bench->square[0]), SQUARE,
                                  as_reals(bench->square[1]), SQUARE, false, as_reals(bench->square[2]),
                                  SQUARE, false, SQUARE, SQUARE, SQUARE, false);
    for (int i = 0; i < 3; i++) {
        Span span = time_product(bench, by_library, &work);
        best.wall = fmin(best.wall, span.wall / (2.0 * SQUARE * SQUARE * SQUARE));
        best.processor = fmin(best.processor, span.processor / (2.0 * SQUARE * SQUARE * SQUARE));
    }
    return best;
}

static void bench_open(Bench *bench) {
    Error error;
    parameter_table_make(&bench->config, &bench->table);
    size_t bytes = bench->table.parameter_count * sizeof(float), rows = (size_t)bench->B * (size_t)bench->T;
    arena_reserve(&bench->arena, MEMORY_PARAMETERS, "parameters", bytes, &bench->parameters);
    arena_reserve(&bench->arena, MEMORY_GRADIENTS, "gradients", bytes, &bench->gradients);
    arena_reserve(&bench->arena, MEMORY_WORKSPACE, "tokens", rows * sizeof(int32_t), &bench->tokens);
    arena_reserve(&bench->arena, MEMORY_WORKSPACE, "targets", rows * sizeof(int32_t), &bench->targets);
    for (int i = 0; i < 3; i++) {
        arena_reserve(&bench->arena, MEMORY_WORKSPACE, "square", sizeof(float) * SQUARE * SQUARE,
                      &bench->square[i]);
    }
    ModelSettings settings = model_on_cpu(bench->B, bench->T, bench->threads);
    settings.precision = bench->precision;
    settings.separator = bench->length > 0 ? &bench->separator : NULL;
    model_reserve(&bench->model, &bench->arena, &bench->config, &settings);
    if (!arena_commit(&bench->arena, &error)) {
        fprintf(stderr, "%s\n", error.text);
        exit(EXIT_USER_MISTAKE);
    }
    bench->stream.pool = thread_pool_create(bench->threads, true);
    bench->stream.precision = bench->precision;
    gemm_open(&bench->stream, bench->model.gemm_workspace);
    parameters_initialize(&bench->table, 1, bench->stream.pool, bench->parameters);
    for (size_t i = 0; i < bench->table.parameter_count; i++) { // in place: they do not grow
        real_store(as_reals(bench->parameters), i, bench->parameters[i], bench->precision);
    }
    Random random;
    random.state = 1;
    for (size_t i = 0; i < rows; i++) {
        bench->tokens[i] = (int32_t)(random_uniform(&random) * bench->config.vocabulary);
        if (random_uniform(&random) * bench->length < (bench->length > 0)) {
            bench->tokens[i] = bench->config.vocabulary - 1;
        }
    }
    for (size_t i = 0; i < rows; i++) {
        bench->targets[i] = (int32_t)(random_uniform(&random) * bench->config.vocabulary);
    }
    for (size_t i = 0; i < (size_t)SQUARE * SQUARE; i++) {
        for (int k = 0; k < 3; k++) {
            real_store(as_reals(bench->square[k]), i, (float)random_uniform(&random) - 0.5f,
                       bench->precision);
        }
    }
}

static void bench_inside(Bench *bench, int round) {
    bench->separator = (uint32_t)bench->config.vocabulary;
    kernel_seconds = bench->kernels_inside;
    Span started = span_now(bench);
    model_loss_and_gradients(&bench->model, &bench->stream, bench->parameters, bench->gradients,
                             bench->tokens, bench->targets, NULL);
    bench->inside[round] = 100.0 * span_since(bench, started).processor / bench->seconds[round].processor;
    bench->separator = 0;
    kernel_seconds = bench->kernels;
}

static void bench_rounds(Bench *bench) {
    model_loss_and_gradients(&bench->model, &bench->stream, bench->parameters, bench->gradients,
                             bench->tokens, bench->targets, NULL); // warm
    kernel_seconds = bench->kernels;
    for (int round = 0; round < bench->rounds; round++) {
        Span started = span_now(bench), *best = &bench->yardstick[round];
        model_loss_and_gradients(&bench->model, &bench->stream, bench->parameters, bench->gradients,
                                 bench->tokens, bench->targets, NULL);
        bench->seconds[round] = span_since(bench, started);
        if (bench->length > 0) { bench_inside(bench, round); }
        best->wall = best->processor = INFINITY;
        for (int kind = 0; kind < 4; kind++) {
            Span span = kind < 2 ? time_own_shapes(bench, kind == 0) : time_square(bench, kind == 2);
            bench->rates[kind][round] = 1e-9 / span.wall;
            best->wall = fmin(best->wall, span.wall);
            best->processor = fmin(best->processor, span.processor);
        }
    }
}

static void bench_report(Bench *bench) {
    static const char *const kernels[KERNELS] = {"bias of q, k, v",
                                                 "embedding",
                                                 "layernorm",
                                                 "linear forward",
                                                 "linear backward input",
                                                 "linear backward weight",
                                                 "attention forward",
                                                 "attention backward",
                                                 "gelu",
                                                 "head products",
                                                 "cross entropy"};
    static const char *const kinds[2][4] = {
        {"sgemm, the model's products, library's threads", "sgemm, the model's products, our tiles",
         "sgemm, square, library's threads", "sgemm, square, our tiles"},
        {"the model's products, oneDNN", "the model's products, as in a step", "square, oneDNN",
         "square, as in a step"}};
    int rounds = bench->rounds, rows = bench->B * bench->T;
    double speed[MAX_ROUNDS], rate[MAX_ROUNDS], share[MAX_ROUNDS], processor_share[MAX_ROUNDS], total = 0.0;
    double flops = rows * model_flops_per_token(&bench->config, &bench->table, bench->T);
    for (int i = 0; i < rounds; i++) {
        speed[i] = rows / bench->seconds[i].wall;
        rate[i] = flops / bench->seconds[i].wall / 1e9;
        share[i] = 100.0 * flops * bench->yardstick[i].wall / bench->seconds[i].wall;
        processor_share[i] = 100.0 * flops * bench->yardstick[i].processor / bench->seconds[i].processor;
        total += bench->seconds[i].wall;
    }
    printf("%s B=%d T=%d, %s, %d threads, %d rounds: median (range)\n", bench->config.name, bench->B,
           bench->T, precision_name(bench->precision), bench->threads, rounds);
    print_range("training", speed, rounds, "tokens/s");
    print_range("training", rate, rounds, "GFLOP/s");
    for (int i = 0; i < 4; i++) {
        print_range(kinds[bench->precision][i], bench->rates[i], rounds, "GFLOP/s");
    }
    print_range("share of the best rate", share, rounds, "%");
    print_range("share of the best rate, processor time", processor_share, rounds, "%");
    if (bench->length > 0) { print_range("inside documents, of a usual step", bench->inside, rounds, "%"); }
    for (int i = ATTENTION_FORWARD; i <= ATTENTION_BACKWARD && bench->length > 0; i++) {
        printf("    %-28s %8.1f ms\n",
               i == ATTENTION_FORWARD ? "inside: attention forward" : "inside: attention backward",
               1e3 * bench->kernels_inside[i] / rounds);
    }
    for (int i = 0; i < KERNELS; i++) {
        printf("    %-28s %8.1f ms %5.1f %%\n", kernels[i], 1e3 * bench->kernels[i] / rounds,
               100.0 * bench->kernels[i] / total);
    }
    fflush(stdout);
    kernel_seconds = NULL;
}

static void bench_run(Precision precision, const char *name, int B, int T, int threads, int rounds,
                      int length) {
    Bench *bench = (Bench *)calloc(1, sizeof *bench);
    Error error;
    if (!model_find(name, &bench->config, &error)) {
        fprintf(stderr, "%s\n", error.text);
        exit(EXIT_USER_MISTAKE);
    }
    bench->precision = precision;
    bench->B = B;
    bench->T = T;
    bench->threads = threads;
    bench->rounds = rounds;
    bench->length = length;
    bench_open(bench);
    bench_rounds(bench);
    bench_report(bench);
    if (precision == PRECISION_BF16) { print_products(bench); }
    thread_pool_destroy(bench->stream.pool);
    parameter_table_free(&bench->table);
    arena_release(&bench->arena);
    free(bench);
}

static int argument(int count, char **arguments, int index, int fallback, int most) {
    if (index >= count) { return fallback; }
    int value = atoi(arguments[index]);
    return value < 1 ? 1 : value > most ? most : value;
}

int main(int count, char **arguments) {
    Precision precision = PRECISION_FP32;
    if (count > 1 && (strcmp(arguments[1], "bf16") == 0 || strcmp(arguments[1], "fp32") == 0)) {
        precision = arguments[1][0] == 'b' ? PRECISION_BF16 : PRECISION_FP32;
        count--, arguments++;
    }
    int threads = argument(count, arguments, 1, (int)sysconf(_SC_NPROCESSORS_ONLN), 1024);
    int rounds = argument(count, arguments, 2, 5, MAX_ROUNDS);
    if (count > 3) {
        bench_run(precision, arguments[3], argument(count, arguments, 4, 4, 1024),
                  argument(count, arguments, 5, 256, 65536), threads, rounds,
                  count > 6 ? argument(count, arguments, 6, 1, 65536) : 0);
        return 0;
    }
    bench_run(precision, "36M", 8, 256, threads, rounds, 0);
    bench_run(precision, "36M", 4, 1024, threads, rounds, 0);
    bench_run(precision, "125M", 4, 256, threads, rounds, 0);
    bench_run(precision, "125M", 4, 1024, threads, rounds, 0);
    return 0;
}
