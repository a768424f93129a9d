"""Attention in FP8, backward (spec A-15): the gradients of q, k and v.

Probabilities are made again from the log-sum-exp, a block of queries and a tile of keys at a time.
The scale of dS is one for the tensor: unless it is given, a first loop over all pairs takes the
amax of dS, and a second one casts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8ref.jax.attention import counts as attention_counts
from fp8ref.jax.attention import sinks, softmax
from fp8ref.jax.attention.exponentials import ascending_sum, times
from fp8ref.jax.attention.operands import context, heads
from fp8ref.jax.attention.operands import operands as operands
from fp8ref.jax.attention.operands.heads import Heads
from fp8ref.jax.attention.operands.inputs import DeviceCall, Inputs
from fp8ref.jax.attention.operands.kept import Kept, gradient_matrices
from fp8ref.jax.attention.operands.operands import Parts
from fp8ref.jax.quantize import scales
from fp8ref.jax.quantize.scales import Scales
from fp8ref.jax.states import moments


class Gradients(NamedTuple):
    """What a backward pass gives.

    dq, dk, dv   float32 of the shapes of q, k, v: values of the output's format, times their
                 scale_inv in FP8.
    tensors      the quantized do and, where they are in FP8, dq, dk and dv, by role.
    amaxes       of do by its groups; of ds, dq, dk and dv, unrounded.
    saturated    int32: elements of P and dS that their casts clipped; saturated_ds: those of dS,
                 none under MX.
    lost         int32: elements of dS of at least 2^-126 that the cast made 0; under MX that along
                 the keys.
    scale_ds     what dS was multiplied by: scale and scale_inv; 1 where it has none, or blocks.
    matrices     codes of P, dS and its codes [B, H, Tq, Tk], by ``Matrix``; {} unless asked for.
    dsinks       float32 [H]: the gradient of sinks, of this device's rows; None without any.
    counts       int32 [4, 2]: clipped of P and of dS, lost, and all that are seen, of this device,
                 as ``counts``; None unless ``DeviceCall.measures``.
    """

    dq: jax.Array
    dk: jax.Array
    dv: jax.Array
    tensors: dict[str, Heads]
    amaxes: dict[str, jax.Array]
    saturated: jax.Array
    scale_ds: Scales
    matrices: dict[str, jax.Array] = {}  # noqa: RUF012
    dsinks: jax.Array | None = None
    lost: jax.Array | None = None
    saturated_ds: jax.Array | None = None
    counts: jax.Array | None = None


def backward(
    do: jax.Array, inputs: Inputs, result, given_scales: dict, call: DeviceCall
) -> Gradients:
    """The gradients, of the steps of A-15, and if asked for their matrices.

    result    what ``attention.forward`` gave.
    """
    variant, low = call.variant, call.variant.fmt.bits == 8
    fmt = variant.score_gradient_fmt
    options: dict = {"heads": inputs.k.shape[1], "scale": given_scales.get("do"), "over": call.over}
    do8 = heads.quantize(do, fmt, variant.granularity, variant.policy, **options)
    tensors = context.gathered(result.tensors, call)
    inputs = context.problem(inputs, tensors, call)
    parts = Parts(inputs, call, tensors)
    p_scale, p_scale_inv = (result.scale_p, result.scale_inv_p)
    if "s" in given_scales:
        p_scale, p_scale_inv = operands.probability_scale(variant, given_scales)
    factor = parts.raw_factor() if variant.scores == "raw" else None
    values_do, lse = parts.by_group(do8.codes), parts.by_group(result.lse)
    lse = lse * np.float32(np.log2(np.e)) if call.fast and variant.base == "2" else lse
    do_inverse = parts.head_scales(do8.scale_inv) if low else jnp.float32(1)
    row_sums = _row_sums(do8, result, inputs, call)
    d = parts.by_group(row_sums)
    dp_inverse = do_inverse * parts.inverse["v"] if low else do_inverse

    def pair(block, tile):
        """P and dS of a block and a tile (steps 3, 5 and 6)."""
        seen = parts.seen(block, tile)
        (s, slope), block_lse = parts.scores_and_slope(block, tile), parts.block(lse, block)
        p = (
            softmax.again_fast(s, block_lse, seen, variant)
            if call.fast
            else softmax.again(s, block_lse, seen, factor, call.arithmetic)
        )
        with parts.call.scope("grad_probabilities"):
            # [rows, D] x [L, D]
            dp = parts.dot(parts.block(values_do, block), parts.tile(parts.v, tile), ((4,), (3,)))
        if call.fast:
            ds = (dp * dp_inverse - parts.block(d, block)[..., None]) * p * jnp.float32(parts.scale)
            return p, ds if slope is None else ds * slope
        if low:
            dp = moments.product(moments.product(dp, do_inverse), parts.inverse["v"])
        ds = moments.product(dp - parts.block(d, block)[..., None], p)
        ds = ds if slope is None else moments.product(ds, slope)
        return p, moments.product(ds, jnp.float32(parts.scale))

    def first(largest, block, tile):
        return jnp.maximum(largest, jnp.max(jnp.abs(pair(block, tile)[1])))

    def share(largest):
        return lax.pmax(largest, call.over) if call.over else largest

    one = jnp.ones((), jnp.float32)
    scale_ds = Scales(one, one)
    if "ds" in given_scales:
        scale_ds = scales.with_inverse(heads.given_scale(given_scales["ds"], ()))
    elif low:
        largest = share(operands.loop(first, parts.zeros(), parts.grid))
        scale_ds = heads.scales_from_amax(largest, fmt, heads.implemented(variant.policy))

    kept = Kept(parts, gradient_matrices(variant) if call.keep_ds else [])

    def second(carry, block, tile):
        dq, dk, dv, largest, counts, matrices = carry
        p, ds = pair(block, tile)
        scaled_p = times(p, p_scale, call.arithmetic) if low else p
        scaled_ds = times(ds, scale_ds[0], call.arithmetic) if low else ds
        largest = jnp.maximum(largest, jnp.max(jnp.abs(ds)))
        p8, ds8 = operands.narrow(scaled_p, variant), operands.narrow(scaled_ds, variant, fmt)
        clipped = operands.clipped(scaled_p, variant.fmt), operands.clipped(scaled_ds, fmt)
        counts = counted(counts, *clipped, operands.lost(ds, ds8, fmt), parts, block, tile)
        for name, x in (("p_codes", p8), ("ds", ds), ("ds_codes", ds8)):
            matrices = kept.put(matrices, name, block, tile, x)
        rows = parts.block(values_do, block), parts.block(parts.q, block)
        dq, dk, dv = added(
            (dq, dk, dv), parts, (p8, ds8, ds8), (*rows, parts.tile(parts.k, tile)), block, tile
        )
        return dq, dk, dv, largest, counts, matrices

    start = *sums(parts), parts.zeros(), no_counts(parts), kept.start
    dq, dk, dv, largest, counts, matrices = operands.loop(second, start, parts.grid)
    if low:
        dq = moments.product(moments.product(dq, scale_ds[1]), parts.inverse["k"])
        dk = moments.product(moments.product(dk, scale_ds[1]), parts.inverse["q"])
        dv = moments.product(moments.product(dv, p_scale_inv), do_inverse)
    grads = rounded((dq, dk, dv), do8, share(largest), counts, scale_ds, parts, given_scales)
    return grads._replace(
        matrices=kept.whole(matrices), dsinks=sinks_gradient(row_sums, result, inputs, call)
    )


def sinks_gradient(d: jax.Array, result, inputs: Inputs, call: DeviceCall) -> jax.Array | None:
    """The gradient of sinks, of D of rows [B, H, Tq]; None without any."""
    return None if inputs.sinks is None else sinks.gradient(d, result.lse, inputs.sinks, call)


def no_counts(parts: Parts) -> jax.Array:
    """What ``counted`` begins with."""
    return parts.zeros(4 if parts.call.measures else 3, 2, dtype=jnp.int32)


def counted(
    counts: jax.Array,
    p_clipped: jax.Array,
    ds_clipped: jax.Array,
    lost: jax.Array,
    parts: Parts,
    block: jax.Array,
    tile: jax.Array,
) -> jax.Array:
    """Counts with those of a block and a tile added: clipped of P and of dS, lost, and if measured
    all that are seen.
    """
    pairs = [parts.pairs(parts.seen(block, tile))] if parts.call.measures else []
    return attention_counts.add(counts, [p_clipped, ds_clipped, lost, *pairs])


def sums(parts: Parts) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Zeros to which ``added`` adds: dq [B, N, G, Tq, D]; dk and dv [B, N, G, Tk, D], of each query
    head.
    """
    (b, n, g, _, d), keys = parts.q.shape, parts.k.shape[2]
    return parts.zeros(*parts.q.shape), parts.zeros(b, n, g, keys, d), parts.zeros(b, n, g, keys, d)


