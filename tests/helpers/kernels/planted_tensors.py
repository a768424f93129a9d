"""Small tensors of every kind of number, in the memory orders that a model has, and launches
interpreted on them."""

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from fp8ref.kernels import jit
from fp8ref.kernels.jit import Launch
from fp8ref.sim.quantize.scaling import Scales

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
SPECIALS = (math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0)
SUBNORMALS = {"bfloat16": 1e-40, "float16": 1e-6, "float32": 1e-44}

FORMATS = ("e4m3fn", "e5m2")
RAGGED = (131, 67)
"""A shape that no tile divides."""

SHAPES = ((128, 64), (1, 70), (133, 1))
"""Of a whole tile, of one row and of one column."""


def cases(odd, *others) -> list[tuple]:
    """(choice, dtype, format): one choice of all dtypes and formats, others in bfloat16 and e4m3fn."""
    return [(odd, dtype, fmt) for dtype in DTYPES for fmt in FORMATS] + [
        (other, "bfloat16", "e4m3fn") for other in others
    ]


LAYOUTS = {
    "one tile": lambda make: make(128, 64),
    "ragged": lambda make: make(131, 67),
    "one row": lambda make: make(1, 70),
    "one column": lambda make: make(133, 1),
    "transposed": lambda make: make(67, 131).T,
    "strided": lambda make: make(262, 71)[::2, 2:69],
    "strided columns": lambda make: make(40, 150)[:, 1::2],
}
"""{name: a tensor [M, N] of a function that makes one of rows and columns}."""


def planted(rows: int, columns: int, dtype: str = "bfloat16", *, seed: int = 0, wide: bool = False):
    """Normal numbers, with exact ties, -0, subnormals of both signs, and numbers that saturate.

    wide  with NaN and Inf too, and random bits in a third of the places.
    """
    rng = np.random.default_rng([seed, rows, columns])
    x = rng.standard_normal((rows, columns)) * np.exp2(rng.integers(-12, 9, (rows, columns)))
    x = np.where(rng.random(x.shape) < 0.2, np.round(x * 8) / 8, x).astype(DTYPES[dtype])
    flat = x.reshape(-1)
    few = [-0.0, 0.0, SUBNORMALS[dtype], -SUBNORMALS[dtype], 449.0, -6e4, 464.0, 0.001953125]
    few += SPECIALS if wide else ()
    places = rng.permutation(flat.size)[: len(few)]
    flat[places] = np.array(few[: len(places)]).astype(x.dtype)
    if wide:
        bits = rng.integers(0, 1 << 8 * x.itemsize, flat.size, f"u{x.itemsize}", endpoint=False)
        places = np.flatnonzero(rng.random(flat.size) < 1 / 3)
        flat[places] = bits[places].view(x.dtype)
    return x


def run(
    launch: Launch, inputs: Sequence[np.ndarray], outputs: Sequence[tuple[tuple[int, ...], str]]
) -> list[np.ndarray]:
    """Interpret a launch: outputs of these shapes and dtypes, each between guards that no kernel
    may write."""
    inputs = [np.asarray(x) for x in inputs]  # a NumPy scalar has no memory that lasts
    whole = [np.full(math.prod(shape) + 256, 0x5A, _stored(dtype)) for shape, dtype in outputs]
    inner = [memory[128 : memory.size - 128] for memory in whole]
    names = [str(x.dtype) for x in inputs] + [dtype for _, dtype in outputs]
    jit.interpret(launch, [*inputs, *inner], names)
    for memory in whole:
        guard = np.concatenate([memory[:128], memory[-128:]])
        assert (guard == np.full((), 0x5A, memory.dtype)).all(), "written outside the output"
    return [memory.reshape(shape) for memory, (shape, _) in zip(inner, outputs, strict=True)]


def both_orders(shape: tuple[int, int]) -> list[tuple[tuple[int, ...], str]]:
    """The outputs that hold codes of a matrix, as it lies and transposed."""
    return [(shape, "uint8"), (shape[::-1], "uint8")]


def scales(scale: object) -> Scales:
    """Scales that a launch is given, for the simulator."""
    scale = np.asarray(scale, np.float32)
    with np.errstate(divide="ignore"):
        return Scales(scale, np.float32(1) / scale)


def strides(x: np.ndarray) -> tuple[int, int]:
    """A matrix's strides in elements."""
    return x.strides[0] // x.itemsize, x.strides[1] // x.itemsize


def amax_of(partial: np.ndarray) -> np.ndarray:
    """The float32 amax of partial ones, NaN of one NaN."""
    largest = partial.max().view(np.float32)
    return np.float32(np.nan) if np.isnan(largest) else largest


def _stored(dtype: str) -> np.dtype:
    return DTYPES.get(dtype) or np.dtype(dtype)
