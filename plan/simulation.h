// simulation.h: how long an update rule takes on machines that need not exist.
//
// The rule itself runs: its page and the scheduler's verbs. Only its two streams are simulated
// (StreamSimulator, runtime/device.h): a task's cost (machine.h) is added to a clock; where the
// host would wait for an event, its clock jumps. So the simulator knows no rule, but the kinds of
// tasks, and what a task of one stream waits for in the other, which is H6 and H7 of scheduler.h:
//
//   compute         | forward, where parameters have arrived | backward, layer after layer |
//   communication   ... gather, bucket after bucket |        reduce, bucket after bucket .. |
//
// One host thread stands for all ranks. If they differ, each has clocks of its own for host and
// compute. There is one clock of communication, because an exchange ends on all ranks when the last
// of them has begun and the data have arrived. With --accumulate auto a rank whose job has ended
// leaves the remaining micro-batches of the round to the others.
//
// Not simulated: other traffic on the links, files, validation, and ranks of one host that compete
// for its cores (their micro-batches are measured together).
#pragma once

#include "local_steps.h"
#include "plan/machine.h"
#include "scheduler/rule.h"

// Times are in seconds since the start.
typedef struct RankClock {
    double host, compute; // when they are free again
    double computed;      // when the event of the latest recording happens
    double useful;        // seconds of computation so far
    double busy;          // the same, with what overlapped exchanges have taken
    bool joins;           // takes part in the next micro-batch
} RankClock;

typedef struct Simulation {
    const Machine *machine;
    Scheduler *scheduler;
    StreamSimulator simulator;
    Stream streams[2]; // for compute and for communication
    int width;         // how many ranks have clocks of their own; 1 if all are alike
    RankClock *clocks; // (width)
    // The communication stream, the same on all ranks.
    double communication; // when it is free again
    double stepped, communicated;
    bool hides; // compute goes on during a job
    // The part of an exchange that overlaps what is computed next.
    double beside_began, beside_ended, beside_taken; // the latter: the share of a second of compute
    double backward_began, backward_ended;           // of the latest micro-batch, on the slowest rank
    double step_flops;                               // Optimizer::flops; 0: their rate is unknown
    double *arrivals;     // (layout.cells): when the latest gather brought each bucket
    size_t arrival_cells; // of a bucket; 0: everything is there
    // Totals.
    double bytes_outside; // that a host has sent to others
    double micro_batches; // of all ranks
} Simulation;

#define EACH_CLOCK(simulation, clock) \
    RankClock *clock = (simulation)->clocks, *end_of_clocks = clock + (simulation)->width; \
    clock < end_of_clocks; \
    clock++

// ---- Compute --------------------------------------------------------------------------

// When computation of `seconds` from `start` on ends, while an exchange takes a part of each.
static inline double simulation_beside(const Simulation *simulation, double start, double seconds) {
    double began = simulation->beside_began, ended = simulation->beside_ended,
           speed = 1 - simulation->beside_taken;
    if (start >= ended || start + seconds <= began || speed >= 1) { return start + seconds; }
    double before = fmax(began - start, 0), left = seconds - before, from = start + before;
    double possible = (ended - from) * speed;
    return left <= possible ? from + left / speed : ended + (left - possible);
}

static inline void simulation_take(Simulation *simulation, double seconds) {
    for (EACH_CLOCK(simulation, clock)) {
        double start = fmax(clock->host, clock->compute);
        clock->compute = simulation_beside(simulation, start, seconds);
        clock->useful += seconds;
        clock->busy += clock->compute - start;
    }
}

static inline void simulation_pass(Simulation *simulation, double elements, double bytes) {
    simulation_take(simulation, machine_pass(simulation->machine, elements, bytes));
}

// The share of a pass that layers [first, last) have, by their parameters. The head comes last; it
// counts as what stands before the layers, its own matrix or the token embedding having the same
// shape. All of it where layers and embeddings are frozen.
static inline double simulation_share(const Simulation *simulation, int first, int last, bool head) {
    const Problem *problem = &simulation->scheduler->problem;
    double layers = problem->layer_begins[last] - problem->layer_begins[first];
    double all = problem->layer_begins[problem->layer_count];
    return all > 0 ? (layers + (head ? problem->layer_begins[0] : 0)) / all : head;
}

