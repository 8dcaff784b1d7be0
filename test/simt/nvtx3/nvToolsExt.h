// nvToolsExt.h: stands in for the toolkit's header where kernels are emulated (simt.h).
// SIMT_RANGES in the environment names a file: a line is the name of a range that has
// ended. Ranges do not nest here.
#pragma once

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

inline const char *&simt_range() {
    static thread_local const char *name = nullptr;
    return name;
}

inline int nvtxRangePushA(const char *name) {
    assert(name != nullptr && simt_range() == nullptr);
    simt_range() = name;
    return 0;
}

inline int nvtxRangePop() {
    const char *path = getenv("SIMT_RANGES");
    assert(simt_range() != nullptr);
    FILE *file = path != nullptr ? fopen(path, "a") : nullptr;
    if (file != nullptr) {
        fprintf(file, "%s\n", simt_range());
        fclose(file);
    }
    simt_range() = nullptr;
    return 0;
}
