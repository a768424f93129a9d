"""The tensors of a directory of safetensors, each read where it is used.

Headers are checked before memory is taken: the library's own checks when a file is opened, and
here that the bytes of a tensor are those of its dtype and shape. Nothing is executed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from fp8ref import formats
from fp8ref.formats import Format
from fp8ref.shared import files
from fp8ref.shared.errors import require

__all__ = ["DTYPES", "FLOATS", "StoredTensor", "stored"]

INDEX = "model.safetensors.index.json"
"""The file that says which file holds which tensor, where there are several."""

FLOATS = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""{dtype in safetensors: NumPy's} of numbers in high precision."""

CODES = {
    "F8_E4M3": formats.by_name("e4m3fn"),
    "F8_E5M2": formats.by_name("e5m2"),
    "F8_E4M3FNUZ": formats.by_name("e4m3fnuz"),
    "F8_E5M2FNUZ": formats.by_name("e5m2fnuz"),
    "F8_E8M0": formats.by_name("e8m0fnu"),
}
"""{dtype in safetensors: the format of its codes}."""

_INTEGERS = {"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "BOOL": "bool"}
_BYTES = dict.fromkeys((*CODES, "U8"), np.dtype(np.uint8))
DTYPES = FLOATS | _BYTES | {name: np.dtype(dtype) for name, dtype in _INTEGERS.items()}
"""{dtype in safetensors: NumPy's}; codes are uint8."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of a safetensors file; only the piece asked for is read.

    dtype   as safetensors names it, such as ``F8_E4M3``.
    offset  of its first byte in the file.
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def fmt(self) -> Format | None:
        """The format of codes of 8 bits; None of numbers and bytes."""
        return CODES.get(self.dtype)

    @property
    def nbytes(self) -> int:
        """The bytes of its elements in the file."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def __getitem__(self, index) -> np.ndarray:
        """The piece at an index, of ``DTYPES``; ... is the whole. OSError: the file is gone."""
        if self.nbytes == 0:
            return np.zeros(self.shape, DTYPES[self.dtype])[index]
        files.open_regular(self.path).close()
        # mapped and let go at once: a mapping that stays counts as memory of the process
        mapped = np.memmap(
            self.path, DTYPES[self.dtype], mode="r", offset=self.offset, shape=self.shape
        )
        return np.array(mapped[index])

    def piece(self, index) -> "StoredTensor":
        """The piece at an index, in memory."""
        return ArrayTensor.of(self.name, self[index], self.dtype)


@dataclass(frozen=True, kw_only=True)
class ArrayTensor(StoredTensor):
    """A tensor in memory, with the same attributes."""

    array: np.ndarray

    @classmethod
    def of(cls, name: str, array: np.ndarray, dtype: str) -> "ArrayTensor":
        """An array as a dtype of safetensors, codes in any dtype of their size."""
        array = array.view(DTYPES[dtype])
        return cls(name=name, dtype=dtype, shape=array.shape, array=array, path=Path(), offset=0)

    def __getitem__(self, index) -> np.ndarray:
        """The piece at an index."""
        return self.array[index]


def stored(path: Path, warn: Callable[[str], None] | None = None) -> dict[str, StoredTensor]:
    """The tensors of a directory's safetensors, or of one file, by name. No tensor is read.

    warn      gets a line for each tensor of the index that its file lacks, and of a file that the
              index lacks; None: those are errors.
    Raises:   ValueError: no safetensors, damaged ones, an index that names other directories' files
              or tensors that are not there. OSError: it cannot be read.
    """
    if path.is_file():
        return _in_file(path)
    index = path / INDEX
    if not index.is_file():
        whole = path / "model.safetensors"
        text = f"{path} has neither {whole.name} nor {INDEX}. Name the directory of a checkpoint."
        require(whole.exists(), text)
        return _in_file(whole)
    try:
        places = dict(files.read_object(index)["weight_map"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{INDEX}: {error}.") from error
    tensors: dict[str, StoredTensor] = {}
    for name in places.values():
        text = f"{INDEX} names {name!r}; it names files of its own directory."
        require(isinstance(name, str) and Path(name).name == name, text)
    for name in sorted(set(places.values())):
        tensors |= _in_file(path / name)
    for what, names in (
        ("is in the index, and in no file", places.keys() - tensors.keys()),
        ("is in a file, and not in the index", tensors.keys() - places.keys()),
    ):
        for name in sorted(map(str, names)):
            require(warn is not None, f"{INDEX}: {name} {what}. The checkpoint is incomplete.")
            assert warn is not None
            warn(f"{name} {what}")
    return tensors


def _in_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name."""
    files.open_regular(path).close()  # safe_open would wait for the writer of a pipe
    try:
        # checks the header against the size of the file: offsets neither overlap nor leave holes
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{path.name}: {error}. It is damaged, or no safetensors.") from error
    with files.open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        header = files.parse_json(file.read(length).decode())
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, (first, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        text = f"{path.name}: {name} is {dtype}; read are {', '.join(DTYPES)}."
        require(dtype in DTYPES, text)
        tensor = StoredTensor(
            path=path, name=name, dtype=dtype, shape=shape, offset=8 + length + first
        )
        text = f"{path.name}: {name} has {end - first} bytes; {dtype} {shape} has {tensor.nbytes}."
        require(end - first == tensor.nbytes, text)
        tensors[name] = tensor
    return tensors
