"""Trains a byte-level BPE like GPT-2's on text, JSON or Parquet files.

    python -m tokenizer.train_bpe --size 4096 --out DIR FILES...

The result is saved as transformers loads it. The first token is <|endoftext|>; the 256
bytes and the merged tokens follow. Memory grows with the number of different words, not
with the size of the files.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE

from tokenizer import vocabulary
from tokenizer.sources import SEPARATORS, InputError, Options, documents

SMALLEST = 257  # all bytes and the end of text


def texts(inputs: list[str], options: Options) -> Iterator[str]:
    """The texts of all documents."""
    for name in inputs:
        for document in documents(name, options, Counter()):
            yield document.text


def train(source: Iterator[str], size: int) -> Tokenizer:
    tokenizer = vocabulary.byte_level(BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[vocabulary.END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(source, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path) -> None:
    """Writes tokenizer.json, vocab.json, merges.txt, and tokenizer_config.json for transformers."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer.model.save(str(directory))
    end = vocabulary.END_OF_TEXT
    config = {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": False,
              "bos_token": end, "eos_token": end, "unk_token": end}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tokenizer.train_bpe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("inputs", nargs="+", help="files: .txt, .json, .jsonl, .parquet")
    parser.add_argument("--size", type=int, required=True, help=f"tokens of the vocabulary, at least {SMALLEST}")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--field", default="text", help="the text of JSON records and Parquet files (%(default)s)")
    parser.add_argument("--separator", choices=tuple(SEPARATORS), default="endoftext",
                        help="what separates the documents of a text file (%(default)s)")
    found = parser.parse_args(arguments)
    if found.size < SMALLEST:
        parser.error(f"--size {found.size}: allowed: at least {SMALLEST}, for all bytes and {vocabulary.END_OF_TEXT}")
    try:
        tokenizer = train(texts(found.inputs, Options(found.separator, field=found.field)), found.size)
        save(tokenizer, found.out)
    except (InputError, OSError, ValueError, TypeError) as error:
        print(f"train_bpe: {error}", file=sys.stderr)
        return 2
    if vocabulary.size(tokenizer) < found.size:
        print(f"train_bpe: the text gives only {vocabulary.size(tokenizer)} tokens, {found.size} were asked for",
              file=sys.stderr)
    print(f"{vocabulary.size(tokenizer)} tokens in {found.out}, sum {vocabulary.sum_of(tokenizer):08x}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
