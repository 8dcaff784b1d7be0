// test_simulation.c: the simulator against what is known without it.
//
//   - on machines of which only the link costs time, every rule takes what its closed form
//     says: for all of them, on links from fast to slow
//   - buckets are hidden behind the backward and the forward pass as their closed form says
//   - rounds of unequal length on unequal ranks take what their closed form says
//   - with --accumulate auto ranks compute for as long as the exchange takes, each at its own
//     speed
//   - bytes that leave a host are those of the exchange on one level and on two
//   - an exchange that needs the cores of the computation slows it down by what it works
//   - what an exchange costs on small numbers is what was worked out by hand
//
// How near it comes to real runs is measured by dev/bench/predict.
#include "plan/simulation.h"
#include "rules.h"
#include "test/harness.h"

enum { LAYERS = 4, CELLS = 128, PIECE = 256 };

#define C 0.010 // seconds of a micro-batch

// One simulated run and what it stands on.
typedef struct World {
    Transport transport;
    Scheduler scheduler;
    Arena arena;
    Machine machine;
    Simulation simulation;
    SchedulerSettings settings;
    double split; // share of ACCO's round A
    size_t begins[LAYERS + 1];
    Problem problem;
} World;

// Only the link costs time: an exchange of the whole vector in fp32 takes `exchange` seconds,
// reduce-scatter and all-gather together. All of the vector is in layers of equal length.
static World *world_new(int ranks, int ranks_per_host, double exchange) {
    World *world = (World *)calloc(1, sizeof *world);
    size_t count = (size_t)ranks * CELLS * PIECE;
    transport_open_supposed(&world->transport, ranks, ranks_per_host);
    world->transport.two_level = ranks_per_host > 1;
    for (size_t l = 0; l <= LAYERS; l++) { world->begins[l] = l * count / LAYERS; }
    Problem problem = {.parameter_count = count, .layer_begins = world->begins, .layer_count = LAYERS};
    world->problem = problem;
    double hosts = (double)ranks / ranks_per_host;
    world->machine.host.bytes_per_second = 2 * (hosts - 1) / hosts * (double)count * sizeof(float) / exchange;
    world->machine.inside.bytes_per_second = INFINITY;
    world->machine.memory_bytes_per_second = world->machine.exchange_bytes_per_second = INFINITY;
    world->machine.micro_batch = C;
    world->machine.slow_rank = -1;
    world->settings.overlap = true;
    world->settings.local.fragments = 1;
    world->settings.micro_batches = 4;
    world->split = 0.5;
    return world;
}

static SimulatedCommit world_run(World *world, const char *name) {
    const Rule *rule = rule_find(name);
    world->settings.kind = rule->kind;
    world->settings.replicated = rule->replicated;
    world->settings.local.sparse = strcmp(name, "sparse-loco") == 0;
    world->settings.round_a = acco_round_a(world->split, world->settings.micro_batches);
    scheduler_reserve(&world->scheduler, &world->arena, &world->settings, &world->problem, &world->transport);
    simulation_open(&world->simulation, &world->scheduler, &world->machine);
    SimulatedCommit commit = simulation_of_rule(&world->simulation, rule);
    simulation_close(&world->simulation);
    return commit;
}

static void world_free(World *world) {
    transport_close(&world->transport);
    free(world);
}

// The records of a commit are too small to be left out, but no closed form has them.
static double records(const World *world) {
    return machine_records(&world->machine, &world->transport, sizeof(Tally));
}

static void expect(double value, double expected, const char *what, double ratio) {
    if (!(fabs(value - expected) <= 1e-9 * expected)) {
        fail_msg("%s, exchange / computation %g: %.9g s, the closed form says %.9g", what, ratio, value,
                 expected);
    }
}

static const double RATIOS[] = {0.01, 0.3, 0.5, 0.9, 1, 1.5, 4, 30};

enum { RATIO_COUNT = sizeof RATIOS / sizeof RATIOS[0] };

// ---- Closed forms (R: an exchange, k: micro-batches) ----------------------------------

