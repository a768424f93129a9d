"""Attention in FP8, backward (spec A-15): the gradients of q, k and v.

Probabilities are made again from the log-sum-exp, a block of queries and a tile of keys at a time.
The scale of dS is one for the tensor: unless it is given, a first loop over all pairs takes the
amax of dS, and a second one casts.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp8ref.formats import BFLOAT16
from fp8ref.jax.attention import counts as attention_counts
from fp8ref.jax.attention import sinks, softmax
from fp8ref.jax.attention.exponentials import ascending_sum, times
from fp8ref.jax.attention.operands import context, heads
from fp8ref.jax.attention.operands import operands as operands
from fp8ref.jax.attention.operands.heads import Heads
from fp8ref.jax.attention.operands.inputs import DeviceCall, Inputs
from fp8ref.jax.attention.operands.kept import Kept
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

    dq: Array
    dk: Array
    dv: Array
    tensors: dict[str, Heads]
    amaxes: dict[str, Array]
    saturated: Array
    scale_ds: Scales
    matrices: dict[str, Array] = {}  # noqa: RUF012
    dsinks: Array | None = None
    lost: Array | None = None
    saturated_ds: Array | None = None
    counts: Array | None = None


class ScoreGradients:
    """P and dS again, uncast, of queries and a tile of keys (A-15, steps 3, 5 and 6; A-16).

    do          a GEMM's operand [B, N, G, T, D].
    do_inverse  of its codes, to be multiplied into their products; None of numbers.
    d           D of the rows, and lse, the log-sum-exp: [B, H, Tq].
    """

    def __init__(
        self, parts: Parts, do: Array, do_inverse: Array | None, d: Array, lse: Array
    ) -> None:
        self.parts, self.do, self.do_inverse = parts, do, do_inverse
        self.d, self.lse = parts.by_group(d), parts.by_group(lse)
        if parts.call.fast and parts.variant.base == "2":
            self.lse = self.lse * np.float32(np.log2(np.e))
        self.factor = parts.raw_factor() if parts.variant.scores == "raw" else None

    def __call__(self, block: Array, tile: Array) -> tuple[Array, Array]:
        parts, call = self.parts, self.parts.call
        p, slope = self._probabilities(block, tile)
        do, v = parts.block(self.do, block), parts.tile(parts.v, tile)
        with call.scope("grad_probabilities"):
            dp = parts.dot(do, v, ((4,), (3,)))  # [rows, D] x [L, D] -> [rows, L]
        d, scale = parts.block(self.d, block)[..., None], jnp.float32(parts.scale)
        factors = [scale] if slope is None else [slope, scale]
        if call.fast:
            if self.do_inverse is not None:
                dp = dp * (self.do_inverse * parts.inverse["v"])
            ds = (dp - d) * p
            for factor in factors if parts.variant.granularity == "mx_1x32" else factors[::-1]:
                ds = ds * factor
            return p, ds
        if self.do_inverse is not None:
            dp = moments.product(moments.product(dp, self.do_inverse), parts.inverse["v"])
        ds = moments.product(dp - d, p)
        for factor in factors:
            ds = moments.product(ds, factor)
        return p, ds

    def _probabilities(self, block: Array, tile: Array) -> tuple[Array, Array | None]:
        """P, and the softcap's factor of dS."""
        parts, call = self.parts, self.parts.call
        seen = parts.seen(block, tile)
        (s, slope), lse = parts.scores_and_slope(block, tile), parts.block(self.lse, block)
        if call.fast:
            return softmax.again_fast(s, lse, seen, call.variant), slope
        return softmax.again(s, lse, seen, self.factor, call.arithmetic), slope


class Totals(NamedTuple):
    """What a loop over blocks and tiles carries: dq [B, N, G, Tq, D]; dk and dv [B, N, G, Tk, D],
    of each query head; the largest |dS|; counts clipped of P and of dS, lost, and if measured all
    that are seen; and the matrices of ``Kept``."""

    dq: Array
    dk: Array
    dv: Array
    largest: Array
    counts: Array
    matrices: dict[str, Array]


class CastPair(NamedTuple):
    """P and dS of a block and a tile [B, N, G, rows, keys]: the operands of dv, dk and dq; dS
    before its cast; and how many elements of P and of dS were clipped, and of dS lost."""

    p: Array
    ds_queries: Array
    ds_keys: Array
    ds: Array
    counts: tuple[Array, Array, Array]


