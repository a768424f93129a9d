"""GEMMs of known arithmetic, for the probe to identify."""

from fp8ref import epilogue as epilogues
from fp8ref.conformance.gemm.adapter import Subject
from fp8ref.formats import FLOAT32
from fp8ref.sim import gemm
from fp8ref.sim.accumulate import Accumulation
from fp8ref.sim.tensor_core import UNITS

HOPPER = UNITS["hopper"]


def plan(unit=HOPPER, **fields):
    return Accumulation(name="planted", unit=unit, **fields)


def subject(accumulate, *, epilogue="scale_then_round", with_bias=None, out=FLOAT32, granularity="tensorwise"):
    """A GEMM of the simulator's; with_bias: the epilogue where a bias is given."""

    def function(a, b, bias=None):
        chosen = epilogue if bias is None else with_bias
        return gemm.matmul(a, b, accumulate=accumulate, epilogue=epilogues.by_name(chosen), out_dtype=out, bias=bias)

    return Subject(name="planted", function=function, granularity=granularity, bias=with_bias is not None)
