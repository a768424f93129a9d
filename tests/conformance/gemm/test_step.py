"""Planted steps of the accumulation are identified: width, bits, roundings, exponents."""

import dataclasses
import itertools

import pytest
from helpers.gemm.planted_gemms import HOPPER, check_planted, plan, planted_gemm

from fp8ref.conformance.gemm import identify_gemm
from fp8ref.formats import E4M3FN, E5M2
from fp8ref.sim.gemm.accumulate import Accumulation
from fp8ref.sim.gemm.tensor_core import UNITS

SHAPE = (64, 64, 4096)


@pytest.mark.grid(2)
@pytest.mark.parametrize("width", [4, 8, 16, 32])
@pytest.mark.parametrize("fraction_bits", [12, 13, 14])
def test_width_and_fraction_bits(fraction_bits, width):
    planted = plan(dataclasses.replace(HOPPER, fused_width=width, fraction_bits=fraction_bits))
    found = identify_gemm(planted_gemm(planted), shape=SHAPE)
    check_planted(found, planted)
    assert (found.plan["fused_width"], found.plan["fraction_bits"]) == (width, fraction_bits)


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("fraction_bits", "output_bits"), [(10, 10), (13, 12), (13, 16), (17, 14), (20, 23), (25, 23)]
)
def test_output_bits(fraction_bits, output_bits):
    planted = plan(
        dataclasses.replace(HOPPER, fraction_bits=fraction_bits, output_bits=output_bits)
    )
    found = identify_gemm(planted_gemm(planted), shape=SHAPE)
    check_planted(found, planted)
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
    "normalized factors": {"exponents": "factors"},
    "normalized products": {"exponents": "products"},
    "zeros count": {"zeros": "counted"},
    "no subnormals": {"subnormals": "flushed"},
    "floor everywhere, no subnormals": {
        "rounding": "toward_negative",
        "output_rounding": "toward_negative",
        "subnormals": "flushed",
    },
}


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    "formats", [(E4M3FN, E4M3FN), (E5M2, E4M3FN), (E5M2, E5M2)], ids=lambda p: f"{p[0]}-{p[1]}"
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_a_step_does(variant, formats):
    planted = plan(dataclasses.replace(HOPPER, **VARIANTS[variant]), promotion=128)
    found = identify_gemm(planted_gemm(planted), shape=(32, 32, 256), formats=formats)
    check_planted(found, planted)
    assert {key: found.plan[key] for key in VARIANTS[variant]} == VARIANTS[variant]


@pytest.mark.grid(2)
@pytest.mark.parametrize("unit", ["hopper", "ada"])
@pytest.mark.parametrize(
    "formats", list(itertools.product((E4M3FN, E5M2), repeat=2)), ids=lambda p: f"{p[0]}-{p[1]}"
)
def test_every_pair_of_formats(formats, unit):
    planted = Accumulation(name="planted", unit=UNITS[unit], promotion=128)
    found = identify_gemm(planted_gemm(planted), shape=(64, 64, 512), formats=formats)
    check_planted(found, planted)
