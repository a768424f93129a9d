"""A failure's message alone says what to repair."""

import re

import ml_dtypes
import numpy as np
import pytest

from fp8ref.conformance import require
from fp8ref.conformance.kit.arrays import as_numpy
from fp8ref.formats import E4M3FN, E4M3FNUZ, E5M2, E8M0FNU
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scales import scales_from_amax


def said(call) -> str:
    with pytest.raises(AssertionError) as raised:
        call()
    return str(raised.value)


def test_the_whole_message():
    x = np.float32([[0.3, 1.0625, 7.25], [1e9, 2.0**-10, np.nan]])
    found = cast.encode(x, E4M3FN, rounding="nearest_away")
    assert said(lambda: require.require_cast(x, found, E4M3FN)) == (
        "3 of 6 codes of e4m3fn differ; the simplest:\n  input     float32 0.0009765625, bits "
        "3A800000, at [1, 1] (tie)\n  expected  0x00 (0)\n  got       0x01 (0.001953125)\n  "
        "rule      rounded once, to the nearest number, and of two to the one with the even "
        "code (C-1, C-2)\n  All codes are what rounding nearest_away gives."
    )


@pytest.mark.parametrize(
    ("x", "found", "fmt", "how", "says"),
    [
        (
            np.float32([449]),
            0x7F,
            E4M3FN,
            {},
            r"expected  0x7E \(448\)\n.*got       0x7F \(NaN\)\n.*saturating.*C-3",
        ),
        (
            np.float32([np.inf]),
            0x7C,
            E5M2,
            {},
            r"infinite.*\n.*0x7B \(57344\).*\n.*0x7C \(inf\)\n.*C-3.*\n.*not saturating",
        ),
        (np.float32([1e9]), 0x7B, E5M2, {"saturate": False}, r"becomes Inf \(C-4\)"),
        (np.float32([1e9]), 0x7E, E4M3FN, {"saturate": False}, r"becomes NaN \(C-4\)"),
        (np.float32([np.nan]), 0x00, E4M3FN, {}, r"\(NaN\)\n.*expected  0x7F.*\n.*\n.*C-5"),
        (
            np.float32([-0.0]),
            0x00,
            E4M3FN,
            {},
            r"-0, bits 80000000.*\(zero\)\n.*expected  0x80 \(-0\).*\n.*\n.*keeps its sign "
            r"\(C-6\)\n.*losing the sign",
        ),
        (
            np.float32([-1e-9]),
            0x80,
            E4M3FNUZ,
            {},
            r"\(underflow\)\n.*expected  0x00.*\n.*0x80 \(NaN\)\n.*an underflow is \+0 \(C-6\)",
        ),
        (
            np.float32([2.0**-8 * 1.1]),
            0x00,
            E4M3FN,
            {},
            r"\(subnormal\).*\n.*\n.*\n.*kept \(F-1\)\n.*flushing subnormals",
        ),
        (np.float16([1.0625]), 0x39, E4M3FN, {}, r"float16 1.0625, bits 3C40, at \[0\] \(tie\)"),
        (
            np.float64([1.0625 + 2.0**-40]),
            0x38,
            E4M3FN,
            {},
            r"float64 1.0625000000009095, bits 3FF1000000001000.*\n(.*\n)*.*rounding to float32 "
            r"first",
        ),
        (np.array([1.0625], ml_dtypes.bfloat16), 0x39, E4M3FN, {}, r"bfloat16 1.0625, bits 3F88"),
        (
            np.float32([3.0]),
            127 + 1,
            E8M0FNU,
            {},
            r"\(tie\)\n.*expected  0x81 \(4\)\n.*halfway upwards.*C-7".replace(
                "\\n.*halfway", "\\n.*\\n.*halfway"
            ),
        ),
        (
            np.float32([-3.0]),
            0x80,
            E8M0FNU,
            {},
            r"\(negative\)\n.*expected  0xFF \(NaN\)\n.*\n.*C-7",
        ),
    ],
)
def test_each_rule_is_named(x, found, fmt, how, says):
    message = said(lambda: require.require_cast(x, np.uint8([found]), fmt, **how))
    assert re.search(says, message), message


