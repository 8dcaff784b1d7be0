#!/usr/bin/env python3
"""What PyTorch reaches on a GPU in the operations that this program's steps are made of: yardsticks for our kernels, and for what is not
written yet. dev/gpu/bench runs it.

    python dev/bench/yardsticks_gpu.py

Attention, causal, forward and backward, at the shapes of 125M, 1.3B and 2.7B: by FlashAttention and by cuDNN, and whether the backward pass
may add in any order or repeats its bits. Products of the layers: in bf16, and in FP8 (e4m3) with one scale for each operand, which is what
the program would do. --device cpu tries the script out, on small shapes.
"""

import argparse
import statistics
import time

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPES = {"125M": (32, 12, 1024, 64), "1.3B": (16, 16, 1024, 128), "2.7B": (8, 20, 2048, 128)}  # B, H, T, D
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION, "plain": SDPBackend.MATH}


def milliseconds(run, on_gpu, repeats=10, trials=5):
    """The median over trials of the mean over repeats, back to back."""
    times = []
    for trial in range(trials + 1 if on_gpu else 2):
        if on_gpu:
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record()
        start = time.perf_counter()
        for _ in range(repeats if on_gpu else 1):
            run()
        if on_gpu:
            ended.record()
            torch.cuda.synchronize()
        if trial > 0:  # the first one warms up
            times.append(began.elapsed_time(ended) / repeats if on_gpu else 1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def report(name, run, operations, on_gpu):
    """A line of the table; what this machine cannot do is said."""
    try:
        ms = milliseconds(run, on_gpu)
        print(f"{name:58} {ms:9.3f} ms {1e-9 * operations / ms:9.1f} TFLOP/s", flush=True)
    except (RuntimeError, AttributeError, ValueError) as error:
        print(f"{name:58} left out: {str(error).splitlines()[0][:100]}", flush=True)


def attention(model, shape, device):
    """One layer's attention. A causal query sees half of the keys; backward computes the scores again."""
    B, H, T, D = shape
    query, key, value = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape, device=device, dtype=torch.bfloat16)
    keys = 4 * B * H * T * (T + 1) / 2 * D

    def forward():
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0)

    def both():
        torch.autograd.grad(forward(), (query, key, value), gradient)

    on_gpu = device == "cuda"
    for name, backend in BACKENDS.items():
        if (name == "plain") == on_gpu:
            continue
        with sdpa_kernel(backend):
            report(f"attention {model} {name}, forward", forward, keys, on_gpu)
            for repeats in (False, True):
                torch.use_deterministic_algorithms(repeats, warn_only=True)
                report(f"attention {model} {name}, forward and backward{', repeats' if repeats else ''}", both, 3.5 * keys, on_gpu)
            torch.use_deterministic_algorithms(False)


def products(model, rows, inputs, outputs, device):
    """x (rows, inputs) W^T of a layer, in both formats."""
    x, weight = (torch.randn(n, inputs, device=device, dtype=torch.bfloat16) for n in (rows, outputs))
    operations, on_gpu = 2 * rows * inputs * outputs, device == "cuda"
    name = f"product {model} {rows} x {inputs} x {outputs}"
    report(f"{name}, bf16", lambda: x @ weight.t(), operations, on_gpu)
    x8, weight8 = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    report(f"{name}, FP8", lambda: torch._scaled_mm(x8, weight8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16), operations, on_gpu)
    report(f"{name}, to FP8", lambda: (x / x.abs().amax()).to(torch.float8_e4m3fn), 2 * rows * inputs, on_gpu)


def main():
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: for trying this script out")
    device = parser.parse_args().device
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}", flush=True)
    for model, (B, H, T, D) in SHAPES.items():
        B, H, T = (B, H, T) if device == "cuda" else (1, 2, 32)
        attention(model, (B, H, T, D), device)
        C, rows = H * D, B * T
        for inputs, outputs in ((C, 3 * C), (C, C), (C, 4 * C), (4 * C, C)):
            products(model, rows, inputs, outputs, device)


main()
