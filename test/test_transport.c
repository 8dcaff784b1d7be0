// test_transport.c: collectives against plain loops, the wire formats, deadlines, and the emulated link.
//
// As test_rules.c: ranks are threads of this process, or processes under mpirun.

#include "harness.h"

#include <sys/wait.h>

#include "../runtime/transport_mpi.h"
#include "threads_link.h"

enum { MAX_RANKS = 4 };

static Transport *process_transport; // set once in main

typedef struct CollectiveSpec {
    size_t shard;
    WireFormat wire;
    double chaos_seconds, link_bytes_per_second;
} CollectiveSpec;

typedef struct CollectiveResult {
    float *scattered; // (shard): the sum that this rank owns
    float *gathered;  // (size, shard)
    uint64_t bytes_sent;
    double seconds;
    double delay; // what chaos_seconds adds at least: a draw before each of the two operations
} CollectiveResult;

// What rank `rank` brings at element i: signs, sizes and fractions vary.
static float contribution(int rank, size_t i) {
    Random random = {random_hash((uint64_t)rank + 1, i)};
    return (float)(random_normal(&random) * exp2((double)(random_bits(&random) % 16) - 8));
}

static void run_collectives(const CollectiveSpec *spec, Transport *transport, CollectiveResult *result) {
    size_t count = spec->shard * (size_t)transport->size;
    transport->wire = spec->wire;
    transport->chaos_seconds = spec->chaos_seconds;
    transport->link_bytes_per_second = spec->link_bytes_per_second;
    transport->bytes_sent = 0;
    Arena arena;
    memset(&arena, 0, sizeof arena);
    float *buffer;
    Error error = {""};
    arena_reserve(&arena, MEMORY_EXCHANGE, "buffer", count * sizeof(float), &buffer);
    transport_reserve(transport, &arena, spec->shard);
    if (!arena_commit(&arena, &error)) { abort(); }
    for (size_t i = 0; i < count; i++) { buffer[i] = contribution(transport->rank, i); }
    Random chaos = transport->chaos;
    double first = random_uniform(&chaos), second = random_uniform(&chaos);
    result->delay = transport->size > 1 ? spec->chaos_seconds * (first + second) : 0;
    double began = clock_seconds();
    float *mine = buffer + spec->shard * (size_t)transport->rank;
    transport_reduce_scatter(transport, buffer, spec->shard);
    result->scattered = (float *)malloc(spec->shard * sizeof(float));
    memcpy(result->scattered, mine, spec->shard * sizeof(float));
    transport_all_gather(transport, buffer, spec->shard);
    result->seconds = clock_seconds() - began;
    result->gathered = (float *)malloc(count * sizeof(float));
    memcpy(result->gathered, buffer, count * sizeof(float));
    result->bytes_sent = transport->bytes_sent;
    transport->chaos_seconds = transport->link_bytes_per_second = 0;
    arena_release(&arena);
}

typedef struct World {
    const CollectiveSpec *spec;
    CollectiveResult *results; // (ranks)
} World;

static void run_world_rank(Transport *transport, void *context) {
    World *world = (World *)context;
    run_collectives(world->spec, transport, &world->results[transport->rank]);
}

// False where this world does not have `ranks` ranks.
static bool run_world(const CollectiveSpec *spec, int ranks, CollectiveResult *results) {
    World world = {spec, results};
    memset(results, 0, sizeof(CollectiveResult) * (size_t)ranks);
    if (process_transport->size > 1) {
        if (process_transport->size == ranks) { run_world_rank(process_transport, &world); }
        return process_transport->size == ranks;
    }
    threads_run(ranks, run_world_rank, &world);
    return true;
}