static void overlapped_rules_take_their_closed_form(void **state) {
    (void)state;
    for (int i = 0; i < RATIO_COUNT; i++) {
        double computing = 4 * C, R = RATIOS[i] * computing;
        World *world = world_new(8, 1, R);
        double S = R + records(world);
        expect(world_run(world, "dpu").seconds, fmax(computing, S), "dpu", RATIOS[i]);
        expect(world_run(world, "acco-wp").seconds, fmax(computing, S), "acco-wp", RATIOS[i]);
        expect(world_run(world, "acco").seconds, 2 * fmax(computing / 2, S), "acco", RATIOS[i]);
        world_free(world);
    }
}

static void rules_without_overlap_add_up(void **state) {
    (void)state;
    static const char *const rules[] = {"ddp", "zero1", "dpu", "acco-wp", "acco"};
    for (int i = 0; i < 5 * RATIO_COUNT; i++) {
        double computing = 4 * C, ratio = RATIOS[i / 5], R = ratio * computing;
        World *world = world_new(4, 1, R);
        world->settings.overlap = false;
        double exchanges = strcmp(rules[i % 5], "acco") == 0 ? 2 : 1;
        double waiting = exchanges * (R + records(world));
        SimulatedCommit commit = world_run(world, rules[i % 5]);
        expect(commit.seconds, computing + waiting, rules[i % 5], ratio);
        expect(commit.waiting, waiting, rules[i % 5], ratio);
        expect(commit.computing, computing, rules[i % 5], ratio);
        world_free(world);
    }
}

static void local_rules_take_their_closed_form(void **state) {
    (void)state;
    enum { H = 12, P = 4 };
    for (int i = 0; i < RATIO_COUNT; i++) {
        double step = 4 * C, R = RATIOS[i] * step * H;
        World *world = world_new(4, 1, R);
        double r = records(world);
        world->settings.local.steps = H;
        expect(world_run(world, "diloco").seconds, step + (R + r) / H, "diloco", RATIOS[i]);
        expect(world_run(world, "co2").seconds, fmax(step, (R + r) / H), "co2", RATIOS[i]);
        world->settings.local.fragments = 1;
        for (int tau = 0; tau < H; tau += 5) {
            double bytes = (double)(sparse_blocks(world->problem.parameter_count) * sizeof(SparseBlock));
            double S = 3 * bytes / world->machine.host.bytes_per_second + r;
            world->settings.local.delay = tau;
            expect(world_run(world, "sparse-loco").seconds, step + fmax(S - tau * step, 0) / H, "sparse-loco",
                   RATIOS[i]);
        }
        world->settings.local.fragments = P;
        for (int tau = 0; tau < H / P; tau++) {
            world->settings.local.delay = tau;
            double exposed = fmax(R / P + r - tau * step, 0);
            expect(world_run(world, "streaming-diloco").seconds, step + P * exposed / H, "streaming-diloco",
                   RATIOS[i]);
        }
        world_free(world);
    }
}

// The exposed part of `total` seconds in n equal messages that become ready evenly over a
// window; mirrored: that are needed evenly over it.
static double tail(double window, double total, int n) {
    return fmax(fmax(window / n + total, window + total / n) - window, 0);
}

static void buckets_hide_behind_the_passes(void **state) {
    (void)state;
    for (int i = 0; i < RATIO_COUNT; i++) {
        double backward = 2 * C / 3, forward = C / 3, R = RATIOS[i] * C;
        for (int k = 1; k <= 3; k++) {
            World *world = world_new(4, 1, R);
            double r = records(world);
            world->settings.micro_batches = k;
            world->settings.bucket_bytes = world->problem.parameter_count * sizeof(float) / LAYERS;
            expect(world_run(world, "ddp").seconds, k * C + tail(backward, R, LAYERS) + r, "ddp", RATIOS[i]);
            expect(world_run(world, "zero1").seconds,
                   k * C + tail(backward, R / 2, LAYERS) + tail(forward, R / 2, LAYERS) + r, "zero1",
                   RATIOS[i]);
            world_free(world);
        }
    }
}

// ---- Ranks that differ ----------------------------------------------------------------

