import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fp8ref.formats import BFLOAT16, E4M3FN, E5M2, E8M0FNU, QUANTIZED_FORMATS
from fp8ref.policy import POLICIES
from fp8ref.sim.quantize import cast, scaling


def test_amax_per_granularity(rng):  # S-2, S-6
    x = rng.standard_normal((128, 256)).astype(np.float32)
    assert scaling.amax(x, axis=-1) == np.abs(x).max()
    np.testing.assert_array_equal(
        scaling.amax(x, "rowwise", axis=1), np.abs(x).max(1, keepdims=True)
    )
    np.testing.assert_array_equal(
        scaling.amax(x, "rowwise", axis=0), np.abs(x).max(0, keepdims=True)
    )
    expected = [[np.abs(x[i, j : j + 128]).max() for j in (0, 128)] for i in range(128)]
    np.testing.assert_array_equal(scaling.amax(x, "blockwise_1x128", axis=1), expected)
    np.testing.assert_array_equal(
        scaling.amax(x, "blockwise_128x128", axis=1),
        [[np.abs(x[:, :128]).max(), np.abs(x[:, 128:]).max()]],
    )
    assert scaling.amax(x, "mx_1x32", axis=0).shape == (4, 256)


def test_a_tensor_without_axes_has_one_scale():  # S-6
    q = scaling.quantize(np.float32(-3), E4M3FN)
    assert (q.codes.shape, q.scale.shape) == ((), ())
    assert scaling.amax(np.float32(-3)) == np.float32(3)
    assert scaling.dequantize(q) == np.float32(-448) * q.scale_inv


def test_amax_propagates_nan_and_inf():  # S-2
    x = np.array([[1, np.nan], [-np.inf, 2]], np.float32)
    np.testing.assert_array_equal(scaling.amax(x, "rowwise", axis=1), [[np.nan], [np.inf]])


@pytest.mark.parametrize("largest", [2.0**-149, 1.5, np.inf, np.nan])
def test_an_amax_is_the_largest_integer_of_magnitudes_bits(largest, rng):  # S-2, M-11
    x = np.r_[np.float32(-largest), rng.uniform(-1, 1, 64).astype(np.float32) * np.float32(2**-149)]
    if np.isnan(largest):
        x = np.r_[x, np.float32(np.inf)]
    bits = rng.permutation(x).view(np.int32) & 0x7FFFFFFF
    np.testing.assert_array_equal(bits.max().view(np.float32), scaling.amax(x))


def test_a_fused_result_is_rounded_to_its_dtype_before_its_cast():  # M-11
    result = np.uint32(0x3EE83333).view(np.float32)
    in_registers = result.astype(ml_dtypes.bfloat16)
    assert in_registers.view(np.uint16) == 0x3EE8
    scales = scaling.Scales(np.float32(256), np.float32(2**-8))
    codes = [scaling.quantize_with(x, scales, E4M3FN).codes for x in (in_registers, result)]
    assert codes == [0x6E, 0x6F]


