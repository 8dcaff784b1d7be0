#!/usr/bin/env python3
"""Makes test/reference/pretrained: a tiny GPT-Neo as transformers saves it, and the logits that it computes.

    python dev/reference/make_pretrained.py            writes the directory
    python dev/reference/make_pretrained.py --check    loads the directory and compares its logits, exit 1 where they differ

The directory is what save_pretrained writes: config.json and model.safetensors, random weights, odd sizes. Beside them lies
logits.safetensors: `tokens` I32 (B,T) and `logits` F32 (B,T,V), computed in float32.
"""

import argparse
import pathlib
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPTNeoConfig

BATCH_SIZE, SEQUENCE_LENGTH, SEED = 2, 13, 6


def make_config():
    """Odd sizes, a pattern of layers that does not alternate, and a window that cuts."""
    return GPTNeoConfig(
        vocab_size=53, max_position_embeddings=17, hidden_size=20, num_layers=3, num_heads=4, intermediate_size=27, window_size=5,
        attention_types=[[["global", "local"], 1], [["local"], 1]], layer_norm_epsilon=3e-5, bos_token_id=1, eos_token_id=2)


def make_model(config, seed):
    """Random weights, ten times as large as in training: attention far from uniform, GELU far from linear; no bias is 0."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            constant = 1.0 if (".ln_" in name or "norm" in name) and name.endswith(".weight") else 0.0
            parameter.copy_(constant + 0.2 * torch.randn_like(parameter))
    return model


def make_tokens(config, batch_size, sequence_length):
    """(B, T) random tokens."""
    return torch.randint(config.vocab_size, (batch_size, sequence_length), generator=torch.Generator().manual_seed(SEED))


def compute_logits(model, tokens):
    """(B, T, V)"""
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits


def check(directory):
    """Whether the stored directory gives the stored logits."""
    stored = load_file(directory / "logits.safetensors")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    difference = (compute_logits(model, stored["tokens"].long()) - stored["logits"]).abs().max().item()
    print(f"largest difference of a logit: {difference:.1e}")
    return difference <= 1e-4


def main():
    """Writes or checks the directory."""
    root = pathlib.Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=pathlib.Path, default=root / "test" / "reference" / "pretrained", help="the directory")
    parser.add_argument("--check", action="store_true", help="compare with the directory, write nothing")
    arguments = parser.parse_args()
    if arguments.check:
        sys.exit(0 if check(arguments.out) else 1)
    config = make_config()
    model, tokens = make_model(config, SEED), make_tokens(config, BATCH_SIZE, SEQUENCE_LENGTH)
    model.save_pretrained(arguments.out)
    (arguments.out / "generation_config.json").unlink(missing_ok=True)
    logits = compute_logits(model, tokens).contiguous()
    save_file({"tokens": tokens.to(torch.int32), "logits": logits}, arguments.out / "logits.safetensors")
    print(f"{sum(file.stat().st_size for file in arguments.out.iterdir())} bytes in {arguments.out}")


if __name__ == "__main__":
    main()
