"""The forward pass of attention in the fast form: torch's own sums and functions (spec A-18).

    for each tile of keys:
        s = q @ k.T scale      [Tq x G, D] @ [D, keys], all sequences and heads at once
        p = exp(s - m)         in the memory of s
        o = o c + p8 @ v       [Tq x G, keys] @ [keys, D]
    o, lse                     <- o / sum

Codes and scales, tiles and their order, the rescale rule and the cast of probabilities are those of
``output``.
"""

import math
from collections.abc import Collection

import torch
from torch import Tensor

from fp8ref.spec.attention.variants import Variant
from fp8ref.torch.attention import output
from fp8ref.torch.attention import sinks as attention_sinks
from fp8ref.torch.attention.fast.operands import Layout
from fp8ref.torch.attention.observer import multiplying
from fp8ref.torch.attention.operands import operands as operands
from fp8ref.torch.attention.operands.heads import Heads
from fp8ref.torch.attention.operands.inputs import Report, Shape, Spec
from fp8ref.torch.attention.operands.kept import Kept, Matrix
from fp8ref.torch.attention.output import Documents, Result
from fp8ref.torch.gemm import batched as batched_gemm
from fp8ref.torch.quantize import cast


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

    Order:    A-18.
    """
    output.check_hardware(spec.variant)
    variant, layout = spec.variant, Layout(tensors, spec, shape)
    device, fmt, low = layout.q.device, variant.fmt, variant.fmt.bits == 8
    scale_p, scale_inv_p = operands.probability_scale(variant, role_scales, device)
    n, rows, width = len(layout.q), layout.q.shape[1], layout.v.shape[-1]
    maximum, sums = (
        torch.full((n, rows), -torch.inf, device=device, dtype=torch.float32),
        torch.zeros(n, rows, device=device, dtype=torch.float32),
    )
    o = torch.zeros(n, rows, width, device=device, dtype=torch.float32)
    largest, saturated = (
        torch.zeros((), device=device, dtype=torch.float32),
        torch.zeros((), dtype=torch.int64, device=device),
    )
    lost = torch.zeros_like(saturated)
    kept = Kept(keep, (n, rows, layout.k.shape[1]), device)
    # GEMMs of codes take them along the tokens.
    v = layout.v.transpose(1, 2).contiguous() if layout.codes else layout.v.transpose(1, 2)
    inside = _inside(variant, role_scales)
    for tile in operands.tiles(spec, shape):
        at, hidden = layout.at(tile), layout.hidden(tile, documents)
        for part in layout.parts(tile):
            s = layout.scores(part, tile, hidden)
            kept.put("scores", (part, at, tile.keys), s)
            old = maximum[part, at]
            new = _maximum(old, s.amax(-1), variant)
            # Without documents a tile's rows each see a key of it.
            shift = new if documents.q is None else finite(new)
            c = exponential_(old - shift, variant)
            p = exponential_(
                s.sub_((shift - float(variant.offset) if variant.offset else shift)[..., None]),
                variant,
            )
            old.copy_(new)
            sums[part, at].mul_(c).add_(p.sum(-1))
            if report != "nothing":
                largest = torch.maximum(largest, p.amax())
            if report == "all":
                saturated = saturated + output.count_clipped(p, scale_p, variant)
                lost = lost + _lost(p, scale_p, variant)
            p = p.mul_(scale_p) if low and variant.p_scale != 1 else p
            if "p_codes" in kept:
                kept.put("p_codes", (part, at, tile.keys), cast.to_fp8(p, fmt))
            p8, v_tile, o_tile = (
                layout.narrow(p, fmt, part, tile, inside=inside),
                v[part, :, tile.keys],
                o[part, at].mul_(c[..., None]),
            )
            if not layout.codes:
                with multiplying("values"):
                    o_tile.baddbmm_(p8, v_tile.transpose(1, 2))
                continue
            with multiplying("values"):
                tile_output = batched_gemm.products(p8, v_tile, fast=layout.fast)
            if layout.codes and variant.granularity == "rows_128":
                tile_output = (
                    tile_output
                    * layout.head_scale(
                        operands.key_scale(tensors["v"].scale_inv, tile, variant)
                    ).view(n, 1, 1)[part]
                )
            o_tile.add_(tile_output)
    if sinks is not None:
        row_sinks = (
            attention_sinks.by_rows(sinks, shape)
            .expand(shape.batch, -1, shape.queries, -1)
            .flatten(2, 3)
            .flatten(0, 1)
        )
        o, sums, maximum = attention_sinks.add(o, sums, maximum, row_sinks, None, spec)
    factor = _at_end(layout, scale_inv_p)
    inverse = _inverse(
        sums, factor.view(-1, 1) if isinstance(factor, Tensor) and factor.ndim else factor, variant
    )
    o = o.mul_(inverse[..., None])
    out = layout.by_head(o)
    lse = layout.by_head(_log_sum(maximum, sums, variant)[..., None])[..., 0]
    return output.result(
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


def _lost(p: Tensor, scale: Tensor, variant: Variant) -> Tensor | int:
    """How many probabilities the cast makes 0, whose scaled numbers are at most half of the least
    one.
    """
    if variant.fmt.bits != 8:
        return 0
    return output.count_lost(p, cast.to_fp8(p * scale, variant.fmt), variant.fmt)


def _inside(variant: Variant, role_scales: dict[str, Tensor]) -> bool:
    """Whether no probability leaves the format's range, by A-8's bound with a unit of 2^-10 for
    roundings: the scale is the variant's own.
    """
    if variant.fmt.bits != 8 or "s" in role_scales:
        return False
    # The scale of a state without one is max / 1, rounded down to a power of two or not at all.
    scale = variant.fmt.max if variant.p_scale == "state" else variant.p_scale
    return (
        variant.largest_probability * scale * (1 + (variant.base == "2") * 2.0**-10)
        <= variant.fmt.max
    )


def exponential_(x: Tensor, variant: Variant) -> Tensor:
    """2^x or e^x, in the memory of x."""
    return x.exp2_() if variant.base == "2" else x.exp_()


def finite(maximum: Tensor) -> Tensor:
    """The maximum, and 0 of a row that has seen no key."""
    return torch.where(maximum == -torch.inf, 0.0, maximum)


def _maximum(old: Tensor, largest: Tensor, variant: Variant) -> Tensor:
    """The rescale rule (A-7), of scores under the variant's base."""
    new = torch.maximum(old, largest)
    return torch.where(new - old <= variant.threshold, old, new) if variant.threshold else new


