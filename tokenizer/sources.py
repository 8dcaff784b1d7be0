"""Reads documents from text, JSON Lines, JSON arrays, Parquet and named data sets.

The first bytes of a file say what it is, whatever its name. Text and JSON may be compressed.
Only a few documents are in memory, however large an input is.

A document comes whole, with one exception: a text document longer than DOCUMENT_BYTES
comes in parts, cut before the last line end, or blank, of what was read.
tokenizer/documents.h cuts the texts of `train_gpt --data` in the same way.
"""

import codecs
import contextlib
import gzip
import io
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizer.chat import ChatError, ChatTemplate, count_ignored
from tokenizer.templates import ALPACA_FIELDS, COMPLETION_FIELDS, NEEDED, TEMPLATES, fitting, lacking

BLOCK_BYTES = 1 << 19
DOCUMENT_BYTES = 1 << 22  # TEXT_DOCUMENT_BYTES in documents.h
RECORD_BYTES = 1 << 28  # a longer JSON record means a damaged file
MOST_NESTED = 2048  # lists and objects in each other, as the C program's library takes them
ROWS = 512  # of a Parquet file, read at once

SEPARATORS = {  # what ends a document, at the end of a line
    "endoftext": re.compile(rb"<\|endoftext\|>[ \t]*\r?\n?\Z"),
    "blank-line": re.compile(rb"^[ \t]*\r?\n\Z", re.MULTILINE),
}
PACKED = (".gz", ".zst")  # endings of compressed inputs
JSON_ENDINGS = (".json", ".jsonl", ".ndjson")
BLANKS = b" \t\r\n"
GZIP, ZSTANDARD, PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"  # how such files begin
FORMATS = {  # how files begin that are no text
    b"PK\x03\x04": "a zip archive: unpack it first",
    b"\x7fELF": "a program",
    b"version https://git-lfs": "the pointer that Git LFS leaves in place of a file: run git lfs pull",
}
ZEROS, INVALID = 1000, 200  # at most one byte in so many of a text may be zero, or not be UTF-8

Records = Iterator[tuple[str, dict]]  # a record, and where it is: "line 7"


class InputError(Exception):
    """An input that is missing or not of the format that its name says."""


@dataclass(frozen=True)
class Options:
    """How to find documents."""

    separator: str = "endoftext"
    template: str = "plain"
    field: str = "text"  # of the template `plain`
    dataset_split: str = "train"
    chat: ChatTemplate | None = None  # of the template `chat`

    @property
    def columns(self) -> tuple[str, ...]:
        return {"plain": (self.field,), "completion": (*COMPLETION_FIELDS, "system"), "alpaca": (*ALPACA_FIELDS, "system", "history"),
                "chat": ("messages", "conversations", "system", *COMPLETION_FIELDS, *ALPACA_FIELDS, "history")}[self.template]

    @property
    def used(self) -> tuple[str, ...]:
        """The members of a record that become its document; those of a chat are its own."""
        return {"plain": (self.field,), "completion": COMPLETION_FIELDS}.get(self.template, ALPACA_FIELDS)


@dataclass(frozen=True)
class Document:
    """A document, or a part of one that is long."""

    text: str
    prompt: str  # stands before the text, and is not predicted
    data: bytes | bytearray  # the bytes of both, as they were read
    more: bool = False  # the document continues in the next part
    learn: list[tuple[int, int]] | None = None  # of a chat: which bytes of the text are predicted

    @property
    def is_odd(self) -> bool:
        """Some bytes are not UTF-8, so the text is not what was read."""
        return not self.prompt and self.text.encode() != self.data


@contextlib.contextmanager
def unpacked(path: Path) -> Iterator[io.BufferedIOBase]:
    """An input as a stream of bytes. What goes wrong while it is read becomes an InputError."""
    with open(path, "rb") as raw:
        try:
            magic = raw.read(4)
            raw.seek(0)
            if path.suffix == ".gz" or magic.startswith(GZIP):
                yield gzip.GzipFile(fileobj=raw)
            elif path.suffix == ".zst" or magic == ZSTANDARD:
                import pyarrow

                yield io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"), BLOCK_BYTES)
            else:
                yield raw
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{path} cannot be read: {error}") from None


def skip_mark(file: io.BufferedIOBase) -> None:
    """Skips a byte order mark, with which a file may begin."""
    if file.peek(3)[:3] == codecs.BOM_UTF8:
        file.read(3)


# Text


def cut_before_space(data: bytes) -> int:
    """Where to cut a document that is too long: before a line end or a blank, and never inside a character."""
    for space in (b"\n", b" "):
        cut = data.rfind(space)
        if cut > len(data) // 2:
            return cut
    cut = len(data)
    while cut > len(data) - 4 and data[cut - 1] & 0xC0 == 0x80:
        cut -= 1
    return cut - 1


