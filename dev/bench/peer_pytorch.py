#!/usr/bin/env python3
"""How fast transformers' GPT-Neo or Llama trains under PyTorch on the CPU: the peer that `make bench` prints beside train_gpt.

    python dev/bench/peer_pytorch.py --model 125M --micro-batch 4 --seq-len 256 --threads 2 --mode compiled

One step is what train_gpt does in one round of one micro-batch: zero_grad, forward, loss, backward, AdamW, all in float32, or
with --precision bf16 the forward pass under autocast.
Prints lines of a name, a tab and a value: the median and range of tokens per second over the measured steps, and what was run. `others` is the
share of the machine that other processes used meanwhile (None where there is no /proc): above about 0.03, measure again,
because threads that wait for each other at every operation lose far more than that share.

A comparison won against a badly set up peer would be worth nothing, so whatever may make it faster without changing what
it computes is an option: compile mode, loss, optimizer, allocator. Try them on a quiet machine and compare with the best.
"""

import argparse
import ctypes
import os
import resource
import statistics
import sys
import time

PRESETS = {  # as in models/families.h; GPT-Neo's layers alternate global, local
    "36M": {"layers": 4, "channels": 768, "heads": 16, "vocabulary": 10000, "positions": 1024, "window": 256},
    "125M": {"layers": 12, "channels": 768, "heads": 12, "vocabulary": 50257, "positions": 1024, "window": 256},
    "smollm2-135M": {"layers": 30, "channels": 576, "heads": 9, "vocabulary": 49152, "positions": 8192, "key_heads": 3, "mlp": 1536},
}


def parse_arguments():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", choices=PRESETS, default="125M")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--steps", type=int, default=10, help="measured steps")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them; the first also compiles")
    parser.add_argument("--mode", choices=("eager", "compiled", "autotuned"), default="eager",
                        help="compiled: torch.compile as it comes; autotuned: with max-autotune")
    parser.add_argument("--loss", choices=("own", "labels"), default="own",
                        help="own: cross_entropy on the logits; labels: computed inside transformers")
    parser.add_argument("--optimizer", choices=("fused", "foreach"), default="fused")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast; parameters and moments stay fp32")
    parser.add_argument("--allocator", choices=("kept", "plain"), default="kept",
                        help="kept: freed memory stays with the process, in huge pages")
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa", help="of a Llama; GPT-Neo has eager alone on the CPU")
    return parser.parse_args()


def keep_memory():
    """Lets glibc keep what it frees: returning and faulting in the logits anew in every step costs a lot of time."""
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"  # read by torch at its first allocation
    M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
    try:
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_MAX, 0)
        library.mallopt(M_TRIM_THRESHOLD, -1)
    except (OSError, AttributeError):
        pass  # not glibc: measured with what there is


