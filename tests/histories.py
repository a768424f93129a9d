"""Recipes of delayed scaling by any config, for the tests of both backends."""

import dataclasses

from fp8ref.delayed import DelayedScaling
from fp8ref.formats import E4M3FN, E5M2
from fp8ref.policy import POLICIES
from fp8ref.recipe import CastSpec, GemmSpec, Recipe

ROLES = {"input": E4M3FN, "weight": E4M3FN, "grad_output": E5M2}


def recipe_of(config: DelayedScaling) -> Recipe:
    """One whose every role is scaled by config."""
    a, b, g = (CastSpec(fmt=fmt, policy=config.policy, delayed=config) for fmt in ROLES.values())
    slow = {"accumulate": "slow"}
    return Recipe(
        name="mine", output=GemmSpec(a=a, b=b, **slow), grad_input=GemmSpec(a=g, b=b, **slow), grad_weight=GemmSpec(a=g, b=a, **slow)
    )


def margin(n: int):
    return dataclasses.replace(POLICIES["te_delayed"], name=f"margin {n}", margin=n)
