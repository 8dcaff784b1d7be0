// start.h: how a scheduler begins and ends: the plan of its memory, first parameters, streams.
#pragma once

#include "scheduler/state.h"

// Returns the layout of the longest fragment.
static inline Layout fragments_make(Scheduler *s) {
    const Problem *problem = &s->problem;
    Layout longest = layout_make(0, s->transport->size);
    s->local.fragments = MEMORY_OF(Fragment, s->settings.local.fragments);
    for (int f = 0; f < s->settings.local.fragments; f++) {
        size_t count = 0;
        for (int i = 0; i < problem->layer_count + 2; i++) {
            count += fragment_has(s, f, i) ? segment_begin(problem, i + 1) - segment_begin(problem, i) : 0;
        }
        Layout layout = s->local.fragments[f].layout = layout_make(count, s->transport->size);
        if (f == 0 || count > longest.count) { longest = layout; }
    }
    return longest;
}

// Frees what scheduler_reserve has allocated itself.
static inline void scheduler_free(Scheduler *s) {
    free(s->local.fragments);
    s->local.fragments = NULL;
    layout_free(&s->layout);
}

// Whole matrices belong to one rank where Muon steps them and ranks share the steps out.
static inline Layout scheduler_layout(const Scheduler *s) {
    const OptimizerSettings *optimizer = &s->settings.optimizer;
    int matrix_count = 0;
    LayoutMatrix *matrices = MEMORY_OF(LayoutMatrix, (size_t)optimizer->tensor_count + 1);
    for (int i = 0; i < optimizer->tensor_count; i++) {
        const OptimizerTensor *tensor = &optimizer->tensors[i];
        if (tensor->rows == 0 || s->settings.kind == RULE_LOCAL) { continue; }
        matrices[matrix_count].begin = tensor->begin;
        matrices[matrix_count++].end = tensor->end;
    }
    Layout layout = layout_make_whole(s->problem.parameter_count, s->transport->size, matrices, matrix_count);
    free(matrices);
    return layout;
}

// Plans every buffer of the scheduler and of the transport; allocates nothing of them.
// The scheduler must not move in memory afterwards.
static inline void scheduler_reserve(Scheduler *s, Arena *arena, const SchedulerSettings *settings,
                                     const Problem *problem, Transport *transport) {
    memset(s, 0, sizeof *s);
    s->settings = *settings;
    s->problem = *problem;
    s->transport = transport;
    s->spikes.norms.limit = s->spikes.losses.limit = settings->spike_limit;
    s->comm.transport = transport;
    s->comm.on_gpu = gpu_is_used(settings->device.gpu);
    s->comm.nccl = settings->device.nccl;
    s->layout = scheduler_layout(s);
    bool shards = scheduler_shards(settings), overlapped = settings->kind == RULE_OVERLAPPED,
         local = settings->kind == RULE_LOCAL, sparse = settings->local.sparse;
    bool keeps_start = settings->local.outer_eager || (sparse && settings->local.delay > 0);
    size_t count = problem->parameter_count, ranks = (size_t)transport->size;
    Layout travels = local ? fragments_make(s) : s->layout; // the longest vector that does
    size_t padded = layout_padded(&s->layout) * sizeof(float), vector = local ? count * sizeof(float) : 0,
           casts = settings->keeps_casts ? padded / 2 : 0;
    size_t blocks = sparse ? sparse_blocks(count) : 0, block = sizeof(SparseBlock);
    s->local.sparse.slice = size_max(1, size_min(blocks, SPARSE_SLICE_BYTES / (ranks * block)));
    assert(!sparse || settings->local.fragments == 1);
    const MemoryClass P = MEMORY_PARAMETERS, C = MEMORY_COMMUNICATION, O = MEMORY_OPTIMIZER;
    const ArenaRow vectors[] = {
        {P, "parameters", casts, &s->casts},
        {P, "parameters", casts > 0 ? 0 : padded, &s->parameters.data},
        {MEMORY_GRADIENTS, "gradient accumulator", padded, &s->gradients.data},
        {C, sparse ? "error" : "communication buffer",
         overlapped || local ? layout_padded(&travels) * sizeof(float) : 0, &s->comm_buffer.data},
        {C, "arriving parameters", overlapped ? casts : 0, &s->arriving_casts},
        {O, "outer parameters", vector, &s->local.outer},
        {O, "outer momentum", sparse ? 0 : vector, &s->local.momentum},
        {O, "start of a period", keeps_start ? vector : 0, &s->local.start},
        {C, "largest elements", blocks * block, &s->local.sparse.sent},
        {C, "largest elements of all ranks", ranks * blocks * block, &s->local.sparse.received},
        {C, "weights of all ranks", sparse ? ranks * sizeof(float) : 0, &s->local.sparse.weights},
    };
    Layout owned = shards ? s->layout : optimizer_whole(count);
    // A norm is taken of whole pieces, or of all of the vector.
    size_t partials = sizeof(double) * size_max(s->layout.cells * buffer_blocks(s->layout.piece),
                                                buffer_blocks(layout_padded(&s->layout)));
    size_t slices = sparse ? (1 + ranks) * s->local.sparse.slice * block : 0;
    const ArenaRow of_host[] = {
        {C, "a part of them on its way", slices, &s->local.sparse.slices},
        {MEMORY_WORKSPACE, "partial sums of the norm", partials, &s->norm_partials},
        {MEMORY_WORKSPACE, "partial sums of what is sent", partials, &s->inspect_partials},
        {MEMORY_WORKSPACE, "tallies of all ranks", ranks * sizeof(Tally), &s->tallies},
    };
    const ArenaRow unsent = {C, "unsent parts of gradients",
                             scheduler_feeds_back(settings, transport->size) ? padded : 0, &s->unsent};
    arena_reserve_rows(arena, vectors, sizeof vectors / sizeof vectors[0], false);
    arena_reserve_rows(arena, &unsent, 1, s->comm.nccl == NULL); // where messages are encoded
    arena_reserve_rows(arena, of_host, sizeof of_host / sizeof of_host[0], true);
    optimizer_reserve(&s->optimizer, arena, &settings->optimizer, &owned, shards ? transport->rank : 0,
                      !shards);
    if (sparse) { return; } // no vector of floats travels
    comm_reserve(&s->comm, arena, &travels,
                 wire_is_coarse(settings->wire) || wire_is_coarse(settings->estimate_wire));
}

