import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from helpers.gemm import exact
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fp8ref.formats import E4M3FN, E5M2, E8M0FNU, FP8_FORMATS
from fp8ref.sim.gemm import gemm
from fp8ref.sim.quantize import cast, scaling, stats

FORMATS = list(FP8_FORMATS.values())


def by_scale(x, scale, fmt=E4M3FN):
    """x quantized under a scale from elsewhere, as delayed scaling does."""
    x, scale = np.asarray(x, np.float32), np.float32(scale)
    with np.errstate(over="ignore"):
        codes = cast.encode(np.clip(x * scale, -fmt.max, fmt.max), fmt)
    return scaling.Quantized(
        codes, scale, scaling.scale_inv_from_scale(scale), fmt, "tensorwise", -1
    )


def of(x, scale, fmt=E4M3FN):
    return stats.statistics(np.asarray(x, np.float32), by_scale(x, scale, fmt))


def in_fractions(x, q):
    """Every statistic of a tensorwise q from exact rationals: finite x and codes."""
    decoded = q.codes.view(getattr(ml_dtypes, f"float8_{q.fmt.name}")).astype(np.float64).ravel()
    m, emin, x = q.fmt.mantissa_bits, q.fmt.emin, exact.fractions(np.ravel(x))
    back = [exact.rn32(Fraction(d) * Fraction(float(q.scale_inv))) for d in decoded]
    e = [Fraction(float(b)) - v for b, v in zip(back, x, strict=True)]
    scaled = [Fraction(float(exact.rn32(v * Fraction(float(q.scale))))) for v in x]
    ulps, overflows = [], 0
    for s, d in zip(scaled, decoded, strict=True):
        exponent = emin
        while abs(s) >= Fraction(2) ** (exponent + 1):
            exponent += 1
        ulps.append(abs(Fraction(d) - s) / Fraction(2) ** (exponent - m))
        overflows += abs(exact.round_fraction(s, mantissa_bits=m, emin=emin)) > Fraction(q.fmt.max)
    return {
        "count": len(x),
        "zeros": sum(v == 0 for v in x),
        "non_finite": 0,
        "non_finite_codes": 0,
        "underflows": sum(v != 0 and d == 0 for v, d in zip(x, decoded, strict=True)),
        "subnormals": sum(0 < abs(d) < 2.0**emin for d in decoded),
        "overflows": overflows,
        "saturated": sum(abs(d) == q.fmt.max for d in decoded),
        "signal": sum(v * v for v in x),
        "noise": sum(v * v for v in e),
        "magnitude": sum(map(abs, x)),
        "error": sum(e),
        "max_ulp": max(ulps),
    }, sum(map(abs, e))


