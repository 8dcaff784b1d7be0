// replay.h: every update rule once more, as a plain loop in one process: the oracle of
// the whole program.
//
// N workers take turns. There are no streams, no messages, no scheduler and no shards,
// only the definitions of the rules, in the order in which they are written on paper. A
// real run of N ranks with a fixed number of micro-batches must end in the same bits as
// this simulation. For that, the simulation does in the same order what rounds:
//
//   sums over workers   element by element, in the order of workers, in fp32, after each
//                       contribution has gone through the wire format; in 4 bits with
//                       what the wire has taken from the ones before
//   the norm            owner by owner, piece by piece (comm/layout.h), in double
//   wire formats        piece by piece (kernels/wire.h); coarse ones encode the
//                       difference to the parameters that workers compute with
//   elementwise steps   the same kernels, over whole vectors
//
// The problem is a callback: the scalar examples that can be checked by hand run through
// the same lines as a model does.
#pragma once

#include "comm/layout.h"
#include "kernels/cpu/adamw.h"
#include "kernels/cpu/buffers.h"
#include "kernels/cpu/outer.h"
#include "kernels/wire.h"
#include "runtime/memory.h"
#include "runtime/numbers.h"
#include "scheduler/optimizer.h"
#include "scheduler/spike.h"
#include "scheduler/state.h"
#include "test/sgd.h"

enum { REPLAY_WORKERS = 32, REPLAY_FRAGMENTS = 8 };

// ---- Settings and problem -------------------------------------------------------------

// An update that all workers make: a commit, or the outer step of a local rule.
typedef struct ReplayUpdate {
    const float *parameters;             // (parameter_count): what all workers share from now on
    double gradients_done;               // micro-batch gradients committed so far, of all workers
    double learning_rate, gradient_norm; // of the latest step; local rules: of worker 0
} ReplayUpdate;

typedef struct ReplayProblem {
    void *self;
    size_t parameter_count;
    double tokens; // predicted in a micro-batch, where nothing is masked
    // gradients (parameter_count) += the gradient of micro-batch `index` (0, 1, ...) of
    // `worker` at `parameters`: of the sum of its losses, divided by `tokens`.
    MicroBatchResult (*micro_batch)(void *self, int worker, uint64_t index, const float *parameters,
                                    float *gradients);
    void (*updated)(void *self, const ReplayUpdate *update); // NULL: not wanted
} ReplayProblem;

typedef struct ReplaySettings {
    const char *rule;
    int workers;
    // Workers that follow each other and share a host, which adds them up before anything
    // is rounded; 0: every worker is a host.
    int workers_per_host;
    int accumulate[REPLAY_WORKERS]; // micro-batches of each worker per commit, or per inner step
    // acco: how many of them are in round A, the rest being in round B; of the very first
    // round A, 0: as in the others.
    int round_a[REPLAY_WORKERS], first_round[REPLAY_WORKERS];
    int sequential; // overlapped rules: commits at the start that overlap nothing
    double target;  // gradients after which training ends
    double clip;    // 0: none
    WireFormat wire, estimate_wire;
    LearningRate rate;
    bool rate_by_commits;
    double spike_limit; // SpikeDetector::limit; spikes are left out
    bool sgd;           // plain SGD instead of AdamW
    double beta1, beta2, epsilon, weight_decay;
    const uint8_t *decays; // (parameter_count): 1 where weight decay applies; NULL: everywhere
    // Tensors whose rows are not 0 are matrices of Muon; the others do not matter here.
    const OptimizerTensor *tensors;
    int tensor_count;
    double muon_momentum, adamw_ratio; // as in OptimizerSettings
    int muon_iterations;
    // Local rules.
    int period; // inner steps between two outer ones (co2: tau; diloco, streaming: H)
    double outer_rate, mu, alpha;
    double co2_beta, co2_alpha, co2_phi, co2_gap;
    bool co2_eager;
    int fragments, delay;             // streaming: P and tau
    const uint8_t *fragment_of;       // (parameter_count); NULL: all in fragment 0
    double sparse_beta, sparse_alpha; // sparse-loco, whose tau is `delay`
    bool sparse_eager;
    bool plain_outer; // the formulas of the outer steps below, not the kernels: equal but for rounding
} ReplaySettings;

// ---------------------------------------------------------------------------------------
// State. All vectors are (padded); elements past parameter_count stay zero.

typedef struct ReplayState {
    float *master, *first_moment, *second_moment;
    int64_t steps;
} ReplayState;

typedef struct ReplayWorker {
    float *gradients;       // accumulator
    double predicted, loss; // sums over the micro-batches in it
    uint64_t micro_batches; // so far
    // Local rules.
    ReplayState state;
    float *outer, *momentum;
    float *start; // where the period began; sparse-loco: at the sending
    float *error; // what has not been sent: by sparse-loco; in 4 bits of a host's sums, at its first worker
    float *exchange; // the pseudo-gradient, until the sum over all workers replaces it
    double period_predicted,
        period_micro_batches; // since the latest exchange; the latter whole, left out or not
    float weight;             // in the latest mean
    SpikeDetector norms, losses;
} ReplayWorker;

typedef struct ReplayTotal {
    float *sum;                    // of the accumulators of all workers
    double count, predicted, loss; // of the micro-batches in it
} ReplayTotal;

