// test_sparse.c: the format of SparseLoCo, and the two steps that use it, against sorting
// and plain loops.

#include "test/harness.h"

#include "kernels/kernels.h"
#include "runtime/random.h"

enum { MOST = 2 * SPARSE_BLOCK + 100 };

static const int COUNTS[] = {1,   2, 5, 63, 64, 65, 100, SPARSE_BLOCK - 1, SPARSE_BLOCK, SPARSE_BLOCK + 1,
                             MOST};

enum { COUNT_COUNT = sizeof COUNTS / sizeof COUNTS[0] };

// many: normal numbers; otherwise few different ones, so that most elements have equals.
static void fill(float *values, size_t count, uint64_t seed, bool many) {
    Random random = {random_hash(seed, 1)};
    for (size_t i = 0; i < count; i++) {
        double normal = random_normal(&random);
        values[i] = (float)(many ? 1e-3 * normal : floor(2 * normal) / 4);
    }
}

// ---- The oracle: sorts ----------------------------------------------------------------

typedef struct Ranked {
    float magnitude;
    int index;
} Ranked;

static int compare_ranked(const void *a, const void *b) {
    const Ranked *one = (const Ranked *)a, *other = (const Ranked *)b;
    if (one->magnitude != other->magnitude) { return one->magnitude > other->magnitude ? -1 : 1; }
    return one->index - other->index;
}

// out (elements) <- what a block carries of values (elements); elements not taken are 0.
static void plain_block(float *out, bool *taken, const float *values, int elements) {
    Ranked ranked[SPARSE_BLOCK];
    int entries = elements < 64 ? elements : 64, highs = 0;
    float sum = 0, low = 0, high = 0;
    for (int i = 0; i < elements; i++) {
        ranked[i].magnitude = fabsf(values[i]);
        ranked[i].index = i;
        out[i] = 0;
        taken[i] = false;
    }
    qsort(ranked, (size_t)elements, sizeof ranked[0], compare_ranked);
    for (int i = 0; i < entries; i++) { taken[ranked[i].index] = true; }
    for (int i = 0; i < elements; i++) { sum += taken[i] ? fabsf(values[i]) : 0; }
    float mean = sum / (float)entries;
    for (int i = 0; i < elements; i++) {
        if (!taken[i]) { continue; }
        highs += fabsf(values[i]) > mean ? 1 : 0;
        *(fabsf(values[i]) > mean ? &high : &low) += fabsf(values[i]);
    }
    high = bf16_to_float(bf16_from_float(highs > 0 ? high / (float)highs : 0));
    low = bf16_to_float(bf16_from_float(entries > highs ? low / (float)(entries - highs) : 0));
    for (int i = 0; i < elements; i++) {
        if (taken[i]) { out[i] = copysignf(fabsf(values[i]) > mean ? high : low, values[i]); }
    }
}

static void blocks_equal_those_of_a_sort(void **state) {
    (void)state;
    static float values[SPARSE_BLOCK], expected[SPARSE_BLOCK];
    static bool taken[SPARSE_BLOCK];
    for (int row = 0; row < 4 * COUNT_COUNT; row++) {
        int elements = COUNTS[row / 4];
        if (elements > SPARSE_BLOCK) { continue; }
        SparseBlock block;
        memset(&block, 0xff, sizeof block);
        fill(values, (size_t)elements, (uint64_t)row, row % 2 == 0);
        plain_block(expected, taken, values, elements);
        cpu_sparse_encode_block(&block, values, elements);
        int entry = 0;
        for (int i = 0; i < elements; i++) {
            if (!taken[i]) { continue; }
            float value = sparse_value(&block, entry);
            assert_int_equal(sparse_index(&block, entry), i);
            assert_memory_equal(&value, &expected[i], sizeof value);
            entry++;
        }
        assert_int_equal(entry, sparse_entries(elements));
        for (; entry < SPARSE_ENTRIES; entry++) { assert_int_equal(sparse_index(&block, entry), 0); }
    }
}

// Four elements, 1 -2 -8 5: their mean magnitude is 4, so 1 and -2 become 1.5, and 8 and 5
// become 6.5.
static void a_short_block_gives_the_worked_example(void **state) {
    (void)state;
    static const float values[] = {1, -2, -8, 5}, expected[] = {1.5f, -1.5f, -6.5f, 6.5f};
    static const uint8_t indexes[] = {0x00, 0x10, 0x00, 0x02, 0x30, 0x00};
    SparseBlock block;
    cpu_sparse_encode_block(&block, values, 4);
    for (int i = 0; i < 4; i++) { assert_true(sparse_value(&block, i) == expected[i]); }
    assert_memory_equal(block.indexes, indexes, sizeof indexes);
    assert_int_equal(block.codes[0], 0 | 1 << 2 | 3 << 4 | 2 << 6);
    for (size_t i = sizeof indexes; i < sizeof block.indexes; i++) { assert_int_equal(block.indexes[i], 0); }
    for (size_t i = 1; i < sizeof block.codes; i++) { assert_int_equal(block.codes[i], 0); }
}

static void of_equal_elements_the_first_are_taken(void **state) {
    (void)state;
    static float values[SPARSE_BLOCK];
    SparseBlock block;
    for (int i = 0; i < SPARSE_BLOCK; i++) { values[i] = i % 2 == 0 ? 0.75f : -0.75f; }
    values[4095] = 3;
    cpu_sparse_encode_block(&block, values, SPARSE_BLOCK);
    for (int i = 0; i < 63; i++) {
        assert_int_equal(sparse_index(&block, i), i);
        assert_true(sparse_value(&block, i) == (i % 2 == 0 ? 0.75f : -0.75f));
    }
    assert_int_equal(sparse_index(&block, 63), 4095);
    assert_true(sparse_value(&block, 63) == 3);
}

