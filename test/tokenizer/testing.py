"""What the tests of this package share: prepare within this process, and its files."""

import contextlib
import io
import os
import struct
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import numpy as np

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # tests fork

from tokenizer import prepare, sources, vocabulary  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "test/reference"


def read_tokens(path: Path) -> tuple[list[int], list[int] | None]:
    """The tokens of a token file, and its mask. test_token_file.c tests the format."""
    data = path.read_bytes()
    width, _, masked, count = struct.unpack_from("<IIIQ", data, 12)
    tokens = np.frombuffer(data, f"<u{width}", count, 256)
    if not masked:
        return tokens.tolist(), None
    bits = np.frombuffer(data, np.uint8, offset=256 + count * width)
    return tokens.tolist(), np.unpackbits(bits, count=count, bitorder="little").tolist()


class DirectoryTest(unittest.TestCase):
    """A test with a directory of its own, `self.directory`."""

    def setUp(self):
        memory = "/dev/shm"  # where fsync costs nothing
        scratch = tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None)
        self.addCleanup(scratch.cleanup)
        self.directory = Path(scratch.name)

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.directory / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def run_prepare(self, *arguments) -> tuple[int, str, str]:
        """Exit code, output and errors of prepare with these arguments, in this process."""
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = prepare.main(["--tokenizer", str(TOKENIZER), "--threads", "1", *map(str, arguments)])
        return code, out.getvalue(), errors.getvalue()

    def prepare(self, prefix: str, *arguments) -> str:
        """Runs prepare, which must succeed, and returns what it prints."""
        code, out, errors = self.run_prepare("--out", self.directory / prefix, *arguments)
        self.assertEqual((code, errors), (0, ""))
        return out

    def refused(self, *arguments) -> str:
        """Runs prepare, which must refuse its input in one line, leaves no file, and returns that line."""
        code, _, errors = self.run_prepare("--out", self.directory / "refused", *arguments)
        self.assertEqual((code, errors.count("\n")), (2, 1), errors)
        self.assertEqual(list(self.directory.glob("refused*")), [])
        return errors

    def files(self, prefix: str) -> dict[str, bytes]:
        """The contents of all token files of a prefix, whose names must be final ones."""
        found = {path.name.removeprefix(prefix): path.read_bytes() for path in self.directory.glob(prefix + "_*")}
        self.assertTrue(all(name.endswith(".bin") for name in found), found.keys())
        return found

    def tokens(self, prefix: str, side: str) -> tuple[list[int], list[int] | None]:
        """The tokens of one side, and their mask."""
        path = self.directory / f"{prefix}_{side}_00000.bin"
        return read_tokens(path) if path.exists() else ([], None)


def small_blocks(size: int):
    """Inputs are read in blocks of this size, so that a small input has many."""
    return mock.patch.object(sources, "BLOCK_BYTES", size)


def reference_tokenizer():
    tokenizer = vocabulary.load(str(TOKENIZER))
    tokenizer.encode_special_tokens = True
    return tokenizer
