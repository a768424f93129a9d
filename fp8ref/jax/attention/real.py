"""Attention in real arithmetic, forward and backward (spec A-1, A-14): float64, a block of queries
and a tile of keys at a time, rounded once at the end.

It is a reference: a GPU multiplies in float64, and the backward pass repeats the forward sums.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp8ref.jax.attention.gradients.gradients import Gradients
from fp8ref.jax.attention.operands import heads
from fp8ref.jax.attention.operands import operands as operands
from fp8ref.jax.attention.operands.heads import Heads
from fp8ref.jax.attention.operands.inputs import DeviceCall, Inputs
from fp8ref.jax.attention.operands.operands import Parts
from fp8ref.jax.quantize.scales import Scales

_NONE = np.float64(-np.inf)


def forward(inputs: Inputs, call: DeviceCall) -> tuple[Array, Array]:
    """(o [B, H, Tq, D], log-sum-exp [B, H, Tq]), float32."""
    with jax.enable_x64(True):
        parts = _parts(inputs, call)
        maximum, total, o = _with_sinks(*_sums(parts, with_values=True), inputs)
        whole = jnp.where(total == 0, np.float64(1), total)
        lse = jnp.where(total == 0, _NONE, maximum + lax.log(whole))
        o = o / whole[..., None]
        return _narrow(parts.ungrouped(o)), _narrow(parts.ungrouped(lse))


def backward(do: Array, inputs: Inputs, call: DeviceCall) -> Gradients:
    """The gradients, of the steps of A-14: D first, then all else."""
    tensors = {"do": do.astype(jnp.float32)}
    with jax.enable_x64(True):
        parts = _parts(inputs, call)
        maximum, total, _ = _with_sinks(*_sums(parts, with_values=False), inputs)
        whole = jnp.where(total == 0, np.float64(1), total)
        inverse = jnp.where(total == 0, np.float64(0), 1 / whole)
        pairs = _Pairs(parts, parts.by_group(_wide(do)), maximum, inverse)
        d = pairs.row_sums()
        dq, dk, dv, largest = pairs.gradients(d)
        tk = parts.shape_k[2]
        tensors["dq"] = _narrow(parts.ungrouped(dq))
        tensors["dk"], tensors["dv"] = _narrow(dk[:, :, :tk]), _narrow(dv[:, :, :tk])
        largest = _narrow(largest)
        dsinks = None
        if inputs.sinks is not None:
            sinks = _wide(inputs.sinks).reshape(1, *maximum.shape[1:3], 1)
            p = lax.exp(sinks - maximum) * inverse
            dsinks = -_narrow((p * d).sum(axis=(0, 3))).reshape(-1)
    amaxes = {role: heads.amax(x, None, heads=1) for role, x in tensors.items()}
    one = jnp.ones((), jnp.float32)
    return Gradients(
        tensors["dq"],
        tensors["dk"],
        tensors["dv"],
        tensors={},
        amaxes=amaxes | {"ds": largest},
        saturated=jnp.int32(0),
        scale_ds=Scales(one, one),
        dsinks=dsinks,
    )


class _Pairs(NamedTuple):
    """Queries and keys: do [B, N, G, T, D]; row maxima and inverse sums [B, N, G, T]."""

    parts: Parts
    do: Array
    maximum: Array
    inverse: Array

    def probabilities(self, block: Array, tile: Array) -> tuple[Array, Array]:
        """P and dP."""
        parts = self.parts
        m = parts.block(self.maximum, block)
        m = jnp.where(m == _NONE, np.float64(0), m)[..., None]
        p = lax.exp(_scores(parts, block, tile) - m) * parts.block(self.inverse, block)[..., None]
        return p, _dot(parts.block(self.do, block), parts.tile(parts.v, tile), ((4,), (3,)))

    def row_sums(self) -> Array:
        """D of each row."""

        def body(d, block, tile):
            p, dp = self.probabilities(block, tile)
            total = self.parts.block(d, block) + (p * dp).sum(axis=-1)
            return self.parts.put_block(d, total, block)

        zeros = self.parts.zeros(*self.inverse.shape, dtype=np.float64)
        return operands.loop(body, zeros, self.parts.grid)

    def gradients(self, d: Array) -> tuple[Array, ...]:
        """dq [B, N, G, T, D], dk and dv [B, N, Tk, D], and the largest |dS|."""
        parts, scale = self.parts, np.float64(self.parts.scale)

        def keys(x: Array, rows: Array) -> Array:
            return jnp.einsum("bngrl,bngrd->bnld", x, rows, precision="highest")

        def body(carry, block, tile):
            dq, dk, dv, largest = carry
            p, dp = self.probabilities(block, tile)
            ds = p * (dp - parts.block(d, block)[..., None]) * scale * _slope(parts, block, tile)
            dq_part = _dot(ds, parts.tile(parts.k, tile), ((4,), (2,)))
            dq = parts.put_block(dq, parts.block(dq, block) + dq_part, block)
            dk_part = keys(ds, parts.block(parts.q, block))
            dv_part = keys(p, parts.block(self.do, block))
            dk = parts.put_tile(dk, parts.tile(dk, tile) + dk_part, tile, axis=2)
            dv = parts.put_tile(dv, parts.tile(dv, tile) + dv_part, tile, axis=2)
            return dq, dk, dv, jnp.maximum(largest, jnp.max(jnp.abs(ds)))

        shapes = parts.q.shape, parts.k.shape, parts.k.shape, ()
        zeros = tuple(parts.zeros(*shape, dtype=np.float64) for shape in shapes)
        return operands.loop(body, zeros, parts.grid)


def _parts(inputs: Inputs, call: DeviceCall) -> Parts:
    one = jnp.ones((), jnp.float32)
    qkv = zip(("q", "k", "v"), inputs[:3], strict=True)
    tensors = {role: Heads(_wide(x), one, one, one) for role, x in qkv}
    return Parts(inputs, call, tensors)


def _sums(parts: Parts, *, with_values: bool) -> tuple[Array, Array, Any]:
    """(maxima, sums of exponentials, weighted sums of v) of all rows, in float64."""
    b, n, g, t, d = parts.q.shape

    def body(carry, block, tile):
        maximum, total, o = carry
        old, s = parts.block(maximum, block), _scores(parts, block, tile)
        new = jnp.maximum(old, s.max(axis=-1))
        finite = jnp.where(new == _NONE, np.float64(0), new)
        c, p = lax.exp(old - finite), lax.exp(s - finite[..., None])
        total = parts.put_block(total, parts.block(total, block) * c + p.sum(axis=-1), block)
        if with_values:
            tile_product = _dot(p, parts.tile(parts.v, tile), ((4,), (2,)))
            o = parts.put_block(o, parts.block(o, block) * c[..., None] + tile_product, block)
        return parts.put_block(maximum, new, block), total, o

    zeros = parts.zeros(b, n, g, t, dtype=np.float64)
    o = parts.zeros(b, n, g, t, d, dtype=np.float64) if with_values else None
    return operands.loop(body, (zeros + _NONE, zeros, o), parts.grid)


def _scores(parts: Parts, block: Array, tile: Array) -> Array:
    s = _dot(parts.block(parts.q, block), parts.tile(parts.k, tile), ((4,), (3,)))
    s, cap = s * np.float64(parts.scale), _cap(parts)
    s = s if cap is None else lax.tanh(s / cap) * cap
    return jnp.where(parts.seen(block, tile), s, _NONE)


def _cap(parts: Parts) -> np.float64 | None:
    cap = parts.call.softcap
    return None if cap is None else np.float64(np.float32(cap))


def _slope(parts: Parts, block: Array, tile: Array) -> Array | np.float64:
    """The softcap's factor of dS (A-22)."""
    cap = _cap(parts)
    if cap is None:
        return np.float64(1)
    s = jnp.where(parts.seen(block, tile), _scores(parts, block, tile), np.float64(0)) / cap
    return np.float64(1) - s * s


def _with_sinks(maximum: Array, total: Array, o, inputs: Inputs) -> tuple[Array, Array, Any]:
    """Maxima, sums and o of rows with their sinks (A-23)."""
    if inputs.sinks is None:
        return maximum, total, o
    sinks = _wide(inputs.sinks).reshape(1, *maximum.shape[1:3], 1)
    new = jnp.maximum(maximum, sinks)
    c = lax.exp(maximum - new)
    return new, total * c + lax.exp(sinks - new), None if o is None else o * c[..., None]


def _dot(a: Array, b: Array, axes: tuple) -> Array:
    return lax.dot_general(a, b, (axes, ((0, 1), (0, 1))), precision=lax.Precision.HIGHEST)


def _wide(x: Array) -> Array:
    return lax.convert_element_type(x, np.float64)


def _narrow(x: Array) -> Array:
    return lax.convert_element_type(x, np.float32)