def test_right_casts_pass_and_nans_are_one():  # C-5
    x = np.float32([[1.0, np.nan], [-np.nan, 500]])
    require.require_cast(x, cast.encode(x, E4M3FN), E4M3FN)
    require.require_cast(x, np.uint8([[0x38, 0xFF], [0x7F, 0x7E]]), E4M3FN)
    require.require_cast(x, cast.encode(x, E4M3FN).view(ml_dtypes.float8_e4m3fn), E4M3FN)


def test_arrays_of_frameworks_are_taken():
    import jax.numpy as jnp
    import torch

    x = np.float32([1.0, 2.5, -3.0])
    require.require_cast(
        torch.from_numpy(x).bfloat16(), torch.from_numpy(x).to(torch.float8_e4m3fn), E4M3FN
    )
    require.require_cast(
        jnp.asarray(x).astype("bfloat16"), jnp.asarray(x).astype("float8_e4m3fn"), E4M3FN
    )
    assert as_numpy(torch.from_numpy(x).bfloat16()).dtype == np.float32


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda x: require.require_cast(x, np.uint8([1]), E4M3FN),
            r"of the input's shape \(2,\); got uint8 \(1,\)",
        ),
        (
            lambda x: require.require_cast(x, np.float32([1, 1]), E4M3FN),
            "codes are uint8 or an FP8 dtype",
        ),
        (
            lambda x: require.require_cast(x, np.uint8([1, 1]), E4M3FN, rounding="stochastic"),
            "a rounding that gives each input one code is one of",
        ),
        (
            lambda x: require.require_quantized(x, np.uint8([1, 1]), E4M3FN),
            "quantized codes need scales",
        ),
        (
            lambda x: require.require_quantized(
                x, np.uint8([1, 1]), E4M3FN, scale=np.float32([1, 1])
            ),
            "scale is float32 with 1 elements",
        ),
        (
            lambda x: require.require_quantized(
                x, np.uint8([1, 1]), E4M3FN, inverses=require.Inverses(e8m0=np.uint8(1))
            ),
            "e8m0 needs a policy with e8m0 scales",
        ),
        (
            lambda x: require.require_quantized(x, np.uint8([1, 1]), E8M0FNU, scale=np.float32(1)),
            "quantize takes fmt e4m3fn, e5m2",
        ),
        (lambda x: require.require_scales(-x, x, E4M3FN), "is never negative"),
    ],
)
def test_misuse_is_a_value_error(call, says):
    with pytest.raises(ValueError, match=says):
        call(np.float32([1, 2]))


def test_scales():
    amax = np.float32([[1.0, 448.0], [0.0, 3.0]])
    right = scales_from_amax(amax, E4M3FN, "torchao")
    require.require_scales(amax, right.scale, E4M3FN)
    require.require_scales(amax, right.scale_inv, E4M3FN, made="scale_inv")
    message = said(
        lambda: require.require_scales(
            amax, scales_from_amax(amax, E4M3FN, "te_current").scale, E4M3FN
        )
    )
    assert message.splitlines() == [
        "1 of 4 scales to e4m3fn differ; the simplest:",
        "  input     amax 0, bits 00000000, at [1, 0] (zero)",
        "  expected  57CBBA10 (4.48e+14)",
        "  got       3F800000 (1)",
        "  rule      policy torchao: RN32(max / amax), amax at least 1e-12 (S-3)",
    ]
    assert "policy te_current gives scale 1 for such an amax (S-9)" in said(
        lambda: require.require_scales(amax, right.scale, E4M3FN, policy="te_current")
    )


