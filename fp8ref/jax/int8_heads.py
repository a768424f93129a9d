"""Quantize q, k and v as SageAttention does: q and k in INT8, k less its mean over the tokens, v by feature (spec A-26).

Tensors are [batch, heads, tokens, features], and are rounded to bfloat16 first. Quotients have a choice in their divisor: XLA would make a
product with the reciprocal of one that a row, or a whole tensor, shares.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8ref.formats import BFLOAT16, Format
from fp8ref.jax import cast, division, scaling
from fp8ref.jax.elementary import ascending_sum
from fp8ref.jax.head_scaling import KEYS, THREADS, Heads, padded, spread

LARGEST = 127
"""The largest magnitude of an INT8 code."""

SMALLEST = np.float32(1e-7)
"""What is added to a scale_inv, so that none is zero."""

_ZERO = np.float32(2.0**-100)
"""An amax of v below it has scale 1."""


def quantize(q: jax.Array, k: jax.Array, v: jax.Array, fmt: Format) -> dict[str, Heads]:
    """q, k and v by role; fmt is v's.

    Shapes:   q [B, H, Tq, D], k and v [B, Hkv, Tk, D], hp. Codes of q and k are int8; scale_inv of q is [B, H, 8 ceil(Tq / 16), 1], of k
              [B, Hkv, 4 ceil(Tk / 128), 1], of v [B, Hkv, 1, D].
    Specials: a NaN or an infinity makes scale_inv of its group NaN or infinite, and so NaN of all scores with it.
    """
    q, k, v = (_bfloat16(x) for x in (q, k, v))
    k = _bfloat16(k - mean(k))
    b, h, _, d = q.shape
    of_q = padded(q, THREADS).reshape(b, h, -1, 2, 8, d).swapaxes(3, 4).reshape(b, h, -1, 2 * d)
    b, h, _, d = k.shape
    of_k = padded(k, KEYS).reshape(b, h, -1, KEYS // 8, 4, 2, d)
    of_k = jnp.moveaxis(of_k, 4, 3).reshape(b, h, -1, KEYS // 4 * d)
    return {"q": _int8(q, scaling.amax(of_q, "rowwise")), "k": _int8(k, scaling.amax(of_k, "rowwise")), "v": _by_feature(v, fmt)}


def mean(k: jax.Array) -> jax.Array:
    """The mean of k over its tokens, in bfloat16: float32 [B, Hkv, 1, D].

    Order:    zeros up to a power of two of tokens; the halves are added, until one is left; times RN32(1 / T); to bfloat16.
    """
    k = _bfloat16(k)
    total = padded(k, 1 << (k.shape[2] - 1).bit_length())
    while total.shape[2] > 1:
        half = total.shape[2] // 2
        total = total[:, :, :half] + total[:, :, half:]
    return _bfloat16(total * (np.float32(1) / np.float32(k.shape[2])))


def taken(q: jax.Array, k: jax.Array) -> jax.Array:
    """What smoothing takes from the scores of a row, before the softmax scale: float32 [B, H, Tq].

    Order:    products of q and the mean of k, features ascending, each addition rounded; to bfloat16.
    """
    of_k = mean(k)
    products = _bfloat16(q) * jnp.repeat(of_k, q.shape[1] // of_k.shape[1], axis=1)  # exact: bfloat16 times bfloat16
    return _bfloat16(ascending_sum(products))


def _int8(x: jax.Array, amax: jax.Array) -> Heads:
    """INT8 codes of x: RN32(x / scale_inv), half of one added away from zero, rounded, and cut off."""
    scale_inv = quotient(amax, np.float32(LARGEST)) + SMALLEST
    found = quotient(x, spread(scale_inv, x.shape, "int8_thread"))
    codes = (found + jnp.where(found >= 0, jnp.float32(0.5), jnp.float32(-0.5))).astype(jnp.int8)
    return Heads(codes, amax, division.divide(1, scale_inv), scale_inv)


def _by_feature(v: jax.Array, fmt: Format) -> Heads:
    amax = scaling.amax(v, "rowwise", axis=2)
    largest = jnp.float32(fmt.max)
    safe = jnp.where(amax < _ZERO, largest, amax)
    scale = division.divide(largest, safe)
    return Heads(cast.to_fp8(v * scale, fmt), amax, scale, quotient(safe, largest))


def quotient(x: jax.Array, y) -> jax.Array:
    """RN32(x / y) of a divisor that many elements share."""
    return division.divide(x, jnp.where(jnp.isnan(x), jnp.float32(1), y))


def _bfloat16(x: jax.Array) -> jax.Array:
    """x rounded to bfloat16, in float32."""
    wide = cast.to_f32(x)
    return lax.reduce_precision(jnp.where(jnp.isfinite(wide), jnp.clip(wide, -BFLOAT16.max, BFLOAT16.max), wide), 8, 7)
