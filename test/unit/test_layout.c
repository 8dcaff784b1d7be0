// test_layout.c: which rank owns which element (comm/layout.h), where memory lies
// (runtime/memory.h), and how one thread follows another (runtime/watermark.h, runtime/device.h,
// runtime/thread_pool.h, runtime/pace.h).
#include "test/harness.h"

#include "comm/groups.h"
#include "comm/layout.h"
#include "runtime/device.h"
#include "runtime/memory.h"
#include "runtime/pace.h"
#include "runtime/random.h"
#include "runtime/watermark.h"
#include "test/layout_flat.h"

// ---- Layouts --------------------------------------------------------------------------

enum { MOST_RANKS = 64 };

static const size_t COUNTS[] = {0,      1,       2,       31,      32,     33,    63,     64,
                                255,    256,     257,     1000,    1003,   4095,  4096,   4097,
                                8191,   28801,   32768,   32769,   65537,  98304, 131073, 200003,
                                857344, 1048576, 1048577, 3000001, 4194305};
static const int SIZES[] = {1, 2, 3, 4, 5, 7, 8, 12, 16, 31, 32, 33, 63, 64};

enum { COUNT_COUNT = sizeof COUNTS / sizeof COUNTS[0], SIZE_COUNT = sizeof SIZES / sizeof SIZES[0] };

// Marks what each rank owns: every element must be marked once, each rank's in their
// order.
static void expect_owners(const Layout *layout) {
    size_t padded = layout_padded(layout), shard = layout_shard(layout);
    uint8_t *owners = (uint8_t *)malloc(padded + 1);
    memset(owners, 255, padded + 1);
    for (int rank = 0; rank < layout->size; rank++) {
        size_t before = 0;
        for (size_t own = 0; own < shard; own++) {
            size_t flat = layout_flat(layout, rank, own);
            if (flat >= padded || owners[flat] != 255) {
                fail_msg("count %zu, rank %d, element %zu: %zu", layout->count, rank, own, flat);
            }
            if (own > 0 && flat <= before) {
                fail_msg("count %zu, rank %d: elements are not in their order", layout->count, rank);
            }
            owners[flat] = (uint8_t)rank;
            before = flat;
        }
    }
    for (size_t i = 0; i < padded; i++) { assert_true(owners[i] != 255); }
    assert_true(owners[padded] == 255);
    free(owners);
}

static void every_element_has_one_owner(void **state) {
    (void)state;
    for (int c = 0; c < COUNT_COUNT; c++) {
        for (int s = 0; s < SIZE_COUNT; s++) {
            if (COUNTS[c] > 300000 && SIZES[s] % 8 != 3) { continue; } // one at a time takes a while
            Layout layout = layout_make(COUNTS[c], SIZES[s]);
            expect_owners(&layout);
        }
    }
}

static void expect_cells(size_t count, int size) {
    Layout layout = layout_make(count, size);
    size_t cell = layout.piece * (size_t)size;
    assert_true(layout.count == count && layout.size == size);
    assert_true(layout.cells <= LAYOUT_CELLS);
    assert_true(layout.piece > 0 && layout.piece % LAYOUT_LINE == 0);
    assert_true(layout.piece <= LAYOUT_BLOCK || layout.piece % LAYOUT_BLOCK == 0);
    assert_true(layout_shard(&layout) == layout.cells * layout.piece);
    assert_true(layout_padded(&layout) == layout_shard(&layout) * (size_t)size);
    assert_true(layout_padded(&layout) >= count);
    assert_true(layout_padded(&layout) - count < cell); // no cell without an element
    for (size_t c = 0; c <= layout.cells; c++) { assert_true(layout_cell_begin(&layout, c) == c * cell); }
}

