// options.h: what a user asked for: one field for every option of the program.
//
//   options_table.h   every option once: name, field, default, allowed values, help
//   options_parse.h   values as text and as JSON, the command line, the file of --config
//   options_check.h   options that are valid one by one and contradict each other
//   options_help.h    help by topic, docs/options.md
//
// Parser, help, documentation, config.json, log and checkpoints all follow the table.
#ifndef ACCO_OPTIONS_OPTIONS_H
#define ACCO_OPTIONS_OPTIONS_H

#include "rules.h"

#ifndef ACCO_VERSION
#define ACCO_VERSION "0.1.0"
#endif
// Facts about the build, from the Makefile; empty: not given.
#ifndef ACCO_REVISION
#define ACCO_REVISION ""
#endif
#ifndef ACCO_PROCESSOR
#define ACCO_PROCESSOR ""
#endif

// Those from COMMAND_HELP on take no options; help takes a topic.
typedef enum OptionsCommand {
    COMMAND_TRAIN,
    COMMAND_SAMPLE,
    COMMAND_EVAL,
    COMMAND_PLAN,
    COMMAND_TOKENIZE,
    COMMAND_AVERAGE,
    COMMAND_HELP,
    COMMAND_HELP_MARKDOWN,
    COMMAND_VERSION
} OptionsCommand;

// A choice is the index of a word in the table. The enums whose values they are have the
// same order: those below, and WireFormat, SpikePolicy, ScheduleKind, FragmentOrder.
typedef int OptionChoice;

enum { OPTIONS_AT_MOST = 128 }; // in the table

enum DeviceChoice { DEVICE_AUTO, DEVICE_CPU, DEVICE_CUDA };
enum PrecisionChoice { PRECISION_AUTO, PRECISION_ASK_FP32, PRECISION_ASK_BF16, PRECISION_FASTEST };
enum RateCounter { RATE_BY_GRADIENTS, RATE_BY_COMMITS };
enum DecayChoice { DECAY_MATRICES, DECAY_ALL };
enum InnerChoice { INNER_ADAMW, INNER_MUON };
enum ExchangeChoice { EXCHANGE_AUTO, EXCHANGE_FLAT, EXCHANGE_TWO_LEVEL, EXCHANGE_LIBRARY };
enum GpuExchange { GPU_EXCHANGE_AUTO, GPU_EXCHANGE_NCCL, GPU_EXCHANGE_HOST };

// Fields are called as their options, with underscores; lr, lr-by and min-lr are spelled
// out, and --optimizer is called rule.
typedef struct Options {
    OptionsCommand command;
    OptionText topic;  // of help; empty: the overview
    OptionText config; // the file that was read; empty: none
    OptionText kept;   // the file from which a resumed run took what was not given; empty: none

    // The update rule.
    OptionChoice rule;          // --optimizer: index of RULES
    int64_t accumulate;         // micro-batches per rank and commit (local rules: inner step); 0: auto
    OptionText rank_accumulate; // empty: accumulate for every rank; ask options_rank_accumulate
    OptionChoice wire;          // WireFormat
    OptionChoice exchange;      // ExchangeChoice
    bool overlap;
    double bucket_mb;   // 0: auto
    int64_t sequential; // commits; -1: as many as the warm-up
    RuleOptions rules;  // options that only some rules have

    // Model and data.
    OptionText tokenizer;             // empty: that of from
    OptionText model, from, finetune; // the latter two empty: random parameters; ask options_start
    OptionText data, val_data;        // val_data empty: hold out a tail of data
    int64_t micro_batch, seq_len;     // 0: auto
    int64_t tokens, seed;
    double epochs; // 0: not asked for, or counted: then tokens holds the result (choose_length)

    // Learning rate and AdamW.
    double learning_rate;          // 0: auto
    double minimum_learning_rate;  // -1: auto
    OptionChoice learning_rate_by; // RateCounter
    OptionChoice schedule;         // ScheduleKind
    OptionChoice decay;            // DecayChoice
    int64_t warmup;                // commits; -1: auto
    int64_t decay_tokens;          // 0: auto
    int64_t decay_now;             // 0: off, or done: then tokens and decay_tokens hold the result
    double weight_decay;           // -1: auto
    double beta1, beta2, eps;
    OptionChoice moments; // Precision
    OptionChoice inner;   // InnerChoice
    bool fresh_moments;
    double muon_momentum;
    int64_t muon_iterations;
    double grad_clip;      // 0: off
    OptionChoice on_spike; // SpikePolicy
    double spike_limit;    // 0: off

    // This machine.
    OptionChoice device;       // DeviceChoice
    OptionChoice precision;    // PrecisionChoice
    bool precision_kept;       // --precision fastest: the run that is resumed had chosen already
    OptionChoice recompute;    // 0: auto; otherwise a Recompute + 1
    OptionChoice gpu_exchange; // GpuExchange
    int64_t nccl_ctas;         // 0: placement.h chooses
    int64_t threads;           // 0: auto
    int64_t ranks;             // of a plan
    int64_t gpu_memory;        // bytes, of a plan; 0: of the GPU here
    int64_t ranks_per_host;    // 0: as they are
    double timeout_s;

    // Reports and files.
    int64_t report_every;
    int64_t val_every;     // 0: only at the end
    int64_t val_batches;   // 0: no validation
    OptionText out;        // "auto": runs/MODEL-OPTIMIZER-N
    OptionText save_every; // options_save_times reads it
    int64_t keep;
    int64_t keep_every; // 0: none
    bool keep_best;
    int64_t stop_after; // validations; 0: off
    int64_t last;       // checkpoints, of average
    OptionText resume;  // "off", "auto", or a checkpoint
    OptionText trace;   // empty: none

    // Evaluation and samples.
    OptionChoice task;     // EvaluateTask of eval.h
    int64_t stride;        // 0: half a context
    int64_t limit;         // 0: all
    int64_t sample_tokens; // 0: none
    int64_t sample_every;  // commits; 0: only at the end
    int64_t top_k;         // 0: off
    double temperature, top_p, repetition_penalty;
    OptionText prompt, prompts, system; // empty: none
    bool interactive;

    // Plans.
    OptionText like;                       // a run; empty: none
    double compute_ms, host_mbit, host_us; // 0: auto
    double gpu_tflops;                     // 0: unknown
    double inside_mbit, inside_us;         // the rate: 0: no limit
    bool fit;
    OptionText json, page; // files; empty: none

    // Emulated trouble.
    double link_mbit, link_us, chaos_ms; // 0: off
    int64_t slow_rank;                   // -1: none
    double slow_ms;

    // Of each option, by its place in the table: whether the program has chosen its value.
    bool chosen[OPTIONS_AT_MOST];
} Options;

static inline const Rule *options_rule(const Options *options) { return RULES[options->rule].rule; }

// The options of the run's rule: what its functions (rule.h) are given.
static inline void *options_of_rule(const Options *options) {
    return rule_own_options(options->rule, &options->rules);
}

// The directory of the model that training begins with; empty: random parameters.
static inline const char *options_start(const Options *options) {
    return options->finetune[0] != '\0' ? options->finetune : options->from;
}

// What names the model: --from, --finetune or --model.
static inline const char *options_model(const Options *options) {
    const char *start = options_start(options);
    return start[0] != '\0' ? start : options->model;
}

#endif
