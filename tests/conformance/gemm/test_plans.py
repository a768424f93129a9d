"""Planted accumulation plans are identified, and plans are read back from JSON."""

import dataclasses
import json

import numpy as np
import pytest
from helpers.gemm.planted_gemms import check_planted, plan, planted_gemm

from fp8ref.conformance.gemm import identify_gemm, plans
from fp8ref.formats import BFLOAT16
from fp8ref.sim.gemm import gemm
from fp8ref.sim.gemm.accumulate import ACCUMULATIONS
from fp8ref.sim.gemm.tensor_core import UNITS
from fp8ref.spec.epilogue import EPILOGUES

SHAPE = (64, 64, 4096)


@pytest.mark.grid(2)
@pytest.mark.parametrize("promotion", [32, 64, 96, 128, 160, 256, 384, 512, 1024])
def test_promotion(promotion):
    found = identify_gemm(planted_gemm(plan(promotion=promotion)), shape=SHAPE)
    check_planted(found, plan(promotion=promotion))
    assert found.plan["promotion"] == promotion
    assert found.plan["split_k"] == 1
    accumulator = next(f.value for f in found.findings if f.what == "accumulator")
    assert accumulator.startswith(
        "0 in every step" if promotion == 32 else "aligned with the products"
    )


@pytest.mark.grid(2)
@pytest.mark.parametrize("split_order", ["contiguous", "interleaved"])
@pytest.mark.parametrize("split_k", range(2, 17))
def test_split_k(split_k, split_order):
    """Even contiguous parts of one chain each are promotion by their length: the bits are the same,
    and both are named.
    """
    planted = plan(split_k=split_k, split_order=split_order)
    found = identify_gemm(planted_gemm(planted), shape=SHAPE)
    check_planted(found, planted)
    if split_order == "interleaved":
        assert all(p.split_order == "interleaved" and p.split_k == split_k for p in found.plans)


@pytest.mark.grid(2)
@pytest.mark.parametrize("split_tile", [64, 256])
@pytest.mark.parametrize("split_order", ["contiguous", "interleaved"])
@pytest.mark.parametrize("promotion", [None, 128])
def test_split_k_of_other_tiles(promotion, split_order, split_tile):
    planted = plan(split_k=3, split_order=split_order, split_tile=split_tile, promotion=promotion)
    check_planted(identify_gemm(planted_gemm(planted), shape=SHAPE), planted)


def test_chains_that_restart_where_no_plan_does():
    """Promotion after 96, 224, 96, ... of K: chains are seen, and fit no plan."""

    def ragged(a, b):
        ends = np.cumsum([96, 224] * 3)
        parts = [slice(end - size, end) for end, size in zip(ends, [96, 224] * 3, strict=True)]
        total = np.zeros((len(a.codes), len(b.codes)), np.float32)
        for part in parts:
            total = total + planted_gemm("hopper_fast").function(
                *(q._replace(codes=q.codes[:, part]) for q in (a, b))
            )
        return total

    found = identify_gemm(
        dataclasses.replace(planted_gemm("hopper_fast"), function=ragged), shape=(64, 64, 960)
    )
    assert not found.plans
    assert found.plan["fraction_bits"] == 13
    assert found.plan["promotion"] is None
    evidence = next(f.evidence for f in found.findings if f.what == "promotion")
    assert "0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2" in evidence


@pytest.mark.grid(1)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("promotion", "split_k", "tile"), [(128, 3, 128), (32, 9, 32)])
def test_results_in_few_bits_leave_the_planted_plan_among_the_others(
    promotion, split_k, tile, seed
):
    planted = plan(promotion=promotion, split_k=split_k, split_order="interleaved", split_tile=tile)
    found = identify_gemm(planted_gemm(planted, out=BFLOAT16), shape=(64, 64, 2048), seed=seed)
    check_planted(found, planted)
    of_split = next(f for f in found.findings if f.what == "split_k")
    assert split_k in (of_split.value, *of_split.others)


def in_reverse(a, b):
    """Chains of 128, the last of which is added first."""
    total = np.zeros((len(a.codes), len(b.codes)), np.float32)
    for k in range(a.codes.shape[1] - 128, -1, -128):
        total = total + gemm.matmul(
            *(q._replace(codes=q.codes[:, k : k + 128]) for q in (a, b)), accumulate="hopper_fast"
        )
    return total * a.scale_inv * b.scale_inv.T


@pytest.mark.parametrize("shape", [(64, 64, 512), (8, 8, 512), (3, 5, 1024)])
def test_chains_that_are_added_in_another_order_are_no_plan(shape):
    def function(a, b):
        one = (q._replace(scale_inv=np.ones_like(q.scale_inv)) for q in (a, b))
        return in_reverse(*one) * a.scale_inv * b.scale_inv.T

    found = identify_gemm(
        dataclasses.replace(planted_gemm("exact"), function=function), shape=shape
    )
    assert not found.ok


def test_a_promotion_beyond_k_is_among_the_others():
    found = identify_gemm(planted_gemm("hopper_slow"), shape=(64, 64, 128))
    promotion = next(f for f in found.findings if f.what == "promotion")
    assert (promotion.value, promotion.others[0]) == (
        "none",
        "promotion of all of a chain's K or more",
    )


@pytest.mark.slow
def test_formats_that_reach_too_little_are_named():
    found = identify_gemm(planted_gemm("blackwell"), shape=(16, 16, 16384))
    evidence = next(f.evidence for f in found.findings if f.what == "promotion")
    assert (
        evidence
        == "e4m3fn and e4m3fn have no product small enough for K = 16384: probe a smaller K, "
        "or e5m2"
    )


# ---- as JSON ----


@pytest.mark.parametrize("name", [*ACCUMULATIONS, "f32", "exact"])
def test_a_plan_is_itself_again(name):
    accumulate = ACCUMULATIONS.get(name, name)
    written = json.loads(json.dumps(plans.plan_to_dict(accumulate)))
    read = plans.accumulation(written, evidence="none")
    assert plans.plan_to_dict(read) == written
    if name in ACCUMULATIONS:
        assert written["fused_width"] == ACCUMULATIONS[name].unit.fused_width
        assert written["promotion"] == ACCUMULATIONS[name].promotion


def test_plans_that_are_not_whole():
    whole = plans.plan_to_dict(plan(UNITS["ada"], promotion=64)) | {
        "epilogue": "product_then_round"
    }
    assert plans.epilogue(whole) is EPILOGUES["product_then_round"]
    with pytest.raises(
        ValueError,
        match=r"all of its keys; fraction_bits, split_k could not be identified or are missing. "
        r"Probe again",
    ):
        plans.accumulation(whole | {"fraction_bits": None, "split_k": None}, evidence="none")
    with pytest.raises(ValueError, match=r"fraction_bits is an integer in .*; got 99"):
        plans.accumulation(whole | {"fraction_bits": 99}, evidence="none")
    with pytest.raises(
        ValueError,
        match=r"a plan's epilogue is one that a probe names, such as scale_then_round, .*; got "
        r"None",
    ):
        plans.epilogue(whole | {"epilogue": None})