typedef struct Replay {
    ReplaySettings settings;
    ReplayProblem problem;
    Layout layout;
    size_t padded;
    Arena arena;
    Stream stream;   // only its pool is used
    uint8_t *decays; // 0 or 1; 2: in a matrix of Muon
    uint8_t *fragment_of;
    MuonWorkspace muon;
    double *partials; // scratch of the norm
    size_t room;      // elements of the next four: of the longest fragment with its padding
    float *parcel;    // (room): what one worker sends
    float *host;      // (room): the sum of one host
    float *sum;       // (room)
    char *message;    // a piece as the wire encodes it
    ReplayWorker workers[REPLAY_WORKERS];
    float inverse_weight; // of what replay_send has left
    double held;          // micro-batches in all accumulators
    // Rules whose workers step together.
    ReplayState state;
    SpikeDetector norms, losses;
    float *stepped;         // the result of the latest step
    float *parameters;      // at which all workers compute
    ReplayTotal part, full; // gradient sums: of round A, of a whole commit
    double gradients_done;
    double learning_rate, gradient_norm; // of the latest step
} Replay;

static inline void replay_reserve_state(Replay *replay, ReplayState *state) {
    size_t bytes = replay->padded * sizeof(float);
    arena_reserve(&replay->arena, MEMORY_OPTIMIZER, "master", bytes, &state->master);
    arena_reserve(&replay->arena, MEMORY_OPTIMIZER, "first moment", bytes, &state->first_moment);
    arena_reserve(&replay->arena, MEMORY_OPTIMIZER, "second moment", bytes, &state->second_moment);
}

static inline void replay_reserve(Replay *replay) {
    Arena *arena = &replay->arena;
    size_t bytes = replay->padded * sizeof(float);
    for (int i = 0; i < replay->settings.workers; i++) {
        ReplayWorker *worker = &replay->workers[i];
        arena_reserve(arena, MEMORY_GRADIENTS, "gradients", bytes, &worker->gradients);
        replay_reserve_state(replay, &worker->state);
        arena_reserve(arena, MEMORY_PARAMETERS, "outer parameters", bytes, &worker->outer);
        arena_reserve(arena, MEMORY_OPTIMIZER, "outer momentum", bytes, &worker->momentum);
        arena_reserve(arena, MEMORY_OPTIMIZER, "start of a period", bytes, &worker->start);
        arena_reserve(arena, MEMORY_OPTIMIZER, "error", bytes, &worker->error);
        arena_reserve(arena, MEMORY_COMMUNICATION, "exchange", bytes, &worker->exchange);
    }
    replay_reserve_state(replay, &replay->state);
    arena_reserve(arena, MEMORY_PARAMETERS, "parameters", bytes, &replay->parameters);
    arena_reserve(arena, MEMORY_PARAMETERS, "stepped parameters", bytes, &replay->stepped);
    arena_reserve(arena, MEMORY_COMMUNICATION, "sum", bytes, &replay->part.sum);
    arena_reserve(arena, MEMORY_COMMUNICATION, "sum", bytes, &replay->full.sum);
    arena_reserve(arena, MEMORY_WORKSPACE, "decays", replay->padded, &replay->decays);
    arena_reserve(arena, MEMORY_WORKSPACE, "fragments", replay->padded, &replay->fragment_of);
    arena_reserve(arena, MEMORY_WORKSPACE, "partial sums", buffer_blocks(replay->padded) * sizeof(double),
                  &replay->partials);
    arena_reserve(arena, MEMORY_WORKSPACE, "parcel", replay->room * sizeof(float), &replay->parcel);
    arena_reserve(arena, MEMORY_WORKSPACE, "host", replay->room * sizeof(float), &replay->host);
    arena_reserve(arena, MEMORY_WORKSPACE, "sum", replay->room * sizeof(float), &replay->sum);
    arena_reserve(arena, MEMORY_WORKSPACE, "message", replay->room * sizeof(float), &replay->message);
    for (int i = 0; i < replay->settings.tensor_count; i++) {
        const OptimizerTensor *tensor = &replay->settings.tensors[i];
        if (tensor->rows == 0) { continue; }
        replay->muon.count = size_max(replay->muon.count, tensor->end - tensor->begin);
        replay->muon.side = size_max(replay->muon.side, (size_t)tensor->rows);
    }
    if (replay->muon.count > 0) { muon_reserve(&replay->muon, arena, PRECISION_FP32); }
}

// Which worker owns what: whole matrices where Muon steps them and workers step together.
static inline Layout replay_layout(const ReplaySettings *settings, size_t count) {
    LayoutMatrix matrices[256];
    int matrix_count = 0;
    bool local = strcmp(settings->rule, "co2") == 0 || strstr(settings->rule, "loco") != NULL;
    for (int i = 0; i < settings->tensor_count && !local; i++) {
        if (settings->tensors[i].rows == 0) { continue; }
        assert(matrix_count < 256);
        matrices[matrix_count].begin = settings->tensors[i].begin;
        matrices[matrix_count++].end = settings->tensors[i].end;
    }
    return matrix_count > 0 ? layout_make_whole(count, settings->workers, matrices, matrix_count)
                            : layout_make(count, settings->workers);
}

