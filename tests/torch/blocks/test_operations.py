"""Norm, SwiGLU and rotary embedding: their gradients are autograd's, bit for bit (M-3)."""

import pytest
import torch
from transformers.models.llama import modeling_llama

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


def transformers_rotation(x, cos, sin):
    return modeling_llama.apply_rotary_pos_emb(x, x, cos, sin)[0]


def complex_rotation(x, cos, sin):
    """torchtitan's, of neighbors."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    angles = torch.complex(cos[..., ::2].contiguous(), sin[..., ::2].contiguous())
    return torch.view_as_real(pairs * angles).flatten(-2).to(x.dtype)


def once(x, cos, sin):
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat([-second, first], -1)
    return (wide * cos + turned * sin).to(x.dtype)


LIBRARIES = {"halves": once, "rounded halves": transformers_rotation, "pairs": complex_rotation}


@pytest.mark.parametrize("form", LIBRARIES)
def test_a_rotation_and_its_gradient_are_the_librarys(form):  # M-3
    x, g = tensors((2, 3, 8, 16), (2, 3, 8, 16))
    with torch.no_grad():
        g[:, 0] = 0
        g[:, :, ::2].neg_()  # zeros of both signs
    cos, sin = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))
    if form == "rounded halves":
        cos, sin = cos.bfloat16(), sin.bfloat16()
    if form == "pairs":
        cos, sin = (table[..., ::2].repeat_interleave(2, -1) for table in (cos, sin))
    batched = form == "rounded halves"  # transformers' tables are [B, T, D]
    y = LIBRARIES[form](x, cos[None] if batched else cos, sin[None] if batched else sin)
    (expected,) = torch.autograd.grad(y, x, g)
    with torch.no_grad():
        if form == "rounded halves":
            cos, sin = cos.float(), sin.float()  # exactly the same numbers
        turned, grad = (
            f(z, cos, sin, form)
            for f, z in ((operations.rotate, x), (operations.rotate_gradient, g))
        )
        assert torch.equal(turned, y)
        # of zeros the signs too
        assert torch.equal(grad.view(torch.int16), expected.view(torch.int16))


def test_a_quarter_turn_exchanges_halves():
    x = torch.arange(4.0)
    turned = operations.rotate(x, torch.zeros(4), torch.ones(4))
    assert turned.tolist() == [-2.0, -3.0, 0.0, 1.0]


def test_the_gradient_of_a_rotated_operand_has_its_layout():
    """Heads [B, H, T, D] that are a view of [B, T, H D]: another layout would be copied back."""
    tables = torch.randn(2, 8, 16)
    x = torch.randn(2, 8, 64, dtype=torch.bfloat16).view(2, 8, 4, 16).transpose(1, 2)
    x.requires_grad_()
    rotated = operations.rotate(x, *tables)
    (grad,) = torch.autograd.grad(rotated, x, torch.randn_like(x))
    assert grad.stride() == x.stride()
