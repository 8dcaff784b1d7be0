// device.h: streams and events, the only way in which work is ordered here.
//
//   host            run a | run b | record e | ...... wait e |
//   stream          ......| a ....... | b ..... | e |
//   other stream    ............| c ............... | d ...
//
// A stream is a queue and a worker thread that runs its tasks one after another, so computation and
// communication overlap on any machine. An event marks a point of a stream that the host can wait
// for. On a GPU a task puts its kernels into the stream's CUDA queue, and the worker waits until
// they have ended (gpu.h). The tasks of a simulated stream are not run: a simulator computes when
// they would have ended (plan/simulation.h).
//
// One host thread fills a stream, records its events and waits for them. `context` must live until
// the task has run, and a stream as long as its events are asked.
#pragma once

#include "runtime/gpu.h"
#include "runtime/thread_pool.h"
#include "runtime/watermark.h"

typedef struct Stream Stream;
typedef struct Event Event;
typedef void (*StreamTask)(void *context, Stream *stream);

// A stream's tasks, the running one included; then stream_run waits for room.
enum { STREAM_CAPACITY = 256 };

typedef struct StreamEntry {
    StreamTask task;
    void *context;
} StreamEntry;

// Replaces the calls below if a stream is simulated. self: the simulator's own state.
typedef struct StreamSimulator {
    void *self;
    void (*run)(void *self, Stream *stream, StreamTask task, void *context);
    void (*record)(void *self, const Event *event, Stream *stream);
    bool (*has_happened)(void *self, const Event *event);
    void (*wait)(void *self, const Event *event);
} StreamSimulator;

struct Stream {
    const char *name;
    const StreamSimulator *simulator; // NULL: tasks run; borrowed
    ThreadPool *pool;                 // what kernels in this stream use; borrowed
    const Gpu *gpu;                   // NULL on the CPU; borrowed
    void *queue;         // CUDA's stream that kernels in this stream are put into; NULL on the CPU
    Precision precision; // of weights and activations
    void *gemm;          // what matrix products need: gemm_open
    pthread_t worker;
    StreamEntry entries[STREAM_CAPACITY]; // of task n: entries[n % STREAM_CAPACITY]
    Watermark enqueued, ended;            // how many tasks have been
    bool prompt;                          // its worker mostly waits, and should run as soon as it is woken
    bool spins;                           // its worker has a core of its own to wait for the GPU with
};

// A point of a stream: behind its first `position` tasks. All zeros: it was never recorded.
struct Event {
    Stream *stream;
    size_t position;
};

static inline bool stream_is_on_gpu(const Stream *stream) { return stream->queue != NULL; }