// The longest of the cycles that keep each other waiting, all on the slowest rank: its own
// rounds follow each other, as do the two exchanges; the estimate waits for round A, and the
// commit for round B.
static void unequal_rounds_on_unequal_ranks(void **state) {
    (void)state;
    static const double slowness[] = {1, 1.7, 0.6, 1.2};
    for (int i = 0; i < RATIO_COUNT; i++) {
        double R = RATIOS[i] * 8 * C, c = 1.7 * C;
        World *world = world_new(4, 1, R);
        double S = R + records(world), E = R / 2 + records(world);
        world->settings.micro_batches = 8;
        world->settings.wire = WIRE_FP32;
        world->settings.estimate_wire = WIRE_BF16; // half of the bytes
        world->machine.slowness = slowness;
        for (int a = 1; a < 8; a++) {
            double longest = fmax(fmax(8 * c, S + E), fmax(a * c + E, (8 - a) * c + S));
            world->split = a / 8.0;
            expect(world_run(world, "acco").seconds, longest, "acco", RATIOS[i]);
        }
        world_free(world);
    }
}

static void one_slow_rank_holds_up_who_waits_for_it(void **state) {
    (void)state;
    World *world = world_new(4, 1, C);
    world->machine.slow_rank = 2;
    world->machine.slow_seconds = 3 * C;
    expect(world_run(world, "dpu").seconds, 4 * 4 * C, "dpu", 1);
    world->settings.local.steps = 5;
    expect(world_run(world, "diloco").seconds, 4 * 4 * C + (C + records(world)) / 5, "diloco", 1);
    world_free(world);
}

// A round lasts as long as the exchange beside it, 5.5 micro-batches, so it has 6.
static void auto_computes_for_as_long_as_it_takes(void **state) {
    (void)state;
    World *world = world_new(2, 1, 5.5 * C);
    world->settings.adaptive = true;
    world->settings.micro_batches = 1;
    SimulatedCommit commit = world_run(world, "dpu");
    expect(commit.seconds, 6 * C, "dpu auto", 5.5);
    expect(commit.micro_batches, 2 * 6, "micro-batches of dpu auto", 5.5);
    expect(commit.computing, 6 * C, "computation of dpu auto", 5.5);
    world->settings.micro_batches = 2; // acco: one in each round at least
    commit = world_run(world, "acco");
    expect(commit.seconds, 2 * 6 * C, "acco auto", 5.5);
    expect(commit.micro_batches, 2 * 2 * 6, "micro-batches of acco auto", 5.5);
    world->settings.micro_batches = 1;
    world->machine.slow_rank = 1;
    world->machine.slow_seconds = 9 * C;
    commit = world_run(world, "dpu");
    // The fast rank's exchange ends only 5.5 after the slow one has joined it.
    expect(commit.seconds, 10 * C, "dpu auto with a slow rank", 5.5);
    expect(commit.micro_batches, 1 + 10, "micro-batches of dpu auto with a slow rank", 5.5);
    world_free(world);
}

static void counts_of_ranks_may_differ(void **state) {
    (void)state;
    static const double counts[] = {1, 0.25, 1, 0.5}, slowness[] = {1, 4, 1, 2};
    World *world = world_new(4, 1, C);
    world->machine.counts = counts;
    world->machine.slowness = slowness;
    SimulatedCommit commit = world_run(world, "dpu");
    expect(commit.seconds, 4 * C, "dpu with other counts", 1);
    expect(commit.micro_batches, 4 + 1 + 4 + 2, "their sum", 1);
    world_free(world);
}

// ---- Bytes, and what hiding costs -----------------------------------------------------

