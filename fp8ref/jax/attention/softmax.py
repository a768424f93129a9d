"""The online softmax of one tile of keys (spec A-4 to A-7, A-11): maxima, probabilities, sums, and
the factors of what came before; every operation rounded as the simulator's."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp8ref.jax.attention import exponentials
from fp8ref.jax.attention.exponentials import ascending_sum
from fp8ref.jax.states import moments
from fp8ref.spec.attention.variants import Arithmetic, SumOrder, Variant

_NONE = np.float32(-np.inf)
_LN2 = np.float32(np.log(2))
_LANES: dict[SumOrder, int] = {"tile": 1, "quad": 4, "packed": 1}


class Rows(NamedTuple):
    """What a row keeps from tile to tile: its maximum, float32 [...], -infinity at first, and the
    lanes of its sum, float32 [..., 4] or [..., 1]."""

    maximum: Array
    sums: Array


def start(zeros: Array, order: SumOrder) -> Rows:
    """The state before the first tile, of rows in the shape of zeros."""
    return Rows(zeros + _NONE, jnp.broadcast_to(zeros[..., None], (*zeros.shape, _LANES[order])))


def total(rows: Rows, order: SumOrder) -> Array:
    """The sum of each row, of its lanes: float32 [...]."""
    lanes = rows.sums
    if order == "quad":
        return (lanes[..., 0] + lanes[..., 2]) + (lanes[..., 1] + lanes[..., 3])
    return lanes[..., 0]


def step(
    s: Array,
    rows: Rows,
    seen: Array,
    variant: Variant,
    factor: Array | None,
    arithmetic: Arithmetic,
) -> tuple[Array, Array, Rows]:
    """(probabilities, factors of what came before, the new rows).

    factor    of raw scores; None of scaled ones, which are multiplied by theirs already.
    Shapes:   s float32 [..., keys], seen bool that broadcasts to it; probabilities of that shape;
              the rest [...].
    Order:    A-5 and A-7, one rounding an operation.
    """
    threshold, offset = np.float32(variant.threshold), np.float32(variant.offset)
    exponential = functools.partial(
        exponentials.exponential, base=variant.base, arithmetic=arithmetic
    )
    masked = jnp.where(seen, s, _NONE)
    old, largest = rows.maximum, jnp.max(masked, axis=-1)
    if factor is not None:
        row_factors = row_factor(factor)
        new = jnp.maximum(old, largest)
        # Of a row without keys before this tile: 0 in place of -infinity, and c is 0.
        behind = moments.product(_finite(old) - _finite(new), row_factors)
        behind = jnp.where(old == _NONE, _NONE, behind)
        c = exponential(behind)
        if threshold > 0:
            stays = behind >= -threshold
            new, c = jnp.where(stays, old, new), jnp.where(stays, jnp.float32(1), c)
        if variant.bias == "fused":
            bias = -exponentials.fused(_finite(new), row_factors, -offset)
        else:
            bias = offset - moments.product(_finite(new), row_factors)
        exponent = exponentials.fused(jnp.where(seen, s, jnp.float32(0)), factor, bias[..., None])
    else:
        ahead = _finite(largest) - _finite(old)
        new = jnp.where((old == _NONE) | ((largest != _NONE) & (ahead > threshold)), largest, old)
        behind = jnp.where((old == _NONE) & (new != _NONE), _NONE, _finite(old) - _finite(new))
        c = jnp.where(behind < -threshold, exponential(behind), jnp.float32(1))
        exponent = s - _finite(new)[..., None]
        exponent = exponent + offset if offset else exponent
    p = jnp.where(seen, exponential(exponent), jnp.float32(0))
    return p, c, Rows(new, _added(p, c, rows.sums, variant.sum_order))


def row_factor(factor: Array) -> Array:
    """The factor of raw scores (A-5), of a row."""
    return factor[..., 0] if factor.ndim else factor


def step_fast(s: Array, rows: Rows, seen: Array, variant: Variant) -> tuple[Array, Array, Rows]:
    """``step`` in the fast form (A-18), of scores under the variant's base; rows have one lane."""
    s = jnp.where(seen, s, _NONE)
    old, largest = rows.maximum, jnp.max(s, axis=-1)
    new = jnp.maximum(old, largest)
    if variant.threshold > 0:
        new = jnp.where(new - old <= variant.threshold, old, new)
    shift = _finite(new)
    c = exponentials.exponential(old - shift, variant.base, "fast")
    exponent = s - (shift - np.float32(variant.offset))[..., None]
    p = exponentials.exponential(exponent, variant.base, "fast")
    return p, c, Rows(new, rows.sums * c[..., None] + jnp.sum(p, axis=-1, keepdims=True))


