// run.h: one run: what was asked for, what was chosen, what it lives on.
//
// Everything that is decided before training is decided here, in this order: model,
// rates, data, agreement between ranks, run directory, memory. Until memory is allocated,
// whatever is wrong with what the user asked for ends all ranks with one line and exit
// code 2; ranks meet in agree_or_exit, so that a mistake which only one of them can see
// (a file that is missing on its node) ends them all in order.
#ifndef ACCO_PROGRAM_RUN_H
#define ACCO_PROGRAM_RUN_H

#include "checkpoint/checkpoint.h"
#include "comm/transport_mpi.h"
#include "dataloader.h"
#include "gpt_neo.h"
#include "program/launch_checks.h"
#include "program/options.h"
#include "program/placement.h"
#include "program/signals.h"
#include "rules.h"
#include "runtime/log.h"

enum { ROLLBACK_PATIENCE = 3 }; // how often a spike may send a run back to the same checkpoint

// One run, or the plan of one. Everything that lives as long as the program does.
typedef struct Run {
    Options options;
    Transport transport;
    ThreadChoice threads;
    Placement placement;
    GptNeoConfig config;
    ParameterTable table;
    int B, T;
    const Rule *rule;
    DecayRange *decay_ranges;
    size_t layer_begins[GPT_NEO_MAX_LAYERS +
                        1]; // where each layer begins in the flat vector, and where the last one ends
    char rate_reason[64], bucket_reason[160];
    DataLoader data, validation_data; // the latter only with --val-data
    Arena arena;
    ThreadPool *pool;
    GptNeo model;
    Scheduler scheduler;
    int32_t *tokens, *targets; // (B, T): the batch of the compute stream
    // Rank 0 only.
    char directory[RUN_PATH_SIZE];
    Log log;
    Terminal terminal;
    // The report that is being collected, and clocks.
    double started, paused; // clock_seconds() at the start of training; seconds spent on validation since
    double seconds_before;  // of training before a checkpoint that this run goes on from
    SignalWatch signal_watch;
    double clock_offset, trace_began; // to rank 0's clock, and when that was
    CommitReport sum;                 // over the commits since the latest report
    int64_t sum_began_commit;         // those of the latest report
    double sum_began_gradients;
    int64_t commit_seen,
        reports_seen;             // the latest commit that was looked at; the scheduler's reports until then
    bool has_news;                // since the latest report
    CheckpointedRun checkpointed; // what its checkpoints are of (program/resume.h)
    double saving_seconds;        // training was blocked by the current save
    double spikes_seen;           // of the scheduler's
    int64_t rollback_commit; // that of the checkpoint which was gone back to last, and how often in a row
    int rollback_repeats;
    double sum_began;
    double validation_loss, perfect_validation_loss; // of the latest validation
} Run;

static inline bool run_is_main(const Run *run) { return run->transport.rank == 0; }

// Seconds of training, without validation, checkpoints and what came before; over all
// parts of a run that was resumed.
static inline double training_seconds(const Run *run) {
    return run->seconds_before + clock_seconds() - run->started - run->paused;
}

static inline int64_t tokens_per_micro_batch(const Run *run) { return (int64_t)run->B * run->T; }

#endif
