"""The proof misses nothing when a fallback is planted (spec B-8)."""

import dataclasses

import pytest
import torch
from helpers.models.proofs import square, step
from torch import nn
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear

from fp8ref.recipe import RECIPES
from fp8ref.torch import proof


@pytest.mark.parametrize("which", ["emulated", "plain", "accumulation", "gone"])
def test_a_planted_fallback_is_missing(which):
    model, plan = square("tensorwise"), {"0": "tensorwise", "2": "tensorwise"}
    bare = nn.Linear(128, 128, bias=False).bfloat16()
    gemms = [
        ("output", "f8e4m3fn x f8e4m3fn, fast"),
        ("grad_input", "f8e5m2 x f8e4m3fn, slow"),
        ("grad_weight", "f8e5m2 x f8e4m3fn, slow"),
    ]
    if which == "emulated":
        model[2], have = (
            Float8Linear.from_float(bare, Float8LinearConfig(emulate=True)),
            "f32 x f32",
        )
    elif which == "plain":
        model[2], have = bare, "bf16 x bf16"
    elif which == "gone":
        model[2], have = nn.Identity(), "no GEMM of it was seen"
    else:
        slow = dataclasses.replace(RECIPES["tensorwise"].output, accumulate="slow")
        model[2] = square(dataclasses.replace(RECIPES["tensorwise"], output=slow))[2]
        gemms, have = gemms[:1], "f8e4m3fn x f8e4m3fn, slow, tensorwise"
    with proof.trace_eager(model) as trace:
        step(model)
    assert proof.missing(trace, plan) == [
        f"2/{gemm}: planned {wanted}, tensorwise; {have}" for gemm, wanted in gemms
    ]


def test_another_granularity_and_a_backward_pass_that_never_ran_are_missing():
    model = square("rowwise")
    with proof.trace_eager(model) as trace:
        model(torch.randn(128, 128).bfloat16())
    assert proof.missing(trace, {"2": "rowwise"}) == [
        f"2/{which}: planned f8e4m3fn x f8e4m3fn, slow, rowwise; no GEMM of it was seen"
        for which in ("grad_input", "grad_weight")
    ]
    assert proof.missing(trace, {"2": "tensorwise"})[0] == (
        "2/output: planned f8e4m3fn x f8e4m3fn, fast, tensorwise; f8e4m3fn x f8e4m3fn, fast, "
        "rowwise"
    )


def test_one_fallback_among_many_steps_is_missing():
    model = square("tensorwise")
    with proof.trace_eager(model) as trace:
        step(model)
        model[2].linear_mm_config = model[2].linear_mm_config._replace(
            output=model[2].linear_mm_config.output._replace(use_fast_accum=False)
        )
        step(model)
    assert proof.missing(trace, {"0": "tensorwise", "2": "tensorwise"}) == [
        "2/output: planned f8e4m3fn x f8e4m3fn, fast, tensorwise; f8e4m3fn x f8e4m3fn, slow, "
        "tensorwise"
    ]


def test_the_manifest_has_each_gemm_once():
    model = square("rowwise_with_gw_hp")
    with proof.trace_eager(model) as trace:
        step(model)
        step(model)
    found = proof.manifest(trace, {"2": "rowwise_with_gw_hp"}, ["a line"])
    assert list(found) == [
        "read_from",
        "gemms",
        "on_dequantised_operands",
        "pruned",
        "gathers",
        "missing",
    ]
    assert (found["read_from"], found["missing"]) == ("eager dispatch", ["a line"])
    assert found["gemms"] == [
        {
            "gemm": "2/output",
            "a": "f8e4m3fn",
            "b": "f8e4m3fn",
            "accumulate": "fast",
            "granularity": "rowwise",
            "fp8": True,
        },
        {
            "gemm": "2/grad_input",
            "a": "f8e4m3fn",
            "b": "f8e4m3fn",
            "accumulate": "slow",
            "granularity": "rowwise",
            "fp8": True,
        },
        {
            "gemm": "2/grad_weight",
            "a": "bf16",
            "b": "bf16",
            "accumulate": None,
            "granularity": None,
            "fp8": False,
        },
    ]
