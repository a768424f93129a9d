"""The loss of logits in JAX, without whole float32 logits in memory (spec M-5)."""

import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_vjp
def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """logsumexp(logits) - logits[target] in float32 (spec M-5).

    Logits [..., V] of any dtype, targets [...] integers -> [...]. The backward pass keeps logits in
    their own dtype: XLA fuses conversions to float32 with the sums that read them, so that float32
    logits are never whole in memory.
    """
    return _cross_entropy(logits, targets)[0]


def _cross_entropy(logits: jax.Array, targets: jax.Array):
    wide = logits.astype(jnp.float32)
    largest = jnp.max(wide, axis=-1, keepdims=True)
    shifted = wide - jnp.where(jnp.isfinite(largest), largest, 0)
    log_sum = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    at_target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    normalizer = log_sum + jnp.where(jnp.isfinite(largest), largest, 0)[..., 0]
    return normalizer - at_target.astype(jnp.float32), (logits, targets, normalizer)


def _cross_entropy_gradient(kept, g: jax.Array):
    logits, targets, normalizer = kept
    probabilities = jnp.exp(logits.astype(jnp.float32) - normalizer[..., None])
    hot = lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == targets[..., None]
    return ((probabilities - hot) * g[..., None]).astype(logits.dtype), None


cross_entropy.defvjp(_cross_entropy, _cross_entropy_gradient)
