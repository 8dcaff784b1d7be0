// pace.h: how a pass over a model keeps pace with the communication beside it.
#ifndef ACCO_RUNTIME_PACE_H
#define ACCO_RUNTIME_PACE_H

#include <stddef.h>
#include <stdint.h>

// How a pass over a model keeps pace with what runs beside it. Parameters lie in the
// order in which the forward pass uses them, so the backward pass finishes their
// gradients from the end. No Pace: everything is
// there, and nobody asks.
typedef struct Pace {
    void *self;
    uint64_t version;                     // of the parameters, above 0: it changes when they do
    void (*need)(void *self, size_t end); // returns when parameters [0, end) may be read
    void (*finish)(void *self,
                   size_t begin); // gradients from `begin` on will not change any more in this pass
} Pace;

static inline void pace_need(const Pace *pace, size_t end) {
    if (pace != NULL) { pace->need(pace->self, end); }
}

static inline void pace_finish(const Pace *pace, size_t begin) {
    if (pace != NULL) { pace->finish(pace->self, begin); }
}

#endif
