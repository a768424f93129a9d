"""The forward pass of attention in FP8, over all blocks of queries and tiles of keys (spec A-4 to
A-11).

``operands`` cuts into blocks and tiles, ``softmax`` makes probabilities, ``probability_value`` adds
their products with v.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fp8ref.jax.attention import counts as attention_counts
from fp8ref.jax.attention import exponentials, probability_value, sinks, softmax
from fp8ref.jax.attention import real as real
from fp8ref.jax.attention.gradients import gradients as gradients
from fp8ref.jax.attention.operands import context, heads
from fp8ref.jax.attention.operands import operands as operands
from fp8ref.jax.attention.operands.heads import Heads
from fp8ref.jax.attention.operands.inputs import DeviceCall, Inputs
from fp8ref.jax.attention.operands.kept import Kept
from fp8ref.jax.attention.operands.operands import Parts
from fp8ref.jax.states import moments
from fp8ref.jax.transforms.eager import as_one_program
from fp8ref.spec.attention import variants as data
from fp8ref.spec.attention.variants import Variant


class Result(NamedTuple):
    """What a forward pass gives.

    o              float32 [B, H, Tq, D]: values of the output's format, times its scale_inv in FP8.
    lse            float32 [B, H, Tq]: ln of the sum of e^score; -infinity of a row without keys or
                   sink.
    tensors        the quantized q, k and v, and an FP8 output o, by role.
    amaxes         of q, k, v by their groups; of s, the unrounded probabilities; of o, unrounded.
    saturated      int32: probabilities that the cast clipped, a fault of the variant (A-8).
    lost           int32: probabilities of at least 2^-126 that the cast made 0.
    counts         int32 [3, 2]: those two and all that are seen, of this device, as ``counts``;
                   None unless ``DeviceCall.measures``.
    p_codes        uint8 [B, H, Tq, Tk]: the probabilities as they were cast, each under the maximum
                   of its own tile; None unless asked for.
    scale_p        what probabilities were multiplied by before their cast.
    scale_inv_p    what their codes are multiplied by.
    scores         float32 [B, H, Tq, Tk]: with all factors, under the variant's base, -infinity of
                   a key that is not seen; None unless asked for.
    documents      of queries and of keys, and ``sinks``: what the backward pass needs of them.
    """

    o: jax.Array
    lse: jax.Array
    tensors: dict[str, Heads]
    amaxes: dict[str, jax.Array]
    saturated: jax.Array
    p_codes: jax.Array | None
    scale_p: jax.Array
    scale_inv_p: jax.Array
    scores: jax.Array | None = None
    lost: jax.Array | None = None
    counts: jax.Array | None = None
    documents: tuple[jax.Array, jax.Array] | None = None
    sinks: jax.Array | None = None


@as_one_program("call", "observe", unnamed={"call": DeviceCall.unnamed})
def run(inputs: Inputs, scales: dict, call: DeviceCall, *, observe: bool = False) -> Result:
    """One pass over all blocks and tiles.

    observe   also count clipped and lost probabilities, and take amaxes of what has no scale by
              them.
    """
    if call.variant.real:
        o, lse = real.forward(inputs, call)
        amaxes = {
            role: heads.amax(x, None, heads=1)
            for role, x in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v), ("o", o))
        }
        one = jnp.ones((), jnp.float32)
        return Result(o, lse, {}, amaxes | {"s": one}, jnp.int32(0), None, one, one)
    variant = call.variant
    tensors = operands.quantize(inputs, call, scales)
    p_scale, p_scale_inv = operands.probability_scale(variant, scales)
    whole = context.gathered(tensors, call)
    parts = Parts(context.problem(inputs, whole, call), call, whole)
    factor = parts.raw_factor() if variant.scores == "raw" else None
    order: data.SumOrder = "tile" if call.fast else variant.sum_order
    grid, (b, n, g, t, d) = parts.grid, parts.q.shape
    rows = softmax.start(parts.zeros(b, n, g, t), order)
    largest, counts = parts.zeros(), parts.zeros(3 if call.measures else 2, 2, dtype=jnp.int32)
    kept = Kept(parts, ["p_codes"] * call.keep_p + ["scores"] * call.keep_s)

    def body(carry, block, tile):
        rows, o, largest, counts, matrices = carry
        own = jax.tree.map(lambda x: parts.block(x, block), rows)
        seen = parts.seen(block, tile)
        s = parts.scores(block, tile)
        if call.keep_s:
            matrices = kept.put(
                matrices,
                "scores",
                block,
                tile,
                jnp.where(seen, s if call.fast else _scaled(s, factor), -jnp.inf),
            )
        if call.fast:
            p, c, own = softmax.step_fast(s, own, seen, variant)
        else:
            p, c, own = softmax.step(s, own, seen, variant, factor, call.arithmetic)
        scaled = (
            p
            if isinstance(variant.p_scale, float) and variant.p_scale == 1
            else exponentials.times(p, p_scale, call.arithmetic)
        )
        cast = operands.narrow(scaled, variant)
        if observe:
            tile_counts = [
                operands.clipped(scaled, variant.fmt),
                operands.lost(p, cast, variant.fmt),
            ]
            tile_counts += [parts.pairs(seen)] if call.measures else []
            largest, counts = (
                jnp.maximum(largest, jnp.max(p)),
                attention_counts.add(counts, tile_counts),
            )
        if call.keep_p:
            matrices = kept.put(matrices, "p_codes", block, tile, operands.fp8(cast, variant))
        o_block = probability_value.add(parts.block(o, block), c, cast, parts, tile, p_scale_inv)
        rows = jax.tree.map(lambda x, y: parts.put_block(x, y, block), rows, own)
        return rows, parts.put_block(o, o_block, block), largest, counts, matrices

    start = rows, parts.zeros(b, n, g, t, d), largest, counts, kept.start
    rows, o, largest, counts, matrices = operands.loop(body, start, grid)
    total, maximum = softmax.total(rows, order), rows.maximum
    if inputs.sinks is not None:
        o, total, maximum = sinks.add(
            o, total, maximum, inputs.sinks, call, None if call.fast else factor
        )
    out = parts.ungrouped(probability_value.finish(o, total, parts))
    lse = (
        softmax.log_sum_fast(maximum, total, variant)
        if call.fast
        else softmax.log_sum(maximum, total, factor, variant)
    )
    rounded, amaxes = (
        _rounded(out, inputs, scales, call),
        {role: x.amax for role, x in tensors.items()},
    )
    if observe:
        amaxes |= {"s": lax.pmax(largest, call.over) if call.over else largest, "o": rounded.amax}
    if variant.out.bits == 8:
        tensors["o"] = rounded
    kept_matrices, totals = kept.whole(matrices), attention_counts.numbers(counts)
    totals = lax.psum(totals, call.over) if call.over and observe else totals
    p_fields = kept_matrices.get("p_codes"), p_scale, p_scale_inv
    own = counts if call.measures else None
    return Result(
        _values(rounded, variant),
        parts.ungrouped(lse),
        tensors,
        amaxes,
        totals[0],
        *p_fields,
        kept_matrices.get("scores"),
        totals[1],
        own,
    )


def _scaled(s: jax.Array, factor: jax.Array | None) -> jax.Array:
    """Scores with all factors: raw ones have theirs in the exponent."""
    return s if factor is None else moments.product(s, factor)


def _rounded(out: jax.Array, inputs: Inputs, scales: dict, call: DeviceCall) -> Heads:
    options: dict = {"heads": inputs.k.shape[1], "scale": scales.get("o"), "over": call.over}
    return heads.quantize(out, call.variant.out, *call.variant.output_scaling, **options)


def _values(rounded: Heads, variant: Variant) -> jax.Array:
    return moments.product(heads.values(rounded, variant.out), rounded.scale_inv)
