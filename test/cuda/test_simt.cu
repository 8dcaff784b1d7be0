// test_simt.cu: tests of the emulator of GPUs (test/simt) and of the wrappers in
// kernels/cuda/language.cuh.
//
// The first part shows that right kernels give right results. It also runs on a real GPU,
// where it shows that the instructions behind the wrappers do what the emulator does in
// their place.
//
// The second part plants mistakes, because an emulator that finds nothing proves nothing.
// Each small kernel has a right version, which must give the oracle's bits in every order
// of threads and blocks, and a wrong version, which must give other bits in at least one
// order.
//
// The third part is about mistakes that must end the program. It runs each in a child
// process and looks at its exit status and message.

#include "test/cuda/cuda_kernels.h"
#include "test/harness.h"

#include <pthread.h>
#include <signal.h>

static Random test_random;

// Small whole numbers, whose sums are exact in any order.
static float *host_integers(size_t count) {
    float *values = (float *)malloc(count * sizeof(float));
    for (size_t i = 0; i < count; i++) { values[i] = (float)(1 + random_bits(&test_random) % 1000); }
    return values;
}

static void host_halves(uint16_t *halves, size_t count) {
    for (size_t i = 0; i < count; i++) { halves[i] = host_bf16((float)random_normal(&test_random)); }
}

// ---- What tests of kernels share ------------------------------------------------------

// A NaN is worse than any difference, whatever comes before or behind it.
static void the_worst_element_is_found(void **state) {
    (void)state;
    const struct {
        double got[3], share;
        size_t element;
    } cases[] = {{{1, 2, 3}, 0, 0},
                 {{1.5, 1, 3}, 2, 1},
                 {{NAN, 9, 3}, NAN, 0},
                 {{9, NAN, 3}, NAN, 1},
                 {{1, 2, INFINITY}, INFINITY, 2},
                 {{1, 2, 3.25}, INFINITY, 2}};
    const double expected[3] = {1, 2, 3}, allowed[3] = {0.5, 0.5, 0};
    for (int i = 0; i < 6; i++) {
        Worst worst = {};
        for (size_t k = 0; k < 3; k++) { worst_add(&worst, k, cases[i].got[k], expected[k], allowed[k]); }
        assert_true(isnan(cases[i].share) ? isnan(worst.share) : worst.share == cases[i].share);
        assert_int_equal(worst.element, cases[i].element);
    }
}

enum { WRITERS = 4, WRITTEN = 200 };

static void *keep_many_errors(void *name) {
    for (int i = 0; i < WRITTEN; i++) { keep_error((const char *)name, 0.25, 1e-6); }
    return NULL;
}

// Programs that write to one file at the same time write whole lines.
static void errors_are_kept_in_whole_lines(void **state) {
    (void)state;
    char path[256], line[600], before[512] = "", names[WRITERS][301];
    const char *directory = getenv("TMPDIR"), *wish = getenv("ACCO_ERRORS");
    pthread_t writers[WRITERS];
    int lines[WRITERS] = {};
    if (wish != NULL) { snprintf(before, sizeof before, "%s", wish); }
    snprintf(path, sizeof path, "%s/errors-%d", directory != NULL ? directory : "/tmp", (int)getpid());
    setenv("ACCO_ERRORS", path, 1);
    for (int i = 0; i < WRITERS; i++) {
        memset(names[i], 'a' + i, 300);
        names[i][300] = '\0';
        assert_int_equal(pthread_create(&writers[i], NULL, keep_many_errors, names[i]), 0);
    }
    for (int i = 0; i < WRITERS; i++) { pthread_join(writers[i], NULL); }
    unsetenv("ACCO_ERRORS");
    if (wish != NULL) { setenv("ACCO_ERRORS", before, 1); }
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    while (fgets(line, sizeof line, file) != NULL) {
        int writer = line[0] - 'a';
        assert_true(writer >= 0 && writer < WRITERS && strncmp(line, names[writer], 300) == 0);
        assert_string_equal(line + 300, "\t0.25\t1e-06\n");
        lines[writer]++;
    }
    fclose(file);
    unlink(path);
    for (int i = 0; i < WRITERS; i++) { assert_int_equal(lines[i], WRITTEN); }
}

// ---- Numbers --------------------------------------------------------------------------

typedef struct Rounded {
    uint16_t one;
    uint32_t pair; // the value and its negative
} Rounded;

static __global__ void rounding_kernel(const float *in, Rounded *out, int count) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= count) { return; }
    out[i].one = __bfloat16_as_ushort(from_float<__nv_bfloat16>(in[i]));
    out[i].pair = bf16_pair(in[i], -in[i]);
}

// The oracle of rounding: of the two bf16 around the value the nearer one, of two equally
// near the even one. Above the largest finite bf16 stands infinity, in the place of
// 2^128.
static uint16_t nearest_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t toward_zero = (uint16_t)(bits >> 16), away = (uint16_t)(toward_zero + 1);
    if (isinf(value)) { return toward_zero; }
    double size = fabs((double)value), low = fabs((double)host_from_bf16(toward_zero)),
           high = fabs((double)host_from_bf16(away));
    high = isinf(high) ? 0x1p128 : high;
    bool up = size - low > high - size || (size - low == high - size && toward_zero % 2 == 1);
    return up ? away : toward_zero;
}

static bool is_half_of(uint32_t half, float value) {
    return isnan(value) ? isnan(host_from_bf16((uint16_t)half)) : (uint16_t)half == nearest_half(value);
}

static void numbers_are_rounded_to_the_nearest_bf16(void **state) {
    (void)state;
    enum { COUNT = 4096 };
    static float values[COUNT];
    static Rounded rounded[COUNT];
    static const uint32_t special[] = {0,          0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001,
                                       0x7fffffff, 0x7f7fffff, 0x7f7f8000, 0x7f7f7fff, 0x3f808000, 0x3f818000,
                                       0x3f818001, 0x00000001, 0x00008000, 0x00018000};
    for (size_t i = 0; i < COUNT; i++) {
        uint32_t bits = i < 16 ? special[i] : (uint32_t)random_bits(&test_random);
        bits = i % 3 == 1 && i >= 16 ? (bits & 0xffff0000u) | 0x8000u : bits; // ties
        memcpy(&values[i], &bits, sizeof bits);
    }
    float *in = (float *)device_from_host(values, sizeof values);
    Rounded *out = (Rounded *)device_new(sizeof rounded);
    cuda_launch(cuda_test_stream(PRECISION_BF16), rounding_kernel, dim3(COUNT / 128), dim3(128), 0, in, out,
                (int)COUNT);
    device_to_host(rounded, out, sizeof rounded);
    for (size_t i = 0; i < COUNT; i++) {
        bool same = is_half_of(rounded[i].one, values[i]) && is_half_of(rounded[i].pair & 0xffffu, values[i]);
        if (!same || !is_half_of(rounded[i].pair >> 16, -values[i])) {
            fail_msg("%a becomes %04x, pair %08x", (double)values[i], rounded[i].one, rounded[i].pair);
        }
    }
    CUDA_CHECK(cudaFree(in));
    CUDA_CHECK(cudaFree(out));
}

