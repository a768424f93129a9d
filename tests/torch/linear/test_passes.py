"""A linear in a pass: the operands that it takes, multiplies and keeps (L-2, L-3)."""

from types import SimpleNamespace

import pytest
import torch

from fp8ref.recipe import RECIPES
from fp8ref.torch.linear import passes
from fp8ref.torch.linear.passes import Pass
from fp8ref.torch.linear.spec import Spec
from fp8ref.torch.quantize import scaling
from fp8ref.torch.quantize.scaling import Groups, Quantized

NONE = (None, None, None)


def of(recipe, weight, **keys):
    spec = Spec(RECIPES[recipe], Groups(), "plain", **keys)
    return Pass.of(spec, [weight, None, *NONE, *NONE, *NONE, *[None] * passes.KEPT])


class Context(SimpleNamespace):
    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors


def matrices():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in ((24, 32), (16, 32))]


def test_it_takes_as_many_tensors_as_it_says():
    _, w = matrices()
    tensors = [w, "k", *"abc", *"def", *"ghi", *range(passes.KEPT)]
    assert len(tensors) == passes.TENSORS
    linear = Pass.of(of("tensorwise", w).spec, tensors)
    assert linear.weight is w
    assert linear.keys == "k"
    assert [*linear.seen, *linear.scales, *linear.guesses] == [*"abcdefghi"]
    assert list(linear.kept) == list(range(passes.KEPT))
    assert of("tensorwise", w).kept == ()


def test_codes_that_serve_both_gemms_are_cast_once():  # L-3
    x, w = matrices()
    assert isinstance(of("tensorwise", w).operand("input", x).tensor, Quantized)
    assert of("rowwise", w).operand("input", x).tensor is x


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_the_backward_pass_takes_what_was_saved(recipe, autocast):
    """The weight itself, which the model has, and its scale; codes of a copy under autocast."""
    x, w = matrices()
    linear, ctx = of(recipe, w, autocast=autocast), Context()
    with torch.no_grad():
        y, (input, weight) = linear.output(linear.operand("input", x), (4, 6, 32), x.dtype)
        passes.save(ctx, [linear], [(input, weight)], (y, None))
        (loaded,), others = passes.load(ctx, [linear.spec])
    assert y.shape == (4, 6, 16)
    assert others[0] is y
    assert others[1] is None
    assert loaded.spec is linear.spec
    once = linear.spec.cast_once
    assert (loaded.input is None) == (once["input"] is None)
    if once["weight"] is None:
        assert loaded.weight is w
    else:
        assert loaded.weight[1:] == weight[1:]
        assert (loaded.weight.codes is w) == (not autocast)


def test_codes_in_both_orders_are_saved_once():
    """Transposed, as GEMMs of gradients read them."""
    x, w = matrices()
    linear, ctx = of("tensorwise", w), Context()
    codes = scaling.quantize(x, RECIPES["tensorwise"].output.a.fmt)
    transposed = codes.codes.t().contiguous()
    columns = codes._replace(axis=-2, transposed=transposed)
    with torch.no_grad():
        passes.save(ctx, [linear], [(columns, w)])
        (loaded,), _ = passes.load(ctx, [linear.spec])
    assert [tensor is transposed for tensor in ctx.saved_tensors].count(True) == 1
    assert not any(tensor is codes.codes for tensor in ctx.saved_tensors)
    assert torch.equal(loaded.input.codes.float(), codes.codes.float())
    assert loaded.input.transposed is transposed
    assert loaded.input.axis == -2


def test_a_backward_pass_that_autograd_follows_is_refused():  # L-8
    x, w = matrices()
    linear, ctx = of("tensorwise", w), Context()
    passes.save(ctx, [linear], [(x, w)])
    with pytest.raises(ValueError, match="not differentiated again"):
        passes.load(ctx, [linear.spec])


def test_a_row_of_zeros_stands_for_none():  # L-9
    row = passes.zero_row(torch.ones(2, 0, 8).bfloat16())
    assert row.shape == (1, 8)
    assert not row.any()
