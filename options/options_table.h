// options_table.h: every option of the program, written down once.
//
// A row also says for which update rules the option is. Given with another rule it is
// refused, so that nobody tunes what has no effect. An option at its default is accepted
// with every rule, because a saved configuration holds them all.
//
// Some numbers have a word that means "the program decides" or "off". It is stored as 0
// (for --min-lr and other options where 0 is a value of its own: as -1).
#ifndef ACCO_OPTIONS_OPTIONS_TABLE_H
#define ACCO_OPTIONS_OPTIONS_TABLE_H

#include "options/options.h"

typedef enum OptionType {
    OPTION_INTEGER, // int64_t
    OPTION_COUNT,   // int64_t, may be written as 1500k, 1.5M, 2G
    OPTION_REAL,    // double
    OPTION_CHOICE,  // OptionChoice: index of choices[]
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
    GROUP_PLAN,
    GROUP_COUNT
} OptionGroup;

enum { OPTION_CHOICES_MAX = 12, OPTION_VALUE_SIZE = 512, OPTION_LINE_SIZE = 8192 };

// Integers stay below 2^53, so that ranges can be doubles. Printed as "or more".
#define OPTION_NO_LIMIT 9007199254740992.0

// Whether a run that is resumed with another value of the option trains the same bits as
// before. The model and the rule are compared by themselves: two options may name the same
// one.
// MEASURED: other bits, too; "auto" stands for a choice that a run makes by measuring at
// its start, and that it keeps when it is resumed.
// PLACEMENT: compared by themselves, too: how ranks lie on machines, which may change.
typedef enum OptionEffect { SAME_BITS, OTHER_BITS, MEASURED, COMPARED_APART, PLACEMENT } OptionEffect;

typedef struct OptionSpec {
    const char *name;
    OptionGroup group;
    const char *rules; // the only rules that it is for, as "dpu, acco-wp or acco"; NULL: every rule
    OptionEffect effect;
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
                                                    "Samples, during and after training or by themselves",
                                                    "Emulated trouble",
                                                    "Plans"};
    return titles[group];
}

// What `train_gpt help` calls the group.
static inline const char *option_group_name(OptionGroup group) {
    static const char *const names[GROUP_COUNT] = {"rules",   "together", "local",   "inputs",
                                                   "rates",   "machine",  "reports", "scoring",
                                                   "samples", "trouble",  "planning"};
    return names[group];
}

// The offset of a field; does not compile where the field is not of that type.
#define OPTION_FIELD(type, field) \
    (offsetof(Options, field) + 0 * sizeof(1 ? (type *)0 : &((Options *)0)->field))

// What stands between the effect and the help of a row: the type with the field, the
// default, the least and the most (of a text: the least length), what --help calls the
// value, and a word for one value. They are undefined again after the table.
#define NUMBER_OPTION(kind, type, field, value, least, most, metavariable, ...) \
    kind, OPTION_FIELD(type, field), value, least, most, __VA_ARGS__, {NULL}, metavariable
#define INTEGER_OPTION(...) NUMBER_OPTION(OPTION_INTEGER, int64_t, __VA_ARGS__)
#define COUNT_OPTION(...) NUMBER_OPTION(OPTION_COUNT, int64_t, __VA_ARGS__)
#define REAL_OPTION(...) NUMBER_OPTION(OPTION_REAL, double, __VA_ARGS__)
#define CHOICE_OPTION(field, value, ...) \
    OPTION_CHOICE, OPTION_FIELD(OptionChoice, field), value, 0, 0, NO_WORD, {__VA_ARGS__}, NULL
#define SWITCH_OPTION(field, value) \
    OPTION_SWITCH, OPTION_FIELD(bool, field), value, 0, 0, NO_WORD, {NULL}, NULL
#define TEXT_OPTION(field, value, least_length, metavariable) \
    OPTION_TEXT, OPTION_FIELD(OptionText, field), value, least_length, 0, NO_WORD, {NULL}, metavariable
#define NO_WORD NULL, 0
#define EVERY_RULE NULL

