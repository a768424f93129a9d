"""Recipes of delayed scaling by any config, for the tests of both backends."""

import dataclasses

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.policy import POLICIES
from fp8ref.recipe import CastSpec, GemmSpec, Recipe
from fp8ref.spec.delayed import DELAYED, DelayedScaling

ROLES = {"input": E4M3FN, "weight": E4M3FN, "grad_output": E5M2}


def recipe_of(config: DelayedScaling) -> Recipe:
    """One whose every role is scaled by config."""
    a, b, g = (CastSpec(fmt=fmt, policy=config.policy, delayed=config) for fmt in ROLES.values())
    slow = {"accumulate": "slow"}
    return Recipe(
        name="mine",
        output=GemmSpec(a=a, b=b, **slow),
        grad_input=GemmSpec(a=g, b=b, **slow),
        grad_weight=GemmSpec(a=g, b=a, **slow),
    )


def margin(n: int):
    return dataclasses.replace(POLICIES["te_delayed"], name=f"margin {n}", margin=n)


# What both backends keep, each way of departing from fp8ref's own.
CONFIGS = [
    DELAYED["delayed"],
    DelayedScaling(name="short", history_length=1),
    DelayedScaling(name="recent", history_length=3, amax_compute="most_recent"),
    DelayedScaling(name="seldom", history_length=4, interval=3),
    DelayedScaling(name="room", history_length=2, policy=margin(2)),
    DelayedScaling(name="much_room", history_length=2, policy=margin(64)),
]
