"""Scales of weights that are cast once for both their GEMMs, made where a pass begins: one
all-reduce merges the amaxes of all of them (spec P-9).

Linears take them in place of amaxes of their own, in both passes, and in every microbatch.
"""

import itertools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from fp8ref import recipe as recipes
from fp8ref.jax.distributed import sharding
from fp8ref.jax.quantize import scaling
from fp8ref.jax.quantize.scales import Scales, scales_from_amax
from fp8ref.recipe import Recipe


def of(weights: Mapping[str, jax.Array], linears: Mapping[str, Recipe]) -> dict[str, Scales]:
    """Scales by linear, float32 (); of a stack of layers [layers], one for each of them.

    weights  by linear, of the dtype that is cast: [N, K], or a stack's [layers, N, K]; inside
             shard_map a device's pieces.
    """
    if not linears:
        return {}
    amaxes = {name: _amax(weights[name]) for name in linears}
    ends = list(itertools.accumulate(amax.size for amax in amaxes.values()))
    together = jnp.concatenate([amax.reshape(-1) for amax in amaxes.values()])
    together = scaling.over_devices(together, tuple(sharding.varying(together)))
    casts = {name: recipes.weight_copy(recipe) for name, recipe in linears.items()}
    by_cast = {
        (spec.fmt, spec.policy): scales_from_amax(together, spec.fmt, spec.policy)
        for spec in casts.values()
    }

    def apart(name: str, begin: int, end: int) -> Scales:
        cast_scales = by_cast[casts[name].fmt, casts[name].policy]
        return Scales(*(v[begin:end].reshape(amaxes[name].shape) for v in cast_scales))

    return {
        name: apart(name, begin, end)
        for name, begin, end in zip(linears, [0, *ends], ends, strict=False)
    }


def _amax(w: jax.Array) -> jax.Array:
    return scaling.amax(w) if w.ndim == 2 else jax.vmap(scaling.amax)(w)
