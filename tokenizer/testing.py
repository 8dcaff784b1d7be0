"""What the tests of this package share: prepare within this process, and its files."""

import contextlib
import io
import os
import tempfile
import unittest
from concurrent.futures import Future
from pathlib import Path
from unittest import mock

import numpy as np

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # tests fork

from tokenizer import encode, prepare, shard, sources, vocabulary  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = ROOT / "test/reference"


class InThisProcess:
    """Stands for ProcessPoolExecutor, whose processes take a second to start."""

    def __init__(self, _processes, _context, _start, arguments):
        encode._encoder = encode.Encoder(*arguments)

    def submit(self, function, argument) -> Future:
        future = Future()
        try:
            future.set_result(function(argument))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, **_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


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
        command = ["--tokenizer", str(TOKENIZER), "--processes", "1", *map(str, arguments)]
        with mock.patch.object(prepare, "ProcessPoolExecutor", InThisProcess):
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
                code = prepare.main(command)
        return code, out.getvalue(), errors.getvalue()

    def prepare(self, prefix: str, *arguments) -> str:
        """Runs prepare, which must succeed, and returns what it prints."""
        code, out, errors = self.run_prepare("--out", self.directory / prefix, *arguments)
        self.assertEqual((code, errors), (0, ""))
        return out

    def refused(self, *arguments) -> str:
        """Runs prepare, which must refuse its input in one line, and returns that line."""
        code, _, errors = self.run_prepare("--out", self.directory / "refused", *arguments)
        self.assertEqual((code, errors.count("\n")), (2, 1), errors)
        return errors

    def files(self, prefix: str) -> dict[str, bytes]:
        """The contents of all files of a prefix but the journal, whose names must be final ones."""
        found = {path.name.removeprefix(prefix): path.read_bytes() for path in self.directory.glob(prefix + "_*")}
        self.assertTrue(all(name.endswith(".bin") for name in found), found.keys())
        return found

    def tokens(self, prefix: str, side: str) -> tuple[list[int], list[int] | None]:
        """The tokens of all shards of one side, and their masks."""
        parts = [shard.read(path) for path in sorted(self.directory.glob(f"{prefix}_{side}_*.bin"))]
        if not parts:
            return [], None
        mask = None if parts[0][2] is None else np.concatenate([part[2] for part in parts]).tolist()
        return np.concatenate([part[1] for part in parts]).tolist(), mask


def small_chunks(size: int = 2000):
    """Inputs are cut into chunks of this size, so that a small input has many."""
    return mock.patch.object(sources, "CHUNK_BYTES", size)


def reference_tokenizer():
    tokenizer = vocabulary.load(str(TOKENIZER))
    tokenizer.encode_special_tokens = True
    return tokenizer