@given(
    arrays(
        np.float32,
        st.integers(1, 12),
        elements=st.floats(-(2.0**20), 2.0**20, width=32, allow_subnormal=False),
    ),
    st.sampled_from([2.0**-12, 0.3, 1.0, 7.0, 2.0**9]),
    st.sampled_from(FORMATS),
)
def test_statistics_equal_exact_rationals(x, scale, fmt):
    q = by_scale(x, scale, fmt)
    s = stats.statistics(x, q)
    expected, error_magnitude = in_fractions(x, q)
    for key, value in expected.items():
        actual = getattr(s, key)
        if actual.dtype == np.int64:
            assert actual == value, key
        elif key == "error":  # one rounding an element, one a sum: 2^-53 each of the magnitudes
            assert abs(Fraction(float(actual)) - value) <= 14 * Fraction(2) ** -53 * error_magnitude
        else:  # up to three roundings an element and twelve additions, of numbers of one sign
            assert abs(Fraction(float(actual)) - value) <= 16 * Fraction(2) ** -53 * value, key


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_overflow_is_what_an_unsaturated_cast_does(fmt):
    """Q-3 against C-4, whose casts are ml_dtypes': bfloat16 values and multiples of max from 32 to
    2^17, ties among them.
    """
    near = np.arange(0x4200, 0x4800, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    near = np.concatenate([near, near * np.float32(fmt.max / 448)])[:, None]
    unsaturated = near.astype(getattr(ml_dtypes, f"float8_{fmt.name}")).astype(np.float32)
    one = np.ones((len(near), 1), np.float32)
    q = scaling.Quantized(cast.encode(near, fmt), one, one, fmt, "rowwise", -1)
    each = stats.statistics(near, q, per_group=True)
    np.testing.assert_array_equal(each.overflows, ~np.isfinite(unsaturated))
    np.testing.assert_array_equal(
        each.saturated, (unsaturated == fmt.max) | ~np.isfinite(unsaturated)
    )
    assert 0 < each.overflows.sum() < each.saturated.sum() < len(near)


def test_half_an_ulp_where_nothing_saturates(rng):
    x = (rng.standard_normal((64, 64)) * np.exp(rng.standard_normal((64, 64)) * 5)).astype(
        np.float32
    )
    for fmt in FORMATS:
        for granularity in ("tensorwise", "rowwise", "mx_1x32"):
            s = stats.statistics(x, scaling.quantize(x, fmt, granularity=granularity))
            assert 0.499 < s.max_ulp <= 0.5
            assert s.overflows == 0 < s.saturated
    # 672 saturates to 448; next to it, at 2^9, numbers would be 64 apart
    assert of([448 + 32 * 7], 1).max_ulp == 7 * 32 / 64
    assert of([17.0], 1).max_ulp == 0.5  # a tie
    # 1 for 0, where numbers are 2^-9 apart
    wrong = by_scale([0], 1)._replace(codes=np.uint8([0x38]))
    assert stats.statistics(np.zeros(1, np.float32), wrong).max_ulp == 512


def test_sqnr_of_a_uniform_binade():
    """4,096 midpoints of a grid on [1, 2), 512 to a step of 1/8: mean e^2 is (1/8)^2 / 12 * (1 -
    1/512^2), mean x^2 is 7/3 - 1/(12 * 4096^2) (Q-1).
    """
    x = (1 + (np.arange(4096) + 0.5) / 4096).astype(np.float32)
    s = of(x, 1)
    noise, signal = (1 - 2.0**-18) / 768, 7 / 3 - 2.0**-24 / 12
    # 4,096 float64 additions of numbers of one sign: at most 2^-41
    assert s.noise / 4096 == pytest.approx(noise, rel=1e-12)
    assert s.signal / 4096 == pytest.approx(signal, rel=1e-12)
    assert s.sqnr == pytest.approx(10 * math.log10(signal / noise), abs=1e-10)
    assert round(float(s.sqnr), 1) == 32.5
    assert s.bias == 0  # the grid is symmetric about every number, ties fall between the midpoints


def test_sqnr_cases():
    assert of([1, 2, -0.5], 1).sqnr == np.inf  # exact
    assert of([0, -0.0], 1).sqnr == np.inf
    assert of([2.0**-20], 1).sqnr == 0  # lost altogether: noise is signal
    zeros = by_scale([0, 0], 1)
    # noise alone
    assert (
        stats.statistics(np.zeros(2, np.float32), zeros._replace(codes=np.uint8([0x38, 0]))).sqnr
        == -np.inf
    )
    overflowed = by_scale([1.0, 1.0], 1, E5M2)._replace(codes=np.uint8([0x7C, 0x3C]))
    assert stats.statistics(np.ones(2, np.float32), overflowed).sqnr == -np.inf
    assert np.isnan(of([np.nan, np.inf], 1).sqnr)  # nothing finite
    with_nan = np.float32([1, np.nan])
    # the scale is NaN, and 1 is lost
    lost = stats.statistics(with_nan, scaling.quantize(with_nan, E4M3FN))
    assert np.isnan(lost.sqnr)
    assert (lost.non_finite, lost.non_finite_codes) == (1, 2)


def test_each_row_has_the_sqnr_of_a_tensor_of_its_own(rng):
    """A row of 2^20 takes the one scale: the others become zero, and their noise is their signal."""
    x = rng.standard_normal((3, 2, 8)).astype(np.float32)
    x[0] *= 2.0**20
    q = scaling.quantize(x, E4M3FN)
    rows = stats.sqnr_by_row(x, scaling.dequantize(q))
    assert rows.shape == (3, 2)
    assert rows[1, 0] == 0.0 < 20 < rows[0, 0]
    part = q._replace(codes=q.codes[0, 1])
    assert rows[0, 1] == pytest.approx(float(stats.statistics(x[0, 1], part).sqnr))
    special = np.array([[0, 0], [np.inf, 1], [np.nan, 2], [3, 4]], np.float32)
    decoded = np.array([[0, 0], [0, 1], [0, 1], [np.nan, 4]], np.float32)
    np.testing.assert_allclose(
        stats.sqnr_by_row(special, decoded), [np.nan, np.inf, 10 * math.log10(4), -np.inf]
    )


def test_rows_of_a_large_tensor_are_measured_in_parts(rng, monkeypatch):
    x = rng.standard_normal((7, 3, 8)).astype(np.float32)
    decoded = scaling.dequantize(scaling.quantize(x, E4M3FN))
    whole = stats.sqnr_by_row(x, decoded)
    monkeypatch.setattr(stats, "SLAB", 4 * 24)  # a part is one of the seven
    np.testing.assert_array_equal(stats.sqnr_by_row(x, decoded), whole)


def test_an_input_that_is_not_finite_enters_no_sum():
    """Under a scale from elsewhere an infinity saturates and a NaN stays: counted, and the rest
    measured without them (Q-1, Q-3).
    """
    s, without = of([1.0, 1.03, np.inf, -np.inf, np.nan, 0], 1), of([1.0, 1.03, 0], 1)
    assert (s.count, s.zeros, s.non_finite, s.non_finite_codes, s.saturated, s.overflows) == (
        6,
        1,
        3,
        1,
        2,
        2,
    )
    for key in (
        "signal",
        "noise",
        "magnitude",
        "error",
        "max_ulp",
        "sqnr",
        "bias",
        "relative_bias",
    ):
        assert getattr(s, key) == getattr(without, key), key


def test_an_infinite_amax_loses_every_code():
    x = np.float32([1, 2, np.inf])
    s = stats.statistics(x, scaling.quantize(x, E4M3FN))
    assert (s.underflows, s.non_finite, s.non_finite_codes) == (2, 1, 1)
    assert np.isnan(s.noise)  # 0 times an infinite scale_inv


def test_rates_and_bias():
    tiny = 2.0**-9  # the smallest subnormal
    s = of([0, tiny, 3 * tiny, 0.4 * tiny, -0.4 * tiny, 2.0**-6, 448, -464, 480, 500], 1)
    assert s.underflow_rate == 2 / 10
    assert s.subnormal_rate == 2 / 10
    assert s.saturation_rate == 4 / 10
    assert s.overflow_rate == 2 / 10  # 464 is the tie that rounds back to 448
    assert s.bias == (16 - 32 - 52) / 10
    assert s.relative_bias == (16 - 32 - 52) / float(s.magnitude)
    assert of([1, 1.0625], 1).bias == -1 / 32  # the tie goes down, to even
    assert of([1], 1).relative_bias == of([0], 1).relative_bias == 0
    assert np.isnan(of([np.inf], 1).bias)
    assert np.isnan(of([np.inf], 1).relative_bias)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    "granularity", ["tensorwise", "rowwise", "blockwise_1x128", "blockwise_128x128", "mx_1x32"]
)
def test_each_group_is_a_tensor_of_its_own(granularity, axis, rng):
    x = (rng.standard_normal((256, 128)) * np.exp(rng.standard_normal((256, 128)) * 4)).astype(
        np.float32
    )
    x[3, 5], x[200] = np.nan, 0
    q = scaling.quantize(x, E4M3FN, granularity=granularity, axis=axis)
    each, hist = stats.statistics(x, q, per_group=True), stats.exponents(x, q, per_group=True)
    index = np.arange(q.scale.size).reshape(q.scale.shape)
    owner = np.broadcast_to(scaling.spread(index, x.shape, q.blocks), x.shape)
    for i in rng.choice(q.scale.size, min(8, q.scale.size), replace=False):
        mine = owner == i
        part = q._replace(
            codes=q.codes[mine],
            scale=q.scale.ravel()[i],
            scale_inv=q.scale_inv.ravel()[i],
            granularity="tensorwise",
            axis=-1,
        )
        alone = stats.statistics(x[mine], part)
        # sums of at most 2^15 float64 numbers, in two orders; `error` cancels
        for key, value in vars(alone).items():
            scale = float(alone.magnitude) if key == "error" else 0
            np.testing.assert_allclose(
                getattr(each, key).ravel()[i], value, rtol=1e-11, atol=1e-11 * scale, err_msg=key
            )
        np.testing.assert_array_equal(
            hist.scaled.reshape(-1, hist.scaled.shape[-1])[i], stats.exponents(x[mine], part).scaled
        )
        np.testing.assert_array_equal(
            hist.codes.reshape(-1, hist.codes.shape[-1])[i], stats.exponents(x[mine], part).codes
        )


