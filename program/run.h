// run.h: one run of the program: what was asked for, what was chosen, what it lives on.
//
// Everything that lives as long as the program does hangs on one Run, which main makes.
#pragma once

#include "checkpoint/load.h"
#include "comm/transport_mpi.h"
#include "options/options_check.h"
#include "options/options_help.h"
#include "program/launch_checks.h"
#include "program/placement.h"
#include "program/report.h"
#include "program/run_directory.h"
#include "program/signals.h"
#include "program/training_problem.h"
#include "rules.h"

// The time of training, which leaves out what is not training.
typedef struct TrainingClock {
    double started; // clock_seconds() at the start of training
    double paused;  // seconds since then that were not training: validation, checkpoints
    double before;  // seconds of training in earlier parts of a run that was resumed
} TrainingClock;

// When checkpoints are written, and how often a spike went back to one (resume.h).
typedef struct Saving {
    SaveTimes times;         // what --save-every says
    double began;            // clock_seconds() of the latest save, or of the start of training
    double seconds;          // for which training was blocked by the current save
    int64_t rollback_commit; // of the checkpoint that the latest rollback went to
    int rollback_repeats;    // how often in a row rollbacks went to it
} Saving;

// One run, or the plan of one.
typedef struct Run {
    // What was asked for and chosen. The texts say why, for the start-up block.
    Options options;
    const Rule *rule;
    ThreadChoice threads;
    Placement placement;
    ModelConfig config;
    TrainedPart part;         // what of the model is trained; the scheduler knows nothing else
    HfModel base;             // the model that training begins with, while some of it is frozen
    int B, T;                 // sequences in a micro-batch, tokens in a sequence
    OptimizerTensor *tensors; // (tensor_count): as the optimizer sees them
    int tensor_count;
    int *turn; // (ranks): SchedulerSettings::turn
    char rate_reason[64], bucket_reason[160], rule_reason[RULE_TEXT];
    // The other ranks, and signals from outside.
    Transport transport;
    SignalWatch signal_watch;
    ClockOffset clock_at_start; // with --trace: this rank's clock against rank 0's
    // What it trains with.
    DataLoader data, validation_data; // the latter only with --val-data
    char data_identity[DATA_IDENTITY_SIZE];
    Arena arena;
    ThreadPool *pool;
    Model model;
    Scheduler scheduler;
    TrainingProblem training; // the model and the data as the scheduler's problem
    TrainingClock clock;
    bool nothing_left;    // it was resumed where it had ended
    bool owes_validation; // it was resumed where it had been stopped in one
    // What it writes. Only rank 0 has files and a terminal.
    char directory[RUN_PATH_SIZE]; // all ranks know it
    Terminal terminal;
    Reports reports;
    bool trace_is_lost;
    // Checkpoints.
    CheckpointedRun checkpointed;       // what checkpoints are of (resume.h)
    CheckpointSource source;            // the checkpoint that --resume names, until it is loaded
    char tokenizer[RUN_PATH_SIZE + 16]; // with --resume: a copy of the tokenizer, for the next checkpoints
    Saving saving;
} Run;

static inline bool run_is_main(const Run *run) { return run->transport.rank == 0; }

// Seconds of training over all parts of a run that was resumed.
static inline double training_seconds(const TrainingClock *clock) {
    return clock->before + clock_seconds() - clock->started - clock->paused;
}

// A multiple of `every` lies in (before, now]: a local rule commits several at a time.
static inline bool is_due(int64_t before, int64_t now, int64_t every) {
    return every > 0 && now / every > before / every;
}

// --stop-after N: N validations in a row were no better than one before.
static inline bool has_stopped_improving(const Run *run) {
    return run->options.stop_after > 0 && run->checkpointed.worse >= run->options.stop_after;
}

// All --tokens were trained on.
static inline bool has_all_tokens(const Run *run) {
    return run->scheduler.gradients_done >= run->scheduler.settings.target;
}

static inline int64_t tokens_per_micro_batch(const Run *run) { return (int64_t)run->B * run->T; }

static inline int64_t tokens_done(const Run *run) {
    return (int64_t)run->scheduler.gradients_done * tokens_per_micro_batch(run);
}

// What one step of the optimizer is called where the user reads it.
static inline const char *step_name(const Rule *rule) {
    return rule->kind == RULE_LOCAL ? "inner step" : "commit";
}
