"""Linears of a Flax model that read one tensor: in delayed scaling one state, so one cast (H-9)."""

import functools
from collections.abc import Mapping

import numpy as np
from flax import nnx

from fp8ref import recipe as recipes
from fp8ref.jax import delayed
from fp8ref.jax.flax import nnx as nnx_hooks
from fp8ref.jax.flax.convert import Converted, converted, deconvert
from fp8ref.recipe import Recipe
from fp8ref.shared.errors import require

__all__ = ["share_inputs"]


def share_inputs(model, readers: Mapping[str, str]):
    """Give linears that read one tensor one state of it, under delayed scaling: one history of
    amaxes and one scale, so that XLA casts the tensor once.

        model = fj.flax.share_inputs(model, {"k": "q", "v": "q", "up": "gate"})

    NNX:      the model itself changes and is returned. The hooks of a group share a Variable, their
              ``shared``; nnx.state lists it once, by the first of their paths.
    linen:    what ``convert`` returned; a new module. In collection 'fp8_state' the first linear
              has the state, and the others only those of weight and grad_output. Variables of the
              unshared model serve too: the state of an input that they hold for another than the
              first linear is not read.
    readers   {name of a linear in its parent: that of the first one there that reads its input}.
    Bits:     those of separate states, as equal inputs have equal amaxes. Of inputs that differ the
              larger amax counts (H-4).
    Specials: linears without a state of their input share nothing: XLA merges their equal casts.
              Of two that cast it in different ways, each keeps its own state.
    Raises:   ValueError: a pair that no two linears in FP8 of one parent have; NNX states that
              differ already; a linen model that is not converted; in linen's call, a linear that a
              transformation separates from the first.
    """
    if isinstance(model, Converted):
        return _linen(model, readers)
    require(
        isinstance(model, nnx.Module),
        f"share_inputs takes an NNX model, or a converted linen model; got {type(model).__name__}. "
        "Convert it first.",
    )
    hooks = {path.rpartition(".")[0]: hook for path, hook in nnx_hooks.hooks(model).items()}
    firsts = _firsts({path: hook.recipe for path, hook in hooks.items()}, readers)
    for path, first in firsts.items():
        _check_equal(path, hooks[path].roles()["input"], first, hooks[first].roles()["input"])
    for path, first in firsts.items():
        hooks[path].share(hooks[first])
    return model


def _linen(model: Converted, readers: Mapping[str, str]) -> Converted:
    conversion = model.fp8_conversion
    hooks = {path: hook for path, hook in conversion.hook_of.items() if hook is not None}
    firsts = _firsts({path: hook.keywords["recipe"] for path, hook in hooks.items()}, readers)
    shared = {
        path: functools.partial(hooks[path], first=first.rpartition(".")[2])
        for path, first in firsts.items()
    }
    hook_of = {**conversion.hook_of, **shared}
    sharing = converted(deconvert(model), hook_of)
    type(sharing).fp8_conversion = conversion._replace(hook_of=hook_of)
    return sharing


def _firsts(linears: Mapping[str, Recipe], readers: Mapping[str, str]) -> dict[str, str]:
    """{path of a linear: of the first one that reads its input}, of those with one kind of state of
    it; ValueError for a pair that is not there."""
    chained = set(readers) & set(readers.values())
    require(
        not chained,
        f"share_inputs takes the first reader of each input; got {', '.join(sorted(chained))} as a "
        "first reader, and with one. Name the first of all.",
    )
    pairs = []
    for path in linears:
        parent, dot, last = path.rpartition(".")
        if last in readers and (first := f"{parent}{dot}{readers[last]}") in linears:
            pairs.append((path, first))
    unused = set(readers) - {path.rpartition(".")[2] for path, _ in pairs}
    require(
        not unused,
        f"share_inputs: no parent has {', '.join(f'{n} and {readers[n]}' for n in sorted(unused))} "
        f"in FP8; in FP8 are {', '.join(linears)}. Leave these out.",
    )
    casts = {
        path: recipes.delayed_casts(linears[path]).get("input") for pair in pairs for path in pair
    }
    return {path: first for path, first in pairs if casts[path] == casts[first] is not None}


def _check_equal(path: str, mine, first: str, other) -> None:
    """ValueError unless two states of one input are equal, as far as this process can read them."""
    for key, a, b in zip(mine._fields, mine, other, strict=True):
        unknown = not (delayed.readable(a) and delayed.readable(b))
        require(
            unknown or np.array_equal(np.asarray(a), np.asarray(b)),
            f"{path} and {first} share the state of one input; the {key} of theirs differ. Load "
            "states that a run has saved, before you share.",
        )
