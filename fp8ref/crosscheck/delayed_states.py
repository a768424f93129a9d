"""The simulator's states of delayed scaling (SEMANTICS H), kept beside a backend's from step to step."""

from collections.abc import Mapping, Sequence

from fp8ref import recipe
from fp8ref.delayed import DelayedScaling
from fp8ref.formats import Format
from fp8ref.recipe import Recipe
from fp8ref.sim import delayed

States = Mapping[str, delayed.DelayedState]  # by "<layer>/<role>"


def casts(recipes: Mapping[str, Recipe]) -> dict[str, tuple[Format, DelayedScaling]]:
    """Of every role that is scaled by its past, by "<layer>/<role>"."""
    return {f"{layer}/{role}": how for layer, r in recipes.items() for role, how in recipe.delayed_casts(r).items()}


def initial(recipes: Mapping[str, Recipe]) -> States:
    """Before the first step; empty where every scale is dynamic."""
    return {name: delayed.init(config) for name, (_, config) in casts(recipes).items()}


def after(states: States, recipes: Mapping[str, Recipe], amaxes: Mapping[str, Sequence]) -> States:
    """After a step that had these amaxes, float32 (), of each: one for every use or rank."""
    found = {}
    for name, (fmt, config) in casts(recipes).items():
        found[name] = delayed.update(states[name], *map(delayed.observe, amaxes[name]), config=config, fmt=fmt)
    return found
