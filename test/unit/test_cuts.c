// test_cuts.c: no bit of an element depends on where an array was cut: by owners, by threads, or
// by the processor's vectors, behind which a compiler computes the last elements in another way. No
// sum over a row depends on the row's address. And every compiler makes the same bits.
#include "test/harness.h"

#include "kernels/kernels.h"
#include "runtime/random.h"

enum {
    CUTS = 34,   // places of a cut: two vectors of 16 and more
    COUNT = 130, // elements of an array, or two rows of 65
    SPACE = COUNT + CUTS,
    FLOATS = 4, // arrays of fp32, then some in the format of the moments and in the stream's
    MOMENTS = 2,
    REALS = 6,
    ARRAYS = FLOATS + MOMENTS + REALS
};

typedef struct Case Case;

// The elements from `flat` on of all arrays.
typedef struct Call {
    const Case *of;
    Stream *stream;
    float *floats[FLOATS];
    Real *moments[MOMENTS], *reals[REALS];
    size_t flat, count;
} Call;

struct Case {
    const char *what;
    void (*run)(const Call *call);
    bool rows; // sums over rows: it cannot be cut
    int variant;
    Precision moments, precision;
};

static float workspace[ROW_BLOCKS * 3 * COUNT];

// ---- Elementwise: updates -------------------------------------------------------------

static StepRange step_range(const Call *call, double *partials) {
    StepRange range = {
        .out = call->floats[0],
        .master = call->floats[1],
        .first_moment = call->moments[0],
        .second_moment = call->moments[1],
        .gradient = call->floats[2],
        .count = call->count,
        .flat = call->flat,
        .moments = call->of->moments,
        .key = {0x12345678, 0x9abcdef0},
        .step = {0.9f, 0.1f, 0.95f, 0.05f, 0.271f, 0.142625f, 1e-8f, 1e-3f, 0.9999f, 3.0f, 0.7f},
        .keeps = call->of->variant == 1,
        .direction = call->reals[0],
        .partials = partials,
        .precision = call->of->precision};
    return range;
}

static void run_adamw(const Call *call) {
    StepRange range = step_range(call, NULL);
    adamw(call->stream, &range);
}

static void run_muon_direction(const Call *call) {
    double squares = 77; // of the whole matrix
    StepRange range = step_range(call, &squares);
    if (call->count > 0) { muon_direction(call->stream, &range); }
}

static void run_muon_apply(const Call *call) {
    StepRange range = step_range(call, NULL);
    muon_apply(call->stream, &range);
}

static void run_outer_difference(const Call *call) {
    OuterRange range = {.outer = call->floats[1],
                        .local = call->floats[2],
                        .exchange = call->floats[0],
                        .count = call->count};
    outer_pseudo_gradient(call->stream, &range, 0.75f);
}

static void run_outer_nesterov(const Call *call) {
    NesterovStep step = {1.0f / 3, 0.7f, 0.9f, call->of->variant == 1 ? 0.3f : 0.0f};
    OuterRange range = {call->floats[0], call->floats[1], call->floats[2], call->floats[3], NULL,
                        call->count};
    outer_nesterov(call->stream, &range, &step);
}

static void run_outer_momentum(const Call *call) {
    int variant = call->of->variant;
    MomentumStep step = {.inverse_weight = 1.0f / 3,
                         .weight = 0.75f,
                         .own_share = variant != 1 ? 1.0f / 3 : 0,
                         .beta = 0.9f,
                         .alpha = 0.7f,
                         .phi = variant == 1 ? 0.4f : 0.0f,
                         .gap = 1.3f,
                         .received = variant > 0};
    OuterRange range = {
        call->floats[0], call->floats[1], call->floats[2], call->floats[3], real_floats(call->moments[0]),
        call->count};
    outer_momentum(call->stream, &range, &step);
}

// ---- Elementwise: formats and layers --------------------------------------------------

static void run_rounding(const Call *call) {
    reals_from_floats(call->stream, call->reals[0], call->floats[0], call->count);
    buffer_round(call->stream, call->floats[1], call->count);
    buffer_copy(call->stream, call->floats[2], call->floats[3], call->count);
}

