// bench_transport.c: what an exchange costs, and what a waiting one costs the others. Run
// under mpirun (make bench does).
//
// 1. Reduce-scatter and all-gather of one buffer, ours against MPI's own collectives,
// interleaved in one run: median and range. 2. Compute throughput of this rank with
// nothing in flight, and with a job on an emulated slow link in flight: what hiding
// costs.
//    Between ranks of one machine a copy is work of its own; the slow link makes almost all of the job waiting, as on a real network.
#include "comm/transport_mpi.h"
#include "kernels/kernels.h"

enum { REPEATS = 9 };

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_times(const Transport *transport, const char *name, double *seconds, double bytes) {
    qsort(seconds, REPEATS, sizeof *seconds, compare_doubles);
    if (transport->rank == 0) {
        printf("  %-34s %8.2f ms  (%.2f .. %.2f)  %6.2f GB/s per rank\n", name, 1e3 * seconds[REPEATS / 2],
               1e3 * seconds[0], 1e3 * seconds[REPEATS - 1], bytes / seconds[REPEATS / 2] / 1e9);
    }
}

static void fill_random(float *buffer, size_t count, uint64_t seed) {
    Random random = {seed};
    for (size_t i = 0; i < count; i++) { buffer[i] = (float)random_uniform(&random) - 0.5f; }
}

static void bench_collectives(Transport *transport, size_t megabytes) {
    Arena arena;
    memset(&arena, 0, sizeof arena);
    size_t shard = megabytes * 250000 / (size_t)transport->size / 32 * 32;
    size_t count = shard * (size_t)transport->size;
    float *buffer;
    Error error = {""};
    arena_reserve(&arena, MEMORY_COMMUNICATION, "buffer", count * sizeof(float), &buffer);
    host_collectives_reserve(transport, &arena, shard);
    if (!arena_commit(&arena, &error)) { transport_fail(transport, "%s", error.text); }
    fill_random(buffer, count, 1 + (uint64_t)transport->rank);
    double seconds[4][REPEATS];
    for (int repeat = -1; repeat < REPEATS; repeat++) { // the first is a warm-up
        for (int kind = 0; kind < 4; kind++) {
            transport_barrier(transport, "barrier");
            double began = clock_seconds();
            float *mine = buffer + shard * (size_t)transport->rank;
            if (kind == 0) { host_reduce_scatter(transport, buffer, shard); }
            if (kind == 2) { host_all_gather(transport, buffer, shard); }
            if (kind == 1) {
                MPI_Reduce_scatter_block(MPI_IN_PLACE, buffer, (int)shard, MPI_FLOAT, MPI_SUM,
                                         MPI_COMM_WORLD);
            }
            if (kind == 3) {
                MPI_Allgather(MPI_IN_PLACE, 0, MPI_FLOAT, buffer, (int)shard, MPI_FLOAT, MPI_COMM_WORLD);
            }
            transport_barrier(transport, "barrier");
            if (repeat >= 0) { seconds[kind][repeat] = clock_seconds() - began; }
            if (kind == 1) { fill_random(mine, shard, 3); }
        }
    }
    double sent = (double)(transport->size - 1) * (double)shard * 4;
    if (transport->rank == 0) {
        printf("%zu MB fp32, %d ranks, wire %s\n", megabytes, transport->size,
               transport->wire == WIRE_FP32 ? "fp32" : "bf16");
    }
    print_times(transport, "reduce-scatter, ours", seconds[0], sent);
    print_times(transport, "reduce-scatter, MPI_Reduce_scatter_block", seconds[1], sent);
    print_times(transport, "all-gather, ours", seconds[2], sent);
    print_times(transport, "all-gather, MPI_Allgather", seconds[3], sent);
    arena_release(&arena);
}

// ---------------------------------------------------------------------------------------

enum { SIDE = 256 };

typedef struct Work {
    float *a, *b, *c; // (SIDE, SIDE)
    int products;
    double seconds;
} Work;

static void work_task(void *context, Stream *stream) {
    Work *work = (Work *)context;
    double began = clock_seconds();
    for (int i = 0; i < work->products; i++) {
        cpu_matmul_forward(stream, work->c, SIDE, work->a, work->b, SIDE, SIDE, SIDE);
    }
    work->seconds = clock_seconds() - began;
}

typedef struct Collective {
    Transport *transport;
    float *buffer;
    size_t shard;
    double seconds, processor_seconds; // of the latest job
} Collective;

