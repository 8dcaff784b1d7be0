// fuzz_run_lock.h: the file OUT/lock of a run, which another program may have written. A
// process that has ended is never taken for a run that is alive, and whoever has the
// lock can be named in one line. The good ones are those whose owner was on another
// machine, and is watched.
#ifndef ACCO_TEST_FUZZ_FUZZ_RUN_LOCK_H
#define ACCO_TEST_FUZZ_FUZZ_RUN_LOCK_H

#include "program/run_lock.h"
#include "test/fuzz/fuzz.h"

// The input as if its owner had run on this machine, in a process that cannot exist.
static inline void fuzz_run_lock_ended(json_t *owner) {
    static ProcessName here; // asked for once: the kernel's files take longer than the rest
    if (here.boot[0] == '\0') { here = run_lock_process((int)getpid()); }
    json_object_set_new(owner, "boot", json_string(here.boot));
    json_object_set_new(owner, "space", json_string(here.space));
    json_object_set_new(owner, "pid", json_integer(-1));
    fuzz_require(run_lock_owner_here(owner) != 1, "a process that has ended is not alive");
}

static inline bool fuzz_run_lock(const uint8_t *data, size_t size) {
    FuzzPart part = {data, size};
    FuzzFile file;
    struct timespec touched;
    char text[RUN_LOCK_TEXT];
    Error error = {""};
    fuzz_file_open(&file, part);
    fuzz_require(run_lock_read(file.path, text, &touched), "the fuzzer can read its own files");
    fuzz_file_close(&file);
    json_t *owner = json_loads(text, 0, NULL);
    bool elsewhere = json_is_object(owner) && run_lock_owner_here(owner) < 0;
    run_lock_name_owner(owner, "out", &error);
    fuzz_accepted(false, &error);
    if (json_is_object(owner)) { fuzz_run_lock_ended(owner); }
    json_decref(owner);
    return elsewhere;
}

#endif
