"""Sums that are rounded once, against exact rationals (spec G-2, and G-13's fused multiply-add)."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from helpers.gemm import exact as rationals
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fp8ref.formats import E4M3FN, E5M2, E5M2FNUZ, FP8_FORMATS
from fp8ref.sim.gemm import accumulate
from fp8ref.sim.quantize import cast

UNIT = 1 << 17  # every FP8 number is a multiple of 2^-17
LIMIT = Fraction(2) ** 128 - Fraction(2) ** 103  # from here on a float32 rounds to infinity

float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)
# float64s whose sum stays in float32's range, of exponents near enough to matter to each other,
# subnormal results among them
float64s = st.builds(
    lambda m, e: float(np.ldexp(float(m), e)), st.integers(-(2**53), 2**53), st.integers(-220, 60)
)
# halfway between two float32s, which anything next to it decides
halfway = st.builds(
    lambda m, e: float(np.ldexp(2.0 * m + 1, e)),
    st.integers(2**23, 2**24 - 1),
    st.integers(-150, 60),
)


def rounded(value: Fraction) -> np.float32:
    if abs(value) >= LIMIT:
        return np.float32(np.inf if value > 0 else -np.inf)
    # what underflows keeps its sign
    return np.copysign(rationals.rn32(value), np.float32(1 if value >= 0 else -1))


def exact_dot(x, y) -> np.float32:
    """RN32 of the sum, in integers."""
    total = sum(
        int(u) * int(v)
        for u, v in zip(x.astype(np.float64) * UNIT, y.astype(np.float64) * UNIT, strict=True)
    )
    return rationals.rn32(Fraction(total, UNIT * UNIT))


def values(rng, shape, fmt):
    drawn = cast.decode(rng.integers(0, 256, shape, dtype=np.uint8), fmt)
    return np.where(np.isfinite(drawn), drawn, np.float32(0))


def bits(result):
    assert result.dtype == np.float32
    return result.view(np.uint32)


@pytest.mark.parametrize(
    "pair", list(product(FP8_FORMATS.values(), repeat=2)), ids=lambda p: f"{p[0]}-{p[1]}"
)
def test_sums_that_cancel(pair, rng):  # G-2
    """Every product twice, with both signs, shuffled, and one more: the exact sum is a single
    product, often 60 bits down.
    """
    for _ in range(8):
        x, y = (values(rng, (1, 80), fmt) for fmt in pair)
        order = rng.permutation(161)
        last = values(rng, (1, 1), pair[0]), np.float32([[pair[1].smallest_subnormal]])
        a = np.concatenate([x, x, last[0]], axis=1)[:, order]
        b = np.concatenate([y, -y, last[1]], axis=1)[:, order]
        expected = np.float32(last[0][0, 0] * last[1][0, 0]) + np.float32(0)
        np.testing.assert_array_equal(
            bits(accumulate.exact_sum(a, b)), bits(expected.reshape(1, 1))
        )


@pytest.mark.parametrize("k", [1, 2, 31, (1 << 15) - 1, 1 << 15, (1 << 15) + 1, 70_000])
def test_one_column_of_any_length(k, rng):  # G-2
    """About 2^15 products make a part; the values spread over e5m2's whole range, so that parts cancel
    and meet at all magnitudes.
    """
    x, y = (values(rng, (1, k), E5M2) for _ in range(2))
    assert accumulate.exact_sum(x, y)[0, 0] == exact_dot(x[0], y[0])
    assert accumulate.exact_sum(np.abs(x), np.abs(y))[0, 0] == exact_dot(np.abs(x[0]), np.abs(y[0]))


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, E5M2FNUZ], ids=str)
def test_the_last_bit_of_the_largest_sum(fmt):
    """70,000 largest products of alternating sign and the smallest one: a float64 that ever holds
    both loses the latter.
    """
    x = np.full((1, 70_001), fmt.max, np.float32)
    y = np.where(np.arange(70_001) % 2, x, -x)
    x[0, 0] = y[0, 0] = fmt.smallest_subnormal
    assert accumulate.exact_sum(x, y)[0, 0] == np.float32(fmt.smallest_subnormal**2)
    y[0, 1] = 0
    assert accumulate.exact_sum(x, y)[0, 0] == exact_dot(x[0], y[0]) == np.float32(-(fmt.max**2))


@pytest.mark.parametrize("k", [1 << 17, 1 << 19])
def test_one_product_holds_e4m3(k):  # G-2
    """2^17 products of 36 bits fill 53 bits; of more, a second sum is needed. The largest products
    leave the sum odd in its last place, so that a bit lost anywhere shows.
    """
    x = np.full((1, k), E4M3FN.max, np.float32)
    y = x.copy()
    x[0, 0] = y[0, 0] = E4M3FN.smallest_subnormal
    total, tail = accumulate.exact_pair(x, y)
    expected = (k - 1) * Fraction(448) ** 2 + Fraction(2) ** -18
    assert Fraction(float(total[0, 0])) + Fraction(float(tail[0, 0])) == expected


def test_a_tie_is_broken_by_the_smallest_product():
    """2^24 + 1 lies halfway between two float32s; 2^-32 on either side of it decides, which a
    float64 no longer holds.
    """
    x = np.float32([[4096, 1, 2.0**-16]])
    y = np.float32([[4096, 1, 2.0**-16], [4096, 1, -(2.0**-16)], [4096, 1, 0]])
    np.testing.assert_array_equal(
        accumulate.exact_sum(x, y), np.float32([[2.0**24 + 2, 2.0**24, 2.0**24]])
    )
    assert len(set((x.astype(np.float64) @ y.astype(np.float64).T).flat)) == 1


def test_zero_sums_are_positive_zero():  # G-2
    x = np.float32([[1, 1], [0, -0.0], [-1, 0]])
    y = np.float32([[1, -1], [-1, -0.0], [0, 5], [0, 2.0**-16]])
    result = accumulate.exact_sum(x, y)
    assert not np.signbit(result[result == 0]).any()
    assert (result == 0).sum() == 7
    assert not bits(
        accumulate.exact_sum(np.zeros((2, 0), np.float32), np.zeros((3, 0), np.float32))
    ).any()


def test_operands_of_one_magnitude_class():
    """Only numbers of at least 1, only smaller ones, only zeros: parts that a sum leaves out."""
    large, small, none = (
        np.full((2, 3), 1, np.float32),
        np.full((2, 3), 0.875, np.float32),
        np.zeros((2, 3), np.float32),
    )
    for a, b in product((large, small, none), repeat=2):
        np.testing.assert_array_equal(
            accumulate.exact_sum(a, b), np.full((2, 2), 3 * a[0, 0] * b[0, 0], np.float32)
        )


@settings(max_examples=500)
@given(float64s | halfway, float64s)
@example(2.0**24 + 1, 2.0**-80)
@example(2.0**24 + 1, -(2.0**-80))
@example(2.0**24 + 3, 2.0**-80)
@example(-(2.0**24) - 1, -(2.0**-80))
@example(1.0, -(2.0**-70))  # below a power of two, numbers lie closer
@example(2.0**-149, 2.0**-150)  # a tie among subnormals
@example(2.0**-149, 2.0**-150 + 2.0**-190)
@example(2.0**128 - 2.0**103, -(2.0**20))  # below the largest float32's upper tie, and on it
@example(2.0**128 - 2.0**103, 0.0)
@example(5.0, -5.0)
def test_round_sum_rounds_the_sum_once(x, y):
    result, total = (
        accumulate.round_sum(np.float64([x]), np.float64([y])),
        Fraction(x) + Fraction(y),
    )
    assert bits(result)[0] == rounded(total).view(np.uint32) or (result[0] == 0 == total)


@settings(max_examples=500)
@given(float32s, float32s, float32s)
@example(
    float(np.float32(1 + 2.0**-12)), float(np.float32(1 + 2.0**-12)), 2.0**-80
)  # 1 + 2^-11 + 2^-24, a tie but for z
@example(float(np.float32(1 + 2.0**-12)), float(np.float32(1 + 2.0**-12)), -(2.0**-80))
@example(2.0**-75, 2.0**-75, 2.0**-149)
@example(2.0**64, 2.0**64, -(2.0**127))
@example(2.0**127, 2.0, 0.0)
def test_multiply_add_rounds_once(x, y, z):  # G-13
    result = accumulate.multiply_add(*np.float32([[x], [y], [z]]))
    total = Fraction(x) * Fraction(y) + Fraction(z)
    assert bits(result)[0] == rounded(total).view(np.uint32) or (result[0] == 0 == total)


def test_multiply_add_of_infinities_and_nans(rng):
    """As IEEE 754, whose answers NumPy gives in two operations: one rounding more changes no
    infinity here.
    """
    special = np.float32([np.inf, -np.inf, np.nan, 0, -0.0, 1, -2])
    x, y, z = (v.reshape(-1) for v in np.meshgrid(special, special, special))
    with np.errstate(invalid="ignore"):
        expected = x * y + z
    result = accumulate.multiply_add(x, y, z)
    np.testing.assert_array_equal(result, expected)
    assert result.dtype == np.float32
    np.testing.assert_array_equal(
        np.signbit(result[result == 0]), np.signbit(expected[expected == 0])
    )
