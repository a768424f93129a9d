"""AMD's matrix cores, against Python's fractions."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from helpers.gemm.exact_steps import (
    accumulators,
    cut,
    drawn,
    exponent,
    floor,
    fractions,
    nearest,
    rounded,
    toward_zero,
)

from fp8ref.formats import E4M3FN, E4M3FNUZ, E5M2FNUZ, FLOAT32
from fp8ref.sim.gemm import matrix_core
from fp8ref.sim.quantize import cast

AMD = list(product((E4M3FNUZ, E5M2FNUZ), repeat=2))


def amd(a, b, c, pair):
    """K = 16 or 32 products of fractions a and b, and c."""
    for k in range(0, len(a), 16):
        halves = []
        for begin in (0, 1):
            pairs = zip(a[k + begin : k + 16 : 2], b[k + begin : k + 16 : 2], strict=True)
            of = [(x * y, exponent(x, pair[0].emin) + exponent(y, pair[1].emin)) for x, y in pairs]
            top = max(e for _, e in of)
            halves.append(
                (sum(cut(value, Fraction(2) ** (top - 24), toward_zero) for value, _ in of), top)
            )
        both = max(e for _, e in halves)
        total = sum(cut(value, Fraction(2) ** (both - 24), floor) for value, _ in halves)
        of_c = exponent(c, -126)
        top = max(both, of_c)
        kept = cut(c, Fraction(2) ** (top - 24), floor) if of_c >= top - 25 else Fraction(0)
        found = rounded(cut(total, Fraction(2) ** (top - 31), floor) + kept, 23, FLOAT32, nearest)
        c = Fraction(found)
    return found


@pytest.mark.parametrize("pair", AMD, ids=lambda p: f"{p[0]}-{p[1]}")
@pytest.mark.parametrize("k", [16, 32])
def test_an_instruction_of_cdna3_is_that_of_fractions(pair, k, rng):  # G-25
    a, b, c = drawn(rng, 9, pair[0], k), drawn(rng, 7, pair[1], k), accumulators(rng, (9, 7), False)
    found = matrix_core.mfma(a, b, c, fmt_a=pair[0], fmt_b=pair[1])
    left, right = fractions(a, pair[0]), fractions(b, pair[1])
    expected = [
        [amd(left[i], right[j], Fraction(float(c[i, j])), pair) for j in range(7)] for i in range(9)
    ]
    np.testing.assert_array_equal(found, np.array(expected, np.float32))


one = np.ones((1, 1), np.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda c: matrix_core.mfma(c, c, one, fmt_a=E4M3FN, fmt_b=E4M3FNUZ),
            "CDNA3 matrix cores multiply e4m3fnuz and e5m2fnuz",
        ),
        (
            lambda c: matrix_core.mfma(c[:, :8], c[:, :8], one, fmt_a=E4M3FNUZ, fmt_b=E4M3FNUZ),
            "a multiple of 16",
        ),
        (
            lambda c: matrix_core.mfma(
                c, c, one.astype(np.float64), fmt_a=E4M3FNUZ, fmt_b=E4M3FNUZ
            ),
            "accumulator c is float32",
        ),
        (lambda c: matrix_core.by_name("cdna2"), "unit is a MatrixCore or one of cdna3|cdna3"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call(np.zeros((1, 32), np.uint8))


def _zeros_of_cdna3(b: float, c: float) -> float:
    """One step of products 0 x b."""
    codes = np.full((1, 16), cast.encode(np.float32(b), E5M2FNUZ), np.uint8)
    found = matrix_core.mfma(
        np.zeros((1, 16), np.uint8),
        codes,
        np.full((1, 1), c, np.float32),
        fmt_a=E4M3FNUZ,
        fmt_b=E5M2FNUZ,
    )
    return float(found[0, 0])


def test_zero_products_take_part_in_the_alignment():  # G-25
    """0 x 2^15 has e = -126 + 15 = -111, so that c is cut off to multiples of 2^(-111 - 24) =
    2^-135, toward negative infinity.
    """
    assert _zeros_of_cdna3(2.0**15, 2.0**-136) == 0
    assert _zeros_of_cdna3(2.0**15, -(2.0**-136)) == -(2.0**-135)
    assert _zeros_of_cdna3(2.0**15, 2.0**-135 + 2.0**-136) == 2.0**-135
    # 0 x 1: e = -126, as that of a subnormal c, of which nothing is cut off
    assert _zeros_of_cdna3(1.0, -(2.0**-149)) == -(2.0**-149)
    # 0 x 0: e = -252, and Q is the e of c
    assert _zeros_of_cdna3(0.0, 2.0**-149) == 2.0**-149
    assert np.signbit(_zeros_of_cdna3(2.0**15, -0.0)) == np.False_
