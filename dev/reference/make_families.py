#!/usr/bin/env python3
"""Makes test/reference/families.safetensors: what Hugging Face's Llama, Mistral, Qwen2 and Qwen3 compute on small odd shapes.

    python dev/reference/make_families.py            writes the file and prints what fp32 rounding does to the values
    python dev/reference/make_families.py --check    recomputes and compares with the file, exit 1 where it differs
    python dev/reference/make_families.py --random 24 --seed 1 --out DIR
    ACCO_REFERENCE=DIR build/test/test_families      its first test tries them, with every element of each gradient

Everything is computed in float64, without the library's casts to float32 of norms and of softmax; only the angles of positions are float32,
as the library computes them in every precision. Weights and tokens are made from names, as make_reference.py explains: RMSNorm weights are
1 + value. Of a gradient at most SAMPLES elements are stored, evenly spread. Muon is torch's, as make_muon.py has it, and adapters are peft's, as make_lora.py has them. README.md beside this script lists the file's contents.
"""

import argparse
import json
import pathlib
import random
import sys
import types
from unittest import mock

import numpy as np
import torch
from make_lora import ALPHA, RANK, RATE, SCALE, adapter_name
from make_muon import muon
from make_reference import cross_entropy, describe, disagreement, same, serialize, splitmix, stream
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, logging

STEPS, SAMPLES = 10, 48
LEARNING_RATE, BETA1, BETA2, EPSILON, WEIGHT_DECAY = 1e-3, 0.9, 0.95, 1e-5, 0.1