// When a micro-batch that begins at `start` has ended its forward pass: one step, or one for each
// layer if parameters are still to arrive and the layer waits for them (H7).
static inline double simulation_forward(const Simulation *simulation, double start, double seconds,
                                        double *busy) {
    const Scheduler *s = simulation->scheduler;
    const Problem *problem = &s->problem;
    bool waits = simulation->arrival_cells > 0 && problem->layer_count > 0;
    int steps = waits ? problem->layer_count : 1;
    double now = start;
    for (int l = 0; l < steps; l++) {
        bool last = l == steps - 1;
        size_t end_of_layer = last ? problem->parameter_count : problem->layer_begins[l + 1];
        double share = waits ? simulation_share(simulation, l, l + 1, last) : 1, began = now;
        if (simulation->arrival_cells > 0 && end_of_layer > 0) {
            size_t cell = layout_cell_with(&s->layout, end_of_layer - 1);
            began = fmax(now, simulation->arrivals[cell / simulation->arrival_cells]);
        }
        now = simulation_beside(simulation, began, seconds * share);
        *busy += now - began;
    }
    return now;
}

#define FORWARD_SHARE (1.0 / 3) // of a micro-batch; the backward pass has twice as many products

static inline void simulation_micro_batch(Simulation *simulation) {
    Scheduler *s = simulation->scheduler;
    const Machine *machine = simulation->machine;
    int stand_for = s->transport->size / simulation->width;
    bool beside_estimate = s->job_in_flight && s->job.kind == ESTIMATE && machine->estimate_counts != NULL;
    const double *counts = beside_estimate ? machine->estimate_counts : machine->counts;
    simulation->backward_began = simulation->backward_ended = 0;
    for (int i = 0; i < simulation->width; i++) {
        RankClock *clock = &simulation->clocks[i];
        if (!clock->joins) { continue; }
        double count = counts != NULL ? counts[i] : 1, seconds = machine->micro_batch;
        if (i == machine->slow_rank) { seconds += machine->slow_seconds; }
        seconds *= count * (machine->slowness != NULL ? machine->slowness[i] : 1);
        double start = fmax(clock->host, clock->compute);
        double middle = simulation_forward(simulation, start, seconds * FORWARD_SHARE, &clock->busy);
        double end = simulation_beside(simulation, middle, seconds * (1 - FORWARD_SHARE));
        clock->busy += end - middle;
        clock->useful += seconds;
        clock->compute = end;
        if (end > simulation->backward_ended) {
            simulation->backward_began = middle;
            simulation->backward_ended = end;
        }
        s->gradients.tally.micro_batches += stand_for * count;
        simulation->micro_batches += stand_for * count;
    }
    simulation->arrival_cells = 0;
}

// ---- The job --------------------------------------------------------------------------

// H6: when, on the slowest rank, gradients from `begin` on are final.
static inline double simulation_finished(const Simulation *simulation, size_t begin) {
    const Problem *problem = &simulation->scheduler->problem;
    int layer = problem->layer_count;
    double began = simulation->backward_began, ended = simulation->backward_ended;
    if (layer == 0 || begin < problem->layer_begins[0]) { return ended; }
    while (layer > 0 && problem->layer_begins[layer] > begin) { layer--; }
    return began + (ended - began) * simulation_share(simulation, layer, problem->layer_count, true);
}

// Adds an exchange to a clock; its work, longer beside computation as both share cores, to *work.
static inline double simulation_spend(Simulation *simulation, ExchangeCost cost, double now, double *work) {
    simulation->bytes_outside += cost.bytes;
    *work += cost.work;
    return now + cost.seconds + (simulation->hides ? cost.work * simulation->machine->taken_of_work : 0);
}

static inline double simulation_exchange(Simulation *simulation, const Collective *collective, bool gather,
                                         double now, double *work) {
    const Machine *machine = simulation->machine;
    const Job *job = &simulation->scheduler->job;
    double own = layout_most(collective->layout, collective->first, collective->end);
    ExchangeCost cost =
        machine_exchange(machine, simulation->scheduler->transport, own, collective->wire, gather);
    if (machine->measured_exchange != NULL) {
        cost.seconds = machine->measured_exchange[job->wire] / 2 * own / layout_shard(&job->layout);
        cost.work = 0;
    }
    return simulation_spend(simulation, cost, now, work);
}

// job_gather_blocks: from `now` on.
static inline double simulation_gather_blocks(Simulation *simulation, double now, double *work) {
    const Scheduler *s = simulation->scheduler;
    double blocks = sparse_blocks(s->problem.parameter_count);
    double looking = machine_exchange_pass(simulation->machine, s->problem.parameter_count, PASS_SQUARE);
    ExchangeCost cost = machine_gather(simulation->machine, s->transport, blocks * sizeof(SparseBlock),
                                       ceil(blocks / s->local.sparse.slice));
    *work += looking;
    return simulation_spend(simulation, cost, now + looking, work);
}

