"""Reads the tensors of a pytorch_model.bin without PyTorch, and without running its code.

Since PyTorch 1.6 such a file is a zip archive of NAME/data.pkl, a pickle of a dictionary
of tensors, and NAME/data/KEY, the uncompressed bytes of each storage. A pickle is a
program that may call whatever it names, so one that names anything but the nine harmless
things in ALLOWED is refused. PyTorch itself would be a dependency of 900 MB for this one
purpose.

Tensors keep their types and bits. Opening a file reads only the pickle; a tensor is read
when it is asked for.
"""

import pickle
import struct
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

STORAGES = {  # PyTorch's name: the name in safetensors, bytes of an element
    "FloatStorage": ("F32", 4),
    "HalfStorage": ("F16", 2),
    "BFloat16Storage": ("BF16", 2),
    "DoubleStorage": ("F64", 8),
    "BoolStorage": ("BOOL", 1),  # this and the next one: attention masks that old versions stored
    "ByteStorage": ("U8", 1),
}


class PytorchError(Exception):
    """A file that is not PyTorch's, is damaged, or asks for more than tensors."""


@dataclass(frozen=True)
class Storage:
    """The bytes that one or more tensors are views of."""

    key: str  # of NAME/data/KEY
    kind: str
    count: int


@dataclass(frozen=True)
class Tensor:
    """A view of a storage; offset and strides are in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def kind(self) -> str:
        return STORAGES[self.storage.kind][0]

    @property
    def is_real(self) -> bool:
        return "F" in self.kind

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * STORAGES[self.storage.kind][1]


def _rebuild_tensor(storage: Storage, offset: int, shape: tuple, strides: tuple, *_) -> Tensor:
    return Tensor(storage, offset, tuple(shape), tuple(strides))


def _rebuild_parameter(tensor: Tensor, *_) -> Tensor:
    return tensor


ALLOWED = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    **{("torch", name): name for name in STORAGES},
}


class _Unpickler(pickle.Unpickler):
    """Gives the pickle only what ALLOWED has."""

    def find_class(self, module: str, name: str):
        if (module, name) not in ALLOWED:
            raise PytorchError(f"it asks for {module}.{name}, which weights never need, so it is not read any further")
        return ALLOWED[module, name]

    def persistent_load(self, identity: tuple) -> Storage:
        _, kind, key, _, count = identity
        return Storage(key, kind, count)


class PytorchFile:
    """tensors: by name. The file may hold anything; whatever is wrong with it raises a PytorchError."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.archive = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error):  # the library raises all of them
            raise PytorchError(f"{path} is damaged, or older than PyTorch 1.6: load it there and save it again") from None
        names = [name for name in self.archive.namelist() if name.endswith("/data.pkl")]
        if len(names) != 1:
            raise PytorchError(f"{path} is a zip archive, but not one of PyTorch's: it must have one data.pkl")
        self.root = names[0].removesuffix("data.pkl")
        self.tensors = self._tensors(names[0])

    def _tensors(self, name: str) -> dict[str, Tensor]:
        try:
            self._check_byte_order()
            with self.archive.open(name) as file:
                found = _Unpickler(file).load()
            if not isinstance(found, dict):
                raise PytorchError("it holds no dictionary of tensors")
            tensors = dict(dict.items(found))  # dict's own items(): the pickle may have overridden found.items
            for key, tensor in tensors.items():
                self._check(key, tensor)
            return tensors
        except PytorchError as error:
            raise PytorchError(f"{self.path}: {error}") from None
        except Exception as error:  # a damaged pickle can raise anything
            raise PytorchError(f"{self.path} is damaged: {type(error).__name__} in its pickle: {error}") from None

    def _check_byte_order(self) -> None:
        name = self.root + "byteorder"
        if name in self.archive.namelist() and self.archive.read(name) != b"little":
            raise PytorchError("it was written by a big-endian machine, and only little-endian is read")

    def _check(self, key: str, tensor: Tensor) -> None:
        """Raises unless the storage is in the file, has the promised length, and holds all elements of the tensor."""
        if not isinstance(key, str):
            raise PytorchError("it holds no dictionary of tensors")
        if not (isinstance(tensor, Tensor) and isinstance(tensor.storage, Storage) and tensor.storage.kind in STORAGES):
            raise PytorchError(f"'{key}' is not a tensor of floats")
        entry, size = self.archive.getinfo(self._entry(tensor)), STORAGES[tensor.storage.kind][1]
        numbers = (tensor.offset, tensor.storage.count, *tensor.shape, *tensor.strides)
        good = all(type(number) is int and number >= 0 for number in numbers)
        good = good and len(tensor.shape) == len(tensor.strides) and 0 not in tensor.shape
        good = good and entry.compress_type == zipfile.ZIP_STORED and entry.file_size == tensor.storage.count * size
        if not good or tensor.bytes > entry.file_size or self._last(tensor) >= tensor.storage.count:
            raise PytorchError(f"tensor '{key}' is not in the file as its pickle says")

    @staticmethod
    def _last(tensor: Tensor) -> int:
        return tensor.offset + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.strides))

    def _entry(self, tensor: Tensor) -> str:
        return f"{self.root}data/{tensor.storage.key}"

    def read(self, tensor: Tensor) -> bytes:
        """The bytes of its elements, in row-major order."""
        size = STORAGES[tensor.storage.kind][1]
        try:
            data = np.frombuffer(self.archive.read(self._entry(tensor)), f"V{size}")
        except (zipfile.BadZipFile, RuntimeError, EOFError, ValueError) as error:
            raise PytorchError(f"{self.path} is damaged: {error}") from None
        strides = tuple(size * stride for stride in tensor.strides)
        return np.lib.stride_tricks.as_strided(data[tensor.offset:], tensor.shape, strides).tobytes()
