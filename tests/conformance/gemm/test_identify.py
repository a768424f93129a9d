"""Planted arithmetic is found out, exactly, or as one of what cannot be told apart."""

import dataclasses
import itertools

import numpy as np
import pytest
from planted_gemms import HOPPER, plan, planted_gemm

from fp8ref.conformance.finding import Finding
from fp8ref.conformance.gemm import identify_gemm
from fp8ref.conformance.gemm.epilogues import candidates
from fp8ref.conformance.gemm.identify import _settled
from fp8ref.conformance.gemm.plans import findings_of
from fp8ref.formats import BFLOAT16, E4M3FN, E5M2, FLOAT16, FLOAT32
from fp8ref.sim import cast, gemm
from fp8ref.sim.accumulate import ACCUMULATIONS, Accumulation
from fp8ref.sim.tensor_core import UNITS

SHAPE = (64, 64, 4096)


def fields(accumulation):
    """A plan without names."""
    named = dataclasses.asdict(accumulation)
    del named["name"], named["unit"]["name"], named["unit"]["evidence"]
    return named


def check(found, planted, *, alone=False):
    """Every bit is the simulator's, and the planted plan is among those that fit; alone: it is the only one."""
    assert found.ok, found.verdict
    assert found.equal == found.compared >= 4096
    assert fields(planted) in [fields(p) for p in found.plans]
    if alone:
        assert len(found.plans) == 1


@pytest.mark.parametrize("name", ACCUMULATIONS)
def test_the_named_plans(name):
    found = identify_gemm(planted_gemm(name), shape=SHAPE)
    check(found, ACCUMULATIONS[name], alone=True)
    unit = ACCUMULATIONS[name].unit
    assert {key: found.plan[key] for key in ("fused_width", "fraction_bits", "output_bits", "promotion", "split_k", "epilogue")} == {
        "fused_width": unit.fused_width,
        "fraction_bits": unit.fraction_bits,
        "output_bits": unit.output_bits,
        "promotion": ACCUMULATIONS[name].promotion,
        "split_k": 1,
        "epilogue": "scale_then_round",
    }


@pytest.mark.parametrize("promotion", [32, 64, 96, 128, 160, 256, 384, 512, 1024])
def test_promotion(promotion):
    found = identify_gemm(planted_gemm(plan(promotion=promotion)), shape=SHAPE)
    check(found, plan(promotion=promotion))
    assert found.plan["promotion"] == promotion
    assert found.plan["split_k"] == 1
    accumulator = next(f.value for f in found.findings if f.what == "accumulator")
    assert accumulator.startswith("0 in every step" if promotion == 32 else "aligned with the products")


@pytest.mark.parametrize("split_order", ["contiguous", "interleaved"])
@pytest.mark.parametrize("split_k", range(2, 17))
def test_split_k(split_k, split_order):
    """Even contiguous parts of one chain each are promotion by their length: the bits are the same, and both are named."""
    planted = plan(split_k=split_k, split_order=split_order)
    found = identify_gemm(planted_gemm(planted), shape=SHAPE)
    check(found, planted)
    if split_order == "interleaved":
        assert all(p.split_order == "interleaved" and p.split_k == split_k for p in found.plans)


@pytest.mark.parametrize("split_tile", [64, 256])
@pytest.mark.parametrize("split_order", ["contiguous", "interleaved"])
@pytest.mark.parametrize("promotion", [None, 128])
def test_split_k_of_other_tiles(promotion, split_order, split_tile):
    planted = plan(split_k=3, split_order=split_order, split_tile=split_tile, promotion=promotion)
    check(identify_gemm(planted_gemm(planted), shape=SHAPE), planted)


@pytest.mark.parametrize("width", [4, 8, 16, 32])
@pytest.mark.parametrize("fraction_bits", [12, 13, 14])
def test_width_and_fraction_bits(fraction_bits, width):
    planted = plan(dataclasses.replace(HOPPER, fused_width=width, fraction_bits=fraction_bits))
    found = identify_gemm(planted_gemm(planted), shape=SHAPE)
    check(found, planted)
    assert (found.plan["fused_width"], found.plan["fraction_bits"]) == (width, fraction_bits)


@pytest.mark.parametrize(("fraction_bits", "output_bits"), [(10, 10), (13, 12), (13, 16), (17, 14), (20, 23), (25, 23)])
def test_output_bits(fraction_bits, output_bits):
    planted = plan(dataclasses.replace(HOPPER, fraction_bits=fraction_bits, output_bits=output_bits))
    found = identify_gemm(planted_gemm(planted), shape=SHAPE)
    check(found, planted)
    assert found.plan["output_bits"] == output_bits


def test_output_bits_beyond_the_longest_sum():
    """A step's sum has no more than so many bits; that they are all kept is what can be told."""
    planted = plan(dataclasses.replace(HOPPER, output_bits=23))
    found = identify_gemm(planted_gemm(planted), shape=SHAPE)
    assert found.ok
    assert found.plan["output_bits"] == 23
    others = next(f.others for f in found.findings if f.what == "output_bits")
    assert others
    assert min(others) == 13 + 6  # 32 products below 4 sum to less than 2^7


