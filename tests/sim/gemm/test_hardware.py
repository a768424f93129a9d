"""Simulated hardware is the simulator's GEMM under a plan, chosen by what the recipe asks."""

import dataclasses

import numpy as np
import pytest

from fp8ref.formats import BFLOAT16, E4M3FN, E5M2, FLOAT32
from fp8ref.sim.gemm import block_scaled, gemm, hardware
from fp8ref.sim.gemm.accumulate import ACCUMULATIONS, Accumulation
from fp8ref.sim.gemm.hardware import HARDWARE
from fp8ref.sim.gemm.tensor_core import MODELED, UNITS
from fp8ref.sim.quantize import scaling
from fp8ref.spec.attention.variants import VARIANTS
from fp8ref.spec.epilogue import EPILOGUES, Epilogue
from fp8ref.spec.hardware import Factor


def operands(rng, granularity="tensorwise", shape=(24, 40, 256), fmt=E4M3FN):
    m, n, k = shape
    quantized = [
        scaling.quantize(
            rng.standard_normal((rows, k)).astype(np.float32), fmt, granularity=granularity
        )
        for rows in (m, n)
    ]
    return quantized, [Factor(q.codes, q.scale_inv, q.fmt, q.granularity) for q in quantized]


# G-20
@pytest.mark.parametrize("asked", ["fast", "slow"])
@pytest.mark.parametrize("name", HARDWARE)
def test_a_name_is_one_plan_for_all_and_hopper_is_two(rng, name, asked):
    (a, b), factors = operands(rng)
    plans = {"hopper": f"hopper_{asked}", "blackwell_mx": "blackwell"}
    plan = (
        Accumulation(name=name, unit=MODELED[name])
        if name.endswith("_f16")
        else plans.get(name, name)
    )
    found = hardware.by_name(name)(
        *factors, accumulate=asked, epilogue="scale_then_round", out_dtype=BFLOAT16
    )
    np.testing.assert_array_equal(found, gemm.matmul(a, b, accumulate=plan, out_dtype=BFLOAT16))


def test_fast_and_slow_differ_where_the_hardware_does(rng):
    _, factors = operands(rng)
    fast, slow = (
        hardware.by_name("hopper")(
            *factors, accumulate=a, epilogue="scale_then_round", out_dtype=FLOAT32
        )
        for a in ("fast", "slow")
    )
    assert (fast != slow).any()


# G-19
@pytest.mark.parametrize("granularity", ["rowwise", "blockwise_1x128", "mx_1x32"])
def test_blocks_are_summed_by_the_plan_and_not_dequantized(rng, granularity):
    (a, b), factors = operands(rng, granularity)
    found = hardware.by_name("hopper_fast")(
        *factors, accumulate="fast", epilogue="scale_then_round", out_dtype=FLOAT32
    )
    np.testing.assert_array_equal(
        found, gemm.matmul(a, b, accumulate="hopper_fast", out_dtype=FLOAT32)
    )
    assert (found != gemm.matmul(a, b, accumulate="exact", out_dtype=FLOAT32)).any()


def test_mx_blocks_are_scaled_by_the_unit_that_can(rng):  # G-23
    wide = [
        (rng.standard_normal((rows, 256)) * 2.0 ** rng.integers(-9, 9, (rows, 256))).astype(
            np.float32
        )
        for rows in (24, 40)
    ]
    a, b = (scaling.quantize(x, E4M3FN, granularity="mx_1x32", policy="mx_rceil") for x in wide)
    factors = [Factor(q.codes, q.scale_inv, q.fmt, q.granularity) for q in (a, b)]
    found = hardware.by_name("blackwell_mx")(
        *factors, accumulate="fast", epilogue="scale_then_round", out_dtype=FLOAT32
    )
    np.testing.assert_array_equal(found, block_scaled.matmul(a, b))
    assert (found != gemm.matmul(a, b, accumulate="blackwell", out_dtype=FLOAT32)).any()
    assert hardware.by_name("blackwell_mx").to_dict()["unit"]["block_scales"]
    with pytest.raises(ValueError, match="unit needs block scales"):
        hardware.Hardware(name="own", fast="blackwell", slow="blackwell", unit=UNITS["blackwell"])


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
def test_a_k_that_no_instruction_divides_is_padded(rng, granularity):
    (a, b), factors = operands(rng, granularity, (8, 8, 80), E5M2)
    padded = [q._replace(codes=np.pad(q.codes, ((0, 0), (0, 16)))) for q in (a, b)]
    found = hardware.by_name("hopper_fast")(
        *factors, accumulate="fast", epilogue="scale_then_round", out_dtype=BFLOAT16
    )
    np.testing.assert_array_equal(
        found, gemm.matmul(*padded, accumulate="hopper_fast", out_dtype=BFLOAT16)
    )