def test_a_quantized_tensor_scales_first_then_codes():
    x = np.float32([[1.0, 0.5], [3.0, 0.25]])
    q = scaling.quantize(x, E4M3FN, granularity="rowwise")
    require.require_quantized(
        x,
        q.codes,
        E4M3FN,
        scale=q.scale.reshape(-1),
        inverses=require.Inverses(scale_inv=q.scale_inv),
        granularity="rowwise",
    )
    message = said(
        lambda: require.require_quantized(
            x, q.codes ^ 1, E4M3FN, scale=q.scale * np.float32([[1], [2]]), granularity="rowwise"
        )
    )
    assert "scale [1, 0], of amax 40400000 (3) (in range)" in message
    codes = q.codes.copy()
    codes[1, 1] += 1
    message = said(
        lambda: require.require_quantized(x, codes, E4M3FN, scale=q.scale, granularity="rowwise")
    )
    assert "element [1, 1], 0.25, under scale 149.33333" in message
    assert (
        "RN32(x * scale) = 37.333332, clipped to 448, cast to nearest even (S-5). 1 of 4 codes "
        "differ." in message
    )
    message = said(
        lambda: require.require_quantized(
            x,
            codes,
            E4M3FN,
            inverses=require.Inverses(
                scale_inv=scaling.quantize(x, E4M3FN, policy="flax").scale_inv
            ),
            policy="flax",
        )
    )
    assert "RN32(x / scale_inv)" in message
    assert "S-13" in message


def test_large_arrays_are_compared_by_the_compiled_kernels():
    x = np.random.default_rng(0).standard_normal((300, 300)).astype(np.float32)
    q = scaling.quantize(x, E4M3FN)
    require.require_quantized(x, q.codes, E4M3FN, scale=q.scale)
    require.require_cast(x, cast.encode(x, E4M3FN), E4M3FN)
    assert "90000 of 90000 codes" in said(
        lambda: require.require_cast(x, cast.encode(x, E4M3FN) ^ 0x80, E4M3FN)
    )


def test_a_single_number_that_is_wrong():
    assert "got       0x39 (1.125)" in said(
        lambda: require.require_cast(np.float32(1), np.uint8(0x39), E4M3FN)
    )


def test_codes_whose_dtype_names_another_format():
    x = np.float32([1.0, 2.0])
    codes = cast.encode(x, E4M3FN)
    require.require_cast(x, codes.view(ml_dtypes.float8_e4m3fn), E4M3FN)
    with pytest.raises(
        ValueError, match="codes of e4m3fn are uint8 or of its own dtype; got float8_e5m2"
    ):
        require.require_cast(x, codes.view(ml_dtypes.float8_e5m2), E4M3FN)
    with pytest.raises(
        ValueError, match="codes of e8m0fnu are uint8 or of its own dtype; got float8_e4m3fn"
    ):
        require.require_scales(
            x, codes.view(ml_dtypes.float8_e4m3fn), E4M3FN, policy="mx_floor", made="e8m0"
        )


def test_what_is_no_answer_to_whether_it_saturates():
    with pytest.raises(ValueError, match="saturate is True or False; got 'no'"):
        require.require_cast(np.float32([1]), np.uint8([0x38]), E4M3FN, saturate="no")


def test_names_of_formats():
    x, codes = np.float32([1, 2]), np.uint8([0x38, 0x40])
    require.require_cast(x, codes, "e4m3fn")
    assert said(lambda: require.require_cast(x, codes ^ 1, "e4m3fn")) == said(
        lambda: require.require_cast(x, codes ^ 1, E4M3FN)
    )


def test_elements_that_are_masked():
    x = np.ma.masked_array(np.float32([1, 500]), [False, True])
    with pytest.raises(ValueError, match="every element counts; got an array with 1 masked ones"):
        require.require_cast(x, np.uint8([0x38, 0]), E4M3FN)
    require.require_cast(np.ma.masked_array(np.float32([1])), np.uint8([0x38]), E4M3FN)