VARIANTS = {
    "floor": {"rounding": "toward_negative"},
    "nearest": {"rounding": "nearest_even"},
    "results down": {"output_rounding": "toward_negative"},
    "results to nearest": {"output_rounding": "nearest_even"},
    "normalised factors": {"exponents": "factors"},
    "normalised products": {"exponents": "products"},
    "zeros count": {"zeros": "counted"},
    "no subnormals": {"subnormals": "flushed"},
    "floor everywhere, no subnormals": {"rounding": "toward_negative", "output_rounding": "toward_negative", "subnormals": "flushed"},
}


@pytest.mark.parametrize("formats", [(E4M3FN, E4M3FN), (E5M2, E4M3FN), (E5M2, E5M2)], ids=lambda p: f"{p[0]}-{p[1]}")
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_a_step_does(variant, formats):
    planted = plan(dataclasses.replace(HOPPER, **VARIANTS[variant]), promotion=128)
    found = identify_gemm(planted_gemm(planted), shape=(32, 32, 256), formats=formats)
    check(found, planted)
    assert {key: found.plan[key] for key in VARIANTS[variant]} == VARIANTS[variant]


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("epilogue", [e for e in candidates() if e.bias is None], ids=lambda e: e.name)
def test_epilogues(epilogue, granularity):
    for out in (FLOAT32, BFLOAT16, FLOAT16):
        if out == FLOAT32 and (epilogue.round_first or epilogue.rounding != "nearest_even"):
            continue  # nothing is rounded
        planted = planted_gemm("hopper_slow", epilogue=epilogue, out=out, granularity=granularity)
        found = identify_gemm(planted, shape=(64, 64, 256))
        assert found.ok
        assert found.plan["out_dtype"] == out.name
        others = next(f.others for f in found.findings if f.what == "epilogue")
        assert epilogue.name in (found.epilogue.name, *others)
        if out == FLOAT32:
            assert found.epilogue == epilogue
            assert not others


@pytest.mark.parametrize("epilogue", [e for e in candidates() if e.bias and e.rounding == "nearest_even"], ids=lambda e: e.name)
def test_epilogues_with_a_bias(epilogue):
    without = next(e for e in candidates() if dataclasses.replace(epilogue, name=e.name, bias=None) == e)
    planted = planted_gemm("hopper_slow", epilogue=without, with_bias=epilogue, out=BFLOAT16, granularity="rowwise")
    found = identify_gemm(planted, shape=(64, 64, 256))
    biased = next(f for f in found.findings if f.what == "epilogue with bias")
    assert found.ok
    assert epilogue.name in (biased.value, *biased.others)


@pytest.mark.parametrize("name", ["f32", "exact"])
def test_sums_that_no_tensor_core_makes(name):
    found = identify_gemm(planted_gemm(name), shape=(64, 64, 512))
    assert found.ok
    assert found.plans == [name]
    assert found.plan["accumulate"] == name
    assert found.plan["fused_width"] is None


def test_an_order_that_is_none_of_ours():
    """float32 sums from the last product to the first: seen to be one by one, and not said to be what it is not."""

    def backwards(a, b):
        reverse = [q._replace(codes=q.codes[:, ::-1]) for q in (a, b)]
        return planted_gemm("f32").function(*reverse)

    found = identify_gemm(dataclasses.replace(planted_gemm("f32"), function=backwards), shape=(64, 64, 512))
    assert not found.ok
    assert not found.plans
    assert found.plan["promotion"] is None
    assert found.verdict == "no accumulation of the simulator gives these answers"


def test_chains_that_restart_where_no_plan_does():
    """Promotion after 96, 224, 96, ... of K: chains are seen, and fit no plan."""

    def ragged(a, b):
        ends = np.cumsum([96, 224] * 3)
        parts = [slice(end - size, end) for end, size in zip(ends, [96, 224] * 3, strict=True)]
        total = np.zeros((len(a.codes), len(b.codes)), np.float32)
        for part in parts:
            total = total + planted_gemm("hopper_fast").function(*(q._replace(codes=q.codes[:, part]) for q in (a, b)))
        return total

    found = identify_gemm(dataclasses.replace(planted_gemm("hopper_fast"), function=ragged), shape=(64, 64, 960))
    assert not found.plans
    assert found.plan["fraction_bits"] == 13
    assert found.plan["promotion"] is None
    evidence = next(f.evidence for f in found.findings if f.what == "promotion")
    assert "0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2" in evidence


@pytest.mark.parametrize("unit", ["hopper", "ada"])
@pytest.mark.parametrize("formats", list(itertools.product((E4M3FN, E5M2), repeat=2)), ids=lambda p: f"{p[0]}-{p[1]}")
def test_every_pairing_of_formats(formats, unit):
    planted = Accumulation(name="planted", unit=UNITS[unit], promotion=128)
    found = identify_gemm(planted_gemm(planted), shape=(64, 64, 512), formats=formats)
    check(found, planted)


def test_what_is_written_can_be_read_back(tmp_path):
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
    with pytest.raises(ValueError, match="K of at least 32 that 32 divides; got"):
        identify_gemm(planted_gemm("hopper_slow"), shape=shape)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("profile", ["hopper", "ada"])
