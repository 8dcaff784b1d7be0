// watermark.h: how far one stream has come, for another that follows it piece by piece.
//
// A position that only grows between two resets. One thread moves it, another waits until
// it has passed a place. Events (device.h) mark points that the host has put into a
// stream; a gate marks progress inside one task, where nobody else knows the order of the
// work.
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

static inline void watermark_create(Watermark *gate, size_t position) {
    pthread_mutex_init(&gate->mutex, NULL);
    pthread_cond_init(&gate->moved, NULL);
    gate->position = position;
}

static inline void watermark_destroy(Watermark *gate) {
    pthread_cond_destroy(&gate->moved);
    pthread_mutex_destroy(&gate->mutex);
}

// The only call that may take the position back: nobody waits at the gate.
static inline void watermark_reset(Watermark *gate, size_t position) {
    pthread_mutex_lock(&gate->mutex);
    gate->position = position;
    pthread_mutex_unlock(&gate->mutex);
}

static inline void watermark_raise(Watermark *gate, size_t position) {
    pthread_mutex_lock(&gate->mutex);
    if (position > gate->position) { gate->position = position; }
    pthread_cond_broadcast(&gate->moved);
    pthread_mutex_unlock(&gate->mutex);
}

static inline bool watermark_has_reached(Watermark *gate, size_t position) {
    pthread_mutex_lock(&gate->mutex);
    bool reached = gate->position >= position;
    pthread_mutex_unlock(&gate->mutex);
    return reached;
}

static inline void watermark_wait(Watermark *gate, size_t position) {
    pthread_mutex_lock(&gate->mutex);
    while (gate->position < position) { pthread_cond_wait(&gate->moved, &gate->mutex); }
    pthread_mutex_unlock(&gate->mutex);
}

#endif
