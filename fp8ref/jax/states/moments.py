"""One moment of AdamW, or the master of a weight, in JAX: what is stored of it, and how it is read
(spec O-4, O-5, O-7 to O-10, O-15).

XLA would change the bits in three ways, and each line that prevents one is marked:

    fused       a product and a sum become one operation with one rounding; a clip between them that
                clips nothing prevents it (``product``)
    rewritten   array / number becomes a product with the reciprocal, also of one number a row, and
                a / (b / c) becomes (a c) / b; a barrier, a clip or a choice hides the number or the
                inner quotient
    shortened   a cast to a narrow format and back is left out; the cast ends in integers or behind
                a barrier
"""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp8ref.jax.quantize import cast, division
from fp8ref.jax.quantize.division import product
from fp8ref.jax.transforms import array_types
from fp8ref.spec.states import layouts as states
from fp8ref.spec.states.layouts import Layout, Moment

_LARGEST = np.finfo(np.float32).max


class MomentState(NamedTuple):
    """A stored moment: codes in the format's own dtype and the tensor's shape; the rest float32 of
    shape () or [blocks], None where the layout has none. Fields as in ``fp8ref.sim.states``."""

    codes: Array
    scale_inv: Array | None = None
    amax: Array | None = None
    exponent: Array | None = None
    center: Array | None = None


Scalars = states.Scalars[Array]
"""The numbers of a step, as float32 arrays."""


def zeros(p, layout: Layout, which: int, *, stacked: bool = False) -> MomentState:
    """The stored moment of a parameter before the first step, 0 for m and 1 for v (O-4); for 2, a
    master of zeros. Of a stack of tensors along the first dim, scales have that dim too."""
    moment = layout.kept[which]
    # zeros_like: a state is placed as its parameter is
    codes = jnp.zeros_like(p, dtype=cast.STORED[moment.fmt.name])
    if moment.scaling is None:
        return MomentState(codes)
    lead = codes.shape[:1] if stacked else ()
    groups = lead
    if moment.block is not None:
        groups = (*lead, moment.groups(math.prod(codes.shape[len(lead) :])))
    amax = None if moment.amax == "exact" else jnp.zeros(groups, jnp.float32)
    rest = [jnp.ones(groups, jnp.float32) if moment.expansion else None for _ in range(2)]
    return MomentState(codes, jnp.ones(groups, jnp.float32), amax, *rest)


def master(p, layout: Layout) -> MomentState:
    """The master of a parameter before the first step (O-14)."""
    moment, x = layout.master, cast.to_f32(p)
    if moment.scaling is None:
        return MomentState(_codes(x, x, moment, None))
    scale, scale_inv = scales(_group_max(jnp.abs(x), moment), moment)
    codes = _codes(product(x, scale), x, moment, None)
    if moment.amax == "exact":
        return MomentState(codes, scale_inv)
    largest_code = _group_max(jnp.abs(cast.from_stored(codes, moment.fmt)), moment)
    return MomentState(codes, scale_inv, product(largest_code, scale_inv))


def new(p, g, stored: list[MomentState], at: Scalars, layout: Layout):
    """(the gradient in range, both new moments, and the weight where a master is kept), and the
    change of the weight (O-2 to O-6)."""
    g = in_range(cast.to_f32(g))
    m, v = averages(
        g, read(stored[0], layout.m, layout), read(stored[1], layout.v, layout), at, layout
    )
    step_ratio = ratio(m, v, at)
    if layout.bounded:
        step_ratio = jnp.clip(step_ratio, -at.bound, at.bound)
    if layout.keeps_master:
        p = read(stored[2], layout.master, layout)
    delta = change(step_ratio, p, at)
    return (g, m, v, p - delta) if layout.keeps_master else (g, m, v), delta


def in_range(g):
    """O-2."""
    magnitude = jnp.abs(g)
    kept = jnp.where(magnitude < states.GRADIENT_MIN, jnp.float32(0), g)
    return jnp.where(magnitude <= states.GRADIENT_MAX, kept, jnp.float32(jnp.nan))


def change(ratio, p, at: Scalars):
    """The decrease of a weight from the ratio of moments (O-6); of magnitudes a bound."""
    step = product(at.learning_rate, ratio + product(at.weight_decay, p))
    return jnp.where(jnp.abs(step) < states.STEP_MIN, jnp.float32(0), step)


def predicted(master: MomentState, at: Scalars):
    """The amax that makes the scale of the next master, from the last one's (O-15)."""
    return master.amax + change(at.bound, master.amax, at)


