"""Parameters that are stacks: tensors of one shape along a first dim, as a scan over layers takes
them.

``Parameters`` says which are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.custom_batching import custom_vmap


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Which parameters an AdamW treats in which way.

    mask      which of them decay, as in ``optax.adamw``: a tree of booleans, of the parameters'
              structure or a prefix of it, or a function of the parameters; None: all.
    stacked   which are stacks, in the same way; None: none is.
    """

    mask: Any = None
    stacked: Any = None

    def decays(self, params) -> Any:
        """For each parameter, whether it decays. Raises as ``stacks``."""
        return _flags("mask", self.mask, params, default=True)

    def stacks(self, params) -> Any:
        """For each parameter, whether it is a stack; ValueError for a tree of another structure."""
        return _flags("stacked", self.stacked, params, default=False)


ALL_ALIKE = Parameters()
"""All decay, and none is a stack."""


def _flags(name: str, mask: Any, params, *, default: bool) -> Any:
    if mask is None or not jax.tree.leaves(params):
        return jax.tree.map(lambda _: default, params)
    mask_tree = mask(params) if callable(mask) else mask
    try:
        return jax.tree.broadcast(mask_tree, params)
    except ValueError as error:
        raise ValueError(
            f"{name} is a tree of booleans, of the parameters' structure or a prefix of it; got "
            f"{jax.tree.structure(mask_tree)} for {jax.tree.structure(params)}."
        ) from error


def each(f: Callable, is_stack: bool) -> Callable:
    """f, of each tensor of a stack or of the one tensor."""
    return jax.vmap(f) if is_stack else f


def batched_by(other: Callable) -> Callable[[Callable], Callable]:
    """A decorator of a function that ``jax.vmap`` cannot batch: under it the other, of the same
    results, is batched in its place.
    """

    def decorate(f: Callable) -> Callable:
        decorated = custom_vmap(f)

        @decorated.def_vmap
        def rule(size: int, batched, *arguments):
            outputs = jax.vmap(
                other, in_axes=jax.tree.map(lambda b: 0 if b else None, batched), axis_size=size
            )(*arguments)
            return outputs, jax.tree.map(lambda _: True, outputs)

        return decorated

    return decorate
