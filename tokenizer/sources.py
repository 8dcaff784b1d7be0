"""Cuts inputs into chunks: text, JSON Lines, JSON arrays, Parquet, named data sets.

Text and JSON may be compressed: names that end with .gz or .zst. Offsets in them count
unpacked bytes, so going on in the middle unpacks what comes before once more.

A chunk holds whole documents, is about CHUNK_BYTES long, and knows the position after it,
where another process can go on reading on another day. Chunks depend on the input alone,
not on the number of processes nor on where a run was interrupted. Reading only cuts; the
processes that tokenize do the parsing.

There is one exception to "whole documents": a text document longer than DOCUMENT_BYTES.
It is cut before the last line end, or blank, of what was read. Its parts stay on one side
of the train/validation split, without an end-of-text token between.
"""

import codecs
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 1 << 19
DOCUMENT_BYTES = 1 << 22
RECORD_BYTES = 1 << 28  # a longer JSON record means a damaged file
ROWS = 512  # of Parquet files and data sets, in a chunk

SEPARATORS = {
    "endoftext": re.compile(rb"^<\|endoftext\|>[ \t]*\r?$\n?", re.MULTILINE),
    "blank-line": re.compile(rb"\r?\n(?:[ \t]*\r?\n)+"),
}


PACKED = (".gz", ".zst")  # endings of compressed inputs
FORMATS = {  # how files begin that are no text
    b"\x1f\x8b": "a gzip archive: its name must end with .gz",
    b"\x28\xb5\x2f\xfd": "a Zstandard archive: its name must end with .zst",
    b"PK\x03\x04": "a zip archive: unpack it first",
    b"PAR1": "a Parquet file: its name must end with .parquet",
    b"\x7fELF": "a program",
}
ZEROS = 1000  # one byte in so many of a text may be zero


class InputError(Exception):
    """An input that is missing or not of the format that its name says."""


class Source:
    """An input as a stream of bytes, unpacked where its name says that it is packed."""

    def __init__(self, path: Path, offset: int = 0):
        self.path, self.raw = path, open(path, "rb")
        self.file = self.raw
        if path.suffix == ".gz":
            self.file = gzip.GzipFile(fileobj=self.raw)
        elif path.suffix == ".zst":
            import pyarrow

            self.file = pyarrow.CompressedInputStream(self.raw, "zstd")
        if self.file is self.raw:
            self.raw.seek(offset)
        while self.file is not self.raw and offset > 0 and (skipped := len(self.read(min(offset, CHUNK_BYTES)))):
            offset -= skipped

    def read(self, count: int) -> bytes:
        """The next `count` bytes, or fewer where the input ends."""
        parts = []
        try:
            while count > 0 and (part := self.file.read(count)):
                parts.append(part)
                count -= len(part)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{self.path} cannot be read: {error}") from None
        return b"".join(parts)

    def done(self, offset: int) -> int:
        """How many bytes of the file were read, when `offset` unpacked bytes were used."""
        return offset if self.file is self.raw else self.raw.tell()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.raw.close()


@dataclass(frozen=True)
class Position:
    """Where reading goes on."""

    input: int = 0
    offset: int = 0  # bytes, or rows
    open_side: str | None = None  # the side of the document that goes on there, if one does


@dataclass(frozen=True)
class Chunk:
    """A part of an input. open_side: the side of the document that began in an earlier chunk, if one did."""

    # "text": bytes with separators; "lines": bytes, a JSON record a line; "records": a list of
    # JSON records, each a str; "table": an Arrow table
    kind: str
    data: object
    where: str  # for messages
    open_side: str | None
    next: Position
    done: int  # bytes of this input up to the end of this chunk, approximately


@dataclass(frozen=True)
class Options:
    """How to find documents, and how many of them are for validation."""

    separator: str
    columns: tuple[str, ...]  # of Parquet files and data sets
    validation_fraction: float
    dataset_split: str


