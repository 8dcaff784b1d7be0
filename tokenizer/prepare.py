"""Makes token files that train_gpt reads, from text, JSON, Parquet or data sets.

    python -m tokenizer.prepare --tokenizer DIR --out data/stories stories.txt
    ./train_gpt --data 'data/stories_train_*.bin' ...

One process reads and writes, all others tokenize. Only a few chunks per process are in
memory, however large the input is. The shards do not depend on the number of processes.
If a run is interrupted, even by kill -9, the same command continues after the last
finished part.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from tokenizer import vocabulary
from tokenizer.encode import Encoded, Job, encode_chunk, start_process
from tokenizer.journal import Journal, JournalError, Part
from tokenizer.shard import ShardWriter
from tokenizer.sources import Chunk, InputError, Options, Position, chunks, reader_for, text_chunks
from tokenizer.templates import MASKED, TEMPLATES

SIDES = {"train": "train", "validation": "val"}  # the sides of the split, and their names in file names
UNDER_WAY = 3  # chunks per process


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tokenizer.prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("inputs", nargs="+", help="files (.txt, .json, .jsonl, also with .gz or .zst; .parquet) or names of data sets")
    parser.add_argument("--tokenizer", required=True, help="a directory with a tokenizer, or a name such as gpt2")
    parser.add_argument("--out", required=True, type=Path, metavar="PREFIX", help="PREFIX_train_00000.bin and so on")
    parser.add_argument("--val-fraction", type=float, default=0.01,
                        help="share of the documents, chosen by their hash (%(default)s)")
    parser.add_argument("--separator", choices=("endoftext", "blank-line"), default="endoftext",
                        help="what separates the documents of a text file: a line <|endoftext|>, or blank lines (%(default)s)")
    parser.add_argument("--template", choices=tuple(TEMPLATES), default="plain",
                        help="alpaca: instruction, input, output, of which only the output is predicted (%(default)s)")
    parser.add_argument("--pad", type=int, default=0, metavar="LENGTH",
                        help="make each document one sequence of this length, cut or filled up, for train_gpt "
                        "--seq-len LENGTH; otherwise documents follow each other")
    parser.add_argument("--field", default="text", help="the text of JSON records and Parquet files (%(default)s)")
    parser.add_argument("--dataset-split", default="train", help="the split of data sets by name (%(default)s)")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000,
                        help="begin a new shard when one has this many tokens (%(default)s)")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)),
                        help="that tokenize (all cores: %(default)s)")
    found = parser.parse_args(arguments)
    if not 0.0 <= found.val_fraction < 1.0:
        parser.error(f"--val-fraction {found.val_fraction}: allowed: 0 to less than 1")
    if found.shard_tokens < 1 or found.processes < 1:
        parser.error("--shard-tokens and --processes: allowed: at least 1")
    if found.pad != 0 and not 2 <= found.pad <= 1 << 16:
        parser.error(f"--pad {found.pad}: allowed: 2 to {1 << 16}, the --seq-len of the training")
    return found


def describe_input(name: str) -> list:
    """Name, size and time of an input, which must not change between a run and its continuation."""
    path = Path(name)
    return [name, path.stat().st_size, path.stat().st_mtime_ns] if path.exists() else [name, 0, 0]


def describe(arguments: argparse.Namespace, tokenizer_hash: bytes) -> dict:
    """The request, as the journal keeps it: everything that the shards depend on."""
    return {
        "tokenizer": tokenizer_hash.hex(),
        "inputs": [describe_input(name) for name in arguments.inputs],
        **{key: getattr(arguments, key) for key in
           ("val_fraction", "separator", "template", "field", "dataset_split", "shard_tokens", "pad")},
    }


def encode_all(source: Iterator[Chunk], pool: ProcessPoolExecutor, processes: int) -> Iterator[tuple[Chunk, Encoded]]:
    """The chunks with their tokens, in order; UNDER_WAY chunks per process are in memory at most."""
    under_way = deque()
    for chunk in source:
        under_way.append((chunk, pool.submit(encode_chunk, chunk)))
        if len(under_way) >= UNDER_WAY * processes:
            first, future = under_way.popleft()
            yield first, future.result()
    for chunk, future in under_way:
        yield chunk, future.result()


class PartWriter:
    """Writes the shards of one part, one for each side."""

    def __init__(self, prefix: Path, number: int, job: Job, size: int, end_of_text: int, tokenizer_hash: bytes):
        self.writers = {
            side: ShardWriter(
                prefix.with_name(f"{prefix.name}_{name}_{number:05d}.bin"), size, job.masked, tokenizer_hash, job.pad
            )
            for side, name in SIDES.items()
        }
        self.pad, self.end_of_text = job.pad, end_of_text
        self.documents = self.replaced = self.cut = self.left_out = self.empty = 0

    def add(self, encoded: Encoded) -> int:
        for side, tokens in encoded.sides.items():
            self.writers[side].add(tokens.ids, tokens.mask)
        self.documents += encoded.documents
        self.replaced += encoded.replaced
        self.cut += encoded.cut
        self.left_out += encoded.left_out
        self.empty += encoded.empty
        return max(writer.count for writer in self.writers.values())

    def finish(self, position: Position, done: bool) -> Part:
        shards = {}
        for side, writer in self.writers.items():
            if self.pad and writer.count:  # the last window, too, needs one token after its last input
                writer.add(np.array([self.end_of_text]), np.zeros(1, np.uint8))
            if header := writer.finish():
                shards[side] = {"file": writer.path.name, "tokens": header.count, "checksum": header.checksum}
        return Part(shards, self.documents, self.replaced, self.cut, self.left_out, position, done, self.empty)

    def abandon(self) -> None:
        for writer in self.writers.values():
            writer.abandon()


def write_all(results, new_part, journal: Journal, sizes: list[int], shard_tokens: int) -> Counter:
    """Writes all tokens. A part that is full is finished and entered in the journal, and the next one begins.

    Returns the documents of each input that was read from its beginning.
    """
    documents = Counter()
    first, position, part = journal.next, journal.next, new_part()
    before = [sum(sizes[:index]) for index in range(len(sizes))]
    begun = before[position.input] + position.offset if position != Position() else 0
    with tqdm(total=sum(sizes), initial=begun, unit="B", unit_scale=True, disable=None) as bar:
        try:
            for chunk, encoded in results:
                position = chunk.next
                documents[position.input] += encoded.documents
                bar.update(max(before[position.input] + chunk.done - bar.n, 0))
                if part.add(encoded) >= shard_tokens:
                    journal.add(part.finish(position, False))
                    part = new_part()
            journal.add(part.finish(position, True))
        except BaseException:
            part.abandon()
            raise
    if first.offset > 0:
        del documents[first.input]
    return documents


def make_shards(arguments: argparse.Namespace, journal: Journal, tokenizer: Tokenizer, tokenizer_hash: bytes) -> Counter:
    """Makes the parts that are not in the journal yet. Returns what write_all returns."""
    masked = arguments.template in MASKED or arguments.pad > 0
    columns = (arguments.field,) if arguments.template == "plain" else ("instruction", "input", "output")
    options = Options(arguments.separator, columns, arguments.val_fraction, arguments.dataset_split)
    job = Job(arguments.tokenizer, arguments.template, arguments.field, masked, arguments.pad, options)
    size, end_of_text = vocabulary.size(tokenizer), tokenizer.token_to_id(vocabulary.END_OF_TEXT)
    sizes = [describe_input(name)[1] for name in arguments.inputs]

    def new_part() -> PartWriter:
        return PartWriter(arguments.out, len(journal.parts), job, size, end_of_text, tokenizer_hash)

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, context, start_process, (job,)) as pool:
        try:
            results = encode_all(chunks(arguments.inputs, journal.next, options), pool, arguments.processes)
            return write_all(results, new_part, journal, sizes, arguments.shard_tokens)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run(arguments: argparse.Namespace) -> None:
    tokenizer = vocabulary.load(arguments.tokenizer)
    tokenizer_hash = vocabulary.hash_of(tokenizer)
    for name in arguments.inputs:
        reader_for(name)  # a missing input is reported before any work is done
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    journal = Journal(arguments.out, describe(arguments, tokenizer_hash))
    begun, finished_before = time.monotonic(), len(journal.parts)
    if not journal.done:
        documents = make_shards(arguments, journal, tokenizer, tokenizer_hash)
        report_undivided(arguments, documents)
    if not any(part.shards for part in journal.parts):
        journal.path.unlink()
        raise InputError(f"there is no document in {', '.join(arguments.inputs)}")
    report(arguments, journal, vocabulary.size(tokenizer), time.monotonic() - begun, finished_before)


def report_undivided(arguments: argparse.Namespace, documents: Counter) -> None:
    """Names the texts that became one document, which goes whole to one side of the split."""
    names = [name for index, name in enumerate(arguments.inputs) if documents[index] == 1 and reader_for(name) is text_chunks]
    if names:
        what = {"endoftext": "no line <|endoftext|>", "blank-line": "no blank line"}[arguments.separator]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        print(f"{', '.join(names[:3])}{more}: one document, because {what} divides it (see --separator)")


def amount(arguments: argparse.Namespace, journal: Journal) -> str:
    """One line about how much there is to train on and for validation."""
    if arguments.pad:
        train, held_out = (journal.sequences(side, arguments.pad) for side in SIDES)
        return f"{train} sequences of {arguments.pad} tokens to train on, {held_out} for validation"
    return f"{journal.tokens('train')} tokens to train on, {journal.tokens('validation')} for validation"


def report(arguments: argparse.Namespace, journal: Journal, size: int, seconds: float, finished_before: int) -> None:
    documents, replaced, cut, left_out, empty = (
        sum(getattr(part, what) for part in journal.parts) for what in ("documents", "replaced", "cut", "left_out", "empty")
    )
    print(f"{documents} documents: {amount(arguments, journal)}; vocabulary {size}; "
          f"{len(journal.parts)} parts, of which {finished_before} were finished before")
    if arguments.val_fraction > 0 and not journal.tokens("validation"):
        print(f"nothing is held out for validation: --val-fraction {arguments.val_fraction} is a share of the documents")
    if not journal.tokens("train"):
        print("nothing is left to train on: all documents are held out for validation; a lower --val-fraction leaves some")
    if replaced:
        print(f"{replaced} documents had bytes that are not UTF-8: they are replaced by U+FFFD")
    if cut:
        print(f"{cut} documents were longer than {arguments.pad} tokens and lost their end")
    if left_out:
        print(f"{left_out} documents were left out, because nothing of them would have been predicted")
    if empty:
        print(f"{empty} documents were left out, because they are empty")
    total = sum(describe_input(name)[1] for name in arguments.inputs)
    if finished_before == 0 and total > 0:
        speed = total / seconds / 1e6
        print(f"{total / 1e6:.1f} MB in {seconds:.1f} s: {speed:.2f} MB/s, {speed / arguments.processes:.2f} a process")


def main(arguments: list[str] | None = None) -> int:
    try:
        run(parse_arguments(arguments))
    except (InputError, JournalError, vocabulary.TokenizerError, OSError) as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 2
    except BrokenProcessPool:
        print("prepare: a process ended unexpectedly, perhaps for lack of memory: a lower --processes may help; "
              "the same command continues after the last finished part", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("prepare: interrupted; the same command continues after the last finished part", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
