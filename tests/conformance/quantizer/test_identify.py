"""identify_quantizer finds granularity, axis, policy, returned scales and rounding; planted faults
by a minimal input.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax.linen import fp8_ops
from helpers.quantize import planted_quantizers as planted
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig

from fp8ref.conformance import identify_quantizer
from fp8ref.conformance.kit.subject import ConformanceError
from fp8ref.formats import E4M3FN, E5M2
from fp8ref.jax.quantize import scaling as jax_scaling
from fp8ref.policy import POLICIES
from fp8ref.sim.quantize import scaling
from fp8ref.spec.granularity import GRANULARITIES
from fp8ref.torch.quantize import scaling as torch_scaling


def torchao_tensorwise(x):
    return hp_tensor_to_float8_dynamic(x, torch.float8_e4m3fn, LinearMMConfig())


def torchao_rowwise(x):
    return hp_tensor_to_float8_dynamic(
        x,
        torch.float8_e4m3fn,
        LinearMMConfig(),
        scaling_granularity=ScalingGranularity.AXISWISE,
        axiswise_dim=-1,
        round_scales_to_power_of_2=True,
    )


def torchao_mx(mode):
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    return lambda x: to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode[mode])


def flax_quantizer(x):
    amax = jnp.max(jnp.abs(x)).astype(jnp.float32)
    scale = fp8_ops.compute_scale(amax, jnp.float32(1), 448.0)
    return fp8_ops.quantize(x, jnp.float8_e4m3fn, scale, x.dtype), scale


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("function", "framework", "policy", "granularity", "returns"),
    [
        (torchao_tensorwise, "torch", "torchao", "tensorwise", "scale"),
        (
            lambda x: torchao_tensorwise(x).to_original_precision(),
            "torch",
            "torchao",
            "tensorwise",
            None,
        ),
        (torchao_rowwise, "torch", "torchao_pow2", "rowwise", "scale"),
        (lambda x: torchao_mx("FLOOR")(x), "torch", "mx_floor", "mx_1x32", "scale_inv"),
        (lambda x: torchao_mx("RCEIL")(x), "torch", "mx_rceil", "mx_1x32", "scale_inv"),
        pytest.param(
            flax_quantizer, "jax", "flax", "tensorwise", "scale_inv", marks=pytest.mark.slow
        ),
        (jax.jit(flax_quantizer), "jax", "flax", "tensorwise", "scale_inv"),
        (
            lambda x: scaling.quantize(x, E4M3FN),
            "numpy",
            "torchao",
            "tensorwise",
            "scale and scale_inv",
        ),
        (
            jax.jit(lambda x: jax_scaling.quantize(x, E4M3FN)),
            "jax",
            "torchao",
            "tensorwise",
            "scale and scale_inv",
        ),
        (
            lambda x: torch_scaling.quantize(x, E4M3FN),
            "torch",
            "torchao",
            "tensorwise",
            "scale and scale_inv",
        ),
    ],
    ids=[
        "torchao",
        "dequantized",
        "rowwise",
        "floor",
        "rceil",
        "flax",
        "flax jit",
        "sim",
        "fp8ref.jax",
        "fp8ref.torch",
    ],
)
def test_the_libraries_by_name(function, framework, policy, granularity, returns):  # S-16
    found = identify_quantizer(
        function, E4M3FN, framework=framework, expect=policy, granularity=granularity
    )
    assert found.ok, found.message
    assert found.identified
    assert found.found["policy"] == policy
    assert not found.found["same_policies"]
    assert found.found["granularity"] == granularity
    assert found.found["returns"] == returns
    assert (found.found["rounding"], found.found["double_rounding"], found.found["subnormals"]) == (
        "nearest_even",
        None,
        "kept",
    )
    assert found.found["flushes_subnormal_scales"] == (policy == "flax")  # S-12


@pytest.mark.grid(9)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("given", ["both", "scale_inv", "values"])
def test_every_policy_of_the_simulator(policy, given):  # S-9, S-13 to S-16
    """With its scales each is told from all others; by values alone it is at least among those that
    they are the same by.
    """

    def function(x):
        q = scaling.quantize(x, E4M3FN, granularity="mx_1x32", policy=policy)
        return {"both": q, "scale_inv": (q.codes, q.scale_inv), "values": scaling.dequantize(q)}[
            given
        ]

    found = identify_quantizer(function, E4M3FN)
    names = [found.found["policy"], *found.found["same_policies"]]
    assert found.identified, found.message
    if given == "values":
        assert policy in names
    elif policy in ("te_current", "te_delayed"):  # kept at first is 1: one call cannot tell
        assert names == ["te_current", "te_delayed"]
    else:
        assert names == [policy]


@pytest.mark.grid(2)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("axis", [-1, 0])
def test_every_granularity_and_axis(granularity, axis):  # S-6
    def function(x):
        q = scaling.quantize(x, E5M2, granularity=granularity, axis=axis, policy="te_current")
        return q.codes, q.scale

    found = identify_quantizer(function, E5M2)
    either = granularity in ("tensorwise", "blockwise_128x128", "mx_32x32", "nvfp4_16x16")
    assert (found.found["granularity"], found.found["axis"], found.found["policy"]) == (
        granularity,
        None if either else axis,
        "te_current",
    )
    assert found.identified


MUTANTS = [
    (
        planted.ties_away,
        "torchao",
        {"rounding": "nearest_away"},
        "1.0625 next to 448, under scale 1 (float32 0x3F880000): got 0x39 = 1.125",
    ),
    (
        planted.truncation,
        "torchao",
        {"rounding": "toward_zero"},
        "got 0x39 = 1.125, expected 0x3A = 1.25 (S-5, C-2)",
    ),
    (
        planted.flushes_subnormals,
        "torchao",
        {"subnormals": "flushed"},
        "0.0078125 next to 448, under scale 1 (float32 0x3C000000): got 0x00 = 0",
    ),
    (planted.scales_by_exp2_log2, "torchao_mask", {"policy": "torchao_pow2"}, "x [1, 1] = "),
    (
        planted.scales_to_240,
        "torchao",
        {"policy": "torchao", "scales_to": 240.0},
        "x [1, 1] = 1 (float32 0x3F800000): got code 0x77 (240), scale 240, ",
    ),
    (
        planted.separate_scale_inv,
        "torchao",
        {"deviation": "its scale_inv is amax / max, not the reciprocal of the scale"},
        "scale_inv",
    ),
    (
        planted.divides,
        "torchao",
        {"policy": "torchao_adamw_fp8", "profiles": ["torchao-adamw-fp8"]},
        "expected code 0x7E (448), scale_inv",
    ),
    (
        planted.no_zero_amax,
        "torchao",
        {"policy": None, "deviation": "its eps is 0, not 1e-12"},
        "(float32 0x00800000): got code 0x7E (448), scale inf, ",
    ),
    (
        planted.reciprocal,
        "torchao",
        {"deviation": "its scale is max * (1 / amax), of two roundings, not max / amax"},
        "scale 298.66668701171875, exp",
    ),
    (
        planted.nearly_240,
        "torchao",
        {"deviation": "its scale is 0.53571427 times that policy's"},
        "scale 240, expected",
    ),
    (
        planted.forgets_abs,
        "torchao",
        {"policy": None, "deviation": "its amax is the largest element, without abs"},
        "x [1, 1] = -1 (float32 0xBF800000)",
    ),
    (
        planted.minus_min,
        "torchao",
        {"deviation": "its amax is the smallest element's magnitude, not the largest magnitude"},
        "x [1, 1] = 1 (float32 ",
    ),
    (
        planted.amax_in_bfloat16,
        "torchao",
        {
            "policy": None,
            "nearest_policy": "torchao",
            "deviation": "its amax is rounded to bfloat16",
        },
        "1.6210",
    ),
    (
        planted.scale_in_bfloat16,
        "torchao",
        {"deviation": "its scale is rounded to bfloat16"},
        "x [1, 1] = ",
    ),
    (
        planted.up_to_a_power_of_two,
        "torchao_pow2",
        {"deviation": "its scale is rounded up to a power of two, not down"},
        "scale 512",
    ),
    (
        planted.twice,
        "torchao",
        {"deviation": "its scale is 2 times that policy's, as of a max of 896, not 448"},
        "x [1, 1] = 1 ",
    ),
    (
        planted.one_and_a_half,
        "torchao",
        {"deviation": "its scale is 1.5 times that policy's"},
        "scale 672",
    ),
    (
        planted.stale(),
        "torchao",
        {"memory": 1, "policy": "torchao"},
        "after x of 1024s (float32 0x3F800000, 0x44800000): got code 0x2E, [1] 0.4375",
    ),
    (planted.stale(3), "torchao", {"memory": 3}, "as after x of ones alone (S-2)"),
]


LONG = (planted.no_zero_amax, planted.amax_in_bfloat16, planted.scale_in_bfloat16, planted.divides)
"""Mutants that many candidates are tried for."""


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("function", "expect", "differs", "said"),
    [pytest.param(*m, marks=pytest.mark.slow) if m[0] in LONG else m for m in MUTANTS],
)
def test_mutants_by_a_minimal_input(function, expect, differs, said):  # S-3 to S-5, S-16
    found = identify_quantizer(function, E4M3FN, expect=expect, name="mine")
    assert {key: found.found[key] for key in differs} == differs
    assert not found.ok
    assert said in found.message
    assert f"mine is not {expect!r}" in found.message


def test_one_cause_is_shown_once():  # S-3
    found = identify_quantizer(planted.forgets_abs, E4M3FN, expect="torchao", name="mine")
    assert len(found.differences) == 1
    assert "policy torchao, but its amax is the largest element, without abs" in found.summary


def test_a_cause_of_its_own_is_shown_beside_it():
    def twice_and_nan_of_zero(x):
        codes, scale = planted.twice(x)
        return codes, scale if x.any() else np.float32(np.nan)

    found = identify_quantizer(twice_and_nan_of_zero, E4M3FN, expect="torchao")
    assert [w.input for w in found.differences] == ["x [1, 1] = 1", "x [1, 1] = 0"]


@pytest.mark.grid(2)
@pytest.mark.parametrize("granularity", ["rowwise", "blockwise_128x128", "blockwise_1x128"])
def test_transposed_scales(granularity):  # S-6
    def function(x):
        q = scaling.quantize(x, E4M3FN, granularity=granularity)
        return q.codes, q.scale.T

    found = identify_quantizer(function, E4M3FN, expect="torchao")
    assert (
        found.found["policy"],
        found.found["returns"],
        found.found["scales"]["[1]"]["transposed"],
    ) == ("torchao", "scale", True)
    assert not found.ok
    shape = scaling.quantize(
        np.ones((256, 384), np.float32), E4M3FN, granularity=granularity
    ).scale.shape
    assert f"x [256, 384]: got scales {list(shape[::-1])}, expected {list(shape)}" in found.message
    assert "that returns scale, transposed" in identify_quantizer(function, E4M3FN).message


def test_places_and_shapes_of_what_is_returned_are_said():
    found = identify_quantizer(lambda x: planted.wrong_axis(x)[::-1], E4M3FN)
    said = next(f for f in found.findings if f.what == "returns")
    assert (said.text, said.evidence) == (
        "scale as [0] [1, 384]",
        "next to uint8 of x's shape, [256, 384], as [1]",
    )


def test_a_remainder_that_is_not_quantized():  # S-5, S-6
    def function(x):
        codes, scale = planted.torchao(x)
        codes[x.shape[0] // 32 * 32 :] = 0
        return codes, scale

    found = identify_quantizer(
        lambda x: planted.torchao(x) if x.shape[0] < 100 else function(x), E4M3FN, expect="torchao"
    )
    assert not found.ok
    assert "x[288, 0] = " in found.message
    assert "of x [299, 128]" in found.message
    assert "it gives other results for other tensors" in found.message


def test_another_formats_codes_alone():
    """A NumPy array, whose ``data`` is a buffer that float8 has none of."""
    found = identify_quantizer(
        lambda x: planted.torchao(x)[0].view(ml_dtypes.float8_e4m3fn), E4M3FN
    )
    assert (found.found["policy"], found.found["gives"]) == ("torchao", "float8_e4m3fn")


def test_the_wrong_axis():  # S-6
    found = identify_quantizer(planted.wrong_axis, E4M3FN, expect="torchao", axis=-1)
    assert (found.found["granularity"], found.found["axis"], found.found["policy"]) == (
        "rowwise",
        0,
        "torchao",
    )
    assert (
        "x [2, 2] of ones, x[0, 1] = 512 (float32 0x3F800000, 0x44000000): got code 0x7E (448) "
        "at element [0, 0], expected" in found.message
    )
    assert not found.ok
    assert identify_quantizer(planted.wrong_axis, E4M3FN, expect="torchao", axis=0).ok
    assert not identify_quantizer(
        planted.wrong_axis, E4M3FN, expect="torchao", granularity="tensorwise"
    ).ok


def test_the_minimal_input_shows_it():
    """The witness, asked by itself: where exp2 of log2 and the bit mask part."""
    found = identify_quantizer(planted.scales_by_exp2_log2, E4M3FN, expect="torchao_mask")
    x = np.array([[int(found.differences[0].bits[0], 16)]], np.uint32).view(np.float32)
    assert (
        planted.scales_by_exp2_log2(x)[1]
        == 2 * scaling.quantize(x, E4M3FN, policy="torchao_mask").scale
    )


def test_a_stale_amax_is_said_and_what_cannot_be_told():
    found = identify_quantizer(planted.stale(), E4M3FN)
    assert found.identified
    assert "its amax is stale, from 1 earlier call" in found.summary
    # at ordinary amaxes they are one
    assert {"te_current", "te_delayed"} <= set(found.found["same_policies"])
    assert any(
        "one call cannot show" in finding.evidence
        for finding in found.findings
        if finding.what == "policy"
    )


def test_codes_alone_tell_a_policy_as_far_as_codes_do():
    found = identify_quantizer(lambda x: planted.torchao(x)[0], E4M3FN)
    assert found.found["returns"] is None
    assert "torchao" in [found.found["policy"], *found.found["same_policies"]]
    assert found.identified


def test_a_scale_that_no_amax_has_a_part_in():
    found = identify_quantizer(planted.static, E4M3FN, expect="torchao")
    assert not found.ok
    assert "no scale of its own amax" in found.message


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda codes, scale: {"codes": codes, "scale": scale},
        lambda codes, scale: [scale, codes],
        lambda codes, scale: SimpleNamespace(qvalue=codes, scale=scale),
        lambda codes, scale: (codes, float(scale)),
        lambda codes, scale: (
            torch.from_numpy(codes).view(torch.float8_e4m3fn),
            torch.tensor(scale).reshape(1, 1),
        ),
        lambda codes, scale: (codes, np.full(codes.shape, scale)),
    ],
)
def test_ways_of_giving_codes_and_a_scale(wrap):
    found = identify_quantizer(lambda x: wrap(*planted.torchao(x)), E4M3FN)
    assert (found.found["policy"], found.found["returns"]) == ("torchao", "scale")


def test_an_amax_beside_the_codes():
    found = identify_quantizer(lambda x: (planted.torchao(x)[0], np.abs(x).max()), E4M3FN)
    assert found.found["returns"] == "amax"


def test_another_format_than_was_asked():
    found = identify_quantizer(lambda x: torch_scaling.quantize(x, E5M2), E4M3FN, expect="torchao")
    assert found.found["format"] == "e5m2"
    assert "got codes of e5m2, expected codes of e4m3fn (F-2)" in found.message


def wanders(x, calls=[]):  # noqa: B006
    calls.append(None)
    codes, scale = planted.torchao(x)
    return codes ^ np.uint8(len(calls) % 2), scale


def changes(x):
    found = planted.torchao(x)
    x *= 2
    return found


def refuses_nan(x):
    if np.isnan(x).any():
        raise FloatingPointError("no NaN here")
    return planted.torchao(x)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            refuses_nan,
            "mine raised FloatingPointError for .*: no NaN here. Call it on this input alone to "
            "find the cause. Its amax is nan, which S-9 allows",
        ),
        (
            lambda x: 1 / 0,
            "mine raised ZeroDivisionError for x numpy float32 .256, 384.: division by zero",
        ),
        (changes, "^mine changed its input, x numpy float32 .256, 384."),
        (
            wanders,
            r"mine does not repeat itself: after 20 calls with x random in .* for x\[0, 0\] = "
            r".*bits 0x",
        ),
        (
            lambda x: (planted.torchao(x)[0].T, 1.0),
            r"it gives uint8 \[384, 256\], float64 \[\]; a quantizer gives codes .*shape \[256, "
            r"384\]",
        ),
        (lambda x: (x.astype(np.int8), 1.0), "it gives int8"),
        (lambda x: None, "it gives NoneType"),
        (
            lambda x: (planted.torchao(x)[0], np.ones(7, np.float32)),
            r"its \[1\] have shape \[7\] .* but elements share scales as in tensorwise",
        ),
    ],
)
def test_what_is_no_quantizer(function, said):
    with pytest.raises(ConformanceError, match=said):
        identify_quantizer(function, E4M3FN, name="mine")


def test_what_a_user_can_do_wrong():
    with pytest.raises(ValueError, match="policy is a ScalePolicy or one of torchao"):
        identify_quantizer(planted.torchao, E4M3FN, expect="saturating")
    with pytest.raises(
        ValueError, match="an expected granularity or axis needs an expected policy"
    ):
        identify_quantizer(planted.torchao, E4M3FN, axis=0)


def test_a_quantizer_of_bfloat16_alone():
    def function(x):
        assert x.dtype == torch.bfloat16
        return torchao_rowwise(x)

    found = identify_quantizer(function, E4M3FN, expect="torchao_pow2")
    assert found.ok, found.message
    # of bfloat16 amaxes none tells exp2 of log2 from the bit mask (S-4)
    assert [found.found["policy"], *found.found["same_policies"]] == [
        "torchao_pow2",
        "torchao_mask",
    ]
    said = next(f for f in found.findings if f.what == "policy").text
    assert (
        said == "torchao_pow2, or the same by torchao_mask: no tensor of bfloat16 tells them apart"
    )


@pytest.mark.slow
def test_a_function_of_jax_is_given_arrays_of_jax_though_it_takes_numpys():
    assert identify_quantizer(flax_quantizer, E4M3FN).framework == "jax"


def test_values_in_bfloat16():
    def function(x):
        q = torch_scaling.quantize(x, E4M3FN, granularity="rowwise", axis=0)
        return (q.codes.float() * q.scale_inv).bfloat16()

    found = identify_quantizer(function, E4M3FN)
    assert found.identified, found.message
    assert (found.found["granularity"], found.found["axis"], found.found["gives"]) == (
        "rowwise",
        0,
        "bfloat16",
    )
    assert "torchao" in [found.found["policy"], *found.found["same_policies"]]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"granularity": "columns"}, "granularity is one of tensorwise"),
        ({"axis": 1}, "axis is -1, the last axis"),
    ],
)
def test_an_unknown_granularity_or_axis_is_refused(how, said):
    with pytest.raises(ValueError, match=said):
        identify_quantizer(lambda x: x, E4M3FN, expect="torchao", **how)


def test_what_is_no_function_is_refused():
    with pytest.raises(ValueError, match="what is asked is a function of an array; got int"):
        identify_quantizer(5, E4M3FN)
