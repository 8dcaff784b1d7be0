// bench_cuda.cu: how long each kernel takes at the shapes of a model, and what share of
// this GPU's own ceilings that is.
//
//   bench_cuda gpu                    one line about the GPU; exit 3 if none can be used
//   bench_cuda ceilings               only the two ceilings
//   bench_cuda kernels MODEL B T [NAME]
//                                     the ceilings and the table; or only kernels whose names
//                                     begin so, and no ceilings: for a profiler
//   bench_cuda variants MODEL B T     the ceilings; the head's products on chunks of at most 4096,
//                                     8192 (HEAD_GPU_CHUNK), 11008 and 16384 rows; products in FP8
//                                     with their casts; and products that leave NCCL 8 and 16
//                                     multiprocessors, as those beside an exchange do
//   bench_cuda tokens FILE COUNT V    a token file for training runs: COUNT random ids
//                                     below V; needs no GPU
//
// Ceilings are measured in the same run: a large copy from device to device, counting
// what is read and what is written, and a large product of bf16 matrices, both on random
// data (zeros draw less power and run at a higher clock). A kernel's bytes are those that
// it cannot avoid: each input once, each output once. A product counts 2 m n k
// operations. Attention counts the keys that a query sees, with 4 H D operations each in
// forward and 10 H D in backward, where the scores are computed again; "narrow" gives each
// warp 16 rows instead of 32. A kernel is launched over sets of arrays that together are
// far larger than any second-level cache and are filled anew before each trial. The time
// is the median over trials of the mean over a trial's sets.
#include <math.h>
#include <stdint.h>
#include <stdio.h>

#include "comm/layout.h"
#include "models/decoder.h"
#include "models/families.h"
#include "test/layer_calls.h"
#include "tokenizer/token_file.h"

enum { ARRAYS = 10, CASES = 64, TRIALS = 15, TUNING_RUNS = 10, MOST_SETS = 64, FILL_BLOCK = 256 };

typedef enum Fill { FILL_NONE, FILL_REALS, FILL_FLOATS, FILL_SQUARES, FILL_TOKENS, FILL_ORDER } Fill;

typedef struct Bench Bench;

// One kernel. A set is one of each of its arrays.
typedef struct Case {
    char name[48];
    int count; // of arrays
    size_t bytes[ARRAYS];
    Fill fill[ARRAYS];
    double traffic, operations; // of one launch; one of them is 0
    bool product;               // measured with the library's first offer and with the quickest
    int result;                 // of a product: which array it is
    int rows, inputs, outputs, window;
    int fewer; // multiprocessors that a product does not count on
    WireFormat format;
    Precision moments; // of AdamW
    bool backward;     // of rotary positions
    bool in_place;     // AdamW: no second copy of the parameters is written but one in bf16
    void (*run)(Bench *bench, const Case *work, void **arrays);
    void (*prepare)(Bench *bench, const Case *work, void **arrays);
} Case;

struct Bench {
    ModelConfig config;
    int B, T, rows, wide, logits_stride, chunk, processors, capability;
    size_t elements; // of what is done to whole vectors
    bool small;      // for trying this program out in the emulator
    bool gpt;        // LayerNorm, GELU and a table of positions; else RMSNorm, SwiGLU and rotary positions
    Stream stream;
    size_t cache_bytes; // that the sets of a case exceed
    char *pool;
    size_t pool_bytes;
    void *spare;
    size_t spare_bytes;
    int32_t *order;                 // (rows), of the tokens that every set has
    double copy_rate, product_rate; // the ceilings: bytes and operations a second
    Case cases[CASES];
    int count;
};

typedef struct Times {
    double median, least, most; // seconds
    int refused;                // offers of the library for a product that it then does not do
    int offer;                  // the quickest of them, counted from 0
} Times;

static cudaStream_t queue_of(const Bench *bench) { return (cudaStream_t)bench->stream.queue; }

// ---- Random data ----------------------------------------------------------------------

static __device__ __forceinline__ uint32_t fill_hash(uint64_t index, uint32_t seed) {
    uint64_t x = (index + 1) * 0x9e3779b97f4a7c15ull + (uint64_t)seed * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 31) * 0x94d049bb133111ebull;
    return (uint32_t)(x >> 32);
}

// Nearly normal with standard deviation 0.5: the sum of four uniform bytes.
static __device__ __forceinline__ float fill_value(uint64_t index, uint32_t seed) {
    uint32_t bits = fill_hash(index, seed);
    float sum =
        (float)(bits & 255) + (float)(bits >> 8 & 255) + (float)(bits >> 16 & 255) + (float)(bits >> 24);
    return (sum - 510.0f) * (0.5f / 147.8f);
}

template <typename R> static __global__ void fill_reals_kernel(R *out, size_t count, uint32_t seed) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) { out[i] = from_float<R>(fill_value(i, seed)); }
}

// Second moments are never negative.
static __global__ void fill_squares_kernel(float *out, size_t count, uint32_t seed) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) { out[i] = fill_value(i, seed) * fill_value(i, seed); }
}

// Every set has the same tokens, so that one order serves all.
static __global__ void fill_tokens_kernel(int32_t *out, size_t count, int vocabulary) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) { out[i] = (int32_t)(fill_hash(i, 7) % (uint32_t)vocabulary); }
}

static void fill_array(Bench *bench, Fill fill, void *array, size_t bytes, uint32_t seed) {
    size_t count = bytes / (fill == FILL_REALS ? 2 : 4);
    Stream *stream = &bench->stream;
    dim3 grid(cuda_blocks(count, FILL_BLOCK)), block(FILL_BLOCK);
    switch (fill) {
    case FILL_NONE: break;
    case FILL_REALS:
        cuda_launch(stream, fill_reals_kernel<__nv_bfloat16>, grid, block, 0, (__nv_bfloat16 *)array, count,
                    seed);
        break;
    case FILL_FLOATS:
        cuda_launch(stream, fill_reals_kernel<float>, grid, block, 0, (float *)array, count, seed);
        break;
    case FILL_SQUARES:
        cuda_launch(stream, fill_squares_kernel, grid, block, 0, (float *)array, count, seed);
        break;
    case FILL_TOKENS:
        cuda_launch(stream, fill_tokens_kernel, grid, block, 0, (int32_t *)array, count,
                    bench->config.vocabulary);
        break;
    case FILL_ORDER:
        stream_copy(stream, array, bench->order, bytes);
        stream_settle(stream);
        break;
    }
}

