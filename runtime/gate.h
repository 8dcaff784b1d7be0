// gate.h: how far one stream has come, for another that follows it piece by piece.
//
// A position that only grows between two resets. One thread moves it, another waits until it has passed a place. Events (device.h) mark
// points that the host has put into a stream; a gate marks progress inside one task, where nobody else knows the order of the work.
#ifndef ACCO_GATE_H
#define ACCO_GATE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GATE_OPEN SIZE_MAX

typedef struct Gate {
    pthread_mutex_t mutex;
    pthread_cond_t moved;
    size_t position;
} Gate;

static inline void gate_create(Gate *gate, size_t position) {
    pthread_mutex_init(&gate->mutex, NULL);
    pthread_cond_init(&gate->moved, NULL);
    gate->position = position;
}

static inline void gate_destroy(Gate *gate) {
    pthread_cond_destroy(&gate->moved);
    pthread_mutex_destroy(&gate->mutex);
}

// The only call that may take the position back: nobody waits at the gate.
static inline void gate_reset(Gate *gate, size_t position) {
    pthread_mutex_lock(&gate->mutex);
    gate->position = position;
    pthread_mutex_unlock(&gate->mutex);
}

static inline void gate_reach(Gate *gate, size_t position) {
    pthread_mutex_lock(&gate->mutex);
    if (position > gate->position) { gate->position = position; }
    pthread_cond_broadcast(&gate->moved);
    pthread_mutex_unlock(&gate->mutex);
}

static inline bool gate_has_reached(Gate *gate, size_t position) {
    pthread_mutex_lock(&gate->mutex);
    bool reached = gate->position >= position;
    pthread_mutex_unlock(&gate->mutex);
    return reached;
}

static inline void gate_await(Gate *gate, size_t position) {
    pthread_mutex_lock(&gate->mutex);
    while (gate->position < position) { pthread_cond_wait(&gate->moved, &gate->mutex); }
    pthread_mutex_unlock(&gate->mutex);
}

// How a pass over a model keeps pace with what runs beside it. Parameters lie in the order in which the forward pass uses them, so the
// backward pass finishes their gradients from the end. No Pace: everything is
// there, and nobody asks.
typedef struct Pace {
    void *self;
    uint64_t version;                         // of the parameters, above 0: it changes when they do
    void (*need)(void *self, size_t end);     // returns when parameters [0, end) may be read
    void (*finish)(void *self, size_t begin); // gradients from `begin` on will not change any more in this pass
} Pace;

static inline void pace_need(const Pace *pace, size_t end) {
    if (pace != NULL) { pace->need(pace->self, end); }
}

static inline void pace_finish(const Pace *pace, size_t begin) {
    if (pace != NULL) { pace->finish(pace->self, begin); }
}

#endif
