"""Attention sinks: a learned logit a query head, in every row's sum, without a value (A-23)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp8ref.jax.attention import exponentials
from fp8ref.jax.attention.operands.inputs import DeviceCall
from fp8ref.jax.attention.softmax import row_factor
from fp8ref.jax.states import moments

FAR = np.float32(64)
"""A sink so far above a row's maximum, in units of the exponent, leaves nothing of its keys."""

_LOG2E = np.float32(math.log2(math.e))


def add(
    o: Array, total: Array, maximum: Array, sinks: Array, call: DeviceCall, factor: Array | None
) -> tuple[Array, Array, Array]:
    """(o, sums, maxima) of rows after their sinks joined, before the end (A-10).

    factor    of raw scores in the stated form (A-5); None of scaled ones.
    Shapes:   o float32 [B, N, G, T, D], sums and maxima [B, N, G, T], sinks [N x G].
    Order:    A-23.
    """
    variant, arithmetic = call.variant, call.arithmetic
    sinks = sinks.astype(jnp.float32).reshape(1, *maximum.shape[1:3], 1)
    z = moments.product(sinks, _LOG2E) if variant.base == "2" else sinks
    row_factors = None if factor is None else row_factor(factor)
    empty = maximum == -jnp.inf
    m = jnp.where(empty, jnp.float32(0), maximum)
    ahead = z - (m if row_factors is None else moments.product(m, row_factors))
    ahead = jnp.where(empty, jnp.inf, ahead)
    far = ahead > FAR
    p = exponentials.exponential(
        jnp.where(far, jnp.float32(0), ahead) + np.float32(variant.offset), variant.base, arithmetic
    )
    at = z if row_factors is None else sinks * (_LOG2E / row_factors)
    total = jnp.where(far, np.float32(2.0**variant.offset), total + p)
    return jnp.where(far[..., None], jnp.float32(0), o), total, jnp.where(far, at, maximum)


def gradient(d: Array, lse: Array, sinks: Array, call: DeviceCall) -> Array:
    """The gradient of the sinks, float32 [H], of this device's rows.

    Shapes:   d [B, H, Tq], the row sums D of A-15, and lse of its shape, float32; sinks [H].
    Order:    stated: A-23, with sums of float64 numbers in XLA's order; fast: XLA's own.
    """
    p = exponentials.exponential(
        sinks.astype(jnp.float32)[None, :, None] - lse, "e", call.arithmetic
    )
    products = exponentials.times(p, d, call.arithmetic)
    if call.fast:
        return -jnp.sum(products, axis=(0, 2))
    with jax.enable_x64(True):
        total = jnp.sum(lax.convert_element_type(products, np.float64), axis=(0, 2))
        return -lax.convert_element_type(total, np.float32)
