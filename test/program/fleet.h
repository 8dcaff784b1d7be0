// fleet.h: several training runs at once, which saves time because mpirun mostly sleeps
// while it starts; comparisons of how they ended; and a pen to change checkpoints
// with.
#pragma once

#include "test/program/program.h"

#include <zlib.h>

#include "runtime/errors.h"
#include "test/rule_cases.h"

enum { FLEET = STAGE_PROGRAMS };

typedef struct Fleet {
    Stage *stage;
    int count;
    Training trainings[FLEET];
    json_t *events[FLEET];     // the logs, after fleet_finish
    Fingerprint prints[FLEET]; // of the final parameters, after fleet_finish
} Fleet;

// An empty fleet. It is static because it is too large for a stack: a test has one at a
// time, and the next fleet_new frees the logs of this one.
static inline Fleet *fleet_new(Stage *stage) {
    static Fleet fleet;
    for (int i = 0; i < fleet.count; i++) { json_decref(fleet.events[i]); }
    memset(&fleet, 0, sizeof fleet);
    fleet.stage = stage;
    return &fleet;
}

// Starts a run; returns its number.
PRINTF_LIKE(3, 4) static inline int fleet_start(Fleet *fleet, int ranks, const char *format, ...) {
    char options[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(options, sizeof options, format, arguments);
    va_end(arguments);
    assert_true(fleet->count < FLEET);
    fleet->trainings[fleet->count] = training_start(fleet->stage, ranks, options);
    return fleet->count++;
}

// Waits for all runs, which must end well.
static inline void fleet_finish(Fleet *fleet) {
    for (int i = 0; i < fleet->count; i++) {
        fleet->events[i] = training_finish(fleet->stage, &fleet->trainings[i]);
        fleet->prints[i] = log_fingerprint(fleet->events[i]);
    }
}

// What run `i` printed.
static inline const char *fleet_output(Fleet *fleet, int i) {
    return stage_read_text(fleet->stage, fleet->trainings[i].program.output_path);
}

// A number of the n-th event of a kind in the log of run `i`; n < 0 counts from the end.
static inline double fleet_number(const Fleet *fleet, int i, const char *kind, int n, const char *field) {
    return log_number(log_event_of(fleet->events[i], kind, n), field);
}

// Runs a and b must end with the same bits.
static inline void check_same(const Fleet *fleet, int a, int b) {
    if (strcmp(fleet->prints[a].text, fleet->prints[b].text) == 0) { return; }
    fail_msg("%s gives %s\n%s gives %s", fleet->trainings[a].what, fleet->prints[a].text,
             fleet->trainings[b].what, fleet->prints[b].text);
}

// Makes the checksum of a changed checkpoint.json right, as checkpoint.h does it: an
// attacker can do that too.
static inline void manifest_sign(json_t *manifest) {
    json_object_del(manifest, "checksum");
    char *text = json_dumps(manifest, JSON_COMPACT | JSON_SORT_KEYS);
    json_object_set_new(manifest, "checksum",
                        json_integer((json_int_t)crc32(0, (const unsigned char *)text, (uInt)strlen(text))));
    free(text);
}

// No two runs may end with the same bits.
static inline void check_all_differ(const Fleet *fleet) {
    for (int a = 0; a < fleet->count; a++) {
        for (int b = a + 1; b < fleet->count; b++) {
            if (strcmp(fleet->prints[a].text, fleet->prints[b].text) != 0) { continue; }
            fail_msg("both end with %s:\n%s\n%s", fleet->prints[a].text, fleet->trainings[a].what,
                     fleet->trainings[b].what);
        }
    }
}
