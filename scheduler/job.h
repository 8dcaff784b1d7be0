// job.h: what the communication stream does from a launch to a boundary.
//
//   reduce     adds up the gradient sums (in local rules the pseudo-gradients) of all
//              workers, each element at the rank that owns it; where only the largest
//              elements travel, sends every rank's elements to all ranks instead
//   summary    one small exchange of records: counts, losses, the norm of the gradient
//   step       the optimizer steps what this worker owns: a commit, an estimate, or both
//   gather     sends what was stepped to all ranks
//
//                     | reduce | summary | step | gather |
//                                               ^ `stepped`   ^ `communicated`
//
// Reduce and gather work bucket by bucket. In synchronous rules the reduction follows the last
// backward pass, from the end of the vector to its start, as the watermark `finished` rises. Where
// the state is sharded, the gather then runs ahead of the next forward pass, from the start to the
// end, and raises the watermark `arrived`. Nothing can hide the token embedding at the start: it is
// used first and its gradient is finished last. Buckets decide only when something travels.
#pragma once

#include "scheduler/state.h"

// ---- What a job is --------------------------------------------------------------------

static inline double scheduler_learning_rate(const Scheduler *s) {
    return learning_rate_at(&s->settings.rate,
                            s->settings.rate_by_commits ? (double)s->optimizer.steps : s->gradients_done);
}

// The cells of a bucket: at least one, at most all of the layout.
static inline size_t job_bucket_cells(const Scheduler *s, const Layout *layout) {
    size_t cell_bytes = layout_padded(layout) / layout->cells * sizeof(float); // on average
    size_t cells = s->settings.bucket_bytes > 0 ? s->settings.bucket_bytes / cell_bytes : layout->cells;
    return size_max(1, size_min(cells, layout->cells));
}

// Host: decides all that depends on the kind of the rule or of the job. A rank looks for NaNs in
// its own gradients before they are summed. It does not for an estimate, because the commit sends
// the same gradients again; nor in a world of one rank, where the sum is its own, except in local
// rules.
static inline void job_prepare(Scheduler *s, JobKind kind, bool follows) {
    Job *job = &s->job;
    bool average = kind == AVERAGE;
    assert(!s->job_in_flight);
    job->kind = kind;
    job->follows = follows;
    job->commits = kind == COMMIT || kind == COMMIT_THEN_PREDICT;
    job->predicts = kind == ESTIMATE || kind == COMMIT_THEN_PREDICT;
    job->layout = average ? s->local.fragments[job->fragment].layout : s->layout;
    job->wire = kind == ESTIMATE ? s->settings.estimate_wire : s->settings.wire;
    job->bucket_cells = follows ? job_bucket_cells(s, &job->layout) : job->layout.cells;
    job->inspects = average || (kind != ESTIMATE && s->transport->size > 1);
    job->all_reduces = average || s->settings.replicated;
    job->commit = s->optimizer.steps;
    job->gradients_done = s->gradients_done;
    job->learning_rate = average ? s->local.rate : scheduler_learning_rate(s);
    job->gradient_norm = s->local.norm;
    job->bad_element = job->sent_square = 0;
    s->job_in_flight = true;
}

static inline Collective job_reduction(Scheduler *s, const Job *job) {
    Collective collective = {.layout = &job->layout,
                             .wire = job->wire,
                             .buffer = job_buffer(s, job)->data,
                             .unsent = job->commits ? s->unsent : NULL};
    return collective;
}

static inline void job_span_begins(Scheduler *s, const char *name) {
    trace_begin(&s->trace, TRACE_COMMUNICATION, name);
}
static inline void job_span_ended(Scheduler *s, const Job *job) {
    trace_end(&s->trace, TRACE_COMMUNICATION, job->commit);
}

// ---- Reduce ---------------------------------------------------------------------------

enum { JOB_SEARCH = 1 << 20 }; // elements that are copied to the host at a time

// The last of values [begin, end) that is not finite, counted from 1; 0: none.
static inline double job_last_bad_element(const float *values, size_t begin, size_t end, Stream *stream) {
    float *part = (float *)memory_take(1, JOB_SEARCH * sizeof *part);
    size_t last = 0;
    while (end > begin && last == 0) {
        size_t count = size_min(end - begin, JOB_SEARCH);
        stream_copy(stream, part, values + end - count, count * sizeof *part);
        stream_settle(stream);
        end -= count;
        for (size_t i = 0; i < count; i++) {
            if (!isfinite(part[i])) { last = end + i + 1; }
        }
    }
    free(part);
    return (double)last;
}

