"""Read files from outside: JSON, TOML and arrays. What they claim is checked before memory is
taken.

Whatever a file holds, only OSError and ValueError come out. The message says what is wrong with it,
and the caller which file it is. A file of ``write_arrays`` has a checksum of its arrays.
"""

import collections
import errno
import functools
import hashlib
import io
import itertools
import json
import math
import re
import stat
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fp8ref.shared.errors import ConfigError

DEPTH = 64
"""The most levels of objects and lists in JSON or TOML."""

TEXT = 2**28
"""The most bytes of a text."""

OBJECTS = 2**21
"""The most objects and lists in JSON: three bytes of text may take a hundred of memory."""

LOG = 2**32
"""The most bytes of a log, which is read line by line."""

LINE = 2**25
"""The most bytes of a line of a log."""

TOML = 2**18
"""The most bytes of TOML, whose parser takes time quadratic in the length of some texts."""

ARRAYS = 2**28
"""Bytes of arrays that a compressed file of any size may claim; a larger claim is at most ``RATIO``
times the file's size.
"""

RATIO = 64
"""The most bytes of arrays for a byte of a compressed file, above ``ARRAYS``."""

CHECKSUM = "sha256"
"""The name of the checksum among the arrays of a file."""

_TOML_STRINGS = re.compile(
    r'"""(?:[^\\]|\\.)*?(?:"{3,5}|\Z)|\'\'\'.*?(?:\'{3,5}|\Z)|"(?:[^"\\\n'
    r']|\\.)*(?:"|\\?$)|\'[^\'\n]*(?:\'|$)|#[^\n]*',
    re.DOTALL | re.MULTILINE,
)
"""Strings and comments, also unterminated ones, so that no character is looked at twice."""

_JSON_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)

_END_RECORD = 22
"""Bytes of the end of a zip archive without a comment."""


class MissingKeyError(ConfigError, KeyError):
    """A file has no such key."""

    __str__ = Exception.__str__  # KeyError's own is the repr


class Record(dict[str, Any]):
    """An object of a JSON file.

    A key that it has not is a ``MissingKeyError`` that names the file.
    """

    source = ""

    def __missing__(self, key: str) -> Any:
        raise MissingKeyError(
            f"{self.source} has no {key!r}: it is damaged, or not a file of fp8ref."
        )


def open_regular(path: Path) -> io.BufferedReader:
    """A regular file, open for reading.

    Raises:   OSError: it cannot be read. ValueError: a pipe or a device, which may never end, or
              never begin.
    """
    mode = path.stat().st_mode
    # open would wait for the writer of a pipe, and refuses a directory
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ValueError(
            "it is no regular file, but a pipe or a device; write its content to a file"
        )
    return path.open("rb")


def read_bytes(path: Path, most: int = TEXT) -> bytes:
    """The bytes of a regular file. ValueError if there are more, which are not read."""
    pieces: list[bytes] = []
    with open_regular(path) as file:
        while piece := file.read(2**20):
            pieces.append(piece)
            if sum(map(len, pieces)) > most:
                raise ValueError(f"it is larger than {most:,} bytes")
    return b"".join(pieces)


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a regular file with their ends; one is in memory at a time. The last may have no
    end.

    Raises:   OSError, ValueError: as ``open_regular`` and ``short_lines``; more than ``LOG`` bytes
              in all.
    """
    total = 0
    with open_regular(path) as file:
        for line in short_lines(file):
            total += len(line)
            if total > LOG:
                raise ValueError(f"it is larger than {LOG:,} bytes")
            yield line


def short_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of an open file with their ends. ValueError: one of more than ``LINE`` bytes."""
    while line := file.readline(LINE + 1):
        if len(line) > LINE:
            raise ValueError(f"it has a line of more than {LINE:,} bytes")
        yield line


def read_object(path: Path) -> Record:
    """The object in a JSON file, as ``parse_json``, whose objects are all Records.

    ValueError: a value of another type.
    """

    class OfFile(Record):
        source = str(path)

    value = parse_json(read_bytes(path), functools.partial(_object, OfFile))
    if not isinstance(value, Record):
        raise ValueError("it is no JSON object")
    return value


