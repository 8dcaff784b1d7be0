"""Makes token files that train_gpt reads, from text, JSON, Parquet or data sets.

    python -m tokenizer.prepare --tokenizer DIR --out data/stories stories.txt
    ./train_gpt --data 'data/stories_train_*.bin' ...

This program reads documents; `train_gpt tokenize`, which it starts, encodes them on all
cores and writes the files. Memory does not grow with the input. The files appear under
their names when all of them are whole. The same command makes nothing twice; if it was
interrupted, even by kill -9, it begins again.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from tokenizer import vocabulary
from tokenizer.chat import ChatError, ChatTemplate
from tokenizer.chat import load as load_chat
from tokenizer.sources import (JSON_ENDINGS, PACKED, SEPARATORS, Document, InputError, Options, array_records, documents,
                               ending_of, line_records, records_for)
from tokenizer.templates import TEMPLATES

PROGRAM = Path(__file__).resolve().parent.parent / "train_gpt"


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tokenizer.prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("inputs", nargs="+", help="files (.txt, .json, .jsonl, also with .gz or .zst; .parquet) or names of data sets")
    parser.add_argument("--tokenizer", required=True, help="a directory with a tokenizer, or a name such as gpt2")
    parser.add_argument("--out", required=True, type=Path, metavar="PREFIX", help="PREFIX_train_00000.bin and so on")
    parser.add_argument("--val-fraction", type=float, default=0.01,
                        help="share of the documents, chosen by their hash (%(default)s)")
    parser.add_argument("--separator", choices=tuple(SEPARATORS), default="endoftext",
                        help="what ends a document of a text file: <|endoftext|> at the end of a line, or blank lines (%(default)s)")
    parser.add_argument("--template", choices=(*TEMPLATES, "chat"), default="plain",
                        help="alpaca: instruction, input, output, of which only the output is predicted; completion: prompt and "
                        "completion, of which only the latter is; chat: messages, or one of these, as the tokenizer's chat template "
                        "writes them, of which only what the assistant says is predicted (%(default)s)")
    parser.add_argument("--chat-template", metavar="FILE", help="a chat template (Jinja) in the place of the tokenizer's")
    parser.add_argument("--pad", type=int, default=0, metavar="LENGTH",
                        help="make each document one sequence of this length, cut or filled up, for train_gpt "
                        "--seq-len LENGTH; otherwise documents follow each other")
    parser.add_argument("--field", default="text", help="the text of JSON records and Parquet files (%(default)s)")
    parser.add_argument("--dataset-split", default="train", help="the split of data sets by name (%(default)s)")
    parser.add_argument("--threads", type=int, help="that tokenize (all cores)")
    found = parser.parse_args(arguments)
    if found.chat_template is not None and found.template != "chat":
        parser.error("--chat-template is for --template chat")
    if not 0.0 <= found.val_fraction < 1.0:
        parser.error(f"--val-fraction {found.val_fraction}: allowed: 0 to less than 1")
    if found.threads is not None and found.threads < 1:
        parser.error("--threads: allowed: at least 1")
    if found.pad != 0 and not 2 <= found.pad <= 1 << 16:
        parser.error(f"--pad {found.pad}: allowed: 2 to {1 << 16}, the --seq-len of the training")
    return found


def input_facts(name: str) -> list:
    """Name, size and time of an input, which must not have changed if its token files are to be used again."""
    path = Path(name)
    return [name, path.stat().st_size, path.stat().st_mtime_ns] if path.exists() else [name, 0, 0]


def is_held_out(document: bytes, fraction: float) -> bool:
    """Whether a document is for validation. Its bytes alone decide, so copies of a document are never on both sides."""
    digest = hashlib.blake2b(document, digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64


@contextlib.contextmanager
def tokenizer_file(tokenizer, name: str) -> Iterator[str]:
    """The tokenizer.json of a tokenizer that was loaded by `name`, for train_gpt."""
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    if path.is_file():
        yield str(path)
        return
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save(f"{directory}/tokenizer.json")
        yield f"{directory}/tokenizer.json"


def json_lines(stream: Iterator[Document], fraction: float) -> Iterator[bytes]:
    """Documents as documents.h describes them."""
    begins = held_out = True
    for document in stream:
        held_out = is_held_out(document.data, fraction) if begins else held_out
        line = {"prompt": document.prompt} if document.prompt else {}
        line |= {"learn": document.learn} if document.learn is not None else {}
        line |= {"text": document.data.decode("latin-1"), "bytes": True} if document.is_odd else {"text": document.text}
        line |= {"val": held_out, "more": document.more}
        yield json.dumps(line, ensure_ascii=False).encode() + b"\n"
        begins = not document.more


def read_all(arguments: argparse.Namespace, chat: ChatTemplate | None, counts: Counter, undivided: list[str]) -> Iterator[Document]:
    """The documents of all inputs. undivided: gets the texts that are one document."""
    options = Options(arguments.separator, arguments.template, arguments.field, arguments.dataset_split, chat)
    plain = all(Path(name).suffix not in (*PACKED, ".parquet") for name in arguments.inputs)
    total = sum(input_facts(name)[1] for name in arguments.inputs) if plain else None
    with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
        for name in arguments.inputs:
            before = counts["documents"]
            for document in documents(name, options, counts):
                counts["documents"] += not document.more
                bar.update(len(document.data))
                yield document
            if counts["documents"] == before + 1 and records_for(name) is None:
                undivided.append(name)
    if not counts["documents"]:
        raise InputError(f"there is no document in {', '.join(arguments.inputs)}")


def tokenize(arguments: argparse.Namespace, tokenizer: str, prefix: Path, stream: Iterator[Document]) -> str:
    """Lets train_gpt make the token files. Returns what it reports."""
    command = [str(PROGRAM), "tokenize", "--tokenizer", tokenizer, "--out", str(prefix)]
    command += ["--seq-len", str(arguments.pad)] if arguments.pad else []
    command += ["--threads", str(arguments.threads)] if arguments.threads else []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            with contextlib.suppress(BrokenPipeError):  # it has failed and says why
                for line in json_lines(stream, arguments.val_fraction):
                    process.stdin.write(line)
                process.stdin.flush()
            out, errors = process.communicate()
        except BaseException:
            process.kill()
            with contextlib.suppress(BrokenPipeError):  # what was not written yet must not hide the reason
                process.stdin.close()
            raise
    if process.returncode != 0:
        reason = errors.decode().removeprefix("train_gpt: ").strip() or f"train_gpt ended with {process.returncode}"
        raise InputError("; ".join([reason, *out.decode().splitlines()]))
    return out.decode()


def beside(out: Path, rest: str) -> list[Path]:
    """What lies there whose name is that of the prefix, letter by letter, and then a text of the pattern `rest`."""
    return sorted(path for path in out.parent.iterdir() if re.fullmatch(re.escape(out.name) + rest, path.name))


def made_before(arguments: argparse.Namespace, record: Path, request: dict) -> str | None:
    """The report of the run that has made these token files; None: they are to be made."""
    parent, there = arguments.out.parent, beside(arguments.out, r"_(train|val)_[0-9].*\.bin")
    try:
        before = json.loads(record.read_bytes())
        files, report, made_of = before["files"], before["report"], before["request"]
    except (OSError, ValueError, KeyError, TypeError):
        files, report, made_of = {}, None, None
    if not there:
        return None
    if made_of is None:
        raise InputError(f"{there[0]} is there already, and no {record} says what it was made of: "
                         "remove it, or choose another --out")
    for key, value in request.items():
        if made_of.get(key) != value:
            raise InputError(f"{record} belongs to token files of another {key} ({made_of.get(key)}, now {value}): "
                             "repeat that command, remove the files, or choose another --out")
    whole = all((parent / file).is_file() and (parent / file).stat().st_size == size for file, size in files.items())
    return report if whole else None


def publish(arguments: argparse.Namespace, scratch: Path, record: Path, request: dict, report: str) -> None:
    """Gives the token files their names. The record comes first, so that no files are without one."""
    shards = sorted(scratch.iterdir())
    entry = {"request": request, "files": {path.name: path.stat().st_size for path in shards}, "report": report}
    temporary = scratch / "record"
    with open(temporary, "w") as file:
        json.dump(entry, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, record)
    for path in shards:
        os.replace(path, arguments.out.parent / path.name)


def warnings(arguments: argparse.Namespace, scratch: Path, chat: ChatTemplate | None, counts: Counter, undivided: list[str]) -> Iterator[str]:
    names = [path.name for path in scratch.iterdir()]
    for name in arguments.inputs:
        if records_for(name) in (line_records, array_records) and ending_of(Path(name)) not in JSON_ENDINGS:
            yield f"{name}: begins with a JSON record, so it was read as records, whatever its name"
    if undivided:
        what = {"endoftext": "no line <|endoftext|>", "blank-line": "no blank line"}[arguments.separator]
        more = f" and {len(undivided) - 3} more" if len(undivided) > 3 else ""
        yield f"{', '.join(undivided[:3])}{more}: one document, because {what} divides it (see --separator)"
    if arguments.val_fraction > 0 and not any("_val_" in name for name in names):
        yield f"nothing is held out for validation: --val-fraction {arguments.val_fraction} is a share of the documents"
    if not any("_train_" in name for name in names):
        yield "nothing is left to train on: all documents are held out for validation; a lower --val-fraction leaves some"
    if counts["empty"]:
        yield ("1 document was left out, because it is empty" if counts["empty"] == 1 else
               f"{counts['empty']} documents were left out, because they are empty")
    with contextlib.suppress(ChatError):  # a template may write no chat of one message
        if chat is not None and (thought := chat.thought()):
            yield (f"an answer is asked for without thoughts: the template's {thought!r} before the last one belongs to the prompt, and is "
                   "not learned")
    if counts["control"]:
        yield f"{counts['control']} {'chat has' if counts['control'] == 1 else 'chats have'} what is spelled like a special token in what is said: it became one"
    if ignored := [f"{key[1]} in {count} {key[2]}{'s'[:count > 1]}" for key, count in counts.items() if key[0] == "ignored"]:
        yield f"ignored members: {', '.join(ignored)}"


def run(arguments: argparse.Namespace) -> str:
    if not os.access(PROGRAM, os.X_OK):
        raise InputError(f"there is no {PROGRAM}, which makes the token files: build it with make")
    tokenizer = vocabulary.load(arguments.tokenizer)
    chat = load_chat(arguments.tokenizer, tokenizer, arguments.chat_template) if arguments.template == "chat" else None
    for name in arguments.inputs:
        is_text = records_for(name) is None  # a missing input is reported before any work is done
        if is_text and arguments.template != "plain":
            raise InputError(f"{name} is a text, but --template {arguments.template} is for records: JSON Lines, JSON or Parquet")
    name, parent = arguments.out.name, arguments.out.parent
    record = parent / f"{name}.prepared.json"
    request = {
        "tokenizer": f"{vocabulary.sum_of(tokenizer):08x}",
        "end of text": vocabulary.end_of(tokenizer, arguments.tokenizer),
        "token in front of a text": vocabulary.front_of(tokenizer),
        "inputs": [input_facts(name) for name in arguments.inputs],
        **{key: getattr(arguments, key) for key in ("val_fraction", "separator", "template", "field", "dataset_split", "pad")},
        "chat template": chat and hashlib.sha256(json.dumps([chat.source, chat.names], sort_keys=True).encode()).hexdigest(),
    }
    parent.mkdir(parents=True, exist_ok=True)
    if report := made_before(arguments, record, request):
        return report + f"{arguments.out}_*.bin were made before\n"
    for old in beside(arguments.out, r"\.\w{8}\.unfinished"):  # of runs that were interrupted
        shutil.rmtree(old, ignore_errors=True)
    counts, undivided, began = Counter(), [], time.monotonic()
    with (tempfile.TemporaryDirectory(prefix=f"{name}.", suffix=".unfinished", dir=parent) as directory,
          tokenizer_file(tokenizer, arguments.tokenizer) as file):
        report = tokenize(arguments, file, Path(directory) / name, read_all(arguments, chat, counts, undivided))
        report += "".join(line + "\n" for line in warnings(arguments, Path(directory), chat, counts, undivided))
        publish(arguments, Path(directory), record, request, report)
    return report + f"{sum(path[1] for path in request['inputs']) / 1e6:.1f} MB in {time.monotonic() - began:.1f} s\n"


def main(arguments: list[str] | None = None) -> int:
    try:
        print(run(parse_arguments(arguments)), end="")
    except (InputError, ChatError, vocabulary.TokenizerError, OSError) as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("prepare: interrupted; the same command begins again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