// Its rows are cut here: the sums over the only row are its elements.
static void run_gelu(const Call *call) {
    int columns = (int)call->count;
    Gelu work = {.output = call->reals[1],
                 .saved = call->reals[0],
                 .gradient = call->reals[3],
                 .bias = call->reals[2],
                 .d_bias = call->floats[0],
                 .partials = workspace,
                 .rows = 1,
                 .columns = columns,
                 .gradient_stride = columns};
    gelu_forward(call->stream, &work);
    gelu_backward(call->stream, &work);
}

static void run_swiglu(const Call *call) {
    int columns = (int)call->count;
    float gated[2][SPACE * 2]; // gates and what they gate, side by side; the same of gradients
    size_t bytes = (size_t)columns * precision_bytes(call->of->precision);
    memcpy(gated[0], (void *)call->reals[0], bytes);
    memcpy((char *)gated[0] + bytes, (void *)call->reals[1], bytes);
    memcpy(gated[1], (void *)call->reals[2], bytes);
    Swiglu work = {.output = call->reals[3], .saved = as_reals(gated[0]), .rows = 1, .columns = columns};
    swiglu(call->stream, &work);
    work.gradient = as_reals(gated[1]);
    swiglu(call->stream, &work);
    memcpy((void *)call->reals[0], gated[0], bytes);
    memcpy((void *)call->reals[1], (char *)gated[1], bytes);
    memcpy((void *)call->reals[2], (char *)gated[1] + bytes, bytes);
}

static void run_bias(const Call *call) {
    Bias work = {.values = call->reals[0],
                 .bias = call->reals[1],
                 .d_bias = call->of->variant == 1 ? call->floats[0] : NULL,
                 .partials = workspace,
                 .rows = 1,
                 .columns = (int)call->count,
                 .stride = (int)call->count,
                 .scaled = call->flat < COUNT / 2 ? (int)(COUNT / 2 - call->flat) : 0,
                 .scale = 0.1f};
    bias_add(call->stream, &work);
}

// ---- Rows -----------------------------------------------------------------------------

static void run_wire(const Call *call) {
    WireFormat format = (WireFormat)call->of->variant;
    wire_encode(format, call->floats[0], call->floats[1], call->count);
    wire_decode(format, call->floats[2], call->floats[0], call->count);
    wire_add(format, call->floats[3], call->floats[0], call->count);
}

static void run_squares(const Call *call) {
    double sums[2];
    StepRange range = step_range(call, &sums[0]);
    muon_norm(call->stream, &range);
    sums[1] = buffer_sum_of_squares(call->stream, call->floats[1], call->count, 0, 1, &sums[1]);
    memcpy(call->floats[0], sums, sizeof sums);
}

static void run_polynomial(const Call *call) {
    muon_polynomial(call->stream, call->reals[0], call->reals[1], 11, 1);
}

static void run_layernorm(const Call *call) {
    Real *const *reals = call->reals;
    Layernorm work = {.statistics = call->floats[0],
                      .residual = reals[0],
                      .weight = reals[1],
                      .bias = reals[2],
                      .epsilon = 1e-5f,
                      .rows = 2,
                      .channels = COUNT / 2,
                      .output = reals[3],
                      .residual_before = reals[4],
                      .branch = reals[5],
                      .branch_bias = reals[2],
                      .d_residual = call->moments[0],
                      .accumulate = call->of->variant == 1,
                      .d_weight = call->floats[1],
                      .d_bias = call->floats[2],
                      .d_branch_bias = call->floats[3],
                      .partials = workspace,
                      .d_output = reals[5]};
    layernorm_forward(call->stream, &work);
    layernorm_backward(call->stream, &work);
}

