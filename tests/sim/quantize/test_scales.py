import dataclasses
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers.gemm import exact

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.policy import POLICIES
from fp8ref.sim.quantize import scales

# 0 to Inf, one NaN
AMAX_BF16 = np.arange(0x7F81, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
TORCH = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
formats = pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)


def torchao_scale(amax, fmt, pow2=False):
    from torchao.float8.float8_utils import amax_to_scale

    return amax_to_scale(
        torch.from_numpy(amax), TORCH[fmt.name], round_scales_to_power_of_2=pow2
    ).numpy()


@formats
def test_scale_is_the_correctly_rounded_quotient_for_every_bf16_amax(fmt):  # S-3
    amax = AMAX_BF16[(AMAX_BF16 >= 1e-12) & np.isfinite(AMAX_BF16)]
    expected = [exact.rn32(Fraction(int(fmt.max)) / Fraction(float(a))) for a in amax]
    np.testing.assert_array_equal(scales.scale_from_amax(amax, fmt), expected)


@formats
@pytest.mark.parametrize("policy", ["torchao", "torchao_pow2"])
def test_scale_equals_torchao(fmt, policy, rng):  # S-3, S-4, R-1
    """Every bfloat16 amax, 2^21 random ones, and every 1021st of all float32 amaxes."""
    random = rng.integers(0, 0x7F800001, 1 << 21, dtype=np.uint32).view(np.float32)
    strided = np.arange(0, 0x7F800001, 1021, dtype=np.uint32).view(np.float32)
    amax = np.concatenate([AMAX_BF16, random, strided])
    np.testing.assert_array_equal(
        scales.scale_from_amax(amax, fmt, policy),
        torchao_scale(amax, fmt, policy == "torchao_pow2"),
    )


