// choose.h: a rule's choices that are left to a measurement before training (--acco-split auto).
//
// The ranks measure a micro-batch and exchanges on the run itself (plan/measure.h). Rank 0
// simulates the ways to run that the rule offers (Rule::choose) with these times, and takes the
// shortest commits. Formats are measured from the finest on, until computation hides the exchanges.
#pragma once

#include "plan/forecast.h"
#include "plan/measure.h"
#include "program/start.h"

// MARGIN: exchanges may be 10 % slower during training than when they were measured.
// TOLERANCE: commits that differ by 1 % of the compute time are equally short.
#define CHOOSE_MARGIN 1.1
#define CHOOSE_TOLERANCE 0.01

enum { CHOOSE_SPLITS = 64 }; // of more splits, about this many are simulated, evenly spread

typedef struct RankSpeed {
    int micro_batches; // per commit
    double seconds;    // of one, during an exchange
} RankSpeed;

typedef struct Measurements {
    int rule; // in RULES
    const SchedulerSettings *settings;
    const Problem *problem;
    Transport *transport;
    const Machine *machine;
    const RankSpeed *ranks;             // (transport->size)
    double exchange[WIRE_FORMAT_COUNT]; // seconds, of the slowest rank; 0: not measured
} Measurements;

// One way to run, and the seconds of its commits. late: with exchanges as slow as the margin
// allows. expected: the mean of that and of the seconds with exchanges as measured. By the slow
// ones alone a split that hides the measured ones may look no better than one that hides nothing.
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
    size_t size = measured->transport->size;
    const RankSpeed *ranks = measured->ranks;
    SchedulerSettings settings = settings_of_rank(measured, options, 0);
    Run *trial = MEMORY_OF(Run, 1);
    Simulation simulation;
    double *slowness = MEMORY_OF(double, 3 * size), exchange[WIRE_FORMAT_COUNT];
    double *counts = slowness + size, *estimate_counts = counts + size;
    Machine machine = *measured->machine;
    machine.micro_batch = ranks[0].seconds; // with what exchanges take from it, and --slow-ms
    machine.taken_of_work = machine.taken_of_time = 0;
    machine.slow_rank = -1;
    machine.slowness = slowness;
    machine.counts = counts;
    machine.estimate_counts = estimate_counts;
    machine.measured_exchange = exchange;
    settings.device.gpu = NULL;
    settings.device.nccl = NULL;
    for (int i = 0; i < WIRE_FORMAT_COUNT; i++) { exchange[i] = longer * measured->exchange[i]; }
    for (size_t rank = 0; rank < size; rank++) {
        SchedulerSettings other = settings_of_rank(measured, options, (int)rank);
        slowness[rank] = ranks[rank].seconds / ranks[0].seconds;
        counts[rank] = (double)other.round_a / settings.round_a;
        estimate_counts[rank] =
            (double)(other.micro_batches - other.round_a) / (settings.micro_batches - settings.round_a);
    }
    trial->transport = *measured->transport;
    scheduler_reserve(&trial->scheduler, &trial->arena, &settings, measured->problem, &trial->transport);
    simulation_open(&simulation, &trial->scheduler, &machine);
    double seconds = simulation_of_rule(&simulation, RULES[measured->rule].rule).seconds;
    simulation_close(&simulation);
    free(trial);
    free(slowness);
    return seconds;
}

// The first choice whose commits are as short as any; late: with slow exchanges, else on average.
static inline const Choice *choose_first(const Measurements *measured, const Choice *list, int count,
                                         bool late) {
    double least = INFINITY;
    for (int i = 0; i < count; i++) { least = fmin(least, late ? list[i].late : list[i].expected); }
    double most = least + CHOOSE_TOLERANCE * measured_computing(measured);
    while (!((late ? list->late : list->expected) <= most)) { list++; }
    return list;
}

static inline Choice choose_split(const Measurements *measured, const RuleOptions *options, int format) {
    Choice choices[CHOOSE_SPLITS + 1];
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
        count++;
    }
    return *choose_first(measured, choices, count, false);
}

// How many micro-batches of rank 0 overlap an exchange in this format.
static inline int measured_beside(const Measurements *measured, WireFormat wire) {
    return (int)fmin(ceil(CHOOSE_MARGIN * measured->exchange[wire] / measured->ranks[0].seconds), INT_MAX);
}

