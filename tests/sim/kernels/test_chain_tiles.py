"""A tile that is laid out holds the numbers of its codes, and their exponents."""

import numpy as np
import pytest
from numba import njit

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.sim import cast
from fp8ref.sim.kernels.chain_tiles import lay_out
from fp8ref.sim.kernels.chain_vectors import LANES

i32 = np.int32
WIDTH, STEPS = 32, 2


@njit
def filled(room, parts, which, mantissa_bits, bias, zero, of_one):
    lay_out(room, parts, which, WIDTH, i32(mantissa_bits), i32(bias), i32(zero), i32(of_one))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_every_code_in_either_step(fmt, dtype, rng):  # G-10: subnormals count as emin
    finite = np.arange(256, dtype=np.uint8)[np.isfinite(cast.decode(np.arange(256, dtype=np.uint8), fmt))]
    codes = rng.permutation(np.resize(finite, WIDTH * LANES)).reshape(LANES, WIDTH)
    for which in range(STEPS):
        room = np.zeros((1 + STEPS, WIDTH // 4, LANES), np.uint32)
        parts = np.full((STEPS, WIDTH, 2, LANES), np.nan, dtype)
        room[0] = codes.view(np.uint32).T
        filled(room.reshape(-1), parts.reshape(-1), which, fmt.mantissa_bits, fmt.bias, 200, 127)
        values = cast.decode(codes, fmt).T  # [WIDTH, LANES]
        np.testing.assert_array_equal(parts[which], np.stack([np.maximum(values, 0), np.minimum(values, 0)], 1))
        assert np.isnan(parts[1 - which]).all()
        exponent = np.maximum(np.frexp(values)[1] - 1, fmt.emin) + 127
        found = room[1 + which].view(np.uint8).reshape(WIDTH // 4, LANES, 4).swapaxes(1, 2).reshape(WIDTH, LANES)
        np.testing.assert_array_equal(found, np.where(values == 0, 200, exponent))
        assert not room[2 - which].any()