static double thread_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void exchange_task(void *context, Stream *stream) {
    (void)stream;
    Collective *collective = (Collective *)context;
    double began = clock_seconds(), processor_began = thread_seconds();
    host_reduce_scatter(exchange->transport, exchange->buffer, exchange->shard);
    host_all_gather(exchange->transport, exchange->buffer, exchange->shard);
    exchange->seconds = clock_seconds() - began;
    exchange->processor_seconds = thread_seconds() - processor_began;
}

static void bench_waiting(Transport *transport, double megabits) {
    Arena arena;
    memset(&arena, 0, sizeof arena);
    Error error = {""};
    size_t shard =
        (size_t)(megabits * 1e6 / 8 / 4 * 0.35) / 32 * 32; // about 0.7 s on the link for scatter and gather
    Work work;
    float *buffer;
    arena_reserve(&arena, MEMORY_WORKSPACE, "a", SIDE * SIDE * sizeof(float), &work.a);
    arena_reserve(&arena, MEMORY_WORKSPACE, "b", SIDE * SIDE * sizeof(float), &work.b);
    arena_reserve(&arena, MEMORY_WORKSPACE, "c", SIDE * SIDE * sizeof(float), &work.c);
    arena_reserve(&arena, MEMORY_COMMUNICATION, "buffer", shard * (size_t)transport->size * sizeof(float),
                  &buffer);
    host_collectives_reserve(transport, &arena, shard);
    if (!arena_commit(&arena, &error)) { transport_fail(transport, "%s", error.text); }
    fill_random(work.a, SIDE * SIDE, 1);
    fill_random(work.b, SIDE * SIDE, 2);
    fill_random(buffer, shard * (size_t)transport->size, 3);
    ThreadPool *pool = thread_pool_create(1, false), *own = thread_pool_create(1, false);
    Stream *compute = stream_create("compute", pool, NULL),
           *communication = stream_create("communication", own, NULL);
    Event *computed = event_create(), *communicated = event_create();
    Collective collective = {transport, buffer, shard, 0, 0};
    work.products = 1500;
    double ratios[REPEATS];
    double job_seconds = 0;
    for (int repeat = -1; repeat < REPEATS; repeat++) {
        double seconds[2];
        for (int in_flight = 0; in_flight < 2; in_flight++) {
            transport->link_bytes_per_second = 0;
            transport_barrier(transport, "barrier");
            transport->link_bytes_per_second = megabits * 1e6 / 8;
            if (in_flight == 1) { stream_run(communication, exchange_task, &exchange); }
            event_record(communicated, communication);
            stream_run(compute, work_task, &work);
            event_record(computed, compute);
            event_wait(computed, 600);
            event_wait(communicated, 600);
            seconds[in_flight] = work.seconds;
        }
        if (repeat >= 0) { ratios[repeat] = seconds[1] / seconds[0]; }
        job_seconds = exchange.seconds;
        work.products = (int)(work.products * 0.6 / seconds[0]); // about 0.6 s, inside the job's time
    }
    qsort(ratios, REPEATS, sizeof *ratios, compare_doubles);
    if (transport->rank == 0) {
        printf("compute beside a job of %.2f s on a link of %.0f Mbit/s: time x %.3f (%.3f .. %.3f) of that "
               "with nothing in flight;\n"
               "  the job moved %.1f MB and used %.1f ms of a core, %.1f %% of its time\n",
               job_seconds, megabits, ratios[REPEATS / 2], ratios[0], ratios[REPEATS - 1],
               2e-6 * (double)shard * sizeof(float), 1e3 * exchange.processor_seconds,
               100 * exchange.processor_seconds / job_seconds);
    }
    stream_destroy(compute);
    stream_destroy(communication);
    event_destroy(computed);
    event_destroy(communicated);
    thread_pool_destroy(pool);
    thread_pool_destroy(own);
    arena_release(&arena);
}

int main(void) {
    Transport transport;
    Error error = {""};
    if (!transport_open(&transport, &error)) { return 1; }
    for (int wire = 0; wire < 2; wire++) {
        transport.wire = wire == 1 ? WIRE_BF16 : WIRE_FP32;
        bench_collectives(&transport, 4);
        bench_collectives(&transport, 128);
    }
    transport.wire = WIRE_FP32;
    bench_waiting(&transport, 100);
    bench_waiting(&transport, 1000);
    transport_close(&transport);
    return 0;
}
