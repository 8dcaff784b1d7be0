// options.h: every option of the program, in one table.
//
// option_table is the only place where an option is written down: name, type, default,
// allowed values, help. From it come the parser of the command line and of the
// configuration file, --help, the README's tables, the file that a run saves and the
// log's start event, so that they cannot drift apart. To add an option, add a field to
// Options and a row to the table; the compiler checks that the types agree. The table
// also says which update rules an option is for: given with another rule it is refused,
// so that nobody tunes what has no effect. An option at its default passes with every
// rule, because a saved file holds them all.
//
//   options_parse    argv -> Options. --name value or --name=value; a leading word is the command; --config FILE holds `name = value`
//                    lines, and the command line wins over it wherever --config stands. A value that begins with -- needs --name=value
//   options_check    contradictions between options; options_check_ranks: those that show only when the number of ranks is known
//   options_save     the effective configuration with every option, which --config reads back bit for bit
//
// Nothing is changed silently: a value out of range, an unknown name or an option given
// twice is refused in one sentence that says what is allowed. Some numbers have a word
// for "the program decides" or "off": it is stored as 0 (--min-lr: -1, because 0 is a
// rate).
#ifndef ACCO_PROGRAM_OPTIONS_H
#define ACCO_PROGRAM_OPTIONS_H

#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/errors.h"
#include "runtime/log.h" // log_text
#include "runtime/names.h"

#ifndef ACCO_VERSION
#define ACCO_VERSION "0.1.0"
#endif

typedef char OptionText[1024];

// Those from COMMAND_HELP on take no options.
typedef enum OptionsCommand {
    COMMAND_TRAIN,
    COMMAND_PLAN,
    COMMAND_SAMPLE,
    COMMAND_EVAL,
    COMMAND_HELP,
    COMMAND_HELP_MARKDOWN,
    COMMAND_VERSION
} OptionsCommand;

// The option names with underscores and small letters; only lr, lr-by and min-lr are
// spelled out. Choices point into the table.
typedef struct Options {
    OptionsCommand command;
    OptionText config; // the file that was read, empty: none

    const char *rule; // the update rule
    int64_t
        accumulate; // micro-batches per rank and commit; co2, diloco, streaming-diloco: and inner step; 0: auto
    OptionText rank_accumulate; // empty: accumulate for every rank; ask options_rank_accumulate
    const char *wire;
    bool overlap;

    double bucket_mb;   // 0: auto
    int64_t sequential; // commits
    int64_t acco_init;  // micro-batches; 0: as many as in every half round
    const char *estimate_wire;

    int64_t co2_tau;                     // inner steps
    double co2_beta, co2_alpha, co2_phi; // co2_phi 0: off
    OptionText co2_gap;                  // ask options_co2_gap
    int64_t diloco_h;                    // inner steps
    double diloco_outer_lr, diloco_mu;
    int64_t streaming_p, streaming_tau; // fragments; inner steps
    double streaming_alpha;
    const char *streaming_order;

    OptionText tokenizer;                       // empty: that of from
    OptionText model, from, finetune;           // the latter two empty: random parameters; ask options_start
    OptionText data, val_data;                  // val_data empty: hold out a tail of data
    int64_t micro_batch, seq_len, tokens, seed; // micro_batch, seq_len 0: auto

    double learning_rate, minimum_learning_rate; // 0: auto; -1: auto
    const char *learning_rate_by, *schedule, *decay;
    int64_t warmup;                                    // commits; -1: auto
    double weight_decay, beta1, beta2, eps, grad_clip; // weight_decay -1: auto; grad_clip 0: off
    const char *on_spike;
    double spike_limit; // 0: off

    const char *task;      // of eval
    int64_t stride, limit; // 0: half a context; all
    const char *device, *precision, *recompute, *gpu_exchange;
    int64_t nccl_ctas; // 0: NCCL's own choice
    bool tune_products;
    int64_t threads; // 0: auto
    int64_t ranks;   // of a plan
    double timeout_s;

    int64_t report_every, val_every,
        val_batches;                      // val_every 0: only at the end; val_batches 0: no validation
    OptionText out;                       // "auto": runs/MODEL-OPTIMIZER-N
    int64_t save_every, keep, keep_every; // save_every 0: only at the end; keep_every 0: none
    OptionText resume;                    // "off", "auto", or a checkpoint
    OptionText trace;                     // empty: none

    int64_t sample_tokens, top_k; // 0: none; 0: off
    double temperature;
    OptionText prompt;

    double link_mbit, link_us, chaos_ms; // 0: off
    int64_t slow_rank;                   // -1: none
    double slow_ms;
} Options;

typedef enum OptionType {
    OPTION_INTEGER, // int64_t
    OPTION_COUNT,   // int64_t, may be written as 1500k, 1.5M, 2G
    OPTION_REAL,    // double
    OPTION_CHOICE,  // const char *, one of choices[]
    OPTION_SWITCH,  // bool, on or off
    OPTION_TEXT     // OptionText; minimum: its least length
} OptionType;

typedef enum OptionGroup {
    GROUP_RULE,
    GROUP_SHARED,
    GROUP_LOCAL,
    GROUP_DATA,
    GROUP_RATE,
    GROUP_MACHINE,
    GROUP_REPORT,
    GROUP_EVALUATION,
    GROUP_SAMPLE,
    GROUP_EMULATION,
    GROUP_COUNT
} OptionGroup;

enum {
    OPTION_CHOICES_MAX = 12,
    OPTION_QUOTED_SIZE = 4 * sizeof(OptionText) + 4,
    OPTION_VALUE_SIZE = 512,
    OPTION_LINE_SIZE = 8192
};

// Integers stay below 2^53, so that ranges can be doubles. Printed as "or more".
#define OPTION_NO_LIMIT 9007199254740992.0

typedef struct OptionSpec {
    const char *name;
    OptionGroup group;
    const char *rules; // the only rules that it is for, as "dpu, acco-wp or acco"; NULL: every rule
    OptionType type;
    size_t offset; // in Options
    const char *default_text;
    double minimum, maximum;
    const char *word; // stands for word_value, which may lie outside the range; NULL: no word
    double word_value;
    const char *choices[OPTION_CHOICES_MAX]; // NULL-terminated
    const char *metavariable;                // NULL: made from the choices
    const char *help;                        // the effect, and what it costs
} OptionSpec;

static inline const char *option_group_title(OptionGroup group) {
    static const char *const titles[GROUP_COUNT] = {"Update rule and exchange",
                                                    "Rules in which all ranks make one step together",
                                                    "Rules in which each rank takes steps of its own",
                                                    "Model and data",
                                                    "Learning rate and AdamW",
                                                    "This machine",
                                                    "Reports and files",
                                                    "Evaluation",
                                                    "Sample, after training or by itself",
                                                    "Emulated trouble"};
    return titles[group];
}

// The offset of a field; does not compile where the field is not of that type.
#define OPTION_FIELD(type, field) \
    (offsetof(Options, field) + 0 * sizeof(1 ? (type *)0 : &((Options *)0)->field))

// What stands between the rules and the help of a row: the type with the field, the
// default, the least and the most (of a text: the least length), what --help calls the
// value, and a word for one value. After the table they are gone.
#define NUMBER_OPTION(kind, type, field, value, least, most, metavariable, ...) \
    kind, OPTION_FIELD(type, field), value, least, most, __VA_ARGS__, {NULL}, metavariable
#define INTEGER_OPTION(...) NUMBER_OPTION(OPTION_INTEGER, int64_t, __VA_ARGS__)
#define COUNT_OPTION(...) NUMBER_OPTION(OPTION_COUNT, int64_t, __VA_ARGS__)
#define REAL_OPTION(...) NUMBER_OPTION(OPTION_REAL, double, __VA_ARGS__)
#define CHOICE_OPTION(field, value, ...) \
    OPTION_CHOICE, OPTION_FIELD(const char *, field), value, 0, 0, NO_WORD, {__VA_ARGS__}, NULL
#define SWITCH_OPTION(field, value) \
    OPTION_SWITCH, OPTION_FIELD(bool, field), value, 0, 0, NO_WORD, {NULL}, NULL
#define TEXT_OPTION(field, value, least_length, metavariable) \
    OPTION_TEXT, OPTION_FIELD(OptionText, field), value, least_length, 0, NO_WORD, {NULL}, metavariable
#define NO_WORD NULL, 0
#define EVERY_RULE NULL

