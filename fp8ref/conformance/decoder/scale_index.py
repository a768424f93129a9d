"""Which scale each element is multiplied by: the index that a dequantizer reads, and its name."""

from collections.abc import Callable, Iterator

import numpy as np

from fp8ref.conformance.decoder.subject import Decoder
from fp8ref.sim.quantize.scale_layouts import SCALE_LAYOUTS, ScaleLayout

BASE = 12
"""The digits of an index are exponents from -6 to 5, which every format of scales has."""

NO_INDEX = -1  # what stands for a result that is no power of two

LENGTHS = (1, 8, 16, 32, 64, 128, 256)  # the lengths of wrong blocks that have a name

_COLUMNS_OF_TILES = ScaleLayout(
    name="swizzled_128x4 whose tiles follow each other down a column",
    offsets=lambda r, c, shape, _: (
        (c // 4 * -(-shape[0] // 128) + r // 128) * 512
        + SCALE_LAYOUTS["swizzled_128x4"].offsets(r % 128, c % 4, (128, 4), 1)
    ),
    size=SCALE_LAYOUTS["swizzled_128x4"].size,
)
"""A mistake that no hardware has."""

_COUNTS: dict[str, Callable[[tuple[int, int]], tuple[int, int]]] = {
    "columns // 4 tiles of 4 columns": lambda shape: (shape[0], shape[1] // 4 * 4),
    "columns // 4 + 1 tiles of 4 columns": lambda shape: (shape[0], shape[1] // 4 * 4 + 4),
    "rows // 128 tiles of 128 rows": lambda shape: (shape[0] // 128 * 128, shape[1]),
    "rows // 128 + 1 tiles of 128 rows": lambda shape: (shape[0] // 128 * 128 + 128, shape[1]),
}
"""{count of rows or columns, in words: the shape of scales that it is}."""


def read_index(decoder: Decoder, shape: tuple[int, int]) -> np.ndarray:
    """The flat index of each element's scale, of ones [M, K], int64; each call shows a digit."""
    one = decoder.ones(shape)
    scales = decoder.scale_shape(shape)
    count = int(np.prod(scales))
    numbers = np.arange(count)
    index, powers, place = np.zeros(shape, np.int64), np.ones(shape, bool), 1
    while place == 1 or place < count:
        digits = numbers // place % BASE
        read = decoder.decode(one, np.exp2(digits - 6.0).reshape(scales)).numbers
        with np.errstate(all="ignore"):
            exponent = np.log2(1 / read if decoder.divides else read)
        powers &= np.isin(exponent, np.arange(BASE) - 6.0)
        index += np.where(powers, exponent + 6, 0).astype(np.int64) * place
        place *= BASE
    return np.where(powers, index, NO_INDEX)


def expected_index(decoder: Decoder, shape: tuple[int, int]) -> np.ndarray:
    """The index that S-6 says, int64 [M, K]."""
    scales = decoder.scale_shape(shape)
    return decoder.spread(np.arange(int(np.prod(scales))).reshape(scales), shape)


def name(decoder: Decoder, read: np.ndarray, right: np.ndarray) -> str:
    """What the index that is read is, in words; empty where it has no name."""
    width = 1 if decoder.scales_as != "float32" else 4
    for words, index in wrong_indices(
        right, decoder.scale_shape(right.shape), decoder.layout, width
    ):
        inside = (index >= 0) & (index <= right.max())
        if inside.any() and np.array_equal(read[inside], index[inside]):
            return words
    last = (right[read != right] == right[-1, -1]).all()
    return "the last block reads another scale" if last else ""


def wrong_indices(
    right: np.ndarray, grid: tuple[int, ...], kept_as: ScaleLayout, width: int
) -> Iterator[tuple[str, np.ndarray]]:
    """(words, index of each element) of mistakes; those outside of the scales do not count.

    right    the index that S-6 says, of scales of the shape ``grid``.
    kept_as  the layout of scales of ``width`` bytes.
    """
    shape = right.shape
    rows, columns = grid if len(grid) == 2 else (1, 1)
    r, c = right // columns, right % columns
    yield "every block reads the first scale", np.zeros_like(right)
    yield "every block reads the last scale", np.full_like(right, right.max())
    yield "a block reads the scale of the one after it", right + 1
    yield "a block reads the scale of the one before it", right - 1
    yield "scales are read as their transpose", c * rows + r
    yield "every row reads the scales of the first", c
    yield "every block of a row reads its first scale", r * columns
    yield "every block of a row reads its last scale", r * columns + columns - 1
    yield "blocks of a row read its scales backwards", r * columns + (columns - 1 - c)
    for count in range(2, columns):
        words = f"blocks of a row read its first {count} scales again and again"
        yield words, r * columns + c % count
    yield "the last block of a row reads the scale before it", right - (c == columns - 1)
    kept = kept_as.places((rows, columns), width).reshape(-1)
    for words, places in _wrong_places((rows, columns), kept_as, width) if len(grid) == 2 else ():
        # element (r, c) reads what kept_as keeps where the mistake looks for it
        memory = np.full(max(kept.max(), places.max()) + 1, -1)
        memory[kept] = np.arange(kept.size)
        yield words, memory[places][r, c]
    i, j = np.indices(shape)
    block = j * (-(-columns // 4) * 4) // shape[1]
    words = "K is cut into blocks by the columns of scales up to a multiple of 4"
    yield words, np.where(block < columns, r * columns + block, -1)
    for down in (*LENGTHS, shape[0]):
        for across in (*LENGTHS, shape[1]):
            words = f"blocks of {down}x{across} elements share a scale"
            row = np.minimum(i // down, rows - 1) * columns
            yield words, row + np.minimum(j // across, columns - 1)
    for across in LENGTHS:
        words = f"scales follow each other every {across} elements"
        yield words, (i * shape[1] + j) // across


def _wrong_places(
    shape: tuple[int, int], kept_as: ScaleLayout, width: int
) -> Iterator[tuple[str, np.ndarray]]:
    """(words, the offset of each scale) of other layouts, and of scales of another shape."""
    r, c = np.indices(shape)
    for layout in (*SCALE_LAYOUTS.values(), _COLUMNS_OF_TILES):
        if layout.name != kept_as.name:
            yield f"scales are read as {layout.name}", layout.places(shape, width)
        for words, of in _COUNTS.items():
            counted = of(shape)
            if layout in (kept_as, _COLUMNS_OF_TILES) and min(counted) >= 0 and counted != shape:
                as_if = f"scales are read as {layout.name} of {words}"
                yield as_if, layout.offsets(r, c, counted, width)