def extremes(x, g, moment: Moment, which: int) -> list[Array]:
    """The maxima that scales are made of, of m, v or the master (0 to 2): of magnitudes; where the
    amax of a moment is predicted, of the gradient's; and of an expansion the negative of the
    smallest that is not zero."""
    if moment.scaling is None or (which == 2 and moment.amax == "predicted"):
        return []
    if moment.amax == "predicted":
        return [_group_max(jnp.abs(g), moment)]
    magnitude = jnp.abs(division.sqrt(x) if moment.root else x)
    maxima = [_group_max(magnitude, moment)]
    if moment.expansion:
        smaller = jnp.where(magnitude == 0, -jnp.inf, -magnitude)
        maxima.append(_group_max(smaller, moment, empty=-np.inf))
    return maxima


def averages(g, m, v, at: Scalars, layout: Layout):
    """The new moments (O-5)."""
    square = product(g, g)
    if layout.average == "products":
        m = product(at.b1, m) + product(at.a1, g)
        v = product(at.b2, v) + product(at.a2, square)
    else:
        m = m + product(at.a1, g - m)
        v = v + product(at.a2, square - v)
    return not_tiny(m, layout), not_tiny(v, layout)


def ratio(m, v, at: Scalars):
    """The ratio of corrected moments, before a bound (O-6)."""
    return division.divide(product(m, at.inverse1), product(division.sqrt(v), at.inverse2) + at.eps)


def not_tiny(x, layout: Layout):
    """x with +0 in place of magnitudes below the layout's smallest (O-5)."""
    return jnp.where(jnp.abs(x) < layout.smallest_moment, jnp.float32(0), x)


def read(stored: MomentState, moment: Moment, layout: Layout):
    """The moment as a step reads it, float32 (O-4)."""
    x = cast.from_stored(stored.codes, moment.fmt)
    if stored.scale_inv is not None:
        x = product(x, _spread(stored.scale_inv, x, moment))
    if stored.exponent is not None:
        magnitude = _root_of_power(jnp.abs(x), _spread(stored.exponent, x, moment))
        x = _signed(product(magnitude, _spread(stored.center, x, moment)), x)
    if moment.root:
        x = product(x, x)
    return not_tiny(x, layout)


def store(
    x, maxima: list[Array], old: MomentState, which: int, at: Scalars, layout: Layout, key
) -> MomentState:
    """The stored moment of x (O-7 to O-10).

    maxima  of ``extremes``.
    which  0 for m, 1 for v and 2 for the master.
    key    of stochastic rounding; None rounds to nearest.
    """
    moment = layout.kept[which]
    if moment.root:
        x = division.sqrt(x)
    if moment.scaling is None:
        return MomentState(_codes(x, x, moment, key))
    if which == 2 and moment.amax == "predicted":
        maxima = [predicted(old, at)]
    own = amax = maxima[0]
    if moment.amax == "previous":
        assert old.amax is not None
        amax = jnp.where(old.amax == 0, own, old.amax)
    elif moment.amax == "predicted" and which < 2:
        kept = product(old.amax, old.amax) if moment.root else old.amax
        amax = averages(own, kept, kept, at, layout)[which]
        amax = division.sqrt(amax) if moment.root else amax
    if moment.expansion:
        return _store_expanded(x, amax, -maxima[1], moment, key)
    scale, scale_inv = scales(amax, moment)
    by, factor = (_over, scale_inv) if moment.scaling == "divide" else (product, scale)
    codes = _codes(by(x, _spread(factor, x, moment)), x, moment, key)
    if moment.amax != "predicted":
        return MomentState(codes, scale_inv, own if moment.amax == "previous" else None)
    # Rounding is monotone: the largest code has the largest product.
    largest_code = _group_max(jnp.abs(cast.from_stored(codes, moment.fmt)), moment)
    return MomentState(codes, scale_inv, product(largest_code, scale_inv))


def _store_expanded(x, amax, smallest, moment: Moment, key) -> MomentState:
    """O-10."""
    floor = jnp.float32(moment.floor)
    top = jnp.maximum(amax, floor)
    bottom = jnp.minimum(jnp.maximum(smallest, floor), top)
    center = product(division.sqrt(top), division.sqrt(bottom))
    ratio = division.divide(top, bottom)
    exponent = jnp.full_like(ratio, states.EXPONENTS[-1])
    for k in reversed(states.EXPONENTS[:-1]):
        exponent = jnp.where(
            ratio <= np.float32(states.EXPANDED_RANGE ** (1 / k)), jnp.float32(k), exponent
        )
    scale_inv = quotient(_power(quotient(top, center), exponent), jnp.float32(moment.fmt.max))
    scaled = expanded(x, center, exponent, scale_inv, moment)
    return MomentState(_codes(scaled, x, moment, key), scale_inv, None, exponent, center)


def expanded(x, center, exponent, scale_inv, moment: Moment):
    """The numbers that are rounded to codes under an expansion (O-10)."""
    of, k, inverse = (_spread(a, x, moment) for a in (center, exponent, scale_inv))
    return _over(_signed(_power(jnp.clip(_over(jnp.abs(x), of), 0, _LARGEST), k), x), inverse)