static const OptionSpec option_table[] = {
    {"optimizer", GROUP_RULE, EVERY_RULE,
     CHOICE_OPTION(rule, "acco", "ddp", "zero1", "dpu", "acco-wp", "acco", "co2", "diloco",
                   "streaming-diloco"),
     "The update rule. ddp: every rank holds the whole optimizer state; zero1: a shard of it; both exchange "
     "during the backward pass. The "
     "next three hold a shard and exchange during the whole next batch. dpu: its gradients are one commit "
     "old; acco-wp: dpu with "
     "gradients at predicted parameters; acco: nothing is old, half of a batch is computed at an estimate of "
     "the parameters to come, at "
     "twice the traffic. The last three hold the whole state and exchange seldom, ranks differ in between. "
     "co2: hides the exchange, "
     "which counts one round later; diloco: waits for it; streaming-diloco: hides it, a fragment at a time."},
    {"accumulate", GROUP_RULE, EVERY_RULE, INTEGER_OPTION(accumulate, "2", 1, 1e6, "N", "auto", 0),
     "Micro-batches per rank and commit, for co2, diloco and streaming-diloco per inner step. acco spends "
     "half of them in each of its "
     "two half rounds, so there it is even. auto (acco, acco-wp, dpu): as many as fit while communication "
     "runs, at least one each time; "
     "then the batch varies and runs do not repeat bit for bit."},
    {"rank-accumulate", GROUP_RULE, "ddp, zero1, dpu, acco-wp or acco",
     TEXT_OPTION(rank_accumulate, "", 0, "LIST"),
     "Instead of --accumulate a number for each rank, as 4,4,1,1. Lets fast and slow ranks finish together; "
     "every micro-batch still "
     "weighs the same. For acco all are even."},
    {"wire", GROUP_RULE, EVERY_RULE, CHOICE_OPTION(wire, "fp32", "fp32", "bf16", "int8", "e3m0"),
     "Number format of what ranks send each other; sums are always fp32. bf16 halves the traffic and rounds "
     "every gradient and "
     "parameter. int8 is about a quarter and e3m0 (4 bits: a sign and a power of two) about an eighth, and "
     "coarser in that order: "
     "gradients travel in blocks of 256 with one scale, parameters as differences to what all ranks hold."},
    {"overlap", GROUP_RULE, EVERY_RULE, SWITCH_OPTION(overlap, "on"),
     "off waits for every operation before it starts the next: the same bits, slower; for finding out what "
     "overlap brings."},

    {"bucket-mb", GROUP_SHARED, "ddp or zero1", REAL_OPTION(bucket_mb, "auto", 1e-3, 1e6, "MB", "auto", 0),
     "Size of the buckets in which gradients are exchanged during the backward pass. Small ones leave "
     "earlier and cost more messages; "
     "large ones leave more to wait for at the end. auto: the program decides and prints it."},
    {"sequential", GROUP_SHARED, "dpu, acco-wp or acco",
     INTEGER_OPTION(sequential, "0", 0, OPTION_NO_LIMIT, "COMMITS", NO_WORD),
     "The first COMMITS run without overlap, like zero1: safer while the parameters move fastest, and slower "
     "for as long."},
    {"acco-init", GROUP_SHARED, "acco", INTEGER_OPTION(acco_init, "round", 1, 1e6, "N", "round", 0),
     "Micro-batches per rank of the very first half round, which no communication accompanies. round: as "
     "many as in every other, so that "
     "the first commit has a full batch; 1, as in the paper's code, starts sooner with a smaller one."},
    {"estimate-wire", GROUP_SHARED, "acco",
     CHOICE_OPTION(estimate_wire, "same", "same", "fp32", "bf16", "int8", "e3m0"),
     "Number format of the estimate's exchange, while the commit's stays at --wire. Coarser saves up to half "
     "of acco's traffic; it does "
     "not round the parameters, but half of the gradients are computed at a coarser estimate of them. same: "
     "that of --wire."},

    {"co2-tau", GROUP_LOCAL, "co2", INTEGER_OPTION(co2_tau, "12", 1, 1e6, "N", NO_WORD),
     "Inner steps of each rank between two exchanges (the paper's tau). More send less and give the exchange "
     "more time; the ranks drift "
     "further apart and hear later of each other."},
    {"co2-beta", GROUP_LOCAL, "co2", REAL_OPTION(co2_beta, "0", 0, 0.999999, "X", NO_WORD),
     "Momentum of the outer step (beta). More keeps the direction over rounds, and overshoots more, as what "
     "it hears is a round old: 0 "
     "for few ranks, 0.5 for 64."},
    {"co2-alpha", GROUP_LOCAL, "co2", REAL_OPTION(co2_alpha, "1", 1e-6, 100, "X", NO_WORD),
     "Length of the outer step (alpha). 1 goes as far as the ranks went on average; less is steadier and "
     "slower."},
    {"co2-phi", GROUP_LOCAL, "co2", REAL_OPTION(co2_phi, "off", 1e-12, 1e6, "X", "off", 0),
     "No element of the outer momentum is larger than this (phi). Lower tames spikes and may slow learning."},
    {"co2-gap", GROUP_LOCAL, "co2", TEXT_OPTION(co2_gap, "const:1", 1, "const:VALUE"),
     "Divides what the ranks did on average, because it is a round old (the gap penalty), by VALUE, 1 or "
     "more. Larger is steadier and "
     "slower."},
    {"diloco-H", GROUP_LOCAL, "diloco or streaming-diloco",
     INTEGER_OPTION(diloco_h, "30", 1, 1e6, "N", NO_WORD),
     "Inner steps of each rank between two exchanges (the paper's H), of streaming-diloco between two of the "
     "same fragment. More send "
     "less, and the ranks drift further apart."},
    {"diloco-outer-lr", GROUP_LOCAL, "diloco or streaming-diloco",
     REAL_OPTION(diloco_outer_lr, "0.7", 1e-6, 100, "RATE", NO_WORD),
     "Learning rate of the outer step, which follows what the ranks did on average. Lower is steadier and "
     "slower; 1 with --diloco-mu 0 "
     "is their plain average."},
    {"diloco-mu", GROUP_LOCAL, "diloco or streaming-diloco",
     REAL_OPTION(diloco_mu, "0.9", 0, 0.999999, "X", NO_WORD),
     "Nesterov momentum of the outer step (mu). Higher gains speed where the direction lasts and overshoots "
     "where it turns."},
    {"streaming-P", GROUP_LOCAL, "streaming-diloco", INTEGER_OPTION(streaming_p, "2", 1, 1e6, "N", NO_WORD),
     "Fragments of the model (P), exchanged one at a time, every H/P steps; H is a multiple of P. More make "
     "smaller bursts that are easier "
     "to hide, with the same traffic in all."},
    {"streaming-tau", GROUP_LOCAL, "streaming-diloco",
     INTEGER_OPTION(streaming_tau, "1", 0, 1e6, "N", NO_WORD),
     "Inner steps that an exchange may take while training goes on (tau), below H/P. More bears a slower "
     "network, and what arrives is as "
     "many steps old; 0 waits."},
    {"streaming-alpha", GROUP_LOCAL, "streaming-diloco",
     REAL_OPTION(streaming_alpha, "0.5", 0, 1, "X", NO_WORD),
     "Weight of a rank's own parameters when a fragment arrives (alpha). 0 takes the common ones and drops "
     "the steps made since sending; 1 "
     "keeps its own, and the ranks never meet."},
    {"streaming-order", GROUP_LOCAL, "streaming-diloco",
     CHOICE_OPTION(streaming_order, "strided", "strided", "sequential"),
     "Which layers make a fragment. strided: every P-th; sequential: neighbours. The traffic is the same, "
     "the trained model is not."},

    {"model", GROUP_DATA, EVERY_RULE, TEXT_OPTION(model, "tiny", 1, "NAME|PATH"),
     "A preset (tiny, 36M, 125M, 1.3B, 2.7B) or the path of a Hugging Face config.json with model_type "
     "gpt_neo."},
    {"from", GROUP_DATA, EVERY_RULE, TEXT_OPTION(from, "", 0, "DIR"),
     "A Hugging Face directory of a GPT-Neo model to begin with: config.json and model.safetensors; or a "
     "checkpoint, which holds one. --model "
     "may be left away."},
    {"finetune", GROUP_DATA, EVERY_RULE, TEXT_OPTION(finetune, "", 0, "DIR"),
     "--from DIR for teaching a finished model something more: --lr auto is then a tenth of what it is "
     "otherwise, --weight-decay auto 0. The "
     "optimizer begins anew; tokens that a shard's mask leaves out are read and not learnt."},
    {"data", GROUP_DATA, EVERY_RULE, TEXT_OPTION(data, "builtin", 1, "PATH|builtin"),
     "Training text: builtin is an endless source of small stories whose entropy is known; otherwise a text "
     "file, read as bytes, or "
     "token files (a glob in quotes names many)."},
    {"tokenizer", GROUP_DATA, EVERY_RULE, TEXT_OPTION(tokenizer, "", 0, "PATH"),
     "A byte-level BPE's tokenizer.json, or its directory: spells prompts and samples of models that read "
     "token ids, and goes with the "
     "model into checkpoints. Not given: that of --from, if there is one."},
    {"val-data", GROUP_DATA, EVERY_RULE, TEXT_OPTION(val_data, "", 0, "PATH"),
     "Validation text. Not given: the tail of --data is held out (of builtin: another stream)."},
    {"micro-batch", GROUP_DATA, EVERY_RULE, INTEGER_OPTION(micro_batch, "auto", 1, 65536, "N", "auto", 0),
     "Sequences that one rank computes at a time. More use the cores better and need more memory for "
     "activations. auto: 8, but 1 for "
     "models below 5 M parameters, which learn most from many small updates."},
    {"seq-len", GROUP_DATA, EVERY_RULE, INTEGER_OPTION(seq_len, "auto", 1, 1048576, "N", "auto", 0),
     "Tokens per sequence, at most the model's positions. auto: the model's positions, at most 1024."},
    {"tokens", GROUP_DATA, EVERY_RULE, COUNT_OPTION(tokens, "1500k", 1, OPTION_NO_LIMIT, "N", NO_WORD),
     "Length of the training in tokens over all ranks. k, M and G may follow the number: 1500k, 2M, 1.5G."},
    {"seed", GROUP_DATA, EVERY_RULE, INTEGER_OPTION(seed, "1", 0, 4294967295.0, "N", NO_WORD),
     "Decides the initial parameters, the order of the data and the sample. The same seed and ranks repeat a "
     "run bit for bit."},

    {"lr", GROUP_RATE, EVERY_RULE, REAL_OPTION(learning_rate, "auto", 1e-12, 100, "RATE", "auto", 0),
     "Peak learning rate. auto: chosen by the size of the model, and a tenth of that for --finetune."},
    {"min-lr", GROUP_RATE, EVERY_RULE, REAL_OPTION(minimum_learning_rate, "auto", 0, 100, "RATE", "auto", -1),
     "Learning rate at the end of the schedule. auto: a tenth of --lr."},
    {"lr-by", GROUP_RATE, EVERY_RULE, CHOICE_OPTION(learning_rate_by, "grads", "grads", "commits"),
     "What moves the schedule. grads: the micro-batches trained on, so that rules with other or varying "
     "batches are at the same rate "
     "after the same tokens; commits: the number of updates."},
    {"schedule", GROUP_RATE, EVERY_RULE, CHOICE_OPTION(schedule, "cosine", "cosine", "linear", "constant"),
     "Way from --lr to --min-lr after the warm-up. constant stays at --lr, which suits runs without a fixed "
     "end."},
    {"warmup", GROUP_RATE, EVERY_RULE,
     INTEGER_OPTION(warmup, "auto", 0, OPTION_NO_LIMIT, "COMMITS", "auto", -1),
     "The learning rate rises linearly over the first COMMITS updates. Longer is safer at a high rate and "
     "slower at the start. auto: a "
     "twentieth of the run, at most 1000."},
    {"weight-decay", GROUP_RATE, EVERY_RULE, REAL_OPTION(weight_decay, "auto", 0, 100, "X", "auto", -1),
     "AdamW shrinks the parameters by this times the learning rate at each commit. auto: 0.1, for --finetune "
     "0."},
    {"decay", GROUP_RATE, EVERY_RULE, CHOICE_OPTION(decay, "matrices", "matrices", "all"),
     "What decays: weight matrices and embeddings only, or biases and normalisation as well."},
    {"beta1", GROUP_RATE, EVERY_RULE, REAL_OPTION(beta1, "0.9", 0, 0.999999, "X", NO_WORD),
     "Memory of AdamW's mean gradient. Higher is smoother and slower to turn."},
    {"beta2", GROUP_RATE, EVERY_RULE, REAL_OPTION(beta2, "0.95", 0, 0.999999, "X", NO_WORD),
     "Memory of AdamW's mean squared gradient. Higher is steadier, lower recovers faster from a spike."},
    {"eps", GROUP_RATE, EVERY_RULE, REAL_OPTION(eps, "1e-8", 1e-30, 1, "X", NO_WORD),
     "Added to AdamW's divisor. Larger damps parameters whose gradients are tiny."},
    {"grad-clip", GROUP_RATE, EVERY_RULE, REAL_OPTION(grad_clip, "1", 0, 1e6, "NORM", "off", 0),
     "A gradient whose global norm is larger is scaled down to it. Lower tames spikes and may slow "
     "learning."},
    {"on-spike", GROUP_RATE, EVERY_RULE, CHOICE_OPTION(on_spike, "stop", "stop", "skip", "rollback"),
     "What to do when a loss or gradient is not finite or, by --spike-limit, too large. Nothing is ever "
     "stepped with it, and rank, batch "
     "and tensor are named (of what is only large: the rank). stop: end the run. skip: leave the step and "
     "its data out, up to ten in a row. rollback: go back to the latest "
     "checkpoint, and on with the data that come now."},
    {"spike-limit", GROUP_RATE, EVERY_RULE, REAL_OPTION(spike_limit, "off", 1, 1000, "X", "off", 0),
     "A loss or gradient norm is too large when its logarithm is X standard deviations above the mean of the "
     "latest hundred or so. Lower "
     "catches more, and more that is harmless: 6 is seldom wrong. off: only what is not finite is a spike."},

    {"device", GROUP_MACHINE, EVERY_RULE, CHOICE_OPTION(device, "auto", "auto", "cpu", "cuda"),
     "Where a rank computes. auto: on a GPU where the program was built for it and the node has one, which "
     "its ranks share out in turn; "
     "otherwise on the CPU. Ranks of one run may differ."},
    {"precision", GROUP_MACHINE, EVERY_RULE, CHOICE_OPTION(precision, "auto", "auto", "fp32", "bf16", "fp16"),
     "Number format of weights and activations; sums, master parameters, moments and gradients are fp32 "
     "always. auto: bf16 on a GPU, fp32 "
     "on a CPU, where bf16 arithmetic is slower and refused. fp32 on a GPU is for comparisons: exact, and "
     "many times slower. fp16 is "
     "refused with the reason."},
    {"recompute", GROUP_MACHINE, EVERY_RULE,
     CHOICE_OPTION(recompute, "auto", "auto", "none", "gelu", "layernorm", "block"),
     "What the backward pass makes again instead of finding it in memory: the outputs of GELU; those of the "
     "LayerNorms, too; or whole "
     "layers, which costs a third more time for a fraction of the memory. auto: the least that fits into the "
     "GPU. On a CPU: none or "
     "block, and auto is none."},
    {"gpu-exchange", GROUP_MACHINE, EVERY_RULE, CHOICE_OPTION(gpu_exchange, "auto", "auto", "nccl", "host"),
     "How GPUs send each other what --wire encodes. nccl: directly, every rank needs a GPU of its own. host: "
     "through host memory and MPI, "
     "which leaves the GPU's processors alone. auto: nccl where it can be. Both give the same bits."},
    {"nccl-ctas", GROUP_MACHINE, EVERY_RULE, INTEGER_OPTION(nccl_ctas, "auto", 1, 1024, "N", "auto", 0),
     "Processors of the GPU that NCCL may take from the computation beside it. Fewer leave more for products "
     "and may not fill a fast "
     "link. auto: as NCCL sees fit."},
    {"tune-products", GROUP_MACHINE, EVERY_RULE, SWITCH_OPTION(tune_products, "off"),
     "on: a GPU's library of matrix products is timed at the start and the quickest of its algorithms taken "
     "for each shape. What is "
     "quickest may change from run to run, and with it the last bits. off: its first offer, so that runs "
     "repeat bit for bit."},
    {"threads", GROUP_MACHINE, EVERY_RULE, INTEGER_OPTION(threads, "auto", 1, 4096, "N", "auto", 0),
     "Threads per rank that compute. auto: the cores of the node divided by its ranks, or those that the "
     "launcher bound this rank to."},
    {"ranks", GROUP_MACHINE, EVERY_RULE, INTEGER_OPTION(ranks, "1", 1, 1e6, "N", NO_WORD),
     "How many ranks `train_gpt plan` plans for. A run has as many as mpirun or srun started."},
    {"timeout-s", GROUP_MACHINE, EVERY_RULE, REAL_OPTION(timeout_s, "300", 1, 1e6, "SECONDS", NO_WORD),
     "A collective operation that waits longer than this ends the whole job and names the ranks that did not "
     "arrive."},

    {"report-every", GROUP_REPORT, EVERY_RULE,
     INTEGER_OPTION(report_every, "10", 1, OPTION_NO_LIMIT, "COMMITS", NO_WORD),
     "Commits between two reports on the terminal and in the log."},
    {"val-every", GROUP_REPORT, EVERY_RULE,
     INTEGER_OPTION(val_every, "50", 1, OPTION_NO_LIMIT, "COMMITS", "end", 0),
     "Commits between two validations, which cost a forward pass of --val-batches each. end: only at the "
     "end."},
    {"val-batches", GROUP_REPORT, EVERY_RULE, INTEGER_OPTION(val_batches, "16", 1, 1e6, "N", "none", 0),
     "Micro-batches, over all ranks, of one validation. More are less noisy and take longer; none: no "
     "validation."},
    {"save-every", GROUP_REPORT, EVERY_RULE,
     INTEGER_OPTION(save_every, "end", 1, OPTION_NO_LIMIT, "COMMITS", "end", 0),
     "Commits between two checkpoints in OUT/checkpoints, about 16 bytes a parameter each, written beside "
     "training where there is memory "
     "for a copy. end: only at the end, and when SIGUSR1 or SIGTERM asks the run to stop (exit code 75: "
     "start it again with --resume "
     "auto)."},
    {"keep", GROUP_REPORT, EVERY_RULE, INTEGER_OPTION(keep, "2", 1, 1e6, "N", NO_WORD),
     "The latest checkpoints that are kept."},
    {"keep-every", GROUP_REPORT, EVERY_RULE,
     INTEGER_OPTION(keep_every, "off", 1, OPTION_NO_LIMIT, "COMMITS", "off", 0),
     "Checkpoints at multiples of so many commits are kept as well."},
    {"resume", GROUP_REPORT, EVERY_RULE, TEXT_OPTION(resume, "off", 1, "off|auto|PATH"),
     "Goes on from a checkpoint. auto: the newest good one in --out, where the log goes on too; without one "
     "a new run begins. PATH: that "
     "one, in a new --out. Ranks, rule and device may be others; what is not exact then is said."},
    {"out", GROUP_REPORT, EVERY_RULE, TEXT_OPTION(out, "auto", 1, "DIR|auto"),
     "The run's directory, made with its parents; one that holds a run is refused. auto: "
     "runs/MODEL-OPTIMIZER-N with the first free N."},
    {"trace", GROUP_REPORT, EVERY_RULE, TEXT_OPTION(trace, "", 0, "FILE"),
     "Writes what both streams of every rank do and when, as Chrome trace JSON, which ui.perfetto.dev shows. "
     "It grows with every commit: "
     "for short runs."},
    {"config", GROUP_REPORT, EVERY_RULE, TEXT_OPTION(config, "", 1, "FILE"),
     "Reads options from lines `name = value`, with # before comments; a run saves such a file. The command "
     "line wins over it."},

    {"task", GROUP_EVALUATION, EVERY_RULE,
     CHOICE_OPTION(task, "perplexity", "perplexity", "lambada", "hellaswag"),
     "What train_gpt eval measures on --data: the perplexity of a text or of tokens; LAMBADA or HellaSwag on "
     "their JSON lines, counted as "
     "lm-evaluation-harness does. --seq-len is the longest context."},
    {"stride", GROUP_EVALUATION, EVERY_RULE, INTEGER_OPTION(stride, "half", 1, 1048576, "N", "half", 0),
     "Tokens between two windows of a perplexity: fewer give every token more context and take longer. half: "
     "half of a window."},
    {"limit", GROUP_EVALUATION, EVERY_RULE, INTEGER_OPTION(limit, "all", 1, OPTION_NO_LIMIT, "N", "all", 0),
     "Only the first N windows or lines."},

    {"sample-tokens", GROUP_SAMPLE, EVERY_RULE, COUNT_OPTION(sample_tokens, "256", 1, 1e6, "N", "none", 0),
     "Tokens of text that the trained model writes at the end; fewer where it ends the text by itself."},
    {"temperature", GROUP_SAMPLE, EVERY_RULE, REAL_OPTION(temperature, "0.8", 0, 100, "X", NO_WORD),
     "Lower is safer and duller, higher wilder; 0 always takes the likeliest token."},
    {"top-k", GROUP_SAMPLE, EVERY_RULE, INTEGER_OPTION(top_k, "40", 1, 1e6, "N", "off", 0),
     "Chooses among the N likeliest tokens only, which keeps freak tokens out."},
    {"prompt", GROUP_SAMPLE, EVERY_RULE, TEXT_OPTION(prompt, "", 0, "TEXT"),
     "What the sample begins with. Empty: the model begins on its own. Token ids need a --tokenizer."},

    {"link-mbit", GROUP_EMULATION, EVERY_RULE, REAL_OPTION(link_mbit, "off", 1e-3, 1e6, "MBIT", "off", 0),
     "Emulates a slow network: no rank sends more than MBIT million bits a second."},
    {"link-us", GROUP_EMULATION, EVERY_RULE, REAL_OPTION(link_us, "off", 1e-3, 1e6, "US", "off", 0),
     "Emulates a distant network: every message arrives US microseconds later. Many small messages suffer "
     "most."},
    {"chaos-ms", GROUP_EMULATION, EVERY_RULE, REAL_OPTION(chaos_ms, "off", 1e-3, 6e4, "MS", "off", 0),
     "A random delay of up to MS milliseconds before every communication job. Results must not change by a "
     "bit: a test of the "
     "scheduler."},
    {"slow-rank", GROUP_EMULATION, EVERY_RULE, INTEGER_OPTION(slow_rank, "none", 0, 1e6, "RANK", "none", -1),
     "Emulates one slow machine: this rank sleeps --slow-ms at every micro-batch."},
    {"slow-ms", GROUP_EMULATION, EVERY_RULE, REAL_OPTION(slow_ms, "0", 0, 1e6, "MS", NO_WORD),
     "How long --slow-rank sleeps at every micro-batch, in milliseconds."},
};