def test_a_narrow_dtype_counts_as_its_values(rng):
    x = rng.standard_normal((8, 32)).astype(ml_dtypes.bfloat16)
    q = scaling.quantize(x, E4M3FN, granularity="rowwise")
    narrow, wide = stats.statistics(x, q), stats.statistics(x.astype(np.float32), q)
    assert all(getattr(narrow, key) == value for key, value in vars(wide).items())


def test_exponents():
    x = [0, -0.0, 2.0**-11, 2.0**-10, -1.99 * 2.0**-10, 1, 1.5, -448, 511, 512, np.inf, np.nan]
    h = stats.exponents(np.float32(x), by_scale(x, 1))
    assert (h.lowest, h.highest) == (-10, 8)
    bins = {e: 1 + e - h.lowest for e in range(-10, 9)}
    expected = np.zeros(21, np.int64)
    expected[[0, bins[-10], bins[0], bins[8], 20]] = 1, 2, 2, 2, 2
    np.testing.assert_array_equal(h.scaled, expected)
    # 2^-10 is a tie and goes to zero, 1.99 * 2^-10 goes to 2^-9; 511, 512 and Inf saturate
    expected = np.zeros(21, np.int64)
    expected[[bins[-9], bins[0], bins[8]]] = 1, 2, 4
    np.testing.assert_array_equal(h.codes, expected)
    assert stats.exponents(np.float32(x), by_scale(x, 1), lowest=-1, highest=0).scaled.tolist() == [
        3,
        0,
        2,
        4,
    ]
    assert stats.exponents(np.float32(x), by_scale(x, 1), lowest=0, highest=0).scaled.tolist() == [
        3,
        2,
        4,
    ]
    rows = scaling.quantize(np.ones((2, 4), np.float32), E4M3FN, granularity="rowwise")
    assert stats.exponents(np.ones((2, 4), np.float32), rows).scaled.shape == (21,)


