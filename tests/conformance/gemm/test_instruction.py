"""An instruction and its accumulator: simulated ones are found out, and one that is not the
simulator's is said to be none of its.
"""

import dataclasses
from itertools import product

import numpy as np
import pytest
from helpers.gemm import mma_integers

from fp8ref.conformance.gemm import instruction
from fp8ref.formats import E4M3FN, E5M2
from fp8ref.sim.gemm import gemm
from fp8ref.sim.gemm.tensor_core import UNITS

PAIRS = list(product((E4M3FN, E5M2), repeat=2))
GROUPS = {
    "accumulators alone",
    "accumulators and zero products",
    "accumulators and 1 x 1",
    "accumulators near overflow",
    "signs of zero",
    "NaN and infinities",
    "NaN accumulators",
}


def simulated(unit):
    return lambda a, b, c, fmt_a, fmt_b: gemm.mma(a, b, c, fmt_a=fmt_a, fmt_b=fmt_b, unit=unit)


def by_integers(unit):
    """A unit of mma_integers, of finite operands: ones that the simulator does not have."""

    def multiply(a, b, c, fmt_a, fmt_b):
        names, bits = (fmt_a.name, fmt_b.name), np.asarray(c, np.float32).view(np.uint32)
        rows = [
            [
                mma_integers.chain(x, y, int(bits[i, j]), names, unit)
                for j, y in enumerate(b.tolist())
            ]
            for i, x in enumerate(a.tolist())
        ]
        return np.array(rows, np.uint32).view(np.float32)

    return multiply


def found(multiply, fmt_a=E4M3FN, fmt_b=E4M3FN, count=20_000):
    return instruction.identify(multiply, fmt_a, fmt_b, name="planted", count=count)


@pytest.mark.grid(2)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p[0]}-{p[1]}")
@pytest.mark.parametrize("unit", ["hopper", "ada"])
def test_a_simulated_instruction(unit, pair):
    result = found(simulated(unit), *pair)
    assert result.ok
    assert result.compared > 20_000
    assert (
        dataclasses.replace(result.units[0], name=unit, evidence=UNITS[unit].evidence)
        == UNITS[unit]
    )
    assert {f.what for f in result.findings if f.value == "as the simulator has it"} == GROUPS
    assert {group.group for group in result.groups} == GROUPS


@pytest.mark.parametrize(
    ("unit", "pair"),
    [("hopper", (E4M3FN, E4M3FN)), ("ada", (E5M2, E4M3FN)), ("blackwell", (E4M3FN, E4M3FN))],
    ids=str,
)
def test_the_rule_for_zero_factors_is_found(unit, pair):  # G-11
    """The open question: steps from 0 are alike, and tiny accumulators next to zero products tell
    mmaemu's rule from MMA-Sim's.
    """
    least = dataclasses.replace(UNITS[unit], zeros="least")
    result = found(simulated(least), *pair, count=0)
    assert result.ok
    assert {one.zeros for one in result.units} == {"least"}
    said = next(f for f in result.findings if f.what == "zeros")
    assert (said.value, said.others) == ("least", ())
    assert "as 'excluded', 468 of 468 as 'least'" in said.evidence
    other = next(f for f in found(simulated(unit), *pair, count=0).findings if f.what == "zeros")
    assert (other.value, other.others) == ("excluded", ())


def test_an_accumulator_that_is_added_afterwards():
    """It is not aligned with the products: steps from 0 are Hopper's, and accumulators next to
    products tell.
    """
    late = mma_integers.HOPPER._replace(late=True)
    plain = simulated("hopper")

    def multiply(a, b, c, fmt_a, fmt_b):
        sums = plain(a, b, np.zeros_like(c), fmt_a, fmt_b)
        with np.errstate(all="ignore"):
            return np.where(
                np.isfinite(sums) & np.isfinite(c), sums + c, plain(a, b, c, fmt_a, fmt_b)
            ).astype(np.float32)

    sample = [np.array([[0x38] + [0] * 31], np.uint8)] * 2
    c = np.array([[3.14159]], np.float32)
    assert multiply(*sample, c, E4M3FN, E4M3FN).view(np.uint32) == by_integers(late)(
        *sample, c, E4M3FN, E4M3FN
    ).view(np.uint32)
    result = found(multiply, count=0)
    assert not result.ok
    assert result.units[0].fraction_bits == 13
    wrong = next(f for f in result.findings if f.what == "accumulators and 1 x 1")
    assert wrong.value == "not as the simulator has it"
    assert "gave" in wrong.evidence
    signs = next(f for f in result.findings if f.what == "NaN and infinities")
    assert signs.value == "as the simulator has it"


def test_no_unit_of_the_simulators():
    """Sums in float32, in order: no step at all."""

    def multiply(a, b, c, fmt_a, fmt_b):
        one = np.ones((), np.float32)
        operands = (
            instruction.Quantized(codes, one, one, fmt, "tensorwise", -1)
            for codes, fmt in ((a, fmt_a), (b, fmt_b))
        )
        with np.errstate(invalid="ignore", over="ignore"):
            return gemm.matmul(*operands, accumulate="f32") + c

    result = found(multiply)
    assert not result.ok
    assert not result.units
    assert result.findings[0].value == "sequential"


def test_random_operands_are_of_all_kinds():
    a, b, c = instruction.random_operands(E4M3FN, E5M2, 0)
    assert (a.shape, b.shape, c.shape, c.dtype) == ((128, 32), (128, 32), (128, 128), np.float32)
    assert np.isfinite(c).all()
    assert (c == 0).any()
    assert ((np.abs(c) < 2.0**-126) & (c != 0)).any()  # subnormal
    assert (np.abs(c) > 2.0**100).any()
    for codes, fmt in ((a, E4M3FN), (b, E5M2)):
        assert (codes & 0x7F <= fmt.max_code).all()
        assert (codes == 0).any()
    again = instruction.random_operands(E4M3FN, E5M2, 0)
    assert all(np.array_equal(x, y) for x, y in zip((a, b, c), again, strict=True))
