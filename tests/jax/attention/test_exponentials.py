"""Exponentials, logarithms, hyperbolic tangents and fused products against exact arithmetic (spec
A-5, A-7, A-11, A-22).
"""

from fractions import Fraction

import jax
import numpy as np
import pytest
from helpers.gemm import exact

from fp8ref.jax.attention import exponentials as elementary
from fp8ref.sim.attention import exponentials as sim

F = np.float32
DEFINITIONS = {"2": sim.exp2, "e": sim.exp}


@pytest.mark.parametrize("base", DEFINITIONS)
def test_exponentials(base):
    """stated: all 2^16 of them are the simulator's; one in 2^25 may differ. fast: XLA's CPU errs by
    2 units of 2^-23, and in base 2, where it multiplies x by ln 2 in float32, by another |x| / 2 of
    them."""
    x = np.random.default_rng(0).uniform(-80, 16, 1 << 16).astype(F)
    wanted = DEFINITIONS[base](x)
    stated, fast = (
        np.asarray(jax.jit(lambda x, how=how: elementary.exponential(x, base, how))(x))
        for how in ("stated", "fast")
    )
    np.testing.assert_array_equal(stated, wanted)
    units = 2 + (np.abs(x) / 2 if base == "2" else 0)
    assert (np.abs(fast.astype(float) - wanted) <= units * 2.0**-23 * wanted).all()
    assert (fast != wanted).any()


@pytest.mark.parametrize("how", ["stated", "fast"])
def test_special_exponentials(how):
    x = F([-np.inf, -3e38, -201, 0, 1, 8])
    assert np.asarray(elementary.exponential(x, "2", how)).tolist() == [0, 0, 0, 1, 2, 256]
    assert np.asarray(elementary.exponential(x[:4], "e", how)).tolist() == [0, 0, 0, 1]


def test_hyperbolic_tangents():
    """stated: the simulator's; one in 2^25 may differ. fast: A-18 allows 8 units of 2^-23, and its
    note says 3.
    """
    rng = np.random.default_rng(4)
    x = (np.exp2(rng.uniform(-20, 5, 1 << 16)) * rng.choice([-1, 1], 1 << 16)).astype(F)
    stated, fast = (
        np.asarray(jax.jit(lambda x, how=how: elementary.tanh(x, how))(x))
        for how in ("stated", "fast")
    )
    wanted = sim.tanh(x)
    np.testing.assert_array_equal(stated, wanted)
    assert (
        np.abs(fast.astype(float) - np.tanh(x.astype(float))) <= 3 * 2.0**-23 * np.abs(wanted)
    ).all()
    assert (fast != wanted).any()


@pytest.mark.parametrize(("base", "definition"), [("e", sim.log), ("2", sim.log2)])
def test_logarithms(base, definition):
    x = np.exp(np.random.default_rng(1).uniform(-20, 20, 1 << 12)).astype(F)
    np.testing.assert_array_equal(
        np.asarray(jax.jit(lambda x: elementary.logarithm(x, base))(x)), definition(x)
    )


def test_fused_products_are_rounded_once():
    rng = np.random.default_rng(2)
    a, b, c = (
        (rng.standard_normal(4000) * 2.0 ** rng.integers(-12, 12, 4000)).astype(F) for _ in range(3)
    )
    c[:2000] = -(a * b)[:2000]  # what cancels shows the product's last bits
    # The product lies 2^-70 off the midpoint of two sums: rounding to float64 first would lose
    # that.
    a[-1], b[-1], c[-1] = F(1 + 2.0**-23) * F(2.0**-35), F(1 - 2.0**-23) * F(2.0**11), 1
    a[-2], b[-2], c[-2] = F(1 + 2.0**-12), F(2.0**-24), 1
    a[-3], b[-3], c[-3] = F(2.0**-24), F(1 + 2.0**-23), F(1 + 2.0**-23)
    wanted = [
        exact.rn32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    np.testing.assert_array_equal(np.asarray(jax.jit(elementary.fused)(a, b, c)), F(wanted))


def test_sums_ascend():
    x = np.random.default_rng(3).random((7, 130)).astype(F)
    wanted = np.zeros(7, F)
    for column in x.T:
        wanted = wanted + column
    np.testing.assert_array_equal(np.asarray(jax.jit(elementary.ascending_sum)(x)), wanted)
    assert (wanted != x.sum(axis=1)).any()
