"""Attention whose operands are cast one by one: whole float32 matrices, without tiles (E-9).

o, p, tensors = forward(q, k, v, casts)
dq, dk, dv = backward(do, q, k, v, casts)
"""

import math
from typing import NamedTuple

import numpy as np

from fp8ref.selection.attention_casts import Casts
from fp8ref.sim.quantize import scaling
from fp8ref.sim.quantize.scales import scales_from_amax


class Passed(NamedTuple):
    """A forward pass: o [B, H, T, D]; the normalized probabilities [B, H, T, T], not cast; q, k and
    v after their casts, of every query head. All float64."""

    o: np.ndarray
    p: np.ndarray
    tensors: dict[str, np.ndarray]


def forward(q, k, v, casts: Casts) -> Passed:
    """Causal attention of q [B, H, T, D], k and v [B, Hkv, T, D], float32.

    Order:    E-9, each operation in float64, but casts, which see float32.
    """
    cast = {role: _cast(x, role, casts) for role, x in (("q", q), ("k", k), ("v", v))}
    group = q.shape[1] // k.shape[1]
    of = {
        role: (x if role == "q" else np.repeat(x, group, axis=1)).astype(np.float64)
        for role, x in cast.items()
    }
    s = of["q"] @ of["k"].swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    s = np.where(np.tril(np.ones(s.shape[-2:], bool)), s, -np.inf)
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    total = e.sum(axis=-1, keepdims=True)
    o = _probabilities(e, casts) @ of["v"] / total
    return Passed(o, e / total, of)


def backward(do, q, k, v, casts: Casts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dq, dk and dv, float64 of the shapes of q, k and v (E-9)."""
    o, p, of = forward(q, k, v, casts)
    do = _cast(do, "do", casts).astype(np.float64)
    dv = _probabilities(p, casts).swapaxes(-1, -2) @ do
    d = (do * o).sum(axis=-1, keepdims=True)
    ds = (do @ of["v"].swapaxes(-1, -2) - d) * p / math.sqrt(q.shape[-1])
    ds = _cast(ds.astype(np.float32), "ds", casts).astype(np.float64)
    dk = ds.swapaxes(-1, -2) @ of["q"]
    shape = (*k.shape[:2], -1, *k.shape[2:])
    return ds @ of["k"], dk.reshape(shape).sum(axis=2), dv.reshape(shape).sum(axis=2)


def _cast(x: np.ndarray, role: str, casts: Casts) -> np.ndarray:
    if role not in casts.roles:
        return np.asarray(x, np.float32)
    fmt, policy = casts.variant.format_of(role), casts.variant.policy
    return scaling.dequantize(scaling.quantize(np.asarray(x, np.float32), fmt, policy=policy))


def _probabilities(p: np.ndarray, casts: Casts) -> np.ndarray:
    """P in float64, cast with the scale of amax 1 if P is cast (A-8)."""
    if "p" not in casts.roles:
        return p
    variant = casts.variant
    scales = scales_from_amax(np.float32(1.0), variant.fmt, variant.policy)
    q = scaling.quantize_with(p.astype(np.float32), scales, variant.fmt, policy=variant.policy)
    return scaling.dequantize(q).astype(np.float64)
