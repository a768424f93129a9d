"""GroupedLinear: a projection of experts, converted as the model's linears are."""

import copy
import pickle

import pytest
import torch
from torch import nn

from fp8ref.selection import grouped as recipes
from fp8ref.selection.rules import Rule
from fp8ref.torch import delayed
from fp8ref.torch.experts import grouped
from fp8ref.torch.experts.layer import GroupedLinear
from fp8ref.torch.model import convert
from fp8ref.torch.model.report import report
from fp8ref.torch.model.switch import Switch


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 32, bias=False)
        self.experts = GroupedLinear(3, 32, 48)

    def forward(self, x, ends):
        return self.experts(self.up(x), ends)


@pytest.fixture
def model():
    torch.manual_seed(0)
    made = Model()
    nn.init.normal_(made.experts.weight)
    return made


X = torch.randn(40, 32, generator=torch.Generator().manual_seed(1))
ENDS = torch.tensor([16, 16, 32], dtype=torch.int32)


def test_it_is_one_product_a_group_until_it_is_converted(model):
    rows = model.up(X)
    y = model(X, ENDS)
    torch.testing.assert_close(y[:16], rows[:16] @ model.experts.weight[0].T)
    torch.testing.assert_close(y[16:32], rows[16:32] @ model.experts.weight[2].T)
    assert not y[32:].any()


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_convert_gives_it_the_grouped_recipe_and_keeps_its_parameter(model, recipe):
    weight = model.experts.weight
    convert.convert(model, recipe)
    assert model.experts.weight is weight
    assert model.experts.recipe == recipes.by_name(recipe)
    assert model.experts.fqn == "experts"
    x = X.clone().requires_grad_()
    y = model.experts(x, ENDS)
    y.sum().backward()
    own = X.clone().requires_grad_()
    states = {
        role: delayed.RoleState(fmt, how, X.device)
        for role, (fmt, how) in delayed.casts(model.experts.recipe.recipe).items()
    }
    expected = grouped.apply(own, weight, ENDS, recipe=recipe, states=states)
    assert torch.equal(y, expected)
    expected.sum().backward()
    assert torch.equal(x.grad, own.grad)
    if recipe == "delayed":
        delayed.update(model)
        assert {name for name, _ in delayed.states(model)} >= {
            f"experts.states.{role}" for role in ("input", "weight", "grad_output")
        }


def test_filters_rules_and_deconvert_reach_it(model):
    filtered = convert.convert(copy.deepcopy(model), "tensorwise", filter_fqns=["experts"])
    assert filtered.experts.recipe.name == "bf16"
    rule = Rule(layers=("experts",), gemms=("output",), recipe="bf16")
    ruled = convert.convert(copy.deepcopy(model), "tensorwise", rules=[rule])
    assert not ruled.experts.recipe.recipe.output.fp8
    assert ruled.experts.recipe.recipe.grad_input.fp8
    before = model(X, ENDS)
    convert.deconvert(convert.convert(model, "tensorwise"))
    assert torch.equal(model(X, ENDS), before)


def test_the_report_has_its_recipe_and_kernel(model):
    row = next(
        row
        for row in report(convert.convert(model, "rowwise"), (X, ENDS)).rows
        if row.path == "experts"
    )
    assert (row.recipe, row.in_fp8, row.kernel) == (
        "rowwise",
        3 * 32 * 48,
        "one GEMM for each group",
    )
    assert row.multiplications == 40 * 32 * 48


def test_a_switch_shares_its_weight_and_keeps_its_states(model):  # T-9
    twin = convert.convert(copy.deepcopy(model).to("meta"), "bf16")
    convert.convert(model, "delayed")
    switch = Switch(model, "delayed", {"bf16": twin})
    model(X, ENDS).sum().backward()
    weight = model.experts.weight
    switch.to("bf16")
    assert model.experts.weight is weight
    assert model.experts.recipe.name == "bf16"
    assert "experts.states.input" in dict(switch.states())
    switch.to("delayed")
    assert model.experts.recipe.name == "delayed"


def test_copies_and_pickles_multiply_alike(model):
    convert.convert(model, "rowwise")
    y = model.experts(X, ENDS)
    for made in (copy.deepcopy(model.experts), pickle.loads(pickle.dumps(model.experts))):
        assert torch.equal(made(X, ENDS), y)
    assert "experts=3, in_features=32, out_features=48, recipe=rowwise" in repr(model.experts)
