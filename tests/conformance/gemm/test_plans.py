"""Accumulation plans as JSON, and back."""

import json

import pytest
from planted_gemms import plan

from fp8ref.conformance.gemm import plans
from fp8ref.epilogue import EPILOGUES
from fp8ref.sim.accumulate import ACCUMULATIONS
from fp8ref.sim.tensor_core import UNITS


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
    whole = plans.plan_to_dict(plan(UNITS["ada"], promotion=64)) | {"epilogue": "product_then_round"}
    assert plans.epilogue(whole) is EPILOGUES["product_then_round"]
    with pytest.raises(ValueError, match=r"all of its keys; fraction_bits, split_k could not be told or are missing. Probe again"):
        plans.accumulation(whole | {"fraction_bits": None, "split_k": None}, evidence="none")
    with pytest.raises(ValueError, match=r"fraction_bits is an integer in .*; got 99"):
        plans.accumulation(whole | {"fraction_bits": 99}, evidence="none")
    with pytest.raises(ValueError, match=r"a plan's epilogue is one that a probe names, such as scale_then_round, .*; got None"):
        plans.epilogue(whole | {"epilogue": None})
