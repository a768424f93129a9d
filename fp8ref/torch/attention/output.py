"""The forward pass of attention in FP8 in the stated arithmetic, a tile of keys after another (spec
A-4 to A-11). ``fast.output``, the default, gives other roundings of sums for fewer launches.

    q8, k8, v8, scales     <- amax, scale, cast                          operands.quantize
    for each tile:
        s = q8 @ k8.T      [Tq x G, D] @ [D, keys], a GEMM for each head of keys
        p, c, sums         <- maximum, exponentials, sums of s           softmax.step
        o = o c + p8 @ v8  [Tq x G, keys] @ [keys, D]
    o, lse                 <- o / sum, scales

Memory is linear in the tokens: of one tile there are scores [B, H, Tq, keys], and of no more.
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fp8ref.spec.attention.variants import Variant
from fp8ref.torch.attention import products, softmax
from fp8ref.torch.attention import sinks as attention_sinks
from fp8ref.torch.attention.exponentials import divide, log, multiply_add, times
from fp8ref.torch.attention.operands import heads
from fp8ref.torch.attention.operands import operands as operands
from fp8ref.torch.attention.operands.heads import Heads
from fp8ref.torch.attention.operands.kept import Kept, Matrix, Tally
from fp8ref.torch.attention.operands.operands import Tile
from fp8ref.torch.attention.operands.problem import WHOLE, Documents, Problem, Report
from fp8ref.torch.gemm import hardware
from fp8ref.torch.quantize.scales import Scales

_LN2 = 0.693147182464599609375  # 3F317218


class Result(NamedTuple):
    """What a forward pass gives. Fields as in ``fp8ref.sim.attention``.

    o              float32 [B, H, Tq, D]: values of the output's format, times its scale_inv in FP8.
    lse            float32 [B, H, Tq]; -infinity of a row without keys or sink.
    tensors        the quantized q, k and v, and an FP8 output o, by role.
    amaxes         of q, k, v by their groups; of s, the unrounded probabilities, and of o,
                   unrounded.
    saturated      int64 (): probabilities that the cast clipped, on this rank.
    lost           int64 (): probabilities of at least 2^-126 that the cast made 0, on this rank.
    p_codes        uint8 [B, H, Tq, Tk]: the probabilities as they were cast; None unless asked for.
    scale_p        what probabilities were multiplied by before their cast.
    scale_inv_p    what their codes are multiplied by.
    scores         float32 [B, H, Tq, Tk]: with all factors, under the variant's base, -infinity of
                   a key that is not seen; None unless asked for.
    documents      of queries and of keys, and ``sinks``: what ``backward`` needs of them.
    """

    o: Tensor
    lse: Tensor
    tensors: dict[str, Heads]
    amaxes: dict[str, Tensor]
    saturated: Tensor
    p_codes: Tensor | None
    scale_p: Tensor
    scale_inv_p: Tensor
    scores: Tensor | None = None
    lost: Tensor | None = None
    documents: Documents = WHOLE
    sinks: Tensor | None = None


def run(
    tensors: dict[str, Heads], problem: Problem, *, report: Report, keep: Collection[Matrix] = ()
) -> Result:
    """The pass, of quantized q, k and v.

    Order:    A-6 to A-11, with a promotion after each tile: a GEMM begins at +0.
    Raises:   ValueError: MX blocks under simulated hardware.
    """
    variant, call, rows = problem.variant, problem.call, problem.shape.rows
    device = tensors["q"].codes.device
    check_hardware(variant)
    q, k, v = _layouts(tensors, problem)
    scale_p = operands.probability_scale(problem, device)
    state = softmax.start(rows, variant.sum_order, device)
    o = torch.zeros(*rows, v.shape[2], device=device, dtype=torch.float32)
    tally = Tally(variant.fmt, report, device)
    kept = Kept(keep, (*rows, k.shape[2]), device)
    for tile in operands.tiles(problem):
        factors = operands.score_factors(tensors, tile, problem)
        s, factors = operands.capped(scores(q, k, tile, variant), factors, call)
        old = softmax.Rows(state.maximum[:, :, tile.rows], state.sums[:, :, tile.rows])
        visible = operands.seen(tile, problem, device)
        p, c, new = softmax.step(s, old, visible, variant, factors, call.arithmetic)
        p8 = heads.codes(p, variant.fmt, None if variant.p_scale == 1 else scale_p.scale)
        if report != "nothing":
            tally.enlarge(p.amax())
        tally.count(p, scale_p.scale)
        if "scores" in kept:
            s = softmax.scaled(s, factors)
            s = s if visible is None else torch.where(visible, s, -torch.inf)
            kept.put("scores", tile.place, s)
        kept.put("p_codes", tile.place, p8)
        state.maximum[:, :, tile.rows] = new.maximum
        state.sums[:, :, tile.rows] = new.sums
        values = _values(p8, v, tile, tensors["v"].scale_inv, scale_p, variant)
        o[:, :, tile.rows] = times(o[:, :, tile.rows], c[..., None]) + values
    o, lse = _divided(o, state, tensors, problem)
    return result(o, lse, tensors, tally, kept, scale_p, problem)


def _values(
    p8: Tensor, v: Tensor, tile: Tile, scale_inv: Tensor, scale_p: Scales, variant: Variant
) -> Tensor:
    """What a tile adds to the output (A-9); scale_inv is v's."""
    blocks = variant.granularity == "mx_1x32"
    low = p8.float() * scale_p.scale_inv if blocks else p8  # P is dequantized, as v is
    values = products.rows("values", low, v[:, :, :, tile.keys].contiguous(), variant)
    if variant.out_scales == "end" or blocks:
        return values
    values = times(values, operands.key_scale(scale_inv, tile, variant))
    return values if variant.p_scale == 1 else times(values, scale_p.scale_inv)