// Starts everybody from the same parameters (parameter_count).
static inline void replay_open(Replay *replay, const ReplaySettings *settings, const ReplayProblem *problem,
                               const float *parameters) {
    Error error = {""};
    size_t count = problem->parameter_count, bytes = count * sizeof(float);
    memset(replay, 0, sizeof *replay);
    assert(settings->workers >= 1 && settings->workers <= REPLAY_WORKERS &&
           settings->fragments <= REPLAY_FRAGMENTS);
    replay->settings = *settings;
    replay->problem = *problem;
    replay->layout = replay_layout(settings, count);
    replay->padded = layout_padded(&replay->layout);
    replay->room = 2 * replay->padded + (size_t)settings->workers * LAYOUT_BLOCK;
    replay_reserve(replay);
    bool committed = arena_commit(&replay->arena, &error);
    replay->stream.pool = thread_pool_create(1, false);
    assert(committed && replay->stream.pool != NULL);
    (void)committed;
    replay->norms.limit = replay->losses.limit = settings->spike_limit;
    for (int i = 0; i < settings->workers; i++) {
        replay->workers[i].norms = replay->workers[i].losses = replay->norms;
    }
    if (settings->fragment_of != NULL) { memcpy(replay->fragment_of, settings->fragment_of, count); }
    memset(replay->decays, 1, count);
    if (settings->decays != NULL) { memcpy(replay->decays, settings->decays, count); }
    for (int i = 0; i < settings->tensor_count; i++) {
        const OptimizerTensor *tensor = &settings->tensors[i];
        if (tensor->rows > 0) { memset(replay->decays + tensor->begin, 2, tensor->end - tensor->begin); }
    }
    memcpy(replay->state.master, parameters, bytes);
    memcpy(replay->parameters, parameters, bytes);
    for (int i = 0; i < settings->workers; i++) {
        memcpy(replay->workers[i].state.master, parameters, bytes);
        memcpy(replay->workers[i].outer, parameters, bytes);
    }
}

static inline void replay_close(Replay *replay) {
    layout_free(&replay->layout);
    thread_pool_destroy(replay->stream.pool);
    arena_release(&replay->arena);
}

// Finds the next stretch [*begin, *end) of elements with this label, from *end on. False:
// there is none.
static inline bool replay_next_run(const uint8_t *labels, size_t count, int label, size_t *begin,
                                   size_t *end) {
    *begin = *end;
    while (*begin < count && labels[*begin] != label) { (*begin)++; }
    *end = *begin;
    while (*end < count && labels[*end] == label) { (*end)++; }
    return *begin < *end;
}

// ---- What all rules do ----------------------------------------------------------------

// values (layout_padded) <- what arrives of them at the other end of the wire. Every
// piece is encoded by itself.
static inline void replay_through_wire(Replay *replay, const Layout *layout, WireFormat wire, float *values) {
    for (int owner = 0; owner < layout->size; owner++) {
        for (LayoutRange piece = {0}; layout_next(layout, owner, SIZE_MAX, &piece);) {
            wire_encode(wire, replay->message, values + piece.flat, piece.count);
            wire_decode(wire, values + piece.flat, replay->message, piece.count);
        }
    }
}

// Whether what a wire takes from the sums of a commit is added to the next ones.
static inline bool replay_feeds_back(const ReplaySettings *settings) {
    return settings->workers > 1 && (settings->wire == WIRE_INT4 || settings->wire == WIRE_E3M0);
}

// Of the sum of a host, values (padded), its first worker being `first`.
static inline void replay_send_sum(Replay *replay, int first, float *values) {
    float *error = replay->workers[first].error;
    for (size_t i = 0; i < replay->padded; i++) { error[i] = values[i] += error[i]; }
    replay_through_wire(replay, &replay->layout, replay->settings.wire, values);
    for (size_t i = 0; i < replay->padded; i++) { error[i] -= values[i]; }
}

static inline void replay_accumulate(Replay *replay, int worker, const float *parameters, int count) {
    ReplayWorker *w = &replay->workers[worker];
    for (int i = 0; i < count; i++) {
        MicroBatchResult result = replay->problem.micro_batch(replay->problem.self, worker,
                                                              w->micro_batches++, parameters, w->gradients);
        w->predicted += result.predicted;
        w->loss += result.loss * result.predicted;
    }
    replay->held += count;
}

static inline void replay_clear(Replay *replay, int worker) {
    memset(replay->workers[worker].gradients, 0, replay->padded * sizeof(float));
    replay->workers[worker].predicted = replay->workers[worker].loss = 0;
}

// The mean over the predicted tokens is the sum divided by this.
static inline double replay_divisor(const Replay *replay, double predicted) {
    return predicted > 0 ? predicted / replay->problem.tokens : 1;
}

static inline double replay_scale(const Replay *replay, double norm) {
    double clip = replay->settings.clip;
    return clip > 0 && norm > clip ? clip / norm : 1.0;
}

static inline double replay_rate(const Replay *replay, int64_t commits) {
    return learning_rate_at(&replay->settings.rate,
                            replay->settings.rate_by_commits ? (double)commits : replay->gradients_done);
}

// out <- the parameters after a step from `state`. Only a commit changes the state; it
// may have the master as `out`.
static inline void replay_optimize(Replay *replay, ReplayState *state, const float *gradients, float *out,
                                   double divisor, double scale, double rate, bool commit) {
    const ReplaySettings *settings = &replay->settings;
    for (int decays = 0; decays <= 1; decays++) {
        size_t begin, end = 0;
        while (replay_next_run(replay->decays, replay->problem.parameter_count, decays, &begin, &end)) {
            StepRange range;
            memset(&range, 0, sizeof range);
            range.out = out + begin;
            range.master = state->master + begin;
            range.first_moment = as_reals(state->first_moment + begin);
            range.second_moment = as_reals(state->second_moment + begin);
            range.gradient = gradients + begin;
            range.count = end - begin;
            range.step = adamw_step(settings->beta1, settings->beta2, (double)(state->steps + 1),
                                    settings->epsilon, rate, decays ? settings->weight_decay : 0.0);
            if (settings->adamw_ratio != 0) {
                range.step.learning_rate = (float)(rate * settings->adamw_ratio);
            }
            range.step.divisor = (float)divisor;
            range.step.scale = (float)scale;
            range.keeps = commit;
            (settings->sgd ? sgd_step : cpu_adamw)(&replay->stream, &range);
        }
    }
    for (int i = 0; i < settings->tensor_count; i++) {
        const OptimizerTensor *tensor = &settings->tensors[i];
        if (tensor->rows == 0) { continue; }
        MuonBatch batch = {.rows = tensor->rows, .columns = tensor->columns, .count = 1};
        batch.ranges[0] = (StepRange){
            .out = out + tensor->begin,
            .master = state->master + tensor->begin,
            .first_moment = as_reals(state->first_moment + tensor->begin),
            .gradient = gradients + tensor->begin,
            .count = tensor->end - tensor->begin,
            .step = {.beta1 = (float)settings->muon_momentum,
                     .one_minus_beta1 = (float)(1.0 - settings->muon_momentum),
                     .learning_rate = (float)rate,
                     .decay_factor = (float)(1.0 - rate * (tensor->decays ? settings->weight_decay : 0.0)),
                     .divisor = (float)divisor,
                     .scale = (float)scale},
            .keeps = commit};
        muon_step(&replay->stream, &replay->muon, &batch, settings->muon_iterations);
    }
    if (commit) { state->steps++; }
}