static void zeros_stay_zeros(void **state) {
    (void)state;
    static float zeros[MOST], error[MOST];
    SparseBlock blocks[3];
    OuterRange range = {.outer = zeros, .local = zeros, .exchange = error, .count = MOST};
    cpu_sparse_encode(&range, blocks, 0.5f);
    for (size_t i = 0; i < MOST; i++) { assert_true(error[i] == 0); }
    for (int i = 0; i < SPARSE_ENTRIES; i++) { assert_true(sparse_value(&blocks[2], i) == 0); }
    assert_true(sparse_is_sound(&blocks[0]) && sparse_is_sound(&blocks[2]));
}

// What is sent and what stays are together what there was, for every element.
static void what_is_not_sent_stays_in_the_error(void **state) {
    (void)state;
    static float before[MOST], error[MOST], outer[MOST], local[MOST], sent[MOST];
    static bool taken[SPARSE_BLOCK];
    for (int row = 0; row < COUNT_COUNT; row++) {
        size_t count = (size_t)COUNTS[row];
        SparseBlock blocks[3];
        fill(error, count, 10 + (uint64_t)row, true);
        fill(outer, count, 20, true);
        fill(local, count, 30, true);
        for (size_t i = 0; i < count; i++) { before[i] = fmaf(0.95f, error[i], outer[i] - local[i]); }
        OuterRange range = {.outer = outer, .local = local, .exchange = error, .count = count};
        cpu_sparse_encode(&range, blocks, 0.95f);
        for (size_t begin = 0; begin < count; begin += SPARSE_BLOCK) {
            plain_block(sent + begin, taken, before + begin, (int)size_min(count - begin, SPARSE_BLOCK));
        }
        for (size_t i = 0; i < count; i++) {
            float left = before[i] - sent[i];
            assert_memory_equal(&error[i], &left, sizeof left);
        }
    }
}

// Three ranks of different weights; outer and local parameters move as the formulas say.
static void the_outer_step_follows_its_formulas(void **state) {
    (void)state;
    static float values[3][MOST], decoded[3][MOST], outer[MOST], local[MOST], sent[MOST];
    static float moved[MOST], moved_local[MOST];
    static SparseBlock blocks[3][4];
    static bool taken[SPARSE_BLOCK];
    static float zeros[MOST];
    static const float weights[3] = {1, 0.3f, 0.8f};
    const SparseStep step = {.ranks = 3, .alpha = 0.75f, .total = 2.1f, .weights = weights};
    for (int row = 0; row < 4 * COUNT_COUNT; row++) {
        size_t count = (size_t)COUNTS[row / 4];
        bool keeps = row % 2 == 1, eager = row / 2 % 2 == 1;
        for (int rank = 0; rank < 3; rank++) {
            fill(values[rank], count, 40 + (uint64_t)rank, true);
            for (size_t begin = 0; begin < count; begin += SPARSE_BLOCK) {
                plain_block(decoded[rank] + begin, taken, values[rank] + begin,
                            (int)size_min(count - begin, SPARSE_BLOCK));
            }
            OuterRange range = {.outer = zeros, .local = zeros, .exchange = values[rank], .count = count};
            cpu_sparse_encode(&range, blocks[rank], 1.0f);
        }
        fill(outer, count, 50, true);
        fill(local, count, 51, true);
        fill(sent, count, 52, true);
        for (size_t i = 0; i < count; i++) {
            float sum = 0;
            for (int rank = 0; rank < 3; rank++) { sum = fmaf(weights[rank], decoded[rank][i], sum); }
            moved[i] = fmaf(-0.75f, sum / 2.1f, outer[i]);
            float start = eager ? moved[i] - values[1][i] : moved[i]; // as the second rank
            moved_local[i] = keeps ? start + (local[i] - sent[i]) : start;
        }
        OuterRange range = {outer, NULL, local, eager ? values[1] : NULL, keeps ? sent : NULL, count};
        cpu_sparse_apply(&range, blocks[0], 4, &step);
        assert_memory_equal(outer, moved, count * sizeof(float));
        assert_memory_equal(local, moved_local, count * sizeof(float));
    }
}

static void a_nan_or_an_infinity_is_seen(void **state) {
    (void)state;
    static float error[MOST], outer[MOST], local[MOST];
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 3; i++) {
        SparseBlock blocks[3];
        fill(error, MOST, 60, true);
        fill(outer, MOST, 61, true);
        fill(local, MOST, 62, true);
        local[5000] = bad[i];
        OuterRange range = {.outer = outer, .local = local, .exchange = error, .count = MOST};
        cpu_sparse_encode(&range, blocks, 0.95f);
        assert_true(sparse_is_sound(&blocks[0]) && !sparse_is_sound(&blocks[1]) &&
                    sparse_is_sound(&blocks[2]));
        for (int j = 0; j < MOST; j++) { assert_true(isfinite(error[j]) == (j != 5000)); }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_equal_those_of_a_sort),
        cmocka_unit_test(a_short_block_gives_the_worked_example),
        cmocka_unit_test(of_equal_elements_the_first_are_taken),
        cmocka_unit_test(zeros_stay_zeros),
        cmocka_unit_test(what_is_not_sent_stays_in_the_error),
        cmocka_unit_test(the_outer_step_follows_its_formulas),
        cmocka_unit_test(a_nan_or_an_infinity_is_seen),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
