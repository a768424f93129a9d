"""Attention in float64 against torch's own, and its gradients against autograd's (spec A-1,
A-14).
"""

import pytest
import torch
from torch.nn import functional

from fp8ref.spec.attention.variants import Mask
from fp8ref.torch.attention import real as attention_real
from fp8ref.torch.attention.operands import operands as operands
from fp8ref.torch.attention.operands.problem import Problem, RankCall, Shape


@pytest.mark.parametrize("causal", [False, True])
def test_it_is_torchs_attention_in_float64(causal):
    """Both have errors of a few hundred times 2^-53."""
    shape = Shape(2, 6, 2, 300, 300, 40)
    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 300, 40, generator=made).requires_grad_() for h in (6, 2, 2))
    wide = [x.double() for x in (q, k, v)]
    right = functional.scaled_dot_product_attention(
        wide[0], *wide[1:], is_causal=causal, scale=0.25, enable_gqa=True
    )
    do = torch.randn(q.shape, generator=made)
    gradients = torch.autograd.grad(right, wide, do.double())
    call = RankCall(variant="exact", mask=Mask(causal=causal), scale=0.25)
    problem = Problem(call, shape)
    with torch.no_grad():
        o, _ = attention_real.forward(q, k, v, problem)
        dq, dk, dv, largest, dsinks = attention_real.backward(do, q, k, v, problem)
    torch.testing.assert_close(operands.by_head(o, shape), right, rtol=1e-12, atol=1e-13)
    for one, wanted in zip((dq, dk, dv), gradients, strict=True):
        torch.testing.assert_close(one, wanted.float(), rtol=2.0**-23, atol=2.0**-40)
    assert largest > 0
    assert dsinks is None