def backward(do: Array, inputs: Inputs, result, given_scales: dict, call: DeviceCall) -> Gradients:
    """The gradients, of the steps of A-15, and if asked for their matrices.

    result    what ``attention.forward`` gave.
    """
    variant, low = call.variant, call.variant.fmt.bits == 8
    fmt = variant.format_of("ds")
    kind, policy, count = variant.granularity, variant.policy, inputs.k.shape[1]
    scale = given_scales.get("do")
    do8 = heads.quantize(do, fmt, kind, policy, heads=count, scale=scale, over=call.over)
    tensors = context.gathered(result.tensors, call)
    inputs = context.problem(inputs, tensors, call)
    parts = Parts(inputs, call, tensors)
    p_scale, p_scale_inv = result.scale_p, result.scale_inv_p
    if "s" in given_scales:
        p_scale, p_scale_inv = operands.probability_scale(variant, given_scales)
    values_do = parts.by_group(do8.codes)
    do_inverse = parts.head_scales(do8.scale_inv) if low else None
    row_sums = _row_sums(do8, result, call)
    score_gradients = ScoreGradients(parts, values_do, do_inverse, row_sums, result.lse)
    scale_ds = _scale_of_ds(score_gradients, given_scales)
    kept = Kept(parts, variant.gradient_matrices if call.keep_ds else ())

    def body(totals, block, tile):
        p, ds = score_gradients(block, tile)
        scaled_p = times(p, p_scale, call.arithmetic) if low else p
        scaled_ds = times(ds, scale_ds[0], call.arithmetic) if low else ds
        p8, ds8 = operands.narrow(scaled_p, variant), operands.narrow(scaled_ds, variant, fmt)
        clipped = operands.clipped(scaled_p, variant.fmt), operands.clipped(scaled_ds, fmt)
        pair = CastPair(p8, ds8, ds8, ds, (*clipped, operands.lost(ds, ds8, fmt)))
        matrices = totals.matrices
        for name, x in (("p_codes", p8), ("ds", ds), ("ds_codes", ds8)):
            matrices = kept.put(matrices, name, block, tile, x)
        rows = parts.block(values_do, block), parts.block(parts.q, block)
        others = (*rows, parts.tile(parts.k, tile))
        return added(totals._replace(matrices=matrices), parts, pair, others, block, tile)

    totals = operands.loop(body, start(parts, kept), parts.grid)
    if low:
        dq = moments.product(moments.product(totals.dq, scale_ds[1]), parts.inverse["k"])
        dk = moments.product(moments.product(totals.dk, scale_ds[1]), parts.inverse["q"])
        dv = moments.product(moments.product(totals.dv, p_scale_inv), do_inverse)
        totals = totals._replace(dq=dq, dk=dk, dv=dv)
    grads = rounded(totals, do8, scale_ds, parts, given_scales)
    return grads._replace(
        matrices=kept.whole(totals.matrices), dsinks=sinks_gradient(row_sums, result, inputs, call)
    )


def backward_in_bf16(do: Array, inputs: Inputs, result, call: DeviceCall) -> Gradients:
    """The gradients of an FP8 forward pass in bfloat16 (spec A-25): ``backward`` of the variant
    ``bf16``, of q, k and v themselves, with o and the log-sum-exp of the FP8 pass.

    result    what ``attention.forward`` gave; of it o and the log-sum-exp.
    """
    wide = dataclasses.replace(call.in_bf16(), simulated=None, measures=False)
    one, o = jnp.ones((), jnp.float32), heads.to_hp(result.o, BFLOAT16)
    tensors = operands.quantize(inputs, wide, {})
    kept = result._replace(tensors=tensors, o=o, scale_p=one, scale_inv_p=one)
    return backward(do, inputs, kept, {}, wide)


def _scale_of_ds(score_gradients: ScoreGradients, given_scales: dict) -> Scales:
    """The scales of dS: passed, or from the amax over all pairs; 1 in high precision."""
    parts, variant = score_gradients.parts, score_gradients.parts.variant
    if "ds" in given_scales:
        return scales.with_inverse(heads.given_scale(given_scales["ds"], ()))
    if variant.fmt.bits != 8:
        return Scales(jnp.ones((), jnp.float32), jnp.ones((), jnp.float32))

    def body(largest, block, tile):
        return jnp.maximum(largest, jnp.max(jnp.abs(score_gradients(block, tile)[1])))

    largest = parts.over_devices(operands.loop(body, parts.zeros(), parts.grid))
    policy = heads.implemented(variant.policy)
    return heads.scales_from_amax(largest, variant.format_of("ds"), policy)


def sinks_gradient(d: Array, result, inputs: Inputs, call: DeviceCall) -> Array | None:
    """The gradient of sinks, of D of rows [B, H, Tq]; None without any."""
    return None if inputs.sinks is None else sinks.gradient(d, result.lse, inputs.sinks, call)


