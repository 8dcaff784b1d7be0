// choice.h: which of the ways to run that a rule offers (Rule::choose) makes the shortest
// commits, by a simulation with measured times.
//
// The rule itself is simulated, with the seconds that a micro-batch takes on each rank and an
// exchange in each format. choose.h measures them on a run.
#ifndef ACCO_PLAN_CHOICE_H
#define ACCO_PLAN_CHOICE_H

#include "plan/simulation.h"
#include "rules.h"

// MARGIN: exchanges may be 10 % slower during training than when they were measured.
// TOLERANCE: commits that differ by 1 % of the compute time are equally short.
#define CHOOSE_MARGIN 1.1
#define CHOOSE_TOLERANCE 0.01

enum { CHOOSE_SPLITS = 64 }; // of more splits, about this many are simulated, evenly spread

// What one rank computes.
typedef struct RankSpeed {
    int micro_batches; // per commit
    double seconds;    // of one, beside an exchange
} RankSpeed;

// What a choice is made from.
typedef struct Measurements {
    int rule; // in RULES
    const SchedulerSettings *settings;
    const Problem *problem;
    Transport *transport;
    const Machine *machine;
    const RankSpeed *ranks;             // (transport->size)
    double exchange[WIRE_FORMAT_COUNT]; // seconds, of the slowest rank; 0: not measured
} Measurements;

// One way to run, and the seconds of its commits: with exchanges that are as slow as the
// margin allows, and in the mean of these and those that were measured. The former alone would
// not tell a split that hides all that was measured from one that hides nothing.
typedef struct Choice {
    RuleOptions options;
    double late, expected;
} Choice;

static inline double measured_computing(const Measurements *measured) {
    double longest = 0;
    for (int rank = 0; rank < measured->transport->size; rank++) {
        longest = fmax(longest, measured->ranks[rank].micro_batches * measured->ranks[rank].seconds);
    }
    return longest;
}

// The settings of a rank with these options.
static inline SchedulerSettings settings_of_rank(const Measurements *measured, const RuleOptions *options,
                                                 int rank) {
    SchedulerSettings settings = *measured->settings;
    settings.micro_batches = measured->ranks[rank].micro_batches;
    RULES[measured->rule].rule->configure(rule_own_options(measured->rule, options), &settings);
    return settings;
}

// Seconds of a commit with exchanges that take `longer` times what was measured. The buffers
// of the scheduler that is simulated are planned and never allocated.
static inline double simulated_seconds(const Measurements *measured, const RuleOptions *options,
                                       double longer) {
    size_t size = (size_t)measured->transport->size;
    const RankSpeed *ranks = measured->ranks;
    SchedulerSettings settings = settings_of_rank(measured, options, 0);
    Scheduler *scheduler = (Scheduler *)calloc(1, sizeof *scheduler);
    Arena *arena = (Arena *)calloc(1, sizeof *arena);
    Transport *transport = (Transport *)malloc(sizeof *transport);
    double *numbers = (double *)calloc(3 * size, sizeof(double)), exchange[WIRE_FORMAT_COUNT];
    if (scheduler == NULL || arena == NULL || transport == NULL || numbers == NULL) {
        transport_fail(measured->transport, "no memory to simulate %zu ranks", size);
    }
    double *slowness = numbers, *counts = numbers + size, *estimate_counts = numbers + 2 * size;
    for (size_t rank = 0; rank < size; rank++) {
        SchedulerSettings other = settings_of_rank(measured, options, (int)rank);
        slowness[rank] = ranks[rank].seconds / ranks[0].seconds;
        counts[rank] = (double)other.round_a / settings.round_a;
        estimate_counts[rank] =
            (double)(other.micro_batches - other.round_a) / (settings.micro_batches - settings.round_a);
    }
    for (int wire = 0; wire < WIRE_FORMAT_COUNT; wire++) {
        exchange[wire] = longer * measured->exchange[wire];
    }
    Machine machine = *measured->machine;
    machine.micro_batch = ranks[0].seconds; // with what exchanges take from it, and --slow-ms
    machine.taken_of_work = machine.taken_of_time = 0;
    machine.slow_rank = -1;
    machine.slowness = slowness;
    machine.counts = counts;
    machine.estimate_counts = estimate_counts;
    machine.measured_exchange = exchange;
    settings.gpu = NULL;
    settings.nccl = NULL;
    *transport = *measured->transport;
    scheduler_reserve(scheduler, arena, &settings, measured->problem, transport);
    Simulation simulation;
    if (!simulation_open(&simulation, scheduler, &machine)) {
        transport_fail(measured->transport, "no memory to simulate %zu ranks", size);
    }
    double seconds = simulation_of_rule(&simulation, RULES[measured->rule].rule).seconds;
    simulation_close(&simulation);
    free(scheduler);
    free(arena);
    free(transport);
    free(numbers);
    return seconds;
}

// The best split with a format: of all that are as short, in the mean, the first.
static inline Choice choose_split(const Measurements *measured, const RuleOptions *options, int format) {
    Choice choices[CHOOSE_SPLITS + 1];
    double least = INFINITY;
    int count = 0, most = 0;
    for (int rank = 1; rank < measured->transport->size; rank++) {
        if (measured->ranks[rank].micro_batches > measured->ranks[most].micro_batches) { most = rank; }
    }
    SchedulerSettings settings = settings_of_rank(measured, options, most);
    int stride = (settings.micro_batches + CHOOSE_SPLITS - 1) / CHOOSE_SPLITS;
    for (int split = 0; count <= CHOOSE_SPLITS; split += stride) {
        Choice *choice = &choices[count];
        choice->options = *options;
        void *own = rule_own_options(measured->rule, &choice->options);
        if (!RULES[measured->rule].rule->choose(own, &settings, format, split)) { break; }
        choice->late = simulated_seconds(measured, &choice->options, CHOOSE_MARGIN);
        choice->expected = (choice->late + simulated_seconds(measured, &choice->options, 1)) / 2;
        least = fmin(least, choice->expected);
        count++;
    }
    int chosen = 0;
    while (!(choices[chosen].expected <= least + CHOOSE_TOLERANCE * measured_computing(measured))) {
        chosen++;
    }
    return choices[chosen];
}

// Whether no coarser format can make commits shorter.
static inline bool choice_hides_everything(const Measurements *measured, const Choice *choice) {
    return choice->late <= (1 + CHOOSE_TOLERANCE) * measured_computing(measured);
}

// The first, and so the finest format, whose commits take no longer than those of any other.
static inline const Choice *choose_format(const Measurements *measured, const Choice *list, int count) {
    double least = INFINITY;
    for (int i = 0; i < count; i++) { least = fmin(least, list[i].late); }
    while (!(list->late <= least + CHOOSE_TOLERANCE * measured_computing(measured))) { list++; }
    return list;
}

#endif
