"""The online softmax of a tile of keys (A-4 to A-8): maxima, probabilities, sums, factors.

``step`` calls the compiled kernel; ``step_plain`` is the definition, in NumPy.
"""

from typing import NamedTuple

import numpy as np

from fp8ref.sim.attention import exponentials
from fp8ref.sim.gemm.accumulate import multiply_add
from fp8ref.sim.kernels import attention as kernels
from fp8ref.spec.attention.variants import SumOrder, Variant

_ORDERS: dict[SumOrder, int] = {
    "tile": kernels.TILE_ORDER,
    "quad": kernels.QUAD,
    "packed": kernels.PACKED,
}
_NONE = np.float32(-np.inf)


class Rows(NamedTuple):
    """What a row keeps from tile to tile: its maximum, float32 [rows], -infinity at first, and the
    lanes of its sum, float32 [rows, 4]."""

    maximum: np.ndarray
    sums: np.ndarray


class Seen(NamedTuple):
    """Which keys of a tile each row sees: those from low to high, counted from the tile's first, of
    its own document; int64 [rows], [rows], [rows] and [keys]."""

    low: np.ndarray
    high: np.ndarray
    q_documents: np.ndarray
    k_documents: np.ndarray


def start(rows: int) -> Rows:
    """The state before the first tile."""
    return Rows(np.full(rows, _NONE), np.zeros((rows, 4), np.float32))


def total(rows: Rows, order: SumOrder) -> np.ndarray:
    """The sum of each row, of its lanes: float32 [rows]."""
    lanes = rows.sums
    if order == "quad":
        return (lanes[:, 0] + lanes[:, 2]) + (lanes[:, 1] + lanes[:, 3])
    return lanes[:, 0].copy()


def step(
    s: np.ndarray, rows: Rows, seen: Seen, variant: Variant, factors: np.ndarray, factor: np.float32
) -> tuple[np.ndarray, np.ndarray]:
    """(probabilities, factors of what came before); rows is updated, and scaled scores overwrite s.

    Shapes:   s float32 [rows, keys]; probabilities of that shape; float32 [rows].
    Order:    as ``step_plain``.
    """
    p, c = np.empty_like(s), np.empty(len(s), np.float32)
    kernels.step(
        s,
        factors,
        variant.scores == "raw",
        factor,
        np.float32(variant.offset),
        variant.bias == "fused",
        variant.base == "2",
        np.float32(variant.threshold),
        _ORDERS[variant.sum_order],
        *seen,
        (seen.q_documents[:, None] != seen.k_documents).any(),
        rows.maximum,
        rows.sums,
        c,
        p,
    )
    return p, c


def step_plain(
    s: np.ndarray, rows: Rows, seen: Seen, variant: Variant, factors: np.ndarray, factor: np.float32
) -> tuple[np.ndarray, np.ndarray]:
    """The definition of ``step``: one rounding an operation."""
    keys = np.arange(s.shape[1])
    visible = (keys >= seen.low[:, None]) & (keys < seen.high[:, None])
    visible &= seen.q_documents[:, None] == seen.k_documents
    raw = variant.scores == "raw"
    exponential = exponentials.exp2 if variant.base == "2" else exponentials.exp
    threshold, offset = np.float32(variant.threshold), np.float32(variant.offset)
    if not raw:
        for multiplier in factors:
            s = s * multiplier
    s = np.where(visible, s, _NONE)
    old, largest = rows.maximum.copy(), s.max(axis=1)
    with np.errstate(invalid="ignore"):  # of two infinities: compared as False below
        if raw:
            new = np.maximum(old, largest)
            behind = (old - _finite(new)) * factor
            stays = (threshold > 0) & (behind >= -threshold)
            new = np.where(stays, old, new)
            c = np.where(stays, np.float32(1), exponentials.exp2(behind))
            if variant.bias == "fused":
                bias = -_fused(_finite(new), factor, -offset)
            else:
                bias = offset - _finite(new) * factor
            exponent = _fused(s, factor, bias[:, None])
        else:
            new = np.where((old == _NONE) | (largest - old > threshold), largest, old)
            behind = old - new
            rescaled = exponential(np.where(behind < 0, behind, 0))
            c = np.where(behind < -threshold, rescaled, np.float32(1))
            exponent = (s - _finite(new)[:, None]) + offset
    p = exponential(np.where(visible, exponent, _NONE))
    rows.maximum[:] = new
    _add(p, c, rows.sums, variant.sum_order)
    return p, c


def _add(p: np.ndarray, c: np.ndarray, sums: np.ndarray, order: SumOrder) -> None:
    """Multiply the sums of rows by c, then add the probabilities (A-7)."""
    if order == "quad":
        sums *= c[:, None]
        for j, column in enumerate(p.T):
            sums[:, j // 2 % 4] += column
    elif order == "packed":
        lanes = np.zeros((8, len(p)), np.float32)
        lanes[0] = sums[:, 0] * c
        for j, column in enumerate(p.T):
            lanes[j % 8] += column
        sums[:, 0] = ((lanes[0] + lanes[2]) + (lanes[4] + lanes[6])) + (
            (lanes[1] + lanes[3]) + (lanes[5] + lanes[7])
        )
    else:
        tile_sums = np.zeros(len(p), np.float32)
        for column in p.T:
            tile_sums = tile_sums + column
        sums[:, 0] = sums[:, 0] * c + tile_sums


def _finite(maximum: np.ndarray) -> np.ndarray:
    """The maximum; 0 for a row that has seen no key."""
    return np.where(maximum == _NONE, np.float32(0), maximum)


def _fused(x, y, z) -> np.ndarray:
    x, z = np.asarray(x, np.float32), np.asarray(z, np.float32)
    return multiply_add(*np.broadcast_arrays(x, np.float32(y), z))
