// device.h: streams and events, the only way in which work is ordered here.
//
//   host            run a | run b | record e | ...... wait e |
//   stream          ......| a ....... | b ..... | e |
//   other stream    ............| c ............... | d ...
//
// A stream is a queue and a worker thread that runs its tasks one after another. An event
// marks a point of a stream that the host can wait for. Because a stream is a thread,
// computation and communication overlap on any machine. On a GPU a task puts its kernels
// into the stream's CUDA queue, and the worker waits until they have ended (gpu.h).
//
//   stream_run                  queues a task; it starts when those before it have ended
//   event_record                the event happens when everything before it has ended
//   event_query, event_wait     the host polls, or waits with a deadline
//   stream_copy, stream_clear   memory of any kind, in the order of the stream
//   stream_settle               in a task: waits for what it has put into the CUDA queue
//
// A stream can also be simulated: then its tasks are not run, and a simulator computes when
// they would have ended, on a clock of its own (plan/simulation.h).
//
// One host thread records an event and waits for it. `context` belongs to the caller and
// must live until the task has run, and a stream as long as its events are asked. A kernel
// uses the threads of its task's stream.
#ifndef ACCO_RUNTIME_DEVICE_H
#define ACCO_RUNTIME_DEVICE_H

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "runtime/gpu.h"
#include "runtime/thread_pool.h"

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
    void *gemm;          // what matrix products on a GPU need: kernels/cuda/matmul.cuh
    pthread_t worker;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    StreamEntry entries[STREAM_CAPACITY];
    uint64_t enqueued, completed; // entries [completed, enqueued) run or wait
    bool prompt;                  // its worker mostly waits, and should run as soon as it is woken
    bool stopping;
};

// A point of a stream: behind its first `position` tasks. All zeros: it was never recorded.
struct Event {
    Stream *stream;
    uint64_t position;
};

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

// ---------------------------------------------------------------------------------------
// Streams

// After 50 us it sleeps between polls, for an eighth of the time waited and 100 us at
// most, so that the host's cores stay free.
static inline void stream_settle(Stream *stream) {
    if (stream->queue == NULL) { return; }
    double began = clock_seconds();
    while (!gpu_queue_is_idle(stream->queue)) {
        double waited = clock_seconds() - began;
        if (waited > 50e-6) { sleep_seconds(waited / 8 < 100e-6 ? waited / 8 : 100e-6); }
    }
}

static inline void stream_copy(Stream *stream, void *to, const void *from, size_t bytes) {
    if (stream->queue != NULL) {
        gpu_copy(stream->queue, to, from, bytes);
    } else if (bytes > 0 && stream->simulator == NULL) {
        memcpy(to, from, bytes);
    }
}

static inline void stream_clear(Stream *stream, void *memory, size_t bytes) {
    if (stream->queue != NULL) {
        gpu_fill(stream->queue, memory, 0, bytes);
    } else if (bytes > 0 && stream->simulator == NULL) {
        memset(memory, 0, bytes);
    }
}

// Lets the calling thread run as soon as it is woken, also while others keep all cores
// busy: else it may be 3 to 10 ms late for messages. It asks for the shortest time
// slices, which Linux schedules first from version 6.12 on; older systems ignore it.
static inline void thread_wake_promptly(void) {
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period; // nanoseconds
    } attributes = {.size = sizeof attributes, .flags = 0x08, .runtime = 100000};
    // The flag is SCHED_FLAG_KEEP_POLICY; with real-time policies it then does nothing.
    attributes.nice = getpriority(PRIO_PROCESS, 0);
    syscall(SYS_sched_setattr, 0, &attributes, 0);
}

static inline void *stream_main(void *argument) {
    Stream *stream = (Stream *)argument;
    gpu_enter_thread(stream->gpu);
    // Short sleeps, for a GPU or for messages, end when they should, not 50 us later.
    prctl(PR_SET_TIMERSLACK, 1UL);
    if (stream->prompt) { thread_wake_promptly(); }
    pthread_mutex_lock(&stream->mutex);
    for (;;) {
        while (stream->completed == stream->enqueued && !stream->stopping) {
            pthread_cond_wait(&stream->changed, &stream->mutex);
        }
        if (stream->completed == stream->enqueued) { break; }
        StreamEntry entry = stream->entries[stream->completed % STREAM_CAPACITY];
        pthread_mutex_unlock(&stream->mutex);
        entry.task(entry.context, stream);
        stream_settle(stream);
        pthread_mutex_lock(&stream->mutex);
        stream->completed++;
        pthread_cond_broadcast(&stream->changed);
    }
    pthread_mutex_unlock(&stream->mutex);
    return NULL;
}