static void cells_cover_the_vector_and_pad_less_than_one_of_them(void **state) {
    (void)state;
    Random random = {3};
    for (int size = 1; size <= MOST_RANKS; size++) {
        for (int c = 0; c < COUNT_COUNT; c++) { expect_cells(COUNTS[c], size); }
        for (int i = 0; i < 300; i++) { expect_cells((size_t)exp2(23 * random_uniform(&random)), size); }
        expect_cells((size_t)3 << 31, size);
    }
}

// So room that is reserved for the longest of several vectors is enough for all of them.
static void a_longer_vector_has_no_smaller_shard(void **state) {
    (void)state;
    for (int s = 0; s < SIZE_COUNT; s++) {
        size_t before = 0;
        for (size_t count = 0; count < 300000; count += count < 70000 ? 1 : 37) {
            Layout layout = layout_make(count, SIZES[s]);
            assert_true(layout_shard(&layout) >= before);
            before = layout_shard(&layout);
        }
    }
}

// What a stretch promises: its elements are contiguous in the flat vector, in one piece.
static void stretches_are_contiguous_and_end_with_their_piece(void **state) {
    (void)state;
    Random random = {5};
    for (int i = 0; i < 2000; i++) {
        int size = SIZES[random_bits(&random) % SIZE_COUNT],
            rank = (int)(random_bits(&random) % (uint64_t)size);
        Layout layout = layout_make(1 + random_bits(&random) % 100000, size);
        size_t shard = layout_shard(&layout), own = random_bits(&random) % shard,
               end = own + 1 + random_bits(&random) % (shard - own);
        LayoutRange range = {.own = own};
        assert_true(layout_next(&layout, rank, end, &range));
        assert_true(range.own == own && range.flat == layout_flat(&layout, rank, own));
        assert_true(range.count > 0 && own + range.count <= end);
        assert_true(own + range.count == end || (own + range.count) % layout.piece == 0);
        assert_true(own / layout.piece == (own + range.count - 1) / layout.piece);
    }
}

// A bucket is a range of cells: all ranks own the same number of its elements, and it
// is one range of the flat vector.
static void any_range_of_cells_is_shared_out_evenly(void **state) {
    (void)state;
    for (int s = 0; s < SIZE_COUNT; s++) {
        Layout layout = layout_make(65537, SIZES[s]);
        for (size_t begin = 0; begin < layout.cells; begin += 1 + layout.cells / 5) {
            for (size_t end = begin + 1; end <= layout.cells; end += 1 + layout.cells / 7) {
                size_t first = layout_cell_begin(&layout, begin), last = layout_cell_begin(&layout, end);
                assert_true((last - first) == (end - begin) * layout.piece * (size_t)layout.size);
                for (int rank = 0; rank < layout.size; rank++) {
                    for (size_t own = begin * layout.piece; own < end * layout.piece; own++) {
                        size_t flat = layout_flat(&layout, rank, own);
                        assert_true(flat >= first && flat < last);
                    }
                }
            }
        }
    }
}

// Three ranks and 100 elements, by hand: cells of 3 * 32, the second of which holds 4
// elements.
static void a_small_layout_is_as_drawn(void **state) {
    (void)state;
    Layout layout = layout_make(100, 3);
    assert_true(layout.piece == 32 && layout.cells == 2);
    assert_true(layout_shard(&layout) == 64 && layout_padded(&layout) == 192);
    assert_true(layout_flat(&layout, 0, 0) == 0 && layout_flat(&layout, 1, 0) == 32 &&
                layout_flat(&layout, 2, 31) == 95);
    assert_true(layout_flat(&layout, 0, 32) == 96 && layout_flat(&layout, 1, 33) == 129);
    Layout alone = layout_make(1000000, 1); // 7812.5 elements for each of 128 cells: the next multiple of 256
    assert_true(alone.piece == 7936 && alone.cells == 127);
}

// ---- Layouts of whole matrices --------------------------------------------------------

enum { MOST_MATRICES = 600 };

