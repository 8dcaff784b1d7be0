// layout_flat.h: where an element of a rank's shard lies in the flat vector, for tests
// that look at single elements.
#pragma once

#include "comm/layout.h"

static inline size_t layout_flat(const Layout *layout, int rank, size_t own) {
    LayoutRange range = {.own = own};
    bool found = layout_next(layout, rank, own + 1, &range);
    assert(found && range.own == own);
    (void)found;
    return range.flat;
}