// job_reduce: from `now` on. *hidden: seconds of it before the backward pass has ended.
static inline double simulation_reduce(Simulation *simulation, double now, double *work, double *hidden) {
    Scheduler *s = simulation->scheduler;
    const Job *job = &s->job;
    Collective collective = job_reduction(s, job);
    const Layout *layout = collective.layout;
    *hidden = 0;
    if (s->settings.local.sparse) { return simulation_gather_blocks(simulation, now, work); }
    for (collective.end = layout->cells; collective.end > 0; collective.end = collective.first) {
        collective.first = collective.end > job->bucket_cells ? collective.end - job->bucket_cells : 0;
        size_t first = layout_cell_begin(layout, collective.first),
               last = layout_cell_begin(layout, collective.end);
        if (job->follows) { now = fmax(now, simulation_finished(simulation, first)); }
        double started = now;
        if (job->inspects) {
            double seconds = machine_exchange_pass(simulation->machine, last - first, PASS_SQUARE);
            now += seconds;
            *work += seconds;
        }
        now = simulation_exchange(simulation, &collective, false, now, work);
        if (job->all_reduces) { now = simulation_exchange(simulation, &collective, true, now, work); }
        if (job->follows) { *hidden += fmax(fmin(now, simulation->backward_ended) - started, 0); }
    }
    return now;
}

// job_summarise and job_step, which compute's threads serve where compute waits for them.
static inline double simulation_step(const Simulation *simulation, double now, double *work) {
    const Scheduler *s = simulation->scheduler;
    const Job *job = &s->job;
    const Machine *machine = simulation->machine;
    now += machine_records(machine, s->transport, sizeof(Tally));
    int steps = job->commits + job->predicts;
    if (steps == 0) { return now; }
    bool waits = job->follows;
    double shard = layout_shard(&s->layout), stepped = layout_shard(&s->optimizer.layout);
    double bytes = shard * PASS_SQUARE + stepped * PASS_ADAMW * steps;
    double seconds = waits ? machine_pass(machine, 1, bytes) : machine_exchange_pass(machine, 1, bytes);
    if (simulation->step_flops > 0) {
        double rate = waits ? machine->flops_per_second : machine->exchange_flops_per_second;
        seconds += simulation->step_flops / rate * steps;
    }
    *work += waits ? 0 : seconds;
    return now + seconds;
}

// What runs from `began` to `ended` takes its part of the computation that it overlaps.
static inline void simulation_run_beside(Simulation *simulation, double began, double ended, double work) {
    const Machine *machine = simulation->machine;
    simulation->beside_began = began;
    simulation->beside_ended = ended;
    simulation->beside_taken =
        ended > began ? fmin(machine->taken_of_work * work / (ended - began) + machine->taken_of_time, 0.9)
                      : 0;
}

// job_task
static inline void simulation_job(Simulation *simulation) {
    Scheduler *s = simulation->scheduler;
    Job *job = &s->job;
    double began = simulation->communication, work = 0, hidden = 0, sent = simulation->bytes_outside;
    for (EACH_CLOCK(simulation, clock)) { began = fmax(began, clock->host); }
    double now = simulation_reduce(simulation, began, &work, &hidden);
    // Gradients that are sent meanwhile make the backward pass longer, and so are ready later.
    if (hidden > 0) {
        double longer = simulation->machine->taken_of_work * work * hidden / (now - began) +
                        simulation->machine->taken_of_time * hidden;
        simulation->backward_ended += longer;
        for (EACH_CLOCK(simulation, clock)) {
            clock->compute += longer;
            clock->busy += longer;
        }
        simulation->bytes_outside = sent;
        work = 0;
        now = simulation_reduce(simulation, began, &work, &hidden);
    }
    double own_work = job->follows ? 0 : work;
    now = simulation_step(simulation, now, &own_work);
    if (!job->follows) { simulation_run_beside(simulation, began, now, own_work); }
    simulation->communication = simulation->stepped = now;
    memset(&job->total, 0, sizeof job->total);
    job->total.micro_batches = job_buffer(s, job)->tally.micro_batches;
    job->spike = SPIKE_NONE;
    s->optimizer.steps += job->commits;
}

