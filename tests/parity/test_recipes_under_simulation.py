"""Recipes under simulation are refused by name wherever something would train in them, with what to
use instead (spec R-9).
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from fp8ref import jax as fj
from fp8ref import torch as ft
from fp8ref.formats import E2M1FN
from fp8ref.policy import FP4_POLICIES
from fp8ref.recipe import RECIPES, CastSpec, GemmSpec, Recipe
from fp8ref.selection import grouped
from fp8ref.selection import rules as linear_rules
from fp8ref.selection.linears import Decision
from fp8ref.sim import linear
from fp8ref.torch.linear import torchao_linear

X, W = np.ones((32, 64), np.float32), np.ones((32, 64), np.float32)
BY_ROWS = [
    CastSpec(fmt=E2M1FN, granularity="rowwise", policy=RECIPES["mxfp4"].output.a.policy),
    dataclasses.replace(RECIPES["nvfp4"].output.a, policy=FP4_POLICIES["te_nvfp4_row"]),
    CastSpec(fmt=E2M1FN),
]
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
}


def mine(cast: CastSpec) -> Recipe:
    return Recipe(name="mine", output=GemmSpec(a=cast, b=cast, accumulate="slow"))


@pytest.mark.parametrize("cast", BY_ROWS, ids=["rows", "nvfp4 by rows", "tensor"])
@pytest.mark.parametrize("taker", TAKERS.values(), ids=TAKERS)
def test_they_are_refused_by_name(taker, cast):
    with pytest.raises(
        ValueError,
        match=r"'mine' is for the simulator alone.*take e2m1fn in blocks of MX or NVFP4.*"
        r"fp8ref\.sim\.linear.*one that trains: bf16, tensorwise",
    ):
        taker(mine(cast))
    assert not torchao_linear.expresses(mine(cast))


@pytest.mark.parametrize("cast", BY_ROWS, ids=["rows", "nvfp4 by rows", "tensor"])
def test_the_simulator_takes_them(cast):
    assert linear.forward(X, W, mine(cast)).shape == (32, 32)


def test_a_rule_may_not_give_four_bits_other_scales():
    linears = [Decision(path=p, shape=(32, 64), recipe=RECIPES["mxfp4"], reason="") for p in "ab"]
    tensor = linear_rules.Rule(layers=("b",), granularity="tensorwise", policy="torchao")
    with pytest.raises(ValueError, match=r"^by numerics\.rules b has recipe 'mxfp4 with rules'"):
        linear_rules.apply([tensor], linears)
    fp8 = linear_rules.Rule(layers=("b",), format="e4m3fn")
    assert [d.recipe.emulated for d in linear_rules.apply([tensor, fp8], linears)] == [True, False]