// ---- Tensor cores and matrix loads ----------------------------------------------------

static __device__ uint32_t halves_pair(const uint16_t *low, const uint16_t *high) {
    return (uint32_t)*low | (uint32_t)*high << 16;
}

// d = c + a b, for a (16, 16), b (16, 8), c and d (16, 8). Lanes fill their fragments as
// drawn in language.cuh.
static __global__ void fragments_kernel(const uint16_t *a, const uint16_t *b, const float *c, float *d) {
    int g = lane_index() / 4, t = lane_index() % 4;
    uint32_t left[4], right[2];
    float sums[4];
    for (int i = 0; i < 4; i++) {
        const uint16_t *place = a + (g + i % 2 * 8) * 16 + 2 * t + i / 2 * 8;
        left[i] = halves_pair(place, place + 1);
        sums[i] = c[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
    }
    for (int i = 0; i < 2; i++) {
        right[i] = halves_pair(b + (2 * t + i * 8) * 8 + g, b + (2 * t + 1 + i * 8) * 8 + g);
    }
    mma_m16n8k16(sums, left, right);
    for (int i = 0; i < 4; i++) { d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sums[i]; }
}

// in: four matrices (8, 8), which are put into shared memory in reverse order, their rows
// 48 bytes apart. out (4, 32): what each lane gets of each matrix.
template <bool TRANSPOSED> static __global__ void matrix_load_kernel(const uint16_t *in, uint32_t *out) {
    uint16_t *shared = (uint16_t *)(void *)cuda_shared();
    int lane = lane_index();
    uint16_t *row = shared + ((3 - lane / 8) * 8 + lane % 8) * 24;
    for (int i = 0; i < 8; i++) { row[i] = in[lane * 8 + i]; }
    __syncwarp();
    uint32_t r[4];
    matrix_load_x4<TRANSPOSED>(r, row);
    for (int i = 0; i < 4; i++) { out[i * WARP + lane] = r[i]; }
}

// d = a b, all (16, 16), as a real kernel does it: matrix loads fill the fragments, and
// transpose b on the way.
static __global__ void tile_product_kernel(const uint16_t *a, const uint16_t *b, float *d) {
    uint16_t *left = (uint16_t *)(void *)cuda_shared(), *right = left + 16 * 24;
    int lane = lane_index(), g = lane / 4, t = lane % 4;
    for (int i = lane; i < 256; i += WARP) {
        left[i / 16 * 24 + i % 16] = a[i];
        right[i / 16 * 24 + i % 16] = b[i];
    }
    __syncwarp();
    uint32_t of_a[4], of_b[4];
    matrix_load_x4<false>(of_a, left + lane % 16 * 24 + lane / 16 * 8);
    matrix_load_x4<true>(of_b, right + lane % 16 * 24 + lane / 16 * 8);
    for (int half = 0; half < 2; half++) {
        float sums[4] = {0, 0, 0, 0};
        mma_m16n8k16(sums, of_a, of_b + 2 * half);
        for (int i = 0; i < 4; i++) { d[(g + i / 2 * 8) * 16 + half * 8 + 2 * t + i % 2] = sums[i]; }
    }
}

// d = c + a b, where c may be NULL. Only nearly, because tensor cores add in an order of
// their own.
static void check_product(const uint16_t *a, const uint16_t *b, const float *c, const float *d, int columns) {
    Worst worst = {};
    for (int i = 0; i < 16 * columns; i++) {
        double sum = c != NULL ? (double)c[i] : 0, size = fabs(sum);
        for (int k = 0; k < 16; k++) {
            double product = (double)host_from_bf16(a[i / columns * 16 + k]) *
                             (double)host_from_bf16(b[k * columns + i % columns]);
            sum += product;
            size += fabs(product);
        }
        worst_add(&worst, (size_t)i, (double)d[i], sum, 1e-5 * size);
    }
    check_worst("a product of tensor cores", worst);
}

static void tensor_cores_multiply_matrices(void **state) {
    (void)state;
    Stream *stream = cuda_test_stream(PRECISION_BF16);
    for (int round = 0; round < 3 * SIMT_ORDERS; round++) {
        cuda_use_order(round % SIMT_ORDERS);
        uint16_t a[256], b[256];
        float got[256], *c = host_normals(&test_random, 128, 1.0);
        host_halves(a, 256);
        host_halves(b, 256);
        uint16_t *left = (uint16_t *)device_from_host(a, sizeof a),
                 *right = (uint16_t *)device_from_host(b, sizeof b);
        float *start = (float *)device_from_host(c, 128 * sizeof(float)),
              *product = (float *)device_new(256 * sizeof(float));
        cuda_launch(stream, fragments_kernel, dim3(1), dim3(WARP), 0, left, right, start, product);
        device_to_host(got, product, 128 * sizeof(float));
        check_product(a, b, c, got, 8);
        cuda_launch(stream, tile_product_kernel, dim3(1), dim3(WARP), 2 * 16 * 24 * sizeof(uint16_t), left,
                    right, product);
        device_to_host(got, product, 256 * sizeof(float));
        check_product(a, b, NULL, got, 16);
        CUDA_CHECK(cudaFree(left));
        CUDA_CHECK(cudaFree(right));
        CUDA_CHECK(cudaFree(start));
        CUDA_CHECK(cudaFree(product));
        free(c);
    }
}

static void check_matrix_load(const uint16_t *in, const uint32_t *out, bool transposed) {
    for (int i = 0; i < 4 * WARP * 2; i++) {
        int matrix = i / 2 / WARP, lane = i / 2 % WARP, first = lane / 4, second = 2 * (lane % 4) + i % 2;
        uint16_t expected = in[matrix * 64 + (transposed ? second * 8 + first : first * 8 + second)];
        uint16_t got = (uint16_t)(out[i / 2] >> i % 2 * 16);
        if (got != expected) {
            fail_msg("transposed %d, matrix %d, lane %d, half %d", transposed, matrix, lane, i % 2);
        }
    }
}

static void matrix_loads_fill_fragments(void **state) {
    (void)state;
    Stream *stream = cuda_test_stream(PRECISION_BF16);
    uint16_t halves[256];
    uint32_t got[4 * WARP];
    for (int i = 0; i < 256; i++) { halves[i] = (uint16_t)(random_bits(&test_random) << 8 | (uint64_t)i); }
    uint16_t *in = (uint16_t *)device_from_host(halves, sizeof halves);
    uint32_t *out = (uint32_t *)device_new(sizeof got);
    for (int order = 0; order < SIMT_ORDERS; order++) {
        cuda_use_order(order);
        cuda_launch(stream, matrix_load_kernel<false>, dim3(1), dim3(WARP), WARP * 48, in, out);
        device_to_host(got, out, sizeof got);
        check_matrix_load(halves, got, false);
        cuda_launch(stream, matrix_load_kernel<true>, dim3(1), dim3(WARP), WARP * 48, in, out);
        device_to_host(got, out, sizeof got);
        check_matrix_load(halves, got, true);
    }
    CUDA_CHECK(cudaFree(in));
    CUDA_CHECK(cudaFree(out));
}

// ---- Exchanges and reductions within a warp and within a block ------------------------

// What a lane gets from others.
typedef struct Exchanged {
    float from, across, down, turned; // of a given lane, of lane ^ 5, of lane + 9, by 5 shuffles
    double wide;                      // a double, which is moved in two halves
    unsigned positive;                // the ballot
} Exchanged;

static __global__ void exchanges_kernel(const float *in, Exchanged *out) {
    int lane = lane_index();
    float value = in[threadIdx.x], turned = value;
    Exchanged mine;
    mine.from = __shfl_sync(0xffffffffu, value, (lane * 7 + 3) % WARP);
    mine.across = __shfl_xor_sync(0xffffffffu, value, 5);
    mine.down = __shfl_down_sync(0xffffffffu, value, 9);
    mine.wide = __shfl_sync(0xffffffffu, 1e10 + (double)value, WARP - 1 - lane);
    mine.positive = __ballot_sync(0xffffffffu, value > 0);
    for (int i = 0; i < 5; i++) { turned = __shfl_sync(0xffffffffu, turned, (lane + 1) % WARP); }
    mine.turned = turned;
    out[threadIdx.x] = mine;
}

static void check_exchanges(const float *warp, const Exchanged *lanes) {
    unsigned positive = 0;
    for (unsigned lane = 0; lane < WARP; lane++) { positive |= warp[lane] > 0 ? 1u << lane : 0; }
    for (unsigned lane = 0; lane < WARP; lane++) {
        const Exchanged *mine = &lanes[lane];
        assert_true(mine->from == warp[(lane * 7 + 3) % WARP]);
        assert_true(mine->across == warp[lane ^ 5u]);
        assert_true(mine->down == warp[lane + 9 < WARP ? lane + 9 : lane]);
        assert_true(mine->turned == warp[(lane + 5) % WARP]);
        assert_true(mine->wide == 1e10 + (double)warp[WARP - 1 - lane]);
        assert_true(mine->positive == positive);
    }
}

static void lanes_exchange_values(void **state) {
    (void)state;
    enum { THREADS = 3 * WARP };
    float *values = host_normals(&test_random, THREADS, 1.0),
          *in = (float *)device_from_host(values, THREADS * sizeof(float));
    Exchanged got[THREADS], *out = (Exchanged *)device_new(sizeof got);
    for (int order = 0; order < SIMT_ORDERS; order++) {
        cuda_use_order(order);
        cuda_launch(cuda_test_stream(PRECISION_FP32), exchanges_kernel, dim3(1), dim3(THREADS), 0, in, out);
        device_to_host(got, out, sizeof got);
        for (int warp = 0; warp < THREADS / WARP; warp++) {
            check_exchanges(values + warp * WARP, got + warp * WARP);
        }
    }
    CUDA_CHECK(cudaFree(in));
    CUDA_CHECK(cudaFree(out));
    free(values);
}

typedef struct Reduced {
    double warp_double, block_double;
    float warp_sum, warp_max, block_sum, block_max;
} Reduced;

enum { REDUCTIONS_SHARED = WARP * (sizeof(double) + 2 * sizeof(float)) };

// Every seventh thread has a NaN for the maxima, which must ignore it.
static __global__ void reductions_kernel(const float *in, Reduced *out) {
    double *doubles = (double *)(void *)cuda_shared();
    float *sums = (float *)(void *)(doubles + WARP), *maxima = sums + WARP;
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    float value = in[i], or_nan = threadIdx.x % 7 == 3 ? (float)NAN : value;
    Reduced mine;
    mine.warp_sum = warp_sum(value);
    mine.warp_double = warp_sum((double)value);
    mine.warp_max = warp_max(or_nan);
    mine.block_sum = block_sum(value, sums);
    mine.block_double = block_sum((double)value, doubles);
    mine.block_max = block_max(or_nan, maxima);
    out[i] = mine;
}

// Whether these are the sums and the maximum of the threads [begin, end) of a block.
static bool reduces_to(const float *block, int begin, int end, float sum, double wide, float maximum) {
    double expected = 0, size = 0;
    float largest = -INFINITY;
    for (int i = begin; i < end; i++) {
        expected += (double)block[i];
        size += fabs((double)block[i]);
        largest = i % 7 != 3 ? fmaxf(largest, block[i]) : largest;
    }
    return fabs((double)sum - expected) <= 1e-5 * size && fabs(wide - expected) <= 1e-14 * size &&
           maximum == largest;
}

// Whether all results of a block are right. All lanes of a warp, and all threads of a
// block, must have the same bits.
static bool is_reduced(const float *block, const Reduced *got, int threads) {
    for (int i = 0; i < threads; i++) {
        const Reduced *mine = &got[i], *warp = &got[i / WARP * WARP];
        bool same = mine->warp_sum == warp->warp_sum && mine->warp_double == warp->warp_double &&
                    mine->block_sum == got->block_sum && mine->block_double == got->block_double &&
                    mine->block_max == got->block_max && mine->warp_max == warp->warp_max;
        if (!same) { return false; }
    }
    for (int warp = 0; warp < threads; warp += WARP) {
        const Reduced *mine = &got[warp];
        if (!reduces_to(block, warp, warp + WARP, mine->warp_sum, mine->warp_double, mine->warp_max)) {
            return false;
        }
    }
    return reduces_to(block, 0, threads, got->block_sum, got->block_double, got->block_max);
}

enum { MOST_THREADS = 1024, REDUCED_BLOCKS = 3 };

// Launches blocks of `threads` threads on the first inputs; false: a result is wrong.
// Threads call this, so it may not call cmocka.
static bool reduce(Stream *stream, const float *values, const float *in, Reduced *out, Reduced *got,
                   int threads) {
    size_t bytes = (size_t)REDUCED_BLOCKS * (size_t)threads * sizeof(Reduced);
    cudaStream_t queue = (cudaStream_t)stream->queue;
    CUDA_CHECK(cudaMemsetAsync(out, 0xff, bytes, queue));
    cuda_launch(stream, reductions_kernel, dim3(REDUCED_BLOCKS), dim3((unsigned)threads), REDUCTIONS_SHARED,
                in, out);
    CUDA_CHECK(cudaMemcpyAsync(got, out, bytes, cudaMemcpyDeviceToHost, queue));
    CUDA_CHECK(cudaStreamSynchronize(queue));
    for (int block = 0; block < REDUCED_BLOCKS; block++) {
        if (!is_reduced(values + block * threads, got + block * threads, threads)) { return false; }
    }
    return true;
}

// A thread of the host, which launches blocks of many sizes one after another.
typedef struct Reducer {
    uint64_t seed;
    int rounds, wrong;
} Reducer;

static void *reduce_often(void *context) {
    static const int sizes[] = {1024, 32, 96, 512, 64, 1024, 224, 32, 992};
    Reducer *reducer = (Reducer *)context;
    Random random = {reducer->seed};
    size_t count = (size_t)MOST_THREADS * REDUCED_BLOCKS;
    float *values = host_normals(&random, count, 1.0), *in = NULL;
    Reduced *out = NULL, *got = (Reduced *)malloc(count * sizeof(Reduced));
    cudaStream_t queue;
    CUDA_CHECK(cudaStreamCreateWithPriority(&queue, cudaStreamNonBlocking, 0));
    CUDA_CHECK(cudaMalloc(&in, count * sizeof(float)));
    CUDA_CHECK(cudaMalloc(&out, count * sizeof(Reduced)));
    CUDA_CHECK(cudaMemcpyAsync(in, values, count * sizeof(float), cudaMemcpyHostToDevice, queue));
    Stream *stream = (Stream *)calloc(1, sizeof *stream);
    stream->queue = (void *)queue;
    for (int i = 0; i < reducer->rounds * 9; i++) {
        reducer->wrong += !reduce(stream, values, in, out, got, sizes[i % 9]);
    }
    CUDA_CHECK(cudaFree(in));
    CUDA_CHECK(cudaFree(out));
    CUDA_CHECK(cudaStreamDestroy(queue));
    free(stream);
    free(values);
    free(got);
    return NULL;
}

static void launch_after_launch_reduces_warps_and_blocks(void **state) {
    (void)state;
    for (int order = 0; order < SIMT_ORDERS; order++) {
        cuda_use_order(order);
        Reducer reducer = {random_bits(&test_random), 1, 0};
        reduce_often(&reducer);
        assert_int_equal(reducer.wrong, 0);
    }
}

static void two_host_threads_launch_at_the_same_time(void **state) {
    (void)state;
    pthread_t threads[2];
    Reducer reducers[2];
    cuda_use_order(SIMT_ORDERS - 1);
    for (int i = 0; i < 2; i++) {
        Reducer reducer = {random_bits(&test_random), 3, 0};
        reducers[i] = reducer;
        assert_int_equal(pthread_create(&threads[i], NULL, reduce_often, &reducers[i]), 0);
    }
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(reducers[i].wrong, 0);
    }
}