// Two rows of a head of queries and one of keys, of 32.
static void run_rotary(const Call *call) {
    bool normed = call->of->variant == 1;
    const Real *weight = normed ? call->reals[1] : NULL;
    Rotary work = {.values = call->reals[0],
                   .saved = call->reals[2],
                   .turns = call->floats[0],
                   .weights = {weight, weight},
                   .d_weights = {call->floats[1], call->floats[2]},
                   .partials = workspace,
                   .rows = 2,
                   .T = 2,
                   .heads = 1,
                   .kv_heads = 1,
                   .head_size = 32,
                   .stride = COUNT / 2,
                   .scale = 0.1f,
                   .epsilon = 1e-5f};
    rotary(call->stream, &work);
    work.backward = true;
    work.values = call->reals[3];
    rotary(call->stream, &work);
}

static void run_rms(const Call *call) {
    Real *const *reals = call->reals;
    Layernorm work = {.statistics = call->floats[0],
                      .residual = reals[0],
                      .weight = reals[1],
                      .epsilon = 1e-5f,
                      .rows = 2,
                      .channels = COUNT / 2,
                      .output = reals[3],
                      .residual_before = reals[4],
                      .branch = reals[5],
                      .d_residual = call->moments[0],
                      .d_weight = call->floats[1],
                      .partials = workspace,
                      .d_output = reals[5]};
    layernorm_forward(call->stream, &work);
    layernorm_backward(call->stream, &work);
}

// The losses have a logarithm of the C library's, and are left out.
static void run_cross_entropy(const Call *call) {
    const int32_t targets[2] = {3, COUNT / 2 - 1};
    float losses[2];
    cross_entropy(call->stream, call->reals[0], COUNT / 2, losses, targets, 2, COUNT / 2, 0.1f);
}

static void run_softmax(const Call *call) {
    attention_softmax(call->floats[0], 3, COUNT - 2, COUNT);
    attention_softmax_backward(call->floats[1], call->floats[2], 1.5f, 3, COUNT - 2, COUNT);
}

static void run_decode(const Call *call) { // two heads of 32, at the second position
    AttentionDecode work = {.output = call->floats[0],
                            .scores = real_floats(call->moments[0]),
                            .query = call->floats[1],
                            .keys = call->floats[2],
                            .values = call->floats[3],
                            .position = 1,
                            .positions = 2,
                            .channels = COUNT / 2 - 1,
                            .heads = 2,
                            .kv_heads = 2};
    cpu_attention_decode(call->stream, &work);
}

static void run_product(const Call *call) {
    const Real *a = as_reals_const(call->floats[1]), *b = as_reals_const(call->floats[2]);
    Matmul work = matmul_describe(PRECISION_FP32, as_reals(call->floats[0]), 11, a, 11, false, b, 11, false,
                                  11, 11, 11, call->of->variant == 1);
    matmul_block_plain(&work);
}

static void run_sparse(const Call *call) {
    static const float weights[2] = {1, 0.75f};
    const SparseStep step = {2, 0.7f, 1.75f, weights};
    SparseBlock blocks[2];
    OuterRange range = {.outer = call->floats[2],
                        .local = call->floats[3],
                        .start = real_floats(call->moments[0]),
                        .count = call->count};
    for (int rank = 0; rank < 2; rank++) {
        range.exchange = call->floats[rank];
        sparse_encode(call->stream, &range, &blocks[rank], 0.95f);
    }
    range.exchange = call->floats[0];
    sparse_apply(call->stream, &range, blocks, 1, &step);
}