def _power(x, exponent):
    square = product(x, x)
    # jnp.select would write the index of each element to memory
    low = jnp.where(exponent == 1, x, division.sqrt(x))
    return jnp.where(exponent == 4, product(square, square), jnp.where(exponent == 2, square, low))


def _root_of_power(y, exponent):
    root = division.sqrt(y)
    low = jnp.where(exponent == 1, y, product(y, y))
    return jnp.where(exponent == 4, division.sqrt(root), jnp.where(exponent == 2, root, low))


def _signed(magnitude, sign):
    return jnp.where(jnp.signbit(sign), -magnitude, magnitude)


def scales(amax, moment: Moment):
    """(scale, scale_inv) (O-7); scale is None under ``divide``."""
    amax = jnp.maximum(amax, jnp.float32(moment.floor))
    top = jnp.float32(moment.fmt.max)
    if moment.scaling == "divide":
        return None, quotient(amax, top)
    scaled = (1, quotient(amax, top)) if moment.scaling == "reciprocal" else (top, amax)
    scale = division.divide(*scaled)
    if moment.scaling == "power_of_two":
        bits = lax.bitcast_convert_type(scale, jnp.uint32) & jnp.uint32(0xFF800000)
        scale = jnp.where(jnp.isnan(scale), scale, lax.bitcast_convert_type(bits, jnp.float32))
    scale = lax.optimization_barrier(scale)  # rewritten
    return scale, division.divide(1, scale)


def _codes(scaled, x, moment: Moment, key):
    """O-8, in the format's dtype."""
    return cast.to_stored(scaled, moment.fmt, key=key, numbers=x if moment.keep else None)


def again(x, stored: MomentState, moment: Moment):
    """The codes of x, a moment or root, under a stored moment's scales, to nearest."""
    if stored.exponent is not None:
        x = expanded(x, stored.center, stored.exponent, stored.scale_inv, moment)
    elif stored.scale_inv is not None:
        x = _over(x, _spread(stored.scale_inv, x, moment))
    return _codes(x, x, dataclasses.replace(moment, keep=False), None)


def above(x, limit: float, stored: MomentState, moment: Moment):
    """Whether magnitudes are above RN32(limit * scale_inv) of their group."""
    return jnp.abs(x) > _spread(product(stored.scale_inv, jnp.float32(limit)), x, moment)


def _group_max(x, moment: Moment, empty: float = 0.0):
    """() or [blocks]: the maximum of each group; empty pads, 0 for magnitudes, compared by bits."""
    if empty == 0:
        return cast.from_magnitude_bits(_max_of_groups(cast.magnitude_bits(x), moment, 0), x.dtype)
    return _max_of_groups(x, moment, empty)


def largest(x) -> Array:
    """(): the largest magnitude of all devices.

    By bits: a collective's maximum of numbers may drop a NaN (P-3).
    """
    return cast.from_magnitude_bits(jnp.max(cast.magnitude_bits(x)), x.dtype)


def _max_of_groups(x, moment: Moment, empty: float):
    if moment.block is None:
        return jnp.max(x)
    # a cut along other axes then needs no collective
    if x.ndim and x.shape[-1] % moment.block == 0:
        maxima = jnp.max(x.reshape(*x.shape[:-1], -1, moment.block), axis=-1)
        return array_types.whole(maxima).reshape(-1)
    flat, missing = array_types.whole(x).reshape(-1), -x.size % moment.block
    padded = jnp.pad(flat, (0, missing), constant_values=empty)
    return jnp.max(padded.reshape(-1, moment.block), axis=-1)


def _spread(group_values, x, moment: Moment):
    """The values of the groups, broadcast to x."""
    block, shape = moment.block, x.shape
    if block is None:
        return group_values
    if shape and shape[-1] % block == 0:
        lead = (*shape[:-1], shape[-1] // block)
        spread = jnp.broadcast_to(group_values.reshape(*lead, 1), (*lead, block))
    else:
        spread = jnp.repeat(group_values, block)[: math.prod(shape)]
    return array_types.like(spread.reshape(shape), x)


def _over(x, group_values):
    """x / its group's value; a choice hides from XLA that values repeat."""
    return division.divide(x, jnp.where(jnp.isnan(x), 1.0, group_values))


def quotient(a, b):
    """a / b of an array and a number. A choice by a, and a barrier, hide that b is one number, for
    each tensor of a stack too; the other barrier hides that a quotient may divide what follows:
    rewritten."""
    return lax.optimization_barrier(
        division.divide(a, lax.optimization_barrier(jnp.where(jnp.isnan(a), 1.0, b)))
    )