// The built-in variables of a thread.
typedef struct Place {
    unsigned thread[3], block[3], size[3], grid[3];
    unsigned first; // of the threads of its warp; threads are counted along x first
} Place;

// Reads them behind barriers: a thread must find its own variables again after others
// have run.
static __global__ void places_kernel(Place *out) {
    __syncthreads();
    __syncwarp();
    Place mine = {{threadIdx.x, threadIdx.y, threadIdx.z},
                  {blockIdx.x, blockIdx.y, blockIdx.z},
                  {blockDim.x, blockDim.y, blockDim.z},
                  {gridDim.x, gridDim.y, gridDim.z},
                  0};
    unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    mine.first = __shfl_sync(0xffffffffu, thread, 0);
    __syncthreads();
    out[block * (blockDim.x * blockDim.y * blockDim.z) + thread] = mine;
}

static void threads_know_their_places(void **state) {
    (void)state;
    static const unsigned size[] = {8, 3, 4}, grid[] = {5, 2, 3};
    enum { THREADS = 96, BLOCKS = 30 };
    static Place got[BLOCKS * THREADS];
    Place *out = (Place *)device_new(sizeof got);
    for (int order = 0; order < SIMT_ORDERS; order++) {
        cuda_use_order(order);
        CUDA_CHECK(
            cudaMemsetAsync(out, 0xff, sizeof got, (cudaStream_t)cuda_test_stream(PRECISION_FP32)->queue));
        cuda_launch(cuda_test_stream(PRECISION_FP32), places_kernel, dim3(5, 2, 3), dim3(8, 3, 4), 0, out);
        device_to_host(got, out, sizeof got);
        for (unsigned i = 0; i < BLOCKS * THREADS; i++) {
            unsigned thread = i % THREADS, block = i / THREADS;
            Place expected = {{thread % 8, thread / 8 % 3, thread / 24},
                              {block % 5, block / 5 % 2, block / 10},
                              {size[0], size[1], size[2]},
                              {grid[0], grid[1], grid[2]},
                              thread / WARP * WARP};
            assert_memory_equal(&got[i], &expected, sizeof expected);
        }
    }
    CUDA_CHECK(cudaFree(out));
}

