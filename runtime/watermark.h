// watermark.h: the progress of one stream, for another that follows it piece by piece.
//
// A watermark is a position that grows between resets. One thread raises it; others wait
// for a position, and then see everything that the first wrote before. Streams (device.h) count
// their tasks so.
#pragma once

#include <stddef.h>

#include "runtime/system.h"

#define WATERMARK_ALL SIZE_MAX

typedef struct Watermark {
    pthread_mutex_t mutex;
    pthread_cond_t moved;
    size_t position;
} Watermark;

static inline void watermark_create(Watermark *mark, size_t position) {
    pthread_mutex_init(&mark->mutex, NULL);
    condition_create(&mark->moved);
    mark->position = position;
}

static inline void watermark_destroy(Watermark *mark) {
    pthread_cond_destroy(&mark->moved);
    pthread_mutex_destroy(&mark->mutex);
}

// The only call that may lower the position. No thread may be waiting.
static inline void watermark_reset(Watermark *mark, size_t position) {
    pthread_mutex_lock(&mark->mutex);
    mark->position = position;
    pthread_mutex_unlock(&mark->mutex);
}

static inline void watermark_raise(Watermark *mark, size_t position) {
    pthread_mutex_lock(&mark->mutex);
    if (position > mark->position) { mark->position = position; }
    pthread_cond_broadcast(&mark->moved);
    pthread_mutex_unlock(&mark->mutex);
}

static inline bool watermark_has_reached(Watermark *mark, size_t position) {
    pthread_mutex_lock(&mark->mutex);
    bool reached = mark->position >= position;
    pthread_mutex_unlock(&mark->mutex);
    return reached;
}

// False: `timeout_seconds`, rounded up, pass first.
static inline bool watermark_wait_at_most(Watermark *mark, size_t position, double timeout_seconds) {
    struct timespec deadline;
    int status = 0;
    clock_gettime(CONDITION_CLOCK, &deadline);
    deadline.tv_sec += (time_t)timeout_seconds + 1;
    pthread_mutex_lock(&mark->mutex);
    while (mark->position < position && status != ETIMEDOUT) {
        status = pthread_cond_timedwait(&mark->moved, &mark->mutex, &deadline);
    }
    bool reached = mark->position >= position;
    pthread_mutex_unlock(&mark->mutex);
    return reached;
}

static inline void watermark_wait(Watermark *mark, size_t position) {
    watermark_wait_at_most(mark, position, 1e9);
}