// ---- Timing ---------------------------------------------------------------------------

static size_t set_bytes(const Case *work) {
    size_t bytes = 0;
    for (int i = 0; i < work->count; i++) { bytes += layout_round_up(work->bytes[i], ARENA_ALIGNMENT); }
    return bytes;
}

static int set_count(const Bench *bench, const Case *work) {
    size_t sets = bench->cache_bytes / set_bytes(work) + 1;
    return sets < 2 ? 2 : sets > MOST_SETS ? MOST_SETS : (int)sets;
}

static void place_set(const Bench *bench, const Case *work, int set, void **arrays) {
    char *place = bench->pool + (size_t)set * set_bytes(work);
    for (int i = 0; i < work->count; i++) {
        arrays[i] = place;
        place += layout_round_up(work->bytes[i], ARENA_ALIGNMENT);
    }
}

static void fill_sets(Bench *bench, const Case *work, int sets, uint32_t seed) {
    for (int set = 0; set < sets; set++) {
        void *arrays[ARRAYS];
        place_set(bench, work, set, arrays);
        for (int i = 0; i < work->count; i++) {
            fill_array(bench, work->fill[i], arrays[i], work->bytes[i],
                       seed * 1000003u + (uint32_t)(set * ARRAYS + i));
        }
        if (work->prepare != NULL) { work->prepare(bench, work, arrays); }
    }
}

// Seconds of one launch, the mean over so many runs, which take the sets in turn. The GPU has
// something to do while the host puts the first of them into the queue.
static double time_runs(Bench *bench, const Case *work, int sets, int runs) {
    cudaEvent_t began, ended;
    float milliseconds = 0;
    CUDA_CHECK(cudaEventCreate(&began));
    CUDA_CHECK(cudaEventCreate(&ended));
    stream_settle(&bench->stream);
    gpu_fill(bench->stream.queue, bench->spare, 1, bench->spare_bytes);
    CUDA_CHECK(cudaEventRecord(began, queue_of(bench)));
    for (int run = 0; run < runs; run++) {
        void *arrays[ARRAYS];
        place_set(bench, work, run % sets, arrays);
        work->run(bench, work, arrays);
    }
    CUDA_CHECK(cudaEventRecord(ended, queue_of(bench)));
    stream_settle(&bench->stream);
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(cudaEventElapsedTime(&milliseconds, began, ended));
    CUDA_CHECK(cudaEventDestroy(began));
    CUDA_CHECK(cudaEventDestroy(ended));
    return 1e-3 * milliseconds / runs;
}

// The first trial warms up and is not counted.
static Times time_case(Bench *bench, const Case *work) {
    double seconds[TRIALS + 1];
    int sets = set_count(bench, work), trials = bench->small ? 1 : TRIALS;
    for (int trial = 0; trial <= trials; trial++) {
        fill_sets(bench, work, sets, (uint32_t)trial);
        seconds[trial] = time_runs(bench, work, sets, sets);
    }
    double median = median_of(seconds + 1, (size_t)trials); // sorts them
    return {.median = median, .least = seconds[1], .most = seconds[trials]};
}

// ---- What is measured -----------------------------------------------------------------

static Real *reals(void *array) { return (Real *)array; }

static void run_copy(Bench *bench, const Case *work, void **arrays) {
    CUDA_CHECK(
        cudaMemcpyAsync(arrays[1], arrays[0], work->bytes[0], cudaMemcpyDeviceToDevice, queue_of(bench)));
}

static void run_embedding_forward(Bench *bench, const Case *work, void **arrays) {
    (void)work;
    call_embedding_forward(&bench->stream, reals(arrays[0]), reals(arrays[1]),
                           bench->gpt ? reals(arrays[2]) : NULL, (const int32_t *)arrays[3], bench->B,
                           bench->T, bench->config.channels);
}

static void run_embedding_backward(Bench *bench, const Case *work, void **arrays) {
    (void)work;
    call_embedding_backward(&bench->stream, (float *)arrays[0], bench->gpt ? (float *)arrays[1] : NULL,
                            (float *)arrays[2], reals(arrays[3]), (const int32_t *)arrays[4],
                            (const int32_t *)arrays[5], bench->B, bench->T, bench->config.channels);
}

static void run_layernorm_forward(Bench *bench, const Case *work, void **arrays) {
    Layernorm layernorm = {.statistics = (float *)arrays[1],
                           .residual = reals(arrays[2]),
                           .weight = reals(arrays[6]),
                           .bias = bench->gpt ? reals(arrays[7]) : NULL,
                           .epsilon = 1e-5f,
                           .rows = work->rows,
                           .channels = bench->config.channels,
                           .output = reals(arrays[0]),
                           .residual_before = reals(arrays[3]),
                           .branch = reals(arrays[4]),
                           .branch_bias = bench->gpt ? reals(arrays[5]) : NULL};
    layernorm_forward(&bench->stream, &layernorm);
}

static void run_layernorm_backward(Bench *bench, const Case *work, void **arrays) {
    float *sums = (float *)arrays[1];
    int C = bench->config.channels;
    Layernorm layernorm = {.statistics = (float *)arrays[5],
                           .residual = reals(arrays[4]),
                           .weight = reals(arrays[6]),
                           .rows = work->rows,
                           .channels = C,
                           .d_residual = reals(arrays[0]),
                           .accumulate = true,
                           .d_weight = sums,
                           .d_bias = bench->gpt ? sums + C : NULL,
                           .d_branch_bias = bench->gpt ? sums + 2 * C : NULL,
                           .partials = (float *)arrays[2],
                           .d_output = reals(arrays[3])};
    layernorm_backward(&bench->stream, &layernorm);
}

static void run_gelu_forward(Bench *bench, const Case *work, void **arrays) {
    call_gelu_forward(&bench->stream, reals(arrays[0]), reals(arrays[1]), reals(arrays[2]), work->rows,
                      bench->config.mlp_channels);
}

static void run_gelu_backward(Bench *bench, const Case *work, void **arrays) {
    call_gelu_backward(&bench->stream, reals(arrays[0]), bench->wide, (float *)arrays[3], (float *)arrays[4],
                       reals(arrays[1]), reals(arrays[2]), work->rows, bench->config.mlp_channels);
}

