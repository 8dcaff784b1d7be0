// plan.h: train_gpt plan, which prints what memory a rank would need and whether it is
// there, and allocates nothing.
//
// The numbers are those of the run itself: a plan makes the same choices and the same
// reservations (reserve_memory), and ends where a run would allocate.
#ifndef ACCO_PLAN_PLAN_H
#define ACCO_PLAN_PLAN_H

#include "evaluation/sample.h"
#include "plan/plan_time.h"

static inline void print_plan_row(const char *indent, const char *name, size_t bytes, const char *note) {
    char size[SIZE_TEXT];
    printf("%s%-*s %10s %15zu%s\n", indent, 34 - (int)strlen(indent), name, size_text(bytes, size), bytes,
           note);
}

// Bytes that do not grow with the micro-batch.
static inline size_t arena_state_bytes(const Arena *arena) {
    size_t bytes = 0;
    for (int i = 0; i < arena->count; i++) {
        const Reservation *reservation = &arena->reservations[i];
        bool is_state =
            reservation->memory_class != MEMORY_ACTIVATIONS && reservation->memory_class != MEMORY_WORKSPACE;
        bytes += is_state && !reservation->on_host ? reservation->bytes : 0;
    }
    return bytes;
}

static inline void print_plan_table(const Run *run) {
    const Arena *arena = &run->arena;
    double parameters = (double)run->table.parameter_count;
    printf("%-34s %10s %15s\n", "", "", "bytes");
    for (int i = 0; i < MEMORY_CLASS_COUNT; i++) {
        print_plan_row("", memory_class_name((MemoryClass)i), arena_class_bytes(arena, (MemoryClass)i), "");
        for (int j = 0; j < arena->count; j++) {
            const Reservation *reservation = &arena->reservations[j];
            if (reservation->memory_class != (MemoryClass)i) { continue; }
            print_plan_row("  ", reservation->name, reservation->bytes,
                           reservation->on_host ? "  on the host" : "");
        }
    }
    print_plan_row("", arena->on_gpu ? "total on the GPU" : "total", arena->bytes, "  with alignment");
    if (arena->on_gpu) { print_plan_row("", "total on the host", arena->host_bytes, ""); }
    printf("\nper parameter    %.2f bytes; %.2f of them do not depend on the micro-batch\n",
           (double)arena->bytes / parameters, (double)arena_state_bytes(arena) / parameters);
    if (arena->on_gpu) {
        printf("recompute        %s (%s)\n", recompute_name(run->model.settings.recompute),
               run->placement.recompute_reason);
    }
}

// One line for each memory that the plan knows.
static inline void print_plan_verdict(const Run *run) {
    MemoryRoom room = memory_room(run);
    const Arena *arena = &run->arena;
    char needed[SIZE_TEXT], available[SIZE_TEXT], left[SIZE_TEXT];
    Error reason = {""};
    if (!arena_fits(arena, &room)) {
        fit_explain(run, &room, &reason);
        printf("fits             no: %s\n", reason.text);
        return;
    }
    if (arena->on_gpu && room.gpu == 0) {
        printf("fits             not known: there is no GPU here; --gpu-memory 80G plans for one that has 80 "
               "GB\n");
        return;
    }
    size_t bytes = arena->on_gpu ? arena->bytes : arena_host_bytes(arena);
    size_t most = arena->on_gpu ? room.gpu : room.host;
    if (most == 0) {
        printf("fits             not known: this system does not say how much memory is free\n");
        return;
    }
    printf("fits             yes: %s of the %s for this rank %s; %s are left\n", size_text(bytes, needed),
           size_text(most, available), arena->on_gpu ? "on the GPU" : "on this machine",
           size_text(most - bytes, left));
    double together = (double)bytes * (double)run->options.ranks;
    if (!arena->on_gpu && run->options.ranks > 1) {
        printf("                 %lld ranks on this machine would need %s, which %s\n",
               (long long)run->options.ranks, size_text((size_t)together, needed),
               together <= (double)most ? "fits, too" : "does not fit");
    }
    Options with_blocks = run->options;
    printf("                 the largest micro-batch that fits is %lld",
           (long long)fit_micro_batch(run, &room, &run->options));
    if (fit_recompute(run, &with_blocks)) {
        printf(", with --recompute block %lld", (long long)fit_micro_batch(run, &room, &with_blocks));
    }
    printf("\n");
}

static inline void print_plan(const Run *run) {
    int ranks = run->transport.size, threads = run->threads.threads;
    printf("%s, %s, %d rank%s, micro-batch %d x %d, %s, %d thread%s: memory of one rank\n\n",
           run->config.name, run->rule->name, ranks, ranks == 1 ? "" : "s", run->B, run->T,
           run->placement.precision == PRECISION_BF16 ? "bf16" : "fp32", threads, threads == 1 ? "" : "s");
    print_plan_table(run);
    printf("device           %s\n", run->placement.device_reason);
    if (run->options.sample_tokens > 0) {
        Arena after;
        Sampler sampler;
        char size[SIZE_TEXT];
        memset(&after, 0, sizeof after);
        sampler_reserve(&sampler, &after, &run->config, threads);
        printf("sample           %s more of the host, on rank 0 while it writes one\n",
               size_text(after.bytes, size));
    }
    print_plan_verdict(run);
}

// --fit
static inline bool plan_fit(Run *run, Error *error) {
    MemoryRoom room = memory_room(run);
    if (!fit_options(run, &room, &run->options)) {
        return error_set(error, room.gpu == 0 && room.host == 0
                                    ? "--fit on: the memory is not known; --gpu-memory 80G plans for a GPU "
                                      "that has 80 GB"
                                    : "--fit on: no --micro-batch of this model fits into the memory");
    }
    run->B = (int)run->options.micro_batch;
    return true;
}

static inline int command_plan(Run *run) {
    Options *options = &run->options;
    Error error = {""};
    int per_host = options->ranks_per_host > 0 ? (int)options->ranks_per_host : 1;
    transport_open_supposed(&run->transport, (int)options->ranks, per_host);
    launch_threads(1, (int)options->threads, &run->threads);
    Options asked = *options; // before rates are chosen
    bool good = options_check_rank_numbers(options, run->transport.size, &error) &&
                choose_model(run, &error) && choose_rates(run, &error) &&
                placement_choose_device(&run->placement, options, 0, true, &error) &&
                placement_choose_precision(&run->placement, options, &error);
    if (!good) { exit_user_mistake(&error); }
    placement_choose_exchange(&run->placement, options, &run->transport);
    placement_plan_gpu_exchange(&run->placement, options);
    if ((options->fit && !plan_fit(run, &error)) || !reserve_memory(run, training_problem(run), &error)) {
        exit_user_mistake(&error);
    }
    print_plan(run);
    if (run->transport.size > 1 && !plan_time(run, &asked, &error)) { exit_user_mistake(&error); }
    fragments_free(&run->scheduler);
    transport_close(&run->transport);
    parameter_table_free(&run->table);
    free(run->decay_ranges);
    return 0;
}

#endif
