"""Measurements of attention's operands in PyTorch: counts of ragged MX blocks, and operands that share codes (spec Q-13)."""

import dataclasses

import pytest
import torch

from fp8ref.attention import VARIANTS
from fp8ref.attention_products import planned
from fp8ref.formats import E4M3FN
from fp8ref.stats import FIELDS
from fp8ref.torch import attention, attention_stats, head_scaling


@pytest.mark.parametrize(
    ("granularity", "policy"), [("tensor", "te_current"), ("head", "te_current"), ("rows_128", "te_current"), ("mx_1x32", "mx_rceil")]
)
def test_elements_are_counted_once(granularity, policy):
    """50 tokens are no whole blocks of 32: zeros that fill the last one up are not counted."""
    variant = dataclasses.replace(VARIANTS["cudnn"], granularity=granularity, policy=policy, backward=None, p_scale=1.0, out_scales="tile")
    x = torch.randn(2, 4, 50, 32, generator=torch.Generator().manual_seed(0))
    along = granularity == "mx_1x32"
    amax = head_scaling.amax(x, granularity, heads=2, along_tokens=along)
    tensor = head_scaling.quantize(x, E4M3FN, granularity, policy, amax_of_groups=amax, along_tokens=along)
    x[1, 3, 49, 31] = torch.inf
    found = dict(zip(FIELDS, attention_stats.measure(x, tensor, E4M3FN, variant, along_tokens=along).tolist(), strict=True))
    assert (found["count"], found["non_finite"]) == (2 * 4 * 50 * 32, 1)
    assert found["noise"] / found["signal"] < 2.0**-8  # e4m3 rounds by 2^-4 of a number at most
    assert (found["scale_min"] < found["scale_max"]) == (granularity != "tensor")


class Layer(torch.nn.Module):
    def __init__(self, variant):
        super().__init__()
        self.variant = variant

    def forward(self, q, k, v):
        return attention.apply(q, k, v, variant=self.variant)


@pytest.mark.parametrize("variant", ["cudnn", "mxfp8"])
def test_every_planned_operand_is_measured_and_shared_codes_once(variant, monkeypatch):
    calls, measure = [], attention_stats.measure
    monkeypatch.setattr(attention_stats, "measure", lambda *a, **k: calls.append(1) or measure(*a, **k))
    layer, found = Layer(variant), {}
    operands = planned(["layer"], VARIANTS[variant])
    q, k, v = (torch.randn(1, 2, 40, 32).bfloat16().requires_grad_() for _ in range(3))
    with attention_stats.measuring({"layer": layer}, VARIANTS[variant], operands, found):
        layer(q, k, v).sum().backward()
    assert list(found) == sorted(found, key=list(found).index)
    assert set(found) == {operand.name for operand in operands}
    assert len(calls) == (7 if variant == "mxfp8" else 4)  # MX has other blocks of q, k and do along the tokens