static void run_cross_entropy(Bench *bench, const Case *work, void **arrays) {
    cross_entropy(&bench->stream, reals(arrays[0]), bench->logits_stride, (float *)arrays[1],
                  (const int32_t *)arrays[2], work->rows, bench->config.vocabulary, 1.0f);
}

static void run_swiglu(Bench *bench, const Case *work, void **arrays) {
    Swiglu gated = {.output = reals(arrays[0]),
                    .saved = reals(arrays[1]),
                    .gradient = work->count > 2 ? reals(arrays[2]) : NULL,
                    .rows = work->rows,
                    .columns = bench->config.mlp_channels,
                    .gradient_stride = bench->wide};
    swiglu(&bench->stream, &gated);
}

// arrays: values, turns; with norms of heads saved, weights, their gradients, partials.
static void run_rotary(Bench *bench, const Case *work, void **arrays) {
    const ModelConfig *config = &bench->config;
    int D = model_head_size(config), QKV = model_dimension(config, DIM_QKV);
    Rotary turned = {.values = reals(arrays[0]),
                     .turns = (const float *)arrays[1],
                     .rows = work->rows,
                     .T = bench->T,
                     .heads = config->heads,
                     .kv_heads = model_kv_heads(config),
                     .head_size = D,
                     .stride = work->backward ? bench->wide : QKV,
                     .scale = 1.0f / sqrtf((float)D),
                     .epsilon = (float)config->epsilon,
                     .backward = work->backward};
    if (config->head_norms) {
        turned.saved = reals(arrays[2]);
        turned.partials = (float *)arrays[5];
        for (int key = 0; key < 2; key++) {
            turned.weights[key] = reals(arrays[3]);
            turned.d_weights[key] = (float *)arrays[4] + key * D;
        }
    }
    rotary(&bench->stream, &turned);
}

static Attention attention_of(const Bench *bench, const Case *work, void **arrays) {
    const ModelConfig *config = &bench->config;
    Attention attention = {.output = reals(arrays[0]),
                           .logsumexp = (float *)arrays[1],
                           .qkv = reals(arrays[2]),
                           .B = bench->B,
                           .T = bench->T,
                           .channels = model_dimension(config, DIM_HEADS),
                           .heads = config->heads,
                           .kv_heads = model_kv_heads(config),
                           .d_qkv_stride = bench->wide,
                           .window = work->window < bench->T ? work->window : 0,
                           .precision = PRECISION_BF16};
    return attention;
}

static void run_attention_forward(Bench *bench, const Case *work, void **arrays) {
    Attention forward = attention_of(bench, work, arrays);
    attention(&bench->stream, &forward);
}

static Attention attention_backward_of(const Bench *bench, const Case *work, void **arrays) {
    Attention backward = attention_of(bench, work, arrays);
    backward.d_qkv = reals(arrays[3]);
    backward.scratch = (float *)arrays[4];
    backward.d_output = reals(arrays[5]);
    return backward;
}

static void run_attention_backward(Bench *bench, const Case *work, void **arrays) {
    Attention backward = attention_backward_of(bench, work, arrays);
    attention(&bench->stream, &backward);
}

// With one tile of 16 rows for each warp, where the model's choice is two.
template <int D> static void run_attention_backward_narrow(Bench *bench, const Case *work, void **arrays) {
    cuda_attention_backward_tiles<D, false, false, 1, 1>(&bench->stream,
                                                         attention_backward_of(bench, work, arrays));
}

static void run_product_forward(Bench *bench, const Case *work, void **arrays) {
    matmul_forward(&bench->stream, reals(arrays[0]), work->outputs, reals(arrays[1]), reals(arrays[2]),
                   work->rows, work->inputs, work->outputs);
}

// Gradients of wide outputs are rows `wide` apart, as in the model; those of logits and
// of narrow ones are not.
static int gradient_stride(const Bench *bench, const Case *work) {
    bool wide = work->outputs > bench->config.channels && work->outputs != bench->logits_stride;
    return wide ? bench->wide : work->outputs;
}

static void run_product_input(Bench *bench, const Case *work, void **arrays) {
    matmul_backward_input(&bench->stream, reals(arrays[1]), work->inputs, reals(arrays[0]),
                          gradient_stride(bench, work), reals(arrays[2]), work->rows, work->inputs,
                          work->outputs);
}

static void run_product_weight(Bench *bench, const Case *work, void **arrays) {
    matmul_backward_weight(&bench->stream, (float *)arrays[2], reals(arrays[0]), gradient_stride(bench, work),
                           reals(arrays[1]), work->rows, work->inputs, work->outputs, false);
}

// A product in FP8, its first operand cast before, as --products fp8 does it. Arrays:
// output, input, weight; what prepare makes of the weight, and its scale; the same of the
// input.
static Fp8 fp8_of(void **arrays, int codes, Precision format) {
    Fp8 matrix = {(uint8_t *)arrays[codes], (float *)arrays[codes + 1], format};
    return matrix;
}

static void prepare_product_fp8(Bench *bench, const Case *work, void **arrays) {
    Fp8 weight = fp8_of(arrays, 3, PRECISION_E4M3);
    fp8_cast(&bench->stream, &weight, false, (float *)arrays[7], reals(arrays[2]), work->outputs,
             work->inputs, work->inputs);
}

static void run_cast_fp8(Bench *bench, const Case *work, void **arrays) {
    Fp8 input = fp8_of(arrays, 5, PRECISION_E4M3);
    fp8_cast(&bench->stream, &input, false, (float *)arrays[7], reals(arrays[1]), work->rows, work->inputs,
             work->inputs);
}

static void run_product_fp8(Bench *bench, const Case *work, void **arrays) {
    Fp8 input = fp8_of(arrays, 5, PRECISION_E4M3), weight = fp8_of(arrays, 3, PRECISION_E4M3);
    run_cast_fp8(bench, work, arrays);
    matmul_fp8(&bench->stream, reals(arrays[0]), work->outputs, &input, &weight, work->rows, work->inputs,
               work->outputs);
}

