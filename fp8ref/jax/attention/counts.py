"""How many elements P and dS have in a pass, and how many their casts clip or make 0 (A-12, Q-13).

A count is int32 [2], a high part and the low 16 bits, and so exact below 2^40: float32 holds both.
"""

import jax.numpy as jnp
from jax import Array

from fp8ref.selection.statistics import COUNTS


def add(counts: Array, increments: list[Array]) -> Array:
    """counts [n, 2] with n numbers added, int32, each below 2^31 - 2^16."""
    low = counts[:, 1] + jnp.stack(increments)
    return jnp.stack([counts[:, 0] + (low >> 16), low & 0xFFFF], axis=1)


def numbers(counts: Array) -> Array:
    """int32 [n] of counts [n, 2], which wraps from 2^31 on."""
    return (counts[:, 0] << 16) + counts[:, 1]


def measurement(amax: Array, count: Array, saturated: Array, lost: Array) -> Array:
    """A row of statistics float32 [stats.LENGTH] of P or dS, which ``stats.parts`` decodes.

    Shapes:   amax float32 (); each count int32 [2].
    """
    none = jnp.zeros_like(count)
    counts_by_name = {"count": count, "overflows": saturated, "underflows": lost}
    limbs = [counts_by_name.get(name, none).astype(jnp.float32) for name in COUNTS]
    zero, one = jnp.zeros_like(amax), jnp.ones_like(amax)
    # No sums of squares: a unit of 1, whose exponent field is 127; and scales not recorded.
    return jnp.concatenate([*limbs, jnp.stack([zero, zero, 127 * one, amax, one, one])])
