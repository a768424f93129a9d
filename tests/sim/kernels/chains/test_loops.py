"""The loops of chains take every tile, block of steps and block of rows once, and leave their room
as they found it.
"""

import numpy as np
import pytest

from fp8ref.formats import E4M3FN
from fp8ref.sim.kernels.chains import chains
from fp8ref.sim.kernels.chains.loops import CHAIN_END, RESULT, ROWS, SPLIT_END
from fp8ref.sim.kernels.chains.vectors import LANES
from fp8ref.sim.quantize import cast


@pytest.mark.parametrize("m", [1, ROWS, ROWS + 1])
@pytest.mark.parametrize("steps", [1, chains.STEPS, chains.STEPS + 1])
@pytest.mark.parametrize("last", [SPLIT_END, RESULT])
def test_sums_of_small_integers_are_exact(last, steps, m, rng):  # G-12
    """Products of -1, 0 and 1: no step cuts anything off, in whatever order."""
    n, k = 2 * LANES + 3, 32 * steps
    a, b = (rng.integers(-1, 2, (rows, k)).astype(np.float32) for rows in (m, n))
    out = before = rng.integers(-9, 10, (m, n)).astype(np.float32)
    out = out.copy()
    ends = np.where(np.arange(steps) % 3, 0, CHAIN_END if last == SPLIT_END else 0).astype(np.uint8)
    ends[-1] = last
    rows = chains.pack(cast.encode(a, E4M3FN), E4M3FN, 32, 13, 13)
    tiles = chains.tiles(cast.encode(b, E4M3FN))
    chains.columns(rows, tiles, E4M3FN, ends, out, LANES, n)
    np.testing.assert_array_equal(out[:, :LANES], before[:, :LANES])
    np.testing.assert_array_equal(out[:, LANES:], (before + a @ b.T)[:, LANES:])
    chains.columns(rows, tiles, E4M3FN, ends, out, 0, LANES)
    np.testing.assert_array_equal(out, before + a @ b.T)