def test_require_dequantized():  # S-8
    x = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
    q = scaling.quantize(x, E4M3FN, granularity="blockwise_1x128")
    values = scaling.dequantize(q)
    options = {"granularity": "blockwise_1x128"}
    require.require_dequantized(q.codes, values, "e4m3fn", scale_inv=q.scale_inv, **options)
    require.require_dequantized(q.codes, cast.decode(q.codes, E4M3FN), E4M3FN)
    require.require_dequantized(
        q.codes, values.astype(ml_dtypes.bfloat16), E4M3FN, scale_inv=q.scale_inv, **options
    )
    wrong = values.copy()
    wrong[1, 5] *= 2
    with pytest.raises(AssertionError, match=r"1 of 768 numbers of e4m3fn differ; the first:") as e:
        require.require_dequantized(q.codes, wrong, E4M3FN, scale_inv=q.scale_inv, **options)
    assert "at [1, 5]" in str(e.value)
    with pytest.raises(ValueError, match="scale_inv is float32 with 6 elements"):
        require.require_dequantized(q.codes, values, E4M3FN, scale_inv=q.scale_inv[:1], **options)
    mx = scaling.quantize(x, E4M3FN, granularity="mx_1x32", policy="mx_floor")
    e8m0 = cast.encode(mx.scale_inv, "e8m0fnu").view(ml_dtypes.float8_e8m0fnu)
    require.require_dequantized(
        mx.codes, scaling.dequantize(mx), E4M3FN, scale_inv=e8m0, granularity="mx_1x32"
    )
    nv = scaling.quantize(x, "e2m1fn", granularity="nvfp4_1x16", policy="te_nvfp4")
    require.require_dequantized(
        nv.codes,
        scaling.dequantize(nv),
        "e2m1fn",
        scale_inv=nv.scale_inv,
        tensor_scale_inv=nv.tensor_scale_inv,
        granularity="nvfp4_1x16",
    )


def amax_of_many() -> np.ndarray:
    """Amaxes near 1, around powers of two, and those that have rules of their own."""
    near = np.random.default_rng(0).uniform(0.01, 1000, 400)
    special = [0, np.inf, np.nan, 2.0**-149, 1e-30, 3e38]
    return np.concatenate([near, 2.0 ** np.arange(-20, 20), special]).astype(np.float32)


def codes_of(quotient: np.ndarray, add: int) -> np.ndarray:
    """e8m0 codes of float32 numbers by their bits, after ``add``."""
    codes = np.clip((quotient.view(np.uint32) + np.uint32(add)) >> 23, 0, 254)
    return np.where(np.isnan(quotient), 255, codes).astype(np.uint8)


def in_bfloat16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize(
    ("scales", "policy", "made", "says"),
    [
        (
            lambda a: codes_of(a / np.float32(448), 0x400000),
            "te_mxfp8",
            "e8m0",
            "All scales are those of policy te_mxfp8, but its scale_inv is amax / max as the "
            "nearest power of two.",
        ),
        (
            lambda a: np.float32(448) / np.maximum(in_bfloat16(a), np.float32(1e-12)),
            "torchao",
            "scale",
            "All scales are those of policy torchao, but its amax is rounded to bfloat16.",
        ),
        (
            lambda a: in_bfloat16(np.maximum(a, np.float32(1e-10)) / np.float32(448)),
            "vllm",
            "scale_inv",
            "All scales are those of policy vllm, but its scale_inv is rounded to bfloat16.",
        ),
        (
            lambda a: np.maximum(a, np.float32(2e-7)) / np.float32(448),
            "vllm",
            "scale_inv",
            "All scales are those of policy vllm, but its eps is 2e-07, not 1e-10.",
        ),
        (
            lambda a: codes_of(a / np.float32(448), 0x7FFFFF),
            "mx_floor",
            "e8m0",
            "All scales are those of policy mx_floor, but its scale_inv is amax / max.",
        ),
        (
            lambda a: cast.encode(scales_from_amax(a, E4M3FN, "mx_ceil").scale_inv, E8M0FNU),
            "te_mxfp8",
            "e8m0",
            "All scales are those of policy mx_ceil.",
        ),
    ],
)
def test_scales_that_differ_are_explained(scales, policy, made, says):  # S-9, S-14, S-16
    amax = amax_of_many()
    with np.errstate(all="ignore"):
        found = scales(amax)
        message = said(
            lambda: require.require_scales(amax, found, E4M3FN, policy=policy, made=made)
        )
    assert says in message


def test_scales_without_a_cause_have_no_note():
    amax = amax_of_many()
    with np.errstate(all="ignore"):
        found = np.float32(448) / amax**2
        message = said(lambda: require.require_scales(amax, found, E4M3FN))
    assert "scales are those of" not in message
