#!/usr/bin/env python3
"""How fast transformers' GPT-Neo trains under PyTorch on a GPU: the peer that dev/gpu/bench prints beside train_gpt.

    python dev/bench/peer_pytorch_gpu.py --model 125M --seq-len 1024 --micro-batch 64 --attention patched

One step is what train_gpt does in one commit of one micro-batch: forward, loss, backward and AdamW, with bf16 arithmetic and fp32 master
parameters, gradients and moments (autocast), compiled. Where a micro-batch does not fit it is halved and two are accumulated, so that a
step always has the same tokens. Prints lines of a name, a tab and a value: the tokens per second of each measured step, and what was run.

Attention:
    stock      the best that transformers offers for GPT-Neo here: flash_attention_2 if it is installed, sdpa if it exists, else eager
    patched    eager's product, softmax, product replaced by one call of PyTorch's scaled_dot_product_attention; not what a user gets
               without work of his own, but what he could have

Local layers get a dense mask, for which PyTorch has no fused kernel that skips what is masked. So --layers global compares models whose
layers are all global, where is_causal lets it take its quickest.
"""

import argparse
import gc
import importlib.util
import statistics
import sys
import time

PRESETS = {  # as in models/families.h; layers alternate global, local
    "small": {"layers": 2, "channels": 64, "heads": 2, "vocabulary": 307},
    "125M": {"layers": 12, "channels": 768, "heads": 12, "vocabulary": 50257},
    "1.3B": {"layers": 24, "channels": 2048, "heads": 16, "vocabulary": 50257},
    "2.7B": {"layers": 32, "channels": 2560, "heads": 20, "vocabulary": 50257},
}
WINDOW = 256


def parse_arguments():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", choices=PRESETS, default="125M")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--attention", choices=("stock", "patched"), default="stock")
    parser.add_argument("--layers", choices=("mixed", "global"), default="mixed", help="mixed: every second layer is local")
    parser.add_argument("--weights", choices=("autocast", "bf16"), default="autocast",
                        help="bf16: parameters, gradients and moments in bf16, too: less exact, and less to move")
    parser.add_argument("--mode", choices=("compiled", "eager"), default="compiled")
    parser.add_argument("--steps", type=int, default=10, help="measured steps")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before them; the first also compiles")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: for trying this script out")
    return parser.parse_args()


