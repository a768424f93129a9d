"""Scales of weights that are cast once for both their GEMMs, of amaxes that a step takes where it
has the new weights: no later pass reads weights for them, and one all-reduce merges all (spec P-9).

Linears take the scales in place of amaxes of their own, in both passes, and in every microbatch.
"""

import itertools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from fp8ref import recipe as recipes
from fp8ref.jax.distributed import sharding
from fp8ref.jax.quantize import scaling
from fp8ref.jax.quantize.scales import Scales, scales_from_amax
from fp8ref.recipe import Recipe


def amaxes(weights: Mapping[str, jax.Array]) -> jax.Array:
    """The amaxes of weights as they are cast, in bfloat16 (M-2), one after the other: float32 [n].

    weights  [N, K], or a stack's [layers, N, K], a scale each; in shard_map a device's pieces.
    """
    # An NVIDIA GPU takes an amax in the kernel that writes the weight. XLA for a CPU would compute
    # the weight again for it, and might round otherwise.
    each = lax.platform_dependent(
        list(weights.values()), cuda=lambda w: w, default=lax.optimization_barrier
    )
    together = jnp.concatenate([_amax(w.astype(jnp.bfloat16)) for w in each])
    return scaling.over_devices(together, tuple(sharding.varying(together)))


def of(
    amaxes: jax.Array, leading: Mapping[str, tuple[int, ...]], linears: Mapping[str, Recipe]
) -> dict[str, Scales]:
    """Scales by linear, float32 (); of a stack of layers [layers], one for each of them.

    amaxes   as the function of that name makes them.
    leading  the leading dims of each weight that they are of, in order: of a stack (layers,).
    linears  some of these weights' linears, and their recipes.
    """
    ends = list(itertools.accumulate(map(math.prod, leading.values())))
    casts = {name: recipes.weight_copy(recipe) for name, recipe in linears.items()}
    by_cast = {
        (spec.fmt, spec.policy): scales_from_amax(amaxes, spec.fmt, spec.policy)
        for spec in casts.values()
    }

    def apart(name: str, begin: int, end: int) -> Scales:
        cast_scales = by_cast[casts[name].fmt, casts[name].policy]
        return Scales(*(v[begin:end].reshape(leading[name]) for v in cast_scales))

    return {
        name: apart(name, begin, end)
        for name, begin, end in zip(leading, [0, *ends], ends, strict=False)
        if name in linears
    }


def _amax(w: jax.Array) -> jax.Array:
    return (scaling.amax(w) if w.ndim == 2 else jax.vmap(scaling.amax)(w)).reshape(-1)