def side_of(document: bytes, validation_fraction: float) -> str:
    """The side of a document, which depends on its bytes alone: copies of a document are never on both sides."""
    digest = hashlib.blake2b(document, digest_size=8).digest()
    return "validation" if int.from_bytes(digest, "little") < validation_fraction * 2.0**64 else "train"


def last_separator(data: bytes, separator: str) -> int:
    """The end of the last separator in `data` that is complete whatever bytes follow; 0 if there is none."""
    if separator == "blank-line":
        return max(data.rfind(mark) + len(mark) if mark in data else 0 for mark in (b"\n\n", b"\n\r\n"))
    end = len(data)
    while (begin := data.rfind(b"<|endoftext|>", 0, end)) >= 0:
        line_end = data.find(b"\n", begin)
        if (begin == 0 or data[begin - 1] == 10) and line_end >= 0 and not data[begin + 13 : line_end].strip(b" \t\r"):
            return line_end + 1
        end = begin + 12
    return 0


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


def text_chunks(path: Path, start: Position, options: Options) -> Iterator[Chunk]:
    offset, side, data = start.offset, start.open_side, b""
    with Source(path, offset) as file:
        while True:
            block = file.read(CHUNK_BYTES - len(data) % CHUNK_BYTES)  # a chunk depends only on where it begins
            data += block
            cut = last_separator(data, options.separator) if block else len(data)
            if cut == 0 and block and len(data) < DOCUMENT_BYTES:
                continue
            next_side = None
            if cut == 0 and block:
                cut = cut_before_space(data)
                next_side = side or side_of(data[:cut], options.validation_fraction)
            where = f"{path}, byte {offset}"
            offset += cut
            if cut > 0 or side is not None:
                yield Chunk("text", data[:cut], where, side, Position(start.input, offset, next_side), file.done(offset))
                side = next_side
            data = data[cut:]
            if not block:
                return


def line_chunks(path: Path, start: Position, _options: Options) -> Iterator[Chunk]:
    offset, data = start.offset, b""
    with Source(path, offset) as file:
        while True:
            block = file.read(CHUNK_BYTES - len(data) % CHUNK_BYTES)  # a chunk depends only on where it begins
            data += block
            cut = data.rfind(b"\n") + 1 if block else len(data)
            if cut > 0:
                where = f"{path}, in the lines from byte {offset}"
                offset += cut
                yield Chunk("lines", data[:cut], where, None, Position(start.input, offset), file.done(offset))
                data = data[cut:]
            elif len(data) > RECORD_BYTES:
                raise InputError(f"{path}: the line at byte {offset} is longer than {RECORD_BYTES >> 20} MiB")
            if not block:
                return


def array_chunks(path: Path, start: Position, _options: Options) -> Iterator[Chunk]:
    """The records of one JSON array, without the whole array ever being in memory."""
    decoder, between = json.JSONDecoder(), re.compile(r"[\s,\[\ufeff]*")  # a file may begin with a byte order mark
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    offset, text, records, size = start.offset, "", [], 0

    def chunk() -> Chunk:
        where = f"{path}, in the records before byte {offset}"
        return Chunk("records", records, where, None, Position(start.input, offset), file.done(offset))

    with Source(path, offset) as file:
        while block := file.read(CHUNK_BYTES):
            text += utf8.decode(block)
            at = used = 0
            while (at := between.match(text, at).end()) < len(text) and text[at] == "{":
                try:
                    end = decoder.raw_decode(text, at)[1]
                except json.JSONDecodeError:  # its end has not been read yet
                    break
                records.append(text[at:end])
                size += end - at
                at = end
                offset += len(text[used:at].encode())
                used = at
                if size >= CHUNK_BYTES:
                    yield chunk()
                    records, size = [], 0
            if at < len(text) and text[at] not in "{]" or len(text) - used > RECORD_BYTES:
                raise InputError(f"{path}: near byte {offset} there is no record of a JSON array: {text[at:at + 40]!r}")
            text = text[used:]
        if records:
            yield chunk()
    if text.strip(" \t\r\n,[\ufeff") != "]":
        raise InputError(f"{path}: the JSON array is damaged or ends within a record, near byte {offset}")


