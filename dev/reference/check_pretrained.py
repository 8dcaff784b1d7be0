#!/usr/bin/env python3
"""Checks the round trip of models from transformers through hf_model.h and back.

    make build/test/test_hf_model
    python dev/reference/check_pretrained.py [--program build/test/test_hf_model]

For GPT-2 and GPT-Neo of five odd sizes and the cases of make_families.py, transformers saves random weights in every way that it knows: one
file, shards, the bare model (names without prefix, and only where the head is tied), float32, bfloat16, float16. test_hf_model loads the directory, computes logits, and
saves it again, in float32. from_pretrained must load what was saved, with

    the same weights, bit by bit, and no name missing or left over
    the same layers, window and epsilon; of the other families the same settings, all of them
    logits within 1e-4 of transformers' on what it saved: ours, and transformers' on what we saved
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

import torch
from make_families import CASES, settings
from make_pretrained import compute_logits, make_config, make_model, make_tokens
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPTNeoConfig, logging

TOLERANCE = 1e-4


def configurations():
    """(name, configuration, T): odd sizes of all families."""
    for name in CASES:
        _, length, _, config, _ = settings(name)
        yield name, type(AutoConfig.for_model(config["model_type"])).from_dict(config), length
    yield "tiny", make_config(), 13
    yield "five layers", GPTNeoConfig(
        vocab_size=211, max_position_embeddings=67, hidden_size=36, num_layers=5, num_heads=3, intermediate_size=None, window_size=7,
        attention_types=[[["local", "global"], 2], [["global"], 1]], bos_token_id=0, eos_token_id=0), 67
    yield "one layer", GPTNeoConfig(
        vocab_size=11, max_position_embeddings=5, hidden_size=7, num_layers=1, num_heads=7, intermediate_size=5, window_size=2,
        attention_types=[[["local"], 1]], layer_norm_epsilon=1e-6, bos_token_id=0, eos_token_id=0), 3
    yield "GPT-2", GPT2Config(
        vocab_size=71, n_positions=23, n_embd=15, n_layer=3, n_head=3, n_inner=None, bos_token_id=0, eos_token_id=0), 23
    yield "GPT-2 unscaled", GPT2Config(
        vocab_size=13, n_positions=9, n_embd=10, n_layer=1, n_head=1, n_inner=7, scale_attn_weights=False, layer_norm_epsilon=1e-6,
        bos_token_id=0, eos_token_id=0), 8


def variants():
    """(name, dtype of the weights, what saves a model into a directory)."""
    yield "one file", torch.float32, lambda model, directory: model.save_pretrained(directory)
    yield "shards", torch.float32, lambda model, directory: model.save_pretrained(directory, max_shard_size="20KB")
    yield "bare names", torch.float32, lambda model, directory: model.base_model.save_pretrained(directory)
    yield "bfloat16", torch.bfloat16, lambda model, directory: model.save_pretrained(directory)
    yield "float16", torch.float16, lambda model, directory: model.save_pretrained(directory)


def load(directory):
    """The model, and what from_pretrained complains about. config.json must say float32."""
    model, remarks = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", output_loading_info=True)
    remarks["dtype"] = model.dtype if model.dtype != torch.float32 else None
    return model.eval(), [f"{key}: {value}" for key, value in remarks.items() if value]


def differing_weights(model, others):
    """Names of weights that are not the same bits."""
    mine, theirs = model.state_dict(), others.state_dict()
    return sorted(mine.keys() ^ theirs.keys()) + [
        name for name in mine.keys() & theirs.keys() if not torch.equal(mine[name], theirs[name])]


def differing_settings(model, other):
    """Names of settings that matter and differ."""
    names = ("attention_layers", "window_size", "layer_norm_epsilon", "intermediate_size", "hidden_size", "num_heads", "vocab_size",
             "max_position_embeddings", "activation_function", "tie_word_embeddings", "n_embd", "n_layer", "n_head", "n_inner",
             "n_positions", "scale_attn_weights")
    mine, theirs = (dict(vars(each.config)) for each in (model, other))
    if not model.config.model_type.startswith("gpt"):
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
                 "max_position_embeddings", "hidden_act", "rms_norm_eps", "initializer_range", "tie_word_embeddings", "attention_bias",
                 "mlp_bias", "layer_types", "sliding_window")
        turns = [(each.model.rotary_emb.inv_freq, each.model.rotary_emb.attention_scaling) for each in (model, other)]
        return [name for name in names if mine.get(name) != theirs.get(name)] + (
            [] if turns[0][0].equal(turns[1][0]) and turns[0][1] == turns[1][1] else ["positions"])
    inner = 4 * model.config.hidden_size
    return [name for name in names if name in mine and (mine[name] or inner) != (theirs[name] or inner)]


def distance(logits, expected):
    """The largest difference, relative where logits are above 1."""
    return ((logits - expected).abs() / expected.abs().clamp(min=1)).max().item()


def check(program, source, target, model):
    """Runs the program on one directory; returns what is wrong and the two distances."""
    run = subprocess.run([program, source, target], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        return [run.stderr.strip()], 0.0, 0.0
    expected = load_file(source / "logits.safetensors")
    ours = load_file(target / "logits.safetensors")["logits"]
    again, wrong = load(target)
    wrong += differing_weights(model, again) + differing_settings(model, again)
    tokens = expected["tokens"].long()
    distances = distance(ours, expected["logits"]), distance(compute_logits(again, tokens), compute_logits(model, tokens))
    if not max(distances) <= TOLERANCE:
        wrong.append("logits")
    return wrong, *distances


def main():
    """Checks everything; exit 1 where something differs."""
    root = pathlib.Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--program", type=pathlib.Path, default=root / "build" / "test" / "test_hf_model")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    failures = 0
    for seed, (size, config, length) in enumerate(configurations()):
        for variant, dtype, save in variants():
            if variant == "bare names" and not config.tie_word_embeddings:
                continue
            with tempfile.TemporaryDirectory() as directory:
                source = pathlib.Path(directory) / "from"
                model = make_model(config, seed).to(dtype)
                save(model, source)
                # The conversion has rounded the angles of positions, too, which no file has.
                model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
                tokens = make_tokens(config, 2, length)
                logits = compute_logits(model, tokens).contiguous()
                save_file({"tokens": tokens.to(torch.int32), "logits": logits}, source / "logits.safetensors")
                files = len(list(source.glob("model*.safetensors")))
                wrong, ours, theirs = check(arguments.program, source, pathlib.Path(directory) / "to", model)
                verdict = "differs: " + ", ".join(wrong) if wrong else f"same weights; logits {ours:.1e} here, {theirs:.1e} there"
                print(f"{size:14} {variant:10} in {files} files  {verdict}")
                failures += bool(wrong)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
