"""The formats of operands: of a recipe's GEMMs, and of casts alone."""

import dataclasses

import pytest

from fp8ref.formats import E2M1FN, E3M4, E4M3FN, E5M2, NARROW_FORMATS, QUANTIZED_FORMATS
from fp8ref.policy import POLICIES
from fp8ref.spec.gemm import CastSpec, GemmSpec


@pytest.mark.parametrize("fmt", NARROW_FORMATS.values(), ids=str)
def test_a_recipe_takes_fp8_and_fp4_alone(fmt):
    cast = CastSpec(fmt=fmt)
    if fmt.name in QUANTIZED_FORMATS:
        assert GemmSpec(a=cast, b=cast, accumulate="slow").fp8
        return
    other = CastSpec(fmt=E4M3FN)
    for operands in ({"a": cast, "b": other}, {"a": other, "b": cast}):
        with pytest.raises(ValueError, match=f"operand's fmt is one of e4m3fn, .*; got '{fmt}'"):
            GemmSpec(**operands, accumulate="slow")


def test_other_formats_are_simulated():
    assert [CastSpec(fmt=fmt).simulated for fmt in (E4M3FN, E5M2, E2M1FN, E3M4)] == [
        False,
        False,
        True,
        True,
    ]
    mx = CastSpec(fmt=E2M1FN, granularity="mx_1x32", policy=POLICIES["mx_rceil"])
    assert not mx.simulated
    assert dataclasses.replace(mx, policy=POLICIES["torchao"]).simulated
    assert not dataclasses.replace(mx, granularity="mx_32x32").simulated
    assert not dataclasses.replace(mx, rounding="stochastic").simulated
    assert dataclasses.replace(mx, granularity="nvfp4_1x16").simulated
    assert CastSpec(fmt=E3M4, granularity="mx_1x32").simulated
