// options_table.h: every option of the program, written down once.
//
// A row says what an option is, who may give it and what it goes together with, so that
// no other code knows options by name. The columns are OptionSpec's. options.h includes this
// file twice: for the fields of Options, and for option_table. So a new option is a row here;
// RULE_OPTION: the field is one of the rule's own struct.
//
// Some numbers have a word that means "the program decides" or "off". It is stored as 0
// (for --min-lr and other options where 0 is a value of its own: as -1).
#ifndef OPTION
#include "options/options.h"
#else
// clang-format off
    OPTION("optimizer", RULE, COMPARED_APART, CHOICE, rule, "acco", .choices = {"ddp", "zero1", "dpu",
     "acco-wp", "acco", "co2", "diloco", "streaming-diloco", "sparse-loco"}, .also = "rule", .help =
     "The update rule. ddp: every rank holds the whole optimizer state; zero1: each rank holds a shard of "
     "it; both exchange gradients and parameters during the backward and forward passes. dpu, acco-wp and "
     "acco shard the state, too, and exchange during the whole next batch. dpu: gradients are one commit "
     "old; acco-wp: dpu, with gradients at predicted parameters; acco: no gradient is old, but part of each "
     "batch is computed at an estimate of the next parameters, which travels, too. co2, diloco, "
     "streaming-diloco and sparse-loco hold the whole state on every rank, take local steps, and exchange "
     "seldom. co2: hides the exchange and applies it one round later; diloco: waits for it; "
     "streaming-diloco: hides it, one fragment of the model at a time; sparse-loco: sends only the largest "
     "elements, a 140th of a vector, to every other rank.")
    OPTION("accumulate", RULE, OTHER_BITS, INTEGER, accumulate, "2", 1, 1e6, "N", .word = "auto",
     .relations = {EXCLUDES_IF("auto", learning_rate_by, "commits"), EXCLUDES_IF("auto", overlap, "off")},
     .also = "grad-accum, gradient-accumulation-steps", .help =
     "Micro-batches per rank and commit; for co2, diloco, streaming-diloco and sparse-loco per inner step. "
     "acco computes them in two rounds (--acco-split), so it needs two at least. auto (acco, acco-wp, dpu): "
     "as many as hide the communication, at least one in each round; the batch then varies, and runs do not "
     "repeat bit for bit.")
    OPTION("rank-accumulate", RULE, OTHER_BITS, TEXT, rank_accumulate, "", 0, "LIST",
     .rules = "ddp, zero1, dpu, acco-wp or acco", .relations = {INSTEAD_OF(accumulate)}, .help =
     "A number of micro-batches for each rank, as in 4,4,1,1, instead of --accumulate. It lets fast and slow "
     "ranks finish together; every micro-batch still has the same weight. For acco each must be 2 or more.")
    OPTION("wire", RULE, OTHER_BITS, CHOICE, wire, "fp32", .choices = {"fp32", "bf16", "int8", "int4",
     "e3m0"}, .relations = {EXCLUDES(rule, "sparse-loco")}, .also = "compression", .help =
     "Number format in which ranks send vectors to each other; sums are fp32 (but see --exchange library). "
     "bf16 halves the traffic, and rounds every gradient and parameter. int8 needs about a quarter of it, "
     "and on small models no more tokens to a loss than fp32; int4 needs a seventh, and e3m0 (a sign and a "
     "power of two) an eighth. Where ranks step together, what these two lose of a gradient is added to the "
     "next one, which takes one vector more; other rules need more tokens. plan says which is first. "
     "Gradients travel in blocks of 256 with one scale, of int4 in groups of 32, parameters as differences "
     "to what all ranks already hold.")
    OPTION("exchange", RULE, PLACEMENT, CHOICE, exchange, "auto", .choices = {"auto", "flat", "two-level",
     "library"}, .relations = {EXCLUDES_IF("library", wire, "int8"), EXCLUDES_IF("library", wire, "int4"),
     EXCLUDES_IF("library", wire, "e3m0"), EXCLUDES_IF("library", rule, "sparse-loco")}, .help =
     "How vectors are added up and spread. flat: every rank sends straight to every other. two-level: the "
     "ranks of a host add up among themselves in fp32 first, so that a vector crosses the link between hosts "
     "only once per host, and is rounded by --wire only there. library: by NCCL's own collectives, for GPUs "
     "with fp32 or bf16 on the wire: made for speed at scale, but the bits then depend on the library and on "
     "how the GPUs are connected. auto: two-level where several hosts have several ranks, otherwise flat.")
    OPTION("overlap", RULE, SAME_BITS, SWITCH, overlap, "on", .help =
     "off: every operation ends before the next one starts. The same bits, but slower.")

    OPTION("bucket-mb", SHARED, SAME_BITS, REAL, bucket_mb, "auto", 1e-3, 1e6, "MB", .word = "auto",
     .rules = "ddp or zero1", .help =
     "Size of the buckets in which gradients are sent during the backward pass. Small buckets leave earlier "
     "but cost more messages; large ones leave more to wait for at the end. auto: from the measured link.")
    OPTION("sequential", SHARED, OTHER_BITS, INTEGER, sequential, "0", 0, OPTION_NO_LIMIT, "COMMITS",
     .word = "warmup", .word_value = -1, .rules = "dpu, acco-wp or acco", .relations = {FOLLOWS(warmup)},
     .help = "The first COMMITS commits run without overlap, as under zero1: safer while the parameters "
     "change fastest, and slower meanwhile. warmup: those in which the learning rate rises (--warmup).")
    RULE_OPTION("acco-split", SHARED, OTHER_BITS, TEXT, rules.acco.split, "wire", 1, "wire|auto|half|SHARE",
     .rules = "acco", .relations = {EXCLUDES(accumulate, "auto"), FOLLOWS(accumulate),
     FOLLOWS(rank_accumulate), FOLLOWS(wire), FOLLOWS(micro_batch), FOLLOWS(seq_len)}, .measured = "auto",
     .help = "How a rank's micro-batches are divided between round A, during a commit's exchange, and round "
     "B, during an estimate's. Each round has at least one. SHARE: the part that round A has, such as 0.875. "
     "half: 0.5, as in the paper. wire: in proportion to the bytes of the two exchanges, which hides both "
     "equally well: halves where --estimate-wire is same, 4 of 5 in round A for int8 under fp32. auto: what "
     "makes commits shortest by the measured times of a micro-batch and of the exchanges, and among equals "
     "the largest round A. The bits then follow from a measurement. It is made once: log, configuration and "
     "checkpoints hold the share, and a run that is resumed as it was keeps it.")
    RULE_OPTION("acco-init", SHARED, OTHER_BITS, INTEGER, rules.acco.first_round, "round", 1, 1e6, "N",
     .word = "round", .rules = "acco", .help =
     "Micro-batches per rank of the very first round, which overlaps no communication. round: as many as in "
     "every later round A, so that the first commit has a full batch. 1, as in the paper's code: starts "
     "sooner, with a smaller batch.")
    RULE_OPTION("estimate-wire", SHARED, OTHER_BITS, CHOICE, rules.acco.estimate_wire, "same",
     .choices = {"same", "auto", "fp32", "bf16", "int8", "int4", "e3m0"}, .rules = "acco",
     .relations = {EXCLUDES_IF("auto", accumulate, "auto"), EXCLUDES_IF("auto", exchange, "library"),
     EXCLUDES_IF("int8", exchange, "library"), EXCLUDES_IF("int4", exchange, "library"), EXCLUDES_IF("e3m0",
     exchange, "library"), FOLLOWS(accumulate), FOLLOWS(rank_accumulate), FOLLOWS(wire), FOLLOWS(micro_batch),
     FOLLOWS(seq_len)}, .measured = "auto", .help =
     "Number format in which the estimate is exchanged; the commit keeps --wire. A coarser format saves up "
     "to half of acco's traffic. It does not round the parameters, but round A's gradients are computed at a "
     "coarser estimate of them. same: as --wire. auto: the finest with which commits take no longer than "
     "with any other, measured as for --acco-split auto; bits follow from it.")

    RULE_OPTION("co2-tau", LOCAL, OTHER_BITS, INTEGER, rules.co2.inner_steps, "12", 1, 1e6, "N",
     .rules = "co2", .help =
     "Inner steps of each rank between two exchanges (the paper's tau). More of them send less and give the "
     "exchange more time, but ranks drift further apart and receive older information.")
    RULE_OPTION("co2-beta", LOCAL, OTHER_BITS, REAL, rules.co2.beta, "0", 0, 0.999999, "X", .rules = "co2",
     .help = "Momentum of the outer step (beta). More keeps its direction over several rounds, but "
     "overshoots more, because what it receives is one round old: 0 for few ranks, 0.5 for 64.")
    RULE_OPTION("co2-alpha", LOCAL, OTHER_BITS, REAL, rules.co2.alpha, "1", 1e-6, 100, "X", .rules = "co2",
     .help = "Length of the outer step (alpha). 1 moves as far as the ranks have moved on average; less is "
     "steadier and slower.")
    RULE_OPTION("co2-phi", LOCAL, OTHER_BITS, REAL, rules.co2.phi, "off", 1e-12, 1e6, "X", .word = "off",
     .rules = "co2", .help =
     "Limit for every element of the outer momentum (phi); the part that --co2-eager applies at once is not "
     "limited. Lower tames spikes and may slow learning.")
    RULE_OPTION("co2-gap", LOCAL, OTHER_BITS, REAL, rules.co2.gap, "2", 1, 1e6, "X", .rules = "co2", .help =
     "Divides the mean pseudo-gradient by X, because it is one round old (the staleness gap "
     "penalty). Larger is steadier and slower. 1 is what the paper's code has; it is at the edge of "
     "stability where a round covers the whole distance to a minimum.")
    RULE_OPTION("co2-eager", LOCAL, OTHER_BITS, SWITCH, rules.co2.eager, "on", .rules = "co2", .help =
     "on applies a rank's own part of the mean at once, and only the others' parts one round later: which "
     "ends lower. off is the paper's form, and takes one copy of the parameters less.")
    RULE_OPTION("diloco-H", LOCAL, OTHER_BITS, INTEGER, rules.diloco.inner_steps, "30", 1, 1e6, "N",
     .rules = "diloco or streaming-diloco", .help =
     "Inner steps of each rank between two exchanges (the paper's H); for streaming-diloco between two "
     "exchanges of the same fragment. More of them send less, but the ranks drift further apart.")
    RULE_OPTION("diloco-outer-lr", LOCAL, OTHER_BITS, REAL, rules.diloco.outer_learning_rate, "auto", 1e-6,
     100, "RATE", .word = "auto", .word_value = -1, .rules = "diloco or streaming-diloco", .help =
     "Learning rate of the outer step along the mean pseudo-gradient. Lower is steadier and slower; 1 with "
     "--diloco-mu 0 is the plain average of the ranks. auto: 1 for diloco, 0.7 for streaming-diloco.")
    RULE_OPTION("diloco-mu", LOCAL, OTHER_BITS, REAL, rules.diloco.outer_momentum, "auto", 0, 0.999999, "X",
     .word = "auto", .word_value = -1, .rules = "diloco or streaming-diloco", .help =
     "Nesterov momentum of the outer step (mu). Higher gains speed where the direction stays the same, and "
     "overshoots where it turns. DiLoCo's paper has 0.9 with a rate of 0.7, and thousands of outer steps. "
     "auto: 0.3 for diloco, 0.9 for streaming-diloco.")
    RULE_OPTION("streaming-P", LOCAL, OTHER_BITS, INTEGER, rules.diloco.fragments, "2", 1, 1e6, "N",
     .rules = "streaming-diloco", .help =
     "Fragments of the model (P), exchanged one at a time, every H/P steps; H must be a multiple of P. More "
     "fragments make smaller bursts, which are easier to hide; the traffic in all stays the same.")
    RULE_OPTION("streaming-tau", LOCAL, OTHER_BITS, INTEGER, rules.diloco.delay, "1", 0, 1e6, "N",
     .rules = "streaming-diloco", .help =
     "Inner steps that an exchange may take while training goes on (tau), below H/P. More of them tolerate a "
     "slower network, but what arrives is as many steps old; 0 waits.")
    RULE_OPTION("streaming-alpha", LOCAL, OTHER_BITS, REAL, rules.diloco.alpha, "0.5", 0, 1, "X",
     .rules = "streaming-diloco", .help =
     "Weight that a rank's own parameters keep when a fragment arrives (alpha). 0 takes the common ones and "
     "drops the steps made since the fragment was sent; 1 keeps the rank's own, and the ranks never agree.")
    RULE_OPTION("sparse-H", LOCAL, OTHER_BITS, INTEGER, rules.sparse_loco.inner_steps, "4", 1, 1e6, "N",
     .rules = "sparse-loco", .help =
     "Inner steps of each rank between two exchanges (the paper's H). More of them send less, but the ranks "
     "drift further apart, and what is not sent waits longer. The paper has 15 to 250 in runs of thousands "
     "of exchanges.")
    RULE_OPTION("sparse-beta", LOCAL, OTHER_BITS, REAL, rules.sparse_loco.beta, "1", 0, 1, "X",
     .rules = "sparse-loco", .help =
     "What is left after a period of the elements that a rank has not sent (beta). 1 forgets nothing; 0 "
     "drops at once what is not sent. The paper has 0.95.")
    RULE_OPTION("sparse-eager", LOCAL, OTHER_BITS, SWITCH, rules.sparse_loco.eager, "on",
     .rules = "sparse-loco", .help =
     "on: the steps that a rank has made and not sent yet stay in its own parameters, which ends much lower. "
     "off: it goes on from the common ones and keeps them only for a later sending, as in the paper.")
    RULE_OPTION("sparse-alpha", LOCAL, OTHER_BITS, REAL, rules.sparse_loco.alpha, "2", 1e-6, 100, "X",
     .rules = "sparse-loco", .help =
     "Length of the outer step along the mean of what the ranks have sent (alpha). Less is steadier and "
     "slower. Few ranks send the same element in the same round, so that the mean is short: up to "
     "four ranks 2 ended lower than the paper's 1 and than 4, with eight ranks 4.")
    RULE_OPTION("sparse-tau", LOCAL, OTHER_BITS, INTEGER, rules.sparse_loco.delay, "0", 0, 1e6, "N",
     .rules = "sparse-loco", .help =
     "Inner steps that an exchange may take while training goes on (tau), below H. More of them tolerate a "
     "slower network, but what arrives is as many steps old; 0 waits, as the paper does. Above 0 it takes "
     "one more copy of the parameters.")

    OPTION("model", DATA, COMPARED_APART, TEXT, model, "tiny", 1, "NAME|PATH", .help =
     "A preset (of GPT-Neo: tiny, 36M, 125M, 1.3B, 2.7B; of GPT-2: gpt2, gpt2-medium, gpt2-large, gpt2-xl; "
     "of Llama: smollm2-135M, smollm2-360M, tinyllama-1.1B, llama-3.2-1B; of Qwen: qwen2.5-0.5B, qwen3-0.6B) "
     "or the path of a Hugging Face config.json with model_type gpt_neo, gpt2, llama, mistral, qwen2 or "
     "qwen3.")
    OPTION("from", DATA, COMPARED_APART, TEXT, from, "", 0, "DIR", .commands = FOR_TRAINING | FOR_SAMPLES |
     FOR_EVALUATION | FOR_AVERAGES | FOR_EXPORTS,
     .relations = {INSTEAD_OF(model), INSTEAD_OF(finetune)}, .also = "model-name-or-path", .help =
     "A Hugging Face directory of a model to start from (config.json and model.safetensors), or a "
     "checkpoint, which contains one, or a run, for its newest checkpoint. It takes the place of --model.")
    OPTION("finetune", DATA, COMPARED_APART, TEXT, finetune, "", 0, "DIR", .relations = {INSTEAD_OF(model)},
     .help = "As --from DIR, for fine-tuning: --lr auto is then a tenth of its usual value, --weight-decay "
     "auto is 0. The optimizer state starts from zero. Tokens that the mask of a token file excludes are "
     "read, but their loss does not count.")
    OPTION("freeze", DATA, OTHER_BITS, TEXT, freeze, "", 0, "NAMES", .help =
     "Tensors that are not trained: patterns as of the shell, with commas between them, of names such as "
     "wte, h.0.*, ln_* or h.[0-5].mlp.c_fc.weight. They have no gradient and no moments, and are not sent.")
    OPTION("lora-rank", DATA, OTHER_BITS, INTEGER, lora_rank, "off", 1, 4096, "R", .word = "off",
     .relations = {INSTEAD_OF(freeze)}, .also = "lora, lora-r", .help =
     "Trains adapters of rank R, two small matrices for each of --lora-on, and freezes the model (LoRA). "
     "What is stepped, sent and saved is then about a hundredth of it. Checkpoints hold the adapters as "
     "peft stores them; train_gpt export merges them into the model.")
    OPTION("lora-alpha", DATA, OTHER_BITS, REAL, lora_alpha, "16", 1e-6, 1e6, "X",
     .relations = {NEEDS(lora_rank)}, .help =
     "Adapters count X / R. Larger acts as a larger --lr on what they add to the model.")
    OPTION("lora-on", DATA, OTHER_BITS, TEXT, lora_on, "*", 1, "NAMES", .relations = {NEEDS(lora_rank)},
     .also = "lora-targets, target-modules, lora-target-modules", .help =
     "Matrices of the layers that have adapters: patterns as for --freeze, such as q_proj,v_proj.")
    OPTION("data", DATA, BY_CONTENT, TEXT, data, "builtin", 1, "PATH|builtin",
     .commands = FOR_TRAINING | FOR_EVALUATION, .also = "dataset, data-path, train-file", .help =
     "Training text: builtin is an endless source of small stories whose entropy is known; otherwise text or "
     "token files (a quoted glob names several). 'a.bin:0.7,b.bin:0.3' mixes sources: of 10 samples 7 are of "
     "a.bin; each is validated and reported by itself. Text is tokenized by the model's tokenizer, once, "
     "into OUT/tokens-*.bin; a model of 256 tokens without a tokenizer reads its bytes.")
    OPTION("tokenizer", DATA, BY_CONTENT, TEXT, tokenizer, "", 0, "PATH",
     .commands = FOR_TRAINING | FOR_SAMPLES | FOR_EVALUATION | FOR_TOKENS | FOR_EXPORTS, .help =
     "The tokenizer.json of a byte-level BPE, or its directory. It encodes texts and prompts and decodes "
     "samples of models that read token ids, and is copied with the model into checkpoints. Not given: the "
     "one of --from, --finetune or --resume, if there is one.")
    OPTION("val-data", DATA, HELD_OUT, TEXT, val_data, "", 0, "PATH", .relations = {EXCLUDES(val_batches,
     "none")}, .help =
     "Validation text, or several with weights, as --data. Not given: the end of --data is held out, and of "
     "each of its sources (for builtin: another random stream).")
    OPTION("micro-batch", DATA, OTHER_BITS, INTEGER, micro_batch, "auto", 1, 65536, "N", .word = "auto",
     .commands = FOR_TRAINING | FOR_EVALUATION,
     .also = "batch-size, train-batch-size, per-device-train-batch-size", .help =
     "Sequences that one rank computes at a time. More use the cores better and need more memory for "
     "activations. auto: 8, but 1 for models below 5 M parameters, which learn most from many small updates.")
    OPTION("seq-len", DATA, OTHER_BITS, INTEGER, seq_len, "auto", 1, 1048576, "N", .word = "auto",
     .commands = FOR_TRAINING | FOR_EVALUATION | FOR_TOKENS,
     .also = "context, block-size, max-length, max-seq-length, sequence-length", .help =
     "Tokens per sequence, at most the model's positions. auto: the model's positions, at most 1024.")
    OPTION("attend", DATA, OTHER_BITS, CHOICE, attend, "all", .choices = {"all", "document"},
     .commands = FOR_TRAINING | FOR_EVALUATION, .relations = {EXCLUDES_IF("document", task, "lambada"),
     EXCLUDES_IF("document", task, "hellaswag")}, .help =
     "What a token sees of the tokens before it in its sequence. document: only its own document's tokens; a "
     "document begins with an end-of-text token; positions go on through the sequence. It is faster where "
     "documents are much shorter than --seq-len. Data must be token files that say which token that is, or "
     "text for a tokenizer.")
    OPTION("tokens", DATA, OTHER_BITS, COUNT, tokens, "1500k", 1, OPTION_NO_LIMIT, "N",
     .also = "steps, max-steps, max-iters, iterations, num-iterations, commits, max-commits", .help =
     "Length of the training in tokens over all ranks. k, M and G may follow the number: 1500k, 2M, 1.5G.")
    OPTION("epochs", DATA, SAME_BITS, REAL, epochs, "unset", 1e-6, 1e6, "X", .word = "unset",
     .relations = {INSTEAD_OF(tokens), NEEDS(data)}, .also = "num-epochs, num-train-epochs", .help =
     "Length of the training in passes over the training data, such as 3 or 0.5, instead of --tokens. What "
     "is held out for validation is no part of it. The run saves the number of tokens that it comes to as "
     "--tokens. Not for the built-in corpus, which is endless, or for several sources.")
    OPTION("seed", DATA, OTHER_BITS, INTEGER, seed, "1", 0, 4294967295.0, "N",
     .commands = FOR_TRAINING | FOR_SAMPLES, .also = "random-seed", .help =
     "Determines the initial parameters, the order of the data and the sample. With the same seed and the "
     "same ranks a run repeats bit for bit, unless an option makes it follow a measurement.")

    OPTION("lr", RATE, OTHER_BITS, REAL, learning_rate, "auto", 1e-12, 100, "RATE", .word = "auto",
     .also = "lrate, learning-rate", .help =
     "Peak learning rate. auto: chosen by the size of the model; for --inner muon up to four times as high, "
     "by the tokens of a commit; a tenth of that for --finetune.")
    OPTION("min-lr", RATE, OTHER_BITS, REAL, minimum_learning_rate, "auto", 0, 100, "RATE", .word = "auto",
     .word_value = -1, .relations = {EXCLUDES(schedule, "constant"), FOLLOWS(learning_rate)}, .help =
     "Learning rate at the end of the schedule. auto: a tenth of --lr.")
    OPTION("lr-by", RATE, OTHER_BITS, CHOICE, learning_rate_by, "grads", .choices = {"grads", "commits"},
     .help = "What the schedule counts. grads: micro-batches trained on, so that rules with other or varying "
     "batches have the same rate after the same tokens; commits: updates.")
    OPTION("schedule", RATE, OTHER_BITS, CHOICE, schedule, "cosine", .choices = {"cosine", "linear",
     "wsd", "constant"}, .also = "lr-scheduler-type", .help =
     "Shape of the decrease from --lr to --min-lr. cosine and linear begin it after the warm-up. wsd "
     "(warm-up, stable, decay) stays at --lr and falls at the end, as 1 - sqrt does. constant stays at --lr, "
     "which suits runs whose end is not known: --decay-now ends them.")
    OPTION("decay-tokens", RATE, OTHER_BITS, COUNT, decay_tokens, "auto", 1, OPTION_NO_LIMIT, "N",
     .word = "auto", .relations = {EXCLUDES(schedule, "constant"), FOLLOWS(tokens)}, .help =
     "The last tokens of the run, over which the learning rate falls; before them it stays at --lr. k, M and "
     "G may follow. auto: a fifth of the run for wsd, all after the warm-up for cosine and linear.")
    OPTION("decay-now", RATE, SAME_BITS, COUNT, decay_now, "off", 1, OPTION_NO_LIMIT, "N", .word = "off",
     .commands = 1 << COMMAND_TRAIN, .relations = {INSTEAD_OF(tokens), INSTEAD_OF(epochs),
     INSTEAD_OF(decay_tokens), NEEDS(resume), EXCLUDES(resume, "auto")}, .of_one_run = true, .help =
     "Lets the learning rate fall from --resume's checkpoint on, and ends the run N tokens later: a branch "
     "that can be tried or published while the stable run goes on. It is --tokens and --decay-tokens worked "
     "out from the checkpoint; a --schedule constant becomes wsd.")
    OPTION("warmup", RATE, OTHER_BITS, INTEGER, warmup, "auto", 0, OPTION_NO_LIMIT, "COMMITS",
     .word = "auto", .word_value = -1, .also = "warmup-steps, warmup-iters", .help =
     "The learning rate rises linearly over the first COMMITS updates. Longer is safer at a high rate and "
     "slower at the start. auto: a twentieth of the run, at most 1000; with outer momentum mu at least H / "
     "(1 - mu) updates, but at most a third of the run.")
    OPTION("weight-decay", RATE, OTHER_BITS, REAL, weight_decay, "auto", 0, 100, "X", .word = "auto",
     .word_value = -1, .also = "wd", .help =
     "Each commit shrinks the parameters by this times the learning rate. auto: 0.1; for --finetune 0.")
    OPTION("decay", RATE, OTHER_BITS, CHOICE, decay, "matrices", .choices = {"matrices", "all"}, .help =
     "What decays: weight matrices and embeddings only, or biases and normalisation as well.")
    OPTION("beta1", RATE, OTHER_BITS, REAL, beta1, "0.9", 0, 0.999999, "X", .help =
     "Memory of AdamW's mean gradient. Higher is smoother and slower to turn.")
    OPTION("beta2", RATE, OTHER_BITS, REAL, beta2, "0.95", 0, 0.999999, "X", .help =
     "Memory of AdamW's mean squared gradient. Higher is steadier, lower recovers faster from a spike.")
    OPTION("eps", RATE, OTHER_BITS, REAL, eps, "1e-8", 1e-30, 1, "X", .help =
     "Added to AdamW's divisor. Larger damps parameters whose gradients are tiny.")
    OPTION("inner", RATE, OTHER_BITS, CHOICE, inner, "auto", .choices = {"auto", "adamw", "muon"},
     .word = "auto", .help =
     "What makes the steps inside every rule. muon: Muon for the matrices of the layers and AdamW for all "
     "else. Muon needs fewer commits than AdamW, above all with large batches, one moment less, and more "
     "computation for each commit. Its best --lr is one to four times AdamW's, the more the larger the batch "
     "is. auto: muon for a new model with 16,384 tokens a commit or more, where --lr is auto, too, but adamw "
     "for several GPUs, unless under local rules, and under ddp for ranks that round in different ways; "
     "otherwise adamw.")
    OPTION("muon-adamw-lr", RATE, OTHER_BITS, REAL, muon_adamw_rate, "auto", 1e-12, 100, "RATE",
     .word = "auto", .relations = {NEEDS(inner), EXCLUDES(inner, "adamw"), FOLLOWS(learning_rate)},
     .also = "adam-lr, embedding-lr", .help =
     "Peak learning rate of what AdamW steps beside Muon: embeddings, an untied head, norms and biases. It "
     "rises and falls as --lr does, and their weight decay stays that of --lr. auto: four times --lr for a "
     "new model whose embedding of 4,096 tokens or more is its head, too, where all ranks make one step "
     "together, which ended 0.04 to 0.22 nats lower; otherwise, and for bytes, --lr.")
    OPTION("muon-momentum", RATE, OTHER_BITS, REAL, muon_momentum, "0.95", 0, 0.999999, "X",
     .relations = {NEEDS(inner), EXCLUDES(inner, "adamw")}, .help = "Memory of Muon's mean gradient.")
    OPTION("muon-iterations", RATE, OTHER_BITS, INTEGER, muon_iterations, "5", 1, 100, "N",
     .relations = {NEEDS(inner), EXCLUDES(inner, "adamw")}, .help =
     "Iterations that take the singular values of a step towards 1. Fewer cost less and leave more of what "
     "the gradient had.")
    OPTION("moments", RATE, OTHER_BITS, CHOICE, moments, "fp32", .choices = {"fp32", "bf16"}, .help =
     "Number format in which AdamW keeps its two means. bf16: 4 bytes a parameter instead of 8, in memory "
     "and in checkpoints. They are rounded up or down at random, so that small changes are not lost; the "
     "random numbers come from --seed, and runs repeat bit for bit.")
    OPTION("grad-clip", RATE, OTHER_BITS, REAL, grad_clip, "1", 1e-6, 1e6, "NORM", .word = "off",
     .also = "max-grad-norm", .help =
     "A gradient whose norm is larger is scaled down to it: the norm over all ranks, for local rules the "
     "rank's own. Lower tames spikes and may slow learning. off, or 0: no gradient is scaled.")
    OPTION("on-spike", RATE, OTHER_BITS, CHOICE, on_spike, "stop", .choices = {"stop", "skip", "rollback"},
     .help = "What to do when a loss or gradient is not finite or, by --spike-limit, too large. No step is "
     "ever made with it, and the message names rank, batch and tensor (for a value that is only too large: "
     "the rank). stop: end the run. skip: leave out the step and its data, up to ten times in a row. "
     "rollback: return to the latest checkpoint and continue with the data that come next.")
    OPTION("spike-limit", RATE, OTHER_BITS, REAL, spike_limit, "off", 1, 1000, "X", .word = "off", .help =
     "A loss or gradient norm is too large when its logarithm is X standard deviations above the mean of "
     "about the latest hundred. Lower catches more, also more that is harmless; 6 is seldom wrong. off: only "
     "values that are not finite are spikes.")

    OPTION("device", MACHINE, PLACEMENT, CHOICE, device, "auto", .choices = {"auto", "cpu", "cuda"},
     .commands = FOR_TRAINING | FOR_EVALUATION, .meant = {"gpu", "cuda"}, .help =
     "Where a rank computes. auto: on a GPU, where the program was built for it and the node has one (the "
     "ranks of a node take its GPUs in turn); otherwise on the CPU. Ranks of one run may differ.")
    OPTION("precision", MACHINE, OTHER_BITS, CHOICE, precision, "auto", .choices = {"auto", "fp32", "bf16",
     "fastest"}, .commands = FOR_TRAINING | FOR_EVALUATION, .measured = "fastest",
     .also = "dtype, torch-dtype, bf16, fp16, amp", .meant = {"bfloat16", "bf16", "float32", "fp32"}, .help =
     "Number format of weights and activations; sums, master parameters and gradients are always fp32, "
     "moments as --moments says. auto: bf16 on a GPU, fp32 on a CPU. bf16 on a CPU is faster only where the "
     "processor multiplies bf16; the run measures that and says it. fastest: bf16 on a GPU, and on CPUs "
     "where the slowest rank measures it to be a tenth faster; a resumed run keeps its choice.")
    OPTION("products", MACHINE, OTHER_BITS, CHOICE, products, "plain", .choices = {"plain", "fp8"},
     .relations = {EXCLUDES_IF("fp8", device, "cpu"), EXCLUDES_IF("fp8", precision, "fp32")}, .help =
     "Number format of the layers' matrix products. plain: as --precision says. fp8, for GPUs of compute "
     "capability 8.9 or more: activations and weights are e4m3 in the forward pass. In the product for the "
     "input's gradient the output's gradient is e5m2. Each matrix has one scale, sums are fp32. Gradients of "
     "weights and the head stay in bf16. Needs two bytes more for each parameter of the layers.")
    OPTION("recompute", MACHINE, SAME_BITS, CHOICE, recompute, "auto", .choices = {"auto", "none", "gelu",
     "layernorm", "block"}, .also = "gradient-checkpointing, activation-checkpointing", .help =
     "What the backward pass computes again instead of reading it from memory. gelu: the outputs of GELU; "
     "layernorm: also the outputs of the LayerNorms; block: whole layers, which takes a third more time and "
     "a fraction of the memory. auto: the least that fits into the GPU. On a CPU: none (auto) or block.")
    OPTION("gpu-exchange", MACHINE, SAME_BITS, CHOICE, gpu_exchange, "auto", .choices = {"auto", "nccl",
     "host"}, .help =
     "How GPUs send each other what --wire encodes; who adds is --exchange. nccl: directly; every rank needs "
     "a GPU of its own. host: through host memory and MPI, which leaves the GPU's processors free. auto: "
     "nccl where possible. Both add in the same order; during nccl's exchanges products may be computed in "
     "another way.")
    OPTION("nccl-ctas", MACHINE, SAME_BITS, INTEGER, nccl_ctas, "auto", 1, 1024, "N", .word = "auto", .help =
     "Multiprocessors of the GPU that NCCL may occupy during computation, on each level of the exchange. "
     "Matrix products during an exchange are planned for the others. Fewer leave more for these but may not "
     "fill a fast link. auto: 8, and at most an eighth of the GPU. Messages take a power of two, rounded up.")
    OPTION("threads", MACHINE, SAME_BITS, INTEGER, threads, "auto", 1, 4096, "N", .word = "auto",
     .commands = FOR_TRAINING | FOR_SAMPLES | FOR_EVALUATION | FOR_TOKENS, .help =
     "Compute threads per rank. auto: the physical cores of the node divided by its ranks, or those that the "
     "launcher bound this rank to.")
    OPTION("ranks", MACHINE, SAME_BITS, INTEGER, ranks, "auto", 1, 1e6, "N", .word = "auto",
     .commands = FOR_PLANS, .of_one_run = true, .help =
     "How many ranks `train_gpt plan` plans for. auto: those that were started, as many as the run of --like "
     "had, or one. A run has as many as mpirun or srun started.")
    OPTION("gpu-memory", MACHINE, SAME_BITS, COUNT, gpu_memory, "auto", 1e6, OPTION_NO_LIMIT, "BYTES",
     .word = "auto", .commands = FOR_PLANS, .relations = {EXCLUDES(device, "cpu")}, .help =
     "Plans for a GPU that is elsewhere, by its memory: 80G for one of 80 GB. auto: this node's GPU.")
    OPTION("timeout-s", MACHINE, SAME_BITS, REAL, timeout_s, "300", 1, 1e6, "SECONDS",
     .commands = FOR_TRAINING | FOR_EVALUATION, .help =
     "A wait for another rank that takes longer ends the run on all ranks, and names that rank.")

    OPTION("report-every", REPORT, SAME_BITS, INTEGER, report_every, "10", 1, OPTION_NO_LIMIT, "COMMITS",
     .also = "log-every, log-interval, logging-steps", .help =
     "Commits between two reports on the terminal and in the log.")
    OPTION("val-every", REPORT, SAME_BITS, INTEGER, val_every, "50", 1, OPTION_NO_LIMIT, "COMMITS",
     .word = "end", .also = "eval-every, eval-interval, eval-steps", .help =
     "Commits between two validations, each a forward pass of --val-batches. end: only at the end.")
    OPTION("val-batches", REPORT, HELD_OUT, INTEGER, val_batches, "16", 1, 1e6, "N", .word = "none", .help =
     "Micro-batches of one validation, over all ranks, at most as many as visit every held-out window once. "
     "More are less noisy and take longer; none: no validation.")
    OPTION("save-every", REPORT, SAME_BITS, TEXT, save_every, "end", 1, "COMMITS|TIME|end|never",
     .also = "save-interval, save-steps", .help =
     "How often a checkpoint is written to OUT/checkpoints: a number of commits, or a time such as 30s, 10m "
     "or 2h. Each needs about 16 bytes a parameter, 12 with --moments bf16, and is written during training "
     "where there is memory for a copy. end: only at the end, and when Ctrl-C or a signal asks the run to "
     "stop (exit code 75: go on with --resume auto). never: not even then (exit code 4), for benchmarks.")
    OPTION("keep", REPORT, KEPT_FILES, INTEGER, keep, "2", 1, 1e6, "N", .help =
     "How many of the latest checkpoints are kept.")
    OPTION("keep-every", REPORT, KEPT_FILES, INTEGER, keep_every, "off", 1, OPTION_NO_LIMIT, "COMMITS",
     .word = "off", .help =
     "The first checkpoint at or behind each multiple of this number of commits is kept as well.")
    OPTION("keep-best", REPORT, KEPT_FILES, SWITCH, keep_best, "off", .relations = {EXCLUDES(val_batches,
     "none"), EXCLUDES(save_every, "never")}, .help =
     "Writes a checkpoint after every validation with a lower loss than all before it, and keeps the latest "
     "of these besides --keep.")
    OPTION("stop-after", REPORT, SAME_BITS, INTEGER, stop_after, "off", 1, 1e6, "N", .word = "off",
     .relations = {EXCLUDES(val_batches, "none")}, .help =
     "Ends the training after N validations in a row whose loss is not below the lowest before them.")
    OPTION("last", REPORT, SAME_BITS, INTEGER, last, "3", 1, 1e6, "N", .commands = FOR_AVERAGES, .help =
     "How many of the newest checkpoints of --from are averaged.")
    OPTION("to", REPORT, SAME_BITS, TEXT, to, "", 0, "FILE.gguf|DIR", .commands = FOR_EXPORTS, .help =
     "Where train_gpt export writes the model: a GGUF, with a Modelfile for Ollama beside it, or a directory "
     "for transformers. A GGUF and a Modelfile that are there already are replaced; a directory must be new.")
    OPTION("type", REPORT, SAME_BITS, CHOICE, type, "f16", .choices = {"f32", "f16", "bf16", "q8_0"},
     .commands = FOR_EXPORTS, .also = "outtype, quantize", .help =
     "Number format of the matrices in a GGUF. q8_0 takes a byte and a sixteenth for each number, and is "
     "the fastest in llama.cpp; f16 and bf16 take two, f32 four.")
    OPTION("merge", REPORT, SAME_BITS, SWITCH, merge, "on", .commands = FOR_EXPORTS, .help =
     "off: adapters become a GGUF of their own, for llama.cpp's --lora, instead of a part of the model.")
    OPTION("resume", REPORT, SAME_BITS, TEXT, resume, "off", 1, "off|auto|PATH",
     .relations = {NEEDS_IF("auto", out)}, .of_one_run = true, .also = "resume-from-checkpoint", .help =
     "Continues from a checkpoint. auto: from the newest sound one in --out, where the log continues, too; a "
     "new run begins where there is none. PATH: from that one, or the newest one of that run, in a new "
     "--out. Options that are not given are as in that run. Ranks, rule and device may differ; the run then "
     "says what is not exact.")
    OPTION("fresh-moments", REPORT, SAME_BITS, SWITCH, fresh_moments, "off", .relations = {NEEDS(resume)},
     .of_one_run = true, .help =
     "With --resume: on loads a checkpoint whose --inner was another one, and its moments start from zero.")
    OPTION("out", REPORT, SAME_BITS, TEXT, out, "auto", 1, "DIR|auto",
     .commands = FOR_TRAINING | FOR_TOKENS | FOR_AVERAGES, .of_one_run = true, .also = "output-dir", .help =
     "The run's directory, created with its parents; a directory that already holds a run is refused. auto: "
     "runs/MODEL-OPTIMIZER-N with the first free N.")
    OPTION("trace", REPORT, SAME_BITS, TEXT, trace, "", 0, "FILE", .of_one_run = true, .help =
     "Writes what both streams of every rank do and when, as Chrome trace JSON, which ui.perfetto.dev shows. "
     "The file grows with every commit: meant for short runs.")
    OPTION("config", REPORT, SAME_BITS, TEXT, config, "", 1, "FILE",
     .commands = FOR_TRAINING | FOR_SAMPLES | FOR_EVALUATION, .of_one_run = true, .help =
     "Reads options from a JSON object of names and values; every run saves its own as OUT/config.json. The "
     "command line wins over the file.")

    OPTION("task", EVALUATION, OTHER_BITS, CHOICE, task, "perplexity", .choices = {"perplexity", "lambada",
     "hellaswag"}, .commands = FOR_EVALUATION, .help =
     "What train_gpt eval measures on --data: the perplexity of a text or of tokens; or LAMBADA or HellaSwag "
     "from their JSON lines, counted as lm-evaluation-harness does. --seq-len is the longest context.")
    OPTION("stride", EVALUATION, OTHER_BITS, INTEGER, stride, "half", 1, 1048576, "N", .word = "half",
     .commands = FOR_EVALUATION, .relations = {EXCLUDES(task, "lambada"), EXCLUDES(task, "hellaswag")},
     .help = "Tokens between the starts of two perplexity windows: fewer give every token more context and "
     "take longer. half: half a window.")
    OPTION("limit", EVALUATION, OTHER_BITS, INTEGER, limit, "all", 1, OPTION_NO_LIMIT, "N", .word = "all",
     .commands = FOR_EVALUATION, .help = "Only the first N windows or lines.")

    OPTION("sample-tokens", SAMPLE, SAME_BITS, COUNT, sample_tokens, "256", 1, 1e6, "N", .word = "none",
     .commands = FOR_TRAINING | FOR_SAMPLES, .also = "max-new-tokens", .help =
     "Tokens of text that the trained model writes at the end; fewer where the model ends the text itself.")
    OPTION("sample-every", SAMPLE, SAME_BITS, INTEGER, sample_every, "end", 1, OPTION_NO_LIMIT, "COMMITS",
     .word = "end", .relations = {EXCLUDES(sample_tokens, "none")}, .help =
     "Commits between two samples, which also go into the log. Rank 0 writes them on its CPU while the other "
     "ranks wait: about a forward pass of one position for every token. end: one, at the end.")
    OPTION("temperature", SAMPLE, SAME_BITS, REAL, temperature, "0.8", 0, 100, "X",
     .commands = FOR_TRAINING | FOR_SAMPLES, .help =
     "Lower is safer and duller, higher is wilder; 0 always takes the most likely token.")
    OPTION("top-k", SAMPLE, SAME_BITS, INTEGER, top_k, "40", 1, 1e6, "N", .word = "off",
     .commands = FOR_TRAINING | FOR_SAMPLES, .help =
     "Chooses only among the N most likely tokens, which keeps odd tokens out.")
    OPTION("top-p", SAMPLE, SAME_BITS, REAL, top_p, "1", 1e-6, 1, "X", .commands = FOR_TRAINING | FOR_SAMPLES,
     .help = "Chooses only among the most likely tokens that together have this share of the probability.")
    OPTION("repetition-penalty", SAMPLE, SAME_BITS, REAL, repetition_penalty, "1", 1, 100, "X",
     .commands = FOR_TRAINING | FOR_SAMPLES, .help =
     "Above 1: tokens that the text has already become less likely. 1.2 is much.")
    OPTION("prompts", SAMPLE, SAME_BITS, TEXT, prompts, "", 0, "FILE", .commands = FOR_SAMPLES,
     .relations = {INSTEAD_OF(prompt)}, .help =
     "A file with a prompt in each line; each prompt gets a sample of its own.")
    OPTION("interactive", SAMPLE, SAME_BITS, SWITCH, interactive, "off", .commands = FOR_SAMPLES,
     .relations = {INSTEAD_OF(prompt), INSTEAD_OF(prompts)}, .help =
     "Asks for a prompt, writes what follows, and asks again: the text goes on. /reset begins another one; "
     "the end of the input ends it. With a chat.json beside the tokenizer it is a chat.")
    OPTION("system", SAMPLE, SAME_BITS, TEXT, system, "", 0, "TEXT", .commands = FOR_SAMPLES | FOR_EXPORTS,
     .help = "The system text of a chat: how the model is to answer.")
    OPTION("prompt", SAMPLE, SAME_BITS, TEXT, prompt, "", 0, "TEXT", .commands = FOR_TRAINING | FOR_SAMPLES,
     .relations = {EXCLUDES(sample_tokens, "none")}, .help =
     "What the sample starts with, at most 1023 bytes. Empty: the model starts by itself. Models that read "
     "token ids need a --tokenizer. With a chat.json beside the tokenizer it is what a user says.")

    OPTION("link-mbit", EMULATION, SAME_BITS, REAL, link_mbit, "off", 1e-3, 1e6, "MBIT", .word = "off",
     .also = "bandwidth", .help =
     "Emulates a slow network: no host sends more than MBIT million bits a second to others; its ranks share "
     "that equally. On one machine each rank counts as a host, unless --ranks-per-host says otherwise.")
    OPTION("ranks-per-host", EMULATION, PLACEMENT, INTEGER, ranks_per_host, "auto", 1, 1e6, "N",
     .word = "auto", .help =
     "Lets every N consecutive ranks count as one host, whatever machine they are on: for an emulated link, "
     "and so that a run that is resumed on other machines still adds in the same order. auto: the machines.")
    OPTION("link-us", EMULATION, SAME_BITS, REAL, link_us, "off", 1e-3, 1e6, "US", .word = "off", .help =
     "Emulates a distant network: every message is US microseconds late. Small messages suffer most.")
    OPTION("chaos-ms", EMULATION, SAME_BITS, REAL, chaos_ms, "off", 1e-3, 6e4, "MS", .word = "off", .help =
     "Waits for a random time of up to MS milliseconds before every communication operation. No bit of a "
     "result may change: a test of the scheduler.")
    OPTION("slow-rank", EMULATION, SAME_BITS, INTEGER, slow_rank, "none", 0, 1e6, "RANK", .word = "none",
     .word_value = -1, .relations = {NEEDS(slow_ms)}, .help =
     "Emulates one slow machine: this rank sleeps for --slow-ms at every micro-batch.")
    OPTION("slow-ms", EMULATION, SAME_BITS, REAL, slow_ms, "0", 0, 1e6, "MS", .relations = {NEEDS(slow_rank)},
     .help = "How long --slow-rank sleeps at every micro-batch, in milliseconds.")

    OPTION("like", PLAN, SAME_BITS, TEXT, like, "", 0, "RUN", .commands = FOR_PLANS,
     .relations = {INSTEAD_OF(compute_ms)}, .help =
     "The directory of a run whose computing times the plan takes, from its log. Model, data, batch and rule "
     "are as in that run, too, where they are not given. Without --ranks the plan is for that run itself, "
     "and says what would be faster.")
    OPTION("compute-ms", PLAN, SAME_BITS, REAL, compute_ms, "auto", 1e-6, 1e9, "MS", .word = "auto",
     .commands = FOR_PLANS, .help =
     "What one rank needs to compute one micro-batch, forward and backward. auto: as in --like, or measured "
     "here where that takes seconds, or worked out from the rate of matrix products.")
    OPTION("gpu-tflops", PLAN, SAME_BITS, REAL, gpu_tflops, "unknown", 1e-3, 1e6, "TFLOPS", .word = "unknown",
     .commands = FOR_PLANS, .relations = {INSTEAD_OF(compute_ms), INSTEAD_OF(like), NEEDS(gpu_memory)},
     .help = "The peak of the GPU of --gpu-memory in its matrix products, 10^12 operations a second, as its "
     "maker says: dense ones, in the --precision of the plan. 40 % of it is then taken for the rate at which "
     "a micro-batch is computed: a careful guess. An H100 reached 44 % with 125M and 53 % with 1.3B.")
    OPTION("host-mbit", PLAN, SAME_BITS, REAL, host_mbit, "auto", 1e-3, 1e8, "MBIT", .word = "auto",
     .commands = FOR_PLANS, .help =
     "Million bits a second that a host can send to the others, and receive at the same time; its ranks "
     "share them. What data get of it is 96 %. auto: --link-mbit, and where that is off 10000.")
    OPTION("host-us", PLAN, SAME_BITS, REAL, host_us, "auto", 1e-3, 1e8, "US", .word = "auto",
     .commands = FOR_PLANS, .help =
     "Microseconds of a short message from one host to another. auto: --link-us; where that is off 50, or 0 "
     "beside an emulated --link-mbit.")
    OPTION("inside-mbit", PLAN, SAME_BITS, REAL, inside_mbit, "off", 1e-3, 1e8, "MBIT", .word = "off",
     .commands = FOR_PLANS, .help =
     "Million bits a second that each rank can send to the others of its host. off: as fast as memory, which "
     "is right for CPUs and for GPUs with a fast link among them.")
    OPTION("inside-us", PLAN, SAME_BITS, REAL, inside_us, "10", 1e-3, 1e8, "US", .commands = FOR_PLANS,
     .help = "Microseconds that a short message takes from one rank to another of its host.")
    OPTION("fit", PLAN, SAME_BITS, SWITCH, fit, "off", .commands = FOR_PLANS,
     .relations = {INSTEAD_OF(micro_batch)}, .help =
     "on: plans with the largest --micro-batch that fits into 98 % of the memory, and with the least "
     "--recompute that leaves room for a batch of a size at which matrix products are fast (1024 tokens on "
     "CPUs, 8192 on GPUs). Each rule gets what fits for it. The plan prints both as options for a run.")
    OPTION("json", PLAN, SAME_BITS, TEXT, json, "", 0, "FILE", .commands = FOR_PLANS, .help =
     "Writes what the plan says about time to FILE, as JSON, with all its numbers.")
    OPTION("page", PLAN, SAME_BITS, TEXT, page, "", 0, "FILE.html", .commands = FOR_PLANS, .help =
     "Draws the plan as a page for a browser: how fast every rule is over the link between hosts and the "
     "micro-batches of a commit, with this plan marked. The page needs no other file.")
// clang-format on
#endif