static inline void replay_report(const Replay *replay, const float *parameters) {
    ReplayUpdate update = {parameters, replay->gradients_done, replay->learning_rate, replay->gradient_norm};
    if (replay->problem.updated != NULL) { replay->problem.updated(replay->problem.self, &update); }
}

// ---- Rules whose workers step together ------------------------------------------------

static inline int replay_mates(const ReplaySettings *settings) {
    return settings->workers_per_host > 0 ? settings->workers_per_host : 1;
}

// Every worker computes its micro-batches of a commit.
static inline void replay_compute(Replay *replay) {
    for (int worker = 0; worker < replay->settings.workers; worker++) {
        replay_accumulate(replay, worker, replay->parameters, replay->settings.accumulate[worker]);
    }
}

// sum (padded) += what one worker has. The workers come in their order, and each host adds
// them up by itself; its sum is rounded as it travels, where there is another host.
static inline void replay_add_worker(Replay *replay, const Layout *layout, WireFormat wire, int worker,
                                     const float *values, bool feeds_back, float *sum) {
    const ReplaySettings *settings = &replay->settings;
    int mates = replay_mates(settings);
    size_t padded = layout_padded(layout);
    bool first = worker % mates == 0, last = worker % mates == mates - 1 || worker == settings->workers - 1;
    if (first && last) {
        memcpy(replay->host, values, padded * sizeof(float));
    } else {
        for (size_t i = 0; i < padded; i++) {
            replay->host[i] = (first ? 0.0f : replay->host[i]) + values[i];
        }
    }
    if (!last) { return; }
    if (feeds_back && mates < settings->workers) {
        replay_send_sum(replay, worker / mates * mates, replay->host);
    } else if (mates < settings->workers || mates == 1) {
        replay_through_wire(replay, layout, wire, replay->host);
    }
    for (size_t i = 0; i < padded; i++) { sum[i] += replay->host[i]; }
}

// total <- the sum over the accumulators of all workers.
static inline void replay_add_up(Replay *replay, ReplayTotal *total, WireFormat wire, bool commit) {
    bool feeds_back = commit && replay_feeds_back(&replay->settings);
    memset(total->sum, 0, replay->padded * sizeof(float));
    total->predicted = total->loss = 0;
    for (int worker = 0; worker < replay->settings.workers; worker++) {
        total->predicted += replay->workers[worker].predicted;
        total->loss += replay->workers[worker].loss;
        replay_add_worker(replay, &replay->layout, wire, worker, replay->workers[worker].gradients,
                          feeds_back, total->sum);
    }
    total->count = replay->held;
}

static inline void replay_add_up_and_clear(Replay *replay, ReplayTotal *total) {
    replay_add_up(replay, total, replay->settings.wire, true);
    for (int worker = 0; worker < replay->settings.workers; worker++) { replay_clear(replay, worker); }
    replay->held = 0;
}

// The norm of the mean gradient.
static inline double replay_norm(Replay *replay, const ReplayTotal *total) {
    const Layout *layout = &replay->layout;
    double squares = 0;
    for (int owner = 0; owner < layout->size; owner++) {
        double own = 0;
        for (LayoutRange piece = {0}; layout_next(layout, owner, SIZE_MAX, &piece);) {
            own += cpu_buffer_sum_of_squares(&replay->stream, total->sum + piece.flat, piece.count,
                                             replay->partials);
        }
        squares += own;
    }
    return sqrt(squares) / replay_divisor(replay, total->predicted);
}

static inline bool replay_is_replicated(const Replay *replay) {
    return strcmp(replay->settings.rule, "ddp") == 0;
}

// ddp: every worker gets sum (padded) from its owners, which have what their hosts have not
// sent of it.
static inline void replay_send_sums_back(Replay *replay, float *sum) {
    int mates = replay_mates(&replay->settings);
    for (int owner = 0; owner < replay->layout.size && replay_feeds_back(&replay->settings); owner++) {
        float *error = replay->workers[owner / mates * mates].error;
        for (LayoutRange piece = {0}; layout_next(&replay->layout, owner, SIZE_MAX, &piece);) {
            for (size_t i = piece.flat; i < piece.flat + piece.count; i++) { error[i] = sum[i] += error[i]; }
        }
    }
    replay_through_wire(replay, &replay->layout, replay->settings.wire, sum);
    for (int owner = 0; owner < replay->layout.size && replay_feeds_back(&replay->settings); owner++) {
        float *error = replay->workers[owner / mates * mates].error;
        for (LayoutRange piece = {0}; layout_next(&replay->layout, owner, SIZE_MAX, &piece);) {
            for (size_t i = piece.flat; i < piece.flat + piece.count; i++) { error[i] -= sum[i]; }
        }
    }
}

