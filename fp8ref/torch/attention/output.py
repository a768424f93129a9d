"""The forward pass of attention in FP8 in the stated arithmetic, a tile of keys after another (spec
A-4 to A-11). ``fast.output``, the default, gives other roundings of sums for fewer launches.

    q8, k8, v8, scales     <- amax, scale, cast                          attention_operands,
                           head_scaling
    for each tile:
        s = q8 @ k8.T      [Tq x G, D] @ [D, keys], a GEMM for each head of keys
        p, c, sums         <- maximum, exponentials, sums of s           online_softmax
        o = o c + p8 @ v8  [Tq x G, keys] @ [keys, D]
    o, lse                 <- o / sum, scales

Memory is linear in the tokens: of one tile there are scores [B, H, Tq, keys], and of no more.
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fp8ref.formats import Format
from fp8ref.spec.attention.variants import Variant
from fp8ref.torch.attention import sinks as attention_sinks
from fp8ref.torch.attention import softmax
from fp8ref.torch.attention.exponentials import divide, log, multiply_add, times
from fp8ref.torch.attention.observer import multiplying
from fp8ref.torch.attention.operands import heads
from fp8ref.torch.attention.operands import operands as operands
from fp8ref.torch.attention.operands.heads import Heads
from fp8ref.torch.attention.operands.inputs import Report, Shape, Spec
from fp8ref.torch.attention.operands.kept import Kept, Matrix
from fp8ref.torch.gemm import hardware
from fp8ref.torch.quantize import cast, float_values

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


class Documents(NamedTuple):
    """Integers [B, T] of queries and of keys, padded to the tiles; None without any."""

    q: Tensor | None
    k: Tensor | None


def padded_documents(q: Tensor | None, k: Tensor | None) -> Documents:
    """Documents with -2 for padding among and behind the queries and -1 for that of keys, which
    equal none (A-3).
    """
    if q is None or k is None:
        return Documents(None, None)
    q, k = (
        x.masked_fill(x < 0, value) if x.dtype.is_signed else x for x, value in ((q, -2), (k, -1))
    )
    return Documents(
        torch.nn.functional.pad(q, (0, -q.shape[1] % heads.MX), value=-2),
        torch.nn.functional.pad(k, (0, -k.shape[1] % operands.STEP), value=-1),
    )


def run(
    tensors: dict[str, Heads],
    spec: Spec,
    shape: Shape,
    documents: Documents,
    role_scales: dict[str, Tensor],
    *,
    report: Report,
    keep: Collection[Matrix] = (),
    sinks: Tensor | None = None,
) -> Result:
    """The pass, of quantized q, k and v.

    Order:    A-6 to A-11, with a promotion after each tile: a GEMM begins at +0.
    Raises:   ValueError: MX blocks under simulated hardware.
    """
    variant, device = spec.variant, tensors["q"].codes.device
    check_hardware(variant)
    q, k, v = _layouts(tensors, spec, shape)
    scale_p, scale_inv_p = operands.probability_scale(variant, role_scales, device)
    if variant.granularity == "mx_1x32":
        operand_scale, output_scale = scale_inv_p, None  # P is dequantized, as v is
    else:
        operand_scale, output_scale = None, scale_inv_p
    rows = (shape.batch, shape.key_heads, shape.queries, shape.group)
    state = softmax.start(rows, variant.sum_order, device)
    o = torch.zeros(*rows, v.shape[2], device=device, dtype=torch.float32)
    largest, saturated = (
        torch.zeros((), device=device, dtype=torch.float32),
        torch.zeros((), dtype=torch.int64, device=device),
    )
    lost = torch.zeros_like(saturated)
    kept = Kept(keep, (*rows, k.shape[2]), device)
    for tile in operands.tiles(spec, shape):
        s, factors = operands.capped(
            scores(q, k, tile, variant), operands.score_factors(tensors, tile, spec, shape), spec
        )
        old = softmax.Rows(state.maximum[:, :, tile.rows], state.sums[:, :, tile.rows])
        visible = operands.seen(tile, spec, shape, documents, device)
        p, c, new = softmax.step(s, old, visible, variant, factors, spec.arithmetic)
        p8 = round_probabilities(p, scale_p, variant)
        if report != "nothing":
            largest = torch.maximum(largest, p.amax())
        if report == "all":
            saturated = saturated + count_clipped(p, scale_p, variant)
            lost = lost + count_lost(p, p8, variant.fmt)
        at = (slice(None), slice(None), tile.rows, slice(None), tile.keys)
        if "scores" in kept:
            kept.put("scores", at, _visible(softmax.scaled(s, factors), visible))
        kept.put("p_codes", at, p8)
        low = p8 if operand_scale is None else p8.float() * operand_scale
        with multiplying("values"):
            tile_output = operands.products(
                low.flatten(2, 3), v[:, :, :, tile.keys].contiguous(), variant
            ).view(*s.shape[:-1], -1)
        if variant.out_scales == "tile" and output_scale is not None:
            tile_output = times(
                tile_output, operands.key_scale(tensors["v"].scale_inv, tile, variant)
            )
            tile_output = tile_output if variant.p_scale == 1 else times(tile_output, output_scale)
        state.maximum[:, :, tile.rows] = new.maximum
        state.sums[:, :, tile.rows] = new.sums
        o[:, :, tile.rows] = times(o[:, :, tile.rows], c[..., None]) + tile_output
    total, maximum = softmax.total(state.sums, variant.sum_order), state.maximum
    factor = operands.raw_factor(tensors, spec, shape) if variant.scores == "raw" else 1.0
    if sinks is not None:
        row_sinks = attention_sinks.by_rows(sinks, shape)
        o, total, maximum = attention_sinks.add(
            o, total, maximum, row_sinks, factor if variant.scores == "raw" else None, spec
        )
    at_end = (
        operands.key_scale(tensors["v"].scale_inv, operands.Tile(0, 0, 0, 0, 0, False), variant)
        if _scaled_at_end(variant)
        else None
    )
    out = operands.by_head(_finish(o, total, at_end, variant), shape)
    lse = operands.by_head(log_sum(maximum, total, factor, variant)[..., None], shape)[..., 0]
    return result(
        out,
        lse,
        tensors,
        largest,
        saturated,
        kept,
        (scale_p, scale_inv_p),
        spec,
        shape,
        role_scales,
        report=report,
    )._replace(lost=lost)


def _visible(x: Tensor, visible: Tensor | None) -> Tensor:
    """Scores, -infinity of keys that are not seen."""
    return x if visible is None else torch.where(visible, x, -torch.inf)


def check_hardware(variant: Variant) -> None:
    """ValueError for MX blocks under simulated hardware."""
    if variant.granularity == "mx_1x32" and hardware.active():
        raise ValueError(
            "attention multiplies MX blocks dequantized, not by simulated hardware. Use another "
            "variant, or leave the context."
        )


def scores(q: Tensor, k: Tensor, tile: operands.Tile, variant: Variant) -> Tensor:
    """Sums of products of q [B, Hkv, Tq, G, D] and k [B, Hkv, Tk, D]: [B, Hkv, rows, G, keys]
    (A-4).
    """
    a = q[:, :, tile.rows]
    with multiplying("scores"):
        return operands.products(a.flatten(2, 3), k[:, :, tile.keys], variant).view(
            *a.shape[:-1], tile.width
        )


def round_probabilities(p: Tensor, scale: Tensor, variant: Variant) -> Tensor:
    """p times its scale, if that is not 1, rounded to the variant's format and saturated (A-8)."""
    if variant.fmt.bits != 8:
        return heads.rounded(p, variant.fmt)
    return cast.to_fp8(p if variant.p_scale == 1 else p * scale, variant.fmt)