// Matrices as a model of `layers` layers has them: an embedding, then per layer two vectors, four
// matrices (C, C), two vectors, two matrices (4C, C), each with a vector; returns the elements.
static size_t model_matrices(int layers, size_t C, size_t embedding, LayoutMatrix *matrices, int *count) {
    size_t at = embedding;
    *count = 0;
    for (int l = 0; l < layers; l++) {
        for (int i = 0; i < 6; i++) {
            at += i == 0 || i == 4 ? 2 * C : i == 5 ? 4 * C : 0;
            matrices[*count].begin = at;
            at = matrices[(*count)++].end = at + (i < 4 ? C * C : 4 * C * C);
            at += i == 3 || i == 5 ? C : 0;
        }
    }
    return at + 2 * C;
}

// Every element has one owner, who has its shard in order; a matrix has one owner; pieces begin at
// multiples of LAYOUT_BLOCK; a cell is one range of the flat vector.
static void expect_whole(const Layout *layout, const LayoutMatrix *matrices, int matrix_count) {
    size_t padded = layout_padded(layout), owned = 0;
    int16_t *owners = (int16_t *)malloc(padded * sizeof *owners);
    memset(owners, 255, padded * sizeof *owners);
    for (int rank = 0; rank < layout->size; rank++) {
        size_t own = 0, flat = 0;
        for (LayoutRange range = {0}; layout_next(layout, rank, SIZE_MAX, &range);) {
            assert_true(range.own >= own && range.flat >= flat && range.count > 0);
            assert_true(layout->pieces == NULL || range.own % LAYOUT_BLOCK == 0);
            for (size_t i = 0; i < range.count; i++) {
                assert_int_equal(owners[range.flat + i], -1);
                owners[range.flat + i] = (int16_t)rank;
            }
            own = range.own + range.count;
            flat = range.flat + range.count;
            owned += range.count;
        }
        assert_true(own <= layout_shard(layout));
    }
    assert_true(owned >= layout->count && padded >= layout->count);
    for (size_t i = 0; i < layout->count; i++) { assert_true(owners[i] >= 0); }
    for (int m = 0; m < matrix_count; m++) {
        for (size_t i = matrices[m].begin; i < matrices[m].end; i++) {
            assert_int_equal(owners[i], owners[matrices[m].begin]);
        }
    }
    for (size_t cell = 0; cell < layout->cells; cell++) {
        size_t begin = layout_cell_begin(layout, cell), end = layout_cell_begin(layout, cell + 1), in = 0;
        for (int rank = 0; rank < layout->size; rank++) {
            LayoutRange piece = layout_piece(layout, cell, rank);
            assert_true(piece.count == 0 || (piece.flat >= begin && piece.flat + piece.count <= end));
            assert_true(piece.own <= layout_piece(layout, cell + 1, rank).own);
            in += piece.count;
        }
        assert_true(begin < end && (in == end - begin || end == padded));
    }
    free(owners);
}

static void a_matrix_has_one_owner(void **state) {
    (void)state;
    static LayoutMatrix matrices[MOST_MATRICES];
    for (int s = 0; s < SIZE_COUNT; s++) {
        for (int layers = 1; layers <= 12; layers += 1 + layers / 2) {
            for (size_t C = 1; C <= 60; C = C < 10 ? 2 * C + 5 : 2 * C + 6) {
                int matrix_count;
                size_t count = model_matrices(layers, C, C * 61, matrices, &matrix_count);
                Layout layout = layout_make_whole(count, SIZES[s], matrices, matrix_count);
                assert_true(layout.count == count && layout.size == SIZES[s]);
                for (int rank = 0; rank < SIZES[s] && C % 2 == 0; rank++) { // bf16 casts travel in twos
                    for (LayoutRange range = {0}; layout_next(&layout, rank, SIZE_MAX, &range);) {
                        assert_true(range.flat % 2 == 0 && range.count % 2 == 0);
                    }
                }
                expect_whole(&layout, matrices, matrix_count);
                layout_free(&layout);
            }
        }
    }
}

