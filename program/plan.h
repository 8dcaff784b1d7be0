// plan.h: train_gpt plan, which prints what a rank would need and allocates nothing.
#ifndef ACCO_PROGRAM_PLAN_H
#define ACCO_PROGRAM_PLAN_H

#include "program/sample.h"
#include "program/setup.h"

static inline int command_plan(Run *run) {
    Error error = {""};
    transport_open_alone(&run->transport, "a plan");
    run->transport.size = (int)run->options.ranks;
    if (!options_check_rank_list_length(&run->options, run->transport.size, &error)) {
        exit_user_mistake(&error);
    }
    if (!choose_model(run, &error) || !choose_rates(run, &error)) { exit_user_mistake(&error); }
    launch_threads(1, (int)run->options.threads, &run->threads);
    if (!placement_choose_device(&run->placement, &run->options, 0, true, &error) ||
        !placement_choose_precision(&run->placement, &run->options, &error)) {
        exit_user_mistake(&error);
    }
    placement_plan_gpu_exchange(&run->placement, &run->options);
    if (!reserve_memory(run, training_problem(run), &error)) { exit_user_mistake(&error); }
    printf("%s, %s, %d rank%s, micro-batch %d x %d, %d thread%s: bytes of one rank\n\n", run->config.name,
           run->rule->name, run->transport.size, run->transport.size == 1 ? "" : "s", run->B, run->T,
           run->threads.threads, run->threads.threads == 1 ? "" : "s");
    for (int i = 0; i < MEMORY_CLASS_COUNT; i++) {
        printf("%-20s %15zu\n", memory_class_name((MemoryClass)i),
               arena_class_bytes(&run->arena, (MemoryClass)i));
        for (int j = 0; j < run->arena.count; j++) {
            const Reservation *reservation = &run->arena.reservations[j];
            const char *place = reservation->on_host ? "  on the host" : "";
            if (reservation->memory_class == (MemoryClass)i) {
                printf("  %-30s %15zu%s\n", reservation->name, reservation->bytes, place);
            }
        }
    }
    printf("%-20s %15zu  (with alignment; %.2f bytes per parameter)\n",
           run->arena.on_gpu ? "total on the GPU" : "total", run->arena.bytes,
           (double)run->arena.bytes / (double)run->table.parameter_count);
    if (run->arena.on_gpu) {
        printf("%-20s %15zu\n", "total on the host", run->arena.host_bytes);
        printf("recompute %s (%s)\n", recompute_name(run->model.settings.recompute),
               run->placement.recompute_reason);
    }
    if (run->options.sample_tokens > 0) {
        Arena after;
        Sampler sampler;
        memset(&after, 0, sizeof after);
        sampler_reserve(&sampler, &after, &run->config, run->threads.threads);
        printf("%-20s %15zu  (rank 0 only, after training, on the host)\n", "sample", after.bytes);
    }
    fragments_free(&run->scheduler);
    transport_close(&run->transport);
    parameter_table_free(&run->table);
    free(run->decay_ranges);
    return 0;
}

#endif
