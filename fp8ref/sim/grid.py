"""Any tensor and granularity as a matrix over a coarser grid of scales: the one shape that ``kernels.scaling`` knows."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fp8ref import granularity as granularities
from fp8ref.formats import Format
from fp8ref.sim import cast, threads
from fp8ref.sim.kernels import scaling as kernels

_PIECE = 1 << 18  # elements whose float32 bits are held at a time


class Grid(NamedTuple):
    """Row r of the matrix [rows, columns] takes row group[r] of the scales; ``width`` elements of a row share a scale."""

    rows: int
    columns: int
    group: np.ndarray
    width: int
    scales: tuple[int, int]


def grid(granularity: str, shape: tuple[int, ...], axis: int) -> Grid:
    """The grid of a tensor of this shape. Raises as ``granularity.blocks``."""
    sizes = granularities.blocks(granularity, shape, axis)
    size = int(np.prod(shape, dtype=np.int64))
    if granularity == "tensorwise":
        columns = next((c for c in (4096, 512, 64) if size % c == 0), shape[-1] if shape else 1)
        return Grid(size // columns, columns, np.zeros(size // columns, np.int64), columns, (1, 1))
    group = np.zeros((), np.int64)
    for n, block in zip(shape[:-1], sizes[:-1], strict=True):  # C order: the last of these axes varies fastest
        group = group[..., None] * -(-n // block) + np.arange(n) // block
    counts = [-(-n // block) for n, block in zip(shape, sizes, strict=True)]
    scales = (int(np.prod(counts[:-1], dtype=np.int64)), counts[-1])
    return Grid(size // shape[-1], shape[-1], group.reshape(-1), sizes[-1], scales)


def amax(x: np.ndarray, granularity: str, axis: int) -> np.ndarray:
    """``scaling.amax_plain`` by a kernel, for float32, float16 and bfloat16."""
    g = grid(granularity, x.shape, axis)
    partial: list[np.ndarray] = []

    def rows(begin: int, end: int) -> None:
        bits = np.zeros(g.scales, np.uint32)
        _in_pieces(x, g, begin, end, lambda a, b, piece: kernels.amax(piece, g.group[a:b], g.width, bits))
        partial.append(bits)

    threads.run(rows, g.rows, grain=max(1, (1 << 17) // g.columns))
    result = np.maximum.reduce(partial).view(np.float32).reshape(granularities.scale_shape(granularity, x.shape, axis))
    return np.where(np.isnan(result), np.float32(np.nan), result)[()]


def encode(x: np.ndarray, scale: np.ndarray, fmt: Format, granularity: str, axis: int) -> np.ndarray:
    """Codes of RN32(f32(x) * scale), saturated, rounded to nearest even: uint8 of x's shape; scale float32 of ``scale_shape``, taken on trust."""
    g = grid(granularity, x.shape, axis)
    codes = np.empty(x.shape, np.uint8)
    matrix, scales, kernel = codes.reshape(g.rows, g.columns), np.ascontiguousarray(scale).reshape(g.scales), kernels.encoder(fmt)

    def rows(begin: int, end: int) -> None:
        _in_pieces(x, g, begin, end, lambda a, b, piece: kernel(piece, g.group[a:b], g.width, scales, matrix[a:b]))

    threads.run(rows, g.rows, grain=max(1, (1 << 17) // g.columns))
    return codes


def _in_pieces(x: np.ndarray, g: Grid, begin: int, end: int, work: Callable[[int, int, np.ndarray], None]) -> None:
    matrix = x.reshape(g.rows, g.columns)
    step = max(1, _PIECE // g.columns)
    for a in range(begin, end, step):
        b = min(a + step, end)
        work(a, b, cast.float32_bits(np.ascontiguousarray(matrix[a:b])).reshape(b - a, g.columns))