// This rank's own gradients in values [begin, end) have this sum of squares.
static inline void job_note_own(Job *job, double square, const float *values, size_t begin, size_t end,
                                Stream *stream) {
    job->sent_square += square;
    if (isfinite(square) || job->bad_element > 0) { return; }
    job->bad_element = job_last_bad_element(values, begin, end, stream);
}

static inline void job_inspect(Scheduler *s, Job *job, const float *values, size_t begin, size_t end,
                               Stream *stream) {
    size_t count = end - begin;
    double square = buffer_sum_of_squares(stream, values + begin, count, count, 1, s->inspect_partials);
    job_note_own(job, square, values, begin, end, stream);
}

// H6: waits until the last `count` elements of the gradients are final. On a GPU the host
// announces that ahead of the kernels; the mark says when they have ended.
static inline void job_wait_for_gradients(Scheduler *s, size_t count) {
    const Announcements *announced = &s->announced;
    watermark_wait(&s->finished, count);
    int i = 0, announcements = __atomic_load_n(&announced->count, __ATOMIC_ACQUIRE);
    while (i < announcements && announced->positions[i] < count) { i++; }
    if (i == announcements) { return; } // on a CPU, or the micro-batch has ended
    double began = clock_seconds();
    while (!gpu_mark_is_reached(announced->marks[i])) {
        sleep_seconds(fmin((clock_seconds() - began) / 8, 100e-6));
    }
}

// Adds up what the ranks have, from the end of the vector to its start.
static inline void job_reduce(Scheduler *s, Job *job, Stream *stream) {
    Collective collective = job_reduction(s, job);
    const Layout *layout = &job->layout;
    for (collective.end = layout->cells; collective.end > 0; collective.end = collective.first) {
        collective.first = collective.end > job->bucket_cells ? collective.end - job->bucket_cells : 0;
        size_t first = layout_cell_begin(layout, collective.first),
               last = layout_cell_begin(layout, collective.end);
        if (job->follows) { job_wait_for_gradients(s, layout_padded(layout) - first); }
        job_span_begins(s, "reduce-scatter");
        // While it is still known which rank the values come from.
        if (job->inspects) { job_inspect(s, job, collective.buffer, first, last, stream); }
        comm_exchange(&s->comm, stream, &collective, REDUCE_SCATTER);
        job_span_ended(s, job);
        if (job->all_reduces) {
            job_span_begins(s, "all-gather");
            comm_exchange(&s->comm, stream, &collective, ALL_GATHER);
            job_span_ended(s, job);
        }
    }
}

// Every rank's blocks to all ranks, slice by slice; compute has encoded them, and adds
// them up. A value that is not finite is still in the error that it was encoded from.
static inline void job_gather_blocks(Scheduler *s, Job *job, Stream *stream) {
    const SparseState *sparse = &s->local.sparse;
    size_t padded = layout_padded(&job->layout), blocks = sparse_blocks(job->layout.count);
    SparseBlock *mine = sparse->slices, *all = sparse->slices + sparse->slice;
    const float *error = job_buffer(s, job)->data;
    job_span_begins(s, "all-gather");
    job_inspect(s, job, error, 0, padded, stream);
    for (size_t begin = 0; begin < blocks; begin += sparse->slice) {
        size_t count = size_min(sparse->slice, blocks - begin), bytes = count * sizeof(SparseBlock);
        stream_copy(stream, mine, sparse->sent + begin, bytes);
        stream_settle(stream);
        for (size_t i = 0; i < count && job->bad_element == 0; i++) { // finite, but their sum is not
            if (!sparse_is_sound(&mine[i])) { job->bad_element = (double)((begin + i) * SPARSE_BLOCK + 1); }
        }
        transport_all_gather_records(s->transport, "all-gather", mine, all, bytes);
        for (size_t rank = 0; rank < (size_t)s->transport->size; rank++) {
            stream_copy(stream, sparse->received + rank * blocks + begin, all + rank * count, bytes);
        }
        stream_settle(stream);
    }
    job_span_ended(s, job);
}

// ---- Summary --------------------------------------------------------------------------

// The most severe problem names the rank: a loss that is not finite (in local rules: parameters),
// then a gradient, then steps that were left out. 0: no problem.
static inline int tally_severity(const Tally *tally) {
    return tally->not_finite > 0 ? 3 : tally->site.element > 0 ? 2 : tally->left_out > 0 ? 1 : 0;
}

static inline void job_add_tallies(Scheduler *s, Job *job) {
    memset(&job->total, 0, sizeof job->total);
    memset(&job->site, 0, sizeof job->site);
    job->first_bad_rank = -1;
    int worst = 0;
    for (int rank = 0; rank < s->transport->size; rank++) {
        const Tally *tally = &s->tallies[rank];
        tally_add(&job->total, tally);
        if (tally_severity(tally) > worst) {
            worst = tally_severity(tally);
            job->first_bad_rank = rank;
            job->site = tally->site;
        }
    }
}