def start(parts: Parts, kept: Kept) -> Totals:
    """What the loop begins with."""
    (b, n, g, _, d), keys = parts.q.shape, parts.k.shape[2]
    dk, dv = parts.zeros(b, n, g, keys, d), parts.zeros(b, n, g, keys, d)
    counts = parts.zeros(4 if parts.call.measures else 3, 2, dtype=jnp.int32)
    return Totals(parts.zeros(*parts.q.shape), dk, dv, parts.zeros(), counts, kept.start)


def added(
    totals: Totals,
    parts: Parts,
    pair: CastPair,
    others: tuple[Array, Array, Array],
    block: Array,
    tile: Array,
) -> Totals:
    """The totals with a block and a tile added.

    others     do and q [B, N, G, rows, D], k [B, N, keys, D].
    """
    do, q, k = others
    with parts.call.scope("grad_v"):
        dv = parts.dot(pair.p, do, ((3,), (3,)), 3)  # [rows, L] x [rows, D] -> [L, D]
    with parts.call.scope("grad_k"):
        dk = parts.dot(pair.ds_queries, q, ((3,), (3,)), 3)  # [rows, L] x [rows, D] -> [L, D]
    with parts.call.scope("grad_q"):
        dq = parts.dot(pair.ds_keys, k, ((4,), (2,)))  # [rows, L] x [L, D] -> [rows, D]
    dq = parts.put_block(totals.dq, parts.block(totals.dq, block) + dq, block)
    dk, dv = (
        parts.put_tile(total, parts.tile(total, tile, 3) + part, tile)
        for total, part in ((totals.dk, dk), (totals.dv, dv))
    )
    seen = [parts.pairs(parts.seen(block, tile))] if parts.call.measures else []
    counts = attention_counts.add(totals.counts, [*pair.counts, *seen])
    largest = jnp.maximum(totals.largest, jnp.max(jnp.abs(pair.ds)))
    return Totals(dq, dk, dv, largest, counts, totals.matrices)


def rounded(
    totals: Totals, do: Heads, scale_ds: Scales, parts: Parts, given_scales: dict
) -> Gradients:
    """Gradients in the output's format, by key head, with amaxes (A-15, steps 9, 10)."""
    call, variant, tk = parts.call, parts.variant, parts.shape_k[2]
    raw = {"dq": parts.ungrouped(totals.dq)} | {
        role: context.own_keys(_over_heads(x)[:, :, :tk], call)
        for role, x in (("dk", totals.dk), ("dv", totals.dv))
    }
    quantize = functools.partial(heads.quantize, heads=parts.shape_k[1], over=call.over)
    coded = {
        role: quantize(x, variant.out, *variant.output_scaling, scale=given_scales.get(role))
        for role, x in raw.items()
    }
    dq, dk, dv = (
        moments.product(heads.values(coded[role], variant.out), coded[role].scale_inv)
        for role in ("dq", "dk", "dv")
    )
    largest = parts.over_devices(totals.largest)
    numbers = attention_counts.numbers(totals.counts)
    p_clipped, ds_clipped, lost, *_ = lax.psum(numbers, call.over) if call.over else numbers
    return Gradients(
        dq,
        dk,
        dv,
        tensors={"do": do} | (coded if variant.out.bits == 8 else {}),
        amaxes={"do": do.amax, "ds": largest} | {role: x.amax for role, x in coded.items()},
        saturated=p_clipped + ds_clipped,
        scale_ds=scale_ds,
        lost=lost,
        saturated_ds=ds_clipped,
        counts=totals.counts if call.measures else None,
    )


def _over_heads(x: Array) -> Array:
    """Sum over the query heads of a key head, ascending: [B, N, G, Tk, D] -> [B, N, Tk, D]."""
    total = x[:, :, 0]
    for head in range(1, x.shape[2]):
        total = total + x[:, :, head]
    return total


def _row_sums(do: Heads, result, call: DeviceCall) -> Array:
    """D of A-15 from the values of do and o, by feature, times both scales; [B, H, Tq]."""
    variant = call.variant
    fmt = variant.format_of("ds")
    values = heads.values(do, fmt)
    if variant.out.bits != 8:
        o, o_inv = result.o.astype(jnp.float32), jnp.float32(1)
    else:
        o, o_inv = heads.values(result.tensors["o"], variant.out), result.tensors["o"].scale_inv
    do_inv = heads.spread(do.scale_inv, values.shape, variant.granularity)
    products = times(values, o, call.arithmetic)
    totals = jnp.sum(products, axis=-1) if call.fast else ascending_sum(products)
    do_inv = do_inv if do_inv.ndim == 0 else do_inv[..., 0]
    return moments.product(moments.product(totals, do_inv), o_inv)
