"""Planted epilogues are identified, with and without a bias."""

import dataclasses

import pytest
from helpers.gemm.planted_gemms import planted_gemm

from fp8ref.conformance.gemm import identify_gemm
from fp8ref.conformance.gemm.epilogues import candidates
from fp8ref.formats import BFLOAT16, FLOAT16, FLOAT32


@pytest.mark.grid(2)
@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
@pytest.mark.parametrize(
    "epilogue", [e for e in candidates() if e.bias is None], ids=lambda e: e.name
)
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


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    "epilogue",
    [e for e in candidates() if e.bias and e.rounding == "nearest_even"],
    ids=lambda e: e.name,
)
def test_epilogues_with_a_bias(epilogue):
    without = next(
        e for e in candidates() if dataclasses.replace(epilogue, name=e.name, bias=None) == e
    )
    planted = planted_gemm(
        "hopper_slow", epilogue=without, with_bias=epilogue, out=BFLOAT16, granularity="rowwise"
    )
    found = identify_gemm(planted, shape=(64, 64, 256))
    biased = next(f for f in found.findings if f.what == "epilogue with bias")
    assert found.ok
    assert epilogue.name in (biased.value, *biased.others)


def test_an_ignored_bias_is_reported():
    planted = planted_gemm("hopper_slow", out=BFLOAT16)
    found = identify_gemm(
        dataclasses.replace(
            planted, bias=True, function=lambda a, b, bias=None: planted.function(a, b)
        ),
        shape=(32, 32, 512),
    )
    assert not found.ok
    assert "epilogue with bias" in found.verdict
