// local_steps.h: the verbs of local rules, whose workers step on their own and exchange
// now and then.
//
//   inner_steps(n)           n times: micro-batches, then a step of this worker's optimizer
//   send_fragment(f)         starts the all-reduce of fragment f's pseudo-gradient, outer - local
//   wait_for()               waits for it: the communication buffer then holds the sum
//   apply_fragment(f, alpha) makes an outer step with it, and merges it into the local parameters
//   send_sparse()            adds the pseudo-gradient to this worker's error, and starts the
//                            gathering of the largest elements of all errors
//   apply_sparse(keep)       makes an outer step with them; asked to, the local parameters keep
//                            the steps since the sending
//   local_keep_start()       remembers the local parameters: later inner steps count from there
//
//   compute         | inner step | ... | inner step | send | inner step | wait_for . apply | ...
//   communication                                          | reduce . gather  |
//
// The local parameters are the master copy of the inner optimizer, whose state stays with the
// worker. Outer parameters and momentum are the same bits on every rank, because every rank makes
// the same outer step with the same sum. The outer copy is what is evaluated and saved. The report
// of the steps up to a sending comes with the job that sent them.
#pragma once

#include "scheduler.h"

// ---- Inner steps ----------------------------------------------------------------------

// Decides whether this inner step is made, and adds it to the tally of the steps since the latest
// exchange. With --on-spike skip only bad steps are left out, and SPIKE_PATIENCE of them in a row
// count as parameters that are not finite, which ends the run. Otherwise a worker makes no further
// step between its first bad one and the sending.
static inline bool inner_step_is_good(Scheduler *s, Stream *stream, double norm) {
    Tally *tally = &s->gradients.tally, step = *tally;
    SpikeState *spikes = &s->spikes;
    bool skips = s->settings.on_spike == SPIKE_SKIP, waits = !skips && s->local.tally_before.left_out > 0;
    if (!waits && !isfinite(norm)) {
        step.site.element = job_last_bad_element(s->gradients.data, 0, s->problem.parameter_count, stream);
    }
    SpikeKind spike = waits                 ? SPIKE_NONE
                      : step.not_finite > 0 ? SPIKE_LOSS
                      : !isfinite(norm)
                          ? SPIKE_GRADIENT
                          : spike_judge_both(&spikes->norms, &spikes->losses, norm, tally_mean_loss(&step));
    step.site.high_loss = spike == SPIKE_HIGH_LOSS;
    *tally = s->local.tally_before;
    if (spike == SPIKE_NONE && !waits) {
        tally_add(tally, &step);
        spikes->in_a_row = 0;
        return true;
    }
    if (tally->left_out == 0) { tally->site = step.site; }
    tally->left_out += 1;
    spikes->in_a_row += 1;
    if (skips && spikes->in_a_row >= SPIKE_PATIENCE) { tally->not_finite = 1; }
    return false;
}

// A step that is left out counts as a step, so that all ranks count the same steps.
static inline void inner_step_task(void *context, Stream *stream) {
    Scheduler *s = (Scheduler *)context;
    size_t count = s->problem.parameter_count;
    double divisor = tally_divisor(&s->gradients.tally, &s->problem);
    trace_begin(&s->trace, TRACE_COMPUTE, "inner step");
    double norm =
        sqrt(buffer_sum_of_squares(stream, s->gradients.data, count, count, 1, s->norm_partials)) / divisor;
    s->local.rate = scheduler_learning_rate(s);
    OptimizerStep step = {.gradient = s->gradients.data,
                          .casts = scheduler_copy(s),
                          .divisor = divisor,
                          .scale = clip_scale(s->settings.gradient_clip, norm),
                          .learning_rate = s->local.rate,
                          .keeps = true};
    bool good = inner_step_is_good(s, stream, norm);
    if (good) {
        s->local.norm = norm;
        optimizer_step(&s->optimizer, stream, &step);
    } else {
        s->optimizer.steps++;
    }
    stream_settle(stream);
    scheduler_change_parameters(s, good);
    scheduler_compute_ended(s);
}

// Compute stream; the host waits.
static inline void inner_steps(Scheduler *s, int steps) {
    for (int i = 0; i < steps; i++) {
        s->local.tally_before = s->gradients.tally;
        memset(&s->gradients.tally, 0, sizeof s->gradients.tally);
        accumulate(s, s->settings.micro_batches);
        scheduler_call(s, s->compute, inner_step_task, s);
        buffer_change(&s->gradients, BUFFER_READY, BUFFER_FREE);
        s->gradients_done += (double)s->settings.micro_batches * s->transport->size;
    }
}

