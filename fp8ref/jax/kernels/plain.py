"""Elementwise operations of a Llama, which XLA computes: each in float32, rounded once (spec M-3).

All but ``add`` are plain forms of fused kernels.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array


def rounded(x: Array, dtype) -> Array:
    """float32 x rounded to dtype, also where XLA fuses it with what reads it: a conversion to dtype
    and back may be dropped there, ``reduce_precision`` is not (spec M-3)."""
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, info.nexp, info.nmant).astype(dtype)


@jax.custom_jvp
def add(x: Array, y: Array) -> Array:
    """x + y in float32, rounded once to x's dtype."""
    total = rounded(x.astype(jnp.float32) + y.astype(jnp.float32), x.dtype)
    # Without the barrier XLA keeps the residual stream in float32, though it is rounded.
    return jax.lax.optimization_barrier(total)


@add.defjvp
def _add_tangents(primals: tuple, tangents: tuple) -> tuple:
    """Both gradients are the sum's, unchanged: derived from the sum they would be rounded again,
    which changes no bit and costs a copy."""
    return add(*primals), jax.lax.optimization_barrier(tangents[0] + tangents[1])


# The backward pass computes the float32 values within these functions again, from bfloat16. A loop
# over layers would keep all of them; elsewhere XLA finds the forward pass's own.
_recomputed = functools.partial(jax.checkpoint, prevent_cse=False)


@functools.partial(_recomputed, static_argnums=2)
def normed(x: Array, weight: Array, eps: float) -> Array:
    """x * rsqrt(mean(x^2) + eps) * weight over the last dim, rounded once to x's dtype."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return rounded(wide * jax.lax.rsqrt(mean_square + eps) * weight.astype(jnp.float32), x.dtype)


@_recomputed
def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) * up in float32, rounded once to gate's dtype."""
    return rounded(jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32), gate.dtype)


@_recomputed
def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary embedding of [B, T, H, D] by float32 tables [T, D], rounded once to x's dtype."""
    wide = x.astype(jnp.float32)
    first, second = jnp.split(wide, 2, axis=-1)
    half = jnp.concatenate([-second, first], axis=-1)
    return rounded(wide * cos[:, None, :] + half * sin[:, None, :], x.dtype)
