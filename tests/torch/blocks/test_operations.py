"""Norm, SwiGLU and rotary embedding: their gradients are autograd's, bit for bit (M-3)."""

import pytest
import torch

from fp8ref.torch.blocks import operations
from fp8ref.torch.blocks.operations import Norm


def tensors(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in shapes]


def normalized(x, weight, norm):
    """By the trainer's module, or by transformers'."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    if norm.twice:
        return weight * wide.to(x.dtype)
    return (wide * weight.float()).to(x.dtype)


@pytest.mark.parametrize("twice", [False, True])
def test_a_norm_and_its_gradients_are_autograds(twice):
    norm, (x, weight, g) = Norm(1e-5, twice), tensors((3, 5, 64), (64,), (3, 5, 64))
    y = normalized(x, weight, norm)
    expected = torch.autograd.grad(y, (x, weight), g)
    with torch.no_grad():
        rstd = norm.rstd(x)
        assert torch.equal(norm.value(x, rstd, weight), y)
        assert all(map(torch.equal, norm.gradient(g, x, rstd, weight), expected))


@pytest.mark.parametrize("twice", [False, True])
def test_the_gradients_of_swiglu_are_autograds(twice):
    gate, up, g = tensors(*[(7, 64)] * 3)
    expected = torch.autograd.grad(operations.swiglu(gate, up, twice=twice), (gate, up), g)
    with torch.no_grad():
        found = operations.swiglu_gradient(g, gate, up, twice=twice)
    assert all(map(torch.equal, found, expected))


def test_where_silu_is_rounded_changes_bits():
    gate, up = tensors((7, 64), (7, 64))
    once, twice = (operations.swiglu(gate, up, twice=twice) for twice in (False, True))
    assert not torch.equal(once, twice)


def test_the_gradient_of_a_rotation_is_autograds():
    x, g = tensors((2, 5, 3, 8), (2, 5, 3, 8))
    cos, sin = torch.rand(2, 5, 1, 8, generator=torch.Generator().manual_seed(1))
    (expected,) = torch.autograd.grad(operations.rotate(x, cos, sin), x, g)
    assert torch.equal(operations.rotate_gradient(g, cos, sin), expected)


def test_a_quarter_turn_exchanges_halves():
    x = torch.arange(4.0)
    turned = operations.rotate(x, torch.zeros(4), torch.ones(4))
    assert turned.tolist() == [-2.0, -3.0, 0.0, 1.0]
