"""The casts of CUDA's header cuda_fp8.hpp, on the host: an installed one, compiled on first use.

The header states what NVIDIA's conversion instructions give, in C++ that runs without a GPU.
"""

import ctypes
import functools
import os
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np

from fp8ref.conformance.kit import native
from fp8ref.formats import E4M3FN, E5M2, Format

SOURCE = Path(__file__).with_suffix(".cpp")  # the C++ source of the array functions

_FORMATS = (E4M3FN, E5M2)
_SOURCES = ("float32", "bfloat16", "float16")


class NoHeaderError(RuntimeError):
    """There is no header or no compiler here."""


def include_folders() -> list[Path]:
    """The folders to include: that of cuda_fp8.hpp, and that of CCCL's nv/target.

    Raises:   NoHeaderError: one of the two is in no installed package and no toolkit.
    """
    homes = filter(None, (os.environ.get("CUDA_HOME"), "/usr/local/cuda"))
    places = [*native.packaged("*/include"), *(Path(home) / "include" for home in homes)]
    folders = []
    for needed in ("cuda_fp8.hpp", "nv/target"):
        folder = next((place for place in places if (place / needed).is_file()), None)
        if folder is None:
            raise NoHeaderError(
                f"{needed} was not found. Install it with: pip install 'fp8ref[cuda]'"
            )
        folders.append(folder)
    return list(dict.fromkeys(folders))


def version() -> str:
    """The version of CUDA of the header, such as "CUDA 13.0".

    Raises:   NoHeaderError: as include_folders.
    """
    for folder in include_folders():
        header = folder / "cuda.h"
        text = header.read_text(errors="replace") if header.is_file() else ""
        if match := re.search(r"#define CUDA_VERSION (\d+)", text):
            return f"CUDA {int(match[1]) // 1000}.{int(match[1]) % 1000 // 10}"
    return "CUDA"


def available() -> bool:
    """Whether there are a header and a compiler here."""
    try:
        return bool(include_folders()) and _compiler() is not None
    except NoHeaderError:
        return False


def _compiler() -> str | None:
    return next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)


@functools.cache
def load() -> ctypes.CDLL:
    """Compile and load the library, once a process.

    Raises:   NoHeaderError: no header, no compiler, or it fails.
    """
    compiler, includes = _compiler(), [f"-I{folder}" for folder in include_folders()]
    if compiler is None:
        raise NoHeaderError(
            "cuda_fp8.hpp needs a C++ compiler; c++, g++ and clang++ are not on the PATH. "
            "Install one."
        )
    # No contraction and no fast mathematics: the host computes as the source says.
    command = [compiler, "-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", *includes]
    with tempfile.TemporaryDirectory() as folder:
        library, failure = native.shared_library(SOURCE, Path(folder), command)
        if failure:
            raise NoHeaderError(
                f"{compiler} cannot compile {SOURCE.name}: {failure[-800:]}. Use headers of CUDA "
                "12.8 or later."
            )
        return ctypes.CDLL(str(library))


def encode(x: np.ndarray, fmt: Format, *, saturate: bool) -> np.ndarray:
    """The codes of x, uint8 of its shape; x float32, or the bits of ``source`` as uint16.

    Raises:   ValueError: another format or dtype; NoHeaderError as load.
    """
    return encode_bits(np.ascontiguousarray(x, np.float32), "float32", fmt, saturate=saturate)


def encode_bits(bits: np.ndarray, source: str, fmt: Format, *, saturate: bool) -> np.ndarray:
    """The codes, uint8, of float32 numbers, or of bits of bfloat16 or float16, uint16, as shaped.

    Raises:   ValueError: another format or dtype; NoHeaderError as load.
    """
    if (
        fmt not in _FORMATS
        or source not in _SOURCES
        or bits.dtype != (np.float32 if source == "float32" else np.uint16)
    ):
        raise ValueError(
            "cuda_fp8.hpp casts float32, or uint16 bits of bfloat16 and float16, to e4m3fn and "
            f"e5m2; got {bits.dtype} as {source}, {fmt}."
        )
    options = _SOURCES.index(source), _FORMATS.index(fmt), int(saturate)
    return _filled("cast", bits, np.uint8, *options)


def decode(codes: np.ndarray, fmt: Format) -> np.ndarray:
    """The numbers of codes, float16 of that shape. Raises as encode."""
    if fmt not in _FORMATS or codes.dtype != np.uint8:
        raise ValueError(
            f"cuda_fp8.hpp decodes uint8 codes of e4m3fn and e5m2; got {codes.dtype}, {fmt}."
        )
    return _filled("decode", codes, np.float16, _FORMATS.index(fmt))


def encode_e8m0(x: np.ndarray, *, up: bool, saturate: bool) -> np.ndarray:
    """The e8m0 codes of float32 numbers, rounded up or toward zero; uint8 of that shape."""
    return _filled("e8m0", np.asarray(x, np.float32), np.uint8, int(up), int(saturate))


def _filled(name: str, inputs: np.ndarray, dtype: type, *options: int) -> np.ndarray:
    """What a function of the library makes of each input, of the inputs' shape."""
    out: np.ndarray = np.empty(inputs.shape, dtype)
    inputs = np.ascontiguousarray(inputs)  # of shape [1] where it was ()
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (inputs, out)]
    getattr(load(), f"fp8ref_{name}")(*pointers, ctypes.c_int64(inputs.size), *options)
    return out
