"""The elementwise operations of the trainer's Llama: each in float32, rounded once (spec M-3)."""

import jax
import jax.numpy as jnp

from fp8ref.jax.kernels.plain import rounded


@jax.custom_jvp
def add(x: jax.Array, y: jax.Array) -> jax.Array:
    """x + y in float32, rounded once to x's dtype."""
    total = rounded(x.astype(jnp.float32) + y.astype(jnp.float32), x.dtype)
    # Without the barrier XLA keeps the residual stream in float32, though it is rounded.
    return jax.lax.optimization_barrier(total)


@add.defjvp
def _add_tangents(primals: tuple, tangents: tuple) -> tuple:
    """Both gradients are the sum's, unchanged: derived from the sum they would be rounded again,
    which changes no bit and costs a copy."""
    return add(*primals), jax.lax.optimization_barrier(tangents[0] + tangents[1])
