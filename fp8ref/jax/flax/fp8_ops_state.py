"""Convert the FP8 state of Flax's own fp8_ops to ours and back, bit for bit (spec H-8).

Flax keeps it in collection ``_overwrite_with_gradient``, we in 'fp8_state'. ``from_flax`` and
``to_flax`` convert variables; ``flax_recipe`` is the recipe under which training continues alike.
"""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from flax import traverse_util
from jax import Array

from fp8ref.formats import E4M3FN, E5M2, Format
from fp8ref.jax.delayed import FlaxState
from fp8ref.jax.flax.amax_observations import STATE
from fp8ref.jax.flax.linen import LayerState, linen_states, state_collection
from fp8ref.recipe import CastSpec, GemmSpec, Recipe, Role
from fp8ref.spec.delayed import DELAYED

COLLECTION = "_overwrite_with_gradient"
"""The collection of variables in which Flax keeps its FP8 state."""

_ROLES: dict[Role, str] = {"input": "input", "weight": "kernel", "grad_output": "output_grad"}
# Flax's modules inside its layers, and ours. Their numbers stay: Fp8DirectDotGeneralOp_0 is
# Fp8DotGeneral_0.
_OPS = {"Fp8DirectDotGeneralOp": "Fp8DotGeneral", "Fp8Einsum": "Fp8Einsum"}


def flax_recipe(history_length: int = 1024) -> Recipe:
    """The recipe of Flax's Fp8DirectDotGeneralOp: e4m3, e4m3 and e5m2, policy ``flax``, product of
    scales after each GEMM.

    A layer used once in every step has Flax's outputs, gradients and state, bit for bit, in float32
    on a CPU. Amaxes of several uses merge by maximum, and an unused layer keeps its state, where
    Flax sums and zeroes. bfloat16 operands are divided in float32.
    """
    config = dataclasses.replace(
        DELAYED["flax"], history_length=history_length, reuse="max", unused="keep"
    )

    def cast(fmt: Format) -> CastSpec:
        return CastSpec(fmt=fmt, policy=config.policy, delayed=config)

    x, w, g = cast(E4M3FN), cast(E4M3FN), cast(E5M2)
    return Recipe(
        name="flax",
        output=GemmSpec(a=x, b=w, accumulate="fast", epilogue="product_then_round"),
        grad_input=GemmSpec(a=g, b=w, accumulate="slow", epilogue="product_then_round"),
        grad_weight=GemmSpec(a=g, b=x, accumulate="slow", epilogue="product_then_round"),
    )


def from_flax(variables: Mapping) -> dict:
    """Variables of a Flax FP8 model, for the same model with hooks of ``flax_recipe``.

    Flax's collection becomes 'fp8_state'. Stored scales stay as they are, and histories become
    newest first, so ``to_flax`` gives back the same bits. Flax counts no steps: ``step`` is 0.

    Raises:   ValueError: no such collection; in it, an op other than Fp8DirectDotGeneralOp and
              Fp8Einsum, or entries of other names, shapes or dtypes than Flax's.
    """
    if not variables.get(COLLECTION):
        raise ValueError(
            f"from_flax takes variables with {COLLECTION!r}; got {', '.join(variables) or 'none'}."
        )
    layers: dict[tuple[str, ...], dict[str, Array]] = {}
    for path, value in traverse_util.flatten_dict(variables[COLLECTION]).items():
        layers.setdefault(path[:-1], {})[path[-1]] = value
    states = {
        _renamed(path, _OPS): _layer_from_flax(".".join(path), entries)
        for path, entries in layers.items()
    }
    rest = {name: tree for name, tree in variables.items() if name != COLLECTION}
    return {**rest, STATE: state_collection(states)}


def to_flax(variables: Mapping) -> dict:
    """Variables for Flax's own FP8 layers: the inverse of ``from_flax``.

    Raises:   ValueError: no 'fp8_state'; naming the layer, a state that is not of ``flax_recipe``,
              which Flax could not continue.
    """
    layers = linen_states(variables)
    if not layers:
        raise ValueError(
            f"to_flax takes variables with {STATE!r}; got {', '.join(variables) or 'none'}."
        )
    ops = {ours: flax for flax, ours in _OPS.items()}
    entries = {}
    for path, layer in layers.items():
        if layer.recipe != flax_recipe(next(iter(layer.roles.values())).amax_history.shape[-1]):
            raise ValueError(
                f"{'.'.join(path)}: to_flax needs a state of flax_recipe; got recipe "
                f"{layer.recipe.name!r}, whose scales Flax would change. Train with flax_recipe."
            )
        for role, state in layer.roles.items():
            own = (*_renamed(path, ops), _ROLES[role])
            entries[(*own[:-1], f"{own[-1]}_scale")] = state.stored[..., None]
            entries[(*own[:-1], f"{own[-1]}_amax_history")] = _reordered(state.amax_history)
    rest = {name: tree for name, tree in variables.items() if name != STATE}
    return {**rest, COLLECTION: traverse_util.unflatten_dict(entries)}


def _layer_from_flax(name: str, entries: Mapping[str, Array]) -> LayerState:
    """One layer's state from Flax's entries; ValueError for other names, shapes, dtypes."""
    expected = {f"{role}_{kind}" for role in _ROLES.values() for kind in ("scale", "amax_history")}
    if set(entries) != expected:
        raise ValueError(
            f"{name}: Flax keeps {', '.join(sorted(expected))}; got {', '.join(sorted(entries))}."
        )
    shapes = {key: jnp.shape(value) for key, value in entries.items()}
    lengths = {shape[-1:] for key, shape in shapes.items() if key.endswith("_history")}
    leading = {shape[:-1] for shape in shapes.values()}
    scales = {shape[-1:] for key, shape in shapes.items() if key.endswith("_scale")}
    if len(lengths) != 1 or lengths == {()} or len(leading) != 1 or scales != {(1,)}:
        raise ValueError(
            f"{name}: Flax keeps scales (1,) and histories of one length; got {shapes}."
        )
    if any(value.dtype != jnp.float32 for value in entries.values()):
        raise ValueError(
            f"{name}: Flax's state is float32; got "
            f"{', '.join(sorted({str(v.dtype) for v in entries.values()}))}."
        )
    roles = {
        role: FlaxState(
            jnp.asarray(entries[f"{flax}_scale"])[..., 0],
            _reordered(jnp.asarray(entries[f"{flax}_amax_history"])),
            jnp.zeros(shapes[f"{flax}_scale"][:-1], jnp.int32),
        )
        for role, flax in _ROLES.items()
    }
    return LayerState(roles=roles, recipe=flax_recipe(lengths.pop()[0]))


def _reordered(history: Array) -> Array:
    """Newest first <-> [newest, oldest, ..., second newest], Flax's order; its own inverse."""
    return jnp.concatenate([history[..., :1], history[..., :0:-1]], axis=-1)


def _renamed(path: tuple[str, ...], ops: Mapping[str, str]) -> tuple[str, ...]:
    """A hook's path with the op's name replaced; ValueError for an unknown op."""
    op, underscore, number = path[-1].rpartition("_")
    if op not in ops:
        raise ValueError(
            f"{'.'.join(path)}: FP8 state belongs to one of {', '.join(ops)}; got {path[-1]!r}."
        )
    return (*path[:-1], f"{ops[op]}{underscore}{number}")