def count_clipped(p: Tensor, scale: Tensor, variant: Variant) -> Tensor | int:
    """How many probabilities leave the format's range."""
    if variant.fmt.bits != 8:
        return 0
    return heads.above_range(p if variant.p_scale == 1 else p * scale, variant.fmt).sum()


def count_lost(x: Tensor, cast_x: Tensor, fmt: Format) -> Tensor | int:
    """How many numbers of at least 2^-126 a cast to FP8 made 0 (A-12); cast_x has codes, or
    numbers.
    """
    if fmt.bits != 8:
        return 0
    zero = (cast_x.view(torch.uint8) & 0x7F) == 0 if cast_x.dtype.itemsize == 1 else cast_x == 0
    return (zero & (x.abs() >= torch.finfo(torch.float32).tiny)).sum()


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


def output_scaling(variant: Variant) -> tuple:
    """(granularity, policy) of an output or a gradient: one scale, or none in high precision."""
    return ("tensor" if variant.out.bits == 8 else None), (
        "te_current" if variant.granularity == "mx_1x32" else variant.policy
    )


def _layouts(tensors: dict[str, Heads], spec: Spec, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, Hkv, Tq, G, D], k [B, Hkv, Tk, D] and v [B, Hkv, D, Tk], as GEMMs take them: codes; MX
    dequantized.
    """
    if spec.variant.granularity == "mx_1x32":
        q, k = heads.dequantize(tensors["q"]), heads.dequantize(tensors["k"])
        v = heads.dequantize(tensors["v"], along_tokens=True)
    else:
        q, k, v = (tensors[role].codes for role in ("q", "k", "v"))
    return operands.grouped(q, shape), operands.along_features(k), operands.along_tokens(v)


def _scaled_at_end(variant: Variant) -> bool:
    return variant.out_scales == "end" and variant.granularity is not None


def _finish(o: Tensor, total: Tensor, scale_inv: Tensor | None, variant: Variant) -> Tensor:
    """The output of the sums (A-10)."""
    if variant.finish == "divide":
        o = o if scale_inv is None else times(o, scale_inv)
        return divide(o, total.clamp(min=1.0)[..., None])
    ones = torch.ones_like(total)
    inverse = torch.where(total == 0, 0.0, divide(ones, torch.where(total == 0, ones, total)))[
        ..., None
    ]
    return o * (inverse if scale_inv is None else inverse * scale_inv)


def result(
    out,
    lse,
    tensors,
    largest,
    saturated,
    kept: Kept,
    scales_p,
    spec: Spec,
    shape: Shape,
    role_scales,
    *,
    report: Report,
) -> Result:
    """The output in its format, and the amaxes of all ranks."""
    variant = spec.variant
    amaxes = {role: t.amax for role, t in tensors.items()}
    amaxes["s"], amaxes["o"] = largest, largest
    if report != "nothing" or (variant.out.bits == 8 and "o" not in role_scales):
        amaxes["s"], amaxes["o"] = operands.share([largest, out.abs().amax()], spec)
    o = heads.quantize(
        out,
        variant.out,
        *output_scaling(variant),
        amax_of_groups=amaxes["o"],
        scale=role_scales.get("o"),
    )
    if variant.out.bits == 8:
        tensors = {**tensors, "o": o}
    values = (
        float_values.decode(o.codes).mul_(o.scale_inv) if variant.out.bits == 8 else o.codes.float()
    )
    forward_result = Result(
        values, lse, tensors, amaxes, saturated, kept.whole("p_codes", shape), *scales_p
    )
    return forward_result._replace(scores=kept.whole("scores", shape))
