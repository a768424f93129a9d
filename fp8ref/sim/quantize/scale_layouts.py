"""Where hardware keeps the scales of blocks in memory (spec S-25).

A layout says at which offset the scale of row r and column c lies; ``store`` and ``load`` move
scales there and back. Scales are a matrix [R, C] of ``granularity.scale_shape``: a row for each row
of the tensor (or of blocks), a column for each block along K.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fp8ref.shared import registry

__all__ = ["SCALE_LAYOUTS", "ScaleLayout", "load", "store"]


def _padded(count: int, to: int) -> int:
    return -(-count // to) * to


@dataclass(frozen=True, kw_only=True)
class ScaleLayout:
    """Where scales lie in memory.

    offsets  (rows r, columns c, shape [R, C], bytes of a scale) -> offsets, counted in scales.
    size     (shape, bytes of a scale) -> the length of the memory, counted in scales.
    packed   whether four codes of e8m0 share a 32-bit integer.
    """

    name: str
    offsets: Callable[[np.ndarray, np.ndarray, tuple[int, int], int], np.ndarray]
    size: Callable[[tuple[int, int], int], int]
    packed: bool = False

    def places(self, shape: tuple[int, int], width: int = 4) -> np.ndarray:
        """The offset of each scale, int64 [R, C]; width: the bytes of a scale."""
        rows, columns = np.indices(shape)
        return self.offsets(rows, columns, shape, width)


def _swizzled(rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int], _: int) -> np.ndarray:
    tiles_across = _padded(shape[1], 4) // 4
    tile = rows // 128 * tiles_across + columns // 4
    return tile * 512 + rows % 32 * 16 + rows % 128 // 32 * 4 + columns % 4


def _aligned_rows(shape: tuple[int, int], width: int) -> int:
    """Rows of a column whose bytes are a multiple of 16, as TMA reads them."""
    return _padded(shape[0], 16 // width)


SCALE_LAYOUTS = {
    layout.name: layout
    for layout in (
        ScaleLayout(
            name="row_major",
            offsets=lambda r, c, shape, _: r * shape[1] + c,
            size=lambda shape, _: shape[0] * shape[1],
        ),
        ScaleLayout(
            name="column_major",
            offsets=lambda r, c, shape, _: c * shape[0] + r,
            size=lambda shape, _: shape[0] * shape[1],
        ),
        ScaleLayout(
            name="mn_major",
            offsets=lambda r, c, shape, width: c * _aligned_rows(shape, width) + r,
            size=lambda shape, width: shape[1] * _aligned_rows(shape, width),
        ),
        ScaleLayout(
            name="packed_ue8m0",
            offsets=lambda r, c, shape, _: (c // 4 * _aligned_rows(shape, 4) + r) * 4 + c % 4,
            size=lambda shape, _: _padded(shape[1], 4) * _aligned_rows(shape, 4),
            packed=True,
        ),
        ScaleLayout(
            name="swizzled_128x4",
            offsets=_swizzled,
            size=lambda shape, _: _padded(shape[0], 128) * _padded(shape[1], 4),
        ),
    )
}
"""Layouts by name.

row_major       C order.
column_major    Fortran order.
mn_major        Fortran order, each column filled to a multiple of 16 bytes: DeepGEMM on Hopper.
packed_ue8m0    four columns of e8m0 codes in an int32, the first in its lowest byte, which lie as
                in mn_major: DeepGEMM on Blackwell.
swizzled_128x4  tiles of 128 rows and 4 columns, one after another along a row; in a tile rows r,
                r + 32, r + 64, r + 96 are neighbors: cuBLAS, of e8m0 and e4m3 scales.
"""


def store(scales, layout: str | ScaleLayout) -> np.ndarray:
    """The memory of scales in a layout.

    Shapes:   scales [R, C] of any dtype, of ``packed_ue8m0`` uint8; a flat array of that dtype, of
              ``packed_ue8m0`` int32. What lies between scales is 0.
    Raises:   ValueError: an unknown layout, another rank, or another dtype to pack.
    Source:   spec S-25; torchao 0.18 prototype/mx_formats/utils.py, to_blocked; DeepGEMM
              tests/test_layout.py.

    >>> store(np.uint8([[127, 128, 129, 130]]), "packed_ue8m0").view(np.uint8)[:5]
    array([127, 128, 129, 130,   0], dtype=uint8)
    """
    kind = registry.lookup("layout is a ScaleLayout or", SCALE_LAYOUTS, layout, ScaleLayout)
    scales = np.asarray(scales)
    if scales.ndim != 2 or (kind.packed and scales.dtype != np.uint8):
        needed = "e8m0 codes, uint8 [R, C]" if kind.packed else "scales [R, C]"
        raise ValueError(f"{kind.name} holds {needed}; got {scales.dtype} {scales.shape}.")
    shape, width = (scales.shape[0], scales.shape[1]), scales.dtype.itemsize
    memory = np.zeros(kind.size(shape, width), scales.dtype)
    memory[kind.places(shape, width)] = scales
    return memory.view(np.int32) if kind.packed else memory


def load(memory, layout: str | ScaleLayout, shape: tuple[int, int]) -> np.ndarray:
    """Scales [R, C] of the memory that ``store`` makes, of any shape with as many elements; of
    ``packed_ue8m0`` the codes, uint8.

    Raises:   ValueError: an unknown layout, or memory of another length.
    """
    kind = registry.lookup("layout is a ScaleLayout or", SCALE_LAYOUTS, layout, ScaleLayout)
    memory = np.ascontiguousarray(memory).reshape(-1)
    memory = memory.view(np.uint8) if kind.packed else memory
    width = memory.dtype.itemsize
    if memory.size != kind.size(shape, width):
        raise ValueError(
            f"{kind.name} of scales {list(shape)} has {kind.size(shape, width)} of {width} bytes; "
            f"got {memory.size}. Give the shape that was stored."
        )
    return memory[kind.places(shape, width)]