// The inner steps of a period of `period` steps: fewer at the end of the run.
static inline int steps_left(const Scheduler *s, int period) {
    double left = ceil((s->settings.target - s->gradients_done) /
                       ((double)s->settings.micro_batches * s->transport->size));
    return left < period ? (int)left : period;
}

// ---- The mean over workers ------------------------------------------------------------

// What a worker counts for in the next mean: the share of its tokens since the latest exchange
// that were predicted, in steps that were made. It is exactly 1 where nothing is masked. Without
// a step since then, as with the last fragments of a run, workers count alike. Of a sum over
// workers: their mean weight.
static inline float worker_weight(const Scheduler *s, const Tally *tally) {
    double micro_batches = tally->micro_batches + tally->left_out * s->settings.micro_batches;
    return micro_batches > 0 ? (float)(tally->predicted / (s->problem.tokens * micro_batches)) : 1;
}

// 1 / the sum of the weights of what the latest job has added up; 0 where none has a weight.
static inline float inverse_weight(const Scheduler *s) {
    float total = (float)s->transport->size * worker_weight(s, &s->job.total);
    return total > 0 ? 1.0f / total : 0;
}

// ---- Elementwise work on a fragment ---------------------------------------------------

typedef enum FragmentOperation {
    FRAGMENT_PSEUDO_GRADIENT, // communication buffer = outer - local
    FRAGMENT_NESTEROV,        // an outer step with the sum in the communication buffer
    FRAGMENT_MOMENTUM,        // the same, and the pseudo-gradient of this round takes the sum's place
    SPARSE_ENCODE,            // the pseudo-gradient is added to the error, whose largest elements are sent
    SPARSE_APPLY              // an outer step with the largest elements of all ranks
} FragmentOperation;

typedef struct FragmentWork {
    Scheduler *scheduler;
    FragmentOperation operation;
    int fragment;
    float weight; // FRAGMENT_PSEUDO_GRADIENT: of this worker
    NesterovStep nesterov;
    MomentumStep momentum;
    SparseStep sparse;
    bool keeps; // SPARSE_APPLY: the local parameters keep the steps since the sending
} FragmentWork;

enum { FRAGMENT_BLOCK = 16384 }; // elements of one task of the thread pool

static_assert((int)FRAGMENT_BLOCK % (int)SPARSE_BLOCK == 0, "tasks have whole sparse blocks");

// Works on packed elements [begin, end), stretch by stretch of adjacent segments: they
// stand in this order in the communication buffer. A sparse vector is one stretch, of
// whole blocks. On the CPU several threads call it at once, each for its own elements.
static inline void fragment_work_on(const FragmentWork *work, size_t begin, size_t end) {
    Scheduler *s = work->scheduler;
    const SparseState *sparse = &s->local.sparse;
    bool eager = s->settings.local.sparse_eager; // outer - local has the error, too
    int segments = s->problem.layer_count + 2;
    size_t packed = 0;
    for (int i = 0, next; i < segments; i = next) {
        bool has = fragment_has(s, work->fragment, i);
        for (next = i + 1; next < segments && fragment_has(s, work->fragment, next) == has; next++) {}
        if (!has) { continue; }
        size_t stretch = segment_begin(&s->problem, i), before = packed;
        packed += segment_begin(&s->problem, next) - stretch;
        size_t first = size_max(before, begin), last = size_min(packed, end), flat = stretch + first - before;
        if (first >= last) { continue; }
        size_t block = flat / SPARSE_BLOCK;
        float *outer = s->local.outer + flat;
        OuterRange range = {.outer = outer,
                            .momentum = s->local.momentum != NULL ? s->local.momentum + flat : NULL,
                            .local = s->parameters.data + flat,
                            .exchange = s->comm_buffer.data + first,
                            .start = s->local.start != NULL ? s->local.start + flat : outer,
                            .count = last - first};
        switch (work->operation) {
        case FRAGMENT_PSEUDO_GRADIENT: outer_pseudo_gradient(s->compute, &range, work->weight); break;
        case FRAGMENT_NESTEROV: outer_nesterov(s->compute, &range, &work->nesterov); break;
        case FRAGMENT_MOMENTUM: outer_momentum(s->compute, &range, &work->momentum); break;
        case SPARSE_ENCODE:
            sparse_encode(s->compute, &range, sparse->sent + block,
                          s->settings.local.sparse_beta - (eager ? 1 : 0));
            break;
        case SPARSE_APPLY:
            if (!work->keeps) { range.start = NULL; }
            if (!eager) { range.exchange = NULL; }
            sparse_apply(s->compute, &range, sparse->received + block,
                         sparse_blocks(s->problem.parameter_count), &work->sparse);
        }
    }
}

