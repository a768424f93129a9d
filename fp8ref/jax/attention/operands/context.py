"""Attention of devices with parts of the tokens: context parallelism inside shard_map (A-21).

Device r of n along the axis ``tokens`` has tokens r T / n to below (r + 1) T / n of q, k and v.
Codes of k and v are gathered, a byte an element; then each device's queries meet all tiles in the
variant's order, as on one device.
"""

import jax.numpy as jnp
from jax import Array, lax

from fp8ref.jax.attention.operands.heads import Heads
from fp8ref.jax.attention.operands.inputs import DeviceCall, Inputs, visible_from
from fp8ref.spec import support
from fp8ref.spec.attention.variants import Mask


def check(call: DeviceCall, inputs: Inputs) -> None:
    """ValueError for what cannot be cut along the tokens."""
    kind = call.variant.granularity or "real numbers"
    fault = support.refusal("attention over cut tokens", "jax", call.variant, scales=kind)
    if fault is not None:
        raise ValueError(f"{call.name}: {fault}")
    if call.tokens not in call.over:
        raise ValueError(
            f"{call.name}: over includes the mesh axis of tokens; got tokens={call.tokens!r}, "
            f"over={call.over}. Add it."
        )
    if inputs.documents is not None or inputs.q.shape[2] != inputs.k.shape[2]:
        raise ValueError(
            f"{call.name}: context parallelism needs as many keys as queries and no documents; got "
            f"q {inputs.q.shape}, k {inputs.k.shape}."
        )


def gathered(tensors: dict[str, Heads], call: DeviceCall) -> dict[str, Heads]:
    """q, k, v with codes of k and v from all devices along an axis of tokens, if any."""
    if not call.tokens:
        return tensors

    def whole(x: Heads) -> Heads:
        narrow = x.codes.dtype.itemsize == 1
        codes = lax.bitcast_convert_type(x.codes, jnp.uint8) if narrow else x.codes
        codes = lax.all_gather(codes, call.tokens, axis=2, tiled=True)
        return x._replace(codes=lax.bitcast_convert_type(codes, x.codes.dtype) if narrow else codes)

    return tensors | {role: whole(tensors[role]) for role in ("k", "v")}


def problem(inputs: Inputs, tensors: dict[str, Heads], call: DeviceCall) -> Inputs:
    """The inputs with the shapes of all keys."""
    return inputs._replace(k=tensors["k"].codes, v=tensors["v"].codes) if call.tokens else inputs


def visible(queries: int, keys: int, padded: int, mask: Mask, axis: str) -> tuple[Array, Array]:
    """(low, high) int32 [padded]: a query sees keys from low to below high (A-3); padded: none."""
    place = jnp.arange(padded, dtype=jnp.int32)
    position = place + lax.axis_index(axis).astype(jnp.int32) * queries
    inside = place < queries
    low, high = visible_from(position, keys, mask)
    return jnp.where(inside, low, 0), jnp.where(inside, high, 0)


def own_keys(gradient: Array, call: DeviceCall) -> Array:
    """The gradient [B, Hkv, T, D] of this device's keys, summed over devices."""
    if not call.tokens:
        return gradient
    return lax.psum_scatter(gradient, call.tokens, scatter_dimension=2, tiled=True)