// ---- Asynchronous copies --------------------------------------------------------------

enum {
    PIPELINE_THREADS = 64,
    PIPELINE_TILES = 7,
    PIPELINE_STAGES = 2,
    PIPELINE_SHARED = PIPELINE_STAGES * PIPELINE_THREADS * 16
};
enum { PIPELINE_VALID = 6 * PIPELINE_THREADS + 17, PIPELINE_INPUTS = 4 * PIPELINE_VALID }; // packs, floats

typedef enum Pipeline {
    PIPELINE_RIGHT,
    WAIT_TOO_LATE,
    NO_BARRIER_BEHIND_WAIT,
    NO_BARRIER_BEFORE_COPY
} Pipeline;

static __device__ void pipeline_copy(float *stages, const float *in, int tile) {
    int pack = tile * PIPELINE_THREADS + (int)threadIdx.x;
    bool valid = tile < PIPELINE_TILES && pack < PIPELINE_VALID;
    float *place = stages + (tile % PIPELINE_STAGES * PIPELINE_THREADS + (int)threadIdx.x) * 4;
    if (tile < PIPELINE_TILES) { copy_async(place, valid ? in + pack * 4 : in, valid); }
    copy_async_commit();
}

// Copies the input in tiles of one pack (four floats) for each thread, of which two are
// under way at a time. out[i] is the sum of what thread n-1-i has copied.
template <Pipeline MISTAKE> static __global__ void pipeline_kernel(const float *in, float *out) {
    float *stages = (float *)(void *)cuda_shared(), sum = 0;
    for (int tile = 0; tile < PIPELINE_STAGES; tile++) { pipeline_copy(stages, in, tile); }
    for (int tile = 0; tile < PIPELINE_TILES; tile++) {
        if (MISTAKE != WAIT_TOO_LATE) { copy_async_wait<PIPELINE_STAGES - 1>(); }
        if (MISTAKE != NO_BARRIER_BEHIND_WAIT) { __syncthreads(); }
        const float *pack =
            stages +
            (tile % PIPELINE_STAGES * PIPELINE_THREADS + PIPELINE_THREADS - 1 - (int)threadIdx.x) * 4;
        for (int i = 0; i < 4; i++) { sum += pack[i]; }
        if (MISTAKE == WAIT_TOO_LATE) { copy_async_wait<PIPELINE_STAGES - 1>(); }
        if (MISTAKE != NO_BARRIER_BEFORE_COPY) { __syncthreads(); }
        pipeline_copy(stages, in, tile + PIPELINE_STAGES);
    }
    copy_async_wait<0>();
    out[threadIdx.x] = sum;
}

static void pipeline_oracle(const float *in, float *out) {
    for (int thread = 0; thread < PIPELINE_THREADS; thread++) { out[thread] = 0; }
    for (int i = 0; i < PIPELINE_INPUTS; i++) {
        out[PIPELINE_THREADS - 1 - i / 4 % PIPELINE_THREADS] += in[i];
    }
}

typedef void (*PlantedKernel)(const float *in, float *out);

