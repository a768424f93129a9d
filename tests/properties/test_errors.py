"""Casts: how far the result lies from the value, relative to a normal one and in absolute terms for
a subnormal.
"""

import numpy as np
import pytest
from hypothesis import strategies as st
from properties.domains import F32, caught, for_all, of_magnitude, tensors

from fp8ref.formats import E4M3FN, E5M2, FP8_FORMATS
from fp8ref.sim.quantize import cast, scaling
from fp8ref.spec.gemm import STOCHASTIC

FORMATS = list(FP8_FORMATS.values())
fp8 = pytest.mark.parametrize("fmt", FORMATS, ids=str)
each_rounding = pytest.mark.parametrize("rounding", cast.ROUNDINGS)


def magnitudes(of):
    return st.sampled_from(FORMATS).flatmap(lambda fmt: st.tuples(st.just(fmt), of(fmt)))


def error(x, fmt, rounding="nearest_even", saturate=True):
    """|round(x) - x| in float64: exact, as both are within the 53 bits of one another; else x alone
    is left, or rounded monotonically.
    """
    seed = 5 if rounding in STOCHASTIC else None
    codes = cast.encode(x, fmt, rounding=rounding, saturate=saturate, seed=seed)
    return np.abs(cast.decode(codes, fmt).astype(np.float64) - x)


def inverse_bound(fmt, rounding):
    """n, where the error of a normal number is within 1 / n of it, for m mantissa bits.

    Nearest: half a spacing 2^-m of a binade's numbers, most at the first tie: 2^-(m+1) / (1 +
    2^-(m+1)). Toward zero: a whole spacing below the second number: 2^-m / (1 + 2^-m). To odd and
    stochastic may go up a whole spacing from just above the first: 2^-m.
    """
    m = fmt.mantissa_bits
    return {
        "nearest_even": 2 ** (m + 1) + 1,
        "nearest_away": 2 ** (m + 1) + 1,
        "toward_zero": 2**m + 1,
    }.get(rounding, 2**m)


@each_rounding
@for_all(100, drawn=magnitudes(lambda fmt: of_magnitude(fmt.smallest_normal, fmt.max)))
def test_relative_error_of_a_normal_value(rounding, drawn):
    """smallest normal <= |x| <= max: within 1/17 for e4m3 and 1/9 for e5m2, nearest; other
    roundings as inverse_bound (C-1, C-2).
    """
    fmt, x = drawn
    # both exact: 24 + 5 bits
    scaled, limit = (
        error(x, fmt, rounding) * inverse_bound(fmt, rounding),
        np.abs(x.astype(np.float64)),
    )
    assert (scaled <= limit).all() if rounding.startswith("nearest") else (scaled < limit).all()


@pytest.mark.grid(2)
@each_rounding
@for_all(
    100,
    drawn=magnitudes(
        lambda fmt: st.one_of(
            of_magnitude(fmt.smallest_subnormal / 4, fmt.smallest_normal),
            of_magnitude(0, fmt.smallest_normal),
        )
    ),
)
def test_absolute_error_of_a_subnormal_value(rounding, drawn):
    """|x| <= smallest normal: within half the smallest subnormal, 2^-10 for e4m3 and 2^-17 for
    e5m2, nearest; others below all of it (C-2).
    """
    fmt, x = drawn
    found = error(x, fmt, rounding)
    if rounding.startswith("nearest"):
        assert (found <= fmt.smallest_subnormal / 2).all()
    else:
        # <, but for a difference that float64 rounds: the least float32 goes to the smallest
        # subnormal under to_odd
        assert (found <= fmt.smallest_subnormal).all()


