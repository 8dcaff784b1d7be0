// space.h: is there room on the disk for what a run will write? Asked before it trains,
// because a checkpoint that does not fit is noticed hours later.
#ifndef ACCO_PROGRAM_SPACE_H
#define ACCO_PROGRAM_SPACE_H

#include <sys/statvfs.h>

#include "program/setup.h"

// What checkpoints of a run take.
typedef struct SpaceNeed {
    size_t one;      // bytes of the largest checkpoint
    int64_t at_once; // how many will lie on the disk together, beside those that are there
    bool goes_on;    // from a checkpoint that is there
} SpaceNeed;

enum { SPACE_FOR_LOGS = 1 << 20 }; // bytes: log.jsonl and progress.tsv of a short run

// available: bytes. Refuses where not even one checkpoint fits, unless the run has one to go
// on from: a disk that fills while it trains would not end it either. warning <- a sentence
// where not all fit; empty: all do.
static inline bool space_judge(const SpaceNeed *need, size_t available, const char *directory,
                               char warning[SPACE_TEXT], Error *error) {
    char one[SIZE_TEXT], all[SIZE_TEXT], there[SIZE_TEXT];
    double wanted = (double)need->one * (double)need->at_once + SPACE_FOR_LOGS;
    warning[0] = '\0';
    if (need->at_once == 0 || (double)available >= wanted) { return true; }
    size_text(need->one + SPACE_FOR_LOGS, one);
    size_text((size_t)wanted, all);
    size_text(available, there);
    if (available < need->one + SPACE_FOR_LOGS) {
        error_set(error,
                  "--out %.300s has %s of free space, and a checkpoint and the log of this run take %s: free "
                  "some, choose another --out, or do without checkpoints by --save-every never",
                  directory, there, one);
        if (!need->goes_on) { return false; }
        snprintf(warning, SPACE_TEXT, "%.*s", SPACE_TEXT - 1, error->text);
        return true;
    }
    snprintf(warning, SPACE_TEXT,
             "%.200s has %s of free space, and %lld checkpoints and the log will want %s: a lower --keep or "
             "a rarer "
             "--save-every needs less",
             directory, there, (long long)need->at_once, all);
    return true;
}

// Before training. A new checkpoint is whole before an old one is removed. A run that is
// resumed where it had ended needs none, and one that goes on those of what is left. Where
// --epochs are still to be counted, nobody knows how many there will be.
static inline SpaceNeed space_need(const Run *run) {
    const Options *options = &run->options;
    SaveTimes times;
    SpaceNeed need = {0, 0, false};
    Error never = {""};
    options_save_times(options, &times, &never); // cannot fail: it has been checked
    if (times.never) { return need; }
    bool between = times.commits > 0 || times.seconds > 0; // while exchanges are under way
    bool counted = options->epochs == 0;
    CommitSet old = checkpoint_list(checkpoint_paths(run->directory, 0).folder);
    int64_t done = old.count > 0 ? old.commits[old.count - 1] : 0, left = nominal_commits(run) - done;
    int64_t saves = times.seconds > 0 || !counted ? INT64_MAX : 1;
    free(old.commits);
    if (counted && left <= 0) { return need; }
    if (counted && times.commits > 0) { saves += left / times.commits; }
    need.one = checkpoint_bytes(&run->scheduler, between);
    need.goes_on = old.count > 0;
    need.at_once = int64_min(saves, options->keep - int64_min(old.count, options->keep) + 1);
    if (counted && options->keep_every > 0) { need.at_once += left / options->keep_every; }
    return need;
}

// Rank 0, once there is a directory. A file system that does not tell is taken as it is.
static inline bool space_check(Run *run, Error *error) {
    struct statvfs disk;
    SpaceNeed need = space_need(run);
    if (statvfs(run->directory, &disk) != 0) { return true; }
    size_t available = (size_t)disk.f_bavail * (size_t)disk.f_frsize;
    return space_judge(&need, available, run->directory, run->space_warning, error);
}

#endif