// Whether the kernel gives the expected bits, one float for each thread. All sums are
// exact.
static bool kernel_agrees(PlantedKernel kernel, const float *values, const float *expected, size_t inputs,
                          dim3 blocks, dim3 threads, size_t shared) {
    size_t bytes = (size_t)blocks.x * threads.x * sizeof(float);
    float *in = (float *)device_from_host(values, inputs * sizeof(float)), *out = (float *)device_new(bytes);
    float *got = (float *)malloc(bytes);
    cuda_launch(cuda_test_stream(PRECISION_FP32), kernel, blocks, threads, shared, in, out);
    device_to_host(got, out, bytes);
    bool same = memcmp(got, expected, bytes) == 0;
    CUDA_CHECK(cudaFree(in));
    CUDA_CHECK(cudaFree(out));
    free(got);
    return same;
}

static void copies_overlap_with_computation(void **state) {
    (void)state;
    float *values = host_integers(PIPELINE_INPUTS), expected[PIPELINE_THREADS];
    pipeline_oracle(values, expected);
    for (int order = 0; order < SIMT_ORDERS; order++) {
        cuda_use_order(order);
        assert_true(kernel_agrees(pipeline_kernel<PIPELINE_RIGHT>, values, expected, PIPELINE_INPUTS, dim3(1),
                                  dim3(PIPELINE_THREADS), PIPELINE_SHARED));
    }
    free(values);
}

#ifdef ACCO_SIMT_H
// ---- Planted mistakes -----------------------------------------------------------------

enum { PLANTED_THREADS = 128, PLANTED_BLOCKS = 3, PLANTED_COUNT = PLANTED_THREADS * PLANTED_BLOCKS };

static inline size_t planted_index() { return (size_t)blockIdx.x * blockDim.x + threadIdx.x; }
static inline float *planted_shared() { return (float *)(void *)cuda_shared(); }

// Reverses each block.
template <bool RIGHT> static __global__ void reverse_kernel(const float *in, float *out) {
    float *shared = planted_shared();
    shared[threadIdx.x] = in[planted_index()];
    if (RIGHT) { __syncthreads(); }
    out[planted_index()] = shared[PLANTED_THREADS - 1 - threadIdx.x];
}

static void reverse_oracle(const float *in, float *out) {
    for (int i = 0; i < PLANTED_COUNT; i++) {
        int behind = PLANTED_THREADS - i % PLANTED_THREADS;
        out[i] = in[i / PLANTED_THREADS * PLANTED_THREADS + behind - 1];
    }
}

// Two sums over each block by way of the same scratch memory. Without the barrier in
// between, only warps race.
template <bool RIGHT> static __global__ void scratch_kernel(const float *in, float *out) {
    float value = in[planted_index()], sum = block_sum(value, planted_shared());
    if (RIGHT) { __syncthreads(); }
    out[planted_index()] = sum - 2.0f * block_sum(value - 500.0f, planted_shared());
}

static void scratch_oracle(const float *in, float *out) {
    for (int i = 0; i < PLANTED_COUNT; i++) {
        float sum = 0;
        for (int other = 0; other < PLANTED_THREADS; other++) {
            sum += in[i / PLANTED_THREADS * PLANTED_THREADS + other];
        }
        out[i] = sum - 2.0f * (sum - 500.0f * PLANTED_THREADS);
    }
}

// Takes the neighbouring lane's value, three times over, by way of shared memory that
// belongs to the warp. FIRST: there is a barrier between write and read; SECOND: there is
// one between that read and the next write.
template <bool FIRST, bool SECOND> static __global__ void neighbours_kernel(const float *in, float *out) {
    float *shared = planted_shared() + warp_index() * WARP, value = in[planted_index()];
    for (int round = 0; round < 3; round++) {
        shared[lane_index()] = value;
        if (FIRST) { __syncwarp(); }
        value = shared[(lane_index() + 1) % WARP];
        if (SECOND) { __syncwarp(); }
    }
    out[planted_index()] = value;
}

static void neighbours_oracle(const float *in, float *out) {
    for (int i = 0; i < PLANTED_COUNT; i++) { out[i] = in[i / WARP * WARP + (i + 3) % WARP]; }
}

// Takes the value DISTANCE threads further on, where that is within the same GROUP. All
// values move the same way, so a missing barrier shows only if the others run later.
template <int GROUP, int DISTANCE, bool RIGHT>
static __global__ void shift_kernel(const float *in, float *out) {
    float *shared = planted_shared();
    int i = (int)threadIdx.x, other = i % GROUP + DISTANCE;
    shared[i] = in[planted_index()];
    if (RIGHT && GROUP == WARP) { __syncwarp(); }
    if (RIGHT && GROUP > WARP) { __syncthreads(); }
    out[planted_index()] = shared[other >= 0 && other < GROUP ? i + DISTANCE : i];
}

template <int GROUP, int DISTANCE> static void shift_oracle(const float *in, float *out) {
    for (int i = 0; i < PLANTED_COUNT; i++) {
        int other = i % GROUP + DISTANCE;
        out[i] = in[other >= 0 && other < GROUP ? i + DISTANCE : i];
    }
}

// Sums over this block and all earlier ones (DIRECTION -1), or all later ones (1). The
// wrong version uses the neighbouring block's result.
template <int DIRECTION, bool RIGHT> static __global__ void blocks_kernel(const float *in, float *out) {
    float sum = in[planted_index()];
    for (int block = (int)blockIdx.x + DIRECTION; block >= 0 && block < (int)gridDim.x; block += DIRECTION) {
        size_t place = (size_t)block * PLANTED_THREADS + threadIdx.x;
        sum += RIGHT ? in[place] : out[place];
        if (!RIGHT) { break; }
    }
    out[planted_index()] = sum;
}

static void earlier_oracle(const float *in, float *out) {
    for (int i = 0; i < PLANTED_COUNT; i++) {
        out[i] = in[i] + (i < PLANTED_THREADS ? 0.0f : out[i - PLANTED_THREADS]);
    }
}

static void later_oracle(const float *in, float *out) {
    for (int i = PLANTED_COUNT - 1; i >= 0; i--) {
        int other = i + PLANTED_THREADS;
        out[i] = in[i] + (other < PLANTED_COUNT ? out[other] : 0.0f);
    }
}

// Adds the input to shared memory, which the wrong version does not set to zero first.
template <bool RIGHT> static __global__ void uninitialised_kernel(const float *in, float *out) {
    float *shared = planted_shared();
    if (RIGHT) { shared[threadIdx.x] = 0; }
    shared[threadIdx.x] += in[planted_index()];
    out[planted_index()] = shared[threadIdx.x];
    shared[threadIdx.x] = 0; // must not be what the next block finds
}

// Each thread copies in two groups and reads both. The wrong version waits only for the
// first.
template <bool RIGHT> static __global__ void groups_kernel(const float *in, float *out) {
    float *shared = planted_shared() + threadIdx.x * 8;
    for (int group = 0; group < 2; group++) {
        copy_async(shared + group * 4, in + (planted_index() / 4 + (size_t)group) * 4 % PLANTED_COUNT, true);
        copy_async_commit();
    }
    copy_async_wait<RIGHT ? 0 : 1>();
    float first = shared[threadIdx.x % 4], second = shared[4 + threadIdx.x % 4];
    copy_async_wait<0>();
    out[planted_index()] = first + second;
}

