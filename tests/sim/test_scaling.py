from fractions import Fraction

import exact
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.policy import POLICIES
from fp8ref.sim import cast, scaling

AMAX_BF16 = np.arange(0x7F81, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)  # 0 to Inf, one NaN
TORCH = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def torchao_scale(amax, fmt, pow2=False):
    from torchao.float8.float8_utils import amax_to_scale

    return amax_to_scale(torch.from_numpy(amax), TORCH[fmt.name], round_scales_to_power_of_2=pow2).numpy()


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_scale_is_the_correctly_rounded_quotient_for_every_bf16_amax(fmt):  # S-3
    amax = AMAX_BF16[(AMAX_BF16 >= 1e-12) & np.isfinite(AMAX_BF16)]
    expected = [exact.rn32(Fraction(int(fmt.max)) / Fraction(float(a))) for a in amax]
    np.testing.assert_array_equal(scaling.scale_from_amax(amax, fmt), expected)


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
@pytest.mark.parametrize("policy", ["torchao", "torchao_pow2"])
def test_scale_equals_torchao(fmt, policy, rng):  # S-3, S-4, R-1
    random = rng.integers(0, 0x7F800001, 1 << 21, dtype=np.uint32).view(np.float32)
    amax = np.concatenate([AMAX_BF16, random])
    np.testing.assert_array_equal(scaling.scale_from_amax(amax, fmt, policy), torchao_scale(amax, fmt, policy == "torchao_pow2"))


