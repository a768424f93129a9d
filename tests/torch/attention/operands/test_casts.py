"""Attention with single casts in PyTorch, held to the simulator (spec E-9)."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8ref.selection import attention_casts
from fp8ref.sim.attention.operands import casts as sim
from fp8ref.torch.attention.operands import casts as attention_casts_of_torch

LAYER = "model.layers.0.self_attn"


def tensors():
    rng = np.random.default_rng(0)
    shapes = ((2, 4, 24, 16), (2, 2, 24, 16), (2, 2, 24, 16), (2, 4, 24, 16))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize(
    "roles", [(), *((role,) for role in attention_casts.ROLES), attention_casts.ROLES], ids=" ".join
)
def test_output_and_gradients_are_the_simulators(roles):
    q, k, v, do = tensors()
    casts = attention_casts.of("cudnn", roles, LAYER)
    o, grads = _passed(q, k, v, do, casts)
    expected = sim.forward(q, k, v, casts).o, *sim.backward(do, q, k, v, casts)
    for mine, his in zip((o, *grads), expected, strict=True):
        # A sum of 24 or 16 float32 terms has an error of at most 24 2^-24 of the sum of magnitudes,
        # here below 2^6; three of them follow each other. Of p and ds an element beside a tie may
        # have the next code, which changes a few rows.
        far = np.abs(mine - his) > 3 * 24 * 2**-24 * 2**6
        assert far.mean() <= (0.02 if set(roles) & {"p", "ds"} else 0)


def _passed(q, k, v, do, casts):
    leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    o = attention_casts_of_torch.apply(*leaves, casts)
    return o.detach().numpy(), [
        g.numpy() for g in torch.autograd.grad(o, leaves, torch.from_numpy(do))
    ]


@pytest.mark.parametrize("roles", [(), attention_casts.ROLES], ids=" ".join)
def test_autocast_changes_nothing(roles):
    casts = attention_casts.of("cudnn", roles, LAYER)
    o, grads = _passed(*tensors(), casts)
    with torch.autocast("cpu", torch.bfloat16):
        under, its = _passed(*tensors(), casts)
    for mine, plain in zip((under, *its), (o, *grads), strict=True):
        np.testing.assert_array_equal(mine, plain)


class _Precisions(TorchDispatchMode):
    """The precisions under which matrices are multiplied."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.bmm:
            self.found.append(
                [
                    backend.matmul.fp32_precision
                    for backend in (torch.backends.cuda, torch.backends.mkldnn)
                ]
            )
        return func(*args, **(kwargs or {}))


def test_products_are_of_float32_whatever_precision_torch_is_told():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with _Precisions() as precisions:
            _passed(*tensors(), attention_casts.of("cudnn", ["p"], LAYER))
        assert torch.get_float32_matmul_precision() == "medium"  # as the caller had it
    finally:
        torch.set_float32_matmul_precision(before)
    assert precisions.found == [["ieee", "ieee"]] * 6


def test_second_derivatives_are_refused():
    leaves = [torch.from_numpy(x).requires_grad_() for x in tensors()[:3]]
    o = attention_casts_of_torch.apply(*leaves, attention_casts.of("cudnn", ["p"], LAYER))
    with pytest.raises(ValueError, match="are not differentiated again; got create_graph=True"):
        torch.autograd.grad(o.sum(), leaves, create_graph=True)