typedef struct StreamPlace {
    const Gpu *gpu; // NULL: on the CPU
    Precision precision;
    bool high_priority; // its worker is woken promptly; on a GPU its kernels go first
} StreamPlace;

// NULL: the system does not give another thread. place: NULL means the CPU, in fp32.
static inline Stream *stream_create(const char *name, ThreadPool *pool, const StreamPlace *place) {
    Stream *stream = (Stream *)memory_take(1, sizeof *stream);
    stream->name = name;
    stream->pool = pool;
    if (place != NULL) {
        stream->precision = place->precision;
        stream->prompt = place->high_priority;
    }
    if (place != NULL && gpu_is_used(place->gpu)) {
        stream->gpu = place->gpu;
        stream->queue = gpu_queue_create(place->high_priority);
    }
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC); // of event_wait's deadline
    pthread_mutex_init(&stream->mutex, NULL);
    pthread_cond_init(&stream->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    if (pthread_create(&stream->worker, NULL, stream_main, stream) == 0) { return stream; }
    free(stream);
    return NULL;
}

// Returns at once, unless the stream has STREAM_CAPACITY tasks already.
static inline void stream_run(Stream *stream, StreamTask task, void *context) {
    if (stream->simulator != NULL) {
        stream->simulator->run(stream->simulator->self, stream, task, context);
        return;
    }
    pthread_mutex_lock(&stream->mutex);
    while (stream->enqueued - stream->completed == STREAM_CAPACITY) {
        pthread_cond_wait(&stream->changed, &stream->mutex);
    }
    StreamEntry *entry = &stream->entries[stream->enqueued % STREAM_CAPACITY];
    entry->task = task;
    entry->context = context;
    stream->enqueued++;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->mutex);
}

// Runs what is still queued, then ends the worker.
static inline void stream_destroy(Stream *stream) {
    if (stream == NULL) { return; }
    pthread_mutex_lock(&stream->mutex);
    stream->stopping = true;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->mutex);
    pthread_join(stream->worker, NULL);
    if (stream->queue != NULL) { gpu_queue_destroy(stream->queue); }
    pthread_cond_destroy(&stream->changed);
    pthread_mutex_destroy(&stream->mutex);
    free(stream);
}

// ---------------------------------------------------------------------------------------
// Events

static inline void event_record(Event *event, Stream *stream) {
    event->stream = stream;
    if (stream->simulator != NULL) {
        stream->simulator->record(stream->simulator->self, event, stream);
        return;
    }
    pthread_mutex_lock(&stream->mutex);
    event->position = stream->enqueued;
    pthread_mutex_unlock(&stream->mutex);
}

// True when its latest recording has happened, and for an event that was never recorded.
static inline bool event_query(const Event *event) {
    Stream *stream = event->stream;
    if (stream == NULL) { return true; }
    if (stream->simulator != NULL) { return stream->simulator->has_happened(stream->simulator->self, event); }
    pthread_mutex_lock(&stream->mutex);
    bool happened = stream->completed >= event->position;
    pthread_mutex_unlock(&stream->mutex);
    return happened;
}

// Waits for the latest recording. False: `timeout_seconds`, rounded up, pass first.
static inline bool event_wait(const Event *event, double timeout_seconds) {
    Stream *stream = event->stream;
    if (stream == NULL) { return true; }
    if (stream->simulator != NULL) {
        stream->simulator->wait(stream->simulator->self, event);
        return true;
    }
    struct timespec deadline;
    clock_gettime(CLOCK_MONOTONIC, &deadline);
    deadline.tv_sec += (time_t)timeout_seconds + 1;
    pthread_mutex_lock(&stream->mutex);
    int status = 0;
    while (stream->completed < event->position && status != ETIMEDOUT) {
        status = pthread_cond_timedwait(&stream->changed, &stream->mutex, &deadline);
    }
    bool happened = stream->completed >= event->position;
    pthread_mutex_unlock(&stream->mutex);
    return happened;
}

#endif