static const Case cases[] = {
    {"adamw, estimate", run_adamw, false, 0, PRECISION_FP32, PRECISION_FP32},
    {"adamw, commit", run_adamw, false, 1, PRECISION_FP32, PRECISION_FP32},
    {"adamw, moments in bf16, estimate", run_adamw, false, 0, PRECISION_BF16, PRECISION_FP32},
    {"adamw, moments in bf16, commit", run_adamw, false, 1, PRECISION_BF16, PRECISION_FP32},
    {"muon's direction, estimate", run_muon_direction, false, 0, PRECISION_FP32, PRECISION_FP32},
    {"muon's direction, commit", run_muon_direction, false, 1, PRECISION_FP32, PRECISION_BF16},
    {"muon's direction, momentum in bf16", run_muon_direction, false, 1, PRECISION_BF16, PRECISION_FP32},
    {"muon's direction, all in bf16", run_muon_direction, false, 1, PRECISION_BF16, PRECISION_BF16},
    {"muon's step, estimate", run_muon_apply, false, 0, PRECISION_FP32, PRECISION_FP32},
    {"muon's step, commit, bf16", run_muon_apply, false, 1, PRECISION_FP32, PRECISION_BF16},
    {"pseudo-gradient", run_outer_difference, false, 0, PRECISION_FP32, PRECISION_FP32},
    {"nesterov", run_outer_nesterov, false, 0, PRECISION_FP32, PRECISION_FP32},
    {"nesterov, merged", run_outer_nesterov, false, 1, PRECISION_FP32, PRECISION_FP32},
    {"outer momentum, first round", run_outer_momentum, false, 0, PRECISION_FP32, PRECISION_FP32},
    {"outer momentum, clipped", run_outer_momentum, false, 1, PRECISION_FP32, PRECISION_FP32},
    {"outer momentum, eager", run_outer_momentum, false, 2, PRECISION_FP32, PRECISION_FP32},
    {"rounding", run_rounding, false, 0, PRECISION_FP32, PRECISION_BF16},
    {"gelu", run_gelu, false, 0, PRECISION_FP32, PRECISION_FP32},
    {"gelu, bf16", run_gelu, false, 0, PRECISION_FP32, PRECISION_BF16},
    {"swiglu", run_swiglu, false, 0, PRECISION_FP32, PRECISION_FP32},
    {"swiglu, bf16", run_swiglu, false, 0, PRECISION_FP32, PRECISION_BF16},
    {"bias", run_bias, false, 0, PRECISION_FP32, PRECISION_FP32},
    {"bias, backward, bf16", run_bias, false, 1, PRECISION_FP32, PRECISION_BF16},
    {"fp32", run_wire, true, WIRE_FP32, PRECISION_FP32, PRECISION_FP32},
    {"bf16", run_wire, true, WIRE_BF16, PRECISION_FP32, PRECISION_FP32},
    {"int8", run_wire, true, WIRE_INT8, PRECISION_FP32, PRECISION_FP32},
    {"int4", run_wire, true, WIRE_INT4, PRECISION_FP32, PRECISION_FP32},
    {"e3m0", run_wire, true, WIRE_E3M0, PRECISION_FP32, PRECISION_FP32},
    {"sums of squares", run_squares, true, 0, PRECISION_FP32, PRECISION_FP32},
    {"sums of squares, bf16", run_squares, true, 0, PRECISION_BF16, PRECISION_FP32},
    {"muon's polynomial", run_polynomial, true, 0, PRECISION_FP32, PRECISION_FP32},
    {"muon's polynomial, bf16", run_polynomial, true, 0, PRECISION_FP32, PRECISION_BF16},
    {"layernorm", run_layernorm, true, 0, PRECISION_FP32, PRECISION_FP32},
    {"layernorm, bf16", run_layernorm, true, 1, PRECISION_BF16, PRECISION_BF16},
    {"rmsnorm", run_rms, true, 0, PRECISION_FP32, PRECISION_FP32},
    {"rmsnorm, bf16", run_rms, true, 0, PRECISION_BF16, PRECISION_BF16},
    {"rotary", run_rotary, true, 0, PRECISION_FP32, PRECISION_FP32},
    {"rotary, normed, bf16", run_rotary, true, 1, PRECISION_FP32, PRECISION_BF16},
    {"cross entropy", run_cross_entropy, true, 0, PRECISION_FP32, PRECISION_FP32},
    {"cross entropy, bf16", run_cross_entropy, true, 0, PRECISION_FP32, PRECISION_BF16},
    {"softmax", run_softmax, true, 0, PRECISION_FP32, PRECISION_FP32},
    {"attention of a token", run_decode, true, 0, PRECISION_FP32, PRECISION_FP32},
    {"product", run_product, true, 0, PRECISION_FP32, PRECISION_FP32},
    {"product, added", run_product, true, 1, PRECISION_FP32, PRECISION_FP32},
    {"sparse", run_sparse, true, 0, PRECISION_FP32, PRECISION_FP32},
};
enum { CASES = sizeof cases / sizeof cases[0] };