// The rank whose own gradient, or loss, is largest: the likely cause of a finite spike.
static inline int job_largest_rank(const Scheduler *s, SpikeKind kind) {
    int largest = -1;
    double most = -1;
    for (int rank = 0; rank < s->transport->size; rank++) {
        const Tally *tally = &s->tallies[rank];
        double own = kind == SPIKE_NORM ? sqrt(tally->sent_square) / tally_divisor(tally, &s->problem)
                                        : tally_mean_loss(tally);
        largest = own > most ? rank : largest;
        most = own > most ? own : most;
    }
    return largest;
}

// Why nothing may be stepped or applied after this job; the same on all ranks. A large estimate is
// no spike: its gradients are also in the commit, which is judged. An AVERAGE carries the workers'
// verdicts on their own inner steps.
static inline SpikeKind job_judge(Scheduler *s, Job *job) {
    SpikeState *spikes = &s->spikes;
    if (job->kind == AVERAGE) {
        job->largest_norm = job->largest_loss = NAN; // compute may be using the detectors now
        if (job->total.left_out > 0 && s->settings.on_spike != SPIKE_SKIP) {
            return spike_kind_of(&job->site);
        }
        return job->total.not_finite > 0 ? SPIKE_PARAMETERS : SPIKE_NONE;
    }
    job->largest_norm = spike_largest(&spikes->norms);
    job->largest_loss = spike_largest(&spikes->losses);
    if (job->total.not_finite > 0) { return SPIKE_LOSS; }
    if (!isfinite(job->gradient_norm)) { return SPIKE_GRADIENT; }
    if (job->kind == ESTIMATE) { return SPIKE_NONE; }
    SpikeKind kind =
        spike_judge_both(&spikes->norms, &spikes->losses, job->gradient_norm, tally_mean_loss(&job->total));
    if (kind != SPIKE_NONE) { job->first_bad_rank = job_largest_rank(s, kind); }
    return kind;
}

// The sum of squares of this rank's shard of a vector (padded), piece by piece.
static inline double job_shard_square(const Scheduler *s, const float *values, Stream *stream) {
    const Layout *layout = &s->layout;
    LayoutRange range = {0};
    double square = 0;
    if (layout->piece > 0) { // equal pieces, all at once
        layout_next(layout, s->transport->rank, layout->piece, &range);
        return buffer_sum_of_squares(stream, values + range.flat, layout->piece, layout_cell_begin(layout, 1),
                                     layout->cells, s->norm_partials);
    }
    while (layout_next(layout, s->transport->rank, SIZE_MAX, &range)) {
        square +=
            buffer_sum_of_squares(stream, values + range.flat, range.count, range.count, 1, s->norm_partials);
    }
    return square;
}

// Counts, losses and the norm decide whether and how far all ranks step. The norm is taken of the
// sum in this rank's shard, even if the rank has the whole sum: so rules with and without a sharded
// state find the same bits. (On a narrower wire those without one step with rounded sums.)
static inline void job_summarise(Scheduler *s, Job *job, Stream *stream) {
    Tally *own = &job_buffer(s, job)->tally;
    job_span_begins(s, "summary");
    if (job->kind != AVERAGE) {
        const float *reduced = job_buffer(s, job)->data;
        own->shard_square = job_shard_square(s, reduced, stream);
        if (s->transport->size == 1 && job->kind != ESTIMATE) {
            job_note_own(job, own->shard_square, reduced, 0, layout_padded(&s->layout), stream);
        }
        own->site.element = job->bad_element;
    } else {
        own->not_finite += job->bad_element > 0;
    }
    own->sent_square = job->sent_square;
    own->stops = scheduler_is_asked_to_stop(s);
    own->saves = __atomic_load_n(&s->wishes.save_requested, __ATOMIC_RELAXED);
    own->ended = __atomic_load_n(&s->wishes.writer_done, __ATOMIC_ACQUIRE);
    transport_all_gather_records(s->transport, "summary", own, s->tallies, sizeof(Tally));
    job_add_tallies(s, job);
    if (job->kind != AVERAGE) {
        job->gradient_norm = sqrt(job->total.shard_square) / tally_divisor(&job->total, &s->problem);
    }
    job->spike = job_judge(s, job);
    if (job->spike != SPIKE_NONE && job->commits && s->unsent != NULL) { // it holds the same spike
        size_t bytes = layout_padded(&s->layout) * sizeof(float);
        if (s->comm.nccl == NULL) {
            memset(s->unsent, 0, bytes);
        } else {
            stream_clear(stream, s->unsent, bytes);
        }
    }
    job_span_ended(s, job);
}