def added(
    totals: tuple[jax.Array, jax.Array, jax.Array],
    parts: Parts,
    score_operands: tuple[jax.Array, jax.Array, jax.Array],
    others: tuple[jax.Array, jax.Array, jax.Array],
    block: jax.Array,
    tile: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk and dv with the products of a block and a tile added.

    score_operands  operands [B, N, G, rows, keys]: P for dv, dS for dk, dS for dq.
    others     do and q [B, N, G, rows, D], k [B, N, keys, D].
    """
    (dq, dk, dv), (p, ds_rows, ds_keys), (do, q, k) = totals, score_operands, others
    with parts.call.scope("grad_v"):
        dv_part = parts.dot(p, do, ((3,), (3,)), 3)  # [rows, L] x [rows, D] -> [L, D]
    with parts.call.scope("grad_k"):
        dk_part = parts.dot(ds_rows, q, ((3,), (3,)), 3)  # [rows, L] x [rows, D] -> [L, D]
    with parts.call.scope("grad_q"):
        dq_part = parts.dot(ds_keys, k, ((4,), (2,)))  # [rows, L] x [L, D] -> [rows, D]
    dq = parts.put_block(dq, parts.block(dq, block) + dq_part, block)
    dk, dv = (
        parts.put_tile(total, parts.tile(total, tile, 3) + part, tile)
        for total, part in ((dk, dk_part), (dv, dv_part))
    )
    return dq, dk, dv


def rounded(
    raw: tuple, do: Heads, largest, counts, scale_ds: Scales, parts: Parts, given_scales: dict
) -> Gradients:
    """The gradients in the output's format, summed over the query heads of a head of keys, with
    their amaxes (A-15, steps 9 and 10)."""
    call, variant = parts.call, parts.variant
    dq, dk, dv = raw
    tk = parts.shape_k[2]
    raw_sums = {"dq": parts.ungrouped(dq)} | {
        name: context.own_keys(_over_heads(x)[:, :, :tk], call)
        for name, x in (("dk", dk), ("dv", dv))
    }
    amaxes, values, coded = {"do": do.amax, "ds": largest}, {}, {"do": do}
    for role, x in raw_sums.items():
        options: dict = {
            "heads": parts.shape_k[1],
            "scale": given_scales.get(role),
            "over": call.over,
        }
        quantized = heads.quantize(x, variant.out, *variant.output_scaling, **options)
        amaxes[role] = quantized.amax
        values[role] = moments.product(heads.values(quantized, variant.out), quantized.scale_inv)
        if variant.out.bits == 8:
            coded[role] = quantized
    totals = attention_counts.numbers(counts)
    p_clipped, ds_clipped, lost, *_ = lax.psum(totals, call.over) if call.over else totals
    count_fields: dict = {
        "saturated": p_clipped + ds_clipped,
        "saturated_ds": ds_clipped,
        "lost": lost,
        "counts": counts if call.measures else None,
    }
    return Gradients(**values, tensors=coded, amaxes=amaxes, scale_ds=scale_ds, **count_fields)


def _over_heads(x: jax.Array) -> jax.Array:
    """The sum over query heads of a head of keys, ascending: [B, N, G, Tk, D] -> [B, N, Tk, D]."""
    total = x[:, :, 0]
    for head in range(1, x.shape[2]):
        total = total + x[:, :, head]
    return total


def _row_sums(do: Heads, result, inputs: Inputs, call: DeviceCall) -> jax.Array:
    """D of A-15: of the values of do and o, a feature at a time, times both scales, [B, H, Tq]."""
    variant = call.variant
    fmt = variant.score_gradient_fmt
    values = heads.values(do, fmt)
    if variant.out.bits != 8:
        o, o_inv = result.o.astype(jnp.float32), jnp.float32(1)
    else:
        o, o_inv = heads.values(result.tensors["o"], variant.out), result.tensors["o"].scale_inv
    do_inv = heads.spread(do.scale_inv, values.shape, variant.granularity)
    products = times(values, o, call.arithmetic)
    totals = jnp.sum(products, axis=-1) if call.fast else ascending_sum(products)
    return moments.product(
        moments.product(totals, do_inv if do_inv.ndim == 0 else do_inv[..., 0]), o_inv
    )