def test_somebody_elses_emulator(profile, fast):
    """mmaemu's tensor cores, which share no code with the simulator's, under cuBLASLt's order of scales."""
    import mmaemu
    import torch

    def function(a, b):
        tensors = [torch.from_numpy(q.codes).view(getattr(torch, f"float8_{q.fmt}")) for q in (a, b)]
        sums = mmaemu.accumulate(*tensors, use_fast_accum=fast, profile=profile, splitk=1, backend="reference")
        return sums * torch.tensor(a.scale_inv * b.scale_inv)

    found = identify_gemm(dataclasses.replace(planted_gemm("exact"), function=function), shape=(32, 32, 512))
    unit = UNITS[profile]
    assert found.ok
    assert (found.plan["fused_width"], found.plan["fraction_bits"], found.plan["output_bits"]) == (unit.fused_width, 13, 13)
    assert (found.plan["promotion"], found.plan["epilogue"]) == (None if fast else 128, "product_then_round")


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("promotion", "split_k", "tile"), [(128, 3, 128), (32, 9, 32)])
def test_results_in_few_bits_leave_the_planted_plan_among_the_others(promotion, split_k, tile, seed):
    planted = plan(promotion=promotion, split_k=split_k, split_order="interleaved", split_tile=tile)
    found = identify_gemm(planted_gemm(planted, out=BFLOAT16), shape=(64, 64, 2048), seed=seed)
    check(found, planted)
    of_split = next(f for f in found.findings if f.what == "split_k")
    assert split_k in (of_split.value, *of_split.others)


def in_reverse(a, b):
    """Chains of 128, the last of which is added first."""
    total = np.zeros((len(a.codes), len(b.codes)), np.float32)
    for k in range(a.codes.shape[1] - 128, -1, -128):
        total = total + gemm.matmul(*(q._replace(codes=q.codes[:, k : k + 128]) for q in (a, b)), accumulate="hopper_fast")
    return total * a.scale_inv * b.scale_inv.T


@pytest.mark.parametrize("shape", [(64, 64, 512), (8, 8, 512), (3, 5, 1024)])
def test_chains_that_are_added_in_another_order_are_no_plan(shape):
    def function(a, b):
        one = (q._replace(scale_inv=np.ones_like(q.scale_inv)) for q in (a, b))
        return in_reverse(*one) * a.scale_inv * b.scale_inv.T

    found = identify_gemm(dataclasses.replace(planted_gemm("exact"), function=function), shape=shape)
    assert not found.ok


def test_what_confirms_may_leave_no_split():
    """Then none is spoken of: of two plans that fit, the one that is split is ruled out later."""
    plans = [plan(promotion=128), plan(split_k=4)]
    both = findings_of(plans, "seen")
    assert {"split_order", "split_tile"} <= {f.what for f in both}
    left = _settled([*both, Finding(what="nan", value="as IEEE 754", evidence="")], plans[:1])
    assert [f.what for f in left] == ["nan", "promotion", "accumulator", "split_k"]
    assert (left[1].value, left[1].evidence, left[1].others) == (128, "seen", ())


def test_a_promotion_beyond_k_is_among_the_others():
    found = identify_gemm(planted_gemm("hopper_slow"), shape=(64, 64, 128))
    promotion = next(f for f in found.findings if f.what == "promotion")
    assert (promotion.value, promotion.others[0]) == ("none", "promotion of all of a chain's K or more")


def test_sums_in_float64_are_not_exact():
    def function(a, b):
        acc = np.zeros((len(a.codes), len(b.codes)))
        for x, y in zip(cast.decode(a.codes, a.fmt).T, cast.decode(b.codes, b.fmt).T, strict=True):
            acc += np.outer(x.astype(np.float64), y)
        return acc.astype(np.float32) * a.scale_inv * b.scale_inv

    found = identify_gemm(dataclasses.replace(planted_gemm("exact"), function=function), shape=(16, 16, 256), formats=(E5M2, E5M2))
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
def test_what_differs_from_numbers_alone_is_said(what, changed):
    planted = planted_gemm("hopper_slow")
    found = identify_gemm(dataclasses.replace(planted, function=lambda a, b: changed(planted.function(a, b))), shape=(32, 32, 512))
    assert found.equal == found.compared
    assert not found.ok
    assert what in found.verdict
    assert found.plan["promotion"] == 128


def test_a_bias_that_is_ignored_is_said():
    planted = planted_gemm("hopper_slow", out=BFLOAT16)
    found = identify_gemm(
        dataclasses.replace(planted, bias=True, function=lambda a, b, bias=None: planted.function(a, b)), shape=(32, 32, 512)
    )
    assert not found.ok
    assert "epilogue with bias" in found.verdict


def test_formats_that_reach_too_little_are_named():
    found = identify_gemm(planted_gemm("blackwell"), shape=(16, 16, 16384))
    evidence = next(f.evidence for f in found.findings if f.what == "promotion")
    assert evidence == "e4m3fn and e4m3fn have no product small enough for K = 16384: probe a smaller K, or e5m2"
