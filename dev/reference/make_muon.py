#!/usr/bin/env python3
"""Makes test/reference/muon.safetensors: what torch.optim.Muon computes, with adjust_lr_fn="match_rms_adamw".

    python dev/reference/make_muon.py            writes the file
    python dev/reference/make_muon.py --check    recomputes and compares with the file, exit 1 where they differ

torch rounds the matrix to bfloat16 before its products. Here torch.bfloat16 stands for float64 while it does, so its own
code computes in float64; values are rounded to float32 once, when they are stored.

MATRICES are steps on single matrices. Weights and gradients are streams of make_reference.py, named "RxC.weight" and
"RxC.gradient.STEP", with scales of 0.5 and 2^-10; RxC.after.STEP is stored after every step.

The MODEL is window_below_length of make_reference.py: Muon steps the matrices of its layers, AdamW all else, for ten steps.
Stored are `losses`, and after.PARAMETER after the last step.
"""

import argparse
import pathlib
import sys
from unittest import mock

import numpy as np
import torch

import make_reference as base

SHAPES = ((1, 1), (1, 7), (7, 1), (3, 5), (5, 3), (16, 16), (33, 32), (17, 64), (96, 24))
STEPS, SEED, WEIGHT_DECAY = 3, 5, 0.1
RATES = (0.02, 0.01, 0.03)
MODEL_RATE = 1e-3


def muon(parameters, rate):
    """torch's Muon with the settings that the program has by default."""
    return torch.optim.Muon(parameters, lr=rate, momentum=0.95, weight_decay=WEIGHT_DECAY, nesterov=True,
                            ns_steps=5, adjust_lr_fn="match_rms_adamw")


def matrix_values():
    """The parameters of every shape after each of its steps."""
    values = {}
    for shape in SHAPES:
        name = f"{shape[0]}x{shape[1]}"
        parameter = torch.nn.Parameter(base.stream(f"{name}.weight", SEED, shape, 0.5))
        optimizer = muon([parameter], RATES[0])
        for step, rate in enumerate(RATES):
            parameter.grad = base.stream(f"{name}.gradient.{step}", SEED, shape, 2.0**-10)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            values[f"{name}.after.{step}"] = parameter.detach().clone()
    return values


def model_values():
    """Ten steps of a model by both optimizers."""
    reference = base.REFERENCES[0]
    model = base.make_model(reference)
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if ".h." in name and p.dim() == 2]
    others = [p for name, p in named.items() if ".h." not in name or p.dim() != 2]
    groups = [{"params": [p for p in others if p.dim() == 2], "weight_decay": WEIGHT_DECAY},
              {"params": [p for p in others if p.dim() == 1], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=MODEL_RATE, betas=(base.BETA1, base.BETA2), eps=reference.epsilon, foreach=False)
    optimizers = (muon(matrices, MODEL_RATE), adamw)
    losses = base.train(model, optimizers, reference)
    return {"losses": losses} | {f"after.{name}": p.detach().clone() for name, p in named.items()}


def main():
    """Writes or checks the file."""
    root = pathlib.Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--check", action="store_true", help="compare with the file, write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with mock.patch.object(torch, "bfloat16", torch.float64):
        values = matrix_values() | model_values()
    tensors = {name: np.ascontiguousarray(value.numpy().astype(np.float64 if name == "losses" else np.float32))
               for name, value in values.items()}
    settings = {"momentum": 0.95, "iterations": 5, "weight_decay": WEIGHT_DECAY, "model_rate": MODEL_RATE, "seed": SEED,
                "steps": STEPS, "rates": " ".join(map(str, RATES))}
    strings = {key: str(value) for key, value in settings.items()}
    path = root / "test" / "reference" / "muon.safetensors"
    if not arguments.check:
        path.write_bytes(base.serialize(tensors, strings))
        print(f"{path.stat().st_size} bytes, loss {values['losses'][0]:.6f} -> {values['losses'][-1]:.6f}")
        return
    wrong = base.check(path, tensors, strings)
    print("differs: " + ", ".join(wrong) if wrong else "the file agrees")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
