"""Measurements of attention's operands in PyTorch: counts of ragged MX blocks, and operands that
share codes (spec Q-13).
"""

import pytest
import torch

from fp8ref.formats import E4M3FN
from fp8ref.selection.statistics import FIELDS
from fp8ref.spec.attention.products import planned
from fp8ref.spec.attention.variant import blocks as blocks_of_scales
from fp8ref.spec.attention.variants import VARIANTS, Mask
from fp8ref.torch.attention import attention
from fp8ref.torch.attention import statistics as attention_stats
from fp8ref.torch.attention.operands import heads as head_scaling
from fp8ref.torch.attention.operands.inputs import check
from fp8ref.torch.attention.operands.problem import Problem, RankCall, padded_documents


@pytest.mark.parametrize(
    ("granularity", "policy"),
    [
        ("tensor", "te_current"),
        ("head", "te_current"),
        ("rows_128", "te_current"),
        ("mx_1x32", "mx_rceil"),
    ],
)
def test_elements_are_counted_once(granularity, policy):
    """50 tokens are no whole blocks of 32: zeros that fill the last one up are not counted."""
    x = torch.randn(2, 4, 50, 32, generator=torch.Generator().manual_seed(0))
    blocks = blocks_of_scales(granularity, x.shape, heads=2, along_tokens=True)
    amax = head_scaling.amax(x, blocks)
    tensor = head_scaling.quantize(x, E4M3FN, blocks, policy, amax=amax)
    x[1, 3, 49, 31] = torch.inf
    found = dict(zip(FIELDS, attention_stats.measure(x, tensor, E4M3FN).tolist(), strict=True))
    assert (found["count"], found["non_finite"]) == (2 * 4 * 50 * 32, 1)
    assert found["noise"] / found["signal"] < 2.0**-8  # e4m3 rounds by 2^-4 of a number at most
    assert (found["scale_min"] < found["scale_max"]) == (granularity != "tensor")


@pytest.mark.parametrize("documents", [False, True])
def test_scores_of_keys_that_are_seen_are_counted(documents):
    q, k = torch.zeros(2, 4, 150, 32), torch.zeros(2, 2, 170, 32)
    call = RankCall(variant="cudnn", mask=Mask(causal=True, window=(60, None)))
    at = (
        [torch.arange(n).div(40, rounding_mode="floor").expand(2, n) for n in (150, 170)]
        if documents
        else [None, None]
    )
    none = torch.zeros((), dtype=torch.int64)
    problem = Problem(call, check(q, k, k, call), padded_documents(*at))
    found = attention_stats.counts_of(problem, none + 3, none)
    rows, keys = torch.arange(150)[:, None], torch.arange(170)
    seen = (keys <= rows + 20) & (keys >= rows + 20 - 60)
    if documents:
        seen &= rows // 40 == keys // 40
    assert found.tolist() == [2 * 4 * int(seen.sum()), 3, 0]


class Layer(torch.nn.Module):
    def __init__(self, variant):
        super().__init__()
        self.variant = variant

    def forward(self, q, k, v):
        return attention.apply(q, k, v, variant=self.variant)


@pytest.mark.parametrize("variant", ["cudnn", "mxfp8"])
def test_every_planned_operand_is_measured_and_shared_codes_once(variant, monkeypatch):
    calls, measure = [], attention_stats.measure
    monkeypatch.setattr(
        attention_stats, "measure", lambda *a, **k: calls.append(1) or measure(*a, **k)
    )
    layer, found = Layer(variant), {}
    operands = planned(["layer"], VARIANTS[variant])
    q, k, v = (torch.randn(1, 2, 40, 32).bfloat16().requires_grad_() for _ in range(3))
    with attention_stats.measuring({"layer": layer}, VARIANTS[variant], operands, found):
        layer(q, k, v).sum().backward()
    assert list(found) == sorted(found, key=list(found).index)
    assert set(found) == {operand.name for operand in operands}
    assert found["layer/values/p"][0].tolist()[0] == 2 * 40 * 40
    # MX has other blocks of q, k and do along the tokens
    assert len(calls) == (7 if variant == "mxfp8" else 4)