#undef NUMBER_OPTION
#undef INTEGER_OPTION
#undef COUNT_OPTION
#undef REAL_OPTION
#undef CHOICE_OPTION
#undef SWITCH_OPTION
#undef TEXT_OPTION
#undef NO_WORD
#undef EVERY_RULE

enum { OPTION_COUNT_OF_TABLE = sizeof option_table / sizeof option_table[0] };

// ---------------------------------------------------------------------------------------
// Names

static inline const OptionSpec *option_find(const char *name) {
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
        if (strcmp(option_table[i].name, name) == 0) { return &option_table[i]; }
    }
    return NULL;
}

// `dashes`: "--" on the command line, "" in a file.
static inline bool option_unknown(const char *written, const char *dashes, Error *error) {
    const char *names[OPTION_COUNT_OF_TABLE + 2];
    char excerpt[64];
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) { names[i] = option_table[i].name; }
    names[OPTION_COUNT_OF_TABLE] = "help";
    names[OPTION_COUNT_OF_TABLE + 1] = "version";
    const char *nearest = nearest_name(written + strspn(written, "-"), names,
                                       OPTION_COUNT_OF_TABLE + (*dashes != '\0' ? 2 : 0));
    text_excerpt(written, excerpt);
    if (nearest == NULL) { return error_set(error, "unknown option %s (--help lists all)", excerpt); }
    return error_set(error, "unknown option %s: did you mean %s%s? (--help lists all)", excerpt, dashes,
                     nearest);
}

