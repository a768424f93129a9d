"""Planted kernels that are right in the first tensors asked, and wrong in another shape, dtype,
place or stride.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers.quantize import planted_kernels as planted
from helpers.quantize import planted_quantizers

from fp8ref.conformance import identify_quantizer
from fp8ref.conformance.kit import subject
from fp8ref.conformance.kit.subject import ConformanceError
from fp8ref.conformance.quantizer import layout_invariance
from fp8ref.conformance.quantizer.candidates import Candidate, Comparison
from fp8ref.conformance.quantizer.outputs import Quantizer, ScaleLayout
from fp8ref.formats import E4M3FN
from fp8ref.jax.quantize import scaling as jax_scaling
from fp8ref.policy import POLICIES


def identified(function, expect="torchao"):
    return identify_quantizer(function, E4M3FN, name="mine", framework="torch", expect=expect)


def test_what_is_right_everywhere():  # S-16
    found = identified(planted.rows)
    assert found.ok
    said = {f.what: f.text for f in found.findings}
    assert (said["shapes"], said["strides"]) == ("all alike", "all alike")
    assert "transposed, every second column, behind a row: as contiguous" in [
        f.evidence for f in found.findings
    ]
    by = {f.what: f.value for f in found.findings}
    assert (by["from bfloat16"], by["from float16"]) == ("torchao", "torchao")


def test_codes_of_a_quotient_are_no_policys():  # S-9
    found = identified(planted.divides)
    assert (found.ok, found.found["nearest_policy"]) == (False, "torchao")
    deviation = "it divides by scale_inv in the place of multiplying by scale"
    assert f"policy torchao, but {deviation}" in found.message
    (difference,) = found.differences
    assert difference.got.startswith("code 0x3C (1.5), ")
    # the scale that it gives too
    assert difference.expected == "code 0x3D (1.625), scale 70368739983360 by torchao"


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("function", "said"),
    [
        (planted.another_in_float16, "(float16 0x"),
        (planted.mean_in_bfloat16, "(bfloat16 0x"),
        (planted.compares_for_the_largest, "NaN last in each group as x[0, 2] = nan"),
        (
            planted.but_the_last_column,
            "the largest last in each group as x[1, 2] = 0.015625 (float32 0x",
        ),
        (planted.but_the_last_column, "(as without x[1, 2]), expected code "),
        (planted.whole_blocks_alone, "(as without x[3, 999])"),
        (planted.up_to_1024_rows, "(as without x[1030, 1151])"),
        (planted.up_to_2048_columns, "of x [3, 28672]"),
        (planted.loses_lane_17, "the largest at "),
        (planted.last_column_in_bfloat16, "(bfloat16 0x"),
        (planted.strides_in_bfloat16, "transposed in memory (bfloat16 0x"),
        (
            planted.negative_nans,
            "(as without x[1, 2]), expected code 0x7F (nan), scale nan by torchao",
        ),
        (planted.infinity_before_nan, "a NaN inside and an infinity last"),
        (planted.tail_of_16, "got code 0x00 (0)"),
        (planted.transposes_squares, "of x [128, 128]"),
        (planted.forgets_strides, "of x [128, 256], transposed in memory"),
        (planted.forgets_an_offset, "of x [128, 256], behind a row in memory"),
    ],
)
def test_what_is_wrong_in_other_tensors(function, said):  # S-2, S-5, S-6, S-16
    found = identified(function)
    assert not found.ok
    assert not found.identified
    assert "it gives other results for other tensors" in found.message
    assert said in found.message


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("function", "said"),
    [
        (planted.products_in_float16, "rounds to float16 first, except for the differences below"),
        (planted.adds_zero, "-0 becomes 0"),
        (planted.nan_of_all, "next to groups of every kind"),
        (
            planted.another_scale_in_bfloat16,
            "policy torchao, but its codes are made by other scales than it returns, as if its "
            "scale is rounded to bfloat16",
        ),
        (planted.one_for_zero, "policy torchao, but an amax of 0 has scale 1"),
        (planted.rolls_scales, "nearest is torchao"),
        (
            planted.calls_the_inverse_scale,
            "its output 'scale': got a scale_inv, expected a scale (S-1)",
        ),
        (
            planted.calls_the_scale_inverse,
            "its output 'scale_inv': got a scale, expected a scale_inv (S-1)",
        ),
        (
            planted.doubles_the_amax,
            "its output 'amax': got 2, expected 1, the largest magnitude of its group (S-2)",
        ),
    ],
)
def test_faults_that_no_policy_explains(function, said):  # S-1 to S-6
    for expect in ("torchao", None):
        found = identified(function, expect)
        assert not found.ok
        assert said in found.message + "".join(map(str, found.unlike))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (planted.with_a_workspace(), "mine overwrites its earlier output for x torch float32"),
        (
            planted.one_call_late(),
            "mine, called with x of 0.5s .* after x of ones, gives the codes of the ones",
        ),
    ],
)
def test_outputs_that_calls_share(function, said):
    with pytest.raises(ConformanceError, match=said):
        identified(function)


def test_a_workspace_of_another_dtype():
    quantize = planted.with_a_workspace()
    with pytest.raises(
        ConformanceError, match="mine overwrites its earlier output for x torch bfloat16"
    ):
        identified(lambda x: quantize(x) if x.dtype == torch.bfloat16 else planted.rows(x))


def test_more_calls_than_are_asked():
    with pytest.raises(ConformanceError, match="mine remembers more than 20 calls"):
        identified(planted.delayed(24), "te_delayed")


@pytest.mark.grid(1)
@pytest.mark.parametrize("axis", [-1, 0])
def test_a_nan_that_xla_loses_is_no_fault(axis):  # P-3, S-16
    def quantize(x):
        amax = jnp.max(jnp.abs(x.astype(jnp.float32)), axis, keepdims=True)
        scale = 448 / jnp.maximum(amax, 1e-12)
        return jnp.clip(x.astype(jnp.float32) * scale, -448, 448).astype(jnp.float8_e4m3fn), scale

    found = identify_quantizer(quantize, E4M3FN, framework="jax", expect="torchao")
    assert found.ok, found.message
    assert {f.what: f.text for f in found.findings}["NaN inside"] == "lost where XLA's max loses it"


@pytest.mark.slow
def test_subnormals_that_xla_flushes_under_e8m0_scales_are_no_fault():  # S-12, S-14
    def quantize(x):
        q = jax_scaling.quantize(x, E4M3FN, granularity="mx_1x32", policy="mx_floor")
        return q.codes, q.scale_inv.astype(jnp.float8_e8m0fnu)

    found = identify_quantizer(quantize, E4M3FN, framework="jax", expect="mx_floor")
    assert found.ok, found.message
    assert found.found["flushes_subnormal_scales"]


def test_a_nan_that_is_dropped_in_jax_is_a_fault():  # S-2
    def quantize(x):
        x = x.astype(jnp.float32)
        amax = jnp.max(
            jnp.where(jnp.isnan(x) & (jnp.arange(x.shape[1]) > 0), 0, jnp.abs(x)), -1, keepdims=True
        )
        scale = 448 / jnp.maximum(amax, 1e-12)
        return jnp.clip(x * scale, -448, 448).astype(jnp.float8_e4m3fn), scale

    assert not identify_quantizer(quantize, E4M3FN, framework="jax").ok


@pytest.mark.slow
def test_a_delayed_quantizer_by_its_policy():  # S-11, H-1
    found = identified(planted.delayed(), "te_delayed")
    assert found.ok, found.message
    assert found.found["memory"] == 16
    assert not identified(planted.delayed(), "torchao").ok


def test_what_it_does_not_take_is_said():
    def function(x):
        if x.dtype != torch.float32 or not x.is_contiguous():
            raise TypeError("contiguous float32, please")
        return planted.rows(x)

    found = identified(function)
    assert found.ok
    assert "it does not accept bfloat16 or float16" in found.message
    assert next(f for f in found.findings if f.what == "strides").evidence.endswith(
        "it raises for transposed, every second column"
    )


def test_shapes_that_it_does_not_take_are_said():
    def function(x):
        assert x.shape[0] % 16 == 0
        return planted.rows(x)

    found = identified(function)
    assert found.ok
    assert (
        "it raises for [1, 1], [2, 3], [3, 17], [4, 1000], [1, 128], [3, 256], [299, 128], [3, "
        "28672], [1031, 1152]" in {f.what: f.evidence for f in found.findings}["shapes"]
    )


# vllm#53346: the scale rule of another path of the kernel.
def another_floor_by_stride(x):
    return planted_quantizers.blocks(
        x,
        lambda amax: (
            np.float32(448) / np.maximum(amax, np.float32(1e-12 if x.flags.c_contiguous else 1e-6))
        ),
    )


def no_floor_of_many_rows(x):
    return planted_quantizers.blocks(
        x,
        lambda amax: (
            np.float32(448) / np.maximum(amax, np.float32(1e-12 if len(x) <= 256 else 2.0**-149))
        ),
    )


def torchao(amax):
    return np.float32(448) / np.maximum(amax, np.float32(1e-12))


def only(where, scale):
    """Blocks by torchao, but where x is of one kind with another scale."""
    return lambda x: planted_quantizers.blocks(x, scale if where(x) else torchao)


def strided(x):
    return not x.flags.c_contiguous


def refuses_nan_where_it_is_wrong(x):
    if len(x) == 64 and np.isnan(x).any():
        raise ValueError("no NaN, please")
    return only(lambda x: len(x) == 64, lambda amax: 2 * torchao(amax))(x)


@pytest.mark.parametrize(
    ("function", "what", "said"),
    [
        (another_floor_by_stride, "strides", "zero, tiny and huge groups in turn"),
        (no_floor_of_many_rows, "shapes", "zero, tiny and huge groups in turn"),
        (
            only(strided, lambda amax: np.where(np.isinf(amax), 1, torchao(amax))),
            "strides",
            "an infinity last",
        ),
        (
            only(strided, lambda amax: np.where(np.isnan(amax), 1, torchao(amax))),
            "strides",
            "NaN last",
        ),
        (
            only(strided, lambda amax: np.maximum(torchao(amax), np.float32(4.8e-7))),
            "strides",
            "an infinity last",
        ),
        (
            only(
                lambda x: len(x) > 256, lambda amax: np.maximum(torchao(amax), np.float32(4.8e-7))
            ),
            "shapes",
            "an infinity last",
        ),
        (
            only(lambda x: len(x) > 256, lambda amax: np.where(np.isnan(amax), 1, torchao(amax))),
            "shapes",
            "NaN last",
        ),
        (
            only(lambda x: len(x) > 1024, lambda amax: np.where(np.isnan(amax), 1, torchao(amax))),
            "shapes",
            "NaN inside",
        ),
        (only(lambda x: len(x) == 64, lambda amax: 2 * torchao(amax)), "shapes", "of x [64, 512]"),
        (refuses_nan_where_it_is_wrong, "shapes", "of x [64, 512]"),
    ],
)
def test_a_scale_rule_of_some_tensors_alone(function, what, said):  # S-16
    quantizer = Quantizer(
        subject=subject.wrap("mine", function, framework="numpy", device="cpu", shape=(256, 384)),
        dtype="float32",
    )
    candidate = Candidate(policy=POLICIES["torchao"], scale_fmt=E4M3FN, fmt=E4M3FN)
    scale_layout = ScaleLayout(granularity="blockwise_1x128", axis=-1, kinds={"[1]": "scale"})
    check = layout_invariance.check_strides if what == "strides" else layout_invariance.check_shapes
    findings, found = check(
        Comparison(quantizer=quantizer, candidate=candidate, scale_layout=scale_layout)
    )
    assert findings[0].what == what
    assert findings[0].text == "not all alike"
    assert said in found[0].input