static void run_adamw(Bench *bench, const Case *work, void **arrays) {
    StepRange range = {.out = (float *)arrays[work->in_place ? 1 : 0],
                       .master = (float *)arrays[1],
                       .first_moment = reals(arrays[2]),
                       .second_moment = reals(arrays[3]),
                       .gradient = (const float *)arrays[4],
                       .casts = work->in_place ? reals(arrays[0]) : NULL,
                       .count = bench->elements,
                       .moments = work->moments,
                       .key = moment_key(1, 9),
                       .step = adamw_step(0.9, 0.95, 10, 1e-8, 1e-3, 0.1),
                       .keeps = true};
    adamw(&bench->stream, &range);
}

static void run_reals_from_floats(Bench *bench, const Case *work, void **arrays) {
    (void)work;
    reals_from_floats(&bench->stream, reals(arrays[0]), (const float *)arrays[1], bench->elements);
}

static void run_sum_of_squares(Bench *bench, const Case *work, void **arrays) {
    (void)work;
    cuda_buffer_sums_of_squares(&bench->stream, (double *)arrays[1], (const float *)arrays[0],
                                bench->elements, bench->elements, 1);
}

static void run_outer_pseudo_gradient(Bench *bench, const Case *work, void **arrays) {
    (void)work;
    OuterRange range = {.outer = (float *)arrays[1],
                        .local = (float *)arrays[2],
                        .exchange = (float *)arrays[0],
                        .count = bench->elements};
    outer_pseudo_gradient(&bench->stream, &range, 0.5f);
}

static void run_outer_nesterov(Bench *bench, const Case *work, void **arrays) {
    (void)work;
    NesterovStep step = {0.5f, 0.7f, 0.9f, 0.5f};
    OuterRange range = {.outer = (float *)arrays[0],
                        .momentum = (float *)arrays[1],
                        .local = (float *)arrays[2],
                        .exchange = (float *)arrays[3],
                        .count = bench->elements};
    outer_nesterov(&bench->stream, &range, &step);
}

static void run_wire_encode(Bench *bench, const Case *work, void **arrays) {
    WirePieces run = wire_range(work->format, bench->elements);
    cuda_wire_encode(&bench->stream, work->format, arrays[0], (const float *)arrays[1], NULL, &run);
}

static void run_wire_decode(Bench *bench, const Case *work, void **arrays) {
    WirePieces run = wire_range(work->format, bench->elements);
    cuda_wire_decode(&bench->stream, work->format, (float *)arrays[1], arrays[0], NULL, &run);
}

// Of two ranks.
static void run_wire_sum(Bench *bench, const Case *work, void **arrays) {
    WirePieces run = wire_range(work->format, bench->elements);
    cuda_wire_sum(&bench->stream, work->format, (float *)arrays[2], arrays[0],
                  layout_round_up(work->bytes[0], ARENA_ALIGNMENT), 2, &run);
}

static void prepare_wire(Bench *bench, const Case *work, void **arrays) {
    WirePieces run = wire_range(work->format, bench->elements);
    cuda_wire_encode(&bench->stream, work->format, arrays[0], (const float *)arrays[2], NULL, &run);
    cuda_wire_encode(&bench->stream, work->format, arrays[1], (const float *)arrays[2], NULL, &run);
}

// ---- The table of cases ---------------------------------------------------------------

static Case *add_case(Bench *bench, const char *name, void (*run)(Bench *, const Case *, void **),
                      double traffic, double operations) {
    assert(bench->count < CASES);
    Case *work = &bench->cases[bench->count++];
    memset(work, 0, sizeof *work);
    snprintf(work->name, sizeof work->name, "%s", name);
    work->run = run;
    work->traffic = traffic;
    work->operations = operations;
    work->rows = bench->rows;
    return work;
}

static void add_array(Case *work, Fill fill, size_t bytes) {
    assert(work->count < ARRAYS);
    work->fill[work->count] = fill;
    work->bytes[work->count++] = bytes;
}

static void add_embedding(Bench *bench) {
    size_t rows = (size_t)bench->rows, C = (size_t)bench->config.channels,
           V = (size_t)bench->config.vocabulary, T = (size_t)bench->T;
    double touched = V * (1 - exp(-(double)rows / V)); // different tokens of a batch
    double positions = bench->gpt ? T : 0;
    Case *work = add_case(bench, "embedding forward", run_embedding_forward,
                          2.0 * C * (rows + touched + positions) + 4.0 * rows, 0);
    add_array(work, FILL_NONE, rows * C * 2);
    add_array(work, FILL_REALS, V * C * 2);
    add_array(work, FILL_REALS, T * C * 2);
    add_array(work, FILL_TOKENS, rows * 4);
    work = add_case(bench, "embedding backward", run_embedding_backward,
                    2.0 * C * rows + 8.0 * C * (touched + positions) + 8.0 * rows, 0);
    add_array(work, FILL_FLOATS, V * C * 4);
    add_array(work, FILL_FLOATS, T * C * 4);
    add_array(work, FILL_NONE, embedding_partials_floats(bench->rows, bench->config.channels) * 4);
    add_array(work, FILL_REALS, rows * C * 2);
    add_array(work, FILL_TOKENS, rows * 4);
    add_array(work, FILL_ORDER, rows * 4);
}

static void add_layernorm(Bench *bench) {
    size_t rows = (size_t)bench->rows, C = (size_t)bench->config.channels;
    Case *work = add_case(bench, bench->gpt ? "layernorm forward" : "rmsnorm forward", run_layernorm_forward,
                          8.0 * rows * C + 8.0 * rows, 0);
    add_array(work, FILL_NONE, rows * C * 2);
    add_array(work, FILL_NONE, rows * 8);
    add_array(work, FILL_NONE, rows * C * 2);
    for (int i = 0; i < 2; i++) { add_array(work, FILL_REALS, rows * C * 2); }
    for (int i = 0; i < 3; i++) { add_array(work, FILL_REALS, C * 2); }
    work = add_case(bench, bench->gpt ? "layernorm backward" : "rmsnorm backward", run_layernorm_backward,
                    8.0 * rows * C + 8.0 * rows, 0);
    add_array(work, FILL_REALS, rows * C * 2);
    add_array(work, FILL_FLOATS, 3 * C * 4);
    add_array(work, FILL_NONE, row_partials_floats(true, 3 * C) * 4);
    for (int i = 0; i < 2; i++) { add_array(work, FILL_REALS, rows * C * 2); }
    add_array(work, FILL_FLOATS, rows * 8);
    add_array(work, FILL_REALS, C * 2);
}