// ---- The arrays -----------------------------------------------------------------------

typedef float Arrays[ARRAYS][SPACE];

static Precision precision_of(const Case *of, int array) {
    return array < FLOATS ? PRECISION_FP32 : array < FLOATS + MOMENTS ? of->moments : of->precision;
}

// The same numbers for every case and at every offset, from -2 to 2 and all sizes down to 2^-20 of
// that; second moments are positive.
static void arrays_fill(const Case *of, Arrays arrays, size_t offset) {
    memset(arrays, 0, sizeof(Arrays));
    for (int a = 0; a < ARRAYS; a++) {
        Random random = {random_hash(1, (uint64_t)a)};
        for (size_t i = 0; i < COUNT; i++) {
            double value = 4 * random_uniform(&random) - 2;
            value = ldexp(a == FLOATS + 1 ? fabs(value) : value, -(int)(20 * random_uniform(&random)));
            real_store(as_reals(arrays[a]), offset + i, (float)value, precision_of(of, a));
        }
    }
}

// Runs the case on elements [begin, end) of arrays that begin at `offset`.
static void case_run(const Case *of, Arrays arrays, size_t offset, size_t begin, size_t end) {
    static Stream stream;
    Call call = {.of = of, .stream = &stream, .flat = begin, .count = end - begin};
    if (stream.pool == NULL) { stream.pool = thread_pool_create(1, false); }
    stream.precision = of->precision;
    for (int a = 0; a < ARRAYS; a++) {
        Real *at = real_at(as_reals(arrays[a]), offset + begin, precision_of(of, a));
        if (a < FLOATS) {
            call.floats[a] = real_floats(at);
        } else if (a < FLOATS + MOMENTS) {
            call.moments[a - FLOATS] = at;
        } else {
            call.reals[a - FLOATS - MOMENTS] = at;
        }
    }
    of->run(&call);
}

// Fails unless `arrays`, which begin at `offset`, have the bits of `whole`, which begin at 0.
static void check_bits(const Case *of, Arrays whole, Arrays arrays, size_t offset, const char *where) {
    for (int a = 0; a < ARRAYS; a++) {
        Precision precision = precision_of(of, a);
        size_t size = precision_bytes(precision);
        for (size_t i = 0; i < COUNT; i++) {
            if (memcmp(real_at(as_reals(whole[a]), i, precision),
                       real_at(as_reals(arrays[a]), offset + i, precision), size) != 0) {
                fail_msg("%s: element %zu of array %d has other bits when %s", of->what, i, a, where);
            }
        }
    }
}

static Arrays fresh, whole, other;

static void a_cut_changes_no_bit(void **state) {
    (void)state;
    for (const Case *of = cases; of < cases + CASES; of++) {
        if (of->rows) { continue; }
        arrays_fill(of, fresh, 0);
        memcpy(whole, fresh, sizeof whole);
        case_run(of, whole, 0, 0, COUNT);
        for (size_t first = 0; first < CUTS; first++) {
            for (size_t second = first; second < first + CUTS; second++) {
                char where[64];
                memcpy(other, fresh, sizeof other);
                case_run(of, other, 0, 0, first);
                case_run(of, other, 0, first, second);
                case_run(of, other, 0, second, COUNT);
                snprintf(where, sizeof where, "cut at %zu and %zu", first, second);
                check_bits(of, whole, other, 0, where);
            }
        }
        memcpy(other, fresh, sizeof other);
        for (size_t i = 0; i < COUNT; i++) { case_run(of, other, 0, i, i + 1); }
        check_bits(of, whole, other, 0, "computed one by one");
    }
}

static void an_address_changes_no_bit(void **state) {
    (void)state;
    for (const Case *of = cases; of < cases + CASES; of++) {
        arrays_fill(of, whole, 0);
        case_run(of, whole, 0, 0, COUNT);
        for (size_t offset = 1; offset < CUTS; offset++) {
            char where[64];
            arrays_fill(of, other, offset);
            case_run(of, other, offset, 0, COUNT);
            snprintf(where, sizeof where, "all begin %zu elements later", offset);
            check_bits(of, whole, other, offset, where);
        }
    }
}