// ---------------------------------------------------------------------------------------
// Values

static inline void *option_field(const OptionSpec *option, Options *options) {
    return (char *)options + option->offset;
}
static inline const void *option_field_const(const OptionSpec *option, const Options *options) {
    return (const char *)options + option->offset;
}

// "auto or 1 .. 4096", "end, or 1 or more", "fp32, bf16 or fp16", "on or off"; empty for
// texts.
static inline const char *option_allowed(const OptionSpec *option, char text[OPTION_VALUE_SIZE]) {
    int length = 0;
    text[0] = '\0';
    if (option->type == OPTION_SWITCH) {
        snprintf(text, OPTION_VALUE_SIZE, "on or off");
    } else if (option->type == OPTION_CHOICE) {
        for (int i = 0; option->choices[i] != NULL; i++) {
            const char *between = i == 0 ? "" : option->choices[i + 1] == NULL ? " or " : ", ";
            length += snprintf(text + length, (size_t)(OPTION_VALUE_SIZE - length), "%s%s", between,
                               option->choices[i]);
        }
    } else if (option->type != OPTION_TEXT) {
        bool no_limit = option->maximum == OPTION_NO_LIMIT;
        if (option->word != NULL) {
            length = snprintf(text, OPTION_VALUE_SIZE, "%s%s or ", option->word, no_limit ? "," : "");
        }
        if (no_limit) {
            snprintf(text + length, (size_t)(OPTION_VALUE_SIZE - length), "%.15g or more", option->minimum);
        } else {
            snprintf(text + length, (size_t)(OPTION_VALUE_SIZE - length), "%.15g .. %.15g", option->minimum,
                     option->maximum);
        }
    }
    return text;
}

// The sentence for a value that cannot be taken: what was written, what is wrong with it,
// what is allowed.
static inline bool option_refuse(const OptionSpec *option, const char *written, const char *why,
                                 Error *error) {
    char allowed[OPTION_VALUE_SIZE], excerpt[64];
    return error_set(error, "--%s: %s %s; allowed: %s", option->name, text_excerpt(written, excerpt), why,
                     option_allowed(option, allowed));
}

// A decimal number and nothing else: no blanks, no hexadecimal, no nan or inf. `end`
// receives what follows the digits.
static inline bool option_read_real(const char *text, double *value, const char **end) {
    size_t length = strspn(text, "0123456789+-.eE");
    char *stop;
    errno = 0;
    *value = strtod(text, &stop);
    *end = stop;
    return length > 0 && stop != text && stop <= text + length && errno == 0;
}

// A whole number; for counts also 1500k, 1.5M, 2G and 1e6, as long as the result is
// whole. errno tells ERANGE from bad syntax.
static inline bool option_read_integer(const char *text, bool is_count, int64_t *value) {
    static const char suffixes[] = "kKMG";
    static const double factors[] = {1e3, 1e3, 1e6, 1e9};
    const char *end;
    double real;
    if (!is_count) {
        char *stop;
        errno = 0;
        *value = (int64_t)strtoll(text, &stop, 10);
        return !isspace((unsigned char)*text) && stop != text && *stop == '\0' && errno == 0;
    }
    if (!option_read_real(text, &real, &end)) { return false; }
    if (*end != '\0') {
        const char *suffix = strchr(suffixes, *end);
        if (suffix == NULL || end[1] != '\0') { return false; }
        real *= factors[suffix - suffixes];
    }
    double whole = nearbyint(real); // 1.001M is not exact in binary, hence the tolerance
    if (!(fabs(real - whole) <= 1e-9 * fabs(real))) { return false; }
    if (!(fabs(whole) <= OPTION_NO_LIMIT)) {
        errno = ERANGE;
        return false;
    }
    *value = (int64_t)whole;
    return true;
}

// Whether 0 may be written instead of the word: for off, none and end it says the same.
// "auto" and "round" have no number, because a user who writes --threads 0 may well mean
// something else.
static inline bool option_zero_is_word(const OptionSpec *option) {
    return option->word != NULL && option->word_value == 0 && strcmp(option->word, "auto") != 0 &&
           strcmp(option->word, "round") != 0;
}

// The word first, then the number and its range.
static inline bool option_set_number(const OptionSpec *option, Options *options, const char *text,
                                     Error *error) {
    int64_t integer = 0;
    double real = 0;
    const char *end = "";
    bool is_real = option->type == OPTION_REAL;
    if (option->word != NULL && strcmp(text, option->word) == 0) {
        real = option->word_value;
        integer = (int64_t)option->word_value;
    } else {
        bool valid = is_real ? option_read_real(text, &real, &end) && *end == '\0'
                             : option_read_integer(text, option->type == OPTION_COUNT, &integer);
        double value = is_real ? real : (double)integer;
        bool is_off = value == 0 && option_zero_is_word(option);
        bool in_range = (value >= option->minimum && value <= option->maximum) || is_off;
        if (!valid && errno != ERANGE) {
            return option_refuse(option, text, is_real ? "is not a number" : "is not a whole number", error);
        }
        if (!valid || !in_range) { return option_refuse(option, text, "is out of range", error); }
    }
    if (is_real) {
        *(double *)option_field(option, options) = real == 0 ? 0 : real; // no negative zero
    } else {
        *(int64_t *)option_field(option, options) = integer;
    }
    return true;
}