// A model, and the most by which its longest shard and the most work for Muon on a rank may exceed
// the means.
typedef struct Balance {
    int layers, channels, ranks;
    double length, work;
} Balance;

// GPT-Neo's 125M and 1.3B, with 50,257 + 2,048 rows of embeddings. With 64 ranks a matrix of the
// MLP of 125M, which cannot be cut, is longer than the mean; with 48 it is already more work.
static const Balance balances[] = {
    {12, 768, 2, 1.002, 1.001},  {12, 768, 3, 1.002, 1.001},  {12, 768, 4, 1.002, 1.001},
    {12, 768, 6, 1.002, 1.001},  {12, 768, 8, 1.002, 1.001},  {12, 768, 12, 1.003, 1.001},
    {12, 768, 16, 1.004, 1.07},  {12, 768, 24, 1.005, 1.001}, {12, 768, 32, 1.006, 1.07},
    {12, 768, 48, 1.007, 1.201}, {12, 768, 64, 1.22, 1.601},  {24, 2048, 3, 1.001, 1.001},
    {24, 2048, 12, 1.001, 1.01}, {24, 2048, 32, 1.002, 1.07}, {24, 2048, 48, 1.002, 1.001},
    {24, 2048, 64, 1.03, 1.07},
};

// The work of matrices whose first element the rank owns, where one of the MLP is three times as
// much as another: 4 m m n + 2 m m m with n = 4 m and with n = m.
static double rank_work(const Layout *layout, int rank, const LayoutMatrix *matrices, int matrix_count) {
    double work = 0;
    int m = 0;
    for (LayoutRange range = {0}; layout_next(layout, rank, SIZE_MAX, &range);) {
        while (m < matrix_count && matrices[m].begin < range.flat) { m++; }
        for (; m < matrix_count && matrices[m].begin < range.flat + range.count; m++) {
            work += m % 6 < 4 ? 1 : 3;
        }
    }
    return work;
}

static void shards_are_about_as_long_and_as_much_work(void **state) {
    (void)state;
    static LayoutMatrix matrices[MOST_MATRICES];
    for (size_t i = 0; i < sizeof balances / sizeof balances[0]; i++) {
        const Balance *balance = &balances[i];
        int matrix_count, ranks = balance->ranks;
        size_t C = (size_t)balance->channels,
               count = model_matrices(balance->layers, C, (50257 + 2048) * C, matrices, &matrix_count);
        Layout layout = layout_make_whole(count, ranks, matrices, matrix_count);
        double all = 0, most = 0, length = (double)layout_shard(&layout) * ranks / (double)count;
        for (int rank = 0; rank < ranks; rank++) {
            double work = rank_work(&layout, rank, matrices, matrix_count);
            all += work;
            most = work > most ? work : most;
        }
        assert_true(all == balance->layers * 10);
        if (!(length <= balance->length && most * ranks / all <= balance->work)) {
            fail_msg("%d layers, %d ranks: length %.4f, work %.4f", balance->layers, ranks, length,
                     most * ranks / all);
        }
        assert_true(layout.cells <= 1024);
        layout_free(&layout);
    }
}

// Two ranks, by hand: an embedding of 1280 elements, and two matrices of 512 with 16 between them.
// little = 2320 / 128 = 18, so the 16 go with the first matrix.
static void a_small_layout_of_matrices_is_as_drawn(void **state) {
    (void)state;
    static const LayoutMatrix matrices[] = {{1280, 1792}, {1808, 2320}};
    Layout layout = layout_make_whole(2320, 2, matrices, 2);
    LayoutRange first = layout_piece(&layout, layout.cells - 1, 0),
                last = layout_piece(&layout, layout.cells - 1, 1);
    assert_true(first.flat == 1280 && first.count == 528);
    assert_true(last.flat == 1808 && last.count == 512);
    expect_whole(&layout, matrices, 2);
    layout_free(&layout);
}