static void groups_oracle(const float *in, float *out) {
    for (int i = 0; i < PLANTED_COUNT; i++) { out[i] = in[i] + in[(i + 4) % PLANTED_COUNT]; }
}

static void copy_oracle(const float *in, float *out) { memcpy(out, in, PLANTED_COUNT * sizeof(float)); }

typedef struct Plant {
    const char *name; // of the mistake
    PlantedKernel right, wrong;
    void (*oracle)(const float *in, float *out);
    size_t inputs;
    unsigned blocks, threads;
    size_t shared;
} Plant;

#define PLANTED_SHAPE PLANTED_COUNT, PLANTED_BLOCKS, PLANTED_THREADS, PLANTED_THREADS * sizeof(float)
#define GROUPS_SHAPE PLANTED_COUNT, PLANTED_BLOCKS, PLANTED_THREADS, 8 * PLANTED_THREADS * sizeof(float)
#define PIPELINE_SHAPE PIPELINE_INPUTS, 1, PIPELINE_THREADS, PIPELINE_SHARED

static const Plant plants[] = {
    {"no barrier of the block between write and read", reverse_kernel<true>, reverse_kernel<false>,
     reverse_oracle, PLANTED_SHAPE},
    {"scratch used again without a barrier", scratch_kernel<true>, scratch_kernel<false>, scratch_oracle,
     PLANTED_SHAPE},
    {"no barrier of the warp between write and read", neighbours_kernel<true, true>,
     neighbours_kernel<false, true>, neighbours_oracle, PLANTED_SHAPE},
    {"no barrier of the warp between read and write", neighbours_kernel<true, true>,
     neighbours_kernel<true, false>, neighbours_oracle, PLANTED_SHAPE},
    {"a lane reads what a later one has", shift_kernel<WARP, 3, true>, shift_kernel<WARP, 3, false>,
     shift_oracle<WARP, 3>, PLANTED_SHAPE},
    {"a lane reads what an earlier one has", shift_kernel<WARP, -3, true>, shift_kernel<WARP, -3, false>,
     shift_oracle<WARP, -3>, PLANTED_SHAPE},
    {"a warp reads what a later one has", shift_kernel<PLANTED_THREADS, WARP, true>,
     shift_kernel<PLANTED_THREADS, WARP, false>, shift_oracle<PLANTED_THREADS, WARP>, PLANTED_SHAPE},
    {"a warp reads what an earlier one has", shift_kernel<PLANTED_THREADS, -WARP, true>,
     shift_kernel<PLANTED_THREADS, -WARP, false>, shift_oracle<PLANTED_THREADS, -WARP>, PLANTED_SHAPE},
    {"a block relies on an earlier one", blocks_kernel<-1, true>, blocks_kernel<-1, false>, earlier_oracle,
     PLANTED_SHAPE},
    {"a block relies on a later one", blocks_kernel<1, true>, blocks_kernel<1, false>, later_oracle,
     PLANTED_SHAPE},
    {"shared memory is not set", uninitialised_kernel<true>, uninitialised_kernel<false>, copy_oracle,
     PLANTED_SHAPE},
    {"a wait for a group too few", groups_kernel<true>, groups_kernel<false>, groups_oracle, GROUPS_SHAPE},
    {"a copy is read before its wait", pipeline_kernel<PIPELINE_RIGHT>, pipeline_kernel<WAIT_TOO_LATE>,
     pipeline_oracle, PIPELINE_SHAPE},
    {"a copy is read without a barrier", pipeline_kernel<PIPELINE_RIGHT>,
     pipeline_kernel<NO_BARRIER_BEHIND_WAIT>, pipeline_oracle, PIPELINE_SHAPE},
    {"a copy starts where others still read", pipeline_kernel<PIPELINE_RIGHT>,
     pipeline_kernel<NO_BARRIER_BEFORE_COPY>, pipeline_oracle, PIPELINE_SHAPE},
};

static void planted_mistakes_are_seen(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof plants / sizeof plants[0]; i++) {
        const Plant *plant = &plants[i];
        float *values = host_integers(plant->inputs), expected[PLANTED_COUNT];
        int seen = 0;
        plant->oracle(values, expected);
        for (int order = 0; order < SIMT_ORDERS; order++) {
            cuda_use_order(order);
            dim3 blocks(plant->blocks), threads(plant->threads);
            if (!kernel_agrees(plant->right, values, expected, plant->inputs, blocks, threads,
                               plant->shared)) {
                fail_msg("%s: the kernel without the mistake fails in order %d", plant->name, order);
            }
            seen +=
                !kernel_agrees(plant->wrong, values, expected, plant->inputs, blocks, threads, plant->shared);
        }
        if (seen == 0) { fail_msg("no order shows this mistake: %s", plant->name); }
        free(values);
    }
}

// A sum over a block. The wrong version adds in the order in which threads happen to run.
template <bool RIGHT> static __global__ void in_turn_kernel(const float *in, float *out) {
    float *shared = planted_shared(), value = in[planted_index()];
    shared[threadIdx.x] = 0;
    __syncthreads();
    shared[0] += value;
    __syncthreads();
    float sum = shared[0];
    __syncthreads();
    out[planted_index()] = RIGHT ? block_sum(value, shared) : sum;
}

// In how many orders the kernel gives other bits than in the first.
static int orders_that_differ(PlantedKernel kernel, const float *in) {
    float first[PLANTED_COUNT], *out = (float *)device_new(sizeof first);
    int differ = 0;
    for (int order = 0; order < SIMT_ORDERS; order++) {
        cuda_use_order(order);
        cuda_launch(cuda_test_stream(PRECISION_FP32), kernel, dim3(PLANTED_BLOCKS), dim3(PLANTED_THREADS),
                    4 * PLANTED_THREADS, in, out);
        if (order == 0) { device_to_host(first, out, sizeof first); }
        differ += memcmp(first, out, sizeof first) != 0;
    }
    CUDA_CHECK(cudaFree(out));
    return differ;
}

static void sums_in_no_fixed_order_are_seen(void **state) {
    (void)state;
    float *values = host_normals(&test_random, PLANTED_COUNT, 1.0),
          *in = (float *)device_from_host(values, PLANTED_COUNT * sizeof(float));
    assert_int_equal(orders_that_differ(in_turn_kernel<true>, in), 0);
    assert_int_equal(orders_that_differ(in_turn_kernel<false>, in), SIMT_ORDERS - 1);
    CUDA_CHECK(cudaFree(in));
    free(values);
}

// A stream that may spin never gives its core away while the GPU computes; another one does.
static void streams_wait_as_they_may(void **state) {
    (void)state;
    for (int spins = 0; spins < 2; spins++) {
        struct rusage before, after;
        Stream stream = *cuda_test_stream(PRECISION_FP32);
        stream.spins = spins == 1;
        simt_not_ready() = 5000;
        getrusage(RUSAGE_THREAD, &before);
        stream_settle(&stream);
        getrusage(RUSAGE_THREAD, &after);
        long sleeps = after.ru_nvcsw - before.ru_nvcsw;
        assert_int_equal(simt_not_ready(), 0);
        assert_true(spins == 1 ? sleeps <= 2 : sleeps >= 50);
    }
}

