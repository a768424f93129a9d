"""Amax observations of a Flax model's layers under delayed scaling, collected over a step
(spec H-9).

``Observed`` holds those of a whole step, by the path of each hook. ``observing`` is entered by
``value_and_grad``: within it, a hook that cannot deliver its observations raises instead of losing
them. STATE and SEEN are the names of linen's variable collections: a hook changes SEEN where it is
mutable, and else delivers all observations as the gradient by it (``by_gradient``).
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import Array

from fp8ref.jax import delayed
from fp8ref.jax.quantize import scaling
from fp8ref.jax.transforms import derivatives
from fp8ref.recipe import Recipe
from fp8ref.shared import contexts

# linen's collections; a state is read, observations are threaded
STATE, SEEN = ("fp8_state", "fp8_seen")


@dataclass
class Observers:
    """The hooks that deliver observations in a pass.

    names      of NNX's layers.
    threaded   paths of linen's hooks that change SEEN.
    given      the observations that linen's hooks take and do not change, by path: tracers, one for
               each use.
    delivered  paths of the hooks in ``given`` whose backward pass ran.
    """

    names: set[str] = field(default_factory=set)
    threaded: set[str] = field(default_factory=set)
    given: dict[str, list] = field(default_factory=dict)
    delivered: set[str] = field(default_factory=set)


_observing: ContextVar[Observers | None] = ContextVar("fp8ref_jax_flax_observing", default=None)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["layers"], meta_fields=[])
@dataclass(frozen=True, kw_only=True)
class Observed:
    """The observations of a whole step, forward and backward, by the path of each hook.

    Only ``value_and_grad`` makes them, and ``update`` takes nothing else.
    """

    layers: Mapping[str, delayed.Seen]


def merge(*observed: Observed) -> Observed:
    """Merge the observations of microbatches into those of one step (spec H-4): maxima, in any
    order.

    Raises:   ValueError: none given, something that ``value_and_grad`` did not make, or of
              different models.
    """
    if not observed:
        raise ValueError("merge takes the observations of at least one value_and_grad; got none.")
    for microbatch in observed:
        check(microbatch)
        same_layers(observed[0].layers, microbatch.layers, "merge")
    return Observed(
        layers={
            path: delayed.merge(*(microbatch.layers[path] for microbatch in observed))
            for path in observed[0].layers
        }
    )


def check(seen: object) -> Observed:
    """seen, if it is an ``Observed``; ValueError otherwise."""
    if not isinstance(seen, Observed):
        raise ValueError(
            f"update takes the observations of fj.flax.value_and_grad; got {type(seen).__name__}. "
            "Use value, grads, seen = fj.flax.value_and_grad(loss_fn)(...): a plain grad loses "
            "those of grad_output."
        )
    return seen


def same_layers(expected: Mapping, got: Mapping, name: str) -> None:
    """ValueError unless both name the same layers, by the paths of their hooks."""
    if missing := [path for path in expected if path not in got]:
        raise ValueError(
            f"{name}: {', '.join(missing)} has no observations. Pass {SEEN!r} through every use, "
            "and use fj.flax.value_and_grad of this model."
        )
    if unknown := [path for path in got if path not in expected]:
        raise ValueError(
            f"{name}: got observations of {', '.join(unknown)}, which the model lacks. Update the "
            "observed model."
        )


@contextmanager
def observing():
    """In this context, hooks with a state must deliver their observations.

    Yields those that did.
    """
    observers = Observers()
    with contexts.setting(_observing, observers):
        yield observers


def observers() -> Observers | None:
    """Those of the pass; None outside ``observing``."""
    return _observing.get()


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def by_gradient(y: Array, seen: Any, path: str) -> Array:
    """y, the output of the layer whose hook has this path. The gradient by seen, its observations,
    is seen itself: so they come out with those of the backward pass, if there is one."""
    del seen, path
    return y


def _delivered(path: str, seen: Any, g: Array) -> tuple:
    if active_observers := observers():
        active_observers.delivered.add(path)
    return g, seen


by_gradient.defvjp(lambda y, seen, path: (y, seen), _delivered)


def unobserved(recipe: Recipe, name: str, remedy: str) -> dict:
    """Empty observations for a pass; ValueError, naming the layer, in ``observing``."""
    if _observing.get() is not None:
        raise ValueError(
            f"{name}: recipe {recipe.name!r} scales by past amaxes; those of this layer would be "
            f"lost. {remedy}"
        )
    return delayed.unseen(recipe)


def warned(y: Array, recipe: Recipe, name: str, evaluated: Callable[[], None] | None) -> Array:
    """y, the output of a layer that was not observed; a UserWarning, naming it, where a gradient is
    taken.

    evaluated   None, or what else warns, of a pass without a gradient.
    """
    return derivatives.warned(
        y,
        name,
        f"recipe {recipe.name!r} scales by past amaxes, and this gradient observes none: a "
        "model that it trains keeps its first scales. Use fj.flax.value_and_grad in place of "
        "jax.grad or nnx.grad.",
        evaluated,
    )


calibration = jax.make_user_context(default_value=False)
"""``with calibration(True)``: hooks observe and multiply in high precision. JAX's caches of traces
are kept apart by it, so that a jit or a checkpoint inside a model runs neither mode's trace in the
other."""


def calibrating() -> bool:
    """Whether ``calibrate`` runs the model."""
    return calibration.value


def observed(seen: delayed.Seen, operands: tuple) -> dict:
    """seen, merged with the amaxes of a product's input and weight, its first arrays."""
    x, w = [v for v in operands if hasattr(v, "ndim")][:2]
    if x.size:
        return delayed.merged(seen, {"input": scaling.amax(x), "weight": scaling.amax(w)}, seen)
    return dict(seen)


def check_precision(name: str, precision, else_do: str = "") -> None:
    """ValueError for a precision of Flax's, which the recipe decides; else_do: another remedy."""
    if precision is not None:
        raise ValueError(
            f"{name}: a recipe sets the accumulation; got precision={precision!r}. Leave it out"
            f"{else_do}."
        )
