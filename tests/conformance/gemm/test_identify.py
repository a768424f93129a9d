"""A planted GEMM is identified exactly, or as one of those that give the same results."""

import dataclasses

import numpy as np
import pytest
from helpers.gemm.planted_gemms import check_planted, plan, planted_gemm

from fp8ref.conformance.gemm import identify_gemm
from fp8ref.conformance.gemm.identify import _settled
from fp8ref.conformance.gemm.plans import findings_of
from fp8ref.conformance.kit.finding import Finding
from fp8ref.formats import E5M2
from fp8ref.sim.gemm.accumulate import ACCUMULATIONS
from fp8ref.sim.gemm.tensor_core import UNITS
from fp8ref.sim.quantize import cast

SHAPE = (64, 64, 4096)


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", ACCUMULATIONS)
def test_the_named_plans(name):
    found = identify_gemm(planted_gemm(name), shape=SHAPE)
    check_planted(found, ACCUMULATIONS[name], alone=True)
    unit = ACCUMULATIONS[name].unit
    assert {
        key: found.plan[key]
        for key in (
            "fused_width",
            "fraction_bits",
            "output_bits",
            "promotion",
            "split_k",
            "epilogue",
        )
    } == {
        "fused_width": unit.fused_width,
        "fraction_bits": unit.fraction_bits,
        "output_bits": unit.output_bits,
        "promotion": ACCUMULATIONS[name].promotion,
        "split_k": 1,
        "epilogue": "scale_then_round",
    }


@pytest.mark.parametrize("name", ["f32", "exact"])
def test_sums_that_no_tensor_core_makes(name):
    found = identify_gemm(planted_gemm(name), shape=(64, 64, 512))
    assert found.ok
    assert found.plans == [name]
    assert found.plan["accumulate"] == name
    assert found.plan["fused_width"] is None


def test_an_order_that_the_simulator_does_not_have():
    """float32 sums from the last product to the first: seen to be one by one, and not said to be
    what it is not.
    """

    def backwards(a, b):
        reverse = [q._replace(codes=q.codes[:, ::-1]) for q in (a, b)]
        return planted_gemm("f32").function(*reverse)

    found = identify_gemm(
        dataclasses.replace(planted_gemm("f32"), function=backwards), shape=(64, 64, 512)
    )
    assert not found.ok
    assert not found.plans
    assert found.plan["promotion"] is None
    assert found.verdict == "no accumulation of the simulator gives these answers"


def test_a_written_result_can_be_read(tmp_path):
    import json

    found = identify_gemm(planted_gemm("hopper_slow"), shape=(64, 64, 512))
    found.write(tmp_path / "found.json")
    read = json.loads((tmp_path / "found.json").read_text())
    assert read["ok"]
    assert read["plan"] == found.plan
    assert set(read["evidence"]) == {f.what for f in found.findings}
    assert read["confirmed"] == {"compared": 2 * 64 * 64, "equal": 2 * 64 * 64}


@pytest.mark.parametrize("shape", [(64, 64, 48), (64, 64, 0), (0, 64, 64)])
def test_a_shape_that_no_tensor_core_takes(shape):
    with pytest.raises(ValueError, match="K that is a positive multiple of 32; got"):
        identify_gemm(planted_gemm("hopper_slow"), shape=shape)


@pytest.mark.grid(2)
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("profile", ["hopper", "ada"])
def test_mmaemus_tensor_cores(profile, fast):
    """mmaemu's tensor cores, which share no code with the simulator's, under cuBLASLt's order of
    scales.
    """
    import mmaemu
    import torch

    def function(a, b):
        tensors = [
            torch.from_numpy(q.codes).view(getattr(torch, f"float8_{q.fmt}")) for q in (a, b)
        ]
        sums = mmaemu.accumulate(
            *tensors, use_fast_accum=fast, profile=profile, splitk=1, backend="reference"
        )
        return sums * torch.tensor(a.scale_inv * b.scale_inv)

    found = identify_gemm(
        dataclasses.replace(planted_gemm("exact"), function=function), shape=(32, 32, 512)
    )
    unit = UNITS[profile]
    assert found.ok
    assert (found.plan["fused_width"], found.plan["fraction_bits"], found.plan["output_bits"]) == (
        unit.fused_width,
        13,
        13,
    )
    assert (found.plan["promotion"], found.plan["epilogue"]) == (
        None if fast else 128,
        "product_then_round",
    )


def test_confirming_may_leave_no_split():
    """Then none is spoken of: of two plans that fit, the one that is split is ruled out later."""
    plans = [plan(promotion=128), plan(split_k=4)]
    both = findings_of(plans, "seen")
    assert {"split_order", "split_tile"} <= {f.what for f in both}
    left = _settled([*both, Finding("nan", "as IEEE 754", "")], plans[:1])
    assert [f.what for f in left] == ["nan", "promotion", "accumulator", "split_k"]
    assert (left[1].value, left[1].evidence, left[1].others) == (128, "seen", ())


def test_sums_in_float64_are_not_exact():
    def function(a, b):
        acc = np.zeros((len(a.codes), len(b.codes)))
        for x, y in zip(cast.decode(a.codes, a.fmt).T, cast.decode(b.codes, b.fmt).T, strict=True):
            acc += np.outer(x.astype(np.float64), y)
        return acc.astype(np.float32) * a.scale_inv * b.scale_inv

    found = identify_gemm(
        dataclasses.replace(planted_gemm("exact"), function=function),
        shape=(16, 16, 256),
        formats=(E5M2, E5M2),
    )
    assert not found.ok
    assert found.findings[0].value == "sequential"


@pytest.mark.parametrize(
    ("what", "changed"),
    [
        ("nan", lambda x: np.nan_to_num(x, nan=0, posinf=np.inf, neginf=-np.inf)),
        ("zeros of sums", lambda x: np.where(x == 0, np.float32(-0.0), x)),
        ("small results", lambda x: np.where(np.abs(x) < 2.0**-126, np.float32(0), x)),
        ("large results", lambda x: np.clip(x, -1e30, 1e30)),
    ],
)
def test_a_difference_in_special_values_is_reported(what, changed):
    planted = planted_gemm("hopper_slow")
    found = identify_gemm(
        dataclasses.replace(planted, function=lambda a, b: changed(planted.function(a, b))),
        shape=(32, 32, 512),
    )
    assert found.equal == found.compared
    assert not found.ok
    assert what in found.verdict
    assert found.plan["promotion"] == 128
