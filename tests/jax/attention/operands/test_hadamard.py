"""The rotation has the simulator's bits (spec A-13)."""

import jax
import numpy as np
import pytest

from fp8ref.jax.attention.operands import hadamard
from fp8ref.sim.attention.operands import hadamard as sim


@pytest.mark.grid(3)
@pytest.mark.parametrize("seed", [0, 7, 2**63 + 5])
@pytest.mark.parametrize("size", [1, 64, 256])
def test_bits(size, seed):
    x = np.random.default_rng(0).standard_normal((2, 3, 5, size)).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(hadamard.signs(size, seed)), sim.signs(size, seed))
    found = jax.jit(lambda x: hadamard.rotate(x, hadamard.signs(size, seed)))(x)
    np.testing.assert_array_equal(np.asarray(found), sim.rotate(x, sim.signs(size, seed)))


def test_what_is_refused():
    with pytest.raises(ValueError, match="is a power of two; got 96"):
        hadamard.signs(96, 0)
    with pytest.raises(ValueError, match="a seed is an integer"):
        hadamard.signs(64, -1)
