"""Writes token files, the shards of a data set, in one pass.

token_file.h, which reads them in C, gives the layout byte by byte:

    magic "\\x89ACCO\\r\\n\\x1a"                                                    8 bytes
    version 1, bytes of a token, vocabulary, flags (1: a mask follows)              uint32 each
    number of tokens                                                                uint64
    SHA-256 of the tokenizer                                                        32 bytes
    CRC-32 of all after the header, then of the header with zeros in this field     uint64
    length to which documents were padded; 0: they follow each other                uint32
    zeros up to 256 bytes
    the tokens
    the mask, (count + 7) // 8 bytes, lowest bit first, 1: to be predicted

All numbers are little-endian. A shard is written under a temporary name, synced and
renamed, so one that has its final name is complete.
"""

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAGIC = b"\x89ACCO\r\n\x1a"
VERSION = 1
HAS_MASK = 1
HEADER_BYTES = 256
FIELDS = struct.Struct("<8sIIIIQ32sQI")
CHECKSUM_AT = 64


class ShardError(Exception):
    """A file that is not a token file, or a damaged one."""


@dataclass(frozen=True)
class Header:
    """The fields of the header that are not the same in every file."""

    token_bytes: int
    vocabulary: int
    masked: bool
    count: int
    tokenizer_hash: bytes
    padded: int
    checksum: int

    def pack(self) -> bytes:
        flags = HAS_MASK if self.masked else 0
        fields = FIELDS.pack(
            MAGIC, VERSION, self.token_bytes, self.vocabulary, flags, self.count, self.tokenizer_hash, self.checksum,
            self.padded,
        )
        return fields.ljust(HEADER_BYTES, b"\0")

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + self.count * self.token_bytes + ((self.count + 7) // 8 if self.masked else 0)


def token_bytes_for(vocabulary: int) -> int:
    return 2 if vocabulary <= 1 << 16 else 4


class ShardWriter:
    """Takes tokens, and their mask if there is one, piece by piece. Only the mask is kept in memory, a byte for 8 tokens."""

    def __init__(self, path: Path, vocabulary: int, masked: bool, tokenizer_hash: bytes, padded: int = 0):
        self.path = Path(path)
        self.temporary = self.path.with_name(self.path.name + ".tmp")
        self.vocabulary, self.masked, self.tokenizer_hash, self.padded = vocabulary, masked, tokenizer_hash, padded
        self.token_bytes = token_bytes_for(vocabulary)
        self.count = 0
        self.checksum = 0
        self.mask = bytearray()
        self.odd_bits = np.zeros(0, np.uint8)  # the mask's last byte while it has fewer than 8 bits
        self.file = None

    def _write(self, data: bytes) -> None:
        if self.file is None:
            self.file = open(self.temporary, "wb")
            self.file.write(b"\0" * HEADER_BYTES)
        self.checksum = zlib.crc32(data, self.checksum)
        self.file.write(data)

    def add(self, tokens: np.ndarray, mask: np.ndarray | None = None) -> None:
        """tokens: ids; mask: one uint8 for each, 1 where it is to be predicted."""
        if len(tokens) == 0:
            return
        self._write(tokens.astype(f"<u{self.token_bytes}", copy=False).tobytes())
        self.count += len(tokens)
        if self.masked:
            bits = np.concatenate([self.odd_bits, mask])
            whole = len(bits) // 8 * 8
            self.mask += np.packbits(bits[:whole], bitorder="little").tobytes()
            self.odd_bits = bits[whole:]

    def finish(self) -> Header | None:
        """Writes mask and header, syncs and renames. None, and no file, if there were no tokens."""
        if self.count == 0:
            return None
        if self.masked:
            self._write(bytes(self.mask) + np.packbits(self.odd_bits, bitorder="little").tobytes())
        header = Header(self.token_bytes, self.vocabulary, self.masked, self.count, self.tokenizer_hash, self.padded, 0)
        header = Header(*[*vars(header).values()][:-1], zlib.crc32(header.pack(), self.checksum))
        self.file.seek(0)
        self.file.write(header.pack())
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.temporary, self.path)
        return header

    def abandon(self) -> None:
        """Removes what has been written so far."""
        if self.file is not None:
            self.file.close()
            self.temporary.unlink(missing_ok=True)


def read_header(path: Path) -> Header:
    """The header of a token file, checked against the size of the file, but not the checksum."""
    with open(path, "rb") as file:
        data = file.read(HEADER_BYTES)
        size = os.fstat(file.fileno()).st_size
    if len(data) < HEADER_BYTES or data[: len(MAGIC)] != MAGIC:
        raise ShardError(f"{path} is not a token file")
    _, version, token_bytes, vocabulary, flags, count, tokenizer_hash, checksum, padded = FIELDS.unpack_from(data)
    header = Header(token_bytes, vocabulary, flags == HAS_MASK, count, tokenizer_hash, padded, checksum)
    if version != VERSION or token_bytes not in (2, 4) or flags > HAS_MASK or size != header.file_bytes:
        raise ShardError(f"{path} is damaged, or of another version")
    return header


def read(path: Path) -> tuple[Header, np.ndarray, np.ndarray | None]:
    """Header, tokens and mask (or None) of a token file, after checking its checksum."""
    header = read_header(path)
    data = Path(path).read_bytes()
    body = data[HEADER_BYTES:]
    blank = data[:CHECKSUM_AT] + b"\0" * 8 + data[CHECKSUM_AT + 8:HEADER_BYTES]
    if zlib.crc32(blank, zlib.crc32(body)) != header.checksum:
        raise ShardError(f"{path} is damaged: its checksum is wrong")
    tokens = np.frombuffer(body, f"<u{header.token_bytes}", header.count)
    if not header.masked:
        return header, tokens, None
    mask = np.frombuffer(body, np.uint8, offset=header.count * header.token_bytes)
    return header, tokens, np.unpackbits(mask, count=header.count, bitorder="little")
