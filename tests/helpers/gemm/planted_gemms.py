"""GEMMs whose arithmetic is known, for a probe to identify."""

import dataclasses

from fp8ref.conformance.gemm.scaled_gemm import ScaledGemm
from fp8ref.formats import FLOAT32
from fp8ref.sim.gemm import gemm
from fp8ref.sim.gemm.accumulate import Accumulation
from fp8ref.sim.gemm.tensor_core import UNITS
from fp8ref.spec import epilogue as epilogues

HOPPER = UNITS["hopper"]


def plan(unit=HOPPER, **fields):
    return Accumulation(name="planted", unit=unit, **fields)


def planted_gemm(
    accumulate,
    *,
    epilogue="scale_then_round",
    with_bias=None,
    out=FLOAT32,
    granularity="tensorwise",
):
    """A GEMM of the simulator's; with_bias: the epilogue where a bias is given."""

    def function(a, b, bias=None):
        chosen = epilogue if bias is None else with_bias
        return gemm.matmul(
            a,
            b,
            accumulate=accumulate,
            epilogue=epilogues.by_name(chosen),
            out_dtype=out,
            bias=bias,
        )

    return ScaledGemm(
        name="planted", function=function, granularity=granularity, bias=with_bias is not None
    )


def fields(accumulation):
    """A plan without names."""
    named = dataclasses.asdict(accumulation)
    del named["name"], named["unit"]["name"], named["unit"]["evidence"]
    return named


def check_planted(found, planted, *, alone=False):
    """Every bit is the simulator's, and the planted plan is among those that fit; alone: it is the
    only one.
    """
    assert found.ok, found.verdict
    assert found.equal == found.compared >= 4096
    assert fields(planted) in [fields(p) for p in found.plans]
    if alone:
        assert len(found.plans) == 1