# name: (batch size, sequence length, whether some targets do not count, config.json without what all have)
CASES = {
    "llama one key head": (2, 11, False, {
        "model_type": "llama", "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 2,
        "intermediate_size": 21, "vocab_size": 29, "attention_bias": True, "mlp_bias": True}),
    "llama linear": (2, 13, True, {
        "model_type": "llama", "hidden_size": 30, "num_attention_heads": 3, "num_hidden_layers": 1, "intermediate_size": 37, "vocab_size": 23,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.5}}),
    "llama 3": (1, 43, False, {
        "model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
        "intermediate_size": 20, "vocab_size": 31, "tie_word_embeddings": True, "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 300.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 40}}),
    "mistral window": (2, 17, False, {
        "model_type": "mistral", "hidden_size": 20, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 40, "num_hidden_layers": 2,
        "intermediate_size": 15, "vocab_size": 27, "sliding_window": 5}),
    "mistral yarn": (1, 21, False, {
        "model_type": "mistral", "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24, "num_hidden_layers": 2,
        "intermediate_size": 18, "vocab_size": 19, "sliding_window": None, "tie_word_embeddings": True, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}}),
    "qwen2 windows": (2, 14, True, {
        "model_type": "qwen2", "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": 3,
        "intermediate_size": 16, "vocab_size": 33, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen2 yarn": (1, 19, False, {
        "model_type": "qwen2", "hidden_size": 28, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1,
        "intermediate_size": 26, "vocab_size": 21, "tie_word_embeddings": True, "rope_scaling": {
            "rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 256, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7,
            "mscale_all_dim": 0.4, "truncate": False}}),
    "qwen3 biases": (2, 12, False, {
        "model_type": "qwen3", "hidden_size": 22, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2,
        "intermediate_size": 17, "vocab_size": 25, "attention_bias": True}),
    "qwen3 layer types": (3, 10, True, {
        "model_type": "qwen3", "hidden_size": 18, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8, "num_hidden_layers": 3,
        "intermediate_size": 24, "vocab_size": 26, "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "use_sliding_window": True,
        "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}}),
}


def random_rotary(generator, length):
    """rope_parameters of any kind."""
    kind = generator.choice(["default", "linear", "dynamic", "llama3", "yarn"])
    found = {"rope_type": kind, "rope_theta": generator.choice([50.0, 1000.0, 10000.0, 500000.0])}
    if kind != "default":
        found["factor"] = generator.choice([2.0, 3.5, 8.0])
    if kind in ("llama3", "yarn"):
        found["original_max_position_embeddings"] = generator.choice([8, 16, 48] if kind == "llama3" else [128, 256])
    if kind == "llama3":
        found |= {"low_freq_factor": 1.0, "high_freq_factor": generator.choice([2.0, 4.0])}
    return found


def random_case(number, generator):
    """A name, and what CASES has of it."""
    kind, odd = ("llama", "mistral", "qwen2", "qwen3")[number % 4], lambda low, high: generator.randrange(low, high)
    key_heads, groups, size = odd(1, 4), odd(1, 4), generator.choice([4, 8, 10, 16, 40, 128])
    heads, layers, window = key_heads * groups, odd(1, 4), odd(2, 12)
    size = min(size, 16) if kind == "qwen2" else size  # its channels are those of its heads
    config = {"model_type": kind, "hidden_size": heads * size if kind == "qwen2" else heads * odd(2, 9), "num_attention_heads": heads,
              "num_key_value_heads": key_heads, "num_hidden_layers": layers, "intermediate_size": odd(5, 50), "vocab_size": odd(13, 60),
              "tie_word_embeddings": generator.random() < 0.5, "rms_norm_eps": generator.choice([1e-5, 1e-6])}
    if kind != "qwen2":
        config["head_dim"] = size
    if kind in ("llama", "qwen3"):
        config["attention_bias"] = generator.random() < 0.5
    if kind == "llama":
        config["mlp_bias"] = generator.random() < 0.5
    if kind == "mistral":
        config["sliding_window"] = generator.choice([None, window])
    if kind in ("qwen2", "qwen3") and generator.random() < 0.6:
        config |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": odd(0, layers + 1)}
    length = odd(7, 40)
    config["rope_parameters"] = random_rotary(generator, length)
    return f"{kind} {number}", (odd(1, 4), length, generator.random() < 0.4, config)


def settings(name):
    """(B, T, masked, config.json, seed) of a case."""
    batch, length, masked, config = CASES[name]
    common = {"max_position_embeddings": 64, "attention_dropout": 0.0, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0,
              "pad_token_id": None}
    return batch, length, masked, common | config, list(CASES).index(name) + 1


def weights(name, shape, seed):
    """A tensor of the model of that name."""
    if name.endswith(".bias"):
        return stream(name, seed, shape, 0.125)
    if "norm" in name:
        return stream(name, seed, shape, 0.25, 1.0)
    return stream(name, seed, shape, 0.5 if "embed" in name else 0.25)


def make_model(name, dtype=torch.float64):
    """The model with these weights; in float64 nothing but angles is rounded to float32."""
    *_, config, seed = settings(name)
    kind = AutoConfig.for_model(config["model_type"])
    model = AutoModelForCausalLM.from_config(type(kind).from_dict(config), attn_implementation="eager").to(dtype)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(weights(key, tuple(parameter.shape), seed))
    for module in model.modules() if dtype == torch.float64 else ():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(
                lambda self, x: self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon), module)
    return model.train()


def make_batch(name):
    """(tokens, targets), both (B, T) int64; a quarter of masked targets are -1."""
    B, T, masked, config, seed = settings(name)
    words = (splitmix("tokens", seed, B * (T + 1)) % np.uint64(config["vocab_size"])).astype(np.int64).reshape(B, T + 1)
    tokens, targets = words[:, :-1].copy(), words[:, 1:].copy()
    if masked:
        targets[((splitmix("masked", seed, B * T) >> np.uint64(62)) == 0).reshape(B, T)] = -1
    return torch.from_numpy(tokens), torch.from_numpy(targets)


def sample(values, most):
    """At most `most` elements, evenly spread."""
    flat = values.flatten()
    count = min(most, flat.numel())
    return flat[torch.arange(count) * flat.numel() // count]


def adamw(parameters, rate=LEARNING_RATE):
    """AdamW with weight decay for matrices."""
    groups = [{"params": [p for p in parameters if p.dim() == d], "weight_decay": WEIGHT_DECAY if d == 2 else 0.0} for d in (1, 2)]
    return torch.optim.AdamW(groups, lr=rate, betas=(BETA1, BETA2), eps=EPSILON, foreach=False, fused=False)


def train(name, model, optimizers, most):
    """Logits and gradients of the first of STEPS steps, and the losses of all."""
    (tokens, targets), values, losses = make_batch(name), {}, []
    for step in range(STEPS):
        model.zero_grad()
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = cross_entropy(logits, targets)
        loss.backward()
        losses.append(loss.detach().reshape(1))
        if step == 0:
            grads = [sample(p.grad, most) for p in model.parameters() if p.grad is not None]
            values = {"logits": logits.detach().clone(), "grad": torch.cat(grads)}
        for optimizer in optimizers:
            optimizer.step()
    return values, torch.cat(losses)


def adapter_losses(name, dtype, most):
    """The losses of steps of adapters of all products of the layers."""
    products = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(make_model(name, dtype), LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=products, task_type="CAUSAL_LM")).to(dtype)
    adapters = {adapter_name(key): p for key, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for key, parameter in adapters.items():
            parameter.copy_(stream(key, settings(name)[-1], tuple(parameter.shape), SCALE))
    return train(name, model, [adamw(list(adapters.values()), RATE)], most)[1]


def model_values(name, dtype, most):
    """What test_families.c compares, and how gradients are called. Muon steps the matrices of layers."""
    model = make_model(name, dtype)
    values, losses = train(name, model, [adamw(list(model.parameters()))], most)
    model = make_model(name, dtype)
    named = list(model.named_parameters())
    matrices = [p for key, p in named if ".layers." in key and p.dim() == 2]
    others = [p for key, p in named if not (".layers." in key and p.dim() == 2)]
    with mock.patch.object(torch, "bfloat16", dtype):  # in which torch's Muon multiplies
        _, by_muon = train(name, model, [muon(matrices, LEARNING_RATE), adamw(others)], most)
    found = {"losses": losses, "muon losses": by_muon, "adapter losses": adapter_losses(name, dtype, most)}
    return values | found, [key for key, _ in named]


def main():
    """Writes or checks the file."""
    root = pathlib.Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--check", action="store_true", help="compare with the file, write nothing")
    parser.add_argument("--random", type=int, default=0, metavar="COUNT", help="of random configurations, in place of CASES")
    parser.add_argument("--seed", type=int, default=1, help="of the random configurations (%(default)s)")
    parser.add_argument("--out", type=pathlib.Path, default=root / "test" / "reference", metavar="DIR")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    most = SAMPLES
    if arguments.random > 0:
        generator, most = random.Random(arguments.seed), 1 << 30
        CASES.clear()
        CASES.update(random_case(number, generator) for number in range(arguments.random))
    logging.set_verbosity_error()
    softmax = torch.nn.functional.softmax
    torch.nn.functional.softmax = lambda x, dim=None, dtype=None: softmax(x, dim=dim)  # in the dtype of the scores
    path, tensors, strings = arguments.out / "families.safetensors", {}, {}
    for name in CASES:
        B, T, _, config, seed = settings(name)
        values, names = model_values(name, torch.float64, most)
        single, _ = model_values(name, torch.float32, most)
        print(f"{name:20} loss {values['losses'][0]:.6f} -> {values['losses'][-1]:.6f}; float32 differs by {describe(disagreement(values, single))}")
        for kind, value in values.items():
            tensors[f"{name}/{kind}"] = np.ascontiguousarray(value.numpy().astype(np.float64 if "losses" in kind else np.float32))
        tokens, targets = make_batch(name)
        tensors[f"{name}/tokens"], tensors[f"{name}/targets"] = tokens.numpy().astype(np.int32), targets.numpy().astype(np.int32)
        strings[name] = json.dumps({"B": B, "T": T, "seed": seed, "samples": most, "config": config, "tensors": names})
    if arguments.check:
        with safe_open(path, framework="numpy") as file:
            wrong = [] if file.metadata() == strings else ["metadata"]
            wrong += sorted(file.keys() ^ tensors.keys())
            wrong += [key for key in tensors.keys() & set(file.keys()) if not same(tensors[key], file.get_tensor(key))]
        sys.exit("differs: " + ", ".join(wrong) if wrong else 0)
    path.write_bytes(serialize(tensors, strings))
    print(f"{path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
