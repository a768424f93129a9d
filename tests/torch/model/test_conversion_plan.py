"""A plan says what becomes of each linear, and nothing of the model changes (spec R-2 to R-4)."""

import pytest
from torch import nn

from fp8ref.recipe import RECIPES
from fp8ref.torch.model.conversion_plan import Selection, plan_conversion


def model():
    return nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64))


@pytest.mark.parametrize("shared", [False, True])
def test_a_plan_names_recipes_and_whose_linears_run_them(shared):
    made = model()
    before = [type(module) for module in made.modules()]
    plan = plan_conversion(made, RECIPES["tensorwise"], Selection(filter_fqns=["2"]), shared=shared)
    assert plan.linear_recipes == {"0": RECIPES["tensorwise"]}
    assert plan.by_torchao == (frozenset() if shared else {RECIPES["tensorwise"]})
    assert plan.devices == {"cpu"}
    assert not plan.is_empty
    plan.check(made)
    assert [type(module) for module in made.modules()] == before


def test_bf16_plans_nothing():
    plan = plan_conversion(model(), RECIPES["bf16"], Selection(), shared=False)
    assert plan.is_empty
    assert plan.recipes == set()
