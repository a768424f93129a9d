"""Experts' rows on their way between devices (X-13, X-14): in FP8 where that changes no bit.

Functions of a pass, whose layout says how devices hold experts and what is observed.
"""

from collections.abc import Mapping
from typing import Protocol

import jax

from fp8ref.jax import delayed
from fp8ref.jax.experts import codes as expert_codes
from fp8ref.jax.experts import parallel as expert_parallel
from fp8ref.jax.experts.operands import Codes, Slot
from fp8ref.jax.experts.parallel import Moved
from fp8ref.recipe import CastSpec, Recipe, Role
from fp8ref.selection import grouped as recipes
from fp8ref.train.jax.mesh import Layout


class Run(Protocol):
    """What a pass of the model has (``forward_pass.Pass``)."""

    state: Mapping[str, delayed.State]
    seen: dict[str, delayed.Seen]
    layout: Layout | None
    taps: dict[str, jax.Array]


def dispatched(
    run: Run, rows: jax.Array, sizes: jax.Array, of: Mapping[str, str | Recipe]
) -> tuple[Moved, Codes | None]:
    """Rows of all experts at the devices that have them; and in FP8, where one cast serves the
    grouped linears ``of``, by name: these observe them here. Where statistics are measured rows
    move as they are.

    Their delayed scales are those of the first one: all observe the same rows from the same step
    on, as on several devices no rule changes one of them alone.
    """
    layout, axis = _apart(run)
    spec = None
    if _moves_codes(run):
        spec = expert_codes.cast_of([recipes.by_name(recipe) for recipe in of.values()], "input")
    if spec is None:
        return expert_parallel.dispatch(rows, sizes, axis), None
    if spec.delayed is not None:
        observation = expert_codes.observed(rows, sizes)
        for name in of:
            run.seen[name] = {
                **run.seen[name],
                "input": delayed.larger(run.seen[name]["input"], observation),
            }
    scale = _scale(run, next(iter(of)), "input", spec, of)
    return expert_codes.dispatch(rows, sizes, axis, spec, scale=scale, over=layout.sharing_groups)


def gradients_move_as_codes(run: Run, recipe: str | Recipe) -> bool:
    """Whether the gradient of a grouped linear's result comes in FP8."""
    return (
        _moves_codes(run)
        and expert_codes.cast_of([recipes.by_name(recipe)], "grad_output") is not None
    )


def combined(
    run: Run,
    y: jax.Array,
    slot: Slot | None,
    moved: Moved,
    sizes: jax.Array,
    name: str,
    recipe: str | Recipe,
) -> jax.Array:
    """Results of the grouped linear ``name`` at the devices that sent ``sizes`` rows of experts."""
    layout, axis = _apart(run)
    if slot is None:
        return expert_parallel.combine(y, moved, axis)
    spec = expert_codes.cast_of([recipes.by_name(recipe)], "grad_output")
    assert spec is not None
    scale = _scale(run, name, "grad_output", spec, {name: recipe})
    return expert_codes.combine(
        y, slot, moved, sizes, axis, spec, scale=scale, over=layout.sharing_groups
    )


def _apart(run: Run) -> tuple[Layout, str]:
    """The layout, and its axis of devices with different experts."""
    layout = run.layout
    assert layout is not None
    assert layout.expert_axis is not None
    return layout, layout.expert_axis


def _moves_codes(run: Run) -> bool:
    return run.layout is not None and run.layout.moves_codes and not run.taps


def _scale(
    run: Run, name: str, role: Role, spec: CastSpec, of: Mapping[str, str | Recipe]
) -> jax.Array | None:
    """That of a delayed state; None of a dynamic cast."""
    if spec.delayed is None:
        return None
    return delayed.scales(run.state[name], recipes.by_name(of[name]).recipe)[role]
