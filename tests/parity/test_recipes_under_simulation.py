"""Recipes under simulation are refused by name wherever something would train in them, with what to
use instead (spec R-9).
"""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from fp8ref import jax as fj
from fp8ref import torch as ft
from fp8ref.formats import E2M1FN
from fp8ref.recipe import RECIPES, CastSpec, GemmSpec, Recipe
from fp8ref.selection import grouped
from fp8ref.selection import rules as linear_rules
from fp8ref.selection.linears import Decision
from fp8ref.sim import linear
from fp8ref.torch.linear import torchao_linear
from fp8ref.train.config import config as configs
from fp8ref.train.config import schedule
from fp8ref.train.experiments import sweep

NAMES = [name for name, recipe in RECIPES.items() if recipe.simulated]
X, W = np.ones((32, 64), np.float32), np.ones((32, 64), np.float32)
TAKERS = {
    "jax linear": lambda r: fj.linear.apply(
        jnp.asarray(X, jnp.bfloat16), jnp.asarray(W, jnp.bfloat16), recipe=r
    ),
    "linen": lambda r: fj.flax.linen_dot_general(r),
    "jax grouped": lambda r: fj.grouped.apply(
        jnp.asarray(X), jnp.asarray(W)[None], jnp.array([32]), recipe=r
    ),
    "torch convert": lambda r: ft.convert(torch.nn.Linear(64, 32).bfloat16(), r),
    "torch grouped": lambda r: ft.grouped.apply(
        torch.ones(32, 64), torch.ones(1, 32, 64), torch.tensor([32]), recipe=r
    ),
    "grouped recipe": lambda r: grouped.by_name(r),
    "config, which train, estimate and crosscheck take": lambda r: configs.Config().replace(
        numerics={"recipe": r}
    ),
    "schedule": lambda r: schedule.parse([[0, "bf16"], [5, r]]),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("taker", TAKERS.values(), ids=TAKERS)
def test_they_are_refused_by_name(taker, name):
    with pytest.raises(
        ValueError,
        match=rf"'{name}' is for the simulator alone.*fp8ref\.sim\.linear.*one that trains: "
        r"bf16, tensorwise",
    ):
        taker(name)


@pytest.mark.parametrize("name", NAMES)
def test_lists_of_names_leave_them_out(name):
    with pytest.raises(ValueError, match=f"recipe of a rule is one of bf16, .*got '{name}'"):
        linear_rules.Rule(layers=("q_proj",), recipe=name)
    with pytest.raises(ValueError, match=f"--recipes takes names of bf16, .*got {name}"):
        sweep.plan(configs.Config(), ["torch"], [name], seeds=1, out=None)


def test_the_simulator_takes_them():
    assert all(linear.forward(X, W, name).shape == (32, 32) for name in NAMES)


@pytest.mark.parametrize("taker", ["jax linear", "linen", "torch convert", "grouped recipe"])
def test_four_bits_under_other_scales_are_refused(taker):
    row = CastSpec(fmt=E2M1FN, granularity="rowwise", policy=RECIPES["mxfp4"].output.a.policy)
    for cast in (row, CastSpec(fmt=E2M1FN)):
        mine = Recipe(name="mine", output=GemmSpec(a=cast, b=cast, accumulate="fast"))
        with pytest.raises(ValueError, match=r"'mine' is for the simulator.*e2m1fn in mx_1x32"):
            TAKERS[taker](mine)
    assert not torchao_linear.expresses(mine)


def test_a_rule_may_not_give_four_bits_other_scales():
    linears = [Decision(path=p, shape=(32, 64), recipe=RECIPES["mxfp4"], reason="") for p in "ab"]
    tensor = linear_rules.Rule(layers=("b",), granularity="tensorwise", policy="torchao")
    with pytest.raises(ValueError, match=r"^by numerics\.rules b has recipe 'mxfp4 with rules'"):
        linear_rules.apply([tensor], linears)
    fp8 = linear_rules.Rule(layers=("b",), format="e4m3fn")
    assert [d.recipe.emulated for d in linear_rules.apply([tensor, fp8], linears)] == [True, False]