static void bytes_leave_a_host_once(void **state) {
    (void)state;
    static const struct {
        const char *rule;
        int ranks, each;
        bool two_level;
        WireFormat wire;
        double vectors; // that cross the link, reduce-scatter and all-gather counted by themselves
    } cases[] = {
        {"zero1", 8, 1, false, WIRE_FP32, 2}, {"zero1", 8, 4, true, WIRE_FP32, 2},
        {"zero1", 8, 4, false, WIRE_FP32, 8}, {"acco", 8, 2, true, WIRE_INT4, 4},
        {"ddp", 64, 8, true, WIRE_BF16, 2},   {"dpu", 6, 3, true, WIRE_INT8, 2},
        {"diloco", 8, 4, true, WIRE_E3M0, 2},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        World *world = world_new(cases[i].ranks, cases[i].each, C);
        world->transport.two_level = cases[i].two_level;
        world->settings.wire = world->settings.estimate_wire = cases[i].wire;
        world->settings.local.steps = 1;
        double hosts = cases[i].ranks / cases[i].each;
        double bytes = (double)wire_bytes(cases[i].wire, world->problem.parameter_count);
        expect(world_run(world, cases[i].rule).bytes_outside, cases[i].vectors * (hosts - 1) / hosts * bytes,
               cases[i].rule, hosts);
        world_free(world);
    }
}

// On two levels sums travel inside a host in fp32, and what is gathered in the format of the wire.
static void sums_inside_a_host_are_fp32(void **state) {
    (void)state;
    enum { RANKS = 8, EACH = 4 };
    World *world = world_new(RANKS, EACH, C);
    double own = (double)(world->problem.parameter_count / RANKS), rate = 1e6;
    double element = (double)wire_bytes(WIRE_INT8, WIRE_BLOCK) / WIRE_BLOCK;
    double elements = RANKS / EACH * (EACH - 1) * own; // of every rank
    world->machine.host.bytes_per_second = INFINITY;
    world->machine.inside.bytes_per_second = rate;
    for (int gather = 0; gather < 2; gather++) {
        double seconds =
            machine_exchange(&world->machine, &world->transport, own, WIRE_INT8, gather == 1).seconds;
        expect(seconds, elements * (gather == 1 ? element : sizeof(float)) / rate, "inside a host", gather);
    }
    world_free(world);
}

static void sparse_blocks_leave_a_host_once_for_each_other_host(void **state) {
    (void)state;
    static const struct {
        int ranks, each;
        bool two_level;
        double sent; // encoded vectors that leave a host
    } cases[] = {{8, 1, false, 7}, {8, 4, true, 4}, {8, 4, false, 16}, {64, 8, true, 56}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        World *world = world_new(cases[i].ranks, cases[i].each, C);
        world->transport.two_level = cases[i].two_level;
        world->settings.local.steps = 1;
        expect(world_run(world, "sparse-loco").bytes_outside,
               cases[i].sent * (double)(sparse_blocks(world->problem.parameter_count) * sizeof(SparseBlock)),
               "sparse-loco", cases[i].each);
        world_free(world);
    }
}

// What ranks do for an exchange comes from the same cores: compute loses it.
static void work_for_an_exchange_slows_computation(void **state) {
    (void)state;
    World *world = world_new(2, 1, 2 * C);
    SimulatedCommit free = world_run(world, "dpu");
    world->machine.exchange_bytes_per_second = 1e9;
    SimulatedCommit idle = world_run(world, "dpu");
    world->machine.taken_of_work = 1;
    SimulatedCommit busy = world_run(world, "dpu");
    double own = (double)(world->problem.parameter_count / 2);
    double work = 2 * machine_exchange(&world->machine, &world->transport, own, WIRE_FP32, false).work +
                  machine_exchange_pass(&world->machine, own, PASS_SQUARE + PASS_ADAMW) +
                  machine_exchange_pass(&world->machine, 2 * own, PASS_SQUARE);
    expect(free.seconds, 4 * C, "dpu", 0.5);
    expect(idle.seconds, 4 * C, "dpu with cores of its own for the exchange", 0.5);
    expect(busy.seconds, 4 * C + work, "dpu that shares its cores", 0.5);
    expect(busy.computing, 4 * C, "what it computes", 0.5);
    world_free(world);
}

// And the other way round: an exchange that shares its cores with computation takes longer.
static void computation_slows_an_exchange(void **state) {
    (void)state;
    World *world = world_new(2, 1, 100 * C);
    world->machine.exchange_bytes_per_second = 1e9;
    SimulatedCommit idle = world_run(world, "dpu");
    world->machine.taken_of_work = 1;
    SimulatedCommit busy = world_run(world, "dpu");
    double own = (double)(world->problem.parameter_count / 2);
    double work = 2 * machine_exchange(&world->machine, &world->transport, own, WIRE_FP32, false).work;
    expect(busy.seconds - idle.seconds, work, "dpu whose exchange shares its cores", 25);
    world_free(world);
}