// stepped <- the parameters after a step with `total`. Under ddp all workers receive the
// sums, and the norm is that of what arrives. False: this is a spike, and no step was
// made.
static inline bool replay_step(Replay *replay, ReplayTotal *total, double rate, bool commit) {
    if (replay_is_replicated(replay)) { replay_send_sums_back(replay, total->sum); }
    double norm = replay_norm(replay, total);
    if (!isfinite(norm) || (commit && spike_judge_both(&replay->norms, &replay->losses, norm,
                                                       total->loss / total->predicted) != SPIKE_NONE)) {
        memcpy(replay->stepped, replay->state.master, replay->padded * sizeof(float));
        for (int i = 0; i < replay->settings.workers && commit; i++) {
            memset(replay->workers[i].error, 0, replay->padded * sizeof(float));
        }
        return false;
    }
    replay->gradient_norm = norm;
    replay->learning_rate = rate;
    replay_optimize(replay, &replay->state, total->sum, replay->stepped,
                    replay_divisor(replay, total->predicted), replay_scale(replay, replay->gradient_norm),
                    rate, commit);
    return true;
}

static inline bool replay_commit(Replay *replay, ReplayTotal *total) {
    if (!replay_step(replay, total, replay_rate(replay, replay->state.steps), true)) { return false; }
    replay->gradients_done += total->count;
    replay_report(replay, replay->stepped);
    return true;
}

// parameters <- what arrives of `stepped`. Under ddp every worker has made the step
// itself.
static inline void replay_spread(Replay *replay, WireFormat wire) {
    bool differences = wire_is_coarse(wire) && !replay_is_replicated(replay);
    float *parcel = replay->parcel, *parameters = replay->parameters;
    for (size_t i = 0; i < replay->padded; i++) {
        parcel[i] = differences ? replay->stepped[i] - parameters[i] : replay->stepped[i];
    }
    if (!replay_is_replicated(replay)) { replay_through_wire(replay, &replay->layout, wire, parcel); }
    for (size_t i = 0; i < replay->padded; i++) {
        parameters[i] = differences ? parameters[i] + parcel[i] : parcel[i];
    }
}

static inline bool replay_is_done(const Replay *replay) {
    return replay->gradients_done >= replay->settings.target;
}

static inline void replay_zero1_commit(Replay *replay) {
    replay_compute(replay);
    replay_add_up_and_clear(replay, &replay->full);
    replay_commit(replay, &replay->full);
    replay_spread(replay, replay->settings.wire);
}

// Also ddp.
static inline void replay_zero1(Replay *replay) {
    while (!replay_is_done(replay)) { replay_zero1_commit(replay); }
}

static inline void replay_sequential(Replay *replay) {
    while (replay->state.steps < replay->settings.sequential && !replay_is_done(replay)) {
        replay_zero1_commit(replay);
    }
}

// The gradients of a round are committed after those of the next round have been
// computed. That next round uses the parameters of the commit before; with `predicts` it
// uses those that a second step with the same gradients would give.
static inline void replay_delayed(Replay *replay, bool predicts) {
    replay_sequential(replay);
    if (replay_is_done(replay)) { return; }
    replay_compute(replay);
    replay_add_up_and_clear(replay, &replay->full);
    while (!replay_is_done(replay)) {
        double rate = replay_rate(replay, replay->state.steps);
        replay_compute(replay);
        bool committed = replay_commit(replay, &replay->full);
        if (predicts && committed) { replay_step(replay, &replay->full, rate, false); }
        replay_spread(replay, replay->settings.wire);
        replay_add_up_and_clear(replay, &replay->full);
    }
    replay_commit(replay, &replay->full);
    replay_spread(replay, replay->settings.wire);
}

static inline void replay_dpu(Replay *replay) { replay_delayed(replay, false); }
static inline void replay_acco_wp(Replay *replay) { replay_delayed(replay, true); }

static inline void replay_acco_first_round(Replay *replay) {
    const ReplaySettings *settings = &replay->settings;
    for (int worker = 0; worker < settings->workers; worker++) {
        int first =
            settings->first_round[worker] > 0 ? settings->first_round[worker] : settings->round_a[worker];
        replay_accumulate(replay, worker, replay->parameters, first);
    }
}

static inline void replay_acco_round(Replay *replay, bool is_a) {
    const ReplaySettings *settings = &replay->settings;
    for (int worker = 0; worker < settings->workers; worker++) {
        int a = settings->round_a[worker];
        replay_accumulate(replay, worker, replay->parameters, is_a ? a : settings->accumulate[worker] - a);
    }
}

static inline void replay_acco(Replay *replay) {
    replay_sequential(replay);
    if (replay_is_done(replay)) { return; }
    replay_acco_first_round(replay);
    while (!replay_is_done(replay)) {
        replay_add_up(replay, &replay->part, replay->settings.estimate_wire, false); // round B is added to it
        replay_acco_round(replay, false);
        replay_step(replay, &replay->part, replay_rate(replay, replay->state.steps), false);
        replay_spread(replay, replay->settings.estimate_wire);
        replay_add_up_and_clear(replay, &replay->full);
        replay_acco_round(replay, true); // the next round A, at the estimate
        replay_commit(replay, &replay->full);
        replay_spread(replay, replay->settings.wire);
    }
}

// ---- The formulas of the outer steps --------------------------------------------------

static inline void replay_plain_nesterov(const OuterRange *range, const NesterovStep *step) {
    float *outer = range->outer, *momentum = range->momentum, *local = range->local;
    for (size_t i = 0; i < range->count; i++) {
        float mean = range->exchange[i] * step->inverse_weight;
        momentum[i] = step->momentum * momentum[i] + mean;
        outer[i] = outer[i] - step->learning_rate * (mean + step->momentum * momentum[i]);
        local[i] = step->alpha * local[i] + (1.0f - step->alpha) * outer[i];
    }
}

