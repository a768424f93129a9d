"""What the attention kernels are made of; the kernels themselves are compared with their
definitions next to these.
"""

import decimal
import math
from fractions import Fraction

import numpy as np
from numba import njit

from fp8ref.sim.kernels import attention as kernels

F = np.float32


@njit
def fused(a, b, c):
    return kernels.fma(a, b, c)


def test_a_fused_multiply_add_is_rounded_once():
    rng = np.random.default_rng(0)
    differs = 0
    for a, b, c in (rng.normal(size=(300, 3)) * 2.0 ** rng.integers(-12, 3, (300, 1))).astype(F):
        # what is left of the product is what a rounding of it would lose
        c = F(-F(a * b) * (1 + c * F(2.0**-20)))
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        # A float64 holds it: the sum cancels all but 48 bits of the product.
        assert fused(a, b, c) == F(float(exact))
        differs += fused(a, b, c) != F(a * b) + c
    assert differs > 100


def test_the_table_of_roots():
    context = decimal.Context(prec=60)
    for i, (high, low) in enumerate(zip(kernels._HIGH, kernels._LOW, strict=True)):
        exact = context.power(
            decimal.Decimal(2), context.divide(decimal.Decimal(i), decimal.Decimal(32))
        )
        assert high == float(exact)
        assert (
            abs(context.subtract(exact, decimal.Decimal(float(high))) - decimal.Decimal(float(low)))
            < decimal.Decimal(2) ** -100
        )


# 13 bits of steps times the high part fit a float64
def test_ln_2_is_cut_where_products_are_exact():
    assert Fraction(kernels._LN2_HIGH) * 32 * 2**38 == int(Fraction(kernels._LN2_HIGH) * 32 * 2**38)
    exact = decimal.Context(prec=60).ln(decimal.Decimal(2))
    assert (
        abs(decimal.Decimal(kernels._LN2_HIGH) + decimal.Decimal(kernels._LN2_LOW) - exact / 32)
        < decimal.Decimal(2) ** -95
    )
    assert math.isclose(kernels._INVERSE, 32 / math.log(2), rel_tol=2.0**-52)