// Three ranks, by hand: the owner of a matrix of half of the elements gets nothing else. The others
// share the rest evenly, in cells of the usual length: 128 for the whole vector.
static void who_owns_more_than_the_mean_gets_nothing_else(void **state) {
    (void)state;
    enum { HALF = 98304, CELL = 2 * HALF / LAYOUT_CELLS };
    static const LayoutMatrix matrices[] = {{HALF, 2 * HALF}};
    Layout layout = layout_make_whole(2 * HALF, 3, matrices, 1);
    assert_int_equal(layout.cells, LAYOUT_CELLS / 2 + 1);
    for (size_t cell = 0; cell < LAYOUT_CELLS / 2; cell++) {
        assert_int_equal(layout_cell_begin(&layout, cell), cell * CELL);
        assert_int_equal(layout_piece(&layout, cell, 0).count, 0);
        for (int rank = 1; rank < 3; rank++) {
            assert_int_equal(layout_piece(&layout, cell, rank).count, CELL / 2);
        }
    }
    assert_int_equal(layout_piece(&layout, LAYOUT_CELLS / 2, 0).count, HALF);
    expect_whole(&layout, matrices, 1);
    layout_free(&layout);
}

// The cell of an element is the one whose range it is in; all ranks' pieces of it lie there.
static void an_element_is_in_its_cell(void **state) {
    (void)state;
    static LayoutMatrix matrices[MOST_MATRICES];
    int matrix_count;
    size_t count = model_matrices(3, 12, 12 * 61, matrices, &matrix_count);
    for (int ranks = 1; ranks <= 5; ranks++) {
        for (int whole = 0; whole < 2; whole++) {
            Layout layout = whole == 1 ? layout_make_whole(count, ranks, matrices, matrix_count)
                                       : layout_make(count, ranks);
            for (size_t flat = 0, cell = 0; flat < layout_padded(&layout); flat++) {
                cell += flat == layout_cell_begin(&layout, cell + 1) ? 1 : 0;
                assert_int_equal(layout_cell_with(&layout, flat), cell);
            }
            layout_free(&layout);
        }
    }
}

// ---- Watermarks -----------------------------------------------------------------------

static void a_watermark_only_rises_until_it_is_reset(void **state) {
    (void)state;
    Watermark mark;
    watermark_create(&mark, 5);
    assert_true(watermark_has_reached(&mark, 0) && watermark_has_reached(&mark, 5) &&
                !watermark_has_reached(&mark, 6));
    watermark_raise(&mark, 3);
    assert_true(watermark_has_reached(&mark, 5));
    watermark_raise(&mark, 9);
    watermark_wait(&mark, 9);
    assert_true(!watermark_has_reached(&mark, 10));
    watermark_reset(&mark, 2);
    assert_true(watermark_has_reached(&mark, 2) && !watermark_has_reached(&mark, 3));
    watermark_raise(&mark, WATERMARK_ALL);
    watermark_wait(&mark, WATERMARK_ALL);
    watermark_reset(&mark, 2);
    assert_false(watermark_wait_at_most(&mark, 3, 0));
    watermark_destroy(&mark);
}

enum { MARK_STEPS = 4000, FOLLOWERS = 3 };

typedef struct Relay {
    Watermark mark;
    // Written by the leader before it raises the mark over them, read by the followers
    // behind it.
    uint64_t values[MARK_STEPS];
} Relay;

typedef struct Follower {
    Relay *relay;
    int number;
    uint64_t errors;
    pthread_t thread;
} Follower;

static void *follower_main(void *argument) {
    Follower *follower = (Follower *)argument;
    for (size_t i = 0; i < MARK_STEPS; i += 1 + (size_t)follower->number * 7) {
        watermark_wait(&follower->relay->mark, i + 1);
        for (size_t j = 0; j <= i; j += 1 + i / 4) {
            follower->errors += follower->relay->values[j] != random_mix(j + 1) ? 1 : 0;
        }
    }
    return NULL;
}