static inline double seconds_of(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// Seconds of a monotonic clock; only differences mean anything.
static inline double clock_seconds(void) { return seconds_of(CLOCK_MONOTONIC); }

// CPU time of the calling thread, in seconds.
static inline double thread_cpu_seconds(void) { return seconds_of(CLOCK_THREAD_CPUTIME_ID); }

static inline void sleep_seconds(double seconds) {
    struct timespec duration;
    duration.tv_sec = (time_t)seconds;
    duration.tv_nsec = (long)((seconds - (double)duration.tv_sec) * 1e9);
    while (nanosleep(&duration, &duration) != 0 && errno == EINTR) {}
}

// In a task: waits for what it has put into the CUDA queue. Unless it may spin it sleeps between
// polls after 50 us, for an eighth of the time waited and 100 us at most: then the host's cores
// stay free, and each of the few waits of a commit ends up to 100 us late.
static inline void stream_settle(Stream *stream) {
    if (!stream_is_on_gpu(stream)) { return; }
    double began = clock_seconds();
    while (!gpu_queue_is_idle(stream->queue)) {
        double waited = stream->spins ? 0 : clock_seconds() - began;
        if (waited > 50e-6) { sleep_seconds(waited / 8 < 100e-6 ? waited / 8 : 100e-6); }
    }
}

// Memory of any kind, in the order of the stream.
static inline void stream_copy(Stream *stream, void *to, const void *from, size_t bytes) {
    if (bytes == 0 || stream->simulator != NULL) { return; }
    if (stream_is_on_gpu(stream)) {
        gpu_copy(stream->queue, to, from, bytes);
    } else {
        memcpy(to, from, bytes);
    }
}

static inline void stream_clear(Stream *stream, void *memory, size_t bytes) {
    if (bytes == 0 || stream->simulator != NULL) { return; }
    if (stream_is_on_gpu(stream)) {
        gpu_fill(stream->queue, memory, 0, bytes);
    } else {
        memset(memory, 0, bytes);
    }
}

static inline void *stream_main(void *argument) {
    Stream *stream = (Stream *)argument;
    gpu_enter_thread(stream->gpu);
    thread_sleep_exactly(); // for a GPU or for messages
    if (stream->prompt) { thread_wake_promptly(); }
    for (size_t begun = 0;; begun++) {
        watermark_wait(&stream->enqueued, begun + 1);
        StreamEntry entry = stream->entries[begun % STREAM_CAPACITY];
        if (entry.task == NULL) { return NULL; }
        entry.task(entry.context, stream);
        stream_settle(stream);
        watermark_raise(&stream->ended, begun + 1);
    }
}

typedef struct StreamPlace {
    const Gpu *gpu; // NULL: on the CPU
    Precision precision;
    bool high_priority; // its worker is woken promptly; on a GPU its kernels go first
    bool spins;         // while it waits for a GPU
} StreamPlace;

// place: NULL means the CPU, in fp32.
static inline Stream *stream_create(const char *name, ThreadPool *pool, const StreamPlace *place) {
    static const StreamPlace on_cpu = {0};
    Stream *stream = MEMORY_OF(Stream, 1);
    if (place == NULL) { place = &on_cpu; }
    stream->name = name;
    stream->pool = pool;
    stream->precision = place->precision;
    stream->prompt = place->high_priority;
    stream->spins = place->spins;
    if (gpu_is_used(place->gpu)) {
        stream->gpu = place->gpu;
        stream->queue = gpu_queue_create(place->high_priority);
    }
    watermark_create(&stream->enqueued, 0);
    watermark_create(&stream->ended, 0);
    if (pthread_create(&stream->worker, NULL, stream_main, stream) != 0) {
        failure_report("the system gives no more threads");
    }
    return stream;
}

// Returns at once, unless the stream has STREAM_CAPACITY tasks already.
static inline void stream_run(Stream *stream, StreamTask task, void *context) {
    if (stream->simulator != NULL) {
        stream->simulator->run(stream->simulator->self, stream, task, context);
        return;
    }
    size_t position = stream->enqueued.position; // which only this thread changes
    if (position >= STREAM_CAPACITY) { watermark_wait(&stream->ended, position + 1 - STREAM_CAPACITY); }
    StreamEntry entry = {task, context};
    stream->entries[position % STREAM_CAPACITY] = entry;
    watermark_raise(&stream->enqueued, position + 1);
}

// Runs what is still queued, then ends the worker.
static inline void stream_destroy(Stream *stream) {
    if (stream == NULL) { return; }
    stream_run(stream, NULL, NULL);
    pthread_join(stream->worker, NULL);
    if (stream_is_on_gpu(stream)) { gpu_queue_destroy(stream->queue); }
    watermark_destroy(&stream->enqueued);
    watermark_destroy(&stream->ended);
    free(stream);
}

static inline void event_record(Event *event, Stream *stream) {
    event->stream = stream;
    event->position = stream->enqueued.position;
    if (stream->simulator != NULL) { stream->simulator->record(stream->simulator->self, event, stream); }
}

// True when its latest recording has happened, and for an event that was never recorded.
static inline bool event_query(const Event *event) {
    Stream *stream = event->stream;
    if (stream == NULL) { return true; }
    if (stream->simulator != NULL) { return stream->simulator->has_happened(stream->simulator->self, event); }
    return watermark_has_reached(&stream->ended, event->position);
}

// Waits for the latest recording. False: `timeout_seconds`, rounded up, pass first.
static inline bool event_wait(const Event *event, double timeout_seconds) {
    Stream *stream = event->stream;
    if (stream == NULL) { return true; }
    if (stream->simulator != NULL) {
        stream->simulator->wait(stream->simulator->self, event);
        return true;
    }
    return watermark_wait_at_most(&stream->ended, event->position, timeout_seconds);
}
