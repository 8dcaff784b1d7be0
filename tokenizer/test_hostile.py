"""Files that are damaged, or made to do harm: each of them is refused in one sentence."""

import builtins
import gzip
import io
import os
import pickle
import struct
import sys
import types
import unittest
import zipfile
from collections import Counter, OrderedDict
from contextlib import redirect_stderr
from unittest import mock

import numpy as np
import pyarrow
import pyarrow.parquet

from tokenizer import from_pytorch, vocabulary
from tokenizer.pytorch_file import PytorchError, PytorchFile
from tokenizer.sources import InputError, Options, documents
from tokenizer.test_documents import stories
from tokenizer.testing import ROOT, DirectoryTest


def flipped(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1:]


class Inputs(DirectoryTest):
    """Every damage ends in an InputError, or goes unnoticed where the format cannot notice it."""

    def read(self, name: str) -> list | None:
        """The texts of the documents; None: the file was refused."""
        try:
            return [document.text for document in documents(str(self.directory / name), Options(), Counter())]
        except InputError as error:
            self.assertIn(name, str(error))
            return None

    def test_damaged_parquet(self):
        table = pyarrow.table({"text": stories(60)})
        pyarrow.parquet.write_table(table, self.directory / "a.parquet", row_group_size=20)
        data = (self.directory / "a.parquet").read_bytes()
        for length in range(0, len(data), 61):
            self.write("a.parquet", data[:length])
            self.assertIsNone(self.read("a.parquet"))
        noticed = 0
        for at in range(0, len(data), 7):
            self.write("a.parquet", flipped(data, at, at % 8))
            noticed += self.read("a.parquet") is None
        self.assertGreater(noticed, 10)

    def test_a_column_that_is_not_there(self):
        pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), self.directory / "a.parquet")
        with self.assertRaisesRegex(InputError, "no column 'text', but body"):
            list(documents(str(self.directory / "a.parquet"), Options(), Counter()))

    def test_packed_texts_that_end_early(self):
        text = "\n".join(stories(300)).encode()
        packed = io.BytesIO()
        with pyarrow.CompressedOutputStream(packed, "zstd") as out:
            out.write(text)
            out.flush()
            zst = packed.getvalue()
        for name, data in (("a.txt.gz", gzip.compress(text)), ("a.txt.zst", zst)):
            for length in (5, 50, len(data) // 2, len(data) - 1):
                self.write(name, data[:length])
                self.assertIsNone(self.read(name), (name, length))
            self.write(name, b"no archive" + data)
            self.assertIsNone(self.read(name))

    def test_every_flipped_byte_of_a_gzip_text_is_noticed(self):
        text = "\n".join(stories(20))
        data = gzip.compress(text.encode())
        for at in range(len(data)):
            self.write("a.txt.gz", flipped(data, at, at % 8))
            self.assertIn(self.read("a.txt.gz"), (None, [text]), at)  # a few bits, as of the time, mean nothing for the text

    def test_json_arrays_that_end_early(self):
        for text in ("[", '[{"text": "x"}', '[{"text": "x"},', '[{"text": "x"', '[{"text": "x"} {"text": "y"}, 5]', "[[", "\ufeff[", "[]]"):
            self.write("a.json", text)
            self.assertIsNone(self.read("a.json"), text)

    def test_other_things_than_texts(self):
        self.write("empty.txt", b"")
        self.write("zeros.txt", bytes(100))
        self.write("program.txt", b"\x7fELF" + bytes(100))
        (self.directory / "directory.txt").mkdir()
        for name in ("empty.txt", "zeros.txt", "program.txt", "directory.txt", "missing.txt"):
            self.assertIsNone(self.read(name))


# A PyTorch file without PyTorch: its pickle names classes of modules that are made up here.

class Storage:
    def __init__(self, kind: str, key: str, count: int):
        self.identity = ("storage", getattr(sys.modules["torch"], kind), key, "cpu", count)


class Pickler(pickle.Pickler):
    def persistent_id(self, item):
        return item.identity if isinstance(item, Storage) else None


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def made_up_torch() -> dict[str, types.ModuleType]:
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    torch._utils = utils
    for name in ("FloatStorage", "HalfStorage", "LongStorage"):
        setattr(torch, name, type(name, (), {"__module__": "torch"}))

    def _rebuild_tensor_v2():
        pass

    _rebuild_tensor_v2.__module__, _rebuild_tensor_v2.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    utils._rebuild_tensor_v2 = _rebuild_tensor_v2
    return {"torch": torch, "torch._utils": utils}


def tensor(key="0", kind="FloatStorage", count=6, offset=0, shape=(2, 3), strides=(3, 1)):
    function = sys.modules["torch._utils"]._rebuild_tensor_v2
    return Call(function, Storage(kind, key, count), offset, shape, strides, False, OrderedDict())


class PytorchFiles(DirectoryTest):
    def setUp(self):
        super().setUp()
        modules = mock.patch.dict(sys.modules, made_up_torch())
        modules.start()
        self.addCleanup(modules.stop)
        self.values = np.arange(6, dtype="<f4")

    def archive(self, weights, compression=zipfile.ZIP_STORED, more: dict[str, bytes] | None = None) -> bytes:
        """The bytes of a file. weights: what is pickled, or the pickle."""
        content, packed = io.BytesIO(), io.BytesIO()
        if not isinstance(weights, bytes):
            Pickler(packed, protocol=2).dump(weights)
            weights = packed.getvalue()
        with zipfile.ZipFile(content, "w", compression) as out:
            out.writestr("archive/data.pkl", weights)
            out.writestr("archive/data/0", self.values.tobytes())
            for name, data in (more or {}).items():
                out.writestr(name, data)
        return content.getvalue()

    def open(self, data: bytes) -> PytorchFile:
        return PytorchFile(self.write("pytorch_model.bin", data))

    def test_tensors_are_read(self):
        file = self.open(self.archive({"a": tensor(), "b": tensor(shape=(3,), strides=(1,), offset=2)}))
        self.assertEqual(file.read(file.tensors["a"]), self.values.tobytes())
        self.assertEqual(file.read(file.tensors["b"]), self.values[2:5].tobytes())

    def test_a_pickle_that_calls_something_is_refused(self):
        mark = self.directory / "called"
        for call in (Call(os.system, f"touch {mark}"), Call(builtins.eval, f"open({str(mark)!r}, 'w')"),
                     Call(builtins.getattr, "", "join"), {"a": Call(os.mkdir, str(mark))}):
            with self.assertRaisesRegex(PytorchError, "which weights never need"):
                self.open(self.archive(call))
            self.assertFalse(mark.exists())

    def test_tensors_that_are_not_in_the_file(self):
        for wrong in (dict(key="1"), dict(key="../../x"), dict(count=7), dict(count=-6), dict(offset=1), dict(offset=-1),
                      dict(shape=(2, 4)), dict(shape=(1 << 40, 1 << 40), strides=(0, 0)), dict(strides=(4, 1)), dict(strides=(-3, 1)),
                      dict(strides=(1,)), dict(shape=(0, 3)), dict(shape=(True, 3)), dict(shape=("2", 3)), dict(kind="HalfStorage"),
                      dict(kind="LongStorage"), dict(offset=1.0), dict(shape=(2.0, 3))):
            with self.assertRaises(PytorchError, msg=wrong):
                self.open(self.archive({"a": tensor(**wrong)}))

    def test_what_is_no_dictionary_of_tensors(self):
        nested = b"\x80\x02" + b"(" * 200000 + b"t" * 200000 + b"."
        for weights in ([tensor()], {"a": 3}, {3: tensor()}, {"a": {"b": tensor()}}, "text", b"", b".", b"\x80\x02N.", nested,
                        b"\x80\x02\x8d" + b"\xff" * 8 + b"x."):
            with self.assertRaises(PytorchError):
                self.open(self.archive(weights))

    def test_archives_that_are_not_pytorchs(self):
        good = {"a": tensor()}
        for data in (self.archive(good, more={"more/data.pkl": b"N."}), self.archive(good, more={"archive/byteorder": b"big"}),
                     self.archive(good, zipfile.ZIP_DEFLATED), b"", b"PK", b"\x80\x02}.", bytes(1000)):
            with self.assertRaises(PytorchError):
                self.open(data)

    def test_flipped_bits_and_early_ends(self):
        data = self.archive({"a": tensor()})
        for length in range(len(data)):
            with self.assertRaises(PytorchError):
                self.open(data[:length])
        for at in range(len(data)):
            try:
                file = self.open(flipped(data, at, at % 8))
                self.assertEqual([file.read(item) for item in file.tensors.values()], [self.values.tobytes()], at)
            except PytorchError as error:
                self.assertIn("pytorch_model.bin", str(error))

    def test_a_refused_conversion_leaves_nothing(self):
        self.write("config.json", "{}")
        self.write("pytorch_model.bin", self.archive({"a": tensor(kind="LongStorage")}))
        with redirect_stderr(io.StringIO()) as errors:
            self.assertEqual(from_pytorch.main([str(self.directory), str(self.directory / "out")]), 2)
        self.assertEqual(errors.getvalue().count("\n"), 1)
        self.assertEqual(sorted(path.name for path in self.directory.iterdir()), ["config.json", "pytorch_model.bin"])


class Tokenizers(DirectoryTest):
    def test_directories_without_a_tokenizer(self):
        self.write("a.json", "{}")
        for name in (self.directory, self.directory / "a.json", self.directory / "b.json", self.directory / "none"):
            with self.assertRaises(vocabulary.TokenizerError):
                vocabulary.load(str(name))

    def test_a_name_of_the_hub_without_a_network_fails_at_once(self):
        unreachable = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(self.directory), "no_proxy": "*"}
        with mock.patch.dict(os.environ, unreachable):
            with mock.patch("time.sleep") as sleep:
                with self.assertRaisesRegex(vocabulary.TokenizerError, "cannot be reached .*: download the tokenizer.json of 'gpt2'"):
                    vocabulary.load("gpt2")
            sleep.assert_not_called()


if __name__ == "__main__":
    unittest.main()
