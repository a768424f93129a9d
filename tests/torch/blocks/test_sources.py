"""Values that are cast as they are computed: the codes of values that are computed, then cast."""

import pytest
import torch
from torch import nn

from fp8ref.torch.blocks import operations
from fp8ref.torch.blocks.sources import Kernels, Source
from fp8ref.torch.kernels import fused
from fp8ref.torch.linear.linear import Linear
from fp8ref.torch.linear.passes import Pass
from fp8ref.torch.linear.spec import Spec


def passes(count, recipe="tensorwise", kernels="triton"):
    """Linears [128, 128] in a pass, each with a state of its own if there are any."""
    made = [
        Linear.of(nn.Linear(128, 128, bias=False).bfloat16(), recipe, None, kernels)
        for _ in range(count)
    ]
    return [Pass.of(Spec.numbered(each.spec_number), each.tensors(GATE)) for each in made]


GENERATOR = torch.Generator().manual_seed(0)
GATE, UP, D = (torch.randn(256, 128, generator=GENERATOR).bfloat16() for _ in "gud")
GATE = 32 + GATE.abs()  # 1 + exp(-gate) is 1 then, so that results are exact


def product(*, kernels=True):
    """silu(gate) * up, which a kernel casts, if one does."""
    return Source(
        GATE.device,
        lambda: [operations.swiglu(GATE, UP)],
        Kernels.of("swiglu") if kernels else None,
        (GATE, UP),
        {"twice": False},
    )


def gradients(*, kernels=True):
    """Those of gate and up, which one kernel casts."""
    return Source(
        D.device,
        lambda: operations.swiglu_gradient(D, GATE, UP),
        Kernels.of("swiglu_gradient")._replace(amax=fused.swiglu_gradient_amaxes)
        if kernels
        else None,
        (D, GATE, UP),
        {"twice": False},
    )


def differing(first, second):
    """Which of two operands' tensors differ."""
    pairs = zip((first.tensor, first.columns), (second.tensor, second.columns), strict=True)
    return [
        key
        for a, b in pairs
        for key in ("codes", "scale", "scale_inv")
        if not torch.equal(getattr(a, key).float(), getattr(b, key).float())
    ]


def test_kernels_are_found_by_the_value_that_they_cast():
    kernels = Kernels.of("rotary_gradient")
    assert kernels.cast is fused.rotary_gradient_cast
    assert kernels.lines is fused.rotary_gradient_lines
    assert Kernels.of("nothing") == (None,) * 5


def test_values_are_computed_once():
    calls = []

    def compute():
        calls.append(1)
        return [GATE]

    source = Source(GATE.device, compute)
    assert source.value is source.values[0] is GATE
    assert calls == [1]


RECIPES = ["tensorwise", "delayed", "rowwise", "rowwise_native", "blockwise"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_value_has_the_codes_of_one_that_is_computed_first(recipe):  # M-11
    (linear,) = passes(1, recipe)
    for role in ("input", "grad_output"):
        (own,) = product().operands(role, [linear])
        (plain,) = product(kernels=False).operands(role, [linear])
        assert own.columns is not None
        assert differing(own, plain) == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_values_of_one_kernel_have_scales_of_their_own(recipe):  # M-11
    linears = passes(2, recipe)
    own = gradients().operands("grad_output", linears)
    plain = gradients(kernels=False).operands("grad_output", linears)
    assert [differing(*pair) for pair in zip(own, plain, strict=True)] == [[], []]
    if recipe != "delayed":  # whose first scales are 1
        assert differing(*own) != []


def test_linears_of_other_casts_cast_by_themselves():
    """One kernel has one cast: values are then computed, and each linear casts its own."""
    linears = [*passes(1, "tensorwise"), *passes(1, "rowwise")]
    source = gradients()
    operands = source.operands("grad_output", linears)
    plain = [
        each.operand("grad_output", value)
        for each, value in zip(linears, source.values, strict=True)
    ]
    assert [differing(*pair) for pair in zip(operands, plain, strict=True)] == [[], []]


def test_a_value_of_linears_with_one_recipe_is_cast_once():
    operands = product().shared("input", passes(3))
    assert operands[0] is operands[1] is operands[2]


def test_a_value_of_states_of_their_own_is_cast_for_each():
    linears = passes(2, "delayed")
    first, second = product().shared("input", linears)
    assert first is not second
    first, second = product().shared("input", [linears[0], linears[0]])
    assert first is second


def test_a_state_observes_what_its_kernel_cast():
    (linear,) = passes(1, "delayed")
    seen = linear.seen[0]
    product().operands("input", [linear])
    assert seen[0] == operations.swiglu(GATE, UP).float().abs().max()
