"""Attention sinks in PyTorch: rows of extreme sinks, ranks of heads, dtypes and compiled graphs
(spec A-23).
"""

import numpy as np
import pytest
import torch

from fp8ref.spec.attention.call import Call
from fp8ref.torch.attention import attention
from fp8ref.torch.attention import sinks as attention_sinks

CAPPED = Call(variant="cudnn", softcap=3.0)


def test_a_sink_joins_the_sum_or_replaces_it():
    """Powers of two, so that nothing is rounded: a maximum m = 4 with f = 2 is an exponent of 8."""
    log2e = np.float32(np.log2(np.e))
    o, total, maximum = (
        torch.ones(3, 2),
        torch.full((3,), 512.0),
        torch.tensor([4.0, 4.0, -torch.inf]),
    )
    call, sinks = (Call(variant="fa4", arithmetic="stated"), torch.tensor([6 / log2e, 100.0, 3.0]))
    for factor in (2.0, torch.full((1,), 2.0)):
        new, sums, maxima = attention_sinks.add(o, total, maximum, sinks, factor, call)
        assert sums[0].item() == pytest.approx(512 + 2.0 ** (6 - 8 + 8), rel=2.0**-20)
        assert maxima[0] == 4
        for n, sink in ((1, 100), (2, 3)):
            assert not new[n].any()
            assert sums[n] == 256
            assert maxima[n].item() == pytest.approx(sink * log2e / 2, rel=2.0**-22)


def tensors(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, h, 32, 32, generator=generator).to(dtype).requires_grad_() for h in (4, 2, 2)
    ]


def test_a_sink_has_a_gradient_of_its_dtype_and_of_its_own_head():
    q, k, v = tensors()
    sinks = torch.tensor([0.5, -1, 2, 1], dtype=torch.bfloat16, requires_grad=True)
    o = attention.apply(q, k, v, variant=CAPPED, sinks=sinks)
    (of_first,) = torch.autograd.grad(o[:, 0].float().sum(), sinks, retain_graph=True)
    assert of_first.dtype == torch.bfloat16
    assert of_first[0] != 0
    assert not of_first[1:].any()
    with torch.no_grad():  # the softmax of a row with a sink of 1000 is the sink's
        assert not attention.apply(q, k, v, variant="cudnn", sinks=torch.full((4,), 1000.0)).any()


def test_sinks_alone_may_have_gradients():
    q, k, v = (x.detach() for x in tensors())
    sinks = torch.zeros(4, requires_grad=True)
    attention.apply(q, k, v, variant="mxfp8", sinks=sinks).float().square().sum().backward()
    assert (sinks.grad < 0).all()  # a larger sink makes o smaller
    with pytest.raises(ValueError, match="has no backward pass"):
        attention.apply(q, k, v, variant="fa3", sinks=sinks)


def test_ranks_of_heads_have_the_sinks_of_their_heads():
    q, k, v = tensors()
    sinks = torch.tensor([0.5, -1, 2, 1])
    call = Call(variant="fa3", softcap=2.0)  # whose scales are of heads
    with torch.no_grad():
        whole = attention.apply(q, k, v, variant=call, sinks=sinks)
        parts = [
            attention.apply(
                q[:, 2 * n : 2 * n + 2],
                k[:, n : n + 1],
                v[:, n : n + 1],
                variant=call,
                sinks=sinks[2 * n : 2 * n + 2],
            )
            for n in (0, 1)
        ]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=0)


@pytest.mark.slow
def test_a_compiled_graph_has_sinks_and_their_gradients():
    """Traced, products have other memory layouts and orders: a code of P or dS may differ, 2^-3 of
    one of 32 terms.
    """
    q, k, v = tensors(torch.float32)
    sinks = torch.tensor([0.5, -1, 2, 1], requires_grad=True)

    def loss(q, k, v, sinks):
        return attention.apply(q, k, v, variant=CAPPED, sinks=sinks).square().sum()

    right = torch.autograd.grad(loss(q, k, v, sinks), (q, k, v, sinks))
    found = torch.autograd.grad(
        torch.compile(loss, fullgraph=True, backend="aot_eager")(q, k, v, sinks), (q, k, v, sinks)
    )
    for mine, other in zip(found, right, strict=True):
        assert (mine - other).norm() <= 2.0**-3 / 32 * other.norm()
