"""The loss over parts of the vocabulary in JAX: no logits are whole in memory (spec P-29)."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from fp8ref.jax.distributed import sharding
from fp8ref.jax.gemm import gemm

WORDS = 8192
"""The words of the vocabulary whose logits exist at a time."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def losses(h: jax.Array, w: jax.Array, targets: jax.Array, words: int = WORDS) -> jax.Array:
    """Each token's ``logsumexp(logits) - logits[target]`` in float32; logits = h w^T (M-5, P-29).

    Shapes:   h [..., H] and w [V, H] of one dtype, targets [...] integers; float32 [...].
    Order:    logits of ``words`` words after another, rounded to h's dtype as a linear rounds them
              (G-9). The largest logit so far and the sum of exponentials below it are kept in
              float32; a larger one scales the sum first.
    Memory:   the backward pass keeps h, w and the logarithms of the sums, and computes the logits
              again.
    Gradient: of logits as ``cross_entropy``, in their dtype. Of h: a float32 GEMM of each part,
    added in order, then rounded to h's
              dtype. Of w: a GEMM of each part, in w's dtype.
    Specials: as ``cross_entropy``: a NaN or infinite logit gives a loss that is not finite. Targets
    from -V to -1 count from the end of the
              vocabulary; any other outside of it gives NaN. Neither has a 1 in the gradient of its
              logits.
    """
    return _losses(h, w, targets, words)[0]


def _losses(h: jax.Array, w: jax.Array, targets: jax.Array, words: int):
    rows, ids = h.reshape(-1, h.shape[-1]), targets.reshape(-1)
    ids = jnp.where(ids < 0, ids + len(w), ids)  # as an index of all logits counts

    def add(carry, part):
        largest, total, target = carry
        first, weight = part
        logits = _logits(rows, weight)  # [M, K] x [words, K] -> [M, words]
        wide = logits.astype(jnp.float32)
        new = jnp.maximum(largest, wide.max(-1))
        base = _finite(new)
        total = total * jnp.exp(largest - base) + jnp.exp(wide - base[:, None]).sum(-1)
        target += jnp.where(_hot(ids, first, weight), wide, 0).sum(-1)
        return (new, total, target), None

    none = jnp.zeros(ids.shape, jnp.float32)
    begin = tuple(_varying(value, h) for value in (jnp.full_like(none, -jnp.inf), none, none))
    largest, total, target = _over_parts(add, begin, w, words)[0]
    normalizer = jnp.log(total) + _finite(largest)
    target = jnp.where((ids >= 0) & (ids < len(w)), target, jnp.nan)  # no part held it
    return (normalizer - target).reshape(targets.shape), (h, w, targets, normalizer)


def _gradients(words: int, kept, g: jax.Array):
    h, w, targets, normalizer = kept
    rows, ids, dloss = h.reshape(-1, h.shape[-1]), targets.reshape(-1), g.reshape(-1, 1)

    def add(total, part):
        first, weight = part
        probabilities = jnp.exp(_logits(rows, weight).astype(jnp.float32) - normalizer[:, None])
        dlogits = ((probabilities - _hot(ids, first, weight)) * dloss).astype(h.dtype)
        total += gemm.matmul_hp(dlogits, weight, axes=(-1, -2), out_dtype=jnp.float32)
        return total, gemm.matmul_hp(dlogits, rows, axes=(-2, -2), out_dtype=w.dtype)

    drows, dw = _over_parts(add, _varying(jnp.zeros(rows.shape, jnp.float32), h), w, words)
    return drows.astype(h.dtype).reshape(h.shape), jnp.concatenate(dw), None


losses.defvjp(_losses, _gradients)


def _over_parts(add, begin, w: jax.Array, words: int):
    """(carry, results) of ``add(carry, (first word, weights [words, K]))`` over all parts."""
    count = len(w) // words
    carry, outputs = begin, []
    if count:
        first = jnp.arange(count, dtype=jnp.int32) * words
        weights = w[: count * words].reshape(count, words, -1)
        carry, results = lax.scan(add, carry, (first, weights))
        outputs = [] if results is None else [results.reshape(count * words, -1)]
    if len(w) > count * words:
        carry, result = add(carry, (jnp.int32(count * words), w[count * words :]))
        outputs += [] if result is None else [result]
    return carry, outputs


def _logits(rows: jax.Array, weight: jax.Array) -> jax.Array:
    return gemm.matmul_hp(rows, weight, axes=(-1, -1), out_dtype=rows.dtype)


def _hot(ids: jax.Array, first: jax.Array, weight: jax.Array) -> jax.Array:
    """Whether a word of this part is a token's target: bool [M, words]."""
    return ids[:, None] == first + jnp.arange(len(weight), dtype=ids.dtype)


def _finite(largest: jax.Array) -> jax.Array:
    """What exponents are taken relative to: 0 where no logit is finite."""
    return jnp.where(jnp.isfinite(largest), largest, 0)


def _varying(value: jax.Array, like: jax.Array) -> jax.Array:
    """A constant as a loop inside shard_map carries it: varying over the devices as ``like``."""
    axes = tuple(sorted(sharding.varying(like)))
    return lax.pcast(value, axes, to="varying") if axes else value