@given(
    arrays(np.float32, st.integers(1, 20), elements=st.floats(width=32)), st.sampled_from(FORMATS)
)
def test_every_element_has_one_bin_or_none(x, fmt):
    q = by_scale(x, 1, fmt)
    h, decoded = stats.exponents(x, q), cast.decode(q.codes, fmt)
    assert h.scaled.sum() == ((x != 0) & ~np.isnan(x)).sum()
    assert h.codes.sum() == ((decoded != 0) & ~np.isnan(decoded)).sum()
    # codes are no smaller than the smallest subnormal, and here finite
    assert h.codes[0] == h.codes[1] == h.codes[-1] == 0


def test_error_of_an_output():
    e = stats.error(np.float32([1.5, -1, 0, 4]), np.float32([1, -2, 0, 4]))
    assert e == stats.Error(
        count=4,
        non_finite=0,
        disagreeing=0,
        max_absolute=1,
        max_relative=0.5,
        rms_relative=math.sqrt(1.25 / 21),
        bias=1.5 / 7,
        magnitude_bias=-0.5 / 7,
    )
    assert stats.error(np.float32([1]), np.float32([0])).max_relative == np.inf
    assert stats.error(np.zeros(1), np.zeros(1)) == stats.Error(
        count=1,
        non_finite=0,
        disagreeing=0,
        max_absolute=0,
        max_relative=0,
        rms_relative=0,
        bias=0,
        magnitude_bias=0,
    )


def test_error_where_something_is_not_finite():
    nan, inf = np.nan, np.inf
    e = stats.error(
        np.float32([nan, nan, inf, -inf, nan, 3]), np.float32([nan, nan, inf, inf, -inf, 2])
    )
    assert (e.count, e.non_finite, e.disagreeing, e.max_absolute, e.bias) == (1, 5, 2, 1, 0.5)
    assert np.isnan(stats.error(np.float32([nan, 1]), np.float32([1, 1])).rms_relative)
    assert stats.error(np.float32([inf, 1]), np.float32([1, 1])).max_absolute == inf
    nothing = stats.error(np.float32([1]), np.float32([nan]))
    assert nothing.count == 0
    assert np.isnan(
        [
            nothing.max_absolute,
            nothing.max_relative,
            nothing.rms_relative,
            nothing.bias,
            nothing.magnitude_bias,
        ]
    ).all()


def test_truncation_is_a_negative_magnitude_bias(rng):
    """Rounding toward zero loses on both signs, nearest even on neither: plain bias hides what
    magnitude_bias shows (Q-7).
    """
    x = rng.standard_normal(100_000).astype(np.float32)
    truncated, nearest = (
        stats.error(cast.round_to(x, E4M3FN, rounding=r), x)
        for r in ("toward_zero", "nearest_even")
    )
    # on average half a step of 2^-3, relative to values spread over a binade: between 1/32 and 1/16
    assert -1 / 16 < truncated.magnitude_bias < -1 / 32
    assert abs(nearest.magnitude_bias) < 1e-3 > abs(truncated.bias)