static void add_gelu(Bench *bench) {
    size_t rows = (size_t)bench->rows, F = (size_t)bench->config.mlp_channels, wide = (size_t)bench->wide;
    Case *work = add_case(bench, "gelu forward", run_gelu_forward, 4.0 * rows * F, 0);
    add_array(work, FILL_NONE, rows * F * 2);
    add_array(work, FILL_REALS, rows * F * 2);
    add_array(work, FILL_REALS, F * 2);
    work = add_case(bench, "gelu backward", run_gelu_backward, 6.0 * rows * F, 0);
    add_array(work, FILL_REALS, rows * wide * 2);
    add_array(work, FILL_REALS, rows * F * 2);
    add_array(work, FILL_REALS, F * 2);
    add_array(work, FILL_FLOATS, F * 4);
    add_array(work, FILL_NONE, row_partials_floats(true, F) * 4);
}

static void add_swiglu(Bench *bench) {
    size_t rows = (size_t)bench->rows, F = (size_t)bench->config.mlp_channels, wide = (size_t)bench->wide;
    for (int backward = 0; backward < 2; backward++) {
        Case *work = add_case(bench, backward ? "swiglu backward" : "swiglu forward", run_swiglu,
                              (backward ? 10.0 : 6.0) * rows * F, 0);
        add_array(work, FILL_NONE, rows * F * 2);
        add_array(work, FILL_REALS, 2 * rows * F * 2);
        if (backward) { add_array(work, FILL_REALS, rows * wide * 2); }
    }
}

static void add_rotary(Bench *bench) {
    const ModelConfig *config = &bench->config;
    size_t rows = (size_t)bench->rows, D = (size_t)model_head_size(config), T = (size_t)bench->T,
           heads = (size_t)(config->heads + model_kv_heads(config)) * D,
           QKV = (size_t)model_dimension(config, DIM_QKV);
    for (int backward = 0; backward < 2; backward++) {
        Case *work = add_case(bench, backward ? "rotary backward" : "rotary forward", run_rotary,
                              (config->head_norms ? 6.0 : 4.0) * rows * heads + 4.0 * T * D, 0);
        work->backward = backward == 1;
        add_array(work, FILL_REALS, rows * (backward ? (size_t)bench->wide : QKV) * 2);
        add_array(work, FILL_FLOATS, T * D * 4);
        if (!config->head_norms) { continue; }
        add_array(work, FILL_REALS, rows * heads * 2);
        add_array(work, FILL_REALS, D * 2);
        add_array(work, FILL_FLOATS, 2 * D * 4);
        add_array(work, FILL_NONE, row_partials_floats(true, 2 * D) * 4);
    }
}

static void add_cross_entropy(Bench *bench) {
    size_t rows = (size_t)bench->chunk;
    Case *work = add_case(bench, "cross entropy, one chunk", run_cross_entropy,
                          4.0 * rows * bench->config.vocabulary + 8.0 * rows, 0);
    work->rows = bench->chunk;
    add_array(work, FILL_REALS, rows * (size_t)bench->logits_stride * 2);
    add_array(work, FILL_NONE, rows * 4);
    add_array(work, FILL_TOKENS, rows * 4);
}

// Forward's arrays come first in both: the backward pass needs what it leaves.
static void add_attention(Bench *bench, int window) {
    const ModelConfig *config = &bench->config;
    size_t rows = (size_t)bench->rows, C = (size_t)model_dimension(config, DIM_HEADS),
           QKV = (size_t)model_dimension(config, DIM_QKV);
    ModelConfig one = *config;
    one.local[0] = window > 0;
    double work_unit = (double)rows * model_mean_keys(&one, 0, bench->T) * (double)C;
    int D = model_head_size(config);
    bool has_narrow = bench->gpt && (D == 64 || D == 80);
    static const char *const names[3] = {"forward", "backward", "backward, narrow"};
    void (*const runs[3])(Bench *, const Case *, void **) = {run_attention_forward, run_attention_backward,
                                                             D == 64 ? run_attention_backward_narrow<64>
                                                                     : run_attention_backward_narrow<80>};
    for (int kind = 0; kind < (has_narrow ? 3 : 2); kind++) {
        char name[48];
        bool backward = kind > 0;
        snprintf(name, sizeof name, "attention %s, %s", names[kind], window > 0 ? "local" : "global");
        Case *work = add_case(bench, name, runs[kind], 0, (backward ? 10 : 4) * work_unit);
        work->window = window;
        add_array(work, FILL_NONE, rows * C * 2);
        add_array(work, FILL_NONE, rows * (size_t)config->heads * 4);
        add_array(work, FILL_REALS, rows * QKV * 2);
        if (!backward) { continue; }
        work->prepare = run_attention_forward;
        add_array(work, FILL_NONE, rows * (size_t)bench->wide * 2);
        add_array(
            work, FILL_NONE,
            attention_scratch_floats(true, bench->B, bench->T, (int)C, config->heads, 0, PRECISION_BF16) * 4);
        add_array(work, FILL_REALS, rows * C * 2);
    }
}

// The three products of a linear layer: output, gradient of the input, gradient of the
// weight.
static void add_linear(Bench *bench, const char *name, int rows, int inputs, int outputs) {
    static void (*const runs[3])(Bench *, const Case *, void **) = {run_product_forward, run_product_input,
                                                                    run_product_weight};
    static const char *const passes[3] = {"forward", "d input", "d weight"};
    for (int pass = 0; pass < 3; pass++) {
        char full[48];
        snprintf(full, sizeof full, "product %s, %s", name, passes[pass]);
        Case *work = add_case(bench, full, runs[pass], 0, 2.0 * rows * inputs * outputs);
        work->product = true;
        work->result = pass;
        work->rows = rows;
        work->inputs = inputs;
        work->outputs = outputs;
        size_t stride = (size_t)gradient_stride(bench, work);
        add_array(work, pass == 0 ? FILL_NONE : FILL_REALS, (size_t)rows * stride * 2);
        add_array(work, pass == 1 ? FILL_NONE : FILL_REALS, (size_t)rows * (size_t)inputs * 2);
        add_array(work, pass == 2 ? FILL_FLOATS : FILL_REALS,
                  (size_t)inputs * (size_t)outputs * (pass == 2 ? 4 : 2));
    }
}