static const OptionSpec option_table[] = {
    {"optimizer", GROUP_RULE, EVERY_RULE, COMPARED_APART,
     CHOICE_OPTION(rule, "acco", "ddp", "zero1", "dpu", "acco-wp", "acco", "co2", "diloco",
                   "streaming-diloco"),
     "The update rule. ddp: every rank holds the whole optimizer state; zero1: each rank holds a shard of "
     "it; both exchange gradients and parameters beside the backward and forward passes. dpu, acco-wp and "
     "acco shard the state, too, and exchange beside the whole next batch. dpu: gradients are one commit "
     "old; acco-wp: dpu, but gradients are computed at predicted parameters; acco: no gradient is old, but "
     "part of each batch is computed at an estimate of the next parameters, which travels, too. co2, "
     "diloco and streaming-diloco hold the whole state on every rank, take local steps, and exchange seldom. "
     "co2: hides the exchange and applies it one round later; diloco: waits for it; streaming-diloco: hides "
     "it, one fragment of the model at a time."},
    {"accumulate", GROUP_RULE, EVERY_RULE, OTHER_BITS,
     INTEGER_OPTION(accumulate, "2", 1, 1e6, "N", "auto", 0),
     "Micro-batches per rank and commit; for co2, diloco and streaming-diloco per inner step. acco computes "
     "them in two rounds (--acco-split), so it needs two at least. auto (acco, acco-wp, dpu): as many as fit "
     "beside the communication, at least one in each round; the batch then varies, and runs do not repeat "
     "bit for bit."},
    {"rank-accumulate", GROUP_RULE, "ddp, zero1, dpu, acco-wp or acco", OTHER_BITS,
     TEXT_OPTION(rank_accumulate, "", 0, "LIST"),
     "A number of micro-batches for each rank, as in 4,4,1,1, instead of --accumulate. It lets fast and slow "
     "ranks finish together; every micro-batch still has the same weight. For acco every number must be 2 "
     "or more."},
    {"wire", GROUP_RULE, EVERY_RULE, OTHER_BITS,
     CHOICE_OPTION(wire, "fp32", "fp32", "bf16", "int8", "int4", "e3m0"),
     "Number format in which ranks send vectors to each other; sums are fp32 (but see --exchange library). "
     "bf16 halves the "
     "traffic, and rounds every gradient and parameter. int8 needs about a quarter of it, int4 (rounded "
     "at random, but repeatably) and e3m0 (a sign and a power of two) about an eighth; all three are "
     "coarser. Their gradients travel in blocks of "
     "256 with one scale, their parameters as differences to what all ranks already hold."},
    {"exchange", GROUP_RULE, EVERY_RULE, PLACEMENT,
     CHOICE_OPTION(exchange, "auto", "auto", "flat", "two-level", "library"),
     "How vectors are added up and spread. flat: every rank sends straight to every other. two-level: the "
     "ranks of a host add up among themselves in fp32 first, so that a vector crosses the link between "
     "hosts only once per host, and is rounded by --wire only there. library: by NCCL's own collectives, "
     "for GPUs with fp32 or bf16 on the wire: made for speed at scale, but the bits then depend on the "
     "library and on how the GPUs are connected. auto: two-level where several hosts "
     "have several ranks, otherwise flat."},
    {"overlap", GROUP_RULE, EVERY_RULE, SAME_BITS, SWITCH_OPTION(overlap, "on"),
     "off waits for every operation before the next one starts: the same bits, but slower. It shows what "
     "overlap brings."},

    {"bucket-mb", GROUP_SHARED, "ddp or zero1", SAME_BITS,
     REAL_OPTION(bucket_mb, "auto", 1e-3, 1e6, "MB", "auto", 0),
     "Size of the buckets in which gradients are sent during the backward pass. Small buckets leave earlier "
     "but cost more messages; large ones leave more to wait for at the end. auto: chosen from the measured "
     "link, and printed."},
    {"sequential", GROUP_SHARED, "dpu, acco-wp or acco", OTHER_BITS,
     INTEGER_OPTION(sequential, "0", 0, OPTION_NO_LIMIT, "COMMITS", "warmup", -1),
     "The first COMMITS commits run without overlap, as under zero1: safer while the parameters change "
     "fastest, and slower meanwhile. warmup: those in which the learning rate rises (--warmup)."},
    {"acco-split", GROUP_SHARED, "acco", MEASURED,
     TEXT_OPTION(rules.acco.split, "wire", 1, "wire|auto|half|SHARE"),
     "How a rank's micro-batches are divided between round A, beside the exchange of a commit, and round B, "
     "beside that of an estimate. Each round has one at least. SHARE: what round A has, such as 0.875. half: "
     "0.5, as in the paper. wire: in proportion to the bytes of the two exchanges, which hides both equally "
     "well: halves where --estimate-wire is same, 4 of 5 in round A for int8 under fp32. auto: what makes "
     "commits shortest by the measured times of a micro-batch and of the exchanges, and among equals the "
     "largest round A. Then the bits follow from a measurement. It is made once: log, configuration and "
     "checkpoints hold the share, and a run that is resumed as it was keeps it."},
    {"acco-init", GROUP_SHARED, "acco", OTHER_BITS,
     INTEGER_OPTION(rules.acco.first_round, "round", 1, 1e6, "N", "round", 0),
     "Micro-batches per rank of the very first round, which has no communication beside it. round: as many "
     "as in every later round beside a commit, so that the first commit has a full batch. 1, as in the "
     "paper's code: starts sooner, with a smaller batch."},
    {"estimate-wire", GROUP_SHARED, "acco", MEASURED,
     CHOICE_OPTION(rules.acco.estimate_wire, "same", "same", "auto", "fp32", "bf16", "int8", "int4", "e3m0"),
     "Number format in which the estimate is exchanged; the commit keeps --wire. A coarser format saves up "
     "to half of acco's traffic. It does not round the parameters, but the gradients of the round beside the "
     "commit are computed at a coarser estimate of them. same: as --wire. auto: the finest with which "
     "commits take no longer than with any other, by a measurement, as --acco-split auto; bits then follow "
     "from it."},

    {"co2-tau", GROUP_LOCAL, "co2", OTHER_BITS,
     INTEGER_OPTION(rules.co2.inner_steps, "12", 1, 1e6, "N", NO_WORD),
     "Inner steps of each rank between two exchanges (the paper's tau). More of them send less and give the "
     "exchange more time, but ranks drift further apart and receive older information."},
    {"co2-beta", GROUP_LOCAL, "co2", OTHER_BITS, REAL_OPTION(rules.co2.beta, "0", 0, 0.999999, "X", NO_WORD),
     "Momentum of the outer step (beta). More keeps its direction over several rounds, but overshoots more, "
     "because what it receives is one round old: 0 for few ranks, 0.5 for 64."},
    {"co2-alpha", GROUP_LOCAL, "co2", OTHER_BITS, REAL_OPTION(rules.co2.alpha, "1", 1e-6, 100, "X", NO_WORD),
     "Length of the outer step (alpha). 1 moves as far as the ranks have moved on average; less is steadier "
     "and slower."},
    {"co2-phi", GROUP_LOCAL, "co2", OTHER_BITS, REAL_OPTION(rules.co2.phi, "off", 1e-12, 1e6, "X", "off", 0),
     "Limit for every element of the outer momentum (phi). Lower tames spikes and may slow learning."},
    {"co2-gap", GROUP_LOCAL, "co2", OTHER_BITS, TEXT_OPTION(rules.co2.gap, "const:1", 1, "const:VALUE"),
     "Divides the mean pseudo-gradient by VALUE, 1 or more, because it is one round old (the staleness gap "
     "penalty). Larger is steadier and slower, and may bear a higher --lr: try 2. 1 is what the paper's code "
     "has."},
    {"diloco-H", GROUP_LOCAL, "diloco or streaming-diloco", OTHER_BITS,
     INTEGER_OPTION(rules.diloco.inner_steps, "30", 1, 1e6, "N", NO_WORD),
     "Inner steps of each rank between two exchanges (the paper's H); for streaming-diloco between two "
     "exchanges of the same fragment. More of them send less, but the ranks drift further apart."},
    {"diloco-outer-lr", GROUP_LOCAL, "diloco or streaming-diloco", OTHER_BITS,
     REAL_OPTION(rules.diloco.outer_learning_rate, "0.7", 1e-6, 100, "RATE", NO_WORD),
     "Learning rate of the outer step along the mean pseudo-gradient. Lower is steadier and slower; 1 with "
     "--diloco-mu 0 is the plain average of the ranks."},
    {"diloco-mu", GROUP_LOCAL, "diloco or streaming-diloco", OTHER_BITS,
     REAL_OPTION(rules.diloco.outer_momentum, "0.9", 0, 0.999999, "X", NO_WORD),
     "Nesterov momentum of the outer step (mu). Higher gains speed where the direction stays the same, and "
     "overshoots where it turns."},
    {"streaming-P", GROUP_LOCAL, "streaming-diloco", OTHER_BITS,
     INTEGER_OPTION(rules.diloco.fragments, "2", 1, 1e6, "N", NO_WORD),
     "Fragments of the model (P), exchanged one at a time, every H/P steps; H must be a multiple of P. More "
     "fragments make smaller bursts, which are easier to hide; the traffic in all stays the same."},
    {"streaming-tau", GROUP_LOCAL, "streaming-diloco", OTHER_BITS,
     INTEGER_OPTION(rules.diloco.delay, "1", 0, 1e6, "N", NO_WORD),
     "Inner steps that an exchange may take while training goes on (tau), below H/P. More of them tolerate a "
     "slower network, but what arrives is as many steps old; 0 waits."},
    {"streaming-alpha", GROUP_LOCAL, "streaming-diloco", OTHER_BITS,
     REAL_OPTION(rules.diloco.alpha, "0.5", 0, 1, "X", NO_WORD),
     "Weight that a rank's own parameters keep when a fragment arrives (alpha). 0 takes the common ones and "
     "drops the steps made since the fragment was sent; 1 keeps the rank's own, and the ranks never agree."},
    {"streaming-order", GROUP_LOCAL, "streaming-diloco", OTHER_BITS,
     CHOICE_OPTION(rules.diloco.order, "strided", "strided", "sequential"),
     "How layers are divided into fragments. strided: every P-th layer; sequential: neighbours. The traffic "
     "is the same, the trained model is not. What is in no layer, the embeddings and the last norm, is in "
     "the "
     "first fragment."},

    {"model", GROUP_DATA, EVERY_RULE, COMPARED_APART, TEXT_OPTION(model, "tiny", 1, "NAME|PATH"),
     "A preset (tiny, 36M, 125M, 1.3B, 2.7B) or the path of a Hugging Face config.json with model_type "
     "gpt_neo."},
    {"from", GROUP_DATA, EVERY_RULE, COMPARED_APART, TEXT_OPTION(from, "", 0, "DIR"),
     "A Hugging Face directory of a GPT-Neo model to start from (config.json and model.safetensors), or a "
     "checkpoint, which contains one, or a run, for its newest checkpoint. It takes the place of --model."},
    {"finetune", GROUP_DATA, EVERY_RULE, COMPARED_APART, TEXT_OPTION(finetune, "", 0, "DIR"),
     "As --from DIR, for fine-tuning: --lr auto is then a tenth of its usual value, --weight-decay auto is "
     "0. The optimizer state starts from zero. Tokens that the mask of a token file excludes are read, but "
     "their loss does not count."},
    {"data", GROUP_DATA, EVERY_RULE, OTHER_BITS, TEXT_OPTION(data, "builtin", 1, "PATH|builtin"),
     "Training text: builtin is an endless source of small stories whose entropy is known; otherwise text "
     "or token files (a quoted glob names several). Text is tokenized by the model's tokenizer, once, into "
     "OUT/tokens-*.bin; a model of 256 tokens without a tokenizer reads its bytes."},
    {"tokenizer", GROUP_DATA, EVERY_RULE, OTHER_BITS, TEXT_OPTION(tokenizer, "", 0, "PATH"),
     "The tokenizer.json of a byte-level BPE, or its directory: encodes texts and prompts and decodes "
     "samples of models that read token ids, and is copied with the model into checkpoints. Not given: that "
     "of --from, --finetune or --resume, if there is one."},
    {"val-data", GROUP_DATA, EVERY_RULE, OTHER_BITS, TEXT_OPTION(val_data, "", 0, "PATH"),
     "Validation text. Not given: the end of --data is held out (for builtin: another random stream)."},
    {"micro-batch", GROUP_DATA, EVERY_RULE, OTHER_BITS,
     INTEGER_OPTION(micro_batch, "auto", 1, 65536, "N", "auto", 0),
     "Sequences that one rank computes at a time. More use the cores better and need more memory for "
     "activations. auto: 8, but 1 for models below 5 M parameters, which learn most from many small "
     "updates."},
    {"seq-len", GROUP_DATA, EVERY_RULE, OTHER_BITS,
     INTEGER_OPTION(seq_len, "auto", 1, 1048576, "N", "auto", 0),
     "Tokens per sequence, at most the model's positions. auto: the model's positions, at most 1024."},
    {"tokens", GROUP_DATA, EVERY_RULE, OTHER_BITS,
     COUNT_OPTION(tokens, "1500k", 1, OPTION_NO_LIMIT, "N", NO_WORD),
     "Length of the training in tokens over all ranks. k, M and G may follow the number: 1500k, 2M, 1.5G."},
    {"epochs", GROUP_DATA, EVERY_RULE, SAME_BITS, // the bits follow from the tokens
     REAL_OPTION(epochs, "unset", 1e-6, 1e6, "X", "unset", 0),
     "Length of the training in passes over the training data, such as 3 or 0.5, instead of --tokens. What "
     "is held out for validation is no part of it. The run saves the number of tokens that it comes to as "
     "--tokens. Not for the built-in corpus, which is endless."},
    {"seed", GROUP_DATA, EVERY_RULE, OTHER_BITS, INTEGER_OPTION(seed, "1", 0, 4294967295.0, "N", NO_WORD),
     "Determines the initial parameters, the order of the data and the sample. With the same seed and the "
     "same ranks a run repeats bit for bit, unless an option makes it follow a measurement."},

    {"lr", GROUP_RATE, EVERY_RULE, OTHER_BITS,
     REAL_OPTION(learning_rate, "auto", 1e-12, 100, "RATE", "auto", 0),
     "Peak learning rate. auto: chosen by the size of the model, and a tenth of that for --finetune."},
    {"min-lr", GROUP_RATE, EVERY_RULE, OTHER_BITS,
     REAL_OPTION(minimum_learning_rate, "auto", 0, 100, "RATE", "auto", -1),
     "Learning rate at the end of the schedule. auto: a tenth of --lr."},
    {"lr-by", GROUP_RATE, EVERY_RULE, OTHER_BITS,
     CHOICE_OPTION(learning_rate_by, "grads", "grads", "commits"),
     "What the schedule counts. grads: micro-batches trained on, so that rules with other or varying batches "
     "have the same rate after the same tokens; commits: updates."},
    {"schedule", GROUP_RATE, EVERY_RULE, OTHER_BITS,
     CHOICE_OPTION(schedule, "cosine", "cosine", "linear", "constant"),
     "Shape of the decrease from --lr to --min-lr after the warm-up. constant stays at --lr, which suits "
     "runs without a fixed end."},
    {"warmup", GROUP_RATE, EVERY_RULE, OTHER_BITS,
     INTEGER_OPTION(warmup, "auto", 0, OPTION_NO_LIMIT, "COMMITS", "auto", -1),
     "The learning rate rises linearly over the first COMMITS updates. Longer is safer at a high rate and "
     "slower at the start. auto: a twentieth of the run, at most 1000."},
    {"weight-decay", GROUP_RATE, EVERY_RULE, OTHER_BITS,
     REAL_OPTION(weight_decay, "auto", 0, 100, "X", "auto", -1),
     "AdamW shrinks the parameters by this times the learning rate at each commit. auto: 0.1; for --finetune "
     "0."},
    {"decay", GROUP_RATE, EVERY_RULE, OTHER_BITS, CHOICE_OPTION(decay, "matrices", "matrices", "all"),
     "What decays: weight matrices and embeddings only, or biases and normalisation as well."},
    {"beta1", GROUP_RATE, EVERY_RULE, OTHER_BITS, REAL_OPTION(beta1, "0.9", 0, 0.999999, "X", NO_WORD),
     "Memory of AdamW's mean gradient. Higher is smoother and slower to turn."},
    {"beta2", GROUP_RATE, EVERY_RULE, OTHER_BITS, REAL_OPTION(beta2, "0.95", 0, 0.999999, "X", NO_WORD),
     "Memory of AdamW's mean squared gradient. Higher is steadier, lower recovers faster from a spike."},
    {"eps", GROUP_RATE, EVERY_RULE, OTHER_BITS, REAL_OPTION(eps, "1e-8", 1e-30, 1, "X", NO_WORD),
     "Added to AdamW's divisor. Larger damps parameters whose gradients are tiny."},
    {"moments", GROUP_RATE, EVERY_RULE, OTHER_BITS, CHOICE_OPTION(moments, "fp32", "fp32", "bf16"),
     "Number format in which AdamW keeps its two means. bf16: 4 bytes a parameter instead of 8, in memory "
     "and in checkpoints. They are rounded up or down at random, so that small changes are not lost; the "
     "random numbers come from --seed, and runs repeat bit for bit."},
    {"grad-clip", GROUP_RATE, EVERY_RULE, OTHER_BITS,
     REAL_OPTION(grad_clip, "1", 1e-6, 1e6, "NORM", "off", 0),
     "A gradient whose norm is larger is scaled down to it: the norm over all ranks, for local rules that of "
     "the rank. Lower tames spikes and may slow learning. off, or 0: no gradient is scaled."},
    {"on-spike", GROUP_RATE, EVERY_RULE, OTHER_BITS,
     CHOICE_OPTION(on_spike, "stop", "stop", "skip", "rollback"),
     "What to do when a loss or gradient is not finite or, by --spike-limit, too large. No step is ever made "
     "with it, and the message names rank, batch and tensor (for a value that is only too large: the rank). "
     "stop: end the run. skip: leave out the step and its data, up to ten times in a row. rollback: return "
     "to the latest checkpoint and continue with the data that come next."},
    {"spike-limit", GROUP_RATE, EVERY_RULE, OTHER_BITS,
     REAL_OPTION(spike_limit, "off", 1, 1000, "X", "off", 0),
     "A loss or gradient norm is too large when its logarithm is X standard deviations above the mean of "
     "about the latest hundred. Lower catches more, also more that is harmless; 6 is seldom wrong. off: only "
     "values that are not finite are spikes."},

    {"device", GROUP_MACHINE, EVERY_RULE, PLACEMENT, CHOICE_OPTION(device, "auto", "auto", "cpu", "cuda"),
     "Where a rank computes. auto: on a GPU, where the program was built for it and the node has one (the "
     "ranks of a node take its GPUs in turn); otherwise on the CPU. Ranks of one run may differ."},
    {"precision", GROUP_MACHINE, EVERY_RULE, OTHER_BITS,
     CHOICE_OPTION(precision, "auto", "auto", "fp32", "bf16", "fastest", "fp16"),
     "Number format of weights and activations; sums, master parameters and gradients are always fp32, "
     "moments as --moments says. auto: bf16 on a GPU, fp32 on a CPU. bf16 on a CPU: faster where the "
     "processor multiplies "
     "bf16 (AVX-512 BF16, AMX), slower elsewhere: the first lines of the run say how much, by a measurement "
     "of two seconds; refused where the library of matrix products cannot. fastest: bf16 on a GPU; on CPUs "
     "bf16 where the slowest rank measures it to be a tenth faster. So bits may change from run to run, but "
     "a "
     "run that is resumed keeps its choice. fp32 on a GPU is for comparisons: exact, and many times slower. "
     "fp16 is refused with the "
     "reason."},
    {"recompute", GROUP_MACHINE, EVERY_RULE, SAME_BITS,
     CHOICE_OPTION(recompute, "auto", "auto", "none", "gelu", "layernorm", "block"),
     "What the backward pass computes again instead of reading it from memory. gelu: the outputs of GELU; "
     "layernorm: those of the LayerNorms, too; block: whole layers, which takes a third more time and a "
     "fraction of the memory. auto: the least that fits into the GPU. On a CPU: none or block, and auto is "
     "none."},
    {"gpu-exchange", GROUP_MACHINE, EVERY_RULE, SAME_BITS,
     CHOICE_OPTION(gpu_exchange, "auto", "auto", "nccl", "host"),
     "How GPUs send each other what --wire encodes. nccl: directly; every rank needs a GPU of its own. host: "
     "through host memory and MPI, which leaves the GPU's processors free. auto: nccl where possible. Both "
     "add in the same order; the GPU's library may compute products in another way beside nccl."},
    {"nccl-ctas", GROUP_MACHINE, EVERY_RULE, SAME_BITS,
     INTEGER_OPTION(nccl_ctas, "auto", 1, 1024, "N", "auto", 0),
     "Multiprocessors of the GPU that NCCL may occupy beside the computation, on each level of the exchange. "
     "Matrix products are planned for the others. Fewer leave more for these but may not fill a fast link. "
     "auto: 8, and at most an eighth of the GPU. Messages of NCCL take a power of two, rounded up."},
    {"threads", GROUP_MACHINE, EVERY_RULE, SAME_BITS,
     INTEGER_OPTION(threads, "auto", 1, 4096, "N", "auto", 0),
     "Compute threads per rank. auto: the physical cores of the node divided by its ranks, or those that the "
     "launcher bound this rank to."},
    {"ranks", GROUP_MACHINE, EVERY_RULE, SAME_BITS, INTEGER_OPTION(ranks, "1", 1, 1e6, "N", NO_WORD),
     "How many ranks `train_gpt plan` plans for. A run has as many as mpirun or srun started."},
    {"gpu-memory", GROUP_MACHINE, EVERY_RULE, SAME_BITS,
     COUNT_OPTION(gpu_memory, "auto", 1e6, OPTION_NO_LIMIT, "BYTES", "auto", 0),
     "Lets `train_gpt plan` plan for a GPU that is elsewhere, with so many bytes of memory: 80G for one of "
     "80 "
     "GB. auto: for the GPU of this node."},
    {"timeout-s", GROUP_MACHINE, EVERY_RULE, SAME_BITS,
     REAL_OPTION(timeout_s, "300", 1, 1e6, "SECONDS", NO_WORD),
     "A collective operation that waits longer than this ends the whole job and names the ranks that did not "
     "arrive."},

    {"report-every", GROUP_REPORT, EVERY_RULE, SAME_BITS,
     INTEGER_OPTION(report_every, "10", 1, OPTION_NO_LIMIT, "COMMITS", NO_WORD),
     "Commits between two reports on the terminal and in the log."},
    {"val-every", GROUP_REPORT, EVERY_RULE, SAME_BITS,
     INTEGER_OPTION(val_every, "50", 1, OPTION_NO_LIMIT, "COMMITS", "end", 0),
     "Commits between two validations, which cost a forward pass of --val-batches each. end: only at the "
     "end."},
    {"val-batches", GROUP_REPORT, EVERY_RULE, OTHER_BITS,
     INTEGER_OPTION(val_batches, "16", 1, 1e6, "N", "none", 0),
     "Micro-batches of one validation, over all ranks, at most as many as visit every held-out window once. "
     "More are less noisy and take longer; none: no validation."},
    {"save-every", GROUP_REPORT, EVERY_RULE, SAME_BITS,
     TEXT_OPTION(save_every, "end", 1, "COMMITS|TIME|end|never"),
     "How often a checkpoint is written to OUT/checkpoints: after so many commits, or after a time, as 30s, "
     "10m or 2h. Each needs about 16 bytes a parameter, 12 with --moments bf16, and is written beside "
     "training where there is memory for a copy. end: only at the end, and when Ctrl-C or a signal asks the "
     "run to stop (exit code 75: start it again with --resume auto). never: not even then (exit code 4), "
     "for benchmarks."},
    {"keep", GROUP_REPORT, EVERY_RULE, SAME_BITS, INTEGER_OPTION(keep, "2", 1, 1e6, "N", NO_WORD),
     "How many of the latest checkpoints are kept."},
    {"keep-every", GROUP_REPORT, EVERY_RULE, SAME_BITS,
     INTEGER_OPTION(keep_every, "off", 1, OPTION_NO_LIMIT, "COMMITS", "off", 0),
     "Checkpoints at multiples of this number of commits are kept as well."},
    {"resume", GROUP_REPORT, EVERY_RULE, SAME_BITS, TEXT_OPTION(resume, "off", 1, "off|auto|PATH"),
     "Continues from a checkpoint. auto: from the newest sound one in --out, where the log continues, too; a "
     "new run begins where there is none. PATH: from that one, or the newest one of that run, in a new "
     "--out. Ranks, rule and device may "
     "differ; the run then says what is not exact."},
    {"out", GROUP_REPORT, EVERY_RULE, SAME_BITS, TEXT_OPTION(out, "auto", 1, "DIR|auto"),
     "The run's directory, created with its parents; a directory that already holds a run is refused. auto: "
     "runs/MODEL-OPTIMIZER-N with the first free N."},
    {"trace", GROUP_REPORT, EVERY_RULE, SAME_BITS, TEXT_OPTION(trace, "", 0, "FILE"),
     "Writes what both streams of every rank do and when, as Chrome trace JSON, which ui.perfetto.dev shows. "
     "The file grows with every commit: meant for short runs."},
    {"config", GROUP_REPORT, EVERY_RULE, SAME_BITS, TEXT_OPTION(config, "", 1, "FILE"),
     "Reads options from lines `name = value`, with # before comments; a run saves such a file. The command "
     "line wins over it."},

    {"task", GROUP_EVALUATION, EVERY_RULE, OTHER_BITS,
     CHOICE_OPTION(task, "perplexity", "perplexity", "lambada", "hellaswag"),
     "What train_gpt eval measures on --data: the perplexity of a text or of tokens; or LAMBADA or HellaSwag "
     "from their JSON lines, counted as lm-evaluation-harness does. --seq-len is the longest context."},
    {"stride", GROUP_EVALUATION, EVERY_RULE, OTHER_BITS,
     INTEGER_OPTION(stride, "half", 1, 1048576, "N", "half", 0),
     "Tokens between the starts of two perplexity windows: fewer give every token more context and take "
     "longer. half: half a window."},
    {"limit", GROUP_EVALUATION, EVERY_RULE, OTHER_BITS,
     INTEGER_OPTION(limit, "all", 1, OPTION_NO_LIMIT, "N", "all", 0), "Only the first N windows or lines."},

    {"sample-tokens", GROUP_SAMPLE, EVERY_RULE, SAME_BITS,
     COUNT_OPTION(sample_tokens, "256", 1, 1e6, "N", "none", 0),
     "Tokens of text that the trained model writes at the end; fewer where the model ends the text itself."},
    {"sample-every", GROUP_SAMPLE, EVERY_RULE, SAME_BITS,
     INTEGER_OPTION(sample_every, "end", 1, OPTION_NO_LIMIT, "COMMITS", "end", 0),
     "Commits between two samples, which also go into the log. Rank 0 writes them on its CPU while the other "
     "ranks wait: about a forward pass of one position for every token. end: one sample, when training has "
     "ended."},
    {"temperature", GROUP_SAMPLE, EVERY_RULE, SAME_BITS,
     REAL_OPTION(temperature, "0.8", 0, 100, "X", NO_WORD),
     "Lower is safer and duller, higher is wilder; 0 always takes the most likely token."},
    {"top-k", GROUP_SAMPLE, EVERY_RULE, SAME_BITS, INTEGER_OPTION(top_k, "40", 1, 1e6, "N", "off", 0),
     "Chooses only among the N most likely tokens, which keeps odd tokens out."},
    {"prompt", GROUP_SAMPLE, EVERY_RULE, SAME_BITS, TEXT_OPTION(prompt, "", 0, "TEXT"),
     "What the sample starts with, at most 1023 bytes. Empty: the model starts by itself. Models that read "
     "token ids need a --tokenizer."},

    {"link-mbit", GROUP_EMULATION, EVERY_RULE, SAME_BITS,
     REAL_OPTION(link_mbit, "off", 1e-3, 1e6, "MBIT", "off", 0),
     "Emulates a slow network: no host sends more than MBIT million bits a second to others; its ranks have "
     "equal shares of that. Where all ranks are on one machine, each counts as a host, unless "
     "--ranks-per-host says otherwise."},
    {"ranks-per-host", GROUP_EMULATION, EVERY_RULE, PLACEMENT,
     INTEGER_OPTION(ranks_per_host, "auto", 1, 1e6, "N", "auto", 0),
     "Lets every N ranks that follow each other count as one host, whatever machine they are on: for an "
     "emulated link, and so that a run that goes on on other machines still adds in the same order. "
     "auto: the machines."},
    {"link-us", GROUP_EMULATION, EVERY_RULE, SAME_BITS,
     REAL_OPTION(link_us, "off", 1e-3, 1e6, "US", "off", 0),
     "Emulates a distant network: every message arrives US microseconds late. Many small messages suffer "
     "most."},
    {"chaos-ms", GROUP_EMULATION, EVERY_RULE, SAME_BITS,
     REAL_OPTION(chaos_ms, "off", 1e-3, 6e4, "MS", "off", 0),
     "Waits for a random time of up to MS milliseconds before every communication operation. No bit of a "
     "result may change: a test of the scheduler."},
    {"slow-rank", GROUP_EMULATION, EVERY_RULE, SAME_BITS,
     INTEGER_OPTION(slow_rank, "none", 0, 1e6, "RANK", "none", -1),
     "Emulates one slow machine: this rank sleeps for --slow-ms at every micro-batch."},
    {"slow-ms", GROUP_EMULATION, EVERY_RULE, SAME_BITS, REAL_OPTION(slow_ms, "0", 0, 1e6, "MS", NO_WORD),
     "How long --slow-rank sleeps at every micro-batch, in milliseconds."},

    {"like", GROUP_PLAN, EVERY_RULE, SAME_BITS, TEXT_OPTION(like, "", 0, "RUN"),
     "The directory of a run whose computing times the plan takes, from its log. Model, data, batch and rule "
     "are as in that run, too, where they are not given."},
    {"compute-ms", GROUP_PLAN, EVERY_RULE, SAME_BITS,
     REAL_OPTION(compute_ms, "auto", 1e-6, 1e9, "MS", "auto", 0),
     "What one rank needs to compute one micro-batch, forward and backward. auto: as in --like; without it, "
     "measured here where that takes no more than a few seconds, otherwise worked out from the measured rate "
     "of matrix products."},
    {"host-mbit", GROUP_PLAN, EVERY_RULE, SAME_BITS,
     REAL_OPTION(host_mbit, "auto", 1e-3, 1e8, "MBIT", "auto", 0),
     "Million bits a second that a host can send to the others, and receive at the same time; its ranks "
     "share "
     "them. What data get of it is 95 %. auto: --link-mbit, and where that is off 10000."},
    {"host-us", GROUP_PLAN, EVERY_RULE, SAME_BITS, REAL_OPTION(host_us, "auto", 1e-3, 1e8, "US", "auto", 0),
     "Microseconds that a short message takes from one host to another. auto: --link-us, and where that is "
     "off 50."},
    {"inside-mbit", GROUP_PLAN, EVERY_RULE, SAME_BITS,
     REAL_OPTION(inside_mbit, "off", 1e-3, 1e8, "MBIT", "off", 0),
     "Million bits a second that each rank can send to the others of its host. off: as fast as memory, which "
     "is right for CPUs and for GPUs with a fast link among them."},
    {"inside-us", GROUP_PLAN, EVERY_RULE, SAME_BITS, REAL_OPTION(inside_us, "10", 1e-3, 1e8, "US", NO_WORD),
     "Microseconds that a short message takes from one rank to another of its host."},
    {"fit", GROUP_PLAN, EVERY_RULE, SAME_BITS, SWITCH_OPTION(fit, "off"),
     "on: plans with the largest --micro-batch that fits into the memory, and with the least --recompute "
     "that "
     "leaves room for a batch of a size at which matrix products are fast (1024 tokens on CPUs, 8192 on "
     "GPUs). The plan prints both as options for a run."},
    {"json", GROUP_PLAN, EVERY_RULE, SAME_BITS, TEXT_OPTION(json, "", 0, "FILE"),
     "Writes what the plan says about time to FILE, as JSON, with all its numbers."},
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

static inline const OptionSpec *option_find(const char *name) {
    for (int i = 0; i < OPTION_COUNT_OF_TABLE; i++) {
        if (strcmp(option_table[i].name, name) == 0) { return &option_table[i]; }
    }
    return NULL;
}

// Whether `name` is a word of a list such as "one, two or three".
static inline bool option_list_names(const char *list, const char *name) {
    size_t length = strlen(name);
    for (const char *word = list; *word != '\0'; word += strspn(word, ", ")) {
        size_t letters = strcspn(word, ", ");
        if (letters == length && strncmp(word, name, length) == 0) { return true; }
        word += letters;
    }
    return false;
}

// The error for a name that no option has. `dashes`: "--" on the command line, "" in a
// file.
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

#endif