// A faster link or machine never makes a commit longer.
static void nothing_gets_slower_on_better_machines(void **state) {
    (void)state;
    for (int rule = 0; rule < RULE_COUNT; rule++) {
        double before = INFINITY;
        for (int i = 0; i < 20; i++) {
            World *world = world_new(8, 2, C);
            world->settings.local.steps = 6;
            world->settings.bucket_bytes = 1 << 16;
            world->machine.host.bytes_per_second = 1e5 * pow(2, i);
            world->machine.host.latency = 1e-4;
            world->machine.sleeps = true;
            world->machine.memory_bytes_per_second = world->machine.exchange_bytes_per_second = 5e9;
            world->machine.taken_of_work = 0.5;
            double seconds = world_run(world, RULES[rule].rule->name).seconds;
            if (!(seconds <= before * (1 + 1e-9))) {
                fail_msg("%s: %g s, and %g s on a link of half the rate", RULES[rule].rule->name, seconds,
                         before);
            }
            before = seconds;
            world_free(world);
        }
    }
}

// ---- Costs ----------------------------------------------------------------------------

// Links of 1 MB/s and 1 ms between hosts, of 10 MB/s and 0.1 ms inside one; 1 GB/s in memory.
static const Machine costly = {.host = {1e6, 1e-3},
                               .inside = {1e7, 1e-4},
                               .exchange_bytes_per_second = 1e9,
                               .chunk = 500,
                               .message_seconds = 1e-5,
                               .wake_seconds = 1e-4};

static void open_ranks(Transport *transport, int ranks, int per_host, bool two_level) {
    memset(transport, 0, sizeof *transport);
    transport->size = ranks;
    transport->two_level = two_level;
    groups_make_even(&transport->hosts, 0, ranks, per_host);
    groups_make_even(&transport->flat, 0, ranks, 1);
}

static void close_ranks(Transport *transport) {
    groups_free(&transport->hosts);
    groups_free(&transport->flat);
}

