"""What the codes of each block are: the largest, their mean, and how often each occurs.

One pass over the bytes as they are stored: two codes of 4 bits stay packed, and a table of 256
entries says what a byte holds.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fp8ref.checkpoints import weights
from fp8ref.checkpoints.weights import StoredWeight
from fp8ref.formats import Format
from fp8ref.sim.kernels.compiled import compiled
from fp8ref.sim.quantize import cast
from fp8ref.spec import granularity as granularities

__all__ = ["Section", "magnitudes", "numbers", "sections"]

PIECE = 2**25
"""The most bytes of codes in memory at once."""

BLOCKS = 2**21
"""About the most blocks of a section."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Rows of one matrix of a weight: whole blocks, of coarse ones all of the matrix.

    matrix     () or the index of an expert.
    rows       the first row of the section's blocks among the blocks of the matrix.
    largest    [R, C] float32: the largest magnitude of a block's codes; NaN codes are left out.
    mean       [R, C] float32: the mean magnitude of them.
    counts     [256] int64: how often each code occurs.
    scales     [R, C] float32: the factor of each block, without the tensor's; None: it does not
               fit.
    nan_at     (row, column) of the first NaN code in the matrix; None: there is none.
    """

    matrix: tuple[int, ...]
    rows: int
    largest: np.ndarray
    mean: np.ndarray
    counts: np.ndarray
    scales: np.ndarray | None
    nan_at: tuple[int, int] | None

    def at(self, block: np.ndarray) -> tuple[str, float, float]:
        """The name of a block, such as ``expert 2, block (3, 5)``, its scale and largest code."""
        assert self.scales is not None
        row, column = (int(i) for i in block)
        name = f"{weights.expert(self.matrix)}block ({self.rows + row}, {column})"
        return name, float(self.scales[row, column]), float(self.largest[row, column])


@functools.lru_cache(maxsize=8)
def magnitudes(fmt: Format) -> np.ndarray:
    """|number| of each code of a format, float64 [256]; NaN of NaN, and of no code."""
    numbers = np.full(256, np.nan)
    numbers[: 1 << fmt.bits] = np.abs(cast.decode(np.arange(1 << fmt.bits, dtype=np.uint8), fmt))
    return numbers


@functools.lru_cache(maxsize=8)
def numbers(fmt: Format) -> np.ndarray:
    """The finite magnitudes of a format in order, float32."""
    return np.unique(magnitudes(fmt)[np.isfinite(magnitudes(fmt))]).astype(np.float32)


@functools.lru_cache(maxsize=8)
def _tables(fmt: Format) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Of each byte the rank of its largest number, the sum of its numbers in ``unit``, its codes;
    and unit."""
    finite = np.nan_to_num(magnitudes(fmt), nan=0.0, posinf=0.0)
    unit = float(numbers(fmt)[1])
    bytes_ = np.arange(256)
    codes = np.stack([bytes_ & 15, bytes_ >> 4] if fmt.bits == 4 else [bytes_], axis=1)
    ranks = numbers(fmt).searchsorted(finite)[codes].max(axis=1).astype(np.uint8)
    return ranks, (finite[codes].sum(axis=1) / unit).astype(np.int64), codes, unit


@compiled
def _blocks(codes, tables, shape, largest, totals, counts):
    ranks, sums = tables
    first, height, width = shape
    rows, columns = codes.shape
    for r in range(rows):
        at = (first + r) // height
        for j in range(largest.shape[1]):
            top, total = largest[at, j], np.int64(0)
            for c in range(j * width, min((j + 1) * width, columns)):
                byte = codes[r, c]
                counts[byte] += 1
                total += sums[byte]
                top = max(top, ranks[byte])
            largest[at, j] = top
            totals[at, j] += total


def sections(weight: StoredWeight) -> Iterator[Section]:
    """The sections of a weight in order, of bounded memory whatever its size.

    A weight whose scales do not fit is one block a matrix, without scales.
    """
    granularity = weight.granularity or "tensorwise"
    n, k = weight.shape[-2:]
    height, width = granularities.block_sizes((n, k), granularities.lengths(granularity, 2, -1))
    scales = weight.scales if weight.granularity else None
    for matrix, rows in weight.spans(BLOCKS * height * width):
        yield _section(weight, matrix, rows, (height, width), scales)


def _section(
    weight: StoredWeight,
    matrix: tuple[int, ...],
    rows: slice,
    size: tuple[int, int],
    scales: np.ndarray | None,
) -> Section:
    ranks, sums, codes_of_byte, unit = _tables(weight.fmt)
    (height, width), k = size, weight.shape[-1]
    shape = (-(-(rows.stop - rows.start) // height), -(-k // width))
    largest, totals = np.zeros(shape, np.uint8), np.zeros(shape, np.int64)
    counts, nan_at = np.zeros(256, np.int64), None
    across = width // 2 if weight.fmt.bits == 4 else width
    step = max(PIECE // max(k, 1), 1)
    is_nan = np.isnan(magnitudes(weight.fmt)) & (np.arange(256) < 1 << weight.fmt.bits)
    for first in range(rows.start, rows.stop, step):
        piece = weight.codes[(*matrix, slice(first, min(first + step, rows.stop)))]
        piece = piece.view(np.uint8).reshape(len(piece), -1)
        begin = first - rows.start
        _blocks(piece, (ranks, sums), (begin, height, max(across, 1)), largest, totals, counts)
        if nan_at is None and counts[is_nan].any():
            row, column = (int(i[0]) for i in np.nonzero(is_nan[piece]))
            nan_at = first + row, column
    by_code = np.zeros(256, np.int64)
    np.add.at(by_code, codes_of_byte, counts[:, None])
    elements = _elements(rows.stop - rows.start, height)[:, None] * _elements(k, width)
    top = rows.start // height
    return Section(
        matrix=matrix,
        rows=top,
        largest=numbers(weight.fmt)[largest],
        mean=(totals * unit / elements).astype(np.float32),
        counts=by_code,
        scales=None if scales is None else scales[matrix][top : top + shape[0]],
        nan_at=nan_at,
    )


def _elements(length: int, size: int) -> np.ndarray:
    """Elements of each block along an axis; the last may be shorter."""
    return np.minimum(size, length - np.arange(0, length, size))