def text_parts(path: Path, separator: re.Pattern) -> Iterator[tuple[bytearray, bool, bool]]:
    """What stands between separators, in parts of at most DOCUMENT_BYTES: bytes, more, and whether a separator follows."""
    data, begins = bytearray(), True
    with unpacked(path) as file:
        skip_mark(file)
        while line := file.readline(DOCUMENT_BYTES):
            data += line
            is_whole = line.endswith(b"\n") or len(line) < DOCUMENT_BYTES or not file.peek(1)
            while True:  # of a line that is longer than what is read at once the mark may stand before what was read last
                end = separator.search(data, max(0, len(data) - len(line)) if begins else 0) if is_whole else None
                if len(data) < DOCUMENT_BYTES + (end is not None):
                    break
                cut = cut_before_space(data[:DOCUMENT_BYTES])
                yield data[:cut], True, False
                data = data[cut:]
            if end:
                yield data[: end.start()], False, True
                data = bytearray()
            begins = is_whole
    if data:
        yield data, False, False


def text_documents(path: Path, options: Options, counts: Counter) -> Iterator[Document]:
    """Line ends around a document are dropped."""
    continued = False
    for data, more, separated in text_parts(path, SEPARATORS[options.separator]):
        data = data if continued else data.lstrip(b"\r\n")
        data = data if more else data.rstrip(b"\r\n")
        if not data and not continued:
            counts["empty"] += separated and options.separator == "endoftext"
            continue
        yield Document(data.decode(errors="replace"), "", data, more)
        continued = more


# Records


def finite(text: str) -> float:
    """Refuses NaN and Infinity, which are no JSON, and numbers beyond those of a double, as train_gpt does."""
    if not math.isfinite(float(text)):
        raise ValueError(f"{text[:40]} is no number of JSON, or too large")
    return float(text)


DECODER = json.JSONDecoder(parse_float=finite, parse_constant=finite)


def check_record(record: object, source: str) -> None:
    """Refuses half of a surrogate pair and lists in lists in lists, as train_gpt does. source: of the record."""
    if "\\u" in source:
        json.dumps(record, ensure_ascii=False).encode()
    if source.count("[") + source.count("{") <= MOST_NESTED:
        return
    level = [record]  # Python gives up by itself at 1,000, or since 3.12 much deeper
    for _ in range(MOST_NESTED):
        level = [item for holder in level for item in (holder.values() if isinstance(holder, dict) else holder) if isinstance(item, dict | list)]
    if level:
        raise RecursionError("it is nested too deeply")


def line_records(path: Path, _options: Options) -> Records:
    with unpacked(path) as file:
        number = 0
        skip_mark(file)
        while line := file.readline(RECORD_BYTES + 1):
            number += 1
            if len(line) > RECORD_BYTES:
                raise InputError(f"{path}, line {number} is longer than {RECORD_BYTES >> 20} MiB")
            if line.strip():
                try:
                    text = line.decode()
                    record = DECODER.decode(text)
                    check_record(record, text)
                except ValueError as error:
                    raise InputError(f"{path}, line {number}: not JSON: {error}") from None
                except RecursionError:
                    raise InputError(f"{path}, line {number}: not JSON that can be read: it is nested too deeply") from None
                yield f"line {number}", record


def array_records(path: Path, _options: Options) -> Records:
    """The records of one JSON array, without the whole array ever being in memory."""
    between, utf8 = re.compile(r"[\s,\[]*"), codecs.getincrementaldecoder("utf-8")()
    text, number = "", 0
    with unpacked(path) as file:
        skip_mark(file)
        while block := file.read(BLOCK_BYTES):
            try:
                text += utf8.decode(block)
            except UnicodeDecodeError as error:
                raise InputError(f"{path}, behind record {number}: not JSON: {error}") from None
            at = used = 0
            while (at := between.match(text, at).end()) < len(text) and text[at] == "{":
                try:
                    begin, (record, at) = at, DECODER.raw_decode(text, at)
                    check_record(record, text[begin:at])
                except json.JSONDecodeError:  # its end has not been read yet
                    break
                except (ValueError, RecursionError) as error:
                    raise InputError(f"{path}, record {number + 1}: not JSON that can be read: {error}") from None
                number, used = number + 1, at
                yield f"record {number}", record
            if at < len(text) and text[at] not in "{]" or len(text) - used > RECORD_BYTES:
                raise InputError(f"{path}: there is no record of a JSON array after record {number}: {text[at:at + 40]!r}")
            text = text[used:]
    if text.strip(" \t\r\n,[") != "]":
        raise InputError(f"{path}: the JSON array is damaged or ends within a record, after record {number}")