// Casts of a layer's input alone, and with its product.
static void add_fp8(Bench *bench, const char *name, int inputs, int outputs) {
    size_t rows = (size_t)bench->rows, columns = (size_t)inputs, results = (size_t)outputs;
    for (int product = 0; product < 2; product++) {
        char full[48];
        snprintf(full, sizeof full, "FP8 %s, %s", name, product == 1 ? "cast and forward" : "cast");
        Case *work = add_case(bench, full, product == 1 ? run_product_fp8 : run_cast_fp8,
                              product == 1 ? 0 : 5.0 * (double)(rows * columns),
                              product == 1 ? 2.0 * (double)(rows * columns * results) : 0);
        work->rows = bench->rows;
        work->inputs = inputs;
        work->outputs = outputs;
        work->prepare = prepare_product_fp8;
        add_array(work, FILL_NONE, rows * results * 2);
        add_array(work, FILL_REALS, rows * columns * 2);
        add_array(work, FILL_REALS, results * columns * 2);
        add_array(work, FILL_NONE, results * columns);
        add_array(work, FILL_NONE, 4);
        add_array(work, FILL_NONE, rows * columns);
        add_array(work, FILL_NONE, 4);
        add_array(work, FILL_NONE, CUDA_ROW_BLOCKS * 4);
    }
}

// floats: arrays of fp32, all filled.
static Case *add_vector(Bench *bench, const char *name, void (*run)(Bench *, const Case *, void **),
                        double bytes_per_element, int floats) {
    Case *work = add_case(bench, name, run, bytes_per_element * (double)bench->elements, 0);
    for (int i = 0; i < floats; i++) { add_array(work, FILL_FLOATS, bench->elements * 4); }
    return work;
}

// The sum reads what two ranks sent.
static void add_wire(Bench *bench, WireFormat format) {
    static void (*const runs[3])(Bench *, const Case *, void **) = {run_wire_encode, run_wire_decode,
                                                                    run_wire_sum};
    static const char *const names[3] = {"encode", "decode", "sum of 2"};
    size_t bytes = wire_bytes(format, bench->elements);
    for (int kind = 0; kind < 3; kind++) {
        char name[48];
        int runs_read = kind == 2 ? 2 : 1;
        snprintf(name, sizeof name, "wire %s, %s", wire_name(format), names[kind]);
        Case *work = add_case(bench, name, runs[kind],
                              (double)runs_read * (double)bytes + 4.0 * (double)bench->elements, 0);
        work->format = format;
        work->prepare = kind == 0 ? NULL : kind == 1 ? run_wire_encode : prepare_wire;
        for (int i = 0; i < runs_read; i++) { add_array(work, FILL_NONE, bytes); }
        add_array(work, FILL_FLOATS, bench->elements * 4);
    }
}

static void add_vectors(Bench *bench) {
    size_t elements = bench->elements;
    Case *work = add_vector(bench, "adamw, commit", run_adamw, 32, 5);
    work->fill[3] = FILL_SQUARES;
    work = add_vector(bench, "adamw, commit in place", run_adamw, 30, 5);
    work->fill[3] = FILL_SQUARES;
    work->in_place = true;
    work = add_case(bench, "adamw, bf16 moments", run_adamw, 24.0 * (double)elements, 0);
    work->moments = PRECISION_BF16;
    for (int i = 0; i < 5; i++) { // some second moments are negative: a NaN takes no longer
        bool moment = i == 2 || i == 3;
        add_array(work, moment ? FILL_REALS : FILL_FLOATS, elements * (moment ? 2 : 4));
    }
    work = add_case(bench, "bf16 weights from fp32", run_reals_from_floats, 6.0 * (double)elements, 0);
    add_array(work, FILL_NONE, elements * 2);
    add_array(work, FILL_FLOATS, elements * 4);
    work = add_vector(bench, "sum of squares", run_sum_of_squares, 4, 1);
    add_array(work, FILL_NONE, buffer_blocks(elements) * sizeof(double));
    add_vector(bench, "outer pseudo-gradient", run_outer_pseudo_gradient, 12, 3);
    add_vector(bench, "outer nesterov", run_outer_nesterov, 28, 4);
    for (int format = WIRE_BF16; format < WIRE_FORMAT_COUNT; format++) {
        add_wire(bench, (WireFormat)format);
    }
}

static void add_cases(Bench *bench) {
    const ModelConfig *config = &bench->config;
    int C = config->channels, F = config->mlp_channels;
    add_embedding(bench);
    add_layernorm(bench);
    if (bench->gpt) { add_gelu(bench); }
    if (!bench->gpt) {
        add_rotary(bench);
        add_swiglu(bench);
    }
    add_cross_entropy(bench);
    add_attention(bench, 0);
    if (config->window > 0) { add_attention(bench, config->window); }
    add_linear(bench, "qkv", bench->rows, C, model_dimension(config, DIM_QKV));
    add_linear(bench, "out", bench->rows, model_dimension(config, DIM_HEADS), C);
    add_linear(bench, "fc", bench->rows, C, bench->gpt ? F : 2 * F);
    add_linear(bench, "proj", bench->rows, F, C);
    add_linear(bench, "head, one chunk", bench->chunk, C, bench->logits_stride);
    add_vectors(bench);
}

// ---- Running --------------------------------------------------------------------------

static void open_stream(Stream *stream) {
    void *workspace = gpu_allocate(GEMM_WORKSPACE_BYTES);
    memset(stream, 0, sizeof *stream);
    stream->name = "bench";
    stream->queue = gpu_queue_create(false);
    stream->precision = PRECISION_BF16;
    if (workspace == NULL) { cuda_check(cudaErrorMemoryAllocation, "work space of products"); }
    gemm_open(stream, workspace);
}

static void grow_pool(Bench *bench, const Case *work) {
    size_t bytes = (size_t)set_count(bench, work) * set_bytes(work);
    if (bytes <= bench->pool_bytes) { return; }
    if (bench->pool != NULL) { gpu_release(bench->pool); }
    bench->pool = (char *)gpu_allocate(bytes);
    bench->pool_bytes = bytes;
    if (bench->pool == NULL) { cuda_check(cudaErrorMemoryAllocation, work->name); }
}

static Times measure(Bench *bench, const Case *work) {
    grow_pool(bench, work);
    gemm_limit(&bench->stream, work->fewer > 0 ? bench->processors - work->fewer : 0);
    return time_case(bench, work);
}

