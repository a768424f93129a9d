"""A tensor as a matrix over a coarser grid of scales, as kernels of scaled casts take it (S-6)."""

import functools
from typing import NamedTuple

import numpy as np

from fp8ref.spec.granularity import Blocks, block_sizes


class Grid(NamedTuple):
    """A tensor as a matrix [rows, columns] over a grid of scales: row r takes row group[r] of the
    scales, ``width`` elements a scale."""

    rows: int
    columns: int
    group: np.ndarray
    width: int
    scales: tuple[int, int]


@functools.lru_cache(64)
def grid_of(shape: tuple[int, ...], blocks: Blocks) -> Grid:
    """The grid of a tensor of this shape, whose last blocks may be shorter. Kept: a tensor is asked
    for it several times, and a small one takes longer to plan than to scale."""
    sizes = block_sizes(shape, blocks)
    size = int(np.prod(shape, dtype=np.int64))
    if sizes == shape:
        # One scale, so that rows may be cut anywhere: long ones, for the kernel's lanes.
        columns = next((c for c in (4096, 512, 64) if size % c == 0), shape[-1] if shape else 1)
        return Grid(size // columns, columns, np.zeros(size // columns, np.int64), columns, (1, 1))
    group = np.zeros((), np.int64)
    # C order: the last of these axes varies fastest
    for n, block in zip(shape[:-1], sizes[:-1], strict=True):
        group = group[..., None] * -(-n // block) + np.arange(n) // block
    counts = [-(-n // block) for n, block in zip(shape, sizes, strict=True)]
    scales = (int(np.prod(counts[:-1], dtype=np.int64)), counts[-1])
    return Grid(size // shape[-1], shape[-1], group.reshape(-1), sizes[-1], scales)