// job_gather_task
static inline void simulation_job_gather(Simulation *simulation) {
    Scheduler *s = simulation->scheduler;
    const Job *job = &s->job;
    Collective collective = job_reduction(s, job);
    double began = simulation->communication, ended = began, work = 0;
    collective.wire = job_gather_wire(s, collective.wire);
    for (size_t bucket = 0; !job->all_reduces && collective.first < s->layout.cells; bucket++) {
        collective.end = size_min(collective.first + job->bucket_cells, s->layout.cells);
        ended = simulation_exchange(simulation, &collective, true, ended, &work);
        simulation->arrivals[bucket] = ended;
        collective.first = collective.end;
    }
    if (job->follows && !job->all_reduces) { simulation->arrival_cells = job->bucket_cells; }
    simulation->communication = simulation->communicated = ended;
    if (job->follows) {
        simulation_run_beside(simulation, began, ended, work);
    } else if (ended > began) { // one stretch with the job's first part
        double before = simulation->beside_ended - simulation->beside_began;
        double taken = simulation->beside_taken * before + simulation->machine->taken_of_work * work +
                       simulation->machine->taken_of_time * (ended - began);
        simulation->beside_taken = fmin(taken / (before + ended - began), 0.9);
        simulation->beside_ended = ended;
    }
}

// ---- What the streams are given -------------------------------------------------------

// StreamSimulator::run
static inline void simulation_run(void *self, Stream *stream, StreamTask task, void *context) {
    Simulation *simulation = (Simulation *)self;
    Scheduler *s = simulation->scheduler;
    bool follows = s->settings.overlap && s->job_in_flight && s->job.follows;
    (void)stream;
    if (task == micro_batch_task) {
        s->round_begun++;
        simulation_micro_batch(simulation);
        if (follows && scheduler_is_followed(s)) {
            simulation_job(simulation);
            simulation_job_gather(simulation);
        }
    } else if (task == job_task) {
        if (!follows) { simulation_job(simulation); }
    } else if (task == job_gather_task) {
        if (!follows) { simulation_job_gather(simulation); }
    } else if (task == boundary_task) {
        simulation_pass(simulation, layout_padded(&s->layout), PASS_COPY);
    } else if (task == inner_step_task) {
        simulation_pass(simulation, s->problem.parameter_count, PASS_SQUARE + PASS_ADAMW);
        if (simulation->step_flops > 0) {
            simulation_take(simulation, simulation->step_flops / simulation->machine->flops_per_second);
        }
        s->gradients.tally.micro_batches += s->local.tally_before.micro_batches;
        s->optimizer.steps++;
    } else {
        assert(task == fragment_task && "a task that the simulation does not know");
        const FragmentWork *work = (const FragmentWork *)context;
        simulation_pass(simulation, s->local.fragments[work->fragment].layout.count,
                        work->operation == SPARSE_ENCODE ? PASS_SPARSE : PASS_OUTER);
    }
}

// StreamSimulator::record. A job that follows the backward pass sets its own events.
static inline void simulation_record(void *self, const Event *event, Stream *stream) {
    Simulation *simulation = (Simulation *)self;
    Scheduler *s = simulation->scheduler;
    if (stream == s->compute) {
        for (EACH_CLOCK(simulation, clock)) { clock->computed = clock->compute; }
    } else if (!(s->settings.overlap && s->job_in_flight && s->job.follows)) {
        *(event == &s->stepped ? &simulation->stepped : &simulation->communicated) =
            simulation->communication;
    }
}

static inline double simulation_happens(const Simulation *simulation, const Event *event,
                                        const RankClock *clock) {
    const Scheduler *s = simulation->scheduler;
    return event == &s->computed  ? clock->computed
           : event == &s->stepped ? simulation->stepped
                                  : simulation->communicated;
}

// StreamSimulator::has_happened. Ranks for which it has leave what follows to the others.
static inline bool simulation_has_happened(void *self, const Event *event) {
    Simulation *simulation = (Simulation *)self;
    int late = 0;
    for (EACH_CLOCK(simulation, clock)) {
        clock->joins = clock->host < simulation_happens(simulation, event, clock);
        late += clock->joins;
    }
    for (EACH_CLOCK(simulation, clock)) { clock->joins |= late == 0; }
    return late == 0;
}

// StreamSimulator::wait
static inline void simulation_wait(void *self, const Event *event) {
    Simulation *simulation = (Simulation *)self;
    for (EACH_CLOCK(simulation, clock)) {
        clock->host = fmax(clock->host, simulation_happens(simulation, event, clock));
    }
}

// ---- A whole run ----------------------------------------------------------------------

// Per commit, for a local rule per inner step.
typedef struct SimulatedCommit {
    double seconds;
    double computing;     // what computation alone would take; the mean over the ranks
    double waiting;       // in which a rank does not compute
    double micro_batches; // of all ranks
    double bytes_outside; // that a host sends to the others
} SimulatedCommit;

