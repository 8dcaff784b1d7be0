"""Turns chunks into tokens, in worker processes.

Without padding, documents follow each other, so a sequence of train_gpt may begin in one
document and end in another. With padding, each document is one sequence, cut or filled up
to `pad` tokens. Window w of train_gpt is tokens [w*T, w*T + T], of which the last is only
a target. So with T = pad, window w is document w and the first token of the next one,
which the mask keeps from being predicted.
"""

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import parent_process

import numpy as np

from tokenizer import vocabulary
from tokenizer.shard import token_bytes_for
from tokenizer.sources import DOCUMENT_BYTES, SEPARATORS, Chunk, InputError, Options, side_of
from tokenizer.templates import TEMPLATES, Segments


@dataclass
class Tokens:
    """Tokens of one side of the split."""

    ids: np.ndarray
    mask: np.ndarray  # one uint8 per id; empty where nothing is masked


@dataclass
class Encoded:
    """A chunk as tokens, and how many documents..."""

    sides: dict[str, Tokens]
    documents: int  # ...end in it
    replaced: int  # ...had bytes that are not UTF-8
    cut: int  # ...were longer than `pad`
    left_out: int  # ...were left out, because nothing of them would be predicted
    empty: int  # ...were left out, because they have no text


@dataclass
class Document:
    """A document, or the part of a long one that is in this chunk."""

    segments: Segments
    side: str
    begins: bool = True
    ends: bool = True  # and an end-of-text token follows


@dataclass
class Job:
    """What every worker process is told when it starts."""

    tokenizer: str
    template: str
    field: str
    masked: bool
    pad: int  # length of a sequence, each one document; 0: documents follow each other
    options: Options


class Encoder:
    """The tokenizer of one process."""

    def __init__(self, job: Job):
        self.job = job
        self.tokenizer = vocabulary.load(job.tokenizer)
        self.tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a document is text
        self.tokenizer.no_truncation()
        self.end_of_text = self.tokenizer.token_to_id(vocabulary.END_OF_TEXT)
        self.replaced = self.empty = 0  # documents of this chunk
        self.dtype = np.dtype(f"<u{token_bytes_for(vocabulary.size(self.tokenizer))}")

    def encode(self, chunk: Chunk) -> Encoded:
        self.replaced = self.empty = 0
        documents = self.text(chunk) if chunk.kind == "text" else self.records(chunk)
        texts = [piece for document in documents for text, _ in document.segments for piece in pieces(text)]
        ids = iter(self.tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        sides, cut, left_out = {"train": ([], []), "validation": ([], [])}, 0, 0
        for document in documents:
            found = self.assemble(document, ids)
            if self.job.pad:
                cut += document.begins and len(found.ids) > self.job.pad
                found = self.padded(found)
                if not (document.begins and found.mask.any()):
                    left_out += document.begins
                    continue
            tokens, mask = sides[document.side]
            tokens.append(found.ids)
            mask.append(found.mask)
        joined = {side: Tokens(join(ids, self.dtype), join(mask, np.uint8)) for side, (ids, mask) in sides.items()}
        return Encoded(joined, sum(document.ends for document in documents), self.replaced, cut, left_out, self.empty)

    def assemble(self, document: Document, ids: Iterator) -> Tokens:
        """Joins the tokens of a document's pieces, which come next in `ids`, with their mask."""
        tokens, mask = [], []
        for text, counts in document.segments:
            for _ in pieces(text):
                found = np.array(next(ids).ids, self.dtype)
                tokens.append(found)
                mask.append(np.full(len(found) if self.job.masked else 0, counts, np.uint8))
        if document.ends:
            tokens.append(np.array([self.end_of_text], self.dtype))
            mask.append(np.ones(1 if self.job.masked else 0, np.uint8))
        return Tokens(join(tokens, self.dtype), join(mask, np.uint8))

    def padded(self, document: Tokens) -> Tokens:
        """One sequence of `pad` tokens. Its first token and the filling are not to be predicted."""
        kept = min(len(document.ids), self.job.pad)
        ids = np.full(self.job.pad, self.end_of_text, self.dtype)
        mask = np.zeros(self.job.pad, np.uint8)
        ids[:kept] = document.ids[:kept]
        mask[1:kept] = document.mask[1:kept]
        return Tokens(ids, mask)

    def decode(self, data: bytes) -> str:
        """The text of a document; bytes that are not UTF-8 become U+FFFD and are counted."""
        try:
            return data.decode()
        except UnicodeDecodeError:
            self.replaced += 1
            return data.decode(errors="replace")

    def text(self, chunk: Chunk) -> list[Document]:
        """The documents between separators. The first and the last may be parts of a document longer than a chunk."""
        parts = SEPARATORS[self.job.options.separator].split(chunk.data)
        documents = []
        for index, part in enumerate(parts):
            continued = index == 0 and chunk.open_side is not None
            goes_on = index == len(parts) - 1 and chunk.next.open_side is not None
            part = part if continued else part.lstrip(b"\r\n")
            part = part if goes_on else part.rstrip(b"\r\n")
            if not part and not continued:
                self.empty += index < len(parts) - 1 and self.job.options.separator == "endoftext"
                continue
            side = chunk.open_side if continued else chunk.next.open_side if goes_on else None
            side = side or side_of(part, self.job.options.validation_fraction)
            documents.append(Document([(self.decode(part), True)], side, not continued, not goes_on))
        return documents

    def records(self, chunk: Chunk) -> list[Document]:
        """The documents of JSON records or table rows; those without any text are left out."""
        make = TEMPLATES[self.job.template]
        documents = []
        try:
            for record in parse(chunk):
                segments = make(record, self.job.field)
                text = "".join(text for text, _ in segments)
                if not text:
                    self.empty += 1
                    continue
                data = text.encode(errors="replace")  # JSON can hold half of a surrogate pair
                side = side_of(data, self.job.options.validation_fraction)
                segments = [(text.encode(errors="replace").decode(), counts) for text, counts in segments]
                documents.append(Document(segments, side))
        except KeyError as error:
            raise InputError(f"{chunk.where}: a record has no field {error}") from None
        except (ValueError, TypeError) as error:
            raise InputError(f"{chunk.where}: {error}") from None
        return documents


def parse(chunk: Chunk):
    """The records of a chunk, as dictionaries."""
    if chunk.kind == "table":
        yield from chunk.data.to_pylist()
        return
    for text in chunk.data if chunk.kind == "records" else chunk.data.split(b"\n"):
        if text.strip():
            record = json.loads(text)
            if not isinstance(record, dict):
                raise TypeError(f"a record is {type(record).__name__}, but must be an object with named fields")
            yield record


def pieces(text: str) -> list[str]:
    """Cuts a long text before blanks: the library needs memory for a hundred times the text that it encodes at once."""
    result = []
    while len(text) > DOCUMENT_BYTES:
        cut = text.rfind(" ", DOCUMENT_BYTES // 2, DOCUMENT_BYTES)
        cut = cut if cut > 0 else DOCUMENT_BYTES
        result.append(text[:cut])
        text = text[cut:]
    return [*result, text]


def join(arrays: list[np.ndarray], dtype) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


_encoder: Encoder | None = None  # of this process


def _leave_with_parent() -> None:
    parent_process().join()
    os._exit(1)


def start_process(job: Job) -> None:
    """Called once in every worker process."""
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are the parallelism
    threading.Thread(target=_leave_with_parent, daemon=True).start()  # a killed parent leaves no orphans
    _encoder = Encoder(job)


def encode_chunk(chunk: Chunk) -> Encoded:
    return _encoder.encode(chunk)