# B-1, of which a float32 result has no further rounding
def test_error_of_a_gemm_is_within_its_bound(rng):
    x, w = (
        scaling.quantize(rng.standard_normal((n, 512)).astype(np.float32), E4M3FN) for n in (16, 24)
    )
    magnitude = (
        np.abs(scaling.dequantize(x).astype(np.float64))
        @ np.abs(scaling.dequantize(w).astype(np.float64)).T
    )
    gamma = 521 * 2.0**-24 / (1 - 521 * 2.0**-24)
    assert (
        0
        < stats.error(gemm.matmul(x, w, accumulate="f32"), gemm.matmul(x, w)).max_absolute
        <= gamma * magnitude.max()
    )


ONE = scaling.quantize(np.ones((2, 4), np.float32), E4M3FN)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: stats.statistics(np.ones((2, 4)), ONE), "float64"),
        (lambda: stats.exponents(np.ones((4, 2), np.float32), ONE), r"codes of shape \(2, 4\)"),
        (lambda: stats.statistics(np.ones((2, 4), np.int32), ONE), "int32"),
        (
            lambda: stats.statistics(
                np.ones((0, 4), np.float32), ONE._replace(codes=ONE.codes[:0])
            ),
            "at least one element",
        ),
        (
            lambda: stats.statistics(np.ones((2, 4), np.float32), ONE._replace(fmt=E8M0FNU)),
            "e8m0fnu",
        ),
        (
            lambda: stats.exponents(np.ones((2, 4), np.float32), ONE, lowest=3, highest=2),
            "lowest <= highest",
        ),
        (lambda: stats.error(np.ones(2), np.ones(3)), "one non-empty shape"),
        (lambda: stats.error(np.ones(0), np.ones(0)), "non-empty"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


SLAB_SHAPES = {
    "tensorwise": (7, 24),
    "rowwise": (7, 24),
    "blockwise_1x128": (256, 256),
    "blockwise_128x128": (256, 384),
    "mx_1x32": (64, 96),
}


def slab_measure(x, q):
    yield "amax", np.maximum, np.abs(x)
    yield "positive", np.add, x > 0
    yield (
        "scales",
        np.maximum,
        np.broadcast_to(scaling.spread(q.scale, x.shape, q.blocks), x.shape),
    )
    # integers: the order of the sum does not matter
    yield ("sum", np.add, np.round(x * 8).astype(np.float64))


@pytest.mark.parametrize("slab", [1, 200, 300, 1 << 20])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("granularity", SLAB_SHAPES)
def test_slabs_change_nothing(granularity, axis, slab, rng, monkeypatch):
    monkeypatch.setattr(stats, "SLAB", slab)
    x = rng.standard_normal(SLAB_SHAPES[granularity]).astype(np.float32)
    q = scaling.quantize(x, E4M3FN, granularity=granularity, axis=axis)
    each = stats.reduce_groups(x, q, slab_measure, per_group=True)
    assert {value.shape for value in each.values()} == {q.scale.shape}
    np.testing.assert_array_equal(each["amax"], scaling.amax(x, granularity, axis=axis))
    np.testing.assert_array_equal(each["scales"], q.scale)
    whole = stats.reduce_groups(x, q, slab_measure, per_group=False)
    assert whole["amax"] == np.abs(x).max()
    assert whole["positive"] == each["positive"].sum() == (x > 0).sum()
    assert whole["sum"] == each["sum"].sum() == np.round(x * 8).sum(dtype=np.float64)
    assert whole["positive"].dtype == each["positive"].dtype == np.int64


def test_a_scalar_is_one_group():
    x = np.float32(-3)
    assert (
        stats.reduce_groups(x, scaling.quantize(x, E4M3FN), slab_measure, per_group=True)["amax"]
        == 3
    )


@pytest.mark.parametrize("fill", [np.nan, np.inf])
def test_max_ulp_without_a_finite_number(fill):
    x = np.full((2, 4), fill, np.float32)
    found = stats.statistics(x, scaling.quantize(x, E4M3FN, granularity="rowwise"), per_group=True)
    np.testing.assert_array_equal(found.max_ulp.reshape(-1), [0, 0])
    assert found.non_finite.sum() == 8
