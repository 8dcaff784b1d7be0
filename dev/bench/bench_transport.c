// bench_transport.c: what a reduce-scatter and an all-gather cost, and what a waiting one
// costs the computation beside it. Run under mpirun (make bench does).
//
// 1. Reduce-scatter and all-gather of one vector, ours in fp32 and bf16 against MPI's own
//    collectives in fp32, interleaved in one run: median and range.
// 2. Compute throughput of this rank with nothing in flight, and with both collectives in
//    flight on an emulated slow link: what hiding costs. Between ranks of one machine a
//    copy is work of its own. The slow link makes almost all of the time waiting, as on a
//    real network.
#include "comm/collectives_host.h"
#include "comm/transport_mpi.h"
#include "kernels/kernels.h"

enum { REPEATS = 9 };

static void print_times(const Transport *transport, const char *name, double *seconds, double bytes) {
    double median = median_of(seconds, REPEATS);
    if (transport->rank == 0) {
        printf("  %-42s %8.2f ms  (%.2f .. %.2f)  %6.2f GB/s per rank\n", name, 1e3 * median,
               1e3 * seconds[0], 1e3 * seconds[REPEATS - 1], bytes / median / 1e9);
    }
}

static void fill_random(float *buffer, size_t count, uint64_t seed) {
    Random random = {seed};
    for (size_t i = 0; i < count; i++) { buffer[i] = (float)random_uniform(&random) - 0.5f; }
}

enum { OUR_SCATTER, OUR_SCATTER_BF16, MPI_SCATTER, OUR_GATHER, OUR_GATHER_BF16, MPI_GATHER, KINDS };

static const char *const KIND_NAMES[KINDS] = {
    "reduce-scatter, ours", "reduce-scatter, ours, bf16", "reduce-scatter, MPI_Reduce_scatter_block",
    "all-gather, ours",     "all-gather, ours, bf16",     "all-gather, MPI_Allgather"};

// One collective of the whole vector.
static void run_kind(Transport *transport, int kind, const Layout *layout, float *buffer) {
    int shard = (int)layout_shard(layout);
    bool narrow = kind == OUR_SCATTER_BF16 || kind == OUR_GATHER_BF16;
    Collective collective = {
        .layout = layout, .end = layout->cells, .wire = narrow ? WIRE_BF16 : WIRE_FP32, .buffer = buffer};
    if (kind == MPI_SCATTER) {
        MPI_Reduce_scatter_block(MPI_IN_PLACE, buffer, shard, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    } else if (kind == MPI_GATHER) {
        MPI_Allgather(MPI_IN_PLACE, 0, MPI_FLOAT, buffer, shard, MPI_FLOAT, MPI_COMM_WORLD);
    } else {
        host_exchange(transport, &collective, kind < MPI_SCATTER ? REDUCE_SCATTER : ALL_GATHER);
    }
}

static void bench_collectives(Transport *transport, size_t megabytes) {
    Arena arena;
    memset(&arena, 0, sizeof arena);
    Layout layout = layout_make(megabytes * 250000, transport->size);
    size_t padded = layout_padded(&layout);
    float *buffer;
    Error error = {""};
    arena_reserve(&arena, MEMORY_COMMUNICATION, "buffer", padded * sizeof(float), &buffer);
    host_collectives_reserve(transport, &arena, layout_shard(&layout));
    if (!arena_commit(&arena, &error)) { transport_fail(transport, "%s", error.text); }
    double seconds[KINDS][REPEATS];
    for (int repeat = -1; repeat < REPEATS; repeat++) { // the first is a warm-up
        for (int kind = 0; kind < KINDS; kind++) {
            fill_random(buffer, padded, 1 + (uint64_t)transport->rank); // sums must not grow
            transport_barrier(transport, "barrier");
            double began = clock_seconds();
            run_kind(transport, kind, &layout, buffer);
            transport_barrier(transport, "barrier");
            if (repeat >= 0) { seconds[kind][repeat] = clock_seconds() - began; }
        }
    }
    if (transport->rank == 0) { printf("%zu MB of fp32, %d ranks\n", megabytes, transport->size); }
    double sent = (double)(transport->size - 1) * (double)layout_shard(&layout) * sizeof(float);
    for (int kind = 0; kind < KINDS; kind++) {
        bool narrow = kind == OUR_SCATTER_BF16 || kind == OUR_GATHER_BF16;
        print_times(transport, KIND_NAMES[kind], seconds[kind], narrow ? sent / 2 : sent);
    }
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
        matmul_forward(stream, as_reals(work->c), SIDE, as_reals(work->a), as_reals(work->b), SIDE, SIDE,
                       SIDE);
    }
    work->seconds = clock_seconds() - began;
}

