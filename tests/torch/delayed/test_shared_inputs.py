"""Linears of one input observe it by one state, and keep equal states of their own."""

import copy

import pytest
import torch
from torch import nn

from fp8ref.torch import delayed
from fp8ref.torch.delayed import shared_inputs
from fp8ref.torch.linear.linear import Linear

READERS = {"k": "q", "v": "q"}


class Attention(nn.Module):
    """Three linears of one input, and one of their product."""

    def __init__(self, recipes=("delayed",) * 3):
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        for name, recipe in zip("qkv", recipes, strict=True):
            linear = Linear(64, 64, recipe, bias=False, dtype=torch.bfloat16)
            linear.weight.data = torch.randn(64, 64, generator=rng).bfloat16()
            setattr(self, name, linear)

    def forward(self, x):
        return self.q(x) * self.k(x) + self.v(x)


def train(model: nn.Module) -> list[torch.Tensor]:
    rng, results = torch.Generator().manual_seed(1), []
    for _ in range(3):
        y = model(torch.randn(32, 64, generator=rng).bfloat16())
        y.backward(torch.randn(y.shape, generator=rng).bfloat16())
        delayed.update(model)
        results += [y.detach(), *(p.grad.clone() for p in model.parameters())]
    return results


def shared(model: nn.Module) -> nn.Module:
    shared_inputs.share(model, READERS)
    return model


def test_steps_and_checkpoints_are_those_of_separate_states():
    separate, model = Attention(), shared(Attention())
    assert all(map(torch.equal, train(separate), train(model)))
    states, others = separate.state_dict(), model.state_dict()
    assert states.keys() == others.keys()
    assert all(torch.equal(states[name], others[name]) for name in states)
    shared_inputs.check(model)


def test_one_state_is_read_and_observed():
    model = shared(Attention())
    assert model.k.state("input") is model.v.state("input") is model.q.states["input"]
    assert model.k.state("weight") is model.k.states["weight"]
    model(torch.randn(32, 64).bfloat16())
    assert not model.k.states["input"].seen.any()
    other = copy.deepcopy(model)
    assert other.k.state("input") is other.q.states["input"]


@pytest.mark.parametrize(
    "recipes", [("tensorwise", "delayed", "delayed"), ("delayed", "bf16", "delayed")]
)
def test_other_recipes_keep_to_their_own_states(recipes):
    model = shared(Attention(recipes))
    assert not any(state.first for name, state in delayed.states(model) if "v" not in name)


def test_states_that_differ_are_refused():
    model = Attention()
    model.k.states["input"].scale.fill_(2)
    with pytest.raises(ValueError, match="the scale of k is another than that of the first"):
        shared_inputs.share(model, READERS)


def test_a_state_whose_first_linear_was_replaced_goes_on_by_itself():
    separate, model = Attention(), shared(Attention())
    for each in (separate, model):
        train(each)
        each.q = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(each.q.weight)
    assert all(map(torch.equal, train(separate), train(model)))
    assert model.k.states["input"].origin is model.k.states["input"]
    assert torch.equal(model.k.states["input"].scale, separate.k.states["input"].scale)