def again_fast(s: Array, lse: Array, seen: Array, variant: Variant) -> Array:
    """``again`` in the fast form (A-18), of scores and a log-sum-exp under the variant's base."""
    exponent = jnp.where(seen, s - _finite(lse)[..., None], _NONE)
    return exponentials.exponential(exponent, variant.base, "fast")


def log_sum_fast(maximum: Array, total: Array, variant: Variant) -> Array:
    """``log_sum`` in the fast form (A-18), of maxima under the variant's base."""
    empty, maximum, total = _not_empty(maximum, total)
    if variant.base == "2":
        log_sums = (maximum + (jnp.log2(total) - np.float32(variant.offset))) * _LN2
    else:
        log_sums = maximum + jnp.log(total)
    return jnp.where(empty, _NONE, log_sums)


def _not_empty(maximum: Array, total: Array) -> tuple[Array, Array, Array]:
    """(which rows see no key, maxima, sums); 0 and 1 of such a row."""
    empty = total == 0
    return empty, jnp.where(empty, jnp.float32(0), maximum), jnp.where(empty, jnp.float32(1), total)


def again(s: Array, lse: Array, seen: Array, factor: Array | None, arithmetic: Arithmetic) -> Array:
    """Probabilities of scores again, from the log-sum-exp (A-15, step 3): float32, shaped as s.

    factor    of raw scores, whose base is 2; None of scaled ones, whose base is e.
    """
    lse = _finite(lse)  # such a row sees no key
    if factor is None:
        exponent, base = s - lse[..., None], "e"
    else:
        bias = moments.product(lse, np.float32(np.log2(np.e)))
        exponent, base = exponentials.fused(s, factor, -bias[..., None]), "2"
    exponent = jnp.where(seen, exponent, jnp.float32(0))
    p = exponentials.exponential(exponent, base, arithmetic)
    return jnp.where(seen, p, jnp.float32(0))


def log_sum(maximum: Array, total: Array, factor: Array | None, variant: Variant) -> Array:
    """The log-sum-exp of rows (A-11), float32 of their shape."""
    empty, maximum, total = _not_empty(maximum, total)
    row_factors = jnp.float32(1) if factor is None else row_factor(factor)
    if variant.lse == "fused":
        logarithm = exponentials.logarithm(total * np.float32(2.0**-variant.offset), "e")
        log_sums = exponentials.fused(maximum, row_factors * _LN2, logarithm)
    elif variant.base == "2":
        logarithm = exponentials.logarithm(total, "2") - np.float32(variant.offset)
        log_sums = (moments.product(maximum, row_factors) + logarithm) * _LN2
    else:
        log_sums = maximum + exponentials.logarithm(total, "e")
    return jnp.where(empty, _NONE, log_sums)


def _added(p: Array, c: Array, sums: Array, order: SumOrder) -> Array:
    """Multiply the sums of rows by c, then add the probabilities (A-7)."""
    before = moments.product(sums, c[..., None])
    if order == "tile":
        return before + ascending_sum(p)[..., None]
    p = lax.optimization_barrier(p)  # else XLA computes each column where it is added
    if order == "quad":
        # lane n has columns 2 n and 2 n + 1 of each eight
        pairs = p.reshape(*p.shape[:-1], -1, 4, 2)
        lanes = before
        for j in range(pairs.shape[-3]):
            lanes = (lanes + pairs[..., j, :, 0]) + pairs[..., j, :, 1]
        return lanes
    eights = p.reshape(*p.shape[:-1], -1, 8)
    tile_lanes = eights[..., 0, :]
    first = before[..., 0] + tile_lanes[..., 0]
    lanes = jnp.concatenate([first[..., None], tile_lanes[..., 1:]], axis=-1)
    for j in range(1, eights.shape[-2]):
        lanes = lanes + eights[..., j, :]
    lane = [lanes[..., n, None] for n in range(8)]
    even, odd = (lane[0] + lane[2]) + (lane[4] + lane[6]), (lane[1] + lane[3]) + (lane[5] + lane[7])
    return even + odd


def _finite(maximum: Array) -> Array:
    """The maximum; 0 for a row that has seen no key."""
    return jnp.where(maximum == _NONE, jnp.float32(0), maximum)