// The field gets the table's own string, so that choices may be kept and compared by
// whoever holds the options.
static inline bool option_set_choice(const OptionSpec *option, Options *options, const char *text,
                                     Error *error) {
    int count = 0;
    for (; option->choices[count] != NULL; count++) {
        if (strcmp(option->choices[count], text) == 0) {
            *(const char **)option_field(option, options) = option->choices[count];
            return true;
        }
    }
    const char *nearest = nearest_name(text, option->choices, count);
    if (nearest == NULL) { return option_refuse(option, text, "is unknown", error); }
    char why[96];
    snprintf(why, sizeof why, "is unknown (did you mean %.32s?)", nearest);
    return option_refuse(option, text, why, error);
}

static inline bool option_set_text(const OptionSpec *option, Options *options, const char *text,
                                   Error *error) {
    size_t length = strlen(text);
    if (length >= sizeof(OptionText)) {
        return error_set(error, "--%s: the text is longer than %zu bytes", option->name,
                         sizeof(OptionText) - 1);
    }
    if ((double)length < option->minimum) {
        return error_set(error, "--%s needs a value: --%s %s", option->name, option->name,
                         option->metavariable);
    }
    memset(option_field(option, options), 0, sizeof(OptionText)); // so that equal options are equal bytes
    memcpy(option_field(option, options), text, length);
    return true;
}

// Sets one field from text. The error names the option but not where the text came from.
static inline bool option_set(const OptionSpec *option, Options *options, const char *text, Error *error) {
    if (option->type == OPTION_TEXT) { return option_set_text(option, options, text, error); }
    if (option->type == OPTION_CHOICE) { return option_set_choice(option, options, text, error); }
    if (option->type != OPTION_SWITCH) { return option_set_number(option, options, text, error); }
    bool on = strcmp(text, "on") == 0;
    if (!on && strcmp(text, "off") != 0) {
        return option_refuse(option, text, "is neither on nor off", error);
    }
    *(bool *)option_field(option, options) = on;
    return true;
}

// Every option at its default, the command train.
static inline void options_defaults(Options *options) {
    Error error;
    memset(options, 0, sizeof *options);
    options->command = COMMAND_TRAIN;
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
        if (option_table[i].offset == offsetof(Options, config)) { continue; }
        bool valid = option_set(&option_table[i], options, option_table[i].default_text, &error);
        assert(valid && "a default is outside its own range");
        (void)valid;
    }
}

// ---------------------------------------------------------------------------------------
// The configuration file

// Reads a line without its end. 1: a line, 0: end of file, -1: the line is too long or
// holds a zero byte, -2: the system cannot read.
static inline int options_read_line(FILE *file, char line[OPTION_LINE_SIZE]) {
    int length = 0, c;
    while ((c = fgetc(file)) != EOF && c != '\n') {
        if (c == 0 || length == OPTION_LINE_SIZE - 1) { return -1; }
        line[length++] = (char)c;
    }
    line[length] = '\0';
    return ferror(file) ? -2 : c == EOF && length == 0 ? 0 : 1;
}

// Cuts blanks off both ends, in place; returns the new start.
static inline char *options_trim(char *text) {
    text += strspn(text, " \t\r");
    size_t length = strlen(text);
    while (length > 0 && strchr(" \t\r", text[length - 1]) != NULL) { length--; }
    text[length] = '\0';
    return text;
}

static inline int option_hex_digit(char c) {
    const char *digits = "0123456789abcdef";
    const char *found = c == '\0' ? NULL : strchr(digits, tolower((unsigned char)c));
    return found == NULL ? -1 : (int)(found - digits);
}

// A value in double quotes with \" \\ \n \t \r and \xHH, decoded in place. `text` points
// at the opening quote; only a comment may follow the closing one. Returns the value,
// NULL where it is not well formed.
static inline char *options_unquote(char *text) {
    char *out = text, *in = text + 1;
    for (; *in != '"' && *in != '\0'; in++) {
        if (*in != '\\') {
            *out++ = *in;
            continue;
        }
        in++;
        if (*in == 'x') {
            int high = option_hex_digit(in[1]), low = high < 0 ? -1 : option_hex_digit(in[2]);
            if (low < 0 || high + low == 0) { return NULL; }
            *out++ = (char)(16 * high + low);
            in += 2;
            continue;
        }
        const char *escapes = "\"\\ntr", *found = *in == '\0' ? NULL : strchr(escapes, *in);
        if (found == NULL) { return NULL; }
        *out++ = "\"\\\n\t\r"[found - escapes];
    }
    if (*in != '"') { return NULL; }
    const char *rest = in + 1 + strspn(in + 1, " \t\r");
    *out = '\0';
    return *rest == '\0' || *rest == '#' ? text : NULL;
}

// Splits `name = value # comment` in place. Returns false with a message where the line
// is no such thing; *name NULL: nothing on the line. A # begins a comment at the start of
// a word, so file#1.txt is a value.
static inline bool options_split_line(char *line, char **name, char **value, Error *error) {
    *name = NULL;
    line = options_trim(line);
    if (*line == '\0' || *line == '#') { return true; }
    char excerpt[64], *equals = strchr(line, '=');
    if (equals == NULL) {
        return error_set(error, "expected name = value, found %s", text_excerpt(line, excerpt));
    }
    *equals = '\0';
    *name = options_trim(line);
    char *text = options_trim(equals + 1);
    if (*text == '"') {
        *value = options_unquote(text);
        if (*value == NULL) {
            return error_set(error, "%s: the quoted value is not well formed", text_excerpt(*name, excerpt));
        }
        return true;
    }
    for (char *position = text; *position != '\0'; position++) {
        if (*position == '#' && (position == text || strchr(" \t", position[-1]) != NULL)) {
            *position = '\0';
            break;
        }
    }
    *value = options_trim(text);
    return true;
}

// One line of the file into its option. `given` remembers the names of this file only:
// the command line may repeat them.
static inline bool options_apply_line(char *line, Options *options, bool given[OPTION_COUNT_OF_TABLE],
                                      Error *error) {
    char *name, *value;
    if (!options_split_line(line, &name, &value, error)) { return false; }
    if (name == NULL) { return true; }
    const OptionSpec *option = option_find(name);
    if (option == NULL) { return option_unknown(name, "", error); }
    if (option->offset == offsetof(Options, config)) {
        return error_set(error, "a configuration file cannot name another one");
    }
    if (given[option - option_table]) { return error_set(error, "%s is given twice", option->name); }
    given[option - option_table] = true;
    return option_set(option, options, value, error);
}

// Sets what the file says and leaves the rest. Errors name file:line.
static inline bool options_read_file(const char *path, Options *options, Error *error) {
    bool given[OPTION_COUNT_OF_TABLE] = {false};
    char line[OPTION_LINE_SIZE];
    FILE *file = fopen(path, "r");
    if (file == NULL) { return error_set(error, "--config: cannot read %.300s: %s", path, strerror(errno)); }
    bool valid = true;
    for (int number = 1; valid; number++) {
        Error inner;
        int status = options_read_line(file, line);
        if (status == 0) { break; }
        if (status == -2) {
            valid = error_set(error, "--config: cannot read %.300s: %s", path, strerror(errno));
        } else if (status == -1) {
            valid = error_set(error, "%.300s:%d: the line holds a zero byte or is longer than %d bytes", path,
                              number, OPTION_LINE_SIZE - 1);
        } else if (!options_apply_line(line, options, given, &inner)) {
            valid = error_set(error, "%.300s:%d: %.700s", path, number, inner.text);
        }
    }
    fclose(file);
    return valid;
}

// ---------------------------------------------------------------------------------------
// The command line

// Reads the option at argv[*position] and moves behind it. `value` points into argv.
static inline bool options_next(int argc, char **argv, int *position, const OptionSpec **option,
                                const char **value, Error *error) {
    const char *word = argv[(*position)++];
    char name[64], excerpt[64];
    if (word[0] != '-') {
        return error_set(error, "unexpected word %s: options are written --name value (--help)",
                         text_excerpt(word, excerpt));
    }
    const char *equals = strchr(word, '=');
    size_t length = equals == NULL ? strlen(word) : (size_t)(equals - word);
    snprintf(name, sizeof name, "%.*s", length < sizeof name ? (int)length : (int)sizeof name - 1, word);
    *option = strncmp(name, "--", 2) == 0 && length < sizeof name ? option_find(name + 2) : NULL;
    if (*option == NULL) { return option_unknown(name, "--", error); }
    if (equals != NULL) {
        *value = equals + 1;
    } else if (*position < argc && strncmp(argv[*position], "--", 2) != 0) {
        *value = argv[(*position)++];
    } else {
        const char *hint = (*option)->type == OPTION_TEXT ? (*option)->metavariable : "VALUE";
        char allowed[OPTION_VALUE_SIZE];
        option_allowed(*option, allowed);
        return error_set(error, "%s needs a value: %s %s%s%s", name, name, hint,
                         allowed[0] != '\0' ? "; allowed: " : "", allowed);
    }
    return true;
}