typedef struct Job {
    Transport *transport;
    Collective collective;
    double seconds, processor_seconds; // of the latest run
} Job;

static double thread_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void job_task(void *context, Stream *stream) {
    (void)stream;
    Job *job = (Job *)context;
    double began = clock_seconds(), processor_began = thread_seconds();
    host_exchange(job->transport, &job->collective, REDUCE_SCATTER);
    host_exchange(job->transport, &job->collective, ALL_GATHER);
    job->seconds = clock_seconds() - began;
    job->processor_seconds = thread_seconds() - processor_began;
}

// The seconds of the work on the compute stream, beside a job on the other one; NULL: alone.
static double work_beside(Stream *compute, Work *work, Stream *communication, Job *job) {
    Event computed, communicated;
    if (job != NULL) { stream_run(communication, job_task, job); }
    event_record(&communicated, communication);
    stream_run(compute, work_task, work);
    event_record(&computed, compute);
    event_wait(&computed, 600);
    event_wait(&communicated, 600);
    return work->seconds;
}

static void bench_waiting(Transport *transport, double megabits) {
    Arena arena;
    memset(&arena, 0, sizeof arena);
    Error error = {""};
    // A rank sends (size - 1) shards in either collective: about 0.7 s on the link for
    // both.
    double elements = megabits * 1e6 / 8 / sizeof(float) * 0.35;
    int size = transport->size;
    Layout layout = layout_make((size_t)(elements / (size > 1 ? size - 1 : 1)) * (size_t)size, size);
    size_t shard = layout_shard(&layout);
    Work work;
    float *buffer;
    arena_reserve(&arena, MEMORY_WORKSPACE, "a", SIDE * SIDE * sizeof(float), &work.a);
    arena_reserve(&arena, MEMORY_WORKSPACE, "b", SIDE * SIDE * sizeof(float), &work.b);
    arena_reserve(&arena, MEMORY_WORKSPACE, "c", SIDE * SIDE * sizeof(float), &work.c);
    arena_reserve(&arena, MEMORY_COMMUNICATION, "buffer", layout_padded(&layout) * sizeof(float), &buffer);
    host_collectives_reserve(transport, &arena, shard);
    if (!arena_commit(&arena, &error)) { transport_fail(transport, "%s", error.text); }
    fill_random(work.a, SIDE * SIDE, 1);
    fill_random(work.b, SIDE * SIDE, 2);
    fill_random(buffer, layout_padded(&layout), 3);
    ThreadPool *pool = thread_pool_create(1, false), *own = thread_pool_create(1, false);
    Stream *compute = stream_create("compute", pool, NULL),
           *communication = stream_create("communication", own, NULL);
    Job job = {.transport = transport,
               .collective = {.layout = &layout, .end = layout.cells, .wire = WIRE_FP32, .buffer = buffer}};
    work.products = 1500;
    double ratios[REPEATS];
    double job_seconds = 0;
    for (int repeat = -1; repeat < REPEATS; repeat++) {
        double seconds[2];
        for (int in_flight = 0; in_flight < 2; in_flight++) {
            transport->link_bytes_per_second = 0;
            transport_barrier(transport, "barrier");
            transport->link_bytes_per_second = megabits * 1e6 / 8;
            seconds[in_flight] = work_beside(compute, &work, communication, in_flight == 1 ? &job : NULL);
        }
        if (repeat >= 0) { ratios[repeat] = seconds[1] / seconds[0]; }
        job_seconds = job.seconds;
        work.products = (int)(work.products * 0.6 / seconds[0]); // about 0.6 s, inside the job's time
    }
    double median = median_of(ratios, REPEATS);
    if (transport->rank == 0) {
        printf("compute beside a job of %.2f s on a link of %.0f Mbit/s: time x %.3f (%.3f .. %.3f) of that "
               "with nothing in flight;\n"
               "  the job moved %.1f MB and used %.1f ms of a core, %.1f %% of its time\n",
               job_seconds, megabits, median, ratios[0], ratios[REPEATS - 1],
               2e-6 * (double)shard * (size - 1) * sizeof(float), 1e3 * job.processor_seconds,
               100 * job.processor_seconds / job_seconds);
    }
    stream_destroy(compute);
    stream_destroy(communication);
    thread_pool_destroy(pool);
    thread_pool_destroy(own);
    arena_release(&arena);
}

int main(void) {
    Transport transport;
    Error error = {""};
    if (!transport_open(&transport, &error)) { return 1; }
    transport_meet(&transport, transport.rank); // each a host by itself: links are emulated between hosts
    bench_collectives(&transport, 4);
    bench_collectives(&transport, 128);
    bench_waiting(&transport, 100);
    bench_waiting(&transport, 1000);
    transport_close(&transport);
    return 0;
}
