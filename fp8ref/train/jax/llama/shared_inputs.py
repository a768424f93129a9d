"""Linears of a Llama that read one tensor: under delayed scaling their states of it are equal, so
that it is cast and gathered once.

The states begin alike (H-2) and observe the same amaxes (H-3). XLA does not know that, and would
cast and gather the tensor for each.
"""

from collections.abc import Mapping

import jax
import numpy as np

from fp8ref.jax import delayed
from fp8ref.recipe import Recipe
from fp8ref.shared.errors import ConfigError
from fp8ref.spec.llama import FIRST_READER


def first_readers(linears: Mapping[str, Recipe]) -> dict[str, str]:
    """{linear: the first linear that reads its input}, where both have one recipe and its state."""
    readers = {}
    for name, recipe in linears.items():
        parent, _, last = name.rpartition(".")
        first = f"{parent}.{FIRST_READER.get(last, last)}"
        if first != name and linears.get(first) == recipe and "input" in delayed.unseen(recipe):
            readers[name] = first
    return readers


def states(
    states: Mapping[str, delayed.State], first: Mapping[str, str]
) -> dict[str, delayed.State]:
    """States of a pass by linear, with that of an input which others read the first one's."""
    return {
        name: {**of, "input": states[first[name]]["input"]} if name in first else of
        for name, of in states.items()
    }


def check(states: Mapping[str, delayed.State], first: Mapping[str, str]) -> None:
    """ConfigError unless the states of an input are equal, as those of every run are."""
    for name, other in first.items():
        if name in states and other in states:
            both = [jax.tree.leaves(states[key]["input"]) for key in (name, other)]
            if not all(map(np.array_equal, *both)):
                raise ConfigError(
                    f"{name} and {other} read one tensor, so that their states of it are equal "
                    "under delayed scaling; those of this state differ. Take one that a run has "
                    "saved."
                )
