"""Converts a GPT-2 from a model file of llm.c to a directory that train_gpt loads, and back.

    python -m tokenizer.llmc gpt2_124M.bin DIR
    python -m tokenizer.llmc DIR gpt2_124M.bin [--bf16]

llm.c's file has a header of 256 words, then each kind of tensor for all layers, in fp32
(version 3) or bf16 (version 5), matrices as (out, in) and the vocabulary padded to a multiple
of 128. DIR has config.json and model.safetensors, and Hugging Face's matrices are (in, out).
Weights keep their bits; only --bf16 rounds.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np

class LlmcError(Exception):
    """A file that is not what it should be."""


MAGIC, KINDS = 20240326, {3: ("F32", "<f4"), 5: ("BF16", "<u2")}  # by version
PADDING = 128
FIXED = {"layer_norm_epsilon": (1e-05,), "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
         "activation_function": ("gelu_new", "gelu_pytorch_tanh")}  # of every model in llm.c; the first where a config.json is silent
LAYER = (  # in llm.c's order; the shape in multiples of the channels
    ("ln_1.weight", (1,)), ("ln_1.bias", (1,)), ("attn.c_attn.weight", (3, 1)), ("attn.c_attn.bias", (3,)),
    ("attn.c_proj.weight", (1, 1)), ("attn.c_proj.bias", (1,)), ("ln_2.weight", (1,)), ("ln_2.bias", (1,)),
    ("mlp.c_fc.weight", (4, 1)), ("mlp.c_fc.bias", (4,)), ("mlp.c_proj.weight", (1, 4)), ("mlp.c_proj.bias", (1,)))


def places(layers: int, channels: int, positions: int, padded: int) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor in llm.c's order, without "transformer."."""
    found = [("wte.weight", (padded, channels)), ("wpe.weight", (positions, channels))]
    for name, multiples in LAYER:
        found += [(f"h.{layer}.{name}", tuple(m * channels for m in multiples)) for layer in range(layers)]
    return found + [("ln_f.weight", (channels,)), ("ln_f.bias", (channels,))]


def turned(name: str, array: np.ndarray) -> np.ndarray:
    """A matrix of a layer transposed, anything else as it is."""
    return array.T if name.startswith("h.") else array


def to_directory(path: Path, out: Path) -> str:
    """Reads a file of llm.c. Returns what it is."""
    header = np.fromfile(path, "<i4", 256).tolist() + [0] * 8
    magic, version, positions, vocabulary, layers, heads, channels, padded = header[:8]
    if magic != MAGIC or version not in KINDS:
        raise LlmcError(f"{path} is no model file of llm.c in version 3 or 5")
    kind, dtype = KINDS[version]
    data, begin = np.memmap(path, dtype, "r", 1024), 0
    tensors = {}
    wanted = places(layers, channels, positions, padded)
    if data.size != sum(int(np.prod(shape)) for _, shape in wanted):
        raise LlmcError(f"{path} does not have the size that its header says")
    for name, shape in wanted:
        end = begin + int(np.prod(shape))
        array = turned(name, data[begin:end].reshape(shape)[:vocabulary if name == "wte.weight" else None])
        begin = end
        tensors["transformer." + name] = array
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": vocabulary, "n_positions": positions,
              "n_ctx": positions, "n_embd": channels, "n_layer": layers, "n_head": heads, "activation_function": "gelu_new",
              "layer_norm_epsilon": 1e-05, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    temporary = out.with_name(out.name + ".partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_safetensors(temporary / "model.safetensors", kind, tensors)
    os.replace(temporary, out)
    return f"{layers} layers of {channels} channels, {kind}"


def write_safetensors(path: Path, kind: str, tensors: dict[str, np.ndarray]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers insists on a format
    end = 0
    for name, array in tensors.items():
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [end, end := end + array.nbytes]}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)  # for programs that map the file
    with open(path, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            out.write(array.tobytes())
        out.flush()
        os.fsync(out.fileno())


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Every tensor as fp32, by its name without "transformer."."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    data = np.memmap(path, "u1", "r", 8 + length)
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        raw = data[slice(*entry["data_offsets"])]
        if entry["dtype"] == "BF16":
            array = (raw.view("<u2").astype("<u4") << 16).view("<f4")
        else:
            array = raw.view({"F32": "<f4", "F16": "<f2"}[entry["dtype"]]).astype("<f4", copy=False)
        found[name.removeprefix("transformer.")] = array.reshape(entry["shape"])
    return found


def round_to_bf16(array: np.ndarray) -> np.ndarray:
    """To the nearest, ties to even; a NaN stays one."""
    bits = np.ascontiguousarray(array, "<f4").view("<u4")
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(array), bits >> 16 | 0x40, rounded).astype("<u2")


def from_directory(directory: Path, out: Path, bf16: bool) -> str:
    """Writes a file of llm.c. Returns what it is."""
    config = json.loads((directory / "config.json").read_bytes())
    layers, channels, positions = config["n_layer"], config["n_embd"], config["n_positions"]
    vocabulary, tensors = config["vocab_size"], read_safetensors(directory / "model.safetensors")
    padded = -(-vocabulary // PADDING) * PADDING
    if config.get("n_inner") not in (None, 4 * channels):
        raise LlmcError(f"{directory}: n_inner must be 4 n_embd for llm.c")
    for key, values in FIXED.items():
        if config.get(key, values[0]) not in values:
            raise LlmcError(f"{directory}: {key} is {config[key]}, and {values[0]} in every model of llm.c")
    header = np.zeros(256, "<i4")
    header[:8] = MAGIC, 5 if bf16 else 3, positions, vocabulary, layers, config["n_head"], channels, padded
    temporary = out.with_name(out.name + ".partial")
    with open(temporary, "wb") as file:
        file.write(header.tobytes())
        for name, shape in places(layers, channels, positions, padded):
            array = turned(name, tensors[name])
            array = np.concatenate([array, np.zeros((padded - vocabulary, channels), "<f4")]) if name == "wte.weight" else array
            if array.shape != shape:
                raise LlmcError(f"{directory}: {name} has shape {array.shape}, expected {shape}")
            file.write((round_to_bf16(array) if bf16 else array).tobytes())
    os.replace(temporary, out)
    return f"{layers} layers of {channels} channels, {'BF16' if bf16 else 'F32'}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tokenizer.llmc", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="FROM")
    parser.add_argument("out", type=Path, metavar="TO")
    parser.add_argument("--bf16", action="store_true", help="version 5 of llm.c's file")
    found = parser.parse_args(arguments)
    try:
        if found.out.exists():
            raise LlmcError(f"{found.out} exists: choose another name")
        text = (from_directory(found.source, found.out, found.bf16) if found.source.is_dir()
                else to_directory(found.source, found.out))
    except (LlmcError, OSError, KeyError, ValueError) as error:
        print(f"llmc: {error}", file=sys.stderr)
        return 2
    print(f"{found.out}: {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
