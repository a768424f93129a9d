"""Seeds of linears that round stochastically, and where an element lies in the whole operand
(spec S-24).

    with rounding.seeded(seed):      # one of a pass; may be traced: another one for each step
        y, seen = linear.apply(x, w, recipe="nvfp4", name="layers.0.mlp.up_proj")
"""

import contextlib
import math
import zlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp8ref.jax.distributed.placement import Placement
from fp8ref.jax.linear.carried import Layer
from fp8ref.jax.quantize import philox
from fp8ref.recipe import OPERANDS, CastSpec, Role
from fp8ref.shared.errors import require

__all__ = ["linear_seeds", "pass_seed", "seeded"]

Seed = int | Array
"""An integer in [0, 2^64), or its low and high half, uint32 [2]."""

_seeds = jax.make_user_context(default_value=None)


def seeded(seed: Seed | Mapping[str, Seed] | None):
    """In this context linears round by the seed of a pass, each by one made of it and its name; or
    by a mapping of linears' own seeds by name. None changes nothing; linears that round to nearest
    ignore it.

    Under vmap and a scan over layers, all that share a name share random numbers, unless the seed
    is mapped too.
    """
    return contextlib.nullcontext() if seed is None else _seeds(_Frozen(seed))


def traced_seed() -> Seed | Mapping[str, Seed] | None:
    """What the context holds, if it is arrays, for a region on other axes; else None."""
    seed = None if _seeds.value is None else _seeds.value.seed
    return seed if all(isinstance(leaf, Array) for leaf in jax.tree.leaves(seed)) else None


class _Frozen:
    """What a context holds: equal to itself alone, so that traced seeds may be in it."""

    def __init__(self, seed) -> None:
        self.seed = seed


def own_seed(name: str, given: Array | None) -> Array:
    """The seed of a linear, uint32 [2]: its own, or that of the context.

    Raises:   ValueError: neither, or a mapping without its name; as ``philox.halves``.
    """
    context = _seeds.value
    seed = given if given is not None or context is None else context.seed
    if isinstance(seed, Mapping):
        seed, own = seed.get(name), True
    else:
        own = given is not None
    require(
        seed is not None,
        f"{name}: its recipe rounds stochastically and needs a seed; got none. Call it within "
        "fp8ref.jax.linear.rounding.seeded(seed), with another seed at each step (S-24).",
    )
    halves = philox.halves(seed)
    return jnp.stack(halves if own else philox.derived(halves, zlib.crc32(bytes(name, "utf-8")), 3))


def pass_seed(seed: int, step: Array, part: int | Array = 0) -> Array:
    """The seed of a pass, uint32 [2]: of a run's seed, step and microbatch, both from 0."""
    return jnp.stack(philox.derived(philox.halves(seed), step, 4 + jnp.asarray(part, jnp.uint32)))


def linear_seeds(seed: Array, names: np.ndarray) -> Array:
    """The seeds uint32 [..., 2] of linears of these names, strings [...], of that of a pass."""
    counter = np.vectorize(lambda name: zlib.crc32(bytes(name, "utf-8")), otypes=[np.uint32])(names)
    return jnp.stack(philox.derived(philox.halves(seed), counter, 3), axis=-1)


def random(
    seed: Array | None, shape: tuple[int, ...], cast: CastSpec, role: Role, axis: int, layer: Layer
) -> philox.Random | None:
    """What a device's piece of an operand draws from; None where it rounds to nearest.

    shape     the tensor's; its leading dims are rows, unless they are batch dims.
    axis      the one that is reduced, -1 or -2.
    """
    if not cast.stochastic:
        return None
    assert seed is not None, "bound by linear.bound"
    gemms = [role in OPERANDS[g] and layer.axis(g, role) == axis for g in OPERANDS]
    key = philox.derived(philox.halves(seed), gemms.index(True), 2)
    index = _flat_index(shape, role, axis, layer)
    return philox.Random(key, 8 if cast.rounding == "stochastic_8" else 48, index)


def _flat_index(shape: tuple[int, ...], role: Role, axis: int, layer: Layer) -> Array:
    """uint32 of a shape: the flat index in the whole matrix, its reduced axis last. Each of batch
    dims has a matrix of its own."""
    placement = layer.placement if layer.mode == "shard_map" else Placement()
    row_axes, column_axes = placement.at_rest(role)
    leading = () if layer.batched or role == "weight" else shape[:-2]
    if role == "weight" and layer.turned:
        row_axes, column_axes = column_axes, row_axes
    # m cuts the first of leading dims; positions of a sequence are cut by others
    inner = (*placement.positions, *placement.gathered(role)) if leading else row_axes
    row, rows = _place(shape, -2, tuple(axis for axis in row_axes if axis in inner))
    for dim in reversed(range(len(leading))):
        outer = tuple(axis for axis in row_axes if axis not in inner) if dim == 0 else ()
        own, length = _place(shape, dim - len(shape), outer)
        row, rows = row + own * jnp.uint32(rows), rows * length
    column, columns = _place(shape, -1, column_axes)
    require(
        rows * columns < 1 << 32,
        f"in JAX, operands that round stochastically have fewer than 2^32 elements on all devices; "
        f"{layer.name}: {role} has {rows} x {columns}. Use data.microbatches, or round to nearest.",
    )
    if axis == -1:
        return row * jnp.uint32(columns) + column
    return column * jnp.uint32(rows) + row


def _place(shape: tuple[int, ...], dim: int, axes: tuple[str, ...]) -> tuple[Array, int]:
    """Each element's place along a dim that mesh axes cut, of the shape; the whole length."""
    place = lax.broadcasted_iota(jnp.uint32, shape, len(shape) + dim)
    if not axes:
        return place, shape[dim]
    first = lax.axis_index(axes).astype(jnp.uint32) * jnp.uint32(shape[dim])
    return place + first, shape[dim] * math.prod(map(lax.axis_size, axes))