static inline void replay_plain_co2(const OuterRange *range, const MomentumStep *step) {
    float *base = range->outer, *momentum = range->momentum, *local = range->local,
          *exchange = range->exchange;
    for (size_t i = 0; i < range->count; i++) {
        float before = base[i], delta = range->start[i] - local[i];
        if (step->received) {
            momentum[i] = step->beta * momentum[i] + exchange[i] * step->inverse_weight / step->gap;
            float clipped = momentum[i];
            if (step->phi > 0 && clipped > step->phi) { clipped = step->phi; }
            if (step->phi > 0 && clipped < -step->phi) { clipped = -step->phi; }
            base[i] = before - step->alpha * clipped;
        }
        exchange[i] = step->weight * delta;
        local[i] = base[i] - step->alpha * step->own_share * delta;
    }
}

// ---- Local rules ----------------------------------------------------------------------

// Every worker steps with its own gradients. A schedule that counts commits counts these
// inner steps.
static inline void replay_inner_step(Replay *replay) {
    const ReplaySettings *settings = &replay->settings;
    double rate = replay_rate(replay, replay->workers[0].state.steps);
    for (int i = 0; i < settings->workers; i++) {
        ReplayWorker *worker = &replay->workers[i];
        replay_accumulate(replay, i, worker->state.master, settings->accumulate[i]);
        double square = cpu_buffer_sum_of_squares(&replay->stream, worker->gradients,
                                                  replay->problem.parameter_count, replay->partials);
        double divisor = replay_divisor(replay, worker->predicted);
        double norm = sqrt(square) / divisor, loss = worker->loss / worker->predicted;
        worker->period_micro_batches += settings->accumulate[i];
        if (!isfinite(norm) || spike_judge_both(&worker->norms, &worker->losses, norm, loss) != SPIKE_NONE) {
            worker->state.steps++;
        } else {
            worker->period_predicted += worker->predicted;
            replay_optimize(replay, &worker->state, worker->gradients, worker->state.master, divisor,
                            replay_scale(replay, norm), rate, true);
        }
        replay_clear(replay, i);
        if (i == 0) { replay->gradient_norm = norm; }
    }
    replay->learning_rate = rate;
    replay->gradients_done += replay->held;
    replay->held = 0;
}

// Inner steps until the target.
static inline int64_t replay_inner_steps(const Replay *replay) {
    double per_step = 0;
    for (int i = 0; i < replay->settings.workers; i++) { per_step += replay->settings.accumulate[i]; }
    return (int64_t)ceil(replay->settings.target / per_step);
}

// A worker counts in a mean with the share of its tokens since the latest exchange that were
// predicted, if there were any steps. Returns 1 over the sum of all weights, which comes from the
// sums of the counts.
static inline float replay_weigh(Replay *replay) {
    double predicted = 0, micro_batches = 0, tokens = replay->problem.tokens;
    for (int i = 0; i < replay->settings.workers; i++) {
        ReplayWorker *w = &replay->workers[i];
        predicted += w->period_predicted;
        micro_batches += w->period_micro_batches;
        w->weight = w->period_micro_batches > 0
                        ? (float)(w->period_predicted / (tokens * w->period_micro_batches))
                        : 1;
        w->period_predicted = w->period_micro_batches = 0;
    }
    float mean = micro_batches > 0 ? (float)(predicted / (tokens * micro_batches)) : 1;
    return mean > 0 ? 1.0f / ((float)replay->settings.workers * mean) : 0;
}

// exchange <- weight * (outer - local), of every worker: its pseudo-gradient.
static inline void replay_send(Replay *replay, int fragment) {
    size_t begin, end = 0;
    replay->inverse_weight = replay_weigh(replay);
    while (replay_next_run(replay->fragment_of, replay->problem.parameter_count, fragment, &begin, &end)) {
        for (int i = 0; i < replay->settings.workers; i++) {
            ReplayWorker *worker = &replay->workers[i];
            for (size_t j = begin; j < end; j++) {
                worker->exchange[j] = worker->weight * (worker->outer[j] - worker->state.master[j]);
            }
        }
    }
}

// Copies the elements of a fragment from their places in `flat` to `packed`, side by
// side, or back. Returns their number.
static inline size_t replay_pack(const Replay *replay, int fragment, float *flat, float *packed,
                                 bool unpack) {
    size_t begin, end = 0, count = 0;
    while (replay_next_run(replay->fragment_of, replay->problem.parameter_count, fragment, &begin, &end)) {
        memcpy(unpack ? flat + begin : packed + count, unpack ? packed + count : flat + begin,
               (end - begin) * sizeof(float));
        count += end - begin;
    }
    return count;
}

// exchange <- the sum over all workers, as it arrives. A fragment travels as a vector of
// its own.
static inline void replay_exchange(Replay *replay, int fragment) {
    int workers = replay->settings.workers;
    size_t count = 0, room = replay->room * sizeof(float);
    Layout layout;
    memset(replay->sum, 0, room);
    for (int i = 0; i < workers; i++) {
        memset(replay->parcel, 0, room);
        count = replay_pack(replay, fragment, replay->workers[i].exchange, replay->parcel, false);
        layout = layout_make(count, workers);
        assert(layout_padded(&layout) <= replay->room);
        replay_add_worker(replay, &layout, replay->settings.wire, i, replay->parcel, false, replay->sum);
    }
    layout = layout_make(count, workers);
    replay_through_wire(replay, &layout, replay->settings.wire, replay->sum);
    for (int i = 0; i < workers; i++) {
        replay_pack(replay, fragment, replay->workers[i].exchange, replay->sum, true);
    }
}