// Reads a leading command word and the two options without a value; sets *position to the
// first option.
static inline bool options_parse_command(int argc, char **argv, Options *options, int *position,
                                         Error *error) {
    enum { COMMANDS = 5 };
    static const char *const names[COMMANDS] = {"train", "sample", "eval", "plan", "help"};
    static const OptionsCommand commands[COMMANDS] = {COMMAND_TRAIN, COMMAND_SAMPLE, COMMAND_EVAL,
                                                      COMMAND_PLAN, COMMAND_HELP};
    *position = 1;
    if (argc > 1 && argv[1][0] != '-') {
        char excerpt[64];
        int found = 0;
        while (found < COMMANDS && strcmp(argv[1], names[found]) != 0) { found++; }
        if (found == COMMANDS) {
            const char *nearest = nearest_name(argv[1], names, COMMANDS);
            text_excerpt(argv[1], excerpt);
            if (nearest == NULL) {
                return error_set(error, "unknown command %s; commands: train, sample, eval, plan, help",
                                 excerpt);
            }
            return error_set(error,
                             "unknown command %s: did you mean %s? commands: train, sample, eval, plan, help",
                             excerpt, nearest);
        }
        options->command = commands[found];
        *position = 2;
        if (options->command == COMMAND_HELP && argc == 3 && strcmp(argv[2], "markdown") == 0) {
            options->command = COMMAND_HELP_MARKDOWN;
        }
    }
    for (int i = *position; i < argc; i++) {
        bool help = strcmp(argv[i], "--help") == 0 || (i == *position && strcmp(argv[i], "-h") == 0);
        if (help) { options->command = COMMAND_HELP; }
        if (strcmp(argv[i], "--version") == 0 && options->command != COMMAND_HELP) {
            options->command = COMMAND_VERSION;
        }
    }
    return true;
}

// Defaults, then the file of --config, then the command line. Who asks for help or the
// version gets it whatever else is on the line. Errors: see the head of this file.
// options_check is the caller's next step.
static inline bool options_parse(int argc, char **argv, Options *options, Error *error) {
    bool given[OPTION_COUNT_OF_TABLE] = {false};
    const OptionSpec *option = NULL;
    const char *value = NULL;
    int start;
    options_defaults(options);
    if (!options_parse_command(argc, argv, options, &start, error)) { return false; }
    if (options->command >= COMMAND_HELP) { return true; }
    for (int position = start;
         position < argc;) { // names first: a typing mistake is reported before anything is read
        if (!options_next(argc, argv, &position, &option, &value, error)) { return false; }
        if (given[option - option_table]) { return error_set(error, "--%s is given twice", option->name); }
        given[option - option_table] = true;
        if (option->offset == offsetof(Options, config) && !option_set(option, options, value, error)) {
            return false;
        }
    }
    if (options->config[0] != '\0' && !options_read_file(options->config, options, error)) { return false; }
    for (int position = start; position < argc;) {
        if (!options_next(argc, argv, &position, &option, &value, error) ||
            !option_set(option, options, value, error)) {
            return false;
        }
    }
    return true;
}

// ---------------------------------------------------------------------------------------
// Contradictions

// Every refusal says which option to change and to what. Where a value is automatic (0,
// or -1 for the minimum rate) it is not compared here; a caller that fills in automatic
// rates may check again.

// Whether `rule` is a word of a list such as "dpu, acco-wp or acco".
static inline bool option_list_names(const char *list, const char *rule) {
    size_t length = strlen(rule);
    for (const char *word = list; *word != '\0'; word += strspn(word, ", ")) {
        size_t letters = strcspn(word, ", ");
        if (letters == length && strncmp(word, rule, length) == 0) { return true; }
        word += letters;
    }
    return false;
}

static inline bool option_is_same(const OptionSpec *option, const Options *a, const Options *b) {
    const void *left = option_field_const(option, a), *right = option_field_const(option, b);
    switch (option->type) {
    case OPTION_TEXT: return strcmp((const char *)left, (const char *)right) == 0;
    case OPTION_CHOICE: return strcmp(*(const char *const *)left, *(const char *const *)right) == 0;
    case OPTION_SWITCH: return *(const bool *)left == *(const bool *)right;
    case OPTION_REAL: return *(const double *)left == *(const double *)right;
    default: return *(const int64_t *)left == *(const int64_t *)right;
    }
}

// An option of other rules than this run's would have no effect.
static inline bool options_check_owners(const Options *options, Error *error) {
    Options defaults;
    options_defaults(&defaults);
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
        const OptionSpec *option = &option_table[i];
        bool is_ours = option->rules == NULL || option_list_names(option->rules, options->rule);
        if (is_ours || option_is_same(option, options, &defaults)) { continue; }
        return error_set(error, "--%s belongs to --optimizer %s, this run uses %s: leave it %s%s",
                         option->name, option->rules, options->rule,
                         option->default_text[0] == '\0' ? "empty" : "at ", option->default_text);
    }
    return true;
}

static inline bool options_check_precision(const Options *options, Error *error) {
    if (strcmp(options->precision, "fp16") == 0) {
        return error_set(error, "--precision fp16 is refused: it needs loss scaling and gave NaN where that "
                                "was left out; use fp32");
    }
    return true;
}

static inline bool options_refuse_odd(const char *where, int64_t count, Error *error) {
    return error_set(
        error,
        "%s%lld is odd: acco spends half of its micro-batches in each of two half rounds; use %lld or %lld",
        where, (long long)count, (long long)(count > 1 ? count - 1 : 2),
        (long long)(count > 1 ? count + 1 : 4));
}

static inline bool options_check_accumulate(const Options *options, Error *error) {
    static const char overlapped[] = "acco, acco-wp or dpu";
    bool is_auto = options->accumulate == 0;
    if (is_auto && !option_list_names(overlapped, options->rule)) {
        bool is_local = option_list_names("co2, diloco or streaming-diloco", options->rule);
        return error_set(error, "--accumulate auto needs --optimizer %s: %s takes a fixed number, because %s",
                         overlapped, options->rule,
                         is_local
                             ? "its average gives every rank the same weight, so all must train on as much"
                             : "it computes no further micro-batches while it communicates");
    }
    if (is_auto && options->rank_accumulate[0] != '\0') {
        return error_set(error, "--accumulate auto with --rank-accumulate: either the program chooses how "
                                "many micro-batches a rank "
                                "computes, or the list does; give --accumulate a number");
    }
    if (is_auto && strcmp(options->learning_rate_by, "commits") == 0) {
        return error_set(error, "--accumulate auto with --lr-by commits: nobody knows how many commits there "
                                "will be; use --lr-by grads");
    }
    if (is_auto && !options->overlap) {
        return error_set(error,
                         "--accumulate auto needs --overlap on: it fills the time that communication takes");
    }
    bool counts = options->rank_accumulate[0] == '\0' && strcmp(options->rule, "acco") == 0;
    return counts && options->accumulate % 2 != 0
               ? options_refuse_odd("--accumulate ", options->accumulate, error)
               : true;
}

// Every number of the list is a count, whether there are as many as ranks shows later.
static inline bool options_check_rank_list(const Options *options, Error *error) {
    enum { MOST = 1000000, DIGITS = 7 };
    bool is_acco = strcmp(options->rule, "acco") == 0;
    const char *number = options->rank_accumulate;
    for (int rank = 0; options->rank_accumulate[0] != '\0'; rank++) {
        size_t length = strcspn(number, ","), digits = strspn(number, "0123456789");
        int64_t count = digits == length && length <= DIGITS ? strtoll(number, NULL, 10) : 0;
        if (count < 1 || count > MOST) {
            char excerpt[64];
            return error_set(error,
                             "--rank-accumulate %s: rank %d has no valid number; allowed: a whole number 1 "
                             ".. %d for each rank, with "
                             "commas between, as 4,4,1,1",
                             text_excerpt(options->rank_accumulate, excerpt), rank, MOST);
        }
        if (is_acco && count % 2 != 0) {
            char where[64];
            snprintf(where, sizeof where, "--rank-accumulate: rank %d's ", rank);
            return options_refuse_odd(where, count, error);
        }
        if (number[length] == '\0') { break; }
        number += length + 1;
    }
    return true;
}

// The divisor of co2's stale step, 1 or more. The only kind so far is a constant one.
static inline bool options_co2_gap(const Options *options, double *value, Error *error) {
    static const char kind[] = "const:";
    const char *end = "";
    bool is_constant = strncmp(options->co2_gap, kind, sizeof kind - 1) == 0;
    bool valid =
        is_constant && option_read_real(options->co2_gap + sizeof kind - 1, value, &end) && *end == '\0';
    if (valid && *value >= 1 && *value <= 1e6) { return true; }
    char excerpt[64];
    return error_set(
        error, "--co2-gap: %s is no gap penalty; allowed: const:VALUE with VALUE 1 .. 1000000, as const:1",
        text_excerpt(options->co2_gap, excerpt));
}

// Fragments take turns: one is sent every H/P steps, and it has arrived before the next
// one is sent.
static inline bool options_check_streaming(const Options *options, Error *error) {
    long long H = (long long)options->diloco_h, P = (long long)options->streaming_p,
              tau = (long long)options->streaming_tau;
    if (strcmp(options->rule, "streaming-diloco") != 0) { return true; }
    if (H < P) {
        return error_set(
            error,
            "--diloco-H %lld is less than --streaming-P %lld: fragments are sent every H/P steps; use %lld",
            H, P, P);
    }
    if (H % P != 0) {
        return error_set(error,
                         "--diloco-H %lld is not a multiple of --streaming-P %lld: fragments are sent every "
                         "H/P steps; use %lld or "
                         "%lld",
                         H, P, H - H % P, H - H % P + P);
    }
    if (tau >= H / P) {
        return error_set(error,
                         "--streaming-tau %lld is not below H/P = %lld: a fragment must arrive before the "
                         "next one is sent; use "
                         "%s%lld",
                         tau, H / P, H / P == 1 ? "" : "0 .. ", H / P - 1);
    }
    return true;
}