// 1000 elements of each rank in two chunks, worked out by hand.
static void an_exchange_costs_what_machine_h_says(void **state) {
    (void)state;
    static const struct {
        int ranks, per_host;
        bool two_level, gather;
        WireFormat wire;
        double chunk, seconds, work, bytes;
    } cases[] = {
        {4, 2, true, false, WIRE_FP32, 500, 0.010068, 1.36e-4, 8000},
        {4, 2, true, true, WIRE_BF16, 500, 0.005652, 1.04e-4, 4000},
        {4, 2, true, false, WIRE_BF16, 500, 0.006068, 1.36e-4, 4000},
        {4, 2, false, false, WIRE_FP32, 500, 0.017674, 1.48e-4, 16000},
        {2, 2, false, false, WIRE_FP32, 500, 0.000626, 5.2e-5, 0},
        {2, 1, false, true, WIRE_FP32, 10, 0.0511104, 1.04e-3, 4000}, // each lane waits for its message
        {1, 1, false, false, WIRE_FP32, 500, 1.2e-5, 1.2e-5, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Transport transport;
        Machine machine = costly;
        machine.chunk = cases[i].chunk;
        open_ranks(&transport, cases[i].ranks, cases[i].per_host, cases[i].two_level);
        ExchangeCost cost = machine_exchange(&machine, &transport, 1000, cases[i].wire, cases[i].gather);
        assert_close(cost.work, cases[i].work, 1e-12, "work");
        assert_close(cost.bytes, cases[i].bytes, 1e-9, "bytes");
        assert_close(cost.seconds, cases[i].seconds, 1e-12, "seconds");
        close_ranks(&transport);
    }
}

// Of each rank: three slices of 1000 bytes in all, and a record of 100.
static void vectors_and_records_cost_what_machine_h_says(void **state) {
    (void)state;
    static const struct {
        int ranks, per_host;
        bool two_level;
        double seconds, bytes, records;
    } cases[] = {
        {4, 2, true, 0.006416, 2000, 1.91e-3},
        {4, 2, false, 0.008016, 4000, 1.53e-3},
        {2, 2, false, 0.001008, 0, 1.11e-3},
        {1, 1, false, 4e-6, 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Transport transport;
        open_ranks(&transport, cases[i].ranks, cases[i].per_host, cases[i].two_level);
        ExchangeCost cost = machine_gather(&costly, &transport, 1000, 3);
        assert_close(cost.seconds, cases[i].seconds, 1e-12, "seconds");
        assert_close(cost.work, 4e-6 * cases[i].ranks, 1e-15, "work");
        assert_close(cost.bytes, cases[i].bytes, 1e-9, "bytes");
        assert_close(machine_records(&costly, &transport, 100), cases[i].records, 1e-12, "records");
        close_ranks(&transport);
    }
}

// From 10 s to 20 s an exchange takes half of each second.
static void computation_beside_an_exchange_takes_longer(void **state) {
    (void)state;
    static const double cases[][3] = {{0, 5, 5},   {0, 10, 10}, {5, 10, 20}, {5, 12, 22},
                                      {12, 2, 16}, {18, 4, 23}, {20, 3, 23}, {25, 1, 26}};
    Simulation simulation = {.beside_began = 10, .beside_ended = 20};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) { // start, seconds, end
        double start = cases[i][0], seconds = cases[i][1];
        simulation.beside_taken = 0.5;
        assert_close(simulation_beside(&simulation, start, seconds), cases[i][2], 1e-12, "half");
        simulation.beside_taken = 0;
        assert_close(simulation_beside(&simulation, start, seconds), start + seconds, 1e-12, "nothing");
    }
}

// The head counts as what stands before the layers; alone it is all that is computed.
static void layers_share_a_pass_by_their_parameters(void **state) {
    (void)state;
    static size_t begins[] = {100, 300, 600}, none[] = {0, 0, 0};
    Scheduler *s = (Scheduler *)calloc(1, sizeof *s);
    Simulation simulation = {.scheduler = s};
    s->problem.layer_count = 2;
    s->problem.layer_begins = begins;
    assert_close(simulation_share(&simulation, 0, 1, false), 1.0 / 3, 1e-12, "first layer");
    assert_close(simulation_share(&simulation, 1, 2, true), 2.0 / 3, 1e-12, "last layer and head");
    assert_close(simulation_share(&simulation, 0, 2, true), 1, 1e-12, "all");
    s->problem.layer_begins = none;
    assert_close(simulation_share(&simulation, 0, 1, false), 0, 0, "a frozen layer");
    assert_close(simulation_share(&simulation, 1, 2, true), 1, 0, "the head alone");
    free(s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(computation_beside_an_exchange_takes_longer),
        cmocka_unit_test(layers_share_a_pass_by_their_parameters),
        cmocka_unit_test(an_exchange_costs_what_machine_h_says),
        cmocka_unit_test(vectors_and_records_cost_what_machine_h_says),
        cmocka_unit_test(overlapped_rules_take_their_closed_form),
        cmocka_unit_test(rules_without_overlap_add_up),
        cmocka_unit_test(local_rules_take_their_closed_form),
        cmocka_unit_test(buckets_hide_behind_the_passes),
        cmocka_unit_test(unequal_rounds_on_unequal_ranks),
        cmocka_unit_test(one_slow_rank_holds_up_who_waits_for_it),
        cmocka_unit_test(auto_computes_for_as_long_as_it_takes),
        cmocka_unit_test(counts_of_ranks_may_differ),
        cmocka_unit_test(bytes_leave_a_host_once),
        cmocka_unit_test(sums_inside_a_host_are_fp32),
        cmocka_unit_test(sparse_blocks_leave_a_host_once_for_each_other_host),
        cmocka_unit_test(work_for_an_exchange_slows_computation),
        cmocka_unit_test(computation_slows_an_exchange),
        cmocka_unit_test(nothing_gets_slower_on_better_machines),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
