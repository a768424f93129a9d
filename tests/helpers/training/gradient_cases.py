"""Gradients of ranks, and options, under which ``sim.gradient_reduction`` and a backend are
compared.
"""

import numpy as np

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.sim.distributed import gradient_reduction

ROWS = (13, 16)
"""First dims: one that no number of ranks divides, and one that all do."""

CASES = [
    (ROWS[0], E4M3FN, {}),
    (ROWS[1], E5M2, {"mean": False}),
    (ROWS[1], E4M3FN, {"result": "codes", "prescale": "inverse", "policy": "torchao_pow2"}),
    (ROWS[0], E5M2, {"result": "codes", "prescale": "inverse_root", "mu": 4.0}),
]

SPECIAL = {"nan": np.nan, "inf": np.inf, "zero": 0.0, "large": 2.0**91}
"""Values of one element of one rank; "zero" is of all elements of all ranks."""


def of_ranks(ranks: int, rows: int, dtype: str = "float32") -> list[np.ndarray]:
    """float32 [rows, 5] for each rank, of numbers of a dtype whose magnitudes span eight
    decades.
    """
    rng = np.random.default_rng(rows)
    drawn = (
        rng.standard_normal((ranks, rows, 5)) * 10.0 ** rng.integers(-6, 3, (ranks, rows, 5))
    ).astype(np.float32)
    if dtype == "bfloat16":
        drawn = (drawn.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return list(drawn)


def special(ranks: int, name: str) -> list[np.ndarray]:
    """Gradients with one special number, on the last rank."""
    grads = of_ranks(ranks, ROWS[0])
    if name == "zero":
        return [np.zeros_like(g) for g in grads]
    grads[-1][-1, -1] = SPECIAL[name]
    return grads


def expected(ranks: int, case: tuple) -> gradient_reduction.Reduced:
    """What the simulator reduces the gradients of a case to."""
    rows, fmt, options = case
    return gradient_reduction.reduce(of_ranks(ranks, rows), fmt, **options)


def equal(found, expected) -> bool:
    """Whether two float32 arrays have the same bits, NaNs equal."""
    found, expected = np.asarray(found), np.asarray(expected)
    same = (found.view(np.uint32) == expected.view(np.uint32)) | (
        np.isnan(found) & np.isnan(expected)
    )
    return found.shape == expected.shape and bool(same.all())