static inline bool options_check_rule(const Options *options, Error *error) {
    double gap;
    return options_check_precision(options, error) && options_check_owners(options, error) &&
           options_check_accumulate(options, error) && options_check_rank_list(options, error) &&
           options_co2_gap(options, &gap, error) && options_check_streaming(options, error);
}

// The inner steps that a rank makes before it hears of the others; 1 for the rules in
// which all make one step together.
static inline int64_t options_steps_between_exchanges(const Options *options) {
    if (strcmp(options->rule, "co2") == 0) { return options->co2_tau; }
    if (strcmp(options->rule, "diloco") == 0) { return options->diloco_h; }
    return strcmp(options->rule, "streaming-diloco") == 0 ? options->diloco_h / options->streaming_p : 1;
}

// The numbers of --rank-accumulate; 0: there is no list.
static inline int options_rank_list_length(const Options *options) {
    int length = options->rank_accumulate[0] != '\0';
    for (const char *c = options->rank_accumulate; *c != '\0'; c++) { length += *c == ','; }
    return length;
}

// The micro-batches per commit of `rank`: its number of the list, or --accumulate where
// there is no list. 0: auto. The options have passed options_check; where
// options_check_ranks will refuse the list as too short, the ranks that it lacks have 1.
static inline int options_rank_accumulate(const Options *options, int rank, int size) {
    assert(rank >= 0 && rank < size);
    (void)size;
    if (options->rank_accumulate[0] == '\0') { return (int)options->accumulate; }
    const char *number = options->rank_accumulate;
    for (; rank > 0 && number != NULL; rank--) {
        number = strchr(number, ',');
        number = number == NULL ? NULL : number + 1;
    }
    return number == NULL ? 1 : (int)strtol(number, NULL, 10);
}

// The micro-batches per commit of all ranks. With --accumulate auto nobody knows: then
// the least possible, one per rank and round.
static inline int64_t options_total_accumulate(const Options *options, int size) {
    int64_t total = 0, least = strcmp(options->rule, "acco") == 0 ? 2 : 1;
    for (int rank = 0; rank < size; rank++) {
        int count = options_rank_accumulate(options, rank, size);
        total += count > 0 ? count : least;
    }
    return total;
}

static inline bool options_check_rate(const Options *options, Error *error) {
    double rate = options->learning_rate, minimum = options->minimum_learning_rate;
    if (!(options->beta1 < 1 && options->beta2 < 1)) {
        return error_set(error, "--beta1 and --beta2 must be below 1");
    }
    if (rate > 0 && minimum > rate) {
        return error_set(error, "--min-lr %g is above --lr %g: the schedule goes down from --lr to --min-lr",
                         minimum, rate);
    }
    if (strcmp(options->schedule, "constant") == 0 && minimum >= 0) {
        return error_set(
            error,
            "--schedule constant never reaches --min-lr: leave --min-lr away, or choose cosine or linear");
    }
    if (rate > 0 && rate * options->weight_decay >= 1) {
        return error_set(
            error, "--lr %g times --weight-decay %g is 1 or more: each commit would erase the parameters",
            rate, options->weight_decay);
    }
    return true;
}

// An emulated delay longer than the deadline would end the job with a message that blames
// the network.
static inline bool options_check_emulation(const Options *options, Error *error) {
    if (options->slow_ms > 0 && options->slow_rank < 0) {
        return error_set(error, "--slow-ms needs --slow-rank: which rank is to be slow?");
    }
    if (options->slow_rank >= 0 && options->slow_ms == 0) {
        return error_set(error, "--slow-rank needs --slow-ms: how slow is it to be?");
    }
    int slow_rank = options->slow_rank < 0 ? 0 : (int)options->slow_rank;
    int batches = options_rank_accumulate(options, slow_rank, slow_rank + 1);
    double waiting = options->slow_ms * (double)(batches > 0 ? batches : 1) *
                     (double)options_steps_between_exchanges(options);
    if (waiting / 1000 >= options->timeout_s) {
        return error_set(error,
                         "--slow-ms %g makes the others wait %g s for an exchange, longer than --timeout-s "
                         "%g: the job would end itself",
                         options->slow_ms, waiting / 1000, options->timeout_s);
    }
    double chunk_megabits = 2 * 8.4; // two chunks of 1 MB may be under way
    if (options->link_mbit > 0 && chunk_megabits / options->link_mbit >= options->timeout_s) {
        return error_set(error,
                         "--link-mbit %g needs %g s for two chunks of data, longer than --timeout-s %g: the "
                         "job would end itself",
                         options->link_mbit, chunk_megabits / options->link_mbit, options->timeout_s);
    }
    if (options->chaos_ms / 1000 + options->link_us / 1e6 >= options->timeout_s) {
        return error_set(error,
                         "--chaos-ms %g and --link-us %g together are longer than --timeout-s %g: the job "
                         "would end itself",
                         options->chaos_ms, options->link_us, options->timeout_s);
    }
    return true;
}

static inline bool options_check_ranks_of_plan(const Options *options, Error *error) {
    if (options->ranks == 1 || options->command == COMMAND_PLAN) { return true; }
    return error_set(error,
                     "--ranks is for train_gpt plan: start %lld ranks with mpirun -np %lld ./train_gpt ...",
                     (long long)options->ranks, (long long)options->ranks);
}

// The directory of the model that training begins with; empty: random parameters.
static inline const char *options_start(const Options *options) {
    return options->finetune[0] != '\0' ? options->finetune : options->from;
}

static inline bool options_check_start(const Options *options, Error *error) {
    if (options->finetune[0] == '\0') { return true; }
    if (options->from[0] != '\0') {
        return error_set(error, "--from and --finetune both name a model to begin with: choose one");
    }
    if (options->command == COMMAND_SAMPLE || options->command == COMMAND_EVAL) {
        return error_set(error, "--finetune is for training: give the model with --from");
    }
    return true;
}

// Options that ask for something which another option takes away.
static inline bool options_check_reports(const Options *options, Error *error) {
    if (strcmp(options->on_spike, "rollback") == 0 && options->save_every == 0) {
        return error_set(error,
                         "--on-spike rollback needs --save-every: there must be checkpoints to go back to");
    }
    if (strcmp(options->resume, "auto") == 0 && strcmp(options->out, "auto") == 0) {
        return error_set(error, "--resume auto needs --out: it goes on with what is in that directory, and "
                                "--out auto is a new one");
    }
    if (options->val_data[0] != '\0' && options->val_batches == 0) {
        return error_set(error, "--val-data with --val-batches none: there would be no validation");
    }
    if (options->val_data[0] != '\0' && strcmp(options->val_data, options->data) == 0 &&
        strcmp(options->data, "builtin") != 0) {
        return error_set(
            error, "--val-data is the same as --data: leave it away, and the tail of --data is held out");
    }
    if (options->prompt[0] != '\0' && options->sample_tokens == 0) {
        return error_set(error, "--prompt with --sample-tokens none: there would be no sample");
    }
    return true;
}

// Refuses options that are valid one by one and not together. What depends on the model
// or the number of ranks is checked there.
static inline bool options_check(const Options *options, Error *error) {
    return options_check_rule(options, error) && options_check_rate(options, error) &&
           options_check_emulation(options, error) && options_check_ranks_of_plan(options, error) &&
           options_check_start(options, error) && options_check_reports(options, error);
}

// Tokens of one commit over all ranks, the least possible one where --accumulate is auto.
static inline int64_t options_tokens_per_commit(const Options *options, int ranks, int64_t sequence_length) {
    return options_total_accumulate(options, ranks) * options->micro_batch * sequence_length;
}

// A list with a number for each of the ranks, no more and no less.
static inline bool options_check_rank_list_length(const Options *options, int ranks, Error *error) {
    int length = options_rank_list_length(options);
    if (length == 0 || length == ranks) { return true; }
    char excerpt[64];
    return error_set(error, "--rank-accumulate %s has %d number%s for %d rank%s: give one for each rank",
                     text_excerpt(options->rank_accumulate, excerpt), length, length == 1 ? "" : "s", ranks,
                     ranks == 1 ? "" : "s");
}

// The contradictions that show only when the number of ranks and the sequence length
// (tokens) are known.
static inline bool options_check_ranks(const Options *options, int ranks, int64_t sequence_length,
                                       Error *error) {
    if (!options_check_rank_list_length(options, ranks, error)) { return false; }
    if (options->slow_rank >= ranks) {
        return error_set(error, "--slow-rank %lld: there %s; allowed: none or 0 .. %d",
                         (long long)options->slow_rank, ranks == 1 ? "is one rank" : "are fewer ranks",
                         ranks - 1);
    }
    int64_t commit = options_tokens_per_commit(options, ranks, sequence_length);
    if (options->tokens < commit) {
        return error_set(error,
                         "--tokens %lld is less than one commit: %lld micro-batches on %d rank%s x %lld "
                         "sequences x %lld tokens = %lld; "
                         "raise --tokens or lower --micro-batch, --seq-len or --%s",
                         (long long)options->tokens, (long long)options_total_accumulate(options, ranks),
                         ranks, ranks == 1 ? "" : "s", (long long)options->micro_batch,
                         (long long)sequence_length, (long long)commit,
                         options->rank_accumulate[0] == '\0' ? "accumulate" : "rank-accumulate");
    }
    return true;
}

// ---------------------------------------------------------------------------------------
// Printing

// The shortest decimal that reads back as the same double; 300 and not 3e+02.
static inline void option_print_real(double value, char text[OPTION_VALUE_SIZE]) {
    if (value == nearbyint(value) && fabs(value) < 1e15) {
        snprintf(text, OPTION_VALUE_SIZE, "%.0f", value);
        return;
    }
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(text, OPTION_VALUE_SIZE, "%.*g", digits, value);
        if (strtod(text, NULL) == value) { return; }
    }
}

