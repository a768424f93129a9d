"""The online softmax of a tile of keys with shifted scores, as SageAttention has it (spec A-26): maxima are of exponents less the offset,
and each key has a factor of its own. The fast form is that of ``online_softmax``."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8ref.attention import Arithmetic
from fp8ref.jax import elementary, int8_heads, moments
from fp8ref.jax.online_softmax import Rows

BLOCK = 64
"""Queries whose tiles end together."""

INVERSE_LOG2E = np.float32(1.44269504)
"""What a log-sum-exp in base 2 is divided by."""

_NONE = np.float32(-np.inf)


def scale_of(scale: float) -> np.float32:
    """The softmax scale in base 2: RN32(scale RN32(log2 e))."""
    return np.float32(np.float32(scale) * np.float32(math.log2(math.e)))


def last_tiles(high: np.ndarray, keys: int, length: int) -> np.ndarray:
    """int32 [Tq]: the last tile that a query's block of 64 sees; negative if it sees none.

    high      the keys that a query sees lie below it (A-3).
    """
    of_blocks = [np.full(len(part), min(part.max(), keys)) for part in np.split(high, range(BLOCK, len(high), BLOCK))]
    return ((np.concatenate(of_blocks).astype(np.int32) - 1) // length).astype(np.int32)


def factors(s: jax.Array, scale: np.float32, of_q: jax.Array, of_k: jax.Array, last: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(scores, their factors in the exponent): in its last tile a row's scores have both scale_inv already.

    Shapes:   s float32 [..., rows, keys], integers; scale_inv of q and k, and last, bool, that broadcast to it.
    """
    both = moments.product(of_q, of_k)
    return jnp.where(last, moments.product(s, both), s), jnp.where(last, jnp.float32(scale), moments.product(scale, both))


def step(s: jax.Array, factor: jax.Array, rows: Rows, seen: jax.Array, offset: float, how: Arithmetic) -> tuple[jax.Array, jax.Array, Rows]:
    """(probabilities, factors of what came before, the new rows), of scores and factors of ``factors``.

    Shapes:   s and factor float32 [..., keys], seen bool that broadcasts to it; probabilities of that shape; the rest [...].
    Order:    m = max(m, RN32(s f - offset)), each rounded once; c = RN32(2^RN32(old m - m)); P = RN32(2^RN32(s f - m)), the
              exponent rounded once; then ``_added``.
    """
    old, s = rows.maximum, jnp.where(seen, s, jnp.float32(0))
    of_tile = jnp.max(jnp.where(seen, elementary.fused(s, factor, -np.float32(offset)), _NONE), axis=-1)
    new = jnp.maximum(old, of_tile)
    safe = jnp.where(new == _NONE, jnp.float32(0), new)
    c = elementary.exponential(jnp.where(old == _NONE, _NONE, old - safe), "2", how)
    exponent = jnp.where(seen, elementary.fused(s, factor, -safe[..., None]), _NONE)
    p = elementary.exponential(exponent, "2", how)
    return p, c, Rows(new, _added(p, c, rows.sums))


def log_sum(maximum: jax.Array, total: jax.Array, of_mean: jax.Array, scale: float) -> jax.Array:
    """The log-sum-exp of rows: RN32(RN32(RN32(log2 l) + m) / 1.44269504) + RN32(of_mean scale), rounded; of_mean is of
    ``int8_heads.taken``."""
    empty = total == 0
    logarithm = elementary.logarithm(jnp.where(empty, jnp.float32(1), total), "2")
    found = int8_heads.quotient(logarithm + jnp.where(empty, jnp.float32(0), maximum), INVERSE_LOG2E)
    return jnp.where(empty, _NONE, found + moments.product(of_mean, np.float32(scale)))


def _added(p: jax.Array, c: jax.Array, sums: jax.Array) -> jax.Array:
    """Each row's probabilities added to its four lanes, which are multiplied by c first: of each 16 columns, lane n has columns 2 n,
    2 n + 1, 2 n + 8 and 2 n + 9, which are added to each other before."""
    lanes = moments.product(sums, c[..., None])
    sixteens = lax.optimization_barrier(p).reshape(*p.shape[:-1], -1, 2, 4, 2)  # else XLA computes each column where it is added
    for n in range(sixteens.shape[-4]):
        first, second = sixteens[..., n, 0, :, :], sixteens[..., n, 1, :, :]
        lanes = lanes + (((first[..., 0] + first[..., 1]) + second[..., 0]) + second[..., 1])
    return lanes