// After the wait a thread sees what the leader wrote before it raised the mark.
// ThreadSanitizer finds what the values do not show.
static void who_waits_for_a_watermark_sees_what_was_written_before_it_rose(void **state) {
    (void)state;
    Relay *relay = (Relay *)calloc(1, sizeof *relay);
    Follower followers[FOLLOWERS];
    watermark_create(&relay->mark, 0);
    for (int i = 0; i < FOLLOWERS; i++) {
        Follower follower = {relay, i, 0, 0};
        followers[i] = follower;
        pthread_create(&followers[i].thread, NULL, follower_main, &followers[i]);
    }
    for (size_t i = 0; i < MARK_STEPS; i++) {
        relay->values[i] = random_mix(i + 1);
        watermark_raise(&relay->mark, i + 1);
        if (i % 1000 == 0) { sleep_seconds(1e-3); } // the followers come to wait
    }
    for (int i = 0; i < FOLLOWERS; i++) {
        pthread_join(followers[i].thread, NULL);
        assert_int_equal(followers[i].errors, 0);
    }
    watermark_destroy(&relay->mark);
    free(relay);
}

// What the tasks of a stream share.
typedef struct Work {
    Watermark mark; // how many of them may run
    size_t tasks;   // how many have
} Work;

typedef struct Step {
    Work *work;
    size_t number; // of the task
} Step;

// One of the first few takes so long that the stream is full meanwhile.
static void work_task(void *context, Stream *stream) {
    const Step *step = (const Step *)context;
    (void)stream;
    watermark_wait(&step->work->mark, step->number + 1);
    if (step->number == 3) { sleep_seconds(0.05); }
    step->work->tasks += step->work->tasks == step->number ? 1 : 0; // in order
}

// More tasks than a stream has room for. An event happens behind the tasks before it, and not
// before; a stream that is destroyed has run them all.
static void an_event_is_a_place_between_the_tasks_of_a_stream(void **state) {
    (void)state;
    enum { TASKS = 3 * STREAM_CAPACITY + 7 };
    Event never = {NULL, 0}, empty, events[3];
    Work work = {.tasks = 0};
    Step steps[TASKS + 5];
    for (size_t i = 0; i < TASKS + 5; i++) {
        steps[i].work = &work;
        steps[i].number = i;
    }
    Stream *stream = stream_create("test", NULL, NULL);
    watermark_create(&work.mark, 0);
    event_record(&empty, stream);
    assert_true(event_query(&never) && event_wait(&never, 0) && event_query(&empty));
    for (int i = 0; i < 3; i++) {
        stream_run(stream, work_task, &steps[i]);
        event_record(&events[i], stream);
    }
    for (size_t i = 0; i < 3; i++) {
        assert_false(event_query(&events[i]) || (i == 0 && event_wait(&events[i], 0)));
        watermark_raise(&work.mark, i + 1);
        assert_true(event_wait(&events[i], 60) && event_query(&events[i]));
        assert_int_equal(work.tasks, i + 1);
    }
    watermark_raise(&work.mark, WATERMARK_ALL);
    for (int i = 3; i < TASKS; i++) { stream_run(stream, work_task, &steps[i]); }
    event_record(&events[0], stream);
    assert_true(event_wait(&events[0], 60));
    assert_int_equal(work.tasks, TASKS);
    for (int i = 0; i < 5; i++) { stream_run(stream, work_task, &steps[TASKS + i]); }
    stream_destroy(stream);
    assert_int_equal(work.tasks, TASKS + 5);
    watermark_destroy(&work.mark);
}

// ---- Memory -----------------------------------------------------------------------------

