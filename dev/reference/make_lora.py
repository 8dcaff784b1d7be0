#!/usr/bin/env python3
"""Makes test/reference/lora.safetensors and lora_gpt2.safetensors: how peft trains adapters of low rank.

    python dev/reference/make_lora.py            writes the files
    python dev/reference/make_lora.py --check    recomputes and compares with the files, exit 1 where they differ

The models are window_below_length and gpt2_three_heads of make_reference.py, which has the exact formula of the weights.
Every matrix of their layers has an adapter. A and B are streams, too, with a scale of SCALE, named as in our own table:
transformer.h.0.mlp.c_fc.lora_A.weight. Stored are the losses of ten steps of AdamW, after.NAME of every adapter, and
`logits`, of the model in which peft has merged them.
"""

import argparse
import pathlib
import sys

import numpy as np
import torch
from peft import LoraConfig, get_peft_model

import make_reference as base

RANK, ALPHA, SCALE, RATE = 3, 6.0, 0.125, 1e-2
FILES = {"lora": "window_below_length", "lora_gpt2": "gpt2_three_heads"}
MODULES = {False: ["q_proj", "k_proj", "v_proj", "out_proj", "c_fc", "c_proj"], True: ["c_attn", "c_fc", "c_proj"]}


def adapter_name(name):
    """As in our table; peft has it in the middle of its own names."""
    return name.replace("base_model.model.", "").replace(".default.", ".")


def values_of(reference):
    """What is stored of one model."""
    gpt2 = reference.window == 0
    model = base.make_model(reference)
    settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=MODULES[gpt2], fan_in_fan_out=gpt2, task_type="CAUSAL_LM")
    model = get_peft_model(model, settings).double()
    adapters = {adapter_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in adapters.items():
            parameter.copy_(base.stream(name, reference.seed, tuple(parameter.shape), SCALE))
    optimizer = torch.optim.AdamW(adapters.values(), lr=RATE, betas=(base.BETA1, base.BETA2), eps=reference.epsilon,
                                  weight_decay=base.WEIGHT_DECAY, foreach=False)
    losses = base.train(model, [optimizer], reference)
    after = {f"after.{name}": p.detach().clone() for name, p in adapters.items()}
    merged = model.merge_and_unload()
    with torch.no_grad():
        logits = merged(input_ids=base.make_batch(reference)[0], use_cache=False).logits
    return {"losses": losses, "logits": logits} | after


def main():
    """Writes or checks the files."""
    root = pathlib.Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--check", action="store_true", help="compare with the files, write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    strings = {"rank": str(RANK), "alpha": str(ALPHA), "scale": str(SCALE), "learning_rate": str(RATE)}
    wrong = []
    for file, name in FILES.items():
        values = values_of(next(reference for reference in base.REFERENCES if reference.name == name))
        tensors = {key: np.ascontiguousarray(value.numpy().astype(np.float64 if key == "losses" else np.float32))
                   for key, value in values.items()}
        path = root / "test" / "reference" / f"{file}.safetensors"
        if arguments.check:
            wrong += base.check(path, tensors, strings)
            continue
        path.write_bytes(base.serialize(tensors, strings))
        print(f"{file}: {path.stat().st_size} bytes, loss {values['losses'][0]:.6f} -> {values['losses'][-1]:.6f}")
    if arguments.check:
        print("differs: " + ", ".join(wrong) if wrong else "the files agree")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