// Runs the product of a case once, which loads the plan's algorithm. False: the library does not.
static bool try_offer(Bench *bench, const Case *work, const CudaGemmPlan *plan) {
    void *arrays[ARRAYS];
    int a = work->result == 2 ? 1 : 2, b = work->result == 0 ? 1 : 0; // the two others
    place_set(bench, work, 0, arrays);
    Matmul call = {.a = (const Real *)arrays[b],
                   .b = (const Real *)arrays[a],
                   .result = (Real *)arrays[work->result],
                   .accumulate = work->result == 2,
                   .scale = 1.0f,
                   .count = 1};
    return cuda_gemm_call(&bench->stream, plan, &call) == CUBLAS_STATUS_SUCCESS;
}

// The quickest of the library's algorithms for a case that is one product. Each runs ten times
// back to back: alone, a product runs at a higher clock than in training, where others rank
// first. first: the times of the first offer, which the program takes, just measured.
static Times measure_tuned(Bench *bench, const Case *work, Times first) {
    CudaGemmLibrary *library = (CudaGemmLibrary *)bench->stream.gemm;
    cublasLtMatmulHeuristicResult_t offers[CUDA_GEMM_OFFERS];
    CudaGemmPlan *plan = library->plans;
    double least = INFINITY;
    int count, refused = 0, offer = 0, sets = set_count(bench, work);
    while (plan->used != library->products) { plan++; }
    cublasLtMatmulAlgo_t taken = plan->algorithm, best = taken;
    CUBLAS_CHECK(cuda_gemm_ask(library, plan, offers, &count));
    for (int i = 0; i < count; i++) {
        plan->algorithm = offers[i].algo;
        if (!cuda_gemm_is_usable(library, plan, &offers[i]) || !try_offer(bench, work, plan)) {
            refused++;
            continue;
        }
        double seconds = time_runs(bench, work, sets, bench->small ? 2 : TUNING_RUNS);
        if (!(seconds < least)) { continue; }
        least = seconds;
        best = offers[i].algo;
        offer = i;
    }
    plan->algorithm = best;
    Times times = memcmp(&best, &taken, sizeof best) != 0 ? measure(bench, work) : first;
    plan->algorithm = taken;
    if (!(times.median < first.median)) {
        times = first;
        offer = 0;
    }
    times.refused = refused;
    times.offer = offer;
    return times;
}

static void measure_ceilings(Bench *bench) {
    size_t bytes = bench->small ? 4096 : (size_t)1 << 30;
    int edge = bench->small ? 32 : 8192;
    Case *copy = add_case(bench, "copy", run_copy, 2.0 * (double)bytes, 0);
    add_array(copy, FILL_REALS, bytes);
    add_array(copy, FILL_NONE, bytes);
    Times times = measure(bench, copy);
    bench->copy_rate = copy->traffic / times.median;
    printf("ceiling copy    %8.1f GB/s    read and written, %zu MB (%.1f .. %.1f)\n", 1e-9 * bench->copy_rate,
           bytes >> 20, 1e-9 * copy->traffic / times.most, 1e-9 * copy->traffic / times.least);
    bench->count = 0;
    bench->config.channels = edge; // no wide outputs
    add_linear(bench, "square", edge, edge, edge);
    for (int tune = 0; tune < 2; tune++) {
        times = tune == 0 ? measure(bench, &bench->cases[0]) : measure_tuned(bench, &bench->cases[0], times);
        bench->product_rate = fmax(bench->product_rate, bench->cases[0].operations / times.median);
        printf("product, square %8.1f TFLOP/s %s, %d^3 (%.1f .. %.1f)\n",
               1e-12 * bench->cases[0].operations / times.median, tune == 1 ? "tuned" : "first offer", edge,
               1e-12 * bench->cases[0].operations / times.most,
               1e-12 * bench->cases[0].operations / times.least);
    }
    printf("ceiling product %8.1f TFLOP/s\n", 1e-12 * bench->product_rate);
    fflush(stdout);
    bench->count = 0;
}

static void print_case(const Bench *bench, const Case *work, Times times, const char *note) {
    double rate = (work->operations > 0 ? work->operations : work->traffic) / times.median;
    double ceiling = work->operations > 0 ? bench->product_rate : bench->copy_rate;
    printf("%-34s %10.1f us %9.1f %-7s %5.1f %%  (%.1f .. %.1f us)%s\n", work->name, 1e6 * times.median,
           rate * (work->operations > 0 ? 1e-12 : 1e-9), work->operations > 0 ? "TFLOP/s" : "GB/s",
           ceiling > 0 ? 100 * rate / ceiling : 0, 1e6 * times.least, 1e6 * times.most, note);
    fflush(stdout);
}

// only: what names must begin with.
static void measure_kernels(Bench *bench, const char *only) {
    printf("\nkernels at %s, B %d, T %d, bf16; logits in chunks of %d rows; vectors of %zu elements\n",
           bench->config.name, bench->B, bench->T, bench->chunk, bench->elements);
    add_cases(bench);
    for (int i = 0; i < bench->count; i++) {
        const Case *work = &bench->cases[i];
        if (strncmp(work->name, only, strlen(only)) != 0) { continue; }
        Times times = measure(bench, work);
        print_case(bench, work, times, "");
        if (work->product && only[0] == '\0') {
            char note[64];
            times = measure_tuned(bench, work, times);
            snprintf(note, sizeof note, " offer %d, %d refused, tuned", times.offer, times.refused);
            print_case(bench, work, times, note);
        }
    }
}

static void measure_variants(Bench *bench) {
    const ModelConfig *config = &bench->config;
    int C = config->channels, F = config->mlp_channels;
    static const int most[] = {4096, 8192, 11008, 16384}; // for HEAD_GPU_CHUNK
    printf("\nvariants at %s, B %d, T %d, bf16\n", config->name, bench->B, bench->T);
    for (int i = 0; i < 4; i++) {
        char name[32];
        int chunk = head_chunk_rows(bench->rows, most[i], bench->logits_stride, PRECISION_BF16, true);
        snprintf(name, sizeof name, "head, %d rows", chunk);
        add_linear(bench, name, chunk, C, bench->logits_stride);
    }
    const struct {
        const char *name;
        int inputs, outputs;
    } layers[] = {{"qkv", C, 3 * C}, {"fc", C, F}, {"proj", F, C}};
    for (int i = 0; i < 3 && bench->capability >= 89; i++) {
        add_fp8(bench, layers[i].name, layers[i].inputs, layers[i].outputs);
    }
    for (int fewer = 0; fewer <= 16; fewer += 8) {
        for (int i = 0; i < 3; i++) {
            char name[32];
            int first = bench->count;
            snprintf(name, sizeof name, "%s, %d fewer", layers[i].name, fewer);
            add_linear(bench, name, bench->rows, layers[i].inputs, layers[i].outputs);
            for (int k = first; k < bench->count; k++) { bench->cases[k].fewer = fewer; }
        }
    }
    for (int i = 0; i < bench->count; i++) {
        const Case *work = &bench->cases[i];
        if (work->fewer < bench->processors) { print_case(bench, work, measure(bench, work), ""); }
    }
}