def _divided(
    o: Tensor, state: softmax.Rows, tensors: dict[str, Heads], problem: Problem
) -> tuple[Tensor, Tensor]:
    """The output [B, H, Tq, D] and LSE from the sums over tiles (A-10, A-11)."""
    variant, shape = problem.variant, problem.shape
    total, maximum = softmax.total(state.sums, variant.sum_order), state.maximum
    factor = operands.raw_factor(tensors, problem) if variant.scores == "raw" else 1.0
    if problem.sinks is not None:
        raw = factor if variant.scores == "raw" else None
        row_sinks = attention_sinks.by_rows(problem.sinks, shape)
        o, total, maximum = attention_sinks.add(o, total, maximum, row_sinks, raw, problem.call)
    scale_inv = None
    if variant.out_scales == "end" and variant.granularity is not None:
        scale_inv = tensors["v"].scale_inv
        scale_inv = scale_inv[..., None] if variant.granularity == "head" else scale_inv
    lse = log_sum(maximum, total, factor, variant)
    o = operands.by_head(_finish(o, total, scale_inv, variant), shape)
    return o, operands.by_head(lse[..., None], shape)[..., 0]


def check_hardware(variant: Variant) -> None:
    """ValueError for MX blocks under simulated hardware."""
    if variant.granularity == "mx_1x32" and hardware.active():
        raise ValueError(
            "attention dequantizes MX blocks, so simulated hardware cannot multiply them. Use "
            "another variant, or leave the context."
        )


def scores(q: Tensor, k: Tensor, tile: Tile, variant: Variant) -> Tensor:
    """q [B, Hkv, Tq, G, D] x k [B, Hkv, Tk, D] -> [B, Hkv, rows, G, keys] (A-4)."""
    return products.rows("scores", q[:, :, tile.rows], k[:, :, tile.keys], variant)


def log_sum(maximum: Tensor, total: Tensor, factor: Tensor | float, variant: Variant) -> Tensor:
    """The log-sum-exp of rows (A-11)."""
    empty = total == 0
    maximum, total = torch.where(empty, 0.0, maximum), torch.where(empty, 1.0, total)
    row_factor = factor[..., 0] if isinstance(factor, Tensor) and factor.ndim else factor
    if variant.lse == "fused":
        product = (
            times(row_factor, _LN2)
            if isinstance(row_factor, Tensor)
            else float(np.float32(row_factor) * np.float32(_LN2))
        )
        lse = multiply_add(maximum, product, log(total * 2.0**-variant.offset, "e"))
    elif variant.base == "2":
        scaled = times(maximum, row_factor) if variant.scores == "raw" else maximum
        lse = times(scaled + (log(total, "2") - float(variant.offset)), _LN2)
    else:
        lse = maximum + log(total, "e")
    return torch.where(empty, -torch.inf, lse)


def _layouts(tensors: dict[str, Heads], problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, Hkv, Tq, G, D], k [B, Hkv, Tk, D], v [B, Hkv, D, Tk]: codes; MX dequantized."""
    qkv = [tensors[role] for role in ("q", "k", "v")]
    blocks = problem.variant.granularity == "mx_1x32"
    q, k, v = (heads.dequantize(x) if blocks else x.codes for x in qkv)
    grouped = operands.grouped(q, problem.shape)
    return grouped, operands.along_features(k), operands.along_tokens(v)


def _finish(o: Tensor, total: Tensor, scale_inv: Tensor | None, variant: Variant) -> Tensor:
    """The output from the sums (A-10)."""
    if variant.finish == "divide":
        o = o if scale_inv is None else times(o, scale_inv)
        return divide(o, total.clamp(min=1.0)[..., None])
    ones, empty = torch.ones_like(total), total == 0
    inverse = torch.where(empty, 0.0, divide(ones, torch.where(empty, ones, total)))[..., None]
    return o * (inverse if scale_inv is None else inverse * scale_inv)


def result(
    out: Tensor,
    lse: Tensor,
    tensors: dict[str, Heads],
    tally: Tally,
    kept: Kept,
    scale_p: Scales,
    problem: Problem,
) -> Result:
    """The output in its format, and the amaxes of all ranks."""
    largest, low = tally.largest, problem.variant.out.bits == 8
    matrices = kept.whole(problem.shape)
    amaxes = {role: x.amax for role, x in tensors.items()} | {"s": largest, "o": largest}
    if tally.report != "nothing" or (low and "o" not in problem.scales):
        amaxes["s"], amaxes["o"] = operands.share([largest, out.abs().amax()], problem.call)
    values, o = operands.output("o", out, amaxes["o"], problem)
    return Result(
        values,
        lse,
        {**tensors, "o": o} if low else tensors,
        amaxes,
        tally.saturated,
        matrices.get("p_codes"),
        *scale_p,
        scores=matrices.get("scores"),
        lost=tally.lost,
    )