static void new_memory_is_full_of_nans(void **state) {
    (void)state;
    float expected[PLANTED_COUNT], *device, *pinned, *values = host_integers(PLANTED_COUNT);
    memset(expected, 0xff, sizeof expected);
    CUDA_CHECK(cudaMalloc(&device, sizeof expected));
    CUDA_CHECK(cudaMallocHost(&pinned, sizeof expected));
    assert_memory_equal(device, expected, sizeof expected);
    assert_memory_equal(pinned, expected, sizeof expected);
    // Shared memory too: every block finds NaNs, whatever the block before has left.
    for (int order = 0; order < SIMT_ORDERS; order++) {
        cuda_use_order(order);
        cuda_launch(cuda_test_stream(PRECISION_FP32), uninitialised_kernel<false>, dim3(PLANTED_BLOCKS),
                    dim3(PLANTED_THREADS), 4 * PLANTED_THREADS, values, device);
        for (int i = 0; i < PLANTED_COUNT; i++) { assert_true(isnan(device[i])); }
    }
    CUDA_CHECK(cudaFree(device));
    CUDA_CHECK(cudaFreeHost(pinned));
    free(values);
}

// ---- Mistakes that end the program ----------------------------------------------------

enum { ENDING_FLOATS = 2048 };

typedef void (*EndingKernel)(float *memory);

// How a launch must end, seen from outside.
typedef struct Ending {
    EndingKernel kernel;
    dim3 grid, block;
    size_t shared;
    const char *message; // NULL: all is well
} Ending;

static __global__ void all_is_well(float *memory) {
    float *shared = planted_shared();
    if (threadIdx.x % WARP < 8) {
        copy_async(shared + threadIdx.x / WARP * WARP + threadIdx.x % 8 * 4, memory, true);
    }
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    memory[ENDING_FLOATS - 1 - threadIdx.x] = warp_sum(shared[threadIdx.x]);
}

static __global__ void some_threads_skip_a_barrier(float *memory) {
    if (threadIdx.x == 40) { return; }
    __syncthreads();
    memory[threadIdx.x] = 0;
}

static __global__ void a_warp_skips_a_barrier(float *memory) {
    if (threadIdx.x / WARP != 1) { __syncthreads(); }
    memory[threadIdx.x] = 0;
}

static __global__ void a_warp_comes_once_too_often(float *memory) {
    for (unsigned i = 0; i < 2 + threadIdx.x / WARP; i++) { __syncthreads(); }
    memory[threadIdx.x] = 0;
}

static __global__ void threads_wait_for_different_things(float *memory) {
    if (threadIdx.x < 16) { __syncwarp(); }
    __syncthreads();
    memory[threadIdx.x] = 0;
}

static __global__ void a_lane_misses_a_shuffle(float *memory) {
    if (threadIdx.x != 37) { memory[threadIdx.x] = __shfl_sync(0xffffffffu, memory[threadIdx.x], 0); }
}

static __global__ void a_lane_misses_a_product(float *memory) {
    float d[4] = {0, 0, 0, 0};
    uint32_t a[4] = {0, 0, 0, 0};
    if (threadIdx.x % WARP > 0) { mma_m16n8k16(d, a, a); }
    memory[threadIdx.x] = d[0];
}

static __global__ void lanes_are_in_different_exchanges(float *memory) {
    if (threadIdx.x % WARP < 16) {
        __syncwarp();
    } else {
        memory[threadIdx.x] = __shfl_sync(0xffffffffu, memory[threadIdx.x], 20);
    }
}

static __global__ void a_mask_leaves_its_lane_out(float *memory) {
    memory[threadIdx.x] = __shfl_sync(0xfffffffeu, 1.0f, 1);
}

static __global__ void a_copy_is_left_behind(float *memory) {
    copy_async(planted_shared() + threadIdx.x * 4, memory, true);
    copy_async_commit();
}

static __global__ void a_copy_is_in_no_group(float *memory) {
    copy_async(planted_shared() + threadIdx.x * 4, memory, true);
    copy_async_wait<0>();
}

static __global__ void a_copy_is_not_aligned(float *memory) {
    copy_async(planted_shared(), memory + 2, true);
}

static __global__ void a_copy_misses_shared_memory(float *memory) {
    copy_async(planted_shared() + threadIdx.x * 4 + 4, memory, true);
    __syncthreads();
}

static __global__ void a_source_changes(float *memory) {
    copy_async(planted_shared() + threadIdx.x * 4, memory + threadIdx.x * 4, true);
    copy_async_commit();
    memory[threadIdx.x] = 3.0f;
    copy_async_wait<0>();
}

static __global__ void a_place_is_written(float *memory) {
    copy_async(planted_shared() + threadIdx.x * 4, memory, true);
    copy_async_commit();
    planted_shared()[threadIdx.x] = 3.0f;
    copy_async_wait<0>();
}

static __global__ void a_matrix_load_is_not_aligned(float *memory) {
    uint32_t r[4];
    matrix_load_x4<false>(r, cuda_shared() + threadIdx.x * 16 + (threadIdx.x == 9 ? 8 : 0));
    memory[threadIdx.x] = (float)r[0];
}

static __global__ void a_matrix_load_is_not_from_shared_memory(float *memory) {
    uint32_t r[4];
    matrix_load_x4<true>(r, memory + threadIdx.x * 4);
    memory[threadIdx.x] = (float)r[0];
}

#define NEVER_REACHED "threads wait at a barrier that others never reach"
#define UNDER_WAY "a thread ends while asynchronous copies of it are under way"
#define NO_SUCH_LAUNCH "a launch has no threads, no blocks, or too many of them"

static const Ending endings[] = {
    {all_is_well, dim3(2), dim3(64), 1024, NULL},
    {all_is_well, dim3(1), dim3(64), SIMT_SHARED_LIMIT, NULL},
    {some_threads_skip_a_barrier, dim3(1), dim3(64), 0, NEVER_REACHED},
    {a_warp_skips_a_barrier, dim3(2), dim3(96), 0, NEVER_REACHED},
    {a_warp_comes_once_too_often, dim3(1), dim3(64), 0, NEVER_REACHED},
    {threads_wait_for_different_things, dim3(1), dim3(64), 0, NEVER_REACHED},
    {a_lane_misses_a_shuffle, dim3(1), dim3(64), 0, NEVER_REACHED},
    {a_lane_misses_a_product, dim3(1), dim3(32), 0, NEVER_REACHED},
    {lanes_are_in_different_exchanges, dim3(1), dim3(32), 0, "lanes of a warp are in different exchanges"},
    {a_mask_leaves_its_lane_out, dim3(1), dim3(32), 0,
     "a lane takes part in an exchange whose mask leaves it out"},
    {all_is_well, dim3(1), dim3(48), 1024, "a block has no whole number of warps"},
    {all_is_well, dim3(1), dim3(0), 1024, NO_SUCH_LAUNCH},
    {all_is_well, dim3(1), dim3(1056), 8192, NO_SUCH_LAUNCH},
    {all_is_well, dim3(0), dim3(64), 1024, NO_SUCH_LAUNCH},
    {all_is_well, dim3(1, 65536), dim3(64), 1024, NO_SUCH_LAUNCH},
    {all_is_well, dim3(1, 1, 65536), dim3(64), 1024, NO_SUCH_LAUNCH},
    {all_is_well, dim3(1), dim3(64), SIMT_SHARED_LIMIT + 1,
     "a launch asks for more shared memory than there is"},
    {a_copy_is_left_behind, dim3(1), dim3(32), 512, UNDER_WAY},
    {a_copy_is_in_no_group, dim3(1), dim3(32), 512, UNDER_WAY},
    {a_copy_is_not_aligned, dim3(1), dim3(32), 512, "an asynchronous copy is not aligned"},
    {a_copy_misses_shared_memory, dim3(1), dim3(32), 512, "an asynchronous copy misses shared memory"},
    {a_source_changes, dim3(1), dim3(32), 512,
     "the source of an asynchronous copy changes while it is under way"},
    {a_place_is_written, dim3(1), dim3(32), 512,
     "something is written where an asynchronous copy is to arrive"},
    {a_matrix_load_is_not_aligned, dim3(1), dim3(32), 1024, "a row of a matrix load is not aligned"},
    {a_matrix_load_is_not_from_shared_memory, dim3(1), dim3(32), 1024,
     "a row of a matrix load is not in shared memory"},
};