def test_special_amax():  # S-3
    amax = np.array([0, 1e-45, 1e-13, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(
        scales.scale_from_amax(amax, E4M3FN), np.float32([447999985582080] * 3 + [0, np.nan])
    )
    np.testing.assert_array_equal(
        scales.scale_from_amax(amax, E4M3FN, "torchao_mask"),
        np.float32([2.0**48] * 3 + [0, np.nan]),
    )
    np.testing.assert_array_equal(
        scales.scale_from_amax(amax, E4M3FN, "torchao_pow2"),
        np.float32([2.0**48] * 3 + [0, np.nan]),
    )
    # S-1
    np.testing.assert_array_equal(
        scales.scale_inv_from_scale(np.float32([0, np.nan, 2])), np.float32([np.inf, np.nan, 0.5])
    )


def test_mask_is_the_largest_power_of_two_not_above_the_scale(rng):  # S-4
    amax = np.abs(rng.standard_normal(10000).astype(np.float32)) * 1e5
    scale, masked = (
        scales.scale_from_amax(amax, E5M2),
        scales.scale_from_amax(amax, E5M2, "torchao_mask"),
    )
    assert (np.frexp(masked)[0] == 0.5).all()
    assert ((masked <= scale) & (scale < 2 * masked)).all()


def test_exp2_log2_equals_mask_for_every_bf16_amax():  # S-4
    same = (
        scales.scale_from_amax(AMAX_BF16, E4M3FN, "torchao_pow2"),
        scales.scale_from_amax(AMAX_BF16, E4M3FN, "torchao_mask"),
    )
    np.testing.assert_array_equal(*same)


def test_the_exceptions_of_exp2_log2_are_these():  # S-4
    """All 7,404 normal scales at which torchao's own rounding is not the largest power of two
    below, among the 64 ulps below each 2^k.

    RN32(log2 s) = k needs k - log2 s at most half the spacing of float32 below k: 2^-24 times the
    power of two at or below |k|, k negative, or the power of two below it, k positive. s = 2^k (1 -
    n 2^-24) is n 2^-24 / ln 2 below: n <= ln 2 times that power.
    """
    from torchao.float8.float8_utils import _round_scale_down_to_power_of_2

    k = np.arange(-125, 129)
    below = np.ldexp(1 - np.arange(1, 65) * 2.0**-24, k[:, None]).astype(np.float32)
    assert np.isfinite(below).all()
    ours = scales.round_to_power_of_two(below, by_log2=True)
    np.testing.assert_array_equal(
        ours, _round_scale_down_to_power_of_2(torch.from_numpy(below)).numpy()
    )
    exceptions = ours != scales.round_to_power_of_two(below, by_log2=False)
    spacing = 2.0 ** np.floor(np.log2(np.maximum(np.where(k > 0, k - 1, -k), 1)))
    np.testing.assert_array_equal(
        exceptions.sum(1), np.where(np.isin(k, (0, 1)), 0, np.floor(np.log(2) * spacing))
    )
    assert (exceptions == (np.arange(1, 65) <= exceptions.sum(1, keepdims=True))).all()
    assert exceptions.sum() == 7404
    assert not (exceptions[:, -1]).any()


@pytest.mark.parametrize(("fmt", "count"), [(E4M3FN, 3444), (E5M2, 3311)], ids=str)
def test_the_amaxes_that_meet_an_exception(fmt, count):  # S-4
    """Of all float32 amaxes from 1e-12 upwards; max is 1.75 * 2^8 or 1.75 * 2^15, and the scale
    near a power of two when amax is near 1.75's.
    """
    near = (
        np.ldexp(1.75, np.arange(-45, 128))[:, None].astype(np.float32).view(np.int32)
        + np.arange(-128, 129)
    ).astype(np.int32)
    amax = near.ravel().view(np.float32)
    ours, mask = (
        scales.scale_from_amax(amax, fmt, policy) for policy in ("torchao_pow2", "torchao_mask")
    )
    assert (ours != mask).sum() == count
    assert (ours[ours != mask] == 2 * mask[ours != mask]).all()
    np.testing.assert_array_equal(ours, torchao_scale(amax, fmt, pow2=True))


def test_a_previous_scale_is_one_unless_given():  # S-11
    amax = np.array([0, np.inf, np.nan, 2], np.float32)
    given = np.array([5, 6, 7, 8], np.float32)
    for name in ("te_delayed", "flax"):
        np.testing.assert_array_equal(scales.scale_from_amax(amax, E4M3FN, name), [1, 1, 1, 224])
        np.testing.assert_array_equal(
            scales.scale_from_amax(amax, E4M3FN, name, previous=given), [5, 6, 7, 224]
        )
        np.testing.assert_array_equal(
            scales.scale_from_amax(amax, E4M3FN, name, previous=np.float32(3)), [3, 3, 3, 224]
        )
    np.testing.assert_array_equal(
        scales.scale_from_amax(amax, E4M3FN, "msamp", previous=given),
        [5, np.float32(1) / 6, 7, 128],
    )


def test_one_of_scale_and_scale_inv_is_the_reciprocal_of_the_other(rng):  # S-1, S-14, S-17
    """But for e8m0's 2^-127, of which the policy decides the scale, and policies that make both of
    the amax.
    """
    amax = np.concatenate(
        [AMAX_BF16, rng.integers(0, 0x7F800001, 1 << 16, dtype=np.uint32).view(np.float32)]
    )
    assert [p.name for p in POLICIES.values() if p.inverse != "reciprocal"] == ["sglang_cuda"]
    for name, policy in POLICIES.items():
        if policy.inverse != "reciprocal":
            continue
        scale, scale_inv = scales.scales_from_amax(amax, E4M3FN, policy)
        ordinary = np.full(amax.shape, True) if policy.e8m0 is None else (scale_inv > 2.0**-127)
        made, other = (scale_inv, scale) if policy.makes_scale_inv else (scale, scale_inv)
        with np.errstate(divide="ignore", over="ignore"):
            np.testing.assert_array_equal(
                other[ordinary], np.float32(1) / made[ordinary], err_msg=name
            )


@pytest.mark.parametrize("name", POLICIES)
def test_shapes_and_dtypes(name):
    for shape in ((), (3,), (2, 1, 4)):
        found = scales.scales_from_amax(np.ones(shape, np.float32), E4M3FN, name)
        assert [(v.shape, v.dtype) for v in found] == [(shape, np.float32)] * 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scales.scale_from_amax(np.float32(-1), E4M3FN), "amax is never negative"),
        (lambda: scales.scale_from_amax(np.float64(1), E4M3FN), "amax is float32"),
        (lambda: scales.scale_from_amax(np.float32(1), E4M3FN, "te"), "torchao"),
        (
            lambda: scales.scale_from_amax(np.float32(1), E4M3FN, previous=np.float32(2)),
            "'torchao' keeps no previous scale",
        ),
        (
            lambda: scales.scale_from_amax(
                np.float32(1), E4M3FN, "mx_floor", previous=np.float32(2)
            ),
            "keeps no previous scale",
        ),
        (
            lambda: scales.scale_from_amax(np.float32(1), E4M3FN, "flax", previous=2.0),
            "previous is float32",
        ),
        (
            lambda: scales.scale_from_amax(np.float32(1), E4M3FN, "flax", previous=np.float32(-2)),
            "previous is never negative",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "scale", [1j, "1", True, np.ma.masked_array(np.float32([1, 2]), [True, False])]
)
def test_what_is_no_scale_has_no_inverse(scale):
    with pytest.raises(ValueError, match=r"scales are float32|no masked arrays"):
        scales.scale_inv_from_scale(scale)


@pytest.mark.parametrize("policy", ["mx_rceil", "te_mxfp8", "te_mxfp8_2.13"])
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_quotients_below_the_table_have_the_least_exponent(policy, fmt):  # S-14
    """RN32(amax / max) up to 2^-127, whose j is below -127, down to the least subnormal number: k
    is -127 under every rule.
    """
    quotients = np.arange(1, 1 << 22, 4099, dtype=np.uint32).view(np.float32)
    quotients = np.append(quotients, np.float32(2.0**-127))
    amaxes = (quotients.astype(np.float64) * fmt.max).astype(np.float32)
    of_quotient = (amaxes.astype(np.float64) / fmt.max).astype(np.float32)
    amaxes = amaxes[of_quotient <= np.float32(2.0**-127)]
    assert len(amaxes) > 1000
    assert (scales.scales_from_amax(amaxes, fmt, policy).scale_inv == np.float32(2.0**-127)).all()


@pytest.mark.parametrize(
    "policy",
    [
        "torchao_adamw_fp8",
        "deepseek_v3",
        "deepseek_v3_2024",
        "deepseek_v3_ue8m0",
        "qwix",
        "qwix_bf16",
        "qwix_mx_0.1.8",
    ],
)
def test_a_nan_ratio_stays(policy):  # S-20
    found = scales.scales_from_amax(np.float32(np.nan), E4M3FN, policy)
    assert np.isnan(found.scale_inv)
    assert np.isnan(found.scale)


def test_a_nan_ratio_that_is_cut_becomes_infinite():  # S-20
    assert scales.scales_from_amax(np.float32(np.nan), E4M3FN, "qwix_mx").scale_inv == np.inf


@formats
def test_an_even_exponent_is_that_of_the_amax_rounded_to_the_format(fmt):  # S-14
    """The number halfway between the format's last one below 2 and 2 rounds up to 2, and its
    neighbor below does not."""
    tie = np.float32(2 - 2.0 ** -(fmt.mantissa_bits + 1))
    below = np.nextafter(tie, np.float32(0))
    at_two = scales.scales_from_amax(np.float32(2), fmt, "mx_even").scale_inv
    assert scales.scales_from_amax(tie, fmt, "mx_even").scale_inv == at_two
    assert scales.scales_from_amax(below, fmt, "mx_even").scale_inv == at_two / 2


def test_a_scale_is_rounded_to_its_dtype_after_the_factor(rng):  # S-20
    policy = dataclasses.replace(POLICIES["qwix_mx"], name="mine", power_of_two=None)
    amax = rng.uniform(1, 2, 1000).astype(np.float32)
    ratio = amax * np.float32(1 / 448)
    expected = (ratio * np.float32(60 / 31)).astype(ml_dtypes.bfloat16)
    found = scales.scales_from_amax(amax, E4M3FN, policy).scale_inv
    np.testing.assert_array_equal(found, expected.astype(np.float32))