// Whether no coarser format can make commits shorter.
static inline bool choice_hides_everything(const Measurements *measured, const Choice *choice) {
    return choice->late <= (1 + CHOOSE_TOLERANCE) * measured_computing(measured);
}

// All ranks measure together; rank 0 chooses for all.
static inline void measure_and_choose(Run *run) {
    Scheduler *s = &run->scheduler;
    MeasuredRound round = measure_round(s, s->settings.wire);
    RankSpeed mine = {s->settings.micro_batches, round.micro_batch};
    RankSpeed *ranks =
        (RankSpeed *)transport_collect_records(&run->transport, "measuring the ranks", &mine, sizeof mine);
    Machine machine = machine_of_run(run, round.micro_batch);
    Measurements measured = {.rule = run->options.rule,
                             .settings = &s->settings,
                             .problem = &s->problem,
                             .transport = &run->transport,
                             .machine = &machine,
                             .ranks = ranks};
    Choice choices[WIRE_FORMAT_COUNT];
    int count = 0;
    measured.exchange[s->settings.wire] = round.exchange;
    for (bool enough = false; !enough; count++) {
        RuleOptions options = run->options.rules;
        if (!run->rule->choose(rule_own_options(measured.rule, &options), &s->settings, count, 0)) { break; }
        WireFormat wire = settings_of_rank(&measured, &options, 0).estimate_wire;
        if (measured.exchange[wire] == 0) { measured.exchange[wire] = measure_round(s, wire).exchange; }
        if (run_is_main(run)) {
            choices[count] = choose_split(&measured, &run->options.rules, count);
            enough = choice_hides_everything(&measured, &choices[count]);
        }
        wait_for_rank_zero(&run->transport, "choosing"); // with many ranks it simulates for a while
        share_from_rank_zero(&run->transport, "sharing", &enough, sizeof enough);
    }
    if (run_is_main(run)) {
        const Choice *chosen = choose_first(&measured, choices, count, true); // the finest such format
        double a = 0, b = 0;
        SchedulerSettings settings = settings_of_rank(&measured, &chosen->options, 0);
        for (int rank = 0; rank < run->transport.size; rank++) {
            SchedulerSettings other = settings_of_rank(&measured, &chosen->options, rank);
            a = fmax(a, other.round_a * ranks[rank].seconds);
            b = fmax(b, (other.micro_batches - other.round_a) * ranks[rank].seconds);
        }
        snprintf(run->rule_reason, sizeof run->rule_reason,
                 "measured: the exchange of a commit takes %.3g s and its round %.3g s, the exchange of an "
                 "estimate (%s) %.3g s and its round %.3g s",
                 measured.exchange[settings.wire], a, wire_name(settings.estimate_wire),
                 measured.exchange[settings.estimate_wire], b);
        run->options.rules = chosen->options;
        s->settings.device.beside[0] = measured_beside(&measured, settings.wire);
        s->settings.device.beside[1] = measured_beside(&measured, settings.estimate_wire);
    }
    share_from_rank_zero(&run->transport, "sharing", run->rule_reason, sizeof run->rule_reason);
    share_from_rank_zero(&run->transport, "sharing", &run->options.rules, sizeof run->options.rules);
    int *beside = s->settings.device.beside;
    share_from_rank_zero(&run->transport, "sharing", beside, sizeof s->settings.device.beside);
    free(ranks);
}

// Makes the choices that are left to a measurement. The scheduler, checkpoints and the
// configuration, which was saved before, get to know what was chosen.
static inline void choose_by_measurement(Run *run) {
    Options *options = &run->options;
    Error error = {""};
    bool left = false;
    for (EACH_OPTION(option)) {
        left |= option->measured != NULL && options_leave(options, option_field(option, options));
    }
    if (left) {
        if (run_is_main(run)) { puts("measuring  a micro-batch and the exchanges, to choose what is auto"); }
        fflush(stdout);
        measure_and_choose(run);
        options->measuring_ranks = run->transport.size;
        run->rule->configure(options_of_rule(options), &run->scheduler.settings);
        bool saved = !run_is_main(run) || save_configuration(options, run->directory, &error);
        agree_or_exit(run, saved, EXIT_SYSTEM_FAILURE, &error);
    }
    run->checkpointed.options = options_as_json(options); // from here on they do not change
}
