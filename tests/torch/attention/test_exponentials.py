"""Operations that are rounded once, against exact rationals and correctly rounded functions."""

import numpy as np
import pytest
import torch
from helpers.gemm.exact import fractions, rn32

from fp8ref.sim.attention import exponentials as sim
from fp8ref.spec.attention.variants import ARITHMETIC
from fp8ref.torch.attention import exponentials as elementary


def numbers(n=2000, *, seed=0):
    rng = np.random.default_rng(seed)
    return [
        (rng.normal(size=n) * 2.0 ** rng.integers(-20, 20, n)).astype(np.float32) for _ in range(3)
    ]


# 2000 numbers, of which one in 2^29 would be rounded twice
def test_a_product_and_a_sum_are_rounded_once():
    x, y, z = numbers()
    z[::2] = -x[::2] * y[::2] * np.float32(1 + 2.0**-20)  # cancels what float32 has of the product
    found = elementary.multiply_add(*map(torch.from_numpy, (x, y, z))).numpy()
    np.testing.assert_array_equal(
        found, [rn32(a * b + c) for a, b, c in zip(*map(fractions, (x, y, z)), strict=True)]
    )
    assert (found != (x * y + z)).mean() > 0.3


@pytest.mark.parametrize("guarded", [False, True])
def test_products_and_quotients_are_float32s(guarded, monkeypatch):
    """On a GPU a compiler would contract and approximate: what goes through float64 has the same
    bits.
    """
    monkeypatch.setattr(elementary, "compiled_for_gpu", lambda x: guarded)
    x, y, _ = numbers(seed=1)
    a, b = torch.from_numpy(x), torch.from_numpy(y)
    np.testing.assert_array_equal(
        elementary.times(a, b).numpy(),
        [rn32(c * d) for c, d in zip(fractions(x), fractions(y), strict=True)],
    )
    np.testing.assert_array_equal(
        elementary.divide(a, b).numpy(),
        [rn32(c / d) for c, d in zip(fractions(x), fractions(y), strict=True)],
    )
    tenth = float(np.float32(0.1))
    assert torch.equal(elementary.times(a, tenth), a * tenth)


@pytest.mark.parametrize("base", ["2", "e"])
def test_exponentials_and_logarithms(base):
    x = np.concatenate(
        [np.random.default_rng(2).uniform(-160, 80, 20000), np.arange(-151, 80), [-np.inf]]
    ).astype(np.float32)
    right = (sim.exp2 if base == "2" else sim.exp)(x)
    stated, fast = (
        elementary.exponential(torch.from_numpy(x), base, how).numpy() for how in ARITHMETIC[::-1]
    )
    np.testing.assert_array_equal(stated, right)  # of 2^28 numbers one would differ
    normal = right >= 2.0**-126
    assert (np.abs(fast - right)[normal] <= 2 * np.spacing(right)[normal]).all()
    y = right[right > 0][:3000]
    np.testing.assert_array_equal(
        elementary.log(torch.from_numpy(y), base).numpy(), (sim.log2 if base == "2" else sim.log)(y)
    )
