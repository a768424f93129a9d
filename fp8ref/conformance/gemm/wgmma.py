"""Run Hopper's ``wgmma.mma_async`` m64n8k32 alone, with FP8 operands and any accumulator.

Compiled on first use.
"""

import ctypes
import functools
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fp8ref.conformance.gemm.scaled_gemm import ProbeError
from fp8ref.conformance.kit import native
from fp8ref.formats import E4M3FN, E5M2, Format
from fp8ref.sim.quantize import cast

SOURCE = Path(__file__).with_suffix(".cu")  # the CUDA source of the kernel

TILE_M, TILE_N, K = 64, 8, 32
HOPPER = 90  # the compute capability of the GPUs with this instruction, 9.0, times ten

PAIRS = tuple(itertools.product((E4M3FN, E5M2), repeat=2))
"""The formats of a and b, in the order in which the CUDA source numbers them."""

LAYOUTS = ((128, 256), (256, 128))
"""Offsets of a matrix in shared memory, along K and along rows.

PTX's manual can be read both ways: ``instruction`` takes the one whose sums of integers are right.
"""

Multiply = Callable[[np.ndarray, np.ndarray, np.ndarray, Format, Format], np.ndarray]
"""(a [M, 32], b [N, 32], accumulator c [M, N], format of a, format of b) -> float32 [M, N]."""


def nvcc() -> str:
    """Find nvcc: in CUDA_HOME, on the PATH, in /usr/local/cuda, or in the package nvidia-cuda-nvcc.

    Raises:   ProbeError: there is none.
    """
    home = os.environ.get("CUDA_HOME")
    own, others = [Path(home) / "bin"] if home else [], native.packaged("cu*/bin")
    places = [*own, *os.get_exec_path(), Path("/usr/local/cuda/bin"), *others]
    path = shutil.which("nvcc", path=os.pathsep.join(map(str, places)))
    if not path:
        raise ProbeError(
            "wgmma needs nvcc, which was not found. Set CUDA_HOME, or install nvcc with: pip "
            "install 'fp8ref[cuda]'"
        )
    return path


def build(folder: Path) -> Path:
    """Compile the library into a folder.

    Raises:   ProbeError: the compiler fails.
    """
    architecture = "-gencode=arch=compute_90a,code=sm_90a"
    command = [nvcc(), "-O2", architecture, "-Xcompiler", "-fPIC"]
    library, failure = native.shared_library(SOURCE, folder, command)
    if failure:
        words = f"{SOURCE.name} ({failure}). Use CUDA 12.0 or later."
        raise ProbeError(f"nvcc cannot compile {words}")
    return library


@functools.cache
def load() -> ctypes.CDLL:
    """Compile and load the library, once a process."""
    with tempfile.TemporaryDirectory() as folder:
        library = ctypes.CDLL(str(build(Path(folder))))
    library.fp8ref_error.restype = ctypes.c_char_p
    return library


def device() -> dict[str, str]:
    """Name and driver of the GPU.

    Raises:   ProbeError: there is none, or it is not a Hopper GPU.
    """
    library = load()
    name = ctypes.create_string_buffer(256)
    capability, driver = ctypes.c_int(), ctypes.c_int()
    integers = ctypes.byref(capability), ctypes.byref(driver)
    _check(library, library.fp8ref_device(name, len(name), *integers))
    if capability.value != HOPPER:
        raise ProbeError(
            f"wgmma is an instruction of compute capability 9.0; {name.value.decode()} has "
            f"{capability.value / 10}. Probe another subject."
        )
    return {"device": name.value.decode(), "cuda_driver": str(driver.value)}


def instruction() -> Multiply:
    """The instruction as a function that returns c + a b^T.

    Shapes:   a [M, 32]; b [N, 32]; c and the result [M, N], float32.

    Sums of integers, which every accumulation gives exactly, check the kernel first.

    Raises:   ProbeError: no compiler, no Hopper GPU, or integers come out wrong.
    """
    device()
    for layout in LAYOUTS:
        multiply = functools.partial(_multiply, layout=layout)
        if right_on_integers(multiply):
            return multiply
    raise ProbeError(
        "wgmma gives wrong sums of small integers, which every accumulation gives right: the "
        "kernel does not fit this GPU or compiler."
    )


def right_on_integers(multiply: Multiply) -> bool:
    """True if sums of small integers and an accumulator are exact, for every pair of formats."""
    rng = np.random.default_rng(0)
    for fmt_a, fmt_b in PAIRS:
        a = rng.integers(-4, 5, (2 * TILE_M, K))
        b = rng.integers(-4, 5, (3 * TILE_N, K))
        c = rng.integers(-100, 101, (len(a), len(b)))
        x = cast.encode(a.astype(np.float32), fmt_a)
        y = cast.encode(b.astype(np.float32), fmt_b)
        sums = multiply(x, y, c.astype(np.float32), fmt_a, fmt_b)
        if not np.array_equal(sums, a @ b.T + c):
            return False
    return True


def tiles(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut operands into tiles, padded with zeros; tiles go along N first.

    Shapes:   a [tiles, 64, 32]; b [tiles, 8, 32]; c [tiles, 64, 8].
    """
    rows, columns = -(-len(a) // TILE_M), -(-len(b) // TILE_N)
    a = np.pad(a, ((0, rows * TILE_M - len(a)), (0, 0))).reshape(rows, TILE_M, K)
    b = np.pad(b, ((0, columns * TILE_N - len(b)), (0, 0))).reshape(columns, TILE_N, K)
    c = np.pad(c, ((0, rows * TILE_M - c.shape[0]), (0, columns * TILE_N - c.shape[1])))
    c = c.reshape(rows, TILE_M, columns, TILE_N).transpose(0, 2, 1, 3)
    a, b = np.repeat(a, columns, axis=0), np.tile(b, (rows, 1, 1))
    cut = (a, b, c.reshape(-1, TILE_M, TILE_N))
    return tuple(np.ascontiguousarray(x) for x in cut)  # type: ignore[return-value]


def untiled(d: np.ndarray, m: int, n: int) -> np.ndarray:
    """Join tiles [tiles, 64, 8] into a matrix [M, N]."""
    rows, columns = -(-m // TILE_M), -(-n // TILE_N)
    d = d.reshape(rows, columns, TILE_M, TILE_N).transpose(0, 2, 1, 3)
    return d.reshape(rows * TILE_M, columns * TILE_N)[:m, :n]


def _multiply(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, fmt_a: Format, fmt_b: Format, layout: tuple
) -> np.ndarray:
    library = load()
    cut_a, cut_b, cut_c = tiles(a, b, np.asarray(c, np.float32))
    # a NaN that no sum gives: unwritten results show
    d = np.full(cut_c.shape, 0x7FC0DEAD, np.uint32).view(np.float32)
    pointers = (x.ctypes.data_as(ctypes.c_void_p) for x in (cut_a, cut_b, cut_c, d))
    pair = PAIRS.index((fmt_a, fmt_b))
    _check(library, library.fp8ref_wgmma(pair, *pointers, len(cut_c), *layout))
    return np.ascontiguousarray(untiled(d, len(a), len(b)))


def _check(library: ctypes.CDLL, error: int) -> None:
    if error:
        raise ProbeError(
            "wgmma needs an NVIDIA GPU of compute capability 9.0; CUDA says "
            f"{library.fp8ref_error(error).decode()!r}."
        )