def make_model(preset, attention):
    """GPTNeoForCausalLM or LlamaForCausalLM with its own random initial weights."""
    from transformers import AutoModelForCausalLM, GPTNeoConfig, GPTNeoForCausalLM, LlamaConfig

    if "key_heads" in preset:
        config = LlamaConfig(
            vocab_size=preset["vocabulary"], max_position_embeddings=preset["positions"], hidden_size=preset["channels"],
            num_hidden_layers=preset["layers"], num_attention_heads=preset["heads"], num_key_value_heads=preset["key_heads"],
            intermediate_size=preset["mlp"], rope_theta=1e5, rms_norm_eps=1e-5, tie_word_embeddings=True, use_cache=False)
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
    config = GPTNeoConfig(
        vocab_size=preset["vocabulary"], max_position_embeddings=preset["positions"], hidden_size=preset["channels"],
        num_layers=preset["layers"], num_heads=preset["heads"], window_size=preset["window"],
        attention_types=[[["global", "local"], preset["layers"] // 2]], resid_dropout=0.0, embed_dropout=0.0,
        attention_dropout=0.0, use_cache=False)
    return GPTNeoForCausalLM(config).train()


def make_loss(model, kind):
    """A function of tokens and targets, both (B, T), that returns the mean loss."""
    import torch

    def by_labels(tokens, _targets):
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    def own(tokens, targets):
        logits = model(input_ids=tokens, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

    return by_labels if kind == "labels" else own


def make_step(arguments, model):
    """One training step as a function of a batch; torch.compile covers forward, loss and backward."""
    import torch

    plain_loss_of = make_loss(model, arguments.loss)

    def loss_of(tokens, targets):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=arguments.precision == "bf16"):
            return plain_loss_of(tokens, targets)

    if arguments.mode != "eager":
        loss_of = torch.compile(loss_of, mode="max-autotune" if arguments.mode == "autotuned" else None, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1,
                                  fused=arguments.optimizer == "fused", foreach=arguments.optimizer == "foreach")

    def step(tokens, targets):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(tokens, targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def machine_seconds():
    """Processor time used on the whole machine so far by anybody, in seconds; NaN where Linux does not tell."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    except OSError:
        return float("nan")
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def make_batches(arguments, vocabulary):
    """Random tokens and the targets that follow them, another batch for every step; zeros would spare the embedding its work."""
    import torch

    generator = torch.Generator().manual_seed(1)
    size = (arguments.warm_up + arguments.steps, arguments.micro_batch, arguments.seq_len + 1)
    tokens = torch.randint(vocabulary, size, generator=generator)
    return [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in tokens]


def measure(arguments, step, vocabulary):
    """(seconds of each measured step, loss of the last, share of the machine that others used)."""
    batches = make_batches(arguments, vocabulary)
    for tokens, targets in batches[: arguments.warm_up]:
        step(tokens, targets)
    seconds, loss = [], float("nan")
    others = machine_seconds() - time.process_time()
    for tokens, targets in batches[arguments.warm_up :]:
        start = time.perf_counter()
        loss = step(tokens, targets)
        seconds.append(time.perf_counter() - start)
    others = machine_seconds() - time.process_time() - others
    return seconds, loss, others / (sum(seconds) * os.cpu_count())


def describe(arguments, model, seconds, loss, others):
    """The result as a dictionary."""
    import torch
    import transformers

    tokens = arguments.micro_batch * arguments.seq_len
    return {
        "peer": f"transformers {type(model).__name__}", "attention": model.config._attn_implementation, "model": arguments.model, "mode": arguments.mode,
        "precision": arguments.precision, "micro_batch": arguments.micro_batch, "seq_len": arguments.seq_len, "threads": arguments.threads,
        "tokens_per_second": round(tokens / statistics.median(seconds), 1),
        "tokens_per_second_range": [round(tokens / max(seconds), 1), round(tokens / min(seconds), 1)],
        "step_ms": round(1e3 * statistics.median(seconds), 1), "steps": len(seconds),
        "others": round(others, 3) if others == others else None,
        "parameters": sum(p.numel() for p in model.parameters()), "loss": round(loss, 4), "loss_by": arguments.loss,
        "optimizer": arguments.optimizer, "allocator": arguments.allocator,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "torch": torch.__version__, "transformers": transformers.__version__}


def main():
    """Measures and prints; a mode that does not work here is a line `error` with the reason, and exit 1."""
    arguments = parse_arguments()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    if arguments.allocator == "kept":
        keep_memory()
    import torch  # only now: it reads the environment

    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(1)
    preset = PRESETS[arguments.model]
    model = make_model(preset, arguments.attention)
    try:
        result = describe(arguments, model, *measure(arguments, make_step(arguments, model), preset["vocabulary"]))
    except Exception as error:  # whatever stops the compiler is the finding
        print("error", str(error).strip().split("\n")[0][:300], sep="\t")
        sys.exit(1)
    for name, value in result.items():
        print(name, *(value if isinstance(value, list) else [value]), sep="\t")


if __name__ == "__main__":
    main()