// The outer step of a fragment with what replay_send has left in `exchange`.
static inline void replay_apply(Replay *replay, int fragment, double alpha) {
    const ReplaySettings *settings = &replay->settings;
    NesterovStep step = {.inverse_weight = replay->inverse_weight,
                         .learning_rate = (float)settings->outer_rate,
                         .momentum = (float)settings->mu,
                         .alpha = (float)alpha};
    size_t begin, end = 0;
    replay_exchange(replay, fragment);
    while (replay_next_run(replay->fragment_of, replay->problem.parameter_count, fragment, &begin, &end)) {
        for (int i = 0; i < settings->workers; i++) {
            ReplayWorker *w = &replay->workers[i];
            OuterRange range = {
                w->outer + begin, w->momentum + begin, w->state.master + begin, w->exchange + begin, NULL,
                end - begin};
            (settings->plain_outer ? replay_plain_nesterov : cpu_outer_nesterov)(&range, &step);
        }
    }
    replay_report(replay, replay->workers[0].outer);
}

static inline void replay_diloco(Replay *replay) {
    int64_t steps;
    for (int64_t left = replay_inner_steps(replay); left > 0; left -= steps) {
        steps = int64_min(left, replay->settings.period);
        for (int64_t i = 0; i < steps; i++) { replay_inner_step(replay); }
        replay_send(replay, 0);
        replay_apply(replay, 0, 0.0);
    }
}

// The end of a round: applies the sum of the round before, if one was received, and sends
// the pseudo-gradient of this one.
static inline void replay_co2_boundary(Replay *replay, bool received, bool eager) {
    const ReplaySettings *settings = &replay->settings;
    MomentumStep step = {.inverse_weight = replay->inverse_weight, // of the round before
                         .own_share = eager ? 1.0f / (float)settings->workers : 0,
                         .beta = (float)settings->co2_beta,
                         .alpha = (float)settings->co2_alpha,
                         .phi = (float)settings->co2_phi,
                         .gap = (float)settings->co2_gap,
                         .received = received};
    if (received) { replay_exchange(replay, 0); }
    replay->inverse_weight = replay_weigh(replay);
    for (int i = 0; i < settings->workers; i++) {
        ReplayWorker *w = &replay->workers[i];
        step.weight = w->weight;
        OuterRange range = {w->outer,    w->momentum, w->state.master,
                            w->exchange, w->start,    replay->problem.parameter_count};
        (settings->plain_outer ? replay_plain_co2 : cpu_outer_momentum)(&range, &step);
    }
    replay_report(replay, replay->workers[0].outer);
}

static inline void replay_co2(Replay *replay) {
    int64_t steps, all = replay_inner_steps(replay);
    size_t bytes = replay->problem.parameter_count * sizeof(float);
    for (int64_t left = all; left > 0; left -= steps) {
        for (int i = 0; i < replay->settings.workers; i++) {
            ReplayWorker *w = &replay->workers[i];
            memcpy(w->start, w->state.master, bytes);
        }
        steps = int64_min(left, replay->settings.period);
        for (int64_t i = 0; i < steps; i++) { replay_inner_step(replay); }
        replay_co2_boundary(replay, left < all, replay->settings.co2_eager);
    }
    replay_co2_boundary(replay, true, false);
}

static inline void replay_streaming_interval(Replay *replay, int interval, int fragment) {
    for (int step = 1; step <= interval; step++) {
        replay_inner_step(replay);
        if (step == interval - replay->settings.delay) { replay_send(replay, fragment); }
    }
    replay_apply(replay, fragment, replay->settings.alpha);
}

// Fragments take turns. At the end every fragment that was trained since its turn is
// exchanged once more. So is a single one for the steps that its last turn took.
static inline void replay_streaming(Replay *replay) {
    const ReplaySettings *settings = &replay->settings;
    int fragments = settings->fragments, interval = settings->period / fragments, turn = 0;
    int64_t all = replay_inner_steps(replay), left = all, latest[REPLAY_FRAGMENTS] = {0};
    for (; left >= interval; left -= interval) {
        replay_streaming_interval(replay, interval, turn);
        latest[turn] = all - left + interval;
        turn = (turn + 1) % fragments;
    }
    for (; left > 0; left--) { replay_inner_step(replay); }
    for (int fragment = 0; fragment < fragments; fragment++) {
        bool reports = fragments == 1 && settings->delay > 0;
        if (latest[fragment] == all && !reports) { continue; }
        replay_send(replay, fragment);
        replay_apply(replay, fragment, 0.0);
    }
}

// ---- sparse-loco, without its format: what the other side decodes ---------------------

typedef struct ReplayElement {
    float value;
    int index;
} ReplayElement;

// The larger first; of equal ones the one that comes first.
static inline int replay_compare_elements(const void *a, const void *b) {
    const ReplayElement *one = (const ReplayElement *)a, *other = (const ReplayElement *)b;
    float first = fabsf(one->value), second = fabsf(other->value);
    return first > second ? -1 : first < second ? 1 : one->index - other->index;
}

static inline int replay_compare_indexes(const void *a, const void *b) {
    return ((const ReplayElement *)a)->index - ((const ReplayElement *)b)->index;
}