static inline void fragment_block_task(void *context, int task, int thread) {
    size_t begin = (size_t)task * FRAGMENT_BLOCK;
    (void)thread;
    const FragmentWork *work = (const FragmentWork *)context;
    size_t count = work->scheduler->local.fragments[work->fragment].layout.count;
    fragment_work_on(work, begin, size_min(begin + FRAGMENT_BLOCK, count));
}

// step <- the mean over all workers, with the weights that came with their elements.
static inline void sparse_weigh(Scheduler *s, Stream *stream, SparseStep *step) {
    int ranks = s->transport->size;
    float *weights = MEMORY_OF(float, ranks), total = 0;
    for (int rank = 0; rank < ranks; rank++) {
        weights[rank] = worker_weight(s, &s->tallies[rank]);
        total += weights[rank];
    }
    stream_copy(stream, s->local.sparse.weights, weights, (size_t)ranks * sizeof(float));
    stream_settle(stream);
    free(weights);
    step->ranks = ranks;
    step->alpha = s->settings.local.sparse_alpha;
    step->total = total > 0 ? total : 1;
    step->weights = s->local.sparse.weights;
}

static inline void fragment_task(void *context, Stream *stream) {
    FragmentWork *work = (FragmentWork *)context;
    Scheduler *s = work->scheduler;
    size_t count = s->local.fragments[work->fragment].layout.count;
    trace_begin(&s->trace, TRACE_COMPUTE, "outer step");
    if (work->operation == SPARSE_APPLY) { sparse_weigh(s, stream, &work->sparse); }
    if (stream_is_on_gpu(stream)) {
        fragment_work_on(work, 0, count);
        stream_settle(stream);
    } else {
        int blocks = (int)((count + FRAGMENT_BLOCK - 1) / FRAGMENT_BLOCK);
        thread_pool_run(stream->pool, blocks, fragment_block_task, work);
    }
    scheduler_change_parameters(s, false);
    scheduler_compute_ended(s);
}

static inline void local_keep_start(Scheduler *s) {
    stream_copy(s->compute, s->local.start, s->parameters.data, s->problem.parameter_count * sizeof(float));
    stream_settle(s->compute);
}

// ---- Exchanges ------------------------------------------------------------------------

// Starts the all-reduce of what stands in the communication buffer. The tally of the
// steps since the latest exchange goes with it.
static inline void launch_average(Scheduler *s, int fragment) {
    s->job.fragment = fragment;
    scheduler_give_sum(s, CLEAR);
    launch(s, AVERAGE);
}

// The padding behind the pseudo-gradient is cleared: a longer fragment may have left
// values there, which must not reach the scale of the last block on a coarse wire.
static inline void send_fragment(Scheduler *s, int fragment) {
    const Layout *layout = &s->local.fragments[fragment].layout;
    buffer_change(&s->comm_buffer, BUFFER_FREE, BUFFER_WRITING);
    FragmentWork work = {.scheduler = s,
                         .operation = FRAGMENT_PSEUDO_GRADIENT,
                         .fragment = fragment,
                         .weight = worker_weight(s, &s->gradients.tally)};
    scheduler_call(s, s->compute, fragment_task, &work);
    stream_clear(s->compute, s->comm_buffer.data + layout->count,
                 (layout_padded(layout) - layout->count) * sizeof(float));
    stream_settle(s->compute);
    launch_average(s, fragment);
}

// alpha: the weight that the local parameters keep.
static inline void apply_fragment(Scheduler *s, int fragment, float alpha) {
    if (scheduler_is_halted(s)) { return; }
    FragmentWork work = {.scheduler = s,
                         .operation = FRAGMENT_NESTEROV,
                         .fragment = fragment,
                         .nesterov = s->settings.local.outer_nesterov};
    work.nesterov.inverse_weight = inverse_weight(s);
    work.nesterov.alpha = alpha;
    scheduler_call(s, s->compute, fragment_task, &work);
    s->local.fragments[fragment].applied_at = s->optimizer.steps;
}

static inline void send_sparse(Scheduler *s) {
    buffer_change(&s->comm_buffer, BUFFER_FREE, BUFFER_WRITING);
    FragmentWork work = {.scheduler = s, .operation = SPARSE_ENCODE};
    scheduler_call(s, s->compute, fragment_task, &work);
    if (s->local.start != NULL) { local_keep_start(s); }
    s->local.fragments[0].applied_at = s->optimizer.steps;
    launch_average(s, 0);
}

static inline void apply_sparse(Scheduler *s, bool keep) {
    if (scheduler_is_halted(s)) { return; }
    FragmentWork work = {.scheduler = s, .operation = SPARSE_APPLY, .keeps = keep};
    scheduler_call(s, s->compute, fragment_task, &work);
}