// The model's own strides, chunks and tokens.
static void choose_shapes(Bench *bench, const char *model, int B, int T) {
    Error error;
    if (!model_find(model, &bench->config, &error)) {
        fprintf(stderr, "bench_cuda: %s\n", error.text);
        exit(EXIT_USER_MISTAKE);
    }
    const ModelConfig *config = &bench->config;
    ParameterTable table;
    parameter_table_make(config, &table);
    bench->elements = table.parameter_count < (size_t)64 << 20 ? table.parameter_count : (size_t)64 << 20;
    parameter_table_free(&table);
    bench->B = B;
    bench->T = T;
    bench->rows = B * T;
    bench->gpt = config->rotary.theta == 0;
    bench->wide = (int)size_max((size_t)model_dimension(config, DIM_QKV),
                                (size_t)config->mlp_channels * (bench->gpt ? 1 : 2));
    bench->logits_stride = head_logits_stride(config->vocabulary, true);
    bench->chunk = head_chunk_rows(bench->rows, HEAD_GPU_CHUNK, bench->logits_stride, PRECISION_BF16, true);
}

// Host and device agree on the tokens: they are brought back once.
static void choose_order(Bench *bench) {
    size_t rows = (size_t)bench->rows, bytes = rows * sizeof(int32_t);
    int32_t *tokens = (int32_t *)malloc(bytes),
            *counts = (int32_t *)malloc(((size_t)bench->config.vocabulary + 1) * sizeof(int32_t));
    void *device = gpu_allocate(bytes);
    bench->order = (int32_t *)malloc(bytes);
    fill_array(bench, FILL_TOKENS, device, bytes, 0);
    CUDA_CHECK(cudaMemcpyAsync(tokens, device, bytes, cudaMemcpyDeviceToHost, queue_of(bench)));
    stream_settle(&bench->stream);
    embedding_order(bench->order, counts, tokens, bench->rows, bench->config.vocabulary);
    gpu_release(device);
    free(tokens);
    free(counts);
}

static void bench_close(Bench *bench) {
    void *workspace = ((CudaGemmLibrary *)bench->stream.gemm)->workspace;
    gemm_close(&bench->stream);
    gpu_release(workspace);
    gpu_queue_destroy(bench->stream.queue);
    if (bench->pool != NULL) { gpu_release(bench->pool); }
    gpu_release(bench->spare);
    free(bench->order);
}

static int write_tokens(const char *path, long long count, int vocabulary) {
    const Tokenizer unknown = {.vocabulary = vocabulary, .end = -1};
    TokenWriter writer;
    Error error;
    Random random = {random_hash(5, 0)};
    bool good = token_writer_begin(&writer, path, &unknown, 0, &error);
    for (long long i = 0; good && i < count; i++) {
        int32_t token = (int32_t)(random_uniform(&random) * (double)vocabulary);
        good = token_writer_add(&writer, &token, 1, &error);
    }
    good = good && token_writer_end(&writer, &error);
    if (!good) { fprintf(stderr, "bench_cuda: %s\n", error.text); }
    return good ? 0 : EXIT_SYSTEM_FAILURE;
}

int main(int count, char **arguments) {
    const char *command = count > 1 ? arguments[1] : "";
    if (strcmp(command, "tokens") == 0 && count == 5) {
        return write_tokens(arguments[2], atoll(arguments[3]), atoi(arguments[4]));
    }
    bool shaped = count >= 5 && atoi(arguments[3]) > 0 && atoi(arguments[4]) > 0,
         kernels = strcmp(command, "kernels") == 0 && shaped && count <= 6,
         variants = strcmp(command, "variants") == 0 && shaped && count == 5;
    if (!kernels && !variants && strcmp(command, "ceilings") != 0 && strcmp(command, "gpu") != 0) {
        fprintf(stderr, "usage: bench_cuda gpu | ceilings | kernels MODEL B T [NAME] | variants MODEL B T "
                        "| tokens FILE COUNT VOCABULARY\n");
        return EXIT_USER_MISTAKE;
    }
    Error error;
    Gpu gpu;
    if (!gpu_open(&gpu, 0, &error)) {
        fprintf(stderr, "bench_cuda: %s\n", error.text);
        return EXIT_SYSTEM_FAILURE;
    }
    printf("%s, %d of them, compute capability %d.%d, %d processors, %.1f of %.1f GB free\n", gpu.name,
           gpu.count, gpu.capability / 10, gpu.capability % 10, gpu.sm_count,
           (double)gpu.memory_available / 1e9, (double)gpu.memory_total / 1e9);
    if (strcmp(command, "gpu") == 0) { return 0; }
    Bench *bench = (Bench *)calloc(1, sizeof *bench);
    bench->small = getenv("ACCO_SMALL") != NULL;
    bench->processors = gpu.sm_count;
    bench->capability = gpu.capability;
    bench->cache_bytes = bench->small ? 1 : (size_t)512 << 20;
    open_stream(&bench->stream);
    bench->spare_bytes = bench->small ? 4096 : (size_t)256 << 20;
    bench->spare = gpu_allocate(bench->spare_bytes);
    if (bench->spare == NULL) { cuda_check(cudaErrorMemoryAllocation, "spare memory"); }
    if (count <= 5) { measure_ceilings(bench); }
    if (shaped) { choose_shapes(bench, arguments[2], atoi(arguments[3]), atoi(arguments[4])); }
    if (kernels) {
        choose_order(bench);
        measure_kernels(bench, count > 5 ? arguments[5] : "");
    }
    if (variants) { measure_variants(bench); }
    bench_close(bench);
    free(bench);
    return 0;
}