@pytest.mark.parametrize("shape", [(0, 16, 32), (16, 16, 0)])
def test_nothing_multiplied_is_zero(rng, shape):
    m, n, k = shape
    factors = [
        Factor(np.zeros((rows, k), np.uint8), np.float32(1), E4M3FN, "tensorwise")
        for rows in (m, n)
    ]
    found = hardware.by_name("hopper")(
        *factors, accumulate="slow", epilogue="scale_then_round", out_dtype=BFLOAT16
    )
    assert found.shape == (m, n)
    assert not found.any()


def test_a_probed_epilogue_stands_for_the_call_and_not_for_the_frameworks_own(rng):
    (a, b), factors = operands(rng, "rowwise")
    made = hardware.probed("exact", EPILOGUES["product_then_round"])
    for given, applied in (
        ("scale_then_round", "product_then_round"),
        ("unit_round_scale_round", "unit_round_scale_round"),
    ):
        found = made(*factors, accumulate="fast", epilogue=given, out_dtype=BFLOAT16)
        np.testing.assert_array_equal(
            found, gemm.matmul(a, b, accumulate="exact", epilogue=applied, out_dtype=BFLOAT16)
        )


def test_a_probe_without_a_bias_and_of_plain_scales_changes_no_epilogue():
    assert hardware.probed("exact", EPILOGUES["round_then_bias"]).epilogue is None
    fused = hardware.probed("exact", Epilogue(name="x", scale="product", bias="fused")).epilogue
    assert fused.bias is None
    assert fused.scale == "product"


def test_what_was_probed_is_named_by_its_content():
    plan = dataclasses.replace(ACCUMULATIONS["hopper_fast"], name="probed")
    made = [
        hardware.probed(p, EPILOGUES["scale_then_round"])
        for p in (plan, plan, dataclasses.replace(plan, promotion=128))
    ]
    assert made[0] == made[1]
    assert made[0].name != made[2].name
    assert made[0].to_dict()["fast"]["unit"]["fraction_bits"] == 13


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: hardware.attending(VARIANTS["mxfp8"], hardware.by_name("hopper")),
            "needs no MX blocks, and hardware without an epilogue; got 'mxfp8' and 'hopper'",
        ),
        (
            lambda: hardware.by_name("volta"),
            "one of exact, f32, hopper_fast, .*hopper, .*blackwell_mx; got 'volta'",
        ),
        (
            lambda: hardware.Hardware(name="x", fast="fast", slow="f32"),
            "accumulate is an Accumulation.*got 'fast'",
        ),
        (
            lambda: hardware.Hardware(
                name="x", fast="f32", slow="f32", epilogue=EPILOGUES["round_then_bias"]
            ),
            "'round_then_bias' has",
        ),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_plan_of_your_own_is_hardware(rng):
    (a, b), factors = operands(rng)
    plan = Accumulation(name="mine", unit=UNITS["ada"], promotion=64)
    found = hardware.Hardware(name="mine", fast=plan, slow="exact")(
        *factors, accumulate="fast", epilogue="scale_then_round", out_dtype=FLOAT32
    )
    np.testing.assert_array_equal(found, gemm.matmul(a, b, accumulate=plan, out_dtype=FLOAT32))