def test_special_amax():  # S-3
    amax = np.array([0, 1e-45, 1e-13, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(scaling.scale_from_amax(amax, E4M3FN), np.float32([447999985582080] * 3 + [0, np.nan]))
    np.testing.assert_array_equal(scaling.scale_from_amax(amax, E4M3FN, "torchao_mask"), np.float32([2.0**48] * 3 + [0, np.nan]))
    np.testing.assert_array_equal(scaling.scale_from_amax(amax, E4M3FN, "torchao_pow2"), np.float32([2.0**48] * 3 + [0, np.nan]))
    np.testing.assert_array_equal(scaling.scale_inv_from_scale(np.float32([0, np.nan, 2])), np.float32([np.inf, np.nan, 0.5]))  # S-1


def test_mask_is_the_largest_power_of_two_not_above_the_scale(rng):  # S-4
    amax = np.abs(rng.standard_normal(10000).astype(np.float32)) * 1e5
    scale, masked = scaling.scale_from_amax(amax, E5M2), scaling.scale_from_amax(amax, E5M2, "torchao_mask")
    assert (np.frexp(masked)[0] == 0.5).all()
    assert ((masked <= scale) & (scale < 2 * masked)).all()


def test_exp2_log2_differs_from_mask_only_a_few_ulps_below_powers_of_two():  # S-4
    same = scaling.scale_from_amax(AMAX_BF16, E4M3FN, "torchao_pow2"), scaling.scale_from_amax(AMAX_BF16, E4M3FN, "torchao_mask")
    np.testing.assert_array_equal(*same)
    # 448 / amax just below 2^40: a minimal f32 amax on which the two part
    amax = np.nextafter(np.float32(448 * 2.0**-40), np.float32(1))
    assert scaling.scale_from_amax(amax, E4M3FN, "torchao_mask") == 2.0**39
    assert scaling.scale_from_amax(amax, E4M3FN, "torchao_pow2") == 2.0**40


def test_exceptions_of_exp2_log2_equal_torchao_around_every_power_of_two():  # S-4
    k = np.arange(-110, 48)
    near = (448 * 2.0 ** -k[:, None]).astype(np.float32).view(np.int32) + np.arange(-100, 101)
    amax = near.astype(np.int32).view(np.float32).ravel()
    np.testing.assert_array_equal(scaling.scale_from_amax(amax, E4M3FN, "torchao_pow2"), torchao_scale(amax, E4M3FN, True))


def test_amax_per_granularity(rng):  # S-2, S-6
    x = rng.standard_normal((128, 256)).astype(np.float32)
    assert scaling.amax(x, axis=-1) == np.abs(x).max()
    np.testing.assert_array_equal(scaling.amax(x, "rowwise", axis=1), np.abs(x).max(1, keepdims=True))
    np.testing.assert_array_equal(scaling.amax(x, "rowwise", axis=0), np.abs(x).max(0, keepdims=True))
    expected = [[np.abs(x[i, j : j + 128]).max() for j in (0, 128)] for i in range(128)]
    np.testing.assert_array_equal(scaling.amax(x, "blockwise_1x128", axis=1), expected)
    np.testing.assert_array_equal(scaling.amax(x, "blockwise_128x128", axis=1), [[np.abs(x[:, :128]).max(), np.abs(x[:, 128:]).max()]])
    assert scaling.amax(x, "mx_1x32", axis=0).shape == (4, 256)


def test_amax_propagates_nan_and_inf():  # S-2
    x = np.array([[1, np.nan], [-np.inf, 2]], np.float32)
    np.testing.assert_array_equal(scaling.amax(x, "rowwise", axis=1), [[np.nan], [np.inf]])


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise", "blockwise_1x128", "blockwise_128x128", "mx_1x32"])
@pytest.mark.parametrize("axis", [0, 1])
def test_quantize_scales_each_group_by_its_own_amax(granularity, axis, rng):  # S-5, S-6
    x = (rng.standard_normal((128, 256)) * np.exp(rng.standard_normal((128, 256)) * 3)).astype(np.float32)
    q = scaling.quantize(x, E4M3FN, granularity=granularity, axis=axis)
    per_element = np.broadcast_to(scaling.spread(q.scale, x.shape, granularity, axis), x.shape)
    # in plain float32 and ml_dtypes: product, clip, cast
    expected = np.clip(x * per_element, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(q.codes, expected)
    # every group reaches max: its largest element is 448 exactly
    assert (scaling.amax(cast.decode(q.codes, E4M3FN), granularity, axis=axis) == 448).all()


def test_quantize_specials():  # S-5
    inf = scaling.quantize(np.array([1, -2, np.inf], np.float32), E4M3FN)
    assert inf.scale == 0
    np.testing.assert_array_equal(inf.codes, [0x00, 0x80, 0x7F])
    np.testing.assert_array_equal(scaling.quantize(np.array([1, np.nan, 0], np.float32), E5M2).codes, [0x7F] * 3)
    np.testing.assert_array_equal(scaling.quantize(np.array([0.0, -0.0], np.float32), E4M3FN).codes, [0x00, 0x80])


def test_a_product_above_max_saturates():
    """amax * scale exceeds 448 by rounding for this amax; the code is max all the same (S-5)."""
    amax = np.float32(1.012004)
    assert amax * scaling.scale_from_amax(amax, E4M3FN) > 448
    assert scaling.quantize(amax[None], E4M3FN).codes == 0x7E


@given(arrays(np.float32, (3, 5), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_dequantize_is_near(x):  # S-8
    q = scaling.quantize(x, E4M3FN, granularity="rowwise", axis=1)
    # half a step of e4m3: 1/16 of a normal value's power of two, so 1/17 + rounding relative to it, or 2^-10 of a subnormal, in units of scale_inv
    error = np.abs(scaling.dequantize(q).astype(np.float64) - x)
    assert (error <= np.maximum(np.abs(x) / 16.5, 2.0**-10 * 1.001 * q.scale_inv)).all()


def test_input_is_left_alone(rng):
    x = rng.standard_normal((4, 4)).astype(np.float32)
    before = x.copy()
    x.flags.writeable = False
    scaling.quantize(x, E4M3FN)
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scaling.quantize(np.zeros((0, 4), np.float32), E4M3FN), "at least one element"),  # S-7
        (lambda: scaling.quantize(np.ones((64, 200), np.float32), E4M3FN, granularity="blockwise_1x128"), "divisible by 128.*rowwise"),
        (lambda: scaling.quantize(np.ones((2, 2), np.float32), E4M3FN, granularity="row"), "tensorwise"),
        (lambda: scaling.quantize(np.ones((2, 2)), E4M3FN), "float64"),
        (lambda: scaling.quantize(np.ones((2, 2), np.float32), E4M3FN, granularity="rowwise", axis=2), r"\[-2, 2\)"),
        (lambda: scaling.scale_from_amax(np.float32(-1), E4M3FN), "never negative"),
        (lambda: scaling.scale_from_amax(np.float64(1), E4M3FN), "float32"),
        (lambda: scaling.scale_from_amax(np.float32(1), E4M3FN, "te"), "torchao"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_every_policy_has_its_own_name():
    assert all(name == policy.name for name, policy in POLICIES.items())
