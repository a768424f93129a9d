"""Which scale_inv multiplies each element of an operand: its index, and the index's name (B-14).

One operand is ones. Each row of the other has a one at an index of K, under a scale of one: so a
result is the scale of a row at that index. Scales are powers of two, the digits of their indices.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fp8ref.conformance.decoder import scale_index
from fp8ref.conformance.decoder.scale_index import BASE, NO_INDEX
from fp8ref.conformance.gemm.grade import faults
from fp8ref.conformance.gemm.grade.stimuli import Asked, Shape, Stimulus
from fp8ref.conformance.gemm.grade.structure import Cause, alike, first_of
from fp8ref.conformance.kit.arrays import equal
from fp8ref.formats import E8M0FNU, Format
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize.scale_layouts import SCALE_LAYOUTS, ScaleLayout
from fp8ref.spec.granularity import by_name, scale_shape

OTHER_GROUPS = "scale_inv of other groups"  # what ``ScaledGemm.about`` of a group says

NOT_READ = "scale_inv of {} is not read: every product has the factor {}"
"""The mistake of one constant factor: {operand}, {factor}."""
LARGEST = "scale_inv of {} is the largest of all groups"
"""The mistake of a grouped GEMM that has one scale for all groups: {operand}."""
VECTOR = "scale_inv of {} is read as a vector: row 0 right, other rows have other factors"
"""The mistake of one scale read once a row, beyond its end: {operand}."""


class Reading(NamedTuple):
    """An operand's index, as it is read.

    indices, right  [rows, columns of K that were asked]: flat indices of scales.
    words           the name of a mistake; "" if it has none, or all are right.
    mistake         the index of every element [rows, K] that the name stands for, if it does.
    """

    indices: np.ndarray
    right: np.ndarray
    words: str
    mistake: np.ndarray | None


def causes(
    asked: Asked, stimulus: Stimulus, results: np.ndarray, out: Format, others: list[Cause]
) -> list[Cause]:
    """The cause of wrong sums of integers under scales, if these read other scales.

    stimulus, results   the sums of integers.
    others              their causes: an index without a name is one if none of them is exact, or
                        one is of scales in another place, which would be read there.
    """
    readings = [_reading(asked, stimulus.shape, which) for which in (0, 1)]
    names = [one.words for one in readings if one.mistake is not None]
    expected = faults.expected(stimulus)
    differ = ~equal(results, expected)
    first = first_of(stimulus, results, expected, differ)
    count = f"{int(differ.sum())} of {differ.size} sums of integers differ"
    if names and alike(*_compared(stimulus, results, readings), out):
        evidence = f"each scale was read alone, and sums have the bits of it; {count}"
        return [Cause(", and ".join(names), evidence, "wrong", first, exact=True)]
    if as_float := _read_as_float(asked, stimulus, out):
        evidence = f"scales whose bytes are 1.0 in float32 give unscaled sums; {count}"
        return [Cause(as_float, evidence, "wrong", first, exact=True)]
    words = [_described(one, who) for one, who in zip(readings, "ab", strict=True)]
    places = [place.format(who) for place in faults.PLACES for who in "ab"]
    exact = any(one.exact and not any(p in one.name for p in places) for one in others)
    if not exact and any(words):
        name = ", and ".join(one for one in words if one)
        return [Cause(name, f"each scale was read alone; {count}", "wrong", first)]
    return []


def _reading(asked: Asked, shape: Shape, which: int) -> Reading:
    """What operand a, or b, reads."""
    rows, others, k = (shape[which], shape[1 - which], shape[2])
    granularity = asked.scaled.granularities[which]
    grid = scale_shape(granularity, (rows, k), -1)
    size = int(np.prod(grid))
    at = np.arange(others) * k // others
    blocks = grid[1] if grid else 1
    scale_rows = np.arange(rows) // ((by_name(granularity).other or 1) if grid else rows)
    right = scale_rows[:, None] * blocks + np.arange(k) * blocks // k
    values = [np.ones((rows, k), np.float32), np.zeros((others, k), np.float32)]
    values[1][np.arange(others), at] = 1

    def read(scale_inv: np.ndarray) -> np.ndarray:
        step = 1 - 2 * which
        scales = (1 / scale_inv.reshape(grid), 1.0)[::step]
        results = asked.run(asked.stimulus("scales", values[::step], scales))[0]
        return results if which == 0 else results.T

    one, other = (read(np.full(size, x, np.float32)) for x in (2.0**-6, 2.0**3))
    factor = np.unique(one)
    if (one == other).all() and len(factor) == 1 and np.isfinite(factor).all():
        words = NOT_READ.format("{}", f"{factor[0]:g}")
        if asked.scaled.about.get(OTHER_GROUPS) == f"{factor[0]:g}":
            words = "scale_inv of {} is that of another group"
        return Reading(right[:, at] - 1, right[:, at], words, None)
    same_scale = asked.scaled.about.get(OTHER_GROUPS) == f"{one.flat[0]:g}"
    if same_scale and (other == 8).all() and len(factor) == 1:
        return Reading(right[:, at] - 1, right[:, at], LARGEST, None)
    if size == 1:
        follows = ((other == 512 * one) & (one != 0)).all(axis=1)
        first_alone = follows[0] and not follows[1:].any()
        vector = first_alone and (one == other)[1:].all() and one.all()
        words = VECTOR if vector and rows > 1 else ""
        return Reading(right[:, at], right[:, at], words, None)
    indices, known = np.zeros((rows, others), np.int64), np.ones((rows, others), bool)
    place = 1
    while place == 1 or place < size:
        with np.errstate(all="ignore"):
            exponent = np.log2(read(np.exp2(np.arange(size) // place % BASE - 6.0))) + 6
        known &= np.isin(exponent, np.arange(BASE))
        indices += np.where(known, exponent, 0).astype(np.int64) * place
        place *= BASE
    indices = np.where(known, indices, NO_INDEX)
    if np.array_equal(indices, right[:, at]):
        return Reading(indices, right[:, at], "", None)
    layout = SCALE_LAYOUTS[asked.scaled.scale_layout]
    for words, index in _mistakes(right, grid, indices, at, layout, asked.scaled.scale_bytes):
        seen = index[:, at]
        inside = (seen >= 0) & (seen < size)
        wrong = seen != right[:, at]  # what is read outside is no right scale either
        # the other operand may read outside too, so that a result shows no index
        unseen = ~inside & (indices != right[:, at]) | (indices == NO_INDEX)
        if (inside & wrong & ~unseen).any() and ((indices == seen) | unseen).all():
            return Reading(indices, right[:, at], words.format("ab"[which]), index)
    return Reading(indices, right[:, at], "", None)


def _mistakes(
    right: np.ndarray,
    grid: tuple[int, ...],
    indices: np.ndarray,
    at: np.ndarray,
    layout: ScaleLayout,
    width: int,
) -> Iterator[tuple[str, np.ndarray]]:
    """(words with {} for the operand, the index of each element)."""
    numbers = np.arange(int(np.prod(grid))).reshape(grid)
    for words in faults.PLACES:
        yield words, faults.SCALES[words](numbers).reshape(-1)[right]
    for words, index in scale_index.wrong_indices(right, grid, layout, width):
        start, _, rest = words.partition("scales ")
        name = f"scales of {{}} {rest}" if not start else f"scales of {{}}: {words}"
        yield name, index
    places = np.arange(len(indices))[:, None], np.arange(indices.shape[1])
    for tile in faults.TILES:
        swapped = places[1] // tile * tile + places[0] % tile
        if grid[1] == 1 and swapped.max() < grid[0]:
            index = np.full(right.shape, -1)
            index[:, at] = swapped
            yield f"scale_inv of {{}} of the transposed tile of {tile}x{tile} results", index
    steps = np.unique((indices - right[:, at])[indices != NO_INDEX])
    if len(steps) == 1:
        across = grid[1]
        far = abs(steps[0])
        words = f"{far}" if far % across else f"{far // across} rows"
        way = "further on" if steps[0] > 0 else "before"
        yield f"scales of {{}} are read {words} {way}", right + steps[0]


def _read_as_float(asked: Asked, stimulus: Stimulus, out: Format) -> str:
    """The operands whose four e8m0 bytes are read as a float32, in words; "" if none are."""
    mx = all(granularity.startswith("mx") for granularity in asked.scaled.granularities)
    if not mx or stimulus.a.scale_inv.shape[1] % 4:
        return ""
    unscaled = [values.astype(np.float32) for values in faults.values(stimulus)]
    one = cast.decode(np.frombuffer(np.float32(1).tobytes(), np.uint8), E8M0FNU)
    for which in ((0, 1), (0,), (1,)):
        operands = [stimulus.a, stimulus.b]
        for i, q in enumerate(operands):
            rows, blocks = q.scale_inv.shape
            inverse = np.tile(one if i in which else np.ones(4, np.float32), (rows, blocks // 4))
            operands[i] = q._replace(scale=1 / inverse, scale_inv=inverse)
        results = asked.run(stimulus._replace(a=operands[0], b=operands[1]))[0]
        if alike(results, unscaled[0] @ unscaled[1].T, out):
            who = " and ".join("ab"[i] for i in which)
            return f"four e8m0 scales of {who} are read as one float32"
    return ""


def _compared(
    stimulus: Stimulus, results: np.ndarray, readings: list[Reading]
) -> tuple[np.ndarray, np.ndarray]:
    """(results, what the readings give) where all scales that are read are inside."""
    operands = []
    for q, values, one in zip(
        (stimulus.a, stimulus.b), faults.values(stimulus), readings, strict=True
    ):
        scales = faults.spread(q, q.scale_inv)
        if one.mistake is not None:
            inside = (one.mistake >= 0) & (one.mistake < q.scale_inv.size)
            scales = q.scale_inv.reshape(-1)[np.where(inside, one.mistake, 0)]
            scales = np.where(inside, scales, np.nan)
        operands.append(values * scales)
    expected = operands[0] @ operands[1].T  # NaN where a scale is outside
    return np.where(np.isnan(expected), expected, results), expected


def _described(one: Reading, who: str) -> str:
    """The first scale that is another one; "" if all are right, or one is not known."""
    if one.words:
        return one.words.format(who)
    if np.array_equal(one.indices, one.right) or (one.indices == NO_INDEX).any():
        return ""
    i, j = np.argwhere(one.indices != one.right)[0]
    return (
        f"scales of {who}: row {i} reads scale {one.indices[i, j]} in the place of "
        f"{one.right[i, j]}, counted in C order"
    )
