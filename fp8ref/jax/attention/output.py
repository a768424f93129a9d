"""The forward pass of FP8 attention, over blocks of queries and tiles of keys (spec A-4 to A-11).

``operands`` cuts blocks and tiles, ``softmax`` makes probabilities, ``probability_value`` sums.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp8ref.jax.attention import counts as attention_counts
from fp8ref.jax.attention import exponentials, probability_value, sinks, softmax
from fp8ref.jax.attention import real as real
from fp8ref.jax.attention.operands import context, heads
from fp8ref.jax.attention.operands import operands as operands
from fp8ref.jax.attention.operands.heads import Heads
from fp8ref.jax.attention.operands.inputs import DeviceCall, Inputs
from fp8ref.jax.attention.operands.kept import Kept
from fp8ref.jax.attention.operands.operands import Parts
from fp8ref.jax.states import moments
from fp8ref.jax.transforms.eager import as_one_program
from fp8ref.spec.attention import variants as data


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

    o: Array
    lse: Array
    tensors: dict[str, Heads]
    amaxes: dict[str, Array]
    saturated: Array
    p_codes: Array | None
    scale_p: Array
    scale_inv_p: Array
    scores: Array | None = None
    lost: Array | None = None
    counts: Array | None = None
    documents: tuple[Array, Array] | None = None
    sinks: Array | None = None


class Passed(NamedTuple):
    """What the loop over blocks and tiles carries: maxima and sums of rows, o [B, N, G, T, D]
    before its end (A-10), the largest probability, how many were clipped and lost, and if measured
    all that are seen; and the matrices of ``Kept``."""

    rows: softmax.Rows
    o: Array
    largest: Array
    counts: Array
    matrices: dict[str, Array]


@as_one_program("call", "observe", unnamed={"call": DeviceCall.unnamed})
def run(inputs: Inputs, scales: dict, call: DeviceCall, *, observe: bool = False) -> Result:
    """One pass over all blocks and tiles.

    observe   also count clipped and lost probabilities, and take amaxes of what has no scale by
              them.
    """
    if call.variant.real:
        return _real(inputs, call)
    variant = call.variant
    tensors = operands.quantize(inputs, call, scales)
    p_scale, p_scale_inv = operands.probability_scale(variant, scales)
    whole = context.gathered(tensors, call)
    parts = Parts(context.problem(inputs, whole, call), call, whole)
    passed = _passed(parts, p_scale, p_scale_inv, observe=observe)
    o, lse = _end(passed, parts, inputs.sinks)
    count, scaling = inputs.k.shape[1], variant.output_scaling
    rounded = heads.quantize(
        o, variant.out, *scaling, heads=count, scale=scales.get("o"), over=call.over
    )
    amaxes = {role: x.amax for role, x in tensors.items()}
    counts = attention_counts.numbers(passed.counts)
    if observe:
        amaxes |= {"s": parts.over_devices(passed.largest), "o": rounded.amax}
        counts = lax.psum(counts, call.over) if call.over else counts
    if variant.out.bits == 8:
        tensors["o"] = rounded
    return Result(
        moments.product(heads.values(rounded, variant.out), rounded.scale_inv),
        lse,
        tensors,
        amaxes,
        saturated=counts[0],
        p_codes=passed.matrices.get("p_codes"),
        scale_p=p_scale,
        scale_inv_p=p_scale_inv,
        scores=passed.matrices.get("scores"),
        lost=counts[1],
        counts=passed.counts if call.measures else None,
    )


def _real(inputs: Inputs, call: DeviceCall) -> Result:
    o, lse = real.forward(inputs, call)
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "o": o}
    amaxes = {role: heads.amax(x, None, heads=1) for role, x in tensors.items()}
    one = jnp.ones((), jnp.float32)
    return Result(o, lse, {}, amaxes | {"s": one}, jnp.int32(0), None, one, one)


def _passed(parts: Parts, p_scale: Array, p_scale_inv: Array, *, observe: bool) -> Passed:
    """The loop over blocks and tiles, with whole matrices."""
    call, variant = parts.call, parts.variant
    factor = parts.raw_factor() if variant.scores == "raw" else None
    unscaled = isinstance(variant.p_scale, float) and variant.p_scale == 1
    b, n, g, t, d = parts.q.shape
    kept = Kept(parts, ["p_codes"] * call.keep_p + ["scores"] * call.keep_s)

    def body(carry: Passed, block, tile) -> Passed:
        rows, o, largest, counts, matrices = carry
        own = jax.tree.map(lambda x: parts.block(x, block), rows)
        seen = parts.seen(block, tile)
        s, _ = parts.scores_and_slope(block, tile)
        if call.keep_s:
            # raw ones have their factor in the exponent
            scaled = s if call.fast or factor is None else moments.product(s, factor)
            scaled = jnp.where(seen, scaled, -jnp.inf)
            matrices = kept.put(matrices, "scores", block, tile, scaled)
        if call.fast:
            p, c, own = softmax.step_fast(s, own, seen, variant)
        else:
            p, c, own = softmax.step(s, own, seen, variant, factor, call.arithmetic)
        scaled = p if unscaled else exponentials.times(p, p_scale, call.arithmetic)
        cast = operands.narrow(scaled, variant)
        if observe:
            clipped = operands.clipped(scaled, variant.fmt)
            tile_counts = [clipped, operands.lost(p, cast, variant.fmt)]
            tile_counts += [parts.pairs(seen)] if call.measures else []
            largest = jnp.maximum(largest, jnp.max(p))
            counts = attention_counts.add(counts, tile_counts)
        if call.keep_p:
            matrices = kept.put(matrices, "p_codes", block, tile, operands.fp8(cast, variant))
        o_block = probability_value.add(parts.block(o, block), c, cast, parts, tile, p_scale_inv)
        rows = jax.tree.map(lambda x, y: parts.put_block(x, y, block), rows, own)
        return Passed(rows, parts.put_block(o, o_block, block), largest, counts, matrices)

    rows = softmax.start(parts.zeros(b, n, g, t), "tile" if call.fast else variant.sum_order)
    counts = parts.zeros(3 if call.measures else 2, 2, dtype=jnp.int32)
    start = Passed(rows, parts.zeros(b, n, g, t, d), parts.zeros(), counts, kept.start)
    passed = operands.loop(body, start, parts.grid)
    return passed._replace(matrices=kept.whole(passed.matrices))


def _end(passed: Passed, parts: Parts, row_sinks: Array | None) -> tuple[Array, Array]:
    """(o, LSE) from the sums, [B, H, T, ...]."""
    call, variant = parts.call, parts.variant
    factor = parts.raw_factor() if variant.scores == "raw" and not call.fast else None
    order: data.SumOrder = "tile" if call.fast else variant.sum_order
    o, maximum, total = passed.o, passed.rows.maximum, softmax.total(passed.rows, order)
    if row_sinks is not None:
        o, total, maximum = sinks.add(o, total, maximum, row_sinks, call, factor)
    out = parts.ungrouped(probability_value.finish(o, total, parts))
    if call.fast:
        return out, parts.ungrouped(softmax.log_sum_fast(maximum, total, variant))
    return out, parts.ungrouped(softmax.log_sum(maximum, total, factor, variant))