// ---- Step -----------------------------------------------------------------------------

// --grad-clip: what a gradient is multiplied by so that its norm is at most `clip`.
static inline double clip_scale(double clip, double norm) {
    return clip > 0 && norm > clip ? clip / norm : 1.0;
}

// Where a step also writes its result in bf16. Usually these are the casts that are gathered next.
// Where the step changes parameters in place, while compute waits, it is compute's own copy.
// NULL: nowhere.
static inline Real *job_casts(const Scheduler *s, const Job *job) {
    if (s->settings.keeps_casts) { return job->follows ? s->casts : s->arriving_casts; }
    return job->follows && s->settings.replicated ? scheduler_copy(s) : NULL;
}

// Steps what this worker owns. A commit changes the master copy and the moments. An
// estimate is written over the reduced gradient that it is made from.
static inline void job_step(Scheduler *s, Job *job, Stream *stream) {
    bool stepped = job->spike == SPIKE_NONE && (job->commits || job->predicts);
    Real *casts = job_casts(s, job);
    job->result = stepped && job->predicts ? NULL : s->optimizer.master;
    job->is_cast = stepped && casts != NULL;
    if (!stepped) { return; }
    job_span_begins(s, "step");
    float *reduced = job_buffer(s, job)->data;
    OptimizerStep step = {.gradient = reduced,
                          .casts = job->predicts ? NULL : casts,
                          .divisor = tally_divisor(&job->total, &s->problem),
                          .scale = clip_scale(s->settings.gradient_clip, job->gradient_norm),
                          .learning_rate = job->learning_rate,
                          .keeps = true};
    if (job->commits) { optimizer_step(&s->optimizer, stream, &step); }
    step.out = reduced;
    step.casts = casts;
    step.keeps = false;
    if (job->predicts) { optimizer_step(&s->optimizer, stream, &step); }
    stream_settle(stream);
    job_span_ended(s, job);
}

// ---- The two tasks of a job -----------------------------------------------------------

// The format in which an all-gather sends where sums travel in `wire`.
static inline WireFormat job_gather_wire(const Scheduler *s, WireFormat wire) {
    return s->settings.gathers_casts && wire == WIRE_FP32 ? WIRE_BF16 : wire;
}

// Everything up to the step, which a job that follows a backward pass makes with the
// threads of compute, idle then; on a GPU in its own queue. The host may write s->job
// again once `stepped` has happened, so the gather works on a copy of it.
static inline void job_task(void *context, Stream *stream) {
    Scheduler *s = (Scheduler *)context;
    Job *job = &s->job;
    Stream *stepping = job->follows && !stream_is_on_gpu(stream) ? s->compute : stream;
    __atomic_store_n(&s->transport->commit, job->commit, __ATOMIC_RELAXED);
    if (s->settings.local.sparse) {
        job_gather_blocks(s, job, stream);
    } else {
        job_reduce(s, job, stream);
    }
    job_summarise(s, job, stepping);
    if (job->follows && !job->all_reduces) { watermark_reset(&s->arrived, 0); }
    job_step(s, job, stepping);
    s->gathering = *job;
}

// Sends the result to all ranks: into the parameters if compute waits for them, into a second
// buffer if it is using them. Coarse wires carry differences to the parameters in use.
static inline void job_gather_task(void *context, Stream *stream) {
    Scheduler *s = (Scheduler *)context;
    const Job *job = &s->gathering;
    const Layout *layout = &job->layout;
    WireFormat wire = job_gather_wire(s, job->wire);
    Collective collective = {.layout = layout,
                             .wire = wire,
                             .buffer = job->follows ? s->parameters.data : s->comm_buffer.data,
                             .source = job->result,
                             .base = wire_is_coarse(wire) ? s->parameters.data : NULL};
    for (; !job->all_reduces && collective.first < layout->cells; collective.first = collective.end) {
        collective.end = size_min(collective.first + job->bucket_cells, layout->cells);
        job_span_begins(s, "all-gather");
        if (s->settings.keeps_casts) {
            comm_gather_casts(&s->comm, stream, &collective, job_casts(s, job), job->is_cast);
        } else {
            comm_exchange(&s->comm, stream, &collective, ALL_GATHER);
        }
        job_span_ended(s, job);
        watermark_raise(&s->arrived, layout_cell_begin(layout, collective.end)); // H7
    }
    watermark_raise(&s->arrived, WATERMARK_ALL);
}
