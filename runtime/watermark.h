// watermark.h: the progress of one stream, for another that follows it piece by piece.
//
// A watermark is a position that grows between resets. One thread raises it; others wait
// for a position, and then see everything that the first wrote before.
//
// Events (device.h) mark points between the tasks of a stream. A watermark marks progress
// inside one task, because only the task knows the order of its work.
#ifndef ACCO_RUNTIME_WATERMARK_H
#define ACCO_RUNTIME_WATERMARK_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define WATERMARK_ALL SIZE_MAX

typedef struct Watermark {
    pthread_mutex_t mutex;
    pthread_cond_t moved;
    size_t position;
} Watermark;

static inline void watermark_create(Watermark *mark, size_t position) {
    pthread_mutex_init(&mark->mutex, NULL);
    pthread_cond_init(&mark->moved, NULL);
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

static inline void watermark_wait(Watermark *mark, size_t position) {
    pthread_mutex_lock(&mark->mutex);
    while (mark->position < position) { pthread_cond_wait(&mark->moved, &mark->mutex); }
    pthread_mutex_unlock(&mark->mutex);
}

#endif