// A block that is cut short has the values of the whole one, as long as the first element of every
// group is its largest.
static void the_end_of_a_block_changes_no_value(void **state) {
    (void)state;
    Random random = {1};
    float in[WIRE_BLOCK], all[WIRE_BLOCK], some[WIRE_BLOCK], sum[WIRE_BLOCK];
    uint32_t bytes[WIRE_BLOCK + 1];
    for (int i = 0; i < WIRE_BLOCK; i++) {
        in[i] = i % 16 == 0 ? 1.7f : (float)(2 * random_uniform(&random) - 1);
    }
    for (int f = 0; f < WIRE_FORMAT_COUNT; f++) {
        WireFormat format = (WireFormat)f;
        wire_encode(format, bytes, in, WIRE_BLOCK);
        wire_decode(format, all, bytes, WIRE_BLOCK);
        for (size_t count = 1; count <= WIRE_BLOCK; count++) {
            memcpy(sum, in, sizeof sum);
            wire_encode(format, bytes, in, count);
            wire_decode(format, some, bytes, count);
            wire_add(format, sum, bytes, count);
            assert_memory_equal(some, all, count * sizeof(float));
            for (size_t i = 0; i < count; i++) { assert_true(sum[i] == in[i] + all[i]); }
        }
    }
}

// Our own product, of which a task computes a tile: here two halves, side by side.
static void a_tile_changes_no_bit(void **state) {
    (void)state;
    enum { SIDE = 3 * CUTS };
    static float in[2][SIDE * SIDE], results[2][SIDE * SIDE];
    Random random = {1};
    for (int i = 0; i < 2 * SIDE * SIDE; i++) { in[i % 2][i / 2] = (float)(2 * random_uniform(&random) - 1); }
    Real *a = as_reals(in[0]), *b = as_reals(in[1]), *uncut = as_reals(results[0]),
         *cut = as_reals(results[1]);
    Matmul work =
        matmul_describe(PRECISION_FP32, uncut, SIDE, a, SIDE, false, b, SIDE, false, SIDE, SIDE, SIDE, false);
    matmul_block_plain(&work);
    for (int left = 1; left < CUTS; left++) {
        for (int half = 0; half < 2; half++) {
            size_t column = half == 0 ? 0 : (size_t)left;
            work.N = half == 0 ? left : SIDE - left;
            work.b = real_at(b, column, PRECISION_FP32);
            work.result = real_at(cut, column, PRECISION_FP32);
            matmul_block_plain(&work);
        }
        assert_memory_equal(results[0], results[1], sizeof results[0]);
    }
}

// A number of all results. It is the same with every compiler and on every processor, except that a
// processor which fuses rounds once less. Who changes arithmetic on purpose changes it here.
static void every_compiler_makes_the_same_bits(void **state) {
    (void)state;
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    const uint64_t expected = UINT64_C(0xcb38b9785a304b06);
#else
    const uint64_t expected = UINT64_C(0x548c544920f9ad2d);
#endif
    uint64_t all = 0;
    for (const Case *of = cases; of < cases + CASES; of++) {
        uint64_t one = 0;
        arrays_fill(of, whole, 0);
        case_run(of, whole, 0, 0, COUNT);
        for (int a = 0; a < ARRAYS; a++) {
            for (int i = 0; i < COUNT; i++) { one = random_hash(one, wire_float_bits(whole[a][i])); }
        }
        print_message("%-40s %016llx\n", of->what, (unsigned long long)one);
        all = random_hash(all, one);
    }
    if (all != expected) { fail_msg("%016llx", (unsigned long long)all); }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_cut_changes_no_bit),
        cmocka_unit_test(an_address_changes_no_bit),
        cmocka_unit_test(the_end_of_a_block_changes_no_value),
        cmocka_unit_test(a_tile_changes_no_bit),
        cmocka_unit_test(every_compiler_makes_the_same_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL) == 0 ? 0 : 1;
}