def parse_json(
    text: str | bytes, kind: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = None
) -> Any:
    """The value in a JSON text.

    kind      makes an object of its keys and values; None: a dict, which has each key once.
    Raises:   ValueError: no JSON; more than ``DEPTH`` levels or ``OBJECTS`` objects and lists; an
              object with a key twice, one of which would be lost.
    """
    if (
        _brackets(text) > OBJECTS
        and _brackets(_JSON_STRINGS.sub(b"", text if isinstance(text, bytes) else text.encode()))
        > OBJECTS
    ):
        raise ValueError(f"it has more than {OBJECTS:,} objects and lists")
    try:
        value = json.loads(text, object_pairs_hook=kind or functools.partial(_object, dict))
    except RecursionError:
        raise ValueError(_too_deep()) from None
    _check_depth(value)
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:   ValueError: no TOML; more than ``TOML`` bytes or ``DEPTH`` levels.
    """
    text = read_bytes(path, TOML).decode()
    bare = _TOML_STRINGS.sub("", text).replace(" ", "").replace("\t", "")
    steps = (1 if c in "[{" else -1 for c in bare if c in "[]{}")
    if max(itertools.accumulate(steps), default=0) > DEPTH or re.search(
        rf"(?:\.[^\s=.\[\]{{}},]*){{{DEPTH}}}", bare
    ):
        raise ValueError(_too_deep())
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise ValueError(_too_deep()) from None
    _check_depth(tables)
    return tables


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a compressed .npz with a checksum."""
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays, **{CHECKSUM: np.array(_checksum(arrays))})  # type: ignore[arg-type]


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz, without a pickle.

    Raises:   ValueError: no intact archive of arrays, by the sums of zip and, where it has one, of
              ``write_arrays``; arrays of more bytes than such a file can hold.
    """
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            _check_members(file, archive)
            arrays = {
                info.filename.removesuffix(".npy"): _array(archive.read(info))
                for info in archive.infolist()
            }
    except Exception as error:
        # A damaged archive raises zlib.error, NotImplementedError, RuntimeError, EOFError and
        # others; EINVAL is that of a seek to a place that it claims.
        if isinstance(error, ValueError) or (
            isinstance(error, OSError) and error.errno != errno.EINVAL
        ):
            raise
        raise ValueError(
            f"it is no intact archive of arrays ({error or type(error).__name__})"
        ) from error
    checksum = arrays.pop(CHECKSUM, None)
    if checksum is not None and str(checksum) != _checksum(arrays):
        raise ValueError("it was changed: the checksum of its arrays differs from the saved one")
    return arrays


def read_array(path: Path) -> np.ndarray:
    """The array of a .npy, without a pickle. ValueError: no whole array."""
    return _array(read_bytes(path))


def _check_members(file: io.BufferedReader, archive: zipfile.ZipFile) -> None:
    """ValueError unless an archive's directory is whole and its sizes are possible."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - _END_RECORD))
    end, names = file.read(), [info.filename for info in archive.infolist()]
    if (
        not end.startswith(b"PK\5\6")
        or int.from_bytes(end[10:12], "little") not in (len(names), 0xFFFF)
        or len(set(names)) < len(names)
    ):
        raise ValueError("the directory of the archive is damaged")
    claimed = sum(info.file_size for info in archive.infolist())
    stored = sum(info.compress_size for info in archive.infolist())
    if claimed > max(ARRAYS, RATIO * size) or stored > size:
        raise ValueError(f"it claims {claimed:,} bytes of arrays in a file of {size:,}")


def read_array_header(stream: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    """(shape, whether in Fortran's order, dtype) of a .npy whose first bytes are in memory.

    A header states its own length: of a file that is read as needed, NumPy takes as much memory.
    Raises:   ValueError: no header of NumPy.
    """
    try:
        return _READ_HEADER[np.lib.format.read_magic(stream)](stream)
    except Exception as error:  # NumPy raises many unrelated types for a damaged header
        raise ValueError(f"an array has no header of NumPy ({error})") from error


_READ_HEADER = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def _array(content: bytes) -> np.ndarray:
    """The array in the bytes of a .npy."""
    stream = io.BytesIO(content)
    shape, fortran, dtype = read_array_header(stream)
    held = len(content) - stream.tell()
    if (
        dtype.hasobject
        or not dtype.itemsize
        or not all(type(n) is int and n >= 0 for n in shape)
        or math.prod(shape) * dtype.itemsize != held
    ):
        raise ValueError(f"an array of {dtype} claims the shape {shape}; it has {held:,} bytes")
    if not held:
        return np.zeros(shape, dtype)
    array = np.frombuffer(content, dtype, offset=stream.tell())
    return array.reshape(shape, order="F" if fortran else "C").copy()


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name, x in sorted(arrays.items()):
        digest.update(f"{name}\0{x.dtype.str}\0{x.shape}\0".encode())
        digest.update(x.tobytes())
    return digest.hexdigest()


def _object(kind: type[dict[str, Any]], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = kind(pairs)
    if len(value) < len(pairs):
        twice, _ = collections.Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"an object has the key {twice!r} twice")
    return value


def _brackets(text: str | bytes) -> int:
    return (
        text.count("[") + text.count("{")
        if isinstance(text, str)
        else text.count(b"[") + text.count(b"{")
    )


def _check_depth(value: Any) -> None:
    level: Iterable[Any] = [value]
    for _ in range(DEPTH + 1):
        level = [container for container in level if isinstance(container, dict | list)]
        if not level:
            return
        level = [
            x
            for container in level
            for x in (container.values() if isinstance(container, dict) else container)
        ]
    raise ValueError(_too_deep())


def _too_deep() -> str:
    return f"it has more than {DEPTH} levels"
