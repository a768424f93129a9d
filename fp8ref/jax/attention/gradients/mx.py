"""The backward pass of attention whose operands have MX blocks (spec A-16).

A block lies along the axis that a product sums over, so that q, k, do and dS have two copies: along
the features or keys, and along the tokens. v has the forward pass's copy alone. Operands are
dequantized to bfloat16, exactly.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fp8ref.jax.attention import softmax
from fp8ref.jax.attention.exponentials import ascending_sum, times
from fp8ref.jax.attention.gradients import gradients as gradients
from fp8ref.jax.attention.gradients.gradients import Gradients
from fp8ref.jax.attention.operands import heads as head_scaling
from fp8ref.jax.attention.operands import operands as operands
from fp8ref.jax.attention.operands.heads import Heads
from fp8ref.jax.attention.operands.inputs import DeviceCall, Inputs
from fp8ref.jax.attention.operands.kept import Kept, gradient_matrices
from fp8ref.jax.attention.operands.operands import Parts
from fp8ref.jax.quantize import cast, scaling
from fp8ref.jax.quantize.scales import Scales
from fp8ref.jax.states import moments
from fp8ref.spec.attention.products import Role
from fp8ref.spec.attention.variant import MX

P_SCALE = np.float32(256)
"""What P is multiplied by before its cast."""


def backward(do: jax.Array, inputs: Inputs, result, call: DeviceCall) -> Gradients:
    """The gradients, of the steps of A-16, and if asked for their matrices.

    result    what ``attention.forward`` gave; of its tensors, v.
    """
    variant = call.variant
    fmt, heads = variant.score_gradient_fmt, inputs.k.shape[1]
    tensors = operands.quantize(inputs, call, {}) | {"v": result.tensors["v"]}
    parts = Parts(inputs, call, tensors)

    def copy(x: jax.Array, role: Role) -> jax.Array:
        return parts.operand(
            along_tokens(x, role, inputs, call),
            along_tokens=True,
            fmt=fmt if role == "do" else variant.fmt,
        )

    along_features = head_scaling.quantize(do, fmt, "mx_1x32", variant.policy, heads=heads)
    do_features = parts.by_group(parts.operand(along_features, fmt=fmt))
    do_tokens, q_tokens, k_tokens = (
        parts.by_group(copy(do, "do")),
        parts.by_group(copy(inputs.q, "q")),
        parts.by_tiles(copy(inputs.k, "k")),
    )
    do_values = head_scaling.to_hp(do, variant.out).astype(jnp.float32)
    products = times(do_values, result.o.astype(jnp.float32), call.arithmetic)
    row_sums = jnp.sum(products, axis=-1) if call.fast else ascending_sum(products)
    d = parts.by_group(row_sums)
    lse = parts.by_group(result.lse)
    kept = Kept(parts, gradient_matrices(variant) if call.keep_ds else [])

    def body(carry, block, tile):
        dq, dk, dv, largest, counts, matrices = carry
        seen = parts.seen(block, tile)
        (s, slope), block_lse = parts.scores_and_slope(block, tile), parts.block(lse, block)
        p = (
            softmax.again_fast(s, block_lse, seen, variant)
            if call.fast
            else softmax.again(s, block_lse, seen, None, call.arithmetic)
        )
        scaled = times(p, P_SCALE, call.arithmetic)
        with call.scope("grad_probabilities"):
            dp = parts.dot(parts.block(do_features, block), parts.tile(parts.v, tile), ((4,), (3,)))
        ds = times(dp - parts.block(d, block)[..., None], p, call.arithmetic)
        ds = ds if slope is None else times(ds, slope, call.arithmetic)
        ds = times(ds, jnp.float32(parts.scale), call.arithmetic)
        largest = jnp.maximum(largest, jnp.max(jnp.abs(ds)))
        ds_queries, ds_keys = blocks(ds, fmt, variant.policy, 3), blocks(ds, fmt, variant.policy, 4)
        cast_counts = (
            operands.clipped(scaled, variant.fmt),
            jnp.int32(0),
            operands.lost(ds, ds_keys, fmt),
        )
        counts = gradients.counted(counts, *cast_counts, parts, block, tile)
        p8 = operands.narrow(scaled, variant)
        matrices = kept.put(matrices, "p_codes", block, tile, operands.fp8(p8, variant))
        matrices = kept.put(matrices, "ds", block, tile, ds)
        score_operands = p8, ds_queries, ds_keys
        others = (
            parts.block(do_tokens, block),
            parts.block(q_tokens, block),
            parts.tile(k_tokens, tile),
        )
        return (
            *gradients.added((dq, dk, dv), parts, score_operands, others, block, tile),
            largest,
            counts,
            matrices,
        )

    carry = *gradients.sums(parts), parts.zeros(), gradients.no_counts(parts), kept.start
    dq, dk, dv, largest, counts, matrices = operands.loop(body, carry, parts.grid)
    one = jnp.ones((), jnp.float32)
    raw = dq, dk, moments.product(dv, np.float32(1) / P_SCALE)
    grads = gradients.rounded(raw, along_features, largest, counts, Scales(one, one), parts, {})
    return grads._replace(
        matrices=kept.whole(matrices),
        dsinks=gradients.sinks_gradient(row_sums, result, inputs, call),
    )


def along_tokens(x: jax.Array, role: Role, inputs: Inputs, call: DeviceCall) -> Heads:
    """q, k or do as a product over tokens takes it: with blocks along them."""
    variant = call.variant
    fmt = variant.score_gradient_fmt if role == "do" else variant.fmt
    return head_scaling.quantize(
        x, fmt, "mx_1x32", variant.policy, along_tokens=True, heads=inputs.k.shape[1]
    )


def blocks(ds: jax.Array, fmt, policy: str, axis: int) -> jax.Array:
    """dS quantized in blocks of 32 along an axis, and dequantized: bfloat16 of its shape,
    exactly.
    """
    split = ds.reshape(*ds.shape[:axis], ds.shape[axis] // MX, MX, *ds.shape[axis + 1 :])
    scale_policy = head_scaling.implemented(policy)
    block_scales = head_scaling.scales_from_amax(
        jnp.max(jnp.abs(split), axis=axis + 1, keepdims=True), fmt, scale_policy
    )
    block = tuple(None if i == axis + 1 else 1 for i in range(split.ndim))
    codes = jax.lax.optimization_barrier(
        scaling.quantize_blocks(split, block_scales, fmt, block, policy=scale_policy)
    )
    return (cast.decode(codes, fmt) * block_scales.scale_inv).astype(jnp.bfloat16).reshape(ds.shape)
