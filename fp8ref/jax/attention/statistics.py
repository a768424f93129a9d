"""Quantization statistics of attention's operands, measured on the device (spec Q-13).

A measurement is that of ``stats``: its groups are those of the scales of attention.
"""

import jax.numpy as jnp
from jax import Array

from fp8ref.jax.attention import counts
from fp8ref.jax.attention.gradients import mx as gradients_mx
from fp8ref.jax.attention.operands import heads
from fp8ref.jax.attention.operands import operands as operands
from fp8ref.jax.attention.operands.heads import Heads
from fp8ref.jax.attention.operands.inputs import DeviceCall, Inputs
from fp8ref.jax.quantize import stats
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.spec.attention.products import (
    RECORDED,
    Product,
    Role,
    along_tokens,
    first_use,
    first_uses,
)
from fp8ref.spec.attention.variant import MX
from fp8ref.spec.attention.variants import Variant

Measured = dict[tuple[Product, Role], Array]
"""(product, role) -> measurement float32 [stats.LENGTH]."""


def measure_forward(inputs: Inputs, result, call: DeviceCall) -> Measured:
    """Measurements of q, k and v, after a rotation if the variant has one; and the counts of P.

    result    what the forward pass gave, with counts.
    """
    values: dict[Role, Array] = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    if call.variant.rotated:
        values |= {role: operands.rotated(values[role], call) for role in ("q", "k")}
    measured: Measured = {}
    for product, role in first_uses(call.variant):
        if product in ("scores", "values"):
            measured |= measure(values[role], result.tensors[role], product, role, call.variant)
    saturated, lost, count = result.counts
    measured["values", "p"] = counts.measurement(result.amaxes["s"], count, saturated, lost)
    return measured


def measure_backward(do: Array, inputs: Inputs, gradients, call: DeviceCall) -> Measured:
    """Measurements of what the backward pass quantizes: do; under MX also q, k and do with blocks
    along the tokens. And the counts of dS.

    gradients  what the backward pass gave, with counts; its quantized do under MX along its
               features.
    """
    variant, values = call.variant, {"q": inputs.q, "k": inputs.k, "do": do}
    measured: Measured = {}
    for product, role in first_uses(variant):
        if product in ("scores", "values"):
            continue
        x, tensor = values[role], gradients.tensors["do"]
        if variant.granularity == "mx_1x32" and along_tokens(product, role):
            tensor = gradients_mx.along_tokens(x, role, inputs, call)
        measured |= measure(x, tensor, product, role, variant)
    _, saturated, lost, count = gradients.counts
    measured["grad_q", "ds"] = counts.measurement(gradients.amaxes["ds"], count, saturated, lost)
    return measured


def measure(x: Array, tensor: Heads, product: Product, role: Role, variant: Variant) -> Measured:
    """The measurement of x [B, H, T, D] and its quantized form, in a row of its own.

    product, role  its first use with these codes (``first_use``).
    Order:    as ``stats.measure``; scales of heads and of 128 tokens as those of their rows.
    """
    assert first_use(product, role, variant) == (product, role)
    codes, scale, inverse = tensor.codes, tensor.scale, tensor.scale_inv
    kind, axis, shape = variant.granularity, -1, x.shape
    count = jnp.array([x.size >> 16, x.size & 0xFFFF], jnp.float32)
    if kind == "mx_1x32":
        axis = 2 if along_tokens(product, role) else 3
        widths = [(0, -x.shape[i] % MX if i == axis else 0) for i in range(4)]
        # Zeros fill the last block up. They count only among all elements, which is put right.
        codes = jnp.pad(codes.view(jnp.uint8), widths).view(codes.dtype)
        x = jnp.pad(x, widths)
    else:
        scale, inverse = (heads.spread(s, shape, kind) for s in (scale, inverse))
        if kind != "tensor":
            scale, inverse = (jnp.broadcast_to(s, (*shape[:3], 1)) for s in (scale, inverse))
    fmt = variant.format_of(role)
    granularity = {"tensor": "tensorwise", "mx_1x32": "mx_1x32"}.get(kind or "", "rowwise")
    q = Quantized(
        codes=codes, scale=scale, scale_inv=inverse, fmt=fmt, granularity=granularity, axis=axis
    )
    return {(product, role): stats.measure(x, q).at[:2].set(count)}


def rows(measured: Measured) -> Array:
    """float32 [len(RECORDED), stats.LENGTH] in the order of RECORDED, or zeros."""
    return jnp.stack([measured.get(row, jnp.zeros(stats.LENGTH, jnp.float32)) for row in RECORDED])
