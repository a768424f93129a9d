"""Quantizing what was dequantized: what comes back, and what a changed scale does to it."""

import numpy as np
import pytest
from hypothesis import strategies as st
from properties.domains import F32, caught, for_all, tensors

from fp8ref.formats import E4M3FN, E5M2, FP8_FORMATS
from fp8ref.sim.quantize import cast, scaling

formats = st.sampled_from(list(FP8_FORMATS.values()))


def again(q, policy):
    return scaling.quantize(scaling.dequantize(q), q.fmt, granularity=q.granularity, policy=policy)


@pytest.mark.parametrize("policy", ["torchao", "te_current", "te_delayed", "flax", "mx_floor"])
@for_all(50, x=tensors((2, 32), high=126), fmt=formats)
def test_codes_come_back(policy, x, fmt):
    """Finite tensors, 2^-39 <= amax < 2^127, policies that map amax to max (or above it, mx_floor):
    equal codes (S-5, S-8).

    scale, 1 / scale, their products with amax and with each code, and the next scale round once
    each: six roundings of 2^-24 move n * spacing by far less than half of one. The scale itself may
    change by an ulp or two.
    """
    q = scaling.quantize(
        x, fmt, granularity="mx_1x32" if policy == "mx_floor" else "tensorwise", policy=policy
    )
    np.testing.assert_array_equal(again(q, policy).codes, q.codes)


@pytest.mark.parametrize(
    "policy",
    ["torchao_pow2", "torchao_mask", "te_block", "msamp", "te_mxfp8", "mx_rceil", "mx_floor"],
)
@for_all(50, x=tensors((2, 32), high=124), fmt=st.sampled_from([E4M3FN, E5M2]))
def test_values_come_back_under_powers_of_two(policy, x, fmt):
    """Finite tensors, 2^-39 <= amax < 2^125: equal values, bit for bit; codes only under mx_floor
    (S-4, S-8, S-14).
    """
    q = scaling.quantize(
        x,
        fmt,
        granularity="mx_1x32" if policy.startswith(("mx", "te_mx")) else "tensorwise",
        policy=policy,
    )
    np.testing.assert_array_equal(scaling.dequantize(again(q, policy)), scaling.dequantize(q))


def test_scales_need_not_come_back():
    """Of integers, 11 is the first amax whose scale changes by requantizing, by an ulp (S-1,
    S-3).
    """
    integers = np.arange(1, 12).astype(F32)[:, None]
    q = scaling.quantize(integers, E4M3FN, granularity="rowwise")
    changed = again(q, "torchao").scale != q.scale
    assert integers[changed].tolist() == [11]


def test_codes_need_not_come_back_under_powers_of_two():
    """The amax just above 1.75 rounds down to 1.75, which doubles the scale (S-4)."""
    q = scaling.quantize(np.array([np.nextafter(F32(1.75), F32(2))]), E4M3FN, policy="torchao_mask")
    twice = again(q, "torchao_mask")
    assert (q.scale, twice.scale) == (128, 256)
    assert (q.codes, twice.codes) == (0x76, 0x7E)


@for_all(
    50,
    x=tensors((2, 32)),
    exponent=st.integers(-30, 30),
    mantissa=st.floats(1, 2, width=32),
    fmt=formats,
)
def test_equal_scales_give_equal_codes(x, exponent, mantissa, fmt):
    """Any finite tensor and any scale in [2^-30, 2^31]: by the *same* scale, saturated or not,
    codes come back (S-5, S-8).
    """
    scale = F32(mantissa * 2.0**exponent)
    scales = scaling.Scales(scale, scaling.scale_inv_from_scale(scale))
    q = scaling.quantize_with(x, scales, fmt)
    np.testing.assert_array_equal(
        scaling.quantize_with(scaling.dequantize(q), scales, fmt).codes, q.codes
    )


def by(scale, x):
    q = scaling.quantize_with(
        np.atleast_1d(F32(x)), scaling.Scales(F32(scale), F32(1) / F32(scale)), E4M3FN
    )
    return scaling.dequantize(q)


def test_a_changed_scale_rounds_again():
    """Numbers of e4m3, as scale 1 leaves them, under scale 3/2: 1.125 is the least normal one in
    [1, 2) that changes (S-5, S-8).
    """
    numbers = cast.decode(np.arange(0x38, 0x40, dtype=np.uint8), E4M3FN)
    np.testing.assert_array_equal(by(1, numbers), numbers)
    # more than roundings of float32
    changed = numbers[np.abs(by(1.5, numbers) - numbers) > 2.0**-10]
    assert changed[0] == 1.125
    assert by(1.5, 1.125) == F32(1.75) * (F32(1) / F32(1.5))


def test_two_roundings_are_not_one():
    """Why operands are quantized again from the high-precision tensor (L-3): of integers, 17 is the
    first that scale 1 spoils for 3/2.
    """
    integers = np.arange(1, 18).astype(F32)
    differ = by(1.5, by(1, integers)) != by(1.5, integers)
    assert integers[differ].tolist() == [17]


def test_two_axes_are_not_one():
    """Quantized along its rows and then its columns, a tensor is not what its columns alone give; 2
    x 2, and nothing above 3 (L-3).
    """
    x = np.array([[1, 1], [2, 3]], F32)
    rows = scaling.dequantize(scaling.quantize(x, E4M3FN, granularity="rowwise", axis=1))
    columns, both = (
        scaling.quantize(v, E4M3FN, granularity="rowwise", axis=0).codes for v in (x, rows)
    )
    assert columns.tolist() == [[0x76, 0x71], [0x7E, 0x7E]]
    assert both.tolist() == [[0x77, 0x71], [0x7E, 0x7E]]


def test_planted_faults_are_caught(monkeypatch):
    """Codes of tensors that are 7 % too large."""

    def larger(x, scale, fmt, blocks):
        return cast.encode(x * scaling.spread(scale, x.shape, blocks) * F32(1.07), fmt)

    monkeypatch.setattr(scaling, "_compiled_encode", larger)
    assert caught(test_codes_come_back, policy="torchao")
    assert caught(test_values_come_back_under_powers_of_two, policy="torchao_mask")
    assert caught(test_equal_scales_give_equal_codes)
