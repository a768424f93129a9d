"""The backward pass of attention whose operands have MX blocks (spec A-16).

A block lies along the axis that a product sums over, so that q, k, do and dS have two copies: along
the features or keys, and along the tokens. v has the forward pass's copy alone. Operands are
dequantized to bfloat16, exactly.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fp8ref.jax.attention.exponentials import ascending_sum, times
from fp8ref.jax.attention.gradients import gradients as gradients
from fp8ref.jax.attention.gradients.gradients import CastPair, Gradients, ScoreGradients
from fp8ref.jax.attention.operands import heads as head_scaling
from fp8ref.jax.attention.operands import operands as operands
from fp8ref.jax.attention.operands.heads import Heads
from fp8ref.jax.attention.operands.inputs import DeviceCall, Inputs
from fp8ref.jax.attention.operands.kept import Kept
from fp8ref.jax.attention.operands.operands import Parts
from fp8ref.jax.quantize import cast, scaling
from fp8ref.jax.quantize.scales import Scales
from fp8ref.jax.states import moments
from fp8ref.spec.attention.products import Role
from fp8ref.spec.attention.variant import MX

P_SCALE = np.float32(256)
"""What P is multiplied by before its cast."""


def backward(do: Array, inputs: Inputs, result, call: DeviceCall) -> Gradients:
    """The gradients, of the steps of A-16, and if asked for their matrices.

    result    what ``attention.forward`` gave; of its tensors, v.
    """
    variant = call.variant
    fmt, heads = variant.format_of("ds"), inputs.k.shape[1]
    tensors = operands.quantize(inputs, call, {}) | {"v": result.tensors["v"]}
    parts = Parts(inputs, call, tensors)

    def copy(x: Array, role: Role) -> Array:
        tensor = along_tokens(x, role, inputs, call)
        return parts.operand(tensor, along_tokens=True, fmt=variant.format_of(role))

    along_features = head_scaling.quantize(do, fmt, "mx_1x32", variant.policy, heads=heads)
    do_tokens, q_tokens = parts.by_group(copy(do, "do")), parts.by_group(copy(inputs.q, "q"))
    k_tokens = parts.by_tiles(copy(inputs.k, "k"))
    row_sums = _row_sums(do, result, call)
    do_features = parts.by_group(parts.operand(along_features, fmt=fmt))
    score_gradients = ScoreGradients(parts, do_features, None, row_sums, result.lse)
    kept = Kept(parts, variant.gradient_matrices if call.keep_ds else ())

    def body(totals, block, tile):
        p, ds = score_gradients(block, tile)
        scaled = times(p, P_SCALE, call.arithmetic)
        p8 = operands.narrow(scaled, variant)
        ds_queries, ds_keys = blocks(ds, fmt, variant.policy, 3), blocks(ds, fmt, variant.policy, 4)
        clipped, lost = operands.clipped(scaled, variant.fmt), operands.lost(ds, ds_keys, fmt)
        pair = CastPair(p8, ds_queries, ds_keys, ds, (clipped, jnp.int32(0), lost))
        codes = operands.fp8(p8, variant)
        matrices = kept.put(totals.matrices, "p_codes", block, tile, codes)
        matrices = kept.put(matrices, "ds", block, tile, ds)
        rows = parts.block(do_tokens, block), parts.block(q_tokens, block)
        others = (*rows, parts.tile(k_tokens, tile))
        return gradients.added(totals._replace(matrices=matrices), parts, pair, others, block, tile)

    totals = operands.loop(body, gradients.start(parts, kept), parts.grid)
    totals = totals._replace(dv=moments.product(totals.dv, np.float32(1) / P_SCALE))
    one = jnp.ones((), jnp.float32)
    grads = gradients.rounded(totals, along_features, Scales(one, one), parts, {})
    return grads._replace(
        matrices=kept.whole(totals.matrices),
        dsinks=gradients.sinks_gradient(row_sums, result, inputs, call),
    )


def _row_sums(do: Array, result, call: DeviceCall) -> Array:
    """D of A-16 from o and do in the output's format; [B, H, Tq]."""
    do_values = head_scaling.to_hp(do, call.variant.out).astype(jnp.float32)
    products = times(do_values, result.o.astype(jnp.float32), call.arithmetic)
    return jnp.sum(products, axis=-1) if call.fast else ascending_sum(products)


def along_tokens(x: Array, role: Role, inputs: Inputs, call: DeviceCall) -> Heads:
    """q, k or do as a product over tokens takes it: with blocks along them."""
    variant = call.variant
    fmt, policy, heads = variant.format_of(role), variant.policy, inputs.k.shape[1]
    return head_scaling.quantize(x, fmt, "mx_1x32", policy, along_tokens=True, heads=heads)


def blocks(ds: Array, fmt, policy: str, axis: int) -> Array:
    """dS, quantized in blocks of 32 along an axis and dequantized: exact bfloat16."""
    split = ds.reshape(*ds.shape[:axis], ds.shape[axis] // MX, MX, *ds.shape[axis + 1 :])
    scale_policy = head_scaling.implemented(policy)
    amaxes = jnp.max(jnp.abs(split), axis=axis + 1, keepdims=True)
    block_scales = head_scaling.scales_from_amax(amaxes, fmt, scale_policy)
    block = tuple(None if i == axis + 1 else 1 for i in range(split.ndim))
    codes = scaling.quantize_blocks(split, block_scales, fmt, block, policy=scale_policy)
    codes = jax.lax.optimization_barrier(codes)
    return (cast.decode(codes, fmt) * block_scales.scale_inv).astype(jnp.bfloat16).reshape(ds.shape)