def make_config(arguments, attention):
    """GPTNeoConfig of a preset with as many positions as the sequences have."""
    from transformers import GPTNeoConfig

    preset = PRESETS[arguments.model]
    return GPTNeoConfig(
        vocab_size=preset["vocabulary"], max_position_embeddings=arguments.seq_len, hidden_size=preset["channels"],
        num_layers=preset["layers"], num_heads=preset["heads"], window_size=WINDOW,
        attention_types=[[["global", "local" if arguments.layers == "mixed" else "global"], preset["layers"] // 2]], resid_dropout=0.0, embed_dropout=0.0,
        attention_dropout=0.0, use_cache=False, attn_implementation=attention)


def candidates(arguments):
    """Names of attention in the order in which they are tried."""
    if arguments.attention == "patched":
        return ["eager"]
    flash = ["flash_attention_2"] if importlib.util.find_spec("flash_attn") and arguments.device == "cuda" else []
    return flash + ["sdpa", "eager"]


class WasCalled(Exception):
    pass


def check_that_it_can_be_patched(model, device):
    """Fails where this version of transformers does not call _attn, and would silently keep its own attention."""
    import torch

    def probe(*_arguments, **_more):
        raise WasCalled

    inner = model.transformer.h[0].attn.attention
    kept = inner._attn
    inner._attn = probe
    try:
        model(input_ids=torch.zeros(1, 8, dtype=torch.long, device=device))
    except WasCalled:
        return
    finally:
        inner._attn = kept
    raise RuntimeError("this version of transformers does not call _attn, so its attention cannot be replaced")


def patch_attention(model):
    """Replaces the inner part of eager attention in every layer."""
    import torch

    kinds = model.config.attention_layers
    for layer, block in enumerate(model.transformer.h):
        inner = block.attn.attention

        def attend(query, key, value, *_arguments, inner=inner, local=kinds[layer] == "local", **_more):
            length = query.size(-2)
            mask = inner.bias[:, :, :length, :length] if local else None
            output = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=not local, scale=1.0)
            return output, None

        inner._attn = attend


def make_model(arguments):
    """(model on the device with random weights, name of its attention)."""
    import torch
    from transformers import GPTNeoForCausalLM

    problem = None
    for attention in candidates(arguments):
        try:
            with torch.device(arguments.device):
                model = GPTNeoForCausalLM(make_config(arguments, attention))
            break
        except (KeyError, ValueError, ImportError, AttributeError) as error:
            problem = error
    else:
        raise problem
    model = model.to(device=arguments.device, dtype=torch.bfloat16 if arguments.weights == "bf16" else torch.float32).train()
    if arguments.attention == "patched":
        check_that_it_can_be_patched(model, arguments.device)
        patch_attention(model)
        attention = "sdpa by hand"
    return model, attention


def make_step(arguments, model, parts):
    """One training step as a function of (tokens, targets), cut into `parts` micro-batches; returns the loss."""
    import torch

    def loss_of(tokens, targets):
        with torch.autocast(arguments.device, dtype=torch.bfloat16, enabled=arguments.weights == "autocast"):
            logits = model(input_ids=tokens, use_cache=False).logits
            return torch.nn.functional.cross_entropy(logits.view(-1, logits.size(-1)).float(), targets.reshape(-1))

    if arguments.mode == "compiled":
        loss_of = torch.compile(loss_of, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(tokens, targets):
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for part_tokens, part_targets in zip(tokens.chunk(parts), targets.chunk(parts)):
            loss = loss_of(part_tokens, part_targets) / parts
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total.item()  # waits for the device

    return step


def measure(arguments, parts):
    """(seconds of each measured step, loss of the last, name of the attention), with micro-batches of 1 / parts."""
    import torch

    torch.manual_seed(1)
    model, attention = make_model(arguments)
    step = make_step(arguments, model, parts)
    size = (arguments.warm_up + arguments.steps, arguments.micro_batch, arguments.seq_len + 1)
    batches = torch.randint(PRESETS[arguments.model]["vocabulary"], size).to(arguments.device)
    seconds, loss = [], float("nan")
    for i, rows in enumerate(batches):
        tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        start = time.perf_counter()
        loss = step(tokens, targets)
        if i >= arguments.warm_up:
            seconds.append(time.perf_counter() - start)
    return seconds, loss, attention


def first_parts(arguments):
    """Into how many parts to cut at first: by a rough count of bytes, since every attempt that does not fit compiles in vain."""
    import torch

    if arguments.device != "cuda":
        return 1
    preset, batch, length = PRESETS[arguments.model], arguments.micro_batch, arguments.seq_len
    layers, channels, heads, vocabulary = (preset[name] for name in ("layers", "channels", "heads", "vocabulary"))
    state = 20 * (12 * layers * channels * channels + vocabulary * channels)
    scores = 8 * layers * heads * length * length if arguments.attention == "stock" else 0
    sequence = scores + length * (40 * layers * channels + 10 * vocabulary)
    room, parts = 0.9 * torch.cuda.mem_get_info()[0] - state, 1
    while batch // parts * sequence > room and batch % (2 * parts) == 0:
        parts *= 2
    return parts


def measure_what_fits(arguments):
    """measure, with smaller micro-batches until they fit; also returns into how many parts it was cut."""
    import torch

    parts = first_parts(arguments)
    while True:
        try:
            return (*measure(arguments, parts), parts)
        except torch.cuda.OutOfMemoryError:
            if arguments.micro_batch % (2 * parts) != 0:
                raise
        parts *= 2
        print(f"out of memory: {parts} micro-batches of {arguments.micro_batch // parts}", file=sys.stderr)
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


def describe(arguments, seconds, loss, attention, parts):
    """The result as a dictionary."""
    import torch
    import transformers

    tokens = arguments.micro_batch * arguments.seq_len
    gpu = arguments.device == "cuda"
    return {
        "peer": "transformers GPTNeoForCausalLM", "model": arguments.model, "seq_len": arguments.seq_len,
        "micro_batch": arguments.micro_batch // parts, "accumulate": parts, "attention": attention, "layers": arguments.layers, "weights": arguments.weights,
        "mode": arguments.mode, "tokens_per_second": round(tokens / statistics.median(seconds), 1),
        "steps": [round(tokens / s, 1) for s in seconds], "loss": round(loss, 4),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1) if gpu else None,
        "torch": torch.__version__, "transformers": transformers.__version__}


def main():
    """Measures and prints; what does not work here is a line `error` with the reason, and exit 1."""
    arguments = parse_arguments()
    import torch

    torch.set_float32_matmul_precision("high")
    try:
        result = describe(arguments, *measure_what_fits(arguments))
    except Exception as error:  # whatever stops it is the finding
        print("error", (str(error).strip() or repr(error)).split("\n")[0][:300], sep="\t")
        sys.exit(1)
    for name, value in result.items():
        print(name, *(value if isinstance(value, list) else [value]), sep="\t")


if __name__ == "__main__":
    main()
