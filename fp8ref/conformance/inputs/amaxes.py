"""The amaxes that tell scale policies apart, and tensors whose groups have them."""

from dataclasses import dataclass

import numpy as np

from fp8ref.conformance.counterexample import rounded
from fp8ref.formats import Format
from fp8ref.granularity import blocks, scale_shape

KINDS = ("ordinary", "tiny", "huge", "subnormal", "zero", "infinite", "NaN")
_PARTS = np.array([1, -0.5, 0.3, 0.7, 0.9, 2.0**-5, -(2.0**-9), 2.0**-12, 0, -0.0, -0.99, 0.01], np.float32)


@dataclass(frozen=True, kw_only=True)
class Questions:
    """The element [n] float32 of largest magnitude, of either sign, and, of each, the index of its kind in KINDS."""

    largest: np.ndarray
    kind: np.ndarray

    @property
    def amax(self) -> np.ndarray:
        return np.abs(self.largest)


def questions(fmt: Format, dtype: str, *, seed: int = 0) -> Questions:
    """Around max * 2^k, where powers of two part; random ones; and what a policy decides by itself. Every second one is negative.

    Of float16 those that it has.
    """
    rng = np.random.default_rng(seed)
    near = (np.ldexp(fmt.max, np.arange(-46, 110, 3))[:, None].astype(np.float32).view(np.int32) + np.array([-2, -1, 0, 1, 2, 17])).astype(
        np.int32
    )
    powers = np.ldexp(1.0, np.arange(-37, 110, 8)).astype(np.float32)
    below = np.concatenate([np.nextafter(powers, np.float32(0)), np.float32(0.999) * powers])  # 0.999 is 1 in bfloat16
    random = np.abs(rng.standard_normal(64)) * 10.0 ** rng.integers(-6, 7, 64)
    by_kind = {
        "ordinary": np.concatenate([2.0 ** np.arange(-30, 61, 5), near.ravel().view(np.float32), below, random]),
        "tiny": [2.0**-126, 1e-37, 1.25e-36, 1.3e-36, 1.32e-36, 1.6e-34, 2e-34, 1e-30, 1e-20, 1e-13, 0.99e-12, 1.01e-12],
        "huge": [np.finfo(np.float32).max, 2.0**127, 3e38, 1e37],
        "subnormal": [2.0**-149, 1e-44, 1e-40, 2.0**-127],
        "zero": [0.0, 0.0],
        "infinite": [np.inf, np.inf],
        "NaN": [np.nan, np.nan],
    }  # fmt: skip
    largest, kind = [], []
    for i, name in enumerate(KINDS):
        values = rounded(np.asarray(by_kind[name], np.float32), dtype)
        # rounding may carry the largest into Inf, and float16 the smallest into zero
        values = values[np.isfinite(values) & (values != 0)] if name in KINDS[:4] else values
        values = np.unique(values).astype(np.float32) if name in KINDS[:4] else values.astype(np.float32)
        largest.append(values * np.where(np.arange(values.size) % 2 == 0, np.float32(1), np.float32(-1)))
        kind.append(np.full(values.size, i))
    return Questions(largest=np.concatenate(largest), kind=np.concatenate(kind))


def groups(shape: tuple[int, int], granularity: str, axis: int) -> np.ndarray:
    """Of each element, the index of its group in the scales' C order; int [M, K]."""
    counts = scale_shape(granularity, shape, axis) or (1, 1)
    sizes = blocks(granularity, shape, axis)
    rows, columns = (np.arange(n) // size for n, size in zip(shape, sizes, strict=True))
    return rows[:, None] * counts[1] + columns[None, :]


def tensor(largest: np.ndarray, group: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers [M, K] of dtype whose groups have these of largest magnitude: each first in its group, then fixed parts of it, then random ones."""
    x = np.zeros(group.shape, np.float32)
    flat, of = x.reshape(-1), group.reshape(-1)
    order = np.argsort(of, kind="stable")
    starts = np.searchsorted(of[order], np.arange(largest.size))
    place = np.arange(of.size) - starts[of[order]]
    rng = np.random.default_rng(0)
    parts = np.where(place < _PARTS.size, _PARTS[np.minimum(place, _PARTS.size - 1)], rng.uniform(-1, 1, of.size)).astype(np.float32)
    base = largest[of[order]]
    finite = np.where(np.isfinite(base), base, np.copysign(np.float32(1), base))
    with np.errstate(under="ignore"):
        values = finite * parts
    flat[order] = np.where((place == 0) & ~np.isfinite(base), base, values)
    return rounded(x, dtype)