static void free_results(CollectiveResult *results, int ranks) {
    for (int i = 0; i < ranks; i++) {
        free(results[i].scattered);
        free(results[i].gathered);
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------------

static float through_wire(float value, WireFormat wire) { return wire == WIRE_BF16 ? bf16_to_float(bf16_from_float(value)) : value; }

// Returns false where the world does not fit.
static bool check_world(const CollectiveSpec *spec, int ranks) {
    CollectiveResult results[MAX_RANKS];
    if (!run_world(spec, ranks, results)) { return false; }
    for (int rank = 0; rank < ranks; rank++) {
        if (results[rank].gathered == NULL) { continue; }
        for (size_t i = 0; i < spec->shard * (size_t)ranks; i++) {
            float sum = 0;
            for (int from = 0; from < ranks; from++) { sum += through_wire(contribution(from, i), ranks > 1 ? spec->wire : WIRE_FP32); }
            if (i / spec->shard == (size_t)rank) { assert_true(results[rank].scattered[i - spec->shard * (size_t)rank] == sum); }
            assert_true(results[rank].gathered[i] == through_wire(sum, spec->wire));
        }
        uint64_t bytes = 2 * (uint64_t)(ranks - 1) * spec->shard * wire_bytes(spec->wire);
        assert_int_equal(results[rank].bytes_sent, bytes);
        assert_true(results[rank].seconds >= 0.999 * results[rank].delay);
    }
    free_results(results, ranks);
    return true;
}

// Shards below, at and above one chunk, and many chunks with a short last one.
static void collectives_equal_plain_loops_bit_for_bit(void **state) {
    (void)state;
    bool fits = false;
    for (int ranks = 1; ranks <= MAX_RANKS; ranks++) {
        size_t chunk = transport_chunk_elements(ranks);
        size_t shards[] = {32, 1056, chunk, chunk + 32, 3 * chunk + 96};
        for (size_t i = 0; i < sizeof shards / sizeof shards[0]; i++) {
            for (int wire = 0; wire < 2; wire++) {
                CollectiveSpec spec = {shards[i], wire == 1 ? WIRE_BF16 : WIRE_FP32, 0, 0};
                fits = check_world(&spec, ranks) || fits;
            }
        }
    }
    if (!fits) { skip(); }
}

// And they do take their time: check_world compares it with the numbers drawn.
static void delays_change_no_bit(void **state) {
    (void)state;
    bool fits = false;
    for (int ranks = 2; ranks <= MAX_RANKS; ranks++) {
        CollectiveSpec spec = {transport_chunk_elements(ranks) * 2 + 64, WIRE_BF16, 20e-3, 0};
        fits = check_world(&spec, ranks) || fits;
    }
    if (!fits) { skip(); }
}

// A message cannot leave before the emulated link has let it through: a bound that no fast machine can beat.
static void the_emulated_link_is_as_slow_as_it_says(void **state) {
    (void)state;
    CollectiveSpec spec = {100000, WIRE_FP32, 0, 8e6};
    CollectiveResult results[2];
    if (!run_world(&spec, 2, results)) { skip(); }
    for (int rank = 0; rank < 2; rank++) {
        if (results[rank].gathered != NULL) { assert_true(results[rank].seconds >= (double)results[rank].bytes_sent / 8e6 * 0.999); }
    }
    free_results(results, 2);
}

// ---------------------------------------------------------------------------------------------------------------------------------------

// Nearest bf16 by trying both neighbours, ties to even: an oracle that shares no code with the product.
static uint16_t bf16_by_search(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t below = (uint16_t)(bits >> 16), above = (uint16_t)(below + 1);
    double down = fabs((double)value - (double)bf16_to_float(below));
    double up = (above & 0x7fff) == 0x7f80 ? fabs(fabs((double)value) - exp2(128)) : fabs((double)bf16_to_float(above) - (double)value);
    return down < up ? below : up < down ? above : (below & 1) == 0 ? below : above;
}

static void bf16_rounds_to_nearest_even(void **state) {
    (void)state;
    Random random = {5};
    for (int i = 0; i < 200000; i++) {
        uint32_t bits = (uint32_t)random_bits(&random);
        if (i % 4 == 0) { bits = (bits & 0xffff0000u) | 0x8000u; } // exactly half way
        float value;
        memcpy(&value, &bits, sizeof value);
        if (isnan(value)) {
            assert_true(isnan(bf16_to_float(bf16_from_float(value))));
        } else if (isfinite(value)) {
            assert_int_equal(bf16_from_float(value), bf16_by_search(value));
        } else {
            assert_true(bf16_to_float(bf16_from_float(value)) == value);
        }
    }
    uint32_t low_nan = 0x7f800001u; // truncation would make it infinite
    float value;
    memcpy(&value, &low_nan, sizeof value);
    assert_true(isnan(bf16_to_float(bf16_from_float(value))));
}

// ---------------------------------------------------------------------------------------------------------------------------------------

// In a child, because the program ends: rank 0 of two waits for a rank 1 that never comes.
static int run_lonely_rank(char *message, size_t size) {
    int pipe_ends[2];
    assert_int_equal(pipe(pipe_ends), 0);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        dup2(pipe_ends[1], STDERR_FILENO);
        ThreadsRank self = {threads_world_create(2), 0};
        Transport transport;
        threads_open(&transport, &self);
        transport.timeout_seconds = 0.3;
        transport.commit = 12;
        transport_barrier(&transport, "count exchange");
        _exit(0);
    }
    close(pipe_ends[1]);
    size_t length = 0;
    for (ssize_t count; (count = read(pipe_ends[0], message + length, size - 1 - length)) > 0;) { length += (size_t)count; }
    message[length] = '\0';
    close(pipe_ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void a_rank_that_does_not_arrive_is_named(void **state) {
    (void)state;
    if (process_transport->size > 1) { skip(); }
    char message[2048];
    assert_int_equal(run_lonely_rank(message, sizeof message), EXIT_SYSTEM_FAILURE);
    assert_non_null(strstr(message, "rank 0 of 2 on "));
    assert_non_null(strstr(message, "commit 12"));
    assert_non_null(strstr(message, "count exchange: rank 1 did not arrive"));
    assert_non_null(strstr(message, "--timeout-s"));
}

int main(void) {
    Transport transport;
    Error error = {""};
    if (!transport_open(&transport, &error)) { return 1; }
    process_transport = &transport;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(collectives_equal_plain_loops_bit_for_bit),
        cmocka_unit_test(delays_change_no_bit),
        cmocka_unit_test(the_emulated_link_is_as_slow_as_it_says),
        cmocka_unit_test(bf16_rounds_to_nearest_even),
        cmocka_unit_test(a_rank_that_does_not_arrive_is_named),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    transport_close(&transport);
    return failed == 0 ? 0 : 1;
}