// sent (count <= 4096) <- what arrives of the largest elements of `error`, and 0 for the others.
static inline void replay_sparse_block(const float *error, float *sent, int count) {
    ReplayElement elements[4096];
    int taken = count < 64 ? count : 64, larger = 0;
    float sum = 0, sums[2] = {0, 0};
    for (int i = 0; i < count; i++) {
        elements[i].value = error[i];
        elements[i].index = i;
        sent[i] = 0;
    }
    qsort(elements, (size_t)count, sizeof elements[0], replay_compare_elements);
    qsort(elements, (size_t)taken, sizeof elements[0], replay_compare_indexes);
    for (int i = 0; i < taken; i++) { sum += fabsf(elements[i].value); }
    float mean = sum / (float)taken;
    for (int i = 0; i < taken; i++) {
        int above = fabsf(elements[i].value) > mean;
        larger += above;
        sums[above] += fabsf(elements[i].value);
    }
    sums[0] = larger < taken ? sums[0] / (float)(taken - larger) : 0;
    sums[1] = larger > 0 ? sums[1] / (float)larger : 0;
    for (int i = 0; i < taken; i++) {
        float value = bf16_to_float(bf16_from_float(sums[fabsf(elements[i].value) > mean]));
        sent[elements[i].index] = elements[i].value < 0 ? -value : value;
    }
}

// exchange <- what every worker sends, which leaves its error.
static inline void replay_sparse_send(Replay *replay) {
    const ReplaySettings *settings = &replay->settings;
    replay_weigh(replay);
    size_t count = replay->problem.parameter_count;
    for (int i = 0; i < settings->workers; i++) {
        ReplayWorker *w = &replay->workers[i];
        for (size_t j = 0; j < count; j++) {
            float beta = (float)settings->sparse_beta - (settings->sparse_eager ? 1 : 0);
            w->error[j] = fmaf(beta, w->error[j], w->outer[j] - w->state.master[j]);
        }
        for (size_t begin = 0; begin < count; begin += 4096) {
            replay_sparse_block(w->error + begin, w->exchange + begin, (int)size_min(count - begin, 4096));
        }
        for (size_t j = 0; j < count; j++) { w->error[j] -= w->exchange[j]; }
        memcpy(w->start, w->state.master, count * sizeof(float));
    }
}

static inline void replay_sparse_apply(Replay *replay) {
    const ReplaySettings *settings = &replay->settings;
    for (size_t j = 0; j < replay->problem.parameter_count; j++) {
        float sum = 0, total = 0;
        for (int i = 0; i < settings->workers; i++) {
            sum = fmaf(replay->workers[i].weight, replay->workers[i].exchange[j], sum);
            total += replay->workers[i].weight;
        }
        for (int i = 0; i < settings->workers; i++) {
            ReplayWorker *w = &replay->workers[i];
            float steps = w->state.master[j] - w->start[j]; // since the sending
            w->outer[j] = fmaf(-(float)settings->sparse_alpha, sum / (total > 0 ? total : 1), w->outer[j]);
            w->state.master[j] = (settings->sparse_eager ? w->outer[j] - w->error[j] : w->outer[j]) + steps;
        }
    }
    replay_report(replay, replay->workers[0].outer);
}

// What the steps behind the last sending have moved is exchanged at the end.
static inline void replay_sparse(Replay *replay) {
    int64_t steps = replay_inner_steps(replay), since = 0;
    int period = replay->settings.period, delay = replay->settings.delay;
    for (int64_t step = 1; step <= steps; step++) {
        bool whole = (step - 1) / period < steps / period; // a shorter period at the end sends nothing
        replay_inner_step(replay);
        since++;
        if (whole && (step - 1) % period == period - delay - 1) {
            replay_sparse_send(replay);
            since = 0;
        }
        if (whole && step % period == 0) { replay_sparse_apply(replay); }
    }
    if (since == 0) { return; }
    replay_sparse_send(replay);
    replay_sparse_apply(replay);
}

// ---- The rules ------------------------------------------------------------------------

typedef struct ReplayRule {
    const char *name;
    bool local;   // workers make inner steps
    bool sharded; // parameters travel
    void (*train)(Replay *replay);
} ReplayRule;

static const ReplayRule REPLAY_RULES[] = {
    {"ddp", false, false, replay_zero1},
    {"zero1", false, true, replay_zero1},
    {"dpu", false, true, replay_dpu},
    {"acco-wp", false, true, replay_acco_wp},
    {"acco", false, true, replay_acco},
    {"co2", true, false, replay_co2},
    {"diloco", true, false, replay_diloco},
    {"streaming-diloco", true, false, replay_streaming},
    {"sparse-loco", true, false, replay_sparse},
};

enum { REPLAY_RULE_COUNT = sizeof REPLAY_RULES / sizeof REPLAY_RULES[0] };

// NULL for an unknown name.
static inline const ReplayRule *replay_rule_find(const char *name) {
    for (int i = 0; i < REPLAY_RULE_COUNT; i++) {
        if (strcmp(REPLAY_RULES[i].name, name) == 0) { return &REPLAY_RULES[i]; }
    }
    return NULL;
}

// Trains `parameters` (parameter_count), from the initial ones to those at the end of a
// run. Returns the number of gradients committed.
static inline double replay_run(const ReplaySettings *settings, const ReplayProblem *problem,
                                float *parameters) {
    const ReplayRule *rule = replay_rule_find(settings->rule);
    assert(rule != NULL);
    Replay *replay = (Replay *)malloc(sizeof *replay);
    replay_open(replay, settings, problem, parameters);
    // All workers start at the parameters as the wire rounds them.
    bool rounded = rule->sharded && !wire_is_coarse(settings->wire);
    if (rounded) { replay_through_wire(replay, &replay->layout, settings->wire, replay->parameters); }
    rule->train(replay);
    memcpy(parameters, rule->local ? replay->workers[0].outer : replay->parameters,
           problem->parameter_count * sizeof(float));
    double gradients_done = replay->gradients_done;
    replay_close(replay);
    free(replay);
    return gradients_done;
}
