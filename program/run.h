// run.h: one run of the program: what was asked for, what was chosen, what it lives on.
//
// Everything that lives as long as the program does hangs on one Run, which main makes
// and all commands share; there are no globals. The files of program/ fill it in this
// order:
//
//   options.h     options
//   placement.h   placement: device, precision, how GPUs exchange
//   setup.h       model, rates, data, memory
//   start.h       memory is allocated, the run directory and the log are opened
//   train_gpt.cu  training; its clock and the state of its reports
#ifndef ACCO_PROGRAM_RUN_H
#define ACCO_PROGRAM_RUN_H

#include "checkpoint/checkpoint.h"
#include "comm/transport_mpi.h"
#include "dataloader.h"
#include "gpt_neo.h"
#include "options/options_check.h"
#include "options/options_help.h"
#include "program/launch_checks.h"
#include "program/placement.h"
#include "program/progress.h"
#include "program/run_lock.h"
#include "program/signals.h"
#include "rules.h"
#include "runtime/nvml.h"

enum { SPACE_TEXT = 512 };
enum { ROLLBACK_PATIENCE = 3 }; // how often a spike may send a run back to the same checkpoint

// The commits since the latest report: what the next report is made of.
typedef struct ReportWindow {
    CommitReport sum;    // over these commits; losses summed over the predicted tokens
    bool has_commits;    // otherwise there is nothing to report
    int64_t from_commit; // where the latest report ended: CommitReport::commit
    double from_gradients;
    int64_t from_step; // how far the run had come when it was made
    double from_work, from_seconds;
    uint64_t from_micro_batches; // Scheduler::micro_batches_begun
} ReportWindow;

// How much of what the scheduler counts the loop has already looked at.
typedef struct SchedulerSeen {
    int64_t commit, reports;
    double spikes;
} SchedulerSeen;

// A micro-batch on the host.
typedef struct Batch {
    int32_t *tokens, *targets; // (B, T)
    double perfect_loss;       // of a perfect model; NAN: unknown
    uint64_t first_sample;     // in the global order
    bool is_filled;
} Batch;

// One run, or the plan of one.
typedef struct Run {
    Options options;
    Transport transport;
    SignalWatch signal_watch;
    // Chosen before training. The texts say why, for the start-up block.
    const Rule *rule;
    ThreadChoice threads;
    Placement placement;
    GptNeoConfig config;
    ParameterTable table;
    int B, T; // sequences in a micro-batch, tokens in a sequence
    DecayRange *decay_ranges;
    size_t layer_begins[GPT_NEO_MAX_LAYERS + 1]; // first element of each layer, and the end of the last one
    char rate_reason[64], bucket_reason[160], rule_reason[RULE_TEXT];
    double peak_flops; // of all ranks, a second: what model operations are compared with; NAN: not known
    // What it trains with.
    DataLoader data, validation_data; // the latter only with --val-data
    Arena arena;
    ThreadPool *pool;
    GptNeo model;
    ProductChoices products; // with --tune-products: the algorithms that rank 0 chose
    Scheduler scheduler;
    Batch batch;      // of the compute stream
    Batch next_batch; // on a GPU: it is filled while the GPU computes with `batch`
    // Its clock: training_seconds() reads it.
    double started;             // clock_seconds() at the start of training
    double paused;              // seconds since then that were not training: validation, checkpoints
    double seconds_before;      // of training in earlier parts of a run that was resumed
    ClockOffset clock_at_start; // with --trace: this rank's clock against that of rank 0
    // What it says. The files and the terminal are those of rank 0.
    char directory[RUN_PATH_SIZE];      // all ranks know it
    char tokenizer[RUN_PATH_SIZE + 16]; // with --resume: a copy of the tokenizer, for the next checkpoints
    RunLock lock;                       // on it
    char space_warning[SPACE_TEXT];     // its disk is too small for all that is to be kept; empty: it is not
    char shared_memory_warning[256];    // /dev/shm is too small; empty: it is not
    Log log, curves;                    // log.jsonl and progress.tsv
    bool disk_full;                     // lines of them wait for space
    Terminal terminal;
    ReportWindow window;
    SchedulerSeen seen;
    double validation_loss, perfect_validation_loss; // of the latest validation; NAN: there was none
    bool nothing_left;                               // it was resumed where it had ended
    bool is_unwritten;                               // nobody reads stdout any more
    int64_t lost_lines;                              // of its files, which could not be written
    bool trace_is_lost;
    Nvml nvml;              // of rank 0's GPU
    uint64_t throttle_told; // the reasons for a low clock that were printed
    double exposed_seconds; // of this part of the run: see CommitReport
    // Checkpoints.
    CheckpointedRun checkpointed; // what checkpoints are of (program/resume.h)
    SaveTimes save_times;         // what --save-every says
    double saving_began;          // clock_seconds() of the latest save, or of the start of training
    double saving_seconds;        // for which training was blocked by the current save
    int64_t rollback_commit;      // of the checkpoint that the latest rollback went to
    int rollback_repeats;         // how often in a row rollbacks went to it
} Run;

static inline bool run_is_main(const Run *run) { return run->transport.rank == 0; }

// Seconds of training over all parts of a run that was resumed, without validation and
// without waiting for checkpoints.
static inline double training_seconds(const Run *run) {
    return run->seconds_before + clock_seconds() - run->started - run->paused;
}

static inline int64_t tokens_per_micro_batch(const Run *run) { return (int64_t)run->B * run->T; }

// Tokens that all ranks together have trained on so far.
static inline int64_t tokens_done(const Run *run) {
    return (int64_t)run->scheduler.gradients_done * tokens_per_micro_batch(run);
}

// What one step of the optimizer is called where the user reads it.
static inline const char *step_name(const Run *run) {
    return run->rule->kind == RULE_LOCAL ? "inner step" : "commit";
}

#endif
