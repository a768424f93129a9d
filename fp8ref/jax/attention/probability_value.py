"""The second GEMM of attention, probabilities times values, over tiles of keys (spec A-9, A-10).

A tile's product is a GEMM of its own, added to what came before in float32.
"""

import jax.numpy as jnp
from jax import Array, lax

from fp8ref.jax.attention.exponentials import times
from fp8ref.jax.attention.operands.operands import Parts
from fp8ref.jax.quantize import division
from fp8ref.jax.states import moments


def add(o: Array, c: Array, p: Array, parts: Parts, tile: Array, p_scale_inv: Array) -> Array:
    """o times the factors c of what came before, and a tile added.

    Shapes:   o float32 [B, N, G, rows, D], c [B, N, G, rows]; p, the cast probabilities [B, N, G,
              rows, keys].
    Order:    the GEMM; if the variant has its scales in the tile, times scale_inv of v and of p;
              RN32(o c); the sum.
    """
    with parts.call.scope("values"):
        # [rows, L] x [L, D] -> [rows, D]
        product = parts.dot(p, parts.tile(parts.v, tile), ((4,), (2,)))
    arithmetic = parts.call.arithmetic
    if parts.variant.out_scales == "tile":
        if parts.variant.granularity != "mx_1x32":  # whose operand v has its scales
            product = times(product, parts.scale_of_tile("v", tile), arithmetic)
        product = times(product, p_scale_inv, arithmetic)
    return times(o, c[..., None], arithmetic) + product


def finish(o: Array, total: Array, parts: Parts) -> Array:
    """The output of the sums (A-10), unrounded: float32 [B, N, G, T, D] of o of that shape and sums
    of probabilities [B, N, G, T]."""
    variant = parts.variant
    at_end = parts.inverse["v"] if variant.out_scales == "end" and variant.granularity else None
    total = total[..., None]
    if parts.call.fast:
        whole = jnp.where(total == 0, jnp.float32(1), total)
        if variant.finish == "divide":
            whole = jnp.maximum(total, jnp.float32(1))
        return o * ((1 if at_end is None else at_end) / whole)
    if variant.finish == "divide":
        o = o if at_end is None else moments.product(o, at_end)
        # A choice by o hides from XLA that a row has one divisor, which it would invert.
        divisor = jnp.where(jnp.isnan(o), jnp.float32(1), jnp.maximum(total, jnp.float32(1)))
        return division.divide(o, divisor)
    inverse = division.divide(1, jnp.where(total == 0, jnp.float32(1), total))
    inverse = jnp.where(total == 0, jnp.float32(0), inverse)
    inverse = lax.optimization_barrier(inverse)  # else XLA makes a quotient of the product with it
    return o * (inverse if at_end is None else lax.optimization_barrier(inverse * at_end))
