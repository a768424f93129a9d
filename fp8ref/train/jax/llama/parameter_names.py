"""Names of parameters, from their paths in the trainer's trees: those of Hugging Face's Llama."""

from typing import Any

import jax

from fp8ref.jax.states.moments import MomentState


def name_of(path) -> str:
    """The Hugging Face name of a parameter, from its path in the tree; of a stack of layers, with *
    for their number."""
    parts = [str(getattr(part, "key", part)) for part in path]
    if parts[:2] == ["model", "layers"] and not parts[2].isdigit():
        parts.insert(2, "*")
    return ".".join(parts)


def is_stored(node) -> bool:
    """Whether a node is a stored moment or master, a leaf to most."""
    return isinstance(node, MomentState)


def named(tree, *, stored: bool = False) -> dict[str, Any]:
    """{parameter name: leaf} of a tree of parameters; stored: whose leaves are ``MomentState``."""
    return {
        name_of(path): value
        for path, value in jax.tree_util.tree_leaves_with_path(
            tree, is_leaf=is_stored if stored else None
        )
    }