@pytest.mark.parametrize(
    "granularity", ["tensorwise", "rowwise", "blockwise_1x128", "blockwise_128x128", "mx_1x32"]
)
@pytest.mark.parametrize("axis", [0, 1])
def test_quantize_scales_each_group_by_its_own_amax(granularity, axis, rng):  # S-5, S-6
    x = (rng.standard_normal((128, 256)) * np.exp(rng.standard_normal((128, 256)) * 3)).astype(
        np.float32
    )
    q = scaling.quantize(x, E4M3FN, granularity=granularity, axis=axis)
    per_element = np.broadcast_to(scaling.spread(q.scale, x.shape, q.blocks), x.shape)
    # in plain float32 and ml_dtypes: product, clip, cast
    expected = np.clip(x * per_element, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(q.codes, expected)
    # every group reaches max: its largest element is 448 exactly
    assert (scaling.amax(cast.decode(q.codes, E4M3FN), granularity, axis=axis) == 448).all()


def test_quantize_specials():  # S-5
    inf = scaling.quantize(np.array([1, -2, np.inf], np.float32), E4M3FN)
    assert inf.scale == 0
    np.testing.assert_array_equal(inf.codes, [0x00, 0x80, 0x7F])
    np.testing.assert_array_equal(
        scaling.quantize(np.array([1, np.nan, 0], np.float32), E5M2).codes, [0x7F] * 3
    )
    np.testing.assert_array_equal(
        scaling.quantize(np.array([0.0, -0.0], np.float32), E4M3FN).codes, [0x00, 0x80]
    )


INF, NAN = np.inf, np.nan


@pytest.mark.parametrize(
    ("policy", "x", "scale", "codes"),
    [
        ("te_current", [1, -INF, 3], 1, [0x38, 0xFE, 0x44]),
        ("te_current", [1, NAN, 3], 1, [0x38, 0x7F, 0x44]),
        ("te_current", [0, -0.0, 0], 1, [0, 0x80, 0]),
        # 2^-149 * FLT_MAX = 2^-21: not mapped to max
        ("te_current", [2.0**-149, 0, 0], np.finfo(np.float32).max, [0, 0, 0]),
        ("te_block", [2.0**-149, 0, 0], 2.0**127, [0, 0, 0]),
        ("te_delayed", [0, NAN, 3], 1, [0, 0x7F, 0x44]),
        ("flax", [1, INF, 3], 1, [0x38, 0x7E, 0x44]),
        ("flax", [2.0**-126, 0, 0], INF, [0x7E, 0x7F, 0x7F]),  # scale_inv 0: x / 0
        ("msamp", [1, INF, -3], 1, [0x38, 0x7E, 0xC4]),
        ("msamp", [2.0**-126, 0, 0], INF, [0x7E, 0x7F, 0x7F]),  # 0 * Inf
    ],
)
def test_quantize_specials_of_other_policies(policy, x, scale, codes):  # S-10, S-11
    q = scaling.quantize(np.array(x, np.float32), E4M3FN, policy=policy)
    assert q.scale == np.float32(scale)
    np.testing.assert_array_equal(q.codes, codes)
    np.testing.assert_array_equal(q.scale_inv, scaling.scale_inv_from_scale(q.scale))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise", "mx_1x32"])
def test_quantize_is_quantize_with_the_scales_of_the_amax(policy, granularity, rng):  # S-5, S-9
    x = (
        (rng.standard_normal((8, 64)) * np.exp(3 * rng.standard_normal((8, 64))))
        .astype(ml_dtypes.bfloat16)
        .astype(np.float32)
    )
    q = scaling.quantize(x, E5M2, granularity=granularity, policy=policy)
    scales = scaling.scales_from_amax(scaling.amax(x, granularity), E5M2, policy)
    again = scaling.quantize_with(x, scales, E5M2, granularity=granularity, policy=policy)
    for found, expected in zip(again, q, strict=True):
        np.testing.assert_array_equal(found, expected)
    error = np.abs(scaling.dequantize(q).astype(np.float64) - x)
    # half a step of e5m2 is 1/8 of a normal value; 2^-17 a subnormal's; mx_floor clips to 57344
    # what is below 65536: 1/8 again
    assert (
        error
        <= np.maximum(
            np.abs(x) / 7.9, 2.0**-17 * 1.01 * scaling.spread(q.scale_inv, x.shape, q.blocks)
        )
    ).all()


def test_a_product_above_max_saturates():
    """amax * scale exceeds 448 by rounding for this amax; the code is max all the same (S-5)."""
    amax = np.float32(1.012004)
    assert amax * scaling.scale_from_amax(amax, E4M3FN) > 448
    assert scaling.quantize(amax[None], E4M3FN).codes == 0x7E


@given(arrays(np.float32, (3, 5), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_dequantize_is_near(x):  # S-8
    q = scaling.quantize(x, E4M3FN, granularity="rowwise", axis=1)
    # half a step of e4m3: 1/16 of a normal value's power of two, so 1/17 + rounding relative to it,
    # or 2^-10 of a subnormal, in units of scale_inv
    error = np.abs(scaling.dequantize(q).astype(np.float64) - x)
    assert (error <= np.maximum(np.abs(x) / 16.5, 2.0**-10 * 1.001 * q.scale_inv)).all()


def test_input_is_left_alone(rng):
    x = rng.standard_normal((4, 4)).astype(np.float32)
    before = x.copy()
    x.flags.writeable = False
    scaling.quantize(x, E4M3FN)
    np.testing.assert_array_equal(x, before)


ONE = np.ones((2, 2), np.float32)
QUANTIZED = scaling.quantize(ONE, E4M3FN)


def with_scales(scale):
    return scaling.quantize_with(
        ONE, scaling.Scales(np.float32(scale), np.float32(1 / scale)), E4M3FN
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        # S-7
        (lambda: scaling.quantize(np.zeros((0, 4), np.float32), E4M3FN), "at least one element"),
        (
            lambda: scaling.quantize(
                np.ones((64, 200), np.float32), E4M3FN, granularity="blockwise_1x128"
            ),
            "divisible by 128.*rowwise",
        ),
        (
            lambda: scaling.quantize(np.ones((2, 2), np.float32), E4M3FN, granularity="row"),
            "tensorwise",
        ),
        (lambda: scaling.quantize(np.ones((2, 2)), E4M3FN), "float64"),
        (lambda: scaling.quantize(np.ones((2, 2), ">f8"), E4M3FN), "byte order"),
        (
            lambda: scaling.quantize(np.ones((2, 2), np.float32), BFLOAT16),
            "takes fmt e4m3fn, .*got bfloat16",
        ),
        (lambda: scaling.quantize(np.ones((2, 2), np.float32), E8M0FNU), "got e8m0fnu"),
        (lambda: scaling.quantize(np.ones((2, 2), np.float32), "e4m3"), "Did you mean 'e4m3fn'"),
        (lambda: scaling.scale_from_amax(np.float32(1), "e4m3"), "Did you mean 'e4m3fn'"),
        (
            lambda: scaling.amax(np.ones((2, 2), np.float32), "rowwise", axis=None),
            r"\[-2, 2\).*axis=None",
        ),
        (lambda: scaling.amax(np.ones((2, 2), np.float32), ["rowwise"]), "granularity is one of"),
        (
            lambda: scaling.amax(np.ones((2, 2), np.float32), "mxfp8"),
            "recipe 'mxfp8' has granularity mx_1x32; granularity is one of",
        ),
        (
            lambda: scaling.quantize(np.ones((2, 2), np.float32), E4M3FN, policy={}),
            "policy is a ScalePolicy",
        ),
        (lambda: with_scales(-1.0), "never negative; got -1"),
        (
            lambda: scaling.quantize_with(
                ONE, scaling.Scales(np.float64(1), np.float32(1)), E4M3FN
            ),
            "scale is float32",
        ),
        (lambda: scaling.dequantize(ONE), "is a Quantized; got ndarray"),
        (
            lambda: scaling.dequantize(QUANTIZED._replace(scale_inv=np.float32(-1))),
            "not negative; got -1",
        ),
        (lambda: scaling.dequantize(QUANTIZED._replace(scale_inv=np.float32(np.nan))), "NaN scale"),
        (
            lambda: scaling.dequantize(QUANTIZED._replace(scale_inv=np.ones((2, 1), np.float32))),
            r"shape \(\); got \(2, 1\)",
        ),
        (
            lambda: scaling.dequantize(QUANTIZED._replace(scale_inv=1.0)),
            "float32 arrays; got float",
        ),
        (
            lambda: scaling.scales_from_amax(ONE[0], E4M3FN, "te_delayed", previous=ONE),
            r"amax's shape, \(2,\)",
        ),
        (
            lambda: scaling.quantize(
                np.ones((2, 2), np.float32), E4M3FN, granularity="rowwise", axis=2
            ),
            r"\[-2, 2\)",
        ),
        (lambda: scaling.quantize(np.ones((2, 2), np.float32), E4M3FN, policy="te"), "torchao"),
        (
            lambda: scaling.quantize_with(
                np.ones((2, 2)), scaling.scales_from_amax(np.float32(1), E4M3FN), E4M3FN
            ),
            "float64",
        ),
        (
            lambda: scaling.quantize_with(
                np.ones((2, 2), np.float32),
                scaling.scales_from_amax(np.float32(1), E4M3FN),
                E4M3FN,
                granularity="rowwise",
            ),
            r"shape \(2, 1\); got \(\)",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_reading_back_under_an_infinite_amax():  # S-3, S-8
    """Scale 0, scale_inv Inf, codes 0 and NaN: every product is NaN, without a warning."""
    assert np.isnan(scaling.dequantize(scaling.quantize(np.float32([1, 0, np.inf]), E4M3FN))).all()


def test_a_thread_without_subnormals_is_refused():
    """Else a product below 2^-126 would be 0, without a word."""
    torch = pytest.importorskip("torch")
    x = np.full((4, 16), 2.0**-130, np.float32)
    q, wide = scaling.quantize(x, E4M3FN), x.astype(np.float64)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        calls = [
            lambda: scaling.dequantize(q),
            lambda: scaling.quantize(x, E4M3FN),
            lambda: scaling.amax(x),
        ]
        calls += [
            lambda: cast.encode(x, E8M0FNU),
            lambda: cast.decode(q.codes, E8M0FNU),
            *(lambda x=x: cast.round_to(x, BFLOAT16) for x in (x, wide)),
        ]
        assert not cast.encode(x, E4M3FN).any()  # by integers, where no subnormal of float32 counts
        for call in calls:
            with pytest.raises(
                ValueError, match=r"flushes them to zero.*torch\.set_flush_denormal\(False\)"
            ):
                call()
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_array_equal(scaling.amax(x), np.float32(2.0**-130))


def test_formats_have_names(rng):
    x = rng.standard_normal((4, 8)).astype(np.float32)
    for fmt in QUANTIZED_FORMATS.values():
        q, by_name = (scaling.quantize(x, f, granularity="rowwise") for f in (fmt, fmt.name))
        assert by_name.fmt is fmt
        np.testing.assert_array_equal(by_name.codes, q.codes)
        np.testing.assert_array_equal(cast.decode(q.codes, fmt.name), cast.decode(q.codes, fmt))
        assert scaling.scale_from_amax(np.float32(3), fmt.name) == scaling.scale_from_amax(
            np.float32(3), fmt
        )
