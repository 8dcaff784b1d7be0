// plan.h: train_gpt plan, which prints what memory a rank would need and allocates
// nothing.
//
// The numbers are those of the run itself: a plan makes the same choices and the same
// reservations (reserve_memory), and ends where a run would allocate.
#ifndef ACCO_PROGRAM_PLAN_H
#define ACCO_PROGRAM_PLAN_H

#include "program/sample.h"
#include "program/setup.h"

static inline void print_plan(const Run *run) {
    int ranks = run->transport.size, threads = run->threads.threads;
    const Arena *arena = &run->arena;
    printf("%s, %s, %d rank%s, micro-batch %d x %d, %d thread%s: bytes of one rank\n\n", run->config.name,
           run->rule->name, ranks, ranks == 1 ? "" : "s", run->B, run->T, threads, threads == 1 ? "" : "s");
    for (int i = 0; i < MEMORY_CLASS_COUNT; i++) {
        printf("%-20s %15zu\n", memory_class_name((MemoryClass)i), arena_class_bytes(arena, (MemoryClass)i));
        for (int j = 0; j < arena->count; j++) {
            const Reservation *reservation = &arena->reservations[j];
            if (reservation->memory_class != (MemoryClass)i) { continue; }
            printf("  %-30s %15zu%s\n", reservation->name, reservation->bytes,
                   reservation->on_host ? "  on the host" : "");
        }
    }
    printf("%-20s %15zu  (with alignment; %.2f bytes per parameter)\n",
           arena->on_gpu ? "total on the GPU" : "total", arena->bytes,
           (double)arena->bytes / (double)run->table.parameter_count);
    if (arena->on_gpu) {
        printf("%-20s %15zu\n", "total on the host", arena->host_bytes);
        printf("recompute %s (%s)\n", recompute_name(run->model.settings.recompute),
               run->placement.recompute_reason);
    }
    if (run->options.sample_tokens > 0) {
        Arena after;
        Sampler sampler;
        memset(&after, 0, sizeof after);
        sampler_reserve(&sampler, &after, &run->config, threads);
        printf("%-20s %15zu  (rank 0 only, while it writes one, on the host)\n", "sample", after.bytes);
    }
}

static inline int command_plan(Run *run) {
    Options *options = &run->options;
    Error error = {""};
    int per_host = options->ranks_per_host > 0 ? (int)options->ranks_per_host : 1;
    transport_open_supposed(&run->transport, (int)options->ranks, per_host);
    launch_threads(1, (int)options->threads, &run->threads);
    bool good = options_check_rank_list_length(options, run->transport.size, &error) &&
                choose_model(run, &error) && choose_rates(run, &error) &&
                placement_choose_device(&run->placement, options, 0, true, &error) &&
                placement_choose_precision(&run->placement, options, &error);
    if (!good) { exit_user_mistake(&error); }
    placement_choose_exchange(&run->placement, options, &run->transport);
    placement_plan_gpu_exchange(&run->placement, options);
    if (!reserve_memory(run, training_problem(run), &error)) { exit_user_mistake(&error); }
    print_plan(run);
    fragments_free(&run->scheduler);
    transport_close(&run->transport);
    parameter_table_free(&run->table);
    free(run->decay_ranges);
    return 0;
}

#endif