def table_records(path: Path, options: Options) -> Records:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
        names = file.schema_arrow.names
        sets = NEEDED.get(options.template, ({options.field: ("text",)},))
        if not any(set(needed) <= set(names) for needed in sets):
            kinds = {"list": [], "large_list": [], "string": "", "large_string": ""}
            like = {column.name: kinds.get(re.split(r"[<\[]", str(column.type))[0]) for column in file.schema_arrow}
            begun = next((needed for needed in sets if set(needed) & set(names)), sets[0])
            absent = next(name for name in begun if name not in names)
            raise InputError(f"{path} has no column '{absent}'{lacking(like, options.template)}")
        columns = [name for name in options.columns if name in names]
        row = 0
        for batch in file.iter_batches(ROWS, columns=columns, use_threads=False):
            for record in batch.to_pylist():
                row += 1
                yield f"row {row}", record
    except (ValueError, OSError, pyarrow.ArrowException) as error:
        raise InputError(f"{path} cannot be read: {error}") from None


def dataset_records(name: str, options: Options) -> Records:
    try:
        import datasets
    except ImportError as error:
        raise InputError(f"'{name}' is not a file, and to read a data set of that name the library `datasets` is missing") from error
    try:
        rows = datasets.load_dataset(name, split=options.dataset_split, streaming=True)
    except Exception as error:  # the library has no base class for what can go wrong
        raise InputError(f"cannot read the data set '{name}': {error}") from error
    for row, record in enumerate(rows, 1):
        yield f"row {row}", record


def record_documents(name: str, records: Records, options: Options, counts: Counter) -> Iterator[Document]:
    for where, record in records:
        try:
            if not isinstance(record, dict):
                raise TypeError(f"a record is {type(record).__name__}, but must be an object with named fields")
            if options.chat is not None:
                parts, learn = options.chat.document(record, counts)
            else:
                parts, learn = TEMPLATES[options.template](record, options.field), None
                count_ignored(counts, record, options.used, "record")
            prompt, text = parts
            data = (prompt + text).encode()
        except KeyError as error:
            raise InputError(f"{name}, {where}: the record has no field {error}{lacking(record, options.template)}") from None
        except (TypeError, ChatError, UnicodeError) as error:
            hint = fitting(record, options.template) if isinstance(error, TypeError) and isinstance(record, dict) and options.chat is None else ""
            raise InputError(f"{name}, {where}: {error}{hint}") from None
        if data:
            yield Document(text, prompt, data, learn=learn)
        else:
            counts["empty"] += 1


# Inputs


def holds_record(data: bytes) -> bool:
    """Whether a file that begins with these bytes holds JSON records, as text_format_is_json in text.h."""
    start = data.removeprefix(codecs.BOM_UTF8).lstrip(BLANKS).removeprefix(b"[").lstrip(BLANKS)
    try:
        return start[:1] == b"{" and bool(json.JSONDecoder().raw_decode(start.decode(errors="replace"))[0])
    except (ValueError, RecursionError):
        return False


def first_bytes(path: Path) -> bytes:
    """The beginning of a file, which must not be of a format that cannot be read."""
    with unpacked(path) as file:
        data = file.read(1 << 20)
    for magic, what in FORMATS.items():
        if data.startswith(magic):
            raise InputError(f"{path} looks like {what}")
    return data


def ending_of(path: Path) -> str:
    return (path.with_suffix("").suffix if path.suffix in PACKED else path.suffix).lower()


def records_for(name: str) -> Callable[..., Records] | None:
    """The function that reads the records of this input; None for a text. An empty file is an error."""
    path = Path(name)
    if not path.exists():
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and path.suffix not in (".txt", ".json", ".jsonl", ".parquet"):
            return dataset_records
        raise InputError(f"there is no file {name}")
    if not path.is_file():
        raise InputError(f"{name} is not a file")
    if path.stat().st_size == 0:
        raise InputError(f"{name} is empty")
    ending, is_packed = ending_of(path), path.suffix in PACKED
    data = first_bytes(path)
    if ending == ".parquet" or data.startswith(PARQUET):
        if is_packed:
            raise InputError(f"{name}: Parquet files are compressed inside: unpack it first")
        return table_records
    zeros, invalid = data.count(0), len(data) - len(data.decode(errors="ignore").encode())
    if zeros > 4 + len(data) // ZEROS or invalid > 4 + len(data) // INVALID:
        raise InputError(f"{name} is not text in UTF-8: {zeros + invalid} of its first {len(data)} bytes are not, or are zero; "
                         "convert a text with iconv")
    is_list, found = data.removeprefix(codecs.BOM_UTF8).lstrip(BLANKS)[:1] == b"[", holds_record(data)
    if not found and ending not in JSON_ENDINGS:
        return None
    return array_records if is_list and (found or ending == ".json") else line_records


def documents(name: str, options: Options, counts: Counter) -> Iterator[Document]:
    """The documents of one input, in order. Counts those that are left out, because they are `empty`."""
    records = records_for(name)
    if records is None:
        return text_documents(Path(name), options, counts)
    return record_documents(name, records(name if records is dataset_records else Path(name), options), options, counts)