// Prepares a scheduler that scheduler_reserve has planned for a supposed transport.
static inline void simulation_open(Simulation *simulation, Scheduler *scheduler, const Machine *machine) {
    assert(machine->host.bytes_per_second > 0 && machine->inside.bytes_per_second > 0 && // and no NaN
           machine->memory_bytes_per_second > 0 && machine->exchange_bytes_per_second > 0 &&
           machine->micro_batch > 0);
    memset(simulation, 0, sizeof *simulation);
    simulation->machine = machine;
    simulation->scheduler = scheduler;
    bool alike = machine->slow_rank < 0 && machine->slowness == NULL && machine->counts == NULL;
    simulation->width = alike ? 1 : scheduler->transport->size;
    if (machine->flops_per_second > 0) { simulation->step_flops = scheduler->optimizer.flops; }
    const StreamSimulator simulator = {simulation, simulation_run, simulation_record, simulation_has_happened,
                                       simulation_wait};
    simulation->simulator = simulator;
    simulation->clocks = MEMORY_OF(RankClock, simulation->width);
    simulation->arrivals = MEMORY_OF(double, scheduler->layout.cells);
    scheduler->compute = &simulation->streams[0];
    scheduler->communication = &simulation->streams[1];
    for (EACH_CLOCK(simulation, clock)) { clock->joins = true; }
    scheduler->compute->simulator = scheduler->communication->simulator = &simulation->simulator;
    scheduler_open_progress(scheduler, false);
}

static inline void simulation_close(Simulation *simulation) {
    Scheduler *s = simulation->scheduler;
    free(simulation->clocks);
    free(simulation->arrivals);
    scheduler_close_progress(s);
    scheduler_free(s);
}

static inline SimulatedCommit simulation_sum(const Simulation *simulation) {
    double now = 0, useful = 0, busy = 0;
    for (EACH_CLOCK(simulation, clock)) {
        now = fmax(now, fmax(clock->host, clock->compute));
        useful += clock->useful;
        busy += clock->busy;
    }
    double width = simulation->width;
    SimulatedCommit sum = {now, useful / width, now - busy / width, simulation->micro_batches,
                           simulation->bytes_outside};
    return sum;
}

// How often Rule::advance is called, before what is measured and then again.
static inline int simulation_calls(const Simulation *simulation) {
    const SchedulerSettings *settings = &simulation->scheduler->settings;
    return settings->kind == RULE_LOCAL ? 2 * settings->local.fragments : 16;
}

// How many micro-batches it would simulate, of all ranks that have clocks of their own. About,
// where they go on for as long as an exchange lasts.
static inline double simulation_length(const Simulation *simulation) {
    const Scheduler *s = simulation->scheduler;
    const SchedulerSettings *settings = &s->settings;
    double steps =
        settings->kind == RULE_LOCAL ? (double)settings->local.steps / settings->local.fragments : 1;
    double micro_batches = settings->micro_batches;
    for (int gather = 0; settings->adaptive && gather < 2; gather++) {
        micro_batches += machine_exchange(simulation->machine, s->transport, layout_shard(&s->layout),
                                          settings->wire, gather == 1)
                             .seconds /
                         simulation->machine->micro_batch;
    }
    return 2.0 * simulation_calls(simulation) * steps * micro_batches * simulation->width;
}

// Lets the rule make commits until they repeat, and returns the mean of those that follow.
static inline SimulatedCommit simulation_of_rule(Simulation *simulation, const Rule *rule) {
    Scheduler *s = simulation->scheduler;
    bool local = rule->kind == RULE_LOCAL;
    int calls = simulation_calls(simulation);
    simulation->hides =
        s->settings.overlap && (local ? s->settings.local.delay > 0 || rule->job_in_flight_between_commits
                                      : rule->kind == RULE_OVERLAPPED);
    s->settings.sequential = 0;
    s->settings.first_round = s->settings.round_a;
    s->settings.target = 1e15;
    for (int i = 0; i < calls; i++) { rule->advance(s); }
    SimulatedCommit before = simulation_sum(simulation);
    double commits = -(double)s->optimizer.steps;
    for (int i = 0; i < calls; i++) { rule->advance(s); }
    SimulatedCommit after = simulation_sum(simulation);
    commits += s->optimizer.steps;
    // A rank that never waits has waited for a rounding error, of either sign.
    double waiting = fmax((after.waiting - before.waiting) / commits, 0);
    SimulatedCommit mean = {(after.seconds - before.seconds) / commits,
                            (after.computing - before.computing) / commits, waiting,
                            (after.micro_batches - before.micro_batches) / commits,
                            (after.bytes_outside - before.bytes_outside) / commits};
    return mean;
}