// Planned memory is zeroed, every part of it begins at a line of its own, and rows of nothing keep
// what their pointers held. What was written is in memory, whole pages of it.
static void an_arena_sets_every_pointer(void **state) {
    (void)state;
    static const size_t sizes[] = {1, ARENA_ALIGNMENT, ARENA_ALIGNMENT + 1, 1 << 20};
    char *slots[4] = {NULL}, *host = NULL, *none = (char *)&none;
    Arena arena;
    Error error = {""};
    memset(&arena, 0, sizeof arena);
    for (int i = 0; i < 4; i++) {
        MemoryClass of = i == 1 ? MEMORY_GRADIENTS : MEMORY_OPTIMIZER;
        arena_reserve(&arena, of, "a part", sizes[i], &slots[i]);
    }
    const ArenaRow rows[] = {{MEMORY_WORKSPACE, "nothing", 0, &none}, {MEMORY_GRADIENTS, "row", 3, &host}};
    arena_reserve_rows(&arena, rows, 2, true);
    assert_int_equal(arena.count, 5);
    assert_int_equal(arena.bytes, 5 * ARENA_ALIGNMENT + (1 << 20));
    assert_int_equal(arena_class_bytes(&arena, MEMORY_OPTIMIZER), 1 + ARENA_ALIGNMENT + 1 + (1 << 20));
    assert_int_equal(arena_class_bytes(&arena, MEMORY_GRADIENTS), ARENA_ALIGNMENT + 3);
    assert_int_equal(arena_class_bytes(&arena, MEMORY_WORKSPACE), 0);
    assert_true(arena_commit(&arena, &error));
    assert_true(none == (char *)&none && host == slots[3] + sizes[3]);
    assert_true(arena_resident_bytes(&arena) <= 1 << 16); // nothing was written yet
    for (int i = 0; i < 4; i++) {
        assert_int_equal((uintptr_t)slots[i] % ARENA_ALIGNMENT, 0);
        assert_true(i == 0 || slots[i] >= slots[i - 1] + sizes[i - 1]);
        for (size_t at = 0; at < sizes[i]; at += 100) { assert_int_equal(slots[i][at], 0); }
        memset(slots[i], i + 1, sizes[i]);
    }
    size_t resident = arena_resident_bytes(&arena);
    assert_true(resident >= arena.bytes - 2 * ARENA_ALIGNMENT && resident <= arena.bytes + (1 << 16));
    arena_release(&arena);
    assert_true(arena.base == NULL && arena.count == 0 && arena_resident_bytes(&arena) == 0);
    assert_false(arena_refused("the GPU", 12345678901, &error));
    assert_non_null(strstr(error.text, "the GPU refused 12.35 GB of memory: lower --micro-batch"));
}

// ---- Threads that share a loop ------------------------------------------------------------

enum { POOL_TASKS = 400, POOL_THREADS = 4 };

typedef struct Shared {
    int runs[POOL_TASKS], threads;
    int inside[POOL_THREADS], crowded; // who works with a number now; how often two had the same one
} Shared;

static void shared_task(void *context, int task, int thread) {
    Shared *shared = (Shared *)context;
    bool good = thread >= 0 && thread < shared->threads;
    if (good && __atomic_fetch_add(&shared->inside[thread], 1, __ATOMIC_ACQ_REL) != 0) { good = false; }
    if (task % 16 == 0) { sleep_seconds(1e-4); }
    __atomic_fetch_add(&shared->runs[task], 1, __ATOMIC_RELAXED);
    if (!good) { __atomic_fetch_add(&shared->crowded, 1, __ATOMIC_RELAXED); }
    if (good) { __atomic_fetch_sub(&shared->inside[thread], 1, __ATOMIC_ACQ_REL); }
}

// Every task runs once, and no two at a time under the number of one thread, which stands for its
// scratch memory.
static void a_pool_runs_every_task_once(void **state) {
    (void)state;
    static const int counts[] = {0, 1, 2, 3, POOL_THREADS + 1, POOL_TASKS};
    for (int kind = 0; kind < 4; kind++) {
        int threads = kind < 2 ? POOL_THREADS : kind == 2 ? 2 : 1;
        ThreadPool *pool = thread_pool_create(threads, kind == 1);
        for (int i = 0; i < 24; i++) {
            Shared shared;
            memset(&shared, 0, sizeof shared);
            shared.threads = threads;
            int tasks = counts[i % 6];
            thread_pool_run(pool, tasks, shared_task, &shared);
            for (int task = 0; task < POOL_TASKS; task++) {
                assert_int_equal(shared.runs[task], task < tasks ? 1 : 0);
            }
            assert_int_equal(shared.crowded, 0);
        }
        thread_pool_destroy(pool);
    }
}

