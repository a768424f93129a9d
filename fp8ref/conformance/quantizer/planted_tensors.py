"""Tensors with something planted in each group, at tails, lanes and blocks."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fp8ref.conformance.inputs.dtypes import rounded
from fp8ref.conformance.quantizer import ragged_blocks
from fp8ref.conformance.quantizer.outputs import Quantizer, ScaleLayout

_LARGE = 1 << 20
_IN_LARGE = ("the largest last", "NaN inside", "an infinity last")
"""What is planted in tensors of ``_LARGE`` elements and more, which take a second each."""

WHOLE = (20, 264)  # shape in which the largest element is planted at many places

# What is planted in each group: its value at the last element, and at one inside
_PLANTED = {
    "the largest last": (4.0, None),
    "the largest inside": (None, 4.0),
    "NaN last": (np.nan, None),
    "NaN inside": (None, np.nan),
    "an infinity last": (np.inf, None),
    "an infinity inside": (None, np.inf),
    "two NaNs": (np.nan, np.nan),
    "a NaN inside and an infinity last": (np.inf, np.nan),
}

# The magnitudes of groups in turn, which an eps, a bound of the scale, a zero amax or an
# overflowing scale decides: an eps may be left out for other shapes or strides, or be another one.
_MAGNITUDES = (
    *(0.0, 1.0, 1e-5, 1e-7, 1e-9, 1e-11, 1e-13, 2.0**-126, 2.0**-24),
    *(0.0, 1e-30, 2.0**-3, 2.0**60, 2.0**100, 2.0**126),
)


@dataclass(frozen=True, kw_only=True)
class PlantedTensor:
    """A tensor x, float32 [M, K], possibly with something planted in each group.

    planted  what, in words; at: for each group, the flat index of the planted element.
    """

    x: np.ndarray
    planted: str = ""
    at: np.ndarray | None = None

    def __str__(self) -> str:
        if self.at is not None:
            where = f" in [1, 2) / 256, {self.planted} in each group"
        elif self.planted:
            where = f", {self.planted}"
        else:
            where = ""
        return f"x {list(self.x.shape)}{where}"


def tensors(
    shape: tuple[int, int], scale_layout: ScaleLayout, quantizer: Quantizer
) -> Iterator[PlantedTensor]:
    """Tensors with values planted in each group, then in many places, then random ones.

    With ragged blocks, also two in which each group is larger, or smaller, than the one before.
    """
    rng = np.random.default_rng(0)
    groups = ragged_blocks.groups(shape, scale_layout)
    group = groups.reshape(-1)
    order = np.argsort(group, kind="stable")
    size = np.bincount(group)
    end = np.searchsorted(group[order], np.arange(size.size), side="right") - 1
    last = order[end]
    inside = order[end - (size * rng.uniform(0, 1, size.size)).astype(np.int64)]
    # order lists the elements group by group, so that end is the last element of each group.
    for name, (at_last, at_inside) in _PLANTED.items():
        special = not {at_last, at_inside} <= {4.0, None}
        # With a memory, a quantizer may keep scales after these: one call cannot tell.
        if not (special and quantizer.memory) and (group.size < _LARGE or name in _IN_LARGE):
            planted = ((last, at_last), (inside, at_inside))
            yield _with(shape, rng, name, [(at, v) for at, v in planted if v is not None])
    if shape in (WHOLE, WHOLE[::-1]):
        # 35 is coprime to 32, 128 and 264: it meets all lanes and blocks. Then every row's start.
        for i, at in enumerate((*range(0, group.size, 35), *range(0, group.size, shape[1]))):
            place = [(np.array([at]), 4.0 if i % 2 else -4.0)]
            yield _with(shape, rng, f"the largest at {at}", place)
    if ragged_blocks.is_ragged(shape, scale_layout):
        # A block that is read to its full length reads elements of the next row, or stale ones.
        for factor in (4, 0.25):
            # From 4^-4 to 4^4: float16 holds them.
            powers = np.float32(factor) ** (groups % 8 - 4)
            words = f"each group {factor:g} times as large as the one before, over 8 groups"
            yield PlantedTensor(
                x=(_small(shape, rng) * 256 * powers).astype(np.float32), planted=words
            )
    if not quantizer.memory:
        yield from far_from_one(groups, quantizer)
    yield random(shape, quantizer)


def far_from_one(groups: np.ndarray, quantizer: Quantizer) -> Iterator[PlantedTensor]:
    """Tensors of zero, tiny and huge groups in turn; of one group, five tensors by magnitude.

    With a memory, a quantizer may keep scales after these: one call cannot tell.
    """
    count = int(groups.max()) + 1
    most = 2.0**14 if quantizer.dtype == "float16" else 2.0**126
    for i, first in enumerate((0,) if count > len(_MAGNITUDES) else (0, 2, 4, 6, 14)):
        magnitudes = np.minimum(
            np.array(_MAGNITUDES, np.float32)[(groups + first) % len(_MAGNITUDES)], np.float32(most)
        )
        x = _small(groups.shape, np.random.default_rng(i)) * 256 * magnitudes
        yield PlantedTensor(
            x=rounded(x.astype(np.float32), quantizer.dtype),
            planted="zero, tiny and huge groups in turn",
        )


def random(shape: tuple[int, int], quantizer: Quantizer) -> PlantedTensor:
    """Random numbers of few bits, whose products with a scale are often ties."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-4, 5, shape)).astype(np.float32)
    return PlantedTensor(x=rounded(rounded(x, "bfloat16"), quantizer.dtype))


def _with(
    shape: tuple[int, int],
    rng: np.random.Generator,
    name: str,
    planted: list[tuple[np.ndarray, float]],
) -> PlantedTensor:
    """Small random numbers with values planted at flat indices, of alternating sign."""
    x = _small(shape, rng)
    for at, value in planted:
        sign = np.where(np.arange(at.size) % 2, -1, 1) * np.copysign(1, value)
        x.reshape(-1)[at] = np.copysign(
            np.float32(value if not np.isfinite(value) else value / 256), sign
        )
    return PlantedTensor(x=x, planted=name, at=planted[0][0])


def _small(shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Numbers of few bits from 1 / 256 to below 2 / 256; float32."""
    return ((1 + rng.integers(0, 8, shape) / 8) / 256).astype(np.float32)