def _at_end(layout: Layout, scale_inv_p: Tensor) -> Tensor | float:
    """What outputs are multiplied by: the scales of v and P that no operand has."""
    variant, factor = layout.variant, 1.0
    p_factor = scale_inv_p if variant.fmt.bits == 8 and variant.out_scales == "tile" else factor
    if layout.codes and variant.granularity in ("tensor", "head"):
        return layout.head_scale(layout.tensors["v"].scale_inv) * p_factor
    return p_factor


def _inverse(sums: Tensor, factor: Tensor | float, variant: Variant) -> Tensor:
    """factor / the sums of rows (A-10); of a row without keys a number that its output 0 is
    multiplied by.
    """
    whole = sums.clamp(min=1.0) if variant.finish == "divide" else torch.where(sums == 0, 1.0, sums)
    return factor / whole


def _log_sum(maximum: Tensor, sums: Tensor, variant: Variant) -> Tensor:
    """The log-sum-exp of rows (A-11), in torch's float32."""
    empty = sums == 0
    maximum, sums = torch.where(empty, 0.0, maximum), torch.where(empty, 1.0, sums)
    lse = (
        (maximum + (sums.log2() - float(variant.offset))) * math.log(2)
        if variant.base == "2"
        else maximum + sums.log()
    )
    return torch.where(empty, -torch.inf, lse)
