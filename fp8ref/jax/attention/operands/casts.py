"""Attention whose operands are cast one by one: whole float32 matrices, without tiles (spec E-9).

o = apply(q, k, v, casts)          # differentiable
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array

from fp8ref.jax.attention.operands import heads as head_scaling
from fp8ref.jax.gemm import hardware
from fp8ref.jax.quantize import scaling
from fp8ref.jax.transforms import derivatives
from fp8ref.selection.attention_casts import Casts

_PRECISE = jax.lax.Precision.HIGHEST
"""Products of float32 on a GPU as on a CPU, without TF32."""

_NAME = "attention with single casts"
"""What errors begin with."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def apply(q: Array, k: Array, v: Array, casts: Casts) -> Array:
    """Causal attention of q [B, H, T, D], k and v [B, Hkv, T, D], of q's dtype.

    ValueError for a second derivative, and inside ``hardware.simulating``.
    """
    return _forward(q, k, v, casts)[0]


def _forward(q: Array, k: Array, v: Array, casts: Casts):
    """Attention of [B, Hkv, G, T, ...]; G: the query heads of a key head."""
    hardware.refuse(_NAME, "multiplies FP8 codes; got products of their values in float32")
    heads, like = k.shape[1], (q, k, v)
    a, b, c = (_cast(x, role, casts) for x, role in ((q, "q"), (k, "k"), (v, "v")))
    a, b, c = a.reshape(a.shape[0], heads, -1, *a.shape[2:]), b[:, :, None], c[:, :, None]
    s = _product(a, b.mT) / math.sqrt(q.shape[-1])
    s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)
    e = jnp.exp(s - s.max(axis=-1, keepdims=True))
    total = e.sum(axis=-1, keepdims=True)
    o = _product(_cast(e, "p", casts), c) / total
    dtypes = [jnp.zeros((), x.dtype) for x in like]
    return o.reshape(q.shape).astype(q.dtype), (a, b, c, e / total, o, dtypes)


def _saved(q: Array, k: Array, v: Array, casts: Casts):
    q, k, v = (derivatives.not_again(x, _NAME, "attention") for x in (q, k, v))
    return _forward(q, k, v, casts)


def _backward(casts: Casts, saved, grad: Array):
    q, k, v, p, o, dtypes = saved
    grad = derivatives.not_again(grad, _NAME, "attention")
    do = _cast(grad, "do", casts).reshape(q.shape)
    dv = _product(_cast(p, "p", casts).mT, do).sum(axis=2)
    d = (do * o).sum(axis=-1, keepdims=True)
    ds = _cast((_product(do, v.mT) - d) * p / math.sqrt(q.shape[-1]), "ds", casts)
    dq, dk = _product(ds, k).reshape(grad.shape), _product(ds.mT, q).sum(axis=2)
    return tuple(x.astype(like.dtype) for x, like in zip((dq, dk, dv), dtypes, strict=True))


apply.defvjp(_saved, _backward)


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=_PRECISE)


def _cast(x: Array, role: str, casts: Casts) -> Array:
    """x in float32, cast if its role is; P by the scale of amax 1 (A-8)."""
    x = x.astype(jnp.float32)
    if role not in casts.roles:
        return x
    fmt, policy = casts.variant.format_of(role), head_scaling.implemented(casts.variant.policy)
    amax = jnp.ones(()) if role == "p" else scaling.amax(x)
    scale, _ = head_scaling.scales_from_amax(amax, fmt, policy)
    return scaling.dequantize(scaling.quantize_with(x, scale, fmt))