static char child_message[1 << 17];

static void run_ending(const void *context) {
    const Ending *ending = (const Ending *)context;
    float *memory = (float *)device_new(ENDING_FLOATS * sizeof(float));
    for (int i = 0; i < ENDING_FLOATS; i++) { memory[i] = 1.0f; }
    cuda_launch(cuda_test_stream(PRECISION_FP32), ending->kernel, ending->grid, ending->block, ending->shared,
                memory);
}

static void mistakes_end_the_program(void **state) {
    (void)state;
    for (size_t i = 0; i < SIMT_ORDERS * (sizeof endings / sizeof endings[0]); i++) {
        const Ending *ending = &endings[i / SIMT_ORDERS];
        cuda_use_order((int)(i % SIMT_ORDERS));
        int status = run_in_child(run_ending, ending, child_message, sizeof child_message);
        bool fine = WIFEXITED(status) && WEXITSTATUS(status) == 0 && child_message[0] == '\0';
        bool said = ending->message != NULL && strstr(child_message, "emulated kernel: ") == child_message &&
                    strstr(child_message, ending->message) != NULL && WIFSIGNALED(status) &&
                    WTERMSIG(status) == SIGABRT;
        if (ending->message == NULL ? !fine : !said) {
            fail_msg("case %zu, order %zu: status %d, message '%s', expected '%s'", i / SIMT_ORDERS,
                     i % SIMT_ORDERS, status, child_message, ending->message != NULL ? ending->message : "");
        }
    }
}

// How many elements a kernel reads, writes and copies. The mistake is one more than there
// are.
typedef struct Reach {
    const char *name;
    int read, shared_written, shared_read, written, copied;
} Reach;

static __global__ void reach_kernel(const float *in, float *out, Reach reach) {
    float *shared = planted_shared();
    int i = (int)threadIdx.x;
    float value = i < reach.read ? in[i] : 0.0f;
    if (i < reach.shared_written) { shared[i] = value; }
    __syncthreads();
    value = i < reach.shared_read ? shared[i] : 0.0f;
    if (i < reach.written) { out[i] = value; }
    __syncthreads();
    if (i * 4 < reach.copied) {
        copy_async(shared + (i * 4 < reach.copied - 4 ? i * 4 : 0), in + i * 4, true);
    }
    copy_async_commit();
    copy_async_wait<0>();
}

typedef struct ReachCase {
    int count; // elements of each array; a multiple of 4
    Reach more;
} ReachCase;

static void run_reach(const void *context) {
    const ReachCase *c = (const ReachCase *)context;
    size_t bytes = (size_t)c->count * sizeof(float);
    float *in = (float *)device_new(bytes), *out = (float *)device_new(bytes);
    Reach reach = {c->more.name,
                   c->count + c->more.read,
                   c->count + c->more.shared_written,
                   c->count + c->more.shared_read,
                   c->count + c->more.written,
                   c->more.copied > 0 ? c->count + c->more.copied : 0};
    cuda_launch(cuda_test_stream(PRECISION_FP32), reach_kernel, dim3(1), dim3(128), bytes, in, out, reach);
    CUDA_CHECK(cudaFree(in));
    CUDA_CHECK(cudaFree(out));
}

#if defined(__SANITIZE_ADDRESS__)
enum { ENDS_ARE_SEEN = 1 };
#else
enum { ENDS_ARE_SEEN = 0 };
#endif

static void accesses_past_the_end_are_seen(void **state) {
    (void)state;
    static const Reach more[] = {{"nothing", 0, 0, 0, 0, 0},
                                 {"reads past an array", 1, 0, 0, 0, 0},
                                 {"writes past shared memory", 0, 1, 0, 0, 0},
                                 {"reads past shared memory", 0, 0, 1, 0, 0},
                                 {"writes past an array", 0, 0, 0, 1, 0},
                                 {"copies from past an array", 0, 0, 0, 0, 4}};
    if (!ENDS_ARE_SEEN) {
        print_message("only AddressSanitizer sees accesses past the end: left out\n");
        skip();
    }
    for (int i = 0; i < 12; i++) {
        int count = i % 2 == 0 ? 96 : 100; // shared memory of a multiple of 128 bytes, and not
        ReachCase c = {count, more[i / 2]};
        int status = run_in_child(run_reach, &c, child_message, sizeof child_message);
        bool clean = WIFEXITED(status) && WEXITSTATUS(status) == 0 && child_message[0] == '\0';
        bool seen = !clean && strstr(child_message, "AddressSanitizer: heap-buffer-overflow") != NULL;
        if (i < 2 ? !clean : !seen) {
            fail_msg("%s, of %d: status %d, '%.200s'", c.more.name, c.count, status, child_message);
        }
    }
}
#endif

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_worst_element_is_found),
        cmocka_unit_test(errors_are_kept_in_whole_lines),
        cmocka_unit_test(numbers_are_rounded_to_the_nearest_bf16),
        cmocka_unit_test(tensor_cores_multiply_matrices),
        cmocka_unit_test(matrix_loads_fill_fragments),
        cmocka_unit_test(lanes_exchange_values),
        cmocka_unit_test(launch_after_launch_reduces_warps_and_blocks),
        cmocka_unit_test(two_host_threads_launch_at_the_same_time),
        cmocka_unit_test(threads_know_their_places),
        cmocka_unit_test(copies_overlap_with_computation),
#ifdef ACCO_SIMT_H
        cmocka_unit_test(planted_mistakes_are_seen),
        cmocka_unit_test(sums_in_no_fixed_order_are_seen),
        cmocka_unit_test(streams_wait_as_they_may),
        cmocka_unit_test(new_memory_is_full_of_nans),
        cmocka_unit_test(mistakes_end_the_program),
        cmocka_unit_test(accesses_past_the_end_are_seen),
#endif
    };
    test_random.state = seed_of_tests();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    CUDA_CHECK(cudaStreamDestroy((cudaStream_t)cuda_test_stream(PRECISION_FP32)->queue));
    return failed;
}
