// pace.h: how a pass over a model keeps pace with the communication that overlaps it.
//
// Parameters are stored in the order in which the forward pass uses them, so the backward
// pass finishes their gradients from the end:
//
//   forward    calls need(end) before it reads parameters [0, end); may wait for them
//   backward   calls finish(begin) when gradients from `begin` on are done; may send them
//
//   forward    | layer 0 | layer 1 | ...        | layer 1 | layer 0 |   backward
//              ^ need    ^ need                           ^ finish  ^ finish
//   exchange   ... parameters arrive             gradients are sent ...
//
// Without a Pace, or its functions (NULL), all parameters are there, and no one waits for gradients.
#pragma once

#include <stdbool.h>

#include "runtime/precision.h"

typedef struct Pace {
    void *self;
    uint64_t version; // of the parameters, above 0: it changes when they do
    // A sum of gradients begins with this pass: it sets all of them, whatever they held.
    bool begins;
    // Returns when parameters [0, end) may be read.
    void (*need)(void *self, size_t end);
    // Gradients from `begin` on will not change any more in this pass.
    void (*finish)(void *self, size_t begin);
} Pace;

// A model's copy of floats that it is given, in its own precision. A step of the optimizer can
// write it, too: then the model need not read the floats again.
typedef struct WeightCopy {
    Real *data;       // (parameter_count), in bf16; NULL: the model has none
    uint64_t version; // of the parameters that it is a copy of (Pace::version); 0: unknown
} WeightCopy;

static inline void pace_need(const Pace *pace, size_t end) {
    if (pace != NULL && pace->need != NULL) { pace->need(pace->self, end); }
}

static inline void pace_finish(const Pace *pace, size_t begin) {
    if (pace != NULL && pace->finish != NULL) { pace->finish(pace->self, begin); }
}