@pytest.mark.parametrize("policy", ["torchao", "torchao_mask", "te_current", "te_delayed", "msamp"])
@for_all(60, x=tensors((4, 32), high=125), fmt=st.sampled_from(FORMATS))
def test_error_of_a_quantized_tensor(policy, x, fmt):
    """Finite tensors, 2^-39 <= amax < 2^126, which |x * scale| <= max and so is cast within the two
    bounds above (S-1, S-5, S-8).

    x * scale, 1 / scale and code / scale each round by u = 2^-24: where x * scale is normal, within
    1/17 |x| and 4 u |x| next to it, as (1 + 1/17)(1 + u)^3 < 1 + 1/17 + 4 u; where it is subnormal,
    within 2^-10 / scale and what 4 u makes of the smallest normal number, 4 u * 2^-6 / scale. (For
    e4m3; the float64 arithmetic of this test is finer by far.)
    """
    q = scaling.quantize(x, fmt, policy=policy)
    found = np.abs(scaling.dequantize(q).astype(np.float64) - x)
    normal = np.abs(x * q.scale) >= fmt.smallest_normal
    u, magnitude, unit = 2.0**-24, np.abs(x.astype(np.float64)), float(q.scale_inv)
    assert (found <= magnitude * (1 / inverse_bound(fmt, "nearest_even") + 4 * u))[normal].all()
    assert (found <= unit * (fmt.smallest_subnormal / 2 + 4 * u * fmt.smallest_normal))[
        ~normal
    ].all()


@pytest.mark.parametrize(("fmt", "n", "tie"), [(E4M3FN, 17, 17 / 16), (E5M2, 9, 9 / 8)], ids=str)
def test_the_bounds_are_reached(fmt, n, tie):
    """At the first tie of each binade and at half the smallest subnormal; a smaller bound would be
    false (C-2).
    """
    x = np.ldexp(F32(tie), np.arange(fmt.emin, int(np.log2(fmt.max)) + 1)).astype(F32)
    np.testing.assert_array_equal(error(x, fmt) * n, x)
    assert (
        error(F32(fmt.smallest_subnormal / 2), fmt)
        == fmt.smallest_subnormal / 2
        == {17: 2.0**-10, 9: 2.0**-17}[n]
    )


@pytest.mark.parametrize(("fmt", "n"), [(E4M3FN, 17), (E5M2, 9)], ids=str)
def test_a_value_just_below_the_normal_ones_errs_more(fmt, n):
    """Its *code* is normal, but the last tie below the smallest normal is 1/15 off for e4m3, 1/7
    for e5m2: the value must be normal.
    """
    x = F32(fmt.smallest_normal - fmt.smallest_subnormal / 2)
    assert cast.encode(x, fmt) == 1 << fmt.mantissa_bits
    assert error(x, fmt) * (n - 2) == x


@pytest.mark.parametrize(("fmt", "last"), [(E4M3FN, 476.0), (E5M2, 64512.0)], ids=str)
def test_a_value_above_max_keeps_the_bound_for_a_while(fmt, last):
    """Saturating (C-3): x - max is within 1/17 of x up to max * 17/16, 1/9 up to max * 9/8, and no
    further.
    """
    n = inverse_bound(fmt, "nearest_even")
    assert last == fmt.max * n / (n - 1)
    assert error(F32(last), fmt) * n == last
    x = np.nextafter(F32(last), F32(np.inf))
    assert error(x, fmt) * n > x


true_encode = cast.encode


@pytest.mark.parametrize("wrong", ["to_odd", "toward_zero", "stochastic"])
def test_another_rounding_in_place_of_nearest_is_caught(wrong, monkeypatch):
    def encode(x, fmt, **options):
        return true_encode(x, fmt, rounding=wrong, seed=5 if wrong in STOCHASTIC else None)

    monkeypatch.setattr(cast, "encode", encode)
    assert caught(test_relative_error_of_a_normal_value, rounding="nearest_even")
    assert caught(test_absolute_error_of_a_subnormal_value, rounding="nearest_even")


def test_a_second_rounding_is_caught(monkeypatch):
    """By way of the format with one mantissa bit more, whose ties go on to a tie (C-1)."""

    def encode(x, fmt, **options):
        step = np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 1, fmt.emin) - fmt.mantissa_bits - 1)
        return true_encode(np.rint(x / step) * step, fmt, **options)

    monkeypatch.setattr(cast, "encode", encode)
    assert caught(test_relative_error_of_a_normal_value, rounding="nearest_even")
