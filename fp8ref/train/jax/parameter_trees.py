"""Trees of parameters: their names, and the stacks of layers that a scan runs over (parallel.scan).

The i-th part of a stack is layer i's; its name has * in place of the layers' number.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import Sharding

from fp8ref.jax.states.moments import MomentState
from fp8ref.train.jax.mesh import Layout


def name_of(path) -> str:
    """The name of a parameter, from its path in the tree: in the trainer's Llama Hugging Face's; of
    a stack of layers, with * for their number."""
    parts = [str(getattr(part, "key", part)) for part in path]
    if parts[:2] == ["model", "layers"] and not parts[2].isdigit():
        parts.insert(2, "*")
    return ".".join(parts)


def is_stored(node) -> bool:
    """Whether a node is a stored moment or master, a leaf to most."""
    return isinstance(node, MomentState)


def named(tree, *, stored: bool = False) -> dict[str, Any]:
    """{parameter name: leaf} of a tree of parameters; stored: whose leaves are ``MomentState``."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_stored if stored else None)
    return {name_of(path): value for path, value in leaves}


class LayerStacks:
    """Takes stacks apart and puts them together.

    layers    how many a stack holds.
    layout    where arrays are: a layer's as without a scan, a stack not cut along layers.
    """

    def __init__(self, layers: int, layout: Layout) -> None:
        self._layers, self._layout = layers, layout

    def leading(self, name: str) -> tuple[int, ...]:
        """The leading dims of what belongs to a name: the layers, if it names all of them."""
        return (self._layers,) if "*" in name else ()

    def names(self, name: str) -> np.ndarray:
        """The names of the layers in a stack [layers], or the one name, ()."""
        layers = self.leading(name)
        return np.array([name.replace("*", str(i)) for i in range(*layers)] if layers else name)

    def named(self, tree) -> dict[str, Any]:
        """{parameter name: leaf} of a tree of parameters, stacks taken apart."""
        return self.apart(named(tree))

    def apart(self, stacked: Mapping[str, Any]) -> dict[str, Any]:
        """The same by the names of the layers: the i-th of a stack is layer i's."""
        apart: dict[str, Any] = {}
        for name, value in stacked.items():
            if "*" in name:
                leaves, tree = jax.tree.flatten(value)
                layer_leaves = zip(*map(self._taken_apart, leaves), strict=True)
                layers = zip(range(self._layers), layer_leaves, strict=True)
                apart |= {
                    name.replace("*", str(i)): jax.tree.unflatten(tree, layer)
                    for i, layer in layers
                }
            else:
                apart[name] = value
        return apart

    def specs(self, stacked: Mapping[str, Any]) -> dict[str, Any]:
        """PartitionSpecs, or trees of them, by layers' names: a stack's without its first dim."""
        apart = {name: value for name, value in stacked.items() if "*" not in name}
        for name in stacked.keys() - apart.keys():
            layer_spec = jax.tree.map(lambda spec: P(*spec[1:]), stacked[name])
            apart |= {name.replace("*", str(i)): layer_spec for i in range(self._layers)}
        return apart

    def tree(self, like, arrays: Mapping[str, jax.Array]):
        """The tree of parameters ``like``, of arrays by parameter name."""
        return jax.tree_util.tree_map_with_path(
            lambda path, _: self.together(name_of(path), arrays), like
        )

    def together(self, name: str, arrays: Mapping[str, Any]):
        """What is found by a name; by the name of a stack, the layers' together."""
        if "*" not in name:
            return arrays[name]
        parts = [arrays[name.replace("*", str(i))] for i in range(self._layers)]

        def stack(*of: jax.Array) -> jax.Array:
            spec = getattr(of[0].sharding, "spec", None)  # of an array on a mesh
            return _stack(None if spec is None else self._layout.sharding(P(None, *spec)), *of)

        return jax.tree.map(stack, *parts)

    def _taken_apart(self, stack: jax.Array) -> list[jax.Array]:
        """The arrays of a stack, each placed as its layer's own would be."""
        spec = None
        if not isinstance(stack, jax.core.Tracer):
            spec = getattr(stack.sharding, "spec", None)
        return _apart(None if spec is None else self._layout.sharding(P(*spec[1:])), stack)


@functools.partial(jax.jit, static_argnums=0)
def _stack(placed: Sharding | None, *arrays: jax.Array) -> jax.Array:
    stack = jnp.stack(arrays)
    return stack if placed is None else lax.with_sharding_constraint(stack, placed)


@functools.partial(jax.jit, static_argnums=0)
def _apart(placed: Sharding | None, stack: jax.Array) -> list[jax.Array]:
    arrays = list(stack)
    if placed is None:
        return arrays
    return [lax.with_sharding_constraint(array, placed) for array in arrays]
