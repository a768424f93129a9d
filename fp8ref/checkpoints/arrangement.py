"""Whether scales belong to the codes of their own blocks, or of others.

A block with a large peak has a large scale for its mean, and a small mean code: the two are
correlated, and with the scale of another block they are not. Rows and columns of large weights
correlate blocks too, so their means are taken out first.
"""

from collections.abc import Iterator

import numpy as np

from fp8ref.sim.quantize import scale_layouts

__all__ = ["identify_order", "orders"]

LEAST = 36
"""The fewest blocks that say anything."""

UNRELATED = 1024
"""The fewest blocks by which scales are said to belong to no block."""


def identify_order(
    log_scale: np.ndarray, log_mean: np.ndarray, usable: np.ndarray
) -> tuple[str, list[float]] | None:
    """How scales [R, C] would fit the codes if they do not, "" of no order; and the strengths of
    the stored order and of that. None: they fit, or it cannot be told.

    The strength of a relation is the correlation times sqrt(blocks), about normal where there is
    none: right scales are below -5, and a wrong order is named only below it.
    """
    if usable.size < LEAST or usable.mean() < 0.9:
        return None
    x, y = (np.where(usable, z, z[usable].mean()) for z in (log_scale, log_mean))
    own = _strength(x, y)
    if own is None or own < -5:
        return None
    strengths = {name: _strength(z, y) or 0.0 for name, z in orders(x)}
    best = min(strengths, key=lambda name: strengths[name], default="")
    if best and strengths[best] < min(-5, own - 5) and own > -2.5:
        return best, [round(own, 1), round(strengths[best], 1)]
    if usable.size >= UNRELATED and min(usable.shape) >= 4 and own > -3:
        return "", [round(own, 1)]
    return None


def _strength(x: np.ndarray, y: np.ndarray) -> float | None:
    """Correlation of two arrays without the means of rows and columns, times sqrt(blocks)."""
    x, y = _centered(x), _centered(y)
    spread = float(np.sqrt(np.mean(x * x) * np.mean(y * y)))
    if np.std(x) < 0.01 or spread == 0:
        return None
    free = x.size if min(x.shape) < 4 else (x.shape[0] - 1) * (x.shape[1] - 1)
    return float(np.mean(x * y)) / spread * float(np.sqrt(free))


def _centered(x: np.ndarray) -> np.ndarray:
    if min(x.shape) < 4:
        return x - x.mean()
    return x - x.mean(axis=0) - x.mean(axis=1, keepdims=True) + x.mean()


def orders(x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """(name, scales as they would have to be) of orders that libraries confuse."""
    rows, columns = x.shape
    if min(rows, columns) > 1:
        yield "they are transposed", x.reshape(columns, rows).T
        yield "they are shifted by a column", np.roll(x, 1, axis=1)
        yield "they are shifted by a column to the left", np.roll(x, -1, axis=1)
    yield "they are shifted by a row", np.roll(x, 1, axis=0)
    yield "they are shifted by a row upwards", np.roll(x, -1, axis=0)
    yield "they are those of the other half of rows (gate and up)", np.roll(x, rows // 2, axis=0)
    swizzled = scale_layouts.SCALE_LAYOUTS["swizzled_128x4"]
    if swizzled.size((rows, columns), 1) == x.size:
        yield "they are swizzled (128x4 tiles)", scale_layouts.load(x, swizzled, (rows, columns))
        yield "they are swizzled twice", scale_layouts.store(x, swizzled).reshape(x.shape)
    for size in (64, 128):
        for when, shape in (("before", (2, size // 2)), ("after", (size // 2, 2))):
            if rows % size == 0:
                heads = x.reshape(-1, *shape, columns).swapaxes(1, 2).reshape(x.shape)
                yield f"they are those of rows {when} RoPE's order in heads of {size}", heads
