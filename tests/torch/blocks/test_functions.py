"""The functions of a block's parts: what they take, return and keep for their backward pass."""

import pytest
import torch
from torch import nn

from fp8ref.torch.blocks import functions, operations
from fp8ref.torch.blocks.functions import FIRST, Part
from fp8ref.torch.blocks.operations import Norm
from fp8ref.torch.kernels import fused
from fp8ref.torch.linear.linear import Linear
from fp8ref.torch.linear.passes import TENSORS
from fp8ref.torch.linear.spec import Spec

TOKENS, WIDTH, HEADS = 12, 16, 2


def linears(count, kernels="plain", recipe="tensorwise", sizes=(32, 32)):
    """Linears in bfloat16, of sizes (N, K)."""
    torch.manual_seed(0)
    return [
        Linear.of(nn.Linear(*sizes[::-1], bias=False).bfloat16(), recipe, None, kernels)
        for _ in range(count)
    ]


def applied(part_linears, h, *, residual=None, weight=None, tables=(None, None), **constants):
    """What a part's function returns."""
    specs = tuple(Spec.numbered(each.spec_number) for each in part_linears)
    part = Part(specs, Norm(1e-5) if weight is not None else None, **constants)
    tensors = [x for each in part_linears for x in each.tensors(h)]
    return functions.bind(part).apply(h, residual, weight, *tables, *tensors)


def stream(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, TOKENS, 32, generator=generator).bfloat16().requires_grad_()


def test_a_part_has_one_function():
    made = linears(3)
    numbers = tuple(each.spec_number for each in made)
    part = Part(tuple(map(Spec.numbered, numbers)), Norm(1e-5, twice=True), rotated=2, form="pairs")
    assert functions.numbered(numbers, 1e-5, True, False, False, 2, "pairs") is functions.bind(part)
    other = functions.numbered(numbers, 1e-5, True, False, False, 2, "halves")
    assert other is not functions.bind(part)
    assert functions.numbered(numbers, None, False, False) is not other


def test_an_mlps_first_two_linears_read_its_input():
    specs = tuple(Spec.numbered(each.spec_number) for each in linears(3))
    assert Part(specs, None).readers == 3
    assert Part(specs, None, mlp=True).readers == 2


def test_a_function_takes_five_tensors_and_those_of_its_linears():
    made, h = linears(2), stream()
    assert FIRST == 5  # h, residual, norm's weight, cos, sin
    assert all(len(each.tensors(h)) == TENSORS for each in made)
    s, *outputs = applied(made, h)
    assert s is None
    assert all(torch.equal(y, each(h)) for y, each in zip(outputs, made, strict=True))


def test_a_residual_is_added_and_returned():
    made, h, residual = linears(2), stream(), stream(1)
    s, *_ = applied(made, h, residual=residual)
    assert torch.equal(s, h + residual)
    s.sum().backward()
    assert torch.equal(h.grad, torch.ones_like(h))
    assert torch.equal(residual.grad, torch.ones_like(h))


def tables_of(form):
    """cos and sin as a part takes them, and of each number of a head."""
    generator = torch.Generator().manual_seed(2)
    width = WIDTH // 2 if form == "pairs" else WIDTH
    tables = [torch.randn(TOKENS, width, generator=generator) for _ in "cs"]
    if form == "rounded halves":
        tables = [table.bfloat16() for table in tables]
    whole = [t.repeat_interleave(2, -1) if form == "pairs" else t for t in tables]
    return tables, [table[:, None] for table in whole]


@pytest.mark.parametrize("kernels", ["plain", "triton"])
@pytest.mark.parametrize("form", ["halves", "rounded halves", "pairs"])
def test_the_first_outputs_are_rotated_heads(form, kernels):  # M-3, M-11
    made, h = linears(3, kernels), stream()
    tables, whole = tables_of(form)
    _, *outputs = applied(made, h, tables=tables, rotated=2, form=form)
    plain = [each(h).unflatten(-1, (HEADS, WIDTH)) for each in made]
    expected = [*(operations.rotate(y, *whole, form) for y in plain[:2]), plain[2]]
    assert all(map(torch.equal, outputs, expected))


@pytest.mark.parametrize("kernels", ["plain", "triton"])
@pytest.mark.parametrize("form", ["halves", "rounded halves", "pairs"])
def test_their_gradients_are_rotated_back(form, kernels):  # M-3, M-11
    tables, whole = tables_of(form)
    g, gradients = torch.randn(3, 1, TOKENS, HEADS, WIDTH).bfloat16(), []
    for by_part in (True, False):
        made, h = linears(3, kernels), stream()
        if by_part:
            _, *outputs = applied(made, h, tables=tables, rotated=2, form=form)
            torch.autograd.backward(outputs, list(g))
        else:
            back = [operations.rotate_gradient(x, *whole, form) for x in g[:2]]
            outputs = [each(h) for each in made]
            torch.autograd.backward(outputs, [x.flatten(-2) for x in (*back, g[2])])
        gradients.append([h.grad, *(each.weight.grad for each in made)])
    assert all(map(torch.equal, *gradients))


def test_heads_of_another_width_rotate_by_plain_operations(monkeypatch):
    monkeypatch.setattr(fused, "rotate", None)
    made, h = linears(3, "triton", sizes=(48, 32)), stream()
    tables = [torch.randn(TOKENS, 24) for _ in "cs"]
    _, *outputs = applied(made, h, tables=tables, rotated=1)
    plain = made[0](h).unflatten(-1, (2, 24))
    expected = operations.rotate(plain, *(table[:, None] for table in tables))
    assert torch.equal(outputs[0], expected)
    outputs[0].sum().backward()


def test_tables_are_kept_as_they_are_given():
    """All blocks keep one table: complex numbers as views of it."""
    made, h = linears(3, "triton"), stream()
    angles = torch.polar(torch.ones(TOKENS, WIDTH // 2), torch.rand(TOKENS, WIDTH // 2))
    kept = []

    def pack(x):
        kept.append(x.untyped_storage().data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        applied(made, h, tables=(angles.real, angles.imag), rotated=2, form="pairs")
    assert kept.count(angles.untyped_storage().data_ptr()) == 2


def test_what_needs_no_gradient_has_none():
    made, h = linears(2), stream()
    made[0].weight.requires_grad_(False)
    _, *outputs = applied(made, h.detach(), weight=torch.ones(32).bfloat16())
    sum(y.sum() for y in outputs).backward()
    assert made[0].weight.grad is None
    assert made[1].weight.grad is not None
