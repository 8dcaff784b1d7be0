"""Converts a GPT-2 or GPT-Neo from pytorch_model.bin to model.safetensors, which train_gpt loads.

    python -m tokenizer.from_pytorch DIR OUT
    ./train_gpt sample --from OUT --prompt 'Once upon a time'

DIR has config.json and pytorch_model.bin, or its parts with pytorch_model.bin.index.json.
OUT is a new directory; it gets the same config.json, model.safetensors and the files of
the tokenizer. Weights keep their names, types and bits. Left out are the attention masks
that old versions stored, and lm_head.weight, which must equal the embedding. Only one
tensor is in memory at a time. pytorch_file.py reads the .bin without PyTorch, and says
why.
"""

import argparse
import json
import os
import shutil
import struct
import sys
from pathlib import Path

from tokenizer.pytorch_file import PytorchError, PytorchFile, Tensor

SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json",
          "merges.txt", "added_tokens.json", "special_tokens_map.json")
BUFFERS = (".attn.attention.bias", ".attn.attention.masked_bias", ".attn.bias", ".attn.masked_bias")
HEAD = "lm_head.weight"
EMBEDDINGS = ("transformer.wte.weight", "wte.weight")
ALIGNMENT = 64  # of the data, for programs that map the file

Source = tuple[PytorchFile, Tensor]


def files_of(directory: Path) -> list[Path]:
    """The files that hold the weights: one, or those that the index names."""
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if not (directory / INDEX).is_file():
        raise PytorchError(f"{directory} has neither {SINGLE} nor {INDEX}")
    try:
        names = sorted(set(json.loads((directory / INDEX).read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise PytorchError(f"{directory / INDEX} is not a JSON object with a \"weight_map\" of tensors to files") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (directory / name).is_file():
            raise PytorchError(f"{directory / INDEX} names the file {name!r}, which is not beside it")
    return [directory / name for name in names]


def collect(paths: list[Path]) -> dict[str, Source]:
    """The tensors that are weights, by name."""
    sources: dict[str, Source] = {}
    for path in paths:
        file = PytorchFile(path)
        for name, tensor in file.tensors.items():
            if name in sources:
                raise PytorchError(f"{path}: tensor '{name}' is in another file as well")
            if name.endswith(BUFFERS):
                continue
            if not tensor.is_real:
                raise PytorchError(f"{path}: tensor '{name}' is {tensor.kind}; allowed: F32, F16, BF16, F64")
            sources[name] = (file, tensor)
    return sources


def untie(sources: dict[str, Source]) -> None:
    """Removes lm_head.weight, after checking that it equals the embedding."""
    embedding = next((sources[name] for name in EMBEDDINGS if name in sources), None)
    if HEAD not in sources or embedding is None:
        return
    file, tensor = sources.pop(HEAD)
    if file.read(tensor) != embedding[0].read(embedding[1]):
        raise PytorchError(f"{file.path}: {HEAD} differs from the embedding; they must be the same matrix")


def write_safetensors(path: Path, sources: dict[str, Source]) -> int:
    """Writes the length of the header (8 bytes), the header in JSON, the tensors. Returns the bytes of the tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers insists on a format
    end = 0
    for name, (_, tensor) in sources.items():
        header[name] = {"dtype": tensor.kind, "shape": tensor.shape, "data_offsets": [end, end + tensor.bytes]}
        end += tensor.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for file, tensor in sources.values():
            out.write(file.read(tensor))
        out.flush()
        os.fsync(out.fileno())
    return end


def convert(directory: Path, out: Path) -> tuple[int, int]:
    """Writes OUT under a temporary name and renames it, so it is complete or absent. Returns the tensors and their bytes."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PytorchError(f"{out} is not empty: choose a directory that does not exist yet")
    if not (directory / "config.json").is_file():
        raise PytorchError(f"{directory} has no config.json")
    sources = collect(files_of(directory))
    untie(sources)
    temporary = out.with_name(out.name + ".partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for name in COPIED:
            if (directory / name).is_file():
                shutil.copyfile(directory / name, temporary / name)
        size = write_safetensors(temporary / "model.safetensors", sources)
        os.replace(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return len(sources), size


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tokenizer.from_pytorch", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("out", type=Path, metavar="OUT")
    found = parser.parse_args(arguments)
    try:
        count, size = convert(found.directory, found.out)
    except (PytorchError, OSError) as error:
        print(f"from_pytorch: {error}", file=sys.stderr)
        return 2
    print(f"{count} tensors, {size / 1e6:.1f} MB, in {found.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