typedef struct PaceCalls {
    size_t needed, finished;
} PaceCalls;

static void note_need(void *self, size_t end) { ((PaceCalls *)self)->needed = end; }
static void note_finish(void *self, size_t begin) { ((PaceCalls *)self)->finished = begin; }

static void a_pace_calls_its_owner_and_no_pace_calls_no_one(void **state) {
    (void)state;
    PaceCalls calls = {0, 0};
    Pace pace = {.self = &calls, .version = 1, .need = note_need, .finish = note_finish};
    pace_need(&pace, 7);
    pace_finish(&pace, 3);
    assert_true(calls.needed == 7 && calls.finished == 3);
    pace_need(NULL, 8);
    pace_finish(NULL, 8);
}

// Hosts of any number of ranks in any order: a rank's owners are those of which it is the delegate,
// host after host.
static void owners_are_found_on_hosts_of_any_size(void **state) {
    (void)state;
    static const int sizes[][4] = {{1, 1, 2}, {2, 1, 2}, {1, 3, 2}, {4, 1, 1, 3}, {3, 3}, {1, 4}};
    for (size_t c = 0; c < sizeof sizes / sizeof sizes[0]; c++) {
        int leader_of[16], size = 0;
        for (int host = 0; host < 4; host++) {
            int leader = size;
            for (int i = 0; i < sizes[c][host]; i++) { leader_of[size++] = leader; }
        }
        Groups groups;
        groups_make(&groups, 0, size, leader_of);
        for (int delegate = 0; delegate < size; delegate++) {
            int found = -1, count = 0;
            for (int owner = 0; owner < size; owner++) { // ranks are in the order of hosts here
                if (groups_delegate(&groups, groups.host_of[delegate], owner) != delegate) { continue; }
                assert_true(groups_next_owner(&groups, delegate, &found) && found == owner);
                count++;
            }
            assert_false(groups_next_owner(&groups, delegate, &found));
            assert_int_equal(groups_count_owners(&groups, delegate), count);
        }
        groups_free(&groups);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_element_has_one_owner),
        cmocka_unit_test(owners_are_found_on_hosts_of_any_size),
        cmocka_unit_test(cells_cover_the_vector_and_pad_less_than_one_of_them),
        cmocka_unit_test(a_longer_vector_has_no_smaller_shard),
        cmocka_unit_test(stretches_are_contiguous_and_end_with_their_piece),
        cmocka_unit_test(any_range_of_cells_is_shared_out_evenly),
        cmocka_unit_test(a_small_layout_is_as_drawn),
        cmocka_unit_test(a_matrix_has_one_owner),
        cmocka_unit_test(shards_are_about_as_long_and_as_much_work),
        cmocka_unit_test(a_small_layout_of_matrices_is_as_drawn),
        cmocka_unit_test(who_owns_more_than_the_mean_gets_nothing_else),
        cmocka_unit_test(an_element_is_in_its_cell),
        cmocka_unit_test(a_watermark_only_rises_until_it_is_reset),
        cmocka_unit_test(who_waits_for_a_watermark_sees_what_was_written_before_it_rose),
        cmocka_unit_test(an_event_is_a_place_between_the_tasks_of_a_stream),
        cmocka_unit_test(an_arena_sets_every_pointer),
        cmocka_unit_test(a_pool_runs_every_task_once),
        cmocka_unit_test(a_pace_calls_its_owner_and_no_pace_calls_no_one),
    };
    return cmocka_run_group_tests(tests, NULL, NULL) == 0 ? 0 : 1;
}