def parquet_chunks(path: Path, start: Position, options: Options) -> Iterator[Chunk]:
    import pyarrow

    try:
        yield from row_chunks(path, start, options)
    except (ValueError, OSError, pyarrow.ArrowException) as error:
        raise InputError(f"{path} cannot be read: {error}") from None


def row_chunks(path: Path, start: Position, options: Options) -> Iterator[Chunk]:
    import pyarrow.parquet as parquet

    file = parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
    columns = [name for name in options.columns if name in file.schema_arrow.names]
    if not columns:
        raise InputError(f"{path} has no column '{options.columns[0]}', but {', '.join(file.schema_arrow.names)}")
    row, total, size = 0, file.metadata.num_rows, path.stat().st_size
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if row + rows <= start.offset:
            row += rows
            continue
        for batch in file.iter_batches(ROWS, row_groups=[group], columns=columns, use_threads=False):
            skip = min(max(start.offset - row, 0), batch.num_rows)
            row += batch.num_rows
            if skip < batch.num_rows:
                yield Chunk(
                    "table", batch.slice(skip), f"{path}, in the rows before {row}", None,
                    Position(start.input, row), size * row // max(total, 1),
                )


def dataset_chunks(name: str, start: Position, options: Options) -> Iterator[Chunk]:
    try:
        import datasets
    except ImportError as error:
        raise InputError(f"'{name}' is not a file, and to read a data set of that name the library `datasets` is missing") from error
    try:
        rows = datasets.load_dataset(name, split=options.dataset_split, streaming=True).skip(start.offset)
    except Exception as error:  # the library has no base class for what can go wrong
        raise InputError(f"cannot read the data set '{name}': {error}") from error
    row, records = start.offset, []
    for record in rows:
        records.append(json.dumps({key: record[key] for key in options.columns if key in record}))
        row += 1
        if len(records) == ROWS:
            yield Chunk("records", records, f"{name}, in the rows before {row}", None, Position(start.input, row), 0)
            records = []
    if records:
        yield Chunk("records", records, f"{name}, in the rows before {row}", None, Position(start.input, row), 0)


def is_array(path: Path) -> bool:
    with Source(path) as file:
        return file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def check_text(path: Path) -> None:
    """Refuses a file that is no text by its first bytes."""
    with Source(path) as file:
        data = file.read(1 << 20)
    for magic, what in FORMATS.items():
        if data.startswith(magic):
            raise InputError(f"{path} looks like {what}")
    if data.count(b"\0") > 4 + len(data) // ZEROS:
        raise InputError(f"{path} is not text: {data.count(0)} of its first {len(data)} bytes are zero")


def reader_for(name: str):
    """The function that reads this input, chosen by the ending of its name. An empty file is an error, and so is no text."""
    path = Path(name)
    if not path.exists():
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and path.suffix not in (".txt", ".json", ".jsonl", ".parquet"):
            return dataset_chunks
        raise InputError(f"there is no file {name}")
    if not path.is_file():
        raise InputError(f"{name} is not a file")
    ending = path.with_suffix("").suffix if path.suffix in PACKED else path.suffix
    if path.stat().st_size == 0:
        raise InputError(f"{name} is empty")
    if ending == ".parquet":
        if path.suffix in PACKED:
            raise InputError(f"{name}: Parquet files are compressed inside: unpack it first")
        return parquet_chunks
    check_text(path)
    if ending in (".jsonl", ".ndjson") or ending == ".json" and not is_array(path):
        return line_chunks
    return array_chunks if ending == ".json" else text_chunks


def chunks(inputs: list[str], start: Position, options: Options) -> Iterator[Chunk]:
    """The chunks of all inputs, in order, from `start` on."""
    for index in range(start.input, len(inputs)):
        read = reader_for(inputs[index])
        name = inputs[index] if read is dataset_chunks else Path(inputs[index])
        yield from read(name, start if index == start.input else Position(index), options)