// Whether the value is the one that the word stands for; only numbers have words.
static inline bool option_has_word_value(const OptionSpec *option, const Options *options) {
    if (option->word == NULL) { return false; }
    const void *field = option_field_const(option, options);
    return (option->type == OPTION_REAL ? *(const double *)field : (double)*(const int64_t *)field) ==
           option->word_value;
}

// The value of an option that is not a text, as option_set reads it.
static inline const char *option_print_value(const OptionSpec *option, const Options *options,
                                             char text[OPTION_VALUE_SIZE]) {
    const void *field = option_field_const(option, options);
    assert(option->type != OPTION_TEXT);
    if (option->type == OPTION_SWITCH) {
        snprintf(text, OPTION_VALUE_SIZE, "%s", *(const bool *)field ? "on" : "off");
    } else if (option->type == OPTION_CHOICE) {
        snprintf(text, OPTION_VALUE_SIZE, "%s", *(const char *const *)field);
    } else if (option_has_word_value(option, options)) {
        snprintf(text, OPTION_VALUE_SIZE, "%s", option->word);
    } else if (option->type == OPTION_REAL) {
        option_print_real(*(const double *)field, text);
    } else {
        snprintf(text, OPTION_VALUE_SIZE, "%lld", (long long)*(const int64_t *)field);
    }
    return text;
}

// A text for the configuration file: as it is where that is read back unchanged,
// otherwise in quotes.
static inline const char *options_quote(const char *text, char quoted[OPTION_QUOTED_SIZE]) {
    size_t length = strlen(text);
    bool plain = length > 0 && text[0] != '"' && text[0] != ' ' && text[length - 1] != ' ' &&
                 strchr(text, '#') == NULL;
    for (size_t i = 0; i < length; i++) { plain = plain && (unsigned char)text[i] >= 32 && text[i] != 127; }
    char *out = quoted;
    if (!plain) { *out++ = '"'; }
    for (; *text != '\0'; text++) {
        unsigned char c = (unsigned char)*text;
        const char *special = "\n\t\r", *found = strchr(special, *text);
        if (plain) {
            *out++ = *text;
        } else if (c == '"' || c == '\\' || found != NULL) {
            *out++ = '\\';
            *out++ = found != NULL ? "ntr"[found - special] : *text;
        } else if (c < 32 || c == 127) {
            out += sprintf(out, "\\x%02x", c);
        } else {
            *out++ = *text;
        }
    }
    if (!plain) { *out++ = '"'; }
    *out = '\0';
    return quoted;
}

// Writes every option as `name = value`, grouped. --config reads the file back to equal
// options. Look at ferror(file) afterwards.
static inline void options_save(const Options *options, FILE *file) {
    char text[OPTION_VALUE_SIZE], quoted[OPTION_QUOTED_SIZE];
    fprintf(
        file,
        "# acco.c %s: the effective configuration of a run. To run it again: train_gpt --config THIS_FILE\n",
        ACCO_VERSION);
    for (int group = 0; group < GROUP_COUNT; group++) {
        fprintf(file, "\n# %s\n", option_group_title((OptionGroup)group));
        for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
            const OptionSpec *option = &option_table[i];
            if ((int)option->group != group || option->offset == offsetof(Options, config)) { continue; }
            const char *value = option->type == OPTION_TEXT
                                    ? options_quote((const char *)option_field_const(option, options), quoted)
                                    : option_print_value(option, options, text);
            fprintf(file, "%s = %s\n", option->name, value);
        }
    }
}

// options_save to a new file.
static inline bool options_save_file(const Options *options, const char *path, Error *error) {
    FILE *file = fopen(path, "w");
    if (file == NULL) { return error_set(error, "cannot create %.400s: %s", path, strerror(errno)); }
    options_save(options, file);
    bool failed = fflush(file) != 0 || ferror(file);
    int reason = errno;
    failed = fclose(file) != 0 || failed;
    return failed ? error_set(error, "cannot write %.400s: %s", path, strerror(reason)) : true;
}

// Every option by its name, as one object: numbers as numbers, switches as booleans, the
// rest (words such as "auto" too) as strings.
static inline json_t *options_as_json(const Options *options) {
    json_t *object = json_object();
    char text[OPTION_VALUE_SIZE];
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
        const OptionSpec *option = &option_table[i];
        const void *field = option_field_const(option, options);
        json_t *value;
        if (option->type == OPTION_TEXT) {
            value = log_text((const char *)field);
        } else if (option->type == OPTION_SWITCH) {
            value = json_boolean(*(const bool *)field);
        } else if (option->type == OPTION_CHOICE || option_has_word_value(option, options)) {
            value = json_string(option_print_value(option, options, text));
        } else if (option->type == OPTION_REAL) {
            value = log_real(*(const double *)field);
        } else {
            value = json_integer((json_int_t) * (const int64_t *)field);
        }
        json_object_set_new(object, option->name, value);
    }
    return object;
}

// "N|auto", "fp32|bf16", "on|off".
static inline const char *option_metavariable(const OptionSpec *option, char text[OPTION_VALUE_SIZE]) {
    int length = 0;
    if (option->type == OPTION_SWITCH) {
        snprintf(text, OPTION_VALUE_SIZE, "on|off");
    } else if (option->type == OPTION_CHOICE) {
        for (int i = 0; option->choices[i] != NULL; i++) {
            length += snprintf(text + length, (size_t)(OPTION_VALUE_SIZE - length), "%s%s", i == 0 ? "" : "|",
                               option->choices[i]);
        }
    } else {
        snprintf(text, OPTION_VALUE_SIZE, "%s%s%s", option->metavariable, option->word == NULL ? "" : "|",
                 option->word == NULL ? "" : option->word);
    }
    return text;
}

// Prints words between the columns 30 and 100; the cursor is at `column`, and the line is
// ended.
static inline void options_print_wrapped(FILE *file, int column, const char *text) {
    enum { LEFT = 30, RIGHT = 100 };
    if (column > LEFT - 2) { column = RIGHT; } // no room on this line
    while (*text != '\0') {
        int length =
            (int)(*text == '[' ? strlen(text)
                               : strcspn(text, " ")); // the closing bracket of an option stays in one piece
        if (column + 1 + length > RIGHT) {
            fputc('\n', file);
            column = 0;
        }
        int blanks = column < LEFT ? LEFT - column : 1;
        fprintf(file, "%*s%.*s", blanks, "", length, text);
        column += blanks + length;
        text += length + (text[length] == ' ');
    }
    fputc('\n', file);
}

// The text of --help, at most 100 columns wide.
static inline void options_print_help(FILE *file) {
    char name[OPTION_VALUE_SIZE], text[2048], allowed[OPTION_VALUE_SIZE];
    fputs("Usage: train_gpt [train] [--name value ...]    train a GPT-Neo model, alone or under mpirun\n"
          "       train_gpt sample --from DIR             print a text by a model\n"
          "       train_gpt eval --from DIR --data FILE   measure a model: perplexity, LAMBADA, HellaSwag\n"
          "       train_gpt plan [--name value ...]       print the memory that a rank would need, and stop\n"
          "       train_gpt help | --help | -h            print this\n"
          "       train_gpt --version\n\n"
          "  mpirun --bind-to none -np 2 ./train_gpt --optimizer acco --tokens 2M\n",
          file);
    for (int group = 0; group < GROUP_COUNT; group++) {
        fprintf(file, "\n%s\n", option_group_title((OptionGroup)group));
        for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
            const OptionSpec *option = &option_table[i];
            if ((int)option->group != group) { continue; }
            option_allowed(option, allowed);
            bool range =
                option->type == OPTION_INTEGER || option->type == OPTION_COUNT || option->type == OPTION_REAL;
            bool notes = option->default_text[0] != '\0';
            bool owned = option->rules != NULL;
            snprintf(text, sizeof text, "%s%s%s%s%s%s%s%s%s", owned ? "Only for " : "",
                     owned ? option->rules : "", owned ? ". " : "", option->help, notes ? " [default " : "",
                     option->default_text, notes && range ? "; " : "", notes && range ? allowed : "",
                     notes ? "]" : "");
            options_print_wrapped(
                file, fprintf(file, "  --%s %s", option->name, option_metavariable(option, name)), text);
        }
    }
}

static inline void options_print_cell(FILE *file, const char *text) {
    for (; *text != '\0'; text++) {
        if (*text == '|') { fputc('\\', file); }
        fputc(*text, file);
    }
}

// The same as tables of GitHub's Markdown, one per group, for the README.
static inline void options_print_markdown(FILE *file) {
    char text[OPTION_VALUE_SIZE];
    for (int group = 0; group < GROUP_COUNT; group++) {
        fprintf(file, "%s### %s\n\n| option | default | allowed | effect |\n|---|---|---|---|\n",
                group == 0 ? "" : "\n", option_group_title((OptionGroup)group));
        for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
            const OptionSpec *option = &option_table[i];
            if ((int)option->group != group) { continue; }
            bool is_choice = option->type == OPTION_CHOICE || option->type == OPTION_SWITCH;
            fprintf(file, "| `--%s", option->name);
            if (!is_choice) { fputc(' ', file); }
            options_print_cell(file, is_choice ? "" : option_metavariable(option, text));
            fprintf(file, "` | %s | ", option->default_text);
            options_print_cell(file, option->type == OPTION_TEXT ? "text" : option_allowed(option, text));
            fputs(" | ", file);
            if (option->rules != NULL) { fprintf(file, "Only for %s. ", option->rules); }
            options_print_cell(file, option->help);
            fputs(" |\n", file);
        }
    }
}

#endif
