"""Which linears of a model are routers of experts (spec X-11): one rule for both backends."""

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from fp8ref.recipe import RECIPES
from fp8ref.selection.linears import Decision, matches

ROUTER = "a router: it stays in high precision (X-11)"
"""Why a router of experts has no FP8."""

NAMES = ("router", "gate")
"""A router has one of these as a component of its name, and an output for each expert."""


def left_out(
    decisions: Iterable[Decision], experts: Collection[int | None], fp8_fqns: Sequence[str]
) -> list[Decision]:
    """The decisions, of which those of routers are high precision, unless fp8_fqns names them.

    experts   how many experts each converted layer of the model has.
    """

    def decided(linear: Decision) -> Decision:
        router = (
            linear.experts is None
            and linear.shape[0] in experts
            and set(NAMES) & set(linear.path.split("."))
        )
        named = any(matches(pattern, linear.path) for pattern in fp8_fqns)
        if not linear.fp8 or not router or named:
            return linear
        return dataclasses.replace(linear, recipe=RECIPES["bf16"], reason=ROUTER)

    return [decided(linear) for linear in decisions]