// Where the caller puts the first parameters (parameter_count).
static inline float *scheduler_first_parameters(Scheduler *s) {
    return s->settings.keeps_casts ? s->gradients.data : s->parameters.data;
}

// Initialises the master and outer copies, and the casts, from the first parameters. Where these or
// casts of them are sent in bf16, all ranks start with rounded ones.
static inline void scheduler_spread_parameters(Scheduler *s) {
    bool rounded = s->settings.wire == WIRE_BF16 || s->settings.gathers_casts;
    size_t count = s->problem.parameter_count;
    float *first = scheduler_first_parameters(s);
    if (!scheduler_shards(&s->settings)) {
        s->optimizer.master = first;
    } else {
        optimizer_take_master(&s->optimizer, s->compute, first);
        if (rounded && !s->settings.keeps_casts) { buffer_round(s->compute, first, count); }
    }
    if (s->settings.keeps_casts) {
        reals_from_floats(s->compute, s->casts, first, layout_padded(&s->layout));
    }
    if (s->settings.kind == RULE_LOCAL) {
        stream_copy(s->compute, s->local.outer, s->parameters.data, count * sizeof(float));
    }
    stream_settle(s->compute);
}

// What tells how far the streams have come. keep_trace: spans are kept for a trace file.
static inline void scheduler_open_progress(Scheduler *s, bool keep_trace) {
    trace_open(&s->trace, keep_trace);
    watermark_create(&s->finished, 0);
    watermark_create(&s->arrived, WATERMARK_ALL);
}

static inline void scheduler_close_progress(Scheduler *s) {
    watermark_destroy(&s->finished);
    watermark_destroy(&s->arrived);
    trace_close(&s->trace);
}

// Starts the streams, when the caller has filled scheduler_first_parameters, the same on every
// rank. `pool` serves the compute stream, and those parts of a job that compute must wait for.
static inline void scheduler_start(Scheduler *s, ThreadPool *pool, bool keep_trace) {
    // A rank with more than two cores has one for each worker, and the host's thread another.
    StreamPlace computing = {.gpu = s->settings.device.gpu,
                             .precision = s->settings.device.precision,
                             .spins = pool->spin_rounds > 0 && pool->threads > 2},
                communicating = computing;
    communicating.high_priority = true;
    scheduler_open_progress(s, keep_trace);
    s->communication_pool = thread_pool_create(1, false); // the stream's own thread and no other
    s->compute = stream_create("compute", pool, &computing);
    s->communication = stream_create("communication", s->communication_pool, &communicating);
    s->parameters_version = 1;
    if (s->optimizer.muon.gemm != NULL && s->settings.kind != RULE_LOCAL) {
        gemm_open(s->communication, s->optimizer.muon.gemm);
    }
    for (int i = 0; stream_is_on_gpu(s->compute) && i <= LAYOUT_CELLS; i++) {
        s->announced.marks[i] = gpu_mark_create();
    }
    scheduler_spread_parameters(s);
}

static inline void scheduler_stop(Scheduler *s) {
    bool on_gpu = stream_is_on_gpu(s->compute);
    if (s->communication->gemm != NULL) { gemm_close(s->communication); }
    stream_destroy(s->compute);
    stream_destroy(s->communication);
    thread_pool_destroy(s->communication_pool);
    for (int i = 0; on_gpu && i <= LAYOUT_CELLS; i++) { gpu_mark_destroy(s->announced.marks[i]); }
    scheduler_close_progress(s);
    scheduler_free(s);
}
